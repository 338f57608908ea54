//! Event counters: eventfd(2).

use std::os::fd::OwnedFd;

use prost::Message;
use rustix::event::EventfdFlags;
use rustix::fs::OFlags;

use super::{DumpContext, Kind, Open, RestoreContext, decode, status, tags};
use crate::{Error, Result};

/// See the file.
pub struct Eventfd;

/// An event counter.
#[derive(Clone, PartialEq, Message)]
struct Payload {
    /// What a read would take.
    #[prost(uint64, tag = "1")]
    count: u64,
    /// Whether a read takes only 1.
    #[prost(bool, tag = "2")]
    semaphore: bool,
    /// Access mode and status flags.
    #[prost(uint32, tag = "3")]
    flags: u32,
}

impl Kind for Eventfd {
    fn tag(&self) -> u16 {
        tags::EVENTFD
    }

    fn name(&self) -> &'static str {
        "eventfd"
    }

    fn claims(&self, open: &Open<'_>) -> bool {
        open.link == b"anon_inode:[eventfd]"
    }

    fn dump(&self, open: &Open<'_>, _cx: &mut dyn DumpContext) -> Result<Vec<u8>> {
        let count = open.info.field("eventfd-count");
        let count = count.and_then(|text| u64::from_str_radix(text, 16).ok());
        let count = count.ok_or_else(|| open.unsupported("unknown count", None))?;
        let semaphore = match open.info.field("eventfd-semaphore") {
            Some("0") => false,
            Some("1") => true,
            _ => {
                let why = "this kernel does not tell whether it is a semaphore";
                return Err(open.unsupported(why, None));
            }
        };
        let payload = Payload {
            count,
            semaphore,
            flags: open.info.flags,
        };
        Ok(payload.encode_to_vec())
    }

    fn describe(&self, payload: &[u8]) -> Result<String> {
        let payload: Payload = decode(self, payload)?;
        let semaphore = if payload.semaphore { " semaphore" } else { "" };
        Ok(format!("count={}{semaphore}", payload.count))
    }

    fn open(&self, payload: &[u8], _cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let payload: Payload = decode(self, payload)?;
        let flags = status::checked(self.name(), payload.flags)?;
        let mut how = EventfdFlags::CLOEXEC;
        how.set(EventfdFlags::SEMAPHORE, payload.semaphore);
        // Whatever else the description had, writing the count must not wait.
        how |= EventfdFlags::NONBLOCK;
        let kernel = |error| Error::kernel("make an eventfd", error);
        let initial = u32::try_from(payload.count).unwrap_or(u32::MAX);
        let own = rustix::event::eventfd(initial, how).map_err(kernel)?;
        let rest = payload.count - u64::from(initial);
        if rest > 0 {
            rustix::io::write(&own, &rest.to_ne_bytes()).map_err(kernel)?;
        }
        if !flags.contains(OFlags::NONBLOCK) {
            status::set(&own, flags)?;
        }
        Ok(own)
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;

    use super::super::testing::World;
    use super::*;

    fn read(own: &OwnedFd) -> rustix::io::Result<u64> {
        let mut bytes = [0; 8];
        rustix::io::read(own, &mut bytes)?;
        Ok(u64::from_ne_bytes(bytes))
    }

    #[test]
    fn counter_survives() {
        for count in [0, 7, u64::from(u32::MAX), 1 << 40, u64::MAX - 1] {
            let own = rustix::event::eventfd(0, EventfdFlags::NONBLOCK).expect("eventfd");
            rustix::io::write(&own, &count.to_ne_bytes()).expect("write");
            let mut world = World::default();
            let at = world.add(own);
            world.cycle();
            assert_eq!(world.describe(at), format!("eventfd count={count}"));
            let own = world.take(at);
            let expected = if count == 0 {
                Err(Errno::AGAIN)
            } else {
                Ok(count)
            };
            assert_eq!(read(&own), expected);
        }
    }

    #[test]
    fn semaphore_stays_one() {
        let flags = EventfdFlags::SEMAPHORE;
        let own = rustix::event::eventfd(2, flags).expect("eventfd");
        let mut world = World::default();
        let at = world.add(own);
        world.cycle();
        let own = world.take(at);
        assert_eq!([read(&own), read(&own)], [Ok(1), Ok(1)]);
        let flags = rustix::fs::fcntl_getfl(&own).expect("flags");
        assert!(!flags.contains(OFlags::NONBLOCK));
    }

    #[test]
    fn nonsense_is_refused() {
        let error = Eventfd.describe(&[0xff]).expect_err("no message");
        assert!(error.to_string().starts_with("image record eventfd"));
    }
}
