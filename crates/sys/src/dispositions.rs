//! Signals of programs that this process executes: default dispositions and an empty mask.
//!
//! execve(2) resets handlers and leaves ignored signals ignored (signal(7)), so a program under
//! nohup(1), or started by a shell in the background, would pass that on to all that it starts.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Once;

/// Signals whose default action does not end a process. signal(7).
const HARMLESS: [libc::c_int; 7] = [
    libc::SIGCHLD,
    libc::SIGCONT,
    libc::SIGURG,
    libc::SIGWINCH,
    libc::SIGTSTP,
    libc::SIGTTIN,
    libc::SIGTTOU,
];

extern "C" fn nothing(_: libc::c_int) {}

/// Has programs that this process executes from now on start with every signal at its default
/// disposition, and those that this thread executes with none blocked.
///
/// A signal that this process ignores does not end it afterwards either: it gets a handler that
/// does nothing. Only the first call looks at dispositions; each empties the calling thread's mask.
pub fn pass_on_defaults() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        for signal in 1..=libc::SIGRTMAX() {
            // Some cannot be set: SIGKILL, SIGSTOP, and what the C library keeps for itself.
            let _ = stop_ignoring(signal);
        }
    });
    unblock_all();
}

/// Gives a signal that is ignored a handler, or its default action where that ends nothing.
fn stop_ignoring(signal: libc::c_int) -> io::Result<()> {
    let mut action = MaybeUninit::<libc::sigaction>::zeroed();
    // SAFETY: the call fills the structure, of which zeros are valid anyway.
    check(unsafe { libc::sigaction(signal, ptr::null(), action.as_mut_ptr()) })?;
    // SAFETY: it was filled.
    let mut action = unsafe { action.assume_init() };
    if action.sa_sigaction != libc::SIG_IGN {
        return Ok(());
    }
    let handler: extern "C" fn(libc::c_int) = nothing;
    action.sa_sigaction = match HARMLESS.contains(&signal) {
        true => libc::SIG_DFL,
        false => handler as libc::sighandler_t,
    };
    action.sa_flags = libc::SA_RESTART;
    // SAFETY: the structure is whole, and the handler touches nothing.
    check(unsafe { libc::sigaction(signal, &raw const action, ptr::null_mut()) })
}

/// Unblocks all signals for this thread.
fn unblock_all() {
    let mut none = MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: the call fills the set.
    unsafe { libc::sigemptyset(none.as_mut_ptr()) };
    // SAFETY: the set was filled.
    unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, none.as_ptr(), ptr::null_mut()) };
}

fn check(result: libc::c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status(name: &str) -> u64 {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        u64::from_str_radix(line.unwrap().trim(), 16).unwrap()
    }

    const fn bit(signal: libc::c_int) -> u64 {
        1 << (signal - 1)
    }

    /// Tells a process of the test's own that it is one: dispositions are the whole process's.
    const INSIDE: &str = "STILLFRAME_DISPOSITIONS_INSIDE";

    #[test]
    fn ignored_and_blocked_signals_are_not_passed_on() {
        if std::env::var_os(INSIDE).is_some() {
            return ignore_block_and_pass_on_defaults();
        }
        let name = "dispositions::tests::ignored_and_blocked_signals_are_not_passed_on";
        let mut own = std::process::Command::new(std::env::current_exe().unwrap());
        let output = own
            .args(["--exact", name])
            .env(INSIDE, "")
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stdout);
        assert!(
            output.status.success() && said.contains("1 passed"),
            "{said}"
        );
    }

    fn ignore_block_and_pass_on_defaults() {
        let ends = [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT, libc::SIGRTMIN()];
        for signal in ends.into_iter().chain(HARMLESS) {
            testkit::calls::ignore_signal(signal).unwrap();
        }
        testkit::calls::block_signals(&[libc::SIGTERM]);
        pass_on_defaults();
        // The C library keeps two for itself, and leaves them as they were.
        const OWN: u64 = 0b11 << 31;
        assert_eq!(status("SigIgn:") & !OWN, 0);
        assert_eq!(status("SigBlk:") & !OWN, 0);
        let handled = ends.into_iter().map(bit).fold(0, |all, bit| all | bit);
        assert_eq!(status("SigCgt:") & handled, handled);
    }
}
