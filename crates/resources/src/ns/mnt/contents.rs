//! The files of a file system in memory.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;

use rustix::fs::{
    AtFlags, Dir, FileType, Gid, Mode, OFlags, SeekFrom, Stat, Timespec, Timestamps, Uid,
    XattrFlags,
};
use rustix::io::Errno;
use sys::procfs;

/// More bytes than these are not kept.
pub(super) const BYTES_MAX: u64 = 64 << 20;

/// A file.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Node {
    /// The number of its directory; the root's is its own.
    #[prost(uint32, tag = "1")]
    parent: u32,
    /// Its name there.
    #[prost(bytes = "vec", tag = "2")]
    name: Vec<u8>,
    /// The number of the file that it is another name of.
    #[prost(uint32, optional, tag = "3")]
    link_to: Option<u32>,
    /// Its type and permissions.
    #[prost(uint32, tag = "4")]
    mode: u32,
    /// Its owner.
    #[prost(uint32, tag = "5")]
    uid: u32,
    /// Its group.
    #[prost(uint32, tag = "6")]
    gid: u32,
    /// The device that it stands for.
    #[prost(uint64, tag = "7")]
    device: u64,
    /// When it was read last, in seconds and nanoseconds.
    #[prost(sint64, tag = "8")]
    accessed_s: i64,
    #[prost(uint32, tag = "9")]
    accessed_ns: u32,
    /// When it was changed last.
    #[prost(sint64, tag = "10")]
    modified_s: i64,
    #[prost(uint32, tag = "11")]
    modified_ns: u32,
    /// Its size in bytes.
    #[prost(uint64, tag = "12")]
    size_bytes: u64,
    /// Its contents without holes; the target of a symbolic link.
    #[prost(message, repeated, tag = "13")]
    extents: Vec<Extent>,
    /// Its extended attributes.
    #[prost(message, repeated, tag = "14")]
    attributes: Vec<Attribute>,
}

/// A part of a file's contents.
#[derive(Clone, PartialEq, prost::Message)]
struct Extent {
    #[prost(uint64, tag = "1")]
    offset_bytes: u64,
    #[prost(bytes = "vec", tag = "2")]
    bytes: Vec<u8>,
}

/// An extended attribute.
#[derive(Clone, PartialEq, prost::Message)]
struct Attribute {
    #[prost(bytes = "vec", tag = "1")]
    name: Vec<u8>,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

/// Reads all files of the mount `root`; `None` where they are too large.
pub(super) fn read(root: OwnedFd) -> rustix::io::Result<Option<Vec<Node>>> {
    let mut walk = Walk {
        nodes: Vec::new(),
        known: HashMap::new(),
        left_bytes: BYTES_MAX,
    };
    walk.add(0, b"", root)?;
    // Directories are read in turn, so that a deep tree needs no deep stack.
    let mut next = 0;
    while next < walk.nodes.len() {
        let (Some(folder), false) = (walk.nodes[next].1.take(), walk.left_bytes == 0) else {
            next += 1;
            continue;
        };
        walk.read_folder(next, &folder)?;
        next += 1;
    }
    let is_whole = walk.left_bytes > 0;
    let nodes = walk.nodes.into_iter().map(|(node, _)| node);
    Ok(is_whole.then(|| nodes.collect()))
}

struct Walk {
    /// The files, and those of them that are directories to be read.
    nodes: Vec<(Node, Option<OwnedFd>)>,
    /// The numbers of files that have several names, by their inodes.
    known: HashMap<u64, u32>,
    left_bytes: u64,
}

impl Walk {
    fn read_folder(&mut self, number: usize, folder: &OwnedFd) -> rustix::io::Result<()> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOATIME | OFlags::CLOEXEC;
        let open = rustix::fs::openat(folder, ".", flags, Mode::empty())?;
        for entry in Dir::read_from(&open)? {
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
            let file = rustix::fs::openat(&open, name, flags, Mode::empty())?;
            self.add(number, name.to_bytes(), file)?;
        }
        Ok(())
    }

