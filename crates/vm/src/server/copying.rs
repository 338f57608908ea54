//! Live differences: the machine runs on while one is copied.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::Relaxed;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::{Builder, JoinHandle};

use serde_json::{Value, json};
use serve::{CopyProgress, Difference};

use super::live::LiveSession;
use super::{SharedState, lock};
use crate::{Error, Result};

/// The last live difference of a session.
#[derive(Debug, Default)]
pub(crate) struct LiveCopy {
    last: Mutex<Option<Copy>>,
    /// Held while a difference that is not live is written.
    other: Mutex<()>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

#[derive(Debug)]
struct Copy {
    directory: PathBuf,
    copied: Arc<CopyProgress>,
    state: State,
}

/// How far it is.
#[derive(Debug)]
enum State {
    /// It is on its way.
    Copying,
    /// It is an image.
    Done(Difference),
    /// It is none, and why.
    Failed(String),
}

impl LiveCopy {
    /// Tells whether one is on its way.
    pub fn is_going_on(&self) -> bool {
        let last = lock(&self.last);
        last.as_ref().is_some_and(Copy::is_going_on)
    }

    /// Waits for a difference that is not live and keeps others away.
    ///
    /// # Errors
    /// [`Error::Unfit`] where a live one is on its way.
    pub fn keep_out(&self) -> Result<MutexGuard<'_, ()>> {
        let other = lock(&self.other);
        match &*lock(&self.last) {
            Some(copy) if copy.is_going_on() => Err(copy.refusal()),
            _ => Ok(other),
        }
    }

    /// Begins one.
    ///
    /// # Errors
    /// [`Error::Unfit`] where another live one is on its way.
    fn enter(&self, directory: &Path) -> Result<Arc<CopyProgress>> {
        let copied = Arc::<CopyProgress>::default();
        {
            let mut last = lock(&self.last);
            if let Some(copy) = last.as_ref().filter(|copy| copy.is_going_on()) {
                return Err(copy.refusal());
            }
            *last = Some(Copy {
                directory: directory.to_owned(),
                copied: copied.clone(),
                state: State::Copying,
            });
        }
        // From here on others are refused.
        drop(lock(&self.other));
        Ok(copied)
    }

    fn set_state(&self, state: State) {
        if let Some(copy) = &mut *lock(&self.last) {
            copy.state = state;
        }
    }

    /// Waits for the one that is on its way.
    pub fn wait(&self) {
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            let _ = thread.join();
        }
    }

    /// Describes the last one, where there was one.
    pub fn describe(&self) -> Option<Value> {
        lock(&self.last).as_ref().map(Copy::describe)
    }
}

impl Copy {
    const fn is_going_on(&self) -> bool {
        matches!(self.state, State::Copying)
    }

    fn refusal(&self) -> Error {
        let directory = self.directory.display();
        Error::Unfit(format!(
            "the live difference for {directory} is not copied yet"
        ))
    }

    fn describe(&self) -> Value {
        let mut told = json!({
            "wanted_bytes": self.copied.wanted_bytes.load(Relaxed),
            "copied_bytes": self.copied.copied_bytes.load(Relaxed),
            "saved_bytes": self.copied.saved_bytes.load(Relaxed),
        });
        match &self.state {
            State::Copying => told["state"] = json!("copying"),
            State::Done(difference) => {
                told["state"] = json!("done");
                told["directory"] = json!(self.directory);
                told["difference"] = describe(difference);
            }
            State::Failed(error) => {
                told["state"] = json!("failed");
                told["error"] = json!(error);
            }
        }
        told
    }
}

/// A difference in JSON.
pub(crate) fn describe(difference: &Difference) -> Value {
    json!({
        "written_pages": difference.written_pages,
        "stored_pages": difference.stored_pages,
        "zero_pages": difference.zero_pages,
        "parent_pages": difference.parent_pages,
    })
}

/// Begins to write what a machine has changed up to this instant as an image in `dir`: it may run
/// on when this returns.
pub(crate) fn begin(
    live: &Arc<LiveSession>,
    shared: &Arc<SharedState>,
    dir: &Path,
    vmstate: Option<&Path>,
) -> Result<()> {
    let dir = std::path::absolute(dir).map_err(Error::file("find", dir))?;
    let state = vmstate.map(crate::import::read_state).transpose()?;
    let copying = &live.copying;
    let copied = copying.enter(&dir)?;
    let (sender, may_run) = channel();
    let (live_of, shared) = (live.clone(), shared.clone());
    let work = move || {
        let mut told_of = Some(sender);
        let written =
            live_of.diff_live(&shared, &dir, state, &copied, || tell(&mut told_of, Ok(())));
        finish(&live_of, written, told_of);
    };
    let name = format!("copy-{}", live.number);
    match Builder::new().name(name).spawn(work) {
        Ok(thread) => *lock(&copying.thread) = Some(thread),
        Err(source) => {
            let doing = "cannot start a thread";
            let error = Error::Kernel { doing, source };
            copying.set_state(State::Failed(sys::causes::line(&error)));
            return Err(error);
        }
    }
    let panicked = || Error::Unfit("the difference ended without a word".to_owned());
    may_run.recv().unwrap_or_else(|_| Err(panicked()))
}

/// The thread that waits for the instant.
type Waiter = Option<Sender<Result<()>>>;

fn tell(waiter: &mut Waiter, outcome: Result<()>) {
    if let Some(waiter) = waiter.take() {
        let _ = waiter.send(outcome);
    }
}

/// Notes what became of a difference.
fn finish(live: &LiveSession, written: Result<Difference>, mut waiter: Waiter) {
    match written {
        Ok(difference) => {
            let stored = difference.stored_pages;
            log::info!(
                "session {}: a live difference stores {stored} pages",
                live.number
            );
            live.copying.set_state(State::Done(difference));
        }
        Err(error) => {
            let what = sys::causes::line(&error);
            log::warn!("session {}: no live difference: {what}", live.number);
            live.copying.set_state(State::Failed(what));
            tell(&mut waiter, Err(error));
        }
    }
    // A session that is drained waits for this.
    live.ring();
}
