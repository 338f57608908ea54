//! Plan → built: descriptors are open, the restore area is mapped and the scripts stand in it.

use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, RawFd};
use std::sync::Arc;

use abi::{Addr, Header, Op, PAGE_BYTES, Span};
use image::Reader;
use resources::Allow;
use resources::cgroup::{Cgroups, Groups};
use resources::script::{Layout, ScriptId, StepAt, WordId};
use rustix::process::{PidfdFlags, pidfd_open};
use sys::restore_area::RestoreArea;
use tracee::arch::SUBMIT_LOOP;

use crate::plan::Plan;
use crate::pool::Pool;
use crate::records::Saved;
use crate::{Error, InheritFd, Result};

/// The address after the last one that a task can map with four-level page tables.
const TOP: Addr = Addr(0x7fff_ffff_f000);

/// How many bytes at the end of the restore area are for the restorer's use.
const SCRATCH_BYTES: u64 = 24;

/// A plan that only has to be set in motion.
pub(crate) struct Built {
    pub plan: Plan,
    pub area: RestoreArea,
    /// The descriptor of its memory.
    pub memory: RawFd,
    /// The address of each script's first op.
    pub scripts: Vec<Addr>,
    /// The control groups of the tree.
    pub groups: Groups,
}

impl Built {
    /// The header that all threads report to.
    pub fn header(&self) -> Addr {
        self.area.span().start.plus(PAGE_BYTES)
    }

    /// The address of a shared word.
    pub fn word(&self, id: WordId) -> Addr {
        words(self.area.span()).plus(4 * u64::from(id.0))
    }

    /// Room of [`SCRATCH_BYTES`] in the restore area that no script uses.
    pub fn scratch(&self) -> Addr {
        Addr(self.area.span().end.0 - SCRATCH_BYTES)
    }

    /// Where [`SUBMIT_LOOP`] stands in all tasks.
    pub fn submit_loop(&self) -> Addr {
        self.area.span().start.plus(blob::code().len() as u64)
    }

    /// The address of a step's op.
    pub fn op(&self, script: ScriptId, step: StepAt) -> Addr {
        self.scripts[script.0 as usize].plus(u64::from(step.0) * Op::BYTES as u64)
    }

    /// The tree goes on.
    pub fn succeed(self) {
        self.groups.keep();
    }
}

fn words(area: Span) -> Addr {
    area.start.plus(PAGE_BYTES + Header::BYTES as u64)
}

