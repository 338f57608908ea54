//! The POSIX timers of a process, with their ids (timer_create(2)).
//!
//! Not saved, because the kernel does not tell: whether a timer was set to an absolute time (it
//! goes on with the time that remained), and the overruns of its last expiry that was delivered.
//! A timer whose thread has ended comes back as one that tells nobody, as it did.
//!
//! By whose processor time a timer goes that a thread has made on its own is looked up in the
//! kernel's memory. It comes back as one on the clock of that thread (clock_getcpuclockid(3)).
//!
//! A timer on the processor time of a thread or a process that has ended never expires and cannot
//! be set. No call makes one: it is made while a thread or process of that number is there, which
//! then ends.
//!
//! - Kept: id, clock, what is signalled and to which thread, what was left, interval. Not: that it
//!   was set to an absolute time, and how often it has expired too late. Timers on processor time
//!   that threads have made on their own need bpf(2) and the kernel's description of its types.
//! - Refused: "a timer on a thread's processor time, in a process of several threads", as "whose it
//!   is cannot be looked up: …"; "a timer on the processor time of …, which has ended", as "its
//!   number is another's by now".
//! - At a restore: "timer … needs PR_TIMER_CREATE_RESTORE_IDS of Linux 6.15" (large ids).
//! - CRIU 4.2: kept; one on a thread's processor time comes back on the first thread's.

use std::collections::HashMap;
use std::io::{Error as IoError, ErrorKind};
use std::ops::RangeInclusive;

use linux_raw_sys::prctl::{
    PR_TIMER_CREATE_RESTORE_IDS, PR_TIMER_CREATE_RESTORE_IDS_OFF, PR_TIMER_CREATE_RESTORE_IDS_ON,
};
use sys::proc::{self, Notify, Timer};
use sys::process::Process;
use syscalls::Sysno;

use super::{Asked, Ended, Facts, Part, Phase, Planned, Scope, ThreadPlan, malformed, tags};
use crate::kernel::Kernel;
use crate::script::{Answers, DataAt, Script};
use crate::{Error, Result};

/// The size of `struct itimerspec` in bytes: interval and value, seconds and nanoseconds each.
const TIMES_BYTES: usize = 32;
/// The size of `struct sigevent` in bytes.
const EVENT_BYTES: usize = 64;
const NANOS: u64 = 1_000_000_000;
/// A time that no thread works for while a restore lasts.
const FAR_NS: u64 = 1_000_000 * NANOS;
const SIGEV_SIGNAL: u32 = linux_raw_sys::general::SIGEV_SIGNAL;
const SIGEV_NONE: u32 = linux_raw_sys::general::SIGEV_NONE;
const SIGEV_THREAD_ID: u32 = linux_raw_sys::general::SIGEV_THREAD_ID;
/// How /proc shows the processor time of whoever made the timer: as used by programs or at all, and
/// last as `CLOCK_THREAD_CPUTIME_ID` counts it.
const OWN_THREAD_CLOCKS: RangeInclusive<i32> = -4..=-2;
/// What the lowest bits of a clock of processor time are: what it counts, and whether of a thread.
const CLOCK_KIND: i32 = 7;
/// The most timers of a process that are looked through in the kernel.
const TIMERS_MAX: usize = 1 << 20;
const CLOCK_REALTIME_ALARM: i32 = libc::CLOCK_REALTIME_ALARM;
const CLOCK_BOOTTIME_ALARM: i32 = libc::CLOCK_BOOTTIME_ALARM;
/// How many timers are made and deleted again to reach an id on kernels before 6.15.
const SKIPPED_MAX: i32 = 4096;

/// A process's POSIX timers.
pub struct PosixTimers;

/// All timers, by ascending id.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// One a timer.
    #[prost(message, repeated, tag = "1")]
    pub timers: Vec<Saved>,
}

