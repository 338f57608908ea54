//! Pages of stored runs: parts that become runs of their own, and others that are equal to them.

use std::ops::Range;

use crate::checksum;
use crate::parts;
use crate::reader::data_offset;
use crate::run::{PAGE_BYTES, Part};
use crate::{Error, Result, Run, RunKind, SpaceId, Writer};

impl Writer {
    /// Returns runs for parts of `stored`, a data run of this image: the pages `kept`, numbered
    /// from its first. `bytes` are all its pages, from [`Writer::read_back`]. The runs are for
    /// [`Writer::describe`] in place of `stored`; the other pages' room goes when the image is
    /// sealed.
    ///
    /// # Errors
    /// [`Error::Corrupt`] where the pages are no longer those that were stored.
    ///
    /// # Panics
    /// Where the run is not stored, has other pages than `bytes`, or not those of `kept`.
    pub fn cut(&self, stored: &Run, bytes: &[u8], kept: &[Range<u32>]) -> Result<Vec<Run>> {
        let RunKind::Data {
            offset_bytes,
            checksum,
        } = stored.kind
        else {
            panic!("{stored:?} is not stored");
        };
        assert_eq!(stored.len_bytes(), bytes.len() as u64, "all pages");
        if checksum::of_pages(bytes) != checksum {
            let (part, offset_bytes) = parts::split(offset_bytes);
            return Err(Error::Corrupt {
                file: self.id().pages_part_name(part),
                what: "these are not the pages that were written".into(),
                space: Some(stored.space),
                offset_bytes,
            });
        }
        Ok(kept
            .iter()
            .map(|pages| part_of(stored, pages, bytes))
            .collect())
    }

    /// Returns the run for pages that have the contents of pages of `stored`, one of those that
    /// [`Writer::store`] returned, after `skip_pages` of it; it is for [`Writer::describe`], and so
    /// is `stored`, or the image cannot be sealed.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    ///
    /// # Panics
    /// Where `stored` has no such pages.
    pub fn equal(
        &self,
        space: SpaceId,
        first_page: u64,
        pages: u32,
        stored: &Run,
        skip_pages: u32,
    ) -> Result<Run> {
        let RunKind::Data { offset_bytes, .. } = stored.kind else {
            panic!("{stored:?} is not stored");
        };
        assert!(skip_pages + pages <= stored.pages, "pages of the run");
        let origin = self.origin(parts::split(offset_bytes).0, stored);
        let origin = origin.ok_or(Error::TooLarge {
            of: "origins",
            limit: u64::from(u32::MAX),
        })?;
        Ok(Run {
            space,
            first_page,
            pages,
            kind: RunKind::Equal(Part { origin, skip_pages }),
        })
    }
}

/// The pages `pages` of a stored run, whose contents are `bytes`.
pub(crate) fn part_of(run: &Run, pages: &Range<u32>, bytes: &[u8]) -> Run {
    let place = |page: u32| page as usize * PAGE_BYTES;
    Run {
        space: run.space,
        first_page: run.first_page + u64::from(pages.start),
        pages: pages.end - pages.start,
        kind: RunKind::Data {
            offset_bytes: data_offset(run) + place(pages.start) as u64,
            checksum: checksum::of_pages(&bytes[place(pages.start)..place(pages.end)]),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use store::Memory;

    use super::*;
    use crate::{NewRun, Reader, Seal};

    const SPACE: SpaceId = SpaceId(1);

    fn stored(writer: &Writer, first_page: u64, fills: &[u8]) -> (Run, Vec<u8>) {
        let bytes: Vec<u8> = fills.iter().flat_map(|fill| [*fill; PAGE_BYTES]).collect();
        let run = NewRun {
            space: SPACE,
            first_page,
            pages: fills.len() as u32,
        };
        (writer.store(0, &bytes, &[run]).unwrap()[0], bytes)
    }

    #[test]
    fn parts_of_runs_stay_and_the_room_of_others_goes() {
        let store = Arc::new(Memory::default());
        let writer = Writer::create(store.clone()).unwrap();
        let (first, bytes) = stored(&writer, 10, &[1, 2, 3, 4]);
        let kept = writer.cut(&first, &bytes, &[0..1, 2..4]).unwrap();
        assert_eq!(kept.iter().map(|run| run.pages).sum::<u32>(), 3);
        let equal = writer.equal(SPACE, 11, 1, &kept[1], 1).unwrap();
        let (last, bytes) = stored(&writer, 20, &[5, 6, 7]);
        let last = writer
            .cut(&last, &bytes, std::slice::from_ref(&(0..1)))
            .unwrap();
        writer.describe(kept.into_iter().chain(last).chain([equal]));
        let id = writer.seal(Seal::default()).unwrap();

        let reader = Reader::open(&*store).unwrap();
        reader.verify_all(1).unwrap();
        assert_eq!(reader.features(), ["equal"]);
        let mut bytes = vec![0; 4 * PAGE_BYTES];
        reader.read_pages(SPACE, 10, &mut bytes).unwrap();
        let fills = bytes.chunks(PAGE_BYTES).map(|page| page[9]);
        assert_eq!(fills.collect::<Vec<_>>(), [1, 4, 3, 4]);
        // What is not needed is not there: the last has moved into its place.
        let object = store::Store::open(&*store, &id.pages_name()).unwrap();
        let mut bytes = vec![9; object.len_bytes() as usize];
        object.read_at(&mut bytes, 0).unwrap();
        let fills = bytes.chunks(PAGE_BYTES).map(|page| page[9]);
        assert_eq!(fills.collect::<Vec<_>>(), [1, 5, 3, 4]);
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
        let (run, mut bytes) = stored(&writer, 10, &[1, 2]);
        bytes[0] ^= 1;
        let error = writer.cut(&run, &bytes, std::slice::from_ref(&(1..2)));
        assert!(matches!(error, Err(Error::Corrupt { .. })), "{error:?}");
    }

    #[test]
    fn what_equal_pages_are_equal_to_is_part_of_the_image() {
        let store = Arc::new(Memory::default());
        let writer = Writer::create(store).unwrap();
        let (run, _) = stored(&writer, 10, &[1, 2]);
        writer.describe([writer.equal(SPACE, 20, 1, &run, 1).unwrap()]);
        assert!(writer.seal(Seal::default()).is_err());
    }
}
