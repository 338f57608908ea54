//! Tasks that end: those of a failed restore, and those whose numbers a restore needs.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use freeze::stat_of;
use rustix::process::{Pid, Signal, child_subreaper, getpid, kill_process, set_child_subreaper};
use sys::process::{Process, has_ended};
use sys::ptrace;

use crate::build::Built;

/// How long the ends of killed tasks are waited for.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often it is looked at what is left.
const LOOK: Duration = Duration::from_millis(1);

/// Whether the process has been killed but is not gone yet, or is gone.
pub(super) fn is_ending(pid: i32) -> bool {
    sys::ending::is_ending(pid) || is_being_made(pid)
}

/// Whether a restore makes the process: it comes to life or, where that restore was killed, ends.
fn is_being_made(pid: i32) -> bool {
    let maps = freeze::read_proc(&Process::living(pid), "maps").unwrap_or_default();
    let area = sys::restore_area::NAME.as_bytes();
    maps.windows(area.len()).any(|name| name == area)
}

/// As long as it is there, orphans of tasks that this process has made become its children
/// (PR_SET_CHILD_SUBREAPER of prctl(2)): so nobody else has to see their ends, who may take his
/// time while they keep their numbers.
#[derive(Debug)]
pub(super) struct Adopting {
    /// Whether they would not otherwise.
    begun: bool,
}

impl Adopting {
    /// Begins it; where that cannot be, init sees their ends.
    pub fn begin() -> Self {
        let already = child_subreaper().is_ok_and(|is| is.is_some());
        let begun = !already && set_child_subreaper(Some(getpid())).is_ok();
        Self { begun }
    }
}

impl Drop for Adopting {
    fn drop(&mut self) {
        if self.begun {
            let _ = set_child_subreaper(None);
        }
    }
}

/// Kills every task that was made so far and waits until all are gone. The root goes last, so that
/// children cannot escape.
pub(super) fn kill_tree(built: &Built, root: i32) {
    let _adopting = Adopting::begin();
    let deadline = Instant::now() + PATIENCE;
    let mut killed = HashMap::new();
    let nothing_is_left = until_nothing_is_found(deadline, || {
        let found = made(built, root);
        for pid in found.iter().rev() {
            if let Some(stat) = stat_of(*pid) {
                killed.entry(*pid).or_insert(stat.start_ticks);
            }
            if let Some(task) = Pid::from_raw(*pid) {
                let _ = kill_process(task, Signal::KILL);
            }
        }
        see_ends(built, &killed);
        killed.retain(|pid, start| is_left(*pid, *start));
        found.len().max(killed.len())
    });
    if !nothing_is_left {
        log::warn!("{} killed tasks are still there", killed.len());
    }
}

/// Looks again and again until a look finds nothing at all, and tells whether that came to be: a
/// look that killed all that it found is not the last, as a task may have forked between the
/// moments in which the look came to its child's number and to itself.
fn until_nothing_is_found(deadline: Instant, mut look: impl FnMut() -> usize) -> bool {
    loop {
        if look() == 0 {
            return true;
        }
        if Instant::now() > deadline {
            return false;
        }
        std::thread::sleep(LOOK);
    }
}

/// The tasks of the tree that are there: what descends from the root, and orphans of it that are
/// our children now.
fn made(built: &Built, root: i32) -> Vec<i32> {
    let parents = parents(built);
    let own = std::process::id().cast_signed();
    let ours = |pid: &i32| descends(*pid, root, &parents) || descends(*pid, own, &parents);
    // Process 1 ends by its maker, which is outside of its namespace, alone. Nobody here hears of
    // the end of a child of that, or of this process's parent.
    let is_there = |pid: &i32| {
        let stat = stat_of(*pid).filter(|stat| !has_ended(stat) || stat.ppid == own);
        *pid != sys::init::NUMBER && stat.is_some()
    };
    pids(built).filter(is_there).filter(ours).collect()
}

/// Sees the ends of killed threads that are traced or children. A traced thread stays until its
/// tracer has seen its end, and its leader until then.
fn see_ends(built: &Built, ours: &HashMap<i32, u64>) {
    let threads = built.plan.threads.iter();
    let threads = threads.filter(|staying| staying.pid != staying.tid);
    let threads = threads.filter(|staying| ours.contains_key(&staying.pid));
    let tids = threads.map(|staying| staying.tid);
    for tid in tids.chain(ours.keys().copied()) {
        while let Ok(Some((_, event))) = ptrace::try_wait(tid) {
            if matches!(event, ptrace::Event::Ended(_)) {
                break;
            }
        }
    }
}

/// Whether the task is there still; one that only somebody else can wait for is as good as gone
/// when it has ended, and its number is free soon.
fn is_left(pid: i32, start: u64) -> bool {
    let own = std::process::id().cast_signed();
    let Some(stat) = stat_of(pid).filter(|stat| stat.start_ticks == start) else {
        return false;
    };
    !matches!(stat.state, b'Z' | b'X') || stat.ppid == own
}

/// The pids of all tasks to be made, parents before children.
fn pids(built: &Built) -> impl DoubleEndedIterator<Item = i32> {
    let tasks = built.plan.scripts.iter();
    tasks
        .filter(|planned| planned.role != "thread")
        .map(|planned| planned.tid)
}

/// The parents that these have now.
pub(super) fn parents(built: &Built) -> HashMap<i32, i32> {
    let parent = |pid: i32| Some((pid, stat_of(pid)?.ppid));
    pids(built).filter_map(parent).collect()
}

/// Whether `pid` is the root or descends from it, all of whose tree is in `parents`: its number
/// may belong to somebody else.
pub(super) fn descends(pid: i32, root: i32, parents: &HashMap<i32, i32>) -> bool {
    let line = std::iter::successors(Some(pid), |pid| parents.get(pid).copied());
    line.take(parents.len() + 1).any(|pid| pid == root)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_that_found_something_is_not_the_last() {
        // The second finds what was forked during the first.
        let mut finds = [3, 1, 0, 1].into_iter();
        let soon = Instant::now() + PATIENCE;
        assert!(until_nothing_is_found(soon, || finds
            .next()
            .expect("four looks")));
        assert_eq!(
            finds.next(),
            Some(1),
            "no look after the one that found nothing"
        );
        assert!(
            !until_nothing_is_found(Instant::now(), || 1),
            "until the deadline"
        );
    }

    #[test]
    fn only_what_descends_from_the_root_is_ours() {
        // A line of 999 below the root, a stranger, and two read while pids changed hands.
        let mut parents = (101..1100)
            .map(|pid| (pid, pid - 1))
            .collect::<HashMap<_, _>>();
        parents.extend([(50, 1), (60, 61), (61, 60)]);
        for ours in [100, 101, 1099] {
            assert!(descends(ours, 100, &parents), "{ours}");
        }
        for stranger in [1, 50, 60, 2000] {
            assert!(!descends(stranger, 100, &parents), "{stranger}");
        }
    }
}
