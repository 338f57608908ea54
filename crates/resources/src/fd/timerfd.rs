//! Timers read from a descriptor: timerfd_create(2).
//!
//! - Kept: clock, time that remains or is to come, interval, expirations that were not read.
//! - Refused: "its state is not understood"; "its flags … are not known".
//! - CRIU 4.2: kept; each comes back with the time that remained, also one that was set to a time
//!   of day.

use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};

use prost::Message;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::OFlags;
use rustix::time::{
    ClockId, Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec,
};

use super::{DumpContext, Info, Kind, Open, RestoreContext, status, tags};
use crate::ledger::fdinfo::TIMER_FLAGS;
use crate::{Error, Result};

/// See the file.
pub struct Timerfd;

/// A timer.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// The clock: `CLOCK_REALTIME` and so on.
    #[prost(uint32, tag = "1")]
    clock: u32,
    /// Access mode and status flags.
    #[prost(uint32, tag = "2")]
    flags: u32,
    /// The flags of the last `timerfd_settime`.
    #[prost(uint32, tag = "3")]
    settime_flags: u32,
    /// Expirations that were not read yet.
    #[prost(uint64, tag = "4")]
    ticks: u64,
    /// Nanoseconds to the next expiration; 0 when it is not armed.
    #[prost(uint64, tag = "5")]
    remaining_ns: u64,
    /// Nanoseconds from one expiration to the next; 0 when there is only one.
    #[prost(uint64, tag = "6")]
    interval_ns: u64,
    /// The time of the next expiration, of a timer that was set to a time of day: it stays when
    /// the restore is later.
    #[prost(uint64, optional, tag = "7")]
    deadline_ns: Option<u64>,
}

const BILLION: u64 = 1_000_000_000;

impl Record {
    fn from_info(info: &Info) -> Option<Self> {
        let number = |name| info.field(name)?.parse::<u64>().ok();
        let settime_flags = info.field("settime flags")?;
        Some(Self {
            clock: info.field("clockid")?.parse().ok()?,
            flags: info.flags,
            settime_flags: u32::from_str_radix(settime_flags, 8).ok()?,
            ticks: number("ticks")?,
            remaining_ns: pair_ns(info.field("it_value")?)?,
            interval_ns: pair_ns(info.field("it_interval")?)?,
            deadline_ns: None,
        })
    }

    fn how(&self) -> TimerfdTimerFlags {
        TimerfdTimerFlags::from_bits_retain(self.settime_flags)
    }

    /// The clock to make the timer with, and the one to ask for its time.
    fn clocks(&self) -> Option<(TimerfdClockId, ClockId)> {
        Some(match self.clock {
            0 => (TimerfdClockId::Realtime, ClockId::Realtime),
            1 => (TimerfdClockId::Monotonic, ClockId::Monotonic),
            7 => (TimerfdClockId::Boottime, ClockId::Boottime),
            8 => (TimerfdClockId::RealtimeAlarm, ClockId::Realtime),
            9 => (TimerfdClockId::BoottimeAlarm, ClockId::Boottime),
            _ => return None,
        })
    }

    fn arm(&self, own: BorrowedFd<'_>) -> Result<()> {
        let kernel = |error: std::io::Error| Error::kernel("set a timerfd", error);
        let (_, clock) = self.clocks().expect("checked when decoded");
        let how = self.how();
        if self.remaining_ns > 0 || self.interval_ns > 0 || !how.is_empty() {
            // A periodic one that has expired goes on: a value of 0 would stop it for good.
            let remaining_ns = match self.remaining_ns {
                0 => u64::from(self.is_periodic_and_expired()),
                remaining_ns => remaining_ns,
            };
            let value_ns = match self.deadline_ns {
                _ if remaining_ns == 0 => 0,
                Some(deadline_ns) => deadline_ns,
                None if how.contains(TimerfdTimerFlags::ABSTIME) => {
                    now_ns(clock).saturating_add(remaining_ns)
                }
                None => remaining_ns,
            };
            let wanted = Itimerspec {
                it_interval: timespec(self.interval_ns),
                it_value: timespec(value_ns),
            };
            rustix::time::timerfd_settime(own, how, &wanted)
                .map_err(|error| kernel(error.into()))?;
        }
        // Setting the timer forgets them.
        if self.ticks > 0 {
            sys::timerfd::set_ticks(own, self.ticks).map_err(kernel)?;
        }
        Ok(())
    }

