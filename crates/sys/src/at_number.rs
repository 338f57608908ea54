//! A descriptor at a number of the caller's choice, for a moment.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};

use rustix::io::{Errno, FdFlags};

/// Calls `act` while `number` of this process refers to the description of `fd`. What is open
/// there stands elsewhere meanwhile and comes back. No other thread may use the number.
///
/// # Errors
/// `EBADF` for a number beyond `RLIMIT_NOFILE`, `EMFILE`. See dup2(2).
pub fn at_number<T>(
    fd: BorrowedFd<'_>,
    number: i32,
    act: impl FnOnce(BorrowedFd<'_>) -> T,
) -> io::Result<T> {
    if fd.as_raw_fd() == number {
        return Ok(act(fd));
    }
    if number < 0 {
        return Err(Errno::BADF.into());
    }
    // SAFETY: it is only asked whether the number is in use, and copied if it is; later it is used
    // while it is one of ours.
    let there = unsafe { BorrowedFd::borrow_raw(number) };
    let kept = match rustix::io::fcntl_dupfd_cloexec(there, 0) {
        Ok(kept) => Some((kept, rustix::io::fcntl_getfd(there)?)),
        Err(Errno::BADF) => None,
        Err(error) => return Err(error.into()),
    };
    put(fd, number, FdFlags::CLOEXEC)?;
    let result = act(there);
    match kept {
        Some((kept, flags)) => put(kept.as_fd(), number, flags)?,
        // SAFETY: the number was free before, so nobody else owns it.
        None => drop(unsafe { OwnedFd::from_raw_fd(number) }),
    }
    Ok(result)
}

fn put(fd: BorrowedFd<'_>, number: i32, flags: FdFlags) -> io::Result<()> {
    let cloexec = if flags.contains(FdFlags::CLOEXEC) {
        libc::O_CLOEXEC
    } else {
        0
    };
    // SAFETY: whoever owns the number gets its description back before anybody can use it.
    match unsafe { libc::dup3(fd.as_raw_fd(), number, cloexec) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(number: i32) -> Option<std::path::PathBuf> {
        std::fs::read_link(format!("/proc/self/fd/{number}")).ok()
    }

    fn seen(fd: BorrowedFd<'_>) -> Option<std::path::PathBuf> {
        link(fd.as_raw_fd())
    }

    #[test]
    fn what_was_there_comes_back() {
        let (zero, null) = (
            std::fs::File::open("/dev/zero").unwrap(),
            std::fs::File::open("/dev/null").unwrap(),
        );
        // Numbers that no other test of this process uses.
        let at = |number| rustix::io::fcntl_dupfd_cloexec(&null, number).unwrap();
        let taken = at(900);
        let number = taken.as_raw_fd();
        let there = at_number(zero.as_fd(), number, seen).unwrap();
        assert_eq!(there.as_deref(), Some(std::path::Path::new("/dev/zero")));
        assert_eq!(
            link(number).as_deref(),
            Some(std::path::Path::new("/dev/null"))
        );
        drop(taken);
        let there = at_number(zero.as_fd(), number, seen).unwrap();
        assert_eq!(there.as_deref(), Some(std::path::Path::new("/dev/zero")));
        assert_eq!(link(number), None);
    }
}
