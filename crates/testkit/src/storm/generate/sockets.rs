//! Sockets with options that the ledger of socket options says are kept, in any mixture.
//!
//! Kinds, options and values are the ledger's own, so a new entry is in the storm at once.
use resources::fd::socket::Nature;
use resources::fd::socket::ledger::samples::{FRESH, Fresh};
use resources::fd::socket::ledger::{self, Entry, Kinds};

use super::Generator;
use super::descriptors::End;
use crate::storm::step::{Action, FileKind, Setting};

/// How many options are changed of each socket of one kind.
const OPTIONS_TOGETHER: [usize; 2] = [6, usize::MAX];

/// Options that decide whether, when and in which pieces data arrives, which the storm compares.
/// Sockets without data have them ([`FileKind::Socket`]).
const OF_DATA: [&str; 19] = [
    "SO_RCVBUF",
    "SO_LINGER",
    "SO_PASSRIGHTS",
    "SO_MAX_PACING_RATE",
    "SO_TIMESTAMPING_OLD",
    "SO_TIMESTAMPING_NEW",
    "IP_MINTTL",
    "TCP_CORK",
    "TCP_MAXSEG",
    "TCP_WINDOW_CLAMP",
    "TCP_USER_TIMEOUT",
    "TCP_TX_DELAY",
    "TCP_RTO_MAX_MS",
    "UDP_CORK",
    "UDP_ENCAP",
    "UDP_SEGMENT",
    "UDP_GRO",
    "UDPLITE_SEND_CSCOV",
    "UDPLITE_RECV_CSCOV",
];

/// The options of a kind of sockets that the ledger says are kept.
fn kept(nature: Nature) -> Vec<&'static Entry> {
    let kept = ledger::kept(Kinds::of(nature));
    kept.map(|(entry, _)| entry).collect()
}

/// Sockets of one kind that together have all kept options changed.
pub(super) struct Mixture {
    pub name: String,
    pub fresh: &'static Fresh,
    /// How many options of each socket are changed.
    pub together: usize,
}

/// A few options of each socket and all of one, of each kind that the ledger has.
pub(super) fn mixtures() -> impl Iterator<Item = Mixture> {
    FRESH.iter().flat_map(|fresh| {
        OPTIONS_TOGETHER.map(|together| {
            let many = if together == usize::MAX { "all" } else { "few" };
            let kind = fresh.name.to_lowercase();
            let kind = kind.replace(", ", "-").replace(' ', "-");
            let name = format!("options-{many}-{kind}");
            Mixture {
                name,
                fresh,
                together,
            }
        })
    })
}

impl Generator {
    /// Makes a socket and changes a few of its options.
    pub(super) fn open_changed(&mut self, task: u8, nature: Nature) {
        let Some(slot) = self.open_socket(task, nature) else {
            return;
        };
        for _ in 0..self.chance.below(12) {
            self.change_any(task, slot, nature, false);
        }
    }

    /// Makes a socket of a kind that the ledger of socket options has.
    fn open_socket(&mut self, task: u8, nature: Nature) -> Option<u16> {
        let slot = self.new_slots(1)?;
        let end = End {
            kind: FileKind::Socket,
            origin: slot,
            other: slot,
            opener: task,
            nature: Some(nature),
        };
        self.known(task).held.insert(slot, end);
        let Nature {
            family,
            kind,
            protocol,
        } = nature;
        let socket = Action::Socket {
            slot,
            family,
            kind,
            protocol,
        };
        self.step(task, socket);
        Some(slot)
    }

    /// Makes sockets that together have all kept options changed, in random order.
    pub(super) fn change_all(&mut self, mixture: &Mixture) {
        let nature = mixture.fresh.nature;
        let mut options = kept(nature);
        options.sort_by_cached_key(|_| self.chance.number());
        for some in options.chunks(mixture.together.min(options.len())) {
            let Some(slot) = self.open_socket(0, nature) else {
                return;
            };
            for entry in some {
                self.change_option(0, slot, entry);
            }
        }
    }

    /// Changes any option of a socket that the ledger says is kept.
    pub(super) fn change_any(&mut self, task: u8, slot: u16, nature: Nature, has_data: bool) {
        let mut options: Vec<&Entry> = kept(nature);
        options.retain(|entry| !has_data || !OF_DATA.contains(&entry.label));
        let entry = self.chance.pick(&options);
        self.change_option(task, slot, entry);
    }

    fn change_option(&mut self, task: u8, slot: u16, entry: &Entry) {
        let what = Setting::Kept {
            level: entry.level,
            name: entry.name,
            first: self.chance.below(32) as u8,
        };
        self.step(task, Action::Set { slot, what });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::storm::generate::states;
    use crate::storm::step::Step;

    #[test]
    fn each_kept_option_of_each_kind_is_changed() {
        let all = states();
        for fresh in FRESH {
            let family = fresh.nature.family;
            let makes = |step: &Step| match step.action {
                Action::Socket {
                    family: made,
                    kind,
                    protocol,
                    ..
                } => (made, kind, protocol) == (family, fresh.nature.kind, fresh.nature.protocol),
                _ => false,
            };
            let of_it = all
                .iter()
                .filter(|state| {
                    mixtures().any(|mixture| {
                        mixture.fresh.name == fresh.name && mixture.name == state.name
                    })
                })
                .filter(|state| state.steps.iter().any(makes))
                .collect::<Vec<_>>();
            assert!(of_it.len() >= OPTIONS_TOGETHER.len(), "{}", fresh.name);
            for entry in kept(fresh.nature) {
                let changes = |step: &Step| {
                    let Action::Set {
                        what: Setting::Kept { level, name, .. },
                        ..
                    } = step.action
                    else {
                        return false;
                    };
                    (level, name) == (entry.level, entry.name)
                };
                for state in &of_it {
                    let is_there = state.steps.iter().any(changes);
                    assert!(is_there, "{} of {}", entry.label, state.name);
                }
            }
        }
    }
}
