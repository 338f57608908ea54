//! The build ID of an ELF file, by which a restore knows another version of it of the same size
//! (`--file-validation`).
//!
//! - What: versions of programs and libraries
//! - Kept: with `--file-validation`, by the build ID of ELF files.
//! - At a restore: "build ID is …, was …".
//! - CRIU 4.2: the same, with the same option.

use std::ffi::OsStr;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{Mode, OFlags};

use super::place::Place;
use super::status;
use crate::{Error, Result};

/// The size of the header of a 64-bit ELF file: nothing shorter is one.
const HEADER_BYTES: u64 = 64;

/// The build ID of the file at `place`, which is `size_bytes` long; empty for files without one and
/// for those that cannot be read by their path.
pub(super) fn dump(place: &Place, size_bytes: u64) -> Vec<u8> {
    // To read files of the kernel may change something.
    let kernels = [&b"/proc/"[..], b"/sys/"];
    let kernels = kernels.iter().any(|root| place.path.starts_with(root));
    if size_bytes < HEADER_BYTES || kernels || place.ghost.is_some() || place.remap.is_some() {
        return Vec::new();
    }
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    let file = rustix::fs::open(OsStr::from_bytes(&place.path), flags, Mode::empty());
    file.ok()
        .and_then(|file| of(file.as_fd()))
        .unwrap_or_default()
}

/// Checks that the file which was opened at `place` has the build ID `wanted`, if that is one.
///
/// # Errors
/// [`Error::Changed`]; [`Error::Kernel`] when it cannot be read.
pub(super) fn check(place: &Place, wanted: &[u8], file: BorrowedFd<'_>) -> Result<()> {
    if wanted.is_empty() {
        return Ok(());
    }
    let found = match of(file) {
        Some(found) => found,
        // Perhaps it is open for writing only.
        None => {
            let readable = status::reopen(file, OFlags::RDONLY | OFlags::CLOEXEC)?;
            of(readable.as_fd()).unwrap_or_default()
        }
    };
    if found == wanted {
        return Ok(());
    }
    let text = |id: &[u8]| match id {
        [] => "missing".to_owned(),
        id => id.iter().map(|byte| format!("{byte:02x}")).collect(),
    };
    Err(Error::Changed {
        path: Path::new(OsStr::from_bytes(&place.path)).to_owned(),
        what: format!("build ID is {}, was {}", text(&found), text(wanted)),
        log: false,
    })
}

/// The build ID in the first page of a file, where linkers put it.
fn of(file: BorrowedFd<'_>) -> Option<Vec<u8>> {
    const PAGE: usize = 4096;
    const CLASS_64: &[u8] = b"\x7fELF\x02";
    let mut bytes = [0; PAGE];
    let read = rustix::io::pread(file, &mut bytes, 0).ok()?;
    let bytes = &bytes[..read];
    let id = sys::vdso::build_id(bytes).filter(|_| bytes.starts_with(CLASS_64))?;
    (!id.is_empty()).then_some(id)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};

    use super::super::testing::World;
    use crate::FileValidation;

    /// Opens a copy of this program and puts a version with another build ID in its place.
    fn another_version() -> (tempfile::TempDir, World) {
        let folder = tempfile::tempdir().expect("make a folder");
        let path = folder.path().join("program");
        let mut program = fs::read("/bin/sh").expect("a shell");
        program.truncate(4096);
        let id = sys::vdso::build_id(&program).expect("Debian's have one");
        fs::write(&path, &program).expect("write");
        let mut world = World::default();
        world.add(File::open(&path).expect("open"));
        world.dump().expect("dump");
        let at = program.windows(id.len()).position(|bytes| bytes == id);
        program[at.expect("it is there")] ^= 1;
        fs::write(&path, &program).expect("write");
        (folder, world)
    }

    #[test]
    fn another_version_of_a_program_is_refused() {
        let (_folder, mut world) = another_version();
        let error = world.restore().expect_err("another version").to_string();
        assert!(error.contains("/program: build ID is "), "{error}");
    }

    #[test]
    fn the_size_alone_can_be_looked_at() {
        let (_folder, mut world) = another_version();
        world.allow.file_validation = FileValidation::FileSize;
        world.restore().expect("of the same size");
    }
}
