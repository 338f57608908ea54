//! What QEMU does by itself: how it saves a machine, and starts it again.
use std::path::{Path, PathBuf};
use std::time::Instant;

use serde_json::json;
use testkit::machine::linux::{Line, Linux};

use super::{Bench, MIB};
use crate::error::{Error, Result, file_error};
use crate::monitor::{Monitor, private_mib};

/// Threads that write and read pages.
const CHANNELS: u32 = 2;

/// A way of QEMU's to save a machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QemuMethod {
    /// A migration into a program that writes a file.
    Cat,
    /// A migration into a file.
    File,
    /// The same, with each page at a place of its own, written by several threads.
    Mapped,
    /// A snapshot in a qcow2 file.
    Snapshot,
}

impl QemuMethod {
    /// Those that QEMU of this major version has.
    pub fn of(major: u32) -> Vec<Self> {
        match major {
            ..9 => vec![Self::Cat, Self::Snapshot],
            9.. => vec![Self::Cat, Self::File, Self::Mapped, Self::Snapshot],
        }
    }

    /// What a save in this way is called.
    pub const fn save(self) -> &'static str {
        match self {
            Self::Cat => "QEMU, migrate exec:cat",
            Self::File => "QEMU, migrate file:",
            Self::Mapped => "QEMU, migrate file:, mapped-ram with multifd",
            Self::Snapshot => "QEMU, savevm",
        }
    }

    /// What a start of what was saved so is called.
    pub const fn start(self) -> &'static str {
        match self {
            Self::Cat => "QEMU, -incoming exec:cat",
            Self::File => "QEMU, -incoming file:",
            Self::Mapped => "QEMU, -incoming file:, mapped-ram with multifd",
            Self::Snapshot => "QEMU, -loadvm",
        }
    }

    /// The file that a save of this name goes to.
    pub fn file(self, folder: &Path, name: &str) -> PathBuf {
        let end = match self {
            Self::Cat => "stream",
            Self::File => "file",
            Self::Mapped => "mapped",
            Self::Snapshot => "snapshots",
        };
        folder.join(format!("{name}.{end}"))
    }

    /// Where QEMU migrates to.
    fn to(self, file: &Path) -> String {
        match self {
            Self::Cat => format!("exec:cat > {}", file.display()),
            _ => format!("file:{}", file.display()),
        }
    }

    /// Saves a machine, which goes on; gives how long that took, in ms.
    ///
    /// # Errors
    /// When QEMU does not.
    pub fn run(self, guest: &Linux, file: &Path) -> Result<f64> {
        let mut monitor = Monitor::to(&guest.qmp)?;
        if self == Self::Snapshot {
            let begun = Instant::now();
            let told = monitor.human("savevm saved")?;
            let took = begun.elapsed();
            return match told.is_empty() {
                true => Ok(took.as_secs_f64() * 1e3),
                false => Err(Error::Nothing { what: told }),
            };
        }
        // What is left of an earlier one takes time to be given back.
        let _ = std::fs::remove_file(file);
        self.set(&mut monitor)?;
        let begun = Instant::now();
        monitor.migrate(&self.to(file))?;
        monitor.call("cont", json!({}))?;
        let took = begun.elapsed();
        monitor.capability("multifd", false)?;
        if self == Self::Mapped {
            monitor.capability("mapped-ram", false)?;
        }
        Ok(took.as_secs_f64() * 1e3)
    }

    fn set(self, monitor: &mut Monitor) -> Result<()> {
        if self == Self::Mapped {
            monitor.capability("mapped-ram", true)?;
            monitor.capability("multifd", true)?;
            let with = json!({ "multifd-channels": CHANNELS });
            monitor.call("migrate-set-parameters", with)?;
        }
        Ok(())
    }
}

