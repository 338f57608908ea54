//! The three interval timers of a process (setitimer(2)).
//!
//! - Kept: what was left of each, and its interval.
//! - CRIU 4.2: kept.

use syscalls::Sysno;

use super::{Asked, Facts, Part, Phase, Planned, Scope, ThreadPlan, tags};
use crate::script::{Answers, Script};
use crate::{Error, Result};

/// The timers' names, by number.
const NAMES: [&str; 3] = ["ITIMER_REAL", "ITIMER_VIRTUAL", "ITIMER_PROF"];
/// The size of `struct itimerval` in bytes: interval and value, each seconds and microseconds.
const TIMER_BYTES: usize = 32;
const MICROS: u64 = 1_000_000;

/// A process's interval timers.
pub struct Itimers;

/// The timers that are armed.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// One a timer.
    #[prost(message, repeated, tag = "1")]
    pub timers: Vec<Itimer>,
}

/// An armed timer.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Itimer {
    /// `ITIMER_REAL` 0, `ITIMER_VIRTUAL` 1, `ITIMER_PROF` 2.
    #[prost(uint32, tag = "1")]
    pub which: u32,
    /// The time that remained, in microseconds.
    #[prost(uint64, tag = "2")]
    pub value_us: u64,
    /// The time between later expirations in microseconds; 0 for none.
    #[prost(uint64, tag = "3")]
    pub interval_us: u64,
}

impl Part for Itimers {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::ITIMERS
    }

    fn name(&self) -> &'static str {
        "interval timers"
    }

    fn scope(&self) -> Scope {
        Scope::Process
    }

    fn ask(&self, _facts: &dyn Facts, questions: &mut Script) -> Result<Asked> {
        let data = (0..NAMES.len()).map(|which| {
            let buffer = questions.buffer(TIMER_BYTES);
            questions.call(Sysno::getitimer, [which.into(), buffer.into()]);
            buffer
        });
        Ok(Asked {
            steps: Vec::new(),
            data: data.collect(),
        })
    }

    fn dump(&self, facts: &dyn Facts, asked: &Asked, answers: &Answers) -> Result<Option<Record>> {
        const SIGALRM: u64 = 1 << 13;
        // The kernel starts a repeating timer again when its signal is taken, not when it expires:
        // until then it has an interval but no value (one that was disarmed has neither). If it
        // expired after the pending signals were listed, it has to expire again at once.
        let listed = facts.status()?.shared_pending & SIGALRM != 0;
        let timers = (0..).zip(&asked.data).map(|(which, at)| {
            let value_us = answers.word(*at, 16) * MICROS + answers.word(*at, 24);
            let interval_us = answers.word(*at, 0) * MICROS + answers.word(*at, 8);
            let value_us = match (which, value_us) {
                (0, 0) if interval_us > 0 && listed => interval_us,
                (0, 0) => interval_us.min(1),
                (_, value_us) => value_us,
            };
            Itimer {
                which,
                value_us,
                interval_us,
            }
        });
        let timers = timers.filter(|timer| timer.value_us != 0);
        let record = Record {
            timers: timers.collect(),
        };
        let armed = !record.timers.is_empty();
        Ok(armed.then_some(record))
    }

    fn check(&self, record: &Record) -> Result<()> {
        let mut numbers = record.timers.iter().map(|timer| timer.which);
        match numbers.find(|which| *which as usize >= NAMES.len()) {
            Some(which) => Err(Error::corrupt(self.name(), format!("timer {which}"))),
            None => Ok(()),
        }
    }

    fn describe(&self, record: &Record) -> String {
        let timers = record.timers.iter().map(|timer| {
            let name = NAMES.get(timer.which as usize).unwrap_or(&"unknown");
            format!(
                "{name} in {} us every {} us",
                timer.value_us, timer.interval_us
            )
        });
        timers.collect::<Vec<_>>().join(", ")
    }

    fn plan(&self, record: Option<&Record>, who: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        let record = record.cloned().unwrap_or_default();
        for timer in &record.timers {
            // The kernel adds a tick to the value of a timer that measures processor time.
            let added = if timer.which == 0 {
                0
            } else {
                who.inherited.tick_us.get()
            };
            let value = timer.value_us.saturating_sub(added).max(1);
            let interval = timer.interval_us;
            let words = [
                interval / MICROS,
                interval % MICROS,
                value / MICROS,
                value % MICROS,
            ];
            let script = plan.at(Phase::Last);
            let at = script.bytes(&words.map(u64::to_le_bytes).concat());
            script.call(Sysno::setitimer, [timer.which.into(), at.into()]);
            script.note(NAMES[timer.which as usize]);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Stage;

    #[test]
    fn remaining_times_and_intervals_survive() {
        let mut stage = Stage::new();
        assert_eq!(stage.dump(&Itimers).expect("it is supported"), None);
        stage.call_with(Sysno::setitimer, &[7, 8, 3600, 500_000], |at| [0, at, 0]);
        stage.call_with(Sysno::setitimer, &[0, 0, 2, 0], |at| [1, at, 0]);
        stage.call_with(Sysno::setitimer, &[1, 0, 1800, 0], |at| [2, at, 0]);
        let payload = stage
            .dump(&Itimers)
            .expect("it is supported")
            .expect("all are armed");
        let mut fresh = Stage::new();
        fresh.restore(&Itimers, Some(&payload));
        let again = fresh
            .dump(&Itimers)
            .expect("it is supported")
            .expect("all are armed");
        let times = |payload: &[u8]| {
            image::strict::decode::<Record>(payload)
                .expect("sound")
                .timers
        };
        for (before, after) in times(&payload).iter().zip(times(&again)) {
            assert_eq!(
                (before.which, before.interval_us),
                (after.which, after.interval_us)
            );
            let gone_us = before.value_us.saturating_sub(after.value_us);
            assert!(
                before.value_us >= after.value_us && gone_us < 60_000_000,
                "{after:?}"
            );
        }
        let intervals: Vec<u64> = times(&again)
            .iter()
            .map(|timer| timer.interval_us)
            .collect();
        assert_eq!(intervals, [7_000_008, 0, 1_000_000]);
    }

    #[test]
    fn a_fourth_timer_is_corrupt() {
        let timer = Itimer {
            which: 3,
            value_us: 1,
            interval_us: 0,
        };
        let payload = prost::Message::encode_to_vec(&Record {
            timers: vec![timer],
        });
        let error = Stage::plan(&Itimers, Some(&payload)).expect_err("there are three");
        assert_eq!(
            error.to_string(),
            "image record task 1 interval timers: timer 3"
        );
    }
}
