//! The kind of an image: commands are given the directory of another kind of image.

use image::{Reader, SpaceKind};
use store::Images;

use super::{has_tree, is_of_machine, is_of_processor};
use crate::{Error, Result, Statistics};

/// The kind of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ImageKind {
    /// A process tree, which can be restored.
    Tree,
    /// The memory of a process tree that went on: a pre-dump.
    PreDump,
    /// The features of a processor.
    Processor,
    /// A virtual machine's memory, and perhaps its state.
    Machine,
    /// A volume alone.
    Volume,
}

impl ImageKind {
    /// Finds out what the image in `images` is of.
    ///
    /// # Errors
    /// A missing or damaged image; none for one of an unknown kind, which is taken for a tree's.
    pub fn find(images: &Images) -> Result<Self> {
        let store = images.open().map_err(image::Error::Place)?;
        Self::of(&Reader::open(&*store)?)
    }

    /// The same of an image that is open.
    ///
    /// # Errors
    /// Damaged statistics.
    pub(crate) fn of(reader: &Reader) -> Result<Self> {
        let mut spaces = reader.spaces().iter();
        let has_volume = spaces.any(|space| space.kind == SpaceKind::Volume);
        Ok(match Statistics::is_of_predump(reader)? {
            true => Self::PreDump,
            false if is_of_machine(reader) => Self::Machine,
            false if is_of_processor(reader) => Self::Processor,
            false if has_volume && !has_tree(reader) => Self::Volume,
            false => Self::Tree,
        })
    }

    /// The words for the kind in a message: they follow "the image is of".
    #[must_use]
    pub const fn words(self) -> &'static str {
        match self {
            Self::Tree => "a process tree",
            Self::PreDump => "a pre-dump: it has memory, but no tasks to bring back",
            Self::Processor => "a processor alone (`cpuinfo dump`): no tasks are in it",
            Self::Machine => "a virtual machine's memory: there are no tasks in it",
            Self::Volume => "a volume: there are no tasks in it",
        }
    }

    /// Insists that it is of a tree.
    ///
    /// # Errors
    /// [`Error::Unfit`].
    pub(crate) fn check_tree(reader: &Reader) -> Result<()> {
        match Self::of(reader)? {
            Self::Tree => Ok(()),
            other => Err(other.refusal()),
        }
    }

    /// Insists that an image of a tree can be over it.
    ///
    /// # Errors
    /// [`Error::Unfit`].
    pub(crate) fn check_parent(reader: &Reader) -> Result<()> {
        match Self::of(reader)? {
            Self::Tree | Self::PreDump => Ok(()),
            other => Err(other.refusal()),
        }
    }

    fn refusal(self) -> Error {
        Error::Unfit(format!("the image is of {}", self.words()))
    }
}
