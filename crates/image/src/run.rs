//! Runs of pages, and the index entry that describes one.

use std::fmt;

use crate::parts::{self, PART_MAX_BYTES};

/// The size of a page, the unit of every run.
pub const PAGE_BYTES: usize = 4096;

/// The longest data run: 1 MiB, so that checking one never waits for much.
pub const DATA_RUN_MAX_PAGES: u32 = 256;

/// The number of pages a space can have: 2^52 of 4 KiB are all that 64 bits address.
pub const SPACE_MAX_PAGES: u64 = 1 << 52;

/// The size of an index entry.
pub(crate) const ENTRY_BYTES: usize = 32;

/// An address range of pages: one task's memory, one shared segment, one block of VM memory, one
/// volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SpaceId(pub u32);

impl fmt::Display for SpaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// Consecutive pages of a space with one fate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Run {
    /// Whose pages.
    pub space: SpaceId,
    /// The number of the first page in its space.
    pub first_page: u64,
    /// How many; never 0.
    pub pages: u32,
    /// Where their contents are.
    pub kind: RunKind,
}

/// Where the contents of a run's pages are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RunKind {
    /// In the pages object; at most [`DATA_RUN_MAX_PAGES`].
    Data {
        /// Where they start: an offset in a pages object, a multiple of [`PAGE_BYTES`], plus 2^48
        /// times the number of that object.
        offset_bytes: u64,
        /// XXH3-64 of all of them.
        checksum: u64,
    },
    /// All bytes are zero.
    Zero,
    /// The very pages of the same numbers in another space: copy-on-write sharing.
    Same {
        /// The other space.
        space: SpaceId,
    },
    /// Unchanged since the image that this one is a difference from: pages of a run that an
    /// ancestor stores.
    Parent(Part),
    /// The contents of other pages of this image: pages of a run that it stores.
    Equal(Part),
}

/// Pages of a stored run, as many as the run that refers to it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    /// The number of the stored run among the image's origins.
    pub origin: u32,
    /// How many of its pages come before these.
    pub skip_pages: u32,
}

impl Run {
    /// Returns the number of the page after the last.
    pub fn end_page(&self) -> u64 {
        self.first_page.saturating_add(u64::from(self.pages))
    }

    /// Returns where its pages are stored, as [`RunKind::Data`] says it.
    pub(crate) fn stored_at(&self) -> Option<u64> {
        match self.kind {
            RunKind::Data { offset_bytes, .. } => Some(offset_bytes),
            _ => None,
        }
    }

    /// Returns the run's size in bytes.
    pub fn len_bytes(&self) -> u64 {
        u64::from(self.pages) * PAGE_BYTES as u64
    }
}

/// Where pages really are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Located {
    /// The zero run or stored run that they are in.
    pub run: Run,
    /// How many of its pages come before them.
    pub skip_pages: u32,
    /// How many they are.
    pub pages: u32,
}

/// A run that is about to be written; of any length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewRun {
    /// Whose pages.
    pub space: SpaceId,
    /// The number of the first page in its space.
    pub first_page: u64,
    /// How many.
    pub pages: u32,
}

/// The kinds' numbers in an index entry.
mod code {
    pub const DATA: u64 = 1;
    pub const ZERO: u64 = 2;
    pub const SAME: u64 = 3;
    pub const PARENT: u64 = 4;
    pub const EQUAL: u64 = 5;
}

/// Bits of an entry's third word that hold the kind; the others hold its argument.
const CODE_BITS: u32 = 8;

/// Bits of a data run's argument that hold the page number in the pages object; the others hold the
/// object's number.
const PAGE_BITS: u32 = 44;

/// Bits of the argument of a run that refers to an origin that hold the pages to skip; the others
/// hold the origin's number.
const SKIP_BITS: u32 = 16;

fn argument_of(part: Part) -> u64 {
    u64::from(part.origin) << SKIP_BITS | u64::from(part.skip_pages)
}

fn part_of(argument: u64) -> Result<Part, &'static str> {
    let origin = argument >> SKIP_BITS;
    Ok(Part {
        origin: u32::try_from(origin).map_err(|_| "no origin has such a number")?,
        skip_pages: (argument & ((1 << SKIP_BITS) - 1)) as u32,
    })
}

/// Encodes `run` as an index entry.
pub(crate) fn encode(run: &Run) -> [u8; ENTRY_BYTES] {
    let (code, argument, checksum) = match run.kind {
        RunKind::Data {
            offset_bytes,
            checksum,
        } => {
            let (object, offset_bytes) = parts::split(offset_bytes);
            let page = offset_bytes / PAGE_BYTES as u64;
            (code::DATA, (object as u64) << PAGE_BITS | page, checksum)
        }
        RunKind::Zero => (code::ZERO, 0, 0),
        RunKind::Same { space } => (code::SAME, u64::from(space.0), 0),
        RunKind::Parent(part) => (code::PARENT, argument_of(part), 0),
        RunKind::Equal(part) => (code::EQUAL, argument_of(part), 0),
    };
    let mut entry = [0; ENTRY_BYTES];
    entry[0..4].copy_from_slice(&run.space.0.to_le_bytes());
    entry[4..8].copy_from_slice(&run.pages.to_le_bytes());
    entry[8..16].copy_from_slice(&run.first_page.to_le_bytes());
    entry[16..24].copy_from_slice(&(argument << CODE_BITS | code).to_le_bytes());
    entry[24..32].copy_from_slice(&checksum.to_le_bytes());
    entry
}

