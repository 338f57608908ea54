//! A process that ends half restored machines if we are killed, removes what was made for them, and
//! unmounts the volume that was mounted for them.
//!
//! It is told of each before that executes QEMU, and a process that was not let go ends by itself;
//! of a file before that has its name.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{AtFlags, CWD, StatxFlags, statx};
use rustix::mount::{UnmountFlags, unmount};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Pid, Signal, WaitOptions, pidfd_send_signal, setsid, waitpid};
use sys::fork::fork_for_numbers;
use sys::socket::{self, Along};

use crate::{Error, Result};

/// The first byte of a message to the reaper: a process; a file, with its name behind; a mount,
/// with its id and its directory behind; or the reaper's dismissal, as all goes well.
const PROCESS: u8 = b'p';
const FILE: u8 = b'f';
const MOUNT: u8 = b'm';
const DISMISSED: u8 = b'd';

/// The longest that it is told: a name has `PATH_MAX` bytes at most (path_resolution(7)).
const TOLD_MAX_BYTES: usize = 4096 + 1 + 8;

/// The waiting process. Dropped without [`Reaper::dismiss`], it ends the machines.
#[derive(Debug)]
pub(crate) struct Reaper {
    /// Its process, if it is a child of this one.
    child: Option<Pid>,
    line: Option<OwnedFd>,
}

impl Reaper {
    /// Posts it, from a process that has one thread.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn post() -> Result<Self> {
        Self::post_holding(&[])
    }

    /// The same, and it holds descriptors until the machines that it ends are gone.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn post_holding(held: &[BorrowedFd<'_>]) -> Result<Self> {
        let failed = |source: io::Error| Error::Kernel {
            doing: "cannot post a watchdog",
            source,
        };
        let kind = SocketType::SEQPACKET;
        let pair = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
        let (theirs, own) = pair.map_err(|errno| failed(errno.into()))?;
        log::logger().flush();
        let kept = held.iter().map(AsRawFd::as_raw_fd);
        let kept = kept.chain([theirs.as_raw_fd()]).collect::<Vec<_>>();
        let child = fork_for_numbers(&kept, || {
            // Nothing that ends our group may end this process.
            let _ = setsid();
            let told = wait(&theirs);
            for process in &told.processes {
                let _ = pidfd_send_signal(process, Signal::KILL);
                let mut end = [PollFd::new(process, PollFlags::IN)];
                let _ = rustix::io::retry_on_intr(|| poll(&mut end, None));
            }
            told.files.iter().for_each(Named::remove);
            told.mounts.iter().for_each(Mount::unmount);
        });
        Ok(Self {
            child: Some(child.map_err(failed)?),
            line: Some(own),
        })
    }

    /// The one at the other end of a line that [`Reaper::into_line`] gave away.
    pub const fn of(line: OwnedFd) -> Self {
        Self {
            child: None,
            line: Some(line),
        }
    }

    /// Has it end the machines when nobody has this line any more.
    pub fn into_line(mut self) -> OwnedFd {
        self.child = None;
        self.line.take().expect("only drop takes it")
    }

    /// Has a process ended if this one dies.
    ///
    /// # Errors
    /// [`Error::Kernel`] where the watchdog is gone.
    pub fn watch(&self, process: BorrowedFd<'_>) -> Result<()> {
        self.tell(&[PROCESS], &[process])
    }

    /// Has a file removed if this process dies. It may not have its name yet.
    ///
    /// # Errors
    /// [`Error::Kernel`] where the watchdog is gone, or the name is too long.
    pub fn clear(&self, file: BorrowedFd<'_>, path: &Path) -> Result<()> {
        self.tell(
            &[&[FILE][..], path.as_os_str().as_bytes()].concat(),
            &[file],
        )
    }

    /// Has a mount unmounted if this process dies, when the machines have ended.
    ///
    /// # Errors
    /// [`Error::Kernel`] where the watchdog is gone, or the directory's name is too long.
    pub fn unmount(&self, mount: &Mount) -> Result<()> {
        let point = mount.point.as_os_str().as_bytes();
        self.tell(
            &[&[MOUNT][..], &mount.id.to_ne_bytes(), point].concat(),
            &[],
        )
    }

    /// Leaves the machines to themselves.
    ///
    /// # Errors
    /// [`Error::Kernel`] where the watchdog is gone: then the machines may be.
    pub fn dismiss(&self) -> Result<()> {
        self.tell(&[DISMISSED], &[])
    }

    fn tell(&self, what: &[u8], rights: &[BorrowedFd<'_>]) -> Result<()> {
        let line = self.line.as_ref().expect("only drop takes it");
        let along = Along {
            rights,
            ..Along::default()
        };
        let told = socket::send(line.as_fd(), what, along, 0);
        told.map(drop).map_err(|source| Error::Kernel {
            doing: "cannot tell the watchdog",
            source,
        })
    }
}

