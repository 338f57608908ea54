//! What a task's arena must hold, page by page: kept by the task as it goes, and by the generator
//! to know what can be done next.
use std::collections::BTreeMap;

use super::step::{Advice, Contents, MappingKind, Span};

/// `PROT_WRITE`.
pub const WRITE: u8 = 2;

/// One mapped page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page {
    /// `PROT_` bits.
    pub protection: u8,
    /// What it shows.
    pub shows: PageSource,
    /// What was advised.
    pub is_guard: bool,
    pub is_not_forked: bool,
    pub is_wiped: bool,
    pub is_locked: bool,
}

/// Where the contents of a page are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageSource {
    /// Here; what was written to it, zero for nothing.
    Private(u64),
    /// In page `page` of an object.
    Shared { object: u8, page: u32 },
    /// In page `page` of an object until it is written.
    Copy {
        object: u8,
        page: u32,
        own: Option<u64>,
    },
}

/// All pages of one task that are mapped.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    pages: BTreeMap<u32, Page>,
}

impl Memory {
    pub fn get(&self, page: u32) -> Option<&Page> {
        self.pages.get(&page)
    }

    pub fn len(&self) -> usize {
        self.pages.len()
    }

    /// The mapped parts of `span`, as long as neighbours are `alike`.
    pub fn parts(&self, span: Span, alike: impl Fn(&Page, &Page) -> bool) -> Vec<Span> {
        let mut parts: Vec<(Span, Page)> = Vec::new();
        for (&at, page) in self.pages.range(span.range()) {
            match parts.last_mut() {
                Some((part, last)) if part.end() == at && alike(last, page) => {
                    part.pages += 1;
                    *last = *page;
                }
                _ => parts.push((Span { at, pages: 1 }, *page)),
            }
        }
        parts.into_iter().map(|(part, _)| part).collect()
    }

    /// The mapped parts of `span`.
    pub fn mapped(&self, span: Span) -> Vec<Span> {
        self.parts(span, |_, _| true)
    }

    pub fn map(&mut self, span: Span, protection: u8, what: MappingKind) {
        for (number, at) in (0..).zip(span.range()) {
            let shows = match what {
                MappingKind::Private => PageSource::Private(0),
                MappingKind::Shared { object } => PageSource::Shared {
                    object,
                    page: number,
                },
                MappingKind::Object {
                    object,
                    first,
                    shared,
                } => {
                    let page = first + number;
                    if shared {
                        PageSource::Shared { object, page }
                    } else {
                        let own = None;
                        PageSource::Copy { object, page, own }
                    }
                }
            };
            let page = Page {
                protection,
                shows,
                is_guard: false,
                is_not_forked: false,
                is_wiped: false,
                is_locked: false,
            };
            self.pages.insert(at, page);
        }
    }

    pub fn unmap(&mut self, span: Span) {
        self.pages.retain(|at, _| !span.range().contains(at));
    }

    fn change(&mut self, span: Span, mut change: impl FnMut(u32, &mut Page)) {
        for (&at, page) in self.pages.range_mut(span.range()) {
            change(at, page);
        }
    }

    pub fn protect(&mut self, span: Span, protection: u8) {
        self.change(span, |_, page| page.protection = protection);
    }

    pub fn lock(&mut self, span: Span) {
        self.change(span, |_, page| page.is_locked = true);
    }

    /// The locked pages of `span` that are an object's and can be written privately.
    pub fn locked_copies(&self, span: Span) -> Vec<u32> {
        let is_copied = |page: &Page| {
            let is_objects = matches!(page.shows, PageSource::Copy { own: None, .. });
            is_objects && page.is_locked && page.protection & WRITE != 0 && !page.is_guard
        };
        let pages = self.pages.range(span.range());
        let copied = pages.filter(|(_, page)| is_copied(page));
        copied.map(|(&at, _)| at).collect()
    }

    /// Notes advice that the kernel took.
    pub fn advise(&mut self, span: Span, advice: Advice) {
        self.change(span, |_, page| match advice {
            Advice::DontNeed if !page.is_guard => discard(page),
            Advice::DontFork => page.is_not_forked = true,
            Advice::DoFork => page.is_not_forked = false,
            Advice::WipeOnFork => page.is_wiped = true,
            Advice::KeepOnFork => page.is_wiped = false,
            Advice::GuardInstall => {
                discard(page);
                page.is_guard = true;
            }
            Advice::GuardRemove => page.is_guard = false,
            _ => {}
        });
    }

