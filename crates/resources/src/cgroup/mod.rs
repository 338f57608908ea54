//! Control groups (cgroups(7)): in which groups tasks and threads are, and what limits those have.
//!
//! A hierarchy in which all tasks are where the program that dumps them is does not come into the
//! image: there the tasks come back where the program is that restores them.
//!
//! - What: control groups
//! - Kept: in which group each thread is, and the groups' limits, owners and permissions, as
//!   `--manage-cgroups` says; not their counters.
//! - Refused: "its control group …" (it cannot be seen from here, or is being removed;
//!   `--manage-cgroups=ignore`); "its control group … is frozen (…: thaw it before), which".
//! - At a restore: "the control group … is missing (--manage-cgroups=soft makes it)"; "the control
//!   group … is there already" (`--manage-cgroups=strict`); "the control group … is frozen: thaw it
//!   before"; "the control groups of … are not mounted here"; "… is no hierarchy of control
//!   groups"; "the root task's control group … is not below --cgroup-root …" (of a dump, too).
//! - CRIU 4.2: the same modes; of frozen groups and those out of sight not known.

mod make;
mod mounts;
mod owners;
mod place;
mod properties;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;
use std::sync::OnceLock;

use prost::Message;

use crate::{Error, Result};
pub use make::Groups;
pub use mounts::{Mounts, controllers_of};
pub use place::GroupPlace;

/// The number of the record; one an image.
pub const TAG: u16 = 302;

/// What is done about control groups; criu(8)'s `--manage-cgroups`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// Nothing: the restored tasks are where the restorer is.
    Ignore,
    /// Groups must be there, and stay as they are.
    None,
    /// Groups must be there, and get the properties that they had.
    Props,
    /// Groups that are missing are made with the properties that they had.
    #[default]
    Soft,
    /// The same, and the others get the properties that they had.
    Full,
    /// Groups must not be there.
    Strict,
}

/// How control groups are dealt with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Management {
    /// What is done.
    pub mode: Mode,
    /// The topmost group of the tree, in the hierarchy of that controller, or in all that are not
    /// named: a dump saves all that is below it, a restore puts it in the place of the one that was
    /// saved so, or of the root task's.
    pub roots: Vec<(Option<String>, Vec<u8>)>,
    /// Where the hierarchies are, each in a folder named after its controllers; unless given, where
    /// they are mounted.
    pub yard: Option<PathBuf>,
}

impl Management {
    /// Where the hierarchies are.
    ///
    /// # Errors
    /// [`Error::Mismatch`], [`Error::Kernel`].
    pub fn mounts(&self) -> Result<Mounts> {
        self.yard
            .as_deref()
            .map_or_else(Mounts::read, Mounts::of_yard)
    }

    /// The topmost group in a hierarchy, and whether that was named.
    fn root(&self, hierarchy: &str) -> Option<(&[u8], bool)> {
        let named = |one: &&(Option<String>, Vec<u8>)| {
            let controller = one.0.as_deref();
            controller.is_some_and(|one| hierarchy.split(',').any(|it| it == one))
        };
        let root = self
            .roots
            .iter()
            .find(|one| named(one) || one.0.as_deref() == Some(hierarchy));
        let root = root.or_else(|| self.roots.iter().find(|one| one.0.is_none()));
        root.map(|(name, path)| (trimmed(path), name.is_some()))
    }

    /// The same at a dump, where the root task's group is `task`: nothing where that is elsewhere.
    fn root_above(&self, hierarchy: &str, task: &[u8]) -> Result<Option<Vec<u8>>> {
        match self.root(hierarchy) {
            Some((root, _)) if is_below(task, root) => Ok(Some(root.to_vec())),
            Some((root, true)) => {
                let what = format!(
                    "the root task's control group {} is not below --cgroup-root {}",
                    shown(hierarchy, task),
                    OsStr::from_bytes(root).display()
                );
                Err(Error::Mismatch { what })
            }
            _ => Ok(None),
        }
    }
}

