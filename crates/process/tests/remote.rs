//! Everything but mapping works in a remote store: slow, with failures that pass, without
//! renames, random writes and descriptors.
//!
//! What the engine does to a tree it does in a process of its own: this program runs itself with
//! the name of a step and its places.
#![forbid(unsafe_code)]
#![allow(missing_docs, clippy::unwrap_used)] // a test has no users

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::time::Duration;

use process::options::Compression;
use process::report::Unobserved;
use process::{Afterwards, DedupOptions, DumpKind, DumpOptions, MergeOptions, RestoreOptions};
use rustix::process::Pid;
use store::{Images, Patience, Remote, Store};
use testkit::bucket::FaultyBucket;
use testkit::program::{Program, Spawned};
use testkit::wait;

/// The tests by name.
const TESTS: &[(&str, fn())] = &[
    (
        "a_chain_of_remote_images_is_made_shown_merged_and_restored",
        a_chain_of_remote_images_is_made_shown_merged_and_restored,
    ),
    (
        "a_live_dump_goes_to_a_remote_store",
        a_live_dump_goes_to_a_remote_store,
    ),
];

/// Does a step where one is named, or else the tests whose names contain one of the words given.
fn main() {
    if let Ok(words) = std::env::var(STEP) {
        return step(&words);
    }
    let words = std::env::args().skip(1).collect::<Vec<_>>();
    let is_list = words.iter().any(|word| word == "--list");
    let filters = words.iter().filter(|word| !word.starts_with('-'));
    let filters = filters.collect::<Vec<_>>();
    let is_wanted =
        |name: &str| filters.is_empty() || filters.iter().any(|word| name.contains(*word));
    let (mut passed, mut failed) = (0, 0);
    for (name, test) in TESTS.iter().filter(|(name, _)| is_wanted(name)) {
        if is_list {
            println!("{name}: test");
            continue;
        }
        let (outcome, counter) = match std::panic::catch_unwind(test) {
            Ok(()) => ("ok", &mut passed),
            Err(_) => ("FAILED", &mut failed),
        };
        println!("test {name} ... {outcome}");
        *counter += 1;
    }
    if is_list {
        return;
    }
    let left_out = TESTS.len() - passed - failed;
    let outcome = if failed == 0 { "ok" } else { "FAILED" };
    println!(
        "\ntest result: {outcome}. {passed} passed; {failed} failed; 0 ignored; 0 measured; \
         {left_out} filtered out; finished in 0.00s\n"
    );
    if failed > 0 {
        std::process::exit(101);
    }
}

/// What tells this program that it is to do a step.
const STEP: &str = "STILLFRAME_FAR_STEP";

