//! Signals read from a descriptor: signalfd(2).
//!
//! - Kept: the mask.
//! - Refused: "its mask is not understood".
//! - CRIU 4.2: kept.

use std::os::fd::OwnedFd;

use prost::Message;
use rustix::fs::OFlags;

use super::{DumpContext, Kind, Open, RestoreContext, decode, status, tags};
use crate::{Error, Result};

/// See the file.
pub struct Signalfd;

/// A signalfd; whose signals it reads depends on who reads.
#[derive(Clone, PartialEq, Message)]
struct Payload {
    /// The signals: bit 0 is signal 1.
    #[prost(fixed64, tag = "1")]
    mask: u64,
    /// Access mode and status flags.
    #[prost(uint32, tag = "2")]
    flags: u32,
}

impl Kind for Signalfd {
    fn tag(&self) -> u16 {
        tags::SIGNALFD
    }

    fn name(&self) -> &'static str {
        "signalfd"
    }

    fn claims(&self, open: &Open<'_>) -> bool {
        open.link == b"anon_inode:[signalfd]"
    }

    fn dump(&self, open: &Open<'_>, _cx: &mut dyn DumpContext) -> Result<Vec<u8>> {
        let mask = open.info.field("sigmask");
        let mask = mask.and_then(|text| u64::from_str_radix(text, 16).ok());
        let payload = Payload {
            mask: mask.ok_or_else(|| open.unsupported("its mask is not understood", None))?,
            flags: open.info.flags,
        };
        Ok(payload.encode_to_vec())
    }

    fn describe(&self, payload: &[u8]) -> Result<String> {
        let payload: Payload = decode(self, payload)?;
        Ok(format!("mask={:#x}", payload.mask))
    }

    fn open(&self, payload: &[u8], _cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let payload: Payload = decode(self, payload)?;
        let flags = status::checked(self.name(), payload.flags)?;
        let own = sys::signalfd::create(payload.mask, flags.contains(OFlags::NONBLOCK))
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
