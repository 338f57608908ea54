//! The companion of a tree or a machine in its image, of the same instant: a volume that the
//! subject uses.

use std::error::Error;

use crate::{Blame, Writer};

/// A part of an image beside its subject.
pub trait Companion {
    /// Reads ahead, before the subject is stopped; of every image that is begun anew.
    ///
    /// # Errors
    /// There is no image then.
    fn begin(&mut self, image: &Writer) -> Result<(), CompanionError>;

    /// Reads what it is now, with the subject stopped. Where an image tries several instants, the
    /// last one counts.
    ///
    /// # Errors
    /// There is no image then.
    fn instant(&mut self, image: &Writer) -> Result<(), CompanionError>;

    /// Puts what it was at the instant into the image, before that has a name.
    ///
    /// # Errors
    /// There is no image then.
    fn put(&mut self, image: &Writer) -> Result<(), CompanionError>;
}

/// Why a companion could not be saved. What it was to be saved with is the caller's to say.
#[derive(Debug)]
pub struct CompanionError {
    /// The side that caused the error.
    pub blame: Blame,
    /// The error of the attempt.
    pub source: Box<dyn Error + Send + Sync>,
}
