//! Names that a restore makes in the file system and that go again if it fails, also if it is
//! killed: a process apart makes them, keeps them in mind, and removes them when the restorer ends
//! without having said that they stay.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::io::{Errno, read, retry_on_intr, write};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};

use crate::{Error, Result};

/// The first byte of a message from the restorer; a path follows `FILE` and `FOLDER`.
const FILE: u8 = b'f';
const FOLDER: u8 = b'd';
const KEEP: u8 = b'k';
const REMOVE: u8 = b'r';
/// A byte and the longest path.
const MESSAGE_BYTES: usize = 1 + 4096;

/// The process that has made them. Dropped, it removes them, unless they were kept.
#[derive(Debug)]
pub(crate) struct Names(Arc<OwnedFd>);

impl Names {
    /// # Errors
    /// [`Error::Kernel`] when no process can be made.
    pub fn begin() -> Result<Self> {
        let failed = |e: io::Error| Error::kernel("cannot make a process for new files", e);
        let kind = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
        let pair = socketpair(AddressFamily::UNIX, kind.0, kind.1, None);
        let (own, theirs) = pair.map_err(|e| failed(e.into()))?;
        let kept = [theirs.as_raw_fd()];
        sys::fork::daemonize(&kept, c"stillframe-new", || serve(&theirs)).map_err(failed)?;
        Ok(Self(Arc::new(own)))
    }

    /// Makes an empty file or a directory, for nobody else yet; tells whether there was none.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn make(&self, path: &Path, is_folder: bool) -> Result<bool> {
        let kind = if is_folder { FOLDER } else { FILE };
        let message = [&[kind], path.as_os_str().as_bytes()].concat();
        let failed = |e: io::Error| Error::kernel(format!("cannot make {}", path.display()), e);
        if message.len() > MESSAGE_BYTES {
            return Err(failed(Errno::NAMETOOLONG.into()));
        }
        match ask(&self.0, &message).map_err(failed)? {
            0 => Ok(true),
            errno if errno == Errno::EXIST.raw_os_error() => Ok(false),
            errno => Err(failed(io::Error::from_raw_os_error(errno))),
        }
    }

    /// The descriptor by which [`Names::keeper`] says that they stay.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }

    /// Says, when it is called, that they stay.
    pub fn keeper(&self) -> impl FnOnce() + use<> {
        let own = self.0.clone();
        move || {
            let _ = retry_on_intr(|| write(&own, &[KEEP]));
        }
    }
}

impl Drop for Names {
    fn drop(&mut self) {
        // Where they were kept, nobody answers. Others may have copies of the descriptor, so its
        // end alone says nothing.
        let _ = ask(&self.0, &[REMOVE]);
    }
}

fn ask(own: &OwnedFd, message: &[u8]) -> io::Result<i32> {
    let mut answer = [0; 4];
    // A write to a process that has ended is an error, and no signal: what is written is a packet.
    let flags = rustix::net::SendFlags::NOSIGNAL;
    retry_on_intr(|| rustix::net::send(own, message, flags))?;
    match retry_on_intr(|| read(own, &mut answer))? {
        4 => Ok(i32::from_ne_bytes(answer)),
        _ => Err(io::ErrorKind::UnexpectedEof.into()),
    }
}

/// A name that was made, and the file that it is.
struct Made {
    path: PathBuf,
    inode: (u64, u64),
    is_folder: bool,
}

/// The life of the process that makes them.
fn serve(own: &OwnedFd) {
    let mut made = Vec::new();
    let mut message = [0; MESSAGE_BYTES];
    loop {
        let len = retry_on_intr(|| read(own, &mut message)).unwrap_or(0);
        let answer = match message[..len].split_first() {
            Some((&KEEP, _)) => return,
            Some((&kind @ (FILE | FOLDER), path)) => {
                let path = Path::new(OsStr::from_bytes(path));
                match make(path, kind == FOLDER) {
                    Ok(one) => {
                        made.push(one);
                        0
                    }
                    Err(error) => error.raw_os_error().unwrap_or(Errno::IO.raw_os_error()),
                }
            }
            Some(_) | None => {
                made.iter().rev().for_each(remove);
                let _ = write(own, &0i32.to_ne_bytes());
                return;
            }
        };
        if write(own, &answer.to_ne_bytes()).is_err() {
            made.iter().rev().for_each(remove);
            return;
        }
    }
}

fn make(path: &Path, is_folder: bool) -> io::Result<Made> {
    if is_folder {
        fs::DirBuilder::new().mode(0o700).create(path)?;
    } else {
        let mut options = fs::File::options();
        options
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)?;
    }
    let stat = fs::symlink_metadata(path)?;
    Ok(Made {
        path: path.to_owned(),
        inode: (stat.dev(), stat.ino()),
        is_folder,
    })
}

fn remove(made: &Made) {
    let stat = fs::symlink_metadata(&made.path);
    if stat.is_ok_and(|stat| (stat.dev(), stat.ino()) == made.inode) {
        let _ = match made.is_folder {
            true => fs::remove_dir(&made.path),
            false => fs::remove_file(&made.path),
        };
    }
}

#[cfg(test)]
mod tests {
    use testkit::wait::{SOON, wait_until};

    use super::*;

    #[test]
    fn names_go_unless_they_are_kept() {
        let folder = tempfile::tempdir().expect("a folder");
        let [above, there] = ["above", "there"].map(|name| folder.path().join(name));
        let file = above.join("file");
        fs::write(&there, "text").expect("write");
        let make = || {
            let names = Names::begin().expect("a process");
            assert!(names.make(&above, true).expect("it can be made"));
            assert!(names.make(&file, false).expect("it can be made"));
            assert!(!names.make(&there, false).expect("it is there"));
            names
        };
        drop(make());
        assert!(!above.exists() && there.exists());
        // A killed restorer says nothing.
        let names = make();
        let killed = Arc::clone(&names.0);
        std::mem::forget(names);
        assert!(file.exists());
        // This is the only descriptor now but for the one that was forgotten.
        rustix::net::shutdown(&killed, rustix::net::Shutdown::Both).expect("shut down");
        wait_until("the names to go", SOON, || !above.exists());
        assert!(there.exists());
        let names = make();
        names.keeper()();
        drop(names);
        assert!(file.exists());
    }

    #[test]
    fn another_file_of_that_name_stays() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("file");
        let names = Names::begin().expect("a process");
        names.make(&file, false).expect("it can be made");
        fs::rename(&file, folder.path().join("moved")).expect("rename");
        fs::write(&file, "another").expect("write");
        drop(names);
        assert_eq!(fs::read(&file).expect("it is there"), b"another");
    }
}
