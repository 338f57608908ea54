//! One system call made in a stopped thread, from the `syscall` instruction to the stop at its end.

use std::io::ErrorKind;

use abi::Addr;
use sys::arch::Registers;
use sys::ptrace::{self, Event};

use crate::limit::Limit;
use crate::{Error, Result};

/// A system call for a stopped thread to make, as 64-bit code whatever code it runs itself.
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// Where a `syscall` instruction stands in its memory.
    pub at: Addr,
    /// The call's number.
    pub number: u64,
    /// Its arguments.
    pub args: [u64; 6],
}

impl Call {
    /// The registers with which a thread makes the call next; what does not matter is `others`'.
    #[must_use]
    pub fn registers(self, others: Registers) -> Registers {
        let mut registers = others;
        registers.make_call_64(self.at, self.number, self.args);
        registers
    }

    /// Has a traced and stopped thread make the call and gives its result. The thread is in the
    /// stop at the call's end, with whatever registers the call left.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Kernel`]; [`Error::Astray`] when something else happens to it.
    pub fn make(self, tid: i32) -> Result<i64> {
        begin(tid, &self.registers(own(tid)?))?;
        next_stop(tid)?;
        result(tid)
    }

    /// Does what [`Call::make`] does for a thread that gets the registers afterwards with which it
    /// goes on, `others` where the call does not need other ones.
    ///
    /// Those may be of a call that is to be restarted, and at the end of another one the kernel
    /// only looks at that where a signal waits. An interruption makes it look however the thread
    /// comes to go on, also where its tracer ends first.
    ///
    /// # Errors
    /// As [`Call::make`].
    pub fn make_last(self, tid: i32, others: Registers) -> Result<i64> {
        make_last(tid, &self.registers(others))
    }

    /// Does what [`Call::make`] does, but interrupts the call at once where it would wait, so that
    /// the kernel remembers how much time remains of it (`restart_syscall(2)`).
    ///
    /// An interruption that is asked for before the call begins ends its wait before it starts.
    /// The stop at the call's end takes its place: nothing else is reported, and the caller may
    /// give the thread any registers there.
    ///
    /// # Errors
    /// As [`Call::make`].
    pub fn make_interrupted(self, tid: i32) -> Result<i64> {
        self.make_last(tid, own(tid)?)
    }

    /// As [`Call::make_interrupted`] for a call of 32 bits, with an `int 0x80` at its place: the
    /// kernel goes on with it as such a call.
    ///
    /// # Errors
    /// As [`Call::make`].
    pub fn make_interrupted_32(self, tid: i32) -> Result<i64> {
        let mut registers = own(tid)?;
        registers.make_call_32(self.at, self.number, self.args);
        make_last(tid, &registers)
    }
}

/// Brings the thread to the stop at the entry of the call that its registers make.
fn begin(tid: i32, registers: &Registers) -> Result<()> {
    let set = ptrace::set_registers(tid, registers);
    set.map_err(|e| Error::of(tid, "PTRACE_SETREGS", e))?;
    next_stop(tid)
}

/// Has it make that call, interrupted.
fn make_last(tid: i32, registers: &Registers) -> Result<i64> {
    begin(tid, registers)?;
    interrupt(tid)?;
    next_stop(tid)?;
    result(tid)
}

fn interrupt(tid: i32) -> Result<()> {
    ptrace::interrupt(tid).map_err(|e| Error::of(tid, "PTRACE_INTERRUPT", e))
}

/// Lets a stopped thread with all signals blocked go on to its next stop at the entry or the end
/// of a call.
pub(crate) fn next_stop(tid: i32) -> Result<()> {
    let mut signal = 0;
    loop {
        signal = match resume_to_call(tid, signal)? {
            Event::Call => return Ok(()),
            other => absorb(tid, other)?,
        };
    }
}

/// Lets a stopped thread go on, with `signal` if not 0, to its next stop of any kind.
pub(crate) fn resume_to_call(tid: i32, signal: i32) -> Result<Event> {
    let resumed = ptrace::resume_to_call(tid, signal);
    resumed.map_err(|e| Error::of(tid, "PTRACE_SYSCALL", e))?;
    let event = next_event(tid)?;
    if let Event::Ended(_) = event {
        let doing = "in a call of ours";
        return Err(Error::Gone { tid, doing });
    }
    Ok(event)
}

