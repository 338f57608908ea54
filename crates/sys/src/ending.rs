//! Whether a process is about to be gone.

use crate::proc::{Stat, Status};

/// Whether the process has been killed but is not gone yet, or is gone.
#[must_use]
pub fn is_ending(pid: i32) -> bool {
    const PF_EXITING: u32 = libc::PF_EXITING as u32;
    // A leader may have ended long before the others.
    let pid = crate::asked::find(pid).unwrap_or(pid);
    let Ok(stat) = std::fs::read(format!("/proc/{pid}/stat")) else {
        return true;
    };
    let ends = |stat: Stat| matches!(stat.state, b'Z' | b'X') || stat.flags & PF_EXITING != 0;
    Stat::parse(&stat).is_ok_and(ends) || is_killed(pid)
}

/// Whether a `SIGKILL` is on its way to the process.
fn is_killed(pid: i32) -> bool {
    const KILLED: u64 = 1 << (libc::SIGKILL - 1);
    let status = std::fs::read(format!("/proc/{pid}/status")).unwrap_or_default();
    Status::parse(&status)
        .is_ok_and(|status| (status.pending | status.shared_pending) & KILLED != 0)
}

#[cfg(test)]
mod tests {
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
}
