//! Headers of the stream.

use crate::ext4::raw::{u16_at, u32_at};

/// Everything in a stream is a multiple of this.
pub const RECORD_BYTES: usize = 1024;
/// How many records a header has flags for.
pub const FLAGS_MAX: usize = 512;
/// How many records dump(8) writes at a time unless it is told otherwise.
pub const BLOCK_RECORDS: u64 = 10;

const MAGIC: u32 = 60_012;
/// Sum of the words of a header.
const SUM: u32 = 84_446;
const FLAGS_AT: usize = 164;
const LABEL: usize = 16;
const NAME: usize = 64;
/// Owners have 32 bits and stand behind the inode's other fields.
const NEW_INODES: u32 = 0x2;
/// A header of a volume that was written by a dump(8) that says which its first record is.
const NEW_HEADER: u32 = 0x1;
/// The rest of the tape is compressed.
const COMPRESSED: u32 = 0x80;
/// Contents are as they were in an earlier dump.
const METADATA_ALONE: u32 = 0x100;
/// An extended attribute of the previous file follows.
const ATTRIBUTES: u32 = 0x8000;
/// They are as ext2 has them in blocks.
const AS_BLOCK: u32 = 3;

/// Kind of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordKind {
    /// The stream.
    Tape,
    /// A file.
    Inode,
    /// The map of inodes that are in the stream.
    Dumped,
    /// More of a file.
    More,
    End,
    /// The map of inodes in use.
    Used,
}

/// Sorts and their numbers.
const SORTS: [(u32, RecordKind); 6] = [
    (1, RecordKind::Tape),
    (2, RecordKind::Inode),
    (3, RecordKind::Dumped),
    (4, RecordKind::More),
    (5, RecordKind::End),
    (6, RecordKind::Used),
];

/// A point in time as the stream has it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamp {
    /// Seconds since 1970.
    pub s: i32,
    /// Microseconds of the second.
    pub us: u32,
}

/// Fields of an inode.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// Sort and permissions.
    pub mode: u16,
    /// How many names it has.
    pub links: u16,
    /// The length in bytes.
    pub size_bytes: u64,
    /// When it was last read.
    pub accessed: Stamp,
    /// When its contents were last changed.
    pub modified: Stamp,
    /// When it was last changed in any way.
    pub changed: Stamp,
    /// The number of a device, as system calls of 32 bits take it.
    pub device: u32,
    /// Flags of chattr(1).
    pub flags: u32,
    /// How much space it takes, in units of 512 bytes.
    pub sectors: u32,
    pub generation: u32,
    /// The owner.
    pub uid: u32,
    /// The group.
    pub gid: u32,
}

/// Fields that all headers of a stream repeat.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StreamLabel {
    /// Of when the dump is, in seconds since 1970.
    pub date_s: i32,
    /// Since when its files have changed; 0 where it has all.
    pub since_s: i32,
    /// The dump's level.
    pub level: u32,
    /// Label of the dump.
    pub label: Vec<u8>,
    /// Mount point of the file system.
    pub mounted_on: Vec<u8>,
    /// On which device it was.
    pub device: Vec<u8>,
    /// And on which machine.
    pub host: Vec<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    pub sort: RecordKind,
    pub inode: u32,
    /// Fields of the header.
    pub facts: Facts,
    /// How many flags there are, or records of a map.
    pub count: u32,
    /// Which records follow; the others are holes.
    pub flags: [bool; FLAGS_MAX],
    /// True if it is of the attributes of the file before.
    pub has_attributes: bool,
    /// True if what follows is compressed.
    pub is_compressed: bool,
    /// True if contents are not there, as they are those of an earlier dump.
    pub has_metadata_alone: bool,
    /// The number of the volume, from 1 on, where a stream has several.
    pub volume: u32,
}

impl Header {
    /// One without anything.
    pub const fn new(sort: RecordKind, inode: u32) -> Self {
        Self {
            sort,
            inode,
            facts: Facts {
                mode: 0,
                links: 0,
                size_bytes: 0,
                accessed: Stamp { s: 0, us: 0 },
                modified: Stamp { s: 0, us: 0 },
                changed: Stamp { s: 0, us: 0 },
                device: 0,
                flags: 0,
                sectors: 0,
                generation: 0,
                uid: 0,
                gid: 0,
            },
            count: 0,
            flags: [false; FLAGS_MAX],
            has_attributes: false,
            is_compressed: false,
            has_metadata_alone: false,
            volume: 1,
        }
    }

