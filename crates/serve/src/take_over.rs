//! Going on from where another process was, which may have been killed at any moment.
use std::sync::Arc;

use image::Reader;
use sys::uffd::{Uffd, given_up_in};

use crate::ledger::{Phase, Word};
use crate::{Ability, Error, Ledger, Metrics, Options, Result, Session};

impl Session {
    /// Takes a target over from a process that does not serve it any more, with what that has noted
    /// of it: the target runs on, and who waits in it for a page asks again.
    ///
    /// # Errors
    /// [`Error::Unsure`] where that process was killed in a moment after which nobody can tell what
    /// the target gave up; [`Error::Unable`] where `image` is another one; those of
    /// [`Session::begin`]. The target waits for pages then, and has to be ended.
    pub fn take_over(
        uffd: Uffd,
        ledger: Ledger,
        image: Arc<Reader>,
        options: Options,
        metrics: Arc<Metrics>,
    ) -> Result<Self> {
        let (Some(phase), Some(ability)) = (ledger.phase(), ledger.ability()) else {
            return Err(Error::Unable("its ledger is damaged".to_owned()));
        };
        for region in ledger.regions() {
            image.locate(region.space, region.first_page, 1)?;
            image.locate(
                region.space,
                region.first_page + region.bytes / abi::PAGE_BYTES - 1,
                1,
            )?;
        }
        let was_locked = ledger.get(Word::Locked) != 0;
        ledger.lock();
        if phase == Phase::Beginning {
            // No event was read, and no page brought in.
            ledger.clear();
            return Self::begin_with(uffd, ledger, image, options, metrics, None);
        }
        let session = Self::new(uffd, ledger, ability, image, options, metrics)?;
        session.note_read(was_locked)?;
        session.settle()?;
        for (region, _) in &session.regions {
            let span = region.span();
            let woken = session.uffd.wake(span);
            woken.map_err(|error| Error::call("wake who waits in", span, session.pid(), error))?;
        }
        Ok(session)
    }

    /// Tells whether it was being let go of, and has to be.
    #[must_use]
    pub fn is_ending(&self) -> bool {
        self.ledger.phase() == Some(Phase::Ending)
    }

    /// Notes what was read and may not be noted: to note it again changes nothing.
    fn note_read(&self, was_locked: bool) -> Result<()> {
        if self.ledger.get(Word::Reading) == 0 {
            return Ok(());
        }
        if !was_locked {
            // The kernel may have failed to put an event there.
            return Err(Error::Unsure { pid: self.pid() });
        }
        for span in given_up_in(self.ledger.events()) {
            self.note_removed(span);
        }
        self.ledger.forget_events();
        Ok(())
    }

    /// Settles what was under way.
    fn settle(&self) -> Result<()> {
        for (region, known) in &self.regions {
            // These may be there by now, or not.
            let claimed = known.claimed.ranges();
            let spans = claimed.iter().map(|range| region.span_of(range));
            for span in self.there(&spans.collect::<Vec<_>>(), false)? {
                known.installed.insert(region.numbers_of(span).0);
            }
            if self.ability == Ability::Told {
                // Pages that are not known to be there are not protected again.
                claimed
                    .iter()
                    .for_each(|range| known.suspects.insert(range.clone()));
            }
            known.claimed.remove(0..region.len());
            if self.ledger.get(Word::Scanning) != 0 {
                // What was found is not known, and protected again: it is told by its contents.
                known.unsaved_suspects.insert(0..region.len());
            }
        }
        self.ledger.set(Word::Scanning, 0);
        let releasing = self.ledger.get(Word::Releasing) as usize;
        if let Some(number) = releasing.checked_sub(1)
            && let Some((_, known)) = self.regions.get(number)
        {
            let range = self.ledger.get(Word::ReleasingFrom)..self.ledger.get(Word::ReleasingTo);
            // What came meanwhile may have been written unnoticed.
            known.suspects.insert(range.clone());
            self.take_out(number, &range, "remove")?;
        }
        self.ledger.set(Word::Releasing, 0);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, OwnedFd};
    use std::path::Path;
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    use abi::{Addr, PAGE_BYTES, Span};
    use image::{Granule, NewRun, NewSpace, Seal, SpaceId, SpaceKind, Writer};
    use rustix::mm::{MapFlags, ProtFlags};
    use rustix::pipe::{PipeFlags, pipe_with};
    use store::{Directory, Store};
    use sys::pagemap::{Action, Category, Query};
    use sys::uffd::{Event, Features, Modes};
    use testkit::calls::Mapping;

