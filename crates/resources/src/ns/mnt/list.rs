//! The mounts of a namespace, as a dump finds them.

use std::collections::HashMap;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use sys::mount_tree::{self, ATTRIBUTES};
use sys::{host, mountinfo};

use super::file_system::FileSystem;
use super::record::{Mount, Record};
use crate::cgroup::{GroupPlace, Membership, controllers_of};
use crate::ns::kind::Tree;
use crate::{Error, Result};

/// The end of the path of a file that is mounted and has been deleted.
const DELETED: &[u8] = b"//deleted";

/// The mounts of the namespace that this process is in.
pub(super) fn read(tree: &Tree<'_>, refused: &mut Vec<Error>) -> Result<Record> {
    let failed = |error| Error::kernel("cannot list the mounts of the tree", error);
    let found = parents_first(mountinfo::read().map_err(failed)?);
    let host = host::mounts().map_err(failed)?;
    let groups = sys::procfs::read(format_args!("{}/cgroup", tree.root));
    let mut table = MountTable {
        tree,
        host: &host,
        found: &found,
        record: Record::default(),
        groups: Membership::parse(&groups.map_err(failed)?),
        devices: HashMap::new(),
        numbers: HashMap::new(),
    };
    for mount in &found {
        table.add(mount, refused)?;
    }
    table.read_contents(refused)?;
    Ok(table.record)
}

/// The mounts, each behind the one that it is on.
fn parents_first(mut left: Vec<mountinfo::Mount>) -> Vec<mountinfo::Mount> {
    let mut ordered: Vec<mountinfo::Mount> = Vec::with_capacity(left.len());
    while !left.is_empty() {
        let ids = left.iter().map(|mount| mount.id).collect::<Vec<_>>();
        let is_next =
            |mount: &mountinfo::Mount| mount.parent == mount.id || !ids.contains(&mount.parent);
        let (next, rest) = left.into_iter().partition::<Vec<_>, _>(is_next);
        if next.is_empty() {
            // The kernel has no such list.
            return rest;
        }
        ordered.extend(next);
        left = rest;
    }
    ordered
}

/// A directory or file of the host.
struct HostPlace {
    path: PathBuf,
    /// How many mounts lie above the one that it is in.
    layers: u32,
}

struct MountTable<'a> {
    tree: &'a Tree<'a>,
    host: &'a [mountinfo::Mount],
    found: &'a [mountinfo::Mount],
    record: Record,
    /// The groups of the root task.
    groups: Membership,
    /// The numbers of file systems, by their devices.
    devices: HashMap<(u32, u32), u32>,
    /// The numbers of mounts, by the kernel's.
    numbers: HashMap<u64, u32>,
}

