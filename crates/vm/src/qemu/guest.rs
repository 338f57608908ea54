//! A guest that is stopped for a save, and goes on whatever happens.

use std::fs::File;
use std::path::Path;
use std::time::{Duration, Instant};

use image::ImageId;
use serde_json::{Value, json};
use store::Images;

use super::qmp::Qmp;
use super::watchdog::{GuestState, Watchdog, go_on, set};
use crate::{Error, Result};

/// A guest that is about to be stopped, or is; dropped, it goes on.
pub(crate) struct Guest<'a> {
    /// Its monitor.
    pub qmp: &'a mut Qmp,
    before: &'a GuestState,
    watchdog: Watchdog,
    since: Instant,
    /// True if a migration was begun, and is not known to have ended well.
    pub migrates: bool,
    is_over: bool,
}

impl<'a> Guest<'a> {
    /// Posts the watchdog that has the guest go on if this process dies, from a process that has
    /// one thread.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn guard(qmp: &'a mut Qmp, before: &'a GuestState, images: &Images) -> Result<Self> {
        let watchdog = Watchdog::post(qmp, before, images)?;
        watchdog.stopping()?;
        Ok(Self {
            qmp,
            before,
            watchdog,
            since: Instant::now(),
            migrates: false,
            is_over: false,
        })
    }

    /// Stops the guest: when this returns, no request to a disk is under way.
    ///
    /// # Errors
    /// Those of [`Qmp::call`].
    pub fn stop(&mut self) -> Result<()> {
        self.since = Instant::now();
        self.qmp.call::<Value>("stop", json!({})).map(drop)
    }

    /// Has the guest go on; gives how long it stood still.
    ///
    /// # Errors
    /// Those of [`Qmp::call`].
    pub fn go_on(mut self) -> Result<Duration> {
        self.is_over = true;
        let stopped = self.let_go();
        if stopped.is_ok() {
            self.watchdog.dismiss();
        }
        // Otherwise the watchdog tries as well, when it sees that this process is gone.
        stopped
    }

    fn let_go(&mut self) -> Result<Duration> {
        if !self.migrates {
            match self.let_go_at_once() {
                // There is another way to it, if it lives.
                Err(Error::Gone(_)) => {}
                other => return other,
            }
        }
        go_on(self.qmp, self.before)?;
        Ok(self.since.elapsed())
    }

    /// The same where no migration may be under way.
    fn let_go_at_once(&mut self) -> Result<Duration> {
        if self.before.ran {
            self.qmp.insist("cont", &json!({}))?;
        }
        let stopped = self.since.elapsed();
        set(self.qmp, &self.before.capabilities)?;
        Ok(stopped)
    }

    /// Says that QEMU may be told to write to a file, which has no name yet.
    ///
    /// # Errors
    /// Those of [`Watchdog::making`].
    pub fn making(&self, file: &File, path: &Path) -> Result<()> {
        self.watchdog.making(file, path)
    }

    /// Has the image sealed, and QEMU ended: from the seal on the machine is in the image. Gives
    /// how long the guest stood still before.
    ///
    /// # Errors
    /// That of `seal`; the guest goes on then.
    pub fn end(mut self, id: ImageId, seal: impl FnOnce() -> Result<ImageId>) -> Result<Duration> {
        let stopped = self.since.elapsed();
        self.watchdog.sealing(id)?;
        seal()?;
        self.is_over = true;
        match self.qmp.call::<Value>("quit", json!({})) {
            Ok(_) | Err(Error::Gone(_)) => {}
            Err(error) => log::warn!("QEMU does not end: {error}"),
        }
        self.watchdog.dismiss();
        Ok(stopped)
    }
}

impl Drop for Guest<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            match self.let_go() {
                Ok(_) => self.watchdog.dismiss(),
                Err(error) => log::error!("the guest does not go on: {error}"),
            }
        }
    }
}