    /// True if the next period begins when somebody looks. A timer that was stopped has no
    /// expirations: timerfd_settime(2) resets them.
    fn is_periodic_and_expired(&self) -> bool {
        self.remaining_ns == 0 && self.interval_ns > 0 && self.ticks > 0
    }

    /// True if it may be due at this very moment, before its interrupt has come. A stopped one
    /// looks the same.
    fn may_be_due(&self) -> bool {
        self.remaining_ns == 0 && self.interval_ns > 0 && self.ticks == 0
    }
}

/// Waits until a periodic timer has expired; a moment for one that is stopped.
fn wait_until_due(open: &Open<'_>) -> Result<()> {
    const LATE: Timespec = Timespec {
        tv_sec: 0,
        tv_nsec: 10_000_000,
    };
    let mut one = [PollFd::from_borrowed_fd(open.own()?, PollFlags::IN)];
    let waited = rustix::io::retry_on_intr(|| poll(&mut one, Some(&LATE)));
    waited.map_err(|error| Error::kernel(format!("wait for {}", open.place()), error))?;
    Ok(())
}

/// The state in fdinfo now; `None` if it is not understood.
fn read_again(open: &Open<'_>) -> Result<Option<Record>> {
    let path = sys::procfs::path(format_args!("self/fdinfo/{}", open.own()?.as_raw_fd()));
    let text = std::fs::read_to_string(&path);
    let text = text.map_err(|error| Error::kernel(format!("read {path}"), error))?;
    let info = Info::parse(&text).map(|(info, _)| info);
    Ok(info.and_then(|info| Record::from_info(&info)))
}

/// "(1, 500)" in nanoseconds.
fn pair_ns(text: &str) -> Option<u64> {
    let text = text.strip_prefix('(')?.strip_suffix(')')?;
    let (seconds, nanoseconds) = text.split_once(", ")?;
    let seconds: u64 = seconds.parse().ok()?;
    Some(
        seconds
            .saturating_mul(BILLION)
            .saturating_add(nanoseconds.parse().ok()?),
    )
}

fn timespec(ns: u64) -> Timespec {
    Timespec {
        tv_sec: (ns / BILLION).cast_signed(),
        tv_nsec: (ns % BILLION).cast_signed(),
    }
}

fn now_ns(clock: ClockId) -> u64 {
    let now = rustix::time::clock_gettime(clock);
    let seconds = u64::try_from(now.tv_sec).unwrap_or(0);
    seconds * BILLION + u64::try_from(now.tv_nsec).unwrap_or(0)
}

impl Kind for Timerfd {
    type Record = Record;
    const TAG: u16 = tags::TIMERFD;
    const NAME: &'static str = "timerfd";

    fn claims(open: &Open<'_>) -> bool {
        open.link == b"anon_inode:[timerfd]"
    }

    fn dump(open: &Open<'_>, _cx: &mut dyn DumpContext) -> Result<Record> {
        let unknown = || open.unsupported("its state is not understood", None);
        let mut record = Record::from_info(&open.info).ok_or_else(unknown)?;
        let (_, clock) = record.clocks().ok_or_else(unknown)?;
        let flags = u64::from(record.settime_flags) & !TIMER_FLAGS.bits();
        if flags != 0 {
            return Err(open.unsupported(&format!("its flags {flags:#o} are not known"), None));
        }
        if record.may_be_due() {
            wait_until_due(open)?;
            record = read_again(open)?.ok_or_else(unknown)?;
        }
        if record.is_periodic_and_expired() {
            // The kernel does not count a periodic timer on before someone looks at it, and fdinfo
            // is not looking.
            let look = rustix::time::timerfd_gettime(open.own()?);
            look.map_err(|error| Error::kernel(format!("read {}", open.place()), error))?;
            record = read_again(open)?.ok_or_else(unknown)?;
        }
        let day = clock == ClockId::Realtime && record.how().contains(TimerfdTimerFlags::ABSTIME);
        if day && record.remaining_ns > 0 {
            record.deadline_ns = Some(now_ns(clock).saturating_add(record.remaining_ns));
        }
        Ok(record)
    }

