//! `serve`: differences of machines that run on, exactly of the moment of the request.

use std::io::Write as _;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Stdio;

use rustix::process::Signal;
use serde_json::{Value, json};
use testkit::huge_pages::HugePages;
use testkit::needs_root;
use testkit::page_server::PageServer;
use testkit::subject::Subject;
use testkit::tree;
use testkit::wait::{SOON, wait_until};

use super::refusals::SmallDisk;

/// Pages of the memory: 16 MiB.
const PAGES: u64 = 4096;

/// Pages of one that takes a while to be copied: 128 MiB.
const MUCH: u64 = 1 << 15;

/// A server of an image of so many pages.
fn server(pages: u64, options: &[&str]) -> PageServer {
    let mut server = PageServer::new(Path::new(env!("CARGO_BIN_EXE_stillframe")), pages);
    server.serve("0", options);
    server
}

/// Does `test` with monitors of each kind of memory whose writes are tracked.
fn each(test: impl Fn(&str, &str, &str)) {
    for kind in ["small", "huge", "small-shared", "huge-shared"] {
        let reserved = (kind.starts_with("huge")).then(|| HugePages::reserve(2 * PAGES / 512));
        if let Some(Err(error)) = &reserved {
            eprintln!("left out: huge pages cannot be reserved: {error}");
            continue;
        }
        for ability in ["told", "found"] {
            test(kind, ability, &format!("{kind} {ability}"));
        }
    }
}

/// Asks for a live difference; the status and the answer.
fn ask(server: &PageServer, session: u64, directory: &str) -> (u16, String) {
    let path = format!("/sessions/{session}/diff");
    let body = json!({"directory": directory, "live": true});
    server.ask("PUT", &path, Some(&body))
}

#[test]
fn generations_of_a_machine_that_runs_are_exact() {
    needs_root!();
    each(|kind, ability, what| {
        let mut server = server(PAGES, &["--prefetch", "all"]);
        let monitor = server.monitor_of(kind, ability, "2");
        let number = server.session(monitor.pid());
        let (status, told) = server.ask("GET", &format!("/sessions/{number}/diff"), None);
        assert_eq!(status, 404, "{told}");
        for generation in 1..=4_u64 {
            monitor.ask(&format!("write {} 3000 7 {generation}", generation * 100));
            monitor.ask(&format!("remove {} 512", (generation - 1) * 512));
            monitor.ask(&format!(
                "write {} 100 33 {generation}",
                generation * 512 - 300
            ));
            server.keep(&monitor);
            let begun = server.diff_live(number, &generation.to_string());
            assert!(begun["wanted_bytes"].as_u64() > Some(0), "{begun}");
            // It goes on at once.
            assert_eq!(
                monitor.ask(&format!("fire {generation} 150")),
                "right",
                "{what}"
            );
            let copied = server.copied(number);
            let directory = server.path(&generation.to_string());
            assert_eq!(copied["directory"], json!(directory), "{copied}");
            assert!(
                copied["difference"]["stored_pages"].as_u64() > Some(0),
                "{copied}"
            );
            server.compare_kept(&generation.to_string(), what);
        }
        // One that is not live is over it.
        server.diff(number, "5");
        server.compare("5", &monitor, what);
        assert_eq!(monitor.ask("check"), "right", "{what}");
        drop(monitor);
        server.signal(Signal::TERM);
        assert_eq!(server.wait(), Some(0), "{}", server.log());
        server.serve("5", &[]);
        let other = server.monitor_of(kind, ability, "1");
        server.compare("5", &other, what);
    });
}

