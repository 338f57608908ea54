//! What can go wrong between a source and a sink.
use std::io;

/// The result of everything here.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Why pages did not arrive.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names each field")]
pub enum Error {
    /// An error of a source or a sink that this crate does not know.
    #[error(transparent)]
    Other(Box<dyn std::error::Error + Send + Sync>),
    #[error("cannot {action} the shared memory object at offset {offset_bytes}")]
    Object {
        action: &'static str,
        offset_bytes: u64,
        source: io::Error,
    },
    #[error("cannot {action} pages of the image")]
    Image {
        action: &'static str,
        source: image::Error,
    },
}

impl Error {
    /// Says what was done with the image.
    pub fn image(action: &'static str) -> impl Fn(image::Error) -> Self {
        move |source| Self::Image { action, source }
    }
}
