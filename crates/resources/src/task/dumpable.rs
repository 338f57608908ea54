//! Whether a process leaves core dumps and may be looked at by its user (`PR_SET_DUMPABLE`).
//!
//! The attribute belongs to the memory that all threads share, and whenever one of them changes
//! its credentials it becomes what /proc/sys/fs/suid_dumpable says. So each thread sets it after
//! its own change: whoever is last sets it right.
//!
//! - Kept: the mode.
//! - At a restore: "2 needs 2 in /proc/sys/fs/suid_dumpable".
//! - CRIU 4.2: kept.

use linux_raw_sys::prctl::{PR_GET_DUMPABLE, PR_SET_DUMPABLE};
use syscalls::Sysno;

use super::{Asked, Facts, Part, Phase, Planned, Scope, ThreadPlan, tags};
use crate::script::{Answers, Script};
use crate::{Error, Result};

/// `SUID_DUMP_ROOT`: only root may read the core dump. `PR_SET_DUMPABLE` does not take it.
const ROOT_ONLY: u32 = 2;

/// A process's dumpable attribute.
pub struct Dumpable;

/// The attribute.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// 0 not dumpable, 1 dumpable, 2 dumpable for root only.
    #[prost(uint32, tag = "1")]
    pub mode: u32,
}

fn set(plan: &mut ThreadPlan, mode: u32) {
    let script = plan.at(Phase::Last);
    script.call(Sysno::prctl, [PR_SET_DUMPABLE.into(), mode.into()]);
    script.note(Dumpable.name());
}

/// Has a thread set the attribute that is going to change its credentials.
pub(super) fn set_again(plan: &mut ThreadPlan) {
    if let Some(mode) = plan.dumpable.take() {
        set(plan, mode);
    }
}

impl Part for Dumpable {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::DUMPABLE
    }

    fn name(&self) -> &'static str {
        "dumpable"
    }

    fn scope(&self) -> Scope {
        Scope::Thread
    }

    fn ask(&self, _facts: &dyn Facts, questions: &mut Script) -> Result<Asked> {
        let step = questions.call(Sysno::prctl, [PR_GET_DUMPABLE.into()]);
        Ok(Asked {
            steps: vec![step],
            data: Vec::new(),
        })
    }

    fn dump(&self, _: &dyn Facts, asked: &Asked, answers: &Answers) -> Result<Option<Record>> {
        let mode = u32::try_from(answers.result(asked.steps[0])).unwrap_or(0);
        Ok(Some(Record { mode }))
    }

    fn check(&self, record: &Record) -> Result<()> {
        match record.mode {
            0 | 1 | ROOT_ONLY => Ok(()),
            mode => Err(Error::corrupt(self.name(), format!("mode {mode}"))),
        }
    }

    fn describe(&self, record: &Record) -> String {
        record.mode.to_string()
    }

    fn plan(&self, record: Option<&Record>, who: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        let record = record.cloned().unwrap_or_default();
        match record.mode {
            0 | 1 => {
                if u64::from(record.mode) == who.inherited.dumpable {
                    plan.dumpable = Some(record.mode);
                } else {
                    set(plan, record.mode);
                }
            }
            ROOT_ONLY if who.inherited.suid_dumpable.get() == ROOT_ONLY => {
                // Any change of credentials does it, also one that is taken back.
                let uid = who.inherited.credentials.uids.last().copied().unwrap_or(0);
                self.change_credentials(plan, uid);
            }
            _ => {
                let what = "2 needs 2 in /proc/sys/fs/suid_dumpable";
                return Err(who.mismatch(self, what));
            }
        }
        Ok(())
    }
}

impl Dumpable {
    /// Changes the file system user id and takes the change back. In `Privileges`, where this part
    /// stands before the credentials: later ones keep the mode, as they find the same sysctl.
    fn change_credentials(&self, plan: &mut ThreadPlan, uid: u32) {
        let script = plan.at(Phase::Privileges);
        for uid in [uid ^ 1, uid] {
            script.attempt(Sysno::setfsuid, [uid.into()]);
            script.note(self.name());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inherited::OnNeed;
    use crate::task::ErasedPart;
    use crate::task::credentials::Credentials;
    use crate::testing::Stage;

    #[test]
    fn mode_survives_a_change_of_credentials() {
        testkit::needs_root!();
        for mode in [0, 1] {
            let mut user = Stage::inherited().credentials;
            user.uids = vec![1000; 4];
            (user.permitted, user.effective) = (0, 0);
            let user = prost::Message::encode_to_vec(&user);
            let payload = prost::Message::encode_to_vec(&Record { mode });
            let mut fresh = Stage::new();
            let parts: [(&'static dyn ErasedPart, _); 2] = [
                (&Dumpable, Some(&payload[..])),
                (&Credentials, Some(&user[..])),
            ];
            fresh.restore_all(&parts);
            assert_eq!(
                fresh.dump(&Dumpable).expect("it is supported"),
                Some(payload)
            );
        }
    }

    #[test]
    fn root_only_needs_the_same_of_the_host() {
        let payload = prost::Message::encode_to_vec(&Record { mode: 2 });
        let mut inherited = Stage::inherited();
        inherited.suid_dumpable = OnNeed::Known(0);
        let error = Stage::plan_with(&Dumpable, Some(&payload), &inherited).expect_err("not here");
        let want = "task 1: dumpable: 2 needs 2 in /proc/sys/fs/suid_dumpable";
        assert_eq!(error.to_string(), want);
        inherited.suid_dumpable = OnNeed::Known(2);
        let plan = Stage::plan_with(&Dumpable, Some(&payload), &inherited).expect("possible");
        insta::assert_snapshot!(plan, @r"
        [Privileges]
        setfsuid(uid=1) = ?  # dumpable
        setfsuid(uid=0) = ?  # dumpable
        ");
    }

    #[test]
    fn other_modes_are_corrupt() {
        let payload = prost::Message::encode_to_vec(&Record { mode: 3 });
        let error = Stage::plan(&Dumpable, Some(&payload)).expect_err("no such mode");
        assert_eq!(error.to_string(), "image record task 1 dumpable: mode 3");
    }
}
