//! A stopped thread: its registers, and how it goes on with the call that it was in.

use abi::Addr;
use resources::task::Facts;
use resources::task::interrupted::{self, Resume};
use tracee::Thread;

use super::facts::ThreadFacts;
use crate::freeze::Wait;
use crate::records::ThreadState;
use crate::{Error, Result};

/// What the processor knows of a thread, as it is to be restored. Where the kernel would make the
/// program see that its call was interrupted, the living thread is made to call again.
pub(super) fn state(
    thread: &mut Thread,
    facts: &ThreadFacts<'_>,
    wait: &Wait,
) -> Result<ThreadState> {
    let (tid, saved) = (thread.tid, thread.saved);
    let xstate = sys::ptrace::xstate(tid);
    let xstate = xstate.map_err(|e| Error::kernel(format!("cannot read xstate of {tid}"), e))?;
    let memory = |at: u64| {
        let mut bytes = [0; 16];
        let read = sys::vm::read_exact(thread.pid, Addr(at), &mut bytes);
        read.ok().map(|()| bytes)
    };
    let handler = interrupted::handler_waits(&*facts.status()?, saved.mask);
    let mut stopped = interrupted::Stopped {
        registers: &saved.registers,
        before: &wait.before,
        waited: wait.waited,
        memory: &memory,
        expects_interruption: thread.group_stop.is_some() || handler,
        stays: false,
    };
    let restored = interrupted::resume(&stopped);
    stopped.stays = true;
    let living = interrupted::resume(&stopped);
    let mut registers = saved.registers;
    restored.apply(&mut registers);
    let remake = match restored {
        Resume::Remake(remake) => Some(remake),
        Resume::AsIs | Resume::Again { .. } => None,
    };
    let mut on = saved.registers;
    living.apply(&mut on);
    thread.redirect(on);
    let registers = registers.to_words().to_vec();
    Ok(ThreadState {
        registers,
        xstate,
        mask: saved.mask,
        remake,
    })
}
