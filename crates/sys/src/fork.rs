//! fork(2) for programs of one thread: subjects of tests and benchmarks.
use std::io;
use std::os::fd::{AsFd, BorrowedFd, RawFd};
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use rustix::process::Pid;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

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
    if has_other_threads()? {
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

/// Makes a copy of the calling process, as [`fork`] does, that is process 1 of a new pid namespace
/// (pid_namespaces(7)). Children that this process makes later are in its own namespace.
///
/// # Errors
/// As [`fork`]; `EPERM` without `CAP_SYS_ADMIN`, `ENOSPC` for more namespaces than are allowed, or
/// for one that is 33 deep.
pub fn fork_init() -> io::Result<Fork> {
    fork_elsewhere(|| {
        // SAFETY: it is about children that are made later, and about nothing in this process.
        match unsafe { libc::unshare(libc::CLONE_NEWPID) } {
            0 => Ok(()),
            _ => Err(io::Error::last_os_error()),
        }
    })
}

/// Makes a copy of the calling process, as [`fork`] does, in the pid namespace `pids`.
///
/// # Errors
/// As [`fork`]; `EPERM` without `CAP_SYS_ADMIN` over it, `EINVAL` for one that is not below this
/// process's own, `ENOMEM` where its first process has ended.
pub fn fork_in(pids: BorrowedFd<'_>) -> io::Result<Fork> {
    fork_elsewhere(|| Ok(move_into_link_name_space(pids, PIDS)?))
}

const PIDS: Option<LinkNameSpaceType> = Some(LinkNameSpaceType::ProcessID);

/// Forks when `choose` has chosen the namespace of children, and has those to come in this
/// process's own again.
fn fork_elsewhere(choose: impl FnOnce() -> io::Result<()>) -> io::Result<Fork> {
    let own = std::fs::File::open(crate::procfs::path("thread-self/ns/pid_for_children"))?;
    choose()?;
    let forked = fork();
    if !matches!(forked, Ok(Fork::Child)) {
        move_into_link_name_space(own.as_fd(), PIDS)?;
    }
    forked
}

/// True if the calling process has other threads that run its code, and go on doing so for a while.
///
/// # Errors
/// When /proc/self/task cannot be read.
pub fn has_other_threads() -> io::Result<bool> {
    // A scope of threads is over when their work is: they may still be on their way out.
    const PATIENCE: Duration = Duration::from_millis(100);
    let begun = Instant::now();
    while has_threads()? && others_run()? {
        if begun.elapsed() > PATIENCE {
            return Ok(true);
        }
        std::thread::yield_now();
    }
    Ok(false)
}

/// Waits a moment until threads that were joined are gone: they are listed until the kernel is done
/// with them.
pub(crate) fn wait_for_threads() {
    const PATIENCE: Duration = Duration::from_millis(100);
    let begun = Instant::now();
    while has_threads().unwrap_or(false) && begun.elapsed() < PATIENCE {
        std::thread::yield_now();
    }
}

fn has_threads() -> io::Result<bool> {
    // A directory has a link for each directory in it and two more.
    let threads = crate::procfs::stat("self/task")?.st_nlink - 2;
    Ok(threads != 1)
}

/// Whether another thread may run code of this process. One that was joined is still listed for a
/// moment, and so are the kernel's own, which work for a ring of io_uring.
fn others_run() -> io::Result<bool> {
    /// `PF_EXITING`, `PF_IO_WORKER` and `PF_USER_WORKER` of the kernel.
    const RUNS_NO_CODE: u32 = 0x4 | 0x10 | 0x4000;
    let own = rustix::thread::gettid().as_raw_nonzero().get();
    let mut others = std::fs::read_dir(crate::procfs::path("self/task"))?.filter_map(|thread| {
        let stat = std::fs::read(thread.ok()?.path().join("stat")).ok()?;
        let stat = crate::proc::Stat::parse(&stat).ok()?;
        (stat.pid != own).then_some(stat)
    });
    Ok(others.any(|other| other.flags & RUNS_NO_CODE == 0))
}

/// Makes a child that ends with this wait status (as of waitpid(2), but that it leaves no core
/// file), and gives it when it has ended; [`reap`] waits for it.
///
/// # Errors
/// As fork(2) and waitid(2).
pub fn ended_child(status: i32) -> io::Result<Pid> {
    use rustix::process::{WaitId, WaitIdOptions, waitid};
    // SAFETY: the child calls nothing but what needs no lock that a thread could hold.
    let child = unsafe { libc::fork() };
    if child == 0 {
        end_with(status);
    }
    let Some(child) = Pid::from_raw(child).filter(|_| child > 0) else {
        return Err(io::Error::last_os_error());
    };
    let how = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
    rustix::io::retry_on_intr(|| waitid(WaitId::Pid(child), how))?;
    Ok(child)
}

/// Waits for a child, which is nobody any more then.
///
/// # Errors
/// As waitpid(2).
pub fn reap(child: Pid) -> io::Result<()> {
    use rustix::process::{WaitOptions, waitpid};
    rustix::io::retry_on_intr(|| waitpid(Some(child), WaitOptions::empty()))?;
    Ok(())
}

/// Ends this process, a child, by the signal or with the exit status that the wait status tells.
fn end_with(status: i32) -> ! {
    let signal = status & 0x7f;
    if signal != 0 {
        // SAFETY: a number; without it the kernel would write a core file.
        unsafe { libc::prctl(libc::PR_SET_DUMPABLE, 0) };
        // SAFETY: the default action calls no function.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
        let mut none = std::mem::MaybeUninit::uninit();
        // SAFETY: the set is written whole.
        unsafe { libc::sigemptyset(none.as_mut_ptr()) };
        // SAFETY: the set was written just now, and the old one is not asked for.
        unsafe { libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), std::ptr::null_mut()) };
        // SAFETY: sends a signal to this process.
        unsafe { libc::raise(signal) };
    }
    exit_now(status >> 8 & 0xff)
}

