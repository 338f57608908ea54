//! Chunks: the stored pieces of pages that runs point into, and their table.
//!
//! A layer's table has the place and the checksum of every chunk that it has pages of, whichever
//! image holds it. So nobody walks a chain to find a page, and reading one needs no other image's
//! manifest.

use crate::codec::Codec;
use crate::page::PAGE_BYTES;
use crate::parts;

/// The most pages of a chunk that is written: what a read of one page has to read and to verify.
/// docs/pages.md says what was measured for it.
pub const CHUNK_PAGES: u32 = 16;

/// The most pages of a chunk that is read: 1 MiB, whatever its stored bytes claim to decode to.
pub const CHUNK_MAX_PAGES: u32 = 256;

/// The size of an entry of the table.
pub(crate) const ENTRY_BYTES: usize = 48;

/// The most chunks of an image.
pub(crate) const CHUNKS_MAX: u64 = u32::MAX as u64;

/// A chunk by its number in the table of its image. Those of an image that is opened are in the
/// order in which they are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ChunkId(pub(crate) u32);

/// Place and encoding of some stored pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chunk {
    /// The number of the pages object.
    pub object: u32,
    pub stored_bytes: u32,
    pub offset_bytes: u64,
    /// The checksum of the stored bytes.
    pub checksum: u64,
    pub pages: u32,
    pub codec: Codec,
}

impl Chunk {
    /// Returns the place at which it begins; chunks are sorted by it.
    pub fn position(&self) -> u64 {
        parts::position(self.object as usize, self.offset_bytes)
    }

    pub fn end(&self) -> u64 {
        self.position() + u64::from(self.stored_bytes)
    }

    /// The size of its pages.
    pub fn len_bytes(&self) -> usize {
        self.pages as usize * PAGE_BYTES
    }

    /// Tells whether its pages are stored as they are.
    pub fn is_plain(&self) -> bool {
        self.codec == Codec::None
    }

    /// Tells whether it is in another image.
    pub fn is_inherited(&self) -> bool {
        parts::owner(self.object as usize).0.is_some()
    }
}

/// Encodes a table.
pub(crate) fn encode(chunks: &[Chunk]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(chunks.len() * ENTRY_BYTES);
    for chunk in chunks {
        let mut entry = [0; ENTRY_BYTES];
        entry[0..4].copy_from_slice(&chunk.object.to_le_bytes());
        entry[4..8].copy_from_slice(&chunk.stored_bytes.to_le_bytes());
        entry[8..16].copy_from_slice(&chunk.offset_bytes.to_le_bytes());
        entry[16..24].copy_from_slice(&chunk.checksum.to_le_bytes());
        entry[24..26].copy_from_slice(&(chunk.pages as u16).to_le_bytes());
        entry[26] = chunk.codec.number();
        bytes.extend_from_slice(&entry);
    }
    bytes
}

/// Limits of a table's references.
pub(crate) struct Bounds<'a> {
    /// The lengths of the pages objects, by number.
    pub object_bytes: &'a dyn Fn(usize) -> u64,
    /// The lengths of the image's own.
    pub own_bytes: &'a [u64],
    /// How many bytes of those belong to no chunk.
    pub unused_bytes: u64,
}

/// Why entries are no table.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// The number of the entry.
    pub entry: usize,
    pub what: String,
    /// True if it is only something that this version does not know.
    pub is_unknown: bool,
}

/// Decodes and checks a table: its chunks are sorted by place, do not overlap, and lie inside the
/// pages objects; those of the image itself fill its objects, but for as many bytes as are said to
/// be unused.
pub(crate) fn decode(bytes: &[u8], bounds: &Bounds<'_>) -> Result<Vec<Chunk>, Fault> {
    let (entries, rest) = bytes.as_chunks::<ENTRY_BYTES>();
    if !rest.is_empty() {
        return Err(fault(entries.len(), "it is cut".into()));
    }
    let mut chunks = Vec::with_capacity(entries.len());
    for (number, entry) in entries.iter().enumerate() {
        let word = |at: usize| u32::from_le_bytes(entry[at..at + 4].try_into().expect("4 bytes"));
        let long = |at: usize| u64::from_le_bytes(entry[at..at + 8].try_into().expect("8 bytes"));
        let unknown = |what: String| Fault {
            is_unknown: true,
            ..fault(number, what)
        };
        if entry[28..].iter().any(|byte| *byte != 0) {
            return Err(unknown(format!("chunks encrypted with key {}", word(28))));
        }
        let codec = Codec::of_number(entry[26]);
        let codec = codec.ok_or_else(|| unknown(format!("codec {}", entry[26])))?;
        if entry[27] != 0 {
            return Err(fault(number, "unused bits are set".into()));
        }
        chunks.push(Chunk {
            object: word(0),
            stored_bytes: word(4),
            offset_bytes: long(8),
            checksum: long(16),
            pages: u32::from(u16::from_le_bytes([entry[24], entry[25]])),
            codec,
        });
    }
    check(&chunks, bounds)?;
    Ok(chunks)
}

