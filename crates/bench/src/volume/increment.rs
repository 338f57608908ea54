//! What has changed since: little of many files.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use testkit::volumes::noise;

use super::place::{self, Device};
use super::ways::restic;
use super::{Row, Setting, kernel_error, mib_of};
use crate::error::{Result, file_error};
use crate::tool::timed;

/// How much is changed, and how much at a time in files that are larger.
const CHANGED_BYTES: u64 = 73 << 20;
const PIECE_BYTES: u64 = 512 << 10;

/// What each way begins with, and what it does then.
struct Methods<'a> {
    setting: &'a Setting,
    folder: PathBuf,
}

impl Methods<'_> {
    const NAMES: [&'static str; 3] = ["stillframe", "dump -1 -b 1000", "restic"];

    fn command(&self, number: usize, device: &Device, files: &Path, is_first: bool) -> Command {
        let at = |name: &str| self.folder.join(name);
        let mut command = match number {
            0 => {
                let mut command = Command::new(&self.setting.stillframe);
                command.args(["volume", "dump", "--no-sync", "-D"]);
                command.arg(at(if is_first { "base" } else { "made" }));
                if !is_first {
                    command.args(["--prev-images-dir", "../base"]);
                }
                command.arg(device.path());
                command
            }
            1 => {
                let mut command = Command::new("dump");
                command.args([
                    if is_first { "-0u" } else { "-1" },
                    "-q",
                    "-b",
                    "1000",
                    "-D",
                ]);
                command.arg(at("dumpdates")).arg("-f");
                // The first one is only noted.
                match is_first {
                    true => command.arg("/dev/null"),
                    false => command.arg(at("made")),
                };
                command.arg(device.path());
                command
            }
            _ => {
                let mut command = restic(&self.folder);
                command.arg("backup").arg(files);
                command
            }
        };
        command.current_dir("/");
        command
    }
}

/// Saves the volume, changes some of it, and saves what has changed; gives how much that was.
///
/// # Errors
/// When that fails.
pub fn measure(setting: &Setting, file: &Path) -> Result<(Vec<Row>, f64)> {
    let folder = setting.fresh()?;
    let ways = Methods { setting, folder };
    let said = setting.said();
    let files = setting.disk.path().join("mounted");
    timed(restic(&ways.folder).arg("init"), &said)?;
    let device = Device::attach(file)?;
    for number in 0..Methods::NAMES.len() {
        let mounted = (number == 2)
            .then(|| device.mount(setting, "ro"))
            .transpose()?;
        timed(&mut ways.command(number, &device, &files, true), &said)?;
        drop(mounted);
    }
    // dump(8) knows whole seconds.
    std::thread::sleep(std::time::Duration::from_millis(1100));
    let mounted = device.mount(setting, "noatime")?;
    let mut left = CHANGED_BYTES;
    change(mounted.path(), &mut left)?;
    drop(mounted);
    let kept = setting.memory.path().join("kept");
    let mut rows = Methods::NAMES.map(|way| Row::new("disk, none", way));
    for _ in 0..setting.rounds {
        for (number, row) in rows.iter_mut().enumerate() {
            let mounted = (number == 2)
                .then(|| device.mount(setting, "ro"))
                .transpose()?;
            if number == 2 {
                copy(setting, &ways.folder.join("restic"), &kept)?;
            }
            let before = place::bytes_in(&ways.folder)?;
            place::forget()?;
            let took = timed(&mut ways.command(number, &device, &files, false), &said)?;
            row.seconds.push(took.ns as f64 / 1e9);
            row.made_mib = mib_of(place::bytes_in(&ways.folder)?.saturating_sub(before));
            drop(mounted);
            if number == 2 {
                copy(setting, &kept, &ways.folder.join("restic"))?;
            }
            let made = ways.folder.join("made");
            let _ = fs::remove_dir_all(&made);
            let _ = fs::remove_file(&made);
        }
    }
    fs::remove_dir_all(&ways.folder).map_err(kernel_error("remove images"))?;
    let _ = fs::remove_dir_all(&kept);
    Ok((rows.into(), mib_of(CHANGED_BYTES - left)))
}

/// Has a folder be what another one is.
fn copy(setting: &Setting, from: &Path, to: &Path) -> Result<()> {
    let _ = fs::remove_dir_all(to);
    let mut command = Command::new("cp");
    timed(command.arg("-a").arg(from).arg(to), &setting.said())?;
    Ok(())
}

/// Changes some of every hundredth file, and a part of each large one, until so much is changed.
fn change(folder: &Path, left: &mut u64) -> Result<()> {
    let mut folders = vec![folder.to_owned()];
    let mut number = 0;
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).map_err(file_error("list", &folder))?;
        for entry in entries.filter_map(std::result::Result::ok) {
            let path = entry.path();
            let facts = entry.metadata().map_err(file_error("look at", &path))?;
            if facts.is_dir() {
                folders.push(path);
                continue;
            }
            number += 1;
            let is_wanted = facts.is_file() && (number % 100 == 0 || facts.len() > 4 << 20);
            if !is_wanted || *left == 0 {
                continue;
            }
            let file = File::options().write(true).open(&path);
            let file = file.map_err(file_error("open", &path))?;
            let len = facts.len().min(PIECE_BYTES).min(*left);
            // In the middle, from the start of a block on.
            let at = facts.len().saturating_sub(len) / 2 / 4096 * 4096;
            let written = file.write_all_at(&noise(len as usize, number), at);
            written.map_err(file_error("write to", &path))?;
            *left -= len;
        }
    }
    Ok(())
}
