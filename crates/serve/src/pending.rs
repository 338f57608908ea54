//! What a live difference has not copied yet: pages of one instant, and those of them that were
//! saved because they were about to change.
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::sync::{Arc, Mutex};

use abi::{Addr, PAGE_BYTES, Span};
use memory::TaskMemory;
use pages::{Extent, Source};
use sys::process::Process;

use crate::bits::{self, Bits};
use crate::live::CopyProgress;
use crate::region::PageStates;
use crate::session::lock;
use crate::{Region, Result};

/// How much is kept in memory for threads that write; then they wait until some of it is copied.
pub(crate) const SAVED_MAX_BYTES: u64 = 64 << 20;

/// How much is kept in memory when pages are being given up, which must not wait: nobody's fault
/// is answered before.
const GIVEN_UP_MAX_BYTES: u64 = 512 << 20;

/// Bytes saved with one call.
const TOGETHER_BYTES: u64 = 1 << 20;

/// Consecutive pages of a region, by number.
pub(crate) type Part = (usize, Range<u64>);

/// Pages of one instant that are still wanted. None of them changes before it is saved: a thread
/// that writes to one waits until then.
#[derive(Debug)]
pub(crate) struct PendingPages {
    /// As those of [`crate::Session`].
    parts: Vec<RegionPages>,
    memory: TaskMemory,
    saved: Mutex<SavedPages>,
    /// Some of them have changed before they were saved.
    lost: AtomicBool,
    copied: Arc<CopyProgress>,
}

/// Those of a region, by number. They change while `saved` is locked.
#[derive(Debug)]
struct RegionPages {
    region: Region,
    all: Bits,
    /// Those that are not saved.
    open: Bits,
}

/// Contents of whole pages, by region and number.
#[derive(Debug, Default)]
struct SavedPages {
    pages: BTreeMap<(usize, u64), Vec<u8>>,
    bytes: u64,
}

impl PendingPages {
    /// None of the pages of a target.
    pub fn new(
        regions: &[(Region, PageStates)],
        process: &Process,
        copied: Arc<CopyProgress>,
    ) -> Self {
        let wanted = |(region, _): &(Region, PageStates)| RegionPages {
            region: *region,
            all: bits::none(region.len()),
            open: bits::none(region.len()),
        };
        Self {
            parts: regions.iter().map(wanted).collect(),
            memory: TaskMemory::new(process),
            saved: Mutex::default(),
            lost: AtomicBool::new(false),
            copied,
        }
    }

    /// Adds pages of a region, whose writers wait from here on.
    pub fn want(&self, (number, pages): Part) {
        let _saved = lock(&self.saved);
        self.parts[number].all.insert(pages.clone());
        self.parts[number].open.insert(pages);
    }

    /// Adds pages that may change at any time, as they are now: saves them. It waits for who serves
    /// the target where they are not there.
    pub fn want_saved(&self, (number, pages): Part) -> Result<()> {
        let RegionPages { region, all, .. } = &self.parts[number];
        let page_bytes = region.granule_bytes();
        let mut bytes = vec![0; ((pages.end - pages.start) * page_bytes) as usize];
        self.memory.read(&[extent(region, &pages)], &mut bytes)?;
        let mut saved = lock(&self.saved);
        for (page, contents) in pages.clone().zip(bytes.chunks_exact(page_bytes as usize)) {
            saved.insert(number, page, contents.to_vec());
        }
        all.insert(pages);
        Ok(())
    }

    /// Tells whether there is room to save so many bytes for writers.
    pub fn has_room(&self, bytes: u64) -> bool {
        lock(&self.saved).bytes + bytes <= SAVED_MAX_BYTES
    }

    /// Saves a page before it changes, where it is wanted; whether it may change now. Otherwise
    /// others have to be copied first.
    pub fn save(&self, number: usize, page: u64) -> bool {
        let RegionPages { region, open, .. } = &self.parts[number];
        if self.is_lost() || !open.contains(page) {
            return true;
        }
        let mut saved = lock(&self.saved);
        if saved.bytes + region.granule_bytes() > SAVED_MAX_BYTES {
            return false;
        }
        self.save_open(&mut saved, number, page..page + 1);
        true
    }

