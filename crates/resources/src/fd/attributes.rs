//! What descriptions of any kind can have besides: an owner that is signalled, and locks.
//!
//! - What: owners of signals
//! - Kept: whom a description of any kind signals, by which signal, and `O_ASYNC` (`F_SETOWN_EX`,
//!   `F_SETSIG`).
//! - Refused: "nobody could take its lease again" (its file is only in flight in a socket).
//! - CRIU 4.2: kept.

use std::os::fd::BorrowedFd;

use prost::Message;
use rustix::fs::{FileType, OFlags};
use rustix::io::Errno;
use syscalls::Sysno;

use super::locks::{self, Lock, Style};
use super::status::{ASYNC, SETTABLE};
use super::{Open, tags};
use crate::script::{Arg, Script};
use crate::{Allow, Error, Result};

/// The number of this record in images; there is one for each description that has any.
pub const TAG: u16 = tags::ATTRIBUTES;

#[derive(Clone, PartialEq, Message)]
struct Payload {
    /// Whom it signals.
    #[prost(message, optional, tag = "1")]
    owner: Option<Owner>,
    /// Its own locks.
    #[prost(message, repeated, tag = "2")]
    locks: Vec<Lock>,
}

/// Whom a description signals (`F_SETOWN_EX`, `F_SETSIG`, `O_ASYNC`).
#[derive(Clone, Copy, PartialEq, Message)]
struct Owner {
    /// `F_OWNER_TID`, `F_OWNER_PID` or `F_OWNER_PGRP`.
    #[prost(int32, tag = "1")]
    kind: i32,
    /// The thread, process or group; 0 for no one.
    #[prost(int32, tag = "2")]
    pid: i32,
    /// The signal; 0 for `SIGIO`.
    #[prost(int32, tag = "3")]
    signal: i32,
    /// The status flags when `O_ASYNC` is among them: they are set all at once.
    #[prost(uint32, tag = "4")]
    async_flags: u32,
}

impl Owner {
    /// Whether there is one, or was, who is gone.
    fn was_set(&self) -> bool {
        self.pid != 0 || self.kind != 0
    }
}

const F_SETFL: i32 = libc::F_SETFL;
const F_SETSIG: i32 = linux_raw_sys::general::F_SETSIG as i32;
const F_SETOWN_EX: i32 = linux_raw_sys::general::F_SETOWN_EX as i32;

/// The payload for `open`; `None` when there is nothing to say.
///
/// # Errors
/// [`Error::Unsupported`] for leases, and for locks without `--file-locks`.
pub fn dump(open: &Open<'_>, allow: &Allow) -> Result<Option<Vec<u8>>> {
    let flags = open.info.oflags();
    // Nobody opened what is only mapped, and an O_PATH description has nothing of this.
    if open.fd < 0 && !open.in_flight || flags.contains(OFlags::PATH) {
        return Ok(None);
    }
    let payload = Payload {
        owner: owner(open)?,
        locks: locks::of_description(&open.info, allow, |what, allow| {
            open.unsupported(what, allow)
        })?,
    };
    if open.in_flight && locks::has_lease(&open.info) {
        return Err(open.unsupported("nobody could take its lease again", None));
    }
    let payload = Some(payload).filter(|payload| *payload != Payload::default());
    Ok(payload.map(|payload| payload.encode_to_vec()))
}

/// Files that signal nobody unless they were told to (`O_ASYNC`) are not asked.
fn is_silent(open: &Open<'_>) -> bool {
    const MEMORY_DEVICES: u32 = 1;
    let kind = FileType::from_raw_mode(open.stat.st_mode);
    let device =
        kind == FileType::CharacterDevice && rustix::fs::major(open.stat.st_rdev) == MEMORY_DEVICES;
    let plain = matches!(kind, FileType::RegularFile | FileType::Directory) || device;
    plain && !open.info.oflags().intersects(ASYNC) && !locks::has_lease(&open.info)
}

fn owner(open: &Open<'_>) -> Result<Option<Owner>> {
    if is_silent(open) {
        return Ok(None);
    }
    let own = open.own()?;
    let kernel = |error| Error::kernel(format!("get the owner of {}", open.place()), error);
    let found = sys::fcntl::owner(own).map_err(kernel)?;
    let flags = open.info.oflags();
    let owner = Owner {
        kind: found.kind,
        pid: found.pid,
        signal: sys::fcntl::signal(own).map_err(kernel)?,
        async_flags: if flags.intersects(ASYNC) {
            flags.intersection(SETTABLE.union(ASYNC)).bits()
        } else {
            0
        },
    };
    Ok(Some(owner).filter(|owner| *owner != Owner::default()))
}

