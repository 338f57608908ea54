//! An image becomes a volume again.

use std::fs::{File, OpenOptions};
use std::io::{Seek, SeekFrom};
use std::ops::Range;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use abi::Addr;
use image::PAGE_BYTES;
use pages::{Extent, Sink, source};
use rustix::fs::OFlags;
use rustix::io::Errno;
use store::Images;
use sys::new_file::NewFile;

use crate::device::{is_mounted, refuse_attached};
use crate::dump::Progress;
use crate::place::OpenImage;
use crate::{Error, FILE_MODE, Result};

/// How many writes, of two megabytes each at most, are under way at a time past the cache.
const DEPTH: usize = 8;

/// Options of a restore.
#[derive(Clone, Debug)]
pub struct RestoreOptions {
    /// Place of the image.
    pub images: Images,
    /// A device, which is overwritten, or a file, which is replaced when the new one is whole.
    pub target: PathBuf,
    /// True if what was written is read again and compared.
    pub verify: bool,
    /// True to wait until it is on the disk.
    pub sync: bool,
}

/// Summary of a restore.
#[derive(Clone, Copy, Debug)]
pub struct RestoreSummary {
    /// The length of the file system in bytes.
    pub len_bytes: u64,
    /// Pages that were written; the others are holes, or the device's business.
    pub written_pages: u64,
    /// Pages that were read again and are what was written.
    pub verified_pages: u64,
}

/// Writes a volume.
///
/// # Errors
/// A file is as it was before then. A device may have been written to.
pub fn restore(options: &RestoreOptions, progress: Progress<'_>) -> Result<RestoreSummary> {
    let opened = OpenImage::open(&options.images)?;
    let (len_bytes, path) = (opened.state.len_bytes, &options.target);
    let facts = std::fs::symlink_metadata(path);
    if is_device(path) {
        let file = open_device(path, len_bytes)?;
        clear(&file, path, &opened)?;
        let restored = write(&opened, &file, options, progress)?;
        return Ok(restored);
    }
    match facts {
        Ok(facts) if !facts.is_file() => {
            let what = format!(
                "{} is there, and neither a device nor a file",
                path.display()
            );
            return Err(Error::Unfit(what));
        }
        Ok(_) => refuse_attached(path)?,
        Err(_) => {}
    }
    let new = NewFile::beside(path, FILE_MODE).map_err(Error::file("make a file for", path))?;
    let sized = new.file.set_len(len_bytes);
    sized.map_err(Error::file("make room in", path))?;
    let restored = write(&opened, &new.file, options, progress)?;
    new.publish().map_err(Error::file("make", path))?;
    Ok(restored)
}

/// Tells whether this is a block device.
pub(crate) fn is_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|facts| facts.file_type().is_block_device())
}

/// How long a device may be in use that is mounted nowhere: what a killed restore has mounted goes
/// a moment after it.
const PATIENCE: Duration = Duration::from_secs(2);

/// Opens a device as the only one who does.
fn exclusively(options: &OpenOptions, path: &Path) -> std::io::Result<File> {
    let until = Instant::now() + PATIENCE;
    loop {
        match options.open(path) {
            Err(error)
                if error.raw_os_error() == Some(Errno::BUSY.raw_os_error())
                    && Instant::now() < until
                    && !is_mounted(path) =>
            {
                std::thread::sleep(Duration::from_millis(5));
            }
            opened => return opened,
        }
    }
}

/// Opens a device that nobody else uses, and that is large enough.
fn open_device(path: &Path, len_bytes: u64) -> Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true);
    options.custom_flags(OFlags::EXCL.bits().cast_signed());
    let mut file = match exclusively(&options, path) {
        Err(error) if error.raw_os_error() == Some(Errno::BUSY.raw_os_error()) => {
            let what = format!(
                "{} is in use: it is mounted, or part of a device",
                path.display()
            );
            return Err(Error::Unfit(what));
        }
        other => other.map_err(Error::file("open", path))?,
    };
    let have = file
        .seek(SeekFrom::End(0))
        .map_err(Error::file("look at", path))?;
    match have >= len_bytes {
        true => Ok(file),
        false => Err(Error::Unfit(format!(
            "{} has {have} bytes, and the volume {len_bytes}",
            path.display()
        ))),
    }
}

