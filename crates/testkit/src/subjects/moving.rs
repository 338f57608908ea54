//! Memory that is moved, given up, unmapped, mapped anew and forked, in blocks that know what they
//! hold. Argument: how many MiB.
//!
//! `stir SEED STEPS` does that many things of those, looking at pages in between; `check` looks at
//! all of them. Both answer "right", or what was wrong.
use std::ops::Range;

use rustix::process::{WaitOptions, waitpid};
use sys::fork::{Fork, fork};

use super::{Control, Failure, not_understood, number};
use crate::calls::Arena;
use crate::chance::Chance;

const PAGE_BYTES: usize = 4096;
/// Pages of a block; behind each one page is never mapped, so blocks are mappings of their own.
const PAGES: usize = 96;
const STRIDE: usize = (PAGES + 1) * PAGE_BYTES;
const MADV_DONTNEED: i32 = 4;
const MADV_FREE: i32 = 8;
const PROT_READ: i32 = 1;
const PROT_BOTH: i32 = 3;
const PRIVATE: i32 = 2;

/// What the pages of a block begin with; none where nothing is mapped.
type Block = Option<Vec<u64>>;

/// The blocks, a half of whose places is free at the beginning.
struct Memory {
    arena: Arena,
    blocks: Vec<Block>,
}

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let bytes = (number(arguments, 0, 32)? as usize) << 20;
    let full = bytes / (PAGES * PAGE_BYTES);
    let mut memory = Memory {
        arena: Arena::claim(2 * full * STRIDE)?,
        blocks: vec![None; 2 * full],
    };
    for block in 0..full {
        memory.map(block)?;
        for page in 0..PAGES {
            // One of ten stays as it came.
            if (block + page) % 10 != 0 {
                memory.write(block, page, (block * PAGES + page + 1) as u64);
            }
        }
    }
    control.serve(|question| {
        let word = |at: usize| question.words.get(at).and_then(|word| word.parse().ok());
        let outcome = match (question.verb.as_str(), word(0), word(1)) {
            ("check", ..) => memory.check(),
            ("stir", Some(seed), Some(steps)) => memory.stir(seed, steps)?,
            _ => return not_understood(question),
        };
        Ok(outcome.err().unwrap_or_else(|| "right".to_owned()))
    })
}

fn at(block: usize, page: usize) -> usize {
    block * STRIDE + page * PAGE_BYTES
}

impl Memory {
    fn map(&mut self, block: usize) -> Result<(), Failure> {
        self.arena
            .map(at(block, 0)..at(block, PAGES), PROT_BOTH, PRIVATE)?;
        self.blocks[block] = Some(vec![0; PAGES]);
        Ok(())
    }

    fn write(&mut self, block: usize, page: usize, value: u64) {
        if let Some(pages) = &mut self.blocks[block] {
            self.arena.store(at(block, page), value);
            pages[page] = value;
        }
    }

    /// Looks at one page of a block, if it is mapped.
    fn look(&self, block: usize, page: usize) -> Result<(), String> {
        let Some(pages) = &self.blocks[block] else {
            return Ok(());
        };
        match self.arena.load(at(block, page)) {
            is if is == pages[page] => Ok(()),
            is => Err(format!(
                "block {block}, page {page}: {is:#x} is not {:#x}",
                pages[page]
            )),
        }
    }

    fn check(&self) -> Result<(), String> {
        let all =
            (0..self.blocks.len()).flat_map(|block| (0..PAGES).map(move |page| (block, page)));
        all.into_iter()
            .try_for_each(|(block, page)| self.look(block, page))
    }

    fn stir(&mut self, seed: u64, steps: u64) -> Result<Result<(), String>, Failure> {
        let mut chance = Chance::with(seed);
        for step in 0..steps {
            let block = chance.below(self.blocks.len() as u64) as usize;
            let page = chance.below(PAGES as u64) as usize;
            let looked = self.look(block, page);
            let made = match looked {
                Err(wrong) => Err(wrong),
                Ok(()) => self.step(&mut chance, block, page)?,
            };
            if let Err(wrong) = made {
                return Ok(Err(format!("seed {seed}, step {step}: {wrong}")));
            }
        }
        Ok(Ok(()))
    }

    fn step(
        &mut self,
        chance: &mut Chance,
        block: usize,
        page: usize,
    ) -> Result<Result<(), String>, Failure> {
        let part = page..(page + 1 + chance.below(PAGES as u64 / 2) as usize).min(PAGES);
        let span = |part: &Range<usize>| at(block, part.start)..at(block, part.end);
        if self.blocks[block].is_none() {
            self.map(block)?;
            return Ok(Ok(()));
        }
        match chance.below(40) {
            0..12 => self.write(block, page, chance.number() | 1),
            12..18 => {
                self.arena.advise(span(&part), MADV_DONTNEED)?;
                self.zero(block, part);
            }
            18..20 => {
                // What is freed may be lost or not until it is written: it is made sure of.
                self.arena.advise(span(&part), MADV_FREE)?;
                self.arena.advise(span(&part), MADV_DONTNEED)?;
                self.zero(block, part);
            }
            20..28 => self.relocate(chance, block)?,
            28..31 => {
                self.arena.unmap(at(block, 0)..at(block, PAGES))?;
                self.blocks[block] = None;
            }
            31..34 => self.map(block)?,
            34..39 => {
                self.arena.protect(span(&part), PROT_READ)?;
                let looked = self.look(block, page);
                self.arena.protect(span(&part), PROT_BOTH)?;
                return Ok(looked);
            }
            _ => return self.fork(chance),
        }
        Ok(Ok(()))
    }

    fn zero(&mut self, block: usize, part: Range<usize>) {
        if let Some(pages) = &mut self.blocks[block] {
            pages[part].fill(0);
        }
    }

    /// Moves a block to where another one is, or none.
    fn relocate(&mut self, chance: &mut Chance, block: usize) -> Result<(), Failure> {
        let to = chance.below(self.blocks.len() as u64) as usize;
        if to != block {
            self.arena
                .relocate(at(block, 0)..at(block, PAGES), at(to, 0))?;
            self.blocks[to] = self.blocks[block].take();
        }
        Ok(())
    }

    /// A child that gives some up, looks at everything and ends.
    fn fork(&mut self, chance: &mut Chance) -> Result<Result<(), String>, Failure> {
        let block = chance.below(self.blocks.len() as u64) as usize;
        match fork()? {
            Fork::Child => {
                if self.blocks[block].is_some() {
                    let given_up = self.arena.advise(at(block, 0)..at(block, 7), MADV_DONTNEED);
                    self.zero(block, 0..7);
                    given_up?;
                }
                let status = self.check().map_or_else(
                    |wrong| {
                        eprintln!("in a child: {wrong}");
                        1
                    },
                    |()| 0,
                );
                std::process::exit(status)
            }
            Fork::Parent(child) => {
                let ended = waitpid(Some(child), WaitOptions::empty())?;
                let status = ended.and_then(|(_, status)| status.exit_status());
                Ok(match status {
                    Some(0) => Ok(()),
                    other => Err(format!("a child ended with {other:?}")),
                })
            }
        }
    }
}
