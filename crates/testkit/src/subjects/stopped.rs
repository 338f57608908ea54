//! A child that was stopped; its parent has seen the stop, or not yet (`unseen`). It is stopped by
//! `SIGSTOP`, or as a terminal does (`tstp`), in a process group of its own.
//!
//! `state` answers the child's state letter, `poll` what its parent sees of it, `told` takes a
//! `SIGCHLD` that is pending and answers its code, `continue` lets the child go on and answers how
//! it ended.
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};

use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, kill_process, waitid, waitpid,
};

use sys::subject::{block_signals, take_signal};

use super::{Control, Failure, not_understood};
use crate::tree;

const SIGCHLD: i32 = 17;

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let wants = |word: &str| arguments.iter().any(|argument| argument == word);
    // Who blocks it can tell whether it was sent.
    block_signals(&[SIGCHLD]);
    let signal = if wants("tstp") { "TSTP" } else { "STOP" };
    let mut child = Command::new("/bin/sh")
        .args(["-c", &format!("kill -{signal} $$; exit 9")])
        .stdin(Stdio::null())
        .process_group(0)
        .spawn()?;
    let pid = Pid::from_child(&child);
    let stopped = WaitIdOptions::STOPPED | WaitIdOptions::NOWAIT;
    let status = waitid(WaitId::Pid(pid), stopped)?.ok_or("nothing to wait for")?;
    if !status.stopped() {
        return Err(format!("the child did not stop: {status:?}").into());
    }
    if !wants("unseen") {
        waitpid(Some(pid), WaitOptions::UNTRACED)?;
        take_signal(&[SIGCHLD]).ok_or("nobody told of the stop")?;
    }
    control.serve(|question| match question.verb.as_str() {
        "state" => Ok(tree::state(child.id())
            .map(String::from)
            .unwrap_or_default()),
        "poll" => {
            let options = WaitOptions::UNTRACED | WaitOptions::NOHANG;
            let seen = waitpid(Some(pid), options)?;
            let signal = seen.and_then(|(_, status)| status.stopping_signal());
            Ok(signal.map_or("nothing".into(), |signal| format!("stopped by {signal}")))
        }
        "told" => {
            let told = take_signal(&[SIGCHLD]);
            Ok(told.map_or("nothing".into(), |(_, code, _)| format!("code {code}")))
        }
        "continue" => {
            kill_process(pid, Signal::CONT)?;
            let status = child.wait()?;
            Ok(format!("{:?} {:?}", status.code(), status.signal()))
        }
        _ => not_understood(question),
    })
}
