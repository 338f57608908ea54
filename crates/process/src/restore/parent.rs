//! A root that is told of the end of its parent, which a detached restore would be.
//!
//! - What: a root's parent-death signal
//! - Kept: whether the root is to be told, and by which signal, of the end of whoever restores it:
//!   of that of a detached restore, too, by a signal that does nothing where it is not handled.
//! - At a restore: "task … would get its parent-death signal … when this process ends: restore it
//!   without --restore-detached, or with --restore-sibling" (`PR_SET_PDEATHSIG`).
//! - CRIU 4.2: kept; a root that is restored with `-d` gets the signal at once.

use crate::records::Saved;
use crate::{Error, RestoreOptions, Result};

use super::running::parent_death;

/// Refuses what would have a signal sent that nobody has sent to the dumped tree.
pub(super) fn check(options: &RestoreOptions, saved: &Saved<'_>) -> Result<()> {
    if !options.detached || options.sibling {
        return Ok(());
    }
    // SIGCHLD, SIGCONT, SIGURG, SIGWINCH
    const HARMLESS: [u64; 4] = [17, 18, 23, 28];
    let living = saved.tasks[0].living().iter();
    let mut told = living.filter_map(|thread| Some((thread.tid, parent_death(thread)?)));
    let told = told.find(|(_, signal)| !HARMLESS.contains(signal));
    told.map_or(Ok(()), |(tid, signal)| {
        Err(Error::Unfit(format!(
            "task {tid} would get its parent-death signal {signal} when this process ends: \
             restore it without --restore-detached, or with --restore-sibling"
        )))
    })
}
