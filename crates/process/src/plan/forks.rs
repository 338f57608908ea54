//! Who makes whom: the order of forks that gives every task its pid, session and process group.
//!
//! A task's session is inherited at its fork and can only be left by starting one (setsid(2)). So
//! a child of a session's leader that is not in the session was forked before; and a task whose
//! session's leader is gone needs a *stand-in*: a short-lived task with the leader's pid, which
//! starts the session, makes the task as its own sibling (`CLONE_PARENT`) and ends.
//!
//! - What: who has made whom
//! - Kept: parents, sessions and groups, with stand-ins for leaders that are gone; parents of those
//!   who share the memory of a sibling.
//! - Refused: "its parent …", as "it has ended or is not in the tree"; "its process group …", as
//!   "no living task of its session could lead it", or "its parent, or itself, leads another one,
//!   and that one is outside of the tree"; "its session …", as "nobody in it could have made it".
//! - CRIU 4.2: helpers stand in for sessions' and groups' leaders as well; orders of forks that it
//!   does not find end the restore.

use std::collections::{HashMap, HashSet};

use crate::records::{Node, State, Tree, What};
use crate::{Error, Result};

/// Index of a [`Fork`].
pub(crate) type ForkId = usize;

/// What a fork brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A task of the tree, by index, that will run.
    Live(usize),
    /// A task of the tree, by index, that ends at once and stays as a zombie.
    Zombie(usize),
    /// A stand-in for a leader that is gone.
    StandIn,
}

/// One fork.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Fork {
    pub kind: Kind,
    pub pid: i32,
    /// Its parent: a pid of the tree, or 0 for the root.
    pub parent: i32,
    pub session: Membership,
    pub group: Membership,
    /// Others are in the group that has its number, and it has left that: it leads that group until
    /// all others are in theirs.
    pub founds: bool,
    pub exit_signal: i32,
    /// Whom it makes before it starts its session.
    pub before: Vec<ForkId>,
    /// Whom it makes after that, as children.
    pub after: Vec<ForkId>,
    /// Whom it makes after that, as siblings.
    pub siblings: Vec<ForkId>,
    /// Who makes it.
    pub maker: Option<ForkId>,
}

/// A task's session or process group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Membership {
    /// It is its leader.
    Leader,
    /// It is in one whose leader is in the tree.
    Of(i32),
    /// It is in the one that the root inherits from the restorer.
    Outside,
}

/// Whether every fork is of a task that runs on and that is forked into its process group or
/// leads it: then nobody has to wait for a group to be there, nor for who makes it.
pub(crate) fn groups_are_inherited(forks: &[Fork]) -> bool {
    forks.iter().enumerate().all(|(id, fork)| {
        let inherited = || fork.group == group_at_fork(forks, id);
        let is_there = fork.group == Membership::Leader || inherited();
        matches!(fork.kind, Kind::Live(_)) && is_there && !fork.founds
    })
}

/// How many forks come to their groups, which wait for each other there.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Joining {
    /// All of them.
    pub forks: u32,
    /// Those that leave a group that they lead for others.
    pub founders: u32,
}

impl Joining {
    /// Counts them.
    pub fn of(forks: &[Fork]) -> Self {
        let founders = forks.iter().filter(|fork| fork.founds).count();
        Self {
            forks: forks.len() as u32,
            founders: founders as u32,
        }
    }
}

/// All forks, each behind that of who makes it: a sibling may make one that comes before it in
/// the tree.
pub(crate) fn makers_first(forks: &[Fork]) -> Vec<ForkId> {
    let mut order = vec![0];
    let mut next = 0;
    while let Some(fork) = order.get(next).map(|id| &forks[*id]) {
        let made = [&fork.before, &fork.after, &fork.siblings];
        order.extend(made.into_iter().flatten());
        next += 1;
    }
    order
}

