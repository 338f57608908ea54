//! Runs of pages, and the index entry that describes one.

use std::fmt;

use crate::ChunkId;
pub use crate::page::PAGE_BYTES;

/// The number of pages a space can have: 2^52 of 4 KiB are all that 64 bits address.
pub const SPACE_MAX_PAGES: u64 = 1 << 52;

/// The size of an index entry.
pub(crate) const ENTRY_BYTES: usize = 24;

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
    /// Their space.
    pub space: SpaceId,
    /// The number of the first page in its space.
    pub first_page: u64,
    /// How many; never 0.
    pub pages: u32,
    /// Place of their contents.
    pub kind: RunKind,
}

/// Place of the contents of a run's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RunKind {
    /// In a chunk, of this image or of one that it is a difference from.
    Part(Part),
    /// All bytes are zero.
    Zero,
    /// The very pages of the same numbers in another space: copy-on-write sharing.
    Same {
        /// The other space.
        space: SpaceId,
    },
}

/// Pages of a chunk, as many as the run that refers to it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Part {
    /// Which chunk.
    pub chunk: ChunkId,
    /// How many of its pages come before these.
    pub skip_pages: u32,
}

impl Run {
    /// Returns the number of the page after the last.
    pub fn end_page(&self) -> u64 {
        self.first_page.saturating_add(u64::from(self.pages))
    }

    /// Returns the pages of a chunk that these are.
    pub fn part(&self) -> Option<Part> {
        match self.kind {
            RunKind::Part(part) => Some(part),
            _ => None,
        }
    }

    /// Returns the run's size in bytes.
    pub fn len_bytes(&self) -> u64 {
        u64::from(self.pages) * PAGE_BYTES as u64
    }

    /// Returns `pages` of these pages, after `skip_pages`: a run of its own.
    ///
    /// # Panics
    /// Where there are not so many.
    #[must_use]
    pub fn cut(&self, skip_pages: u32, pages: u32) -> Self {
        assert!(
            skip_pages.saturating_add(pages) <= self.pages,
            "pages of the run"
        );
        let kind = match self.kind {
            RunKind::Part(part) => RunKind::Part(part.after(skip_pages)),
            kind => kind,
        };
        Self {
            first_page: self.first_page + u64::from(skip_pages),
            pages,
            kind,
            ..*self
        }
    }

    /// Returns the run for pages of `space` that have the contents of pages of this one, after
    /// `skip_pages` of it.
    ///
    /// # Panics
    /// Where this has no such pages.
    #[must_use]
    pub fn equal(&self, space: SpaceId, first_page: u64, pages: u32, skip_pages: u32) -> Self {
        Self {
            space,
            first_page,
            ..self.cut(skip_pages, pages)
        }
    }
}

impl Part {
    /// Returns what comes after `pages` of these.
    #[must_use]
    pub fn after(self, pages: u32) -> Self {
        Self {
            skip_pages: self.skip_pages + pages,
            ..self
        }
    }
}

/// Location of pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Location {
    /// The pages of a chunk that they are; none for pages of zeros.
    pub part: Option<Part>,
    /// How many they are.
    pub pages: u32,
}

/// A run that is about to be written; of any length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NewRun {
    /// Their space.
    pub space: SpaceId,
    /// The number of the first page in its space.
    pub first_page: u64,
    /// How many.
    pub pages: u32,
}

/// The kinds' numbers in an index entry.
mod code {
    pub const PART: u64 = 1;
    pub const ZERO: u64 = 2;
    pub const SAME: u64 = 3;
}

/// Bits of an entry's third word that hold the kind; the others hold its argument.
const CODE_BITS: u32 = 8;

/// Bits of the argument of a run that refers to a chunk that hold the pages to skip; the others
/// hold the chunk's number.
const SKIP_BITS: u32 = 16;

