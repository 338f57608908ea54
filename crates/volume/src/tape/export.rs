//! An image becomes a stream for restore(8).

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use store::Images;
use sys::new_file::NewFile;

use super::attributes::{self, BLOCK_MAX_BYTES};
use super::folder::{self, DirectoryEntry, FOLDER_MAX_BYTES};
use super::record::{
    BLOCK_RECORDS, FLAGS_MAX, Facts, Header, RECORD_BYTES, RecordKind, Stamp, StreamLabel,
};
use super::tree::{ParentInodes, Tree};
use crate::bytes::Bytes;
use crate::dump::Progress;
use crate::ext4::{FileSystem, Inode, Kind, ROOT, StoredAttribute, Time};
use crate::extract::Omission;
use crate::place::OpenImage;
use crate::read_at::ImageSpace;
use crate::{Error, FILE_MODE, Result};

/// Flags that chattr(1) sees: the others are the file system's.
const FLAGS_SEEN: u32 = 0x705b_dfff;
/// restore(8) takes numbers of devices for signed ones.
const DEVICE_MAX: u32 = 0x7fff_ffff;
/// How much is collected before it is written.
const BUFFER_BYTES: usize = 1 << 20;
const RECORD: u64 = RECORD_BYTES as u64;

/// Options of an export.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// The image.
    pub images: Images,
    /// An older image of the same volume: the stream has what has changed since.
    pub parent: Option<Images>,
    /// The level that the stream says it is of: 0 where there is no older image, and only there.
    pub level: u32,
}

/// Summary of an export.
#[derive(Debug, Default)]
pub struct ExportSummary {
    /// Directories in the stream.
    pub folders: u64,
    /// Other files in the stream.
    pub files: u64,
    /// The stream's length.
    pub bytes: u64,
    /// Files whose times are in the stream only to the microsecond.
    pub cut_times: u64,
    /// Files that the stream lacks or has changed, and why.
    pub left_out: Vec<Omission>,
}

/// Writes the files of an image to `to`, which errors call `name`.
///
/// # Errors
/// [`Error::Unfit`] where a level and an older image do not go together, or the images are of
/// different volumes; [`Error::Damaged`], [`Error::Image`]; [`Error::File`] where it cannot be
/// written.
pub fn export(
    options: &ExportOptions,
    to: &mut dyn Write,
    name: &Path,
    progress: Progress<'_>,
) -> Result<ExportSummary> {
    let opened = OpenImage::open(&options.images)?;
    let fs = opened.file_system()?;
    let parent = options.parent.as_ref().map(OpenImage::open).transpose()?;
    let about = about(options, &opened, parent.as_ref())?;
    let earlier = parent.map(|parent| {
        let fs = parent.file_system()?;
        ParentInodes::read(&fs, parent.state.instant)
    });
    let earlier = earlier.transpose()?;
    let mut tree = Tree::read(&fs, earlier.as_ref())?;
    let left_out = std::mem::take(&mut tree.left_out);
    let mut export = Export {
        fs: &fs,
        tree: &tree,
        out: StreamWriter {
            to: BufWriter::with_capacity(BUFFER_BYTES, to),
            name,
            about: &about,
            records: 0,
        },
        done: ExportSummary {
            left_out,
            ..ExportSummary::default()
        },
    };
    export.stream(progress)?;
    let bytes = export.out.finish()?;
    Ok(ExportSummary {
        bytes,
        ..export.done
    })
}

/// The same to a file, which is replaced when the stream is whole, or to a device or a pipe.
///
/// # Errors
/// Those of [`export`]; a file is as it was before then.
pub fn export_to_file(
    options: &ExportOptions,
    path: &Path,
    progress: Progress<'_>,
) -> Result<ExportSummary> {
    if std::fs::metadata(path).is_ok_and(|facts| !facts.is_file()) {
        let file = File::options().write(true).open(path);
        let mut file = file.map_err(Error::file("open", path))?;
        return export(options, &mut file, path, progress);
    }
    let new = NewFile::beside(path, FILE_MODE);
    let mut new = new.map_err(Error::file("make a file for", path))?;
    let exported = export(options, &mut new.file, path, progress)?;
    let synced = new.file.sync_all();
    synced.map_err(Error::file("write", path))?;
    new.publish().map_err(Error::file("make", path))?;
    Ok(exported)
}