/// Has the drive for snapshots of a machine go on in a qcow2 file, which can hold some.
///
/// # Errors
/// When QEMU does not.
pub fn make_snapshots(guest: &Linux, folder: &Path, name: &str) -> Result<()> {
    let file = QemuMethod::Snapshot.file(folder, name);
    let _ = std::fs::remove_file(&file);
    let with = json!({ "device": "snapshots", "snapshot-file": file, "format": "qcow2" });
    let mut monitor = Monitor::to(&guest.qmp)?;
    monitor.call("blockdev-snapshot-sync", with).map(drop)
}

/// The words for the drive that snapshots of a machine go to.
///
/// # Errors
/// When its file cannot be made.
pub fn drive(folder: &Path, name: &str) -> Result<[String; 2]> {
    let file = folder.join(format!("{name}.empty"));
    let made = std::fs::File::create(&file).and_then(|made| made.set_len(1 << 20));
    made.map_err(file_error("make", &file))?;
    let drive = format!("file={},format=raw,if=none,id=snapshots", file.display());
    Ok(["-drive".to_owned(), drive])
}

impl Bench {
    /// Starts one machine of what QEMU has saved in `folder`; gives what [`Bench::ours`] does.
    pub fn theirs(&self, way: QemuMethod, folder: &Path) -> Result<Vec<f64>> {
        let file = way.file(folder, "base");
        let mut more = vec!["-incoming", "defer"];
        let drive = format!("file={},format=qcow2,if=none,id=snapshots", file.display());
        if way == QemuMethod::Snapshot {
            more = vec!["-drive", &drive, "-loadvm", "saved"];
        }
        let words = self.words("theirs.memory", "on");
        // QEMU takes a file as it is.
        let _ = std::fs::remove_file(self.path("theirs.memory"));
        let begun = Instant::now();
        let machine = Linux::start(&self.folder, "theirs", &words, &more);
        let mut monitor = Monitor::to(&machine.qmp)?;
        if way != QemuMethod::Snapshot {
            way.set(&mut monitor)?;
            let from = match way {
                QemuMethod::Cat => format!("exec:cat {}", file.display()),
                _ => format!("file:{}", file.display()),
            };
            monitor.begin_incoming(&from)?;
            monitor.wait_migrated()?;
            monitor.call("cont", json!({}))?;
        }
        answered(begun, &[machine])
    }

    /// Starts machines that map QEMU's template.
    pub fn their_clones(&self, count: usize) -> Result<Vec<f64>> {
        let begun = Instant::now();
        let mut machines = Vec::new();
        for number in 0..count {
            let words = self.words("template.memory", "off");
            let name = format!("theirs-{number}");
            let more = ["-incoming", "defer"];
            machines.push(Linux::start(&self.folder, &name, &words, &more));
        }
        let mut monitors = Vec::new();
        for machine in &machines {
            let mut monitor = Monitor::to(&machine.qmp)?;
            monitor.capability("x-ignore-shared", true)?;
            monitor.begin_incoming(&format!("exec:cat {}", self.path("devices").display()))?;
            monitors.push(monitor);
        }
        for monitor in &mut monitors {
            monitor.wait_migrated()?;
            monitor.call("cont", json!({}))?;
        }
        answered(begun, &machines)
    }

    /// How long QEMU takes until its monitor answers.
    pub fn alone(&self) -> Result<Vec<f64>> {
        let words = self.words("alone.memory", "on");
        let begun = Instant::now();
        let machine = Linux::start(&self.folder, "alone", &words, &["-S"]);
        Monitor::to(&machine.qmp)?;
        Ok(vec![begun.elapsed().as_secs_f64() * 1e3])
    }
}

/// When all run, by now, and the first has answered, in ms, and the MiB of each.
fn answered(begun: Instant, machines: &[Linux]) -> Result<Vec<f64>> {
    let took = begun.elapsed().as_secs_f64() * 1e3;
    let mut line = Line::to(&machines[0].serial);
    assert_eq!(line.ask("written"), "0 0", "a machine of {MIB} MiB");
    let answered = begun.elapsed().as_secs_f64() * 1e3;
    let pids = machines.iter().map(|machine| machine.pid() as i32);
    let mib = private_mib(&pids.collect::<Vec<_>>())?;
    Ok(vec![answered, took, mib])
}
