//! What a tracker and its clients say to each other: one message a packet, with descriptors.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use prost::Message;
use sys::socket;

use crate::packets::{self, invalid, send};

/// Tasks in one message; each brings a descriptor.
const TASKS_MAX: usize = 200;
const _: () = assert!(TASKS_MAX <= socket::RIGHTS_MAX);

/// A message.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Said {
    #[prost(enumeration = "What", tag = "1")]
    pub what: i32,
    /// Tasks, in the order of the descriptors that come with the message.
    #[prost(message, repeated, tag = "2")]
    pub tasks: Vec<Tracked>,
    /// Whether more tasks come with the next message.
    #[prost(bool, tag = "3")]
    pub more: bool,
    /// The image up to which writes are known; empty for none.
    #[prost(bytes = "vec", tag = "4")]
    pub image: Vec<u8>,
    /// How long to wait for the next round.
    #[prost(uint64, tag = "5")]
    pub idle_ms: u64,
}

/// A task whose memory is tracked.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub(super) struct Tracked {
    #[prost(int32, tag = "1")]
    pub pid: i32,
    /// When it was started.
    #[prost(uint64, tag = "2")]
    pub start_ticks: u64,
    /// Whether soft-dirty bits tell what it writes; a userfaultfd otherwise.
    #[prost(bool, tag = "3")]
    pub by_bits: bool,
}

/// What is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(super) enum What {
    /// Nothing that is known.
    Unknown = 0,
    /// Tracker: these tasks are tracked, and writes since `image` are known.
    State = 1,
    /// Client: from now on these tasks are tracked.
    Tasks = 2,
    /// Client: writes are about to be forgotten by the kernel.
    Begin = 3,
    /// Client: all writes before are in `image`.
    End = 4,
    /// Client: nothing is to be tracked any more.
    Quit = 5,
}

/// Receives one message, each of whose tasks has its descriptor; none when the other side has hung
/// up.
pub(super) fn receive(socket: impl AsFd) -> io::Result<Option<(Said, Vec<OwnedFd>)>> {
    let received = packets::receive::<Said>(socket)?;
    match received {
        Some((said, rights)) if rights.len() != said.tasks.len() => {
            Err(invalid("tasks came without their descriptors"))
        }
        received => Ok(received),
    }
}

/// Sends `first` with all tasks and their descriptors, in as many messages as it takes.
pub(super) fn send_tasks(
    socket: impl AsFd,
    first: Said,
    tasks: &[(Tracked, BorrowedFd<'_>)],
) -> io::Result<()> {
    let mut rest = tasks;
    loop {
        let (now, later) = rest.split_at(rest.len().min(TASKS_MAX));
        let said = Said {
            tasks: now.iter().map(|(task, _)| *task).collect(),
            more: !later.is_empty(),
            ..first.clone()
        };
        let rights = now.iter().map(|(_, fd)| *fd).collect::<Vec<_>>();
        send(&socket, &said, &rights)?;
        if later.is_empty() {
            return Ok(());
        }
        rest = later;
    }
}

/// Takes the tasks of `said` and of the messages that follow it.
pub(super) fn receive_tasks(
    socket: impl AsFd,
    (mut said, mut rights): (Said, Vec<OwnedFd>),
) -> io::Result<Vec<(Tracked, OwnedFd)>> {
    let mut all = Vec::new();
    loop {
        all.extend(said.tasks.iter().copied().zip(rights));
        if !said.more {
            return Ok(all);
        }
        let what = said.what;
        let next = receive(&socket)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        if next.0.what != what {
            return Err(invalid("a list of tasks was cut"));
        }
        (said, rights) = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn more_tasks_than_fit_into_a_message_arrive() {
        let (left, right) = socket::pair(1, 5, 0).expect("AF_UNIX, SOCK_SEQPACKET");
        let count = 450;
        let tasks = (0..count).map(|pid| Tracked {
            pid,
            start_ticks: u64::MAX,
            by_bits: pid % 2 == 0,
        });
        // Any descriptor goes along, but one of `left` would keep it open.
        let fd = std::fs::File::open("/dev/null").expect("it is there");
        let tasks = tasks.map(|task| (task, fd.as_fd())).collect::<Vec<_>>();
        let first = Said {
            what: What::State as i32,
            image: vec![7; 16],
            ..Said::default()
        };
        send_tasks(&left, first, &tasks).expect("sent");
        let (said, rights) = receive(&right).expect("a message").expect("a message");
        assert_eq!((said.what(), said.image.len()), (What::State, 16));
        let all = receive_tasks(&right, (said, rights)).expect("all");
        let pids = all.iter().map(|(task, _)| task.pid);
        assert!(pids.eq(0..count));
        drop(left);
        assert!(receive(&right).expect("an end").is_none());
    }

    #[test]
    fn what_makes_no_sense_is_refused() {
        let (left, right) = socket::pair(1, 5, 0).expect("AF_UNIX, SOCK_SEQPACKET");
        socket::send(&left, b"\xff\xff\xff", socket::Along::default(), 0).expect("sent");
        receive(&right).expect_err("no message");
        let task = Tracked::default();
        let said = Said {
            tasks: vec![task],
            ..Said::default()
        };
        send(&left, &said, &[]).expect("sent");
        receive(&right).expect_err("no descriptor");
        // A list whose end never comes.
        let more = Said {
            more: true,
            ..Said::default()
        };
        send(&left, &more, &[]).expect("sent");
        drop(left);
        let first = receive(&right).expect("a message").expect("a message");
        receive_tasks(&right, first).expect_err("cut");
    }
}
