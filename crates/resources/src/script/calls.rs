//! What the arguments of system calls are, a line a call: the table by which scripts are printed.
//! A call that is not here prints as numbers.
//!
//! A word of a line is an argument, `NAME` or `NAME:FORM`. Forms are those of `print.rs` (`hex`,
//! `text`, `signal`, …), a structure to which the argument points, or structures: `iovec[2]`
//! where the argument with index 2 counts them. `verb` says what follows ([`VERBS`]). An argument
//! without a form is a number.

use abi::kernel::{ARCH_MAP_VDSO_32, ARCH_MAP_VDSO_64};
use syscalls::Sysno;

/// One of the things that a call does, as an argument says.
#[derive(Clone, Copy, Debug)]
pub(super) struct Verb {
    pub number: u64,
    pub name: &'static str,
    /// The arguments behind it.
    pub rest: &'static str,
}

/// Verbs by constants of a module of linux_raw_sys.
macro_rules! verbs {
    ($module:ident: $($name:ident $rest:literal)*) => {
        &[$(verb(linux_raw_sys::$module::$name as u64, stringify!($name), $rest)),*]
    };
}

const fn verb(number: u64, name: &'static str, rest: &'static str) -> Verb {
    Verb { number, name, rest }
}

/// What arguments point at: fields in order, `NAME/BYTES` or `NAME/BYTES:FORM`; without a name
/// they are left out.
pub(super) const STRUCTURES: &[(&str, &str)] = &[
    (
        "capabilities",
        "effective/4:hex permitted/4:hex inheritable/4:hex effective_high/4:hex \
                      permitted_high/4:hex inheritable_high/4:hex",
    ),
    ("cap_header", "version/4:hex pid/4"),
    (
        "clone",
        "flags/8:hex /24 exit_signal/8:signal /24 set_tid/8:tid",
    ),
    ("epoll_event", "events/4:hex data/8:hex"),
    ("flock", "type/2 whence/2 /4 start/8 len/8"),
    ("gid", "gid/4"),
    ("iovec", "base/8:hex len/8"),
    (
        "itimerspec",
        "interval_sec/8 interval_nsec/8 value_sec/8 value_nsec/8",
    ),
    (
        "itimerval",
        "interval_sec/8 interval_usec/8 value_sec/8 value_usec/8",
    ),
    (
        "mm_map",
        "start_code/8:hex end_code/8:hex start_data/8:hex end_data/8:hex start_brk/8:hex \
                brk/8:hex start_stack/8:hex arg_start/8:hex arg_end/8:hex env_start/8:hex \
                env_end/8:hex auxv/8:hex auxv_size/4 exe_fd/4",
    ),
    ("nodes", "nodes/8:hex"),
    ("owner", "type/4 pid/4"),
    (
        "perf_event",
        "type/4 size/4 config/8:hex sample_period/8 sample_type/8:hex \
                    read_format/8:hex flags/8:hex",
    ),
    ("rlimit", "cur/8 max/8"),
    (
        "sched_attr",
        "/4 policy/4 flags/8:hex nice/4 priority/4 runtime/8 deadline/8 period/8 \
                    util_min/4 util_max/4",
    ),
    ("sembuf", "num/2 op/2 flags/2:hex"),
    (
        "sigaction",
        "handler/8:hex flags/8:hex restorer/8:hex mask/8:set",
    ),
    (
        "sigaction32",
        "handler/4:hex flags/4:hex restorer/4:hex mask/8:set",
    ),
    ("sigevent", "value/8:hex signal/4:signal notify/4 tid/4"),
    ("siginfo", "signal/4:signal errno/4 code/4"),
    ("stack", "sp/8:hex flags/4:hex /4 size/8"),
    ("tid", "tid/4"),
    ("timespec", "sec/8 nsec/8"),
    ("user_desc", "entry/4 base/4:hex limit/4:hex flags/4:hex"),
];