/// Returns the label of the stream.
fn about(
    options: &ExportOptions,
    opened: &OpenImage,
    parent: Option<&OpenImage>,
) -> Result<StreamLabel> {
    if (options.level == 0) == parent.is_some() {
        let what = "a stream of level 0 has all files, and one of a higher level what has changed \
                    since an older image";
        return Err(Error::Unfit(what.into()));
    }
    if parent.is_some_and(|parent| parent.state.uuid != opened.state.uuid) {
        return Err(Error::Unfit(format!(
            "the images in {} and {} are of different volumes",
            options.images,
            options
                .parent
                .as_ref()
                .map(Images::to_string)
                .unwrap_or_default()
        )));
    }
    let date = |time: Time| {
        let too_late = || Error::Unfit("the format of dump(8) has no dates after 2038".into());
        i32::try_from(time.s).map_err(|_| too_late())
    };
    let host = rustix::system::uname();
    Ok(StreamLabel {
        date_s: date(opened.state.instant)?,
        since_s: parent.map_or(Ok(0), |parent| date(parent.state.instant))?,
        level: options.level,
        label: b"none".to_vec(),
        mounted_on: b"a volume".to_vec(),
        device: format!("image {}", opened.base.reader.id()).into_bytes(),
        host: host.nodename().to_bytes().to_vec(),
    })
}

struct Export<'a, W: Write> {
    fs: &'a FileSystem<ImageSpace>,
    tree: &'a Tree,
    out: StreamWriter<'a, W>,
    done: ExportSummary,
}

