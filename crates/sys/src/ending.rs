//! Whether a process is about to be gone, and whether its number is.

use std::fs::File;

use crate::numbers;
use crate::proc::{Stat, Status};
use crate::process::Process;

/// Whether the process has been killed but is not gone yet, or is gone.
#[must_use]
pub fn is_ending(pid: i32) -> bool {
    const PF_EXITING: u32 = libc::PF_EXITING as u32;
    // A leader may have ended long before the others.
    let pid = Process::living(pid).tid();
    let Ok(stat) = crate::procfs::read(format_args!("{pid}/stat")) else {
        return true;
    };
    let ends = |stat: Stat| matches!(stat.state, b'Z' | b'X') || stat.flags & PF_EXITING != 0;
    Stat::parse(&stat).is_ok_and(ends) || is_killed(pid)
}

/// The processes whose session or process group has this number, with what /proc says of them.
pub fn members(number: i32) -> impl Iterator<Item = (i32, Stat)> {
    let folder = File::open(crate::procfs::path(".")).ok();
    let pids = folder.and_then(|folder| numbers::of(&folder).ok());
    let all = pids.unwrap_or_default().into_iter();
    let all = all.filter_map(|pid| {
        let stat = crate::procfs::read(format_args!("{pid}/stat")).ok()?;
        Some((pid, Stat::parse(&stat).ok()?))
    });
    all.filter(move |(_, stat)| stat.session == number || stat.pgrp == number)
}

/// Whether all that have a number, as a process, a process group or a session, are about to be
/// gone: the kernel gives it to nobody else before.
#[must_use]
pub fn is_leaving(number: i32) -> bool {
    is_ending(number) && members(number).all(|(pid, _)| is_ending(pid))
}

/// Whether a `SIGKILL` is on its way to the process.
fn is_killed(pid: i32) -> bool {
    const KILLED: u64 = 1 << (libc::SIGKILL - 1);
    let status = crate::procfs::read(format_args!("{pid}/status")).unwrap_or_default();
    Status::parse(&status)
        .is_ok_and(|status| (status.pending | status.shared_pending) & KILLED != 0)
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt as _;

    use super::*;

    #[test]
    fn the_living_and_the_dead_are_told_apart() {
        assert!(!is_ending(1));
        let mut child = std::process::Command::new("sleep")
            .arg("1000")
            .spawn()
            .unwrap();
        let pid = i32::try_from(child.id()).unwrap();
        assert!(!is_ending(pid));
        child.kill().unwrap();
        assert!(is_ending(pid));
        child.wait().unwrap();
        assert!(is_ending(pid));
    }

    #[test]
    fn number_of_a_group_leaves_with_its_last_member() {
        let sleep = || std::process::Command::new("sleep");
        let mut leader = sleep().arg("1000").process_group(0).spawn().unwrap();
        let number = leader.id().cast_signed();
        let mut member = sleep().arg("1000").process_group(number).spawn().unwrap();
        let pids = || members(number).map(|(pid, _)| pid).collect::<Vec<_>>();
        assert_eq!(pids(), [number, member.id().cast_signed()]);
        leader.kill().unwrap();
        leader.wait().unwrap();
        assert!(is_ending(number) && !is_leaving(number));
        member.kill().unwrap();
        // It is a zombie that nobody has asked for yet.
        assert!(is_leaving(number));
        assert_eq!(pids(), [member.id().cast_signed()]);
        member.wait().unwrap();
        assert!(is_leaving(number) && pids().is_empty());
    }
}
