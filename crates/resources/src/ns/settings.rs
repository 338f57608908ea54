//! Settings of a namespace: files in /proc/sys that show a process those of its own (proc_sys(5)).
//!
//! - What: settings of namespaces
//! - Kept: those in /proc/sys that a tree's own network or ipc namespace has.
//! - At a restore: "the setting … of the tree's namespace is missing".
//! - CRIU 4.2: kept in part.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use crate::{Error, Result};

/// Longer than any value.
const VALUE_MAX_BYTES: usize = 8192;
/// More than there are in any namespace.
pub(super) const MOST: usize = 1 << 16;

/// One setting.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Setting {
    /// Its file below /proc/sys: "kernel/shmmax".
    #[prost(string, tag = "1")]
    pub path: String,
    /// Its value, as it is read.
    #[prost(string, tag = "2")]
    pub value: String,
}

impl Setting {
    /// Tells whether its path is one below a folder of `roots`, or one of these.
    pub fn is_below(&self, roots: &[&str]) -> bool {
        let is_plain = |part: &str| !part.is_empty() && part != "." && part != "..";
        let is_below = |root: &&str| {
            let rest = self.path.strip_prefix(*root);
            rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        self.path.split('/').all(is_plain)
            && roots.iter().any(is_below)
            && self.value.len() <= VALUE_MAX_BYTES
            && !self.path.contains('\0')
    }
}

fn file(path: &str) -> PathBuf {
    PathBuf::from(sys::procfs::path(format_args!("sys/{path}")))
}

/// Reads what `path` below /proc/sys has, a file or a folder, in the order of the paths: what can
/// be written, as nothing else can be given to a new namespace. A file that cannot be read has no
/// value now.
///
/// # Errors
/// [`Error::Kernel`] for a folder that cannot be listed.
pub(super) fn read(path: &str) -> Result<Vec<Setting>> {
    let mut all = Vec::new();
    read_into(path, &mut all)?;
    all.sort_by(|one: &Setting, other| one.path.cmp(&other.path));
    Ok(all)
}

fn read_into(path: &str, all: &mut Vec<Setting>) -> Result<()> {
    let own = file(path);
    let failed = |error| Error::kernel(format!("cannot look at /proc/sys/{path}"), error);
    let found = match own.metadata() {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        found => found.map_err(failed)?,
    };
    if found.is_dir() {
        for entry in own.read_dir().map_err(failed)? {
            let name = entry.map_err(failed)?.file_name();
            read_into(&format!("{path}/{}", name.to_string_lossy()), all)?;
        }
        return Ok(());
    }
    const FOR_ROOT: u32 = 0o600;
    if found.permissions().mode() & FOR_ROOT != FOR_ROOT {
        return Ok(());
    }
    if let Ok(value) = fs::read_to_string(&own) {
        all.push(Setting {
            path: path.to_owned(),
            value: value.trim_end().to_owned(),
        });
    }
    Ok(())
}

/// Sets those that differ in the namespace that this process is in.
///
/// # Errors
/// [`Error::Mismatch`] for one that this kernel does not have; [`Error::Kernel`] for one that does
/// not take its value.
pub(super) fn apply(settings: &[Setting]) -> Result<()> {
    for Setting { path, value } in settings {
        let own = file(path);
        let present = match fs::read_to_string(&own) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Err(missing(path));
            }
            // One that has no value yet cannot be read.
            present => present.unwrap_or_default(),
        };
        if present.trim_end() != value {
            write(&own, value).map_err(|error| {
                let doing = format!("cannot set /proc/sys/{path} to {value:?}");
                Error::kernel(doing, error)
            })?;
        }
    }
    Ok(())
}

fn missing(path: &str) -> Error {
    Error::Mismatch {
        what: format!("the setting {path} of the tree's namespace is missing"),
    }
}

/// Writes a value in one call: of two, the kernel takes each for a whole one.
fn write(path: &Path, value: &str) -> std::io::Result<()> {
    fs::write(path, format!("{value}\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_below_their_folders() {
        let setting = |path: &str| Setting {
            path: path.to_owned(),
            value: String::new(),
        };
        for (path, is_below) in [
            ("net/ipv4/ip_forward", true),
            ("kernel/sem", true),
            ("kernel/semaphore", false),
            ("net/../kernel/core_pattern", false),
            ("net//x", false),
            ("kernel/core_pattern", false),
            ("network/x", false),
        ] {
            assert_eq!(
                setting(path).is_below(&["net", "kernel/sem"]),
                is_below,
                "{path}"
            );
        }
        let all = read("net").expect("it is there");
        assert!(
            all.iter()
                .any(|one| one.path == "net/ipv4/conf/lo/forwarding")
        );
        assert!(all.iter().all(|one| one.is_below(&["net"])));
        assert!(read("net/nothing").expect("nothing").is_empty());
    }
}
