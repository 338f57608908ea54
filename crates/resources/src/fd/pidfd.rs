//! Processes and threads as files: pidfd_open(2).
//!
//! One of a task of the tree can only be opened when that exists.
//!
//! - Kept: processes and threads of the tree, and those that ended and were waited for: how they
//!   ended, and which pidfds are about the same one.
//! - Refused: "process … is not in the tree"; "its process is in another pid namespace"; "its flags
//!   … are not understood"; "it tells no process".
//! - CRIU 4.2: processes of the tree and ended ones; refuses those of threads (`PIDFD_THREAD`) and
//!   of processes outside.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use prost::Message;
use rustix::fs::OFlags;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use syscalls::Sysno;

use super::{DumpContext, Info, Kind, Open, RestoreContext, late, status, tags};
use crate::script::Script;
use crate::{Error, Result};

/// See the file.
pub struct Pidfd;

/// A pidfd.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// The process, or the thread where the flags say so; 0 for one that is gone.
    #[prost(int32, tag = "1")]
    pid: i32,
    /// `O_NONBLOCK`, and `O_EXCL` for a thread (`PIDFD_THREAD`).
    #[prost(uint32, tag = "2")]
    flags: u32,
    /// Of one that is gone: the inode, by which programs tell whether two are about the same.
    #[prost(uint64, tag = "3")]
    inode: u64,
    /// Of one that is gone: its wait status, where the kernel tells it.
    #[prost(int32, tag = "4")]
    status: i32,
}

/// How the link of one begins that is a file of pidfs.
const LINK: &[u8] = b"pidfd:[";
/// `PID_FS_MAGIC` of statfs(2).
const PIDFS: i64 = linux_raw_sys::general::PID_FS_MAGIC as i64;
/// The bit of a wait status for a core file.
const CORE: i32 = 0x80;
/// The access mode of every pidfd.
const MODE: u32 = OFlags::RDWR.bits();
const KNOWN: OFlags = OFlags::NONBLOCK.union(OFlags::EXCL);

impl Record {
    /// One that is gone.
    fn of_nobody(open: &Open<'_>, flags: u32) -> Result<Self> {
        let own = open.own()?;
        let failed = |error| Error::kernel(format!("ask {} how it ended", open.place()), error);
        let status = sys::pidfd::exit_status(own).map_err(failed)?;
        // Before Linux 6.9 all have one inode.
        let system = rustix::fs::fstatfs(own).map_err(|errno| failed(errno.into()))?;
        let has_inode = system.f_type == PIDFS;
        Ok(Self {
            pid: 0,
            flags,
            inode: if has_inode { open.stat.st_ino } else { 0 },
            status: status.unwrap_or(0),
        })
    }

    /// A pidfd of a process that has ended as the one in the image, and is still to be waited for:
    /// of the same one for all that were about the same.
    fn open_of_ended(&self, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let failed = |error| Error::kernel("make a pidfd of nobody", error);
        let key = (tags::PIDFD, self.inode);
        let known = cx.shared().get(&key).filter(|_| self.inode != 0);
        let child = match known.and_then(|known| known.first()) {
            Some(own) => child_of(own.as_fd()),
            None => Some(sys::fork::ended_child(self.status & !CORE).map_err(failed)?),
        };
        let child = child.ok_or_else(|| Error::corrupt(Pidfd::NAME, "its child is gone"))?;
        let flags = PidfdFlags::from_bits_retain(self.flags);
        let own = pidfd_open(child, flags).map_err(|error| failed(error.into()))?;
        let kept = vec![status::dup(own.as_fd())?];
        cx.shared().entry(key).or_insert(kept);
        Ok(own)
    }
}

/// The child that a pidfd is about; none where it was waited for.
fn child_of(pidfd: BorrowedFd<'_>) -> Option<Pid> {
    let path = sys::procfs::path(format_args!("self/fdinfo/{}", pidfd.as_raw_fd()));
    let text = std::fs::read_to_string(path).ok()?;
    let (info, _) = Info::parse(&text)?;
    Pid::from_raw(info.field("Pid")?.parse().ok().filter(|pid| *pid > 0)?)
}

impl Kind for Pidfd {
    type Record = Record;
    const TAG: u16 = tags::PIDFD;
    const NAME: &'static str = "pidfd";

