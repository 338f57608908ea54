//! Whether two descriptors of other tasks are one: kcmp(2).
use std::cmp::Ordering;
use std::io;

/// Orders the open file descriptions behind two descriptors, each given as the task's pid and its
/// number there; equal when they are one. The order is the kernel's own and total.
///
/// # Errors
/// As kcmp(2): `ESRCH`, `EBADF`, `EPERM` without the right to trace both tasks.
pub fn compare_files(first: (u32, i32), second: (u32, i32)) -> io::Result<Ordering> {
    const KCMP_FILE: i32 = 0;
    let ((pid, fd), (other_pid, other_fd)) = (first, second);
    // SAFETY: kcmp takes five numbers and touches no memory of this process.
    let answer = unsafe { libc::syscall(libc::SYS_kcmp, pid, other_pid, KCMP_FILE, fd, other_fd) };
    match answer {
        0 => Ok(Ordering::Equal),
        1 => Ok(Ordering::Less),
        2 => Ok(Ordering::Greater),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    #[test]
    fn a_description_shared_by_dup_is_one() {
        let own = std::process::id();
        let first = std::fs::File::open("/dev/null").unwrap();
        let second = std::fs::File::open("/dev/null").unwrap();
        let twin = first.try_clone().unwrap();
        let compare = |other: &std::fs::File| {
            compare_files((own, first.as_raw_fd()), (own, other.as_raw_fd())).unwrap()
        };
        assert_eq!(compare(&twin), Ordering::Equal);
        assert_ne!(compare(&second), Ordering::Equal);
    }
}
