//! redis-server under load, dumped live several times in a row: every one of the images can be
//! restored later, and has one instant of it.
use std::path::Path;
use std::process::Stdio;

use testkit::program::{Program, Spawned};
use testkit::stillframe::Stillframe;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::redis::{CLIENT, Client, KEYS, load, run, start};
use crate::stillframe;

/// Live dumps in a row.
const DUMPS: usize = 3;

/// What the client had been told when a dump began, and the last that it had asked for when the
/// dump had ended.
struct During {
    told: u64,
    asked: u64,
}

/// Dumps the server live into `place`, while the client writes pairs of keys.
#[track_caller]
fn dump_while_writing(
    stillframe: &Stillframe,
    pid: u32,
    place: &Path,
    client: &mut Client,
    count: &mut u64,
) -> During {
    let told = *count;
    let mut command = stillframe.command(&["dump", "--live", "--tcp-close", "-v4"]);
    command.args(["-o", "dump.log", "-t", &pid.to_string(), "-D"]);
    command.arg(place).stdout(Stdio::null());
    let mut dump = command.spawn().expect("it starts");
    let status = loop {
        if let Some(status) = dump.try_wait().expect("it is a child") {
            break status;
        }
        *count += 1;
        let number = count.to_string();
        // Both or none: redis runs a command as a whole.
        let pair = client.ask(&["MSET", "left", &number, "right", &number]);
        assert_eq!(pair, "OK");
        let sum = client.ask(&["INCR", "sum"]);
        assert_eq!(sum, number, "a count was lost");
    };
    let log = std::fs::read_to_string(place.join("dump.log")).unwrap_or_default();
    assert!(status.success(), "{log}");
    During {
        told,
        asked: *count,
    }
}

/// Insists that a server that is just restored is one of the instants of a dump.
#[track_caller]
fn assert_instant(port: u16, server: &Spawned, during: &During) {
    let mut client = Client::connect(port);
    let mut number = |key: &str| -> u64 {
        let text = client.ask(&["GET", key]);
        text.parse()
            .unwrap_or_else(|_| panic!("{key} is {text:?}, no number"))
    };
    let (left, right, sum) = (number("left"), number("right"), number("sum"));
    assert_eq!(left, right);
    // The sum is written after the pair.
    assert!(sum == left || sum + 1 == left, "{sum} after {left}");
    assert!(
        (during.told..=during.asked).contains(&left),
        "{left} is not of {}..={}",
        during.told,
        during.asked
    );
    for number in (1..=KEYS).step_by(1999) {
        let value = client.ask(&["GET", &format!("key:{number}")]);
        assert_eq!(value, format!("value {}", number * 7));
    }
    assert_eq!(client.info("process_id"), u64::from(server.pid()));
    assert_eq!(client.ask(&["INCR", "sum"]), (sum + 1).to_string());
}

#[test]
fn a_redis_under_load_is_dumped_live_in_a_row() {
    needs_root!();
    needs_program!("redis-server");
    needs_program!("redis-benchmark");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("no other program dumps live");
    }
    let (folder, port, server, mut client) = start();
    client.fill();
    let load = load(port, &folder.path().join("load"), &mut client);
    let own_name = client.ask(&["CLIENT", "ID"]);
    let images = tempfile::tempdir().expect("a scratch folder");
    let mut count = 1;
    assert_eq!(client.ask(&["MSET", "left", "1", "right", "1"]), "OK");
    assert_eq!(client.ask(&["INCR", "sum"]), "1");
    let mut during = Vec::new();
    for number in 0..DUMPS {
        let place = images.path().join(number.to_string());
        let dumped = dump_while_writing(&stillframe, server.pid(), &place, &mut client, &mut count);
        during.push(dumped);
        // Nobody has lost a connection.
        assert_eq!(client.ask(&["CLIENT", "ID"]), own_name);
        let before = client.info("total_commands_processed");
        wait_until("the load to go on", SOON, || {
            client.info("total_commands_processed") > before + 500
        });
        assert!(load.is_alive(), "the load has ended");
    }
    drop((client, load));
    for (number, during) in during.iter().enumerate().rev() {
        server.kill();
        tree::wait_gone(&[server.pid()]);
        let place = images.path().join(number.to_string());
        run(&stillframe, &["restore", "-d", "--tcp-close"], &place);
        assert_instant(port, &server, during);
    }
}

