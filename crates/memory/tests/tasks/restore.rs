//! Out of an image, into a task.
use std::fs::File;

use abi::{Addr, Span};
use image::Reader;
use memory::Error;
use memory::sink::{Memory, MissingPages};
use pages::sink::Object;
use pages::{Extent, Sink, fill, place};
use sys::process::Process;

use crate::child::{Child, anonymous, extent, part};
use crate::dump::dump;

/// A child with 4,000 pages, 900 of them zero, and its image.
fn original() -> (Child, Span, Reader) {
    let mut child = Child::start();
    let span = child.map("4000", 4000);
    child.put(span, 0, 7, 4000);
    child.put(span, 1100, 0, 900);
    let (store, _) = dump(&child, &[span]);
    (child, span, Reader::open(&*store).expect("an image"))
}

/// Fills `target` with the pages of `from` and tells how many there were.
fn restore(reader: &Reader, from: Span, target: Span, sink: &dyn Sink) -> Result<u64, Error> {
    let extent = Extent {
        at: target.start,
        ..extent(from)
    };
    let placed = place(reader, &[extent])?;
    Ok(fill(reader, &placed, sink, &|_| ())?.pages)
}

/// Kilobytes of huge pages that a task has.
fn huge_kb(pid: i32) -> u64 {
    let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("a rollup");
    let line = smaps
        .lines()
        .find_map(|line| line.strip_prefix("AnonHugePages:"));
    let number = line.and_then(|line| line.split_whitespace().next());
    number.and_then(|number| number.parse().ok()).unwrap_or(0)
}

#[test]
fn fresh_memory_is_filled_through_a_userfaultfd() {
    testkit::needs_program!("python3");
    testkit::needs_root!();
    let (original, span, reader) = original();
    let mut child = Child::start();
    let target = child.map("4000", 4000);
    let sink =
        MissingPages::new(&child.process(), child.uffd(), &[target]).expect("a registration");
    let pages = restore(&reader, span, target, &sink).expect("a restore");
    assert_eq!(pages, 3100);
    drop(sink);
    assert!(child.read(target) == original.read(span));
    // The ranges are the task's own again: it can touch what was not filled.
    child.put(target, 1500, 1, 1);
}

#[test]
fn mappings_that_touch_are_filled_each_by_itself() {
    testkit::needs_program!("python3");
    testkit::needs_root!();
    let (original, span, reader) = original();
    let mut child = Child::start();
    let target = child.map("4000", 4000);
    let mut mappings = Vec::new();
    // Every part differs from its neighbours: in its protection, or in that alone that it does not
    // count as committed memory (MAP_NORESERVE).
    let parts = [
        (0, 7),
        (7, 1),
        (8, 700),
        (708, 500),
        (1208, 1),
        (1209, 2791),
    ];
    for (number, (page, pages)) in parts.into_iter().enumerate() {
        let one = part(target, page, pages);
        let (protection, flags) =
            [(3, 0x32), (2, 0x32), (3, 0x32), (3, 0x4032), (7, 0x4032)][number.min(4)];
        let (start, bytes) = (one.start.0, one.bytes());
        let map = format!("call('mmap', {start}, {bytes}, {protection}, {flags}, -1, 0)");
        assert_eq!(child.ask(&map) as u64, start);
        mappings.push(one);
    }
    let sink =
        MissingPages::new(&child.process(), child.uffd(), &mappings).expect("a registration");
    let pages = restore(&reader, span, target, &sink).expect("a restore");
    assert_eq!(pages, 3100);
    drop(sink);
    let (start, bytes) = (target.start.0, target.bytes());
    child.ask(&format!("call('mprotect', {start}, {bytes}, 1)"));
    assert!(child.read(target) == original.read(span));
}

#[test]
fn a_page_that_is_there_is_overwritten() {
    testkit::needs_program!("python3");
    testkit::needs_root!();
    let (original, span, reader) = original();
    let mut child = Child::start();
    let target = child.map("4000", 4000);
    child.put(target, 3, 66, 2);
    child.put(target, 3000, 66, 1);
    let sink =
        MissingPages::new(&child.process(), child.uffd(), &[target]).expect("a registration");
    restore(&reader, span, target, &sink).expect("a restore");
    drop(sink);
    assert!(child.read(target) == original.read(span));
}

#[test]
fn memory_is_written_whatever_its_protection() {
    testkit::needs_program!("python3");
    let (original, span, reader) = original();
    let mut child = Child::start();
    let target = child.map("4000", 4000);
    for (page, protection) in [(0, 1), (1000, 0)] {
        let start = part(target, page, 1).start.0;
        child.ask(&format!("call('mprotect', {start}, 409600, {protection})"));
    }
    let sink = Memory::new(&child.process());
    restore(&reader, span, target, &sink).expect("a restore");
    child.ask(&format!(
        "call('mprotect', {}, {}, 1)",
        target.start.0,
        target.bytes()
    ));
    assert!(child.read(target) == original.read(span));
}

#[test]
fn private_copies_of_a_file_are_written() {
    testkit::needs_program!("python3");
    let (original, span, reader) = original();
    let mut child = Child::start();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("file");
    let open = format!("20, 3, 2, file({:?}, 20)", path.display().to_string());
    let target = child.map(&open, 20);
    let few = part(span, 250, 10);
    restore(
        &reader,
        few,
        part(target, 5, 10),
        &Memory::new(&child.process()),
    )
    .expect("a restore");
    assert!(child.read(part(target, 5, 10)) == original.read(few));
    assert!(
        child
            .read(part(target, 15, 1))
            .iter()
            .all(|byte| *byte == 16)
    );
    let file = std::fs::read(path).expect("the file");
    assert!(file[5 * 4096..6 * 4096].iter().all(|byte| *byte == 6));
}

