//! What /proc has of a task of the tree: files and directories in /proc/PID, and that itself.
//!
//! They can only be opened when the task exists.
//!
//! - Kept: files and directories in /proc of the tree's living processes and threads, with the
//!   offset.
//! - Refused: "it is a … in /proc of …", which is "process …, which is not in the tree" or "process
//!   …, which has ended"; "it has lock …".
//! - CRIU 4.2: kept; those of processes outside are opened again by their path, whoever has it
//!   then.

use std::os::fd::OwnedFd;

use prost::Message;
use rustix::fs::{FileType, OFlags};
use syscalls::Sysno;

use super::{DumpContext, Kind, Open, RestoreContext, late, status, tags};
use crate::script::Script;
use crate::{Error, Result};

/// See the file.
pub struct ProcessFile;

/// Something in /proc/PID.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// Its path.
    #[prost(bytes = "vec", tag = "1")]
    path: Vec<u8>,
    /// Access mode and status flags.
    #[prost(uint32, tag = "2")]
    flags: u32,
    /// The offset: bytes of a file, a cookie of a directory.
    #[prost(uint64, tag = "3")]
    pos: u64,
}

/// The task of a path in /proc/PID, or in /proc/PID/task/TID.
fn task_of(path: &[u8]) -> Option<i32> {
    let number = |word: &[u8]| std::str::from_utf8(word).ok()?.parse::<i32>().ok();
    let mut words = path.strip_prefix(b"/proc/")?.split(|byte| *byte == b'/');
    let process = number(words.next()?).filter(|pid| *pid > 0)?;
    match words.next() {
        Some(b"task") => Some(
            words
                .next()
                .map_or(process, |tid| number(tid).unwrap_or(-1)),
        ),
        _ => Some(process),
    }
}

impl Kind for ProcessFile {
    type Record = Record;
    const TAG: u16 = tags::PROCESS_FILE;
    const NAME: &'static str = "file of a process";

    fn claims(open: &Open<'_>) -> bool {
        let kind = FileType::from_raw_mode(open.stat.st_mode);
        let is_path = open.info.oflags().contains(OFlags::PATH);
        let plain = matches!(kind, FileType::RegularFile | FileType::Directory);
        (plain || is_path) && task_of(&open.link).is_some()
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Record> {
        let task = task_of(&open.link).expect("it is claimed");
        let what = match FileType::from_raw_mode(open.stat.st_mode) {
            FileType::Directory => "directory",
            _ => "file",
        };
        let refuse = |whose: String| {
            let why = format!("it is a {what} in /proc of {whose}");
            Err(open.unsupported(&why, None))
        };
        match cx.task(task) {
            None => return refuse(format!("process {task}, which is not in the tree")),
            Some(super::Task::Ended) => return refuse(format!("process {task}, which has ended")),
            Some(super::Task::Alive) => late::check(open)?,
        }
        if let Some(lock) = open.info.field("lock") {
            return Err(open.unsupported(&format!("it has lock {lock}"), None));
        }
        Ok(Record {
            path: open.link.clone(),
            flags: open.info.flags,
            pos: open.info.pos,
        })
    }

    fn check(record: &Record) -> Result<()> {
        status::check(Self::NAME, record.flags)?;
        if task_of(&record.path).is_none() || record.path.contains(&0) {
            return Err(Error::corrupt(Self::NAME, format!("{record:?}")));
        }
        Ok(())
    }

    fn describe(record: &Record) -> String {
        let Record { path, flags, pos } = record;
        let path = String::from_utf8_lossy(path);
        format!("{path} pos={pos} flags={flags:#o}")
    }

    fn open(_record: &Record, _cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        late::placeholder()
    }

    fn is_late(_record: &Record) -> bool {
        true
    }

    fn open_in_task(record: &Record, number: i32, _needed: Option<i32>, script: &mut Script) {
        const AT_FDCWD: i32 = libc::AT_FDCWD;
        let (flags, pos) = (status::opening(record.flags), record.pos);
        let at = script.string(&record.path);
        let args = [AT_FDCWD.into(), at.into(), flags.bits().into()];
        script.expect(Sysno::openat, args, number);
        if pos != 0 {
            // SEEK_SET
            script.expect(Sysno::lseek, [number.into(), pos.into(), 0u32.into()], pos);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::super::testing::World;
    use super::*;

    #[test]
    fn paths_tell_the_task() {
        for (path, task) in [
            ("/proc/12", Some(12)),
            ("/proc/12/maps", Some(12)),
            ("/proc/12/task", Some(12)),
            ("/proc/12/task/13/stat", Some(13)),
            ("/proc/12/task/x", Some(-1)),
            ("/proc/0/maps", None),
            ("/proc/sys/kernel", None),
            ("/proc", None),
            ("/home/12", None),
        ] {
            assert_eq!(task_of(path.as_bytes()), task, "{path}");
        }
    }

    #[test]
    fn what_another_process_has_is_refused_by_name() {
        for (path, what) in [
            ("/proc/1/status", "file"),
            ("/proc/1/fd", "directory"),
            ("/proc/1", "directory"),
        ] {
            let mut world = World::default();
            world.add(File::open(path).expect("open"));
            let error = world.dump().expect_err("it may be gone").to_string();
            let why = format!("a {what} in /proc of process 1, which is not in the tree");
            assert!(error.contains(&why), "{error}");
        }
    }

    #[test]
    fn a_file_is_opened_where_it_was_read() {
        let record = Record {
            path: b"/proc/7/maps".to_vec(),
            flags: 0,
            pos: 99,
        };
        let mut script = Script::default();
        ProcessFile::open_in_task(&record, 5, None, &mut script);
        let text = script.to_string();
        assert!(
            text.contains("\"/proc/7/maps\"") && text.contains("lseek(fd=5, offset=99"),
            "{text}"
        );
    }
}
