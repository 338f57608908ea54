//! Terminals: both ends of pseudo terminals with their number, modes, size and data in flight;
//! and those of outside.
//!
//! The master's record has everything that belongs to the pair. A slave whose master is not in
//! the tree is somebody's terminal: it is saved only with `--shell-job` and comes back as the
//! restorer's standard input. Not saved: whether output is stopped (Ctrl-S), what a packet-mode
//! master has not been told yet. A description of /dev/tty comes back as the terminal that it
//! stood for.
//!
//! - Kept: both ends of pseudo terminals: number, modes, size, data in flight, locks, who controls;
//!   with `--shell-job` the terminal from outside.
//! - Refused: "it is a terminal from outside of the tree" (`--shell-job`; `--unix-close`, with
//!   which it comes back hung up, where it controls no session of the tree); "it has another line
//!   discipline than that of terminals"; "some of its modes are locked (TIOCSLCKTRMIOS)".
//! - At a restore: "the terminal … is in use" (its number is another's); "… is to come back as the
//!   standard input, which is no terminal".
//! - CRIU 4.2: pseudo terminals with data in flight up to 16 KiB, and consoles and serial lines,
//!   which are opened again; refuses ones that are in flight in a socket; with `--shell-job` the
//!   terminal from outside.

pub mod control;
mod queue;

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::event::PollFlags;
use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Stat, Uid, major, minor};
use rustix::io::Errno;
use rustix::termios::{Winsize, tcgetwinsize, tcsetwinsize};
use sys::tty::{Attributes, Switch, is_on, switch};

use queue::Flight;

use super::{DumpContext, Kind, Open, RestoreContext, Stage, ready, status};
use crate::{Allow, Error, Result};

/// `TTYAUX_MAJOR`: /dev/tty, /dev/console, /dev/ptmx.
const AUXILIARY: u32 = 5;
const PTMX: u32 = 2;
/// `TTY_MAJOR`: consoles and serial lines.
const CONSOLES: u32 = 4;
/// The majors of slaves, and how many numbers each has.
const SLAVES: std::ops::RangeInclusive<u32> = 136..=143;
const DEFAULT_MASTER: &[u8] = b"/dev/ptmx";
/// More than a kernel lets exist (`NR_UNIX98_PTY_MAX`).
const INDEX_MAX: u32 = 1 << 20;

/// A terminal in an image.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Tty {
    /// What it is.
    #[prost(enumeration = "Role", tag = "1")]
    pub role: i32,
    /// Access mode and status flags.
    #[prost(uint32, tag = "2")]
    pub flags: u32,
    /// The path it was opened by.
    #[prost(bytes = "vec", tag = "3")]
    pub path: Vec<u8>,
    /// The number of the pseudo terminal.
    #[prost(uint32, tag = "4")]
    pub index: u32,
    /// The path of the master's device.
    #[prost(bytes = "vec", tag = "5")]
    pub master_path: Vec<u8>,
    /// The terminal's device number: of a slave its own, of /dev/tty what it stood for.
    #[prost(uint32, tag = "6")]
    pub major: u32,
    /// See `major`.
    #[prost(uint32, tag = "7")]
    pub minor: u32,
    /// `st_rdev` and `st_dev`, by which `--inherit-fd` names it.
    #[prost(uint64, tag = "8")]
    pub rdev: u64,
    /// See `rdev`.
    #[prost(uint64, tag = "9")]
    pub dev: u64,
    /// `struct termios2`.
    #[prost(bytes = "vec", tag = "10")]
    pub attributes: Vec<u8>,
    /// Whether only root can open it once more.
    #[prost(bool, tag = "11")]
    pub exclusive: bool,
    /// What belongs to the pair, with the master.
    #[prost(message, optional, tag = "12")]
    pub pair: Option<Pair>,
}

/// What belongs to a pseudo terminal as a whole.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Pair {
    /// Whether the slave cannot be opened yet.
    #[prost(bool, tag = "1")]
    pub locked: bool,
    /// Whether the master is in packet mode.
    #[prost(bool, tag = "2")]
    pub packet: bool,
    /// Whether the slave was open once and is not any more.
    #[prost(bool, tag = "3")]
    pub abandoned: bool,
    /// Rows, columns, width and height in pixels.
    #[prost(uint32, repeated, tag = "4")]
    pub size: Vec<u32>,
    /// The slave's permissions, user and group.
    #[prost(uint32, repeated, tag = "5")]
    pub node: Vec<u32>,
    /// What is on its way.
    #[prost(message, required, tag = "6")]
    pub flight: Flight,
}

