//! Tasks that fork, map, write and end, as programs do, and the image of what they have come to.

use std::sync::Arc;

use abi::{Addr, PAGE_BYTES, Span};
use image::{Compression, NewRun, Reader, Record, Run, RunKind, Seal, SpaceId, Writer};
use resources::map::memory::{Mapping, Memory, Special};
use store::Store;

use super::space::{Contents, Kind, MAP_ANONYMOUS, Page, Space, VDSO_DATA_PAGES};
use crate::records::{Node, State, Tree};
use crate::sample;

pub const ROOT: i32 = 100;

/// One task, or a zombie.
pub struct Task {
    pub pid: i32,
    pub parent: i32,
    pub group: i32,
    pub session: i32,
    pub zombie: bool,
    pub space: Space,
}

/// All tasks, in the order in which they were made; the root adopts orphans.
pub struct World {
    pub tasks: Vec<Task>,
    next_pid: i32,
    next_frame: u64,
    /// Every other mapping stays apart from its neighbours.
    maps: u64,
}

impl World {
    pub fn new() -> Self {
        let root = Task {
            pid: ROOT,
            parent: 1,
            group: ROOT,
            session: ROOT,
            zombie: false,
            space: Space::default(),
        };
        Self {
            tasks: vec![root],
            next_pid: ROOT + 1,
            next_frame: 0,
            maps: 0,
        }
    }

    /// Makes a child of task `index`, or, with `sibling`, one of its parent's; its index.
    pub fn fork(&mut self, index: usize, sibling: bool) -> usize {
        let maker = &self.tasks[index];
        let child = Task {
            pid: self.next_pid,
            parent: if sibling { maker.parent } else { maker.pid },
            group: maker.group,
            session: maker.session,
            zombie: false,
            space: maker.space.fork(),
        };
        self.next_pid += 1;
        self.tasks.push(child);
        self.tasks.len() - 1
    }

    /// Ends task `index`, whose parent waits for it or does not.
    pub fn exit(&mut self, index: usize, stays: bool) {
        let pid = self.tasks[index].pid;
        self.tasks[index].zombie = true;
        self.tasks[index].space = Space::default();
        let children = self.tasks.iter_mut().filter(|task| task.parent == pid);
        children.for_each(|child| child.parent = ROOT);
        if !stays {
            self.tasks.remove(index);
        }
    }

    pub fn map(&mut self, index: usize, span: Span, prot: u32, kind: impl Fn(u64) -> Kind) {
        self.maps += 1;
        let apart = self.maps % 2 * self.maps;
        self.tasks[index].space.map(span, prot, apart, kind);
    }

    /// Has task `index` write to those pages of `span` that take it.
    pub fn write(&mut self, index: usize, span: Span, zeros: bool) {
        for page in span.start.page()..span.end.page() {
            self.next_frame += 1;
            let word = if zeros { 0 } else { self.next_frame };
            let contents = Contents {
                frame: self.next_frame,
                word,
            };
            // What cannot be written to stays as it is.
            let _ = self.tasks[index].space.write(page, contents);
        }
    }

    fn task(&self, pid: i32) -> Option<&Task> {
        self.tasks
            .iter()
            .find(|task| task.pid == pid && !task.zombie)
    }

    /// The image of all tasks: in files, whose pages a task reads for itself, or in none; as they
    /// are, or encoded.
    pub fn image(&self) -> Reader {
        let scratch = tempfile::tempdir().expect("a scratch folder");
        let store: Arc<dyn Store> = match self.tasks.len() % 2 {
            0 => Arc::new(store::Memory::default()),
            _ => Arc::new(store::Directory::open(scratch.path()).expect("it was just made")),
        };
        let mut writer = Writer::create(store.clone()).expect("it takes an image");
        writer.compress(match self.tasks.len() % 3 {
            0 => None,
            1 => Some(Compression::Lz4),
            _ => Some(Compression::Zstd(1)),
        });
        for task in &self.tasks {
            self.save_pages(task, &writer);
        }
        self.records()
            .into_iter()
            .for_each(|record| writer.record(record));
        writer.seal(Seal::default()).expect("the image is right");
        Reader::open(&*store).expect("a right image")
    }

    fn save_pages(&self, task: &Task, writer: &Writer) {
        let parents = self.task(task.parent);
        let space = space_of(task.pid);
        for (number, page) in &task.space.0 {
            let Some(contents) = page.contents else {
                continue;
            };
            let frame = |page: &Page| page.contents.map(|contents| contents.frame);
            let same = parents.filter(|parent| {
                parent.space.0.get(number).and_then(frame) == Some(contents.frame)
            });
            let kind = match (same, contents.word) {
                (Some(parent), _) => RunKind::Same {
                    space: space_of(parent.pid),
                },
                (None, 0) => RunKind::Zero,
                (None, word) => {
                    let mut bytes = vec![0; PAGE_BYTES as usize];
                    bytes[..8].copy_from_slice(&word.to_le_bytes());
                    let run = NewRun {
                        space,
                        first_page: *number,
                        pages: 1,
                    };
                    writer.append(&bytes, &[run]).expect("memory takes pages");
                    continue;
                }
            };
            writer.mark(Run {
                space,
                first_page: *number,
                pages: 1,
                kind,
            });
        }
    }

