//! The folder in which a command finds what an earlier one has left behind: sockets, claims.
//!
//! Nobody but its owner can make names in it: root's is in /run, another user's where the system
//! gives him a folder, or else in /tmp.

use std::fs::{DirBuilder, File};
use std::io::{Error, ErrorKind, Result};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{FlockOperation, Mode, OFlags, flock};

/// Where it is, made where it is missing.
///
/// # Errors
/// `PermissionDenied` where it is another user's, or others can write to it; those of mkdir(2).
pub fn folder() -> Result<PathBuf> {
    let folder = sys::host::path(place(rustix::process::geteuid().as_raw()));
    make(&folder)?;
    Ok(folder)
}

/// Where it is, whether it is there or not.
fn place(user: u32) -> PathBuf {
    let of_user = PathBuf::from(format!("/run/user/{user}"));
    match user {
        0 => "/run/stillframe".into(),
        _ if of_user.is_dir() => of_user.join("stillframe"),
        _ => format!("/tmp/stillframe-{user}").into(),
    }
}

fn make(folder: &Path) -> Result<()> {
    let failed = |error: Error| Error::new(error.kind(), format!("{}: {error}", folder.display()));
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(failed(error)),
        _ => {}
    }
    let found = std::fs::symlink_metadata(folder).map_err(failed)?;
    let own = found.uid() == rustix::process::geteuid().as_raw();
    match own && found.is_dir() && found.mode() & 0o022 == 0 {
        true => Ok(()),
        false => {
            let what = "others can make names in it";
            Err(failed(Error::new(ErrorKind::PermissionDenied, what)))
        }
    }
}

/// Keeps other commands of this user from making or removing names in the folder, until what is
/// returned is dropped.
///
/// # Errors
/// Those of open(2) and flock(2).
pub fn lock(folder: &Path) -> Result<File> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let locked = rustix::fs::open(folder, flags, Mode::empty())?;
    flock(&locked, FlockOperation::LockExclusive)?;
    Ok(locked.into())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::*;

    #[test]
    fn it_is_made_for_its_owner_and_others_are_refused() {
        let scratch = tempfile::tempdir().expect("a folder");
        let path = scratch.path().join("stillframe");
        for _ in 0..2 {
            make(&path).expect("it is ours");
        }
        let mode = std::fs::metadata(&path).expect("it is there").mode();
        assert_eq!(mode & 0o777, 0o700);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o770)).expect("ours");
        let error = make(&path).expect_err("its group can write");
        assert!(
            error.to_string().ends_with("others can make names in it"),
            "{error}"
        );
        let link = scratch.path().join("link");
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).expect("ours");
        symlink(&path, &link).expect("a link");
        make(&link).expect_err("a link may lead anywhere");
        make(&scratch.path().join("a/b")).expect_err("what it is in is not made");
    }

    #[test]
    fn places_are_of_one_user() {
        assert_eq!(place(0), Path::new("/run/stillframe"));
        let other = place(4_000_000_000);
        assert_eq!(other, Path::new("/tmp/stillframe-4000000000"));
    }
}
