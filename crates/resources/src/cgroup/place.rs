//! Groups with which a namespace or a mount begins.

use prost::Message;

use super::{Management, Membership, Mode, Mounts};
use crate::Result;

/// A group that is the one of a tree's root task, or above or below it.
#[derive(Clone, PartialEq, Message)]
pub struct GroupPlace {
    /// Its hierarchy, as /proc/PID/cgroup names it.
    #[prost(string, tag = "1")]
    pub hierarchy: String,
    /// Its path.
    #[prost(bytes = "vec", tag = "2")]
    pub path: Vec<u8>,
    /// The path of the root task's group.
    #[prost(bytes = "vec", tag = "3")]
    pub of_root: Vec<u8>,
}

impl GroupPlace {
    /// That of the group `path`, where the root task is in `of_root`; `None` for one elsewhere.
    #[must_use]
    pub fn new(hierarchy: &str, path: &[u8], of_root: &[u8]) -> Option<Self> {
        let place = Self {
            hierarchy: hierarchy.to_owned(),
            path: path.to_vec(),
            of_root: of_root.to_vec(),
        };
        place.is_sound().then_some(place)
    }

    /// Tells whether it is a place that a dump writes.
    #[must_use]
    pub fn is_sound(&self) -> bool {
        let is_path = |path: &[u8]| {
            let is_name = |name: &[u8]| name != b".." && name != b"." && !name.contains(&0);
            path.first() == Some(&b'/') && path.split(|byte| *byte == b'/').all(is_name)
        };
        is_path(&self.path)
            && is_path(&self.of_root)
            && (below(&self.path, &self.of_root).is_some()
                || below(&self.of_root, &self.path).is_some())
    }

    /// The path of the group that a restored tree has in its place: below what `management` says,
    /// or the same one. Where groups are left alone and it is not there, it is one by this
    /// process's own group, in which the tasks come back.
    ///
    /// # Errors
    /// [`crate::Error::Kernel`].
    pub fn find(&self, management: &Management, mounts: &Mounts) -> Result<Option<Vec<u8>>> {
        let hierarchy = &self.hierarchy;
        let root = match management.root(hierarchy) {
            Some((root, _)) => root.to_vec(),
            None => {
                let same = mounts.folder(hierarchy, &self.path);
                let is_there = || same.is_some_and(|folder| folder.is_dir());
                if management.mode != Mode::Ignore || is_there() {
                    return Ok(Some(self.path.clone()));
                }
                let own = Membership::own()?;
                match own.path(hierarchy) {
                    Some(own) => own.to_vec(),
                    None => return Ok(None),
                }
            }
        };
        Ok(self.beside(&root))
    }

    /// Its path, where the root task's group is `root`.
    fn beside(&self, root: &[u8]) -> Option<Vec<u8>> {
        if let Some(rest) = below(&self.path, &self.of_root) {
            return Some(joined(root, rest));
        }
        let rest = below(&self.of_root, &self.path)?;
        let above = root.strip_suffix(rest)?;
        Some(joined(above, b""))
    }
}

/// The way from a group to one that is the same or below: `/x/y`.
fn below<'a>(path: &'a [u8], group: &[u8]) -> Option<&'a [u8]> {
    let group = group.strip_suffix(b"/").unwrap_or(group);
    let rest = path.strip_prefix(group)?;
    match rest {
        b"" | b"/" => Some(b""),
        [b'/', ..] => Some(rest),
        _ => None,
    }
}

fn joined(group: &[u8], rest: &[u8]) -> Vec<u8> {
    let group = group.strip_suffix(b"/").unwrap_or(group);
    match [group, rest].concat() {
        path if path.is_empty() => b"/".to_vec(),
        path => path,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_move_with_the_root_task() {
        let place =
            |path: &str, of_root: &str| GroupPlace::new("cpu", path.as_bytes(), of_root.as_bytes());
        for (path, of_root, root, wanted) in [
            ("/a", "/a", "/b/c", Some("/b/c")),
            ("/a/x/y", "/a", "/b", Some("/b/x/y")),
            ("/a", "/a/init", "/b/init", Some("/b")),
            ("/a", "/a/init", "/b/other", None),
            ("/", "/a", "/a", Some("/")),
            ("/a", "/", "/b", Some("/b/a")),
            ("/", "/", "/", Some("/")),
        ] {
            let place = place(path, of_root).expect("the one is below the other");
            let found = place.beside(root.as_bytes());
            let wanted = wanted.map(|wanted| wanted.as_bytes().to_vec());
            assert_eq!(found, wanted, "{path} {of_root} {root}");
        }
        for (path, of_root) in [("/a", "/b"), ("/a", "/ab"), ("/../a", "/"), ("a", "a")] {
            assert_eq!(place(path, of_root), None, "{path} {of_root}");
        }
    }
}
