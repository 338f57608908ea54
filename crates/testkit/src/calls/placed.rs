//! Memory at places of a subject's own, which nothing but the kernel ever looks into.
//!
//! Nobody refers to it: what is there is written and read by way of /proc/self/mem.
use std::io::{ErrorKind, Result};
use std::ptr;

use super::check;

/// Where the first place begins: far from arenas, and from where the kernel looks for room.
const START: usize = 0x2100_0000_0000;
/// How far places are apart.
const APART: usize = 4 << 20;
/// How many places there are.
const PLACES: usize = 1 << 12;

/// A part of a place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The number of the place.
    pub place: usize,
    /// Where the part begins, in bytes from the place's start.
    pub from: usize,
    /// Its length in bytes.
    pub bytes: usize,
}

impl Part {
    /// Its address.
    ///
    /// # Panics
    /// Where there is no such place, or none so long.
    #[must_use]
    pub fn address(self) -> usize {
        assert!(self.place < PLACES && self.from + self.bytes <= APART);
        START + self.place * APART + self.from
    }

    fn start(self) -> *mut libc::c_void {
        ptr::without_provenance_mut(self.address())
    }

    /// Maps anonymous memory where nothing is mapped. mmap(2).
    ///
    /// # Errors
    /// As mmap(2): `EEXIST` where something is.
    pub fn map(self, protection: i32, flags: i32) -> Result<()> {
        let flags = flags | libc::MAP_FIXED_NOREPLACE | libc::MAP_ANONYMOUS;
        let (start, bytes) = (self.start(), self.bytes);
        // SAFETY: nothing that is mapped is replaced, or the call fails.
        let mapped = unsafe { libc::mmap(start, bytes, protection, flags, -1, 0) };
        match mapped == libc::MAP_FAILED {
            true => Err(std::io::Error::last_os_error()),
            false => Ok(()),
        }
    }

    /// Advises about it, by the kernel's number. madvise(2).
    ///
    /// # Errors
    /// As madvise(2).
    pub fn advise(self, advice: i32) -> Result<()> {
        let (start, bytes) = (self.start(), self.bytes);
        // SAFETY: nobody refers to what is there.
        check(unsafe { libc::madvise(start, bytes, advice) }.into()).map(drop)
    }

    /// Locks it into memory with the flags of mlock2(2).
    ///
    /// # Errors
    /// As mlock2(2).
    pub fn lock(self, flags: u32) -> Result<()> {
        let (start, bytes) = (self.start(), self.bytes);
        // SAFETY: the contents do not change.
        check(unsafe { libc::mlock2(start, bytes, flags) }.into()).map(drop)
    }

    /// Seals it: nobody can unmap or change it any more. mseal(2).
    ///
    /// # Errors
    /// As mseal(2): `ENOSYS` before Linux 6.10.
    pub fn seal(self) -> Result<()> {
        const MSEAL: i64 = 462;
        let (start, bytes) = (self.start(), self.bytes);
        // SAFETY: the contents do not change.
        check(unsafe { libc::syscall(MSEAL, start, bytes, 0) }).map(drop)
    }

    /// Says on which of the first 64 nodes its memory is to be. mbind(2).
    ///
    /// # Errors
    /// As mbind(2).
    pub fn bind(self, mode: i32, nodes: u64) -> Result<()> {
        const BITS: u64 = 65;
        let (start, bytes, at) = (self.start(), self.bytes, &raw const nodes);
        let (at, bits) = match nodes {
            0 => (ptr::null(), 0),
            _ => (at, BITS),
        };
        // SAFETY: the kernel reads 64 bits, or none; the contents do not change.
        check(unsafe { libc::syscall(libc::SYS_mbind, start, bytes, mode, at, bits, 0) }).map(drop)
    }

    /// Gives it a name (`PR_SET_VMA_ANON_NAME`).
    ///
    /// # Errors
    /// As prctl(2): `EINVAL` for a kernel that knows no names.
    pub fn name(self, name: &std::ffi::CStr) -> Result<()> {
        const SET_VMA: i32 = 0x5356_4d41;
        let (start, bytes, name) = (self.start(), self.bytes, name.as_ptr());
        // SAFETY: the kernel copies the name.
        check(unsafe { libc::prctl(SET_VMA, 0_u64, start, bytes, name) }.into()).map(drop)
    }
}

/// The number of the place that holds an address.
///
/// # Errors
/// `NotFound` for an address that is in none.
pub fn place_of(address: usize) -> Result<usize> {
    let place = address.checked_sub(START).map(|from| from / APART);
    let place = place.filter(|place| *place < PLACES);
    place.ok_or_else(|| ErrorKind::NotFound.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_apart_and_mapped_once() {
        let part = Part {
            place: 7,
            from: 4096,
            bytes: 8192,
        };
        assert_eq!(place_of(part.address()).unwrap(), 7);
        assert!(place_of(4096).is_err());
        part.map(3, libc::MAP_PRIVATE).unwrap();
        assert!(
            part.map(3, libc::MAP_PRIVATE).is_err(),
            "something is there"
        );
        part.advise(libc::MADV_DONTDUMP).unwrap();
    }
}
