//! Where each processor has its own part of the running kernel's memory.
//!
//! The kernel has memory of which each processor has a copy, and one address for all of them: a
//! processor's copy is a fixed distance from there, which it tells nobody. A map of bpf(2) lies in
//! such memory, and a program may ask where a processor's copy of that is.

use std::io::{self, Error};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

use crate::kernel_memory::{Instruction, bpf, instruction, load, run};

/// A map of one word, of which each processor has its own.
#[derive(Debug)]
pub struct PerCpuMap {
    map: OwnedFd,
    program: OwnedFd,
}

/// The program: it is given a word, the number of a processor, and leaves in it where that has its
/// copy of the map's word; 0 for a number that no processor can have.
fn program(map: BorrowedFd<'_>) -> Vec<Instruction> {
    const MOVE: u8 = 0xbf;
    const MOVE_VALUE: u8 = 0xb7;
    const ADD_VALUE: u8 = 0x07;
    const LOAD: u8 = 0x79;
    const LOAD_MAP: u8 = 0x18;
    const STORE: u8 = 0x7b;
    const STORE_HALF_VALUE: u8 = 0x62;
    const CALL: u8 = 0x85;
    const EXIT: u8 = 0x95;
    const BY_DESCRIPTOR: u8 = 1;
    const LOOKUP_PER_CPU: i32 = 195;
    const FRAME: u8 = 10;
    vec![
        instruction(MOVE, 6, 1, 0, 0),
        instruction(LOAD, 3, 6, 0, 0),
        instruction(STORE_HALF_VALUE, FRAME, 0, -8, 0),
        instruction(MOVE, 2, FRAME, 0, 0),
        instruction(ADD_VALUE, 2, 0, 0, -8),
        instruction(LOAD_MAP, 1, BY_DESCRIPTOR, 0, map.as_raw_fd()),
        instruction(0, 0, 0, 0, 0),
        instruction(CALL, 0, 0, 0, LOOKUP_PER_CPU),
        instruction(STORE, 6, 0, 0, 0),
        instruction(MOVE_VALUE, 0, 0, 0, 0),
        instruction(EXIT, 0, 0, 0, 0),
    ]
}

impl PerCpuMap {
    /// Makes the map and loads the program.
    ///
    /// # Errors
    /// As [`crate::kernel_memory::KernelMemory::open`].
    pub fn make() -> io::Result<Self> {
        const CREATE: libc::c_int = 0;
        const PER_CPU_ARRAY: u64 = 6;
        const KEY_BYTES: u64 = 4;
        const VALUE_BYTES: u64 = 8;
        const ENTRIES: u64 = 1;
        let mut attributes = [PER_CPU_ARRAY | KEY_BYTES << 32, VALUE_BYTES | ENTRIES << 32];
        let map = bpf(CREATE, &mut attributes)? as i32;
        // SAFETY: the kernel just returned this descriptor and nobody else knows it.
        let map = unsafe { OwnedFd::from_raw_fd(map) };
        let program = load(&program(map.as_fd()))?;
        Ok(Self { map, program })
    }

    /// The map's descriptor.
    #[must_use]
    pub fn own(&self) -> BorrowedFd<'_> {
        self.map.as_fd()
    }

    /// The kernel's address of a processor's copy of the word.
    ///
    /// # Errors
    /// `ENXIO` for a number that no processor can have; as bpf(2).
    pub fn address(&self, cpu: u32) -> io::Result<u64> {
        let mut piece = u64::from(cpu).to_ne_bytes();
        run(&self.program, &mut piece)?;
        match u64::from_ne_bytes(piece) {
            0 => Err(Error::from_raw_os_error(libc::ENXIO)),
            address => Ok(address),
        }
    }
}

/// The numbers of the processors that this machine can have.
///
/// # Errors
/// Where sysfs is not there; `InvalidData`.
pub fn possible() -> io::Result<Vec<u32>> {
    listed("/sys/devices/system/cpu/possible")
}

/// The numbers of the processors that run.
///
/// # Errors
/// As [`possible`].
pub fn online() -> io::Result<Vec<u32>> {
    listed("/sys/devices/system/cpu/online")
}

fn listed(path: &str) -> io::Result<Vec<u32>> {
    let text = std::fs::read_to_string(crate::host::path(path))?;
    let invalid = || Error::from(io::ErrorKind::InvalidData);
    parse(text.trim()).ok_or_else(invalid)
}

/// "0-3,8": first and last numbers, both of them included.
fn parse(text: &str) -> Option<Vec<u32>> {
    const MOST: u32 = 1 << 16;
    let mut all = Vec::new();
    for range in text.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse().ok()?, last.parse::<u32>().ok()?);
        all.extend(first..=Some(last).filter(|last| *last < MOST)?);
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_processors_are_understood() {
        assert_eq!(parse("0"), Some(vec![0]));
        assert_eq!(parse("0-2,5"), Some(vec![0, 1, 2, 5]));
        assert_eq!(
            [parse(""), parse("0-"), parse("0-4000000000")],
            [const { None }; 3]
        );
    }

    #[test]
    fn each_processor_has_its_own_copy() {
        let Ok(map) = PerCpuMap::make() else {
            eprintln!("skipped: this system does not let the kernel be looked into");
            return;
        };
        let cpus = possible().expect("sysfs");
        let mut addresses = cpus
            .iter()
            .map(|cpu| map.address(*cpu).expect("its copy"))
            .collect::<Vec<_>>();
        addresses.sort_unstable();
        addresses.dedup();
        assert_eq!(addresses.len(), cpus.len());
        let error = map.address(1 << 20).expect_err("there is none");
        assert_eq!(error.raw_os_error(), Some(libc::ENXIO));
    }
}
