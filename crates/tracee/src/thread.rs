//! A traced and stopped thread.

use std::time::Instant;

use abi::{Addr, Span};
use rustix::process::{Pid, Signal, kill_process};
use sys::ptrace::{self, Event, Registers};

use crate::{Error, Result, call};

/// What a thread goes on with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Saved {
    /// Its general registers.
    pub registers: Registers,
    /// Its mask of blocked signals.
    pub mask: u64,
    /// Its registered area for restartable sequences.
    pub rseq: ptrace::RseqArea,
}

/// A thread that this process traces and that is stopped. It goes on when this is dropped.
#[derive(Debug)]
pub struct Thread {
    /// The process.
    pub pid: i32,
    /// The thread.
    pub tid: i32,
    /// What it goes on with.
    pub saved: Saved,
    /// The stop signal when it was in a group stop.
    pub group_stop: Option<i32>,
    /// Whether registers and mask differ from `saved` now.
    pub(crate) borrowed: bool,
    /// Whether all its signals are blocked now.
    masked: bool,
    /// A `SIGSTOP` that came while it was borrowed, to be sent again.
    held_stop: bool,
    /// Whether it was started and not stopped again.
    running: bool,
    detached: bool,
}

/// Begins to trace a thread and asks it to stop; [`Thread::stopped`] waits for it.
///
/// # Errors
/// [`Error::Gone`]; [`Error::Kernel`] with `EPERM` when it is traced already or not ours to trace.
pub fn seize(tid: i32) -> Result<()> {
    ptrace::seize(tid, false).map_err(|e| Error::of(tid, "cannot trace it (PTRACE_SEIZE)", e))?;
    ptrace::interrupt(tid).map_err(|e| Error::of(tid, "PTRACE_INTERRUPT", e))
}

impl Thread {
    /// Begins to trace a thread and asks it to stop; to be followed by [`Thread::stopped`].
    ///
    /// # Errors
    /// [`Error::Gone`]; [`Error::Kernel`] with `EPERM` when it is traced already or not ours.
    pub fn seize(tid: i32) -> Result<()> {
        seize(tid)
    }

    /// Waits until a seized thread has stopped and reads what it goes on with.
    ///
    /// # Errors
    /// [`Error::Gone`]; [`Error::Stuck`] when it does not stop before `deadline`.
    pub fn stopped(pid: i32, tid: i32, deadline: Option<Instant>) -> Result<Self> {
        let signal = wait_for_stop(tid, deadline)?;
        let group_stop = (signal != sys::ptrace::SIGTRAP).then_some(signal);
        let kernel = |doing| move |e| Error::of(tid, doing, e);
        let registers = ptrace::registers(tid).map_err(kernel("PTRACE_GETREGSET"))?;
        let mask = ptrace::signal_mask(tid).map_err(kernel("PTRACE_GETSIGMASK"))?;
        let rseq = ptrace::rseq(tid).unwrap_or_default();
        let mut thread = Self {
            pid,
            tid,
            saved: Saved {
                registers,
                mask,
                rseq,
            },
            group_stop,
            borrowed: false,
            masked: false,
            held_stop: false,
            running: false,
            detached: false,
        };
        thread.abort_rseq()?;
        Ok(thread)
    }

    /// A thread stopped inside a restartable sequence is moved to the sequence's abort handler,
    /// as the kernel would do when it goes on; the kernel would not know any more once the thread
    /// had run the blob. See rseq(2) and the kernel's kernel/rseq.c.
    fn abort_rseq(&mut self) -> Result<()> {
        let area = self.saved.rseq;
        if area.addr == 0 {
            return Ok(());
        }
        let mut pointer = [0; 8];
        let read = |at, buf: &mut [u8]| sys::vm::read_exact(self.pid, Addr(at), buf);
        let lost = |e| Error::of(self.tid, "cannot read its rseq area", e);
        read(area.addr + 8, &mut pointer).map_err(lost)?;
        let sequence = u64::from_le_bytes(pointer);
        if sequence == 0 {
            return Ok(());
        }
        let mut bytes = [0; 32];
        read(sequence, &mut bytes).map_err(lost)?;
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let (start, len, abort) = (word(8), word(16), word(24));
        if self.saved.registers.rip.wrapping_sub(start) < len {
            self.saved.registers.rip = abort;
            self.borrowed = true;
        }
        Ok(())
    }

    /// Has the thread go on with other registers than those with which it was stopped.
    pub fn redirect(&mut self, registers: Registers) {
        if registers != self.saved.registers {
            self.saved.registers = registers;
            self.borrowed = true;
        }
    }

    /// Blocks all signals and gives the thread other registers: in this order it can be followed
    /// by its own death or ours at any point when `regs` lead to [`crate::comeback`] code.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Kernel`].
    pub(crate) fn borrow(&mut self, regs: &Registers) -> Result<()> {
        let first = !self.masked;
        (self.borrowed, self.masked) = (true, true);
        let tid = self.tid;
        ptrace::set_registers(tid, regs).map_err(|e| Error::of(tid, "PTRACE_SETREGSET", e))?;
        if first {
            let set = ptrace::set_signal_mask(tid, u64::MAX);
            set.map_err(|e| Error::of(tid, "PTRACE_SETSIGMASK", e))?;
        }
        Ok(())
    }

