//! Whether a restore gives every task its own address space, whoever it was forked from: histories
//! of tasks are made up, imaged and planned, and the plan is played on a machine that knows what
//! fork leaves to a child.

mod machine;
mod space;
mod world;

use resources::map::memory::Special;
use resources::map::vdso::{Host, Part};
use testkit::chance::Chance;

use self::machine::Machine;
use self::space::{
    Kind, MADV_DONTFORK, MADV_DONTNEED, MADV_GUARD_INSTALL, MADV_WIPEONFORK, MAP_ANONYMOUS,
    MAP_PRIVATE, MAP_SHARED, Space, VDSO_DATA_PAGES, VDSO_PAGES,
};
use self::world::{ROOT, World, pages};
use super::{OwnVdso, Setting, plan};
use crate::Error;
use crate::records::Saved;

/// Where the mappings of these tasks are.
const ARENA: u64 = 0x70_0000;
const ARENA_PAGES: u64 = 40;
/// Where their vDSOs are.
const VDSO: u64 = 0x7_ff00_0000;
const MAP_GROWSDOWN: u32 = linux_raw_sys::general::MAP_GROWSDOWN;
const MAP_NORESERVE: u32 = linux_raw_sys::general::MAP_NORESERVE;

/// What came of one world.
#[derive(PartialEq)]
enum Verdict {
    Right,
    /// No order of forks gives such a tree.
    Refused,
    Wrong(String),
}

/// Restores `world` and compares what every task has with what it had.
fn judge(world: &World, outside_from_bytes: u64) -> Verdict {
    let reader = world.image();
    let saved = Saved::read(&reader).expect("right records");
    let part = |special, pages| Part {
        special,
        bytes: pages * abi::PAGE_BYTES,
    };
    let host = Host {
        parts: vec![
            part(Special::Vvar, VDSO_DATA_PAGES),
            part(Special::Vdso, VDSO_PAGES - VDSO_DATA_PAGES),
        ],
        ..Host::default()
    };
    let vdso = OwnVdso {
        host: Some(host),
        ..Setting::default().vdso
    };
    let setting = Setting {
        outside_from_bytes,
        vdso,
        ..Setting::default()
    };
    let plan = match plan(&reader, &saved, &setting) {
        Ok(plan) => plan,
        Err(Error::Resource(resources::Error::Unsupported { .. })) => return Verdict::Refused,
        Err(error) => return Verdict::Wrong(error.to_string()),
    };
    let mut machine = Machine::new(&plan, &reader);
    if let Err(why) = machine.run() {
        return Verdict::Wrong(why);
    }
    for task in world.tasks.iter().filter(|task| !task.zombie) {
        let Some(space) = machine.ended.get(&task.pid) else {
            return Verdict::Wrong(format!("{} is not there", task.pid));
        };
        if let Some(what) = difference(&task.space, space) {
            return Verdict::Wrong(format!("{}: {what}", task.pid));
        }
    }
    Verdict::Right
}

fn difference(want: &Space, got: &Space) -> Option<String> {
    let all = want.0.keys().chain(got.0.keys());
    let seen = |space: &Space, page: &u64| space.0.get(page).map(space::Page::seen);
    let wrong = all
        .copied()
        .find(|page| seen(want, page) != seen(got, page))?;
    let [want, got] = [want, got].map(|space| seen(space, &wrong));
    Some(format!("page {wrong:#x} is {got:?} instead of {want:?}"))
}

/// Makes up `steps` steps of a history.
fn history(chance: &mut Chance, steps: u64) -> World {
    let mut world = World::new();
    world.tasks[0].space.map_vdso(VDSO).expect("free");
    for _ in 0..6 {
        map(&mut world, 0, chance);
    }
    for _ in 0..steps {
        step(&mut world, chance);
    }
    world
}

