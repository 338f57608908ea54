//! The run index: sorted entries of one width, checked once and then searched where they are.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use crate::chunk::Chunk;
use crate::run::{self, ENTRY_BYTES};
use crate::spaces::NewSpace;
use crate::{Granule, Run, RunKind, SPACE_MAX_PAGES, SpaceId, SpaceKind};

type Entry = [u8; ENTRY_BYTES];

/// Limits of an index's references.
#[derive(Clone, Copy)]
pub(crate) struct Bounds<'a> {
    /// The chunks that runs are parts of.
    pub chunks: &'a [Chunk],
    /// The spaces, in order.
    pub spaces: &'a [NewSpace],
}

/// Why entries are not an index.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// The number of the entry.
    pub entry: usize,
    pub space: SpaceId,
    pub first_page: u64,
    pub what: String,
}

/// A space of an image, and what is known of its pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Space {
    /// Which one.
    pub id: SpaceId,
    /// Its kind.
    pub kind: SpaceKind,
    /// Its name, where it has one.
    pub name: String,
    /// How many pages it can have.
    pub len_pages: u64,
    /// Its runs begin and end at multiples of this.
    pub granule: Granule,
    /// How many of its pages are parts of chunks that this image stores.
    pub own_pages: u64,
    /// How many pages are described at all.
    pub pages: u64,
    /// Its entries in the index.
    pub(crate) entries: Range<usize>,
}

impl Space {
    /// Returns what a writer is told of a space like this one.
    #[must_use]
    pub fn said(&self) -> NewSpace {
        NewSpace {
            id: self.id,
            kind: self.kind,
            name: self.name.clone(),
            len_pages: self.len_pages,
            granule: self.granule,
        }
    }

    fn new(known: &NewSpace, entry: usize) -> Self {
        let NewSpace {
            id,
            kind,
            ref name,
            len_pages,
            granule,
        } = *known;
        Self {
            id,
            kind,
            name: name.clone(),
            len_pages,
            granule,
            own_pages: 0,
            pages: 0,
            entries: entry..entry,
        }
    }
}

/// A checked index.
pub(crate) struct Index {
    bytes: Vec<u8>,
    /// Range of the entries in `bytes`.
    range: Range<usize>,
    spaces: Vec<Space>,
}

/// Splits an index into entries; bytes behind the last whole one are left out.
pub(crate) fn entries(bytes: &[u8]) -> &[Entry] {
    bytes.as_chunks().0
}

impl Index {
    /// Takes the entries at `range` of `bytes` as an index after checking them.
    pub fn new(mut bytes: Vec<u8>, range: Range<usize>, bounds: Bounds<'_>) -> Result<Self, Fault> {
        let spaces = check(entries(&bytes[range.clone()]), bounds)?;
        bytes.truncate(range.end);
        Ok(Self {
            bytes,
            range,
            spaces,
        })
    }

    pub fn spaces(&self) -> &[Space] {
        &self.spaces
    }

    /// Returns the space with this number.
    pub fn space(&self, space: SpaceId) -> Option<&Space> {
        find_space(&self.spaces, space)
    }

    /// The entries as they are stored.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[self.range.clone()]
    }

    fn entries(&self) -> &[Entry] {
        entries(&self.bytes[self.range.clone()])
    }

    /// Returns all runs in order.
    pub fn runs(&self) -> impl ExactSizeIterator<Item = Run> + '_ {
        self.entries().iter().map(decode_checked)
    }

    /// Returns the runs of `space` in order; none of a space that is not there.
    pub fn runs_of(&self, space: SpaceId) -> impl ExactSizeIterator<Item = Run> + '_ {
        let range = find_space(&self.spaces, space).map_or(0..0, |space| space.entries.clone());
        self.entries()[range].iter().map(decode_checked)
    }

    /// Looks up runs of `space` one after the other.
    pub fn walk(&self, space: SpaceId) -> Walk<'_> {
        let range = find_space(&self.spaces, space).map_or(0..0, |space| space.entries.clone());
        let rest = &self.entries()[range];
        Walk { rest }
    }

    /// Returns the run that `page` of `space` is in.
    pub fn find(&self, space: SpaceId, page: u64) -> Option<Run> {
        let space = find_space(&self.spaces, space)?;
        let entry = find_entry(self.entries(), space, page)?;
        Some(decode_checked(&self.entries()[entry]))
    }
}

