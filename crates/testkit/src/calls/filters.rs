//! seccomp(2) as subjects use it: filters that answer some calls, and calls that do nothing else.

use std::io::{Error, Result};

use libc::{sock_filter, sock_fprog};

/// What a filter does with a call.
#[derive(Clone, Copy, Debug)]
pub enum Answer {
    /// It fails with this error number.
    Errno(u16),
    /// It ends the process.
    Kill,
}

/// Installs a filter for this thread that answers the calls with these numbers, and lets others
/// through; with `for_all_threads`, for all threads of the process. Gives the first thread that has
/// filters of its own, if there is one then: the filter is not installed.
///
/// # Errors
/// `EACCES` without `CAP_SYS_ADMIN` and `no_new_privs`.
pub fn install_filter(answers: &[(u32, Answer)], for_all_threads: bool) -> Result<Option<i32>> {
    let step = |code: u32, skip: u8, value: u32| sock_filter {
        code: code as u16,
        jt: 0,
        jf: skip,
        k: value,
    };
    // The number of the call is the first word that a filter can load.
    let mut program = vec![step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0)];
    for (call, answer) in answers {
        let action = match answer {
            Answer::Errno(errno) => libc::SECCOMP_RET_ERRNO | u32::from(*errno),
            Answer::Kill => libc::SECCOMP_RET_KILL_PROCESS,
        };
        program.push(step(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, *call));
        program.push(step(libc::BPF_RET | libc::BPF_K, 0, action));
    }
    program.push(step(
        libc::BPF_RET | libc::BPF_K,
        0,
        libc::SECCOMP_RET_ALLOW,
    ));
    let whole = sock_fprog {
        len: u16::try_from(program.len()).expect("it is short"),
        filter: program.as_mut_ptr(),
    };
    let flags = match for_all_threads {
        true => libc::SECCOMP_FILTER_FLAG_TSYNC,
        false => 0,
    };
    let (call, mode) = (libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER);
    // SAFETY: the program is read, and as long as is told.
    let got = unsafe { libc::syscall(call, mode, flags, &raw const whole) };
    match i32::try_from(got) {
        Ok(0) => Ok(None),
        Ok(tid @ 1..) => Ok(Some(tid)),
        _ => Err(Error::last_os_error()),
    }
}

/// Calls that this kernel does not have any more, and that fail whatever they are given.
pub const GONE: [u32; 4] = [
    libc::SYS_uselib as u32,
    libc::SYS__sysctl as u32,
    libc::SYS_getpmsg as u32,
    libc::SYS_tuxcall as u32,
];

/// Makes one of [`GONE`]; the error number with which it fails.
///
/// # Panics
/// For another one.
#[must_use]
pub fn call_gone(call: u32) -> i32 {
    assert!(GONE.contains(&call), "{call} may do something");
    // SAFETY: it touches nothing.
    unsafe { libc::syscall(call.into(), 0, 0, 0) };
    Error::last_os_error().raw_os_error().unwrap_or(0)
}

/// From now on this thread may only read, write and end (`SECCOMP_MODE_STRICT`): each byte that it
/// reads from `from` it writes to `to`, until there are no more. Never returns.
pub fn echo_strictly(from: impl std::os::fd::AsRawFd, to: impl std::os::fd::AsRawFd) -> ! {
    let (from, to, mut byte) = (from.as_raw_fd(), to.as_raw_fd(), 0u8);
    // SAFETY: it takes numbers alone.
    unsafe { libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_STRICT) };
    // SAFETY: there is room for the byte.
    while unsafe { libc::read(from, (&raw mut byte).cast(), 1) } == 1 {
        // SAFETY: the byte is there.
        unsafe { libc::write(to, (&raw const byte).cast(), 1) };
    }
    loop {
        // SAFETY: the thread has nothing that is to be dropped.
        unsafe { libc::syscall(libc::SYS_exit, 0) };
    }
}
