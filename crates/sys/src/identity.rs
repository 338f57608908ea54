//! Calls made in the name of another process: what the kernel notes of their maker stays.
//!
//! Sockets remember who made the other end (`SO_PEERCRED` in unix(7)). A restore makes them in
//! the name of those who did, before these exist again: a short-lived process with the pid, user
//! and group shares this one's descriptors and makes the call.

use std::io;
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, AtomicI64, Ordering};

use crate::socket::{self, Along, Credentials};

/// The process in whose name a call is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity<'a> {
    /// Process, user and group; process 0 for one of any number.
    pub who: Credentials,
    /// Supplementary groups, which `SO_PEERGROUPS` tells.
    pub groups: &'a [u32],
}

impl From<Credentials> for Identity<'_> {
    fn from(who: Credentials) -> Self {
        Self { who, groups: &[] }
    }
}

/// Has `make` make an object as the user `uid` of the group `gid`, who are noted as its makers. A
/// thread of its own does: with its user, a thread loses its parent-death signal (prctl(2)).
///
/// # Errors
/// Those of `make`; as setresuid(2).
pub fn as_user<T: Send>(
    uid: u32,
    gid: u32,
    make: impl FnOnce() -> io::Result<T> + Send,
) -> io::Result<T> {
    use rustix::process::{Gid, Uid, set_dumpable_behavior};
    use rustix::process::{dumpable_behavior, getegid, geteuid, getgid, getuid};
    use rustix::thread::{set_thread_res_gid, set_thread_res_uid};
    let (user, group) = (geteuid(), getegid());
    if (uid, gid) == (user.as_raw(), group.as_raw()) {
        return make();
    }
    if [uid, gid].contains(&u32::MAX) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let dumpable = dumpable_behavior()?;
    let made = std::thread::scope(|scope| {
        let made = scope.spawn(|| {
            set_thread_res_gid(getgid(), Gid::from_raw(gid), group)?;
            set_thread_res_uid(getuid(), Uid::from_raw(uid), user)?;
            make()
        });
        let made = made.join();
        made.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    });
    // It does not take what only the kernel sets (`suid_dumpable`).
    let _ = set_dumpable_behavior(dumpable);
    // There are calls that a process with several threads may not make.
    crate::fork::wait_for_threads();
    made
}

/// Makes two connected sockets as [`crate::socket::pair`] does, in the name of `who`.
///
/// # Errors
/// The calls' errno; `EEXIST` while a process with that pid lives.
pub fn pair<'a>(
    who: impl Into<Identity<'a>>,
    family: i32,
    kind: i32,
    protocol: i32,
) -> io::Result<(OwnedFd, OwnedFd)> {
    let page = SharedPage::new()?;
    let (kind, fds) = (i64::from(kind | libc::SOCK_CLOEXEC), page.numbers_address());
    let args = [i64::from(family), kind, i64::from(protocol), fds];
    act(who.into(), libc::SYS_socketpair, args, &page)?;
    let [left, right] = page.numbers();
    // SAFETY: the call succeeded and the table is shared: the kernel has just made this
    // descriptor for us.
    let left = unsafe { OwnedFd::from_raw_fd(left) };
    // SAFETY: as above.
    let right = unsafe { OwnedFd::from_raw_fd(right) };
    Ok((left, right))
}

/// Has a socket listen, in the name of `who`.
///
/// # Errors
/// As [`pair`].
pub fn listen<'a>(who: impl Into<Identity<'a>>, fd: impl AsFd, backlog: i32) -> io::Result<()> {
    let fd = i64::from(fd.as_fd().as_raw_fd());
    let args = [fd, i64::from(backlog), 0, 0];
    act(who.into(), libc::SYS_listen, args, &SharedPage::new()?).map(drop)
}

/// Connects a socket, in the name of `who`.
///
/// # Errors
/// As [`pair`].
pub fn connect<'a>(who: impl Into<Identity<'a>>, fd: impl AsFd, address: &[u8]) -> io::Result<()> {
    let fd = i64::from(fd.as_fd().as_raw_fd());
    let length = i64::try_from(address.len()).expect("addresses are short");
    let address = address.as_ptr().expose_provenance().cast_signed() as i64;
    let args = [fd, address, length, 0];
    act(who.into(), libc::SYS_connect, args, &SharedPage::new()?).map(drop)
}