/// Runs of a space that are looked up in ascending order: looking up all takes one pass.
pub(crate) struct Walk<'a> {
    rest: &'a [Entry],
}

impl Walk<'_> {
    /// Returns the run that `page` is in, or else the next one. Pages only grow from call to call.
    pub fn find_from(&mut self, page: u64) -> Option<Run> {
        let ends_before = |entry: &Entry| {
            let (_, first_page, pages) = run::decode_place(entry);
            first_page + u64::from(pages) <= page
        };
        // It is near most of the time.
        let mut reach = 1;
        while self.rest.get(reach).is_some_and(ends_before) {
            reach *= 2;
        }
        let near = &self.rest[..self.rest.len().min(reach + 1)];
        self.rest = &self.rest[near.partition_point(ends_before)..];
        self.rest.first().map(decode_checked)
    }
}

fn decode_checked(entry: &Entry) -> Run {
    run::decode(entry).expect("every entry was decoded when the index was checked")
}

fn find_space(spaces: &[Space], id: SpaceId) -> Option<&Space> {
    spaces
        .binary_search_by_key(&id, |space| space.id)
        .ok()
        .map(|at| &spaces[at])
}

/// Returns the number of the entry that `page` of `space` is in.
fn find_entry(entries: &[Entry], space: &Space, page: u64) -> Option<usize> {
    let own = &entries[space.entries.clone()];
    let after = own.partition_point(|entry| run::decode_place(entry).1 <= page);
    let (_, first_page, pages) = run::decode_place(own.get(after.checked_sub(1)?)?);
    (page - first_page < u64::from(pages)).then(|| space.entries.start + after - 1)
}

/// Checks everything about an index; returns its spaces, sorted.
///
/// The entries are sorted and do not overlap, and lie inside of spaces that there are; runs that
/// are parts of chunks lie inside of those; every page of a `same` run is described in the other
/// space, and no such references form a circle.
pub(crate) fn check(entries: &[Entry], bounds: Bounds<'_>) -> Result<Vec<Space>, Fault> {
    let mut spaces: Vec<Space> = Vec::with_capacity(bounds.spaces.len());
    let mut known = bounds.spaces.iter();
    let mut same = Vec::new();
    let mut last: Option<Run> = None;
    for (number, entry) in entries.iter().enumerate() {
        let fault = |what: &str| fault(entries, number, what);
        let run = run::decode(entry).map_err(fault)?;
        check_order(last, run).map_err(fault)?;
        while spaces.last().is_none_or(|space| space.id < run.space) {
            let next = known.next();
            let next = next.ok_or_else(|| fault("its space is not there"))?;
            spaces.push(Space::new(next, number));
        }
        let space = spaces.last_mut().expect("just pushed");
        if space.id != run.space {
            return Err(fault("its space is not there"));
        }
        check_alone(&run, space, bounds).map_err(|what| fault(&what))?;
        match run.kind {
            RunKind::Same { .. } => same.push(number),
            RunKind::Part(part) if !bounds.chunks[part.chunk.0 as usize].is_inherited() => {
                space.own_pages += u64::from(run.pages);
            }
            RunKind::Part(_) | RunKind::Zero => {}
        }
        space.entries.end = number + 1;
        space.pages += u64::from(run.pages);
        last = Some(run);
    }
    spaces.extend(known.map(|space| Space::new(space, entries.len())));
    check_same(entries, &spaces, &same)?;
    Ok(spaces)
}

fn fault(entries: &[Entry], entry: usize, what: &str) -> Fault {
    let (space, first_page, _) = entries
        .get(entry)
        .map_or((SpaceId(0), 0, 0), run::decode_place);
    Fault {
        entry,
        space,
        first_page,
        what: what.into(),
    }
}

