//! How a writer stores pages: cut into chunks, each with its checksum.

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::Ordering::Relaxed;

use crate::checksum;
use crate::chunk::{CHUNK_PAGES, Chunk, ChunkId};
use crate::codec::Codec;
use crate::parts::{ENCODED_PARTS, PARTS_MAX};
use crate::run::{PAGE_BYTES, Part};
use crate::writer::lock;
use crate::{Compression, Error, NewRun, Result, Run, RunKind, SpaceId, Writer};

impl Writer {
    /// Stores `bytes`, the pages of `runs` back to back, with one write.
    ///
    /// # Errors
    /// [`Error::Store`]; then the image cannot be sealed any more. [`Error::TooLarge`].
    ///
    /// # Panics
    /// Where `bytes` are not as many as the runs' pages.
    pub fn append(&self, bytes: &[u8], runs: &[NewRun]) -> Result<()> {
        self.append_to(0, bytes, runs)
    }

    /// Like [`Writer::append`], into pages object `part`.
    ///
    /// File systems take the writes to one file one after the other. Threads that have much to
    /// write at once do it faster with an object each; all others should use one.
    ///
    /// # Errors
    /// Like [`Writer::append`].
    ///
    /// # Panics
    /// Like [`Writer::append`], and where `part` is not below [`PARTS_MAX`], or half of that in an
    /// image that is compressed.
    pub fn append_to(&self, part: usize, bytes: &[u8], runs: &[NewRun]) -> Result<()> {
        self.describe(self.store(part, bytes, runs)?);
        Ok(())
    }

    /// Like [`Writer::append_to`], but the image does not have the pages yet: it gets those of the
    /// returned runs, or of some of them, by [`Writer::describe`]. The room of the others goes when
    /// the image is sealed, as far as the store can give it back.
    ///
    /// The pages of each aligned block of [`CHUNK_PAGES`] of a space are a chunk, as far as they
    /// follow each other here.
    ///
    /// # Errors
    /// Like [`Writer::append`].
    ///
    /// # Panics
    /// Like [`Writer::append_to`].
    pub fn store(&self, part: usize, bytes: &[u8], runs: &[NewRun]) -> Result<Vec<Run>> {
        let pages: u64 = runs.iter().map(|run| u64::from(run.pages)).sum();
        assert_eq!(
            pages * PAGE_BYTES as u64,
            bytes.len() as u64,
            "each page has its bytes"
        );
        if bytes.is_empty() {
            return Ok(Vec::new());
        }
        let cut = ChunkLayout::new(runs);
        let chunks = match self.compression {
            None => self.store_plain(part, bytes, cut.ranges())?,
            Some(how) => self.store_encoded(part, bytes, &cut, how)?,
        };
        let first = lock(&self.table).add(&chunks)?;
        Ok(cut.runs(first))
    }

    /// Stores chunks, which follow each other, as they are.
    fn store_plain(
        &self,
        part: usize,
        bytes: &[u8],
        ranges: impl Iterator<Item = Range<usize>>,
    ) -> Result<Vec<Chunk>> {
        let start_bytes = self.give(part, bytes.len() as u64)?;
        let sum = checksum::of_many(bytes.len());
        let chunks = ranges.map(|range| Chunk {
            object: part as u32,
            stored_bytes: range.len() as u32,
            offset_bytes: start_bytes + range.start as u64,
            checksum: sum(&bytes[range.clone()]),
            pages: (range.len() / PAGE_BYTES) as u32,
            codec: Codec::None,
        });
        let chunks = chunks.collect::<Vec<_>>();
        self.write_stored(&chunks[0], bytes)?;
        Ok(chunks)
    }

