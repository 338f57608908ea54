//! When, where and how often a thread gets a processor: policy, nice value, priority, affinity,
//! I/O priority, timer slack (sched(7), ioprio_set(2), `PR_SET_TIMERSLACK`).
//!
//! - Kept: policy with all its values (also `SCHED_DEADLINE`, slices, utilisation clamps), nice
//!   value, real-time priority, affinity, I/O priority, timer slack.
//! - At a restore: utilisation clamps, "…, which this kernel does not have".
//! - CRIU 4.2: policy, nice value and real-time priority; the others are not kept.

use std::ops::Range;
use std::sync::OnceLock;

use linux_raw_sys::prctl::{PR_GET_TIMERSLACK, PR_SET_TIMERSLACK};
use sys::own::{self, Attribute, SCHED_ATTR_BYTES};
use sys::proc::{Stat, Status};
use syscalls::Sysno;

use super::{Asked, Facts, Part, Phase, Planned, Scope, ThreadPlan, tags};
use crate::script::{Answers, Script};
use crate::{Error, Inherited, Result};

const SCHED_NORMAL: u32 = linux_raw_sys::general::SCHED_NORMAL;
const SCHED_FIFO: u32 = linux_raw_sys::general::SCHED_FIFO;
const SCHED_RR: u32 = linux_raw_sys::general::SCHED_RR;
const SCHED_IDLE: u32 = linux_raw_sys::general::SCHED_IDLE;
const SCHED_DEADLINE: u32 = linux_raw_sys::general::SCHED_DEADLINE;
/// `SCHED_FLAG_RESET_ON_FORK`, `_RECLAIM` and `_DL_OVERRUN`: those that `sched_getattr` gives.
const KEPT_FLAGS: u64 = 0b111;
/// `SCHED_FLAG_UTIL_CLAMP_MIN` and `_MAX`.
const CLAMP_FLAGS: u64 = 0x60;
/// The greatest utilisation.
const CLAMP_MOST: u32 = 1024;
const IOPRIO_WHO_PROCESS: u32 = 1;
/// The nice values.
const NICE: Range<i32> = -20..20;
/// The priority in /proc/PID/stat of a fair thread with nice value 0.
const PRIORITY_OF_NICE_0: i32 = 20;
/// More processors than any kernel is built for.
const CPU_WORDS_MAX: usize = 1024;

/// A thread's scheduling attributes.
pub struct Scheduling;

/// All scheduling attributes.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// `SCHED_OTHER` 0, `SCHED_FIFO` 1, …
    #[prost(uint32, tag = "1")]
    pub policy: u32,
    /// `SCHED_FLAG_` values.
    #[prost(uint64, tag = "2")]
    pub flags: u64,
    /// The nice value, also that of a real-time thread.
    #[prost(sint32, tag = "3")]
    pub nice: i32,
    /// The real-time priority.
    #[prost(uint32, tag = "4")]
    pub priority: u32,
    /// Deadline: the runtime; others: the slice, 0 for the host's default; in nanoseconds.
    #[prost(uint64, tag = "5")]
    pub runtime_ns: u64,
    /// Deadline: the relative deadline in nanoseconds.
    #[prost(uint64, tag = "6")]
    pub deadline_ns: u64,
    /// Deadline: the period in nanoseconds.
    #[prost(uint64, tag = "7")]
    pub period_ns: u64,
    /// The least utilisation to be assumed, of 1024.
    #[prost(uint32, tag = "8")]
    pub clamp_min: u32,
    /// The greatest utilisation to be assumed, of 1024.
    #[prost(uint32, tag = "9")]
    pub clamp_max: u32,
    /// The processors that it may run on: bit N of word N / 64.
    #[prost(fixed64, repeated, tag = "10")]
    pub cpus: Vec<u64>,
    /// The I/O priority's class and data; 0 when it follows the nice value.
    #[prost(uint32, tag = "11")]
    pub io_priority: u32,
    /// By how much timers may be late, in nanoseconds; 0 for real-time threads.
    #[prost(uint64, tag = "12")]
    pub timer_slack_ns: u64,
    /// Of an idle thread, the nice value of the priority that /proc/PID/stat shows, where it is
    /// not `nice`: sched_setattr(2) gives that priority and leaves the nice value.
    #[prost(sint32, optional, tag = "13")]
    pub idle_nice: Option<i32>,
}