/// The group that a task is forked into.
fn group_at_fork(forks: &[Fork], id: ForkId) -> Membership {
    let Some(maker) = forks[id].maker else {
        return Membership::Outside;
    };
    let leads = |membership| membership == Membership::Leader;
    let maker_leads = leads(forks[maker].session) || leads(forks[maker].group);
    let leader = maker_leads || forks[maker].founds;
    if leader && !forks[maker].before.contains(&id) {
        Membership::Of(forks[maker].pid)
    } else {
        group_at_fork(forks, maker)
    }
}

/// The forks of a tree, the root first.
///
/// # Errors
/// [`resources::Error::Unsupported`] naming the task when no order of forks gives it its session.
pub(crate) fn forks(tree: &Tree) -> Result<Vec<Fork>> {
    let mut forks = tree
        .tasks
        .iter()
        .enumerate()
        .map(of_node)
        .collect::<Vec<_>>();
    let root = &tree.tasks[0];
    let pids = tree.tasks.iter().map(|node| node.pid).collect::<Vec<_>>();
    let outside_session = (!pids.contains(&root.session)).then_some(root.session);
    let outside_group = (!pids.contains(&root.group)).then_some(root.group);
    forks[0].parent = 0;
    let orphan = tree.tasks[1..]
        .iter()
        .find(|node| !pids.contains(&node.parent));
    if let Some(node) = orphan {
        let what = format!("its parent {}", node.parent);
        return Err(unsupported(
            node.pid,
            what,
            "it has ended or is not in the tree",
        ));
    }
    for fork in &mut forks {
        let mark = |membership: &mut Membership, outside: Option<i32>| {
            if matches!(*membership, Membership::Of(id) if Some(id) == outside) {
                *membership = Membership::Outside;
            }
        };
        mark(&mut fork.session, outside_session);
        mark(&mut fork.group, outside_group);
    }
    stand_in_for_sessions(&mut forks);
    stand_in_for_groups(&mut forks)?;
    find_founders(&mut forks)?;
    assign_makers(tree, &mut forks)?;
    check_outside(tree, &forks)?;
    Ok(forks)
}

fn of_node((index, node): (usize, &crate::records::Node)) -> Fork {
    let membership = |id| {
        if id == node.pid {
            Membership::Leader
        } else {
            Membership::Of(id)
        }
    };
    let zombie = node.state() == State::Zombie;
    Fork {
        kind: if zombie {
            Kind::Zombie(index)
        } else {
            Kind::Live(index)
        },
        pid: node.pid,
        parent: node.parent,
        session: membership(node.session),
        group: membership(node.group),
        founds: false,
        exit_signal: node.exit_signal,
        before: Vec::new(),
        after: Vec::new(),
        siblings: Vec::new(),
        maker: None,
    }
}

fn stand_in(pid: i32, parent: i32, session: Membership) -> Fork {
    const SIGCHLD: i32 = libc::SIGCHLD;
    Fork {
        kind: Kind::StandIn,
        pid,
        parent,
        session,
        group: Membership::Leader,
        founds: false,
        exit_signal: SIGCHLD,
        before: Vec::new(),
        after: Vec::new(),
        siblings: Vec::new(),
        maker: None,
    }
}

fn stand_in_for_sessions(forks: &mut Vec<Fork>) {
    for at in 0..forks.len() {
        let Membership::Of(session) = forks[at].session else {
            continue;
        };
        if !forks.iter().any(|fork| fork.pid == session) {
            forks.push(stand_in(session, forks[at].parent, Membership::Leader));
        }
    }
}

fn stand_in_for_groups(forks: &mut Vec<Fork>) -> Result<()> {
    for at in 0..forks.len() {
        let Membership::Of(group) = forks[at].group else {
            continue;
        };
        if forks.iter().any(|fork| fork.pid == group) {
            continue;
        }
        let session = id_of(forks[at].session, forks[at].pid);
        let same = |fork: &&Fork| id_of(fork.session, fork.pid) == session;
        let live = |fork: &&Fork| matches!(fork.kind, Kind::Live(_));
        let parent = forks.iter().filter(live).find(same);
        let Some(parent) = parent else {
            let what = format!("its process group {group}");
            let why = "no living task of its session could lead it";
            return Err(unsupported(forks[at].pid, what, why));
        };
        let session = match parent.session {
            Membership::Leader => Membership::Of(parent.pid),
            other => other,
        };
        let parent = parent.pid;
        forks.push(stand_in(group, parent, session));
    }
    Ok(())
}

