//! A child stopped by SIGSTOP, whose parent has seen the stop.
//!
//! `state` answers the child's state letter, `continue` lets it go on and answers how it ended.
use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Stdio};

use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};

use super::{Control, Failure, not_understood};
use crate::tree;

pub(super) fn run(control: Control, _: &[String]) -> Result<(), Failure> {
    let mut child = Command::new("/bin/sh")
        .args(["-c", "kill -STOP $$; exit 9"])
        .stdin(Stdio::null())
        .spawn()?;
    let pid = Pid::from_child(&child);
    let (_, status) = waitpid(Some(pid), WaitOptions::UNTRACED)?.ok_or("nothing to wait for")?;
    if !status.stopped() {
        return Err(format!("the child did not stop: {status:?}").into());
    }
    control.serve(|question| match question.verb.as_str() {
        "state" => Ok(tree::state(child.id())
            .map(String::from)
            .unwrap_or_default()),
        "continue" => {
            kill_process(pid, Signal::CONT)?;
            let status = child.wait()?;
            Ok(format!("{:?} {:?}", status.code(), status.signal()))
        }
        _ => not_understood(question),
    })
}
