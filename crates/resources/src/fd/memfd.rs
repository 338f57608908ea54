//! Files in memory with seals: memfd_create(2).
//!
//! - Kept: name, contents, size, seals, owner, permissions, huge pages, and which description may
//!   still be executed beside it.
//! - CRIU 4.2: name, contents, seals, owner, permissions, huge pages.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;

use prost::Message;
use rustix::fs::{FileType, Gid, MemfdFlags, Mode, OFlags, SealFlags, SeekFrom, Uid};
use rustix::io::Errno;

use super::ghost::first_of_inode;
use super::{DumpContext, Kind, Open, RestoreContext, SharedMemory, Stage, status, tags};
use crate::{Allow, Error, Result};

/// See the file.
pub struct Memfd;

/// A file in memory.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// The first description (by id) of this file; those with the same number share it.
    #[prost(uint32, tag = "1")]
    first: u32,
    /// Access mode and status flags.
    #[prost(uint32, tag = "2")]
    flags: u32,
    /// The offset in bytes.
    #[prost(uint64, tag = "3")]
    pos: u64,
    /// The name.
    #[prost(bytes = "vec", tag = "4")]
    name: Vec<u8>,
    /// Permissions, as in `st_mode`.
    #[prost(uint32, tag = "5")]
    mode: u32,
    /// The owner.
    #[prost(uint32, tag = "6")]
    uid: u32,
    /// The owning group.
    #[prost(uint32, tag = "7")]
    gid: u32,
    /// The size in bytes.
    #[prost(uint64, tag = "8")]
    size_bytes: u64,
    /// What may not be done to it (`F_GET_SEALS`).
    #[prost(uint32, tag = "9")]
    seals: u32,
    /// The size of its pages where they are huge pages.
    #[prost(uint64, tag = "10")]
    huge_page_bytes: u64,
    /// The space with its contents; on the first description only, and not when it is empty.
    #[prost(uint32, optional, tag = "11")]
    space: Option<u32>,
    /// Whether this is the description by which the seals are set that come last.
    #[prost(bool, tag = "12")]
    seals_last: bool,
    /// Whether this is the description that memfd_create(2) made, or a mapping of it. Unlike those
    /// that are opened for writing, it does not keep the file from being executed.
    #[prost(bool, tag = "13")]
    made: bool,
}

/// Set when all tasks have their mappings: it lets writable ones that exist already be.
const LATE: SealFlags = SealFlags::FUTURE_WRITE;
/// `MFD_EXEC`: without it or its opposite, the kernel complains about who asks.
const MFD_EXEC: MemfdFlags = MemfdFlags::from_bits_retain(0x10);

/// The name in a link "/memfd:NAME (deleted)".
fn name(link: &[u8]) -> Option<&[u8]> {
    link.strip_prefix(b"/memfd:")?.strip_suffix(b" (deleted)")
}

/// The device of all files in memory that no mount shows.
pub(super) fn device() -> Option<u64> {
    static DEVICE: OnceLock<Option<u64>> = OnceLock::new();
    *DEVICE.get_or_init(|| {
        let own = rustix::fs::memfd_create("device", MemfdFlags::CLOEXEC).ok()?;
        Some(rustix::fs::fstat(own).ok()?.st_dev)
    })
}

/// The size of a file's pages where they are huge, in bytes.
pub(super) fn huge_page_bytes(open: &Open<'_>) -> Option<u64> {
    let block_bytes = u64::try_from(open.stat.st_blksize).ok()?;
    (block_bytes >= 1 << 16 && Some(open.stat.st_dev) != device()).then_some(block_bytes)
}

impl Kind for Memfd {
    type Record = Record;
    const TAG: u16 = tags::MEMFD;
    const NAME: &'static str = "memfd";

