//! fork(2) for programs of one thread: subjects of tests and benchmarks.
use std::io;

use rustix::process::Pid;

/// Where a process finds itself after [`fork`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fork {
    /// In the new process.
    Child,
    /// In the process that called, with the new one's pid.
    Parent(Pid),
}

/// Makes a copy of the calling process, which has to have one thread.
///
/// See fork(2).
///
/// # Errors
/// [`io::ErrorKind::ResourceBusy`] in a process with several threads, whose locks the child might
/// find taken for ever; otherwise as fork(2), and when /proc/self/task cannot be read.
pub fn fork() -> io::Result<Fork> {
    if std::fs::read_dir("/proc/self/task")?.count() != 1 {
        return Err(io::ErrorKind::ResourceBusy.into());
    }
    // SAFETY: one thread runs, and it is here: no lock of the C library or of Rust is held.
    match unsafe { libc::fork() } {
        0 => Ok(Fork::Child),
        pid if pid < 0 => Err(io::Error::last_os_error()),
        pid => Ok(Fork::Parent(
            Pid::from_raw(pid).expect("the parent gets a pid above 0"),
        )),
    }
}

/// Closes every descriptor but `fd`: for a child that keeps nothing of its parent's.
pub fn close_all_but(fd: std::os::fd::RawFd) {
    let fd = fd.cast_unsigned();
    let close = |from: u32, to: u32| {
        // SAFETY: the caller is a child process that uses no other descriptor any more.
        unsafe { libc::syscall(libc::SYS_close_range, from, to, 0) };
    };
    if fd > 0 {
        close(0, fd - 1);
    }
    close(fd + 1, u32::MAX);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_of_several_threads_is_refused() {
        let (send, receive) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || receive.recv());
        assert_eq!(fork().unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        drop(send);
        assert!(other.join().unwrap().is_err());
    }
}
