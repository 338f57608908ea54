//! Copies stale blocks into the image.
use std::sync::atomic::Ordering;

use abi::{Addr, PAGE_BYTES, Span};
use image::{NewRun, Run, Writer};
use pages::{Buffer, Extent, Source, sort_out};
use rustix::io::Errno;

use super::blocks::{BLOCK_BYTES, OldChunk, State, bits_of, block_of, bytes_of, span_of, spans_of};
use super::state::SharedState;
use super::task::{Task, let_change};
use crate::{Error, Result};

/// Blocks that are copied together: a megabyte. Who writes to one of them waits for all.
const BATCH: usize = 16;

/// Buffers of one copying thread.
pub struct Worker {
    contents: Buffer,
    fresh: NewChunks,
}

impl Worker {
    /// For the thread that has the pages object `part` to itself.
    pub fn new(part: usize) -> Self {
        Self {
            contents: Buffer::new(BATCH * BLOCK_BYTES as usize),
            fresh: NewChunks::new(part),
        }
    }
}

/// Validity of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Check {
    /// It is of the instant.
    Valid,
    /// Not known yet: the mappings are changing.
    Changing,
    /// Pages were discarded meanwhile.
    Lost,
}

/// Copies the stale blocks of `span` of a task before the instant. Returns how many bytes were
/// read. What cannot be read is left to the next round.
pub fn copy_stale(
    task: &Task,
    span: Span,
    shared: &SharedState,
    writer: &Writer,
    worker: &mut Worker,
) -> Result<u64> {
    let todo = task.book().blocks.stale_in(span, usize::MAX);
    let mut copied_bytes = 0;
    for batch in todo.chunks(BATCH) {
        let claimed = claim(task, batch);
        let quiet = task.book().shared.clone();
        let contents = worker.contents.bytes();
        match read(task, &quiet, &claimed, contents) {
            Ok(read_bytes) => {
                copied_bytes += read_bytes as u64;
                let contents = &mut contents[..read_bytes];
                put(task, &claimed, contents, writer, &mut worker.fresh)?;
            }
            Err(error) => {
                give_up(task, &claimed);
                alive(task, error)?;
            }
        }
        release(task, shared);
    }
    Ok(copied_bytes)
}

/// Copies all stale blocks of tasks after the instant: first those that somebody waits for, then,
/// so that there is room for more, what was saved. Returns whether they are of the instant.
pub fn copy_rest(
    tasks: &[&Task],
    shared: &SharedState,
    writer: &Writer,
    worker: &mut Worker,
    progress: &dyn Fn(u64),
) -> Result<bool> {
    const WHOLE: Span = Span {
        start: Addr(0),
        end: Addr(u64::MAX),
    };
    // Tasks before this one have nothing stale: after the instant, nothing becomes so.
    let mut first = 0;
    while !tasks.iter().any(|task| task.is_lost()) {
        if let Some((task, urgent)) = tasks.iter().find_map(|task| task.take_urgent()) {
            for batch in urgent.chunks(BATCH) {
                copy_batch(task, batch, shared, writer, worker, progress)?;
            }
            continue;
        }
        let saved = tasks.iter().find(|task| !task.book().saved.is_empty());
        if let Some(task) = saved {
            write_saved(task, BATCH, shared, writer, &mut worker.fresh)?;
            continue;
        }
        let Some(task) = tasks.get(first) else {
            return Ok(true);
        };
        let batch = task.book().blocks.stale_in(WHOLE, BATCH);
        if batch.is_empty() {
            first += 1;
        } else {
            copy_batch(task, &batch, shared, writer, worker, progress)?;
        }
    }
    Ok(false)
}

/// Copies blocks after the instant, and lets those go on who wait for them.
fn copy_batch(
    task: &Task,
    batch: &[u64],
    shared: &SharedState,
    writer: &Writer,
    worker: &mut Worker,
    progress: &dyn Fn(u64),
) -> Result<()> {
    let claimed = claim(task, batch);
    let quiet = task.book().shared.clone();
    let contents = worker.contents.bytes();
    let copied = read(task, &quiet, &claimed, contents);
    let copied = copied.and_then(|bytes| Ok((wait_checked(task, &claimed)?, bytes)));
    match copied {
        Ok((Some(kept), read_bytes)) => {
            // The task may change them from here on.
            release(task, shared);
            progress(read_bytes as u64);
            let kept_bytes = keep(&claimed, &kept, &mut contents[..read_bytes]);
            put(
                task,
                &kept,
                &mut contents[..kept_bytes],
                writer,
                &mut worker.fresh,
            )?;
        }
        Ok((None, _)) => lose(task, &claimed),
        Err(error) => {
            lose(task, &claimed);
            alive(task, error)?;
        }
    }
    release(task, shared);
    Ok(())
}

