//! What else is in the image of a tree, and of the same instant: a volume that it uses.

use image::Writer;

use crate::error::CompanionError;

/// The number of the record that tells of a companion, and is read by its own crate.
pub(crate) const TAGS: [u16; 1] = [500];

/// What is put into an image beside the tree.
pub trait Companion {
    /// Reads ahead, before the tree is stopped; of every image that is begun anew.
    ///
    /// # Errors
    /// There is no image then.
    fn begin(&mut self, image: &Writer) -> Result<(), CompanionError>;

    /// Reads what it is now, with the tree stopped. Where an image tries several instants, the last
    /// one counts.
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
