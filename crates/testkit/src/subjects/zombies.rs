//! Children that ended and were not waited for: with status 0, with status 7, by SIGKILL.
//!
//! `reap` waits for them and answers how each ended.
use std::os::unix::process::ExitStatusExt;
use std::process::{Child, Command};

use super::{Control, Failure, not_understood};
use crate::{tree, wait};

pub(super) fn run(control: Control, _: &[String]) -> Result<(), Failure> {
    let scripts = ["exit 0", "exit 7", "kill -KILL $$"];
    let mut children: Vec<Child> = Vec::new();
    for script in scripts {
        children.push(Command::new("/bin/sh").args(["-c", script]).spawn()?);
    }
    wait::wait_until("the children to end", wait::SOON, || {
        children
            .iter()
            .all(|child| tree::state(child.id()) == Some('Z'))
    });
    control.serve(|question| match question.verb.as_str() {
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