/// A timer.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Saved {
    /// Its id.
    #[prost(int32, tag = "1")]
    pub id: i32,
    /// Its clock, as timer_create(2) takes it.
    #[prost(sint32, tag = "2")]
    pub clock: i32,
    /// `SIGEV_SIGNAL` 0, `SIGEV_NONE` 1, `SIGEV_THREAD_ID` 4.
    #[prost(uint32, tag = "3")]
    pub notify: u32,
    /// The thread that is told (`SIGEV_THREAD_ID`).
    #[prost(int32, tag = "4")]
    pub thread: i32,
    /// The signal that it sends.
    #[prost(int32, tag = "5")]
    pub signal: i32,
    /// The value that goes with the signal.
    #[prost(fixed64, tag = "6")]
    pub value: u64,
    /// The time that remained, in nanoseconds; 0 for a disarmed timer.
    #[prost(uint64, tag = "7")]
    pub remaining_ns: u64,
    /// The time between later expirations in nanoseconds; 0 for none.
    #[prost(uint64, tag = "8")]
    pub interval_ns: u64,
    /// True if the timer goes by the processor time of a thread or process that has ended.
    #[prost(bool, tag = "9")]
    pub ended: bool,
}

/// By whose processor time a timer goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    /// A thread of the process.
    Thread(i32),
    /// A process, perhaps another one.
    Process(i32),
}

impl Owner {
    /// That of a clock, if it names one.
    fn of(clock: i32) -> Option<Self> {
        const PER_THREAD: i32 = 4;
        let number = !(clock >> 3);
        match clock {
            0.. => None,
            _ if OWN_THREAD_CLOCKS.contains(&clock) || number <= 0 => None,
            _ if clock & PER_THREAD != 0 => Some(Self::Thread(number)),
            _ => Some(Self::Process(number)),
        }
    }

    /// True if the thread or process has ended.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where it has, and another one has its number.
    fn has_ended(self, facts: &dyn Facts) -> Result<bool> {
        let is_there = |number| sys::procfs::has(number);
        match self {
            Self::Thread(tid) if facts.has_thread(tid) || tid == facts.pid() => Ok(false),
            Self::Thread(tid) if is_there(tid) => {
                let what = format!("a timer on the processor time of {self}, which has ended,");
                let refused = Error::unsupported(facts.pid(), what);
                Err(refused.because("its number is another's by now"))
            }
            Self::Thread(_) => Ok(true),
            Self::Process(pid) => Ok(!is_there(pid)),
        }
    }
}

impl std::fmt::Display for Owner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Thread(tid) => write!(f, "thread {tid}"),
            Self::Process(pid) => write!(f, "process {pid}"),
        }
    }
}

impl Saved {
    /// `is_there` tells whether a thread still runs. A timer that told one which has ended tells
    /// nobody, and no timer could be made for that thread.
    fn new(timer: &Timer, times: &[u64; 4], is_there: impl Fn(i32) -> bool) -> Self {
        let (notify, thread) = match timer.notify {
            Notify::Thread(tid) if !is_there(tid) => (SIGEV_NONE, 0),
            Notify::Nobody => (SIGEV_NONE, 0),
            Notify::Process => (SIGEV_SIGNAL, 0),
            Notify::Thread(tid) => (SIGEV_THREAD_ID, tid),
        };
        Self {
            id: timer.id,
            clock: timer.clock,
            notify,
            thread,
            signal: timer.signal,
            value: timer.value,
            remaining_ns: times[2] * NANOS + times[3],
            interval_ns: times[0] * NANOS + times[1],
            ended: false,
        }
    }

    /// Waking the machine up needs a capability, when the timer is made.
    fn needs_privilege(&self) -> bool {
        [CLOCK_REALTIME_ALARM, CLOCK_BOOTTIME_ALARM].contains(&self.clock)
    }

    /// True if the timer is made as soon as all tasks are there: because it needs a privilege, or
    /// because it goes by the processor time of another process, or of an ended one.
    fn is_made_together(&self, pid: i32) -> bool {
        let owner = Owner::of(self.clock);
        let of_other = matches!(owner, Some(Owner::Process(other)) if other != pid);
        self.needs_privilege() || self.ended || of_other
    }

