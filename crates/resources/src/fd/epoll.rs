//! Interest lists: epoll(7).
//!
//! The kernel knows what is watched by file *and* number. So entries are added by a task, once its
//! descriptors have their numbers; those whose number was closed or given to another file since,
//! and those of an epoll that is only in flight, are added by the restorer.
//!
//! A one-shot entry that has fired comes back watching for errors and hang-ups: nothing can be
//! added that watches for less.
//!
//! - Kept: what it watches, for which events and with which data; also files whose number there was
//!   closed or given to another file, and another epoll; how it polls the network
//!   (ioctl_eventpoll(2)).
//! - Refused: "it watches a file by the old number … that no task has open"; "it watches … by the
//!   old number …" (a signalfd, a pidfd or a file of a process); "its watch … is not understood";
//!   "its watch of fd … has unknown events …".
//! - CRIU 4.2: kept, but for how it polls; refuses a watched file that no task has open.

use std::collections::HashMap;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};

use prost::Message;
use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use sys::kcmp::Descriptor;
use sys::process::Process;
use syscalls::Sysno;

use super::{DescriptionId, DumpContext, Kind, Open, RestoreContext, late, status, tags};
use crate::ledger::fdinfo::EPOLL_EVENTS;
use crate::script::{DataAt, Script};
use crate::{Error, Result};

/// See the file.
pub struct Epoll;

/// An interest list.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// What is watched.
    #[prost(message, repeated, tag = "1")]
    watches: Vec<Watch>,
    /// Access mode and status flags.
    #[prost(uint32, tag = "2")]
    flags: u32,
    /// How it polls the network, where it was told.
    #[prost(message, optional, tag = "3")]
    polling: Option<Polling>,
}

/// How an instance polls the network (ioctl_eventpoll(2)).
#[derive(Clone, Copy, PartialEq, Message)]
struct Polling {
    /// For how long a wait polls, in microseconds.
    #[prost(uint32, tag = "1")]
    busy_poll_us: u32,
    /// How many packets one poll takes.
    #[prost(uint32, tag = "2")]
    budget: u32,
    /// Not 0: an instance prefers busy polling to interrupts (`prefer_busy_poll`).
    #[prost(uint32, tag = "3")]
    prefer: u32,
}

impl Polling {
    /// The parameters that were set; `None` if none were, or if the kernel knows none.
    fn of(epoll: BorrowedFd<'_>) -> Option<Self> {
        let params = sys::epoll::params(epoll).ok()?;
        let polling = Self {
            busy_poll_us: params.busy_poll_us,
            budget: params.budget.into(),
            prefer: params.prefer.into(),
        };
        Some(polling).filter(|polling| *polling != Self::default())
    }

    /// The same as the kernel has them; `None` for numbers that are too large.
    fn params(self) -> Option<sys::epoll::Params> {
        let budget = u16::try_from(self.budget).ok()?;
        let prefer = u8::try_from(self.prefer).ok()?;
        Some(sys::epoll::Params::new(self.busy_poll_us, budget, prefer))
    }

    fn set(self, epoll: BorrowedFd<'_>) -> Result<()> {
        let params = self.params().expect("checked when decoded");
        sys::epoll::set_params(epoll, params)
            .map_err(|error| Error::kernel("set how an epoll polls the network", error))
    }
}

/// One watched file.
#[derive(Clone, Copy, PartialEq, Message)]
struct Watch {
    /// The number by which it was added.
    #[prost(uint32, tag = "1")]
    fd: u32,
    /// The events and how they are reported.
    #[prost(fixed32, tag = "2")]
    events: u32,
    /// What the task gets to see.
    #[prost(fixed64, tag = "3")]
    data: u64,
    /// The description, when the number does not lead to it any more.
    #[prost(uint32, optional, tag = "4")]
    stray: Option<u32>,
}

/// The size of `struct epoll_event` on this architecture, in bytes.
const EVENT_BYTES: u32 = 12;
const EPOLL_CTL_ADD: i32 = libc::EPOLL_CTL_ADD;

/// A line of fdinfo.
struct Line {
    fd: u32,
    events: u32,
    data: u64,
    inode: u64,
    /// The device in the kernel's own encoding.
    device: u64,
}

