//! Messages with a list that may be too long for one packet.

use std::io;
use std::os::fd::{BorrowedFd, OwnedFd};

use prost::Message;
use sys::socket::RIGHTS_MAX;

use crate::{Channel, Packet, invalid};

/// A message with a list.
pub trait ListMessage: Message + Default + Clone + PartialEq {
    /// One item of the list.
    type Item: Clone;
    /// The most items of one packet.
    const PACKET_MAX: usize;
    /// The most items of the whole list.
    const LIST_MAX: usize;
    /// The list.
    fn list(&mut self) -> &mut Vec<Self::Item>;
    /// True if more items come with the next packet.
    fn more(&mut self) -> &mut bool;
}

impl Channel {
    /// Sends a message, in as many packets as its list takes. The descriptors go with the items of
    /// the same numbers.
    ///
    /// # Errors
    /// Those of [`Channel::send`].
    pub fn send_list<M: ListMessage>(
        &self,
        message: &M,
        rights: &[BorrowedFd<'_>],
    ) -> io::Result<()> {
        let mut part = message.clone();
        let items = std::mem::take(part.list());
        let most = M::PACKET_MAX;
        let rights_most = most.min(RIGHTS_MAX);
        let (mut items, mut rights) = (items.as_slice(), rights);
        loop {
            let (now, later) = items.split_at(items.len().min(most));
            let (with, without) = rights.split_at(rights.len().min(rights_most));
            *part.list() = now.to_vec();
            *part.more() = !later.is_empty();
            self.send(&part, with)?;
            if later.is_empty() {
                return match without.is_empty() {
                    true => Ok(()),
                    false => Err(invalid("a message has more descriptors than items")),
                };
            }
            (items, rights) = (later, without);
        }
    }

    /// Receives the rest of a message of which the first packet is here.
    ///
    /// # Errors
    /// As [`Channel::receive`]; [`io::ErrorKind::UnexpectedEof`] and
    /// [`io::ErrorKind::InvalidData`] where the list is cut.
    pub fn receive_rest<M: ListMessage>(&self, first: Packet<M>) -> io::Result<Packet<M>> {
        let mut list = List::new(first);
        while !list.is_whole() {
            let next = self.receive()?;
            list.add(next.ok_or(io::ErrorKind::UnexpectedEof)?)?;
        }
        Ok(list.finish())
    }
}

/// A message while the packets of its list arrive: a process that stops in the middle keeps nobody
/// else waiting.
#[derive(Debug)]
pub struct List<M> {
    /// All but the list.
    head: M,
    rights: Vec<OwnedFd>,
    whole: M,
}

impl<M: ListMessage> List<M> {
    /// Begins with the first packet.
    #[must_use]
    pub fn new((mut whole, rights): Packet<M>) -> Self {
        Self {
            head: head_of(&mut whole),
            rights,
            whole,
        }
    }

    /// Adds the next packet.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] for one of another message, and for a list that is too long.
    pub fn add(&mut self, (mut next, rights): Packet<M>) -> io::Result<()> {
        if head_of(&mut next) != self.head {
            return Err(invalid("a list was cut"));
        }
        if self.whole.list().len() > M::LIST_MAX {
            return Err(invalid("a list is too long"));
        }
        *self.whole.more() = *next.more();
        self.whole.list().append(next.list());
        self.rights.extend(rights);
        Ok(())
    }

    /// True if all has arrived.
    pub fn is_whole(&mut self) -> bool {
        !*self.whole.more()
    }

    /// The message with its list, and its descriptors.
    #[must_use]
    pub fn finish(self) -> Packet<M> {
        (self.whole, self.rights)
    }
}

/// The message without its list.
fn head_of<M: ListMessage>(message: &mut M) -> M {
    let list = std::mem::take(message.list());
    let more = std::mem::take(message.more());
    let head = message.clone();
    (*message.list(), *message.more()) = (list, more);
    head
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    #[derive(Clone, PartialEq, Message)]
    struct Numbers {
        #[prost(uint32, tag = "1")]
        kind: u32,
        #[prost(uint32, repeated, tag = "2")]
        numbers: Vec<u32>,
        #[prost(bool, tag = "3")]
        more: bool,
    }

    impl ListMessage for Numbers {
        type Item = u32;
        const PACKET_MAX: usize = 200;
        const LIST_MAX: usize = 1000;
        fn list(&mut self) -> &mut Vec<u32> {
            &mut self.numbers
        }
        fn more(&mut self) -> &mut bool {
            &mut self.more
        }
    }

    fn numbers(count: u32) -> Numbers {
        Numbers {
            kind: 7,
            numbers: (0..count).collect(),
            more: false,
        }
    }

    #[test]
    fn list_longer_than_a_packet_arrives_whole() {
        let (left, right) = Channel::pair().expect("a pair");
        let null = std::fs::File::open("/dev/null").expect("it is there");
        for (count, rights) in [(0, 0), (1, 1), (200, 2), (201, 201), (450, 450)] {
            let rights = vec![null.as_fd(); rights];
            left.send_list(&numbers(count), &rights).expect("sent");
            let first = right.receive::<Numbers>().expect("one").expect("one");
            let (whole, arrived) = right.receive_rest(first).expect("all");
            assert_eq!(whole, numbers(count));
            assert_eq!(arrived.len(), rights.len());
        }
        let error = left.send_list(&numbers(1), &vec![null.as_fd(); 201]);
        assert!(error.is_err(), "a descriptor without its item is not lost");
    }

    #[test]
    fn list_that_is_cut_or_too_long_is_refused() {
        let more = || Numbers {
            more: true,
            ..numbers(1)
        };
        let begun = || List::new((more(), Vec::new()));
        let other = Numbers {
            kind: 8,
            ..numbers(1)
        };
        begun().add((other, Vec::new())).expect_err("another list");
        let mut long = begun();
        let added = (0..10).try_for_each(|_| {
            let more = Numbers {
                more: true,
                ..numbers(200)
            };
            long.add((more, Vec::new()))
        });
        added.expect_err("too long");
        let (left, right) = Channel::pair().expect("a pair");
        drop(left);
        right.receive_rest((more(), Vec::new())).expect_err("cut");
    }
}
