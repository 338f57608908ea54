//! Event counters: eventfd(2).
//!
//! - Kept: the count, and whether it is a semaphore.
//! - Refused: "this kernel does not tell whether it is a semaphore" (before 6.5, where it is only
//!   in flight and no task can be asked); "its count is not understood".
//! - CRIU 4.2: the count up to 32 bits; a semaphore comes back as a plain counter.

use std::os::fd::OwnedFd;

use prost::Message;
use rustix::event::EventfdFlags;
use rustix::fs::OFlags;
use syscalls::Sysno;

use super::table::Row;
use super::{DumpContext, Info, Kind, Open, RestoreContext, status, tags};
use crate::script::{Answers, Arg, DataAt, Script};
use crate::{Error, Result};

const LINK: &[u8] = b"anon_inode:[eventfd]";
const F_SETFL: u32 = linux_raw_sys::general::F_SETFL;
/// The line of fdinfo that tells whether it is a semaphore, since Linux 6.5.
const SEMAPHORE: &str = "eventfd-semaphore";

/// See the file.
pub struct Eventfd;

/// An event counter.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
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
    type Record = Record;
    const TAG: u16 = tags::EVENTFD;
    const NAME: &'static str = "eventfd";

    fn claims(open: &Open<'_>) -> bool {
        open.link == LINK
    }

    fn dump(open: &Open<'_>, _cx: &mut dyn DumpContext) -> Result<Record> {
        let count = count_of(&open.info);
        let count = count.ok_or_else(|| open.unsupported("its count is not understood", None))?;
        let semaphore = match open.info.field(SEMAPHORE) {
            Some("0") => false,
            Some("1") => true,
            _ => {
                let why = "this kernel does not tell whether it is a semaphore";
                return Err(open.unsupported(why, None));
            }
        };
        Ok(Record {
            count,
            semaphore,
            flags: open.info.flags,
        })
    }

    fn check(record: &Record) -> Result<()> {
        status::check(Self::NAME, record.flags)
    }

    fn describe(record: &Record) -> String {
        let semaphore = if record.semaphore { " semaphore" } else { "" };
        format!("count={}{semaphore}", record.count)
    }

    fn open(record: &Record, _cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let flags = status::opening(record.flags);
        let mut how = EventfdFlags::CLOEXEC;
        how.set(EventfdFlags::SEMAPHORE, record.semaphore);
        // Whatever else the description had, writing the count must not wait.
        how |= EventfdFlags::NONBLOCK;
        let kernel = |error| Error::kernel("make an eventfd", error);
        let initial = u32::try_from(record.count).unwrap_or(u32::MAX);
        let own = rustix::event::eventfd(initial, how).map_err(kernel)?;
        let rest = record.count - u64::from(initial);
        if rest > 0 {
            rustix::io::write(&own, &rest.to_ne_bytes()).map_err(kernel)?;
        }
        if flags.intersection(status::SETTABLE) != OFlags::NONBLOCK {
            status::set(&own, flags)?;
        }
        Ok(own)
    }
}

fn count_of(info: &Info) -> Option<u64> {
    u64::from_str_radix(info.field("eventfd-count")?, 16).ok()
}

/// The question to a task whether an event counter is a semaphore, where the kernel does not tell
/// (before 6.5): it is used, and has the same count afterwards.
///
/// The calls are the task's own, in one script that goes on to its end even if nobody waits for
/// that any more.
pub struct Whether {
    /// Of a counter of 2 or more, what was taken.
    taken: DataAt,
}

impl Whether {
    /// Whether the kernel has not told it of a descriptor.
    #[must_use]
    pub fn is_unknown(row: &Row) -> bool {
        row.link == LINK && row.info.field(SEMAPHORE).is_none()
    }