/// Finds who has left the group that has its number, and refuses where the group that it has come
/// to would be empty before it comes.
fn find_founders(forks: &mut [Fork]) -> Result<()> {
    let joined = forks.iter().filter_map(|fork| match fork.group {
        Membership::Of(group) => Some(group),
        _ => None,
    });
    let joined = joined.collect::<HashSet<_>>();
    for fork in forks.iter_mut() {
        fork.founds = fork.group != Membership::Leader && joined.contains(&fork.pid);
    }
    let staying = forks.iter().filter(|fork| !fork.founds);
    let kept = staying.map(|fork| id_of(fork.group, fork.pid));
    let kept = kept.collect::<HashSet<_>>();
    for fork in forks.iter().filter(|fork| fork.founds) {
        let Membership::Of(group) = fork.group else {
            continue;
        };
        if !kept.contains(&group) {
            let what = format!("its process group {group}");
            let why = "no living task of its session could lead it";
            return Err(unsupported(fork.pid, what, why));
        }
    }
    Ok(())
}

/// Refuses a task of the group outside that is forked into another one, or must leave one that it
/// leads for others: the group outside has no number here.
fn check_outside(tree: &Tree, forks: &[Fork]) -> Result<()> {
    for (at, fork) in forks.iter().enumerate() {
        let is_outside = fork.group == Membership::Outside;
        if is_outside && (fork.founds || group_at_fork(forks, at) != Membership::Outside) {
            let what = format!("its process group {}", tree.tasks[0].group);
            let why =
                "its parent, or itself, leads another one, and that one is outside of the tree";
            return Err(unsupported(fork.pid, what, why));
        }
    }
    Ok(())
}

/// The number of a session or group; 0 for the one outside.
fn id_of(membership: Membership, pid: i32) -> i32 {
    match membership {
        Membership::Leader => pid,
        Membership::Of(id) => id,
        Membership::Outside => 0,
    }
}

fn unsupported(pid: i32, what: String, why: &str) -> Error {
    resources::Error::unsupported(pid, what).because(why).into()
}

/// The session that each task is forked into, by pid.
type Inherited = HashMap<i32, i32>;

fn assign_makers(tree: &Tree, forks: &mut [Fork]) -> Result<()> {
    let by_pid = forks.iter().enumerate().map(|(at, fork)| (fork.pid, at));
    let by_pid = by_pid.collect::<HashMap<_, _>>();
    let mut inherited: Inherited = HashMap::from([(forks[0].pid, 0)]);
    // Parents come before children in the tree; stand-ins are looked at first, as they make others.
    let stand_ins = (0..forks.len()).filter(|at| forks[*at].kind == Kind::StandIn);
    let others = (1..forks.len()).filter(|at| forks[*at].kind != Kind::StandIn);
    let order = others.collect::<Vec<_>>();
    for at in stand_ins.collect::<Vec<_>>() {
        let parent = by_pid[&forks[at].parent];
        forks[at].maker = Some(parent);
        forks[parent].after.push(at);
    }
    for at in order {
        let parent = by_pid[&forks[at].parent];
        let own = id_of(forks[at].session, forks[at].pid);
        let parents = id_of(forks[parent].session, forks[parent].pid);
        let parents_first = inherited.get(&forks[parent].pid).copied();
        let leader = forks[at].session == Membership::Leader;
        let sharer = tree
            .tasks
            .get(at)
            .and_then(|_| sharer_beside(tree, forks, at));
        let maker = if let Some(sharer) = sharer {
            forks[sharer].siblings.push(at);
            let theirs = id_of(forks[sharer].session, forks[sharer].pid);
            inherited.insert(forks[at].pid, theirs);
            sharer
        } else if leader || own == parents {
            forks[parent].after.push(at);
            inherited.insert(forks[at].pid, parents);
            parent
        } else if parents_first == Some(own) {
            forks[parent].before.push(at);
            inherited.insert(forks[at].pid, own);
            parent
        } else {
            let sibling = sibling_in(forks, at, own);
            let sibling = sibling.ok_or_else(|| {
                let what = format!("its session {own}");
                unsupported(forks[at].pid, what, "nobody in it could have made it")
            })?;
            forks[sibling].siblings.push(at);
            inherited.insert(forks[at].pid, own);
            sibling
        };
        forks[at].maker = Some(maker);
    }
    Ok(())
}

