//! Connections to the world outside: held back by whoever ends, cleared when nobody comes for them,
//! and in the way of nobody.
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use testkit::program::{Program, Spawned, free_port};
use testkit::stepper::{LINKAT, Run, kill_behind_fork, kill_from};
use testkit::stillframe::Stillframe;
use testkit::wait::{SOON, try_wait_for, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::stillframe;

const KEEP: &[&str] = &["--tcp-established"];

/// A server of two processes: each accepts connections and sends back what it gets.
const ECHO: &str = "
import os, select, socket, sys
listener = socket.socket()
listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
listener.bind(('127.0.0.1', int(sys.argv[1])))
listener.listen(50)
listener.setblocking(False)
if int(sys.argv[2]) > 1:
    os.fork()
held = [listener]
while True:
    for ready in select.select(held, [], [])[0]:
        if ready is listener:
            try:
                held.append(listener.accept()[0])
            except BlockingIOError:
                pass
            continue
        data = ready.recv(4096)
        if data:
            ready.sendall(data)
        else:
            held.remove(ready)
            ready.close()
";

fn echo(processes: usize) -> (Spawned, u16) {
    let port = free_port();
    let server = Program::new("python3")
        .args(["-c", ECHO])
        .args([port.to_string(), processes.to_string()])
        .spawn();
    server.wait_port(port);
    server.wait_ready("its processes", || server.tree().len() == processes);
    (server, port)
}

fn connect(port: u16) -> TcpStream {
    let stream = TcpStream::connect(("127.0.0.1", port)).expect("it listens");
    stream.set_read_timeout(Some(SOON)).expect("above zero");
    stream.set_nodelay(true).expect("it is TCP");
    stream
}

/// Has a word sent and sent back.
#[track_caller]
fn talk(stream: &mut TcpStream, told: &str) {
    stream
        .write_all(b"word")
        .unwrap_or_else(|error| panic!("{told}: {error}"));
    let mut word = [0; 4];
    stream
        .read_exact(&mut word)
        .unwrap_or_else(|error| panic!("{told}: {error}"));
    assert_eq!(&word, b"word", "{told}");
}

/// The tables that stand for images in this directory.
fn tables(stillframe: &Stillframe) -> Vec<String> {
    let output = stillframe
        .command(&["network", "list"])
        .output()
        .expect("it runs");
    assert!(output.status.success(), "{output:?}");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let images = stillframe.images().display().to_string();
    let text = format!("\n{text}");
    let all = text.split("\nstillframe-").map(str::to_owned);
    all.filter(|one| one.contains(&format!("\n  in {images}\n")))
        .collect()
}

/// Waits until nothing of a killed command is left.
fn wait_for_helpers(stillframe: &Stillframe, pids: &[u32], told: &str) {
    wait_until(&format!("helpers to end: {told}"), SOON, || {
        let helpers = stillframe.helpers();
        helpers.iter().chain(pids).for_each(|&pid| tree::reap(pid));
        helpers.is_empty()
    });
}

/// Whether the process lives, is not traced, and no `SIGKILL` is on its way or taken already.
fn goes_on(pid: u32) -> bool {
    const KILLED: u64 = 1 << 8;
    const ENDS: u64 = 0x404;
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}"));
    let (Ok(status), Ok(stat)) = (read("status"), read("stat")) else {
        return false;
    };
    let field = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key));
        line.unwrap_or_default().trim().to_owned()
    };
    let pending = |key: &str| u64::from_str_radix(&field(key), 16).unwrap_or_default();
    let flags = stat
        .rsplit(") ")
        .next()
        .and_then(|rest| rest.split(' ').nth(6));
    let flags = flags.and_then(|flags| flags.parse::<u64>().ok());
    tree::is_alive(pid)
        && field("TracerPid:") == "0"
        && (pending("SigPnd:") | pending("ShdPnd:")) & KILLED == 0
        && flags.is_some_and(|flags| flags & ENDS == 0)
}

/// Whether all of the tree is there; otherwise waits until nothing of it is.
fn is_whole(pids: &[u32], told: &str) -> bool {
    let found = try_wait_for(SOON, || {
        pids.iter().for_each(|&pid| tree::reap(pid));
        let there = pids
            .iter()
            .filter(|&&pid| tree::state(pid).is_some())
            .count();
        let lives = pids.iter().all(|pid| goes_on(*pid));
        (there == 0 || lives).then_some(lives)
    });
    found.unwrap_or_else(|| panic!("half a tree: {told}"))
}

