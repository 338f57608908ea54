//! Memory of this very process, served as a target's: every page that is read is the image's, zero
//! where it was given up, or what was written; and every difference is exactly what was changed.
#[path = "target/live.rs"]
mod live;

use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::Relaxed};

use abi::{Addr, PAGE_BYTES, Span};
use image::{
    Granule, Link, NewRun, NewSpace, Reader, Run, RunKind, Seal, SpaceId, SpaceKind, Writer,
};
use rustix::mm::{MapFlags, ProtFlags};
use rustix::pipe::{PipeFlags, pipe_with};
use serve::{Ability, Metrics, Options, Region, Session, Target};
use store::{Directory, Store};
use sys::uffd::{Features, Modes, Uffd};
use testkit::calls::Mapping;
use testkit::huge_pages::HugePages;

const SPACE: SpaceId = SpaceId(1);
const MADV_DONTNEED: i32 = 4;
/// Pages with it are a mapping of their own.
const MADV_DONTFORK: i32 = 10;
const PAGE: usize = PAGE_BYTES as usize;
const HUGE: usize = 2 << 20;

/// What a page holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Holds {
    /// What the image has.
    Image,
    Zero,
    /// The image's page, or zeros, with a word written at its beginning and at its end.
    Written {
        over_zero: bool,
        word: u64,
    },
}

/// What is written to the pipe that who serves watches.
const STOP: &[u8; 1] = b"x";
const INTERRUPT: &[u8; 1] = b"i";

/// Which pages of the image are zero: pieces of all sizes, single pages and whole huge ones.
fn is_zero(page: u64) -> bool {
    let huge = page / 512;
    match huge % 4 {
        0 => false,
        1 => true,
        2 => page % 512 >= 256,
        _ => page.is_multiple_of(3),
    }
}

fn image_word(page: u64, at: usize) -> u64 {
    match is_zero(page) {
        true => 0,
        false => ((page << 16) + at as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15),
    }
}

fn word_of(holds: Holds, page: u64, at: usize) -> u64 {
    match holds {
        Holds::Image => image_word(page, at),
        Holds::Zero => 0,
        Holds::Written { word, .. } if at == 0 || at == PAGE / 8 - 1 => word,
        Holds::Written {
            over_zero: true, ..
        } => 0,
        Holds::Written { .. } => image_word(page, at),
    }
}

/// An image in a folder of its own.
fn image(folder: &std::path::Path, pages: u64) -> Arc<Reader> {
    let store: Arc<dyn Store> = Arc::new(Directory::create(folder).expect("a folder"));
    let writer = Writer::create(store.clone()).expect("a writer");
    writer.space(space(pages));
    for page in 0..pages {
        if is_zero(page) {
            writer.mark(Run {
                space: SPACE,
                first_page: page,
                pages: 1,
                kind: RunKind::Zero,
            });
            continue;
        }
        let words = (0..PAGE / 8).flat_map(|at| image_word(page, at).to_ne_bytes());
        let run = NewRun {
            space: SPACE,
            first_page: page,
            pages: 1,
        };
        let bytes = words.collect::<Vec<_>>();
        writer.append(&bytes, &[run]).expect("stored");
    }
    writer.seal(Seal::default()).expect("sealed");
    Arc::new(Reader::open(&*store).expect("an image"))
}

fn space(len_pages: u64) -> NewSpace {
    NewSpace {
        id: SPACE,
        kind: SpaceKind::Block,
        name: "memory".to_owned(),
        len_pages,
        granule: Granule::Small,
    }
}

/// A target in this process, and who serves it.
struct Served {
    memory: Mapping,
    session: Session,
    stop: (OwnedFd, OwnedFd),
    folder: tempfile::TempDir,
    layers: AtomicU32,
}

