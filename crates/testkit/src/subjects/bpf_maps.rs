//! A process and a child of it that have maps of BPF: a hash in which the child counts through a
//! descriptor of its own and the process reads through one that may not write, a large array with
//! values of each processor, a queue around the end of its room, and a frozen trie.
//!
//! `check` has the child count, takes a value out of the queue and puts one in, and answers "right"
//! if all of them hold what they must.
use std::io::{PipeReader, PipeWriter, Read, Write, pipe};
use std::os::fd::OwnedFd;

use sys::bpf_map::{self, Definition, Entries, READ_ONLY, Sizes};
use sys::fork::{Fork, fork};
use sys::per_cpu;

use super::{Control, Failure, not_understood};

const HASH: u32 = 1;
const PER_CPU_ARRAY: u32 = 6;
const LRU_HASH: u32 = 9;
const TRIE: u32 = 11;
const QUEUE: u32 = 22;
/// `BPF_F_NO_PREALLOC`, which tries must have.
const NO_PREALLOCATION: u32 = 1;
const COUNT: Sizes = Sizes { key: 4, value: 8 };
const KEY: [u8; 4] = *b"here";
const PREFIX: Sizes = Sizes { key: 8, value: 8 };
/// Beyond what a record has by itself.
const ENTRIES: u32 = 3000;
const ROOM: u32 = 3;

struct Maps {
    seen: OwnedFd,
    _counted: OwnedFd,
    large: OwnedFd,
    recent: OwnedFd,
    queue: OwnedFd,
    frozen: OwnedFd,
    tells: PipeWriter,
    answers: PipeReader,
    counts: u64,
}

fn make(kind: u32, sizes: (u32, u32), max_entries: u32, name: &str) -> Result<OwnedFd, Failure> {
    Ok(bpf_map::create(&Definition {
        kind,
        key_bytes: sizes.0,
        value_bytes: sizes.1,
        max_entries,
        flags: if kind == TRIE { NO_PREALLOCATION } else { 0 },
        numa_node: 0,
        name: name.as_bytes().to_vec(),
    })?)
}

/// Counts whenever it is told, until it is killed.
fn be_child(map: u32, mut told: PipeReader, mut says: PipeWriter) -> Result<(), Failure> {
    let own = bpf_map::open(map, 0)?;
    for count in 1_u64.. {
        told.read_exact(&mut [0])?;
        bpf_map::update(&own, (&KEY, &count.to_ne_bytes()), COUNT)?;
        says.write_all(b"x")?;
    }
    Ok(())
}

fn large() -> Result<Sizes, Failure> {
    let value = 8 * per_cpu::possible()?.len();
    Ok(Sizes { key: 4, value })
}

/// Keys from 0 on, and something for each.
fn numbered(sizes: Sizes) -> (Vec<u8>, Vec<u8>) {
    let keys = (0..ENTRIES).flat_map(u32::to_ne_bytes).collect();
    let values = 0..ENTRIES as usize * sizes.value;
    (keys, values.map(|at| (at % 253) as u8).collect())
}

impl Maps {
    fn make() -> Result<Self, Failure> {
        let counted = make(HASH, (4, 8), 8, "counted")?;
        let id = bpf_map::info(&counted)?.id;
        let large_map = make(PER_CPU_ARRAY, (4, 8), ENTRIES, "large")?;
        let (keys, values) = numbered(large()?);
        bpf_map::update(&large_map, (&keys, &values), large()?)?;
        let recent = make(LRU_HASH, (4, 8), ENTRIES, "recent")?;
        let (keys, values) = numbered(COUNT);
        bpf_map::update(&recent, (&keys[..4000], &values[..8000]), COUNT)?;
        let queue = make(QUEUE, (0, 8), ROOM, "queue")?;
        (1..=2_u64).try_for_each(|value| bpf_map::push(&queue, &value.to_ne_bytes()))?;
        let frozen = make(TRIE, (8, 8), 10, "frozen")?;
        for bits in [8_u32, 24, 32] {
            let key = [bits.to_ne_bytes(), [10, 1, 2, 3]].concat();
            let value = u64::from(bits).to_ne_bytes();
            bpf_map::update(&frozen, (&key, &value), PREFIX)?;
        }
        bpf_map::freeze(&frozen)?;
        let (told, tells) = pipe()?;
        let (answers, says) = pipe()?;
        if fork()? == Fork::Child {
            be_child(id, told, says)?;
            std::process::exit(1);
        }
        Ok(Self {
            seen: bpf_map::open(id, READ_ONLY)?,
            _counted: counted,
            large: large_map,
            recent,
            queue,
            frozen,
            tells,
            answers,
            counts: 0,
        })
    }

    fn count(&mut self) -> Result<u64, Failure> {
        self.tells.write_all(b"x")?;
        self.answers.read_exact(&mut [0])?;
        self.counts += 1;
        let (_, value) = Entries::new(&self.seen, COUNT).read()?.ok_or("no count")?;
        let seen = u64::from_ne_bytes(value.as_slice().try_into()?);
        match seen == self.counts {
            true => Ok(seen),
            false => Err(format!("{seen} for {}", self.counts).into()),
        }
    }

    fn check(&mut self) -> Result<(), Failure> {
        self.count()?;
        let (sizes, (_, wanted)) = (large()?, numbered(large()?));
        let mut entries = Entries::new(&self.large, sizes);
        let mut values = Vec::new();
        while let Some((_, some)) = entries.read()? {
            values.extend(some);
        }
        if values != wanted {
            return Err("the large array has other values".into());
        }
        for key in 0..1000_u32 {
            if !bpf_map::has(&self.recent, &key.to_ne_bytes(), COUNT)? {
                return Err(format!("{key} was forgotten").into());
            }
        }
        // One comes out and one goes in, so that it turns in its room.
        let first = bpf_map::pop(&self.queue, 8)?.ok_or("the queue is empty")?;
        let first = u64::from_ne_bytes(first.as_slice().try_into()?);
        bpf_map::push(&self.queue, &(first + 2).to_ne_bytes())?;
        if first != self.counts {
            return Err(format!("{first} came out of the queue").into());
        }
        let key = [32_u32.to_ne_bytes(), [10, 1, 2, 3]].concat();
        match bpf_map::update(&self.frozen, (&key, &[0; 8]), PREFIX) {
            Ok(()) => Err("it is not frozen".into()),
            Err(_) if bpf_map::has(&self.frozen, &key, PREFIX)? => Ok(()),
            Err(_) => Err("a prefix is gone".into()),
        }
    }
}

pub(super) fn run(control: Control, _: &[String]) -> Result<(), Failure> {
    let mut maps = Maps::make()?;
    control.serve(|question| match question.verb.as_str() {
        "check" => {
            let checked = maps.check();
            Ok(checked.map_or_else(|error| error.to_string(), |()| "right".to_owned()))
        }
        _ => not_understood(question),
    })
}