/// Makes the control groups of the tree, and opens all that its tasks inherit but files of pages.
fn open(
    plan: &Plan,
    (saved, cgroups): (&Saved<'_>, Option<&Cgroups>),
    reader: &Arc<Reader>,
    allow: &Allow,
    inherit: &[InheritFd],
) -> Result<(Groups, Pool)> {
    // Their directories and files may be open in the tree.
    let groups = match cgroups {
        Some(cgroups) => Groups::prepare(cgroups, &allow.cgroups)?,
        None => Groups::default(),
    };
    let mut pool = Pool::new(allow.clone(), reader.clone(), inherit);
    pool.open_all(saved, plan)?;
    for join in &plan.groups {
        let file = groups.open(&join.hierarchy, &join.path, false)?;
        pool.keep(file);
    }
    if plan.fetches {
        let own = rustix::process::getpid();
        let own = pidfd_open(own, PidfdFlags::empty());
        pool.keep(own.map_err(|e| Error::kernel("cannot make a pidfd of this process", e))?);
        pool.keep_pidfds();
    }
    Ok((groups, pool))
}

/// Opens what the tasks inherit and lays out the restore area.
pub(crate) fn build(
    plan: Plan,
    (saved, cgroups): (&Saved<'_>, Option<&Cgroups>),
    reader: &Arc<Reader>,
    allow: &Allow,
    inherit: &[InheritFd],
) -> Result<(Built, Pool)> {
    let (groups, mut pool) = open(&plan, (saved, cgroups), reader, allow, inherit)?;
    let numbers = pool.numbers(saved, &plan)?;
    let words_bytes = (u64::from(plan.words) * 4).next_multiple_of(64);
    let sizes = plan.scripts.iter().map(|planned| {
        let ops = planned.script.ops_bytes() as u64;
        let data = planned.script.data_bytes() as u64;
        (ops.next_multiple_of(64), data.next_multiple_of(64))
    });
    let sizes = sizes.collect::<Vec<_>>();
    let head = PAGE_BYTES + Header::BYTES as u64 + words_bytes;
    let head = head.next_multiple_of(64);
    let total = head + sizes.iter().map(|(ops, data)| ops + data).sum::<u64>() + SCRATCH_BYTES;
    let bytes = total.next_multiple_of(PAGE_BYTES);
    let memory = RestoreArea::memory(bytes, &code());
    let memory = memory.map_err(|e| Error::kernel("cannot make the restore area", e))?;
    let area = place_area(saved, &plan.taken, (bytes, memory.as_fd()))?;
    let number = memory.as_raw_fd();
    // Closed with the others.
    pool.keep(memory);
    let span = area.span();
    // A task whose maker was killed finds that out by a call that fails: it must not stay.
    let header = Header {
        fatal: 1,
        ..Header::default()
    };
    area.write(span.start.plus(PAGE_BYTES), &header.to_bytes());
    let mut at = span.start.plus(head);
    let mut places = Vec::with_capacity(sizes.len());
    for (ops, data) in sizes {
        places.push((at, at.plus(ops)));
        at = at.plus(ops + data);
    }
    let scripts = places.iter().map(|place| place.0).collect::<Vec<_>>();
    for (planned, (ops, data)) in plan.scripts.iter().zip(places) {
        let layout = Layout {
            ops,
            data,
            words: words(span),
            pool: &numbers,
            scripts: &scripts,
            area: span,
            top: TOP,
        };
        let (op_bytes, data_bytes) = planned.script.compile(&layout);
        area.write(ops, &op_bytes);
        area.write(data, &data_bytes);
    }
    let built = Built {
        plan,
        area,
        memory: number,
        scripts,
        groups,
    };
    Ok((built, pool))
}

/// The blob, and what it needs no op for behind it.
fn code() -> Vec<u8> {
    [blob::code(), &SUBMIT_LOOP[..]].concat()
}

/// Maps the restore area where no task has a mapping and this process has none either.
fn place_area(
    saved: &Saved<'_>,
    more: &[Span],
    (bytes, memory): (u64, BorrowedFd<'_>),
) -> Result<RestoreArea> {
    const LOWEST: Addr = Addr(0x10_0000);
    // Stacks may grow down to this distance of their neighbour (mmap(2), "stack guard gap").
    const MARGIN_BYTES: u64 = 2 << 20;
    let maps = saved.tasks.iter().flat_map(|task| &task.memory.mappings);
    let mut taken = maps
        .map(resources::map::memory::Mapping::span)
        .chain(more.iter().copied())
        .collect::<Vec<_>>();
    taken.sort_unstable();
    // Calls of 32 bits only reach what is below.
    let top = match saved.has_32_bit_code() {
        false => TOP,
        true => Addr(1 << 32),
    };
    let taken = taken.into_iter().filter(|span| span.start < top);
    let mut start = LOWEST;
    let mut last = None;
    for span in taken.chain([Span {
        start: top,
        end: top,
    }]) {
        while start.plus(bytes + MARGIN_BYTES) <= span.start {
            match RestoreArea::map(Span::new(start, bytes), memory) {
                Ok(area) => return Ok(area),
                Err(error) => last = Some(error),
            }
            start = start.plus(64 << 20);
        }
        start = start.max(span.end.plus(MARGIN_BYTES).page_start());
    }
    let source = last.unwrap_or_else(|| std::io::ErrorKind::OutOfMemory.into());
    Err(Error::kernel(
        format!("no address is free for a restore area of {bytes} bytes"),
        source,
    ))
}
