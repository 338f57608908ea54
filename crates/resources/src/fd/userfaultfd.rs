//! Descriptors by which a program answers faults of a process's memory: userfaultfd(2).
//!
//! One can only be made by the process whose memory it is about, when that exists; who else has it
//! gets it from there. Which memory is registered with it, and which pages are missing or
//! protected, is told by [`crate::map::registered`]. Faults that nobody has resolved come again: a
//! thread that waits for a page faults anew when it goes on, as after any signal.
//!
//! - Kept: whose memory it is about, features, `O_NONBLOCK`, `UFFD_USER_MODE_ONLY`, wherever it
//!   went: closed by who made it, passed on, inherited, made by a fork (`UFFD_FEATURE_EVENT_FORK`).
//!   Needs bpf(2) and the kernel's description of its types.
//! - Refused: "it is about memory of no process of the tree"; "…: events wait to be read"; "its
//!   flags … are not understood"; "its state cannot be looked up in the kernel (…)"; one that is on
//!   its way in a socket.
//! - CRIU 4.2: refused.

use std::os::fd::OwnedFd;

use prost::Message;
use rustix::fs::OFlags;
use sys::process::Process;
use syscalls::Sysno;

use super::{DumpContext, Kind, Open, RestoreContext, late, tags};
use crate::kernel::Kernel;
use crate::script::Script;
use crate::{Error, Result};

/// What the kernel calls one.
pub const LINK: &[u8] = b"anon_inode:[userfaultfd]";

/// See the file.
pub struct Userfaultfd;

/// A userfaultfd.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// The process whose memory it is about.
    #[prost(int32, tag = "1")]
    pub pid: i32,
    /// `O_NONBLOCK`, if it is set.
    #[prost(uint32, tag = "2")]
    flags: u32,
    /// Whether it is not told of faults of the kernel's.
    #[prost(bool, tag = "3")]
    user_mode_only: bool,
    /// The features that were asked for when its conversation was opened; none where that was not
    /// done yet.
    #[prost(uint64, optional, tag = "4")]
    pub features: Option<u64>,
}

const KNOWN: OFlags = OFlags::NONBLOCK;
/// `UFFD_USER_MODE_ONLY`.
const USER_MODE_ONLY: u32 = linux_raw_sys::general::UFFD_USER_MODE_ONLY;
/// How the kernel notes that the conversation was opened.
const INITIALIZED: u32 = 1 << 31;

/// One as the kernel has it.
struct Looked {
    /// The kernel's address of the memory that it is about.
    memory: u64,
    user_mode_only: bool,
    features: Option<u64>,
    /// Whether somebody waits until an event is read that is no fault.
    has_events: bool,
}

/// The one of `processes` whose memory `open` is about.
///
/// # Errors
/// [`Error::Unsupported`] where there is none; [`Error::Kernel`].
pub fn process_of<'a>(open: &Open<'_>, processes: &'a [Process]) -> Result<&'a Process> {
    let looked = look(open)?;
    process_with(open, &looked, processes)
}

fn process_with<'a>(
    open: &Open<'_>,
    looked: &Looked,
    processes: &'a [Process],
) -> Result<&'a Process> {
    for process in processes {
        // One that has ended since has none.
        if memory_of(process).is_ok_and(|memory| memory == looked.memory) {
            return Ok(process);
        }
    }
    Err(open.unsupported("it is about memory of no process of the tree", None))
}

/// The kernel's address of a process's memory.
fn memory_of(process: &Process) -> std::io::Result<u64> {
    let kernel = Kernel::get().map_err(std::io::Error::other)?;
    kernel.memory_of(process)
}

fn look(open: &Open<'_>) -> Result<Looked> {
    let unclear = |why: &str| {
        let why = format!("its state cannot be looked up in the kernel ({why})");
        open.unsupported(&why, None)
    };
    let kernel = Kernel::get().map_err(unclear)?;
    let own = open.own()?;
    let looked = || -> std::io::Result<Looked> {
        let context = kernel.private(kernel.file(own)?)?;
        let context = kernel.read("userfaultfd_ctx", context)?;
        let features = context.half("features")?;
        let is_open = features & INITIALIZED != 0;
        Ok(Looked {
            memory: context.word("mm")?,
            user_mode_only: context.half("flags")? & USER_MODE_ONLY != 0,
            features: is_open.then(|| u64::from(features & !INITIALIZED)),
            has_events: !context.is_empty_list("event_wqh.head")?,
        })
    };
    looked().map_err(|error| match error.kind() {
        std::io::ErrorKind::Unsupported => unclear(&error.to_string()),
        _ => Error::kernel(format!("look {} up in the kernel", open.place()), error),
    })
}

