//! Out of the vDSO: a stopped thread finishes the function of the kernel's that it is in.
//!
//! What such a function has read of the kernel's data is worth nothing after a restore, and after
//! one on another kernel not even its code is there. So the thread runs on until the function
//! returns: its return address on the stack is changed to that of a *landing pad*, code in the
//! padding of the vDSO where the thread waits to be fetched. Single steps would do as well, but a
//! thread whose tracer is killed in the middle of one is killed, too. On the landing pad it waits
//! for a while and goes on by itself, with its own signal mask.

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

/// What a thread did that was to run to the end of its function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Course {
    /// It waits on the landing pad.
    Arrived,
    /// It is still in the function.
    Inside,
    /// A signal is about to be delivered that its own instruction made.
    Fault(i32),
}

/// Has a thread that was stopped inside `code`, the kernel's vDSO, run to the end of the function
/// that it is in, whose return address stands on the stack at `slot`. `bytes` are that code,
/// `memory` is its process's /proc/PID/mem opened for reading and writing; `is_filtered` tells
/// whether it has seccomp filters, which judge what it calls meanwhile.
///
/// Gives whether it is out; one that takes too long is left where it is.
///
/// # Errors
/// [`Error::Gone`], [`Error::Kernel`], [`Error::Astray`]; the thread goes on as it was then.
pub fn finish_vdso_call(
    thread: &mut Thread,
    memory: &File,
    (code, bytes): (Span, &[u8]),
    (slot, is_filtered): (Addr, bool),
) -> Result<bool> {
    let tid = thread.tid;
    let tail = bytes
        .last_chunk()
        .filter(|_| bytes.len() as u64 == code.bytes());
    let Some(pad) = tail.and_then(|tail| padding_in(tail, code.end)) else {
        return Ok(false);
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
    if code.contains(Addr(home)) {
        return Ok(false);
    }
    let put = |bytes: &[u8], at: Addr| memory.write_all_at(bytes, at.0);
    // In this order it finds its way if this process is killed at any point.
    put(&pad_code(home, thread.saved.mask, is_filtered), pad)
        .map_err(|e| Error::of(tid, "cannot write to its vDSO", e))?;
    let changed = put(&pad.0.to_le_bytes(), slot);
    changed.map_err(|e| Error::of(tid, "cannot write to its stack", e))?;
    let course = thread.run_to(pad, code);
    let restored = match course {
        Ok(Course::Arrived) => thread.take_from_pad(pad, home),
        _ => put(&home.to_le_bytes(), slot)
            .map_err(|e| Error::of(tid, "cannot write to its stack", e))
            .and_then(|()| thread.stay()),
    };
    if let Ok(Course::Fault(signal)) = course {
        thread.take(signal)?;
    }
    let zeroed = put(&[0; PAD_BYTES], pad);
    zeroed.map_err(|e| Error::of(tid, "cannot zero the landing pad", e))?;
    restored?;
    Ok(matches!(course?, Course::Arrived | Course::Fault(_)))
}

impl Thread {
    /// Runs with signals blocked, but for those that its own instructions make, until it waits in
    /// the landing pad.
    fn run_to(&mut self, pad: Addr, code: Span) -> Result<Course> {
        // SIGILL, SIGTRAP, SIGBUS, SIGFPE, SIGSEGV, SIGSYS
        const OWN: u64 = 1 << 3 | 1 << 4 | 1 << 6 | 1 << 7 | 1 << 10 | 1 << 30;
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
        let begun = Instant::now();
        // It needs less, once it runs; each look whether it has arrived stops it for longer.
        let mut pause = Duration::from_micros(30);
        loop {
            self.start()?;
            let fault = match self.run_for(pause)? {
                None => self.halt_or_fault("in its vDSO")?,
                fault => fault,
            };
            if let Some(signal) = fault {
                return Ok(Course::Fault(signal));
            }
            let registers = self.own_registers()?;
            let at = registers.at();
            if pad.contains(at) {
                self.saved.registers = registers;
                return Ok(Course::Arrived);
            }
            if !code.contains(at) {
                let what = format!("it went from the vDSO to {at}");
                return Err(Error::Astray { tid, what });
            }
            // Time alone says little on a machine with much to do.
            if begun.elapsed() > LONGEST && pause > LONGEST / 10 {
                return Ok(Course::Inside);
            }
            pause *= 2;
        }
    }

    fn own_registers(&self) -> Result<Registers> {
        let tid = self.tid;
        ptrace::registers(tid).map_err(|e| Error::of(tid, "PTRACE_GETREGS", e))
    }

    /// Lets it run for a while; or gives the signal of a fault that it is about to be told of. One
    /// that was stopped by a signal as well stops twice before it runs.
    fn run_for(&mut self, pause: Duration) -> Result<Option<i32>> {
        let tid = self.tid;
        loop {
            std::thread::sleep(pause);
            let event = ptrace::try_wait(tid).map_err(|e| Error::of(tid, "waitpid", e))?;
            let Some((_, event)) = event else {
                return Ok(None);
            };
            self.running = false;
            match event {
                Event::Signal(signal) if signal != ptrace::SIGSTOP => return Ok(Some(signal)),
                Event::Ended(_) => {
                    let doing = "in its vDSO";
                    return Err(Error::Gone { tid, doing });
                }
                other => {
                    let signal = call::absorb(tid, other)?;
                    self.start_with(signal)?;
                }
            }
        }
    }

    /// Takes it, which has arrived, from the landing pad: it goes on behind the call of the
    /// function.
    fn take_from_pad(&mut self, pad: Addr, home: u64) -> Result<()> {
        let regs = self.saved.registers;
        self.saved
            .registers
            .end_call(arch::result_on_pad(&regs, pad));
        self.saved.registers.go_to(Addr(home));
        self.give_back()
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
            assert!(led, "round {round}");
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
    fn whoever_is_left_on_the_landing_pad_goes_on_by_itself() {
        [false, true].into_iter().for_each(goes_on_by_itself);
    }

    fn goes_on_by_itself(is_filtered: bool) {
        let (mut child, pid) = busy();
        let code = vdso(pid);
        let mem = memory(pid);
        let mut thread = stop(pid).remove(0);
        let inside = step_into(pid, code);
        thread.saved.registers = inside;
        let mut home = [0; 8];
        mem.read_exact_at(&mut home, inside.rsp).expect("its stack");
        let pad = padding(&mem, code).expect("padding");
        let bytes = pad_code(u64::from_le_bytes(home), thread.saved.mask, is_filtered);
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
