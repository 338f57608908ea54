//! Dumps of trees in other namespaces: a copy of this process works in there.

use process::namespaces::{self, Inner, Outcome, Side};
use process::{DumpOptions, Observer, Stage, Veto};
use rustix::process::Pid;

use crate::bar::Bar;
use crate::exit::{Failure, Status};
use crate::logfile;

/// The process that does the work.
pub enum Worker {
    /// This one, as usual.
    Here,
    /// This one, a copy in the tree's namespaces.
    Inside(Inside),
    /// The copy, which has ended with this status and has said what there is to say.
    Other(Status),
}

/// The observer of a copy in the tree's namespaces: what concerns numbers is done outside.
pub struct Inside {
    inner: Inner,
    bar: Bar,
}

/// Has a copy of this process do the work that `wanted` asks for and `doing` names, where the tree
/// has other namespaces; `observer` hears of it.
///
/// # Errors
/// Those of [`namespaces::join`].
pub fn join(
    wanted: &mut DumpOptions,
    doing: &'static str,
    observer: &mut dyn Observer,
) -> Result<Worker, Failure> {
    logfile::flush();
    let mut outer = match namespaces::join(wanted).map_err(Failure::engine(doing))? {
        None => return Ok(Worker::Here),
        Some(Side::Outer(outer)) => outer,
        Some(Side::Inner(inner)) => {
            wanted.tree = inner.root().expect("it has joined the root's namespace");
            wanted.namespaces = inner.own();
            let bar = Bar::default();
            return Ok(Worker::Inside(Inside { inner, bar }));
        }
    };
    let status = match outer.attend(observer).map_err(Failure::engine(doing))? {
        Outcome::Ended(status) => status,
        Outcome::Runs(_) => outer.wait().map_err(Failure::engine(doing))?,
    };
    match outer.judge(status) {
        Ok(()) => Ok(Worker::Other(Status::Done)),
        Err(process::Error::Inside { code }) => {
            let status = Status::of_number(code);
            Ok(Worker::Other(status.unwrap_or(Status::Failed)))
        }
        Err(error) => Err(Failure::engine(doing)(error)),
    }
}

impl Observer for Inside {
    fn stage(&mut self, stage: Stage, root: Option<Pid>) -> Result<(), Veto> {
        self.inner.stage(stage, root)
    }

    fn progress(&mut self, done_bytes: u64, total_bytes: u64) {
        self.bar.show(done_bytes, total_bytes);
    }
}