/// Waits for the next event of a thread that was told to do something short. Where a
/// [`sys::tick::Ticker`] runs, it is not waited for ever: it is looked at once more when the time
/// is over, as this process may have stood still itself.
pub(crate) fn next_event(tid: i32) -> Result<Event> {
    let limit = Limit::begin();
    loop {
        let event = match limit.is_over() {
            false => ptrace::wait_interruptible(tid).map(Some),
            true => ptrace::try_wait(tid),
        };
        match event {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Ok(None) => {
                let waited_ms = limit.waited_ms();
                return Err(Error::Stuck { tid, waited_ms });
            }
            Ok(Some((_, event))) => return Ok(event),
            Err(error) => return Err(Error::of(tid, "waitpid", error)),
        }
    }
}

/// What a thread is to go on with after an event. An interruption that was asked for earlier may be
/// reported late. A stop signal takes effect: the kernel keeps in mind that the process is stopped,
/// and whether it was continued since, while its traced threads go on. Nothing else may come, as
/// all is blocked.
pub(crate) fn absorb(tid: i32, event: Event) -> Result<i32> {
    match event {
        Event::Stop(_) => Ok(0),
        Event::Signal(ptrace::SIGSTOP) => Ok(ptrace::SIGSTOP),
        other => Err(unexpected(tid, other)),
    }
}

/// What the call gave at whose end a thread is stopped.
pub(crate) fn result(tid: i32) -> Result<i64> {
    Ok(own(tid)?.result())
}

pub(crate) fn own(tid: i32) -> Result<Registers> {
    ptrace::registers(tid).map_err(|e| Error::of(tid, "PTRACE_GETREGS", e))
}

/// The error for a thread that was stopped by what should not come.
pub(crate) fn unexpected(tid: i32, event: Event) -> Error {
    let what = format!("unexpected {event:?}");
    Error::Astray { tid, what }
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLL: u64 = 7;
    const GETPID: u64 = 39;
    const GETPPID: u64 = 110;
    const ERESTARTSYS: i64 = -512;
    const ERESTART_RESTARTBLOCK: i64 = abi::kernel::ERESTART_RESTARTBLOCK;

    /// A puppet that this thread traces and has stopped in a futex call.
    fn stopped() -> testkit::calls::puppet::Puppet {
        let puppet = testkit::calls::puppet::Puppet::start().expect("a puppet");
        let pid = puppet.pid();
        let call = || std::fs::read_to_string(format!("/proc/{pid}/syscall")).expect("it lives");
        // It waits for its owner: behind the instruction that it needs.
        while !call().starts_with("202 ") {
            std::thread::yield_now();
        }
        ptrace::seize(pid, true).expect("seize");
        ptrace::interrupt(pid).expect("interrupt");
        ptrace::wait(pid).expect("wait");
        puppet
    }

    #[test]
    fn a_call_that_was_interrupted_before_the_last_one_is_restarted() {
        let puppet = stopped();
        let pid = puppet.pid();
        let own = ptrace::registers(pid).expect("registers");
        let call = |number| Call {
            at: own.call_at(),
            number,
            args: [0; 6],
        };
        let last = call(GETPID).make_last(pid, own).expect("it is made");
        assert_eq!(last, i64::from(pid));
        let interrupted = Registers {
            orig_rax: GETPPID,
            rax: ERESTARTSYS.cast_unsigned(),
            ..own
        };
        ptrace::set_registers(pid, &interrupted).expect("set registers");
        // No signal comes.
        ptrace::resume_to_call(pid, 0).expect("resume");
        assert_eq!(ptrace::wait(pid).expect("wait"), (pid, Event::Call));
        let begun = ptrace::registers(pid).expect("registers").call();
        assert_eq!(begun, Some(GETPPID));
    }

    #[test]
    fn an_interrupted_call_is_over_for_calls_that_follow() {
        let puppet = stopped();
        let pid = puppet.pid();
        let syscall = ptrace::registers(pid).expect("registers").call_at();
        let hour = Call {
            at: syscall,
            number: POLL,
            args: [0, 0, 3_600_000, 0, 0, 0],
        };
        let remade = hour.make_interrupted(pid).expect("it is made");
        assert_eq!(remade, ERESTART_RESTARTBLOCK);
        // A call that does not wait gives its result, and nothing else is reported.
        let own = Call {
            at: syscall,
            number: GETPID,
            args: [0; 6],
        };
        let remade = own.make_interrupted(pid).expect("it is made");
        assert_eq!(remade, i64::from(pid));
        assert_eq!(own.make(pid).expect("it is made"), i64::from(pid));
        let call = own.registers(ptrace::registers(pid).expect("registers"));
        ptrace::set_registers(pid, &call).expect("set registers");
        for _ in 0..2 {
            ptrace::resume_to_call(pid, 0).expect("resume");
            assert_eq!(ptrace::wait(pid).expect("wait"), (pid, Event::Call));
        }
    }
}
