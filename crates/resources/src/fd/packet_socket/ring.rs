//! The ring into which packets come: its shape, what is in it, and where the kernel goes on in it
//! (packet_mmap.rst).
//!
//! That place cannot be set. A new ring begins at its start, so packets of no use are sent to it
//! over the loopback interface until the kernel stands where it stood; then the contents come.

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::FileExt;

use rustix::event::PollFlags;
use rustix::fs::MemfdFlags;
use sys::packet_ring::PacketRing;

use super::blocks;
use super::feed::{Feed, SMALL_BYTES};
use crate::fd::ready;
use crate::fd::{DumpContext, Open, RestoreContext};
use crate::{Error, Result};

pub(super) const SOL_PACKET: i32 = libc::SOL_PACKET;
const PACKET_RX_RING: i32 = libc::PACKET_RX_RING;
/// Whoever has a frame or a block: the kernel, or with any bit the program.
pub(super) const KERNEL: u32 = 0;
pub(super) const USER: u32 = 1;
/// `TPACKET_V1`, whose status has eight bytes.
const V1: u32 = 0;
/// `TPACKET_V3`, of blocks that have any number of packets.
pub(super) const V3: u32 = 2;
/// In no status that the kernel gives a place: whoever sees it takes the place for a program's, but
/// for the kernel, of blocks.
const MARK: u32 = 1 << 27;
const PAGE_BYTES: u32 = 4096;
/// The smallest frame that any version has.
const FRAME_MIN_BYTES: u32 = 32;
/// More than any kernel gives.
const RING_MAX_BYTES: u64 = 1 << 36;

/// How a ring was asked for.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Shape {
    /// `TPACKET_V1` (0), `TPACKET_V2` (1), `TPACKET_V3` (2).
    #[prost(uint32, tag = "1")]
    pub version: u32,
    /// The size of a block in bytes.
    #[prost(uint32, tag = "2")]
    pub block_bytes: u32,
    /// How many blocks.
    #[prost(uint32, tag = "3")]
    pub blocks: u32,
    /// The size of a frame in bytes.
    #[prost(uint32, tag = "4")]
    pub frame_bytes: u32,
    /// How many frames.
    #[prost(uint32, tag = "5")]
    pub frames: u32,
    /// After how many milliseconds a block is handed over that is not full.
    #[prost(uint32, tag = "6")]
    pub retire_ms: u32,
    /// How much of each block is the program's own, in bytes.
    #[prost(uint32, tag = "7")]
    pub private_bytes: u32,
    /// `TP_FT_REQ_FILL_RXHASH`
    #[prost(uint32, tag = "8")]
    pub features: u32,
}

impl Shape {
    /// Its size in bytes, where all of it makes sense.
    pub fn bytes(&self) -> Option<usize> {
        let bytes = u64::from(self.block_bytes) * u64::from(self.blocks);
        let a_block = self.block_bytes.checked_div(self.frame_bytes)?;
        let sound = self.version <= V3
            && self.block_bytes.is_multiple_of(PAGE_BYTES)
            && self.frame_bytes >= FRAME_MIN_BYTES
            && self.frame_bytes.is_multiple_of(16)
            && self.private_bytes <= self.block_bytes / 2
            && a_block > 0
            && a_block.checked_mul(self.blocks) == Some(self.frames)
            && (1..=RING_MAX_BYTES).contains(&bytes);
        sound.then(|| usize::try_from(bytes).ok()).flatten()
    }

    /// How many places there are at which the kernel can stand.
    fn places(&self) -> u32 {
        match self.version {
            V3 => self.blocks,
            _ => self.frames,
        }
    }

    /// Where it stands whose a place is.
    fn status(&self, index: u32) -> usize {
        match self.version {
            V3 => blocks::status(self, index),
            _ => self.frame(index),
        }
    }

    /// Where a frame begins.
    pub(super) fn frame(&self, index: u32) -> usize {
        let a_block = self.block_bytes / self.frame_bytes;
        let (block, frame) = (index / a_block, index % a_block);
        block as usize * self.block_bytes as usize + frame as usize * self.frame_bytes as usize
    }

    /// Has `socket` have such a ring.
    fn ask(&self, socket: BorrowedFd<'_>) -> std::io::Result<()> {
        let mut words = vec![self.block_bytes, self.blocks, self.frame_bytes, self.frames];
        if self.version == V3 {
            words.extend([self.retire_ms, self.private_bytes, self.features]);
        }
        let request = words.into_iter().flat_map(u32::to_ne_bytes);
        let request = request.collect::<Vec<_>>();
        sys::socket::set_option(socket, SOL_PACKET, PACKET_RX_RING, &request)
    }
}