    /// Stores chunks encoded, where that pays: those with one write, and the others as they are.
    fn store_encoded(
        &self,
        part: usize,
        bytes: &[u8],
        cut: &ChunkLayout,
        how: Compression,
    ) -> Result<Vec<Chunk>> {
        assert!(
            part < ENCODED_PARTS,
            "an object of its own for encoded chunks"
        );
        let mut chunks = with_scratch(bytes.len(), |scratch| {
            self.store_smaller(part + ENCODED_PARTS, bytes, cut, how, scratch)
        })?;
        let plain = cut.ranges().zip(&chunks);
        let plain = plain.filter_map(|(range, chunk)| chunk.is_plain().then_some(range));
        let plain = plain.collect::<Vec<_>>();
        let mut rest = chunks.iter_mut().filter(|chunk| chunk.is_plain());
        for near in plain.chunk_by(|one, next| one.end == next.start) {
            let start = near[0].start;
            let all = &bytes[start..near[near.len() - 1].end];
            let ranges = near.iter();
            let ranges = ranges.map(|range| range.start - start..range.end - start);
            let stored = self.store_plain(part, all, ranges)?;
            for (stored, chunk) in stored.into_iter().zip(&mut rest) {
                *chunk = stored;
            }
        }
        Ok(chunks)
    }

    /// Stores those chunks that are smaller when they are encoded, as which they come to stand in
    /// `scratch`; the others are given back as plain ones that are nowhere.
    fn store_smaller(
        &self,
        part: usize,
        bytes: &[u8],
        cut: &ChunkLayout,
        how: Compression,
        scratch: &mut [u8],
    ) -> Result<Vec<Chunk>> {
        let sum = checksum::of_many(bytes.len());
        let mut all_bytes = 0;
        let chunks = cut.ranges().map(|range| {
            let encoded = how.encode(&bytes[range.clone()], &mut scratch[all_bytes..]);
            let (codec, stored_bytes) = encoded.unwrap_or_default();
            let offset_bytes = all_bytes;
            all_bytes += stored_bytes;
            Chunk {
                object: part as u32,
                stored_bytes: stored_bytes as u32,
                offset_bytes: offset_bytes as u64,
                checksum: sum(&scratch[offset_bytes..all_bytes]),
                pages: (range.len() / PAGE_BYTES) as u32,
                codec,
            }
        });
        let mut chunks = chunks.collect::<Vec<_>>();
        if all_bytes > 0 {
            let start_bytes = self.give(part, all_bytes as u64)?;
            for chunk in &mut chunks {
                chunk.offset_bytes += start_bytes;
            }
            // Those before it are plain ones, which have no bytes here.
            self.write_stored(&chunks[0], &scratch[..all_bytes])?;
        }
        Ok(chunks)
    }

    /// Stores `bytes`, the pages of `runs`, in the place of a chunk that an earlier
    /// [`Writer::store`] made and that is not described, nor will be: it is that chunk now.
    ///
    /// # Errors
    /// Like [`Writer::append`].
    ///
    /// # Panics
    /// Where they are not the pages of one chunk.
    pub fn store_again(&self, id: ChunkId, bytes: &[u8], runs: &[NewRun]) -> Result<Vec<Run>> {
        let cut = ChunkLayout::new(runs);
        assert_eq!(cut.starts.len(), 1, "pages of one chunk");
        let old = lock(&self.table).get(id);
        let chunk = match self.store_in(&old, bytes)? {
            Some(chunk) => chunk,
            None => {
                let stored = self.store(old.object as usize % ENCODED_PARTS, bytes, runs)?;
                let part = stored[0].part().expect("it was just stored");
                lock(&self.table).get(part.chunk)
            }
        };
        lock(&self.table).set(id, chunk);
        Ok(cut.runs(id))
    }

    /// Stores pages where a chunk is, as that is stored; none where they do not fit there.
    pub(crate) fn store_in(&self, old: &Chunk, pages: &[u8]) -> Result<Option<Chunk>> {
        if old.is_plain() {
            return self.store_as(old, pages, Codec::None, pages);
        }
        with_scratch(pages.len(), |scratch| {
            let encoded = self.compression.and_then(|how| how.encode(pages, scratch));
            match encoded {
                Some((codec, len)) => self.store_as(old, pages, codec, &scratch[..len]),
                None => Ok(None),
            }
        })
    }

