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

/// An error of an image.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names each field")]
pub enum Error {
    #[error("{file} is damaged at byte {offset_bytes}{}: {what}", in_space(*.space))]
    Corrupt {
        file: String,
        what: String,
        space: Option<SpaceId>,
        offset_bytes: u64,
    },
    #[error("the image needs {feature:?}, which is not supported")]
    Unsupported { feature: String },
    #[error("the image is of format {version}{}", of_version(*.version))]
    Version { version: u32 },
    #[error("image {id} in {path}, which this one has pages from, {what}")]
    Ancestor {
        id: ImageId,
        path: String,
        what: String,
        source: Option<Box<store::Error>>,
    },
    /// Pages of an image, or of those that it is over, were freed because a newer one has others in
    /// their place.
    #[error("image {id} is not whole: parts of it were freed by auto-dedup of image {by}")]
    Freed { id: ImageId, by: ImageId },
    #[error("image {id} is needed by image {child} in {path}, which has pages from it")]
    Needed {
        id: ImageId,
        child: ImageId,
        path: String,
    },
    #[error("there is no image in {store}")]
    NoImage { store: String },
    #[error("the image has no page {page} of space {space}")]
    NoPage { space: SpaceId, page: u64 },
    #[error("cannot write run at page {page} of space {space}: {what}")]
    BadRun {
        space: SpaceId,
        page: u64,
        what: String,
    },
    #[error("an image holds at most {limit} {of}")]
    TooLarge { of: &'static str, limit: u64 },
    #[error("image {id} was not written completely")]
    Incomplete { id: ImageId },
    #[error("cannot {action} the image")]
    Store {
        action: &'static str,
        source: store::Error,
    },
    #[error("cannot use the image directory")]
    Place(#[source] store::Error),
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