    use super::*;
    use crate::Region;
    use crate::install::{Installer, Outcome};

    const SPACE: SpaceId = SpaceId(1);
    const PAGES: u64 = 256;
    const PAGE: usize = PAGE_BYTES as usize;
    const MADV_DONTNEED: i32 = 4;

    /// Page 0 has the number 1, and so on; the last 64 are zero.
    fn image(folder: &Path) -> Arc<Reader> {
        let store: Arc<dyn Store> = Arc::new(Directory::create(folder).expect("a folder"));
        let writer = Writer::create(store.clone()).expect("a writer");
        writer.space(space());
        for page in 0..PAGES {
            let number = if page < PAGES - 64 { page + 1 } else { 0 };
            let run = NewRun {
                space: SPACE,
                first_page: page,
                pages: 1,
            };
            match number {
                0 => writer.mark(image::Run {
                    space: SPACE,
                    first_page: page,
                    pages: 1,
                    kind: image::RunKind::Zero,
                }),
                _ => writer
                    .append(&number.to_ne_bytes().repeat(PAGE / 8), &[run])
                    .expect("stored"),
            }
        }
        writer.seal(Seal::default()).expect("sealed");
        Arc::new(Reader::open(&*store).expect("an image"))
    }

    fn space() -> NewSpace {
        NewSpace {
            id: SPACE,
            kind: SpaceKind::Block,
            name: "memory".to_owned(),
            len_pages: PAGES,
            granule: Granule::Small,
        }
    }

    struct Target {
        memory: Mapping,
        uffd: OwnedFd,
        file: OwnedFd,
        image: Arc<Reader>,
        folder: tempfile::TempDir,
        layers: AtomicU32,
        first: Session,
    }

    const OPTIONS: Options = Options {
        unregister: true,
        poison: false,
        everything: false,
    };

    impl Target {
        fn begin(ability: Ability) -> Option<Self> {
            let uffd = Uffd::create().ok()?;
            let writes = match ability {
                Ability::Missing => Features::empty(),
                Ability::Told => Features::WP,
                Ability::Found => Features::WP | Features::WP_UNPOPULATED | Features::WP_ASYNC,
            };
            uffd.api(Features::EVENT_REMOVE | writes).ok()?;
            let both = ProtFlags::READ | ProtFlags::WRITE;
            let bytes = PAGES as usize * PAGE;
            let memory = Mapping::anonymous(bytes, both, MapFlags::PRIVATE).expect("memory");
            let span = Span::new(Addr(memory.address()), bytes as u64);
            uffd.register(span, Modes::MISSING).expect("registered");
            let region = Region {
                at: span.start,
                bytes: span.bytes(),
                space: SPACE,
                first_page: 0,
                granule: Granule::Small,
            };
            let pid = std::process::id().cast_signed();
            let (ledger, file) = Ledger::shared(pid, &[region]).expect("memory");
            let own = uffd.as_fd().try_clone_to_owned().expect("a descriptor");
            let folder = tempfile::tempdir().expect("a folder");
            let image = image(&folder.path().join("0"));
            let metrics = Arc::new(Metrics::new());
            let first = Session::begin_with(uffd, ledger, image.clone(), OPTIONS, metrics, None);
            Some(Self {
                memory,
                uffd: own,
                file,
                image,
                folder,
                layers: AtomicU32::new(0),
                first: first.expect("it begins"),
            })
        }

        fn successor(&self) -> Result<Session> {
            let uffd = self.uffd.try_clone().expect("a descriptor").into();
            let ledger = Ledger::of_file(&self.file)?;
            let metrics = Arc::new(Metrics::new());
            Session::take_over(uffd, ledger, self.image.clone(), OPTIONS, metrics)
        }

        fn serve<T: Send>(&self, session: &Session, work: impl FnOnce() -> T + Send) -> T {
            let (end, stop) = pipe_with(PipeFlags::CLOEXEC).expect("a pipe");
            std::thread::scope(|scope| {
                let serving = scope.spawn(|| session.serve(&[end.as_fd()]));
                let done = work();
                rustix::io::write(&stop, b"!").expect("written");
                serving.join().expect("no panic").expect("no failure");
                done
            })
        }

