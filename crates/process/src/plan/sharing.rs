//! What processes share by clone(2): who must be made with what of whom.
//!
//! A descriptor table, a place in the file system (directories and umask), an undo list and an I/O
//! context are shared at birth and in no other way. So each is handed from maker to child along the
//! forks, from the one that is above all who share it. Who only hands one on, and does not have it
//! itself, takes a copy of its own (unshare(2)) as soon as its children have it. That cannot be
//! done with an I/O context, memory and signal handlers: only a stand-in, which ends, hands on what
//! it is not to keep.
//!
//! - What: who has been given what processes share
//! - Kept: descriptor tables, directories and undo lists, shared by any processes of the tree, one
//!   of each at a time handed through who does not share it; I/O contexts of a process and others
//!   below it; memory and signal handlers of a process, others below it, and their siblings.
//! - Refused: "its …, shared with pid … (…)", as "it cannot be handed on to both by those who make
//!   them": two of a kind would have to be handed to one process, or in another order than sessions
//!   are begun in; an I/O context, memory or signal handlers would have to be handed on by one that
//!   has others.
//! - CRIU 4.2: descriptor tables, of parent and child alone.

use std::collections::{BTreeMap, HashMap};

use super::forks::{self, Fork, ForkId, makers_first};
use crate::records::{Node, State, Tree, What};
use crate::{Error, Result};

/// One thing that is shared: its kind, and the number of the task that has it first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Shared {
    pub what: What,
    pub first: u32,
}

/// What forks share.
#[derive(Debug, Default)]
pub(crate) struct Sharing {
    /// By fork; none where nothing is shared.
    of_forks: HashMap<ForkId, OfFork>,
    /// The forks that share it, makers first, and how many only hand it on.
    members: BTreeMap<Shared, (Vec<ForkId>, u32)>,
}

/// What one fork shares and hands on.
#[derive(Clone, Debug, Default)]
pub(crate) struct OfFork {
    /// What it has together with its maker when it is made.
    pub at_birth: Vec<Shared>,
    /// What its maker leaves just before that.
    pub left_before: Vec<Shared>,
    /// What it leaves itself when it has made all others.
    pub left_at_end: Vec<Shared>,
}

/// The forks of a tree, and what they share.
///
/// # Errors
/// Those of [`forks::forks`], and [`resources::Error::Unsupported`] naming a task to which nobody
/// could hand what it shares.
pub(crate) fn plan(tree: &Tree) -> Result<(Vec<Fork>, Sharing)> {
    let mut forks = forks::forks(tree)?;
    let mut sharing = Sharing::default();
    let ways = What::ALL.map(|what| Way::find(tree, &forks, what));
    let ways = ways.into_iter().collect::<Result<Vec<_>>>()?;
    let ways = ways.into_iter().filter(|way| !way.groups.is_empty());
    let ways = ways.collect::<Vec<_>>();
    if ways.is_empty() {
        return Ok((forks, sharing));
    }
    for (id, fork) in forks.iter_mut().enumerate() {
        for list in [&mut fork.before, &mut fork.after, &mut fork.siblings] {
            let ranks = list
                .iter()
                .map(|child| ways.iter().map(|way| way.rank(id, *child)).collect());
            let ranks = ranks.collect::<Vec<Ranks>>();
            put_in_order(list, &ranks);
        }
    }
    let order = makers_first(&forks).into_iter().zip(0..);
    let order = order.collect::<HashMap<ForkId, u32>>();
    for way in ways {
        sharing.add(&forks, way, &order)?;
    }
    Ok((forks, sharing))
}

/// When one that is made has its turn, for each kind of what is shared; see [`Way::rank`].
type Ranks = Vec<Option<(u32, u32)>>;

/// Orders those that are made, as far as that is possible, so that nobody stands behind another
/// whose rank is lower; where it makes no difference they stay as they are.
fn put_in_order(list: &mut [ForkId], ranks: &[Ranks]) {
    let before = |one: usize, other: usize| {
        let mut pairs = ranks[one].iter().zip(&ranks[other]);
        pairs.any(|pair| matches!(pair, (Some(one), Some(other)) if one < other))
    };
    let all = 0..list.len();
    let must_wait = |one: usize| all.clone().filter(|other| before(*other, one)).count();
    let mut left = all
        .clone()
        .map(|one| (one, must_wait(one)))
        .collect::<Vec<_>>();
    if left.iter().all(|(_, waits_for)| *waits_for == 0) {
        return;
    }
    let made = list.to_vec();
    for place in list {
        // Where all wait for each other, it is told later that they do.
        let next = left.iter().position(|(_, waits_for)| *waits_for == 0);
        let (next, _) = left.remove(next.unwrap_or(0));
        for (one, waits_for) in &mut left {
            *waits_for -= usize::from(before(next, *one));
        }
        *place = made[next];
    }
}

