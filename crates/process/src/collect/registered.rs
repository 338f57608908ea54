//! Memory of stopped tasks that is registered with userfaultfds of the tree.
//!
//! The kernel does not tell with which one a mapping is registered. But it lets only that one
//! register it again for the same faults, which changes nothing; so each one that is about the
//! process's memory is tried.
//!
//! - What: memory registered with a userfaultfd
//! - Kept: private memory, also with huge pages, memfds and shared memory, for missing pages, write
//!   protection (also of pages that are not there, and asynchronous) and pages that are cached but
//!   not mapped; lost pages (`UFFDIO_POISON`). Pre-dumps leave it out; it comes at once, also with
//!   `restore --lazy-pages`.
//! - Refused: "it is registered with a userfaultfd that no task of the tree has"; "it is registered
//!   with a userfaultfd, and …" (its file is deleted; it is System V shared memory; which of its
//!   huge pages are lost is not told). Userfaultfds as "its process has the descriptors of
//!   another"; "a live dump does not keep it".
//! - CRIU 4.2: refused.

use std::cmp::Ordering;
use std::os::fd::BorrowedFd;

use abi::spans::Spans;
use abi::{Addr, PAGE_BYTES, Span};
use memory::{States, states};
use resources::fd::{DescriptionId, ErasedKind, Open, tags, userfaultfd};
use resources::map::listing::{Backing, Listed};
use resources::map::registered::{MINOR, MISSING, Registration, modes, pack};
use rustix::fs::SeekFrom;
use rustix::io::Errno;
use sys::kcmp::{self, Shared};
use sys::process::Process;
use sys::uffd::{Features, Modes, Uffd};

use super::found::Found;
use super::outside;
use crate::obstacles::Obstacles;
use crate::{Error, Result, track};

/// A userfaultfd of the tree, and what it is about.
struct Own {
    id: DescriptionId,
    process: Process,
    features: Features,
    uffd: Uffd,
}

impl Own {
    fn of(open: &Open<'_>, processes: &[Process]) -> Result<Self> {
        let process = userfaultfd::process_of(open, processes)?.clone();
        let own = open.own()?.try_clone_to_owned();
        let own = own.map_err(|error| Error::kernel("cannot keep a userfaultfd", error))?;
        let uffd = Uffd::from(own);
        // Nothing is registered with one whose conversation was not opened.
        let features = uffd.enabled().unwrap_or(Features::empty());
        Ok(Self {
            id: open.id,
            process,
            features,
            uffd,
        })
    }

    /// Whether it is about the memory of this process, which may be another's as well.
    fn is_about(&self, process: &Process) -> bool {
        let same = || kcmp::compare(&self.process, process, Shared::Memory);
        self.process == *process || same().is_ok_and(Ordering::is_eq)
    }

    fn has(&self, listed: &Listed) -> bool {
        let modes = Modes::from_bits_retain(modes(listed).into());
        self.uffd.register(listed.span, modes).is_ok()
    }
}

/// Finds what of the tasks' memory is registered, and with what; notes what is with one that no
/// task has. Takes the marks of who tracks a task from outside off its mappings, which makes no
/// difference to it. A live dump keeps none (`keeps`).
pub(super) fn find(
    all: &mut [Found],
    listed: &outside::Listed,
    keeps: bool,
    obstacles: &mut Obstacles,
) -> Result<()> {
    let mut owns = Vec::new();
    let processes = listed.processes();
    for open in listed.userfaultfds() {
        let own = match keeps {
            true => Own::of(open, &processes),
            false => Err(open
                .unsupported("a live dump does not keep it", None)
                .into()),
        };
        owns.extend(obstacles.note(own)?);
    }
    for (at, found) in all.iter_mut().enumerate() {
        let process = &found.process;
        if found.node.memory_of != 0 {
            continue;
        }
        let owns = owns.iter().filter(|own| own.is_about(process));
        let owns = owns.collect::<Vec<_>>();
        if let (Some(own), true) = (owns.first(), found.node.descriptors_of != 0) {
            let open = listed.open(own.id);
            let why = "its process has the descriptors of another";
            obstacles.note(Err::<(), _>(open.unsupported(why, None)))?;
        }
        if owns.is_empty() {
            track::forget_watched(process, &mut found.listed)?;
        }
        for mapping in 0..found.listed.len() {
            let one = &found.listed[mapping];
            if modes(one) == 0 || matches!(one.backing(), Backing::Vdso | Backing::Vvar) {
                continue;
            }
            let Some(own) = owns.iter().find(|own| own.has(one)) else {
                obstacles.note(forget_or_refuse(process, &mut found.listed[mapping]))?;
                continue;
            };
            let file = listed.mapped(at, mapping);
            let registration = registration(process, one, own, file);
            found.registered.extend(obstacles.note(registration)?);
        }
    }
    Ok(())
}

