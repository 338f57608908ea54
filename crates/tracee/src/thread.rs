//! A traced and stopped thread.

use std::time::{Duration, Instant};

use abi::{Addr, Span};
use sys::arch::Registers;
use sys::process::Process;
use sys::ptrace::{self, Dispatch, Event};

use crate::arch::self_restore::WayBack;
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
    /// Which calls are handed to itself, if any.
    pub dispatch: Option<Dispatch>,
}

impl Saved {
    /// The state that a thread needs to go back by itself.
    pub(crate) fn way_back(&self) -> WayBack {
        WayBack {
            registers: self.registers,
            mask: self.mask,
            dispatch: self.dispatch,
        }
    }
}

/// A thread that this process traces and that is stopped. It goes on when this is dropped.
#[derive(Debug)]
pub struct Thread {
    /// The process.
    pub process: Process,
    /// The thread.
    pub tid: i32,
    /// What it goes on with.
    pub saved: Saved,
    /// The stop signal, if it was in a group stop when it was stopped last.
    pub group_stop: Option<i32>,
    /// Whether registers and mask differ from `saved` now.
    pub(crate) borrowed: bool,
    /// Whether all its signals are blocked now.
    pub(crate) masked: bool,
    /// Whether it was started and not stopped again.
    pub(crate) running: bool,
    detached: bool,
}

/// A thread that is traced and was asked to stop. Dropping it lets it go.
#[derive(Debug)]
pub struct Seized {
    tid: i32,
    /// Whether it was seen to stop or to end.
    seen: bool,
    /// Until when it may be waited for, where that was said.
    deadline: Option<Instant>,
}

impl Seized {
    /// Waits until it has stopped and reads what it goes on with. A [`sys::tick::Ticker`] must run:
    /// it ends the wait now and then so that the deadline is seen, and the end of a leader whose
    /// threads run on, which nothing else tells.
    ///
    /// # Errors
    /// [`Error::Gone`]; [`Error::Stuck`] when it does not stop before `deadline`.
    pub fn stopped(mut self, process: &Process, deadline: Option<Instant>) -> Result<Thread> {
        let tid = self.tid;
        self.deadline = deadline;
        let signal = self.wait_for_stop()?;
        let mut thread = Thread {
            process: process.clone(),
            tid,
            saved: Saved {
                registers: Registers::default(),
                mask: 0,
                rseq: ptrace::rseq(tid).unwrap_or_default(),
                // An older kernel does not tell.
                dispatch: ptrace::dispatch(tid).ok().flatten(),
            },
            group_stop: (signal != ptrace::SIGTRAP).then_some(signal),
            borrowed: false,
            masked: false,
            running: false,
            detached: false,
        };
        let kernel = |doing| move |e| Error::of(tid, doing, e);
        thread.saved.registers = ptrace::registers(tid).map_err(kernel("PTRACE_GETREGS"))?;
        thread.saved.mask = ptrace::signal_mask(tid).map_err(kernel("PTRACE_GETSIGMASK"))?;
        thread.abort_rseq()?;
        Ok(thread)
    }

    /// Whether the deadline was passed by more than `by`.
    fn is_late(&self, by: Duration) -> bool {
        let deadline = self.deadline;
        deadline.is_some_and(|deadline| Instant::now() > deadline + by)
    }

    /// Blocks until the thread has stopped, and gives the signal by which it did. When the time is
    /// over, it is looked at once more: this process may have stood still itself.
    fn wait_for_stop(&mut self) -> Result<i32> {
        let (tid, begun) = (self.tid, Instant::now());
        loop {
            let event = match self.is_late(Duration::ZERO) {
                false => ptrace::wait_interruptible(tid).map(Some),
                true => ptrace::try_wait(tid),
            };
            let event = match event {
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {
                    if has_ended(tid) {
                        self.seen = true;
                        let doing = "stopping it";
                        return Err(Error::Gone { tid, doing });
                    }
                    continue;
                }
                Ok(None) => {
                    return Err(Error::Stuck {
                        tid,
                        waited_ms: begun.elapsed().as_millis(),
                    });
                }
                Ok(Some((_, event))) => event,
                Err(error) => return Err(Error::of(tid, "waitpid", error)),
            };
            let pass_on = match event {
                Event::Stop(signal) => {
                    self.seen = true;
                    return Ok(signal);
                }
                Event::Ended(_) => {
                    self.seen = true;
                    let doing = "stopping it";
                    return Err(Error::Gone { tid, doing });
                }
                // About to be delivered before the interruption was seen: let it have the signal.
                Event::Signal(signal) => signal,
                Event::Call | Event::Other(_) => 0,
            };
            let resumed = ptrace::resume_to_stop(tid, pass_on);
            resumed.map_err(|e| Error::of(tid, "PTRACE_CONT", e))?;
        }
    }
}

