//! The area in which a thread and the kernel agree on restartable sequences (rseq(2)).
//!
//! The kernel gives the registration to tracers only, and takes it from the thread itself only. A
//! thread that was stopped inside of a sequence is moved to its abort handler before (crate
//! `tracee`), as after any other preemption.
//!
//! - Kept: area and signature; a thread inside of a sequence is moved to its abort handler.
//! - CRIU 4.2: kept.

use syscalls::Sysno;

use super::{Asked, Facts, Part, Phase, Planned, Scope, ThreadPlan, tags};
use crate::Result;
use crate::script::Answers;

/// A thread's area for restartable sequences.
pub struct Rseq;

/// A registered area.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// Its address.
    #[prost(fixed64, tag = "1")]
    pub addr: u64,
    /// Its length in bytes.
    #[prost(uint32, tag = "2")]
    pub len_bytes: u32,
    /// The signature in front of abort handlers.
    #[prost(fixed32, tag = "3")]
    pub signature: u32,
}

impl Part for Rseq {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::RSEQ
    }

    fn name(&self) -> &'static str {
        "rseq area"
    }

    fn scope(&self) -> Scope {
        Scope::Thread
    }

    fn dump(&self, facts: &dyn Facts, _: &Asked, _: &Answers) -> Result<Option<Record>> {
        let area = facts.rseq()?;
        let record = Record {
            addr: area.addr,
            len_bytes: area.len_bytes,
            signature: area.signature,
        };
        Ok((area.addr != 0).then_some(record))
    }

    fn describe(&self, record: &Record) -> String {
        format!("{} bytes at {:#x}", record.len_bytes, record.addr)
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
        let (addr, len) = (record.addr.into(), record.len_bytes.into());
        let script = plan.at(Phase::Last);
        script.call(
            Sysno::rseq,
            [addr, len, 0u64.into(), record.signature.into()],
        );
        script.note(self.name());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Stage;

    #[test]
    fn registration_survives() {
        let signature = 0x5305_3053;
        let mut fresh = Stage::without_rseq();
        assert_eq!(fresh.dump(&Rseq).expect("it is supported"), None);
        let addr = fresh.data() + 0x4000;
        let record = Record {
            addr,
            len_bytes: 32,
            signature,
        };
        let payload = prost::Message::encode_to_vec(&record);
        fresh.restore(&Rseq, Some(&payload));
        assert_eq!(fresh.dump(&Rseq).expect("it is supported"), Some(payload));
    }
}
