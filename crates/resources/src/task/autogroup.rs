//! The nice value of a session as a whole (sched(7), "The autogroup feature").
//!
//! - Kept: the session's nice value.
//! - CRIU 4.2: not kept.

use super::{Asked, Facts, Part, Planned, Scope, ThreadPlan, Write, tags};
use crate::script::Answers;
use crate::{Error, Result};

/// The nice value of the session that a process leads, or whose leader is gone.
pub struct Autogroup;

/// A nice value other than 0.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// From -20 to 19.
    #[prost(sint32, tag = "1")]
    pub nice: i32,
}

/// The nice value in "/autogroup-123 nice 5".
fn parse(text: &[u8]) -> Option<i32> {
    let text = std::str::from_utf8(text).ok()?;
    text.rsplit_once(" nice ")?.1.trim().parse().ok()
}

impl Part for Autogroup {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::AUTOGROUP
    }

    fn name(&self) -> &'static str {
        "autogroup"
    }

    fn scope(&self) -> Scope {
        Scope::Process
    }

    /// A session's leader gets a new group; one from outside of the tree stays as it is. Kernels
    /// without such groups do not have the file.
    fn dump(&self, facts: &dyn Facts, _: &Asked, _: &Answers) -> Result<Option<Record>> {
        let session = facts.stat()?.session;
        if session != facts.pid() && facts.is_there(session) {
            return Ok(None);
        }
        let text = facts.proc("autogroup").ok();
        let nice = text.and_then(|text| parse(&text)).unwrap_or(0);
        Ok((nice != 0).then_some(Record { nice }))
    }

    fn check(&self, record: &Record) -> Result<()> {
        match !(-20..=19).contains(&record.nice) {
            true => Err(Error::corrupt(self.name(), record.nice.to_string())),
            false => Ok(()),
        }
    }

    fn describe(&self, record: &Record) -> String {
        format!("nice {}", record.nice)
    }

    /// Only an open file can set it: the restorer writes it from outside.
    fn plan(&self, record: Option<&Record>, _: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        let Some(record) = record else {
            return Ok(());
        };
        plan.outside.push(Write {
            file: "autogroup",
            text: record.nice.to_string(),
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use syscalls::Sysno;

    use super::*;
    use crate::testing::Stage;

    #[test]
    fn the_nice_value_of_a_session_survives() {
        testkit::needs_root!();
        let mut stage = Stage::new();
        assert_eq!(stage.dump(&Autogroup).expect("it is supported"), None);
        stage.call(Sysno::setsid, &[]);
        let file = format!("/proc/{}/autogroup", stage.pid());
        if std::fs::read(&file).ok().and_then(|text| parse(&text)) != Some(0) {
            testkit::skip!("sessions have no scheduling groups here");
        }
        assert_eq!(stage.dump(&Autogroup).expect("it is supported"), None);
        std::fs::write(&file, "7").expect("root may");
        let payload = stage.dump(&Autogroup).expect("it is supported");
        let payload = payload.expect("it is not 0");
        assert_eq!(
            Stage::describe(&Autogroup, &payload).expect("sound"),
            "nice 7"
        );
        let mut fresh = Stage::new();
        fresh.call(Sysno::setsid, &[]);
        fresh.restore(&Autogroup, Some(&payload));
        let restored = fresh.dump(&Autogroup).expect("it is supported");
        assert_eq!(restored, Some(payload));
    }

    #[test]
    fn what_no_session_has_is_corrupt() {
        let payload = prost::Message::encode_to_vec(&Record { nice: 20 });
        Stage::plan(&Autogroup, Some(&payload)).expect_err("too nice");
    }
}
