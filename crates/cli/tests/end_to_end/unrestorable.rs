//! What a restore could not bring back is not killed: its image is planned before it gets its name.
use testkit::program::{Program, Spawned};
use testkit::stillframe::Outcome;
use testkit::subject::Subject;
use testkit::{needs_program, needs_root, tree};

use crate::stillframe;

/// Has a child that tells its end by a signal that there is not, which clone(2) allows and no
/// restore can ask for. Says what it reads, with a mark.
const CHILD_OF_NO_SIGNAL: &str = r#"
import ctypes, os, signal, sys
CLONE, NO_SIGNAL = 56, 100
if ctypes.CDLL(None).syscall(CLONE, NO_SIGNAL, 0, 0, 0, 0) == 0:
    signal.pause()
os.mkfifo(sys.argv[1] + "/asked")
os.mkfifo(sys.argv[1] + "/answer")
os.mkdir(sys.argv[1] + "/ready")
while True:
    with open(sys.argv[1] + "/asked") as asked:
        word = asked.read()
    with open(sys.argv[1] + "/answer", "w") as answer:
        answer.write(word + "!")
"#;

/// Such a program, once it is ready.
pub fn child_of_no_signal(folder: &std::path::Path) -> Spawned {
    let program = Program::new("/usr/bin/python3")
        .args(["-c", CHILD_OF_NO_SIGNAL])
        .arg(folder)
        .spawn();
    program.wait_file(&folder.join("ready"));
    program
}

struct Unrestorable {
    program: Spawned,
    folder: tempfile::TempDir,
}

impl Unrestorable {
    fn start() -> Self {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let program = child_of_no_signal(folder.path());
        Self { program, folder }
    }

    /// Fails unless it goes on.
    #[track_caller]
    fn must_go_on(&self) {
        let at = |name: &str| self.folder.path().join(name);
        std::fs::write(at("asked"), "well").expect("it reads");
        let answer = std::fs::read_to_string(at("answer")).expect("it answers");
        assert_eq!(answer, "well!");
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.program.pid()));
        assert!(status.expect("it lives").contains("TracerPid:\t0\n"));
    }
}

#[track_caller]
fn must_be_refused(outcome: Outcome) {
    let outcome = outcome.must_fail();
    assert_eq!(outcome.status.code(), Some(3), "{}", outcome.told());
    outcome.names(&["could not be restored", "ends by no signal"]);
}

#[test]
fn what_cannot_be_restored_is_not_killed() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer kills what it cannot restore");
    }
    let target = Unrestorable::start();
    // What was in the place of the image stays there.
    let other = Subject::start("busy", &["1"]);
    stillframe.dump(other.pid(), &["-R"]).must();
    let manifest = || std::fs::read(stillframe.images().join("manifest.img")).expect("an image");
    let before = manifest();
    for options in [&[][..], &["--leave-running"], &["--live"]] {
        must_be_refused(stillframe.dump(target.program.pid(), options));
        target.must_go_on();
        assert!(manifest() == before, "{options:?}");
    }
    other.kill();
    tree::wait_gone(&[other.pid()]);
    stillframe.restore(&[]).must();
    assert_eq!(other.ask("check"), "right");
}

#[test]
fn a_layer_that_cannot_be_restored_is_not_made() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer kills what it cannot restore");
    }
    let target = Unrestorable::start();
    let first = stillframe.images().join("../first");
    let pid = target.program.pid().to_string();
    let first = first.to_str().expect("a plain path");
    let mut round = stillframe.command(&["pre-dump", "-t", &pid, "-D", first]);
    if !round.status().expect("it starts").success() {
        testkit::skip!("the kernel does not tell what is written");
    }
    let options = ["--prev-images-dir", "../first"];
    must_be_refused(stillframe.dump(target.program.pid(), &options));
    target.must_go_on();
    assert!(!stillframe.images().join("manifest.img").exists());
    let beside = std::fs::read_dir(first).expect("the round's image");
    let names = beside.map(|entry| entry.expect("a name").file_name());
    let marks = names.filter(|name| name.to_string_lossy().contains("child"));
    assert_eq!(marks.count(), 0, "the round's image knows of no layer");
}

#[test]
fn what_planning_takes_is_told() {
    needs_root!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer plans nothing");
    }
    let subject = Subject::start("busy", &["1"]);
    let outcome = stillframe.dump(subject.pid(), &["--display-stats"]).must();
    let told = |output: &str| {
        let line = output.lines().find(|line| line.contains("plan_time"));
        let number = line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok());
        number.unwrap_or_else(|| panic!("no plan_time in {output}"))
    };
    assert!(told(&outcome.output) > 0, "{}", outcome.output);
    let images = stillframe.images().to_str().expect("a plain path");
    let mut show = stillframe.command(&["show", "--stats", images]);
    let shown = show.output().expect("it runs").stdout;
    let shown = String::from_utf8(shown).expect("text");
    assert_eq!(told(&shown), told(&outcome.output));
}
