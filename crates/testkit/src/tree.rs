//! The tasks of a tree as /proc lists them, and their end.
//!
//! The test process makes itself a child subreaper, so that whatever it started, and whatever a
//! restore brought back for it, stays its descendant. Only descendants are ever killed: a pid
//! that was reused by a stranger is left alone.
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::{Mutex, Once, PoisonError};
use std::time::Duration;

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, WaitOptions};

use crate::wait;

/// Makes orphans of this process's descendants come back to it; called before anything is
/// started.
pub fn adopt_orphans() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
            .expect("every process may become a child subreaper");
    });
}

/// Lists `root` and its descendants, parents before children, siblings by pid; zombies too, and
/// nothing when `root` does not exist.
pub fn members(root: u32) -> Vec<u32> {
    let mut found = Vec::new();
    if exists(root) {
        found.push(root);
    }
    let mut next = 0;
    while let Some(&pid) = found.get(next) {
        found.extend(children(pid));
        next += 1;
    }
    found
}

/// Lists the children of all threads of `pid`, sorted.
pub fn children(pid: u32) -> Vec<u32> {
    let mut found: Vec<u32> = threads(pid)
        .into_iter()
        .filter_map(|tid| fs::read_to_string(format!("/proc/{pid}/task/{tid}/children")).ok())
        .flat_map(|list| {
            list.split_ascii_whitespace()
                .filter_map(|child| child.parse().ok())
                .collect::<Vec<u32>>()
        })
        .collect();
    found.sort_unstable();
    found
}

/// Lists the threads of `pid`, sorted.
pub fn threads(pid: u32) -> Vec<u32> {
    let mut found: Vec<u32> = fs::read_dir(format!("/proc/{pid}/task"))
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .collect();
    found.sort_unstable();
    found
}

/// Tells whether `pid` exists, be it as a zombie.
pub fn exists(pid: u32) -> bool {
    fs::exists(format!("/proc/{pid}/stat")).unwrap_or(false)
}

/// Tells whether `pid` exists and is neither dead nor a zombie.
pub fn is_alive(pid: u32) -> bool {
    let lives = |pid| state(pid).is_some_and(|state| state != 'Z' && state != 'X');
    // The first thread of a process may end before others.
    lives(pid) || threads(pid).into_iter().any(lives)
}

/// The thread of `pid` by which /proc tells what the process has: `pid`, unless the first thread
/// has ended and others run on.
pub fn asked(pid: u32) -> u32 {
    sys::process::Process::living(pid.cast_signed())
        .tid()
        .cast_unsigned()
}

/// The state letter of `pid` as in /proc/PID/stat.
pub fn state(pid: u32) -> Option<char> {
    stat_after_name(pid)?.chars().next()
}

/// The parent of `pid`.
pub fn parent(pid: u32) -> Option<u32> {
    stat_after_name(pid)?.split(' ').nth(1)?.parse().ok()
}

/// The process group of `pid`.
pub fn group(pid: u32) -> Option<u32> {
    stat_after_name(pid)?.split(' ').nth(2)?.parse().ok()
}

/// The session of `pid`.
pub fn session(pid: u32) -> Option<u32> {
    stat_after_name(pid)?.split(' ').nth(3)?.parse().ok()
}

/// The processor time of `pid`, user and system, in clock ticks.
pub fn ticks(pid: u32) -> Option<u64> {
    let stat = stat_after_name(pid)?;
    let mut fields = stat.split(' ').skip(11);
    let user: u64 = fields.next()?.parse().ok()?;
    let system: u64 = fields.next()?.parse().ok()?;
    Some(user + system)
}

