//! A list of what is to be undone when the process that did it ends, kept by a helper.
//!
//! An entry is there before its deed: a process before it may run a program, a file before it has
//! its name, a mount before it is attached. Files and directories that cannot be made without a
//! name are made by the helper itself. Processes are ended first, all of them; then the rest is
//! undone in the reverse order. An entry whose name leads to something else by then is left alone.

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use prost::Message;
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use rustix::process::{Signal, pidfd_send_signal};

use crate::process::Process;
use crate::{Channel, Helper, wait_for_end};

/// A message to the helper, and its answer to a file or a directory that it was to make.
#[derive(Clone, PartialEq, Message)]
struct Entry {
    #[prost(enumeration = "EntryKind", tag = "1")]
    kind: i32,
    #[prost(bytes = "vec", tag = "2")]
    path: Vec<u8>,
    /// The id of a mount.
    #[prost(uint64, tag = "3")]
    mount: u64,
    /// Why nothing was made; 0 if it was.
    #[prost(int32, tag = "4")]
    errno: i32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
enum EntryKind {
    /// Nothing that is known.
    Unknown = 0,
    /// A process, as a pidfd, is to end.
    Process = 1,
    /// A file, of which a descriptor comes along, is to lose its name.
    File = 2,
    /// A mount is to go.
    Mount = 3,
    /// A file is to be made.
    NewFile = 4,
    /// A directory is to be made.
    NewDirectory = 5,
    /// All is to be undone now.
    Undo = 6,
    /// Nothing is to be undone.
    Dismiss = 7,
}

impl Entry {
    fn of(kind: EntryKind, path: &Path) -> Self {
        Self {
            kind: kind as i32,
            path: path.as_os_str().as_bytes().to_vec(),
            ..Self::default()
        }
    }

    /// One about everything.
    fn all(kind: EntryKind) -> Self {
        Self::of(kind, Path::new(""))
    }
}

/// A mounted file system.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The directory.
    pub point: PathBuf,
    /// The id of the mount (`stx_mnt_id` of statx(2)).
    pub id: u64,
}

impl Mount {
    /// True if it is what is mounted there.
    #[must_use]
    pub fn is_there(&self) -> bool {
        let flags = AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
        let facts = statx(CWD, &self.point, flags, StatxFlags::MNT_ID);
        facts.is_ok_and(|facts| facts.stx_mnt_id == self.id)
    }

    /// Unmounts it, if it is what is mounted there; where it is in use, as soon as it is not.
    ///
    /// # Errors
    /// Why it had to be detached from its directory.
    pub fn unmount(&self) -> io::Result<()> {
        if !self.is_there() {
            return Ok(());
        }
        unmount(&self.point, UnmountFlags::empty()).map_err(|errno| {
            let _ = unmount(&self.point, UnmountFlags::DETACH);
            errno.into()
        })
    }
}

/// The list, and the helper that keeps it. Dropped without [`UndoList::dismiss`], it has all undone
/// and waits for that.
#[derive(Debug)]
pub struct UndoList {
    /// There until it is given away.
    channel: Option<Arc<Channel>>,
    /// The helper, where it is a child. Dropped last.
    process: Option<Process>,
}

impl UndoList {
    /// Starts a helper, from a process that has one thread. It holds `held` until the processes of
    /// the list have ended.
    ///
    /// # Errors
    /// Those of [`Helper::start`].
    pub fn start(held: &[BorrowedFd<'_>]) -> io::Result<Self> {
        let child = helper().keep(held.iter().copied()).start(keep)?;
        let (channel, process) = child.split();
        let mut list = Self::of(channel);
        list.process = Some(process);
        Ok(list)
    }

    /// Leaves a helper behind that is nobody's child here.
    ///
    /// # Errors
    /// Those of [`Helper::leave`].
    pub fn leave() -> io::Result<Self> {
        helper().leave(keep).map(Self::of)
    }

    /// The list at the other end of a channel that [`UndoList::into_channel`] gave away.
    #[must_use]
    pub fn of(channel: Channel) -> Self {
        Self {
            channel: Some(Arc::new(channel)),
            process: None,
        }
    }

    /// Gives the channel away: all is undone when nobody has it any more.
    ///
    /// # Panics
    /// Where there is an [`UndoList::dismisser`], which has it, too.
    #[must_use]
    pub fn into_channel(mut self) -> Channel {
        std::mem::forget(self.process.take());
        let channel = self.channel.take().and_then(Arc::into_inner);
        channel.expect("nobody else has it")
    }

    fn channel(&self) -> &Arc<Channel> {
        self.channel.as_ref().expect("only into_channel takes it")
    }

    /// Has a process end.
    ///
    /// # Errors
    /// The helper is gone.
    pub fn add_process(&self, pidfd: BorrowedFd<'_>) -> io::Result<()> {
        self.channel()
            .send(&Entry::all(EntryKind::Process), &[pidfd])
    }

    /// Has a file lose this name, which it may not have yet.
    ///
    /// # Errors
    /// The helper is gone.
    pub fn add_file(&self, file: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
        self.channel()
            .send(&Entry::of(EntryKind::File, path), &[file])
    }

    /// Has a mount go.
    ///
    /// # Errors
    /// The helper is gone.
    pub fn add_mount(&self, mount: &Mount) -> io::Result<()> {
        let entry = Entry {
            mount: mount.id,
            ..Entry::of(EntryKind::Mount, &mount.point)
        };
        self.channel().send(&entry, &[])
    }

    /// Makes an empty file for this user alone, which goes again; tells whether there was none.
    ///
    /// # Errors
    /// Those of open(2); the helper is gone.
    pub fn make_file(&self, path: &Path) -> io::Result<bool> {
        self.make(EntryKind::NewFile, path)
    }

    /// The same for a directory.
    ///
    /// # Errors
    /// Those of mkdir(2); the helper is gone.
    pub fn make_directory(&self, path: &Path) -> io::Result<bool> {
        self.make(EntryKind::NewDirectory, path)
    }

    fn make(&self, kind: EntryKind, path: &Path) -> io::Result<bool> {
        let (made, _) = self.channel().ask::<Entry>(&Entry::of(kind, path), &[])?;
        match made.errno {
            0 => Ok(true),
            errno if errno == Errno::EXIST.raw_os_error() => Ok(false),
            errno => Err(io::Error::from_raw_os_error(errno)),
        }
    }

    /// Leaves everything as it is.
    ///
    /// # Errors
    /// The helper is gone: then it may have been killed.
    pub fn dismiss(mut self) -> io::Result<()> {
        let channel = self.channel.take();
        channel.map_or(Ok(()), |it| it.send(&Entry::all(EntryKind::Dismiss), &[]))
    }

    /// The descriptor by which [`UndoList::dismisser`] acts.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.channel().as_fd()
    }