    /// Saves everything, as some of it is being given up and it is not known what.
    pub fn save_all(&self) {
        let mut saved = lock(&self.saved);
        for (number, RegionPages { region, open, .. }) in self.parts.iter().enumerate() {
            let most = (TOGETHER_BYTES / region.granule_bytes()).max(1);
            let mut at = open.next(0, true);
            while at < region.len() && saved.bytes < GIVEN_UP_MAX_BYTES && !self.is_lost() {
                let end = open.next(at, false).min(at + most);
                self.save_open(&mut saved, number, at..end);
                at = open.next(end, true);
            }
        }
    }

    /// Saves what is open of a few pages. They are there: what is given up is saved before we hear
    /// that it is, so to read them waits for nobody.
    fn save_open(&self, saved: &mut SavedPages, number: usize, pages: Range<u64>) {
        let RegionPages { region, open, .. } = &self.parts[number];
        let pages = pages.start..open.next(pages.start, false).min(pages.end);
        let page_bytes = region.granule_bytes() as usize;
        let mut bytes = vec![0; (pages.end - pages.start) as usize * page_bytes];
        if bytes.is_empty() {
            return;
        }
        if let Err(error) = self.memory.read(&[extent(region, &pages)], &mut bytes) {
            log::warn!("what changes cannot be saved before: {error}");
            return self.lose();
        }
        for (page, contents) in pages.clone().zip(bytes.chunks_exact(page_bytes)) {
            saved.insert(number, page, contents.to_vec());
        }
        open.remove(pages);
        self.copied
            .saved_bytes
            .fetch_add(bytes.len() as u64, Relaxed);
    }

    /// Some page that is not saved, where there is one.
    pub fn first_open(&self) -> Option<Span> {
        let first = |RegionPages { region, open, .. }: &RegionPages| {
            let page = open.next(0, true);
            (page < region.len()).then(|| region.span_of(&(page..page + 1)))
        };
        match self.is_lost() {
            true => None,
            false => self.parts.iter().find_map(first),
        }
    }

    /// Notes that `span` is given up, of which everything should have been saved.
    pub fn note_removed(&self, span: Span) {
        let _saved = lock(&self.saved);
        for RegionPages { region, open, .. } in &self.parts {
            let (whole, cut) = region.numbers_of(span);
            let lost = open.next(whole.start, true) < whole.end;
            if lost || cut.into_iter().any(|page| open.contains(page)) {
                self.lose();
            }
        }
    }

    /// Notes that it cannot be had any more.
    pub fn lose(&self) {
        self.lost.store(true, Release);
    }

    /// Tells whether some of it cannot be had any more.
    pub fn is_lost(&self) -> bool {
        self.lost.load(Acquire)
    }

    /// The next pages to be copied, about `most_bytes`: first those that were saved, so that there
    /// is room for more.
    pub fn next(&self, most_bytes: u64) -> Vec<Part> {
        let mut parts: Vec<Part> = Vec::new();
        let mut bytes = 0;
        for (number, page) in lock(&self.saved).pages.keys() {
            if bytes >= most_bytes {
                return parts;
            }
            bytes += self.parts[*number].region.granule_bytes();
            match parts.last_mut() {
                Some((last, pages)) if last == number && pages.end == *page => pages.end += 1,
                _ => parts.push((*number, *page..page + 1)),
            }
        }
        if !parts.is_empty() {
            return parts;
        }
        for (number, RegionPages { region, all, .. }) in self.parts.iter().enumerate() {
            let page_bytes = region.granule_bytes();
            let mut at = all.next(0, true);
            while at < region.len() && bytes < most_bytes {
                let left_pages = (most_bytes - bytes).div_ceil(page_bytes);
                let end = all.next(at, false).min(at + left_pages);
                parts.push((number, at..end));
                bytes += (end - at) * page_bytes;
                at = all.next(end, true);
            }
        }
        parts
    }

