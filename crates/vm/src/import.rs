//! A snapshot's memory file becomes an image.

use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::slice;

use abi::spans::{Ranges, subtract};
use abi::{Addr, PAGE_BYTES};
use image::{Compression, Facts, ImageId, Run, RunKind, Seal, Writer};
use pages::source::{Object, allocated};
use pages::{Drained, Extent};
use store::Images;

use crate::place::{self, MEMORY};
use crate::records::MonitorState;
use crate::{Error, Result};

/// The longest state file, in bytes: Firecracker's are some ten kilobytes.
const STATE_MAX_BYTES: u64 = 64 << 20;

/// What is to be imported, and where to.
#[derive(Clone, Debug)]
pub struct ImportOptions {
    /// Where the image goes.
    pub images: Images,
    /// The memory file of the snapshot: whole pages, in the order of the machine's addresses.
    /// Holes are pages of zeros, or, of a snapshot over a parent, pages that have not changed.
    pub memory: PathBuf,
    /// The state file.
    pub vmstate: Option<PathBuf>,
    /// The image that the snapshot is a difference from.
    pub parent: Option<Images>,
    /// How pages are compressed.
    pub compress: Option<Compression>,
    /// Whether to wait until the image is on the disk.
    pub sync: bool,
}

/// What was imported.
#[derive(Clone, Copy, Debug)]
pub struct Imported {
    /// The image.
    pub image: ImageId,
    /// Pages of the memory.
    pub pages: u64,
    /// Those that are stored.
    pub stored_pages: u64,
    /// Those that are zero.
    pub zero_pages: u64,
    /// Those that are the parent's.
    pub parent_pages: u64,
}