    /// Stores `stored` as the pages of a chunk, where it is; none where it does not fit there.
    fn store_as(
        &self,
        old: &Chunk,
        pages: &[u8],
        codec: Codec,
        stored: &[u8],
    ) -> Result<Option<Chunk>> {
        let chunk = Chunk {
            stored_bytes: stored.len() as u32,
            checksum: checksum::of_many(stored.len())(stored),
            pages: (pages.len() / PAGE_BYTES) as u32,
            codec,
            ..*old
        };
        if chunk.stored_bytes > old.stored_bytes {
            return Ok(None);
        }
        self.write_stored(&chunk, stored)?;
        Ok(Some(chunk))
    }

    /// Gives out room in pages object `part`: where it begins.
    fn give(&self, part: usize, bytes: u64) -> Result<u64> {
        match self.part(part) {
            Ok(part) => Ok(part.bytes.fetch_add(bytes, Relaxed)),
            Err(error) => {
                self.incomplete.store(true, Relaxed);
                Err(error)
            }
        }
    }

    /// How many bytes of the pages objects were given out.
    pub fn given_bytes(&self) -> u64 {
        let parts = self.parts.iter().filter_map(|part| part.get());
        parts.map(|part| part.bytes.load(Relaxed)).sum()
    }

    /// Writes what is stored from where `chunk` begins.
    pub(crate) fn write_stored(&self, chunk: &Chunk, bytes: &[u8]) -> Result<()> {
        let part = self.parts[chunk.object as usize].get();
        let part = part.expect("room in an object");
        let written = part.object.write_at(bytes, chunk.offset_bytes);
        written.map_err(|source| {
            self.incomplete.store(true, Relaxed);
            Error::store("write pages of")(source)
        })
    }

    /// Reads what is stored as `chunk`.
    pub(crate) fn read_stored(&self, chunk: &Chunk, bytes: &mut [u8]) -> Result<()> {
        let part = self.parts[chunk.object as usize].get();
        let part = part.expect("an object with a chunk");
        let read = part.object.read_at(bytes, chunk.offset_bytes);
        read.map_err(Error::store("read pages of"))
    }

    /// Reads the pages of a chunk, and verifies them.
    pub(crate) fn read_chunk(&self, chunk: &Chunk, pages: &mut [u8]) -> Result<()> {
        let mut stored = vec![0; chunk.stored_bytes as usize];
        self.read_stored(chunk, &mut stored)?;
        let corrupt = |what: String| Error::Corrupt {
            file: self.id().pages_part_name(chunk.object as usize),
            what,
            space: None,
            offset_bytes: chunk.offset_bytes,
        };
        if checksum::of_many(stored.len())(&stored) != chunk.checksum {
            let what = "these are not the pages that were written".to_owned();
            return Err(corrupt(what));
        }
        chunk.codec.decode(&stored, pages).map_err(corrupt)
    }

    /// Reads pages of a run that [`Writer::store`] has stored, after `skip_pages` of it, until
    /// `bytes` is full.
    ///
    /// # Errors
    /// [`Error::Store`], [`Error::Corrupt`].
    ///
    /// # Panics
    /// Where the run is none of those.
    pub fn read_back(&self, run: &Run, skip_pages: u32, bytes: &mut [u8]) -> Result<()> {
        let part = run.part().expect("pages that are stored").after(skip_pages);
        let chunk = lock(&self.table).get(part.chunk);
        assert!(
            (chunk.object as usize) < PARTS_MAX,
            "pages that this image stores"
        );
        let start = part.skip_pages as usize * PAGE_BYTES;
        if chunk.is_plain() {
            let offset_bytes = chunk.offset_bytes + start as u64;
            let from = Chunk {
                offset_bytes,
                ..chunk
            };
            return self.read_stored(&from, bytes);
        }
        let mut pages = vec![0; chunk.len_bytes()];
        self.read_chunk(&chunk, &mut pages)?;
        bytes.copy_from_slice(&pages[start..start + bytes.len()]);
        Ok(())
    }
}

