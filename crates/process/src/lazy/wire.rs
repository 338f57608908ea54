//! What a restore and the server of its lazy pages say to each other: one message a packet.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use abi::{Addr, Span};
use freeze::packets::{invalid, send};
use prost::Message;

/// Mappings in one message: two numbers of at most 10 bytes each.
const MAPPINGS_MAX: usize = 2000;
/// The most mappings that a process can have (`vm.max_map_count` is an `int`, and this is far above
/// what is set anywhere).
const ALL_MAPPINGS_MAX: usize = 1 << 22;

/// A message.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Said {
    #[prost(enumeration = "What", tag = "1")]
    pub what: i32,
    /// The image that the pages are of.
    #[prost(bytes = "vec", tag = "2")]
    pub image: Vec<u8>,
    /// The task whose memory it is.
    #[prost(int32, tag = "3")]
    pub pid: i32,
    /// Where each mapping begins and ends.
    #[prost(uint64, repeated, tag = "4")]
    pub mappings: Vec<u64>,
    /// Addresses around which pages come first.
    #[prost(uint64, repeated, tag = "5")]
    pub first: Vec<u64>,
    /// Whether more mappings come with the next message.
    #[prost(bool, tag = "6")]
    pub more: bool,
    /// How much is to come.
    #[prost(uint64, tag = "7")]
    pub bytes: u64,
    /// Why pages do not come.
    #[prost(string, tag = "8")]
    pub text: String,
    /// Whether the image is damaged.
    #[prost(bool, tag = "9")]
    pub damaged: bool,
    /// The space that the task's memory is in the image.
    #[prost(uint32, tag = "10")]
    pub space: u32,
}

/// What is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(super) enum What {
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

/// Sends `first`, a task, with all of its mappings, in as many messages as it takes.
pub(super) fn send_task(
    socket: impl AsFd,
    first: Said,
    mappings: &[Span],
    rights: &[BorrowedFd<'_>],
) -> io::Result<()> {
    let mut rest = mappings;
    let mut rights = rights;
    loop {
        let (now, later) = rest.split_at(rest.len().min(MAPPINGS_MAX));
        let said = Said {
            mappings: now
                .iter()
                .flat_map(|map| [map.start.0, map.end.0])
                .collect(),
            more: !later.is_empty(),
            ..first.clone()
        };
        send(&socket, &said, rights)?;
        if later.is_empty() {
            return Ok(());
        }
        (rest, rights) = (later, &[]);
    }
}

/// A task that a restore tells of, while its messages arrive: whoever stops in the middle keeps
/// nobody else waiting.
#[derive(Debug)]
pub(super) struct Arriving {
    first: Said,
    rights: Vec<OwnedFd>,
    mappings: Vec<Span>,
}

impl Arriving {
    /// Begins with the first message.
    pub fn new(mut first: Said, rights: Vec<OwnedFd>) -> io::Result<Self> {
        let mut mappings = Vec::new();
        add(&mut mappings, &std::mem::take(&mut first.mappings))?;
        Ok(Self {
            first,
            rights,
            mappings,
        })
    }

    /// Adds a message that follows.
    pub fn add(&mut self, next: &Said, rights: &[OwnedFd]) -> io::Result<()> {
        let first = &mut self.first;
        if next.what != first.what || next.pid != first.pid || !rights.is_empty() {
            return Err(invalid("a list of mappings was cut"));
        }
        first.more = next.more;
        add(&mut self.mappings, &next.mappings)
    }

    /// Whether all has arrived.
    pub fn is_whole(&self) -> bool {
        !self.first.more
    }

    /// What was said of the task, its descriptors, and its mappings in order.
    pub fn finish(mut self) -> io::Result<(Said, Vec<OwnedFd>, Vec<Span>)> {
        self.mappings.sort_unstable();
        let mut neighbours = self.mappings.windows(2);
        match neighbours.all(|two| two[0].end <= two[1].start) {
            true => Ok((self.first, self.rights, self.mappings)),
            false => Err(invalid("mappings overlap")),
        }
    }
}

/// Adds mappings, each of which is two numbers of a message.
fn add(all: &mut Vec<Span>, numbers: &[u64]) -> io::Result<()> {
    let (pairs, rest) = numbers.as_chunks::<2>();
    let sound = |[start, end]: &[u64; 2]| {
        start < end && start % abi::PAGE_BYTES == 0 && end % abi::PAGE_BYTES == 0
    };
    if !rest.is_empty() || !pairs.iter().all(sound) || all.len() > ALL_MAPPINGS_MAX {
        return Err(invalid("mappings make no sense"));
    }
    all.extend(pairs.iter().map(|[start, end]| Span {
        start: Addr(*start),
        end: Addr(*end),
    }));
    Ok(())
}

#[cfg(test)]
mod tests {
    use freeze::packets::receive;
    use sys::socket;

    use super::*;

    fn task() -> Said {
        Said {
            what: What::Task as i32,
            pid: 7,
            ..Said::default()
        }
    }

    #[test]
    fn more_mappings_than_fit_into_a_message_arrive() {
        let (left, right) = socket::pair(1, 5, 0).expect("AF_UNIX, SOCK_SEQPACKET");
        let mappings = (1..4500).map(|page| Span::new(Addr::of_page(page * 2), 4096));
        let mappings = mappings.collect::<Vec<_>>();
        std::thread::scope(|scope| {
            scope.spawn(|| send_task(&left, task(), &mappings, &[right.as_fd()]).expect("sent"));
            let next = || receive::<Said>(&right).expect("a message").expect("one");
            let (first, rights) = next();
            let mut arriving = Arriving::new(first, rights).expect("it makes sense");
            while !arriving.is_whole() {
                let (next, rights) = next();
                arriving.add(&next, &rights).expect("it makes sense");
            }
            let (said, rights, arrived) = arriving.finish().expect("all");
            assert_eq!((said.pid, rights.len()), (7, 1));
            assert_eq!(arrived, mappings);
        });
    }

    #[test]
    fn mappings_that_make_no_sense_are_refused() {
        let arrives = |mappings: &[u64]| {
            let mappings = mappings.to_vec();
            Arriving::new(Said { mappings, ..task() }, Vec::new())?.finish()
        };
        assert!(arrives(&[0x1000, 0x3000, 0x3000, 0x4000]).is_ok());
        for mappings in [
            &[0x1000][..],
            &[0x2000, 0x1000],
            &[0x1000, 0x2001],
            &[0x1000, 0x3000, 0x2000, 0x4000],
        ] {
            arrives(mappings).expect_err(&format!("{mappings:?}"));
        }
        let more = Said {
            more: true,
            ..task()
        };
        let mut arriving = Arriving::new(more, Vec::new()).expect("the first of several");
        let other = Said { pid: 8, ..task() };
        arriving.add(&other, &[]).expect_err("another task's");
    }
}