    fn check(record: &Record) -> Result<()> {
        status::check(Self::NAME, record.flags)?;
        let known = TimerfdTimerFlags::ABSTIME | TimerfdTimerFlags::CANCEL_ON_SET;
        if record.clocks().is_none() || !known.contains(record.how()) {
            let (clock, flags) = (record.clock, record.settime_flags);
            let what = format!("clock {clock}, flags {flags:#o}");
            return Err(Error::corrupt(Self::NAME, what));
        }
        Ok(())
    }

    fn describe(record: &Record) -> String {
        let (ticks, remaining_ns) = (record.ticks, record.remaining_ns);
        let (clock, interval_ns) = (record.clock, record.interval_ns);
        let remaining = format!("remaining={remaining_ns}ns interval={interval_ns}ns");
        format!("clock={clock} {remaining} ticks={ticks}")
    }

    fn open(record: &Record, _cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let flags = status::opening(record.flags);
        let (clock, _) = record.clocks().expect("checked when decoded");
        let mut how = TimerfdFlags::CLOEXEC;
        how.set(TimerfdFlags::NONBLOCK, flags.contains(OFlags::NONBLOCK));
        let own = rustix::time::timerfd_create(clock, how)
            .map_err(|error| Error::kernel("make a timerfd", error))?;
        status::set_rest(&own, flags)?;
        Ok(own)
    }

    fn finish(record: &Record, own: BorrowedFd<'_>, _cx: &mut dyn RestoreContext) -> Result<()> {
        // As late as possible: what is left of the time should be left to the task.
        record.arm(own)
    }
}

#[cfg(test)]
mod tests {
    use rustix::time::{timerfd_create, timerfd_gettime, timerfd_settime};

    use std::os::fd::AsFd as _;

    use super::super::testing::{At, World};
    use super::*;

    fn timer(
        clock: TimerfdClockId,
        how: TimerfdTimerFlags,
        value_ns: u64,
        interval_ns: u64,
    ) -> OwnedFd {
        let own = timerfd_create(clock, TimerfdFlags::NONBLOCK).expect("timerfd");
        let wanted = Itimerspec {
            it_interval: timespec(interval_ns),
            it_value: timespec(value_ns),
        };
        timerfd_settime(&own, how, &wanted).expect("set");
        own
    }

    fn wait(own: &OwnedFd) {
        let mut one = [PollFd::new(own, PollFlags::IN)];
        let second = Timespec {
            tv_sec: 10,
            tv_nsec: 0,
        };
        assert_eq!(poll(&mut one, Some(&second)).expect("poll"), 1);
    }

    fn read(own: &OwnedFd) -> u64 {
        let mut bytes = [0; 8];
        rustix::io::read(own, &mut bytes).expect("read");
        u64::from_ne_bytes(bytes)
    }

    fn cycled(own: OwnedFd) -> (World, At) {
        let mut world = World::default();
        let at = world.add(own);
        world.cycle();
        (world, at)
    }

    #[test]
    fn remaining_time_survives_on_every_clock() {
        use TimerfdClockId::{Boottime, Monotonic, Realtime};
        for clock in [Realtime, Monotonic, Boottime] {
            let own = timer(clock, TimerfdTimerFlags::empty(), 1000 * BILLION, 7);
            let (mut world, at) = cycled(own);
            let left = timerfd_gettime(world.take(at)).expect("get");
            assert!((990..=1000).contains(&left.it_value.tv_sec), "{left:?}");
            assert_eq!(left.it_interval.tv_nsec, 7);
        }
    }