/// Makes an image of a snapshot. Holes are not read, pages of zeros not stored, nor pages that are
/// as the parent has them.
///
/// Calls `progress` with the bytes done and to be done.
///
/// # Errors
/// Nothing is left in the image's directory then, and an image that was there stays.
pub fn import(
    options: &ImportOptions,
    facts: Facts,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Imported> {
    let path = &options.memory;
    let (file, pages) = open_memory(path)?;
    let state = options.vmstate.as_deref().map(read_state).transpose()?;
    let parent = options.parent.as_ref();
    let writer = place::writer(&options.images, parent, pages, options.compress)?;
    let data = data(&file, pages)?;
    let read = file.try_clone().map_err(Error::file("open", path))?;
    let source = Object::new(OwnedFd::from(read));
    let imported = match writer.parent().cloned() {
        None => {
            zeros(&writer, &gaps(&data, pages));
            let drained = drain(&source, &extents(&data), &writer, progress)?;
            let holes = pages - drained.read_pages;
            Imported {
                zero_pages: holes + drained.zero_pages,
                ..Imported::of(&writer, pages, &drained)
            }
        }
        Some(parent) => {
            let all = extents(&data);
            // What differs is read twice, the second time out of the cache.
            let total = all.iter().map(Extent::bytes).sum::<u64>();
            let compared = |done| progress(done / 2, total);
            let changed = pages::changed(&source, &all, &parent, &compared)?;
            let kept = gaps(
                &changed.iter().map(Extent::numbers).collect::<Ranges<_>>(),
                pages,
            );
            writer.inherit_described(MEMORY, &kept)?;
            let less = total - changed.iter().map(Extent::bytes).sum::<u64>() / 2;
            let drained = drain(&source, &changed, &writer, &|done, _| {
                progress((less + done / 2).min(total), total)
            })?;
            Imported {
                parent_pages: pages - drained.read_pages,
                ..Imported::of(&writer, pages, &drained)
            }
        }
    };
    check_length(&file, path, pages)?;
    if let Some(bytes) = state {
        let monitor = "firecracker".to_owned();
        writer.record(MonitorState { monitor, bytes }.record());
    }
    writer.seal(Seal {
        durable: options.sync,
        facts,
    })?;
    log::info!("image {} is whole: {imported:?}", imported.image);
    Ok(imported)
}

impl Imported {
    fn of(writer: &Writer, pages: u64, drained: &Drained) -> Self {
        Self {
            image: writer.id(),
            pages,
            stored_pages: drained.stored_pages,
            zero_pages: drained.zero_pages,
            parent_pages: 0,
        }
    }
}

fn open_memory(path: &Path) -> Result<(File, u64)> {
    let file = File::open(path).map_err(Error::file("open", path))?;
    let facts = file.metadata().map_err(Error::file("look at", path))?;
    let (name, bytes) = (path.display(), facts.len());
    if !facts.is_file() {
        return Err(Error::Unfit(format!("{name} is not a regular file")));
    }
    if bytes == 0 || !bytes.is_multiple_of(PAGE_BYTES) {
        let what = format!("{name} is no machine's memory: it has {bytes} bytes, not whole pages");
        return Err(Error::Unfit(what));
    }
    Ok((file, bytes / PAGE_BYTES))
}

/// What a file loses while it is read would be read as zeros.
fn check_length(file: &File, path: &Path, pages: u64) -> Result<()> {
    let facts = file.metadata().map_err(Error::file("look at", path))?;
    match facts.len() == pages * PAGE_BYTES {
        true => Ok(()),
        false => Err(Error::Unfit(format!(
            "{} changed its length while it was read",
            path.display()
        ))),
    }
}

/// Reads a monitor's state file.
///
/// # Errors
/// [`Error::File`], [`Error::Unfit`].
pub(crate) fn read_state(path: &Path) -> Result<Vec<u8>> {
    let file = File::open(path).map_err(Error::file("open", path))?;
    let mut bytes = Vec::new();
    let read = std::io::Read::read_to_end(
        &mut std::io::Read::take(file, STATE_MAX_BYTES + 1),
        &mut bytes,
    );
    read.map_err(Error::file("read", path))?;
    if bytes.len() as u64 > STATE_MAX_BYTES {
        return Err(Error::Unfit(format!(
            "{} is no state file: it is larger than {STATE_MAX_BYTES} bytes",
            path.display()
        )));
    }
    Ok(bytes)
}

/// The pages of a file that are no holes.
fn data(file: &File, pages: u64) -> Result<Ranges<u64>> {
    let spans = match allocated(file.as_fd()) {
        Ok(spans) => spans,
        // The file system does not tell: all of it is read.
        Err(error) => {
            log::debug!("holes are read: {error}");
            return Ok(std::iter::once(0..pages).collect());
        }
    };
    let ranges = spans.iter().map(|span| {
        let end = span.end.0.div_ceil(PAGE_BYTES);
        span.start.page().min(pages)..end.min(pages)
    });
    Ok(ranges.collect())
}

fn extents(ranges: &[Range<u64>]) -> Vec<Extent> {
    let extent = |range: &Range<u64>| Extent {
        space: MEMORY,
        first_page: range.start,
        at: Addr::of_page(range.start),
        pages: range.end - range.start,
    };
    ranges.iter().map(extent).collect()
}

/// What `ranges` leave of `0..pages`.
fn gaps(ranges: &[Range<u64>], pages: u64) -> Ranges<u64> {
    subtract(slice::from_ref(&(0..pages)), ranges)
}

/// Notes that pages are zero.
fn zeros(writer: &Writer, ranges: &[Range<u64>]) {
    for range in ranges {
        let mut first_page = range.start;
        while first_page < range.end {
            let pages = (range.end - first_page).min(u64::from(u32::MAX)) as u32;
            writer.mark(Run {
                space: MEMORY,
                first_page,
                pages,
                kind: RunKind::Zero,
            });
            first_page += u64::from(pages);
        }
    }
}

fn drain(
    source: &Object,
    extents: &[Extent],
    writer: &Writer,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<Drained> {
    let total = extents.iter().map(Extent::bytes).sum::<u64>();
    writer.reserve(total)?;
    Ok(pages::drain(source, extents, writer, &|done| {
        progress(done, total)
    })?)
}

#[cfg(test)]
#[allow(clippy::single_range_in_vec_init)] // ranges are what is compared
mod tests {
    use super::*;

    #[test]
    fn gaps_are_what_is_left() {
        assert_eq!(gaps(&[], 5), [0..5]);
        assert_eq!(gaps(&[0..5], 5), []);
        assert_eq!(gaps(&[1..2, 2..3, 4..5], 7), [0..1, 3..4, 5..7]);
    }
}
