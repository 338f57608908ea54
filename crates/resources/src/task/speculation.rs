//! Which speculation misfeatures a thread has switched off for itself
//! (`PR_SET_SPECULATION_CTRL`).
//!
//! - Kept: store bypass, indirect branches, flush of the L1 cache.
//! - CRIU 4.2: not kept.

use linux_raw_sys::prctl::{
    PR_GET_SPECULATION_CTRL, PR_SET_SPECULATION_CTRL, PR_SPEC_DISABLE, PR_SPEC_DISABLE_NOEXEC,
    PR_SPEC_ENABLE, PR_SPEC_FORCE_DISABLE, PR_SPEC_INDIRECT_BRANCH, PR_SPEC_L1D_FLUSH,
    PR_SPEC_PRCTL, PR_SPEC_STORE_BYPASS,
};
use syscalls::Sysno;

use super::{Asked, Facts, Part, Phase, Planned, Scope, ThreadPlan, tags};
use crate::script::{Answers, Script};
use crate::{Error, Result};

const MISFEATURES: [(u32, &str); 3] = [
    (PR_SPEC_STORE_BYPASS, "store bypass"),
    (PR_SPEC_INDIRECT_BRANCH, "indirect branch"),
    (PR_SPEC_L1D_FLUSH, "L1 cache flush"),
];
const STATES: u32 =
    PR_SPEC_ENABLE | PR_SPEC_DISABLE | PR_SPEC_FORCE_DISABLE | PR_SPEC_DISABLE_NOEXEC;

/// A thread's speculation controls.
pub struct Speculation;

/// The controls that are not as in a fresh task.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// One a misfeature.
    #[prost(message, repeated, tag = "1")]
    pub controls: Vec<Control>,
}

/// The control of one misfeature.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Control {
    /// `PR_SPEC_STORE_BYPASS` 0, `_INDIRECT_BRANCH` 1, `_L1D_FLUSH` 2.
    #[prost(uint32, tag = "1")]
    pub misfeature: u32,
    /// `PR_SPEC_ENABLE` 2, `_DISABLE` 4, `_FORCE_DISABLE` 8, `_DISABLE_NOEXEC` 16.
    #[prost(uint32, tag = "2")]
    pub state: u32,
}

impl Control {
    /// What a thread says that never set it. The flush of the L1 cache is off ("disabled") until
    /// it is asked for, the others' speculation is on until it is switched off.
    fn plain(misfeature: u32) -> u32 {
        if misfeature == PR_SPEC_L1D_FLUSH {
            PR_SPEC_DISABLE
        } else {
            PR_SPEC_ENABLE
        }
    }

    /// What a thread said of a misfeature, if it has set it for itself.
    fn of(misfeature: u32, said: i64) -> Option<Self> {
        let said = u32::try_from(said).ok()?;
        let state = said & STATES;
        // Without this bit the whole system has one state, which no thread can change.
        let own = said & PR_SPEC_PRCTL != 0 && state != Self::plain(misfeature);
        own.then_some(Self { misfeature, state })
    }
}

