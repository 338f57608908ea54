//! What was read of a file system's own blocks, so that it need not be read again while its users
//! wait: it is enough to see that it is the same.
//!
//! The kernel has bitmaps, tables of inodes, descriptors and superblocks in the device's cache, and
//! nowhere else; so does a survey read them. Bytes with the same checksum of 128 bits there are
//! those that were read before, whatever they were in between.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use abi::bits::Bits;
use image::PAGE_BYTES;
use pages::{Extent, Source};
use xxhash_rust::xxh3::xxh3_128;

use crate::dump::extents;
use crate::source::Blocks;
use crate::survey::{Survey, pages_of};

/// How much is looked at together.
const STEP_PAGES: u64 = 256;

/// Checksums of pages with nothing but blocks of the file system's own, as they were read last.
#[derive(Default)]
pub struct PageSums {
    pages: Bits,
    sums: Mutex<HashMap<u64, u128>>,
}

impl PageSums {
    /// Notes pages of what is in use at this survey, and no others, from now on.
    pub fn watch(&mut self, survey: &Survey, block_bytes: u32) {
        self.pages = own_pages(survey, block_bytes);
    }

    /// Notes what was read.
    pub fn note(&self, extents: &[Extent], bytes: &[u8]) {
        let pages = extents.iter().flat_map(Extent::numbers);
        let pages = pages.zip(bytes.chunks_exact(PAGE_BYTES));
        let own = pages.filter(|(page, _)| self.pages.contains(*page));
        let sums = own.map(|(page, bytes)| (page, xxh3_128(bytes)));
        let sums = sums.collect::<Vec<_>>();
        if !sums.is_empty() {
            let mut all = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
            all.extend(sums);
        }
    }

    /// Those of `pages` that are now what was read of them last, of a file system in which nothing
    /// changes; `cached` are its blocks by the device's cache.
    pub fn still(&self, pages: &Bits, survey: &Survey, cached: &Blocks<'_>) -> Bits {
        let sums = self.sums.lock().unwrap_or_else(PoisonError::into_inner);
        let mut doubted = own_pages(survey, cached.block_bytes);
        doubted.intersect(pages);
        let mut still = Bits::default();
        let mut buffer = vec![0; STEP_PAGES as usize * PAGE_BYTES];
        for extent in extents(&doubted, cached.space) {
            for first in extent.numbers().step_by(STEP_PAGES as usize) {
                let numbers = first..extent.numbers().end.min(first + STEP_PAGES);
                let mut part = Bits::default();
                part.insert(numbers.clone());
                let bytes = &mut buffer[..(numbers.end - first) as usize * PAGE_BYTES];
                // What cannot be read here is read again, and says why.
                if cached.read(&extents(&part, cached.space), bytes).is_err() {
                    continue;
                }
                for (page, bytes) in numbers.zip(bytes.chunks_exact(PAGE_BYTES)) {
                    if sums.get(&page) == Some(&xxh3_128(bytes)) {
                        still.insert(page..page + 1);
                    }
                }
            }
        }
        still
    }
}

/// Pages of which all that is in use are blocks of the file system's own.
fn own_pages(survey: &Survey, block_bytes: u32) -> Bits {
    let mut others = survey.live.clone();
    others.subtract(&survey.system);
    let mut pages = pages_of(&survey.system, block_bytes);
    pages.subtract(&pages_of(&others, block_bytes));
    pages
}

#[cfg(test)]
mod tests {
    use testkit::volumes::{make, populate, run};

    use super::*;
    use crate::bad_pages::BadPages;
    use crate::ext4::{FileSystem, Time};
    use crate::pace::RateLimit;
    use crate::place::VOLUME;
    use crate::source::IoContext;
    use crate::tables::Pieces;

    /// Does `work` with a survey of the file system in a file, and its blocks.
    fn survey<T>(
        path: &std::path::Path,
        seen: Option<&PageSums>,
        work: impl FnOnce(&Survey, &Blocks<'_>) -> T,
    ) -> T {
        let fs = FileSystem::open(std::fs::read(path).unwrap()).unwrap();
        let instant = Time { s: 1, ns: 0 };
        let survey = Survey::new(&fs, instant, &[], &Pieces::default()).unwrap();
        let file = std::fs::File::open(path).unwrap();
        let blocks = Blocks {
            space: VOLUME,
            file: &file,
            live: &survey.live,
            block_bytes: fs.superblock().block_bytes,
            replayed: None,
            context: IoContext::Separate,
            pace: &RateLimit::new(None),
            bad: &BadPages::new(false),
            seen,
        };
        work(&survey, &blocks)
    }

    #[test]
    fn own_pages_are_still_what_they_were_or_differ() {
        for block_bytes in [1024, 4096] {
            let folder = tempfile::tempdir().unwrap();
            let (tree, file) = (folder.path().join("tree"), folder.path().join("fs"));
            std::fs::create_dir(&tree).unwrap();
            populate(&tree, false);
            make(&file, "64M", &["-b", &block_bytes.to_string()], Some(&tree));
            let mut seen = PageSums::default();
            survey(&file, None, |survey, _| seen.watch(survey, block_bytes));
            let all = survey(&file, Some(&seen), |survey, blocks| {
                let pages = pages_of(&survey.live, block_bytes);
                let mut bytes = vec![0; pages.count() as usize * PAGE_BYTES];
                blocks.read(&extents(&pages, VOLUME), &mut bytes).unwrap();
                pages
            });
            let own = survey(&file, None, |survey, _| own_pages(survey, block_bytes));
            assert!(own.count() > 10 && own.count() < all.count());
            let still = || {
                survey(&file, None, |survey, blocks| {
                    seen.still(&all, survey, blocks)
                })
            };
            assert_eq!(still(), own);
            // Of pages that nobody asks for, nothing is said.
            let none = Bits::default();
            let asked = survey(&file, None, |survey, blocks| {
                seen.still(&none, survey, blocks)
            });
            assert_eq!(asked, none);
            let before = std::fs::read(&file).unwrap();
            let name = file.to_str().unwrap();
            run(
                "debugfs",
                &["-w", "-R", "set_inode_field tiny mtime 12345", name],
            );
            run("debugfs", &["-w", "-R", "rm odd", name]);
            let after = std::fs::read(&file).unwrap();
            let differs = |page: u64| {
                let range = page as usize * PAGE_BYTES..(page as usize + 1) * PAGE_BYTES;
                before[range.clone()] != after[range]
            };
            let mut same = Bits::default();
            let count = own.count();
            let own = own.ranges().into_iter().flatten();
            let kept = own.filter(|page| !differs(*page));
            kept.for_each(|page| same.insert(page..page + 1));
            assert_eq!(still(), same);
            assert!(same.count() > 0 && same.count() < count);
        }
    }
}
