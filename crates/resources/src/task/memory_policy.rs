//! Where a thread's memory comes from on a machine of several nodes (set_mempolicy(2)).
//!
//! - Kept: mode, flags and nodes; not a home node, of which the kernel does not tell.
//! - CRIU 4.2: not kept.

use syscalls::Sysno;

use super::{Asked, Facts, Part, Phase, Planned, Scope, ThreadPlan, tags};
use crate::map::policy::Policy;
use crate::script::{Answers, Arg, Script};
use crate::{Error, Result};

/// A thread's memory policy.
pub struct MemoryPolicy;

/// A policy other than the default one.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// `MPOL_` mode and flags.
    #[prost(uint32, tag = "1")]
    pub mode: u32,
    /// The nodes, 64 a word.
    #[prost(fixed64, repeated, tag = "2")]
    pub nodes: Vec<u64>,
}

impl Record {
    fn policy(&self) -> Policy {
        let (mode, nodes) = (self.mode, self.nodes.clone());
        Policy { mode, nodes }
    }
}

impl Part for MemoryPolicy {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::MEMORY_POLICY
    }

    fn name(&self) -> &'static str {
        "memory policy"
    }

    fn scope(&self) -> Scope {
        Scope::Thread
    }

    fn ask(&self, _facts: &dyn Facts, questions: &mut Script) -> Result<Asked> {
        let buffers = Policy::buffers(questions);
        let [mode, nodes] = buffers.map(Arg::from);
        let args = [mode, nodes, Policy::max_node().into()];
        // Kernels without nodes do not have the call.
        let step = questions.attempt(Sysno::get_mempolicy, args);
        Ok(Asked {
            steps: vec![step],
            data: buffers.to_vec(),
        })
    }

    fn dump(&self, _: &dyn Facts, asked: &Asked, answers: &Answers) -> Result<Option<Record>> {
        if answers.result(asked.steps[0]) < 0 {
            return Ok(None);
        }
        let policy = Policy::told(answers, [asked.data[0], asked.data[1]]);
        let record = policy.map(|Policy { mode, nodes }| Record { mode, nodes });
        Ok(record)
    }

    fn check(&self, record: &Record) -> Result<()> {
        match record.policy().is_known() {
            true => Ok(()),
            false => {
                let what = format!("mode {:#x}", record.mode);
                Err(Error::corrupt(self.name(), what))
            }
        }
    }

    fn describe(&self, record: &Record) -> String {
        let bit = |at: &u32| record.nodes[*at as usize / 64] & 1 << (at % 64) != 0;
        let count = u32::try_from(record.nodes.len().min(16)).unwrap_or(0);
        let nodes = (0..64 * count).filter(bit).collect::<Vec<_>>();
        format!("mode {:#x} nodes {nodes:?}", record.mode)
    }

    /// Last of all: its restored memory comes from where the restorer's does.
    fn plan(&self, record: Option<&Record>, who: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        let script = plan.at(Phase::Together);
        let Some(record) = record else {
            // Threads and children have that of their maker.
            if who.inherited.memory_policy {
                script.call(
                    Sysno::set_mempolicy,
                    [0u32.into(), 0u32.into(), 0u32.into()],
                );
                script.note(self.name());
            }
            return Ok(());
        };
        let args = record.policy().arguments(script);
        script.call(Sysno::set_mempolicy, args);
        script.note(self.name());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Stage;

    const MPOL_BIND: u64 = libc::MPOL_BIND as u64;
    const MPOL_LOCAL: u64 = libc::MPOL_LOCAL as u64;
    const STATIC: u64 = 1 << 15;

    /// A stage with this policy for node 0; `None` where the kernel has none.
    fn stage(mode: u64, nodes: u64) -> Option<Stage> {
        let mut stage = Stage::new();
        stage.put(0, &nodes.to_le_bytes());
        let args = [mode, stage.data(), if nodes == 0 { 0 } else { 64 }];
        (stage.attempt(Sysno::set_mempolicy, &args) == 0).then_some(stage)
    }

    #[test]
    fn policies_survive() {
        for (mode, nodes, shown) in [
            (MPOL_BIND | STATIC, 1, "mode 0x8002 nodes [0]"),
            (MPOL_LOCAL, 0, "mode 0x4 nodes []"),
        ] {
            let Some(mut stage) = stage(mode, nodes) else {
                testkit::skip!("the kernel has no memory policies");
            };
            let payload = stage.dump(&MemoryPolicy).expect("it is supported");
            let payload = payload.expect("it is not the default");
            assert_eq!(
                Stage::describe(&MemoryPolicy, &payload).expect("sound"),
                shown
            );
            let mut fresh = Stage::new();
            assert_eq!(fresh.dump(&MemoryPolicy).expect("it is supported"), None);
            fresh.restore(&MemoryPolicy, Some(&payload));
            let restored = fresh.dump(&MemoryPolicy).expect("it is supported");
            assert_eq!(restored, Some(payload));
        }
    }

    #[test]
    fn the_restorers_own_policy_is_not_handed_down() {
        let mut inherited = Stage::inherited();
        assert_eq!(
            Stage::plan_with(&MemoryPolicy, None, &inherited).expect("sound"),
            ""
        );
        inherited.memory_policy = true;
        assert_eq!(
            Stage::plan_with(&MemoryPolicy, None, &inherited).expect("sound"),
            "[Together]\nset_mempolicy(mode=0, nodes=0, max=0)  # memory policy\n"
        );
    }
}
