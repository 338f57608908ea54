//! `serve`: monitors that hand their memory over get it, and what they change is told exactly.

use std::io::Write as _;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;

use rustix::process::Signal;
use serde_json::{Value, json};
use sys::socket::{Along, send};
use testkit::huge_pages::{HugePageBar, HugePages};
use testkit::page_server::PageServer;
use testkit::serve_storm;
use testkit::subject::Subject;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_root, tree};

/// Pages of the memory: 16 MiB.
const PAGES: u64 = 4096;

/// An image of that, and a server of it.
struct Server(PageServer);

impl Server {
    fn start(options: &[&str]) -> Self {
        let mut server = PageServer::new(Path::new(env!("CARGO_BIN_EXE_stillframe")), PAGES);
        server.serve("0", options);
        Self(server)
    }
}

impl Deref for Server {
    type Target = PageServer;

    fn deref(&self) -> &PageServer {
        &self.0
    }
}

impl DerefMut for Server {
    fn deref_mut(&mut self) -> &mut PageServer {
        &mut self.0
    }
}

/// The quick share of `cargo xtask serve-storm`.
#[test]
fn attacks_are_withstood() {
    needs_root!();
    let stillframe = Path::new(env!("CARGO_BIN_EXE_stillframe"));
    serve_storm::malformed(stillframe, 1, 60);
    serve_storm::crowd(stillframe, 25);
    serve_storm::kills(stillframe, 1, 12);
    serve_storm::fire(stillframe, 1, 15);
}

/// A server that gets no huge pages, and a monitor whose memory has them reserved.
fn starved(barred: &HugePageBar, options: &[&str]) -> (Server, Subject) {
    let server = Server::start(options);
    barred.add(server.pid()).expect("it is there");
    let monitor = server.monitor_of("huge", "missing", "1");
    server.session(monitor.pid());
    (server, monitor)
}

/// Waits until it logs that.
#[track_caller]
fn logs(server: &Server, what: &str) {
    wait_until("the log", SOON, || server.log().contains(what));
}

#[test]
fn huge_page_that_cannot_be_had_ends_the_machine_by_name() {
    needs_root!();
    let Ok(_pages) = HugePages::reserve(PAGES / 512) else {
        testkit::skip!("huge pages cannot be reserved");
    };
    let Ok(barred) = HugePageBar::new() else {
        testkit::skip!("no control groups for huge pages");
    };
    let missing = "cannot be brought in: of ";
    // A thread waits for a huge page.
    let (mut server, monitor) = starved(&barred, &[]);
    assert!(monitor.try_ask("check").is_err(), "it reads nothing");
    logs(&server, missing);
    assert_eq!(server.get("/sessions")["sessions"], json!([]));
    let there = r#"outcome="there""#;
    assert!(!server.ask("GET", "/metrics", None).1.contains(there));
    server.signal(Signal::TERM);
    assert_eq!(server.wait(), Some(0));
    // A thread gets `SIGBUS` for the missing huge page.
    let (mut server, monitor) = starved(&barred, &["--on-error", "poison"]);
    assert!(monitor.try_ask("check").is_err(), "it reads nothing");
    logs(&server, "is poisoned: ");
    logs(&server, missing);
    server.signal(Signal::TERM);
    assert_eq!(server.wait(), Some(0));
    // A drain, of which pages are missing.
    let (mut server, monitor) = starved(&barred, &[]);
    assert_eq!(server.ask("PUT", "/drain", None).0, 204);
    assert_eq!(server.wait(), Some(0));
    logs(&server, missing);
    assert!(monitor.try_ask("check").is_err(), "it reads nothing");
}

