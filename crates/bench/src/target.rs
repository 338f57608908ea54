//! A running subject, seen from outside: started, asked, compared, ended.
use std::fs::File;
use std::hash::{DefaultHasher, Hasher};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitOptions};

use crate::error::{Error, Result, file_error, kernel_error};
use crate::workload::Workload;

/// How long a subject that runs may take to look at the clock again.
const DEADLINE: Duration = Duration::from_secs(10);

/// What the first task tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TargetReport {
    /// How often it looked at the clock.
    pub beats: u64,
    /// The longest time between two looks, in nanoseconds.
    pub longest_ns: u64,
    /// When that ended, since 1970 in nanoseconds.
    pub end_ns: u64,
}

/// A subject's tree; its tasks are killed and reaped when it is dropped.
pub struct Target {
    pid: Pid,
    pulse_at: u64,
    memory_at: u64,
    workload: &'static Workload,
}

impl Target {
    /// Starts a subject and waits until all of it is there.
    ///
    /// # Errors
    /// When it cannot be started or ends early.
    pub fn start(workload: &'static Workload) -> Result<Self> {
        let program = PathBuf::from("/proc/self/exe");
        let program = std::fs::read_link(&program).map_err(file_error("read", &program))?;
        let mut command = Command::new(&program);
        command.args(["subject", workload.name]).current_dir("/");
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut child = command.spawn().map_err(|source| Error::Start {
            program: program.display().to_string(),
            source,
        })?;
        let pid = Pid::from_child(&child);
        let mut target = Self {
            pid,
            pulse_at: 0,
            memory_at: 0,
            workload,
        };
        let stdout = child.stdout.take().expect("stdout was made a pipe above");
        let mut line = String::new();
        let read = BufReader::new(stdout).read_line(&mut line);
        read.map_err(kernel_error("wait for a subject"))?;
        let mut words = line.split_whitespace().map(str::parse);
        let (Some(Ok(pulse_at)), Some(Ok(memory_at))) = (words.next(), words.next()) else {
            return Err(target.lost("start", "it ended before it was ready"));
        };
        (target.pulse_at, target.memory_at) = (pulse_at, memory_at);
        Ok(target)
    }

    /// Returns the first task's pid.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// Reads what the first task tells.
    ///
    /// # Errors
    /// When it is gone.
    pub fn pulse(&self) -> Result<TargetReport> {
        let mut bytes = [0; 24];
        let path = self.memory_path();
        File::open(&path)
            .and_then(|memory| memory.read_exact_at(&mut bytes, self.pulse_at))
            .map_err(file_error("read", &path))?;
        let word =
            |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        Ok(TargetReport {
            beats: word(0),
            longest_ns: word(8),
            end_ns: word(16),
        })
    }

    /// Forgets the longest time between two looks at the clock.
    ///
    /// # Errors
    /// When the first task is gone.
    pub fn forget_longest(&self) -> Result<()> {
        let path = self.memory_path();
        File::options()
            .write(true)
            .open(&path)
            .and_then(|memory| memory.write_all_at(&[0; 8], self.pulse_at + 8))
            .map_err(file_error("write", &path))
    }

    /// Waits until the first task looked at the clock again, and checks that the tree is whole.
    ///
    /// # Errors
    /// When it does not go on, or a task is missing.
    pub fn check_goes_on(&self, tool: &str) -> Result<()> {
        let before = self.pulse()?;
        let start = Instant::now();
        // The clock is looked at some ten times in a microsecond.
        while self.pulse()?.beats < before.beats + 100 {
            if start.elapsed() > DEADLINE {
                return Err(self.lost(tool, "it does not run"));
            }
            std::thread::yield_now();
        }
        let tasks = self.tasks()?.len();
        let wanted = self.workload.tasks();
        if tasks != wanted {
            return Err(self.lost(tool, &format!("{tasks} tasks of {wanted} are there")));
        }
        let table = PathBuf::from(format!("/proc/{}/fd", self.pid.as_raw_nonzero()));
        let open = std::fs::read_dir(&table).map_err(file_error("list", &table))?;
        let (open, wanted) = (open.count(), self.workload.descriptors);
        if open < wanted {
            return Err(self.lost(tool, &format!("{open} of {wanted} descriptors are there")));
        }
        Ok(())
    }

    /// Returns a number made from all bytes of the workload's memory.
    ///
    /// # Errors
    /// When the first task is gone.
    pub fn memory_hash(&self) -> Result<u64> {
        let path = self.memory_path();
        let memory = File::open(&path).map_err(file_error("open", &path))?;
        let mut hasher = DefaultHasher::new();
        let mut block = vec![0; 1 << 20];
        for offset in (0..self.workload.compared_bytes()).step_by(block.len()) {
            let left = self.workload.compared_bytes() - offset;
            block.truncate(usize::try_from(left).expect("64-bit addresses"));
            let read = memory.read_exact_at(&mut block, self.memory_at + offset);
            read.map_err(file_error("read", &path))?;
            hasher.write(&block);
        }
        Ok(hasher.finish())
    }

    /// Waits until every task that was killed by a dump is gone.
    ///
    /// # Errors
    /// When one of them lives on.
    pub fn reap(&self) -> Result<()> {
        loop {
            match rustix::process::waitpgid(self.pid, WaitOptions::empty()) {
                Ok(_) => {}
                Err(rustix::io::Errno::CHILD) => return Ok(()),
                Err(rustix::io::Errno::INTR) => {}
                Err(error) => return Err(kernel_error("wait for a subject")(error)),
            }
        }
    }

    /// Returns the pids of the subject's process group, zombies aside.
    ///
    /// # Errors
    /// When /proc cannot be listed.
    pub fn tasks(&self) -> Result<Vec<u32>> {
        let proc = PathBuf::from("/proc");
        let mut tasks = Vec::new();
        let group = self.pid.as_raw_nonzero().to_string();
        for entry in std::fs::read_dir(&proc).map_err(file_error("list", &proc))? {
            let entry = entry.map_err(file_error("list", &proc))?;
            let Some(pid) = entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok())
            else {
                continue;
            };
            // A process may end while it is looked at.
            let stat = std::fs::read_to_string(entry.path().join("stat")).unwrap_or_default();
            let Some((_, fields)) = stat.rsplit_once(") ") else {
                continue;
            };
            let fields: Vec<_> = fields.split(' ').collect();
            if fields.get(2) == Some(&group.as_str()) && fields[0] != "Z" {
                tasks.push(pid);
            }
        }
        Ok(tasks)
    }

    /// Returns an error that says what became of the subject in the hands of a program.
    pub fn lost(&self, tool: &str, what: &str) -> Error {
        let pid = self.pid.as_raw_nonzero().get();
        Error::Lost {
            tool: tool.into(),
            pid,
            what: what.into(),
        }
    }

    fn memory_path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/mem", self.pid))
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // The first task leads a session, so that the group is the tree; before, it is alone.
        let _ = rustix::process::kill_process_group(self.pid, Signal::KILL);
        let _ = rustix::process::kill_process(self.pid, Signal::KILL);
        let _ = self.reap();
        let _ = rustix::process::waitpid(Some(self.pid), WaitOptions::empty());
    }
}
