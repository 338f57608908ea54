//! System V shared memory: a segment that tasks have attached (shmat(2)).
//!
//! A segment outlives the tasks, under the number and the key by which programs know it. So a
//! restore takes the one that is still there, if nobody else has attached it meanwhile, and makes
//! it again where there is none; its contents are those of the dump either way. The tasks attach it
//! themselves ([`crate::map::layout`]): the kernel counts who has it attached, and programs ask.
//!
//! - What: System V shared memory
//! - Kept: number, key, owner, permissions, contents, huge pages; it is taken where it still is,
//!   and made again where not.
//! - Refused: "it is System V shared memory as a file" (opened by way of /proc/PID/map_files).
//! - At a restore: "key … of System V shared memory … is another segment's"; "System V shared
//!   memory … is another segment"; "System V shared memory … …": "is another segment", "is attached
//!   by other processes".
//! - CRIU 4.2: only in an IPC namespace of the tree's own, whose segments are all saved with it.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use prost::Message;
use rustix::fs::{FileType, FlockOperation};
use rustix::io::Errno;
use sys::identity::as_user;
use sys::shm::{self, Attached, Segment};

use super::ghost::first_of_inode;
use super::{DumpContext, Kind, Open, RestoreContext, SharedMemory, Stage, memfd, status, tags};
use crate::{Allow, Error, Result};

/// See the file.
pub struct SystemV;

/// A segment.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// The first description (by id) of this segment; those with the same number share it.
    #[prost(uint32, tag = "1")]
    first: u32,
    /// Its number (shmid).
    #[prost(int32, tag = "2")]
    number: i32,
    /// Its key; 0 for none.
    #[prost(int32, tag = "3")]
    key: i32,
    /// The size in bytes.
    #[prost(uint64, tag = "4")]
    size_bytes: u64,
    /// Permissions.
    #[prost(uint32, tag = "5")]
    mode: u32,
    /// The owner.
    #[prost(uint32, tag = "6")]
    uid: u32,
    /// The owning group.
    #[prost(uint32, tag = "7")]
    gid: u32,
    /// Whether it goes with the last one that has it attached (`IPC_RMID`).
    #[prost(bool, tag = "8")]
    doomed: bool,
    /// The space with its contents; on the first description only.
    #[prost(uint32, optional, tag = "9")]
    space: Option<u32>,
    /// The size of its pages where they are huge pages.
    #[prost(uint64, tag = "10")]
    huge_page_bytes: u64,
    /// Its maker; an older image does not tell.
    #[prost(message, optional, tag = "11")]
    maker: Option<Maker>,
}

/// A user who made a segment.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Maker {
    /// The user.
    #[prost(uint32, tag = "1")]
    uid: u32,
    /// The group.
    #[prost(uint32, tag = "2")]
    gid: u32,
}

/// How the kernel's names of such memory begin.
pub const LINK: &[u8] = b"/SYSV";
/// How long a number is asked for that others get instead, who ask for any.
const PATIENCE: Duration = Duration::from_secs(1);

impl Kind for SystemV {
    type Record = Record;
    const TAG: u16 = tags::SYSTEM_V;
    const NAME: &'static str = "system v shared memory";

    fn claims(open: &Open<'_>) -> bool {
        open.link.starts_with(LINK)
            && FileType::from_raw_mode(open.stat.st_mode) == FileType::RegularFile
            && (Some(open.stat.st_dev) == memfd::device() || memfd::huge_page_bytes(open).is_some())
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Record> {
        if open.fd >= 0 {
            return Err(open.unsupported("it is System V shared memory as a file", None));
        }
        let number = number(open.stat.st_ino);
        let doing = || format!("ask for System V shared memory {number}");
        let found = shm::stat(number).map_err(|error| Error::kernel(doing(), error))?;
        let mut record = Record {
            first: first_of_inode(open, cx),
            number,
            key: found.key,
            size_bytes: found.bytes,
            mode: found.mode,
            uid: found.uid,
            maker: Some(Maker {
                uid: found.maker_uid,
                gid: found.maker_gid,
            }),
            gid: found.gid,
            doomed: found.doomed,
            space: None,
            huge_page_bytes: memfd::huge_page_bytes(open).unwrap_or(0),
        };
        if record.first == open.id.0 {
            let file = status::reopen(open.own()?, rustix::fs::OFlags::RDONLY)?;
            record.space = Some(cx.store(file, open.stat.st_size.cast_unsigned())?);
        }
        Ok(record)
    }

    fn check(record: &Record) -> Result<()> {
        let is_nobody = |maker: Maker| [maker.uid, maker.gid].contains(&u32::MAX);
        if record.maker.is_some_and(is_nobody) {
            return Err(Error::corrupt(Self::NAME, "has no such maker"));
        }
        memfd::check_page_bytes(Self::NAME, record.huge_page_bytes)
    }

    fn describe(record: &Record) -> String {
        let (number, key, size) = (record.number, record.key, record.size_bytes);
        let doomed = if record.doomed { " removed" } else { "" };
        format!("id={number} key={key:#x} size={size}{doomed}")
    }

    fn memory(record: &Record) -> Result<Option<SharedMemory>> {
        Ok(Some(SharedMemory {
            tag: Self::TAG,
            first: record.first,
            bytes: record.size_bytes,
            huge_page_bytes: memfd::recorded_page_bytes(record.huge_page_bytes),
            space: record.space,
            takes_all: true,
            is_there: record.find()?.is_some(),
        }))
    }

    fn open(record: &Record, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let key = (tags::SYSTEM_V, u64::from(record.first));
        if !cx.shared().contains_key(&key) {
            let made = record.bring_back(cx)?;
            cx.shared().insert(key, vec![made]);
        }
        let copy = rustix::io::fcntl_dupfd_cloexec(&cx.shared()[&key][0], 0);
        copy.map_err(|error| Error::kernel("dup", error))
    }

    fn stages(_record: &Record, _allow: &Allow) -> &'static [Stage] {
        &[Stage::Enable]
    }