/// A path without a slash at its end; that of the topmost group is empty.
fn trimmed(path: &[u8]) -> &[u8] {
    path.strip_suffix(b"/").unwrap_or(path)
}

/// Whether a group is another one, given without a slash at its end, or below it.
fn is_below(path: &[u8], root: &[u8]) -> bool {
    let rest = path.strip_prefix(root);
    rest.is_some_and(|rest| rest.is_empty() || rest[0] == b'/')
}

/// The control groups of a tree.
#[derive(Clone, PartialEq, Message)]
pub struct Cgroups {
    /// The hierarchies, by their controllers: "memory", "cpu,cpuacct", "name=systemd"; "" is that
    /// of version 2.
    #[prost(string, repeated, tag = "1")]
    pub hierarchies: Vec<String>,
    /// Who is where; the root task first.
    #[prost(message, repeated, tag = "2")]
    pub members: Vec<Members>,
    /// The groups, those above others first.
    #[prost(message, repeated, tag = "3")]
    pub groups: Vec<Group>,
    /// The topmost group of the tree in each hierarchy where one was named; empty where none was.
    #[prost(bytes = "vec", repeated, tag = "4")]
    pub roots: Vec<Vec<u8>>,
}

/// Threads that are in the same groups.
#[derive(Clone, PartialEq, Message)]
pub struct Members {
    /// Processes (all of their threads that are not named elsewhere), and threads.
    #[prost(int32, repeated, tag = "1")]
    pub tids: Vec<i32>,
    /// Their group in each hierarchy.
    #[prost(bytes = "vec", repeated, tag = "2")]
    pub paths: Vec<Vec<u8>>,
}

/// A group.
#[derive(Clone, PartialEq, Message)]
pub struct Group {
    /// Index of its hierarchy.
    #[prost(uint32, tag = "1")]
    pub hierarchy: u32,
    /// Its path in it.
    #[prost(bytes = "vec", tag = "2")]
    pub path: Vec<u8>,
    /// Whether it is only there because others are below it.
    #[prost(bool, tag = "3")]
    pub above: bool,
    /// Its properties, in the order in which they are set.
    #[prost(message, repeated, tag = "4")]
    pub properties: Vec<Property>,
    /// To whom it belongs.
    #[prost(message, repeated, tag = "5")]
    pub owners: Vec<Owner>,
}

/// To whom a group's folder or one of its files belongs.
#[derive(Clone, PartialEq, Message)]
pub struct Owner {
    /// The file's name, empty for the folder.
    #[prost(string, tag = "1")]
    pub name: String,
    /// The user.
    #[prost(uint32, tag = "2")]
    pub uid: u32,
    /// The group of users.
    #[prost(uint32, tag = "3")]
    pub gid: u32,
    /// The permissions.
    #[prost(uint32, tag = "4")]
    pub mode: u32,
}

/// A file of a group.
#[derive(Clone, PartialEq, Message)]
pub struct Property {
    /// Its name.
    #[prost(string, tag = "1")]
    pub name: String,
    /// What it says.
    #[prost(bytes = "vec", tag = "2")]
    pub value: Vec<u8>,
}

/// What /proc/PID/cgroup says: the group in each hierarchy.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Membership(Vec<(String, Vec<u8>)>);

impl Membership {
    /// Reads the text of /proc/PID/cgroup.
    #[must_use]
    pub fn parse(text: &[u8]) -> Self {
        let lines = text.split(|byte| *byte == b'\n');
        let parts = lines.filter_map(|line| {
            let mut parts = line.splitn(3, |byte| *byte == b':').skip(1);
            let name = String::from_utf8(parts.next()?.to_vec()).ok()?;
            Some((name, parts.next()?.to_vec()))
        });
        Self(parts.collect())
    }