    fn claims(open: &Open<'_>) -> bool {
        name(&open.link).is_some()
            && open.stat.st_nlink == 0
            && FileType::from_raw_mode(open.stat.st_mode) == FileType::RegularFile
            && (Some(open.stat.st_dev) == device() || huge_page_bytes(open).is_some())
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Record> {
        let name = name(&open.link).ok_or_else(|| open.unsupported("", None))?;
        let own = open.own()?;
        let seals = rustix::fs::fcntl_get_seals(own)
            .map_err(|error| Error::kernel(format!("get the seals of {}", open.place()), error))?;
        let mut record = Record {
            first: first_of_inode(open, cx),
            flags: open.info.flags,
            pos: open.info.pos,
            name: name.to_vec(),
            mode: open.stat.st_mode,
            uid: open.stat.st_uid,
            gid: open.stat.st_gid,
            size_bytes: open.stat.st_size.cast_unsigned(),
            seals: seals.bits(),
            huge_page_bytes: huge_page_bytes(open).unwrap_or(0),
            space: None,
            seals_last: false,
            made: is_made(open, cx),
        };
        if record.first == open.id.0 && record.size_bytes > 0 {
            let file = status::reopen(own, OFlags::RDONLY)?;
            record.space = Some(cx.store(file, record.size_bytes)?);
        }
        let inode = (open.stat.st_dev, open.stat.st_ino);
        let same = cx.all().iter();
        let same = same.filter(|other| (other.stat.st_dev, other.stat.st_ino) == inode);
        // One that may add seals, if there is any.
        let sealer = same.min_by_key(|other| !writes(other));
        record.seals_last = sealer.is_none_or(|other| other.id == open.id);
        Ok(record)
    }

    fn check(record: &Record) -> Result<()> {
        status::check(Self::NAME, record.flags)?;
        check_page_bytes(Self::NAME, record.huge_page_bytes)
    }

    fn describe(record: &Record) -> String {
        let name = String::from_utf8_lossy(&record.name).into_owned();
        let seals = SealFlags::from_bits_retain(record.seals);
        format!("{name} size={} seals={seals:?}", record.size_bytes)
    }

    fn memory(record: &Record) -> Result<Option<SharedMemory>> {
        Ok(Some(SharedMemory {
            tag: Self::TAG,
            first: record.first,
            bytes: record.size_bytes,
            huge_page_bytes: recorded_page_bytes(record.huge_page_bytes),
            space: record.space,
            takes_all: false,
            is_there: false,
        }))
    }

    fn open(record: &Record, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let flags = status::opening(record.flags);
        let key = (tags::MEMFD, u64::from(record.first));
        if !cx.shared().contains_key(&key) {
            let made = record.create(cx)?;
            cx.shared().insert(key, vec![made]);
        }
        let holder = cx.shared()[&key][0].as_fd();
        let own = if record.made {
            let own = status::dup(holder)?;
            // A mapping of it says nothing of these.
            if flags.intersects(status::SETTABLE) {
                status::set(&own, flags)?;
            }
            own
        } else {
            status::reopen(holder, flags)?
        };
        record.seek(&own)?;
        Ok(own)
    }

    fn finish(record: &Record, _own: BorrowedFd<'_>, cx: &mut dyn RestoreContext) -> Result<()> {
        let seals = SealFlags::from_bits_retain(record.seals);
        let now = if seals.contains(LATE) && !seals.contains(SealFlags::WRITE) {
            // F_SEAL_SEAL would keep the late one out.
            seals.difference(LATE | SealFlags::SEAL)
        } else {
            seals
        };
        // All descriptions of the file say the same; sealing is done when the first one comes.
        let holder = cx.shared().remove(&(tags::MEMFD, u64::from(record.first)));
        if let Some(holder) = holder.filter(|_| !now.is_empty()) {
            rustix::fs::fcntl_add_seals(&holder[0], now)
                .map_err(|error| Error::kernel(record.doing("seal"), error))?;
        }
        Ok(())
    }

    /// Adds the late seals when all tasks have their mappings, whoever has the file: a task, a
    /// mapping alone, or a message in flight.
    fn stages(record: &Record, _allow: &Allow) -> &'static [Stage] {
        match record.seals_last {
            true => &[Stage::Enable],
            false => &[],
        }
    }