impl Line {
    fn parse(line: &str) -> Option<Self> {
        let mut fields = HashMap::new();
        let mut words = line.split_whitespace();
        while let Some(word) = words.next() {
            let (name, value) = word.split_once(':')?;
            let value = if value.is_empty() {
                words.next()?
            } else {
                value
            };
            fields.insert(name, value);
        }
        let hex = |name| u64::from_str_radix(fields.get(name)?, 16).ok();
        Some(Self {
            fd: fields.get("tfd")?.parse().ok()?,
            events: u32::try_from(hex("events")?).ok()?,
            data: hex("data")?,
            inode: hex("ino")?,
            device: hex("sdev")?,
        })
    }

    /// Whether `open` is of the same inode.
    fn fits(&self, open: &Open<'_>) -> bool {
        let (major, minor) = ((self.device >> 20), (self.device & 0xf_ffff));
        let device = (open.stat.st_dev, open.stat.st_ino);
        let major = u32::try_from(major).unwrap_or(u32::MAX);
        device == (rustix::fs::makedev(major, minor as u32), self.inode)
    }
}

impl Kind for Epoll {
    type Record = Record;
    const TAG: u16 = tags::EPOLL;
    const NAME: &'static str = "epoll";

    fn claims(open: &Open<'_>) -> bool {
        open.link == b"anon_inode:[eventpoll]"
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Record> {
        let mut seen: HashMap<u32, u32> = HashMap::new();
        let mut record = Record {
            flags: open.info.flags,
            polling: Polling::of(open.own()?),
            ..Record::default()
        };
        for text in open
            .info
            .rest
            .lines()
            .filter(|line| line.starts_with("tfd:"))
        {
            let line = Line::parse(text).ok_or_else(|| {
                let why = format!("its watch {text:?} is not understood");
                open.unsupported(&why, None)
            })?;
            let unknown = u64::from(line.events) & !EPOLL_EVENTS.bits();
            if unknown != 0 {
                let why = format!(
                    "its watch of fd {} has unknown events {unknown:#x}",
                    line.fd
                );
                return Err(open.unsupported(&why, None));
            }
            let offset = seen.entry(line.fd).or_default();
            let stray = target(open, &line, *offset, cx)?;
            *offset += 1;
            record.watches.push(Watch {
                fd: line.fd,
                events: line.events,
                data: line.data,
                stray,
            });
        }
        Ok(record)
    }

    fn check(record: &Record) -> Result<()> {
        status::check(Self::NAME, record.flags)?;
        if let Some(polling) = record.polling.filter(|polling| polling.params().is_none()) {
            return Err(Error::corrupt(Self::NAME, format!("{polling:?}")));
        }
        let mut numbers = record.watches.iter().map(|watch| watch.fd);
        match numbers.find(|fd| i32::try_from(*fd).is_err()) {
            Some(fd) => Err(Error::corrupt(Self::NAME, format!("fd {fd}"))),
            None => Ok(()),
        }
    }

    fn describe(record: &Record) -> String {
        let watches = record.watches.iter().map(|watch| {
            let stray = if watch.stray.is_some() { "*" } else { "" };
            format!("{}{stray}:{:#x}", watch.fd, watch.events)
        });
        format!("watches=[{}]", watches.collect::<Vec<_>>().join(" "))
    }

    fn open(record: &Record, _cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let flags = status::opening(record.flags);
        let own = epoll::create(CreateFlags::CLOEXEC)
            .map_err(|error| Error::kernel("make an epoll", error))?;
        if flags.intersects(status::SETTABLE) {
            status::set(&own, flags)?;
        }
        if let Some(polling) = record.polling {
            polling.set(own.as_fd())?;
        }
        Ok(own)
    }

    fn finish(record: &Record, own: BorrowedFd<'_>, cx: &mut dyn RestoreContext) -> Result<()> {
        for watch in &record.watches {
            let Some(stray) = watch.stray else { continue };
            let number = watch.fd.cast_signed();
            let target = cx.description(DescriptionId(stray))?;
            watch_by(own, target, number, watch)
                .map_err(|error| Error::kernel(format!("watch fd {number} by an epoll"), error))?;
        }
        Ok(())
    }

    fn in_task(record: &Record, fd: i32, script: &mut Script) {
        let watches = record.watches.iter().filter(|watch| watch.stray.is_none());
        let mut events = Vec::new();
        for watch in watches.clone() {
            events.extend(watch.events.to_le_bytes());
            events.extend(watch.data.to_le_bytes());
        }
        let events = script.bytes(&events);
        for (index, watch) in (0u32..).zip(watches) {
            let event = DataAt(events.0 + index * EVENT_BYTES);
            let number = watch.fd.cast_signed();
            let args = [fd.into(), EPOLL_CTL_ADD.into(), number.into(), event.into()];
            script.call(Sysno::epoll_ctl, args);
            script.note(format!("epoll {fd}"));
        }
    }
}

/// Has the epoll `own` watch `target` by the very `number`, whatever this process has there: who
/// gives the number to the file again can take the entry off.
fn watch_by(
    own: BorrowedFd<'_>,
    target: BorrowedFd<'_>,
    number: i32,
    watch: &Watch,
) -> std::io::Result<()> {
    let events = EventFlags::from_bits_retain(watch.events);
    let data = EventData::new_u64(watch.data);
    // What this process has there can be the epoll itself.
    let elsewhere = match own.as_raw_fd() == number {
        true => Some(rustix::io::fcntl_dupfd_cloexec(own, 0)?),
        false => None,
    };
    let own = elsewhere.as_ref().map_or(own, AsFd::as_fd);
    let added = sys::at_number::at_number(target, number, |target| {
        epoll::add(own, target, data, events)
    })?;
    Ok(added?)
}

/// The description that `line`, the `offset`th of its number, watches: `None` when its number
/// leads there.
fn target(open: &Open<'_>, line: &Line, offset: u32, cx: &dyn DumpContext) -> Result<Option<u32>> {
    let here = Process::own();
    let (process, epoll) = if open.in_flight {
        (&here, open.own()?.as_raw_fd())
    } else {
        (&open.process, open.fd)
    };
    let slot = sys::kcmp::EpollSlot {
        epoll: epoll.cast_unsigned(),
        target: line.fd,
        offset,
    };
    let watched = |other: &Process, fd: i32| {
        let target = Descriptor { process: other, fd };
        sys::kcmp::watches(process, slot, target)
            .map_err(|error| Error::kernel(format!("find what {} watches", open.place()), error))
    };
    let number = line.fd.cast_signed();
    // Who sent it is not known.
    let by_number = cx
        .at(open.process.pid(), number)
        .filter(|_| !open.in_flight);
    let by_number = by_number.and_then(|id| cx.all().get(id.0 as usize));
    if let Some(known) = by_number.filter(|known| line.fits(known)) {
        // A socket's inode has one description for all its life.
        let alone = known.link.starts_with(b"socket:[");
        if alone || watched(&open.process, number)? {
            return Ok(None);
        }
    }
    for other in cx.all().iter().filter(|other| line.fits(other)) {
        let found = if other.fd >= 0 {
            watched(&other.process, other.fd)?
        } else {
            watched(&here, other.own()?.as_raw_fd())?
        };
        if found && (other.link == b"anon_inode:[signalfd]" || late::refers_to_task(other)) {
            let why = format!("it watches {} by the old number {number}", other.place());
            return Err(open.unsupported(&why, None));
        }
        if found {
            return Ok(Some(other.id.0));
        }
    }
    let why = format!("it watches a file by the old number {number} that no task has open");
    Err(open.unsupported(&why, None))
}

#[cfg(test)]
mod tests {
    use rustix::event::{EventfdFlags, Timespec};