/// Decodes an index entry's place: space, first page, pages.
pub(crate) fn decode_place(entry: &[u8; ENTRY_BYTES]) -> (SpaceId, u64, u32) {
    let word = |at: usize| u32::from_le_bytes(entry[at..at + 4].try_into().expect("4 bytes"));
    (SpaceId(word(0)), long(entry, 8), word(4))
}

fn long(entry: &[u8; ENTRY_BYTES], at: usize) -> u64 {
    u64::from_le_bytes(entry[at..at + 8].try_into().expect("8 bytes"))
}

/// Decodes an index entry, taking nothing for granted but its size.
///
/// # Errors
/// What is wrong with it.
pub(crate) fn decode(entry: &[u8; ENTRY_BYTES]) -> Result<Run, &'static str> {
    let (space, first_page, pages) = decode_place(entry);
    let (code, argument) = (
        long(entry, 16) & ((1 << CODE_BITS) - 1),
        long(entry, 16) >> CODE_BITS,
    );
    let checksum = long(entry, 24);
    let kind = match code {
        code::DATA => {
            let (object, page) = (argument >> PAGE_BITS, argument & ((1 << PAGE_BITS) - 1));
            if page >= PART_MAX_BYTES / PAGE_BYTES as u64 {
                return Err("its data starts past the end of any file");
            }
            RunKind::Data {
                offset_bytes: parts::position(object as usize, page * PAGE_BYTES as u64),
                checksum,
            }
        }
        code::ZERO => RunKind::Zero,
        code::SAME => {
            let space = u32::try_from(argument).map_err(|_| "no space has such a number")?;
            RunKind::Same {
                space: SpaceId(space),
            }
        }
        code::PARENT => RunKind::Parent(part_of(argument)?),
        code::EQUAL => RunKind::Equal(part_of(argument)?),
        _ => return Err("no such kind of run"),
    };
    let takes_argument = !matches!(kind, RunKind::Zero);
    let takes_checksum = matches!(kind, RunKind::Data { .. });
    if (argument != 0 && !takes_argument) || (checksum != 0 && !takes_checksum) {
        return Err("unused bits are set");
    }
    Ok(Run {
        space,
        first_page,
        pages,
        kind,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn run(kind: RunKind) -> Run {
        Run {
            space: SpaceId(0x0403_0201),
            first_page: 0x0102_0304_0506,
            pages: 0x1122,
            kind,
        }
    }

    #[test]
    fn entries_have_the_documented_layout() {
        let kind = RunKind::Data {
            offset_bytes: 0x0abc_d000,
            checksum: 0x8877_6655_4433_2211,
        };
        let entry = encode(&run(kind));
        assert_eq!(entry[0..8], [1, 2, 3, 4, 0x22, 0x11, 0, 0]);
        assert_eq!(entry[8..16], [6, 5, 4, 3, 2, 1, 0, 0]);
        assert_eq!(entry[16..24], [1, 0xcd, 0xab, 0, 0, 0, 0, 0]);
        assert_eq!(
            entry[24..32],
            [0x11, 0x22, 0x33, 0x44, 0x55, 0x66, 0x77, 0x88]
        );
    }

    #[test]
    fn every_kind_survives() {
        let part = Part {
            origin: u32::MAX,
            skip_pages: 255,
        };
        let last = parts::position(15, PART_MAX_BYTES - PAGE_BYTES as u64);
        for kind in [
            RunKind::Data {
                offset_bytes: last,
                checksum: u64::MAX,
            },
            RunKind::Zero,
            RunKind::Same {
                space: SpaceId(u32::MAX),
            },
            RunKind::Parent(part),
            RunKind::Equal(part),
        ] {
            assert_eq!(decode(&encode(&run(kind))), Ok(run(kind)));
        }
    }

    #[test]
    fn unused_bits_are_refused() {
        let part = Part {
            origin: 1,
            skip_pages: 1,
        };
        for kind in [
            RunKind::Zero,
            RunKind::Same { space: SpaceId(1) },
            RunKind::Parent(part),
        ] {
            for at in 16..32 {
                let mut entry = encode(&run(kind));
                entry[at] ^= 0x80;
                let another = match kind {
                    RunKind::Same { .. } => (17..21).contains(&at),
                    RunKind::Parent(_) => (17..23).contains(&at),
                    _ => false,
                };
                assert_eq!(decode(&entry).is_ok(), another, "{kind:?} {at}");
            }
        }
        for code in [0, 6, 255] {
            let mut entry = encode(&run(RunKind::Zero));
            entry[16] = code;
            assert_eq!(decode(&entry), Err("no such kind of run"));
        }
    }

    #[test]
    fn offsets_past_any_file_are_refused() {
        let kind = RunKind::Data {
            offset_bytes: 0,
            checksum: 0,
        };
        let mut entry = encode(&run(kind));
        entry[17..24].fill(0xff);
        assert!(decode(&entry).is_err());
    }
}