    fn add(&mut self, parent: usize, name: &[u8], file: OwnedFd) -> rustix::io::Result<()> {
        let number = u32::try_from(self.nodes.len()).map_err(|_| Errno::FBIG)?;
        let stat = rustix::fs::fstat(&file)?;
        let kind = FileType::from_raw_mode(stat.st_mode);
        let mut node = Node {
            parent: u32::try_from(parent).map_err(|_| Errno::FBIG)?,
            name: name.to_vec(),
            ..Node::of(&stat)
        };
        let is_folder = kind == FileType::Directory;
        if stat.st_nlink > 1 && !is_folder {
            node.link_to = self.known.get(&stat.st_ino).copied();
            self.known.entry(stat.st_ino).or_insert(number);
        }
        if node.link_to.is_none() {
            node.attributes = attributes(&file)?;
            match kind {
                FileType::RegularFile => node.extents = self.contents(&file, &stat)?,
                FileType::Symlink => {
                    let target = rustix::fs::readlinkat(&file, "", Vec::new())?;
                    node.extents = vec![Extent {
                        offset_bytes: 0,
                        bytes: target.into_bytes(),
                    }];
                }
                _ => {}
            }
        }
        self.left_bytes = self.left_bytes.saturating_sub(256 + name.len() as u64);
        self.nodes.push((node, is_folder.then_some(file)));
        Ok(())
    }

    fn contents(&mut self, file: &OwnedFd, stat: &Stat) -> rustix::io::Result<Vec<Extent>> {
        let stored_bytes = stat.st_blocks.cast_unsigned() * 512;
        let stored_bytes = stored_bytes.min(stat.st_size.cast_unsigned());
        self.left_bytes = self.left_bytes.saturating_sub(stored_bytes);
        if self.left_bytes == 0 {
            return Ok(Vec::new());
        }
        let flags = OFlags::RDONLY | OFlags::NOATIME | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let open = rustix::fs::open(procfs::link(file), flags, Mode::empty())?;
        let open = File::from(open);
        let mut extents = Vec::new();
        let mut at = 0;
        while let Some(begin) = seek(&open, SeekFrom::Data(at))? {
            let end = seek(&open, SeekFrom::Hole(begin))?.unwrap_or(begin);
            let mut bytes = vec![0; usize::try_from(end - begin).map_err(|_| Errno::FBIG)?];
            let read = open.read_exact_at(&mut bytes, begin);
            read.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
            extents.push(Extent {
                offset_bytes: begin,
                bytes,
            });
            at = end;
        }
        Ok(extents)
    }
}

fn seek(file: &File, to: SeekFrom) -> rustix::io::Result<Option<u64>> {
    match rustix::fs::seek(file, to) {
        Ok(at) => Ok(Some(at)),
        Err(Errno::NXIO) => Ok(None),
        Err(errno) => Err(errno),
    }
}

fn attributes(file: &OwnedFd) -> rustix::io::Result<Vec<Attribute>> {
    let path = procfs::link(file);
    let mut names = [0; 65_536];
    let length = match rustix::fs::listxattr(&path, &mut names) {
        Err(Errno::NOTSUP) => 0,
        length => length?,
    };
    let names = names[..length].split(|byte| *byte == 0);
    let names = names.filter(|name| !name.is_empty());
    let read = |name: &[u8]| {
        let mut value = vec![0; 65_536];
        let length = rustix::fs::getxattr(&path, name, &mut value)?;
        value.truncate(length);
        Ok(Attribute {
            name: name.to_vec(),
            value,
        })
    };
    names.map(read).collect()
}

/// Tells whether these are files that a file system may have.
pub(super) fn are_sound(nodes: &[Node]) -> bool {
    let is_sound = |(number, node): (usize, &Node)| {
        let parent = nodes.get(node.parent as usize);
        let is_below = (node.parent as usize) < number && parent.is_some_and(Node::is_folder);
        let first = node.link_to.map(|first| nodes.get(first as usize));
        let is_name = |name: &[u8]| {
            !name.is_empty() && name != b"." && name != b".." && !name.contains(&b'/')
        };
        let is_link = |first: Option<&Node>| {
            first.is_some_and(|first| first.link_to.is_none() && !first.is_folder())
                && node.link_to.is_some_and(|first| (first as usize) < number)
        };
        let is_within = |extent: &Extent| {
            let end = extent.offset_bytes.checked_add(extent.bytes.len() as u64);
            end.is_some_and(|end| end <= node.size_bytes)
        };
        let is_placed = match number {
            0 => node.parent == 0 && node.is_folder(),
            _ => is_below && is_name(&node.name) && !node.name.contains(&0),
        };
        is_placed && first.is_none_or(is_link) && node.extents.iter().all(is_within)
    };
    nodes.iter().enumerate().all(is_sound)
}

