//! Memory of 64-bit words, of one process alone or shared with those that come after it.
use std::io;
use std::ops::{Deref, Range};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

use abi::bits::AtomicWords;
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat,
    ftruncate, memfd_create,
};

/// The size of a word.
const WORD_BYTES: usize = size_of::<AtomicU64>();

/// So much of a file may be mapped: it can never be cut.
const SEALS: SealFlags = SealFlags::SHRINK
    .union(SealFlags::GROW)
    .union(SealFlags::SEAL);

/// Words that begin as zeros, mapped as long as this lives.
#[derive(Debug)]
pub struct Words {
    start: NonNull<AtomicU64>,
    len: usize,
}

// SAFETY: the mapping belongs to no thread.
unsafe impl Send for Words {}
// SAFETY: it is reached by atomics only.
unsafe impl Sync for Words {}

impl Words {
    /// `len` words of this process.
    ///
    /// # Errors
    /// Those of mmap(2); `EINVAL` for none.
    pub fn own(len: usize) -> io::Result<Self> {
        Self::mapped(len, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS, -1)
    }

    /// Makes a file of `len` words, whose memory is there and whose length stays, to be mapped by
    /// [`Self::of_file`]. See memfd_create(2).
    ///
    /// # Errors
    /// Those of the calls: `ENOMEM`.
    pub fn file(name: &str, len: usize) -> io::Result<OwnedFd> {
        let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        let bytes = (len * WORD_BYTES) as u64;
        fallocate(&file, FallocateFlags::empty(), 0, bytes)?;
        fcntl_add_seals(&file, SEALS)?;
        Ok(file)
    }

    /// Words that this process alone can ever write, and their file, for others to map: its memory
    /// comes as it is written. See fcntl(2), `F_SEAL_FUTURE_WRITE`.
    ///
    /// # Errors
    /// Those of the calls.
    pub fn published(name: &str, len: usize) -> io::Result<(Self, OwnedFd)> {
        let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, (len * WORD_BYTES) as u64)?;
        let words = Self::mapped(len, libc::MAP_SHARED, file.as_raw_fd())?;
        fcntl_add_seals(&file, SEALS | SealFlags::FUTURE_WRITE)?;
        Ok((words, file))
    }

    /// The words of a file of [`Self::file`], which other processes may change as well.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for another file; those of mmap(2).
    pub fn of_file(file: impl AsFd) -> io::Result<Self> {
        let sealed = fcntl_get_seals(&file).is_ok_and(|seals| seals.contains(SEALS));
        let bytes = usize::try_from(fstat(&file)?.st_size).unwrap_or(0);
        if !sealed || !bytes.is_multiple_of(WORD_BYTES) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let number = file.as_fd().as_raw_fd();
        Self::mapped(bytes / WORD_BYTES, libc::MAP_SHARED, number)
    }

    /// `len` words of a file that is never cut, or of none. See mmap(2).
    pub(crate) fn mapped(len: usize, flags: i32, file: i32) -> io::Result<Self> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let bytes = len * WORD_BYTES;
        // SAFETY: the kernel chooses a free place: nothing that is in use is replaced.
        let start = unsafe { libc::mmap(ptr::null_mut(), bytes, prot, flags, file, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast()).ok_or(io::ErrorKind::AddrInUse)?;
        Ok(Self { start, len })
    }

    /// Keeps words in memory: who has the kernel write there waits for nothing. See mlock(2).
    ///
    /// # Errors
    /// `ENOMEM`, `EPERM` where the limit of locked memory is reached.
    ///
    /// # Panics
    /// When `range` is not among them.
    pub fn lock(&self, range: Range<usize>) -> io::Result<()> {
        let part = &self[range];
        // SAFETY: they are mapped, and locking changes nothing that they hold.
        let locked = unsafe { libc::mlock(part.as_ptr().cast(), size_of_val(part)) };
        match locked {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

impl Deref for Words {
    type Target = [AtomicU64];

    fn deref(&self) -> &[AtomicU64] {
        // SAFETY: mapped for as long as `self`, aligned, never cut, all zeros at first, and reached
        // by atomics only.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl AtomicWords for Words {
    fn words(&self) -> &[AtomicU64] {
        self
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own, and no reference into it outlives it.
        unsafe { libc::munmap(self.start.as_ptr().cast(), self.len * WORD_BYTES) };
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering::SeqCst;

    use super::*;

    #[test]
    fn words_of_a_file_are_those_of_all_who_map_it() {
        let file = Words::file("words", 1000).unwrap();
        let (one, other) = (
            Words::of_file(&file).unwrap(),
            Words::of_file(&file).unwrap(),
        );
        assert_eq!((one.len(), other.len()), (1000, 1000));
        one[999].store(7, SeqCst);
        assert_eq!(other[999].load(SeqCst), 7);
        drop(one);
        assert_eq!(Words::of_file(&file).unwrap()[999].load(SeqCst), 7);
        assert!(rustix::fs::ftruncate(&file, 8).is_err());
    }

    #[test]
    fn files_that_could_be_cut_are_refused() {
        let file = memfd_create("other", MemfdFlags::CLOEXEC).unwrap();
        rustix::fs::ftruncate(&file, 4096).unwrap();
        let error = Words::of_file(&file).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput);
    }

    #[test]
    fn what_is_published_is_written_by_its_maker_alone() {
        let (words, file) = Words::published("words", 1024).unwrap();
        words[600].store(9, SeqCst);
        let file = std::fs::File::from(file);
        let mut bytes = [0; 8];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut bytes, 4800).unwrap();
        assert_eq!(u64::from_ne_bytes(bytes), 9);
        let written = std::os::unix::fs::FileExt::write_at(&file, b"x", 0);
        assert_eq!(written.unwrap_err().raw_os_error(), Some(libc::EPERM));
        assert!(Words::of_file(&file).is_err());
    }

    #[test]
    fn words_of_ones_own_are_zeros() {
        let words = Words::own(10).unwrap();
        assert!(words.iter().all(|word| word.load(SeqCst) == 0));
        words.lock(0..10).unwrap();
        assert!(Words::own(0).is_err());
    }
}
