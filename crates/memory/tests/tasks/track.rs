//! Which pages a task has written: what the kernel tells, whatever the task does.
use abi::spans::Spans;
use abi::{PAGE_BYTES, Span};
use memory::scan::Area;
use memory::track::{TrackResult, marked, protect, tracked};
use sys::pagemap::{Action, Category, Pagemap, Query, Region};
use sys::process::Process;
use sys::uffd::{Features, Modes, Uffd};

use crate::child::{Child, anonymous, part};

/// A task of which `pages` pages are tracked, all of them written and then protected.
struct Task {
    child: Child,
    uffd: Uffd,
    span: Span,
}

impl Task {
    /// None where the kernel cannot track.
    fn start(pages: u64) -> Option<Self> {
        let mut child = Child::start();
        let span = child.map(&pages.to_string(), pages);
        child.put(span, 0, 1, pages);
        let uffd = child.uffd();
        uffd.api(Features::WP_ASYNC).ok()?;
        uffd.register(span, Modes::WP).expect("registered");
        let task = Self { child, uffd, span };
        assert_eq!(task.written(true), [span]);
        Some(task)
    }

    #[track_caller]
    fn scan_span(&self, span: Span, reset: bool) -> TrackResult {
        let found = tracked(&self.child.process(), &[anonymous(span)], reset);
        found.expect("a scan").remove(0)
    }

    #[track_caller]
    fn scan(&self, reset: bool) -> TrackResult {
        self.scan_span(self.span, reset)
    }

    #[track_caller]
    fn written(&self, reset: bool) -> Spans {
        self.scan(reset).written
    }

    fn put(&mut self, page: u64, pages: u64) {
        self.child.put(self.span, page, 7, pages);
    }

    /// madvise(2) on some pages.
    fn advise(&mut self, page: u64, pages: u64, advice: u32) {
        let (start, bytes) = (self.span.start.0 + page * PAGE_BYTES, pages * PAGE_BYTES);
        let done = self
            .child
            .ask(&format!("call('madvise', {start}, {bytes}, {advice})"));
        assert_eq!(done, 0);
    }

    fn part(&self, page: u64, pages: u64) -> Span {
        part(self.span, page, pages)
    }
}

const DONTNEED: u32 = 4;

macro_rules! start {
    ($pages:expr) => {{
        testkit::needs_program!("python3");
        match Task::start($pages) {
            Some(task) => task,
            None => testkit::skip!("the kernel cannot track writes"),
        }
    }};
}

/// Small enough to be asked for exactly, and large enough to be looked at fast.
const SIZES: [u64; 2] = [40, 4096];

#[test]
fn writes_since_the_last_reset_are_found() {
    for pages in SIZES {
        let mut task = start!(pages);
        let found = task.scan(true);
        assert_eq!(
            (found.written, found.unwritten),
            (Spans::new(), Spans::of([task.span]))
        );
        task.put(5, 2);
        task.put(30, 1);
        let written = [task.part(5, 2), task.part(30, 1)];
        let rest = [(0, 5), (7, 23), (31, pages - 31)].map(|(page, pages)| task.part(page, pages));
        for _ in 0..2 {
            let found = task.scan(false);
            assert_eq!(
                (&found.written[..], &found.unwritten[..]),
                (&written[..], &rest[..])
            );
            assert!(found.is_tracked);
        }
        assert_eq!(task.written(true), written);
        assert_eq!(task.written(true), []);
        // Reading is no write, from outside neither.
        task.child.ask(&format!(
            "len(ctypes.string_at({}, 8192))",
            task.span.start.0
        ));
        task.child.read(task.span);
        assert_eq!(task.written(true), []);
        // But a write from outside is one.
        sys::vm::write(&task.child.process(), task.part(9, 1).start, &[1]).expect("written");
        assert_eq!(task.written(true), [task.part(9, 1)]);
    }
}

#[test]
fn writes_of_the_kernel_are_found() {
    for pages in SIZES {
        let mut task = start!(pages);
        let at = task.part(12, 1).start.0;
        let got = task.child.ask(&format!("call('getrandom', {at}, 10, 0)"));
        assert_eq!(got, 10);
        assert_eq!(task.written(true), [task.part(12, 1)]);
    }
}

#[test]
fn pages_that_were_given_up_are_neither() {
    for pages in SIZES {
        let mut task = start!(pages);
        task.advise(10, 4, DONTNEED);
        let rest = [task.part(0, 10), task.part(14, pages - 14)];
        for reset in [false, true, false] {
            let found = task.scan(reset);
            assert_eq!((found.written.len(), &found.unwritten[..]), (0, &rest[..]));
        }
        // Reading maps the page of zeros; writing makes a new page.
        let at = task.part(10, 1).start.0;
        task.child
            .ask(&format!("len(ctypes.string_at({at}, 4096))"));
        let found = task.scan(true);
        assert_eq!((found.written.len(), &found.unwritten[..]), (0, &rest[..]));
        task.put(10, 2);
        assert_eq!(task.written(true), [task.part(10, 2)]);
        assert_eq!(task.written(true), []);
    }
}

