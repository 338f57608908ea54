//! States of a thread that cannot be brought back and are refused by name, before the thread is
//! made to call anything.
//!
//! - What: shadow stacks, address masking, core scheduling, states that are not known
//! - Refused: "a shadow stack"; "locked shadow-stack features"; "linear address masking"; "a
//!   breakpoint that a debugger has left" (one that has ended without taking it back); "a core
//!   scheduling group other than stillframe's (PR_SCHED_CORE)"; "line … of its status" (of a newer
//!   kernel), as "it is not known".
//! - CRIU 4.2: keeps shadow stacks, does not look for the others.

use std::sync::OnceLock;

use sys::core_scheduling;
use sys::proc::Status;

use super::{Asked, Facts, Part, Planned, Scope, ThreadPlan, tags};
use crate::script::{Answers, Script};
use crate::{Error, Result};

/// The bits of debug register 7 for breakpoints that are on.
const BREAKPOINTS: u64 = 0xff;

/// States that are not supported; never in an image.
pub struct Refused;

/// True if a thread is in another core scheduling group than this process. A restored task is in
/// the restorer's group.
fn is_in_group(tid: i32) -> bool {
    static OWN: OnceLock<Option<u64>> = OnceLock::new();
    let own = OWN.get_or_init(|| core_scheduling::group(0).ok());
    own.is_some_and(|own| core_scheduling::group(tid).is_ok_and(|group| group != own))
}

/// Refuses a thread of whose state nothing is known that a restore could give back.
///
/// # Errors
/// [`Error::Unsupported`], and those of [`Facts::status`].
pub(super) fn check(facts: &dyn Facts) -> Result<()> {
    let status = facts.status()?;
    let what = match &*status {
        status if status.untag_mask != u64::MAX => "linear address masking",
        status if status.thread_features.contains("shstk") => "a shadow stack",
        _ if is_in_group(facts.tid()) => {
            "a core scheduling group other than stillframe's (PR_SCHED_CORE)"
        }
        status if !status.locked_features.is_empty() => "locked shadow-stack features",
        Status {
            unknown: Some(name),
            ..
        } => {
            let what = format!("line {name} of its status");
            return Err(Error::unsupported(facts.tid(), what).because("it is not known"));
        }
        _ if facts.breakpoints()? & BREAKPOINTS != 0 => "a breakpoint that a debugger has left",
        _ => return Ok(()),
    };
    Err(Error::unsupported(facts.tid(), what))
}

impl Part for Refused {
    type Record = ();

    fn tag(&self) -> u16 {
        tags::REFUSED
    }

    fn name(&self) -> &'static str {
        "unsupported state"
    }

    fn scope(&self) -> Scope {
        Scope::Thread
    }

    /// Nothing: [`check`] has looked before the thread was made to call anything.
    fn ask(&self, _: &dyn Facts, _: &mut Script) -> Result<Asked> {
        Ok(Asked::default())
    }

    fn dump(&self, _: &dyn Facts, _: &Asked, _: &Answers) -> Result<Option<()>> {
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
    use std::rc::Rc;

    use sys::arch::Registers;
    use sys::process::Process;

    use super::*;
    use crate::Allow;

    /// A thread whose status has this line besides; where there is one, also with a breakpoint.
    struct Stranger(Allow, &'static str, Process);

    impl Facts for Stranger {
        fn allow(&self) -> &Allow {
            &self.0
        }

        fn process(&self) -> &Process {
            &self.2
        }

        fn tid(&self) -> i32 {
            7
        }

        fn proc(&self, name: &str) -> Result<Rc<[u8]>> {
            let mut text = std::fs::read(format!("/proc/self/{name}")).expect("read");
            text.extend(self.1.as_bytes());
            Ok(text.into())
        }

        fn registers(&self) -> Registers {
            unreachable!("nobody asks for them")
        }

        fn breakpoints(&self) -> Result<u64> {
            Ok(if self.1.is_empty() { 0 } else { 1 })
        }
    }

    #[test]
    fn unknown_line_of_the_status_is_refused_by_name() {
        let ask = |line| check(&Stranger(Allow::default(), line, Process::new(7)));
        ask("").expect("all lines are known");
        let told = |line| ask(line).expect_err("refused").to_string();
        let want = "pid 7: line Colour of its status is not supported: it is not known";
        assert_eq!(told("Colour:\tblue\nShape:\tround\n"), want);
        let want = "pid 7: a breakpoint that a debugger has left is not supported";
        assert_eq!(told("\n"), want);
        let want = "pid 7: locked shadow-stack features is not supported";
        assert_eq!(told("x86_Thread_features_locked:\tshstk wrss \n"), want);
    }
}
