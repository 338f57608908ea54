//! Huge pages that the host sets aside for a test, and gets back.
use std::fs::File;
use std::io;

use rustix::fs::{FlockOperation, flock};

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
