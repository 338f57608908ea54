//! Namespaces as files: namespaces(7).
//!
//! Those that the tree is in are not part of an image: it comes back in the restorer's, but in a
//! time namespace of its own. So a descriptor of one leads to the restorer's afterwards, and one of
//! the time namespace to the tree's, which can only be opened when the tree is in it.
//!
//! - What: namespaces as files
//! - Kept: those that stillframe itself is in, which become those of the restore; the tree's time
//!   namespace; any that are mounted at a path, which become what is mounted there then.
//! - Refused: "it is another … namespace than stillframe's own", where no path leads to it; "its
//!   kind is not known".
//! - At a restore: "the namespace … is another … namespace than this one"; "the namespace … is no …
//!   namespace".
//! - CRIU 4.2: keeps those that are the tree's.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::OnceLock;

use prost::Message;
use rustix::fs::{Mode, OFlags};
use syscalls::Sysno;

use super::{DumpContext, Kind, Open, RestoreContext, late, status, tags};
use crate::script::Script;
use crate::{Error, Result};

/// See the file.
pub struct Namespace;

/// A namespace as a file.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// Its kind, as the files in /proc/PID/ns are called.
    #[prost(string, tag = "1")]
    kind: String,
    /// Whether it is the one that the tree is in, and as far as the time namespace is concerned,
    /// no other one that is known.
    #[prost(bool, tag = "2")]
    own: bool,
    /// Whether it was stillframe's time namespace and not the tree's.
    #[prost(bool, tag = "3")]
    restorers: bool,
    /// The path that it is mounted at, if it was opened there.
    #[prost(bytes = "vec", tag = "4")]
    path: Vec<u8>,
    /// Access mode and status flags.
    #[prost(uint32, tag = "5")]
    flags: u32,
}

/// The kind of the namespace of the tree's tasks that the restorer is not in.
const TIME: &str = "time";

impl Record {
    /// Whether it is the tree's own and none of the restorer's.
    fn is_late(&self) -> bool {
        self.own && self.kind == TIME
    }
}

