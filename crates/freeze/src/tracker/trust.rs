//! Who a tracker and its client are to each other.
use std::os::fd::OwnedFd;

use rustix::net::sockopt::socket_peercred;
use rustix::process::geteuid;

/// When a process was started; none for one that has ended.
pub fn start_ticks(pid: i32) -> Option<u64> {
    let stat = crate::stat_of(pid)?;
    (!sys::process::has_ended(&stat)).then_some(stat.start_ticks)
}

/// Whether the other side is this user or root.
pub fn is_trusted(socket: &OwnedFd) -> bool {
    socket_peercred(socket).is_ok_and(|peer| peer.uid == geteuid() || peer.uid.is_root())
}
