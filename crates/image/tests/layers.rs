//! Chains of layers against a plain model, and what happens when one of them is not what it was.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use image::{
    Compression, Error, ImageId, Link, NewRun, PAGE_BYTES, Reader, Record, Run, RunKind, Seal,
    SpaceId, Writer,
};
use proptest::prelude::*;
use store::conformance::{get, put};
use store::{Directory, Memory, Store};

/// What a layer does with the next pages of a space.
#[derive(Clone, Debug)]
enum Step {
    /// They have no contents.
    Skip(u64),
    Zero(u32),
    Data(u32),
    /// The parent's, as far as it describes them.
    Parent(u64),
    /// The parent's of several ranges of so many pages and so far apart, where it describes them.
    Described(u64, u64),
    /// Those of the space before, as far as it has some.
    Same(u64),
    /// The contents of pages that this layer has stored, after some of them.
    Equal(usize, u32),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        (1..20_u64).prop_map(Step::Skip),
        (1..12_u32).prop_map(Step::Zero),
        (1..12_u32).prop_map(Step::Data),
        (1..60_u64).prop_map(Step::Parent),
        Just(Step::Parent(1000)),
        (1..15_u64, 0..10_u64).prop_map(|(pages, gap)| Step::Described(pages, gap)),
        (1..20_u64).prop_map(Step::Same),
        (0..20_usize, 1..9_u32).prop_map(|(skip, pages)| Step::Equal(skip, pages)),
    ]
}

fn compression() -> impl Strategy<Value = Option<Compression>> {
    prop_oneof![
        Just(None),
        Just(Some(Compression::Lz4)),
        Just(Some(Compression::Zstd(1))),
    ]
}

/// For each space and page, the byte that fills it.
type Model = BTreeMap<(u32, u64), u8>;

/// The pages from `first_page` on that `model` has without a hole, at most `most`.
fn known(model: &Model, space: u32, first_page: u64, most: u64) -> Vec<u8> {
    let pages = first_page..first_page + most;
    pages
        .map_while(|page| model.get(&(space, page)).copied())
        .collect()
}

fn data(writer: &Writer, space: u32, first_page: u64, fills: &[u8]) -> Run {
    let bytes: Vec<u8> = fills.iter().flat_map(|fill| [*fill; PAGE_BYTES]).collect();
    let run = NewRun {
        space: SpaceId(space),
        first_page,
        pages: fills.len() as u32,
    };
    let stored = writer.store(0, &bytes, &[run]).unwrap();
    writer.describe(stored.iter().copied());
    stored[0]
}

/// Writes a layer of spaces 0, 1, … by their steps; returns what all pages should be.
fn write(writer: &Writer, layer: usize, spaces: &[Vec<Step>], parent: &Model) -> Model {
    let mut model = Model::new();
    let mut stored: Vec<(Run, Vec<u8>)> = Vec::new();
    for (number, steps) in (0_u32..).zip(spaces) {
        let mut page = 0;
        for step in steps {
            let space = SpaceId(number);
            let mark = |pages: usize, kind| {
                let (first_page, pages) = (page, pages as u32);
                writer.mark(Run {
                    space,
                    first_page,
                    pages,
                    kind,
                });
            };
            let fills = match *step {
                Step::Skip(pages) => {
                    page += pages;
                    continue;
                }
                Step::Zero(pages) => {
                    mark(pages as usize, RunKind::Zero);
                    vec![0; pages as usize]
                }
                Step::Data(pages) => {
                    let fill = |page| (page * 7 + layer as u64 * 31 + u64::from(number)) as u8 | 1;
                    let fills: Vec<u8> = (page..page + u64::from(pages)).map(fill).collect();
                    let run = data(writer, number, page, &fills);
                    stored.push((run, fills.clone()));
                    fills
                }
                Step::Equal(skip, pages) => match stored.get(skip % stored.len().max(1)) {
                    None => vec![],
                    Some((run, fills)) => {
                        let skip = skip as u32 % run.pages;
                        let pages = pages.min(run.pages - skip);
                        let equal = run.equal(space, page, pages, skip);
                        writer.describe([equal]);
                        fills[skip as usize..(skip + pages) as usize].to_vec()
                    }
                },
                Step::Parent(most) => {
                    let fills = known(parent, number, page, most);
                    if !fills.is_empty() {
                        writer.inherit(space, page, fills.len() as u64).unwrap();
                    }
                    fills
                }
                Step::Described(_, _) if parent.is_empty() => continue,
                Step::Described(pages, gap) => {
                    let starts = (0..8).map(|number| page + number * (pages + gap));
                    let ranges: Vec<Range<u64>> =
                        starts.map(|start| start..start + pages).collect();
                    let described = writer.inherit_described(space, &ranges).unwrap();
                    assert!(described.windows(2).all(|pair| pair[0].end < pair[1].start));
                    let wanted = ranges.into_iter().flatten();
                    let theirs = wanted.filter(|page| parent.contains_key(&(number, *page)));
                    let theirs = theirs.collect::<Vec<_>>();
                    assert!(described.into_iter().flatten().eq(theirs.iter().copied()));
                    for page in theirs {
                        model.insert((number, page), parent[&(number, page)]);
                    }
                    page += 8 * (pages + gap);
                    continue;
                }
                Step::Same(most) => {
                    let other = number.checked_sub(1);
                    let fills = other.map_or(vec![], |other| known(&model, other, page, most));
                    if let (Some(other), false) = (other, fills.is_empty()) {
                        mark(
                            fills.len(),
                            RunKind::Same {
                                space: SpaceId(other),
                            },
                        );
                    }
                    fills
                }
            };
            for fill in fills {
                model.insert((number, page), fill);
                page += 1;
            }
        }
    }
    model
}

