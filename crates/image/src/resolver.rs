//! The one way by which pages leave an image: locate, fetch, verify, decode.
//!
//! [`Reader::locate`] tells which pages of which chunk some pages are. [`Reader::load`] is for
//! those who want many: it fetches chunks that follow each other with one read, verifies each, and
//! decodes it to its place. [`Reader::read_pages`] is for those who want a few: chunks of which
//! only parts are wanted stay in a [`Cache`] of bounded size. [`Reader::straight`] tells who can
//! read a file by himself where pages lie in one as they are; whoever does has them verified by
//! [`Reader::verify_rest`].

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use store::Object;

use crate::ancestors::Ancestors;
use crate::cache::{self, Cache};
use crate::checksum;
use crate::chunk::{Chunk, ChunkId};
use crate::parts;
use crate::run::{Location, PAGE_BYTES, Part};
use crate::{Error, Reader, Result, SpaceId};

/// How many stored bytes are fetched with one read, at most.
const FETCH_BYTES: u64 = 4 << 20;

/// Extent of uncompressed pages in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawExtent {
    /// The number of the file: see [`Reader::file`].
    pub file: u32,
    /// Their offset there.
    pub offset_bytes: u64,
}

/// Chunks that follow each other where they are stored, and are fetched with one read.
fn follows(one: &Chunk, next: &Chunk) -> bool {
    one.end() == next.position()
}

impl Reader {
    /// Has chunks of which parts are read kept in `cache`, which other readers may have as well.
    #[must_use]
    pub fn with_cache(self, cache: Arc<Cache>) -> Self {
        // Nobody has read anything yet, or else the cache that there is stays.
        let _ = self.places.cache.set(cache);
        self
    }

    pub(crate) fn chunk(&self, chunk: ChunkId) -> &Chunk {
        &self.places.chunks[chunk.0 as usize]
    }

    /// Returns how many pages a chunk has.
    pub fn chunk_pages(&self, chunk: ChunkId) -> u32 {
        self.chunk(chunk).pages
    }

    /// Refuses an image of which pages were freed.
    pub(crate) fn check_freed(&self) -> Result<()> {
        let freed = self.places.freed_by;
        let freed = freed.map(|by| Error::Freed { id: self.id, by });
        freed.map_or(Ok(()), Err)
    }

    /// Tells where pages of a chunk are stored as they are, in a file or elsewhere; none where they
    /// are encoded.
    pub fn stored_at(&self, part: Part) -> Option<RawExtent> {
        let chunk = self.chunk(part.chunk);
        let skip_bytes = u64::from(part.skip_pages) * PAGE_BYTES as u64;
        chunk.is_plain().then_some(RawExtent {
            file: chunk.object,
            offset_bytes: chunk.offset_bytes + skip_bytes,
        })
    }

    /// Tells where pages of a chunk lie in a file as they are; none where they are encoded, or the
    /// image is in no file. Who reads them there by himself has them verified by
    /// [`Reader::verify_rest`].
    pub fn straight(&self, part: Part) -> Option<RawExtent> {
        let object = self.chunk(part.chunk).object as usize;
        let is_file = match self.places.own.get(object) {
            Some(Some(object)) => object.as_fd().is_some(),
            // An ancestor's, or that of an image that is not sealed yet.
            _ => self.places.ancestors.are_files(),
        };
        self.stored_at(part).filter(|_| is_file)
    }

    /// Returns the pages object with this number.
    ///
    /// # Errors
    /// Those of [`Reader::load`].
    pub fn file(&self, number: u32) -> Result<&dyn Object> {
        self.object(number as usize)
    }

    /// Names the pages object with this number, as errors do.
    pub fn file_name(&self, number: u32) -> String {
        match parts::owner(number as usize) {
            (Some(ancestor), part) => self.places.ancestors.name(ancestor, part),
            (None, part) => self.id.pages_part_name(part),
        }
    }