impl Tty {
    /// The error for one that cannot be made what it was.
    fn failed(&self, error: io::Error) -> Error {
        let path = String::from_utf8_lossy(&self.path);
        Error::kernel(format!("set up the terminal {path}"), error)
    }
}

/// What a terminal is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum Role {
    /// Not a role.
    Unknown = 0,
    /// The master of a pseudo terminal.
    Master = 1,
    /// The slave of a pseudo terminal of the tree.
    Slave = 2,
    /// A slave whose master was closed.
    HungUp = 3,
    /// Somebody's terminal, from outside of the tree.
    Outside = 4,
    /// A terminal that every host has: a console, a serial line.
    Device = 5,
    /// Somebody's terminal, from outside of the tree, to which the connection is to end: it comes
    /// back as one that is hung up.
    Lost = 6,
}

/// The kind.
pub struct TtyKind;

impl Kind for TtyKind {
    type Record = Tty;
    const TAG: u16 = super::tags::TTY;
    const NAME: &'static str = "terminal";

    fn claims(open: &Open<'_>) -> bool {
        if FileType::from_raw_mode(open.stat.st_mode) != FileType::CharacterDevice {
            return false;
        }
        let (major, minor) = (major(open.stat.st_rdev), minor(open.stat.st_rdev));
        (major == AUXILIARY && minor <= PTMX) || major == CONSOLES || SLAVES.contains(&major)
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Tty> {
        read(open, cx)
    }

    fn check(record: &Tty) -> Result<()> {
        status::check(Self::NAME, record.flags)?;
        let corrupt = |what| Err(Error::corrupt(Self::NAME, what));
        let known = Role::try_from(record.role).is_ok_and(|role| role != Role::Unknown);
        if !known || record.index > INDEX_MAX {
            return corrupt("it is none");
        }
        if (record.role() == Role::Master) != record.pair.is_some() {
            return corrupt("half of a pair");
        }
        let pair_is_sound = |pair: &Pair| pair.size.len() == 4 && pair.node.len() == 3;
        if !record.pair.as_ref().is_none_or(pair_is_sound) {
            return corrupt("its pair is incomplete");
        }
        let no_attributes = record.attributes.is_empty() && record.pair.is_none();
        if !no_attributes && attributes_of(record).is_none() {
            return corrupt("its attributes have another size");
        }
        Ok(())
    }

    fn describe(record: &Tty) -> String {
        let path = String::from_utf8_lossy(&record.path);
        match (record.role(), &record.pair) {
            (Role::Master, Some(pair)) => {
                let (rows, columns) = (pair.size[0], pair.size[1]);
                let bytes = pair.flight.bytes();
                format!(
                    "pty {} master {columns}x{rows} queued={bytes}",
                    record.index
                )
            }
            (Role::Slave, _) => format!("pty {} slave", record.index),
            (Role::HungUp, _) => format!("pty {} slave, hung up", record.index),
            (Role::Outside, _) => format!("of outside {path}"),
            (Role::Lost, _) => format!("of outside {path}, hung up"),
            _ => path.into_owned(),
        }
    }

    fn open(record: &Tty, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let flags = status::opening(record.flags) | OFlags::NOCTTY;
        match record.role() {
            Role::Master => {
                let own = master(record, &record.path, cx)?;
                status::set(&own, flags)?;
                Ok(own)
            }
            Role::Slave | Role::HungUp => {
                let master = master(record, &record.master_path, cx)?;
                slave(record, master.as_fd(), flags)
            }
            Role::Lost => {
                let path = Path::new(OsStr::from_bytes(DEFAULT_MASTER));
                let (master, _) = make_from(record.index, path)?;
                slave(record, master.as_fd(), flags)
            }
            Role::Outside => {
                let name = format!("tty[{:x}:{:x}]", record.rdev, record.dev);
                if let Some(inherited) = cx.inherited(name.as_bytes()) {
                    return status::dup(inherited);
                }
                let stdin = rustix::stdio::stdin();
                if !rustix::termios::isatty(stdin) {
                    let path = String::from_utf8_lossy(&record.path);
                    let what = format!(
                        "{path} is to come back as the standard input, which is no terminal"
                    );
                    return Err(Error::Mismatch { what });
                }
                status::reopen(stdin, flags)
            }
            Role::Device | Role::Unknown => {
                let path = Path::new(OsStr::from_bytes(&record.path));
                rustix::fs::open(path, flags, Mode::empty())
                    .map_err(|error| Error::kernel(format!("open {}", path.display()), error))
            }
        }
    }

    fn finish(record: &Tty, own: BorrowedFd<'_>, _cx: &mut dyn RestoreContext) -> Result<()> {
        match &record.pair {
            Some(pair) => finish_master(record, pair, own)?,
            // Others have it too: what a restore that fails has changed, it would have to change
            // back.
            None if attributes_of(record).is_some() => return Ok(()),
            None => {}
        }
        be_exclusive(record, own)
    }

    fn stages(_record: &Tty, _allow: &Allow) -> &'static [Stage] {
        &[Stage::Enable]
    }