impl Sharing {
    /// What a fork shares, where it shares anything.
    pub fn of(&self, id: ForkId) -> Option<&OfFork> {
        self.of_forks.get(&id)
    }

    /// The flags with which a fork is made.
    pub fn flags(&self, id: ForkId) -> u64 {
        let shared = self.of(id).map_or(&[][..], |of| &of.at_birth);
        shared.iter().fold(0, |flags, one| flags | one.what.flag())
    }

    /// All that is shared: by which forks, makers first, and how many only hand it on.
    pub fn members(&self) -> impl Iterator<Item = (Shared, &[ForkId], u32)> {
        let all = self.members.iter();
        all.map(|(shared, (members, carriers))| (*shared, members.as_slice(), *carriers))
    }

    /// Adds what is shared of one kind. The forks have an `order`, and make others in theirs.
    fn add(&mut self, forks: &[Fork], way: Way<'_>, order: &HashMap<ForkId, u32>) -> Result<()> {
        let what = way.what;
        let left = way.leave(forks, &mut self.of_forks)?;
        for (id, first) in &way.given {
            let of = self.of_forks.entry(*id).or_default();
            let first = *first;
            of.at_birth.push(Shared { what, first });
        }
        for (first, mut members) in way.groups {
            members.sort_by_key(|id| order[id]);
            let carriers = left.get(&first).copied().unwrap_or(0);
            self.members
                .insert(Shared { what, first }, (members, carriers));
        }
        Ok(())
    }
}

/// The way of all that is shared of one kind, by the number of who has it first.
struct Way<'a> {
    tree: &'a Tree,
    what: What,
    /// The forks that share each.
    groups: BTreeMap<u32, Vec<ForkId>>,
    /// What each fork is given by its maker.
    given: HashMap<ForkId, u32>,
    /// What each fork has in the end.
    own: HashMap<ForkId, u32>,
}

impl<'a> Way<'a> {
    fn find(tree: &'a Tree, forks: &[Fork], what: What) -> Result<Self> {
        let mut groups: BTreeMap<u32, Vec<ForkId>> = BTreeMap::new();
        for (id, node) in tree.tasks.iter().enumerate() {
            let first = node.shared_with(what);
            if node.state() != State::Zombie && first != 0 {
                groups.entry(first).or_default().push(id);
            }
        }
        for (id, node) in tree.tasks.iter().enumerate() {
            if let Some(group) = groups.get_mut(&node.number) {
                group.push(id);
            }
        }
        let own = groups
            .iter()
            .flat_map(|(first, members)| members.iter().map(|id| (*id, *first)));
        let mut way = Self {
            tree,
            what,
            own: own.collect(),
            given: HashMap::new(),
            groups: BTreeMap::new(),
        };
        for (first, members) in &groups {
            way.hand_on(forks, *first, members)?;
        }
        way.groups = groups;
        Ok(way)
    }

    /// Hands what `first` has on to all `members`, from the one above them all.
    fn hand_on(&mut self, forks: &[Fork], first: u32, members: &[ForkId]) -> Result<()> {
        let lines = members.iter().map(|member| line(forks, *member));
        let lines = lines.collect::<Vec<_>>();
        // How many makers, from the root on, all have in common.
        let common = (0..)
            .take_while(|at| {
                let of_first = lines[0].get(*at);
                of_first.is_some() && lines.iter().all(|line| line.get(*at) == of_first)
            })
            .count();
        for (line, member) in lines.iter().zip(members) {
            for id in &line[common..] {
                let before = self.given.insert(*id, first);
                if before.is_some_and(|before| before != first) {
                    return Err(self.refused(*member, first));
                }
            }
        }
        Ok(())
    }

    /// When fork `id` has to make `child`: those first who are to have what it inherited, those
    /// last who are to have what it keeps; none where it makes no difference.
    fn rank(&self, id: ForkId, child: ForkId) -> Option<(u32, u32)> {
        let given = self.given.get(&child);
        Some(match given? {
            _ if given == self.given.get(&id) => (0, 0),
            _ if given == self.own.get(&id) => (2, 0),
            first => (1, *first),
        })
    }