/// A ring in an image.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Ring {
    /// How it was asked for.
    #[prost(message, required, tag = "1")]
    pub shape: Shape,
    /// The frame or block that the kernel fills next.
    #[prost(uint32, tag = "2")]
    pub next: u32,
    /// The space with its contents.
    #[prost(uint32, tag = "3")]
    pub space: u32,
}

impl Ring {
    /// Describes the ring of the socket behind `open`.
    pub(super) fn dump(open: &Open<'_>, shape: Shape, cx: &mut dyn DumpContext) -> Result<Self> {
        let failed =
            |error| Error::kernel(format!("look into the ring of {}", open.place()), error);
        let own = open.own()?;
        let bytes = shape.bytes();
        let bytes = bytes.ok_or_else(|| open.unsupported("its ring is not understood", None))?;
        let ring = PacketRing::map(own, bytes).map_err(failed)?;
        let moment = moment(&ring, &shape, own).map_err(failed)?;
        let seen = moment.and_then(|moment| match shape.version {
            V3 => blocks::contents(&ring, &shape, &moment),
            _ => Some((moment.next, frames(&ring, &shape, &moment))),
        });
        let why = "its ring is full, or is just being used";
        let (next, contents) = seen.ok_or_else(|| open.passing(why, None))?;
        let file = memory().map_err(failed)?;
        file.write_all_at(&contents, 0).map_err(failed)?;
        Ok(Self {
            shape,
            next,
            space: cx.store(file.into(), bytes as u64)?,
        })
    }

    /// What makes no sense of it.
    pub(super) fn nonsense(&self) -> Option<&'static str> {
        let sound = self.shape.bytes().is_some() && self.next < self.shape.places();
        (!sound).then_some("has a ring that makes no sense")
    }

    /// Gives a new socket the ring, with the kernel where it was in it: at its beginning, unless
    /// the socket `has_heard` of packets. It gets none until it has another filter.
    pub(super) fn restore(
        &self,
        own: BorrowedFd<'_>,
        has_heard: bool,
        cx: &mut dyn RestoreContext,
    ) -> Result<()> {
        let failed = |error| Error::kernel("make the ring of a packet socket", error);
        let bytes = self.shape.bytes().expect("it was checked");
        let file = memory().map_err(failed)?;
        file.set_len(bytes as u64).map_err(failed)?;
        cx.load(self.space, file.as_fd())?;
        if file.metadata().map_err(failed)?.len() != bytes as u64 {
            return Err(Error::corrupt(
                "packet socket",
                "has a ring of another size",
            ));
        }
        self.shape.ask(own).map_err(failed)?;
        let ring = PacketRing::map(own, bytes).map_err(failed)?;
        if has_heard {
            let moved = self.move_kernel(own, &ring);
            moved.map_err(|error| Error::kernel("move the ring of a packet socket", error))?;
        }
        self.fill(&ring, &file).map_err(failed)
    }

    fn move_kernel(&self, own: BorrowedFd<'_>, ring: &PacketRing) -> std::io::Result<()> {
        let feed = Feed::start(own)?;
        match self.shape.version {
            V3 => blocks::move_to(ring, &self.shape, self.next, &feed),
            _ => self.move_frames(ring, &feed),
        }
    }

    fn fill(&self, ring: &PacketRing, file: &File) -> std::io::Result<()> {
        let mut block = vec![0; self.shape.block_bytes as usize];
        for index in 0..self.shape.blocks {
            let at = index as usize * block.len();
            file.read_exact_at(&mut block, at as u64)?;
            match self.shape.version {
                // The kernel has it, and what it knows of it is right.
                V3 if index == self.next => {
                    let own = blocks::private(&self.shape);
                    ring.write(at + own.start, &block[own]);
                }
                _ => ring.write(at, &block),
            }
        }
        Ok(())
    }

    /// Has the kernel stand at the frame where it stood: each packet takes one.
    fn move_frames(&self, ring: &PacketRing, feed: &Feed<'_>) -> std::io::Result<()> {
        for index in 0..self.next {
            let at = self.shape.frame(index);
            feed.send(SMALL_BYTES, || ring.word(at) != KERNEL)?;
        }
        feed.end()
    }
}

fn memory() -> std::io::Result<File> {
    let file = rustix::fs::memfd_create("ring", MemfdFlags::CLOEXEC)?;
    Ok(File::from(file))
}

/// A moment of a ring: whose each place is, and the one that the kernel fills next.
pub(super) struct Moment {
    pub(super) status: Vec<u32>,
    pub(super) next: u32,
}

