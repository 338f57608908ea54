//! The list of futexes that a thread holds and the kernel releases when it dies
//! (get_robust_list(2)).
//!
//! - Kept: the address of the list.
//! - CRIU 4.2: kept.

use syscalls::Sysno;

use super::{Asked, Facts, Part, Phase, Planned, Scope, ThreadPlan, tags};
use crate::Result;
use crate::script::{Answers, Script};

/// A thread's robust futex list.
pub struct Robust;

/// A registered list.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// The address of its head.
    #[prost(fixed64, tag = "1")]
    pub head: u64,
    /// The size of the head in bytes.
    #[prost(uint64, tag = "2")]
    pub len_bytes: u64,
    /// Whether it is one of 32-bit code, of which the kernel has another.
    #[prost(bool, tag = "3")]
    pub is_32_bit: bool,
}

impl Part for Robust {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::ROBUST
    }

    fn name(&self) -> &'static str {
        "robust futex list"
    }

    fn scope(&self) -> Scope {
        Scope::Thread
    }

    fn ask(&self, facts: &dyn Facts, questions: &mut Script) -> Result<Asked> {
        let (head, len) = (questions.buffer(8), questions.buffer(8));
        let args = [0u64.into(), head.into(), len.into()];
        match facts.registers().is_32_bit() {
            false => questions.call(Sysno::get_robust_list, args),
            true => questions.call_32(Sysno::get_robust_list, args),
        };
        Ok(Asked {
            steps: Vec::new(),
            data: vec![head, len],
        })
    }

    fn dump(&self, facts: &dyn Facts, asked: &Asked, answers: &Answers) -> Result<Option<Record>> {
        let record = Record {
            head: answers.word(asked.data[0], 0),
            len_bytes: answers.word(asked.data[1], 0),
            is_32_bit: facts.registers().is_32_bit(),
        };
        Ok((record.head != 0).then_some(record))
    }

    fn describe(&self, record: &Record) -> String {
        format!("at {:#x}", record.head)
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
        // Late: when a task dies of a failed restore, futexes in memory that it shares with
        // others must not be given up.
        let script = plan.at(Phase::Final);
        let args = [record.head.into(), record.len_bytes.into()];
        match record.is_32_bit {
            false => script.call(Sysno::set_robust_list, args),
            true => script.call_32(Sysno::set_robust_list, args),
        };
        script.note(self.name());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Stage;

    #[test]
    fn robust_list_survives() {
        let mut stage = Stage::new();
        let head = stage.data() + 0x4000;
        stage.call(Sysno::set_robust_list, &[head, 24]);
        let payload = stage
            .dump(&Robust)
            .expect("it is supported")
            .expect("one is set");
        let plan = Stage::plan_of_thread(&Robust, Some(&payload));
        assert_eq!(
            plan,
            format!("[Final]\nset_robust_list(head={head:#x}, len=24)  # robust futex list\n")
        );
        let mut fresh = Stage::new();
        assert_eq!(fresh.dump(&Robust).expect("it is supported"), None);
        fresh.restore(&Robust, Some(&payload));
        assert_eq!(fresh.dump(&Robust).expect("it is supported"), Some(payload));
    }
}
