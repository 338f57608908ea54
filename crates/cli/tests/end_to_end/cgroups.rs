//! Tasks come back into their control groups, which are made where they are missing.
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use resources::cgroup::{Membership, Mounts};
use testkit::program::{Program, Spawned};
use testkit::wait::{SOON, try_wait_for, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::{refusing_script, stillframe};

/// A group of a test's own, which goes with it, and with those below.
struct Group {
    hierarchy: &'static str,
    path: String,
    folder: PathBuf,
}

impl Group {
    /// A new group with two below it, where that hierarchy is mounted and can be written.
    fn make(hierarchy: &'static str, test: &str) -> Option<Self> {
        let group = Self::named(hierarchy, test)?;
        group.remake().then_some(group)
    }

    /// A new group in the first of these hierarchies that allows it.
    fn make_in(hierarchies: &[&'static str], test: &str) -> Option<Self> {
        hierarchies.iter().find_map(|name| Self::make(name, test))
    }

    /// One that is not made yet.
    fn named(hierarchy: &'static str, test: &str) -> Option<Self> {
        let path = format!("/stillframe-{}-{test}", std::process::id());
        let folder = Mounts::read().ok()?.folder(hierarchy, path.as_bytes())?;
        Some(Self {
            hierarchy,
            path,
            folder,
        })
    }

    fn remake(&self) -> bool {
        let made = |name: &str| fs::create_dir_all(self.folder.join(name)).is_ok();
        ["one", "other"].into_iter().all(made)
    }

    fn remove(&self) {
        for name in ["one", "other", ""] {
            let folder = self.folder.join(name);
            // Who was in it may still be on the way out.
            try_wait_for(SOON, || match fs::remove_dir(&folder) {
                Err(error) if error.kind() == std::io::ErrorKind::ResourceBusy => None,
                _ => Some(()),
            });
        }
    }

    fn write(&self, file: &str, text: &str) -> bool {
        fs::write(self.folder.join(file), text).is_ok()
    }

    fn read(&self, file: &str) -> String {
        let text = fs::read_to_string(self.folder.join(file));
        text.unwrap_or_else(|error| panic!("{file}: {error}"))
    }

    fn add(&self, name: &str, pid: u32) {
        let file = format!("{name}/cgroup.procs");
        assert!(self.write(&file, &pid.to_string()), "{file} takes {pid}");
    }

    /// Where a thread is in the hierarchy, seen from the group.
    fn place(&self, tid: u32) -> String {
        let text = fs::read(format!("/proc/{tid}/cgroup")).expect("it lives");
        let membership = Membership::parse(&text);
        let path = membership.path(self.hierarchy).expect("it is somewhere");
        let path = String::from_utf8_lossy(path);
        path.replace(&self.path, "GROUP")
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        self.remove();
    }
}

/// A shell and its child.
fn two() -> Spawned {
    let program = Program::new("sh").args(["-c", "sleep 1000 & wait"]).spawn();
    wait_until("the child", SOON, || program.tree().len() == 2);
    program
}

#[test]
fn tasks_come_back_into_their_groups() {
    needs_root!();
    needs_program!("sh");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer has another idea of it");
    }
    let hierarchies = [
        ("", "cgroup.max.depth", "17\n"),
        ("pids", "pids.max", "1000\n"),
        ("memory", "memory.limit_in_bytes", "536870912\n"),
        ("cpu", "cpu.shares", "512\n"),
        ("cpuset", "cpuset.memory_migrate", "1\n"),
        ("freezer", "notify_on_release", "0\n"),
    ];
    let mut tried = 0;
    for (hierarchy, property, value) in hierarchies {
        let Some(group) = Group::make(hierarchy, "back") else {
            continue;
        };
        if hierarchy == "cpuset" {
            for file in ["cpuset.cpus", "cpuset.mems"] {
                let above = fs::read_to_string(group.folder.with_file_name(file));
                let above = above.expect("it is there");
                let set = |name: &str| group.write(&format!("{name}{file}"), &above);
                assert!(["", "one/", "other/"].into_iter().all(set));
            }
        }
        let property = format!("one/{property}");
        assert!(group.write(&property, value), "{property}");
        let program = two();
        let pids = program.tree();
        group.add("one", pids[0]);
        group.add("other", pids[1]);
        let placed = || {
            let places = pids.iter().map(|pid| group.place(*pid));
            assert_eq!(places.collect::<Vec<_>>(), ["GROUP/one", "GROUP/other"]);
        };
        stillframe.clear();
        stillframe.dump(program.pid(), &[]).must();
        let plan = stillframe.restore(&["--plan"]).must();
        let join = format!("# join {hierarchy}:{}/one", group.path);
        assert!(plan.output.contains(&join), "{}", plan.told());
        // All that is missing is made, with its limits.
        group.remove();
        let outcome = stillframe.restore(&["--manage-cgroups=none"]).must_fail();
        outcome.names(&[&group.path, "is missing"]);
        stillframe.restore(&[]).must();
        placed();
        assert_eq!(group.read(&property), value);
        // What is there stays as it is, or gets its limits, or must not be there.
        for (mode, kept) in [
            ("soft", true),
            ("none", true),
            ("full", false),
            ("props", false),
        ] {
            stillframe.clear();
            stillframe.dump(program.pid(), &[]).must();
            group.remove();
            assert!(group.remake());
            if hierarchy == "cpuset" {
                // A new group of it takes nobody.
                group.remove();
                stillframe.restore(&["--manage-cgroups"]).must();
                continue;
            }
            let plain = group.read(&property);
            let mode = format!("--manage-cgroups={mode}");
            stillframe.restore(&[&mode]).must();
            placed();
            let want = if kept { plain.as_str() } else { value };
            assert_eq!(group.read(&property), want, "{mode}");
            assert!(group.write(&property, value), "{property}");
        }
        stillframe.clear();
        stillframe.dump(program.pid(), &[]).must();
        let outcome = stillframe.restore(&["--manage-cgroups=strict"]).must_fail();
        outcome.names(&["is there already"]);
        tried += 1;
        // In the restorer's own, where that is asked for.
        stillframe.restore(&["--manage-cgroups=ignore"]).must();
        assert!(!group.place(pids[0]).contains("GROUP"));
    }
    if tried == 0 {
        testkit::skip!("no control groups can be made here");
    }
}

#[test]
fn groups_that_are_made_belong_to_whom_they_did() {
    needs_root!();
    needs_program!("sh");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer has another idea of it");
    }
    let mut tried = 0;
    for hierarchy in ["", "pids", "memory", "freezer"] {
        let Some(group) = Group::make(hierarchy, "owned") else {
            continue;
        };
        let folder = group.folder.join("one");
        let procs = folder.join("cgroup.procs");
        let access = |path: &Path| {
            let found = fs::metadata(path).expect("it is there");
            (found.uid(), found.gid(), found.mode() & 0o7777)
        };
        for (path, mode) in [(&folder, 0o775), (&procs, 0o664)] {
            chown(path, Some(1234), Some(4321)).expect("root may");
            fs::set_permissions(path, fs::Permissions::from_mode(mode)).expect("root may");
        }
        let program = two();
        for pid in program.tree() {
            group.add("one", pid);
        }
        stillframe.dump(program.pid(), &[]).must();
        group.remove();
        stillframe.restore(&[]).must();
        assert_eq!(access(&folder), (1234, 4321, 0o775), "{hierarchy}");
        assert_eq!(access(&procs), (1234, 4321, 0o664), "{hierarchy}");
        let plain = access(&group.folder);
        assert_eq!((plain.0, plain.1), (0, 0), "{hierarchy}");
        stillframe.clear();
        tried += 1;
    }
    if tried == 0 {
        testkit::skip!("no control groups can be made here");
    }
}

