//! How likely a process is killed when memory runs out (/proc/PID/oom_score_adj).
//!
//! - Kept: the value.
//! - CRIU 4.2: kept.

use super::{Asked, Facts, Part, Planned, Scope, ThreadPlan, Write, tags};
use crate::script::Answers;
use crate::{Error, Result};

/// A process's adjustment of its badness score.
pub struct Oom;

/// The adjustment.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// From -1000 (never) to 1000 (first).
    #[prost(sint32, tag = "1")]
    pub score_adj: i32,
}

impl Part for Oom {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::OOM
    }

    fn name(&self) -> &'static str {
        "oom_score_adj"
    }

    fn scope(&self) -> Scope {
        Scope::Process
    }

    fn dump(&self, facts: &dyn Facts, _: &Asked, _: &Answers) -> Result<Option<Record>> {
        let text = facts.proc("oom_score_adj")?;
        let score_adj = std::str::from_utf8(&text).ok();
        let score_adj = score_adj.and_then(|text| text.trim().parse().ok());
        let wrong = || std::io::Error::from(std::io::ErrorKind::InvalidData);
        let doing = || format!("reading /proc/{}/oom_score_adj", facts.pid());
        let score_adj = score_adj.ok_or_else(|| Error::kernel(doing(), wrong()))?;
        Ok(Some(Record { score_adj }))
    }

    fn check(&self, record: &Record) -> Result<()> {
        match !(-1000..=1000).contains(&record.score_adj) {
            true => Err(Error::corrupt(self.name(), record.score_adj.to_string())),
            false => Ok(()),
        }
    }

    fn describe(&self, record: &Record) -> String {
        record.score_adj.to_string()
    }

    /// Only an open file can set it: the restorer writes it from outside. Going below the lowest
    /// value that a privileged process ever gave to the restorer needs CAP_SYS_RESOURCE.
    fn plan(&self, record: Option<&Record>, who: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        let record = record.cloned().unwrap_or_default();
        if record.score_adj != who.inherited.oom_score_adj {
            let text = record.score_adj.to_string();
            plan.outside.push(Write {
                file: "oom_score_adj",
                text,
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Stage;

    #[test]
    fn adjustment_survives() {
        let mut stage = Stage::new();
        let file = format!("/proc/{}/oom_score_adj", stage.pid());
        std::fs::write(file, "777").expect("raising is allowed");
        let payload = stage
            .dump(&Oom)
            .expect("it is supported")
            .expect("always there");
        let plan = Stage::plan(&Oom, Some(&payload)).expect("sound");
        assert_eq!(plan, "777 > oom_score_adj\n");
        let mut fresh = Stage::new();
        fresh.restore(&Oom, Some(&payload));
        assert_eq!(fresh.dump(&Oom).expect("it is supported"), Some(payload));
    }

    #[test]
    fn the_restorers_own_needs_nothing() {
        let mut stage = Stage::new();
        let payload = stage.dump(&Oom).expect("it is supported");
        assert_eq!(Stage::plan(&Oom, payload.as_deref()).expect("sound"), "");
    }
}