#[test]
fn pages_whose_page_table_is_gone_are_neither() {
    let mut task = start!(4096);
    // Two page tables and a bit: the kernel may free them.
    task.advise(500, 1100, DONTNEED);
    let rest = [task.part(0, 500), task.part(1600, 4096 - 1600)];
    for reset in [false, true, false] {
        let found = task.scan(reset);
        assert_eq!((found.written.len(), &found.unwritten[..]), (0, &rest[..]));
    }
    task.advise(0, 4096, DONTNEED);
    let found = task.scan(true);
    assert_eq!(
        (found.written, found.unwritten),
        (Spans::new(), Spans::new())
    );
    task.put(700, 1);
    assert_eq!(task.written(true), [task.part(700, 1)]);
}

#[test]
fn memory_that_was_never_touched_is_not_protected() {
    testkit::needs_program!("python3");
    let mut child = Child::start();
    let span = child.map("4096", 4096);
    let uffd = child.uffd();
    if uffd.api(Features::WP_ASYNC).is_err() {
        testkit::skip!("the kernel cannot track writes");
    }
    uffd.register(span, Modes::WP).expect("registered");
    let scan = |reset| {
        tracked(&child.process(), &[anonymous(span)], reset)
            .expect("a scan")
            .remove(0)
    };
    let nothing = TrackResult {
        is_tracked: true,
        ..TrackResult::default()
    };
    assert_eq!(scan(true), nothing);
    assert_eq!(scan(true), nothing);
    child.put(span, 3, 1, 1);
    let found = tracked(&child.process(), &[anonymous(span)], true)
        .expect("a scan")
        .remove(0);
    assert_eq!(
        (found.written, found.unwritten),
        (Spans::of([part(span, 3, 1)]), Spans::new())
    );
}

#[test]
fn a_childs_memory_is_not_tracked_and_starts_unprotected() {
    for pages in SIZES {
        let mut task = start!(pages);
        let forked = task.child.ask(&format!("fork({}, 3)", task.span.start.0)) as i32;
        let mut all =
            tracked(&Process::new(forked), &[anonymous(task.span)], true).expect("a scan");
        let found = all.remove(0);
        assert!(!found.is_tracked);
        assert_eq!(
            (found.written, found.unwritten),
            (Spans::of([task.span]), Spans::new())
        );
        assert!(!has_bits(forked, task.span));
        // Sharing a page by copy-on-write does not make it written, nor does a write to the copy.
        assert_eq!(task.written(false), []);
        task.put(6, 1);
        assert_eq!(task.written(true), [task.part(6, 1)]);
    }
}

/// Whether pages count as protected although nobody protected them there.
fn has_bits(pid: i32, span: Span) -> bool {
    let query = Query {
        inverted: Category::WRITTEN,
        all: Category::WRITTEN,
        any: Category::PRESENT | Category::SWAPPED,
        told: Category::WRITTEN,
    };
    let map = Pagemap::open(&Process::new(pid)).expect("a page map");
    let mut regions = [Region::EMPTY; 4];
    let (found, _) = map
        .scan(span, &query, Action::empty(), &mut regions)
        .expect("a scan");
    found > 0
}

#[test]
fn a_mapping_that_moves_loses_its_protection() {
    for pages in SIZES {
        let mut task = start!(pages);
        let bytes = pages * PAGE_BYTES;
        let to = task.child.map(&pages.to_string(), pages);
        let moved = format!(
            "call('mremap', {}, {bytes}, {bytes}, 3, {})",
            task.span.start.0, to.start.0
        );
        task.child
            .ask("setattr(libc.mremap, 'restype', ctypes.c_void_p) or 0");
        assert_eq!(task.child.ask(&moved) as u64, to.start.0);
        let found = task.scan_span(to, true);
        assert!(!found.is_tracked);
        assert_eq!(
            (found.written, found.unwritten),
            (Spans::of([to]), Spans::new())
        );
        // Registered again it starts anew.
        task.uffd.register(to, Modes::WP).expect("registered");
        assert!(!has_bits(task.child.pid(), to));
        assert_eq!(task.scan_span(to, true).written, [to]);
        assert_eq!(task.scan_span(to, true).written, []);
        // Nothing is where it was; what is mapped there next is not tracked.
        let gone = task.scan(true);
        assert_eq!((gone.written, gone.unwritten), (Spans::new(), Spans::new()));
        let again = format!(
            "call('mmap', {}, {bytes}, 3, 0x32, -1, 0)",
            task.span.start.0
        );
        assert_eq!(task.child.ask(&again) as u64, task.span.start.0);
        task.put(0, 3);
        let found = task.scan(true);
        assert_eq!(
            (found.is_tracked, found.written),
            (false, Spans::of([task.part(0, 3)]))
        );
    }
}