    /// Dismisses it when it is called, also by another process that has [`UndoList::fd`].
    pub fn dismisser(&self) -> impl FnOnce() + use<> {
        let channel = self.channel().clone();
        move || {
            let _ = channel.send(&Entry::all(EntryKind::Dismiss), &[]);
        }
    }
}

impl Drop for UndoList {
    fn drop(&mut self) {
        let Some(channel) = self.channel.take() else {
            return;
        };
        // Others may have the channel, too, so the end of this side says nothing by itself.
        if channel.send(&Entry::all(EntryKind::Undo), &[]).is_ok() {
            while let Ok(Some(_)) = channel.receive::<Entry>() {}
        }
    }
}

fn helper() -> Helper<'static> {
    Helper::new(c"stillframe-undo").deaf()
}

/// A file or a directory with a name.
struct Name {
    path: PathBuf,
    inode: (u64, u64),
    /// Keeps the number of the inode from being another file's.
    _file: Option<OwnedFd>,
}

impl Name {
    fn of(file: OwnedFd, path: PathBuf) -> Option<Self> {
        let facts = rustix::fs::fstat(&file).ok()?;
        Some(Self {
            path,
            inode: (facts.st_dev, facts.st_ino),
            _file: Some(file),
        })
    }

    fn make(path: PathBuf, is_directory: bool) -> io::Result<Self> {
        if is_directory {
            DirBuilder::new().mode(0o700).create(&path)?;
        } else {
            let mut options = File::options();
            let options = options.write(true).create_new(true).mode(0o600);
            options.open(&path)?;
        }
        let facts = fs::symlink_metadata(&path)?;
        Ok(Self {
            path,
            inode: (facts.dev(), facts.ino()),
            _file: None,
        })
    }

    fn remove(&self) {
        let Ok(facts) = fs::symlink_metadata(&self.path) else {
            return;
        };
        if (facts.dev(), facts.ino()) == self.inode {
            let _ = match facts.is_dir() {
                true => fs::remove_dir(&self.path),
                false => fs::remove_file(&self.path),
            };
        }
    }
}

/// The helper's life.
fn keep(channel: Channel) {
    let mut processes = Vec::new();
    let mut deeds: Vec<Box<dyn FnOnce()>> = Vec::new();
    // A message without sense counts as the end of the other side.
    while let Ok(Some((entry, rights))) = channel.receive::<Entry>() {
        let kind = entry.kind();
        let path = PathBuf::from(OsString::from_vec(entry.path));
        match kind {
            EntryKind::Process => processes.extend(rights),
            EntryKind::File => {
                let file = rights.into_iter().next();
                if let Some(name) = file.and_then(|file| Name::of(file, path)) {
                    deeds.push(Box::new(move || name.remove()));
                }
            }
            EntryKind::Mount => {
                let (point, id) = (path, entry.mount);
                deeds.push(Box::new(move || drop(Mount { point, id }.unmount())));
            }
            EntryKind::NewFile | EntryKind::NewDirectory => {
                let mut answer = Entry::all(kind);
                match Name::make(path, kind == EntryKind::NewDirectory) {
                    Ok(name) => deeds.push(Box::new(move || name.remove())),
                    Err(error) => {
                        let errno = error.raw_os_error();
                        answer.errno = errno.unwrap_or(Errno::IO.raw_os_error());
                    }
                }
                if channel.send(&answer, &[]).is_err() {
                    break;
                }
            }
            EntryKind::Dismiss => return,
            EntryKind::Undo | EntryKind::Unknown => break,
        }
    }
    for process in &processes {
        let _ = pidfd_send_signal(process, Signal::KILL);
    }
    processes.iter().for_each(wait_for_end);
    deeds.into_iter().rev().for_each(|undo| undo());
}

