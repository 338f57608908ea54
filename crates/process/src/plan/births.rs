//! Who makes whom: the order of births that gives every task its pid, session and process group.
//!
//! A task's session is inherited at its birth and can only be left by founding one (setsid(2)). So
//! a child of a session's founder that is not in the session was forked before; and a task whose
//! session's founder is gone needs a *stand-in*: a short-lived task with the founder's pid, which
//! founds the session, makes the task as its own sibling (`CLONE_PARENT`) and ends.

use std::collections::HashMap;

use crate::records::{State, Tree};
use crate::{Error, Result};

/// Index of a [`Birth`].
pub(crate) type BirthId = usize;

/// What a birth brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A task of the tree, by index, that will run.
    Live(usize),
    /// A task of the tree, by index, that ends at once and stays as a zombie.
    Zombie(usize),
    /// A stand-in for a founder that is gone.
    StandIn,
}

/// One birth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Birth {
    pub kind: Kind,
    pub pid: i32,
    /// Its parent: a pid of the tree, or 0 for the root.
    pub parent: i32,
    pub session: Membership,
    pub group: Membership,
    pub exit_signal: i32,
    /// Whom it makes before it founds its session.
    pub before: Vec<BirthId>,
    /// Whom it makes after that, as children.
    pub after: Vec<BirthId>,
    /// Whom it makes after that, as siblings.
    pub siblings: Vec<BirthId>,
    /// Who makes it.
    pub maker: Option<BirthId>,
}

/// A task's session or process group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Membership {
    /// It founds it.
    Founder,
    /// It is in one that was founded in the tree.
    Of(i32),
    /// It is in the one that the root inherits from the restorer.
    Outside,
}

/// Whether every birth is of a task that runs on and that is forked into its process group or
/// founds it: then nobody has to wait for a group to be there, nor for who makes it.
pub(crate) fn groups_are_inherited(births: &[Birth]) -> bool {
    births.iter().enumerate().all(|(id, birth)| {
        let inherited = || birth.group == group_at_birth(births, id);
        matches!(birth.kind, Kind::Live(_)) && (birth.group == Membership::Founder || inherited())
    })
}

/// All births, each behind that of who makes it: a sibling may make one that comes before it in
/// the tree.
pub(crate) fn makers_first(births: &[Birth]) -> Vec<BirthId> {
    let mut order = vec![0];
    let mut next = 0;
    while let Some(birth) = order.get(next).map(|id| &births[*id]) {
        let made = [&birth.before, &birth.after, &birth.siblings];
        order.extend(made.into_iter().flatten());
        next += 1;
    }
    order
}

/// The group that a task is forked into.
fn group_at_birth(births: &[Birth], id: BirthId) -> Membership {
    let Some(maker) = births[id].maker else {
        return Membership::Outside;
    };
    let founds = |membership| membership == Membership::Founder;
    let founder = founds(births[maker].session) || founds(births[maker].group);
    if founder && !births[maker].before.contains(&id) {
        Membership::Of(births[maker].pid)
    } else {
        group_at_birth(births, maker)
    }
}

/// The births of a tree, the root first.
///
/// # Errors
/// [`resources::Error::Unsupported`] naming the task when no order of births gives it its session.
pub(crate) fn births(tree: &Tree) -> Result<Vec<Birth>> {
    let mut births = tree
        .tasks
        .iter()
        .enumerate()
        .map(of_node)
        .collect::<Vec<_>>();
    let root = &tree.tasks[0];
    let pids = tree.tasks.iter().map(|node| node.pid).collect::<Vec<_>>();
    let outside_session = (!pids.contains(&root.session)).then_some(root.session);
    let outside_group = (!pids.contains(&root.group)).then_some(root.group);
    births[0].parent = 0;
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
    for birth in &mut births {
        let mark = |membership: &mut Membership, outside: Option<i32>| {
            if matches!(*membership, Membership::Of(id) if Some(id) == outside) {
                *membership = Membership::Outside;
            }
        };
        mark(&mut birth.session, outside_session);
        mark(&mut birth.group, outside_group);
    }
    stand_in_for_sessions(&mut births);
    stand_in_for_groups(&mut births)?;
    assign_makers(&mut births)?;
    Ok(births)
}

