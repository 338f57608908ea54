//! Programs that answer faults of memory of their own (userfaultfd(2)).
use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

use testkit::huge_pages::HugePages;
use testkit::program::{Program, Spawned};
use testkit::{needs_kernel_memory, needs_program, needs_root, skip};

use crate::stillframe;

/// A program that answers its faults, and what it told last.
struct Answering {
    program: Spawned,
    folder: tempfile::TempDir,
    seen: usize,
}

impl Answering {
    fn begin(what: &str) -> Self {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let commands = folder.path().join("commands");
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        let (fifo, dev) = (rustix::fs::FileType::Fifo, 0);
        rustix::fs::mknodat(rustix::fs::CWD, &commands, fifo, mode, dev).expect("a pipe");
        let program = Program::new("/usr/bin/python3")
            .args(["-c", include_str!("userfaultfd.py"), what])
            .arg(folder.path())
            .spawn();
        program.wait_file(&folder.path().join("ready"));
        Self {
            program,
            folder,
            seen: 0,
        }
    }

    fn told_path(&self) -> PathBuf {
        self.folder.path().join("told")
    }

    /// What it tells until it has done what `command` says; `last` is the end of that.
    fn ask(&mut self, command: &str, last: &str) -> Vec<String> {
        let path = self.folder.path().join("commands");
        let pipe = fs::OpenOptions::new().write(true).open(path);
        writeln!(pipe.expect("it reads"), "{command}").expect("it is there");
        let path = self.told_path();
        let lines = || fs::read_to_string(&path).unwrap_or_default();
        let seen = self.seen;
        let is_done = || {
            lines()
                .lines()
                .skip(seen)
                .any(|line| line.starts_with(last))
        };
        self.program.wait_ready(command, is_done);
        let text = lines();
        let told = text.lines().skip(seen).map(str::to_owned);
        let told = told.collect::<Vec<_>>();
        self.seen += told.len();
        told
    }

    fn pages(&mut self) -> String {
        self.ask("show", "pages").remove(0)
    }

    /// Insists that touching page `at` by `call` is told as `event`, once.
    #[track_caller]
    fn assert_told(&mut self, (call, at): (&str, u64), event: &str, result: &str) {
        let last = if call == "read" { "read" } else { "wrote" };
        let told = self.ask(&format!("{call} {at}"), last);
        assert_eq!(
            told,
            [format!("event 0x12 {event} {at}"), result.to_owned()]
        );
    }
}

/// Has a program be dumped and left running, and go through three cycles; each time its pages are
/// what they were, and `touched`, in turn, are told.
#[track_caller]
fn assert_kept(what: &str, touched: &[((&str, u64), &str)], options: &[&str]) {
    needs_root!();
    needs_program!("/usr/bin/python3");
    needs_kernel_memory!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        skip!("the peer refuses userfaultfds");
    }
    let mut one = Answering::begin(what);
    let before = one.pages();
    stillframe
        .dump(one.program.pid(), &["--leave-running"])
        .must();
    stillframe.clear();
    assert_eq!(one.pages(), before, "{what} was left running");
    for ((call, at), event) in touched {
        let value = match (*event, at % 4) {
            ("4", 0) => 0,
            ("4", _) => *at,
            _ => 100 + at,
        };
        let result = match *call {
            "read" => format!("read {at}: {value}"),
            _ => format!("wrote {at}"),
        };
        one.assert_told((call, *at), event, &result);
        let before = one.pages();
        stillframe.cycle(1, &one.program, options);
        assert_eq!(one.pages(), before, "{what} after page {at}");
    }
}

const MISSED: [((&str, u64), &str); 3] =
    [(("read", 40), "0"), (("read", 6), "0"), (("read", 9), "0")];

#[test]
fn missing_pages_stay_missing() {
    assert_kept("missing", &MISSED, &[]);
}

#[test]
fn a_child_that_inherited_it_answers() {
    assert_kept("inherited", &MISSED, &[]);
}

#[test]
fn one_that_its_process_has_closed_is_kept() {
    assert_kept("passed", &MISSED, &[]);
}

