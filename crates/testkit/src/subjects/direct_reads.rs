//! Threads that read with direct I/O from the file that the argument names into memory of their
//! own, a page at a time, again and again: see [`crate::slow_disk`].
//!
//! `check` answers "right" while every page has what was last read into it; `reads` tells how many
//! were made.
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::thread;

use rustix::fs::OFlags;

use super::{Control, Failure, not_understood};
use crate::chance::Chance;
use crate::slow_disk::{PAGE_BYTES, PAGES};

const THREADS: u64 = 24;
/// Pages of each thread's memory.
const OWN_PAGES: usize = 1536;
/// What pages consist of that nothing was read into.
const NONE: u64 = u64::MAX;
const BYTES: usize = PAGE_BYTES as usize;

/// A thread's memory.
struct Memory {
    bytes: Vec<u8>,
    /// Where the first whole page is.
    start: usize,
    /// Which of the file's pages each has, counted from 1; [`NONE`] of one that has none yet.
    has: Vec<u64>,
    reads: u64,
}

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let path = arguments.first().ok_or("which file?")?;
    let direct = OFlags::DIRECT.bits().cast_signed();
    let file = File::options().read(true).custom_flags(direct).open(path)?;
    // Who asks waits for the reads that are under way, and no others begin.
    let shared = Arc::new((file, RwLock::new(())));
    let memories = (0..THREADS).map(|number| {
        let memory = Arc::new(Mutex::new(Memory::new()));
        let (shared, own) = (shared.clone(), memory.clone());
        thread::spawn(move || {
            let mut chance = Chance::with(number);
            loop {
                let (file, gate) = &*shared;
                let _open = gate.read().unwrap_or_else(PoisonError::into_inner);
                let mut memory = own.lock().unwrap_or_else(PoisonError::into_inner);
                memory.read(file, &mut chance).expect("a read");
            }
        });
        memory
    });
    let memories = memories.collect::<Vec<_>>();
    control.serve(|question| {
        let _closed = shared.1.write().unwrap_or_else(PoisonError::into_inner);
        let all = memories.iter();
        let mut all = all.map(|memory| memory.lock().unwrap_or_else(PoisonError::into_inner));
        Ok(match question.verb.as_str() {
            "check" => match all.map(|memory| memory.wrong()).sum::<usize>() {
                0 => "right".into(),
                wrong => format!("{wrong} pages are wrong"),
            },
            "reads" => all
                .by_ref()
                .map(|memory| memory.reads)
                .sum::<u64>()
                .to_string(),
            _ => return not_understood(question),
        })
    })
}

impl Memory {
    fn new() -> Self {
        let bytes = vec![0xff; (OWN_PAGES + 1) * BYTES];
        let start = bytes.as_ptr().align_offset(BYTES);
        Self {
            bytes,
            start,
            has: vec![NONE; OWN_PAGES],
            reads: 0,
        }
    }

    fn read(&mut self, file: &File, chance: &mut Chance) -> std::io::Result<()> {
        let (own, page) = (chance.below(OWN_PAGES as u64) as usize, chance.below(PAGES));
        let at = self.start + own * BYTES;
        file.read_exact_at(&mut self.bytes[at..at + BYTES], page * PAGE_BYTES)?;
        self.has[own] = page + 1;
        self.reads += 1;
        Ok(())
    }

    /// How many pages do not have what was read.
    fn wrong(&self) -> usize {
        let pages = self.bytes[self.start..].chunks_exact(BYTES).zip(&self.has);
        let is_wrong = |(page, has): &(&[u8], &u64)| {
            let has = has.to_ne_bytes();
            page.chunks_exact(8).any(|word| word != has)
        };
        pages.filter(is_wrong).count()
    }
}
