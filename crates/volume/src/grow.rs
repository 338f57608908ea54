//! A restored file system gets the room that its larger target has.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{ErrorKind, Seek, SeekFrom};
use std::path::Path;
use std::process::Command;

use crate::ext4::FileSystem;
use crate::{Error, OpenFile, Result};

/// Has e2fsck(8) and resize2fs(8) make the file system on `target` as large as that is, or as
/// `len_bytes`; gives the new length of the file system in bytes.
///
/// # Errors
/// [`Error::Program`]; the file system is whole, and perhaps not larger.
pub fn grow(target: &Path, len_bytes: Option<u64>) -> Result<u64> {
    if let Some(len_bytes) = len_bytes {
        let file = File::options().write(true).open(target);
        let sized = file.and_then(|file| file.set_len(len_bytes));
        sized.map_err(Error::file("make room in", target))?;
    }
    // It wants to know that it is whole first; 1 is that something was repaired, such as files
    // without a name that were open.
    run(
        "e2fsck",
        &["-f".as_ref(), "-p".as_ref(), target.as_ref()],
        1,
    )?;
    run("resize2fs", &[target.as_ref()], 0)?;
    let mut file = File::open(target).map_err(Error::file("open", target))?;
    let len = file.seek(SeekFrom::End(0));
    let len = len.map_err(Error::file("look at", target))?;
    let fs = FileSystem::open(OpenFile::new(file, len))?;
    Ok(fs.superblock().len_bytes())
}

fn run(program: &'static str, arguments: &[&OsStr], most: i32) -> Result<()> {
    let failed = |said: String| Error::Program { program, said };
    let output = match Command::new(program).args(arguments).output() {
        Err(error) if error.kind() == ErrorKind::NotFound => {
            return Err(failed("it is not installed (Debian: e2fsprogs)".to_owned()));
        }
        other => other.map_err(|error| failed(error.to_string()))?,
    };
    if output.status.code().is_some_and(|code| code <= most) {
        return Ok(());
    }
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said);
    let said = said.trim().lines().last().unwrap_or_default();
    Err(failed(format!("{}: {said}", output.status)))
}
