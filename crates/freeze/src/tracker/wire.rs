//! The messages between a tracker and its clients.
//!
//! A tracker may be of an earlier version than its client: numbers of fields and kinds are never
//! used again, and a kind that is not known is passed over.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use guard::{Channel, ListMessage, Packet, invalid};

/// Tasks in one packet; each brings a descriptor.
const TASKS_MAX: usize = 200;
const _: () = assert!(TASKS_MAX <= sys::socket::RIGHTS_MAX);
/// The most tasks that there can be (`PID_MAX_LIMIT`).
const ALL_TASKS_MAX: usize = 1 << 22;

/// A message.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Message {
    #[prost(enumeration = "MessageKind", tag = "1")]
    pub kind: i32,
    /// Tasks, in the order of the descriptors that come with the message.
    #[prost(message, repeated, tag = "2")]
    pub tasks: Vec<Tracked>,
    /// True if more tasks come with the next packet.
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
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub(super) struct Tracked {
    #[prost(int32, tag = "1")]
    pub pid: i32,
    /// When it was started.
    #[prost(uint64, tag = "2")]
    pub start_ticks: u64,
    /// True if soft-dirty bits tell what it writes; a userfaultfd otherwise.
    #[prost(bool, tag = "3")]
    pub by_bits: bool,
}

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(super) enum MessageKind {
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

impl Message {
    /// One of this kind, without anything else.
    pub fn of(kind: MessageKind) -> Self {
        Self {
            kind: kind as i32,
            ..Self::default()
        }
    }
}

impl ListMessage for Message {
    type Item = Tracked;
    const PACKET_MAX: usize = TASKS_MAX;
    const LIST_MAX: usize = ALL_TASKS_MAX;

    fn list(&mut self) -> &mut Vec<Tracked> {
        &mut self.tasks
    }

    fn more(&mut self) -> &mut bool {
        &mut self.more
    }
}

/// Sends a message with these tasks and their descriptors.
pub(super) fn send_tasks(
    channel: &Channel,
    message: Message,
    tasks: &[(Tracked, BorrowedFd<'_>)],
) -> io::Result<()> {
    let message = Message {
        tasks: tasks.iter().map(|(task, _)| *task).collect(),
        ..message
    };
    let rights = tasks.iter().map(|(_, fd)| *fd).collect::<Vec<_>>();
    channel.send_list(&message, &rights)
}

/// Takes the tasks of a message whose first packet has been received.
pub(super) fn receive_tasks(
    channel: &Channel,
    first: Packet<Message>,
) -> io::Result<Vec<(Tracked, OwnedFd)>> {
    let (message, rights) = channel.receive_rest(first)?;
    match message.tasks.len() == rights.len() {
        true => Ok(message.tasks.into_iter().zip(rights).collect()),
        false => Err(invalid("tasks came without their descriptors")),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn tasks_longer_than_a_packet_arrive_with_their_descriptors() {
        let (left, right) = Channel::pair().expect("a pair");
        let count = 450;
        let tasks = (0..count).map(|pid| Tracked {
            pid,
            start_ticks: u64::MAX,
            by_bits: pid % 2 == 0,
        });
        // Any descriptor goes along, but one of `left` would keep it open.
        let fd = std::fs::File::open("/dev/null").expect("it is there");
        let tasks = tasks.map(|task| (task, fd.as_fd())).collect::<Vec<_>>();
        let state = Message {
            image: vec![7; 16],
            ..Message::of(MessageKind::State)
        };
        send_tasks(&left, state, &tasks).expect("sent");
        let first = right.receive::<Message>().expect("one").expect("one");
        assert_eq!(
            (first.0.kind(), first.0.image.len()),
            (MessageKind::State, 16)
        );
        let all = receive_tasks(&right, first).expect("all");
        assert!(all.iter().map(|(task, _)| task.pid).eq(0..count));
        drop(left);
        assert!(right.receive::<Message>().expect("an end").is_none());
    }

    #[test]
    fn tasks_without_descriptors_are_refused() {
        let (left, right) = Channel::pair().expect("a pair");
        let message = Message {
            tasks: vec![Tracked::default()],
            ..Message::of(MessageKind::Tasks)
        };
        left.send(&message, &[]).expect("sent");
        let first = right.receive().expect("one").expect("one");
        receive_tasks(&right, first).expect_err("no descriptor");
    }

    /// Bytes as the first tracker sent and received them.
    #[test]
    fn bytes_of_an_earlier_tracker_are_the_same() {
        let message = Message {
            tasks: vec![Tracked {
                pid: 5,
                start_ticks: 300,
                by_bits: true,
            }],
            more: true,
            image: vec![7; 2],
            idle_ms: 9,
            ..Message::of(MessageKind::State)
        };
        let bytes = [
            8, 1, 18, 7, 8, 5, 16, 172, 2, 24, 1, 24, 1, 34, 2, 7, 7, 40, 9,
        ];
        assert_eq!(prost::Message::encode_to_vec(&message), bytes);
    }
}
