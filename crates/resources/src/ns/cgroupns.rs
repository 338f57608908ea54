//! Views of control groups: cgroup_namespaces(7).
//!
//! A namespace has a group of each hierarchy that its processes take for the topmost one. A dump
//! stays outside, where groups have their whole paths. A restore goes to these groups, and makes
//! the namespace there.
//!
//! - What: cgroup namespaces
//! - Kept: one of the whole tree, with its topmost groups: those of the dump, or those that
//!   `--cgroup-root` names; with `--manage-cgroups=ignore` the restorer's own where these are gone.
//! - Refused: "a cgroup namespace whose topmost group is not above its root task's".
//! - At a restore: "the control group … is missing, with which a cgroup namespace begins".
//! - CRIU 4.2: kept.

use std::ffi::OsStr;
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;

use sys::process::Process;
use sys::procfs;

use super::kind::{Construction, FIRST_TAG, Kind, Tree, record_name};
use crate::cgroup::{GroupPlace, Membership};
use crate::{Error, Result};

/// See the file.
pub struct Cgroup;

/// The contents of a namespace.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// Its topmost groups.
    #[prost(message, repeated, tag = "1")]
    roots: Vec<GroupPlace>,
}

impl Kind for Cgroup {
    type Record = Record;
    const TAG: u16 = FIRST_TAG + 4;
    const NAME: &'static str = "cgroup";
    const FLAG: libc::c_int = libc::CLONE_NEWCGROUP;
    const IS_ENTERED: bool = false;

    fn dump(tree: &Tree<'_>, refused: &mut Vec<Error>) -> Result<Record> {
        let outside = membership(tree.root)?;
        let inside = seen_inside(tree.root)?;
        let mut roots = Vec::new();
        for (hierarchy, path) in outside.all() {
            let place = inside.path(hierarchy).and_then(|seen| {
                let root = match seen {
                    b"/" => path,
                    seen => path.strip_suffix(seen)?,
                };
                let root = if root.is_empty() { b"/" } else { root };
                GroupPlace::new(hierarchy, root, path)
            });
            match place {
                Some(place) => roots.push(place),
                None => {
                    let what =
                        "a cgroup namespace whose topmost group is not above its root task's";
                    refused.push(tree.unsupported(what));
                }
            }
        }
        Ok(Record { roots })
    }

    fn check(record: &Record) -> Result<()> {
        match record.roots.iter().all(GroupPlace::is_sound) {
            true => Ok(()),
            false => Err(Error::corrupt(record_name(Self::NAME), "has no such group")),
        }
    }

    fn restore(record: &Record, construction: &Construction<'_>) -> Result<()> {
        let management = construction.cgroups;
        let mounts = management.mounts()?;
        let own = Membership::own()?;
        for root in &record.roots {
            let hierarchy = &root.hierarchy;
            let path = root.find(management, &mounts)?;
            if path.is_some() && path.as_deref() == own.path(hierarchy) {
                continue;
            }
            let folder = path.and_then(|path| mounts.folder(hierarchy, &path));
            let Some(folder) = folder.filter(|folder| folder.is_dir()) else {
                let group = format!("{hierarchy}:{}", OsStr::from_bytes(&root.path).display());
                let what = format!(
                    "the control group {group} is missing, with which a cgroup namespace begins"
                );
                return Err(Error::Mismatch { what });
            };
            let entered = std::fs::write(folder.join("cgroup.procs"), "0");
            entered.map_err(|error| {
                Error::kernel(format!("cannot go to {}", folder.display()), error)
            })?;
        }
        let made = sys::world::unshare(Self::FLAG);
        made.map_err(|error| Error::kernel("cannot make a cgroup namespace", error))
    }

    fn describe(record: &Record) -> String {
        let paths = record.roots.iter().map(|root| {
            let path = OsStr::from_bytes(&root.path).display();
            format!("{}:{path}", root.hierarchy)
        });
        paths.collect::<Vec<_>>().join(" ")
    }
}

/// The groups of a process, as this thread's namespace shows them.
fn membership(pid: i32) -> Result<Membership> {
    let text = procfs::read(format_args!("{pid}/cgroup"));
    let text = text.map_err(|error| Error::kernel(format!("read /proc/{pid}/cgroup"), error))?;
    Ok(Membership::parse(&text))
}

/// The groups of a process, as its own namespace shows them.
fn seen_inside(pid: i32) -> Result<Membership> {
    let look = || {
        let failed = |error| Error::kernel("cannot look into the tree's cgroup namespace", error);
        let namespace = Process::new(pid).open("ns/cgroup").map_err(failed)?;
        sys::world::enter(namespace.as_fd()).map_err(failed)?;
        membership(pid)
    };
    std::thread::scope(|scope| {
        let seen = scope.spawn(look).join();
        seen.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_that_no_namespace_has_are_corrupt() {
        let place = GroupPlace::new("cpu", b"/a", b"/a/b").expect("the one is above the other");
        let sound = Record {
            roots: vec![place.clone()],
        };
        Cgroup::check(&sound).expect("it is sound");
        let forged = Record {
            roots: vec![GroupPlace {
                path: b"/x".to_vec(),
                ..place
            }],
        };
        Cgroup::check(&forged).expect_err("the one is elsewhere");
    }
}
