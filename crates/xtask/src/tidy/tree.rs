//! The files of the source tree.

use std::path::{Path, PathBuf};

use crate::error::Result;
use crate::repo;

/// Lists the `.rs` files below `crates/`, relative to `root`, sorted.
pub fn rust_files(root: &Path) -> Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    let mut folders = vec![PathBuf::from("crates")];
    while let Some(folder) = folders.pop() {
        for (path, is_folder) in entries(root, &folder)? {
            match is_folder {
                true if path.file_name().is_some_and(|name| name == "target") => {}
                true => folders.push(path),
                false if path.extension().is_some_and(|ending| ending == "rs") => files.push(path),
                false => {}
            }
        }
    }
    files.sort();
    Ok(files)
}

/// Lists a folder's entries, relative to `root`, sorted, each with whether it is a folder.
pub fn entries(root: &Path, folder: &Path) -> Result<Vec<(PathBuf, bool)>> {
    let list = || -> std::io::Result<Vec<(PathBuf, bool)>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(root.join(folder))? {
            let entry = entry?;
            found.push((folder.join(entry.file_name()), entry.file_type()?.is_dir()));
        }
        found.sort();
        Ok(found)
    };
    list().map_err(repo::file_error("list", &root.join(folder)))
}

pub fn read(root: &Path, path: &Path) -> Result<String> {
    std::fs::read_to_string(root.join(path)).map_err(repo::file_error("read", &root.join(path)))
}
