//! What the calling thread can only ask about itself: attributes that a new task starts with.

use std::cell::Cell;
use std::io;

use libc::c_int;

/// An attribute of the calling thread or its process that prctl(2) answers with a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(i32)]
pub enum Attribute {
    /// `PR_GET_DUMPABLE`.
    Dumpable = 3,
    /// `PR_GET_SECUREBITS`.
    Securebits = 27,
    /// `PR_GET_TIMERSLACK`, in nanoseconds.
    TimerSlack = 30,
    /// `PR_GET_THP_DISABLE`.
    ThpDisable = 42,
    /// `PR_GET_MDWE`.
    Mdwe = 66,
    /// `PR_GET_MEMORY_MERGE`.
    MemoryMerge = 68,
    /// `PR_MCE_KILL_GET`.
    MachineCheck = 34,
    /// `PR_TIMER_CREATE_RESTORE_IDS` with `PR_TIMER_CREATE_RESTORE_IDS_GET`.
    TimerIds = 77,
}

/// Reads an attribute.
///
/// # Errors
/// `EINVAL` on a kernel that does not know it.
pub fn attribute(attribute: Attribute) -> io::Result<u64> {
    let second: u64 = if attribute == Attribute::TimerIds {
        2
    } else {
        0
    };
    // SAFETY: these options only read, and write no memory.
    let got = unsafe { libc::prctl(attribute as c_int, second, 0u64, 0u64, 0u64) };
    u64::try_from(got).map_err(|_| io::Error::last_os_error())
}

/// Whether the thread has a memory policy other than the default one (get_mempolicy(2)); not on a
/// kernel that knows no policies.
#[must_use]
pub fn has_memory_policy() -> bool {
    let mut mode: c_int = 0;
    let none = std::ptr::null_mut::<u64>();
    // SAFETY: the kernel writes the mode where `mode` lives, and no nodes.
    let got = unsafe {
        libc::syscall(
            libc::SYS_get_mempolicy,
            &raw mut mode,
            none,
            0u64,
            0u64,
            0u64,
        )
    };
    got == 0 && mode != 0
}

/// The size of `struct sched_attr` in bytes, as of Linux 5.3.
pub const SCHED_ATTR_BYTES: usize = 56;

