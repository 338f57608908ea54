//! What every store must do; each implementation's tests run this suite.
#![allow(clippy::unwrap_used)] // a test

use crate::{Error, NAME_MAX_BYTES, Object, Store};

/// Runs everything against stores made by `make`, a new and empty one at each call.
pub fn suite(make: &dyn Fn() -> Box<dyn Store>) {
    let cases: &[fn(&dyn Store)] = &[
        an_empty_store_has_nothing,
        committed_objects_are_whole,
        uncommitted_objects_are_invisible,
        dropped_objects_are_gone,
        what_was_written_is_read_back,
        freed_parts_read_as_zero,
        a_new_object_is_freed_in_parts_and_cut,
        replacing_keeps_open_objects,
        ranges_are_read_together,
        gaps_read_as_zero,
        reserving_does_not_change_the_length,
        threads_write_one_object,
        reads_past_the_end_are_short,
        removed_objects_are_gone,
        names_are_listed_in_order,
        bad_names_are_refused,
        a_descriptor_reads_the_same,
        one_claim_at_a_time,
    ];
    for case in cases {
        case(&*make());
    }
}

/// Commits an object with these contents.
///
/// # Panics
/// When the store refuses.
pub fn put(store: &dyn Store, name: &str, bytes: &[u8]) {
    let new = store.create(name).unwrap();
    new.write_at(bytes, 0).unwrap();
    new.commit(false).unwrap();
}

fn contents(object: &dyn Object) -> Vec<u8> {
    let mut bytes = vec![0xee; object.len_bytes() as usize];
    object.read_at(&mut bytes, 0).unwrap();
    bytes
}

/// The contents of an object.
///
/// # Panics
/// When the store refuses.
pub fn get(store: &dyn Store, name: &str) -> Vec<u8> {
    contents(&*store.open(name).unwrap())
}

fn is_missing(store: &dyn Store, name: &str) -> bool {
    matches!(store.open(name), Err(Error::Missing { name: missing, .. }) if missing == name)
}

fn an_empty_store_has_nothing(store: &dyn Store) {
    assert!(store.list().unwrap().is_empty());
    assert!(is_missing(store, "one"));
    assert!(matches!(store.remove("one"), Err(Error::Missing { .. })));
    assert!(!store.place().is_empty());
}

fn committed_objects_are_whole(store: &dyn Store) {
    for durable in [false, true] {
        let new = store.create("one").unwrap();
        new.write_at(b"world", 6).unwrap();
        new.write_at(b"hello ", 0).unwrap();
        new.write_at(b"", 1000).unwrap();
        new.commit(durable).unwrap();
        assert_eq!(get(store, "one"), b"hello world");
        assert_eq!(store.open("one").unwrap().name(), "one");
        store.remove("one").unwrap();
    }
    store.create("empty").unwrap().commit(true).unwrap();
    assert_eq!(store.open("empty").unwrap().len_bytes(), 0);
}

fn what_was_written_is_read_back(store: &dyn Store) {
    let new = store.create("one").unwrap();
    new.write_at(b"world", 6).unwrap();
    let mut bytes = [0; 3];
    new.read_at(&mut bytes, 7).unwrap();
    assert_eq!(&bytes, b"orl");
    new.write_at(b"xx", 7).unwrap();
    new.read_at(&mut bytes, 6).unwrap();
    assert_eq!(&bytes, b"wxx");
    let past = new.read_at(&mut bytes, 9);
    assert!(matches!(past, Err(Error::Short { len_bytes: 11, .. })));
    new.commit(false).unwrap();
    assert_eq!(get(store, "one")[6..], *b"wxxld");
}

