//! Steps that change a task's memory, and the look whether it is what it must be.
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use rustix::fs::{MemfdFlags, Mode, OFlags, memfd_create};
use rustix::io::Errno;
use sys::own::{Attribute, attribute};

use super::{Object, StepResult, Task};
use crate::calls::ARENA_START;
use crate::storm::memory::{Page, PageSource};
use crate::storm::step::{
    ARENA_PAGES, Action, Advice, Backing, Contents, MappingKind, OBJECT_PAGES, OBJECTS, PAGE_BYTES,
    Span,
};
use crate::subjects::Failure;

/// Where a page's contents stand, twice.
const STAMPS: [usize; 2] = [0, PAGE_BYTES - 8];
/// How much is read at once.
const CHUNK_PAGES: u32 = 64;
/// How much is told of what is wrong.
const MOST_WRONG: usize = 12;
const MLOCK_ONFAULT: u32 = 1;
const MAP_PRIVATE: i32 = 2;
const MAP_SHARED: i32 = 1;
const MAP_NORESERVE: i32 = 0x4000;

impl Task {
    pub(super) fn change_memory(&mut self, number: usize, action: &Action) -> StepResult {
        match *action {
            Action::Object { id, kind, pages } => self.make_object(id, kind, pages),
            Action::Forget { id } => {
                self.objects.remove(&id);
                Ok(())
            }
            Action::Map {
                span,
                protection,
                what,
                noreserve,
            } => self.map(span, protection, what, noreserve),
            Action::Unmap(span) if fits(span) => {
                self.arena.unmap(span.bytes())?;
                self.memory.unmap(span);
                Ok(())
            }
            Action::Protect { protection, .. } if is_denied(protection) => Ok(()),
            Action::Protect { span, protection } => {
                for part in self.memory.mapped(span) {
                    self.arena.protect(part.bytes(), protection.into())?;
                }
                self.memory.protect(span, protection);
                self.own_locked(span);
                Ok(())
            }
            Action::Advise { span, advice } => self.advise(span, advice),
            Action::Lock { span, on_fault } => {
                let flags = if on_fault { MLOCK_ONFAULT } else { 0 };
                for part in self.memory.mapped(span) {
                    // More than may be locked; or pages that cannot be read, which are locked
                    // for all that.
                    let _ = self.arena.lock(part.bytes(), flags);
                }
                self.memory.lock(span);
                self.own_locked(span);
                Ok(())
            }
            Action::Fill {
                span,
                every,
                run,
                contents,
            } => {
                self.fill(number, span, (every, run), contents);
                Ok(())
            }
            Action::Move { span, to } => self.relocate(span, to),
            Action::Resize { span, end } => {
                self.resize(span, end);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    fn make_object(&mut self, id: u8, kind: Backing, pages: u32) -> StepResult {
        if id >= OBJECTS || pages > OBJECT_PAGES || pages == 0 {
            return Ok(());
        }
        let path = self.folder.join(format!("object-{id}"));
        let create = || {
            let mut options = File::options();
            options.read(true).write(true).create_new(true).open(&path)
        };
        let file = match kind {
            Backing::File => create()?,
            Backing::Deleted => {
                let file = create()?;
                fs::remove_file(&path)?;
                file
            }
            Backing::Unnamed => {
                let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
                rustix::fs::open(&self.folder, flags, Mode::RUSR | Mode::WUSR)?.into()
            }
            Backing::Memfd => memfd_create(format!("object-{id}"), MemfdFlags::CLOEXEC)?.into(),
        };
        file.set_len(u64::from(pages) * PAGE_BYTES as u64)?;
        // Holes between, and the same twice.
        for page in (0..pages).filter(|page| page % 5 != 3) {
            let value = (u64::from(id) + 1) << 48 | u64::from(page - page % 2);
            for stamp in STAMPS {
                let at = u64::from(page) * PAGE_BYTES as u64 + stamp as u64;
                file.write_all_at(&value.to_le_bytes(), at)?;
            }
            self.ledger.set_object(id, page, value);
        }
        self.objects.insert(id, Object { file, pages });
        Ok(())
    }

    fn map(
        &mut self,
        span: Span,
        protection: u8,
        what: MappingKind,
        noreserve: bool,
    ) -> StepResult {
        if !fits(span) || is_denied(protection) {
            return Ok(());
        }
        let flags = if noreserve { MAP_NORESERVE } else { 0 };
        let (range, prot) = (span.bytes(), i32::from(protection));
        match what {
            MappingKind::Private => self.arena.map(range, prot, flags | MAP_PRIVATE)?,
            MappingKind::Shared { object } => {
                if object >= OBJECTS || span.pages > OBJECT_PAGES {
                    return Ok(());
                }
                self.arena.map(range, prot, flags | MAP_SHARED)?;
            }
            MappingKind::Object {
                object,
                first,
                shared,
            } => {
                let found = self.objects.get(&object);
                let Some(object) = found.filter(|object| first + span.pages <= object.pages) else {
                    return Ok(());
                };
                let flags = flags | if shared { MAP_SHARED } else { MAP_PRIVATE };
                let from = u64::from(first) * PAGE_BYTES as u64;
                let file = (object.file.as_fd(), from);
                self.arena.map_file(range, prot, flags, file)?;
            }
        }
        self.memory.map(span, protection, what);
        Ok(())
    }

    fn advise(&mut self, span: Span, advice: Advice) -> StepResult {
        let is_shared = |at| {
            let page = self.memory.get(at);
            page.is_some_and(|page| matches!(page.shows, PageSource::Shared { .. }))
        };
        let mut parts = self.memory.parts(span, alike);
        if advice == Advice::GuardInstall {
            // In memory that others have as well they are not seen by a dump: docs/limits.md.
            parts.retain(|part| !is_shared(part.at));
        }
        for part in parts {
            match self.arena.advise(part.bytes(), number_of(advice)) {
                Ok(()) => self.memory.advise(part, advice),
                // Not for this kind of memory, or not just now.
                Err(_) if !matters(advice) => {}
                Err(error) if error.raw_os_error() == Some(Errno::INVAL.raw_os_error()) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    fn fill(&mut self, number: usize, span: Span, pattern: (u32, u32), contents: Contents) {
        for (page, value) in self.memory.to_fill(span, pattern, contents, number) {
            for stamp in STAMPS {
                self.arena.store(page as usize * PAGE_BYTES + stamp, value);
            }
            if let Some((object, at)) = self.memory.write(page, value) {
                self.ledger.set_object(object, at, value);
            }
        }
    }

    /// Writes what they hold to the locked copies of objects' pages, which are the task's own then.
    /// The kernel makes them so as well when they are locked and can be written, but not where more
    /// is locked than may be.
    fn own_locked(&mut self, span: Span) {
        for page in self.memory.locked_copies(span) {
            let value = self.expected(page);
            for stamp in STAMPS {
                self.arena.store(page as usize * PAGE_BYTES + stamp, value);
            }
            self.memory.write(page, value);
        }
    }

    fn relocate(&mut self, span: Span, to: u32) -> StepResult {
        let pages = span.pages;
        let there = Span { at: to, pages };
        let apart = span.end() <= to || there.end() <= span.at;
        if !fits(there) || !apart || self.memory.mapped(span) != [span] {
            return Ok(());
        }
        match self.arena.relocate(span.bytes(), there.bytes().start) {
            Ok(()) => {
                self.memory.relocate(span, to);
                Ok(())
            }
            // Several mappings to the kernel: each by itself.
            Err(error) if is(&error, Errno::FAULT) && pages > 1 => {
                let (at, half) = (span.at, pages / 2);
                self.relocate(Span { at, pages: half }, to)?;
                let (at, pages) = (at + half, pages - half);
                self.relocate(Span { at, pages }, to + half)
            }
            Err(error) => Err(error.into()),
        }
    }

    fn resize(&mut self, span: Span, end: u32) {
        let page = |at: u32| self.memory.get(at);
        let is_private = |at: u32| {
            page(at)
                .is_some_and(|page| matches!(page.shows, PageSource::Private(_)) && !page.is_locked)
        };
        let is_free = (span.end()..end).all(|at| page(at).is_none());
        let sound = span.pages > 0 && end > span.at && end <= ARENA_PAGES;
        if sound && span.range().all(is_private) && is_free {
            // Several mappings to the kernel cannot be made longer.
            if self
                .arena
                .resize(span.bytes(), end as usize * PAGE_BYTES)
                .is_ok()
            {
                self.memory.resize(span, end);
            }
        }
    }

    /// What is wrong with its memory.
    pub(super) fn check_memory(&self) -> Result<Vec<String>, Failure> {
        let mut wrong = self.check_maps()?;
        let memory = File::open("/proc/thread-self/mem")?;
        let pagemap = File::open("/proc/thread-self/pagemap")?;
        let whole = Span {
            at: 0,
            pages: ARENA_PAGES,
        };
        let mut chunk = vec![0; CHUNK_PAGES as usize * PAGE_BYTES];
        for part in self.memory.parts(whole, |a, b| a.is_guard == b.is_guard) {
            for at in part.range().step_by(CHUNK_PAGES as usize) {
                let pages = CHUNK_PAGES.min(part.end() - at);
                let piece = Span { at, pages };
                let bytes = &mut chunk[..pages as usize * PAGE_BYTES];
                self.check_piece(piece, (&memory, &pagemap), bytes, &mut wrong)?;
            }
        }
        if wrong.len() > MOST_WRONG {
            let more = wrong.len() - MOST_WRONG;
            wrong.truncate(MOST_WRONG);
            wrong.push(format!("and {more} more"));
        }
        Ok(wrong)
    }

    fn check_piece(
        &self,
        piece: Span,
        (memory, pagemap): (&File, &File),
        bytes: &mut [u8],
        wrong: &mut Vec<String>,
    ) -> StepResult {
        let start = (ARENA_START + piece.bytes().start) as u64;
        let is_guard = self.memory.get(piece.at).is_some_and(|page| page.is_guard);
        if is_guard {
            for at in piece.range() {
                let start = ARENA_START as u64 + u64::from(at) * PAGE_BYTES as u64;
                if memory.read_at(&mut bytes[..8], start).is_ok() {
                    wrong.push(format!("page {at:#x} is no guard"));
                }
            }
            return Ok(());
        }
        let mut entries = vec![0; piece.pages as usize * 8];
        pagemap.read_exact_at(&mut entries, start / PAGE_BYTES as u64 * 8)?;
        let entry = |index: usize| word(&entries, index * 8);
        let touched = |index: usize| entry(index) >> 62 != 0;
        let pages = || piece.range().enumerate();
        // Private pages that were never touched are zero, and are not touched by a look.
        let is_empty = |(index, at): (usize, u32)| {
            let page = self.memory.get(at).expect("it is mapped");
            matches!(page.shows, PageSource::Private(_)) && !touched(index)
        };
        let all_empty = pages().all(is_empty);
        if !all_empty && let Err(error) = memory.read_exact_at(bytes, start) {
            wrong.push(format!("{piece:x?} cannot be read: {error}"));
            return Ok(());
        }
        for (index, at) in pages() {
            let expected = self.expected(at);
            let is = STAMPS.map(|stamp| {
                let empty = is_empty((index, at));
                if empty {
                    0
                } else {
                    word(bytes, index * PAGE_BYTES + stamp)
                }
            });
            if is != [expected; 2] {
                wrong.push(format!("page {at:#x} holds {is:x?} for {expected:x}"));
            }
        }
        Ok(())
    }

    fn expected(&self, at: u32) -> u64 {
        match self.memory.get(at).map(|page| page.shows) {
            Some(PageSource::Private(value)) => value,
            Some(PageSource::Shared { object, page }) => self.ledger.object(object, page),
            Some(PageSource::Copy { object, page, own }) => {
                own.unwrap_or_else(|| self.ledger.object(object, page))
            }
            None => 0,
        }
    }

    /// Compares what is mapped, and how it is protected.
    fn check_maps(&self) -> io::Result<Vec<String>> {
        let maps = fs::read_to_string("/proc/thread-self/maps")?;
        let mut wrong = Vec::new();
        let mut mapped = 0;
        for (span, protection) in maps.lines().filter_map(in_arena) {
            mapped += span.pages as usize;
            let off = span.range().find(|&at| {
                self.memory
                    .get(at)
                    .is_none_or(|page| page.protection != protection)
            });
            if let Some(at) = off {
                let must = self.memory.get(at).map(|page| page.protection);
                wrong.push(format!(
                    "page {at:#x} is mapped as {protection}, not {must:?}"
                ));
            }
        }
        if mapped != self.memory.len() {
            let must = self.memory.len();
            wrong.push(format!("{mapped} pages are mapped and not {must}"));
        }
        Ok(wrong)
    }
}

/// Tells whether the task may have no memory that it could run (`PR_SET_MDWE`).
fn is_denied(protection: u8) -> bool {
    const EXECUTE: u8 = 4;
    protection & EXECUTE != 0 && attribute(Attribute::Mdwe).is_ok_and(|bits| bits != 0)
}

fn fits(span: Span) -> bool {
    span.pages > 0
        && span
            .at
            .checked_add(span.pages)
            .is_some_and(|end| end <= ARENA_PAGES)
}

/// Tells whether advice about one page works for the other, too.
fn alike(a: &Page, b: &Page) -> bool {
    let kind = |page: &Page| (std::mem::discriminant(&page.shows), page.is_locked);
    kind(a) == kind(b)
}

fn is(error: &io::Error, errno: Errno) -> bool {
    error.raw_os_error() == Some(errno.raw_os_error())
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..][..8].try_into().expect("8 bytes"))
}

/// A line of /proc/thread-self/maps as pages of the arena and their protection; none for others.
fn in_arena(line: &str) -> Option<(Span, u8)> {
    let (range, rest) = line.split_once(' ')?;
    let (start, end) = range.split_once('-')?;
    let page = |address: &str| {
        let address = usize::from_str_radix(address, 16).ok()?;
        let page = address.checked_sub(ARENA_START)? / PAGE_BYTES;
        u32::try_from(page).ok().filter(|&page| page <= ARENA_PAGES)
    };
    let (at, end) = (page(start)?, page(end)?);
    let bits = rest.bytes().take(3).zip([1, 2, 4]);
    let protection = bits
        .filter(|&(letter, _)| letter != b'-')
        .map(|(_, bit)| bit)
        .sum();
    let pages = end - at;
    Some((Span { at, pages }, protection))
}

/// Tells whether advice changes what is expected.
fn matters(advice: Advice) -> bool {
    use Advice::*;
    let matter = [
        DontNeed,
        DontFork,
        DoFork,
        WipeOnFork,
        KeepOnFork,
        GuardInstall,
        GuardRemove,
    ];
    matter.contains(&advice)
}

/// The numbers of madvise(2).
fn number_of(advice: Advice) -> i32 {
    match advice {
        Advice::Random => 1,
        Advice::Sequential => 2,
        Advice::DontNeed => 4,
        Advice::DontFork => 10,
        Advice::DoFork => 11,
        Advice::Mergeable => 12,
        Advice::HugePage => 14,
        Advice::NoHugePage => 15,
        Advice::DontDump => 16,
        Advice::WipeOnFork => 18,
        Advice::KeepOnFork => 19,
        Advice::PopulateRead => 22,
        Advice::Collapse => 25,
        Advice::GuardInstall => 102,
        Advice::GuardRemove => 103,
    }
}
