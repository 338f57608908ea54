//! Which pages a task has.
use std::os::fd::AsFd;

use abi::{Addr, Span};
use memory::scan::{Area, ScanResult};
use memory::{CowSharing, PageMaps};
use pages::source::allocated;
use rustix::thread::CapabilitySet;
use sys::process::Process;

use crate::child::{Child, anonymous, part};

fn scan(pid: i32, areas: &[Area]) -> memory::Result<Vec<ScanResult>> {
    memory::scan(&Process::new(pid), areas, &mut PageMaps::default())
}

#[test]
fn only_written_pages_are_private() {
    testkit::needs_program!("python3");
    let mut child = Child::start();
    let span = child.map("100", 100);
    child.put(span, 10, 1, 5);
    child.put(span, 50, 1, 1);
    // Reading maps the page of zeros.
    child.ask(&format!("len(ctypes.string_at({}, 8192))", span.start.0));
    let found = scan(
        child.pid(),
        &[part(span, 0, 12), part(span, 12, 88)].map(anonymous),
    )
    .expect("a scan");
    assert_eq!(found[0].private, [part(span, 10, 2)]);
    assert_eq!(found[1].private, [part(span, 12, 3), part(span, 50, 1)]);
    assert_eq!(found[1].private_pages(), 4);
}

#[test]
fn large_areas_between_small_ones_are_found() {
    testkit::needs_program!("python3");
    let mut child = Child::start();
    let span = child.map("5000", 5000);
    child.put(span, 0, 1, 5000);
    let parts = [(0, 10), (20, 30), (50, 2000), (2050, 2000), (4060, 9)];
    let parts = parts.map(|(page, pages)| part(span, page, pages));
    let found = scan(child.pid(), &parts.map(anonymous)).expect("a scan");
    let found: Vec<&[Span]> = found.iter().map(|found| &found.private[..]).collect();
    assert_eq!(found, parts.each_ref().map(std::slice::from_ref));
}

#[test]
fn more_pieces_than_one_answer_holds_are_found() {
    testkit::needs_program!("python3");
    let mut child = Child::start();
    let span = child.map("6000", 6000);
    child.ask(&format!(
        "[put({}, page, 1) for page in range(0, 6000, 2)][0]",
        span.start.0
    ));
    let found = scan(child.pid(), &[anonymous(span)]).expect("a scan");
    assert_eq!(found[0].private.len(), 3000);
    let expected = (0..3000).map(|number| part(span, number * 2, 1));
    assert!(found[0].private.iter().copied().eq(expected));
}

#[test]
fn of_a_file_only_copied_pages_are_private() {
    testkit::needs_program!("python3");
    let mut child = Child::start();
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("file");
    let open = format!("20, 3, 2, file({:?}, 20)", path.display().to_string());
    let span = child.map(&open, 20);
    child.ask(&format!("len(ctypes.string_at({}, 81920))", span.start.0));
    child.put(span, 4, 200, 2);
    let found = scan(
        child.pid(),
        &[Area {
            span,
            file: true,
            apart: false,
        }],
    )
    .expect("a scan");
    assert_eq!(found[0].private, [part(span, 4, 2)]);
}

#[test]
fn shared_memory_belongs_to_its_object() {
    testkit::needs_program!("python3");
    let mut child = Child::start();
    let span = child.map("30, 3, 1, memfd(30)", 30);
    child.put(span, 3, 1, 4);
    let found = scan(child.pid(), &[anonymous(span)]).expect("a scan");
    assert_eq!(found[0].private, []);
    let path = format!(
        "/proc/{}/map_files/{:x}-{:x}",
        child.pid(),
        span.start.0,
        span.end.0
    );
    let Ok(object) = std::fs::File::open(path) else {
        testkit::skip!("needs CAP_CHECKPOINT_RESTORE to open mapped objects");
    };
    let expected = [Span::new(Addr(3 << 12), 4 << 12)];
    assert_eq!(allocated(object.as_fd()).expect("a search"), expected);
}

