//! Pages that the kernel brings in by itself, as zeros, without asking anybody.
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Instant;

use abi::spans::{Spans, intersect};
use abi::{Addr, PAGE_BYTES, Span};
use image::Reader;
use rustix::io::Errno;
use sys::pagemap::{Action, Category, Pagemap, Query, Region as Found};
use sys::uffd::Modes;

use crate::ability::register;
use crate::ledger::Word;
use crate::region::PageStates;
use crate::{Ability, Error, Region, Result, Session};

/// Empty parts of memory with small pages that are shorter than this stay ours: to take one out
/// takes 3 to 5 us and makes mappings, and comes along with what is beside it for less.
const SHORT_BYTES: u64 = 64 << 10;

/// How far apart parts are that are looked at together.
const GAP_BYTES: u64 = 2 << 20;

/// Mappings that a target may want to make itself.
const MAPPINGS_LEFT: i64 = 4096;

/// How many mappings process `pid` may be given before it reaches `vm.max_map_count`.
pub(crate) fn mappings_left(pid: i32) -> i64 {
    let most = sys::procfs::read_text("sys/vm/max_map_count");
    let most = most.ok().and_then(|text| text.trim().parse::<i64>().ok());
    let there = sys::procfs::read(format_args!("{pid}/maps"));
    let there = there.map_or(0, |maps| maps.iter().filter(|byte| **byte == b'\n').count());
    (most.unwrap_or(65_530) - there as i64 - MAPPINGS_LEFT).max(0)
}

impl Session {
    /// Takes out what is empty in the image, the longest parts first.
    pub(crate) fn release_empty(&self) -> Result<()> {
        let mut empty = Vec::new();
        for (number, (region, _)) in self.regions.iter().enumerate() {
            let ranges = empty_parts(&self.image, region)?;
            empty.extend(ranges.into_iter().map(|range| (number, range)));
        }
        empty.sort_by_key(|(_, range)| std::cmp::Reverse(range.end - range.start));
        for (number, range) in empty {
            self.release(number, &range, "empty")?;
        }
        Ok(())
    }

    /// Takes out what was given up, where that pays.
    pub(crate) fn release_removed(&self, span: Span) -> Result<()> {
        // What is given up of shared pages would be the image's again.
        if !self.options.unregister || self.is_sharing() {
            return Ok(());
        }
        for (number, (region, known)) in self.regions.iter().enumerate() {
            let (whole, _) = region.numbers_of(span);
            let long = (whole.end - whole.start) * region.granule_bytes() >= SHORT_BYTES;
            let is_out = known.native.next(whole.start, false) >= whole.end;
            if long && !is_out {
                self.release(number, &whole, "remove")?;
            }
        }
        Ok(())
    }

    /// Takes pages out of the tracking of missing pages, unless that would make too many mappings.
    fn release(&self, number: usize, range: &Range<u64>, source: &'static str) -> Result<()> {
        let (region, known) = &self.regions[number];
        let cost = mappings_of(known, region, range);
        if self.mappings.load(Relaxed) < cost {
            return Ok(());
        }
        self.mappings.fetch_sub(cost, Relaxed);
        self.ledger.set(Word::ReleasingFrom, range.start);
        self.ledger.set(Word::ReleasingTo, range.end);
        self.ledger.set(Word::Releasing, 1 + number as u64);
        self.take_out(number, range, source)?;
        self.ledger.set(Word::Releasing, 0);
        Ok(())
    }

    /// The same, whatever it makes; can be done again where it was not finished.
    pub(crate) fn take_out(
        &self,
        number: usize,
        range: &Range<u64>,
        source: &'static str,
    ) -> Result<()> {
        let (region, known) = &self.regions[number];
        let span = region.span_of(range);
        let began = Instant::now();
        let failed = |source| Error::call("unregister", span, self.pid(), source);
        self.uffd.unregister(span).map_err(failed)?;
        known.native.insert(range.clone());
        match self.ability {
            Ability::Missing => {}
            // What is written there is found by its contents.
            Ability::Told => known.suspects.insert(range.clone()),
            Ability::Found => {
                register(&self.uffd, span, Modes::WP, self.pid())?;
                // A page that comes without a mark is told as written, which costs a difference a
                // look at what is zero. To mark small ones first would cost every touch a second
                // fault, and a machine its transparent huge pages.
                if region.granule.pages() > 1 {
                    self.arm(region, known, range)?;
                }
            }
        }
        let took = began.elapsed();
        self.metrics.unregistered(source, span.bytes(), took);
        Ok(())
    }

