//! Huge pages that the host sets aside for a test, and gets back.
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use rustix::fs::{FlockOperation, flock};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

const COUNT: &str = "/proc/sys/vm/nr_hugepages";

/// So many pages of 2 MiB, given back when it goes. Several tests and programs may have some at a
/// time, each its own.
#[derive(Debug)]
pub struct HugePages(u64);

impl HugePages {
    /// Reserves `count` pages more than there are.
    ///
    /// # Errors
    /// Those of reading and writing the number; [`io::ErrorKind::OutOfMemory`] where there is no
    /// room for so many.
    pub fn reserve(count: u64) -> io::Result<Self> {
        let own = Self(count);
        let (before, after) = change(|before| before + count)?;
        match after >= before + count {
            true => Ok(own),
            false => {
                std::mem::forget(own);
                change(|now| now.saturating_sub(after - before))?;
                Err(io::ErrorKind::OutOfMemory.into())
            }
        }
    }
}

impl Drop for HugePages {
    fn drop(&mut self) {
        let _ = change(|now| now.saturating_sub(self.0));
    }
}

/// Changes the number of pages, alone; what it was, and what it is.
fn change(to: impl FnOnce(u64) -> u64) -> io::Result<(u64, u64)> {
    let alone = File::open(COUNT)?;
    flock(&alone, FlockOperation::LockExclusive)?;
    let read = || {
        let number = std::fs::read_to_string(COUNT)?;
        number.trim().parse::<u64>().map_err(io::Error::other)
    };
    let before = read()?;
    std::fs::write(COUNT, to(before).to_string())?;
    Ok((before, read()?))
}

/// A control group whose processes get no huge page of 2 MiB, whatever the host has free.
#[derive(Debug)]
pub struct HugePageBar {
    /// Where the group above it is.
    above: PathBuf,
    group: PathBuf,
    /// Where the hierarchy is mounted, if it was for this.
    mounted: Option<tempfile::TempDir>,
}

impl HugePageBar {
    /// Makes one.
    ///
    /// # Errors
    /// Those of the calls, where there is no such controller.
    pub fn new() -> io::Result<Self> {
        let unified = Path::new("/sys/fs/cgroup");
        let known = fs::read_to_string(unified.join("cgroup.controllers")).unwrap_or_default();
        let (above, mounted, limit) = match known.split_whitespace().any(|it| it == "hugetlb") {
            true => {
                fs::write(unified.join("cgroup.subtree_control"), "+hugetlb")?;
                (unified.to_owned(), None, "hugetlb.2MB.max")
            }
            false => {
                let place = tempfile::tempdir()?;
                mount(
                    "none",
                    place.path(),
                    "cgroup",
                    MountFlags::empty(),
                    c"hugetlb",
                )?;
                let above = place.path().to_owned();
                (above, Some(place), "hugetlb.2MB.limit_in_bytes")
            }
        };
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Relaxed);
        let group = above.join(format!("stillframe-barred-{}-{number}", std::process::id()));
        let barred = Self {
            above,
            group,
            mounted,
        };
        fs::create_dir(&barred.group)?;
        fs::write(barred.group.join(limit), "0")?;
        Ok(barred)
    }

    /// Puts a process into it.
    ///
    /// # Errors
    /// Those of writing.
    pub fn add(&self, pid: u32) -> io::Result<()> {
        fs::write(self.group.join("cgroup.procs"), pid.to_string())
    }
}

impl Drop for HugePageBar {
    fn drop(&mut self) {
        let left = fs::read_to_string(self.group.join("cgroup.procs")).unwrap_or_default();
        for pid in left.lines() {
            let _ = fs::write(self.above.join("cgroup.procs"), pid);
        }
        let _ = fs::remove_dir(&self.group);
        if let Some(place) = &self.mounted {
            let _ = unmount(place.path(), UnmountFlags::DETACH);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_gets_its_own_and_gives_them_back() {
        crate::needs_root!();
        let count = || {
            let text = std::fs::read_to_string(COUNT).expect("it is there");
            text.trim().parse::<u64>().expect("a number")
        };
        let Ok(one) = HugePages::reserve(2) else {
            crate::skip!("huge pages cannot be reserved");
        };
        let other = HugePages::reserve(3).expect("as before");
        drop(one);
        assert!(count() >= 3, "the other's are there");
        drop(other);
    }
}