/// A megabyte of each kind of pages, some of which change at each line that is asked for.
const SUBJECT: &str = r#"
import hashlib, mmap, os, random, signal, sys
folder = sys.argv[1]
memory = mmap.mmap(-1, 24 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
memory[:12 << 20] = random.Random(1).randbytes(12 << 20)
memory[12 << 20:16 << 20] = b"text " * ((4 << 20) // 5) + b"....";
rounds = 0
def tell(*_):
    global rounds
    rounds += 1
    memory[rounds * 40960:rounds * 40960 + 9] = b"round %3d" % rounds
    text = "%d %s" % (rounds, hashlib.sha256(memory).hexdigest())
    with open(folder + "/new", "w") as file: file.write(text)
    os.rename(folder + "/new", folder + "/%d" % rounds)
signal.signal(signal.SIGUSR1, tell)
tell()
while True: signal.pause()
"#;

fn bucket(folder: &Path) -> FaultyBucket {
    FaultyBucket::new(folder, Duration::from_millis(1), 5)
}

fn remote(folder: &Path) -> Images {
    let patience = Patience {
        tries: 6,
        first: Duration::from_millis(1),
        longest: Duration::from_millis(20),
    };
    let stage = store::Directory::open(std::env::temp_dir()).unwrap();
    let store = Remote::new(Arc::new(bucket(folder)), Arc::new(stage), patience);
    Images::from(Arc::new(store) as Arc<dyn Store>)
}

/// Does a step, in a process with one thread.
fn step(words: &str) {
    let words = words.split(' ').collect::<Vec<_>>();
    let tree = |word: &str| Pid::from_raw(word.parse().unwrap()).unwrap();
    let images = remote(Path::new(words[1]));
    let parent = words.get(3).map(|folder| remote(Path::new(folder)));
    let observer = &mut Unobserved;
    match words[0] {
        "dump" | "live" | "keep" | "pre-dump" => {
            let mut options = DumpOptions::new(tree(words[2]), images);
            options.parent = parent;
            options.kind = match words[0] {
                "live" => DumpKind::Live,
                "pre-dump" => DumpKind::PreDump,
                _ => DumpKind::Dump,
            };
            if words[0] != "dump" {
                options.afterwards = Afterwards::Run;
            }
            process::dump(&options, observer).map(drop)
        }
        "restore" => {
            let mut options = RestoreOptions::new(images);
            options.detached = true;
            process::restore(&options, observer).map(drop)
        }
        "merge" => {
            let options = MergeOptions {
                images,
                until: None,
                output: None,
                compress: Some(Compression::Lz4),
                sync: true,
            };
            process::merge(&options).map(drop)
        }
        "dedup" => process::dedup(&DedupOptions { images, sync: true }).map(drop),
        "show" => {
            process::describe(&images).map(|image| println!("shows {} pages", image.pages.stored))
        }
        other => panic!("{other}"),
    }
    .unwrap_or_else(|error| panic!("{}: {error:?}", words[0]));
}

struct Case {
    /// Where the buckets are; removed at the end.
    places: tempfile::TempDir,
    subject: Spawned,
    rounds: u32,
}

impl Case {
    fn start() -> Self {
        let places = tempfile::tempdir().unwrap();
        let told = places.path().join("told");
        std::fs::create_dir(&told).unwrap();
        let subject = Program::new("python3")
            .args(["-c", SUBJECT])
            .arg(&told)
            .spawn();
        subject.wait_file(&told.join("1"));
        Self {
            places,
            subject,
            rounds: 1,
        }
    }

    fn pid(&self) -> String {
        self.subject.pid().to_string()
    }

    fn bucket(&self, name: &str) -> PathBuf {
        let folder = self.places.path().join(name);
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    /// Has the subject write and tell a sum of its memory.
    fn ask(&mut self) -> String {
        self.rounds += 1;
        let told = self
            .places
            .path()
            .join("told")
            .join(self.rounds.to_string());
        let pid = Pid::from_raw(self.subject.pid() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::USR1).unwrap();
        wait::wait_for("the sum", wait::SOON, || {
            std::fs::read_to_string(&told).ok()
        })
    }

    fn step(&self, words: &[&str]) -> Output {
        let command = Command::new(std::env::current_exe().unwrap())
            .env(STEP, words.join(" "))
            .output();
        command.unwrap()
    }

    fn must(&self, words: &[&str]) -> String {
        let output = self.step(words);
        let [told, failed] =
            [output.stdout, output.stderr].map(|text| String::from_utf8(text).unwrap());
        assert!(output.status.success(), "{words:?}: {told}{failed}");
        told
    }
}

/// What the subject would tell after so many rounds.
fn expected(rounds: u32) -> String {
    let script = format!(
        "import os\nos.rename = lambda *_: None\n{}\nfor _ in range({}): tell()\n\
         print(open(folder + '/new').read())",
        SUBJECT
            .replace("tell()\nwhile True: signal.pause()", "")
            .replace("signal.signal(signal.SIGUSR1, tell)", ""),
        rounds
    );
    let folder = tempfile::tempdir().unwrap();
    let output = Command::new("python3")
        .args(["-c", &script])
        .arg(folder.path())
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn a_chain_of_remote_images_is_made_shown_merged_and_restored() {
    testkit::needs_root!();
    testkit::needs_program!("python3");
    let mut case = Case::start();
    let [one, two, three] = ["one", "two", "three"].map(|name| case.bucket(name));
    let [one, two, three] = [&one, &two, &three].map(|folder| folder.to_str().unwrap());
    let pid = case.pid();
    case.must(&["pre-dump", one, &pid]);
    case.ask();
    case.must(&["pre-dump", two, &pid, one]);
    case.ask();
    case.must(&["dump", three, &pid, two]);
    testkit::tree::wait_gone(&[case.subject.pid()]);
    assert!(case.must(&["show", three]).contains("shows "));
    // Freeing parts of objects is what it cannot do, and it says so; nothing is changed.
    let refused = case.step(&["dedup", three]);
    let [told, failed] =
        [refused.stdout, refused.stderr].map(|text| String::from_utf8(text).unwrap());
    assert!(failed.contains("free parts of"), "{told}{failed}");
    case.must(&["restore", three]);
    assert_eq!(case.ask(), expected(4));

    let pid = case.pid();
    case.must(&["keep", three, &pid, two]);
    case.must(&["merge", three]);
    for gone in [one, two] {
        std::fs::remove_dir_all(gone).unwrap();
    }
    case.subject.kill();
    case.must(&["restore", three]);
    assert_eq!(case.ask(), expected(5));
}

fn a_live_dump_goes_to_a_remote_store() {
    testkit::needs_root!();
    testkit::needs_program!("python3");
    let mut case = Case::start();
    let one = case.bucket("one");
    let one = one.to_str().unwrap();
    let pid = case.pid();
    case.must(&["live", one, &pid]);
    assert_eq!(case.ask(), expected(2));
    case.subject.kill();
    case.must(&["restore", one]);
    std::fs::remove_file(case.places.path().join("told/2")).unwrap();
    case.rounds = 1;
    assert_eq!(case.ask(), expected(2));
}
