//! How an epoll instance polls the network (`EPIOCGPARAMS`, Linux 6.9).

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// `struct epoll_params`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Params {
    /// For how long a wait polls, in microseconds.
    pub busy_poll_us: u32,
    /// How many packets one poll takes.
    pub budget: u16,
    /// Not 0: an instance prefers busy polling to interrupts (`prefer_busy_poll`).
    pub prefer: u8,
    padding: u8,
}

impl Params {
    /// The parameters with these values.
    #[must_use]
    pub const fn new(busy_poll_us: u32, budget: u16, prefer: u8) -> Self {
        Self {
            busy_poll_us,
            budget,
            prefer,
            padding: 0,
        }
    }
}

/// `EPIOCSPARAMS` and `EPIOCGPARAMS`.
const SET_PARAMS: u32 = 0x4008_8a01;
const GET_PARAMS: u32 = 0x8008_8a02;

/// The parameters of an epoll instance. See ioctl_eventpoll(2).
///
/// # Errors
/// `ENOTTY` or `EINVAL` on kernels that do not have them.
pub fn params(epoll: BorrowedFd<'_>) -> io::Result<Params> {
    let mut params = Params::default();
    let request = libc::Ioctl::from(GET_PARAMS);
    // SAFETY: the kernel writes one structure of this size.
    match unsafe { libc::ioctl(epoll.as_raw_fd(), request, &raw mut params) } {
        0 => Ok(params),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Sets the parameters of an epoll instance. See ioctl_eventpoll(2).
///
/// # Errors
/// `EPERM` for a budget of more than 64 packets without `CAP_NET_ADMIN`; those of [`params`].
pub fn set_params(epoll: BorrowedFd<'_>, params: Params) -> io::Result<()> {
    let request = libc::Ioctl::from(SET_PARAMS);
    // SAFETY: the kernel reads one structure of this size.
    match unsafe { libc::ioctl(epoll.as_raw_fd(), request, &raw const params) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::event::epoll::{CreateFlags, create};

    use super::*;

    #[test]
    fn parameters_are_told_as_they_were_set() {
        let epoll = create(CreateFlags::CLOEXEC).expect("an epoll");
        let wanted = Params::new(50, 8, 1);
        if let Err(error) = set_params(epoll.as_fd(), wanted) {
            eprintln!("skipped: no parameters of epoll here: {error}");
            return;
        }
        assert_eq!(params(epoll.as_fd()).expect("told"), wanted);
    }
}