/// Makes a child that holds no descriptors but those of the numbers `kept`, calls `work` and ends;
/// nothing that the calling process registered or has still to write runs in it. See fork(2) and
/// _exit(2).
///
/// # Errors
/// Those of [`fork`].
pub fn fork_for(kept: &[RawFd], work: impl FnOnce()) -> io::Result<Pid> {
    match fork()? {
        Fork::Parent(child) => Ok(child),
        Fork::Child => {
            close_all_but(&in_order(kept));
            let done = std::panic::catch_unwind(AssertUnwindSafe(work));
            exit_now(i32::from(done.is_err()))
        }
    }
}

/// Makes a process that outlives this one and is nobody's child here: it holds no descriptors but
/// those of the numbers `kept`, stands in the root directory and in a session of its own under the
/// name `name`, calls `work` and ends. Of the threads of the calling process it has none, so where
/// there are some, `work` must use nothing that one of them could hold locked: it neither logs nor
/// prints. See fork(2), setsid(2).
///
/// # Errors
/// Those of fork(2).
pub fn daemonize(kept: &[RawFd], name: &std::ffi::CStr, work: impl FnOnce()) -> io::Result<()> {
    // SAFETY: the C library makes its memory usable in the copy, which touches nothing else that
    // another thread could have been changing.
    match unsafe { libc::fork() } {
        0 => {}
        pid if pid < 0 => return Err(io::Error::last_os_error()),
        pid => {
            let pid = Pid::from_raw(pid).expect("the parent gets a pid above 0");
            let waited = rustix::io::retry_on_intr(|| {
                rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty())
            });
            return match waited? {
                Some((_, status)) if status.exit_status() == Some(0) => Ok(()),
                _ => Err(io::ErrorKind::ResourceBusy.into()),
            };
        }
    }
    // SAFETY: as above; the process in between ends at once, which is what makes the other an
    // orphan.
    match unsafe { libc::fork() } {
        0 => {}
        pid => exit_now(i32::from(pid < 0)),
    }
    close_all_but(&in_order(kept));
    let _ = rustix::process::setsid();
    if !crate::procfs::is_directory() {
        let _ = rustix::process::chdir("/");
    }
    let _ = rustix::thread::set_name(name);
    let done = std::panic::catch_unwind(AssertUnwindSafe(work));
    exit_now(i32::from(done.is_err()))
}

