//! Objects of the kernel's own: maps of BPF, interfaces of tun and tap.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use sys::bpf_map::{self, Definition};
use sys::kernel_memory::KernelMemory;
use sys::tun;

use super::descriptor::{Kind, info};
use crate::samples::sample::Values;

/// The kinds.
#[rustfmt::skip]
pub(super) const OF_KERNEL: &[Kind] = &[
    Kind::new("bpf-map", Values::Made(maps), map, read_map)
        .about(&[
            "bpf map: map_type", "bpf map: key_size", "bpf map: value_size",
            "bpf map: max_entries", "bpf map: map_flags", "bpf map: frozen",
        ]),
    Kind::new("interface", Values::Made(|| (0..INTERFACES.len() as u64).collect()), interface,
        read_interface)
        .about(&["tun: iff"]),
];

/// Hashes and arrays, of one value or of one a processor, the least used, tries, queues, stacks;
/// above those the flags, and whether the map is frozen.
fn maps() -> Vec<u64> {
    const NO_PREALLOC: u64 = 1 << 8;
    const READ_BY_PROGRAMS: u64 = 0x80 << 8;
    const FROZEN: u64 = 1 << 32;
    let kinds = [1, 2, 5, 6, 9, 22, 23];
    let more = [
        11 | NO_PREALLOC,
        1 | NO_PREALLOC,
        2 | READ_BY_PROGRAMS,
        2 | FROZEN,
    ];
    kinds.into_iter().chain(more).collect()
}

fn map(_: &Path, value: u64) -> io::Result<Vec<OwnedFd>> {
    const QUEUES: [u32; 2] = [22, 23];
    // A dump looks up who else has it.
    KernelMemory::open()?;
    let kind = (value & 0xff) as u32;
    let map = bpf_map::create(&Definition {
        kind,
        key_bytes: if QUEUES.contains(&kind) {
            0
        } else {
            4 + kind % 2 * 4
        },
        value_bytes: 16,
        max_entries: 8 + kind,
        flags: (value >> 8 & 0xffff) as u32,
        name: b"sample".to_vec(),
        ..Definition::default()
    });
    // Arrays count by numbers of four bytes.
    let map = map.or_else(|_| {
        bpf_map::create(&Definition {
            kind,
            key_bytes: 4,
            value_bytes: 8,
            max_entries: 4,
            flags: (value >> 8 & 0xffff) as u32,
            ..Definition::default()
        })
    })?;
    if value >> 32 != 0 {
        bpf_map::freeze(&map)?;
    }
    Ok(vec![map])
}

fn read_map(own: BorrowedFd<'_>) -> io::Result<String> {
    let map = bpf_map::info(own)?;
    let frozen = info(own, &["frozen"], "")?;
    Ok(format!("{:?} {frozen}", map.definition))
}

/// `IFF_TUN`, `IFF_TAP`, with `IFF_NO_PI`, which is not told apart, and with `IFF_VNET_HDR`,
/// `IFF_ONE_QUEUE`, `IFF_MULTI_QUEUE`.
const INTERFACES: [u16; 5] = [0x1, 0x1002, 0x5002, 0x3001, 0x1102];

fn interface(path: &Path, value: u64) -> io::Result<Vec<OwnedFd>> {
    let text = path.to_string_lossy();
    let letters = text.chars().filter(char::is_ascii_alphanumeric);
    let letters: Vec<char> = letters.collect();
    let last = letters.len().saturating_sub(11);
    let name: String = letters[last..].iter().collect();
    let own = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")?;
    tun::attach(
        &own,
        &format!("sf{name}"),
        INTERFACES[value as usize % INTERFACES.len()],
    )?;
    Ok(vec![own.into()])
}

fn read_interface(own: BorrowedFd<'_>) -> io::Result<String> {
    let attached = tun::attached(own.as_fd())?;
    Ok(format!("{:x?}", attached.map(|attached| attached.flags)))
}
