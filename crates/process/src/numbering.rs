//! Which space of an image is which task's memory.
//!
//! Spaces mean the same in all layers of a chain, so a task that the parent image has goes on with
//! the number that its memory has there. It is the same task where pid, time of start and boot are
//! the same; any other gets a number that the parent does not use, so nothing of the parent can be
//! taken for its memory. Whether pages are left to the parent is not decided here: that takes a
//! tracker which has known the task since then ([`crate::track`]).

use std::collections::{HashMap, HashSet};

use image::{Reader, SpaceId, SpaceKind};

use crate::Result;
use crate::records::{FIRST_OBJECT, Node, State, Tree, tag};

/// The version of the tree's record in which a task's number was its pid.
const BEFORE_NUMBERS: u16 = 1;

/// Gives the memories of tasks their numbers, the same to the same task however often it is asked.
#[derive(Debug, Default)]
pub(crate) struct Numbering {
    boot: Vec<u8>,
    /// The tasks of the parent image by pid: when each was started, where that is known, and its
    /// space.
    parents: HashMap<i32, (Option<u64>, SpaceId)>,
    taken: HashSet<SpaceId>,
    /// No lower number is left.
    lowest: u32,
    given: HashMap<(i32, u64), SpaceId>,
}

impl Numbering {
    /// Numbers for an image over `parent`, or for one that others may be over.
    ///
    /// # Errors
    /// [`resources::Error::Corrupt`] for a parent with a list of tasks that makes no sense.
    pub fn over(parent: Option<&Reader>) -> Result<Self> {
        // Without it, all that is known to be of one boot is what a tracker knows.
        let boot = sys::boot::id().unwrap_or_default();
        Self::in_boot(parent, boot.as_bytes().to_vec())
    }

    fn in_boot(parent: Option<&Reader>, boot: Vec<u8>) -> Result<Self> {
        let mut numbering = Self {
            boot,
            ..Self::default()
        };
        let Some(parent) = parent else {
            return Ok(numbering);
        };
        let spaces = parent.spaces().iter().filter(|space| space.id.0 != 0);
        numbering.taken = spaces.clone().map(|space| space.id).collect();
        let mut records = parent.records().iter();
        let record = records.find(|record| record.tag == tag::TREE);
        match record.filter(|record| record.version != BEFORE_NUMBERS) {
            Some(record) => {
                let tree = Tree::read(record)?;
                check(&tree)?;
                // Also those of which no page is saved, so that nobody else gets them.
                let own = tree.tasks.iter().map(Node::space);
                numbering.taken.extend(own.filter(|space| space.0 != 0));
                if tree.boot == numbering.boot {
                    let living = tree.tasks.iter();
                    let living = living.filter(|node| node.state() != State::Zombie);
                    let known = living.map(|node| {
                        let known = (Some(node.start_ticks), node.space());
                        (node.pid, known)
                    });
                    numbering.parents = known.collect();
                }
            }
            // Before tasks had numbers, each space had its task's pid.
            None => {
                let memory = spaces.filter(|space| space.kind == SpaceKind::Memory);
                let known = memory.map(|space| (space.id.0.cast_signed(), (None, space.id)));
                numbering.parents = known.collect();
            }
        }
        Ok(numbering)
    }

    /// The boot that the tree's record is to name.
    pub fn boot(&self) -> &[u8] {
        &self.boot
    }

    /// The space that is the memory of task `pid`, which was started at `start_ticks`.
    pub fn space(&mut self, pid: i32, start_ticks: u64) -> SpaceId {
        if let Some(given) = self.given.get(&(pid, start_ticks)) {
            return *given;
        }
        let known = self.parents.get(&pid).copied();
        let known = known.filter(|(started, _)| started.is_none_or(|at| at == start_ticks));
        // Of those who had it together there, one has another memory since.
        let known = known.filter(|(_, space)| !self.given.values().any(|given| given == space));
        let space = match known {
            Some((_, space)) => space,
            None => self.unused(),
        };
        // Of two tasks that had one pid after each other, the later one is another.
        if known.is_some() {
            self.parents.remove(&pid);
        }
        self.given.insert((pid, start_ticks), space);
        space
    }

    fn unused(&mut self) -> SpaceId {
        let mut all = (self.lowest.max(1)..FIRST_OBJECT).map(SpaceId);
        let unused = all.find(|space| !self.taken.contains(space));
        let space = unused.expect("an image has fewer spaces");
        self.lowest = space.0 + 1;
        self.taken.insert(space);
        space
    }
}

