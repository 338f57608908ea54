//! The resource limits of a process (getrlimit(2)).
//!
//! - Kept: soft and hard limits.
//! - At a restore: "… has hard limit …, this process has … and lacks CAP_SYS_RESOURCE to raise it".
//! - CRIU 4.2: kept.

use sys::proc::{self, LIMITS, Limit};
use syscalls::Sysno;

use super::{Asked, Facts, Part, Phase, Planned, Scope, ThreadPlan, malformed, tags};
use crate::script::Answers;
use crate::{Error, Result};

const CAP_SYS_RESOURCE: u32 = linux_raw_sys::general::CAP_SYS_RESOURCE;

/// The limits' names, by number.
const NAMES: [&str; LIMITS] = [
    "RLIMIT_CPU",
    "RLIMIT_FSIZE",
    "RLIMIT_DATA",
    "RLIMIT_STACK",
    "RLIMIT_CORE",
    "RLIMIT_RSS",
    "RLIMIT_NPROC",
    "RLIMIT_NOFILE",
    "RLIMIT_MEMLOCK",
    "RLIMIT_AS",
    "RLIMIT_LOCKS",
    "RLIMIT_SIGPENDING",
    "RLIMIT_MSGQUEUE",
    "RLIMIT_NICE",
    "RLIMIT_RTPRIO",
    "RLIMIT_RTTIME",
];

/// A process's resource limits.
pub struct Limits;

/// All limits.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// Soft and hard limit in turn, by number; `u64::MAX` for unlimited.
    #[prost(uint64, repeated, tag = "1")]
    pub values: Vec<u64>,
}

impl Part for Limits {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::LIMITS
    }

    fn name(&self) -> &'static str {
        "limits"
    }

    fn scope(&self) -> Scope {
        Scope::Process
    }

    fn dump(&self, facts: &dyn Facts, _: &Asked, _: &Answers) -> Result<Option<Record>> {
        let limits = proc::limits(&facts.proc("limits")?);
        let limits = limits.map_err(|e| malformed(facts.pid(), e))?;
        let values = limits.iter().flat_map(|limit| [limit.soft, limit.hard]);
        let record = Record {
            values: values.collect(),
        };
        Ok(Some(record))
    }

    fn check(&self, record: &Record) -> Result<()> {
        if record.values.len() != 2 * LIMITS {
            return Err(Error::corrupt(
                self.name(),
                format!("{} values", record.values.len()),
            ));
        }
        let mut values = NAMES.iter().zip(record.values.chunks(2));
        values.try_for_each(|(name, values)| match values[0] > values[1] {
            true => {
                let (soft, hard) = (values[0], values[1]);
                let limit = Limit { soft, hard };
                Err(Error::corrupt(self.name(), format!("{name} is {limit:?}")))
            }
            false => Ok(()),
        })
    }

    fn describe(&self, record: &Record) -> String {
        let shown = |value: u64| match value {
            u64::MAX => "unlimited".to_owned(),
            value => value.to_string(),
        };
        let limits = NAMES.iter().zip(record.values.chunks(2));
        let limits = limits.filter(|(_, values)| values.iter().any(|value| *value != u64::MAX));
        let limits = limits.map(|(name, values)| {
            let values: Vec<_> = values.iter().map(|value| shown(*value)).collect();
            format!(
                "{}={}",
                name.trim_start_matches("RLIMIT_"),
                values.join(":")
            )
        });
        limits.collect::<Vec<_>>().join(" ")
    }

    fn plan(&self, record: Option<&Record>, who: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        let Some(record) = record else {
            return Ok(());
        };
        for (number, values) in record.values.chunks(2).enumerate() {
            let limit = Limit {
                soft: values[0],
                hard: values[1],
            };
            if limit == who.inherited.limits[number] {
                continue;
            }
            self.check_raise(number, limit, who)?;
            let script = plan.at(Phase::Privileges);
            let new = script.bytes(&[limit.soft.to_le_bytes(), limit.hard.to_le_bytes()].concat());
            script.call(Sysno::prlimit64, [0u64.into(), number.into(), new.into()]);
            script.note(NAMES[number]);
        }
        Ok(())
    }
}

impl Limits {
    /// Raising a hard limit needs a privilege: says so before anything is made.
    fn check_raise(&self, number: usize, limit: Limit, who: Planned<'_>) -> Result<()> {
        let inherited = who.inherited.limits[number];
        if limit.hard <= inherited.hard || who.inherited.credentials.can(CAP_SYS_RESOURCE) {
            return Ok(());
        }
        let name = NAMES[number];
        let what = format!(
            "{name} has hard limit {}, this process has {} and lacks CAP_SYS_RESOURCE to raise it",
            limit.hard, inherited.hard
        );
        Err(who.mismatch(self, what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Stage;

    #[test]
    fn limits_survive() {
        let mut stage = Stage::new();
        stage.call_with(Sysno::prlimit64, &[100, 200], |at| [0, 7, at]);
        stage.call_with(Sysno::prlimit64, &[1 << 20, u64::MAX], |at| [0, 4, at]);
        let payload = stage
            .dump(&Limits)
            .expect("it is supported")
            .expect("always there");
        let mut fresh = Stage::new();
        fresh.restore(&Limits, Some(&payload));
        assert_eq!(fresh.dump(&Limits).expect("it is supported"), Some(payload));
    }

    #[test]
    fn only_what_differs_is_called_for() {
        let mut inherited = Stage::inherited();
        inherited.limits = [Limit { soft: 5, hard: 10 }; LIMITS];
        let mut values = [5, 10].repeat(LIMITS);
        values[14] = 4;
        values[15] = 9;
        let payload = prost::Message::encode_to_vec(&Record { values });
        let plan = Stage::plan_with(&Limits, Some(&payload), &inherited).expect("sound");
        insta::assert_snapshot!(plan, @r"
        [Privileges]
        prlimit64(pid=0, resource=7, new={cur=4, max=9}, old=0)  # RLIMIT_NOFILE
        ");
    }

    #[test]
    fn a_limit_that_cannot_be_raised_is_named() {
        let mut inherited = Stage::inherited();
        inherited.limits = [Limit { soft: 5, hard: 10 }; LIMITS];
        inherited.credentials.effective &= !(1 << CAP_SYS_RESOURCE);
        let mut values = [5, 10].repeat(LIMITS);
        values[15] = 11;
        let payload = prost::Message::encode_to_vec(&Record {
            values: values.clone(),
        });
        let error =
            Stage::plan_with(&Limits, Some(&payload), &inherited).expect_err("no privilege");
        let want = "task 1: limits: RLIMIT_NOFILE has hard limit 11, \
            this process has 10 and lacks CAP_SYS_RESOURCE to raise it";
        assert_eq!(error.to_string(), want);
        values[14] = 12;
        let payload = prost::Message::encode_to_vec(&Record { values });
        let error = Stage::plan_with(&Limits, Some(&payload), &inherited).expect_err("12 > 11");
        let want = "image record task 1 limits: RLIMIT_NOFILE is Limit { soft: 12, hard: 11 }";
        assert_eq!(error.to_string(), want);
    }
}
