//! One program, taken through cycles of dump and restore in one way.
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use testkit::chance::Chance;
use testkit::stillframe::{Outcome, Stillframe};
use testkit::{tree, wait};

use crate::error::{Result, failure, file_error};
use crate::{Program, Work};

/// How long a program may take to begin, and to go on after a restore, on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);
/// The longest time between a sign of life and the next dump: it hits another place each time.
const LONGEST_PAUSE: Duration = Duration::from_millis(700);
/// How often a dump is tried that is refused because of the moment.
const MOST_TRIES: usize = 60;
/// How often a restore is tried for which files have to be shortened first.
const MOST_SHORTENED: usize = 20;
/// The exit status of what is refused.
const REFUSED: i32 = 3;
/// Images of the rounds before a last dump.
const ROUNDS: usize = 2;

/// How a program is saved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum SaveMethod {
    /// Dumped, which kills it, and restored.
    Dump,
    /// Dumped live, seen to go on, killed, and restored as it was at the instant.
    Live,
    /// Dumped over two pre-dumps, and restored.
    Predump,
}

impl SaveMethod {
    /// All of them.
    pub const ALL: &'static [Self] = &[Self::Dump, Self::Live, Self::Predump];

    /// As on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Dump => "dump",
            Self::Live => "live",
            Self::Predump => "predump",
        }
    }
}

/// What is to be tried.
pub struct Trial {
    program: &'static Program,
    way: SaveMethod,
    cycles: usize,
    binary: PathBuf,
    folder: PathBuf,
}

/// How it ended.
pub enum TrialResult {
    /// As it should.
    Went,
    /// The dump was refused; the program went on undisturbed.
    Refused(String),
    /// It did not go on as it should.
    Failed(String),
}

/// What came out.
pub struct Report {
    pub program: &'static Program,
    pub way: SaveMethod,
    /// Whole cycles.
    pub cycles: usize,
    /// Refusals that another try helped with, each once.
    pub retried: Vec<String>,
    pub dumps: Vec<Duration>,
    pub restores: Vec<Duration>,
    pub tasks: usize,
    pub threads: usize,
    pub end: TrialResult,
}

impl Report {
    /// Tells whether something went wrong.
    pub fn has_failed(&self) -> bool {
        matches!(self.end, TrialResult::Failed(_))
    }
}

/// What one cycle came to.
enum Cycle {
    Went,
    Refused(String),
}

impl Trial {
    /// Makes the plan to try `program`, with its files and images in a folder below `scratch`.
    pub fn new(
        program: &'static Program,
        way: SaveMethod,
        cycles: usize,
        binary: PathBuf,
        scratch: &Path,
    ) -> Self {
        let folder = scratch.join(format!("{}-{}", program.name, way.name()));
        Self {
            program,
            way,
            cycles,
            binary,
            folder,
        }
    }

    /// Tries it; whatever happens, the program is gone afterwards.
    pub fn run(self) -> Report {
        let mut report = Report {
            program: self.program,
            way: self.way,
            cycles: 0,
            retried: Vec::new(),
            dumps: Vec::new(),
            restores: Vec::new(),
            tasks: 0,
            threads: 0,
            end: TrialResult::Went,
        };
        // What waits for a program panics where it waits in vain.
        let tried = catch_unwind(AssertUnwindSafe(|| self.go_through(&mut report)));
        report.end = match tried {
            Ok(Ok(end)) => end,
            Ok(Err(error)) => TrialResult::Failed(error.to_string()),
            Err(panic) => TrialResult::Failed(words(&*panic)),
        };
        report
    }

