//! What is known of a target, in words that a successor of this process can have.
//!
//! Whoever serves a target may be killed between any two instructions, and another process goes on
//! from what stands here. So everything is noted in such an order that what is noted holds at any
//! moment, or something says that it may not: [`Word::Scanning`], [`Word::Releasing`], the events
//! that were read and are not noted yet, and the pages that are claimed.
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::time::Duration;

use abi::{Addr, PAGE_BYTES};
use image::{Granule, SpaceId};
use rustix::time::{ClockId, clock_gettime};
use sys::uffd::EVENT_WORDS;
use sys::words::Words;

use crate::region::PageStates;
use crate::{Ability, Error, Region, Result};

const MAGIC: u64 = u64::from_le_bytes(*b"sfledger");

/// A number of the beginning, by its place.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Word {
    Magic = 0,
    Version = 1,
    /// How many words there are.
    Len = 2,
    Regions = 3,
    /// The pid of the target.
    Pid = 4,
    /// A [`Phase`].
    Phase = 5,
    /// How writes are told.
    Ability = 6,
    /// Not 0 while events are read and not noted yet.
    Reading = 7,
    /// Not 0 where the room for events is locked in memory.
    Locked = 8,
    /// Not 0 while written pages are looked for, which are forgotten by the kernel then.
    Scanning = 9,
    /// 1 + the region of which pages are being taken out of the tracking of missing pages, and 0
    /// otherwise; which they are.
    Releasing = 10,
    ReleasingFrom = 11,
    ReleasingTo = 12,
    /// When it was last heard that pages were given up, in nanoseconds of the monotonic clock.
    RemovedAt = 13,
    /// Which of the two notes holds.
    Note = 14,
}

/// Offset of the buffer for events, and its capacity.
const EVENTS: usize = 64;
pub(crate) const EVENTS_MAX: usize = 16;
/// Offset of the two notes, their longest length, and the words of both.
const NOTES: usize = EVENTS + EVENTS_MAX * EVENT_WORDS;
const NOTE_MAX_BYTES: usize = 8 << 10;
const NOTE_WORDS: usize = 1 + NOTE_MAX_BYTES / 8;
/// Offset of the regions, and words of each.
const REGIONS: usize = NOTES + 2 * NOTE_WORDS;
const REGION_WORDS: usize = 5;

/// How far a target's session is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Its memory is being set up: everything of that can be done again.
    Beginning = 0,
    /// It is served.
    Begun = 1,
    /// It is being let go of: everything of that can be done again.
    Ending = 2,
}

/// State of a target: of the whole and, as sets, of its pages.
#[derive(Debug)]
pub struct Ledger(Arc<Words>);

impl Ledger {
    /// Version of the layout. Others are not understood.
    pub const VERSION: u64 = 1;

    /// One of a target of which nothing is known yet, for this process alone.
    ///
    /// # Errors
    /// [`Error::Ledger`] where there is no memory.
    pub fn own(pid: i32, regions: &[Region]) -> Result<Self> {
        let words = Words::own(words_of(regions)).map_err(Error::Ledger)?;
        Ok(Self::first(words, pid, regions))
    }

    /// The same, and the descriptor by which another process can have it.
    ///
    /// # Errors
    /// [`Error::Ledger`] where there is no memory.
    pub fn shared(pid: i32, regions: &[Region]) -> Result<(Self, OwnedFd)> {
        let file = Words::file("stillframe-session", words_of(regions)).map_err(Error::Ledger)?;
        let words = Words::of_file(&file).map_err(Error::Ledger)?;
        let ledger = Self::first(words, pid, regions);
        ledger.lock();
        Ok((ledger, file))
    }

    /// That of another process, which does not use it any more.
    ///
    /// # Errors
    /// [`Error::Ledger`] where it cannot be mapped, [`Error::Unable`] where it is none that is
    /// understood here.
    pub fn of_file(file: impl AsFd) -> Result<Self> {
        let words = Words::of_file(file).map_err(Error::Ledger)?;
        let ledger = Self(Arc::new(words));
        ledger.check().map_err(Error::Unable)?;
        Ok(ledger)
    }

    fn first(words: Words, pid: i32, regions: &[Region]) -> Self {
        let ledger = Self(Arc::new(words));
        let mut regions = regions.to_vec();
        regions.sort_by_key(|region| region.at);
        for (number, region) in regions.iter().enumerate() {
            let numbers = [
                region.at.0,
                region.bytes,
                u64::from(region.space.0),
                region.first_page,
                region.granule.pages(),
            ];
            let words = &ledger.0[REGIONS + number * REGION_WORDS..];
            for (word, number) in words.iter().zip(numbers) {
                word.store(number, Release);
            }
        }
        ledger.set(Word::Regions, regions.len() as u64);
        ledger.set(Word::Pid, u64::from(pid.cast_unsigned()));
        ledger.set(Word::Len, ledger.0.len() as u64);
        ledger.set(Word::Version, Self::VERSION);
        ledger.set(Word::Magic, MAGIC);
        ledger
    }

