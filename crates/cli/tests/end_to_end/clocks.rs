//! Monotonic clocks go on from where they stood, and with them whoever waits for a time.
use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use testkit::program::{Program, Spawned};
use testkit::stillframe::Stillframe;
use testkit::subject::Subject;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root, skip, tree};

use crate::stillframe;

/// How many waits the subject knows.
const WAITS: usize = 7;
/// As much as a host differs here that was started at another time.
const ELSEWHERE_S: u64 = 1_000_000;
/// How long a tree is only an image where that has to show.
const AWAY: Duration = Duration::from_millis(1500);

/// What the subject's clocks say: monotonic and boottime, by system calls and by the vDSO.
fn now(subject: &Subject) -> [Duration; 4] {
    let told = subject.ask("now");
    let times = told.split(' ').map(|ns| ns.parse().expect("a number"));
    let times = times.map(Duration::from_nanos).collect::<Vec<_>>();
    times.try_into().expect("four times")
}

/// Clocks that were looked at.
struct Looked {
    clocks: [Duration; 4],
    then: Instant,
}

impl Looked {
    fn at(subject: &Subject) -> Self {
        let then = Instant::now();
        let clocks = now(subject);
        Self { clocks, then }
    }

    /// Insists that each clock went on without the time that the subject was `away`.
    #[track_caller]
    fn went_on(&self, subject: &Subject, away: Duration) {
        let clocks = now(subject);
        let most = self.then.elapsed() - away;
        for (before, after) in self.clocks.iter().zip(clocks) {
            let passed = after.checked_sub(*before);
            let right = passed.is_some_and(|passed| passed <= most);
            assert!(right, "{before:?} to {after:?} in {most:?}");
        }
    }
}

/// The same command on a host that has run for longer than this one.
fn elsewhere(command: &Command) -> Command {
    let mut apart = Command::new("unshare");
    let seconds = ELSEWHERE_S.to_string();
    apart.args(["--time", "--monotonic", &seconds, "--boottime", &seconds]);
    apart.arg(command.get_program()).args(command.get_args());
    apart
}

/// What has the program behind it run without the privilege to set clocks.
const UNPRIVILEGED: [&str; 3] = ["setpriv", "--bounding-set", "-sys_time"];

/// The same command without that privilege.
fn unprivileged(command: &Command) -> Command {
    let mut without = Command::new(UNPRIVILEGED[0]);
    without.args(&UNPRIVILEGED[1..]);
    without.arg(command.get_program()).args(command.get_args());
    without
}

#[track_caller]
fn succeeds(mut command: Command) {
    let output = command.output().expect("it can be started");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {told}");
}

/// Whether this host's time namespaces can be used: this test has what they need.
fn has_namespaces() -> bool {
    let mut probe = elsewhere(&Command::new("true"));
    probe.output().is_ok_and(|output| output.status.success())
}

/// Has the tree come back on a host that has run for longer, with that host's clocks.
fn move_elsewhere(stillframe: &Stillframe, subject: &Spawned) {
    stillframe.clear();
    stillframe.dump(subject.pid(), &[]).must();
    succeeds(elsewhere(&stillframe.restore_command(&["--no-timens"])));
}

/// Waits for the end of all waits; none was early.
#[track_caller]
fn all_end_in_time(subject: &Subject) {
    let mut results = String::new();
    wait_until("all waits to end", SOON, || {
        results = subject.ask("results");
        results.lines().count() == WAITS
    });
    for line in results.lines() {
        let late_us = line
            .rsplit(' ')
            .next()
            .and_then(|us| us.parse::<i64>().ok());
        let in_time = late_us.is_some_and(|us| (0..20_000_000).contains(&us));
        assert!(in_time, "{line}: {results}");
    }
}

#[test]
fn clocks_stand_still_while_a_tree_is_an_image() {
    needs_root!();
    needs_program!("unshare");
    if !has_namespaces() {
        skip!("no privilege to make time namespaces");
    }
    let stillframe = stillframe();
    let subject = Subject::start("deadlines", &[]);
    for how in [&[][..], &["--live"]] {
        if stillframe.is_peer() && how == ["--live"] {
            continue;
        }
        subject.ask("begin 3000");
        let before = Looked::at(&subject);
        stillframe.clear();
        stillframe.dump(subject.pid(), how).must();
        let dumped = Instant::now();
        if how == ["--live"] {
            subject.kill();
        }
        // That time passes is what is tested.
        std::thread::sleep(AWAY);
        let away = dumped.elapsed();
        stillframe.restore(&[]).must();
        before.went_on(&subject, away);
        all_end_in_time(&subject);
    }
}

