//! Files whose pages the kernel has to read from the disk again.
use std::fs::{self, File};
use std::path::Path;

use rustix::fs::{Advice, fadvise};

use crate::error::{Result, file_error, kernel_error};

/// Copies a file, or a folder of files.
///
/// # Errors
/// Those of the files.
pub fn copy(from: &Path, to: &Path) -> Result<()> {
    if !from.is_dir() {
        return fs::copy(from, to)
            .map(drop)
            .map_err(file_error("copy", from));
    }
    fs::create_dir_all(to).map_err(file_error("make", to))?;
    for entry in fs::read_dir(from)
        .map_err(file_error("read", from))?
        .flatten()
    {
        copy(&entry.path(), &to.join(entry.file_name()))?;
    }
    Ok(())
}

/// Has the kernel keep nothing of a file, or of a folder of files.
///
/// # Errors
/// Those of the files.
pub fn forget(path: &Path) -> Result<()> {
    if path.is_dir() {
        let entries = fs::read_dir(path).map_err(file_error("read", path))?;
        return entries
            .flatten()
            .try_for_each(|entry| forget(&entry.path()));
    }
    let file = File::open(path).map_err(file_error("open", path))?;
    // Only what is on the disk is forgotten.
    file.sync_all().map_err(file_error("write", path))?;
    fadvise(&file, 0, None, Advice::DontNeed).map_err(kernel_error("forget a file"))
}
