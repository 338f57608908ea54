//! Maps of BPF: bpf(2).
//!
//! Programs of the kernel share maps with processes. One that only processes of the tree have is
//! all that its entries say; who else has it is looked up in the kernel's memory.
//!
//! - What: maps of BPF
//! - Kept: arrays and hashes, also with values of each processor; hashes that forget what was not
//!   used lately (LRU), but not in which order that was; tries (LPM), queues and stacks; with name,
//!   flags, node, entries, and whether they are frozen; several descriptors of one, with their
//!   access.
//! - Refused: "maps of kind … are not there yet"; "its values have types (BTF)"; "its keys or
//!   values are of a device"; "its flags … are not known"; "each processor has its own order of
//!   use"; "it belongs to one program"; "a program or another map uses it"; "it is pinned, or
//!   somebody outside of the tree has it"; "somebody outside of the tree has its descriptor as
//!   well, or it is also on its way in a socket"; "it is on its way in a socket, and who else has
//!   it is not known"; "it is mapped"; "who has it cannot be looked up: …".
//! - At a restore: "the BPF map … has values of … processors, and there can be … here".
//! - CRIU 4.2: keeps hash and array maps where it was built with libbpf, which Debian's is not.

mod contents;
mod holders;

use std::os::fd::{AsFd, OwnedFd};

use prost::Message;
use rustix::fs::OFlags;
use sys::bpf_map::{self, Definition};

use self::contents::Contents;
use super::{DumpContext, Kind, Open, RestoreContext, status, tags};
use crate::{Error, Result};

/// The target of a map's link in /proc/PID/fd.
pub const LINK: &[u8] = b"anon_inode:bpf-map";

/// See the file.
pub struct BpfMap;

/// One description of a map.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// The first description (by id) of this map: those with the same number share it.
    #[prost(uint32, tag = "1")]
    first: u32,
    /// `enum bpf_map_type`.
    #[prost(uint32, tag = "2")]
    kind: u32,
    /// The size of a key in bytes.
    #[prost(uint32, tag = "3")]
    key_bytes: u32,
    /// The size of a value in bytes.
    #[prost(uint32, tag = "4")]
    value_bytes: u32,
    /// How many entries there may be.
    #[prost(uint32, tag = "5")]
    max_entries: u32,
    /// `BPF_F_` bits of the map.
    #[prost(uint32, tag = "6")]
    map_flags: u32,
    /// Its name.
    #[prost(bytes = "vec", tag = "7")]
    name: Vec<u8>,
    /// The node of its memory, where one was chosen.
    #[prost(uint32, tag = "8")]
    numa_node: u32,
    /// Whether only programs may write to it (`BPF_MAP_FREEZE`).
    #[prost(bool, tag = "9")]
    frozen: bool,
    /// Access mode and status flags.
    #[prost(uint32, tag = "10")]
    flags: u32,
    /// What is in it; on the first description only.
    #[prost(message, optional, tag = "11")]
    contents: Option<Contents>,
}

