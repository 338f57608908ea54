//! The memory of machines that are restored: files, filled out of the image.
//!
//! A machine that has its memory to itself gets huge pages where it had some, if the host has as
//! many free; what machines share has ordinary ones, as each would have to have a huge page for
//! every byte that it writes.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};

use abi::{Addr, PAGE_BYTES};
use image::{Reader, SpaceId};
use pages::{Extent, Placement, Sink, sink};
use rustix::fs::MemfdFlags;
use sys::memfd::Mapped;
use sys::process::Process;

use super::block;
use super::record::{QemuBlock, QemuMachine};
use super::template::File;
use crate::{Error, Result};

/// The memory of one machine, or of several.
pub(crate) type Memory = Vec<File>;

/// The size of huge pages that a machine can have again.
pub(crate) const HUGE_BYTES: u64 = 2 << 20;

/// How long a block is.
pub(crate) fn bytes_of(reader: &Reader, block: &QemuBlock) -> u64 {
    let space = reader.space(SpaceId(block.space)).expect("it was checked");
    space.len_pages * PAGE_BYTES
}

/// Empty files for the memory of a machine that has it to itself.
pub(crate) fn own(reader: &Reader, machine: &QemuMachine) -> Result<Memory> {
    files(reader, machine, |block, bytes| {
        if block.page_bytes != HUGE_BYTES || !bytes.is_multiple_of(HUGE_BYTES) {
            return small(bytes);
        }
        huge(bytes).or_else(|error| {
            let name = &block.backend;
            log::warn!("the memory {name} was in huge pages, and is not any more: {error}");
            small(bytes)
        })
    })
}

/// Empty files for memory that machines share.
pub(crate) fn template(reader: &Reader, machine: &QemuMachine) -> Result<Memory> {
    files(reader, machine, |_, bytes| small(bytes))
}

fn files(
    reader: &Reader,
    machine: &QemuMachine,
    make: impl Fn(&QemuBlock, u64) -> io::Result<OwnedFd>,
) -> Result<Memory> {
    let file = |block: &QemuBlock| {
        let bytes = bytes_of(reader, block);
        let file = make(block, bytes).map_err(Error::kernel("cannot make memory for a machine"))?;
        Ok((block.backend.clone(), bytes, file))
    };
    machine.blocks.iter().map(file).collect()
}

fn small(bytes: u64) -> io::Result<OwnedFd> {
    made(bytes, MemfdFlags::empty())
}

/// A file of huge pages, all of which are its own.
fn huge(bytes: u64) -> io::Result<OwnedFd> {
    let file = made(bytes, MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)?;
    Mapped::new(file.as_fd(), bytes as usize)?;
    Ok(file)
}

fn made(bytes: u64, more: MemfdFlags) -> io::Result<OwnedFd> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | more;
    let file = rustix::fs::memfd_create("stillframe-guest", flags)?;
    rustix::fs::ftruncate(&file, bytes)?;
    Ok(file)
}

/// Fills memories with the image's pages, all of which are checked.
///
/// Calls `progress` with the bytes done and to be done.
pub(crate) fn fill(
    reader: &Reader,
    machine: &QemuMachine,
    memories: &[Memory],
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<()> {
    let blocks = machine.blocks.iter();
    let placed = blocks.map(|block| {
        let whole = Extent {
            space: SpaceId(block.space),
            first_page: 0,
            at: Addr(0),
            pages: bytes_of(reader, block) / PAGE_BYTES,
        };
        pages::place(reader, &[whole])
    });
    let placed = placed.collect::<pages::Result<Vec<_>>>()?;
    let pages = placed.iter().flatten();
    let bytes = pages.map(|piece| u64::from(piece.pages) * PAGE_BYTES);
    let total = bytes.sum::<u64>() * memories.len() as u64;
    let mut before = 0;
    for memory in memories {
        for (file, placed) in memory.iter().zip(&placed) {
            let progress = |done| progress(before + done, total);
            before += fill_file(reader, file, placed, &progress)?;
        }
    }
    Ok(())
}

/// Fills a file; gives how many bytes that were.
fn fill_file(
    reader: &Reader,
    (_, bytes, file): &File,
    placed: &[Placement],
    progress: &(dyn Fn(u64) + Sync),
) -> Result<u64> {
    let failed = || Error::kernel("cannot have the memory of a machine at hand");
    let fill = |placed: &[Placement], sink: &dyn Sink| {
        let filled = pages::fill(reader, placed, sink, progress)?;
        Ok(filled.pages * PAGE_BYTES)
    };
    if block::page_bytes(file)? == PAGE_BYTES {
        let file = file.try_clone().map_err(failed())?;
        return fill(placed, &sink::Object::new(file));
    }
    // write(2) does not write to huge pages.
    let mapped = Mapped::new(file.as_fd(), *bytes as usize).map_err(failed())?;
    let placed = placed.iter().map(|piece| Placement {
        at: piece.at.plus(mapped.start()),
        ..*piece
    });
    let sink = memory::sink::Memory::new(&Process::own());
    fill(&placed.collect::<Vec<_>>(), &sink)
}