#[test]
fn huge_pages_that_come_late_are_waited_for() {
    needs_root!();
    let Ok(_pages) = HugePages::reserve(PAGES / 512) else {
        testkit::skip!("huge pages cannot be reserved");
    };
    let Ok(barred) = HugePageBar::new() else {
        testkit::skip!("no control groups for huge pages");
    };
    // A prefetch finds no huge page either, which is no reason to end the machine.
    let (server, monitor) = starved(&barred, &["--prefetch", "all"]);
    logs(&server, "nothing more is brought in early");
    drop(barred);
    assert_eq!(monitor.ask("check"), "right");
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

/// A guest writes, verifies, and is given memory again by another server.
#[test]
fn a_guest_finds_what_it_wrote_in_three_generations() {
    needs_root!();
    for kind in ["small", "huge"] {
        let reserved = (kind == "huge").then(|| HugePages::reserve(2 * PAGES / 512));
        if let Some(Err(error)) = &reserved {
            eprintln!("left out: huge pages cannot be reserved: {error}");
            continue;
        }
        for ability in ["found", "told", "missing"] {
            let what = format!("{kind} {ability}");
            let mut server = Server::start(&[]);
            let monitor = server.monitor_of(kind, ability, "2");
            let number = server.session(monitor.pid());
            let mut filled = Vec::new();
            for generation in 1..=3_u64 {
                // Over what is data and what is empty; two whole huge pages of that are given up.
                let (first, pages, seed) = (generation * 600, 1100, 77 * generation);
                let told = monitor.ask(&format!("guest fill {first} {pages} {seed}"));
                if told == "no KVM" {
                    testkit::skip!("no /dev/kvm");
                }
                assert_eq!(told, "right", "{what}");
                let gone = (first.div_ceil(512) * 512, 512);
                assert_eq!(monitor.ask(&format!("remove {} {}", gone.0, gone.1)), "");
                assert_eq!(
                    monitor.ask(&format!("guest zero {} {}", gone.0, gone.1)),
                    "right"
                );
                filled = vec![
                    format!("guest verify {first} {} {seed}", gone.0 - first),
                    format!("guest zero {} {}", gone.0, gone.1),
                    format!(
                        "guest verify {} {} {seed}",
                        gone.0 + gone.1,
                        first + pages - gone.0 - gone.1
                    ),
                ];
                for question in &filled {
                    assert_eq!(monitor.ask(question), "right", "{what}: {question}");
                }
                assert_eq!(monitor.ask("check"), "right", "{what}");
                if ability != "missing" {
                    // The virtual processor stands still: what it has changed is told exactly.
                    server.diff(number, &generation.to_string());
                    server.compare(&generation.to_string(), &monitor, &what);
                }
            }
            drop(monitor);
            if ability == "missing" {
                continue;
            }
            server.signal(Signal::TERM);
            assert_eq!(server.wait(), Some(0), "{}", server.log());
            server.serve("3", &[]);
            let other = server.monitor_of(kind, ability, "1");
            for question in &filled {
                assert_eq!(other.ask(question), "right", "{what}, again: {question}");
            }
        }
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
    assert_eq!(count("stillframe_uffd_remaining_bytes", &[]), 0, "{text}");
    let known = count("stillframe_uffd_resident_bytes", &[]);
    assert_eq!(known + bytes, PAGES * 4096, "{text}");
    assert_eq!(count("stillframe_uffd_native_bytes", &[]), bytes, "{text}");
    every_metric_is_in_the_docs(&text);
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

/// What the server tells is listed in docs/serve.md, and what that and the dashboard name is told.
fn every_metric_is_in_the_docs(text: &str) {
    let docs = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs");
    let read = |name: &str| std::fs::read_to_string(docs.join(name)).expect("it is there");
    let lines = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
    let told = lines.map(|line| {
        let (name, kind) = line.split_once(' ').expect("a name and a kind");
        let suffix = if kind == "counter" { "_total" } else { "" };
        format!("{name}{suffix}")
    });
    let told = told.collect::<std::collections::BTreeSet<_>>();
    let table = read("serve.md");
    let rows = table
        .lines()
        .filter(|line| line.starts_with("| `stillframe_uffd_"));
    let mut listed = std::collections::BTreeSet::new();
    for row in rows {
        let names = row.split('|').nth(1).expect("a column").split(',');
        let mut first = "";
        for name in names.map(|name| name.trim().trim_matches('`')) {
            match name.strip_prefix('_') {
                Some(rest) => listed.insert(format!("{first}_{rest}")),
                None => listed.insert(name.to_owned()),
            };
            first = if name.starts_with('_') {
                first
            } else {
                name.strip_suffix("_total").unwrap_or(name)
            };
        }
    }
    assert_eq!(listed, told);
    let dashboard: Value = serde_json::from_str(&read("serve-dashboard.json")).expect("JSON");
    let panels = dashboard["panels"].as_array().expect("panels").iter();
    let targets = panels.flat_map(|panel| panel["targets"].as_array().expect("targets"));
    let mut shown = std::collections::BTreeSet::new();
    for target in targets {
        let expr = target["expr"].as_str().expect("an expression");
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let words = expr.split(|c| !is_name(c));
        for name in words.filter(|word| word.starts_with("stillframe_")) {
            let name = name.strip_suffix("_bucket").unwrap_or(name);
            assert!(told.contains(name), "{name} is nowhere told: {expr}");
            shown.insert(name.to_owned());
        }
    }
    assert_eq!(shown, told, "the dashboard shows all");
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
fn machines_that_share_hold_what_they_read_once() {
    needs_root!();
    let stillframe = Path::new(env!("CARGO_BIN_EXE_stillframe"));
    let held_bytes = serve_storm::shared(stillframe, 12);
    assert!(held_bytes <= PAGES * 4096, "{held_bytes} bytes");
    assert!(held_bytes > PAGES * 4096 / 4, "{held_bytes} bytes");
}

#[test]
fn machines_that_share_are_served_to_their_end() {
    needs_root!();
    let mut server = Server::start(&["--share"]);
    let monitor = server.monitor_of("small-cached", "found", "2");
    let other = server.monitor("told");
    server.session(monitor.pid());
    server.session(other.pid());
    monitor.ask("remove 0 1000");
    server.signal(Signal::TERM);
    wait_until("the other one's session to end", SOON, || {
        server.sessions() == 1
    });
    assert_eq!(other.ask("check"), "right");
    // What it gave up would be the image's without us.
    assert_eq!(monitor.ask("check"), "right");
    monitor.ask("remove 1000 1000");
    assert_eq!(monitor.ask("check"), "right");
    drop(monitor);
    assert_eq!(server.wait(), Some(0), "{}", server.log());
    let words = [
        "serve",
        "-D",
        "0",
        "--socket",
        "x",
        "--share",
        "--on-exit",
        "keep",
    ];
    let refused = server.command(&words).output().expect("it starts");
    let told = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(told.contains("cannot be left to another server"), "{told}");
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
