//! The mounts of a namespace, made again.

use std::ffi::OsStr;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use sys::mount_tree::{self, Propagation};

use super::record::{Mount, Record};
use crate::cgroup::Management;
use crate::ns::kind::Construction;
use crate::options::NamespaceOptions;
use crate::{Error, Result};

/// Makes the mounts of an image those of the namespace that this process is in, a copy of the
/// host's, and their root this process's.
pub(super) fn build(record: &Record, construction: &Construction<'_>) -> Result<()> {
    let failed = |error: io::Error| Error::kernel("cannot make the mounts of the tree", error);
    // What is mounted on the host meanwhile arrives, and nothing goes back.
    mount_tree::set_propagation_of_all(Propagation::Slave).map_err(failed)?;
    let old = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let old = old.map_err(|errno| failed(errno.into()))?;
    let builder = Builder {
        record,
        options: construction.options,
        management: construction.cgroups,
        made: make_file_systems(record, &old)?,
    };
    let mounts = builder.mounts()?;
    for _ in builder.made.iter().flatten() {
        mount_tree::take_away(Path::new("/")).map_err(failed)?;
    }
    // They are looked for while nothing is mounted on the way.
    let mut points = vec![old];
    for mount in &record.mounts[1..] {
        let parent = mount.parent as usize;
        let found = mount_tree::find(&mounts[parent], &builder.way_from_parent(mount));
        let doing = || format!("cannot find {}, to mount on it", mount.place());
        points.push(found.map_err(|error| Error::kernel(doing(), error))?);
    }
    for ((mount, own), point) in record.mounts.iter().zip(&mounts).zip(&points) {
        let doing = || format!("cannot mount on {}", mount.place());
        mount_tree::attach(own, point).map_err(|error| Error::kernel(doing(), error))?;
    }
    drop(points);
    mount_tree::make_root(&mounts[0]).map_err(failed)?;
    spread(record, &mounts)
}

/// Makes the file systems that the host has not mounted, each on the root of this namespace, where
/// they can be copied from.
fn make_file_systems(record: &Record, root: &OwnedFd) -> Result<Vec<Option<OwnedFd>>> {
    let mut made = Vec::new();
    for (number, file_system) in record.file_systems.iter().enumerate() {
        let mut mounts = record.mounts.iter();
        let needs_it = |mount: &Mount| {
            mount.file_system as usize == number
                && mount.host.is_none()
                && mount.external.is_none()
                && number != record.mounts[0].file_system as usize
        };
        if !mounts.any(needs_it) {
            made.push(None);
            continue;
        }
        let doing = || format!("cannot make {} of the tree", file_system.name());
        let own = file_system.make();
        let own = own.map_err(|errno| Error::kernel(doing(), errno))?;
        mount_tree::attach(&own, root).map_err(|error| Error::kernel(doing(), error))?;
        made.push(Some(own));
    }
    Ok(made)
}

struct Builder<'a> {
    record: &'a Record,
    options: &'a NamespaceOptions,
    management: &'a Management,
    /// The file systems that were made again.
    made: Vec<Option<OwnedFd>>,
}