fn fault(entry: usize, what: String) -> Fault {
    Fault {
        entry,
        what,
        is_unknown: false,
    }
}

/// Checks what [`decode`] checks of chunks that are no bytes.
pub(crate) fn check(chunks: &[Chunk], bounds: &Bounds<'_>) -> Result<(), Fault> {
    let mut end = 0;
    for (number, chunk) in chunks.iter().enumerate() {
        check_alone(chunk, bounds).map_err(|what| fault(number, what))?;
        if chunk.position() < end {
            let what = format!("it is at byte {}, before the last ends", chunk.offset_bytes);
            return Err(fault(number, what));
        }
        end = chunk.end();
    }
    check_own(chunks, bounds)
}

fn check_alone(chunk: &Chunk, bounds: &Bounds<'_>) -> Result<(), String> {
    let Chunk {
        object,
        stored_bytes,
        offset_bytes,
        pages,
        codec,
        ..
    } = *chunk;
    if pages == 0 || pages > CHUNK_MAX_PAGES {
        return Err(format!("it has {pages} pages"));
    }
    if !codec.fits(stored_bytes, pages) {
        return Err(format!(
            "{stored_bytes} bytes stored as {codec:?} are no {pages} pages"
        ));
    }
    if chunk.is_plain() && !offset_bytes.is_multiple_of(PAGE_BYTES as u64) {
        return Err(format!("its pages begin at byte {offset_bytes}"));
    }
    let all_bytes = (bounds.object_bytes)(object as usize).min(parts::PART_MAX_BYTES);
    if offset_bytes.saturating_add(stored_bytes.into()) > all_bytes {
        let place = format!("its {stored_bytes} bytes at {offset_bytes}");
        return Err(format!(
            "{place} are not inside the {all_bytes} of a pages object"
        ));
    }
    Ok(())
}

/// Checks that the image's own chunks, which come first, leave no gaps in its objects other than
/// those that are said to be there.
fn check_own(chunks: &[Chunk], bounds: &Bounds<'_>) -> Result<(), Fault> {
    let mut unused_bytes = bounds.unused_bytes;
    let mut may_skip = |from: u64, to: u64| {
        let rest = unused_bytes.checked_sub(to.saturating_sub(from));
        unused_bytes = rest.unwrap_or(unused_bytes);
        rest.is_some()
    };
    let mut own = (0..).zip(chunks).peekable();
    for (object, &all_bytes) in (0..).zip(bounds.own_bytes) {
        let mut end_bytes = 0;
        while let Some((number, chunk)) = own.next_if(|(_, chunk)| chunk.object == object) {
            let at_bytes = chunk.offset_bytes;
            if !may_skip(end_bytes, at_bytes) {
                let what = format!("it is at byte {at_bytes} where {end_bytes} comes next");
                return Err(fault(number, what));
            }
            end_bytes = at_bytes + u64::from(chunk.stored_bytes);
        }
        if !may_skip(end_bytes, all_bytes) {
            let what = format!("chunks have {end_bytes} bytes of pages, there are {all_bytes}");
            return Err(fault(chunks.len(), what));
        }
    }
    if unused_bytes > 0 {
        let what = format!("{unused_bytes} bytes of pages fewer are unused than it says");
        return Err(fault(chunks.len(), what));
    }
    Ok(())
}

#[cfg(test)]
pub(crate) mod testing {
    use super::{Chunk, Codec, PAGE_BYTES};

