//! The restore area: memory at a chosen address that a restorer shares with all tasks it makes.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use abi::{Addr, PAGE_BYTES, Span};
use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::io::Errno;
use rustix::thread::futex;
use rustix::time::{ClockId, Timespec, clock_gettime};

/// The name of its memory, by which a task that is being made is told from others.
pub const NAME: &str = "stillframe-restore-area";

/// A page of code and pages of data behind it, shared with every process forked from here. The
/// tasks write into the data at any time, so it is only reached by copies and atomics.
#[derive(Debug)]
pub struct RestoreArea {
    span: Span,
}

impl RestoreArea {
    /// Makes the memory of a restore area of `bytes`, with `code` in its first page.
    ///
    /// # Errors
    /// `ENOMEM`, `EMFILE`.
    ///
    /// # Panics
    /// When `code` is longer than a page or `bytes` are not at least two.
    pub fn memory(bytes: u64, code: &[u8]) -> io::Result<OwnedFd> {
        assert!(
            code.len() as u64 <= PAGE_BYTES && bytes >= 2 * PAGE_BYTES,
            "code and data have room"
        );
        let file = memfd_create(NAME, MemfdFlags::CLOEXEC)?;
        ftruncate(&file, bytes)?;
        rustix::io::pwrite(&file, code, 0)?;
        Ok(file)
    }

    /// Maps the `file` of [`Self::memory`] at `span`, which is as long.
    ///
    /// # Errors
    /// `EEXIST` when something is mapped there already; `ENOMEM`.
    pub fn map(span: Span, file: BorrowedFd<'_>) -> io::Result<Self> {
        let map = |start: Addr, bytes: u64, prot: i32, offset: u64| {
            let flags = libc::MAP_SHARED | libc::MAP_FIXED_NOREPLACE;
            let fd = file.as_raw_fd();
            let at = start.0 as *mut libc::c_void;
            let (len, offset) = (bytes as usize, offset.cast_signed());
            // SAFETY: MAP_FIXED_NOREPLACE maps nothing over memory that is in use.
            let got = unsafe { libc::mmap(at, len, prot, flags, fd, offset) };
            if got == libc::MAP_FAILED {
                Err(io::Error::last_os_error())
            } else {
                Ok(())
            }
        };
        map(span.start, PAGE_BYTES, libc::PROT_READ | libc::PROT_EXEC, 0)?;
        let area = Self {
            span: Span::new(span.start, PAGE_BYTES),
        };
        let data = span.start.plus(PAGE_BYTES);
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        map(data, span.bytes() - PAGE_BYTES, prot, PAGE_BYTES)?;
        std::mem::forget(area);
        Ok(Self { span })
    }

    /// The addresses, here and in every task.
    #[must_use]
    pub fn span(&self) -> Span {
        self.span
    }

    fn check(&self, at: Addr, len: usize) {
        let data = Span {
            start: self.span.start.plus(PAGE_BYTES),
            end: self.span.end,
        };
        let inside = data.contains(at) && at.plus(len as u64) <= data.end;
        assert!(
            inside,
            "{at} + {len} is not in the restore area's data {data}"
        );
    }

    /// Copies bytes into the data.
    ///
    /// # Panics
    /// Outside of the data.
    pub fn write(&self, at: Addr, bytes: &[u8]) {
        self.check(at, bytes.len());
        // Up to the first whole word, the words, and what is left.
        let (head, rest) = bytes.split_at(bytes.len().min(at.0.wrapping_neg() as usize % 8));
        let (words, tail) = rest.as_chunks::<8>();
        let mut at = at.0;
        for byte in head {
            self.store_byte(at, *byte);
            at += 1;
        }
        for word in words {
            // SAFETY: mapped for as long as `self`, aligned, and reached by atomics only.
            let there = unsafe { AtomicU64::from_ptr(at as *mut u64) };
            there.store(u64::from_ne_bytes(*word), Ordering::Relaxed);
            at += 8;
        }
        for byte in tail {
            self.store_byte(at, *byte);
            at += 1;
        }
    }

    fn store_byte(&self, at: u64, byte: u8) {
        // SAFETY: mapped for as long as `self`, and reached by atomics only; the caller has checked
        // that it is in the data.
        let there = unsafe { AtomicU8::from_ptr(at as *mut u8) };
        there.store(byte, Ordering::Relaxed);
    }

