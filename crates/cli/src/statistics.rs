//! What a dump did, for machines and for people: under the names that criu(8) has for it where it
//! means the same.

use std::fmt::Write as _;

use process::{DumpKind, Statistics};
use serde_json::{Value, json};

/// For machines: times are in microseconds.
pub fn to_json(statistics: &Statistics) -> Value {
    json!({
        "kind": kind(statistics.kind),
        "tasks": statistics.tasks,
        "threads": statistics.threads,
        "freezing_time": statistics.freezing_us,
        "frozen_time": statistics.frozen_us,
        "collect_time": statistics.collect_us,
        "memdump_time": statistics.memory_us,
        "memwrite_time": statistics.write_us,
        "plan_time": statistics.plan_us,
        "pages_scanned": statistics.scanned_pages,
        "pages_written": statistics.stored_pages,
        "pages_zero": statistics.zero_pages,
        "pages_skipped_parent": statistics.parent_pages,
        "pages_shared": statistics.shared_pages,
        "pages_equal": statistics.equal_pages,
        "pages_lost": statistics.lost_pages,
        "bytes_written": statistics.stored_bytes(),
    })
}

/// For people: a line each, behind `indent`.
pub fn to_text(statistics: &Statistics, indent: &str) -> String {
    let mut text = String::new();
    let facts = to_json(statistics);
    let order = [
        "kind",
        "tasks",
        "threads",
        "freezing_time",
        "frozen_time",
        "collect_time",
        "memdump_time",
        "memwrite_time",
        "plan_time",
        "pages_scanned",
        "pages_written",
        "pages_zero",
        "pages_skipped_parent",
        "pages_shared",
        "pages_equal",
        "pages_lost",
        "bytes_written",
    ];
    for name in order {
        let told = match &facts[name] {
            // Nobody measured it.
            Value::Null => continue,
            Value::String(word) => word.clone(),
            number => number.to_string(),
        };
        let unit = if name.ends_with("_time") { " us" } else { "" };
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{indent}{name:<20} {told:>12}{unit}");
    }
    text
}

fn kind(kind: DumpKind) -> &'static str {
    match kind {
        DumpKind::PreDump => "pre-dump",
        DumpKind::Dump => "dump",
        DumpKind::Live => "live dump",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_fact_is_told_to_people_too() {
        let statistics = Statistics {
            kind: DumpKind::Live,
            frozen_us: 1234,
            write_us: Some(5),
            plan_us: Some(6),
            stored_pages: 2,
            ..Statistics::default()
        };
        let text = to_text(&statistics, "  ");
        let facts = to_json(&statistics);
        assert_eq!(text.lines().count(), facts.as_object().unwrap().len());
        assert!(
            text.contains("  frozen_time                  1234 us\n"),
            "{text}"
        );
        assert!(
            text.contains("bytes_written                8192\n"),
            "{text}"
        );
        let unknown = Statistics {
            write_us: None,
            ..statistics
        };
        assert!(!to_text(&unknown, "").contains("memwrite_time"));
    }
}
