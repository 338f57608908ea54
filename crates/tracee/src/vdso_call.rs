//! Out of the vDSO: a stopped thread finishes the function of the kernel's that it is in.
//!
//! What such a function has read of the kernel's data is worth nothing after a restore, and after
//! one on another kernel not even its code is there. So the thread runs on until the function
//! returns: its return address on the stack is changed to that of a *landing pad*, code in the
//! padding of the vDSO that sets the thread's own signal mask and returns to where the function
//! would have. The thread runs from call to call, and its tracer takes it at the entry of the
//! landing pad's. A thread whose tracer is killed makes that call and goes on; one whose tracer
//! stands still waits there. (Single steps would do as well, but a thread whose tracer is killed in
//! the middle of one is killed, too.)

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use abi::{Addr, Span};
use sys::arch::Registers;
use sys::ptrace::{self, Event};

use crate::arch::{self, HOME_AT, MASK_AT, PAD_BYTES, pad_code};
use crate::injection::padding_in;
use crate::{Error, Result, Thread, call};

/// How long a function of the vDSO may take to end.
const LONGEST: Duration = Duration::from_millis(50);

/// The kernel's error for a write to a page that a userfaultfd protects.
const EIO: i32 = libc::EIO;

/// The course of a thread that was to run to the end of its function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Course {
    /// It is at the entry of the landing pad's call.
    Arrived,
    /// It is still in the function.
    Inside,
    /// A signal is about to be delivered that its own instruction made.
    Fault(i32),
}

/// Where a thread is that was to leave the vDSO.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum VdsoCall {
    /// Behind the function's call.
    Finished,
    /// Where it was, as it takes too long, there is no room for a landing pad, or its calls are
    /// handed to itself.
    Unfinished,
    /// Where it was, as a userfaultfd protects the page of its stack. It lifts that itself when it
    /// goes on.
    Protected,
}

/// Has a thread that was stopped inside `code`, the kernel's vDSO, run to the end of the function
/// that it is in, whose return address stands on the stack at `slot`. `bytes` are that code,
/// `memory` is its process's /proc/PID/mem opened for reading and writing; `is_filtered` tells
/// whether it has seccomp filters, which are suspended when it is out: until then they judge what
/// it calls.
///
/// # Errors
/// [`Error::Gone`], [`Error::Kernel`], [`Error::Astray`]; the thread goes on as it was then.
pub fn finish_vdso_call(
    thread: &mut Thread,
    memory: &File,
    (code, bytes): (Span, &[u8]),
    (slot, is_filtered): (Addr, bool),
) -> Result<VdsoCall> {
    let tid = thread.tid;
    let tail = bytes
        .last_chunk()
        .filter(|_| bytes.len() as u64 == code.bytes());
    let Some(pad) = tail.and_then(|tail| padding_in(tail, code.end)) else {
        return Ok(VdsoCall::Unfinished);
    };
    let word = |at: Addr| {
        let mut bytes = [0; 8];
        let read = memory.read_exact_at(&mut bytes, at.0);
        read.map_err(|e| Error::of(tid, "cannot read its stack", e))?;
        Ok(u64::from_le_bytes(bytes))
    };
    let mut home = word(slot)?;
    if home == pad.0 {
        // Whoever sent it there was killed.
        home = word(pad.plus(HOME_AT as u64))?;
        thread.saved.mask = word(pad.plus(MASK_AT as u64))?;
    }
    if code.contains(Addr(home)) || thread.saved.dispatch.is_some() {
        return Ok(VdsoCall::Unfinished);
    }
    let put = |bytes: &[u8], at: Addr| memory.write_all_at(bytes, at.0);
    let zero = || {
        let zeroed = put(&[0; PAD_BYTES], pad);
        zeroed.map_err(|e| Error::of(tid, "cannot zero the landing pad", e))
    };
    // In this order it finds its way if this process is killed at any point.
    put(&pad_code(home, thread.saved.mask), pad)
        .map_err(|e| Error::of(tid, "cannot write to its vDSO", e))?;
    match put(&pad.0.to_le_bytes(), slot) {
        Err(error) if error.raw_os_error() == Some(EIO) => {
            zero()?;
            return Ok(VdsoCall::Protected);
        }
        changed => changed.map_err(|e| Error::of(tid, "cannot write to its stack", e))?,
    }
    // One that does not stop keeps its landing pad: it comes to it when it goes on.
    let course = thread.run_to(pad, code)?;
    if course == Course::Arrived {
        thread.take_from_pad(home, is_filtered)?;
    } else {
        put(&home.to_le_bytes(), slot)
            .map_err(|e| Error::of(tid, "cannot write to its stack", e))?;
        thread.stay()?;
    }
    if let Course::Fault(signal) = course {
        thread.take(signal)?;
    }
    zero()?;
    Ok(match course {
        Course::Inside => VdsoCall::Unfinished,
        Course::Arrived | Course::Fault(_) => VdsoCall::Finished,
    })
}

