//! What of a file system a stream has: the files that have names, and those of them that have
//! changed since another image.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use xxhash_rust::xxh3::xxh3_128;

use crate::ext4::{Entry, FileSystem, Inode, Kind, ROOT, Time};
use crate::extract::Omission;
use crate::survey::settled_ns;
use crate::tables::still_since_ns;
use crate::{Error, ReadAt, Result};

/// restore(8) makes sockets by `bind`, and their paths, which begin with a dot, have to fit there.
const SOCKET_PATH_MAX: usize = 107;
const NAME_MAX: usize = 254;

/// A file.
#[derive(Debug)]
pub struct Node {
    /// Its kind.
    pub kind: Kind,
    /// How long it is.
    pub size_bytes: u64,
    /// The first directory that has a name of it; 0 where none has.
    pub parent: u32,
    /// True if the stream has it.
    pub is_dumped: bool,
    is_encrypted: bool,
    has_changed: bool,
}

/// All inodes in use, by number.
#[derive(Debug, Default)]
pub struct Tree {
    nodes: BTreeMap<u32, Node>,
    /// Names that the stream cannot have, by directory.
    without: HashSet<(u32, Vec<u8>)>,
    /// The same, as paths with reasons.
    pub left_out: Vec<Omission>,
}

/// Inodes of another image.
pub struct ParentInodes {
    sums: HashMap<u32, u128>,
    settled_ns: Option<i64>,
}

impl ParentInodes {
    pub fn read<S: ReadAt>(fs: &FileSystem<S>, instant: Time) -> Result<Self> {
        let mut sums = HashMap::new();
        fs.walk_inodes(&mut |inode| {
            sums.insert(inode.number, xxh3_128(&inode.identity()));
            Ok(())
        })?;
        let settled_ns = settled_ns(instant);
        Ok(Self { sums, settled_ns })
    }

    /// Tells whether a file may have changed since: it has not where its inode says the same, and
    /// says that its last change was before the earlier image by more than a step of the clock.
    fn may_differ(&self, inode: &Inode) -> bool {
        let is_same = self.sums.get(&inode.number) == Some(&xxh3_128(&inode.identity()));
        let still_since_ns = still_since_ns(inode);
        let is_still = still_since_ns.zip(self.settled_ns);
        !is_same || is_still.is_none_or(|(since, settled)| since > settled)
    }
}

/// Why a stream cannot have a file under a path, which begins with a dot.
fn why_not(node: &Node, path: &[u8], name: &[u8]) -> Option<&'static str> {
    match node.kind {
        _ if node.is_encrypted => Some("it is encrypted, and the key is not in the image"),
        // restore(8) counts the room of a name and a zero with eight bits.
        _ if name.len() > NAME_MAX => Some("restore(8) makes no names of 255 bytes"),
        Kind::Socket if path.len() > SOCKET_PATH_MAX => {
            Some("restore(8) makes no sockets with paths of more than 107 bytes")
        }
        _ => None,
    }
}

impl Tree {
    /// Looks at all files, and at what has changed since `earlier`; everything has without that.
    pub fn read<S: ReadAt>(fs: &FileSystem<S>, earlier: Option<&ParentInodes>) -> Result<Self> {
        let mut this = Self::default();
        fs.walk_inodes(&mut |inode| {
            this.nodes.insert(
                inode.number,
                Node {
                    kind: inode.kind(),
                    size_bytes: inode.size_bytes(),
                    parent: 0,
                    is_dumped: false,
                    is_encrypted: inode.is_encrypted(),
                    has_changed: earlier.is_none_or(|earlier| earlier.may_differ(&inode)),
                },
            );
            Ok(())
        })?;
        let root = this.nodes.get_mut(&ROOT);
        let root = root.ok_or_else(|| Error::damaged(0, "inode 2", "it is not in use"))?;
        root.parent = ROOT;
        let mut folders = vec![(ROOT, b".".to_vec())];
        while let Some((number, path)) = folders.pop() {
            this.folder(fs, number, &path, &mut folders)?;
        }
        // Without it, restore(8) finds nothing.
        this.dump(ROOT);
        Ok(this)
    }

    /// Meets the entries of a directory.
    fn folder<S: ReadAt>(
        &mut self,
        fs: &FileSystem<S>,
        number: u32,
        path: &[u8],
        folders: &mut Vec<(u32, Vec<u8>)>,
    ) -> Result<()> {
        let mut has_changed = self.nodes[&number].has_changed;
        fs.walk_entries(&fs.inode(number, 0)?, &mut |entry| {
            let bad = |what| Error::damaged(entry.block, format!("inode {}", entry.inode), what);
            let node = self.nodes.get_mut(&entry.inode);
            let node = node.ok_or_else(|| bad("it has a name and is not in use"))?;
            let is_folder = node.kind == Kind::Directory;
            if node.kind == Kind::Unknown {
                return Err(bad("it is of no sort"));
            }
            if is_folder && node.parent != 0 {
                return Err(bad("a directory with two names"));
            }
            let path = [path, b"/", &*entry.name].concat();
            if let Some(what) = why_not(node, &path, &entry.name) {
                let path = PathBuf::from(OsStr::from_bytes(&path[2..]));
                let what = what.to_owned();
                self.left_out.push(Omission { path, what });
                self.without.insert((number, entry.name));
                return Ok(());
            }
            if node.parent == 0 {
                node.parent = number;
            }
            node.is_dumped |= node.has_changed && !is_folder;
            has_changed |= node.has_changed;
            if is_folder {
                folders.push((entry.inode, path));
            }
            Ok(())
        })?;
        if has_changed {
            self.dump(number);
        }
        Ok(())
    }

    /// Has the stream have a directory and those that lead to it.
    fn dump(&mut self, mut number: u32) {
        while let Some(node) = self.nodes.get_mut(&number) {
            if std::mem::replace(&mut node.is_dumped, true) {
                return;
            }
            number = node.parent;
        }
    }

    /// A file that has a name.
    pub fn node(&self, number: u32) -> Option<&Node> {
        self.nodes.get(&number).filter(|node| node.parent != 0)
    }

    /// The file of an entry that the stream has.
    pub fn entry(&self, folder: u32, entry: &Entry) -> Option<&Node> {
        // They are few, mostly none.
        let name = || (folder, entry.name.clone());
        let is_without = !self.without.is_empty() && self.without.contains(&name());
        self.node(entry.inode).filter(|_| !is_without)
    }

    /// Those with names, by number.
    pub fn named(&self) -> impl Iterator<Item = (u32, &Node)> {
        let all = self.nodes.iter().map(|(number, node)| (*number, node));
        all.filter(|(_, node)| node.parent != 0)
    }

    /// Those of them that the stream has.
    pub fn dumped(&self) -> impl Iterator<Item = (u32, &Node)> {
        self.named().filter(|(_, node)| node.is_dumped)
    }

    /// A path of a file that has a name.
    pub fn path_of<S: ReadAt>(&self, fs: &FileSystem<S>, mut number: u32) -> Result<PathBuf> {
        let mut words = Vec::new();
        while number != ROOT && words.len() < self.nodes.len() {
            let parent = self.nodes.get(&number).map_or(ROOT, |node| node.parent);
            fs.walk_entries(&fs.inode(parent, 0)?, &mut |entry| {
                if entry.inode == number
                    && words.last().is_none_or(|last: &(u32, _)| last.0 != number)
                {
                    words.push((number, entry.name));
                }
                Ok(())
            })?;
            number = parent;
        }
        let words = words.iter().rev().map(|(_, name)| OsStr::from_bytes(name));
        Ok(words.collect())
    }
}