    /// Finds when each fork leaves what it only hands on. How often each thing is left.
    fn leave(
        &self,
        forks: &[Fork],
        all: &mut HashMap<ForkId, OfFork>,
    ) -> Result<HashMap<u32, u32>> {
        let mut left: HashMap<u32, u32> = HashMap::new();
        let what = self.what;
        for (id, fork) in forks.iter().enumerate() {
            let own = self.own.get(&id).copied();
            let (mut now, mut done) = (self.given.get(&id).copied(), Vec::new());
            let made = fork.before.iter().chain(&fork.after).chain(&fork.siblings);
            for child in made {
                let given = self.given.get(child).copied();
                let Some(first) = given.filter(|_| given != now) else {
                    continue;
                };
                // What it has in the end it cannot leave, and what was left does not come back.
                if now.is_some() && now == own || done.contains(&first) {
                    return Err(self.refused(self.below(forks, *child, first), first));
                }
                if now.is_some() && !what.can_be_left() {
                    return Err(self.refused(self.below(forks, *child, first), first));
                }
                if let Some(before) = now.replace(first) {
                    let first = before;
                    let of = all.entry(*child).or_default();
                    of.left_before.push(Shared { what, first });
                    *left.entry(before).or_default() += 1;
                    done.push(before);
                }
            }
            if !what.can_be_left() && now != own {
                let is_stand_in = id >= self.tree.tasks.len();
                match now.filter(|_| !is_stand_in) {
                    Some(first) => return Err(self.refused(self.below(forks, id, first), first)),
                    None => continue,
                }
            }
            if let Some(first) = now.filter(|_| now != own) {
                let of = all.entry(id).or_default();
                of.left_at_end.push(Shared { what, first });
                *left.entry(first).or_default() += 1;
            }
        }
        Ok(left)
    }

    /// One that shares what `first` has, and is fork `id` or made below it.
    fn below(&self, forks: &[Fork], id: ForkId, first: u32) -> ForkId {
        let mut members = self.groups[&first].iter();
        let member = members.find(|member| line(forks, **member).contains(&id));
        member.copied().unwrap_or(id)
    }

    fn refused(&self, member: ForkId, first: u32) -> Error {
        let node = &self.tree.tasks[member];
        // The first one is told with another one.
        let nodes = self.tree.tasks.iter();
        let mut others = nodes.filter(|other| match node.number == first {
            true => other.shared_with(self.what) == first,
            false => other.number == first,
        });
        let other = others.next().map_or(0, |other| other.pid);
        let (name, flag) = self.what.names();
        let what = format!("its {name}, shared with pid {other} ({flag}),");
        let why = "it cannot be handed on to both by those who make them";
        let refused = resources::Error::unsupported(node.pid, what);
        refused.because(why).into()
    }
}

/// A fork and those who make it, the root first.
fn line(forks: &[Fork], id: ForkId) -> Vec<ForkId> {
    let makers = std::iter::successors(Some(id), |id| forks[*id].maker);
    let mut line = makers.collect::<Vec<_>>();
    line.reverse();
    line
}