#[test]
fn all_below_a_named_group_is_saved_and_moves_with_it() {
    needs_root!();
    needs_program!("sh");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer has another idea of it");
    }
    let Some(group) = Group::make_in(&["pids", "memory", "freezer", ""], "root") else {
        testkit::skip!("no control groups can be made here");
    };
    let hierarchy = group.hierarchy;
    let controller = if hierarchy.is_empty() {
        String::new()
    } else {
        format!("{hierarchy}:")
    };
    let owner = |folder: &Path| fs::metadata(folder).map(|found| found.uid()).ok();
    // Nobody of the tree is in these two: only what was named has them saved.
    for folder in [&group.folder, &group.folder.join("other")] {
        chown(folder, Some(1234), None).expect("root may");
    }
    let program = two();
    let pids = program.tree();
    pids.iter().for_each(|pid| group.add("one", *pid));
    let wrong = format!("--cgroup-root={controller}{}/other", group.path);
    if !hierarchy.is_empty() {
        let outcome = stillframe.dump(pids[0], &[&wrong]).must_fail();
        outcome.names(&["is not below --cgroup-root", &group.path]);
    }
    let root = format!("--cgroup-root={controller}{}", group.path);
    stillframe.dump(pids[0], &[&root]).must();
    group.remove();
    stillframe.restore(&[]).must();
    assert_eq!(group.place(pids[0]), "GROUP/one");
    assert_eq!(owner(&group.folder), Some(1234));
    assert_eq!(owner(&group.folder.join("other")), Some(1234));
    // All of it takes another place, not only what the root task is in.
    stillframe.clear();
    stillframe.dump(pids[0], &[&root]).must();
    group.remove();
    let moved = Group::named(hierarchy, "moved").expect("the hierarchy is there");
    let root = format!("--cgroup-root={controller}{}", moved.path);
    stillframe.restore(&[&root]).must();
    assert_eq!(moved.place(pids[0]), "GROUP/one");
    assert_eq!(owner(&moved.folder.join("other")), Some(1234));
    assert!(!group.folder.exists());
    tree::kill(&pids);
    tree::wait_gone(&pids);
}

