//! The control groups of a tree that is to be restored: found, made, opened for those who join.

use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{Mode as Permissions, OFlags};
use rustix::io::Errno;

use super::properties::{self, SUBTREE_CONTROL};
use super::{Cgroups, Group, Management, Mode, Mounts, mounts, owners, shown};
use crate::{Error, Result};

/// How long a group that was made is tried to be removed while tasks in it are ending.
const PATIENCE: Duration = Duration::from_secs(2);

/// The groups of a tree. What was made is removed on drop, unless it is kept.
#[derive(Debug, Default)]
pub struct Groups {
    mounts: Mounts,
    made: Vec<PathBuf>,
}

impl Groups {
    /// Finds or makes the groups, as `management` says.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for one that must be there and is not, or must not and is, or that is
    /// frozen; [`Error::Kernel`].
    pub fn prepare(cgroups: &Cgroups, management: &Management) -> Result<Self> {
        let mut groups = Self {
            mounts: management.mounts()?,
            made: Vec::new(),
        };
        for group in &cgroups.groups {
            let name = cgroups.hierarchies[group.hierarchy as usize].as_str();
            // Who is to join it will be told.
            if let Some(folder) = groups.mounts.folder(name, &group.path) {
                groups.prepare_one(cgroups, group, &folder, management.mode)?;
            }
        }
        Ok(groups)
    }

    fn prepare_one(
        &mut self,
        cgroups: &Cgroups,
        group: &Group,
        folder: &Path,
        mode: Mode,
    ) -> Result<()> {
        let name = shown(&cgroups.hierarchies[group.hierarchy as usize], &group.path);
        let is_there = folder.is_dir();
        let must_be_there = matches!(mode, Mode::None | Mode::Props);
        if !is_there && must_be_there {
            return Err(missing(&name));
        }
        if is_there && mode == Mode::Strict && !group.above {
            let what = format!("the control group {name} is there already");
            return Err(Error::Mismatch { what });
        }
        if is_there && !group.above && mounts::frozen(folder).is_some() {
            let what = format!("the control group {name} is frozen: thaw it before");
            return Err(Error::Mismatch { what });
        }
        if !is_there {
            self.let_controllers_through(cgroups, group);
            self.make(folder)?;
        } else if group.above || !matches!(mode, Mode::Props | Mode::Full) {
            return Ok(());
        }
        for property in &group.properties {
            properties::set(folder, property).map_err(|error| {
                let doing = format!("set {} of the control group {name}", property.name);
                Error::kernel(doing, error)
            })?;
        }
        if !is_there {
            let doing = || format!("give the control group {name} to its owner");
            owners::set(folder, &group.owners).map_err(|error| Error::kernel(doing(), error))?;
        }
        Ok(())
    }

    /// Has the groups above one that is to be made give it the controllers that it had. Where one
    /// does not, a property of it is missing, which says so.
    fn let_controllers_through(&self, cgroups: &Cgroups, group: &Group) {
        let above = cgroups.groups.iter().filter(|other| {
            let rest = group.path.strip_prefix(other.path.as_slice());
            let below = rest.is_some_and(|rest| other.path == b"/" || rest.starts_with(b"/"));
            other.hierarchy == group.hierarchy && below
        });
        for other in above {
            let name = &cgroups.hierarchies[other.hierarchy as usize];
            let controllers = other.properties.iter();
            let mut controllers = controllers.filter(|one| one.name == SUBTREE_CONTROL);
            if let (Some(folder), Some(property)) =
                (self.mounts.folder(name, &other.path), controllers.next())
            {
                let _ = properties::set(&folder, property);
            }
        }
    }

    /// Makes a group, and those above it that are missing.
    fn make(&mut self, folder: &Path) -> Result<()> {
        let missing = folder.ancestors().take_while(|folder| !folder.exists());
        let missing = missing.map(Path::to_owned).collect::<Vec<_>>();
        for folder in missing.into_iter().rev() {
            let failed = |error| {
                Error::kernel(
                    format!("make the control group {}", folder.display()),
                    error,
                )
            };
            fs::create_dir(&folder).map_err(failed)?;
            // In version 1 of cpuset, a new group has no processors and no memory.
            if folder.join("cpuset.memory_migrate").exists() {
                for file in ["cpuset.cpus", "cpuset.mems"] {
                    let above = fs::read(folder.with_file_name(file)).map_err(failed)?;
                    fs::write(folder.join(file), above).map_err(failed)?;
                }
            }
            self.made.push(folder);
        }
        Ok(())
    }

    /// Opens the file by which a process joins a group, or a thread is put into one alone.
    ///
    /// # Errors
    /// [`Error::Mismatch`] for one that is not there, [`Error::Kernel`].
    pub fn open(&self, hierarchy: &str, path: &[u8], thread: bool) -> Result<OwnedFd> {
        let name = shown(hierarchy, path);
        let Some(folder) = self.mounts.folder(hierarchy, path) else {
            let what = format!("the control groups of {name} are not mounted here");
            return Err(Error::Mismatch { what });
        };
        let file = match (thread, hierarchy) {
            (false, _) => "cgroup.procs",
            (true, "") => "cgroup.threads",
            (true, _) => "tasks",
        };
        let flags = OFlags::WRONLY | OFlags::CLOEXEC;
        let opened = rustix::fs::open(folder.join(file), flags, Permissions::empty());
        opened.map_err(|error| match error {
            Errno::NOENT => missing(&name),
            error => Error::kernel(format!("open {file} of the control group {name}"), error),
        })
    }

    /// Lets what was made stay.
    pub fn keep(mut self) {
        self.made.clear();
    }
}

fn missing(name: &str) -> Error {
    let what = format!("the control group {name} is missing (--manage-cgroups=soft makes it)");
    Error::Mismatch { what }
}

impl Drop for Groups {
    fn drop(&mut self) {
        let deadline = Instant::now() + PATIENCE;
        for folder in self.made.iter().rev() {
            while let Err(error) = fs::remove_dir(folder) {
                let busy = error.kind() == std::io::ErrorKind::ResourceBusy;
                if !busy || Instant::now() > deadline {
                    log::warn!("the control group {} stays: {error}", folder.display());
                    break;
                }
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}
