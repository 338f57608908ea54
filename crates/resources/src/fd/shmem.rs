//! Shared anonymous memory (`MAP_SHARED | MAP_ANONYMOUS`): a file that mappings refer to, and
//! descriptors where somebody has opened it by way of /proc/PID/map_files.
//!
//! - What: shared anonymous memory
//! - Kept: contents, for all who map it, and descriptors of it (/proc/PID/map_files).
//! - CRIU 4.2: kept.

use std::os::fd::{AsFd, OwnedFd};

use prost::Message;
use rustix::fs::{FileType, Gid, Mode, SeekFrom, Uid};
use rustix::io::Errno;

use super::ghost::first_of_inode;
use super::{DumpContext, Kind, Open, RestoreContext, SharedMemory, memfd, status, tags};
use crate::map::listing::HUGE_PAGES;
use crate::{Error, Result};

/// See the file.
pub struct Shmem;

/// Shared memory.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// The first description (by id) of this memory; those with the same number share it.
    #[prost(uint32, tag = "1")]
    first: u32,
    /// Access mode and status flags.
    #[prost(uint32, tag = "2")]
    flags: u32,
    /// The size in bytes.
    #[prost(uint64, tag = "3")]
    size_bytes: u64,
    /// The space with its contents; on the first description only.
    #[prost(uint32, optional, tag = "4")]
    space: Option<u32>,
    /// The offset in bytes.
    #[prost(uint64, tag = "5")]
    pos: u64,
    /// The owner.
    #[prost(message, optional, tag = "6")]
    owner: Option<Owner>,
    /// The size of its pages where they are huge pages.
    #[prost(uint64, tag = "7")]
    huge_page_bytes: u64,
}

/// Whose file it is; old images do not tell.
#[derive(Clone, Copy, PartialEq, Message)]
struct Owner {
    /// Permissions, as in `st_mode`.
    #[prost(uint32, tag = "1")]
    mode: u32,
    /// The owner.
    #[prost(uint32, tag = "2")]
    uid: u32,
    /// The owning group.
    #[prost(uint32, tag = "3")]
    gid: u32,
}

/// How much of a large one is asked for at once.
const STEP_BYTES: u64 = 1 << 30;

/// What the kernel calls such memory.
const LINK: &[u8] = b"/dev/zero (deleted)";

impl Kind for Shmem {
    type Record = Record;
    const TAG: u16 = tags::SHMEM;
    const NAME: &'static str = "shmem";

