//! Dumps and restores that are killed on their way: nothing may be lost.
use std::process::Command;
use std::time::Duration;

use rustix::process::Signal;

use super::{OPTIONS, REFUSED, Refusal, SubjectView, Trial, refused, succeeded};
use crate::storm::task::PROGRAM_32;
use crate::tree;
use crate::wait::{SOON, try_wait_for};

/// How often a dump that kills, and how often a restore, is killed at each pause.
const KILLS: usize = 3;
/// The name of the process that holds what is tracked after a pre-dump.
const TRACKER: &str = "stillframe-trk";

impl Trial<'_> {
    /// Dumps and restores, each killed a few times before it may end.
    pub(super) fn killed_cycle(&mut self, before: &SubjectView) -> Result<Refusal, String> {
        let first = self.dump(&["--leave-running"]);
        let longest = longer(first.elapsed);
        if let Some(refusal) = refused(first)? {
            return Ok(Some(refusal));
        }
        let tasks = self.subject.tree();
        for _ in 0..KILLS {
            self.kill_dump(before, &tasks, longest)?;
        }
        self.kill_dumps_of_what_runs(before, &tasks, longest)?;
        self.stillframe.clear();
        if let Some(refusal) = refused(self.dump(&[]))? {
            return Ok(Some(refusal));
        }
        let restored = self.stillframe.restore(OPTIONS);
        let longest = longer(restored.elapsed);
        succeeded(restored)?;
        for _ in 0..KILLS {
            self.kill_restore(before, &tasks, longest)?;
        }
        Ok(None)
    }

    /// Kills a dump that kills its target: the tree is untouched, or its image is whole.
    fn kill_dump(
        &mut self,
        before: &SubjectView,
        tasks: &[u32],
        longest: Duration,
    ) -> Result<(), String> {
        self.stillframe.clear();
        let command = self.stillframe.dump_command(self.subject.pid(), OPTIONS);
        let ended = self.kill_after(command, longest, tasks)?;
        let what = format!("a killed dump ({ended})");
        if !self.is_whole(tasks, &what)? {
            succeeded(self.stillframe.restore(OPTIONS))?;
        }
        self.compare_facts(before, &format!("after {what}"))
    }

    /// Kills dumps that leave their target running: the tree is untouched.
    fn kill_dumps_of_what_runs(
        &mut self,
        before: &SubjectView,
        tasks: &[u32],
        longest: Duration,
    ) -> Result<(), String> {
        let ways: [(&str, &[&str]); 3] = [
            ("dump", &["--leave-running"]),
            ("dump", &["--live"]),
            ("pre-dump", &[]),
        ];
        for (name, options) in ways {
            self.stillframe.clear();
            let pid = self.subject.pid();
            let options = [OPTIONS, options].concat();
            let command = self.stillframe.saving_command(name, pid, &options);
            let ended = self.kill_after(command, longest, tasks)?;
            let what = format!("a killed {name} {options:?} ({ended})");
            if !self.is_whole(tasks, &what)? {
                return Err(format!("nothing is left after {what}"));
            }
            self.compare_facts(before, &format!("after {what}"))?;
        }
        Ok(())
    }

    /// Kills a restore: all of the tree is there, or the image can be restored again.
    fn kill_restore(
        &mut self,
        before: &SubjectView,
        tasks: &[u32],
        longest: Duration,
    ) -> Result<(), String> {
        self.stillframe.clear();
        // Not by a signal: the other ends of its connections would hear of that.
        succeeded(self.dump(&[]))?;
        let command = self.stillframe.restore_command(OPTIONS);
        let ended = self.kill_after(command, longest, tasks)?;
        let what = format!("a killed restore ({ended})");
        if !self.is_whole(tasks, &what)? {
            succeeded(self.stillframe.restore(OPTIONS))?;
        }
        self.compare_facts(before, &format!("after {what}"))
    }

    /// Kills `command` at a random moment within `longest`, and waits until nothing of it is left;
    /// how it ended. One that ended before that must have succeeded.
    fn kill_after(
        &mut self,
        command: Command,
        longest: Duration,
        tasks: &[u32],
    ) -> Result<String, String> {
        let instant = self.chance.time(longest);
        let ended = self.stillframe.kill_after(command, instant);
        self.kills += usize::from(ended.is_none());
        let told = format!("{ended:?} at {instant:?}");
        let cleaned = try_wait_for(SOON, || {
            let helpers = self.stillframe.helpers();
            // It would hold what is tracked for longer than that.
            let trackers = helpers.iter().filter(|&&pid| is_tracker(pid));
            trackers.for_each(|&pid| {
                tree::signal(pid, Signal::KILL);
            });
            helpers.iter().chain(tasks).for_each(|&pid| tree::reap(pid));
            tree::reap_orphans();
            (helpers.is_empty() && tasks.iter().all(|&pid| is_calm(pid))).then_some(())
        });
        cleaned.ok_or(format!("what was killed is not gone: {told}"))?;
        match ended.and_then(|status| (!status.success()).then_some(status.code())) {
            Some(code) if code != Some(REFUSED) => {
                let logs = self.stillframe.logs();
                Err(format!("it failed before it was killed\n{told}\n{logs}"))
            }
            _ => Ok(told),
        }
    }

    /// Tells whether all of `tasks` are there, and not none of them.
    fn is_whole(&self, tasks: &[u32], after: &str) -> Result<bool, String> {
        let whole = try_wait_for(SOON, || {
            tasks.iter().for_each(|&pid| tree::reap(pid));
            if tasks.iter().all(|&pid| self.stays(pid)) {
                return Some(true);
            }
            // A session is free when its last orphan is: one of a restore may have been none of the
            // tree's tasks.
            tree::reap_orphans();
            let orphans = tree::children(std::process::id()).into_iter();
            let mut sessions = orphans.filter_map(tree::session);
            let is_gone = !tasks.iter().any(|&pid| tree::exists(pid));
            (is_gone && !sessions.any(|one| tasks.contains(&one))).then_some(false)
        });
        whole.ok_or_else(|| {
            let state = |&pid: &u32| (pid, tree::state(pid), tree::last_end(pid));
            let states: Vec<_> = tasks.iter().map(state).collect();
            let logs = self.stillframe.logs();
            format!("neither all nor nothing is left\nafter {after}: {states:?}\n{logs}")
        })
    }

    /// Tells whether a task of the tree is there and nothing that was done until now ends it: a
    /// zombie, or one that sleeps with all of its threads. Who has been killed is awake until its
    /// end. A process that acts for it during a restore has its pid, but another program.
    fn stays(&self, pid: u32) -> bool {
        let is_root = pid == self.subject.pid();
        match tree::state(pid) {
            Some('Z') if !tree::is_alive(pid) => !is_root,
            Some(_) => {
                let program = std::fs::read_link(format!("/proc/{}/exe", tree::asked(pid)));
                let mut threads = tree::threads(pid);
                threads.retain(|tid| tree::state(*tid) != Some('Z'));
                let sleeps = |&tid: &u32| tree::state(tid) == Some('S') && tree::is_waiting(tid);
                let is_its = program.is_ok_and(|program| {
                    program == crate::subject::binary() || program.ends_with(PROGRAM_32)
                });
                is_its && !threads.is_empty() && threads.iter().all(sleeps)
            }
            None => false,
        }
    }

    /// What differs from before when what killed dumps had begun in the target has ended.
    pub(super) fn differences_at_last(&self, before: &SubjectView) -> Vec<String> {
        let differences = || {
            let mut differences = before.facts.diff(&self.facts());
            // A killed dump leaves code in the padding, which no task executes.
            let tasks = self.subject.tree().into_iter();
            let paddings: Vec<_> = tasks.map(vdso_padding).collect();
            differences.retain(|line| !paddings.iter().any(|page| line.starts_with(page)));
            differences
        };
        let mut last = Vec::new();
        // Then it is told what differs still.
        let _ = try_wait_for(SOON, || {
            last = differences();
            last.is_empty().then_some(())
        });
        last
    }
}

