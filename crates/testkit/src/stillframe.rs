//! The command under test.
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, TryRecvError, channel};
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::chance::Chance;
use crate::program::Spawned;
use crate::tree;

/// The environment variable that names another binary to test: one that understands the same
/// command line, such as criu. With it the tests prove themselves.
pub const VARIABLE: &str = "STILLFRAME_BIN";

const DUMP_LOG: &str = "dump.log";
const RESTORE_LOG: &str = "restore.log";

/// Options with which a dump does not kill its target.
const STAYS: [&str; 5] = ["-R", "--leave-running", "--live", "-s", "--leave-stopped"];

/// When a command is given up and killed, so that it fails its test and not the whole run.
const LONGEST_RUN: Duration = Duration::from_secs(300);

/// Runs the command under test against one directory for images, which goes away with it.
pub struct Stillframe {
    binary: PathBuf,
    images: PathBuf,
    is_peer: bool,
    scratch: tempfile::TempDir,
}

impl Stillframe {
    /// Takes the binary to run, which [`VARIABLE`] overrides.
    ///
    /// # Panics
    /// When no directory can be made for the images.
    pub fn new(binary: impl Into<PathBuf>) -> Self {
        tree::adopt_orphans();
        crate::skip::note_end_to_end();
        let (binary, is_peer) = match std::env::var_os(VARIABLE) {
            // `cargo xtask test` names the release build, which is no peer.
            Some(other) => {
                let other = PathBuf::from(other);
                let is_peer = other.file_name().is_none_or(|name| name != "stillframe");
                (other, is_peer)
            }
            None => (binary.into(), false),
        };
        let scratch = tempfile::Builder::new()
            .prefix("stillframe-images-")
            .tempdir()
            .expect("the folder for temporary files can be written");
        Self {
            binary,
            images: scratch.path().join("images"),
            is_peer,
            scratch,
        }
    }

    /// Puts the images at `path` from now on, which the caller removes.
    pub fn images_at(mut self, path: impl Into<PathBuf>) -> Self {
        self.images = path.into();
        self
    }

    /// Tells whether another program stands in for stillframe: then what only stillframe
    /// promises is not to be tested.
    pub fn is_peer(&self) -> bool {
        self.is_peer
    }

    /// The command under test.
    pub fn binary(&self) -> &Path {
        &self.binary
    }

    /// The directory of the images.
    pub fn images(&self) -> &Path {
        &self.images
    }

