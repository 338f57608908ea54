//! Segments of a thread's own, which 32-bit code has its thread-local storage in
//! (set_thread_area(2)).
//!
//! - Kept: all three of each thread.
//! - CRIU 4.2: kept.

use sys::ptrace::THREAD_AREAS;
use syscalls::Sysno;

use super::{Asked, Facts, Part, Phase, Planned, Scope, ThreadPlan, tags};
use crate::script::Answers;
use crate::{Error, Result};

/// The segments of a thread.
pub struct ThreadAreas;

/// The segments that are set.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// One each.
    #[prost(message, repeated, tag = "1")]
    pub areas: Vec<Area>,
}

/// A segment, as `struct user_desc` has it.
#[derive(Clone, Copy, PartialEq, prost::Message)]
pub struct Area {
    /// Its number, 12 to 14.
    #[prost(uint32, tag = "1")]
    pub number: u32,
    /// The address of its first byte.
    #[prost(fixed32, tag = "2")]
    pub base: u32,
    /// The highest offset in it, in bytes or pages.
    #[prost(uint32, tag = "3")]
    pub limit: u32,
    /// The bits of its kind.
    #[prost(uint32, tag = "4")]
    pub flags: u32,
}

impl Part for ThreadAreas {
    type Record = Record;

    fn tag(&self) -> u16 {
        tags::THREAD_AREAS
    }

    fn name(&self) -> &'static str {
        "thread areas"
    }

    fn scope(&self) -> Scope {
        Scope::Thread
    }

    fn dump(&self, facts: &dyn Facts, _: &Asked, _: &Answers) -> Result<Option<Record>> {
        let registers = facts.registers();
        // 64-bit code has none, but where it loads one by itself.
        let selectors = [registers.ds, registers.es, registers.fs, registers.gs];
        let loaded = |selector: u64| THREAD_AREAS.contains(&(selector as u32 >> 3));
        if !registers.is_32_bit() && !selectors.into_iter().any(loaded) {
            return Ok(None);
        }
        let mut areas = Vec::new();
        for number in THREAD_AREAS {
            if let Some([_, base, limit, flags]) = facts.thread_area(number)? {
                areas.push(Area {
                    number,
                    base,
                    limit,
                    flags,
                });
            }
        }
        let set = !areas.is_empty();
        Ok(set.then_some(Record { areas }))
    }

    fn check(&self, record: &Record) -> Result<()> {
        let mut numbers = record.areas.iter().map(|area| area.number);
        match numbers.find(|number| !THREAD_AREAS.contains(number)) {
            Some(number) => Err(Error::corrupt(self.name(), format!("segment {number}"))),
            None => Ok(()),
        }
    }

    fn describe(&self, record: &Record) -> String {
        let areas = record.areas.iter();
        let areas = areas.map(|area| format!("{} at {:#x}", area.number, area.base));
        areas.collect::<Vec<_>>().join(", ")
    }

    fn plan(&self, record: Option<&Record>, _: Planned<'_>, plan: &mut ThreadPlan) -> Result<()> {
        let script = plan.at(Phase::Alone);
        for area in record.iter().flat_map(|record| &record.areas) {
            let words = [area.number, area.base, area.limit, area.flags];
            let at = script.bytes(&words.map(u32::to_le_bytes).concat());
            script.call_32(Sysno::set_thread_area, [at.into()]);
            script.note(self.name());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::Stage;

    fn payload(number: u32) -> Vec<u8> {
        let area = Area {
            number,
            base: 0xf7f8_0540,
            limit: 0xf_ffff,
            flags: 0x51,
        };
        prost::Message::encode_to_vec(&Record { areas: vec![area] })
    }

    #[test]
    fn segments_are_set_by_calls_of_32_bits() {
        let plan = Stage::plan_of_thread(&ThreadAreas, Some(&payload(12)));
        insta::assert_snapshot!(plan, @r"
        [Alone]
        32-bit set_thread_area(desc={entry=12, base=0xf7f80540, limit=0xfffff, flags=0x51})  #
            thread areas
        ");
    }

    #[test]
    fn other_segments_are_corrupt() {
        for number in [0, 11, 15] {
            let error = Stage::plan(&ThreadAreas, Some(&payload(number))).expect_err("refused");
            assert!(
                error.to_string().ends_with(&format!("segment {number}")),
                "{error}"
            );
        }
    }
}
