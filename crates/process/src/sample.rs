//! A small image for tests: three tasks, of which one has two threads and one has ended.

use std::sync::Arc;

use image::{Compression, Facts, NewRun, PAGE_BYTES, Record, Run, RunKind, Seal, SpaceId, Writer};
use prost::Message;
use resources::fd::place::Place;
use resources::fd::tags;
use resources::map::memory::{self, Mapping, Memory, Special};
use resources::task::PARTS;
use store::Store;

use crate::records::record;
use crate::records::{
    Descriptor, Descriptors, Node, Place as Directories, State, ThreadState, Tree, tag,
};

pub(crate) const ROOT: i32 = 100;
pub(crate) const THREAD: i32 = 101;
pub(crate) const CHILD: i32 = 102;
pub(crate) const ENDED: i32 = 103;

/// Spaces of the root's and the child's memory: nobody's pid and nobody's number.
pub(crate) const ROOT_SPACE: SpaceId = SpaceId(7);
pub(crate) const CHILD_SPACE: SpaceId = SpaceId(9);

/// The number of a task or thread.
pub(crate) fn id(tid: i32) -> u32 {
    (tid + 1 - ROOT).cast_unsigned()
}

fn tid(id: u32) -> u32 {
    id + ROOT.cast_unsigned() - 1
}

/// Descriptions of files and directories.
#[derive(Clone, PartialEq, Message)]
struct File {
    #[prost(message, required, tag = "1")]
    place: Place,
    #[prost(uint32, tag = "2")]
    flags: u32,
    #[prost(uint64, tag = "3")]
    pos: u64,
    #[prost(uint64, tag = "4")]
    size_bytes: u64,
}

#[derive(Clone, PartialEq, Message)]
struct Eventfd {
    #[prost(uint64, tag = "1")]
    count: u64,
}

#[derive(Clone, PartialEq, Message)]
struct Name {
    #[prost(bytes = "vec", tag = "1")]
    name: Vec<u8>,
}

#[derive(Clone, PartialEq, Message)]
struct Credentials {
    #[prost(uint32, repeated, tag = "1")]
    uids: Vec<u32>,
    #[prost(uint32, repeated, tag = "2")]
    gids: Vec<u32>,
    #[prost(uint64, tag = "5")]
    permitted: u64,
    #[prost(uint64, tag = "6")]
    effective: u64,
    #[prost(uint64, tag = "7")]
    bounding: u64,
}

fn file(path: &str, mode: u32, flags: u32, size_bytes: u64) -> Vec<u8> {
    let place = Place {
        path: path.into(),
        mode,
        ..Place::default()
    };
    let file = File {
        place,
        flags,
        size_bytes,
        ..File::default()
    };
    file.encode_to_vec()
}

fn node(pid: i32, threads: &[i32]) -> Node {
    Node {
        pid,
        parent: if pid == ROOT { 1 } else { ROOT },
        group: ROOT,
        session: ROOT,
        exit_signal: 17,
        threads: threads.to_vec(),
        number: id(pid),
        thread_numbers: threads.iter().map(|tid| id(*tid)).collect(),
        space_number: match pid {
            ROOT => ROOT_SPACE.0,
            CHILD => CHILD_SPACE.0,
            _ => 0,
        },
        start_ticks: 5,
        namespace_pids: vec![pid],
        ..Node::default()
    }
}

fn tree() -> Tree {
    let ended = Node {
        state: State::Zombie as i32,
        exit_status: 9,
        name: b"gone".to_vec(),
        ..node(ENDED, &[])
    };
    let tasks = vec![node(ROOT, &[ROOT, THREAD]), node(CHILD, &[CHILD]), ended];
    let boot = Vec::new();
    Tree {
        tasks,
        boot,
        ..Tree::default()
    }
}