#[test]
fn connections_survive_a_dump_that_is_killed_at_any_call() {
    needs_root!();
    needs_program!("python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer loses them");
    }
    for processes in [1, 2] {
        let (server, port) = echo(processes);
        let mut client = connect(port);
        let pids = server.tree();
        let (mut restored, mut untouched) = (0, 0);
        for at in 0.. {
            stillframe.clear();
            let mut command = stillframe.dump_command(server.pid(), KEEP);
            command.env("TESTKIT_MARK", stillframe.mark());
            // Before that, the image has no name and the rules are those that end with the dump.
            let run = kill_from(&command, |registers| registers.orig_rax == LINKAT, at);
            let told = format!("{processes} processes, call {at}: {run:?}");
            wait_for_helpers(&stillframe, &pids, &told);
            if is_whole(&pids, &told) {
                untouched += 1;
                wait_until(&format!("no table: {told}"), SOON, || {
                    tables(&stillframe).is_empty()
                });
            } else {
                restored += 1;
                assert_eq!(tables(&stillframe).len(), 1, "{told}");
                stillframe.restore(KEEP).must();
            }
            talk(&mut client, &told);
            assert_eq!(tables(&stillframe), [""; 0], "{told}");
            if let Run::Ended(status) = run {
                assert!(status.success(), "{told}");
                break;
            }
        }
        println!("{processes} processes: {restored} restored, {untouched} went on");
        assert!(restored >= 3 && untouched >= 3);
    }
}

#[test]
fn connections_survive_a_restore_that_is_killed_at_any_call() {
    needs_root!();
    needs_program!("python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer loses them");
    }
    for processes in [1, 2] {
        let (server, port) = echo(processes);
        let mut client = connect(port);
        let pids = server.tree();
        let (mut again, mut went_on) = (0, 0);
        for at in 0.. {
            stillframe.clear();
            stillframe.dump(server.pid(), KEEP).must();
            // On its way while nobody is there, and never on the wire before.
            client.write_all(b"word").expect("the connection lives");
            let mut command = stillframe.restore_command(KEEP);
            command.env("TESTKIT_MARK", stillframe.mark());
            let run = kill_behind_fork(&command, at);
            let told = format!("{processes} processes, call {at}: {run:?}");
            wait_for_helpers(&stillframe, &pids, &told);
            if is_whole(&pids, &told) {
                went_on += 1;
            } else {
                again += 1;
                assert_eq!(tables(&stillframe).len(), 1, "{told}");
                stillframe.restore(KEEP).must();
            }
            let mut word = [0; 4];
            client
                .read_exact(&mut word)
                .unwrap_or_else(|error| panic!("{told}: {error}"));
            talk(&mut client, &told);
            assert_eq!(tables(&stillframe), [""; 0], "{told}");
            if let Run::Ended(status) = run {
                assert!(status.success(), "{told}");
                break;
            }
        }
        println!("{processes} processes: {again} restored again, {went_on} went on");
        assert!(again >= 2 && went_on >= 3);
    }
}

#[test]
fn what_nobody_restores_is_listed_and_cleared() {
    needs_root!();
    needs_program!("python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer has no such command");
    }
    let run = |arguments: &[&str]| {
        let output = stillframe.command(arguments).output().expect("it runs");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8_lossy(&output.stdout).into_owned()
    };
    let images = stillframe.images().display().to_string();
    let dumped = || {
        stillframe.clear();
        let (server, port) = echo(1);
        let mut client = connect(port);
        talk(&mut client, "before");
        stillframe.dump(server.pid(), KEEP).must();
        (server, client)
    };
    // It says what it is for, and stays while its image is there.
    let (server, client) = dumped();
    let [table] = <[String; 1]>::try_from(tables(&stillframe)).expect("one table");
    let client_end = client.local_addr().expect("connected").to_string();
    for part in [
        "waits for its restore",
        &format!("of pid {}", server.pid()),
        &client_end,
    ] {
        assert!(table.contains(part), "{part} is not in {table}");
    }
    assert!(run(&["show", &images]).contains("are held back on this host by the table"));
    run(&["network", "clear"]);
    assert_eq!(tables(&stillframe).len(), 1);
    // Without its image it is cleared.
    stillframe.clear();
    assert!(tables(&stillframe)[0].contains("its image is gone"));
    assert!(run(&["network", "clear"]).contains(&images));
    assert_eq!(tables(&stillframe), [""; 0]);
    // So it is when another image takes its place, and by name.
    let (_server, _client) = dumped();
    let (other, _port) = echo(1);
    stillframe
        .dump(other.pid(), &["-R", "--tcp-established"])
        .must();
    assert_eq!(tables(&stillframe), [""; 0]);
    let (_server, _client) = dumped();
    let cleared = run(&["network", "clear", "--image", &images, "--json"]);
    assert!(cleared.contains("\"state\":\"waits\""), "{cleared}");
    assert_eq!(tables(&stillframe), [""; 0]);
    assert!(run(&["show", &images]).contains("are not held back"));
    let output = stillframe
        .command(&["network", "list", "--all"])
        .output()
        .expect("it runs");
    assert_eq!(output.status.code(), Some(2), "{output:?}");
}

