//! A command that is killed, or stands still for a while, at a chosen system call of its own.

use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use sys::arch::Registers;
use sys::ptrace::{self, Event};

use crate::wait::{SOON, wait_until};

/// The number of linkat(2), which gives a file without a name one.
pub const LINKAT: u64 = 265;

const CLONE: u64 = 56;
const SIGCHLD: u64 = 17;
const CLONE_VM: u64 = 0x100;

/// How a run went.
#[derive(Debug)]
pub enum Run {
    /// It ended by itself before.
    Ended(ExitStatus),
    /// It was killed when it was about to make this call.
    Killed(u64),
    /// It stood still at its call, and ended by itself later.
    Held(ExitStatus),
}

/// Runs `command` and kills it before the `at`-th system call, from 0, that its first thread makes
/// behind its first fork(2). Processes that it makes are left to themselves.
///
/// # Panics
/// When it cannot be started or traced.
pub fn kill_behind_fork(command: &Command, at: usize) -> Run {
    kill_from(command, is_fork, at + 1)
}

/// Runs `command` and kills it before the `at`-th system call, from 0, that its first thread makes
/// from the first on that `begins` says begins the count. Processes that it makes are left to
/// themselves.
///
/// # Panics
/// When it cannot be started or traced.
pub fn kill_from(command: &Command, begins: impl Fn(&Registers) -> bool, at: usize) -> Run {
    act_from(command, begins, at, None)
}

/// Runs `command` to its end, and has it stand still for `time` before a call that is chosen as in
/// [`kill_from`]: it does nothing then, and other processes see it in that call.
///
/// # Panics
/// When it cannot be started or traced.
pub fn hold_from(
    command: &Command,
    begins: impl Fn(&Registers) -> bool,
    at: usize,
    time: Duration,
) -> Run {
    act_from(command, begins, at, Some(time))
}

/// Kills the command at the call, or holds it there for a time.
fn act_from(
    command: &Command,
    begins: impl Fn(&Registers) -> bool,
    at: usize,
    hold: Option<Duration>,
) -> Run {
    let mut stopped = Command::new("sh");
    stopped
        .args(["-c", "kill -STOP $$; exec \"$@\"", "sh"])
        .arg(command.get_program())
        .args(command.get_args())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    for (name, value) in command.get_envs() {
        stopped.env(name, value.expect("variables are set only"));
    }
    let mut child = stopped.spawn().expect("a shell starts");
    let pid = child.id();
    wait_until("the shell to stop", SOON, || {
        crate::tree::state(pid) == Some('T')
    });
    let tid = pid.cast_signed();
    ptrace::seize(tid, true).expect("a child can be traced");
    crate::tree::signal(pid, rustix::process::Signal::CONT);
    // How many calls were begun since the count began.
    let (mut count, mut held) = (None, false);
    loop {
        let signal = match ptrace::wait(tid).expect("it is traced").1 {
            Event::Ended(status) => {
                let status = std::os::unix::process::ExitStatusExt::from_raw(status);
                // The tracer's wait was the parent's, too.
                let _ = child.wait();
                return if held {
                    Run::Held(status)
                } else {
                    Run::Ended(status)
                };
            }
            Event::Call => {
                let registers = ptrace::registers(tid).expect("it is stopped");
                if is_entry(&registers) && (count.is_some() || begins(&registers)) {
                    let is_there = count == Some(at) || count.is_none() && at == 0;
                    match hold {
                        Some(time) if is_there => {
                            std::thread::sleep(time);
                            held = true;
                        }
                        None if is_there => {
                            child.kill().expect("it lives");
                            child.wait().expect("it is a child");
                            return Run::Killed(registers.orig_rax);
                        }
                        _ => {}
                    }
                    count = Some(count.unwrap_or(0) + 1);
                }
                0
            }
            Event::Signal(signal) => signal,
            Event::Stop(_) | Event::Other(_) => 0,
        };
        ptrace::resume_to_call(tid, signal).expect("it is stopped");
    }
}

/// Tells whether a thread that was stopped at a call is about to make it, and not at its end.
fn is_entry(registers: &Registers) -> bool {
    const ENOSYS: u64 = 38;
    registers.rax == ENOSYS.wrapping_neg()
}

/// Tells whether the thread makes a process that has memory of its own.
fn is_fork(registers: &Registers) -> bool {
    let flags = registers.rdi;
    registers.orig_rax == CLONE && flags & 0xff == SIGCHLD && flags & CLONE_VM == 0
}
