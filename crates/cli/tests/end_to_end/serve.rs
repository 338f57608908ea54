//! `serve`: monitors that hand their memory over get it, and what they change is told exactly.

use std::io::{Read as _, Write as _};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use sys::socket::{Along, send};
use testkit::huge_pages::HugePages;
use testkit::machine_memory;
use testkit::subject::Subject;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_root, tree};

/// Pages of the memory: 16 MiB.
const PAGES: u64 = 4096;

/// An image, and a server of it.
struct Server {
    child: Option<Child>,
    folder: tempfile::TempDir,
}

impl Server {
    fn start(options: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let memory = folder.path().join("memory");
        machine_memory::write(&memory, PAGES).expect("written");
        let mut server = Self {
            child: None,
            folder,
        };
        let words = [
            "import",
            "--firecracker",
            "-D",
            "0",
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
        server.serve("0", options);
        server
    }

    /// Serves the image in the folder `image`.
    fn serve(&mut self, image: &str, options: &[&str]) {
        let words = [
            "serve",
            "-D",
            image,
            "--socket",
            "socket",
            "--control",
            "control",
        ];
        let mut command = self.command(&[&words[..], &["-o", "../serve.log", "-v4"]].concat());
        command
            .args(options)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        self.child = Some(command.spawn().expect("it starts"));
        // Who answers also hears signals.
        wait_until("the server", SOON, || {
            let Ok(mut control) = UnixStream::connect(self.path("control")) else {
                return false;
            };
            let asked = b"GET /sessions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
            let mut answer = String::new();
            control.write_all(asked).is_ok() && control.read_to_string(&mut answer).is_ok()
        });
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_stillframe"));
        command.args(words).current_dir(self.folder.path());
        command.stdout(Stdio::null());
        command
    }

    /// A monitor with small pages and one mapping.
    fn monitor(&self, ability: &str) -> Subject {
        self.monitor_of("small", ability, "1")
    }

    fn monitor_of(&self, size: &str, ability: &str, mappings: &str) -> Subject {
        let socket = self.path("socket").display().to_string();
        Subject::start(
            "monitor",
            &[&socket, &PAGES.to_string(), size, ability, mappings],
        )
    }

    /// Asks over the control socket: the status, and the answer.
    #[track_caller]
    fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> (u16, String) {
        let mut server = UnixStream::connect(self.path("control")).expect("it listens");
        let body = body.map_or(String::new(), Value::to_string);
        let len = body.len();
        write!(
            server,
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
             Content-Type: application/json\r\nContent-Length: {len}\r\n\r\n{body}"
        )
        .expect("sent");
        let mut answer = String::new();
        server.read_to_string(&mut answer).expect("answered");
        let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
        (status.expect("a status"), body.to_owned())
    }

    #[track_caller]
    fn get(&self, path: &str) -> Value {
        let (status, body) = self.ask("GET", path, None);
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).expect("JSON")
    }

    /// The number of the session with a process, once there is one.
    #[track_caller]
    fn session(&self, pid: u32) -> u64 {
        let mut found = None;
        wait_until("the session", SOON, || {
            let sessions = self.get("/sessions");
            let mut sessions = sessions["sessions"].as_array().expect("a list").iter();
            let own = sessions.find(|one| one["pid"] == pid);
            found = own.and_then(|one| one["number"].as_u64());
            found.is_some()
        });
        found.expect("waited for")
    }

    fn pid(&self) -> u32 {
        self.child.as_ref().expect("it was started").id()
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid().cast_signed()).expect("a pid");
        kill_process(pid, signal).expect("it is there");
    }

    /// Waits for its end; the exit status.
    fn wait(&mut self) -> Option<i32> {
        let mut child = self.child.take().expect("it was started");
        child.wait().expect("a child").code()
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.path("serve.log")).unwrap_or_default()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn same(one: &Path, other: &Path) -> bool {
    std::fs::read(one).expect("a file") == std::fs::read(other).expect("a file")
}

