//! Extended attributes in the stream: blocks as ext2 has them, each a file behind the file that it
//! belongs to.

use crate::ext4::raw::{u16_at, u32_at};
use crate::ext4::{Attribute, StoredAttribute, seen};

/// What begins a block, and what dump(8) makes of what it finds in an inode.
const MAGIC: u32 = 0xea02_0000;
const MAGIC_OF_INODE: u32 = 0xea02_0001;
/// Bytes before the entries of each.
const BLOCK_HEADER: usize = 32;
const INODE_HEADER: usize = 4;
const ENTRY: usize = 16;
/// Contents that stand in an inode are among its attributes.
const INLINE: (u8, &[u8]) = (7, b"data");
/// restore(8) takes no longer blocks: it goes astray in the files after them.
pub const BLOCK_MAX_BYTES: usize = 1 << 12;
/// The longest that dump(8) writes: a block of a file system.
pub const BLOCK_OF_DUMP_MAX_BYTES: usize = 1 << 16;
/// The beginnings of names that restore(8) knows, by number.
const KNOWN: [u8; 5] = [1, 2, 3, 4, 6];

/// Attributes as blocks of the stream, and those that none can have, each with the reason.
pub struct AttributeBlocks {
    pub blocks: Vec<Vec<u8>>,
    /// Attributes that restore(8) would not take.
    pub left_out: Vec<(StoredAttribute, &'static str)>,
}

/// Makes blocks of attributes: one, or as many as it takes.
pub fn encode(attributes: Vec<StoredAttribute>) -> AttributeBlocks {
    let mut encoded = AttributeBlocks {
        blocks: Vec::new(),
        left_out: Vec::new(),
    };
    let (mut together, mut bytes) = (Vec::new(), BLOCK_HEADER + 4);
    for one in attributes {
        let len = entry_len(&one) + one.value.len().next_multiple_of(4);
        if !KNOWN.contains(&one.index) {
            let what = "restore(8) does not know the beginning of its name";
            encoded.left_out.push((one, what));
            continue;
        }
        if BLOCK_HEADER + 4 + len > BLOCK_MAX_BYTES {
            encoded
                .left_out
                .push((one, "it is longer than restore(8) takes"));
            continue;
        }
        if bytes + len > BLOCK_MAX_BYTES {
            encoded.blocks.push(block(&together));
            (together, bytes) = (Vec::new(), BLOCK_HEADER + 4);
        }
        bytes += len;
        together.push(one);
    }
    if !together.is_empty() {
        encoded.blocks.push(block(&together));
    }
    encoded
}

fn entry_len(one: &StoredAttribute) -> usize {
    (ENTRY + one.name.len()).next_multiple_of(4)
}

/// One block, with the entries at its beginning and the values behind them.
fn block(attributes: &[StoredAttribute]) -> Vec<u8> {
    let entries = attributes.iter().map(entry_len).sum::<usize>();
    let mut bytes = vec![0; BLOCK_HEADER];
    bytes[0..4].copy_from_slice(&MAGIC.to_le_bytes());
    // One file has it, in one block.
    bytes[4] = 1;
    bytes[8] = 1;
    let mut value_at = BLOCK_HEADER + entries + 4;
    for one in attributes {
        let start = bytes.len();
        bytes.extend([one.name.len() as u8, one.index]);
        bytes.extend((value_at as u16).to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend((one.value.len() as u32).to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(&one.name);
        bytes.resize(start + entry_len(one), 0);
        value_at += one.value.len().next_multiple_of(4);
    }
    bytes.resize(bytes.len() + 4, 0);
    for one in attributes {
        bytes.extend(&one.value);
        bytes.resize(bytes.len().next_multiple_of(4), 0);
    }
    bytes
}

/// A block that was read.
#[derive(Debug, Default)]
pub struct AttributeBlock {
    pub attributes: Vec<Attribute>,
    /// Attributes that are not there, and why.
    pub left_out: Vec<String>,
    /// True if contents of the file stood in its inode.
    pub is_inline: bool,
}

/// Reads a block.
///
/// # Errors
/// What cannot be true of it.
pub fn decode(bytes: &[u8]) -> Result<AttributeBlock, String> {
    let magic = bytes.get(..4).map_or(0, |magic| u32_at(magic, 0));
    // Values in an inode are counted from behind the magic number.
    let (mut at, base) = match magic {
        MAGIC => (BLOCK_HEADER, 0),
        MAGIC_OF_INODE => (INODE_HEADER, INODE_HEADER),
        other => return Err(format!("attributes with magic number {other:#x}")),
    };
    let mut decoded = AttributeBlock::default();
    while bytes.get(at..at + 4).is_some_and(|word| word != [0; 4]) {
        let cut = || format!("an attribute at byte {at} is cut");
        let entry = bytes.get(at..at + ENTRY).ok_or_else(cut)?;
        let (name_len, index) = (usize::from(entry[0]), entry[1]);
        let name = bytes.get(at + ENTRY..at + ENTRY + name_len);
        let name = name.ok_or_else(cut)?.to_vec();
        let (place, len) = (usize::from(u16_at(entry, 2)), u32_at(entry, 8) as usize);
        let printed = String::from_utf8_lossy(&name).into_owned();
        let mut leave_out = |what: &str| decoded.left_out.push(what.to_owned());
        if (index, &*name) == INLINE {
            decoded.is_inline = true;
        } else if u32_at(entry, 4) != 0 {
            leave_out(&format!(
                "attribute {printed}: dump(8) has lost its value (ea_inode)"
            ));
        } else {
            let value = bytes.get(base + place..base + place.saturating_add(len));
            let value = value.ok_or_else(cut)?.to_vec();
            match seen(StoredAttribute { index, name, value }) {
                Ok(attribute) => decoded.attributes.push(attribute),
                Err(what) => leave_out(&format!("attribute {printed}: {what}")),
            }
        }
        at += (ENTRY + name_len).next_multiple_of(4);
    }
    Ok(decoded)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stored(index: u8, name: &str, value: Vec<u8>) -> StoredAttribute {
        StoredAttribute {
            index,
            name: name.into(),
            value,
        }
    }

    #[test]
    fn attributes_come_back_in_as_many_blocks_as_it_takes() {
        let all = vec![
            stored(1, "empty", Vec::new()),
            stored(6, "capability", vec![1; 20]),
            stored(4, &"n".repeat(255), vec![2; 2001]),
            stored(1, "another", vec![3; 3000]),
            stored(1, "too long", vec![4; 4041]),
            stored(7, "richacl?", vec![5; 5]),
            stored(1, "longest", vec![6; 4036]),
        ];
        let encoded = encode(all.clone());
        let sizes = encoded.blocks.iter().map(Vec::len).collect::<Vec<_>>();
        assert_eq!(sizes.len(), 3, "{sizes:?}");
        assert!(sizes.iter().all(|len| *len <= BLOCK_MAX_BYTES), "{sizes:?}");
        let read = encoded
            .blocks
            .iter()
            .flat_map(|block| decode(block).unwrap().attributes);
        let read = read.collect::<Vec<_>>();
        let kept = [0, 1, 2, 3, 6].map(|at| seen(all[at].clone()).unwrap());
        assert_eq!(read, kept);
        let left = encoded.left_out.iter().map(|one| one.0.value[0]);
        assert_eq!(left.collect::<Vec<_>>(), [4, 5]);
    }

    #[test]
    fn damage_of_a_block_is_an_error_or_another_value() {
        let all = vec![stored(1, "a", vec![7; 9]), stored(6, "b", vec![8; 100])];
        let whole = &encode(all).blocks[0];
        for at in 0..whole.len() {
            for bit in 0..8 {
                let mut bytes = whole.clone();
                bytes[at] ^= 1 << bit;
                let _ = decode(&bytes);
            }
            let _ = decode(&whole[..at]);
        }
    }
}