    /// That of this process, read once.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn own() -> Result<Self> {
        static OWN: OnceLock<Membership> = OnceLock::new();
        if let Some(own) = OWN.get() {
            return Ok(own.clone());
        }
        let own = match sys::procfs::read("self/cgroup") {
            Ok(text) => Self::parse(&text),
            // A kernel without control groups.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Self::default(),
            Err(error) => return Err(Error::kernel("read /proc/self/cgroup", error)),
        };
        Ok(OWN.get_or_init(|| own).clone())
    }

    /// The groups, with the names of their hierarchies.
    pub fn all(&self) -> impl Iterator<Item = (&str, &[u8])> {
        let all = self.0.iter();
        all.map(|(name, path)| (name.as_str(), path.as_slice()))
    }

    /// The name of the hierarchy that has these controllers; none has version 2.
    #[must_use]
    pub fn hierarchy_with(&self, controllers: &[String]) -> Option<&str> {
        let mut names = self.0.iter().map(|(name, _)| name.as_str());
        names.find(|name| {
            let own = name.split(',').filter(|one| !one.is_empty());
            let own = own.collect::<Vec<_>>();
            own.len() == controllers.len()
                && own.iter().all(|one| controllers.iter().any(|it| it == one))
        })
    }

    /// The group in a hierarchy.
    #[must_use]
    pub fn path(&self, hierarchy: &str) -> Option<&[u8]> {
        let found = self.0.iter().find(|(name, _)| name == hierarchy);
        found.map(|(_, path)| path.as_slice())
    }

    /// Whether threads of a process in these groups may be in others: version 2 says of a group
    /// that it can be so. `management` knows where the groups are.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn may_differ_by_thread(&self, management: &Management) -> Result<bool> {
        if self.0.iter().any(|(name, _)| !name.is_empty()) {
            return Ok(true);
        }
        let Some(path) = self.path("").filter(|path| *path != b"/") else {
            return Ok(false);
        };
        let folder = management.mounts()?.folder("", path);
        let kind = folder.and_then(|folder| std::fs::read(folder.join("cgroup.type")).ok());
        Ok(kind.is_some_and(|kind| kind.trim_ascii() != b"domain"))
    }
}

/// A tree's tasks and threads with their groups, the root first.
pub type Found = Vec<(i32, Membership)>;

/// Describes where the tree is; `None` where that is nowhere else than this process, whose groups
/// are `own`, and no hierarchy is named in `management`. Reads the properties of the groups.
///
/// # Errors
/// [`Error::Unsupported`] for a group that cannot be seen from here or is being removed,
/// [`Error::Mismatch`] for a root that the tree is not in, [`Error::Kernel`].
pub fn dump(found: &Found, own: &Membership, management: &Management) -> Result<Option<Cgroups>> {
    let elsewhere = |(name, path): &&(String, Vec<u8>)| {
        let mut all = found.iter();
        let named = management.root(name).is_some_and(|(_, named)| named);
        named || all.any(|(_, membership)| membership.path(name).is_some_and(|there| there != path))
    };
    let hierarchies = own.0.iter().filter(elsewhere);
    let hierarchies = hierarchies.map(|(name, _)| name.clone());
    let mut cgroups = Cgroups {
        hierarchies: hierarchies.collect(),
        ..Cgroups::default()
    };
    if cgroups.hierarchies.is_empty() {
        return Ok(None);
    }
    for (tid, membership) in found {
        let mut paths = Vec::new();
        for name in &cgroups.hierarchies {
            let path = membership.path(name).unwrap_or(b"/");
            if path.ends_with(b" (deleted)") || is_outside(path) {
                let what = format!("its control group {}", shown(name, path));
                return Err(Error::unsupported(*tid, what));
            }
            paths.push(path.to_vec());
        }
        match cgroups.members.iter_mut().find(|one| one.paths == paths) {
            Some(known) => known.tids.push(*tid),
            None => cgroups.members.push(Members {
                tids: vec![*tid],
                paths,
            }),
        }
    }
    let mounts = management.mounts()?;
    for (index, name) in (0u32..).zip(&cgroups.hierarchies) {
        let paths = cgroups.members.iter().map(|one| &one.paths[index as usize]);
        let mut paths = paths.collect::<BTreeSet<_>>();
        let task = &cgroups.members[0].paths[index as usize];
        let root = management.root_above(name, task)?;
        cgroups.roots.push(root.clone().unwrap_or_default());
        let root = root.filter(|root| !root.is_empty());
        paths.extend(&root);
        let root = root.as_ref().unwrap_or(task);
        for (path, above) in all_groups(&paths, root, |path| mounts.below(name, path)) {
            let mut group = Group {
                hierarchy: index,
                above,
                ..Group::default()
            };
            if let Some(folder) = mounts.folder(name, &path) {
                group.properties = properties::read(&folder, &path)?;
                group.owners = owners::read(&folder)?;
            }
            group.path = path;
            cgroups.groups.push(group);
        }
    }
    if cgroups.roots.iter().all(Vec::is_empty) {
        cgroups.roots.clear();
    }
    Ok(Some(cgroups))
}

