//! Threads that write all pages of their memory in order, over and over: each page gets the number
//! of the round at both ends, and must have had that of the round before. So at every instant the
//! pages up to some place are of one round and the rest of the round before, and whatever brings
//! back anything else is found out within a round.
//!
//! Arguments: MiB of memory of each thread, the number of threads, how many of 100 pages a round
//! writes, and what else goes on: any of `discard`, `guard`, `unmap`, `move`, `grow`, `fork` and
//! `read`.
//!
//! `check` answers "right" or what was wrong, `rounds` the rounds of the slowest thread, `others`
//! the rounds of the slowest of what else goes on.
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use rustix::mm::{MapFlags, ProtFlags};

use super::{Control, Failure, not_understood, number};
use crate::calls::Mapping;
use crate::calls::pidfd_of_nobody;

const PAGE_BYTES: usize = 4096;
const LAST_WORD: usize = PAGE_BYTES - 8;
const MADV_DONTNEED: i32 = 4;
const MADV_GUARD_INSTALL: i32 = 102;
const MADV_GUARD_REMOVE: i32 = 103;
/// The pages that the other things go on with.
const OTHERS_PAGES: usize = 200;

/// What the threads tell.
#[derive(Default)]
struct Reports {
    wrong: Mutex<Vec<String>>,
}

impl Reports {
    fn wrong(&self, what: String) {
        let mut wrong = self.wrong.lock().expect("nobody panics");
        if wrong.len() < 5 {
            wrong.push(what);
        }
    }
}

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let bytes = (number(arguments, 0, 4)? as usize) << 20;
    let threads = number(arguments, 1, 2)?;
    let percent = number(arguments, 2, 100)?;
    let told = Arc::new(Reports::default());
    let mut rounds = Vec::new();
    for thread in 0..threads {
        let memory = map(bytes)?;
        let counter = Arc::new(AtomicU64::new(0));
        rounds.push(counter.clone());
        let told = told.clone();
        std::thread::Builder::new()
            .stack_size(64 << 10)
            .spawn(move || write(&memory, thread, percent, &counter, &told))?;
    }
    let mut others = Vec::new();
    for name in arguments.iter().skip(3) {
        let counter = Arc::new(AtomicU64::new(0));
        others.push(counter.clone());
        let (name, told) = (name.clone(), told.clone());
        let file = File::create_new(control.folder().join(format!("of-{name}")))?;
        file.write_all_at(&[7; 3 * PAGE_BYTES], 0)?;
        let file = File::open(control.folder().join(format!("of-{name}")))?;
        std::thread::spawn(move || {
            loop {
                if let Err(error) = other(&name, &file, &told) {
                    told.wrong(format!("{name}: {error}"));
                    return;
                }
                counter.fetch_add(1, Ordering::SeqCst);
            }
        });
    }
    let least = |counters: &[Arc<AtomicU64>]| {
        let counts = counters.iter().map(|one| one.load(Ordering::SeqCst));
        counts.min().unwrap_or(0).to_string()
    };
    control.serve(|question| match question.verb.as_str() {
        "rounds" => Ok(least(&rounds)),
        "others" => Ok(least(&others)),
        "check" => {
            let wrong = told.wrong.lock().expect("nobody panics");
            Ok(if wrong.is_empty() {
                "right".to_owned()
            } else {
                wrong.join(", ")
            })
        }
        _ => not_understood(question),
    })
}

fn map(bytes: usize) -> Result<Mapping, Failure> {
    let both = ProtFlags::READ | ProtFlags::WRITE;
    Ok(Mapping::anonymous(bytes, both, MapFlags::PRIVATE)?)
}

