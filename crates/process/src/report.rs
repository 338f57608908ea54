//! What the engine tells its caller: stages while it works, and reports afterwards.

use std::path::PathBuf;
use std::time::Instant;

use image::Companion;
use rustix::process::Pid;

use crate::Statistics;
pub use crate::error::Veto;
use crate::statistics::as_micros;
pub use crate::text::{date, printable};

/// A moment of a dump or a restore at which the caller may act.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Stage {
    /// Dump: nothing was touched yet.
    PreDump,
    /// Dump: the tree is frozen and its network is about to be locked.
    NetworkLock,
    /// Dump: the tree is frozen, and the image will be of this moment. A live dump that tries
    /// several instants comes here at each; the last one counts.
    PostFreeze,
    /// Dump: the image is whole and the tree is still frozen, or, of a live dump, runs.
    PostDump,
    /// Restore: nothing was made yet.
    PreRestore,
    /// Restore: the root task stands in its new namespaces, which are still empty.
    SetupNamespaces,
    /// Restore: the namespaces are filled.
    PostSetupNamespaces,
    /// Restore: every task is whole, none runs.
    PostRestore,
    /// The network is about to be unlocked.
    NetworkUnlock,
    /// Restore: the last moment before the tasks run.
    PreResume,
    /// Restore: the tasks run.
    PostResume,
}

/// Who is told how a dump or a restore goes.
pub trait Observer: Send {
    /// Tells that a stage is reached, with the root task's pid where it exists. An error stops the
    /// work, which is then undone; after [`Stage::PostResume`] there is nothing left to undo.
    fn stage(&mut self, stage: Stage, root: Option<Pid>) -> Result<(), Veto>;

    /// Tells how many bytes of memory were moved so far, and of how many.
    fn progress(&mut self, done_bytes: u64, total_bytes: u64);

    /// Tells that a copy of this process is about to be made that goes on with the work: what is
    /// still to be written would be written twice.
    fn fork(&mut self) {}

    /// What a dump is to save with the tree; not a round of a pre-dump.
    fn companion(&mut self) -> Option<&mut dyn Companion> {
        None
    }
}

/// An observer that does nothing.
#[derive(Debug, Default)]
pub struct Unobserved;

impl Observer for Unobserved {
    fn stage(&mut self, _stage: Stage, _root: Option<Pid>) -> Result<(), Veto> {
        Ok(())
    }

    fn progress(&mut self, _done_bytes: u64, _total_bytes: u64) {}
}

/// What a merge did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MergeReport {
    /// The new image's id.
    pub image: String,
    /// How many other images the old one had pages from.
    pub ancestors_before: u64,
    /// How many the new one has.
    pub ancestors: u64,
    /// Pages stored in the new image.
    pub stored_pages: u64,
    /// Pages that it still has from older images.
    pub parent_pages: u64,
}

/// What was freed in older images.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DedupReport {
    /// How much room was given back.
    pub freed_bytes: u64,
    /// In how many images.
    pub images: u64,
}

/// What a dump, or one round of a pre-dump, did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DumpReport {
    /// The image's id.
    pub image: String,
    /// Size of the image's files.
    pub image_bytes: u64,
    /// How long the tree could not run at one time: a live dump stops it at least twice.
    pub longest_frozen_us: u64,
    /// How long a thread of the tree waited at most before it could write to a page, from the time
    /// that the dump heard of it: only in live dumps.
    pub longest_wait_us: u64,
    /// How many instants a live dump tried; other dumps have one.
    pub instants: u64,
    /// How many bytes were freed in older images.
    pub freed_bytes: u64,
    /// Hard links that were made for the image and stay as long as it does.
    pub links: Vec<PathBuf>,
    /// How long the dump took.
    pub total_us: u64,
    /// What it did.
    pub statistics: Statistics,
}

impl DumpReport {
    /// Adds a stop that began then and ends now.
    pub(crate) fn stopped_since(&mut self, since: Instant) {
        let stopped_us = as_micros(since.elapsed());
        self.statistics.frozen_us += stopped_us;
        self.longest_frozen_us = self.longest_frozen_us.max(stopped_us);
    }
}

/// What a dump that saves nothing found out: that there is nothing in the way.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DryRunReport {
    /// Tasks of the tree.
    pub tasks: u64,
    /// Their threads.
    pub threads: u64,
    /// How long the tree could not run.
    pub frozen_us: u64,
    /// How long it took to plan the restore, while the tree ran again.
    pub plan_us: u64,
    /// How long all of it took.
    pub total_us: u64,
}

/// What an image holds, for people.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Description {
    /// The image's id.
    pub image: String,
    /// The id of the image that this one is a difference from.
    pub parent: Option<String>,
    /// Hard links that the dump made and that the image needs.
    pub links: Vec<PathBuf>,
    /// The version of the image format.
    pub format: u32,
    /// The features of the format that the image uses.
    pub features: Vec<String>,
    /// What is known of its creation.
    pub creation: Creation,
    /// The vDSOs that the tasks have mapped: one, or none.
    pub vdsos: Vec<Vdso>,
    /// The sets of instructions of the processor that it was made on, where the image says.
    pub instructions: Option<Vec<String>>,
    /// The pages of all spaces by their fate.
    pub pages: PageCounts,
    /// The blocks of a virtual machine's memory; none of a tree's image.
    pub blocks: Vec<BlockDescription>,
    /// The volumes that are in it, and the files of a machine's disks.
    pub volumes: Vec<BlockDescription>,
    /// The files of the image.
    pub files: Vec<FileSize>,
    /// What holds its connections back, where it has any.
    pub network: Option<Network>,
    /// The tasks, parents before children; none in a pre-dump's.
    pub tasks: Vec<TaskDescription>,
    /// What the dump did, where the image says.
    pub statistics: Option<Statistics>,
    /// The image and those that it is over, the newest first: what is left of the chain.
    pub layers: Vec<Layer>,
}

