//! State that the kernel has for a process, list by list, each entry with its fate: kept, refused,
//! or without a state of its own. A dump refuses by name any state that is in no list.
//!
//! - [`memory`]: letters of `VmFlags`, advice, flags of mappings,
//! - [`fdinfo`]: lines and flags of descriptors,
//! - [`calls`]: numbers of prctl(2), fcntl(2) and ptrace(2), flags of clone(2),
//! - [`process`]: files in /proc/PID, capabilities.
//!
//! Of what is kept, `testkit::samples` has values that a program can set.
//!
//! The lines of /proc/PID/status and /proc/PID/limits are lists of [`sys::ledger`], where their
//! readers are. `docs/ledger.md` is made of all of them.

pub mod calls;
pub mod fdinfo;
pub mod memory;
pub mod process;

pub use sys::ledger::{Entry, Fate, List};

#[cfg(test)]
mod tests;

/// All lists, in the order of the page that is made of them.
pub static LISTS: &[&List] = &[
    &sys::ledger::STATUS,
    &sys::ledger::LIMITS,
    &process::FILES,
    &process::CAPABILITIES,
    &process::SECURE_BITS,
    &memory::VM_FLAGS,
    &memory::MAP_FLAGS,
    &memory::ADVICE,
    &fdinfo::COMMON,
    &fdinfo::OPEN_FLAGS,
    &fdinfo::EPOLL_EVENTS,
    &fdinfo::TIMER_FLAGS,
    &fdinfo::WATCH_FLAGS,
    &fdinfo::GROUP_FLAGS,
    &calls::PRCTL,
    &calls::FCNTL,
    &calls::IOCTL,
    &calls::CLONE,
    &calls::PTRACE,
];
