//! A thread that handles what its own instructions bring about. Arguments: `steps`, it steps
//! itself by the trap flag; `intercepts`, its calls are handed to itself, also while it makes none,
//! or with `intercepts seldom` for moments.
//!
//! `rounds` answers how often it did so, `check` "right" if each trap and each call came to its
//! handler.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use crate::calls::traps::{ANSWER, count_traps, intercept_calls, intercepted, step};

use super::{Control, Failure, not_understood};

const STEPS: u64 = 500;
const SPINS: u64 = 200_000;

/// Counts of the thread: all rounds, and those with a wrong result.
#[derive(Default)]
struct TrapCounts {
    rounds: AtomicU64,
    wrong: AtomicU64,
}

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let words = arguments.iter().map(String::as_str).collect::<Vec<_>>();
    let round: fn() -> bool = match words[..] {
        ["steps"] => || step(STEPS) >= 2 * STEPS,
        ["intercepts"] => || intercepted(SPINS, true) == ANSWER,
        ["intercepts", "seldom"] => || intercepted(SPINS, false) == ANSWER,
        _ => return Err("what is it to do?".into()),
    };
    let seen = Arc::new(TrapCounts::default());
    let steps = words == ["steps"];
    let counted = Arc::clone(&seen);
    thread::Builder::new().name("traps".into()).spawn(move || {
        let begun = if steps {
            count_traps()
        } else {
            intercept_calls()
        };
        begun.expect("the kernel has it");
        loop {
            if !round() {
                counted.wrong.fetch_add(1, Ordering::SeqCst);
            }
            counted.rounds.fetch_add(1, Ordering::SeqCst);
        }
    })?;
    crate::wait::wait_until("a round", crate::wait::SOON, || {
        seen.rounds.load(Ordering::SeqCst) > 0
    });
    control.serve(|question| match question.verb.as_str() {
        "rounds" => Ok(seen.rounds.load(Ordering::SeqCst).to_string()),
        "check" => Ok(match seen.wrong.load(Ordering::SeqCst) {
            0 => "right".to_owned(),
            times => format!("wrong {times} times"),
        }),
        _ => not_understood(question),
    })
}