impl Builder<'_> {
    /// Makes all mounts. Those of the host that others hide come when these have been taken away
    /// from this namespace, which goes.
    fn mounts(&self) -> Result<Vec<OwnedFd>> {
        let all = &self.record.mounts;
        let mut made = all.iter().map(|_| None).collect::<Vec<_>>();
        let deepest = all.iter().map(|mount| mount.host_layers).max();
        for layer in 0..=deepest.unwrap_or(0) {
            let mut hidden = Vec::new();
            for (mount, made) in all.iter().zip(&mut made) {
                match mount.host_layers {
                    own if own == layer => *made = Some(self.mount(mount)?),
                    own if own > layer => hidden.extend(self.source(mount)?),
                    _ => {}
                }
            }
            hidden.sort();
            hidden.dedup();
            for path in hidden {
                let taken = mount_tree::take_away(&path);
                let doing = || format!("cannot reach what is hidden at {}", path.display());
                taken.map_err(|error| Error::kernel(doing(), error))?;
            }
        }
        Ok(made.into_iter().flatten().collect())
    }

    /// Makes a mount, which has no place yet.
    fn mount(&self, mount: &Mount) -> Result<OwnedFd> {
        let doing = || format!("cannot make the mount at {}", mount.place());
        let failed = |error| Error::kernel(doing(), error);
        let made = self.made[mount.file_system as usize].as_ref();
        let own = match (self.source(mount)?, made) {
            (Some(path), _) => {
                let doing = || format!("{}, of {}", doing(), path.display());
                // Somebody who names a path may name a link.
                let own = match mount.external.is_some() || self.options.root.is_some() {
                    true => path
                        .canonicalize()
                        .and_then(|path| mount_tree::copy_at(&path)),
                    false => mount_tree::copy_at(&path),
                };
                own.map_err(|error| Error::kernel(doing(), error))?
            }
            (None, Some(made)) => {
                let root = below(&mount.root, b"/").unwrap_or_default();
                mount_tree::copy(made, &root).map_err(failed)?
            }
            (None, None) => {
                let what = "the root directory of the tree is not known: --root".to_owned();
                return Err(Error::Mismatch { what });
            }
        };
        mount_tree::set_attributes(own.as_fd(), mount.attributes).map_err(failed)?;
        if !mount.follows_host {
            let private = Propagation::Private;
            mount_tree::set_propagation(own.as_fd(), private).map_err(failed)?;
        }
        Ok(own)
    }

    /// The path on the host of what is mounted; `None` for a file system that was made again.
    fn source(&self, mount: &Mount) -> Result<Option<PathBuf>> {
        // Runtimes name the whole hierarchy as what is external.
        if let Some(group) = &mount.group {
            let mounts = self.management.mounts()?;
            let path = group.find(self.management, &mounts)?;
            let folder = path.and_then(|path| mounts.folder_on_host(&group.hierarchy, &path));
            if folder.is_some() {
                return Ok(folder);
            }
        }
        if let Some(name) = &mount.external {
            let mut known = self.options.mounts.iter();
            let known = known.find(|one| one.key == *name);
            let known = known.ok_or_else(|| Error::Mismatch {
                what: format!(
                    "the mount at {} is external ({name}): --external",
                    mount.place()
                ),
            })?;
            return Ok(Some(PathBuf::from(&known.value)));
        }
        let first = &self.record.mounts[0];
        if let Some(root) = self.options.root.as_ref() {
            // What is mounted of the same file system is there as well.
            let is_same = mount.file_system == first.file_system;
            if let Some(rest) = below(&mount.root, &first.root).filter(|_| is_same) {
                return Ok(Some(joined(root, &rest)));
            }
        }
        let host = mount.host.as_ref();
        Ok(host.map(|path| PathBuf::from(OsStr::from_bytes(path))))
    }

    /// The way to its point from the root of the mount that it is on.
    fn way_from_parent(&self, mount: &Mount) -> PathBuf {
        let parent = &self.record.mounts[mount.parent as usize];
        below(&mount.point, &parent.point).unwrap_or_default()
    }
}

/// The way from one path to another one below.
fn below(path: &[u8], folder: &[u8]) -> Option<PathBuf> {
    let [path, folder] = [path, folder].map(|path| Path::new(OsStr::from_bytes(path)));
    path.strip_prefix(folder).ok().map(Path::to_owned)
}

fn joined(folder: &Path, rest: &Path) -> PathBuf {
    match rest.as_os_str().is_empty() {
        true => folder.to_owned(),
        false => folder.join(rest),
    }
}

/// Has mounts spread as they did. They have their places now, so nothing spreads that is made here.
fn spread(record: &Record, mounts: &[OwnedFd]) -> Result<()> {
    let all = record.mounts.iter().zip(mounts);
    let peer_of = |group: u32| {
        let first = record.mounts.iter().position(|mount| mount.peers == group);
        first.map(|first| (first, &mounts[first]))
    };
    let masters_first = |(mount, _): &(&Mount, &OwnedFd)| depth(record, mount);
    let mut all = all.collect::<Vec<_>>();
    all.sort_by_key(masters_first);
    for (mount, own) in all {
        let doing = || format!("cannot have mounts spread to {}", mount.place());
        let failed = |error| Error::kernel(doing(), error);
        let set = |way| mount_tree::set_propagation(own.as_fd(), way).map_err(failed);
        let join = |of: &OwnedFd| mount_tree::join_group(own, of).map_err(failed);
        let first = peer_of(mount.peers).filter(|_| mount.peers != 0);
        let is_first = first.is_some_and(|(_, first)| std::ptr::eq(first, own));
        let master = peer_of(mount.master).filter(|_| mount.master != 0);
        match (first, master) {
            (Some((_, first)), _) if !is_first => {
                join(first)?;
                continue;
            }
            (_, Some((_, master))) => {
                join(master)?;
                set(Propagation::Slave)?;
            }
            _ => {}
        }
        if is_first {
            set(Propagation::Shared)?;
        }
        if mount.is_unbindable {
            set(Propagation::Unbindable)?;
        }
    }
    Ok(())
}

/// The number of masters above a mount.
fn depth(record: &Record, mount: &Mount) -> usize {
    let mut group = mount.master;
    let mut depth = 0;
    while group != 0 && depth < record.mounts.len() {
        let master = record.mounts.iter().find(|mount| mount.peers == group);
        group = master.map_or(0, |master| master.master);
        depth += 1;
    }
    depth
}
