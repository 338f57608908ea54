//! Which mappings a core dump has (core(5), /proc/PID/coredump_filter).
//!
//! - Kept: all bits.
//! - CRIU 4.2: not kept.

use super::{Asked, Facts, Holder, Part, Planned, Scope, ThreadPlan, Write, tags};
use crate::Result;
use crate::script::Answers;

/// A process's choice of mappings for a core dump.
pub struct CoreFilter;

/// The choice.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// A bit a kind of mapping.
    #[prost(uint32, tag = "1")]
    pub filter: u32,
}

/// What /proc/PID/coredump_filter says.
pub(crate) fn parse(text: &[u8]) -> Option<u32> {
    u32::from_str_radix(std::str::from_utf8(text).ok()?.trim(), 16).ok()
}

impl Part for CoreFilter {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::CORE_FILTER
    }

    fn name(&self) -> &'static str {
        "coredump_filter"
    }

    fn scope(&self) -> Scope {
        Scope::Process
    }

    fn holder(&self) -> Holder {
        Holder::Memory
    }

    /// Kernels that make no core dumps do not have the file.
    fn dump(&self, facts: &dyn Facts, _: &Asked, _: &Answers) -> Result<Option<Record>> {
        let filter = facts.proc("coredump_filter").ok();
        let filter = filter.and_then(|text| parse(&text));
        Ok(filter.map(|filter| Record { filter }))
    }

    fn describe(&self, record: &Record) -> String {
        format!("{:#x}", record.filter)
    }

    /// Only an open file can set it: the restorer writes it from outside.
    fn plan(&self, record: Option<&Record>, who: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        let Some(record) = record else {
            return Ok(());
        };
        if Some(record.filter) != who.inherited.core_filter {
            plan.outside.push(Write {
                file: "coredump_filter",
                text: format!("{:#x}", record.filter),
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
    fn the_filter_survives() {
        let mut stage = Stage::new();
        let file = format!("/proc/{}/coredump_filter", stage.pid());
        std::fs::write(file, "0x1f5").expect("it is this process's child");
        let payload = stage.dump(&CoreFilter).expect("it is supported");
        let payload = payload.expect("always there");
        assert_eq!(
            Stage::describe(&CoreFilter, &payload).expect("sound"),
            "0x1f5"
        );
        let plan = Stage::plan(&CoreFilter, Some(&payload)).expect("sound");
        assert_eq!(plan, "0x1f5 > coredump_filter\n");
        let mut fresh = Stage::new();
        let own = fresh.dump(&CoreFilter).expect("it is supported");
        let plan = Stage::plan(&CoreFilter, own.as_deref()).expect("sound");
        assert_eq!(plan, "", "the restorer's own needs nothing");
        fresh.restore(&CoreFilter, Some(&payload));
        let restored = fresh.dump(&CoreFilter).expect("it is supported");
        assert_eq!(restored, Some(payload));
    }
}
