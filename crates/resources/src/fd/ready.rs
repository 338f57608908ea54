//! What poll(2) says of a file at this moment.

use std::os::fd::BorrowedFd;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;

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
    // It does not wait, and a signal ends it all the same.
    retry_on_intr(|| poll(&mut watched, Some(&at_once)))?;
    Ok(watched[0].revents())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::time::Duration;

    use sys::tick::Ticker;

    use super::*;
    use crate::testing::alone;

    #[test]
    fn signals_end_no_look() {
        alone!({
            let (reader, writer) = rustix::pipe::pipe().unwrap();
            let _signals = Ticker::start(Duration::from_micros(20), None).unwrap();
            for _ in 0..300_000 {
                let found = events(reader.as_fd(), PollFlags::IN);
                assert_eq!(found, Ok(PollFlags::empty()));
            }
            drop(writer);
        });
    }
}
