//! Files out of an image into a directory, with all that they are.
//!
//! What an image says is a claim: names are taken as single names in a directory that is open, no
//! symbolic link is followed, nothing that is there is replaced.

use std::collections::{HashMap, HashSet};
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, FileType, Mode, OFlags, ResolveFlags, linkat, makedev, mkdirat, mknodat, openat,
    openat2, symlinkat,
};
use rustix::io::Errno;

use crate::ext4::{FileSystem, Inode, Kind};
use crate::files::{Files, contents};
use crate::metadata::Metadata;
use crate::read_at::ImageSpace;
use crate::{Error, Result};

/// Summary of an extraction.
#[derive(Debug, Default)]
pub struct ExtractSummary {
    /// Files, directories, links and so on.
    pub files: u64,
    /// Bytes that were written to files.
    pub bytes: u64,
    /// Files that were not extracted, and why.
    pub left_out: Vec<Omission>,
}

/// Something that could not be extracted.
#[derive(Debug)]
pub struct Omission {
    /// Of which file.
    pub path: PathBuf,
    /// What, and why.
    pub what: String,
}

/// One extraction.
struct Extract<'a> {
    fs: &'a FileSystem<ImageSpace>,
    root: OwnedFd,
    into: &'a Path,
    is_privileged: bool,
    /// Directories that were met: none has two names.
    folders: HashSet<u32>,
    /// Files with several names, and the first of them.
    linked: HashMap<u32, PathBuf>,
    done: ExtractSummary,
}

/// Where something goes: a name in a directory that is open, and its path from the root.
#[derive(Clone, Copy)]
struct Place<'a> {
    folder: BorrowedFd<'a>,
    name: &'a OsStr,
    path: &'a Path,
}

/// Extracts files by their paths, directories with all that is in them, into the directory `into`,
/// which is made where it is missing; directories on the way to a file are made as they are.
///
/// # Errors
/// [`Error::NoFile`], [`Error::Damaged`], [`Error::Image`]; [`Error::File`] where something cannot
/// be made, as when it is there. What was extracted before stays.
pub fn extract(files: &Files, paths: &[Vec<u8>], into: &Path) -> Result<ExtractSummary> {
    // All of them are looked for before anything is made.
    for path in paths {
        files.find(path)?;
    }
    std::fs::create_dir_all(into).map_err(Error::file("make", into))?;
    let root = openat(
        CWD,
        into,
        OFlags::DIRECTORY | OFlags::CLOEXEC,
        Mode::empty(),
    );
    let mut extract = Extract {
        fs: files.fs(),
        root: root.map_err(Error::file("open", into))?,
        into,
        is_privileged: rustix::process::geteuid().is_root(),
        folders: HashSet::new(),
        linked: HashMap::new(),
        done: ExtractSummary::default(),
    };
    for path in paths {
        extract.one(files, path)?;
    }
    Ok(extract.done)
}