    /// Pages of an object, stored as they are.
    pub fn plain(object: u32, page: u64, pages: u32) -> Chunk {
        Chunk {
            object,
            stored_bytes: pages * PAGE_BYTES as u32,
            offset_bytes: page * PAGE_BYTES as u64,
            checksum: 0x8877_6655_4433_2211,
            pages,
            codec: Codec::None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::plain;
    use super::*;

    const PAGE: u64 = PAGE_BYTES as u64;

    fn decoded(bytes: &[u8], own_pages: &[u64], unused_pages: u64) -> Result<Vec<Chunk>, Fault> {
        let own_bytes = own_pages.iter().map(|pages| pages * PAGE);
        let own_bytes = own_bytes.collect::<Vec<_>>();
        let object_bytes = |object: usize| match parts::owner(object) {
            (None, part) => own_bytes.get(part).copied().unwrap_or(0),
            (Some(0), 0) => 10 * PAGE,
            _ => 0,
        };
        let bounds = Bounds {
            object_bytes: &object_bytes,
            own_bytes: &own_bytes,
            unused_bytes: unused_pages.saturating_mul(PAGE),
        };
        decode(bytes, &bounds)
    }

    #[track_caller]
    fn refused(chunks: &[Chunk], own_pages: &[u64], entry: usize, what: &str) {
        let fault = decoded(&encode(chunks), own_pages, 0).expect_err("refused");
        assert_eq!(fault.entry, entry, "{fault:?}");
        assert!(fault.what.contains(what) && !fault.is_unknown, "{fault:?}");
    }

    #[test]
    fn entries_have_the_documented_layout() {
        let bytes = encode(&[plain(0x21, 0x0708, 3)]);
        assert_eq!(bytes[..8], [0x21, 0, 0, 0, 0, 0x30, 0, 0]);
        assert_eq!(bytes[8..16], [0, 0x80, 0x70, 0, 0, 0, 0, 0]);
        assert_eq!(bytes[16..24], 0x8877_6655_4433_2211_u64.to_le_bytes());
        assert_eq!(bytes[24..28], [3, 0, 0, 0]);
        assert_eq!(bytes[28..], [0; 20]);
    }

    #[test]
    fn claims_are_checked() {
        let good = [plain(0, 0, 4), plain(0, 4, 2), plain(16, 0, 10)];
        assert_eq!(decoded(&encode(&good), &[6], 0), Ok(good.to_vec()));
        assert!(decoded(&encode(&good)[..95], &[6], 0).is_err());
        refused(&[plain(0, 0, 0)], &[0], 0, "0 pages");
        refused(&[plain(0, 0, 257)], &[257], 0, "257 pages");
        refused(&[plain(16, 8, 3)], &[0], 0, "not inside");
        refused(&[plain(17, 0, 1)], &[0], 0, "not inside");
        refused(&[plain(16, 1 << 51, 3)], &[0], 0, "not inside");
        refused(
            &[plain(0, 0, 4), plain(0, 3, 1)],
            &[4],
            1,
            "before the last",
        );
        refused(
            &[plain(16, 0, 4), plain(0, 3, 1)],
            &[4],
            1,
            "before the last",
        );
        let mut short = plain(0, 0, 2);
        short.stored_bytes = 4097;
        refused(&[short], &[2], 0, "4097 bytes");
        let mut crooked = plain(0, 0, 1);
        crooked.offset_bytes = 1;
        refused(&[crooked], &[2], 0, "begin at byte 1");
    }

    #[test]
    fn own_chunks_fill_every_object() {
        let chunks = [plain(0, 0, 1), plain(2, 0, 2), plain(2, 2, 1)];
        assert!(decoded(&encode(&chunks), &[1, 0, 3], 0).is_ok());
        refused(&chunks, &[1, 0, 4], 3, "there are 16384");
        refused(&chunks, &[1, 1, 3], 3, "have 0 bytes");
        refused(&chunks, &[2, 0, 3], 3, "have 4096 bytes");
        refused(&chunks, &[1, 0], 1, "not inside");
        refused(&[plain(0, 1, 1)], &[2], 0, "0 comes next");
        refused(&[], &[1], 0, "have 0 bytes");
    }

    #[test]
    fn gaps_are_as_large_as_it_says() {
        let chunks = encode(&[plain(0, 1, 2), plain(0, 4, 1)]);
        let what = |unused| decoded(&chunks, &[6, 2], unused).map_err(|fault| fault.what);
        assert!(what(5).is_ok());
        assert!(what(4).unwrap_err().contains("there are 8192"));
        assert!(what(2).unwrap_err().contains("there are 24576"));
        assert!(what(0).unwrap_err().contains("0 comes next"));
        assert!(what(6).unwrap_err().contains("4096 bytes"));
        assert!(what(u64::MAX).is_err());
    }

    #[test]
    fn what_is_not_known_is_named() {
        let bytes = encode(&[plain(0, 0, 1)]);
        for (at, value, what) in [
            (26, 9, "codec 9"),
            (28, 7, "encrypted with key 7"),
            (47, 1, "encrypted"),
        ] {
            let mut bytes = bytes.clone();
            bytes[at] = value;
            let fault = decoded(&bytes, &[1], 0).expect_err("refused");
            assert!(fault.what.contains(what) && fault.is_unknown, "{fault:?}");
        }
        let mut bytes = bytes.clone();
        bytes[27] = 1;
        assert!(!decoded(&bytes, &[1], 0).expect_err("refused").is_unknown);
    }
}