        fn page(&self, page: u64) -> u64 {
            self.memory.load(page as usize * PAGE)
        }

        fn write(&self, page: u64, number: u64) {
            self.memory.store(page as usize * PAGE, number);
        }

        fn span(&self) -> Span {
            Span::new(Addr(self.memory.address()), PAGES * PAGE_BYTES)
        }

        /// How many pages a difference stores, and how many are zero in it.
        fn diff(&self, session: &Session) -> [u64; 2] {
            let layer = self.layers.fetch_add(1, Relaxed);
            let path = |layer: u32| self.folder.path().join(layer.to_string());
            let parent = Directory::open(path(layer)).expect("the last layer");
            let parent = Arc::new(Reader::open(&parent).expect("an image"));
            let store = Arc::new(Directory::create(path(layer + 1)).expect("a folder"));
            let link = image::Link {
                to_parent: format!("../{layer}"),
                to_child: format!("../{}", layer + 1),
            };
            let writer = Writer::create_layer(store, parent, link).expect("a writer");
            let difference = session.diff(&writer).expect("a difference");
            writer.seal(Seal::default()).expect("sealed");
            session.kept();
            [difference.stored_pages, difference.zero_pages]
        }
    }

    /// Reads one event into the ledger, as who is killed then has left it.
    fn read_one(session: &Session) {
        session.ledger.set(Word::Reading, 1);
        let mut events = Vec::new();
        while events.is_empty() {
            let read = session.uffd.events_in(session.ledger.events(), &mut events);
            read.expect("events");
        }
        assert!(matches!(events[..], [Event::Remove(_)]), "{events:?}");
    }

    fn each(test: impl Fn(Target, Ability)) {
        for ability in [Ability::Missing, Ability::Told, Ability::Found] {
            match Target::begin(ability) {
                Some(target) => test(target, ability),
                None => eprintln!("left out: no userfaultfd for {ability}"),
            }
        }
    }

    #[test]
    fn what_was_read_and_not_noted_is_given_up() {
        each(|target, ability| {
            target.serve(&target.first, || assert_eq!(target.page(3), 4));
            std::thread::scope(|scope| {
                let bytes = 2 * PAGE..40 * PAGE;
                let giving = scope.spawn(|| target.memory.advise(bytes, MADV_DONTNEED));
                read_one(&target.first);
                giving.join().expect("no panic").expect("given up");
            });
            let next = target.successor().expect("it goes on");
            target.serve(&next, || {
                assert_eq!(
                    [1, 2, 3, 39, 40].map(|page| target.page(page)),
                    [2, 0, 0, 0, 41]
                );
            });
            if ability > Ability::Missing {
                // Where writes are told one by one, what the kernel brings in is told as zero.
                let native = if ability == Ability::Told { 64 } else { 0 };
                assert_eq!(target.diff(&next), [0, 38 + native], "{ability}");
            }
        });
    }

    /// A thread that found pages missing brings them in after they were taken out, while a live
    /// difference has writes to them told: they do not become pages of ours.
    #[test]
    fn what_was_taken_out_is_not_brought_in() {
        let Some(target) = Target::begin(Ability::Told) else {
            eprintln!("left out: no userfaultfd for {}", Ability::Told);
            return;
        };
        let session = &target.first;
        let native = session.regions[0].0.span_of(&(PAGES - 64..PAGES));
        session.uffd.register(native, Modes::WP).expect("told");
        let late = PAGES - 66..PAGES - 60;
        let mut installer = Installer::new(session);
        let outcome = installer.install(0, late.clone(), false, PAGES - 61, "image");
        assert_eq!(outcome.expect("it goes on"), Outcome::Done("there"));
        session.uffd.unregister(native).expect("not told any more");
        target.serve(session, || {
            let found = late.map(|page| target.page(page)).collect::<Vec<_>>();
            assert_eq!(found, [PAGES - 65, PAGES - 64, 0, 0, 0, 0]);
        });
        // Those that were looked at are as they were.
        assert_eq!(target.diff(session), [0, 60]);
    }

