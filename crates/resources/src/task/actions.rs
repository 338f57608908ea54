//! What a process does with each signal (sigaction(2)).
//!
//! - Kept: handler, flags, mask and restorer of each signal.
//! - CRIU 4.2: kept.

use syscalls::Sysno;

use super::{Asked, Facts, Holder, Part, Phase, Planned, Scope, ThreadPlan, tags};
use crate::script::{Answers, Script};
use crate::{Error, Result};

/// The size of the kernel's `struct sigaction` in bytes: handler, flags, restorer, mask.
const ACTION_BYTES: usize = 32;
/// The size of a signal mask in bytes.
const MASK_BYTES: u64 = 8;
const SIGKILL: u32 = linux_raw_sys::general::SIGKILL;
const SIGSTOP: u32 = linux_raw_sys::general::SIGSTOP;
const LAST_SIGNAL: u32 = 64;
/// The set of all signals.
const ALL: u64 = u64::MAX;

/// A process's signal actions.
pub struct Actions;

/// The actions that are not as in a fresh task.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// One a signal.
    #[prost(message, repeated, tag = "1")]
    pub actions: Vec<Action>,
    /// Whether 32-bit code has set them: handlers are called as such then. That it was it is told
    /// by the code that the process runs.
    #[prost(bool, tag = "2")]
    pub is_32_bit: bool,
}

/// What happens at one signal.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Action {
    /// The signal.
    #[prost(uint32, tag = "1")]
    pub signal: u32,
    /// The handler's address; 0 for the default action, 1 to ignore it.
    #[prost(fixed64, tag = "2")]
    pub handler: u64,
    /// `SA_` flags.
    #[prost(uint64, tag = "3")]
    pub flags: u64,
    /// The address that a handler returns to.
    #[prost(fixed64, tag = "4")]
    pub restorer: u64,
    /// The signals that are blocked meanwhile.
    #[prost(fixed64, tag = "5")]
    pub mask: u64,
}

impl Action {
    /// Whether a fresh task has it.
    fn is_fresh(&self) -> bool {
        let fresh = Self {
            signal: self.signal,
            ..Self::default()
        };
        *self == fresh
    }
}

impl Part for Actions {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::ACTIONS
    }

    fn name(&self) -> &'static str {
        "signal actions"
    }

    fn scope(&self) -> Scope {
        Scope::Process
    }

    fn holder(&self) -> Holder {
        Holder::Handlers
    }

    fn ask(&self, _: &dyn Facts, questions: &mut Script) -> Result<Asked> {
        let data = signals(ALL).map(|signal| {
            let buffer = questions.buffer(ACTION_BYTES);
            let size = MASK_BYTES.into();
            questions.call(
                Sysno::rt_sigaction,
                [signal.into(), 0u64.into(), buffer.into(), size],
            );
            buffer
        });
        Ok(Asked {
            steps: Vec::new(),
            data: data.collect(),
        })
    }

    fn dump(&self, facts: &dyn Facts, asked: &Asked, answers: &Answers) -> Result<Option<Record>> {
        let all = signals(ALL).zip(&asked.data);
        let actions = all.map(|(signal, at)| Action {
            signal,
            handler: answers.word(*at, 0),
            flags: answers.word(*at, 8),
            restorer: answers.word(*at, 16),
            mask: answers.word(*at, 24),
        });
        // A default action may have flags and a mask, which its program reads back.
        let actions = actions.filter(|action| !action.is_fresh());
        let record = Record {
            actions: actions.collect(),
            is_32_bit: facts.registers().is_32_bit(),
        };
        let set = !record.actions.is_empty();
        Ok(set.then_some(record))
    }

    fn check(&self, record: &Record) -> Result<()> {
        for action in &record.actions {
            let signal = action.signal;
            let known = (1..=LAST_SIGNAL).contains(&signal);
            if !known || [SIGKILL, SIGSTOP].contains(&signal) {
                return Err(Error::corrupt(self.name(), format!("signal {signal}")));
            }
            if record.is_32_bit && halves(action).is_none() {
                let what = format!("signal {signal} handled above 4 GiB");
                return Err(Error::corrupt(self.name(), what));
            }
        }
        Ok(())
    }

    fn describe(&self, record: &Record) -> String {
        let actions = record.actions.iter().map(|action| match action.handler {
            0 => format!("{} default", action.signal),
            1 => format!("{} ignored", action.signal),
            handler => format!("{} to {handler:#x}", action.signal),
        });
        actions.collect::<Vec<_>>().join(", ")
    }

    fn plan(&self, record: Option<&Record>, who: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        let record = record.cloned().unwrap_or_default();
        // A new process has no handlers, but goes on ignoring what the restorer ignores. First of
        // all: where SIGCHLD is ignored, children that should be zombies vanish. Other tasks have
        // their own actions or end by signals; if there are none, what stays ignored is set once.
        let again = record
            .actions
            .iter()
            .filter(|one| who.alone && one.handler == 1);
        let again = again.map(|one| one.signal).collect::<Vec<_>>();
        for signal in signals(who.inherited.ignored).filter(|signal| !again.contains(signal)) {
            set(
                plan.at(Phase::Fork),
                &Action {
                    signal,
                    ..Action::default()
                },
            );
        }
        let script = plan.at(Phase::Last);
        for action in &record.actions {
            match halves(action) {
                Some(halves) if record.is_32_bit => set_32(script, action, halves),
                _ => set(script, action),
            }
        }
        Ok(())
    }
}