/// Moves the contents of the blocks `kept` together; returns their size.
fn keep(claimed: &[(u64, u16)], kept: &[(u64, u16)], contents: &mut [u8]) -> usize {
    let (mut from, mut to) = (0, 0);
    let mut kept = kept.iter().peekable();
    for block in claimed {
        let bytes = bytes_of(block.1);
        if kept.next_if_eq(&block).is_some() {
            contents.copy_within(from..from + bytes, to);
            to += bytes;
        }
        from += bytes;
    }
    to
}

/// A page that cannot be read is not worth an error while the task lives.
fn alive(task: &Task, error: Error) -> Result<()> {
    match error {
        Error::Read { .. } | Error::Scan { .. } => {
            log::debug!("{error}");
            Ok(())
        }
        error => {
            log::debug!("task {}: {error}", task.pid());
            Err(error)
        }
    }
}

fn lose(task: &Task, claimed: &[(u64, u16)]) {
    task.lose();
    give_up(task, claimed);
}

/// Takes stale blocks to be copied; returns them and their pages.
fn claim(task: &Task, batch: &[u64]) -> Vec<(u64, u16)> {
    let mut book = task.book();
    let mut claimed = Vec::with_capacity(batch.len());
    for number in batch {
        let Some(block) = book.blocks.get(*number) else {
            continue;
        };
        if block.state == State::Stale {
            claimed.push((*number, block.mask));
            book.blocks.set(*number, State::Copying);
        }
    }
    claimed
}

fn give_up(task: &Task, claimed: &[(u64, u16)]) {
    let mut book = task.book();
    for (number, _) in claimed {
        if book.blocks.state(*number) == Some(&State::Copying) {
            book.blocks.set(*number, State::Stale);
        }
    }
}

/// Reads pages of blocks, back to back, to the start of `contents`; returns how many bytes.
pub fn read(
    task: &Task,
    quiet: &[Span],
    blocks: &[(u64, u16)],
    contents: &mut [u8],
) -> Result<usize> {
    let read_bytes = blocks.iter().map(|(_, mask)| bytes_of(*mask)).sum();
    let is_quiet = |number: u64| {
        let place = span_of(number);
        let after = quiet.partition_point(|span| span.end <= place.start);
        quiet.get(after).is_some_and(|span| span.overlaps(place))
    };
    let mut rest = &mut contents[..read_bytes];
    for same in blocks.chunk_by(|one, other| is_quiet(one.0) == is_quiet(other.0)) {
        let extents = same
            .iter()
            .flat_map(|(number, mask)| pieces(task, *number, *mask));
        let extents = extents.collect::<Vec<_>>();
        let bytes = extents.iter().map(Extent::bytes).sum::<u64>();
        let (part, after) = rest.split_at_mut(bytes as usize);
        let source = if is_quiet(same[0].0) {
            &task.quiet
        } else {
            &task.memory
        };
        source.read(&extents, part)?;
        rest = after;
    }
    Ok(read_bytes)
}

fn pieces(task: &Task, number: u64, mask: u16) -> impl Iterator<Item = Extent> {
    spans_of(number, mask).map(|span| Extent {
        space: task.space,
        first_page: span.start.page(),
        at: span.start,
        pages: span.pages(),
    })
}

/// Checks, after they were read, whether blocks are still what they were at the instant.
///
/// A page that is protected now was so all the time. Where a mapping is being changed, its place
/// may have been taken by another that is not known yet: the kernel says so when asked to protect.
pub fn check(task: &Task, blocks: &[(u64, u16)]) -> Result<Check> {
    for near in blocks.chunk_by(|one, other| one.0 + 1 == other.0) {
        let (first, last) = (near[0], near[near.len() - 1]);
        let span = Span {
            start: span_of(first.0).start,
            end: span_of(last.0).end,
        };
        let protected = task.protected(span)?;
        let mut at = 0;
        for (number, mask) in near {
            at += protected[at..].partition_point(|span| span.end <= span_of(*number).start);
            let place = span_of(*number);
            let here = protected[at..]
                .iter()
                .take_while(|span| span.start < place.end);
            let bits = here.fold(0, |all, span| all | bits_of(*number, *span));
            if mask & !bits != 0 {
                return Ok(Check::Lost);
            }
        }
    }
    let page = blocks
        .iter()
        .find_map(|(number, mask)| spans_of(*number, *mask).next());
    let Some(page) = page else {
        return Ok(Check::Valid);
    };
    let page = Span::new(page.start, PAGE_BYTES);
    match task.uffd.write_protect(page, true) {
        Ok(()) => Ok(Check::Valid),
        Err(error) if Errno::from_io_error(&error) == Some(Errno::AGAIN) => Ok(Check::Changing),
        Err(_) => Ok(Check::Lost),
    }
}

