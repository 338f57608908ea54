//! The files of a directory: those under construction, and those that are read.

use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use rustix::fs::FallocateFlags;
use rustix::io::{Errno, retry_on_intr};

use super::{Location, THE_DIRECTORY, temporary};
use crate::{Error, NewObject, Object, Result, check_range};

/// Type of a tmpfs in fstatfs(2).
const TMPFS_MAGIC: rustix::fs::FsWord = 0x0102_1994;

/// A file under construction.
pub(super) struct NewFile {
    pub fd: OwnedFd,
    pub name: String,
    /// The name that must go when this is dropped.
    pub temporary: Option<String>,
    pub reserved: AtomicBool,
    /// End of the last written byte.
    pub written_bytes: AtomicU64,
    pub directory: Arc<Location>,
}

/// Fills all of `bytes` from `offset_bytes` of the file called `name`.
fn read_all(
    fd: &OwnedFd,
    name: &str,
    bytes: &mut [u8],
    offset_bytes: u64,
    failed: &dyn Fn(Errno) -> Error,
) -> Result<()> {
    let end_bytes = offset_bytes.saturating_add(bytes.len() as u64);
    let mut done = 0;
    while done < bytes.len() {
        let at_bytes = offset_bytes + done as u64;
        match retry_on_intr(|| rustix::io::pread(fd, &mut bytes[done..], at_bytes)) {
            Ok(0) => {
                return Err(Error::Short {
                    name: name.into(),
                    end_bytes,
                    len_bytes: at_bytes,
                });
            }
            Ok(count) => done += count,
            Err(errno) => return Err(failed(errno)),
        }
    }
    Ok(())
}

/// Gives back the room of parts of a file, whose length stays.
pub(super) fn punch(fd: &OwnedFd, parts_bytes: &[Range<u64>]) -> rustix::io::Result<()> {
    let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    for part in parts_bytes.iter().filter(|part| !part.is_empty()) {
        let len_bytes = part.end - part.start;
        retry_on_intr(|| rustix::fs::fallocate(fd, how, part.start, len_bytes))?;
    }
    Ok(())
}

impl NewObject for NewFile {
    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            let offset_bytes = offset_bytes.saturating_add(done as u64);
            match retry_on_intr(|| rustix::io::pwrite(&self.fd, &bytes[done..], offset_bytes)) {
                Ok(0) => return Err(self.failed("write", Errno::NOSPC)),
                Ok(count) => done += count,
                Err(errno) => return Err(self.failed("write", errno)),
            }
        }
        self.written_bytes
            .fetch_max(offset_bytes.saturating_add(done as u64), Relaxed);
        Ok(())
    }

    fn read_at(&self, bytes: &mut [u8], offset_bytes: u64) -> Result<()> {
        let failed = |errno| self.failed("read", errno);
        read_all(&self.fd, &self.name, bytes, offset_bytes, &failed)
    }

    fn reserve(&self, len_bytes: u64) -> Result<()> {
        if len_bytes == 0 {
            return Ok(());
        }
        // Memory is not allocated faster all at once, and not by several threads as writes are.
        if rustix::fs::fstatfs(&self.fd).is_ok_and(|of| of.f_type == TMPFS_MAGIC) {
            return Ok(());
        }
        let keep = FallocateFlags::KEEP_SIZE;
        match retry_on_intr(|| rustix::fs::fallocate(&self.fd, keep, 0, len_bytes)) {
            Ok(()) => {
                self.reserved.store(true, Relaxed);
                Ok(())
            }
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            Err(errno) => Err(self.failed("reserve space for", errno)),
        }
    }

    fn free(&self, parts_bytes: &[Range<u64>]) -> Result<()> {
        match punch(&self.fd, parts_bytes) {
            Ok(()) | Err(Errno::OPNOTSUPP | Errno::NOSYS) => Ok(()),
            Err(errno) => Err(self.failed("free parts of", errno)),
        }
    }

    fn cut(&self, len_bytes: u64) -> Result<()> {
        let cut = rustix::fs::ftruncate(&self.fd, len_bytes);
        cut.map_err(|errno| self.failed("cut", errno))?;
        self.written_bytes.store(len_bytes, Relaxed);
        Ok(())
    }

    fn commit(mut self: Box<Self>, durable: bool) -> Result<()> {
        if self.reserved.load(Relaxed) {
            let len_bytes = self.written_bytes.load(Relaxed);
            rustix::fs::ftruncate(&self.fd, len_bytes)
                .map_err(|errno| self.failed("cut the reserved space of", errno))?;
        }
        if durable {
            retry_on_intr(|| rustix::fs::fsync(&self.fd))
                .map_err(|errno| self.failed("write out", errno))?;
        }
        self.publish().map_err(|errno| self.failed("name", errno))?;
        if durable {
            self.directory
                .sync_directories()
                .map_err(|source| self.directory.failed("write out", THE_DIRECTORY, source))?;
        }
        Ok(())
    }
}

impl NewFile {
    fn failed(&self, action: &'static str, errno: Errno) -> Error {
        self.directory.failed(action, &self.name, errno)
    }

    /// Gives the file its name: by one call where the name is free.
    fn publish(&mut self) -> rustix::io::Result<()> {
        let directory = &self.directory;
        while self.temporary.is_none() {
            match directory.link(self.fd.as_fd(), &self.name) {
                Err(Errno::EXIST) => {}
                result => return result,
            }
            let temporary = temporary(&self.name);
            match directory.link(self.fd.as_fd(), &temporary) {
                Ok(()) => self.temporary = Some(temporary),
                Err(Errno::EXIST) => {}
                Err(errno) => return Err(errno),
            }
        }
        let temporary = self
            .temporary
            .as_deref()
            .expect("the loop above ends with a name");
        rustix::fs::renameat(&directory.fd, temporary, &directory.fd, self.name.as_str())?;
        self.temporary = None;
        Ok(())
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if let Some(temporary) = &self.temporary {
            self.directory.remove_temporary(temporary);
        }
    }
}

/// An opened file.
pub(super) struct File {
    pub fd: OwnedFd,
    pub name: String,
    pub len_bytes: u64,
    pub directory: Arc<Location>,
}

impl Object for File {
    fn name(&self) -> &str {
        &self.name
    }

    fn len_bytes(&self) -> u64 {
        self.len_bytes
    }

    fn read_at(&self, bytes: &mut [u8], offset_bytes: u64) -> Result<()> {
        check_range(self, bytes, offset_bytes)?;
        let failed = |errno| self.directory.failed("read", &self.name, errno);
        read_all(&self.fd, &self.name, bytes, offset_bytes, &failed)
    }

    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.fd.as_fd())
    }
}