/// Refuses a parent in which several memories have one space, or one has what is none of a task's:
/// no task could go on with it.
fn check(tree: &Tree) -> Result<()> {
    let mut spaces = HashSet::new();
    let living = tree.tasks.iter();
    for node in living.filter(|node| node.state() != State::Zombie) {
        let is_of_task = (1..FIRST_OBJECT).contains(&node.space_number);
        let is_shared = node.memory_of != 0;
        if !is_of_task || spaces.insert(node.space_number) == is_shared {
            let (pid, space) = (node.pid, node.space_number);
            let what = format!("task {pid} of the parent image has no space of its own: {space}");
            return Err(resources::Error::corrupt("tree", what).into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use image::{Run, RunKind, Seal, Writer};
    use prost::Message;

    use super::*;
    use crate::records::record;

    /// An image with the spaces `spaces`, and a list of tasks.
    fn image(spaces: &[u32], tree: Option<image::Record>) -> Reader {
        let store = Arc::new(store::Memory::default());
        let writer = Writer::create(store.clone()).expect("memory takes an image");
        for space in spaces {
            writer.mark(Run {
                space: SpaceId(*space),
                first_page: 1,
                pages: 1,
                kind: RunKind::Zero,
            });
        }
        tree.into_iter().for_each(|tree| writer.record(tree));
        writer.seal(Seal::default()).expect("the image is right");
        Reader::open(&*store).expect("a right image")
    }

    fn tree(tasks: &[(i32, u64, u32)]) -> Tree {
        let node = |(pid, start_ticks, space): &(i32, u64, u32)| Node {
            pid: *pid,
            start_ticks: *start_ticks,
            space_number: *space,
            number: *space,
            ..Node::default()
        };
        Tree {
            tasks: tasks.iter().map(node).collect(),
            boot: b"boot".to_vec(),
            ..Tree::default()
        }
    }

    fn over(parent: &Reader) -> Numbering {
        Numbering::in_boot(Some(parent), b"boot".to_vec()).expect("it makes sense")
    }

    #[test]
    fn without_a_parent_numbers_go_from_one_on() {
        let mut numbers = Numbering::default();
        let of = [(70, 5), (71, 5), (70, 5), (70, 9)];
        let given = of.map(|(pid, ticks)| numbers.space(pid, ticks).0);
        assert_eq!(given, [1, 2, 1, 3]);
    }

    #[test]
    fn a_task_goes_on_with_its_number_and_a_reused_pid_does_not() {
        let parent = image(&[1, 2, 4], Some(tree(&[(70, 5, 1), (71, 6, 4)]).record()));
        let mut numbers = over(&parent);
        assert_eq!(numbers.space(71, 6), SpaceId(4));
        // Another task with the same pid; 2 is the parent's, whosever it was.
        assert_eq!(numbers.space(70, 8), SpaceId(3));
        assert_eq!(numbers.space(72, 6), SpaceId(5));
        assert_eq!(numbers.space(70, 5), SpaceId(1));
    }

    #[test]
    fn a_number_without_pages_is_taken() {
        let parent = image(&[1], Some(tree(&[(70, 5, 1), (71, 6, 2)]).record()));
        let mut numbers = over(&parent);
        assert_eq!(numbers.space(72, 6), SpaceId(3));
        assert_eq!(numbers.space(71, 6), SpaceId(2));
    }

    #[test]
    fn parents_with_odd_numbers_are_refused() {
        for tasks in [
            [(70, 5, 1), (71, 6, 1)],
            [(70, 5, 1), (71, 6, 0)],
            [(70, 5, 1), (71, 6, FIRST_OBJECT)],
        ] {
            let parent = image(&[1], Some(tree(&tasks).record()));
            let error = Numbering::in_boot(Some(&parent), b"boot".to_vec()).unwrap_err();
            let error = error.to_string();
            assert!(error.contains("task 71 of the parent image"), "{error}");
        }
    }

    #[test]
    fn a_parent_of_a_later_version_is_refused() {
        let mut later = tree(&[(70, 5, 1)]).record();
        later.version += 1;
        let error = Numbering::over(Some(&image(&[1], Some(later)))).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("the list of tasks has version 3"), "{error}");
    }

    #[test]
    fn another_boot_has_other_tasks() {
        let parent = image(&[1], Some(tree(&[(70, 5, 1)]).record()));
        let mut numbers = Numbering::in_boot(Some(&parent), b"other".to_vec()).expect("right");
        assert_eq!(numbers.space(70, 5), SpaceId(2));
    }

    #[test]
    fn spaces_of_old_images_are_pids() {
        // Of a dump, and of a pre-dump, which had no list of tasks.
        let old = Tree {
            tasks: vec![Node {
                pid: 70,
                threads: vec![70],
                ..Node::default()
            }],
            ..Tree::default()
        };
        let old = record(tag::TREE, 0, old.encode_to_vec());
        for parent in [image(&[70, 71], Some(old)), image(&[70, 71], None)] {
            let mut numbers = over(&parent);
            assert_eq!(numbers.space(70, 9), SpaceId(70));
            // Whoever has the pid after that one is new.
            assert_eq!(numbers.space(70, 10), SpaceId(1));
            assert_eq!(numbers.space(80, 9), SpaceId(2));
        }
    }

    #[test]
    fn numbers_of_tasks_are_below_those_of_objects() {
        let parent = image(&[FIRST_OBJECT, FIRST_OBJECT + 1], None);
        assert_eq!(over(&parent).space(5, 5), SpaceId(1));
    }
}
