//! A program that dumps and restores: how it is called, how long it takes, what it leaves.
use std::ffi::OsString;
use std::fs::File;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use sys::realtime::Realtime;

use crate::error::{Error, Result, file_error, kernel_error};
use crate::subject::now_ns;

/// How long one dump or restore may take.
const DEADLINE_S: u64 = 120;

/// A program with criu(8)'s command line.
#[derive(Debug, Clone)]
pub struct Tool {
    /// Its name in the tables.
    pub name: String,
    /// What it says about itself.
    pub version: String,
    /// The words that start it.
    pub words: Vec<OsString>,
    /// Options that only it has, for each dump whose image need not be durable.
    pub volatile_options: &'static [&'static str],
    /// Options for each of its dumps.
    pub dump_options: &'static [&'static str],
    /// True if its dumps are durable by themselves.
    pub durable: bool,
}

/// When something began and how long it took.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Since 1970, in nanoseconds.
    pub start_ns: u64,
    /// In nanoseconds.
    pub ns: u64,
}

impl Tool {
    /// Returns the command that dumps a tree into an existing folder.
    pub fn dump(&self, pid: Pid, images: &Path, leave_running: bool, durable: bool) -> Command {
        let mut command = self.command("dump", images);
        command.args(["-t", &pid.as_raw_nonzero().to_string()]);
        command.args(self.dump_options);
        if leave_running {
            command.arg("--leave-running");
        }
        if !durable {
            command.args(self.volatile_options);
        }
        command
    }

    /// Returns the command that saves a tree's memory into an existing folder while it runs.
    pub fn pre_dump(&self, pid: Pid, images: &Path) -> Command {
        let mut command = self.command("pre-dump", images);
        command.args(["-t", &pid.as_raw_nonzero().to_string()]);
        command.args(self.volatile_options);
        command
    }

    /// Returns the command that restores a tree and leaves it alone.
    pub fn restore(&self, images: &Path) -> Command {
        let mut command = self.command("restore", images);
        command.arg("-d");
        command
    }

    /// Returns the command that serves the pages of lazy restores.
    pub fn lazy_pages(&self, images: &Path) -> Command {
        self.command("lazy-pages", images)
    }

    /// Returns how long the dump of an image planned its restore, where it tells.
    pub fn planned_ms(&self, images: &Path) -> Option<f64> {
        let mut command = Command::new(&self.words[0]);
        command
            .args(&self.words[1..])
            .args(["show", "--stats", "--json"]);
        let said = command.arg(images).stdin(Stdio::null()).output().ok()?;
        let told: serde_json::Value = serde_json::from_slice(&said.stdout).ok()?;
        let plan_us = told["layers"][0]["statistics"]["plan_time"].as_u64()?;
        Some(plan_us as f64 / 1e3)
    }

    fn command(&self, what: &str, images: &Path) -> Command {
        let mut command = Command::new(&self.words[0]);
        command
            .args(&self.words[1..])
            .arg(what)
            .arg("-D")
            .arg(images)
            .current_dir("/");
        command.stdin(Stdio::null());
        command
    }
}

/// Runs a command to its end, with its output in a file, and returns how long it took. Its end is
/// noticed when it comes, even if the subject leaves no processor to those who want to know.
///
/// # Errors
/// When it cannot be started, fails (with the end of what it said) or does not end.
pub fn timed(command: &mut Command, said: &Path) -> Result<Timing> {
    let output = File::create(said).map_err(file_error("create", said))?;
    let second = output.try_clone().map_err(file_error("share", said))?;
    command.stdout(output).stderr(second);
    let _realtime = Realtime::new().map_err(kernel_error("take real-time priority"))?;
    let start_ns = now_ns();
    let mut child = command.spawn().map_err(|source| Error::Start {
        program: name(command),
        source,
    })?;
    let pidfd = pidfd_open(Pid::from_child(&child), PidfdFlags::empty())
        .map_err(kernel_error("watch a program"))?;
    let deadline = Timespec {
        tv_sec: DEADLINE_S.cast_signed(),
        tv_nsec: 0,
    };
    let ended = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&deadline))
        .map_err(kernel_error("watch a program"))?;
    if ended == 0 {
        let _ = child.kill();
        let _ = child.wait();
        return Err(Error::Late {
            command: name(command),
            seconds: DEADLINE_S,
        });
    }
    let ns = now_ns() - start_ns;
    let status = child.wait().map_err(kernel_error("wait for a program"))?;
    if !status.success() {
        return Err(Error::Status {
            command: name(command),
            status,
            said: end_of(said),
        });
    }
    Ok(Timing { start_ns, ns })
}

/// Returns the last lines of a file.
pub fn end_of(path: &Path) -> String {
    let text = std::fs::read(path).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(12)..].join("\n")
}

/// Returns a command as one would type it.
pub fn name(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

/// Returns how many bytes a folder's files take on their medium, logs aside.
///
/// # Errors
/// When it cannot be listed.
pub fn image_bytes(images: &Path) -> Result<u64> {
    const BLOCK_BYTES: u64 = 512;
    let mut bytes = 0;
    for path in files(images)? {
        if path.extension().is_none_or(|ending| ending != "log") {
            let metadata = std::fs::metadata(&path).map_err(file_error("look at", &path))?;
            bytes += metadata.blocks() * BLOCK_BYTES;
        }
    }
    Ok(bytes)
}

/// Writes a folder and its files through to the disk.
///
/// # Errors
/// When one of them cannot be opened or written.
pub fn make_durable(images: &Path) -> Result<()> {
    for path in files(images)?.iter().map(PathBuf::as_path).chain([images]) {
        let file = File::open(path).map_err(file_error("open", path))?;
        file.sync_all().map_err(file_error("write through", path))?;
    }
    Ok(())
}

fn files(images: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(images).map_err(file_error("list", images))? {
        let entry = entry.map_err(file_error("list", images))?;
        if entry
            .file_type()
            .map_err(file_error("look at", images))?
            .is_file()
        {
            found.push(entry.path());
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_program_said_is_in_its_error() {
        let folder = tempfile::tempdir().unwrap();
        let said = folder.path().join("said");
        let mut command = Command::new("sh");
        command.args(["-c", "echo no such luck; exit 3"]);
        let error = timed(&mut command, &said).unwrap_err().to_string();
        assert!(
            error.contains("exit status: 3") && error.ends_with("no such luck"),
            "{error}"
        );
        assert!(timed(&mut Command::new("true"), &said).unwrap().ns > 0);
    }

    #[test]
    fn logs_are_no_part_of_the_image() {
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(image_bytes(folder.path()).unwrap(), 0);
        std::fs::write(folder.path().join("dump.log"), [1; 100]).unwrap();
        assert_eq!(image_bytes(folder.path()).unwrap(), 0);
        std::fs::write(folder.path().join("pages"), [1; 10_000]).unwrap();
        make_durable(folder.path()).unwrap();
        let bytes = image_bytes(folder.path()).unwrap();
        assert!((10_000..100_000).contains(&bytes), "{bytes}");
    }
}
