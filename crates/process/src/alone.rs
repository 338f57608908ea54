//! What a dump and a restore change of the process that they run in, behind one door.
//!
//! Two of them in one process at the same time would undo each other's work:
//! - the limit of open files is raised, and stays so: tasks inherit it, and take all of theirs
//!   under it;
//! - `SIGALRM` has a handler, which ends what waits too long ([`sys::tick`]), and so have those
//!   by which shells and terminals control jobs while one is waited for;
//! - the calling thread's timers are exact;
//! - children are forked that call no execve(2): watchdogs (of the tree, of connections),
//!   the tracker, and the restored tree itself. That wants a process of one thread.
//!
//! So the engine lets one in at a time ([`Alone::enter`]), and refuses the others by name. A server
//! gives each request a child of its own, made before it has other threads, or by running itself
//! again.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use rustix::thread::CapabilitySet;

use crate::{Error, Result};

/// Whether somebody is in.
static ENTERED: AtomicBool = AtomicBool::new(false);

/// The right of one dump or restore to this process, until it is dropped.
#[derive(Debug)]
pub(crate) struct Alone(());

impl Alone {
    /// Takes the right.
    ///
    /// # Errors
    /// [`Error::Busy`].
    pub fn enter() -> Result<Self> {
        match ENTERED.swap(true, Ordering::Acquire) {
            true => Err(Error::Busy),
            false => Ok(Self(())),
        }
    }
}

/// Refuses a process with other threads.
///
/// # Errors
/// [`Error::Threads`]; [`Error::Kernel`] when /proc cannot be read.
pub(crate) fn check_threads() -> Result<()> {
    match sys::fork::has_other_threads() {
        Ok(false) => Ok(()),
        Ok(true) => Err(Error::Threads),
        Err(source) => Err(Error::kernel(
            "cannot look at this process's threads",
            source,
        )),
    }
}

impl Drop for Alone {
    fn drop(&mut self) {
        ENTERED.store(false, Ordering::Release);
    }
}

/// The limit when it was last looked at: nothing here lowers it.
static SEEN: AtomicU64 = AtomicU64::new(0);

/// Raises this process's limit of open files (setrlimit(2)) so that descriptors may have numbers
/// below `wanted`, as far as it may; who then finds no room says so.
pub(crate) fn raise_open_files(wanted: u64) {
    if wanted <= SEEN.load(Ordering::Relaxed) {
        return;
    }
    raise(getrlimit(Resource::Nofile), wanted);
}

fn raise(now: Rlimit, wanted: u64) {
    let enough = |limit: Option<u64>| limit.is_none_or(|limit| limit >= wanted);
    if enough(now.current) {
        return;
    }
    let hard = if enough(now.maximum) {
        now.maximum
    } else {
        Some(wanted)
    };
    let raised = |current, maximum| setrlimit(Resource::Nofile, Rlimit { current, maximum });
    let raised = raised(Some(wanted), hard).or_else(|_| raised(now.maximum, now.maximum));
    if let Err(errno) = raised {
        log::debug!("the limit of open files stays: {errno}");
    }
}

/// How many open files a restore could have that is made as this process.
pub(crate) fn open_files_at_most() -> u64 {
    let may_raise = rustix::thread::capabilities(None)
        .is_ok_and(|own| own.effective.contains(CapabilitySet::SYS_RESOURCE));
    let limit = match may_raise {
        true => sys::procfs::read_text("sys/fs/nr_open")
            .ok()
            .and_then(|text| text.trim().parse().ok()),
        false => getrlimit(Resource::Nofile).maximum,
    };
    limit.unwrap_or(u64::MAX)
}

/// Raises this process's limit of open files as far as that needs no privilege.
pub(crate) fn raise_open_files_to_the_hard_limit() {
    match sys::own::raise_open_files() {
        Ok(limit) => SEEN.store(limit.unwrap_or(u64::MAX), Ordering::Relaxed),
        Err(error) => log::debug!("the limit of open files stays: {error}"),
    }
}

/// Has the kernel give this process memory for `bytes` of lists now rather than while a tree is
/// stopped: the first touch of a page takes longer than what is put there (2 us).
pub(crate) fn prepare_lists(bytes: usize) {
    // The allocator keeps that much, and not more (sys::start).
    let mut pages = vec![0_u8; bytes.min(31 << 20)];
    pages.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
    drop(std::hint::black_box(pages));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_in_at_a_time() {
        let first = Alone::enter().expect("nobody is in");
        assert!(matches!(Alone::enter(), Err(Error::Busy)));
        drop(first);
        Alone::enter().expect("nobody is in");
    }

    #[test]
    fn the_limit_is_raised_as_far_as_it_may_be() {
        let before = getrlimit(Resource::Nofile);
        let hard = before.maximum.unwrap_or(1 << 16);
        let current = Some(hard - 1);
        let lowered = Rlimit { current, ..before };
        setrlimit(Resource::Nofile, lowered).expect("it may be lowered");
        raise(getrlimit(Resource::Nofile), hard - 1);
        assert_eq!(getrlimit(Resource::Nofile).current, current);
        raise(getrlimit(Resource::Nofile), hard);
        assert_eq!(getrlimit(Resource::Nofile).current, Some(hard));
    }
}
