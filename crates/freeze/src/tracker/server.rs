//! The tracker itself: holds descriptors, answers one client after the other, and goes.
//!
//! It was forked and must not use what other threads may have held locked: it neither logs nor
//! prints. It is let down by nothing but its own end: whatever a client does wrong ends the
//! conversation with that client.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use guard::Channel;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::wire::{self, Message, MessageKind, Tracked};
use crate::start_ticks;

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
    while server.waits_for(server.listener.as_fd(), Some(server.until)) {
        let Ok(client) = Channel::accept(server.listener) else {
            continue;
        };
        match server.talk(&client) {
            Ok(true) => {}
            Ok(false) => return,
            // It died, or what it said made no sense: it is as if it had hung up.
            Err(_) => {}
        }
    }
}

impl Server<'_> {
    /// Waits until there is something to read; false if the root has ended before, or it is too
    /// late.
    fn waits_for(&self, fd: BorrowedFd<'_>, until: Option<Instant>) -> bool {
        let ready = guard::wait([Some(fd), Some(self.root.as_fd())], until);
        matches!(ready, Ok([true, false]))
    }

    /// Talks to one client until it hangs up; whether to stay for the next one.
    fn talk(&mut self, client: &Channel) -> io::Result<bool> {
        let state = Message {
            image: self.image.clone(),
            ..Message::of(MessageKind::State)
        };
        let tasks = self.tasks.iter().map(|(task, fd)| (*task, fd.as_fd()));
        wire::send_tasks(client, state, &tasks.collect::<Vec<_>>())?;
        loop {
            if !self.waits_for(client.as_fd(), None) {
                return Ok(false);
            }
            let Some((message, rights)) = client.receive::<Message>()? else {
                return Ok(true);
            };
            match message.kind() {
                MessageKind::Tasks => self.tasks = wire::receive_tasks(client, (message, rights))?,
                MessageKind::Begin => self.image.clear(),
                MessageKind::End => {
                    self.image = message.image;
                    let idle = Duration::from_millis(message.idle_ms);
                    self.until = Instant::now() + idle.min(LONGEST_IDLE);
                }
                MessageKind::Quit => return Ok(false),
                MessageKind::State | MessageKind::Unknown => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use guard::harness::{Note, Victim, kill_at_each_message};

    use super::*;

    const OLD: [u8; 16] = [1; 16];
    const NEW: [u8; 16] = [2; 16];

    fn round(channel: &Channel) -> io::Result<()> {
        channel.receive::<Message>()?;
        let file = std::fs::File::open("/dev/null")?;
        let task = Tracked::default();
        let tasks = [(task, file.as_fd())];
        wire::send_tasks(channel, Message::of(MessageKind::Tasks), &tasks)?;
        channel.send(&Message::of(MessageKind::Begin), &[])?;
        let end = Message {
            image: NEW.to_vec(),
            ..Message::of(MessageKind::End)
        };
        channel.send(&end, &[])
    }

    #[test]
    fn round_killed_at_each_message_leaves_no_image_that_lacks_writes() {
        kill_at_each_message(
            || Channel::pair().expect("a pair"),
            |(_, report)| vec![report.as_fd()],
            |(_, report), client| {
                let listener = OwnedFd::from(Channel::pair().expect("a pair").0);
                let own = rustix::process::getpid();
                let mut server = Server {
                    listener: &listener,
                    root: pidfd_open(own, PidfdFlags::empty()).expect("it lives"),
                    tasks: Vec::new(),
                    image: OLD.to_vec(),
                    until: Instant::now(),
                };
                // The tracker stays for the next client.
                let stays = server.talk(&client).unwrap_or(true);
                let text = format!("{stays} {} {:?}", server.tasks.len(), server.image.first());
                report.send(&Note::text(&text), &[]).expect("sent");
            },
            |_, channel| drop(round(&channel)),
            |(report, _), outcome| {
                if outcome.victim == Victim::Helper && !outcome.is_whole {
                    // Its descriptors have gone with it, which ends the tracking.
                    return;
                }
                let (note, _) = report.receive::<Note>().expect("a note").expect("a note");
                let expected = match (outcome.victim, outcome.messages) {
                    (Victim::Client, 0) => "true 0 Some(1)",
                    (Victim::Client, 1) => "true 1 Some(1)",
                    (Victim::Client, 2) => "true 1 None",
                    _ => "true 1 Some(2)",
                };
                assert_eq!(note.text, expected, "{outcome:?}");
            },
        );
    }
}