thread_local! {
    static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
}

/// Calls `f` with so much memory of this thread's, which is kept for the next call.
fn with_scratch<T>(len: usize, f: impl FnOnce(&mut [u8]) -> T) -> T {
    SCRATCH.with_borrow_mut(|scratch| {
        if scratch.len() < len {
            scratch.resize(len, 0);
        }
        f(&mut scratch[..len])
    })
}

/// Pages in a buffer as they are cut into chunks.
struct ChunkLayout {
    /// Consecutive pages of one chunk, with the chunk's number here and what comes before in it.
    pieces: Vec<(NewRun, u32, u32)>,
    /// The page of the buffer at which each chunk begins.
    starts: Vec<usize>,
    /// How many pages there are.
    pages: usize,
}

impl ChunkLayout {
    fn new(runs: &[NewRun]) -> Self {
        let mut cut = Self {
            pieces: Vec::with_capacity(runs.len()),
            starts: Vec::new(),
            pages: 0,
        };
        let mut block: Option<(SpaceId, u64)> = None;
        for run in runs {
            let mut done = 0;
            while done < run.pages {
                let first_page = run.first_page.saturating_add(u64::from(done));
                let to_boundary = CHUNK_PAGES - (first_page % u64::from(CHUNK_PAGES)) as u32;
                let pages = to_boundary.min(run.pages - done);
                let own = (run.space, first_page / u64::from(CHUNK_PAGES));
                let before = cut.starts.last().map_or(0, |start| cut.pages - start) as u32;
                if block.replace(own) != Some(own) || before + pages > CHUNK_PAGES {
                    cut.starts.push(cut.pages);
                }
                let chunk = cut.starts.len() - 1;
                let skip_pages = cut.pages - cut.starts[chunk];
                let piece = NewRun {
                    space: run.space,
                    first_page,
                    pages,
                };
                cut.pieces.push((piece, chunk as u32, skip_pages as u32));
                cut.pages += pages as usize;
                done += pages;
            }
        }
        cut
    }