    /// The record, which is the stream's `number`th.
    pub fn encode(&self, about: &StreamLabel, number: u64) -> [u8; RECORD_BYTES] {
        let mut bytes = [0; RECORD_BYTES];
        let mut put = |at: usize, word: u32| bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        let sort = SORTS.iter().find(|(_, sort)| *sort == self.sort);
        put(0, sort.expect("all sorts are listed").0);
        put(4, about.date_s.cast_unsigned());
        put(8, about.since_s.cast_unsigned());
        put(12, self.volume);
        put(16, number as u32);
        put(904, (number >> 32) as u32);
        put(20, self.inode);
        put(24, MAGIC);
        put(160, self.count);
        put(692, about.level);
        let first = if self.sort == RecordKind::Tape {
            NEW_HEADER
        } else {
            0
        };
        let attributes = if self.has_attributes { ATTRIBUTES } else { 0 };
        let compressed = if self.is_compressed { COMPRESSED } else { 0 };
        let alone = if self.has_metadata_alone {
            METADATA_ALONE
        } else {
            0
        };
        put(888, NEW_INODES | first | attributes | compressed | alone);
        put(896, BLOCK_RECORDS as u32);
        put(900, if self.has_attributes { AS_BLOCK } else { 0 });
        self.facts.encode(&mut bytes[32..160]);
        for (byte, is_there) in bytes[FLAGS_AT..].iter_mut().zip(self.flags) {
            *byte = is_there.into();
        }
        // Names end with a zero.
        let mut name = |at: usize, len: usize, text: &[u8]| {
            let len = text.len().min(len - 1);
            bytes[at..at + len].copy_from_slice(&text[..len]);
        };
        name(676, LABEL, &about.label);
        name(696, NAME, &about.mounted_on);
        name(760, NAME, &about.device);
        name(824, NAME, &about.host);
        let sum = SUM.wrapping_sub(sum(&bytes));
        bytes[28..32].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Reads a record, and what it says of the stream.
    ///
    /// # Errors
    /// Why it is no header.
    pub fn decode(bytes: &[u8; RECORD_BYTES]) -> Result<(Self, StreamLabel), String> {
        match u32_at(bytes, 24) {
            MAGIC => {}
            swapped if swapped.swap_bytes() == MAGIC => {
                return Err("it is of a machine with another order of bytes".into());
            }
            other => return Err(format!("its magic number is {other}")),
        }
        if sum(bytes) != SUM {
            return Err("its checksum is wrong".into());
        }
        let number = u32_at(bytes, 0);
        let sort = SORTS.iter().find(|(own, _)| *own == number);
        let sort = sort.ok_or_else(|| format!("it is of sort {number}"))?.1;
        let flags = u32_at(bytes, 888);
        if sort == RecordKind::Tape && flags & NEW_INODES == 0 {
            return Err("its inodes are of before 1994".into());
        }
        let has_attributes = flags & ATTRIBUTES != 0;
        let kind = u32_at(bytes, 900);
        if has_attributes && kind != AS_BLOCK {
            return Err(format!("it has attributes of kind {kind}"));
        }
        let count = u32_at(bytes, 160);
        if matches!(sort, RecordKind::Inode | RecordKind::More) && count as usize > FLAGS_MAX {
            return Err(format!("it has {count} flags"));
        }
        let name = |at: usize, len: usize| {
            let name = bytes[at..at + len].split(|byte| *byte == 0).next();
            name.unwrap_or_default().to_vec()
        };
        let about = StreamLabel {
            date_s: u32_at(bytes, 4).cast_signed(),
            since_s: u32_at(bytes, 8).cast_signed(),
            level: u32_at(bytes, 692),
            label: name(676, LABEL),
            mounted_on: name(696, NAME),
            device: name(760, NAME),
            host: name(824, NAME),
        };
        let mut header = Self::new(sort, u32_at(bytes, 20));
        header.facts = Facts::decode(&bytes[32..160]);
        header.count = count;
        for (is_there, byte) in header.flags.iter_mut().zip(&bytes[FLAGS_AT..]) {
            *is_there = *byte != 0;
        }
        header.has_attributes = has_attributes;
        header.is_compressed = flags & COMPRESSED != 0;
        header.has_metadata_alone = flags & METADATA_ALONE != 0;
        header.volume = u32_at(bytes, 12);
        Ok((header, about))
    }
}

impl Facts {
    fn encode(&self, bytes: &mut [u8]) {
        bytes[0..2].copy_from_slice(&self.mode.to_le_bytes());
        bytes[2..4].copy_from_slice(&self.links.to_le_bytes());
        // Owners as they were before 1994.
        bytes[4..6].copy_from_slice(&(self.uid as u16).to_le_bytes());
        bytes[6..8].copy_from_slice(&(self.gid as u16).to_le_bytes());
        bytes[8..16].copy_from_slice(&self.size_bytes.to_le_bytes());
        let times = [self.accessed, self.modified, self.changed];
        let times = times
            .iter()
            .flat_map(|time| [time.s.cast_unsigned(), time.us]);
        let words = (16..).step_by(4).zip(times).chain([
            (40, self.device),
            (100, self.flags),
            (104, self.sectors),
            (108, self.generation),
            (112, self.uid),
            (116, self.gid),
        ]);
        for (at, word) in words {
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
        }
    }