/// Reads everything of a layer in every way and compares it with the model.
fn compare(reader: &Reader, model: &Model) {
    reader.verify_all(2).unwrap();
    let pages: u64 = reader.spaces().iter().map(|space| space.pages).sum();
    assert_eq!(pages, model.len() as u64);
    let mut last = None;
    for (&(space, page), &fill) in model {
        let space = SpaceId(space);
        let located = reader.locate(space, page, 5).unwrap();
        assert!((1..=5).contains(&located.pages));
        let chunk = located.part.map(|part| part.chunk);
        if last.replace(chunk) == Some(chunk) {
            continue;
        }
        let mut bytes = [0xee; PAGE_BYTES];
        reader.read_pages(space, page, &mut bytes).unwrap();
        assert_eq!(bytes, [fill; PAGE_BYTES], "space {space} page {page}");
        let Some(part) = located.part else {
            assert_eq!(fill, 0);
            continue;
        };
        let mut whole = vec![0xee; reader.chunk_pages(part.chunk) as usize * PAGE_BYTES];
        reader.load(&[(part.chunk, 0)], &mut whole).unwrap();
        assert_eq!(whole[part.skip_pages as usize * PAGE_BYTES], fill);
        if let Some(at) = reader.stored_at(part) {
            let file = reader.file(at.file).unwrap();
            file.read_at(&mut bytes, at.offset_bytes).unwrap();
            assert_eq!(bytes, [fill; PAGE_BYTES]);
        }
    }
    for space in reader.spaces() {
        let described = reader.described(space.id, 0, 1 << 20);
        assert!(described.windows(2).all(|pair| pair[0].end < pair[1].start));
        let pages: Vec<u64> = described.iter().cloned().flatten().collect();
        let mine = model.range((space.id.0, 0)..=(space.id.0, u64::MAX));
        assert!(pages.iter().eq(mine.map(|((_, page), _)| page)));
        for range in described.iter().filter(|range| range.end - range.start > 2) {
            let inner = range.start + 1..range.end - 1;
            let asked = reader.described(space.id, inner.start, inner.end - inner.start);
            assert!(asked.iter().eq([&inner]));
            let mut bytes = vec![0xee; (inner.end - inner.start) as usize * PAGE_BYTES];
            reader
                .read_pages(space.id, inner.start, &mut bytes)
                .unwrap();
            for (page, bytes) in inner.zip(bytes.chunks(PAGE_BYTES)) {
                assert_eq!(bytes, [model[&(space.id.0, page)]; PAGE_BYTES]);
            }
        }
    }
}

/// Memory stores that find each other at `../NUMBER`.
fn places(count: usize) -> Vec<Memory> {
    let all: Vec<Memory> = (0..count).map(|_| Memory::default()).collect();
    for one in &all {
        for (number, other) in all.iter().enumerate() {
            one.put_beside(&format!("../{number}"), other);
        }
    }
    all
}

fn link(parent: usize, child: usize) -> Link {
    Link {
        to_parent: format!("../{parent}"),
        to_child: format!("../{child}"),
    }
}

