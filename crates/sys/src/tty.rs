//! Terminals: the ioctls that `rustix` has not, with plain values (ioctl_tty(2)).

use std::io;
use std::os::fd::{AsFd, AsRawFd};

use rustix::fs::Dev;

/// The size of `struct termios2` in bytes.
pub const ATTRIBUTES_BYTES: usize = 44;

/// `struct termios2`: flags, line discipline, special characters, speeds.
pub type Attributes = [u8; ATTRIBUTES_BYTES];

const TCGETS2: libc::c_ulong = libc::TCGETS2;
const TCSETS2: libc::c_ulong = libc::TCSETS2;
const TIOCGDEV: libc::c_ulong = libc::TIOCGDEV;
const TIOCGPTN: libc::c_ulong = libc::TIOCGPTN;
const TIOCGLCKTRMIOS: libc::c_ulong = libc::TIOCGLCKTRMIOS;

/// The attributes of the terminal behind `fd`; of a master, those of its slave.
///
/// # Errors
/// The call's errno; `EIO` for a terminal that is gone.
pub fn attributes(fd: impl AsFd) -> io::Result<Attributes> {
    let mut bytes = [0u8; ATTRIBUTES_BYTES];
    // SAFETY: the kernel writes the 44 bytes of the structure.
    check(unsafe { libc::ioctl(raw(&fd), TCGETS2, bytes.as_mut_ptr()) })?;
    Ok(bytes)
}

/// Sets the attributes at once.
///
/// # Errors
/// The call's errno.
pub fn set_attributes(fd: impl AsFd, attributes: &Attributes) -> io::Result<()> {
    // SAFETY: the kernel reads the 44 bytes of the structure.
    check(unsafe { libc::ioctl(raw(&fd), TCSETS2, attributes.as_ptr()) })
}

/// The device number of the terminal behind `fd`: of /dev/tty the one that it stands for, of a
/// master its slave's.
///
/// # Errors
/// The call's errno.
pub fn device(fd: impl AsFd) -> io::Result<Dev> {
    let encoded = number(&fd, TIOCGDEV)?.cast_unsigned();
    let (major, minor) = (
        (encoded >> 8) & 0xfff,
        (encoded & 0xff) | ((encoded >> 12) & 0xfff00),
    );
    Ok(rustix::fs::makedev(major, minor))
}

/// The number of the pseudo terminal that `fd` is the master of.
///
/// # Errors
/// The call's errno; `ENOTTY` for what is no master.
pub fn index(fd: impl AsFd) -> io::Result<u32> {
    number(&fd, TIOCGPTN).map(i32::cast_unsigned)
}

/// How many bytes can be read: of a slave in canonical mode, those of complete lines.
///
/// # Errors
/// The call's errno.
pub fn unread(fd: impl AsFd) -> io::Result<usize> {
    number(&fd, libc::FIONREAD).map(|count| usize::try_from(count).unwrap_or_default())
}

/// The number of the line discipline.
///
/// # Errors
/// The call's errno.
pub fn discipline(fd: impl AsFd) -> io::Result<i32> {
    number(&fd, libc::TIOCGETD)
}

/// True if some of a terminal's modes cannot be changed (`TIOCSLCKTRMIOS`); of a master, those of
/// its slave.
///
/// # Errors
/// The call's errno.
pub fn has_locked_modes(fd: impl AsFd) -> io::Result<bool> {
    // `struct termios` of the kernel.
    let mut modes = [0u8; 36];
    // SAFETY: the kernel writes the 36 bytes of the structure.
    check(unsafe { libc::ioctl(raw(&fd), TIOCGLCKTRMIOS, modes.as_mut_ptr()) })?;
    Ok(modes.iter().any(|byte| *byte != 0))
}

/// Something about a terminal that is on or off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Switch {
    /// A master in packet mode.
    Packet,
    /// A master whose slave cannot be opened yet.
    Locked,
    /// A terminal that only root can open once more.
    Exclusive,
}

/// Whether it is on.
///
/// # Errors
/// The call's errno.
pub fn is_on(fd: impl AsFd, what: Switch) -> io::Result<bool> {
    let request = match what {
        Switch::Packet => 0x8004_5438,
        Switch::Locked => 0x8004_5439,
        Switch::Exclusive => 0x8004_5440,
    };
    number(&fd, request).map(|value| value != 0)
}

/// Switches it on or off.
///
/// # Errors
/// The call's errno.
pub fn switch(fd: impl AsFd, what: Switch, on: bool) -> io::Result<()> {
    let value = libc::c_int::from(on);
    let request = match (what, on) {
        (Switch::Packet, _) => libc::TIOCPKT,
        (Switch::Locked, _) => libc::TIOCSPTLCK,
        (Switch::Exclusive, true) => libc::TIOCEXCL,
        (Switch::Exclusive, false) => libc::TIOCNXCL,
    };
    // SAFETY: the kernel reads one int, or nothing.
    check(unsafe { libc::ioctl(raw(&fd), request, &raw const value) })
}

fn number(fd: &impl AsFd, request: libc::c_ulong) -> io::Result<i32> {
    let mut value: libc::c_int = 0;
    // SAFETY: the requests of this file that ask for a number write one int.
    check(unsafe { libc::ioctl(raw(fd), request, &raw mut value) })?;
    Ok(value)
}

fn raw(fd: &impl AsFd) -> std::os::fd::RawFd {
    fd.as_fd().as_raw_fd()
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use rustix::pty::{OpenptFlags, openpt, unlockpt};

    use super::*;

    #[test]
    fn a_pseudo_terminal_tells_about_itself() {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
        assert!(is_on(&master, Switch::Locked).unwrap());
        unlockpt(&master).unwrap();
        let slave = rustix::pty::ioctl_tiocgptpeer(
            &master,
            OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC,
        )
        .unwrap();
        let number = index(&master).unwrap();
        let device = device(&slave).unwrap();
        assert_eq!(rustix::fs::fstat(&slave).unwrap().st_rdev, device);
        assert_eq!(rustix::fs::minor(device) & 0xff, number & 0xff);
        switch(&master, Switch::Packet, true).unwrap();
        switch(&slave, Switch::Exclusive, true).unwrap();
        assert!(is_on(&master, Switch::Packet).unwrap());
        assert!(is_on(&slave, Switch::Exclusive).unwrap());
        let mut attributes = super::attributes(&slave).unwrap();
        attributes[4] ^= 1;
        set_attributes(&slave, &attributes).unwrap();
        assert_eq!(super::attributes(&master).unwrap(), attributes);
    }
}