fn mapping(pages: (u64, u64), prot: u32, flags: u32) -> Mapping {
    Mapping {
        start: pages.0 * PAGE_BYTES as u64,
        end: pages.1 * PAGE_BYTES as u64,
        prot,
        flags,
        ..Mapping::default()
    }
}

fn memory() -> Memory {
    const PRIVATE: u32 = 2;
    const ANONYMOUS: u32 = 0x20;
    const GROWSDOWN: u32 = 0x100;
    let code = Mapping {
        file: Some(0),
        ..mapping((0x400, 0x402), 5, PRIVATE)
    };
    let named = Mapping {
        name: b"arena".to_vec(),
        advice: vec![14],
        ..mapping((0x700, 0x704), 1, PRIVATE | ANONYMOUS)
    };
    let vvar = Mapping {
        special: Special::Vvar as i32,
        ..mapping((0x7_ffff_0000, 0x7_ffff_0004), 1, PRIVATE)
    };
    let vdso = Mapping {
        special: Special::Vdso as i32,
        ..mapping((0x7_ffff_0004, 0x7_ffff_0006), 5, PRIVATE)
    };
    let stack = PRIVATE | ANONYMOUS | GROWSDOWN;
    Memory {
        marks: vec![
            0x40_0000,
            0x40_2000,
            0x40_2000,
            0x40_2000,
            0x60_0000,
            0x60_4000,
            0x7fff_efff_f000,
            0,
            0,
            0,
            0,
        ],
        exe: 0,
        mappings: vec![
            code,
            mapping((0x600, 0x604), 3, PRIVATE | ANONYMOUS),
            named,
            mapping((0x7_fffe_0000, 0x7_ffff_0000), 3, stack),
            vvar,
            vdso,
        ],
        vdso_build_id: sys::vdso::own_build_id().unwrap_or_default(),
        ..Memory::default()
    }
}

fn parts(tid: i32) -> impl Iterator<Item = Record> {
    let name = Name {
        name: format!("t{tid}").into_bytes(),
    };
    const ALL: u64 = (1 << 41) - 1;
    let credentials = Credentials {
        uids: vec![0; 4],
        gids: vec![0; 4],
        permitted: ALL,
        effective: ALL,
        bounding: ALL,
    };
    let parts = [
        ("name", name.encode_to_vec()),
        ("credentials", credentials.encode_to_vec()),
    ];
    parts.into_iter().map(move |(name, payload)| {
        let part = PARTS.iter().find(|part| part.name() == name);
        record(part.expect("a part").tag(), id(tid), payload)
    })
}

/// The records of the image.
pub(crate) fn records() -> Vec<Record> {
    let mut records = vec![tree().record()];
    for (pid, threads) in [(ROOT, &[ROOT, THREAD][..]), (CHILD, &[CHILD])] {
        records.extend(task(pid, threads, &memory()));
    }
    records.extend(descriptions());
    records
}

/// The same image as version 1 of the tree's record had it: what has a number of its own now had
/// its pid for one.
pub(crate) fn old_image() -> Arc<dyn Store> {
    let of_tasks = [memory::TAG, tag::DESCRIPTORS, tag::PLACE, tag::THREAD];
    let mut records = records();
    for record in &mut records {
        if of_tasks.contains(&record.tag) || PARTS.iter().any(|part| part.tag() == record.tag) {
            record.id = tid(record.id);
        }
    }
    let mut tree = tree();
    for node in &mut tree.tasks {
        *node = Node {
            number: 0,
            thread_numbers: Vec::new(),
            space_number: 0,
            start_ticks: 0,
            namespace_pids: Vec::new(),
            ..node.clone()
        };
    }
    records[0] = record(tag::TREE, 0, tree.encode_to_vec());
    let store: Arc<dyn Store> = Arc::new(store::Memory::default());
    let spaces = [ROOT, CHILD].map(|pid| SpaceId(pid.cast_unsigned()));
    write(&store, (None, spaces), records, &[]);
    store
}