#[test]
fn three_generations_of_a_machine_are_exact() {
    needs_root!();
    for (size, ability) in [
        ("small", "found"),
        ("small", "told"),
        ("huge", "found"),
        ("huge", "told"),
    ] {
        let what = format!("{size} {ability}");
        let reserved = (size == "huge").then(|| HugePages::reserve(2 * PAGES / 512));
        if let Some(Err(error)) = &reserved {
            eprintln!("left out: huge pages cannot be reserved: {error}");
            continue;
        }
        let mut server = Server::start(&["--prefetch", "all"]);
        let monitor = server.monitor_of(size, ability, "2");
        let number = server.session(monitor.pid());
        assert_eq!(monitor.ask("check"), "right", "{what}");
        for generation in 1..=3_u64 {
            monitor.ask(&format!(
                "write {} 3000 {} {generation}",
                generation * 100,
                40 + generation
            ));
            // Whole huge pages, one that is empty from the beginning among them.
            monitor.ask(&format!("remove {} 512", (generation - 1) * 512));
            monitor.ask(&format!(
                "write {} 100 33 {generation}",
                (generation - 1) * 512
            ));
            let path = format!("/sessions/{number}/diff");
            let dir = generation.to_string();
            let (status, told) = server.ask("PUT", &path, Some(&json!({"directory": dir})));
            assert_eq!(status, 200, "{what}: {told}");
            let told: Value = serde_json::from_str(&told).expect("JSON");
            assert!(
                told["stored_pages"]
                    .as_u64()
                    .is_some_and(|pages| pages < 200),
                "{told}"
            );
            let out = server.path("out");
            let words = ["export", "-D", &dir, "--memory", "out", "--no-sync"];
            assert!(
                server
                    .command(&words)
                    .status()
                    .expect("it starts")
                    .success()
            );
            monitor.ask(&format!("dump {}", server.path("is").display()));
            assert!(
                same(&out, &server.path("is")),
                "{what}, generation {generation}"
            );
        }
        assert_eq!(monitor.ask("check"), "right", "{what}");
        // The next server has the newest: another machine is what the first one was.
        server.signal(Signal::TERM);
        assert_eq!(server.wait(), Some(0), "{}", server.log());
        assert_eq!(
            monitor.ask("check"),
            "right",
            "{what}: it goes on without a server"
        );
        server.serve("3", &[]);
        let other = server.monitor_of(size, ability, "1");
        other.ask(&format!("dump {}", server.path("other").display()));
        assert!(same(&server.path("other"), &server.path("is")), "{what}");
        drop((monitor, other));
    }
}

#[test]
fn what_is_empty_costs_no_fault_and_everything_is_counted() {
    needs_root!();
    let server = Server::start(&[]);
    let monitor = server.monitor("missing");
    let number = server.session(monitor.pid());
    assert_eq!(monitor.ask("check"), "right");
    let (status, text) = server.ask("GET", "/metrics", None);
    assert_eq!(status, 200);
    let count = |name: &str, labels: &[&str]| {
        let lines = text.lines().filter(|line| line.starts_with(name));
        let fits = lines.filter(|line| labels.iter().all(|label| line.contains(label)));
        let numbers = fits.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok());
        numbers.sum::<f64>() as u64
    };
    let bytes = count(
        "stillframe_uffd_unregister_bytes_total",
        &["source=\"empty\""],
    );
    assert!(bytes > PAGES * 4096 / 3, "{text}");
    assert!(
        count("stillframe_uffd_unregister_total", &["source=\"empty\""]) > 0,
        "{text}"
    );
    let data = count(
        "stillframe_uffd_faults_total",
        &["outcome=\"data\"", "page_size=\"4096\""],
    );
    assert!(data > 0 && data < PAGES / 8, "{data} faults\n{text}");
    let latency = count(
        "stillframe_uffd_fault_latency_seconds_count",
        &["kind=\"missing\""],
    );
    assert!(latency >= data, "{text}");
    assert_eq!(count("stillframe_uffd_sessions", &[]), 1, "{text}");
    let session = server.get(&format!("/sessions/{number}"));
    assert_eq!(session["ability"], "missing", "{session}");
    assert_eq!(session["remaining_bytes"], 0, "{session}");
    let (status, told) = server.ask(
        "PUT",
        &format!("/sessions/{number}/diff"),
        Some(&json!({"directory": "x"})),
    );
    assert_eq!(status, 409, "{told}");
    assert!(told.contains("tells missing pages only"), "{told}");
    let (status, told) = server.ask("PUT", "/sessions/77/diff", Some(&json!({"directory": "x"})));
    assert_eq!(
        (status, told.contains("there is no session 77")),
        (404, true),
        "{told}"
    );
    let (status, _) = server.ask(
        "PUT",
        &format!("/sessions/{number}/diff"),
        Some(&json!({"dir": 1})),
    );
    assert_eq!(status, 400);
}

