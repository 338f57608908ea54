//! Descriptors: what they lead to, their positions and flags, and who shares them.
use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::fs;

use sys::kcmp;
use sys::process::Process;

use super::{Depth, Facts};
use crate::tree;

pub(super) fn look(facts: &mut Facts, pid: u32, depth: Depth) {
    let sockets = Sockets::of(pid);
    for fd in numbers(pid) {
        let target = fs::read_link(format!("/proc/{}/fd/{fd}", tree::asked(pid)))
            .map_or_else(|error| error.to_string(), |path| path.display().to_string());
        let deleted = target.ends_with(" (deleted)");
        // Nor does a file of /proc keep its number.
        let unnamed = !target.starts_with('/') || target.starts_with("/proc/") || deleted;
        let is_terminal = target.starts_with("/dev/pts/");
        let described = match object_class(&target) {
            Some(kind) => {
                let what = sockets.describe(&target);
                format!("{kind} {}{what}", facts.class(&target))
            }
            // Each restore makes a time namespace for its tree.
            None if target.starts_with("time:[") => "time".to_owned(),
            None => super::without_number(&target),
        };
        facts.note(pid, &format!("fd {fd}"), described);
        let mut info = fs::read_to_string(format!("/proc/{}/fdinfo/{fd}", tree::asked(pid)))
            .unwrap_or_default();
        if is_terminal {
            info = without_close_on_exec(&info);
        }
        facts.note(
            pid,
            &format!("fd {fd} info"),
            normalise(&info, depth, unnamed),
        );
    }
}

/// Notes which descriptors of the tree share one open file description.
pub(super) fn look_for_sharing(facts: &mut Facts, pids: &[u32]) {
    // Only what has the same link can be the same.
    let mut alike: BTreeMap<String, Vec<(u32, i32)>> = BTreeMap::new();
    for &pid in pids {
        for fd in numbers(pid) {
            if let Ok(target) = fs::read_link(format!("/proc/{}/fd/{fd}", tree::asked(pid))) {
                let target = target.display().to_string();
                alike.entry(target).or_default().push((pid, fd));
            }
        }
    }
    let mut groups = Vec::new();
    for mut candidates in alike.into_values() {
        // kcmp orders descriptions, so that those that are one come together.
        let compare = |&a: &_, &b: &_| compare(a, b).unwrap_or(Ordering::Less);
        candidates.sort_by(compare);
        let same = candidates.chunk_by(|a, b| compare(a, b) == Ordering::Equal);
        for group in same.filter(|group| group.len() > 1) {
            let mut group = group.to_vec();
            group.sort_unstable();
            groups.push(group);
        }
    }
    groups.sort_unstable();
    facts.note("tree", "shared descriptions", format!("{groups:?}"));
}

/// Orders the descriptions behind two descriptors, each as (pid, fd).
fn compare(one: (u32, i32), other: (u32, i32)) -> std::io::Result<Ordering> {
    let [own, others] = [one, other].map(|(pid, _)| Process::living(pid.cast_signed()));
    let descriptor = |process, fd| kcmp::Descriptor { process, fd };
    kcmp::compare_files(descriptor(&own, one.1), descriptor(&others, other.1))
}

fn numbers(pid: u32) -> Vec<i32> {
    let mut fds: Vec<i32> = fs::read_dir(format!("/proc/{}/fd", tree::asked(pid)))
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    fds.sort_unstable();
    fds
}

/// "pipe" or "socket" for links like "pipe:[123]", whose number means nothing later.
fn object_class(target: &str) -> Option<&str> {
    let (kind, _) = target.split_once(":[")?;
    matches!(kind, "pipe" | "socket").then_some(kind)
}

/// Leaves the lines of fdinfo that stay the same, as one line.
fn normalise(info: &str, depth: Depth, unnamed: bool) -> String {
    let kept = info.lines().filter_map(|line| {
        let (name, value) = line.split_once(':').unwrap_or((line, ""));
        let changes = matches!(name, "ino" | "it_value" | "eventfd-id" | "map_id")
            || (depth == Depth::Moving && matches!(name, "pos" | "eventfd-count" | "ticks"));
        if changes {
            return None;
        }
        if name == "flags" {
            return Some(format!("flags:0{:o}", without_large_file(value)));
        }
        let words: Vec<&str> = match name {
            // The inode and device of what an epoll watches are those of an unnamed object.
            "tfd" => value
                .split_ascii_whitespace()
                .take_while(|word| !word.starts_with("pos:"))
                .collect(),
            // The first word counts all locks of the system; the sixth is the file's inode. The
            // fifth is who took it: of a lease, one who may have ended (docs/limits.md).
            "lock" => {
                let is_lease = value.contains(" LEASE ");
                let words = value.split_ascii_whitespace().enumerate().skip(1);
                let words = words.filter(|(at, _)| !(unnamed && *at == 5 || is_lease && *at == 4));
                words.map(|(_, word)| word).collect()
            }
            _ => value.split_ascii_whitespace().collect(),
        };
        Some(format!("{name}:{}", words.join(" ")))
    });
    let mut kept: Vec<String> = kept.collect();
    // An epoll lists its interests in the order of a tree over kernel addresses.
    kept.sort();
    kept.join(" ")
}

