//! What takes minutes: many cycles, many clones, much memory. By hand: `cargo xtask machines`.

use super::kinds::{Kind, Pair, needs};
use super::*;

#[test]
#[ignore = "takes minutes: cargo xtask machines"]
fn a_pair_goes_through_ten_cycles() {
    let emulator = Emulator::of_tests();
    needs!(emulator);
    let mut pair = Pair::boot(Kind::new(emulator, "q35"));
    let names = (0..10).map(|number| format!("cycle-{number}"));
    let names = names.collect::<Vec<_>>();
    for (number, name) in names.iter().enumerate() {
        // Every third is not over the one before.
        let over = number.checked_sub(1).filter(|_| number % 3 > 0);
        pair.cycle(name, over.map(|before| names[before].as_str()));
        pair.check();
    }
}

#[test]
#[ignore = "takes minutes: cargo xtask machines"]
fn a_guest_of_a_gib_goes_on() {
    let emulator = Emulator::of_tests();
    needs!(emulator);
    let mut pair = Pair::boot(Kind {
        mib: 1024,
        file: "file 5 400",
        ..Kind::new(emulator, "q35")
    });
    let told = pair.save(0, &["--live", "-R", "-D", "live"]);
    assert!(told["stored_pages"].as_u64() > Some(400 << 8), "{told}");
    pair.cycle("whole", None);
    pair.check();
}

#[test]
#[ignore = "takes minutes: cargo xtask machines"]
fn three_incremental_saves_are_restored_in_any_order() {
    needs!(Emulator::of_tests());
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    let (machine, mut line) = restored(folder, &base().folder.join("image"), "first");
    let socket = machine.qmp(0);
    let mut counts = Vec::new();
    for number in 0..3 {
        assert_eq!(line.ask(&format!("note of save {number}")), "noted");
        assert_eq!(line.ask(&format!("fill of-{number} {number} 6")), "filled");
        if number > 0 {
            let old = line.ask(&format!("remove of-{}", number - 1));
            assert_eq!(old, "removed");
        }
        counts.push(line.number("count"));
        let image = number.to_string();
        let over = format!("../{}", number - 1);
        let over = ["--prev-images-dir", &over];
        let words = ["vm", "save", "-R", "--qmp", socket, "-D", &image];
        let over = if number > 0 { &over[..] } else { &[] };
        run(folder, &[&words, over].concat());
    }
    drop((machine, line));
    let orders = [
        [0, 1, 2],
        [0, 2, 1],
        [1, 0, 2],
        [1, 2, 0],
        [2, 0, 1],
        [2, 1, 0],
    ];
    for (turn, order) in orders.into_iter().enumerate() {
        for number in order {
            // The one before may not have ended yet.
            let name = format!("saved-{number}-{turn}");
            let image = folder.join(number.to_string());
            let (_machine, mut line) = restored(folder, &image, &name);
            assert_eq!(line.ask("recall"), format!("of save {number}"));
            assert!(line.number("count") >= counts[number]);
            for file in 0..3 {
                let checked = line.ask(&format!("check of-{file} {file} 6"));
                assert_eq!(checked == "right", file == number, "{order:?}: {checked}");
            }
            assert_eq!(line.ask(&format!("check {FILE}")), "right");
        }
    }
}

