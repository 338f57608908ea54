//! Out of a task, into an image.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use abi::Span;
use image::{Reader, RunKind, Seal, Writer};
use memory::{Error, TaskMemory};
use pages::{Drain, DrainSummary, drain, drain_all};

use crate::child::{self, Child, SPACE, extent, part};

/// Drains `spans` of a child into an image in memory.
pub fn dump(child: &Child, spans: &[Span]) -> (Arc<store::Memory>, DrainSummary) {
    let store = Arc::new(store::Memory::default());
    let writer = Writer::create(store.clone()).expect("a writer");
    let extents: Vec<_> = spans.iter().copied().map(extent).collect();
    let source = TaskMemory::new(&child.process());
    let drained = drain(&source, &extents, &writer, &|_| ()).expect("a drain");
    writer.seal(Seal::default()).expect("an image");
    (store, drained)
}

/// The pages of `span` as the image has them.
fn stored(store: &store::Memory, span: Span) -> Vec<u8> {
    child::stored(&Reader::open(store).expect("an image"), span)
}

#[test]
fn contents_arrive_and_zero_pages_take_no_room() {
    testkit::needs_program!("python3");
    let mut child = Child::start();
    let span = child.map("4000", 4000);
    child.put(span, 0, 7, 4000);
    child.put(span, 100, 0, 900);
    child.put(span, 3999, 0, 1);
    let (store, drained) = dump(&child, &[span]);
    assert_eq!((drained.read_pages, drained.zero_pages), (4000, 901));
    assert_eq!(drained.stored_bytes(), 3099 * 4096);
    assert!(stored(&store, span) == child.read(span));
    let reader = Reader::open(&*store).expect("an image");
    let zero = reader
        .find(SPACE, span.start.page() + 500)
        .expect("a zero page");
    assert_eq!((zero.kind, zero.pages), (RunKind::Zero, 900));
}

#[test]
fn many_small_extents_arrive() {
    testkit::needs_program!("python3");
    let mut child = Child::start();
    let span = child.map("3000", 3000);
    child.put(span, 0, 3, 3000);
    let spans: Vec<Span> = (0..1400).map(|number| part(span, number * 2, 1)).collect();
    let (store, drained) = dump(&child, &spans);
    assert_eq!(drained.stored_pages, 1400);
    assert!(
        spans
            .iter()
            .all(|span| stored(&store, *span) == child.read(*span))
    );
}

#[test]
fn memory_without_read_permission_is_read() {
    testkit::needs_program!("python3");
    let mut child = Child::start();
    let span = child.map("40", 40);
    child.put(span, 0, 9, 40);
    let expected = child.read(span);
    let middle = part(span, 10, 20);
    assert_eq!(
        child.ask(&format!(
            "call('mprotect', {}, {}, 0)",
            middle.start.0,
            middle.bytes()
        )),
        0
    );
    let (store, drained) = dump(&child, &[part(span, 0, 15), part(span, 15, 25)]);
    assert_eq!(drained.stored_pages, 40);
    assert!(stored(&store, span) == expected);
}

#[test]
fn a_page_that_is_not_there_is_named() {
    testkit::needs_program!("python3");
    let mut child = Child::start();
    let span = child.map("40", 40);
    child.put(span, 0, 9, 40);
    let hole = part(span, 17, 2);
    child.ask(&format!(
        "call('munmap', {}, {})",
        hole.start.0,
        hole.bytes()
    ));
    let writer = Writer::create(Arc::new(store::Memory::default())).expect("a writer");
    let source = TaskMemory::new(&child.process());
    match drain(&source, &[extent(span)], &writer, &|_| ()).map_err(Error::from) {
        Err(Error::Read { pid, addr, .. }) => assert_eq!((pid, addr), (child.pid(), hole.start)),
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_task_that_dies_meanwhile_is_named() {
    testkit::needs_program!("python3");
    let mut child = Child::start();
    let span = child.map("1000", 1000);
    child.put(span, 0, 9, 1000);
    let writer = Writer::create(Arc::new(store::Memory::default())).expect("a writer");
    let source = TaskMemory::new(&child.process());
    let dying = std::sync::Mutex::new(&mut child);
    let seen_bytes = AtomicU64::new(0);
    let outcome = drain(&source, &[extent(span)], &writer, &|bytes| {
        seen_bytes.store(bytes, Relaxed);
        dying.lock().expect("no panic").kill();
    });
    let outcome = outcome.map_err(Error::from);
    assert!(
        matches!(outcome, Err(Error::Gone { pid }) if pid == child.pid()),
        "{outcome:?}"
    );
    assert!((1..1000 * 4096).contains(&seen_bytes.into_inner()));
}

#[test]
fn several_tasks_share_an_image() {
    testkit::needs_program!("python3");
    let mut children = [Child::start(), Child::start(), Child::start()];
    let spans = [3, 2000, 70].map(|pages| (pages, 1 + (pages % 250) as u8));
    let spans: Vec<Span> = std::iter::zip(&mut children, spans)
        .map(|(child, (pages, byte))| {
            let span = child.map(&pages.to_string(), pages);
            child.put(span, 0, byte, pages);
            span
        })
        .collect();
    let memories = children
        .each_ref()
        .map(|child| TaskMemory::new(&child.process()));
    let extents: Vec<[pages::Extent; 1]> = (0..)
        .zip(&spans)
        .map(|(space, span)| {
            [pages::Extent {
                space: image::SpaceId(space),
                ..extent(*span)
            }]
        })
        .collect();
    let sources: Vec<(&dyn pages::Source, &[pages::Extent])> = std::iter::zip(&memories, &extents)
        .map(|(memory, extents)| (memory as _, &extents[..]))
        .collect();
    let store = Arc::new(store::Memory::default());
    let writer = Writer::create(store.clone()).expect("a writer");
    let drained = drain_all(&sources, &writer, Drain::default()).expect("a drain");
    assert_eq!(drained.stored_pages, 2073);
    writer.seal(Seal::default()).expect("an image");
    let reader = Reader::open(&*store).expect("an image");
    for ((child, span), space) in std::iter::zip(&children, &spans).zip(0..) {
        let mut bytes = vec![0; span.bytes() as usize];
        let read = reader.read_pages(image::SpaceId(space), span.start.page(), &mut bytes);
        read.expect("all pages");
        assert!(bytes == child.read(*span), "space {space}");
    }
}

#[test]
fn progress_reaches_the_end() {
    testkit::needs_program!("python3");
    let mut child = Child::start();
    let span = child.map("2500", 2500);
    child.put(span, 0, 1, 2500);
    let writer = Writer::create(Arc::new(store::Memory::default())).expect("a writer");
    let most_bytes = AtomicU64::new(0);
    let progress = |bytes| {
        most_bytes.fetch_max(bytes, Relaxed);
    };
    let source = TaskMemory::new(&child.process());
    drain(&source, &[extent(span)], &writer, &progress).expect("a drain");
    assert_eq!(most_bytes.into_inner(), span.bytes());
}
