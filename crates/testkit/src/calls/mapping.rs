//! Memory mapped in all the ways there are.
use std::io::Result;
use std::ops::Range;
use std::os::fd::AsFd;
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use rustix::mm::{MapFlags, ProtFlags};

use super::check;

/// Memory mapped by the subject; unmapped on drop. Only read and written as whole words.
#[derive(Debug)]
pub struct Mapping {
    start: usize,
    bytes: usize,
}

impl Mapping {
    /// Maps `bytes` of anonymous memory. mmap(2).
    ///
    /// # Errors
    /// As mmap(2).
    ///
    /// # Panics
    /// When `flags` ask for a fixed address, which could replace other memory.
    pub fn anonymous(bytes: usize, protection: ProtFlags, flags: MapFlags) -> Result<Self> {
        let fixed = MapFlags::FIXED | MapFlags::FIXED_NOREPLACE;
        assert!(!flags.intersects(fixed), "no fixed addresses");
        // SAFETY: without a fixed address nothing that is mapped is touched.
        let start =
            unsafe { rustix::mm::mmap_anonymous(ptr::null_mut(), bytes, protection, flags) };
        Ok(Self {
            start: start?.expose_provenance(),
            bytes,
        })
    }

    /// Maps `bytes` of `file` from `offset`. mmap(2).
    ///
    /// # Errors
    /// As mmap(2).
    ///
    /// # Panics
    /// As [`Mapping::anonymous`].
    pub fn of_file(
        file: impl AsFd,
        offset: u64,
        bytes: usize,
        protection: ProtFlags,
        flags: MapFlags,
    ) -> Result<Self> {
        let fixed = MapFlags::FIXED | MapFlags::FIXED_NOREPLACE;
        assert!(!flags.intersects(fixed), "no fixed addresses");
        // SAFETY: without a fixed address nothing that is mapped is touched.
        let start =
            unsafe { rustix::mm::mmap(ptr::null_mut(), bytes, protection, flags, file, offset) };
        Ok(Self {
            start: start?.expose_provenance(),
            bytes,
        })
    }

    /// Where it starts.
    pub fn address(&self) -> u64 {
        self.start as u64
    }

