//! A kind of namespace, with and without the type of its record.

use std::fmt;

use prost::Message;

use crate::cgroup::Management;
use crate::fd::table::Link;
use crate::options::NamespaceOptions;
use crate::task::PartState;
use crate::{Error, Result};

/// The record of the first kind; the others follow.
pub(super) const FIRST_TAG: u16 = 310;

/// A tree that has namespaces of its own.
#[derive(Clone, Copy, Debug)]
pub struct Tree<'a> {
    /// The number of its root.
    pub root: i32,
    /// Its tasks.
    pub tasks: &'a [TreeTask<'a>],
    /// The caller's word about its namespaces.
    pub options: &'a NamespaceOptions,
}

/// A tree for which namespaces are made.
#[derive(Clone, Copy, Debug)]
pub struct Construction<'a> {
    /// The parts of its threads.
    pub parts: &'a [&'a dyn PartState],
    /// The caller's word about its namespaces.
    pub options: &'a NamespaceOptions,
    /// The caller's word about its control groups.
    pub cgroups: &'a Management,
}

/// A task of a tree.
#[derive(Clone, Copy, Debug)]
pub struct TreeTask<'a> {
    /// Its number.
    pub pid: i32,
    /// Its descriptors.
    pub links: &'a [Link],
}

impl Tree<'_> {
    /// The name of the namespace of a kind, which this process is in, where it is external.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn external(&self, kind: &str) -> Result<Option<String>> {
        let own = sys::procfs::stat(format_args!("self/ns/{kind}"));
        let own = own.map_err(|errno| {
            Error::kernel(format!("cannot look at /proc/self/ns/{kind}"), errno)
        })?;
        Ok(self.options.external_name(kind, own.st_ino))
    }

    /// The error for an object of a namespace that is not saved.
    pub(super) fn unsupported(&self, what: impl Into<String>) -> Error {
        Error::unsupported(self.root, what)
    }
}

/// A kind of namespace.
pub trait Kind: Sync + 'static {
    /// The record of one in an image.
    type Record: Message + Default + PartialEq;
    /// The number of its record.
    const TAG: u16;
    /// Its file in /proc/PID/ns.
    const NAME: &'static str;
    /// Its flag of unshare(2).
    const FLAG: libc::c_int;
    /// Whether a dump enters it, and a restore makes it with all others before any is filled.
    /// False: [`Kind::restore`] makes it.
    const IS_ENTERED: bool = true;

    /// Finds out what takes long, before a tree is stopped whose namespace this process is in.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    fn prepare() -> Result<()> {
        Ok(())
    }

    /// Looks at the namespace that this process is in, which is that of `tree`. What is not saved
    /// of it is added to `refused`.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    fn dump(tree: &Tree<'_>, refused: &mut Vec<Error>) -> Result<Self::Record>;

    /// Refuses a record that no dump writes.
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    fn check(record: &Self::Record) -> Result<()>;

    /// Gives the namespace that this process is in, a new one, what the record has, before the
    /// tasks are made.
    ///
    /// # Errors
    /// [`Error::Kernel`], [`Error::Mismatch`].
    fn restore(record: &Self::Record, construction: &Construction<'_>) -> Result<()>;

    /// Gives it the rest, which would be in the way of objects that are made for the tasks, once
    /// these are there.
    ///
    /// # Errors
    /// [`Error::Kernel`], [`Error::Mismatch`].
    fn finish(_record: &Self::Record) -> Result<()> {
        Ok(())
    }

    /// The name under which a restore is handed the namespace; none of one that it makes.
    fn external(_record: &Self::Record) -> Option<&str> {
        None
    }

    /// One line of what it has.
    fn describe(record: &Self::Record) -> String;
}

/// A [`Kind`] without the type of its record.
pub trait ErasedKind: Sync {
    /// See [`Kind::TAG`].
    fn tag(&self) -> u16;
    /// See [`Kind::NAME`].
    fn name(&self) -> &'static str;
    /// See [`Kind::FLAG`].
    fn flag(&self) -> libc::c_int;
    /// See [`Kind::IS_ENTERED`].
    fn is_entered(&self) -> bool;
    /// See [`Kind::prepare`].
    ///
    /// # Errors
    /// Those of [`Kind::prepare`].
    fn prepare(&self) -> Result<()>;
    /// See [`Kind::dump`]; gives the payload of the record.
    ///
    /// # Errors
    /// Those of [`Kind::dump`].
    fn dump(&self, tree: &Tree<'_>, refused: &mut Vec<Error>) -> Result<Vec<u8>>;
    /// Decodes the payload of a record, and checks it.
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    fn decode(&self, payload: &[u8]) -> Result<Box<dyn Namespace>>;
}

impl<K: Kind> ErasedKind for K {
    fn tag(&self) -> u16 {
        K::TAG
    }

    fn name(&self) -> &'static str {
        K::NAME
    }

    fn flag(&self) -> libc::c_int {
        K::FLAG
    }

    fn is_entered(&self) -> bool {
        K::IS_ENTERED
    }

    fn prepare(&self) -> Result<()> {
        <K as Kind>::prepare()
    }

    fn dump(&self, tree: &Tree<'_>, refused: &mut Vec<Error>) -> Result<Vec<u8>> {
        let record = <K as Kind>::dump(tree, refused)?;
        Ok(record.encode_to_vec())
    }

    fn decode(&self, payload: &[u8]) -> Result<Box<dyn Namespace>> {
        let record = image::strict::decode(payload);
        let record = record.map_err(|what| Error::corrupt(record_name(K::NAME), what))?;
        K::check(&record)?;
        Ok(Box::new(Record::<K>(record)))
    }
}

/// A namespace of an image: its kind, and its record, decoded and checked.
pub trait Namespace: Send + Sync {
    /// See [`Kind::NAME`].
    fn name(&self) -> &'static str;
    /// See [`Kind::FLAG`].
    fn flag(&self) -> libc::c_int;
    /// See [`Kind::IS_ENTERED`].
    fn is_entered(&self) -> bool;
    /// See [`Kind::restore`].
    ///
    /// # Errors
    /// Those of [`Kind::restore`].
    fn restore(&self, construction: &Construction<'_>) -> Result<()>;
    /// See [`Kind::finish`].
    ///
    /// # Errors
    /// Those of [`Kind::finish`].
    fn finish(&self) -> Result<()>;
    /// See [`Kind::external`].
    fn external(&self) -> Option<&str>;
    /// See [`Kind::describe`].
    fn describe(&self) -> String;
}

impl fmt::Debug for dyn Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.name(), self.describe())
    }
}

struct Record<K: Kind>(K::Record);

impl<K: Kind> Namespace for Record<K> {
    fn name(&self) -> &'static str {
        K::NAME
    }

    fn flag(&self) -> libc::c_int {
        K::FLAG
    }

    fn is_entered(&self) -> bool {
        K::IS_ENTERED
    }

    fn restore(&self, construction: &Construction<'_>) -> Result<()> {
        K::restore(&self.0, construction)
    }

    fn finish(&self) -> Result<()> {
        K::finish(&self.0)
    }

    fn external(&self) -> Option<&str> {
        K::external(&self.0)
    }

    fn describe(&self) -> String {
        K::describe(&self.0)
    }
}

/// The name of a kind's record in messages.
pub(super) fn record_name(kind: &str) -> String {
    format!("{kind} namespace")
}
