//! The file mode creation mask of a process (umask(2)).
//!
//! - Kept: the mask.
//! - CRIU 4.2: kept.

use syscalls::Sysno;

use super::{Asked, Facts, Part, Phase, Planned, Scope, ThreadPlan, decode, tags};
use crate::Result;
use crate::script::Answers;

/// A process's file mode creation mask.
pub struct Umask;

/// A mask.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// The permission bits that new files do not get.
    #[prost(uint32, tag = "1")]
    pub mask: u32,
}

impl Part for Umask {
    fn tag(&self) -> u16 {
        tags::UMASK
    }

    fn name(&self) -> &'static str {
        "umask"
    }

    fn scope(&self) -> Scope {
        Scope::Process
    }

    fn dump(&self, facts: &dyn Facts, _: &Asked, _: &Answers) -> Result<Option<Vec<u8>>> {
        let mask = facts.status()?.umask.unwrap_or(0);
        Ok(Some(prost::Message::encode_to_vec(&Record { mask })))
    }

    fn describe(&self, payload: &[u8]) -> Result<String> {
        let record: Record = decode(self, payload)?;
        Ok(format!("{:04o}", record.mask))
    }

    fn plan(&self, payload: Option<&[u8]>, who: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        let record: Record = decode(self, payload.unwrap_or_default())?;
        if record.mask > 0o777 {
            return Err(who.corrupt(self, format!("{:#o}", record.mask)));
        }
        // No task changes it before all tasks are forked.
        if who.inherited.umask != Some(record.mask) {
            plan.at(Phase::Last)
                .call(Sysno::umask, [record.mask.into()]);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Stage;

    #[test]
    fn mask_survives() {
        let mut stage = Stage::new();
        stage.call(Sysno::umask, &[0o137]);
        let payload = stage
            .dump(&Umask)
            .expect("it is supported")
            .expect("always there");
        assert_eq!(Umask.describe(&payload).expect("sound"), "0137");
        let mut fresh = Stage::new();
        fresh.restore(&Umask, Some(&payload));
        assert_eq!(fresh.call(Sysno::umask, &[0]), 0o137);
    }
}
