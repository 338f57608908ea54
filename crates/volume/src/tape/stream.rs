//! A stream as it is read: what it says is a claim, and no more of it is in memory than one header
//! has, a directory, or a map of inodes.

use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

use super::record::{FLAGS_MAX, Header, RECORD_BYTES, RecordKind, StreamLabel};
use crate::{Error, Result};

const RECORD: u64 = RECORD_BYTES as u64;
/// As many inodes as have numbers.
const MAP_MAX_RECORDS: u32 = 1 << 19;

/// A stream that is open, behind its maps.
pub struct Stream {
    from: Box<dyn Read>,
    path: PathBuf,
    records: u64,
    /// Its label.
    pub about: StreamLabel,
    /// The inodes that were in use, a bit for each from 1 on.
    pub used: Vec<u8>,
    pub dumped: Vec<u8>,
    /// A header that was read ahead.
    next: Option<Header>,
}

impl Stream {
    /// Reads a stream up to its first file; errors call it `path`.
    ///
    /// # Errors
    /// [`Error::Unfit`] where it is none, or one of a sort that is not read here;
    /// [`Error::Stream`] where it is damaged; [`Error::File`].
    pub fn open(from: Box<dyn Read>, path: PathBuf) -> Result<Self> {
        let mut this = Self {
            from,
            path,
            records: 0,
            about: StreamLabel::default(),
            used: Vec::new(),
            dumped: Vec::new(),
            next: None,
        };
        let mut first = [0; RECORD_BYTES];
        this.read(&mut first)?;
        let unfit = |what| Error::Unfit(format!("{}: {what}", this.path.display()));
        let decoded = Header::decode(&first);
        let (header, about) =
            decoded.map_err(|what| unfit(format!("it is not what dump(8) writes: {what}")))?;
        if header.sort != RecordKind::Tape {
            return Err(unfit("it does not begin with the header of a dump".into()));
        }
        if header.is_compressed {
            return Err(unfit(
                "it is compressed by dump(8), which is not read here".into(),
            ));
        }
        if header.volume != 1 {
            return Err(unfit(format!("it is volume {} of a dump", header.volume)));
        }
        this.about = about;
        this.used = this.map(RecordKind::Used)?;
        this.dumped = this.map(RecordKind::Dumped)?;
        Ok(this)
    }

    /// Returns the source.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How many files it lists.
    pub fn files(&self) -> u64 {
        let ones = self.dumped.iter().map(|byte| u64::from(byte.count_ones()));
        ones.sum()
    }

    /// Says what of the stream cannot be true, where it was read up to.
    pub fn damaged(&self, what: impl Into<String>) -> Error {
        Error::Stream {
            path: self.path.clone(),
            record: self.records.saturating_sub(1),
            what: what.into(),
        }
    }

    fn read(&mut self, bytes: &mut [u8]) -> Result<()> {
        match self.from.read_exact(bytes) {
            Ok(()) => {
                self.records += bytes.len() as u64 / RECORD;
                Ok(())
            }
            Err(error) if error.kind() == ErrorKind::UnexpectedEof => {
                self.records += 1;
                Err(self.damaged("the stream ends there; of several volumes, none is read here"))
            }
            Err(error) => Err(Error::file("read", &self.path)(error)),
        }
    }

    fn header(&mut self) -> Result<Header> {
        if let Some(header) = self.next.take() {
            return Ok(header);
        }
        let mut bytes = [0; RECORD_BYTES];
        self.read(&mut bytes)?;
        let decoded = Header::decode(&bytes);
        let (header, about) = decoded.map_err(|what| self.damaged(what))?;
        if header.sort == RecordKind::Tape {
            return Err(self.damaged("another volume begins, which is not read here"));
        }
        if about.date_s != self.about.date_s {
            return Err(self.damaged("it is of another dump"));
        }
        Ok(header)
    }

