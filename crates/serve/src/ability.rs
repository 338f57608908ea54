//! What a userfaultfd that somebody else made can do.
use std::fmt;

use abi::Span;
use rustix::io::Errno;
use sys::uffd::{Features, Modes, Uffd};

use crate::{Error, Result};

/// How far the kernel tells what is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Ability {
    /// Not at all: missing pages are brought in, and that is all.
    Missing,
    /// The first write to each page is told, and waits for us (`UFFD_FEATURE_PAGEFAULT_FLAG_WP`).
    Told,
    /// Written pages are found by looking, and nobody waits (`UFFD_FEATURE_WP_ASYNC`).
    Found,
}

impl Ability {
    /// Returns the ability of a descriptor whose owner asked for `features`.
    #[must_use]
    pub const fn of(features: Features) -> Self {
        if features.contains(Features::WP_ASYNC) {
            Self::Found
        } else if features.contains(Features::WP) {
            Self::Told
        } else {
            Self::Missing
        }
    }

    /// Has `missing` pages of `spans` told, and writes where that is possible; gives what is.
    pub(crate) fn register(
        self,
        uffd: &Uffd,
        spans: &[Span],
        missing: Modes,
        pid: i32,
    ) -> Result<Self> {
        let all = |modes| {
            spans
                .iter()
                .try_for_each(|span| register(uffd, *span, modes, pid))
        };
        if self > Self::Missing {
            match all(missing | Modes::WP) {
                Ok(()) => return Ok(self),
                // No write protection for memory of this kind.
                Err(Error::Call { source, .. })
                    if Errno::from_io_error(&source) == Some(Errno::INVAL) => {}
                Err(error) => return Err(error),
            }
        }
        all(missing)?;
        Ok(Self::Missing)
    }
}

pub(crate) fn register(uffd: &Uffd, span: Span, modes: Modes, pid: i32) -> Result<()> {
    let registered = uffd.register(span, modes);
    registered.map_err(|source| Error::call("register", span, pid, source))
}

impl fmt::Display for Ability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Missing => "missing",
            Self::Told => "wp-sync",
            Self::Found => "wp-async",
        })
    }
}
