//! What an image says of a machine under QEMU besides its memory.

use std::collections::BTreeSet;

use abi::PAGE_BYTES;
use image::{Reader, Record, SpaceId, SpaceKind};
use prost::Message;
use store::Images;

use super::disks::FORMATS;
use super::user::QemuUser;
use crate::records::{MonitorState, OF_COMPANIONS, tag};
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
    #[prost(message, repeated, tag = "8")]
    pub disks: Vec<QemuDisk>,
    #[prost(message, optional, tag = "9")]
    pub processors: Option<QemuProcessors>,
    /// Its user; older images do not tell.
    #[prost(message, optional, tag = "10")]
    pub user: Option<QemuUser>,
    /// Devices in which it differs from what its arguments say: each restore is to be given others.
    #[prost(string, repeated, tag = "11")]
    pub plugged: Vec<String>,
}

/// The processors of a machine, as its guest knows them.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct QemuProcessors {
    /// How many there are.
    #[prost(uint32, tag = "1")]
    pub count: u32,
    /// Path of the first in QEMU.
    #[prost(string, tag = "2")]
    pub path: String,
    /// Their model's name in QEMU.
    #[prost(string, tag = "3")]
    pub kind: String,
    /// Features, of x86.
    #[prost(message, repeated, tag = "4")]
    pub features: Vec<QemuFeatures>,
}

/// A register of an answer of CPUID.
#[derive(Clone, PartialEq, Eq, Hash, Message)]
pub(crate) struct QemuFeatures {
    /// EAX of the CPUID call.
    #[prost(uint32, tag = "1")]
    pub leaf: u32,
    /// ECX of the CPUID call, if that matters.
    #[prost(uint32, optional, tag = "2")]
    pub part: Option<u32>,
    /// The register of the answer, as `EBX`.
    #[prost(string, tag = "3")]
    pub register: String,
    /// Its bits that stand for features.
    #[prost(uint32, tag = "4")]
    pub bits: u32,
}

impl QemuFeatures {
    /// Which register of which answer it is.
    pub fn place(&self) -> (u32, Option<u32>, &str) {
        (self.leaf, self.part, &self.register)
    }
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
    /// The size of the pages that it was in, if that is known.
    #[prost(uint64, tag = "3")]
    pub page_bytes: u64,
}

/// A disk, as it was when the machine was stopped.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct QemuDisk {
    /// Its name in QEMU.
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
    /// Its files, if the image has them: the one that was written to, what that is over, and so on.
    #[prost(message, repeated, tag = "5")]
    pub files: Vec<QemuDiskFile>,
    /// How long the disk is for the guest.
    #[prost(uint64, tag = "6")]
    pub virtual_bytes: u64,
    /// True if the guest could write to it, if the image has it.
    #[prost(bool, tag = "7")]
    pub is_written: bool,
    /// The format of its file: `raw`, `qcow2` or another one of QEMU's.
    #[prost(string, tag = "8")]
    pub format: String,
    /// What its file is over, and so on, if the image does not have it.
    #[prost(message, repeated, tag = "9")]
    pub over: Vec<QemuDiskOverlay>,
}

/// A file below another one of a disk that the image does not have.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct QemuDiskOverlay {
    /// Its former path, absolute.
    #[prost(string, tag = "1")]
    pub path: String,
    #[prost(string, tag = "2")]
    pub format: String,
    /// How long it was.
    #[prost(uint64, tag = "3")]
    pub bytes: u64,
    /// When it was last written to, in ns since 1970.
    #[prost(int64, tag = "4")]
    pub written_ns: i64,
}

/// A file of a disk.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct QemuDiskFile {
    /// The space with its bytes.
    #[prost(uint32, tag = "1")]
    pub space: u32,
    /// Its former path, absolute.
    #[prost(string, tag = "2")]
    pub path: String,
    /// `raw` or `qcow2`.
    #[prost(string, tag = "3")]
    pub format: String,
    /// How long it was.
    #[prost(uint64, tag = "4")]
    pub bytes: u64,
    /// When it was last written to, in ns since 1970.
    #[prost(int64, tag = "5")]
    pub written_ns: i64,
}

/// All that an image says of a machine, checked.
#[derive(Debug)]
pub(crate) struct MachineState {
    pub machine: QemuMachine,
    pub state: Vec<u8>,
}

