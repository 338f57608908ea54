//! Directories: entries in blocks, whether there is an index over them or not, and in the inode.

use super::checksum::crc32c;
use super::features::incompat;
use super::inode::{Inode, Kind};
use super::raw::{u16_at, u32_at};
use super::{BlockItem, FileSystem};
use crate::{Error, ReadAt, Result};

/// Bytes before a name.
const HEADER: usize = 8;
/// Bytes behind a name in encrypted directories that ignore case.
const HASH: usize = 8;
/// The last bytes of a block with checksum, which look like an entry.
const TAIL: usize = 12;
const TAIL_TYPE: u8 = 0xde;
/// In an inode, the parent's number stands before the entries.
const PARENT: usize = 4;
/// No directory is larger than the kernel makes them (`large_dir`).
const DIRECTORY_MAX_BYTES: u64 = 1 << 42;

/// An entry of a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The inode's number.
    pub inode: u32,
    /// The name, up to 255 bytes without `/` and zeros.
    pub name: Vec<u8>,
    /// The block that it stands in.
    pub block: u64,
}

impl<S: ReadAt> FileSystem<S> {
    /// Walks the entries of a directory in the order in which they stand there, without those for
    /// itself and its parent.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Read`], those of `each`.
    pub fn walk_entries(
        &self,
        inode: &Inode,
        each: &mut dyn FnMut(Entry) -> Result<()>,
    ) -> Result<()> {
        let bad = |field: &str, what: String| {
            Error::damaged(
                inode.block,
                format!("inode {}, {field}", inode.number),
                what,
            )
        };
        if inode.kind() != Kind::Directory {
            return Err(bad("mode", "it is no directory".into()));
        }
        if inode.is_inline() {
            let bytes = self.inline_data(inode)?;
            let (map, more) = bytes.split_at(bytes.len().min(super::inode::MAP_LEN));
            let map = map.get(PARENT..).unwrap_or_default();
            self.entries(inode, inode.block, map, each)?;
            return self.entries(inode, inode.block, more, each);
        }
        if inode.size_bytes() > DIRECTORY_MAX_BYTES {
            return Err(bad("length", inode.size_bytes().to_string()));
        }
        let blocks = inode.size_bytes() / u64::from(self.sb.block_bytes);
        self.walk_blocks(inode, &mut |met| {
            let BlockItem::Blocks(mapped) = met else {
                return Ok(());
            };
            for number in 0..mapped.blocks {
                if mapped.is_unwritten || mapped.logical + number >= blocks {
                    break;
                }
                let block = mapped.physical + number;
                let bytes = self.block(block)?;
                self.check_block(inode, block, &bytes)?;
                self.entries(inode, block, &bytes, each)?;
            }
            Ok(())
        })
    }

    /// Verifies a block's checksum: of entries, or of the index.
    fn check_block(&self, inode: &Inode, block: u64, bytes: &[u8]) -> Result<()> {
        if !self.sb.has_checksums() {
            return Ok(());
        }
        let seed = inode.seed(&self.sb);
        let tail = bytes.len() - TAIL;
        let is_tail = bytes[tail..tail + 4] == [0; 4]
            && u16_at(bytes, tail + 4) as usize == TAIL
            && bytes[tail + 7] == TAIL_TYPE;
        // What the kernel makes an index of keeps the tail that it had when it was full of entries.
        let is_right = check_index(seed, bytes)
            .unwrap_or_else(|| is_tail && crc32c(seed, &bytes[..tail]) == u32_at(bytes, tail + 8));
        match is_right {
            true => Ok(()),
            false => {
                let field = format!("inode {}, directory block", inode.number);
                Err(Error::damaged(block, field, "its checksum is wrong"))
            }
        }
    }

    fn entries(
        &self,
        inode: &Inode,
        block: u64,
        bytes: &[u8],
        each: &mut dyn FnMut(Entry) -> Result<()>,
    ) -> Result<()> {
        let hash = if inode.has_hashes() { HASH } else { 0 };
        let mut rest = bytes;
        while rest.len() >= HEADER {
            let at = bytes.len() - rest.len();
            let bad = |what: String| {
                let field = format!("inode {}, entry at byte {at}", inode.number);
                Error::damaged(block, field, what)
            };
            let number = u32_at(rest, 0);
            let len = self.entry_len(u16_at(rest, 4));
            let name_len = match self.sb.incompat & incompat::FILETYPE {
                0 => usize::from(u16_at(rest, 6)),
                _ => usize::from(rest[6]),
            };
            if len < HEADER + 4 && len != rest.len() || len > rest.len() || !len.is_multiple_of(4) {
                return Err(bad(format!("it has {len} of {} bytes", rest.len())));
            }
            let is_named = number != 0 && name_len > 0;
            if is_named && (name_len > 255 || HEADER + name_len > len) {
                return Err(bad(format!("a name of {name_len} in {len} bytes")));
            }
            if is_named {
                let name = &rest[HEADER..HEADER + name_len];
                debug_assert!(hash == 0 || len >= HEADER + name_len);
                if name != b"." && name != b".." {
                    if !inode.is_encrypted() && name.iter().any(|byte| b"/\0".contains(byte)) {
                        return Err(bad("its name has a slash or a zero".into()));
                    }
                    each(Entry {
                        inode: number,
                        name: name.to_vec(),
                        block,
                    })?;
                }
            }
            rest = &rest[len..];
        }
        Ok(())
    }

    /// The length of an entry: of blocks of 64 KiB, all of it does not fit into 16 bits.
    fn entry_len(&self, stored: u16) -> usize {
        let block_bytes = self.sb.block_bytes as usize;
        match stored {
            0 | u16::MAX if block_bytes > usize::from(u16::MAX) => block_bytes,
            other => other.into(),
        }
    }
}

/// Verifies the checksum of a block of the index; none where it is not one.
fn check_index(seed: u32, bytes: &[u8]) -> Option<bool> {
    let len = u16_at(bytes, 4) as usize;
    let entries = if len == bytes.len() || bytes.len() > usize::from(u16::MAX) && len != 12 {
        8
    } else if len == 12 && usize::from(u16_at(bytes, 16)) + 12 >= bytes.len().min(65_535) {
        // The root: entries for itself and its parent, and 8 bytes about the index.
        32
    } else {
        return None;
    };
    let limit = u16_at(bytes, entries) as usize;
    let count = u16_at(bytes, entries + 2) as usize;
    let tail = entries + limit * 8;
    if count > limit || tail + 8 > bytes.len() {
        return None;
    }
    let sum = crc32c(seed, &bytes[..entries + count * 8]);
    let sum = crc32c(sum, &bytes[tail..tail + 4]);
    Some(crc32c(sum, &[0; 4]) == u32_at(bytes, tail + 4))
}