/// The descriptors of a copy in ascending order: those that it is given, and its way to the host's
/// files.
fn in_order(kept: &[RawFd]) -> Vec<RawFd> {
    let mut kept = [kept, &crate::host::numbers()].concat();
    kept.sort_unstable();
    kept
}

/// Closes all descriptors but `kept`, which are in ascending order: in a child, where nobody else
/// uses them and none is dropped. Makes nothing but system calls.
pub(crate) fn close_all_but(kept: &[RawFd]) {
    let close = |from: u32, to: u32| {
        // SAFETY: this process is a child that is going to end without dropping any descriptor.
        unsafe { libc::syscall(libc::SYS_close_range, from, to, 0) };
    };
    let mut next = 0;
    for number in kept.iter().map(|kept| kept.cast_unsigned()) {
        if number > next {
            close(next, number - 1);
        }
        next = number + 1;
    }
    close(next, u32::MAX);
}

/// Ends a child without running anything that its parent registered.
pub(crate) fn exit_now(status: i32) -> ! {
    // SAFETY: _exit ends the process; no destructor of the parent's copy runs.
    unsafe { libc::_exit(status) }
}

#[cfg(test)]
mod tests {
    use std::io::Read;
    use std::os::fd::AsRawFd as _;

    use super::*;

    #[test]
    fn who_is_left_behind_has_nothing_of_ours() {
        let (mut reader, writer) = io::pipe().unwrap();
        daemonize(&[writer.as_raw_fd()], c"left", || {
            let name = std::fs::read_to_string("/proc/self/comm").unwrap();
            let links = std::fs::read_dir("/proc/self/fd").unwrap();
            // The list of them is one more while it is read.
            let open = links.count() - 1;
            let place = std::env::current_dir().unwrap();
            let session = rustix::process::getsid(None).unwrap();
            let leads = session == rustix::process::getpid();
            let told = format!("{} {open} {} {leads}", name.trim(), place.display());
            rustix::io::write(&writer, told.as_bytes()).unwrap();
        })
        .unwrap();
        drop(writer);
        let mut told = String::new();
        reader.read_to_string(&mut told).unwrap();
        assert_eq!(told, "left 1 / true");
    }

    #[test]
    fn who_was_joined_is_not_in_the_way() {
        let (mut reader, writer) = io::pipe().unwrap();
        // In a process of its own: the test's has other threads.
        daemonize(&[writer.as_raw_fd()], c"joins", || {
            let forks = || {
                std::thread::spawn(|| {}).join().ok()?;
                let child = fork_for(&[], || {}).ok()?;
                rustix::process::waitpid(Some(child), rustix::process::WaitOptions::empty()).ok()
            };
            let all = (0..200).all(|_| forks().is_some());
            let _ = rustix::io::write(&writer, if all { b"all" } else { b"not" });
        })
        .unwrap();
        drop(writer);
        let mut told = String::new();
        reader.read_to_string(&mut told).unwrap();
        assert_eq!(told, "all");
    }

    #[test]
    fn a_process_of_several_threads_is_refused() {
        let (send, receive) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || receive.recv());
        assert_eq!(fork().unwrap_err().kind(), io::ErrorKind::ResourceBusy);
        drop(send);
        assert!(other.join().unwrap().is_err());
    }
}
