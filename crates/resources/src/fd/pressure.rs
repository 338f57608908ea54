//! Triggers of pressure: what was written to a file of /proc/pressure, or to `memory.pressure` and
//! the like of a control group, has it tell of that pressure by poll(2).
//!
//! The kernel tells nobody what was written; it is looked up in its memory. A trigger begins its
//! window anew at the restore.
//!
//! - What: triggers of pressure
//! - Kept: threshold and window of each.
//! - Refused: "it has a trigger, of which nothing can be looked up: …" (without `CAP_BPF` and
//!   `CAP_PERFMON`, on kernels without BTF, under kernel_lockdown(7)); "its trigger has told of
//!   what nobody has heard yet: try again"; "its trigger is not understood"; "its peak since it was
//!   reset is its own" (`memory.peak` and `memory.swap.peak` of a control group, opened for
//!   writing).
//! - CRIU 4.2: forgotten without a word.

use std::os::fd::BorrowedFd;

use prost::Message;
use rustix::fs::OFlags;
use rustix::io::Errno;

use super::Open;
use crate::kernel::{Kernel, Structure};
use crate::{Error, Result};

/// The condition on which a trigger signals.
#[derive(Clone, Copy, PartialEq, Eq, Message)]
pub(super) struct Trigger {
    /// True if all tasks must wait at once ("full"), not some.
    #[prost(bool, tag = "1")]
    full: bool,
    /// For how long in each window, in microseconds.
    #[prost(uint64, tag = "2")]
    threshold_us: u64,
    /// The window in microseconds.
    #[prost(uint64, tag = "3")]
    window_us: u64,
}

/// `PROC_SUPER_MAGIC` and `CGROUP2_SUPER_MAGIC` of statfs(2).
const PROC: i64 = libc::PROC_SUPER_MAGIC;
const CGROUP2: i64 = 0x6367_7270;
const NS_PER_US: u64 = 1000;

/// Where a file of pressure is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Of {
    System,
    Group,
}

impl Trigger {
    /// The trigger of a description that can have one, if it has one.
    ///
    /// # Errors
    /// [`Error::Unsupported`].
    pub(super) fn of(open: &Open<'_>) -> Result<Option<Self>> {
        let reads = open.info.oflags() & OFlags::RWMODE == OFlags::RDONLY;
        if reads || open.fd < 0 && !open.in_flight {
            return Ok(None);
        }
        let name = &open.link[open
            .link
            .iter()
            .rposition(|byte| *byte == b'/')
            .unwrap_or(0)..];
        let (of, magic) = match name {
            _ if open.link.starts_with(b"/proc/pressure/") => (Of::System, PROC),
            b"/memory.peak" | b"/memory.swap.peak" if is_on(open, CGROUP2)? => {
                return Err(open.unsupported("its peak since it was reset is its own", None));
            }
            name if name.ends_with(b".pressure") => (Of::Group, CGROUP2),
            _ => return Ok(None),
        };
        if !is_on(open, magic)? || !has_one(open)? {
            return Ok(None);
        }
        look_up(open, of).map(Some)
    }

    /// Gives a description the trigger.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub(super) fn set(self, own: BorrowedFd<'_>, place: &str) -> Result<()> {
        let what = if self.full { "full" } else { "some" };
        let text = format!("{what} {} {}\0", self.threshold_us, self.window_us);
        let failed = |errno| Error::kernel(format!("set the trigger of {place}"), errno);
        let written = rustix::io::write(own, text.as_bytes()).map_err(failed)?;
        match written == text.len() {
            true => Ok(()),
            false => Err(failed(Errno::IO)),
        }
    }
}

/// True if the file is on a file system of this kind.
fn is_on(open: &Open<'_>, magic: i64) -> Result<bool> {
    let stat = rustix::fs::fstatfs(open.own()?);
    let stat = stat.map_err(|errno| Error::kernel(format!("statfs {}", open.place()), errno))?;
    Ok(stat.f_type == magic)
}

/// True if the description has a trigger. A description has one at the most: the kernel refuses a
/// second one with `EBUSY`, and an invalid one with another error. Nothing is changed.
fn has_one(open: &Open<'_>) -> Result<bool> {
    match rustix::io::write(open.own()?, b"?\0") {
        Err(Errno::BUSY) => Ok(true),
        Err(Errno::INVAL | Errno::OPNOTSUPP | Errno::NODEV) => Ok(false),
        Err(errno) => Err(Error::kernel(
            format!("ask {} for a trigger", open.place()),
            errno,
        )),
        Ok(_) => Err(open.unsupported("its trigger is not understood", None)),
    }
}

