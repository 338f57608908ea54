//! What an image says of a machine under QEMU besides its memory.

use std::collections::BTreeSet;

use image::{Reader, Record, SpaceId, SpaceKind};
use prost::Message;

use crate::records::{MonitorState, tag};
use crate::{Error, Result};

/// Which monitor the state is of.
const MONITOR: &str = "qemu";

/// A machine under QEMU: what has to be known to start another one like it.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct QemuMachine {
    /// QEMU's version, as `7.2.22`.
    #[prost(string, tag = "1")]
    pub version: String,
    /// The machine type with its version, as `pc-i440fx-7.2`.
    #[prost(string, tag = "2")]
    pub machine: String,
    /// The program's file.
    #[prost(string, tag = "3")]
    pub program: String,
    /// The directory in which it ran.
    #[prost(string, tag = "4")]
    pub folder: String,
    /// Its arguments behind its name; none where they are no text.
    #[prost(string, repeated, tag = "5")]
    pub words: Vec<String>,
    /// Which of the arguments lack a secret.
    #[prost(uint32, repeated, tag = "6")]
    pub withheld: Vec<u32>,
    /// The blocks of its memory: one for each space.
    #[prost(message, repeated, tag = "7")]
    pub blocks: Vec<QemuBlock>,
    /// Its disks.
    #[prost(message, repeated, tag = "8")]
    pub disks: Vec<QemuDisk>,
}

/// A block of memory.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct QemuBlock {
    /// The space with its pages, which has the name of the block.
    #[prost(uint32, tag = "1")]
    pub space: u32,
    /// The object of QEMU that it is of.
    #[prost(string, tag = "2")]
    pub backend: String,
}

/// A disk, as it was when the machine was stopped.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct QemuDisk {
    /// What QEMU calls it.
    #[prost(string, tag = "1")]
    pub name: String,
    /// Its file, absolute.
    #[prost(string, tag = "2")]
    pub path: String,
    /// How long that was.
    #[prost(uint64, tag = "3")]
    pub bytes: u64,
    /// When it was last written to, in ns since 1970.
    #[prost(int64, tag = "4")]
    pub written_ns: i64,
}

/// All that an image says of a machine, checked.
#[derive(Debug)]
pub(crate) struct Saved {
    pub machine: QemuMachine,
    pub state: Vec<u8>,
}

impl QemuMachine {
    /// The record of it.
    pub fn record(&self) -> Record {
        Record {
            tag: tag::QEMU_MACHINE,
            version: 1,
            id: 0,
            payload: self.encode_to_vec(),
        }
    }
}

/// The record of the state of devices.
pub(crate) fn state(bytes: Vec<u8>) -> Record {
    let monitor = MONITOR.to_owned();
    MonitorState { monitor, bytes }.record()
}

impl Saved {
    /// What an image says.
    ///
    /// # Errors
    /// [`Error::Unfit`] where it is of something else, [`Error::Corrupt`].
    pub fn of(reader: &Reader) -> Result<Self> {
        match read(reader)? {
            (machine, Some(state)) => Ok(Self { machine, state }),
            (_, None) => Err(Error::Unfit(
                "the image is of a round before a save, and has no devices: vm save over it"
                    .to_owned(),
            )),
        }
    }
}

/// The machine that an image is of, which may be one of a round.
///
/// # Errors
/// [`Error::Unfit`] where it is of something else, [`Error::Corrupt`].
pub(crate) fn machine_of(reader: &Reader) -> Result<QemuMachine> {
    read(reader).map(|(machine, _)| machine)
}

fn read(reader: &Reader) -> Result<(QemuMachine, Option<Vec<u8>>)> {
    let (mut machine, mut state) = (None, None);
    let corrupt = |record: &'static str| move |what| Error::Corrupt { record, what };
    let other = || Error::Unfit("the image is not one of a machine under QEMU".to_owned());
    for record in reader.records() {
        let is_new = match (record.tag, record.version, record.id) {
            (tag::QEMU_MACHINE, 1, 0) => {
                let read = image::strict::decode::<QemuMachine>(&record.payload);
                let read = read.map_err(corrupt("the machine"))?;
                machine.replace(read).is_none()
            }
            (tag::MONITOR_STATE, 1, 0) => {
                let read = image::strict::decode::<MonitorState>(&record.payload);
                let read = read.map_err(corrupt("its devices"))?;
                state.replace(read).is_none()
            }
            _ => return Err(other()),
        };
        if !is_new {
            let what = format!("record {} is there twice", record.tag);
            return Err(corrupt("a record")(what));
        }
    }
    let machine = machine.ok_or_else(other)?;
    let state = state.map(|state| match state.monitor.as_str() {
        MONITOR => Ok(state.bytes),
        other => Err(corrupt("its devices")(format!("they are those of {other}"))),
    });
    check(reader, &machine).map_err(corrupt("the machine"))?;
    Ok((machine, state.transpose()?))
}

/// Whether every space is a block of the machine's, all of which the image has, and the other way
/// round.
fn check(reader: &Reader, machine: &QemuMachine) -> std::result::Result<(), String> {
    let spaces = machine.blocks.iter().map(|block| block.space);
    let spaces = spaces.collect::<BTreeSet<_>>();
    let backends = machine.blocks.iter().map(|block| &block.backend);
    if spaces.len() != machine.blocks.len()
        || backends.collect::<BTreeSet<_>>().len() != spaces.len()
        || reader.spaces().len() != spaces.len()
        || spaces.is_empty()
    {
        let (blocks, all) = (machine.blocks.len(), reader.spaces().len());
        return Err(format!("{blocks} blocks are {all} spaces"));
    }
    for number in spaces {
        let space = reader.space(SpaceId(number));
        let space = space.filter(|space| space.kind == SpaceKind::Block && space.len_pages > 0);
        let pages = space.ok_or(format!("{number} is no block"))?.len_pages;
        if !reader
            .described(SpaceId(number), 0, pages)
            .is_just(&(0..pages))
        {
            return Err(format!("not all {pages} pages of block {number} are there"));
        }
    }
    Ok(())
}
