//! Attacks on the page server of microVMs: hostile and many monitors, kills, everything at once.
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use rustix::process::Signal;
use serde_json::json;

use crate::chance::Chance;
use crate::huge_pages::HugePages;
use crate::page_server::{PageServer, ask};
use crate::program::{Program, Spawned};
use crate::subject::{self, Subject};
use crate::wait::{SOON, wait_until};

/// Pages of small machines: 4 MiB.
const SMALL: u64 = 1024;
/// Pages of those that are shot at: 16 MiB, so that each of four threads has two huge pages.
const PAGES: u64 = 4096;
/// What their userfaultfds can do.
const ABILITIES: [&str; 3] = ["found", "told", "missing"];
/// The kinds of their memory; the last is a mapping of what the server offers to share.
const KINDS: [&str; 5] = [
    "small",
    "huge",
    "small-shared",
    "huge-shared",
    "small-cached",
];
/// Those that another server can go on with.
const KEPT_KINDS: usize = 4;

/// So many malformed hand-offs, made from seeds from `seed` on: nobody else notices, and nothing of
/// them stays.
///
/// # Panics
/// As all here: when the server does not withstand.
pub fn malformed(stillframe: &Path, seed: u64, count: u64) {
    let mut server = PageServer::new(stillframe, SMALL);
    server.serve("0", &[]);
    let monitor = server.monitor("found");
    server.session(monitor.pid());
    let held = |server: &PageServer| {
        ["fd", "task"].map(|what| {
            let entries = fs::read_dir(format!("/proc/{}/{what}", server.pid()));
            entries.expect("it runs").count()
        })
    };
    let before = held(&server);
    let socket = server.path("socket").display().to_string();
    let hostile = Subject::start("hostile", &[&socket, &SMALL.to_string()]);
    for seed in seed..seed + count {
        let told = hostile.ask(&format!("attack {seed}"));
        assert_eq!(told, "done", "seed {seed}: {}", server.log());
        if seed % 50 == 0 {
            assert_eq!(monitor.ask("check"), "right", "up to seed {seed}");
        }
    }
    wait_until("the other sessions to end", SOON, || server.sessions() == 1);
    wait_until("what they held to be given back", SOON, || {
        let now = held(&server);
        now[0] <= before[0] && now[1] <= before[1]
    });
    assert_eq!(monitor.ask("check"), "right");
    assert_eq!(server.monitor("told").ask("check"), "right");
}

/// So many sessions at once over one image.
pub fn crowd(stillframe: &Path, count: usize) {
    let mut server = PageServer::new(stillframe, SMALL);
    server.serve("0", &[]);
    let monitors = (0..count).map(|number| {
        let kind = if number % 4 == 3 {
            "small-shared"
        } else {
            "small"
        };
        server.monitor_of(
            kind,
            ABILITIES[number % 3],
            &(1 << (number % 4)).to_string(),
        )
    });
    let monitors = monitors.collect::<Vec<_>>();
    wait_until("all sessions", SOON, || server.sessions() == count);
    std::thread::scope(|scope| {
        for (number, monitor) in monitors.iter().enumerate() {
            scope.spawn(move || {
                assert_eq!(monitor.ask(&format!("fire {number} 20")), "right");
                assert_eq!(monitor.ask("check"), "right", "monitor {number}");
            });
        }
    });
    let tracked = monitors
        .iter()
        .enumerate()
        .filter(|(number, _)| number % 3 != 2);
    for (number, monitor) in tracked.step_by(10) {
        let directory = format!("of-{number}");
        server.diff(server.session(monitor.pid()), &directory);
        server.compare(&directory, monitor, &directory);
    }
    drop(monitors);
    wait_until("all sessions to end", SOON, || server.sessions() == 0);
}

