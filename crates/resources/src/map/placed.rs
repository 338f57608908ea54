//! Mappings that the kernel places where it likes, or writes to by itself.
//!
//! - What: mapped rings of io_uring
//! - Kept: at their addresses.
//! - Refused: "the task has no descriptor of it".
//! - CRIU 4.2: refused.
//! - What: mapped rings of packet sockets
//! - Kept: at their addresses.
//! - Refused: "the task has no descriptor of it"; "it is not the whole ring of a packet socket".
//! - CRIU 4.2: kept, empty.
//! - What: rings of io_uring of processes that share memory
//! - Refused: its descriptor, or the ring that is mapped, as "its memory is shared with other
//!   processes".
//! - CRIU 4.2: refuses rings altogether.
//! - What: memory for rings of io_uring and of asynchronous I/O in a pre-dump, with `--track-mem`
//!   and `--live`
//! - Refused: "what the kernel writes to the task's memory for it is not seen by who tracks
//!   writes".
//! - CRIU 4.2: refuses rings of io_uring altogether; others are not looked at.

use prost::Message as _;
use sys::process::Process;

use super::aio::{self, Context};
use super::listing::Listed;
use super::memory::Mapping;
use crate::callers::Callers;
use crate::fd::{self, DescriptionId, Open, io_uring, packet_socket};
use crate::{Error, Result};

/// What a process has of such mappings, in an image.
pub struct ProcessMappings<'a> {
    /// The process.
    pub process: Process,
    /// All its mappings.
    pub mappings: &'a [Mapping],
    /// The contexts of asynchronous I/O that some of them belong to.
    pub contexts: &'a [Context],
}

/// Has stopped processes make the mappings that only they can make.
///
/// # Errors
/// [`Error::Corrupt`] where a process has no descriptor for one, [`Error::Kernel`].
pub fn make(all: &[ProcessMappings<'_>], callers: &mut dyn Callers) -> Result<()> {
    for one in all {
        io_uring::map(&one.process, one.mappings, callers)?;
    }
    for one in all {
        aio::make(&one.process, one.contexts, one.mappings, callers)?;
    }
    Ok(())
}

/// Why this host has no room for such mappings, if so; asked before anything is made.
///
/// # Errors
/// [`Error::Kernel`], [`Error::Corrupt`].
pub fn check(all: &[ProcessMappings<'_>]) -> Result<Option<String>> {
    aio::check(all.iter().map(|one| (one.contexts, one.mappings)))
}

/// For what the kernel's structures are looked up in a process that has a mapping which
/// [`works`]: see [`crate::kernel::is_known_for`].
pub const LOOKED_UP: &[u8] = aio::NAME;

/// Whether the kernel works on requests of the mapping's own, which no descriptor tells of.
#[must_use]
pub fn works(listed: &Listed) -> bool {
    listed.is_aio()
}

/// Whether requests of such mappings are under way in a stopped process that end by themselves.
#[must_use]
pub fn is_busy(process: &Process) -> bool {
    aio::is_busy(process)
}

/// A record, and what is not saved.
pub struct MappingRecord {
    /// The number of the record.
    pub tag: u16,
    /// Its contents; nothing where it cannot be told.
    pub payload: Option<Vec<u8>>,
    /// What is not saved.
    pub refused: Vec<Error>,
}

/// Describes what the kernel keeps for such mappings of a process; nothing where it has none.
#[must_use]
pub fn dump(process: &Process, listed: &[Listed]) -> Option<MappingRecord> {
    let working = listed.iter().filter(|listed| works(listed));
    working.clone().next()?;
    let mut refused = Vec::new();
    let contexts = aio::dump(process, working, &mut refused);
    Some(MappingRecord {
        tag: aio::TAG,
        payload: contexts.map(|contexts| contexts.encode_to_vec()),
        refused,
    })
}

/// Refuses to track or protect memory that the kernel writes to by itself: what it writes to pages
/// that it has looked up before is seen by nobody.
///
/// # Errors
/// [`Error::Unsupported`].
pub fn refuse(pid: i32, listed: &[Listed]) -> Result<()> {
    let is_ring = |listed: &&Listed| listed.is_ring() || listed.is_aio();
    let Some(ring) = listed.iter().find(is_ring) else {
        return Ok(());
    };
    let why = "what the kernel writes to the task's memory for it is not seen by who tracks writes";
    Err(Error::unsupported(pid, ring.place()).because(why))
}

/// Refuses a ring of a process that shares its memory with others: a restore has a process map its
/// own. `links` are the links of its descriptors.
///
/// # Errors
/// [`Error::Unsupported`].
pub fn refuse_shared<'a>(
    pid: i32,
    mut links: impl Iterator<Item = (i32, &'a [u8])>,
    listed: &[Listed],
) -> Result<()> {
    let open = links.find_map(|(fd, link)| Some((fd, fd::worker(link)?.name())));
    let open = open.map(|(fd, name)| format!("fd {fd}, an {name}:"));
    let mut mapped = listed.iter();
    let mapped = mapped.find(|map| map.is_ring()).map(Listed::place);
    match open.or(mapped) {
        Some(what) => {
            let why = "its memory is shared with other processes";
            Err(Error::unsupported(pid, what).because(why))
        }
        None => Ok(()),
    }
}

/// The description of a mapped ring; `opens` are those that the process has descriptors of.
///
/// # Errors
/// [`Error::Unsupported`].
pub fn ring<'a>(
    mut opens: impl Iterator<Item = &'a Open<'a>>,
    pid: i32,
    listed: &Listed,
) -> Result<&'a Open<'a>> {
    let is_it = |open: &&Open<'_>| {
        open.link == listed.name && (open.stat.st_dev, open.stat.st_ino) == (listed.dev, listed.ino)
    };
    opens.find(is_it).ok_or_else(|| {
        let why = "the task has no descriptor of it";
        Error::unsupported(pid, listed.place()).because(why)
    })
}

/// The description of a packet socket whose ring is mapped.
///
/// # Errors
/// [`Error::Unsupported`].
pub fn packet_ring<'a>(
    opens: impl Iterator<Item = &'a Open<'a>>,
    pid: i32,
    listed: &Listed,
) -> Result<DescriptionId> {
    let open = ring(opens, pid, listed)?;
    let is_whole = packet_socket::has_ring_of(open, listed.span.bytes())?;
    if is_whole && listed.shared && listed.offset == 0 {
        return Ok(open.id);
    }
    let why = "it is not the whole ring of a packet socket";
    Err(Error::unsupported(pid, listed.place()).because(why))
}