/// Starts the layer `number` over the one before it.
fn over(places: &[Memory], number: usize) -> Writer {
    let store = Arc::new(places[number].clone());
    match number.checked_sub(1) {
        None => Writer::create(store).unwrap(),
        Some(parent) => {
            let reader = Arc::new(Reader::open(&places[parent]).unwrap());
            Writer::create_layer(store, reader, link(parent, number)).unwrap()
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 40, failure_persistence: None, ..Default::default()
    })]

    #[test]
    fn chains_survive(
        layers in prop::collection::vec(
            prop::collection::vec(prop::collection::vec(step(), 0..8), 1..4), 1..6,
        ),
        compressions in prop::collection::vec(compression(), 6),
    ) {
        let places = places(layers.len());
        let mut models = vec![Model::new()];
        for (number, spaces) in layers.iter().enumerate() {
            let mut writer = over(&places, number);
            writer.compress(compressions[number]);
            let model = write(&writer, number, spaces, &models[number]);
            writer.seal(Seal::default()).unwrap();
            models.push(model);
        }
        for (place, model) in places.iter().zip(&models[1..]) {
            compare(&Reader::open(place).unwrap(), model);
        }
        dedup(&places, &models[1..]);
        // The newest, squashed down to any of the others, and then wholly, where it is.
        let newest = layers.len() - 1;
        for until in (0..newest).rev() {
            merge(&places, newest, newest, Some(until));
            let reader = Reader::open(&places[newest]).unwrap();
            compare(&reader, &models[newest + 1]);
            let older = Reader::open(&places[until]).unwrap();
            let known: Vec<_> = older.ancestors().iter().map(|one| one.id).collect();
            prop_assert!(reader
                .ancestors()
                .iter()
                .all(|one| one.id == older.id() || known.contains(&one.id)));
        }
        merge(&places, newest, newest, None);
        let reader = Reader::open(&places[newest]).unwrap();
        prop_assert!(reader.ancestors().is_empty() && reader.parent().is_none());
        compare(&reader, &models[newest + 1]);
    }
}

/// Frees what the newest layer does not need: that is all there is, and older layers say so.
fn dedup(places: &[Memory], models: &[Model]) {
    let newest = places.len() - 1;
    image::dedup(&places[newest], false).unwrap();
    let reader = Reader::open(&places[newest]).unwrap();
    compare(&reader, &models[newest]);
    let mut needed = std::collections::BTreeSet::new();
    for run in reader
        .spaces()
        .iter()
        .flat_map(|space| reader.runs(space.id))
    {
        if reader.ancestor_of(&run).is_some() {
            // Encoded chunks stay as long as a page of them is needed.
            let Some(at) = reader.stored_at(run.part().unwrap()) else {
                continue;
            };
            let first = at.offset_bytes / PAGE_BYTES as u64;
            needed.extend((first..first + u64::from(run.pages)).map(|page| (at.file, page)));
        }
    }
    let mut chain = std::collections::BTreeSet::new();
    let mut at = reader.parent().map(|(_, path)| path.to_owned());
    while let Some(path) = at {
        let older = Reader::open(&*places[newest].beside(&path).unwrap()).unwrap();
        chain.insert(older.id());
        // All paths of these places are the same wherever they begin.
        at = older.parent().map(|(_, path)| path.to_owned());
    }
    let mut left = 0;
    for (place, model) in places[..newest].iter().zip(models) {
        let older = Reader::open(place).unwrap();
        if chain.contains(&older.id()) {
            let names = place.list().unwrap();
            // The objects from number 8 on have encoded chunks.
            let is_plain = |name: &&String| {
                let number = name.rsplit('.').nth(1).and_then(|part| part.parse().ok());
                name.starts_with("pages") && number.is_none_or(|number: u32| number < 8)
            };
            for name in names.iter().filter(is_plain) {
                let bytes = get(place, name);
                let pages = bytes.chunks(PAGE_BYTES);
                left += pages
                    .filter(|page| page.iter().any(|byte| *byte != 0))
                    .count();
            }
        }
        match older.freed_by() {
            None => compare(&older, model),
            Some(by) => {
                assert!(by == reader.id() && chain.contains(&older.id()));
                assert!(matches!(older.open_ancestors(), Err(Error::Freed { .. })));
                let read = older.verify_all(1);
                let has_pages = older
                    .spaces()
                    .iter()
                    .any(|space| older.runs(space.id).any(|run| run.part().is_some()));
                assert!(!has_pages || matches!(read, Err(Error::Freed { .. })));
            }
        }
    }
    assert_eq!(left, needed.len(), "all that is not needed is free");
    image::dedup(&places[newest], false).unwrap();
    compare(&Reader::open(&places[newest]).unwrap(), &models[newest]);
}