/// The thread's `struct sched_attr` (sched_setattr(2)).
///
/// # Errors
/// `ENOSYS` before Linux 3.14.
pub fn sched_attr() -> io::Result<[u8; SCHED_ATTR_BYTES]> {
    let mut attr = [0u8; SCHED_ATTR_BYTES];
    let at = attr.as_mut_ptr();
    // SAFETY: `attr` outlives the call and has the size that is passed.
    let got = unsafe { libc::syscall(libc::SYS_sched_getattr, 0, at, SCHED_ATTR_BYTES, 0) };
    if got == 0 {
        Ok(attr)
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The thread's I/O priority: class and data (ioprio_get(2)).
///
/// # Errors
/// As ioprio_get(2).
pub fn io_priority() -> io::Result<u32> {
    // SAFETY: the call touches no memory.
    let got = unsafe { libc::syscall(libc::SYS_ioprio_get, 1, 0) };
    u32::try_from(got).map_err(|_| io::Error::last_os_error())
}

/// The thread's execution domain and flags (personality(2)).
#[must_use]
pub fn personality() -> u32 {
    // SAFETY: this value reads without changing anything.
    unsafe { libc::personality(0xffff_ffff) }.cast_unsigned()
}

/// The scheduler's clock of processor `cpu` now, in nanoseconds: each has its own, which stands
/// still while the hypervisor runs somebody else. The calling thread moves there and back.
///
/// # Errors
/// `EINVAL` for a processor on which it may not run; `ENODATA` where /proc does not tell.
pub fn scheduler_clock_ns(cpu: u32) -> io::Result<u64> {
    use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity, sched_yield};
    let all = sched_getaffinity(None)?;
    let mut there = CpuSet::new();
    if cpu as usize >= CpuSet::MAX_CPU {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    there.set(cpu as usize);
    sched_setaffinity(None, &there)?;
    // Has the time at which this thread began to run noted anew.
    sched_yield();
    let sched = crate::procfs::read("thread-self/sched");
    sched_setaffinity(None, &all)?;
    let none = || io::Error::from_raw_os_error(libc::ENODATA);
    crate::proc::exec_start_ns(&sched?).ok_or_else(none)
}

/// Raises this process's limit of open files to the hard one, which needs no privilege; returns
/// what it is then, none without an end. See setrlimit(2).
///
/// # Errors
/// The call's errno.
pub fn raise_open_files() -> io::Result<Option<u64>> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let now = getrlimit(Resource::Nofile);
    let current = now.maximum;
    if current.is_some() && current != now.current {
        setrlimit(Resource::Nofile, Rlimit { current, ..now })?;
        return Ok(current);
    }
    Ok(now.current)
}

/// Ends the calling thread's registration for restartable sequences, which the C library made and
/// forked children would inherit: the kernel kills a task whose registered area is unmapped.
/// `false` when there was none any more. See rseq(2).
pub fn leave_rseq() -> bool {
    thread_local!(static LEFT: Cell<bool> = const { Cell::new(false) });
    !LEFT.replace(true) && unregister_rseq()
}

fn unregister_rseq() -> bool {
    const RSEQ_FLAG_UNREGISTER: c_int = 1;
    const RSEQ_SIG: u32 = 0x5305_3053;
    unsafe extern "C" {
        // Where the area is, seen from the thread pointer (glibc 2.35).
        static __rseq_offset: isize;
    }
    let thread: usize;
    // SAFETY: on x86-64 the thread pointer's target holds its own address.
    unsafe { std::arch::asm!("mov {}, fs:0", out(reg) thread, options(nostack, readonly)) };
    // SAFETY: a constant that the C library sets before main.
    let area = thread.wrapping_add_signed(unsafe { __rseq_offset });
    // The length has to be the registered one: 32, or what later kernels ask for.
    (32..=1024u32).step_by(32).any(|len| {
        let flag = RSEQ_FLAG_UNREGISTER;
        // SAFETY: the kernel only compares the address and clears the registered area.
        unsafe { libc::syscall(libc::SYS_rseq, area, len, flag, RSEQ_SIG) == 0 }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_of_a_thread_that_left_rseq_has_no_area() {
        let thread = std::thread::spawn(|| {
            assert!(leave_rseq(), "the C library registers every thread");
            assert!(!leave_rseq());
            let puppet = testkit::calls::puppet::Puppet::start().expect("a puppet");
            crate::ptrace::seize(puppet.pid(), true).expect("seize");
            crate::ptrace::interrupt(puppet.pid()).expect("interrupt");
            crate::ptrace::wait(puppet.pid()).expect("wait");
            crate::ptrace::rseq(puppet.pid()).expect("rseq").addr
        });
        assert_eq!(thread.join().expect("no panic"), 0);
    }

    #[test]
    fn the_schedulers_clock_goes_on_and_the_thread_goes_back() {
        let all = rustix::thread::sched_getaffinity(None).expect("affinity");
        let cpu = (0..1024).find(|cpu| all.is_set(*cpu)).expect("a processor");
        let cpu = u32::try_from(cpu).expect("small");
        let first = scheduler_clock_ns(cpu).expect("a clock");
        let second = scheduler_clock_ns(cpu).expect("a clock");
        assert!(first < second, "{first} {second}");
        assert_eq!(
            rustix::thread::sched_getaffinity(None).expect("affinity"),
            all
        );
        scheduler_clock_ns(100_000).expect_err("no such processor");
    }

    #[test]
    fn attributes_are_those_that_proc_shows() {
        let slack = std::fs::read_to_string("/proc/thread-self/timerslack_ns");
        if let Ok(slack) = slack {
            let own = attribute(Attribute::TimerSlack).expect("it is known");
            assert_eq!(slack.trim(), own.to_string());
        }
        let shown = std::fs::read_to_string("/proc/thread-self/personality").expect("it is there");
        assert_eq!(u32::from_str_radix(shown.trim(), 16), Ok(personality()));
        let attr = sched_attr().expect("it is known");
        assert_eq!(attr[..4], (SCHED_ATTR_BYTES as u32).to_le_bytes());
        io_priority().expect("it is known");
        attribute(Attribute::Securebits).expect("it is known");
    }
}
