//! What every commit says: a subject that fits, and why it was made.
use std::path::Path;
use std::process::{Command, Stdio};

use super::violation::Violation;

/// The last commit that need not: older ones are as they are.
const SINCE: &str = "06d5f1a976e4f4b64d68699dc414711842cfa162";
/// Characters in a subject.
const COLUMNS: usize = 72;
/// What stands between the parts of a commit, and behind it.
const PART: char = '\u{1f}';
const END: char = '\u{1e}';

/// Checks the commits of the repository at `root`; none where it is no repository, or not all of
/// one.
pub fn check(root: &Path) -> Vec<Violation> {
    let log = Command::new("git")
        .args(["log", "--no-merges"])
        .arg(format!("--format=%h{PART}%s{PART}%b{END}"))
        .arg(format!("{SINCE}..HEAD"))
        .current_dir(root)
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .output();
    match log {
        Ok(log) if log.status.success() => check_log(&String::from_utf8_lossy(&log.stdout)),
        _ => Vec::new(),
    }
}

fn check_log(log: &str) -> Vec<Violation> {
    let mut broken = Vec::new();
    for commit in log.split(END).map(str::trim).filter(|one| !one.is_empty()) {
        let mut parts = commit.splitn(3, PART);
        let mut next = || parts.next().unwrap_or_default().trim();
        let (id, subject, body) = (next(), next(), next());
        let mut say = |rule: String| broken.push(Violation::new(Path::new(id), 1, rule));
        let columns = subject.chars().count();
        if columns > COLUMNS {
            say(format!(
                "a subject of {columns} columns, {COLUMNS} at the most"
            ));
        }
        if !subject.contains(": ") {
            say("the subject is no `crate: imperative summary`".into());
        }
        if body.is_empty() {
            say("the commit does not say why: it has no body".into());
        }
    }
    broken
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commits_without_a_reason_or_with_a_long_subject_are_named() {
        let long = "x".repeat(COLUMNS - 5);
        let log = format!(
            "a{PART}sys: sleep{PART}Why.\nMore.\n{END}\nb{PART}sys: {long}{PART}Why.{END}\n\
             c{PART}sys: {long}xx{PART}\n{END}\nd{PART}sleep{PART}Why{END}\n"
        );
        let found: Vec<_> = check_log(&log).iter().map(ToString::to_string).collect();
        assert_eq!(
            found,
            [
                "c:1: a subject of 74 columns, 72 at the most",
                "c:1: the commit does not say why: it has no body",
                "d:1: the subject is no `crate: imperative summary`",
            ]
        );
    }

    #[test]
    fn what_is_no_repository_has_no_commits() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(check(folder.path()), []);
    }
}
