//! A machine's monitor, for what QEMU does by itself.
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::error::{Error, Result, file_error};

/// How long an answer, or a migration, may take.
const PATIENCE: Duration = Duration::from_secs(60);

/// A connection to a monitor.
pub struct Monitor {
    path: PathBuf,
    lines: BufReader<UnixStream>,
    /// QEMU's version.
    pub version: String,
}

impl Monitor {
    /// Connects as soon as somebody listens.
    ///
    /// # Errors
    /// When nobody does, or it is no monitor.
    pub fn to(path: &Path) -> Result<Self> {
        let failed = || file_error("talk to", path);
        let begun = Instant::now();
        let stream = loop {
            match UnixStream::connect(path) {
                Err(_) if begun.elapsed() < PATIENCE => {
                    std::thread::sleep(Duration::from_millis(1));
                }
                other => break other.map_err(failed())?,
            }
        };
        stream.set_read_timeout(Some(PATIENCE)).map_err(failed())?;
        let mut monitor = Self {
            path: path.to_owned(),
            lines: BufReader::new(stream),
            version: String::new(),
        };
        let greeting = monitor.line()?;
        let version = &greeting["QMP"]["version"]["qemu"];
        monitor.version = format!("{}.{}", version["major"], version["minor"]);
        monitor.call("qmp_capabilities", "{}")?;
        Ok(monitor)
    }

    /// Has it do something; `with` is JSON.
    ///
    /// # Errors
    /// When it does not.
    pub fn call(&mut self, command: &str, with: &str) -> Result<Value> {
        let text = format!("{{\"execute\":\"{command}\",\"arguments\":{with}}}\n");
        let said = self.lines.get_ref().write_all(text.as_bytes());
        said.map_err(file_error("talk to", &self.path))?;
        loop {
            let mut line = self.line()?;
            if line.get("error").is_some() {
                return Err(Error::Nothing {
                    what: format!("QEMU refuses {command}: {line}"),
                });
            }
            if let Some(answer) = line.get_mut("return") {
                return Ok(answer.take());
            }
        }
    }

    /// Sets a capability of migration.
    ///
    /// # Errors
    /// As [`Monitor::call`].
    pub fn capability(&mut self, name: &str, on: bool) -> Result<()> {
        let all = json!({"capabilities": [{"capability": name, "state": on}]});
        let set = self.call("migrate-set-capabilities", &all.to_string());
        set.map(drop)
    }

    /// Has QEMU write a machine into a file, as fast as it can.
    ///
    /// # Errors
    /// As [`Monitor::call`].
    pub fn migrate(&mut self, to: &Path) -> Result<()> {
        let all = json!({"max-bandwidth": 1_u64 << 40, "downtime-limit": 2000});
        self.call("migrate-set-parameters", &all.to_string())?;
        let uri = format!("exec:cat > {}", to.display());
        self.call("migrate", &json!({ "uri": uri }).to_string())?;
        self.wait_migrated()
    }

    /// Waits until a migration has ended.
    ///
    /// # Errors
    /// When it has failed.
    pub fn wait_migrated(&mut self) -> Result<()> {
        let begun = Instant::now();
        loop {
            let told = self.call("query-migrate", "{}")?;
            match told["status"].as_str() {
                Some("completed") => return Ok(()),
                Some("failed" | "cancelled") => {
                    return Err(Error::Nothing {
                        what: format!("QEMU's migration has failed: {told}"),
                    });
                }
                _ if begun.elapsed() > PATIENCE => {
                    return Err(Error::Late {
                        command: "QEMU's migration".to_owned(),
                        seconds: PATIENCE.as_secs(),
                    });
                }
                _ => std::thread::sleep(Duration::from_millis(1)),
            }
        }
    }

    fn line(&mut self) -> Result<Value> {
        let mut line = String::new();
        let read = self.lines.read_line(&mut line);
        read.map_err(file_error("talk to", &self.path))?;
        serde_json::from_str(&line).map_err(|source| Error::Numbers {
            path: self.path.clone(),
            source,
        })
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