    /// Forgets pages that were copied.
    pub fn done(&self, parts: &[Part]) {
        let mut saved = lock(&self.saved);
        let mut bytes = 0;
        for (number, pages) in parts {
            let RegionPages { region, all, open } = &self.parts[*number];
            all.remove(pages.clone());
            open.remove(pages.clone());
            pages.clone().for_each(|page| saved.remove(*number, page));
            bytes += (pages.end - pages.start) * region.granule_bytes();
        }
        self.copied.copied_bytes.fetch_add(bytes, Relaxed);
    }

    /// The page that holds an address.
    fn find(&self, at: Addr) -> Option<(usize, u64)> {
        let holds = |wanted: &RegionPages| wanted.region.span().contains(at);
        let number = self.parts.iter().position(holds)?;
        Some((number, self.parts[number].region.number_of(at)))
    }
}

impl SavedPages {
    fn insert(&mut self, region: usize, page: u64, contents: Vec<u8>) {
        let bytes = contents.len() as u64;
        if self.pages.insert((region, page), contents).is_none() {
            self.bytes += bytes;
        }
    }

    fn remove(&mut self, region: usize, page: u64) {
        if let Some(contents) = self.pages.remove(&(region, page)) {
            self.bytes -= contents.len() as u64;
        }
    }
}

/// Consecutive pages of a region.
pub(crate) fn extent(region: &Region, pages: &Range<u64>) -> Extent {
    let span = region.span_of(pages);
    Extent {
        space: region.space,
        first_page: region.image_pages(pages).start,
        at: span.start,
        pages: span.pages(),
    }
}

/// The pages of the instant, be they saved or as they were.
impl Source for PendingPages {
    fn read(&self, extents: &[Extent], buffer: &mut [u8]) -> pages::Result<()> {
        let pieces = self.pieces(extents);
        // What is saved may be gone.
        let mut rest = &mut buffer[..];
        for same in pieces.chunk_by(|one, other| one.saved == other.saved) {
            let bytes = same.iter().map(|piece| piece.extent.bytes()).sum::<u64>();
            let (part, after) = rest.split_at_mut(bytes as usize);
            rest = after;
            if !same[0].saved {
                self.memory.read(&joined(same), part)?;
            }
        }
        // Who was about to change a page has saved it before: if it is not, it was as it was.
        let saved = lock(&self.saved);
        let mut at = 0;
        for piece in &pieces {
            let end = at + piece.extent.bytes() as usize;
            if let Some(contents) = piece.key.and_then(|key| saved.pages.get(&key)) {
                let part = &contents[piece.skip..piece.skip + (end - at)];
                buffer[at..end].copy_from_slice(part);
            }
            at = end;
        }
        Ok(())
    }
}

/// A part of one page of the target.
struct Piece {
    extent: Extent,
    key: Option<(usize, u64)>,
    /// How far from the page's beginning, in bytes.
    skip: usize,
    saved: bool,
}

/// The extents of pieces, fewer where they follow each other.
fn joined(pieces: &[Piece]) -> Vec<Extent> {
    let mut extents: Vec<Extent> = Vec::new();
    for Piece { extent, .. } in pieces {
        match extents.last_mut() {
            Some(last) if last.span().end == extent.at => last.pages += extent.pages,
            _ => extents.push(*extent),
        }
    }
    extents
}

impl PendingPages {
    /// Cuts extents into parts of pages.
    fn pieces(&self, extents: &[Extent]) -> Vec<Piece> {
        let saved = lock(&self.saved);
        let mut pieces = Vec::new();
        for extent in extents {
            let mut done = 0;
            while done < extent.pages {
                let at = extent.at.plus(done * PAGE_BYTES);
                let key = self.find(at);
                let (mut pages, mut skip) = (1, 0);
                if let Some((number, page)) = key {
                    let region = &self.parts[number].region;
                    let start = region.span_of(&(page..page + 1)).start;
                    skip = (at.0 - start.0) as usize;
                    pages = region.granule.pages() - skip as u64 / PAGE_BYTES;
                }
                let pages = pages.min(extent.pages - done);
                pieces.push(Piece {
                    extent: extent.part(done, pages),
                    key,
                    skip,
                    saved: key.is_some_and(|key| saved.pages.contains_key(&key)),
                });
                done += pages;
            }
        }
        pieces
    }
}