#[test]
fn marks_that_a_joined_mapping_keeps_are_found_and_lifted() {
    for pages in SIZES {
        let mut task = start!(pages);
        let pid = task.child.pid();
        // Its last page goes elsewhere, is tracked there, and comes back: then both are one
        // mapping, which is not tracked, but what was protected keeps its marks.
        let last = task.part(pages - 1, 1);
        let other = task.child.map("1", 1);
        task.child
            .ask("setattr(libc.mremap, 'restype', ctypes.c_void_p) or 0");
        let mut go = |from: Span, to: Span| {
            let (from, to) = (from.start.0, to.start.0);
            let moved = format!("call('mremap', {from}, 4096, 4096, 3, {to})");
            assert_eq!(task.child.ask(&moved) as u64, to);
        };
        go(last, other);
        task.uffd.register(other, Modes::WP).expect("registered");
        go(other, last);
        if task.scan(false).is_tracked {
            testkit::skip!("the kernel does not join them");
        }
        // Written while nobody looks.
        task.put(5, 2);
        assert_eq!(task.written(false), [task.span]);
        task.uffd
            .register(task.span, Modes::WP)
            .expect("registered");
        let all = marked(&Process::new(pid), &[task.span]).expect("a scan");
        for span in all {
            task.uffd.write_protect(span, false).expect("lifted");
        }
        assert!(!has_bits(pid, task.span));
        assert_eq!(task.written(true), [task.span]);
        assert_eq!(task.written(true), []);
        task.put(6, 1);
        assert_eq!(task.written(true), [task.part(6, 1)]);
    }
}

#[test]
fn nothing_is_believed_of_what_is_tracked_in_part() {
    for pages in SIZES {
        let mut task = start!(pages);
        // The first pages become a mapping of their own.
        let (start, bytes) = (task.span.start.0, 10 * PAGE_BYTES);
        let protect = format!("call('mprotect', {start}, {bytes}, 1)");
        assert_eq!(task.child.ask(&protect), 0);
        assert!(task.scan(false).is_tracked);
        let rest = task.part(10, pages - 10);
        task.uffd.unregister(rest).expect("given up");
        let found = task.scan(true);
        assert!(!found.is_tracked);
        assert_eq!(
            (found.written, found.unwritten),
            (Spans::of([task.span]), Spans::new())
        );
        // The first ones are as they were.
        let first = task.part(0, 10);
        let found = task.scan_span(first, true);
        assert_eq!(
            (found.written, found.unwritten),
            (Spans::new(), Spans::of([first]))
        );
    }
}

#[test]
fn a_mapping_that_grows_in_place_stays_tracked() {
    let mut task = start!(40);
    let small = part(task.span, 0, 20);
    // The second half goes, and comes back by growth.
    let half = part(task.span, 20, 20);
    assert_eq!(
        task.child.ask(&format!(
            "call('munmap', {}, {})",
            half.start.0,
            half.bytes()
        )),
        0
    );
    task.child
        .ask("setattr(libc.mremap, 'restype', ctypes.c_void_p) or 0");
    let grown = format!(
        "call('mremap', {}, {}, {}, 0)",
        small.start.0,
        small.bytes(),
        task.span.bytes()
    );
    assert_eq!(task.child.ask(&grown) as u64, task.span.start.0);
    let found = task.scan(true);
    assert_eq!(
        (found.written, found.unwritten),
        (Spans::new(), Spans::of([small]))
    );
    task.put(30, 1);
    assert_eq!(task.written(true), [task.part(30, 1)]);
}

#[test]
fn protection_of_another_kind_changes_nothing() {
    for pages in SIZES {
        let mut task = start!(pages);
        let protect = |task: &mut Task, prot: u32| {
            let (start, bytes) = (task.span.start.0, pages * PAGE_BYTES);
            let done = task
                .child
                .ask(&format!("call('mprotect', {start}, {bytes}, {prot})"));
            assert_eq!(done, 0);
        };
        protect(&mut task, 0);
        assert_eq!(task.written(true), []);
        protect(&mut task, 3);
        assert_eq!(task.written(true), []);
        task.put(8, 1);
        protect(&mut task, 1);
        assert_eq!(task.written(true), [task.part(8, 1)]);
    }
}

