//! The memory of a machine as QEMU knows it, and the files behind it.
//!
//! QEMU tells which memory backends there are and which RAM block is whose; where in QEMU's own
//! memory a block is follows from an address of the guest (`gpa2hva`), and which file is mapped
//! there from /proc.

use std::collections::BTreeSet;
use std::fs::{self, File, Metadata};
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use abi::{Addr, PAGE_BYTES, Span};
use serde::Deserialize;
use serde_json::json;

use super::qmp::{Qmp, Question, Version, human};
use super::{command, lazy};
use crate::mapping::Mapping;
use crate::{Error, Result};

/// The most blocks of a machine.
pub(crate) const BLOCKS_MAX: usize = 256;

/// The most memory that goes through QEMU, in bytes: ROMs, video memory, firmware.
const UNSHARED_MAX_BYTES: u64 = 64 << 20;

/// From this version on, QEMU leaves only files with a name out of what it saves.
const NAMED_FILES_ONLY: Version = Version {
    major: 8,
    minor: 1,
    micro: 0,
};

/// Questions about memory: its backends, its blocks, and their guest addresses.
const BACKENDS: &str = "query-memdev";
const RAM_BLOCKS: &str = "info ramblock";
const VIEWS: &str = "info mtree -f";

/// A block of the guest's memory whose file is at hand.
#[derive(Debug)]
pub(crate) struct Block {
    /// Its name in QEMU.
    pub name: String,
    /// The object of QEMU that it is of.
    pub backend: String,
    /// Its length.
    pub pages: u64,
    pub file: OwnedFd,
    /// Its offset in the file.
    pub offset_bytes: u64,
    /// Address at which QEMU has it mapped.
    pub at: Addr,
}

impl Block {
    /// The addresses at which QEMU has it.
    pub fn span(&self) -> Span {
        Span::new(self.at, self.pages * PAGE_BYTES)
    }

    /// The size of the pages that the file has.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn page_bytes(&self) -> Result<u64> {
        page_bytes(&self.file)
    }
}

/// The size of the pages that a file in memory has.
pub(crate) fn page_bytes(file: &OwnedFd) -> Result<u64> {
    const HUGETLBFS: u64 = 0x958458f6;
    let facts = rustix::fs::fstatfs(file).map_err(Error::kernel(
        "cannot look at the file of the guest's memory",
    ))?;
    let is_huge = facts.f_type.cast_unsigned() == HUGETLBFS;
    Ok(if is_huge {
        facts.f_bsize.cast_unsigned()
    } else {
        PAGE_BYTES
    })
}

/// A memory backend, as QEMU describes it (`query-memdev`).
#[derive(Debug, Deserialize)]
struct Backend {
    id: Option<String>,
    size: u64,
    share: bool,
}

/// A line of `info ramblock`.
#[derive(Clone, Debug, PartialEq, Eq)]
struct RamBlock {
    name: String,
    used_bytes: u64,
}

/// The questions that [`find`] asks first.
pub(crate) fn questions() -> [Question; 3] {
    [(BACKENDS, json!({})), human(RAM_BLOCKS), human(VIEWS)]
}

/// The blocks of a machine's memory.
///
/// # Errors
/// [`Error::Unfit`] where some of it cannot be read from a file that nobody else has, with the
/// option of QEMU that would allow it; those of [`Qmp::call`]; [`Error::File`].
pub(crate) fn find(
    qmp: &mut Qmp,
    version: Version,
    pid: i32,
    words: &[String],
) -> Result<Vec<Block>> {
    let backends: Vec<Backend> = qmp.call(BACKENDS, json!({}))?;
    let blocks = ram_blocks(&qmp.human(RAM_BLOCKS)?);
    let views = qmp.human(VIEWS)?;
    let mappings = Mappings::of(pid)?;
    let mut found = Vec::new();
    let mut shared = BTreeSet::new();
    if backends.len() > BLOCKS_MAX {
        return Err(unfit("QEMU says that it has hundreds of memory backends"));
    }
    for backend in &backends {
        let id = check(qmp, version, backend, words)?;
        let names = [id.clone(), format!("/objects/{id}")];
        let block = blocks.iter().find(|block| names.contains(&block.name));
        let Some(block) = block.filter(|block| block.used_bytes == backend.size) else {
            let what = format!("the memory backend {id} has no RAM block of its own");
            return Err(Error::Unfit(what));
        };
        let at = address(qmp, &views, block)?;
        let (file, offset_bytes) = mappings.file(at, block, &id)?;
        refuse_unfinished(&file, &id)?;
        shared.insert(block.name.clone());
        found.push(Block {
            name: block.name.clone(),
            backend: id,
            pages: block.used_bytes / PAGE_BYTES,
            file,
            offset_bytes,
            at: Addr(at),
        });
    }
    let others = blocks.iter().filter(|block| !shared.contains(&block.name));
    let others = others.collect::<Vec<_>>();
    let bytes = others
        .iter()
        .fold(0_u64, |sum, block| sum.saturating_add(block.used_bytes));
    if let Some(largest) = others.iter().max_by_key(|block| block.used_bytes)
        && bytes > UNSHARED_MAX_BYTES
    {
        return Err(unsaved(version, largest, bytes));
    }
    if found.is_empty() {
        return Err(unfit("the machine has no memory that could be saved"));
    }
    Ok(found)
}