/// A monitor that only reads, started without waiting for it.
fn watching(server: &PageServer, folder: &Path, ability: &str, last: &str) -> Spawned {
    fs::create_dir_all(folder).expect("a folder");
    fs::write(folder.join("control"), "").expect("a file");
    Program::new(subject::binary())
        .arg("monitor")
        .arg(folder)
        .arg(server.path("socket"))
        .args([&SMALL.to_string(), "small", ability, "2", last])
        .output(&folder.join("output"))
        .spawn()
}

/// Kills the server at `count` random instants: no monitor reads a wrong byte, and none hangs.
pub fn kills(stillframe: &Path, seed: u64, count: u64) {
    let mut chance = Chance::with(seed);
    let mut server = PageServer::new(stillframe, SMALL);
    for round in 0..count {
        let prefetch = chance.pick(&["none", "all"]);
        server.serve("0", &["--prefetch", prefetch]);
        let folders = (0..3).map(|number| server.path(&format!("watching-{round}-{number}")));
        let folders = folders.collect::<Vec<_>>();
        let monitors = folders.iter().map(|folder| {
            let last = chance.pick(&["watch", "watch-alone"]);
            watching(&server, folder, chance.pick(&ABILITIES), last)
        });
        let monitors = monitors.collect::<Vec<_>>();
        // The moment is what is being tested: nothing else could be waited for.
        std::thread::sleep(Duration::from_micros(chance.below(40_000)));
        server.signal(Signal::KILL);
        assert_eq!(server.wait(), None);
        for (monitor, folder) in monitors.iter().zip(&folders) {
            // Who came too late to be served has ended by itself.
            wait_until("the monitor to end", SOON, || !monitor.is_alive());
            let wrong = fs::read_to_string(folder.join("wrong"));
            assert!(wrong.is_err(), "round {round}: {wrong:?}");
        }
        drop(monitors);
    }
    server.serve("0", &[]);
    assert_eq!(server.monitor("found").ask("check"), "right");
}

/// So many rounds of everything at once: four threads that read, write and give pages up, pages
/// that are brought in early, and differences; in the end every page is looked at.
pub fn fire(stillframe: &Path, seed: u64, rounds: u64) {
    let huge = HugePages::reserve(2 * PAGES / 512);
    if let Err(error) = &huge {
        eprintln!("left out: huge pages cannot be reserved: {error}");
    }
    let mut chance = Chance::with(seed);
    for round in 0..rounds {
        let kind = KINDS[round as usize % KINDS.len()];
        let ability = ABILITIES[round as usize / KINDS.len() % 3];
        if huge.is_err() && kind.starts_with("huge") {
            continue;
        }
        let what = format!("seed {seed}, round {round}, {kind} {ability}");
        let mut server = PageServer::new(stillframe, PAGES);
        let unregister: &[&str] = match chance.once_in(4) {
            true => &["--no-unregister"],
            false => &[],
        };
        let share: &[&str] = match kind == "small-cached" {
            true => &["--share"],
            false => &[],
        };
        server.serve("0", &[&["--prefetch", "all"], unregister, share].concat());
        let monitor = server.monitor_of(kind, ability, "2");
        let session = server.session(monitor.pid());
        let mut layers = Layers {
            server: &server,
            session,
            count: 0,
        };
        for shots in 0..3 {
            let question = format!("fire {} 200", seed * 10_000 + round * 10 + shots);
            let told = match ability {
                "missing" => monitor.try_ask(&question),
                _ => layers.volley(&monitor, &question, &mut chance, &what),
            };
            assert_eq!(told.as_deref(), Ok("right"), "{what}: {}", server.log());
        }
        if ability == "missing" {
            let path = format!("/sessions/{session}/diff");
            let (status, _) = server.ask("PUT", &path, Some(&json!({"directory": "x"})));
            assert_eq!(status, 409, "{what}");
        } else {
            let last = layers.add(false);
            server.compare(&last, &monitor, &what);
        }
        assert_eq!(monitor.ask("check"), "right", "{what}");
    }
}

/// The differences of a session, one over the other.
struct Layers<'a> {
    server: &'a PageServer,
    session: u64,
    count: u64,
}

