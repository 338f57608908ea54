//! System V objects and POSIX message queues: ipc_namespaces(7).
//!
//! - What: ipc namespaces
//! - Kept: one of the whole tree, with its limits (/proc/sys/kernel/shmmax and the like,
//!   /proc/sys/fs/mqueue), its System V semaphores and message queues with their contents, System V
//!   shared memory that tasks have attached, and POSIX message queues that tasks have open; not who
//!   used a semaphore or a queue last, and when.
//! - Refused: "System V shared memory …, which nobody has attached"; "message queue /…, which
//!   nobody has open"; "System V message queue …, with a message longer than kernel.msgmax is now";
//!   "System V semaphores of which the kernel does not tell what is undone".
//! - CRIU 4.2: kept, with all objects.

mod object;
mod queues;
mod semaphores;

use std::sync::OnceLock;

use rustix::fs::{AtFlags, Mode, OFlags, openat, statat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

use self::object::ObjectKind;
use self::queues::MessageQueue;
use self::semaphores::SemaphoreSet;
use super::kind::{Construction, FIRST_TAG, Kind, Tree, record_name};
use super::settings::{Setting, Settings};
use crate::task::semaphores::is_untold;
use crate::{Error, Result};

/// Its settings. Limits that were lowered later do not hold for an object that was there.
static SETTINGS: Settings = Settings {
    roots: &[
        "fs/mqueue",
        "kernel/msgmax",
        "kernel/msgmnb",
        "kernel/msgmni",
        "kernel/sem",
        "kernel/shm_rmid_forced",
        "kernel/shmall",
        "kernel/shmmax",
        "kernel/shmmni",
    ],
    flag: Ipc::FLAG,
    limits: &[
        ("fs/mqueue/msg_max", "65536"),
        ("fs/mqueue/msgsize_max", "16777216"),
        ("fs/mqueue/queues_max", "2147483647"),
        ("kernel/msgmax", "2147483647"),
        ("kernel/msgmnb", "2147483647"),
        ("kernel/msgmni", "32768"),
        ("kernel/sem", "2147483647\t2147483647\t500\t32768"),
        ("kernel/shmall", "18446744073692774399"),
        ("kernel/shmmax", "18446744073692774399"),
        ("kernel/shmmni", "32768"),
    ],
    usual: OnceLock::new(),
};

/// See the file.
pub struct Ipc;

/// The contents of a namespace.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    #[prost(message, repeated, tag = "1")]
    settings: Vec<Setting>,
    #[prost(message, repeated, tag = "2")]
    sets: Vec<SemaphoreSet>,
    #[prost(message, repeated, tag = "3")]
    queues: Vec<MessageQueue>,
}

impl Kind for Ipc {
    type Record = Record;
    const TAG: u16 = FIRST_TAG + 1;
    const NAME: &'static str = "ipc";
    const FLAG: libc::c_int = libc::CLONE_NEWIPC;

    fn prepare() -> Result<()> {
        SETTINGS.prepare().map(drop)
    }

    fn dump(tree: &Tree<'_>, refused: &mut Vec<Error>) -> Result<Record> {
        let segments = ObjectKind::Segment.list()?.into_iter();
        for row in segments.filter(|row| row.attached == 0) {
            let id = row.object.id;
            let what = format!("System V shared memory {id}, which nobody has attached,");
            refused.push(tree.unsupported(what));
        }
        for queue in named_queues()?.iter().filter(|queue| !queue.is_open(tree)) {
            let what = format!("message queue /{}, which nobody has open,", queue.name);
            refused.push(tree.unsupported(what));
        }
        let sets = semaphores::read()?;
        if !sets.is_empty() && tree.tasks.iter().any(|task| is_untold(task.pid)) {
            let what = "System V semaphores of which the kernel does not tell what is undone";
            refused.push(tree.unsupported(what));
        }
        Ok(Record {
            settings: SETTINGS.read()?,
            sets,
            queues: queues::read(tree, refused)?,
        })
    }

    fn check(record: &Record) -> Result<()> {
        let corrupt = |what| Err(Error::corrupt(record_name(Self::NAME), what));
        if !SETTINGS.are_sound(&record.settings) {
            return corrupt("has no such limit");
        }
        let sets = record.sets.iter().all(SemaphoreSet::is_sound);
        match sets && record.queues.iter().all(MessageQueue::is_sound) {
            true => Ok(()),
            false => corrupt("has no such objects"),
        }
    }

    fn restore(record: &Record, construction: &Construction<'_>) -> Result<()> {
        SETTINGS.restore(&record.settings)?;
        let mut sets = record.sets.iter();
        sets.try_for_each(|set| set.restore(construction.parts))?;
        record.queues.iter().try_for_each(MessageQueue::restore)
    }

    fn finish(record: &Record) -> Result<()> {
        SETTINGS.limit(&record.settings)
    }

    fn describe(record: &Record) -> String {
        let (limits, sets, queues) = (&record.settings, &record.sets, &record.queues);
        let (limits, sets, queues) = (limits.len(), sets.len(), queues.len());
        format!("{limits} limits, {sets} sets of semaphores, {queues} message queues")
    }
}

/// A POSIX message queue that has a name.
struct NamedQueue {
    name: String,
    device: u64,
    inode: u64,
}

impl NamedQueue {
    /// Tells whether a task of the tree has it open.
    fn is_open(&self, tree: &Tree<'_>) -> bool {
        let is_it = |path: String| {
            let stat = rustix::fs::stat(path);
            stat.is_ok_and(|stat| (stat.st_dev, stat.st_ino) == (self.device, self.inode))
        };
        tree.tasks.iter().any(|task| {
            let ours = task.links.iter();
            let mut ours = ours.filter(|link| link.target.ends_with(self.name.as_bytes()));
            let path = |fd| sys::procfs::path(format_args!("{}/fd/{fd}", task.pid));
            ours.any(|link| is_it(path(link.fd)))
        })
    }
}

/// The message queues that have names.
fn named_queues() -> Result<Vec<NamedQueue>> {
    let failed = |errno| Error::kernel("cannot list the message queues", errno);
    let mounted = fsopen("mqueue", FsOpenFlags::FSOPEN_CLOEXEC).and_then(|files| {
        fsconfig_create(&files)?;
        let none = MountAttrFlags::empty();
        fsmount(&files, FsMountFlags::FSMOUNT_CLOEXEC, none)
    });
    let mounted = mounted.map_err(failed)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = openat(&mounted, ".", flags, Mode::empty()).map_err(failed)?;
    let mut queues = Vec::new();
    for entry in rustix::fs::Dir::read_from(&folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let stat = statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW).map_err(failed)?;
        queues.push(NamedQueue {
            name: name.to_string_lossy().into_owned(),
            device: stat.st_dev,
            inode: stat.st_ino,
        });
    }
    Ok(queues)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_a_namespace_are_read_and_sound() {
        testkit::needs_root!();
        let tree = Tree {
            root: 1,
            tasks: &[],
            options: &crate::NamespaceOptions::default(),
        };
        let record = Ipc::dump(&tree, &mut Vec::new()).expect("it is read");
        let has = |path: &str| record.settings.iter().any(|one| one.path == path);
        assert!(has("kernel/shmmax") && has("kernel/sem") && has("fs/mqueue/msg_max"));
        Ipc::check(&record).expect("it is sound");
        let setting = Setting {
            path: "kernel/core_pattern".to_owned(),
            value: "|/x".to_owned(),
            is_default: false,
        };
        let forged = Record {
            settings: vec![setting],
            ..Record::default()
        };
        Ipc::check(&forged).expect_err("the path is not that of a limit");
    }
}