/// Calls of which one argument says what the others are.
pub(super) const VERBS: &[(Sysno, &[Verb])] = &[
    (
        Sysno::arch_prctl,
        &[
            verb(0x1011, "ARCH_GET_CPUID", ""),
            verb(0x1012, "ARCH_SET_CPUID", "on"),
            verb(ARCH_MAP_VDSO_32 as u64, "ARCH_MAP_VDSO_32", "addr:hex"),
            verb(ARCH_MAP_VDSO_64 as u64, "ARCH_MAP_VDSO_64", "addr:hex"),
        ],
    ),
    (
        Sysno::fcntl,
        verbs! { general:
            F_SETFD "flags:hex"
            F_SETFL "flags:open"
            F_SETLK "lock:flock"
            F_OFD_SETLK "lock:flock"
            F_SETLEASE "type"
            F_SETSIG "signal:signal"
            F_SETOWN_EX "owner:owner"
            F_ADD_SEALS "seals:hex"
            F_SETPIPE_SZ "size"
        },
    ),
    (
        Sysno::futex,
        verbs! { general:
            FUTEX_WAIT "value"
            FUTEX_WAKE "count"
            FUTEX_WAKE_OP "count count2 addr2:hex op:hex"
        },
    ),
    (
        Sysno::ioctl,
        verbs! { ioctl:
            TIOCSCTTY "steal"
            TIOCSPGRP "group:gid"
            TIOCNOTTY ""
        },
    ),
    (
        // No module of linux_raw_sys has them.
        Sysno::keyctl,
        &[
            verb(0, "KEYCTL_GET_KEYRING_ID", "keyring create"),
            verb(1, "KEYCTL_JOIN_SESSION_KEYRING", "name:hex"),
            verb(3, "KEYCTL_REVOKE", "key"),
            verb(4, "KEYCTL_CHOWN", "key uid gid"),
            verb(5, "KEYCTL_SETPERM", "key mask:hex"),
            verb(6, "KEYCTL_DESCRIBE", "key buffer:hex len"),
            verb(8, "KEYCTL_LINK", "key keyring"),
            verb(11, "KEYCTL_READ", "key buffer:hex len"),
            verb(14, "KEYCTL_SET_REQKEY_KEYRING", "default"),
        ],
    ),
    (
        Sysno::prctl,
        verbs! { prctl:
            PR_SET_PDEATHSIG "signal:signal"
            PR_GET_PDEATHSIG "signal:hex"
            PR_GET_DUMPABLE ""
            PR_SET_DUMPABLE "value"
            PR_SET_NAME "name:text"
            PR_GET_NAME "name:hex"
            PR_SET_SECCOMP "mode"
            PR_CAPBSET_DROP "capability"
            PR_GET_TSC "mode:hex"
            PR_SET_TSC "mode"
            PR_GET_SECUREBITS ""
            PR_SET_SECUREBITS "bits:hex"
            PR_SET_TIMERSLACK "ns"
            PR_GET_TIMERSLACK ""
            PR_MCE_KILL "set policy"
            PR_MCE_KILL_GET ""
            PR_SET_MM "what map:mm_map size"
            PR_SET_CHILD_SUBREAPER "on"
            PR_GET_CHILD_SUBREAPER "on:hex"
            PR_SET_NO_NEW_PRIVS "on"
            PR_GET_TID_ADDRESS "addr:hex"
            PR_SET_THP_DISABLE "on flags:hex"
            PR_GET_THP_DISABLE ""
            PR_CAP_AMBIENT "what capability zero"
            PR_GET_SPECULATION_CTRL "feature"
            PR_SET_SPECULATION_CTRL "feature state:hex"
            PR_SET_IO_FLUSHER "on"
            PR_GET_IO_FLUSHER ""
            PR_SET_VMA "what addr:hex len name:text"
            PR_SET_MDWE "flags:hex"
            PR_GET_MDWE ""
            PR_SET_MEMORY_MERGE "on"
            PR_GET_MEMORY_MERGE ""
            PR_TIMER_CREATE_RESTORE_IDS "on"
            PR_FUTEX_HASH "what slots"
        },
    ),
];

