//! What belongs to a task as a whole: ids, limits, program, places.
use std::fs;

use super::{Depth, Facts};
use crate::tree;

/// Fields of /proc/PID/stat that stay the same, by their number in proc_pid_stat(5).
const STAT: &[(usize, &str)] = &[
    (4, "ppid"),
    (5, "pgrp"),
    (6, "session"),
    (7, "tty_nr"),
    (8, "tpgid"),
    (18, "priority"),
    (19, "nice"),
    (20, "num_threads"),
    (26, "startcode"),
    (27, "endcode"),
    (28, "startstack"),
    (38, "exit_signal"),
    (40, "rt_priority"),
    (41, "policy"),
    (45, "start_data"),
    (46, "end_data"),
    (47, "start_brk"),
    (48, "arg_start"),
    (49, "arg_end"),
    (50, "env_start"),
    (51, "env_end"),
    (52, "exit_code"),
];

/// Those of [`STAT`] that are about how a task is scheduled.
const OF_SCHEDULING: [&str; 4] = ["priority", "nice", "rt_priority", "policy"];

/// Files of /proc/PID that are taken as they are.
const FILES: &[&str] = &[
    "cmdline",
    "environ",
    "limits",
    "personality",
    "oom_score_adj",
    "coredump_filter",
    "timers",
    "cgroup",
    "sessionid",
    "loginuid",
];

/// Links of /proc/PID.
const LINKS: &[&str] = &[
    "exe",
    "cwd",
    "root",
    "ns/cgroup",
    "ns/ipc",
    "ns/mnt",
    "ns/net",
    "ns/pid",
    "ns/user",
    "ns/uts",
];

pub(super) fn look(facts: &mut Facts, pid: u32, is_root: bool, depth: Depth) {
    look_at_stat(facts, pid, is_root);
    let is_zombie = !tree::is_alive(pid);
    facts.note(pid, "state", state_class(pid));
    if is_zombie {
        return;
    }
    for file in FILES {
        let text = fs::read(format!("/proc/{}/{file}", tree::asked(pid)));
        let shown = show(text);
        let shown = match *file {
            "timers" => without_clocks_of_threads(&shown),
            _ => shown,
        };
        facts.note(pid, file, shown);
    }
    for link in LINKS {
        let target = fs::read_link(format!("/proc/{}/{link}", tree::asked(pid)));
        let target = match target {
            Ok(path) => path.display().to_string(),
            Err(error) => error.to_string(),
        };
        facts.note(pid, link, target);
    }
    look_at_auxv(facts, pid);
    if depth == Depth::Moving {
        // Signals arrive at a running task.
        return;
    }
    let status = text(&format!("/proc/{pid}/status"));
    for line in status.lines() {
        if let Some(pending) = line.strip_prefix("ShdPnd:") {
            facts.note(pid, "ShdPnd", pending.trim());
        }
    }
}

/// A list of timers without threads' clocks of processor time: the kernel names one by 0 where the
/// thread itself has made the timer, and by the thread's number after a restore.
fn without_clocks_of_threads(list: &str) -> String {
    const OF_THREAD: i32 = 4;
    let is_of_thread = |line: &&str| {
        let number = line.strip_prefix("ClockID: ");
        let number = number.and_then(|word| word.parse().ok());
        number.is_some_and(|number: i32| number < 0 && number & OF_THREAD != 0)
    };
    let lines = list.lines().filter(|line| !is_of_thread(line));
    lines.collect::<Vec<_>>().join("\n")
}

/// Tells whether it is stopped or dead; running and sleeping alternate by themselves.
fn state_class(pid: u32) -> &'static str {
    match tree::state(pid) {
        Some('Z') => "zombie",
        Some('T') => "stopped",
        Some('t') => "traced",
        Some(_) => "runs",
        None => "absent",
    }
}

fn look_at_stat(facts: &mut Facts, pid: u32, is_root: bool) {
    let Some(rest) = tree::stat_at(&format!("/proc/{pid}")) else {
        return;
    };
    // The state letter is field 3.
    let fields: Vec<&str> = rest.split_ascii_whitespace().collect();
    for (number, name) in STAT {
        // The parent of the tree's root is whoever restored it, and who has ended is scheduled no
        // more (docs/limits.md).
        let is_over = rest.starts_with('Z') && OF_SCHEDULING.contains(name);
        let skipped = *name == "ppid" && is_root || is_over;
        if let (false, Some(value)) = (skipped, fields.get(number - 3)) {
            facts.note(pid, name, *value);
        }
    }
}

fn look_at_auxv(facts: &mut Facts, pid: u32) {
    let bytes = fs::read(format!("/proc/{}/auxv", tree::asked(pid))).unwrap_or_default();
    let words: Vec<String> = bytes
        .chunks_exact(8)
        .map(|word| {
            format!(
                "{:x}",
                u64::from_le_bytes(word.try_into().expect("8 bytes"))
            )
        })
        .collect();
    facts.note(pid, "auxv", words.join(" "));
}

/// What a /proc file says; nothing where it cannot be read. Names in it may be any bytes.
pub(super) fn text(path: &str) -> String {
    let bytes = fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// Text of a /proc file, with NULs as spaces; what went wrong where it cannot be read.
pub(super) fn show(text: std::io::Result<Vec<u8>>) -> String {
    match text {
        Ok(bytes) => String::from_utf8_lossy(&bytes)
            .replace('\0', " ")
            .trim_end()
            .to_owned(),
        Err(error) => error.to_string(),
    }
}