    /// Fetches, verifies and decodes the chunks of `wanted` to where it says in `bytes`: in the
    /// order in which they are stored, each once. Those that follow each other in both take one
    /// read.
    ///
    /// # Errors
    /// [`Error::Corrupt`], [`Error::Ancestor`], [`Error::Freed`], [`Error::Store`].
    ///
    /// # Panics
    /// Where `bytes` have no room for a chunk.
    pub fn load(&self, wanted: &[(ChunkId, usize)], bytes: &mut [u8]) -> Result<()> {
        let mut scratch = Vec::new();
        let mut rest = wanted;
        while let Some(&(first, at)) = rest.first() {
            let group = self.group(rest);
            let object = self.object(self.chunk(first).object as usize)?;
            if self.chunk(first).is_plain() && object.as_fd().is_some() {
                let bytes = &mut bytes[at..at + self.stored_bytes(group)];
                self.fetch(&mut [(first, bytes)])?;
                self.verify(group.iter().map(|one| one.0), bytes)?;
                rest = &rest[group.len()..];
                continue;
            }
            // What is far away is asked for at once, as far as it is in one object.
            let mut groups = vec![group];
            let mut fetched = self.stored_bytes(group);
            rest = &rest[group.len()..];
            while let Some(&(next, _)) = rest.first().filter(|_| object.as_fd().is_none()) {
                let group = self.group(rest);
                let more = self.stored_bytes(group);
                let is_there = self.chunk(next).object == self.chunk(first).object;
                if !is_there || (fetched + more) as u64 > FETCH_BYTES {
                    break;
                }
                groups.push(group);
                fetched += more;
                rest = &rest[group.len()..];
            }
            scratch.resize(fetched, 0);
            self.load_groups(&groups, &mut scratch, bytes)?;
        }
        Ok(())
    }

    /// Fetches groups of one object into `scratch`, and decodes their chunks to their places.
    fn load_groups(
        &self,
        groups: &[&[(ChunkId, usize)]],
        scratch: &mut [u8],
        bytes: &mut [u8],
    ) -> Result<()> {
        let mut room = &mut scratch[..];
        let mut ranges = Vec::with_capacity(groups.len());
        for group in groups {
            let (own, more) = room.split_at_mut(self.stored_bytes(group));
            ranges.push((group[0].0, own));
            room = more;
        }
        self.fetch(&mut ranges)?;
        let all = || groups.iter().copied().flatten();
        self.verify(all().map(|one| one.0), scratch)?;
        let mut stored = &scratch[..];
        for (id, at) in all() {
            let chunk = self.chunk(*id);
            let (own, after) = stored.split_at(chunk.stored_bytes as usize);
            stored = after;
            self.decode(*id, own, &mut bytes[*at..*at + chunk.len_bytes()])?;
        }
        Ok(())
    }

