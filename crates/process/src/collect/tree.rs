//! The tree as far as it was looked at: its tasks, and who has left the terminal of its session.

use std::collections::HashSet;

use super::found::Found;
use crate::records::{State, Tree};

/// The tree as far as it was looked at, in the boot `boot`.
pub(super) fn of(found: &[Found], boot: &[u8]) -> Tree {
    let mut tree = Tree {
        tasks: found.iter().map(|found| found.node.clone()).collect(),
        boot: boot.to_vec(),
        has_pid_ns: false,
    };
    find_terminals_left(&mut tree, found);
    tree
}

/// Marks the tasks that do not have the controlling terminal of their session.
fn find_terminals_left(tree: &mut Tree, found: &[Found]) {
    let leaders = tree.tasks.iter().filter(|node| node.terminal != 0);
    let sessions = leaders.map(|node| node.pid).collect::<HashSet<_>>();
    for (node, found) in tree.tasks.iter_mut().zip(found) {
        let living = node.state() != State::Zombie;
        node.left_terminal = living && found.stat.tty == 0 && sessions.contains(&node.session);
    }
}
