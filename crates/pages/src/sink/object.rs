//! A shared memory object or a file, written at offsets.
use std::os::fd::{AsFd, OwnedFd};

use abi::Addr;
use rustix::io::Errno;

use crate::{Error, Result, Sink};

/// A memfd, a shared memory segment or a file that is open for writing.
///
/// An address is an offset here. The object must be large enough already, or grow by writing.
#[derive(Debug)]
pub struct Object(OwnedFd);

impl Object {
    /// The object behind `fd`.
    #[must_use]
    pub const fn new(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl Sink for Object {
    fn fill(&self, pieces: &[(Addr, &[u8])]) -> Result<()> {
        for (at, bytes) in pieces {
            let (mut offset_bytes, mut rest) = (at.0, *bytes);
            while !rest.is_empty() {
                let failed = |errno: Errno| Error::Object {
                    action: "write to",
                    offset_bytes,
                    source: errno.into(),
                };
                let written = match rustix::io::pwrite(self.0.as_fd(), rest, offset_bytes) {
                    Err(Errno::INTR) => 0,
                    Ok(0) => return Err(failed(Errno::IO)),
                    other => other.map_err(failed)?,
                };
                offset_bytes += written as u64;
                rest = &rest[written..];
            }
        }
        Ok(())
    }
}
