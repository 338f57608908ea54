//! Threads and processes that have ended, and that are there again while something is made that
//! refers to them.
//!
//! - What: clocks of processes
//! - Kept: POSIX timers on the processor time of processes of the tree.
//! - Refused: "a timer on the processor time of process …", as "it is outside of the tree".
//! - CRIU 4.2: not known.

use resources::script::{Script, ScriptId, WordId};
use resources::task::Ended;
use syscalls::Sysno;

use super::lifecycle;
use super::scripts::{Plan, Planned};
use crate::Result;
use crate::records::{Saved, SavedTask};

const WALL: u32 = 0x4000_0000;

/// Checks that processes are of the tree by whose processor time timers of a task go.
///
/// # Errors
/// [`resources::Error::Unsupported`].
pub(super) fn check_clocks(saved: &Saved<'_>, task: &SavedTask<'_>, clocks: &[i32]) -> Result<()> {
    let is_there = |pid: &&i32| saved.tasks.iter().any(|task| task.node.pid == **pid);
    match clocks.iter().find(|pid| !is_there(pid)) {
        None => Ok(()),
        Some(pid) => {
            let what = format!("a timer on the processor time of process {pid}");
            let refused = resources::Error::unsupported(task.node.pid, what);
            Err(refused.because("it is outside of the tree").into())
        }
    }
}

/// Those of one process that are there now.
pub(super) struct There {
    /// Posted when they are to end.
    word: Option<WordId>,
    all: Vec<Ended>,
}

/// Adds the calls by which process `pid` makes them.
pub(super) fn begin(pid: i32, all: &[Ended], plan: &mut Plan, script: &mut Script) -> There {
    let word = (!all.is_empty()).then(|| plan.word());
    for ended in all {
        let word = word.expect("there is one");
        let id = u32::try_from(plan.scripts.len()).expect("fewer scripts than records");
        script.append(make(*ended, ScriptId(id)));
        let (role, own) = match ended.thread {
            true => ("ended thread", thread(word)),
            false => ("ended process", process(pid, word)),
        };
        plan.scripts.push(Planned {
            tid: ended.tid,
            role,
            script: own,
        });
        if ended.thread {
            plan.ended.push((pid, ended.tid));
        }
    }
    let all = all.to_vec();
    There { word, all }
}

impl There {
    /// Adds the calls by which they end.
    pub fn end(self, script: &mut Script) {
        let Some(word) = self.word else { return };
        script.post(word);
        for ended in self.all.iter().filter(|ended| !ended.thread) {
            let args = [ended.tid.into(), 0u32.into(), WALL.into()];
            script.expect(Sysno::wait4, args, ended.tid);
        }
    }
}

fn make(ended: Ended, id: ScriptId) -> Script {
    /// CLONE_VM | FS | FILES | SIGHAND | THREAD | SYSVSEM
    const THREAD: u64 = 0x100 | 0x200 | 0x400 | 0x800 | 0x1_0000 | 0x4_0000;
    /// CLONE_VM | FS | FILES: nothing of it is copied for a process that does nothing.
    const PROCESS: u64 = 0x100 | 0x200 | 0x400;
    let mut script = Script::default();
    let flags = if ended.thread { THREAD } else { PROCESS };
    let args = lifecycle::clone_args(&mut script, ended.tid, flags, 0);
    script.spawn(args, id);
    let what = if ended.thread { "thread" } else { "process" };
    script.note(format!("{what} {}, which ends again", ended.tid));
    script
}

fn thread(word: WordId) -> Script {
    let mut script = Script::default();
    script.wait(word, 1);
    script.call(Sysno::exit, [0u32.into()]);
    script
}

fn process(parent: i32, word: WordId) -> Script {
    let mut script = Script::default();
    lifecycle::tie_to_parent(&mut script, parent);
    script.wait(word, 1);
    script.call(Sysno::exit_group, [0u32.into()]);
    script
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ended_process_is_reaped_and_ended_thread_waited_for() {
        let all = [(7, true), (9, false)].map(|(tid, thread)| Ended { tid, thread });
        let (mut plan, mut script) = (Plan::default(), Script::default());
        let there = begin(5, &all, &mut plan, &mut script);
        there.end(&mut script);
        let text = script.to_string();
        assert_eq!(text.matches("clone3(").count(), 2, "{text}");
        assert!(
            text.contains("wait4(pid=9, status=0, options=0x40000000"),
            "{text}"
        );
        assert_eq!(plan.ended, [(5, 7)]);
        let own = plan.scripts.iter().map(|one| one.script.to_string());
        let own = own.collect::<Vec<_>>();
        assert!(
            own[0].contains("exit(status=0)") && own[1].contains("exit_group(status=0)"),
            "{own:?}"
        );
        assert!(own[1].contains("getppid() = 5"), "{own:?}");
    }

    #[test]
    fn nothing_is_made_for_nobody() {
        let (mut plan, mut script) = (Plan::default(), Script::default());
        begin(5, &[], &mut plan, &mut script).end(&mut script);
        assert!(script.steps.is_empty() && plan.words == 0);
    }
}