#[test]
fn whole_blocks_become_huge_pages_where_allowed() {
    testkit::needs_program!("python3");
    if !std::path::Path::new("/sys/kernel/mm/transparent_hugepage").exists() {
        testkit::skip!("this kernel has no huge pages");
    }
    let (original, span, reader) = original();
    let mut child = Child::start();
    let target = child.map("4000", 4000);
    let sink = Memory::with_huge_pages(&child.process(), child.pidfd());
    let before_kb = huge_kb(child.pid());
    restore(&reader, span, target, &sink).expect("a restore");
    assert!(child.read(target) == original.read(span));
    let made_kb = huge_kb(child.pid()) - before_kb;
    // Blocks 2 and 3 are partly zero, the eighth is short.
    assert!(made_kb <= 5 * 2048, "{made_kb} kB");
    if made_kb == 0 {
        testkit::skip!("the kernel has no huge page at hand");
    }
}

#[test]
fn huge_pages_of_a_task_are_dumped_and_come_back() {
    testkit::needs_program!("python3");
    let mut child = Child::start();
    let span = child.map("1024", 1024);
    child.ask(&format!(
        "call('madvise', {}, {}, 14)",
        span.start.0,
        span.bytes()
    ));
    child.put(span, 0, 5, 1024);
    if huge_kb(child.pid()) == 0 {
        testkit::skip!("the kernel gives no huge pages");
    }
    let found = memory::scan(
        &child.process(),
        &[anonymous(span)],
        &mut memory::PageMaps::default(),
    )
    .expect("a scan");
    assert_eq!(found[0].private, [span]);
    let (store, drained) = dump(&child, &[span]);
    assert_eq!(drained.stored_pages, 1024);
    let reader = Reader::open(&*store).expect("an image");
    let mut other = Child::start();
    let target = other.map("1024", 1024);
    other.ask(&format!(
        "call('madvise', {}, {}, 14)",
        target.start.0,
        target.bytes()
    ));
    restore(&reader, span, target, &Memory::new(&other.process())).expect("a restore");
    assert!(other.read(target) == child.read(span));
}

#[test]
fn shared_objects_are_written_at_offsets() {
    testkit::needs_program!("python3");
    let (original, span, reader) = original();
    let fd = rustix::fs::memfd_create("pages", rustix::fs::MemfdFlags::CLOEXEC).expect("a memfd");
    let file = File::from(fd);
    file.set_len(span.bytes()).expect("a length");
    let object = Object::new(file.try_clone().expect("a descriptor").into());
    restore(&reader, span, Span::new(Addr(0), span.bytes()), &object).expect("a restore");
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
    assert!(std::fs::read(path).expect("the object") == original.read(span));
}

#[test]
fn parts_of_runs_are_filled() {
    testkit::needs_program!("python3");
    let (original, span, reader) = original();
    let mut child = Child::start();
    let target = child.map("4000", 4000);
    let sink = Memory::new(&child.process());
    for (page, pages) in [(3, 2), (700, 3), (1099, 2), (1999, 513)] {
        let (from, to) = (part(span, page, pages), part(target, page, pages));
        restore(&reader, from, to, &sink).expect("a restore");
        assert!(child.read(to) == original.read(from), "{page}");
    }
    assert!(
        child
            .read(part(target, 5, 600))
            .iter()
            .all(|byte| *byte == 0)
    );
}

#[test]
fn damaged_pages_never_reach_the_task() {
    testkit::needs_program!("python3");
    let mut child = Child::start();
    let span = child.map("300", 300);
    child.put(span, 0, 7, 300);
    let folder = tempfile::tempdir().expect("a folder");
    let store = std::sync::Arc::new(store::Directory::open(folder.path()).expect("a store"));
    let writer = image::Writer::create(store.clone()).expect("a writer");
    let source = memory::TaskMemory::new(&child.process());
    pages::drain(&source, &[extent(span)], &writer, &|_| ()).expect("a drain");
    let id = writer.seal(image::Seal::default()).expect("an image");
    let reader = Reader::open(&*store).expect("an image");
    let file = File::options()
        .write(true)
        .open(folder.path().join(id.pages_name()));
    std::os::unix::fs::FileExt::write_at(&file.expect("the pages"), b"?", 5 << 12)
        .expect("a damage");
    let target = child.map("300", 300);
    match restore(&reader, span, target, &Memory::new(&child.process())) {
        Err(Error::Pages(pages::Error::Image {
            source: image::Error::Corrupt { .. },
            ..
        })) => {}
        other => panic!("{other:?}"),
    }
    assert!(child.read(target).iter().all(|byte| *byte == 0));
}

#[test]
fn a_place_that_cannot_be_filled_is_named() {
    testkit::needs_program!("python3");
    testkit::needs_root!();
    let (_original, span, reader) = original();
    let mut child = Child::start();
    let target = child.map("100", 100);
    let hole = part(target, 40, 1);
    child.ask(&format!("call('munmap', {}, 4096)", hole.start.0));
    let sources = part(span, 0, 100);
    match restore(&reader, sources, target, &Memory::new(&child.process())) {
        Err(Error::Write { pid, addr, .. }) => assert_eq!((pid, addr), (child.pid(), hole.start)),
        other => panic!("{other:?}"),
    }
    match MissingPages::new(&child.process(), child.uffd(), &[hole]) {
        Err(Error::Register { pid, span, .. }) => assert_eq!((pid, span), (child.pid(), hole)),
        other => panic!("{other:?}"),
    }
    let pid = child.pid();
    child.kill();
    let outcome = restore(&reader, sources, target, &Memory::new(&Process::new(pid)));
    assert!(
        matches!(outcome, Err(Error::Gone { pid: gone }) if gone == pid),
        "{outcome:?}"
    );
}
