//! Steps that change memory: at sizes around those at which something is done differently.
use super::{Generator, TaskModel};
use crate::storm::memory::{Page, PageSource, WRITE};
use crate::storm::step::{
    ARENA_PAGES, Action, Advice, Contents, MappingKind, OBJECT_PAGES, OBJECTS, Span,
};

/// Sizes, in pages, at which dumps and restores change their ways: a page, blocks of copy-on-write
/// sharing (16), gaps between what is read together (64, 512), chunks of the image (256), blocks
/// that are filled from outside (512), what is filled by one thread alone (1024), what is filled
/// from outside at all (2048).
const SIZES: [u32; 14] = [1, 1, 2, 3, 4, 8, 16, 16, 64, 128, 256, 512, 1024, 2048];
/// Protections, as often as they are wanted.
const PROTECTIONS: [u8; 12] = [3, 3, 3, 3, 3, 1, 1, 0, 0, 5, 4, 7];
const ADVICE: &[Advice] = &[
    Advice::DontNeed,
    Advice::DontNeed,
    Advice::DontFork,
    Advice::DoFork,
    Advice::WipeOnFork,
    Advice::KeepOnFork,
    Advice::Mergeable,
    Advice::HugePage,
    Advice::NoHugePage,
    Advice::Collapse,
    Advice::DontDump,
    Advice::Random,
    Advice::Sequential,
    Advice::PopulateRead,
    Advice::GuardInstall,
    Advice::GuardInstall,
    Advice::GuardRemove,
];

impl Generator {
    /// A number of pages: one of [`SIZES`], or a page beside it, or any up to it.
    pub(super) fn size(&mut self) -> u32 {
        let size = self.chance.pick(&SIZES);
        match self.chance.below(5) {
            0 => size + 1,
            1 => (size - 1).max(1),
            2 => 1 + self.chance.below(u64::from(size)) as u32,
            _ => size,
        }
    }

    pub(super) fn change_memory(&mut self, task: u8) {
        let kinds = runs(self.known(task));
        if kinds.is_empty() {
            return self.map(task, &[]);
        }
        match self.chance.below(100) {
            0..30 => self.map(task, &kinds),
            30..55 => self.fill(task, &kinds),
            55..65 => {
                let span = self.part(&kinds);
                self.known(task).memory.unmap(span);
                self.step(task, Action::Unmap(span));
            }
            65..78 => {
                let span = self.part(&kinds);
                let protection = self.chance.pick(&PROTECTIONS);
                self.known(task).memory.protect(span, protection);
                self.step(task, Action::Protect { span, protection });
            }
            78..88 => self.advise(task, &kinds),
            88..90 => {
                let span = self.part(&kinds);
                let on_fault = self.chance.once_in(2);
                let pages = span.pages.min(16);
                let span = Span { pages, ..span };
                self.known(task).memory.lock(span);
                self.step(task, Action::Lock { span, on_fault });
            }
            90..96 => self.relocate(task, &kinds),
            _ => self.resize(task, &kinds),
        }
    }

    /// A place for `pages`: touching what is there, over it, or far from it.
    fn place(&mut self, runs: &[Span], pages: u32) -> Span {
        let near = (!runs.is_empty()).then(|| self.chance.pick(runs));
        let at = match (self.chance.below(20), near) {
            (0..8, Some(run)) => run.end(),
            (8..12, Some(run)) => run.at.saturating_sub(pages),
            // With a page between.
            (12, Some(run)) => run.end() + 1,
            (13..16, Some(run)) => run.at + self.chance.below(u64::from(run.pages)) as u32,
            _ => {
                let block = self.chance.below(u64::from(ARENA_PAGES / 512)) as u32 * 512;
                let within = self.chance.below(512) as u32;
                block + self.chance.pick(&[0, 0, 1, 511, within])
            }
        };
        let at = at.min(ARENA_PAGES - pages);
        Span { at, pages }
    }

    fn map(&mut self, task: u8, runs: &[Span]) {
        let pages = self.size().min(self.room_pages.max(1));
        let objects: Vec<(u8, u32)> = self.known(task).objects.clone().into_iter().collect();
        let (what, pages) = match self.chance.below(10) {
            0 if self.next_object < OBJECTS => {
                self.next_object += 1;
                let object = self.next_object - 1;
                (MappingKind::Shared { object }, pages.min(OBJECT_PAGES))
            }
            1..4 if !objects.is_empty() => {
                let (object, whole) = self.chance.pick(&objects);
                let pages = pages.min(whole);
                let first = self.chance.below(u64::from(whole - pages) + 1) as u32;
                let shared = self.chance.once_in(2);
                let what = MappingKind::Object {
                    object,
                    first,
                    shared,
                };
                (what, pages)
            }
            _ => (MappingKind::Private, pages),
        };
        let span = self.place(runs, pages);
        let protection = self.chance.pick(&PROTECTIONS);
        let noreserve = self.chance.once_in(5);
        self.room_pages = self.room_pages.saturating_sub(pages);
        self.known(task).memory.map(span, protection, what);
        self.step(
            task,
            Action::Map {
                span,
                protection,
                what,
                noreserve,
            },
        );
        if self.chance.below(3) > 0 {
            self.fill_span(task, span);
        }
    }

