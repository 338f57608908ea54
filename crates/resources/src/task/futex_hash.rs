//! How many slots of its own a process has for futexes (`PR_FUTEX_HASH`, Linux 6.16).
//!
//! A process that makes its first thread is given some, and more when it has more threads. A number
//! that the process chose itself stays as it is. The dump takes a number for chosen if the kernel
//! would have given another one.
//!
//! - Kept: a number of slots that the kernel would not give it, as one that is chosen.
//! - CRIU 4.2: not kept.

use std::sync::OnceLock;

use syscalls::Sysno;

use super::{Asked, Facts, Holder, Part, Phase, Planned, Scope, ThreadPlan, tags};
use crate::script::{Answers, Script};
use crate::{Error, Result};

const PR_FUTEX_HASH: u32 = linux_raw_sys::prctl::PR_FUTEX_HASH;
const SET_SLOTS: u32 = 1;
const GET_SLOTS: u32 = 2;
/// The fewest that a process with threads is given.
const FEWEST: u64 = 16;

/// The slots for futexes.
pub struct FutexHash;

/// The number of slots.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// A power of 2, or 0 for those that all processes share.
    #[prost(uint64, tag = "1")]
    pub slots: u64,
}

/// True if the kernel gives a process with so many threads, on so many processors, these slots.
fn is_given(slots: u64, threads: u64, processors: impl FnOnce() -> u64) -> bool {
    if threads == 1 {
        return slots == 0;
    }
    let given = 4 * threads.min(processors());
    slots == given.next_power_of_two().max(FEWEST)
}

/// How many processors are online, as the kernel counts them: all, wherever this process may run.
fn processors() -> u64 {
    static ONLINE: OnceLock<u64> = OnceLock::new();
    *ONLINE.get_or_init(|| {
        let online = sys::per_cpu::online();
        online.map_or(1, |online| online.len() as u64)
    })
}

impl Part for FutexHash {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::FUTEX_HASH
    }

    fn name(&self) -> &'static str {
        "slots for futexes"
    }

    fn scope(&self) -> Scope {
        Scope::Process
    }

    fn holder(&self) -> Holder {
        Holder::Memory
    }

    fn ask(&self, _facts: &dyn Facts, questions: &mut Script) -> Result<Asked> {
        let step = questions.attempt(Sysno::prctl, [PR_FUTEX_HASH.into(), GET_SLOTS.into()]);
        Ok(Asked {
            steps: vec![step],
            data: Vec::new(),
        })
    }

    fn dump(&self, facts: &dyn Facts, asked: &Asked, answers: &Answers) -> Result<Option<Record>> {
        let Ok(slots) = u64::try_from(answers.result(asked.steps[0])) else {
            return Ok(None);
        };
        let threads = u64::from(facts.status()?.threads);
        let chosen = !is_given(slots, threads, processors);
        Ok(chosen.then_some(Record { slots }))
    }

    fn check(&self, record: &Record) -> Result<()> {
        let Record { slots } = *record;
        match slots != 0 && (slots == 1 || !slots.is_power_of_two()) {
            true => Err(Error::corrupt(self.name(), format!("{slots} slots"))),
            false => Ok(()),
        }
    }

    fn describe(&self, record: &Record) -> String {
        let Record { slots } = *record;
        slots.to_string()
    }

    /// On a kernel that has nothing of it all processes share theirs, and no call tells a
    /// difference.
    fn plan(&self, record: Option<&Record>, _: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        let Some(record) = record else {
            return Ok(());
        };
        let Record { slots } = *record;
        let script = plan.at(Phase::Together);
        let args = [PR_FUTEX_HASH.into(), SET_SLOTS.into(), slots.into()];
        script.attempt(Sysno::prctl, args);
        script.note(self.name());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Stage;

    #[test]
    fn chosen_slots_survive() {
        let mut stage = Stage::new();
        assert_eq!(stage.dump(&FutexHash).expect("it is supported"), None);
        let set = [PR_FUTEX_HASH.into(), SET_SLOTS.into(), 64];
        if stage.attempt(Sysno::prctl, &set) != 0 {
            testkit::skip!("this kernel has no slots of a process's own");
        }
        let payload = stage.dump(&FutexHash).expect("it is supported");
        let payload = payload.expect("it is chosen");
        assert_eq!(Stage::describe(&FutexHash, &payload).expect("sound"), "64");
        let mut fresh = Stage::new();
        fresh.restore(&FutexHash, Some(&payload));
        assert_eq!(
            fresh.dump(&FutexHash).expect("it is supported"),
            Some(payload)
        );
    }

    #[test]
    fn given_slots_are_those_of_threads_and_processors() {
        let is_given = |slots, threads, processors| is_given(slots, threads, || processors);
        assert!(is_given(0, 1, 8) && !is_given(16, 1, 8));
        assert!(is_given(16, 2, 8) && is_given(16, 100, 2));
        assert!(is_given(32, 8, 8) && is_given(32, 5, 8) && !is_given(0, 5, 8));
        let payload = prost::Message::encode_to_vec(&Record { slots: 3 });
        let error = Stage::plan(&FutexHash, Some(&payload)).expect_err("no power of 2");
        assert!(error.to_string().ends_with("3 slots"), "{error}");
    }
}