    fn event(&self) -> [u8; EVENT_BYTES] {
        let mut event = [0; EVENT_BYTES];
        event[0..8].copy_from_slice(&self.value.to_le_bytes());
        event[8..12].copy_from_slice(&self.signal.to_le_bytes());
        event[12..16].copy_from_slice(&self.notify.to_le_bytes());
        event[16..20].copy_from_slice(&self.thread.to_le_bytes());
        event
    }

    /// Adds the call that makes the timer, and gives the place of its id.
    fn create(&self, script: &mut Script) -> DataAt {
        let event = script.bytes(&self.event());
        let id = script.bytes(&self.id.to_le_bytes());
        script.call(
            Sysno::timer_create,
            [self.clock.into(), event.into(), id.into()],
        );
        script.note(format!("timer {}", self.id));
        if self.ended && self.interval_ns != 0 {
            // It can only be set as long as its clock goes.
            self.set(FAR_NS, script);
        }
        id
    }

    fn arm(&self, script: &mut Script) {
        if self.remaining_ns != 0 && !self.ended {
            self.set(self.remaining_ns, script);
        }
    }

    fn set(&self, value: u64, script: &mut Script) {
        let interval = self.interval_ns;
        let words = [
            interval / NANOS,
            interval % NANOS,
            value / NANOS,
            value % NANOS,
        ];
        let times = script.bytes(&words.map(u64::to_le_bytes).concat());
        script.call(
            Sysno::timer_settime,
            [self.id.into(), 0u64.into(), times.into()],
        );
    }
}

impl Part for PosixTimers {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::POSIX_TIMERS
    }

    fn name(&self) -> &'static str {
        "POSIX timers"
    }

    fn scope(&self) -> Scope {
        Scope::Process
    }

    fn ask(&self, facts: &dyn Facts, questions: &mut Script) -> Result<Asked> {
        let timers = timers(facts)?;
        let data = timers.iter().map(|timer| {
            let buffer = questions.buffer(TIMES_BYTES);
            questions.call(Sysno::timer_gettime, [timer.id.into(), buffer.into()]);
            buffer
        });
        Ok(Asked {
            steps: Vec::new(),
            data: data.collect(),
        })
    }

    fn dump(&self, facts: &dyn Facts, asked: &Asked, answers: &Answers) -> Result<Option<Record>> {
        let mut timers = timers(facts)?;
        name_threads(&mut timers, facts)?;
        let saved = timers.iter().zip(&asked.data).map(|(timer, at)| {
            let times = [0, 8, 16, 24].map(|offset| answers.word(*at, offset));
            let is_there = |tid| facts.has_thread(tid);
            let owner = Owner::of(timer.clock);
            let ended = owner.map_or(Ok(false), |owner| owner.has_ended(facts))?;
            let saved = Saved::new(timer, &times, is_there);
            Ok(Saved { ended, ..saved })
        });
        let record = Record {
            timers: saved.collect::<Result<_>>()?,
        };
        let some = !record.timers.is_empty();
        Ok(some.then_some(record))
    }

    fn check(&self, record: &Record) -> Result<()> {
        let mut previous = -1;
        for timer in &record.timers {
            let known = [SIGEV_SIGNAL, SIGEV_NONE, SIGEV_THREAD_ID].contains(&timer.notify);
            let owned = !timer.ended || Owner::of(timer.clock).is_some();
            if timer.id <= previous || !known || !owned {
                return Err(Error::corrupt(self.name(), format!("{timer:?}")));
            }
            previous = timer.id;
        }
        Ok(())
    }

    fn describe(&self, record: &Record) -> String {
        let timers = record.timers.iter().map(|timer| {
            let Saved {
                id,
                clock,
                remaining_ns,
                ..
            } = timer;
            match Owner::of(*clock).filter(|_| timer.ended) {
                Some(owner) => format!("{id} of {owner}, which has ended"),
                None => format!("{id} of clock {clock} in {} us", remaining_ns / 1000),
            }
        });
        timers.collect::<Vec<_>>().join(", ")
    }

    fn plan(&self, record: Option<&Record>, who: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        let Some(record) = record else {
            return Ok(());
        };
        for timer in &record.timers {
            match Owner::of(timer.clock) {
                Some(owner) if timer.ended => plan.ended.push(match owner {
                    Owner::Thread(tid) => Ended { tid, thread: true },
                    Owner::Process(tid) => Ended { tid, thread: false },
                }),
                Some(Owner::Process(pid)) if pid != who.pid => plan.clocks.push(pid),
                _ => {}
            }
        }
        plan.ended.sort_unstable();
        plan.ended.dedup();
        if who.inherited.timer_ids.get() {
            create_with_ids(&record.timers, who.pid, plan);
        } else {
            self.count_up(&record.timers, who, plan)?;
        }
        for timer in &record.timers {
            timer.arm(plan.at(Phase::Last));
        }
        Ok(())
    }
}