fn decode(payload: &[u8]) -> Result<Payload> {
    image::strict::decode(payload).map_err(|what| Error::corrupt("attributes", what))
}

/// One line for people.
///
/// # Errors
/// [`Error::Corrupt`].
pub fn describe(payload: &[u8]) -> Result<String> {
    let payload = decode(payload)?;
    let owner = payload.owner.map(|owner| {
        let Owner { pid, signal, .. } = owner;
        format!("owner={pid} signal={signal}")
    });
    let locks = payload.locks.iter().map(Lock::describe);
    Ok(owner
        .into_iter()
        .chain(locks)
        .collect::<Vec<_>>()
        .join(", "))
}

/// Gives the description `own` what the restorer can give it: its own locks. Called after the
/// kind's `finish`.
///
/// # Errors
/// [`Error::Kernel`] when a lock is taken by someone else.
pub fn finish(payload: &[u8], own: BorrowedFd<'_>) -> Result<()> {
    decode(payload)?
        .locks
        .iter()
        .try_for_each(|lock| lock.take(own))
}

/// The process that must make the calls of [`in_pool`], where there are any; 0 where anybody may.
///
/// # Errors
/// [`Error::Corrupt`].
pub fn maker(payload: &[u8]) -> Result<Option<i32>> {
    let locks = decode(payload)?.locks;
    let told = [Style::Flock, Style::Lease];
    let mut told = locks.iter().filter(|lock| told.contains(&lock.style()));
    Ok(told.next().map(|lock| lock.pid))
}

/// Adds the calls that a process must make while it has all descriptions of the tree open as
/// descriptors of the pool, this one as `fd`: whether it keeps it or not.
///
/// # Errors
/// [`Error::Corrupt`].
pub fn in_pool(payload: &[u8], fd: impl Into<Arg>, script: &mut Script) -> Result<()> {
    let fd = fd.into();
    for lock in decode(payload)?.locks {
        lock.take_in_task(fd, script);
    }
    Ok(())
}

/// Gives a description that no task has a descriptor of what those would give it by [`in_task`].
/// Called when all tasks and threads exist.
///
/// # Errors
/// [`Error::Corrupt`] or [`Error::Kernel`].
pub fn resume_in_flight(payload: &[u8], own: BorrowedFd<'_>) -> Result<()> {
    let Some(owner) = decode(payload)?.owner else {
        return Ok(());
    };
    let failed = |error| Error::kernel("set whom a description in flight signals", error);
    if owner.was_set() {
        let Owner { kind, pid, .. } = owner;
        match sys::fcntl::set_owner(own, sys::fcntl::Owner { kind, pid }) {
            // An owner outside of the tree may be gone by now, as it could have been before.
            Err(error) if error.raw_os_error() == Some(Errno::SRCH.raw_os_error()) => {}
            result => result.map_err(failed)?,
        }
    }
    if owner.signal != 0 {
        sys::fcntl::set_signal(own, owner.signal).map_err(failed)?;
    }
    if owner.async_flags != 0 {
        let flags = OFlags::from_bits_retain(owner.async_flags);
        rustix::fs::fcntl_setfl(own, flags).map_err(|error| failed(error.into()))?;
    }
    Ok(())
}

