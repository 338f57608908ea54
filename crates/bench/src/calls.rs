//! Counts the system calls of a program and of all that it starts, by the kernel's own trace.
//!
//! A tracer like strace(1) cannot watch a restore: a task has one tracer, and the restorer needs to
//! be it. The tracepoint `raw_syscalls:sys_enter` has no such limit. See the kernel's
//! Documentation/trace/ftrace.rst and events.rst.
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use syscalls::Sysno;

use crate::error::{Error, Result, file_error, kernel_error};
use crate::tool::{end_of, name};

/// Where the kernel's trace is found.
const TRACING: &str = "/sys/kernel/tracing";
/// Room for events, in KiB for each core: 900,000 calls.
const BUFFER_KIB: &str = "65536";

/// A trace of its own, beside what others trace; removed when it is dropped.
pub struct Counter {
    folder: PathBuf,
}

impl Counter {
    /// Makes a trace; nothing where the kernel has none or does not allow it.
    pub fn new() -> Option<Self> {
        let tracing = Path::new(TRACING);
        if !tracing.join("instances").exists() {
            let mut mount = Command::new("mount");
            mount
                .args(["-t", "tracefs", "tracefs", TRACING])
                .stderr(Stdio::null());
            mount.status().ok().filter(|status| status.success())?;
        }
        let folder = tracing.join(format!("instances/stillframe-{}", std::process::id()));
        std::fs::create_dir(&folder).ok()?;
        let counter = Self { folder };
        counter.set("buffer_size_kb", BUFFER_KIB).ok()?;
        // Programs that a counted program starts are counted as well.
        counter.set("options/event-fork", "1").ok()?;
        Some(counter)
    }

    /// Runs a command to its end and returns the calls by name that it and `others` make from the
    /// execve on that starts it.
    ///
    /// # Errors
    /// When it cannot be started or fails, or when events were lost.
    pub fn count(
        &self,
        command: &Command,
        others: &[u32],
        said: &Path,
    ) -> Result<BTreeMap<String, u64>> {
        let output = File::create(said).map_err(file_error("create", said))?;
        let second = output.try_clone().map_err(file_error("share", said))?;
        // The shell waits until its pid is on the kernel's list, and becomes the program.
        let mut shell = Command::new("sh");
        shell.args(["-c", "read go; exec \"$@\" </dev/null", "sh"]);
        shell
            .arg(command.get_program())
            .args(command.get_args())
            .current_dir("/");
        shell.stdin(Stdio::piped()).stdout(output).stderr(second);
        let mut child = shell.spawn().map_err(|source| Error::Start {
            program: "sh".into(),
            source,
        })?;
        let pid = child.id();
        self.set("trace", "")?;
        let pids: Vec<_> = others.iter().chain([&pid]).map(u32::to_string).collect();
        self.set("set_event_pid", &pids.join(" "))?;
        self.set("events/raw_syscalls/sys_enter/enable", "1")?;
        let mut stdin = child.stdin.take().expect("stdin was made a pipe above");
        stdin
            .write_all(b"go\n")
            .map_err(kernel_error("let the shell go on"))?;
        drop(stdin);
        let status = child.wait().map_err(kernel_error("wait for a program"))?;
        self.set("events/raw_syscalls/sys_enter/enable", "0")?;
        self.set("set_event_pid", "")?;
        if !status.success() {
            return Err(Error::Status {
                command: name(command),
                status,
                said: end_of(said),
            });
        }
        self.refuse_overrun()?;
        let trace = self.folder.join("trace");
        let trace_file = File::open(&trace).map_err(file_error("open", &trace))?;
        tally(BufReader::new(trace_file), pid).map_err(file_error("read", &trace))
    }

    fn set(&self, name: &str, value: &str) -> Result<()> {
        let path = self.folder.join(name);
        let mut file = File::options()
            .write(true)
            .truncate(true)
            .open(&path)
            .map_err(file_error("open", &path))?;
        // Opening the file empties its list; a write of nothing never reaches the kernel.
        file.write_all(value.as_bytes())
            .map_err(file_error("write", &path))
    }

    /// Refuses a trace whose oldest events were overwritten.
    fn refuse_overrun(&self) -> Result<()> {
        let folder = self.folder.join("per_cpu");
        for entry in std::fs::read_dir(&folder).map_err(file_error("list", &folder))? {
            let path = entry
                .map_err(file_error("list", &folder))?
                .path()
                .join("stats");
            let stats = std::fs::read_to_string(&path).map_err(file_error("read", &path))?;
            let lost = stats.lines().any(|line| {
                let lost = line
                    .strip_prefix("overrun: ")
                    .or(line.strip_prefix("dropped events: "));
                lost.is_some_and(|count| count.trim() != "0")
            });
            if lost {
                return Err(Error::Nothing {
                    what: format!("{}: events were lost", path.display()),
                });
            }
        }
        Ok(())
    }
}

impl Drop for Counter {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir(&self.folder);
    }
}

/// Adds up a trace's calls by name, leaving out those of the shell before it became the program.
fn tally(trace: impl BufRead, shell: u32) -> std::io::Result<BTreeMap<String, u64>> {
    let mut calls = BTreeMap::new();
    let mut begun = false;
    for line in trace.lines() {
        let Some((pid, number)) = event(&line?) else {
            continue;
        };
        begun |= pid == shell && Sysno::new(number) == Some(Sysno::execve);
        if begun {
            let name =
                Sysno::new(number).map_or_else(|| number.to_string(), |call| call.to_string());
            *calls.entry(name).or_insert(0) += 1;
        }
    }
    Ok(calls)
}

/// Reads `COMMAND-PID [CORE] FLAGS TIME: sys_enter: NR NUMBER (…)`.
fn event(line: &str) -> Option<(u32, usize)> {
    let (head, event) = line.split_once(": sys_enter: NR ")?;
    let (thread, _) = head.split_once(" [")?;
    let pid = thread.trim_end().rsplit_once('-')?.1.parse().ok()?;
    let number = event.split(' ').next()?.parse().ok()?;
    Some((pid, number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn calls_are_counted_from_the_execve() {
        let trace = "# tracer: nop\n\
            \x20   sh-7   [001] .....  10.5: sys_enter: NR 0 (0, 1, 1, 0, 0, 0)\n\
            \x20   sh-7   [001] .....  10.6: sys_enter: NR 59 (0, 1, 1, 0, 0, 0)\n\
            \x20a-b [c-8   [000] .....  10.7: sys_enter: NR 1 (0, 1, 1, 0, 0, 0)\n\
            \x20 x y-7   [001] .....  10.8: sys_enter: NR 1 (0, 1, 1, 0, 0, 0)\n";
        let calls = tally(trace.as_bytes(), 7).unwrap();
        let want = [("execve".to_string(), 1), ("write".to_string(), 1)];
        assert_eq!(calls.into_iter().collect::<Vec<_>>(), want);
    }
}
