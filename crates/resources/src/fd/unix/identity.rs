//! Calls in the name of another process, where the kernel notes who makes them.
//!
//! - What: who made a unix socket's peer
//! - Kept: process, user, group and supplementary groups (`SO_PEERCRED`, `SO_PEERGROUPS`).
//! - Refused: "its peer has a security label that is not ours" (`SO_PEERSEC`).
//! - CRIU 4.2: does not look at supplementary groups and labels.

use std::io;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use sys::socket::Credentials;

use super::{AF_UNIX, STREAM};
use crate::fd::Open;
use crate::{Error, Result};

/// How long a restore waits for numbers whose holders are ending, in all.
const PATIENCE: Duration = Duration::from_secs(5);

/// Until when a restore waits for numbers: one time for all calls that it makes for others.
#[derive(Clone, Debug, Default)]
pub struct Patience(Arc<OnceLock<Instant>>);

impl Patience {
    fn lasts(&self) -> bool {
        let now = Instant::now();
        now < *self.0.get_or_init(|| now + PATIENCE)
    }
}

/// Makes a call in the name of `who` ([`sys::identity`]). A number that a killed tree has is waited
/// for: its zombies keep those of their sessions and process groups until somebody reaps them.
/// Where somebody else has the number, another process of the same user makes the call; where it is
/// our own, or we may not choose numbers, we do.
///
/// # Errors
/// The call's errno.
pub fn act_as<T>(
    who: Credentials,
    patience: &Patience,
    named: impl Fn(Credentials) -> io::Result<T>,
    plain: impl FnOnce() -> io::Result<T>,
) -> io::Result<T> {
    let mut pause = Duration::from_millis(1);
    let mut named = || loop {
        let made = named(who);
        let is_taken = |error: &io::Error| Errno::from_io_error(error) == Some(Errno::EXIST);
        let is_ours = who.pid == std::process::id().cast_signed();
        if is_ours || !made.as_ref().is_err_and(is_taken) {
            return made;
        }
        if !sys::ending::is_leaving(who.pid) || !patience.lasts() {
            log::warn!("a unix socket tells of another process than {}", who.pid);
            return named(Credentials { pid: 0, ..who });
        }
        std::thread::sleep(pause);
        pause = (2 * pause).min(Duration::from_millis(20));
    };
    match named() {
        Err(error) => match Errno::from_io_error(&error) {
            Some(Errno::EXIST | Errno::PERM | Errno::INVAL | Errno::NOSYS) => {
                log::info!("a unix socket is not told of {who:?}: {error}");
                plain()
            }
            _ => Err(error),
        },
        done => done,
    }
}

/// The supplementary groups of who made the other end.
///
/// # Errors
/// The call's errno.
pub fn groups_of(own: BorrowedFd<'_>) -> Result<Vec<u32>> {
    match sys::socket::peer_groups(own) {
        Err(error) if Errno::from_io_error(&error) == Some(Errno::NODATA) => Ok(Vec::new()),
        groups => {
            groups.map_err(|error| Error::kernel("ask a unix socket for its peer's groups", error))
        }
    }
}

/// Refuses a socket whose peer has a security label (`SO_PEERSEC`) that is not the one of sockets
/// which we make.
///
/// # Errors
/// [`Error::Unsupported`].
pub fn refuse_label(open: &Open<'_>) -> Result<()> {
    const SO_PEERSEC: i32 = libc::SO_PEERSEC;
    const LABEL_BYTES: usize = 4096;
    static OURS: OnceLock<Option<Vec<u8>>> = OnceLock::new();
    let label = |own: BorrowedFd<'_>| sys::socket::option(own, 1, SO_PEERSEC, LABEL_BYTES).ok();
    let ours = || {
        let (left, _right) = sys::socket::pair(AF_UNIX, STREAM, 0).ok()?;
        label(left.as_fd())
    };
    let Some(ours) = OURS.get_or_init(ours) else {
        return Ok(());
    };
    if label(open.own()?).is_some_and(|label| label != *ours) {
        return Err(open.unsupported("its peer has a security label that is not ours", None));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt as _;
    use std::process::{Child, Command};

    use super::*;

    /// A process of a group whose leader has ended, and the group's number.
    fn member() -> (Child, i32) {
        let sleep = |group| {
            let mut sleep = Command::new("sleep");
            sleep.arg("1000").process_group(group).spawn()
        };
        let mut leader = sleep(0).expect("a process");
        let number = leader.id().cast_signed();
        let member = sleep(number).expect("a process");
        leader.kill().expect("killed");
        leader.wait().expect("ended");
        (member, number)
    }

    /// What a socket tells that is made in the name of process `pid`.
    fn told(pid: i32) -> Credentials {
        let (uid, gid) = (65_534, 65_533);
        let who = Credentials { pid, uid, gid };
        let named = |who: Credentials| sys::identity::pair(who, AF_UNIX, STREAM, 0);
        let plain = || panic!("root can name others");
        let made = act_as(who, &Patience::default(), named, plain);
        let (left, _right) = made.expect("a pair");
        let told = super::super::maker_of(left.as_fd()).expect("asked");
        let told = Credentials::from(told.expect("somebody made it"));
        assert_eq!((told.uid, told.gid), (uid, gid));
        told
    }

    #[test]
    fn number_that_a_zombie_keeps_is_waited_for() {
        testkit::needs_root!();
        let (mut member, number) = member();
        member.kill().expect("killed");
        std::thread::scope(|scope| {
            let told = scope.spawn(|| told(number));
            // Longer than init may take on a busy machine.
            std::thread::sleep(Duration::from_millis(700));
            member.wait().expect("ended");
            assert_eq!(told.join().expect("told").pid, number);
        });
    }

    #[test]
    fn number_that_somebody_keeps_is_another_one_of_the_same_user() {
        testkit::needs_root!();
        let (mut member, number) = member();
        let told = told(number);
        member.kill().expect("killed");
        member.wait().expect("ended");
        assert_ne!(told.pid, number);
    }
}
