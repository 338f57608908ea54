//! What a remote store must be able to do: little.
use std::sync::Arc;

use crate::Result;

/// Which contents an object of a bucket has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Version {
    /// Their length.
    pub len_bytes: u64,
    /// Version of the contents (an ETag, for one).
    pub tag: String,
}

/// The contents of an object that is put into a bucket: they may be read more than once, in any
/// order and by several threads.
pub trait Contents: Sync {
    /// Their length.
    fn len_bytes(&self) -> u64;

    /// Fills all of `bytes` from `offset_bytes`.
    fn read_at(&self, bytes: &mut [u8], offset_bytes: u64) -> Result<()>;
}

/// Whole objects by name, as an object store has them: [`Remote`](crate::Remote) makes a
/// [`Store`](crate::Store) of it, which passes the conformance suite if these rules are kept.
///
/// - There are no renames, no random writes and no descriptors.
/// - Every call may be made again, also after it was done and only the answer was lost; so `put`
///   MUST put the same object twice without harm.
/// - An error that may pass (a timeout, a lost connection, "slow down") MUST be
///   [`Error::Transient`](crate::Error::Transient). Nobody retries below: `Remote` does, for all.
/// - Calls are made by several threads at once.
/// - Names passed [`check_name`](crate::check_name).
pub trait Bucket: Send + Sync {
    /// Puts an object, in place of another of that name. Nobody sees a part of it, and it is safe
    /// when this returns.
    ///
    /// # Errors
    /// The store's.
    fn put(&self, name: &str, contents: &dyn Contents) -> Result<()>;

    /// Tells which version of an object there is.
    ///
    /// # Errors
    /// [`Error::Missing`](crate::Error::Missing) where there is none.
    fn head(&self, name: &str) -> Result<Version>;

    /// Fills all of `bytes` from `offset_bytes` of that version of an object, which has them.
    ///
    /// # Errors
    /// [`Error::Missing`](crate::Error::Missing) where there is none or another one.
    fn get(&self, name: &str, version: &Version, bytes: &mut [u8], offset_bytes: u64)
    -> Result<()>;

    /// Lists the names of all objects, in any order.
    ///
    /// # Errors
    /// The store's.
    fn list(&self) -> Result<Vec<String>>;

    /// Removes an object.
    ///
    /// # Errors
    /// [`Error::Missing`](crate::Error::Missing) where there is none.
    fn delete(&self, name: &str) -> Result<()>;

    /// Opens the bucket at `path`, relative to this one.
    ///
    /// # Errors
    /// [`Error::System`](crate::Error::System), also where there is none.
    fn beside(&self, path: &str) -> Result<Arc<dyn Bucket>>;

    /// The way to the bucket that is at `place`, as [`Bucket::beside`] takes it.
    ///
    /// # Errors
    /// [`Error::System`](crate::Error::System), also where there is none.
    fn way_to(&self, place: &str) -> Result<String>;

    /// How many requests pay at once.
    fn requests_at_once(&self) -> usize {
        8
    }

    /// Says where the bucket is: for messages, and for [`Bucket::way_to`].
    fn place(&self) -> String;
}