fn of_node((index, node): (usize, &crate::records::Node)) -> Birth {
    let membership = |id| {
        if id == node.pid {
            Membership::Founder
        } else {
            Membership::Of(id)
        }
    };
    let zombie = node.state() == State::Zombie;
    Birth {
        kind: if zombie {
            Kind::Zombie(index)
        } else {
            Kind::Live(index)
        },
        pid: node.pid,
        parent: node.parent,
        session: membership(node.session),
        group: membership(node.group),
        exit_signal: node.exit_signal,
        before: Vec::new(),
        after: Vec::new(),
        siblings: Vec::new(),
        maker: None,
    }
}

fn stand_in(pid: i32, parent: i32, session: Membership) -> Birth {
    const SIGCHLD: i32 = 17;
    Birth {
        kind: Kind::StandIn,
        pid,
        parent,
        session,
        group: Membership::Founder,
        exit_signal: SIGCHLD,
        before: Vec::new(),
        after: Vec::new(),
        siblings: Vec::new(),
        maker: None,
    }
}

fn stand_in_for_sessions(births: &mut Vec<Birth>) {
    for at in 0..births.len() {
        let Membership::Of(session) = births[at].session else {
            continue;
        };
        if !births.iter().any(|birth| birth.pid == session) {
            births.push(stand_in(session, births[at].parent, Membership::Founder));
        }
    }
}

fn stand_in_for_groups(births: &mut Vec<Birth>) -> Result<()> {
    for at in 0..births.len() {
        let Membership::Of(group) = births[at].group else {
            continue;
        };
        if births.iter().any(|birth| birth.pid == group) {
            continue;
        }
        let session = id_of(births[at].session, births[at].pid);
        let same = |birth: &&Birth| id_of(birth.session, birth.pid) == session;
        let live = |birth: &&Birth| matches!(birth.kind, Kind::Live(_));
        let parent = births.iter().filter(live).find(same);
        let Some(parent) = parent else {
            let what = format!("its process group {group}");
            let why = "no living task of its session could found it";
            return Err(unsupported(births[at].pid, what, why));
        };
        let session = match parent.session {
            Membership::Founder => Membership::Of(parent.pid),
            other => other,
        };
        let parent = parent.pid;
        births.push(stand_in(group, parent, session));
    }
    Ok(())
}

/// The number of a session or group; 0 for the one outside.
fn id_of(membership: Membership, pid: i32) -> i32 {
    match membership {
        Membership::Founder => pid,
        Membership::Of(id) => id,
        Membership::Outside => 0,
    }
}

fn unsupported(pid: i32, what: String, why: &str) -> Error {
    resources::Error::unsupported(pid, what).because(why).into()
}

/// The session that each task is forked into, by pid.
type Inherited = HashMap<i32, i32>;

