//! The mappings of a stopped task.

use std::io;

use resources::map::listing::{self, Listed};

use crate::{Error, Result, Task};

impl Task {
    /// Its mappings, without their flags.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Kernel`].
    pub fn maps(&self) -> Result<Vec<Listed>> {
        parse(&self.read("maps")?)
    }

    /// Its mappings with their flags.
    ///
    /// The kernel walks all pages of a task for them: 20 ms a GiB.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Kernel`].
    pub fn smaps(&self) -> Result<Vec<Listed>> {
        parse(&self.read("smaps")?)
    }
}

/// The mappings of which /proc/PID/maps or smaps tells.
///
/// # Errors
/// [`Error::Kernel`] for a line that cannot be understood.
pub fn parse(text: &[u8]) -> Result<Vec<Listed>> {
    listing::parse(text).map_err(|line| {
        let invalid = io::Error::from(io::ErrorKind::InvalidData);
        Error::kernel(format!("cannot understand {line:?}"), invalid)
    })
}
