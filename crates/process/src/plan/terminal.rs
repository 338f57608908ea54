//! The controlling terminals of sessions, as tasks have them at a restore.

use resources::fd::Description;
use resources::fd::tty::control;
use resources::script::Script;

use crate::records::{Node, Saved, SavedTask};

/// The description of the controlling terminal of the session that a task leads.
pub(super) fn of<'a>(saved: &'a Saved<'_>, node: &Node) -> Option<(u32, &'a dyn Description)> {
    all(saved, node.terminal).next()
}

/// The descriptions of the terminal that /proc/PID/stat calls `number`; none of 0.
fn all<'a>(saved: &'a Saved<'_>, number: i32) -> impl Iterator<Item = (u32, &'a dyn Description)> {
    let all = saved.descriptions.iter().map(|one| &**one);
    let is_it =
        move |one: &(u32, &dyn Description)| number != 0 && control::is_terminal(one.1, number);
    (0..).zip(all).filter(is_it)
}

/// The description of the controlling terminal of its session, if a task has given it up.
pub(super) fn left(saved: &Saved<'_>, node: &Node) -> Option<u32> {
    let mut nodes = saved.tasks.iter().map(|task| &task.node);
    let leader = nodes.find(|leader| leader.pid == node.session);
    let leader = leader.filter(|_| node.left_terminal)?;
    of(saved, leader).map(|(id, _)| id)
}

/// Puts the terminal's foreground group in front: the first task of the session that has the
/// terminal open does, or else the leader's own group stays there.
pub(super) fn foreground(saved: &Saved<'_>, index: usize, script: &mut Script) {
    let tasks = &saved.tasks;
    let session = tasks[index].node.session;
    let Some(leader) = tasks.iter().position(|task| task.node.pid == session) else {
        return;
    };
    let group = tasks[leader].node.foreground;
    let number = tasks[leader].node.terminal;
    let exists = tasks.iter().any(|task| task.node.group == group);
    if group <= 0 || !exists {
        return;
    }
    let open = all(saved, number).map(|(id, _)| id).collect::<Vec<_>>();
    let descriptor = |task: &SavedTask<'_>| {
        let mut all = saved.with_descriptors_of(task).descriptors.iter();
        let found = all.find(|one| open.contains(&one.description));
        found
            .filter(|_| task.node.session == session)
            .map(|one| one.fd)
    };
    let first = tasks.iter().position(|task| descriptor(task).is_some());
    if let (Some(fd), true) = (descriptor(&tasks[index]), first == Some(index)) {
        control::foreground(script, fd, group);
    }
}