    use super::super::testing::World;
    use super::*;

    fn create() -> OwnedFd {
        epoll::create(CreateFlags::CLOEXEC).expect("epoll")
    }

    fn counter() -> OwnedFd {
        rustix::event::eventfd(0, EventfdFlags::NONBLOCK).expect("eventfd")
    }

    fn raise(counter: &OwnedFd) {
        rustix::io::write(counter, &1u64.to_ne_bytes()).expect("write");
    }

    fn ready(own: &OwnedFd) -> Vec<(u64, EventFlags)> {
        let mut events = [epoll::Event {
            flags: EventFlags::empty(),
            data: EventData::new_u64(0),
        }; 8];
        let now = Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        let count = epoll::wait(own, &mut events[..], Some(&now)).expect("wait");
        let events = events[..count].iter();
        events
            .map(|event| (event.data.u64(), event.flags))
            .collect()
    }

    #[test]
    fn polling_of_the_network_survives() {
        let own = create();
        let polling = Polling {
            busy_poll_us: 50,
            budget: 8,
            prefer: 1,
        };
        if let Err(error) = polling.set(own.as_fd()) {
            testkit::skip!("no parameters of epoll here: {error}");
        }
        let mut world = World::default();
        let at = world.add(own);
        world.cycle();
        assert_eq!(Polling::of(world.get(at).as_fd()), Some(polling));
    }

