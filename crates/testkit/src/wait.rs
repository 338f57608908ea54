//! Waiting for something observable, with a deadline.
use std::thread::sleep;
use std::time::{Duration, Instant};

/// The deadline of everything that should happen at once, generous for busy machines.
pub const SOON: Duration = Duration::from_secs(30);

const FIRST_PAUSE: Duration = Duration::from_micros(200);
const LONGEST_PAUSE: Duration = Duration::from_millis(10);

/// Waits until `condition` holds, asking again at growing intervals of at most 10 ms.
///
/// # Panics
/// When `limit` passes first; `what` says in the message what was waited for.
#[track_caller]
pub fn wait_until(what: &str, limit: Duration, mut condition: impl FnMut() -> bool) {
    wait_for(what, limit, || condition().then_some(()));
}

/// Waits until `attempt` returns something, and returns that.
///
/// # Panics
/// When `limit` passes first; `what` says in the message what was waited for.
#[track_caller]
pub fn wait_for<T>(what: &str, limit: Duration, attempt: impl FnMut() -> Option<T>) -> T {
    match try_wait_for(limit, attempt) {
        Some(found) => found,
        None => panic!("waited {limit:?} in vain for {what}"),
    }
}

/// Waits until `attempt` returns something; none when `limit` passes first.
pub fn try_wait_for<T>(limit: Duration, mut attempt: impl FnMut() -> Option<T>) -> Option<T> {
    let deadline = Instant::now() + limit;
    let mut pause = FIRST_PAUSE;
    loop {
        if let Some(found) = attempt() {
            return Some(found);
        }
        if Instant::now() >= deadline {
            return None;
        }
        sleep(pause);
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn returns_what_the_attempt_found() {
        let mut calls = 0;
        let found = wait_for("the third call", SOON, || {
            calls += 1;
            (calls == 3).then_some(calls)
        });
        assert_eq!(found, 3);
    }

    #[test]
    #[should_panic(expected = "in vain for the impossible")]
    fn names_what_never_came() {
        wait_until("the impossible", Duration::from_millis(2), || false);
    }
}
