//! Somebody besides action scripts who hears of the stages of a dump or a restore.

use std::fmt::Debug;

use process::{Stage, Statistics, Veto};
use rustix::process::Pid;

/// Listener for whom a dump or a restore is made.
pub trait StageListener: Debug + Send + Sync {
    /// Hears that a stage is reached, after the action scripts.
    ///
    /// # Errors
    /// The work is to stop.
    fn stage(&self, stage: Stage, root: Option<Pid>) -> Result<(), Veto>;

    /// Hears what a dump has done, maybe in a copy of the process that calls [`Self::stage`].
    fn note_dump(&self, statistics: &Statistics);

    /// Leaves a copy of the process that lives on with the tree.
    fn leave(&self);
}
