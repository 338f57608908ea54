//! What a process has registered for with membarrier(2).
//!
//! - Kept: all registrations, on Linux 6.3 and later.
//! - CRIU 4.2: kept.

use syscalls::Sysno;

use super::{Asked, Facts, Holder, Part, Phase, Planned, Scope, ThreadPlan, tags};
use crate::script::{Answers, Script};
use crate::{Error, Result};

const MEMBARRIER_CMD_GET_REGISTRATIONS: u32 = 1 << 9;

/// The registrations of a process.
pub struct Membarrier;

/// The registrations.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// The `MEMBARRIER_CMD_REGISTER_` commands that it has made.
    #[prost(uint32, tag = "1")]
    pub commands: u32,
}

impl Part for Membarrier {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::MEMBARRIER
    }

    fn name(&self) -> &'static str {
        "membarrier"
    }

    fn scope(&self) -> Scope {
        Scope::Process
    }

    fn holder(&self) -> Holder {
        Holder::Memory
    }

    fn ask(&self, _: &dyn Facts, questions: &mut Script) -> Result<Asked> {
        let args = [MEMBARRIER_CMD_GET_REGISTRATIONS.into()];
        Ok(Asked {
            steps: vec![questions.attempt(Sysno::membarrier, args)],
            data: Vec::new(),
        })
    }

    /// Kernels before 6.3 do not tell.
    fn dump(&self, _: &dyn Facts, asked: &Asked, answers: &Answers) -> Result<Option<Record>> {
        let told = asked.steps.first().map(|step| answers.result(*step));
        let commands = told.and_then(|told| u32::try_from(told).ok()).unwrap_or(0);
        let record = (commands != 0).then_some(Record { commands });
        Ok(record)
    }

    fn check(&self, record: &Record) -> Result<()> {
        // MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED, _PRIVATE_EXPEDITED, _SYNC_CORE, _RSEQ
        const KNOWN: u32 = 1 << 2 | 1 << 4 | 1 << 6 | 1 << 8;
        match record.commands & !KNOWN != 0 {
            true => Err(Error::corrupt(
                self.name(),
                format!("registrations {:#x}", record.commands),
            )),
            false => Ok(()),
        }
    }

    fn describe(&self, record: &Record) -> String {
        format!("registrations={:#x}", record.commands)
    }

    /// In the new task before it has threads, which makes it cheap, and after its children were
    /// made, who would have the registrations of it.
    fn plan(&self, record: Option<&Record>, _: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        let record = record.cloned().unwrap_or_default();
        let bits = (0..u32::BITS).map(|bit| 1 << bit);
        for command in bits.filter(|bit| record.commands & bit != 0) {
            plan.at(Phase::Alone)
                .call(Sysno::membarrier, [command.into()]);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Stage;

    #[test]
    fn registrations_survive() {
        let mut stage = Stage::new();
        assert_eq!(stage.dump(&Membarrier).expect("it is supported"), None);
        for command in [1 << 2, 1 << 4] {
            stage.call(Sysno::membarrier, &[command]);
        }
        if stage.attempt(
            Sysno::membarrier,
            &[MEMBARRIER_CMD_GET_REGISTRATIONS.into()],
        ) < 0
        {
            testkit::skip!("a kernel before 6.3");
        }
        let payload = stage.dump(&Membarrier).expect("it is supported");
        let payload = payload.expect("there are some");
        let plan = Stage::plan(&Membarrier, Some(&payload)).expect("sound");
        assert_eq!(
            plan,
            "[Alone]\n\
             membarrier(command=4)\n\
             membarrier(command=16)\n"
        );
        let mut fresh = Stage::new();
        fresh.restore(&Membarrier, Some(&payload));
        assert_eq!(
            fresh.dump(&Membarrier).expect("it is supported"),
            Some(payload)
        );
    }

    #[test]
    fn unknown_registrations_are_corrupt() {
        let payload = prost::Message::encode_to_vec(&Record { commands: 1 });
        let error = Stage::plan(&Membarrier, Some(&payload)).expect_err("no registration");
        assert!(matches!(error, crate::Error::Corrupt { .. }), "{error}");
    }
}
