//! nginx with a master and 4 workers, during a slow download.
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use testkit::program::{Program, Spawned, free_port};
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::stillframe;

const BYTES: usize = 6 << 20;
const RATE: &str = "2m";

/// Bytes that show when one is lost, doubled or moved.
fn contents() -> Vec<u8> {
    let mut state = 1_u64;
    let mut next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 56) as u8
    };
    (0..BYTES).map(|_| next()).collect()
}

fn start(folder: &Path, port: u16) -> Spawned {
    let configuration = format!(
        "daemon off; master_process on; worker_processes 4; user root;
         pid {0}/nginx.pid; error_log {0}/error.log;
         events {{ worker_connections 64; }}
         http {{
             access_log {0}/access.log;
             client_body_temp_path {0}/body; proxy_temp_path {0}/proxy;
             fastcgi_temp_path {0}/fastcgi; uwsgi_temp_path {0}/uwsgi; scgi_temp_path {0}/scgi;
             server {{
                 listen 127.0.0.1:{port} sndbuf=64k; root {0};
                 location /slow {{ limit_rate {RATE}; }}
             }}
         }}",
        folder.display()
    );
    let path = folder.join("nginx.conf");
    fs::write(&path, configuration).expect("the folder can be written");
    let server = Program::new("nginx")
        .arg("-c")
        .arg(&path)
        .arg("-e")
        .arg(folder.join("error.log"))
        .folder(folder)
        .output(&folder.join("log"))
        .spawn();
    server.wait_port(port);
    server.wait_ready("five tasks", || server.tree().len() == 5);
    server
}

/// Asks for `path` and returns the body. Whenever as many bytes have come as `pauses` said last, it
/// says so and goes on when it is told where to pause next, or that there is nobody to tell it.
fn download(port: u16, path: &str, pauses: Option<(&Receiver<usize>, &Sender<()>)>) -> Vec<u8> {
    let mut stream = TcpStream::connect(("127.0.0.1", port)).expect("nginx listens");
    stream
        .set_read_timeout(Some(SOON))
        .expect("a limit above zero");
    let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
    stream
        .write_all(request.as_bytes())
        .expect("the connection lives");
    let mut answer = Vec::new();
    let mut piece = [0; 16 << 10];
    let next = || pauses.and_then(|(next, _)| next.recv().ok());
    let mut pause = next();
    loop {
        if pause.is_some_and(|pause| answer.len() >= pause) {
            let (_, reached) = pauses.expect("it paused");
            reached.send(()).expect("the test waits for it");
            pause = next();
        }
        let bytes = stream.read(&mut piece).expect("the connection lives");
        if bytes == 0 {
            break;
        }
        answer.extend_from_slice(&piece[..bytes]);
    }
    let end = answer.windows(4).position(|four| four == b"\r\n\r\n");
    answer.split_off(end.expect("an answer has a head") + 4)
}

#[test]
fn a_slow_download_is_exact_over_dumps() {
    needs_root!();
    needs_program!("nginx");
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let contents = contents();
    fs::create_dir(folder.path().join("slow")).expect("the folder can be written");
    fs::write(folder.path().join("slow/file"), &contents).expect("the folder can be written");
    fs::write(folder.path().join("quick"), "quick").expect("the folder can be written");
    let port = free_port();
    let server = start(folder.path(), port);
    let workers = server.tree();
    let (pause, pauses) = channel();
    let (reached, parts) = channel();
    let client = thread::spawn(move || download(port, "/slow/file", Some((&pauses, &reached))));
    let options = &["--tcp-established"];
    for part in 1..=3 {
        pause.send(part * BYTES / 5).expect("the client runs");
        parts.recv_timeout(SOON).expect("a part of the file");
        stillframe.cycle(1, &server, options);
        assert_eq!(server.tree(), workers, "master and workers are the same");
    }
    // What was sent to the end is logged: nginx must still have been sending.
    let log = fs::read_to_string(folder.path().join("access.log")).expect("nginx keeps it");
    assert_eq!(log, "", "too fast to prove anything");
    drop(pause);
    let body = client.join().expect("the download goes through");
    assert_eq!(body.len(), contents.len());
    assert!(body == contents, "the contents differ");
    // Everyone still works: new connections, and the master replaces a worker that dies.
    for _ in 0..16 {
        assert_eq!(download(port, "/quick", None), b"quick");
    }
    let dies = workers[1];
    assert!(tree::signal(dies, rustix::process::Signal::KILL));
    wait_until("a worker in its place", SOON, || {
        let now = server.tree();
        now.len() == 5 && !now.contains(&dies)
    });
}
