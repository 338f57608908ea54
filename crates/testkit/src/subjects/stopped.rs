//! A child that was stopped; its parent has seen the stop, or not yet (`unseen`). It is stopped by
//! `SIGSTOP`, or as a terminal does (`tstp`), in a process group of its own. Or it was continued
//! since (`continued`), which its parent has not seen, but may have taken the signal that told of
//! it (`taken`).
//!
//! `state` answers the child's state letter, `poll` what its parent sees of it, `told` takes a
//! `SIGCHLD` that is pending and answers its code, `continue` lets the child go on and answers how
//! it ended.
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, Stdio};

use rustix::process::{
    Pid, Signal, WaitId, WaitIdOptions, WaitOptions, kill_process, waitid, waitpid,
};

use crate::calls::{block_signals, take_signal};

use super::{Control, Failure, not_understood};
use crate::tree;
use crate::wait::{SOON, wait_until};

const SIGCHLD: i32 = 17;

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let wants = |word: &str| arguments.iter().any(|argument| argument == word);
    // Who blocks it can tell whether it was sent.
    block_signals(&[SIGCHLD]);
    let signal = if wants("tstp") { "TSTP" } else { "STOP" };
    let mut child = Command::new("/bin/sh")
        .args(["-c", &format!("kill -{signal} $$; read end; exit 9")])
        .stdin(Stdio::piped())
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
    if wants("continued") {
        kill_process(pid, Signal::CONT)?;
        let continued = WaitIdOptions::CONTINUED | WaitIdOptions::NOWAIT;
        waitid(WaitId::Pid(pid), continued)?.ok_or("nothing to wait for")?;
        // It tells of that itself, when it goes on.
        wait_until("the child to go on", SOON, || tree::is_waiting(child.id()));
        if wants("taken") {
            take_signal(&[SIGCHLD]).ok_or("nobody told that it goes on")?;
        }
    }
    control.serve(|question| match question.verb.as_str() {
        "state" => Ok(tree::state(child.id())
            .map(String::from)
            .unwrap_or_default()),
        "poll" => {
            let changed = WaitOptions::UNTRACED | WaitOptions::CONTINUED;
            let Some((_, status)) = waitpid(Some(pid), changed | WaitOptions::NOHANG)? else {
                return Ok("nothing".into());
            };
            let stop = status.stopping_signal();
            Ok(stop.map_or("continued".into(), |signal| format!("stopped by {signal}")))
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