/// As long as a run took and a little more, where the last clean-up happens.
fn longer(time: Duration) -> Duration {
    time + time / 5
}

fn is_tracker(pid: u32) -> bool {
    let name = std::fs::read_to_string(format!("/proc/{pid}/comm"));
    name.is_ok_and(|name| name.trim_end() == TRACKER)
}

/// Tells whether a task is neither traced nor stopped.
fn is_calm(pid: u32) -> bool {
    let status = std::fs::read(format!("/proc/{pid}/status"));
    status.map_or(true, |status| {
        // Its name may be any bytes.
        let status = String::from_utf8_lossy(&status);
        status.contains("TracerPid:\t0") && !status.contains("State:\tT")
    })
}

/// How facts name the last page of a task's vDSO.
fn vdso_padding(pid: u32) -> String {
    let maps = format!("/proc/{}/maps", tree::asked(pid));
    let maps = std::fs::read_to_string(maps).unwrap_or_default();
    let vdso = maps.lines().find(|line| line.ends_with("[vdso]"));
    let end = vdso.and_then(|line| line.split([' ', '-']).nth(1));
    let end = end.and_then(|end| u64::from_str_radix(end, 16).ok());
    format!(
        "{pid} page {:#x}: ",
        end.unwrap_or_default().wrapping_sub(4096)
    )
}