/// The kind of the namespace that `open` is, if its link or the file itself tells.
fn kind_of(open: &Open<'_>) -> Result<Option<&'static str>> {
    let link = std::str::from_utf8(&open.link).unwrap_or_default();
    let named = link.split_once(":[").map(|(name, _)| name);
    match named.and_then(sys::namespace::kind_named) {
        None => Ok(sys::namespace::kind(open.own()?).ok()),
        known => Ok(known),
    }
}

/// The file system that they are in, of which a kernel has one.
fn device() -> Option<u64> {
    static DEVICE: OnceLock<Option<u64>> = OnceLock::new();
    *DEVICE.get_or_init(|| {
        let own = sys::procfs::stat("self/ns/mnt").ok()?;
        Some(own.st_dev)
    })
}

/// Whether two files are one.
fn is(open: &Open<'_>, path: impl rustix::path::Arg) -> bool {
    let wanted = (open.stat.st_dev, open.stat.st_ino);
    rustix::fs::stat(path).is_ok_and(|there| (there.st_dev, there.st_ino) == wanted)
}

impl Kind for Namespace {
    type Record = Record;
    const TAG: u16 = tags::NAMESPACE;
    const NAME: &'static str = "namespace";

    fn claims(open: &Open<'_>) -> bool {
        // One that is mounted is a place in the file system as well.
        let is_path = open.info.oflags().contains(OFlags::PATH) && open.link.starts_with(b"/");
        !is_path && Some(open.stat.st_dev) == device()
    }

    fn dump(open: &Open<'_>, _cx: &mut dyn DumpContext) -> Result<Record> {
        let kind = kind_of(open)?;
        let kind = kind.ok_or_else(|| open.unsupported("its kind is not known", None))?;
        let here = is(open, sys::procfs::path(format_args!("self/ns/{kind}")));
        let own = match kind {
            TIME => is(open, open.process.path(&format!("ns/{kind}"))),
            _ => here,
        };
        let named = open.link.starts_with(b"/") && is(open, open.link.as_slice());
        let mut record = Record {
            kind: kind.to_owned(),
            own,
            restorers: here && !own,
            path: Vec::new(),
            flags: open.info.flags,
        };
        if record.is_late() {
            late::check(open)?;
        } else if named {
            record.path.clone_from(&open.link);
        } else if !here {
            let why = format!("it is another {kind} namespace than stillframe's own");
            return Err(open.unsupported(&why, None));
        }
        Ok(record)
    }

    fn check(record: &Record) -> Result<()> {
        status::check(Self::NAME, record.flags)?;
        let known = sys::namespace::kind_named(&record.kind).is_some();
        let path = record.path.is_empty() || record.path.starts_with(b"/");
        let led = record.own || record.restorers || !record.path.is_empty();
        if !known || !path || !led || record.path.contains(&0) {
            return Err(Error::corrupt(Self::NAME, format!("{record:?}")));
        }
        Ok(())
    }

    fn describe(record: &Record) -> String {
        let whose = match (record.own, record.restorers) {
            (true, _) => "of the tree",
            (false, true) => "of the restorer",
            (false, false) => "of others",
        };
        let path = String::from_utf8_lossy(&record.path);
        let at = if path.is_empty() { "" } else { " at " };
        format!("{} {whose}{at}{path}", record.kind)
    }

    fn open(record: &Record, _cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let flags = status::opening(record.flags);
        if record.is_late() {
            return late::placeholder();
        }
        let here = sys::procfs::path(format_args!("self/ns/{}", record.kind));
        let path = match record.path.as_slice() {
            [] => here.as_bytes(),
            path => path,
        };
        let shown = String::from_utf8_lossy(path);
        let own = rustix::fs::open(path, flags, Mode::empty())
            .map_err(|errno| Error::kernel(format!("open {shown} of a namespace"), errno))?;
        record.check(&own, &here).map(|()| own)
    }

    fn is_late(record: &Record) -> bool {
        record.is_late()
    }

    fn open_in_task(record: &Record, number: i32, _needed: Option<i32>, script: &mut Script) {
        const AT_FDCWD: i32 = libc::AT_FDCWD;
        let flags = status::opening(record.flags);
        let at = script.string(format!("/proc/self/ns/{}", record.kind).as_bytes());
        let args = [AT_FDCWD.into(), at.into(), flags.bits().into()];
        script.expect(Sysno::openat, args, number);
    }
}

impl Record {
    /// Checks what was opened at the path; `here` is the restorer's own.
    fn check(&self, opened: &OwnedFd, here: &str) -> Result<()> {
        if self.path.is_empty() {
            return Ok(());
        }
        let (kind, path) = (&self.kind, String::from_utf8_lossy(&self.path));
        if sys::namespace::kind(opened.as_fd()).ok() != Some(kind) {
            let what = format!("the namespace {path} is no {kind} namespace");
            return Err(Error::Mismatch { what });
        }
        let same = || {
            let (opened, own) = (
                rustix::fs::fstat(opened).ok()?,
                rustix::fs::stat(here).ok()?,
            );
            Some((opened.st_dev, opened.st_ino) == (own.st_dev, own.st_ino))
        };
        if (self.own || self.restorers) && same() != Some(true) {
            let what = format!("the namespace {path} is another {kind} namespace than this one");
            return Err(Error::Mismatch { what });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use testkit::program::Program;

    use super::super::testing::{World, open_alone};
    use super::*;

    const KINDS: [&str; 7] = ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts"];

    #[test]
    fn own_ones_survive() {
        let mut world = World::default();
        let mut all = Vec::new();
        for kind in KINDS {
            let path = format!("/proc/self/ns/{kind}");
            let own = rustix::fs::stat(path.as_str()).expect("it is there").st_ino;
            all.push((kind, own, world.add(File::open(&path).expect("open"))));
            let place = rustix::fs::open(path.as_str(), OFlags::PATH, Mode::empty());
            all.push((kind, own, world.add(place.expect("open"))));
        }
        world.cycle();
        for (kind, own, at) in all {
            assert_eq!(world.describe(at), format!("namespace {kind} of the tree"));
            let stat = rustix::fs::fstat(world.take(at)).expect("stat");
            assert_eq!(stat.st_ino, own, "{kind}");
        }
    }

    #[test]
    fn the_trees_time_namespace_is_opened_by_a_task() {
        let Ok(own) = File::open("/proc/self/ns/time") else {
            testkit::skip!("no time namespaces");
        };
        let mut world = World::default();
        let at = world.add(own);
        world.dump().expect("it is the tree's");
        assert_eq!(world.describe(at), "namespace time of the tree");
        let record = Record {
            kind: TIME.to_owned(),
            own: true,
            ..Record::default()
        };
        assert!(Namespace::is_late(&record));
        let mut script = Script::default();
        Namespace::open_in_task(&record, 5, None, &mut script);
        let text = script.to_string();
        assert!(text.contains("\"/proc/self/ns/time\""), "{text}");
    }

    /// A process in a UTS namespace of its own.
    fn elsewhere() -> (testkit::program::Spawned, String) {
        let own = std::fs::read_link("/proc/self/ns/uts").expect("readlink");
        let program = Program::new("unshare")
            .args(["-u", "sleep", "1000"])
            .spawn();
        let path = format!("/proc/{}/ns/uts", program.pid());
        testkit::wait::wait_until("another namespace", testkit::wait::SOON, || {
            std::fs::read_link(&path).is_ok_and(|link| link != own)
        });
        (program, path)
    }

    #[test]
    fn another_one_is_refused_by_name() {
        testkit::needs_root!();
        testkit::needs_program!("unshare");
        let (_program, path) = elsewhere();
        let mut world = World::default();
        world.add(File::open(path).expect("open"));
        let error = world.dump().expect_err("it may be gone").to_string();
        let why = "it is another uts namespace than stillframe's own";
        assert!(error.contains(why), "{error}");
    }

    /// What is mounted goes with the test.
    struct Mounted(std::path::PathBuf);

    impl Mounted {
        fn at(path: std::path::PathBuf, what: &str) -> Self {
            std::fs::write(&path, "").expect("write");
            let done = std::process::Command::new("mount")
                .args(["--bind", what])
                .arg(&path)
                .status();
            assert!(done.expect("mount").success());
            Self(path)
        }
    }

    impl Drop for Mounted {
        fn drop(&mut self) {
            let _ = std::process::Command::new("umount")
                .arg("-l")
                .arg(&self.0)
                .status();
        }
    }

    #[test]
    fn what_is_mounted_at_a_path_is_found_there() {
        testkit::needs_root!();
        testkit::needs_program!("unshare");
        let folder = tempfile::tempdir().expect("a folder");
        let (_program, path) = elsewhere();
        let theirs = Mounted::at(folder.path().join("theirs"), &path);
        let ours = Mounted::at(folder.path().join("ours"), "/proc/self/ns/uts");
        let mut world = World::default();
        let all = [&theirs, &ours].map(|one| {
            let file = File::open(&one.0).expect("open");
            let inode = rustix::fs::fstat(&file).expect("stat").st_ino;
            (inode, world.add(file))
        });
        world.cycle();
        let shown = format!("namespace uts of others at {}", theirs.0.display());
        assert_eq!(world.describe(all[0].1), shown);
        for (inode, at) in all {
            let stat = rustix::fs::fstat(world.get(at)).expect("stat");
            assert_eq!(stat.st_ino, inode);
        }
        // Another one is there then, and no namespace at all.
        let shown = ours.0.display().to_string();
        drop(ours);
        let ours = Mounted::at(folder.path().join("ours"), &path);
        let why = |world: &mut World| world.restore().expect_err("another").to_string();
        let told = why(&mut world);
        let shown = format!("the namespace {shown}");
        assert_eq!(
            told,
            format!("{shown} is another uts namespace than this one")
        );
        drop(ours);
        assert_eq!(why(&mut world), format!("{shown} is no uts namespace"));
    }

    #[test]
    fn nonsense_is_corrupt() {
        let own = Record {
            kind: "net".to_owned(),
            own: true,
            ..Record::default()
        };
        let kind = |kind: &str| Record {
            kind: kind.to_owned(),
            ..own.clone()
        };
        let path = |path: &[u8]| Record {
            path: path.to_vec(),
            ..own.clone()
        };
        let nowhere = Record {
            own: false,
            ..own.clone()
        };
        for wrong in [kind("../maps"), kind(""), path(b"x"), path(b"/\0"), nowhere] {
            let error = open_alone::<Namespace>(&wrong).expect_err("wrong");
            assert!(matches!(error, Error::Corrupt { .. }), "{error}");
        }
    }
}
