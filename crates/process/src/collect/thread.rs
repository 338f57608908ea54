//! A stopped thread: its registers, and how it goes on with the call that it was in.

use freeze::Wait;
use resources::arch::xstate;
use resources::task::Facts;
use resources::task::interrupted::Resume;
use tracee::Thread;

use super::facts::ThreadFacts;
use crate::records::ThreadState;
use crate::{Error, Result};

/// What the processor knows of a thread, as it is to be restored.
pub(super) fn state(thread: &Thread, facts: &ThreadFacts<'_>, wait: &Wait) -> Result<ThreadState> {
    let tid = thread.tid;
    let extended = sys::ptrace::xstate(tid);
    let extended =
        extended.map_err(|e| Error::kernel(format!("cannot read xstate of {tid}"), e))?;
    xstate::check(thread.process.pid(), tid, &extended)?;
    let restored = wait.restored(thread, &*facts.status()?);
    let mut registers = wait.registers(thread);
    restored.apply(&mut registers);
    let remake = match restored {
        Resume::Remake(remake) => Some(remake),
        Resume::AsIs | Resume::Again { .. } => None,
    };
    Ok(ThreadState {
        registers: registers.to_words().to_vec(),
        xstate: extended,
        mask: thread.saved.mask,
        remake,
        dispatch: thread.saved.dispatch.map(Into::into),
    })
}