impl<W: Write> Export<'_, W> {
    fn stream(&mut self, progress: Progress<'_>) -> Result<()> {
        let tree = self.tree;
        let inodes = self.fs.superblock().inodes;
        self.out.header(&Header::new(RecordKind::Tape, 0))?;
        let used = tree.named().map(|(number, _)| number);
        self.out
            .map(Header::new(RecordKind::Used, inodes), inodes, used)?;
        let dumped = tree.dumped().map(|(number, _)| number);
        self.out
            .map(Header::new(RecordKind::Dumped, ROOT), inodes, dumped)?;
        let total = tree.dumped().map(|(_, node)| node.size_bytes).sum();
        let mut bytes = 0;
        for is_folder in [true, false] {
            for (number, node) in tree.dumped() {
                if (node.kind == Kind::Directory) != is_folder {
                    continue;
                }
                let inode = self.fs.inode(number, 0)?;
                match is_folder {
                    true => self.folder(&inode)?,
                    false => self.file(&inode)?,
                }
                self.attributes(&inode)?;
                bytes += node.size_bytes;
                progress(bytes, total);
            }
        }
        Ok(())
    }

    fn folder(&mut self, inode: &Inode) -> Result<()> {
        let parent = self
            .tree
            .node(inode.number)
            .map_or(ROOT, |node| node.parent);
        let mut entries = Vec::new();
        for (name, inode) in [(b".".as_slice(), inode.number), (b"..", parent)] {
            let (sort, name) = (folder::number_of(Kind::Directory), name.to_vec());
            entries.push(DirectoryEntry { inode, sort, name });
        }
        self.fs.walk_entries(inode, &mut |entry| {
            if let Some(node) = self.tree.entry(inode.number, &entry) {
                let sort = folder::number_of(node.kind);
                let (inode, name) = (entry.inode, entry.name);
                entries.push(DirectoryEntry { inode, sort, name });
            }
            Ok(())
        })?;
        let bytes = folder::encode(&entries);
        if bytes.len() > FOLDER_MAX_BYTES {
            let path = self.tree.path_of(self.fs, inode.number)?;
            return Err(Error::Unfit(format!(
                "restore(8) takes no directory with as many names as {} has",
                path.display()
            )));
        }
        let header = self.header(inode)?;
        self.done.folders += 1;
        self.out.whole(header, &bytes)
    }

    fn file(&mut self, inode: &Inode) -> Result<()> {
        let header = self.header(inode)?;
        self.done.files += 1;
        match inode.kind() {
            Kind::Regular => self.out.file(header, &Bytes::of(self.fs, inode)?),
            Kind::Link => self.out.whole(header, &self.fs.link_target(inode)?),
            _ => self.out.whole(header, &[]),
        }
    }

    fn attributes(&mut self, inode: &Inode) -> Result<()> {
        let encoded = attributes::encode(self.fs.stored_attributes(inode)?);
        for block in &encoded.blocks {
            debug_assert!(block.len() <= BLOCK_MAX_BYTES);
            let mut header = self.header_of_attributes(inode);
            header.has_attributes = true;
            self.out.whole(header, block)?;
        }
        for (one, what) in encoded.left_out {
            self.tell(inode, &format!("attribute {}: {what}", named(&one)))?;
        }
        Ok(())
    }

    fn tell(&mut self, inode: &Inode, what: &str) -> Result<()> {
        let path = self.tree.path_of(self.fs, inode.number)?;
        let what = what.to_owned();
        self.done.left_out.push(Omission { path, what });
        Ok(())
    }

    /// The header of a file, whose inode's fields fit as far as this tells nothing else.
    fn header(&mut self, inode: &Inode) -> Result<Header> {
        let header = self.header_of_attributes(inode);
        let times = [inode.accessed(), inode.modified(), inode.changed()];
        if times
            .iter()
            .any(|time| i32::MIN as i64 <= time.s && time.s < 0)
        {
            let what = "a time before 1970, which restore(8) takes for one of 2038 to 2106";
            self.tell(inode, what)?;
        }
        if times.iter().any(|time| stamp(*time).1) {
            self.tell(
                inode,
                "a time before 1901 or after 2038 is the nearest one within",
            )?;
        }
        self.done.cut_times += u64::from(times.iter().any(|time| !time.ns.is_multiple_of(1000)));
        if header.facts.device > DEVICE_MAX {
            let (major, minor) = inode.device();
            let what = format!("restore(8) makes no device {major}:{minor}");
            self.tell(inode, &what)?;
        }
        if inode.is_verity() {
            self.tell(
                inode,
                "that its contents are protected by fs-verity is not in the stream",
            )?;
        }
        if inode.kind() == Kind::Directory && inode.ignores_case() {
            self.tell(
                inode,
                "restore(8) makes a directory that does not ignore case",
            )?;
        }
        Ok(header)
    }

    fn header_of_attributes(&self, inode: &Inode) -> Header {
        let device = match inode.kind() {
            Kind::Character | Kind::Block => {
                let (major, minor) = inode.device();
                minor & 0xff | major << 8 | (minor & !0xff) << 12
            }
            _ => 0,
        };
        let mut header = Header::new(RecordKind::Inode, inode.number);
        header.facts = Facts {
            mode: inode.mode(),
            links: inode.links() as u16,
            size_bytes: 0,
            accessed: stamp(inode.accessed()).0,
            modified: stamp(inode.modified()).0,
            changed: stamp(inode.changed()).0,
            device,
            flags: inode.flags() & FLAGS_SEEN,
            sectors: u32::try_from(inode.sectors()).unwrap_or(u32::MAX),
            generation: inode.generation(),
            uid: inode.uid(),
            gid: inode.gid(),
        };
        header
    }
}

/// A time as the stream has it, and whether that is far from it.
fn stamp(time: Time) -> (Stamp, bool) {
    let s = time.s.clamp(i32::MIN.into(), i32::MAX.into());
    let stamp = Stamp {
        s: s as i32,
        us: time.ns / 1000,
    };
    (stamp, s != time.s)
}