    fn claims(open: &Open<'_>) -> bool {
        let is_ours = Some(open.stat.st_dev) == memfd::device();
        let is_huge = memfd::huge_page_bytes(open).is_some();
        FileType::from_raw_mode(open.stat.st_mode) == FileType::RegularFile
            && (open.link == LINK && is_ours || open.link == HUGE_PAGES && is_huge)
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Record> {
        let mut record = Record {
            first: first_of_inode(open, cx),
            flags: open.info.flags,
            size_bytes: open.stat.st_size.cast_unsigned(),
            space: None,
            pos: open.info.pos,
            owner: Some(Owner {
                mode: open.stat.st_mode,
                uid: open.stat.st_uid,
                gid: open.stat.st_gid,
            }),
            huge_page_bytes: memfd::huge_page_bytes(open).unwrap_or(0),
        };
        if record.first == open.id.0 && record.size_bytes > 0 {
            let file = status::reopen(open.own()?, rustix::fs::OFlags::RDONLY)?;
            record.space = Some(cx.store(file, record.size_bytes)?);
        }
        Ok(record)
    }

    fn check(record: &Record) -> Result<()> {
        status::check(Self::NAME, record.flags)?;
        memfd::check_page_bytes(Self::NAME, record.huge_page_bytes)
    }

    fn describe(record: &Record) -> String {
        format!("size={} object={}", record.size_bytes, record.first)
    }

    fn memory(record: &Record) -> Result<Option<SharedMemory>> {
        Ok(Some(SharedMemory {
            tag: Self::TAG,
            first: record.first,
            bytes: record.size_bytes,
            huge_page_bytes: memfd::recorded_page_bytes(record.huge_page_bytes),
            space: record.space,
            takes_all: true,
            is_there: false,
        }))
    }

    fn open(record: &Record, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let flags = status::opening(record.flags);
        let key = (tags::SHMEM, u64::from(record.first));
        if !cx.shared().contains_key(&key) {
            let made = record.create(cx)?;
            cx.shared().insert(key, vec![made]);
        }
        let own = status::reopen(cx.shared()[&key][0].as_fd(), flags)?;
        if record.pos != 0 {
            rustix::fs::seek(&own, SeekFrom::Start(record.pos))
                .map_err(|error| Error::kernel("seek in shared memory", error))?;
        }
        Ok(own)
    }
}

/// The sizes by which memory of one size grows to another.
fn steps(from_bytes: u64, to_bytes: u64) -> impl Iterator<Item = u64> {
    let grown = move |bytes: &u64| Some(bytes.saturating_add(STEP_BYTES).min(to_bytes));
    let sizes = std::iter::successors(Some(from_bytes), grown);
    let growing = from_bytes < to_bytes;
    let count = to_bytes.saturating_sub(from_bytes).div_ceil(STEP_BYTES);
    sizes.skip(1).take(if growing { count as usize } else { 0 })
}

impl Record {
    fn create(&self, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let doing = || format!("make {} bytes of shared memory", self.size_bytes);
        // A mapping of no bytes cannot be; the file can be cut to none.
        let len = usize::try_from(self.size_bytes.max(1)).expect("64 bits");
        let huge = memfd::recorded_page_bytes(self.huge_page_bytes);
        // Of a larger one the kernel may not promise all at once, but what it grows by.
        let first = match huge {
            Some(_) => len,
            None => len.min(STEP_BYTES as usize),
        };
        let own = sys::memfd::shared_anonymous(first, huge);
        let own = own.map_err(|error| Error::kernel(doing(), error))?;
        let kernel = |error: Errno| Error::kernel(doing(), error);
        for bytes in steps(first as u64, self.size_bytes) {
            rustix::fs::ftruncate(&own, bytes).map_err(kernel)?;
        }
        match (self.space, huge) {
            (Some(space), Some(page_bytes)) => {
                memfd::load_huge(space, own.as_fd(), (self.size_bytes, page_bytes), cx)?;
            }
            (Some(space), None) => cx.load(space, own.as_fd())?,
            (None, _) => {}
        }
        rustix::fs::ftruncate(&own, self.size_bytes).map_err(kernel)?;
        let stat = rustix::fs::fstat(&own).map_err(kernel)?;
        if let Some(owner) = self.owner {
            if (stat.st_uid, stat.st_gid) != (owner.uid, owner.gid) {
                let (uid, gid) = (Uid::from_raw(owner.uid), Gid::from_raw(owner.gid));
                rustix::fs::fchown(&own, Some(uid), Some(gid)).map_err(kernel)?;
            }
            if stat.st_mode != owner.mode {
                let mode = Mode::from_raw_mode(owner.mode);
                rustix::fs::fchmod(&own, mode).map_err(kernel)?;
            }
        }
        Ok(own)
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::OFlags;

    use super::super::testing::World;
    use super::*;

    #[test]
    fn memory_grows_in_steps_to_its_size() {
        let all = |from, to| steps(from, to).collect::<Vec<_>>();
        const STEP: u64 = STEP_BYTES;
        assert!(all(1, 0).is_empty() && all(5, 5).is_empty());
        assert_eq!(all(STEP, STEP + 1), [STEP + 1]);
        assert_eq!(all(STEP, 3 * STEP + 7), [2 * STEP, 3 * STEP, 3 * STEP + 7]);
    }

    #[test]
    fn memory_is_shared_again() {
        testkit::needs_root!();
        let one = sys::memfd::shared_anonymous(3 * 4096, None).expect("memory");
        let other = status::reopen(one.as_fd(), OFlags::RDONLY).expect("reopen");
        rustix::io::pwrite(&one, b"before", 5000).expect("write");
        rustix::fs::seek(&one, SeekFrom::Start(4321)).expect("seek");
        rustix::fs::fchown(&one, Some(Uid::from_raw(7)), Some(Gid::from_raw(8))).expect("chown");
        rustix::fs::fchmod(&one, Mode::from_raw_mode(0o640)).expect("chmod");
        let mut world = World::default();
        let (one, other) = (world.add(one), world.add(other));
        world.cycle();
        assert!(world.describe(other).starts_with("shmem size=12288"));
        let one = world.take(one);
        assert_eq!(rustix::fs::tell(&one), Ok(4321));
        let stat = rustix::fs::fstat(&one).expect("stat");
        assert_eq!(
            (stat.st_mode & 0o7777, stat.st_uid, stat.st_gid),
            (0o640, 7, 8)
        );
        rustix::io::pwrite(one, b"after", 100).expect("write");
        let mut bytes = vec![0; 12_288];
        let other = world.take(other);
        let len = rustix::io::pread(&other, &mut bytes[..], 0).expect("read");
        assert_eq!(len, 12_288);
        assert_eq!(
            (&bytes[100..105], &bytes[5000..5006]),
            (&b"after"[..], &b"before"[..])
        );
    }
}