    /// The first chunks of `wanted` that take one read: they follow each other where they are
    /// stored, and, if they are stored as they are, where they go.
    fn group<'a>(&self, wanted: &'a [(ChunkId, usize)]) -> &'a [(ChunkId, usize)] {
        let chunk = self.chunk(wanted[0].0);
        let mut stored_bytes = u64::from(chunk.stored_bytes);
        let pairs = wanted.windows(2).take_while(|pair| {
            let [one, next] = [pair[0], pair[1]].map(|(id, _)| self.chunk(id));
            let together = !chunk.is_plain() || pair[1].1 == pair[0].1 + one.len_bytes();
            stored_bytes += u64::from(next.stored_bytes);
            let is_alike = next.is_plain() == chunk.is_plain();
            is_alike && together && follows(one, next) && stored_bytes <= FETCH_BYTES
        });
        &wanted[..1 + pairs.count()]
    }

    /// How much is stored of these chunks.
    fn stored_bytes(&self, chunks: &[(ChunkId, usize)]) -> usize {
        let chunks = chunks.iter();
        chunks
            .map(|(id, _)| self.chunk(*id).stored_bytes as usize)
            .sum()
    }

    /// Fills the bytes of each with what is stored from where the chunk begins, all in one object.
    fn fetch(&self, wanted: &mut [(ChunkId, &mut [u8])]) -> Result<()> {
        let first = wanted[0].0;
        let object = self.object(self.chunk(first).object as usize)?;
        let ranges = wanted.iter_mut();
        let ranges = ranges.map(|(id, bytes)| (self.chunk(*id).offset_bytes, &mut **bytes));
        match object.read_ranges(&mut ranges.collect::<Vec<_>>()) {
            Err(store::Error::Short {
                end_bytes,
                len_bytes,
                ..
            }) => {
                let what = "it ends here, before its last page".to_owned();
                let ends = |id: ChunkId| self.chunk(id).offset_bytes < end_bytes;
                let short = wanted.iter().map(|one| one.0).rfind(|id| ends(*id));
                Err(self.corrupt_chunk(short.unwrap_or(first), len_bytes, what))
            }
            result => result.map_err(Error::store("read pages of")),
        }
    }

    /// Verifies chunks, which are stored as `bytes` one behind the other.
    pub(crate) fn verify(&self, chunks: impl Iterator<Item = ChunkId>, bytes: &[u8]) -> Result<()> {
        let sum = checksum::of_many(bytes.len());
        let mut rest = bytes;
        for id in chunks {
            let chunk = self.chunk(id);
            let (own, after) = rest.split_at(chunk.stored_bytes as usize);
            rest = after;
            if sum(own) != chunk.checksum {
                return Err(self.damaged(id, own));
            }
            let number = u64::from(id.0);
            self.places.verified.insert(number..number + 1);
        }
        Ok(())
    }

    pub(crate) fn is_verified(&self, id: ChunkId) -> bool {
        self.places.verified.contains(u64::from(id.0))
    }

    /// Decodes the stored bytes of a chunk.
    fn decode(&self, id: ChunkId, stored: &[u8], pages: &mut [u8]) -> Result<()> {
        let chunk = self.chunk(id);
        chunk.codec.decode(stored, pages).map_err(|what| {
            let what = format!("its {} pages cannot be decoded: {what}", chunk.pages);
            self.corrupt_chunk(id, chunk.offset_bytes, what)
        })
    }

    /// Reads the pages from `first_page` of `space` on until `bytes` is full, wherever they are,
    /// verified. Chunks of which only parts are wanted are kept for the next who wants others.
    ///
    /// # Errors
    /// [`Error::NoPage`], [`Error::Corrupt`], [`Error::Ancestor`], [`Error::Freed`],
    /// [`Error::Store`].
    ///
    /// # Panics
    /// Where `bytes` is not a whole number of pages.
    pub fn read_pages(&self, space: SpaceId, first_page: u64, bytes: &mut [u8]) -> Result<()> {
        assert!(bytes.len().is_multiple_of(PAGE_BYTES), "whole pages");
        self.check_freed()?;
        let (mut page, mut at) = (first_page, 0);
        let mut whole = Vec::new();
        let mut twice = false;
        while at < bytes.len() {
            let wanted = ((bytes.len() - at) / PAGE_BYTES) as u64;
            let Location { part, pages } = self.locate(space, page, wanted)?;
            let end = at + pages as usize * PAGE_BYTES;
            match part {
                None => bytes[at..end].fill(0),
                Some(part) if pages == self.chunk_pages(part.chunk) => {
                    whole.push((part.chunk, at));
                }
                Some(part) => {
                    let start = part.skip_pages as usize * PAGE_BYTES;
                    let chunk = self.read_chunk(part.chunk)?;
                    bytes[at..end].copy_from_slice(&chunk[start..start + end - at]);
                }
            }
            page += u64::from(pages);
            at = end;
        }
        whole.sort_unstable();
        // The same chunk in several places.
        for pair in whole.windows(2).filter(|pair| pair[0].0 == pair[1].0) {
            twice = true;
            let chunk = self.read_chunk(pair[1].0)?;
            bytes[pair[1].1..pair[1].1 + chunk.len()].copy_from_slice(&chunk);
        }
        if twice {
            whole.dedup_by_key(|one| one.0);
        }
        self.load(&whole, bytes)
    }

    /// Returns the pages of a chunk, verified: those that are kept, or else fetched, and others
    /// behind it for somebody who reads one after the other.
    ///
    /// # Errors
    /// Those of [`Reader::load`].
    pub fn read_chunk(&self, id: ChunkId) -> Result<Arc<[u8]>> {
        self.check_freed()?;
        let cache = self.places.cache();
        cache.get_or_load(self.key(id), || {
            let first = id.0;
            let more = self.places.ahead_of(id);
            let all = self.places.chunks.get(first as usize..);
            let pairs = all.unwrap_or_default().windows(2).take(more as usize);
            let more = pairs.take_while(|pair| follows(&pair[0], &pair[1])).count() as u32;
            let mut len = 0;
            let mut wanted = Vec::with_capacity(more as usize + 1);
            for number in first..=first + more {
                wanted.push((ChunkId(number), len));
                len += self.chunk(ChunkId(number)).len_bytes();
            }
            let mut bytes = vec![0; len];
            self.load(&wanted, &mut bytes)?;
            self.places.next.store(first + more + 1, Relaxed);
            for (id, at) in &wanted[1..] {
                let pages = &bytes[*at..*at + self.chunk(*id).len_bytes()];
                cache.put(self.key(*id), pages.into());
            }
            Ok(bytes[..self.chunk(id).len_bytes()].into())
        })
    }

    /// Identity of a chunk among those of all images.
    fn key(&self, id: ChunkId) -> cache::Key {
        let chunk = self.chunk(id);
        let (owner, part) = parts::owner(chunk.object as usize);
        let image = owner.map_or(self.id, |number| self.ancestors()[number].id);
        cache::Key {
            image,
            position: parts::position(part, chunk.offset_bytes),
            stored_bytes: chunk.stored_bytes,
        }
    }

    /// Returns a pages object.
    fn object(&self, number: usize) -> Result<&dyn Object> {
        self.check_freed()?;
        match parts::owner(number) {
            (Some(ancestor), part) => self.places.ancestors.object(ancestor, part),
            (None, part) => match self.places.own.get(part) {
                Some(Some(pages)) => Ok(&**pages),
                _ => Err(Error::Corrupt {
                    file: self.file_name(number as u32),
                    what: "the image has no pages".into(),
                    space: None,
                    offset_bytes: 0,
                }),
            },
        }
    }

    /// Says why stored bytes are not those of a chunk: they may have been freed in another image.
    fn damaged(&self, id: ChunkId, bytes: &[u8]) -> Error {
        let chunk = self.chunk(id);
        let mut pages = bytes.chunks(PAGE_BYTES);
        if let (Some(ancestor), _) = parts::owner(chunk.object as usize)
            && pages.any(|page| page.iter().all(|byte| *byte == 0))
            && let Err(freed) = check_freed(&self.places.ancestors, ancestor)
        {
            return freed;
        }
        let what = format!("the checksum of {} pages does not match", chunk.pages);
        self.corrupt_chunk(id, chunk.offset_bytes, what)
    }

    /// Names the first space that has pages of a chunk.
    fn corrupt_chunk(&self, id: ChunkId, offset_bytes: u64, what: String) -> Error {
        let has = |part: Part| part.chunk == id;
        let run = self.index.runs().find(|run| run.part().is_some_and(has));
        let from = |page: u64| format!(" (from page {page:#x} of the space on)");
        let from = run.map_or(String::new(), |run| from(run.first_page));
        Error::Corrupt {
            file: self.file_name(self.chunk(id).object),
            what: what + &from,
            space: run.map(|run| run.space),
            offset_bytes,
        }
    }
}

/// Refuses an ancestor of which pages were freed, as far as that can be known.
fn check_freed(ancestors: &Ancestors, ancestor: usize) -> Result<()> {
    let id = ancestors.all()[ancestor].id;
    let place = ancestors.place(ancestor).ok();
    match place.and_then(|store| Reader::open(&**store).ok()) {
        Some(older) if older.id() == id => older.check_freed(),
        _ => Ok(()),
    }
}
