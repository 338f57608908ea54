//! Whether a thread writes pages back for others and must not wait for that itself
//! (`PR_SET_IO_FLUSHER`).
//!
//! - Kept: whether it is on.
//! - At a restore: "this process lacks CAP_SYS_RESOURCE to set it".
//! - CRIU 4.2: not kept.

use linux_raw_sys::prctl::{PR_GET_IO_FLUSHER, PR_SET_IO_FLUSHER};
use syscalls::Sysno;

use super::{Asked, Facts, Part, Phase, Planned, Scope, ThreadPlan, tags};
use crate::Result;
use crate::script::{Answers, Script};

/// `PF_MEMALLOC_NOIO | PF_LOCAL_THROTTLE` in the flags of /proc/PID/stat.
const FLAGS: u32 = 0x0008_0000 | 0x0010_0000;
const CAP_SYS_RESOURCE: u32 = linux_raw_sys::general::CAP_SYS_RESOURCE;

/// A thread's I/O flusher state.
pub struct IoFlusher;

/// Stands for a thread that is one.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {}

impl Part for IoFlusher {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::IO_FLUSHER
    }

    fn name(&self) -> &'static str {
        "I/O flusher"
    }

    fn scope(&self) -> Scope {
        Scope::Thread
    }

    /// A leader's flags are known anyway, and show that it is none.
    fn ask(&self, facts: &dyn Facts, questions: &mut Script) -> Result<Asked> {
        if facts.tid() == facts.pid() && facts.stat()?.flags & FLAGS == 0 {
            return Ok(Asked::default());
        }
        let step = questions.attempt(Sysno::prctl, [PR_GET_IO_FLUSHER.into()]);
        Ok(Asked {
            steps: vec![step],
            data: Vec::new(),
        })
    }

    /// A thread may only ask with the capability that it needs to set it. (One that is no leader
    /// and gave the capability up since is taken for none.)
    fn dump(&self, facts: &dyn Facts, asked: &Asked, answers: &Answers) -> Result<Option<Record>> {
        let Some(step) = asked.steps.first() else {
            return Ok(None);
        };
        let is_one = match answers.result(*step) {
            said @ 0.. => said != 0,
            _ if facts.tid() == facts.pid() => facts.stat()?.flags & FLAGS == FLAGS,
            _ => false,
        };
        Ok(is_one.then_some(Record {}))
    }

    fn describe(&self, _record: &Record) -> String {
        "yes".into()
    }

    fn plan(&self, record: Option<&Record>, who: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        if record.is_none() {
            return Ok(());
        }
        if !who.inherited.credentials.can(CAP_SYS_RESOURCE) {
            return Err(who.mismatch(self, "this process lacks CAP_SYS_RESOURCE to set it"));
        }
        let script = plan.at(Phase::Privileges);
        script.call(Sysno::prctl, [PR_SET_IO_FLUSHER.into(), 1u64.into()]);
        script.note(self.name());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Stage;

    #[test]
    fn flusher_survives() {
        let mut stage = Stage::new();
        assert_eq!(stage.dump(&IoFlusher).expect("it is supported"), None);
        if stage.attempt(Sysno::prctl, &[PR_SET_IO_FLUSHER.into(), 1]) != 0 {
            testkit::skip!("needs CAP_SYS_RESOURCE");
        }
        let payload = stage
            .dump(&IoFlusher)
            .expect("it is supported")
            .expect("it is one");
        let mut fresh = Stage::new();
        fresh.restore(&IoFlusher, Some(&payload));
        assert_eq!(
            fresh.dump(&IoFlusher).expect("it is supported"),
            Some(payload)
        );
    }

    #[test]
    fn the_missing_capability_is_named() {
        let mut inherited = Stage::inherited();
        inherited.credentials.effective |= 1 << CAP_SYS_RESOURCE;
        let plan = Stage::plan_with(&IoFlusher, Some(&[]), &inherited).expect("possible");
        assert_eq!(
            plan,
            "[Privileges]\nprctl(PR_SET_IO_FLUSHER, on=1)  # I/O flusher\n"
        );
        inherited.credentials.effective = 0;
        let error = Stage::plan_with(&IoFlusher, Some(&[]), &inherited).expect_err("impossible");
        let want = "task 1: I/O flusher: this process lacks CAP_SYS_RESOURCE to set it";
        assert_eq!(error.to_string(), want);
    }
}