    /// Protects pages that are not there yet. What came meanwhile may have been written before.
    fn arm(&self, region: &Region, known: &PageStates, range: &Range<u64>) -> Result<()> {
        let span = region.span_of(range);
        match self.uffd.write_protect(span, true) {
            Ok(()) => {
                let there = self.there(&[span], false)?;
                for span in there {
                    known.suspects.insert(region.numbers_of(span).0);
                }
                Ok(())
            }
            Err(error) => match Errno::from_io_error(&error) {
                // Its mappings change: what is written there is found by its contents.
                Some(Errno::AGAIN) => {
                    known.suspects.insert(range.clone());
                    Ok(())
                }
                _ => Err(Error::call("write-protect", span, self.pid(), error)),
            },
        }
    }

    /// The parts of `spans` that are in memory, or, with `swapped`, that are swapped out: what
    /// looks so may be a mark alone, where a page was protected before it came.
    pub(crate) fn there(&self, spans: &[Span], swapped: bool) -> Result<Spans> {
        let query = Query {
            inverted: Category::empty(),
            all: Category::empty(),
            any: match swapped {
                true => Category::PRESENT | Category::SWAPPED,
                false => Category::PRESENT,
            },
            told: Category::empty(),
        };
        // A call takes as long as a look at some hundred pages.
        let wide = spans.iter().copied().collect::<Spans>().joined(GAP_BYTES);
        Ok(intersect(
            &self.scan(&wide, &query, Action::empty())?,
            spans,
        ))
    }

    /// Looks for pages of `spans`.
    pub(crate) fn scan(&self, spans: &[Span], query: &Query, action: Action) -> Result<Spans> {
        let failed = |span| move |source| Error::call("look at", span, self.pid(), source);
        let Some(first) = spans.first() else {
            return Ok(Spans::new());
        };
        let map = Pagemap::open(&self.process).map_err(failed(*first))?;
        let mut found = Spans::new();
        let mut regions = vec![Found::EMPTY; 1024];
        for span in spans {
            let mut at = span.start;
            while at < span.end {
                let rest = Span {
                    start: at,
                    end: span.end,
                };
                let (count, until) = map
                    .scan(rest, query, action, &mut regions)
                    .map_err(failed(rest))?;
                for one in &regions[..count] {
                    found.push(one.span());
                }
                at = if until <= at { Addr(span.end.0) } else { until };
            }
        }
        Ok(found)
    }
}

/// The pages of a region that are wholly zero in the image, in long parts.
pub(crate) fn empty_parts(image: &Reader, region: &Region) -> Result<Vec<Range<u64>>> {
    let size = region.granule.pages();
    let mut empty = Vec::new();
    let end = region.first_page + region.bytes / PAGE_BYTES;
    let mut zeros = region.first_page..region.first_page;
    let mut note = |zeros: &Range<u64>| {
        let start = (zeros.start - region.first_page).div_ceil(size);
        let end = (zeros.end - region.first_page) / size;
        if start < end && (end - start) * region.granule_bytes() >= SHORT_BYTES {
            empty.push(start..end);
        }
    };
    while zeros.end < end {
        let located = image.locate(region.space, zeros.end, end - zeros.end)?;
        let next = zeros.end + u64::from(located.pages);
        if located.part.is_some() {
            note(&zeros);
            zeros.start = next;
        }
        zeros.end = next;
    }
    note(&zeros);
    Ok(empty)
}

/// How many mappings more there are if `range` is taken out.
fn mappings_of(known: &PageStates, region: &Region, range: &Range<u64>) -> i64 {
    let joins = |page: Option<u64>| match page {
        // At the edge of a region there is one mapping less to be cut.
        None => true,
        Some(page) if page >= region.len() => true,
        Some(page) => known.native.contains(page),
    };
    2 - i64::from(joins(range.start.checked_sub(1))) - i64::from(joins(Some(range.end)))
}
