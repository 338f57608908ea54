//! However large a target is, no more than a few megabytes of it are on their way at once.
#![allow(clippy::unwrap_used)]

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use abi::Addr;
use image::{Reader, Seal, SpaceId, Writer};
use pages::{Extent, Result, Sink, Source};

const MIB: usize = 1 << 20;
const PAGES_PER_MIB: u64 = 256;

/// What docs/pages.md says of the way in: this much for each thread, and so many threads.
const IN_BYTES: usize = MIB;
/// The same of the way out.
const OUT_BYTES: usize = 2 * MIB;
const THREADS: usize = 8;

/// Counts the bytes that are handed over at once, and to how many threads.
#[derive(Default)]
struct Gauge {
    now: AtomicUsize,
    most_bytes: AtomicUsize,
    most_threads: AtomicUsize,
}

impl Gauge {
    fn hold<T>(&self, bytes: usize, work: impl FnOnce() -> T) -> T {
        let threads = self.now.fetch_add(1, Relaxed) + 1;
        self.most_threads.fetch_max(threads, Relaxed);
        self.most_bytes.fetch_max(bytes, Relaxed);
        let done = work();
        self.now.fetch_sub(1, Relaxed);
        done
    }

    fn assert_within(&self, bytes: usize) {
        let most = [&self.most_bytes, &self.most_threads].map(|most| most.load(Relaxed));
        assert!(most[0] > 0 && most[0] <= bytes, "{} bytes", most[0]);
        assert!(most[1] <= THREADS, "{} threads", most[1]);
    }
}

/// Pages of which every `nth` has contents.
struct Pages {
    nth: u64,
    gauge: Gauge,
}

impl Source for Pages {
    fn read(&self, extents: &[Extent], buffer: &mut [u8]) -> Result<()> {
        self.gauge.hold(buffer.len(), || {
            let numbers = extents.iter().flat_map(|extent| {
                let first = extent.first_page;
                first..first + extent.pages
            });
            for (number, page) in numbers.zip(buffer.chunks_mut(image::PAGE_BYTES)) {
                page.fill(0);
                if number.is_multiple_of(self.nth) {
                    page[..8].copy_from_slice(&(number + 1).to_le_bytes());
                }
            }
        });
        Ok(())
    }
}

#[derive(Default)]
struct Taken {
    pages: AtomicUsize,
    gauge: Gauge,
}

impl Sink for Taken {
    fn fill(&self, pieces: &[(Addr, &[u8])]) -> Result<()> {
        let bytes = pieces.iter().map(|(_, bytes)| bytes.len()).sum::<usize>();
        self.gauge.hold(bytes, || {
            for (at, bytes) in pieces {
                for (number, page) in (at.page()..).zip(bytes.chunks(image::PAGE_BYTES)) {
                    assert_eq!(page[..8], (number + 1).to_le_bytes());
                    self.pages.fetch_add(1, Relaxed);
                }
            }
        });
        Ok(())
    }
}

/// Moves a target of `mib` in and out, and looks at what was on the way.
fn move_through(mib: u64, nth: u64) {
    let extent = Extent {
        space: SpaceId(1),
        first_page: 0,
        at: Addr(0),
        pages: mib * PAGES_PER_MIB,
    };
    let source = Pages {
        nth,
        gauge: Gauge::default(),
    };
    let store = Arc::new(store::Memory::default());
    let writer = Writer::create(store.clone()).unwrap();
    let drained = pages::drain(&source, &[extent], &writer, &|_| ()).unwrap();
    assert_eq!(drained.read_pages, extent.pages);
    writer.seal(Seal::default()).unwrap();
    source.gauge.assert_within(IN_BYTES);

    let reader = Reader::open(&*store).unwrap();
    let placed = pages::place(&reader, &[extent]).unwrap();
    let sink = Taken::default();
    pages::fill(&reader, &placed, &sink, &|_| ()).unwrap();
    assert_eq!(sink.pages.load(Relaxed) as u64, drained.stored_pages);
    sink.gauge.assert_within(OUT_BYTES);
}

#[test]
fn a_large_target_needs_no_larger_buffers_than_a_small_one() {
    move_through(1, 1);
    move_through(48, 1);
    move_through(48, 3);
    move_through(512, 700);
}