/// Who keeps packets away himself has no rules made.
#[test]
fn connections_that_others_hold_back_survive() {
    needs_root!();
    needs_program!("python3");
    let stillframe = stillframe();
    let (server, port) = echo(1);
    let mut client = connect(port);
    for method in ["skip", "nftables", "iptables"] {
        talk(&mut client, method);
        stillframe.clear();
        let options = [KEEP, &["--network-lock", method]].concat();
        stillframe.dump(server.pid(), &options).must();
        if !stillframe.is_peer() {
            assert_eq!(tables(&stillframe).is_empty(), method == "skip");
        }
        stillframe.restore(&options).must();
        talk(&mut client, method);
    }
}

#[test]
fn a_busy_server_is_dumped_between_its_connections() {
    needs_root!();
    needs_program!("python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer refuses it");
    }
    let (server, port) = echo(2);
    let (done, answers) = (AtomicBool::new(false), AtomicU64::new(0));
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                while !done.load(Relaxed) {
                    talk(&mut connect(port), "a busy server");
                    answers.fetch_add(1, Relaxed);
                }
            });
        }
        wait_until("answers", SOON, || answers.load(Relaxed) > 20);
        let outcomes = (0..10).map(|_| {
            stillframe.clear();
            stillframe.dump(
                server.pid(),
                &["--tcp-established", "-R", "--timeout", "60"],
            )
        });
        let outcomes = outcomes.collect::<Vec<_>>();
        done.store(true, Relaxed);
        outcomes
            .into_iter()
            .for_each(|outcome| drop(outcome.must()));
    });
    talk(&mut connect(port), "afterwards");
}

#[test]
fn who_waits_to_be_accepted_is_waited_for_or_dropped() {
    needs_root!();
    needs_program!("python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("it is ours that is told of");
    }
    let port = free_port();
    let program = "
import signal, socket, sys, time
held, listener = [], socket.socket()
signal.signal(signal.SIGUSR1, lambda *_: held.append(listener.accept()[0]))
listener.bind(('127.0.0.1', int(sys.argv[1])))
listener.listen(5)
while True:
    signal.pause()
";
    let server = Program::new("python3")
        .args(["-c", program, &port.to_string()])
        .spawn();
    server.wait_port(port);
    // The look at the port waits to be accepted as well, though nobody is there any more.
    let accept = || tree::signal(server.pid(), rustix::process::Signal::USR1);
    accept();
    let mut client = connect(port);
    let refused = stillframe.dump(server.pid(), &["--tcp-established", "--timeout", "1"]);
    let refused = refused
        .must_fail()
        .names(&["waits to be accepted", "--skip-in-flight"]);
    assert_eq!(refused.status.code(), Some(3), "{}", refused.told());
    assert!(
        refused.elapsed >= Duration::from_secs(1),
        "{}",
        refused.told()
    );
    // It is accepted while the dump tries.
    let dumped = thread::scope(|scope| {
        scope.spawn(|| {
            // The dump has tried some times by then, and it may: it is right in either case.
            thread::sleep(Duration::from_millis(300));
            accept();
        });
        stillframe.dump(
            server.pid(),
            &["--tcp-established", "-R", "--timeout", "60"],
        )
    });
    dumped.must();
    // Or it is dropped, and told so.
    let mut waits = connect(port);
    stillframe.clear();
    let skip = &["--tcp-established", "--skip-in-flight"];
    stillframe.dump(server.pid(), skip).must();
    assert!(!waits.read(&mut [0]).is_ok_and(|bytes| bytes > 0));
    stillframe.restore(KEEP).must();
    let mut again = connect(port);
    accept();
    again.write_all(b"x").expect("it was accepted");
    client.write_all(b"x").expect("it was accepted before");
}