#[test]
fn what_is_not_needed_is_freed_and_told() {
    let places = places(5);
    let ids = three(&places);
    // The newest replaces one page of its parent's and has no other of it.
    let writer = over(&places, 3);
    data(&writer, 1, 1, &[9]);
    writer.inherit(SpaceId(1), 0, 1).unwrap();
    writer.inherit(SpaceId(1), 2, 1).unwrap();
    let newest = writer.seal(Seal::default()).unwrap();
    let freed = image::dedup(&places[3], false).unwrap();
    assert_eq!((freed.freed_bytes, freed.images), (PAGE_BYTES as u64, 1));
    assert_eq!(read_all(&places[3]).unwrap(), [1, 9, 3]);
    // The oldest is as it was; what is over the one that lost a page is not.
    assert_eq!(Reader::open(&places[0]).unwrap().freed_by(), None);
    for number in [1, 2] {
        let error = read_all(&places[number]).unwrap_err();
        let told = format!("image {} is not whole: parts of it were freed", ids[number]);
        assert!(error.to_string().starts_with(&told), "{error}");
        let reader = Reader::open(&places[number]).unwrap();
        assert_eq!(reader.freed_by(), Some(newest));
        assert!(reader.features().contains(&"freed".to_owned()));
    }
    // Nothing can be put over it, but over the newest.
    let error = over(&places, 3).inherit(SpaceId(1), 0, 1).unwrap_err();
    assert!(matches!(error, Error::Freed { .. }), "{error}");
    let writer = over(&places, 4);
    writer.inherit(SpaceId(1), 0, 3).unwrap();
    writer.seal(Seal::default()).unwrap();
    assert_eq!(read_all(&places[4]).unwrap(), [1, 9, 3]);
    merge(&places, 4, 4, None);
    assert_eq!(read_all(&places[4]).unwrap(), [1, 9, 3]);
}

#[test]
fn what_another_image_needs_is_not_freed() {
    let places = places(4);
    let ids = three(&places);
    let sibling = Arc::new(places[3].clone());
    let parent = Arc::new(Reader::open(&places[0]).unwrap());
    let writer = Writer::create_layer(sibling, parent, link(0, 3)).unwrap();
    writer.inherit(SpaceId(1), 0, 1).unwrap();
    let other = writer.seal(Seal::default()).unwrap();
    let refused = |result: Result<(), Error>, by: ImageId| match result.unwrap_err() {
        Error::Needed { child, .. } => assert_eq!(child, by),
        error => panic!("{error}"),
    };
    let freed = |number: usize| image::dedup(&places[number], false).map(drop);
    refused(freed(2), other);
    refused(freed(1), ids[2]);
    refused(image::check_dedup(&places[2], None), other);
    assert!(image::check_dedup(&places[2], Some(other)).is_ok());
    refused(image::check_dedup(&places[1], None), ids[2]);
    assert_eq!(read_all(&places[2]).unwrap(), [1, 2, 3]);
    // It is gone: its mark is stale.
    places[3].remove(image::MANIFEST_NAME).unwrap();
    freed(2).unwrap();
    assert_eq!(read_all(&places[2]).unwrap(), [1, 2, 3]);
}

#[test]
fn what_was_freed_is_no_damage_to_images_that_nobody_knew() {
    let places = places(3);
    let writer = over(&places, 0);
    data(&writer, 1, 0, &[1, 2]);
    let oldest = writer.seal(Seal::default()).unwrap();
    let child = |number: usize, own: u64| {
        let parent = Arc::new(Reader::open(&places[0]).unwrap());
        let store = Arc::new(places[number].clone());
        let writer = Writer::create_layer(store, parent, link(0, number)).unwrap();
        data(&writer, 1, 2, &[3]);
        (0..own).for_each(|page| {
            data(&writer, 1, page, &[4]);
        });
        writer.inherit(SpaceId(1), own, 2 - own).unwrap();
        writer.seal(Seal::default()).unwrap()
    };
    let unknown = child(1, 0);
    places[0].remove(&format!("child-{unknown}.img")).unwrap();
    let newest = child(2, 1);
    image::dedup(&places[2], false).unwrap();
    assert_eq!(read_all(&places[2]).unwrap(), [4, 2, 3]);
    match read_all(&places[1]).unwrap_err() {
        Error::Freed { id, by } => assert_eq!((id, by), (oldest, newest)),
        error => panic!("{error}"),
    }
}

