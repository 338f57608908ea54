//! The end of a single thread of a process whose other threads run on.

use std::time::{Duration, Instant};

use abi::Addr;
use sys::ptrace::{self, Event};

use crate::call::{absorb, next_event, own};
use crate::{Call, Error, Result, has_ended};

/// How long the kernel may take over the end of a thread.
const PATIENCE: Duration = Duration::from_secs(10);

/// Has a stopped thread with all signals blocked call exit(2) with `code`, from the `syscall`
/// instruction at `at`, and lets go of it on its way. Returns when it has ended; where it is the
/// leader of other threads, it is a zombie then, of which nobody is told.
///
/// /proc shows `mask` as its mask of blocked signals then.
///
/// With `unfiltered`, its seccomp filters forbid it nothing until then.
///
/// # Errors
/// As [`Call::make`]; [`Error::Stuck`] where it does not end.
pub fn end(tid: i32, at: Addr, (code, mask): (u64, u64), unfiltered: bool) -> Result<()> {
    const EXIT: u64 = 60;
    let reported = ptrace::report_exit(tid, unfiltered);
    reported.map_err(|e| Error::of(tid, "PTRACE_SETOPTIONS", e))?;
    let exit = Call {
        at,
        number: EXIT,
        args: [code, 0, 0, 0, 0, 0],
    };
    let set = ptrace::set_registers(tid, &exit.registers(own(tid)?));
    set.map_err(|e| Error::of(tid, "PTRACE_SETREGS", e))?;
    let mut signal = 0;
    loop {
        ptrace::resume(tid, signal).map_err(|e| Error::of(tid, "PTRACE_CONT", e))?;
        match next_event(tid)? {
            Event::Other(ptrace::EXITING) => break,
            event => signal = absorb(tid, event)?,
        }
    }
    let set = ptrace::set_signal_mask(tid, mask);
    set.map_err(|e| Error::of(tid, "PTRACE_SETSIGMASK", e))?;
    ptrace::detach(tid, 0).map_err(|e| Error::of(tid, "PTRACE_DETACH", e))?;
    let begun = Instant::now();
    loop {
        // This process may have stood still itself: the look comes after.
        let waited = begun.elapsed();
        if has_ended(tid) {
            return Ok(());
        }
        if waited > PATIENCE {
            let waited_ms = waited.as_millis();
            return Err(Error::Stuck { tid, waited_ms });
        }
        std::thread::sleep(Duration::from_micros(20));
    }
}