    /// How long it is.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.bytes);
        // SAFETY: aligned and within the mapping, which lives as long as `self`; all access to it
        // is atomic. Without the permission the task gets SIGSEGV, which is no more than asked.
        unsafe { AtomicU64::from_ptr(ptr::with_exposed_provenance_mut(self.start + offset)) }
    }

    /// The half word at `offset` bytes, to wait on with a futex.
    ///
    /// # Panics
    /// When `offset` is not a multiple of 4 within the mapping.
    pub fn half_word(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset + 4 <= self.bytes);
        // SAFETY: as for whole words.
        unsafe { AtomicU32::from_ptr(ptr::with_exposed_provenance_mut(self.start + offset)) }
    }

    /// Reads the word at `offset` bytes.
    ///
    /// # Panics
    /// When `offset` is not a multiple of 8 within the mapping.
    pub fn load(&self, offset: usize) -> u64 {
        self.word(offset).load(Ordering::SeqCst)
    }

    /// Writes the word at `offset` bytes.
    ///
    /// # Panics
    /// As [`Mapping::load`].
    pub fn store(&self, offset: usize, value: u64) {
        self.word(offset).store(value, Ordering::SeqCst);
    }

    /// Adds to the word at `offset` bytes and returns what it was.
    ///
    /// # Panics
    /// As [`Mapping::load`].
    pub fn add(&self, offset: usize, value: u64) -> u64 {
        self.word(offset).fetch_add(value, Ordering::SeqCst)
    }

    fn part(&self, range: Range<usize>) -> (*mut libc::c_void, usize) {
        assert!(range.start <= range.end && range.end <= self.bytes);
        let start = ptr::with_exposed_provenance_mut(self.start + range.start);
        (start, range.end - range.start)
    }

    /// Changes the protection of a range of bytes. mprotect(2).
    ///
    /// # Errors
    /// As mprotect(2).
    pub fn protect(&self, range: Range<usize>, protection: i32) -> Result<()> {
        let (start, bytes) = self.part(range);
        // SAFETY: the range is part of this mapping.
        check(unsafe { libc::mprotect(start, bytes, protection) }.into()).map(drop)
    }

    /// Advises about a range of bytes, by the kernel's number, so that advice newer than the
    /// libraries can be given. madvise(2).
    ///
    /// # Errors
    /// As madvise(2).
    pub fn advise(&self, range: Range<usize>, advice: i32) -> Result<()> {
        let (start, bytes) = self.part(range);
        // SAFETY: the range is part of this mapping, whose contents nothing relies on.
        check(unsafe { libc::madvise(start, bytes, advice) }.into()).map(drop)
    }

    /// Makes it longer or shorter, wherever it then is. mremap(2).
    ///
    /// # Errors
    /// As mremap(2).
    pub fn resize(&mut self, bytes: usize) -> Result<()> {
        let (start, old_bytes) = self.part(0..self.bytes);
        // SAFETY: this mapping alone is moved, to a place that the kernel finds, and nobody else
        // has a reference into it.
        let moved = unsafe { libc::mremap(start, old_bytes, bytes, libc::MREMAP_MAYMOVE) };
        if moved == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        self.start = moved.expose_provenance();
        self.bytes = bytes;
        Ok(())
    }

    /// Moves it to another address. mremap(2).
    ///
    /// # Errors
    /// As mmap(2) and mremap(2).
    pub fn relocate(&mut self) -> Result<()> {
        let place = Self::anonymous(self.bytes, ProtFlags::empty(), MapFlags::PRIVATE)?;
        let (from, bytes) = self.part(0..self.bytes);
        let to = place.part(0..bytes).0;
        let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
        // SAFETY: both are mappings of ours that nothing borrows; the second is given up for it.
        let moved = unsafe { libc::mremap(from, bytes, bytes, flags, to) };
        if moved == libc::MAP_FAILED {
            return Err(std::io::Error::last_os_error());
        }
        self.start = moved.expose_provenance();
        // What was mapped there is gone.
        std::mem::forget(place);
        Ok(())
    }

    /// Locks a range of bytes into memory, with the flags of mlock2(2).
    ///
    /// # Errors
    /// As mlock2(2).
    pub fn lock(&self, range: Range<usize>, flags: u32) -> Result<()> {
        let (start, bytes) = self.part(range);
        // SAFETY: the range is part of this mapping.
        check(unsafe { libc::mlock2(start, bytes, flags) }.into()).map(drop)
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let (start, bytes) = self.part(0..self.bytes);
        // SAFETY: the mapping is this one's own and nothing borrows it any more.
        unsafe { libc::munmap(start, bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_of_a_mapping_are_kept() {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let mapping = Mapping::anonymous(8192, protection, MapFlags::PRIVATE).unwrap();
        mapping.store(4096, 7);
        assert_eq!(mapping.add(4096, 2), 7);
        assert_eq!((mapping.load(4096), mapping.load(0)), (9, 0));
    }

    #[test]
    fn contents_move_along() {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        let mut mapping = Mapping::anonymous(8192, protection, MapFlags::PRIVATE).unwrap();
        mapping.store(4096, 7);
        let before = mapping.address();
        mapping.relocate().unwrap();
        assert_ne!(mapping.address(), before);
        assert_eq!(mapping.load(4096), 7);
    }

    #[test]
    #[should_panic(expected = "offset + 8 <= self.bytes")]
    fn words_outside_are_refused() {
        let flags = MapFlags::PRIVATE;
        Mapping::anonymous(4096, ProtFlags::READ, flags)
            .unwrap()
            .load(4096);
    }
}