/// Starts a server, a load on it, and a client of it that counts by a key, for ever; in one tree,
/// over a unix socket.
const WITH_LOAD: [&str; 3] = [SERVER, CLIENT, LOAD];
const SERVER: &str = r#"
import os, socket, struct, subprocess, sys, time
path = sys.argv[1]
def start(*words):
    # No file of theirs grows on after a dump: a restore would not take it for the same.
    return subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL)
start("redis-server", "--port", "0", "--unixsocket", path, "--save", "", "--appendonly", "no")
"#;
const LOAD: &str = r#"
ask(b"EVAL", b"for i=1,50000 do redis.call('SET', 'key:'..i, 'value '..i*7) end return 1", b"0")
identity = ask(b"CLIENT", b"ID")
load = start("redis-benchmark", "-s", path, "-n", "1000000000", "-q", "-c", "4", "-r", "2000",
    "-d", "512", "-t", "set")
while b"connected_clients:5" not in ask(b"INFO", b"clients"):
    time.sleep(0.01)
# One file, of one size: its place in time is not that of the image.
report = os.open(path + ".count", os.O_CREAT | os.O_WRONLY, 0o600)
count = 0
while True:
    count += 1
    assert int(ask(b"INCR", b"count")) == count, "a count was lost"
    assert ask(b"GET", b"key:%d" % (count % 50000 + 1)) == b"value %d" % ((count % 50000 + 1) * 7)
    assert ask(b"CLIENT", b"ID") == identity, "another connection"
    assert load.poll() is None, "the load has ended"
    os.pwrite(report, struct.pack("=Q", count), 0)
    time.sleep(0.001)
"#;

#[test]
fn a_redis_with_its_load_and_its_client_lives_on_from_every_live_dump() {
    needs_root!();
    needs_program!("redis-server");
    needs_program!("redis-benchmark");
    needs_program!("python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("no other program dumps live");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let report = folder.path().join("redis.sock.count");
    let tree = Program::new("/usr/bin/python3")
        .args(["-c", &WITH_LOAD.concat()])
        .arg(folder.path().join("redis.sock"))
        .folder(folder.path())
        .output(&folder.path().join("log"))
        .spawn();
    let count = || -> u64 {
        let bytes = std::fs::read(&report).unwrap_or_default();
        bytes.try_into().map_or(0, u64::from_ne_bytes)
    };
    let goes_on = |from: u64| {
        wait_until("the client to count", SOON, || {
            let log = std::fs::read_to_string(folder.path().join("log"));
            assert!(tree.is_alive(), "{log:?}");
            count() > from
        });
    };
    goes_on(0);
    let images = tempfile::tempdir().expect("a scratch folder");
    let pid = tree.pid().to_string();
    let mut at_least = Vec::new();
    for number in 0..DUMPS {
        at_least.push(count());
        let place = images.path().join(number.to_string());
        run(&stillframe, &["dump", "--live", "-t", &pid], &place);
        goes_on(count() + 20);
    }
    for (number, at_least) in at_least.iter().enumerate() {
        let pids = tree.tree();
        tree.kill();
        tree::wait_gone(&pids);
        // The instant is older than what was reported last: who goes on from it says so anew.
        std::fs::write(&report, 0_u64.to_ne_bytes()).expect("the report can be written");
        let place = images.path().join(number.to_string());
        run(&stillframe, &["restore", "-d"], &place);
        goes_on(at_least + 20);
        assert_eq!(tree.tree().len(), 3, "a task is missing");
    }
}
