//! Namespaces that a tree has of its own (namespaces(7)), a file a kind: what a namespace has
//! besides the objects of the tree's tasks, and how a new one gets it.
//!
//! A dump looks at the namespaces of a tree from inside of them: the process that dumps has entered
//! them. A restore makes new ones and enters them before it makes anything else, so that all that
//! it makes is in there.

mod cgroupns;
mod ipc;
mod kind;
mod mnt;
mod netns;
mod settings;
mod uts;

pub use kind::{Construction, ErasedKind, Kind, Namespace, Tree, TreeTask};

/// All kinds, in the order in which a restore fills them.
pub const KINDS: &[&dyn ErasedKind] = &[
    &uts::Uts,
    &ipc::Ipc,
    &netns::Net,
    &cgroupns::Cgroup,
    &mnt::Mnt,
];

/// The kind whose records have this number.
#[must_use]
pub fn kind_of(tag: u16) -> Option<&'static dyn ErasedKind> {
    KINDS.iter().copied().find(|kind| kind.tag() == tag)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_a_number_and_a_name_of_its_own() {
        for (at, kind) in KINDS.iter().enumerate() {
            let same =
                |other: &&dyn ErasedKind| other.tag() == kind.tag() || other.name() == kind.name();
            assert_eq!(KINDS.iter().position(same), Some(at));
            assert!(kind_of(kind.tag()).is_some());
            let path = format!("/proc/self/ns/{}", kind.name());
            assert!(std::fs::exists(path).expect("/proc is there"));
        }
        assert!(kind_of(kind::FIRST_TAG - 1).is_none());
    }
}
