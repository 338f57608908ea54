//! The tracker itself: holds descriptors, answers one client after the other, and goes.
//!
//! It was forked and must not use what other threads may have held locked: it neither logs nor
//! prints. It is let down by nothing but its own end: whatever a client does wrong ends the
//! conversation with that client.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{SocketFlags, accept_with};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::trust::{is_trusted, start_ticks};
use super::wire::{self, Said, Tracked, What};

/// How long a new tracker waits for its first round to end.
const FIRST_PATIENCE: Duration = Duration::from_secs(3600);
/// The longest that a tracker can be asked to wait for the next round.
const LONGEST_IDLE: Duration = Duration::from_secs(10 * 365 * 86400);

/// The tracker of one tree.
struct Server<'a> {
    listener: &'a OwnedFd,
    /// The root of the tree.
    root: OwnedFd,
    tasks: Vec<(Tracked, OwnedFd)>,
    /// The image up to which writes are known; empty when some may have been forgotten.
    image: Vec<u8>,
    /// When it has waited long enough for the next round.
    until: Instant,
}

/// What happened.
enum Woken {
    /// Somebody is there, or says something.
    Ready,
    /// It is time to go: the root has ended, or nobody came for too long.
    Over,
}

/// Serves the clients of `listener` until the task `root` has ended, one of them says that it is
/// over, or none has come for a time.
pub(super) fn serve(listener: &OwnedFd, root: Tracked) {
    let Some(pidfd) = Pid::from_raw(root.pid)
        .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok())
        .filter(|_| start_ticks(root.pid) == Some(root.start_ticks))
    else {
        return;
    };
    let mut server = Server {
        listener,
        root: pidfd,
        tasks: Vec::new(),
        image: Vec::new(),
        until: Instant::now() + FIRST_PATIENCE,
    };
    while let Woken::Ready = server.wait(server.listener.as_fd(), Some(server.until)) {
        let Ok(client) = accept_with(server.listener, SocketFlags::CLOEXEC) else {
            continue;
        };
        if !is_trusted(&client) {
            continue;
        }
        match server.talk(&client) {
            Ok(true) => {}
            Ok(false) => return,
            // It died, or what it said made no sense: it is as if it had hung up.
            Err(_) => {}
        }
    }
}

impl Server<'_> {
    /// Waits until there is something to read, the root has ended, or it is too late.
    fn wait(&self, fd: BorrowedFd<'_>, until: Option<Instant>) -> Woken {
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Woken::Over;
            }
            let left = left.and_then(|left| Timespec::try_from(left).ok());
            let mut fds = [
                PollFd::from_borrowed_fd(fd, PollFlags::IN),
                PollFd::new(&self.root, PollFlags::IN),
            ];
            match poll(&mut fds, left.as_ref()) {
                Err(Errno::INTR) | Ok(0) => continue,
                Err(_) => return Woken::Over,
                Ok(_) => {}
            }
            if !fds[1].revents().is_empty() {
                return Woken::Over;
            }
            return Woken::Ready;
        }
    }

    /// Talks to one client until it hangs up; whether to stay for the next one.
    fn talk(&mut self, client: &OwnedFd) -> io::Result<bool> {
        let state = Said {
            what: What::State as i32,
            image: self.image.clone(),
            ..Said::default()
        };
        let tasks = self.tasks.iter().map(|(task, fd)| (*task, fd.as_fd()));
        wire::send_tasks(client, state, &tasks.collect::<Vec<_>>())?;
        loop {
            if let Woken::Over = self.wait(client.as_fd(), None) {
                return Ok(false);
            }
            let Some((said, rights)) = wire::receive(client)? else {
                return Ok(true);
            };
            match said.what() {
                What::Tasks => self.tasks = wire::receive_tasks(client, (said, rights))?,
                What::Begin => self.image.clear(),
                What::End => {
                    self.image = said.image;
                    let idle = Duration::from_millis(said.idle_ms);
                    self.until = Instant::now() + idle.min(LONGEST_IDLE);
                }
                What::Quit => return Ok(false),
                What::State | What::Unknown => {}
            }
        }
    }
}