    /// The command with `arguments`, its output not yet redirected, for a test that wants to
    /// kill it on the way.
    pub fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command.args(arguments).stdin(Stdio::null());
        command
    }

    /// The command line of a dump of the tree of `pid` with `options`.
    pub fn dump_command(&self, pid: u32, options: &[&str]) -> Command {
        self.saving_command("dump", pid, options)
    }

    /// The command line of a `dump` or `pre-dump` of the tree of `pid` with `options`.
    pub fn saving_command(&self, name: &str, pid: u32, options: &[&str]) -> Command {
        // criu wants the directory to be there.
        let _ = fs::create_dir_all(&self.images);
        let mut command = self.command(&[name, "-o", DUMP_LOG, "-v4"]);
        command
            .args(["-t", &pid.to_string()])
            .arg("-D")
            .arg(&self.images)
            .args(options);
        command
    }

    /// The command line of a detached restore with `options`.
    pub fn restore_command(&self, options: &[&str]) -> Command {
        let mut command = self.command(&["restore", "-d", "-o", RESTORE_LOG, "-v4"]);
        command.env("TESTKIT_MARK", self.mark());
        command.arg("-D").arg(&self.images).args(options);
        command
    }

    /// Dumps the tree of `pid`, and where the dump killed it waits until its numbers are free.
    #[must_use = "a dump may have failed"]
    pub fn dump(&self, pid: u32, options: &[&str]) -> Outcome {
        let tree = tree::members(pid);
        let outcome = self.run(self.dump_command(pid, options), DUMP_LOG);
        let kills = !options.iter().any(|option| STAYS.contains(option));
        if outcome.status.success() && kills {
            tree::wait_free(&tree);
        }
        outcome
    }

    /// Dumps the tree of `pid` as [`Stillframe::dump`] does, while the command stands still time
    /// and again, as `stalls` has it.
    #[must_use = "a dump may have failed"]
    pub fn dump_stalled(&self, pid: u32, options: &[&str], stalls: &mut Stalls) -> Outcome {
        let tree = tree::members(pid);
        let outcome = stalls.run(self, self.dump_command(pid, options), DUMP_LOG);
        let kills = !options.iter().any(|option| STAYS.contains(option));
        if outcome.status.success() && kills {
            tree::wait_free(&tree);
        }
        outcome
    }

    /// Restores, detached, while the command stands still time and again, as `stalls` has it.
    #[must_use = "a restore may have failed"]
    pub fn restore_stalled(&self, options: &[&str], stalls: &mut Stalls) -> Outcome {
        stalls.run(self, self.restore_command(options), RESTORE_LOG)
    }

    /// Makes a round of pre-dump of the tree of `pid`.
    #[must_use = "a pre-dump may have failed"]
    pub fn pre_dump(&self, pid: u32, options: &[&str]) -> Outcome {
        self.run(self.saving_command("pre-dump", pid, options), DUMP_LOG)
    }

    /// Restores, detached.
    #[must_use = "a restore may have failed"]
    pub fn restore(&self, options: &[&str]) -> Outcome {
        self.run(self.restore_command(options), RESTORE_LOG)
    }

    /// Dumps `spawned` and restores it, `times` in a row, with the same options for both; both
    /// must succeed.
    ///
    /// # Panics
    /// When one fails, with its log.
    #[track_caller]
    pub fn cycle(&self, times: usize, spawned: &Spawned, options: &[&str]) {
        for _ in 0..times {
            self.clear();
            self.dump(spawned.pid(), options).must();
            // What was forked after the tree was listed, and leads a session of its own.
            tree::reap_orphans();
            self.restore(options).must();
        }
    }

    /// Lets `command` run for `time` and kills it then, unless it ended before; its status in
    /// that case. Helpers that it started are left to themselves.
    ///
    /// # Panics
    /// When it cannot be started.
    pub fn kill_after(&self, mut command: Command, time: Duration) -> Option<ExitStatus> {
        let start = Instant::now();
        let mut child = command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .env("TESTKIT_MARK", self.mark())
            .spawn()
            .unwrap_or_else(|error| panic!("start {command:?}: {error}"));
        // The moment is what is being tested: nothing else could be waited for.
        std::thread::sleep(time.saturating_sub(start.elapsed()));
        let ended = child.try_wait().expect("a child can be waited for");
        if ended.is_none() {
            // It may end just now.
            let _ = child.kill();
            let _ = child.wait();
        }
        ended
    }

    /// Lists what a command that was killed, or a restore, left behind besides restored tasks: its
    /// helpers.
    pub fn helpers(&self) -> Vec<u32> {
        tree::marked(&format!("TESTKIT_MARK={}", self.mark()))
    }

    /// The value of `TESTKIT_MARK` in the environment of a command whose helpers
    /// [`Stillframe::helpers`] is to list.
    pub fn mark(&self) -> String {
        self.scratch.path().display().to_string()
    }

    /// The ends of the logs of the last dump and the last restore.
    pub fn logs(&self) -> String {
        let logs =
            [DUMP_LOG, RESTORE_LOG].map(|log| last_lines(&read_lossy(&self.images.join(log))));
        logs.join("\n---\n")
    }

    /// Removes the images.
    pub fn clear(&self) {
        // Nothing there is as good.
        let _ = fs::remove_dir_all(&self.images);
    }

    fn run(&self, command: Command, log: &str) -> Outcome {
        self.run_beside(command, log, |_, ended| {
            let _ = ended.recv_timeout(LONGEST_RUN);
        })
    }

    /// Runs a command, and what has `beside` its pid until that returns or it has ended; then it is
    /// killed.
    fn run_beside(
        &self,
        mut command: Command,
        log: &str,
        beside: impl FnOnce(u32, &Receiver<()>) + Send,
    ) -> Outcome {
        let log = self.images.join(log);
        let _ = fs::remove_file(&log);
        let start = Instant::now();
        // To files and not to pipes: a restored task that inherited a pipe would keep it open.
        let output = tempfile::NamedTempFile::new().expect("a temporary file can be made");
        let handle = || output.reopen().expect("the file was just made");
        let mut child = command
            .stdout(handle())
            .stderr(handle())
            .spawn()
            .unwrap_or_else(|error| panic!("start {command:?}: {error}"));
        let pid = child.id();
        let (ended, end) = channel::<()>();
        let (status, elapsed) = std::thread::scope(|scope| {
            scope.spawn(move || {
                beside(pid, &end);
                if end.try_recv() == Err(TryRecvError::Empty) {
                    tree::signal(pid, Signal::KILL);
                }
            });
            let status = child.wait().expect("a child can be waited for");
            let elapsed = start.elapsed();
            drop(ended);
            (status, elapsed)
        });
        Outcome {
            what: format!("{command:?}"),
            status,
            elapsed,
            output: read_lossy(output.path()),
            log: read_lossy(&log),
        }
    }
}