impl Drop for Seized {
    fn drop(&mut self) {
        // Of one that does not stop even now, the kernel lets go when this process ends.
        const PATIENCE: Duration = Duration::from_millis(500);
        const PAUSE: Duration = Duration::from_micros(200);
        self.deadline.get_or_insert_with(Instant::now);
        while !self.seen && !self.is_late(PATIENCE) {
            let signal = match ptrace::try_wait(self.tid) {
                Ok(None) => {
                    std::thread::sleep(PAUSE);
                    continue;
                }
                Ok(Some((_, Event::Signal(signal)))) => signal,
                Ok(Some((_, Event::Stop(_) | Event::Call | Event::Other(_)))) => 0,
                Ok(Some((_, Event::Ended(_)))) | Err(_) => return,
            };
            self.seen = true;
            if let Err(error) = ptrace::detach(self.tid, signal) {
                log::debug!("letting thread {} go: {error}", self.tid);
            }
        }
    }
}

/// Whether a thread has ended. Of a leader with other threads its tracer is not told.
#[must_use]
pub fn has_ended(tid: i32) -> bool {
    let stat = sys::procfs::read(format_args!("{tid}/stat")).ok();
    let stat = stat.and_then(|stat| sys::proc::Stat::parse(&stat).ok());
    stat.is_none_or(|stat| matches!(stat.state, b'Z' | b'X'))
}

impl Thread {
    /// Begins to trace a thread and asks it to stop.
    ///
    /// # Errors
    /// [`Error::Gone`]; [`Error::Kernel`] with `EPERM` when it is traced already or not ours.
    pub fn seize(tid: i32) -> Result<Seized> {
        let seized = ptrace::seize(tid, false);
        seized.map_err(|e| Error::of(tid, "cannot trace it (PTRACE_SEIZE)", e))?;
        ptrace::interrupt(tid).map_err(|e| Error::of(tid, "PTRACE_INTERRUPT", e))?;
        Ok(Seized {
            tid,
            seen: false,
            deadline: None,
        })
    }

    /// A thread stopped inside a restartable sequence is moved to the sequence's abort handler,
    /// as the kernel would do when it goes on; the kernel would not know any more once the thread
    /// had run the blob. See rseq(2) and the kernel's kernel/rseq.c.
    fn abort_rseq(&mut self) -> Result<()> {
        let area = self.saved.rseq;
        // A sequence makes no system calls: a thread in a call is in none.
        let in_call = self.saved.registers.call().is_some();
        if area.addr == 0 || in_call {
            return Ok(());
        }
        let mut pointer = [0; 8];
        let read = |at, buf: &mut [u8]| sys::vm::read_exact(&self.process, Addr(at), buf);
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
        if self.saved.registers.at().0.wrapping_sub(start) < len {
            self.saved.registers.go_to(Addr(abort));
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
    /// by its own death or ours at any point when `regs` lead to [`crate::arch::self_restore`]
    /// code.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Kernel`].
    pub(crate) fn borrow(&mut self, regs: &Registers) -> Result<()> {
        let first = !self.masked;
        let tid = self.tid;
        if first {
            self.intercept(false)?;
        }
        (self.borrowed, self.masked) = (true, true);
        ptrace::set_registers(tid, regs).map_err(|e| Error::of(tid, "PTRACE_SETREGS", e))?;
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
        self.intercept(true)?;
        let set = ptrace::set_registers(tid, &self.saved.registers);
        set.map_err(|e| Error::of(tid, "PTRACE_SETREGS", e))?;
        (self.borrowed, self.masked) = (false, false);
        Ok(())
    }

    /// Has the kernel hand the thread's calls to itself again, if it did, or make those of ours.
    fn intercept(&self, own: bool) -> Result<()> {
        let Some(dispatch) = self.saved.dispatch else {
            return Ok(());
        };
        let dispatch = if own { dispatch } else { Dispatch::default() };
        let set = ptrace::set_dispatch(self.tid, &dispatch);
        set.map_err(|e| Error::of(self.tid, "PTRACE_SET_SYSCALL_USER_DISPATCH_CONFIG", e))
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
            call::next_stop(tid)?;
        }
        call::result(tid)
    }

    /// Starts the thread; [`Thread::halt`] stops it again.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Kernel`].
    pub(crate) fn start(&mut self) -> Result<()> {
        self.start_with(0)
    }

    pub(crate) fn start_with(&mut self, signal: i32) -> Result<()> {
        let tid = self.tid;
        ptrace::resume(tid, signal).map_err(|e| Error::of(tid, "PTRACE_CONT", e))?;
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
                let signal = call::absorb(tid, event)?;
                self.start_with(signal)
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
        let regs = regs.map_err(|e| Error::of(self.tid, "PTRACE_GETREGS", e))?;
        if !areas.iter().any(|area| area.contains(regs.at())) {
            (self.borrowed, self.masked) = (false, false);
        }
        Ok(())
    }

    /// Stops the thread after [`Thread::start`].
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Astray`].
    pub(crate) fn halt(&mut self) -> Result<()> {
        match self.halt_or_fault("in a batch of calls")? {
            None => Ok(()),
            Some(signal) => Err(call::unexpected(self.tid, Event::Signal(signal))),
        }
    }

    /// Stops the thread after [`Thread::start`]; or gives the signal of a fault that it is about
    /// to be told of. `doing` says what it was to do, should it have ended.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Astray`].
    pub(crate) fn halt_or_fault(&mut self, doing: &'static str) -> Result<Option<i32>> {
        let tid = self.tid;
        ptrace::interrupt(tid).map_err(|e| Error::of(tid, "PTRACE_INTERRUPT", e))?;
        self.stop_or_fault(doing)
    }

