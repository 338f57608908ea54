//! Files of streams, under their numbers first, and then under their names.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, FileType, Mode, OFlags, linkat, makedev, mkdirat, mknodat, openat, renameat,
    symlinkat, unlinkat,
};
use rustix::io::Errno;

use super::attributes::{self, BLOCK_OF_DUMP_MAX_BYTES};
use super::folder::{self, DirectoryEntry, FOLDER_MAX_BYTES};
use super::record::{Facts, Header, Stamp};
use super::stream::{Stream, has};
use crate::dump::Progress;
use crate::ext4::{ROOT, Time};
use crate::extract::Omission;
use crate::metadata::Metadata;
use crate::{Error, Result};

/// Directory of files until they get their names.
const NUMBERS: &str = "numbers";
/// The longest target of a symbolic link.
const TARGET_MAX_BYTES: usize = 4096;

/// A directory as the streams have it.
struct Folder {
    entries: BTreeMap<Vec<u8>, u32>,
    metadata: Metadata,
}

/// The files of streams.
pub struct TreeBuilder<'a> {
    root: BorrowedFd<'a>,
    /// Directory of files under their numbers.
    numbers: OwnedFd,
    folders: BTreeMap<u32, Folder>,
    files: HashSet<u32>,
    /// Files that differ from the streams, by number.
    left_out: BTreeMap<u32, Vec<String>>,
}