/// What fdinfo says of a terminal without O_CLOEXEC: of one that was opened so through its master
/// it says so of every descriptor, and of one that was restored it tells the truth.
fn without_close_on_exec(info: &str) -> String {
    const CLOSE_ON_EXEC: i64 = 0o2_000_000;
    let lines = info.lines().map(|line| match line.strip_prefix("flags:") {
        Some(value) => {
            let flags = i64::from_str_radix(value.trim(), 8).unwrap_or_default();
            format!("flags:\t0{:o}\n", flags & !CLOSE_ON_EXEC)
        }
        None => format!("{line}\n"),
    });
    lines.collect()
}

/// The flags of an open file, which fdinfo shows in octal, without O_LARGEFILE: every open on a
/// 64-bit kernel sets it, while calls that make files otherwise do not.
fn without_large_file(octal: &str) -> i64 {
    const LARGE_FILE: i64 = 0o100_000;
    let flags = i64::from_str_radix(octal.trim(), 8).unwrap_or_default();
    flags & !LARGE_FILE
}

/// The state of a TCP socket that has ended what it sends, as /proc/net/tcp says it.
const FIN_WAIT1: &str = "04";
/// The same, when the other side is known to have all of it.
const FIN_WAIT2: &str = "05";

/// The socket lists of one network namespace, by inode.
struct Sockets(Vec<(String, String)>);

impl Sockets {
    fn of(pid: u32) -> Self {
        let mut found = Vec::new();
        for family in ["tcp", "tcp6", "udp", "udp6"] {
            let list = fs::read_to_string(format!("/proc/{}/net/{family}", tree::asked(pid)))
                .unwrap_or_default();
            for line in list.lines().skip(1) {
                let fields: Vec<&str> = line.split_ascii_whitespace().collect();
                if let [_, local, remote, state, _, _, _, _, _, inode, ..] = fields[..] {
                    // The other side's kernel says when it has the end of what is sent.
                    let state = if state == FIN_WAIT2 { FIN_WAIT1 } else { state };
                    let what = format!(" {family} {local} {remote} state {state}");
                    found.push((inode.to_owned(), what));
                }
            }
        }
        let list =
            fs::read_to_string(format!("/proc/{}/net/unix", tree::asked(pid))).unwrap_or_default();
        for line in list.lines().skip(1) {
            let fields: Vec<&str> = line.split_ascii_whitespace().collect();
            if let [_, _, _, flags, kind, state, inode, ref path @ ..] = fields[..] {
                let path = path.join(" ");
                let what = format!(" unix flags {flags} type {kind} state {state} {path}");
                found.push((inode.to_owned(), what.trim_end().to_owned()));
            }
        }
        Self(found)
    }

    /// What the socket of a link like "socket:[123]" is; nothing for other links.
    fn describe(&self, target: &str) -> &str {
        let inode = target
            .strip_prefix("socket:[")
            .and_then(|rest| rest.strip_suffix(']'));
        self.0
            .iter()
            .find(|(known, _)| Some(known.as_str()) == inode)
            .map_or("", |(_, what)| what)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fdinfo_loses_what_means_nothing_later() {
        let info = "pos:\t0\nflags:\t02\nmnt_id:\t15\nino:\t1060\n\
                    tfd:       13 events:       19 data:               5  pos:0 ino:424 sdev:f\n";
        assert_eq!(
            normalise(info, Depth::Still, false),
            "flags:02 mnt_id:15 pos:0 tfd:13 events: 19 data: 5"
        );
    }

    #[test]
    fn only_unnamed_objects_are_numbered() {
        assert_eq!(object_class("pipe:[7]"), Some("pipe"));
        assert_eq!(object_class("anon_inode:[eventfd]"), None);
        assert_eq!(object_class("/dev/null"), None);
    }
}