    /// Waits for the stop that was asked for; otherwise as [`Thread::halt_or_fault`].
    ///
    /// # Errors
    /// As [`Thread::halt_or_fault`].
    pub(crate) fn stop_or_fault(&mut self, doing: &'static str) -> Result<Option<i32>> {
        let tid = self.tid;
        loop {
            let event = call::next_event(tid)?;
            self.running = false;
            match event {
                Event::Stop(signal) => {
                    self.group_stop = (signal != ptrace::SIGTRAP).then_some(signal);
                    return Ok(None);
                }
                Event::Signal(signal) if signal != ptrace::SIGSTOP => return Ok(Some(signal)),
                Event::Ended(_) => return Err(Error::Gone { tid, doing }),
                other => {
                    let signal = call::absorb(tid, other)?;
                    let resumed = ptrace::resume_to_stop(tid, signal);
                    resumed.map_err(|e| Error::of(tid, "PTRACE_CONT", e))?;
                    self.running = true;
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

#[cfg(test)]
mod tests {
    use sys::tick::Ticker;

    use super::*;
    use crate::testing::{cat, echo};

    fn tracer(pid: i32) -> String {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
        let line = status.lines().find(|line| line.starts_with("TracerPid"));
        line.expect("a line").to_owned()
    }

    #[test]
    fn a_thread_that_is_not_waited_for_is_let_go() {
        let (mut child, pid) = cat();
        for _ in 0..3 {
            let seized = Thread::seize(pid).expect("seize");
            assert_ne!(tracer(pid), "TracerPid:\t0");
            drop(seized);
            assert_eq!(tracer(pid), "TracerPid:\t0");
            echo(&mut child);
        }
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    #[test]
    fn a_thread_that_gets_signals_of_a_timer_all_the_time_stops() {
        testkit::needs_program!("python3");
        // The kernel lets go of its lock while it takes such a signal and starts the timer again.
        const PROGRAM: &str = "import ctypes, signal, time\n\
            class Every(ctypes.Structure):\n \
                _fields_ = [(name, ctypes.c_long) for name in ('a', 'every_ns', 'b', 'first_ns')]\n\
            signal.signal(signal.SIGALRM, lambda *_: None)\n\
            libc, timer = ctypes.CDLL(None), ctypes.c_void_p()\n\
            assert libc.timer_create(1, None, ctypes.byref(timer)) == 0\n\
            every = Every(0, 20_000, 0, 20_000)\n\
            assert libc.timer_settime(timer, 0, ctypes.byref(every), None) == 0\n\
            print(end='x', flush=True)\n\
            while True: time.sleep(1000)";
        let mut command = std::process::Command::new("python3");
        let command = command.args(["-c", PROGRAM]);
        let mut child = command
            .stdout(std::process::Stdio::piped())
            .spawn()
            .expect("python3 starts");
        let stdout = child.stdout.as_mut().expect("piped");
        std::io::Read::read_exact(stdout, &mut [0]).expect("it is ready");
        let tid = i32::try_from(child.id()).expect("a pid");
        let _ticker = Ticker::start(Duration::from_millis(5), None).expect("a timer");
        let stop = || {
            let deadline = Some(Instant::now() + Duration::from_secs(5));
            Thread::seize(tid)?.stopped(&Process::new(tid), deadline)
        };
        let stopped = (0..5000).try_for_each(|_| stop()?.release());
        child.kill().expect("kill");
        child.wait().expect("wait");
        stopped.expect("it stops");
    }

    #[test]
    fn a_leader_that_ends_before_it_stops_is_told_of() {
        // The leader ends when a line comes, and leaves a thread.
        const PROGRAM: &str = "import ctypes, sys, threading, time\n\
            threading.Thread(target=lambda: time.sleep(1000), daemon=True).start()\n\
            print(end='x', flush=True)\n\
            sys.stdin.buffer.raw.read(1)\n\
            ctypes.CDLL(None).syscall(60, 0)";
        let mut command = std::process::Command::new("python3");
        let command = command
            .args(["-c", PROGRAM])
            .stdin(std::process::Stdio::piped())
            .stdout(std::process::Stdio::piped());
        let mut child = command.spawn().expect("python3 starts");
        let stdout = child.stdout.as_mut().expect("piped");
        std::io::Read::read_exact(stdout, &mut [0]).expect("it is ready");
        let tid = i32::try_from(child.id()).expect("a pid");
        ptrace::seize(tid, false).expect("seize");
        drop(child.stdin.take());
        let _ticker = Ticker::start(Duration::from_millis(5), None).expect("a timer");
        let seized = Seized {
            tid,
            seen: false,
            deadline: None,
        };
        let error = seized
            .stopped(&Process::new(tid), None)
            .expect_err("it ended");
        assert!(matches!(error, Error::Gone { .. }), "{error}");
        child.kill().expect("kill");
        child.wait().expect("wait");
    }
}
