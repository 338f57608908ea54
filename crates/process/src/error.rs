//! Why a process tree could not be saved, shown or brought back.
//!
//! - What: trees that change meanwhile
//! - Kept: what is mapped, unmapped, forked and ended during a live dump or between rounds.
//! - Refused: "pid …: it runs another program (execve) before its memory is copied" (for all of
//!   `--timeout`).
//! - CRIU 4.2: has no live dumps.
//! - What: trees that are tracked already
//! - Kept: a dump over the chain of images that tracks them (`--prev-images-dir`).
//! - Refused: by a live dump, "pid …: stillframe-trk, pid …, tracks its memory since a pre-dump or
//!   a dump with --track-mem of pid …".
//! - CRIU 4.2: has no live dumps.
//! - What: rights of who dumps
//! - Kept: an image that its maker can restore.
//! - Refused: "a dump that kills needs what its restore needs: …" (`--unprivileged`, where somebody
//!   else restores; `--leave-running`, `--leave-stopped`).
//! - CRIU 4.2: dumps, kills, and cannot restore.

use std::{fmt, io};

use freeze::returned::WorkError;
use image::Blame;

use crate::text::printable;

/// An error of this crate's functions.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A resource of the target or of the image.
    #[error(transparent)]
    Resource(#[from] resources::Error),
    /// A stopped thread did not do as it should.
    #[error(transparent)]
    Tracee(#[from] tracee::Error),
    /// The image.
    #[error(transparent)]
    Image(#[from] image::Error),
    /// The memory of tasks, and moving pages.
    #[error(transparent)]
    Memory(#[from] memory::Error),
    /// What was to be saved with the tree.
    #[error("the volume cannot be saved with the tree")]
    Companion {
        /// Whose fault it is.
        blame: Blame,
        /// What has failed.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A system call of this process failed.
    #[error("{doing}")]
    Kernel {
        /// What was tried, on which object.
        doing: String,
        /// The errno.
        #[source]
        source: io::Error,
    },
    /// There is no such process, or it ended.
    #[error("pid {pid}: there is no such process, or it has ended")]
    Gone {
        /// The process.
        pid: i32,
    },
    /// Something of a killed dump is in a process.
    #[error(transparent)]
    Remains(freeze::Error),
    /// A task ran another program while its memory was copied.
    #[error("pid {pid}: it runs another program (execve) before its memory is copied")]
    Left {
        /// The process.
        pid: i32,
    },
    /// A task's memory is tracked for another chain of images.
    #[error(
        "pid {pid}: stillframe-trk, pid {tracker}, tracks its memory since a pre-dump or a dump \
         with --track-mem of pid {root}{}",
        .image.as_ref().map(|image| format!(" (image {image})")).unwrap_or_default()
    )]
    Tracked {
        /// The process.
        pid: i32,
        /// Who tracks it.
        tracker: i32,
        /// The root of the tree that was dumped.
        root: i32,
        /// The last image of the chain, where writes are known since.
        image: Option<String>,
    },
    /// Some memory could not be copied as it was at an instant, at none of several.
    #[error(
        "pid {pid}: memory of its tree cannot be copied as it was at any of {instants} instants"
    )]
    Torn {
        /// The root task.
        pid: i32,
        /// How many instants there were.
        instants: u64,
    },
    /// A restored task could not make one of its calls.
    #[error("pid {pid}: {call}")]
    Call {
        /// The task.
        pid: i32,
        /// The call, as `restore --plan` prints it.
        call: String,
        /// The errno.
        #[source]
        source: io::Error,
    },
    /// A pid that the tree had is in use.
    #[error("pid {pid} is taken by {by}")]
    Taken {
        /// The pid.
        pid: i32,
        /// Who has it.
        by: Holder,
    },
    /// A restored task ended before it was whole.
    #[error("pid {pid}: the restored task ended early ({how})")]
    Died {
        /// The task.
        pid: i32,
        /// How it ended.
        how: String,
    },
    /// The image was made on a system that this one cannot stand in for.
    #[error("{0}")]
    Unfit(String),
    /// The tree uses what is not saved; nothing was changed.
    #[error("{}", told(.0))]
    Obstacles(Vec<Obstacle>),
    /// A restore of the image that was made cannot be planned.
    #[error("the image could not be restored, so there is none and the tree goes on")]
    Unrestorable {
        /// Why.
        #[source]
        source: Box<Error>,
    },
    /// Pages of a tree that runs already cannot be brought in, so it was killed.
    #[error("pages of the restored tree cannot be brought in: {text}")]
    Pages {
        /// Why.
        text: String,
        /// Whether the image is damaged.
        damaged: bool,
    },
    /// Memory cannot be served.
    #[error(transparent)]
    Serve(#[from] serve::Error),
    /// Another dump or restore has this process.
    #[error("another dump or restore is under way in this process")]
    Busy,
    /// This process has other threads.
    #[error(
        "this process has other threads: a restore, and a dump after which the tree does not run, \
         fork children that run on as copies of it"
    )]
    Threads,
    /// The dumper lacks a right that a restore needs.
    #[error("a dump that kills needs what its restore needs: {0}")]
    Forbidden(String),
    /// A copy of this process in a pid namespace has done the work, and has told of its failure.
    #[error("the work in the tree's pid namespace has failed, as was told")]
    Inside {
        /// The exit status of the copy.
        code: i32,
    },
    /// The caller's observer stopped the work.
    #[error("stopped at the caller's wish")]
    Vetoed(#[source] Veto),
}