/// Refuses memory that is still being brought in.
fn refuse_unfinished(file: &OwnedFd, id: &str) -> Result<()> {
    let is_whole = lazy::is_whole(file).map_err(Error::kernel(
        "cannot tell whether the guest's memory is whole",
    ))?;
    match is_whole {
        true => Ok(()),
        false => Err(Error::Unfit(format!(
            "the guest's memory {id} is still being brought in (vm restore --lazy): try again"
        ))),
    }
}

/// Refuses a backend that could not be read from outside; gives its name.
fn check(qmp: &mut Qmp, version: Version, backend: &Backend, words: &[String]) -> Result<String> {
    let Some(id) = &backend.id else {
        return Err(unfit("the guest has memory of a backend without a name"));
    };
    if !backend.share {
        return Err(match is_main(id) && !command::has_object(words, id) {
            true => private_main(version, id, backend.size),
            false => private(id, backend.size),
        });
    }
    if backend.size == 0 || !backend.size.is_multiple_of(PAGE_BYTES) {
        let what = format!("the memory backend {id} has {} bytes", backend.size);
        return Err(Error::Unfit(what));
    }
    let kind: String = qmp.call(
        "qom-get",
        json!({"path": format!("/objects/{id}"), "property": "type"}),
    )?;
    let file = "memory-backend-file";
    if kind != file && version >= NAMED_FILES_ONLY {
        return Err(Error::Unfit(format!(
            "QEMU {version} would save the memory of {kind} {id} itself: use -object {}",
            object(version, id, backend.size)
        )));
    }
    Ok(id.clone())
}

/// True if a name is that of the memory that QEMU makes for a machine without a backend.
fn is_main(name: &str) -> bool {
    name.ends_with(".ram") || name == "ram"
}

/// Why the memory that QEMU made for a machine by itself cannot be saved.
fn private_main(version: Version, name: &str, bytes: u64) -> Error {
    let mib = bytes >> 20;
    let object = object(version, "mem", bytes);
    Error::Unfit(format!(
        "the guest's memory {name} ({mib} MiB) is QEMU's alone: start QEMU with \
         -object {object} -machine memory-backend=mem"
    ))
}

/// Why the memory of a backend cannot be saved.
fn private(id: &str, bytes: u64) -> Error {
    let mib = bytes >> 20;
    Error::Unfit(format!(
        "the guest's memory {id} ({mib} MiB) is QEMU's alone: start QEMU with share=on in the \
         -object with id={id}"
    ))
}

/// Why there is too much memory without a backend, of which this block is the largest.
fn unsaved(version: Version, largest: &RamBlock, bytes: u64) -> Error {
    let (name, mib) = (&largest.name, largest.used_bytes >> 20);
    if is_main(name) {
        return private_main(version, name, largest.used_bytes);
    }
    Error::Unfit(format!(
        "the memory of devices, ROMs and screens is saved up to {} MiB, and is {} MiB, of which \
         {name} has {mib} MiB: start QEMU with less of that, as with vgamem_mb=16 for a VGA, or \
         -global qxl-vga.vram_size=16777216 for a QXL",
        UNSHARED_MAX_BYTES >> 20,
        bytes.div_ceil(1 << 20)
    ))
}

/// A backend that could be saved.
fn object(version: Version, id: &str, bytes: u64) -> String {
    let (kind, place) = match version >= NAMED_FILES_ONLY {
        true => ("file", "mem-path=/dev/shm,"),
        false => ("memfd", ""),
    };
    format!(
        "memory-backend-{kind},id={id},size={}M,{place}share=on",
        bytes >> 20
    )
}