/// Sends a message as [`crate::socket::send`] does, in the name of `who`; `along` names nobody.
///
/// # Errors
/// As [`pair`].
pub fn send(
    who: Credentials,
    fd: impl AsFd,
    bytes: &[u8],
    along: Along<'_>,
    flags: i32,
) -> io::Result<usize> {
    let fd = i64::from(fd.as_fd().as_raw_fd());
    let flags = i64::from(flags | libc::MSG_NOSIGNAL);
    let page = SharedPage::new()?;
    let nameless = Along {
        credentials: None,
        ..along
    };
    let sent = socket::with_message(bytes, nameless, |message| {
        let message = message.expose_provenance().cast_signed() as i64;
        act(
            who.into(),
            libc::SYS_sendmsg,
            [fd, message, flags, 0],
            &page,
        )
    })?;
    Ok(usize::try_from(sent).expect("results that are no errors are not negative"))
}

/// A page that this process and its helper share: the result of its call, and room for what the
/// call writes.
struct SharedPage(NonNull<Shared>);

#[repr(C)]
struct Shared {
    /// What the call gave, or the negative errno of it or of a call on the way to it.
    result: AtomicI64,
    /// The two descriptors of a pair.
    numbers: [AtomicI32; 2],
}

impl SharedPage {
    fn new() -> io::Result<Self> {
        let (prot, flags) = (
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_SHARED | libc::MAP_ANONYMOUS,
        );
        let size = size_of::<Shared>();
        // SAFETY: a fresh mapping at an address that the kernel chooses.
        let at = unsafe { libc::mmap(std::ptr::null_mut(), size, prot, flags, -1, 0) };
        if at == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let at = NonNull::new(at.cast()).expect("nothing is mapped at zero unless asked for");
        let page = Self(at);
        // What it says as long as the helper has not come so far.
        let result = -i64::from(libc::EINTR);
        page.shared().result.store(result, Ordering::Release);
        Ok(page)
    }

    fn shared(&self) -> &Shared {
        // SAFETY: the page is mapped as long as `self` lives, aligned, and holds integers of any
        // value that are only accessed as atomics.
        unsafe { self.0.as_ref() }
    }

    fn numbers_address(&self) -> i64 {
        let at = (&raw const self.shared().numbers).expose_provenance();
        at.cast_signed() as i64
    }

    fn numbers(&self) -> [RawFd; 2] {
        let [left, right] = &self.shared().numbers;
        [left.load(Ordering::Acquire), right.load(Ordering::Acquire)]
    }
}

impl Drop for SharedPage {
    fn drop(&mut self) {
        // SAFETY: nobody refers to the mapping any more.
        unsafe { libc::munmap(self.0.as_ptr().cast(), size_of::<Shared>()) };
    }
}

/// Makes a system call in a process that is `who` and shares this one's descriptors, and gives
/// its result. The kernel chooses a number in place of 0.
fn act(
    who: Identity<'_>,
    number: libc::c_long,
    args: [i64; 4],
    page: &SharedPage,
) -> io::Result<i64> {
    let pid = libc::pid_t::from(who.who.pid);
    let mut clone = libc::clone_args {
        flags: libc::CLONE_FILES.cast_unsigned().into(),
        pidfd: 0,
        child_tid: 0,
        parent_tid: 0,
        exit_signal: 0,
        stack: 0,
        stack_size: 0,
        tls: 0,
        set_tid: match pid {
            0 => 0,
            _ => (&raw const pid).expose_provenance() as u64,
        },
        set_tid_size: u64::from(pid != 0),
        cgroup: 0,
    };
    let (at, size) = (&raw mut clone, size_of::<libc::clone_args>());
    // SAFETY: the structure and the pid in it live until the call returns. The child has a copy of
    // this memory and makes system calls only.
    let child = unsafe { libc::syscall(libc::SYS_clone3, at, size) };
    if child < 0 {
        return Err(io::Error::last_os_error());
    }
    if child == 0 {
        become_and_call(who, number, args, page);
    }
    let child = libc::pid_t::try_from(child).expect("the kernel gives a pid");
    loop {
        let mut status = 0;
        // SAFETY: waits for our own child and writes one int.
        let waited = unsafe { libc::waitpid(child, &raw mut status, libc::__WALL) };
        let interrupted = io::Error::last_os_error().kind() == io::ErrorKind::Interrupted;
        if waited >= 0 || !interrupted {
            break;
        }
    }
    let result = page.shared().result.load(Ordering::Acquire);
    if result < 0 {
        let errno = i32::try_from(-result).unwrap_or(libc::EIO);
        return Err(io::Error::from_raw_os_error(errno));
    }
    Ok(result)
}