/// How a command stands still: stopped by a signal at random moments, for random times, of which
/// few are longer than anybody's patience.
pub struct Stalls {
    chance: Chance,
    /// How long it runs between two of them, at most.
    apart: Duration,
    /// How many there were.
    pub count: usize,
}

impl Stalls {
    /// As `chance` has it, with at most so much time between two of them.
    pub fn new(chance: Chance, apart: Duration) -> Self {
        Self {
            chance,
            apart,
            count: 0,
        }
    }

    fn run(&mut self, stillframe: &Stillframe, command: Command, log: &str) -> Outcome {
        const SHORT: Duration = Duration::from_millis(20);
        const LONG: Duration = Duration::from_millis(2200);
        const LONG_ONE_IN: u64 = 40;
        stillframe.run_beside(command, log, |pid, ended| {
            let begun = Instant::now();
            while begun.elapsed() < LONGEST_RUN {
                let apart = self.chance.time(self.apart);
                if ended.recv_timeout(apart) != Err(RecvTimeoutError::Timeout) {
                    return;
                }
                let time = match self.chance.once_in(LONG_ONE_IN) {
                    true => LONG,
                    false => self.chance.time(SHORT),
                };
                tree::signal(pid, Signal::STOP);
                // The time is what is being tested: nothing else could be waited for.
                std::thread::sleep(time);
                tree::signal(pid, Signal::CONT);
                self.count += 1;
            }
        })
    }
}

fn read_lossy(path: &Path) -> String {
    fs::read(path).map_or_else(
        |error| format!("({}: {error})", path.display()),
        |bytes| String::from_utf8_lossy(&bytes).into_owned(),
    )
}

fn last_lines(log: &str) -> String {
    const MOST_LINES: usize = 60;
    let lines: Vec<&str> = log.lines().collect();
    lines[lines.len().saturating_sub(MOST_LINES)..].join("\n")
}

/// How one run of the command ended.
#[derive(Debug)]
pub struct Outcome {
    /// The command line.
    pub what: String,
    /// Its exit status.
    pub status: ExitStatus,
    /// How long it ran.
    pub elapsed: Duration,
    /// Its stdout and stderr.
    pub output: String,
    /// Its log file, or why there is none.
    pub log: String,
}

impl Outcome {
    /// Insists that it succeeded.
    ///
    /// # Panics
    /// When it did not, with everything that it wrote.
    #[track_caller]
    pub fn must(self) -> Self {
        assert!(self.status.success(), "{}", self.told());
        self
    }

    /// Insists that it failed, by itself and not by a signal.
    ///
    /// # Panics
    /// When it succeeded or crashed, with everything that it wrote.
    #[track_caller]
    pub fn must_fail(self) -> Self {
        let code = self.status.code();
        assert!(code.is_some_and(|code| code != 0), "{}", self.told());
        self
    }

    /// Insists that what it wrote, to its output or its log, names each of `names`.
    ///
    /// # Panics
    /// When one is missing.
    #[track_caller]
    pub fn names(self, names: &[&str]) -> Self {
        for name in names {
            let named = self.output.contains(name) || self.log.contains(name);
            assert!(named, "{name:?} is not named by {}", self.told());
        }
        self
    }

    /// The command, its status, output and the end of its log.
    pub fn told(&self) -> String {
        format!(
            "{}\n{} after {:?}\n--- output\n{}\n--- end of the log\n{}\n---",
            self.what,
            self.status,
            self.elapsed,
            self.output,
            last_lines(&self.log)
        )
    }
}
