//! The files that a tree watches, all looked for at once, before any task is made to call anything.

use std::path::PathBuf;

use resources::fd::watched;

use super::found::Found;
use super::how::How;
use crate::Result;

/// Finds the files that the tree watches.
///
/// # Errors
/// Those of [`crate::homework::Homework::look_for_watched`] where they are to be looked for while
/// the tree runs.
pub(super) fn find(found: &[Found], how: &mut How<'_>) -> Result<()> {
    let rows = found.iter().flat_map(|one| &one.rows);
    let inodes = rows.flat_map(|row| watched::inodes(&row.link, &row.info));
    let inodes = inodes.collect::<Vec<_>>();
    if inodes.is_empty() {
        return Ok(());
    }
    let known = || used_by(found);
    let has_unfound = how.homework.watched.find(&inodes, how.allow, known)?;
    match found.first() {
        Some(root) if has_unfound => how.homework.look_for_watched(root.node.pid),
        _ => Ok(()),
    }
}

/// The paths of all files that tasks have open or mapped, and of their directories and programs.
fn used_by(found: &[Found]) -> Vec<PathBuf> {
    let open = found.iter().flat_map(|one| &one.rows).map(|row| &row.link);
    let mapped = found
        .iter()
        .flat_map(|one| &*one.listed)
        .map(|listed| &listed.name);
    let names = open.chain(mapped).filter(|name| name.starts_with(b"/"));
    let names = names.map(|name| path(name));
    let links = found.iter().flat_map(|one| {
        let of = ["cwd", "root", "exe"]
            .map(|name| sys::procfs::path(format_args!("{}/{name}", one.node.pid)));
        of.into_iter()
            .filter_map(|link| std::fs::read_link(link).ok())
    });
    names.chain(links).collect()
}

fn path(name: &[u8]) -> PathBuf {
    use std::os::unix::ffi::OsStrExt;
    std::ffi::OsStr::from_bytes(name).into()
}
