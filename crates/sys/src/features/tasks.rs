//! Features of tasks: tracing, pids, timers, seccomp, descriptors across processes.
use std::io;
use std::mem::offset_of;
use std::os::fd::{AsFd as _, AsRawFd as _};

use linux_raw_sys::general as raw;
use rustix::process::{PidfdFlags, PidfdGetfdFlags, getpid, pidfd_getfd, pidfd_open};
use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};

use super::Need::{Always, Sometimes};
use super::child::traced;
use super::{Feature, Outcome, called, read, why, yes};

pub(super) static ALL: &[Feature] = &[
    Feature::here("ptrace", Always, "stop tasks", ptrace),
    Feature::here("clone3_set_tid", Always, "bring pids back", clone3_set_tid),
    Feature::here(
        "pidfd_store",
        Always,
        "hold and pass on tasks",
        pidfd_getfd_works,
    ),
    Feature::here("get_rseq_conf", Sometimes, "restartable sequences", rseq),
    Feature::here("kcmp", Sometimes, "tell what tasks share", kcmp),
    Feature::here("kcmp_epoll", Sometimes, "targets of epoll", kcmp_epoll),
    Feature::here(
        "seccomp_suspend",
        Sometimes,
        "calls inside tasks under seccomp",
        suspend,
    ),
    Feature::here("seccomp_filters", Sometimes, "seccomp filters", filters),
    Feature::here(
        "breakpoints",
        Sometimes,
        "hardware breakpoints",
        breakpoints,
    ),
    Feature::here("timerfd", Sometimes, "ticks of a timerfd", timerfd),
    Feature::here(
        "timer_cr_ids",
        Sometimes,
        "ids of POSIX timers at once",
        timer_ids,
    ),
    Feature::in_child("loginuid", Sometimes, "login uids", loginuid),
    Feature::here("ns_pid", Sometimes, "pids inside namespaces", ns_pid),
];

fn nothing() {}

fn ptrace() -> Outcome {
    traced(nothing, |_| yes())
}

fn rseq() -> Outcome {
    traced(nothing, |pid| {
        crate::ptrace::rseq(pid).map_err(|error| why("PTRACE_GET_RSEQ_CONFIGURATION", &error))?;
        yes()
    })
}

fn own_pid() -> i32 {
    getpid().as_raw_nonzero().get()
}

/// Asks for a child with this process's own pid: whoever may choose is told that it is taken.
fn clone3_set_tid() -> Outcome {
    let tid: libc::pid_t = own_pid();
    // SAFETY: every field of the structure is a number, for which zero means absent.
    let mut arguments: raw::clone_args = unsafe { std::mem::zeroed() };
    // With the memory shared, none is copied before the pid is looked at.
    arguments.flags = libc::CLONE_VM as u64;
    arguments.exit_signal = libc::SIGCHLD as u64;
    arguments.set_tid = (&raw const tid).expose_provenance() as u64;
    arguments.set_tid_size = 1;
    let size = size_of_val(&arguments);
    // SAFETY: no process can be made with a pid that is taken, so the call returns once, here.
    let result = unsafe { libc::syscall(libc::SYS_clone3, &raw const arguments, size) };
    assert!(result != 0, "a second process has this process's pid");
    let error = io::Error::last_os_error();
    match error.raw_os_error() {
        Some(libc::EEXIST) => yes(),
        _ => Err(why("clone3 with a chosen pid", &error)),
    }
}

fn pidfd_getfd_works() -> Outcome {
    let own = pidfd_open(getpid(), PidfdFlags::empty());
    let own = own.map_err(|error| why("pidfd_open", &error.into()))?;
    pidfd_getfd(own.as_fd(), own.as_raw_fd(), PidfdGetfdFlags::empty())
        .map_err(|error| why("pidfd_getfd", &error.into()))?;
    yes()
}

fn compare(kind: libc::c_int, first: libc::c_ulong, second: libc::c_ulong) -> Outcome {
    let pid = own_pid();
    // SAFETY: kcmp compares; the kinds used here take numbers, or a structure that is read.
    let result = unsafe { libc::syscall(libc::SYS_kcmp, pid, pid, kind, first, second) };
    match called("kcmp", result)? {
        0 => yes(),
        _ => Err("kcmp finds a difference where there is none".to_owned()),
    }
}

fn kcmp() -> Outcome {
    const KCMP_VM: libc::c_int = abi::kernel::KCMP_VM;
    compare(KCMP_VM, 0, 0)
}

