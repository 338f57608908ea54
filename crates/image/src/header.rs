//! The start of `manifest.img`: who it is, and where its sections are.

use xxhash_rust::xxh3::xxh3_64;

use crate::{FORMAT_VERSION, ImageId};

/// The first bytes of every manifest. The high bit and the line ends show a copy that was taken for
/// text.
const MAGIC: [u8; 8] = *b"\x89STILL\r\n";

/// The part that stays the same in every format version: magic, version, number of sections, id,
/// checksum.
pub(crate) const PRELUDE_BYTES: usize = 40;

const TABLE_ENTRY_BYTES: usize = 32;

/// The sections of this version, in the order in which they stand.
pub(crate) const SECTIONS: [&str; 5] = ["spaces", "index", "chunks", "manifest", "records"];

/// The most sections that a later writer may add to those: they are named and refused.
const SECTIONS_MAX: usize = 16;

/// The largest header's size.
pub(crate) const HEADER_MAX_BYTES: usize = header_bytes(SECTIONS_MAX);

/// The size of a header: the prelude, the section table and the table's checksum.
const fn header_bytes(sections: usize) -> usize {
    PRELUDE_BYTES + sections * TABLE_ENTRY_BYTES + 8
}

/// The largest manifest that is written or read: 32 million runs.
pub(crate) const MANIFEST_MAX_BYTES: u64 = 1 << 30;

/// A decoded header.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Header {
    pub id: ImageId,
    /// Each section's place in the file.
    pub sections: [Section; SECTIONS.len()],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Section {
    pub offset_bytes: u64,
    pub len_bytes: u64,
    pub checksum: u64,
}

/// Why bytes are not a header of this version.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// It is damaged, here and like this.
    Corrupt(u64, String),
    /// It is whole, and of another version.
    Version(u32),
    /// It is whole, and has a section that this version does not know.
    Section(String),
}

/// Encodes the header of an image of these sections.
pub(crate) fn encode(id: ImageId, sections: [&[u8]; SECTIONS.len()]) -> Vec<u8> {
    let header_bytes = header_bytes(SECTIONS.len());
    let mut bytes = Vec::with_capacity(header_bytes);
    bytes.extend(MAGIC);
    bytes.extend(FORMAT_VERSION.to_le_bytes());
    bytes.extend((SECTIONS.len() as u32).to_le_bytes());
    bytes.extend(id.0);
    bytes.extend(xxh3_64(&bytes).to_le_bytes());
    let mut offset_bytes = header_bytes as u64;
    for (name, section) in SECTIONS.iter().zip(sections) {
        bytes.extend(padded(name));
        bytes.extend(offset_bytes.to_le_bytes());
        bytes.extend((section.len() as u64).to_le_bytes());
        bytes.extend(xxh3_64(section).to_le_bytes());
        offset_bytes += section.len() as u64;
    }
    let table = xxh3_64(&bytes[PRELUDE_BYTES..]);
    bytes.extend(table.to_le_bytes());
    bytes
}