    fn records(&self) -> Vec<Record> {
        let tree = Tree {
            tasks: self.nodes(),
            ..Tree::default()
        };
        let mut records = vec![tree.record()];
        for task in self.tasks.iter().filter(|task| !task.zombie) {
            let memory = memory_of(&task.space);
            records.extend(sample::task(task.pid, &[task.pid], &memory));
        }
        records.extend(sample::descriptions());
        records
    }

    /// The tasks, parents before children.
    fn nodes(&self) -> Vec<Node> {
        let mut nodes: Vec<Node> = Vec::new();
        let mut left = self.tasks.iter().collect::<Vec<_>>();
        while !left.is_empty() {
            let before = left.len();
            left.retain(|task| {
                let known = nodes.iter().any(|node| node.pid == task.parent);
                let next = task.pid == ROOT || known;
                if next {
                    nodes.push(node(task));
                }
                !next
            });
            assert!(left.len() < before, "every parent is there");
        }
        nodes
    }
}

/// The space that the memory of task `pid` is.
fn space_of(pid: i32) -> SpaceId {
    SpaceId(sample::id(pid) + 5000)
}

fn node(task: &Task) -> Node {
    let numbers = (!task.zombie).then(|| sample::id(task.pid));
    Node {
        number: sample::id(task.pid),
        thread_numbers: numbers.into_iter().collect(),
        space_number: if task.zombie { 0 } else { space_of(task.pid).0 },
        pid: task.pid,
        parent: task.parent,
        group: task.group,
        session: task.session,
        state: if task.zombie {
            State::Zombie
        } else {
            State::Running
        } as i32,
        exit_signal: 17,
        threads: if task.zombie {
            Vec::new()
        } else {
            vec![task.pid]
        },
        ..Node::default()
    }
}

/// The record of an address space.
fn memory_of(space: &Space) -> Memory {
    let mut mappings: Vec<(Mapping, &Page)> = Vec::new();
    for (number, page) in &space.0 {
        let start = number * PAGE_BYTES;
        let follows = |map: &Mapping, last: &Page| {
            map.end == start
                && (last.prot, &last.advice, last.apart) == (page.prot, &page.advice, page.apart)
                && goes_on(&last.kind, &page.kind)
        };
        match mappings.last_mut() {
            Some((map, last)) if follows(map, last) => {
                (map.end, *last) = (start + PAGE_BYTES, page);
            }
            _ => mappings.push((mapping(start, page), page)),
        }
        if page.guard {
            let (map, _) = mappings.last_mut().expect("just put there");
            map.guards.extend([start, PAGE_BYTES]);
        }
    }
    Memory {
        marks: vec![0; 11],
        mappings: mappings.into_iter().map(|(map, _)| map).collect(),
        vdso_build_id: sys::vdso::own_build_id().unwrap_or_default(),
        ..Memory::default()
    }
}

fn goes_on(one: &Kind, next: &Kind) -> bool {
    match (one, next) {
        (
            Kind::File {
                description,
                page,
                flags,
            },
            Kind::File {
                description: other,
                page: next,
                flags: others,
            },
        ) => (description, page + 1, flags) == (other, *next, others),
        (Kind::Vdso(one), Kind::Vdso(next)) => one + 1 == *next && *next != VDSO_DATA_PAGES,
        (one, next) => one == next,
    }
}

fn mapping(start: u64, page: &Page) -> Mapping {
    let map = Mapping {
        start,
        end: start + PAGE_BYTES,
        prot: page.prot,
        advice: page.advice.iter().copied().collect(),
        ..Mapping::default()
    };
    match &page.kind {
        Kind::Anonymous { flags, name } => Mapping {
            flags: flags | MAP_ANONYMOUS,
            name: name.clone(),
            ..map
        },
        Kind::File {
            description,
            page,
            flags,
        } => Mapping {
            flags: *flags,
            offset: page * PAGE_BYTES,
            file: Some(*description),
            ..map
        },
        Kind::Vdso(number) => Mapping {
            flags: super::space::MAP_PRIVATE,
            special: if *number < VDSO_DATA_PAGES {
                Special::Vvar
            } else {
                Special::Vdso
            } as i32,
            ..map
        },
    }
}

/// Pages from `first` on.
pub fn pages(first: u64, count: u64) -> Span {
    Span::new(Addr::of_page(first), count * PAGE_BYTES)
}