    /// Tells what is wrong with it.
    fn check(&self) -> std::result::Result<(), String> {
        let len = self.0.len();
        if len < REGIONS || self.get(Word::Magic) != MAGIC {
            return Err("it is no ledger of a session".to_owned());
        }
        let version = self.get(Word::Version);
        if version != Self::VERSION {
            let own = Self::VERSION;
            return Err(format!(
                "its ledger has version {version}, and this program knows {own}"
            ));
        }
        let damaged = |what: &str| Err(format!("its ledger is damaged: {what}"));
        let count = self.get(Word::Regions);
        if count > ((len - REGIONS) / REGION_WORDS) as u64 {
            return damaged("the number of its regions");
        }
        let regions = self.regions();
        let are_whole = regions.iter().all(|region| {
            !region.is_empty()
                && region.bytes.is_multiple_of(region.granule_bytes())
                && region.bytes / PAGE_BYTES < 64 * len as u64
        });
        if !are_whole || words_of(&regions) != len || self.get(Word::Len) != len as u64 {
            return damaged("its length is not that of its regions");
        }
        if self.phase().is_none() || self.ability().is_none() {
            return damaged("how far the session is");
        }
        Ok(())
    }

    /// The target's memory, in order.
    #[must_use]
    pub fn regions(&self) -> Vec<Region> {
        let count = self.get(Word::Regions) as usize;
        let regions = self.0[REGIONS..].chunks_exact(REGION_WORDS).take(count);
        let region = |words: &[AtomicU64]| {
            let number = |at: usize| words[at].load(Acquire);
            Region {
                at: Addr(number(0)),
                bytes: number(1),
                space: SpaceId(number(2) as u32),
                first_page: number(3),
                granule: match number(4) {
                    1 => Granule::Small,
                    512 => Granule::Large,
                    _ => Granule::Huge,
                },
            }
        };
        regions.map(region).collect()
    }

    /// The target's pid.
    #[must_use]
    pub fn pid(&self) -> i32 {
        (self.get(Word::Pid) as u32).cast_signed()
    }

    /// Each region with what is known of its pages.
    pub(crate) fn known(&self) -> Vec<(Region, PageStates)> {
        let regions = self.regions();
        let mut at = REGIONS + regions.len() * REGION_WORDS;
        let known = regions.into_iter().map(|region| {
            let known = PageStates::new(&region, &self.0, at);
            at += PageStates::words(&region);
            (region, known)
        });
        known.collect()
    }

    /// Forgets everything but whose it is.
    pub(crate) fn clear(&self) {
        let end = REGIONS + self.get(Word::Regions) as usize * REGION_WORDS;
        self.0[end..].iter().for_each(|word| word.store(0, Release));
        for word in [Word::Releasing, Word::Scanning] {
            self.set(word, 0);
        }
    }

    /// Keeps what events are read into in memory, so that who reads one has it whatever happens.
    pub(crate) fn lock(&self) {
        let locked = self.0.lock(0..NOTES);
        self.set(Word::Locked, u64::from(locked.is_ok()));
        if let Err(error) = locked {
            log::warn!(
                "the ledger of process {} is not locked: {error}",
                self.pid()
            );
        }
    }

    pub(crate) fn get(&self, word: Word) -> u64 {
        self.0[word as usize].load(Acquire)
    }

    pub(crate) fn set(&self, word: Word, number: u64) {
        self.0[word as usize].store(number, Release);
    }

    pub(crate) fn phase(&self) -> Option<Phase> {
        let all = [Phase::Beginning, Phase::Begun, Phase::Ending];
        let number = self.get(Word::Phase);
        all.into_iter().find(|phase| *phase as u64 == number)
    }

    pub(crate) fn ability(&self) -> Option<Ability> {
        let all = [Ability::Missing, Ability::Told, Ability::Found];
        let number = self.get(Word::Ability);
        all.into_iter().find(|ability| *ability as u64 == number)
    }

    /// Buffer of events; zeros but while they are read.
    pub(crate) fn events(&self) -> &[AtomicU64] {
        &self.0[EVENTS..NOTES]
    }

    /// What the events were that were read last is noted.
    pub(crate) fn forget_events(&self) {
        for word in self.events().iter().step_by(EVENT_WORDS) {
            word.store(0, Release);
        }
        self.set(Word::Reading, 0);
    }