fn features(ability: Ability) -> Features {
    let events = Features::EVENT_REMOVE | Features::MISSING_HUGETLBFS;
    match ability {
        Ability::Missing => events,
        Ability::Told => events | Features::WP | Features::WP_HUGETLBFS_SHMEM,
        Ability::Found => {
            events
                | Features::WP
                | Features::WP_HUGETLBFS_SHMEM
                | Features::WP_UNPOPULATED
                | Features::WP_ASYNC
        }
    }
}

impl Served {
    fn begin(granule: Granule, ability: Ability, bytes: usize, unregister: bool) -> Option<Self> {
        let served = Self::begin_with(granule, features(ability), bytes, unregister)?;
        assert_eq!(served.session.ability(), ability);
        Some(served)
    }

    fn begin_with(
        granule: Granule,
        features: Features,
        bytes: usize,
        unregister: bool,
    ) -> Option<Self> {
        let uffd = Uffd::create().ok()?;
        uffd.api(features).ok()?;
        let flags = MapFlags::PRIVATE
            | match granule {
                Granule::Small => MapFlags::empty(),
                _ => MapFlags::HUGETLB | MapFlags::HUGE_2MB,
            };
        let memory = Mapping::anonymous(bytes, ProtFlags::READ | ProtFlags::WRITE, flags).ok()?;
        let span = Span::new(Addr(memory.address()), bytes as u64);
        uffd.register(span, Modes::MISSING).expect("registered");
        let folder = tempfile::tempdir().expect("a folder");
        let image = image(&folder.path().join("0"), span.pages());
        let region = Region {
            at: span.start,
            bytes: span.bytes(),
            space: SPACE,
            first_page: 0,
            granule,
        };
        let target = Target {
            uffd,
            pid: std::process::id().cast_signed(),
            regions: vec![region],
        };
        let options = Options {
            unregister,
            poison: false,
            everything: false,
        };
        let session = Session::begin(target, image, options, Arc::new(Metrics::new()));
        let session = session.expect("it begins");
        Some(Self {
            memory,
            session,
            stop: pipe_with(PipeFlags::CLOEXEC).expect("a pipe"),
            folder,
            layers: AtomicU32::new(0),
        })
    }