impl Thread {
    /// Runs with signals blocked, but for those that its own instructions make, until it is at the
    /// entry of the landing pad's call.
    fn run_to(&mut self, pad: Addr, code: Span) -> Result<Course> {
        // SIGILL, SIGTRAP, SIGBUS, SIGFPE, SIGSEGV, SIGSYS
        const OWN: u64 = 1 << 3 | 1 << 4 | 1 << 6 | 1 << 7 | 1 << 10 | 1 << 30;
        const TRIES: usize = 4;
        let tid = self.tid;
        let failed = |doing| move |e| Error::of(tid, doing, e);
        self.masked = true;
        ptrace::set_signal_mask(tid, self.saved.mask | !OWN)
            .map_err(failed("PTRACE_SETSIGMASK"))?;
        // A redirection that was only noted, as out of a restartable sequence.
        if self.borrowed {
            ptrace::set_registers(tid, &self.saved.registers).map_err(failed("PTRACE_SETREGS"))?;
        }
        self.borrowed = true;
        let pad = Span::new(pad, PAD_BYTES as u64);
        let (mut signal, mut tries) = (0, 0);
        loop {
            ptrace::resume_to_call(tid, signal).map_err(failed("PTRACE_SYSCALL"))?;
            self.running = true;
            let event = self.next_event_soon()?;
            self.running = false;
            signal = match event {
                Event::Signal(signal) if signal != ptrace::SIGSTOP => {
                    return Ok(Course::Fault(signal));
                }
                Event::Ended(_) => {
                    let doing = "in its vDSO";
                    return Err(Error::Gone { tid, doing });
                }
                // A function of the vDSO may have to ask the kernel after all.
                Event::Call => 0,
                Event::Stop(_) => {
                    tries += 1;
                    0
                }
                other => call::absorb(tid, other)?,
            };
            let registers = self.own_registers()?;
            let at = registers.at();
            if event == Event::Call && pad.contains(at) {
                self.saved.registers = registers;
                return Ok(Course::Arrived);
            }
            if !code.contains(at) {
                let what = format!("it went from the vDSO to {at}");
                return Err(Error::Astray { tid, what });
            }
            if tries > TRIES && !pad.contains(at) {
                return Ok(Course::Inside);
            }
        }
    }

    /// Waits for the thread's next event; one that does nothing for long is interrupted.
    fn next_event_soon(&self) -> Result<Event> {
        let tid = self.tid;
        let begun = Instant::now();
        let mut pause = Duration::from_micros(10);
        // It needs less, once it runs.
        while begun.elapsed() < LONGEST {
            let event = ptrace::try_wait(tid).map_err(|e| Error::of(tid, "waitpid", e))?;
            if let Some((_, event)) = event {
                return Ok(event);
            }
            std::thread::sleep(pause);
            pause *= 2;
        }
        ptrace::interrupt(tid).map_err(|e| Error::of(tid, "PTRACE_INTERRUPT", e))?;
        call::next_event(tid)
    }

    fn own_registers(&self) -> Result<Registers> {
        let tid = self.tid;
        ptrace::registers(tid).map_err(|e| Error::of(tid, "PTRACE_GETREGS", e))
    }

    /// Takes it, which is at the entry of the landing pad's call, from there: it goes on behind the
    /// call of the function.
    fn take_from_pad(&mut self, home: u64, is_filtered: bool) -> Result<()> {
        let tid = self.tid;
        if is_filtered {
            // They would judge that there is no call.
            let suspended = ptrace::suspend_filters(tid);
            suspended.map_err(|e| Error::of(tid, "cannot suspend its filters", e))?;
        }
        let result = arch::result_on_pad(&self.saved.registers);
        self.saved.registers.end_call(result);
        self.saved.registers.go_to(Addr(home));
        self.give_back()?;
        // Out of the call, which is none any more, into a stop like others.
        ptrace::interrupt(tid).map_err(|e| Error::of(tid, "PTRACE_INTERRUPT", e))?;
        self.start()?;
        self.come_to_a_stop()
    }

    /// Waits for the stop that was asked for.
    fn come_to_a_stop(&mut self) -> Result<()> {
        let doing = "in its vDSO";
        match self.stop_or_fault(doing)? {
            None => Ok(()),
            Some(signal) => Err(call::unexpected(self.tid, Event::Signal(signal))),
        }
    }

    /// Leaves it where it has come to.
    fn stay(&mut self) -> Result<()> {
        self.saved.registers = self.own_registers()?;
        self.give_back()
    }

