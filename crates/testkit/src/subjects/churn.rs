//! One task that writes memory at full speed, from several threads and in every way: each page
//! holds a number of its own in all its words; ranges are given up, lose their protection, are
//! unmapped and mapped anew. Every page is checked before it is written again, so a page that is
//! torn or older than it should be is found. Arguments: threads, pages for each, and either `forks`
//! (another thread forks all the time) or `moves` (the memory of every other thread moves elsewhere
//! instead of losing its protection).
//!
//! `count` answers the pages written, `check` whether all pages are right.
use std::sync::{Arc, Mutex};

use rustix::mm::{MapFlags, ProtFlags};
use rustix::process::setpriority_process;

use super::{Control, Failure, not_understood, number};
use crate::calls::Mapping;

const PAGE_BYTES: usize = 4096;
const PAGE_WORDS: usize = 512;
/// Pages written between two chances for a check.
const STEPS: usize = 200;

/// The memory of one thread.
struct Region {
    mapping: Mapping,
    /// The number that each page holds in its words; 0 for a page that was given up.
    numbers: Vec<u64>,
    last: u64,
    chance: u64,
    /// True if it moves elsewhere; otherwise parts of it lose their protection. No memory does
    /// both, and none of a task that forks moves: what a dump finds in pieces, or brings back in
    /// pieces, stays so, and mremap(2) moves no pieces that are tracked.
    moves: bool,
    wrong: Option<String>,
}

fn map(pages: usize) -> std::io::Result<Mapping> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    Mapping::anonymous(pages * PAGE_BYTES, protection, MapFlags::PRIVATE)
}

/// What stands in a word of a page.
fn word(number: u64, page: usize, word: usize) -> u64 {
    match number {
        0 => 0,
        _ => number << 24 ^ (page as u64) << 10 ^ word as u64,
    }
}

impl Region {
    fn new(pages: usize, seed: u64, moves: bool) -> std::io::Result<Self> {
        Ok(Self {
            mapping: map(pages)?,
            numbers: vec![0; pages],
            last: 0,
            chance: seed * 977 + 1,
            moves: moves && seed % 2 == 1,
            wrong: None,
        })
    }

    /// A number below `limit`.
    fn draw(&mut self, limit: usize) -> usize {
        self.chance = self
            .chance
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.chance >> 33) as usize % limit
    }

    fn check(&mut self, page: usize, words: impl Iterator<Item = usize>) {
        let number = self.numbers[page];
        for at in words {
            let found = self.mapping.load(page * PAGE_BYTES + at * 8);
            if found != word(number, page, at) && self.wrong.is_none() {
                let wanted = word(number, page, at);
                let address = self.mapping.address() + (page * PAGE_BYTES) as u64;
                self.wrong = Some(format!(
                    "page {page} at {address:#x}, word {at}: {found:#x} instead of {wanted:#x}"
                ));
            }
        }
    }

    fn write(&mut self, page: usize) {
        self.check(page, [0, 1, 255, 510, 511].into_iter());
        self.last += 1;
        self.numbers[page] = self.last;
        for at in 0..PAGE_WORDS {
            self.mapping
                .store(page * PAGE_BYTES + at * 8, word(self.last, page, at));
        }
    }

    /// Some pages in a row.
    fn range(&mut self) -> std::ops::Range<usize> {
        let pages = self.numbers.len();
        let first = self.draw(pages);
        let count = 1 + self.draw((pages - first).min(64));
        first..first + count
    }

    fn bytes(range: &std::ops::Range<usize>) -> std::ops::Range<usize> {
        range.start * PAGE_BYTES..range.end * PAGE_BYTES
    }

    fn change(&mut self) -> std::io::Result<()> {
        const MADV_DONTNEED: i32 = 4;
        match self.draw(6) {
            0 | 1 => {
                let range = self.range();
                self.mapping.advise(Self::bytes(&range), MADV_DONTNEED)?;
                self.numbers[range].fill(0);
            }
            2 if !self.moves => {
                let range = self.range();
                self.mapping.protect(Self::bytes(&range), 0)?;
                std::thread::yield_now();
                self.mapping.protect(Self::bytes(&range), 3)?;
            }
            3 if self.moves => self.mapping.relocate()?,
            4 => {
                // Unmapped first, so that the new one may stand where the old one was.
                let pages = self.numbers.len();
                self.mapping = map(1)?;
                self.mapping = map(pages)?;
                self.numbers.fill(0);
            }
            _ => {}
        }
        Ok(())
    }

    fn step(&mut self) -> std::io::Result<()> {
        for _ in 0..STEPS {
            let page = self.draw(self.numbers.len());
            self.write(page);
        }
        self.change()
    }
}

/// Forks all the time; each child lives for a moment with a copy of everything.
fn fork_for_ever() {
    loop {
        // Without room for another process there is none this time.
        let _ = sys::watchdog::apart(|| vec![1]);
        // Time for the others.
        std::thread::sleep(std::time::Duration::from_millis(3));
    }
}

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let threads = number(arguments, 0, 3)?;
    let pages = number(arguments, 1, 512)? as usize;
    // It writes as fast as it can all the same, and whoever saves it gets a processor at once.
    setpriority_process(None, 10)?;
    let moves = arguments.get(2).is_some_and(|kind| kind == "moves");
    let regions = (0..threads).map(|seed| Region::new(pages, seed, moves));
    let regions = regions.map(|region| Ok(Arc::new(Mutex::new(region?))));
    let regions = regions.collect::<std::io::Result<Vec<_>>>()?;
    for region in &regions {
        let region = region.clone();
        std::thread::spawn(move || {
            loop {
                let mut held = region.lock().unwrap_or_else(|broken| broken.into_inner());
                if let Err(error) = held.step() {
                    held.wrong = Some(error.to_string());
                }
                drop(held);
                // A check waits for the lock.
                std::thread::yield_now();
            }
        });
    }
    if !moves {
        std::thread::spawn(fork_for_ever);
    }
    control.serve(|question| {
        let mut written = 0;
        let mut wrong = None;
        for region in &regions {
            let mut region = region.lock().unwrap_or_else(|broken| broken.into_inner());
            written += region.last;
            if question.verb == "check" {
                (0..pages).for_each(|page| region.check(page, 0..PAGE_WORDS));
            }
            wrong = wrong.or(region.wrong.clone());
        }
        match question.verb.as_str() {
            "count" => Ok(written.to_string()),
            "check" => Ok(wrong.unwrap_or_else(|| "right".into())),
            _ => not_understood(question),
        }
    })
}