#[test]
fn a_parent_that_was_changed_meanwhile_has_no_child() {
    let places = places(4);
    three(&places);
    let writer = over(&places, 3);
    data(&writer, 1, 0, &[8]);
    writer.inherit(SpaceId(1), 1, 2).unwrap();
    // As if the parent's own needs were refined: another manifest of the same image.
    let mut bytes = get(&places[2], image::MANIFEST_NAME);
    let table = bytes.len();
    bytes[table - 1] ^= 1;
    put(&places[2], image::MANIFEST_NAME, &bytes);
    assert!(
        writer.seal(Seal::default()).is_ok(),
        "the header is the same"
    );
    bytes[table - 1] ^= 1;
    put(&places[2], image::MANIFEST_NAME, &bytes);
    let writer = over(&places, 3);
    data(&writer, 1, 0, &[7]);
    writer.inherit(SpaceId(1), 1, 2).unwrap();
    bytes[60] ^= 1;
    put(&places[2], image::MANIFEST_NAME, &bytes);
    let error = writer.seal(Seal::default()).unwrap_err();
    assert!(
        error.to_string().ends_with("was changed meanwhile"),
        "{error}"
    );
}

#[test]
fn a_merged_image_needs_no_other() {
    let places = places(4);
    let ids = three(&places);
    let merged = merge(&places, 2, 3, Some(0));
    assert_eq!((merged.stored_pages, merged.parent_pages), (2, 1));
    let reader = Reader::open(&places[3]).unwrap();
    assert_eq!(reader.parent(), Some((ids[0], "../0")));
    assert_eq!(read_all(&places[3]).unwrap(), [1, 2, 3]);
    let merged = merge(&places, 2, 3, None);
    assert_eq!((merged.stored_pages, merged.parent_pages), (3, 0));
    for place in &places[..3] {
        place
            .list()
            .unwrap()
            .iter()
            .for_each(|name| place.remove(name).unwrap());
    }
    assert_eq!(read_all(&places[3]).unwrap(), [1, 2, 3]);
}

#[test]
fn equal_pages_stay_stored_once() {
    let places = places(3);
    let writer = over(&places, 0);
    let run = data(&writer, 1, 0, &[1, 2, 3]);
    let equal = |first_page, skip_pages| {
        writer.describe([run.equal(SpaceId(2), first_page, 1, skip_pages)]);
    };
    equal(0, 2);
    equal(1, 1);
    equal(7, 1);
    writer.seal(Seal::default()).unwrap();
    let writer = over(&places, 1);
    writer.inherit(SpaceId(1), 0, 3).unwrap();
    writer.inherit(SpaceId(2), 0, 2).unwrap();
    data(&writer, 2, 7, &[4]);
    writer.seal(Seal::default()).unwrap();
    for (from, pages) in [(0, 3), (1, 4)] {
        let merged = merge(&places, from, 2, None);
        assert_eq!((merged.stored_pages, merged.parent_pages), (pages, 0));
        let reader = Reader::open(&places[2]).unwrap();
        assert_eq!(reader.features(), ["equal"]);
        let mut bytes = vec![0; 2 * PAGE_BYTES];
        reader.read_pages(SpaceId(2), 0, &mut bytes).unwrap();
        assert_eq!([bytes[0], bytes[PAGE_BYTES]], [3, 2]);
        reader.verify_all(1).unwrap();
    }
}

#[test]
fn what_is_damaged_is_not_merged() {
    let places = places(4);
    let ids = three(&places);
    let name = ids[0].pages_name();
    let mut bytes = get(&places[0], &name);
    bytes[5] ^= 1;
    put(&places[0], &name, &bytes);
    let reader = Reader::open(&places[2]).unwrap();
    let writer = Writer::create(Arc::new(places[3].clone())).unwrap();
    let error = image::merge(&reader, &writer).unwrap_err();
    assert!(error.to_string().contains("../0/pages"), "{error}");
}

