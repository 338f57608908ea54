//! Data in flight in pipes: read without taking it out, and written again.
//!
//! - What: data in pipes
//! - Kept: what pipes and FIFOs hold, read without taking it out.
//! - Refused: "only … of … bytes could be read" (somebody outside of the tree reads it as well).
//! - At a restore: "…, which has somebody else's data, is in use" (a FIFO).
//! - CRIU 4.2: kept; what somebody outside takes meanwhile is not known.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags};

use super::{DumpContext, Open, status};
use crate::{Error, Result};

/// The capacity of a new pipe in bytes.
pub(super) const DEFAULT_BYTES: u32 = 65_536;
/// The size of a packet in bytes, at the most (`PIPE_BUF`).
const PACKET_MAX_BYTES: usize = 4096;

/// What is inside a pipe or FIFO.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Queue {
    /// Its capacity in bytes.
    #[prost(uint32, tag = "1")]
    pub(super) capacity_bytes: u32,
    /// Whether the last of what will be read ends with a packet (`O_DIRECT`), as all before it do:
    /// who reads less of it loses the rest.
    #[prost(bool, tag = "2")]
    pub(super) packets: bool,
    /// What will be read at once, in order.
    #[prost(bytes = "vec", repeated, tag = "3")]
    pub(super) chunks: Vec<Vec<u8>>,
}

impl Queue {
    /// Describes the pipe behind `open`.
    pub(super) fn dump(open: &Open<'_>, cx: &dyn DumpContext) -> Result<Self> {
        let inode = (open.stat.st_dev, open.stat.st_ino);
        let all = cx.all().iter().chain([open]);
        let ends = all.filter(|other| (other.stat.st_dev, other.stat.st_ino) == inode);
        let kernel = |error: Errno| Error::kernel(format!("look into {}", open.place()), error);
        let own = open.own()?;
        let capacity = rustix::pipe::fcntl_getpipe_size(own).map_err(kernel)?;
        let mut queue = Self {
            capacity_bytes: u32::try_from(capacity).expect("the kernel allows 2 GiB"),
            packets: false,
            chunks: Vec::new(),
        };
        let pending_bytes = rustix::io::ioctl_fionread(own).map_err(kernel)?;
        if pending_bytes == 0 {
            return Ok(queue);
        }
        let readable = |end: &&Open<'_>| {
            let mode = end.info.oflags() & OFlags::RWMODE;
            mode == OFlags::RDONLY || mode == OFlags::RDWR
        };
        (queue.chunks, queue.packets) = match ends.clone().find(readable) {
            Some(end) => peek(end.own()?, capacity),
            None => {
                let flags = OFlags::RDONLY | OFlags::NONBLOCK;
                peek(status::reopen(own, flags)?.as_fd(), capacity)
            }
        }
        .map_err(kernel)?;
        let found_bytes: usize = queue.chunks.iter().map(Vec::len).sum();
        if found_bytes as u64 == pending_bytes {
            Ok(queue)
        } else {
            let why = format!("only {found_bytes} of {pending_bytes} bytes could be read");
            Err(open.unsupported(&why, None))
        }
    }

    /// Gives the pipe of the write end `to` the capacity and writes the data. Leaves other status
    /// flags on `to` than it had.
    pub(super) fn restore(&self, to: BorrowedFd<'_>, place: &str) -> Result<()> {
        if self.capacity_bytes != DEFAULT_BYTES {
            self.resize(to, place)?;
        }
        if self.chunks.is_empty() {
            return Ok(());
        }
        let last = self.chunks.len() - 1;
        for (number, chunk) in self.chunks.iter().enumerate() {
            let is_packet = number < last || self.packets;
            // A packet is a page at most. What is read with it are whole pages before it: what does
            // not fill one would take it in.
            let loose = match is_packet {
                true => chunk.len().saturating_sub(1) / PACKET_MAX_BYTES * PACKET_MAX_BYTES,
                false => chunk.len(),
            };
            let (loose, packet) = chunk.split_at(loose);
            write_as(to, loose, OFlags::NONBLOCK, place)?;
            write_as(to, packet, OFlags::NONBLOCK | OFlags::DIRECT, place)?;
        }
        Ok(())
    }

    /// As [`Self::restore`], of a FIFO that somebody else may have open: if that has kept what was
    /// in it, it is there already. `both` reads and writes.
    pub(super) fn restore_unless_kept(&self, both: BorrowedFd<'_>, place: &str) -> Result<()> {
        let kernel = |error: Errno| Error::kernel(format!("look into {place}"), error);
        if rustix::io::ioctl_fionread(both).map_err(kernel)? == 0 {
            return self.restore(both, place);
        }
        let capacity = rustix::pipe::fcntl_getpipe_size(both).map_err(kernel)?;
        let (kept, _) = peek(both, capacity).map_err(kernel)?;
        if kept == self.chunks {
            return Ok(());
        }
        let what = format!("{place}, which has somebody else's data, is in use");
        Err(Error::InUse { what })
    }

    fn resize(&self, to: BorrowedFd<'_>, place: &str) -> Result<()> {
        let mut bytes = self.capacity_bytes as usize;
        let mut result = rustix::pipe::fcntl_setpipe_size(to, bytes);
        if result == Err(Errno::PERM) {
            // Larger than this host lets us have: as large as it does, if the data fits.
            let limit = sys::procfs::read_text("sys/fs/pipe-max-size");
            let limit = limit.ok().and_then(|text| text.trim().parse().ok());
            log::warn!("{place}: capacity {bytes} is above fs.pipe-max-size ({limit:?})");
            bytes = limit.unwrap_or(DEFAULT_BYTES as usize).min(bytes);
            result = rustix::pipe::fcntl_setpipe_size(to, bytes);
        }
        result.map(drop).map_err(|error| {
            Error::kernel(
                format!("set the capacity of {place} to {bytes} bytes"),
                error,
            )
        })
    }

    /// "capacity=65536 data=12", for people.
    pub(super) fn describe(&self) -> String {
        let bytes: usize = self.chunks.iter().map(Vec::len).sum();
        format!("capacity={} data={bytes}", self.capacity_bytes)
    }
}

