//! The calls by which tasks are forked, lead sessions, join groups and end.

use resources::script::{Arg, Script, ScriptId, StepAt, Width, WordId};
use syscalls::Sysno;

use crate::records::Node;

use super::forks::{Fork, Joining, Kind, Membership};
use super::scripts::word;

const PR_SET_PDEATHSIG: u32 = linux_raw_sys::prctl::PR_SET_PDEATHSIG;
const SIGKILL: u32 = linux_raw_sys::general::SIGKILL;
const SIGCHLD: i32 = libc::SIGCHLD;
const P_PID: u32 = libc::P_PID;
const WEXITED: u32 = linux_raw_sys::general::WEXITED;
const WNOWAIT: u32 = linux_raw_sys::general::WNOWAIT;
const WALL: u32 = 0x4000_0000;

/// `clone_args` for a new task or thread with number `id`, and its size.
pub(super) fn clone_args(script: &mut Script, id: i32, flags: u64, signal: i32) -> [Arg; 2] {
    const CLONE_ARGS_BYTES: usize = 11 * 8;
    const EXIT_SIGNAL: usize = 4 * 8;
    const SET_TID: u32 = 8 * 8;
    const SET_TID_SIZE: usize = 9 * 8;
    let tid = script.bytes(&id.to_le_bytes());
    let mut bytes = [0; CLONE_ARGS_BYTES];
    bytes[..8].copy_from_slice(&flags.to_le_bytes());
    bytes[EXIT_SIGNAL..EXIT_SIGNAL + 4].copy_from_slice(&signal.to_le_bytes());
    bytes[SET_TID_SIZE] = 1;
    let args = script.bytes(&bytes);
    script.fix(args, SET_TID, tid, Width::Eight);
    [args.into(), CLONE_ARGS_BYTES.into()]
}

/// Makes a child, or a sibling, with further `flags`.
pub(super) fn fork(script: &mut Script, (child, flags): (&Fork, u64), sibling: bool, id: ScriptId) {
    const CLONE_PARENT: u64 = libc::CLONE_PARENT as u64;
    let (flags, signal) = if sibling {
        (flags | CLONE_PARENT, 0)
    } else {
        (flags, child.exit_signal)
    };
    let args = clone_args(script, child.pid, flags, signal);
    script.spawn(args, id);
    script.note(format!("task {}", child.pid));
}

/// From now on the task is killed when its parent ends: a restore that is cut off leaves nothing.
pub(super) fn tie_to_parent(script: &mut Script, parent: i32) {
    if parent != 0 {
        script.call(Sysno::prctl, [PR_SET_PDEATHSIG.into(), SIGKILL.into()]);
        script.expect(Sysno::getppid, [], parent);
        script.note("the parent lives");
    }
}

/// Makes it the leader of its session or group.
pub(super) fn lead(script: &mut Script, fork: &Fork) {
    if fork.session == Membership::Leader {
        script.call(Sysno::setsid, []);
    } else if fork.group == Membership::Leader || fork.founds {
        script.call(Sysno::setpgid, [0u32.into(), 0u32.into()]);
    }
}

/// Joins its group once all groups have their leaders; a founder leaves that which it leads when
/// all others are in theirs.
pub(super) fn join(script: &mut Script, fork: &Fork, joining: Joining) {
    script.post(word::FORKED);
    if let Membership::Of(group) = fork.group {
        script.wait(word::FORKED, joining.forks);
        if fork.founds {
            script.wait(word::GROUPED, joining.forks - joining.founders);
        }
        script.call(Sysno::setpgid, [0u32.into(), group.into()]);
    }
    script.post(word::GROUPED);
}

/// Takes on the user and groups that a zombie had.
pub(super) fn identify(script: &mut Script, node: &Node) {
    let groups = node.groups.iter().flat_map(|group| group.to_le_bytes());
    let groups = script.bytes(&groups.collect::<Vec<_>>());
    script.call(Sysno::setgroups, [node.groups.len().into(), groups.into()]);
    let three = |ids: &[u32]| [ids[0].into(), ids[1].into(), ids[2].into()];
    script.call(Sysno::setresgid, three(&node.gids));
    script.call(Sysno::setfsgid, [node.gids[3].into()]);
    script.call(Sysno::setresuid, three(&node.uids));
    script.call(Sysno::setfsuid, [node.uids[3].into()]);
}

/// Ends with the wait status that the parent is to get.
pub(super) fn end(script: &mut Script, pid: i32, status: i32) {
    let signal = status & 0x7f;
    if signal != 0 {
        const PR_SET_DUMPABLE: u32 = linux_raw_sys::prctl::PR_SET_DUMPABLE;
        const SIG_UNBLOCK: u32 = linux_raw_sys::general::SIG_UNBLOCK;
        // No core dump: a limit of 0 does not keep it from a program that takes core dumps.
        script.call(Sysno::prctl, [PR_SET_DUMPABLE.into(), 0u32.into()]);
        let mask = script.bytes(&(1u64 << (signal - 1)).to_le_bytes());
        let args = [SIG_UNBLOCK.into(), mask.into(), 0u32.into(), 8u32.into()];
        script.call(Sysno::rt_sigprocmask, args);
        script.call(Sysno::kill, [pid.into(), signal.into()]);
    }
    script.call(Sysno::exit_group, [((status >> 8) & 0xff).into()]);
}

/// Makes a userfaultfd, which the restorer fetches, and waits until it has filled the pages.
/// The descriptor is closed with all others that the task shall not have.
pub(super) fn ask_to_be_filled(script: &mut Script, ready: WordId, filled: WordId) -> StepAt {
    const O_CLOEXEC: u32 = linux_raw_sys::general::O_CLOEXEC;
    let step = script.call(Sysno::userfaultfd, [O_CLOEXEC.into()]);
    script.post(ready);
    script.wait(filled, 1);
    step
}

/// Waits until those children have ended that are to be dead, and takes back the signals by which
/// their ends were told.
pub(super) fn see_children_end(script: &mut Script, children: &[&Fork]) {
    let ended = children
        .iter()
        .filter(|child| !matches!(child.kind, Kind::Live(_)));
    let mut signals = 0u64;
    for child in ended {
        if child.kind == Kind::StandIn {
            script.expect(
                Sysno::wait4,
                [child.pid.into(), 0u32.into(), WALL.into()],
                child.pid,
            );
        } else {
            let options = WEXITED | WNOWAIT | WALL;
            let info = script.buffer(128);
            let args = [P_PID.into(), child.pid.into(), info.into(), options.into()];
            script.call(Sysno::waitid, args);
        }
        let signal = if child.exit_signal == 0 {
            SIGCHLD
        } else {
            child.exit_signal
        };
        signals |= 1 << (signal - 1);
    }
    for _ in 0..signals.count_ones() {
        let set = script.bytes(&signals.to_le_bytes());
        let now = script.buffer(16);
        let args = [set.into(), 0u32.into(), now.into(), 8u32.into()];
        script.attempt(Sysno::rt_sigtimedwait, args);
        script.note("the children's ends were told before");
    }
}