/// Looks where the kernel stands; nothing where that cannot be told.
fn moment(
    ring: &PacketRing,
    shape: &Shape,
    own: BorrowedFd<'_>,
) -> std::io::Result<Option<Moment>> {
    const TRIES: usize = 20;
    let all = || -> Vec<u32> {
        let places = 0..shape.places();
        places.map(|index| ring.word(shape.status(index))).collect()
    };
    for _ in 0..TRIES {
        let status = all();
        let next = match is_readable(own)? {
            true => first_of_kernel(&status).or_else(|| first_filled(ring, shape, &status)),
            false => behind_last_filled(ring, shape, own, &status)?,
        };
        if let Some(next) = next.filter(|_| all() == status) {
            return Ok(Some(Moment { status, next }));
        }
    }
    Ok(None)
}

/// The contents of a ring of frames at a moment: what was the program's is whole, and what comes
/// afterwards has not come.
fn frames(ring: &PacketRing, shape: &Shape, moment: &Moment) -> Vec<u8> {
    let mut contents = ring.read(0, ring.bytes());
    let width = if shape.version == V1 { 8 } else { 4 };
    for (index, status) in (0..).zip(&moment.status) {
        let at = shape.status(index);
        contents[at..at + width].fill(0);
        contents[at..at + 4].copy_from_slice(&status.to_ne_bytes());
    }
    contents
}

/// Whether the place behind which the kernel stands is the program's: poll(2) tells.
fn is_readable(own: BorrowedFd<'_>) -> std::io::Result<bool> {
    Ok(ready::events(own, PollFlags::IN)?.contains(PollFlags::IN))
}

/// The first place behind those that the program has; nothing where there are several.
fn first_of_kernel(status: &[u32]) -> Option<u32> {
    let before = |index: usize| status[(index + status.len() - 1) % status.len()];
    let is_first = |index: &usize| status[*index] == KERNEL && before(*index) != KERNEL;
    let mut first = (0..status.len()).filter(is_first);
    let only = first.next().filter(|_| first.next().is_none());
    only.and_then(|index| u32::try_from(index).ok())
}

/// The place that was filled first, of a full ring of frames: the kernel goes on there. Nothing
/// where several were filled at the same time.
fn first_filled(ring: &PacketRing, shape: &Shape, status: &[u32]) -> Option<u32> {
    if shape.version == V3 || status.contains(&KERNEL) {
        return None;
    }
    let times = (0..shape.places()).map(|index| filled_at(ring, shape, index));
    let times = times.collect::<Vec<_>>();
    let before = |index: usize| times[(index + times.len() - 1) % times.len()];
    let mut first = (0..times.len()).filter(|index| before(*index) >= times[*index]);
    let only = first.next().filter(|_| first.next().is_none());
    only.and_then(|index| u32::try_from(index).ok())
}

/// The place behind the one that was filled last, where that is the kernel's again: it would be
/// told if it was the program's, so each is marked for a moment.
///
/// A packet that is to go into a marked frame is dropped, as where a ring is full. The kernel is
/// to fill none of those that are looked at before the last filled one, unless a program has
/// written into what the kernel tells of its frames.
fn behind_last_filled(
    ring: &PacketRing,
    shape: &Shape,
    own: BorrowedFd<'_>,
    status: &[u32],
) -> std::io::Result<Option<u32>> {
    let places = (0..).zip(status).filter(|(_, status)| **status == KERNEL);
    let mut places = places.map(|(index, _)| index).collect::<Vec<u32>>();
    places.sort_by_key(|index| std::cmp::Reverse((filled_at(ring, shape, *index), *index)));
    for index in places {
        let at = shape.status(index);
        if !ring.change_word(at, KERNEL, MARK) {
            return Ok(None);
        }
        let is_last = is_readable(own);
        // The kernel has filled it meanwhile where the mark is gone.
        let was_left = ring.change_word(at, MARK, KERNEL);
        if !was_left {
            return Ok(None);
        }
        if is_last? {
            return Ok(Some((index + 1) % shape.places()));
        }
    }
    Ok(None)
}

/// When the kernel filled a place: what is greater came later.
fn filled_at(ring: &PacketRing, shape: &Shape, index: u32) -> u64 {
    let (seconds, fraction) = match shape.version {
        V3 => return blocks::number(ring, shape, index),
        V1 => (20, 24),
        _ => (16, 20),
    };
    let word = |at: usize| u64::from(ring.word(shape.frame(index) + at));
    word(seconds) << 32 | word(fraction)
}