/// Sets the I/O priority that a task has `inherited`, which gives it an I/O context.
pub fn keep_io_priority(inherited: &Inherited, script: &mut Script) {
    let value = inherited.scheduling.io_priority.into();
    script.call(
        Sysno::ioprio_set,
        [IOPRIO_WHO_PROCESS.into(), 0u64.into(), value],
    );
}

impl Record {
    /// The attributes of the calling thread, whose status is `status`.
    ///
    /// # Errors
    /// [`Error::Kernel`] on kernels before 3.14.
    pub(crate) fn own(status: &Status) -> Result<Self> {
        let kernel = |doing: &'static str| move |e| Error::kernel(doing, e);
        let mut record = Self::from_attr(&own::sched_attr().map_err(kernel("sched_getattr"))?);
        record.cpus.clone_from(&status.cpus);
        record.io_priority = own::io_priority().map_err(kernel("ioprio_get"))?;
        let slack = own::attribute(Attribute::TimerSlack);
        record.timer_slack_ns = slack.map_err(kernel("PR_GET_TIMERSLACK"))?;
        Ok(record)
    }

    /// That of a thread of the same process that has ended, as far as /proc shows it; `slack_ns` is
    /// its timer slack, if that is told.
    pub(crate) fn of_ended(self, stat: &Stat, status: &Status, slack_ns: Option<u64>) -> Self {
        let (policy, priority) = match stat.policy {
            SCHED_DEADLINE => (0, 0),
            policy => (policy, stat.rt_priority),
        };
        let same = policy == self.policy;
        Self {
            policy,
            priority,
            nice: stat.nice,
            flags: if same { self.flags } else { 0 },
            runtime_ns: if same { self.runtime_ns } else { 0 },
            deadline_ns: 0,
            period_ns: 0,
            cpus: status.cpus.clone(),
            timer_slack_ns: slack_ns.unwrap_or(self.timer_slack_ns),
            idle_nice: idle_nice(stat),
            ..self
        }
    }

    /// What a `struct sched_attr` says.
    fn from_attr(attr: &[u8; SCHED_ATTR_BYTES]) -> Self {
        let half = |at: usize| u32::from_le_bytes(attr[at..at + 4].try_into().expect("4 bytes"));
        let word = |at: usize| u64::from_le_bytes(attr[at..at + 8].try_into().expect("8 bytes"));
        Self {
            policy: half(4),
            flags: word(8) & KEPT_FLAGS,
            nice: half(16).cast_signed(),
            priority: half(20),
            runtime_ns: word(24),
            deadline_ns: word(32),
            period_ns: word(40),
            clamp_min: half(48),
            clamp_max: half(52),
            ..Self::default()
        }
    }

    fn clamps(&self) -> (u32, u32) {
        (self.clamp_min, self.clamp_max)
    }

    /// The clamps of a thread of this policy that has none of its own.
    fn default_clamps(&self) -> (u32, u32) {
        let boosted = [SCHED_FIFO, SCHED_RR].contains(&self.policy);
        (if boosted { CLAMP_MOST } else { 0 }, CLAMP_MOST)
    }

    /// Whether the clamps have to be set for a thread that starts with `inherited`. A kernel
    /// without them says 0 of both.
    fn clamps_differ(&self, inherited: &Self) -> bool {
        if self.clamps() == (0, 0) {
            return false;
        }
        let inherits =
            inherited.clamps() != inherited.default_clamps() && inherited.clamps() != (0, 0);
        let as_born = if inherits {
            inherited.clamps()
        } else {
            self.default_clamps()
        };
        self.clamps() != as_born
    }

