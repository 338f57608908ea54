//! The comparison itself: no state of the ledger's samples changes without its being seen.
use std::path::Path;

use crate::samples::{self, Place, Sample};

use super::{Trial, Variant, differing};
use crate::chance::Chance;
use crate::facts::Facts;
use crate::stillframe::Stillframe;
use crate::storm::step::{Action, Step, to_text};
use crate::subject::Subject;

/// States that a kernel, a processor or a host may lack, or for which it may lack the capability.
const MAY_LACK: [&str; 10] = [
    "auxiliary-vector",
    "clamps",
    "cpuid",
    "deadline",
    "io-flusher",
    "login",
    "marks",
    "memory-merge",
    "real-time",
    "speculation",
];

fn step(task: u8, action: Action) -> Step {
    Step { task, action }
}

/// Who can be in a state: the root, its child, or a thread of that.
fn change(sample: &Sample, first: u16) -> Step {
    let (task, helper) = match sample.place {
        Place::Anywhere => (0, None),
        Place::Children => (1, None),
        // One who uses files as somebody else may not do the rest.
        Place::Helpers => (1, Some(u8::from(sample.name == "users-of-files"))),
    };
    let what = sample.name.to_owned();
    step(
        task,
        Action::Change {
            what,
            first,
            helper,
        },
    )
}

/// What the storm sees of a subject, but for what the questions themselves change.
fn look(trial: &Trial<'_>) -> (Facts, String) {
    let told = trial.ask("now").expect("it is right");
    let of_questions = ["registers", "xstate", "page", "map "];
    (trial.facts().without(&of_questions), told)
}

/// Has the steps up to the next pause made, and tells what differs then.
fn go_on(trial: &Trial<'_>) -> Vec<String> {
    let (facts, told) = look(trial);
    trial.subject.ask("go");
    let (facts_now, told_now) = look(trial);
    let mut differences = facts.diff(&facts_now);
    differences.extend(differing(&told, &told_now, "before"));
    differences
}

/// At each second pause nothing has been changed since, at the others one state.
#[test]
fn each_state_that_changes_is_seen_to_differ() {
    crate::needs_root!();
    let fork = Action::Fork {
        child: 1,
        shares: 0,
    };
    let mut steps = vec![step(0, fork), step(0, Action::Pause)];
    for sample in samples::own() {
        let pause = step(0, Action::Pause);
        steps.extend([pause.clone(), change(sample, 1), pause]);
    }
    let list = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(list.path(), to_text(&steps)).expect("it can be written");
    let stillframe = Stillframe::new(Path::new("none"));
    let trial = Trial {
        stillframe: &stillframe,
        subject: Subject::start("storm", &[&list.path().display().to_string()]),
        variant: Variant::Plain,
        restored: 0,
        kills: 0,
        stalls: 0,
        chance: Chance::with(0),
        looks_disturb: false,
    };
    assert_eq!(trial.subject.ask("go"), "paused");
    let mut unseen = Vec::new();
    for sample in samples::own() {
        let same = go_on(&trial);
        assert_eq!(same, Vec::<String>::new(), "before {}", sample.name);
        if go_on(&trial).is_empty() {
            unseen.push(sample.name);
        }
    }
    trial.subject.ask("clean");
    unseen.retain(|name| !MAY_LACK.contains(name));
    assert!(unseen.is_empty(), "nobody sees: {unseen:?}");
}