fn padded(name: &str) -> [u8; 8] {
    let mut padded = [0; 8];
    padded[..name.len()].copy_from_slice(name.as_bytes());
    padded
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn long(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

/// Decodes the header at the start of `bytes`, of a file of `file_bytes`, which its sections must
/// fill exactly.
pub(crate) fn decode(bytes: &[u8], file_bytes: u64) -> Result<Header, Refusal> {
    let corrupt = |at: usize, what: &str| Refusal::Corrupt(at as u64, what.into());
    let id = decode_prelude(bytes)?;
    let count = word(bytes, 12) as usize;
    let header_bytes = header_bytes(count);
    let Some(table) = bytes.get(PRELUDE_BYTES..header_bytes) else {
        return Err(corrupt(bytes.len(), "the section table ends early"));
    };
    let (table, checksum) = table.split_at(table.len() - 8);
    if xxh3_64(table) != long(checksum, 0) {
        return Err(corrupt(
            PRELUDE_BYTES,
            "the section table's checksum does not match",
        ));
    }
    if count != SECTIONS.len() {
        let (entries, _) = table.as_chunks::<TABLE_ENTRY_BYTES>();
        let known = |entry: &[u8; TABLE_ENTRY_BYTES]| {
            SECTIONS.iter().any(|name| entry[..8] == padded(name))
        };
        return Err(match entries.iter().find(|entry| !known(entry)) {
            Some(entry) => {
                let name = String::from_utf8_lossy(&entry[..8]);
                Refusal::Section(name.trim_end_matches('\0').to_owned())
            }
            None => corrupt(12, &format!("{count} sections")),
        });
    }
    let mut end = header_bytes as u64;
    let absent = Section {
        offset_bytes: 0,
        len_bytes: 0,
        checksum: 0,
    };
    let mut sections = [absent; SECTIONS.len()];
    let all = SECTIONS.iter().zip(&mut sections);
    for (number, (name, section)) in all.enumerate() {
        let entry = &table[number * TABLE_ENTRY_BYTES..][..TABLE_ENTRY_BYTES];
        let at = PRELUDE_BYTES + number * TABLE_ENTRY_BYTES;
        if entry[..8] != padded(name) {
            return Err(corrupt(at, &format!("this is not section {name}")));
        }
        let (offset_bytes, len_bytes) = (long(entry, 8), long(entry, 16));
        let next = offset_bytes
            .checked_add(len_bytes)
            .filter(|_| offset_bytes == end);
        end = next.ok_or_else(|| corrupt(at, &format!("section {name} is not in its place")))?;
        *section = Section {
            offset_bytes,
            len_bytes,
            checksum: long(entry, 24),
        };
    }
    if end != file_bytes {
        let what = format!("the sections end at byte {end}, the file at {file_bytes}");
        return Err(Refusal::Corrupt(end.min(file_bytes), what));
    }
    Ok(Header { id, sections })
}

/// Decodes the part of the header that all versions have in common.
fn decode_prelude(bytes: &[u8]) -> Result<ImageId, Refusal> {
    let id = decode_id(bytes)?;
    let (version, sections) = (word(bytes, 8), word(bytes, 12));
    if version != FORMAT_VERSION {
        return Err(Refusal::Version(version));
    }
    if sections == 0 || sections as usize > SECTIONS_MAX {
        return Err(Refusal::Corrupt(12, format!("{sections} sections")));
    }
    Ok(id)
}

/// Decodes the identity of an image of whatever version.
pub(crate) fn decode_id(bytes: &[u8]) -> Result<ImageId, Refusal> {
    let corrupt = |at: usize, what: &str| Refusal::Corrupt(at as u64, what.into());
    let Some(prelude) = bytes.get(..PRELUDE_BYTES) else {
        return Err(corrupt(bytes.len(), "the header ends early"));
    };
    if prelude[..8] != MAGIC {
        return Err(corrupt(0, "this is not a manifest of Stillframe"));
    }
    if xxh3_64(&prelude[..32]) != long(prelude, 32) {
        return Err(corrupt(0, "the header's checksum does not match"));
    }
    Ok(ImageId(prelude[16..32].try_into().expect("16 bytes")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: ImageId = ImageId(*b"0123456789abcdef");

    fn header() -> Vec<u8> {
        encode(ID, [b"iiii", b"", b"rr", b"", b"m"])
    }

    const HEADER_BYTES: usize = header_bytes(5);
    const FILE_BYTES: u64 = HEADER_BYTES as u64 + 7;

    /// Makes the checksums right again after a change.
    fn reseal(bytes: &mut [u8]) {
        let sum = xxh3_64(&bytes[..32]).to_le_bytes();
        bytes[32..40].copy_from_slice(&sum);
        let sum = xxh3_64(&bytes[PRELUDE_BYTES..HEADER_BYTES - 8]).to_le_bytes();
        bytes[HEADER_BYTES - 8..].copy_from_slice(&sum);
    }

    #[test]
    fn survives() {
        let header = decode(&header(), FILE_BYTES).unwrap();
        assert_eq!(header.id, ID);
        let places = header
            .sections
            .map(|section| (section.offset_bytes, section.len_bytes));
        assert_eq!(places, [(208, 4), (212, 0), (212, 2), (214, 0), (214, 1)]);
        assert_eq!(header.sections[0].checksum, xxh3_64(b"iiii"));
    }

    #[test]
    fn unknown_sections_are_named() {
        let mut bytes = header();
        bytes.truncate(HEADER_BYTES - 8);
        bytes.extend(padded("keys"));
        bytes.extend([0; 32]);
        bytes[12] = 6;
        let sum = xxh3_64(&bytes[..32]).to_le_bytes();
        bytes[32..40].copy_from_slice(&sum);
        let end = header_bytes(6) - 8;
        let sum = xxh3_64(&bytes[PRELUDE_BYTES..end]).to_le_bytes();
        bytes[end..].copy_from_slice(&sum);
        assert_eq!(
            decode(&bytes, 1 << 20),
            Err(Refusal::Section("keys".into()))
        );
    }

    #[test]
    fn another_version_is_named_where_the_header_is_whole() {
        let mut bytes = header();
        bytes[8] = 7;
        let refusal = decode(&bytes, FILE_BYTES).unwrap_err();
        assert!(matches!(refusal, Refusal::Corrupt(0, _)), "{refusal:?}");
        reseal(&mut bytes);
        assert_eq!(decode(&bytes, FILE_BYTES), Err(Refusal::Version(7)));
    }

    #[test]
    fn sections_fill_the_file() {
        for (at, value) in [
            (12, 4),               // number of sections
            (12, 6),               // the same
            (12, 17),              // the same
            (12, 0),               // the same
            (40, u64::from(b'x')), // the first's name
            (48, 0),               // its offset
            (56, 5),               // its length
            (56, u64::MAX),        // past every file
            (184, 3),              // the last's length
        ] {
            let mut bytes = header();
            bytes[at..at + 8].copy_from_slice(&u64::to_le_bytes(value));
            reseal(&mut bytes);
            let refusal = decode(&bytes, FILE_BYTES);
            assert!(
                matches!(refusal, Err(Refusal::Corrupt(..))),
                "{at} {value}: {refusal:?}"
            );
        }
        for file_bytes in [0, FILE_BYTES - 1, FILE_BYTES + 1, u64::MAX] {
            assert!(decode(&header(), file_bytes).is_err());
        }
    }
}