    fn act(record: &Record, _stage: Stage, own: BorrowedFd<'_>, _allow: &Allow) -> Result<()> {
        let seals = SealFlags::from_bits_retain(record.seals);
        if !record.seals_last || !seals.contains(LATE) || seals.contains(SealFlags::WRITE) {
            return Ok(());
        }
        let known = rustix::fs::fcntl_get_seals(own)
            .map_err(|error| Error::kernel(record.doing("get the seals of"), error))?;
        if known.contains(seals) {
            return Ok(());
        }
        let flags = OFlags::from_bits_retain(record.flags);
        let add = |file: BorrowedFd<'_>| {
            rustix::fs::fcntl_add_seals(file, seals)
                .map_err(|error| Error::kernel(record.doing("seal"), error))
        };
        if flags & OFlags::RWMODE == OFlags::RDONLY {
            return add(status::reopen(own, OFlags::RDWR)?.as_fd());
        }
        add(own)
    }
}

/// Whether `open` is taken for the description that memfd_create(2) made: the kernel does not tell.
/// That one reads and writes, and is nearly always the one with the lowest number. A file that is
/// mapped for writing is mapped by it.
fn is_made(open: &Open<'_>, cx: &dyn DumpContext) -> bool {
    let inode = |open: &Open<'_>| (open.stat.st_dev, open.stat.st_ino);
    let both = |open: &Open<'_>| open.info.oflags() & OFlags::RWMODE == OFlags::RDWR;
    let first = || {
        let mut same = cx.all().iter().filter(|other| inode(other) == inode(open));
        same.find(|other| both(other) && !is_mapping(other))
    };
    both(open) && (is_mapping(open) || first().is_some_and(|first| first.id == open.id))
}

/// Whether no task has a descriptor of it, and it is in flight nowhere: what is open is open with
/// O_LARGEFILE here.
fn is_mapping(open: &Open<'_>) -> bool {
    open.fd < 0 && !open.info.oflags().contains(OFlags::LARGEFILE)
}

/// Whether seals can be added through `open`.
fn writes(open: &Open<'_>) -> bool {
    open.info.oflags() & OFlags::RWMODE != OFlags::RDONLY
}

impl Record {
    fn doing(&self, what: &str) -> String {
        format!("{what} memfd {}", String::from_utf8_lossy(&self.name))
    }

    /// The file with its contents, without seals.
    fn create(&self, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let kernel = |error: Errno| Error::kernel(self.doing("make"), error);
        let mut how = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let huge = recorded_page_bytes(self.huge_page_bytes);
        if let Some(page_bytes) = huge {
            let size = page_bytes.trailing_zeros() << 26;
            how |= MemfdFlags::HUGETLB | MemfdFlags::from_bits_retain(size);
        }
        let make = |how| rustix::fs::memfd_create(self.name.as_slice(), how);
        let own = match make(how | MFD_EXEC) {
            // A kernel that does not know the flag yet, or has it forbidden.
            Err(Errno::INVAL | Errno::ACCESS) => make(how),
            result => result,
        };
        let own = own.map_err(kernel)?;
        rustix::fs::ftruncate(&own, self.size_bytes).map_err(kernel)?;
        match (self.space, huge) {
            (Some(space), Some(page_bytes)) => {
                load_huge(space, own.as_fd(), (self.size_bytes, page_bytes), cx)?;
            }
            (Some(space), None) => {
                cx.load(space, own.as_fd())?;
                let cut = rustix::fs::ftruncate(&own, self.size_bytes);
                cut.map_err(|error| Error::kernel(self.doing("cut"), error))?;
            }
            (None, _) => {}
        }
        let maker = (rustix::process::geteuid(), rustix::process::getegid());
        let owner = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        if maker != owner {
            rustix::fs::fchown(&own, Some(owner.0), Some(owner.1)).map_err(kernel)?;
        }
        rustix::fs::fchmod(&own, Mode::from_raw_mode(self.mode)).map_err(kernel)?;
        Ok(own)
    }

    fn seek(&self, own: &OwnedFd) -> Result<()> {
        if self.pos != 0 {
            rustix::fs::seek(own, SeekFrom::Start(self.pos))
                .map_err(|error| Error::kernel(self.doing("seek"), error))?;
        }
        Ok(())
    }
}