#[test]
#[ignore = "takes minutes: cargo xtask machines"]
fn fifty_clones_run_at_once_and_apart() {
    const COUNT: usize = 50;
    needs!(Emulator::of_tests());
    let base = base();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    let image = base.folder.join("image");
    let image = image.to_str().expect("text");
    let mut line = words(&base.folder.join("archive"));
    let serial = "unix:{name}.serial,server=on,wait=off";
    line.extend(["-serial", serial].map(str::to_owned));
    let line = line.iter().map(String::as_str).collect::<Vec<_>>();
    let count = COUNT.to_string();
    let options = [
        "-D",
        image,
        "-o",
        "/dev/null",
        "-n",
        &count,
        "--name",
        "c-{n}",
        "--",
    ];
    let machines = Machines::restored(folder, &[&options[..], &line].concat());
    assert_eq!(
        template(folder, &base.id).map(|it| it.0),
        Some(COUNT as u64)
    );
    let line = |number: usize| Line::to(&folder.join(format!("c-{}.serial", number + 1)));
    let mut lines = (0..COUNT).map(line).collect::<Vec<_>>();
    for (number, line) in lines.iter_mut().enumerate() {
        assert_eq!(line.ask("recall"), "of the base");
        // So many emulated guests share few processors.
        if number % 10 == 0 {
            assert_eq!(line.ask(&format!("check {FILE}")), "right");
        }
        assert_eq!(line.ask(&format!("note {number}")), "noted");
        assert_eq!(line.ask(&format!("fill own {number} 1")), "filled");
    }
    // What each has to itself: QEMU's own, and what its guest has written.
    let own = (0..COUNT).map(|at| private_kib(machines.pid(at)));
    let own = own.sum::<u64>() / COUNT as u64;
    eprintln!("{} MiB of a clone's own", own >> 10);
    assert!(own < 64 << 10, "{own} KiB of a clone's own");
    // Every second one is thrown away.
    for at in (0..COUNT).step_by(2) {
        kill(machines.pid(at));
    }
    for (number, line) in lines.iter_mut().enumerate().skip(1).step_by(2) {
        assert_eq!(line.ask("recall"), number.to_string());
        assert_eq!(line.ask(&format!("check own {number} 1")), "right");
        let count = line.number("count");
        wait_until("it to count", SOON, || line.number("count") > count);
    }
    wait_until("half of the machines", SOON, || {
        template(folder, &base.id).is_some_and(|it| it.0 == COUNT as u64 / 2)
    });
}

/// The memory that a process has to itself.
fn private_kib(pid: i32) -> u64 {
    let rollup = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("it runs");
    let lines = rollup.lines().filter(|line| line.starts_with("Private_"));
    let numbers = lines.filter_map(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
    numbers.sum()
}

#[test]
#[ignore = "takes minutes: cargo xtask machines"]
fn an_older_machine_goes_on_under_a_newer_emulator_only() {
    needs!(Emulator::Installed);
    needs!(Emulator::Backports);
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    linux::pack(&folder.join("archive")).expect("packed");
    let line = |emulator: Emulator, version: &str| {
        let mut words = linux::words(emulator, Path::new("archive"), 128);
        let machine = format!("pc-q35-{version},memory-backend=mem");
        let memory = emulator.memory(128);
        words.extend(["-object", &memory, "-machine", &machine].map(str::to_owned));
        words
    };
    let [old, new] = [Emulator::Installed, Emulator::Backports];
    for (emulator, others, goes) in [(old, new, true), (new, old, false)] {
        let name = emulator.version();
        let guest = Linux::boot(folder, name, &line(emulator, "7.2"), &[]);
        let mut serial = Line::to(&guest.serial);
        assert_eq!(serial.ask("fill file 9 20"), "filled");
        drop(serial);
        let socket = guest.qmp.to_str().expect("text");
        run(folder, &["vm", "save", "--qmp", socket, "-D", name]);
        let words = line(others, "7.2");
        let words = words.iter().map(String::as_str).collect::<Vec<_>>();
        let options = ["-D", name, "-o", "/dev/null", "--name", "moved", "--"];
        let serial = ["-serial", "unix:moved.serial,server=on,wait=off"];
        let words = [&options[..], &words, &serial].concat();
        if goes {
            let _machine = Machines::restored(folder, &words);
            let mut line = Line::to(&folder.join("moved.serial"));
            assert_eq!(line.ask("check file 9 20"), "right");
            let count = line.number("count");
            wait_until("it to count", SOON, || line.number("count") > count);
        } else {
            let told = fail(folder, &[&["vm", "restore"], &words[..]].concat(), 3);
            assert!(told.contains("10.0") && told.contains("7.2"), "{told}");
        }
    }
}
