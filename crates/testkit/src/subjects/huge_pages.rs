//! Memory with huge pages of 2 MiB: private, private with a child that has changed some of it,
//! shared with the child, and of a memfd. A page is written in parts, one with zeros alone, and one
//! not at all.
//!
//! `check` answers "right" while both find what was written, and each sees what the other writes
//! to what they share; `write` changes a word in each mapping, which `check` expects then.
use std::io::{PipeReader, PipeWriter, Read, Write, pipe};

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
use rustix::mm::{MapFlags, ProtFlags};
use sys::fork::{Fork, fork};

use super::{Control, Failure, not_understood};
use crate::calls::Mapping;

const HUGE_BYTES: usize = 2 << 20;
/// Of each mapping.
const PAGES: usize = 3;
/// What is written lies so far apart: not on a page of 4 KiB each time.
const STEP_BYTES: usize = 20_480;
/// The words that a child changes of what it had of its parent lie so far apart.
const OWN_STEP_BYTES: usize = 16 * STEP_BYTES;
/// Where a word is changed.
const CHANGED: usize = 4096 + 64;

struct State {
    /// The private one, the inherited one, the shared one, that of the memfd.
    all: [Mapping; 4],
    changes: u64,
}

pub(super) fn run(control: Control, _: &[String]) -> Result<(), Failure> {
    let huge = MapFlags::from_bits_retain(MapFlags::HUGETLB.bits() | 21 << 26);
    let both = ProtFlags::READ | ProtFlags::WRITE;
    let bytes = PAGES * HUGE_BYTES;
    let file = memfd_create("huge", MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB)?;
    ftruncate(&file, bytes as u64)?;
    let all = [
        Mapping::anonymous(bytes, both, MapFlags::PRIVATE | huge)?,
        Mapping::anonymous(bytes, both, MapFlags::PRIVATE | huge)?,
        Mapping::anonymous(bytes, both, MapFlags::SHARED | huge)?,
        Mapping::of_file(&file, 0, bytes, both, MapFlags::SHARED)?,
    ];
    for (number, mapping) in all.iter().enumerate() {
        for at in (0..HUGE_BYTES).step_by(STEP_BYTES) {
            mapping.store(at, mark(number, at));
        }
        // It is there, and reads as one that is not.
        mapping.store(HUGE_BYTES, 0);
    }
    let mut state = State { all, changes: 0 };
    let (mut asked, ask) = pipe()?;
    let (told, mut tell) = pipe()?;
    if fork()? == Fork::Child {
        drop((ask, told));
        for at in (0..HUGE_BYTES).step_by(OWN_STEP_BYTES) {
            state.all[1].store(at, !mark(1, at));
        }
        tell.write_all(&[1])?;
        return answer(&mut state, &mut asked, &mut tell);
    }
    drop((asked, tell));
    let (mut ask, mut told) = (ask, told);
    told.read_exact(&mut [0])?;
    control.serve(|question| match question.verb.as_str() {
        "check" => {
            ask.write_all(b"c")?;
            let mut answer = [0];
            told.read_exact(&mut answer)?;
            let wrong = [state.wrong(false), answer[0].into()];
            Ok(match wrong {
                [0, 0] => "right".into(),
                wrong => format!("{wrong:?} words are wrong"),
            })
        }
        "write" => {
            ask.write_all(b"w")?;
            told.read_exact(&mut [0])?;
            state.write(false);
            Ok("right".into())
        }
        _ => not_understood(question),
    })
}

/// What the child does: looks or writes as it is asked.
fn answer(state: &mut State, asked: &mut PipeReader, tell: &mut PipeWriter) -> Result<(), Failure> {
    loop {
        let mut question = [0];
        if asked.read(&mut question)? == 0 {
            return Ok(());
        }
        let wrong = match &question {
            b"w" => {
                state.write(true);
                0
            }
            _ => state.wrong(true),
        };
        tell.write_all(&[wrong.min(255) as u8])?;
    }
}

fn mark(number: usize, at: usize) -> u64 {
    0xface_0000_0000_0000 | (number as u64) << 32 | at as u64
}

impl State {
    fn write(&mut self, by_child: bool) {
        self.changes += 1;
        for (number, mapping) in self.all.iter().enumerate() {
            // What is shared the parent writes.
            if number < 2 || !by_child {
                mapping.store(CHANGED, self.changes);
            }
        }
    }

    /// How many words are not what they should be.
    fn wrong(&self, in_child: bool) -> u64 {
        let mut wrong = 0;
        for (number, mapping) in self.all.iter().enumerate() {
            for at in (0..PAGES * HUGE_BYTES).step_by(64) {
                let is_written = at < HUGE_BYTES && at.is_multiple_of(STEP_BYTES);
                let is_own = number == 1 && in_child && at.is_multiple_of(OWN_STEP_BYTES);
                let expected = match at {
                    CHANGED => self.changes,
                    _ if is_written && is_own => !mark(number, at),
                    _ if is_written => mark(number, at),
                    _ => 0,
                };
                wrong += u64::from(mapping.load(at) != expected);
            }
        }
        wrong
    }
}
