//! An image as a directory that is mounted: a read-only file by FUSE, and the file system in it.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::path::Path;
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    FileAttr, FileType, Filesystem, ReplyAttr, ReplyData, ReplyDirectory, ReplyEntry, ReplyOpen,
    Request, Session, SessionACL,
};
use guard::{Child, Helper, Mount, UndoList};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, StatxFlags, openat, statx};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, fsconfig_create, fsconfig_set_flag,
    fsconfig_set_string, fsmount, fsopen, move_mount,
};
use store::Images;
use sys::loop_device::{Access, attach_loop};

use crate::place::OpenImage;
use crate::read_at::ImageSpace;
use crate::{Error, ReadAt, Result};

/// The name of the file.
const NAME: &str = "volume.img";
/// Numbers of the directory and of the file in it.
const FOLDER: u64 = 1;
const FILE: u64 = 2;
/// `FOPEN_NOFLUSH` of linux/fuse.h: there is nothing to be written when the file is closed.
const FOPEN_NOFLUSH: u32 = 1 << 5;
/// An image never changes.
const VALID: Duration = Duration::from_secs(86_400);

/// An image that is mounted; unmounted when this is dropped, and when the process dies.
#[derive(Debug)]
pub struct MountedImage {
    mount: Mount,
    /// Whether files of the file system are seen, and not the file with it.
    pub has_files: bool,
    /// Ends after the mount did.
    _undo: UndoList,
    /// What holds the file while its file system is mounted.
    _file: Option<OwnedFd>,
    _serving: Server,
}

/// Mounts the image in `images` on the directory `point`: its files, where this kernel mounts its
/// file system, or the file system as one file; that anyhow where `as_file`.
///
/// # Errors
/// [`Error::Unfit`], [`Error::Image`]; [`Error::File`] where it cannot be mounted. Nothing is
/// mounted then.
pub fn mount(images: &Images, point: &Path, as_file: bool) -> Result<MountedImage> {
    let opened = OpenImage::open(images)?;
    let point = point
        .canonicalize()
        .map_err(Error::file("look at", point))?;
    let (file, serving) = serve(opened)?;
    let files = match as_file {
        true => None,
        false => match inside(&file) {
            Ok(files) => Some(files),
            Err(error) => {
                log::info!("the file system is shown as a file: {error}");
                None
            }
        },
    };
    let has_files = files.is_some();
    let shown = files.as_ref().unwrap_or(&file);
    let id = id_of(shown).map_err(Error::file("look at", &point))?;
    let mount = Mount { point, id };
    let undo = watch(&mount)?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    let moved = move_mount(shown, "", CWD, &mount.point, flags);
    moved.map_err(Error::file("mount on", &mount.point))?;
    // Where it is what is mounted there, nobody could unmount it as long as it is held.
    let file = has_files.then_some(file);
    Ok(MountedImage {
        mount,
        has_files,
        _undo: undo,
        _file: file,
        _serving: serving,
    })
}

impl MountedImage {
    /// Tells whether it is still mounted there.
    pub fn is_there(&self) -> bool {
        self.mount.is_there()
    }
}

impl Drop for MountedImage {
    fn drop(&mut self) {
        if self.mount.unmount().is_err() {
            let point = self.mount.point.display();
            log::warn!("{point} is in use, whose files end now");
        }
    }
}

/// Has a mount go if this process dies: from a process of one thread, and before the mount is
/// there.
///
/// # Errors
/// [`Error::File`].
pub fn watch(mount: &Mount) -> Result<UndoList> {
    let undo = UndoList::start(&[]).and_then(|undo| {
        undo.add_mount(mount)?;
        Ok(undo)
    });
    undo.map_err(Error::file("watch", &mount.point))
}

/// The id of a mount that is nowhere yet.
pub fn id_of(mount: &OwnedFd) -> rustix::io::Result<u64> {
    let facts = statx(mount, "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?;
    Ok(facts.stx_mnt_id)
}

/// The process that answers for a mounted file, and that uses nothing of it. A process that used it
/// would wait for itself when it is killed (`fuse_flush`), or when it reads the loop device.
#[derive(Debug)]
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // It has ended if nobody uses the file any more.
        self.0.kill();
    }
}

