//! Files in memory that no path leads to, beyond what rustix has.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Makes a file whose memory the kernel itself cannot read (memfd_secret(2)).
///
/// # Errors
/// `ENOSYS` where it is not enabled.
pub fn secret() -> io::Result<OwnedFd> {
    // SAFETY: the call takes no pointers.
    let fd = unsafe { libc::syscall(libc::SYS_memfd_secret, 0) };
    let fd = i32::try_from(fd).expect("a descriptor or -1");
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just made and belongs to no one else.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// A mapping of this process that nobody has a reference into.
struct Mapping {
    start: *mut libc::c_void,
    len: usize,
}

impl Mapping {
    fn new(len: usize, prot: i32, flags: i32, file: i32, offset: i64) -> io::Result<Self> {
        // SAFETY: the kernel chooses a free place: nothing that is in use is replaced.
        let start = unsafe { libc::mmap(std::ptr::null_mut(), len, prot, flags, file, offset) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        Ok(Self { start, len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the mapping is this value's own and goes with it.
        unsafe { libc::munmap(self.start, self.len) };
    }
}

/// Makes shared anonymous memory of `len` bytes, as mmap(2) with `MAP_SHARED | MAP_ANONYMOUS`
/// does, and with `MAP_HUGETLB` for huge pages of a size, and gives a descriptor to map it by.
/// Needs `CAP_CHECKPOINT_RESTORE` or `CAP_SYS_ADMIN`.
///
/// # Errors
/// `EINVAL` for no bytes, `ENOMEM`; `EPERM` without the privilege.
pub fn shared_anonymous(len: usize, huge_page_bytes: Option<u64>) -> io::Result<OwnedFd> {
    let mut flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
    if let Some(page_bytes) = huge_page_bytes {
        let shift = page_bytes.trailing_zeros().cast_signed();
        flags |= libc::MAP_HUGETLB | shift << libc::MAP_HUGE_SHIFT;
    }
    let len = len.next_multiple_of(huge_page_bytes.unwrap_or(4096) as usize);
    let mapping = Mapping::new(len, libc::PROT_NONE, flags, -1, 0)?;
    let start = mapping.start.addr();
    let end = start + len;
    let path = crate::procfs::path(format_args!("self/map_files/{start:x}-{end:x}"));
    let file = OpenOptions::new().read(true).write(true).open(path)?;
    Ok(file.into())
}

/// All of a file, mapped for writing by who has its addresses: process_vm_writev(2), which also
/// writes where write(2) does not (hugetlbfs).
pub struct Mapped(Mapping);

impl Mapped {
    /// Maps the first `len` bytes of a file, shared. What that takes of a file's huge pages is the
    /// file's from then on, also when this is gone.
    ///
    /// # Errors
    /// mmap(2): `ENOMEM` when there are not enough huge pages.
    pub fn new(file: BorrowedFd<'_>, len: usize) -> io::Result<Self> {
        let prot = libc::PROT_READ | libc::PROT_WRITE;
        let mapping = Mapping::new(len, prot, libc::MAP_SHARED, file.as_raw_fd(), 0)?;
        Ok(Self(mapping))
    }

    /// Where it is in this process.
    #[must_use]
    pub fn start(&self) -> u64 {
        self.0.start.addr() as u64
    }
}

/// Writes `bytes`, whole pages, at `offset` of a file that can only be written by mapping it
/// (hugetlbfs); `offset` is a multiple of its page size.
///
/// # Errors
/// mmap(2): `ENOMEM` when there are not enough huge pages.
pub fn write_mapped(file: BorrowedFd<'_>, offset: u64, bytes: &[u8]) -> io::Result<()> {
    let offset = i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
    if bytes.is_empty() {
        return Ok(());
    }
    let prot = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
    let len = bytes.len();
    let mapping = Mapping::new(len, prot, flags, file.as_raw_fd(), offset)?;
    // SAFETY: the mapping is `len` bytes long, writable and overlaps nothing; its pages were
    // reserved when it was made.
    unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), mapping.start.cast(), len) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;
    use std::os::unix::fs::FileExt;

    use super::*;

    #[test]
    fn shared_memory_is_named_as_the_kernel_names_it() {
        let memory = match shared_anonymous(10_000, None) {
            Ok(memory) => memory,
            Err(error) => {
                assert_eq!(error.raw_os_error(), Some(libc::EPERM), "{error}");
                return;
            }
        };
        let link = std::fs::read_link(format!("/proc/self/fd/{}", memory.as_raw_fd()));
        assert_eq!(link.expect("link").to_str(), Some("/dev/zero (deleted)"));
        write_mapped(memory.as_fd(), 4096, b"text").expect("map");
        let mut bytes = [0; 4];
        let file = File::from(memory);
        file.read_exact_at(&mut bytes, 4096).expect("read");
        assert_eq!(&bytes, b"text");
    }
}
