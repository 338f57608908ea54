//! The controlling terminal: which description stands for it, and the calls by which a session
//! leader gets it back (tty_ioctl(4), credentials(7)).

use syscalls::Sysno;

use super::{Role, TtyKind};
use crate::fd::Description;
use crate::script::{Arg, Script};

const TIOCSCTTY: u32 = linux_raw_sys::ioctl::TIOCSCTTY;
const TIOCSPGRP: u32 = linux_raw_sys::ioctl::TIOCSPGRP;
const TIOCNOTTY: u32 = linux_raw_sys::ioctl::TIOCNOTTY;

/// True if the description is the terminal that /proc/PID/stat calls `tty_nr`.
#[must_use]
pub fn is_terminal(description: &dyn Description, tty_nr: i32) -> bool {
    let Some(record) = description.record::<TtyKind>() else {
        return false;
    };
    let number = tty_nr.cast_unsigned();
    let (major, minor) = (
        (number >> 8) & 0xfff,
        (number & 0xff) | ((number >> 12) & 0xfff00),
    );
    let is_slave = !matches!(
        record.role(),
        Role::Master | Role::HungUp | Role::Lost | Role::Unknown
    );
    is_slave && (record.major, record.minor) == (major, minor)
}

/// Adds the call by which a session leader without a terminal takes the one behind `fd`, which is
/// `terminal`; after `setsid`. A terminal of outside is taken from the session that has it: that is
/// the restorer's own.
pub fn take(script: &mut Script, fd: impl Into<Arg>, terminal: &dyn Description) {
    let record = terminal.record::<TtyKind>();
    let steal = u32::from(record.is_some_and(|record| record.role() == Role::Outside));
    script.call(Sysno::ioctl, [fd.into(), TIOCSCTTY.into(), steal.into()]);
    script.note("controlling terminal");
}

/// Adds the call by which a task that does not lead its session gives up the terminal behind `fd`,
/// which it started with.
pub fn give_up(script: &mut Script, fd: impl Into<Arg>) {
    script.call(Sysno::ioctl, [fd.into(), TIOCNOTTY.into()]);
    script.note("no controlling terminal");
}

/// Adds the call that puts the process group `group` in front. By a member of the session, with
/// `SIGTTOU` blocked, once that group exists.
pub fn foreground(script: &mut Script, fd: impl Into<Arg>, group: i32) {
    let group = script.bytes(&group.to_ne_bytes());
    script.call(Sysno::ioctl, [fd.into(), TIOCSPGRP.into(), group.into()]);
    script.note("foreground process group");
}
