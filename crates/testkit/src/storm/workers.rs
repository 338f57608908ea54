//! Workers: processes that try seeds side by side, each in namespaces of its own.
//!
//! Pids, terminals' numbers and ports that a dumped tree is to have again are then nobody else's,
//! and pids do not come round in the middle of a seed.
use std::io::{self, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};

use rustix::io::Errno;
use rustix::process::WaitOptions;

/// One of several workers: every `of`-th seed from `number` on is its.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Worker {
    /// Its number.
    pub number: u64,
    /// How many there are.
    pub of: u64,
}

impl Worker {
    /// As [`Worker::text`] writes it.
    ///
    /// # Errors
    /// What is wrong with `text`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let numbers = text.split_once('/').and_then(|(number, of)| {
            let (number, of) = (number.parse().ok()?, of.parse().ok()?);
            (number < of).then_some(Self { number, of })
        });
        numbers.ok_or_else(|| format!("{text} is no worker"))
    }

    /// For a command line.
    pub fn text(self) -> String {
        format!("{}/{}", self.number, self.of)
    }

    /// Tells whether the `index`-th of all is its.
    pub fn has(self, index: u64) -> bool {
        index % self.of == self.number
    }

    /// Starts this program once more as this worker, with `arguments` besides, in namespaces of its
    /// own; it ends when the caller does.
    ///
    /// # Errors
    /// When unshare(1) cannot be started.
    pub fn start(self, arguments: &[std::ffi::OsString], report: &Path) -> io::Result<Child> {
        // The subject's program is built by the caller: there is no network to build it with.
        let _ = crate::subject::binary();
        Command::new("unshare")
            .args(["--pid", "--fork", "--mount", "--ipc", "--net"])
            .args(["--mount-proc", "--kill-child", "--"])
            .arg(std::env::current_exe()?)
            .args(arguments)
            .args(["--worker", &self.text(), "--report"])
            .arg(report)
            .env_remove("CARGO")
            .stdin(Stdio::piped())
            .spawn()
    }
}

/// Makes the namespaces of a worker usable, and has this process end when whoever started it does.
/// The first process of them goes no further: it becomes their init.
///
/// # Errors
/// When the loopback or the terminals cannot be made.
pub fn enter() -> io::Result<()> {
    if std::process::id() == 1 {
        std::process::exit(be_init()?);
    }
    crate::calls::isolated::furnish()?;
    // Anybody may ask for echoes here.
    std::fs::write("/proc/sys/net/ipv4/ping_group_range", "0 2147483647")?;
    std::thread::Builder::new().spawn(|| {
        // It is never written to: an end or an error is the end of the other side.
        let _ = io::stdin().read(&mut [0]);
        std::process::exit(1)
    })?;
    Ok(())
}

/// Has a worker do the work, and asks orphans how they ended until that has: a worker that waits
/// for a restore could not, and the restore may wait for their numbers.
fn be_init() -> io::Result<i32> {
    let worker = Command::new(std::env::current_exe()?)
        .args(std::env::args_os().skip(1))
        .spawn()?;
    loop {
        match rustix::process::wait(WaitOptions::empty()) {
            Ok(Some((ended, status))) if ended.as_raw_pid().cast_unsigned() == worker.id() => {
                return Ok(status.exit_status().unwrap_or(1));
            }
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_seed_is_of_one_worker() {
        let workers: Vec<Worker> = (0..3)
            .map(|number| Worker::parse(&Worker { number, of: 3 }.text()).unwrap())
            .collect();
        for index in 0..10 {
            assert_eq!(workers.iter().filter(|worker| worker.has(index)).count(), 1);
        }
        assert!(Worker::parse("3/3").is_err() && Worker::parse("x").is_err());
    }
}
