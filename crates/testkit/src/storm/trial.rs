//! One try of a list of steps: dumped and restored at every pause, and compared.
use std::path::Path;
use std::time::Duration;

use super::step::{Action, Opened, Step, Wait, to_text};
use crate::chance::Chance;
use crate::facts::Facts;
use crate::stillframe::{Outcome, Stillframe};
use crate::subject::Subject;
use crate::tree;
use crate::wait::{SOON, try_wait_for, wait_until};

/// What every dump and restore is allowed.
const OPTIONS: &[&str] = &["--tcp-established", "--file-locks", "--link-remap"];
/// The exit status of a dump that cannot save its target and says why.
const REFUSED: i32 = 3;
/// How often a dump, and how often a restore, is killed at each pause.
const KILLS: usize = 3;

/// How a tree is dumped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Variant {
    /// And killed.
    Plain,
    /// And left running (`--leave-running`), which it must not notice, before it is dumped and
    /// killed.
    Running,
    /// While it runs (`--live`), which it must not notice; it is killed, and the image restored.
    Live,
    /// Twice while it runs (`pre-dump`), with a dump of the rest over that.
    Predump,
    /// And the dump, then the restore, is killed at random moments before it may end.
    Kills,
}

impl Variant {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self::Plain,
        Self::Running,
        Self::Live,
        Self::Predump,
        Self::Kills,
    ];

    /// How the tree of a seed is dumped where nothing else is said.
    pub fn of_seed(seed: u64) -> Self {
        Self::ALL[(seed % Self::ALL.len() as u64) as usize]
    }

    /// Its name on a command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Running => "running",
            Self::Live => "live",
            Self::Predump => "predump",
            Self::Kills => "kills",
        }
    }
}

/// How a try ended without a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Ended {
    /// Everything came back at each pause, with so many kills on the way.
    Restored {
        /// Of dumps and restores.
        kills: usize,
    },
    /// A dump was refused, with what it said, and nothing changed.
    Refused(String),
}

/// Makes `steps` and has the tree dumped and restored at each pause.
///
/// # Errors
/// What was wrong: what differs, or what failed with its log.
pub fn try_steps(
    stillframe: &Stillframe,
    steps: &[Step],
    variant: Variant,
) -> Result<Ended, String> {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    let trial = || cycles(stillframe, steps, variant);
    catch_unwind(AssertUnwindSafe(trial)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let told = text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()));
        Err(told.unwrap_or_else(|| "a panic without words".into()))
    })
}

fn cycles(stillframe: &Stillframe, steps: &[Step], variant: Variant) -> Result<Ended, String> {
    let list = tempfile::NamedTempFile::new().map_err(|error| error.to_string())?;
    // A stop while it runs, or by one who is killed, still ends such a wait.
    let ends = [Variant::Live, Variant::Predump, Variant::Kills].contains(&variant);
    let mut steps = steps.to_vec();
    steps.retain(|step| !ends || !waits_in_epoll(step));
    steps.retain(|step| variant != Variant::Live || !connects_over_tcp(step));
    std::fs::write(list.path(), to_text(&steps)).map_err(|error| error.to_string())?;
    let path = list.path().display().to_string();
    let mut trial = Trial {
        stillframe,
        subject: Subject::start("storm", &[&path]),
        variant,
        restored: 0,
        kills: 0,
        chance: Chance::with(steps.len() as u64),
        looks_disturb: steps.iter().any(waits_in_epoll),
    };
    while trial.subject.ask("go") == "paused" {
        let before = trial.look_before()?;
        if let Some(refusal) = trial.cycle(&before)? {
            if variant == Variant::Predump {
                trial.compare_tracked(&before)?;
            } else {
                trial.compare(&before, "after a refusal")?;
            }
            return Ok(Ended::Refused(refusal));
        }
        trial.compare(&before, "after the restore")?;
        trial.restored += 1;
    }
    let kills = trial.kills;
    Ok(Ended::Restored { kills })
}

fn waits_in_epoll(step: &Step) -> bool {
    let wait = Wait::EpollTimed;
    matches!(step.action, Action::Thread { wait: found, .. } if found == wait)
}

/// Whether a step makes a TCP connection. Of one whose other end is closed, the kernel tells that
/// end about the tree that was dumped live and killed then: nothing holds that back.
fn connects_over_tcp(step: &Step) -> bool {
    let tcp = Opened::Tcp;
    matches!(step.action, Action::Open { kind, .. } if kind == tcp)
}

