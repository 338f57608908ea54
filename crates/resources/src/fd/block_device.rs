//! Block devices: disks, partitions and loop devices that programs read and write as one file.
//!
//! What is on them stays there, as with any file.
//!
//! - What: block devices
//! - Kept: path, offset, flags, and whether nobody else may have it (`O_EXCL`), which is looked up
//!   in the kernel: with bpf(2) and the kernel's description of its types, since Linux 6.9.
//! - At a restore: "…: is another device"; "…: has … bytes, and had … at the dump".
//! - CRIU 4.2: refused without a plugin for it.

use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use prost::Message;
use rustix::fs::{FileType, OFlags, SeekFrom};

use super::place::Place;
use super::regular::inherited;
use super::{DumpContext, Kind, Open, RestoreContext, status, tags};
use crate::kernel::Kernel;
use crate::{Error, Result};

/// See the file.
pub struct BlockDevice;

/// A description of a block device.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// Where its node is.
    #[prost(message, required, tag = "1")]
    place: Place,
    /// Access mode and status flags.
    #[prost(uint32, tag = "2")]
    flags: u32,
    /// The offset in bytes.
    #[prost(uint64, tag = "3")]
    pos: u64,
    /// The device's number.
    #[prost(uint64, tag = "4")]
    device: u64,
    /// Its size in bytes.
    #[prost(uint64, tag = "5")]
    size_bytes: u64,
    /// Whether it was opened with `O_EXCL`, of which the flags do not tell.
    #[prost(bool, tag = "6")]
    exclusive: bool,
}

/// The size of a device in bytes; the offset of `own` is its again afterwards.
fn size_bytes(own: BorrowedFd<'_>, pos: u64) -> rustix::io::Result<u64> {
    let size_bytes = rustix::fs::seek(own, SeekFrom::End(0));
    rustix::fs::seek(own, SeekFrom::Start(pos))?;
    size_bytes
}

/// Whether a description has its device for itself: then the kernel has it stand for the holder.
fn is_exclusive(own: BorrowedFd<'_>) -> bool {
    let Ok(kernel) = Kernel::get() else {
        return false;
    };
    let file = kernel.file(own);
    file.is_ok_and(|file| kernel.private(file).is_ok_and(|holder| holder == file))
}

impl Kind for BlockDevice {
    type Record = Record;
    const TAG: u16 = tags::BLOCK_DEVICE;
    const NAME: &'static str = "block device";

    fn claims(open: &Open<'_>) -> bool {
        open.is_file(FileType::BlockDevice)
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Record> {
        let place = Place::dump(open, cx)?;
        // Of a description of its own: the target's offset is not to move.
        let failed = |error| Error::kernel(format!("ask {} for its size", open.place()), error);
        let again = status::reopen(open.own()?, OFlags::RDONLY)?;
        Ok(Record {
            place,
            flags: open.info.flags,
            pos: open.info.pos,
            device: open.stat.st_rdev,
            size_bytes: size_bytes(again.as_fd(), 0).map_err(failed)?,
            exclusive: is_exclusive(open.own()?),
        })
    }

    fn check(record: &Record) -> Result<()> {
        status::check(Self::NAME, record.flags)?;
        record.place.check(Self::NAME, FileType::BlockDevice)
    }

    fn describe(record: &Record) -> String {
        let alone = if record.exclusive { " exclusive" } else { "" };
        let (place, pos) = (record.place.describe(), record.pos);
        format!("{place} pos={pos}{alone}")
    }

    fn path(record: &Record) -> Option<String> {
        Some(record.place.describe())
    }

    fn open(record: &Record, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let mut flags = status::opening(record.flags);
        flags.set(OFlags::EXCL, record.exclusive);
        let place = record.place.describe();
        let failed = |error| Error::kernel(format!("look at {place}"), error);
        let inherited = inherited(&record.place, cx);
        let file = record.place.open(flags, None, cx)?;
        if inherited {
            return Ok(file);
        }
        if rustix::fs::fstat(&file).map_err(failed)?.st_rdev != record.device {
            let what = format!("{place}: is another device");
            return Err(Error::Mismatch { what });
        }
        let bytes = size_bytes(file.as_fd(), record.pos).map_err(failed)?;
        if bytes != record.size_bytes {
            let before = record.size_bytes;
            let what = format!("{place}: has {bytes} bytes, and had {before} at the dump");
            return Err(Error::Mismatch { what });
        }
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::Mode;
    use rustix::io::Errno;
    use testkit::volumes::Loop;

    use super::super::testing::World;
    use super::*;

    /// A loop device of some blocks, and the file that it is made of.
    fn device() -> (tempfile::NamedTempFile, Loop) {
        let file = tempfile::NamedTempFile::new().expect("a file");
        file.as_file().set_len(1 << 20).expect("room");
        let device = Loop::attach(file.path());
        (file, device)
    }

    fn open(device: &Loop, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        rustix::fs::open(&device.device, OFlags::RDWR | flags, Mode::empty())
    }

    #[test]
    fn offset_and_flags_survive() {
        testkit::needs_root!();
        testkit::needs_program!("losetup");
        let (_file, device) = device();
        let file = open(&device, OFlags::DIRECT).expect("open");
        rustix::fs::seek(&file, SeekFrom::Start(8192)).expect("seek");
        let mut world = World::default();
        let at = world.add(file);
        world.cycle();
        let pos = rustix::fs::seek(world.get(at), SeekFrom::Current(0)).expect("seek");
        assert_eq!(pos, 8192);
        assert!(world.describe(at).ends_with(" pos=8192"));
    }

    #[test]
    fn who_has_it_alone_has_it_alone_again() {
        testkit::needs_root!();
        testkit::needs_program!("losetup");
        testkit::needs_kernel_memory!();
        let (_file, device) = device();
        let mut world = World::default();
        let at = world.add(open(&device, OFlags::EXCL).expect("open"));
        world.cycle();
        let told = world.describe(at);
        assert!(told.ends_with(" exclusive"), "{told}");
        open(&device, OFlags::empty()).expect("who does not ask for it alone may");
        let error = open(&device, OFlags::EXCL).expect_err("somebody has it alone");
        assert_eq!(error, Errno::BUSY);
    }

    #[test]
    fn another_size_is_refused() {
        testkit::needs_root!();
        testkit::needs_program!("losetup");
        let (file, device) = device();
        let mut world = World::default();
        world.add(open(&device, OFlags::empty()).expect("open"));
        world.dump().expect("dump");
        file.as_file().set_len(1 << 21).expect("room");
        let grown = std::process::Command::new("losetup")
            .args(["-c".as_ref(), device.device.as_os_str()])
            .status();
        assert!(grown.expect("it runs").success());
        let error = world.restore().expect_err("it has grown").to_string();
        let want = "has 2097152 bytes, and had 1048576 at the dump";
        assert!(error.contains(want), "{error}");
    }
}
