//! The stop of a process by one of its threads.

use abi::Addr;
use sys::ptrace::{self, Event};

use crate::call::{resume_to_call, unexpected};
use crate::{Call, Error, Result};

/// Has a stopped thread with all signals blocked stop its process by `signal`, a stop signal whose
/// action is the default one, from the `syscall` instruction at `at`. The process's other threads,
/// stopped by their tracer as well, take part when they go on. The registers are whatever the calls
/// left. Tells whether it is stopped now: signals but `SIGSTOP` do not stop an orphaned process
/// group.
///
/// # Errors
/// As [`Call::make`].
pub fn stop(pid: i32, tid: i32, at: Addr, signal: i32) -> Result<bool> {
    const GETPID: u64 = 39;
    const TGKILL: u64 = 234;
    let mask = |mask| {
        let set = ptrace::set_signal_mask(tid, mask);
        set.map_err(|e| Error::of(tid, "PTRACE_SETSIGMASK", e))
    };
    let word = |number: i32| u64::from(number.cast_unsigned());
    let kill = Call {
        at,
        number: TGKILL,
        args: [word(pid), word(tid), word(ptrace::SIGSTOP), 0, 0, 0],
    };
    kill.make(tid)?;
    // It is about to get SIGSTOP, and its tracer gives it the other signal instead.
    mask(!(1 << (signal - 1)))?;
    let next = Call {
        at,
        number: GETPID,
        args: [0; 6],
    };
    let own = ptrace::registers(tid).map_err(|e| Error::of(tid, "PTRACE_GETREGS", e))?;
    let set = ptrace::set_registers(tid, &next.registers(own));
    set.map_err(|e| Error::of(tid, "PTRACE_SETREGS", e))?;
    let (mut pass_on, mut stopped, mut calls) = (0, false, 0);
    while calls < 2 {
        let event = resume_to_call(tid, pass_on)?;
        pass_on = 0;
        match event {
            Event::Call => calls += 1,
            Event::Signal(ptrace::SIGSTOP) => pass_on = signal,
            Event::Stop(ptrace::SIGTRAP) => {}
            Event::Stop(_) => {
                stopped = true;
                mask(u64::MAX)?;
            }
            other => return Err(unexpected(tid, other)),
        }
    }
    mask(u64::MAX)?;
    Ok(stopped)
}