#[cfg(test)]
mod tests {
    use sys::new_file::NewFile;
    use testkit::program::{Program, Spawned};

    use super::*;
    use crate::harness::{Victim, kill_at_each_message};

    /// A client's deeds, in a folder, with a program.
    struct Subject {
        folder: tempfile::TempDir,
        program: Spawned,
        process: OwnedFd,
    }

    impl Subject {
        fn new() -> Self {
            let folder = tempfile::tempdir().expect("a folder");
            fs::write(folder.path().join("others"), "others").expect("written");
            let program = Program::new("sleep").arg("1000").spawn();
            let pid = rustix::process::Pid::from_raw(program.pid().cast_signed());
            let flags = rustix::process::PidfdFlags::empty();
            let process = rustix::process::pidfd_open(pid.expect("a pid"), flags);
            Self {
                folder,
                program,
                process: process.expect("it lives"),
            }
        }

        fn path(&self, name: &str) -> PathBuf {
            self.folder.path().join(name)
        }

        fn act(&self, list: &UndoList) -> io::Result<()> {
            list.add_process(self.process.as_fd())?;
            let file = self.path("file");
            let mut new = NewFile::create(&file, 0o600)?;
            list.add_file(new.file.as_fd(), &file)?;
            new.name()?;
            assert!(!list.make_file(&self.path("others"))?);
            assert!(list.make_directory(&self.path("folder"))?);
            assert!(list.make_file(&self.path("folder/file"))?);
            assert!(list.make_file(&self.path("none/file")).is_err());
            list.add_mount(&Mount {
                point: self.path("folder"),
                id: u64::MAX,
            })
        }

        fn left(&self) -> Vec<String> {
            let entries = fs::read_dir(self.folder.path()).expect("a folder");
            let names = entries.map(|entry| entry.expect("an entry").file_name());
            let mut names: Vec<_> = names
                .map(|name| name.into_string().expect("text"))
                .collect();
            names.sort();
            names
        }

        fn is_alive(&self) -> bool {
            testkit::tree::is_alive(self.program.pid())
        }
    }

    #[test]
    fn client_killed_at_each_message_leaves_nothing_or_all() {
        kill_at_each_message(
            Subject::new,
            |subject| vec![subject.process.as_fd()],
            |_, channel| keep(channel),
            |subject, channel| {
                let list = UndoList::of(channel);
                if subject.act(&list).is_ok() {
                    let _ = list.dismiss();
                }
            },
            |subject, outcome| match (outcome.victim, outcome.messages) {
                (Victim::Client, 0) => assert!(subject.is_alive(), "it was not told yet"),
                // All but the message that dismisses it.
                (Victim::Client, 1..8) => {
                    assert_eq!(subject.left(), ["others"], "{outcome:?}");
                    assert!(!subject.is_alive(), "{outcome:?}");
                }
                (Victim::Client, _) => {
                    assert_eq!(subject.left(), ["file", "folder", "others"], "{outcome:?}");
                    assert!(subject.is_alive(), "{outcome:?}");
                }
                // The client alone is left to undo it, and its error says so.
                (Victim::Helper, _) => assert!(subject.left().contains(&"others".into())),
            },
        );
    }

    #[test]
    fn list_dropped_or_given_away_is_undone_with_its_last_owner() {
        let subject = Subject::new();
        drop(UndoList::leave().expect("a helper"));
        let list = UndoList::leave().expect("a helper");
        subject.act(&list).expect("done");
        drop(list);
        assert_eq!(subject.left(), ["others"]);
        assert!(!subject.is_alive());
        let subject = Subject::new();
        let list = UndoList::leave().expect("a helper");
        subject.act(&list).expect("done");
        let channel = list.into_channel();
        assert_eq!(subject.left(), ["file", "folder", "others"]);
        drop(UndoList::of(channel));
        assert_eq!(subject.left(), ["others"]);
    }

    #[test]
    fn name_that_is_another_file_by_then_stays() {
        let subject = Subject::new();
        let list = UndoList::leave().expect("a helper");
        subject.act(&list).expect("done");
        fs::rename(subject.path("file"), subject.path("moved")).expect("renamed");
        fs::write(subject.path("file"), "another").expect("written");
        drop(list);
        assert_eq!(subject.left(), ["file", "moved", "others"]);
    }

    #[test]
    fn dismisser_works_when_the_list_is_dropped_later() {
        let subject = Subject::new();
        let list = UndoList::leave().expect("a helper");
        subject.act(&list).expect("done");
        list.dismisser()();
        drop(list);
        assert_eq!(subject.left(), ["file", "folder", "others"]);
    }
}