fn forget_or_refuse(process: &Process, listed: &mut Listed) -> Result<()> {
    track::forget_watched(process, std::slice::from_mut(listed))?;
    match modes(listed) {
        0 => Ok(()),
        _ => {
            let why = "it is registered with a userfaultfd that no task of the tree has";
            let refused = resources::Error::unsupported(process.pid(), listed.place());
            Err(refused.because(why).into())
        }
    }
}

fn registration(
    process: &Process,
    listed: &Listed,
    own: &Own,
    file: Option<(&Open<'_>, Option<&'static dyn ErasedKind>)>,
) -> Result<Registration> {
    let modes = modes(listed);
    let tag = file.and_then(|(_, kind)| kind).map(ErasedKind::tag);
    if let Some(why) = hindrance(listed, own, tag) {
        let why = format!("it is registered with a userfaultfd, and {why}");
        return Err(resources::Error::unsupported(process.pid(), listed.place())
            .because(why)
            .into());
    }
    let span = listed.span;
    let States {
        present,
        protected,
        lost,
    } = states(process, span)?;
    let is_stored = matches!(tag, Some(tags::MEMFD | tags::SHMEM));
    let cached = match file {
        Some((open, _)) if is_stored && modes & (MISSING | MINOR) != 0 => {
            cached(open.own()?, listed)?
        }
        _ => Spans::new(),
    };
    Ok(Registration {
        start: span.start.0,
        end: span.end.0,
        modes,
        description: own.id.0,
        present: pack(span, &present),
        protected: pack(span, &protected),
        lost: pack(span, &lost),
        cached: pack(span, &cached),
        huge_page_bytes: huge_page_bytes(listed).unwrap_or(0),
    })
}

/// Why what is registered cannot be made again.
fn hindrance(listed: &Listed, own: &Own, tag: Option<u16>) -> Option<&'static str> {
    if listed.segment().is_some() {
        return Some("it is System V shared memory");
    }
    if tag == Some(tags::REGULAR) && listed.name.ends_with(b" (deleted)") {
        return Some("its file is deleted");
    }
    let tells = listed.has_huge_pages() && own.features.contains(Features::POISON);
    tells.then_some("which of its huge pages are lost is not told")
}

/// Where a mapping has pages of its file that the file has in memory.
fn cached(file: BorrowedFd<'_>, listed: &Listed) -> Result<Spans> {
    cached_in(file, (listed.span, listed.offset), huge_page_bytes(listed))
}

fn huge_page_bytes(listed: &Listed) -> Option<u64> {
    listed.has_huge_pages().then_some(listed.page_bytes)
}

/// The same, of what is mapped at a span from an offset of the file on, with huge pages of this
/// size.
pub(crate) fn cached_in(
    file: BorrowedFd<'_>,
    (span, offset): (Span, u64),
    huge_page_bytes: Option<u64>,
) -> Result<Spans> {
    let failed = |error| Error::kernel(format!("cannot find the pages of {span}"), error);
    let size = rustix::fs::fstat(file).map_err(|errno| failed(errno.into()))?;
    let size = size.st_size.cast_unsigned();
    let page_bytes = huge_page_bytes.unwrap_or(PAGE_BYTES);
    let end = (offset + span.bytes()).min(size.next_multiple_of(page_bytes));
    if end <= offset {
        return Ok(Spans::new());
    }
    let at = |place: u64| Addr(span.start.0 + (place - offset));
    let mut found = Spans::new();
    if let Some(page_bytes) = huge_page_bytes {
        let there = sys::uffd::huge_pages_of(file, (offset, end - offset), page_bytes);
        let places = (offset..end).step_by(page_bytes as usize);
        for (place, _) in places
            .zip(there.map_err(failed)?)
            .filter(|(_, there)| *there)
        {
            found.push(Span::new(at(place), page_bytes));
        }
        return Ok(found);
    }
    let mut next = offset;
    while next < end {
        let start = match rustix::fs::seek(file, SeekFrom::Data(next)) {
            Ok(start) if start < end => start,
            Ok(_) | Err(Errno::NXIO) => break,
            Err(errno) => return Err(failed(errno.into())),
        };
        let hole = rustix::fs::seek(file, SeekFrom::Hole(start));
        let hole = hole.map_err(|errno| failed(errno.into()))?;
        // The end of a file is one, wherever its last page ends.
        next = hole.next_multiple_of(PAGE_BYTES).min(end);
        found.push(Span {
            start: at(start),
            end: at(next),
        });
    }
    Ok(found)
}