/// Tells whether thread `tid` is in one of the calls that wait for events, or dead or stopped.
pub fn is_waiting(tid: u32) -> bool {
    // read, poll, select, pause, nanosleep, wait4, rt_sigsuspend, futex, restart_syscall,
    // clock_nanosleep, epoll_wait, pselect6, ppoll, epoll_pwait, accept4, accept, recvfrom,
    // rt_sigtimedwait, epoll_pwait2, mq_timedsend and mq_timedreceive.
    const WAITS: [i32; 21] = [
        0, 7, 23, 34, 35, 61, 130, 202, 219, 230, 232, 270, 271, 281, 288, 43, 45, 128, 441, 242,
        243,
    ];
    if matches!(state(tid), Some('Z' | 'T')) {
        return true;
    }
    let call = fs::read_to_string(format!("/proc/{tid}/syscall")).unwrap_or_default();
    let number = call.split(' ').next().and_then(|word| word.parse().ok());
    // A program of 32 bits has other numbers, and its stack below 4 GiB.
    const READ_32: i32 = 3;
    let stack = call.trim_end().rsplit(' ').nth(1).unwrap_or_default();
    let is_32_bit = stack.len() <= "0xffffffff".len();
    number.is_some_and(|number| match is_32_bit {
        true => number == READ_32,
        false => WAITS.contains(&number),
    })
}

/// /proc/PID/stat from the state letter on.
fn stat_after_name(pid: u32) -> Option<String> {
    stat_at(&format!("/proc/{pid}"))
}

/// The file `stat` of a process or a thread, whose folder in /proc is given, from the state letter
/// on. The name before that may be any bytes.
pub fn stat_at(folder: &str) -> Option<String> {
    let stat = fs::read(format!("{folder}/stat")).ok()?;
    let stat = String::from_utf8_lossy(&stat);
    let (_, rest) = stat.rsplit_once(") ")?;
    Some(rest.trim_end().to_owned())
}

/// Tells whether `pid` descends from this process.
pub fn is_ours(pid: u32) -> bool {
    let own = std::process::id();
    let mut at = pid;
    while let Some(up) = parent(at) {
        if up == own {
            return true;
        }
        at = up;
    }
    false
}

/// Lists the children of this process with `variable`, as in "NAME=value", in their environment:
/// orphans of what was started with it.
pub fn marked(variable: &str) -> Vec<u32> {
    let has_mark = |pid: &u32| {
        let environment = fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
        let mut variables = environment.split(|&byte| byte == 0);
        variables.any(|found| found == variable.as_bytes())
    };
    children(std::process::id())
        .into_iter()
        .filter(has_mark)
        .collect()
}

/// Sends `signal` to `pid`; tells whether it could be sent.
pub fn signal(pid: u32, signal: Signal) -> bool {
    i32::try_from(pid)
        .ok()
        .and_then(Pid::from_raw)
        .is_some_and(|pid| rustix::process::kill_process(pid, signal).is_ok())
}

/// Kills every descendant of this process among `pids` and their trees, and waits until they are
/// gone and reaped; tells whether all went.
///
/// They are stopped before the first is killed, so that none lives to see another's end, which a
/// restore of the tree would then have to answer for.
pub fn kill(pids: &[u32]) -> bool {
    // Whatever was seen stays in sight: an orphan is no longer below the root.
    let mut seen: BTreeSet<u32> = pids.iter().copied().collect();
    wait::try_wait_for(wait::SOON, || {
        let ours = |pids: &BTreeSet<u32>| -> Vec<u32> {
            pids.iter().copied().filter(|&pid| is_ours(pid)).collect()
        };
        let below = ours(&seen).into_iter().flat_map(members);
        seen.extend(below);
        let left = ours(&seen);
        for &pid in &left {
            signal(pid, Signal::STOP);
        }
        for &pid in &left {
            signal(pid, Signal::KILL);
            reap(pid);
        }
        left.is_empty().then_some(())
    })
    .is_some()
}

/// How those ended that were reaped, by pid.
static ENDS: Mutex<BTreeMap<u32, String>> = Mutex::new(BTreeMap::new());

