//! The lists against the samples: no kept entry without a value, but for what is made elsewhere.

use sys::ledger::{Fate, List};

use super::made::made;
use super::*;
use resources::ledger::LISTS;

/// Kept entries that no sample makes: the step of the storm, or the test, that does.
#[rustfmt::skip]
const ELSEWHERE: &[(&str, &[&str])] = &[
    ("trees: forks, ends, threads", &[
        "PPid", "Pid", "State", "Tgid", "Threads", "task", "CLONE_THREAD", "CLONE_SETTLS",
    ]),
    ("what is shared by clone(2)", &["CLONE_FS", "CLONE_FILES", "CLONE_SYSVSEM", "CLONE_IO"]),
    ("subreapers", &["PR_SET_CHILD_SUBREAPER", "PR_GET_CHILD_SUBREAPER"]),
    ("directories and umasks", &["cwd", "Umask"]),
    ("filters", &[
        "Seccomp", "Seccomp_filters", "PR_GET_SECCOMP", "PR_SET_SECCOMP",
        "PTRACE_SECCOMP_GET_FILTER", "PTRACE_SECCOMP_GET_METADATA",
    ]),
    ("calls that threads wait in", &["syscall", "PTRACE_GET_SYSCALL_INFO"]),
    ("each thread has some, and its facts tell them", &[
        "PTRACE_PEEKUSR", "PTRACE_GETREGS", "PTRACE_GETFPREGS", "PTRACE_GETFPXREGS",
        "PTRACE_ARCH_PRCTL", "PTRACE_GETREGSET", "PTRACE_GET_RSEQ_CONFIGURATION",
    ]),
    ("each process has some, and its facts tell them", &["exe", "fd", "fdinfo", "status"]),
    ("programs of 32 bits", &["PTRACE_GET_THREAD_AREA"]),
    ("positions of files", &["pos"]),
    ("locks and leases of files", &[
        "lock", "F_GETLK", "F_SETLK", "F_SETLKW", "F_GETLK64", "F_SETLK64", "F_SETLKW64",
        "F_OFD_GETLK", "F_OFD_SETLK", "F_OFD_SETLKW", "F_SETLEASE", "F_GETLEASE",
    ]),
    ("data on its way", &["TIOCOUTQ", "FIONREAD", "TIOCINQ", "unix socket: scm_fds"]),
    ("rings of io_uring", &[
        "io_uring: SqMask", "io_uring: SqHead", "io_uring: SqTail", "io_uring: CachedSqHead",
        "io_uring: CqMask", "io_uring: CqHead", "io_uring: CqTail", "io_uring: CachedCqTail",
        "io_uring: SQEs", "io_uring: CQEs", "io_uring: UserFiles", "io_uring: UserBufs",
    ]),
    ("each restored tree has one namespace of clocks", &["timens_offsets"]),
    ("tests of their own, not the storm: end_to_end/cgroups.rs", &["cgroup", "CLONE_INTO_CGROUP"]),
    ("tests of their own, not the storm: states.rs (one-memory)", &[
        "CLONE_VM", "CLONE_SIGHAND", "CLONE_PARENT",
    ]),
    ("tests of their own, not the storm: end_to_end/userfaultfd.rs", &[
        "um", "uw", "ui", "userfaultfd: API",
    ]),
    ("tests of their own, not the storm: end_to_end/terminal.rs", &[
        "TIOCSCTTY", "TIOCGPGRP", "TIOCSPGRP", "TIOCNOTTY", "TIOCGSID",
    ]),
    ("tests of their own, not the storm: end_to_end/sandboxed.rs", &["root"]),
    ("no kind of map that is kept has any", &["bpf map: map_extra"]),
];

/// The lists whose kept entries are all some sample's values.
fn covered() -> Vec<&'static List> {
    let of = |values: Values| match values {
        Values::Of(list) => Some(list),
        Values::These(_) | Values::Made(_) => None,
    };
    let own = own().flat_map(|sample| sample.lists.iter().copied().chain(of(sample.values)));
    own.chain(made().filter_map(|made| of(made.values)))
        .collect()
}

#[test]
fn each_kept_entry_is_made_by_a_sample_or_elsewhere() {
    let covered = covered();
    let named = own().flat_map(|sample| sample.entries);
    let named: Vec<&str> = named
        .chain(made().flat_map(|made| made.entries))
        .copied()
        .collect();
    let elsewhere = ELSEWHERE.iter().flat_map(|(_, entries)| *entries);
    let elsewhere: Vec<&str> = elsewhere.copied().collect();
    let mut missing = Vec::new();
    for list in LISTS {
        let is_covered = covered.iter().any(|known| std::ptr::eq(*known, *list));
        let kept = list.entries.iter().filter(|entry| entry.fate == Fate::Kept);
        for entry in kept.filter(|_| !is_covered) {
            let by_sample = named.contains(&entry.name);
            if by_sample == elsewhere.contains(&entry.name) {
                missing.push((list.title, entry.name, by_sample));
            }
        }
    }
    assert!(missing.is_empty(), "in neither or in both: {missing:#?}");
    let known = |name: &&str| LISTS.iter().any(|list| list.find(name).is_some());
    for name in named.iter().chain(&elsewhere) {
        assert!(known(name), "{name} stands in no list");
    }
}

#[test]
fn names_are_used_once() {
    let own = own().map(|sample| sample.name);
    let made = made().map(|made| made.name);
    for names in [own.collect::<Vec<_>>(), made.collect()] {
        let unique: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(unique.len(), names.len());
    }
}