    fn act(record: &Tty, _stage: Stage, own: BorrowedFd<'_>, _allow: &Allow) -> Result<()> {
        let Some(wanted) = attributes_of(record).filter(|_| record.pair.is_none()) else {
            return Ok(());
        };
        let failed = |error| record.failed(error);
        if sys::tty::attributes(own).map_err(failed)? != wanted {
            // The tree may be in front already.
            let set = sys::job::without_stop(|| sys::tty::set_attributes(own, &wanted));
            set.map_err(failed)?;
        }
        be_exclusive(record, own)
    }
}

/// Has only root open the terminal once more, where that is so.
fn be_exclusive(record: &Tty, own: BorrowedFd<'_>) -> Result<()> {
    match record.exclusive {
        true => switch(own, Switch::Exclusive, true).map_err(|error| record.failed(error)),
        false => Ok(()),
    }
}

fn attributes_of(record: &Tty) -> Option<Attributes> {
    record.attributes.as_slice().try_into().ok()
}

fn read(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Tty> {
    let own = open.own()?;
    let mut record = Tty {
        flags: open.info.flags,
        path: open.link.clone(),
        rdev: open.stat.st_rdev,
        dev: open.stat.st_dev,
        ..Tty::default()
    };
    if is_master(open) {
        read_master(open, &mut record, cx)?;
        return Ok(record);
    }
    let failed = |error| Error::kernel(format!("ask {} what it is", open.place()), error);
    let device = match sys::tty::device(own) {
        Ok(device) => device,
        Err(error) if Errno::from_io_error(&error) == Some(Errno::IO) => {
            record.set_role(Role::HungUp);
            record.index = slave_index(open.stat.st_rdev).unwrap_or_default();
            record.master_path = DEFAULT_MASTER.to_vec();
            return Ok(record);
        }
        Err(error) => return Err(failed(error)),
    };
    (record.major, record.minor) = (major(device), minor(device));
    record.exclusive = is_on(own, Switch::Exclusive).map_err(failed)?;
    let Some(index) = slave_index(device) else {
        record.set_role(Role::Device);
        record.attributes = sys::tty::attributes(own).map_err(failed)?.to_vec();
        return Ok(record);
    };
    record.index = index;
    if let Some(master) = masters(cx).find(|master| index_of(master) == Some(index)) {
        record.set_role(Role::Slave);
        record.master_path = master.link.clone();
        return Ok(record);
    }
    if !cx.allow().shell_job {
        if cx.allow().unix_close {
            record.set_role(Role::Lost);
            // It keeps a number as long as it is open: none that is to be another's.
            let others = masters(cx).filter_map(index_of);
            let above = others.map(|other| other + 1).max();
            record.index = index.max(above.unwrap_or(0));
            return Ok(record);
        }
        let why = "it is a terminal from outside of the tree";
        return Err(open.unsupported(why, Some("--shell-job")));
    }
    record.set_role(Role::Outside);
    record.attributes = sys::tty::attributes(own).map_err(failed)?.to_vec();
    Ok(record)
}

/// Whether a file is the slave of a pseudo terminal.
pub(super) fn is_slave(stat: &Stat) -> bool {
    let device = FileType::from_raw_mode(stat.st_mode) == FileType::CharacterDevice;
    device && SLAVES.contains(&major(stat.st_rdev))
}

fn is_master(open: &Open<'_>) -> bool {
    let rdev = open.stat.st_rdev;
    let device = FileType::from_raw_mode(open.stat.st_mode) == FileType::CharacterDevice;
    device && (major(rdev), minor(rdev)) == (AUXILIARY, PTMX)
}

fn masters(cx: &dyn DumpContext) -> impl Iterator<Item = &Open<'_>> {
    cx.all().iter().filter(|open| is_master(open))
}

