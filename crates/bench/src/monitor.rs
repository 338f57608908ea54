//! What QEMU does by itself, told by its monitor.
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ::vm::qemu::{Qmp, Version};
use serde_json::{Value, json};

use crate::error::{Error, Result, file_error};

/// How long an answer, or a migration, may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// A connection to a monitor.
pub struct Monitor {
    qmp: Qmp,
    /// QEMU's version.
    pub version: Version,
}

impl Monitor {
    /// Connects as soon as somebody listens.
    ///
    /// # Errors
    /// When nobody does, or it is no monitor.
    pub fn to(path: &Path) -> Result<Self> {
        let begun = Instant::now();
        let mut qmp = loop {
            match Qmp::connect(path) {
                Err(_) if begun.elapsed() < PATIENCE => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                other => break other.map_err(Error::monitor)?,
            }
        };
        let version = qmp.greet(PATIENCE).map_err(Error::monitor)?;
        Ok(Self { qmp, version })
    }

    /// Has it do something.
    ///
    /// # Errors
    /// When it does not.
    pub fn call(&mut self, command: &'static str, with: Value) -> Result<Value> {
        self.qmp.call(command, with).map_err(Error::monitor)
    }

    /// What it says to a command for people.
    ///
    /// # Errors
    /// As [`Monitor::call`].
    pub fn human(&mut self, line: &str) -> Result<String> {
        self.qmp.human(line).map_err(Error::monitor)
    }

    /// Sets a capability of migration.
    ///
    /// # Errors
    /// As [`Monitor::call`].
    pub fn capability(&mut self, name: &str, on: bool) -> Result<()> {
        let all = json!({"capabilities": [{"capability": name, "state": on}]});
        self.call("migrate-set-capabilities", all).map(drop)
    }

    /// Has QEMU write a machine somewhere, as fast as it can.
    ///
    /// # Errors
    /// As [`Monitor::call`].
    pub fn migrate(&mut self, to: &str) -> Result<()> {
        let all = json!({"max-bandwidth": 1_u64 << 40, "downtime-limit": 20_000});
        self.call("migrate-set-parameters", all)?;
        self.capability("events", true)?;
        self.call("migrate", json!({ "uri": to }))?;
        self.wait_migrated()?;
        // It tells the end before it has stopped the guest, and would stop one that goes on.
        while self.call("query-status", json!({}))?["status"] == "finish-migrate" {
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    /// Has QEMU read a machine from somewhere, and wait until it has.
    ///
    /// # Errors
    /// As [`Monitor::call`].
    pub fn begin_incoming(&mut self, from: &str) -> Result<()> {
        self.capability("events", true)?;
        self.call("migrate-incoming", json!({ "uri": from }))
            .map(drop)
    }

    /// Waits until a migration has ended that tells of events.
    ///
    /// # Errors
    /// When it has failed.
    pub fn wait_migrated(&mut self) -> Result<()> {
        let end = self.qmp.end_of_migration(PATIENCE);
        match end.map_err(Error::monitor)?.as_str() {
            "completed" => Ok(()),
            other => Err(Error::Nothing {
                what: format!("QEMU's migration has {other}"),
            }),
        }
    }
}

/// The memory that each of some processes has to itself, on average, in MiB.
///
/// # Errors
/// When one has ended.
pub fn private_mib(pids: &[i32]) -> Result<f64> {
    let mut kib = 0;
    for pid in pids {
        let path = PathBuf::from(format!("/proc/{pid}/smaps_rollup"));
        let text = std::fs::read_to_string(&path).map_err(file_error("read", &path))?;
        let lines = text.lines().filter(|line| line.starts_with("Private_"));
        let words = lines.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
        kib += words.sum::<u64>();
    }
    Ok(kib as f64 / 1024.0 / pids.len().max(1) as f64)
}