/// The task that could make one which shares its memory and not its parent's: with the same
/// parent, in the same session, and the signal of its end, which a sibling gets of its maker.
fn sharer_beside(tree: &Tree, forks: &[Fork], at: ForkId) -> Option<ForkId> {
    let node = &tree.tasks[at];
    let memory = node.memory_number();
    let parent = tree.tasks.iter().find(|one| one.pid == node.parent);
    if node.memory_of == 0 || parent.is_some_and(|parent| parent.memory_number() == memory) {
        return None;
    }
    let fits = |(id, one): &(ForkId, &Node)| {
        let session = id_of(forks[*id].session, one.pid);
        let leads = forks[at].session == Membership::Leader;
        let is_one = one.memory_number() == memory && one.parent == node.parent;
        let joins = leads || session == id_of(forks[at].session, node.pid);
        is_one && joins && one.exit_signal == node.exit_signal
    };
    let before = tree.tasks[..at].iter().enumerate();
    let in_common = |one: &Node| {
        let all = What::ALL.iter();
        all.filter(|what| one.number_of(**what) == node.number_of(**what))
            .count()
    };
    // The first of those who have most in common with it.
    let best = before
        .filter(fits)
        .rev()
        .max_by_key(|(_, one)| in_common(one));
    best.map(|(id, _)| id)
}

