//! For tests: a conversation of a client with a helper, played again and again, in which one of
//! them is killed at each message.
//!
//! Both are processes of their own. The client is killed by `SIGKILL` in place of the message that
//! it would send next, the helper in place of the one that it would receive next. So each of them
//! has done what comes before that message, and the other side sees what it sees when that happens
//! outside of tests.

use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use prost::Message;

use crate::failpoint::{RECEIVES, SENDS};
use crate::{Channel, Helper};

/// How long both sides may take to end.
const PATIENCE: Duration = Duration::from_secs(60);

/// A message for tests.
#[derive(Clone, PartialEq, Message)]
pub struct Note {
    /// Whatever is to be told.
    #[prost(string, tag = "1")]
    pub text: String,
    /// Never false, so that no note is empty.
    #[prost(bool, tag = "2")]
    is_note: bool,
}

impl Note {
    /// One with this text.
    #[must_use]
    pub fn text(text: &str) -> Self {
        Self {
            text: text.to_owned(),
            is_note: true,
        }
    }
}

/// The side that is killed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Victim {
    /// The process that sends the messages.
    Client,
    /// The helper.
    Helper,
}

/// How a conversation went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome {
    /// The side that was to be killed.
    pub victim: Victim,
    /// After so many messages that it sent or received.
    pub messages: u64,
    /// True if it came to its end before.
    pub is_whole: bool,
}

/// Plays the conversation for each side and each of its messages, until the side comes to its end,
/// and calls `check` after each, when both processes have ended. `prepare` makes the subject, which
/// both sides and `check` get; of its descriptors the sides have those that `kept` gives. The
/// processes have none of the test's threads: they use nothing that one could hold locked, and do
/// not print.
///
/// # Panics
/// When no process can be made, or a side does not end.
pub fn kill_at_each_message<T>(
    mut prepare: impl FnMut() -> T,
    kept: impl Fn(&T) -> Vec<BorrowedFd<'_>>,
    helper: impl Fn(&T, Channel),
    client: impl Fn(&T, Channel),
    mut check: impl FnMut(&T, Outcome),
) {
    for victim in [Victim::Client, Victim::Helper] {
        for messages in 0.. {
            let subject = prepare();
            let most = |side| if side == victim { messages } else { u64::MAX };
            let (ours, theirs) = Channel::pair().expect("a pair");
            let client = side(ours, kept(&subject), |channel| {
                SENDS.store(most(Victim::Client), Relaxed);
                client(&subject, channel);
            });
            let helper = side(theirs, kept(&subject), |channel| {
                RECEIVES.store(most(Victim::Helper), Relaxed);
                helper(&subject, channel);
            });
            let ended = (ended(&client), ended(&helper));
            let is_whole = match victim {
                Victim::Client => ended.0,
                Victim::Helper => ended.1,
            };
            let outcome = Outcome {
                victim,
                messages,
                is_whole,
            };
            check(&subject, outcome);
            if is_whole {
                break;
            }
        }
    }
}

/// Starts one side, and gives where it says that it has come to its end.
fn side(own: Channel, kept: Vec<BorrowedFd<'_>>, life: impl FnOnce(Channel)) -> Channel {
    let helper = Helper::new(c"side").keep(kept).keep([own.as_fd()]);
    let left = helper.leave(|end| {
        life(own);
        SENDS.store(u64::MAX, Relaxed);
        let _ = end.send(&Note::text("end"), &[]);
    });
    left.expect("a process")
}

/// Waits for the end of a side; true if it has come to it by itself.
fn ended(side: &Channel) -> bool {
    side.set_patience(PATIENCE).expect("a socket");
    let said = side.receive::<Note>().expect("it ends in time");
    said.is_some() && side.receive::<Note>().expect("it ends in time").is_none()
}