/// The records of one task.
pub(crate) fn task(pid: i32, threads: &[i32], memory: &Memory) -> Vec<Record> {
    let mut records = vec![record(memory::TAG, id(pid), memory.encode_to_vec())];
    let descriptor = |fd, description, close_on_exec| Descriptor {
        fd,
        description,
        close_on_exec,
    };
    let descriptors = vec![
        descriptor(0, 2, false),
        descriptor(5, 3, true),
        descriptor(6, 3, false),
    ];
    let descriptors = Descriptors { descriptors };
    records.push(record(
        tag::DESCRIPTORS,
        id(pid),
        descriptors.encode_to_vec(),
    ));
    let place = Directories { cwd: 1, root: None };
    records.push(record(tag::PLACE, id(pid), place.encode_to_vec()));
    for tid in threads {
        let state = ThreadState {
            registers: vec![0; 27],
            xstate: vec![0; 64],
            ..ThreadState::default()
        };
        records.push(record(tag::THREAD, id(*tid), state.encode_to_vec()));
        records.extend(parts(*tid));
    }
    records
}

/// What the tasks have open, mapped and as their folder.
pub(crate) fn descriptions() -> impl Iterator<Item = Record> {
    const DIRECTORY: u32 = 0o200_000;
    let descriptions = [
        (tags::REGULAR, file("/usr/bin/true", 0o100_755, 0, 4096)),
        (tags::DIRECTORY, file("/srv", 0o040_755, DIRECTORY, 0)),
        (tags::REGULAR, file("/srv/a", 0o100_644, 2, 10)),
        (tags::EVENTFD, Eventfd { count: 3 }.encode_to_vec()),
    ];
    (0..).zip(descriptions).map(|(id, (tag, payload))| Record {
        tag,
        version: 1,
        id,
        payload,
    })
}

/// The runs that are not stored; two pages of the root's heap are.
fn runs([root, child]: [SpaceId; 2]) -> [Run; 2] {
    let run = |space, first_page, pages, kind| Run {
        space,
        first_page,
        pages,
        kind,
    };
    [
        run(root, 0x602, 1, RunKind::Zero),
        run(child, 0x600, 2, RunKind::Same { space: root }),
    ]
}

/// An image of `records` and, with `more`, the pages of the tasks.
pub(crate) fn image(records: Vec<Record>, more: &[Run]) -> Arc<dyn Store> {
    let store: Arc<dyn Store> = Arc::new(store::Memory::default());
    image_in(&store, None, records, more);
    store
}

/// Does what [`image`] does, in `store`.
pub(crate) fn image_in(
    store: &Arc<dyn Store>,
    compression: Option<Compression>,
    records: Vec<Record>,
    more: &[Run],
) {
    let spaces = [ROOT_SPACE, CHILD_SPACE];
    write(store, (compression, spaces), records, more);
}

fn write(
    store: &Arc<dyn Store>,
    (compression, spaces): (Option<Compression>, [SpaceId; 2]),
    records: Vec<Record>,
    more: &[Run],
) {
    let mut writer = Writer::create(store.clone()).expect("memory takes an image");
    writer.compress(compression);
    let stored = NewRun {
        space: spaces[0],
        first_page: 0x600,
        pages: 2,
    };
    writer
        .append(&[1; 2 * PAGE_BYTES], &[stored])
        .expect("memory takes pages");
    runs(spaces)
        .iter()
        .chain(more)
        .for_each(|run| writer.mark(*run));
    for record in records.into_iter().filter(|record| record.tag != 0) {
        writer.record(record);
    }
    let facts = Facts {
        kernel_release: "6.18.0".to_owned(),
        stillframe_version: "0.1.0".to_owned(),
        created_ns: 1,
        arch: "x86_64".to_owned(),
    };
    let seal = Seal {
        durable: false,
        facts,
    };
    writer.seal(seal).expect("the image is right");
}