impl Kind for Userfaultfd {
    type Record = Record;
    const TAG: u16 = tags::USERFAULTFD;
    const NAME: &'static str = "userfaultfd";
    const LINK: Option<&'static [u8]> = Some(LINK);
    const LOOKED_UP: bool = true;
    const STAYS: bool = true;

    fn claims(open: &Open<'_>) -> bool {
        open.link == LINK
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Record> {
        late::check(open)?;
        let flags = open.info.flags & !OFlags::RDWR.bits();
        if flags & !KNOWN.bits() != 0 {
            let why = format!("its flags {flags:#o} are not understood");
            return Err(open.unsupported(&why, None));
        }
        let looked = look(open)?;
        let pid = process_with(open, &looked, &cx.processes())?.pid();
        if looked.has_events {
            return Err(Error::Passing {
                pid: open.process.pid(),
                what: format!("{}: events wait to be read", open.place()),
                allow: None,
                early: true,
                by_tree: true,
            });
        }
        let Looked {
            user_mode_only,
            features,
            ..
        } = looked;
        Ok(Record {
            pid,
            flags,
            user_mode_only,
            features,
        })
    }

    fn check(record: &Record) -> Result<()> {
        let features = record.features.unwrap_or(0);
        if record.pid <= 0
            || record.flags & !KNOWN.bits() != 0
            || features >= u64::from(INITIALIZED)
        {
            return Err(Error::corrupt(Self::NAME, format!("{record:?}")));
        }
        Ok(())
    }

    fn describe(record: &Record) -> String {
        let mut line = format!("of={} flags={:#o}", record.pid, record.flags);
        if record.user_mode_only {
            line += " user-mode-only";
        }
        match record.features {
            Some(features) => format!("{line} features={features:#x}"),
            None => line,
        }
    }

    fn open(_record: &Record, _cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        late::placeholder()
    }

    fn task(record: &Record) -> Option<i32> {
        Some(record.pid)
    }

    fn is_late(_record: &Record) -> bool {
        true
    }

    fn open_in_task(record: &Record, number: i32, _needed: Option<i32>, script: &mut Script) {
        let only = if record.user_mode_only {
            USER_MODE_ONLY
        } else {
            0
        };
        script.expect(Sysno::userfaultfd, [(record.flags | only).into()], number);
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;
    use sys::uffd::{Features, Uffd};

    use super::super::testing::World;
    use super::*;

    fn uffd() -> Option<Uffd> {
        match Uffd::create() {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::PERM) => None,
            made => Some(made.expect("a userfaultfd")),
        }
    }

    #[test]
    fn what_it_was_asked_for_is_told() {
        testkit::needs_root!();
        testkit::needs_kernel_memory!();
        let Some(uffd) = uffd() else {
            testkit::skip!("no userfaultfd");
        };
        let mut world = World::default();
        let wanted = Features::MISSING_SHMEM | Features::THREAD_ID;
        uffd.api(wanted).expect("the kernel has them");
        let at = world.add(uffd);
        world.dump().expect("it is looked up");
        let (pid, bits) = (std::process::id(), wanted.bits());
        let want = format!("userfaultfd of={pid} flags=0o4000 features={bits:#x}");
        assert_eq!(world.describe(at), want);
    }

    #[test]
    fn what_none_has_is_corrupt() {
        let sound = Record {
            pid: 7,
            flags: OFlags::NONBLOCK.bits(),
            user_mode_only: true,
            features: Some(0),
        };
        Userfaultfd::check(&sound).expect("it is sound");
        let changes: [fn(&mut Record); 3] = [
            |record| record.pid = 0,
            |record| record.flags = 1,
            |record| record.features = Some(1 << 31),
        ];
        for change in changes {
            let mut record = sound.clone();
            change(&mut record);
            let error = Userfaultfd::check(&record).expect_err("wrong");
            assert!(matches!(error, Error::Corrupt { .. }), "{error}");
        }
    }

    #[test]
    fn it_is_made_by_its_process_with_its_flags() {
        let record = Record {
            pid: 7,
            flags: OFlags::NONBLOCK.bits(),
            user_mode_only: true,
            features: None,
        };
        let mut script = Script::default();
        Userfaultfd::open_in_task(&record, 5, None, &mut script);
        let text = script.to_string();
        assert!(text.contains("userfaultfd("), "{text}");
        assert_eq!(Userfaultfd::task(&record), Some(7));
    }
}
