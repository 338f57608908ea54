//! The numbers that name the entries of a folder of /proc: threads, descriptors.

use std::mem::MaybeUninit;
use std::os::fd::AsFd;

use rustix::fs::{CWD, Mode, OFlags, RawDir, openat};

/// The numbers among the names in `folder`, one of /proc/PID/task or /proc/PID/fd, in the
/// kernel's order.
///
/// # Errors
/// `ENOENT` and `ESRCH` when the process is gone. See getdents64(2).
pub fn of(folder: impl AsFd) -> rustix::io::Result<Vec<i32>> {
    // Only a call that gives nothing tells the end: a signal, also a stop, ends a call after any
    // entry.
    const ROOM_BYTES: usize = 8192;
    let mut room = [MaybeUninit::uninit(); ROOM_BYTES];
    let mut entries = RawDir::new(folder, &mut room);
    let mut numbers = Vec::new();
    while let Some(entry) = entries.next() {
        let name = entry?.file_name().to_str().ok().map(str::parse);
        if let Some(Ok(number)) = name {
            numbers.push(number);
        }
    }
    Ok(numbers)
}

/// The numbers of this process's descriptors, that of the folder in which they stand among them.
///
/// # Errors
/// As open(2), and getdents64(2).
pub fn of_own_files() -> rustix::io::Result<Vec<i32>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    of(openat(
        CWD,
        crate::procfs::path("self/fd"),
        flags,
        Mode::empty(),
    )?)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use rustix::fs::{Mode, OFlags, open};

    use super::*;

    /// Signals that come all the time, until the value is dropped.
    struct Interrupted(Option<std::thread::JoinHandle<()>>, Arc<AtomicBool>);

    impl Interrupted {
        fn by_signals() -> Self {
            extern "C" fn nothing(_: libc::c_int) {}
            let handler = nothing as extern "C" fn(libc::c_int);
            // SAFETY: the handler does nothing.
            unsafe { libc::signal(libc::SIGUSR1, handler as libc::sighandler_t) };
            let (pid, tid) = (
                std::process::id().cast_signed(),
                rustix::thread::gettid().as_raw_nonzero().get(),
            );
            let ends = Arc::new(AtomicBool::new(false));
            let until = Arc::clone(&ends);
            let send = move || {
                while !until.load(Ordering::Relaxed) {
                    crate::signal::to_thread(pid, tid, libc::SIGUSR1).expect("it is there");
                }
            };
            Self(Some(std::thread::spawn(send)), ends)
        }
    }

    impl Drop for Interrupted {
        fn drop(&mut self) {
            self.1.store(true, Ordering::Relaxed);
            let _ = self.0.take().map(std::thread::JoinHandle::join);
        }
    }

    #[test]
    fn signals_cut_no_list_short() {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY;
        let files = || open("/proc/self/fd", flags, Mode::empty()).unwrap();
        let many = std::iter::repeat_with(files).take(100).collect::<Vec<_>>();
        let _signals = Interrupted::by_signals();
        for _ in 0..2000 {
            let listed = of(files()).unwrap();
            let has = |file: &rustix::fd::OwnedFd| {
                listed.contains(&std::os::fd::AsRawFd::as_raw_fd(file))
            };
            assert!(many.iter().all(has), "{listed:?}");
        }
    }

    #[test]
    fn few_and_many_descriptors_are_listed() {
        let files = || {
            let flags = OFlags::RDONLY | OFlags::DIRECTORY;
            open("/proc/self/fd", flags, Mode::empty()).unwrap()
        };
        let has = |number: &i32| of(files()).unwrap().contains(number);
        let own = |file: &rustix::fd::OwnedFd| std::os::fd::AsRawFd::as_raw_fd(file);
        let one = files();
        assert!(has(&own(&one)));
        let many = std::iter::repeat_with(files).take(700).collect::<Vec<_>>();
        let listed = of(files()).unwrap();
        assert!(many.iter().all(|file| listed.contains(&own(file))));
    }
}
