//! Which tasks may share a core of the processor with each other alone: `PR_SCHED_CORE`
//! (Documentation/admin-guide/hw-vuln/core-scheduling.rst).

use std::io::{self, Error};

/// The group that a thread is in, as a number that only says which threads are in the same; 0 for
/// none. For thread 0 that of the caller.
///
/// # Errors
/// `EINVAL` and `ENODEV` where the kernel or the processor has no such thing, `ESRCH`, `EPERM`.
pub fn group(tid: i32) -> io::Result<u64> {
    const PR_SCHED_CORE: libc::c_int = libc::PR_SCHED_CORE;
    const GET: libc::c_ulong = 0;
    const OF_THREAD: libc::c_ulong = 0;
    let mut group = 0u64;
    let at = &raw mut group;
    // SAFETY: the call writes eight bytes to where `group` lives.
    match unsafe { libc::prctl(PR_SCHED_CORE, GET, tid, OF_THREAD, at) } {
        0 => Ok(group),
        _ => Err(Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_asked_for_no_group_is_in_none() {
        match group(0) {
            Ok(group) => assert_eq!(group, 0),
            Err(error) => {
                let code = error.raw_os_error();
                assert!(
                    [Some(libc::EINVAL), Some(libc::ENODEV)].contains(&code),
                    "{error}"
                );
            }
        }
    }
}