    fn claims(open: &Open<'_>) -> bool {
        open.link == b"anon_inode:[pidfd]" || open.link.starts_with(LINK)
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Record> {
        let pid = open.info.field("Pid").and_then(|pid| pid.parse().ok());
        let pid: i32 = pid.ok_or_else(|| open.unsupported("it tells no process", None))?;
        let flags = open.info.flags & !MODE;
        if flags & !KNOWN.bits() != 0 {
            let why = format!("its flags {flags:#o} are not understood");
            return Err(open.unsupported(&why, None));
        }
        match pid {
            // Who that was is not told any more.
            -1 => return Record::of_nobody(open, flags),
            0 => return Err(open.unsupported("its process is in another pid namespace", None)),
            _ if cx.task(pid).is_none() => {
                let why = format!("process {pid} is not in the tree");
                return Err(open.unsupported(&why, None));
            }
            _ => late::check(open)?,
        }
        Ok(Record {
            pid,
            flags,
            ..Record::default()
        })
    }

    fn check(record: &Record) -> Result<()> {
        let sound = (0..=0xffff).contains(&record.status);
        if record.pid < 0 || record.flags & !KNOWN.bits() != 0 || !sound {
            return Err(Error::corrupt(Self::NAME, format!("{record:?}")));
        }
        Ok(())
    }

    fn describe(record: &Record) -> String {
        let Record {
            pid, flags, status, ..
        } = *record;
        let of = match pid {
            0 if status != 0 => format!("nobody status={status:#x}"),
            0 => "nobody".to_owned(),
            pid => pid.to_string(),
        };
        format!("of={of} flags={flags:#o}")
    }

    fn open(record: &Record, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        match record.pid {
            0 => record.open_of_ended(cx),
            _ => late::placeholder(),
        }
    }

    fn finish(record: &Record, own: BorrowedFd<'_>, _cx: &mut dyn RestoreContext) -> Result<()> {
        if record.pid != 0 {
            return Ok(());
        }
        // Of several that are about the same, the first one waits for it.
        let reaped = child_of(own).map_or(Ok(()), sys::fork::reap);
        reaped.map_err(|error| Error::kernel("wait for a child that has ended", error))
    }

    fn is_late(record: &Record) -> bool {
        record.pid != 0
    }

    fn open_in_task(record: &Record, number: i32, _needed: Option<i32>, script: &mut Script) {
        let Record { pid, flags, .. } = *record;
        script.expect(Sysno::pidfd_open, [pid.into(), flags.into()], number);
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::World;
    use super::*;

    #[test]
    fn one_of_nobody_survives() {
        let mut world = World::default();
        let at = world.add(testkit::calls::pidfd_of_nobody().expect("a pidfd"));
        world.cycle();
        assert_eq!(world.describe(at), "pidfd of=nobody flags=0o0");
    }

    #[test]
    fn how_a_process_ended_and_which_it_was_survives() {
        let mut world = World::default();
        let mut pair = |status| {
            let child = sys::fork::ended_child(status).expect("it has ended");
            let flags = [PidfdFlags::empty(), PidfdFlags::NONBLOCK];
            let pair = flags.map(|flags| world.add(pidfd_open(child, flags).expect("a pidfd")));
            sys::fork::reap(child).expect("waited for");
            (pair, status)
        };
        let pairs = [pair(7 << 8), pair(9)];
        let told = |world: &World, at| {
            let own = world.get(at);
            let inode = rustix::fs::fstat(own).expect("stat").st_ino;
            let status = sys::pidfd::exit_status(own.as_fd()).expect("told");
            (inode, status)
        };
        let has_inodes = told(&world, pairs[0].0[0]).0 != told(&world, pairs[1].0[0]).0;
        let tells = told(&world, pairs[0].0[0]).1.is_some();
        for _ in 0..2 {
            world.cycle();
            for (pair, status) in pairs {
                let [one, other] = pair.map(|at| told(&world, at));
                assert_eq!(one, other);
                assert_eq!(one.1, tells.then_some(status));
            }
        }
        let [one, other] = pairs.map(|(pair, _)| told(&world, pair[0]).0);
        assert_eq!(one != other, has_inodes);
    }

    #[test]
    fn one_of_a_task_outside_is_refused_by_name() {
        let mut world = World::default();
        let init = Pid::from_raw(1).expect("a pid");
        world.add(pidfd_open(init, PidfdFlags::empty()).expect("a pidfd"));
        let error = world.dump().expect_err("it is not in the tree").to_string();
        assert!(error.contains("process 1 is not in the tree"), "{error}");
    }

    #[test]
    fn flags_that_no_pidfd_has_are_corrupt() {
        let of = |pid, flags, status| Record {
            pid,
            flags,
            status,
            inode: 0,
        };
        for record in [of(-1, 0, 0), of(7, 1, 0), of(0, 0, -1), of(0, 0, 1 << 16)] {
            let error = Pidfd::check(&record).expect_err("wrong");
            assert!(matches!(error, Error::Corrupt { .. }), "{error}");
        }
    }
}
