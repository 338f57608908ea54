//! What a tree gives up is free at once, also right after a restore.
use std::path::Path;

use testkit::program::{Program, Spawned};
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root};

use crate::stillframe;

/// Gives a lock, the last writer's end of a pipe, and a port up again and again, each with the only
/// descriptor that it has of it, and tells when one is not free at once. With a child and a
/// connection if it is told so, which take a restore longer to let go.
const GIVER: &str = r#"
import fcntl, os, socket, sys, time
folder, more = sys.argv[1], sys.argv[2] == "more"
def attempt(what, call, *arguments):
    try: call(*arguments)
    except OSError as error:
        with open(f"{folder}/failed", "a") as file: print(what, error, file=file)
def open_all():
    global lock, reader, writer, listener
    lock = os.open(f"{folder}/lock", os.O_RDWR | os.O_CREAT)
    attempt("lock", fcntl.flock, lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    listener = socket.socket()
address = ("127.0.0.1", 0)
open_all()
listener.bind(address)
address = listener.getsockname()
if more:
    others = socket.socket()
    others.bind(("127.0.0.1", 0))
    others.listen()
    client = socket.create_connection(others.getsockname())
    server = others.accept()
    told, tell = os.pipe()
    if os.fork() == 0:
        os.close(lock)
        os.close(writer)
        listener.close()
        os.write(tell, b"closed")
        while True: time.sleep(1000)
    os.read(told, 6)
rounds, number = os.open(f"{folder}/rounds", os.O_RDWR | os.O_CREAT), 0
while True:
    listener.listen()
    time.sleep(0.001)
    os.close(lock)
    os.close(writer)
    listener.close()
    attempt("pipe", os.read, reader, 1)
    os.close(reader)
    open_all()
    attempt("port", listener.bind, address)
    number += 1
    os.pwrite(rounds, b"%020d" % number, 0)
"#;

fn rounds(folder: &Path) -> u64 {
    let text = std::fs::read_to_string(folder.join("rounds")).unwrap_or_default();
    text.parse().unwrap_or(0)
}

#[track_caller]
fn check(folder: &Path, program: &Spawned, how: &str) {
    let before = rounds(folder);
    wait_until("it to go on", SOON, || rounds(folder) > before + 10);
    let failed = std::fs::read_to_string(folder.join("failed")).unwrap_or_default();
    assert_eq!(failed, "", "{how}, {}", program.pid());
}

#[test]
fn what_is_given_up_right_after_a_restore_is_free() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("it has what it has opened for some time");
    }
    const OPTIONS: [&str; 2] = ["--file-locks", "--tcp-established"];
    for kind in ["alone", "more"] {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let program = Program::new("/usr/bin/python3")
            .args(["-c", GIVER])
            .arg(folder.path())
            .arg(kind)
            .spawn();
        check(folder.path(), &program, "at first");
        // About one in four of these has found something taken when it was.
        for cycle in 0..12 {
            stillframe.clear();
            stillframe.dump(program.pid(), &OPTIONS).must();
            stillframe.restore(&OPTIONS).must();
            check(folder.path(), &program, &format!("{kind}, cycle {cycle}"));
        }
    }
}
