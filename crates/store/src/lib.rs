//! Opaque objects by name: a directory, memory, or what is remote.
//!
//! A [`Store`] holds an image's files without knowing what is in them. A [`NewObject`] is written
//! in any order from several threads and appears under its name, whole, when it is committed; until
//! then, and when it is dropped, nobody sees it. An opened [`Object`] is read at offsets.
//!
//! ```
//! use store::{Memory, Store};
//! let store = Memory::default();
//! let new = store.create("pages.img")?;
//! new.write_at(b"world", 6)?;
//! new.write_at(b"hello ", 0)?;
//! assert!(store.list()?.is_empty());
//! new.commit(false)?;
//! let mut bytes = [0; 5];
//! store.open("pages.img")?.read_at(&mut bytes, 6)?;
//! assert_eq!(&bytes, b"world");
//! # Ok::<(), store::Error>(())
//! ```
//!
//! [`Images`] names a store, or the directory that is one, for whoever opens it later.
//!
//! A remote store takes and gives only whole objects: it is a [`Bucket`], and [`Remote`]
//! makes a store of it.
#![forbid(unsafe_code)]

mod bucket;
#[cfg(any(test, feature = "conformance"))]
pub mod conformance;
mod directory;
mod images;
mod memory;
mod remote;
mod retry;

use std::io;
use std::ops::Range;
use std::os::fd::BorrowedFd;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

pub use bucket::{Bucket, Contents, Version};
pub use directory::{Directory, way};
pub use images::Images;
pub use memory::Memory;
pub use remote::Remote;
pub use retry::{Patience, retry};

/// An error of a store or of one of its objects.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs, reason = "the message names each field")]
pub enum Error {
    #[error("{name:?} is not the name of an object")]
    Name { name: String },
    #[error("there is no {name} in {store}")]
    Missing { name: String, store: String },
    #[error("somebody else is writing to {store}")]
    Busy { store: String },
    #[error("{name} in {store} is not trusted: {why} (use --trust-image to allow it)")]
    Untrusted {
        name: String,
        store: String,
        why: String,
    },
    #[error("{name} ends before byte {end_bytes}: it has {len_bytes}")]
    Short {
        name: String,
        end_bytes: u64,
        len_bytes: u64,
    },
    #[error("cannot {action} {name} in {store} for now")]
    Transient {
        action: &'static str,
        name: String,
        store: String,
        source: io::Error,
    },
    #[error("cannot {action} {name} in {store}")]
    System {
        action: &'static str,
        name: String,
        store: String,
        source: io::Error,
    },
}

impl Error {
    /// Tells whether the same call may succeed when it is made again.
    #[must_use]
    pub fn is_transient(&self) -> bool {
        matches!(self, Self::Transient { .. })
    }
}

/// The result of everything here.
pub type Result<T> = std::result::Result<T, Error>;

/// Opaque objects by name; every implementation MUST pass the crate's conformance suite.
///
/// - Names MUST pass [`check_name`]; others are refused with [`Error::Name`].
/// - A name shows either nothing, or one whole object: never one under construction.
/// - Who creates objects while others may, too, MUST hold a [`Claim`].
/// - Committing over an existing name replaces it at once; who has the old object open keeps
///   reading the old one, or is told that it is [`Error::Missing`]: never reads some of both.
/// - What can succeed when it is tried again was tried again; an error is the last word.
pub trait Store: Send + Sync {
    /// Takes the store for writing, removes what is left of objects that a killed process had under
    /// construction, and tells what objects there are. Readers are not kept out.
    ///
    /// # Errors
    /// [`Error::Busy`] where somebody else, in this process or another, has a claim.
    fn claim(&self) -> Result<Claim>;

    /// Starts an object that will be called `name`; it is invisible until [`NewObject::commit`].
    fn create(&self, name: &str) -> Result<Box<dyn NewObject>>;

    /// Opens the object called `name`.
    ///
    /// # Errors
    /// [`Error::Missing`] where there is none.
    fn open(&self, name: &str) -> Result<Box<dyn Object>>;

    /// Lists the names of all objects, sorted.
    fn list(&self) -> Result<Vec<String>>;

    /// Removes the object called `name`; who has it open can go on reading it.
    ///
    /// # Errors
    /// [`Error::Missing`] where there is none.
    fn remove(&self, name: &str) -> Result<()>;

    /// Gives back the room of parts of the object called `name`, which read as zeros from then on;
    /// its length stays, and what lies past it is left out. Tells how many bytes that gave back, as
    /// far as that can be known.
    ///
    /// # Errors
    /// [`Error::Missing`] where there is no such object, [`Error::System`] also where the store
    /// cannot do that, whatever there is: then nothing is changed.
    fn free(&self, name: &str, parts_bytes: &[Range<u64>]) -> Result<u64> {
        let _ = parts_bytes;
        Err(Error::System {
            action: "free parts of",
            name: name.into(),
            store: self.place(),
            source: io::ErrorKind::Unsupported.into(),
        })
    }

    /// Opens the store at `path`, which is relative to this one: `../1` is another in the same
    /// place.
    ///
    /// # Errors
    /// [`Error::System`], also where there is none.
    fn beside(&self, path: &str) -> Result<Arc<dyn Store>>;

