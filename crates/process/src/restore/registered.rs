//! Memory that is registered again with userfaultfds of the tree, when all threads are stopped and
//! all memory is filled.
//!
//! What is there page by page is made as it was: what came along with other pages goes, pages of
//! zeros come, and what is cached in a file is mapped only where it was.

use std::io;
use std::os::fd::AsFd;

use abi::Span;
use abi::spans::{Spans, subtract};
use memory::{States, states};
use resources::callers::{Callers, checked};
use resources::fd::userfaultfd::Userfaultfd;
use resources::map::memory::Mapping;
use resources::map::registered::{MINOR, MISSING, PROTECTION, Registration};
use rustix::fs::FallocateFlags;
use rustix::io::Errno;
use sys::uffd::{Features, Modes, Uffd};
use syscalls::Sysno;

use super::calls::Threads;
use crate::collect::cached_in;
use crate::pool::Pool;
use crate::records::{Saved, SavedTask};
use crate::{Error, Result};

/// How often what the kernel has brought in by itself meanwhile is taken out again.
const TRIES: usize = 5;

/// Refuses what an image claims of registered memory and is not so, before anything is made.
///
/// # Errors
/// [`resources::Error::Corrupt`].
pub(super) fn check(saved: &Saved<'_>) -> Result<()> {
    for task in &saved.tasks {
        for one in &task.registered {
            let description = saved.descriptions.get(one.description as usize);
            let record = description.and_then(|one| one.record::<Userfaultfd>());
            if record.is_none_or(|record| record.pid != task.node.pid) {
                let what = format!("{} is registered with no userfaultfd of it", one.span());
                let corrupt = resources::Error::corrupt("registered memory", what);
                return Err(corrupt.into());
            }
        }
    }
    Ok(())
}

/// Opens the conversations of all userfaultfds and registers all memory.
pub(super) fn register(saved: &Saved<'_>, pool: &Pool, threads: &mut Threads<'_>) -> Result<()> {
    for (id, description) in (0u32..).zip(&saved.descriptions) {
        let Some(record) = description.record::<Userfaultfd>() else {
            continue;
        };
        let Some((pid, fd)) = saved.holder(id) else {
            continue;
        };
        let uffd = Uffd::from(crate::collect::fetch(&saved.process(pid), fd)?);
        if let Some(features) = record.features {
            let opened = uffd.api(Features::from_bits_retain(features));
            opened.map_err(|error| {
                let features = format!("features {features:#x}");
                Error::kernel(format!("cannot have a userfaultfd with {features}"), error)
            })?;
        }
        for task in &saved.tasks {
            for one in task.registered.iter().filter(|one| one.description == id) {
                let mapping = task.memory.mappings.iter();
                let mapping = mapping.clone().find(|map| map.span() == one.span());
                Registering {
                    task,
                    one,
                    mapping: mapping.expect("checked when read"),
                    uffd: &uffd,
                    pool,
                }
                .register(threads)?;
            }
        }
    }
    Ok(())
}

/// A mapping that is being registered.
struct Registering<'a, 'b> {
    task: &'a SavedTask<'b>,
    one: &'a Registration,
    mapping: &'a Mapping,
    uffd: &'a Uffd,
    pool: &'a Pool,
}

impl Registering<'_, '_> {
    fn register(&self, threads: &mut Threads<'_>) -> Result<()> {
        self.cache()?;
        let span = self.one.span();
        let modes = Modes::from_bits_retain(self.one.modes.into());
        let present = self.one.present();
        let mut tries = 0;
        let now = loop {
            self.take_out(&present, threads)?;
            self.uffd
                .register(span, modes)
                .map_err(|e| self.failed(e))?;
            // From now on nothing comes by itself.
            let now = self.states()?;
            if subtract(&now.present, &present).is_empty() || !self.matters() {
                break now;
            }
            tries += 1;
            if tries == TRIES {
                let what = "pages are there that were missing";
                return Err(self.failed(io::Error::other(what)));
            }
            self.uffd.unregister(span).map_err(|e| self.failed(e))?;
        };
        if self.matters() {
            for span in subtract(&present, &now.present) {
                self.bring(span)?;
            }
        }
        for span in self.one.lost() {
            self.all_of(span, |rest| self.uffd.poison(rest, false))?;
        }
        for span in self.one.protected() {
            self.protect(span)?;
        }
        self.check_all()
    }

    /// Whether it makes a difference which pages are there: of ordinary files it makes none.
    fn matters(&self) -> bool {
        let missed = self.one.modes & (MISSING | MINOR) != 0;
        missed || self.mapping.is_anonymous()
    }

