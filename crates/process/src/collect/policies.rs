//! Mappings with a memory policy of their own (mbind(2)), which are refused.

use resources::map::listing::Listed;
use resources::script::{Answers, DataAt, Script, StepAt};
use syscalls::Sysno;

use crate::Result;

/// The questions to a task about its mappings, in their order.
pub(super) struct Policies(Vec<(StepAt, DataAt)>);

impl Policies {
    /// Asks for the policy of each mapping, by its first page.
    pub fn ask(listed: &[Listed], script: &mut Script) -> Self {
        const MPOL_F_ADDR: u32 = 2;
        let ask = |map: &Listed| {
            let mode = script.room(4);
            let start = map.span.start;
            let args = [
                mode.into(),
                0u32.into(),
                0u32.into(),
                start.into(),
                MPOL_F_ADDR.into(),
            ];
            // Kernels without memory nodes do not have the call.
            (script.attempt(Sysno::get_mempolicy, args), mode)
        };
        Self(listed.iter().map(ask).collect())
    }

    /// Checks that they all have the default policy.
    ///
    /// # Errors
    /// [`resources::Error::Unsupported`] naming the first mapping that has not.
    pub fn check(&self, pid: i32, listed: &[Listed], answers: &Answers) -> Result<()> {
        const MPOL_DEFAULT: u32 = 0;
        for (map, (step, mode)) in listed.iter().zip(&self.0) {
            if answers.result(*step) == 0 && answers.half(*mode, 0) != MPOL_DEFAULT {
                let what = format!("{}: a memory policy of its own (mbind)", map.place());
                return Err(resources::Error::unsupported(pid, what).into());
            }
        }
        Ok(())
    }
}