fn index_of(master: &Open<'_>) -> Option<u32> {
    sys::tty::index(master.own().ok()?).ok()
}

/// The number of the pseudo terminal whose slave has this device number.
fn slave_index(device: u64) -> Option<u32> {
    let major = major(device);
    let base = major.checked_sub(*SLAVES.start())?;
    SLAVES.contains(&major).then(|| base << 20 | minor(device))
}

/// Whether a descriptor of the tree is the slave with this number.
fn has_slave(index: u32, cx: &dyn DumpContext) -> bool {
    cx.all().iter().any(|open| {
        let device = FileType::from_raw_mode(open.stat.st_mode) == FileType::CharacterDevice;
        let own = || open.own().ok().and_then(|own| sys::tty::device(own).ok());
        let rdev = open.stat.st_rdev;
        let is_tty = (major(rdev), minor(rdev)) == (AUXILIARY, 0);
        device
            && (slave_index(rdev) == Some(index)
                || (is_tty && own().and_then(slave_index) == Some(index)))
    })
}

fn read_master(open: &Open<'_>, record: &mut Tty, cx: &mut dyn DumpContext) -> Result<()> {
    let own = open.own()?;
    let failed = |error| Error::kernel(format!("read {}", open.place()), error);
    record.set_role(Role::Master);
    record.index = sys::tty::index(own).map_err(failed)?;
    if sys::tty::discipline(own).map_err(failed)? != 0 {
        return Err(open.unsupported(
            "it has another line discipline than that of terminals",
            None,
        ));
    }
    if sys::tty::has_locked_modes(own).map_err(failed)? {
        return Err(open.unsupported("some of its modes are locked (TIOCSLCKTRMIOS)", None));
    }
    record.attributes = sys::tty::attributes(own).map_err(failed)?.to_vec();
    let size = tcgetwinsize(own).map_err(|error| failed(error.into()))?;
    let mut pair = Pair {
        locked: is_on(own, Switch::Locked).map_err(failed)?,
        packet: is_on(own, Switch::Packet).map_err(failed)?,
        abandoned: is_abandoned(own).map_err(|error| failed(error.into()))?,
        size: [size.ws_row, size.ws_col, size.ws_xpixel, size.ws_ypixel]
            .map(Into::into)
            .into(),
        node: vec![0o620, 0, 0],
        flight: Flight::default(),
    };
    let node = slave_path(&record.path, record.index);
    if let Ok(stat) = rustix::fs::stat(&node) {
        pair.node = vec![stat.st_mode & 0o7777, stat.st_uid, stat.st_gid];
    }
    // Opening a slave that nobody has opened yet would be noticed.
    if !pair.locked && (pair.abandoned || has_slave(record.index, cx)) {
        pair.flight = queue::peek(own).map_err(failed)?;
    }
    record.pair = Some(pair);
    Ok(())
}

/// Whether the slave was open once and is not any more.
fn is_abandoned(master: BorrowedFd<'_>) -> rustix::io::Result<bool> {
    Ok(ready::events(master, PollFlags::empty())?.contains(PollFlags::HUP))
}

/// Where the slave is, given the path of the master's device.
fn slave_path(master: &[u8], index: u32) -> PathBuf {
    let master = Path::new(OsStr::from_bytes(master));
    let folder = master.parent().unwrap_or(Path::new("/dev"));
    let is_devpts = folder.file_name() == Some(OsStr::new("pts"));
    let folder = if is_devpts {
        folder.to_path_buf()
    } else {
        folder.join("pts")
    };
    folder.join(index.to_string())
}

/// The master with the number of `record`: the first description of a pair to be opened makes it.
fn master(record: &Tty, path: &[u8], cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
    let key = (super::tags::TTY, u64::from(record.index));
    if let Some(known) = cx.shared().get(&key).and_then(|fds| fds.first()) {
        return status::dup(known.as_fd());
    }
    let made = make(record.index, Path::new(OsStr::from_bytes(path)))?;
    let own = status::dup(made.as_fd())?;
    cx.shared().insert(key, vec![made]);
    Ok(own)
}

