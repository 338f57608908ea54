//! A process that has a stopped guest go on if we are killed.
//!
//! Whoever is killed between the stop of a guest and its end, or its going on, leaves a guest that
//! stands still. So a child process with the same connection to QEMU waits meanwhile: where the
//! pipe to it breaks, it does what we were going to do. Once an image is about to be sealed that
//! ends the guest, that depends on whether the image is there: then the guest is in it, and ends.

use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::time::{Duration, Instant};

use image::{ImageId, Reader};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, WaitOptions, setsid, waitpid};
use serde_json::{Value, json};
use store::Images;
use sys::fork::fork_for_numbers;

use super::qmp::{PATIENCE, Qmp};
use crate::{Error, Result};

/// How often a migration that is being given up is looked at.
const LOOK: Duration = Duration::from_millis(5);

/// What the watchdog is told, with the id of the image after [`SEALING`].
const STOPPING: u8 = 1;
const SEALING: u8 = 2;
const DISMISSED: u8 = 3;

/// What a guest is to become again when it goes on.
#[derive(Clone, Debug)]
pub(crate) struct Before {
    /// Whether it ran.
    pub ran: bool,
    /// The capabilities of migration that were changed, as they were.
    pub capabilities: Vec<(String, bool)>,
}

/// The waiting process.
#[derive(Debug)]
pub(crate) struct Watchdog {
    child: Pid,
    pipe: Option<OwnedFd>,
}

impl Watchdog {
    /// Posts it, from a process that has one thread.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn post(qmp: &Qmp, before: &Before, images: &Images) -> Result<Self> {
        let failed = |source: io::Error| Error::Kernel {
            doing: "cannot post a watchdog",
            source,
        };
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
        let mut own = qmp.duplicate().map_err(failed)?;
        log::logger().flush();
        let kept = [reader.as_raw_fd(), own.as_fd().as_raw_fd()];
        let child = fork_for_numbers(&kept, || {
            // Nothing that ends our group may end this process.
            let _ = setsid();
            match end_of(&reader) {
                End::Dismissed => {}
                End::Stopped => let_go(&mut own, before),
                End::Sealing(id) if is_sealed(images, id) => {
                    let _ = own.insist("quit", &json!({}));
                }
                End::Sealing(_) => let_go(&mut own, before),
            }
        });
        Ok(Self {
            child: child.map_err(failed)?,
            pipe: Some(writer),
        })
    }

    /// Says that the guest is about to be stopped.
    ///
    /// # Errors
    /// [`Error::Kernel`] where it is gone.
    pub fn stopping(&self) -> Result<()> {
        self.say(&[STOPPING]).map_err(|errno| Error::Kernel {
            doing: "cannot tell the watchdog",
            source: errno.into(),
        })
    }

    /// Says that the guest ends if the image is there.
    ///
    /// # Errors
    /// [`Error::Kernel`] where it is gone.
    pub fn sealing(&self, id: ImageId) -> Result<()> {
        let said = self.say(&[&[SEALING][..], &id.0].concat());
        said.map_err(|errno| Error::Kernel {
            doing: "cannot tell the watchdog",
            source: errno.into(),
        })
    }

    /// Sends it away: the guest runs, or has ended.
    pub fn dismiss(&self) {
        // Where it was killed, nothing can be told.
        let _ = self.say(&[DISMISSED]);
    }

    fn say(&self, bytes: &[u8]) -> rustix::io::Result<()> {
        let pipe = self.pipe.as_ref().expect("only drop takes it");
        // So few bytes are written at once.
        rustix::io::retry_on_intr(|| rustix::io::write(pipe, bytes)).map(drop)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.pipe.take());
        let _ = rustix::io::retry_on_intr(|| waitpid(Some(self.child), WaitOptions::empty()));
    }
}

/// How the process ended that a watchdog watches.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// It did nothing that would have to be taken back.
    Dismissed,
    /// The guest may stand still.
    Stopped,
    /// The guest stands still, and ends if this image is there.
    Sealing(ImageId),
}

fn end_of(pipe: &OwnedFd) -> End {
    let mut end = End::Dismissed;
    loop {
        match next(pipe) {
            Some(STOPPING) => end = End::Stopped,
            Some(SEALING) => {
                let mut id = [0; 16];
                if !id
                    .iter_mut()
                    .all(|byte| next(pipe).map(|got| *byte = got).is_some())
                {
                    return end;
                }
                end = End::Sealing(ImageId(id));
            }
            Some(_) => return End::Dismissed,
            None => return end,
        }
    }
}

fn next(pipe: &OwnedFd) -> Option<u8> {
    let mut byte = [0];
    loop {
        match rustix::io::read(pipe, &mut byte) {
            Err(Errno::INTR) => {}
            Ok(1) => return Some(byte[0]),
            _ => return None,
        }
    }
}

fn is_sealed(images: &Images, id: ImageId) -> bool {
    let reader = images
        .open()
        .ok()
        .and_then(|store| Reader::open(&*store).ok());
    reader.is_some_and(|reader| reader.id() == id)
}

fn let_go(qmp: &mut Qmp, before: &Before) {
    if let Err(error) = go_on(qmp, before) {
        log::error!("the guest could not be told to go on: {error}");
    }
    log::logger().flush();
}

/// Has the guest be as it was before: gives a migration up, and lets the guest go on.
///
/// # Errors
/// Those of [`Qmp::call`].
pub(crate) fn go_on(qmp: &mut Qmp, before: &Before) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    // Nobody reads the state any more, so QEMU ends a migration by itself, if it is not yet
    // cancelled by this.
    let mut cancelled = qmp.insist("migrate_cancel", &json!({}));
    loop {
        let told = match cancelled {
            Err(error @ Error::Gone(_)) => return Err(error),
            _ => qmp.insist("query-migrate", &json!({}))?,
        };
        let state = told.get("status").and_then(Value::as_str);
        let is_over = matches!(
            state,
            None | Some("none" | "completed" | "failed" | "cancelled")
        );
        if is_over || Instant::now() >= deadline {
            break;
        }
        std::thread::sleep(LOOK);
        cancelled = Ok(Value::Null);
    }
    if before.ran {
        qmp.insist("cont", &json!({}))?;
    }
    set(qmp, &before.capabilities)
}

/// Sets capabilities of migration.
///
/// # Errors
/// Those of [`Qmp::call`].
pub(crate) fn set(qmp: &mut Qmp, capabilities: &[(String, bool)]) -> Result<()> {
    let all = capabilities.iter();
    let all = all.map(|(name, on)| json!({"capability": name, "state": on}));
    let all = json!({"capabilities": all.collect::<Vec<_>>()});
    qmp.insist("migrate-set-capabilities", &all).map(drop)
}