#[test]
fn protected_pages_stay_protected_there_or_not() {
    let touched = [
        (("write", 11), "3"),
        (("write", 4), "3"),
        (("write", 23), "3"),
    ];
    assert_kept("protected", &touched, &[]);
}

#[test]
fn cached_pages_are_mapped_where_they_were() {
    let touched = [
        (("read", 42), "4"),
        (("read", 11), "0"),
        (("read", 44), "4"),
    ];
    assert_kept("minor", &touched, &[]);
}

#[test]
fn missing_huge_pages_stay_missing() {
    needs_root!();
    let Ok(_pages) = HugePages::reserve(16) else {
        skip!("no huge pages");
    };
    assert_kept("huge", &[(("read", 1), "0"), (("read", 5), "0")], &[]);
}

#[test]
fn rounds_of_a_chain_bring_nothing_in() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    needs_kernel_memory!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        skip!("the peer refuses userfaultfds");
    }
    for what in ["missing", "protected"] {
        let mut one = Answering::begin(what);
        let before = one.pages();
        stillframe
            .dump(one.program.pid(), &["--leave-running"])
            .must();
        stillframe.clear();
        let images = tempfile::tempdir().expect("a scratch folder");
        let at = |name: &str| self::stillframe().images_at(images.path().join(name));
        let pid = one.program.pid();
        at("1").pre_dump(pid, &[]).must();
        assert_eq!(one.pages(), before, "{what} after a round");
        at("2").pre_dump(pid, &["--prev-images-dir", "../1"]).must();
        assert_eq!(one.pages(), before, "{what} after two rounds");
        at("3").dump(pid, &["--prev-images-dir", "../2"]).must();
        at("3").restore(&[]).must();
        assert_eq!(one.pages(), before, "{what} after the chain");
        let (call, event) = match what {
            "missing" => ("read", "0"),
            _ => ("write", "3"),
        };
        let result = if call == "read" {
            "read 12: 112"
        } else {
            "wrote 12"
        };
        one.assert_told((call, 12), event, result);
    }
}

#[test]
fn a_live_dump_refuses_it_by_name() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        skip!("the peer has no live dumps");
    }
    let mut one = Answering::begin("missing");
    let before = one.pages();
    let refused = stillframe.dump(one.program.pid(), &["--live"]).must_fail();
    refused.names(&["it is registered with a userfaultfd, and a live dump does not keep it"]);
    assert_eq!(one.pages(), before);
    one.assert_told(("read", 30), "0", "read 30: 130");
}

#[test]
fn memory_whose_faults_are_answered_outside_is_refused_by_name() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        skip!("the peer says it in other words");
    }
    let mut one = Answering::begin("outside");
    let refused = stillframe.dump(one.program.pid(), &[]).must_fail();
    refused.names(&["it is registered with a userfaultfd that no task of the tree has"]);
    one.assert_told(("read", 30), "0", "read 30: 130");
}

#[test]
fn one_that_is_about_memory_outside_is_refused_by_name() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        skip!("the peer says it in other words");
    }
    let mut one = Answering::begin("passed");
    let tree = one.program.tree();
    let child = tree.iter().find(|pid| **pid != one.program.pid());
    let child = *child.expect("who answers");
    let refused = stillframe.dump(child, &["--shell-job"]).must_fail();
    refused.names(&["anon_inode:[userfaultfd]"]);
    one.assert_told(("read", 30), "0", "read 30: 130");
}

#[test]
fn killed_dumps_leave_all_as_it_was() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        skip!("the peer refuses userfaultfds");
    }
    let mut one = Answering::begin("missing");
    let before = one.pages();
    for at in 0..12 {
        let command = stillframe.dump_command(one.program.pid(), &["--leave-running"]);
        stillframe.kill_after(command, Duration::from_millis(2 * at));
        stillframe.clear();
        assert_eq!(one.pages(), before, "kill {at}");
        one.program
            .wait_ready("it goes on", || one.program.is_alive());
    }
    one.assert_told(("read", 30), "0", "read 30: 130");
}