fn kcmp_epoll() -> Outcome {
    use rustix::event::epoll;
    const KCMP_EPOLL_TFD: libc::c_int = abi::kernel::KCMP_EPOLL_TFD;
    /// `struct kcmp_epoll_slot` of the kernel's include/uapi/linux/kcmp.h.
    #[repr(C)]
    struct Slot {
        epoll: u32,
        target: u32,
        offset: u32,
    }
    let epoll = epoll::create(epoll::CreateFlags::CLOEXEC);
    let epoll = epoll.map_err(|error| why("epoll_create1", &error.into()))?;
    let (target, _writer) = rustix::pipe::pipe().map_err(|error| why("pipe", &error.into()))?;
    epoll::add(
        &epoll,
        &target,
        epoll::EventData::new_u64(0),
        epoll::EventFlags::IN,
    )
    .map_err(|error| why("epoll_ctl", &error.into()))?;
    let number = |fd: i32| u32::try_from(fd).expect("descriptors are not negative");
    let (epoll, target) = (number(epoll.as_raw_fd()), number(target.as_raw_fd()));
    let slot = Slot {
        epoll,
        target,
        offset: 0,
    };
    compare(
        KCMP_EPOLL_TFD,
        target.into(),
        (&raw const slot).expose_provenance() as u64,
    )
}

fn suspend() -> Outcome {
    traced(nothing, |pid| {
        crate::ptrace::suspend_filters(pid)
            .map_err(|error| why("PTRACE_O_SUSPEND_SECCOMP", &error))?;
        yes()
    })
}

/// Puts this process, a child that only waits, under a filter that allows everything.
fn filter_everything_through() {
    const ALLOW: libc::sock_filter = libc::sock_filter {
        code: 0x06,
        jt: 0,
        jf: 0,
        k: libc::SECCOMP_RET_ALLOW,
    };
    let mut filter = [ALLOW];
    let program = libc::sock_fprog {
        len: 1,
        filter: filter.as_mut_ptr(),
    };
    // SAFETY: the flag takes numbers.
    unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) };
    let mode = libc::SECCOMP_MODE_FILTER;
    // SAFETY: the program and its one instruction live during the call. When it fails, the parent
    // finds no filter.
    unsafe { libc::prctl(libc::PR_SET_SECCOMP, mode, &raw const program) };
}

fn filters() -> Outcome {
    traced(filter_everything_through, |pid| {
        let filters = crate::ptrace::filters(pid);
        let filters = filters.map_err(|error| why("PTRACE_SECCOMP_GET_FILTER", &error))?;
        match filters.last().map(|filter| filter.program.len()) {
            Some(8) => yes(),
            length => Err(format!(
                "a filter of one instruction is told as {length:?} bytes"
            )),
        }
    })
}

fn breakpoints() -> Outcome {
    let register = |number: usize| offset_of!(libc::user, u_debugreg) + number * 8;
    traced(nothing, |pid| {
        let poke = |number: usize, value: usize| {
            // SAFETY: the request writes a debug register of a stopped child of ours.
            let result =
                unsafe { libc::ptrace(libc::PTRACE_POKEUSER, pid, register(number), value) };
            called("PTRACE_POKEUSER of a debug register", result)
        };
        // Any address in user space will do; the child never executes it.
        poke(0, 0x1000)?;
        poke(7, 1)?;
        yes()
    })
}

fn timerfd() -> Outcome {
    /// `TFD_IOC_SET_TICKS`: `_IOW('T', 0, __u64)`.
    const SET_TICKS: libc::Ioctl = rustix::ioctl::opcode::write::<u64>(b'T', 0) as libc::Ioctl;
    let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC)
        .map_err(|error| why("timerfd_create", &error.into()))?;
    let ticks: u64 = 1;
    // SAFETY: the request reads a number of eight bytes.
    let result = unsafe { libc::ioctl(timer.as_raw_fd(), SET_TICKS, &raw const ticks) };
    called("TFD_IOC_SET_TICKS", result.into())?;
    yes()
}

fn timer_ids() -> Outcome {
    const PR_TIMER_CREATE_RESTORE_IDS: libc::c_int =
        linux_raw_sys::prctl::PR_TIMER_CREATE_RESTORE_IDS as libc::c_int;
    const GET: libc::c_ulong = 2;
    // SAFETY: the call takes numbers and tells whether the mode is on.
    let result = unsafe { libc::prctl(PR_TIMER_CREATE_RESTORE_IDS, GET, 0, 0, 0) };
    called("PR_TIMER_CREATE_RESTORE_IDS", result.into())?;
    yes()
}

/// Writes the login uid that this child has already.
fn loginuid() -> Outcome {
    let uid = read("/proc/self/loginuid")?;
    std::fs::write("/proc/self/loginuid", &uid)
        .map_err(|error| why("/proc/self/loginuid", &error))?;
    yes()
}

fn ns_pid() -> Outcome {
    if read("/proc/self/status")?.contains("\nNSpid:") {
        yes()
    } else {
        Err("/proc/self/status has no NSpid".to_owned())
    }
}