/// The signals of a set whose actions can be set.
fn signals(set: u64) -> impl Iterator<Item = u32> {
    let fixed = 1 << (SIGKILL - 1) | 1 << (SIGSTOP - 1);
    let set = set & !fixed;
    (1..=LAST_SIGNAL).filter(move |signal| set & 1 << (signal - 1) != 0)
}

/// Handler, flags and restorer as 32-bit code has them; `None` for addresses that it has not.
fn halves(action: &Action) -> Option<[u32; 3]> {
    let halves = [action.handler, action.flags, action.restorer].map(u32::try_from);
    let [Ok(handler), Ok(flags), Ok(restorer)] = halves else {
        return None;
    };
    Some([handler, flags, restorer])
}

/// As [`set`], as 32-bit code does it.
fn set_32(script: &mut Script, action: &Action, halves: [u32; 3]) {
    let mut bytes = halves.map(u32::to_le_bytes).concat();
    bytes.extend(action.mask.to_le_bytes());
    let at = script.bytes(&bytes);
    let (new, old) = (at.into(), 0u64.into());
    script.call_32(
        Sysno::rt_sigaction,
        [action.signal.into(), new, old, MASK_BYTES.into()],
    );
}

fn set(script: &mut Script, action: &Action) {
    let words = [action.handler, action.flags, action.restorer, action.mask];
    let at = script.bytes(&words.map(u64::to_le_bytes).concat());
    let (new, old) = (at.into(), 0u64.into());
    script.call(
        Sysno::rt_sigaction,
        [action.signal.into(), new, old, MASK_BYTES.into()],
    );
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Stage;

    const SA_NOCLDWAIT: u64 = libc::SA_NOCLDWAIT as u64;
    const SA_RESTART: u64 = libc::SA_RESTART as u64;
    const SA_SIGINFO_ONSTACK_RESTORER: u64 = 4 | 0x0800_0000 | 0x0400_0000;

    fn set_action(stage: &mut Stage, signal: u64, words: [u64; 4]) {
        stage.call_with(Sysno::rt_sigaction, &words, |at| [signal, at, 0, 8]);
    }

    #[test]
    fn actions_survive() {
        let mut stage = Stage::new();
        stage.restore(&Actions, None);
        assert_eq!(stage.dump(&Actions).expect("it is supported"), None);
        let flags = SA_SIGINFO_ONSTACK_RESTORER;
        set_action(
            &mut stage,
            10,
            [0x40_1000, flags, 0x40_2000, 1 << 40 | 1 << 1],
        );
        set_action(&mut stage, 13, [1, 0, 0, 0]);
        set_action(&mut stage, 17, [0, SA_NOCLDWAIT, 0, 0]);
        set_action(&mut stage, 29, [0, 0, 0, 1 << 3]);
        set_action(&mut stage, 36, [0, SA_RESTART, 0, 0]);
        set_action(&mut stage, 64, [0x40_3000, flags, 0x40_2000, u64::MAX]);
        let payload = stage
            .dump(&Actions)
            .expect("it is supported")
            .expect("some are set");
        let shown = Stage::describe(&Actions, &payload).expect("sound");
        assert_eq!(
            shown,
            "10 to 0x401000, 13 ignored, 17 default, 29 default, 36 default, 64 to 0x403000"
        );
        let mut fresh = Stage::new();
        fresh.restore(&Actions, Some(&payload));
        assert_eq!(
            fresh.dump(&Actions).expect("it is supported"),
            Some(payload)
        );
    }

    #[test]
    fn what_the_restorer_ignores_is_not_ignored_by_the_task() {
        let mut inherited = Stage::inherited();
        inherited.ignored = 1 << 12 | 1 << 16;
        let action = Action {
            signal: 13,
            handler: 1,
            ..Action::default()
        };
        let record = Record {
            actions: vec![action],
            ..Record::default()
        };
        let payload = prost::Message::encode_to_vec(&record);
        let memory = crate::map::memory::Memory::default();
        let who = |alone| Planned {
            pid: 1,
            tid: 1,
            inherited: &inherited,
            alone,
            memory: &memory,
        };
        let mut plan = ThreadPlan::default();
        let planned = Actions.plan(Some(&record), who(true), &mut plan);
        planned.expect("sound");
        let first = plan.at(Phase::Fork).to_string();
        assert!(first.starts_with("rt_sigaction(signal=CHILD,") && first.lines().count() == 1);
        let plan = Stage::plan_with(&Actions, Some(&payload), &inherited).expect("sound");
        insta::assert_snapshot!(plan, @r"
        [Fork]
        rt_sigaction(signal=PIPE, new={handler=0, flags=0, restorer=0, mask=[]}, old=0,
            set_size=8)
        rt_sigaction(signal=CHILD, new={handler=0, flags=0, restorer=0, mask=[]}, old=0,
            set_size=8)
        [Last]
        rt_sigaction(signal=PIPE, new={handler=0x1, flags=0, restorer=0, mask=[]}, old=0,
            set_size=8)
        ");
    }

    #[test]
    fn actions_of_signals_that_have_none_are_corrupt() {
        for signal in [0, 9, 19, 65] {
            let action = Action {
                signal,
                handler: 1,
                ..Action::default()
            };
            let payload = prost::Message::encode_to_vec(&Record {
                actions: vec![action],
                ..Record::default()
            });
            let error = Stage::plan(&Actions, Some(&payload)).expect_err("no such action");
            let want = format!("image record task 1 signal actions: signal {signal}");
            assert_eq!(error.to_string(), want);
        }
    }

    #[test]
    fn actions_of_32_bit_code_are_set_by_calls_of_32_bits() {
        let action = |handler| Action {
            signal: 10,
            handler,
            flags: 4,
            restorer: 0,
            mask: 1 << 40,
        };
        let payload = |handler| {
            prost::Message::encode_to_vec(&Record {
                actions: vec![action(handler)],
                is_32_bit: true,
            })
        };
        let payload_low = payload(0x804_9000);
        // The plan does not depend on the state in which this process was started.
        let inherited = crate::Inherited::of_kernel();
        let plan = Stage::plan_with(&Actions, Some(&payload_low), &inherited).expect("sound");
        let plan = plan.to_string();
        let call = "32-bit rt_sigaction(signal=USR1, new={handler=0x8049000, flags=0x4,";
        assert!(plan.contains(call), "{plan}");
        let error = Stage::plan(&Actions, Some(&payload(1 << 32))).expect_err("too high");
        assert!(
            error.to_string().ends_with("signal 10 handled above 4 GiB"),
            "{error}"
        );
    }
}
