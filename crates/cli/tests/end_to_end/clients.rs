//! Clients that connect all the time while a server is dumped, killed and restored: they are late
//! or refused, and none that was let in is cut off.
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::thread;
use std::time::Duration;

use testkit::program::{Program, Spawned};
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root};

use crate::stillframe;

/// Listens by IPv4, at one address of IPv6, by both at once, and twice at one port, and serves a
/// word to each client.
const SERVER: &str = "
import os, select, socket, sys
def listen(family, at, options=()):
    own = socket.socket(family)
    own.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    for option in options:
        own.setsockopt(*option)
    own.bind(at)
    own.listen(500)
    own.setblocking(False)
    return own
V6_ONLY = (socket.IPPROTO_IPV6, socket.IPV6_V6ONLY)
SHARED = (socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
listeners = [
    listen(socket.AF_INET, ('127.0.0.1', 0)),
    listen(socket.AF_INET6, ('::1', 0), [(*V6_ONLY, 1)]),
    listen(socket.AF_INET6, ('::', 0), [(*V6_ONLY, 0)]),
    listen(socket.AF_INET, ('0.0.0.0', 0), [SHARED]),
]
listeners.append(listen(socket.AF_INET, listeners[3].getsockname(), [SHARED]))
with open(sys.argv[1] + '.part', 'w') as file:
    file.write(' '.join(str(own.getsockname()[1]) for own in listeners))
os.rename(sys.argv[1] + '.part', sys.argv[1])
ballast = bytearray(b'x' * (40 << 20))
held = list(listeners)
while True:
    for ready in select.select(held, [], [])[0]:
        if ready in listeners:
            try:
                held.append(ready.accept()[0])
            except BlockingIOError:
                pass
            continue
        data = ready.recv(4)
        if data:
            ready.sendall(data)
        held.remove(ready)
        ready.close()
";

/// The server, and where clients reach it.
fn serve(folder: &tempfile::TempDir) -> (Spawned, Vec<SocketAddr>) {
    let ports = folder.path().join("ports");
    let server = Program::new("python3")
        .args(["-c", SERVER])
        .arg(&ports)
        .spawn();
    server.wait_file(&ports);
    let ports = std::fs::read_to_string(ports).expect("it is there");
    let mut ports = ports.split(' ').map(|port| port.parse().expect("a port"));
    let mut next = || ports.next().expect("five ports");
    let (four, six): ([u8; 4], [u16; 8]) = ([127, 0, 0, 1], [0, 0, 0, 0, 0, 0, 0, 1]);
    let (first, second, both, shared) = (next(), next(), next(), next());
    let all = vec![
        (four, first).into(),
        (six, second).into(),
        (four, both).into(),
        (six, both).into(),
        (four, shared).into(),
    ];
    (server, all)
}

/// Connects, and has a word sent and sent back. Gives whether it was let in.
fn ask(at: SocketAddr) -> Result<bool, std::io::Error> {
    let mut client = match TcpStream::connect_timeout(&at, SOON) {
        Ok(client) => client,
        Err(error) if error.kind() == ErrorKind::ConnectionRefused => return Ok(false),
        Err(error) => return Err(error),
    };
    client.set_read_timeout(Some(SOON))?;
    client.write_all(b"word")?;
    let mut word = [0; 4];
    client.read_exact(&mut word)?;
    Ok(&word == b"word")
}

#[test]
fn clients_of_a_tree_that_is_killed_are_late_or_refused_and_never_reset() {
    needs_root!();
    needs_program!("python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer resets them");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let (server, places) = serve(&folder);
    let (done, answers) = (AtomicBool::new(false), AtomicU64::new(0));
    let failures = thread::scope(|scope| {
        let clients = places.iter().cycle().take(15).map(|at| {
            let (done, answers) = (&done, &answers);
            scope.spawn(move || {
                while !done.load(Relaxed) {
                    match ask(*at) {
                        Ok(true) => drop(answers.fetch_add(1, Relaxed)),
                        Ok(false) => {}
                        Err(error) => return Some(format!("{at}: {error}")),
                    }
                    thread::sleep(Duration::from_millis(3));
                }
                None
            })
        });
        let clients = clients.collect::<Vec<_>>();
        for _ in 0..6 {
            let before = answers.load(Relaxed);
            wait_until("answers", SOON, || answers.load(Relaxed) > before + 50);
            stillframe.clear();
            let options = &["--tcp-established", "--timeout", "60"];
            stillframe.dump(server.pid(), options).must();
            stillframe.restore(&["--tcp-established"]).must();
        }
        let before = answers.load(Relaxed);
        wait_until("answers", SOON, || answers.load(Relaxed) > before + 50);
        done.store(true, Relaxed);
        let all = clients.into_iter().map(|one| one.join().expect("no panic"));
        all.flatten().collect::<Vec<_>>()
    });
    assert_eq!(failures, Vec::<String>::new());
}
