//! Extended attributes: in the inode, in a block of their own, or each in an inode.

use super::FileSystem;
use super::checksum::crc32c;
use super::inode::{Inode, MAP_LEN};
use super::raw::{u16_at, u32_at};
use crate::{Error, ReadAt, Result};

const MAGIC: u32 = 0xea02_0000;
/// Bytes before the entries of a block.
const BLOCK_HEADER: usize = 32;
/// Offset of a block's checksum.
const SUM_AT: usize = 0x10;
const ENTRY: usize = 16;
/// The longest value that the kernel makes, with `ea_inode`.
const VALUE_MAX_BYTES: u32 = 1 << 24;
/// How much all attributes of an inode may have here.
const ALL_MAX_BYTES: usize = 1 << 26;
/// Prefixes of names, by number.
const PREFIXES: [(u8, &str); 7] = [
    (1, "user."),
    (2, "system.posix_acl_access"),
    (3, "system.posix_acl_default"),
    (4, "trusted."),
    (6, "security."),
    (7, "system."),
    (8, "system.richacl"),
];
/// The policy of an encrypted file or directory, which the kernel keeps for itself.
const ENCRYPTION: u8 = 9;
/// Contents of a file that do not fit among the words of its map.
const INLINE: (u8, &[u8]) = (7, b"data");

/// An extended attribute.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attribute {
    /// The whole name, as `getxattr` takes it.
    pub name: Vec<u8>,
    /// The value, as `getxattr` gives it.
    pub value: Vec<u8>,
}

/// One as it is stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoredAttribute {
    /// Prefix of its name, by number.
    pub index: u8,
    /// The rest of its name.
    pub name: Vec<u8>,
    pub value: Vec<u8>,
}

/// An attribute as programs see it.
///
/// # Errors
/// Why it cannot be one.
pub fn seen(stored: StoredAttribute) -> Result<Attribute, &'static str> {
    let prefix = PREFIXES.iter().find(|prefix| prefix.0 == stored.index);
    let (index, prefix) = *prefix.ok_or("the beginning of its name is not known")?;
    let mut name = prefix.as_bytes().to_vec();
    name.extend_from_slice(&stored.name);
    let value = match index {
        2 | 3 => from_stored_acl(&stored.value).ok_or("it is no access control list")?,
        _ => stored.value,
    };
    Ok(Attribute { name, value })
}

impl<S: ReadAt> FileSystem<S> {
    /// The extended attributes of an inode that programs see.
    ///
    /// # Errors
    /// [`Error::Damaged`], [`Error::Read`].
    pub fn attributes(&self, inode: &Inode) -> Result<Vec<Attribute>> {
        let all = self.stored_attributes(inode)?.into_iter();
        all.map(|one| {
            let field = format!("inode {}, attribute of sort {}", inode.number, one.index);
            seen(one).map_err(|what| Error::damaged(inode.block, field, what))
        })
        .collect()
    }

    /// The same as they are stored.
    pub(crate) fn stored_attributes(&self, inode: &Inode) -> Result<Vec<StoredAttribute>> {
        let mut all = self.stored(inode, |_| true)?;
        all.retain(|one| one.index != ENCRYPTION && (one.index, &*one.name) != INLINE);
        Ok(all)
    }

    /// The contents of a file or directory that stand in its inode, as many as it has bytes.
    pub(crate) fn inline_data(&self, inode: &Inode) -> Result<Vec<u8>> {
        let mut data = inode.map().to_vec();
        for one in self.stored(inode, |one| one == INLINE)? {
            data.extend_from_slice(&one.value);
        }
        let size = inode.size_bytes();
        if size > data.len() as u64 {
            let field = format!("inode {}, length", inode.number);
            let what = format!("{size} bytes, of which the inode has {}", data.len());
            return Err(Error::damaged(inode.block, field, what));
        }
        data.truncate(size as usize);
        Ok(data)
    }

    /// Those that are wanted, by number and name.
    fn stored(
        &self,
        inode: &Inode,
        want: impl Fn((u8, &[u8])) -> bool,
    ) -> Result<Vec<StoredAttribute>> {
        let mut all = Vec::new();
        let own = inode.attribute_bytes();
        if own.len() >= 4 && u32_at(own, 0) == MAGIC {
            self.entries_of(inode, inode.block, &own[4..], 0, &want, &mut all)?;
        }
        let block = inode.attribute_block();
        if block == 0 {
            return Ok(all);
        }
        let bytes = self.attribute_block(inode, block)?;
        self.entries_of(inode, block, &bytes, BLOCK_HEADER, &want, &mut all)?;
        Ok(all)
    }