/// A subject under way.
struct Trial<'a> {
    stillframe: &'a Stillframe,
    subject: Subject,
    variant: Variant,
    restored: usize,
    kills: usize,
    chance: Chance,
    /// Whether a thread waits in a call that a stop ends.
    looks_disturb: bool,
}

/// What can be seen of a subject, from outside and by itself.
struct Seen {
    facts: Facts,
    told: String,
}

/// Why a dump was refused, if it was.
type Refusal = Option<String>;

impl Trial<'_> {
    /// Looks at the subject before something is done to it.
    fn look_before(&self) -> Result<Seen, String> {
        // What it is asked it remembers, so facts come last.
        let told = self.ask("before the dump")?;
        let facts = self.facts();
        Ok(Seen { facts, told })
    }

    fn facts(&self) -> Facts {
        wait_until("the subject to wait", SOON, || self.subject.is_waiting());
        if self.looks_disturb {
            Facts::moving(self.subject.pid())
        } else {
            Facts::still(self.subject.pid())
        }
    }

    /// Asks for what it has, which must be right.
    fn ask(&self, when: &str) -> Result<String, String> {
        let told = self.subject.ask("describe");
        let wrong = self.subject.ask("check");
        if wrong != "right" {
            return Err(format!(
                "wrong {when}, restored {} times:\n{wrong}",
                self.restored
            ));
        }
        Ok(told)
    }

    /// Looks at what became of the subject, and insists that nothing differs.
    fn compare(&self, before: &Seen, when: &str) -> Result<(), String> {
        self.compare_facts(before, when)?;
        let told = self.ask(when)?;
        let mut differences = differing(&before.told, &told, "before");
        differences.extend(differing(&told, &before.told, "now"));
        if differences.is_empty() {
            return Ok(());
        }
        Err(format!("differs {when}:\n{}", differences.join("\n")))
    }

    fn compare_facts(&self, before: &Seen, when: &str) -> Result<(), String> {
        let differences = || {
            let mut differences = before.facts.diff(&self.facts());
            if self.variant == Variant::Kills {
                // A killed dump leaves code in the padding, which no task executes.
                let padding = vdso_padding(self.subject.pid());
                differences.retain(|line| !line.contains(&padding));
            }
            differences
        };
        // What a killed dump had begun in the target ends by itself.
        let is_untouched = || differences().is_empty().then_some(());
        if self.variant == Variant::Kills && try_wait_for(SOON, is_untouched).is_some() {
            return Ok(());
        }
        match differences() {
            found if found.is_empty() => Ok(()),
            found => Err(format!("differs {when}:\n{}", found.join("\n"))),
        }
    }

    /// Compares all but mappings, which show that writes are tracked.
    fn compare_tracked(&self, before: &Seen) -> Result<(), String> {
        let plain = |facts: Facts| facts.without(&["map "]);
        let differences = plain(before.facts.clone()).diff(&plain(self.facts()));
        if differences.is_empty() {
            return Ok(());
        }
        Err(format!(
            "differs after a pre-dump:\n{}",
            differences.join("\n")
        ))
    }

    /// Dumps and restores.
    fn cycle(&mut self, before: &Seen) -> Result<Refusal, String> {
        self.stillframe.clear();
        match self.variant {
            Variant::Plain => {}
            Variant::Running => {
                let dump = self.dump(&["--leave-running"]);
                if let Some(refusal) = refused(dump)? {
                    return Ok(Some(refusal));
                }
                self.compare_facts(before, "after a dump that left it running")?;
                self.stillframe.clear();
            }
            Variant::Live => return self.live_cycle(before),
            Variant::Predump => return self.chain_cycle(before),
            Variant::Kills => return self.killed_cycle(before),
        }
        if let Some(refusal) = refused(self.dump(&[]))? {
            return Ok(Some(refusal));
        }
        succeeded(self.stillframe.restore(OPTIONS))?;
        Ok(None)
    }

    fn dump(&self, options: &[&str]) -> Outcome {
        let options = [OPTIONS, options].concat();
        self.stillframe.dump(self.subject.pid(), &options)
    }

    fn live_cycle(&self, before: &Seen) -> Result<Refusal, String> {
        if let Some(refusal) = refused(self.dump(&["--live"]))? {
            return Ok(Some(refusal));
        }
        self.compare_facts(before, "after a live dump")?;
        let tasks = self.subject.tree();
        self.subject.kill();
        tree::wait_gone(&tasks);
        succeeded(self.stillframe.restore(OPTIONS))?;
        Ok(None)
    }

    fn chain_cycle(&self, before: &Seen) -> Result<Refusal, String> {
        let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
        let images = |number: usize| folder.path().join(number.to_string());
        for number in 0..2 {
            let _ = std::fs::create_dir(images(number));
            let mut command = self.stillframe.command(&["pre-dump"]);
            command
                .args(["-t", &self.subject.pid().to_string()])
                .args(OPTIONS);
            command.arg("-D").arg(images(number));
            if number > 0 {
                command.args(["--prev-images-dir", "../0"]);
            }
            let output = command.output().map_err(|error| error.to_string())?;
            let told = String::from_utf8_lossy(&output.stderr).into_owned();
            match output.status.code() {
                Some(0) => self.compare_tracked(before)?,
                Some(REFUSED) => return Ok(Some(first_line(&told))),
                _ => return Err(format!("{}\npre-dump {number}: {told}", first_line(&told))),
            }
        }
        let scratch = Stillframe::new(self.stillframe.binary()).images_at(images(2));
        let options = [OPTIONS, &["--prev-images-dir", "../1"]].concat();
        if let Some(refusal) = refused(scratch.dump(self.subject.pid(), &options))? {
            return Ok(Some(refusal));
        }
        succeeded(scratch.restore(OPTIONS))?;
        Ok(None)
    }

    fn killed_cycle(&mut self, before: &Seen) -> Result<Refusal, String> {
        let first = self.dump(&["--leave-running"]);
        let window = longer(first.elapsed);
        if let Some(refusal) = refused(first)? {
            return Ok(Some(refusal));
        }
        let tasks = self.subject.tree();
        for _ in 0..KILLS {
            self.stillframe.clear();
            let command = self.stillframe.dump_command(self.subject.pid(), OPTIONS);
            let ended = self.kill_after(command, window, &tasks)?;
            if self.is_whole(&tasks)? {
                self.compare_facts(before, &format!("after a killed dump ({ended})"))?;
            } else {
                // It was past the point: then the image is whole.
                succeeded(self.stillframe.restore(OPTIONS))?;
                self.compare_facts(before, &format!("after a dump killed late ({ended})"))?;
            }
        }
        self.stillframe.clear();
        if let Some(refusal) = refused(self.dump(&[]))? {
            return Ok(Some(refusal));
        }
        let restored = self.stillframe.restore(OPTIONS);
        let window = longer(restored.elapsed);
        succeeded(restored)?;
        for _ in 0..KILLS {
            self.subject.kill();
            tree::wait_gone(&tasks);
            let command = self.stillframe.restore_command(OPTIONS);
            let ended = self.kill_after(command, window, &tasks)?;
            if !self.is_whole(&tasks)? {
                succeeded(self.stillframe.restore(OPTIONS))?;
            }
            self.compare_facts(before, &format!("after a killed restore ({ended})"))?;
        }
        Ok(None)
    }

    /// Kills `command` at a random moment of `window`, and waits until nothing of it is left; how
    /// it ended.
    fn kill_after(
        &mut self,
        command: std::process::Command,
        window: Duration,
        tasks: &[u32],
    ) -> Result<String, String> {
        let instant = self.chance.time(window);
        let ended = self.stillframe.kill_after(command, instant);
        self.kills += usize::from(ended.is_none());
        let told = format!("{ended:?} at {instant:?}");
        let settled = try_wait_for(SOON, || {
            let helpers = self.stillframe.helpers();
            helpers.iter().chain(tasks).for_each(|&pid| tree::reap(pid));
            tree::reap_orphans();
            let calm = |&pid: &u32| {
                let status = std::fs::read_to_string(format!("/proc/{pid}/status"));
                status.map_or(true, |status| {
                    status.contains("TracerPid:\t0") && !status.contains("State:\tT")
                })
            };
            (helpers.is_empty() && tasks.iter().all(calm)).then_some(())
        });
        settled.ok_or(format!("what was killed is not gone: {told}"))?;
        Ok(told)
    }

    /// Whether all of `tasks` are there, and not none of them.
    fn is_whole(&self, tasks: &[u32]) -> Result<bool, String> {
        let whole = try_wait_for(SOON, || {
            tasks.iter().for_each(|&pid| tree::reap(pid));
            let there = tasks.iter().filter(|&&pid| tree::exists(pid)).count();
            let root = self.subject.pid();
            let lives = tree::is_alive(root) && !tasks.iter().any(|&pid| is_doomed(pid));
            // One that has taken its SIGKILL shows nothing of it for a moment, but waits no more.
            if there == tasks.len() && lives && self.subject.is_waiting() {
                return Some(true);
            }
            // A session is free when its last orphan is: one of a restore may have been none of the
            // tree's tasks.
            tree::reap_orphans();
            let orphans = tree::children(std::process::id()).into_iter();
            let mut sessions = orphans.filter_map(tree::session);
            (there == 0 && !sessions.any(|one| tasks.contains(&one))).then_some(false)
        });
        whole.ok_or_else(|| {
            let states: Vec<_> = tasks.iter().map(|&pid| (pid, tree::state(pid))).collect();
            format!("neither all nor nothing is left\n{states:?}")
        })
    }
}