#[test]
fn hostile_monitors_harm_nobody_else() {
    needs_root!();
    let server = Server::start(&[]);
    let monitor = server.monitor("found");
    let at = 0x7000_0000_0000_u64;
    let list = json!([
        {"base_host_virt_addr": at, "size": 4096, "offset": 0, "page_size": 4096}
    ]);
    let list = list.to_string();
    let null = std::fs::File::open("/dev/null").expect("it is there");
    let two = [null.as_fd(), null.as_fd()];
    let three = [null.as_fd(), null.as_fd(), null.as_fd()];
    for round in 0..50 {
        let texts = [
            String::new(),
            "{}".to_owned(),
            "[".to_owned(),
            "[]".to_owned(),
            "\0\0\0".to_owned(),
            list[..round % list.len()].to_owned(),
            list.clone(),
            list.replace("4096", "12345"),
            list.replace("\"offset\":0", "\"offset\":18446744073709547520"),
            "[".repeat(2 << 20),
        ];
        for (number, text) in texts.iter().enumerate() {
            let rights: &[_] = match (round + number) % 4 {
                0 => &[],
                1 => &two[..1],
                2 => &two,
                _ => &three,
            };
            let connection = UnixStream::connect(server.path("socket")).expect("it listens");
            let along = Along {
                rights,
                ..Along::default()
            };
            // It may have been refused before all was sent.
            let _ = connection.set_write_timeout(Some(std::time::Duration::from_millis(200)));
            let _ = send(&connection, text.as_bytes(), along, 0);
        }
    }
    wait_until("all of them to be refused", SOON, || {
        server.log().matches("is refused").count() >= 490
    });
    assert_eq!(monitor.ask("check"), "right");
    assert_eq!(server.monitor("told").ask("check"), "right");
    wait_until("the other sessions to end", SOON, || {
        server.get("/sessions")["sessions"].as_array().map(Vec::len) == Some(1)
    });
}

#[test]
fn what_a_machine_wanted_is_there_before_the_next_one_asks() {
    needs_root!();
    let mut server = Server::start(&["--record"]);
    let touch = |server: &Server| {
        let monitor = server.monitor("found");
        let number = server.session(monitor.pid());
        let session = format!("/sessions/{number}");
        (monitor, session)
    };
    let resident = |server: &Server, session: &str| server.get(session)["resident_bytes"].as_u64();
    let pages = (0..300).map(|at| at * 1237 % PAGES).collect::<Vec<_>>();
    let faults = |server: &Server| {
        let (_, text) = server.ask("GET", "/metrics", None);
        let faults = text.lines().filter(|line| {
            line.starts_with("stillframe_uffd_faults_total") && line.contains("\"missing\"")
        });
        let counts = faults.filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok());
        counts.sum::<u64>()
    };
    let (monitor, session) = touch(&server);
    for page in &pages {
        monitor.ask(&format!("write {page} 1 1 3"));
    }
    let (first, wanted) = (faults(&server), resident(&server, &session));
    assert!(first > 50, "{first} faults");
    drop(monitor);
    wait_until("the session to end", SOON, || {
        server.get("/sessions")["sessions"].as_array().map(Vec::len) == Some(0)
    });
    server.signal(Signal::TERM);
    assert_eq!(server.wait(), Some(0), "{}", server.log());

    server.serve("0", &["--prefetch", "trace", "--record"]);
    let (monitor, session) = touch(&server);
    wait_until("what was wanted", SOON, || {
        resident(&server, &session) >= wanted
    });
    let bytes = resident(&server, &session);
    assert!(
        bytes < Some(PAGES * 4096 / 2),
        "only that is brought in: {bytes:?}"
    );
    let before = faults(&server);
    for page in &pages {
        monitor.ask(&format!("write {page} 1 1 3"));
    }
    let second = faults(&server) - before;
    assert!(second * 20 <= first, "{first} faults, and then {second}");
    assert_eq!(monitor.ask("check"), "right");
    // Drained, it has everything; and the image is what it was.
    server.signal(Signal::TERM);
    assert_eq!(server.wait(), Some(0), "{}", server.log());
    assert_eq!(monitor.ask("check"), "right");
    let words = ["export", "-D", "0", "--memory", "out", "--no-sync"];
    assert!(
        server
            .command(&words)
            .status()
            .expect("it starts")
            .success()
    );
    assert!(same(&server.path("out"), &server.path("memory")));
}

#[test]
fn a_killed_server_leaves_no_machine_that_waits_for_ever() {
    needs_root!();
    let mut server = Server::start(&[]);
    let monitors = ["found", "told", "missing"].map(|ability| server.monitor(ability));
    for monitor in &monitors {
        server.session(monitor.pid());
        monitor.ask("write 0 10 1 5");
    }
    server.signal(Signal::KILL);
    assert_eq!(server.wait(), None);
    for monitor in &monitors {
        wait_until("the monitor to be killed", SOON, || {
            !tree::is_alive(monitor.pid())
        });
    }
    // Its socket is in the way of nobody.
    server.serve("0", &[]);
    assert_eq!(server.monitor("found").ask("check"), "right");
}