    fn map(&mut self, sort: RecordKind) -> Result<Vec<u8>> {
        let header = self.header()?;
        if header.sort != sort {
            return Err(self.damaged(format!("{:?} instead of {sort:?}", header.sort)));
        }
        if header.count > MAP_MAX_RECORDS {
            return Err(self.damaged(format!("a map of {} records", header.count)));
        }
        let mut map = Vec::new();
        for _ in 0..header.count {
            let mut record = [0; RECORD_BYTES];
            self.read(&mut record)?;
            map.extend(record);
        }
        Ok(map)
    }

    /// The next file's header, or that of attributes of the last one; none at the end.
    pub fn file(&mut self) -> Result<Option<Header>> {
        loop {
            let header = self.header()?;
            match header.sort {
                RecordKind::Inode if header.inode == 0 => {
                    return Err(self.damaged("a file without a number"));
                }
                RecordKind::Inode => return Ok(Some(header)),
                RecordKind::End => return Ok(None),
                // dump(8) writes blocks behind the end of a file as well.
                RecordKind::More => self.skip(&header)?,
                other => return Err(self.damaged(format!("{other:?} among files"))),
            }
        }
    }

    /// The header of attributes of a file that was read just before, if there are more of them.
    pub fn attributes_of(&mut self, inode: u32) -> Result<Option<Header>> {
        let header = self.file()?;
        let is_its = |header: &Header| header.has_attributes && header.inode == inode;
        match header {
            Some(header) if is_its(&header) => Ok(Some(header)),
            other => {
                // The end is there for whoever asks for the next file.
                self.next = Some(other.unwrap_or_else(|| Header::new(RecordKind::End, 0)));
                Ok(None)
            }
        }
    }

    fn skip(&mut self, header: &Header) -> Result<()> {
        let count = header.flags[..header.count as usize].iter();
        let mut record = [0; RECORD_BYTES];
        for _ in count.filter(|is_there| **is_there) {
            self.read(&mut record)?;
        }
        Ok(())
    }

    /// Gives the bytes of a file, with their offsets; what is missing in between are holes. Tells
    /// up to where the stream has said what there is.
    ///
    /// # Errors
    /// [`Error::Stream`], [`Error::File`]; those of `each`.
    pub fn contents(
        &mut self,
        first: &Header,
        each: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<u64> {
        let size = first.facts.size_bytes;
        let mut header = first.clone();
        let mut buffer = vec![0; FLAGS_MAX * RECORD_BYTES];
        let mut at = 0;
        loop {
            let flags = &header.flags[..header.count as usize];
            for run in flags.chunk_by(|one, other| one == other) {
                let len = run.len() as u64 * RECORD;
                if run[0] {
                    let bytes = &mut buffer[..len as usize];
                    self.read(bytes)?;
                    let known = size.saturating_sub(at).min(len) as usize;
                    if known > 0 {
                        each(at, &bytes[..known])?;
                    }
                }
                at += len;
            }
            let next = self.header()?;
            if next.sort != RecordKind::More || next.inode != first.inode || at >= size {
                self.next = Some(next);
                return Ok(at.min(size));
            }
            header = next;
        }
    }

    /// All bytes of a file that is no longer than `most`.
    ///
    /// # Errors
    /// [`Error::Stream`], also where it is longer; [`Error::File`].
    pub fn whole(&mut self, first: &Header, most: usize) -> Result<Vec<u8>> {
        let size = first.facts.size_bytes;
        if size > most as u64 {
            return Err(self.damaged(format!("inode {} has {size} bytes", first.inode)));
        }
        let mut bytes = Vec::new();
        self.contents(first, &mut |at, part| {
            bytes.resize(at as usize, 0);
            bytes.extend(part);
            Ok(())
        })?;
        bytes.resize(size as usize, 0);
        Ok(bytes)
    }
}

/// Tells whether a map has an inode.
pub fn has(map: &[u8], inode: u32) -> bool {
    let Some(bit) = inode.checked_sub(1) else {
        return false;
    };
    let byte = map.get(bit as usize / 8);
    byte.is_some_and(|byte| byte & (1 << (bit % 8)) != 0)
}
