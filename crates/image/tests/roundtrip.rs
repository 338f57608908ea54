//! Whatever is written is read again: random run lists against a plain model of the pages.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;

use image::{
    Error, Facts, NewRun, PAGE_BYTES, Reader, Record, Run, RunKind, Seal, SpaceId, Writer,
};
use proptest::prelude::*;
use store::{Directory, Memory, Store};

/// What is done with the next pages of a space.
#[derive(Clone, Debug)]
enum Step {
    Skip(u64),
    Zero(u32),
    Data(u32),
    Same(u32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (1..1_u64 << 20).prop_map(Step::Skip),
        (1..40_u32).prop_map(Step::Zero),
        (1..20_u32).prop_map(Step::Data),
        Just(Step::Data(300)),
        (1..40_u32).prop_map(Step::Same),
    ]
}

/// The model: for each space and page, the byte that fills it.
type Model = BTreeMap<(u32, u64), u8>;

/// Writes spaces 0, 1, … by their steps; `Same` shares what the space before has from the same page
/// on, as far as it has pages there.
fn write(store: Arc<dyn Store>, spaces: &[Vec<Step>], records: &[Record]) -> Model {
    let writer = Writer::create(store).unwrap();
    let mut model = Model::new();
    for (number, steps) in spaces.iter().enumerate() {
        let number = number as u32;
        let space = SpaceId(number);
        let mut first_page = 0;
        for step in steps {
            let pages = match *step {
                Step::Skip(pages) => {
                    first_page += pages;
                    continue;
                }
                Step::Zero(pages) => {
                    writer.mark(Run {
                        space,
                        first_page,
                        pages,
                        kind: RunKind::Zero,
                    });
                    model
                        .extend((0..pages).map(|page| ((number, first_page + u64::from(page)), 0)));
                    pages
                }
                Step::Data(pages) => {
                    let fill = |page: u64| (page * 31 + u64::from(number)) as u8 | 1;
                    let range = first_page..first_page + u64::from(pages);
                    let bytes: Vec<u8> = range
                        .clone()
                        .flat_map(|page| [fill(page); PAGE_BYTES])
                        .collect();
                    writer
                        .append(
                            &bytes,
                            &[NewRun {
                                space,
                                first_page,
                                pages,
                            }],
                        )
                        .unwrap();
                    model.extend(range.map(|page| ((number, page), fill(page))));
                    pages
                }
                Step::Same(most) => {
                    let other = |page| Some(*model.get(&(number.checked_sub(1)?, page))?);
                    let shared: Vec<u8> = (first_page..)
                        .map_while(other)
                        .take(most as usize)
                        .collect();
                    let pages = shared.len() as u32;
                    if pages == 0 {
                        continue;
                    }
                    let kind = RunKind::Same {
                        space: SpaceId(number - 1),
                    };
                    writer.mark(Run {
                        space,
                        first_page,
                        pages,
                        kind,
                    });
                    model.extend(
                        shared
                            .into_iter()
                            .enumerate()
                            .map(|(at, byte)| ((number, first_page + at as u64), byte)),
                    );
                    pages
                }
            };
            first_page += u64::from(pages);
        }
    }
    records
        .iter()
        .for_each(|record| writer.record(record.clone()));
    writer
        .seal(Seal {
            durable: false,
            facts: Facts::default(),
        })
        .unwrap();
    model
}

/// Reads everything in every way and compares it with the model.
fn compare(store: &dyn Store, model: &Model, records: &[Record]) {
    let reader = Reader::open(store).unwrap();
    assert_eq!(reader.records(), records);
    reader.verify_all(2).unwrap();
    let mut described = 0;
    for space in reader.spaces() {
        assert_eq!(
            reader
                .runs(space.id)
                .map(|run| u64::from(run.pages))
                .sum::<u64>(),
            space.pages
        );
        for run in reader.runs(space.id) {
            described += u64::from(run.pages);
            let mut bytes = vec![0xee; run.len_bytes() as usize];
            reader
                .read_pages(space.id, run.first_page, &mut bytes)
                .unwrap();
            for (page, bytes) in (run.first_page..).zip(bytes.chunks(PAGE_BYTES)) {
                let fill = model[&(space.id.0, page)];
                assert!(
                    bytes.iter().all(|&byte| byte == fill),
                    "page {page} of {run:?}"
                );
                assert_eq!(reader.find(space.id, page), Some(run));
            }
        }
    }
    assert_eq!(described, model.len() as u64);
    for &(space, page) in model.keys() {
        let space = SpaceId(space);
        if reader.find(space, page + 1).is_none() {
            let error = reader
                .read_pages(space, page + 1, &mut [0; PAGE_BYTES])
                .unwrap_err();
            assert!(matches!(error, Error::NoPage { .. }), "{error}");
        }
    }
    // Parts of runs, from their middle.
    for (&(space, page), &fill) in model.iter().step_by(7) {
        let mut bytes = [0xee; PAGE_BYTES];
        reader.read_pages(SpaceId(space), page, &mut bytes).unwrap();
        assert!(bytes.iter().all(|&byte| byte == fill));
    }
}

fn record() -> impl Strategy<Value = Record> {
    (
        1..=u16::MAX,
        any::<u16>(),
        any::<u32>(),
        prop::collection::vec(any::<u8>(), 0..200),
    )
        .prop_map(|(tag, version, id, payload)| Record {
            tag,
            version,
            id,
            payload,
        })
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 64, failure_persistence: None, ..Default::default()
    })]

    #[test]
    fn images_survive(
        spaces in prop::collection::vec(prop::collection::vec(step(), 0..12), 0..5),
        records in prop::collection::vec(record(), 0..20),
    ) {
        let store = Arc::new(Memory::default());
        let model = write(store.clone(), &spaces, &records);
        compare(&*store, &model, &records);
    }
}

#[test]
fn images_survive_in_a_directory() {
    let scratch = tempfile::tempdir().unwrap();
    let path = scratch.path().join("image");
    let spaces = [
        vec![Step::Data(300), Step::Zero(5), Step::Skip(3), Step::Data(1)],
        vec![Step::Same(100), Step::Data(2), Step::Same(400)],
        vec![Step::Skip(7), Step::Same(40)],
    ];
    let records = [Record {
        tag: 1,
        version: 1,
        id: 1,
        payload: vec![1; 100_000],
    }];
    let model = write(
        Arc::new(Directory::create(&path).unwrap()),
        &spaces,
        &records,
    );
    compare(&Directory::open(&path).unwrap(), &model, &records);
    assert_eq!(path.read_dir().unwrap().count(), 2);
}