impl Extract<'_> {
    fn failed<E: Into<std::io::Error>>(
        &self,
        action: &'static str,
        path: &Path,
    ) -> impl FnOnce(E) -> Error {
        Error::file(action, self.into.join(path))
    }

    fn leave_out(&mut self, path: &Path, what: impl Into<String>) {
        self.done.left_out.push(Omission {
            path: path.to_owned(),
            what: what.into(),
        });
    }

    /// Extracts what one path names, with the directories that lead to it.
    fn one(&mut self, files: &Files, path: &[u8]) -> Result<()> {
        let words = path.split(|byte| *byte == b'/');
        let words = words.filter(|word| !word.is_empty() && *word != b".");
        let words = words.map(OsStr::from_bytes).collect::<Vec<_>>();
        let Some((name, above)) = words.split_last() else {
            let inode = files.find(b"/")?;
            let root = self
                .root
                .try_clone()
                .map_err(self.failed("open", Path::new("")))?;
            self.inside(&inode, root.as_fd(), Path::new(""))?;
            return self.attributes_of_root(&inode);
        };
        let mut folder = self
            .root
            .try_clone()
            .map_err(self.failed("open", Path::new("")))?;
        let (mut at, mut made) = (PathBuf::new(), Vec::new());
        for word in above {
            at.push(word);
            let place = Place {
                folder: folder.as_fd(),
                name: word,
                path: &at,
            };
            let is_new = match mkdirat(&folder, *word, Mode::RWXU) {
                Ok(()) => true,
                // An earlier path has led through it.
                Err(Errno::EXIST) => false,
                Err(error) => return Err(self.failed("make", &at)(error)),
            };
            let inside = self.open_folder(place)?;
            let parent = std::mem::replace(&mut folder, inside);
            if is_new {
                made.push((parent, *word, at.clone()));
            }
        }
        at.push(name);
        let inode = files.find(path)?;
        let place = Place {
            folder: folder.as_fd(),
            name,
            path: &at,
        };
        self.entry(place, &inode)?;
        // What was put into them has changed their times.
        for (parent, name, path) in made.iter().rev() {
            let inode = files.find(path.as_os_str().as_bytes())?;
            let place = Place {
                folder: parent.as_fd(),
                name,
                path,
            };
            self.attributes(place, &inode)?;
        }
        Ok(())
    }

    fn attributes_of_root(&mut self, inode: &Inode) -> Result<()> {
        let into = self.into;
        let root = self.root.try_clone().map_err(self.failed("open", into))?;
        let place = Place {
            folder: root.as_fd(),
            name: OsStr::new("."),
            path: Path::new(""),
        };
        self.attributes(place, inode)
    }

    fn open_folder(&self, place: Place<'_>) -> Result<OwnedFd> {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = openat(place.folder, place.name, flags, Mode::empty());
        opened.map_err(self.failed("open", place.path))
    }

    /// Extracts one file of any sort.
    fn entry(&mut self, place: Place<'_>, inode: &Inode) -> Result<()> {
        let Place { folder, name, path } = place;
        if inode.is_encrypted() {
            self.leave_out(path, "it is encrypted, and the key is not in the image");
            return Ok(());
        }
        let is_folder = inode.kind() == Kind::Directory;
        if !is_folder && inode.links() > 1 {
            if let Some(first) = self.linked.get(&inode.number).cloned() {
                self.done.files += 1;
                return self.link(&first, place);
            }
            self.linked.insert(inode.number, path.to_owned());
        }
        match inode.kind() {
            Kind::Directory => {
                let made = mkdirat(folder, name, Mode::RWXU);
                made.map_err(self.failed("make", path))?;
                let inside = self.open_folder(place)?;
                self.inside(inode, inside.as_fd(), path)?;
            }
            Kind::Regular => self.regular(place, inode)?,
            Kind::Link => {
                let target = self.fs.link_target(inode)?;
                let made = symlinkat(OsStr::from_bytes(&target), folder, name);
                made.map_err(self.failed("make", path))?;
            }
            Kind::Fifo | Kind::Socket | Kind::Character | Kind::Block => {
                if !self.node(place, inode)? {
                    return Ok(());
                }
            }
            Kind::Unknown => {
                let field = format!("inode {}, mode", inode.number);
                let what = format!("{:#o} is of no sort", inode.mode());
                return Err(Error::damaged(inode.block, field, what));
            }
        }
        self.done.files += 1;
        self.attributes(place, inode)
    }

    /// Extracts all entries of a directory.
    fn inside(&mut self, inode: &Inode, folder: BorrowedFd<'_>, path: &Path) -> Result<()> {
        if !self.folders.insert(inode.number) {
            let field = format!("inode {}", inode.number);
            return Err(Error::damaged(
                inode.block,
                field,
                "a directory with two names",
            ));
        }
        let mut entries = Vec::new();
        self.fs.walk_entries(inode, &mut |entry| {
            entries.push(entry);
            Ok(())
        })?;
        for entry in entries {
            let name = OsStr::from_bytes(&entry.name);
            let inode = self.fs.inode(entry.inode, entry.block)?;
            let path = path.join(name);
            let place = Place {
                folder,
                name,
                path: &path,
            };
            self.entry(place, &inode)?;
        }
        Ok(())
    }

    /// Makes another name of a file that was extracted.
    fn link(&self, first: &Path, place: Place<'_>) -> Result<()> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
        let above = first.parent().filter(|above| *above != Path::new(""));
        let above = above.unwrap_or(Path::new("."));
        let above = openat2(&self.root, above, flags, Mode::empty(), resolve);
        let above = above.map_err(self.failed("open", first))?;
        let name = first.file_name().expect("a file has a name");
        let linked = linkat(&above, name, place.folder, place.name, AtFlags::empty());
        linked.map_err(self.failed("make", place.path))
    }

    /// Makes a file, with holes where it has none of its bytes.
    fn regular(&mut self, place: Place<'_>, inode: &Inode) -> Result<()> {
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::RUSR | Mode::WUSR;
        let made = openat(place.folder, place.name, flags, mode);
        let file = File::from(made.map_err(self.failed("make", place.path))?);
        let path = self.into.join(place.path);
        let mut bytes_written = 0;
        contents(self.fs, inode, &mut |at, bytes| {
            bytes_written += bytes.len() as u64;
            let written = file.write_all_at(bytes, at);
            written.map_err(Error::file("write to", &path))
        })?;
        self.done.bytes += bytes_written;
        let sized = file.set_len(inode.size_bytes());
        sized.map_err(Error::file("set the length of", path))
    }

    /// Makes a device, a pipe or a socket; tells whether it is there.
    fn node(&mut self, place: Place<'_>, inode: &Inode) -> Result<bool> {
        let (kind, is_device) = match inode.kind() {
            Kind::Fifo => (FileType::Fifo, false),
            Kind::Socket => (FileType::Socket, false),
            Kind::Character => (FileType::CharacterDevice, true),
            _ => (FileType::BlockDevice, true),
        };
        if is_device && !self.is_privileged {
            self.leave_out(place.path, "only root makes devices");
            return Ok(false);
        }
        let device = match is_device {
            true => makedev(inode.device().0, inode.device().1),
            false => 0,
        };
        let mode = Mode::RUSR | Mode::WUSR;
        let made = mknodat(place.folder, place.name, kind, mode, device);
        made.map_err(self.failed("make", place.path))?;
        Ok(true)
    }

    /// Gives a file its metadata.
    fn attributes(&mut self, place: Place<'_>, inode: &Inode) -> Result<()> {
        let Place { folder, name, path } = place;
        let metadata = Metadata::of(inode, self.fs.attributes(inode)?);
        let whole = self.into.join(path);
        let left_out = metadata.give(folder, name, &whole, self.is_privileged)?;
        for what in left_out {
            self.leave_out(path, what);
        }
        Ok(())
    }
}