/// Makes the pseudo terminal `index`: the kernel gives the lowest number that is free.
fn make(index: u32, path: &Path) -> Result<OwnedFd> {
    let (made, got) = make_from(index, path)?;
    if got > index {
        let slave = slave_path(path.as_os_str().as_bytes(), index);
        let what = format!("the terminal {} is in use", slave.display());
        return Err(Error::InUse { what });
    }
    Ok(made)
}

/// Makes a pseudo terminal whose number is not below `index`, and has a slave of it be opened; its
/// number.
fn make_from(index: u32, path: &Path) -> Result<(OwnedFd, u32)> {
    let mut lower = Vec::new();
    loop {
        let (made, got) = make_any(path)?;
        if got >= index {
            unlock(&made)?;
            return Ok((made, got));
        }
        lower.push(made);
    }
}

/// Makes a pseudo terminal; its number.
fn make_any(path: &Path) -> Result<(OwnedFd, u32)> {
    let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
    let made = rustix::fs::open(path, flags, Mode::empty())
        .map_err(|error| Error::kernel(format!("open {}", path.display()), error))?;
    let number = sys::tty::index(&made)
        .map_err(|error| Error::kernel(format!("ask {} its number", path.display()), error))?;
    Ok((made, number))
}

/// Has a slave be opened.
fn unlock(master: &OwnedFd) -> Result<()> {
    let unlocked = switch(master, Switch::Locked, false);
    unlocked.map_err(|error| Error::kernel("unlock a pseudo terminal", error))
}

fn slave(record: &Tty, master: BorrowedFd<'_>, flags: OFlags) -> Result<OwnedFd> {
    let own = queue::open_slave(master, flags)
        .map_err(|error| Error::kernel(format!("open the slave of pty {}", record.index), error))?;
    status::set(&own, flags)?;
    Ok(own)
}

fn finish_master(record: &Tty, pair: &Pair, own: BorrowedFd<'_>) -> Result<()> {
    let what = format!("set up pty {}", record.index);
    let failed = |error| Error::kernel(what.clone(), error);
    let attributes = attributes_of(record).expect("checked");
    if pair.abandoned || !pair.flight.is_empty() {
        let slave = queue::peer(own).map_err(failed)?;
        queue::put(&pair.flight, own, slave.as_fd(), &attributes).map_err(failed)?;
    } else {
        sys::tty::set_attributes(own, &attributes).map_err(failed)?;
    }
    let size = |at: usize| u16::try_from(pair.size[at]).unwrap_or(u16::MAX);
    let size = Winsize {
        ws_row: size(0),
        ws_col: size(1),
        ws_xpixel: size(2),
        ws_ypixel: size(3),
    };
    tcsetwinsize(own, size).map_err(|error| failed(error.into()))?;
    let node = slave_path(&record.path, record.index);
    let (user, group) = (Uid::from_raw(pair.node[1]), Gid::from_raw(pair.node[2]));
    let mode = Mode::from_raw_mode(pair.node[0] & 0o7777);
    rustix::fs::chownat(CWD, &node, Some(user), Some(group), AtFlags::empty())
        .and_then(|()| rustix::fs::chmod(&node, mode))
        .map_err(|error| Error::kernel(format!("give {} away", node.display()), error))?;
    if pair.packet {
        switch(own, Switch::Packet, true).map_err(failed)?;
    }
    if pair.locked {
        switch(own, Switch::Locked, true).map_err(failed)?;
    }
    log::trace!("pty {} is fd {} here", record.index, own.as_raw_fd());
    Ok(())
}

#[cfg(test)]
mod tests {
    use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
    use rustix::termios::{LocalModes, OptionalActions, tcgetattr, tcsetattr};

    use super::super::socket::testing::{World, cycle};
    use super::super::testing::decoded;
    use rustix::event::{PollFd, Timespec};

    use super::*;
    use crate::testing::alone;

    fn master() -> OwnedFd {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        unlockpt(&master).unwrap();
        master
    }

    fn slave(master: &OwnedFd) -> OwnedFd {
        let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
        ioctl_tiocgptpeer(master, flags).unwrap()
    }

    fn pty() -> [OwnedFd; 2] {
        let master = master();
        let slave = slave(&master);
        [master, slave]
    }

    fn write(to: &OwnedFd, bytes: &[u8]) {
        assert_eq!(rustix::io::write(to, bytes).unwrap(), bytes.len());
    }