/// What `one` tells that `other` does not: of each line its first part and those that differ.
fn differing(one: &str, other: &str, when: &str) -> Vec<String> {
    const APART: &str = ", ";
    let lines = one
        .lines()
        .filter(|line| !other.lines().any(|known| known == *line));
    let show = |line: &str| {
        let name = line.split(APART).next().unwrap_or_default();
        let theirs = other
            .lines()
            .find(|line| line.split(APART).next() == Some(name));
        let known: Vec<&str> = theirs.unwrap_or_default().split(APART).collect();
        let parts = line.split(APART).skip(1);
        let parts: Vec<&str> = parts.filter(|part| !known.contains(part)).collect();
        format!("{when} {name}: {}", parts.join(APART))
    };
    lines.map(show).collect()
}

/// As long as a run took and a little more, where the last clean-up happens.
fn longer(time: Duration) -> Duration {
    time + time / 5
}

/// Whether a task has been killed but is not gone: it looks alive for a moment.
fn is_doomed(pid: u32) -> bool {
    const SIGKILL: u64 = 1 << 8;
    // Or is about to.
    const EXITING: u64 = 0x404;
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let pending = status.lines().filter_map(|line| {
        let line = line
            .strip_prefix("SigPnd:")
            .or(line.strip_prefix("ShdPnd:"));
        u64::from_str_radix(line?.trim(), 16).ok()
    });
    let is_killed = pending.fold(0, |all, set| all | set) & SIGKILL != 0;
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    let fields = stat.rsplit_once(") ").map(|(_, rest)| rest.split(' '));
    let flags = fields.and_then(|mut fields| fields.nth(6)?.parse::<u64>().ok());
    let is_ending = flags.is_some_and(|flags| flags & EXITING != 0);
    is_killed || (is_ending && tree::is_alive(pid))
}

