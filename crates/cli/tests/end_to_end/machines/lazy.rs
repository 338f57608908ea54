//! Machines that run before their memory has come.

use super::*;

/// The words of a lazy restore of the base's image, or a copy of it, and of its command line.
fn options(image: &Path, name: &str) -> Vec<String> {
    let words = ["-o", "/dev/null", "--lazy", "--name", name, "--"].map(str::to_owned);
    let mut options = vec!["-D".to_owned(), image.to_str().expect("text").to_owned()];
    options.extend(words);
    options.extend(super::words(&base().folder.join("archive")));
    let serial = format!("unix:{name}.serial,server=on,wait=off");
    options.extend(["-serial".to_owned(), serial]);
    options
}

fn restored_lazily(folder: &Path, image: &Path, name: &str) -> Machines {
    let words = options(image, name);
    let words = words.iter().map(String::as_str).collect::<Vec<_>>();
    Machines::restored(folder, &words)
}

/// Who brings the memory of a machine in, and who watches that; none when all has come.
fn servers_of(machine: i32) -> Vec<i32> {
    let pids = fs::read_dir("/proc").expect("it is there").flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let is_such = |pid: &i32| {
        let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
        ["stillframe-lazy", "stillframe-undo"].contains(&name.trim_end())
            && has_pidfd_of(*pid, machine)
    };
    pids.filter(is_such).collect()
}

fn has_pidfd_of(pid: i32, machine: i32) -> bool {
    let files = fs::read_dir(format!("/proc/{pid}/fdinfo"));
    let files = files.into_iter().flatten().flatten();
    let mut texts = files.filter_map(|file| fs::read_to_string(file.path()).ok());
    let line = format!("Pid:\t{machine}\n");
    texts.any(|text| text.contains(&line))
}

#[test]
fn a_lazy_guest_has_its_memory_in_the_end() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let base = base();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    let machine = restored_lazily(folder, &base.folder.join("image"), "lazy");
    let mut line = Line::to(&folder.join("lazy.serial"));
    assert!(line.number("count") >= base.count);
    assert_eq!(line.ask("recall"), "of the base");
    assert_eq!(line.ask(&format!("check {FILE}")), "right");
    assert_eq!(line.ask("fill own 5 10"), "filled");
    wait_until("all memory", SOON, || servers_of(machine.pid(0)).is_empty());
    // Then it is a machine like others.
    run(
        folder,
        &["vm", "save", "--qmp", machine.qmp(0), "-D", "again", "-R"],
    );
    drop((machine, line));
    let (_machine, mut line) = restored(folder, &folder.join("again"), "again");
    for file in [FILE, "own 5 10"] {
        assert_eq!(line.ask(&format!("check {file}")), "right");
    }
}

#[test]
fn memory_that_is_not_whole_is_not_saved() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    let machine = restored_lazily(folder, &base().folder.join("image"), "unfinished");
    let files = fs::read_dir(format!("/proc/{}/fd", machine.pid(0))).expect("it runs");
    let memory = files.flatten().map(|entry| entry.path()).find(|path| {
        let target = fs::read_link(path).unwrap_or_default();
        target.to_string_lossy().contains("stillframe-guest")
    });
    let memory = File::open(memory.expect("it has its memory")).expect("it can be opened");
    // Whoever brings it in has it locked to the end.
    memory.lock().expect("it is done");
    wait_until("all memory", SOON, || servers_of(machine.pid(0)).is_empty());
    let words = ["vm", "save", "--qmp", machine.qmp(0), "-D", "whole", "-R"];
    let told = fail(folder, &words, 3);
    assert!(told.contains("still being brought in"), "{told}");
    drop(memory);
    run(folder, &words);
}

#[test]
fn a_machine_whose_memory_does_not_come_ends() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    for at in 0..8 {
        let name = format!("orphan-{at}");
        let machine = restored_lazily(folder, &base().folder.join("image"), &name);
        std::thread::sleep(Duration::from_millis(10) * at);
        // The watchdog shows that it is one once it has read who the machine is, which the server
        // does not wait for.
        let servers = wait_for("both servers, or none", SOON, || {
            let servers = servers_of(machine.pid(0));
            (servers.len() != 1).then_some(servers)
        });
        // One of them, and the other one is left.
        if let Some(server) = servers.get(at as usize % 2) {
            kill(*server);
        }
        let pid = machine.pid(0).cast_unsigned();
        let socket = folder.join(format!("{name}.qmp"));
        wait_until("an end, or all memory", SOON, || {
            !testkit::tree::is_alive(pid) || servers_of(machine.pid(0)).is_empty()
        });
        if !testkit::tree::is_alive(pid) || !is_running(&socket) {
            continue;
        }
        let mut line = Line::to(&folder.join(format!("{name}.serial")));
        assert_eq!(line.ask(&format!("check {FILE}")), "right");
    }

    // Pages that are not what they were.
    let copy = damaged_copy(folder, 10_000_000);
    let words = options(&copy, "damaged-lazily");
    let words = words.iter().map(String::as_str).collect::<Vec<_>>();
    let words = [&["vm", "restore"], &words[..]].concat();
    // It may end before the command does, which fails then.
    let _ = stillframe(folder, &words).output().expect("it starts");
    wait_until("its end", SOON, || pids_of("damaged-lazily").is_empty());
    let log = fs::read_to_string(folder.join("damaged-lazily.log")).expect("it is there");
    assert!(log.contains("memory does not come"), "{log}");
}