    /// Asks a task about one of its descriptors; none where that is no event counter, or where the
    /// kernel has told.
    pub fn ask(row: &Row, script: &mut Script) -> Option<Self> {
        if !Self::is_unknown(row) {
            return None;
        }
        let count = count_of(&row.info)?;
        // Neither call must wait, whatever others do with the counter meanwhile.
        let flags = row.info.flags;
        let flags = [flags | OFlags::NONBLOCK.bits(), flags];
        let (own, taken, rest) = (script.buffer(8), script.buffer(8), script.buffer(8));
        let two = script.bytes(&2_u64.to_ne_bytes());
        let mut call = |call, last: [Arg; 2]| {
            script.attempt(call, [row.fd.into(), last[0], last[1]]);
        };
        call(Sysno::fcntl, [F_SETFL.into(), flags[0].into()]);
        let bytes = Arg::from(8_u32);
        // What could not be taken is 0, and adding that is no change.
        let steps = if count >= 2 {
            &[(Sysno::read, taken), (Sysno::write, taken)][..]
        } else {
            &[
                (Sysno::read, own),
                (Sysno::write, two),
                (Sysno::read, taken),
                (Sysno::read, rest),
                (Sysno::write, own),
            ]
        };
        for (number, data) in steps {
            call(*number, [(*data).into(), bytes]);
        }
        call(Sysno::fcntl, [F_SETFL.into(), flags[1].into()]);
        Some(Self { taken })
    }

    /// Adds the answer to what the kernel has told; nothing where there was none.
    pub fn answer(&self, answers: &Answers, row: &mut Row) {
        let semaphore = match answers.word(self.taken, 0) {
            0 => return,
            1 => 1,
            _ => 0,
        };
        row.info.rest += &format!("{SEMAPHORE}: {semaphore}\n");
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use rustix::io::Errno;

    use super::super::testing::{World, decoded};
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

    /// Makes the calls of a script here, and gives its data back.
    fn make(script: &Script, own: &OwnedFd) -> Vec<u8> {
        use std::os::fd::AsRawFd;
        let mut data = script.data.clone();
        for step in &script.steps {
            assert_eq!(step.args[0], Arg::from(own.as_raw_fd()));
            let part = || match step.args[1] {
                Arg::Data(at) => at.0 as usize..at.0 as usize + 8,
                other => panic!("{other:?} is no data"),
            };
            let done = match step.call {
                Sysno::fcntl => {
                    let Arg::Value(flags) = step.args[2] else {
                        panic!("flags")
                    };
                    status::set(own, OFlags::from_bits_retain(flags as u32)).expect("set");
                    continue;
                }
                Sysno::read => rustix::io::read(own.as_fd(), &mut data[part()]),
                Sysno::write => rustix::io::write(own, &data[part()]),
                other => panic!("{other} is not asked"),
            };
            assert!(matches!(done, Ok(8) | Err(Errno::AGAIN)), "{done:?}");
        }
        data
    }

    #[test]
    fn a_kernel_that_does_not_tell_is_asked_by_use() {
        for semaphore in [false, true] {
            for count in [0, 1, 2, 3, 500, u64::MAX - 1] {
                let mut how = EventfdFlags::NONBLOCK;
                how.set(EventfdFlags::SEMAPHORE, semaphore);
                let own = rustix::event::eventfd(0, how).expect("eventfd");
                rustix::io::write(&own, &count.to_ne_bytes()).expect("write");
                status::set(&own, OFlags::RDWR).expect("it may wait");
                let mut row = super::super::table::own(own.as_fd()).expect("a row");
                row.info.rest = row.info.rest.replace(SEMAPHORE, "unknown");
                let before = row.info.clone();
                let mut script = Script::default();
                let whether = Whether::ask(&row, &mut script).expect("a question");
                let data = make(&script, &own);
                let answers = Answers {
                    results: Vec::new(),
                    data,
                };
                whether.answer(&answers, &mut row);
                let told = row.info.field(SEMAPHORE).map(str::to_owned);
                assert_eq!(
                    told.as_deref(),
                    Some(if semaphore { "1" } else { "0" }),
                    "{count}"
                );
                let mut after = super::super::table::own(own.as_fd()).expect("a row").info;
                after.rest = after.rest.replace(SEMAPHORE, "unknown");
                assert_eq!(after, before);
                assert!(Whether::ask(&row, &mut script).is_none());
            }
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let record = Record {
            flags: OFlags::CREATE.bits(),
            ..Record::default()
        };
        let error = decoded(&Eventfd, &record).expect_err("no such flags");
        assert_eq!(error.to_string(), "image record eventfd 0: flags 0o100");
    }
}
