//! Freeing what a chain of images does not need any more.
//!
//! Of all images that the newest one is over, only the pages that it has from them stay; the room
//! of the others is given back to the store. The older images can then no longer be read by
//! themselves, which their manifests say from before the first byte goes.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::slice;
use std::sync::Arc;

use abi::spans::{Ranges, subtract};
use prost::Message;
use store::{Claim, Store};

use crate::ancestors::{current, join};
use crate::checksum;
use crate::chunk::{self, Chunk, ChunkId};
use crate::manifest::{FREED_FEATURE, Manifest};
use crate::parts::{self, ANCESTORS_MAX};
use crate::raw::{self, CHUNKS, INDEX, MESSAGE, RECORDS, RawManifest, SPACES};
use crate::run::{self, PAGE_BYTES, Part};
use crate::{Error, ImageId, Reader, Result, Run, RunKind, marks};

/// Counts of freed space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DedupSummary {
    /// How much room was given back, as far as the store can tell.
    pub freed_bytes: u64,
    /// In how many images.
    pub images: u64,
}

/// An image that the newest one is over.
struct OlderImage {
    id: ImageId,
    /// Its path, relative to the newest.
    path: String,
    store: Arc<dyn Store>,
    parts_bytes: Vec<u64>,
    is_freed: bool,
}

/// Frees, in the images that the one in `store` is over, all pages that it does not need. Chunks of
/// which it needs parts are cut where pages are stored as they are: its manifest is replaced by one
/// that knows the parts. Encoded chunks stay whole.
///
/// Whenever that is cut short, the newest image is whole, and older ones are or say that they are
/// not. With `durable`, all of that is on stable storage before anything is freed; the newest image
/// must be so already.
///
/// # Errors
/// [`Error::Needed`] where another image has pages from the one in `store` or from one that it is
/// over; [`Error::Freed`] where the one in `store` is not whole itself; [`Error::Store`], also
/// where the store cannot free parts of objects: then nothing was changed.
pub fn dedup(store: &dyn Store, durable: bool) -> Result<DedupSummary> {
    let claim = store.claim().map_err(Error::store("claim the place of"))?;
    let mut newest = Reader::open(store)?;
    newest.check_freed()?;
    marks::refuse_if_needed(store, &claim, Some(newest.id()))?;
    let chain = chain(store, &newest);
    check(&newest, &chain, None)?;
    if chain.iter().all(|older| older.parts_bytes.is_empty()) {
        return Ok(DedupSummary::default());
    }
    for older in &chain {
        older.probe()?;
    }
    if refine(store, &newest, durable)? {
        newest = Reader::open(store)?;
    }
    let needed = needed(&newest);
    let holes = chain.iter().map(|older| older.holes(&needed));
    let holes = holes.collect::<Vec<_>>();
    // What is over an image that is not whole is not, either.
    let oldest = holes
        .iter()
        .rposition(|parts| parts.iter().any(|holes| !holes.is_empty()));
    let Some(oldest) = oldest else {
        return Ok(DedupSummary::default());
    };
    let marked = chain[..=oldest].iter().rev();
    let claims = marked.map(|older| older.mark(newest.id(), durable));
    let _claims = claims.collect::<Result<Vec<_>>>()?;
    // Who became a child before the manifests were changed is seen now, and who does later sees
    // that they were.
    refuse_children(store, newest.id(), &HashSet::new(), None)?;
    check(&newest, &chain, None)?;
    let mut done = DedupSummary::default();
    for (older, holes) in chain.iter().zip(&holes) {
        let freed_bytes = older.free(holes)?;
        done.freed_bytes += freed_bytes;
        done.images += u64::from(freed_bytes > 0);
    }
    Ok(done)
}

/// Tells whether [`dedup`] of an image over the one in `parent` would be refused, before there is
/// one. Image `own` is to be replaced by it and does not count.
///
/// # Errors
/// [`Error::Needed`], [`Error::Freed`], and those of reading the image.
pub fn check_dedup(parent: &dyn Store, own: Option<ImageId>) -> Result<()> {
    let reader = Reader::open(parent)?;
    reader.check_freed()?;
    refuse_children(parent, reader.id(), &HashSet::new(), own)?;
    check(&reader, &chain(parent, &reader), own)
}

