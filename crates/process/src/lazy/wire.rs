//! What a restore and the server of its lazy pages send each other.

use std::io;

use abi::{Addr, Span};
use guard::{ListMessage, invalid};

/// Mappings in one packet: two numbers of at most 10 bytes each.
const MAPPINGS_MAX: usize = 2000;
/// The most mappings that a process can have (`vm.max_map_count` is an `int`, and this is far above
/// what is set anywhere).
const ALL_MAPPINGS_MAX: usize = 1 << 22;

/// A message.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Message {
    #[prost(enumeration = "MessageKind", tag = "1")]
    pub kind: i32,
    /// The image that the pages are of.
    #[prost(bytes = "vec", tag = "2")]
    pub image: Vec<u8>,
    /// The task whose memory it is.
    #[prost(int32, tag = "3")]
    pub pid: i32,
    /// The start and the end of each mapping.
    #[prost(uint64, repeated, tag = "4")]
    pub mappings: Vec<u64>,
    /// Addresses around which pages come first.
    #[prost(uint64, repeated, tag = "5")]
    pub first: Vec<u64>,
    /// True if more mappings come with the next packet.
    #[prost(bool, tag = "6")]
    pub more: bool,
    /// How much is to come.
    #[prost(uint64, tag = "7")]
    pub bytes: u64,
    /// Why pages do not come.
    #[prost(string, tag = "8")]
    pub text: String,
    /// True if the image is damaged.
    #[prost(bool, tag = "9")]
    pub damaged: bool,
    /// The space that the task's memory is in the image.
    #[prost(uint32, tag = "10")]
    pub space: u32,
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
    type Item = u64;
    const PACKET_MAX: usize = 2 * MAPPINGS_MAX;
    const LIST_MAX: usize = 2 * ALL_MAPPINGS_MAX;

    fn list(&mut self) -> &mut Vec<u64> {
        &mut self.mappings
    }

    fn more(&mut self) -> &mut bool {
        &mut self.more
    }
}

/// The kind of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(super) enum MessageKind {
    /// Nothing that is known.
    Unknown = 0,
    /// Restore: pages of this task are to come; its userfaultfd and pidfd come along. (1 was the
    /// same without a space, whose number was the task's pid.)
    Task = 5,
    /// Server: they will.
    Taken = 2,
    /// Restore: the tree runs.
    Runs = 3,
    /// Server: pages cannot come; the tree is killed, or the task was not taken on.
    Failed = 4,
}

/// The mappings of a task as a message has them.
pub(super) fn numbers_of(mappings: &[Span]) -> Vec<u64> {
    let ends = mappings.iter().flat_map(|map| [map.start, map.end]);
    ends.map(|end| end.0).collect()
}

/// The mappings that a message has, in their order.
pub(super) fn mappings_of(numbers: &[u64]) -> io::Result<Vec<Span>> {
    let (pairs, rest) = numbers.as_chunks::<2>();
    let sound = |[start, end]: &[u64; 2]| {
        start < end && start % abi::PAGE_BYTES == 0 && end % abi::PAGE_BYTES == 0
    };
    if !rest.is_empty() || !pairs.iter().all(sound) {
        return Err(invalid("mappings make no sense"));
    }
    let mappings = pairs.iter().map(|[start, end]| Span {
        start: Addr(*start),
        end: Addr(*end),
    });
    let mut mappings = mappings.collect::<Vec<_>>();
    mappings.sort_unstable();
    let mut neighbours = mappings.windows(2);
    match neighbours.all(|two| two[0].end <= two[1].start) {
        true => Ok(mappings),
        false => Err(invalid("mappings overlap")),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use guard::Channel;

    use super::*;

    #[test]
    fn mappings_longer_than_a_packet_arrive() {
        let (left, right) = Channel::pair().expect("a pair");
        let mappings = (1..4500).map(|page| Span::new(Addr::of_page(page * 2), 4096));
        let mappings = mappings.collect::<Vec<_>>();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let task = Message {
                    pid: 7,
                    mappings: numbers_of(&mappings),
                    ..Message::of(MessageKind::Task)
                };
                left.send_list(&task, &[right.as_fd()]).expect("sent");
            });
            let first = right.receive::<Message>().expect("one").expect("one");
            let (task, rights) = right.receive_rest(first).expect("all");
            assert_eq!((task.pid, rights.len()), (7, 1));
            assert_eq!(mappings_of(&task.mappings).expect("sound"), mappings);
        });
    }

    #[test]
    fn mappings_that_make_no_sense_are_refused() {
        mappings_of(&[0x1000, 0x3000, 0x3000, 0x4000]).expect("sound");
        for mappings in [
            &[0x1000][..],
            &[0x2000, 0x1000],
            &[0x1000, 0x2001],
            &[0x1000, 0x3000, 0x2000, 0x4000],
        ] {
            mappings_of(mappings).expect_err(&format!("{mappings:?}"));
        }
    }
}