/// Has what is zero read as zeros, and gives back what is free where the device takes that.
fn clear(device: &File, path: &Path, opened: &OpenImage) -> Result<()> {
    let (reader, space, len_bytes) = (&opened.base.reader, opened.space, opened.state.len_bytes);
    let bytes = |pages: Range<u64>| {
        let page = PAGE_BYTES as u64;
        pages.start * page..(pages.end * page).min(len_bytes)
    };
    let len_pages = len_bytes.div_ceil(PAGE_BYTES as u64);
    let mut free = 0;
    for known in reader.described(space, 0, len_pages) {
        give_back(device, bytes(free..known.start));
        free = known.end;
        let mut page = known.start;
        while page < known.end {
            let located = reader.locate(space, page, known.end - page)?;
            let next = page + u64::from(located.pages);
            if located.part.is_none() {
                let Range { start: at, end } = bytes(page..next);
                let done = sys::freeze::zero_out(device, at, end - at);
                done.map_err(Error::file("clear", path))?;
            }
            page = next;
        }
    }
    give_back(device, bytes(free..len_pages));
    Ok(())
}

fn give_back(device: &File, bytes: Range<u64>) {
    // A device that has no use for that keeps what is there: nothing reads it.
    let (at, len) = (bytes.start, bytes.end.saturating_sub(bytes.start));
    if len > 0 && sys::freeze::discard(device, at, len).is_err() {
        log::debug!("{len} bytes at {at} are not discarded");
    }
}

fn write(
    opened: &OpenImage,
    file: &File,
    options: &RestoreOptions,
    progress: Progress<'_>,
) -> Result<RestoreSummary> {
    let (reader, space, len_bytes) = (&*opened.base.reader, opened.space, opened.state.len_bytes);
    let path = &options.target;
    let len_pages = len_bytes.div_ceil(PAGE_BYTES as u64);
    let whole = Extent {
        space,
        first_page: 0,
        at: Addr(0),
        pages: len_pages,
    };
    let placed = pages::place(reader, &[whole])?;
    let total: u64 = placed.iter().map(|piece| u64::from(piece.pages)).sum();
    let same = || file.try_clone().map_err(Error::file("write to", path));
    let direct = direct(file);
    let sink = Target {
        file,
        direct: direct.as_ref(),
        path,
        len_bytes,
    };
    let filled = pages::fill(reader, &placed, &sink, &|done| {
        progress(done, total * PAGE_BYTES as u64);
    })?;
    if options.sync || options.verify {
        file.sync_all().map_err(Error::file("write", path))?;
    }
    let mut verified_pages = 0;
    if options.verify {
        let known = reader.described(space, 0, len_pages);
        let extents = known.iter().map(|range| Extent {
            space,
            first_page: range.start,
            at: Addr::of_page(range.start),
            pages: range.end - range.start,
        });
        let extents = extents.collect::<Vec<_>>();
        // What was written is not to be had from memory.
        let dropped = rustix::fs::fadvise(file, 0, None, rustix::fs::Advice::DontNeed);
        dropped.map_err(Error::file("read", path))?;
        // A device can go on behind it.
        let source = source::Object::until(same()?.into(), len_bytes);
        let differing = pages::changed(&source, &extents, reader, &|_| ())?;
        if let Some(first) = differing.first() {
            return Err(Error::Differs {
                path: path.clone(),
                page: first.first_page,
            });
        }
        verified_pages = extents.iter().map(|extent| extent.pages).sum();
    }
    Ok(RestoreSummary {
        len_bytes,
        written_pages: filled.pages,
        verified_pages,
    })
}

/// The same target past the kernel's cache, where it can be written to so: each thread's megabytes
/// go to the disk as they are, and in order.
fn direct(file: &File) -> Option<File> {
    let mut options = OpenOptions::new();
    options.write(true);
    options.custom_flags(OFlags::DIRECT.bits().cast_signed());
    // Not by its name: a file may have none yet, and a device is in use, by us.
    let opened = options.open(format!("/proc/self/fd/{}", file.as_raw_fd()));
    let opened = opened.inspect_err(|error| log::debug!("written through the cache: {error}"));
    opened.ok()
}

/// The sink of the pages: of the last one it takes as much as the volume has.
struct Target<'a> {
    file: &'a File,
    direct: Option<&'a File>,
    path: &'a Path,
    len_bytes: u64,
}

impl Sink for Target<'_> {
    fn depth(&self) -> Option<usize> {
        // A write into the cache waits for nothing but a processor.
        self.direct.map(|_| DEPTH)
    }

    fn fill(&self, pieces: &[(Addr, &[u8])]) -> pages::Result<()> {
        for (at, bytes) in pieces {
            let len = self.len_bytes.saturating_sub(at.0).min(bytes.len() as u64) as usize;
            let whole = len / PAGE_BYTES * PAGE_BYTES;
            let direct = self.direct.unwrap_or(self.file);
            let written = direct.write_all_at(&bytes[..whole], at.0);
            // What is not a whole page goes through the cache.
            let rest = at.0 + whole as u64;
            let written = written.and_then(|()| self.file.write_all_at(&bytes[whole..len], rest));
            let failed = Error::file("write to", self.path);
            written.map_err(|source| pages::Error::Other(Box::new(failed(source))))?;
        }
        Ok(())
    }
}