/// Reaps `pid` where it is a dead child of this process.
pub fn reap(pid: u32) {
    let raw = i32::try_from(pid).ok().and_then(Pid::from_raw);
    let Some(raw) = raw else { return };
    // Not a child, or not dead yet: then there is nothing to reap. To wait would take the stop of
    // one that another thread traces.
    let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    let seen = rustix::process::waitid(WaitId::Pid(raw), look)
        .ok()
        .flatten();
    if !seen.is_some_and(|seen| seen.exited() || seen.killed() || seen.dumped()) {
        return;
    }
    if let Ok(Some((_, status))) = rustix::process::waitpid(Some(raw), WaitOptions::NOHANG) {
        let how = match (status.terminating_signal(), status.exit_status()) {
            (Some(signal), _) => format!("signal {signal}"),
            (_, code) => format!("exit status {}", code.unwrap_or_default()),
        };
        let mut ends = ENDS.lock().unwrap_or_else(PoisonError::into_inner);
        ends.insert(pid, how);
    }
}

/// How the last process with this pid ended that [`reap`] has reaped.
pub fn last_end(pid: u32) -> Option<String> {
    let ends = ENDS.lock().unwrap_or_else(PoisonError::into_inner);
    ends.get(&pid).cloned()
}

/// Reaps dead children of this process that are in another session than it: orphans of commands
/// that were killed, which keep their pids and those of their sessions as long as they are not.
/// Waits a moment for those that are ending.
pub fn reap_orphans() {
    const MOMENT: Duration = Duration::from_secs(2);
    let own = session(std::process::id());
    wait::try_wait_for(MOMENT, || {
        let mut orphans = children(std::process::id());
        orphans.retain(|&pid| session(pid) != own);
        orphans.iter().for_each(|&pid| reap(pid));
        let is_ending = |pid: u32| sys::ending::is_ending(pid.cast_signed());
        (!orphans.into_iter().any(is_ending)).then_some(())
    });
}

/// Waits until none of `pids` exists, reaping those that are children of this process.
///
/// # Panics
/// When one still exists after the deadline.
#[track_caller]
pub fn wait_gone(pids: &[u32]) {
    wait::wait_until(&format!("the end of {pids:?}"), wait::SOON, || {
        pids.iter().for_each(|&pid| reap(pid));
        !pids.iter().any(|&pid| exists(pid))
    });
}

/// Waits until the numbers `pids` of a tree that was killed are free: none exists, nor an orphan of
/// theirs, made after the tree was listed, that is in a group or session of theirs.
///
/// # Panics
/// When something still exists after the deadline.
#[track_caller]
pub fn wait_free(pids: &[u32]) {
    wait_gone(pids);
    let is_in = |number: Option<u32>| number.is_some_and(|number| pids.contains(&number));
    let mut orphans = children(std::process::id());
    orphans.retain(|&pid| is_in(session(pid)) || is_in(group(pid)));
    wait_gone(&orphans);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::Program;

    #[test]
    fn who_is_traced_keeps_its_stop() {
        use sys::ptrace;

        let child = std::process::Command::new("sleep").arg("1000").spawn();
        let mut child = child.expect("it starts");
        let (pid, tid) = (child.id(), child.id().cast_signed());
        ptrace::seize(tid, true).expect("it is ours");
        ptrace::interrupt(tid).expect("it is traced");
        wait::wait_until("its stop", wait::SOON, || state(pid) == Some('t'));
        std::thread::spawn(move || reap(pid)).join().expect("done");
        let seen = ptrace::try_wait(tid).expect("it is traced");
        assert!(
            matches!(seen, Some((_, ptrace::Event::Stop(_)))),
            "{seen:?}"
        );
        child.kill().expect("it lives");
        child.wait().expect("it has ended");
    }

    #[test]
    fn lists_and_kills_a_tree() {
        let spawned = Program::new("sh")
            .args(["-c", "sleep 1000 & sleep 1000 & wait"])
            .spawn();
        wait::wait_until("two children", wait::SOON, || {
            members(spawned.pid()).len() == 3
        });
        let pids = members(spawned.pid());
        assert!(pids.iter().all(|&pid| is_ours(pid) && is_alive(pid)));
        assert!(kill(&[spawned.pid()]));
        assert!(!pids.iter().any(|&pid| exists(pid)));
    }

    #[test]
    fn strangers_are_left_alone() {
        assert!(!is_ours(1));
        assert!(kill(&[1]));
        assert!(exists(1));
    }
}
