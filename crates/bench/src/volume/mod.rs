//! `bench volume`: how fast an ext4 volume is saved and brought back, beside dump(8) and others.
//!
//! The volume is a loop device with direct I/O over a file on a disk or in memory, filled with this
//! machine's own /usr; every round begins with a cold cache, and all ways take turns. What they
//! make goes to memory, so that the volume is all that the disk is busy with.

mod increment;
mod place;
mod raw;
mod rotating;
mod table;
mod ways;

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::error::{Result, kernel_error};
use crate::machine::Machine;
use crate::report;
use crate::runs;
use crate::tool::timed;

use place::{Device, Medium};
use rotating::RotatingDisk;
use ways::Method;

const BEGIN: &str = "<!-- volume:begin, written by `cargo xtask bench volume` -->";
const END: &str = "<!-- volume:end -->";

/// What is measured.
#[derive(clap::Args)]
pub struct Arguments {
    /// Fewer rounds of less; the results go to target/bench instead of docs.
    #[arg(long)]
    quick: bool,
    /// Samples of each way.
    #[arg(long, value_name = "N", default_value_t = 5)]
    rounds: usize,
    /// How much of /usr the volume has, in MiB.
    #[arg(long, value_name = "N", default_value_t = 3000)]
    mib: u64,
    /// How much the volume on the simulated rotating disk has, in MiB.
    #[arg(long, value_name = "N", default_value_t = 500)]
    rotating_mib: u64,
    /// A folder on a disk.
    #[arg(long, value_name = "FOLDER", default_value = "/var/tmp")]
    scratch: PathBuf,
    /// A folder in memory, for what is made.
    #[arg(long, value_name = "FOLDER", default_value = "/dev/shm")]
    memory: PathBuf,
    /// Where the table and the numbers are written.
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

/// All that was measured.
#[derive(Serialize, Deserialize)]
pub struct Numbers {
    pub machine: Machine,
    pub rounds: usize,
    pub used_mib: f64,
    pub files: u64,
    pub changed_mib: f64,
    /// Whole volumes saved.
    pub saved: Vec<Row>,
    /// Smaller ones, saved from a simulated rotating disk.
    #[serde(default)]
    pub rotating: Vec<Row>,
    /// How much those have in use.
    #[serde(default)]
    pub rotating_mib: f64,
    /// What has changed since.
    pub increments: Vec<Row>,
    /// Brought back.
    pub restored: Vec<Row>,
}

/// One way in one place.
#[derive(Serialize, Deserialize)]
pub struct Row {
    pub place: String,
    pub way: String,
    pub seconds: Vec<f64>,
    /// What it made.
    pub made_mib: f64,
}

/// Folders, and the stillframe that is measured.
pub struct Setting {
    pub stillframe: PathBuf,
    pub disk: tempfile::TempDir,
    pub memory: tempfile::TempDir,
    pub rounds: usize,
}

impl Setting {
    pub fn said(&self) -> PathBuf {
        self.disk.path().join("said")
    }