fn freed_parts_read_as_zero(store: &dyn Store) {
    const PAGE: u64 = 4096;
    put(store, "one", &[7; 5 * PAGE as usize]);
    let none = store.free("one", std::slice::from_ref(&(9 * PAGE..10 * PAGE)));
    if let Err(Error::System { source, .. }) = &none
        && source.kind() == std::io::ErrorKind::Unsupported
    {
        assert_eq!(get(store, "one"), [7; 5 * PAGE as usize]);
        return;
    }
    assert_eq!(none.unwrap(), 0);
    assert!(matches!(
        store.free("two", std::slice::from_ref(&(0..PAGE))),
        Err(Error::Missing { .. })
    ));
    let freed = store.free(
        "one",
        &[PAGE..2 * PAGE, 3 * PAGE..3 * PAGE, 4 * PAGE..9 * PAGE],
    );
    assert!(freed.unwrap() <= 2 * PAGE);
    let pages = get(store, "one");
    let pages = pages
        .chunks(PAGE as usize)
        .map(|page| (page[0], page[PAGE as usize - 1]));
    assert_eq!(
        pages.collect::<Vec<_>>(),
        [(7, 7), (0, 0), (7, 7), (7, 7), (0, 0)]
    );
}

fn a_new_object_is_freed_in_parts_and_cut(store: &dyn Store) {
    const PAGE: usize = 4096;
    let new = store.create("one").unwrap();
    new.reserve(9 * PAGE as u64).unwrap();
    new.write_at(&[7; 5 * PAGE], 0).unwrap();
    let page = |number: usize| (number * PAGE) as u64;
    new.free(&[page(1)..page(2), page(3)..page(3)]).unwrap();
    new.cut(page(4)).unwrap();
    let past = new.read_at(&mut [0], page(4));
    assert!(matches!(past, Err(Error::Short { .. })));
    new.commit(false).unwrap();
    let bytes = get(store, "one");
    assert_eq!(bytes.len(), 4 * PAGE);
    for (number, page) in bytes.chunks(PAGE).enumerate() {
        let freed = number == 1 && page.iter().all(|byte| *byte == 0);
        assert!(freed || page.iter().all(|byte| *byte == 7), "{number}");
    }
    store.create("one").unwrap().cut(0).unwrap();
}

fn uncommitted_objects_are_invisible(store: &dyn Store) {
    let first = store.create("one").unwrap();
    let second = store.create("one").unwrap();
    first.write_at(b"first", 0).unwrap();
    second.write_at(b"second", 0).unwrap();
    assert!(store.list().unwrap().is_empty());
    assert!(is_missing(store, "one"));
    second.commit(false).unwrap();
    assert_eq!(get(store, "one"), b"second");
    first.commit(false).unwrap();
    assert_eq!(get(store, "one"), b"first");
    assert_eq!(store.list().unwrap(), ["one"]);
}

fn dropped_objects_are_gone(store: &dyn Store) {
    put(store, "one", b"old");
    let new = store.create("one").unwrap();
    new.write_at(b"new", 0).unwrap();
    drop(new);
    assert_eq!(get(store, "one"), b"old");
    drop(store.create("two").unwrap());
    assert_eq!(store.list().unwrap(), ["one"]);
}

fn replacing_keeps_open_objects(store: &dyn Store) {
    put(store, "one", b"old contents");
    let old = store.open("one").unwrap();
    let mut bytes = [0; 12];
    let mut read = || match old.read_at(&mut bytes, 0) {
        Ok(()) => assert_eq!(&bytes, b"old contents"),
        Err(error) => assert!(matches!(error, Error::Missing { .. }), "{error:?}"),
    };
    put(store, "one", b"new contents");
    read();
    assert_eq!(get(store, "one"), b"new contents");
    store.remove("one").unwrap();
    read();
}

fn ranges_are_read_together(store: &dyn Store) {
    let all: Vec<u8> = (0..=255).cycle().take(100_000).collect();
    put(store, "one", &all);
    let object = store.open("one").unwrap();
    let starts = [90_000_u64, 0, 17, 50_000, 50_000, 99_999];
    let mut parts = starts.map(|start| vec![0_u8; (100_000 - start as usize).min(10_000)]);
    let ranges = starts.iter().zip(&mut parts);
    let mut ranges: Vec<_> = ranges.map(|(at, part)| (*at, &mut part[..])).collect();
    object.read_ranges(&mut ranges).unwrap();
    for (start, part) in starts.iter().zip(&parts) {
        assert_eq!(part, &all[*start as usize..][..part.len()], "{start}");
    }
    let (mut good, mut bad) = ([0; 5], [0; 5]);
    let past = object.read_ranges(&mut [(3, &mut good), (99_998, &mut bad)]);
    assert!(matches!(past, Err(Error::Short { .. })), "{past:?}");
    object.read_ranges(&mut []).unwrap();
}