/// Whether a path leads out of what can be seen from this cgroup namespace.
fn is_outside(path: &[u8]) -> bool {
    path.split(|byte| *byte == b'/').any(|part| part == b"..")
}

/// The groups at `paths`, those below the root task's, which may be empty, and those above all of
/// them; parents first. Tells of each whether it is one of the last.
fn all_groups(
    paths: &BTreeSet<&Vec<u8>>,
    root: &[u8],
    below: impl FnOnce(&[u8]) -> Vec<Vec<u8>>,
) -> Vec<(Vec<u8>, bool)> {
    let mut own = paths.iter().map(|path| (*path).clone());
    let mut own = own.by_ref().collect::<BTreeSet<_>>();
    if root != b"/" {
        own.extend(below(root));
    }
    let mut all = BTreeSet::new();
    for path in &own {
        let ends = path.iter().enumerate().filter(|(_, byte)| **byte == b'/');
        let above = ends.map(|(at, _)| path[..at.max(1)].to_vec());
        all.extend(above);
        all.insert(path.clone());
    }
    let groups = all.into_iter().map(|path| {
        let above = !own.contains(&path);
        (path, above)
    });
    groups.collect()
}

/// "memory:/a/b", for people.
#[must_use]
pub fn shown(hierarchy: &str, path: &[u8]) -> String {
    format!("{hierarchy}:{}", OsStr::from_bytes(path).display())
}

/// Reads the record.
///
/// # Errors
/// [`Error::Corrupt`].
pub fn decode(payload: &[u8]) -> Result<Cgroups> {
    let corrupt = |what: &str| Error::corrupt("control groups", what);
    let cgroups: Cgroups = image::strict::decode(payload).map_err(|what| corrupt(&what))?;
    let count = cgroups.hierarchies.len();
    let paths = cgroups.members.iter().flat_map(|one| &one.paths);
    let paths = paths.chain(cgroups.groups.iter().map(|group| &group.path));
    let paths = paths.chain(cgroups.roots.iter().filter(|root| !root.is_empty()));
    let strange = |path: &Vec<u8>| !path.starts_with(b"/") || path.contains(&0) || is_outside(path);
    if paths.into_iter().any(strange) {
        return Err(corrupt("a path that no group has"));
    }
    let names = cgroups.groups.iter().flat_map(|group| &group.properties);
    if names
        .into_iter()
        .any(|one| !properties::is_known(&one.name))
    {
        return Err(corrupt("a property that groups do not have"));
    }
    let mut owners = cgroups.groups.iter().flat_map(|group| &group.owners);
    if owners.any(|owner| !owners::is_known(&owner.name)) {
        return Err(corrupt("an owner of what groups do not have"));
    }
    let whole = cgroups.members.iter().all(|one| one.paths.len() == count);
    let known = |group: &Group| (group.hierarchy as usize) < count;
    let whole = whole && (cgroups.roots.is_empty() || cgroups.roots.len() == count);
    if !whole || !cgroups.groups.iter().all(known) || cgroups.members.is_empty() {
        return Err(corrupt("hierarchies are missing"));
    }
    Ok(cgroups)
}

