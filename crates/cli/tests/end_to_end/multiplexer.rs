//! Unix sockets with clients outside of the tree: tmux, whose client attaches again, and others.
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use testkit::program::{Program, Spawned};
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root};

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

/// A server that is busy elsewhere while clients come and go, and then serves who is still there.
const LATE: &str = r#"
import os, socket, sys, time
folder = sys.argv[1]
listener = socket.socket(socket.AF_UNIX)
listener.bind(folder + "/late")
listener.listen(8)
os.mkdir(folder + "/ready")
while not os.path.exists(folder + "/serve"):
    time.sleep(0.01)
while True:
    client, _ = listener.accept()
    try:
        client.send(b"served")
    except BrokenPipeError:
        pass
    client.close()
"#;

#[test]
fn clients_that_have_hung_up_are_dropped() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer has no such option");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let server = Program::new("/usr/bin/python3")
        .args(["-c", LATE])
        .arg(folder.path())
        .spawn();
    server.wait_file(&folder.path().join("ready"));
    let connect = || UnixStream::connect(folder.path().join("late")).expect("it listens");
    for _ in 0..3 {
        connect().write_all(b"not heard").expect("there is room");
    }
    let refused = stillframe.dump(server.pid(), &[]);
    refused.must_fail().names(&["hung up", "--unix-close"]);
    stillframe.cycle(2, &server, &["--unix-close"]);
    fs::create_dir(folder.path().join("serve")).expect("a folder");
    let mut told = String::new();
    connect().read_to_string(&mut told).expect("it answers");
    assert_eq!(told, "served");
}