/// Checks what a run says without looking at others.
fn check_alone(run: &Run, space: &Space, bounds: Bounds<'_>) -> Result<(), String> {
    if run.pages == 0 {
        return Err("the run has no pages".into());
    }
    if run.end_page() > space.len_pages.min(SPACE_MAX_PAGES) {
        let end = run.end_page();
        return Err(format!(
            "the run ends at page {end:#x}, past the end of its space"
        ));
    }
    let granule = space.granule.pages();
    if !run.first_page.is_multiple_of(granule) || !run.end_page().is_multiple_of(granule) {
        return Err(format!("the run is not of whole pieces of {granule} pages"));
    }
    let RunKind::Part(part) = run.kind else {
        return Ok(());
    };
    match bounds.chunks.get(part.chunk.0 as usize) {
        None => Err(format!(
            "it is in chunk {}, and there is none",
            part.chunk.0
        )),
        // Neither number has more than 32 bits.
        Some(chunk)
            if u64::from(part.skip_pages) + u64::from(run.pages) > u64::from(chunk.pages) =>
        {
            Err(format!("it is not inside chunk {}", part.chunk.0))
        }
        Some(_) => Ok(()),
    }
}

fn check_order(last: Option<Run>, run: Run) -> Result<(), &'static str> {
    match last {
        Some(last) if last.space > run.space => Err("the spaces are not in order"),
        Some(last) if last.space == run.space && last.first_page > run.first_page => {
            Err("the runs are not in order")
        }
        Some(last) if last.space == run.space && last.end_page() > run.first_page => {
            Err("the run overlaps the one before it")
        }
        _ => Ok(()),
    }
}

/// Checks the references between spaces: `same` are the numbers of the entries that have one.
fn check_same(entries: &[Entry], spaces: &[Space], same: &[usize]) -> Result<(), Fault> {
    if same.is_empty() {
        return Ok(());
    }
    let ends = contiguous_ends(entries);
    let mut references = BTreeSet::new();
    for &entry in same {
        let run = decode_checked(&entries[entry]);
        let RunKind::Same { space: target } = run.kind else {
            continue;
        };
        let Some(other) = find_space(spaces, target) else {
            return Err(fault(
                entries,
                entry,
                &format!("it is in space {target}, which is not there"),
            ));
        };
        let covered =
            find_entry(entries, other, run.first_page).is_some_and(|at| ends[at] >= run.end_page());
        if !covered {
            let what = format!("it is in space {target}, which lacks some of its pages");
            return Err(fault(entries, entry, &what));
        }
        references.insert((run.space, target));
    }
    match in_circle(&references) {
        None => Ok(()),
        Some(space) => {
            let entry = find_space(spaces, space).map_or(0, |space| space.entries.start);
            Err(fault(
                entries,
                entry,
                &format!("space {space} refers to itself through others"),
            ))
        }
    }
}

/// Returns for each entry the page up to which its space is described from there on without a hole.
fn contiguous_ends(entries: &[Entry]) -> Vec<u64> {
    let mut ends = vec![0; entries.len()];
    let mut next: Option<(SpaceId, u64, u64)> = None;
    for (entry, end) in entries.iter().zip(&mut ends).rev() {
        let (space, first_page, pages) = run::decode_place(entry);
        *end = first_page + u64::from(pages);
        if let Some((next_space, next_page, next_end)) = next
            && (next_space, next_page) == (space, *end)
        {
            *end = next_end;
        }
        next = Some((space, first_page, *end));
    }
    ends
}