    /// The bytes of each chunk.
    fn ranges(&self) -> impl Iterator<Item = Range<usize>> + '_ {
        let ends = self.starts[1..].iter().copied().chain([self.pages]);
        let ranges = self.starts.iter().zip(ends);
        ranges.map(|(start, end)| start * PAGE_BYTES..end * PAGE_BYTES)
    }

    /// The runs, if the first of the chunks has this number.
    fn runs(&self, first: ChunkId) -> Vec<Run> {
        let runs = self.pieces.iter().map(|(piece, chunk, skip_pages)| Run {
            space: piece.space,
            first_page: piece.first_page,
            pages: piece.pages,
            kind: RunKind::Part(Part {
                chunk: ChunkId(first.0 + chunk),
                skip_pages: *skip_pages,
            }),
        });
        runs.collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use store::Memory;

    use super::*;
    use crate::{Reader, Seal};

    const SPACE: SpaceId = SpaceId(1);

    fn new_run(space: u32, first_page: u64, pages: u32) -> NewRun {
        NewRun {
            space: SpaceId(space),
            first_page,
            pages,
        }
    }

    fn stored(writer: &Writer, first_page: u64, fills: &[u8]) -> Run {
        let bytes: Vec<u8> = fills.iter().flat_map(|fill| [*fill; PAGE_BYTES]).collect();
        let run = new_run(SPACE.0, first_page, fills.len() as u32);
        writer.store(0, &bytes, &[run]).unwrap()[0]
    }

    #[test]
    fn pages_of_a_block_are_a_chunk() {
        let runs = [
            new_run(1, 14, 20),
            new_run(1, 36, 1),
            new_run(1, 47, 2),
            new_run(2, 48, 1),
            new_run(2, 50, 1),
        ];
        let cut = ChunkLayout::new(&runs);
        assert_eq!(cut.starts, [0, 2, 18, 22, 23]);
        let runs = cut.runs(ChunkId(5));
        let places = runs.iter().map(|run| {
            let part = run.part().unwrap();
            (run.first_page, run.pages, part.chunk.0, part.skip_pages)
        });
        let expected = [
            (14, 2, 5, 0),
            (16, 16, 6, 0),
            (32, 2, 7, 0),
            (36, 1, 7, 2),
            (47, 1, 7, 3),
            (48, 1, 8, 0),
            (48, 1, 9, 0),
            (50, 1, 9, 1),
        ];
        assert_eq!(places.collect::<Vec<_>>(), expected);
        assert_eq!(cut.ranges().last(), Some(23 * PAGE_BYTES..25 * PAGE_BYTES));
    }

    #[test]
    fn pages_that_nobody_has_leave_their_chunks() {
        let store = Arc::new(Memory::default());
        let writer = Writer::create(store.clone()).unwrap();
        let first = stored(&writer, 0, &[1, 2, 3, 4]);
        let last = stored(&writer, 16, &[5, 6, 7]);
        let equal = first.equal(SPACE, 1, 1, 3);
        writer.describe([first.cut(0, 1), equal, first.cut(2, 2), last.cut(0, 1)]);
        let id = writer.seal(Seal::default()).unwrap();
        let reader = Reader::open(&*store).unwrap();
        reader.verify_all(1).unwrap();
        assert_eq!(reader.features(), ["equal"]);
        let mut bytes = vec![0; 4 * PAGE_BYTES];
        reader.read_pages(SPACE, 0, &mut bytes).unwrap();
        let fills = bytes.chunks(PAGE_BYTES).map(|page| page[9]);
        assert_eq!(fills.collect::<Vec<_>>(), [1, 4, 3, 4]);
        reader
            .read_pages(SPACE, 16, &mut bytes[..PAGE_BYTES])
            .unwrap();
        assert_eq!(bytes[9], 5);
        // What is not needed is not there: the last has moved behind the others.
        let object = store::Store::open(&*store, &id.pages_name()).unwrap();
        let mut bytes = vec![9; object.len_bytes() as usize];
        object.read_at(&mut bytes, 0).unwrap();
        let fills = bytes.chunks(PAGE_BYTES).map(|page| page[9]);
        assert_eq!(fills.collect::<Vec<_>>(), [1, 3, 4, 5]);
    }

    #[test]
    fn pages_objects_without_pages_are_not_there() {
        let store = Arc::new(Memory::default());
        let writer = Writer::create(store.clone()).unwrap();
        stored(&writer, 10, &[1, 2, 3, 4]);
        writer.seal(Seal::default()).unwrap();
        assert_eq!(store::Store::list(&*store).unwrap(), [crate::MANIFEST_NAME]);
        assert_eq!(Reader::open(&*store).unwrap().features().len(), 0);
    }

    #[test]
    fn damaged_pages_get_no_new_checksum() {
        let store = Arc::new(Memory::default());
        let writer = Writer::create(store).unwrap();
        let run = stored(&writer, 10, &[1, 2]);
        let chunk = lock(&writer.table).get(run.part().unwrap().chunk);
        writer.write_stored(&chunk, &[9]).unwrap();
        writer.describe([run.cut(1, 1)]);
        let error = writer.seal(Seal::default());
        assert!(matches!(error, Err(Error::Corrupt { .. })), "{error:?}");
    }

    #[test]
    fn equal_pages_keep_the_chunk_that_has_them() {
        let store = Arc::new(Memory::default());
        let writer = Writer::create(store.clone()).unwrap();
        let run = stored(&writer, 10, &[1, 2]);
        writer.describe([run.equal(SPACE, 20, 1, 1)]);
        writer.seal(Seal::default()).unwrap();
        let mut page = [0; PAGE_BYTES];
        let reader = Reader::open(&*store).unwrap();
        reader.read_pages(SPACE, 20, &mut page).unwrap();
        assert_eq!(page, [2; PAGE_BYTES]);
    }
}
