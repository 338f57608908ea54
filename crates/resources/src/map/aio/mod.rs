//! Contexts of asynchronous I/O (io_setup(2)): their rings, which are mappings, and what the
//! kernel keeps of them.
//!
//! A context is saved when no request is under way in it ([`seen`] says how that is known), with
//! all that stands in its ring: events that nobody has fetched yet. A restore makes a new one,
//! moves its ring to its address, which is the context's name, and brings the kernel's counters to
//! where they were ([`reach`]).

mod dump;
mod make;
pub mod reach;
mod seen;

use abi::PAGE_BYTES;
use prost::Message;

use super::memory::{Mapping, Special};
use crate::{Error, Result};
pub use dump::{dump, is_busy};
pub use make::{check, make};

/// The number of the record; one a process that has contexts.
pub const TAG: u16 = 303;

/// What the kernel calls a ring, whose file has no name.
pub const NAME: &[u8] = b"/[aio] (deleted)";

/// Where a ring says how many events there is room for, and where the next one is to be fetched and
/// put, in bytes: `struct aio_ring`.
pub mod place {
    /// The number of the context in the kernel's table: not the program's.
    pub const ID: usize = 0;
    /// How many events there is room for.
    pub const EVENTS: usize = 4;
    /// The next one to fetch.
    pub const HEAD: usize = 8;
    /// Where the next one is put.
    pub const TAIL: usize = 12;
    /// The first event.
    pub const FIRST: usize = 32;
}

/// The size of an event and of what stands before them.
const EVENT_BYTES: u64 = 32;

/// The contexts of a process in an image.
#[derive(Clone, PartialEq, Message)]
pub struct Contexts {
    /// In the order in which the kernel has them.
    #[prost(message, repeated, tag = "1")]
    pub contexts: Vec<Context>,
}

/// A context without requests.
#[derive(Clone, PartialEq, Message)]
pub struct Context {
    /// Where its ring is.
    #[prost(uint64, tag = "1")]
    pub address: u64,
    /// For how many requests it was made.
    #[prost(uint32, tag = "2")]
    pub max_requests: u32,
    /// Where the kernel puts the next event.
    #[prost(uint32, tag = "3")]
    pub tail: u32,
    /// What is in the ring, without zeros at its end.
    #[prost(bytes = "vec", tag = "4")]
    pub contents: Vec<u8>,
}

/// How many events there is room for in a ring of as many pages.
#[must_use]
pub fn events_in(pages: u64) -> u64 {
    (pages * PAGE_BYTES - EVENT_BYTES) / EVENT_BYTES
}

impl Context {
    /// The event that is to be fetched next, as the kernel takes what the program has written.
    #[must_use]
    pub fn head(&self, events: u32) -> u32 {
        let word = self.contents.get(place::HEAD..place::HEAD + 4);
        let word = word.map_or([0; 4], |word| word.try_into().expect("four bytes"));
        u32::from_le_bytes(word) % events
    }
}

impl Contexts {
    /// Reads a record, and checks what it claims about these mappings.
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    pub fn read(payload: Option<&[u8]>, mappings: &[Mapping]) -> Result<Self> {
        let corrupt = |what: String| Error::corrupt("contexts of asynchronous I/O", what);
        let read: Self = match payload {
            Some(payload) => {
                image::strict::decode(payload).map_err(|what| corrupt(what.to_string()))?
            }
            None => Self::default(),
        };
        let rings = mappings.iter();
        let mut rings = rings
            .filter(|map| map.special() == Special::Aio)
            .collect::<Vec<_>>();
        for context in &read.contexts {
            let address = context.address;
            let at = rings.iter().position(|ring| ring.start == address);
            let ring = at.map(|at| rings.swap_remove(at));
            let ring = ring.ok_or_else(|| corrupt(format!("no ring is mapped at {address:#x}")))?;
            let (pages, bytes) = (ring.span().pages(), ring.span().bytes());
            let is_right = pages <= reach::MOST_PAGES
                && u64::from(context.tail) < events_in(pages)
                && context.contents.len() as u64 <= bytes;
            if !is_right {
                let len = context.contents.len();
                let what = format!("tail {} and {len} bytes in {pages} pages", context.tail);
                return Err(corrupt(format!("the ring at {address:#x} has {what}")));
            }
        }
        match rings.first() {
            None => Ok(read),
            Some(ring) => Err(corrupt(format!("the ring {} has no context", ring.span()))),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(start: u64, pages: u64) -> Mapping {
        const MAP_SHARED: u32 = linux_raw_sys::general::MAP_SHARED;
        Mapping {
            start,
            end: start + pages * PAGE_BYTES,
            prot: 3,
            flags: MAP_SHARED,
            special: Special::Aio as i32,
            ..Mapping::default()
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let context = Context {
            address: 0x10000,
            max_requests: 1,
            tail: 126,
            contents: vec![1; 4096],
        };
        let read = |context: &Context, mappings: &[Mapping]| {
            let contexts = vec![context.clone()];
            Contexts::read(Some(&Contexts { contexts }.encode_to_vec()), mappings)
        };
        let one = [ring(0x10000, 1)];
        read(&context, &one).expect("it is sound");
        let changes: [fn(&mut Context); 3] = [
            |context| context.tail = 127,
            |context| context.address = 0x11000,
            |context| context.contents.push(0),
        ];
        for change in changes {
            let mut context = context.clone();
            change(&mut context);
            let error = read(&context, &one).expect_err("it makes no sense");
            assert!(matches!(error, Error::Corrupt { .. }), "{error}");
        }
        let two = [ring(0x10000, 1), ring(0x20000, 1)];
        let error = read(&context, &two)
            .expect_err("one is missing")
            .to_string();
        assert!(error.contains("0x20000-0x21000 has no context"), "{error}");
        Contexts::read(None, &one).expect_err("one is missing");
        let twice = Contexts {
            contexts: vec![context.clone(), context],
        };
        Contexts::read(Some(&twice.encode_to_vec()), &one).expect_err("it is there once");
    }

    #[test]
    fn a_head_beyond_the_ring_is_taken_as_the_kernel_takes_it() {
        let mut context = Context::default();
        assert_eq!(context.head(127), 0);
        context.contents = vec![0; 12];
        context.contents[place::HEAD] = 130;
        assert_eq!(context.head(127), 3);
    }
}
