//! The records of an image of a machine.

use image::{Reader, Record};
use prost::Message;

use crate::{Error, Result};

/// Record numbers of this crate.
pub(crate) mod tag {
    /// [`super::MonitorState`], one an image.
    pub const MONITOR_STATE: u16 = 400;
}

/// What a monitor saved besides the memory: the state of processors and devices.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct MonitorState {
    /// Which monitor it is of.
    #[prost(string, tag = "1")]
    pub monitor: String,
    /// Its state file, as it was.
    #[prost(bytes = "vec", tag = "2")]
    pub bytes: Vec<u8>,
}

impl MonitorState {
    /// The record of it.
    pub fn record(&self) -> Record {
        Record {
            tag: tag::MONITOR_STATE,
            version: 1,
            id: 0,
            payload: self.encode_to_vec(),
        }
    }

    /// What an image has of it.
    ///
    /// # Errors
    /// [`Error::Corrupt`], also for records of other kinds.
    pub fn of(reader: &Reader) -> Result<Option<Self>> {
        let corrupt = |what: String| Error::Corrupt {
            record: "the monitor's state",
            what,
        };
        let mut found = None;
        for record in reader.records() {
            if record.tag != tag::MONITOR_STATE || record.version != 1 || record.id != 0 {
                let (tag, version) = (record.tag, record.version);
                let what = format!("record {tag}, version {version}, is not known here");
                return Err(corrupt(what));
            }
            let state = image::strict::decode::<Self>(&record.payload).map_err(corrupt)?;
            if found.replace(state).is_some() {
                return Err(corrupt("it is there twice".to_owned()));
            }
        }
        Ok(found)
    }
}