    /// Whether the clamps would have to be set on a kernel that has none.
    fn lacks_clamps(&self, inherited: &Self) -> bool {
        // Without them, no thread is boosted.
        let is_usual = (0, CLAMP_MOST) == self.clamps();
        inherited.clamps() == (0, 0) && !is_usual && self.clamps_differ(inherited)
    }

    /// The `struct sched_attr` that has a thread which starts with `inherited` be scheduled like
    /// this.
    fn to_attr(&self, inherited: &Self) -> [u8; SCHED_ATTR_BYTES] {
        let clamped = self.clamps_differ(inherited) && inherited.clamps() != (0, 0);
        let flags = self.flags | if clamped { CLAMP_FLAGS } else { 0 };
        let runtime_ns = self.slice_or_runtime(inherited);
        let mut attr = Vec::with_capacity(SCHED_ATTR_BYTES);
        attr.extend((SCHED_ATTR_BYTES as u32).to_le_bytes());
        attr.extend(self.policy.to_le_bytes());
        attr.extend(flags.to_le_bytes());
        attr.extend(self.idle_nice.unwrap_or(self.nice).to_le_bytes());
        attr.extend(self.priority.to_le_bytes());
        for word in [runtime_ns, self.deadline_ns, self.period_ns] {
            attr.extend(word.to_le_bytes());
        }
        let (least, most) = if clamped { self.clamps() } else { (0, 0) };
        attr.extend(least.to_le_bytes());
        attr.extend(most.to_le_bytes());
        attr.try_into()
            .expect("the fields have the structure's size")
    }

    /// Whether `sched_setattr` has to be called for a thread that starts with `inherited`.
    fn attr_differs(&self, inherited: &Self) -> bool {
        let only_attr = |record: &Self| Self {
            cpus: Vec::new(),
            io_priority: 0,
            timer_slack_ns: 0,
            runtime_ns: record.slice_or_runtime(inherited),
            clamp_min: 0,
            clamp_max: 0,
            ..record.clone()
        };
        only_attr(self) != only_attr(inherited)
            || self.clamps_differ(inherited) && inherited.clamps() != (0, 0)
    }

    /// The runtime; of a fair thread the slice, 0 where that is the default or where the kernel of
    /// `inherited` has no slices.
    fn slice_or_runtime(&self, inherited: &Self) -> u64 {
        let is_default = self.runtime_ns == inherited.runtime_ns || inherited.runtime_ns == 0;
        if self.has_slice() && is_default {
            0
        } else {
            self.runtime_ns
        }
    }

    /// Whether the runtime is a slice.
    fn has_slice(&self) -> bool {
        self.policy != SCHED_DEADLINE
    }

    fn is_realtime(&self) -> bool {
        [SCHED_FIFO, SCHED_RR, SCHED_DEADLINE].contains(&self.policy)
    }

    /// What an idle thread has to be first, as the kernel does not take nice value and slice with
    /// that policy, though it keeps them.
    fn before_idle(&self) -> Option<Self> {
        let fair = || Self {
            policy: SCHED_NORMAL,
            idle_nice: None,
            ..self.clone()
        };
        (self.policy == SCHED_IDLE).then(fair)
    }
}

