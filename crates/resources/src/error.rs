//! What can go wrong with a resource, and whose fault it is.

use std::io;
use std::path::PathBuf;

use image::Blame;
use rustix::io::Errno;

/// An error of this crate's functions.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The target uses something that is not saved; nothing was changed.
    #[error("pid {pid}: {what} is not supported{}{}", reason(.why), hint(.allow))]
    Unsupported {
        /// The task that uses it.
        pid: i32,
        /// What and where: "fd 5 (anon_inode:inotify)", "mapping 0x7f…-0x7f… (/dev/kvm)".
        what: String,
        /// Why, where that goes without saying otherwise: "it has unread events".
        why: String,
        /// The option that would allow it, if there is one.
        allow: Option<&'static str>,
    },
    /// The target is in a state that cannot be saved, and that passes.
    #[error("pid {pid}: {what}{}", hint(.allow))]
    Passing {
        /// The task.
        pid: i32,
        /// What and where: "fd 5 (socket:[1]): a connection waits to be accepted".
        what: String,
        /// The option that would allow it, if there is one.
        allow: Option<&'static str>,
        /// True if the dump has not looked at the tree's memory yet.
        early: bool,
        /// True if the state passes by what tasks of the tree do: it stays while all of them are
        /// stopped.
        by_tree: bool,
    },
    /// The task died while it was looked at.
    #[error("pid {pid}: the task is gone ({doing})")]
    Gone {
        /// The task.
        pid: i32,
        /// What was being done.
        doing: String,
    },
    /// A system call failed.
    #[error("{doing}")]
    Kernel {
        /// What was tried, on which object.
        doing: String,
        /// The errno.
        #[source]
        source: io::Error,
    },
    /// A record of the image does not make sense.
    #[error("image record {record}: {what}")]
    Corrupt {
        /// Which record: "eventfd 12", "task 100 signal actions".
        record: String,
        /// What is wrong with it.
        what: String,
    },
    /// A file is not the one that it was.
    #[error("{}: {what}", .path.display())]
    Changed {
        /// Its path.
        path: PathBuf,
        /// What differs: "size is 10 bytes, was 20".
        what: String,
        /// Whether it has grown and was only written to, as logs are: another end to write to may
        /// take its place.
        log: bool,
    },
    /// Something of which there is one is somebody's.
    #[error("{what}")]
    InUse {
        /// What: "the terminal /dev/pts/3 is in use".
        what: String,
    },
    /// Something that the image needs is not as it was on this host.
    #[error("{what}")]
    Mismatch {
        /// What is missing or differs: "/var/log/x: is missing".
        what: String,
    },
}

fn reason(why: &str) -> String {
    match why {
        "" => String::new(),
        why => format!(": {why}"),
    }
}

fn hint(allow: &Option<&'static str>) -> String {
    allow.map_or_else(String::new, |option| format!(" (use {option} to allow it)"))
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// A failed system call: what was tried, on which object.
    pub fn kernel(doing: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Kernel {
            doing: doing.into(),
            source: source.into(),
        }
    }

    /// Whether something is missing that somebody has: a terminal, an address.
    #[must_use]
    pub fn is_in_use(&self) -> bool {
        match self {
            Self::InUse { .. } => true,
            Self::Kernel { source, .. } => Errno::from_io_error(source) == Some(Errno::ADDRINUSE),
            _ => false,
        }
    }

    /// Tells whose fault it is.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            Self::Unsupported { .. } | Self::Passing { .. } => Blame::Unsupported,
            Self::Gone { .. }
            | Self::InUse { .. }
            | Self::Mismatch { .. }
            | Self::Changed { .. } => Blame::Gone,
            Self::Corrupt { .. } => Blame::Corrupt,
            // Contents of files are read from the image, too.
            Self::Kernel { source, .. } => Blame::of(source),
        }
    }

    /// A record that does not make sense.
    pub fn corrupt(record: impl Into<String>, what: impl Into<String>) -> Self {
        Self::Corrupt {
            record: record.into(),
            what: what.into(),
        }
    }

    /// Something that the target uses and that is not saved.
    pub fn unsupported(pid: i32, what: impl Into<String>) -> Self {
        Self::Unsupported {
            pid,
            what: what.into(),
            why: String::new(),
            allow: None,
        }
    }

    /// Adds the reason why something is not saved.
    #[must_use]
    pub fn because(mut self, reason: impl Into<String>) -> Self {
        if let Self::Unsupported { why, .. } = &mut self {
            *why = reason.into();
        }
        self
    }

    /// Adds the option that would have something saved.
    #[must_use]
    pub fn unless(mut self, option: &'static str) -> Self {
        if let Self::Unsupported { allow, .. } = &mut self {
            *allow = Some(option);
        }
        self
    }
}