    /// A folder for what one way makes, emptied.
    pub fn fresh(&self) -> Result<PathBuf> {
        let folder = self.memory.path().join("made");
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir(&folder).map_err(kernel_error("make a folder"))?;
        Ok(folder)
    }
}

/// Measures everything, keeps the numbers and writes the table.
///
/// # Errors
/// When anything fails that is measured.
pub fn run(arguments: &Arguments) -> Result<()> {
    let (mib, rounds) = match arguments.quick {
        true => (arguments.mib.min(300), arguments.rounds.min(3)),
        false => (arguments.mib, arguments.rounds),
    };
    let scratch = |folder: &Path| {
        let made = tempfile::Builder::new()
            .prefix("volumes-")
            .tempdir_in(folder);
        made.map_err(kernel_error("make a scratch folder"))
    };
    let stillframe = std::env::var_os("STILLFRAME_BIN").unwrap_or_else(|| "stillframe".into());
    let setting = Setting {
        stillframe: stillframe.into(),
        disk: scratch(&arguments.scratch)?,
        memory: scratch(&arguments.memory)?,
        rounds,
    };
    let file = setting.disk.path().join("volume");
    let files = place::fill(&setting, &file, mib)?;
    let mut saved = Vec::new();
    let used = ways::used(&setting, &file)?;
    for (medium, scheduler) in [
        (Medium::Disk, "none"),
        (Medium::Disk, "mq-deadline"),
        (Medium::Disk, "bfq"),
        (Medium::Memory, "none"),
    ] {
        saved.extend(save(&setting, &file, &used, medium, scheduler)?);
    }
    let restored = restore(&setting, &file, &used)?;
    let (rotating, rotating_mib) = rotate(&setting, arguments.rotating_mib.min(mib))?;
    let (increments, changed_mib) = increment::measure(&setting, &file)?;
    let numbers = Numbers {
        machine: Machine::this(setting.disk.path()),
        rounds,
        used_mib: mib_in(&used),
        rotating,
        rotating_mib,
        files,
        changed_mib,
        saved,
        increments,
        restored,
    };
    let folder = report::folder(arguments.out.as_deref(), arguments.quick);
    let kept = runs::keep(&folder, &numbers.machine, "volume", &numbers)?;
    let text = format!("{}\n{}", table::of(&numbers), runs::link(&folder, &kept));
    println!("{text}");
    report::put_between(&folder.join("benchmarks.md"), [BEGIN, END], &text)
}

fn mib_of(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

fn mib_in(used: &raw::Ranges) -> f64 {
    let lens = used.iter().map(|range| range.end - range.start);
    mib_of(lens.sum::<u64>())
}

/// Has fast ways save a volume in turn that is on a simulated rotating disk; gives how much it has.
fn rotate(setting: &Setting, mib: u64) -> Result<(Vec<Row>, f64)> {
    let file = setting.memory.path().join("rotating");
    place::fill(setting, &file, mib)?;
    let used = ways::used(setting, &file)?;
    let disk = RotatingDisk::with(&file)?;
    let mut rows = Vec::new();
    for scheduler in ["mq-deadline", "bfq"] {
        let attach = || disk.attach(scheduler);
        let place = format!("rotating, {scheduler}");
        let ways = Method::ALL.into_iter().filter(|way| way.is_fast());
        rows.extend(in_turn(
            setting,
            &used,
            &place,
            &ways.collect::<Vec<_>>(),
            attach,
        )?);
    }
    let _ = std::fs::remove_file(&file);
    Ok((rows, mib_in(&used)))
}

/// Has all ways save the volume in turn.
fn save(
    setting: &Setting,
    file: &Path,
    used: &raw::Ranges,
    medium: Medium,
    scheduler: &str,
) -> Result<Vec<Row>> {
    let copy = medium.copy(setting, file)?;
    let place = format!("{}, {scheduler}", medium.name());
    // Slow ways are measured once, in one place: what a scheduler changes is seen of the others.
    let is_first = scheduler == "none" && medium == Medium::Disk;
    let ways = Method::ALL.into_iter();
    let ways = ways.filter(|way| is_first || way.is_fast());
    let attach = || {
        let device = Device::attach(&copy)?;
        device.schedule(scheduler)?;
        Ok(device)
    };
    let rows = in_turn(setting, used, &place, &ways.collect::<Vec<_>>(), attach)?;
    medium.remove(&copy);
    Ok(rows)
}

/// Has ways save a volume in turn; the slow ones once.
fn in_turn(
    setting: &Setting,
    used: &raw::Ranges,
    place: &str,
    ways: &[Method],
    attach: impl Fn() -> Result<Device>,
) -> Result<Vec<Row>> {
    let mut rows = ways.iter().map(|way| Row::new(place, way.name()));
    let mut rows = rows.by_ref().collect::<Vec<_>>();
    for round in 0..setting.rounds {
        for (way, row) in ways.iter().zip(&mut rows) {
            if round > 0 && !way.is_fast() {
                continue;
            }
            let device = attach()?;
            let made = setting.fresh()?;
            let mounted = way
                .needs_mount()
                .then(|| device.mount(setting, "ro"))
                .transpose()?;
            let command = way.command(setting, &device, mounted.as_ref(), &made)?;
            place::forget()?;
            let seconds = match command {
                None => raw::read(device.path(), used)?,
                Some(mut command) => timed(&mut command, &setting.said())?.ns as f64 / 1e9,
            };
            row.seconds.push(seconds);
            row.made_mib = mib_of(place::bytes_in(&made)?);
        }
    }
    let _ = std::fs::remove_dir_all(setting.memory.path().join("made"));
    Ok(rows)
}

/// Has the volume written back, and as many bytes to the same places.
fn restore(setting: &Setting, file: &Path, used: &raw::Ranges) -> Result<Vec<Row>> {
    let made = setting.fresh()?;
    let volume = Device::attach(file)?;
    let mut dump = Method::Shared
        .command(setting, &volume, None, &made)?
        .expect("a command");
    timed(&mut dump, &setting.said())?;
    drop(volume);
    let target = setting.disk.path().join("target");
    let mut rows = ["raw write, same blocks", "stillframe"].map(|way| Row::new("disk, none", way));
    for _ in 0..setting.rounds {
        for (number, row) in rows.iter_mut().enumerate() {
            let _ = std::fs::remove_file(&target);
            place::make_sparse(&target, file)?;
            let device = Device::attach(&target)?;
            device.schedule("none")?;
            place::forget()?;
            row.seconds.push(match number {
                0 => raw::write(device.path(), used)?,
                _ => {
                    let mut command = std::process::Command::new(&setting.stillframe);
                    command
                        .args(["volume", "restore", "-D"])
                        .arg(made.join("image"));
                    command.arg(device.path());
                    timed(&mut command, &setting.said())?.ns as f64 / 1e9
                }
            });
        }
    }
    Ok(rows.into())
}

impl Row {
    fn new(place: &str, way: &str) -> Self {
        Self {
            place: place.to_owned(),
            way: way.to_owned(),
            seconds: Vec::new(),
            made_mib: 0.0,
        }
    }
}
