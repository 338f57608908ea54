//! The few bytes of a qcow2 file that have to be known here: those of an empty overlay, and the
//! name of the file that another one is over.
//!
//! The format is QEMU's docs/interop/qcow2.txt; all numbers in it are big-endian.

use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

/// Magic number of a file: `QFI` and a byte.
const MAGIC: [u8; 4] = [b'Q', b'F', b'I', 0xfb];

/// The clusters of files that are made here: 64 KiB.
const CLUSTER_BITS: u32 = 16;
const CLUSTER_BYTES: u64 = 1 << CLUSTER_BITS;

/// Offset in the header of the name of the file below, its length, and the clusters' size.
const BACKING_AT: u64 = 8;
const BACKING_LENGTH_AT: u64 = 16;
const CLUSTER_BITS_AT: u64 = 20;
/// Offset of the header's length.
const HEADER_LENGTH_AT: usize = 100;

/// The length of a header of version 3, and the extension with the format of the file below.
const HEADER_BYTES: u32 = 104;
const FORMAT_EXTENSION: u32 = 0xe279_2aca;

/// The longest name of a file below.
const NAME_MAX_BYTES: usize = 1023;

/// The file that an overlay is over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BackingFile<'a> {
    pub path: &'a Path,
    /// `raw` or `qcow2`.
    pub format: &'a str,
}

