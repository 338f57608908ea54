//! An object that is read as a file: shared memory, a disk, a machine's memory file.
use std::os::fd::{BorrowedFd, OwnedFd};

use abi::spans::Spans;
use abi::{Addr, PAGE_BYTES, Span};
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;

use crate::{Error, Extent, Result, Source};

/// A file, a block device or a shared memory object that is open for reading.
///
/// An extent's `at` is an offset here. What the last page has behind the end is zero.
#[derive(Debug)]
pub struct Object {
    fd: OwnedFd,
    end_bytes: u64,
}

impl Object {
    /// The object behind `fd`.
    #[must_use]
    pub const fn new(fd: OwnedFd) -> Self {
        Self::until(fd, u64::MAX)
    }

    /// Only the first bytes of the object behind `fd`.
    #[must_use]
    pub const fn until(fd: OwnedFd, end_bytes: u64) -> Self {
        Self { fd, end_bytes }
    }
}

impl Source for Object {
    fn read(&self, extents: &[Extent], mut buffer: &mut [u8]) -> Result<()> {
        for extent in extents {
            let (mut part, rest) = buffer.split_at_mut(extent.bytes() as usize);
            buffer = rest;
            let mut at = extent.at.0;
            while !part.is_empty() {
                let left = self.end_bytes.saturating_sub(at).min(part.len() as u64);
                let got = match rustix::io::pread(&self.fd, &mut part[..left as usize], at) {
                    Err(Errno::INTR) => continue,
                    other => other.map_err(failed("read", at))?,
                };
                if got == 0 {
                    part.fill(0);
                    break;
                }
                at += got as u64;
                part = &mut part[got..];
            }
        }
        Ok(())
    }
}

/// Finds the allocated parts of the shared memory object or file behind `fd`, as page-aligned
/// spans of offsets.
///
/// Moves the offset of the open file description: open the object anew (/proc/PID/map_files,
/// /proc/PID/fd) instead of using a description that a task has.
///
/// # Errors
/// [`Error::Object`].
pub fn allocated(fd: BorrowedFd<'_>) -> Result<Spans> {
    let failed = |offset_bytes| failed("search", offset_bytes);
    let mut spans = Spans::new();
    let mut offset = 0;
    loop {
        let start = match seek(fd, SeekFrom::Data(offset)) {
            // There is no data behind the offset.
            Err(Errno::NXIO) => return Ok(spans),
            other => other.map_err(failed(offset))?,
        };
        offset = seek(fd, SeekFrom::Hole(start)).map_err(failed(start))?;
        let end = Addr(offset.next_multiple_of(PAGE_BYTES));
        let start = Addr(start).page_start();
        spans.push(Span { start, end });
    }
}

fn failed(action: &'static str, offset_bytes: u64) -> impl Fn(Errno) -> Error {
    move |errno| Error::Object {
        action,
        offset_bytes,
        source: errno.into(),
    }
}

#[cfg(test)]
mod tests {
    use std::io::{self, Seek, Write};
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn allocated_pages_of_a_memfd_are_found() {
        let fd = rustix::fs::memfd_create("pages", rustix::fs::MemfdFlags::CLOEXEC);
        let mut file = std::fs::File::from(fd.expect("a memfd"));
        file.set_len(100 * PAGE_BYTES).expect("a length");
        assert_eq!(allocated(file.as_fd()).expect("a search"), []);
        for page in [3, 4, 90] {
            file.seek(io::SeekFrom::Start(page * PAGE_BYTES + 5))
                .expect("a place");
            file.write_all(b"x").expect("a byte");
        }
        let expected = [
            Span::new(Addr(0x3000), 0x2000),
            Span::new(Addr(90 << 12), 0x1000),
        ];
        assert_eq!(allocated(file.as_fd()).expect("a search"), expected);
    }

    #[test]
    fn what_is_behind_the_end_is_zero() {
        let file = tempfile::tempfile().expect("a file");
        std::os::unix::fs::FileExt::write_at(&file, b"end", PAGE_BYTES).expect("written");
        let extent = |at: u64, pages| Extent {
            space: image::SpaceId(1),
            first_page: at / PAGE_BYTES,
            at: Addr(at),
            pages,
        };
        let again = file.try_clone().expect("a descriptor");
        let cut = Object::until(again.into(), PAGE_BYTES + 2);
        for (object, bytes) in [(Object::new(file.into()), &b"end"[..]), (cut, b"en")] {
            let mut buffer = vec![1; 3 * PAGE_BYTES as usize];
            let read = object.read(&[extent(PAGE_BYTES, 2), extent(0, 1)], &mut buffer);
            read.expect("read");
            assert_eq!(&buffer[..bytes.len()], bytes);
            assert!(buffer[bytes.len()..].iter().all(|byte| *byte == 0));
        }
    }
}