/// What the kernel calls its kinds, from 1 on: `enum bpf_map_type`.
const KINDS: [&str; 34] = [
    "hash",
    "array",
    "prog_array",
    "perf_event_array",
    "percpu_hash",
    "percpu_array",
    "stack_trace",
    "cgroup_array",
    "lru_hash",
    "lru_percpu_hash",
    "lpm_trie",
    "array_of_maps",
    "hash_of_maps",
    "devmap",
    "sockmap",
    "cpumap",
    "xskmap",
    "sockhash",
    "cgroup_storage",
    "reuseport_sockarray",
    "percpu_cgroup_storage",
    "queue",
    "stack",
    "sk_storage",
    "devmap_hash",
    "struct_ops",
    "ringbuf",
    "inode_storage",
    "task_storage",
    "bloom_filter",
    "user_ringbuf",
    "cgrp_storage",
    "arena",
    "insn_array",
];
/// Those that are all that their entries say.
const KEPT: [&str; 9] = [
    "hash",
    "array",
    "percpu_hash",
    "percpu_array",
    "lru_hash",
    "lru_percpu_hash",
    "lpm_trie",
    "queue",
    "stack",
];
/// `BPF_F_NUMA_NODE`.
const NUMA_NODE: u32 = 1 << 2;
/// `BPF_F_NO_COMMON_LRU`.
const NO_COMMON_LRU: u32 = 1 << 1;
/// `BPF_F_MMAPABLE`.
const MAPPABLE: u32 = 1 << 10;
/// Flags of maps that are made with them again: also `BPF_F_NO_PREALLOC`, `BPF_F_ZERO_SEED`,
/// `BPF_F_RDONLY_PROG` and `BPF_F_WRONLY_PROG`.
const FLAGS: u32 = 1 | NUMA_NODE | 1 << 6 | 1 << 7 | 1 << 8 | MAPPABLE;
/// More than any key or value of the kernel's has.
const SIZE_MAX_BYTES: u32 = 1 << 28;

fn kind_name(kind: u32) -> &'static str {
    let at = usize::try_from(kind)
        .ok()
        .and_then(|kind| kind.checked_sub(1));
    at.and_then(|at| KINDS.get(at))
        .copied()
        .unwrap_or("unknown")
}

/// The number of the map behind a description, if it is one.
fn id_of<'a>(open: &'a Open<'_>) -> Option<&'a str> {
    open.info.field("map_id").filter(|_| BpfMap::claims(open))
}

impl Kind for BpfMap {
    type Record = Record;
    const TAG: u16 = tags::BPF_MAP;
    const NAME: &'static str = "BPF map";
    const LINK: Option<&'static [u8]> = Some(LINK);
    const LOOKED_UP: bool = true;

