//! Maps of this process that are dumped, closed and opened again.

use std::os::fd::AsRawFd;

use sys::bpf_map::{Entries, Sizes};
use sys::per_cpu;
use testkit::wait::{SOON, wait_until};

use super::super::testing::{At, World, open_alone};
use super::*;

/// A map, where they can be made and looked into.
fn map(kind: &str, (key_bytes, value_bytes): (u32, u32), max_entries: u32) -> Option<OwnedFd> {
    let at = KINDS.iter().position(|known| *known == kind);
    let kind = at.expect("a known kind") as u32 + 1;
    let tree = if kind_name(kind) == "lpm_trie" { 1 } else { 0 };
    let made = bpf_map::create(&Definition {
        kind,
        key_bytes,
        value_bytes,
        max_entries,
        flags: tree,
        numa_node: 0,
        name: b"own".to_vec(),
    });
    let looks = crate::kernel::Kernel::get().is_ok();
    made.ok().filter(|_| looks)
}

/// Skips a test where there are no maps.
macro_rules! needs_map {
    ($map:expr) => {
        match $map {
            Some(map) => map,
            None => testkit::skip!("no maps can be made and looked into"),
        }
    };
}

fn values(kind: &str) -> usize {
    match kind.contains("percpu") {
        true => 8 * per_cpu::possible().expect("sysfs").len(),
        false => 8,
    }
}

/// All entries, in the order of their keys.
fn entries(map: &OwnedFd, sizes: Sizes) -> Vec<(Vec<u8>, Vec<u8>)> {
    let mut all = Vec::new();
    let mut entries = Entries::new(map, sizes);
    while let Some((keys, values)) = entries.read().expect("read") {
        let keys = keys.chunks_exact(sizes.key).map(<[u8]>::to_vec);
        all.extend(keys.zip(values.chunks_exact(sizes.value).map(<[u8]>::to_vec)));
    }
    all.sort();
    all
}

fn fill(map: &OwnedFd, sizes: Sizes, count: u32) {
    let keys: Vec<u8> = (0..count).flat_map(u32::to_ne_bytes).collect();
    let values = count as usize * sizes.value;
    let values: Vec<u8> = (0..values).map(|at| (at * 7 + at / 251) as u8).collect();
    bpf_map::update(map, (&keys, &values), sizes).expect("there is room");
}

#[test]
fn entries_of_each_kind_survive() {
    testkit::needs_root!();
    for kind in KEPT
        .iter()
        .filter(|kind| kind.ends_with("array") || kind.ends_with("hash"))
    {
        // Inline, and in a space; up to the last entry of a hash.
        for (count, room) in [(3, 3), (3, 700), (700, 700), (5000, 5000)] {
            let own = needs_map!(map(kind, (4, 8), room));
            let value = values(kind);
            let sizes = Sizes { key: 4, value };
            fill(&own, sizes, count);
            let before = entries(&own, sizes);
            let mut world = World::default();
            let at = world.add(own);
            world.cycle();
            let told = world.describe(at);
            let room = format!("room={room}x(4+8)");
            assert!(
                told.contains(kind) && told.contains(" own ") && told.contains(&room),
                "{told}"
            );
            assert!(entries(world.get(at), sizes) == before, "{told}");
        }
    }
}

#[test]
fn prefixes_survive() {
    testkit::needs_root!();
    let own = needs_map!(map("lpm_trie", (8, 4), 100));
    let sizes = Sizes { key: 8, value: 4 };
    for (bits, address) in [
        (8_u32, [10, 0, 0, 0]),
        (24, [10, 1, 2, 0]),
        (32, [10, 1, 2, 3]),
    ] {
        let key = [bits.to_ne_bytes(), address].concat();
        bpf_map::update(&own, (&key, &bits.to_ne_bytes()), sizes).expect("room");
    }
    let before = entries(&own, sizes);
    assert_eq!(before.len(), 3);
    let mut world = World::default();
    let at = world.add(own);
    world.cycle();
    assert_eq!(entries(world.get(at), sizes), before);
}

/// What is in a queue, taken out.
fn pop(map: &OwnedFd, value_bytes: usize) -> Vec<Vec<u8>> {
    let pop = || bpf_map::pop(map, value_bytes).expect("asked");
    std::iter::from_fn(pop).collect()
}

#[test]
fn queues_and_stacks_keep_their_order() {
    testkit::needs_root!();
    for kind in ["queue", "stack"] {
        let own = needs_map!(map(kind, (0, 5), 4));
        for value in [b"first", b"other", b"third", b"forth"] {
            bpf_map::push(&own, value).expect("room");
        }
        // Around the end of its room.
        bpf_map::pop(&own, 5).expect("asked").expect("there");
        bpf_map::push(&own, b"fifth").expect("room");
        let wanted: [&[u8]; 4] = match kind {
            "queue" => [b"other", b"third", b"forth", b"fifth"],
            _ => [b"fifth", b"third", b"other", b"first"],
        };
        let mut world = World::default();
        let at = world.add(own);
        world.cycle();
        assert!(world.describe(at).contains(" entries=4 "));
        assert_eq!(pop(world.get(at), 5), wanted);
    }
}

