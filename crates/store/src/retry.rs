//! Calls that are made again when they may succeed then.
use std::time::Duration;

use crate::Result;

/// How often, and after which pauses, a call is made again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Patience {
    /// How often at the most.
    pub tries: u32,
    /// The first pause; each is twice as long as the one before it.
    pub first: Duration,
    /// The longest pause.
    pub longest: Duration,
}

impl Default for Patience {
    /// Gives up after about a minute.
    fn default() -> Self {
        Self {
            tries: 12,
            first: Duration::from_millis(20),
            longest: Duration::from_secs(10),
        }
    }
}

/// Makes a call until it does not fail for a reason that may pass, and not too often.
///
/// The call MUST be one that may be made twice: a failure does not tell whether it was done.
///
/// # Errors
/// Those of the last call.
pub fn retry<T>(patience: Patience, mut call: impl FnMut() -> Result<T>) -> Result<T> {
    let mut pause = patience.first;
    for _ in 1..patience.tries {
        match call() {
            Err(error) if error.is_transient() => {
                std::thread::sleep(pause);
                pause = (2 * pause).min(patience.longest);
            }
            done => return done,
        }
    }
    call()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Error;

    fn failure(is_transient: bool) -> Error {
        let (action, name, store) = ("read", "one".to_owned(), "here".to_owned());
        let source = std::io::ErrorKind::TimedOut.into();
        match is_transient {
            true => Error::Transient {
                action,
                name,
                store,
                source,
            },
            false => Error::System {
                action,
                name,
                store,
                source,
            },
        }
    }

    #[test]
    fn what_may_pass_is_tried_again_and_not_for_ever() {
        let patience = Patience {
            tries: 4,
            first: Duration::from_micros(1),
            longest: Duration::from_micros(2),
        };
        for (fails, transient, tries) in [(3, true, 4), (9, true, 4), (9, false, 1), (0, true, 1)] {
            let mut made = 0;
            let done = retry(patience, || {
                made += 1;
                match made > fails {
                    true => Ok(made),
                    false => Err(failure(transient)),
                }
            });
            assert_eq!((made, done.is_ok()), (tries, fails < tries), "{fails}");
        }
    }
}