impl<'a> TreeBuilder<'a> {
    /// None so far, in a file system with nothing in its root.
    pub fn new(root: BorrowedFd<'a>) -> Result<Self> {
        let failed = || Error::file::<Errno>("make", NUMBERS);
        match unlinkat(root, "lost+found", AtFlags::REMOVEDIR) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(error) => return Err(Error::file("remove", "lost+found")(error)),
        }
        mkdirat(root, NUMBERS, Mode::RWXU).map_err(failed())?;
        let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
        let numbers = openat(root, NUMBERS, flags, Mode::empty()).map_err(failed())?;
        Ok(Self {
            root,
            numbers,
            folders: BTreeMap::new(),
            files: HashSet::new(),
            left_out: BTreeMap::new(),
        })
    }

    /// Adds what a stream has, and removes what was gone by then.
    pub fn add(&mut self, mut stream: Stream, progress: Progress<'_>) -> Result<()> {
        let total = stream.files();
        let mut met = HashSet::new();
        while let Some(header) = stream.file()? {
            let number = header.inode;
            if header.has_attributes || !met.insert(number) {
                return Err(stream.damaged(format!("inode {number} is there a second time")));
            }
            if header.has_metadata_alone {
                let what = "has files without contents (dump -m), which are not read here";
                return Err(Error::Unfit(format!("{} {what}", stream.path().display())));
            }
            self.forget(number)?;
            match header.facts.mode >> 12 {
                4 => self.folder(&mut stream, &header)?,
                _ => self.file(&mut stream, &header)?,
            }
            progress(met.len() as u64, total);
        }
        for number in (1..).take(stream.dumped.len() * 8) {
            if has(&stream.dumped, number) && !met.contains(&number) {
                self.leave_out(number, "the stream lists it, and does not have it");
            }
        }
        let gone = self.folders.keys().chain(&self.files).copied();
        let gone = gone.filter(|number| !has(&stream.used, *number));
        for number in gone.collect::<Vec<_>>() {
            self.forget(number)?;
        }
        Ok(())
    }

    fn leave_out(&mut self, number: u32, what: impl Into<String>) {
        self.left_out.entry(number).or_default().push(what.into());
    }

    /// Removes what had a number.
    fn forget(&mut self, number: u32) -> Result<()> {
        self.folders.remove(&number);
        self.left_out.remove(&number);
        if self.files.remove(&number) {
            let name = number.to_string();
            let removed = unlinkat(&self.numbers, &name, AtFlags::empty());
            removed.map_err(Error::file("remove", name))?;
        }
        Ok(())
    }

    fn folder(&mut self, stream: &mut Stream, header: &Header) -> Result<()> {
        let bytes = stream.whole(header, FOLDER_MAX_BYTES)?;
        let read = folder::decode(&bytes);
        let number = header.inode;
        let read = read.map_err(|what| stream.damaged(format!("directory {number}: {what}")))?;
        if read.lost > 0 {
            let what = format!("dump(8) has lost {} names of 255 bytes in it", read.lost);
            self.leave_out(number, what);
        }
        let entries = read.entries.into_iter();
        let entries = entries.map(|DirectoryEntry { inode, name, .. }| (name, inode));
        let folder = Folder {
            entries: entries.collect(),
            metadata: self.metadata(stream, header)?,
        };
        self.folders.insert(number, folder);
        Ok(())
    }

    /// What a file has beside its contents, with the attributes that follow it.
    fn metadata(&mut self, stream: &mut Stream, first: &Header) -> Result<Metadata> {
        let number = first.inode;
        let mut all = Vec::new();
        while let Some(header) = stream.attributes_of(number)? {
            let bytes = stream.whole(&header, BLOCK_OF_DUMP_MAX_BYTES)?;
            let read = attributes::decode(&bytes).map_err(|what| stream.damaged(what))?;
            all.extend(read.attributes);
            for what in read.left_out {
                self.leave_out(number, what);
            }
            // Entries of directories are in the stream all the same.
            if read.is_inline && first.facts.mode >> 12 != 4 {
                let what = "dump(8) loses contents that stood in an inode (inline data)";
                self.leave_out(number, what);
            }
        }
        let facts = &first.facts;
        let time = |stamp: Stamp| match stamp.us {
            us @ 0..1_000_000 => Ok(Time {
                s: stamp.s.into(),
                ns: us * 1000,
            }),
            us => Err(stream.damaged(format!("inode {number}, a time with {us} us"))),
        };
        Ok(Metadata {
            uid: facts.uid,
            gid: facts.gid,
            permissions: (facts.mode >> 12 != 10).then_some(u32::from(facts.mode) & 0o7777),
            attributes: all,
            accessed: time(facts.accessed)?,
            modified: time(facts.modified)?,
        })
    }

    /// Makes a file that is no directory.
    fn file(&mut self, stream: &mut Stream, header: &Header) -> Result<()> {
        let (number, facts) = (header.inode, &header.facts);
        let name = number.to_string();
        let made = || Error::file::<Errno>("make", name.clone());
        match facts.mode >> 12 {
            8 => self.regular(stream, header, &name)?,
            10 => {
                let target = stream.whole(header, TARGET_MAX_BYTES)?;
                symlinkat(&*target, &self.numbers, &name).map_err(made())?;
            }
            sort => {
                let Some(kind) = special(sort) else {
                    return Err(stream.damaged(format!("inode {number}, mode {:#o}", facts.mode)));
                };
                stream.contents(header, &mut |_, _| Ok(()))?;
                let is_device = matches!(sort, 2 | 6);
                if is_device && facts.device == 0 {
                    let what = "its device is 0:0, or one whose number dump(8) has lost";
                    self.leave_out(number, what);
                }
                let mode = Mode::RUSR | Mode::WUSR;
                let node = mknodat(&self.numbers, &name, kind, mode, device(facts));
                node.map_err(made())?;
            }
        }
        self.files.insert(number);
        let metadata = self.metadata(stream, header)?;
        let folder = self.numbers.as_fd();
        let left_out = metadata.give(folder, OsStr::new(&name), Path::new(&name), true)?;
        for what in left_out {
            self.leave_out(number, what);
        }
        Ok(())
    }

    /// Makes a file with bytes.
    fn regular(&mut self, stream: &mut Stream, header: &Header, name: &str) -> Result<()> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
        let made = openat(&self.numbers, name, flags, Mode::RUSR | Mode::WUSR);
        let file = File::from(made.map_err(Error::file("make", name))?);
        let known = stream.contents(header, &mut |at, bytes| {
            let written = file.write_all_at(bytes, at);
            written.map_err(Error::file("write to", name))
        })?;
        let size = header.facts.size_bytes;
        if known < size {
            let what = format!("of {size} bytes the stream has {known}");
            self.leave_out(header.inode, what);
        }
        let sized = file.set_len(size);
        sized.map_err(Error::file("set the length of", name))
    }

    /// Gives all files their names; tells how many directories and others there are, and what is
    /// not as the streams say.
    ///
    /// # Errors
    /// [`Error::Unfit`] where there is no root directory, or a directory has two names;
    /// [`Error::File`].
    pub fn finish(mut self) -> Result<(u64, u64, Vec<Omission>)> {
        let order = self.order()?;
        let mut names: HashMap<u32, u32> = HashMap::new();
        for number in &order.folders {
            for child in self.folders[number].entries.values() {
                *names.entry(*child).or_default() += 1;
            }
        }
        let numbers = self.out_of_the_way()?;
        // The innermost first, the root last.
        for number in order.folders.iter().rev() {
            self.place(*number, &mut names)?;
        }
        let files = self
            .files
            .iter()
            .filter(|number| names.contains_key(number));
        let files = files.count() as u64;
        for number in std::mem::take(&mut self.files) {
            if !names.contains_key(&number) {
                let removed = unlinkat(&self.numbers, number.to_string(), AtFlags::empty());
                removed.map_err(Error::file("remove", number.to_string()))?;
            }
        }
        let removed = unlinkat(self.root, &numbers, AtFlags::REMOVEDIR);
        removed.map_err(Error::file("remove", numbers))?;
        let root = &self.folders[&ROOT].metadata;
        for what in root.give(self.root, OsStr::new("."), Path::new("/"), true)? {
            self.leave_out(ROOT, what);
        }
        rustix::fs::syncfs(&self.numbers).map_err(Error::file("write", "/"))?;
        let left_out = self.left_out.into_iter().flat_map(|(number, all)| {
            let path = order.path_of(number);
            let told = move |what| Omission {
                path: path.clone(),
                what,
            };
            all.into_iter().map(told)
        });
        Ok((order.folders.len() as u64, files, left_out.collect()))
    }

    /// Calls the folder of numbers as nothing in the root is called; gives that name.
    fn out_of_the_way(&self) -> Result<String> {
        let entries = &self.folders[&ROOT].entries;
        let mut name = NUMBERS.to_owned();
        while entries.contains_key(name.as_bytes()) {
            name.push('+');
        }
        let moved = renameat(self.root, NUMBERS, self.root, &name);
        moved.map_err(Error::file("rename", NUMBERS))?;
        Ok(name)
    }

    /// In which order directories are below each other.
    fn order(&self) -> Result<Order> {
        let mut order = Order {
            folders: Vec::new(),
            names: HashMap::new(),
        };
        if !self.folders.contains_key(&ROOT) {
            return Err(Error::Unfit("the dump has no root directory".into()));
        }
        let mut next = vec![ROOT];
        let mut met = HashSet::from([ROOT]);
        while let Some(number) = next.pop() {
            order.folders.push(number);
            for (name, child) in &self.folders[&number].entries {
                if self.folders.contains_key(child) {
                    if !met.insert(*child) {
                        let what = format!("directory {child} of the dump has two names");
                        return Err(Error::Unfit(what));
                    }
                    next.push(*child);
                }
                let place = (number, name.clone());
                order.names.entry(*child).or_insert(place);
            }
        }
        Ok(order)
    }

    /// Makes a directory under its number, with all that is in it; `names` are those that its files
    /// still get.
    fn place(&mut self, number: u32, names: &mut HashMap<u32, u32>) -> Result<()> {
        let own = number.to_string();
        let failed = || Error::file::<Errno>("make", own.clone());
        let folder = match number {
            ROOT => {
                let root = self.root.try_clone_to_owned();
                root.map_err(Error::file("open", "/"))?
            }
            _ => {
                mkdirat(&self.numbers, &own, Mode::RWXU).map_err(failed())?;
                let flags = OFlags::DIRECTORY | OFlags::CLOEXEC;
                openat(&self.numbers, &own, flags, Mode::empty()).map_err(failed())?
            }
        };
        let mut missing = Vec::new();
        for (name, child) in &self.folders[&number].entries {
            let from = child.to_string();
            let to = OsStr::from_bytes(name);
            let failed = || Error::file::<Errno>("make", PathBuf::from(&own).join(to));
            if self.folders.contains_key(child) {
                renameat(&self.numbers, &from, &folder, to).map_err(failed())?;
            } else if self.files.contains(child) {
                let left = names.get_mut(child).expect("all names were counted");
                *left -= 1;
                let named = match left {
                    0 => renameat(&self.numbers, &from, &folder, to),
                    _ => linkat(&self.numbers, &from, &folder, to, AtFlags::empty()),
                };
                named.map_err(failed())?;
            } else {
                missing.push(*child);
            }
        }
        for child in missing {
            self.leave_out(child, "it has a name, and is in no stream");
        }
        if number != ROOT {
            let metadata = &self.folders[&number].metadata;
            let at = self.numbers.as_fd();
            for what in metadata.give(at, OsStr::new(&own), Path::new(&own), true)? {
                self.leave_out(number, what);
            }
        }
        Ok(())
    }
}

/// Directories, each behind the one that it is in, and the first name of everything.
struct Order {
    folders: Vec<u32>,
    names: HashMap<u32, (u32, Vec<u8>)>,
}

impl Order {
    /// A path of a file; its number where it has none.
    fn path_of(&self, number: u32) -> PathBuf {
        let (mut at, mut words) = (number, Vec::new());
        while at != ROOT {
            let Some((parent, name)) = self.names.get(&at) else {
                return PathBuf::from(format!("inode {number}"));
            };
            words.push(OsStr::from_bytes(name));
            at = *parent;
        }
        words.into_iter().rev().collect()
    }
}

/// A file that is a device, a pipe or a socket, by the upper bits of its mode.
const fn special(sort: u16) -> Option<FileType> {
    match sort {
        1 => Some(FileType::Fifo),
        2 => Some(FileType::CharacterDevice),
        6 => Some(FileType::BlockDevice),
        12 => Some(FileType::Socket),
        _ => None,
    }
}

/// The number of a device: as dump(8) has it, in one of two encodings.
fn device(facts: &Facts) -> u64 {
    let word = facts.device;
    let (major, minor) = ((word >> 8) & 0xfff, word & 0xff | (word >> 12) & 0xf_ff00);
    makedev(major, minor)
}