/// Writes an overlay in which nothing is written yet: a disk of `virtual_bytes` that has what the
/// file below has.
pub(crate) fn write_overlay(
    file: &File,
    virtual_bytes: u64,
    backing: BackingFile<'_>,
) -> io::Result<()> {
    // An entry of the first table stands for a cluster of 8-byte entries, each for a cluster.
    let entries = virtual_bytes.div_ceil(CLUSTER_BYTES * (CLUSTER_BYTES / 8));
    let table_clusters = (entries * 8).div_ceil(CLUSTER_BYTES).max(1);
    // The header, a table of counts, a block of counts, and the first table.
    let clusters = 3 + table_clusters;
    let (name, format) = (backing.path.as_os_str().as_bytes(), backing.format);
    let format_bytes = format.len().next_multiple_of(8);
    let name_at = HEADER_BYTES as usize + 8 + format_bytes + 8;
    if name.len() > NAME_MAX_BYTES || clusters > CLUSTER_BYTES / 2 {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let mut header = Vec::new();
    let long = |header: &mut Vec<u8>, number: u64| header.extend(number.to_be_bytes());
    let short = |header: &mut Vec<u8>, number: u32| header.extend(number.to_be_bytes());
    header.extend(MAGIC);
    short(&mut header, 3);
    long(&mut header, name_at as u64);
    short(&mut header, name.len() as u32);
    short(&mut header, CLUSTER_BITS);
    long(&mut header, virtual_bytes);
    short(&mut header, 0); // not encrypted
    short(&mut header, entries as u32);
    long(&mut header, 3 * CLUSTER_BYTES);
    long(&mut header, CLUSTER_BYTES);
    short(&mut header, 1);
    short(&mut header, 0); // no snapshots
    long(&mut header, 0);
    header.extend([0; 24]); // no features
    short(&mut header, 4); // counts of 16 bits
    short(&mut header, HEADER_BYTES);
    short(&mut header, FORMAT_EXTENSION);
    short(&mut header, format.len() as u32);
    header.extend(format.bytes());
    header.resize(name_at, 0);
    header.extend(name);
    file.set_len(clusters * CLUSTER_BYTES)?;
    file.write_all_at(&header, 0)?;
    file.write_all_at(&(2 * CLUSTER_BYTES).to_be_bytes(), CLUSTER_BYTES)?;
    let counts = (0..clusters).flat_map(|_| 1_u16.to_be_bytes());
    file.write_all_at(&counts.collect::<Vec<_>>(), 2 * CLUSTER_BYTES)
}

/// Has a file be over another one: names that anew, or for the first time where QEMU kept the name
/// to itself, as it does for a temporary disk.
///
/// # Errors
/// As [`rename_backing`].
pub(crate) fn set_backing(file: &File, backing: BackingFile<'_>) -> io::Result<()> {
    let mut at = [0; 8];
    file.read_exact_at(&mut at, BACKING_AT)?;
    match u64::from_be_bytes(at) {
        0 => add_backing(file, backing),
        _ => rename_backing(file, backing.path),
    }
}

/// Puts the format and the name of the file below behind the extensions of the header.
fn add_backing(file: &File, backing: BackingFile<'_>) -> io::Result<()> {
    let (name, format) = (backing.path.as_os_str().as_bytes(), backing.format);
    let mut header = [0; CLUSTER_BYTES as usize];
    let read = read_start(file, &mut header)?;
    let number = |at: usize| {
        let bytes = header[..read].get(at..at + 4);
        bytes.map(|bytes| u32::from_be_bytes(bytes.try_into().expect("four bytes")))
    };
    let invalid = || io::Error::from(io::ErrorKind::InvalidData);
    let bits = number(CLUSTER_BITS_AT as usize).filter(|bits| (9..=21).contains(bits));
    let cluster_bytes = 1_usize << bits.ok_or_else(invalid)?;
    if header[..4] != MAGIC || number(4) != Some(3) {
        return Err(invalid());
    }
    let mut at = number(HEADER_LENGTH_AT).ok_or_else(invalid)? as usize;
    while number(at).ok_or_else(invalid)? != 0 {
        let length = number(at + 4).ok_or_else(invalid)? as usize;
        at += 8 + length.next_multiple_of(8);
    }
    let mut added = Vec::new();
    added.extend(FORMAT_EXTENSION.to_be_bytes());
    added.extend((format.len() as u32).to_be_bytes());
    added.extend(format.bytes());
    added.resize(8 + format.len().next_multiple_of(8), 0);
    added.extend([0; 8]);
    let name_at = at + added.len();
    added.extend(name);
    if name.len() > NAME_MAX_BYTES || at + added.len() > cluster_bytes {
        return Err(invalid());
    }
    file.write_all_at(&added, at as u64)?;
    file.write_all_at(&(name.len() as u32).to_be_bytes(), BACKING_LENGTH_AT)?;
    file.write_all_at(&(name_at as u64).to_be_bytes(), BACKING_AT)
}

/// Reads the beginning of a file, as much as there is; gives how much that is.
fn read_start(file: &File, bytes: &mut [u8]) -> io::Result<usize> {
    let mut read = 0;
    while read < bytes.len() {
        match file.read_at(&mut bytes[read..], read as u64)? {
            0 => break,
            count => read += count,
        }
    }
    Ok(read)
}

/// Has a file that is over another one name that by another name.
///
/// # Errors
/// Those of the file; [`io::ErrorKind::InvalidData`] for one that is over none, or has no room for
/// the name.
fn rename_backing(file: &File, name: &Path) -> io::Result<()> {
    let name = name.as_os_str().as_bytes();
    let mut magic = [0; 4];
    file.read_exact_at(&mut magic, 0)?;
    let mut at = [0; 8];
    file.read_exact_at(&mut at, BACKING_AT)?;
    let at = u64::from_be_bytes(at);
    let mut bits = [0; 4];
    file.read_exact_at(&mut bits, CLUSTER_BITS_AT)?;
    let cluster_bytes = 1_u64.checked_shl(u32::from_be_bytes(bits)).unwrap_or(0);
    // The name is the last of the first cluster.
    let room = cluster_bytes.saturating_sub(at);
    if magic != MAGIC || at == 0 || name.len() > NAME_MAX_BYTES || name.len() as u64 > room {
        return Err(io::ErrorKind::InvalidData.into());
    }
    file.write_all_at(name, at)?;
    file.write_all_at(&(name.len() as u32).to_be_bytes(), BACKING_LENGTH_AT)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backing(path: &str) -> BackingFile<'_> {
        let path = Path::new(path);
        let format = "raw";
        BackingFile { path, format }
    }

    #[test]
    fn an_overlay_names_what_it_is_over() {
        let file = tempfile::tempfile().expect("a file");
        write_overlay(&file, 3 << 30, backing("/a/disk")).expect("written");
        assert_eq!(file.metadata().expect("facts").len(), 4 << 16);
        let mut header = [0; 200];
        file.read_exact_at(&mut header, 0).expect("read");
        assert_eq!(header[..8], *b"QFI\xfb\0\0\0\x03");
        // Six entries for 3 GiB.
        assert_eq!(header[36..40], 6_u32.to_be_bytes());
        assert_eq!(header[104..115], *b"\xe2\x79\x2a\xca\0\0\0\x03raw");
        assert_eq!(header[128..135], *b"/a/disk");
        rename_backing(&file, Path::new("another-name")).expect("renamed");
        file.read_exact_at(&mut header, 0).expect("read");
        assert_eq!(header[16..20], 12_u32.to_be_bytes());
        assert_eq!(header[128..140], *b"another-name");
    }

    #[test]
    fn what_has_no_name_gets_none() {
        let file = tempfile::tempfile().expect("a file");
        rename_backing(&file, Path::new("x")).expect_err("it is empty");
        file.write_all_at(&[0; 512], 0).expect("written");
        rename_backing(&file, Path::new("x")).expect_err("it is no qcow2");
        let long = "x".repeat(2000);
        write_overlay(&file, 1 << 20, backing(&long)).expect_err("it is too long");
        write_overlay(&file, 1 << 20, backing("/a")).expect("written");
        rename_backing(&file, Path::new(&long)).expect_err("it is too long");
    }

    #[test]
    fn file_that_tells_nothing_below_gets_a_format_and_a_name() {
        // As QEMU makes a temporary disk: an extension with names of features, and the last one.
        let file = tempfile::tempfile().expect("a file");
        write_overlay(&file, 1 << 30, backing("/below")).expect("written");
        let mut header = vec![0; 256];
        file.read_exact_at(&mut header, 0).expect("read");
        header[BACKING_AT as usize..][..12].fill(0);
        header[104..].fill(0);
        header[104..108].copy_from_slice(&0x6803_f857_u32.to_be_bytes());
        header[108..112].copy_from_slice(&5_u32.to_be_bytes());
        header[112..117].fill(b'x');
        file.write_all_at(&header, 0).expect("written");
        set_backing(&file, backing("/images/own.raw")).expect("it has room");
        let mut after = vec![0; 256];
        file.read_exact_at(&mut after, 0).expect("read");
        let number = |at: usize| u32::from_be_bytes(after[at..at + 4].try_into().expect("four"));
        assert_eq!(after[104..120], header[104..120]);
        assert_eq!((number(120), number(124)), (FORMAT_EXTENSION, 3));
        assert_eq!(
            (&after[128..131], number(136), number(140)),
            (&b"raw"[..], 0, 0)
        );
        let name = 144..144 + "/images/own.raw".len();
        assert_eq!((number(8), number(12)), (0, name.start as u32));
        assert_eq!(number(16), name.len() as u32);
        assert_eq!(&after[name], b"/images/own.raw");
        // Again, it is only renamed.
        set_backing(&file, backing("/x")).expect("it has room");
        file.read_exact_at(&mut after, 0).expect("read");
        assert_eq!(&after[144..146], b"/x");
        // A header without an end is refused.
        header[104..].fill(0xff);
        file.write_all_at(&header, 0).expect("written");
        assert!(set_backing(&file, backing("/y")).is_err());
    }
}
