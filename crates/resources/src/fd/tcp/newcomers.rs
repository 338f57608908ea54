//! Clients that ask a stopped tree's listeners for connections: the kernel would give them some
//! that nobody accepts, and reset them when the tree is killed.
//!
//! So packets that ask for a connection are dropped from before a listener's queue is looked at
//! until nobody listens any more. A client asks again a second later: of the restored tree, or it
//! is refused. The rules for that belong to a netlink socket of ours and vanish with us.

use sys::nft::{Hold, Leftover, Listening};

use crate::fd::socket::inet_diag::Listener;

/// The policy for new connections to a tree's listeners, and the rules that hold them back.
#[derive(Debug)]
pub struct Newcomers {
    name: String,
    policy: Policy,
    hold: Option<Hold>,
}

/// The policy for new connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Policy {
    /// They may come.
    Welcome,
    /// As soon as the tree's listeners are known.
    Held,
    /// The caller sees to it, or it cannot be done.
    Never,
}

impl Newcomers {
    /// Those of the tree under `root`, which are kept away `at_once` or not yet; never where the
    /// caller keeps packets away (`--network-lock skip`).
    #[must_use]
    pub fn of(root: i32, at_once: bool, network_unlocked: bool) -> Self {
        let policy = match at_once {
            _ if network_unlocked => Policy::Never,
            true => Policy::Held,
            false => Policy::Welcome,
        };
        Self {
            // A name that no other dump has, be it of the same pid in another namespace.
            name: format!("stillframe-{root}-new-{}", std::process::id()),
            policy,
            hold: None,
        }
    }

    /// Keeps them away from the next look on.
    pub fn hold_from_now(&mut self) {
        if self.policy == Policy::Welcome {
            self.policy = Policy::Held;
        }
    }

    /// True if they are to be kept away.
    #[must_use]
    pub fn are_held(&self) -> bool {
        self.policy == Policy::Held
    }

    /// True if some listeners are protected from them already.
    pub(super) fn is_holding(&self) -> bool {
        self.hold.is_some()
    }

    /// True if all of these listeners are protected from them.
    pub(super) fn are_held_from<'a>(&self, all: impl IntoIterator<Item = &'a Listener>) -> bool {
        let mut all = all.into_iter().map(place);
        let held = |one| self.hold.as_ref().is_some_and(|hold| hold.has(&one));
        all.all(held)
    }

    /// Keeps them from these listeners. Where that cannot be done the dump goes on, and says so.
    pub(super) fn hold<'a>(&mut self, listeners: impl IntoIterator<Item = &'a Listener>) {
        let all = listeners.into_iter().map(place).collect::<Vec<_>>();
        let held = match &mut self.hold {
            Some(hold) => hold.add(&all),
            none => Hold::new(&self.name, &all).map(|hold| *none = Some(hold)),
        };
        if let Err(error) = held {
            self.policy = Policy::Never;
            log::warn!(
                "new connections to the tree's listeners are not held back: {error}; \
                 clients that connect while it is stopped may be reset"
            );
        }
    }

    /// The rules that hold them back, if there are any.
    #[must_use]
    pub fn into_hold(self) -> Option<Held> {
        self.hold.map(Held)
    }
}

/// Rules that keep new connections away, as long as it lives.
#[derive(Debug)]
pub struct Held(Hold);

impl Held {
    /// Lets new connections come again. The result is to be dropped when nothing urgent is left.
    #[must_use]
    pub fn lift(self) -> Option<Leftover> {
        self.0.lift()
    }
}

fn place(listener: &Listener) -> Listening {
    Listening {
        at: listener.local,
        v6_only: listener.v6_only,
    }
}