    fn fill(&mut self, task: u8, runs: &[Span]) {
        let span = self.part(runs);
        self.fill_span(task, span);
    }

    /// Writes within `span`, which is made writable for a moment one time in two.
    fn fill_span(&mut self, task: u8, span: Span) {
        let before = self
            .known(task)
            .memory
            .get(span.at)
            .map(|page| page.protection);
        let hidden = before.filter(|protection| protection & WRITE == 0);
        let opens = hidden.is_some() && self.chance.once_in(2);
        if opens {
            self.protect(task, span, 3);
        }
        let every = self.chance.pick(&[1, 1, 1, 2, 3, 5, 16, 17, 64, 513]);
        let run = self.chance.pick(&[1, 1, 1, 2, 15]).min(every);
        let different = Contents::Different;
        let mut contents = self.chance.pick(&[
            different,
            different,
            different,
            Contents::Equal,
            Contents::Zero,
        ]);
        // Zeros over a file's contents do not come back yet.
        let memory = &self.known(task).memory;
        let covers = |at| {
            let page = memory.get(at);
            page.is_some_and(|page| matches!(page.shows, PageSource::Copy { .. }))
        };
        if contents == Contents::Zero && span.range().any(covers) {
            contents = different;
        }
        let pattern = (every, run);
        let number = self.steps.len();
        let writes = self
            .known(task)
            .memory
            .to_fill(span, pattern, contents, number);
        // As much as is left of what may be written.
        let most = self.budget_pages as usize;
        let span = match writes.get(most) {
            Some(&(end, _)) => Span {
                pages: end - span.at,
                ..span
            },
            None => span,
        };
        for &(page, value) in writes.iter().take(most) {
            self.known(task).memory.write(page, value);
        }
        self.budget_pages -= writes.len().min(most) as u32;
        if span.pages > 0 && !writes.is_empty() {
            self.step(
                task,
                Action::Fill {
                    span,
                    every,
                    run,
                    contents,
                },
            );
        }
        if let (true, Some(protection)) = (opens, hidden) {
            self.protect(task, span, protection);
        }
    }

    fn protect(&mut self, task: u8, span: Span, protection: u8) {
        self.known(task).memory.protect(span, protection);
        self.step(task, Action::Protect { span, protection });
    }

    fn advise(&mut self, task: u8, runs: &[Span]) {
        let span = self.part(runs);
        let advice = self.chance.pick(ADVICE);
        let memory = &mut self.known(task).memory;
        let private = |page: &Page| matches!(page.shows, PageSource::Private(_)) && !page.is_locked;
        let takes = memory.get(span.at).is_some_and(private);
        if takes {
            memory.advise(span, advice);
        }
        self.step(task, Action::Advise { span, advice });
    }

    fn relocate(&mut self, task: u8, runs: &[Span]) {
        let span = self.part(runs);
        let to = self.place(runs, span.pages).at;
        let apart = span.end() <= to || to + span.pages <= span.at;
        if apart && self.known(task).memory.mapped(span) == [span] {
            self.known(task).memory.relocate(span, to);
            self.step(task, Action::Move { span, to });
        }
    }

    fn resize(&mut self, task: u8, runs: &[Span]) {
        let span = self.part(runs);
        let end = if self.chance.once_in(2) {
            span.end() + self.size()
        } else {
            span.at + 1 + self.chance.below(u64::from(span.pages)) as u32
        };
        // What the kernel thinks of it the task finds out; here it is as it was.
        self.step(task, Action::Resize { span, end });
    }

    /// A part of one of `runs`: all, its beginning, its end, a page, blocks, anything.
    fn part(&mut self, runs: &[Span]) -> Span {
        let run = self.chance.pick(runs);
        let size = self.size().min(run.pages);
        let slack = u64::from(run.pages - size) + 1;
        match self.chance.below(10) {
            0..3 => run,
            3 => Span { pages: size, ..run },
            4 => Span {
                at: run.end() - size,
                pages: size,
            },
            5..7 => Span {
                at: run.at + self.chance.below(u64::from(run.pages)) as u32,
                pages: 1,
            },
            7 => {
                let at = (run.at + self.chance.below(slack) as u32) / 16 * 16;
                let at = at.max(run.at);
                Span {
                    at,
                    pages: size.min(run.end() - at),
                }
            }
            // With what follows, mapped or not.
            8 => Span {
                at: run.at,
                pages: (run.pages + size).min(ARENA_PAGES - run.at),
            },
            _ => Span {
                at: run.at + self.chance.below(slack) as u32,
                pages: size,
            },
        }
    }
}

/// What is mapped, as long as it is of one kind.
fn runs(known: &TaskModel) -> Vec<Span> {
    let whole = Span {
        at: 0,
        pages: ARENA_PAGES,
    };
    known.memory.parts(whole, |a, b| {
        let kind = |page: &Page| (std::mem::discriminant(&page.shows), page.protection);
        kind(a) == kind(b)
    })
}
