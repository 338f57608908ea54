//! Directories as the stream has them: entries that end with a zero, in blocks of 512 bytes.

use crate::ext4::Kind;
use crate::ext4::raw::{u16_at, u32_at};

/// No entry crosses the boundary between two of them.
const BLOCK: usize = 512;
/// Bytes before a name.
const HEADER: usize = 8;
/// restore(8) takes the length of a longer one for that of a machine with another order of words.
pub const FOLDER_MAX_BYTES: usize = 0x0fff_ffff;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirectoryEntry {
    pub inode: u32,
    /// Kind of the file, as readdir(3) numbers them.
    pub sort: u8,
    pub name: Vec<u8>,
}

/// How readdir(3) numbers a sort of file.
pub const fn number_of(kind: Kind) -> u8 {
    match kind {
        Kind::Unknown => 0,
        Kind::Fifo => 1,
        Kind::Character => 2,
        Kind::Directory => 4,
        Kind::Block => 6,
        Kind::Regular => 8,
        Kind::Link => 10,
        Kind::Socket => 12,
    }
}

/// The entries of a directory, with those for itself and its parent at the beginning.
pub fn encode(entries: &[DirectoryEntry]) -> Vec<u8> {
    let (mut bytes, mut last) = (Vec::new(), 0);
    for entry in entries {
        let len = (HEADER + entry.name.len() + 1).next_multiple_of(4);
        if bytes.len() % BLOCK + len > BLOCK {
            fill(&mut bytes, last);
        }
        last = bytes.len();
        bytes.extend(entry.inode.to_le_bytes());
        bytes.extend((len as u16).to_le_bytes());
        bytes.extend([entry.sort, entry.name.len() as u8]);
        bytes.extend(&entry.name);
        bytes.resize(last + len, 0);
    }
    fill(&mut bytes, last);
    bytes
}

/// Has the last entry reach the end of its block.
fn fill(bytes: &mut Vec<u8>, last: usize) {
    let end = bytes.len().next_multiple_of(BLOCK);
    bytes.resize(end, 0);
    let len = (end - last) as u16;
    bytes[last + 4..last + 6].copy_from_slice(&len.to_le_bytes());
}

/// A directory that was read.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct DirectoryBlock {
    /// Its entries, without those for itself and its parent.
    pub entries: Vec<DirectoryEntry>,
    /// How many have names of 255 bytes over which dump(8) has written the next ones.
    pub lost: u64,
}

/// Reads a directory.
///
/// # Errors
/// What cannot be true of it.
pub fn decode(bytes: &[u8]) -> Result<DirectoryBlock, String> {
    let mut decoded = DirectoryBlock::default();
    let mut at = 0;
    while at + HEADER <= bytes.len() {
        let (inode, len) = (u32_at(bytes, at), usize::from(u16_at(bytes, at + 4)));
        let (sort, name_len) = (bytes[at + 6], usize::from(bytes[at + 7]));
        if len < HEADER || at + len > bytes.len() || !len.is_multiple_of(4) {
            return Err(format!("an entry at byte {at} has {len} bytes"));
        }
        // dump(8) counts the room that such a name takes with eight bits.
        let is_lost = name_len == 255 && HEADER + name_len >= len;
        if inode != 0 && is_lost {
            decoded.lost += 1;
        } else if inode != 0 {
            if HEADER + name_len >= len {
                return Err(format!("at byte {at}, a name of {name_len} in {len} bytes"));
            }
            let name = &bytes[at + HEADER..at + HEADER + name_len];
            if name.is_empty() || name.iter().any(|byte| b"/\0".contains(byte)) {
                return Err(format!(
                    "at byte {at}, a name with a slash or a zero, or none"
                ));
            }
            if name != b"." && name != b".." {
                let name = name.to_vec();
                decoded.entries.push(DirectoryEntry { inode, sort, name });
            }
        }
        at += len;
    }
    Ok(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_come_back_and_cross_no_block() {
        let named = |inode, len: usize| DirectoryEntry {
            inode,
            sort: 8,
            name: vec![b'n'; len],
        };
        let dots = [(b".", 2), (b"x", 3)].map(|(name, inode)| DirectoryEntry {
            inode,
            sort: 4,
            name: name.to_vec(),
        });
        let mut all = dots.to_vec();
        all.extend((1..=255).map(|len| named(100 + len as u32, len)));
        let bytes = encode(&all);
        assert!(bytes.len().is_multiple_of(BLOCK));
        assert_eq!(decode(&bytes).unwrap().entries, all[1..]);
        let mut at = 0;
        while at < bytes.len() {
            let len = usize::from(u16_at(&bytes, at + 4));
            assert_eq!(at / BLOCK, (at + len - 1) / BLOCK, "the entry at {at}");
            at += len;
        }
    }

    #[test]
    fn nonsense_is_no_directory() {
        let named = |name: &[u8]| DirectoryEntry {
            inode: 5,
            sort: 8,
            name: name.to_vec(),
        };
        for name in [b"a/b".as_slice(), b"", b"a\0b"] {
            assert!(decode(&encode(&[named(name)])).is_err(), "{name:?}");
        }
        let whole = encode(&[named(b"name")]);
        for (at, byte) in [(5, 0), (4, 7), (5, 4), (4, 8), (7, 255)] {
            let mut bytes = whole.clone();
            bytes[at] = byte;
            assert!(decode(&bytes).is_err(), "{byte} at {at}");
        }
    }
}
