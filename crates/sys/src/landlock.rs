//! The sandbox that a thread can put itself into, and never leaves: landlock(7).

use std::io::{self, Error};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::OnceLock;

/// True if the kernel has Landlock, switched on; a process asks once.
#[must_use]
pub fn is_there() -> bool {
    const VERSION: u32 = 1;
    static IS_THERE: OnceLock<bool> = OnceLock::new();
    *IS_THERE.get_or_init(|| {
        let none = std::ptr::null::<u64>();
        // SAFETY: without attributes the call reads nothing and tells a version.
        let version = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, none, 0, VERSION) };
        version > 0
    })
}

/// Runs `work` in a thread of its own that is in a domain, and gives what it gives.
///
/// # Errors
/// As landlock_restrict_self(2): `EOPNOTSUPP`, `E2BIG` where the thread is in 16 already.
pub fn in_domain<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    let restricted = || {
        restrict()?;
        Ok(work())
    };
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().spawn_scoped(scope, restricted)?;
        let ended = thread.join();
        ended.unwrap_or_else(|_| Err(Error::other("the thread in a domain has panicked")))
    })
}

/// Forbids the calling thread to make pipes by path, for ever.
fn restrict() -> io::Result<()> {
    const MAKE_FIFO: u64 = 1 << 10;
    // SAFETY: the call takes five numbers, and concerns this thread alone.
    match unsafe { libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) } {
        0 => {}
        _ => return Err(Error::last_os_error()),
    }
    let attributes = [MAKE_FIFO];
    let (at, len) = (attributes.as_ptr(), size_of_val(&attributes));
    // SAFETY: the attributes live for the call, and are as long as it is told.
    let rules = unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, at, len, 0) };
    if rules < 0 {
        return Err(Error::last_os_error());
    }
    let rules = i32::try_from(rules).map_err(Error::other)?;
    // SAFETY: the kernel just returned this descriptor and nobody else knows it.
    let rules = unsafe { OwnedFd::from_raw_fd(rules) };
    // SAFETY: the call takes a descriptor and a number.
    match unsafe { libc::syscall(libc::SYS_landlock_restrict_self, rules.as_raw_fd(), 0) } {
        0 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_thread_itself_is_restricted() {
        if !is_there() {
            eprintln!("skipped: a kernel without Landlock");
            return;
        }
        let folder = tempfile::tempdir().expect("a folder");
        let make = |name: &str| {
            let path = folder.path().join(name);
            let pipe = rustix::fs::FileType::Fifo;
            move || rustix::fs::mknodat(rustix::fs::CWD, path, pipe, 0o600.into(), 0)
        };
        let refused = in_domain(make("one")).expect("a domain");
        assert_eq!(refused, Err(rustix::io::Errno::ACCESS));
        make("two")().expect("nobody restricts this thread");
    }
}