/// Every call that scripts make, by name, with its arguments.
pub(super) const CALLS: &[(Sysno, &str)] = &[
    (
        Sysno::add_key,
        "type:text description:text payload:hex len keyring",
    ),
    (Sysno::arch_prctl, "code:verb"),
    (Sysno::brk, "addr:hex"),
    (Sysno::capset, "header:cap_header data:capabilities"),
    (Sysno::chdir, "path:text"),
    (Sysno::chroot, "path:text"),
    (Sysno::clone3, "args:clone size"),
    (Sysno::close, "fd"),
    (Sysno::close_range, "first last flags:hex"),
    (Sysno::dup3, "old new flags:open"),
    (Sysno::epoll_ctl, "epfd op fd event:epoll_event"),
    (Sysno::exit, "status"),
    (Sysno::exit_group, "status"),
    (Sysno::fchdir, "fd"),
    (Sysno::fcntl, "fd cmd:verb"),
    (Sysno::flock, "fd op:hex"),
    (Sysno::futex, "addr:hex op:verb"),
    (
        Sysno::get_mempolicy,
        "mode:hex nodes:hex max addr:hex flags:hex",
    ),
    (Sysno::get_robust_list, "tid head:hex len:hex"),
    (Sysno::getitimer, "which value:hex"),
    (Sysno::getppid, ""),
    (Sysno::getpriority, "which who"),
    (Sysno::io_setup, "count context:hex"),
    (Sysno::io_submit, "context:hex count requests:hex"),
    (
        Sysno::io_uring_enter,
        "fd submit wait flags:hex argument:hex size",
    ),
    (Sysno::io_uring_register, "fd op argument:hex count"),
    (Sysno::ioctl, "fd request:verb"),
    (Sysno::ioprio_get, "which who"),
    (Sysno::ioprio_set, "which who priority:hex"),
    (Sysno::kcmp, "pid1 pid2 type index1 index2"),
    (Sysno::keyctl, "op:verb"),
    (Sysno::kill, "pid signal:signal"),
    (Sysno::lseek, "fd offset whence"),
    (Sysno::madvise, "addr:hex len advice"),
    (
        Sysno::mbind,
        "addr:hex len mode:hex nodes:nodes max flags:hex",
    ),
    (Sysno::membarrier, "command"),
    (Sysno::memfd_create, "name:hex flags:hex"),
    (Sysno::mlock2, "addr:hex len flags:hex"),
    (Sysno::mlockall, "flags:hex"),
    (
        Sysno::mmap,
        "addr:hex len prot:prot flags:map fd offset:hex",
    ),
    (Sysno::modify_ldt, "func ptr:hex len"),
    (Sysno::mprotect, "addr:hex len prot:prot"),
    (Sysno::mq_notify, "fd event:sigevent"),
    (Sysno::mremap, "old:hex old_len new_len flags:hex new:hex"),
    (Sysno::mseal, "addr:hex len flags:hex"),
    (Sysno::munmap, "addr:hex len"),
    (Sysno::openat, "dir path:text flags:open mode:octal"),
    (
        Sysno::perf_event_open,
        "attr:perf_event pid cpu group flags:hex",
    ),
    (Sysno::personality, "persona:hex"),
    (Sysno::pidfd_getfd, "pidfd fd flags:hex"),
    (Sysno::pidfd_open, "pid flags:hex"),
    (Sysno::prctl, "option:verb"),
    (Sysno::preadv, "fd iov:iovec[2] count offset"),
    (Sysno::prlimit64, "pid resource new:rlimit old:hex"),
    (
        Sysno::process_vm_readv,
        "pid local:iovec[2] local_count remote:iovec[4] remote_count flags:hex",
    ),
    (Sysno::read, "fd buffer:hex len"),
    (Sysno::rseq, "area:hex len flags:hex signature:hex"),
    (
        Sysno::rt_sigaction,
        "signal:signal new:sigaction old:hex set_size",
    ),
    (Sysno::rt_sigprocmask, "how set:set old:hex set_size"),
    (Sysno::rt_sigqueueinfo, "pid signal:signal info:siginfo"),
    (
        Sysno::rt_sigtimedwait,
        "set:set info:hex timeout:timespec set_size",
    ),
    (
        Sysno::rt_tgsigqueueinfo,
        "pid tid signal:signal info:siginfo",
    ),
    (Sysno::sched_getattr, "tid attr:hex size flags:hex"),
    (Sysno::sched_setaffinity, "tid len cpus:bits[1]"),
    (Sysno::sched_setattr, "tid attr:sched_attr flags:hex"),
    (Sysno::seccomp, "op flags:hex filter:hex"),
    (Sysno::semop, "id ops:sembuf[2] count"),
    (Sysno::set_mempolicy, "mode:hex nodes:nodes max"),
    (Sysno::set_robust_list, "head:hex len"),
    (Sysno::set_thread_area, "desc:user_desc"),
    (Sysno::set_tid_address, "addr:hex"),
    (Sysno::setfsgid, "gid"),
    (Sysno::setfsuid, "uid"),
    (Sysno::setgroups, "count groups:gid[0]"),
    (Sysno::setitimer, "which new:itimerval old:hex"),
    (Sysno::setpgid, "pid group"),
    (Sysno::setpriority, "which who nice"),
    (Sysno::setresgid, "real effective saved"),
    (Sysno::setresuid, "real effective saved"),
    (Sysno::setrlimit, "resource limit:rlimit"),
    (Sysno::setsid, ""),
    (Sysno::shmat, "id addr:hex flags:hex"),
    (Sysno::sigaltstack, "new:stack old:hex"),
    (Sysno::timer_create, "clock event:sigevent id:tid"),
    (Sysno::timer_delete, "id"),
    (Sysno::timer_gettime, "id value:hex"),
    (Sysno::timer_settime, "id flags:hex new:itimerspec old:hex"),
    (Sysno::umask, "mask:octal"),
    (Sysno::unshare, "flags:hex"),
    (Sysno::userfaultfd, "flags:hex"),
    (Sysno::wait4, "pid status:hex options:hex usage:hex"),
    (Sysno::waitid, "type id info:hex options:hex usage:hex"),
    (Sysno::write, "fd buffer:hex len"),
];