    #[test]
    fn time_of_day_stays_the_deadline() {
        let how = TimerfdTimerFlags::ABSTIME | TimerfdTimerFlags::CANCEL_ON_SET;
        let deadline_ns = now_ns(ClockId::Realtime) + 500 * BILLION;
        let own = timer(TimerfdClockId::Realtime, how, deadline_ns, 0);
        let mut world = World::default();
        let at = world.add(own);
        world.dump().expect("dump");
        world.restore().expect("restore");
        let left = timerfd_gettime(world.take(at)).expect("get").it_value;
        let left_ns = left.tv_sec.cast_unsigned() * BILLION + left.tv_nsec.cast_unsigned();
        let again_ns = now_ns(ClockId::Realtime) + left_ns;
        assert!(again_ns.abs_diff(deadline_ns) < BILLION, "{again_ns}");

        let absolute = TimerfdTimerFlags::ABSTIME;
        let deadline_ns = now_ns(ClockId::Monotonic) + 500 * BILLION;
        cycled(timer(TimerfdClockId::Monotonic, absolute, deadline_ns, 0));
    }

    #[test]
    fn expirations_that_were_not_read_survive() {
        let own = timer(TimerfdClockId::Monotonic, TimerfdTimerFlags::empty(), 1, 0);
        wait(&own);
        let (mut world, at) = cycled(own);
        assert_eq!(read(&world.take(at)), 1);
    }

    #[test]
    fn unread_periodic_timer_goes_on() {
        let how = TimerfdTimerFlags::empty();
        let own = timer(TimerfdClockId::Monotonic, how, 1, 2_000_000);
        wait(&own);
        let mut world = World::default();
        let at = world.add(own);
        world.dump().expect("dump");
        world.restore().expect("restore");
        let own = world.take(at);
        let left = timerfd_gettime(&own).expect("get").it_value;
        assert!(left.tv_nsec > 0, "not armed");
        assert!(read(&own) >= 1);
        wait(&own);
    }

    #[test]
    fn fast_periodic_timer_goes_on() {
        use TimerfdClockId::{Boottime, Monotonic, Realtime};
        for clock in [Realtime, Monotonic, Boottime] {
            for absolute in [false, true] {
                let how = match absolute {
                    true => TimerfdTimerFlags::ABSTIME,
                    false => TimerfdTimerFlags::empty(),
                };
                let own = timer(clock, how, 1, 5_000);
                wait(&own);
                let mut world = World::default();
                let at = world.add(own);
                for _ in 0..3 {
                    world.dump().expect("dump");
                    world.restore().expect("restore");
                    assert!(read(world.get(at)) >= 1);
                    wait(world.get(at));
                }
            }
        }
    }

    #[test]
    fn periodic_timer_that_expires_while_it_is_looked_at_goes_on() {
        let expired = Record {
            clock: 1,
            interval_ns: 5_000,
            ticks: 3,
            ..Record::default()
        };
        let empty = TimerfdTimerFlags::empty();
        let own = timer(TimerfdClockId::Monotonic, empty, 0, 0);
        expired.arm(own.as_fd()).expect("set");
        assert!(read(&own) >= 3);
        wait(&own);
    }

    #[test]
    fn flags_that_are_not_known_are_refused() {
        let mut world = World::default();
        world.add(timer(
            TimerfdClockId::Monotonic,
            TimerfdTimerFlags::empty(),
            0,
            0,
        ));
        let error = world.dump_changed(|open| {
            open.info.rest = open
                .info
                .rest
                .replace("settime flags: 00", "settime flags: 04");
        });
        let error = error.expect_err("it is refused").to_string();
        assert!(error.ends_with("its flags 0o4 are not known"), "{error}");
    }

    #[test]
    fn disarmed_timer_stays_disarmed() {
        let own = timer(TimerfdClockId::Monotonic, TimerfdTimerFlags::empty(), 0, 9);
        let (world, at) = cycled(own);
        assert!(world.describe(at).contains("remaining=0ns"));
    }

    #[test]
    fn nonsense_is_refused() {
        assert_eq!(pair_ns("(1, 5)"), Some(BILLION + 5));
        assert_eq!(pair_ns("1, 5"), None);
        let wrong = Record {
            clock: 42,
            ..Record::default()
        };
        assert_eq!(wrong.clocks(), None);
    }
}
