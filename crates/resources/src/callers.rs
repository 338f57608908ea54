//! Threads of a tree that is being restored, which are stopped when they have all that they had:
//! what kinds have them do that nobody else can.

use std::ops::Range;

use abi::Addr;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use sys::proc::Limit;
use syscalls::Sysno;

use crate::fd::DescriptionId;
use crate::{Error, Result};

/// Threads that make calls for others.
pub trait Callers {
    /// Has a thread make a call with bytes of data at hand, whose address is passed where `args`
    /// have none, and gives its result.
    ///
    /// # Errors
    /// When it cannot.
    fn call(&mut self, tid: i32, call: Sysno, args: [Option<u64>; 6], data: &[u8]) -> Result<i64>;
    /// Where that data is in the memory of each of them.
    fn scratch(&self) -> Addr;
    /// The descriptor of a description in the process of a thread.
    fn number(&self, tid: i32, id: DescriptionId) -> Option<i32>;
    /// Where the process of a thread has mapped a description, at an offset in this range.
    fn mapped(&self, tid: i32, id: DescriptionId, offsets: Range<u64>) -> Option<Addr>;
    /// Where [`tracee::arch::SUBMIT_LOOP`] is in the memory of each of them.
    fn submit_loop(&self) -> Addr;
}

/// The result of a call that must have succeeded; `doing` says which call it was.
///
/// # Errors
/// [`Error::Kernel`].
pub fn checked(result: i64, doing: impl FnOnce() -> String) -> Result<u64> {
    match result {
        -4095..0 => {
            let errno = i32::try_from(-result).expect("an errno");
            let source = std::io::Error::from_raw_os_error(errno);
            Err(Error::kernel(doing(), source))
        }
        result => Ok(result.cast_unsigned()),
    }
}

/// A task whose limits of memory do not count; dropping this has them count again.
pub struct Unlimited {
    pid: Pid,
    limits: Vec<(Resource, Rlimit)>,
}

impl Unlimited {
    /// Lifts what may be lifted: otherwise a call fails that needs more.
    ///
    /// # Panics
    /// For a number that no process has.
    #[must_use]
    pub fn make(pid: i32) -> Self {
        let pid = Pid::from_raw(pid).expect("checked when read");
        let mut unlimited = Self {
            pid,
            limits: Vec::new(),
        };
        for resource in [Resource::As, Resource::Memlock] {
            let (current, maximum) = (None, None);
            unlimited.lift(resource, Rlimit { current, maximum });
        }
        unlimited
    }

    /// Has room for one more descriptor, where that is allowed.
    ///
    /// # Errors
    /// [`Error::Gone`].
    pub fn add_descriptor(&mut self) -> Result<()> {
        let pid = self.pid.as_raw_nonzero().get();
        let doing = || "read its limits".to_owned();
        let text = sys::procfs::read(format_args!("{pid}/limits"));
        let text = text.map_err(|_| Error::Gone {
            pid,
            doing: doing(),
        })?;
        let limits = sys::proc::limits(&text);
        let limits =
            limits.map_err(|error| Error::kernel(doing(), std::io::Error::other(error)))?;
        let mut tries = more_descriptors(limits[Resource::Nofile as usize]).into_iter();
        tries.any(|limit| self.lift(Resource::Nofile, limit));
        Ok(())
    }

    fn lift(&mut self, resource: Resource, limit: Rlimit) -> bool {
        match prlimit(Some(self.pid), resource, limit) {
            Ok(before) => {
                self.limits.push((resource, before));
                true
            }
            Err(error) => {
                log::debug!("a limit of {:?} stays: {error}", self.pid);
                false
            }
        }
    }
}

/// Limits of descriptors that leave room for one more than `now`, best first. None of them is lower
/// than that one: a hard limit that was lowered cannot be raised again without a privilege.
fn more_descriptors(now: Limit) -> [Rlimit; 2] {
    /// The kernel's value of fs.nr_open, unless it was changed.
    const USUAL_MOST: u64 = 1 << 20;
    [now.hard.max(USUAL_MOST), now.hard].map(|most| {
        let most = Some(most).filter(|most| *most != u64::MAX);
        Rlimit {
            current: most,
            maximum: most,
        }
    })
}

impl Drop for Unlimited {
    fn drop(&mut self) {
        for (resource, before) in self.limits.drain(..) {
            if let Err(error) = prlimit(Some(self.pid), resource, before) {
                log::warn!("a limit of {:?} is not as it was: {error}", self.pid);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_limit_of_descriptors_is_lowered() {
        let hard = |soft, hard| more_descriptors(Limit { soft, hard }).map(|limit| limit.maximum);
        assert_eq!(hard(1024, 20_000), [Some(1 << 20), Some(20_000)]);
        assert_eq!(hard(1024, 1 << 30), [Some(1 << 30); 2]);
        assert_eq!(hard(1024, u64::MAX), [None; 2]);
    }
}
