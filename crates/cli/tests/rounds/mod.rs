//! Rounds of `pre-dump`, and dumps over them, one image after the other.
use std::path::PathBuf;
use std::process::Stdio;

use serde_json::Value;
use testkit::stillframe::Stillframe;
use testkit::subject::Subject;
use testkit::tree;
use testkit::wait::{SOON, wait_until};

/// Rounds of pre-dump before each dump under fire.
const ROUNDS: usize = 4;

/// The command, and a folder with an image a round.
pub struct Rounds {
    /// The command.
    pub stillframe: Stillframe,
    /// What the images are in.
    pub folder: tempfile::TempDir,
    pid: u32,
    /// How many rounds there were.
    pub count: usize,
}

impl Rounds {
    /// Begins rounds of the tree of `pid`.
    pub fn new(pid: u32) -> Self {
        Self {
            stillframe: Stillframe::new(env!("CARGO_BIN_EXE_stillframe")),
            folder: tempfile::tempdir().expect("a scratch folder"),
            pid,
            count: 0,
        }
    }

    /// The image of a round.
    pub fn place(&self, round: usize) -> PathBuf {
        self.folder.path().join(round.to_string())
    }

    /// The command line of the next round, over the last one.
    pub fn next(&mut self, command: &str, options: &[&str]) -> std::process::Command {
        self.count += 1;
        let place = self.place(self.count);
        let mut line = self
            .stillframe
            .command(&[command, "-v4", "--json", "--no-sync"]);
        line.args(["-t", &self.pid.to_string(), "-D"])
            .arg(place)
            .args(options);
        if self.count > 1 {
            line.args(["--prev-images-dir", &format!("../{}", self.count - 1)]);
        }
        line
    }

    /// Makes the next round and tells what it reported.
    #[track_caller]
    pub fn make(&mut self, command: &str, options: &[&str]) -> Value {
        let mut line = self.next(command, options);
        // To a file: a tracker that was left behind must not keep a pipe open.
        let output = tempfile::NamedTempFile::new().expect("a temporary file");
        let status = line
            .stdout(output.reopen().expect("it was just made"))
            .stderr(Stdio::inherit())
            .status()
            .expect("it starts");
        let text = std::fs::read_to_string(output.path()).expect("its output");
        assert!(status.success(), "{line:?}: {text}\n{}", self.log(command));
        if command == "dump" && !options.contains(&"--leave-running") {
            tree::wait_gone(&self.saved());
        }
        let mut told: Value = serde_json::from_str(&text).expect("JSON");
        told[command].take()
    }

    /// The tasks of the last image.
    fn saved(&self) -> Vec<u32> {
        let mut show = self.stillframe.command(&["show", "--json"]);
        let shown = show
            .arg(self.place(self.count))
            .output()
            .expect("it starts");
        let image: Value = serde_json::from_slice(&shown.stdout).expect("JSON");
        let tasks = image["tasks"].as_array().expect("a list").iter();
        tasks.map(|task| number(task, "pid") as u32).collect()
    }

    fn log(&self, command: &str) -> String {
        let log = self.place(self.count).join(format!("{command}.log"));
        std::fs::read_to_string(log).unwrap_or_default()
    }

    /// Makes a round of pre-dump.
    pub fn pre_dump(&mut self) -> Value {
        self.make("pre-dump", &[])
    }

    /// Restores the last image.
    #[track_caller]
    pub fn restore(&self, options: &[&str]) {
        let mut line = self.stillframe.command(&["restore", "-d", "-v4"]);
        line.arg("-D").arg(self.place(self.count)).args(options);
        let status = line.status().expect("it starts");
        assert!(status.success(), "{line:?}: {}", self.log("restore"));
    }

    /// Gives up the images and begins a new chain.
    pub fn clear(&mut self) {
        for round in 1..=self.count {
            let _ = std::fs::remove_dir_all(self.place(round));
        }
        self.count = 0;
    }
}

/// The number called `name` in what a round reported.
#[track_caller]
pub fn number(told: &Value, name: &str) -> u64 {
    told[name]
        .as_u64()
        .unwrap_or_else(|| panic!("no {name} in {told}"))
}

/// Dumps a subject that writes at full speed, after some rounds of pre-dump, and restores it, for
/// `cycles` times: none of its pages is ever torn or older than it should be.
#[track_caller]
pub fn under_fire(kind: &str, cycles: usize) {
    let subject = Subject::start("churn", &["3", "300", kind]);
    let mut rounds = Rounds::new(subject.pid());
    let mut parent_pages = 0;
    for cycle in 0..cycles {
        rounds.clear();
        for _ in 0..ROUNDS {
            parent_pages += number(&rounds.pre_dump(), "parent_pages");
        }
        let last = rounds.make("dump", &[]);
        parent_pages += number(&last, "parent_pages");
        rounds.restore(&[]);
        assert_eq!(subject.ask("check"), "right", "cycle {cycle}: {last}");
        let count = subject.ask_number("count");
        wait_until("the subject to write", SOON, || {
            subject.ask_number("count") > count
        });
    }
    assert!(parent_pages > 0, "nothing was ever inherited");
}
