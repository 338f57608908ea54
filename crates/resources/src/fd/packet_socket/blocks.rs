//! Rings of blocks (`TPACKET_V3`): where the kernel stands in them, and how it gets there.

use std::io;
use std::ops::Range;

use rustix::io::Errno;
use sys::packet_ring::PacketRing;

use super::feed::{Feed, LARGEST_BYTES, SMALL_BYTES};
use super::ring::{KERNEL, Moment, Shape, USER};

/// `TP_STATUS_BLK_TMO`: the block was handed over before it was full.
const TIMED_OUT: u32 = libc::TP_STATUS_BLK_TMO;
/// Where a block has what is known of it (`struct tpacket_block_desc`).
const STATUS: usize = 8;
const PACKETS: usize = 12;
const FIRST_PACKET: usize = 16;
const USED_BYTES: usize = 20;
const NUMBER: usize = 24;
const LAST_TIME: usize = 40;
const HEADER_BYTES: usize = 48;
/// Where a packet has what is known of it (`struct tpacket3_hdr`).
const NEXT_PACKET: usize = 0;
const PACKET_TIME: usize = 4;
const KEPT_BYTES: usize = 12;
const PACKET_STATUS: usize = 20;
/// Where its bytes begin.
const MAC: usize = 24;
const PACKET_BYTES: usize = 48;

/// A block in which the kernel is, of a copy of a ring.
struct Block<'a>(&'a mut [u8]);

impl Block<'_> {
    fn word(&self, at: usize) -> Option<u32> {
        let four = self.0.get(at..at.checked_add(4)?)?;
        Some(u32::from_ne_bytes(four.try_into().ok()?))
    }

    fn set(&mut self, at: usize, value: u32) {
        self.0[at..at + 4].copy_from_slice(&value.to_ne_bytes());
    }

    /// The places of its packets, as far as they make sense and have come whole.
    fn packets(&self) -> Option<Vec<usize>> {
        let count = self.word(PACKETS)? as usize;
        let mut at = self.word(FIRST_PACKET)? as usize;
        let mut packets = Vec::new();
        for index in 0..count {
            let inside = at >= HEADER_BYTES && at + PACKET_BYTES <= self.0.len();
            if !inside || !at.is_multiple_of(8) || packets.last().is_some_and(|last| *last >= at) {
                return None;
            }
            let is_whole = self.word(at + PACKET_STATUS)? & USER != 0;
            match index + 1 == count {
                // The last one is just being copied: as if there had been no room for it.
                true if !is_whole => {}
                _ => packets.push(at),
            }
            at = at.checked_add(self.word(at + NEXT_PACKET)? as usize)?;
        }
        Some(packets)
    }

    /// Hands it over, as the kernel does after a time.
    fn retire(&mut self, packets: &[usize]) -> Option<()> {
        let last = *packets.last()?;
        let half = |at: usize| Some(u16::from_ne_bytes(self.0.get(at..at + 2)?.try_into().ok()?));
        let own = usize::from(half(last + MAC)?) + self.word(last + KEPT_BYTES)? as usize;
        let used = last + own.next_multiple_of(8);
        let time = [0, 4].map(|at| self.word(last + PACKET_TIME + at));
        self.set(PACKETS, u32::try_from(packets.len()).ok()?);
        self.set(USED_BYTES, u32::try_from(used).ok()?);
        self.set(LAST_TIME, time[0]?);
        self.set(LAST_TIME + 4, time[1]?);
        self.set(last + NEXT_PACKET, 0);
        self.set(STATUS, USER | TIMED_OUT);
        Some(())
    }
}

/// The block that the kernel opened last, of a new ring.
fn active(ring: &PacketRing, shape: &Shape) -> u32 {
    let newest = (0..shape.blocks).max_by_key(|index| number(ring, shape, *index));
    newest.unwrap_or_default()
}

/// The number that the kernel gave a block when it opened it.
pub(super) fn number(ring: &PacketRing, shape: &Shape, index: u32) -> u64 {
    let at = start(shape, index) + NUMBER;
    (u64::from(ring.word(at + 4)) << 32) | u64::from(ring.word(at))
}

fn start(shape: &Shape, index: u32) -> usize {
    index as usize * shape.block_bytes as usize
}

/// Where a block has what is the program's own, in bytes.
pub(super) fn private(shape: &Shape) -> Range<usize> {
    HEADER_BYTES..HEADER_BYTES + (shape.private_bytes as usize).next_multiple_of(8)
}

/// Where it stands whose a block is.
pub(super) fn status(shape: &Shape, index: u32) -> usize {
    start(shape, index) + STATUS
}