/// A block of a virtual machine's memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockDescription {
    /// What it is called.
    pub name: String,
    /// How large it is.
    pub bytes: u64,
}

/// What holds the connections of an image back until it is restored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Network {
    /// The name of its table of nf_tables.
    pub table: String,
    /// Whether it stands on this host, in this network namespace; `None` where that is not known.
    pub stands: Option<bool>,
}

/// An image of a chain.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Layer {
    /// Its id.
    pub image: String,
    /// Where it is, relative to the newest.
    pub path: PathBuf,
    /// Why nothing more is known of it and of older ones.
    pub missing: Option<String>,
    /// The image that has replaced pages of it, which were freed: it cannot be restored.
    pub freed_by: Option<String>,
    /// The pages that it describes, by their fate.
    pub pages: PageCounts,
    /// How many pages of the newest image it holds.
    pub held_pages: u64,
    /// The size of its files.
    pub bytes: u64,
    /// What its dump did, where it says.
    pub statistics: Option<Statistics>,
}

/// What an image says about its creation.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Creation {
    /// When, in nanoseconds since 1970.
    pub created_ns: u64,
    /// The version of Stillframe that wrote it.
    pub stillframe: String,
    /// The release of the kernel that the tasks ran on.
    pub kernel: String,
    /// The machine: `x86_64`.
    pub arch: String,
}

/// A vDSO: the kernel's code in a task's memory.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Vdso {
    /// Its build id, in hexadecimal.
    pub build_id: String,
    /// Whether this host's kernel has the same one.
    pub is_ours: bool,
    /// Whether a restore on this host puts a proxy in its place, code that jumps to this host's.
    pub needs_proxy: bool,
}

/// Pages by their fate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PageCounts {
    /// Stored in this image.
    pub stored: u64,
    /// Zero, not stored.
    pub zero: u64,
    /// Unchanged since the parent image.
    pub parent: u64,
    /// Those that a task has in common with its parent (copy-on-write), stored or not once for
    /// both.
    pub shared: u64,
    /// Those with the contents of other pages of this image.
    pub equal: u64,
}

/// A file of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileSize {
    /// Its name in the image's directory.
    pub name: String,
    /// Its size.
    pub bytes: u64,
}

/// A saved task.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TaskDescription {
    /// Its pid.
    pub pid: i32,
    /// The pid of its parent; 0 for the root.
    pub parent_pid: i32,
    /// Its process group.
    pub group: i32,
    /// Its session.
    pub session: i32,
    /// Its name, as in `/proc/PID/comm`.
    pub name: String,
    /// `running`, `stopped` or `zombie`.
    pub state: String,
    /// How a zombie ended: `exit status 3`, `signal 9`.
    pub ended: Option<String>,
    /// The ids of its threads, its own first.
    pub threads: Vec<i32>,
    /// The program that it runs; none for a zombie.
    pub exe: Option<PathBuf>,
    /// Its working directory; none for a zombie.
    pub cwd: Option<PathBuf>,
    /// Its root directory, where that is not everybody's.
    pub root: Option<PathBuf>,
    /// What else is known of it and its threads, by thread.
    pub parts: Vec<PartDescription>,
    /// Its mappings, by address.
    pub mappings: Vec<MappingDescription>,
    /// Its descriptors, by number.
    pub descriptors: Vec<DescriptorDescription>,
}

/// A saved mapping.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MappingDescription {
    /// Its first address.
    pub start: u64,
    /// The address after its last.
    pub end: u64,
    /// Its protection and sharing as in `/proc/PID/maps`: `rw-p`.
    pub protection: String,
    /// What is mapped: a path, `[stack]`, `anonymous`, …
    pub what: String,
    /// Its pages by their fate; those of shared memory belong to the object that is mapped.
    pub pages: PageCounts,
}

/// A saved part of the state of a task or thread.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PartDescription {
    /// The thread; what belongs to the process stands with its first.
    pub tid: i32,
    /// The part: `limits`, `signal actions`, …
    pub name: String,
    /// What it is, for people.
    pub what: String,
}

/// A saved descriptor.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DescriptorDescription {
    /// Its number.
    pub fd: i32,
    /// The number of the open file description in the image: descriptors that share one (dup,
    /// fork) have the same.
    pub description: u32,
    /// The kind of resource: `file`, `pipe`, `tcp`, …
    pub kind: String,
    /// What it is, for people: a path, an address, an inode.
    pub what: String,
    /// The signals that its description sends and the locks that it holds, for people.
    pub holds: Option<String>,
    /// Whether it is closed on exec.
    pub close_on_exec: bool,
}