    /// Gives the thread its own signal mask and registers again.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Kernel`].
    pub fn give_back(&mut self) -> Result<()> {
        if !self.borrowed {
            return Ok(());
        }
        let tid = self.tid;
        let set = ptrace::set_signal_mask(tid, self.saved.mask);
        set.map_err(|e| Error::of(tid, "PTRACE_SETSIGMASK", e))?;
        let set = ptrace::set_registers(tid, &self.saved.registers);
        set.map_err(|e| Error::of(tid, "PTRACE_SETREGSET", e))?;
        (self.borrowed, self.masked) = (false, false);
        Ok(())
    }

    /// Lets the thread make the one system call that its registers are set up for, from entry to
    /// exit, and gives its result.
    ///
    /// # Errors
    /// [`Error::Gone`]; [`Error::Astray`] when it does something else.
    pub(crate) fn run_call(&mut self) -> Result<i64> {
        let tid = self.tid;
        // At its entry, then at its end.
        for _ in 0..2 {
            call::next_stop(tid, |event| self.absorb(event))?;
        }
        call::result(tid)
    }

    /// Remembers a stop signal that came meanwhile; nothing else may come, as all is blocked.
    fn absorb(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Stop(_) => Ok(()),
            Event::Signal(signal) if signal == sys::ptrace::SIGSTOP => {
                self.held_stop = true;
                Ok(())
            }
            other => Err(call::unexpected(self.tid, other)),
        }
    }

    /// Starts the thread; [`Thread::halt`] stops it again.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Kernel`].
    pub(crate) fn start(&mut self) -> Result<()> {
        let tid = self.tid;
        ptrace::resume(tid, 0).map_err(|e| Error::of(tid, "PTRACE_CONT", e))?;
        self.running = true;
        Ok(())
    }

    /// Has a started thread go on that a stop signal, or the signal to continue, has stopped.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Astray`].
    pub(crate) fn keep_going(&mut self) -> Result<()> {
        let tid = self.tid;
        let event = ptrace::try_wait(tid).map_err(|e| Error::of(tid, "waitpid", e))?;
        match event {
            None => Ok(()),
            Some((_, Event::Ended(_))) => Err(Error::Gone {
                tid,
                doing: "in a batch of calls",
            }),
            Some((_, event)) => {
                self.running = false;
                self.absorb(event)?;
                self.start()
            }
        }
    }

    /// Stops the thread if it runs. One that is not in `areas` any more went back by itself: it
    /// has its own registers.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Astray`].
    pub(crate) fn recall(&mut self, areas: &[Span]) -> Result<()> {
        if !self.running {
            return Ok(());
        }
        self.halt()?;
        let regs = ptrace::registers(self.tid);
        let regs = regs.map_err(|e| Error::of(self.tid, "PTRACE_GETREGSET", e))?;
        if !areas.iter().any(|area| area.contains(Addr(regs.rip))) {
            (self.borrowed, self.masked) = (false, false);
        }
        Ok(())
    }

    /// Stops the thread after [`Thread::start`].
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Astray`].
    pub(crate) fn halt(&mut self) -> Result<()> {
        let tid = self.tid;
        ptrace::interrupt(tid).map_err(|e| Error::of(tid, "PTRACE_INTERRUPT", e))?;
        loop {
            let (_, event) = ptrace::wait(tid).map_err(|e| Error::of(tid, "waitpid", e))?;
            self.running = false;
            match event {
                Event::Stop(_) => return Ok(()),
                Event::Ended(_) => {
                    return Err(Error::Gone {
                        tid,
                        doing: "in a batch of calls",
                    });
                }
                other => {
                    self.absorb(other)?;
                    self.start()?;
                }
            }
        }
    }

    /// Ends the tracing: the thread goes on where it was.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Kernel`].
    pub fn release(mut self) -> Result<()> {
        self.let_go()
    }

    fn let_go(&mut self) -> Result<()> {
        if self.detached {
            return Ok(());
        }
        self.detached = true;
        let tid = self.tid;
        self.give_back()?;
        if let (true, Some(pid)) = (self.held_stop, Pid::from_raw(self.pid)) {
            // Not by the detachment: from most stops the kernel does not take a signal along.
            let sent = kill_process(pid, Signal::STOP);
            sent.map_err(|e| Error::of(tid, "kill", e.into()))?;
        }
        ptrace::detach(tid, 0).map_err(|e| Error::of(tid, "PTRACE_DETACH", e))
    }

    /// Forgets the thread: it was killed.
    pub fn forget(mut self) {
        self.detached = true;
    }
}

impl Drop for Thread {
    fn drop(&mut self) {
        if let Err(error) = self.let_go() {
            log::debug!("letting thread {} go: {error}", self.tid);
        }
    }
}

/// Blocks until the thread has stopped. With a deadline, a [`sys::tick::Ticker`] must run: it ends
/// the wait now and then so that the deadline is seen.
fn wait_for_stop(tid: i32, deadline: Option<Instant>) -> Result<i32> {
    let begun = Instant::now();
    loop {
        let event = match ptrace::wait_interruptible(tid) {
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {
                if deadline.is_some_and(|deadline| Instant::now() > deadline) {
                    return Err(Error::Stuck {
                        tid,
                        waited_ms: begun.elapsed().as_millis(),
                    });
                }
                continue;
            }
            event => event.map_err(|e| Error::of(tid, "waitpid", e))?.1,
        };
        let pass_on = match event {
            Event::Stop(signal) => return Ok(signal),
            Event::Ended(_) => {
                return Err(Error::Gone {
                    tid,
                    doing: "stopping it",
                });
            }
            // About to be delivered before the interruption was seen: let it have the signal.
            Event::Signal(signal) => signal,
            Event::Call | Event::Other(_) => 0,
        };
        ptrace::resume(tid, pass_on).map_err(|e| Error::of(tid, "PTRACE_CONT", e))?;
    }
}
