//! One target: who it is, and what is known of its pages.
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock};

use image::Reader;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::OFlags;
use sys::process::Process;
use sys::uffd::{Features, Modes, Uffd};

use crate::events::WaitingThread;
use crate::install::Installer;
use crate::ledger::{Phase, Word};
use crate::pending::PendingPages;
use crate::prefetch::{Pages, Prefetcher};
use crate::region::PageStates;
use crate::room;
use crate::trace::PageRange;
use crate::{Ability, Error, Ledger, Metrics, Region, Result, Share};

/// How long to wait until a fault is tried again that met a change of the target's mappings, in
/// nanoseconds.
const AGAIN_NS: i64 = 200_000;

/// A target whose memory is served.
#[derive(Debug)]
pub struct Target {
    /// The userfaultfd that it made for its memory.
    pub uffd: Uffd,
    /// Its pid.
    pub pid: i32,
    /// Regions of the target; they do not overlap.
    pub regions: Vec<Region>,
}

/// How it is served.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// True if empty and removed pages are taken out of the tracking of missing pages.
    pub unregister: bool,
    /// True if who touches a page that cannot be brought in gets `SIGBUS`; otherwise serving ends
    /// with that.
    pub poison: bool,
    /// True if everything is going to be brought in: then it must be possible.
    pub everything: bool,
}

/// How far it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Bytes that were brought in.
    pub resident_bytes: u64,
    /// Bytes that were not, and for which the target would wait.
    pub remaining_bytes: u64,
    /// Bytes that the kernel brings in by itself.
    pub native_bytes: u64,
}

/// A target that is served, by several threads.
pub struct Session {
    pub(crate) uffd: Uffd,
    pub(crate) process: Process,
    pub(crate) image: Arc<Reader>,
    pub(crate) regions: Vec<(Region, PageStates)>,
    pub(crate) ability: Ability,
    pub(crate) options: Options,
    /// Held by those who bring pages in, and alone by who reads events: what the target has given
    /// up is known before anybody acts on the event, and nobody brings in what was there before.
    pub(crate) order: RwLock<()>,
    /// The target's state, for the next server.
    pub(crate) ledger: Ledger,
    /// How many more mappings the target may be given.
    pub(crate) mappings: AtomicI64,
    pub(crate) metrics: Arc<Metrics>,
    /// Threads of the target whose faults were read and could not be answered yet.
    pub(crate) waiting: Mutex<Vec<WaitingThread>>,
    /// True if faults are being answered: prefetching waits meanwhile.
    pub(crate) busy: AtomicBool,
    /// The prefetcher for faults that come in order.
    pub(crate) ahead: Prefetcher,
    /// Pages fetched for faults and ahead of them, in order, where that is recorded.
    pub(crate) trace: OnceLock<Mutex<Vec<PageRange>>>,
    /// How many threads bring everything in.
    pub(crate) fetching: AtomicU64,
    /// The shared file of the pages that the target does not write to, if there is one.
    pub(crate) share: Option<Arc<Share>>,
    /// Progress of prefetching: the number of the next block of all.
    pub(crate) fetched: AtomicU64,
    /// Pages that a live difference has not copied yet.
    pub(crate) pending: Mutex<Option<Arc<PendingPages>>>,
    /// True if we hear of pages that the target gives up, before it does.
    pub(crate) hears_removals: bool,
}

