//! A stopped thread that submits many entries to a ring of io_uring(7), at the speed of its own.

use std::time::{Duration, Instant};

use abi::Addr;
use sys::ptrace::{self, Event};

use crate::call::{absorb, next_event, result};
use crate::{Error, Result, arch};

/// What a thread is to submit.
#[derive(Clone, Copy, Debug)]
pub struct Submitting {
    /// Where [`arch::SUBMIT_LOOP`] stands in its memory.
    pub code: Addr,
    /// The ring's descriptor.
    pub fd: i32,
    /// How many entries a call is to take.
    pub count: u32,
    /// The word of the ring that says how far it is.
    pub watched: Addr,
    /// What that is to be in the end.
    pub until: u32,
    /// The word that is to say the same, up to a limit.
    pub head: Option<(Addr, u32)>,
}

impl Submitting {
    /// Has a traced and stopped thread, which runs code of ours, submit. `now` reads the word that
    /// is watched. The thread is stopped afterwards, with other registers.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Kernel`]; [`Error::Astray`] when no entry is taken any more.
    pub fn run(&self, tid: i32, now: impl Fn() -> u32) -> Result<()> {
        const PATIENCE: Duration = Duration::from_secs(5);
        let of = |doing| move |e| Error::of(tid, doing, e);
        let mut registers = ptrace::registers(tid).map_err(of("PTRACE_GETREGS"))?;
        arch::enter_submit_loop(&mut registers, self);
        ptrace::set_registers(tid, &registers).map_err(of("PTRACE_SETREGS"))?;
        ptrace::resume(tid, 0).map_err(of("PTRACE_CONT"))?;
        let (mut last, mut moved) = (now(), Instant::now());
        while last != self.until && moved.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_micros(50));
            let seen = now();
            if seen != last {
                (last, moved) = (seen, Instant::now());
            }
        }
        ptrace::interrupt(tid).map_err(of("PTRACE_INTERRUPT"))?;
        loop {
            match next_event(tid)? {
                Event::Stop(_) => break,
                Event::Ended(_) => {
                    let doing = "while it submitted to an io_uring";
                    return Err(Error::Gone { tid, doing });
                }
                other => {
                    let signal = absorb(tid, other)?;
                    ptrace::resume_to_stop(tid, signal).map_err(of("PTRACE_CONT"))?;
                }
            }
        }
        last = now();
        if last == self.until {
            return Ok(());
        }
        let (until, given) = (self.until, result(tid)?);
        let what = format!("an io_uring came to {last}, not to {until}: a call gave {given}");
        Err(Error::Astray { tid, what })
    }
}