fn step(world: &mut World, chance: &mut Chance) {
    const TASKS_MAX: usize = 9;
    let living = (0..world.tasks.len()).filter(|index| !world.tasks[*index].zombie);
    let living = living.collect::<Vec<_>>();
    let index = living[chance.below(living.len() as u64) as usize];
    let span = pages(ARENA + chance.below(ARENA_PAGES), 1 + chance.below(6));
    let task = &mut world.tasks[index];
    match chance.below(24) {
        0..=3 if living.len() < TASKS_MAX => {
            let sibling = index > 0 && chance.below(5) == 0;
            world.fork(index, sibling);
        }
        4 if index > 0 => world.exit(index, chance.below(2) == 0),
        5 if task.pid != task.group => (task.group, task.session) = (task.pid, task.pid),
        6 if task.pid != task.session => task.group = task.pid,
        7 if chance.below(3) == 0 => {
            // Another program.
            task.space = Space::default();
            let vdso = VDSO + chance.below(3) * 0x100;
            task.space.map_vdso(vdso).expect("free");
            (0..3).for_each(|_| map(world, index, chance));
        }
        8 => vdso(&mut task.space, chance),
        9..=10 => map(world, index, chance),
        11..=12 => task.space.unmap(span),
        13 => {
            let prot = [0, 1, 3, 2, 5, 7][chance.below(6) as usize];
            // Where not all of it is mapped nothing happens.
            let _ = task.space.protect(span, prot);
        }
        14..=15 => {
            let advice = [4, 10, 11, 14, 15, 18, 19, MADV_GUARD_INSTALL, MADV_DONTNEED];
            let advice = advice[chance.below(advice.len() as u64) as usize];
            let _ = task.space.advise(span, advice);
        }
        _ => world.write(index, span, chance.below(4) == 0),
    }
}

/// Maps something somewhere.
fn map(world: &mut World, index: usize, chance: &mut Chance) {
    let span = pages(ARENA + chance.below(ARENA_PAGES), 1 + chance.below(10));
    let first = span.start.page() - ARENA;
    let anonymous = |flags, name: &[u8]| {
        let (flags, name) = (flags | MAP_ANONYMOUS | MAP_PRIVATE, name.to_vec());
        move |_| Kind::Anonymous {
            flags,
            name: name.clone(),
        }
    };
    let file = |description, flags| {
        move |number| Kind::File {
            description,
            page: first + number,
            flags,
        }
    };
    match chance.below(9) {
        0 => world.map(index, span, 3, anonymous(MAP_NORESERVE, b"")),
        1 => world.map(index, span, 3, anonymous(MAP_GROWSDOWN, b"")),
        2 => world.map(index, span, 3, anonymous(0, b"arena")),
        3 => world.map(index, span, 5, file(0, MAP_PRIVATE)),
        4 => world.map(index, span, 3, file(0, MAP_PRIVATE)),
        5 => world.map(index, span, 1, file(2, MAP_PRIVATE)),
        6 => world.map(index, span, 3, file(2, MAP_SHARED)),
        _ => world.map(index, span, 3, anonymous(0, b"")),
    }
    if chance.below(2) == 0 {
        world.write(index, span, false);
    }
}

/// Moves or unmaps the code of a vDSO.
fn vdso(space: &mut Space, chance: &mut Chance) {
    let code = Kind::Vdso(VDSO_DATA_PAGES);
    let Some(at) = space
        .0
        .iter()
        .find(|(_, page)| page.kind == code)
        .map(|(at, _)| *at)
    else {
        return;
    };
    if chance.below(3) > 0 {
        let count = VDSO_PAGES - VDSO_DATA_PAGES;
        let to = VDSO + 0x1000 + chance.below(2) * 0x10;
        if at < to && space.0.range(to..to + count).next().is_none() {
            space.relocate(pages(at, count), to).expect("it is there");
        }
    } else {
        space
            .0
            .retain(|_, page| !matches!(page.kind, Kind::Vdso(_)));
    }
}

/// The calls that a restore of `world` makes for memory.
fn printed(world: &World, outside_from_bytes: u64) -> String {
    let reader = world.image();
    let saved = Saved::read(&reader).expect("right records");
    let setting = Setting {
        outside_from_bytes,
        ..Setting::default()
    };
    let Ok(plan) = plan(&reader, &saved, &setting) else {
        return "no plan".into();
    };
    let text = super::print(&plan, &saved, &reader).expect("it can be printed");
    let calls = [
        "script", "map(", "protect(", "advise(", "readv(", "clone3(", "VDSO", "fill",
    ];
    let lines = text
        .lines()
        .filter(|line| calls.iter().any(|call| line.contains(call)));
    lines.collect::<Vec<_>>().join("\n")
}

/// The shortest beginning of the history of `seed` that goes wrong, and how.
fn shortest(seed: u64, steps: u64, outside_from_bytes: u64) -> String {
    for steps in 0..=steps {
        let world = history(&mut Chance::with(seed), steps);
        if let Verdict::Wrong(why) = judge(&world, outside_from_bytes) {
            let tree = world.tasks.iter();
            let tree = tree.map(|task| (task.pid, task.parent, task.session, task.zombie));
            let tree = tree.collect::<Vec<_>>();
            let text = printed(&world, outside_from_bytes);
            return format!(
                "seed {seed}, {steps} steps: {why}; pid, parent, session: {tree:?}\n{text}"
            );
        }
    }
    unreachable!("it went wrong before")
}

