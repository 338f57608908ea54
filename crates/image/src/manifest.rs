//! The messages of the manifest and of records, and their limits.

use prost::Message;

use crate::{ImageId, Result, error::Error};

/// The most records an image holds.
pub(crate) const RECORDS_MAX: usize = 1 << 22;

/// The largest encoded [`Manifest`].
pub(crate) const MESSAGE_MAX_BYTES: usize = 1 << 20;

/// Facts about the creation of an image; none of them decides how it is read.
#[derive(Clone, PartialEq, Message)]
pub struct Facts {
    /// The release of the kernel that the target ran on, as in uname(2).
    #[prost(string, tag = "1")]
    pub kernel_release: String,
    /// The version of Stillframe that wrote the image.
    #[prost(string, tag = "2")]
    pub stillframe_version: String,
    /// When, in nanoseconds since 1970.
    #[prost(uint64, tag = "3")]
    pub created_ns: u64,
    /// The machine, as in uname(2): `x86_64`.
    #[prost(string, tag = "4")]
    pub arch: String,
}

/// The image that another one is a difference from.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Parent {
    #[prost(bytes = "vec", tag = "1")]
    pub id: Vec<u8>,
    /// Its path, relative to the image that names it.
    #[prost(string, tag = "2")]
    pub path: String,
}

/// An image that holds pages of this one.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct AncestorRecord {
    #[prost(bytes = "vec", tag = "1")]
    pub id: Vec<u8>,
    /// Its path, relative to the image that names it.
    #[prost(string, tag = "2")]
    pub path: String,
    /// The lengths of its pages objects by number; 0 for one of which nothing is needed.
    #[prost(uint64, repeated, tag = "3")]
    pub parts_bytes: Vec<u64>,
}

/// The part of the manifest beside the index and the records.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Manifest {
    /// Features that a reader of this image must know.
    #[prost(string, repeated, tag = "1")]
    pub features: Vec<String>,
    #[prost(message, optional, tag = "2")]
    pub parent: Option<Parent>,
    #[prost(message, optional, tag = "3")]
    pub facts: Option<Facts>,
    /// The length of the first pages object; 0 where there is none.
    #[prost(uint64, tag = "4")]
    pub pages_bytes: u64,
    /// The lengths of further pages objects; 0 for one that is not there.
    #[prost(uint64, repeated, tag = "6")]
    pub more_pages_bytes: Vec<u64>,
    /// How many records there are.
    #[prost(uint64, tag = "5")]
    pub records: u64,
    /// How many bytes of the pages objects belong to no run.
    #[prost(uint64, tag = "9")]
    pub unused_bytes: u64,
    /// The images that hold pages of this one.
    #[prost(message, repeated, tag = "7")]
    pub ancestors: Vec<AncestorRecord>,
    /// The image for which some pages of this one were freed; empty where all are there.
    #[prost(bytes = "vec", tag = "10")]
    pub freed_by: Vec<u8>,
}

/// The feature of an image with several pages objects.
pub(crate) const PARTS_FEATURE: &str = "parts";

/// The feature of an image whose pages objects have bytes that belong to no run.
pub(crate) const UNUSED_FEATURE: &str = "unused";

/// The feature of an image that has pages from another.
pub(crate) const PARENT_FEATURE: &str = "parent";

/// The feature of an image that stores pages with equal contents once.
pub(crate) const EQUAL_FEATURE: &str = "equal";

/// The feature of an image of which pages were freed.
pub(crate) const FREED_FEATURE: &str = "freed";

/// The features that this version reads.
const FEATURES: &[&str] = &[
    PARTS_FEATURE,
    PARENT_FEATURE,
    EQUAL_FEATURE,
    UNUSED_FEATURE,
    FREED_FEATURE,
    "lz4",
    "zstd",
];

impl Manifest {
    /// The lengths of all pages objects.
    pub fn parts_bytes(&self) -> Vec<u64> {
        let mut parts = vec![self.pages_bytes];
        parts.extend_from_slice(&self.more_pages_bytes);
        parts
    }

    /// Refuses an image that needs what this version does not know.
    pub fn check_features(&self) -> Result<()> {
        let unknown = self
            .features
            .iter()
            .find(|feature| !FEATURES.contains(&feature.as_str()));
        match unknown.cloned() {
            Some(feature) => Err(Error::Unsupported { feature }),
            None => Ok(()),
        }
    }

    /// Returns the image for which pages of this one were freed.
    pub fn check_freed(&self) -> std::result::Result<Option<ImageId>, String> {
        let is_freed = self.features.iter().any(|feature| feature == FREED_FEATURE);
        match self.freed_by.as_slice() {
            [] if is_freed => Err("pages were freed for no image".into()),
            [] => Ok(None),
            id => match id.try_into() {
                Ok(id) if is_freed => Ok(Some(ImageId(id))),
                _ => Err("pages were freed for something that is no image".into()),
            },
        }
    }

    /// Returns the image that this one is a difference from; one that has ancestors has one.
    pub fn check_parent(
        &self,
        has_ancestors: bool,
    ) -> std::result::Result<Option<(ImageId, String)>, String> {
        let Some(parent) = &self.parent else {
            if !has_ancestors {
                return Ok(None);
            }
            return Err("there are ancestors and no parent".into());
        };
        match parent.id.as_slice().try_into() {
            Ok(id) => Ok(Some((ImageId(id), parent.path.clone()))),
            Err(_) => Err("the parent has no id".into()),
        }
    }
}

