//! A call that is made in a stopped thread and interrupted at once, so that the kernel remembers
//! how much time remains of it (`restart_syscall(2)`).

use abi::Addr;
use sys::ptrace::{self, Event, Registers};

use crate::{Error, Result};

/// Has a stopped thread make a call from the `syscall` instruction at `syscall`, interrupts it
/// where it would wait, and gives its result. The registers are whatever the call left.
///
/// An interruption that is asked for before the call begins ends its wait before it starts; the
/// thread is in the call's exit then, from where the caller may give it any registers.
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

fn reach_call_stop(tid: i32) -> Result<()> {
    let gone = || Error::Gone {
        tid,
        doing: "in a call of ours",
    };
    // An interruption that was asked for earlier may be reported before the call begins.
    for _ in 0..4 {
        ptrace::resume_to_call(tid).map_err(|e| Error::of(tid, "PTRACE_SYSCALL", e))?;
        match ptrace::wait(tid)
            .map_err(|e| Error::of(tid, "waitpid", e))?
            .1
        {
            Event::Call => return Ok(()),
            Event::Ended(_) => return Err(gone()),
            Event::Stop(_) => {}
            other => {
                let what = format!("unexpected {other:?}");
                return Err(Error::Astray { tid, what });
            }
        }
    }
    let what = "no call was made".to_owned();
    Err(Error::Astray { tid, what })
}
