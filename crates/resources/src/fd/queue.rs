//! Data in flight in pipes: read without taking it out, and written again.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, SpliceFlags};

use super::{DumpContext, Open, status};
use crate::{Error, Result};

/// The capacity of a new pipe in bytes.
pub(super) const DEFAULT_BYTES: u32 = 65_536;

/// What is inside a pipe or FIFO.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Queue {
    /// Its capacity in bytes.
    #[prost(uint32, tag = "1")]
    pub(super) capacity_bytes: u32,
    /// Whether what was written at once is read at once (`O_DIRECT`).
    #[prost(bool, tag = "2")]
    pub(super) packets: bool,
    /// The bytes, or packets, in the order in which they will be read.
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
            packets: ends
                .clone()
                .any(|end| end.info.oflags().contains(OFlags::DIRECT)),
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
        queue.chunks = match ends.clone().find(readable) {
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
        let packets = if self.packets {
            OFlags::DIRECT
        } else {
            OFlags::empty()
        };
        status::set(to, OFlags::NONBLOCK | packets)?;
        for chunk in &self.chunks {
            let mut rest = chunk.as_slice();
            while !rest.is_empty() {
                let written = rustix::io::write(to, rest).map_err(|error| {
                    Error::kernel(format!("write the data in flight to {place}"), error)
                })?;
                rest = &rest[written..];
            }
        }
        Ok(())
    }

    fn resize(&self, to: BorrowedFd<'_>, place: &str) -> Result<()> {
        let mut bytes = self.capacity_bytes as usize;
        let mut result = rustix::pipe::fcntl_setpipe_size(to, bytes);
        if result == Err(Errno::PERM) {
            // Larger than this host lets us have: as large as it does, if the data fits.
            let limit = std::fs::read_to_string("/proc/sys/fs/pipe-max-size");
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

/// What could be read from `end`, by a copy of the pipe.
fn peek(end: BorrowedFd<'_>, capacity: usize) -> rustix::io::Result<Vec<Vec<u8>>> {
    let (reader, writer): (OwnedFd, OwnedFd) =
        rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
    // As many slots as the original, each of which may hold a single byte. Where that is not
    // allowed, the caller sees that something is missing.
    if capacity > DEFAULT_BYTES as usize {
        let _ = rustix::pipe::fcntl_setpipe_size(&writer, capacity);
    }
    let flags = SpliceFlags::NONBLOCK;
    rustix::pipe::tee(end, &writer, capacity.max(1 << 16), flags)?;
    drop(writer);
    let mut chunks = Vec::new();
    let mut buffer = vec![0; capacity.max(1 << 16)];
    loop {
        let len = rustix::io::read(&reader, &mut buffer[..])?;
        if len == 0 {
            return Ok(chunks);
        }
        chunks.push(buffer[..len].to_vec());
    }
}
