//! Dumps and restores of a real program: what the command does around the engine.
#![allow(clippy::unwrap_used, reason = "this is a test, helpers included")]

use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use testkit::program::{Program, Spawned};
use testkit::stillframe::Stillframe;
use testkit::{tree, wait};

/// Returns the program under test with a folder for images that is its work directory, too.
fn stillframe() -> Stillframe {
    let stillframe = Stillframe::new(env!("CARGO_BIN_EXE_stillframe"));
    std::fs::create_dir_all(stillframe.images()).unwrap();
    stillframe
}

/// Starts a program that waits for somebody to write into a FIFO, for ever.
fn waiter(folder: &Path) -> Spawned {
    let fifo = folder.join("fifo");
    let made = Command::new("mkfifo").arg(&fifo).status();
    assert!(made.unwrap().success());
    let text = "exec cat <> \"$0\"";
    let waiter = Program::new("sh").args(["-c", text]).arg(fifo).spawn();
    waiter.wait_ready("its read", || {
        let name = std::fs::read_to_string(format!("/proc/{}/comm", waiter.pid()));
        name.is_ok_and(|name| name == "cat\n") && tree::is_waiting(waiter.pid())
    });
    waiter
}

/// Writes a script that notes what it is told and fails at `stage`.
fn script(dir: &Path, stage: &str) -> PathBuf {
    let path = dir.join("script");
    let text = format!(
        "#!/bin/sh\n\
         echo $CRTOOLS_SCRIPT_ACTION ${{CRTOOLS_INIT_PID-none}} $CRTOOLS_IMAGE_DIR >> noted\n\
         [ $CRTOOLS_SCRIPT_ACTION != {stage} ]\n"
    );
    std::fs::write(&path, text).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// The names of the image's files.
fn images(stillframe: &Stillframe) -> Vec<String> {
    let entries = std::fs::read_dir(stillframe.images()).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names.filter(|name| name.ends_with(".img")).collect()
}

fn noted(stillframe: &Stillframe) -> String {
    std::fs::read_to_string(stillframe.images().join("noted")).unwrap_or_default()
}

#[test]
fn scripts_are_called_at_every_stage() {
    testkit::needs_root!();
    let (stillframe, folder) = (stillframe(), tempfile::tempdir().unwrap());
    let waiter = waiter(folder.path());
    let script = script(folder.path(), "never");
    let options = ["--action-script", script.to_str().unwrap()];
    stillframe.dump(waiter.pid(), &options).must();
    stillframe.restore(&options).must();
    let (pid, place) = (waiter.pid(), stillframe.images().display().to_string());
    let expected = [
        format!("pre-dump {pid} {place}\n"),
        format!("post-freeze {pid} {place}\n"),
        format!("post-dump {pid} {place}\n"),
        format!("pre-restore none {place}\n"),
        format!("post-restore {pid} {place}\n"),
        format!("pre-resume {pid} {place}\n"),
        format!("post-resume {pid} {place}\n"),
    ];
    assert_eq!(noted(&stillframe), expected.concat());
    assert!(waiter.is_alive());
}

#[test]
fn a_failing_script_leaves_the_world_as_it_was() {
    testkit::needs_root!();
    let (stillframe, folder) = (stillframe(), tempfile::tempdir().unwrap());
    let waiter = waiter(folder.path());
    for stage in ["pre-dump", "post-dump"] {
        let script = script(folder.path(), stage);
        let options = ["--action-script", script.to_str().unwrap()];
        let outcome = stillframe
            .dump_command(waiter.pid(), &options)
            .output()
            .unwrap();
        assert_eq!(outcome.status.code(), Some(1), "{stage}");
        let words = String::from_utf8(outcome.stderr).unwrap();
        assert!(
            words.contains(&format!("{stage}: exit status: 1")),
            "{words}"
        );
        wait::wait_until("the waiter to wait on", wait::SOON, || {
            tree::is_waiting(waiter.pid())
        });
        assert_eq!(images(&stillframe), Vec::<String>::new(), "{stage}");
    }
    stillframe.dump(waiter.pid(), &[]).must();
    assert!(!images(&stillframe).is_empty());
    for stage in ["pre-restore", "post-restore", "pre-resume"] {
        let script = script(folder.path(), stage);
        let options = [
            "--action-script",
            script.to_str().unwrap(),
            "--pidfile",
            "root.pid",
        ];
        let outcome = stillframe.restore_command(&options).output().unwrap();
        assert_eq!(outcome.status.code(), Some(1), "{stage}");
        assert!(!tree::is_alive(waiter.pid()), "{stage} left a task");
        assert!(
            !stillframe.images().join("root.pid").exists(),
            "{stage} left a pidfile"
        );
    }
    let script = script(folder.path(), "post-resume");
    let options = [
        "--action-script",
        script.to_str().unwrap(),
        "--pidfile",
        "root.pid",
    ];
    stillframe.restore(&options).must();
    assert!(waiter.is_alive());
    let pidfile = std::fs::read_to_string(stillframe.images().join("root.pid")).unwrap();
    assert_eq!(pidfile, waiter.pid().to_string());
}

#[test]
fn a_foreground_restore_waits_for_the_root_however_it_ends() {
    testkit::needs_root!();
    let (stillframe, folder) = (stillframe(), tempfile::tempdir().unwrap());
    let waiter = waiter(folder.path());
    stillframe.dump(waiter.pid(), &[]).must();
    let mut restore = stillframe.command(&["restore", "--json", "-D"]);
    restore.arg(stillframe.images()).stdout(Stdio::piped());
    let mut restore = restore.spawn().unwrap();
    // The result is told as soon as the tree runs.
    let mut told = String::new();
    let stdout = restore.stdout.take().unwrap();
    BufReader::new(stdout).read_line(&mut told).unwrap();
    assert!(told.starts_with("{\"restore\":"), "{told}");
    assert_eq!(tree::parent(waiter.pid()), Some(restore.id()));
    assert!(restore.try_wait().unwrap().is_none(), "the restore waits");
    assert!(tree::kill(&[waiter.pid()]));
    assert_eq!(restore.wait().unwrap().code(), Some(0));
    assert!(stillframe.images().join("restore.log").exists());
}

#[test]
fn exec_cmd_becomes_the_parent_in_the_work_directory() {
    testkit::needs_root!();
    let (stillframe, folder) = (stillframe(), tempfile::tempdir().unwrap());
    let waiter = waiter(folder.path());
    stillframe.dump(waiter.pid(), &[]).must();
    let text = "pwd; cat /proc/$1/stat | cut -d' ' -f4; echo $$; kill -9 $1; exit 5";
    let mut restore = stillframe.command(&["restore", "-D"]);
    restore.arg(stillframe.images());
    let pid = waiter.pid().to_string();
    restore.args(["--exec-cmd", "--", "sh", "-c", text, "sh", &pid]);
    let output = restore.output().unwrap();
    let words = String::from_utf8(output.stdout).unwrap();
    let lines: Vec<_> = words.lines().collect();
    assert_eq!(
        lines[0],
        stillframe.images().display().to_string(),
        "{words}"
    );
    assert_eq!(lines[1], lines[2], "the shell is the parent");
    assert_eq!(output.status.code(), Some(5), "the status is the command's");
}

#[test]
fn a_command_that_cannot_be_executed_leaves_the_tree_running() {
    testkit::needs_root!();
    let (stillframe, folder) = (stillframe(), tempfile::tempdir().unwrap());
    let waiter = waiter(folder.path());
    stillframe.dump(waiter.pid(), &[]).must();
    let mut restore = stillframe.command(&["restore", "-D"]);
    restore
        .arg(stillframe.images())
        .args(["--exec-cmd", "--", "/no/such/command"]);
    let output = restore.output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        String::from_utf8(output.stderr)
            .unwrap()
            .contains("the tree runs")
    );
    assert!(waiter.is_alive());
}

