//! Signals that were sent and not yet delivered, to a process and to each of its threads, with all
//! that the kernel knows about them (`siginfo_t`).
//!
//! A task may queue any information to itself (rt_sigqueueinfo(2)): the process's queue is filled
//! by its leader, a thread's by itself, while all signals are blocked.
//!
//! - What: pending signals
//! - Kept: of the process and of each thread, with all that came with them.
//! - Refused: "a SIGKILL on its way".
//! - CRIU 4.2: kept; what becomes of a `SIGKILL` is not known.

use syscalls::Sysno;

use super::{Asked, Facts, Part, Phase, Planned, Scope, ThreadPlan, tags};
use crate::script::Answers;
use crate::{Error, Result};

/// The size of `siginfo_t` in bytes.
const INFO_BYTES: usize = 128;
/// Where a POSIX timer's signal has a word that only the kernel may set.
const SYS_PRIVATE: std::ops::Range<usize> = 32..36;
const SI_TIMER: i32 = libc::SI_TIMER;
const SIGKILL: i32 = libc::SIGKILL;
const SIGSTOP: i32 = libc::SIGSTOP;
const LAST_SIGNAL: i32 = 64;

/// A queue of signals.
pub struct Pending {
    tag: u16,
    name: &'static str,
    scope: Scope,
}

/// The signals of a thread.
pub static THREAD: Pending = Pending {
    tag: tags::PENDING,
    name: "pending signals",
    scope: Scope::Thread,
};

/// The signals of a process, for any of its threads.
pub static PROCESS: Pending = Pending {
    tag: tags::SHARED_PENDING,
    name: "pending signals of the process",
    scope: Scope::Process,
};

/// A queue, oldest first.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// Each signal's `siginfo_t`, 128 bytes.
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub infos: Vec<Vec<u8>>,
}

impl Record {
    /// Whether the queue has this signal.
    #[must_use]
    pub fn has(&self, signal: i32) -> bool {
        self.infos.iter().any(|info| number(info, 0) == signal)
    }
}

impl Pending {
    fn is_shared(&self) -> bool {
        self.scope == Scope::Process
    }
}

impl Part for Pending {
    type Record = Record;

    fn tag(&self) -> u16 {
        self.tag
    }

    fn name(&self) -> &'static str {
        self.name
    }

    fn scope(&self) -> Scope {
        self.scope
    }

    fn dump(&self, facts: &dyn Facts, _: &Asked, _: &Answers) -> Result<Option<Record>> {
        let status = facts.status()?;
        let set = if self.is_shared() {
            status.shared_pending
        } else {
            status.pending
        };
        // A stop takes effect in the dump: it belongs to the task's state.
        let set = set & !(1 << (SIGSTOP - 1));
        if set == 0 {
            return Ok(None);
        }
        let mut infos = facts.pending(self.is_shared())?;
        infos.retain(|info| number(info, 0) != SIGSTOP);
        let queued = infos.iter().map(|info| 1 << (number(info, 0) - 1));
        let queued = queued.fold(0u64, |all, bit| all | bit);
        // Where memory or the limit did not suffice, the kernel keeps the signal but not the rest.
        for signal in (1..=LAST_SIGNAL).filter(|signal| set & !queued & 1 << (signal - 1) != 0) {
            let mut info = [0; INFO_BYTES];
            info[..4].copy_from_slice(&signal.to_le_bytes());
            infos.push(info);
        }
        if infos.iter().any(|info| number(info, 0) == SIGKILL) {
            let what = "a SIGKILL on its way";
            return Err(Error::unsupported(facts.tid(), what));
        }
        let infos = infos.iter().map(|info| info.to_vec()).collect();
        Ok(Some(Record { infos }))
    }

    fn check(&self, record: &Record) -> Result<()> {
        for info in &record.infos {
            if info.len() != INFO_BYTES {
                let what = "a siginfo_t of another size";
                return Err(Error::corrupt(self.name(), what));
            }
            let signal = number(info, 0);
            let known = (1..=LAST_SIGNAL).contains(&signal);
            if !known || [SIGKILL, SIGSTOP].contains(&signal) {
                return Err(Error::corrupt(self.name(), format!("signal {signal}")));
            }
        }
        Ok(())
    }

    fn describe(&self, record: &Record) -> String {
        let infos = record.infos.iter();
        let infos = infos.map(|info| format!("{} (code {})", number(info, 0), number(info, 8)));
        infos.collect::<Vec<_>>().join(", ")
    }

    fn plan(&self, record: Option<&Record>, who: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        let script = plan.at(Phase::Last);
        for info in record.iter().flat_map(|record| &record.infos) {
            let mut info = info.clone();
            let signal = number(&info, 0);
            if number(&info, 8) == SI_TIMER {
                info[SYS_PRIVATE].fill(0);
            }
            let at = script.bytes(&info).into();
            let (pid, tid, signal) = (who.pid.into(), who.tid.into(), signal.into());
            if self.is_shared() {
                script.call(Sysno::rt_sigqueueinfo, [pid, signal, at]);
            } else {
                script.call(Sysno::rt_tgsigqueueinfo, [pid, tid, signal, at]);
            }
        }
        Ok(())
    }
}

