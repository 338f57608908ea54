//! A table of segments of a process's own (modify_ldt(2)), which no restore makes.
//!
//! - What: local descriptor table
//! - Refused: "a local descriptor table (modify_ldt)".
//! - CRIU 4.2: not looked for.

use syscalls::Sysno;

use super::{Asked, Facts, Holder, Part, Planned, Scope, ThreadPlan, tags};
use crate::script::{Answers, Script};
use crate::{Error, Result};

/// A process's table of segments; never in an image.
pub struct Ldt;

impl Part for Ldt {
    type Record = ();

    fn tag(&self) -> u16 {
        tags::LDT
    }

    fn name(&self) -> &'static str {
        "local descriptor table"
    }

    fn scope(&self) -> Scope {
        Scope::Process
    }

    fn holder(&self) -> Holder {
        Holder::Memory
    }

    fn ask(&self, _facts: &dyn Facts, questions: &mut Script) -> Result<Asked> {
        const READ: u32 = 0;
        const ENTRY_BYTES: usize = 8;
        let buffer = questions.buffer(ENTRY_BYTES);
        let args = [READ.into(), buffer.into(), ENTRY_BYTES.into()];
        // A kernel without it has no tables.
        let asked = questions.attempt(Sysno::modify_ldt, args);
        Ok(Asked {
            steps: vec![asked],
            data: Vec::new(),
        })
    }

    fn dump(&self, facts: &dyn Facts, asked: &Asked, answers: &Answers) -> Result<Option<()>> {
        // The kernel gives an `int`: how many bytes it has read, of no table none.
        let read_bytes = answers.result(asked.steps[0]) as i32;
        if read_bytes > 0 {
            let what = "a local descriptor table (modify_ldt)";
            return Err(Error::unsupported(facts.pid(), what));
        }
        Ok(None)
    }

    fn check(&self, _: &()) -> Result<()> {
        Err(Error::corrupt(self.name(), "never in an image"))
    }

    fn describe(&self, _record: &()) -> String {
        String::new()
    }

    fn plan(&self, _: Option<&()>, _: Planned<'_>, _: &mut ThreadPlan) -> Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Stage;

    #[test]
    fn a_table_is_refused() {
        const WRITE: u64 = 0x11;
        let mut stage = Stage::new();
        assert_eq!(stage.dump(&Ldt).expect("it has none"), None);
        // Entry 3: data from 0x1000 on, 16 bytes.
        let entry = [3 | 0x1000 << 32, 15 | 1 << 32];
        let made = stage.call_with(Sysno::modify_ldt, &entry, |at| [WRITE, at, 16, 0]);
        if made != 0 {
            testkit::skip!("the kernel has no modify_ldt");
        }
        let error = stage.dump(&Ldt).expect_err("it has one");
        assert!(
            error.to_string().contains("a local descriptor table"),
            "{error}"
        );
    }
}