/// Calls that are made as 32-bit code makes them: their numbers there, and their arguments.
pub(super) const CALLS_32: &[(Sysno, u32, &str)] = &[
    (Sysno::get_robust_list, 312, "tid head:hex len:hex"),
    (
        Sysno::rt_sigaction,
        174,
        "signal:signal new:sigaction32 old:hex set_size",
    ),
    (Sysno::set_robust_list, 311, "head:hex len"),
    (Sysno::set_thread_area, 243, "desc:user_desc"),
];

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// The names behind `Sysno::` in the code below a folder, tests left out.
    fn used(folder: &Path, names: &mut Vec<(String, String)>) {
        for entry in std::fs::read_dir(folder).expect("the sources are here") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                used(&path, names);
                continue;
            }
            let text = std::fs::read_to_string(&path).expect("a source");
            let code = text.split("#[cfg(test)]").next().unwrap_or_default();
            for rest in code.split("Sysno::").skip(1) {
                let end = rest.find(|char: char| !char.is_alphanumeric() && char != '_');
                let name = &rest[..end.unwrap_or(rest.len())];
                names.push((name.to_owned(), path.display().to_string()));
            }
        }
    }

    #[test]
    fn no_call_of_a_script_is_forgotten() {
        let sources = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut names = Vec::new();
        used(&sources.join("src"), &mut names);
        used(&sources.join("../process/src"), &mut names);
        assert!(names.len() > 100, "{names:?}");
        for (name, path) in names {
            // Test support in files of its own; calls of programs, which no script makes.
            let others = [
                "testing.rs",
                "ledger/tests.rs",
                "task/interrupted.rs",
                "arch/stubs.rs",
            ];
            if others.iter().any(|end| path.ends_with(end)) || path.contains("/plan/model") {
                continue;
            }
            let known = CALLS.iter().any(|(call, _)| call.name() == name);
            assert!(known, "{name} of {path} is not in the table");
        }
    }

    #[test]
    fn calls_are_listed_once_and_have_at_most_six_arguments() {
        for pair in CALLS.windows(2) {
            assert!(pair[0].0.name() < pair[1].0.name(), "{}", pair[1].0.name());
        }
        assert!(CALLS.iter().all(|call| call.1.split(' ').count() <= 6));
    }
}