    /// Notes that pages were given up just now.
    pub(crate) fn note_removal(&self) {
        self.set(Word::RemovedAt, now().as_nanos() as u64);
    }

    /// How long it is since that was last noted.
    pub(crate) fn since_removal(&self) -> Option<Duration> {
        let at = self.get(Word::RemovedAt);
        (at > 0).then(|| now().saturating_sub(Duration::from_nanos(at)))
    }

    /// Puts a note of the caller's, of 8 KiB at the most, in the place of the last one; there is
    /// one of them or the other at any moment.
    ///
    /// # Panics
    /// When it is longer.
    pub fn note(&self, bytes: &[u8]) {
        assert!(bytes.len() <= NOTE_MAX_BYTES, "there is room for a note");
        let other = 1 - self.get(Word::Note).min(1);
        let (len, words) = self.note_words(other);
        for (word, bytes) in words.iter().zip(bytes.chunks(8)) {
            let mut number = [0; 8];
            number[..bytes.len()].copy_from_slice(bytes);
            word.store(u64::from_ne_bytes(number), Release);
        }
        len.store(bytes.len() as u64, Release);
        self.set(Word::Note, other);
    }

    /// The last note; nothing where there is none.
    #[must_use]
    pub fn noted(&self) -> Vec<u8> {
        let (len, words) = self.note_words(self.get(Word::Note).min(1));
        let len = (len.load(Acquire) as usize).min(NOTE_MAX_BYTES);
        let words = words.iter().map(|word| word.load(Acquire).to_ne_bytes());
        let mut bytes = words.flatten().take(len).collect::<Vec<_>>();
        bytes.truncate(len);
        bytes
    }

    fn note_words(&self, which: u64) -> (&AtomicU64, &[AtomicU64]) {
        let from = NOTES + which as usize * NOTE_WORDS;
        (&self.0[from], &self.0[from + 1..from + NOTE_WORDS])
    }
}

fn words_of(regions: &[Region]) -> usize {
    let known = regions.iter().map(PageStates::words).sum::<usize>();
    REGIONS + regions.len() * REGION_WORDS + known
}

fn now() -> Duration {
    let now = clock_gettime(ClockId::Monotonic);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bits::Bits;

    fn regions() -> Vec<Region> {
        let region = |at: u64, granule: Granule| Region {
            at: Addr(at),
            bytes: 8 << 21,
            space: SpaceId(1),
            first_page: at / PAGE_BYTES,
            granule,
        };
        vec![
            region(2 << 30, Granule::Small),
            region(1 << 30, Granule::Large),
        ]
    }

    #[test]
    fn what_is_known_is_known_to_who_comes_next() {
        let (ledger, file) = Ledger::shared(77, &regions()).expect("memory");
        let known = ledger.known();
        known[0].1.removed.insert(3..5);
        known[0].1.punched.insert(4000..4096);
        known[1].1.unsaved_suspects.insert(4000..4096);
        ledger.note(b"the first");
        ledger.note(b"what holds now");
        let next = Ledger::of_file(&file).expect("a ledger");
        assert_eq!(next.pid(), 77);
        assert_eq!(next.noted(), b"what holds now");
        let again = next.known();
        let mut sorted = regions();
        sorted.reverse();
        assert_eq!(again.iter().map(|one| one.0).collect::<Vec<_>>(), sorted);
        let sets = |known: &[(Region, PageStates)]| {
            let of = |known: &PageStates| {
                let sets = [&known.removed, &known.punched, &known.unsaved_suspects];
                sets.map(Bits::ranges)
            };
            known.iter().map(|(_, known)| of(known)).collect::<Vec<_>>()
        };
        assert_eq!(sets(&again), sets(&known));
        assert_eq!(sets(&again).iter().flatten().flatten().count(), 3);
        next.clear();
        assert_eq!(sets(&known).iter().flatten().flatten().count(), 0);
        assert_eq!(ledger.regions(), sorted);
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        let (ledger, file) = Ledger::shared(77, &regions()).expect("memory");
        for (word, number, what) in [
            (Word::Version, 9, "version 9, and this program knows 1"),
            (Word::Len, 9, "its length"),
            (Word::Regions, 1, "its length"),
            (Word::Regions, 1 << 40, "the number of its regions"),
            (Word::Phase, 9, "how far"),
            (Word::Ability, 9, "how far"),
            (Word::Magic, 9, "no ledger"),
        ] {
            let before = ledger.get(word);
            ledger.set(word, number);
            let error = Ledger::of_file(&file).expect_err("refused").to_string();
            assert!(error.contains(what), "{word:?}: {error}");
            ledger.set(word, before);
        }
        let at = &ledger.0[REGIONS + 1];
        at.store(u64::MAX, Release);
        assert!(Ledger::of_file(&file).is_err());
    }
}
