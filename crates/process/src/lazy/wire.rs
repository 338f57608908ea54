//! What a restore and the server of its lazy pages say to each other: one message a packet.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};

use abi::{Addr, Span};
use prost::Message;

use crate::packets::{invalid, receive, send};

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
}

/// What is said.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub(super) enum What {
    /// Nothing that is known.
    Unknown = 0,
    /// Restore: pages of this task are to come; its userfaultfd and pidfd come along.
    Task = 1,
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

/// The mappings of the task in `said` and in the messages that follow it.
pub(super) fn receive_mappings(socket: impl AsFd, mut said: Said) -> io::Result<Vec<Span>> {
    let mut all = Vec::new();
    loop {
        let (pairs, rest) = said.mappings.as_chunks::<2>();
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
        if !said.more {
            break;
        }
        let (next, rights) = receive::<Said>(&socket)?.ok_or(io::ErrorKind::UnexpectedEof)?;
        if next.what != said.what || next.pid != said.pid || !rights.is_empty() {
            return Err(invalid("a list of mappings was cut"));
        }
        said = next;
    }
    all.sort_unstable();
    match all.windows(2).all(|two| two[0].end <= two[1].start) {
        true => Ok(all),
        false => Err(invalid("mappings overlap")),
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::OwnedFd;

    use sys::socket;

    use super::*;

    fn pair() -> (OwnedFd, OwnedFd) {
        socket::pair(1, 5, 0).expect("AF_UNIX, SOCK_SEQPACKET")
    }

    fn task() -> Said {
        Said {
            what: What::Task as i32,
            pid: 7,
            ..Said::default()
        }
    }

    #[test]
    fn more_mappings_than_fit_into_a_message_arrive() {
        let (left, right) = pair();
        let mappings = (1..4500).map(|page| Span::new(Addr::of_page(page * 2), 4096));
        let mappings = mappings.collect::<Vec<_>>();
        std::thread::scope(|scope| {
            scope.spawn(|| send_task(&left, task(), &mappings, &[right.as_fd()]).expect("sent"));
            let (said, rights) = receive::<Said>(&right)
                .expect("a message")
                .expect("a message");
            assert_eq!((said.pid, rights.len()), (7, 1));
            let received = receive_mappings(&right, said).expect("all");
            assert_eq!(received, mappings);
        });
    }

    #[test]
    fn mappings_that_make_no_sense_are_refused() {
        let (left, right) = pair();
        for mappings in [
            vec![0x1000],
            vec![0x2000, 0x1000],
            vec![0x1000, 0x2001],
            vec![0x1000, 0x3000, 0x2000, 0x4000],
        ] {
            let said = Said { mappings, ..task() };
            receive_mappings(&right, said.clone()).expect_err(&format!("{said:?}"));
        }
        let said = Said {
            mappings: vec![0x1000, 0x2000],
            more: true,
            ..task()
        };
        let other = Said {
            pid: 8,
            ..said.clone()
        };
        send(&left, &other, &[]).expect("sent");
        receive_mappings(&right, said).expect_err("another task's");
    }
}