    fn act(
        record: &Record,
        _stage: Stage,
        _own: std::os::fd::BorrowedFd<'_>,
        _allow: &Allow,
    ) -> Result<()> {
        // The tasks have it attached by now.
        if record.doomed && record.space.is_some() {
            shm::remove(record.number).map_err(|error| record.failed("remove", error))?;
        }
        Ok(())
    }
}

/// The number of the segment whose file has this inode number.
#[must_use]
pub fn number(inode: u64) -> i32 {
    inode as i32
}

/// A segment that was made and goes again when the restore fails.
struct Made {
    number: i32,
}

impl Made {
    fn stay(self) {
        std::mem::forget(self);
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        if let Err(error) = shm::remove(self.number) {
            log::warn!(
                "cannot remove System V shared memory {}: {error}",
                self.number
            );
        }
    }
}

/// The number that the kernel gives to the next segment that anybody asks for. Restores beside each
/// other take turns: each would get what the other has chosen.
struct Next(File);

impl Next {
    fn lock() -> std::io::Result<Self> {
        let file = File::options()
            .write(true)
            .open(sys::procfs::path("sys/kernel/shm_next_id"))?;
        rustix::fs::flock(&file, FlockOperation::LockExclusive)?;
        Ok(Self(file))
    }

    fn choose(&self, number: i32) -> std::io::Result<()> {
        // Each call sets the whole value, wherever the file is at.
        self.0.write_all_at(number.to_string().as_bytes(), 0)
    }
}

impl Record {
    fn failed(&self, what: &str, error: std::io::Error) -> Error {
        Error::kernel(
            format!("{what} System V shared memory {}", self.number),
            error,
        )
    }

    /// Finds the segment or makes it, and fills it.
    fn bring_back(&self, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let failed = |what: &'static str| move |error| self.failed(what, error);
        let next = Next::lock().map_err(failed("choose the number of"))?;
        match self.find()? {
            Some(found) => self.check(&found)?,
            None => {
                let made = self.make(&next)?;
                cx.on_success(Box::new(move || made.stay()));
            }
        }
        drop(next);
        shm::give(self.number, (self.uid, self.gid), self.mode).map_err(failed("give away"))?;
        let attached = Attached::new(self.number).map_err(failed("attach"))?;
        let huge = memfd::recorded_page_bytes(self.huge_page_bytes);
        let page_bytes = huge.unwrap_or(abi::PAGE_BYTES);
        let file = attached.file(page_bytes).map_err(failed("open"))?;
        if let Some(space) = self.space {
            // What was zero is not stored, and may be something else by now.
            let all =
                rustix::fs::FallocateFlags::PUNCH_HOLE | rustix::fs::FallocateFlags::KEEP_SIZE;
            let bytes = self.size_bytes.next_multiple_of(page_bytes);
            rustix::fs::fallocate(&file, all, 0, bytes)
                .map_err(|error| self.failed("empty", error.into()))?;
            match huge {
                Some(_) => memfd::load_huge(space, file.as_fd(), (bytes, page_bytes), cx)?,
                None => cx.load(space, file.as_fd())?,
            }
        }
        Ok(file)
    }

    /// The segment that has the number now.
    fn find(&self) -> Result<Option<Segment>> {
        match shm::stat(self.number) {
            Ok(found) => Ok(Some(found)),
            Err(error) => match Errno::from_io_error(&error) {
                Some(Errno::INVAL | Errno::IDRM) => Ok(None),
                _ => Err(self.failed("ask for", error)),
            },
        }
    }

