//! What a child has used up.

use std::io;
use std::mem::MaybeUninit;
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, ExitStatus};

/// Waits until a child has ended; tells how, and how much memory it had at most, in bytes
/// (`ru_maxrss`): that of its largest moment, or of its maker when it was made.
///
/// # Errors
/// As wait4(2).
pub fn wait(child: &Child) -> io::Result<(ExitStatus, u64)> {
    let pid = child.id().cast_signed();
    let mut status = 0;
    let mut usage = MaybeUninit::<libc::rusage>::zeroed();
    loop {
        // SAFETY: the kernel writes one status and one `struct rusage`, and both live here.
        let got = unsafe { libc::wait4(pid, &raw mut status, 0, usage.as_mut_ptr()) };
        if got == pid {
            break;
        }
        let error = io::Error::last_os_error();
        if error.kind() != io::ErrorKind::Interrupted {
            return Err(error);
        }
    }
    // SAFETY: all bytes zero are a `struct rusage` too, and the kernel has written one.
    let usage = unsafe { usage.assume_init() };
    let peak_kib = u64::try_from(usage.ru_maxrss).unwrap_or(0);
    Ok((ExitStatus::from_raw(status), peak_kib * 1024))
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    fn a_childs_end_and_its_memory_are_told() {
        let child = Command::new("sh").args(["-c", "exit 3"]).spawn();
        let (status, peak_bytes) = wait(&child.expect("sh")).expect("it ends");
        assert_eq!(status.code(), Some(3));
        assert!(peak_bytes >= 4096, "{peak_bytes}");
    }
}
