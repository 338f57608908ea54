//! Restores from images of before tasks had numbers of their own: what is a number now was a pid.
use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;

use image::{NewRun, Reader, Record, Run, RunKind, Seal, SpaceId, SpaceKind, Writer};
use prost::Message;
use resources::fd::tags;
use resources::map::{aio, memory};
use store::Directory;
use testkit::facts::Facts;
use testkit::needs_root;
use testkit::subject::Subject;
use testkit::wait::{SOON, wait_until};

use crate::{assert_restored, lazy, stillframe};

/// A tree's record of version 1, as far as it is told here: the rest of it is kept as it is.
#[derive(Clone, PartialEq, Message)]
struct Tree {
    #[prost(message, repeated, tag = "1")]
    tasks: Vec<Node>,
}

#[derive(Clone, PartialEq, Message)]
struct Node {
    #[prost(int32, tag = "1")]
    pid: i32,
    #[prost(int32, tag = "2")]
    parent: i32,
    #[prost(int32, tag = "3")]
    group: i32,
    #[prost(int32, tag = "4")]
    session: i32,
    #[prost(int32, tag = "5")]
    state: i32,
    #[prost(int32, tag = "6")]
    exit_status: i32,
    #[prost(int32, tag = "7")]
    exit_signal: i32,
    #[prost(int32, repeated, tag = "8")]
    threads: Vec<i32>,
    #[prost(bytes = "vec", tag = "9")]
    name: Vec<u8>,
    #[prost(int32, tag = "10")]
    terminal: i32,
    #[prost(int32, tag = "11")]
    foreground: i32,
    #[prost(bool, tag = "12")]
    left_terminal: bool,
    #[prost(int32, tag = "13")]
    stop_signal: i32,
    #[prost(bool, tag = "14")]
    stop_seen: bool,
    #[prost(bool, tag = "15")]
    stop_comes: bool,
    #[prost(uint32, repeated, tag = "16")]
    uids: Vec<u32>,
    #[prost(uint32, repeated, tag = "17")]
    gids: Vec<u32>,
    #[prost(uint32, repeated, tag = "18")]
    groups: Vec<u32>,
}

/// What version 2 says more.
#[derive(Clone, PartialEq, Message)]
struct Numbers {
    #[prost(message, repeated, tag = "1")]
    tasks: Vec<NodeNumbers>,
}

#[derive(Clone, PartialEq, Message)]
struct NodeNumbers {
    #[prost(int32, tag = "1")]
    pid: i32,
    #[prost(int32, repeated, tag = "8")]
    threads: Vec<i32>,
    #[prost(uint32, tag = "19")]
    number: u32,
    #[prost(uint32, repeated, tag = "20")]
    thread_numbers: Vec<u32>,
    #[prost(uint32, tag = "21")]
    space: u32,
}

const TREE: u16 = 1;
/// Registers of threads, descriptors and places.
const OF_TASKS: [u16; 3] = [2, 3, 4];

fn open(path: &Path) -> Reader {
    let store = Directory::open(path).expect("there is an image");
    Reader::open(&store).expect("it is whole")
}

/// Pids by number, and the pids of spaces.
fn pids(tree: &Record) -> [HashMap<u32, u32>; 2] {
    assert_eq!((tree.tag, tree.version), (TREE, 2));
    let numbers = Numbers::decode(tree.payload.as_slice()).expect("a list of tasks");
    let [mut pids, mut spaces] = [HashMap::new(), HashMap::new()];
    for node in numbers.tasks {
        let pid = node.pid.cast_unsigned();
        pids.insert(node.number, pid);
        let tids = node.threads.iter().map(|tid| tid.cast_unsigned());
        pids.extend(node.thread_numbers.into_iter().zip(tids));
        spaces.insert(node.space, pid);
    }
    [pids, spaces]
}

/// Writes to `old` the image in `new` as it was written before tasks had numbers.
fn write_old(new: &Path, old: &Path) {
    let new = open(new);
    let store = Directory::create(old).expect("a directory can be made");
    let writer = Writer::create(Arc::new(store)).expect("it is begun");
    let mut records = new.records().iter();
    let tree = records.find(|record| record.tag == TREE).expect("a tree");
    let [pids, spaces] = pids(tree);
    for record in new.records() {
        let mut record = record.clone();
        let of_task = [memory::TAG, aio::TAG, tags::LOCKS].contains(&record.tag);
        if of_task || OF_TASKS.contains(&record.tag) || (200..300).contains(&record.tag) {
            record.id = pids[&record.id];
        } else if record.tag == TREE {
            let tree = Tree::decode(record.payload.as_slice()).expect("a list of tasks");
            (record.version, record.payload) = (1, tree.encode_to_vec());
        }
        writer.record(record);
    }
    let renamed = |space: SpaceId| SpaceId(*spaces.get(&space.0).unwrap_or(&space.0));
    for space in new.spaces() {
        if space.kind != SpaceKind::Memory {
            writer.space(space.said());
        }
        for run in new.runs(space.id) {
            copy(&new, &writer, &run, renamed);
        }
    }
    let facts = new.facts().clone();
    let sealed = writer.seal(Seal {
        durable: false,
        facts,
    });
    sealed.expect("it is finished");
}

fn copy(new: &Reader, writer: &Writer, run: &Run, renamed: impl Fn(SpaceId) -> SpaceId) {
    let space = renamed(run.space);
    let kind = match run.kind {
        RunKind::Zero => RunKind::Zero,
        RunKind::Same { space } => RunKind::Same {
            space: renamed(space),
        },
        RunKind::Part(_) => {
            let mut bytes = vec![0; run.pages as usize * image::PAGE_BYTES];
            let read = new.read_pages(run.space, run.first_page, &mut bytes);
            read.expect("the image has it");
            let own = NewRun {
                space,
                first_page: run.first_page,
                pages: run.pages,
            };
            writer.append(&bytes, &[own]).expect("it is stored");
            return;
        }
    };
    writer.mark(Run {
        space,
        kind,
        ..*run
    });
}

#[test]
fn trees_come_back_from_images_of_before_tasks_had_numbers() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the images are made by Stillframe's own code");
    }
    for (name, arguments) in [
        ("tree", &["7", "still"][..]),
        ("zombies", &[]),
        ("fds", &[]),
        ("patchwork", &["1"]),
    ] {
        let subject = Subject::start(name, arguments);
        wait_until("the subject to wait", SOON, || subject.is_waiting());
        let before = Facts::still(subject.pid());
        for how in [&[][..], &["--lazy-pages"]] {
            stillframe.dump(subject.pid(), &[]).must();
            let images = stillframe.images();
            let new = images.with_file_name("new");
            std::fs::rename(images, &new).expect("it can be moved");
            write_old(&new, images);
            stillframe.restore(how).must();
            wait_until("the subject to wait", SOON, || subject.is_waiting());
            // What the kernel tells of memory that has not come yet is empty.
            lazy::wait_whole(&stillframe);
            lazy::wait_unregistered(subject.pid());
            let after = Facts::still(subject.pid());
            assert_restored(&stillframe, &before, &after, name);
            stillframe.clear();
            std::fs::remove_dir_all(&new).expect("it is there");
        }
    }
}
