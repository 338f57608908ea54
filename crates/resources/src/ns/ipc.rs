//! System V objects and POSIX message queues: ipc_namespaces(7).
//!
//! - What: ipc namespaces
//! - Kept: one of the whole tree, with its limits (/proc/sys/kernel/shmmax and the like,
//!   /proc/sys/fs/mqueue), System V shared memory that tasks have attached, and POSIX message
//!   queues that tasks have open.
//! - Refused: "System V shared memory …, which nobody has attached,"; "System V semaphores …";
//!   "System V message queue …"; "message queue …, which nobody has open,".
//! - At a restore: "/proc/sys/… is missing, which the tree's namespace had".
//! - CRIU 4.2: kept, with all objects.

use rustix::fs::{Mode, OFlags, openat};
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen,
};

use super::settings::{self, Setting};
use super::{FIRST_TAG, Kind, Tree, record_name};
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

/// The limits of a namespace.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    #[prost(message, repeated, tag = "1")]
    settings: Vec<Setting>,
}

impl Kind for Ipc {
    type Record = Record;
    const TAG: u16 = FIRST_TAG + 1;
    const NAME: &'static str = "ipc";
    const FLAG: libc::c_int = libc::CLONE_NEWIPC;

    fn dump(tree: &Tree<'_>, refused: &mut Vec<Error>) -> Result<Record> {
        for shm in list("shm")?.filter(|shm| shm.users == 0) {
            let what = format!("System V shared memory {}, which nobody has attached,", shm.id);
            refused.push(tree.unsupported(what));
        }
        for (file, what) in [("sem", "semaphores"), ("msg", "message queue")] {
            let all = list(file)?.map(|one| format!("System V {what} {}", one.id));
            refused.extend(all.map(|what| tree.unsupported(what)));
        }
        for queue in queues()? {
            let path = format!("/{queue}");
            let mut links = tree.links.iter().flatten();
            if !links.any(|link| link.target == path.as_bytes()) {
                let what = format!("message queue {path}, which nobody has open,");
                refused.push(tree.unsupported(what));
            }
        }
        let mut record = Record::default();
        for path in SETTINGS {
            record.settings.extend(settings::read(path)?);
        }
        Ok(record)
    }

    fn check(record: &Record) -> Result<()> {
        let is_sound = |setting: &Setting| setting.is_below(&SETTINGS);
        match record.settings.len() <= settings::MOST && record.settings.iter().all(is_sound) {
            true => Ok(()),
            false => Err(Error::corrupt(record_name(Self::NAME), "has no such limit")),
        }
    }

    fn restore(record: &Record) -> Result<()> {
        settings::apply(&record.settings)
    }

    fn describe(record: &Record) -> String {
        format!("{} limits", record.settings.len())
    }
}

/// An object of System V.
struct Object {
    id: i32,
    /// How many have a segment attached, or messages a queue has.
    users: u64,
}

/// The objects that a file of /proc/sysvipc lists.
fn list(file: &str) -> Result<impl Iterator<Item = Object>> {
    let path = sys::procfs::path(format_args!("sysvipc/{file}"));
    let failed = |error: std::io::Error| Error::kernel(format!("cannot read {path}"), error);
    let text = std::fs::read_to_string(&path).map_err(failed)?;
    // Key, id, permissions, …; of a segment: size, cpid, lpid, nattch.
    const USERS: usize = 6;
    let object = |line: &str| {
        let mut words = line.split_whitespace();
        let id = words.nth(1)?.parse().ok()?;
        let users = words.nth(USERS - 2).and_then(|word| word.parse().ok());
        Some(Object {
            id,
            users: users.unwrap_or_default(),
        })
    };
    let objects = text.lines().skip(1).map(object);
    let objects = objects.collect::<Option<Vec<_>>>();
    let objects = objects.ok_or_else(|| failed(std::io::ErrorKind::InvalidData.into()))?;
    Ok(objects.into_iter())
}

/// The names of the message queues.
fn queues() -> Result<Vec<String>> {
    let failed = |errno| Error::kernel("cannot list the message queues", errno);
    let mounted = fsopen("mqueue", FsOpenFlags::FSOPEN_CLOEXEC).and_then(|files| {
        fsconfig_create(&files)?;
        fsmount(&files, FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty())
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
        let tree = Tree { root: 1, links: &[] };
        let record = Ipc::dump(&tree, &mut Vec::new()).expect("it is read");
        let has = |path: &str| record.settings.iter().any(|one| one.path == path);
        assert!(has("kernel/shmmax") && has("kernel/sem") && has("fs/mqueue/msg_max"));
        Ipc::check(&record).expect("it is sound");
        let setting = Setting {
            path: "kernel/core_pattern".to_owned(),
            value: "|/x".to_owned(),
        };
        let forged = Record { settings: vec![setting] };
        Ipc::check(&forged).expect_err("it is no limit of a namespace");
    }
}