/// Serves a directory with the image as its only file, in a mount that is nowhere.
fn serve(opened: OpenImage) -> Result<(OwnedFd, Server)> {
    let device = Path::new("/dev/fuse");
    let mut options = File::options();
    let fd = options.read(true).write(true).open(device);
    let fd = OwnedFd::from(fd.map_err(Error::file("open", device))?);
    let make = || {
        let fs = fsopen("fuse", FsOpenFlags::FSOPEN_CLOEXEC)?;
        let number = fd.as_raw_fd().to_string();
        let ids = (rustix::process::getuid(), rustix::process::getgid());
        fsconfig_set_string(fs.as_fd(), "source", "stillframe")?;
        fsconfig_set_string(fs.as_fd(), "fd", &number)?;
        fsconfig_set_string(fs.as_fd(), "rootmode", "40000")?;
        fsconfig_set_string(fs.as_fd(), "user_id", ids.0.as_raw().to_string())?;
        fsconfig_set_string(fs.as_fd(), "group_id", ids.1.as_raw().to_string())?;
        fsconfig_set_flag(fs.as_fd(), "ro")?;
        fsconfig_create(fs.as_fd())?;
        fsmount(fs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes())
    };
    let mount = make().map_err(Error::file::<Errno>("mount by", device))?;
    Ok((mount, start(opened, fd)?))
}

/// Starts the process that answers on `fd`, which ends with this one, and when the mount does.
fn start(opened: OpenImage, fd: OwnedFd) -> Result<Server> {
    let len_bytes = opened.state.len_bytes;
    opened.base.reader.open_ancestors()?;
    let files = opened.base.reader.descriptors();
    let files = files
        .ok_or_else(|| Error::Unfit("only an image in a directory can be mounted".to_owned()))?;
    let image = ImageSpace::new(opened.base.reader.clone(), opened.space, len_bytes);
    let helper = Helper::new(c"stillframe-fuse")
        .keep(files.iter().map(AsFd::as_fd))
        .keep([fd.as_fd()])
        .log(Some(2))
        .tied();
    let child = helper.start(|_| {
        let mut session = Session::from_fd(FuseImage { image, len_bytes }, fd, SessionACL::Owner);
        if let Err(error) = session.run() {
            log::debug!("the mount has ended: {error}");
        }
    });
    child.map(Server).map_err(Error::file("serve", "/dev/fuse"))
}

/// Nobody gets rights or devices by an image.
fn attributes() -> MountAttrFlags {
    MountAttrFlags::MOUNT_ATTR_RDONLY
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
}

/// Mounts the file system in the file, nowhere yet.
fn inside(folder: &OwnedFd) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = openat(folder, NAME, flags, Mode::empty());
    let file = file.map_err(Error::file("open", NAME))?;
    // The device goes when the last of this function and the mount is gone.
    let attached = attach_loop(file.as_fd(), Access::Read);
    let (_device, path) = attached.map_err(Error::file("attach", NAME))?;
    let make = || {
        let fs = fsopen("ext4", FsOpenFlags::FSOPEN_CLOEXEC)?;
        fsconfig_set_string(fs.as_fd(), "source", path.as_path())?;
        fsconfig_set_flag(fs.as_fd(), "ro")?;
        fsconfig_set_flag(fs.as_fd(), "noload")?;
        fsconfig_create(fs.as_fd())?;
        fsmount(fs.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes())
    };
    make().map_err(Error::file::<Errno>("mount", path.clone()))
}

/// The file system of FUSE.
struct FuseImage {
    image: ImageSpace,
    len_bytes: u64,
}

impl FuseImage {
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
            uid: rustix::process::getuid().as_raw(),
            gid: rustix::process::getgid().as_raw(),
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }
}

impl Filesystem for FuseImage {
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

    fn open(&mut self, _: &Request<'_>, _: u64, _: i32, reply: ReplyOpen) {
        reply.opened(0, FOPEN_NOFLUSH);
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
        match self.image.read_at(at_bytes, &mut bytes) {
            Ok(()) => reply.data(&bytes),
            Err(error) => {
                log::error!("{len} bytes at offset {at_bytes} of the volume: {error}");
                reply.error(Errno::IO.raw_os_error());
            }
        }
    }

    fn readdir(&mut self, _: &Request<'_>, _: u64, _: u64, at: i64, mut reply: ReplyDirectory) {
        let all = [
            (FOLDER, FileType::Directory, "."),
            (FOLDER, FileType::Directory, ".."),
            (FILE, FileType::RegularFile, NAME),
        ];
        let skip = usize::try_from(at).unwrap_or(usize::MAX);
        for (next, (number, kind, name)) in (1..).zip(all).skip(skip) {
            if reply.add(number, next, kind, name) {
                break;
            }
        }
        reply.ok();
    }
}