fn unfit(what: &str) -> Error {
    Error::Unfit(what.to_owned())
}

/// Reads the answer to `info ramblock`.
fn ram_blocks(text: &str) -> Vec<RamBlock> {
    let block = |line: &str| {
        // Name, page size and its unit, offset, used, total, and more in newer versions; a name
        // may have spaces in it.
        let words = line.split_whitespace().collect::<Vec<_>>();
        let offset = words.iter().position(|word| word.starts_with("0x"))?;
        let name = words.get(..offset.checked_sub(2)?)?.join(" ");
        Some(RamBlock {
            name,
            used_bytes: hexadecimal(words.get(offset + 1)?)?,
        })
    };
    text.lines().filter_map(block).collect()
}

fn hexadecimal(text: &str) -> Option<u64> {
    u64::from_str_radix(text.strip_prefix("0x").unwrap_or(text), 16).ok()
}

/// Returns the address of the block in QEMU's memory.
fn address(qmp: &mut Qmp, views: &str, block: &RamBlock) -> Result<u64> {
    let name = &block.name;
    let nowhere = || Error::Unfit(format!("the guest does not see its memory {name}"));
    let (guest, offset) = in_views(views, name).ok_or_else(nowhere)?;
    let told = qmp.human(&format!("gpa2hva {guest:#x}"))?;
    let start = host_address(&told, name).and_then(|at| at.checked_sub(offset));
    start.ok_or_else(nowhere)
}

/// An address of the guest at which it has a block, and where in the block that is, out of the
/// answer to `info mtree -f`.
fn in_views(views: &str, name: &str) -> Option<(u64, u64)> {
    views.lines().find_map(|line| {
        let (range, rest) = line.trim().split_once(" (prio ")?;
        let (_, region) = rest.split_once(", ram): ")?;
        let (region, offset) = match region.split_once(" @") {
            Some((region, offset)) => (region, hexadecimal(offset.split(' ').next()?)?),
            None => (region, 0),
        };
        let region = region.strip_suffix(" KVM").unwrap_or(region);
        let start = range.split_once('-')?.0;
        (region == name).then_some((hexadecimal(start)?, offset))
    })
}

/// Out of the answer to `gpa2hva`, if it is about the block.
fn host_address(told: &str, name: &str) -> Option<u64> {
    let (_, rest) = told.split_once(&format!(" ({name}) is 0x"))?;
    hexadecimal(rest.trim())
}

/// The mappings of a process that it shares with whoever maps the same.
#[derive(Debug)]
struct Mappings {
    pid: i32,
    shared: Vec<Mapping>,
}

impl Mappings {
    fn of(pid: i32) -> Result<Self> {
        let path = PathBuf::from(format!("/proc/{pid}/maps"));
        let text = fs::read_to_string(&path).map_err(Error::file("read", path))?;
        let all = text.lines().filter_map(Mapping::parse);
        let shared = all.filter(Mapping::is_shared_file).collect();
        Ok(Self { pid, shared })
    }

    /// The file with a block that begins at `at`, and where in the file it does.
    fn file(&self, at: u64, block: &RamBlock, id: &str) -> Result<(OwnedFd, u64)> {
        let end = at.checked_add(block.used_bytes);
        let mapping = self
            .shared
            .iter()
            .find(|it| it.span.start.0 <= at && end.is_some_and(|end| end <= it.span.end.0));
        let Some(mapping) = mapping else {
            return Err(private(id, block.used_bytes));
        };
        if let Some(other) = self.other(mapping)? {
            return Err(Error::Unfit(format!(
                "the guest's memory {} is mapped by process {other} as well, which could write to \
                 it: use devices of QEMU's own instead of vhost-user",
                block.name
            )));
        }
        let offset_bytes = mapping.offset_bytes + (at - mapping.span.start.0);
        Ok((self.open(mapping)?, offset_bytes))
    }

