//! Memory of another process: process_vm_readv(2) and process_vm_writev(2).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

use abi::{Addr, Span};
use libc::iovec;

use crate::process::Process;

/// How many remote pieces one call takes (`UIO_MAXIOV`).
pub const PIECES_MAX: usize = libc::UIO_MAXIOV as usize;

fn local(buf: &mut [u8]) -> iovec {
    iovec {
        iov_base: buf.as_mut_ptr().cast(),
        iov_len: buf.len(),
    }
}

fn remote(addr: Addr, len: usize) -> iovec {
    iovec {
        iov_base: addr.0 as *mut libc::c_void,
        iov_len: len,
    }
}

fn count(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

/// Reads from `process` at `addr`; gives how many bytes could be read before the first page
/// that is not there.
///
/// # Errors
/// `ESRCH`, `EPERM`; `EFAULT` when not even the first byte can be read.
pub fn read(process: &Process, addr: Addr, buf: &mut [u8]) -> io::Result<usize> {
    let to = local(buf);
    let from = remote(addr, buf.len());
    // SAFETY: `to` covers a buffer that is borrowed exclusively for the call; `from` is another
    // process's memory, which the kernel checks.
    count(unsafe { libc::process_vm_readv(process.tid(), &raw const to, 1, &raw const from, 1, 0) })
}

/// Reads exactly `buf.len()` bytes.
///
/// # Errors
/// As [`read`]; `EFAULT` when a part cannot be read.
pub fn read_exact(process: &Process, addr: Addr, buf: &mut [u8]) -> io::Result<()> {
    let got = read(process, addr, buf)?;
    if got == buf.len() {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(libc::EFAULT))
    }
}

/// Reads the pieces `(address, bytes)` one after another into `buf`, at most [`PIECES_MAX`] of
/// them; gives how many bytes were read before the first page that is not there.
///
/// # Errors
/// As [`read`]; `EINVAL` for too many pieces.
///
/// # Panics
/// When `buf` is shorter than the pieces together.
pub fn read_pieces(
    process: &Process,
    pieces: &[(Addr, usize)],
    buf: &mut [u8],
) -> io::Result<usize> {
    let total = pieces.iter().map(|piece| piece.1).sum::<usize>();
    let to = local(&mut buf[..total]);
    let from = pieces
        .iter()
        .map(|(addr, len)| remote(*addr, *len))
        .collect::<Vec<_>>();
    let len = from.len() as u64;
    // SAFETY: `to` covers a buffer that is borrowed exclusively for the call; `from` is another
    // process's memory, which the kernel checks.
    count(unsafe { libc::process_vm_readv(process.tid(), &raw const to, 1, from.as_ptr(), len, 0) })
}

/// Writes all of `bytes` to `process` at `addr`; its mapping must be writable.
///
/// # Errors
/// `ESRCH`, `EPERM`; `EFAULT` when a part cannot be written (what came before it was).
pub fn write(process: &Process, addr: Addr, bytes: &[u8]) -> io::Result<()> {
    let from = iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let to = remote(addr, bytes.len());
    // SAFETY: `from` covers a borrowed buffer that the call only reads; `to` is another process's
    // memory, which the kernel checks.
    let put =
        unsafe { libc::process_vm_writev(process.tid(), &raw const from, 1, &raw const to, 1, 0) };
    if count(put)? == bytes.len() {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(libc::EFAULT))
    }
}

/// Writes each of `pieces`, at most [`PIECES_MAX`], to its address; gives how many bytes were
/// written before the first page that cannot be.
///
/// # Errors
/// As [`write()`]; `EINVAL` for too many pieces.
pub fn write_pieces(process: &Process, pieces: &[(Addr, &[u8])]) -> io::Result<usize> {
    let piece = |(_, bytes): &(Addr, &[u8])| iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let from = pieces.iter().map(piece).collect::<Vec<_>>();
    let to = pieces
        .iter()
        .map(|(addr, bytes)| remote(*addr, bytes.len()))
        .collect::<Vec<_>>();
    let len = pieces.len() as u64;
    // SAFETY: `from` covers borrowed buffers that the call only reads; `to` is another process's
    // memory, which the kernel checks.
    count(unsafe {
        libc::process_vm_writev(process.tid(), from.as_ptr(), len, to.as_ptr(), len, 0)
    })
}

/// Replaces what is mapped in `span` of the process behind `pidfd` by huge pages with the same
/// contents; pages that are missing become present and zero.
///
/// `span` starts and ends on 2 MiB boundaries inside one mapping of anonymous memory, and each
/// 2 MiB of it has a page that is present. Works whatever
/// /sys/kernel/mm/transparent_hugepage/enabled says, unless the mapping or the process refuses
/// huge pages. See `MADV_COLLAPSE` in madvise(2), and process_madvise(2).
///
/// # Errors
/// `EINVAL` when huge pages are refused or not known; `ENOMEM`, `EAGAIN` or `EBUSY` when none can
/// be had now; `ESRCH`, `EPERM`.
pub fn collapse(pidfd: BorrowedFd<'_>, span: Span) -> io::Result<()> {
    let pieces = remote(span.start, span.bytes() as usize);
    let fd = pidfd.as_raw_fd();
    // SAFETY: the one remote vector lives for the call, and advice of this kind keeps contents.
    let done = unsafe {
        libc::syscall(
            libc::SYS_process_madvise,
            fd,
            &raw const pieces,
            1,
            libc::MADV_COLLAPSE,
            0,
        )
    };
    if count(done as isize)? as u64 == span.bytes() {
        Ok(())
    } else {
        Err(io::Error::from_raw_os_error(libc::EAGAIN))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn own_memory_reads_and_writes_back() {
        let own = Process::own();
        let source = [7u8; 100];
        let at = Addr(source.as_ptr() as u64);
        let mut buf = [0u8; 100];
        assert_eq!(read(&own, at, &mut buf).expect("read"), 100);
        assert_eq!(buf, source);
        assert_eq!(
            read_pieces(&own, &[(at, 3), (at, 4)], &mut buf).expect("read"),
            7
        );
        let missing = read(&own, Addr(8), &mut buf).expect_err("nothing is mapped there");
        assert_eq!(missing.raw_os_error(), Some(libc::EFAULT));
    }
}
