//! Every flipped bit pattern and every truncation of an image is noticed, and named.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;

use image::{
    Error, Facts, ImageId, MANIFEST_NAME, NewRun, PAGE_BYTES, Reader, Record, Run, RunKind, Seal,
    SpaceId, Writer,
};
use store::conformance::{get, put};
use store::{Memory, Store};

/// Writes an image with every kind of run, in which each page differs from the others.
fn write(store: Arc<dyn Store>) -> ImageId {
    let writer = Writer::create(store).unwrap();
    let (one, two) = (SpaceId(1), SpaceId(9));
    let bytes: Vec<u8> = (0..3 * PAGE_BYTES)
        .map(|at| (at / 16 + at % 7) as u8)
        .collect();
    let run = |space, first_page, pages| NewRun {
        space,
        first_page,
        pages,
    };
    writer
        .append(&bytes, &[run(one, 0x400, 2), run(two, 0x7fff, 1)])
        .unwrap();
    writer.mark(Run {
        space: one,
        first_page: 0x402,
        pages: 9,
        kind: RunKind::Zero,
    });
    writer.mark(Run {
        space: two,
        first_page: 0x400,
        pages: 11,
        kind: RunKind::Same { space: one },
    });
    writer.record(Record {
        tag: 1,
        version: 1,
        id: 0,
        payload: b"a payload".into(),
    });
    writer.record(Record {
        tag: 300,
        version: 2,
        id: 70_000,
        payload: vec![],
    });
    let facts = Facts {
        kernel_release: "6.18".into(),
        stillframe_version: "0.1.0".into(),
        created_ns: 1_700_000_000_000_000_000,
        arch: "x86_64".into(),
    };
    writer
        .seal(Seal {
            durable: false,
            facts,
        })
        .unwrap()
}

/// Reads all there is to read.
fn read_all(store: &dyn Store) -> Result<(), Error> {
    Reader::open(store)?.verify_all(1)
}

/// Puts `damaged` in the place of `name`; returns what reading everything then says.
fn error_of(store: &dyn Store, name: &str, damaged: &[u8]) -> Error {
    put(store, name, damaged);
    read_all(store).expect_err("damage must be noticed")
}

#[test]
fn every_flipped_byte_of_the_manifest_is_named() {
    let store = Arc::new(Memory::default());
    write(store.clone());
    let whole = get(&*store, MANIFEST_NAME);
    for at in 0..whole.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] ^= flip;
            match error_of(&*store, MANIFEST_NAME, &bytes) {
                Error::Corrupt {
                    file, offset_bytes, ..
                } => {
                    assert_eq!(file, MANIFEST_NAME);
                    assert!(offset_bytes <= at as u64, "byte {at}: named {offset_bytes}");
                }
                error => panic!("byte {at} ^ {flip:#x}: {error}"),
            }
        }
    }
    put(&*store, MANIFEST_NAME, &whole);
    read_all(&*store).unwrap();
}

#[test]
fn every_flipped_byte_of_the_pages_is_named_with_space_and_run() {
    let store = Arc::new(Memory::default());
    let name = write(store.clone()).pages_name();
    let mut bytes = get(&*store, &name);
    for at in 0..bytes.len() {
        bytes[at] ^= 0x10;
        let error = error_of(&*store, &name, &bytes);
        let message = error.to_string();
        let Error::Corrupt {
            file,
            space,
            offset_bytes,
            ..
        } = error
        else {
            panic!("byte {at}: {message}")
        };
        let (run, of) = if at < 2 * PAGE_BYTES {
            (0, 1)
        } else {
            (2 * PAGE_BYTES, 9)
        };
        assert_eq!(
            (file, space, offset_bytes),
            (name.clone(), Some(SpaceId(of)), run as u64)
        );
        assert!(
            message.contains(&format!("byte {run} (space {of})")),
            "{message}"
        );
        bytes[at] ^= 0x10;
    }
    put(&*store, &name, &bytes);
    read_all(&*store).unwrap();
}

#[test]
fn every_truncation_of_the_manifest_is_named() {
    let store = Arc::new(Memory::default());
    write(store.clone());
    let whole = get(&*store, MANIFEST_NAME);
    for len in 0..whole.len() {
        let error = error_of(&*store, MANIFEST_NAME, &whole[..len]);
        let Error::Corrupt {
            file, offset_bytes, ..
        } = error
        else {
            panic!("{len}: {error}")
        };
        assert_eq!(file, MANIFEST_NAME);
        assert!(offset_bytes <= len as u64, "{len}: named {offset_bytes}");
    }
    for more in [1, 32, 4096] {
        let longer = [&whole[..], &vec![0; more]].concat();
        let error = error_of(&*store, MANIFEST_NAME, &longer);
        assert!(matches!(error, Error::Corrupt { .. }), "{error}");
    }
}

#[test]
fn every_truncation_of_the_pages_is_named_before_any_is_read() {
    let store = Arc::new(Memory::default());
    let name = write(store.clone()).pages_name();
    let whole = get(&*store, &name);
    let longer = [&whole[..], &[0; PAGE_BYTES]].concat();
    for len in (0..longer.len()).filter(|&len| len != whole.len()) {
        put(&*store, &name, &longer[..len]);
        let error = Reader::open(&*store).err().expect("noticed when opened");
        let Error::Corrupt {
            file,
            space,
            offset_bytes,
            ..
        } = error
        else {
            panic!("{len}: {error}")
        };
        assert_eq!(
            (file, offset_bytes),
            (name.clone(), len.min(whole.len()) as u64)
        );
        let expected = match len {
            _ if len < 2 * PAGE_BYTES => Some(SpaceId(1)),
            _ if len < whole.len() => Some(SpaceId(9)),
            _ => None,
        };
        assert_eq!(space, expected, "{len}");
    }
}

#[test]
fn missing_objects_are_named() {
    let store = Arc::new(Memory::default());
    let name = write(store.clone()).pages_name();
    let pages = get(&*store, &name);
    store.remove(&name).unwrap();
    let error = read_all(&*store).unwrap_err();
    assert!(
        matches!(&error, Error::Corrupt { file, .. } if *file == name),
        "{error}"
    );
    put(&*store, &name, &pages);
    store.remove(MANIFEST_NAME).unwrap();
    assert!(matches!(read_all(&*store), Err(Error::NoImage { .. })));
}

#[test]
fn pages_of_another_image_are_not_taken_for_these() {
    let store = Arc::new(Memory::default());
    let other = Arc::new(Memory::default());
    let name = write(store.clone()).pages_name();
    let writer = Writer::create(other.clone()).unwrap();
    let run = NewRun {
        space: SpaceId(1),
        first_page: 0,
        pages: 3,
    };
    writer.append(&[8; 3 * PAGE_BYTES], &[run]).unwrap();
    let foreign = get(&*other, &writer.seal(Seal::default()).unwrap().pages_name());
    let error = error_of(&*store, &name, &foreign);
    assert!(
        matches!(&error, Error::Corrupt { file, .. } if *file == name),
        "{error}"
    );
}
