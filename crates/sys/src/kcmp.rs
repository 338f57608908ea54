//! Whether what two tasks have is one kernel object: kcmp(2).
use std::cmp::Ordering;
use std::io;

use crate::asked;

/// Orders the open file descriptions behind two descriptors, each given as the task's pid and its
/// number there; equal when they are one. The order is the kernel's own and total.
///
/// # Errors
/// As kcmp(2): `ESRCH`, `EBADF`, `EPERM` without the right to trace both tasks.
pub fn compare_files(first: (u32, i32), second: (u32, i32)) -> io::Result<Ordering> {
    const KCMP_FILE: i32 = 0;
    let ((pid, fd), (other_pid, other_fd)) = (first, second);
    let [pid, other_pid] = [pid, other_pid].map(asked_by);
    // SAFETY: kcmp takes five numbers and touches no memory of this process.
    let answer = unsafe { libc::syscall(libc::SYS_kcmp, pid, other_pid, KCMP_FILE, fd, other_fd) };
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

/// Orders what two threads, given by their ids, have of `what`; equal when it is one object. The
/// order is the kernel's own and total.
///
/// # Errors
/// As kcmp(2): `ESRCH`, `EPERM` without the right to trace both.
pub fn compare(first: i32, second: i32, what: Shared) -> io::Result<Ordering> {
    let [first, second] = [first, second].map(asked::tid);
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

/// The thread by which process `pid` is asked.
fn asked_by(pid: u32) -> u32 {
    asked::tid(pid.cast_signed()).cast_unsigned()
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

/// Tells whether `target`, a task's pid and a descriptor there, is the file that `slot` of an
/// epoll description of task `pid` watches.
///
/// # Errors
/// As kcmp(2): `ENOENT` when there is no such slot, `EBADF` when one is not open.
pub fn watches(pid: u32, slot: EpollSlot, target: (u32, i32)) -> io::Result<bool> {
    const KCMP_EPOLL_TFD: i32 = abi::kernel::KCMP_EPOLL_TFD;
    let (task, fd) = target;
    let [pid, task] = [pid, task].map(asked_by);
    // SAFETY: kcmp reads the slot, which lives until the call is over, and writes nothing.
    let answer = unsafe {
        libc::syscall(
            libc::SYS_kcmp,
            task,
            pid,
            KCMP_EPOLL_TFD,
            fd,
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
    use std::os::fd::AsRawFd;

    #[test]
    fn watched_file_is_found_after_its_number_was_reused() {
        use rustix::event::epoll;
        let pid = std::process::id();
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
        assert!(watches(pid, slot, (pid, kept.as_raw_fd())).expect("kcmp"));
        assert!(!watches(pid, slot, (pid, outer.as_raw_fd())).expect("kcmp"));
    }

    #[test]
    fn threads_of_a_process_share() {
        let own = rustix::thread::gettid().as_raw_nonzero().get();
        let (send, receive) = std::sync::mpsc::channel();
        let (done, wait) = std::sync::mpsc::channel::<()>();
        let other = std::thread::spawn(move || {
            let tid = rustix::thread::gettid().as_raw_nonzero().get();
            send.send(tid).expect("the test waits");
            let _ = wait.recv();
        });
        let tid = receive.recv().expect("the thread tells its id");
        for what in [
            Shared::Memory,
            Shared::Descriptors,
            Shared::Directories,
            Shared::Actions,
        ] {
            assert_eq!(compare(own, tid, what).expect("kcmp"), Ordering::Equal);
            let apart = compare(own, 1, what);
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