    /// Does `work` while faults are answered.
    fn serve<T: Send>(&self, work: impl FnOnce() -> T + Send) -> T {
        let (end, stop) = (&self.stop.0, &self.stop.1);
        let session = &self.session;
        std::thread::scope(|scope| {
            let serving = scope.spawn(|| {
                loop {
                    assert_eq!(session.serve(&[end.as_fd()]).expect("no failure"), 0);
                    let mut told = [0; 1];
                    rustix::io::read(end, &mut told).expect("a byte");
                    if told == *STOP {
                        return;
                    }
                }
            });
            let done = scope.spawn(work).join();
            rustix::io::write(stop, STOP).expect("it is read");
            serving.join().expect("it does not panic");
            done.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Has who serves look at what it watches, and serve again.
    fn interrupt(&self) {
        rustix::io::write(&self.stop.1, INTERRUPT).expect("it is read");
    }

    fn load(&self, page: u64, at: usize) -> u64 {
        self.memory.load(page as usize * PAGE + at * 8)
    }

    fn write(&self, page: u64, word: u64) {
        self.memory.store(page as usize * PAGE, word);
        self.memory.store(page as usize * PAGE + PAGE - 8, word);
    }

    fn give_up(&self, pages: Range<u64>) {
        let bytes = pages.start as usize * PAGE..pages.end as usize * PAGE;
        self.memory.advise(bytes, MADV_DONTNEED).expect("given up");
    }

    #[track_caller]
    fn check(&self, page: u64, holds: Holds) {
        for at in [0, 1, PAGE / 16, PAGE / 8 - 1] {
            let (is, was) = (self.load(page, at), word_of(holds, page, at));
            assert_eq!(is, was, "page {page} word {at}: {holds:?}");
        }
    }

    /// Writes a difference while nobody writes; the image that it is, in all.
    fn diff(&self) -> (serve::Difference, Reader) {
        let (difference, writer, store) = self.begin_diff();
        (difference, self.finish_diff(writer, &*store))
    }

    /// The same up to where the image is sealed.
    fn begin_diff(&self) -> (serve::Difference, Writer, Arc<dyn Store>) {
        let (writer, store) = self.writer();
        let difference = self.session.diff(&writer).expect("a difference");
        (difference, writer, store)
    }

    /// For the next layer.
    fn writer(&self) -> (Writer, Arc<dyn Store>) {
        let path = |layer: u32| self.folder.path().join(layer.to_string());
        let layer = self.layers.load(Relaxed);
        let parent = Directory::open(path(layer)).expect("the last layer");
        let parent = Arc::new(Reader::open(&parent).expect("an image"));
        let store: Arc<dyn Store> = Arc::new(Directory::create(path(layer + 1)).expect("a folder"));
        let link = Link {
            to_parent: format!("../{layer}"),
            to_child: format!("../{}", layer + 1),
        };
        let writer = Writer::create_layer(store.clone(), parent, link).expect("a writer");
        (writer, store)
    }

    fn finish_diff(&self, writer: Writer, store: &dyn Store) -> Reader {
        writer.seal(Seal::default()).expect("sealed");
        self.session.kept();
        self.layers.fetch_add(1, Relaxed);
        Reader::open(store).expect("an image")
    }
}

/// Insists that an image holds what the model says.
#[track_caller]
fn compare(reader: &Reader, model: &[Holds], what: &str) {
    for (page, holds) in model.iter().enumerate() {
        let mut bytes = vec![0; PAGE];
        reader
            .read_pages(SPACE, page as u64, &mut bytes)
            .expect("read");
        for (at, word) in bytes.chunks_exact(8).enumerate() {
            let word = u64::from_ne_bytes(word.try_into().expect("8 bytes"));
            let expected = word_of(*holds, page as u64, at);
            assert_eq!(word, expected, "{what}: page {page} word {at}: {holds:?}");
        }
    }
}

const ABILITIES: [Ability; 3] = [Ability::Missing, Ability::Told, Ability::Found];

/// Does `test` with each ability, kind of page, and with and without taking empty pages out.
fn each(bytes: usize, test: impl Fn(&Served, Granule, &str)) {
    for granule in [Granule::Small, Granule::Large] {
        let pages = match granule {
            Granule::Small => None,
            _ => match HugePages::reserve((bytes / HUGE) as u64 + 1) {
                Err(error) => {
                    eprintln!("skipped: huge pages cannot be reserved: {error}");
                    continue;
                }
                Ok(pages) => Some(pages),
            },
        };
        for ability in ABILITIES {
            for unregister in [true, false] {
                let what = format!("{granule:?} {ability} unregister {unregister}");
                match Served::begin(granule, ability, bytes, unregister) {
                    Some(served) => test(&served, granule, &what),
                    None => eprintln!("skipped: no userfaultfd for {what}"),
                }
            }
        }
        drop(pages);
    }
}

#[test]
fn what_is_read_is_the_images_and_what_is_empty_costs_nothing() {
    const BYTES: usize = 8 * HUGE;
    each(BYTES, |served, granule, what| {
        let pages = (BYTES / PAGE) as u64;
        served.serve(|| {
            for page in (0..pages).rev().step_by(7).chain(0..pages) {
                served.check(page, Holds::Image);
            }
        });
        let progress = served.session.progress();
        assert_eq!(progress.remaining_bytes, 0, "{what}");
        let native = match what.ends_with("true") {
            true => native_bytes(pages, granule),
            false => 0,
        };
        assert_eq!(progress.native_bytes, native, "{what}");
    });
}

/// What is empty, and worth being taken out.
fn native_bytes(pages: u64, granule: Granule) -> u64 {
    let least = granule.pages().max(16);
    let empty = |first: &u64| (*first..*first + least).all(|page| page < pages && is_zero(page));
    let ends = match granule {
        // A piece of so many pages begins at each page of an empty part but the last ones.
        Granule::Small => (0..pages)
            .filter(|page| (page.saturating_sub(least - 1)..=*page).any(|first| empty(&first)))
            .count() as u64,
        _ => least * (0..pages).step_by(least as usize).filter(empty).count() as u64,
    };
    ends * PAGE as u64
}

#[test]
fn three_generations_of_differences_are_exact() {
    const BYTES: usize = 8 * HUGE;
    each(BYTES, |served, granule, what| {
        if served.session.ability() == Ability::Missing {
            return;
        }
        let pages = (BYTES / PAGE) as u64;
        let mut model = vec![Holds::Image; pages as usize];
        for generation in 0..3_u64 {
            let changed = served.serve(|| change(served, granule, &mut model, generation));
            let (difference, reader) = served.diff();
            compare(&reader, &model, &format!("{what}, generation {generation}"));
            // A difference has what was changed, and little else: of huge pages, too.
            let stored = difference.stored_pages;
            assert!(
                stored <= changed,
                "{what}: {changed} changed, {difference:?}"
            );
        }
        served.serve(|| {
            for (page, holds) in model.iter().enumerate() {
                served.check(page as u64, *holds);
            }
        });
        let (difference, _) = served.diff();
        assert_eq!(difference.stored_pages, 0, "{what}: {difference:?}");
    });
}

/// Reads, writes and gives up some pages; how many were written.
fn change(served: &Served, granule: Granule, model: &mut [Holds], generation: u64) -> u64 {
    let pages = model.len() as u64;
    let mut written = 0;
    let mut write = |model: &mut [Holds], page: u64| {
        let holds = model[page as usize];
        let over_zero = match holds {
            Holds::Image => false,
            Holds::Zero => true,
            Holds::Written { over_zero, .. } => over_zero,
        };
        let word = ((generation + 1) << 32) | page;
        served.write(page, word);
        model[page as usize] = Holds::Written { over_zero, word };
        written += 1;
    };
    for page in (generation * 3..pages).step_by(61) {
        served.check(page, model[page as usize]);
    }
    for page in (generation * 5..pages).step_by(97) {
        write(model, page);
    }
    // Given up before they came, after they were read, after they were written; written again.
    let size = granule.pages();
    let first = (generation * 700) % (pages - 4 * size) / size * size;
    let removed = match granule {
        Granule::Small => first..first + 300,
        _ => first..first + 2 * size,
    };
    served.give_up(removed.clone());
    model[removed.start as usize..removed.end as usize].fill(Holds::Zero);
    for page in removed.clone().step_by(50) {
        served.check(page, Holds::Zero);
    }
    for page in removed.step_by(111) {
        write(model, page);
    }
    written
}

#[test]
fn pages_of_several_mappings_come_early_all_the_same() {
    const BYTES: usize = 4 * HUGE;
    each(BYTES, |served, granule, what| {
        // The kernel refuses pages of several mappings together.
        for start in (0..BYTES).step_by(HUGE) {
            let from = match granule {
                Granule::Small => start + 100 * PAGE,
                _ => start,
            };
            let part = from..from + granule.pages() as usize * PAGE;
            served.memory.advise(part, MADV_DONTFORK).expect("divided");
        }
        let fetched = served.serve(|| served.session.fetch(&|| false));
        fetched.expect(what);
        assert_eq!(served.session.progress().remaining_bytes, 0, "{what}");
        served.session.end().expect("it ends");
        (0..BYTES / PAGE).for_each(|page| served.check(page as u64, Holds::Image));
    });
}

#[test]
fn what_is_given_up_before_a_difference_is_sealed_is_in_the_next_one() {
    const BYTES: usize = 8 * HUGE;
    each(BYTES, |served, _, what| {
        if served.session.ability() == Ability::Missing {
            return;
        }
        let mut model = vec![Holds::Image; BYTES / PAGE];
        served.serve(|| (0..2048).for_each(|page| served.check(page, Holds::Image)));
        let (_, writer, store) = served.begin_diff();
        served.serve(|| served.give_up(0..512));
        let reader = served.finish_diff(writer, &*store);
        compare(&reader, &model, &format!("{what}, as it was"));
        model[..512].fill(Holds::Zero);
        compare(&served.diff().1, &model, &format!("{what}, given up"));
    });
}

#[test]
fn what_is_given_up_after_a_difference_failed_is_not_read() {
    const BYTES: usize = 8 * HUGE;
    each(BYTES, |served, _, what| {
        if served.session.ability() == Ability::Missing {
            return;
        }
        let mut model = vec![Holds::Image; BYTES / PAGE];
        served.serve(|| {
            for page in (0..1024).filter(|page| !is_zero(*page)) {
                served.write(page, page + 1);
                let (over_zero, word) = (false, page + 1);
                model[page as usize] = Holds::Written { over_zero, word };
            }
        });
        // It is never sealed: the next one has all of it.
        drop(served.begin_diff());
        served.serve(|| served.give_up(0..512));
        model[..512].fill(Holds::Zero);
        compare(&served.diff().1, &model, what);
        served.serve(|| {
            for (page, holds) in model.iter().enumerate() {
                served.check(page as u64, *holds);
            }
        });
    });
}

#[test]
fn nothing_is_stale_under_fire() {
    const BYTES: usize = 16 * HUGE;
    const ROUNDS: u64 = 10;
    each(BYTES, |served, granule, what| {
        let mut model = vec![Holds::Image; BYTES / PAGE];
        for round in 0..ROUNDS {
            served.serve(|| fire_all(served, granule, &mut model, round));
            if served.session.ability() > Ability::Missing && round % 5 == 4 {
                let (_, reader) = served.diff();
                compare(&reader, &model, &format!("{what}, round {round}"));
            }
        }
    });
}

/// Has four threads fire, each at a part of the memory, while pages are brought in early.
fn fire_all(served: &Served, granule: Granule, model: &mut [Holds], round: u64) {
    const THREADS: usize = 4;
    let stopped = AtomicBool::new(false);
    let slice = model.len() / THREADS;
    std::thread::scope(|scope| {
        let fetching =
            [(); 2].map(|()| scope.spawn(|| served.session.fetch(&|| stopped.load(Relaxed))));
        let parts = model.chunks_mut(slice).enumerate();
        let firing = parts.map(|(part, model)| {
            let seed = round * 1000 + part as u64;
            scope.spawn(move || fire(served, granule, (part * slice) as u64, model, seed))
        });
        let firing = firing.collect::<Vec<_>>();
        for one in firing {
            one.join().expect("no wrong page");
        }
        stopped.store(true, Relaxed);
        for one in fetching {
            one.join().expect("no panic").expect("no failure");
        }
    });
}

/// Does something to pages of one's own, over and over.
fn fire(served: &Served, granule: Granule, first: u64, model: &mut [Holds], seed: u64) {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut below = |limit: u64| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state % limit
    };
    for step in 0..200 {
        let own = below(model.len() as u64);
        // Whoever waits then waits still when it is served again.
        if below(16) == 0 {
            served.interrupt();
        }
        match below(10) {
            0 => {
                let size = granule.pages();
                let start = own / size * size;
                let pages = size * (1 + below(if size == 1 { 64 } else { 2 }));
                let end = (start + pages).min(model.len() as u64);
                served.give_up(first + start..first + end);
                model[start as usize..end as usize].fill(Holds::Zero);
            }
            1..5 => {
                let over_zero = match model[own as usize] {
                    Holds::Image => false,
                    Holds::Zero => true,
                    Holds::Written { over_zero, .. } => over_zero,
                };
                let word = (seed << 32) | step;
                served.write(first + own, word);
                model[own as usize] = Holds::Written { over_zero, word };
            }
            _ => served.check(first + own, model[own as usize]),
        }
    }
}
