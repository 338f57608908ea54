//! A description of an image as one value: its kind, and its record, decoded and checked once.
//!
//! A [`Kind`] knows the type of its records; lists of kinds and those who drive them do not.

use std::any::Any;
use std::fmt;
use std::os::fd::{BorrowedFd, OwnedFd};

use abi::Span;
use prost::Message as _;

use super::{DescriptionId, DumpContext, Kind, Open, Opens, RestoreContext, SharedMemory, Stage};
use crate::callers::Callers;
use crate::script::Script;
use crate::{Allow, Error, Result};

/// A [`Kind`] without the type of its records, as a list has it.
pub trait ErasedKind: Sync {
    /// See [`Kind::TAG`].
    fn tag(&self) -> u16;
    /// See [`Kind::NAME`].
    fn name(&self) -> &'static str;
    /// See [`Kind::LINK`].
    fn link(&self) -> Option<&'static [u8]>;
    /// See [`Kind::LOOKED_UP`].
    fn is_looked_up(&self) -> bool;
    /// See [`Kind::WORKS`].
    fn works(&self) -> bool;
    /// See [`Kind::is_busy`].
    fn is_busy(&self, open: &Open<'_>) -> bool;
    /// See [`Kind::settle`].
    fn settle(&self, fd: i32, script: &mut Script);
    /// See [`Kind::claims`].
    fn claims(&self, open: &Open<'_>) -> bool;
    /// See [`Kind::dump`].
    ///
    /// # Errors
    /// Those of [`Kind::dump`].
    fn dump(&self, open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Box<dyn Description>>;
    /// See [`Kind::check_among`].
    ///
    /// # Errors
    /// Those of [`Kind::check_among`].
    fn check_among(&self, open: &Open<'_>, all: &Opens<'_>, allow: &Allow) -> Result<()>;
    /// Decodes what an image says of description `id`, and checks it ([`Kind::check`]).
    ///
    /// # Errors
    /// [`Error::Corrupt`], with the kind's name and `id`.
    fn decode(&self, id: DescriptionId, payload: &[u8]) -> Result<Box<dyn Description>>;
}

impl<K: Kind> ErasedKind for K {
    fn tag(&self) -> u16 {
        K::TAG
    }

    fn name(&self) -> &'static str {
        K::NAME
    }

    fn link(&self) -> Option<&'static [u8]> {
        K::LINK
    }

    fn is_looked_up(&self) -> bool {
        K::LOOKED_UP
    }

    fn works(&self) -> bool {
        K::WORKS
    }

    fn is_busy(&self, open: &Open<'_>) -> bool {
        K::is_busy(open)
    }

    fn settle(&self, fd: i32, script: &mut Script) {
        K::settle(fd, script);
    }

    fn claims(&self, open: &Open<'_>) -> bool {
        <K as Kind>::claims(open)
    }

    fn dump(&self, open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Box<dyn Description>> {
        let record = <K as Kind>::dump(open, cx)?;
        Ok(Box::new(Decoded::<K>(record)))
    }

    fn check_among(&self, open: &Open<'_>, all: &Opens<'_>, allow: &Allow) -> Result<()> {
        <K as Kind>::check_among(open, all, allow)
    }

    fn decode(&self, id: DescriptionId, payload: &[u8]) -> Result<Box<dyn Description>> {
        let place = |what| Error::corrupt(format!("{} {}", K::NAME, id.0), what);
        let record = image::strict::decode(payload).map_err(place)?;
        K::check(&record).map_err(|error| match error {
            Error::Corrupt { record, what } if record == K::NAME => place(what),
            Error::Corrupt { record, what } => place(format!("{record}: {what}")),
            error => error,
        })?;
        Ok(Box::new(Decoded::<K>(record)))
    }
}

/// The record of a description, together with its [`Kind`].
pub trait Description: Any + Send + Sync {
    /// See [`Kind::TAG`].
    fn tag(&self) -> u16;
    /// See [`Kind::NAME`].
    fn name(&self) -> &'static str;
    /// See [`Kind::STAYS`].
    fn stays(&self) -> bool;
    /// The payload of its record in an image.
    fn encode(&self) -> Vec<u8>;
    /// See [`Kind::check_last`].
    ///
    /// # Errors
    /// Those of [`Kind::check_last`].
    fn check_last(&self, open: &Open<'_>) -> Result<()>;
    /// See [`Kind::describe`].
    fn describe(&self) -> String;
    /// See [`Kind::path`].
    fn path(&self) -> Option<String>;
    /// See [`Kind::memory`].
    ///
    /// # Errors
    /// Those of [`Kind::memory`].
    fn memory(&self) -> Result<Option<SharedMemory>>;
    /// See [`Kind::prepare`].
    ///
    /// # Errors
    /// Those of [`Kind::prepare`].
    fn prepare(&self, cx: &mut dyn RestoreContext) -> Result<()>;
    /// See [`Kind::open`].
    ///
    /// # Errors
    /// Those of [`Kind::open`].
    fn open(&self, cx: &mut dyn RestoreContext) -> Result<OwnedFd>;
    /// The kind's number and the key of [`Kind::holder`].
    fn holder(&self) -> Option<(u16, u64)>;
    /// See [`Kind::finish`].
    ///
    /// # Errors
    /// Those of [`Kind::finish`].
    fn finish(&self, own: BorrowedFd<'_>, cx: &mut dyn RestoreContext) -> Result<()>;
    /// Whether `stage` is one of [`Kind::stages`].
    fn acts_in(&self, stage: Stage, allow: &Allow) -> bool;
    /// See [`Kind::act`].
    ///
    /// # Errors
    /// Those of [`Kind::act`].
    fn act(&self, stage: Stage, own: BorrowedFd<'_>, allow: &Allow) -> Result<()>;
    /// See [`Kind::call`].
    ///
    /// # Errors
    /// Those of [`Kind::call`].
    fn call(&self, at: (DescriptionId, BorrowedFd<'_>), callers: &mut dyn Callers) -> Result<()>;
    /// See [`Kind::pins_memory`].
    fn pins_memory(&self) -> bool;
    /// See [`Kind::check_memory`].
    ///
    /// # Errors
    /// Those of [`Kind::check_memory`].
    fn check_memory(&self, at: (i32, i32), written: &[Span]) -> Result<()>;
    /// See [`Kind::in_task`].
    fn in_task(&self, fd: i32, script: &mut Script);
    /// See [`Kind::task`].
    fn task(&self) -> Option<i32>;
    /// See [`Kind::is_late`].
    fn is_late(&self) -> bool;
    /// See [`Kind::needs`].
    fn needs(&self) -> Option<DescriptionId>;
    /// See [`Kind::open_in_task`].
    fn open_in_task(&self, number: i32, needed: Option<i32>, script: &mut Script);
}

impl dyn Description {
    /// Its record, if it is of kind `K`.
    #[must_use]
    pub fn record<K: Kind>(&self) -> Option<&K::Record> {
        let decoded = (self as &dyn Any).downcast_ref::<Decoded<K>>();
        decoded.map(|decoded| &decoded.0)
    }
}

impl fmt::Debug for dyn Description {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name(), self.describe())
    }
}

/// A record that was dumped by its kind, or decoded and checked.
struct Decoded<K: Kind>(K::Record);

impl<K: Kind> Description for Decoded<K> {
    fn tag(&self) -> u16 {
        K::TAG
    }

    fn name(&self) -> &'static str {
        K::NAME
    }

    fn stays(&self) -> bool {
        K::STAYS
    }

    fn encode(&self) -> Vec<u8> {
        self.0.encode_to_vec()
    }

    fn check_last(&self, open: &Open<'_>) -> Result<()> {
        K::check_last(open, &self.0)
    }

    fn describe(&self) -> String {
        K::describe(&self.0)
    }

    fn path(&self) -> Option<String> {
        K::path(&self.0)
    }

    fn memory(&self) -> Result<Option<SharedMemory>> {
        K::memory(&self.0)
    }

    fn prepare(&self, cx: &mut dyn RestoreContext) -> Result<()> {
        K::prepare(&self.0, cx)
    }

    fn open(&self, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        K::open(&self.0, cx)
    }

    fn holder(&self) -> Option<(u16, u64)> {
        K::holder(&self.0).map(|key| (K::TAG, key))
    }

    fn finish(&self, own: BorrowedFd<'_>, cx: &mut dyn RestoreContext) -> Result<()> {
        K::finish(&self.0, own, cx)
    }

    fn acts_in(&self, stage: Stage, allow: &Allow) -> bool {
        K::stages(&self.0, allow).contains(&stage)
    }

    fn act(&self, stage: Stage, own: BorrowedFd<'_>, allow: &Allow) -> Result<()> {
        K::act(&self.0, stage, own, allow)
    }

    fn call(&self, at: (DescriptionId, BorrowedFd<'_>), callers: &mut dyn Callers) -> Result<()> {
        K::call(&self.0, at, callers)
    }

    fn pins_memory(&self) -> bool {
        K::pins_memory(&self.0)
    }

    fn check_memory(&self, at: (i32, i32), written: &[Span]) -> Result<()> {
        K::check_memory(&self.0, at, written)
    }

    fn in_task(&self, fd: i32, script: &mut Script) {
        K::in_task(&self.0, fd, script);
    }

    fn task(&self) -> Option<i32> {
        K::task(&self.0)
    }

    fn is_late(&self) -> bool {
        K::is_late(&self.0)
    }

    fn needs(&self) -> Option<DescriptionId> {
        K::needs(&self.0)
    }

    fn open_in_task(&self, number: i32, needed: Option<i32>, script: &mut Script) {
        K::open_in_task(&self.0, number, needed, script);
    }
}