#[test]
fn exec_leaves_a_memory_that_is_not_tracked() {
    let mut task = start!(40);
    let pid = task.child.pid();
    assert_eq!(task.child.ask("signal.alarm(0)"), 0);
    task.child
        .order("os.execvp('sh', ['sh', '-c', 'echo 1; exec sleep 1000'])");
    assert_eq!(task.child.answer(), 1);
    let found = tracked(&Process::new(pid), &[anonymous(task.span)], true)
        .expect("a scan")
        .remove(0);
    assert_eq!(
        (found.written, found.unwritten),
        (Spans::new(), Spans::new())
    );
    let dead = task
        .uffd
        .write_protect(task.span, true)
        .expect_err("the memory is gone");
    assert_eq!(dead.raw_os_error(), Some(3), "{dead}");
}

#[test]
fn the_last_descriptor_takes_the_protection_along() {
    let task = start!(4096);
    let Task { child, uffd, span } = task;
    // The task itself still has one: see `Child::uffd`.
    drop(uffd);
    let mut all = child;
    all.ask("os.closerange(3, 100) or 0");
    let found = tracked(&all.process(), &[anonymous(span)], true)
        .expect("a scan")
        .remove(0);
    assert!(!found.is_tracked);
    assert_eq!(
        (found.written, found.unwritten),
        (Spans::of([span]), Spans::new())
    );
    assert!(!has_bits(all.pid(), span));
}

#[test]
fn of_a_file_copied_pages_are_tracked_and_what_was_given_up_is_not_believed() {
    testkit::needs_program!("python3");
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("file");
    let mut child = Child::start();
    let fd = child.ask(&format!("file({:?}, 20)", path.to_str().expect("a name")));
    let span = child.map(&format!("20, 3, 2, {fd}"), 20);
    let uffd = child.uffd();
    if uffd.api(Features::WP_ASYNC).is_err() {
        testkit::skip!("the kernel cannot track writes");
    }
    uffd.register(span, Modes::WP).expect("registered");
    let scan = |child: &Child, reset| {
        let area = Area {
            span,
            file: true,
            apart: false,
        };
        tracked(&child.process(), &[area], reset)
            .expect("a scan")
            .remove(0)
    };
    child.put(span, 4, 7, 4);
    // Clean pages are the file's.
    child.ask(&format!("len(ctypes.string_at({}, 8192))", span.start.0));
    assert_eq!(scan(&child, true).written, [part(span, 4, 4)]);
    assert_eq!(scan(&child, true).unwritten, [part(span, 4, 4)]);
    let (start, bytes) = (part(span, 5, 1).start.0, PAGE_BYTES);
    assert_eq!(
        child.ask(&format!("call('madvise', {start}, {bytes}, {DONTNEED})")),
        0
    );
    let found = scan(&child, true);
    assert_eq!(found.unwritten, [part(span, 4, 1), part(span, 6, 2)]);
    // Whether the kernel leaves a mark or not, the page is the file's again.
    assert!(found.written.is_empty() || found.written == [part(span, 5, 1)]);
    assert_eq!(child.read(part(span, 5, 1)), [6; PAGE_BYTES as usize]);
    child.put(span, 5, 9, 1);
    assert_eq!(scan(&child, true).written, [part(span, 5, 1)]);
}

#[test]
fn guards_are_told_and_left_alone() {
    for pages in SIZES {
        let mut task = start!(pages);
        let (start, bytes) = (task.part(20, 2).start.0, 2 * PAGE_BYTES);
        const GUARD_INSTALL: u32 = 102;
        if task.child.ask(&format!(
            "call('madvise', {start}, {bytes}, {GUARD_INSTALL})"
        )) != 0
        {
            testkit::skip!("the kernel has no guard pages");
        }
        let rest = [task.part(0, 20), task.part(22, pages - 22)];
        for reset in [false, true, false] {
            let found = task.scan(reset);
            assert_eq!((found.written.len(), &found.unwritten[..]), (0, &rest[..]));
            let guards = if reset {
                vec![]
            } else {
                vec![task.part(20, 2)]
            };
            assert_eq!(found.guards, Spans::of(guards));
        }
    }
}

#[test]
fn pages_are_protected_after_the_scan() {
    for pages in SIZES {
        let mut task = start!(pages);
        task.put(3, 2);
        task.put(20, 10);
        let written = task.written(false);
        protect(&task.child.process(), &written).expect("protected");
        assert_eq!(task.written(false), []);
        task.put(4, 1);
        assert_eq!(task.written(true), [task.part(4, 1)]);
    }
}

#[test]
fn many_scattered_writes_are_found() {
    let mut task = start!(8192);
    let start = task.span.start.0;
    task.child.ask(&format!(
        "[put({start}, page, 9) for page in range(1, 8192, 3)][0]"
    ));
    let found = task.scan(true);
    let expected = (0..2731).map(|number| task.part(1 + 3 * number, 1));
    assert!(found.written.iter().copied().eq(expected));
    let unwritten = found.unwritten.iter().map(|span| span.pages()).sum::<u64>();
    assert_eq!(unwritten, 8192 - 2731);
    assert_eq!(task.written(true), []);
}