    fn go_through(&self, report: &mut Report) -> Result<TrialResult> {
        let own = self.folder.join("program");
        std::fs::create_dir_all(&own).map_err(file_error("make", &own))?;
        let mut chance = Chance::of(&format!("{} {}", self.program.name, self.way.name()));
        let mut work = self.program.start(&own)?;
        grow(&mut *work, 0, "begins")?;
        let members = work.spawned().tree();
        report.tasks = members.len();
        report.threads = members.iter().map(|&pid| tree::threads(pid).len()).sum();
        while report.cycles < self.cycles {
            // The moment is what is being tried: nothing else could be waited for.
            std::thread::sleep(chance.time(LONGEST_PAUSE));
            match self.cycle(&mut *work, report, &mut chance)? {
                Cycle::Went => report.cycles += 1,
                Cycle::Refused(why) => {
                    let done = work.progress()?;
                    grow(&mut *work, done, "goes on after a refusal")?;
                    work.finish()?;
                    return Ok(TrialResult::Refused(why));
                }
            }
        }
        work.finish()?;
        Ok(TrialResult::Went)
    }

    /// Saves it once and brings it back, and waits until it has gone on.
    fn cycle(
        &self,
        work: &mut dyn Work,
        report: &mut Report,
        chance: &mut Chance,
    ) -> Result<Cycle> {
        let images = self.folder.join("images");
        let _ = std::fs::remove_dir_all(&images);
        let stillframe = |name: &str| Stillframe::new(&self.binary).images_at(images.join(name));
        let mut options = self.program.options.to_vec();
        let mut last = 0;
        if self.way == SaveMethod::Predump {
            for round in 0..ROUNDS {
                let parent = format!("../{}", round.saturating_sub(1));
                let over: &[&str] = if round == 0 {
                    &[]
                } else {
                    &["--prev-images-dir", &parent]
                };
                let pid = work.spawned().pid();
                let saved = stillframe(&round.to_string()).pre_dump(pid, over);
                if saved.status.code() == Some(REFUSED) {
                    return Ok(Cycle::Refused(saved.output.trim().to_owned()));
                }
                check(&saved)?;
            }
            last = ROUNDS;
        }
        let parent = format!("../{}", last.saturating_sub(1));
        match self.way {
            SaveMethod::Dump => {}
            SaveMethod::Live => options.push("--live"),
            SaveMethod::Predump => options.extend(["--prev-images-dir", &parent]),
        }
        let stillframe = stillframe(&last.to_string());
        let others = others(work);
        let saved = match self.dump(&stillframe, work, &options, report, chance)? {
            Ok(saved) => saved,
            Err(why) => return Ok(Cycle::Refused(why)),
        };
        report.dumps.push(saved.elapsed);
        if self.way == SaveMethod::Live {
            let done = work.progress()?;
            grow(work, done, "goes on after a live dump")?;
            if self.program.moves_on.is_some() {
                return Ok(Cycle::Went);
            }
            work.spawned().kill();
        }
        reap_orphans(&others);
        let done = work.progress()?;
        let restored = self.restore(&stillframe)?;
        report.restores.push(restored.elapsed);
        if self.way == SaveMethod::Live {
            work.rewound();
        }
        grow(work, done, "goes on after a restore")
            .map_err(|error| failure(format!("{error}\n{}\n{}", saved.told(), restored.told())))?;
        Ok(Cycle::Went)
    }

    /// Dumps it, again where only the moment was wrong; why it is refused otherwise.
    fn dump(
        &self,
        stillframe: &Stillframe,
        work: &dyn Work,
        options: &[&str],
        report: &mut Report,
        chance: &mut Chance,
    ) -> Result<std::result::Result<Outcome, String>> {
        let mut tries = 0;
        loop {
            let saved = stillframe.dump(work.spawned().pid(), options);
            if saved.status.code() != Some(REFUSED) {
                return check(&saved).map(|()| Ok(saved));
            }
            let why = saved.output.trim().to_owned();
            tries += 1;
            // Another try helps with what is there for a moment, not with what needs an option.
            if tries == MOST_TRIES || why.contains("(use --") {
                return Ok(Err(why));
            }
            if !report.retried.contains(&why) {
                report.retried.push(why);
            }
            std::thread::sleep(chance.time(LONGEST_PAUSE / 10));
        }
    }