/// Something that a tree uses and that is not saved.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Obstacle {
    /// The task that uses it.
    pub pid: i32,
    /// The task's name; empty when it could not be read any more.
    pub name: String,
    /// What and where: "fd 5 (anon_inode:inotify)", "mapping 0x7f…-0x7f… (/dev/kvm)".
    pub what: String,
    /// Why it is not saved, where that does not go without saying.
    pub why: String,
    /// The option that would allow it, if there is one.
    pub allow: Option<&'static str>,
}

impl fmt::Display for Obstacle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pid {}", self.pid)?;
        if !self.name.is_empty() {
            write!(f, " ({})", printable(&self.name))?;
        }
        write!(f, ": {} is not supported", self.what)?;
        if !self.why.is_empty() {
            write!(f, ": {}", self.why)?;
        }
        match self.allow {
            Some(option) => write!(f, " (use {option} to allow it)"),
            None => Ok(()),
        }
    }
}

/// Why an [`Observer`](crate::Observer) wants the work to stop and to be undone.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Veto(pub String);

/// Who has a number that a task of a tree is to get.
#[derive(Debug, thiserror::Error)]
pub enum Holder {
    /// Nobody that can be seen in /proc.
    #[error("another process")]
    Unseen,
    /// A process.
    #[error("another process ({name})")]
    Process {
        /// Its name.
        name: String,
    },
    /// A process that has ended and that its parent has not waited for.
    #[error("a process that has ended ({name})")]
    Zombie {
        /// Its parent.
        parent: i32,
        /// Its name.
        name: String,
    },
    /// A thread.
    #[error("a thread of process {pid} ({name})")]
    Thread {
        /// Its process.
        pid: i32,
        /// Its name.
        name: String,
    },
    /// A session or process group whose leader is gone.
    #[error("the {of} of process {pid} ({name})")]
    Member {
        /// A process that is in it.
        pid: i32,
        /// Its name.
        name: String,
        /// What it is in: "session", "process group".
        of: &'static str,
    },
}