    fn is_readable(fd: &OwnedFd) -> bool {
        let mut fds = [PollFd::new(fd, PollFlags::IN)];
        let soon = Timespec {
            tv_sec: 0,
            tv_nsec: 20_000_000,
        };
        rustix::event::poll(&mut fds, Some(&soon)).unwrap();
        fds[0].revents().contains(PollFlags::IN)
    }

    fn read(from: &OwnedFd) -> Vec<u8> {
        let mut bytes = vec![0; 10_000];
        assert!(is_readable(from), "nothing arrives");
        let read = rustix::io::read(from, &mut bytes).unwrap();
        bytes.truncate(read);
        bytes
    }

    fn change(fd: &OwnedFd, change: impl FnOnce(&mut rustix::termios::Termios)) {
        let mut attributes = tcgetattr(fd).unwrap();
        change(&mut attributes);
        tcsetattr(fd, OptionalActions::Now, &attributes).unwrap();
    }

    fn link(fd: &OwnedFd) -> Vec<u8> {
        let link = format!("/proc/thread-self/fd/{}", fd.as_raw_fd());
        rustix::fs::readlink(link, Vec::new()).unwrap().into_bytes()
    }

    #[test]
    fn a_pair_keeps_its_number_modes_and_size() {
        alone!({
            let [master, slave] = pty();
            change(&slave, |attributes| {
                attributes
                    .local_modes
                    .remove(LocalModes::ECHO | LocalModes::ISIG);
                attributes.special_codes[rustix::termios::SpecialCodeIndex::VEOF] = 9;
            });
            let size = Winsize {
                ws_row: 50,
                ws_col: 132,
                ws_xpixel: 1,
                ws_ypixel: 2,
            };
            tcsetwinsize(&master, size).unwrap();
            switch(&master, Switch::Packet, true).unwrap();
            switch(&slave, Switch::Exclusive, true).unwrap();
            rustix::fs::fcntl_setfl(&master, OFlags::NONBLOCK).unwrap();
            let node = link(&slave);
            rustix::fs::chmod(&*node, Mode::from_raw_mode(0o604)).unwrap();
            let wanted = sys::tty::attributes(&slave).unwrap();
            let (index, master_link) = (sys::tty::index(&master).unwrap(), link(&master));
            // The slave comes first, as it may in a dump.
            let [slave, master] = cycle([slave, master]);
            assert_eq!(sys::tty::index(&master).unwrap(), index);
            assert_eq!((link(&master), link(&slave)), (master_link, node.clone()));
            assert_eq!(sys::tty::attributes(&slave).unwrap(), wanted);
            let got = tcgetwinsize(&slave).unwrap();
            assert_eq!((got.ws_row, got.ws_col, got.ws_ypixel), (50, 132, 2));
            assert!(is_on(&master, Switch::Packet).unwrap());
            assert!(is_on(&slave, Switch::Exclusive).unwrap());
            assert_eq!(rustix::fs::stat(&*node).unwrap().st_mode & 0o777, 0o604);
            let flags = rustix::fs::fcntl_getfl(&master).unwrap();
            assert!(flags.contains(OFlags::NONBLOCK));
            write(&master, b"hello\n");
            assert_eq!(read(&slave), b"hello\n");
            // A descriptor of it that is not close-on-exec is not said to be.
            let copy = rustix::io::dup(&slave).unwrap();
            let info = format!("/proc/thread-self/fdinfo/{}", copy.as_raw_fd());
            let info = std::fs::read_to_string(info).unwrap();
            assert!(!info.contains("flags:\t0200"), "{info}");
        });
    }

    #[test]
    fn how_a_slave_was_opened_shows_in_its_flags() {
        alone!({
            let [master, peer] = pty();
            let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
            let by_path = rustix::fs::open(&*link(&peer), flags, Mode::empty()).unwrap();
            let flags = |fd: &OwnedFd| {
                let flags = rustix::fs::fcntl_getfl(fd).unwrap();
                // The kernel keeps with a description what it was asked for its first descriptor.
                flags.difference(OFlags::CLOEXEC)
            };
            let before = [&peer, &by_path, &master].map(flags);
            assert!(before[1].contains(OFlags::LARGEFILE) && before[0] != before[1]);
            let after = cycle([peer, by_path, master]);
            assert_eq!(after.each_ref().map(flags), before);
        });
    }