    /// A 32-bit word of the data.
    ///
    /// # Panics
    /// Outside of the data, or unaligned.
    #[must_use]
    pub fn word(&self, at: Addr) -> &AtomicU32 {
        self.check(at, 4);
        assert!(at.0.is_multiple_of(4), "{at} is aligned");
        // SAFETY: mapped for as long as `self`, aligned, and reached by atomics only.
        unsafe { AtomicU32::from_ptr(at.0 as *mut u32) }
    }

    /// Reads a 64-bit word of the data.
    ///
    /// # Panics
    /// Outside of the data, or unaligned.
    #[must_use]
    pub fn load(&self, at: Addr) -> u64 {
        self.check(at, 8);
        assert!(at.0.is_multiple_of(8), "{at} is aligned");
        // SAFETY: mapped for as long as `self`, aligned, and reached by atomics only.
        let word = unsafe { AtomicU64::from_ptr(at.0 as *mut u64) };
        word.load(Ordering::Acquire)
    }

    /// Sleeps until one of the words is not what was seen of it, somebody wakes who waits for it, a
    /// signal comes, or `patience` is over. See futex(2), and futex_waitv in the kernel's
    /// Documentation/userspace-api/futex2.rst; kernels before 5.16 wait for the first word.
    pub fn sleep_on(&self, seen: [(&AtomicU32, u32); 2], patience: Duration) {
        let patience = Timespec::try_from(patience).expect("a short time");
        let all = seen.map(|(word, seen)| {
            let mut wait = futex::Wait::new();
            wait.val = seen.into();
            wait.uaddr = futex::WaitPtr::new(word.as_ptr().cast());
            wait.flags = futex::WaitFlags::SIZE_U32;
            wait
        });
        let deadline = clock_gettime(ClockId::Monotonic) + patience;
        let none = futex::WaitvFlags::empty();
        // Whatever ends the sleep, the caller looks at the words again.
        if futex::waitv(&all, none, Some(&deadline), ClockId::Monotonic) == Err(Errno::NOSYS) {
            let (word, seen) = seen[0];
            let _ = futex::wait(word, futex::Flags::empty(), seen, Some(&patience));
        }
    }

    /// Sets the word and wakes everyone who waits for it.
    pub fn post(&self, word: &AtomicU32, value: u32) {
        word.store(value, Ordering::Release);
        let _ = futex::wake(word, futex::Flags::empty(), i32::MAX.cast_unsigned());
    }
}

impl Drop for RestoreArea {
    fn drop(&mut self) {
        let (at, len) = (
            self.span.start.0 as *mut libc::c_void,
            self.span.bytes() as usize,
        );
        // SAFETY: the mapping was made by `map` and no reference into it outlives `self`.
        unsafe { libc::munmap(at, len) };
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn whoever_sleeps_on_two_words_hears_of_either() {
        let span = Span::new(Addr(0x6200_0000_0000), 2 * PAGE_BYTES);
        let file = RestoreArea::memory(span.bytes(), &[]).expect("memory");
        let area = RestoreArea::map(span, file.as_fd()).expect("free");
        let words = [0, 8].map(|at| area.word(span.start.plus(PAGE_BYTES + at)));
        for posted in words {
            std::thread::scope(|scope| {
                scope.spawn(|| area.post(posted, 1));
                while posted.load(Ordering::Acquire) == 0 {
                    area.sleep_on(words.map(|word| (word, 0)), Duration::from_secs(3600));
                }
            });
            posted.store(0, Ordering::Release);
        }
    }

    #[test]
    fn data_is_written_and_read() {
        let span = Span::new(Addr(0x6100_0000_0000), 2 * PAGE_BYTES);
        let file = RestoreArea::memory(span.bytes(), &[0xc3]).expect("memory");
        let area = RestoreArea::map(span, file.as_fd()).expect("free");
        let data = span.start.plus(PAGE_BYTES);
        area.write(data, &7u64.to_le_bytes());
        assert_eq!(area.load(data), 7);
        assert_eq!(area.word(data).load(Ordering::Relaxed), 7);
        let bytes = (1..=30).collect::<Vec<u8>>();
        area.write(data.plus(5), &bytes);
        let read = |at: u64| area.load(data.plus(at)).to_ne_bytes();
        assert_eq!(read(0), [7, 0, 0, 0, 0, 1, 2, 3]);
        assert_eq!(read(8), [4, 5, 6, 7, 8, 9, 10, 11]);
        assert_eq!(read(32), [28, 29, 30, 0, 0, 0, 0, 0]);
        let taken = RestoreArea::map(span, file.as_fd()).expect_err("in use");
        assert_eq!(taken.raw_os_error(), Some(libc::EEXIST));
    }
}