fn assign_makers(births: &mut [Birth]) -> Result<()> {
    let by_pid = births.iter().enumerate().map(|(at, birth)| (birth.pid, at));
    let by_pid = by_pid.collect::<HashMap<_, _>>();
    let mut inherited: Inherited = HashMap::from([(births[0].pid, 0)]);
    // Parents come before children in the tree; stand-ins are looked at first, as they make others.
    let stand_ins = (0..births.len()).filter(|at| births[*at].kind == Kind::StandIn);
    let others = (1..births.len()).filter(|at| births[*at].kind != Kind::StandIn);
    let order = others.collect::<Vec<_>>();
    for at in stand_ins.collect::<Vec<_>>() {
        let parent = by_pid[&births[at].parent];
        births[at].maker = Some(parent);
        births[parent].after.push(at);
    }
    for at in order {
        let parent = by_pid[&births[at].parent];
        let own = id_of(births[at].session, births[at].pid);
        let parents = id_of(births[parent].session, births[parent].pid);
        let parents_first = inherited.get(&births[parent].pid).copied();
        let founder = births[at].session == Membership::Founder;
        let maker = if founder || own == parents {
            births[parent].after.push(at);
            inherited.insert(births[at].pid, parents);
            parent
        } else if parents_first == Some(own) {
            births[parent].before.push(at);
            inherited.insert(births[at].pid, own);
            parent
        } else {
            let sibling = sibling_in(births, at, own);
            let sibling = sibling.ok_or_else(|| {
                let what = format!("its session {own}");
                unsupported(births[at].pid, what, "nobody in it could have made it")
            })?;
            births[sibling].siblings.push(at);
            inherited.insert(births[at].pid, own);
            sibling
        };
        births[at].maker = Some(maker);
    }
    Ok(())
}

/// A founder of session `session` with the same parent.
fn sibling_in(births: &[Birth], at: BirthId, session: i32) -> Option<BirthId> {
    let fits = |birth: &Birth| {
        birth.pid == session
            && birth.parent == births[at].parent
            && !matches!(birth.kind, Kind::Zombie(_))
    };
    births.iter().position(fits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::Node;

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
        Tree { tasks }
    }

    #[test]
    fn children_of_a_founder_are_born_after_it_founded() {
        let births =
            births(&tree(vec![node(10, 1, 10, 10), node(11, 10, 10, 10)])).expect("forked");
        assert_eq!(
            (&births[0].before[..], &births[0].after[..]),
            (&[][..], &[1][..])
        );
    }

    #[test]
    fn a_child_in_the_old_session_is_born_before() {
        let tasks = vec![node(10, 1, 5, 5), node(11, 10, 11, 11), node(12, 11, 5, 5)];
        let births = births(&tree(tasks)).expect("forked");
        assert_eq!(births[1].before, [2]);
        assert_eq!(births[2].group, Membership::Outside);
    }

    #[test]
    fn who_is_made_by_a_later_sibling_comes_behind_it() {
        let tasks = vec![
            node(10, 1, 10, 10),
            node(11, 10, 12, 12),
            node(12, 10, 12, 12),
        ];
        let births = births(&tree(tasks)).expect("forked");
        assert_eq!(
            (births[1].maker, &births[2].siblings[..]),
            (Some(2), &[1][..])
        );
        assert_eq!(makers_first(&births), [0, 2, 1]);
    }

    #[test]
    fn a_dead_founder_gets_a_stand_in() {
        let births =
            births(&tree(vec![node(10, 1, 10, 10), node(12, 10, 11, 11)])).expect("forked");
        assert_eq!((births[2].kind, births[2].pid), (Kind::StandIn, 11));
        assert_eq!(
            (&births[0].after[..], &births[2].siblings[..]),
            (&[2][..], &[1][..])
        );
    }

    #[test]
    fn a_dead_group_leader_gets_a_stand_in() {
        let births =
            births(&tree(vec![node(10, 1, 10, 10), node(12, 10, 11, 10)])).expect("forked");
        assert_eq!(
            (births[2].kind, births[2].pid, births[2].parent),
            (Kind::StandIn, 11, 10)
        );
    }

    #[test]
    fn a_session_that_nobody_can_give_is_refused() {
        let tasks = vec![
            node(10, 1, 10, 10),
            node(11, 10, 11, 11),
            node(12, 11, 10, 10),
        ];
        births(&tree(tasks)).expect("forked before setsid");
        let tasks = vec![
            node(10, 1, 10, 10),
            node(11, 10, 11, 11),
            node(12, 11, 12, 12),
            node(13, 12, 10, 10),
        ];
        let error = births(&tree(tasks)).expect_err("nobody");
        let want = "pid 13: its session 10 is not supported: nobody in it could have made it";
        assert_eq!(error.to_string(), want);
    }
}
