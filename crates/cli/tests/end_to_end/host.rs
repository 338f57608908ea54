//! What is kept of the host (/run/stillframe), and that ordinary work has no need of it.
use std::fs;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::Command;

use rustix::fs::inotify::{self, CreateFlags, WatchFlags};
use rustix::io::Errno;
use testkit::program::Program;
use testkit::{needs_program, needs_root, skip};

use crate::stillframe;

/// Runs `work` in a mount namespace where the folder `run` is /run.
fn with_run(run: &Path, work: &str, images: &Path) {
    const NO_NAMESPACE: i32 = 99;
    let stillframe = stillframe().command(&[]);
    let script = format!("mount --bind \"$1\" /run || exit {NO_NAMESPACE}\n{work}");
    let output = Command::new("unshare")
        .args(["--mount", "sh", "-c", &script, "sh"])
        .arg(run)
        .arg(stillframe.get_program())
        .arg(images)
        .current_dir(run.parent().expect("it is in a folder"))
        .output();
    let output = output.expect("unshare is there");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}: {told}", output.status);
}

const DUMP_AND_RESTORE: &str = "\
    sleep 1000 </dev/null >/dev/null 2>&1 &\n\
    pid=$!\n\
    \"$2\" dump --shell-job -t $pid -D \"$3\" || exit 1\n\
    wait $pid\n\
    \"$2\" restore --shell-job -d -D \"$3\" || exit 2\n\
    kill -9 $pid";

const CHECK: &str = "\"$2\" check >/dev/null";

/// Notices whatever is done to a folder and what is in it.
fn watch(folder: &Path) -> OwnedFd {
    let watcher = inotify::init(CreateFlags::NONBLOCK | CreateFlags::CLOEXEC).expect("inotify");
    inotify::add_watch(&watcher, folder, WatchFlags::ALL_EVENTS).expect("it is there");
    watcher
}

/// What was noticed, by name.
fn noticed(watcher: &OwnedFd) -> Vec<String> {
    let mut buffer = [MaybeUninit::uninit(); 4096];
    let mut reader = inotify::Reader::new(watcher, &mut buffer);
    let mut all = Vec::new();
    loop {
        match reader.next() {
            Ok(event) => all.push(format!("{:?} {:?}", event.events(), event.file_name())),
            Err(Errno::AGAIN) => return all,
            Err(error) => panic!("inotify: {error}"),
        }
    }
}

#[test]
fn a_dump_and_a_restore_ask_nothing_of_the_host() {
    needs_root!();
    needs_program!("unshare");
    if stillframe().is_peer() {
        skip!("the peer keeps its own");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let (run, images) = (folder.path().join("run"), folder.path().join("images"));
    let kept = run.join("stillframe");
    fs::create_dir_all(&kept).expect("a folder");
    fs::write(kept.join("host"), "nothing that is true").expect("written");
    let watcher = watch(&kept);
    with_run(&run, DUMP_AND_RESTORE, &images);
    // A dump keeps where the kernel has what it looks for.
    let of_host = |noticed: &String| noticed.contains("\"host\"");
    let seen = noticed(&watcher);
    assert_eq!(
        seen.iter().filter(|noticed| of_host(noticed)).count(),
        0,
        "{seen:?}"
    );
    // And this is how it would be noticed.
    with_run(&run, CHECK, &images);
    assert!(noticed(&watcher).iter().any(of_host));
}

#[test]
fn what_no_one_asks_for_is_not_kept() {
    needs_root!();
    needs_program!("unshare");
    if stillframe().is_peer() {
        skip!("the peer keeps its own");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let (run, images) = (folder.path().join("run"), folder.path().join("images"));
    fs::create_dir(&run).expect("a folder");
    with_run(&run, DUMP_AND_RESTORE, &images);
    assert!(!run.join("stillframe/host").exists());
    with_run(&run, CHECK, &images);
    assert!(run.join("stillframe/host").is_file());
}

#[test]
fn what_an_image_needs_is_told_before_the_restore() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        skip!("an option of ours");
    }
    let program = Program::new("sleep").arg("1000").spawn();
    stillframe.dump(program.pid(), &["-R"]).must();
    let check = || {
        let mut command = stillframe.command(&["check", "--image"]);
        let output = command.arg(stillframe.images()).output();
        let output = output.expect("it can be started");
        let told = String::from_utf8_lossy(&output.stdout).into_owned();
        (output.status.code(), told)
    };
    let (status, told) = check();
    let taken = format!("(pid {} is taken by another process)", program.pid());
    assert_eq!(status, Some(1), "{told}");
    let has = |name: &str, text: &str| {
        let mut lines = told.lines().filter(|line| line.starts_with(name));
        lines.any(|line| line.contains(text))
    };
    assert!(has("pids", &taken) && has("pids", " NO "), "{told}");
    assert!(
        has("processor", " yes ") && has("attributes", " yes "),
        "{told}"
    );
    program.kill();
    let (status, told) = check();
    assert_eq!(status, Some(0), "{told}");
    assert!(told.ends_with("It can be restored.\n"), "{told}");
    // As criu(8) abbreviates --images-dir elsewhere.
    let mut restore = stillframe.command(&["restore", "-d", "--image"]);
    let restored = restore.arg(stillframe.images()).output();
    assert!(restored.expect("it can be started").status.success());
    assert!(program.is_alive());
}

#[test]
fn what_a_processor_has_is_checked_and_does_not_take_the_place_of_a_tree() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        skip!("it puts files beside the image");
    }
    let program = Program::new("sleep").arg("1000").spawn();
    stillframe.dump(program.pid(), &["--cpu-cap=ins"]).must();
    let cpuinfo = |action: &str, folder: &std::path::Path, options: &[&str]| {
        let mut command = stillframe.command(&["cpuinfo", action]);
        let output = command.arg("-D").arg(folder).args(options).output();
        let output = output.expect("it can be started");
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), told)
    };
    let elsewhere = tempfile::tempdir().expect("a scratch folder");
    let (status, told) = cpuinfo("dump", elsewhere.path(), &[]);
    assert_eq!(status, Some(0), "{told}");
    for folder in [stillframe.images(), elsewhere.path()] {
        for options in [&[][..], &["--cpu-cap=ins"], &["--cpu-cap=all,^cpu"]] {
            let (status, told) = cpuinfo("check", folder, options);
            assert_eq!(status, Some(0), "{told}");
        }
    }
    let (status, told) = cpuinfo("dump", stillframe.images(), &[]);
    assert_eq!(status, Some(3), "{told}");
    assert!(told.contains("has image"), "{told}");
    stillframe.restore(&["--cpu-cap"]).must();
    assert!(program.is_alive());
    // Where the dump was not to note it, it cannot be asked for.
    stillframe.dump(program.pid(), &[]).must();
    let refused = stillframe.restore(&["--cpu-cap=ins"]).must_fail();
    refused.names(&["--cpu-cap=ins"]);
    stillframe.restore(&[]).must();
}
