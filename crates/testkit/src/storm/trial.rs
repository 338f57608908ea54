//! One try of a list of steps: dumped and restored at every pause, and compared.
mod kills;
#[cfg(test)]
mod shows;
mod stalls;

use std::path::Path;

use crate::samples;

use super::step::{Action, FileKind, Step, Wait, to_text};
use crate::chance::Chance;
use crate::facts::Facts;
use crate::stillframe::{Outcome, Stillframe};
use crate::subject::Subject;
use crate::tree;
use crate::wait::{SOON, wait_until};

/// The page that the kernel shows in every list of mappings, but for programs of 32 bits.
const VSYSCALL: &str = "map ffffffffff600000";
/// The number of the login session, which the kernel gives.
const LOGIN_SESSION: &str = " sessionid";
/// What every dump and restore is allowed.
const OPTIONS: &[&str] = &[
    "--tcp-established",
    "--file-locks",
    "--link-remap",
    "--perf-events",
];
/// The exit status of a dump that cannot save its target and says why.
const REFUSED: i32 = 3;

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
    /// And dumps of every kind, then the restore, are killed at random moments before they may end.
    Kills,
    /// And dumps of every kind, then the restore, are stopped at random moments, again and again.
    Stalls,
}

impl Variant {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Plain,
        Self::Running,
        Self::Live,
        Self::Predump,
        Self::Kills,
        Self::Stalls,
    ];

    /// How the tree of a seed is dumped where nothing else is said.
    pub fn of_seed(seed: u64) -> Self {
        Self::ALL[(seed % Self::ALL.len() as u64) as usize]
    }

    /// The one with that name.
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|variant| variant.name() == name)
    }

    /// Its name on a command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Running => "running",
            Self::Live => "live",
            Self::Predump => "predump",
            Self::Kills => "kills",
            Self::Stalls => "stalls",
        }
    }
}

/// How a try ended without a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TrialOutcome {
    /// Everything came back at each pause, with so many kills and stops of dumps and restores on
    /// the way.
    Restored {
        /// Those that were killed.
        kills: usize,
        /// How often they stood still.
        stalls: usize,
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
) -> Result<TrialOutcome, String> {
    use std::panic::{AssertUnwindSafe, catch_unwind};
    let trial = || cycles(stillframe, steps, variant);
    catch_unwind(AssertUnwindSafe(trial)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let told = text.or_else(|| panic.downcast_ref::<&str>().map(|&text| text.to_owned()));
        Err(told.unwrap_or_else(|| "a panic without words".into()))
    })
}

fn cycles(
    stillframe: &Stillframe,
    steps: &[Step],
    variant: Variant,
) -> Result<TrialOutcome, String> {
    let list = tempfile::NamedTempFile::new().map_err(|error| error.to_string())?;
    // A stop while it runs, or by one who is killed, still ends such a wait.
    let ends = [
        Variant::Live,
        Variant::Predump,
        Variant::Kills,
        Variant::Stalls,
    ];
    let ends = ends.contains(&variant);
    let mut steps = steps.to_vec();
    steps.retain(|step| !ends || !waits_in_epoll(step));
    let is_live = [Variant::Live, Variant::Stalls].contains(&variant);
    steps.retain(|step| !is_live || !connects_over_tcp(step));
    steps.retain(|step| variant != Variant::Kills || !installs_filter(step));
    steps.retain(|step| !ends || !has_contexts(step));
    steps.retain(|step| variant != Variant::Kills || !is_lost_by_kills(step));
    std::fs::write(list.path(), to_text(&steps)).map_err(|error| error.to_string())?;
    let path = list.path().display().to_string();
    let ends_leader = steps
        .first()
        .is_some_and(|step| step.action == Action::EndLeader);
    let subject = match ends_leader {
        false => Subject::start("storm", &[&path]),
        true => Subject::start_without_leader("storm", &[&path]),
    };
    let mut trial = Trial {
        stillframe,
        subject,
        variant,
        restored: 0,
        kills: 0,
        stalls: 0,
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
            trial.subject.ask("clean");
            return Ok(TrialOutcome::Refused(refusal));
        }
        trial.compare(&before, "after the restore")?;
        trial.restored += 1;
    }
    trial.subject.ask("clean");
    Ok(TrialOutcome::Restored {
        kills: trial.kills,
        stalls: trial.stalls,
    })
}

fn waits_in_epoll(step: &Step) -> bool {
    let wait = Wait::EpollTimed;
    matches!(step.action, Action::Thread { wait: found, .. } if found == wait)
}

/// What a killed dump or restore may leave otherwise than it was, or tells tasks (docs/limits.md).
fn is_lost_by_kills(step: &Step) -> bool {
    let Action::Change { what, first, .. } = &step.action else {
        return false;
    };
    let is_told = || samples::may_tell_of_stops(what, usize::from(*first));
    samples::find(what).is_some_and(|sample| !sample.is_safe) || is_told()
}