/// What a guest has filled it finds again, although it has filled it with something else at once.
#[test]
fn a_guest_goes_on_at_once_and_another_one_from_where_it_was() {
    needs_root!();
    for kind in ["small", "huge"] {
        let reserved = (kind == "huge").then(|| HugePages::reserve(2 * PAGES / 512));
        if let Some(Err(error)) = &reserved {
            eprintln!("left out: huge pages cannot be reserved: {error}");
            continue;
        }
        for ability in ["told", "found"] {
            let what = format!("{kind} {ability}");
            let mut server = server(PAGES, &[]);
            let monitor = server.monitor_of(kind, ability, "2");
            let number = server.session(monitor.pid());
            let mut layers = Vec::new();
            for seed in 1..=3_u64 {
                let first = seed * 600;
                let told = monitor.ask(&format!("guest fill {first} 1100 {seed}"));
                if told == "no KVM" {
                    testkit::skip!("no /dev/kvm");
                }
                assert_eq!(told, "right", "{what}");
                server.keep(&monitor);
                server.diff_live(number, &seed.to_string());
                let again = format!("{first} 1100 {}", seed + 100);
                assert_eq!(
                    monitor.ask(&format!("guest fill {again}")),
                    "right",
                    "{what}"
                );
                server.copied(number);
                server.compare_kept(&seed.to_string(), &what);
                assert_eq!(
                    monitor.ask(&format!("guest verify {again}")),
                    "right",
                    "{what}"
                );
                layers.push((seed, format!("guest verify {first} 1100 {seed}")));
            }
            drop(monitor);
            server.signal(Signal::TERM);
            assert_eq!(server.wait(), Some(0), "{}", server.log());
            for (layer, question) in layers {
                server.serve(&layer.to_string(), &[]);
                let other = server.monitor_of(kind, ability, "1");
                assert_eq!(other.ask(&question), "right", "{what}, layer {layer}");
                drop(other);
                server.signal(Signal::TERM);
                assert_eq!(server.wait(), Some(0), "{}", server.log());
            }
        }
    }
}

/// A server of [`MUCH`] memory with a monitor that has written everything.
fn slow() -> (PageServer, Subject, u64) {
    let server = server(MUCH, &[]);
    let monitor = server.monitor_of("small", "told", "1");
    let number = server.session(monitor.pid());
    monitor.ask(&format!("write 0 {MUCH} 1 1"));
    (server, monitor, number)
}

#[test]
fn a_second_difference_is_refused_while_one_is_copied() {
    needs_root!();
    let (server, monitor, number) = slow();
    // It may be copied before the next request is there.
    let refused = (1..20).find_map(|layer: u64| {
        server.diff_live(number, &layer.to_string());
        let live = ask(&server, number, "x");
        let path = format!("/sessions/{number}/diff");
        let other = server.ask("PUT", &path, Some(&json!({"directory": "y"})));
        let still = server.get(&path)["state"] == "copying";
        server.copied(number);
        monitor.ask(&format!("write 0 {MUCH} 1 {layer}"));
        still.then_some([live, other])
    });
    for (status, told) in refused.expect("one of 20 was not copied at once") {
        assert_eq!(status, 409, "{told}");
        assert!(told.contains("is not copied yet"), "{told}");
    }
    server.diff(number, "last");
    server.compare("last", &monitor, "the last one");
    let missing = server.monitor("missing");
    let (status, told) = ask(&server, server.session(missing.pid()), "y");
    assert_eq!(status, 409, "{told}");
    assert!(told.contains("tells missing pages only"), "{told}");
}

#[test]
fn a_server_that_is_drained_copies_first() {
    needs_root!();
    let (mut server, monitor, number) = slow();
    server.keep(&monitor);
    server.diff_live(number, "1");
    server.signal(Signal::TERM);
    assert_eq!(monitor.ask("fire 1 100"), "right");
    assert_eq!(server.wait(), Some(0), "{}", server.log());
    server.compare_kept("1", "drained");
    assert_eq!(monitor.ask("check"), "right");
    // Told twice it does not, and the machine does not go on without its pages.
    let (mut server, monitor, number) = slow();
    server.diff_live(number, "1");
    server.signal(Signal::TERM);
    wait_until("it to hear that", SOON, || !server.path("socket").exists());
    server.signal(Signal::TERM);
    assert_eq!(server.wait(), Some(0), "{}", server.log());
    is_whole_or_none(&server, "told twice");
    drop(monitor);
}