/// The images that `newest` is over, the youngest first, as far as they are there.
fn chain(store: &dyn Store, newest: &Reader) -> Vec<OlderImage> {
    let mut chain = Vec::new();
    let parent = |reader: &Reader| reader.parent().map(|(id, path)| (id, path.to_owned()));
    let mut next = parent(newest);
    while let Some((id, path)) = next.take() {
        let Ok(place) = store.beside(&path) else {
            break;
        };
        let reader = match Reader::open(&*place) {
            Ok(reader) if reader.id() == id && chain.len() < ANCESTORS_MAX => reader,
            // What is not there has nothing to be freed; the newest needs nothing of it, or else
            // reading it says so.
            _ => break,
        };
        next = parent(&reader).map(|(id, way)| (id, join(&path, &way)));
        let parts_bytes = reader.parts_bytes();
        chain.push(OlderImage {
            id,
            path,
            store: place,
            parts_bytes: match parts_bytes.iter().any(|bytes| *bytes > 0) {
                true => parts_bytes,
                false => Vec::new(),
            },
            is_freed: reader.freed_by().is_some(),
        });
    }
    chain
}

/// Refuses a chain from which an image has pages that is not in it; `own` does not count.
fn check(newest: &Reader, chain: &[OlderImage], own: Option<ImageId>) -> Result<()> {
    let mut known = HashSet::from([newest.id()]);
    for older in chain {
        refuse_children(&*older.store, older.id, &known, own)?;
        known.insert(older.id);
    }
    Ok(())
}

fn refuse_children(
    store: &dyn Store,
    id: ImageId,
    known: &HashSet<ImageId>,
    own: Option<ImageId>,
) -> Result<()> {
    let children = marks::children(store)?.into_iter();
    let mut others = children.filter(|(child, _)| !known.contains(child) && Some(*child) != own);
    match others.next() {
        Some((child, path)) => Err(Error::Needed { id, child, path }),
        None => Ok(()),
    }
}

/// Replaces the manifest of `newest` by one in which no chunk of another image has pages that are
/// not needed, other than encoded ones. Tells whether there was one.
fn refine(store: &dyn Store, newest: &Reader, durable: bool) -> Result<bool> {
    let mut used = vec![Vec::new(); newest.chunks().len()];
    let runs = || {
        let spaces = newest.spaces().iter();
        spaces.flat_map(|space| newest.runs(space.id))
    };
    for part in runs().filter_map(|run| Some((run.part()?, run.pages))) {
        let (part, pages) = part;
        used[part.chunk.0 as usize].push(part.skip_pages..part.skip_pages + pages);
    }
    let mut finer: Vec<Chunk> = Vec::new();
    // For each chunk, the pages that are used and the number of the new chunk.
    let mut places = Vec::with_capacity(used.len());
    for ((id, chunk), used) in (0..).map(ChunkId).zip(newest.chunks()).zip(used) {
        let used = Ranges::of(used);
        let whole = used.is_just(&(0..chunk.pages));
        let first = finer.len() as u32;
        if whole || !chunk.is_inherited() || !chunk.is_plain() {
            places.push(vec![(0..chunk.pages, ChunkId(first))]);
            finer.push(*chunk);
            continue;
        }
        let mut bytes = vec![0; chunk.len_bytes()];
        newest.load(&[(id, 0)], &mut bytes)?;
        finer.extend(used.iter().map(|pages| part_of(chunk, pages, &bytes)));
        places.push(used.into_iter().zip((first..).map(ChunkId)).collect());
    }
    if finer == newest.chunks() {
        return Ok(false);
    }
    let place = |part: Part| {
        let places = &places[part.chunk.0 as usize];
        let at = places.partition_point(|(pages, _)| pages.end <= part.skip_pages);
        let (pages, chunk) = &places[at];
        Part {
            chunk: *chunk,
            skip_pages: part.skip_pages - pages.start,
        }
    };
    let runs = runs().map(|run| Run {
        kind: match run.kind {
            RunKind::Part(part) => RunKind::Part(place(part)),
            kind => kind,
        },
        ..run
    });
    let index = runs.flat_map(|run| run::encode(&run)).collect::<Vec<_>>();
    let raw = RawManifest::read(store)?;
    let chunks = chunk::encode(&finer);
    let [spaces, message, records] = [SPACES, MESSAGE, RECORDS].map(|one| raw.section(one));
    let sections = [spaces, &index, &chunks, message, records];
    raw::replace(store, raw.id, sections, durable)?;
    Ok(true)
}