    /// The way to another store of the same kind, as [`Store::beside`] takes it.
    ///
    /// # Errors
    /// [`Error::System`], also where there is none.
    fn way_to(&self, other: &dyn Store) -> Result<String> {
        Err(Error::System {
            action: "find the way to",
            name: other.place(),
            store: self.place(),
            source: io::ErrorKind::Unsupported.into(),
        })
    }

    /// The directory that this store is, where it is one.
    fn directory(&self) -> Option<&Path> {
        None
    }

    /// Returns another handle of this store.
    fn handle(&self) -> Arc<dyn Store>;

    /// Leaves a sign for people, called `name`, that points to the store at `path`, relative to
    /// this one; without a path, takes it away. It means nothing to programs, so a store may have
    /// none.
    fn point(&self, name: &str, path: Option<&str>) -> Result<()> {
        let _ = (name, path);
        Ok(())
    }

    /// Says where the store is, for messages.
    fn place(&self) -> String;
}

/// The right to write to a store, until it is dropped or the process ends.
pub struct Claim {
    /// The names of the objects that were there, sorted.
    pub names: Vec<String>,
    /// True if others are kept out. Some file systems have no locks.
    pub exclusive: bool,
    /// Ends the claim when it is dropped.
    _guard: Box<dyn Send + Sync>,
}

/// An object under construction; dropping it removes it.
///
/// It is on this machine until it is committed, so that it can be written in any order, read,
/// cut and freed in parts, whatever the store can do.
pub trait NewObject: Send + Sync {
    /// Writes all of `bytes` at `offset_bytes`; several threads may write different ranges at once.
    /// Ranges never written, before the last written byte, read as zero.
    fn write_at(&self, bytes: &[u8], offset_bytes: u64) -> Result<()>;

    /// Fills all of `bytes` with what was written from `offset_bytes` on.
    ///
    /// # Errors
    /// [`Error::Short`] where nothing was written so far.
    fn read_at(&self, bytes: &mut [u8], offset_bytes: u64) -> Result<()>;

    /// Tells the store that about `len_bytes` will be written. It may prepare; the object's length
    /// does not change.
    fn reserve(&self, len_bytes: u64) -> Result<()>;

    /// Gives back the room of `parts_bytes`, which nobody reads any more: what is read there later
    /// is what was written, or zeros. A store that cannot do that leaves them as they are.
    fn free(&self, parts_bytes: &[Range<u64>]) -> Result<()>;

    /// Ends the object at `len_bytes`, which is not past the last written byte.
    fn cut(&self, len_bytes: u64) -> Result<()>;

    /// Gives the object its name, in place of another of that name. With `durable`, the contents
    /// and the name are on stable storage when this returns.
    fn commit(self: Box<Self>, durable: bool) -> Result<()>;
}

/// Ends a claim of this process.
struct ClaimGuard(Arc<AtomicBool>);

impl Drop for ClaimGuard {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

/// Refuses to read beyond the end of `object`.
fn check_range(object: &dyn Object, bytes: &[u8], offset_bytes: u64) -> Result<()> {
    let end_bytes = offset_bytes.saturating_add(bytes.len() as u64);
    let len_bytes = object.len_bytes();
    match end_bytes <= len_bytes {
        true => Ok(()),
        false => Err(Error::Short {
            name: object.name().into(),
            end_bytes,
            len_bytes,
        }),
    }
}

/// An opened object: constant bytes.
pub trait Object: Send + Sync {
    /// Returns the object's name.
    fn name(&self) -> &str;

    /// Returns the object's length when it was opened.
    fn len_bytes(&self) -> u64;

    /// Fills all of `bytes` from `offset_bytes`; several threads may read at once.
    ///
    /// # Errors
    /// [`Error::Short`] where the object ends before.
    fn read_at(&self, bytes: &mut [u8], offset_bytes: u64) -> Result<()>;

    /// Fills the bytes of each of `ranges` from its offset: with as many requests at once as pay.
    ///
    /// # Errors
    /// As [`Object::read_at`], for one of those that failed.
    fn read_ranges(&self, ranges: &mut [(u64, &mut [u8])]) -> Result<()> {
        let mut ranges = ranges.iter_mut();
        ranges.try_for_each(|(offset_bytes, bytes)| self.read_at(bytes, *offset_bytes))
    }

    /// Returns a descriptor that can be read at offsets and mapped, where the store has one: only a
    /// local file can.
    fn as_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }
}

/// The longest name of an object.
pub const NAME_MAX_BYTES: usize = 200;

/// Checks a name: 1 to [`NAME_MAX_BYTES`] of `A-Z a-z 0-9 . _ -`, not starting with a dot. So no
/// name leaves a directory, and each means the same in every store.
///
/// # Errors
/// [`Error::Name`].
pub fn check_name(name: &str) -> Result<()> {
    let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
    let good = (1..=NAME_MAX_BYTES).contains(&name.len())
        && !name.starts_with('.')
        && name.bytes().all(plain);
    if good {
        Ok(())
    } else {
        Err(Error::Name { name: name.into() })
    }
}