#[test]
fn several_descriptors_and_their_access_survive() {
    testkit::needs_root!();
    let own = needs_map!(map("hash", (4, 8), 10));
    let sizes = Sizes { key: 4, value: 8 };
    fill(&own, sizes, 2);
    bpf_map::freeze(&own).expect("nobody writes");
    let id = bpf_map::info(&own).expect("told").id;
    let reads = bpf_map::open(id, bpf_map::READ_ONLY).expect("root may");
    let writes = bpf_map::open(id, bpf_map::WRITE_ONLY).expect("root may");
    let mut world = World::default();
    let all = [own, reads, writes].map(|own| world.add(own));
    world.cycle();
    let id = |at: &At| bpf_map::info(world.get(*at)).expect("told").id;
    assert!(all.iter().all(|at| id(at) == id(&all[0])), "they are one");
    assert_eq!(entries(world.get(all[1]), sizes).len(), 2);
    let error = Entries::new(world.get(all[2]), sizes)
        .read()
        .expect_err("it only writes");
    assert_eq!(error.raw_os_error(), Some(1));
    assert!(world.describe(all[0]).contains(" (frozen) entries=2 "));
    let error = bpf_map::update(world.get(all[0]), (&[0; 4], &[0; 8]), sizes);
    assert_eq!(error.expect_err("it is frozen").raw_os_error(), Some(1));
}

/// Insists that it is refused because of `why`, when no child of another test has it as well.
#[track_caller]
fn assert_refused(world: &mut World, why: &str) {
    wait_until(why, SOON, || {
        let told = world.dump().expect_err("it is refused").to_string();
        told.contains(why)
    });
}

#[test]
fn what_others_have_is_refused() {
    testkit::needs_root!();
    let own = needs_map!(map("hash", (4, 8), 10));
    let id = bpf_map::info(&own).expect("told").id;
    let mut world = World::default();
    let at = world.add(own);
    let other = bpf_map::open(id, 0).expect("root may");
    assert_refused(
        &mut world,
        "it is pinned, or somebody outside of the tree has it",
    );
    drop(other);
    let copy = rustix::io::dup(world.get(at)).expect("dup");
    assert_refused(&mut world, "has its descriptor as well");
    drop(copy);
    let program = bpf_map::use_in_program(world.get(at)).expect("loaded");
    assert_refused(&mut world, "a program or another map uses it");
    let mut programs = World::default();
    programs.add(program);
    assert_refused(&mut programs, "a BPF program, of which the kernel tells");
}

#[test]
fn kinds_that_are_more_than_their_entries_are_named() {
    testkit::needs_root!();
    let _ = needs_map!(map("hash", (4, 8), 10));
    for (kind, sizes, entries) in [("ringbuf", (0, 0), 4096), ("prog_array", (4, 4), 3)] {
        let own = map(kind, sizes, entries).expect("made");
        let mut world = World::default();
        world.add(own);
        assert_refused(
            &mut world,
            &format!("maps of kind {kind} are not there yet"),
        );
    }
}

#[test]
fn what_makes_no_sense_is_refused() {
    testkit::needs_root!();
    let own = needs_map!(map("hash", (4, 8), 10));
    assert!(own.as_raw_fd() >= 0);
    let sound = Record {
        kind: 1,
        key_bytes: 4,
        value_bytes: 8,
        max_entries: 10,
        flags: 2,
        contents: Some(Contents::default()),
        ..Record::default()
    };
    open_alone::<BpfMap>(&sound).expect("it is sound");
    let change = |change: &dyn Fn(&mut Record)| {
        let mut record = sound.clone();
        change(&mut record);
        record
    };
    let contents = |entries, inline: &[u8], processors| {
        let contents = Contents::made_of(entries, inline, processors);
        change(&|record| record.contents = Some(contents.clone()))
    };
    for record in [
        change(&|record| record.kind = 3),
        change(&|record| record.kind = u32::MAX),
        change(&|record| record.key_bytes = 0),
        change(&|record| record.value_bytes = 0),
        change(&|record| record.value_bytes = u32::MAX),
        change(&|record| record.map_flags = 1 << 30),
        change(&|record| record.name = vec![b'x'; 16]),
        change(&|record| record.contents = None),
        contents(1, &[0; 11], 0),
        contents(1, &[0; 13], 0),
        contents(11, &[0; 132], 0),
        contents(u64::MAX, &[], 0),
        contents(0, &[], 2),
    ] {
        let opened = open_alone::<BpfMap>(&record);
        let error = opened.expect_err("it makes no sense");
        assert!(
            matches!(error, Error::Corrupt { .. }),
            "{record:?}: {error}"
        );
    }
    let other = Record {
        kind: 5,
        contents: Some(Contents::made_of(0, &[], 4000)),
        ..sound
    };
    let error = open_alone::<BpfMap>(&other).expect_err("other processors");
    assert!(
        error.to_string().contains("has values of 4000 processors"),
        "{error}"
    );
}