#[test]
fn every_task_gets_its_own_address_space() {
    const HISTORIES: u64 = 300;
    let mut seeds = Chance::of("histories");
    let mut planned = 0;
    for round in 0..HISTORIES {
        // The same ones each time, and others.
        let seed = if round % 2 == 0 {
            round
        } else {
            seeds.number()
        };
        let steps = 10 + round % 70;
        let outside_from_bytes = [0, 5 * abi::PAGE_BYTES, 8 << 20][(round % 3) as usize];
        match judge(&history(&mut Chance::with(seed), steps), outside_from_bytes) {
            Verdict::Right => planned += 1,
            Verdict::Refused => {}
            Verdict::Wrong(_) => panic!("{}", shortest(seed, steps, outside_from_bytes)),
        }
    }
    assert!(
        planned > HISTORIES / 2,
        "{planned} of {HISTORIES} could be planned"
    );
}

/// What a task does with everything that it started with.
const DEEDS: [fn(&mut World, usize); 6] = [
    |_, _| {},
    |world, index| world.tasks[index].space = Space::default(),
    |world, index| {
        world.tasks[index].space.unmap(pages(ARENA, ARENA_PAGES));
        let anonymous = Kind::Anonymous {
            flags: MAP_ANONYMOUS | MAP_PRIVATE,
            name: Vec::new(),
        };
        world.map(index, pages(ARENA, 12), 3, |_| anonymous.clone());
    },
    |world, index| world.write(index, pages(ARENA, ARENA_PAGES), index % 2 == 0),
    |world, index| {
        // Not all of it is mapped in each task.
        for page in ARENA..ARENA + ARENA_PAGES {
            let _ = world.tasks[index].space.protect(pages(page, 1), 1);
            let advice = [MADV_DONTFORK, MADV_WIPEONFORK, MADV_GUARD_INSTALL];
            let advice = advice[(page % 3) as usize];
            let _ = world.tasks[index].space.advise(pages(page, 1), advice);
        }
    },
    |world, index| {
        let space = &mut world.tasks[index].space;
        space
            .0
            .retain(|_, page| !matches!(page.kind, Kind::Vdso(_)));
        space.map_vdso(VDSO + 0x200).expect("free");
    },
];

#[test]
fn three_generations_keep_unmap_and_map_anew() {
    let combinations = DEEDS.len().pow(4);
    for number in 0..combinations {
        let deed = |place: u32| DEEDS[number / DEEDS.len().pow(place) % DEEDS.len()];
        let mut world = World::new();
        world.tasks[0].space.map_vdso(VDSO).expect("free");
        let kinds: [Kind; 4] = [
            Kind::Anonymous {
                flags: MAP_ANONYMOUS | MAP_PRIVATE,
                name: Vec::new(),
            },
            Kind::Anonymous {
                flags: MAP_ANONYMOUS | MAP_PRIVATE | MAP_GROWSDOWN,
                name: Vec::new(),
            },
            Kind::File {
                description: 0,
                page: 0,
                flags: MAP_PRIVATE,
            },
            Kind::File {
                description: 2,
                page: 0,
                flags: MAP_SHARED,
            },
        ];
        for (at, kind) in (0..).zip(kinds) {
            let kind = |number| match kind.clone() {
                Kind::File {
                    description, flags, ..
                } => Kind::File {
                    description,
                    page: number,
                    flags,
                },
                other => other,
            };
            world.map(0, pages(ARENA + 8 * at, 4), 3, kind);
            world.write(0, pages(ARENA + 8 * at, 2), false);
        }
        // A child and two grandchildren, and a child that comes last.
        let child = world.fork(0, false);
        deed(0)(&mut world, child);
        for place in 1..3 {
            let grandchild = world.fork(child, false);
            deed(place)(&mut world, grandchild);
        }
        let last = world.fork(0, false);
        deed(3)(&mut world, last);
        match judge(&world, 8 << 20) {
            Verdict::Right => {}
            Verdict::Refused => panic!("combination {number} is refused"),
            Verdict::Wrong(why) => panic!("combination {number}, root {ROOT}: {why}"),
        }
    }
}
