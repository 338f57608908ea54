//! Processes that tests have left running: they are named and killed.
//!
//! One that has the output of the tests open would have its reader wait for ever.
use std::ffi::OsStr;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use rustix::process::{Pid, Signal, kill_process};

/// How what a run of tests has started is known.
pub struct ProcessMarks {
    /// A `NAME=value` of the environment that only they have.
    variable: Vec<u8>,
    /// The pipe that they write to, as /proc/PID/fd tells it.
    output: PathBuf,
}

impl ProcessMarks {
    /// The processes with `name=value` in their environment, and those that have the other end of
    /// the pipe `output` open.
    pub fn new(name: &str, value: &OsStr, output: BorrowedFd<'_>) -> std::io::Result<Self> {
        let mut variable = format!("{name}=").into_bytes();
        variable.extend_from_slice(value.as_bytes());
        let link = format!("/proc/self/fd/{}", output.as_raw_fd());
        let output = std::fs::read_link(link)?;
        Ok(Self { variable, output })
    }

    /// Kills all of them that are there now; what they were, for a message.
    pub fn kill_all(&self) -> Vec<String> {
        let own = rustix::process::getpid();
        let pids = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        let others = pids.filter_map(Pid::from_raw).filter(|pid| *pid != own);
        let mut killed = Vec::new();
        for pid in others.filter(|pid| self.fit(*pid)) {
            let name = std::fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            if kill_process(pid, Signal::KILL).is_ok() {
                killed.push(format!("{pid} ({})", name.trim_end()));
            }
        }
        killed
    }

    fn fit(&self, pid: Pid) -> bool {
        let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let mut variables = environment.split(|byte| *byte == 0);
        variables.any(|variable| variable == self.variable) || self.writes(pid)
    }

    fn writes(&self, pid: Pid) -> bool {
        let links = std::fs::read_dir(format!("/proc/{pid}/fd"));
        let mut links = links.into_iter().flatten().flatten();
        links.any(|link| std::fs::read_link(link.path()).is_ok_and(|file| file == self.output))
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;
    use std::process::{Child, Command, Stdio};

    use super::*;

    /// A shell that has become `cat` by `script` and reads, with the mark `variable`.
    fn start(script: &str, variable: &str) -> Child {
        let mut command = Command::new("sh");
        command.args(["-c", script]).env("LEFTOVER_TEST", variable);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let child = command.spawn().expect("a shell");
        let of = |name: &str| std::fs::read_to_string(format!("/proc/{}/{name}", child.id()));
        // `read(0, ...)`: before that it can have the name already, but not its environment.
        while !of("syscall").expect("it is there").starts_with("0 0x0 ")
            || of("comm").expect("it is there") != "cat\n"
        {
            std::thread::yield_now();
        }
        child
    }

    #[test]
    fn who_is_marked_or_holds_the_output_is_killed() {
        // `env -i` clears the mark, and the redirection lets go of the output.
        let mut holder = start("exec env -i cat", "here");
        let mut marked = start("exec cat >/dev/null", "here");
        let mut other = start("exec cat", "elsewhere");
        let output = holder.stdout.take().expect("a pipe");
        let marks = ProcessMarks::new("LEFTOVER_TEST", OsStr::new("here"), output.as_fd());
        let killed = marks.expect("a pipe").kill_all();
        assert_eq!(killed.len(), 2, "{killed:?}");
        assert!(!holder.wait().expect("it ends").success());
        assert!(!marked.wait().expect("it ends").success());
        drop(other.stdin.take());
        assert!(other.wait().expect("it ends").success());
    }
}