    /// Makes the segment; others may ask for any at the same moment and get its number, for as long
    /// as they have it.
    fn make(&self, next: &Next) -> Result<Made> {
        let began = Instant::now();
        while began.elapsed() < PATIENCE {
            next.choose(self.number)
                .map_err(|error| self.failed("choose the number of", error))?;
            let made = Made {
                number: self.create()?,
            };
            if made.number == self.number {
                return Ok(made);
            }
            drop(made);
            std::thread::yield_now();
        }
        let what = format!("System V shared memory {} is another segment", self.number);
        Err(Error::Mismatch { what })
    }

    fn create(&self) -> Result<i32> {
        let huge = memfd::recorded_page_bytes(self.huge_page_bytes);
        let make = || match shm::create(self.key, self.size_bytes, self.mode, huge) {
            // One that is larger than memory was made without a promise.
            Err(error) if huge.is_none() && Errno::from_io_error(&error) == Some(Errno::NOMEM) => {
                shm::create_unreserved(self.key, self.size_bytes, self.mode)
            }
            made => made,
        };
        let made = match self.maker {
            Some(Maker { uid, gid }) => match as_user(uid, gid, make) {
                // That user may get no huge pages, or this process may not act for others.
                Err(error) if Errno::from_io_error(&error) == Some(Errno::PERM) => {
                    log::info!(
                        "System V shared memory {} is not user {uid}'s: {error}",
                        self.number
                    );
                    make()
                }
                made => made,
            },
            None => make(),
        };
        made.map_err(|error| match Errno::from_io_error(&error) {
            Some(Errno::EXIST) => Error::Mismatch {
                what: format!(
                    "key {:#x} of System V shared memory {} is another segment's",
                    self.key, self.number
                ),
            },
            _ => self.failed("make", error),
        })
    }

    /// Whether the segment that is there is the one of the dump and nobody's.
    fn check(&self, found: &Segment) -> Result<()> {
        let mismatch = |what: &str| {
            let what = format!("System V shared memory {} {what}", self.number);
            Err(Error::Mismatch { what })
        };
        if (found.key, found.bytes) != (self.key, self.size_bytes) {
            return mismatch("is another segment");
        }
        if found.attached > 0 {
            return mismatch("is attached by other processes");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn a_failed_restore_leaves_none() {
        let made = Made {
            number: shm::create(0, 1, 0o600, None).expect("a segment"),
        };
        let number = made.number;
        drop(made);
        assert!(shm::stat(number).is_err());
    }
    #[test]
    fn segment_larger_than_memory_is_made_again() {
        let known = rustix::system::sysinfo();
        let size_bytes = (known.totalram + known.totalswap + 1) * u64::from(known.mem_unit);
        let size_bytes = size_bytes.next_multiple_of(abi::PAGE_BYTES) + abi::PAGE_BYTES;
        let limits = ["shmmax", "shmall"].map(|name| {
            let text = std::fs::read_to_string(format!("/proc/sys/kernel/{name}"));
            text.ok().and_then(|text| text.trim().parse::<u64>().ok())
        });
        let never = std::fs::read_to_string("/proc/sys/vm/overcommit_memory");
        let fits = limits[0].is_none_or(|max| max >= size_bytes)
            && limits[1].is_none_or(|max| max >= size_bytes / abi::PAGE_BYTES);
        if !fits || never.is_ok_and(|mode| mode.trim() == "2") {
            testkit::skip!("such a segment is not allowed here");
        }
        let record = Record {
            size_bytes,
            mode: 0o600,
            ..Record::default()
        };
        let number = record.create().expect("a segment");
        let made = Made { number };
        assert_eq!(shm::stat(number).expect("it is there").bytes, size_bytes);
        drop(made);
    }

    /// Others who ask for segments meanwhile get none that is chosen here, or it is chosen again.
    #[test]
    fn a_number_is_had_while_others_make_segments() {
        let stop = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let number = shm::create(0, 1, 0o600, None).expect("a segment");
                    drop(Made { number });
                }
            });
            let makers = [0, 1].map(|maker| {
                scope.spawn(move || {
                    for turn in 0..500 {
                        // A place beyond those that the kernel takes first, and how often it was
                        // taken.
                        let number = ((2 * turn + maker) << 15) + 20_000;
                        let record = Record {
                            number,
                            size_bytes: 1,
                            mode: 0o600,
                            ..Record::default()
                        };
                        let next = Next::lock().expect("the lock");
                        assert_eq!(record.make(&next).expect("a segment").number, number);
                    }
                })
            });
            let ends = makers.map(std::thread::ScopedJoinHandle::join);
            stop.store(true, Ordering::Relaxed);
            assert!(ends.iter().all(|end| end.is_ok()));
        });
    }
}