impl Cgroups {
    /// Where a process, or a thread with groups of its own, is.
    #[must_use]
    pub fn of(&self, tid: i32) -> Option<&Members> {
        self.members.iter().find(|one| one.tids.contains(&tid))
    }

    /// One line for people about a process or thread.
    #[must_use]
    pub fn describe(&self, tid: i32) -> Option<String> {
        let members = self.of(tid)?;
        let all = self.hierarchies.iter().zip(&members.paths);
        let all = all.map(|(name, path)| shown(name, path));
        Some(all.collect::<Vec<_>>().join(" "))
    }

    /// Has the roots that were named take the place of those that the image names, or of the root
    /// task's groups.
    pub fn move_roots(&mut self, management: &Management) {
        for (index, name) in self.hierarchies.iter().enumerate() {
            let Some((new, _)) = management.root(name) else {
                continue;
            };
            let old = self.roots.get(index).filter(|root| !root.is_empty());
            let old = old.unwrap_or(&self.members[0].paths[index]).clone();
            self.groups
                .retain(|group| group.hierarchy as usize != index || !group.above);
            let change = |path: &mut Vec<u8>| {
                let old = trimmed(&old);
                if is_below(path, old) {
                    *path = [new, &path[old.len()..]].concat();
                }
            };
            self.members
                .iter_mut()
                .for_each(|one| change(&mut one.paths[index]));
            let groups = self.groups.iter_mut();
            groups
                .filter(|group| group.hierarchy as usize == index)
                .for_each(|group| change(&mut group.path));
        }
    }
}

