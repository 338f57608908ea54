//! Where a process's pages come from.

use abi::Span;

use super::inherit;
use super::memory::Memory;

/// The number of a file that is not of the image: the restorer makes it of pages that are stored in
/// another way than as they are.
pub const DECODED_FILE: u32 = u32::MAX;

/// Where pages lie in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// The file's number: one of the image, or [`DECODED_FILE`].
    pub file: u32,
    /// Where they begin.
    pub offset_bytes: u64,
}

impl Place {
    /// What comes after so many bytes.
    #[must_use]
    pub const fn after(self, bytes: u64) -> Self {
        Self {
            offset_bytes: self.offset_bytes + bytes,
            ..self
        }
    }
}

/// Consecutive pages of a process that are stored in the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Their addresses.
    pub span: Span,
    /// Where they are, if a task can read them by itself.
    pub at: Option<Place>,
}

impl Stored {
    /// Those of them in `span`, which is inside.
    #[must_use]
    pub fn part(&self, span: Span) -> Self {
        let before = span.start.0 - self.span.start.0;
        let at = self.at.map(|at| at.after(before));
        Self { span, at }
    }
}

/// Where a process's pages come from.
#[derive(Clone, Debug, Default)]
pub struct Pages {
    /// Those stored, sorted by address.
    pub stored: Vec<Stored>,
    /// Those inherited from the parent, sorted.
    pub inherited: Vec<Span>,
    /// Those full of zeros where a file is mapped, sorted: without them the file would be seen.
    pub zero: Vec<Span>,
}

impl Pages {
    /// Adds stored pages; those that go on in memory and in the file are one with the last.
    pub fn store(&mut self, new: Stored) {
        if let Some(last) = self.stored.last_mut()
            && last.span.end == new.span.start
            && last.at.map(|at| at.after(last.span.bytes())) == new.at
        {
            last.span.end = new.span.end;
        } else {
            self.stored.push(new);
        }
    }

    /// Whether there are none inside `span`.
    #[must_use]
    pub fn is_empty(&self, span: Span) -> bool {
        !has_own(self, span) && overlapping(&self.inherited, span).next().is_none()
    }

    /// All of them, sorted.
    #[must_use]
    pub fn all(&self) -> Vec<Span> {
        let stored = self.stored.iter().map(|stored| stored.span);
        let others = self.inherited.iter().chain(&self.zero).copied();
        let mut all = stored.chain(others).collect::<Vec<_>>();
        all.sort_unstable();
        all
    }

    /// Forgets pages of zeros where none are needed, because memory comes so.
    pub fn drop_plain_zeros(&mut self, memory: &Memory) {
        let files = memory.mappings.iter();
        let files = files.filter(|map| map.is_private() && !map.is_anonymous());
        let zero = files.flat_map(|map| {
            let inside = overlapping(&self.zero, map.span());
            inside.map(|zero| zero.intersect(map.span()))
        });
        self.zero = zero.collect();
    }

    /// Leaves those inherited that a child with `memory` finds in mappings of `parent`, which has
    /// these pages, and gives the others: its parent has split, moved or named what it mapped, or
    /// has less of a stack. Plain zeros of the parent are forgotten.
    pub fn split_inherited(
        &mut self,
        memory: &Memory,
        (parent, parents_pages): (&Memory, &Self),
    ) -> Vec<Span> {
        let theirs = parents_pages.all();
        let common = self.inherited.iter().flat_map(|span| {
            let inside = overlapping(&theirs, *span);
            inside.map(|one| one.intersect(*span))
        });
        let common = common.collect::<Vec<_>>();
        self.inherited.clear();
        let mut others = Vec::new();
        for map in &memory.mappings {
            let into = match inherit::source(parent, map) {
                Some(_) => &mut self.inherited,
                None => &mut others,
            };
            let inside = overlapping(&common, map.span());
            into.extend(inside.map(|one| one.intersect(map.span())));
        }
        others
    }
}

/// Whether the process has pages inside `span` that it does not inherit.
pub(super) fn has_own(pages: &Pages, span: Span) -> bool {
    clip(pages, span).next().is_some() || overlapping(&pages.zero, span).next().is_some()
}

/// Those of sorted and disjoint spans that overlap `span`.
pub(super) fn overlapping(spans: &[Span], span: Span) -> impl Iterator<Item = Span> + '_ {
    let from = spans.partition_point(|one| one.end <= span.start);
    let inside = spans[from..]
        .iter()
        .take_while(move |one| one.start < span.end);
    inside.copied()
}

/// The stored pages inside `span`.
pub(super) fn clip(pages: &Pages, span: Span) -> impl Iterator<Item = Stored> + '_ {
    let from = pages
        .stored
        .partition_point(|stored| stored.span.end <= span.start);
    let inside = pages.stored[from..]
        .iter()
        .take_while(move |stored| stored.span.start < span.end);
    inside.map(move |stored| {
        let cut = stored.span.intersect(span);
        stored.part(cut)
    })
}