/// Returns a space that is reached from itself, if there is one: takes away, again and again, what
/// nobody refers to.
fn in_circle(references: &BTreeSet<(SpaceId, SpaceId)>) -> Option<SpaceId> {
    let mut incoming: HashMap<SpaceId, usize> = HashMap::new();
    for &(from, to) in references {
        incoming.entry(from).or_default();
        *incoming.entry(to).or_default() += 1;
    }
    let mut free: Vec<SpaceId> = incoming
        .iter()
        .filter(|&(_, &count)| count == 0)
        .map(|(&space, _)| space)
        .collect();
    while let Some(space) = free.pop() {
        incoming.remove(&space);
        for &(_, to) in references.range((space, SpaceId(0))..=(space, SpaceId(u32::MAX))) {
            let count = incoming.get_mut(&to).expect("still referred to");
            *count -= 1;
            if *count == 0 {
                free.push(to);
            }
        }
    }
    incoming.into_keys().min()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chunk::testing::plain;
    use crate::{ChunkId, Part};

    /// Pages of a chunk; a chunk of one page, one of two, and so on.
    fn part(space: u32, first_page: u64, pages: u32, chunk: u32) -> Run {
        let kind = RunKind::Part(Part {
            chunk: ChunkId(chunk),
            skip_pages: 0,
        });
        Run {
            space: SpaceId(space),
            first_page,
            pages,
            kind,
        }
    }

    fn zero(space: u32, first_page: u64, pages: u32) -> Run {
        Run {
            space: SpaceId(space),
            first_page,
            pages,
            kind: RunKind::Zero,
        }
    }

    fn same(space: u32, first_page: u64, pages: u32, target: u32) -> Run {
        let kind = RunKind::Same {
            space: SpaceId(target),
        };
        Run {
            space: SpaceId(space),
            first_page,
            pages,
            kind,
        }
    }

    fn spaces(runs: &[Run]) -> Vec<NewSpace> {
        let mut ids = runs.iter().map(|run| run.space).collect::<Vec<_>>();
        ids.sort_unstable();
        ids.dedup();
        let space = |id| NewSpace {
            id,
            kind: SpaceKind::Memory,
            name: String::new(),
            len_pages: SPACE_MAX_PAGES,
            granule: Granule::Small,
        };
        ids.into_iter().map(space).collect()
    }

    fn index_of(runs: &[Run], spaces: &[NewSpace]) -> Result<Index, Fault> {
        let bytes: Vec<u8> = runs.iter().flat_map(run::encode).collect();
        let range = 0..bytes.len();
        let chunks = (1..=9).map(|pages| plain(0, u64::from(pages) * 10, pages));
        let mut chunks = chunks.collect::<Vec<_>>();
        chunks.push(plain(16, 0, 1));
        let chunks = &chunks;
        Index::new(bytes, range, Bounds { chunks, spaces })
    }

    fn index(runs: &[Run]) -> Result<Index, Fault> {
        index_of(runs, &spaces(runs))
    }

    #[track_caller]
    fn refused(runs: &[Run], entry: usize, what: &str) {
        let fault = index(runs).err().expect("refused");
        assert_eq!(fault.entry, entry, "{fault:?}");
        assert!(fault.what.contains(what), "{fault:?}");
    }

    #[test]
    fn pages_are_found() {
        let runs = [
            part(1, 10, 4, 3),
            zero(1, 14, 6),
            part(1, 30, 2, 1),
            part(4, 0, 1, 9),
        ];
        let index = index(&runs).unwrap();
        for (page, run) in [
            (9, None),
            (10, Some(0)),
            (13, Some(0)),
            (14, Some(1)),
            (19, Some(1)),
        ]
        .into_iter()
        .chain([
            (20, None),
            (30, Some(2)),
            (31, Some(2)),
            (32, None),
            (u64::MAX, None),
        ]) {
            assert_eq!(
                index.find(SpaceId(1), page),
                run.map(|run: usize| runs[run]),
                "{page}"
            );
        }
        assert_eq!(index.find(SpaceId(4), 0), Some(runs[3]));
        assert_eq!(index.find(SpaceId(2), 10), None);
        assert_eq!(index.runs().collect::<Vec<_>>(), runs);
        assert_eq!(index.runs_of(SpaceId(1)).collect::<Vec<_>>(), runs[..3]);
        assert_eq!(index.runs_of(SpaceId(2)).len(), 0);
        let spaces: Vec<_> = index
            .spaces()
            .iter()
            .map(|s| (s.id.0, s.own_pages, s.pages))
            .collect();
        assert_eq!(spaces, [(1, 6, 12), (4, 0, 1)]);
    }

    #[test]
    fn an_empty_index_is_one() {
        assert!(index(&[]).unwrap().spaces().is_empty());
    }

    #[test]
    fn disorder_and_overlap_are_refused() {
        refused(
            &[zero(2, 0, 1), zero(1, 0, 1)],
            1,
            "spaces are not in order",
        );
        refused(&[zero(1, 5, 1), zero(1, 4, 1)], 1, "runs are not in order");
        refused(&[zero(1, 5, 2), zero(1, 6, 1)], 1, "overlaps");
        refused(&[zero(1, 5, 1), zero(1, 5, 1)], 1, "overlaps");
    }

    #[test]
    fn sizes_are_capped() {
        refused(&[zero(1, 5, 0)], 0, "no pages");
        refused(&[zero(1, SPACE_MAX_PAGES - 1, 2)], 0, "past the end");
        refused(&[zero(1, u64::MAX, 2)], 0, "past the end");
        assert!(index(&[zero(1, SPACE_MAX_PAGES - 2, 2)]).is_ok());
    }

    #[test]
    fn runs_lie_inside_of_spaces() {
        let runs = [zero(1, 0, 512), zero(4, 512, 1024)];
        let mut spaces = spaces(&runs);
        let none = NewSpace {
            id: SpaceId(2),
            ..spaces[0].clone()
        };
        spaces.insert(1, none);
        let index = index_of(&runs, &spaces).unwrap();
        let pages = index.spaces().iter().map(|space| space.pages);
        assert_eq!(pages.collect::<Vec<_>>(), [512, 0, 1024]);
        assert_eq!(index.runs_of(SpaceId(2)).len(), 0);
        let refused = |spaces: &[NewSpace], entry, what: &str| {
            let fault = index_of(&runs, spaces).err().expect("refused");
            assert!(
                fault.entry == entry && fault.what.contains(what),
                "{fault:?}"
            );
        };
        refused(&spaces[1..], 0, "not there");
        refused(&spaces[..2], 1, "not there");
        spaces[2].granule = Granule::Large;
        assert!(index_of(&runs, &spaces).is_ok());
        spaces[2].granule = Granule::Huge;
        refused(&spaces, 1, "whole pieces");
        spaces[0].len_pages = 511;
        refused(&spaces, 0, "past the end");
    }

    #[test]
    fn parts_lie_inside_of_chunks() {
        let after = |skip_pages, run: Run| Run {
            kind: RunKind::Part(run.part().expect("a part").after(skip_pages)),
            ..run
        };
        assert!(index(&[after(2, part(1, 0, 3, 4))]).is_ok());
        refused(&[after(3, part(1, 0, 3, 4))], 0, "not inside chunk 4");
        refused(
            &[after(u32::from(u16::MAX), part(1, 0, u32::MAX, 4))],
            0,
            "not inside",
        );
        refused(&[part(1, 0, 1, 10)], 0, "there is none");
    }

    #[test]
    fn same_pages_are_in_the_other_space() {
        assert!(index(&[zero(1, 4, 2), part(1, 6, 1, 0), same(2, 4, 3, 1)]).is_ok());
        refused(&[zero(1, 4, 2), same(2, 4, 3, 1)], 1, "lacks");
        refused(&[zero(1, 4, 2), same(2, 3, 2, 1)], 1, "lacks");
        refused(
            &[zero(1, 4, 1), zero(1, 6, 1), same(2, 4, 3, 1)],
            2,
            "lacks",
        );
        refused(&[same(2, 3, 2, 1)], 0, "not there");
    }

    #[test]
    fn circles_are_refused() {
        refused(&[same(1, 0, 1, 1)], 0, "itself");
        refused(&[same(1, 0, 1, 2), same(2, 0, 1, 1)], 0, "itself");
        let circle = [
            same(1, 0, 1, 2),
            same(2, 0, 1, 3),
            same(3, 0, 1, 4),
            same(4, 0, 1, 2),
        ];
        refused(&circle, 1, "itself");
        let chain = [
            zero(1, 0, 1),
            same(2, 0, 1, 1),
            same(3, 0, 1, 2),
            same(4, 0, 1, 2),
        ];
        assert!(index(&chain).is_ok());
    }

    #[test]
    fn long_chains_are_checked_without_recursion() {
        let mut runs: Vec<Run> = (1..50_000)
            .map(|space| same(space, 0, 1, space + 1))
            .collect();
        runs.push(zero(50_000, 0, 1));
        assert!(index(&runs).is_ok());
        *runs.last_mut().expect("not empty") = same(50_000, 0, 1, 1);
        refused(&runs, 0, "itself");
    }
}
