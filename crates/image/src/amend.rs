//! Changing the records of an image that is there.

use prost::Message;
use store::Store;

use crate::draft::check_len;
use crate::manifest::{self, Manifest, RECORDS_MAX};
use crate::raw::{self, CHUNKS, INDEX, MESSAGE, RECORDS, RawManifest, SPACES, corrupt_manifest};
use crate::{Error, ImageId, Record, Result};

/// Puts what `change` makes of the records of image `id` in their place. Everything else of the
/// image stays, and so does its identity; it is whole at any moment, with the old records or the
/// new ones.
///
/// # Errors
/// [`Error::NoImage`] where another image is there by now; [`Error::Corrupt`], [`Error::TooLarge`],
/// [`Error::Store`].
pub fn amend(
    store: &dyn Store,
    id: ImageId,
    durable: bool,
    change: impl FnOnce(Vec<Record>) -> Vec<Record>,
) -> Result<()> {
    let _claim = store.claim().map_err(Error::store("claim the place of"))?;
    let raw = RawManifest::read(store)?;
    if raw.id != id {
        let what = format!("it is the manifest of image {}, not of {id}", raw.id);
        return Err(corrupt_manifest(0, what));
    }
    let start = raw.sections[MESSAGE].start;
    let message = Manifest::decode(raw.section(MESSAGE));
    let mut message = message.map_err(|error| corrupt_manifest(start, error.to_string()))?;
    let start = raw.sections[RECORDS].start;
    let records = manifest::decode_records(raw.section(RECORDS), message.records);
    let records = change(records.map_err(|(at, what)| corrupt_manifest(start + at, what))?);
    check_len("records", records.len() as u64, RECORDS_MAX as u64)?;
    message.records = records.len() as u64;
    let (message, records) = (message.encode_to_vec(), manifest::encode_records(records));
    let [spaces, index, chunks] = [SPACES, INDEX, CHUNKS].map(|one| raw.section(one));
    let sections = [spaces, index, chunks, &message, &records];
    raw::replace(store, id, sections, durable)
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use store::Memory;

    use super::*;
    use crate::{NewRun, PAGE_BYTES, Reader, Seal, SpaceId, Writer};

    #[test]
    fn records_change_and_pages_stay() {
        let store = Arc::new(Memory::default());
        let writer = Writer::create(store.clone()).expect("a writer");
        let run = NewRun {
            space: SpaceId(1),
            first_page: 3,
            pages: 1,
        };
        writer.append(&[7; PAGE_BYTES], &[run]).expect("stored");
        let record = |id: u32| Record {
            tag: 9,
            version: 1,
            id,
            payload: vec![1; 100],
        };
        writer.record(record(1));
        let id = writer.seal(Seal::default()).expect("sealed");
        let add = |mut records: Vec<Record>| {
            records.push(record(2));
            records
        };
        amend(&*store, id, false, add).expect("amended");
        let reader = Reader::open(&*store).expect("an image");
        assert_eq!(
            (reader.id(), reader.records()),
            (id, &[record(1), record(2)][..])
        );
        let mut page = [0; PAGE_BYTES];
        reader.read_pages(SpaceId(1), 3, &mut page).expect("read");
        assert_eq!(page, [7; PAGE_BYTES]);
        amend(&*store, id, false, |_| Vec::new()).expect("amended");
        assert_eq!(Reader::open(&*store).expect("an image").records(), []);
        let other = ImageId([1; 16]);
        assert!(amend(&*store, other, false, |records| records).is_err());
    }
}
