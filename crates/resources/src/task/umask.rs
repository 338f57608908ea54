//! The file mode creation mask of a process (umask(2)).
//!
//! - Kept: the mask.
//! - CRIU 4.2: kept.

use syscalls::Sysno;

use super::{Asked, Facts, Part, Phase, Planned, Scope, ThreadPlan, tags};
use crate::script::Answers;
use crate::{Error, Result};

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
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::UMASK
    }

    fn name(&self) -> &'static str {
        "umask"
    }

    fn scope(&self) -> Scope {
        Scope::Process
    }

    fn dump(&self, facts: &dyn Facts, _: &Asked, _: &Answers) -> Result<Option<Record>> {
        let mask = facts.status()?.umask.unwrap_or(0);
        Ok(Some(Record { mask }))
    }

    fn check(&self, record: &Record) -> Result<()> {
        match record.mask > 0o777 {
            true => Err(Error::corrupt(self.name(), format!("{:#o}", record.mask))),
            false => Ok(()),
        }
    }

    fn describe(&self, record: &Record) -> String {
        format!("{:04o}", record.mask)
    }

    fn plan(&self, record: Option<&Record>, who: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        let record = record.cloned().unwrap_or_default();
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
        assert_eq!(Stage::describe(&Umask, &payload).expect("sound"), "0137");
        let mut fresh = Stage::new();
        fresh.restore(&Umask, Some(&payload));
        assert_eq!(fresh.call(Sysno::umask, &[0]), 0o137);
    }
}
