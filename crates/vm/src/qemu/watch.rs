//! Who watches a save, and what is saved with the machine, of the same instant.

use image::{Companion, CompanionError, Writer};

use super::save::Progress;
use crate::{Error, Result};

/// Observers of a save: of its progress, and of its image.
pub struct Watch<'a> {
    /// Told the bytes done and to be done.
    pub progress: Progress<'a>,
    /// The companion that is saved with the machine, as its volume; not by a round.
    pub companion: Option<&'a mut dyn Companion>,
}

impl Watch<'_> {
    /// Has the companion read ahead, while the guest runs. Tells whether there is one: that may
    /// have taken long.
    pub(crate) fn begin(&mut self, writer: &Writer) -> Result<bool> {
        self.call(|companion| companion.begin(writer))?;
        Ok(self.companion.is_some())
    }

    /// Has the companion read what it is now: the guest is stopped, and QEMU writes to no disk
    /// and is asked nothing until this returns, so that nobody waits for what the companion holds.
    pub(crate) fn instant(&mut self, writer: &Writer) -> Result<()> {
        self.call(|companion| companion.instant(writer))
    }

    /// Has the companion put what it was at the instant into the image.
    pub(crate) fn put(&mut self, writer: &Writer) -> Result<()> {
        self.call(|companion| companion.put(writer))
    }

    fn call(
        &mut self,
        work: impl FnOnce(&mut dyn Companion) -> std::result::Result<(), CompanionError>,
    ) -> Result<()> {
        let Some(companion) = &mut self.companion else {
            return Ok(());
        };
        let done = work(&mut **companion);
        done.map_err(|CompanionError { blame, source }| Error::Companion { blame, source })
    }
}
