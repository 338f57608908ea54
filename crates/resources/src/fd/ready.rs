//! What poll(2) says of a file at this moment.

use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};

/// The events of `file` among `wanted`, and errors and hang-ups, without a wait.
///
/// # Errors
/// The call's errno.
pub(crate) fn events(file: BorrowedFd<'_>, wanted: PollFlags) -> rustix::io::Result<PollFlags> {
    let mut watched = [PollFd::new(&file, wanted)];
    let at_once = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut watched, Some(&at_once))?;
    Ok(watched[0].revents())
}