impl PosixTimers {
    /// Makes the timers on a kernel that gives a new process ids from 0 on, each once: those
    /// between are made and deleted.
    fn count_up(&self, timers: &[Saved], who: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        let last = timers.last().map_or(0, |timer| timer.id);
        if last > SKIPPED_MAX {
            let what = format!("timer {last} needs PR_TIMER_CREATE_RESTORE_IDS of Linux 6.15");
            return Err(who.mismatch(self, what));
        }
        let together = timers.iter().any(|timer| timer.is_made_together(who.pid));
        let phase = if together {
            Phase::Together
        } else {
            Phase::Last
        };
        let script = plan.at(phase);
        let mut next = 0;
        for timer in timers {
            for skipped in next..timer.id {
                let filler = Saved {
                    id: skipped,
                    notify: SIGEV_NONE,
                    ..Saved::default()
                };
                filler.create(script);
                script.call(Sysno::timer_delete, [skipped.into()]);
            }
            timer.create(script);
            next = timer.id + 1;
        }
        Ok(())
    }
}

/// Makes the timers on a kernel that lets the maker choose their ids.
fn create_with_ids(timers: &[Saved], pid: i32, plan: &mut ThreadPlan) {
    for (phase, together) in [(Phase::Together, true), (Phase::Last, false)] {
        let timers = timers
            .iter()
            .filter(|timer| timer.is_made_together(pid) == together);
        let timers: Vec<_> = timers.collect();
        if timers.is_empty() {
            continue;
        }
        let script = plan.at(phase);
        let option = PR_TIMER_CREATE_RESTORE_IDS.into();
        script.call(
            Sysno::prctl,
            [option, PR_TIMER_CREATE_RESTORE_IDS_ON.into()],
        );
        for timer in timers {
            timer.create(script);
        }
        script.call(
            Sysno::prctl,
            [option, PR_TIMER_CREATE_RESTORE_IDS_OFF.into()],
        );
    }
}

/// The timers by ascending id.
fn timers(facts: &dyn Facts) -> Result<Vec<Timer>> {
    let timers = proc::timers(&facts.proc("timers")?);
    let mut timers = timers.map_err(|e| malformed(facts.pid(), e))?;
    timers.sort_unstable_by_key(|timer| timer.id);
    Ok(timers)
}