/// A leader of session `session` with the same parent.
fn sibling_in(forks: &[Fork], at: ForkId, session: i32) -> Option<ForkId> {
    let fits = |fork: &Fork| {
        fork.pid == session
            && fork.parent == forks[at].parent
            && !matches!(fork.kind, Kind::Zombie(_))
    };
    forks.iter().position(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(pid: i32, parent: i32, group: i32, session: i32) -> Node {
        Node {
            pid,
            parent,
            group,
            session,
            threads: vec![pid],
            ..Node::default()
        }
    }

    fn tree(tasks: Vec<Node>) -> Tree {
        Tree {
            tasks,
            ..Tree::default()
        }
    }

    #[test]
    fn children_of_a_leader_are_forked_after_it_leads() {
        let forks = forks(&tree(vec![node(10, 1, 10, 10), node(11, 10, 10, 10)])).expect("forked");
        assert_eq!(
            (&forks[0].before[..], &forks[0].after[..]),
            (&[][..], &[1][..])
        );
    }

    #[test]
    fn a_child_in_the_old_session_is_forked_before() {
        let tasks = vec![node(10, 1, 5, 5), node(11, 10, 11, 11), node(12, 11, 5, 5)];
        let forks = forks(&tree(tasks)).expect("forked");
        assert_eq!(forks[1].before, [2]);
        assert_eq!(forks[2].group, Membership::Outside);
    }

    #[test]
    fn who_is_made_by_a_later_sibling_comes_behind_it() {
        let tasks = vec![
            node(10, 1, 10, 10),
            node(11, 10, 12, 12),
            node(12, 10, 12, 12),
        ];
        let forks = forks(&tree(tasks)).expect("forked");
        assert_eq!(
            (forks[1].maker, &forks[2].siblings[..]),
            (Some(2), &[1][..])
        );
        assert_eq!(makers_first(&forks), [0, 2, 1]);
    }

    #[test]
    fn who_shares_the_memory_of_a_sibling_is_made_by_it() {
        let sharing = |session, signal| {
            let mut tasks = vec![
                node(10, 1, 10, 10),
                node(11, 10, 10, 10),
                node(12, 10, 10, session),
                node(13, 12, 10, session),
            ];
            for (node, number) in tasks.iter_mut().zip(1..) {
                node.number = number;
            }
            (tasks[2].memory_of, tasks[3].memory_of) = (2, 2);
            tasks[2].exit_signal = signal;
            forks(&tree(tasks)).expect("forked")
        };
        let made = sharing(10, 0);
        let makers = made.iter().map(|fork| fork.maker).collect::<Vec<_>>();
        assert_eq!(makers, [None, Some(0), Some(1), Some(2)]);
        assert_eq!(made[1].siblings, [2]);
        // What a sibling cannot be given, it would have to have of its parent.
        assert_eq!(sharing(10, 17)[2].maker, Some(0));
    }

    #[test]
    fn a_dead_leader_gets_a_stand_in() {
        let forks = forks(&tree(vec![node(10, 1, 10, 10), node(12, 10, 11, 11)])).expect("forked");
        assert_eq!((forks[2].kind, forks[2].pid), (Kind::StandIn, 11));
        assert_eq!(
            (&forks[0].after[..], &forks[2].siblings[..]),
            (&[2][..], &[1][..])
        );
    }

    #[test]
    fn a_dead_group_leader_gets_a_stand_in() {
        let forks = forks(&tree(vec![node(10, 1, 10, 10), node(12, 10, 11, 10)])).expect("forked");
        assert_eq!(
            (forks[2].kind, forks[2].pid, forks[2].parent),
            (Kind::StandIn, 11, 10)
        );
    }

    #[test]
    fn who_has_left_its_group_to_others_leads_it_first() {
        let tasks = vec![
            node(10, 1, 10, 10),
            node(11, 10, 10, 10),
            node(12, 11, 11, 10),
        ];
        let forks = forks(&tree(tasks)).expect("forked");
        let founding = forks.iter().map(|fork| fork.founds).collect::<Vec<_>>();
        assert_eq!(founding, [false, true, false]);
        assert_eq!(group_at_fork(&forks, 2), Membership::Of(11));
        assert!(!groups_are_inherited(&forks));
    }

    #[test]
    fn groups_that_would_be_empty_or_are_outside_are_refused() {
        // Each is in the group of the other, and in both is nobody else.
        let tasks = vec![
            node(10, 1, 10, 10),
            node(11, 10, 12, 10),
            node(12, 10, 11, 10),
        ];
        let error = forks(&tree(tasks)).expect_err("nobody keeps them");
        let want = "pid 11: its process group 12 is not supported: no living task of its session \
                    could lead it";
        assert_eq!(error.to_string(), want);
        for tasks in [
            vec![node(10, 1, 5, 5), node(11, 10, 5, 5), node(12, 11, 11, 5)],
            vec![node(10, 1, 5, 5), node(11, 10, 11, 5), node(12, 11, 5, 5)],
        ] {
            let error = forks(&tree(tasks)).expect_err("it has no number");
            let told = error.to_string();
            assert!(
                told.contains("its process group 5 is not supported"),
                "{told}"
            );
        }
    }

    #[test]
    fn a_session_that_nobody_can_give_is_refused() {
        let tasks = vec![
            node(10, 1, 10, 10),
            node(11, 10, 11, 11),
            node(12, 11, 10, 10),
        ];
        forks(&tree(tasks)).expect("forked before setsid");
        let tasks = vec![
            node(10, 1, 10, 10),
            node(11, 10, 11, 11),
            node(12, 11, 12, 12),
            node(13, 12, 10, 10),
        ];
        let error = forks(&tree(tasks)).expect_err("nobody");
        let want = "pid 13: its session 10 is not supported: nobody in it could have made it";
        assert_eq!(error.to_string(), want);
    }
}
