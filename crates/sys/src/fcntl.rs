//! What fcntl(2) does to open file descriptions beyond what rustix has: owners and locks.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

const GET_SIGNAL: i32 = 11;
const SET_SIGNAL: i32 = 10;
const GET_OWNER: i32 = 16;
const SET_OWNER: i32 = 15;

/// Whom a description signals: `struct f_owner_ex`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Owner {
    /// `F_OWNER_TID`, `F_OWNER_PID` or `F_OWNER_PGRP`.
    pub kind: i32,
    /// The thread, process or group; 0 for no one.
    pub pid: i32,
}

fn checked(result: i32) -> io::Result<i32> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(result)
}

/// Gives the owner of a description (`F_GETOWN_EX`).
///
/// # Errors
/// `EBADF` for an `O_PATH` description.
pub fn owner(fd: BorrowedFd<'_>) -> io::Result<Owner> {
    let mut owner = Owner::default();
    // SAFETY: the call writes one `f_owner_ex` to where `owner` lives.
    checked(unsafe { libc::fcntl(fd.as_raw_fd(), GET_OWNER, &raw mut owner) })?;
    Ok(owner)
}

/// Sets the owner of a description (`F_SETOWN_EX`).
///
/// # Errors
/// `ESRCH` when there is no such process, `EBADF`.
pub fn set_owner(fd: BorrowedFd<'_>, owner: Owner) -> io::Result<()> {
    // SAFETY: the call reads one `f_owner_ex` from where `owner` lives.
    checked(unsafe { libc::fcntl(fd.as_raw_fd(), SET_OWNER, &raw const owner) }).map(drop)
}

/// Gives the signal that the owner gets (`F_GETSIG`): 0 for `SIGIO` without details.
///
/// # Errors
/// `EBADF` for an `O_PATH` description.
pub fn signal(fd: BorrowedFd<'_>) -> io::Result<i32> {
    // SAFETY: the call takes no pointers.
    checked(unsafe { libc::fcntl(fd.as_raw_fd(), GET_SIGNAL) })
}

/// Sets the signal that the owner gets (`F_SETSIG`).
///
/// # Errors
/// `EINVAL` for no signal, `EBADF`.
pub fn set_signal(fd: BorrowedFd<'_>, signal: i32) -> io::Result<()> {
    // SAFETY: the call takes no pointers.
    checked(unsafe { libc::fcntl(fd.as_raw_fd(), SET_SIGNAL, signal) }).map(drop)
}

/// Takes a lease on the file (`F_SETLEASE`), for writing or for reading.
///
/// # Errors
/// `EAGAIN` where others have it open, `EACCES` for another user's file without `CAP_LEASE`.
pub fn lease(fd: BorrowedFd<'_>, write: bool) -> io::Result<()> {
    let kind = if write { libc::F_WRLCK } else { libc::F_RDLCK };
    // SAFETY: the call takes no pointers.
    checked(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_SETLEASE, kind) }).map(drop)
}

/// Whom a lock on a part of a file belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Holder {
    /// The process (`F_SETLK`).
    Process,
    /// The open file description (`F_OFD_SETLK`).
    Description,
}

/// Locks `len` bytes of a file from `start` (0: to its end, however far that moves) without
/// waiting.
///
/// # Errors
/// `EAGAIN` or `EACCES` when someone else's lock is in the way, `EBADF` when the file is not open
/// for what is locked.
pub fn lock(
    fd: BorrowedFd<'_>,
    holder: Holder,
    write: bool,
    (start, len): (i64, i64),
) -> io::Result<()> {
    let command = match holder {
        Holder::Process => libc::F_SETLK,
        Holder::Description => libc::F_OFD_SETLK,
    };
    let kind = if write { libc::F_WRLCK } else { libc::F_RDLCK };
    let lock = libc::flock {
        l_type: i16::try_from(kind).expect("a small constant"),
        l_whence: 0,
        l_start: start,
        l_len: len,
        l_pid: 0,
    };
    // SAFETY: the call reads one `flock` from where `lock` lives.
    checked(unsafe { libc::fcntl(fd.as_raw_fd(), command, &raw const lock) }).map(drop)
}

/// Claims the byte at `offset` of a file for this description (`F_OFD_SETLK`), which loses it when
/// nobody has it open any more. Tells whether it is not claimed by another one.
///
/// # Errors
/// `EBADF` where it cannot be written to, `EINVAL` for an offset beyond 2^63.
pub fn claim(fd: BorrowedFd<'_>, offset: u64) -> io::Result<bool> {
    let invalid = |_| io::Error::from_raw_os_error(libc::EINVAL);
    let lock = libc::flock {
        l_type: libc::F_WRLCK as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: i64::try_from(offset).map_err(invalid)?,
        l_len: 1,
        l_pid: 0,
    };
    // SAFETY: the call reads one `flock` from where `lock` lives.
    match checked(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) }) {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EAGAIN) => Ok(false),
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn owner_and_signal_are_read_back() {
        let (reader, _writer) = rustix::pipe::pipe().expect("pipe");
        let reader = reader.as_fd();
        let own = Owner {
            kind: 1,
            pid: std::process::id().cast_signed(),
        };
        set_owner(reader, own).expect("own");
        set_signal(reader, 34).expect("signal");
        assert_eq!(owner(reader).expect("owner"), own);
        assert_eq!(signal(reader).expect("signal"), 34);
    }

    #[test]
    fn description_locks_exclude_each_other() {
        let path = std::env::temp_dir().join(format!("sys-fcntl-{}", std::process::id()));
        let (one, other) = (File::create(&path), File::create(&path));
        std::fs::remove_file(&path).expect("remove");
        let (one, other) = (one.expect("create"), other.expect("create"));
        let lock = |file: &File, range| lock(file.as_fd(), Holder::Description, true, range);
        lock(&one, (10, 5)).expect("free");
        lock(&other, (15, 0)).expect("free");
        assert!(lock(&other, (14, 1)).is_err());
    }
}