/// What a text of the kernel is that cannot be understood.
pub(crate) fn invalid() -> io::Error {
    io::ErrorKind::InvalidData.into()
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// What it has in common with this crate comes out as this crate's.
impl From<freeze::Error> for Error {
    fn from(error: freeze::Error) -> Self {
        match error {
            freeze::Error::Resource(error) => Self::Resource(error),
            freeze::Error::Tracee(error) => Self::Tracee(error),
            freeze::Error::Kernel { doing, source } => Self::Kernel { doing, source },
            freeze::Error::Gone { pid } => Self::Gone { pid },
            error @ (freeze::Error::LeftArea { .. } | freeze::Error::Returning { .. }) => {
                Self::Remains(error)
            }
        }
    }
}

impl WorkError for Error {
    fn stop(&self) -> Option<&freeze::Error> {
        match self {
            Self::Remains(error) => Some(error),
            _ => None,
        }
    }
}

impl From<pages::Error> for Error {
    fn from(error: pages::Error) -> Self {
        Self::Memory(error.into())
    }
}

impl Error {
    /// The whole of it, in one line.
    pub(crate) fn with_causes(&self) -> String {
        sys::causes::line(self)
    }

    /// A failed system call of this process.
    pub(crate) fn kernel(doing: impl Into<String>, source: impl Into<io::Error>) -> Self {
        Self::Kernel {
            doing: doing.into(),
            source: source.into(),
        }
    }

    /// Tells whose fault it is.
    #[must_use]
    pub fn blame(&self) -> Blame {
        match self {
            Self::Resource(error) => error.blame(),
            Self::Obstacles(_)
            | Self::Unfit(_)
            | Self::Left { .. }
            | Self::Torn { .. }
            | Self::Tracked { .. } => Blame::Unsupported,
            Self::Image(error) => error.blame(),
            Self::Tracee(tracee::Error::Gone { .. }) | Self::Gone { .. } | Self::Taken { .. } => {
                Blame::Gone
            }
            // Whatever the planner says, the target has something that cannot be brought back.
            Self::Unrestorable { .. } => Blame::Unsupported,
            Self::Pages { damaged: true, .. } => Blame::Corrupt,
            Self::Pages { .. } => Blame::Store,
            Self::Memory(error) => Blame::of(error),
            Self::Companion { blame, .. } => *blame,
            Self::Serve(serve::Error::Gone { .. }) => Blame::Gone,
            Self::Serve(serve::Error::Image(error)) => Blame::of(error),
            Self::Serve(error) => Blame::of(error),
            _ => Blame::Kernel,
        }
    }

    /// Everything that keeps a tree from being saved, as far as this error is about that.
    #[must_use]
    pub fn obstacles(&self) -> &[Obstacle] {
        match self {
            Self::Obstacles(obstacles) => obstacles,
            _ => &[],
        }
    }

    /// Tells what to do about it, where something can be done.
    #[must_use]
    pub fn advice(&self) -> Option<String> {
        match self {
            Self::Resource(
                resources::Error::Unsupported {
                    allow: Some(option),
                    ..
                }
                | resources::Error::Passing {
                    allow: Some(option),
                    ..
                },
            ) => Some(format!("run the command again with {option}")),
            Self::Obstacles(obstacles) => allowing(obstacles),
            Self::Torn { .. } => Some("dump it without --live".to_owned()),
            Self::Image(image::Error::Needed { path, .. }) => Some(format!(
                "use another directory, or first have `stillframe merge` make the image in {path}, \
                 relative to this one, whole"
            )),
            Self::Image(image::Error::Freed { by, .. }) => {
                Some(format!("use image {by}, or a newer one that is over it"))
            }
            Self::Image(image::Error::Ancestor { path, .. }) => Some(format!(
                "put it back to {path}, relative to the image that needs it"
            )),
            Self::Resource(resources::Error::Changed {
                path, log: true, ..
            }) => {
                let path = path.display().to_string();
                let name = path.trim_start_matches('/');
                let passing = format!("--inherit-fd 'fd[9]:{name}' 9>>{path}");
                Some(format!("if it is a log, pass on its end: {passing}"))
            }
            Self::Resource(resources::Error::Changed { path, .. }) => {
                Some(format!("put {} back as it was at the dump", path.display()))
            }
            Self::Unrestorable { source } => source.advice(),
            Self::Forbidden(_) => Some(
                "dump it with --unprivileged where somebody else restores it, or keep it with \
                 --leave-running or --leave-stopped"
                    .to_owned(),
            ),
            Self::Threads => Some("call this from a child process of its own".to_owned()),
            Self::Left { .. } => Some("try again, or dump it without --live".to_owned()),
            Self::Tracked { tracker, .. } => Some(format!(
                "dump it over that image with --prev-images-dir, or end the tracking (kill \
                 {tracker}): then the next round of that chain reads everything"
            )),
            Self::Taken { pid, by } => Some(match by {
                Holder::Zombie { parent, .. } => format!(
                    "process {pid} has ended, but its parent, pid {parent}, has not waited for it"
                ),
                Holder::Thread { pid: holder, .. } | Holder::Member { pid: holder, .. } => {
                    format!("end process {holder}, or restore in a new pid namespace")
                }
                _ => format!("end process {pid}, or restore in a new pid namespace"),
            }),
            Self::Tracee(tracee::Error::Kernel { source, .. })
                if source.kind() == io::ErrorKind::PermissionDenied =>
            {
                Some("is it traced by a debugger, or another user's?".to_owned())
            }
            _ => None,
        }
    }
}

/// One obstacle, or how many there are.
fn told(obstacles: &[Obstacle]) -> String {
    match obstacles {
        [one] => one.to_string(),
        several => format!("{} things are not supported", several.len()),
    }
}

/// The options that would help.
fn allowing(obstacles: &[Obstacle]) -> Option<String> {
    let mut options = obstacles
        .iter()
        .filter_map(|obstacle| obstacle.allow)
        .collect::<Vec<_>>();
    options.sort_unstable();
    options.dedup();
    let all = obstacles.iter().all(|obstacle| obstacle.allow.is_some());
    match (options.is_empty(), all) {
        (true, _) => None,
        (false, true) => Some(format!("run the command again with {}", options.join(" "))),
        (false, false) => Some(format!("{} would allow some of it", options.join(" "))),
    }
}