/// Has timers on the processor time of whoever made them be such on that of a thread with a name.
/// Of a single thread, that is taken for clear where it cannot be looked up.
fn name_threads(timers: &mut [Timer], facts: &dyn Facts) -> Result<()> {
    let is_unclear = |timer: &&mut Timer| OWN_THREAD_CLOCKS.contains(&timer.clock);
    let mut unclear = timers.iter_mut().filter(is_unclear).peekable();
    if unclear.peek().is_none() {
        return Ok(());
    }
    let what = "a timer on a thread's processor time, in a process of several threads";
    let refused = |why: String| Error::unsupported(facts.pid(), what).because(why);
    let has_one = facts.status()?.threads == 1;
    let makers = match makers(facts.process()) {
        // It may have had others, but there is nobody else to be asked for.
        Err(_) if has_one => return Ok(()),
        makers => makers,
    };
    let unknown = |why| refused(format!("whose it is cannot be looked up: {why}"));
    let makers = makers.map_err(unknown)?;
    for timer in unclear {
        let maker = makers.get(&timer.id).copied().filter(|maker| *maker > 0);
        let lost = || unknown(IoError::from(ErrorKind::NotFound));
        let maker = maker.ok_or_else(lost)?;
        if has_one && maker == facts.pid() {
            // It makes it again.
            continue;
        }
        timer.clock = !maker << 3 | timer.clock & CLOCK_KIND;
    }
    Ok(())
}

