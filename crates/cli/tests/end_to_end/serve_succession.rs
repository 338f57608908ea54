//! `serve --on-exit keep`: another server goes on with the machines of one that is gone.

use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::net::{
    AddressFamily, RecvFlags, SendFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv,
    send, socket_with,
};
use rustix::process::Signal;
use testkit::page_server::PageServer;
use testkit::subject::Subject;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_root, serve_storm, tree};

const PAGES: u64 = 4096;
const KEEP: [&str; 2] = ["--on-exit", "keep"];

fn start(options: &[&str]) -> (PageServer, Subject) {
    let mut server = PageServer::new(Path::new(env!("CARGO_BIN_EXE_stillframe")), PAGES);
    server.serve("0", options);
    let monitor = server.monitor("found");
    server.session(monitor.pid());
    (server, monitor)
}

/// The quick share of `cargo xtask serve-storm successions`.
#[test]
fn machines_do_not_notice_that_their_server_is_replaced() {
    needs_root!();
    let stillframe = Path::new(env!("CARGO_BIN_EXE_stillframe"));
    serve_storm::successions(stillframe, 1, 8);
}

#[test]
fn what_was_known_of_a_machine_is_known_to_the_next_server() {
    needs_root!();
    let (mut server, monitor) = start(&KEEP);
    let number = server.session(monitor.pid());
    monitor.ask("write 0 4000 40 1");
    assert_eq!(server.diff(number, "1")["stored_pages"], 100);
    monitor.ask("write 3 4000 80 2");
    monitor.ask("remove 1000 100");
    let before = server.get(&format!("/sessions/{number}"));
    for killed in [true, false] {
        if killed {
            server.signal(Signal::KILL);
            assert_eq!(server.wait(), None);
        }
        server.succeed("0", &KEEP);
        let after = server.get(&format!("/sessions/{number}"));
        assert_eq!(after, before);
    }
    let told = server.diff(number, "2");
    assert!(told["stored_pages"].as_u64() <= Some(50), "{told}");
    assert!(told["zero_pages"].as_u64() >= Some(100), "{told}");
    server.compare("2", &monitor, "after three servers");
    // The next one kills, and is drained as ever.
    server.succeed("0", &[]);
    assert!(!server.path("socket.keep").exists());
    assert_eq!(server.session(monitor.pid()), number);
    server.signal(Signal::TERM);
    assert_eq!(server.wait(), Some(0), "{}", server.log());
    assert_eq!(monitor.ask("check"), "right");
}

/// The image, the socket of monitors, where sessions are asked for, and what is said.
const REFUSED: [(&str, &str, &str, &str); 4] = [
    ("other", "socket", "socket.keep", "are over image"),
    (
        "0",
        "elsewhere",
        "socket.keep",
        "listens elsewhere than at elsewhere",
    ),
    (
        "0",
        "socket",
        "nothing.keep",
        "nobody keeps sessions at nothing.keep",
    ),
    ("0", "socket", "control", "nobody keeps sessions at control"),
];

#[test]
fn who_does_not_fit_is_refused_and_changes_nothing() {
    needs_root!();
    let (mut server, monitor) = start(&KEEP);
    let words = [
        "import",
        "--firecracker",
        "-D",
        "other",
        "--memory",
        "memory",
        "--no-sync",
    ];
    assert!(
        server
            .command(&words)
            .status()
            .expect("it starts")
            .success()
    );
    let pid = server.pid();
    for alive in [true, false] {
        if !alive {
            server.signal(Signal::KILL);
            assert_eq!(server.wait(), None);
        }
        for (image, socket, path, what) in REFUSED {
            let words = [
                "serve",
                "-D",
                image,
                "--socket",
                socket,
                "--take-over",
                path,
            ];
            let refused = server.command(&words).output().expect("it starts");
            let told = String::from_utf8_lossy(&refused.stderr).into_owned();
            assert!(!refused.status.success() && told.contains(what), "{told}");
        }
        if alive {
            // It does not even notice.
            assert_eq!((server.sessions(), server.pid()), (1, pid));
        }
    }
    for text in [&b"garbage"[..], b"\"Taken\"", b"\"Take\"", b""] {
        let rendezvous = meet(&server.path("socket.keep"));
        let mut greeting = [0; 4096];
        let len = recv(&rendezvous, &mut greeting[..], RecvFlags::empty())
            .expect("greeted")
            .1;
        let greeting = String::from_utf8_lossy(&greeting[..len]).into_owned();
        assert!(greeting.contains("\"ledger\":1"), "{greeting}");
        let _ = send(&rendezvous, text, SendFlags::empty());
    }
    server.succeed("0", &KEEP);
    assert_eq!(monitor.ask("check"), "right");
}

fn meet(path: &Path) -> OwnedFd {
    let kind = SocketType::SEQPACKET;
    let socket = socket_with(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None);
    let socket = socket.expect("a socket");
    connect(&socket, &SocketAddrUnix::new(path).expect("short")).expect("it listens");
    socket
}

#[test]
fn machines_that_nobody_comes_for_are_killed_in_time() {
    needs_root!();
    let (mut server, monitor) = start(&["--on-exit", "keep", "--keep-for", "1"]);
    server.signal(Signal::TERM);
    assert_eq!(server.wait(), Some(0), "{}", server.log());
    // Who asks and says no more does not keep them alive.
    let _silent = meet(&server.path("socket.keep"));
    wait_until("the monitor to be killed", SOON, || {
        !tree::is_alive(monitor.pid())
    });
    wait_until("that to be said", SOON, || {
        server.log().contains("nobody came for 1 sessions")
    });
    server.serve("0", &[]);
    assert_eq!(server.monitor("found").ask("check"), "right");
}