impl MountTable<'_> {
    fn add(&mut self, mount: &mountinfo::Mount, refused: &mut Vec<Error>) -> Result<()> {
        let place = mount.point.display();
        let number = u32::try_from(self.record.mounts.len()).expect("a kernel has fewer");
        let parent = match self.numbers.get(&mount.parent) {
            Some(parent) => *parent,
            None if number == 0 => 0,
            None => {
                let what = format!("the mount at {place}, which is on none of the tree's,");
                refused.push(self.tree.unsupported(what));
                return Ok(());
            }
        };
        if mount.root.ends_with(DELETED) {
            let what = format!("the mount at {place}, of a deleted file,");
            refused.push(self.tree.unsupported(what));
        }
        let mut external = self.tree.options.mounts.iter();
        let external = external.find(|one| Path::new(&one.key) == mount.point);
        let on_host = self.on_host(mount);
        let file_system = self.file_system(mount);
        if external.is_none() && on_host.is_none() && number != 0 {
            let made = &self.record.file_systems[file_system as usize];
            if let Some(what) = made.obstacle(&mount.point) {
                refused.push(self.tree.unsupported(what));
            }
        }
        let attributes = match attributes(&mount.options) {
            Ok(attributes) => attributes,
            Err(word) => {
                let what = format!("option {word} of the mount at {place}");
                refused.push(self.tree.unsupported(what));
                0
            }
        };
        let mut record = Mount {
            parent,
            point: mount.point.as_os_str().as_bytes().to_vec(),
            file_system,
            root: mount.root.clone(),
            host_layers: on_host.as_ref().map_or(0, |host| host.layers),
            host: on_host.map(|host| host.path.into_os_string().into_encoded_bytes()),
            external: external.map(|one| one.value.clone()),
            group: self.group_place(mount),
            attributes,
            ..Mount::default()
        };
        self.spread(mount, &mut record, refused);
        self.numbers.insert(mount.id, number);
        self.record.mounts.push(record);
        Ok(())
    }

    /// Where the host has mounted what is mounted there.
    fn on_host(&self, mount: &mountinfo::Mount) -> Option<HostPlace> {
        let mut same = self.host.iter().filter(|one| one.device == mount.device);
        same.find_map(|one| {
            let root = Path::new(std::ffi::OsStr::from_bytes(&one.root));
            let path = Path::new(std::ffi::OsStr::from_bytes(&mount.root));
            let path = match path.strip_prefix(root).ok()? {
                rest if rest.as_os_str().is_empty() => one.point.clone(),
                rest => one.point.join(rest),
            };
            // Mounts that lie above it, on the same directory.
            let above = |below: &&mountinfo::Mount| {
                let mut all = self.host.iter();
                all.find(|it| (it.parent, &it.point) == (below.id, &below.point))
            };
            let stack = std::iter::successors(Some(one), above).collect::<Vec<_>>();
            let seen = mount_tree::mount_at(&host::path(&one.point)).ok()?;
            let is_reached = stack.last().is_some_and(|top| top.id == seen);
            is_reached.then_some(HostPlace {
                path,
                layers: u32::try_from(stack.len() - 1).expect("a kernel has fewer"),
            })
        })
    }

    /// The control group that a mount shows, as far as the tree's own leads there.
    fn group_place(&self, mount: &mountinfo::Mount) -> Option<GroupPlace> {
        let controllers = controllers_of(mount)?;
        let hierarchy = self.groups.hierarchy_with(&controllers)?;
        let of_root = self.groups.path(hierarchy)?;
        GroupPlace::new(hierarchy, &mount.root, of_root).filter(|place| place.path != b"/")
    }

    fn file_system(&mut self, mount: &mountinfo::Mount) -> u32 {
        let all = &mut self.record.file_systems;
        *self.devices.entry(mount.device).or_insert_with(|| {
            all.push(FileSystem::of(mount));
            u32::try_from(all.len() - 1).expect("no more than mounts")
        })
    }

    /// Says how mounts spread to it and from it.
    fn spread(&self, mount: &mountinfo::Mount, record: &mut Mount, refused: &mut Vec<Error>) {
        let place = mount.point.display();
        let is_hosts = |group: u64| {
            let mut all = self.host.iter();
            all.any(|one| one.group("shared") == Some(group))
        };
        if let Some(group) = mount.group("shared") {
            if is_hosts(group) {
                let what = format!("the mount at {place}, which shares its mounts with the host,");
                refused.push(self.tree.unsupported(what));
            }
            record.peers = self.group(group);
        }
        if let Some(group) = mount.group("master") {
            let mut all = self.found.iter();
            let is_ours = all.any(|one| one.group("shared") == Some(group));
            match (is_ours, is_hosts(group)) {
                (true, _) => record.master = self.group(group),
                (false, true) => record.follows_host = true,
                (false, false) => {
                    let what = format!("the mount at {place}, whose master is not known,");
                    refused.push(self.tree.unsupported(what));
                }
            }
        }
        record.is_unbindable = mount.propagation.iter().any(|word| word == "unbindable");
    }

    /// The number of a group in the image: that of its first peer, from 1 on.
    fn group(&self, group: u64) -> u32 {
        let mut all = self.found.iter();
        let first = all.position(|one| one.group("shared") == Some(group));
        first.map_or(0, |first| {
            u32::try_from(first + 1).expect("a kernel has fewer")
        })
    }

    /// Reads the files of those file systems that only the tree has.
    fn read_contents(&mut self, refused: &mut Vec<Error>) -> Result<()> {
        for (number, file_system) in self.record.file_systems.iter_mut().enumerate() {
            let own = self.record.mounts.iter().zip(self.found);
            let own = own.filter(|(mount, _)| mount.file_system as usize == number);
            let mut own = own.collect::<Vec<_>>().into_iter();
            let is_made = own
                .clone()
                .any(|(mount, _)| mount.host.is_none() && mount.external.is_none());
            if !file_system.has_files() || !is_made {
                continue;
            }
            let is_whole = |(mount, found): &(&Mount, &mountinfo::Mount)| {
                let seen = mount_tree::mount_at(&found.point);
                let is_seen = mount.root == b"/" && seen.is_ok_and(|id| id == found.id);
                let has_mounts = || self.found.iter().any(|one| one.parent == found.id);
                // No copy shows what mounts on this one hide.
                is_seen && !(mount.is_unbindable && has_mounts())
            };
            let Some((mount, found)) = own.clone().find(is_whole) else {
                let place = own.next().map_or("/".into(), |(mount, _)| mount.place());
                let what = format!("the mount at {place}, which is hidden by others,");
                refused.push(self.tree.unsupported(what));
                continue;
            };
            let failed = |error: std::io::Error| {
                let doing = format!("cannot read the files of {}", found.point.display());
                Error::kernel(doing, error)
            };
            let whole = match mount.is_unbindable {
                true => mount_tree::open(&found.point),
                false => mount_tree::copy_at(&found.point),
            };
            let whole = whole.map_err(failed)?;
            let files = super::contents::read(whole);
            match files.map_err(|errno| failed(errno.into()))? {
                Some(files) => file_system.contents = files,
                None => {
                    let most = super::contents::BYTES_MAX;
                    let place = found.point.display();
                    let what = format!("a tmpfs at {place} with more than {most} bytes");
                    refused.push(self.tree.unsupported(what));
                }
            }
        }
        Ok(())
    }
}

/// The attributes that the words of a mount name, or a word that none has.
fn attributes(words: &str) -> std::result::Result<u64, &str> {
    let mut all = 0;
    for word in words.split(',').filter(|word| *word != "rw") {
        let known = ATTRIBUTES.iter().find(|(name, _)| *name == word);
        all |= known.ok_or(word)?.1;
    }
    let times = libc::MOUNT_ATTR_NOATIME;
    let is_relative = words.split(',').any(|word| word == "relatime");
    match all & times == 0 && !is_relative {
        true => Ok(all | libc::MOUNT_ATTR_STRICTATIME),
        false => Ok(all),
    }
}
