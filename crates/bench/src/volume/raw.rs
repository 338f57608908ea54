//! The device itself: as fast as its blocks can be read and written.

use std::fs::OpenOptions;
use std::ops::Range;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::time::Instant;

use pages::workers;
use rustix::fs::OFlags;
use sys::queue::{Piece, Queue};

use super::kernel_error;
use crate::error::{Result, file_error};

/// Ranges of bytes in ascending order.
pub type Ranges = Vec<Range<u64>>;

/// How much is moved at a time, and how many reads are under way.
const PIECE_BYTES: u64 = 1 << 20;
const DEPTH: usize = 8;

/// Pieces of at most a megabyte.
fn pieces(used: &Ranges) -> Vec<Range<u64>> {
    let cut = |range: &Range<u64>| {
        let (start, end) = (range.start, range.end);
        let starts = (start..end).step_by(PIECE_BYTES as usize);
        starts.map(move |at| at..(at + PIECE_BYTES).min(end))
    };
    used.iter().flat_map(cut).collect()
}

/// Memory that starts on a page.
fn memory() -> (Vec<u8>, usize) {
    let memory = vec![0x5a; PIECE_BYTES as usize + 4096];
    let start = memory.as_ptr().addr().wrapping_neg() % 4096;
    (memory, start)
}

/// Reads ranges of a device in order, many at a time; gives how many seconds that took.
///
/// # Errors
/// When they cannot be read.
pub fn read(device: &Path, used: &Ranges) -> Result<f64> {
    let mut options = OpenOptions::new();
    options
        .read(true)
        .custom_flags(OFlags::DIRECT.bits().cast_signed());
    let file = options.open(device).map_err(file_error("open", device))?;
    let begun = Instant::now();
    let queue = Queue::new(file.into(), DEPTH);
    let mut queue = queue.map_err(kernel_error("make a queue of reads"))?;
    let mut slots = (0..DEPTH).map(|_| memory()).collect::<Vec<_>>();
    let mut free = (0..DEPTH).collect::<Vec<_>>();
    let finish = |queue: &mut Queue, slots: &mut Vec<(Vec<u8>, usize)>| {
        let done = queue.wait().map_err(kernel_error("wait for a read"))?;
        done.result.map_err(file_error("read", device))?;
        slots[done.number].0 = done.memory;
        Ok(done.number)
    };
    // Small pieces share a read, as in whatever reads blocks in use.
    let all = pieces(used);
    let mut next = 0;
    while next < all.len() {
        let slot = match free.pop() {
            Some(slot) => slot,
            None => finish(&mut queue, &mut slots)?,
        };
        let mut to = slots[slot].1;
        let end = to + PIECE_BYTES as usize;
        let mut batch = Vec::new();
        while let Some(range) = all.get(next) {
            let len = (range.end - range.start) as usize;
            if to + len > end {
                break;
            }
            batch.push(Piece {
                at_bytes: range.start,
                to: to..to + len,
            });
            (to, next) = (to + len, next + 1);
        }
        let memory = std::mem::take(&mut slots[slot].0);
        let started = queue.start(slot, memory, &batch);
        started.map_err(kernel_error("start a read"))?;
    }
    while !queue.is_empty() {
        finish(&mut queue, &mut slots)?;
    }
    Ok(begun.elapsed().as_secs_f64())
}

/// Writes ranges of a device in order, by a thread for each processor, and through to the disk;
/// gives how many seconds that took.
///
/// # Errors
/// When they cannot be written.
pub fn write(device: &Path, used: &Ranges) -> Result<f64> {
    let mut options = OpenOptions::new();
    options
        .write(true)
        .custom_flags(OFlags::DIRECT.bits().cast_signed());
    let file = options.open(device).map_err(file_error("open", device))?;
    let begun = Instant::now();
    let all = pieces(used);
    let total = all.len() as u64 * PIECE_BYTES;
    workers::work(
        workers::threads(total),
        all.len(),
        |_| memory(),
        |(memory, start), number| {
            let range = &all[number];
            let bytes = &memory[*start..*start + (range.end - range.start) as usize];
            let written = file.write_all_at(bytes, range.start);
            written.map_err(file_error("write to", device))
        },
    )?;
    file.sync_all().map_err(file_error("write to", device))?;
    Ok(begun.elapsed().as_secs_f64())
}
