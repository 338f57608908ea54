//! A simulated rotating disk: a file by FUSE whose reads take the time that such a disk takes.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, UNIX_EPOCH};

use fuser::{
    FileAttr, FileType, Filesystem, ReplyAttr, ReplyData, ReplyEntry, Request, Session, SessionACL,
};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen,
};

use super::place::Device;
use crate::error::{Result, file_error, kernel_error};

/// What moving the heads a little takes, and half a turn at 7,200 turns a minute.
const SEEK: Duration = Duration::from_micros(1_000 + 4_170);
/// How fast what passes below the heads is read.
const BYTES_PER_S: f64 = 150e6;
/// How far behind its time a disk may be that was waited for a little too long, which makes up for
/// it.
const LATE: Duration = Duration::from_millis(5);

const NAME: &str = "disk";
const FOLDER: u64 = 1;
const FILE: u64 = 2;
const VALID: Duration = Duration::from_secs(86_400);

/// A disk; it is gone when this is dropped and nobody uses it any more.
pub struct RotatingDisk {
    /// The mount, which is nowhere.
    mount: OwnedFd,
}

impl RotatingDisk {
    /// A disk that has the bytes of a file.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn with(file: &Path) -> Result<Self> {
        let bytes = File::open(file).map_err(file_error("open", file))?;
        let len_bytes = bytes.metadata().map_err(file_error("look at", file))?.len();
        let fuse = Path::new("/dev/fuse");
        let device = File::options().read(true).write(true).open(fuse);
        let device = OwnedFd::from(device.map_err(file_error("open", fuse))?);
        let make = || {
            let fs = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
            let number = device.as_raw_fd().to_string();
            fsconfig_set_string(fs.as_fd(), "source", NAME)?;
            fsconfig_set_string(fs.as_fd(), "fd", &number)?;
            fsconfig_set_string(fs.as_fd(), "rootmode", "40000")?;
            fsconfig_set_string(fs.as_fd(), "user_id", "0")?;
            fsconfig_set_string(fs.as_fd(), "group_id", "0")?;
            fsconfig_set_flag(fs.as_fd(), "ro")?;
            fsconfig_create(fs.as_fd())?;
            let attributes = MountAttrFlags::MOUNT_ATTR_RDONLY;
            fsmount(fs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)
        };
        let mount = make().map_err(file_error::<Errno>("mount by", fuse))?;
        let disk = Disk {
            bytes,
            len_bytes,
            head: 0,
            due: Instant::now(),
        };
        let mut session = Session::from_fd(disk, device, SessionACL::Owner);
        let serving = std::thread::Builder::new().spawn(move || session.run());
        serving.map_err(kernel_error("serve a disk"))?;
        Ok(Self { mount })
    }

    /// It as a device that is known to rotate, and of which little is read ahead.
    ///
    /// # Errors
    /// When there is none.
    pub fn attach(&self, scheduler: &str) -> Result<Device> {
        let (pid, fd) = (std::process::id(), self.mount.as_raw_fd());
        let path = PathBuf::from(format!("/proc/{pid}/fd/{fd}/{NAME}"));
        let device = Device::attach(&path)?;
        device.set("rotational", "1")?;
        device.set("read_ahead_kb", "32")?;
        device.set("scheduler", scheduler)?;
        Ok(device)
    }
}

/// What is served; one read after the other, as there is one arm with heads.
struct Disk {
    bytes: File,
    len_bytes: u64,
    /// Where the heads are.
    head: u64,
    /// When it is done with what it was asked for.
    due: Instant,
}

impl Disk {
    /// Takes the time that a read takes.
    fn turn(&mut self, at: u64, len: u64) {
        let passing = |bytes: u64| Duration::from_secs_f64(bytes as f64 / BYTES_PER_S);
        // What is just ahead comes below the heads sooner than they are anywhere else.
        let moving = match at.checked_sub(self.head) {
            Some(ahead) => SEEK.min(passing(ahead)),
            None => SEEK,
        };
        self.head = at + len;
        let now = Instant::now();
        let free = self.due.max(now.checked_sub(LATE).unwrap_or(now));
        self.due = free + moving + passing(len);
        std::thread::sleep(self.due.saturating_duration_since(now));
    }

    fn facts(&self, number: u64) -> Option<FileAttr> {
        let (kind, perm, size) = match number {
            FOLDER => (FileType::Directory, 0o500, 0),
            FILE => (FileType::RegularFile, 0o400, self.len_bytes),
            _ => return None,
        };
        Some(FileAttr {
            ino: number,
            size,
            blocks: size / 512,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind,
            perm,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }
}

impl Filesystem for Disk {
    fn lookup(&mut self, _: &Request<'_>, parent: u64, name: &OsStr, reply: ReplyEntry) {
        let is_it = parent == FOLDER && name == NAME;
        match self.facts(FILE).filter(|_| is_it) {
            Some(facts) => reply.entry(&VALID, &facts, 0),
            None => reply.error(Errno::NOENT.raw_os_error()),
        }
    }

    fn getattr(&mut self, _: &Request<'_>, number: u64, _: Option<u64>, reply: ReplyAttr) {
        match self.facts(number) {
            Some(facts) => reply.attr(&VALID, &facts),
            None => reply.error(Errno::NOENT.raw_os_error()),
        }
    }

    fn read(
        &mut self,
        _: &Request<'_>,
        _: u64,
        _: u64,
        at_bytes: i64,
        len: u32,
        _: i32,
        _: Option<u64>,
        reply: ReplyData,
    ) {
        let at_bytes = at_bytes.cast_unsigned();
        let len = self.len_bytes.saturating_sub(at_bytes).min(len.into());
        let mut bytes = vec![0; len as usize];
        self.turn(at_bytes, len);
        match self.bytes.read_exact_at(&mut bytes, at_bytes) {
            Ok(()) => reply.data(&bytes),
            Err(_) => reply.error(Errno::IO.raw_os_error()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn far_reads_take_longer_than_near_ones() {
        let file = tempfile::tempfile().expect("a file");
        let mut disk = Disk {
            bytes: file,
            len_bytes: 1 << 30,
            head: 0,
            due: Instant::now(),
        };
        let took = |disk: &mut Disk, at| {
            let before = disk.due.max(Instant::now());
            disk.turn(at, 4096);
            disk.due.saturating_duration_since(before)
        };
        assert!(took(&mut disk, 0) < SEEK / 2);
        assert!(took(&mut disk, 8192) < SEEK / 2);
        assert!(took(&mut disk, 500 << 20) > SEEK / 2);
        assert!(took(&mut disk, 0) > SEEK / 2);
    }
}