#[test]
fn guard_pages_are_told_apart() {
    testkit::needs_program!("python3");
    let mut child = Child::start();
    let span = child.map("10", 10);
    child.put(span, 0, 1, 10);
    let guards = part(span, 4, 3);
    let installed = child.ask(&format!(
        "call('madvise', {}, {}, 102)",
        guards.start.0,
        guards.bytes()
    ));
    if installed != 0 {
        testkit::skip!("this kernel has no guard pages");
    }
    let found = scan(child.pid(), &[anonymous(span)]).expect("a scan");
    assert_eq!(found[0].guards, [guards]);
    assert_eq!(found[0].private, [part(span, 0, 4), part(span, 7, 3)]);
}

#[test]
fn swapped_pages_are_private() {
    testkit::needs_program!("python3");
    let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    if swaps.lines().count() < 2 {
        testkit::skip!("this machine has no swap");
    }
    let mut child = Child::start();
    let span = child.map("16", 16);
    child.put(span, 0, 1, 16);
    // MADV_PAGEOUT
    child.ask(&format!("call('madvise', {}, 65536, 21)", span.start.0));
    let found = scan(child.pid(), &[anonymous(span)]).expect("a scan");
    assert_eq!(found[0].private, [span]);
}

#[test]
fn a_child_shares_what_neither_has_written() {
    testkit::needs_program!("python3");
    let mut parent = Child::start();
    let span = parent.map("64", 64);
    parent.put(span, 0, 1, 64);
    let child = parent.ask(&format!("fork({}, 5, 6, 40)", span.start.0)) as i32;
    parent.put(span, 20, 77, 1);
    let spans = [part(span, 0, 30), part(span, 30, 34)];
    let shared = CowSharing::default()
        .shared_with(
            &parent.process(),
            &Process::new(child),
            &spans,
            &mut PageMaps::default(),
        )
        .expect("a comparison");
    let shared = shared.common;
    let expected = [(0, 5), (7, 13), (21, 19), (41, 23)];
    assert_eq!(
        shared,
        expected.map(|(page, pages)| part(span, page, pages))
    );
}

#[test]
fn sharing_is_found_where_the_kernel_hides_it() {
    testkit::needs_root!();
    testkit::needs_program!("python3");
    // Capabilities are a thread's own, so other tests keep theirs.
    let thread = std::thread::spawn(|| {
        let hidden = CapabilitySet::SYS_ADMIN;
        rustix::thread::remove_capability_from_bounding_set(hidden).expect("a right to drop");
        let mut own = rustix::thread::capabilities(None).expect("the own capabilities");
        own.effective -= hidden;
        own.permitted -= hidden;
        rustix::thread::set_capabilities(None, own).expect("fewer capabilities");
        let mut parent = Child::start();
        let span = parent.map("64", 64);
        parent.put(span, 0, 1, 64);
        let child = parent.ask(&format!("fork({}, 5, 6, 40)", span.start.0)) as i32;
        let shared = CowSharing::default()
            .shared_with(
                &parent.process(),
                &Process::new(child),
                &[span],
                &mut PageMaps::default(),
            )
            .expect("a comparison");
        let shared = shared.common;
        let expected = [(0, 5), (7, 33), (41, 23)];
        assert_eq!(
            shared,
            expected.map(|(page, pages)| part(span, page, pages))
        );
    });
    thread.join().expect("no panic");
}

#[test]
fn a_dead_task_is_named() {
    testkit::needs_program!("python3");
    let mut child = Child::start();
    let span = child.map("10", 10);
    child.kill();
    let outcome = scan(child.pid(), &[anonymous(span)]);
    assert!(
        matches!(outcome, Err(memory::Error::Gone { pid }) if pid == child.pid()),
        "{outcome:?}"
    );
}
