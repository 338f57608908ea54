//! The record of an image of a volume.

use std::ops::Range;

use image::{PAGE_BYTES, Reader, Record};
use prost::Message;

use crate::ext4::Time;
use crate::{Error, Result};

/// Record numbers of this crate.
pub(crate) mod tag {
    /// [`super::VolumeState`], one an image.
    pub const VOLUME_STATE: u16 = 500;
}

/// What a volume was when it was saved.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct VolumeState {
    /// Its length in bytes: that of the file system.
    #[prost(uint64, tag = "1")]
    pub len_bytes: u64,
    /// The file system's identity.
    #[prost(bytes = "vec", tag = "2")]
    pub uuid: Vec<u8>,
    /// The instant of which the image is, in seconds since 1970.
    #[prost(sint64, tag = "3")]
    pub instant_s: i64,
    /// And nanoseconds.
    #[prost(uint32, tag = "4")]
    pub instant_ns: u32,
    /// Whether it was in use.
    #[prost(bool, tag = "5")]
    pub was_mounted: bool,
    /// Pages that could not be read and are zero here: the first of each range, and how many.
    #[prost(uint64, repeated, tag = "6")]
    pub bad_pages: Vec<u64>,
}

/// The same, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    pub len_bytes: u64,
    pub uuid: [u8; 16],
    pub instant: Time,
    pub was_mounted: bool,
    pub bad_pages: Vec<Range<u64>>,
}

impl State {
    /// The record of it.
    pub fn record(&self) -> Record {
        let message = VolumeState {
            len_bytes: self.len_bytes,
            uuid: self.uuid.to_vec(),
            instant_s: self.instant.s,
            instant_ns: self.instant.ns,
            was_mounted: self.was_mounted,
            bad_pages: {
                let ranges = self.bad_pages.iter();
                let words = ranges.flat_map(|range| [range.start, range.end - range.start]);
                words.collect()
            },
        };
        Record {
            tag: tag::VOLUME_STATE,
            version: 1,
            id: 0,
            payload: message.encode_to_vec(),
        }
    }

    /// What an image says.
    ///
    /// # Errors
    /// [`Error::Corrupt`], also for records of other kinds.
    pub fn of(reader: &Reader) -> Result<Self> {
        let [record] = reader.records() else {
            let what = format!("{} records instead of one", reader.records().len());
            return Err(Error::Corrupt(what));
        };
        let known = (tag::VOLUME_STATE, 1, 0);
        if (record.tag, record.version, record.id) != known {
            let (tag, version) = (record.tag, record.version);
            let what = format!("record {tag}, version {version}, is not known here");
            return Err(Error::Corrupt(what));
        }
        let message = image::strict::decode::<VolumeState>(&record.payload);
        let message = message.map_err(Error::Corrupt)?;
        let uuid = message.uuid.try_into();
        let uuid = uuid.map_err(|_| Error::Corrupt("its identity has not 16 bytes".into()))?;
        let pages = message.len_bytes.div_ceil(PAGE_BYTES as u64);
        let (ranges, rest) = message.bad_pages.as_chunks::<2>();
        let range = |[start, len]: &[u64; 2]| {
            let end = start.checked_add(*len).filter(|end| *end <= pages);
            end.map(|end| *start..end)
        };
        let bad_pages = ranges.iter().map(range).collect::<Option<Vec<_>>>();
        let bad_pages = bad_pages.filter(|_| rest.is_empty());
        let bad_pages = bad_pages.ok_or_else(|| Error::Corrupt("its bad pages".into()))?;
        Ok(Self {
            len_bytes: message.len_bytes,
            uuid,
            instant: Time {
                s: message.instant_s,
                ns: message.instant_ns,
            },
            was_mounted: message.was_mounted,
            bad_pages,
        })
    }
}
