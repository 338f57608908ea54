//! Access modes and status flags of descriptions that are opened again.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};

use crate::{Error, Result};

/// The flags that `F_SETFL` changes.
pub(crate) const SETTABLE: OFlags = OFlags::APPEND
    .union(OFlags::NONBLOCK)
    .union(OFlags::DIRECT)
    .union(OFlags::NOATIME);

/// `O_TMPFILE` without the `O_DIRECTORY` that goes with it.
const NAMELESS: u32 = 0o20_000_000;
/// `O_ASYNC`: set in the task, after the owner ([`super::owner`]).
pub(crate) const ASYNC: OFlags = OFlags::from_bits_retain(0o20_000);
/// `FMODE_NONOTIFY` and the like never show; anything beyond these bits was not written by a dump.
const KNOWN: u32 = 0o37_777_777;

/// Refuses status flags that no description has.
///
/// # Errors
/// [`Error::Corrupt`].
pub(crate) fn check(record: &str, flags: u32) -> Result<()> {
    let acting = OFlags::CREATE | OFlags::EXCL | OFlags::TRUNC;
    match flags & !KNOWN != 0 || OFlags::from_bits_retain(flags).intersects(acting) {
        true => Err(Error::corrupt(record, format!("flags {flags:#o}"))),
        false => Ok(()),
    }
}

/// The flags to open a file with so that it gets the dumped ones: without those that act on
/// opening, with `O_CLOEXEC`.
pub(crate) fn opening(flags: u32) -> OFlags {
    let mut dropped = OFlags::from_bits_retain(NAMELESS) | ASYNC;
    if flags & NAMELESS != 0 {
        dropped |= OFlags::DIRECTORY;
    }
    OFlags::from_bits_retain(flags).difference(dropped) | OFlags::CLOEXEC
}

/// Whether the description made its file as one without a name.
pub(crate) const fn is_nameless(flags: u32) -> bool {
    flags & NAMELESS != 0
}

/// Gives the description the status flags among `flags` ([`SETTABLE`]).
///
/// # Errors
/// [`Error::Kernel`].
pub(crate) fn set(fd: impl AsFd, flags: OFlags) -> Result<()> {
    rustix::fs::fcntl_setfl(fd, flags.intersection(SETTABLE))
        .map_err(|error| Error::kernel(format!("set status flags {:#o}", flags.bits()), error))
}

/// Gives a description the status flags that cannot be asked for when it is made, which can only
/// say whether it waits (`O_NONBLOCK`).
///
/// # Errors
/// [`Error::Kernel`].
pub(crate) fn set_rest(fd: impl AsFd, flags: OFlags) -> Result<()> {
    if flags.intersects(SETTABLE.difference(OFlags::NONBLOCK)) {
        set(fd, flags)?;
    }
    Ok(())
}

/// Opens the file behind `fd` once more: a new description of the same inode.
///
/// # Errors
/// [`Error::Kernel`].
pub(crate) fn reopen(fd: BorrowedFd<'_>, flags: OFlags) -> Result<OwnedFd> {
    let path = sys::procfs::link(fd);
    // The link in /proc would be what O_NOFOLLOW refuses.
    let flags = flags.difference(OFlags::NOFOLLOW) | OFlags::CLOEXEC | OFlags::NOCTTY;
    rustix::fs::open(&path, flags, Mode::empty()).map_err(|error| {
        let link = rustix::fs::readlink(&path, Vec::new()).unwrap_or_default();
        let link = link.to_string_lossy().into_owned();
        Error::kernel(
            format!("open {link} again with flags {:#o}", flags.bits()),
            error,
        )
    })
}

/// A second descriptor of the same description.
///
/// # Errors
/// [`Error::Kernel`].
pub(crate) fn dup(fd: BorrowedFd<'_>) -> Result<OwnedFd> {
    rustix::io::fcntl_dupfd_cloexec(fd, 0).map_err(|error| Error::kernel("dup", error))
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, epoll, eventfd};
    use rustix::fs::inotify;
    use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};

    use super::super::testing::World;
    use super::*;

    #[test]
    fn what_has_no_file_keeps_flags_that_were_set_later() {
        let all: [fn() -> OwnedFd; 5] = [
            || epoll::create(epoll::CreateFlags::CLOEXEC).expect("an epoll"),
            || eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"),
            || inotify::init(inotify::CreateFlags::CLOEXEC).expect("an inotify instance"),
            || sys::signalfd::create(1 << 9, false).expect("a signalfd"),
            || timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC).expect("a timer"),
        ];
        for make in all {
            for flags in [
                OFlags::NONBLOCK,
                OFlags::APPEND,
                OFlags::APPEND | OFlags::NONBLOCK,
            ] {
                let own = make();
                rustix::fs::fcntl_setfl(&own, flags).expect("set");
                let mut world = World::default();
                let at = world.add(own);
                // The cycle compares what fdinfo says: the flags.
                world.cycle();
                let now = rustix::fs::fcntl_getfl(world.get(at)).expect("flags");
                assert_eq!(now.intersection(SETTABLE), flags, "{}", world.describe(at));
            }
        }
    }

    #[test]
    fn flags_that_act_on_opening_are_refused() {
        assert!(check("x", OFlags::TRUNC.bits()).is_err());
        assert!(check("x", 1 << 30).is_err());
        let nameless = opening(OFlags::TMPFILE.bits() | ASYNC.bits() | 2);
        assert_eq!(nameless, OFlags::RDWR | OFlags::CLOEXEC);
    }
}
