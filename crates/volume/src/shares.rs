//! Work on all groups of a file system, on a thread for each processor.

use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use pages::workers;

use crate::ext4::FileSystem;
use crate::{ReadAt, Result};

/// How many shares of the groups there are for each thread, so that none waits long for the last.
const SHARES: u32 = 4;

/// Has all groups of a file system worked on, some at a time in whatever order, and gives what came
/// of it: as many as there are threads at most, each begun by `new`. One thread does all where the
/// work `is_known`, mostly: others would only be in its way (5 ms of a freeze, with 100,000 files).
pub fn of_groups<S: ReadAt, T: Send>(
    fs: &FileSystem<S>,
    is_known: bool,
    new: impl Fn() -> T + Sync,
    work: impl Fn(&mut T, Range<u32>) -> Result<()> + Sync,
) -> Result<Vec<T>> {
    let (sb, groups) = (fs.superblock(), fs.groups());
    // By what is to be read where all inodes are in use.
    let bytes = u64::from(sb.inodes) * u64::from(sb.inode_bytes);
    let threads = match is_known {
        true => 1,
        false => workers::threads(bytes),
    };
    let step = groups.div_ceil(threads as u32 * SHARES).max(1);
    let all = Mutex::new(Vec::new());
    let lock = || all.lock().unwrap_or_else(PoisonError::into_inner);
    let one = |(): &mut (), number: usize| -> Result<()> {
        let start = number as u32 * step;
        let begun = lock().pop();
        let mut own = begun.unwrap_or_else(&new);
        let done = work(&mut own, start..start.saturating_add(step).min(groups));
        lock().push(own);
        done
    };
    workers::work(threads, groups.div_ceil(step) as usize, |_| (), one)?;
    Ok(all.into_inner().unwrap_or_else(PoisonError::into_inner))
}