#[test]
fn clocks_go_on_from_host_to_host() {
    needs_root!();
    needs_program!("unshare");
    let stillframe = stillframe();
    if stillframe.is_peer() || !has_namespaces() {
        skip!("no time namespaces, or not ours");
    }
    let subject = Subject::start("deadlines", &[]);
    move_elsewhere(&stillframe, &subject);
    let ahead = now(&subject)[0];
    assert!(ahead.as_secs() >= ELSEWHERE_S, "{ahead:?}");
    subject.ask("begin 1000");
    // Dumped and restored where it is and elsewhere: here its clocks would go back by days.
    for round in 0..4 {
        let before = Looked::at(&subject);
        stillframe.clear();
        let dump = stillframe.dump_command(subject.pid(), &[]);
        let restore = stillframe.restore_command(&[]);
        let at = |there: bool, command: Command| match there {
            true => elsewhere(&command),
            false => command,
        };
        succeeds(at(round == 1, dump));
        tree::wait_gone(&[subject.pid()]);
        succeeds(at(round >= 2, restore));
        before.went_on(&subject, Duration::ZERO);
    }
    all_end_in_time(&subject);
    // All of it in one namespace, which is neither's.
    let own = fs::read_link("/proc/self/ns/time").expect("it has one");
    let theirs = |name: &str| fs::read_link(format!("/proc/{}/ns/{name}", subject.pid()));
    let (time, children) = (theirs("time"), theirs("time_for_children"));
    let time = time.expect("it lives");
    assert!(
        time != own && time == children.expect("it lives"),
        "{time:?}"
    );
}

#[test]
fn clocks_are_the_hosts_where_that_is_wanted() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        skip!("an option of ours");
    }
    let subject = Subject::start("deadlines", &[]);
    subject.ask("begin 2000");
    stillframe.dump(subject.pid(), &[]).must();
    stillframe.restore(&["--no-timens"]).must();
    let own = fs::read_link("/proc/self/ns/time").expect("it has one");
    let theirs = fs::read_link(format!("/proc/{}/ns/time", subject.pid()));
    assert_eq!(theirs.expect("it lives"), own);
    all_end_in_time(&subject);
}

#[test]
fn without_the_privilege_clocks_jump_ahead_but_never_back() {
    needs_root!();
    needs_program!("setpriv");
    needs_program!("unshare");
    let stillframe = stillframe();
    if stillframe.is_peer() || !has_namespaces() {
        skip!("no time namespaces, or not ours");
    }
    // It must not have more privileges than who restores it.
    let program = Program::new(UNPRIVILEGED[0]).args(&UNPRIVILEGED[1..]);
    let subject = program.args(["sleep", "1000"]).spawn();
    subject.wait_ready("sleep", || {
        fs::read(format!("/proc/{}/comm", subject.pid())).is_ok_and(|name| name == b"sleep\n")
    });
    stillframe.dump(subject.pid(), &[]).must();
    let output = unprivileged(&stillframe.restore_command(&[])).output();
    let output = output.expect("setpriv is there");
    let log = fs::read_to_string(stillframe.images().join("restore.log"));
    let log = log.expect("a log");
    assert!(output.status.success(), "{log}");
    assert!(log.contains("monotonic clocks jump ahead by "), "{log}");
    assert!(subject.is_alive());

    move_elsewhere(&stillframe, &subject);
    stillframe.clear();
    stillframe.dump(subject.pid(), &[]).must();
    let output = unprivileged(&stillframe.restore_command(&[])).output();
    let output = output.expect("setpriv is there");
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{told}");
    assert!(
        told.contains("a monotonic clock that goes back by "),
        "{told}"
    );
    assert!(told.contains("--no-timens"), "{told}");
    succeeds(unprivileged(&stillframe.restore_command(&["--no-timens"])));
    assert!(subject.is_alive());
}
