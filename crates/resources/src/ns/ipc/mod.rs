//! System V objects and POSIX message queues: ipc_namespaces(7).
//!
//! - What: ipc namespaces
//! - Kept: one of the whole tree, with its limits (/proc/sys/kernel/shmmax and the like,
//!   /proc/sys/fs/mqueue), its System V semaphores and message queues with their contents, System V
//!   shared memory that tasks have attached, and POSIX message queues that tasks have open; not who
//!   used a semaphore or a queue last, and when.
//! - Refused: "System V shared memory …, which nobody has attached"; "message queue …, which nobody
//!   has open".
//! - CRIU 4.2: kept, with all objects.

mod object;
mod queues;
mod semaphores;

use rustix::fs::{Mode, OFlags, openat};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen};

use self::object::File;
use self::queues::MessageQueue;
use self::semaphores::SemaphoreSet;
use super::kind::{FIRST_TAG, Kind, Tree, record_name};
use super::settings::{self, Setting};
use crate::task::PartState;
use crate::{Error, Result};

/// Its limits, below /proc/sys.
const SETTINGS: [&str; 9] = [
    "fs/mqueue",
    "kernel/msgmax",
    "kernel/msgmnb",
    "kernel/msgmni",
    "kernel/sem",
    "kernel/shm_rmid_forced",
    "kernel/shmall",
    "kernel/shmmax",
    "kernel/shmmni",
];

/// See the file.
pub struct Ipc;

/// What a namespace has.
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

    fn dump(tree: &Tree<'_>, refused: &mut Vec<Error>) -> Result<Record> {
        let segments = File::Segments.list()?.into_iter();
        for row in segments.filter(|row| row.attached == 0) {
            let id = row.object.id;
            let what = format!("System V shared memory {id}, which nobody has attached,");
            refused.push(tree.unsupported(what));
        }
        for queue in names()? {
            let path = format!("/{queue}");
            let mut links = tree.links.iter().flatten();
            if !links.any(|link| link.target == path.as_bytes()) {
                let what = format!("message queue {path}, which nobody has open,");
                refused.push(tree.unsupported(what));
            }
        }
        let mut record = Record {
            settings: Vec::new(),
            sets: semaphores::read()?,
            queues: queues::read()?,
        };
        for path in SETTINGS {
            record.settings.extend(settings::read(path)?);
        }
        Ok(record)
    }

    fn check(record: &Record) -> Result<()> {
        let corrupt = |what| Err(Error::corrupt(record_name(Self::NAME), what));
        let is_sound = |setting: &Setting| setting.is_below(&SETTINGS);
        if record.settings.len() > settings::MOST || !record.settings.iter().all(is_sound) {
            return corrupt("has no such limit");
        }
        let sets = record.sets.iter().all(SemaphoreSet::is_sound);
        match sets && record.queues.iter().all(MessageQueue::is_sound) {
            true => Ok(()),
            false => corrupt("has no such objects"),
        }
    }

    fn restore(record: &Record, parts: &[&dyn PartState]) -> Result<()> {
        settings::apply(&record.settings)?;
        let mut sets = record.sets.iter();
        sets.try_for_each(|set| set.restore(parts))?;
        record.queues.iter().try_for_each(MessageQueue::restore)
    }

    fn describe(record: &Record) -> String {
        let (limits, sets, queues) = (&record.settings, &record.sets, &record.queues);
        let (limits, sets, queues) = (limits.len(), sets.len(), queues.len());
        format!("{limits} limits, {sets} sets of semaphores, {queues} message queues")
    }
}

/// The names of the message queues.
fn names() -> Result<Vec<String>> {
    let failed = |errno| Error::kernel("cannot list the message queues", errno);
    let mounted = fsopen("mqueue", FsOpenFlags::FSOPEN_CLOEXEC).and_then(|files| {
        fsconfig_create(&files)?;
        fsmount(
            &files,
            FsMountFlags::FSMOUNT_CLOEXEC,
            MountAttrFlags::empty(),
        )
    });
    let mounted = mounted.map_err(failed)?;
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = openat(&mounted, ".", flags, Mode::empty()).map_err(failed)?;
    let entries = rustix::fs::Dir::new(folder).map_err(failed)?;
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name().to_string_lossy();
        if name != "." && name != ".." {
            names.push(name.into_owned());
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_of_a_namespace_are_read_and_sound() {
        testkit::needs_root!();
        let tree = Tree {
            root: 1,
            links: &[],
        };
        let record = Ipc::dump(&tree, &mut Vec::new()).expect("it is read");
        let has = |path: &str| record.settings.iter().any(|one| one.path == path);
        assert!(has("kernel/shmmax") && has("kernel/sem") && has("fs/mqueue/msg_max"));
        Ipc::check(&record).expect("it is sound");
        let setting = Setting {
            path: "kernel/core_pattern".to_owned(),
            value: "|/x".to_owned(),
        };
        let forged = Record {
            settings: vec![setting],
            ..Record::default()
        };
        Ipc::check(&forged).expect_err("it is no limit of a namespace");
    }
}
