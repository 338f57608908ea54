//! Fills the memory of tasks from outside, that of several tasks at a time.

use std::panic::resume_unwind;
use std::sync::{Mutex, PoisonError, mpsc};
use std::thread::{Builder, scope};

use abi::{Addr, offset};
use image::Reader;
use memory::sink;
use sys::process::Process;
use sys::restore_area::RestoreArea;
use sys::uffd::Uffd;

use crate::Result;
use crate::build::Built;
use crate::lazy::Client;
use crate::plan::Outside;

/// A task that waits for its pages.
struct Job<'a> {
    outside: &'a Outside,
    /// Its userfaultfd, as its own descriptor.
    fd: i32,
    /// The word that tells it that all is filled.
    filled: Addr,
}

impl<'a> Job<'a> {
    fn new(built: &Built, outside: &'a Outside) -> Self {
        let (script, step) = outside.uffd;
        let op = built.op(script, step);
        let fd = built.area.load(op.plus(offset::RESULT as u64)) as i32;
        let filled = built.word(outside.filled);
        Self {
            outside,
            fd,
            filled,
        }
    }

    /// Fills its pages, or has them come later, and lets it go on; how many were filled.
    fn fill(&self, reader: &Reader, area: &RestoreArea, lazy: Option<&Client>) -> Result<u64> {
        let outside = self.outside;
        let process = Process::new(outside.pid);
        let uffd = Uffd::from(crate::collect::fetch(&process, self.fd)?);
        let space = outside.space;
        let stored = outside.stored.iter();
        let extents = stored.map(|stored| pages::Extent::of(space, stored.span));
        let extents = extents.collect::<Vec<_>>();
        let placed = pages::place(reader, &extents)?;
        // Whole mappings: one that is registered in parts stays split when its parts are filled.
        let mappings = &outside.mappings;
        let filled = match lazy.filter(|_| !outside.lazy.is_empty()) {
            Some(lazy) => {
                lazy.hand_over((outside.pid, space), &uffd, &outside.lazy, &outside.stacks)?;
                let sink = sink::Memory::new(&process);
                pages::fill(reader, &placed, &sink, &|_| ())?
            }
            None => {
                let sink = sink::MissingPages::new(&process, uffd, mappings)?;
                pages::fill(reader, &placed, &sink, &|_| ())?
            }
        };
        area.post(area.word(self.filled), 1);
        Ok(filled.pages)
    }
}

/// Fills the pages of all tasks of the plan, each once `wait` says that it is ready; how many there
/// were. One task of some megabytes is the work of one thread, so several tasks are filled at the
/// same time, while others are still being made.
///
/// # Errors
/// Those of `wait`, and the first of those of the fills.
pub(super) fn fill(
    reader: &Reader,
    built: &Built,
    lazy: Option<&Client>,
    wait: impl Fn(&Outside) -> Result<()>,
) -> Result<u64> {
    let all = &built.plan.outside;
    let (give, jobs) = mpsc::channel::<Job<'_>>();
    let jobs = Mutex::new(jobs);
    let area = &built.area;
    let work = || {
        let mut pages = 0;
        loop {
            let jobs = jobs.lock().unwrap_or_else(PoisonError::into_inner);
            let job = jobs.recv();
            drop(jobs);
            let Ok(job) = job else { return Ok(pages) };
            pages += job.fill(reader, area, lazy)?;
        }
    };
    let bytes = all.iter().flat_map(|outside| &outside.stored);
    let bytes = bytes.map(|stored| stored.span.bytes()).sum::<u64>();
    scope(|scope| {
        let threads = pages::threads(bytes).min(all.len());
        // Where none can be made, this one does it all.
        let others = (1..threads).map_while(|_| Builder::new().spawn_scoped(scope, work).ok());
        let others = others.collect::<Vec<_>>();
        let given = all.iter().try_for_each(|outside| {
            wait(outside)?;
            // Nobody takes it any more only where a fill has failed.
            let _ = give.send(Job::new(built, outside));
            Ok(())
        });
        drop(give);
        let mut filled = given.and_then(|()| work());
        for other in others {
            let other = other.join().unwrap_or_else(|panic| resume_unwind(panic));
            filled = filled.and_then(|pages| Ok(pages + other?));
        }
        filled
    })
}
