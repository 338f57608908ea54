//! The run index: sorted entries of one width, checked once and then searched where they are.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;

use crate::origins;
use crate::parts;
use crate::run::{self, ENTRY_BYTES, PAGE_BYTES};
use crate::{DATA_RUN_MAX_PAGES, Run, RunKind, SPACE_MAX_PAGES, SpaceId};

type Entry = [u8; ENTRY_BYTES];

/// What an index may refer to.
#[derive(Clone, Copy)]
pub(crate) struct Bounds<'a> {
    /// The lengths of the pages objects.
    pub parts_bytes: &'a [u64],
    /// How many of those bytes belong to no run.
    pub unused_bytes: u64,
    /// The stored runs that `parent` and `equal` runs are parts of.
    pub origins: &'a [Run],
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
    /// How many of its pages are stored in this image.
    pub data_pages: u64,
    /// How many pages are described at all.
    pub pages: u64,
    /// Its entries in the index.
    pub(crate) entries: Range<usize>,
}

/// A checked index.
pub(crate) struct Index {
    bytes: Vec<u8>,
    /// Where the entries are in `bytes`.
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

    /// Returns the run that `page` of `space` is in, or else the next one of that space.
    pub fn find_from(&self, space: SpaceId, page: u64) -> Option<Run> {
        let space = find_space(&self.spaces, space)?;
        let own = &self.entries()[space.entries.clone()];
        let ends_before = |entry: &Entry| {
            let (_, first_page, pages) = run::decode_place(entry);
            first_page + u64::from(pages) <= page
        };
        own.get(own.partition_point(ends_before))
            .map(decode_checked)
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
/// The entries are sorted and do not overlap; data runs fill the pages objects, each byte once, but
/// for as many bytes as are said to be unused; every page of a `same` run is described in the other
/// space, and no such references form a circle.
pub(crate) fn check(entries: &[Entry], bounds: Bounds<'_>) -> Result<Vec<Space>, Fault> {
    let mut spaces: Vec<Space> = Vec::new();
    let mut data = Vec::new();
    let mut same = Vec::new();
    let mut last: Option<Run> = None;
    for (number, entry) in entries.iter().enumerate() {
        let fault = |what: &str| fault(entries, number, what);
        let run = run::decode(entry).map_err(fault)?;
        check_alone(&run, bounds).map_err(|what| fault(&what))?;
        check_order(last, run).map_err(fault)?;
        match run.kind {
            RunKind::Data { offset_bytes, .. } => data.push((offset_bytes, number)),
            RunKind::Same { .. } => same.push(number),
            RunKind::Zero | RunKind::Parent(_) | RunKind::Equal(_) => {}
        }
        if last.is_none_or(|last| last.space != run.space) {
            let entries = number..number;
            spaces.push(Space {
                id: run.space,
                data_pages: 0,
                pages: 0,
                entries,
            });
        }
        let space = spaces.last_mut().expect("just pushed");
        space.entries.end = number + 1;
        space.pages += u64::from(run.pages);
        if matches!(run.kind, RunKind::Data { .. }) {
            space.data_pages += u64::from(run.pages);
        }
        last = Some(run);
    }
    check_data(entries, data, bounds)?;
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
fn check_alone(run: &Run, bounds: Bounds<'_>) -> Result<(), String> {
    if run.pages == 0 {
        return Err("the run has no pages".into());
    }
    if run.end_page() > SPACE_MAX_PAGES {
        return Err(format!(
            "the run ends at page {:#x}, past every space",
            run.end_page()
        ));
    }
    match run.kind {
        RunKind::Data { .. } if run.pages > DATA_RUN_MAX_PAGES => {
            Err(format!("a data run of {} pages", run.pages))
        }
        RunKind::Data { offset_bytes, .. } => {
            let (part, offset_bytes) = parts::split(offset_bytes);
            let part_bytes = bounds.parts_bytes.get(part).copied().unwrap_or(0);
            // Neither number has more than 56 bits.
            if offset_bytes + run.len_bytes() <= part_bytes {
                return Ok(());
            }
            Err(format!(
                "its data, {} bytes at {offset_bytes}, is not inside the pages' {part_bytes}",
                run.len_bytes()
            ))
        }
        _ => origins::check(run, bounds.origins),
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

/// Checks that data runs, given as (position, entry), lie in the pages objects without overlap, and
/// without gaps other than those that are said to be there.
fn check_data(
    entries: &[Entry],
    mut data: Vec<(u64, usize)>,
    bounds: Bounds<'_>,
) -> Result<(), Fault> {
    let mut unused_bytes = bounds.unused_bytes;
    let mut may_skip = |from: u64, to: u64| {
        let rest = to.checked_sub(from);
        let rest = rest.and_then(|gap| unused_bytes.checked_sub(gap));
        unused_bytes = rest.unwrap_or(unused_bytes);
        rest.is_some()
    };
    // Mostly sorted already; the stable sort knows how to use that.
    data.sort();
    let mut data = data.into_iter().peekable();
    for (part, &part_bytes) in bounds.parts_bytes.iter().enumerate() {
        let mut end_bytes = 0;
        while let Some((position, entry)) =
            data.next_if(|(position, _)| parts::split(*position).0 == part)
        {
            let (_, offset_bytes) = parts::split(position);
            if !may_skip(end_bytes, offset_bytes) {
                let what =
                    format!("its data is at byte {offset_bytes} where {end_bytes} comes next");
                return Err(fault(entries, entry, &what));
            }
            let (_, _, pages) = run::decode_place(&entries[entry]);
            end_bytes = offset_bytes + u64::from(pages) * PAGE_BYTES as u64;
        }
        if !may_skip(end_bytes, part_bytes) {
            let what = format!("runs describe {end_bytes} bytes of pages, there are {part_bytes}");
            return Err(fault(entries, entries.len(), &what));
        }
    }
    if unused_bytes > 0 {
        let what = format!("{unused_bytes} bytes of pages fewer are unused than it says");
        return Err(fault(entries, entries.len(), &what));
    }
    Ok(())
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

    const PAGE: u64 = PAGE_BYTES as u64;

    fn data(space: u32, first_page: u64, pages: u32, file_page: u64) -> Run {
        let kind = RunKind::Data {
            offset_bytes: file_page * PAGE,
            checksum: 1,
        };
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

    fn index(runs: &[Run], pages: u64) -> Result<Index, Fault> {
        let bytes: Vec<u8> = runs.iter().flat_map(run::encode).collect();
        let range = 0..bytes.len();
        Index::new(
            bytes,
            range,
            Bounds {
                parts_bytes: &[pages * PAGE],
                unused_bytes: 0,
                origins: &[],
            },
        )
    }

    #[track_caller]
    fn refused(runs: &[Run], pages: u64, entry: usize, what: &str) {
        let fault = index(runs, pages).err().expect("refused");
        assert_eq!(fault.entry, entry, "{fault:?}");
        assert!(fault.what.contains(what), "{fault:?}");
    }

    #[test]
    fn pages_are_found() {
        let runs = [
            data(1, 10, 4, 3),
            zero(1, 14, 6),
            data(1, 30, 2, 0),
            data(4, 0, 1, 2),
        ];
        let index = index(&runs, 7).unwrap();
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
            .map(|s| (s.id.0, s.data_pages, s.pages))
            .collect();
        assert_eq!(spaces, [(1, 6, 12), (4, 1, 1)]);
    }

    #[test]
    fn an_empty_index_is_one() {
        assert!(index(&[], 0).unwrap().spaces().is_empty());
        refused(&[], 1, 0, "describe 0 bytes");
    }

    #[test]
    fn disorder_and_overlap_are_refused() {
        refused(
            &[zero(2, 0, 1), zero(1, 0, 1)],
            0,
            1,
            "spaces are not in order",
        );
        refused(
            &[zero(1, 5, 1), zero(1, 4, 1)],
            0,
            1,
            "runs are not in order",
        );
        refused(&[zero(1, 5, 2), zero(1, 6, 1)], 0, 1, "overlaps");
        refused(&[zero(1, 5, 1), zero(1, 5, 1)], 0, 1, "overlaps");
    }

    #[test]
    fn sizes_are_capped() {
        refused(&[zero(1, 5, 0)], 0, 0, "no pages");
        refused(&[data(1, 0, 257, 0)], 257, 0, "257 pages");
        refused(&[zero(1, SPACE_MAX_PAGES - 1, 2)], 0, 0, "past every space");
        refused(&[zero(1, u64::MAX, 2)], 0, 0, "past every space");
        assert!(index(&[zero(1, SPACE_MAX_PAGES - 2, 2)], 0).is_ok());
    }

    #[test]
    fn data_fills_the_pages_object() {
        refused(&[data(1, 0, 2, 0)], 1, 0, "not inside");
        refused(&[data(1, 0, 1, (1 << 52) - 1)], 1, 0, "not inside");
        refused(&[data(1, 0, 1, 1)], 2, 0, "0 comes next");
        refused(&[data(1, 0, 1, 0)], 2, 1, "there are 8192");
        refused(
            &[data(1, 0, 2, 0), data(1, 2, 2, 1)],
            3,
            1,
            "8192 comes next",
        );
        refused(
            &[data(1, 0, 1, 0), data(1, 1, 1, 0)],
            1,
            1,
            "4096 comes next",
        );
    }

    #[test]
    fn data_fills_every_pages_object() {
        let check = |runs: &[Run], parts: &[u64]| {
            let bytes: Vec<u8> = runs.iter().flat_map(run::encode).collect();
            let parts_bytes: &[u64] = &parts.iter().map(|pages| pages * PAGE).collect::<Vec<_>>();
            let bounds = Bounds {
                parts_bytes,
                unused_bytes: 0,
                origins: &[],
            };
            super::check(entries(&bytes), bounds).map_err(|fault| fault.what)
        };
        let part = |number: u64, page: u64| parts::position(number as usize, 0) / PAGE + page;
        let runs = [
            data(1, 0, 2, part(2, 0)),
            data(1, 2, 1, 0),
            data(1, 3, 1, part(2, 2)),
        ];
        assert!(check(&runs, &[1, 0, 3]).is_ok());
        assert!(
            check(&runs, &[1, 0, 4])
                .unwrap_err()
                .contains("there are 16384")
        );
        assert!(
            check(&runs, &[1, 1, 3])
                .unwrap_err()
                .contains("describe 0 bytes")
        );
        assert!(check(&runs, &[1, 0]).unwrap_err().contains("not inside"));
        assert!(
            check(&runs, &[2, 0, 3])
                .unwrap_err()
                .contains("describe 4096 bytes")
        );
        let gap = [data(1, 0, 1, part(1, 1))];
        assert!(check(&gap, &[0, 2]).unwrap_err().contains("0 comes next"));
        let far = [data(1, 0, 1, part(1, 0)), data(1, 1, 1, part(15, 0))];
        assert!(check(&far, &[0, 1]).unwrap_err().contains("not inside"));
    }

    #[test]
    fn gaps_are_as_large_as_it_says() {
        let check = |runs: &[Run], unused: u64| {
            let bytes: Vec<u8> = runs.iter().flat_map(run::encode).collect();
            let bounds = Bounds {
                parts_bytes: &[6 * PAGE, 2 * PAGE],
                unused_bytes: unused * PAGE,
                origins: &[],
            };
            super::check(entries(&bytes), bounds).map_err(|fault| fault.what)
        };
        let runs = [data(1, 0, 2, 1), data(1, 2, 1, 4)];
        assert!(check(&runs, 5).is_ok());
        assert!(check(&runs, 4).unwrap_err().contains("there are 8192"));
        assert!(check(&runs, 2).unwrap_err().contains("there are 24576"));
        assert!(check(&runs, 0).unwrap_err().contains("0 comes next"));
        assert!(check(&runs, 6).unwrap_err().contains("4096 bytes"));
        assert!(check(&runs, u64::MAX / PAGE).is_err());
        let overlap = [data(1, 0, 2, 1), data(1, 2, 1, 2)];
        assert!(check(&overlap, 5).unwrap_err().contains("12288 comes next"));
    }

    #[test]
    fn parents_are_refused_where_there_is_none() {
        let run = Run {
            kind: RunKind::Parent(crate::Part {
                origin: 0,
                skip_pages: 0,
            }),
            ..zero(1, 0, 1)
        };
        refused(&[run], 0, 0, "there is none");
    }

    #[test]
    fn same_pages_are_in_the_other_space() {
        assert!(index(&[zero(1, 4, 2), data(1, 6, 1, 0), same(2, 4, 3, 1)], 1).is_ok());
        refused(&[zero(1, 4, 2), same(2, 4, 3, 1)], 0, 1, "lacks");
        refused(&[zero(1, 4, 2), same(2, 3, 2, 1)], 0, 1, "lacks");
        refused(
            &[zero(1, 4, 1), zero(1, 6, 1), same(2, 4, 3, 1)],
            0,
            2,
            "lacks",
        );
        refused(&[same(2, 3, 2, 1)], 0, 0, "not there");
    }

    #[test]
    fn circles_are_refused() {
        refused(&[same(1, 0, 1, 1)], 0, 0, "itself");
        refused(&[same(1, 0, 1, 2), same(2, 0, 1, 1)], 0, 0, "itself");
        let circle = [
            same(1, 0, 1, 2),
            same(2, 0, 1, 3),
            same(3, 0, 1, 4),
            same(4, 0, 1, 2),
        ];
        refused(&circle, 0, 1, "itself");
        let chain = [
            zero(1, 0, 1),
            same(2, 0, 1, 1),
            same(3, 0, 1, 2),
            same(4, 0, 1, 2),
        ];
        assert!(index(&chain, 0).is_ok());
    }

    #[test]
    fn long_chains_are_checked_without_recursion() {
        let mut runs: Vec<Run> = (1..50_000)
            .map(|space| same(space, 0, 1, space + 1))
            .collect();
        runs.push(zero(50_000, 0, 1));
        assert!(index(&runs, 0).is_ok());
        *runs.last_mut().expect("not empty") = same(50_000, 0, 1, 1);
        refused(&runs, 0, 0, "itself");
    }
}
