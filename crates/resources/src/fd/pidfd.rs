//! Processes and threads as files: pidfd_open(2).
//!
//! One of a task of the tree can only be opened when that exists.
//!
//! - Kept: processes and threads of the tree, and those that ended and were waited for.
//! - Refused: "process … is not in the tree"; "its process is in another pid namespace"; "its flags
//!   … are not understood"; "it tells no process".
//! - CRIU 4.2: processes of the tree and ended ones; refuses those of threads (`PIDFD_THREAD`) and
//!   of processes outside.

use std::os::fd::OwnedFd;

use prost::Message;
use rustix::fs::OFlags;
use syscalls::Sysno;

use super::{DumpContext, Kind, Open, RestoreContext, decode, late, status, tags};
use crate::script::Script;
use crate::{Error, Result};

/// See the file.
pub struct Pidfd;

/// A pidfd.
#[derive(Clone, PartialEq, Message)]
struct Payload {
    /// The process, or the thread where the flags say so; 0 for one that is gone.
    #[prost(int32, tag = "1")]
    pid: i32,
    /// `O_NONBLOCK`, and `O_EXCL` for a thread (`PIDFD_THREAD`).
    #[prost(uint32, tag = "2")]
    flags: u32,
}

/// The access mode of every pidfd.
const MODE: u32 = OFlags::RDWR.bits();
const KNOWN: OFlags = OFlags::NONBLOCK.union(OFlags::EXCL);

impl Payload {
    fn read(payload: &[u8]) -> Result<Self> {
        let read: Self = decode(&Pidfd, payload)?;
        if read.pid < 0 || read.flags & !KNOWN.bits() != 0 {
            return Err(Error::corrupt(Pidfd.name(), format!("{read:?}")));
        }
        Ok(read)
    }
}

impl Kind for Pidfd {
    fn tag(&self) -> u16 {
        tags::PIDFD
    }

    fn name(&self) -> &'static str {
        "pidfd"
    }

    fn claims(&self, open: &Open<'_>) -> bool {
        open.link == b"anon_inode:[pidfd]" || open.link.starts_with(b"pidfd:[")
    }

    fn dump(&self, open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Vec<u8>> {
        let pid = open.info.field("Pid").and_then(|pid| pid.parse().ok());
        let pid: i32 = pid.ok_or_else(|| open.unsupported("it tells no process", None))?;
        let flags = open.info.flags & !MODE;
        if flags & !KNOWN.bits() != 0 {
            let why = format!("its flags {flags:#o} are not understood");
            return Err(open.unsupported(&why, None));
        }
        match pid {
            // Who that was is not told any more.
            -1 => return Ok(Payload { pid: 0, flags }.encode_to_vec()),
            0 => return Err(open.unsupported("its process is in another pid namespace", None)),
            _ if cx.task(pid).is_none() => {
                let why = format!("process {pid} is not in the tree");
                return Err(open.unsupported(&why, None));
            }
            _ => late::check(open)?,
        }
        Ok(Payload { pid, flags }.encode_to_vec())
    }

    fn describe(&self, payload: &[u8]) -> Result<String> {
        let Payload { pid, flags } = Payload::read(payload)?;
        let of = match pid {
            0 => "nobody".to_owned(),
            pid => pid.to_string(),
        };
        Ok(format!("of={of} flags={flags:#o}"))
    }

    fn open(&self, payload: &[u8], _cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let payload = Payload::read(payload)?;
        if payload.pid != 0 {
            return late::placeholder();
        }
        let own = sys::fork::pidfd_of_nobody()
            .map_err(|error| Error::kernel("make a pidfd of nobody", error))?;
        status::set(&own, OFlags::from_bits_retain(payload.flags))?;
        Ok(own)
    }

    fn is_late(&self, payload: &[u8]) -> Result<bool> {
        Ok(Payload::read(payload)?.pid != 0)
    }

    fn open_in_task(
        &self,
        payload: &[u8],
        number: i32,
        _needed: Option<i32>,
        script: &mut Script,
    ) -> Result<()> {
        let Payload { pid, flags } = Payload::read(payload)?;
        script.expect(Sysno::pidfd_open, [pid.into(), flags.into()], number);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use rustix::process::{Pid, PidfdFlags, pidfd_open};

    use super::super::testing::World;
    use super::*;

    #[test]
    fn one_of_nobody_survives() {
        let mut world = World::default();
        let at = world.add(sys::fork::pidfd_of_nobody().expect("a pidfd"));
        world.cycle();
        assert_eq!(world.describe(at), "pidfd of=nobody flags=0o0");
    }

    #[test]
    fn one_of_a_task_outside_is_refused_by_name() {
        let mut world = World::default();
        let init = Pid::from_raw(1).expect("a pid");
        world.add(pidfd_open(init, PidfdFlags::empty()).expect("a pidfd"));
        let error = world.dump().expect_err("it is not in the tree").to_string();
        assert!(error.contains("process 1 is not in the tree"), "{error}");
    }

    #[test]
    fn flags_that_no_pidfd_has_are_corrupt() {
        for payload in [Payload { pid: -1, flags: 0 }, Payload { pid: 7, flags: 1 }] {
            let error = Pidfd.is_late(&payload.encode_to_vec()).expect_err("wrong");
            assert!(matches!(error, Error::Corrupt { .. }), "{error}");
        }
    }
}
