//! Threads on their way back from a dump that was cut short.

use abi::Span;
use resources::map::listing::{Backing, Listed};

use crate::freeze::Task;
use crate::{Error, Result};

/// Checks that no thread runs what a dump left that was cut short.
///
/// # Errors
/// [`Error::Returning`].
pub(crate) fn check_returned(task: &Task, listed: &[Listed]) -> Result<()> {
    let ours = listed.iter().filter(|map| {
        let blob = map.backing() == Backing::Anonymous && map.prot & 4 != 0;
        blob || map.backing() == Backing::Vdso
    });
    let ours = ours.map(|map| map.span).collect::<Vec<_>>();
    for thread in task.threads() {
        let at = thread.saved.registers.at();
        let suspect = ours.iter().find(|span| span.contains(at));
        let is_injected = |span: &Span| tracee::is_injected(task.pid, *span, at);
        if suspect.map(is_injected).transpose()? == Some(true) {
            return Err(Error::Returning { pid: task.pid });
        }
    }
    Ok(())
}
