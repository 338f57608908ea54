//! An address space as the kernel keeps it, page by page.

use std::collections::{BTreeMap, BTreeSet};

use abi::{PAGE_BYTES, Span};

pub const PROT_WRITE: u32 = linux_raw_sys::general::PROT_WRITE;
pub const MAP_SHARED: u32 = linux_raw_sys::general::MAP_SHARED;
pub const MAP_PRIVATE: u32 = linux_raw_sys::general::MAP_PRIVATE;
pub const MAP_ANONYMOUS: u32 = linux_raw_sys::general::MAP_ANONYMOUS;
pub const MADV_DONTNEED: u32 = linux_raw_sys::general::MADV_DONTNEED;
pub const MADV_DONTFORK: u32 = linux_raw_sys::general::MADV_DONTFORK;
pub const MADV_DOFORK: u32 = linux_raw_sys::general::MADV_DOFORK;
pub const MADV_HUGEPAGE: u32 = linux_raw_sys::general::MADV_HUGEPAGE;
pub const MADV_NOHUGEPAGE: u32 = linux_raw_sys::general::MADV_NOHUGEPAGE;
pub const MADV_WIPEONFORK: u32 = linux_raw_sys::general::MADV_WIPEONFORK;
pub const MADV_KEEPONFORK: u32 = linux_raw_sys::general::MADV_KEEPONFORK;
pub const MADV_GUARD_INSTALL: u32 = linux_raw_sys::general::MADV_GUARD_INSTALL;

/// The pages of data and of code that a vDSO has here.
pub const VDSO_DATA_PAGES: u64 = 4;
pub const VDSO_PAGES: u64 = 6;

/// What is mapped at a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    Anonymous {
        flags: u32,
        name: Vec<u8>,
    },
    File {
        description: u32,
        page: u64,
        flags: u32,
    },
    /// A page of the vDSO by number, its data first.
    Vdso(u64),
}

/// What a task has at a page for itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Contents {
    /// Which page of the machine's memory that is.
    pub frame: u64,
    /// What it begins with.
    pub word: u64,
}

/// One page of an address space.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Page {
    pub kind: Kind,
    pub prot: u32,
    pub advice: BTreeSet<u32>,
    pub guard: bool,
    pub contents: Option<Contents>,
    /// Neighbours with different numbers are different mappings, even if nothing else differs.
    pub apart: u64,
}

impl Page {
    pub fn is_private(&self) -> bool {
        match &self.kind {
            Kind::Anonymous { flags, .. } | Kind::File { flags, .. } => flags & MAP_SHARED == 0,
            Kind::Vdso(_) => false,
        }
    }

    pub fn is_anonymous(&self) -> bool {
        matches!(self.kind, Kind::Anonymous { .. })
    }

    /// What can be seen of it: the page of an anonymous mapping that was never written reads as
    /// zeros.
    pub fn seen(&self) -> (Kind, u32, Vec<u32>, bool, Option<u64>) {
        let word = self.contents.map(|contents| contents.word);
        let word = word.filter(|word| *word != 0 || !self.is_anonymous());
        let advice = self.advice.iter().copied().collect();
        (self.kind.clone(), self.prot, advice, self.guard, word)
    }
}

/// An address space.
#[derive(Clone, Debug, Default)]
pub struct Space(pub BTreeMap<u64, Page>);

/// Why the kernel refuses a call.
pub type Refused = &'static str;

impl Space {
    pub fn map(&mut self, span: Span, prot: u32, apart: u64, kind: impl Fn(u64) -> Kind) {
        for (number, page) in (0..).zip(span.start.page()..span.end.page()) {
            let page_of = Page {
                kind: kind(number),
                prot,
                advice: BTreeSet::new(),
                guard: false,
                contents: None,
                apart,
            };
            self.0.insert(page, page_of);
        }
    }