/// The block with which the kernel is to go on, and the contents of the ring at a moment. What it
/// has begun is handed over, as it does itself after a time: so it goes on at the beginning of a
/// block. Nothing where the program has that block.
pub(super) fn contents(
    ring: &PacketRing,
    shape: &Shape,
    moment: &Moment,
) -> Option<(u32, Vec<u8>)> {
    let (now, status) = (moment.next, &moment.status);
    if status[now as usize] != KERNEL {
        return None;
    }
    // What is counted has come whole, or is seen not to have; what comes afterwards has not come.
    let counted = ring.word(start(shape, now) + PACKETS);
    let mut contents = ring.read(0, ring.bytes());
    let blocks = contents.chunks_exact_mut(shape.block_bytes as usize);
    let mut blocks = blocks.map(Block).collect::<Vec<_>>();
    for (block, status) in blocks.iter_mut().zip(status) {
        block.set(STATUS, *status);
    }
    let block = &mut blocks[now as usize];
    block.set(PACKETS, counted);
    let packets = block.packets()?;
    if packets.is_empty() {
        return Some((now, contents));
    }
    block.retire(&packets)?;
    let next = (now + 1) % shape.blocks;
    (status[next as usize] == KERNEL && next != now).then_some((next, contents))
}

/// Has the kernel stand in block `next`, without packets in it, and has no more packets come.
///
/// # Errors
/// `ETIMEDOUT` where packets do not come, the calls' errno.
pub(super) fn move_to(
    ring: &PacketRing,
    shape: &Shape,
    next: u32,
    feed: &Feed<'_>,
) -> io::Result<()> {
    /// As many times around as blocks may be handed over at the wrong moment.
    const ROUNDS: u64 = 8;
    /// A ring of that many packets is moved in good time.
    const IN_A_BLOCK: u64 = 10_000;
    let mut budget = ROUNDS * IN_A_BLOCK * u64::from(shape.blocks);
    let mut small = None;
    let at = start(shape, next);
    loop {
        let now = active(ring, shape);
        if now == next {
            feed.end()?;
            let used = ring.word(at + USED_BYTES);
            if ring.word(at + PACKETS) != 0 {
                // Those of no use are skipped: what comes next is the first.
                ring.set_word(at + FIRST_PACKET, used);
                ring.set_word(at + PACKETS, 0);
            }
            if active(ring, shape) == next && ring.word(at + STATUS) == KERNEL {
                return Ok(());
            }
            feed.again()?;
        }
        // Whatever was handed over is given back.
        for index in 0..shape.blocks {
            ring.set_word(start(shape, index) + STATUS, KERNEL);
        }
        budget = budget.checked_sub(1).ok_or(Errno::TIMEDOUT)?;
        let here = start(shape, now);
        let (count, used) = (ring.word(here + PACKETS), ring.word(here + USED_BYTES));
        let room = shape.block_bytes.saturating_sub(used);
        feed.send(packet_bytes(room, small), || {
            active(ring, shape) != now || ring.word(here + PACKETS) != count
        })?;
        let taken = ring.word(here + USED_BYTES).checked_sub(used);
        small = small.or(taken.filter(|bytes| active(ring, shape) == now && *bytes > 0));
    }
}

/// How long the next packet is, in bytes, where a block has so much `room` and a `small` packet
/// takes so much: as long as leaves no room for another one, so that one which is small begins
/// the next block.
fn packet_bytes(room: u32, small: Option<u32>) -> usize {
    const ALIGNED_BYTES: u32 = 8;
    let longest = small.and_then(|small| room.checked_sub(small + ALIGNED_BYTES));
    let longest = longest.map_or(SMALL_BYTES, |bytes| bytes as usize);
    longest.clamp(SMALL_BYTES, LARGEST_BYTES)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BLOCK_BYTES: usize = 4096;

    /// A block with two packets, of which the last has come whole or not.
    fn block(last_status: u32) -> Vec<u8> {
        let mut bytes = vec![0; BLOCK_BYTES];
        let mut block = Block(&mut bytes);
        block.set(PACKETS, 2);
        block.set(FIRST_PACKET, 48);
        for (at, status) in [(48, USER), (248, last_status)] {
            block.set(at + NEXT_PACKET, 200);
            block.set(at + PACKET_STATUS, status);
            block.set(at + PACKET_TIME, 7);
            block.set(at + KEPT_BYTES, 100);
            block.set(at + MAC, 95);
        }
        bytes
    }

    #[test]
    fn a_block_is_handed_over_with_what_has_come_whole() {
        for (status, packets, used) in [(USER, 2, 448), (0, 1, 248)] {
            let mut bytes = block(status);
            let mut block = Block(&mut bytes);
            let found = block.packets().expect("it makes sense");
            assert_eq!(found.len(), packets);
            block.retire(&found).expect("it has packets");
            let words = [STATUS, PACKETS, USED_BYTES, LAST_TIME].map(|at| block.word(at));
            assert_eq!(words, [33, packets as u32, used, 7].map(Some));
            assert_eq!(block.word(found[packets - 1]), Some(0));
        }
    }

    #[test]
    fn what_a_program_has_written_is_not_believed() {
        for (at, value) in [
            (FIRST_PACKET, 8),
            (FIRST_PACKET, 4090),
            (FIRST_PACKET, u32::MAX),
            (48 + NEXT_PACKET, 0),
            (48 + NEXT_PACKET, u32::MAX),
            (48 + NEXT_PACKET, 3),
            (PACKETS, u32::MAX),
        ] {
            let mut bytes = block(USER);
            let mut block = Block(&mut bytes);
            block.set(at, value);
            assert_eq!(block.packets(), None, "{at} {value}");
        }
    }
}
