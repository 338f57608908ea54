//! A mount namespace of its own for the measuring part, so that /run is what the cache needs.
//!
//! CRIU keeps what it probed of the host in /run, and only where that is a tmpfs.
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::{Error, Result, file_error};
use crate::tool::name;
use crate::workload::Cache;

/// Runs this program with other arguments in a mount namespace that nobody else sees.
///
/// # Errors
/// When it cannot be started or fails.
pub fn run_again(arguments: &[OsString]) -> Result<()> {
    let own = PathBuf::from("/proc/self/exe");
    let own = std::fs::read_link(&own).map_err(file_error("read", &own))?;
    let mut command = Command::new("unshare");
    command
        .args(["--mount", "--propagation", "private", "--"])
        .arg(own)
        .args(arguments);
    succeed(&mut command)
}

/// Closes every descriptor that this program inherited, the standard streams aside, so that a
/// subject holds nothing from outside the namespace; called before it opens any of its own.
///
/// # Errors
/// When /proc/self/fd cannot be listed.
pub fn close_inherited() -> Result<()> {
    let folder = Path::new("/proc/self/fd");
    let list = std::fs::read_dir(folder).map_err(file_error("list", folder))?;
    let numbers: Vec<i32> = list
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
        .collect();
    for number in numbers {
        // The number that the listing itself had is closed by now, and is refused.
        drop(sys::inherited::take(number));
    }
    Ok(())
}

/// Makes /run what the cache needs; `scratch` lies on a disk.
///
/// # Errors
/// When it cannot be mounted.
pub fn prepare_run(cache: Cache, scratch: &Path) -> Result<()> {
    let mut mount = Command::new("mount");
    match cache {
        Cache::Warm => mount.args(["-t", "tmpfs", "tmpfs", "/run"]),
        Cache::Cold => {
            let folder = scratch.join("run");
            std::fs::create_dir_all(&folder).map_err(file_error("make", &folder))?;
            mount.arg("--bind").arg(folder).arg("/run")
        }
    };
    succeed(&mut mount)
}

fn succeed(command: &mut Command) -> Result<()> {
    let status = command
        .stdin(Stdio::null())
        .status()
        .map_err(|source| Error::Start {
            program: name(command),
            source,
        })?;
    match status.success() {
        true => Ok(()),
        false => Err(Error::Status {
            command: name(command),
            status,
            said: String::new(),
        }),
    }
}