/// The number at `offset` of a `siginfo_t`: 0 the signal, 8 the code.
fn number(info: &[u8], offset: usize) -> i32 {
    i32::from_le_bytes(info[offset..offset + 4].try_into().expect("four bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Stage;

    const SI_QUEUE: u32 = libc::SI_QUEUE as u32;

    /// Queues signals of several kinds to the process and its thread.
    fn fill(stage: &mut Stage) {
        let pid = u64::from(stage.pid().cast_unsigned());
        stage.call(Sysno::kill, &[pid, 10]);
        stage.call(Sysno::tgkill, &[pid, pid, 12]);
        for value in [1, 2, 3] {
            let info = [u64::from(40u32), u64::from(SI_QUEUE), 7, value];
            stage.call_with(Sysno::rt_sigqueueinfo, &info, |at| [pid, 40, at]);
            let info = [u64::from(41u32), u64::from(SI_QUEUE), 7, value << 40];
            stage.call_with(Sysno::rt_tgsigqueueinfo, &info, |at| [pid, pid, 41, at]);
        }
        // As the kernel sends it: SIGCHLD with CLD_EXITED, of pid 77, status 3.
        let info = [17, 1, 77, 3];
        stage.call_with(Sysno::rt_sigqueueinfo, &info, |at| [pid, 17, at]);
        // As a timer sends it, after 5 overruns.
        let info = [42, u64::from(SI_TIMER.cast_unsigned()), 5 << 32 | 1, 0xabcd];
        stage.call_with(Sysno::rt_sigqueueinfo, &info, |at| [pid, 42, at]);
    }

    #[test]
    fn both_queues_survive_in_order() {
        let mut stage = Stage::new();
        assert_eq!(stage.dump(&THREAD).expect("it is supported"), None);
        assert_eq!(stage.dump(&PROCESS).expect("it is supported"), None);
        fill(&mut stage);
        let thread = stage
            .dump(&THREAD)
            .expect("it is supported")
            .expect("it is full");
        let process = stage
            .dump(&PROCESS)
            .expect("it is supported")
            .expect("it is full");
        let mut fresh = Stage::new();
        fresh.restore_all(&[(&THREAD, Some(&thread)), (&PROCESS, Some(&process))]);
        assert_eq!(
            fresh.dump(&THREAD).expect("it is supported"),
            Some(thread.clone())
        );
        assert_eq!(
            fresh.dump(&PROCESS).expect("it is supported"),
            Some(process.clone())
        );
        let shown = Stage::describe(&THREAD, &thread).expect("sound");
        assert_eq!(
            shown,
            "12 (code -6), 41 (code -1), 41 (code -1), 41 (code -1)"
        );
        let shown = Stage::describe(&PROCESS, &process).expect("sound");
        assert!(
            shown.contains("17 (code 1)") && shown.contains("42 (code -2)"),
            "{shown}"
        );
    }

    #[test]
    fn a_restored_signal_tells_its_receiver_all() {
        let mut stage = Stage::new();
        fill(&mut stage);
        let process = stage
            .dump(&PROCESS)
            .expect("it is supported")
            .expect("it is full");
        let mut fresh = Stage::new();
        fresh.restore(&PROCESS, Some(&process));
        for value in [1, 2, 3] {
            // rt_sigtimedwait for signal 40; the information 64 bytes behind the mask.
            let args = |at| [at, at + 64, 0, 8];
            assert_eq!(
                fresh.call_with(Sysno::rt_sigtimedwait, &[1 << 39], args),
                40
            );
            assert_eq!((fresh.word(80), fresh.word(88)), (7, value));
        }
        let args = |at| [at, at + 64, 0, 8];
        assert_eq!(
            fresh.call_with(Sysno::rt_sigtimedwait, &[1 << 41], args),
            42
        );
        assert_eq!((fresh.word(80), fresh.word(88)), (5 << 32 | 1, 0xabcd));
    }

    #[test]
    fn what_cannot_have_been_queued_is_corrupt() {
        let plan = |info: Vec<u8>| {
            let payload = prost::Message::encode_to_vec(&Record { infos: vec![info] });
            Stage::plan(&THREAD, Some(&payload))
                .expect_err("not possible")
                .to_string()
        };
        assert!(plan(vec![0; 127]).contains("another size"));
        for signal in [0, 9, 19, 65] {
            let mut info = vec![0; INFO_BYTES];
            info[0] = signal;
            assert!(plan(info).ends_with(&format!("signal {signal}")));
        }
    }
}
