//! What goes wrong with images, and where.

use crate::{ImageId, SpaceId};

/// The side on which a failure is; the command's exit status comes from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Blame {
    /// A target, a file or an image uses something that is not supported.
    Unsupported,
    /// The target died, or an object that the image needs is gone.
    Gone,
    /// A system call failed.
    Kernel,
    /// The image is damaged.
    Corrupt,
    /// The image, or a file, cannot be written or read.
    Store,
}

impl Blame {
    /// Tells the side of an error that an image's may have caused; the kernel's without one.
    #[must_use]
    pub fn of(error: &(dyn std::error::Error + 'static)) -> Self {
        let mut source: Option<&(dyn std::error::Error + 'static)> = Some(error);
        while let Some(error) = source {
            match error.downcast_ref::<Error>() {
                Some(error) => return error.blame(),
                None => source = error.source(),
            }
        }
        Self::Kernel
    }
}

/// What went wrong with an image.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The image's bytes are not those that were written, or were never a valid image.
    #[error("{file} is damaged at byte {offset_bytes}{}: {what}", in_space(*.space))]
    Corrupt {
        /// The object's name.
        file: String,
        /// What is wrong.
        what: String,
        /// The space concerned, where one is.
        space: Option<SpaceId>,
        /// Where in the object: the start of what is wrong.
        offset_bytes: u64,
    },
    /// The image uses something that this version does not know.
    #[error("the image needs {feature:?}, which is not supported")]
    Unsupported {
        /// The feature's name.
        feature: String,
    },
    /// The image is of a format that this version does not read.
    #[error("the image is of format {version}{}", of_version(*.version))]
    Version {
        /// The format's number.
        version: u32,
    },
    /// An image that holds pages of this one is not what it was.
    #[error("image {id} in {path}, which this one has pages from, {what}")]
    Ancestor {
        /// The ancestor.
        id: ImageId,
        /// Where it should be, relative to the image.
        path: String,
        /// What is wrong.
        what: String,
        /// Why, where the store failed.
        #[source]
        source: Option<Box<store::Error>>,
    },
    /// Pages of an image, or of those that it is over, were freed because a newer one has others in
    /// their place.
    #[error("image {id} is not whole: parts of it were freed by auto-dedup of image {by}")]
    Freed {
        /// The image.
        id: ImageId,
        /// The newer one.
        by: ImageId,
    },
    /// An image cannot be replaced, because another has pages from it.
    #[error("image {id} is needed by image {child} in {path}, which has pages from it")]
    Needed {
        /// The image.
        id: ImageId,
        /// The other one.
        child: ImageId,
        /// Where that is, relative to the image.
        path: String,
    },
    /// The store holds no image.
    #[error("there is no image in {store}")]
    NoImage {
        /// The store.
        store: String,
    },
    /// A page was asked for that the image does not describe.
    #[error("the image has no page {page} of space {space}")]
    NoPage {
        /// The space.
        space: SpaceId,
        /// The page's number in it.
        page: u64,
    },
    /// The runs that were given do not make an image.
    #[error("cannot write run at page {page} of space {space}: {what}")]
    BadRun {
        /// The run's space.
        space: SpaceId,
        /// The run's first page.
        page: u64,
        /// What is wrong with it.
        what: String,
    },
    /// The image would have more of something than the format allows.
    #[error("an image holds at most {limit} {of}")]
    TooLarge {
        /// What there is too much of.
        of: &'static str,
        /// The limit.
        limit: u64,
    },
    /// An earlier write of this image failed, so it cannot be finished.
    #[error("image {id} was not written completely")]
    Incomplete {
        /// The image that was being written.
        id: ImageId,
    },
    /// The store failed.
    #[error("cannot {action} the image")]
    Store {
        /// What was being done, as a verb.
        action: &'static str,
        /// Why not.
        #[source]
        source: store::Error,
    },
    /// The place of an image cannot be opened, or no way leads from it to that of its parent.
    #[error("cannot use the image directory")]
    Place(#[source] store::Error),
    /// The kernel gave no random bits for an image's identity.
    #[error("cannot draw an image id")]
    Random(#[source] std::io::Error),
}

/// The result of everything here.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// The side on which the failure is.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            Self::Corrupt { .. } | Self::NoPage { .. } => Blame::Corrupt,
            Self::Ancestor { .. } | Self::Freed { .. } => Blame::Gone,
            Self::Unsupported { .. } => Blame::Unsupported,
            _ => Blame::Store,
        }
    }

    pub(crate) fn store(action: &'static str) -> impl Fn(store::Error) -> Self {
        move |source| Self::Store { action, source }
    }
}

fn of_version(version: u32) -> String {
    let known = crate::FORMAT_VERSION;
    if version > known {
        return format!(", and the newest that is known here is {known}");
    }
    format!(
        ", which Stillframe wrote before its first release; \
         only format {known} is read: dump the processes again"
    )
}

fn in_space(space: Option<SpaceId>) -> String {
    space
        .map(|space| format!(" (space {space})"))
        .unwrap_or_default()
}
