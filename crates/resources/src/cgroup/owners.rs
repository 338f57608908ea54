//! To whom a control group's folder and files belong: how it is delegated (cgroups(7)).

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::Path;

use super::{Owner, properties};
use crate::{Error, Result};

/// The files by which tasks come into a group, and groups below it.
const DELEGATED: [&str; 5] = [
    "cgroup.procs",
    "cgroup.threads",
    "cgroup.subtree_control",
    "cgroup.clone_children",
    "tasks",
];
/// The bits of a mode that can be set.
const MODE: u32 = 0o7777;

/// Whether this is a name that [`read`] gives.
pub(super) fn is_known(name: &str) -> bool {
    name.is_empty() || DELEGATED.contains(&name) || properties::is_known(name)
}

/// The owners of the group's folder and files, as far as the kernel or root alone would not have
/// made them so. Of files that delegate, the permissions count as well.
///
/// # Errors
/// [`Error::Kernel`].
pub(super) fn read(folder: &Path) -> Result<Vec<Owner>> {
    let failed = |error| Error::kernel(format!("look at {}", folder.display()), error);
    let mut owners = vec![of("", folder).map_err(failed)?];
    for entry in fs::read_dir(folder).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        let Some(name) = name.to_str().filter(|name| is_known(name)) else {
            continue;
        };
        let owner = of(name, &entry.path()).map_err(failed)?;
        if DELEGATED.contains(&name) || owner.uid != 0 || owner.gid != 0 {
            owners.push(owner);
        }
    }
    owners[1..].sort_unstable_by(|one, other| one.name.cmp(&other.name));
    Ok(owners)
}

fn of(name: &str, path: &Path) -> std::io::Result<Owner> {
    let found = fs::metadata(path)?;
    Ok(Owner {
        name: name.to_owned(),
        uid: found.uid(),
        gid: found.gid(),
        mode: found.mode() & MODE,
    })
}

/// Gives what is in the folder of a group that was made to whom it belonged. A file that is not
/// there belongs to nobody: the kernel or the controllers are others.
///
/// # Errors
/// The errno of chown(2) or chmod(2).
pub(super) fn set(folder: &Path, owners: &[Owner]) -> std::io::Result<()> {
    for owner in owners {
        // The name of the folder itself would have it end with a slash.
        let path = match owner.name.as_str() {
            "" => folder.to_owned(),
            name => folder.join(name),
        };
        let Ok(now) = of(&owner.name, &path) else {
            continue;
        };
        if (now.uid, now.gid) != (owner.uid, owner.gid) {
            chown(&path, Some(owner.uid), Some(owner.gid))?;
        }
        if now.mode != owner.mode {
            fs::set_permissions(&path, Permissions::from_mode(owner.mode & MODE))?;
        }
    }
    Ok(())
}