    /// Reads and checks the block with attributes of an inode.
    pub(crate) fn attribute_block(&self, inode: &Inode, block: u64) -> Result<Vec<u8>> {
        let bad = |from, what: String| {
            Error::damaged(
                from,
                format!("inode {}, block of attributes", inode.number),
                what,
            )
        };
        if block <= self.sb.first_data_block || block >= self.sb.blocks {
            return Err(bad(inode.block, format!("it is block {block}")));
        }
        let bytes = self.block(block)?;
        if u32_at(&bytes, 0) != MAGIC {
            return Err(bad(block, "it has no magic number".into()));
        }
        if self.sb.has_checksums() {
            let sum = crc32c(self.sb.seed, &block.to_le_bytes());
            let sum = crc32c(crc32c(sum, &bytes[..SUM_AT]), &[0; 4]);
            let sum = crc32c(sum, &bytes[SUM_AT + 4..]);
            if sum != u32_at(&bytes, SUM_AT) {
                return Err(bad(block, "its checksum is wrong".into()));
            }
        }
        Ok(bytes)
    }

    /// Reads the entries of `bytes` from `first` on, whose values are counted from its beginning.
    fn entries_of(
        &self,
        inode: &Inode,
        block: u64,
        bytes: &[u8],
        first: usize,
        want: &impl Fn((u8, &[u8])) -> bool,
        all: &mut Vec<StoredAttribute>,
    ) -> Result<()> {
        let bad = |what: String| {
            Error::damaged(block, format!("inode {}, attribute", inode.number), what)
        };
        let mut at = first;
        while at + 4 <= bytes.len() && u32_at(bytes, at) != 0 {
            let entry = bytes.get(at..at + ENTRY);
            let entry = entry.ok_or_else(|| bad("it is cut".into()))?;
            let name_len = usize::from(entry[0]);
            let name = bytes.get(at + ENTRY..at + ENTRY + name_len);
            let name = name.ok_or_else(|| bad("its name is cut".into()))?;
            at += (ENTRY + name_len).next_multiple_of(4);
            if !want((entry[1], name)) {
                continue;
            }
            let (place, inode_of) = (usize::from(u16_at(entry, 2)), u32_at(entry, 4));
            let len = u32_at(entry, 8);
            if len > VALUE_MAX_BYTES {
                return Err(bad(format!("a value of {len} bytes")));
            }
            let value = if inode_of != 0 {
                self.value_of(inode_of, block, len)?
            } else {
                let value = bytes.get(place..place.saturating_add(len as usize));
                value
                    .ok_or_else(|| bad(format!("a value of {len} bytes at {place}")))?
                    .to_vec()
            };
            all.push(StoredAttribute {
                index: entry[1],
                name: name.to_vec(),
                value,
            });
            if all.iter().map(|one| one.value.len()).sum::<usize>() > ALL_MAX_BYTES {
                return Err(bad(format!("more than {ALL_MAX_BYTES} bytes of them")));
            }
        }
        Ok(())
    }

    /// The value that is the contents of an inode.
    fn value_of(&self, number: u32, from: u64, len: u32) -> Result<Vec<u8>> {
        let inode = self.inode(number, from)?;
        let field = || format!("inode {number}, value of an attribute");
        // Or it would be read again for what stands in its inode, and so on.
        if inode.is_inline() || inode.size_bytes() != u64::from(len) {
            let what = format!("{} bytes instead of {len}", inode.size_bytes());
            return Err(Error::damaged(from, field(), what));
        }
        let mut value = vec![0; len as usize];
        self.read_file(&inode, 0, &mut value)?;
        Ok(value)
    }
}

/// An access control list as programs see it.
fn from_stored_acl(stored: &[u8]) -> Option<Vec<u8>> {
    /// The list is of this version when it is stored, and of the next one for programs.
    const VERSION: u32 = 1;
    const USER: u16 = 0x2;
    const GROUP: u16 = 0x8;
    let mut rest = stored.get(4..).filter(|_| u32_at(stored, 0) == VERSION)?;
    let mut acl = (VERSION + 1).to_le_bytes().to_vec();
    while rest.len() >= 4 {
        let tag = u16_at(rest, 0);
        let is_long = tag == USER || tag == GROUP;
        let (entry, after) = rest.split_at_checked(if is_long { 8 } else { 4 })?;
        acl.extend_from_slice(&entry[..4]);
        match is_long {
            true => acl.extend_from_slice(&entry[4..]),
            false => acl.extend_from_slice(&u32::MAX.to_le_bytes()),
        }
        rest = after;
    }
    rest.is_empty().then_some(acl)
}

const _: () = assert!(MAP_LEN == 60, "what does not fit there is an attribute");
