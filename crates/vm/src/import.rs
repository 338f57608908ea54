//! A snapshot's memory file becomes an image.

use std::fs::File;
use std::path::{Path, PathBuf};

use abi::PAGE_BYTES;
use image::{Compression, Facts, ImageId, Seal, Writer};
use store::Images;

use crate::place::{self, MEMORY};
use crate::records::MonitorState;
use crate::sparse::{self, Holes, Memory, PageCounts};
use crate::{Error, Result};

/// The longest state file, in bytes: Firecracker's are some ten kilobytes.
const STATE_MAX_BYTES: u64 = 64 << 20;

/// Options of an import.
#[derive(Clone, Debug)]
pub struct ImportOptions {
    /// Directory of the new image.
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
    /// True to wait until the image is on the disk.
    pub sync: bool,
}

/// Summary of an import.
#[derive(Clone, Copy, Debug)]
pub struct ImportSummary {
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
) -> Result<ImportSummary> {
    let path = &options.memory;
    let (file, pages) = open_memory(path)?;
    let state = options.vmstate.as_deref().map(read_state).transpose()?;
    let parent = options.parent.as_ref();
    let writer = place::writer(&options.images, parent, pages, options.compress)?;
    let read = file.try_clone().map_err(Error::file("open", path))?;
    let memory = Memory::new(read.into(), MEMORY, pages, 0);
    let fates = sparse::store(&[memory], &writer, Holes::Unchanged, false, progress)?;
    let imported = ImportSummary::of(&writer, fates);
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

impl ImportSummary {
    fn of(writer: &Writer, fates: PageCounts) -> Self {
        Self {
            image: writer.id(),
            pages: fates.pages,
            stored_pages: fates.stored_pages,
            zero_pages: fates.zero_pages,
            parent_pages: fates.parent_pages,
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