/// Merges image `from` into `to`, down to image `until`, which is kept.
fn merge(places: &[Memory], from: usize, to: usize, until: Option<usize>) -> image::MergeSummary {
    let reader = Reader::open(&places[from]).unwrap();
    let store = Arc::new(places[to].clone());
    let writer = match until {
        None => Writer::create(store).unwrap(),
        Some(until) => {
            let parent = Arc::new(Reader::open(&places[until]).unwrap());
            Writer::create_layer(store, parent, link(until, to)).unwrap()
        }
    };
    let merged = image::merge(&reader, &writer).unwrap();
    let facts = reader.facts().clone();
    writer
        .seal(Seal {
            durable: false,
            facts,
        })
        .unwrap();
    merged
}

/// Three layers of one page each, of which the newest has all three.
fn three(places: &[Memory]) -> Vec<ImageId> {
    let page = |number| number as u64;
    let write = |number: usize| {
        let writer = over(places, number);
        data(&writer, 1, page(number), &[number as u8 + 1]);
        if number > 0 {
            writer.inherit(SpaceId(1), 0, page(number)).unwrap();
        }
        writer.seal(Seal::default()).unwrap()
    };
    (0..3).map(write).collect()
}

fn read_all(place: &Memory) -> Result<Vec<u8>, Error> {
    let reader = Reader::open(place)?;
    let mut bytes = vec![0; 3 * PAGE_BYTES];
    reader.read_pages(SpaceId(1), 0, &mut bytes)?;
    reader.verify_all(1)?;
    Ok(bytes.chunks(PAGE_BYTES).map(|page| page[0]).collect())
}

#[test]
fn pages_are_read_where_they_are() {
    let places = places(3);
    let ids = three(&places);
    assert_eq!(read_all(&places[2]).unwrap(), [1, 2, 3]);
    let reader = Reader::open(&places[2]).unwrap();
    assert_eq!(reader.parent(), Some((ids[1], "../1")));
    assert_eq!(reader.features(), ["parent"]);
    let ancestors: Vec<_> = reader
        .ancestors()
        .iter()
        .map(|one| (one.id, &*one.path))
        .collect();
    assert_eq!(ancestors, [(ids[1], "../1"), (ids[0], "../0")]);
    let origins: Vec<_> = reader
        .runs(SpaceId(1))
        .map(|run| reader.ancestor_of(&run).map(|ancestor| ancestor.id))
        .collect();
    assert_eq!(origins, [Some(ids[0]), Some(ids[1]), None]);
    // The manifests of ancestors are not needed to read it.
    for place in &places[..2] {
        place.remove("manifest.img").unwrap();
    }
    assert_eq!(read_all(&places[2]).unwrap(), [1, 2, 3]);
}

#[test]
fn damage_in_any_layer_names_the_file() {
    let places = places(3);
    let ids = three(&places);
    for (number, id) in ids.iter().enumerate() {
        let name = id.pages_name();
        let whole = get(&places[number], &name);
        let file = match number {
            2 => name.clone(),
            older => format!("../{older}/{name}"),
        };
        let mut bytes = whole.clone();
        bytes[77] ^= 4;
        put(&places[number], &name, &bytes);
        match read_all(&places[2]).unwrap_err() {
            Error::Corrupt {
                file: named,
                space,
                offset_bytes,
                ..
            } => {
                assert_eq!((named, space, offset_bytes), (file, Some(SpaceId(1)), 0));
            }
            error => panic!("{error}"),
        }
        put(&places[number], &name, &whole[..PAGE_BYTES - 1]);
        let error = read_all(&places[2]).unwrap_err().to_string();
        assert!(
            error.contains(&name) && error.contains("4095 bytes"),
            "{error}"
        );
        put(&places[number], &name, &whole);
    }
    assert_eq!(read_all(&places[2]).unwrap(), [1, 2, 3]);
}

#[test]
fn every_flipped_byte_of_a_layers_manifest_is_named() {
    let places = places(3);
    three(&places);
    let whole = get(&places[2], "manifest.img");
    for at in 0..whole.len() {
        for flip in [0x01, 0x80, 0xff] {
            let mut bytes = whole.clone();
            bytes[at] ^= flip;
            put(&places[2], "manifest.img", &bytes);
            match read_all(&places[2]).unwrap_err() {
                Error::Corrupt {
                    file, offset_bytes, ..
                } => {
                    assert_eq!(file, "manifest.img");
                    assert!(offset_bytes <= at as u64, "byte {at}: named {offset_bytes}");
                }
                error => panic!("byte {at} ^ {flip:#x}: {error}"),
            }
        }
        put(&places[2], "manifest.img", &whole[..at]);
        let error = read_all(&places[2]).unwrap_err();
        assert!(
            matches!(error, Error::Corrupt { .. }),
            "cut at {at}: {error}"
        );
    }
}

