//! Namespaces as files: ioctl_nsfs(2).

use std::io;
use std::os::fd::{AsFd, AsRawFd};

/// The kinds that there are, as the files in /proc/PID/ns are called: namespaces(7).
const KINDS: [(i32, &str); 8] = [
    (libc::CLONE_NEWCGROUP, "cgroup"),
    (libc::CLONE_NEWIPC, "ipc"),
    (libc::CLONE_NEWNS, "mnt"),
    (libc::CLONE_NEWNET, "net"),
    (libc::CLONE_NEWPID, "pid"),
    (libc::CLONE_NEWTIME, "time"),
    (libc::CLONE_NEWUSER, "user"),
    (libc::CLONE_NEWUTS, "uts"),
];

/// The name of a kind, if there is such a one.
#[must_use]
pub fn kind_named(name: &str) -> Option<&'static str> {
    let mut names = KINDS.iter().map(|(_, known)| *known);
    names.find(|known| *known == name)
}

/// What kind of namespace a file is (`NS_GET_NSTYPE`).
///
/// # Errors
/// `ENOTTY` for what is none, `EBADF` for an `O_PATH` description, `EINVAL` for a kind that is not
/// known here.
pub fn kind(file: impl AsFd) -> io::Result<&'static str> {
    const NS_GET_NSTYPE: libc::Ioctl = rustix::ioctl::opcode::none(0xb7, 3) as libc::Ioctl;
    // SAFETY: it has no argument and answers with a number.
    let kind = unsafe { libc::ioctl(file.as_fd().as_raw_fd(), NS_GET_NSTYPE) };
    if kind < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut kinds = KINDS.iter();
    let found = kinds.find(|(number, _)| *number == kind);
    found
        .map(|(_, name)| *name)
        .ok_or_else(|| io::ErrorKind::InvalidInput.into())
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    #[test]
    fn files_tell_their_kind() {
        for (_, name) in KINDS {
            let Ok(file) = File::open(format!("/proc/self/ns/{name}")) else {
                continue;
            };
            assert_eq!(kind(&file).unwrap(), name);
        }
        let other = File::open("/dev/null").unwrap();
        let error = kind(&other).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOTTY));
    }
}
