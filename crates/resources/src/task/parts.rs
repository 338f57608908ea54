//! All parts of a task's state.

use super::ErasedPart;
use super::{
    actions, altstack, attributes, autogroup, comm, core_filter, credentials, dumpable, futex_hash,
    io_flusher, itimers, keyrings, ldt, limits, login_uid, membarrier, memory_policy, oom, pending,
    posix_timers, refused, robust, rseq, sandbox, scheduling, seccomp, semaphores, speculation,
    thread_areas, tid_address, umask,
};

/// Every part, in the order in which they are planned.
pub static PARTS: &[&dyn ErasedPart] = &[
    &refused::Refused,
    &ldt::Ldt,
    &thread_areas::ThreadAreas,
    &altstack::Altstack,
    &tid_address::TidAddress,
    &comm::Comm,
    &attributes::HUGE_PAGES,
    &attributes::MEMORY_MERGE,
    &futex_hash::FutexHash,
    &attributes::MACHINE_CHECK,
    &attributes::TIME_STAMP,
    &attributes::CPUID,
    // What needs privileges, before they are given up.
    &limits::Limits,
    &scheduling::Scheduling,
    &memory_policy::MemoryPolicy,
    &autogroup::Autogroup,
    &login_uid::LoginUid,
    &sandbox::Sandbox,
    &keyrings::Keyrings,
    &semaphores::Semaphores,
    &membarrier::Membarrier,
    &io_flusher::IoFlusher,
    &oom::Oom,
    &core_filter::CoreFilter,
    &seccomp::Seccomp,
    // Credentials change it: set before or after them, depending on its value.
    &dumpable::Dumpable,
    &credentials::Credentials,
    // What restricts the task itself, its last calls included.
    &attributes::NO_NEW_PRIVS,
    &attributes::PERSONALITY,
    &attributes::MDWE,
    &attributes::SUBREAPER,
    &speculation::Speculation,
    &umask::Umask,
    &robust::Robust,
    &rseq::Rseq,
    // Setting an action discards signals that are pending: before those come back.
    &actions::Actions,
    &pending::THREAD,
    &pending::PROCESS,
    &itimers::Itimers,
    &posix_timers::PosixTimers,
    &attributes::PARENT_DEATH,
];

/// The part whose records have this tag.
#[must_use]
pub fn part_of(tag: u16) -> Option<&'static dyn ErasedPart> {
    PARTS.iter().copied().find(|part| part.tag() == tag)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn numbers_and_names_are_unique() {
        let tags: BTreeSet<u16> = PARTS.iter().map(|part| part.tag()).collect();
        let names: BTreeSet<&str> = PARTS.iter().map(|part| part.name()).collect();
        assert_eq!((tags.len(), names.len()), (PARTS.len(), PARTS.len()));
        assert!(tags.iter().all(|tag| (200..300).contains(tag)), "{tags:?}");
    }

    #[test]
    fn damaged_payloads_are_errors_of_every_part() {
        for part in PARTS {
            // A field of a length that the payload does not have.
            let damaged = [0x0a, 0x7f];
            let decoded = part.decode(7, &damaged);
            let error = decoded.expect_err(part.name()).to_string();
            let want = format!("image record task 7 {}: ", part.name());
            assert!(error.starts_with(&want), "{error}");
        }
    }
}