#[test]
fn ancestors_that_are_gone_or_others_are_named() {
    let places = places(4);
    let ids = three(&places);
    let told = |what: &str| {
        let error = read_all(&places[2]).unwrap_err();
        let told = error.to_string();
        assert!(
            told.contains(&ids[0].to_string()) && told.contains("../0"),
            "{told}"
        );
        assert!(told.contains(what), "{told}");
    };
    places[0].remove(&ids[0].pages_name()).unwrap();
    told("is missing");
    let manifest = get(&places[0], "manifest.img");
    places[0].remove("manifest.img").unwrap();
    told("there is no image");
    put(&places[0], "manifest.img", &manifest);
    // Its mark says that the next layer needs it; without that it can be replaced.
    places[0].remove(&format!("child-{}.img", ids[1])).unwrap();
    let writer = Writer::create(Arc::new(places[0].clone())).unwrap();
    data(&writer, 1, 0, &[9]);
    let other = writer.seal(Seal::default()).unwrap();
    told(&other.to_string());
    places[2].put_beside("../0", &places[3]);
    told("there is no image");
}

#[test]
fn a_needed_image_is_not_replaced() {
    let places = places(3);
    let ids = three(&places);
    for (number, child) in [(0, ids[1]), (1, ids[2])] {
        let error = Writer::create(Arc::new(places[number].clone()))
            .err()
            .unwrap();
        match &error {
            Error::Needed {
                id,
                child: named,
                path,
            } => {
                assert_eq!((*id, *named), (ids[number], child));
                assert_eq!(*path, format!("../{}", number + 1));
            }
            error => panic!("{error}"),
        }
        assert_eq!(
            image::children(&places[number]).unwrap(),
            [(child, format!("../{}", number + 1))]
        );
    }
    // The newest is nobody's parent; what takes its place makes the mark of the old one stale.
    let writer = Writer::create(Arc::new(places[2].clone())).unwrap();
    data(&writer, 1, 0, &[7]);
    writer.seal(Seal::default()).unwrap();
    assert!(image::children(&places[1]).unwrap().is_empty());
    let writer = Writer::create(Arc::new(places[1].clone())).unwrap();
    assert!(
        !places[1]
            .list()
            .unwrap()
            .iter()
            .any(|name| name.starts_with("child-"))
    );
    data(&writer, 1, 0, &[7]);
    writer.seal(Seal::default()).unwrap();
    drop(Writer::create(Arc::new(places[0].clone())).unwrap());
}

#[test]
fn what_is_inherited_is_in_the_parent() {
    let places = places(2);
    let writer = over(&places, 0);
    data(&writer, 1, 4, &[1, 2]);
    let error = writer.inherit(SpaceId(1), 4, 1).unwrap_err();
    assert!(matches!(error, Error::BadRun { page: 4, .. }), "{error}");
    writer.seal(Seal::default()).unwrap();
    let writer = over(&places, 1);
    for (space, first_page, pages, bad) in [(1, 3, 2, 3), (1, 5, 2, 6), (2, 4, 1, 4)] {
        match writer
            .inherit(SpaceId(space), first_page, pages)
            .unwrap_err()
        {
            Error::BadRun { page, what, .. } => {
                assert_eq!(page, bad);
                assert!(what.contains("does not describe"), "{what}");
            }
            error => panic!("{error}"),
        }
    }
    // Overlaps are found when it is sealed.
    writer.inherit(SpaceId(1), 4, 2).unwrap();
    data(&writer, 1, 5, &[9]);
    let error = writer.seal(Seal::default()).unwrap_err();
    assert!(matches!(error, Error::BadRun { page: 5, .. }), "{error}");
    assert!(places[1].list().unwrap().is_empty());
    assert!(image::children(&places[0]).unwrap().is_empty());
}

