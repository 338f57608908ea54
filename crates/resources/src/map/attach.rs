//! The calls that attach System V shared memory: the kernel counts who has it.

use abi::{Addr, Span};
use syscalls::Sysno;

use super::memory::{Mapping, Memory, Segment};
use super::policy;
use super::room::free;
use crate::script::Script;
use crate::{Error, Result};

const PROT_READ: u32 = linux_raw_sys::general::PROT_READ;
const PROT_WRITE: u32 = linux_raw_sys::general::PROT_WRITE;
const PROT_EXEC: u32 = linux_raw_sys::general::PROT_EXEC;

/// Attaches it where the mapping is, with its protection. Of a part, all is attached elsewhere, the
/// part moved and the rest given up; `taken`: where nothing else may be. Gives that other place.
///
/// # Errors
/// [`Error::Corrupt`] where the process has no room for all of it.
pub(super) fn attach(
    memory: &Memory,
    map: &Mapping,
    (segment, prot): (Segment, u32),
    taken: Option<Span>,
    script: &mut Script,
) -> Result<Option<Span>> {
    let bytes = map.span().bytes();
    let is_whole = map.offset == 0 && (segment.bytes == 0 || segment.bytes == bytes);
    let place = match is_whole {
        true => None,
        false => Some(elsewhere(memory, map, segment, taken)?),
    };
    let given = call(
        segment,
        place.map_or(Addr(map.start), |place| place.start),
        prot,
        script,
    );
    if let Some(place) = place {
        move_part(place, map, script);
    }
    if given != prot {
        let args = [map.start.into(), bytes.into(), prot.into()];
        script.call(Sysno::mprotect, args);
    }
    policy::bind(map, script);
    Ok(place)
}

/// Has all of it attached; gives the protection that it has.
fn call(segment: Segment, at: Addr, prot: u32, script: &mut Script) -> u32 {
    const SHM_RDONLY: u32 = libc::SHM_RDONLY as u32;
    const SHM_REMAP: u32 = libc::SHM_REMAP as u32;
    const SHM_EXEC: u32 = libc::SHM_EXEC as u32;
    let mut flags = SHM_REMAP;
    let mut given = PROT_READ;
    if segment.read_only {
        flags |= SHM_RDONLY;
    } else {
        given |= PROT_WRITE;
    }
    if prot & PROT_EXEC != 0 {
        flags |= SHM_EXEC;
        given |= PROT_EXEC;
    }
    let args = [segment.number.into(), at.into(), flags.into()];
    script.expect(Sysno::shmat, args, at.0);
    given
}

/// A place for all of a segment, at a multiple of the size of its pages.
fn elsewhere(
    memory: &Memory,
    map: &Mapping,
    segment: Segment,
    taken: Option<Span>,
) -> Result<Span> {
    // The largest size of pages is 1 GiB.
    let align = 1 << segment.bytes.trailing_zeros().min(30);
    let room = segment.bytes.checked_add(align);
    let room = room.and_then(|bytes| free(memory, taken, bytes, Addr(map.start)));
    let room = room.ok_or_else(|| {
        let what = format!("leaves no {} bytes for shared memory", segment.bytes);
        Error::corrupt("memory", what)
    })?;
    let start = room.start.0.next_multiple_of(align);
    Ok(Span::new(Addr(start), segment.bytes))
}

/// Moves a part of what is at `place` to where the mapping is, and gives the rest up.
fn move_part(place: Span, map: &Mapping, script: &mut Script) {
    const MREMAP_MAYMOVE: u32 = linux_raw_sys::general::MREMAP_MAYMOVE;
    const MREMAP_FIXED: u32 = linux_raw_sys::general::MREMAP_FIXED;
    let part = Span::new(place.start.plus(map.offset), map.span().bytes());
    let flags = MREMAP_MAYMOVE | MREMAP_FIXED;
    let args = [
        part.start.into(),
        part.bytes().into(),
        part.bytes().into(),
        flags.into(),
        map.start.into(),
    ];
    script.expect(Sysno::mremap, args, map.start);
    let rest = [(place.start, part.start), (part.end, place.end)];
    for (start, end) in rest.into_iter().filter(|(start, end)| start < end) {
        let args = [start.into(), (end.0 - start.0).into()];
        script.call(Sysno::munmap, args);
    }
}