/// Checks until it is known whether blocks that were read are of the instant, but for those that
/// were saved meanwhile as somebody was about to write to them. Returns the others, which may
/// change now.
fn wait_checked(task: &Task, claimed: &[(u64, u16)]) -> Result<Option<Vec<(u64, u16)>>> {
    loop {
        {
            // Nobody saves one of them while the book is open.
            let mut book = task.book();
            let is_ours = |block: &&(u64, u16)| book.blocks.state(block.0) == Some(&State::Copying);
            let kept = claimed.iter().filter(is_ours).copied().collect::<Vec<_>>();
            match check(task, &kept)? {
                Check::Valid => {
                    for (number, _) in &kept {
                        book.blocks.set(*number, State::Saved);
                    }
                    return Ok(Some(kept));
                }
                Check::Lost => return Ok(None),
                Check::Changing => {}
            }
        }
        let_change();
    }
}

/// Puts the contents of claimed blocks into the image.
fn put(
    task: &Task,
    claimed: &[(u64, u16)],
    contents: &mut [u8],
    writer: &Writer,
    fresh: &mut NewChunks,
) -> Result<()> {
    let mut rest = contents;
    for (number, mask) in claimed {
        let (own, after) = rest.split_at_mut(bytes_of(*mask));
        rest = after;
        let pieces = pieces(task, *number, *mask).collect::<Vec<_>>();
        let (mut runs, mut zeros) = (Vec::new(), Vec::new());
        let kept = sort_out(&pieces, own, &mut runs, &mut zeros);
        let pages = (kept / PAGE_BYTES as usize) as u64;
        let chunk = task.book().blocks.take_chunk(*number, pages);
        match chunk {
            Some(chunk) => {
                let stored = writer.store_again(chunk.id, &own[..kept], &runs);
                let stored = stored.map_err(pages::Error::image("write"))?;
                done(task, *number, stored);
            }
            None => fresh.add(*number, &own[..kept], runs),
        }
    }
    fresh.store(task, writer)
}

/// Blocks that get new chunks, all with one write.
pub struct NewChunks {
    part: usize,
    bytes: Vec<u8>,
    runs: Vec<NewRun>,
    blocks: Vec<(u64, usize)>,
}

impl NewChunks {
    /// For chunks in the pages object `part`.
    pub fn new(part: usize) -> Self {
        Self {
            part,
            bytes: Vec::new(),
            runs: Vec::new(),
            blocks: Vec::new(),
        }
    }

    fn add(&mut self, number: u64, bytes: &[u8], runs: Vec<NewRun>) {
        self.bytes.extend_from_slice(bytes);
        self.blocks.push((number, runs.len()));
        self.runs.extend(runs);
    }

    fn store(&mut self, task: &Task, writer: &Writer) -> Result<()> {
        let stored = writer.store(self.part, &self.bytes, &self.runs);
        let mut stored = stored.map_err(pages::Error::image("write"))?.into_iter();
        for (number, count) in self.blocks.drain(..) {
            done(task, number, stored.by_ref().take(count).collect());
        }
        self.bytes.clear();
        self.runs.clear();
        Ok(())
    }
}

/// Notes where a block is now.
fn done(task: &Task, number: u64, runs: Vec<Run>) {
    let part = runs.first().and_then(Run::part);
    let chunk = part.map(|part| OldChunk {
        id: part.chunk,
        pages: runs.iter().map(|run| u64::from(run.pages)).sum(),
    });
    task.book().blocks.done(number, runs, chunk);
}

/// Writes the first `most` of the blocks that were saved before they changed.
pub fn write_saved(
    task: &Task,
    most: usize,
    shared: &SharedState,
    writer: &Writer,
    fresh: &mut NewChunks,
) -> Result<()> {
    let saved = {
        let saved = &mut task.book().saved;
        let count = saved.len().min(most);
        saved.drain(..count).collect::<Vec<_>>()
    };
    for (number, mut contents) in saved {
        let mask = task.book().blocks.get(number).map_or(0, |block| block.mask);
        let written = put(task, &[(number, mask)], &mut contents, writer, fresh);
        shared
            .saved_bytes
            .fetch_sub(BLOCK_BYTES as usize, Ordering::SeqCst);
        written?;
    }
    Ok(())
}

/// Lets those go on who wait for a block that is copied, or for an instant that is lost.
pub fn release(task: &Task, shared: &SharedState) {
    let (ready, registered) = {
        let mut book = task.book();
        let saving = shared.saving.load(Ordering::SeqCst) && !task.is_lost();
        let waiting = std::mem::take(&mut book.waiting);
        let (still, ready): (Vec<_>, Vec<_>) = waiting.into_iter().partition(|fault| {
            let state = book.blocks.state(block_of(fault.addr));
            saving && matches!(state, Some(State::Stale | State::Copying))
        });
        book.waiting = still;
        if ready.is_empty() {
            return;
        }
        (ready, book.registered.clone())
    };
    for fault in ready {
        let lifted = loop {
            if let Some(lifted) = task.unprotect(&registered, fault.addr) {
                break lifted;
            }
            // The thread that hears of events ends a change of the mappings, and needs the book.
            let_change();
        };
        task.book().lifted.add(lifted);
        shared.note_wait(fault.since);
    }
}
