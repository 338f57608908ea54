//! Children that ended and were not waited for: with status 0, with status 7, by SIGKILL; and, for
//! root, with status 3 as another user.
//!
//! `who` answers the users and groups of the last one, `reap` waits for them and answers how each
//! ended.
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command};

use super::{Control, Failure, not_understood};
use crate::{tree, wait};

pub(super) fn run(control: Control, _: &[String]) -> Result<(), Failure> {
    let scripts = ["exit 0", "exit 7", "kill -KILL $$"];
    let mut children: Vec<Child> = Vec::new();
    for script in scripts {
        children.push(Command::new("/bin/sh").args(["-c", script]).spawn()?);
    }
    if rustix::process::getuid().is_root() {
        let mut other = Command::new("/bin/sh");
        other.args(["-c", "exit 3"]).uid(4711).gid(4712);
        children.push(other.spawn()?);
    }
    wait::wait_until("the children to end", wait::SOON, || {
        children
            .iter()
            .all(|child| tree::state(child.id()) == Some('Z'))
    });
    control.serve(|question| match question.verb.as_str() {
        "who" => {
            let last = children.last().ok_or("no children")?;
            let status = std::fs::read_to_string(format!("/proc/{}/status", last.id()))?;
            let lines = status.lines();
            let ids = lines.filter(|line| {
                ["Uid:", "Gid:", "Groups:"]
                    .iter()
                    .any(|id| line.starts_with(id))
            });
            let words = ids.flat_map(str::split_whitespace);
            Ok(words.collect::<Vec<_>>().join(" "))
        }
        "reap" => {
            let mut shown = Vec::new();
            for child in &mut children {
                let status = child.wait()?;
                shown.push(match (status.code(), status.signal()) {
                    (Some(code), _) => format!("status {code}"),
                    (_, Some(signal)) => format!("signal {signal}"),
                    _ => "?".into(),
                });
            }
            Ok(shown.join(", "))
        }
        _ => not_understood(question),
    })
}
