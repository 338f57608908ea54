//! An image of every format version is kept: what is not read is refused by name.
#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use image::{
    Error, FORMAT_VERSION, Facts, Granule, NewRun, NewSpace, PAGE_BYTES, Reader, Record, Run,
    RunKind, Seal, SpaceId, SpaceKind, Writer,
};
use store::Directory;

fn fixture(version: u32) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/fixtures/v{version}"))
}

fn facts() -> Facts {
    Facts {
        kernel_release: "6.18.0".into(),
        stillframe_version: "0.1.0".into(),
        created_ns: 1_700_000_000_123_456_789,
        arch: "x86_64".into(),
    }
}

fn page(fill: u8) -> Vec<u8> {
    (0..PAGE_BYTES).map(|at| fill ^ at as u8).collect()
}

fn records() -> [Record; 2] {
    [
        Record {
            tag: 5,
            version: 1,
            id: 77,
            payload: b"hello".into(),
        },
        Record {
            tag: 2,
            version: 3,
            id: 0,
            payload: vec![],
        },
    ]
}

#[test]
fn version_1_is_refused_by_name() {
    let store = Directory::open(fixture(1)).unwrap();
    let error = Reader::open(&store).err().unwrap();
    assert!(matches!(error, Error::Version { version: 1 }), "{error}");
    assert!(
        error.to_string().contains("dump the processes again"),
        "{error}"
    );
    assert!(
        image::current(&store).is_some(),
        "an image is there all the same"
    );
}

#[test]
fn version_2_is_read() {
    let reader = Reader::open(&Directory::open(fixture(2)).unwrap()).unwrap();
    reader.verify_all(1).unwrap();
    assert_eq!(reader.facts(), &facts());
    assert_eq!(reader.records(), records());
    let spaces: Vec<_> = reader
        .spaces()
        .iter()
        .map(|space| (space.id.0, space.own_pages, space.pages))
        .collect();
    assert_eq!(spaces, [(1, 2, 34), (2, 1, 3)]);
    let space = reader.space(SpaceId(2)).unwrap();
    assert_eq!(
        (space.kind, &*space.name, space.len_pages, space.granule),
        (SpaceKind::Object, "shared", 0x1000, Granule::Small)
    );
    let mut bytes = vec![0; 3 * PAGE_BYTES];
    reader.read_pages(SpaceId(2), 0x101, &mut bytes).unwrap();
    assert_eq!(bytes, [page(2), vec![0; PAGE_BYTES], page(3)].concat());
    reader
        .read_pages(SpaceId(1), 0x100, &mut bytes[..PAGE_BYTES])
        .unwrap();
    assert_eq!(bytes[..PAGE_BYTES], page(1));
}

#[test]
fn there_is_a_fixture_for_every_version() {
    for version in 1..=FORMAT_VERSION {
        assert!(fixture(version).is_dir(), "version {version}");
    }
}

#[test]
#[ignore = "writes the fixture of a new format version: run once for each, and commit it"]
fn write_the_fixture() {
    let path = fixture(FORMAT_VERSION);
    let files = path.read_dir().map_or(0, |entries| entries.count());
    assert_eq!(files, 0, "a fixture is never written again");
    let store = Arc::new(Directory::create(&path).unwrap());
    let writer = Writer::create(store).unwrap();
    let (one, two) = (SpaceId(1), SpaceId(2));
    let run = |space, first_page, pages| NewRun {
        space,
        first_page,
        pages,
    };
    let bytes = [page(1), page(2), page(3)].concat();
    writer
        .append(&bytes, &[run(one, 0x100, 2), run(two, 0x103, 1)])
        .unwrap();
    writer.mark(Run {
        space: one,
        first_page: 0x102,
        pages: 32,
        kind: RunKind::Zero,
    });
    writer.space(NewSpace {
        id: two,
        kind: SpaceKind::Object,
        name: "shared".into(),
        len_pages: 0x1000,
        granule: Granule::Small,
    });
    let kind = RunKind::Same { space: one };
    writer.mark(Run {
        space: two,
        first_page: 0x101,
        pages: 2,
        kind,
    });
    records()
        .into_iter()
        .for_each(|record| writer.record(record));
    writer
        .seal(Seal {
            durable: true,
            facts: facts(),
        })
        .unwrap();
}