    #[test]
    fn unknown_events_are_refused_by_name() {
        let mut world = World::default();
        let (at, target) = (world.add(create()), world.add(counter()));
        let data = EventData::new_u64(7);
        epoll::add(world.get(at), world.get(target), data, EventFlags::IN).expect("add");
        let error = world.dump_changed(|open| {
            open.info.rest = open
                .info
                .rest
                .replace("events:       19", "events:    40019");
        });
        let error = error.expect_err("it is refused").to_string();
        assert!(error.ends_with("has unknown events 0x40000"), "{error}");
    }

    #[test]
    fn entries_wake_with_their_data() {
        let mut world = World::default();
        let at = world.add(create());
        let (level, edge) = (world.add(counter()), world.add(counter()));
        for (target, data, flags) in [
            (level, 7, EventFlags::IN),
            (edge, u64::MAX, EventFlags::IN | EventFlags::ET),
        ] {
            let data = EventData::new_u64(data);
            epoll::add(world.get(at), world.get(target), data, flags).expect("add");
        }
        world.cycle();
        let (own, level, edge) = (world.take(at), world.take(level), world.take(edge));
        assert_eq!(ready(&own), []);
        raise(&level);
        assert_eq!(ready(&own), [(7, EventFlags::IN)]);
        assert_eq!(ready(&own), [(7, EventFlags::IN)]);
        rustix::io::read(&level, &mut [0; 8]).expect("read");
        raise(&edge);
        assert_eq!(ready(&own), [(u64::MAX, EventFlags::IN)]);
        assert_eq!(ready(&own), []);
        // Found by number, so that it can be changed by number.
        let data = EventData::new_u64(8);
        epoll::modify(&own, &level, data, EventFlags::IN).expect("modify");
    }

    #[test]
    fn epolls_watch_epolls() {
        let mut world = World::default();
        let (outer, inner) = (world.add(create()), world.add(create()));
        let bottom = world.add(counter());
        let data = EventData::new_u64;
        let (low, high) = (world.get(inner), world.get(outer));
        epoll::add(low, world.get(bottom), data(1), EventFlags::IN).expect("add");
        epoll::add(high, low, data(2), EventFlags::IN).expect("add");
        world.cycle();
        raise(world.get(bottom));
        assert_eq!(ready(world.get(outer)), [(2, EventFlags::IN)]);
    }

    #[test]
    fn an_entry_can_have_the_number_of_the_epoll() {
        let (own, target) = (create(), counter());
        let number = own.as_raw_fd();
        let watch = Watch {
            fd: number.cast_unsigned(),
            events: EventFlags::IN.bits(),
            data: 3,
            stray: Some(0),
        };
        watch_by(own.as_fd(), target.as_fd(), number, &watch).expect("watch");
        raise(&target);
        assert_eq!(ready(&own), [(3, EventFlags::IN)]);
    }

    #[test]
    fn entry_outlives_its_number() {
        let mut world = World::default();
        let (at, kept) = (world.add(create()), world.add(counter()));
        // A number that no other test takes meanwhile.
        let second = rustix::io::fcntl_dupfd_cloexec(world.get(kept), 700).expect("dup");
        let data = EventData::new_u64;
        epoll::add(world.get(at), &second, data(5), EventFlags::IN).expect("add");
        epoll::add(world.get(at), world.get(kept), data(6), EventFlags::IN).expect("add");
        drop(second);
        world.dump().expect("dump");
        assert!(world.describe(at).contains('*'), "{}", world.describe(at));
        world.restore().expect("restore");
        raise(world.get(kept));
        let mut seen = ready(world.get(at));
        seen.sort_by_key(|(data, _)| *data);
        assert_eq!(seen, [(5, EventFlags::IN), (6, EventFlags::IN)]);
    }

    #[test]
    fn file_that_no_task_has_is_refused() {
        let mut world = World::default();
        let (at, outside) = (world.add(create()), counter());
        let data = EventData::new_u64(0);
        epoll::add(world.get(at), &outside, data, EventFlags::IN).expect("add");
        let error = world.dump().expect_err("outside of the tree").to_string();
        assert!(error.contains("no task has open"), "{error}");
    }

    #[test]
    fn lines_are_read() {
        let text = "tfd:        6 events: 80000019 data: ffffffffffffffff  pos:0 ino:40e sdev:10";
        let line = Line::parse(text).expect("well formed");
        assert_eq!(
            (line.fd, line.events, line.data),
            (6, 0x8000_0019, u64::MAX)
        );
        assert_eq!((line.inode, line.device), (0x40e, 0x10));
        assert!(Line::parse("tfd: 6").is_none());
    }
}
