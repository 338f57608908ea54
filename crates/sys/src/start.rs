//! The start of a program without that of Rust's runtime, which makes 19 system calls, most of
//! them for a message about a stack that has become too large.

use std::io::Write;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fd::BorrowedFd;
use rustix::fs::{Mode, OFlags, open};

/// Makes `$run`, a `fn() -> u8` that gives the exit status, what the program does. The crate is
/// `#![no_main]`; see [`start::begin`](crate::start::begin) for what is prepared.
#[macro_export]
macro_rules! program {
    ($run:path) => {
        // SAFETY: it is the program's only `main`, and has the type that the C library calls.
        #[unsafe(no_mangle)]
        extern "C" fn main() -> core::ffi::c_int {
            $crate::start::begin($run)
        }
    };
}

/// Prepares what a program relies on, runs it and gives its exit status; 101 if it panics, as with
/// Rust's runtime.
///
/// - Descriptors 0 to 2 are open: what is opened later must not become a standard stream.
/// - Writing to a pipe whose reader has gone, or beyond the limit of file size (setrlimit(2)), is
///   an error and does not end the program (signal(7)).
/// - The C library asks for memory in larger pieces and keeps what is freed (mallopt(3)).
pub fn begin(run: fn() -> u8) -> core::ffi::c_int {
    open_standard_streams();
    // A signal that is ignored would be so in new tasks and in programs; a handler is not.
    let handler: extern "C" fn(libc::c_int) = survive;
    for signal in [libc::SIGPIPE, libc::SIGXFSZ] {
        // SAFETY: the handler touches nothing.
        unsafe { libc::signal(signal, handler as libc::sighandler_t) };
    }
    keep_memory();
    let status = std::panic::catch_unwind(run).unwrap_or(101);
    // A reader that has gone cannot be told that.
    let _ = std::io::stdout().flush();
    status.into()
}

/// Whether the program has privileges that its caller does not have: it is set-user-id or
/// set-group-id, or has file capabilities (`AT_SECURE` of getauxval(3)). Not so for root, who can
/// have them anyway.
#[must_use]
pub fn has_privileges_of_another() -> bool {
    // SAFETY: it reads what the kernel has passed to this program.
    let secure = unsafe { libc::getauxval(libc::AT_SECURE) } != 0;
    secure && !rustix::process::getuid().is_root()
}

extern "C" fn survive(_: libc::c_int) {}

/// Opens /dev/null in place of each standard stream that is closed.
fn open_standard_streams() {
    // SAFETY: a number that is not open is what is asked for, and nothing closes it meanwhile.
    let stream = |number| unsafe { BorrowedFd::borrow_raw(number) };
    let streams = [stream(0), stream(1), stream(2)];
    let mut asked = streams.map(|stream| PollFd::from_borrowed_fd(stream, PollFlags::empty()));
    if poll(&mut asked, Some(&Timespec::default())).is_err() {
        return;
    }
    for one in &asked {
        if one.revents().contains(PollFlags::NVAL) {
            // The lowest free number is this one's, as those below are open.
            if let Ok(null) = open("/dev/null", OFlags::RDWR, Mode::empty()) {
                std::mem::forget(null);
            }
        }
    }
}

/// A dump and a restore are short and need little: what they free is not given back piece by piece.
fn keep_memory() {
    const PIECE_BYTES: i32 = 1 << 20;
    const LARGE_BYTES: i32 = 32 << 20;
    for (option, bytes) in [
        (libc::M_TOP_PAD, PIECE_BYTES),
        (libc::M_TRIM_THRESHOLD, 2 * LARGE_BYTES),
        (libc::M_MMAP_THRESHOLD, LARGE_BYTES),
    ] {
        // SAFETY: this thread is the only one yet.
        unsafe { libc::mallopt(option, bytes) };
    }
}