/// Encodes `run` as an index entry.
pub(crate) fn encode(run: &Run) -> [u8; ENTRY_BYTES] {
    let (code, argument) = match run.kind {
        RunKind::Part(part) => {
            let chunk = u64::from(part.chunk.0) << SKIP_BITS;
            (code::PART, chunk | u64::from(part.skip_pages))
        }
        RunKind::Zero => (code::ZERO, 0),
        RunKind::Same { space } => (code::SAME, u64::from(space.0)),
    };
    let mut entry = [0; ENTRY_BYTES];
    entry[0..4].copy_from_slice(&run.space.0.to_le_bytes());
    entry[4..8].copy_from_slice(&run.pages.to_le_bytes());
    entry[8..16].copy_from_slice(&run.first_page.to_le_bytes());
    entry[16..24].copy_from_slice(&(argument << CODE_BITS | code).to_le_bytes());
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
pub(crate) fn decode(entry: &[u8; ENTRY_BYTES]) -> Result<Run, &'static str> {
    let (space, first_page, pages) = decode_place(entry);
    let argument = long(entry, 16) >> CODE_BITS;
    let kind = match long(entry, 16) & ((1 << CODE_BITS) - 1) {
        code::PART => {
            let chunk = u32::try_from(argument >> SKIP_BITS);
            RunKind::Part(Part {
                chunk: ChunkId(chunk.map_err(|_| "no chunk has such a number")?),
                skip_pages: (argument & ((1 << SKIP_BITS) - 1)) as u32,
            })
        }
        code::ZERO if argument != 0 => return Err("unused bits are set"),
        code::ZERO => RunKind::Zero,
        code::SAME => {
            let space = u32::try_from(argument).map_err(|_| "no space has such a number")?;
            RunKind::Same {
                space: SpaceId(space),
            }
        }
        _ => return Err("no such kind of run"),
    };
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

    fn part() -> Part {
        Part {
            chunk: ChunkId(u32::MAX),
            skip_pages: 255,
        }
    }

    #[test]
    fn entries_have_the_documented_layout() {
        let chunk = ChunkId(0x0d0c_0b0a);
        let entry = encode(&run(RunKind::Part(Part {
            chunk,
            skip_pages: 0x0807,
        })));
        assert_eq!(entry[0..8], [1, 2, 3, 4, 0x22, 0x11, 0, 0]);
        assert_eq!(entry[8..16], [6, 5, 4, 3, 2, 1, 0, 0]);
        assert_eq!(entry[16..], [1, 7, 8, 0xa, 0xb, 0xc, 0xd, 0]);
    }

    #[test]
    fn every_kind_survives() {
        let space = SpaceId(u32::MAX);
        for kind in [
            RunKind::Part(part()),
            RunKind::Zero,
            RunKind::Same { space },
        ] {
            assert_eq!(decode(&encode(&run(kind))), Ok(run(kind)));
        }
    }

    #[test]
    fn unused_bits_are_refused() {
        for kind in [
            RunKind::Zero,
            RunKind::Same { space: SpaceId(1) },
            RunKind::Part(part()),
        ] {
            for at in 16..24 {
                let mut entry = encode(&run(kind));
                entry[at] ^= 0x80;
                let another = match kind {
                    RunKind::Same { .. } => (17..21).contains(&at),
                    RunKind::Part(_) => (17..23).contains(&at),
                    RunKind::Zero => false,
                };
                assert_eq!(decode(&entry).is_ok(), another, "{kind:?} {at}");
            }
        }
        for code in [0, 4, 255] {
            let mut entry = encode(&run(RunKind::Zero));
            entry[16] = code;
            assert_eq!(decode(&entry), Err("no such kind of run"));
        }
    }

    #[test]
    fn parts_of_runs_are_runs() {
        let whole = run(RunKind::Part(part()));
        let cut = whole.cut(5, 7);
        assert_eq!((cut.first_page, cut.pages), (whole.first_page + 5, 7));
        assert_eq!(cut.part(), Some(part().after(5)));
        let equal = whole.equal(SpaceId(9), 77, 2, 0x1120);
        assert_eq!(
            (equal.space, equal.first_page, equal.pages),
            (SpaceId(9), 77, 2)
        );
        assert_eq!(equal.part(), Some(part().after(0x1120)));
        assert_eq!(run(RunKind::Zero).cut(1, 1).kind, RunKind::Zero);
    }
}
