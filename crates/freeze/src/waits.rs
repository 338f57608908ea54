//! Calls in which threads wait, and that a stop interrupts: they go on as if it had not been.

use std::time::Duration;

use abi::Addr;
use resources::task::interrupted::{self, Before, Resume, Stopped};
use sys::arch::Registers;
use sys::proc::Status;
use sys::process::Process;
use tracee::Thread;

/// A stopped thread's wait in a system call, as far as it is known.
#[derive(Debug)]
pub struct Wait {
    /// What it did before it was stopped.
    before: Before,
    /// How long it had waited when it was stopped.
    waited: Duration,
    /// How it was stopped, where it is to make its call again.
    stopped: Option<Registers>,
}

impl Wait {
    /// Takes a thread that was stopped just now. A call that the stop has ended it makes again,
    /// whoever lets it go, and also when this process is killed. `read` gives files of its
    /// /proc/PID/task/TID.
    ///
    /// # Errors
    /// [`tracee::Error::Gone`], [`tracee::Error::Kernel`].
    pub fn begin(
        mut before: Before,
        thread: &mut Thread,
        read: impl Fn(&str) -> Option<Vec<u8>>,
    ) -> tracee::Result<Self> {
        before.see_stopped(&read);
        let waited = before.waited();
        let mut wait = Self {
            before,
            waited,
            stopped: None,
        };
        let as_stopped = thread.saved.registers;
        if !interrupted::has_ended(&as_stopped) {
            return Ok(wait);
        }
        if let Some(again) = wait.again(thread, &as_stopped, waited, read("status")) {
            wait.stopped = Some(as_stopped);
            thread.redirect(again);
            thread.give_back()?;
        }
        Ok(wait)
    }

    /// Has the thread go on with the time that remains now, or see that its call was interrupted
    /// where a signal has come meanwhile that it handles.
    pub fn end(self, thread: &mut Thread, read: impl Fn(&str) -> Option<Vec<u8>>) {
        if let Some(as_stopped) = self.stopped {
            let again = self.again(thread, &as_stopped, self.before.waited(), read("status"));
            thread.redirect(again.unwrap_or(as_stopped));
        }
    }

    /// The registers with which the kernel stopped the thread.
    pub fn registers(&self, thread: &Thread) -> Registers {
        self.stopped.unwrap_or(thread.saved.registers)
    }

    /// How the thread goes on in a restored process.
    pub fn restored(&self, thread: &Thread, status: &Status) -> Resume {
        let registers = self.registers(thread);
        self.resume(thread, &registers, (self.waited, false), status)
    }

    /// The registers with which the thread makes the call again that the stop has ended.
    fn again(
        &self,
        thread: &Thread,
        as_stopped: &Registers,
        waited: Duration,
        status: Option<Vec<u8>>,
    ) -> Option<Registers> {
        let status = Status::parse(&status?).ok()?;
        let resume = self.resume(thread, as_stopped, (waited, true), &status);
        let mut registers = *as_stopped;
        resume.apply(&mut registers);
        (resume != Resume::AsIs).then_some(registers)
    }

    fn resume(
        &self,
        thread: &Thread,
        registers: &Registers,
        (waited, stays): (Duration, bool),
        status: &Status,
    ) -> Resume {
        let handler = interrupted::handler_waits(status, thread.saved.mask);
        let memory = |at| memory(&thread.process, at);
        interrupted::resume(&Stopped {
            registers,
            before: &self.before,
            waited,
            memory: &memory,
            expects_interruption: thread.group_stop.is_some() || handler,
            stays,
        })
    }
}

/// Reads 16 bytes of a process's memory.
pub fn memory(process: &Process, at: u64) -> Option<[u8; 16]> {
    let mut bytes = [0; 16];
    let read = sys::vm::read_exact(process, Addr(at), &mut bytes);
    read.ok().map(|()| bytes)
}
