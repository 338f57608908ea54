//! What can go wrong between a source and a sink.
use std::io;

/// The result of everything here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why pages did not arrive.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// What a source or a sink says that this crate knows nothing of.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
    /// An object or a file could not be used.
    #[error("cannot {action} the shared memory object at offset {offset_bytes}")]
    Object {
        /// What was tried, as a verb.
        action: &'static str,
        /// Where.
        offset_bytes: u64,
        /// Why.
        source: io::Error,
    },
    /// The image could not be read or written.
    #[error("cannot {action} pages of the image")]
    Image {
        /// What was tried, as a verb.
        action: &'static str,
        /// Why.
        source: image::Error,
    },
}

impl Error {
    /// Says what was done with the image.
    pub fn image(action: &'static str) -> impl Fn(image::Error) -> Self {
        move |source| Self::Image { action, source }
    }
}