/// Takes the lock; each holder leaves the value whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    /// The target's pid.
    pub(crate) fn pid(&self) -> i32 {
        self.process.pid()
    }

    /// Takes a target over: has its writes tracked as far as its descriptor allows, and what is
    /// empty in `image` taken out of the tracking of missing pages. The target may run already.
    ///
    /// # Errors
    /// Those of the calls; [`Error::Descriptor`].
    pub fn begin(
        target: Target,
        image: Arc<Reader>,
        options: Options,
        metrics: Arc<Metrics>,
    ) -> Result<Self> {
        let ledger = Ledger::own(target.pid, &target.regions)?;
        Self::begin_with(target.uffd, ledger, image, options, metrics, None)
    }

    /// The same for a target that a ledger has, of which nothing is known yet. Where its memory is
    /// a mapping of `share` for itself alone, it has the pages that it reads from there.
    ///
    /// # Errors
    /// Those of [`Session::begin`].
    pub fn begin_with(
        uffd: Uffd,
        ledger: Ledger,
        image: Arc<Reader>,
        options: Options,
        metrics: Arc<Metrics>,
        share: Option<Arc<Share>>,
    ) -> Result<Self> {
        let features = uffd.enabled().map_err(Error::Descriptor)?;
        let regions = ledger.regions();
        let spans = regions.iter().map(Region::span).collect::<Vec<_>>();
        room::check(ledger.pid(), &regions, &image, options)?;
        let missing = match share {
            Some(_) => Modes::MISSING | Modes::MINOR,
            None => Modes::MISSING,
        };
        let ability = Ability::of(features).register(&uffd, &spans, missing, ledger.pid())?;
        ledger.set(Word::Ability, ability as u64);
        let mut session = Self::new(uffd, ledger, ability, image, options, metrics)?;
        session.share = share;
        if options.unregister {
            session.release_empty()?;
        }
        session.ledger.set(Word::Phase, Phase::Begun as u64);
        Ok(session)
    }

    /// A session of which everything is as the ledger has it.
    pub(crate) fn new(
        uffd: Uffd,
        ledger: Ledger,
        ability: Ability,
        image: Arc<Reader>,
        options: Options,
        metrics: Arc<Metrics>,
    ) -> Result<Self> {
        let features = uffd.enabled().map_err(Error::Descriptor)?;
        let flags =
            rustix::fs::fcntl_getfl(&uffd).map_err(|errno| Error::Descriptor(errno.into()))?;
        let set = rustix::fs::fcntl_setfl(&uffd, flags | OFlags::NONBLOCK);
        set.map_err(|errno| Error::Descriptor(errno.into()))?;
        let pid = ledger.pid();
        Ok(Self {
            mappings: AtomicI64::new(crate::release::mappings_left(pid)),
            uffd,
            process: Process::new(pid),
            image,
            regions: ledger.known(),
            ability,
            options,
            order: RwLock::new(()),
            ledger,
            metrics,
            waiting: Mutex::default(),
            busy: AtomicBool::new(false),
            ahead: Prefetcher::default(),
            trace: OnceLock::new(),
            fetching: AtomicU64::new(0),
            fetched: AtomicU64::new(0),
            share: None,
            pending: Mutex::default(),
            hears_removals: features.contains(Features::EVENT_REMOVE),
        })
    }

    /// Tells whether it shares pages with others: then it needs us to its end, as what it gives up
    /// would be the image's again.
    #[must_use]
    pub const fn is_sharing(&self) -> bool {
        self.share.is_some()
    }

    /// Its state, for the next server.
    #[must_use]
    pub const fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Returns the ability of the target's descriptor.
    #[must_use]
    pub const fn ability(&self) -> Ability {
        self.ability
    }

    /// Returns the regions that are served.
    pub fn regions(&self) -> impl Iterator<Item = &Region> {
        self.regions.iter().map(|(region, _)| region)
    }

    /// How far it is.
    #[must_use]
    pub fn progress(&self) -> Progress {
        let mut progress = Progress::default();
        for (region, known) in &self.regions {
            let bytes = |pages: u64| pages * region.granule_bytes();
            let (here, native) = (known.installed.count(), known.native.count());
            progress.resident_bytes += bytes(here);
            progress.native_bytes += bytes(native);
            progress.remaining_bytes += bytes(region.len().saturating_sub(here + native));
        }
        progress
    }

    /// Answers faults until one of `watched` becomes readable or hangs up; gives its number.
    ///
    /// # Errors
    /// [`Error::Gone`] where the target has ended; the target waits for pages after other failures,
    /// and has to be ended.
    pub fn serve(&self, watched: &[BorrowedFd<'_>]) -> Result<usize> {
        self.ahead.set_ended(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut installer = Installer::new(self);
                while let Some(piece) = self.ahead.wait(self) {
                    installer.install_ahead(piece);
                }
            });
            let served = self.answer_all(watched);
            self.ahead.set_ended(true);
            served
        })
    }

    fn answer_all(&self, watched: &[BorrowedFd<'_>]) -> Result<usize> {
        let mut installer = Installer::new(self);
        // Whoever waits, waits also while the caller looks at what it watches.
        let mut waiting = lock(&self.waiting);
        loop {
            // Faults go first; those that others are at wait for these.
            let idle = waiting.iter().all(|fault| fault.claimed);
            let ahead = idle && self.ahead.is_wanted();
            let until = match (ahead, waiting.is_empty()) {
                (true, _) => Some(0),
                (false, false) => Some(AGAIN_NS),
                (false, true) => None,
            };
            let (told, number) = self.wait(watched, until)?;
            if let Some(number) = number {
                return Ok(number);
            }
            if ahead && !told {
                if let Some(piece) = self.ahead.take(self) {
                    installer.install_ahead(piece);
                }
                continue;
            }
            // To read events waits for those who bring pages in: only where there are some.
            if told {
                self.read_events(&mut waiting)?;
            }
            self.metrics.queued.set(waiting.len() as i64);
            self.busy.store(true, Relaxed);
            let answered = installer.answer(&mut waiting);
            self.busy.store(false, Relaxed);
            self.metrics.queued.set(waiting.len() as i64);
            answered?;
        }
    }

    /// Waits until there are events or one of `watched` can be read, so many nanoseconds at the
    /// most; tells whether there are events, and which of `watched` it is.
    fn wait(
        &self,
        watched: &[BorrowedFd<'_>],
        until_ns: Option<i64>,
    ) -> Result<(bool, Option<usize>)> {
        let fds = std::iter::once(self.uffd.as_fd()).chain(watched.iter().copied());
        let mut fds = fds
            .map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN))
            .collect::<Vec<_>>();
        let until = until_ns.map(|tv_nsec| Timespec { tv_sec: 0, tv_nsec });
        match poll(&mut fds, until.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(Error::Descriptor(errno.into())),
        }
        let number = fds[1..].iter().position(|fd| !fd.revents().is_empty());
        Ok((!fds[0].revents().is_empty(), number))
    }

    /// Lets go of a target of which everything was brought in: it goes on without us, and pages
    /// that it gives up read as zeros.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Call`].
    pub fn end(&self) -> Result<()> {
        let _alone = self.order.write();
        self.ledger.set(Word::Phase, Phase::Ending as u64);
        for (region, _) in &self.regions {
            let span = region.span();
            let ended = self.uffd.unregister(span);
            ended.map_err(|source| Error::call("unregister", span, self.pid(), source))?;
        }
        // Who waits for an event to be read would wait for ever.
        let mut events = Vec::new();
        while self.uffd.events(&mut events).map_err(Error::Descriptor)? {}
        Ok(())
    }

    /// Lets everybody go who waits for pages of a target that is not served any more: they are
    /// zeros. It must have ended, or have been let go of.
    pub fn abandon(&self) {
        for (region, _) in &self.regions {
            let _ = self.uffd.unregister(region.span());
        }
    }

    /// The region that holds an address, by number.
    pub(crate) fn region_at(&self, addr: abi::Addr) -> Option<usize> {
        let after = self
            .regions
            .partition_point(|(region, _)| region.at <= addr);
        let number = after.checked_sub(1)?;
        self.regions[number]
            .0
            .span()
            .contains(addr)
            .then_some(number)
    }
}

impl Pages for Session {
    fn page_bytes(&self, number: usize) -> u64 {
        self.regions[number].0.granule_bytes()
    }

    fn next_missing(&self, number: usize, from: u64) -> u64 {
        self.regions[number].1.next_missing(from)
    }

    fn next_settled(&self, number: usize, from: u64) -> u64 {
        self.regions[number].1.next_settled(from)
    }
}
