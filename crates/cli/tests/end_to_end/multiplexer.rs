//! tmux with a client attached from outside of the tree, which attaches again.
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use testkit::program::{Program, Spawned};
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::{stillframe, terminal};

/// Has a command of tmux run; what it says.
fn tmux(folder: &Path, words: &[&str]) -> String {
    let told = Command::new("tmux")
        .arg("-S")
        .arg(folder.join("socket"))
        .args(words)
        .stdin(Stdio::null())
        .output()
        .expect("tmux can be run");
    String::from_utf8_lossy(&told.stdout).into_owned()
}

/// A client on a terminal of its own, outside of the server's tree.
fn attach(folder: &Path) -> Spawned {
    let client = format!("tmux -S {} attach", folder.join("socket").display());
    let attached = Program::new("script")
        .args(["-qec", &client, "/dev/null"])
        .env("TERM", "xterm")
        .output(&folder.join("client"))
        .spawn();
    attached.wait_ready("a client", || !tmux(folder, &["list-clients"]).is_empty());
    attached
}

#[test]
fn a_multiplexer_loses_its_client_and_takes_it_back() {
    needs_root!();
    needs_program!("tmux");
    let _alone = terminal::alone();
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let folder = folder.path();
    let counted = folder.join("counted");
    let server = Program::new("tmux")
        .arg("-S")
        .arg(folder.join("socket"))
        .args(["-f", "/dev/null", "-D"])
        .env("TERM", "xterm")
        .output(&folder.join("log"))
        .spawn();
    server.wait_file(&folder.join("socket"));
    let count = format!(
        "i=0; while :; do i=$((i+1)); echo $i; echo $i > {}; sleep 0.01; done",
        counted.display()
    );
    tmux(folder, &["new-session", "-d", &count]);
    let client = attach(folder);
    let refused = stillframe.dump(server.pid(), &[]);
    refused.must_fail().names(&["--unix-close"]);
    let number = || -> u64 {
        let text = fs::read_to_string(&counted).unwrap_or_default();
        text.trim().parse().unwrap_or(0)
    };
    stillframe.clear();
    stillframe.dump(server.pid(), &["--unix-close"]).must();
    wait_until("the client's end", SOON, || !client.is_alive());
    // What the shell had started last keeps its session until somebody asks how it ended.
    tree::reap_orphans();
    let before = number();
    stillframe.restore(&[]).must();
    wait_until("further numbers", SOON, || number() > before + 5);
    assert_eq!(tmux(folder, &["list-clients"]), "");
    let _client = attach(folder);
    let shown = tmux(folder, &["capture-pane", "-p"]);
    let shown = shown
        .lines()
        .filter_map(|line| line.trim().parse::<u64>().ok());
    assert!(shown.max() > Some(before), "the pane shows what goes on");
}