    /// Restores it. Files that have grown since a live dump are as long as they were, first.
    fn restore(&self, stillframe: &Stillframe) -> Result<Outcome> {
        let mut tries = 0;
        loop {
            let restored = stillframe.restore(self.program.options);
            tries += 1;
            let again = self.way == SaveMethod::Live && tries < MOST_SHORTENED;
            if !again || restored.status.success() || !shorten(&restored.output) {
                return check(&restored).map(|()| restored);
            }
        }
    }
}

/// Gives the file that a refusal of a restore names its size of then, if it has grown since; tells
/// whether it did.
fn shorten(refusal: &str) -> bool {
    let Some((path, was)) = refusal.lines().find_map(grown) else {
        return false;
    };
    let file = std::fs::OpenOptions::new().write(true).open(path);
    file.is_ok_and(|file| file.set_len(was).is_ok())
}

/// The path and the size in a line `…: PATH: size is NUMBER bytes, was NUMBER`.
fn grown(line: &str) -> Option<(&str, u64)> {
    let (before, after) = line.split_once(": size is ")?;
    let (_, path) = before.rsplit_once(": ")?;
    let (is, was) = after.split_once(" bytes, was ")?;
    let (is, was): (u64, u64) = (is.parse().ok()?, was.trim().parse().ok()?);
    (is > was).then_some((path, was))
}

/// The children of this process that are not of the program's tree.
fn others(work: &dyn Work) -> Vec<u32> {
    let root = work.spawned().pid();
    let mut children = tree::children(std::process::id());
    children.retain(|&pid| pid != root);
    children
}

/// Waits for the end of what became this process's child when its parent was killed: its pid is
/// free only then.
fn reap_orphans(others: &[u32]) {
    wait::wait_until("the end of all that was killed", PATIENCE, || {
        let mut orphans = tree::children(std::process::id());
        orphans.retain(|pid| !others.contains(pid));
        orphans.iter().for_each(|&pid| tree::reap(pid));
        orphans.is_empty()
    });
}

/// Waits until more than `done` is done.
fn grow(work: &mut dyn Work, done: u64, what: &str) -> Result<()> {
    let begun = Instant::now();
    let mut failed = None;
    let grown = wait::try_wait_for(PATIENCE, || match work.progress() {
        Ok(now) if now > done => Some(()),
        Ok(_) if !work.spawned().is_alive() => {
            failed = Some(failure("it has ended"));
            Some(())
        }
        Ok(_) => None,
        Err(error) => {
            failed = Some(error);
            Some(())
        }
    });
    match (grown, failed) {
        (_, Some(error)) => Err(error),
        (Some(()), None) => Ok(()),
        (None, None) => {
            let states = states(work);
            let waited = begun.elapsed().as_secs();
            Err(failure(format!(
                "it never {what}: {done} for {waited} s; {states}"
            )))
        }
    }
}

/// The tasks of a program and what they wait in.
fn states(work: &dyn Work) -> String {
    let mut told = Vec::new();
    for pid in work.spawned().tree() {
        for tid in tree::threads(pid) {
            let read =
                |what: &str| std::fs::read_to_string(format!("/proc/{pid}/task/{tid}/{what}"));
            let name = read("comm").unwrap_or_default();
            let call = read("syscall").unwrap_or_default();
            let state = tree::state(tid).unwrap_or('?');
            let call = call.split(' ').next().unwrap_or_default().trim();
            told.push(format!("{tid} {} {state} in call {call}", name.trim()));
        }
    }
    told.join(", ")
}

fn check(outcome: &Outcome) -> Result<()> {
    if outcome.status.success() {
        return Ok(());
    }
    Err(failure(outcome.told()))
}

/// What a panic said.
fn words(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().cloned();
    text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()))
        .unwrap_or_else(|| "a panic without words".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_has_grown_is_shortened() {
        let line = "stillframe: restore failed: /a b/steps: size is 169 bytes, was 101";
        assert_eq!(grown(line), Some(("/a b/steps", 101)));
        assert_eq!(grown("restore failed: /a: size is 1 bytes, was 101"), None);
        assert_eq!(grown("restore failed"), None);
    }
}
