//! Where the hierarchies of control groups are mounted.

use std::ffi::OsStr;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use sys::{host, mountinfo};

use crate::{Error, Result};

/// More groups than this below the root task's are not looked for.
const BELOW_MAX: usize = 1000;
/// What statfs(2) calls hierarchies of versions 1 and 2.
const CGROUP_MAGIC: u64 = 0x0027_e0eb;
const CGROUP2_MAGIC: u64 = 0x6367_7270;

/// The hierarchies that this process sees.
#[derive(Clone, Debug, Default)]
pub struct Mounts(Vec<Mount>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Mount {
    /// Its controllers and its name; empty for version 2.
    controllers: Vec<String>,
    /// The group that is mounted.
    root: Vec<u8>,
    at: PathBuf,
}

impl Mounts {
    /// Finds them.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn read() -> Result<Self> {
        let read = host::mounts();
        let all =
            read.map_err(|error| Error::kernel(format!("read {}", mountinfo::PATH), error))?;
        Ok(Self(all.into_iter().filter_map(hierarchy).collect()))
    }

    /// Takes the folders of a yard, as criu(8) has it: each is a hierarchy as a whole, and has the
    /// names of its controllers, or that of the hierarchy with or without `name=`, or `unified`.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for a folder in it that is no hierarchy, [`Error::Kernel`].
    pub fn of_yard(yard: &Path) -> Result<Self> {
        let failed = |error| Error::kernel(format!("read {}", yard.display()), error);
        let mut mounts = Vec::new();
        for entry in std::fs::read_dir(host::path(yard)).map_err(failed)? {
            let at = yard.join(entry.map_err(failed)?.file_name());
            if host::path(&at).is_dir() {
                mounts.push(of_folder(at)?);
            }
        }
        Ok(Self(mounts))
    }

    /// The folder of a group.
    #[must_use]
    pub fn folder(&self, hierarchy: &str, path: &[u8]) -> Option<PathBuf> {
        self.folder_on_host(hierarchy, path).map(host::path)
    }

    /// The same, by its path on the host.
    #[must_use]
    pub fn folder_on_host(&self, hierarchy: &str, path: &[u8]) -> Option<PathBuf> {
        let names = hierarchy.split(',').filter(|name| !name.is_empty());
        let names = names.collect::<Vec<_>>();
        let fits = |mount: &&Mount| {
            let version_2 = mount.controllers.is_empty();
            let has = |name: &&str| mount.controllers.iter().any(|one| one == name);
            names.is_empty() == version_2 && names.iter().all(has)
        };
        self.0.iter().filter(fits).find_map(|mount| {
            let root = mount.root.strip_suffix(b"/").unwrap_or(&mount.root);
            let rest = path.strip_prefix(root)?;
            let rest = match rest.first() {
                None => rest,
                Some(b'/') => &rest[1..],
                Some(_) => return None,
            };
            Some(mount.at.join(OsStr::from_bytes(rest)))
        })
    }

    /// The groups below one, parents first.
    #[must_use]
    pub(super) fn below(&self, hierarchy: &str, path: &[u8]) -> Vec<Vec<u8>> {
        let mut found: Vec<Vec<u8>> = vec![path.to_vec()];
        let mut next = 0;
        while let Some(path) = found.get(next).filter(|_| found.len() < BELOW_MAX).cloned() {
            next += 1;
            let folder = self.folder(hierarchy, &path);
            let entries = folder.and_then(|folder| std::fs::read_dir(folder).ok());
            for entry in entries.into_iter().flatten().flatten() {
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    let name = entry.file_name().into_vec();
                    found.push([path.as_slice(), b"/", &name].concat());
                }
            }
        }
        found.split_off(1)
    }
}

/// A hierarchy in a yard.
fn of_folder(at: PathBuf) -> Result<Mount> {
    let kind = rustix::fs::statfs(host::path(&at));
    let kind = kind.map_err(|error| Error::kernel(format!("look at {}", at.display()), error))?;
    let version_2 = kind.f_type.cast_unsigned() == CGROUP2_MAGIC;
    if !version_2 && kind.f_type.cast_unsigned() != CGROUP_MAGIC {
        let what = format!("{} is no hierarchy of control groups", at.display());
        return Err(Error::Mismatch { what });
    }
    let name = at.file_name().unwrap_or_default().to_string_lossy();
    let words = name.split(',').filter(|_| !version_2);
    let controllers = words.flat_map(|word| [word.to_owned(), format!("name={word}")]);
    Ok(Mount {
        controllers: controllers.collect(),
        root: b"/".to_vec(),
        at: at.clone(),
    })
}

/// A mount, if it is of a hierarchy.
fn hierarchy(mount: mountinfo::Mount) -> Option<Mount> {
    Some(Mount {
        controllers: controllers_of(&mount)?,
        root: mount.root,
        at: mount.point,
    })
}

/// The controllers of the hierarchy that a mount is of, and its name; none of version 2.
#[must_use]
pub fn controllers_of(mount: &mountinfo::Mount) -> Option<Vec<String>> {
    let version_2 = match &*mount.kind {
        "cgroup" => false,
        "cgroup2" => true,
        _ => return None,
    };
    let known = ["rw", "ro", "none", "xattr", "noprefix", "clone_children"];
    let options = mount.fs_options.split(',').filter(|_| !version_2);
    let controllers = options
        .filter(|option| !known.contains(option) && !option.starts_with("release_agent="))
        .map(str::to_owned);
    Some(controllers.collect())
}

/// By which file a group is frozen, or one above it.
pub(super) fn frozen(folder: &Path) -> Option<&'static str> {
    let says = |name: &str, line: &str| {
        let text = std::fs::read_to_string(folder.join(name)).unwrap_or_default();
        text.lines().any(|one| one == line)
    };
    if says("cgroup.freeze", "1") || says("cgroup.events", "frozen 1") {
        return Some("cgroup.freeze");
    }
    let frozen = says("freezer.state", "FROZEN") || says("freezer.state", "FREEZING");
    frozen.then_some("freezer.state")
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "\
24 1 0:21 / /proc rw - proc proc rw
30 24 0:26 / /sys/fs/cgroup/cpu,cpuacct rw,nosuid shared:9 - cgroup cgroup rw,cpu,cpuacct
31 24 0:27 / /sys/fs/cgroup/my\\040own rw - cgroup none rw,xattr,name=own
32 24 0:28 /part /mnt rw - cgroup cgroup rw,memory
33 24 0:29 / /sys/fs/cgroup/unified rw - cgroup2 none rw,nsdelegate
";

    #[test]
    fn folders_of_groups_are_found() {
        let lines = TEXT.as_bytes().split(|byte| *byte == b'\n');
        let mounts = Mounts(
            lines
                .filter_map(mountinfo::Mount::parse)
                .filter_map(hierarchy)
                .collect(),
        );
        let folder = |name: &str, path: &str| {
            let folder = mounts.folder(name, path.as_bytes());
            folder.map(|folder| folder.to_str().expect("text").to_owned())
        };
        let is = |folder: Option<String>, want: &str| assert_eq!(folder.as_deref(), Some(want));
        is(
            folder("cpu,cpuacct", "/a/b"),
            "/sys/fs/cgroup/cpu,cpuacct/a/b",
        );
        is(folder("name=own", "/a"), "/sys/fs/cgroup/my own/a");
        is(folder("memory", "/part/x"), "/mnt/x");
        is(folder("", "/a"), "/sys/fs/cgroup/unified/a");
        assert_eq!(folder("memory", "/party"), None);
        assert_eq!(folder("pids", "/"), None);
    }
}