/// A further flag by which a thread is made: one that answers for a process whose leader ends has
/// the I/O context that the process shares with others.
pub(super) fn thread_flag(tree: &Tree, node: &Node, tid: i32) -> u64 {
    const WHAT: What = What::IoContext;
    if node.leader_end.is_none() || node.threads.get(1) != Some(&tid) {
        return 0;
    }
    let mut others = tree.tasks.iter().filter(|other| other.pid != node.pid);
    let is_shared = others.any(|other| other.number_of(WHAT) == node.number_of(WHAT));
    if is_shared { WHAT.flag() } else { 0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::records::Node;

    /// Tasks by pid and parent, with the number of whose descriptors they have.
    fn tree(tasks: &[(i32, i32, u32)]) -> Tree {
        let node = |(number, (pid, parent, of)): (u32, &(i32, i32, u32))| Node {
            pid: *pid,
            parent: *parent,
            group: 10,
            session: 10,
            threads: vec![*pid],
            number,
            descriptors_of: *of,
            ..Node::default()
        };
        Tree {
            tasks: (1..).zip(tasks).map(node).collect(),
            ..Tree::default()
        }
    }

    /// For each fork: what it is born with, what its maker leaves before, what it leaves itself.
    fn told(tree: &Tree) -> Vec<String> {
        let (forks, sharing) = plan(tree).expect("it can be made");
        let firsts = |all: &[Shared]| {
            let all = all.iter().map(|one| one.first.to_string());
            all.collect::<Vec<_>>().join(",")
        };
        let none = OfFork::default();
        let tell = |id: ForkId| {
            let of = sharing.of(id).unwrap_or(&none);
            let [born, before, end] =
                [&of.at_birth, &of.left_before, &of.left_at_end].map(|all| firsts(all));
            format!("{}: {born}/{before}/{end}", forks[id].pid)
        };
        (0..forks.len()).map(tell).collect()
    }

    #[test]
    fn nothing_is_handed_on_where_nothing_is_shared() {
        let tree = tree(&[(10, 1, 0), (11, 10, 0)]);
        let (_, sharing) = plan(&tree).expect("it can be made");
        assert_eq!((sharing.flags(0), sharing.flags(1)), (0, 0));
        assert_eq!(sharing.members().count(), 0);
    }

    #[test]
    fn a_child_has_its_parents() {
        let tree = tree(&[(10, 1, 0), (11, 10, 1), (12, 10, 0)]);
        assert_eq!(told(&tree), ["10: //", "11: 1//", "12: //"]);
        let (_, sharing) = plan(&tree).expect("it can be made");
        assert_eq!(sharing.flags(1), What::Descriptors.flag());
        let all = sharing.members().collect::<Vec<_>>();
        let what = What::Descriptors;
        assert_eq!(all, [(Shared { what, first: 1 }, &[0, 1][..], 0)]);
    }

    #[test]
    fn an_io_context_is_handed_on_by_those_who_keep_it() {
        let with_io = |io: [u32; 4]| {
            let mut tree = tree(&[(10, 1, 0), (11, 10, 0), (12, 11, 0), (13, 10, 0)]);
            let nodes = tree.tasks.iter_mut().zip(io);
            nodes.for_each(|(node, first)| node.io_of = first);
            tree
        };
        // A line, and one beside it.
        assert_eq!(
            told(&with_io([0, 1, 1, 0])),
            ["10: //", "11: 1//", "12: 1//", "13: //"]
        );
        assert_eq!(
            told(&with_io([0, 0, 2, 0])),
            ["10: //", "11: //", "12: 2//", "13: //"]
        );
        // Through one that has its own, and through one of others.
        for (io, pid) in [([0, 0, 1, 0], 12), ([0, 0, 0, 2], 13)] {
            let error = plan(&with_io(io))
                .expect_err("nobody leaves one")
                .to_string();
            assert!(
                error.contains(&format!("pid {pid}: its I/O context")),
                "{error}"
            );
        }
    }

    #[test]
    fn memory_is_handed_on_by_those_who_keep_it() {
        // Process 12 ends by another signal where its sibling cannot make it.
        let with_memory = |memory: [u32; 5], signal: i32| {
            let tasks = [
                (10, 1, 0),
                (11, 10, 0),
                (12, 10, 0),
                (13, 11, 0),
                (14, 13, 0),
            ];
            let mut tree = tree(&tasks);
            let nodes = tree.tasks.iter_mut().zip(memory);
            nodes.for_each(|(node, first)| {
                (node.memory_of, node.handlers_of) = (first, first);
            });
            tree.tasks[2].exit_signal = signal;
            tree
        };
        let of = |memory| told(&with_memory(memory, 0));
        assert_eq!(
            of([0, 1, 0, 1, 0]),
            ["10: //", "11: 1,1//", "12: //", "13: 1,1//", "14: //"]
        );
        assert_eq!(
            of([0, 0, 2, 2, 0]),
            ["10: //", "11: //", "12: 2,2//", "13: 2,2//", "14: //"]
        );
        for (memory, signal, pid) in [([0, 0, 2, 0, 0], 17, 12), ([0, 0, 0, 0, 2], 0, 14)] {
            let error = plan(&with_memory(memory, signal));
            let error = error.expect_err("nobody leaves it").to_string();
            let want = format!("pid {pid}: its memory, shared with pid");
            assert!(error.contains(&want), "{error}");
        }
    }

    #[test]
    fn siblings_have_one_that_their_parent_leaves() {
        let tree = tree(&[(10, 1, 0), (11, 10, 0), (12, 10, 2)]);
        assert_eq!(told(&tree), ["10: //2", "11: 2//", "12: 2//"]);
        let (_, sharing) = plan(&tree).expect("it can be made");
        assert_eq!(sharing.members().next().expect("one").2, 1);
    }

    #[test]
    fn a_grandchild_has_it_through_who_does_not_keep_it() {
        let tree = tree(&[(10, 1, 0), (11, 10, 0), (12, 11, 1)]);
        assert_eq!(told(&tree), ["10: //", "11: 1//1", "12: 1//"]);
    }

    #[test]
    fn several_are_handed_on_one_after_the_other() {
        // Two pairs of siblings, and one that has the parent's.
        let tree = tree(&[
            (10, 1, 0),
            (11, 10, 1),
            (12, 10, 0),
            (13, 10, 3),
            (14, 10, 0),
            (15, 10, 5),
        ]);
        let (forks, _) = plan(&tree).expect("it can be made");
        assert_eq!(forks[0].after, [2, 3, 4, 5, 1]);
        let want = [
            "10: //", "11: 1/5/", "12: 3//", "13: 3//", "14: 5/3/", "15: 5//",
        ];
        assert_eq!(told(&tree), want);
    }

    #[test]
    fn things_of_two_kinds_are_handed_on_in_an_order_that_suits_both() {
        // 12 and 13 have a table, 13 and 14 directories; 14 has the root's table, 12 its
        // directories.
        let mut tree = tree(&[(10, 1, 0), (12, 10, 0), (13, 10, 2), (14, 10, 1)]);
        tree.tasks[1].directories_of = 1;
        tree.tasks[3].directories_of = 3;
        let error = plan(&tree).expect_err("each before the other").to_string();
        assert!(error.contains("cannot be handed on"), "{error}");
        tree.tasks[3].descriptors_of = 0;
        let (forks, sharing) = plan(&tree).expect("it can be made");
        assert_eq!(forks[0].after, [2, 3, 1]);
        let shared = |what, first| Shared { what, first };
        let of = |id| sharing.of(id).cloned().unwrap_or_default();
        let (tables, places) = (What::Descriptors, What::Directories);
        assert_eq!(of(3).at_birth, [shared(places, 3)]);
        assert_eq!(of(2).at_birth, [shared(tables, 2), shared(places, 3)]);
        assert_eq!(of(1).at_birth, [shared(tables, 2), shared(places, 1)]);
        assert_eq!(of(1).left_before, [shared(places, 3)]);
        assert_eq!(of(0).left_at_end, [shared(tables, 2)]);
        let members = sharing.members().map(|(_, members, _)| members.to_vec());
        assert_eq!(
            members.collect::<Vec<_>>(),
            [vec![2, 1], vec![0, 1], vec![2, 3]]
        );
    }

    #[test]
    fn two_that_would_go_through_one_are_refused() {
        let tree = tree(&[
            (10, 1, 0),
            (11, 10, 0),
            (12, 10, 0),
            (13, 12, 1),
            (14, 12, 2),
        ]);
        let error = plan(&tree).expect_err("one table at birth").to_string();
        let want = "pid 14: its descriptor table, shared with pid 11 (CLONE_FILES), is not \
                    supported: it cannot be handed on to both by those who make them";
        assert_eq!(error, want);
    }

    #[test]
    fn who_has_a_table_from_above_cannot_make_another_one() {
        // 12 shares with the root, and its children with each other.
        let tree = tree(&[(10, 1, 0), (12, 10, 1), (13, 12, 0), (14, 12, 3)]);
        let error = plan(&tree).expect_err("it has one").to_string();
        assert!(error.contains("pid 13: its descriptor table"), "{error}");
    }

    #[test]
    fn who_answers_for_an_ended_leader_has_what_its_process_shares() {
        let mut tree = tree(&[(10, 1, 0), (12, 10, 0)]);
        tree.tasks[0].threads = vec![10, 11, 13];
        let flags = |tree: &Tree| [10, 11, 13].map(|tid| thread_flag(tree, &tree.tasks[0], tid));
        assert_eq!(flags(&tree), [0; 3]);
        tree.tasks[1].io_of = 1;
        assert_eq!(flags(&tree), [0; 3], "its leader has it");
        tree.tasks[0].leader_end = Some(0);
        assert_eq!(flags(&tree), [0, What::IoContext.flag(), 0]);
        tree.tasks[1].io_of = 0;
        assert_eq!(flags(&tree), [0; 3]);
    }
}