fn gaps_read_as_zero(store: &dyn Store) {
    let new = store.create("one").unwrap();
    new.write_at(b"x", 9000).unwrap();
    new.commit(false).unwrap();
    let bytes = get(store, "one");
    assert_eq!(bytes.len(), 9001);
    assert!(bytes[..9000].iter().all(|&byte| byte == 0));
}

fn reserving_does_not_change_the_length(store: &dyn Store) {
    let new = store.create("one").unwrap();
    new.reserve(1 << 16).unwrap();
    new.write_at(b"abc", 0).unwrap();
    new.reserve(0).unwrap();
    new.commit(false).unwrap();
    assert_eq!(get(store, "one"), b"abc");
}

fn threads_write_one_object(store: &dyn Store) {
    const PART_BYTES: usize = 5000;
    let new = store.create("one").unwrap();
    std::thread::scope(|scope| {
        for part in 0..8_u8 {
            let new = &*new;
            scope.spawn(move || {
                let offset_bytes = u64::from(part) * PART_BYTES as u64;
                new.write_at(&[part + 1; PART_BYTES], offset_bytes).unwrap();
            });
        }
    });
    new.commit(false).unwrap();
    let bytes = get(store, "one");
    assert_eq!(bytes.len(), 8 * PART_BYTES);
    for (part, chunk) in bytes.chunks(PART_BYTES).enumerate() {
        assert!(chunk.iter().all(|&byte| usize::from(byte) == part + 1));
    }
}

fn reads_past_the_end_are_short(store: &dyn Store) {
    put(store, "one", b"abc");
    let object = store.open("one").unwrap();
    let mut bytes = [0; 2];
    object.read_at(&mut bytes, 1).unwrap();
    assert_eq!(&bytes, b"bc");
    object.read_at(&mut [], 3).unwrap();
    for offset_bytes in [2, 3, 1 << 40, u64::MAX] {
        let error = object.read_at(&mut bytes, offset_bytes);
        assert!(
            matches!(error, Err(Error::Short { len_bytes: 3, .. })),
            "{offset_bytes}"
        );
    }
}

fn removed_objects_are_gone(store: &dyn Store) {
    put(store, "one", b"abc");
    store.remove("one").unwrap();
    assert!(is_missing(store, "one"));
    assert!(matches!(store.remove("one"), Err(Error::Missing { .. })));
    assert!(store.list().unwrap().is_empty());
}

fn names_are_listed_in_order(store: &dyn Store) {
    for name in ["b", "a-1.img", "C", "a"] {
        put(store, name, b"");
    }
    assert_eq!(store.list().unwrap(), ["C", "a", "a-1.img", "b"]);
}

fn bad_names_are_refused(store: &dyn Store) {
    let long = "x".repeat(NAME_MAX_BYTES + 1);
    for name in [
        "", ".", "..", ".hidden", "a/b", "/a", "../a", "a\0b", "a b", "ä", &long,
    ] {
        assert!(
            matches!(store.create(name), Err(Error::Name { .. })),
            "create {name:?}"
        );
        assert!(
            matches!(store.open(name), Err(Error::Name { .. })),
            "open {name:?}"
        );
        assert!(
            matches!(store.remove(name), Err(Error::Name { .. })),
            "remove {name:?}"
        );
    }
    put(store, &long[1..], b"fits");
}

fn one_claim_at_a_time(store: &dyn Store) {
    put(store, "b", b"");
    put(store, "a", b"");
    let claim = store.claim().unwrap();
    assert_eq!(claim.names, ["a", "b"]);
    assert!(matches!(store.claim(), Err(Error::Busy { .. })));
    put(store, "c", b"");
    assert_eq!(get(store, "c"), b"");
    drop(claim);
    assert_eq!(store.claim().unwrap().names, ["a", "b", "c"]);
    drop(store.claim().unwrap());
}

fn a_descriptor_reads_the_same(store: &dyn Store) {
    put(store, "one", b"hello world");
    let object = store.open("one").unwrap();
    if let Some(fd) = object.as_fd() {
        let mut bytes = [0; 5];
        rustix::io::pread(fd, &mut bytes, 6).unwrap();
        assert_eq!(&bytes, b"world");
    }
}