/// The pages `pages` of a chunk, whose contents are `bytes`.
fn part_of(chunk: &Chunk, pages: &Range<u32>, bytes: &[u8]) -> Chunk {
    let place = |page: u32| page as usize * PAGE_BYTES;
    let part = &bytes[place(pages.start)..place(pages.end)];
    Chunk {
        stored_bytes: part.len() as u32,
        offset_bytes: chunk.offset_bytes + place(pages.start) as u64,
        checksum: checksum::of_many(part.len())(part),
        pages: pages.end - pages.start,
        ..*chunk
    }
}

type NeededRanges = HashMap<(ImageId, usize), Ranges<u64>>;

/// The bytes that `newest` needs of the pages objects of other images.
fn needed(newest: &Reader) -> NeededRanges {
    let mut needed = NeededRanges::new();
    for chunk in newest.chunks() {
        if let (Some(ancestor), part) = parts::owner(chunk.object as usize) {
            let id = newest.ancestors()[ancestor].id;
            let ranges = needed.entry((id, part)).or_default();
            ranges.push(chunk.offset_bytes..chunk.offset_bytes + u64::from(chunk.stored_bytes));
        }
    }
    needed
}

impl OlderImage {
    /// Finds out whether the store can free parts of objects, by freeing nothing.
    fn probe(&self) -> Result<()> {
        for (part, len) in self.parts() {
            let past = len..len + PAGE_BYTES as u64;
            let freed = self.store.free(&self.id.pages_part_name(part), &[past]);
            freed.map_err(Error::store("free parts of"))?;
        }
        Ok(())
    }

    fn parts(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        let parts = self.parts_bytes.iter().copied().enumerate();
        parts.filter(|(_, len)| *len > 0)
    }

    /// The bytes of each pages object that are not needed.
    fn holes(&self, needed: &NeededRanges) -> Vec<Ranges<u64>> {
        let parts = self.parts_bytes.iter().enumerate();
        let holes = parts.map(|(part, len)| {
            let needed = needed
                .get(&(self.id, part))
                .map_or(&[][..], |needed| needed);
            subtract(slice::from_ref(&(0..*len)), needed)
        });
        holes.collect()
    }

    /// Has the image say that it is not whole. Nobody else writes there until the claim is given
    /// up.
    fn mark(&self, by: ImageId, durable: bool) -> Result<Claim> {
        let claim = self.store.claim();
        let claim = claim.map_err(Error::store("claim the place of"))?;
        if current(&*self.store) != Some(self.id) {
            return Err(Error::Ancestor {
                id: self.id,
                path: self.path.clone(),
                what: "is not there".into(),
                source: None,
            });
        }
        if self.is_freed {
            return Ok(claim);
        }
        let raw = RawManifest::read(&*self.store)?;
        let mut message = Manifest::decode(raw.section(MESSAGE)).expect("it was read before");
        message.features.push(FREED_FEATURE.into());
        message.freed_by = by.0.to_vec();
        let message = message.encode_to_vec();
        let [spaces, index, chunks] = [SPACES, INDEX, CHUNKS].map(|one| raw.section(one));
        let sections = [spaces, index, chunks, &message, raw.section(RECORDS)];
        raw::replace(&*self.store, self.id, sections, durable)?;
        Ok(claim)
    }

    fn free(&self, holes: &[Ranges<u64>]) -> Result<u64> {
        let mut freed_bytes = 0;
        for (part, _) in self.parts().filter(|(part, _)| !holes[*part].is_empty()) {
            let name = self.id.pages_part_name(part);
            let freed = self.store.free(&name, &holes[part]);
            freed_bytes += freed.map_err(Error::store("free parts of"))?;
        }
        Ok(freed_bytes)
    }
}
