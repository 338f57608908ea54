//! A new process that runs a script instead of this program.

use std::io;

use abi::Addr;
use rustix::process::Pid;

/// Where a new process begins.
#[derive(Clone, Copy, Debug)]
pub struct Entry {
    /// The blob's code.
    pub code: Addr,
    /// The first op of its script.
    pub ops: Addr,
    /// The header that it reports to.
    pub header: Addr,
}

/// `struct clone_args` of clone(2).
#[derive(Default)]
#[repr(C)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// Makes a process with the pid `pid` that begins at `entry`, in memory forked from this process.
/// It has all signals blocked and no handlers. `sibling`: its parent is this process's parent.
///
/// # Errors
/// `EEXIST` when the pid is taken; `EPERM` without CAP_CHECKPOINT_RESTORE; `EINVAL` for a pid
/// above the namespace's limit.
pub fn spawn(pid: i32, sibling: bool, entry: Entry) -> io::Result<()> {
    const CLONE_CLEAR_SIGHAND: u64 = linux_raw_sys::general::CLONE_CLEAR_SIGHAND;
    crate::own::leave_rseq();
    let set_tid = [pid];
    let flags = if sibling {
        libc::CLONE_PARENT.cast_unsigned().into()
    } else {
        0u64
    };
    let args = CloneArgs {
        flags: CLONE_CLEAR_SIGHAND | flags,
        // A sibling's parent hears of it by the signal that it hears of this process by.
        exit_signal: if sibling {
            0
        } else {
            libc::SIGCHLD.cast_unsigned().into()
        },
        set_tid: set_tid.as_ptr() as u64,
        set_tid_size: 1,
        ..CloneArgs::default()
    };
    let old = set_mask(u64::MAX);
    let made = clone(&args);
    if let Ok(None) = made {
        enter(entry);
    }
    set_mask(old);
    made.map(drop)
}

/// Makes a copy of this process, which has one thread and blocks all signals, as the first process
/// of a new pid namespace: `None` in the copy. The C library does not know of it.
///
/// # Errors
/// As clone(2).
pub(crate) fn clone_init(is_sibling: bool) -> io::Result<Option<Pid>> {
    let sibling = if is_sibling { libc::CLONE_PARENT } else { 0 };
    let flags = (libc::CLONE_NEWPID | sibling).cast_unsigned();
    let args = CloneArgs {
        flags: u64::from(flags) | linux_raw_sys::general::CLONE_CLEAR_SIGHAND,
        // A sibling has its maker's.
        exit_signal: if is_sibling {
            0
        } else {
            libc::SIGCHLD.cast_unsigned().into()
        },
        ..CloneArgs::default()
    };
    clone(&args)
}

/// Makes a copy of this process: `None` in the copy.
fn clone(args: &CloneArgs) -> io::Result<Option<Pid>> {
    let (call, args) = (libc::SYS_clone3, std::ptr::from_ref(args));
    // SAFETY: the copy goes on here with memory of its own, in the only thread that it has.
    match unsafe { libc::syscall(call, args, size_of::<CloneArgs>()) } {
        ..0 => Err(io::Error::last_os_error()),
        pid => Ok(Pid::from_raw(pid as i32)),
    }
}

/// Has this process, of one thread, run a script from here on.
pub(crate) fn enter(entry: Entry) -> ! {
    // SAFETY: nothing of this program runs any more.
    unsafe {
        std::arch::asm!(
            "mov r12, r8",
            "mov r13, r9",
            "jmp r10",
            in("r8") entry.ops.0,
            in("r9") entry.header.0,
            in("r10") entry.code.0,
            options(noreturn),
        );
    }
}

/// Sets this thread's mask of blocked signals and gives the old one; bit 0 is signal 1.
pub(crate) fn set_mask(mask: u64) -> u64 {
    let mut old = 0u64;
    let (new, old_at) = (&raw const mask, &raw mut old);
    // SAFETY: both masks outlive the call and have the kernel's size of 8 bytes.
    unsafe { libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, new, old_at, 8) };
    old
}