/// How facts name the last page of a task's vDSO.
fn vdso_padding(pid: u32) -> String {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    let vdso = maps.lines().find(|line| line.ends_with("[vdso]"));
    let end = vdso.and_then(|line| line.split([' ', '-']).nth(1));
    let end = end.and_then(|end| u64::from_str_radix(end, 16).ok());
    format!(" page {:#x}: ", end.unwrap_or_default().wrapping_sub(4096))
}

/// Insists that a dump succeeded, or was refused by name; what it said then.
fn refused(dump: Outcome) -> Result<Refusal, String> {
    if dump.status.code() == Some(REFUSED) {
        return Ok(Some(first_line(&dump.output)));
    }
    succeeded(dump).map(|()| None)
}

fn succeeded(outcome: Outcome) -> Result<(), String> {
    if outcome.status.success() {
        Ok(())
    } else {
        Err(format!(
            "{}\n{}",
            first_line(&outcome.output),
            outcome.told()
        ))
    }
}

fn first_line(text: &str) -> String {
    text.lines().next().unwrap_or_default().to_owned()
}

/// The steps of a file, as they are kept.
///
/// # Errors
/// When it cannot be read, or a line is no step.
pub fn kept(path: &Path) -> Result<Vec<Step>, Box<dyn std::error::Error>> {
    Ok(super::step::from_text(&std::fs::read_to_string(path)?)?)
}

/// What a failure is about: its first words without what differs between two runs of it.
pub fn class(failure: &str) -> String {
    let mut lines = failure.lines();
    let first = lines.next().unwrap_or_default();
    let about = if first.starts_with("differs") || first.starts_with("wrong") {
        lines.next().unwrap_or_default()
    } else {
        ""
    };
    // Folders' names are made at random.
    let text = format!("{first}: {about}");
    let is_name = |word: &&str| !word.contains("/tmp/") && !word.contains("subject-");
    let text = text
        .split(' ')
        .filter(is_name)
        .collect::<Vec<_>>()
        .join(" ");
    let words = text.split(|letter: char| !letter.is_ascii_alphabetic());
    let words = words
        .filter(|word| word.len() > 1 && !word.chars().all(|letter| letter.is_ascii_hexdigit()));
    words.take(14).collect::<Vec<_>>().join(" ")
}
