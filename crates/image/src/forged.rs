//! Images whose checksums are right and whose contents are anything: with each codec.

use std::sync::Arc;

use store::conformance::{get, put};
use store::{Memory, Store};

use crate::chunk;
use crate::codec::Codec;
use crate::forge::Sections;
use crate::page::PAGE_BYTES;
use crate::raw::CHUNKS;
use crate::{
    CHUNK_MAX_PAGES, Compression, MANIFEST_NAME, NewRun, Reader, Record, Run, RunKind, Seal,
    SpaceId, Writer, checksum,
};

/// Mutated images for each codec.
const IMAGES: u64 = 7000;

struct Chance(u64);

impl Chance {
    fn below(&mut self, end: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % end.max(1)
    }
}

/// An image with every kind of run, and with chunks that are encoded and others that are not.
fn image(compression: Option<Compression>) -> Arc<Memory> {
    let store = Arc::new(Memory::default());
    let mut writer = Writer::create(store.clone()).unwrap();
    writer.compress(compression);
    let mut chance = Chance(1);
    let page = |number: usize| {
        let noise = (16..32).contains(&number);
        let byte = |at: usize| match noise {
            true => chance.below(256) as u8,
            false => (at / 64 * number) as u8 | 1,
        };
        (0..PAGE_BYTES).map(byte).collect::<Vec<_>>()
    };
    let bytes = (0..40).flat_map(page).collect::<Vec<_>>();
    let run = |first_page, pages| NewRun {
        space: SpaceId(1),
        first_page,
        pages,
    };
    let stored = writer.store(0, &bytes, &[run(0, 39), run(64, 1)]).unwrap();
    writer.describe(stored.iter().copied());
    writer.describe([stored[1].equal(SpaceId(2), 5, 3, 2)]);
    for (first_page, kind) in [
        (100, RunKind::Zero),
        (0, RunKind::Same { space: SpaceId(1) }),
    ] {
        writer.mark(Run {
            space: SpaceId(if first_page == 0 { 3 } else { 1 }),
            first_page,
            pages: 9,
            kind,
        });
    }
    writer.record(Record {
        tag: 1,
        version: 1,
        id: 0,
        payload: b"payload".into(),
    });
    writer.seal(Seal::default()).unwrap();
    store
}

/// Puts an image with changed bytes in the place of `whole`, with right checksums.
fn forge(whole: &Memory, chance: &mut Chance) -> Memory {
    let mut sections = Sections::read(whole).unwrap();
    let names = whole.list().unwrap();
    let names = names.iter().filter(|name| name.starts_with("pages"));
    let mut pages = names
        .map(|name| (name.clone(), get(whole, name)))
        .collect::<Vec<_>>();
    for _ in 0..=chance.below(3) {
        let value = chance.below(256) as u8;
        let at = chance.below(8);
        let bytes = match sections.bytes.get_mut(at) {
            Some(section) => section,
            None => {
                let object = chance.below(pages.len());
                &mut pages[object].1
            }
        };
        let at = chance.below(bytes.len());
        if let Some(byte) = bytes.get_mut(at) {
            *byte = value;
        }
    }
    // Of what is stored where the table says so, which may be nowhere now.
    let entries = sections.bytes[CHUNKS].chunks_exact_mut(chunk::ENTRY_BYTES);
    for entry in entries {
        let number = |at: usize, len: usize| {
            let bytes = entry[at..at + len].iter().rev();
            bytes.fold(0, |all, byte| all << 8 | usize::from(*byte))
        };
        let name = sections.id.pages_part_name(number(0, 4) % 16);
        let (start, len) = (number(8, 8), number(4, 4));
        let object = pages.iter().find(|(known, _)| *known == name);
        let stored = object.and_then(|(_, bytes)| bytes.get(start..start.checked_add(len)?));
        if let Some(stored) = stored {
            let sum = checksum::of_many(0)(stored);
            entry[16..24].copy_from_slice(&sum.to_le_bytes());
        }
    }
    let forged = Memory::default();
    put(&forged, MANIFEST_NAME, &sections.manifest());
    pages
        .iter()
        .for_each(|(name, bytes)| put(&forged, name, bytes));
    forged
}

/// Reads all that an image claims to have.
fn read(store: &Memory) -> bool {
    let Ok(reader) = Reader::open(store) else {
        return false;
    };
    let mut is_right = reader.verify_all(1).is_ok();
    for chunk in reader.chunks() {
        assert!(chunk.pages <= CHUNK_MAX_PAGES, "{chunk:?}");
    }
    for space in reader.spaces() {
        for run in reader.runs(space.id) {
            assert!(run.end_page() <= space.len_pages, "{run:?}");
            for page in [run.first_page, run.end_page() - 1] {
                let located = reader.locate(space.id, page, 1).expect("it is described");
                if let Some(part) = located.part {
                    assert!(part.skip_pages < reader.chunk_pages(part.chunk));
                }
                let read = reader.read_pages(space.id, page, &mut [0; PAGE_BYTES]);
                is_right &= read.is_ok();
            }
        }
    }
    is_right
}

#[test]
fn mutated_images_are_read_or_refused() {
    for compression in [None, Some(Compression::Lz4), Some(Compression::Zstd(3))] {
        let whole = image(compression);
        assert!(read(&whole));
        let has = |codec: Codec| {
            let reader = Reader::open(&*whole).unwrap();
            reader.chunks().iter().any(|chunk| chunk.codec == codec)
        };
        assert!(has(Codec::None));
        assert_eq!(has(Codec::Lz4), compression == Some(Compression::Lz4));
        assert_eq!(has(Codec::Zstd), compression == Some(Compression::Zstd(3)));
        let mut chance = Chance(7);
        let right = (0..IMAGES)
            .filter(|_| read(&forge(&whole, &mut chance)))
            .count();
        assert!((1..IMAGES as usize).contains(&right), "{right}");
    }
}

#[test]
fn every_flipped_byte_of_encoded_pages_is_named() {
    for compression in [Compression::Lz4, Compression::Zstd(3)] {
        let store = image(Some(compression));
        let names = store.list().unwrap();
        let names = names.iter().filter(|name| name.starts_with("pages"));
        let names = names.collect::<Vec<_>>();
        assert_eq!(
            names.len(),
            2,
            "one for chunks as they are, one for the others"
        );
        for name in names {
            let mut bytes = get(&*store, name);
            // All of a small object, and one in some of a larger one.
            let step = bytes.len().div_ceil(3000);
            for at in (0..bytes.len()).step_by(step) {
                bytes[at] ^= 0x10;
                put(&*store, name, &bytes);
                match Reader::open(&*store).unwrap().verify_all(1) {
                    Err(crate::Error::Corrupt { file, space, .. }) => {
                        assert_eq!((&file, space), (name, Some(SpaceId(1))));
                    }
                    other => panic!("byte {at}: {other:?}"),
                }
                bytes[at] ^= 0x10;
            }
            put(&*store, name, &bytes);
        }
        assert!(read(&store));
    }
}