impl Part for Scheduling {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::SCHEDULING
    }

    fn name(&self) -> &'static str {
        "scheduling"
    }

    fn scope(&self) -> Scope {
        Scope::Thread
    }

    fn ask(&self, facts: &dyn Facts, questions: &mut Script) -> Result<Asked> {
        let zero = 0u64.into();
        let attr = questions.buffer(SCHED_ATTR_BYTES);
        let size = SCHED_ATTR_BYTES.into();
        questions.call(Sysno::sched_getattr, [zero, attr.into(), size, zero]);
        let mut steps = vec![
            questions.call(Sysno::ioprio_get, [IOPRIO_WHO_PROCESS.into(), zero]),
            questions.call(Sysno::prctl, [PR_GET_TIMERSLACK.into()]),
        ];
        // A process's stat says its leader's, and has been read.
        if facts.tid() != facts.pid() {
            steps.push(questions.call(Sysno::getpriority, [zero, zero]));
        }
        Ok(Asked {
            steps,
            data: vec![attr],
        })
    }

    fn dump(&self, facts: &dyn Facts, asked: &Asked, answers: &Answers) -> Result<Option<Record>> {
        let attr = answers.bytes(asked.data[0], SCHED_ATTR_BYTES);
        let mut record = Record::from_attr(attr.try_into().expect("as long as asked"));
        let [io_priority, slack] = [0, 1].map(|at| answers.result(asked.steps[at]));
        record.nice = match asked.steps.get(2) {
            // getpriority gives 20 - nice, so as to never look like an error.
            Some(step) => 20 - i32::try_from(answers.result(*step)).unwrap_or(20),
            None => facts.stat()?.nice,
        };
        if record.has_slice() && record.runtime_ns == usual_slice_ns() {
            record.runtime_ns = 0;
        }
        if record.policy == SCHED_IDLE {
            record.idle_nice = idle_nice(&*facts.stat()?);
        }
        record.io_priority = u32::try_from(io_priority).unwrap_or(0);
        record.timer_slack_ns = slack.cast_unsigned();
        record.cpus.clone_from(&facts.status()?.cpus);
        Ok(Some(record))
    }

    fn check(&self, record: &Record) -> Result<()> {
        let mut nice = record.idle_nice.iter().chain([&record.nice]);
        let is_nice = nice.all(|nice| NICE.contains(nice));
        let apart = record.idle_nice.is_some() && record.policy != SCHED_IDLE;
        match record.cpus.len() > CPU_WORDS_MAX || !is_nice || apart {
            true => Err(Error::corrupt(self.name(), format!("{record:?}"))),
            false => Ok(()),
        }
    }

    fn describe(&self, record: &Record) -> String {
        let names = [
            "other", "fifo", "rr", "batch", "iso", "idle", "deadline", "ext",
        ];
        let policy = names.get(record.policy as usize).copied();
        let mut text = policy.unwrap_or("unknown").to_owned();
        text.push_str(&match record.policy {
            SCHED_FIFO | SCHED_RR => format!(" priority {}", record.priority),
            _ => format!(" nice {}", record.nice),
        });
        let cpus = record.cpus.iter().rev();
        let cpus: Vec<_> = cpus.map(|word| format!("{word:x}")).collect();
        text.push_str(&format!(" cpus {}", cpus.join("_")));
        text
    }

    fn plan(&self, record: Option<&Record>, who: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        let Some(record) = record else {
            return Ok(());
        };
        let (script, inherited) = (plan.at(Phase::Privileges), &who.inherited.scheduling);
        if record.lacks_clamps(inherited) {
            let (least, most) = record.clamps();
            let what = format!("utilisation clamps ({least} to {most} of 1024)");
            return Err(who.mismatch(self, format!("{what}, which this kernel does not have")));
        }
        // Real-time threads have no slack, and switching back to the other policies sets it anew.
        if !record.is_realtime() && record.timer_slack_ns != inherited.timer_slack_ns {
            // 0, which a real-time thread gives its children, is to prctl the default.
            let slack = record.timer_slack_ns.max(1).into();
            script.call(Sysno::prctl, [PR_SET_TIMERSLACK.into(), slack]);
            script.note("timer slack");
        }
        if record.cpus != inherited.cpus {
            set_affinity(script, &record.cpus);
        }
        if record.io_priority != inherited.io_priority {
            let (who, value) = (IOPRIO_WHO_PROCESS.into(), record.io_priority.into());
            script.call(Sysno::ioprio_set, [who, 0u64.into(), value]);
        }
        if record.is_realtime() && record.nice != inherited.nice {
            script.call(
                Sysno::setpriority,
                [0u64.into(), 0u64.into(), record.nice.into()],
            );
        }
        if record.attr_differs(inherited) {
            let fair = record.before_idle();
            let first = fair.iter().filter(|fair| fair.attr_differs(inherited));
            for record in first.chain([record]) {
                let attr = script.bytes(&record.to_attr(inherited));
                script.call(
                    Sysno::sched_setattr,
                    [0u64.into(), attr.into(), 0u64.into()],
                );
                script.note(self.describe(record));
            }
        }
        Ok(())
    }
}

