//! Whether what two tasks have is one kernel object: kcmp(2).
use std::cmp::Ordering;
use std::io;

use crate::process::Process;

/// A descriptor of a task.
#[derive(Clone, Copy, Debug)]
pub struct Descriptor<'a> {
    /// Whose it is.
    pub process: &'a Process,
    /// Its number there.
    pub fd: i32,
}

/// Orders the open file descriptions behind two descriptors; equal when they are one. The order is
/// the kernel's own and total.
///
/// # Errors
/// As kcmp(2): `ESRCH`, `EBADF`, `EPERM` without the right to trace both tasks.
pub fn compare_files(first: Descriptor<'_>, second: Descriptor<'_>) -> io::Result<Ordering> {
    const KCMP_FILE: i32 = 0;
    let [tid, other_tid] = [first, second].map(|one| one.process.tid());
    let (fd, other_fd) = (first.fd, second.fd);
    // SAFETY: kcmp takes five numbers and touches no memory of this process.
    let answer = unsafe { libc::syscall(libc::SYS_kcmp, tid, other_tid, KCMP_FILE, fd, other_fd) };
    ordering(answer)
}

/// What a task has one of, and may share with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shared {
    /// Its address space (`CLONE_VM`).
    Memory = 1,
    /// Its table of descriptors (`CLONE_FILES`).
    Descriptors = 2,
    /// Its root, working directory and umask (`CLONE_FS`).
    Directories = 3,
    /// Its signal actions (`CLONE_SIGHAND`).
    Actions = 4,
    /// Its I/O context (`CLONE_IO`); all tasks that have none are equal.
    Io = 5,
    /// What is undone to System V semaphores when it ends (`CLONE_SYSVSEM`); all tasks that have
    /// no such list are equal.
    SemaphoreUndo = 6,
}

/// Orders what two tasks have of `what`; equal when it is one object. The
/// order is the kernel's own and total.
///
/// # Errors
/// As kcmp(2): `ESRCH`, `EPERM` without the right to trace both.
pub fn compare(first: &Process, second: &Process, what: Shared) -> io::Result<Ordering> {
    let [first, second] = [first, second].map(Process::tid);
    // SAFETY: kcmp takes five numbers and touches no memory of this process.
    let answer = unsafe { libc::syscall(libc::SYS_kcmp, first, second, what as i32, 0, 0) };
    ordering(answer)
}

/// Makes the calling thread one that has no list of [`Shared::SemaphoreUndo`], to be compared
/// with.
///
/// # Errors
/// As unshare(2).
pub fn forget_semaphore_undo() -> io::Result<()> {
    // SAFETY: the flag takes nothing from this thread that memory safety depends on.
    match unsafe { libc::unshare(libc::CLONE_SYSVSEM) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

fn ordering(answer: libc::c_long) -> io::Result<Ordering> {
    match answer {
        0 => Ok(Ordering::Equal),
        1 => Ok(Ordering::Less),
        2 => Ok(Ordering::Greater),
        _ => Err(io::Error::last_os_error()),
    }
}

/// One watched file of an epoll description: `struct kcmp_epoll_slot`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct EpollSlot {
    /// The descriptor of the epoll description.
    pub epoll: u32,
    /// The number under which the file was added.
    pub target: u32,
    /// Which one of those that were added under this number, from 0 in the order of fdinfo.
    pub offset: u32,
}

/// Tells whether `target` is the file that `slot` of an epoll description of `process` watches.
///
/// # Errors
/// As kcmp(2): `ENOENT` when there is no such slot, `EBADF` when one is not open.
pub fn watches(process: &Process, slot: EpollSlot, target: Descriptor<'_>) -> io::Result<bool> {
    const KCMP_EPOLL_TFD: i32 = abi::kernel::KCMP_EPOLL_TFD;
    let [tid, target_tid] = [process, target.process].map(Process::tid);
    // SAFETY: kcmp reads the slot, which lives until the call is over, and writes nothing.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_kcmp,
            target_tid,
            tid,
            KCMP_EPOLL_TFD,
            target.fd,
            &raw const slot,
        )
    };
    match answer {
        0 => Ok(true),
        1.. => Ok(false),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::{AsRawFd, OwnedFd};

    #[test]
    fn watched_file_is_found_after_its_number_was_reused() {
        use rustix::event::epoll;
        let own = Process::own();
        let create = || epoll::create(epoll::CreateFlags::CLOEXEC).expect("epoll");
        let (outer, inner) = (create(), create());
        let data = epoll::EventData::new_u64(0);
        epoll::add(&outer, &inner, data, epoll::EventFlags::IN).expect("add");
        let slot = EpollSlot {
            epoll: outer.as_raw_fd().cast_unsigned(),
            target: inner.as_raw_fd().cast_unsigned(),
            offset: 0,
        };
        let kept = rustix::io::fcntl_dupfd_cloexec(&inner, 0).expect("dup");
        drop(inner);
        let is_watched = |fd: &OwnedFd| {
            let target = Descriptor {
                process: &own,
                fd: fd.as_raw_fd(),
            };
            watches(&own, slot, target).expect("kcmp")
        };
        assert!(is_watched(&kept));
        assert!(!is_watched(&outer));
    }

    #[test]
    fn threads_of_a_process_share() {
        let own = Process::new(rustix::thread::gettid().as_raw_nonzero().get());
        let (send, receive) = std::sync::mpsc::channel();
        let (done, wait) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || {
            let tid = rustix::thread::gettid().as_raw_nonzero().get();
            send.send(tid).expect("the test waits");
            let _ = wait.recv();
        });
        let other_task = Process::new(receive.recv().expect("the thread tells its id"));
        for what in [
            Shared::Memory,
            Shared::Descriptors,
            Shared::Directories,
            Shared::Actions,
        ] {
            assert_eq!(
                compare(&own, &other_task, what).expect("kcmp"),
                Ordering::Equal
            );
            let apart = compare(&own, &Process::new(1), what);
            assert!(
                apart.is_err() || apart.is_ok_and(Ordering::is_ne),
                "{what:?}"
            );
        }
        drop(done);
        other.join().expect("no panic");
    }

    #[test]
    fn a_description_shared_by_dup_is_one() {
        let own = Process::own();
        let first = std::fs::File::open("/dev/null").unwrap();
        let second = std::fs::File::open("/dev/null").unwrap();
        let twin = first.try_clone().unwrap();
        let compare = |other: &std::fs::File| {
            let [first, other] = [&first, other].map(|file| Descriptor {
                process: &own,
                fd: file.as_raw_fd(),
            });
            compare_files(first, other).unwrap()
        };
        assert_eq!(compare(&twin), Ordering::Equal);
        assert_ne!(compare(&second), Ordering::Equal);
    }
}