impl QemuMachine {
    /// Tells whether the image has its disks.
    pub fn has_disks(&self) -> bool {
        self.disks.iter().any(|disk| !disk.files.is_empty())
    }

    pub fn record(&self) -> Record {
        Record {
            tag: tag::QEMU_MACHINE,
            version: 4,
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

impl MachineState {
    /// Reads an image's record.
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
    let (mut machine, mut state, mut companions) = (None, None, 0);
    let corrupt = |record: &'static str| move |what| Error::Corrupt { record, what };
    let other = || Error::Unfit("the image is not one of a machine under QEMU".to_owned());
    for record in reader.records() {
        let is_new = match (record.tag, record.version, record.id) {
            (tag::QEMU_MACHINE, 1..=4, 0) => {
                let read = image::strict::decode::<QemuMachine>(&record.payload);
                let read = read.map_err(corrupt("the machine"))?;
                machine.replace(read).is_none()
            }
            (tag::MONITOR_STATE, 1, 0) => {
                let read = image::strict::decode::<MonitorState>(&record.payload);
                let read = read.map_err(corrupt("its devices"))?;
                state.replace(read).is_none()
            }
            (tag, _, 0) if OF_COMPANIONS.contains(&tag) => {
                companions += 1;
                companions == 1
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
    check(reader, &machine, companions).map_err(corrupt("the machine"))?;
    Ok((machine, state.transpose()?))
}

/// Tells whether every space is a block of the machine's, all of which the image has, and the other
/// way round; but for those of so many companions.
fn check(
    reader: &Reader,
    machine: &QemuMachine,
    companions: usize,
) -> std::result::Result<(), String> {
    let spaces = machine.blocks.iter().map(|block| block.space);
    let spaces = spaces.collect::<BTreeSet<_>>();
    let backends = machine.blocks.iter().map(|block| &block.backend);
    let files = machine.disks.iter().flat_map(|disk| &disk.files);
    let of_disks = files.map(|file| file.space).collect::<BTreeSet<_>>();
    let all = spaces.union(&of_disks).count();
    if spaces.len() != machine.blocks.len()
        || backends.collect::<BTreeSet<_>>().len() != spaces.len()
        || reader.spaces().len() != all + companions
        || spaces.is_empty()
    {
        let (blocks, all) = (machine.blocks.len(), reader.spaces().len());
        return Err(format!("{blocks} blocks, and disks, are {all} spaces"));
    }
    for number in spaces {
        check_space(reader, number, SpaceKind::Block)?;
    }
    for disk in &machine.disks {
        check_disk(reader, disk).map_err(|what| format!("the disk {}: {what}", disk.name))?;
    }
    Ok(())
}

/// Tells whether a space is of this kind, and all of it there; gives its pages.
fn check_space(reader: &Reader, number: u32, kind: SpaceKind) -> std::result::Result<u64, String> {
    let space = reader.space(SpaceId(number));
    let space = space.filter(|space| space.kind == kind && space.len_pages > 0);
    let pages = space.ok_or(format!("{number} is no {kind:?}"))?.len_pages;
    let described = reader.described(SpaceId(number), 0, pages);
    match described.is_just(&(0..pages)) {
        true => Ok(pages),
        false => Err(format!("not all {pages} pages of {number} are there")),
    }
}

fn check_disk(reader: &Reader, disk: &QemuDisk) -> std::result::Result<(), String> {
    for file in &disk.files {
        let pages = check_space(reader, file.space, SpaceKind::Volume)?;
        if file.bytes.div_ceil(PAGE_BYTES) != pages || !FORMATS.contains(&file.format.as_str()) {
            let (bytes, format) = (file.bytes, &file.format);
            return Err(format!(
                "{pages} pages are {bytes} bytes of the format {format}"
            ));
        }
    }
    Ok(())
}

/// True if the image in `images` is of a machine that QEMU ran.
///
/// # Errors
/// [`Error::Image`].
pub fn is_of_qemu(images: &Images) -> Result<bool> {
    let store = images.open().map_err(image::Error::Place)?;
    let reader = Reader::open(&*store)?;
    let mut records = reader.records().iter();
    Ok(records.any(|record| record.tag == tag::QEMU_MACHINE))
}