#[test]
fn a_server_killed_at_any_moment_leaves_whole_layers_or_none() {
    needs_root!();
    for round in 0..12_u64 {
        let mut server = Server::start(&["--prefetch", "all"]);
        let monitor = server.monitor(if round % 3 == 2 { "told" } else { "found" });
        let number = server.session(monitor.pid());
        monitor.ask("write 0 4000 3 7");
        let request = format!("/sessions/{number}/diff");
        let mut asked = UnixStream::connect(server.path("control")).expect("it listens");
        let body = json!({"directory": "1"}).to_string();
        let len = body.len();
        write!(
            asked,
            "PUT {request} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\
             Content-Length: {len}\r\n\r\n{body}"
        )
        .expect("sent");
        // The moment is what is being tested: nothing else could be waited for.
        std::thread::sleep(std::time::Duration::from_micros(700 * round));
        server.signal(Signal::KILL);
        assert_eq!(server.wait(), None);
        wait_until("the monitor to be killed", SOON, || {
            !tree::is_alive(monitor.pid())
        });
        let whole = server.path("1").join("manifest.img").exists();
        let words = ["export", "-D", "1", "--memory", "out", "--no-sync"];
        let mut export = server.command(&words);
        let exported = export.stderr(Stdio::null()).status().expect("it starts");
        assert_eq!(exported.success(), whole, "round {round}");
        // What the next one is over is as it was.
        server.serve("0", &[]);
        assert_eq!(server.monitor("found").ask("check"), "right");
    }
}

#[test]
fn a_damaged_page_reaches_no_machine() {
    needs_root!();
    for (fate, prefetch, told) in [
        ("kill", "none", "is killed"),
        ("poison", "none", "is poisoned"),
        ("kill", "all", "is killed"),
        ("poison", "all", "is poisoned"),
        ("poison", "drain", "is poisoned"),
    ] {
        let mut server = Server::start(&[]);
        server.signal(Signal::TERM);
        assert_eq!(server.wait(), Some(0), "{}", server.log());
        let files = std::fs::read_dir(server.path("0")).expect("an image");
        let files = files.map(|file| file.expect("a file").path());
        let pages = files.filter(|path| path.to_string_lossy().contains("pages-"));
        for path in pages {
            let mut bytes = std::fs::read(&path).expect("read");
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            std::fs::write(&path, bytes).expect("written");
        }
        let early = if prefetch == "all" { "all" } else { "none" };
        server.serve("0", &["--on-error", fate, "--prefetch", early]);
        let monitor = server.monitor("found");
        if prefetch == "drain" {
            server.session(monitor.pid());
            server.signal(Signal::TERM);
            assert_eq!(server.wait(), Some(0), "{}", server.log());
        }
        let answer = monitor.try_ask("check");
        assert!(answer.is_err(), "{fate} {prefetch}: {answer:?}");
        wait_until("the monitor to end", SOON, || {
            !tree::is_alive(monitor.pid())
        });
        let log = server.log();
        assert!(
            log.contains(told) && log.contains("checksum"),
            "{fate} {prefetch}: {log}"
        );
        if prefetch != "drain" {
            wait_until("its session to end", SOON, || {
                server.get("/sessions")["sessions"].as_array().map(Vec::len) == Some(0)
            });
        }
    }
}

#[test]
fn many_machines_are_served_at_once() {
    needs_root!();
    let server = Server::start(&[]);
    let monitors = (0..12).map(|number| {
        let ability = ["found", "told", "missing"][number % 3];
        server.monitor_of("small", ability, &(1 << (number % 4)).to_string())
    });
    let monitors = monitors.collect::<Vec<_>>();
    std::thread::scope(|scope| {
        for (number, monitor) in monitors.iter().enumerate() {
            scope.spawn(move || {
                monitor.ask(&format!("write {number} 4000 {} 9", 50 + number));
                monitor.ask(&format!("remove {} 300", 200 * number));
                assert_eq!(monitor.ask("check"), "right");
            });
        }
    });
    // One dies, the others do not notice.
    tree::kill(&[monitors[0].pid()]);
    wait_until("its session to end", SOON, || {
        server.get("/sessions")["sessions"].as_array().map(Vec::len) == Some(11)
    });
    assert_eq!(monitors[1].ask("check"), "right");
}
