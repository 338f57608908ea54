//! Mappings of rings, which the kernel puts where it likes.

use abi::spans::{Spans, subtract};
use abi::{Addr, PAGE_BYTES, Span};
use sys::process::Process;
use syscalls::Sysno;

use crate::callers::{Callers, Unlimited, checked};
use crate::fd::DescriptionId;
use crate::map::listing::{self, Listed};
use crate::map::memory::{Mapping, Special};
use crate::{Error, Result};

/// Has a process map its rings, of those mappings.
///
/// # Errors
/// [`Error::Corrupt`] where the process has no such ring, [`Error::Kernel`].
pub fn map(process: &Process, mappings: &[Mapping], callers: &mut dyn Callers) -> Result<()> {
    let is_ring = |map: &&Mapping| map.special() == Special::Ring;
    let mut rings = mappings.iter().filter(is_ring).peekable();
    if rings.peek().is_none() {
        return Ok(());
    }
    let _unlimited = Unlimited::make(process.pid());
    rings.try_for_each(|ring| map_one(process, ring, callers))
}

/// Has a process map a ring where it was. The kernel chooses the address of a ring, and lets nobody
/// say one, nor move it: so for that moment, all other room for it is taken.
fn map_one(process: &Process, ring: &Mapping, callers: &mut dyn Callers) -> Result<()> {
    const MAP_PRIVATE: u64 = libc::MAP_PRIVATE as u64;
    const MAP_ANONYMOUS: u64 = libc::MAP_ANONYMOUS as u64;
    const MAP_NORESERVE: u64 = libc::MAP_NORESERVE as u64;
    const MAP_FIXED_NOREPLACE: u64 = libc::MAP_FIXED_NOREPLACE as u64;
    let pid = process.pid();
    let flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE;
    let fd = ring
        .file
        .and_then(|id| callers.number(pid, DescriptionId(id)));
    let missing = || Error::corrupt(format!("memory of {pid}"), "no such ring");
    let fd = u64::from(fd.ok_or_else(missing)?.cast_unsigned());
    let taken = mappings(process)?;
    let taken = taken.iter().map(|listed| listed.span).chain([ring.span()]);
    let mut taken = taken.collect::<Vec<_>>();
    taken.sort_unstable();
    let room = subtract(&[all_addresses()], &taken.into_iter().collect::<Spans>());
    // A gap beside its place is taken, however small: both together would be room for it.
    let place = ring.span();
    let is_room = |gap: &Span| {
        let is_beside = gap.end == place.start || gap.start == place.end;
        is_beside || gap.bytes() >= place.bytes()
    };
    let room = room.into_iter().filter(is_room).collect::<Vec<_>>();
    for gap in &room {
        let args = [gap.start.0, gap.bytes(), 0, flags, u64::MAX, 0];
        make(callers, pid, Sysno::mmap, args)?;
    }
    let (len_bytes, prot) = (ring.span().bytes(), u64::from(ring.prot));
    let args = [0, len_bytes, prot, ring.flags.into(), fd, ring.offset];
    let at = make(callers, pid, Sysno::mmap, args)?;
    for gap in &room {
        make(
            callers,
            pid,
            Sysno::munmap,
            [gap.start.0, gap.bytes(), 0, 0, 0, 0],
        )?;
    }
    if at != ring.start {
        let what = format!("it is mapped at {at:#x}");
        let doing = format!("cannot map an io_uring at {:#x}", ring.start);
        return Err(Error::kernel(doing, std::io::Error::other(what)));
    }
    for advice in &ring.advice {
        let args = [at, len_bytes, u64::from(*advice), 0, 0, 0];
        make(callers, pid, Sysno::madvise, args)?;
    }
    Ok(())
}

/// Has a thread make a call that must succeed.
fn make(callers: &mut dyn Callers, tid: i32, call: Sysno, args: [u64; 6]) -> Result<u64> {
    let result = callers.call(tid, call, args.map(Some), &[])?;
    checked(result, || {
        format!("{}{args:x?} for an io_uring of {tid}", call.name())
    })
}

fn mappings(process: &Process) -> Result<Vec<Listed>> {
    let pid = process.pid();
    let text = sys::proc::read(&process.path("maps"));
    let text = text.map_err(|_| Error::Gone {
        pid,
        doing: "read its mappings".to_owned(),
    })?;
    listing::parse(&text).map_err(|line| {
        let what = format!("{line:?} is not understood");
        let doing = format!("cannot read /proc/{pid}/maps");
        Error::kernel(doing, std::io::Error::other(what))
    })
}

/// Where a program may have mappings.
fn all_addresses() -> Span {
    const TOP: Addr = Addr(0x7fff_ffff_f000);
    let lowest = sys::procfs::read_text("sys/vm/mmap_min_addr");
    let lowest = lowest.ok().and_then(|text| text.trim().parse().ok());
    Span {
        start: Addr(lowest.unwrap_or(0).max(PAGE_BYTES)),
        end: TOP,
    }
}