/// One resource, or whatever the caller stores: opaque bytes under a tag and a number.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Record {
    /// Type of the payload.
    pub tag: u16,
    /// The version of the payload's message.
    pub version: u16,
    /// Which one of those with this tag.
    pub id: u32,
    /// The message.
    pub payload: Vec<u8>,
}

/// A record as it is stored.
#[derive(Clone, PartialEq, Message)]
struct StoredRecord {
    #[prost(uint32, tag = "1")]
    tag: u32,
    #[prost(uint32, tag = "2")]
    version: u32,
    #[prost(uint32, tag = "3")]
    id: u32,
    #[prost(bytes = "vec", tag = "4")]
    payload: Vec<u8>,
}

/// Encodes `records`, each behind its length.
pub(crate) fn encode_records(records: Vec<Record>) -> Vec<u8> {
    let payloads: usize = records.iter().map(|record| record.payload.len()).sum();
    let mut bytes = Vec::with_capacity(payloads + 24 * records.len());
    for Record {
        tag,
        version,
        id,
        payload,
    } in records
    {
        let stored = StoredRecord {
            tag: tag.into(),
            version: version.into(),
            id,
            payload,
        };
        stored
            .encode_length_delimited(&mut bytes)
            .expect("a Vec grows");
    }
    bytes
}

/// Decodes exactly `count` records from all of `bytes`.
///
/// # Errors
/// The byte where it went wrong, and how.
pub(crate) fn decode_records(
    bytes: &[u8],
    count: u64,
) -> std::result::Result<Vec<Record>, (usize, String)> {
    // A record takes two bytes at the least: a length and, as no tag is 0, a field.
    let count = usize::try_from(count)
        .ok()
        .filter(|&count| count <= RECORDS_MAX && count <= bytes.len() / 2)
        .ok_or_else(|| {
            (
                0,
                format!("{count} records cannot be in {} bytes", bytes.len()),
            )
        })?;
    let mut records = Vec::with_capacity(count);
    let mut rest = bytes;
    while records.len() < count {
        let at = bytes.len() - rest.len();
        let wrong = |what: String| (at, what);
        let before = rest.len();
        let stored = StoredRecord::decode_length_delimited(&mut rest)
            .map_err(|error| wrong(format!("record {}: {error}", records.len())))?;
        let len = stored.encoded_len();
        if before - rest.len() != prost::length_delimiter_len(len) + len {
            let what = "has a field that is not known to this version";
            return Err(wrong(format!("record {} {what}", records.len())));
        }
        let small = |name, value| {
            u16::try_from(value).map_err(|_| wrong(format!("{name} {value} of a record")))
        };
        let (tag, version) = (small("tag", stored.tag)?, small("version", stored.version)?);
        if tag == 0 {
            return Err(wrong(format!("record {} has no tag", records.len())));
        }
        records.push(Record {
            tag,
            version,
            id: stored.id,
            payload: stored.payload,
        });
    }
    if rest.is_empty() {
        return Ok(records);
    }
    Err((
        bytes.len() - rest.len(),
        "bytes after the last record".into(),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(tag: u16, payload: &[u8]) -> Record {
        Record {
            tag,
            version: u16::MAX,
            id: u32::MAX,
            payload: payload.into(),
        }
    }

    #[test]
    fn records_keep_their_order() {
        let records = vec![
            record(9, b"nine"),
            record(1, b""),
            record(u16::MAX, &[0; 300]),
        ];
        let bytes = encode_records(records.clone());
        assert_eq!(decode_records(&bytes, 3), Ok(records));
    }

    #[test]
    fn a_wrong_count_is_refused() {
        let bytes = encode_records(vec![record(1, b"one"), record(2, b"two")]);
        for count in [0, 1, 3, 1 << 22, u64::MAX] {
            assert!(decode_records(&bytes, count).is_err(), "{count}");
        }
        assert_eq!(decode_records(&[], 0), Ok(vec![]));
    }

    #[test]
    fn a_length_past_the_end_is_refused() {
        let error = decode_records(&[0xff, 0xff, 0xff, 0xff, 0x0f, 8, 1], 1).unwrap_err();
        assert_eq!(error.0, 0);
    }

    #[test]
    fn wide_tags_and_no_tags_are_refused() {
        for (tag, what) in [(0, "has no tag"), (1 << 16, "tag 65536")] {
            let stored = StoredRecord {
                tag,
                version: 1,
                id: 1,
                payload: vec![],
            };
            let (_, error) = decode_records(&stored.encode_length_delimited_to_vec(), 1)
                .expect_err("no such tag");
            assert!(error.contains(what), "{error}");
        }
    }

    #[test]
    fn unknown_features_and_wrong_parents_are_refused() {
        let features = vec!["teleport".to_owned()];
        let error = Manifest {
            features,
            ..Default::default()
        }
        .check_features()
        .unwrap_err();
        assert!(error.to_string().contains("\"teleport\""), "{error}");
        for (id, right) in [(vec![0xab; 16], true), (vec![0xab; 15], false)] {
            let path = "../1".into();
            let manifest = Manifest {
                parent: Some(Parent { id, path }),
                ..Default::default()
            };
            assert_eq!(manifest.check_parent(false).is_ok(), right);
        }
        assert!(Manifest::default().check_parent(true).is_err());
        assert!(Manifest::default().check_features().is_ok());
    }
}
