//! States of a thread that cannot be brought back and are refused by name, before the thread is
//! made to call anything.
//!
//! - What: shadow stacks, address masking, core scheduling
//! - Refused: "a shadow stack"; "linear address masking"; "a core scheduling group other than
//!   stillframe's (PR_SCHED_CORE)".
//! - CRIU 4.2: keeps shadow stacks, does not look for the others.

use std::sync::OnceLock;

use sys::core_scheduling;

use super::{Asked, Facts, Part, Planned, Scope, ThreadPlan, tags};
use crate::script::{Answers, Script};
use crate::{Error, Result};

/// States that are not supported; never in an image.
pub struct Refused;

/// Whether a thread shares cores with other threads than this process, which is whose group
/// restored tasks are in.
fn is_in_group(tid: i32) -> bool {
    static OWN: OnceLock<Option<u64>> = OnceLock::new();
    let own = OWN.get_or_init(|| core_scheduling::group(0).ok());
    own.is_some_and(|own| core_scheduling::group(tid).is_ok_and(|group| group != own))
}

impl Part for Refused {
    fn tag(&self) -> u16 {
        tags::REFUSED
    }

    fn name(&self) -> &'static str {
        "unsupported state"
    }

    fn scope(&self) -> Scope {
        Scope::Thread
    }

    fn ask(&self, facts: &dyn Facts, _questions: &mut Script) -> Result<Asked> {
        let status = facts.status()?;
        let what = match &*status {
            status if status.untag_mask != u64::MAX => "linear address masking",
            status if status.thread_features.contains("shstk") => "a shadow stack",
            _ if is_in_group(facts.tid()) => {
                "a core scheduling group other than stillframe's (PR_SCHED_CORE)"
            }
            _ => return Ok(Asked::default()),
        };
        Err(Error::unsupported(facts.tid(), what))
    }

    fn dump(&self, _: &dyn Facts, _: &Asked, _: &Answers) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    fn describe(&self, _payload: &[u8]) -> Result<String> {
        Err(Error::corrupt(self.name(), "never in an image"))
    }

    fn plan(&self, payload: Option<&[u8]>, who: Planned<'_>, _: &mut ThreadPlan) -> Result<()> {
        payload.map_or(Ok(()), |_| Err(who.corrupt(self, "never in an image")))
    }
}