#[test]
fn a_layer_of_which_all_is_new_needs_no_parent() {
    let places = places(2);
    let writer = over(&places, 0);
    data(&writer, 1, 0, &[1, 0]);
    writer.mark(Run {
        space: SpaceId(1),
        first_page: 2,
        pages: 5,
        kind: RunKind::Zero,
    });
    writer.seal(Seal::default()).unwrap();
    let writer = over(&places, 1);
    data(&writer, 1, 0, &[2, 3]);
    // What is zero is said to be zero, whoever said it first.
    writer.inherit(SpaceId(1), 2, 5).unwrap();
    writer.seal(Seal::default()).unwrap();
    let reader = Reader::open(&places[1]).unwrap();
    assert_eq!((reader.parent(), reader.ancestors().len()), (None, 0));
    assert!(image::children(&places[0]).unwrap().is_empty());
}

#[test]
fn the_parent_is_where_it_is_said_to_be() {
    let places = places(3);
    three(&places);
    let parent = || Arc::new(Reader::open(&places[1]).unwrap());
    let create = |number: usize, to: usize| {
        Writer::create_layer(Arc::new(places[number].clone()), parent(), link(to, number))
            .err()
            .unwrap()
            .to_string()
    };
    assert!(create(2, 0).contains("is not there"));
    assert!(create(2, 7).contains("cannot be opened"));
    assert!(create(1, 1).contains("in the very place"));
}

#[test]
fn long_chains_name_the_oldest_directly() {
    const LAYERS: usize = 200;
    let places = places(LAYERS);
    for number in 0..LAYERS {
        let writer = over(&places, number);
        data(&writer, 1, number as u64, &[number as u8]);
        if number > 0 {
            writer.inherit(SpaceId(1), 0, number as u64).unwrap();
        }
        writer.record(Record {
            tag: 1,
            version: 1,
            id: 0,
            payload: vec![],
        });
        writer.seal(Seal::default()).unwrap();
    }
    let reader = Reader::open(&places[LAYERS - 1]).unwrap();
    assert_eq!(reader.ancestors().len(), LAYERS - 1);
    assert!(
        reader
            .ancestors()
            .iter()
            .all(|one| one.path.len() <= "../999".len())
    );
    let mut bytes = vec![0; LAYERS * PAGE_BYTES];
    reader.read_pages(SpaceId(1), 0, &mut bytes).unwrap();
    let fills = bytes.chunks(PAGE_BYTES).map(|page| page[4095]);
    assert!(fills.eq((0..LAYERS).map(|number| number as u8)));
}

#[test]
fn chains_survive_in_directories_and_when_all_move_together() {
    let scratch = tempfile::tempdir().unwrap();
    let old = scratch.path().join("old");
    let path = |number: usize| old.join(format!("{number}"));
    let mut models = vec![Model::new()];
    let spaces = [vec![
        Step::Parent(5),
        Step::Data(300),
        Step::Parent(400),
        Step::Data(2),
    ]];
    for number in 0..4 {
        let store = Arc::new(Directory::create(path(number)).unwrap());
        let writer = match number.checked_sub(1) {
            None => Writer::create(store).unwrap(),
            Some(parent) => {
                let link = Link {
                    to_parent: store::way(&path(number), &path(parent)).unwrap(),
                    to_child: store::way(&path(parent), &path(number)).unwrap(),
                };
                assert_eq!(link.to_parent, format!("../{parent}"));
                let reader = Reader::open(&Directory::open(path(parent)).unwrap()).unwrap();
                Writer::create_layer(store, Arc::new(reader), link).unwrap()
            }
        };
        models.push(write(&writer, number, &spaces, &models[number]));
        writer.seal(Seal::default()).unwrap();
        let sign = std::fs::read_link(path(number).join("parent"));
        match number.checked_sub(1) {
            None => assert!(sign.is_err()),
            Some(parent) => {
                assert_eq!(sign.unwrap(), std::path::Path::new(&format!("../{parent}")))
            }
        }
    }
    let new = scratch.path().join("new");
    std::fs::rename(&old, &new).unwrap();
    for number in 0..4 {
        let store = Directory::open(new.join(format!("{number}"))).unwrap();
        compare(&Reader::open(&store).unwrap(), &models[number + 1]);
    }
    let gone: Range<usize> = 0..1;
    for number in gone {
        std::fs::remove_dir_all(new.join(format!("{number}"))).unwrap();
    }
    let reader = Reader::open(&Directory::open(new.join("3")).unwrap()).unwrap();
    let error = reader.verify_all(1).unwrap_err();
    assert!(error.to_string().contains("../0"), "{error}");
}