/// Refuses a size of huge pages that no kernel has; 0 is none.
///
/// # Errors
/// [`Error::Corrupt`].
pub(super) fn check_page_bytes(record: &str, page_bytes: u64) -> Result<()> {
    const SIZES: std::ops::RangeInclusive<u64> = 1 << 16..=1 << 34;
    match page_bytes {
        0 => Ok(()),
        _ if page_bytes.is_power_of_two() && SIZES.contains(&page_bytes) => Ok(()),
        _ => {
            let what = format!("has pages of {page_bytes} bytes");
            Err(Error::corrupt(record, what))
        }
    }
}

/// The size of huge pages that a record has, if it has one.
pub(super) fn recorded_page_bytes(page_bytes: u64) -> Option<u64> {
    Some(page_bytes).filter(|bytes| *bytes != 0)
}

/// Fills a file of huge pages. They can only be written by mapping them: by way of a file with
/// small ones.
pub(super) fn load_huge(
    space: u32,
    own: BorrowedFd<'_>,
    (size_bytes, page_bytes): (u64, u64),
    cx: &mut dyn RestoreContext,
) -> Result<()> {
    let failed = |error: std::io::Error| Error::kernel("fill huge pages", error);
    let small = rustix::fs::memfd_create("small pages", MemfdFlags::CLOEXEC);
    let small = small.map_err(|error| failed(error.into()))?;
    cx.load(space, small.as_fd())?;
    let mut page = vec![0; usize::try_from(page_bytes).expect("64 bits")];
    let mut at = 0;
    while at < size_bytes {
        let len = rustix::io::pread(&small, &mut page[..], at);
        let len = len.map_err(|error| failed(error.into()))?;
        if page[..len].iter().any(|byte| *byte != 0) {
            page[len..].fill(0);
            sys::memfd::write_mapped(own, at, &page).map_err(failed)?;
        }
        at += page_bytes;
    }
    Ok(())
}

/// How the kernel names memory of memfd_secret(2).
pub(crate) const SECRET_LINK: &[u8] = b"/secretmem (deleted)";