#[test]
fn results_are_told_to_people_and_machines() {
    testkit::needs_root!();
    let (stillframe, folder) = (stillframe(), tempfile::tempdir().unwrap());
    let waiter = waiter(folder.path());
    let run = |mut command: Command| {
        let output = command.output().unwrap();
        assert!(
            output.status.success(),
            "{}",
            String::from_utf8_lossy(&output.stderr)
        );
        String::from_utf8(output.stdout).unwrap()
    };
    let quiet = run(stillframe.dump_command(waiter.pid(), &["-R"]));
    assert_eq!(quiet, "", "success is silent");
    let text = run(stillframe.dump_command(waiter.pid(), &["-R", "--display-stats"]));
    assert!(
        text.contains(&format!("\n{:<20} {:>12}\n", "tasks", 1)),
        "{text}"
    );
    let text = run(stillframe.dump_command(waiter.pid(), &["--json"]));
    let dump: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(dump["dump"]["tasks"], 1);
    assert_eq!(dump["dump"]["statistics"]["kind"], "dump");
    assert!(dump["dump"]["stored_pages"].as_u64().unwrap() > 0, "{text}");
    tree::wait_gone(&[waiter.pid()]);
    let text = run(stillframe.restore_command(&["--json"]));
    let restore: serde_json::Value = serde_json::from_str(&text).unwrap();
    assert_eq!(restore["restore"]["root"], waiter.pid());
}

#[test]
fn a_zero_byte_tells_that_the_work_is_done() {
    testkit::needs_root!();
    let (stillframe, folder) = (stillframe(), tempfile::tempdir().unwrap());
    let waiter = waiter(folder.path());
    let status = stillframe.images().join("status");
    let told = |command: &Command| {
        let mut shell = Command::new("sh");
        shell
            .arg("-c")
            .arg("exec 9> \"$1\"; shift; exec \"$@\" --status-fd 9")
            .arg("sh");
        shell
            .arg(&status)
            .arg(command.get_program())
            .args(command.get_args());
        assert!(shell.output().unwrap().status.success());
        std::fs::read(&status).unwrap()
    };
    assert_eq!(told(&stillframe.dump_command(waiter.pid(), &[])), [0]);
    tree::wait_gone(&[waiter.pid()]);
    assert_eq!(told(&stillframe.restore_command(&[])), [0]);
}

#[test]
fn a_sibling_is_a_child_of_whoever_called() {
    testkit::needs_root!();
    let (stillframe, folder) = (stillframe(), tempfile::tempdir().unwrap());
    let waiter = waiter(folder.path());
    stillframe.dump(waiter.pid(), &[]).must();
    stillframe.restore(&["--restore-sibling"]).must();
    assert_eq!(tree::parent(waiter.pid()), Some(std::process::id()));
    assert!(waiter.is_alive());
}
