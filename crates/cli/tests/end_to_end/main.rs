//! The command on real programs and on subjects of our own, each with proof that it went on.
//!
//! `STILLFRAME_BIN` names another binary to run, such as criu, to prove the tests themselves.
mod aio;
mod bpf_maps;
mod cgroups;
mod clients;
mod clocks;
mod code_32;
mod compressed;
mod compressed_programs;
mod connections;
mod cycles;
mod damage;
mod deciders;
mod ended_clocks;
mod equal;
mod events;
mod file_limits;
mod files;
mod generations;
mod given_up;
mod host;
mod huge_pages;
mod in_flight;
mod killed_at;
mod kills;
mod layers;
mod lazy;
mod leaders;
mod ledger;
mod live;
mod machine_memory;
mod machines;
mod multiplexer;
mod nginx;
mod obstacles;
mod old_images;
mod one_memory;
mod other_kinds;
mod own_mounts;
mod own_namespaces;
mod packets;
mod perf_events;
mod pid_namespaces;
mod policies;
mod promised;
mod python;
mod redis;
mod redis_live;
mod refusals;
mod rights;
mod rings;
mod rpc;
mod sandboxed;
mod security;
mod segments;
mod semaphores;
mod serve;
mod serve_live;
mod serve_otlp;
mod serve_succession;
mod shared_pages;
mod sharing;
mod states;
mod stood_still;
mod stops;
mod storm;
mod terminal;
mod tunnels;
mod unrestorable;
mod userfaultfd;
mod vdso;
mod watches;
mod ways;

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use testkit::facts::Facts;
use testkit::stillframe::Stillframe;
use testkit::subject::Subject;
use testkit::wait::{SOON, wait_until};

fn stillframe() -> Stillframe {
    Stillframe::new(env!("CARGO_BIN_EXE_stillframe"))
}

/// The command with its `--status-fd 9` as standard output.
fn telling_status(command: &Command) -> Command {
    let mut shell = Command::new("sh");
    shell.args(["-c", "exec \"$@\" 9>&1 >&2", "sh"]);
    shell.arg(command.get_program()).args(command.get_args());
    shell.stdin(Stdio::null()).stdout(Stdio::piped());
    shell
}

/// An action script in `folder`; its path.
fn action_script(folder: &Path, text: &str) -> String {
    let path = folder.join("action-script");
    std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).expect("the folder is writable");
    let mode = std::fs::Permissions::from_mode(0o755);
    std::fs::set_permissions(&path, mode).expect("it is this process's");
    path.into_os_string().into_string().expect("a plain path")
}

/// An action script in `folder` that refuses a stage; its path.
fn refusing_script(folder: &Path, stage: &str) -> String {
    action_script(
        folder,
        &format!("[ \"$CRTOOLS_SCRIPT_ACTION\" != {stage} ]"),
    )
}

/// Insists that a restored tree is what was dumped.
#[track_caller]
fn assert_restored(stillframe: &Stillframe, before: &Facts, after: &Facts, what: &str) {
    let differences = if stillframe.is_peer() {
        let before = before.clone().as_peer_restores();
        before.diff(&after.clone().as_peer_restores())
    } else {
        before.diff(after)
    };
    assert!(
        differences.is_empty(),
        "{what}:\n{}",
        differences.join("\n")
    );
}

/// Dumps and restores a subject that waits, `times` in a row, and insists that nothing about it
/// differs.
#[track_caller]
fn assert_cycles(stillframe: &Stillframe, times: usize, subject: &Subject, what: &str) {
    wait_until("the subject to wait", SOON, || subject.is_waiting());
    let before = Facts::still(subject.pid());
    stillframe.cycle(times, subject, &[]);
    wait_until("the subject to wait", SOON, || subject.is_waiting());
    let after = Facts::still(subject.pid());
    assert_restored(stillframe, &before, &after, what);
}

/// Insists that a tree that was left running is what it was.
#[track_caller]
fn assert_untouched(before: &Facts, after: &Facts, what: &str) {
    let differences = before.diff(after);
    assert!(
        differences.is_empty(),
        "{what}:\n{}",
        differences.join("\n")
    );
}