    #[test]
    fn lines_typed_and_text_printed_arrive() {
        alone!({
            let [master, slave] = pty();
            write(&slave, b"printed\n");
            change(&slave, |attributes| {
                attributes.local_modes.remove(LocalModes::ECHO)
            });
            write(&master, b"one\ntwo\nend of file\x04\x04not en");
            let [master, slave] = cycle([master, slave]);
            for line in [&b"one\n"[..], b"two\n", b"end of file", b""] {
                assert_eq!(read(&slave), line);
            }
            assert!(!is_readable(&slave), "the last line is not ended");
            write(&master, b"ded\n");
            assert_eq!(read(&slave), b"not ended\n");
            assert_eq!(read(&master), b"printed\r\n");
            assert!(!is_readable(&master));
        });
    }

    #[test]
    fn raw_input_arrives_byte_for_byte() {
        alone!({
            let [master, slave] = pty();
            change(&slave, rustix::termios::Termios::make_raw);
            write(&master, b"\x03\x04\r\n\x00\x7fraw");
            write(&slave, b"\x1b[2Jvi\n");
            let [master, slave] = cycle([master, slave]);
            assert_eq!(read(&slave), b"\x03\x04\r\n\x00\x7fraw");
            assert_eq!(read(&master), b"\x1b[2Jvi\n");
        });
    }

    /// Reads until there is no more.
    fn read_all(fd: &OwnedFd) -> Vec<u8> {
        let mut all = Vec::new();
        while is_readable(fd) {
            all.extend(read(fd));
        }
        all
    }

    #[test]
    fn more_than_the_line_discipline_holds_arrives() {
        alone!({
            let [master, slave] = pty();
            change(&slave, rustix::termios::Termios::make_raw);
            rustix::fs::fcntl_setfl(&slave, OFlags::RDWR | OFlags::NONBLOCK).unwrap();
            rustix::fs::fcntl_setfl(&master, OFlags::RDWR | OFlags::NONBLOCK).unwrap();
            // In small pieces and in large ones.
            let fill = |fd: &OwnedFd, piece: usize| {
                let mut all: Vec<u8> = Vec::new();
                let piece = (0..piece).map(|at| (at % 251) as u8);
                let piece = piece.collect::<Vec<u8>>();
                while all.len() < 6000 {
                    let written = rustix::io::write(fd, &piece).unwrap();
                    all.extend(&piece[..written]);
                }
                all
            };
            let (printed, typed) = (fill(&slave, 3001), fill(&master, 777));
            let [master, slave] = cycle([master, slave]);
            let [master, slave] = cycle([master, slave]);
            assert!(read_all(&master) == printed, "what was printed");
            assert!(read_all(&slave) == typed, "what was typed");
            write(&slave, b"not stopped");
            assert_eq!(read(&master), b"not stopped");
        });
    }

    #[test]
    fn a_target_left_running_keeps_what_is_in_flight() {
        alone!({
            let [master, slave] = pty();
            change(&slave, |attributes| {
                attributes.local_modes.remove(LocalModes::ECHO)
            });
            write(&master, b"line\npart");
            write(&slave, b"out");
            switch(&master, Switch::Packet, true).unwrap();
            let wanted = sys::tty::attributes(&slave).unwrap();
            let copies = vec![
                rustix::io::dup(&master).unwrap(),
                rustix::io::dup(&slave).unwrap(),
            ];
            let mut world = World::new(copies);
            world.dump().unwrap();
            world.dump().unwrap();
            assert_eq!(
                world.lines()[0],
                format!(
                    "pty {} master 0x0 queued=12",
                    sys::tty::index(&master).unwrap()
                )
            );
            assert_eq!(sys::tty::attributes(&slave).unwrap(), wanted);
            assert_eq!(read(&slave), b"line\n");
            assert!(!is_readable(&slave));
            write(&master, b"ial\n");
            assert_eq!(read(&slave), b"partial\n");
            assert_eq!(read(&master), b"\0out");
        });
    }

    #[test]
    fn hung_up_slaves_stay_hung_up() {
        alone!({
            let [master, slave] = pty();
            drop(master);
            let [slave] = cycle([slave]);
            assert_eq!(rustix::io::read(&slave, &mut [0; 1]).unwrap(), 0);
            assert_eq!(rustix::io::write(&slave, b"x").unwrap_err(), Errno::IO);
        });
    }

