//! What a dump and a restore are asked to do: the engine's part of the command line, as data.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use freeze::DEFAULT_TIMEOUT;
use rustix::process::Pid;
use store::Images;

use crate::{CpuCap, DumpKind, LazyPages};
pub use image::Compression;
pub use resources::{Allow, DEFAULT_GHOST_LIMIT_BYTES};

/// What becomes of the tree once it is saved or brought back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Afterwards {
    /// Dump only: the tree is killed, the image is all that is left of it.
    Kill,
    /// The tree runs.
    Run,
    /// The tree is left stopped (`SIGSTOP`).
    Stop,
}

/// What [`dump`](crate::dump) is asked to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DumpOptions {
    /// The root of the tree.
    pub tree: Pid,
    /// Where the image goes.
    pub images: Images,
    /// What is saved of the tree, and whether it runs meanwhile.
    pub kind: DumpKind,
    /// What becomes of the tree.
    pub afterwards: Afterwards,
    /// What the target may hold.
    pub allowed: Allow,
    /// How long collecting the tasks may take; `None` is for ever.
    pub timeout: Option<Duration>,
    /// Whether the image is on the disk before the target is killed (`--no-sync` says no), and at
    /// the end of a pre-dump: a dump over it, which kills the tree, needs its pages.
    pub sync: bool,
    /// Where the image is that this one is to be a layer over: the last round's of a pre-dump, or
    /// an earlier dump's.
    pub parent: Option<Images>,
    /// Whether what this image replaces in older ones is freed there afterwards.
    pub auto_dedup: bool,
    /// How pages are compressed, where that pays (`--compress`).
    pub compress: Option<Compression>,
    /// Whether the image is to tell, besides where registers are, which instructions the processor
    /// has (`--cpu-cap`).
    pub cpu_cap: CpuCap,
    /// Whether writes of a tree that runs on are tracked from now on, for this long when no other
    /// dump comes. After a pre-dump they always are.
    pub track: Option<Duration>,
    /// True if the tree is killed although the dumper may lack a right that the restore needs
    /// (`--unprivileged`).
    pub unprivileged: bool,
    /// The namespaces of the tree that this process is in, and which are not its caller's
    /// ([`namespaces::join`](crate::namespaces::join)).
    pub namespaces: OwnNamespaces,
}

impl DumpOptions {
    /// Returns the options of `dump -t tree -D images`: nothing special is allowed and the tree
    /// is killed.
    pub fn new(tree: Pid, images: impl Into<Images>) -> Self {
        Self {
            tree,
            images: images.into(),
            kind: DumpKind::Dump,
            afterwards: Afterwards::Kill,
            allowed: Allow::default(),
            timeout: Some(DEFAULT_TIMEOUT),
            sync: true,
            parent: None,
            auto_dedup: false,
            compress: None,
            cpu_cap: CpuCap::default(),
            track: None,
            unprivileged: false,
            namespaces: OwnNamespaces::default(),
        }
    }
}

/// The namespaces that a tree has of its own, and that this process has entered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OwnNamespaces {
    /// True for a pid namespace, and the mount namespace that shows its /proc.
    pub pids: bool,
    /// The kinds of the others, as flags of unshare(2).
    pub flags: i32,
}

/// What an inherited descriptor stands in for.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub enum Inherited {
    /// The pipe with this inode.
    Pipe(u64),
    /// The socket with this inode.
    Socket(u64),
    /// The terminal with this device number (`st_rdev`) on this filesystem (`st_dev`).
    Tty {
        /// `st_rdev` of the terminal.
        rdev: u64,
        /// `st_dev` of the filesystem that it is on.
        dev: u64,
    },
    /// The file with this inode on this mount.
    File {
        /// The mount's id, as in `/proc/PID/fdinfo/N`.
        mount: u64,
        /// The inode's number.
        inode: u64,
    },
    /// The file of this name, without a leading slash.
    Path(PathBuf),
}

impl Inherited {
    /// Its name as in criu(8)'s `--inherit-fd fd[N]:NAME`.
    #[must_use]
    pub fn name(&self) -> Vec<u8> {
        match self {
            Self::Pipe(inode) => format!("pipe:[{inode}]").into_bytes(),
            Self::Socket(inode) => format!("socket:[{inode}]").into_bytes(),
            Self::Tty { rdev, dev } => format!("tty[{rdev:x}:{dev:x}]").into_bytes(),
            Self::File { mount, inode } => format!("file[{mount:x}:{inode:x}]").into_bytes(),
            Self::Path(path) => path.as_os_str().as_encoded_bytes().to_vec(),
        }
    }
}

/// A descriptor of the restorer that a restored task gets in place of a saved one.
#[derive(Debug)]
pub struct InheritFd {
    /// The descriptor.
    pub fd: Arc<OwnedFd>,
    /// What it stands in for.
    pub stands_for: Inherited,
}

/// What [`restore`](crate::restore) and [`plan`](crate::plan) are asked to do.
#[derive(Debug)]
pub struct RestoreOptions {
    /// Where the image is.
    pub images: Images,
    /// What becomes of the tree: [`Afterwards::Run`] or [`Afterwards::Stop`].
    pub afterwards: Afterwards,
    /// What was allowed at the dump.
    pub allowed: Allow,
    /// Whether the caller ends once the tree runs, so that nobody waits for the root task.
    pub detached: bool,
    /// Whether the root task becomes a child of the caller's parent instead of the caller.
    pub sibling: bool,
    /// Whether a tree in the caller's session gets the terminal, if the caller has it.
    pub foreground: bool,
    /// Descriptors that take the place of saved ones.
    pub inherit_fds: Vec<InheritFd>,
    /// Whether monotonic clocks go on from where they stood, by a time namespace (`--no-timens`
    /// says no).
    pub timens: bool,
    /// What this processor must have besides what threads have in use (`--cpu-cap`).
    pub cpu_cap: CpuCap,
    /// Whether private memory comes when it is touched, and how (`--lazy-pages`).
    pub lazy: Option<LazyPages>,
    /// True if a tree without a pid namespace of its own gets one (`--new-pid-ns`); one that had
    /// one always does.
    pub new_pid_ns: bool,
}

impl RestoreOptions {
    /// Returns the options of `restore -D images`: the tree runs as the caller's child.
    pub fn new(images: impl Into<Images>) -> Self {
        Self {
            images: images.into(),
            afterwards: Afterwards::Run,
            allowed: Allow::default(),
            detached: false,
            sibling: false,
            foreground: false,
            inherit_fds: Vec::new(),
            timens: true,
            cpu_cap: CpuCap::default(),
            lazy: None,
            new_pid_ns: false,
        }
    }
}

/// What [`merge`](crate::merge) is asked to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MergeOptions {
    /// Where the newest image is.
    pub images: Images,
    /// Where an older one is, which stays with those that it is over; none means that no other
    /// image is needed any more.
    pub until: Option<Images>,
    /// Where the new image goes; none means to where the newest is.
    pub output: Option<Images>,
    /// How pages are compressed, where that pays (`--compress`); none stores them as they are,
    /// however they were.
    pub compress: Option<Compression>,
    /// Whether the new image is on the disk before the old one goes.
    pub sync: bool,
}

/// What [`dedup`](crate::dedup()) is asked to do.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DedupOptions {
    /// Where the newest image is.
    pub images: Images,
    /// Whether everything is on the disk before anything is freed.
    pub sync: bool,
}