/// Makes the files on the mount `root`, which has none.
pub(super) fn fill(nodes: &[Node], root: BorrowedFd<'_>) -> rustix::io::Result<()> {
    let mut made: Vec<OwnedFd> = Vec::with_capacity(nodes.len());
    for (number, node) in nodes.iter().enumerate() {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        if number == 0 {
            made.push(rustix::fs::openat(root, ".", flags, Mode::empty())?);
            continue;
        }
        let folder = &made[node.parent as usize];
        let name = OsStr::from_bytes(&node.name);
        match node.link_to {
            Some(first) => {
                let first = procfs::link(&made[first as usize]);
                let follow = AtFlags::SYMLINK_FOLLOW;
                rustix::fs::linkat(rustix::fs::CWD, first, folder, name, follow)?;
            }
            None => node.make(folder, name)?,
        }
        made.push(rustix::fs::openat(folder, name, flags, Mode::empty())?);
    }
    // Times of directories are what they were once all is in them.
    for (node, file) in nodes.iter().zip(&made).rev() {
        if node.link_to.is_none() {
            node.give_all(file)?;
        }
    }
    Ok(())
}

impl Node {
    fn of(stat: &Stat) -> Self {
        let nanoseconds = |ns| u32::try_from(ns).unwrap_or(0);
        let kind = FileType::from_raw_mode(stat.st_mode);
        let has_size = matches!(kind, FileType::RegularFile | FileType::Symlink);
        Self {
            mode: stat.st_mode,
            uid: stat.st_uid,
            gid: stat.st_gid,
            device: stat.st_rdev,
            accessed_s: stat.st_atime,
            accessed_ns: nanoseconds(stat.st_atime_nsec),
            modified_s: stat.st_mtime,
            modified_ns: nanoseconds(stat.st_mtime_nsec),
            size_bytes: if has_size {
                stat.st_size.cast_unsigned()
            } else {
                0
            },
            ..Self::default()
        }
    }

    fn kind(&self) -> FileType {
        FileType::from_raw_mode(self.mode)
    }

    fn is_folder(&self) -> bool {
        self.kind() == FileType::Directory
    }