    pub fn map_vdso(&mut self, first: u64) -> Result<(), Refused> {
        if self
            .0
            .values()
            .any(|page| matches!(page.kind, Kind::Vdso(_)))
        {
            return Err("a vDSO is mapped: File exists");
        }
        if self.0.range(first..first + VDSO_PAGES).next().is_some() {
            return Err("something is where the vDSO is to be");
        }
        let span = Span::new(abi::Addr::of_page(first), VDSO_DATA_PAGES * PAGE_BYTES);
        self.map(span, 1, 0, Kind::Vdso);
        let span = Span::new(span.end, (VDSO_PAGES - VDSO_DATA_PAGES) * PAGE_BYTES);
        self.map(span, 5, 0, |number| Kind::Vdso(VDSO_DATA_PAGES + number));
        Ok(())
    }

    pub fn unmap(&mut self, span: Span) {
        self.0
            .retain(|page, _| !(span.start.page()..span.end.page()).contains(page));
    }

    pub fn relocate(&mut self, from: Span, to: u64) -> Result<(), Refused> {
        let pages = from.start.page()..from.end.page();
        let moved = pages.map(|page| self.0.remove(&page).ok_or("mremap: nothing is mapped"));
        let moved = moved.collect::<Result<Vec<_>, _>>()?;
        self.0.extend((to..).zip(moved));
        Ok(())
    }

    /// The pages of `span`, all of which must be mapped.
    pub fn pages_mut(&mut self, span: Span) -> Result<Vec<&mut Page>, Refused> {
        let pages = self.0.range_mut(span.start.page()..span.end.page());
        let pages = pages.map(|(_, page)| page).collect::<Vec<_>>();
        if pages.len() as u64 == span.pages() {
            Ok(pages)
        } else {
            Err("not all of it is mapped: Cannot allocate memory")
        }
    }

    pub fn protect(&mut self, span: Span, prot: u32) -> Result<(), Refused> {
        self.pages_mut(span)?
            .into_iter()
            .for_each(|page| page.prot = prot);
        Ok(())
    }

    pub fn advise(&mut self, span: Span, advice: u32) -> Result<(), Refused> {
        for page in self.pages_mut(span)? {
            match advice {
                MADV_DONTNEED if page.is_private() => page.contents = None,
                MADV_DOFORK => drop(page.advice.remove(&MADV_DONTFORK)),
                MADV_KEEPONFORK => drop(page.advice.remove(&MADV_WIPEONFORK)),
                MADV_GUARD_INSTALL if page.is_private() => {
                    (page.guard, page.contents) = (true, None);
                }
                MADV_WIPEONFORK if !page.is_private() || !page.is_anonymous() => {
                    return Err("advice for anonymous memory: Invalid argument");
                }
                MADV_HUGEPAGE | MADV_NOHUGEPAGE => {
                    page.advice
                        .remove(&(MADV_HUGEPAGE + MADV_NOHUGEPAGE - advice));
                    page.advice.insert(advice);
                }
                MADV_DONTFORK | MADV_WIPEONFORK => drop(page.advice.insert(advice)),
                _ => return Err("advice that is not known here"),
            }
        }
        Ok(())
    }

    /// Writes a word to one page, which becomes the task's own.
    pub fn write(&mut self, page: u64, contents: Contents) -> Result<(), Refused> {
        let page = self
            .0
            .get_mut(&page)
            .ok_or("written where nothing is mapped: Bad address")?;
        if page.prot & PROT_WRITE == 0 || page.guard {
            return Err("written where nothing may be written: Bad address");
        }
        if !page.is_private() {
            return Err("written to what others share");
        }
        page.contents = Some(contents);
        Ok(())
    }

    /// What a child starts with.
    pub fn fork(&self) -> Self {
        let mut child = self.clone();
        child
            .0
            .retain(|_, page| !page.advice.contains(&MADV_DONTFORK));
        for page in child.0.values_mut() {
            if page.advice.contains(&MADV_WIPEONFORK) {
                (page.guard, page.contents) = (false, None);
            }
        }
        child
    }
}