impl Drop for Reaper {
    fn drop(&mut self) {
        drop(self.line.take());
        if let Some(child) = self.child {
            let _ = rustix::io::retry_on_intr(|| waitpid(Some(child), WaitOptions::empty()));
        }
    }
}

/// What is to be undone.
#[derive(Default)]
struct Told {
    processes: Vec<OwnedFd>,
    files: Vec<Named>,
    mounts: Vec<Mount>,
}

/// A mounted volume.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The directory.
    pub point: PathBuf,
    /// The id of the mount (`stx_mnt_id` of statx(2)).
    pub id: u64,
}

impl Mount {
    /// Unmounts it, if it is what is mounted there.
    fn unmount(&self) {
        let flags = AtFlags::STATX_DONT_SYNC | AtFlags::NO_AUTOMOUNT;
        let facts = statx(CWD, &self.point, flags, StatxFlags::MNT_ID);
        if !facts.is_ok_and(|facts| facts.stx_mnt_id == self.id) {
            return;
        }
        if unmount(&self.point, UnmountFlags::empty()).is_err() {
            let _ = unmount(&self.point, UnmountFlags::DETACH);
        }
    }
}

/// A file and its name.
struct Named {
    file: OwnedFd,
    path: PathBuf,
}

impl Named {
    /// Removes the name, if it is that of the file.
    fn remove(&self) {
        let is = |facts: rustix::fs::Stat| (facts.st_dev, facts.st_ino);
        let own = rustix::fs::fstat(&self.file).map(is);
        if own.is_ok() && own == rustix::fs::lstat(&self.path).map(is) {
            let _ = rustix::fs::unlink(&self.path);
        }
    }
}

/// What is to be undone when the other side of the line is gone.
fn wait(line: &OwnedFd) -> Told {
    let mut told = Told::default();
    let mut what = [0; TOLD_MAX_BYTES];
    loop {
        let received = match socket::receive(line, &mut what, 0) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Ok(received) => received,
            Err(_) => return told,
        };
        match what[..received.len.min(TOLD_MAX_BYTES)].split_first() {
            Some((&PROCESS, [])) => told.processes.extend(received.rights),
            Some((&FILE, name)) => {
                let path = PathBuf::from(OsStr::from_bytes(name));
                let file = received.rights.into_iter().next();
                told.files.extend(file.map(|file| Named { file, path }));
            }
            Some((&MOUNT, rest)) => {
                let Some((id, point)) = rest.split_first_chunk() else {
                    return told;
                };
                told.mounts.push(Mount {
                    point: PathBuf::from(OsStr::from_bytes(point)),
                    id: u64::from_ne_bytes(*id),
                });
            }
            Some((&DISMISSED, [])) => return Told::default(),
            _ => return told,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use sys::new_file::NewFile;

    use super::*;

    /// What a reaper removes that was told of files, and then how it ends.
    fn removed(paths: &[&Path], is_dismissed: bool) -> Vec<bool> {
        let kind = SocketType::SEQPACKET;
        let pair = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
        let (theirs, own) = pair.expect("a pair");
        let reaper = Reaper::of(own);
        for path in paths {
            let mut new = NewFile::create(path, 0o600).expect("made");
            reaper.clear(new.file.as_fd(), path).expect("told");
            let _ = new.name();
        }
        if is_dismissed {
            reaper.dismiss().expect("told");
        }
        drop(reaper);
        wait(&theirs).files.iter().for_each(Named::remove);
        paths.iter().map(|path| !path.exists()).collect()
    }

    #[test]
    fn mount_is_told_with_its_id_and_forgotten_when_all_goes_well() {
        for is_dismissed in [false, true] {
            let kind = SocketType::SEQPACKET;
            let pair = socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
            let (theirs, own) = pair.expect("a pair");
            let reaper = Reaper::of(own);
            let mount = Mount {
                point: PathBuf::from("/srv/guests"),
                id: 0x0102_0304_0506_0708,
            };
            reaper.unmount(&mount).expect("told");
            if is_dismissed {
                reaper.dismiss().expect("told");
            }
            drop(reaper);
            let told = wait(&theirs).mounts;
            assert_eq!(
                told,
                [mount]
                    .into_iter()
                    .filter(|_| !is_dismissed)
                    .collect::<Vec<_>>()
            );
        }
        // Another mount there is left alone.
        let folder = tempfile::tempdir().expect("a folder");
        let other = Mount {
            point: folder.path().to_owned(),
            id: u64::MAX,
        };
        other.unmount();
    }

    #[test]
    fn files_of_who_dies_are_removed_and_no_others() {
        let folder = tempfile::tempdir().expect("a folder");
        let [own, others] = ["own", "others"].map(|name| folder.path().join(name));
        fs::write(&others, "others").expect("written");
        assert_eq!(removed(&[&own, &others], false), [true, false]);
        assert_eq!(fs::read(&others).expect("there"), b"others");
        assert_eq!(removed(&[&own], true), [false]);
    }
}