impl Part for Speculation {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::SPECULATION
    }

    fn name(&self) -> &'static str {
        "speculation controls"
    }

    fn scope(&self) -> Scope {
        Scope::Thread
    }

    fn ask(&self, facts: &dyn Facts, questions: &mut Script) -> Result<Asked> {
        let status = facts.status()?;
        let asked = MISFEATURES.iter().filter(|(which, _)| match *which {
            PR_SPEC_STORE_BYPASS => may_be_set(&status.store_bypass),
            PR_SPEC_INDIRECT_BRANCH => may_be_set(&status.indirect_branch),
            _ => true,
        });
        let steps = asked.map(|(which, _)| {
            questions.attempt(
                Sysno::prctl,
                [PR_GET_SPECULATION_CTRL.into(), (*which).into()],
            )
        });
        Ok(Asked {
            steps: steps.collect(),
            data: Vec::new(),
        })
    }

    fn dump(&self, facts: &dyn Facts, asked: &Asked, answers: &Answers) -> Result<Option<Record>> {
        let status = facts.status()?;
        let mut steps = asked.steps.iter();
        let mut controls = Vec::new();
        let asked = [
            (PR_SPEC_STORE_BYPASS, may_be_set(&status.store_bypass)),
            (PR_SPEC_INDIRECT_BRANCH, may_be_set(&status.indirect_branch)),
            (PR_SPEC_L1D_FLUSH, true),
        ];
        for (misfeature, _) in asked.iter().filter(|(_, asked)| *asked) {
            let said = steps.next().map_or(-1, |step| answers.result(*step));
            controls.extend(Control::of(*misfeature, said));
        }
        let record = Record { controls };
        let set = !record.controls.is_empty();
        Ok(set.then_some(record))
    }

    fn check(&self, record: &Record) -> Result<()> {
        let known = |control: &Control| {
            let number = control.misfeature as usize;
            number < MISFEATURES.len() && control.state.is_power_of_two()
        };
        match record.controls.iter().find(|control| !known(control)) {
            Some(control) => Err(Error::corrupt(self.name(), format!("{control:?}"))),
            None => Ok(()),
        }
    }

    fn describe(&self, record: &Record) -> String {
        let controls = record.controls.iter().map(|control| {
            let name = MISFEATURES.get(control.misfeature as usize);
            let name = name.map_or("unknown", |(_, name)| *name);
            format!("{name} {}", control.state)
        });
        controls.collect::<Vec<_>>().join(", ")
    }

    fn plan(&self, record: Option<&Record>, _: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        let record = record.cloned().unwrap_or_default();
        for control in &record.controls {
            let (misfeature, name) = MISFEATURES[control.misfeature as usize];
            let script = plan.at(Phase::Last);
            let set = PR_SET_SPECULATION_CTRL.into();
            script.call(Sysno::prctl, [set, misfeature.into(), control.state.into()]);
            script.note(name);
        }
        Ok(())
    }
}

/// Whether a thread may have set what its status describes like this. "Vulnerable" is also what
/// `PR_SPEC_DISABLE_NOEXEC` looks like.
fn may_be_set(described: &str) -> bool {
    let fixed = [
        "",
        "unknown",
        "not vulnerable",
        "not affected",
        "unsupported",
    ];
    let fixed = fixed.contains(&described);
    !fixed && !described.starts_with("globally") && !described.starts_with("always")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Stage;

    #[test]
    fn what_a_thread_says_is_judged_by_who_decides() {
        let by_thread = |state: u32| i64::from(PR_SPEC_PRCTL | state);
        let bypass = |said| Control::of(PR_SPEC_STORE_BYPASS, said);
        assert_eq!(bypass(by_thread(PR_SPEC_ENABLE)), None);
        assert_eq!(bypass(i64::from(PR_SPEC_DISABLE)), None);
        assert_eq!(bypass(-22), None);
        let state = PR_SPEC_FORCE_DISABLE;
        assert_eq!(
            bypass(by_thread(state)),
            Some(Control {
                misfeature: 0,
                state
            })
        );
        assert_eq!(
            Control::of(PR_SPEC_L1D_FLUSH, by_thread(PR_SPEC_DISABLE)),
            None
        );
    }

    #[test]
    fn controls_survive() {
        let control = [PR_SET_SPECULATION_CTRL.into(), 0, PR_SPEC_DISABLE.into()];
        let mut stage = Stage::new();
        if stage.attempt(Sysno::prctl, &control) != 0 {
            testkit::skip!("threads have no say in speculation here");
        }
        let payload = stage
            .dump(&Speculation)
            .expect("it is supported")
            .expect("one is set");
        let mut fresh = Stage::new();
        fresh.restore(&Speculation, Some(&payload));
        assert_eq!(
            fresh.dump(&Speculation).expect("it is supported"),
            Some(payload)
        );
    }

    #[test]
    fn controls_are_planned_by_name() {
        let control = |misfeature, state| Control { misfeature, state };
        let record = Record {
            controls: vec![control(1, PR_SPEC_DISABLE), control(0, 8)],
        };
        let payload = prost::Message::encode_to_vec(&record);
        let plan = Stage::plan(&Speculation, Some(&payload)).expect("sound");
        insta::assert_snapshot!(plan, @r"
        [Last]
        prctl(PR_SET_SPECULATION_CTRL, feature=1, state=0x4)  # indirect branch
        prctl(PR_SET_SPECULATION_CTRL, feature=0, state=0x8)  # store bypass
        ");
        let record = Record {
            controls: vec![control(3, PR_SPEC_DISABLE)],
        };
        let payload = prost::Message::encode_to_vec(&record);
        Stage::plan(&Speculation, Some(&payload)).expect_err("no such misfeature");
    }
}