/// Refuses a task that cannot run because its control group is frozen, where that is another one
/// than this process's, `own`.
///
/// # Errors
/// [`Error::Unsupported`].
pub fn check_thawed(pid: i32, membership: &Membership, own: &Membership) -> Result<()> {
    let mut mounts = None;
    for (name, path) in &membership.0 {
        let freezes = name.is_empty() || name.split(',').any(|one| one == "freezer");
        if !freezes || own.path(name) == Some(path) {
            continue;
        }
        if mounts.is_none() {
            mounts = Some(Mounts::read()?);
        }
        let folder = mounts.as_ref().and_then(|one| one.folder(name, path));
        if let Some(how) = folder.and_then(|folder| mounts::frozen(&folder)) {
            let what = format!(
                "its control group {} is frozen ({how}: thaw it before), which",
                shown(name, path)
            );
            return Err(Error::unsupported(pid, what));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn membership(text: &str) -> Membership {
        Membership::parse(text.as_bytes())
    }

    #[test]
    fn groups_are_read() {
        let found = membership("4:memory:/a:b\n1:name=systemd:/\n0::/x y\n");
        assert_eq!(found.path("memory"), Some(&b"/a:b"[..]));
        assert_eq!(found.path("name=systemd"), Some(&b"/"[..]));
        assert_eq!(found.path(""), Some(&b"/x y"[..]));
        let differ = found.may_differ_by_thread(&Management::default());
        assert!(differ.expect("nothing is read"));
    }

    #[test]
    fn where_this_process_is_nothing_is_said() {
        let own = membership("4:memory:/a\n0::/b\n");
        let found = vec![(7, own.clone()), (8, own.clone())];
        let dump = |found, roots| {
            let management = Management {
                roots,
                ..Management::default()
            };
            super::dump(found, &own, &management)
        };
        assert_eq!(dump(&found, Vec::new()).expect("nothing is read"), None);
        let everywhere = vec![(None, b"/a".to_vec())];
        assert_eq!(dump(&found, everywhere).expect("nothing is read"), None);
        let named = |path: &str| vec![(Some("memory".to_owned()), path.into())];
        let error = dump(&found, named("/ab")).expect_err("it is not there");
        let told = error.to_string();
        assert!(
            told.contains("memory:/a is not below --cgroup-root /ab"),
            "{told}"
        );
        let found = vec![(7, membership("4:memory:/a\n0::/../b\n"))];
        let error = dump(&found, Vec::new())
            .expect_err("it is outside")
            .to_string();
        assert!(error.contains("its control group :/../b"), "{error}");
    }

    #[test]
    fn groups_come_with_those_above() {
        let (one, other) = (b"/a/b".to_vec(), b"/c".to_vec());
        let paths = BTreeSet::from([&one, &other]);
        let all = all_groups(&paths, b"/a/b", |_| vec![b"/a/b/d".to_vec()]);
        let all = all.iter().map(|(path, above)| {
            let path = String::from_utf8(path.clone()).expect("text");
            (path, *above)
        });
        let want = [
            ("/", true),
            ("/a", true),
            ("/a/b", false),
            ("/a/b/d", false),
            ("/c", false),
        ];
        let want = want.map(|(path, above)| (path.to_owned(), above));
        assert_eq!(all.collect::<Vec<_>>(), want);
    }

    #[test]
    fn roots_are_moved() {
        let mut cgroups = Cgroups {
            hierarchies: vec!["cpu,cpuacct".into(), String::new()],
            members: vec![
                Members {
                    tids: vec![1],
                    paths: vec![b"/a".to_vec(), b"/b".to_vec()],
                },
                Members {
                    tids: vec![2],
                    paths: vec![b"/a/x".to_vec(), b"/bc".to_vec()],
                },
            ],
            ..Cgroups::default()
        };
        let root = |name: Option<&str>, path: &str| (name.map(str::to_owned), path.into());
        let to = |roots: &[(Option<String>, Vec<u8>)]| Management {
            roots: roots.to_vec(),
            ..Management::default()
        };
        cgroups.move_roots(&to(&[root(None, "/n"), root(Some("cpu"), "/c/")]));
        assert_eq!(cgroups.describe(1).as_deref(), Some("cpu,cpuacct:/c :/n"));
        assert_eq!(
            cgroups.describe(2).as_deref(),
            Some("cpu,cpuacct:/c/x :/bc")
        );
        assert_eq!(cgroups.describe(3), None);
        // What the dump named moves with all that is below it.
        cgroups.roots = vec![b"/c".to_vec(), Vec::new()];
        cgroups.members[0].paths[0] = b"/c/y".to_vec();
        cgroups.move_roots(&to(&[root(Some("cpuacct"), "/z/d")]));
        assert_eq!(
            cgroups.describe(1).as_deref(),
            Some("cpu,cpuacct:/z/d/y :/n")
        );
        assert_eq!(
            cgroups.describe(2).as_deref(),
            Some("cpu,cpuacct:/z/d/x :/bc")
        );
    }

    #[test]
    fn damaged_records_are_corrupt() {
        let sound = Cgroups {
            hierarchies: vec![String::new()],
            members: vec![Members {
                tids: vec![1],
                paths: vec![b"/a".to_vec()],
            }],
            groups: vec![Group {
                hierarchy: 0,
                path: b"/a".to_vec(),
                above: false,
                properties: vec![Property {
                    name: "pids.max".into(),
                    value: b"7".to_vec(),
                }],
                owners: vec![Owner::default()],
            }],
            roots: vec![b"/a".to_vec()],
        };
        decode(&sound.encode_to_vec()).expect("sound");
        let damage: [fn(&mut Cgroups); 8] = [
            |one| one.roots[0] = b"/a/../..".to_vec(),
            |one| one.roots.push(Vec::new()),
            |one| one.members.clear(),
            |one| one.members[0].paths.clear(),
            |one| one.groups[0].hierarchy = 1,
            |one| one.groups[0].path = b"/a/../..".to_vec(),
            |one| one.groups[0].properties[0].name = "../../etc/passwd".into(),
            |one| one.groups[0].owners[0].name = "../../etc/passwd".into(),
        ];
        for damage in damage {
            let mut damaged = sound.clone();
            damage(&mut damaged);
            let error = decode(&damaged.encode_to_vec()).expect_err("damaged");
            assert!(matches!(error, Error::Corrupt { .. }), "{error}");
        }
    }
}
