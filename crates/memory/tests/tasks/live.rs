//! The memory of a running task at one instant: what has to be looked at then, and what not.
use std::sync::Arc;
use std::time::Duration;

use abi::{PAGE_BYTES, Span};
use image::{Reader, Seal, Writer};
use memory::live::{Areas, FEATURES, LiveMemory};

use crate::child::{Child, SPACE, part, stored};

const DONTNEED: u32 = 4;
const GUARD_INSTALL: u32 = 102;
const BLOCK_BYTES: u64 = 16 * PAGE_BYTES;

/// A task whose memory was copied once and is protected.
struct Task {
    child: Child,
    span: Span,
    areas: Areas,
    live: LiveMemory,
    store: Arc<store::Memory>,
    writer: Writer,
}

impl Task {
    /// All pages are there but page `missing`.
    fn start(missing: Option<u64>) -> Self {
        const PAGES: u64 = 2048;
        let mut child = Child::start();
        let span = child.map(&PAGES.to_string(), PAGES);
        child.put(span, 0, 1, PAGES);
        if let Some(page) = missing {
            advise(&mut child, part(span, page, 1), DONTNEED);
        }
        let uffd = child.uffd();
        uffd.api(FEATURES).expect("the features of a live dump");
        let areas = Areas {
            spans: vec![span],
            shared: Vec::new(),
        };
        let tasks = vec![(child.process(), SPACE, uffd, areas.clone())];
        let live = LiveMemory::new(tasks).expect("a live dump");
        let store = Arc::new(store::Memory::default());
        let writer = Writer::create(store.clone()).expect("a writer");
        let task = Self {
            child,
            span,
            areas,
            live,
            store,
            writer,
        };
        let pid = task.child.pid();
        let round = task.live.protect(pid, &task.areas).expect("protected");
        let copied = task.live.copy(pid, &round, &task.writer, &|_| ());
        let there = PAGES - u64::from(missing.is_some());
        assert_eq!(copied.expect("a round"), there * PAGE_BYTES);
        task.protect_ahead();
        task
    }

    fn protect_ahead(&self) {
        let areas = [(self.child.pid(), self.areas.clone())];
        let protected = self.live.protect_ahead(&areas, Duration::from_millis(1));
        protected.expect("protected");
    }

    fn part(&self, page: u64, pages: u64) -> Span {
        part(self.span, page, pages)
    }

    fn put(&mut self, page: u64, byte: u8) {
        self.child.put(self.span, page, byte, 1);
    }

    /// The child waits for orders, and so is as good as stopped.
    fn instant(&self) -> abi::spans::Spans {
        let guards = self.live.begin_instant(self.child.pid(), &self.areas, true);
        guards.expect("an instant")
    }

    fn finish(&self) -> bool {
        let done = self.live.finish(&[self.child.pid()], &self.writer, &|_| ());
        done.expect("copied")
    }

    fn image(self) -> Reader {
        let (_, stored) = self.live.describe(&[self.child.pid()], &self.writer);
        self.writer.describe(stored);
        self.writer.seal(Seal::default()).expect("an image");
        Reader::open(&*self.store).expect("an image")
    }
}

/// madvise(2); returns whether the kernel knows `advice`.
#[track_caller]
fn advise(child: &mut Child, span: Span, advice: u32) -> bool {
    let (start, bytes) = (span.start.0, span.bytes());
    let done = child.ask(&format!("call('madvise', {start}, {bytes}, {advice})"));
    let unknown = -i64::from(rustix::io::Errno::INVAL.raw_os_error());
    assert!(done == 0 || done == unknown, "madvise: {done}");
    done == 0
}

#[test]
fn only_what_was_written_since_is_copied_again() {
    testkit::needs_program!("python3");
    let mut task = Task::start(None);
    task.put(700, 9);
    task.put(2047, 0);
    assert_eq!(task.instant(), []);
    assert_eq!(task.live.stale_bytes(), 2 * BLOCK_BYTES);
    let expected = task.child.read(task.span);
    // What is written now, before or after it was copied, is of another instant.
    for page in [700, 701, 800] {
        task.put(page, 5);
    }
    assert!(task.finish());
    task.put(900, 5);
    let span = task.span;
    assert!(stored(&task.image(), span) == expected);
}

#[test]
fn a_page_that_comes_where_one_was_missing_is_found() {
    testkit::needs_program!("python3");
    let mut task = Task::start(Some(600));
    task.put(600, 7);
    assert_eq!(task.instant(), []);
    assert_eq!(task.live.stale_bytes(), BLOCK_BYTES);
    let expected = task.child.read(task.span);
    assert!(task.finish());
    let span = task.span;
    assert!(stored(&task.image(), span) == expected);
}

#[test]
fn pages_that_were_discarded_are_looked_for_again() {
    testkit::needs_program!("python3");
    let mut task = Task::start(None);
    let discarded = task.part(600, 3);
    assert!(advise(&mut task.child, discarded, DONTNEED));
    task.put(601, 7);
    task.protect_ahead();
    // It is protected again by now, but not all pages beside it that come.
    task.put(602, 8);
    assert_eq!(task.instant(), []);
    let expected = task.child.read(task.part(601, 1000));
    assert!(task.finish());
    let (missing, rest) = (task.part(600, 1).start.page(), task.part(601, 1000));
    let reader = task.image();
    assert_eq!(reader.find(SPACE, missing), None);
    assert!(stored(&reader, rest) == expected);
}

#[test]
fn guard_pages_that_came_unheard_make_another_instant_necessary() {
    testkit::needs_program!("python3");
    let mut task = Task::start(None);
    let guard = task.part(1030, 4);
    if !advise(&mut task.child, guard, GUARD_INSTALL) {
        testkit::skip!("the kernel has no guard pages");
    }
    assert_eq!(task.instant(), []);
    assert!(!task.finish(), "they were pages when they were looked at");
    assert_eq!(task.instant(), [guard]);
    let rest = [task.part(0, 1030), task.part(1034, 1014)];
    let expected = rest.map(|span| task.child.read(span));
    assert!(task.finish());
    let reader = task.image();
    assert_eq!(reader.find(SPACE, guard.start.page()), None);
    assert!(rest.map(|span| stored(&reader, span)) == expected);
}