/// True if a file with the name [`SECRET_LINK`] on this device is memory of memfd_secret(2).
pub(crate) fn is_secret(device: u64) -> bool {
    static DEVICE: OnceLock<Option<u64>> = OnceLock::new();
    let of_secrets = DEVICE.get_or_init(|| {
        let own = sys::memfd::secret().ok()?;
        rustix::fs::fstat(&own).ok().map(|stat| stat.st_dev)
    });
    *of_secrets == Some(device)
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::unix::fs::{FileExt, PermissionsExt};

    use super::super::testing::World;
    use super::*;

    fn memfd(name: &str, flags: MemfdFlags) -> OwnedFd {
        rustix::fs::memfd_create(name, flags | MemfdFlags::CLOEXEC).expect("memfd")
    }

    fn link(own: &OwnedFd) -> Vec<u8> {
        use std::os::fd::AsRawFd;
        let path = format!("/proc/self/fd/{}", own.as_raw_fd());
        rustix::fs::readlink(path, Vec::new())
            .expect("link")
            .into_bytes()
    }

    #[test]
    fn name_contents_and_offset_survive() {
        let own = memfd("a (deleted) name", MemfdFlags::empty());
        rustix::io::write(&own, &[5; 10_000]).expect("write");
        let reader = status::reopen(own.as_fd(), OFlags::RDONLY).expect("reopen");
        rustix::fs::fchmod(&own, Mode::from_raw_mode(0o640)).expect("chmod");
        let mut world = World::default();
        let (at, reader) = (world.add(own), world.add(reader));
        world.cycle();
        let own = world.take(at);
        assert_eq!(link(&own), b"/memfd:a (deleted) name (deleted)");
        let seals = rustix::fs::fcntl_get_seals(&own).expect("seals");
        assert_eq!(seals, SealFlags::SEAL);
        rustix::io::pwrite(&own, b"new", 9_998).expect("write");
        let reader = File::from(world.take(reader));
        let metadata = reader.metadata().expect("stat");
        assert_eq!(
            (metadata.len(), metadata.permissions().mode()),
            (10_001, 0o100_640)
        );
        let mut bytes = [0; 4];
        reader.read_exact_at(&mut bytes, 9_997).expect("read");
        assert_eq!(&bytes, b"\x05new");
        assert_eq!(rustix::io::write(&reader, b"x"), Err(Errno::BADF));
    }

    #[test]
    fn what_could_be_executed_can_be_afterwards() {
        let own = memfd("program", MemfdFlags::empty());
        rustix::io::write(&own, &std::fs::read("/bin/true").expect("a program")).expect("write");
        rustix::fs::fchmod(&own, Mode::from_raw_mode(0o700)).expect("chmod");
        let reader = status::reopen(own.as_fd(), OFlags::RDONLY).expect("reopen");
        let mut world = World::default();
        let (at, reader) = (world.add(own), world.add(reader));
        for _ in 0..2 {
            world.cycle();
            for at in [at, reader] {
                let path = format!("/proc/self/fd/{}", world.number(at));
                let status = std::process::Command::new(path).status();
                assert!(status.expect("it is executed").success());
            }
        }
        assert_eq!(
            rustix::fs::tell(world.get(at)),
            Ok(std::fs::metadata("/bin/true").expect("stat").len())
        );
        // Whoever has opened it for writing keeps it from being executed.
        let writer = status::reopen(world.get(at).as_fd(), OFlags::RDWR | OFlags::APPEND);
        let writer = world.add(writer.expect("reopen"));
        world.cycle();
        let path = format!("/proc/self/fd/{}", world.number(at));
        let busy = std::process::Command::new(&path)
            .status()
            .expect_err("it is written to");
        assert_eq!(busy.raw_os_error(), Some(Errno::TXTBSY.raw_os_error()));
        drop(world.take(writer));
        // What another test forks has it for a moment.
        testkit::wait::wait_until("nobody to have it", testkit::wait::SOON, || {
            std::process::Command::new(&path)
                .status()
                .is_ok_and(|status| status.success())
        });
    }

    #[test]
    fn seals_survive() {
        let (exec, write) = (SealFlags::from_bits_retain(0x20), SealFlags::WRITE);
        for seals in [
            SealFlags::empty(),
            SealFlags::GROW | SealFlags::SHRINK,
            write | SealFlags::SEAL,
            SealFlags::FUTURE_WRITE | SealFlags::SEAL,
            exec | SealFlags::GROW,
        ] {
            let own = memfd("sealed", MemfdFlags::ALLOW_SEALING);
            rustix::io::write(&own, b"text").expect("write");
            rustix::fs::fchmod(&own, Mode::from_raw_mode(0o600)).expect("chmod");
            if rustix::fs::fcntl_add_seals(&own, seals).is_err() {
                assert_eq!(
                    seals,
                    exec | SealFlags::GROW,
                    "only that one may be unknown"
                );
                continue;
            }
            let mut world = World::default();
            let at = world.add(own);
            world.cycle();
            let own = world.take(at);
            assert_eq!(rustix::fs::fcntl_get_seals(&own).expect("seals"), seals);
            let written = rustix::io::write(&own, b"x").is_ok();
            let sealed = SealFlags::WRITE | SealFlags::FUTURE_WRITE | SealFlags::GROW;
            assert_eq!(written, !seals.intersects(sealed));
        }
    }

    #[test]
    fn huge_pages_survive() {
        let own = memfd("huge", MemfdFlags::HUGETLB);
        rustix::fs::ftruncate(&own, 2 << 20).expect("truncate");
        if sys::memfd::write_mapped(own.as_fd(), 0, b"huge").is_err() {
            testkit::skip!("no huge pages (vm.nr_hugepages)");
        }
        let mut world = World::default();
        let at = world.add(own);
        world.cycle();
        let own = File::from(world.take(at));
        let mut bytes = [0; 5];
        own.read_exact_at(&mut bytes, 0).expect("read");
        assert_eq!(&bytes, b"huge\0");
    }

    #[test]
    fn file_of_that_name_is_not_claimed() {
        assert_eq!(name(b"/memfd:x (deleted)"), Some(&b"x"[..]));
        assert_eq!(name(b"/memfd:x"), None);
        assert_eq!(name(b"/tmp/memfd:x (deleted)"), None);
    }
}