impl Layers<'_> {
    /// Makes another one, or begins to, where it is live; its folder.
    fn add(&mut self, live: bool) -> String {
        self.count += 1;
        let directory = self.count.to_string();
        match live {
            true => self.server.diff_live(self.session, &directory),
            false => self.server.diff(self.session, &directory),
        };
        directory
    }

    /// Asks a monitor something while differences are made: what it answers.
    fn volley(
        &mut self,
        monitor: &Subject,
        question: &str,
        chance: &mut Chance,
        what: &str,
    ) -> Result<String, String> {
        // The memory of this instant, copied while it is shot at.
        let of_now = chance.once_in(2).then(|| {
            self.server.keep(monitor);
            self.add(true)
        });
        let done = AtomicBool::new(false);
        let told = std::thread::scope(|scope| {
            let asking = scope.spawn(|| {
                let told = monitor.try_ask(question);
                done.store(true, Relaxed);
                told
            });
            let mut copying = of_now.is_some();
            // Of a machine that runs, a difference has something of each page: it is the last one
            // that has to be right.
            while !done.load(Relaxed) && self.count < 12 {
                if std::mem::take(&mut copying) {
                    self.server.copied(self.session);
                }
                copying = chance.once_in(2);
                self.add(copying);
            }
            if copying {
                self.server.copied(self.session);
            }
            asking.join().expect("it does not panic")
        });
        if let Some(layer) = of_now {
            self.server.compare_kept(&layer, what);
        }
        told
    }
}

/// How a server is replaced.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// The next one asks it to leave.
    Asked,
    /// It is told to end.
    Told,
    /// It is killed.
    Killed,
    /// It is killed, and so is the next one when it begins.
    KilledTwice,
}

/// So many rounds of fire as in [`fire`], while the server is replaced over and over, in all ways:
/// nobody reads a wrong byte, no monitor ends, and differences are exact.
pub fn successions(stillframe: &Path, seed: u64, rounds: u64) {
    const CHANGES: [Change; 4] = [
        Change::Asked,
        Change::Told,
        Change::Killed,
        Change::KilledTwice,
    ];
    let huge = HugePages::reserve(2 * PAGES / 512);
    if let Err(error) = &huge {
        eprintln!("left out: huge pages cannot be reserved: {error}");
    }
    let mut chance = Chance::with(seed);
    for round in 0..rounds {
        let kind = KINDS[round as usize % KEPT_KINDS];
        let ability = ABILITIES[(round / 4 % 3) as usize];
        if huge.is_err() && kind.starts_with("huge") {
            continue;
        }
        let mut server = PageServer::new(stillframe, PAGES);
        let options = options_of(&mut chance);
        server.serve("0", &options);
        let monitor = server.monitor_of(kind, ability, "2");
        let session = server.session(monitor.pid());
        let mut what = format!("seed {seed}, round {round}, {kind} {ability}:");
        let mut layers = 0;
        for shots in 0..4 {
            let change = chance.pick(&CHANGES);
            what.push_str(&format!(" {change:?}"));
            let question = format!("fire {} 600", seed * 10_000 + round * 10 + shots);
            let control = server.path("control");
            let told = std::thread::scope(|scope| {
                let asking = scope.spawn(|| monitor.try_ask(&question));
                if ability != "missing" && chance.once_in(2) {
                    layers += 1;
                    let (layer, control) = (layers, &control);
                    let live = chance.once_in(2);
                    scope.spawn(move || {
                        // Whether it is answered, and what becomes of it, is not known.
                        let path = format!("/sessions/{session}/diff");
                        let body = json!({"directory": layer.to_string(), "live": live});
                        ask(control, "PUT", &path, Some(&body))
                    });
                }
                replace(&mut server, change, &mut chance);
                asking.join().expect("it does not panic")
            });
            assert_eq!(told.as_deref(), Ok("right"), "{what}: {}", server.log());
            wait_until("a live difference to be copied", SOON, || {
                let told = ask(&control, "GET", &format!("/sessions/{session}/diff"), None);
                !told.is_some_and(|(_, told)| told.contains("\"copying\""))
            });
            if ability != "missing" && chance.once_in(2) {
                layers += 1;
                server.diff(session, &layers.to_string());
                server.compare(&layers.to_string(), &monitor, &what);
            }
        }
        assert_eq!(server.session(monitor.pid()), session, "{what}");
        assert_eq!(monitor.ask("check"), "right", "{what}");
        if ability != "missing" {
            layers += 1;
            server.diff(session, &layers.to_string());
            server.compare(&layers.to_string(), &monitor, &what);
        }
    }
}