/// Adds the calls that a task must make which has the description as `fd`, once all tasks and
/// threads exist. One that was only opened then `is_late`, and gets all of its own locks by them.
///
/// # Errors
/// [`Error::Corrupt`].
pub fn in_task(payload: &[u8], fd: i32, is_late: bool, script: &mut Script) -> Result<()> {
    let payload = decode(payload)?;
    for lock in payload.locks.iter().filter(|_| is_late) {
        lock.take_late(fd, script);
    }
    // Who has taken a lease has become the owner.
    let Some(owner) = payload.owner else {
        return Ok(());
    };
    let note = format!("owner of fd {fd}");
    if owner.was_set() {
        let kind = owner.kind.to_le_bytes();
        let pid = owner.pid.to_le_bytes();
        let at = script.bytes(&[kind, pid].concat());
        // An owner outside of the tree may be gone by now, as it could have been before.
        script.attempt(Sysno::fcntl, [fd.into(), F_SETOWN_EX.into(), at.into()]);
        script.note(&note);
    }
    if owner.signal != 0 {
        let args = [fd.into(), F_SETSIG.into(), owner.signal.into()];
        script.call(Sysno::fcntl, args);
        script.note(&note);
    }
    if owner.async_flags != 0 {
        let args = [fd.into(), F_SETFL.into(), owner.async_flags.into()];
        script.call(Sysno::fcntl, args);
        script.note(&note);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::{AsFd, OwnedFd};

    use rustix::fs::FlockOperation;
    use sys::fcntl::Holder;

    use super::super::testing::World;
    use super::*;

    #[test]
    fn owner_signal_and_async_survive() {
        let (reader, _writer) = rustix::pipe::pipe().expect("pipe");
        let owner = sys::fcntl::Owner {
            kind: 1,
            pid: std::process::id().cast_signed(),
        };
        sys::fcntl::set_owner(reader.as_fd(), owner).expect("own");
        // One that nobody minds: SIGURG.
        sys::fcntl::set_signal(reader.as_fd(), 23).expect("signal");
        rustix::fs::fcntl_setfl(&reader, ASYNC | OFlags::NONBLOCK).expect("async");
        let mut world = World::default();
        world.allow.unix_close = true;
        let at = world.add(reader);
        // What fdinfo says is compared by the cycle: O_ASYNC.
        world.cycle();
        let reader = world.take(at);
        assert_eq!(sys::fcntl::owner(reader.as_fd()).expect("owner"), owner);
        let (reader, _writer) = rustix::pipe::pipe().expect("pipe");
        sys::fcntl::set_signal(reader.as_fd(), 40).expect("signal");
        let mut world = World::default();
        world.allow.unix_close = true;
        let at = world.add(reader);
        world.cycle();
        assert_eq!(
            sys::fcntl::signal(world.get(at).as_fd()).expect("signal"),
            40
        );
    }

    #[test]
    fn of_an_owner_that_is_gone_the_kind_survives() {
        let (reader, _writer) = rustix::pipe::pipe().expect("pipe");
        let mut child = std::process::Command::new("true").spawn().expect("spawn");
        let pid = child.id().cast_signed();
        sys::fcntl::set_owner(reader.as_fd(), sys::fcntl::Owner { kind: 1, pid }).expect("own");
        child.wait().expect("wait");
        let mut world = World::default();
        world.allow.unix_close = true;
        let at = world.add(reader);
        world.cycle();
        let owner = sys::fcntl::owner(world.get(at).as_fd()).expect("owner");
        assert_eq!((owner.kind, owner.pid), (1, 0));
    }

    fn file(path: &std::path::Path) -> OwnedFd {
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path);
        file.expect("open").into()
    }

    #[test]
    fn locks_of_descriptions_survive() {
        let folder = tempfile::tempdir().expect("make a folder");
        let (whole, part) = (folder.path().join("whole"), folder.path().join("part"));
        let mut world = World::default();
        let at = world.add(file(&whole));
        let operation = FlockOperation::NonBlockingLockExclusive;
        rustix::fs::flock(world.get(at), operation).expect("lock");
        let at = world.add(file(&part));
        let lock =
            |own: &OwnedFd, range| sys::fcntl::lock(own.as_fd(), Holder::Description, true, range);
        lock(world.get(at), (10, 10)).expect("lock");
        lock(world.get(at), (100, 0)).expect("lock");

        let error = world.dump().expect_err("not allowed").to_string();
        assert!(error.contains("--file-locks"), "{error}");
        world.allow.file_locks = true;
        world.cycle();

        assert!(rustix::fs::flock(file(&whole), operation).is_err());
        let other = file(&part);
        assert!(lock(&other, (19, 1)).is_err());
        lock(&other, (20, 80)).expect("free");
        assert!(lock(&other, (1 << 40, 1)).is_err());
    }

    #[test]
    fn lock_taken_by_another_is_an_error() {
        let folder = tempfile::tempdir().expect("make a folder");
        let path = folder.path().join("file");
        let mut world = World::default();
        world.allow.file_locks = true;
        let at = world.add(file(&path));
        let operation = FlockOperation::NonBlockingLockExclusive;
        rustix::fs::flock(world.get(at), operation).expect("lock");
        world.dump().expect("dump");
        drop(world.take(at));
        let thief = file(&path);
        rustix::fs::flock(&thief, operation).expect("lock");
        let error = world.restore().expect_err("taken").to_string();
        assert!(error.contains("flock"), "{error}");
    }
}