    #[test]
    fn where_the_kernel_may_have_failed_to_tell_nobody_goes_on() {
        each(|target, _| {
            target.first.ledger.set(Word::Reading, 1);
            target.successor().expect("nothing was read");
            target.first.ledger.set(Word::Reading, 1);
            target.first.ledger.set(Word::Locked, 0);
            let error = target.successor().err().expect("it cannot be known");
            assert!(matches!(error, Error::Unsure { .. }), "{error}");
        });
    }

    #[test]
    fn writes_that_were_found_and_not_noted_are_found_again() {
        each(|target, ability| {
            if ability == Ability::Missing {
                return;
            }
            target.serve(&target.first, || target.write(7, 700));
            if ability == Ability::Found {
                target.first.ledger.set(Word::Scanning, 1);
                let query = Query {
                    inverted: Category::empty(),
                    all: Category::WRITTEN,
                    any: Category::PRESENT,
                    told: Category::empty(),
                };
                let found = target.first.scan(&[target.span()], &query, Action::PROTECT);
                assert_eq!(found.expect("found").len(), 1);
            }
            let next = target.successor().expect("it goes on");
            assert_eq!(target.diff(&next)[0], 1, "{ability}");
            assert_eq!(target.diff(&next)[0], 0, "{ability}, again");
        });
    }

    #[test]
    fn pages_that_came_and_were_not_noted_are_tracked() {
        each(|target, ability| {
            let known = &target.first.regions[0].1;
            known.claimed.insert(10..13);
            let at = target.span().start.plus(11 * PAGE_BYTES);
            let bytes = 12_u64.to_ne_bytes().repeat(PAGE / 8);
            let protect = ability > Ability::Missing;
            let uffd = &target.first.uffd;
            uffd.copy_as(at, &bytes, true, protect).expect("there");
            let next = target.successor().expect("it goes on");
            assert!(
                next.regions[0].1.installed.contains(11)
                    && !next.regions[0].1.installed.contains(10)
            );
            if protect {
                target.serve(&next, || target.write(11, 1));
                assert_eq!(target.diff(&next)[0], 1, "{ability}");
                target.serve(&next, || target.write(11, 2));
                assert_eq!(target.diff(&next)[0], 1, "{ability}, again");
            }
            target.serve(&next, || assert_eq!(target.page(10), 11));
        });
    }

    #[test]
    fn what_was_half_left_to_the_kernel_is_so() {
        each(|target, ability| {
            let end = PAGES - 64;
            let ledger = &target.first.ledger;
            target.serve(&target.first, || {
                target
                    .memory
                    .advise(0..32 * PAGE, MADV_DONTNEED)
                    .expect("given up");
                target.write(0, 5);
            });
            // Where the image is empty, and where something was given up.
            for (from, to) in [(end, PAGES), (0, 32)] {
                ledger.set(Word::ReleasingFrom, from);
                ledger.set(Word::ReleasingTo, to);
                ledger.set(Word::Releasing, 1);
                let span = target.first.regions[0].0.span_of(&(from..to));
                target.first.uffd.unregister(span).expect("taken out");
                target.write(to - 1, 6);
                let next = target.successor().expect("it goes on");
                target.serve(&next, || {
                    assert_eq!((target.page(to - 1), target.page(to - 2)), (6, 0));
                    target.write(to - 3, 7);
                });
            }
            let next = target.successor().expect("it goes on");
            if ability > Ability::Missing {
                assert_eq!(target.diff(&next)[0], 5, "{ability}");
            }
            target.serve(&next, || {
                assert_eq!((target.page(0), target.page(40)), (5, 41))
            });
        });
    }

    #[test]
    fn what_was_just_beginning_begins_again() {
        each(|target, ability| {
            let ledger = &target.first.ledger;
            ledger.set(Word::Phase, Phase::Beginning as u64);
            // As the kernel has it from the beginning.
            target.write(PAGES - 1, 9);
            let next = target.successor().expect("it begins");
            target.serve(&next, || {
                assert_eq!(
                    [0, 100, PAGES - 2, PAGES - 1].map(|page| target.page(page)),
                    [1, 101, 0, 9]
                );
            });
            if ability > Ability::Missing {
                assert_eq!(target.diff(&next)[0], 1, "{ability}");
            }
            assert!(!next.is_ending());
            next.end().expect("it ends");
            assert!(target.successor().expect("it goes on").is_ending());
        });
    }
}
