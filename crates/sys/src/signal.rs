//! Signals to single threads.

use std::io;

/// Sends `signal` to thread `tid` of process `pid`. See tgkill(2).
///
/// # Errors
/// `ESRCH` when there is no such thread, `EPERM`, `EINVAL`.
pub fn to_thread(pid: i32, tid: i32, signal: i32) -> io::Result<()> {
    // SAFETY: the call takes three numbers.
    let result = unsafe { libc::syscall(libc::SYS_tgkill, pid, tid, signal) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_is_reached_by_both_its_numbers() {
        let own = std::process::id().cast_signed();
        let tid = rustix::thread::gettid().as_raw_nonzero().get();
        to_thread(own, tid, 0).expect("it is this one");
        let error = to_thread(own, i32::MAX, 0).expect_err("nobody");
        assert_eq!(error.raw_os_error(), Some(libc::ESRCH));
    }
}