/// The threads by whose processor time the timers go of a process that is stopped, by the timers'
/// ids.
fn makers(process: &Process) -> std::io::Result<HashMap<i32, i32>> {
    let why = |why: &str| IoError::new(ErrorKind::Unsupported, why.to_owned());
    let kernel = Kernel::get().map_err(why)?;
    let process = kernel.owner(process)?.word("signal")?;
    let process = kernel.read("signal_struct", process)?;
    let timers = process.listed("posix_timers", ("k_itimer", "list"), TIMERS_MAX)?;
    let mut makers = HashMap::new();
    for timer in timers {
        if OWN_THREAD_CLOCKS.contains(&timer.half("it_clock")?.cast_signed()) {
            let maker = kernel.number(timer.word("it.cpu.pid")?)?;
            makers.insert(timer.half("it_id")?.cast_signed(), maker);
        }
    }
    Ok(makers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inherited::OnNeed;
    use crate::testing::Stage;

    /// Makes timers of several kinds, with gaps between their ids.
    fn make(stage: &mut Stage) {
        let tid = u64::from(stage.pid().cast_unsigned());
        let event = |value: u64, signal: u64, notify: u64| [value, notify << 32 | signal, tid];
        // Ids 0 to 5.
        let clocks: [i64; 6] = [0, 1, 1, 7, 2, 3];
        let notify = [0, 4, 0, 1, 0, 0];
        for (index, (clock, notify)) in (0u64..).zip(clocks.iter().zip(notify)) {
            let words = event(0xabc0 + index, 34 + index, notify);
            let clock = clock.cast_unsigned();
            let result = stage.call_with(Sysno::timer_create, &words, |at| [clock, at, at + 64]);
            assert_eq!((result, stage.word(64) & 0xffff_ffff), (0, index));
        }
        stage.call(Sysno::timer_delete, &[0]);
        stage.call(Sysno::timer_delete, &[2]);
        for (id, words) in [
            (1, [3, 5, 1000, 7]),
            (3, [0, 0, 2000, 0]),
            (4, [0, 0, 500, 0]),
        ] {
            stage.call_with(Sysno::timer_settime, &words, |at| [id, 0, at, 0]);
        }
    }

    fn timers_of(payload: &[u8]) -> Vec<Saved> {
        image::strict::decode::<Record>(payload)
            .expect("sound")
            .timers
    }

    fn survive(timer_ids: bool) {
        let mut stage = Stage::new();
        assert_eq!(stage.dump(&PosixTimers).expect("it is supported"), None);
        make(&mut stage);
        let mut fresh = Stage::new();
        let payload = stage
            .dump(&PosixTimers)
            .expect("it is supported")
            .expect("some");
        // The thread that is told has another id in the other process.
        let mut record = Record {
            timers: timers_of(&payload),
        };
        assert_eq!(record.timers[0].thread, stage.pid());
        record.timers[0].thread = fresh.pid();
        let payload = prost::Message::encode_to_vec(&record);
        let mut inherited = Stage::inherited();
        inherited.timer_ids = OnNeed::Known(timer_ids);
        fresh.restore_with(&[(&PosixTimers, Some(&payload))], &inherited);
        let again = fresh
            .dump(&PosixTimers)
            .expect("it is supported")
            .expect("some");
        let still = |timers: Vec<Saved>| {
            let timers = timers.into_iter();
            timers
                .map(|timer| Saved {
                    remaining_ns: 0,
                    ..timer
                })
                .collect::<Vec<_>>()
        };
        assert_eq!(still(timers_of(&payload)), still(timers_of(&again)));
        for (before, after) in timers_of(&payload).iter().zip(timers_of(&again)) {
            let gone_ns = before.remaining_ns.saturating_sub(after.remaining_ns);
            assert_eq!(before.remaining_ns == 0, after.remaining_ns == 0);
            assert!(gone_ns < 60 * NANOS, "{after:?}");
        }
        let ids: Vec<i32> = timers_of(&again).iter().map(|timer| timer.id).collect();
        assert_eq!(ids, [1, 3, 4, 5]);
        // Ids are chosen by the kernel again.
        let words = [0, 1 << 32];
        fresh.call_with(Sysno::timer_create, &words, |at| [1, at, at + 64]);
        assert!(fresh.word(64) & 0xffff_ffff != 0xffff_ffff);
    }

    #[test]
    fn timers_survive() {
        if !Stage::inherited().timer_ids.get() {
            testkit::skip!("needs PR_TIMER_CREATE_RESTORE_IDS of Linux 6.15");
        }
        survive(true);
    }

    #[test]
    fn timers_survive_on_older_kernels() {
        survive(false);
    }

    #[test]
    fn privileged_clocks_come_first_and_all_are_armed_last() {
        let timer = |id, clock| Saved {
            id,
            clock,
            remaining_ns: 1,
            ..Saved::default()
        };
        let record = Record {
            timers: vec![timer(3, 9), timer(4, 1)],
        };
        let payload = prost::Message::encode_to_vec(&record);
        let mut inherited = Stage::inherited();
        inherited.timer_ids = OnNeed::Known(true);
        let plan = Stage::plan_with(&PosixTimers, Some(&payload), &inherited).expect("sound");
        insta::assert_snapshot!(plan, @r"
        [Together]
        prctl(PR_TIMER_CREATE_RESTORE_IDS, on=1)
        timer_create(clock=9, event={value=0, signal=0, notify=0, tid=0}, id=3)  # timer 3
        prctl(PR_TIMER_CREATE_RESTORE_IDS, on=0)
        [Last]
        prctl(PR_TIMER_CREATE_RESTORE_IDS, on=1)
        timer_create(clock=1, event={value=0, signal=0, notify=0, tid=0}, id=4)  # timer 4
        prctl(PR_TIMER_CREATE_RESTORE_IDS, on=0)
        timer_settime(id=3, flags=0, new={interval_sec=0, interval_nsec=0, value_sec=0,
            value_nsec=1}, old=0)
        timer_settime(id=4, flags=0, new={interval_sec=0, interval_nsec=0, value_sec=0,
            value_nsec=1}, old=0)
        ");
    }

    #[test]
    fn ids_must_ascend_and_stay_in_reach() {
        let timer = |id| Saved {
            id,
            ..Saved::default()
        };
        let plan = |timers: &[Saved], timer_ids| {
            let payload = prost::Message::encode_to_vec(&Record {
                timers: timers.to_vec(),
            });
            let mut inherited = Stage::inherited();
            inherited.timer_ids = OnNeed::Known(timer_ids);
            Stage::plan_with(&PosixTimers, Some(&payload), &inherited)
        };
        plan(&[timer(3), timer(3)], true).expect_err("twice");
        plan(&[timer(-1)], true).expect_err("negative");
        plan(&[timer(1 << 30)], true).expect("possible");
        let error = plan(&[timer(1 << 30)], false).expect_err("too many to skip");
        assert!(
            error
                .to_string()
                .ends_with("PR_TIMER_CREATE_RESTORE_IDS of Linux 6.15")
        );
    }
}
