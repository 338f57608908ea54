//! Memory like that of programs that work with text: files of this machine, one behind the other.
use std::path::{Path, PathBuf};

use crate::error::{Error, Result, file_error};

/// Where the files are from: C headers, Python's and Perl's libraries, data of programs.
const FOLDERS: [&str; 4] = [
    "/usr/include",
    "/usr/lib/python3.11",
    "/usr/share/perl",
    "/usr/share",
];

/// How much is taken of each, at most.
const FOLDER_BYTES: usize = 16 << 20;

/// What such memory is, for a page.
pub const WHAT: &str = "Memory is text of files of the machine: the first 16 MiB each of the text \
    files (UTF-8, in the order of their names) below `/usr/include`, `/usr/lib/python3.11`, \
    `/usr/share/perl` and `/usr/share`, one behind the other, over and over.";

/// Fills memory with text.
///
/// # Errors
/// When a folder cannot be read, or the machine has too little text to mean anything.
pub fn fill(memory: &mut [u8]) -> Result<()> {
    const LEAST_BYTES: usize = 4 << 20;
    let mut text = Vec::new();
    for folder in FOLDERS.map(Path::new).iter().filter(|path| path.is_dir()) {
        let end = text.len() + FOLDER_BYTES;
        add(folder, &mut text, end)?;
        text.truncate(end);
    }
    if text.len() < LEAST_BYTES {
        let what = "this machine has too few text files".into();
        return Err(Error::Nothing { what });
    }
    for part in memory.chunks_mut(text.len()) {
        part.copy_from_slice(&text[..part.len()]);
    }
    Ok(())
}

/// Adds the text files below a folder, up to some length.
fn add(folder: &Path, text: &mut Vec<u8>, end: usize) -> Result<()> {
    let list = std::fs::read_dir(folder).map_err(file_error("list", folder))?;
    let mut paths: Vec<PathBuf> = list.flatten().map(|entry| entry.path()).collect();
    paths.sort_unstable();
    for path in paths {
        if text.len() >= end {
            break;
        }
        let Ok(metadata) = std::fs::symlink_metadata(&path) else {
            continue;
        };
        if metadata.is_dir() {
            add(&path, text, end)?;
        } else if metadata.is_file() {
            let bytes = std::fs::read(&path).map_err(file_error("read", &path))?;
            if std::str::from_utf8(&bytes).is_ok_and(|text| !text.contains('\0')) {
                text.extend_from_slice(&bytes);
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_files_are_taken_in_order_up_to_a_length() {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::create_dir(folder.path().join("b")).expect("a folder in it");
        for (name, bytes) in [
            ("c", &b"third"[..]),
            ("a", b"first"),
            ("b/x", b"second"),
            ("ab", b"bi\0nary"),
            ("ac", b"\xff"),
        ] {
            std::fs::write(folder.path().join(name), bytes).expect("a file");
        }
        let mut text = Vec::new();
        add(folder.path(), &mut text, 100).expect("it is read");
        assert_eq!(text, b"firstsecondthird");
        text.clear();
        add(folder.path(), &mut text, 6).expect("it is read");
        assert_eq!(text, b"firstsecond");
    }
}
