//! The controlling terminals of sessions, as tasks have them at a restore.

use resources::fd;
use resources::fd::tty::control;
use resources::script::Script;

use crate::Result;
use crate::records::{Node, Saved, SavedTask};

/// The description of the controlling terminal of the session that a task leads.
pub(super) fn of<'a>(saved: &Saved<'a>, node: &Node) -> Result<Option<(u32, &'a [u8])>> {
    let number = node.terminal;
    if number == 0 {
        return Ok(None);
    }
    for (id, (tag, payload)) in (0..).zip(&saved.descriptions) {
        if *tag == fd::tags::TTY && control::is_terminal(payload, number)? {
            return Ok(Some((id, payload)));
        }
    }
    Ok(None)
}

/// The description of the controlling terminal of its session, if a task has given it up.
pub(super) fn left(saved: &Saved<'_>, node: &Node) -> Result<Option<u32>> {
    let mut nodes = saved.tasks.iter().map(|task| &task.node);
    let leader = nodes.find(|leader| leader.pid == node.session);
    match leader.filter(|_| node.left_terminal) {
        Some(leader) => Ok(of(saved, leader)?.map(|(id, _)| id)),
        None => Ok(None),
    }
}

/// Puts the terminal's foreground group in front: the first task of the session that has the
/// terminal open does, or else the leader's own group stays there.
pub(super) fn foreground(saved: &Saved<'_>, index: usize, script: &mut Script) -> Result<()> {
    let tasks = &saved.tasks;
    let session = tasks[index].node.session;
    let Some(leader) = tasks.iter().position(|task| task.node.pid == session) else {
        return Ok(());
    };
    let group = tasks[leader].node.foreground;
    let number = tasks[leader].node.terminal;
    let exists = tasks.iter().any(|task| task.node.group == group);
    if number == 0 || group <= 0 || !exists {
        return Ok(());
    }
    let mut open = Vec::new();
    for (id, (tag, payload)) in (0..).zip(&saved.descriptions) {
        if *tag == fd::tags::TTY && control::is_terminal(payload, number)? {
            open.push(id);
        }
    }
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
    Ok(())
}
