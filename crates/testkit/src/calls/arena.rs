//! A range of addresses of a subject's own, in which it maps whatever it likes wherever it likes.
use std::io::Result;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use super::check;

/// Where every arena starts: far below where the kernel looks for room by itself.
pub const ARENA_START: usize = 0x2000_0000_0000;

/// The addresses from [`ARENA_START`] on; ranges are in bytes from there. What is mapped is only
/// read and written as whole words. A child has its parent's.
#[derive(Clone, Debug)]
pub struct Arena {
    bytes: usize,
}

impl Arena {
    /// Claims `bytes` of addresses at which nothing is mapped. mmap(2).
    ///
    /// # Errors
    /// As mmap(2), `EEXIST` among them where something is mapped there.
    pub fn claim(bytes: usize) -> Result<Self> {
        let arena = Self { bytes };
        let flags = MapFlags::PRIVATE | MapFlags::FIXED_NOREPLACE | MapFlags::NORESERVE;
        let (start, bytes) = arena.part(&(0..bytes));
        // SAFETY: nothing that is mapped is replaced, or the call fails.
        unsafe { rustix::mm::mmap_anonymous(start, bytes, ProtFlags::empty(), flags) }?;
        arena.unmap(0..bytes)?;
        Ok(arena)
    }

    fn part(&self, range: &Range<usize>) -> (*mut libc::c_void, usize) {
        assert!(range.start <= range.end && range.end <= self.bytes);
        let start = ptr::with_exposed_provenance_mut(ARENA_START + range.start);
        (start, range.end - range.start)
    }

    /// Maps anonymous memory at `range`, instead of what is mapped there. mmap(2).
    ///
    /// # Errors
    /// As mmap(2).
    pub fn map(&self, range: Range<usize>, protection: i32, flags: i32) -> Result<()> {
        self.map_any(&range, protection, flags | libc::MAP_ANONYMOUS, -1, 0)
    }

    /// Maps `file` from `offset` at `range`, instead of what is mapped there. mmap(2).
    ///
    /// # Errors
    /// As mmap(2).
    pub fn map_file(
        &self,
        range: Range<usize>,
        protection: i32,
        flags: i32,
        (file, offset): (BorrowedFd<'_>, u64),
    ) -> Result<()> {
        use std::os::fd::AsRawFd;
        self.map_any(&range, protection, flags, file.as_raw_fd(), offset)
    }

    fn map_any(
        &self,
        range: &Range<usize>,
        protection: i32,
        flags: i32,
        file: i32,
        offset: u64,
    ) -> Result<()> {
        let (start, bytes) = self.part(range);
        let flags = flags | libc::MAP_FIXED;
        let offset = offset.cast_signed();
        // SAFETY: only what stands in this arena is replaced, and nothing borrows from that.
        let mapped = unsafe { libc::mmap(start, bytes, protection, flags, file, offset) };
        if mapped == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        Ok(())
    }

    /// Unmaps `range`. munmap(2).
    ///
    /// # Errors
    /// As munmap(2).
    pub fn unmap(&self, range: Range<usize>) -> Result<()> {
        let (start, bytes) = self.part(&range);
        // SAFETY: nothing borrows from an arena.
        check(unsafe { libc::munmap(start, bytes) }.into()).map(drop)
    }

    /// Changes the protection of `range`. mprotect(2).
    ///
    /// # Errors
    /// As mprotect(2).
    pub fn protect(&self, range: Range<usize>, protection: i32) -> Result<()> {
        let (start, bytes) = self.part(&range);
        // SAFETY: nothing borrows from an arena.
        check(unsafe { libc::mprotect(start, bytes, protection) }.into()).map(drop)
    }

    /// Advises about `range`, by the kernel's number. madvise(2).
    ///
    /// # Errors
    /// As madvise(2).
    pub fn advise(&self, range: Range<usize>, advice: i32) -> Result<()> {
        let (start, bytes) = self.part(&range);
        // SAFETY: nothing borrows from an arena.
        check(unsafe { libc::madvise(start, bytes, advice) }.into()).map(drop)
    }

    /// Locks `range` into memory with the flags of mlock2(2).
    ///
    /// # Errors
    /// As mlock2(2).
    pub fn lock(&self, range: Range<usize>, flags: u32) -> Result<()> {
        let (start, bytes) = self.part(&range);
        // SAFETY: the contents do not change.
        check(unsafe { libc::mlock2(start, bytes, flags) }.into()).map(drop)
    }

    /// Moves what is mapped at `range` to `to`, instead of what is mapped there. mremap(2).
    ///
    /// # Errors
    /// As mremap(2).
    pub fn relocate(&self, range: Range<usize>, to: usize) -> Result<()> {
        let (from, bytes) = self.part(&range);
        let (to, _) = self.part(&(to..to + bytes));
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: both ranges are this arena's, and nothing borrows from them.
        let moved = unsafe { libc::mremap(from, bytes, bytes, flags, to) };
        if moved == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        Ok(())
    }

    /// Makes what is mapped at `range` end at `end`, where it is. mremap(2).
    ///
    /// # Errors
    /// As mremap(2).
    pub fn resize(&self, range: Range<usize>, end: usize) -> Result<()> {
        let (start, bytes) = self.part(&range);
        let (_, new_bytes) = self.part(&(range.start..end));
        // SAFETY: what is in the arena and shrinks is borrowed by nobody; nothing moves.
        let resized = unsafe { libc::mremap(start, bytes, new_bytes, 0) };
        if resized == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        Ok(())
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.bytes);
        // SAFETY: aligned and within the arena, where all access is atomic. Where nothing is
        // mapped, or without the permission, the task gets SIGSEGV: no more than asked.
        unsafe { AtomicU64::from_ptr(ptr::with_exposed_provenance_mut(ARENA_START + offset)) }
    }

    /// Reads the word at `offset`.
    ///
    /// # Panics
    /// When `offset` is not a multiple of 8 within the arena.
    pub fn load(&self, offset: usize) -> u64 {
        self.word(offset).load(Ordering::SeqCst)
    }

    /// Writes the word at `offset`.
    ///
    /// # Panics
    /// As [`Arena::load`].
    pub fn store(&self, offset: usize, value: u64) {
        self.word(offset).store(value, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mappings_stand_where_they_were_asked_for() {
        let arena = Arena::claim(1 << 20).unwrap();
        let both = libc::PROT_READ | libc::PROT_WRITE;
        arena.map(4096..12288, both, libc::MAP_PRIVATE).unwrap();
        arena.store(8192, 7);
        arena.relocate(8192..12288, 65536).unwrap();
        assert_eq!((arena.load(4096), arena.load(65536)), (0, 7));
        // What is taken is not claimed again.
        assert!(Arena::claim(1 << 20).is_err());
        arena.resize(4096..8192, 16384).unwrap();
        assert_eq!(arena.load(12288), 0);
        arena.unmap(0..1 << 20).unwrap();
    }
}