    /// Lets it have the signal of a fault and stops it where that leads to.
    fn take(&mut self, signal: i32) -> Result<()> {
        let tid = self.tid;
        ptrace::resume(tid, signal).map_err(|e| Error::of(tid, "PTRACE_CONT", e))?;
        self.running = true;
        self.halt()?;
        self.saved.registers = self.own_registers()?;
        let mask = ptrace::signal_mask(tid);
        self.saved.mask = mask.map_err(|e| Error::of(tid, "PTRACE_GETSIGMASK", e))?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::injection::padding;
    use crate::testing::{memory, stop, vdso};
    use std::process::{Child, Command, Stdio};

    /// A process that asks the vDSO for the time, over and over, and tells that time went back by
    /// ending.
    fn busy() -> (Child, i32) {
        const PROGRAM: &str = "import time\n\
            print(flush=True)\n\
            last = time.monotonic_ns()\n\
            while True:\n \
                now = time.monotonic_ns()\n \
                assert now >= last and now - last < 10**11, (last, now)\n \
                last = now\n";
        let mut command = Command::new("python3");
        let mut child = command
            .args(["-c", PROGRAM])
            .stdout(Stdio::piped())
            .spawn()
            .expect("python3 starts");
        let out = child.stdout.as_mut().expect("piped");
        std::io::Read::read_exact(out, &mut [0]).expect("it begins");
        let pid = i32::try_from(child.id()).expect("a pid");
        (child, pid)
    }

    /// Steps a traced and stopped thread to the first instruction of a function of `code`.
    fn step_into(tid: i32, code: Span) -> Registers {
        let mut was_outside = false;
        for _ in 0..1_000_000 {
            let regs = ptrace::registers(tid).expect("registers");
            let inside = code.contains(Addr(regs.rip));
            if was_outside && inside {
                return regs;
            }
            was_outside |= !inside;
            ptrace::step(tid).expect("a step");
            ptrace::wait(tid).expect("stops");
        }
        panic!("it does not ask for the time");
    }

    #[test]
    fn a_thread_runs_to_the_end_of_its_function() {
        let (mut child, pid) = busy();
        let code = vdso(pid);
        let mem = memory(pid);
        for round in 0..4 {
            let mut thread = stop(pid).remove(0);
            let out = |regs: &Registers| !code.contains(Addr(regs.rip));
            let inside = step_into(pid, code);
            thread.saved.registers = inside;
            let slot = Addr(inside.rsp);
            let mut bytes = vec![0; code.bytes() as usize];
            mem.read_exact_at(&mut bytes, code.start.0)
                .expect("its vDSO");
            let slot = (slot, round % 2 == 1);
            let led = finish_vdso_call(&mut thread, &mem, (code, &bytes), slot);
            let led = led.expect("it is led out");
            assert_eq!(led, VdsoCall::Finished, "round {round}");
            let regs = ptrace::registers(pid).expect("registers");
            assert!(out(&regs) && regs == thread.saved.registers);
            assert_eq!(regs.rsp, inside.rsp + 8);
            let mut home = [0; 8];
            mem.read_exact_at(&mut home, inside.rsp).expect("its stack");
            assert_eq!(padding(&mem, code).map(|pad| pad.0 > 0), Some(true));
            thread.release().expect("it goes on");
        }
        // It still runs, and the time that it was told is right.
        let ended = child.try_wait().expect("a child");
        assert!(ended.is_none(), "{ended:?}");
        child.kill().expect("kill");
        child.wait().expect("wait");
    }

    #[test]
    fn thread_of_a_killed_tracer_passes_the_landing_pad() {
        let (mut child, pid) = busy();
        let code = vdso(pid);
        let mem = memory(pid);
        let mut thread = stop(pid).remove(0);
        let inside = step_into(pid, code);
        thread.saved.registers = inside;
        let mut home = [0; 8];
        mem.read_exact_at(&mut home, inside.rsp).expect("its stack");
        let pad = padding(&mem, code).expect("padding");
        let bytes = pad_code(u64::from_le_bytes(home), thread.saved.mask);
        mem.write_all_at(&bytes, pad.0).expect("written");
        let slot = pad.0.to_le_bytes();
        mem.write_all_at(&slot, inside.rsp).expect("written");
        ptrace::set_signal_mask(pid, u64::MAX).expect("blocked");
        // What the kernel does when the tracer is killed: detach, nothing else.
        ptrace::detach(pid, 0).expect("detach");
        thread.forget();
        assert_eq!(
            padding(&mem, code),
            Some(pad),
            "a landing pad is not taken for code"
        );
        let deadline = Instant::now() + Duration::from_secs(60);
        let blocked = || {
            let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("alive");
            !status.contains("SigBlk:\t0000000000000000")
        };
        while blocked() {
            assert!(Instant::now() < deadline, "it does not go on");
            std::thread::sleep(Duration::from_millis(5));
        }
        assert!(child.try_wait().expect("a child").is_none());
        child.kill().expect("kill");
        child.wait().expect("wait");
    }
}