fn options_of(chance: &mut Chance) -> Vec<&'static str> {
    let mut options = vec!["--on-exit", "keep", "--prefetch"];
    options.push(chance.pick(&["none", "all"]));
    if chance.once_in(4) {
        options.push("--no-unregister");
    }
    options
}

/// Replaces the server at a random instant; meanwhile another monitor may connect.
fn replace(server: &mut PageServer, change: Change, chance: &mut Chance) {
    // The moment is what is being tested: nothing else could be waited for.
    let mut wait = |most: u64| std::thread::sleep(Duration::from_micros(chance.below(most)));
    wait(30_000);
    match change {
        Change::Asked => {}
        Change::Told => server.signal(Signal::TERM),
        Change::Killed | Change::KilledTwice => {
            server.signal(Signal::KILL);
            assert_eq!(server.wait(), None);
        }
    }
    if matches!(change, Change::KilledTwice) {
        let options = ["--on-exit", "keep", "--take-over", "socket.keep"];
        let mut next = server.spawn("0", &options);
        wait(40_000);
        next.kill().expect("it is there");
        next.wait().expect("a child");
    }
    wait(3_000);
    let late = chance
        .once_in(3)
        .then(|| server.monitor_of("small", "found", "1"));
    let options = options_of(chance);
    server.succeed("0", &options);
    if let Some(late) = late {
        assert_eq!(late.ask("check"), "right");
    }
}

/// So many machines that share what they read, and write here and there: what they hold together,
/// in bytes.
pub fn shared(stillframe: &Path, count: u64) -> u64 {
    let mut server = PageServer::new(stillframe, PAGES);
    server.serve("0", &["--share"]);
    let monitors = (0..count).map(|number| {
        let ability = ABILITIES[number as usize % 3];
        server.monitor_of("small-cached", ability, "1")
    });
    let monitors = monitors.collect::<Vec<_>>();
    for (number, monitor) in monitors.iter().enumerate() {
        assert_eq!(monitor.ask("check"), "right", "monitor {number}");
    }
    let held_bytes = monitors
        .iter()
        .map(|monitor| held_bytes(monitor.pid()))
        .sum();
    // What one writes or gives up, no other one sees.
    for (number, monitor) in monitors.iter().enumerate() {
        monitor.ask(&format!("write {number} 4000 50 {number}"));
        monitor.ask(&format!("remove {} 20", 3 * number));
    }
    for (number, monitor) in monitors.iter().enumerate() {
        assert_eq!(
            monitor.ask("check"),
            "right",
            "monitor {number}, written to"
        );
    }
    let tracked = monitors.iter().enumerate().filter(|one| one.0 % 3 != 2);
    for (number, monitor) in tracked.step_by(10) {
        let directory = format!("of-{number}");
        server.diff(server.session(monitor.pid()), &directory);
        server.compare(&directory, monitor, &directory);
    }
    held_bytes
}

/// A process's part of the pages of the machine that it was offered.
fn held_bytes(pid: u32) -> u64 {
    let maps = fs::read_to_string(format!("/proc/{pid}/smaps")).expect("it runs");
    let after = maps.split("stillframe-pages").skip(1);
    let pss = after.filter_map(|text| text.lines().find_map(|line| line.strip_prefix("Pss:")));
    let kib = pss.filter_map(|text| text.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    kib.sum::<u64>() << 10
}