    fn claims(open: &Open<'_>) -> bool {
        open.link == LINK
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Record> {
        let failed = |error| Error::kernel(format!("ask {}", open.place()), error);
        let info = bpf_map::info(open.own()?).map_err(failed)?;
        let definition = &info.definition;
        check(open, &info)?;
        let looked_up = holders::look_up(open, cx, definition)?;
        let same = cx.all().iter().find(|other| id_of(other) == id_of(open));
        let mut record = Record {
            first: same.map_or(open.id.0, |first| first.id.0),
            kind: definition.kind,
            key_bytes: definition.key_bytes,
            value_bytes: definition.value_bytes,
            max_entries: definition.max_entries,
            map_flags: definition.flags,
            name: definition.name.clone(),
            numa_node: looked_up.numa_node,
            frozen: open.info.field("frozen") == Some("1"),
            flags: open.info.flags,
            contents: None,
        };
        if record.first == open.id.0 {
            let map = bpf_map::open(info.id, bpf_map::READ_ONLY).map_err(failed)?;
            let contents = Contents::dump(&map, &record, &looked_up, cx);
            record.contents = Some(contents.map_err(|error| match error {
                Error::Mismatch { what } => open.unsupported(&what, None),
                error => error,
            })?);
        }
        Ok(record)
    }

    fn check(record: &Record) -> Result<()> {
        status::check(Self::NAME, record.flags)?;
        let sizes = [record.key_bytes, record.value_bytes];
        let is_sound = KEPT.contains(&kind_name(record.kind))
            && sizes.iter().all(|size| *size <= SIZE_MAX_BYTES)
            && record.is_keyed() == (record.key_bytes > 0)
            && record.value_bytes > 0
            && record.map_flags & !FLAGS == 0
            && record.name.len() < bpf_map::NAME_BYTES
            && !record.name.contains(&0);
        match is_sound {
            true => Ok(()),
            false => Err(Error::corrupt(Self::NAME, "makes no sense")),
        }
    }

    fn describe(record: &Record) -> String {
        let entries = match &record.contents {
            Some(contents) => format!(" entries={}", contents.entries),
            None => String::new(),
        };
        let frozen = if record.frozen { " (frozen)" } else { "" };
        let (most, key, value) = (record.max_entries, record.key_bytes, record.value_bytes);
        let place = record.place();
        format!("{place}{frozen}{entries} room={most}x({key}+{value})")
    }

    fn open(record: &Record, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let flags = status::opening(record.flags);
        let key = (tags::BPF_MAP, u64::from(record.first));
        if !cx.shared().contains_key(&key) {
            let map = record.make(cx)?;
            cx.shared().insert(key, vec![map]);
        }
        let holder = cx.shared()[&key][0].as_fd();
        let access = match flags.intersection(OFlags::ACCMODE) {
            OFlags::RDONLY => bpf_map::READ_ONLY,
            OFlags::WRONLY => bpf_map::WRITE_ONLY,
            _ => 0,
        };
        let own = bpf_map::info(holder).and_then(|info| bpf_map::open(info.id, access));
        let own = own.map_err(|error| record.failed("open", error))?;
        if flags.intersects(status::SETTABLE) {
            status::set(&own, flags)?;
        }
        Ok(own)
    }
}

/// Refuses what a map has that is not known here.
fn check(open: &Open<'_>, info: &bpf_map::Info) -> Result<()> {
    let Definition { kind, flags, .. } = info.definition;
    let refuse = |why: &str| Err(open.unsupported(why, None));
    let name = kind_name(kind);
    if !KEPT.contains(&name) {
        return refuse(&format!("maps of kind {name} are not there yet"));
    }
    if info.is_typed {
        return refuse("its values have types (BTF)");
    }
    if info.device != 0 {
        return refuse("its keys or values are of a device");
    }
    if flags & NO_COMMON_LRU != 0 {
        return refuse("each processor has its own order of use");
    }
    if flags & !FLAGS != 0 || info.extra != 0 {
        return refuse(&format!("its flags {flags:#x} are not known"));
    }
    Ok(())
}

impl Record {
    fn kind(&self) -> &'static str {
        kind_name(self.kind)
    }

    /// Whether its entries have keys: those of others have an order.
    fn is_keyed(&self) -> bool {
        !["queue", "stack"].contains(&self.kind())
    }

    /// Whether each number below the most has an entry.
    fn is_array(&self) -> bool {
        self.kind().ends_with("array")
    }

    /// Whether each processor has values of its own.
    fn is_per_cpu(&self) -> bool {
        self.kind().contains("percpu")
    }

    /// Whether it may forget entries.
    fn forgets(&self) -> bool {
        self.kind().starts_with("lru")
    }

    /// What people know it by.
    fn place(&self) -> String {
        let name = String::from_utf8_lossy(&self.name);
        format!(
            "{} {}",
            self.kind(),
            if name.is_empty() { "-" } else { &name }
        )
    }

    fn failed(&self, what: &str, error: std::io::Error) -> Error {
        Error::kernel(format!("{what} BPF map {}", self.place()), error)
    }

    /// The map, with the entries of the dump: a descriptor to read and to write.
    fn make(&self, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let contents = self.contents.as_ref();
        let contents = contents
            .ok_or_else(|| Error::corrupt("BPF map", "the first description is not the first"))?;
        let map = bpf_map::create(&Definition {
            kind: self.kind,
            key_bytes: self.key_bytes,
            value_bytes: self.value_bytes,
            max_entries: self.max_entries,
            flags: self.map_flags,
            numa_node: self.numa_node,
            name: self.name.clone(),
        });
        let map = map.map_err(|error| self.failed("make", error))?;
        contents.load(&map, self, cx)?;
        if self.frozen {
            bpf_map::freeze(&map).map_err(|error| self.failed("freeze", error))?;
        }
        Ok(map)
    }
}

#[cfg(test)]
mod tests;