    /// The pages of `span` to be written, and what is written to each, in step `number`.
    pub fn to_fill(
        &self,
        span: Span,
        (every, run): (u32, u32),
        contents: Contents,
        number: usize,
    ) -> Vec<(u32, u64)> {
        let base = (number as u64 + 1) << 32;
        let can = |page: &Page| page.protection & WRITE != 0 && !page.is_guard;
        self.pages
            .range(span.range())
            .filter(|(at, page)| (**at - span.at) % every.max(1) < run && can(page))
            .map(|(&at, _)| match contents {
                Contents::Different => (at, base | u64::from(at)),
                Contents::Equal => (at, base),
                Contents::Zero => (at, 0),
            })
            .collect()
    }

    /// Notes a page's new contents; answers the object's page where it is an object's.
    pub fn write(&mut self, at: u32, value: u64) -> Option<(u8, u32)> {
        match &mut self.pages.get_mut(&at)?.shows {
            PageSource::Private(own) => *own = value,
            PageSource::Copy { own, .. } => *own = Some(value),
            &mut PageSource::Shared { object, page } => return Some((object, page)),
        }
        None
    }

    /// Moves pages that are mapped.
    pub fn relocate(&mut self, span: Span, to: u32) {
        let pages = span.pages;
        let moved: Vec<_> = span.range().map(|at| self.pages.remove(&at)).collect();
        self.unmap(Span { at: to, pages });
        for (at, page) in (to..).zip(moved) {
            if let Some(page) = page {
                self.pages.insert(at, page);
            }
        }
    }

    /// Makes what is at `span` end at `end`.
    pub fn resize(&mut self, span: Span, end: u32) {
        if let Some(&last) = self.pages.get(&(span.end() - 1)) {
            let shows = PageSource::Private(0);
            let is_guard = false;
            let new = Page {
                shows,
                is_guard,
                ..last
            };
            self.pages.extend((span.end()..end).map(|at| (at, new)));
        }
        self.pages.retain(|at, _| !(end..span.end()).contains(at));
    }

    /// What a child has of it.
    pub fn forked(&self) -> Self {
        let mut pages = self.pages.clone();
        pages.retain(|_, page| !page.is_not_forked);
        for page in pages.values_mut() {
            page.is_locked = false;
            if page.is_wiped {
                page.shows = PageSource::Private(0);
                page.is_guard = false;
            }
        }
        Self { pages }
    }
}

fn discard(page: &mut Page) {
    match &mut page.shows {
        PageSource::Private(value) => *value = 0,
        PageSource::Copy { own, .. } => *own = None,
        PageSource::Shared { .. } => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPAN: Span = Span { at: 10, pages: 6 };

    #[test]
    fn a_child_has_what_it_is_given() {
        let mut memory = Memory::default();
        memory.map(SPAN, 3, MappingKind::Private);
        for (at, value) in memory.to_fill(SPAN, (2, 1), Contents::Different, 0) {
            assert_eq!(memory.write(at, value), None);
        }
        memory.advise(Span { at: 10, pages: 2 }, Advice::DontFork);
        memory.advise(Span { at: 12, pages: 2 }, Advice::WipeOnFork);
        let child = memory.forked();
        assert_eq!(child.mapped(SPAN), [Span { at: 12, pages: 4 }]);
        let shown = |at| child.get(at).map(|page| page.shows);
        assert_eq!(shown(12), Some(PageSource::Private(0)));
        assert_eq!(shown(14), Some(PageSource::Private(1 << 32 | 14)));
    }

    #[test]
    fn what_moves_replaces_what_is_there() {
        let mut memory = Memory::default();
        memory.map(SPAN, 3, MappingKind::Private);
        memory.write(15, 7);
        memory.relocate(Span { at: 14, pages: 2 }, 10);
        assert_eq!(memory.mapped(SPAN), [Span { at: 10, pages: 4 }]);
        assert_eq!(
            memory.get(11).map(|page| page.shows),
            Some(PageSource::Private(7))
        );
        memory.resize(Span { at: 10, pages: 4 }, 11);
        assert_eq!(memory.len(), 1);
    }
}