/// The helper's life.
fn become_and_call(
    Identity { who, groups }: Identity<'_>,
    number: libc::c_long,
    [a, b, c, d]: [i64; 4],
    page: &SharedPage,
) -> ! {
    let (uid, gid) = (who.uid, who.gid);
    // SAFETY: reads its copy of the groups, and changes this helper only.
    let mut result = unsafe { libc::syscall(libc::SYS_setgroups, groups.len(), groups.as_ptr()) };
    if result == 0 {
        // SAFETY: as above.
        result = unsafe { libc::syscall(libc::SYS_setresgid, gid, gid, gid) };
    }
    if result == 0 {
        // SAFETY: as above.
        result = unsafe { libc::syscall(libc::SYS_setresuid, uid, uid, uid) };
    }
    if result == 0 {
        // SAFETY: the callers of `act` pass calls and arguments that are sound; what is written
        // is this helper's copy of memory, or a page of its maker's made for it.
        result = unsafe { libc::syscall(number, a, b, c, d) };
    }
    if result < 0 {
        let errno = io::Error::last_os_error().raw_os_error();
        result = -libc::c_long::from(errno.unwrap_or(libc::EIO));
    }
    page.shared().result.store(result, Ordering::Release);
    loop {
        // SAFETY: does not return.
        unsafe { libc::syscall(libc::SYS_exit_group, 0) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sockets_remember_who_made_them() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIP sockets_remember_who_made_them: needs root");
            return;
        }
        testkit::calls::isolated::run(|| {
            // A pid that nobody has: that of a child that ended.
            let gone = std::process::Command::new("true").spawn().unwrap();
            let pid = gone.id().cast_signed();
            drop(gone.wait_with_output());
            let who = Credentials {
                pid,
                uid: 65534,
                gid: 65533,
            };
            let (left, right) = pair(who, libc::AF_UNIX, libc::SOCK_STREAM, 0).unwrap();
            for end in [&left, &right] {
                let found = socket::option(end, libc::SOL_SOCKET, libc::SO_PEERCRED, 12).unwrap();
                assert_eq!(Credentials::from_bytes(&found), Some(who));
            }
            let groups = [4, 70_000];
            let (left, right) = pair(
                Identity {
                    who,
                    groups: &groups,
                },
                1,
                1,
                0,
            )
            .unwrap();
            for end in [&left, &right] {
                assert_eq!(socket::peer_groups(end).unwrap(), groups);
            }
            let sent = send(who, &left, b"four", Along::default(), 0).unwrap();
            assert_eq!(sent, 4);
            let mine = Credentials {
                pid: std::process::id().cast_signed(),
                ..who
            };
            let error = pair(mine, libc::AF_UNIX, libc::SOCK_STREAM, 0).unwrap_err();
            assert_eq!(error.raw_os_error(), Some(libc::EEXIST));
            let any = Credentials { pid: 0, ..who };
            let (left, _right) = pair(any, libc::AF_UNIX, libc::SOCK_STREAM, 0).unwrap();
            let found = socket::option(left, libc::SOL_SOCKET, libc::SO_PEERCRED, 12).unwrap();
            let found = Credentials::from_bytes(&found).unwrap();
            assert_eq!((found.uid, found.gid), (who.uid, who.gid));
            assert!(found.pid > 0 && found.pid != mine.pid);
        })
        .unwrap();
    }
}