#[test]
fn a_yard_takes_the_place_of_what_is_mounted() {
    needs_root!();
    needs_program!("sh");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer has another idea of it");
    }
    let Some(group) = Group::make_in(&["pids", "memory", "freezer", ""], "yard") else {
        testkit::skip!("no control groups can be made here");
    };
    let hierarchy = group.hierarchy;
    let folder = tempfile::tempdir().expect("a scratch folder");
    let yard = folder.path().join("yard");
    let name = if hierarchy.is_empty() {
        "unified"
    } else {
        hierarchy
    };
    let place = yard.join(name);
    fs::create_dir_all(&place).expect("it is the test's");
    let option = format!("--cgroup-yard={}", yard.display());
    let program = two();
    let pids = program.tree();
    pids.iter().for_each(|pid| group.add("one", *pid));
    // A folder that is no hierarchy is named.
    let outcome = stillframe.dump(pids[0], &[&option]).must_fail();
    outcome.names(&[name, "is no hierarchy of control groups"]);
    let Some(_mounted) = Mounted::bind(&group.folder.with_file_name(""), &place) else {
        testkit::skip!("nothing can be mounted");
    };
    stillframe.dump(pids[0], &[&option]).must();
    group.remove();
    stillframe.restore(&[&option]).must();
    assert_eq!(group.place(pids[0]), "GROUP/one");
    // A relative one is in the work directory, as with criu(8).
    stillframe.clear();
    let work = folder.path().to_str().expect("a plain path");
    let relative = ["-W", work, "--cgroup-yard=yard"];
    stillframe.dump(pids[0], &relative).must();
    group.remove();
    stillframe.restore(&relative).must();
    assert_eq!(group.place(pids[0]), "GROUP/one");
    // One that lacks the hierarchy is like a host that does.
    stillframe.clear();
    stillframe.dump(pids[0], &[&option]).must();
    let empty = folder.path().join("empty");
    fs::create_dir(&empty).expect("it is the test's");
    let option = format!("--cgroup-yard={}", empty.display());
    let outcome = stillframe.restore(&[&option]).must_fail();
    outcome.names(&["are not mounted here"]);
    stillframe.restore(&[]).must();
}