/// An attribute's name, as far as it is known here.
fn named(one: &StoredAttribute) -> String {
    let name = crate::ext4::seen(one.clone()).map(|seen| seen.name);
    String::from_utf8_lossy(&name.unwrap_or_else(|_| one.name.clone())).into_owned()
}

/// The stream as it is written.
struct StreamWriter<'a, W: Write> {
    to: W,
    name: &'a Path,
    about: &'a StreamLabel,
    /// How many records it has.
    records: u64,
}

impl<W: Write> StreamWriter<'_, W> {
    /// Writes records, the last of which is filled up with zeros.
    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        let rest = bytes.len().next_multiple_of(RECORD_BYTES) - bytes.len();
        let written = self.to.write_all(bytes);
        let written = written.and_then(|()| self.to.write_all(&[0; RECORD_BYTES][..rest]));
        written.map_err(Error::file("write to", self.name))?;
        self.records += bytes.len().div_ceil(RECORD_BYTES) as u64;
        Ok(())
    }

    fn header(&mut self, header: &Header) -> Result<()> {
        self.put(&header.encode(self.about, self.records))
    }

    /// Writes a map of the inodes.
    fn map(
        &mut self,
        mut header: Header,
        inodes: u32,
        set: impl Iterator<Item = u32>,
    ) -> Result<()> {
        let bytes = (inodes as usize).div_ceil(8);
        let mut map = vec![0; bytes.next_multiple_of(RECORD_BYTES)];
        for number in set {
            let bit = number as usize - 1;
            map[bit / 8] |= 1 << (bit % 8);
        }
        header.count = (map.len() / RECORD_BYTES) as u32;
        header.facts.size_bytes = map.len() as u64;
        self.header(&header)?;
        self.put(&map)
    }

    /// Writes a file without holes.
    fn whole(&mut self, mut header: Header, bytes: &[u8]) -> Result<()> {
        header.facts.size_bytes = bytes.len() as u64;
        if bytes.is_empty() {
            return self.header(&header);
        }
        for part in bytes.chunks(FLAGS_MAX * RECORD_BYTES) {
            let records = part.len().div_ceil(RECORD_BYTES);
            header.count = records as u32;
            header.flags = [false; FLAGS_MAX];
            header.flags[..records].fill(true);
            self.header(&header)?;
            self.put(part)?;
            header.sort = RecordKind::More;
        }
        Ok(())
    }

    /// Writes a file with its holes.
    fn file(&mut self, mut header: Header, bytes: &Bytes<'_, ImageSpace>) -> Result<()> {
        header.facts.size_bytes = bytes.size;
        if bytes.size == 0 {
            return self.header(&header);
        }
        let mut buffer = vec![0; FLAGS_MAX * RECORD_BYTES];
        let mut at = 0;
        while at < bytes.size {
            let end = (at + buffer.len() as u64).min(bytes.size);
            header.count = (end - at).div_ceil(RECORD) as u32;
            header.flags = [false; FLAGS_MAX];
            let pieces = bytes.within(at..end).collect::<Vec<_>>();
            for piece in &pieces {
                let first = (piece.start - at) / RECORD;
                let last = (piece.end - at).div_ceil(RECORD);
                header.flags[first as usize..last as usize].fill(true);
            }
            self.header(&header)?;
            for piece in pieces {
                let piece_bytes = &mut buffer[..(piece.end - piece.start) as usize];
                bytes.read(piece.start, piece_bytes)?;
                self.put(piece_bytes)?;
            }
            header.sort = RecordKind::More;
            at = end;
        }
        Ok(())
    }

    /// Writes the end; gives the stream's length.
    fn finish(&mut self) -> Result<u64> {
        let last = self.records + BLOCK_RECORDS;
        for _ in self.records..last.next_multiple_of(BLOCK_RECORDS) {
            self.header(&Header::new(RecordKind::End, 0))?;
        }
        self.to
            .flush()
            .map_err(Error::file("write to", self.name))?;
        Ok(self.records * RECORD)
    }
}