/// What the kernel writes into a task's memory for it is not tracked: that is refused.
fn has_contexts(step: &Step) -> bool {
    matches!(step.action, Action::Requests { .. })
}

/// What a killed dump was about to have a task call is judged by the task's filters, and these kill
/// for it (docs/limits.md).
fn installs_filter(step: &Step) -> bool {
    matches!(step.action, Action::Filter { .. })
}

/// Tells whether a step makes a TCP connection. Of one whose other end is closed, the kernel tells
/// that end about the tree that was dumped live and killed then: nothing holds that back.
fn connects_over_tcp(step: &Step) -> bool {
    let tcp = FileKind::Tcp;
    matches!(step.action, Action::Open { kind, .. } if kind == tcp)
}

/// A subject under way.
struct Trial<'a> {
    stillframe: &'a Stillframe,
    subject: Subject,
    variant: Variant,
    restored: usize,
    kills: usize,
    stalls: usize,
    chance: Chance,
    /// True if a thread waits in a call that a stop ends.
    looks_disturb: bool,
}

/// What can be seen of a subject, from outside and by itself.
struct SubjectView {
    facts: Facts,
    told: String,
}

/// Why a dump was refused, if it was.
type Refusal = Option<String>;

impl Trial<'_> {
    /// Looks at the subject before something is done to it.
    fn look_before(&self) -> Result<SubjectView, String> {
        // What it is asked it remembers, so facts come last.
        let told = self.ask("before the dump")?;
        let facts = self.facts();
        Ok(SubjectView { facts, told })
    }

    fn facts(&self) -> Facts {
        wait_until("the subject to wait", SOON, || self.subject.is_waiting());
        let facts = if self.looks_disturb {
            Facts::moving(self.subject.pid())
        } else {
            Facts::still(self.subject.pid())
        };
        // A program of 32 bits has it in its list afterwards, and who has another login uid a new
        // session (docs/limits.md).
        facts.without(&[VSYSCALL, LOGIN_SESSION])
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
    fn compare(&self, before: &SubjectView, when: &str) -> Result<(), String> {
        self.compare_facts(before, when)?;
        let mut told = [before.told.clone(), self.ask(when)?];
        if self.variant == Variant::Kills {
            told = told.map(|told| without_refusals(&told));
        }
        let [then, now] = told;
        let mut differences = differing(&then, &now, "before");
        differences.extend(differing(&now, &then, "now"));
        if differences.is_empty() {
            return Ok(());
        }
        Err(format!("differs {when}:\n{}", differences.join("\n")))
    }

    fn compare_facts(&self, before: &SubjectView, when: &str) -> Result<(), String> {
        let found = match self.variant {
            Variant::Kills => self.differences_at_last(before),
            _ => before.facts.diff(&self.facts()),
        };
        if found.is_empty() {
            return Ok(());
        }
        let root = self.subject.pid();
        let end = if self.subject.is_alive() {
            None
        } else {
            tree::reap(root);
            tree::last_end(root)
        };
        let end = end.map_or(String::new(), |end| format!("\nthe root ended: {end}"));
        Err(format!("differs {when}:\n{}{end}", found.join("\n")))
    }

    /// Compares all but mappings, which show that writes are tracked.
    fn compare_tracked(&self, before: &SubjectView) -> Result<(), String> {
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
    fn cycle(&mut self, before: &SubjectView) -> Result<Refusal, String> {
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
            Variant::Stalls => return self.stalled_cycle(before),
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

    fn live_cycle(&self, before: &SubjectView) -> Result<Refusal, String> {
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

    fn chain_cycle(&self, before: &SubjectView) -> Result<Refusal, String> {
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
}

/// Without what UDP sockets were refused: a dump that is killed right after it has taken that does
/// not put it back (docs/limits.md).
fn without_refusals(told: &str) -> String {
    let lines = told.lines().map(|line| match line.contains(" Udp,") {
        true => line.replace(" | ERR", "").replace("(ERR)", "(0x0)"),
        false => line.to_owned(),
    });
    lines.collect::<Vec<_>>().join("\n")
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

/// What the first line of kept steps begins with; the name of a variant follows.
const VARIANT_LINE: &str = "# variant ";

/// The steps of a file and the variant in which they failed, as they are kept.
///
/// # Errors
/// When it cannot be read, or a line is no step.
pub fn kept(path: &Path) -> Result<(Vec<Step>, Variant), Box<dyn std::error::Error>> {
    let text = std::fs::read_to_string(path)?;
    let variant = text.lines().next().and_then(|line| {
        let name = line.strip_prefix(VARIANT_LINE)?;
        Variant::of_name(name)
    });
    let steps = super::step::from_text(&text)?;
    Ok((steps, variant.unwrap_or(Variant::Plain)))
}

/// What a file that keeps `steps` holds.
pub fn to_keep(steps: &[Step], variant: Variant) -> String {
    format!("{VARIANT_LINE}{}\n{}", variant.name(), to_text(steps))
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