/// Writes all of `rest` to a pipe with these status flags.
fn write_as(to: BorrowedFd<'_>, mut rest: &[u8], flags: OFlags, place: &str) -> Result<()> {
    if rest.is_empty() {
        return Ok(());
    }
    status::set(to, flags)?;
    while !rest.is_empty() {
        let written = rustix::io::write(to, rest).map_err(|error| {
            Error::kernel(format!("write the data in flight to {place}"), error)
        })?;
        rest = &rest[written..];
    }
    Ok(())
}

/// What could be read from `end` at once each time, and whether the last of it ends with a packet:
/// that stays one also where nobody who writes packets is left.
fn peek(end: BorrowedFd<'_>, capacity: usize) -> rustix::io::Result<(Vec<Vec<u8>>, bool)> {
    let mut buffer = vec![0; capacity.max(DEFAULT_BYTES as usize)];
    let mut chunks = Vec::new();
    let reader = copy(end, capacity)?;
    loop {
        let len = rustix::io::read(&reader, &mut buffer[..])?;
        if len == 0 {
            break;
        }
        chunks.push(buffer[..len].to_vec());
    }
    let Some((last, others)) = chunks.split_last() else {
        return Ok((chunks, false));
    };
    // Of a packet, what is not read at once is gone.
    let reader = copy(end, capacity)?;
    for chunk in others {
        rustix::io::read(&reader, &mut buffer[..chunk.len()])?;
    }
    let most = last.len() - 1;
    let is_packet = most > 0
        && rustix::io::read(&reader, &mut buffer[..most])? == most
        && rustix::io::read(&reader, &mut buffer[..])? == 0;
    Ok((chunks, is_packet))
}

/// The reading end of a copy of a pipe with what is in it.
fn copy(end: BorrowedFd<'_>, capacity: usize) -> rustix::io::Result<OwnedFd> {
    let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    // As many slots as the original, each of which may hold a single byte. Where that is not
    // allowed, the caller sees that something is missing.
    if capacity > DEFAULT_BYTES as usize {
        let _ = rustix::pipe::fcntl_setpipe_size(&writer, capacity);
    }
    let bytes = capacity.max(DEFAULT_BYTES as usize);
    rustix::pipe::tee(end, &writer, bytes, SpliceFlags::NONBLOCK)?;
    Ok(reader)
}
