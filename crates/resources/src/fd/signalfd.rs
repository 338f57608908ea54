//! Signals read from a descriptor: signalfd(2).
//!
//! - Kept: the mask.
//! - Refused: "its mask is not understood".
//! - CRIU 4.2: kept.

use std::os::fd::OwnedFd;

use prost::Message;
use rustix::fs::OFlags;

use super::{DumpContext, Kind, Open, RestoreContext, status, tags};
use crate::{Error, Result};

/// See the file.
pub struct Signalfd;

/// A signalfd; whose signals it reads depends on who reads.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// The signals: bit 0 is signal 1.
    #[prost(fixed64, tag = "1")]
    mask: u64,
    /// Access mode and status flags.
    #[prost(uint32, tag = "2")]
    flags: u32,
}

impl Kind for Signalfd {
    type Record = Record;
    const TAG: u16 = tags::SIGNALFD;
    const NAME: &'static str = "signalfd";

    fn claims(open: &Open<'_>) -> bool {
        open.link == b"anon_inode:[signalfd]"
    }

    fn dump(open: &Open<'_>, _cx: &mut dyn DumpContext) -> Result<Record> {
        let mask = open.info.field("sigmask");
        let mask = mask.and_then(|text| u64::from_str_radix(text, 16).ok());
        Ok(Record {
            mask: mask.ok_or_else(|| open.unsupported("its mask is not understood", None))?,
            flags: open.info.flags,
        })
    }

    fn check(record: &Record) -> Result<()> {
        status::check(Self::NAME, record.flags)
    }

    fn describe(record: &Record) -> String {
        format!("mask={:#x}", record.mask)
    }

    fn open(record: &Record, _cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let flags = status::opening(record.flags);
        let own = sys::signalfd::create(record.mask, flags.contains(OFlags::NONBLOCK))
            .map_err(|error| Error::kernel("make a signalfd", error))?;
        status::set_rest(&own, flags)?;
        Ok(own)
    }
}

#[cfg(test)]
mod tests {
    use super::super::testing::World;

    #[test]
    fn mask_and_flags_survive() {
        for (mask, nonblocking) in [(0, false), (0x8000_0000_0000_0203, true)] {
            let mut world = World::default();
            let at = world.add(sys::signalfd::create(mask, nonblocking).expect("signalfd"));
            // What fdinfo says is compared by the cycle: the mask, and whether reads wait.
            world.cycle();
            assert_eq!(world.describe(at), format!("signalfd mask={mask:#x}"));
        }
    }
}
