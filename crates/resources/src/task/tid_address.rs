//! The word that the kernel clears, and wakes waiters of, when a thread ends
//! (set_tid_address(2)).
//!
//! - What: word cleared at a thread's end
//! - Kept: its address.
//! - CRIU 4.2: kept.

use linux_raw_sys::prctl::PR_GET_TID_ADDRESS;
use syscalls::Sysno;

use super::{Asked, Facts, Part, Phase, Planned, Scope, ThreadPlan, tags};
use crate::Result;
use crate::script::{Answers, Script};

/// A thread's `clear_child_tid` address.
pub struct TidAddress;

/// An address that is set.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// The word's address.
    #[prost(fixed64, tag = "1")]
    pub addr: u64,
}

impl Part for TidAddress {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::TID_ADDRESS
    }

    fn name(&self) -> &'static str {
        "tid address"
    }

    fn scope(&self) -> Scope {
        Scope::Thread
    }

    fn ask(&self, _facts: &dyn Facts, questions: &mut Script) -> Result<Asked> {
        let buffer = questions.buffer(8);
        questions.call(Sysno::prctl, [PR_GET_TID_ADDRESS.into(), buffer.into()]);
        Ok(Asked {
            steps: Vec::new(),
            data: vec![buffer],
        })
    }

    fn dump(&self, _: &dyn Facts, asked: &Asked, answers: &Answers) -> Result<Option<Record>> {
        let record = Record {
            addr: answers.word(asked.data[0], 0),
        };
        Ok((record.addr != 0).then_some(record))
    }

    fn describe(&self, record: &Record) -> String {
        format!("{:#x}", record.addr)
    }

    fn plan(
        &self,
        record: Option<&Record>,
        _who: Planned<'_>,
        plan: &mut ThreadPlan,
    ) -> Result<()> {
        let Some(record) = record else {
            return Ok(());
        };
        // Late, as the robust list: the word may be in memory that others share.
        let script = plan.at(Phase::Final);
        script.call(Sysno::set_tid_address, [record.addr.into()]);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Stage;

    #[test]
    fn address_survives() {
        let mut stage = Stage::new();
        assert_eq!(stage.dump(&TidAddress).expect("it is supported"), None);
        let addr = stage.data() + 0x4000;
        stage.call(Sysno::set_tid_address, &[addr]);
        let payload = stage
            .dump(&TidAddress)
            .expect("it is supported")
            .expect("one is set");
        let mut fresh = Stage::new();
        fresh.restore(&TidAddress, Some(&payload));
        assert_eq!(
            fresh.dump(&TidAddress).expect("it is supported"),
            Some(payload)
        );
    }
}
