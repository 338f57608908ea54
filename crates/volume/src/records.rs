//! The record of an image of a volume.

use std::ffi::OsString;
use std::ops::Range;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use image::{PAGE_BYTES, Reader, Record};
use prost::Message;
use sys::mountinfo::Mount;

use crate::ext4::Time;
use crate::{Error, Result};

/// Record numbers of this crate.
pub(crate) mod tag {
    /// [`super::VolumeState`], one an image.
    pub const VOLUME_STATE: u16 = 500;
}

/// State of a volume when it was saved.
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
    /// True if it was in use.
    #[prost(bool, tag = "5")]
    pub was_mounted: bool,
    /// Pages that could not be read and are zero here: the first of each range, and how many.
    #[prost(uint64, repeated, tag = "6")]
    pub bad_pages: Vec<u64>,
    #[prost(bytes = "vec", optional, tag = "7")]
    pub mount_point: Option<Vec<u8>>,
    /// With which options, as /proc/self/mountinfo has them: those of the mount.
    #[prost(string, tag = "8")]
    pub mount_options: String,
    /// And those of the file system.
    #[prost(string, tag = "9")]
    pub fs_options: String,
    /// The numbers of the device that it was mounted from.
    #[prost(uint32, tag = "10")]
    pub device_major: u32,
    #[prost(uint32, tag = "11")]
    pub device_minor: u32,
}

/// The same, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct State {
    pub len_bytes: u64,
    pub uuid: [u8; 16],
    pub instant: Time,
    pub was_mounted: bool,
    /// The mount; older images do not tell.
    pub mount: Option<Mount>,
    pub bad_pages: Vec<Range<u64>>,
}

impl State {
    pub fn record(&self) -> Record {
        let mount = self.mount.clone();
        let point = mount
            .as_ref()
            .map(|mount| mount.point.as_os_str().as_bytes().to_vec());
        let mount = mount.unwrap_or_default();
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
            mount_point: point,
            mount_options: mount.options,
            fs_options: mount.fs_options,
            device_major: mount.device.0,
            device_minor: mount.device.1,
        };
        Record {
            tag: tag::VOLUME_STATE,
            version: 1,
            id: 0,
            payload: message.encode_to_vec(),
        }
    }

    /// Reads an image's record.
    ///
    /// # Errors
    /// [`Error::Corrupt`], also for records of other kinds.
    pub fn of(reader: &Reader) -> Result<Self> {
        let is_alone = reader.spaces().len() == 1;
        // Those of what else is in the image are not looked at here.
        let is_own = |record: &&Record| is_alone || record.tag == tag::VOLUME_STATE;
        let mut records = reader.records().iter().filter(is_own);
        let (Some(record), None) = (records.next(), records.next()) else {
            let what = "there is not one of them".to_owned();
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
        let point = message.mount_point;
        let point = point.map(|bytes| PathBuf::from(OsString::from_vec(bytes)));
        if point.as_ref().is_some_and(|point| !point.is_absolute()) {
            return Err(Error::Corrupt("where it was mounted".into()));
        }
        let mount = point.map(|point| Mount {
            point,
            device: (message.device_major, message.device_minor),
            options: message.mount_options,
            fs_options: message.fs_options,
            ..Mount::default()
        });
        Ok(Self {
            len_bytes: message.len_bytes,
            uuid,
            instant: Time {
                s: message.instant_s,
                ns: message.instant_ns,
            },
            was_mounted: message.was_mounted,
            mount,
            bad_pages,
        })
    }
}
