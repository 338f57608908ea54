//! Machines under QEMU: saved over its machine protocol, and started again.
//!
//! Devices are QEMU's business: it writes their state to a descriptor of ours, and reads it from
//! one. Memory never goes through QEMU: [`save()`] reads it from the files that are the guest's
//! memory, while the guest is stopped or protected from its own writes, and [`restore()`] hands it
//! to a new QEMU as descriptors: of a file of its own, or of a template that many map privately.

mod block;
mod command;
mod devices;
mod disk_words;
mod disks;
mod guest;
mod lazy;
mod line;
mod live;
mod machine;
mod own_disks;
mod plugged;
mod pool;
mod processors;
mod qcow2;
mod qmp;
mod ram;
pub(crate) mod record;
mod restore;
mod round;
mod save;
mod snapshot;
mod start;
mod template;
mod track;
mod user;
mod watch;
mod watchdog;

pub use disks::Overlay;
pub use guard::Mount;
pub use qmp::{PATIENCE, Qmp, Version};
pub use record::is_of_qemu;
pub use restore::{Moment, Observer, RestoreMode, RestoreOptions, RestoredMachine, look, restore};
pub use save::{SaveKind, SaveOptions, SaveSummary, save};
pub use template::{Template, drop_template, templates};
pub use watch::Watch;