/// A folder at a second place, until it is dropped.
struct Mounted(PathBuf);

impl Mounted {
    fn bind(from: &Path, to: &Path) -> Option<Self> {
        let status = Command::new("mount")
            .arg("--bind")
            .args([from, to])
            .status();
        status
            .is_ok_and(|status| status.success())
            .then(|| Self(to.to_owned()))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Nothing can be done about a mount that stays.
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[test]
fn a_restore_that_fails_leaves_no_groups() {
    needs_root!();
    needs_program!("sh");
    let stillframe = stillframe();
    let Some(group) = Group::make_in(&["", "pids", "memory"], "fails") else {
        testkit::skip!("no control groups can be made here");
    };
    let program = two();
    let pids = program.tree();
    group.add("one", pids[0]);
    stillframe.dump(program.pid(), &[]).must();
    group.remove();
    let script = refusing_script(stillframe.images(), "pre-resume");
    stillframe
        .restore(&["--action-script", &script])
        .must_fail();
    assert!(!group.folder.exists(), "it was made for the tree");
    tree::wait_gone(&pids);
    stillframe.restore(&[]).must();
}

#[test]
fn another_root_takes_the_place_of_the_roots_group() {
    needs_root!();
    needs_program!("sh");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer has another idea of it");
    }
    let Some(group) = Group::make_in(&["", "pids", "memory"], "root") else {
        testkit::skip!("no control groups can be made here");
    };
    let program = two();
    group.add("one", program.pid());
    group.add("one", program.tree()[1]);
    stillframe.dump(program.pid(), &[]).must();
    let root = format!("{}/other", group.path);
    stillframe.restore(&["--cgroup-root", &root]).must();
    for pid in program.tree() {
        assert_eq!(group.place(pid), "GROUP/other");
    }
}

/// A thread beside the main one, whose number it tells.
const THREADS: &str = r#"
import os, signal, sys, threading
def run():
    os.mkdir(sys.argv[1] + "/" + str(threading.get_native_id()))
    while True:
        signal.pause()
thread = threading.Thread(target=run)
thread.start()
while True:
    signal.pause()
"#;

#[test]
fn threads_come_back_into_groups_of_their_own() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    let Some(group) = Group::make("pids", "threads") else {
        testkit::skip!("no groups of single threads can be made here");
    };
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", THREADS])
        .arg(folder.path())
        .spawn();
    let pid = program.pid();
    wait_until("the thread", SOON, || tree::threads(pid).len() == 2);
    let other = tree::threads(pid)[1];
    program.wait_file(&folder.path().join(other.to_string()));
    group.add("one", pid);
    assert!(group.write("other/tasks", &other.to_string()));
    stillframe.cycle(2, &program, &[]);
    assert_eq!(group.place(pid), "GROUP/one");
    assert_eq!(group.place(other), "GROUP/other");
}