    #[test]
    fn an_abandoned_master_reads_what_was_printed_and_then_an_error() {
        alone!({
            let [master, slave] = pty();
            write(&slave, b"bye");
            drop(slave);
            let [master] = cycle([master]);
            assert_eq!(read(&master), b"bye");
            assert_eq!(
                rustix::io::read(&master, &mut [0; 1]).unwrap_err(),
                Errno::IO
            );
        });
    }

    #[test]
    fn a_master_that_nobody_has_opened_a_slave_of() {
        alone!({
            let first = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
            let [first, second] = cycle([first, master()]);
            assert!(is_on(&first, Switch::Locked).unwrap());
            assert!(!is_on(&second, Switch::Locked).unwrap());
            assert!(!is_abandoned(first.as_fd()).unwrap());
            let slave = slave(&second);
            write(&slave, b"x");
            assert_eq!(read(&second), b"x");
        });
    }

    #[test]
    fn a_number_in_use_is_refused_by_name() {
        alone!({
            let [taken, slave] = pty();
            let mut world = World::new(vec![taken, slave]);
            world.dump().unwrap();
            let line = world.lines().remove(1);
            let second = world.copy();
            let _held = world.restore().unwrap();
            let error = second.restore().unwrap_err();
            let index = line.split(' ').nth(1).unwrap();
            let wanted = format!("the terminal /dev/pts/{index} is in use");
            assert_eq!(error.to_string(), wanted);
        });
    }

    #[test]
    fn what_is_hung_up_takes_no_number_of_another() {
        alone!({
            let [master, slave] = pty();
            let [outer, lost] = pty();
            let number = sys::tty::index(&master).unwrap();
            let mut world = World::new(vec![lost, master, slave]);
            world.allow.unix_close = true;
            world.dump().unwrap();
            let image = world.copy();
            drop((world, outer));
            let restored = image.restore().unwrap();
            assert_eq!(rustix::io::read(&restored[0], &mut [0; 1]).unwrap(), 0);
            assert_eq!(sys::tty::index(&restored[1]).unwrap(), number);
        });
    }

    #[test]
    fn terminals_of_outside_need_the_option() {
        alone!({
            let [master, slave] = pty();
            let device = sys::tty::device(&slave).unwrap();
            let mut world = World::new(vec![slave]);
            let error = world.dump().unwrap_err();
            assert!(error.to_string().contains("--shell-job"), "{error}");
            world.allow.unix_close = true;
            world.dump().unwrap();
            assert!(world.lines()[0].ends_with(", hung up"));
            let lost = world.copy().restore().unwrap().remove(0);
            assert_eq!(rustix::io::read(&lost, &mut [0; 1]).unwrap(), 0);
            world.allow.shell_job = true;
            world.dump().unwrap();
            assert!(world.lines()[0].starts_with("of outside /dev/pts/"));
            let number = i32::try_from(major(device) << 8 | minor(device) & 0xff).unwrap();
            let terminal = world.description(0);
            assert!(control::is_terminal(terminal, number));
            assert!(!control::is_terminal(terminal, number ^ 1));
            drop(master);
        });
    }

    #[test]
    fn the_calls_of_a_session_leader() {
        let mut script = crate::script::Script::default();
        let mut record = Tty::default();
        record.set_role(Role::Slave);
        let mut take = |record: &Tty| {
            let terminal = decoded(&TtyKind, record).unwrap();
            control::take(&mut script, 0, &*terminal);
        };
        take(&record);
        record.set_role(Role::Outside);
        record.attributes = vec![0; sys::tty::ATTRIBUTES_BYTES];
        take(&record);
        control::foreground(&mut script, 0, 77);
        assert_eq!(
            script.to_string(),
            "ioctl(fd=0, TIOCSCTTY, steal=0)  # controlling terminal\n\
             ioctl(fd=0, TIOCSCTTY, steal=1)  # controlling terminal\n\
             ioctl(fd=0, TIOCSPGRP, group=77)  # foreground process group\n"
        );
    }

    #[test]
    fn damaged_payloads_are_refused() {
        let mut record = Tty::default();
        assert!(TtyKind::check(&record).is_err());
        record.set_role(Role::Master);
        assert!(TtyKind::check(&record).is_err());
        record.pair = Some(Pair::default());
        assert!(TtyKind::check(&record).is_err());
        record.set_role(Role::Slave);
        record.pair = None;
        record.attributes = vec![0; 3];
        assert!(TtyKind::check(&record).is_err());
    }
}