/// Writes for ever. In each round, another part of the pages is passed over.
fn write(memory: &Mapping, thread: u64, percent: u64, counter: &AtomicU64, told: &Reports) {
    let pages = memory.bytes() / PAGE_BYTES;
    // Which round each page was written in last.
    let mut last = vec![0_u64; pages];
    for round in 1.. {
        for (page, last) in last.iter_mut().enumerate() {
            if (page as u64 * 37 + round * 41) % 100 >= percent {
                continue;
            }
            let at = page * PAGE_BYTES;
            let is = (memory.load(at), memory.load(at + LAST_WORD));
            if is != (*last, *last) {
                told.wrong(format!(
                    "thread {thread}, page {page}: {is:?} is not {last}"
                ));
                return;
            }
            memory.store(at, round);
            memory.store(at + LAST_WORD, round);
            *last = round;
        }
        counter.store(round, Ordering::SeqCst);
    }
}

/// Fills pages and looks at them again.
fn fill(memory: &Mapping, pages: std::ops::Range<usize>, mark: u64) {
    for page in pages {
        memory.store(page * PAGE_BYTES, mark + page as u64);
    }
}

fn look(memory: &Mapping, pages: std::ops::Range<usize>, mark: u64, told: &Reports) {
    for page in pages {
        let expected = if mark == 0 { 0 } else { mark + page as u64 };
        let is = memory.load(page * PAGE_BYTES);
        if is != expected {
            told.wrong(format!("page {page} of {mark}: {is} is not {expected}"));
        }
    }
}

/// Does one round of something else.
fn other(name: &str, file: &File, told: &Reports) -> Result<(), Failure> {
    let mut memory = map(OTHERS_PAGES * PAGE_BYTES)?;
    fill(&memory, 0..OTHERS_PAGES, 1000);
    match name {
        "unmap" => {}
        "discard" => {
            let half = OTHERS_PAGES / 2;
            memory.advise(0..half * PAGE_BYTES, MADV_DONTNEED)?;
            look(&memory, 0..half, 0, told);
            fill(&memory, 10..half, 2000);
            look(&memory, 10..half, 2000, told);
            look(&memory, half..OTHERS_PAGES, 1000, told);
            return Ok(());
        }
        "guard" => {
            let some = 10..OTHERS_PAGES / 2;
            let bytes = some.start * PAGE_BYTES..some.end * PAGE_BYTES;
            let unknown = rustix::io::Errno::INVAL.raw_os_error();
            for mark in (2000..).step_by(1000).take(100) {
                match memory.advise(bytes.clone(), MADV_GUARD_INSTALL) {
                    // Linux before 6.13.
                    Err(error) if error.raw_os_error() == Some(unknown) => return Ok(()),
                    done => done?,
                }
                look(&memory, 0..some.start, 1000, told);
                memory.advise(bytes.clone(), MADV_GUARD_REMOVE)?;
                look(&memory, some.clone(), 0, told);
                fill(&memory, some.clone(), mark);
                look(&memory, some.clone(), mark, told);
            }
            look(&memory, some.end..OTHERS_PAGES, 1000, told);
            return Ok(());
        }
        "move" => {
            memory.resize(2 * OTHERS_PAGES * PAGE_BYTES)?;
            fill(&memory, OTHERS_PAGES..2 * OTHERS_PAGES, 1000);
            look(&memory, 0..2 * OTHERS_PAGES, 1000, told);
            memory.resize(OTHERS_PAGES / 2 * PAGE_BYTES)?;
            look(&memory, 0..OTHERS_PAGES / 2, 1000, told);
            return Ok(());
        }
        "grow" => {
            let blocks = (0..64).map(|number| vec![number as u8; 60_000]);
            let blocks = blocks.collect::<Vec<_>>();
            let right =
                |(number, block): (usize, &Vec<u8>)| block.iter().all(|b| *b == number as u8);
            if !blocks.iter().enumerate().all(right) {
                told.wrong("the heap".to_owned());
            }
        }
        "fork" => drop(pidfd_of_nobody()?),
        "read" => {
            let mut bytes = vec![1; 3 * PAGE_BYTES];
            for _ in 0..20 {
                bytes.fill(1);
                file.read_exact_at(&mut bytes, 0)?;
                if bytes.iter().any(|byte| *byte != 7) {
                    told.wrong("what was read".to_owned());
                }
            }
        }
        other => return Err(format!("{other} is not known").into()),
    }
    look(&memory, 0..OTHERS_PAGES, 1000, told);
    Ok(())
}