    /// Opens the file behind a mapping: by a descriptor that QEMU has of it, or by the mapping,
    /// which takes more privileges.
    fn open(&self, mapping: &Mapping) -> Result<OwnedFd> {
        let pid = self.pid;
        let folder = PathBuf::from(format!("/proc/{pid}/fd"));
        let entries = fs::read_dir(&folder).map_err(Error::file("read", &folder))?;
        for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
            let is_it = |facts: Metadata| mapping.is_of(facts.dev(), facts.ino());
            let facts = fs::metadata(&path);
            if facts.is_ok_and(|facts| facts.is_file() && is_it(facts))
                && let Ok(file) = File::open(&path)
                && file.metadata().is_ok_and(is_it)
            {
                return Ok(file.into());
            }
        }
        let (start, end) = (mapping.span.start.0, mapping.span.end.0);
        let path = PathBuf::from(format!("/proc/{pid}/map_files/{start:x}-{end:x}"));
        let file = File::open(&path).map_err(Error::file("open", path))?;
        Ok(file.into())
    }

    /// Another process that has the same file mapped shared.
    fn other(&self, mapping: &Mapping) -> Result<Option<i32>> {
        let entries = fs::read_dir("/proc").map_err(Error::file("read", "/proc"))?;
        let pids = entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok());
        let inode = format!(" {} ", mapping.inode);
        for pid in pids.filter(|pid| *pid != self.pid) {
            // Who is gone by now has nothing mapped, and a kernel's thread never has.
            let Ok(text) = fs::read(format!("/proc/{pid}/maps")) else {
                continue;
            };
            let text = String::from_utf8_lossy(&text);
            let lines = text.lines().filter(|line| line.contains(&inode));
            let is_it = |it: Mapping| {
                it.is_shared && (it.device, it.inode) == (mapping.device, mapping.inode)
            };
            if lines.filter_map(Mapping::parse).any(is_it) {
                return Ok(Some(pid));
            }
        }
        Ok(None)
    }
}

/// Returns the address at which a process has all of a file mapped shared.
///
/// # Errors
/// [`Error::File`]; [`Error::Unfit`] where it has not.
pub(crate) fn place_of(pid: i32, file: &OwnedFd, bytes: u64) -> Result<Addr> {
    let path = PathBuf::from(format!("/proc/{pid}/maps"));
    let text = fs::read_to_string(&path).map_err(Error::file("read", path))?;
    let facts =
        rustix::fs::fstat(file).map_err(Error::kernel("cannot look at the memory of a machine"))?;
    let is_it = |mapping: &Mapping| {
        mapping.is_shared
            && mapping.inode == facts.st_ino
            && mapping.offset_bytes == 0
            && mapping.span.bytes() >= bytes
    };
    let found = text.lines().filter_map(Mapping::parse).find(is_it);
    let found = found.map(|mapping| mapping.span.start);
    found.ok_or_else(|| unfit("QEMU has not mapped its memory as one piece"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_read_as_qemu_lists_them() {
        let zeros = "0x0000000000000000";
        let old = format!(
            "              Block Name    PSize              Offset               Used\n\
             \x20                   mem0    4 KiB  {zeros} 0x0000000019000000 0x0000000019000000\n\
             \x20  0000:00:02.0/vga.vram    4 KiB  {zeros} 0x0000000001000000 0x0000000001000000\n"
        );
        let new = "  Block Name    PSize  Offset  Used  Total  HVA  RO\n\
                   pc.ram    2 MiB  0x00 0x200000 0x200000 0x00007f0000000000 rw\n";
        let block = |name: &str, used_bytes| RamBlock {
            name: name.to_owned(),
            used_bytes,
        };
        let expected = [
            block("mem0", 0x1900_0000),
            block("0000:00:02.0/vga.vram", 0x100_0000),
        ];
        assert_eq!(ram_blocks(&old), expected);
        assert_eq!(ram_blocks(new), [block("pc.ram", 0x20_0000)]);
        assert_eq!(ram_blocks("0x1\nunknown command: 'info'\n\n0 0x2"), []);
    }

    #[test]
    fn a_block_is_found_where_the_guest_sees_it() {
        let views = "FlatView #1\n AS \"memory\", root: system\n\
            \x20 0000000000000000-000000000009ffff (prio 0, ram): mem0 KVM\n\
            \x20 00000000000c0000-00000000000dffff (prio 1, rom): pc.rom\n\
            \x20 0000000100000000-000000013fffffff (prio 0, ram): mem1 @0000000080000000 KVM\n";
        assert_eq!(in_views(views, "mem0"), Some((0, 0)));
        assert_eq!(in_views(views, "mem1"), Some((0x1_0000_0000, 0x8000_0000)));
        assert_eq!(in_views(views, "pc.rom"), None);
        let told = "Host virtual address for 0x0 (mem0) is 0x7f4c0afff000\r\n";
        assert_eq!(host_address(told, "mem0"), Some(0x7f4c_0aff_f000));
        assert_eq!(host_address(told, "mem1"), None);
    }
}
