//! What differs between the files of two images.

use std::collections::{BTreeMap, HashSet};

use crate::bytes::Bytes;
use crate::ext4::{Entry, FileSystem, Inode, Kind};
use crate::files::Files;
use crate::read_at::ImageSpace;
use crate::{Error, Result};

/// How much of two files is compared at a time.
const PIECE_BYTES: u64 = 1 << 20;

/// Fate of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Only the newer image has it.
    Added,
    /// Only the older image has it.
    Removed,
    /// These differ: sort, mode, owner, group, size, modified, device, target, attributes,
    /// contents.
    Changed(Vec<&'static str>),
}

/// A file that is not the same in both.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Its path, without a slash at its beginning.
    pub path: Vec<u8>,
    /// The file's fate.
    pub fate: Fate,
}

/// Tells all that differs below a path from the root, directories before what is in them. Of a
/// directory that only one image has, what is in it is told, too.
///
/// # Errors
/// [`Error::NoFile`] where neither has it, [`Error::Damaged`], [`Error::Image`]; those of `each`.
pub fn diff(
    old: &Files,
    new: &Files,
    path: &[u8],
    each: &mut dyn FnMut(Difference) -> Result<()>,
) -> Result<()> {
    let find = |files: &Files| match files.find(path) {
        Err(Error::NoFile { .. }) => Ok(None),
        other => other.map(Some),
    };
    let pair = (find(old)?, find(new)?);
    if pair.0.is_none() && pair.1.is_none() {
        new.find(path)?;
    }
    let mut walk = Walk {
        old: old.fs(),
        new: new.fs(),
        each,
        met: [HashSet::new(), HashSet::new()],
    };
    let words = path
        .split(|byte| *byte == b'/')
        .filter(|word| !word.is_empty());
    let path = words.collect::<Vec<_>>().join(&b'/');
    walk.pair(&path, pair.0.as_ref(), pair.1.as_ref())
}

struct Walk<'a> {
    old: &'a FileSystem<ImageSpace>,
    new: &'a FileSystem<ImageSpace>,
    each: &'a mut dyn FnMut(Difference) -> Result<()>,
    /// Directories that were met in each: none has two names.
    met: [HashSet<u32>; 2],
}

impl Walk<'_> {
    fn pair(&mut self, path: &[u8], old: Option<&Inode>, new: Option<&Inode>) -> Result<()> {
        let fate = match (old, new) {
            (Some(_), None) => Some(Fate::Removed),
            (None, Some(_)) => Some(Fate::Added),
            (Some(old), Some(new)) => self.changes(old, new)?,
            (None, None) => None,
        };
        if let Some(fate) = fate {
            let path = path.to_vec();
            (self.each)(Difference { path, fate })?;
        }
        let is_folder = |inode: &&Inode| inode.kind() == Kind::Directory;
        let folders = (old.filter(is_folder), new.filter(is_folder));
        if folders.0.is_some() || folders.1.is_some() {
            self.inside(path, folders.0, folders.1)?;
        }
        Ok(())
    }

    /// Compares what is in directories.
    fn inside(&mut self, path: &[u8], old: Option<&Inode>, new: Option<&Inode>) -> Result<()> {
        let mut both: BTreeMap<Vec<u8>, [Option<Entry>; 2]> = BTreeMap::new();
        for (number, (fs, inode)) in [(self.old, old), (self.new, new)].into_iter().enumerate() {
            let Some(inode) = inode else { continue };
            if !self.met[number].insert(inode.number) {
                let field = format!("inode {}", inode.number);
                return Err(Error::damaged(
                    inode.block,
                    field,
                    "a directory with two names",
                ));
            }
            fs.walk_entries(inode, &mut |entry| {
                let name = entry.name.clone();
                both.entry(name).or_default()[number] = Some(entry);
                Ok(())
            })?;
        }
        for (name, [old, new]) in both {
            let mut path = path.to_vec();
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend(name);
            let inode = |fs: &FileSystem<ImageSpace>, entry: Option<Entry>| {
                entry
                    .map(|entry| fs.inode(entry.inode, entry.block))
                    .transpose()
            };
            let (old, new) = (inode(self.old, old)?, inode(self.new, new)?);
            self.pair(&path, old.as_ref(), new.as_ref())?;
        }
        Ok(())
    }

    /// Returns the fields that differ of a file that both have.
    fn changes(&self, old: &Inode, new: &Inode) -> Result<Option<Fate>> {
        if old.kind() != new.kind() {
            return Ok(Some(Fate::Changed(vec!["sort"])));
        }
        let kind = old.kind();
        let is_device = matches!(kind, Kind::Character | Kind::Block);
        let is_sized = kind == Kind::Regular;
        let is_link = kind == Kind::Link && !old.is_encrypted() && !new.is_encrypted();
        let mut changes = Vec::new();
        let mut note = |what, differs: bool| changes.extend(differs.then_some(what));
        note("mode", old.mode() != new.mode());
        note("owner", old.uid() != new.uid());
        note("group", old.gid() != new.gid());
        note("size", is_sized && old.size_bytes() != new.size_bytes());
        note("modified", old.modified() != new.modified());
        note("device", is_device && old.device() != new.device());
        if is_link {
            note(
                "target",
                self.old.link_target(old)? != self.new.link_target(new)?,
            );
        }
        let sorted = |fs: &FileSystem<ImageSpace>, inode| {
            let mut all = fs.attributes(inode)?;
            all.sort_by(|one, other| one.name.cmp(&other.name));
            Ok::<_, Error>(all)
        };
        note(
            "attributes",
            sorted(self.old, old)? != sorted(self.new, new)?,
        );
        if is_sized {
            note("contents", !self.are_equal(old, new)?);
        }
        Ok((!changes.is_empty()).then_some(Fate::Changed(changes)))
    }

    /// Tells whether two files have the same bytes, encrypted ones as they are stored.
    fn are_equal(&self, old: &Inode, new: &Inode) -> Result<bool> {
        if old.size_bytes() != new.size_bytes() {
            return Ok(false);
        }
        let (old, new) = (Bytes::of(self.old, old)?, Bytes::of(self.new, new)?);
        let mut pieces = [vec![0; PIECE_BYTES as usize], vec![0; PIECE_BYTES as usize]];
        let mut at = 0;
        while let Some(start) = old.next(at).into_iter().chain(new.next(at)).min() {
            let len = (old.size - start).min(PIECE_BYTES) as usize;
            let [one, other] = &mut pieces;
            old.read(start, &mut one[..len])?;
            new.read(start, &mut other[..len])?;
            if one[..len] != other[..len] {
                return Ok(false);
            }
            at = start + len as u64;
        }
        Ok(true)
    }
}
