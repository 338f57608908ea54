//! Subjects from the side of the test: started, asked, killed.
//!
//! A subject reads questions, a line each, from the FIFO `control` of its folder and leaves each
//! answer in a file of its own. So nothing connects it to the test but names, and it can be
//! dumped while it waits for a question, and asked again after a restore.
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::ops::{Deref, DerefMut};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::{CWD, FileType, Mode, OFlags};

use crate::program::{Program, Spawned};
use crate::subjects::WITHOUT_LEADER;
use crate::{tree, wait};

/// A started subject; dropping it kills it and its tree.
pub struct Subject {
    // Before the folder: a live subject writes into it.
    spawned: Spawned,
    folder: tempfile::TempDir,
}

impl Subject {
    /// Starts the subject called `name` and waits until it is in the state it is about.
    ///
    /// # Panics
    /// When it cannot be started or ends by itself, with what it wrote.
    #[track_caller]
    pub fn start(name: &str, arguments: &[&str]) -> Self {
        Self::start_as(&[], name, arguments)
    }

    /// As [`Subject::start`], in a process whose first thread has ended.
    ///
    /// # Panics
    /// As [`Subject::start`].
    #[track_caller]
    pub fn start_without_leader(name: &str, arguments: &[&str]) -> Self {
        let subject = Self::start_as(&[WITHOUT_LEADER], name, arguments);
        let ended = || tree::state(subject.pid()) == Some('Z');
        wait::wait_until("the leader to end", wait::SOON, ended);
        subject
    }

    #[track_caller]
    fn start_as(how: &[&str], name: &str, arguments: &[&str]) -> Self {
        let folder = tempfile::Builder::new()
            .prefix(&format!("subject-{name}-"))
            .tempdir()
            .expect("the folder for temporary files can be written");
        // For subjects that give up being root.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o777))
            .expect("the folder is this process's");
        let control = folder.path().join("control");
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(CWD, &control, FileType::Fifo, mode, 0)
            .expect("a FIFO can be made in a fresh folder");
        let output = folder.path().join("output");
        let spawned = Program::new(binary())
            .args(how)
            .arg(name)
            .arg(folder.path())
            .args(arguments)
            .output(&output)
            .spawn();
        let ready = folder.path().join("ready");
        let started = wait::try_wait_for(wait::SOON, || {
            (ready.exists() || !spawned.is_alive()).then_some(())
        });
        assert!(
            started.is_some() && spawned.is_alive() && ready.exists(),
            "{name} does not get ready: {}",
            fs::read_to_string(&output).unwrap_or_default()
        );
        Self { spawned, folder }
    }

    /// Asks a question and waits for the answer.
    ///
    /// # Panics
    /// When the subject is dead or does not answer in time, with what it wrote.
    #[track_caller]
    pub fn ask(&self, question: &str) -> String {
        match self.try_ask(question) {
            Ok(answer) => answer,
            Err(why) => panic!("{} does not answer {question:?}: {why}", self.name()),
        }
    }

    /// As [`Subject::ask`], and reads the answer as a number.
    ///
    /// # Panics
    /// As [`Subject::ask`], and when the answer is no number.
    #[track_caller]
    pub fn ask_number(&self, question: &str) -> u64 {
        let answer = self.ask(question);
        answer
            .parse()
            .unwrap_or_else(|error| panic!("{answer:?} to {question:?}: {error}"))
    }

    /// Asks a question and waits for the answer; why there is none otherwise.
    ///
    /// # Errors
    /// A sentence: it died, or it does not answer.
    pub fn try_ask(&self, question: &str) -> Result<String, String> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let output = || fs::read_to_string(self.folder().join("output")).unwrap_or_default();
        // Without a reader this fails at once instead of waiting for one.
        let mut control = OpenOptions::new()
            .write(true)
            .custom_flags(OFlags::NONBLOCK.bits().cast_signed())
            .open(self.folder().join("control"))
            .map_err(|error| format!("its control is closed: {error}: {}", output()))?;
        control
            .write_all(format!("{number} {question}\n").as_bytes())
            .map_err(|error| format!("write to its control: {error}: {}", output()))?;
        let path = self.folder().join(format!("answer-{number}"));
        let answer = wait::try_wait_for(wait::SOON, || match fs::read_to_string(&path) {
            Ok(answer) => Some(Ok(answer)),
            Err(_) if !self.is_alive() => Some(Err(format!("it is dead: {}", output()))),
            Err(_) => None,
        });
        answer.unwrap_or_else(|| Err(format!("no answer in time: {}", output())))
    }

    /// Tells whether every thread of the tree waits for an event, is stopped or dead.
    pub fn is_waiting(&self) -> bool {
        let mut threads = self.tree().into_iter().flat_map(tree::threads);
        threads.all(tree::is_waiting)
    }

    /// The folder it works in.
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }
}

impl Deref for Subject {
    type Target = Spawned;

    fn deref(&self) -> &Spawned {
        &self.spawned
    }
}

impl DerefMut for Subject {
    fn deref_mut(&mut self) -> &mut Spawned {
        &mut self.spawned
    }
}

/// The binary of all subjects.
///
/// # Panics
/// As [`built`].
pub fn binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| built("subject"))
}

/// A binary of this crate: it stands beside this program, or beside the folder of this test's own
/// binary, and is built first where cargo runs the test.
///
/// # Panics
/// When it cannot be built or found.
pub fn built(name: &str) -> PathBuf {
    let own = std::env::current_exe().expect("/proc is mounted");
    let folder = own.parent().expect("a file has a folder");
    let is_test = folder.ends_with("deps");
    let above = folder.parent().filter(|_| is_test);
    let profile = above.unwrap_or(folder);
    if let Some(cargo) = std::env::var_os("CARGO") {
        let mut build = Command::new(cargo);
        build.args(["build", "--quiet", "--package", "testkit", "--bin", name]);
        if profile.ends_with("release") {
            build.arg("--release");
        }
        let workspace = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
        let status = build.current_dir(workspace).status();
        assert!(
            status.as_ref().is_ok_and(|status| status.success()),
            "{build:?}: {status:?}"
        );
    }
    let binary = profile.join(name);
    assert!(binary.exists(), "{} is not built", binary.display());
    binary
}
