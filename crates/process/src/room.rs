//! Room for descriptors: tasks inherit this process's limit and take all of theirs under it. Room
//! for what is listed while a tree is stopped.

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// The limit when it was last looked at: nothing here lowers it.
static SEEN: AtomicU64 = AtomicU64::new(0);

/// Raises this process's limit of open files (setrlimit(2)) so that descriptors may have numbers
/// below `wanted`, as far as it may; who then finds no room says so.
pub(crate) fn for_descriptors(wanted: u64) {
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

/// Raises this process's limit of open files as far as that needs no privilege.
pub(crate) fn within_the_hard_limit() {
    let now = getrlimit(Resource::Nofile);
    if let Some(maximum) = now.maximum {
        raise(now, maximum);
    }
    SEEN.store(now.current.unwrap_or(u64::MAX), Ordering::Relaxed);
}

/// Has the kernel give this process memory for `bytes` of lists now rather than while a tree is
/// stopped: the first touch of a page takes longer than what is put there (2 us).
pub(crate) fn for_lists(bytes: usize) {
    // The allocator keeps that much, and not more (sys::start).
    let mut pages = vec![0_u8; bytes.min(31 << 20)];
    pages.iter_mut().step_by(4096).for_each(|byte| *byte = 1);
    drop(std::hint::black_box(pages));
}

#[cfg(test)]
mod tests {
    use super::*;

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
