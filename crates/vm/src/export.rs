//! An image becomes a snapshot's memory file again.

use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use abi::{Addr, PAGE_BYTES};
use image::Reader;
use pages::{Extent, sink};
use store::Images;
use tempfile::NamedTempFile;

use crate::place::{self, MEMORY};
use crate::records::Records;
use crate::{Error, Result};

/// Options of an export.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// Place of the image.
    pub images: Images,
    /// The memory file to be written; one that is there is replaced when the new one is whole.
    pub memory: PathBuf,
    /// The state file to be written.
    pub vmstate: Option<PathBuf>,
    /// True to wait until the files are on the disk.
    pub sync: bool,
}

/// Summary of an export.
#[derive(Clone, Copy, Debug)]
pub struct ExportSummary {
    /// Pages of the memory.
    pub pages: u64,
    /// Those that were written; the others are holes.
    pub written_pages: u64,
    /// Bytes of the state file.
    pub state_bytes: Option<u64>,
}

/// Writes the memory file, and the state file, of an image. Every page is verified; pages of zeros
/// are holes.
///
/// Calls `progress` with the bytes done and to be done.
///
/// # Errors
/// No file is there then that was not there before. [`Error::Unfit`] also where a state file is
/// wanted and the image has none.
pub fn export(
    options: &ExportOptions,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<ExportSummary> {
    let (base, pages) = place::open(&options.images)?;
    let reader = &*base.reader;
    let state = Records::of(reader, pages)?.state;
    let state = match (&options.vmstate, state) {
        (None, _) => None,
        (Some(path), Some(state)) => Some((path, state.bytes)),
        (Some(_), None) => {
            return Err(Error::Unfit(format!(
                "the image in {} has no state file",
                options.images
            )));
        }
    };
    let path = &options.memory;
    let new = beside(path)?;
    let written_pages = write_memory(reader, pages, new.as_file(), path, progress)?;
    let state = match state {
        None => None,
        Some((path, bytes)) => {
            let mut file = beside(path)?;
            let written = file.write_all(&bytes);
            written.map_err(Error::file("write to", path))?;
            Some((file, path, bytes.len() as u64))
        }
    };
    finish(new, path, options.sync)?;
    let state_bytes = state.as_ref().map(|state| state.2);
    if let Some((file, path, _)) = state {
        finish(file, path, options.sync)?;
    }
    Ok(ExportSummary {
        pages,
        written_pages,
        state_bytes,
    })
}

fn write_memory(
    reader: &Reader,
    pages: u64,
    file: &File,
    path: &Path,
    progress: &(dyn Fn(u64, u64) + Sync),
) -> Result<u64> {
    let sized = file.set_len(pages * PAGE_BYTES);
    sized.map_err(Error::file("make room in", path))?;
    let whole = Extent {
        space: MEMORY,
        first_page: 0,
        at: Addr(0),
        pages,
    };
    let placed = pages::place(reader, &[whole])?;
    let total: u64 = placed.iter().map(|piece| u64::from(piece.pages)).sum();
    let fd = file.try_clone().map_err(Error::file("write to", path))?;
    let sink = sink::Object::new(fd.into());
    let filled = pages::fill(reader, &placed, &sink, &|done| {
        progress(done, total * PAGE_BYTES);
    })?;
    Ok(filled.pages)
}

/// A new file in the folder of `path`, which goes unless it is given that name.
fn beside(path: &Path) -> Result<NamedTempFile> {
    if let Ok(facts) = std::fs::symlink_metadata(path)
        && !facts.is_file()
    {
        let what = format!("{} is there and no regular file", path.display());
        return Err(Error::Unfit(what));
    }
    let folder = path.parent().filter(|folder| *folder != Path::new(""));
    let folder = folder.unwrap_or(Path::new("."));
    // A machine's memory has its secrets: the file's mode is 0600.
    tempfile::Builder::new()
        .prefix(".stillframe-")
        .tempfile_in(folder)
        .map_err(Error::file("make a file for", path))
}

fn finish(file: NamedTempFile, path: &Path, sync: bool) -> Result<()> {
    if sync {
        let synced = file.as_file().sync_all();
        synced.map_err(Error::file("write", path))?;
    }
    let named = file.persist(path);
    named.map_err(|error| Error::file("make", path)(error.error))?;
    Ok(())
}
