//! A call that is made in a stopped thread and interrupted at once, so that the kernel remembers
//! how much time remains of it (`restart_syscall(2)`).

use abi::Addr;
use sys::ptrace::{self, Event, Registers};

use crate::{Error, Result};

/// Has a stopped thread make a call from the `syscall` instruction at `syscall`, interrupts it
/// where it would wait, and gives its result. The registers are whatever the call left.
///
/// An interruption that is asked for before the call begins ends its wait before it starts. The
/// stop at the call's exit takes its place: nothing else is reported, and the caller may give the
/// thread any registers there.
///
/// # Errors
/// [`Error::Gone`], [`Error::Kernel`]; [`Error::Astray`] when something else happens to it.
pub fn remake(tid: i32, syscall: Addr, number: u64, args: [u64; 6]) -> Result<i64> {
    let kernel = |doing| move |e| Error::of(tid, doing, e);
    let own = ptrace::registers(tid).map_err(kernel("PTRACE_GETREGSET"))?;
    let call = Registers {
        rip: syscall.0,
        rax: number,
        rdi: args[0],
        rsi: args[1],
        rdx: args[2],
        r10: args[3],
        r8: args[4],
        r9: args[5],
        orig_rax: u64::MAX,
        ..own
    };
    ptrace::set_registers(tid, &call).map_err(kernel("PTRACE_SETREGSET"))?;
    reach_call_stop(tid)?;
    ptrace::interrupt(tid).map_err(kernel("PTRACE_INTERRUPT"))?;
    reach_call_stop(tid)?;
    let regs = ptrace::registers(tid).map_err(kernel("PTRACE_GETREGSET"))?;
    Ok(regs.rax.cast_signed())
}

fn unexpected(tid: i32, event: Event) -> Error {
    match event {
        Event::Ended(_) => Error::Gone {
            tid,
            doing: "in a call of ours",
        },
        other => {
            let what = format!("unexpected {other:?}");
            Error::Astray { tid, what }
        }
    }
}

fn reach_call_stop(tid: i32) -> Result<()> {
    // An interruption that was asked for earlier may be reported before the call begins.
    for _ in 0..4 {
        ptrace::resume_to_call(tid).map_err(|e| Error::of(tid, "PTRACE_SYSCALL", e))?;
        match ptrace::wait(tid)
            .map_err(|e| Error::of(tid, "waitpid", e))?
            .1
        {
            Event::Call => return Ok(()),
            Event::Stop(_) => {}
            other => return Err(unexpected(tid, other)),
        }
    }
    let what = "no call was made".to_owned();
    Err(Error::Astray { tid, what })
}

#[cfg(test)]
mod tests {
    use super::*;

    const POLL: u64 = 7;
    const GETPID: u64 = 39;
    const ERESTART_RESTARTBLOCK: i64 = -516;

    #[test]
    fn a_remade_call_is_over_for_calls_that_follow() {
        let puppet = sys::puppet::Puppet::start().expect("a puppet");
        let pid = puppet.pid();
        ptrace::seize(pid, true).expect("seize");
        ptrace::interrupt(pid).expect("interrupt");
        ptrace::wait(pid).expect("wait");
        // It waits for its owner in a futex call: behind the instruction that it needs.
        let syscall = Addr(ptrace::registers(pid).expect("registers").rip - 2);
        let hour = [0, 0, 3_600_000, 0, 0, 0];
        let remade = remake(pid, syscall, POLL, hour).expect("it is made");
        assert_eq!(remade, ERESTART_RESTARTBLOCK);
        // A call that does not wait gives its result, and nothing else is reported.
        let remade = remake(pid, syscall, GETPID, [0; 6]).expect("it is made");
        assert_eq!(remade, i64::from(pid));
        let call = Registers {
            rip: syscall.0,
            rax: GETPID,
            orig_rax: u64::MAX,
            ..ptrace::registers(pid).expect("registers")
        };
        ptrace::set_registers(pid, &call).expect("set registers");
        for _ in 0..2 {
            ptrace::resume_to_call(pid).expect("resume");
            assert_eq!(ptrace::wait(pid).expect("wait"), (pid, Event::Call));
        }
    }
}