/// The nice value of an idle thread's priority, where that is not the thread's nice value.
fn idle_nice(stat: &Stat) -> Option<i32> {
    let nice = stat.priority - PRIORITY_OF_NICE_0;
    let is_apart = stat.policy == SCHED_IDLE && nice != stat.nice;
    (is_apart && NICE.contains(&nice)).then_some(nice)
}

/// The slice of a fair thread that has none of its own, which depends on the host: this process's.
fn usual_slice_ns() -> u64 {
    static SLICE: OnceLock<u64> = OnceLock::new();
    let look = || own::sched_attr().map_or(0, |attr| Record::from_attr(&attr).runtime_ns);
    *SLICE.get_or_init(look)
}

fn set_affinity(script: &mut Script, cpus: &[u64]) {
    let bytes: Vec<u8> = cpus.iter().flat_map(|word| word.to_le_bytes()).collect();
    let at = script.bytes(&bytes);
    script.call(
        Sysno::sched_setaffinity,
        [0u64.into(), bytes.len().into(), at.into()],
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Stage;

    fn survives(prepare: impl FnOnce(&mut Stage)) -> Record {
        let mut stage = Stage::new();
        prepare(&mut stage);
        let payload = stage
            .dump(&Scheduling)
            .expect("it is supported")
            .expect("always there");
        let mut fresh = Stage::new();
        fresh.restore(&Scheduling, Some(&payload));
        let again = fresh
            .dump(&Scheduling)
            .expect("it is supported")
            .expect("always there");
        let record: Record = image::strict::decode(&payload).expect("sound");
        assert_eq!(
            image::strict::decode::<Record>(&again).expect("sound"),
            record
        );
        record
    }

    #[test]
    fn nothing_is_called_for_an_ordinary_thread() {
        let mut stage = Stage::new();
        let payload = stage.dump(&Scheduling).expect("it is supported");
        assert_eq!(
            Stage::plan(&Scheduling, payload.as_deref()).expect("sound"),
            ""
        );
    }

    fn clamped(policy: u32, clamp_min: u32, clamp_max: u32) -> Record {
        Record {
            policy,
            clamp_min,
            clamp_max,
            ..Record::default()
        }
    }

    #[test]
    fn clamps_and_slices_at_their_defaults_are_not_set() {
        let (with, without) = (clamped(0, 0, 1024), clamped(0, 0, 0));
        for thread in [
            clamped(0, 0, 1024),
            clamped(0, 0, 0),
            clamped(SCHED_FIFO, 1024, 1024),
        ] {
            assert!(!thread.clamps_differ(&with), "{thread:?}");
            assert!(!thread.lacks_clamps(&without), "{thread:?}");
        }
        let slice = |runtime_ns| Record {
            runtime_ns,
            ..with.clone()
        };
        assert!(!slice(2_800_000).attr_differs(&without), "no slices there");
        assert!(!slice(0).attr_differs(&slice(1_400_000)), "the host's own");
        assert!(slice(2_800_000).attr_differs(&slice(1_400_000)));
        // As an image of a kernel with clamps has it, whatever this one has.
        let record = Record {
            clamp_max: 1024,
            ..Stage::inherited().scheduling
        };
        let payload = prost::Message::encode_to_vec(&record);
        assert_eq!(Stage::plan(&Scheduling, Some(&payload)).expect("sound"), "");
    }

    #[test]
    fn clamps_of_its_own_are_set_or_refused() {
        let (with, without) = (clamped(0, 0, 1024), clamped(0, 0, 0));
        for thread in [clamped(0, 200, 800), clamped(SCHED_FIFO, 0, 1024)] {
            assert!(thread.attr_differs(&with), "{thread:?}");
            let attr = thread.to_attr(&with);
            let flags = u64::from_le_bytes(attr[8..16].try_into().expect("8 bytes"));
            assert_eq!(flags, CLAMP_FLAGS);
            let back = Record::from_attr(&attr);
            assert_eq!(back.clamps(), thread.clamps());
        }
        // Who starts with some must lose them.
        assert!(with.clamps_differ(&clamped(0, 100, 900)));
        assert!(clamped(0, 200, 800).lacks_clamps(&without));
        let inherited = Stage::inherited().scheduling;
        if inherited.clamps() != (0, 0) {
            testkit::skip!("this kernel has clamps");
        }
        let record = Record {
            clamp_min: 200,
            clamp_max: 800,
            ..inherited
        };
        let payload = prost::Message::encode_to_vec(&record);
        let refused = Stage::plan(&Scheduling, Some(&payload)).expect_err("they are not there");
        let what = "scheduling: utilisation clamps (200 to 800 of 1024), which this kernel does \
                    not have";
        assert!(refused.to_string().ends_with(what), "{refused}");
    }

    #[test]
    fn nice_value_slack_affinity_and_io_priority_survive() {
        let record = survives(|stage| {
            stage.call(Sysno::setpriority, &[0, 0, 7]);
            stage.call(Sysno::prctl, &[PR_SET_TIMERSLACK.into(), 123_456]);
            stage.call(Sysno::ioprio_set, &[1, 0, 2 << 13 | 6]);
            stage.call_with(Sysno::sched_setaffinity, &[1], |at| [0, 8, at]);
        });
        assert_eq!(
            (record.policy, record.nice, record.timer_slack_ns),
            (0, 7, 123_456)
        );
        assert_eq!((record.cpus, record.io_priority), (vec![1], 2 << 13 | 6));
    }

    #[test]
    fn a_better_nice_value_and_batch_policy_survive() {
        testkit::needs_root!();
        let record = survives(|stage| {
            let attr = Record {
                policy: 3,
                nice: -5,
                ..Record::default()
            };
            let attr = attr.to_attr(&Record::default());
            let words: Vec<u64> = attr
                .chunks(8)
                .map(|bytes| u64::from_le_bytes(bytes.try_into().expect("8 bytes")))
                .collect();
            stage.call_with(Sysno::sched_setattr, &words, |at| [0, at, 0]);
        });
        assert_eq!((record.policy, record.nice), (3, -5));
    }

    #[test]
    fn realtime_policy_survives_with_reset_on_fork_and_nice_value() {
        testkit::needs_root!();
        let record = survives(|stage| {
            stage.call(Sysno::setpriority, &[0, 0, 3]);
            let reset_on_fork = 0x4000_0000;
            stage.call_with(Sysno::sched_setscheduler, &[40], |at| {
                [0, 2 | reset_on_fork, at]
            });
        });
        assert_eq!((record.policy, record.priority, record.flags), (2, 40, 1));
        assert_eq!((record.nice, record.timer_slack_ns), (3, 0));
    }

    #[test]
    fn idle_policy_survives_with_a_nice_value() {
        let record = survives(|stage| {
            stage.call(Sysno::setpriority, &[0, 0, 12]);
            stage.call_with(Sysno::sched_setscheduler, &[0], |at| [0, 5, at]);
        });
        assert_eq!((record.policy, record.nice), (5, 12));
    }

    #[test]
    fn idle_policy_survives_with_slice_and_priority_of_another_nice_value() {
        testkit::needs_root!();
        let record = survives(|stage| {
            let fair = Record {
                nice: 12,
                runtime_ns: 200_000,
                ..Record::default()
            };
            let idle = Record {
                policy: SCHED_IDLE,
                nice: 3,
                ..Record::default()
            };
            let inherited = Stage::inherited().scheduling;
            for attr in [fair, idle].map(|record| record.to_attr(&inherited)) {
                let words = attr.chunks(8).map(|word| word.try_into().expect("8 bytes"));
                let words: Vec<u64> = words.map(u64::from_le_bytes).collect();
                stage.call_with(Sysno::sched_setattr, &words, |at| [0, at, 0]);
            }
        });
        let kernel_has_slices = usual_slice_ns() != 0;
        let slice = if kernel_has_slices { 200_000 } else { 0 };
        assert_eq!((record.nice, record.idle_nice), (12, Some(3)));
        assert_eq!(record.runtime_ns, slice);
    }

    #[test]
    fn idle_thread_of_an_idle_restorer_stays_idle() {
        let idle = Record {
            policy: SCHED_IDLE,
            ..clamped(0, 0, 0)
        };
        assert!(!idle.attr_differs(&idle));
        let nicer = Record {
            nice: 3,
            ..idle.clone()
        };
        let policies = |record: &Record| {
            let fair = record.before_idle().filter(|fair| fair.attr_differs(&idle));
            fair.map(|fair| fair.policy)
        };
        assert!(nicer.attr_differs(&idle));
        assert_eq!(policies(&nicer), Some(SCHED_NORMAL));
    }

    #[test]
    fn a_fair_thread_without_slack_gets_the_least() {
        let record = Record {
            timer_slack_ns: 0,
            ..Stage::inherited().scheduling
        };
        let payload = prost::Message::encode_to_vec(&record);
        let plan = Stage::plan(&Scheduling, Some(&payload)).expect("sound");
        assert!(plan.contains("prctl(PR_SET_TIMERSLACK, ns=1)"), "{plan}");
    }

    #[test]
    fn deadline_policy_survives() {
        testkit::needs_root!();
        let record = survives(|stage| {
            let record = Record {
                policy: SCHED_DEADLINE,
                runtime_ns: 1_000_000,
                deadline_ns: 50_000_000,
                period_ns: 100_000_000,
                ..Record::default()
            };
            let attr = record.to_attr(&Record::default());
            let words = attr.chunks(8).map(|word| word.try_into().expect("8 bytes"));
            let words: Vec<u64> = words.map(u64::from_le_bytes).collect();
            stage.call_with(Sysno::sched_setattr, &words, |at| [0, at, 0]);
        });
        assert_eq!((record.policy, record.runtime_ns), (6, 1_000_000));
        assert_eq!(
            (record.deadline_ns, record.period_ns),
            (50_000_000, 100_000_000)
        );
    }

    #[test]
    fn privileged_attributes_come_before_privileges_are_lost() {
        let inherited = Stage::inherited();
        let record = Record {
            policy: SCHED_FIFO,
            priority: 10,
            nice: -3,
            cpus: vec![2],
            io_priority: 1 << 13,
            ..inherited.scheduling.clone()
        };
        let payload = prost::Message::encode_to_vec(&record);
        let plan = Stage::plan(&Scheduling, Some(&payload)).expect("sound");
        insta::assert_snapshot!(plan, @r"
        [Privileges]
        sched_setaffinity(tid=0, len=8, cpus=[1])
        ioprio_set(which=1, who=0, priority=0x2000)
        setpriority(which=0, who=0, nice=-3)
        sched_setattr(tid=0, attr={policy=1, flags=0, nice=-3, priority=10, runtime=0,
            deadline=0, period=0, util_min=0, util_max=0}, flags=0)  # fifo priority 10 cpus 2
        ");
    }
}
