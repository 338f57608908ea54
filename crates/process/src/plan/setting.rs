//! What a restore looks like from outside, as far as its plan depends on it.

use resources::Inherited;
use resources::map::memory::Memory;
use resources::map::vdso::{self, Host, Way};
use resources::task::keyrings;

use super::groups::Placing;

/// What the restore looks like from outside, as far as the plan depends on it.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The pid that the root's parent will have; 0 when it is not known or does not matter.
    pub parent: i32,
    /// From how many bytes on a process's memory is filled from outside.
    pub outside_from_bytes: u64,
    /// From how many bytes on it comes when it is touched; none for never.
    pub lazy_from_bytes: Option<u64>,
    /// What the restorer hands down to its children.
    pub inherited: Inherited,
    /// The vDSO of this host.
    pub vdso: OwnVdso,
    /// The control groups of the tree and of the restorer, where tasks are to join some.
    pub cgroups: Option<Placing>,
    /// The keys that the restorer has made for session keyrings.
    pub keys: keyrings::Made,
    /// How many bytes of private memory the kernel promises by one call.
    pub at_once_bytes: u64,
    /// The limit of open files that restorer and tasks have while tasks are made.
    pub open_files: u64,
}

/// What is known of the vDSO of this host.
#[derive(Clone, Debug, Default)]
pub struct OwnVdso {
    /// Its build id, if it has one.
    pub build_id: Option<Vec<u8>>,
    /// All of it; known where a task of the image needs another one replaced or its own moved.
    pub host: Option<Host>,
    /// All of that of 32-bit programs; known where a task of the image had one and this host has
    /// one.
    pub host_32: Option<Host>,
}

impl OwnVdso {
    /// How the vDSO of a task comes back.
    #[must_use]
    pub fn way(&self, memory: &Memory) -> Way {
        let of_32_bits = self.host_32.as_ref().map(|host| &host.build_id[..]);
        match memory.vdso_is_32_bit {
            false => vdso::way(memory, self.build_id.as_deref()),
            true => vdso::way(memory, of_32_bits),
        }
    }

    /// The vDSO of the kind that a task had.
    #[must_use]
    pub fn of(&self, memory: &Memory) -> Option<&Host> {
        match memory.vdso_is_32_bit {
            false => self.host.as_ref(),
            true => self.host_32.as_ref(),
        }
    }
}

impl Default for Setting {
    fn default() -> Self {
        Self {
            parent: 0,
            outside_from_bytes: 8 << 20,
            lazy_from_bytes: None,
            inherited: Inherited::default(),
            vdso: OwnVdso {
                build_id: sys::vdso::own_build_id(),
                ..OwnVdso::default()
            },
            cgroups: None,
            keys: keyrings::Made::new(),
            at_once_bytes: u64::MAX,
            open_files: u64::MAX,
        }
    }
}
