//! The alternate signal stack of a thread (sigaltstack(2)).
//!
//! - Kept: place, size and flags, also `SS_AUTODISARM`.
//! - CRIU 4.2: kept.

use syscalls::Sysno;

use super::{Asked, Facts, Part, Phase, Planned, Scope, ThreadPlan, tags};
use crate::Result;
use crate::script::{Answers, Script};

const SS_DISABLE: u32 = linux_raw_sys::general::SS_DISABLE;
const SS_AUTODISARM: u32 = linux_raw_sys::general::SS_AUTODISARM;
/// The size of `stack_t` in bytes: address, flags, padding, size.
const STACK_BYTES: usize = 24;

/// A thread's alternate signal stack.
pub struct Altstack;

/// An alternate signal stack that is set.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// The lowest address.
    #[prost(fixed64, tag = "1")]
    pub start: u64,
    /// The size in bytes.
    #[prost(uint64, tag = "2")]
    pub size_bytes: u64,
    /// Whether it is disarmed while a handler runs on it (`SS_AUTODISARM`).
    #[prost(bool, tag = "3")]
    pub disarms: bool,
}

impl Part for Altstack {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::ALTSTACK
    }

    fn name(&self) -> &'static str {
        "alternate signal stack"
    }

    fn scope(&self) -> Scope {
        Scope::Thread
    }

    fn ask(&self, _facts: &dyn Facts, questions: &mut Script) -> Result<Asked> {
        let buffer = questions.buffer(STACK_BYTES);
        questions.call(Sysno::sigaltstack, [0u64.into(), buffer.into()]);
        Ok(Asked {
            steps: Vec::new(),
            data: vec![buffer],
        })
    }

    fn dump(&self, _: &dyn Facts, asked: &Asked, answers: &Answers) -> Result<Option<Record>> {
        let buffer = asked.data[0];
        let flags = answers.half(buffer, 8);
        let record = Record {
            start: answers.word(buffer, 0),
            size_bytes: answers.word(buffer, 16),
            disarms: flags & SS_AUTODISARM != 0,
        };
        // SS_ONSTACK, which says where the stack pointer is now, is not part of the state.
        let set = flags & SS_DISABLE == 0 && record.size_bytes != 0;
        Ok(set.then_some(record))
    }

    fn describe(&self, record: &Record) -> String {
        format!("{} bytes at {:#x}", record.size_bytes, record.start)
    }

    fn plan(&self, record: Option<&Record>, who: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        let stack = match record {
            Some(record) => {
                let flags = if record.disarms { SS_AUTODISARM } else { 0 };
                (record.start, flags, record.size_bytes)
            }
            // A process inherits the restorer's, a thread none.
            None if who.is_leader() => (0, SS_DISABLE, 0),
            None => return Ok(()),
        };
        let mut bytes = [0; STACK_BYTES];
        bytes[0..8].copy_from_slice(&stack.0.to_le_bytes());
        bytes[8..12].copy_from_slice(&stack.1.to_le_bytes());
        bytes[16..24].copy_from_slice(&stack.2.to_le_bytes());
        let script = plan.at(Phase::Alone);
        let at = script.bytes(&bytes);
        script.call(Sysno::sigaltstack, [at.into()]);
        script.note(self.name());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Stage;

    #[test]
    fn alternate_stack_survives() {
        let mut stage = Stage::new();
        let start = stage.data() + 0x4000;
        let mut stack = [0u64, 0, 0x4000];
        stack[0] = start;
        stack[1] = u64::from(SS_AUTODISARM);
        stage.call_with(Sysno::sigaltstack, &stack, |at| [at, 0]);
        let payload = stage.dump(&Altstack).expect("it is supported");
        let text = Stage::describe(&Altstack, payload.as_deref().expect("one is set"));
        assert_eq!(text.expect("sound"), format!("16384 bytes at {start:#x}"));

        let mut fresh = Stage::new();
        fresh.restore(&Altstack, payload.as_deref());
        let again = fresh.dump(&Altstack).expect("it is supported");
        assert_eq!(again, payload);
    }

    #[test]
    fn an_inherited_stack_goes_away() {
        let mut stage = Stage::new();
        let stack = [stage.data() + 0x4000, 0, 0x4000];
        stage.call_with(Sysno::sigaltstack, &stack, |at| [at, 0]);
        stage.restore(&Altstack, None);
        assert_eq!(stage.dump(&Altstack).expect("it is supported"), None);
    }

    #[test]
    fn threads_without_one_need_no_call() {
        assert_eq!(Stage::plan_of_thread(&Altstack, None), "");
    }
}