/// The trigger of a description, as the kernel's memory has it.
fn look_up(open: &Open<'_>, of: Of) -> Result<Trigger> {
    let own = open.own()?;
    let find = || {
        let kernel = Kernel::get().map_err(std::io::Error::other)?;
        let trigger = kernel.read("psi_trigger", address(kernel, own, of)?)?;
        let told = trigger.half("event")?;
        Ok((read(&trigger, &open.link)?, told != 0))
    };
    let (trigger, told) = find().map_err(|error: std::io::Error| {
        let why = format!("it has a trigger, of which nothing can be looked up: {error}");
        open.unsupported(&why, None)
    })?;
    if told {
        let why = "its trigger has told of what nobody has heard yet: try again";
        return Err(open.unsupported(why, None));
    }
    match trigger.window_us {
        0 => Err(open.unsupported("its trigger is not understood", None)),
        _ => Ok(trigger),
    }
}

/// Where the trigger of a description is.
fn address(kernel: &'static Kernel, own: BorrowedFd<'_>, of: Of) -> std::io::Result<u64> {
    let sequence = kernel.read("seq_file", kernel.private(kernel.file(own)?)?)?;
    let private = sequence.word("private")?;
    match of {
        Of::System => Ok(private),
        Of::Group => {
            let context = kernel.read("kernfs_open_file", private)?.word("priv")?;
            kernel.read("cgroup_file_ctx", context)?.word("psi.trigger")
        }
    }
}

fn read(trigger: &Structure<'_>, link: &[u8]) -> std::io::Result<Trigger> {
    // `PSI_IO_SOME`, `PSI_IO_FULL` and so on in turn; of interrupts there is the other one alone.
    let state = trigger.half("state")?;
    let of_interrupts = link.ends_with(b"/irq") || link.ends_with(b"/irq.pressure");
    Ok(Trigger {
        full: of_interrupts || state % 2 == 1,
        threshold_us: trigger.word("threshold")? / NS_PER_US,
        window_us: trigger.word("win.size")? / NS_PER_US,
    })
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::os::fd::{AsFd, OwnedFd};

    use rustix::event::PollFlags;

    use super::super::{ready, testing::World};
    use super::*;

    fn open(path: &str) -> Option<OwnedFd> {
        let file = OpenOptions::new().read(true).write(true).open(path).ok()?;
        Some(file.into())
    }

    /// True if poll(2) answers as it does where there is a trigger.
    fn is_set(own: &OwnedFd) -> bool {
        !ready::events(own.as_fd(), PollFlags::PRI)
            .expect("poll")
            .contains(PollFlags::ERR)
    }

    #[test]
    fn trigger_survives() {
        testkit::needs_root!();
        let groups = ["memory", "io"].map(|name| format!("/sys/fs/cgroup/{name}.pressure"));
        let unified = ["cpu"].map(|name| format!("/sys/fs/cgroup/unified/{name}.pressure"));
        let system = ["memory", "io", "cpu"].map(|name| format!("/proc/pressure/{name}"));
        let wanted = Trigger {
            full: false,
            threshold_us: 1_900_000,
            window_us: 2_000_000,
        };
        let mut tried = 0;
        for path in system.iter().chain(&groups).chain(&unified) {
            for trigger in [
                wanted,
                Trigger {
                    full: true,
                    ..wanted
                },
            ] {
                let Some(own) = open(path) else { continue };
                if trigger.set(own.as_fd(), path).is_err() || Kernel::get().is_err() {
                    continue;
                }
                tried += 1;
                let mut world = World::default();
                let at = world.add(own);
                world.cycle();
                assert!(is_set(world.get(at)), "{path}");
                // A dump of the restored trigger gives the same record.
                let before = world.description(at).encode();
                world.dump().expect("dump");
                let after = world.description(at).encode();
                assert_eq!(before, after, "{path}");
                let payload: [u8; 2] = [0x08, 0x01];
                let is_full = after.windows(2).any(|two| two == payload);
                assert!(is_full || !trigger.full, "{path}");
            }
        }
        if tried == 0 {
            testkit::skip!("no pressure is measured here, or the kernel cannot be looked into");
        }
    }

    #[test]
    fn file_of_pressure_without_a_trigger_has_none_afterwards() {
        let Some(own) = open("/proc/pressure/memory") else {
            testkit::skip!("no pressure is measured here");
        };
        let mut world = World::default();
        let (at, _) = (
            world.add(own),
            world.add(File::open("/proc/pressure/io").expect("open")),
        );
        world.cycle();
        assert!(!is_set(world.get(at)));
    }
}
