//! What a process that works for a client notes for the one that answers it.

use process::Statistics;
use prost::Message;

/// Outcome of a piece of work.
#[derive(Clone, PartialEq, Message)]
pub struct Note {
    /// Why it failed.
    #[prost(string, optional, tag = "1")]
    pub error: Option<String>,
    /// The number of the error that criu(8) has for that.
    #[prost(int32, optional, tag = "2")]
    pub errno: Option<i32>,
    /// The exit status that belongs to it.
    #[prost(int32, optional, tag = "3")]
    pub status: Option<i32>,
    /// What a dump has done.
    #[prost(message, optional, tag = "4")]
    pub dump: Option<DumpFacts>,
}

/// Facts of a dump in the form of criu(8) (`dump_stats_entry`): times in microseconds.
#[derive(Clone, PartialEq, Message)]
pub struct DumpFacts {
    #[prost(uint32, required, tag = "1")]
    pub freezing_time: u32,
    #[prost(uint32, required, tag = "2")]
    pub frozen_time: u32,
    #[prost(uint32, required, tag = "3")]
    pub memdump_time: u32,
    #[prost(uint32, required, tag = "4")]
    pub memwrite_time: u32,
    #[prost(uint64, required, tag = "5")]
    pub pages_scanned: u64,
    #[prost(uint64, required, tag = "6")]
    pub pages_skipped_parent: u64,
    #[prost(uint64, required, tag = "7")]
    pub pages_written: u64,
    #[prost(uint64, required, tag = "9")]
    pub pages_lazy: u64,
}

impl DumpFacts {
    /// The facts that the engine has told.
    pub fn new(known: &Statistics) -> Self {
        Self {
            freezing_time: time(known.freezing_us),
            frozen_time: time(known.frozen_us),
            memdump_time: time(known.memory_us),
            // Where nobody has measured it, it was a part of that.
            memwrite_time: time(known.write_us.unwrap_or(known.memory_us)),
            pages_scanned: known.scanned_pages,
            pages_skipped_parent: known.parent_pages,
            pages_written: known.stored_pages,
            pages_lazy: 0,
        }
    }
}

/// A time in the width that the format has for it.
pub fn time(time_us: u64) -> u32 {
    u32::try_from(time_us).unwrap_or(u32::MAX)
}