    fn decode(bytes: &[u8]) -> Self {
        let stamp = |at| Stamp {
            s: u32_at(bytes, at).cast_signed(),
            us: u32_at(bytes, at + 4),
        };
        Self {
            mode: u16_at(bytes, 0),
            links: u16_at(bytes, 2),
            size_bytes: u64::from(u32_at(bytes, 12)) << 32 | u64::from(u32_at(bytes, 8)),
            accessed: stamp(16),
            modified: stamp(24),
            changed: stamp(32),
            device: u32_at(bytes, 40),
            flags: u32_at(bytes, 100),
            sectors: u32_at(bytes, 104),
            generation: u32_at(bytes, 108),
            uid: u32_at(bytes, 112),
            gid: u32_at(bytes, 116),
        }
    }
}

/// The sum of a record's words.
fn sum(bytes: &[u8; RECORD_BYTES]) -> u32 {
    let words = bytes.chunks_exact(4).map(|word| u32_at(word, 0));
    words.fold(0, u32::wrapping_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> (Header, StreamLabel) {
        let mut header = Header::new(RecordKind::Inode, 4711);
        let stamp = |s| Stamp { s, us: 999_999 };
        header.facts = Facts {
            mode: 0o100_644,
            links: 2,
            size_bytes: 5 << 32 | 3,
            accessed: stamp(-5),
            modified: stamp(i32::MAX),
            changed: stamp(1),
            device: 0x1234_5678,
            flags: 0x8_0010,
            sectors: 16,
            generation: 9,
            uid: 70_000,
            gid: 80_000,
        };
        header.count = 3;
        header.flags[0] = true;
        header.flags[2] = true;
        let about = StreamLabel {
            date_s: 1_795_464_311,
            since_s: 77,
            level: 3,
            label: b"a label".to_vec(),
            mounted_on: b"/srv".to_vec(),
            device: b"/dev/vdb".to_vec(),
            host: b"host".to_vec(),
        };
        (header, about)
    }

    #[test]
    fn headers_come_back() {
        let (header, about) = example();
        let bytes = header.encode(&about, 17);
        assert_eq!(Header::decode(&bytes), Ok((header, about)));
    }

    #[test]
    fn every_flipped_bit_of_a_header_is_noticed() {
        let (header, about) = example();
        let whole = header.encode(&about, 17);
        for bit in 0..RECORD_BYTES * 8 {
            let mut bytes = whole;
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(Header::decode(&bytes).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn names_are_cut() {
        let (header, mut about) = example();
        about.host = vec![b'h'; 100];
        let (_, read) = Header::decode(&header.encode(&about, 0)).unwrap();
        assert_eq!(read.host, vec![b'h'; 63]);
    }
}