#[test]
fn tasks_of_a_frozen_group_are_named_at_once() {
    needs_root!();
    needs_program!("sh");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer thaws them");
    }
    for (hierarchy, file, frozen, thawed) in [
        ("", "one/cgroup.freeze", "1", "0"),
        ("freezer", "one/freezer.state", "FROZEN", "THAWED"),
    ] {
        let Some(group) = Group::make(hierarchy, "frozen") else {
            continue;
        };
        let program = two();
        group.add("one", program.pid());
        assert!(group.write(file, frozen));
        for command in [
            stillframe.dump(program.pid(), &[]),
            stillframe.dump(program.pid(), &["--live"]),
            stillframe.dump(program.pid(), &["--manage-cgroups=ignore"]),
        ] {
            let outcome = command.must_fail().names(&[&group.path, "frozen"]);
            assert_eq!(outcome.status.code(), Some(3), "{}", outcome.told());
            assert!(
                outcome.elapsed < Duration::from_secs(8),
                "{}",
                outcome.told()
            );
        }
        assert!(group.write(file, thawed));
        stillframe.dump(program.pid(), &[]).must();
        // A group that is frozen meanwhile would stop the restore.
        assert!(group.write(file, frozen));
        let outcome = stillframe.restore(&[]).must_fail();
        outcome.names(&[&group.path, "is frozen"]);
        assert!(group.write(file, thawed));
        stillframe.restore(&[]).must();
        assert_eq!(group.place(program.pid()), "GROUP/one");
    }
}

/// Has directories and files of its control group open, watches them, and tells what they are.
const WITHIN: &str = r#"
import ctypes, os, sys
folder, group = sys.argv[1:]
with open(group + "/cgroup.procs", "w") as procs: procs.write(str(os.getpid()))
C = ctypes.CDLL(None)
os.mkdir(group + "/deep")
os.chdir(group + "/deep")
files = [os.open(path, os.O_RDONLY) for path in (group, group + "/deep", group + "/cgroup.procs")]
watch = C.inotify_init1(os.O_NONBLOCK)
assert watch >= 0 and C.inotify_add_watch(watch, group.encode(), 0x100) == 1
os.mkfifo(folder + "/asked")
os.mkfifo(folder + "/answer")
os.mkdir(folder + "/ready")
while True:
    with open(folder + "/asked") as asked: word = asked.read()
    with open(folder + "/answer", "w") as answer:
        os.lseek(files[2], 0, 0)
        procs = os.read(files[2], 999).decode().split()
        names = [os.readlink(f"/proc/self/fd/{file}") for file in files]
        try: events = len(os.read(watch, 999)) > 0
        except BlockingIOError: events = False
        answer.write(f"{names} {os.getcwd()} {str(os.getpid()) in procs} {events}")
"#;

#[test]
fn open_directories_and_files_of_a_group_that_is_gone_come_back() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer has another idea of it");
    }
    let mut tried = 0;
    for hierarchy in ["", "pids", "memory"] {
        let Some(group) = Group::make(hierarchy, "open") else {
            continue;
        };
        tried += 1;
        let folder = tempfile::tempdir().expect("a scratch folder");
        let own = group.folder.join("one");
        let program = Program::new("/usr/bin/python3")
            .args(["-c", WITHIN])
            .arg(folder.path())
            .arg(&own)
            .spawn();
        program.wait_file(&folder.path().join("ready"));
        let ask = || {
            fs::write(folder.path().join("asked"), "x").expect("it reads");
            fs::read_to_string(folder.path().join("answer")).expect("it answers")
        };
        let before = ask();
        assert!(before.ends_with("True False"), "{before}");
        stillframe.clear();
        stillframe.dump(program.pid(), &[]).must();
        tree::reap_orphans();
        try_wait_for(SOON, || fs::remove_dir(own.join("deep")).ok());
        group.remove();
        assert!(!own.exists(), "{hierarchy:?}");
        stillframe.restore(&[]).must();
        assert_eq!(ask(), before, "{hierarchy:?}");
        // Its watch is one of the new directory.
        fs::create_dir(own.join("new")).expect("a group");
        assert!(ask().ends_with("True True"), "{hierarchy:?}");
        let _ = fs::remove_dir(own.join("new"));
        drop(program);
        try_wait_for(SOON, || fs::remove_dir(own.join("deep")).ok());
    }
    if tried == 0 {
        testkit::skip!("no hierarchy of control groups can be written here");
    }
}