    fn make(&self, folder: &OwnedFd, name: &OsStr) -> rustix::io::Result<()> {
        let mode = Mode::RWXU;
        match self.kind() {
            FileType::Directory => rustix::fs::mkdirat(folder, name, mode),
            FileType::Symlink => {
                let target = self.extents.first();
                let target = target.map_or(&[][..], |extent| &extent.bytes);
                rustix::fs::symlinkat(target, folder, name)
            }
            FileType::RegularFile => {
                let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
                let file = File::from(rustix::fs::openat(folder, name, flags, mode)?);
                rustix::fs::ftruncate(&file, self.size_bytes)?;
                let write = |extent: &Extent| file.write_all_at(&extent.bytes, extent.offset_bytes);
                let written = self.extents.iter().try_for_each(write);
                written.map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))
            }
            kind => rustix::fs::mknodat(folder, name, kind, mode, self.device),
        }
    }

    /// Gives a file its owner, permissions, attributes and times.
    fn give_all(&self, file: &OwnedFd) -> rustix::io::Result<()> {
        let own = AtFlags::EMPTY_PATH;
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        rustix::fs::chownat(file, "", Some(uid), Some(gid), own)?;
        let path = procfs::link(file);
        if self.kind() != FileType::Symlink {
            rustix::fs::chmod(&path, Mode::from_raw_mode(self.mode & 0o7777))?;
        }
        for attribute in &self.attributes {
            let (name, value) = (&attribute.name[..], &attribute.value);
            rustix::fs::setxattr(&path, name, value, XattrFlags::empty())?;
        }
        let times = Timestamps {
            last_access: Timespec {
                tv_sec: self.accessed_s,
                tv_nsec: self.accessed_ns.into(),
            },
            last_modification: Timespec {
                tv_sec: self.modified_s,
                tv_nsec: self.modified_ns.into(),
            },
        };
        rustix::fs::utimensat(file.as_fd(), "", &times, own)
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use rustix::mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsmount, fsopen,
    };

    use super::*;

    fn tmpfs() -> OwnedFd {
        let context = fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).expect("tmpfs");
        fsconfig_create(&context).expect("it is made");
        let attributes = MountAttrFlags::empty();
        fsmount(&context, FsMountFlags::FSMOUNT_CLOEXEC, attributes).expect("a mount")
    }

    fn node(parent: u32, name: &str, mode: u32) -> Node {
        Node {
            parent,
            name: name.into(),
            mode,
            uid: 12,
            gid: 34,
            accessed_s: -5,
            accessed_ns: 6,
            modified_s: 7,
            modified_ns: 8,
            ..Node::default()
        }
    }

    fn extent(offset_bytes: u64, bytes: &[u8]) -> Extent {
        Extent {
            offset_bytes,
            bytes: bytes.to_vec(),
        }
    }

    /// Files of each kind.
    fn files() -> Vec<Node> {
        let attribute = Attribute {
            name: b"trusted.x".to_vec(),
            value: b"y".to_vec(),
        };
        vec![
            node(0, "", 0o40_751),
            node(0, "folder", 0o42_700),
            Node {
                size_bytes: 1 << 20,
                extents: vec![extent(0, &[1; 4096]), extent(512 << 10, &[2; 8192])],
                attributes: vec![attribute],
                ..node(1, "sparse", 0o104_750)
            },
            Node {
                size_bytes: 3,
                extents: vec![extent(0, b"a/b")],
                ..node(1, "link", 0o120_777)
            },
            node(1, "pipe", 0o10_600),
            Node {
                device: 0x103,
                ..node(0, "null", 0o20_666)
            },
            Node {
                link_to: Some(2),
                size_bytes: 1 << 20,
                ..node(0, "other name", 0o104_750)
            },
        ]
    }

    #[test]
    fn files_are_read_as_they_were_filled_in() {
        testkit::needs_root!();
        let mount = tmpfs();
        let wanted = files();
        fill(&wanted, mount.as_fd()).expect("they are made");
        let mut seen = read(mount).expect("they are read").expect("they are small");
        assert!(are_sound(&seen));
        let path = |nodes: &[Node], node: &Node| {
            let folder = &nodes[node.parent as usize].name;
            [&folder[..], b"/", &node.name].concat()
        };
        // The order of a directory is the file system's, and so is which name is the first.
        let by_path = |nodes: &[Node]| {
            let mut all = nodes.to_vec();
            all.sort_by_key(|node| path(nodes, node));
            all
        };
        for node in &mut seen {
            if node.name == b"other name" || node.name == b"sparse" {
                assert_eq!((node.size_bytes, node.mode), (1 << 20, 0o104_750));
            }
        }
        let (seen, wanted) = (by_path(&seen), by_path(&wanted));
        assert_eq!(seen.len(), wanted.len());
        let facts = |node: &Node| {
            let times = (
                node.accessed_s,
                node.accessed_ns,
                node.modified_s,
                node.modified_ns,
            );
            (
                node.name.clone(),
                node.mode,
                node.uid,
                node.gid,
                node.device,
                times,
                node.size_bytes,
            )
        };
        for (seen, wanted) in seen.iter().zip(&wanted) {
            assert_eq!(facts(seen), facts(wanted));
        }
        let whole = |nodes: &[Node]| {
            let first = nodes
                .iter()
                .find(|node| node.mode == 0o104_750 && node.link_to.is_none());
            let first = first.expect("one of the names");
            (first.extents.clone(), first.attributes.clone())
        };
        assert_eq!(whole(&seen), whole(&wanted));
        assert_eq!(seen.iter().filter(|node| node.link_to.is_some()).count(), 1);
    }

    #[test]
    fn files_that_none_has_are_not_sound() {
        assert!(are_sound(&[]) && are_sound(&files()));
        let forged = |change: &dyn Fn(&mut Vec<Node>)| {
            let mut all = files();
            change(&mut all);
            assert!(!are_sound(&all), "{all:?}");
        };
        forged(&|all| all[0].mode = 0o100_644);
        forged(&|all| all[0].parent = 1);
        forged(&|all| all[1].parent = 1);
        forged(&|all| all[3].parent = 2);
        forged(&|all| all[1].name = b"..".to_vec());
        forged(&|all| all[1].name = b"a/b".to_vec());
        forged(&|all| all[1].name = b"a\0b".to_vec());
        forged(&|all| all[1].name = Vec::new());
        forged(&|all| all[6].link_to = Some(6));
        forged(&|all| all[6].link_to = Some(1));
        forged(&|all| all[2].size_bytes = 100);
        forged(&|all| all[2].extents[0].offset_bytes = u64::MAX);
    }
}