    /// Has the file have the pages that it had.
    fn cache(&self) -> Result<()> {
        let cached = self.one.cached();
        let (Some(id), false) = (self.mapping.file, cached.is_empty()) else {
            return Ok(());
        };
        let file = self.pool.own(id as usize);
        let huge = Some(self.one.huge_page_bytes).filter(|bytes| *bytes != 0);
        let place = (self.one.span(), self.mapping.offset);
        let there = || cached_in(file, place, huge);
        for span in subtract(&cached, &there()?) {
            let offset = self.mapping.offset + (span.start.0 - self.one.start);
            let made = match huge {
                Some(_) => {
                    let flags = FallocateFlags::KEEP_SIZE;
                    rustix::fs::fallocate(file, flags, offset, span.bytes())
                }
                None => write_zeros(file, offset, span.bytes()),
            };
            made.map_err(|errno| self.failed(errno.into()))?;
        }
        if !subtract(&there()?, &cached).is_empty() {
            let what = "the file has pages that it had not";
            return Err(self.failed(io::Error::other(what)));
        }
        Ok(())
    }

    /// Has the task give up what is there and was not: what was brought in with other pages.
    fn take_out(&self, present: &Spans, threads: &mut Threads<'_>) -> Result<()> {
        const MADV_DONTNEED: u64 = libc::MADV_DONTNEED as u64;
        const MADV_DONTNEED_LOCKED: u64 = libc::MADV_DONTNEED_LOCKED as u64;
        if !self.matters() {
            return Ok(());
        }
        let advice = match self.mapping.locked {
            0 => MADV_DONTNEED,
            _ => MADV_DONTNEED_LOCKED,
        };
        for span in subtract(&self.states()?.present, present) {
            let args = [span.start.0, span.bytes(), advice, 0, 0, 0];
            let done = threads.call(self.task.node.pid, Sysno::madvise, args.map(Some), &[])?;
            checked(done, || self.doing())?;
        }
        Ok(())
    }

    /// Has pages be there that nobody has filled: zeros, or what the file has.
    fn bring(&self, span: Span) -> Result<()> {
        if self.mapping.file.is_some() {
            return self.all_of(span, |rest| self.uffd.map_cached(rest, false));
        }
        if self.one.huge_page_bytes == 0 {
            return self.all_of(span, |rest| self.uffd.zero(rest, false));
        }
        // Those of hugetlbfs have no page of zeros.
        let zeros = vec![0; self.one.page_bytes() as usize];
        self.all_of(span, |rest| {
            let copied = self.uffd.copy(rest.start, &zeros, false);
            copied.map(|bytes| bytes as u64)
        })
    }

    fn protect(&self, span: Span) -> Result<()> {
        if self.one.modes & PROTECTION == 0 {
            return Ok(());
        }
        loop {
            match self.uffd.write_protect(span, true) {
                Err(error) if is(&error, Errno::AGAIN) => {}
                done => return done.map_err(|error| self.failed(error)),
            }
        }
    }

    /// Calls `place` until all of `span` is done; what is there already is left.
    fn all_of(&self, span: Span, place: impl Fn(Span) -> io::Result<u64>) -> Result<()> {
        let mut rest = span;
        while !rest.is_empty() {
            let bytes = match place(rest) {
                Err(error) if is(&error, Errno::AGAIN) => 0,
                Err(error) if is(&error, Errno::EXIST) => self.one.page_bytes(),
                placed => placed.map_err(|error| self.failed(error))?,
            };
            rest.start = rest.start.plus(bytes).min(rest.end);
        }
        Ok(())
    }

    /// Insists that memory of the task's own is page by page as it was.
    fn check_all(&self) -> Result<()> {
        let now = self.states()?;
        let (present, protected) = (self.one.present(), self.one.protected());
        let differs = |one: &Spans, other: &Spans| {
            !subtract(one, other).is_empty() || !subtract(other, one).is_empty()
        };
        let what = if self.mapping.is_anonymous() && differs(&now.present, &present) {
            "other pages are there"
        } else if differs(&now.protected, &protected) {
            "other pages are protected"
        } else {
            return Ok(());
        };
        log::debug!("{now:?}, wanted {present:?} and {protected:?}");
        Err(self.failed(io::Error::other(what)))
    }

    fn states(&self) -> Result<States> {
        Ok(states(&self.task.process(), self.one.span())?)
    }

    fn doing(&self) -> String {
        let (span, pid) = (self.one.span(), self.task.node.pid);
        format!("cannot register {span} of {pid} with its userfaultfd")
    }

    fn failed(&self, error: io::Error) -> Error {
        Error::kernel(self.doing(), error)
    }
}

fn is(error: &io::Error, errno: Errno) -> bool {
    Errno::from_io_error(error) == Some(errno)
}

/// Writes zeros to a file, within its size.
fn write_zeros(file: impl AsFd, offset: u64, bytes: u64) -> rustix::io::Result<()> {
    let size = rustix::fs::fstat(&file)?.st_size.cast_unsigned();
    let end = (offset + bytes).min(size);
    let zeros = [0; 1 << 16];
    let mut at = offset;
    while at < end {
        let count = usize::try_from(end - at).map_or(zeros.len(), |rest| rest.min(zeros.len()));
        at += rustix::io::pwrite(&file, &zeros[..count], at)? as u64;
    }
    Ok(())
}