/// Insists that layer 1 can be exported if it has a manifest, and not otherwise; whether it has.
fn is_whole_or_none(server: &PageServer, what: &str) -> bool {
    let whole = server.path("1").join("manifest.img").exists();
    let words = ["export", "-D", "1", "--memory", "out", "--no-sync"];
    let mut export = server.command(&words);
    let exported = export.stderr(Stdio::null()).status().expect("it starts");
    assert_eq!(exported.success(), whole, "{what}");
    whole
}

#[test]
fn a_server_killed_while_it_copies_leaves_a_whole_layer_or_none() {
    needs_root!();
    for round in 0..8_u64 {
        let (mut server, monitor, number) = slow();
        server.keep(&monitor);
        let request = format!("/sessions/{number}/diff");
        let mut asked = UnixStream::connect(server.path("control")).expect("it listens");
        let body = json!({"directory": "1", "live": true}).to_string();
        let len = body.len();
        write!(
            asked,
            "PUT {request} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n\
             Content-Length: {len}\r\n\r\n{body}"
        )
        .expect("sent");
        // The moment is what is being tested: nothing else could be waited for.
        std::thread::sleep(std::time::Duration::from_millis(30 * round));
        server.signal(Signal::KILL);
        assert_eq!(server.wait(), None);
        wait_until("the monitor to be killed", SOON, || {
            !tree::is_alive(monitor.pid())
        });
        if is_whole_or_none(&server, &format!("round {round}")) {
            server.compare_kept("1", &format!("round {round}"));
        }
        server.serve("0", &[]);
        assert_eq!(server.monitor("found").ask("write 0 10 1 1"), "");
    }
}

#[test]
fn a_machine_that_ends_while_it_is_copied_leaves_no_layer() {
    needs_root!();
    let (server, monitor, number) = slow();
    server.diff_live(number, "1");
    tree::kill(&[monitor.pid()]);
    wait_until("its session to end", SOON, || server.sessions() == 0);
    is_whole_or_none(&server, "ended");
    // Its place is free.
    let other = server.monitor_of("small", "told", "1");
    other.ask("write 0 1000 1 2");
    server.keep(&other);
    let number = server.session(other.pid());
    server.diff_live(number, "1");
    server.copied(number);
    server.compare_kept("1", "the next machine");
}

#[test]
fn what_does_not_fit_on_the_disk_is_in_the_next_difference() {
    needs_root!();
    for size in ["16k", "300k", "6m"] {
        let Some(disk) = SmallDisk::of(size) else {
            testkit::skip!("no tmpfs can be mounted");
        };
        let server = server(PAGES, &[]);
        let monitor = server.monitor_of("small", "told", "1");
        let number = server.session(monitor.pid());
        monitor.ask("write 0 4096 1 1");
        let directory = disk.path().join("1").display().to_string();
        let (status, told) = ask(&server, number, &directory);
        assert_eq!(monitor.ask("fire 1 100"), "right", "{size}");
        if status == 202 {
            let mut told = Value::Null;
            wait_until("the copy to fail", SOON, || {
                told = server.get(&format!("/sessions/{number}/diff"));
                told["state"] != "copying"
            });
            assert_eq!(told["state"], "failed", "{size}: {told}");
            let error = told["error"].as_str().expect("it says why");
            assert!(error.contains("No space left"), "{size}: {error}");
        } else {
            assert!(told.contains("No space left"), "{size}: {status} {told}");
        }
        assert!(!disk.path().join("1").join("manifest.img").exists());
        server.keep(&monitor);
        server.diff_live(number, "1");
        assert_eq!(monitor.ask("fire 2 100"), "right", "{size}");
        server.copied(number);
        server.compare_kept("1", size);
        assert_eq!(monitor.ask("check"), "right", "{size}");
    }
}
