//! Files out of an image, without a device and without the kernel.

use std::io::Write;

use store::Images;

use crate::ext4::{BlockItem, FileSystem, Inode, Kind, ROOT};
use crate::place;
use crate::read_at::ImageSpace;
use crate::{Error, ReadAt, Result};

/// How much of a file is copied at a time.
const PIECE_BYTES: usize = 1 << 20;

/// The file system in an image.
pub struct Files {
    fs: FileSystem<ImageSpace>,
}

/// An entry of a directory, or a file.
#[derive(Clone, Debug)]
pub struct FileEntry {
    /// Its name.
    pub name: Vec<u8>,
    /// Its kind.
    pub inode: Inode,
    /// Target of a symbolic link.
    pub target: Option<Vec<u8>>,
}

impl Files {
    /// Opens the image in `images`.
    ///
    /// # Errors
    /// [`Error::Unfit`] where it is none of a volume, [`Error::Image`], [`Error::Damaged`].
    pub fn open(images: &Images) -> Result<Self> {
        let fs = place::OpenImage::open(images)?.file_system()?;
        Ok(Self { fs })
    }

    /// Lists a directory, by name, or tells of a file.
    ///
    /// # Errors
    /// [`Error::NoFile`], [`Error::Damaged`], [`Error::Image`].
    pub fn list(&self, path: &[u8]) -> Result<Vec<FileEntry>> {
        let inode = self.find(path)?;
        if inode.kind() != Kind::Directory {
            let name = path.rsplit(|byte| *byte == b'/').next();
            return Ok(vec![self.listed(name.unwrap_or_default().to_vec(), inode)?]);
        }
        let mut entries = Vec::new();
        self.fs.walk_entries(&inode, &mut |entry| {
            entries.push(entry);
            Ok(())
        })?;
        entries.sort_by(|one, other| one.name.cmp(&other.name));
        let listed = entries.into_iter().map(|entry| {
            let inode = self.fs.inode(entry.inode, entry.block)?;
            self.listed(entry.name, inode)
        });
        listed.collect()
    }

    fn listed(&self, name: Vec<u8>, inode: Inode) -> Result<FileEntry> {
        let is_link = inode.kind() == Kind::Link && !inode.is_encrypted();
        let target = is_link.then(|| self.fs.link_target(&inode)).transpose()?;
        Ok(FileEntry {
            name,
            inode,
            target,
        })
    }

    /// Writes the contents of a file; gives how many bytes they are.
    ///
    /// # Errors
    /// [`Error::NoFile`], also for what is no regular file; [`Error::Damaged`], [`Error::Image`];
    /// [`Error::File`] where it cannot be written.
    pub fn copy(&self, path: &[u8], to: &mut dyn Write) -> Result<u64> {
        let inode = self.find(path)?;
        let no_file = |what| Error::NoFile {
            path: String::from_utf8_lossy(path).into_owned(),
            what,
        };
        if inode.kind() != Kind::Regular {
            return Err(no_file("it is no regular file"));
        }
        if inode.is_encrypted() {
            return Err(no_file("it is encrypted"));
        }
        let mut put = |bytes: &[u8]| {
            let written = to.write_all(bytes);
            written.map_err(Error::file("write to", "the standard output"))
        };
        let size = inode.size_bytes();
        let mut at = 0;
        contents(&self.fs, &inode, &mut |start, bytes| {
            zeros(start - at, &mut put)?;
            at = start + bytes.len() as u64;
            put(bytes)
        })?;
        zeros(size - at, &mut put)?;
        Ok(size)
    }

    pub(crate) const fn fs(&self) -> &FileSystem<ImageSpace> {
        &self.fs
    }

    /// Finds the file with a path from the root; symbolic links are not followed.
    pub(crate) fn find(&self, path: &[u8]) -> Result<Inode> {
        let no_file = |what| Error::NoFile {
            path: String::from_utf8_lossy(path).into_owned(),
            what,
        };
        let mut inode = self.fs.inode(ROOT, 0)?;
        let words = path.split(|byte| *byte == b'/');
        for name in words.filter(|name| !name.is_empty() && *name != b".") {
            match inode.kind() {
                Kind::Directory => {}
                Kind::Link => return Err(no_file("the way leads through a symbolic link")),
                _ => return Err(no_file("the way leads through what is no directory")),
            }
            let mut found = None;
            self.fs.walk_entries(&inode, &mut |entry| {
                if entry.name == name {
                    found = Some((entry.inode, entry.block));
                }
                Ok(())
            })?;
            let (number, block) = found.ok_or_else(|| no_file("there is no such file"))?;
            inode = self.fs.inode(number, block)?;
        }
        Ok(inode)
    }
}

/// Gives the bytes of a file, in ascending order and with their offsets, without those of holes and
/// of what was never written.
///
/// # Errors
/// [`Error::Damaged`], [`Error::Image`]; those of `each`.
pub(crate) fn contents<S: ReadAt>(
    fs: &FileSystem<S>,
    inode: &Inode,
    each: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
) -> Result<()> {
    if inode.is_inline() {
        return each(0, &fs.inline_data(inode)?);
    }
    let size = inode.size_bytes();
    let block_bytes = u64::from(fs.superblock().block_bytes);
    let mut buffer = vec![0; PIECE_BYTES];
    fs.walk_blocks(inode, &mut |met| {
        let BlockItem::Blocks(mapped) = met else {
            return Ok(());
        };
        let mut at = mapped.logical * block_bytes;
        let end = (at + mapped.blocks * block_bytes).min(size);
        let mut from = mapped.physical * block_bytes;
        while at < end && !mapped.is_unwritten {
            let len = (end - at).min(PIECE_BYTES as u64) as usize;
            fs.source().read_at(from, &mut buffer[..len])?;
            each(at, &buffer[..len])?;
            at += len as u64;
            from += len as u64;
        }
        Ok(())
    })
}

fn zeros(len: u64, put: &mut dyn FnMut(&[u8]) -> Result<()>) -> Result<()> {
    static ZEROS: [u8; 65_536] = [0; 65_536];
    let mut left = len;
    while left > 0 {
        let part = left.min(ZEROS.len() as u64);
        put(&ZEROS[..part as usize])?;
        left -= part;
    }
    Ok(())
}
