//! What the arguments of system calls are, a line a call, and what the structures hold that they
//! point at: the table by which scripts are printed. A call that is not here prints as numbers.

use Form::{
    Address, Bits, Fd, Flags, Hex, Int, List, Number, Octal, One, Or, Short, Signal, Signals,
    Struct, Text, Verb,
};
use syscalls::Sysno;

use super::names;
use super::names::Names;

/// What an argument or a field is.
#[derive(Clone, Copy, Debug)]
pub(super) enum Form {
    /// A number of 64 bits.
    Number,
    /// A number of 32 bits, with a sign.
    Int,
    /// A number of 16 bits, with a sign.
    Short,
    /// A number that is usually read in base 8.
    Octal,
    /// A number that is usually read in base 16.
    Hex,
    /// An address; also of room that the kernel writes.
    Address,
    /// A descriptor.
    Fd,
    /// A signal's number.
    Signal,
    /// Bits with names.
    Flags(Names),
    /// A number with a name.
    One(Names),
    /// A number with a name, or else something of another form.
    Or(Names, &'static Self),
    /// The address of a string that ends with a NUL.
    Text,
    /// The address of 64 bits, one a signal.
    Signals,
    /// The address of a bit map; its size in bytes is the argument with this index.
    Bits(usize),
    /// The address of a structure.
    Struct(&'static [Field]),
    /// The address of structures; how many is the argument with this index.
    List(usize, &'static Self, usize),
    /// A number with a name that says what the arguments behind it are.
    Verb(&'static [Meaning]),
}

/// A field of a structure.
#[derive(Clone, Copy, Debug)]
pub(super) struct Field {
    pub name: &'static str,
    pub offset_bytes: usize,
    pub bytes: usize,
    pub form: Form,
}

/// One of the things that a call does, as an argument says.
#[derive(Clone, Copy, Debug)]
pub(super) struct Meaning {
    pub number: u64,
    pub name: &'static str,
    pub rest: &'static [Form],
}

/// Fields by offset: `name: offset, bytes, form`.
macro_rules! fields {
    ($($name:ident: $offset:literal, $bytes:literal, $form:expr;)*) => {
        &[$(Field {
            name: stringify!($name),
            offset_bytes: $offset,
            bytes: $bytes,
            form: $form,
        }),*]
    };
}

/// Meanings by constant of a module of linux_raw_sys: `NAME(form, …)`.
macro_rules! meanings {
    ($module:ident: $($name:ident($($form:expr),*);)*) => {
        &[$(Meaning {
            number: linux_raw_sys::$module::$name as u64,
            name: stringify!($name),
            rest: &[$($form),*],
        }),*]
    };
}

const CLONE_ARGS: &[Field] = fields! {
    flags: 0, 8, Flags(names::CLONE);
    exit_signal: 32, 8, Signal;
    set_tid: 64, 8, List(COUNT_OF_ONE, &Struct(TID), 4);
};

/// [`List`] with this index has one entry.
pub(super) const COUNT_OF_ONE: usize = usize::MAX;

const TID: &[Field] = fields! { tid: 0, 4, Int; };

const IOVEC: &[Field] = fields! {
    iov_base: 0, 8, Address;
    iov_len: 8, 8, Number;
};

const SEMBUF: &[Field] = fields! {
    sem_num: 0, 2, Number;
    sem_op: 2, 2, Short;
    sem_flg: 4, 2, Flags(names::SEM);
};

const ACTION: &[Field] = fields! {
    sa_handler: 0, 8, Or(names::SIG_HANDLER, &Address);
    sa_mask: 24, 8, Signals;
    sa_flags: 8, 8, Flags(names::SA);
    sa_restorer: 16, 8, Address;
};

const ACTION_32: &[Field] = fields! {
    sa_handler: 0, 4, Or(names::SIG_HANDLER, &Address);
    sa_mask: 12, 8, Signals;
    sa_flags: 4, 4, Flags(names::SA);
    sa_restorer: 8, 4, Address;
};

const USER_DESC: &[Field] = fields! {
    entry_number: 0, 4, Int;
    base_addr: 4, 4, Address;
    limit: 8, 4, Hex;
    flags: 12, 4, Hex;
};

const STACK: &[Field] = fields! {
    ss_sp: 0, 8, Address;
    ss_flags: 8, 4, Flags(names::SS);
    ss_size: 16, 8, Number;
};

const SIGINFO: &[Field] = fields! {
    si_signo: 0, 4, Signal;
    si_errno: 4, 4, Int;
    si_code: 8, 4, One(names::SI);
};

const TIMESPEC: &[Field] = fields! {
    tv_sec: 0, 8, Number;
    tv_nsec: 8, 8, Number;
};

const ITIMERSPEC: &[Field] = fields! {
    interval_sec: 0, 8, Number;
    interval_nsec: 8, 8, Number;
    value_sec: 16, 8, Number;
    value_nsec: 24, 8, Number;
};

const ITIMERVAL: &[Field] = fields! {
    interval_sec: 0, 8, Number;
    interval_usec: 8, 8, Number;
    value_sec: 16, 8, Number;
    value_usec: 24, 8, Number;
};

const SIGEVENT: &[Field] = fields! {
    sigev_value: 0, 8, Hex;
    sigev_signo: 8, 4, Signal;
    sigev_notify: 12, 4, One(names::SIGEV);
    sigev_notify_thread_id: 16, 4, Int;
};

const TIMER_ID: &[Field] = fields! { id: 0, 4, Int; };

const LIMIT: &[Field] = fields! {
    rlim_cur: 0, 8, One(names::LIMIT);
    rlim_max: 8, 8, One(names::LIMIT);
};

const SCHED_ATTR: &[Field] = fields! {
    sched_policy: 4, 4, One(names::SCHED);
    sched_flags: 8, 8, Flags(names::SCHED_FLAG);
    sched_nice: 16, 4, Int;
    sched_priority: 20, 4, Int;
    sched_runtime: 24, 8, Number;
    sched_deadline: 32, 8, Number;
    sched_period: 40, 8, Number;
    sched_util_min: 48, 4, Int;
    sched_util_max: 52, 4, Int;
};

const CAP_HEADER: &[Field] = fields! {
    version: 0, 4, Hex;
    pid: 4, 4, Int;
};

const CAP_DATA: &[Field] = fields! {
    effective: 0, 4, Hex;
    permitted: 4, 4, Hex;
    inheritable: 8, 4, Hex;
    effective_high: 12, 4, Hex;
    permitted_high: 16, 4, Hex;
    inheritable_high: 20, 4, Hex;
};

const GROUP: &[Field] = fields! { gid: 0, 4, Number; };

const PROCESS_GROUP: &[Field] = fields! { group: 0, 4, Int; };

const EPOLL_EVENT: &[Field] = fields! {
    events: 0, 4, Flags(names::EPOLL);
    data: 4, 8, Hex;
};

const PERF_EVENT_ATTR: &[Field] = fields! {
    kind: 0, 4, Number;
    size: 4, 4, Number;
    config: 8, 8, Hex;
    sample_period: 16, 8, Number;
    sample_type: 24, 8, Hex;
    read_format: 32, 8, Hex;
    flags: 40, 8, Hex;
};

const FLOCK: &[Field] = fields! {
    l_type: 0, 2, One(names::F_LOCK);
    l_whence: 2, 2, One(names::SEEK);
    l_start: 8, 8, Number;
    l_len: 16, 8, Number;
};

const OWNER: &[Field] = fields! {
    kind: 0, 4, One(names::F_OWNER);
    pid: 4, 4, Int;
};

/// The first of the nodes of a memory policy.
const NODES: &[Field] = fields! { nodes: 0, 8, Hex; };

const MEMORY_MAP: &[Field] = fields! {
    start_code: 0, 8, Address;
    end_code: 8, 8, Address;
    start_data: 16, 8, Address;
    end_data: 24, 8, Address;
    start_brk: 32, 8, Address;
    brk: 40, 8, Address;
    start_stack: 48, 8, Address;
    arg_start: 56, 8, Address;
    arg_end: 64, 8, Address;
    env_start: 72, 8, Address;
    env_end: 80, 8, Address;
    auxv: 88, 8, Address;
    auxv_size: 96, 4, Int;
    exe_fd: 100, 4, Fd;
};

const ARCH_PRCTL: &[Meaning] = &[
    Meaning {
        number: 0x1011,
        name: "ARCH_GET_CPUID",
        rest: &[],
    },
    Meaning {
        number: 0x1012,
        name: "ARCH_SET_CPUID",
        rest: &[Int],
    },
    Meaning {
        number: 0x2002,
        name: "ARCH_MAP_VDSO_32",
        rest: &[Address],
    },
    Meaning {
        number: 0x2003,
        name: "ARCH_MAP_VDSO_64",
        rest: &[Address],
    },
];

const FCNTL: &[Meaning] = meanings! { general:
    F_SETFD(Int);
    F_SETFL(Flags(names::O));
    F_SETLK(Struct(FLOCK));
    F_OFD_SETLK(Struct(FLOCK));
    F_SETLEASE(One(names::F_LOCK));
    F_SETSIG(Signal);
    F_SETOWN_EX(Struct(OWNER));
    F_ADD_SEALS(Flags(names::F_SEAL));
    F_SETPIPE_SZ(Int);
};

const IOCTL: &[Meaning] = meanings! { ioctl:
    TIOCSCTTY(Int);
    TIOCSPGRP(Struct(PROCESS_GROUP));
    TIOCNOTTY();
};

/// Operations of keyctl(2), which no module of linux_raw_sys has.
const KEYCTL: &[Meaning] = &[
    keyctl(0, "KEYCTL_GET_KEYRING_ID", &[Int, Int]),
    keyctl(1, "KEYCTL_JOIN_SESSION_KEYRING", &[Address]),
    keyctl(3, "KEYCTL_REVOKE", &[Int]),
    keyctl(4, "KEYCTL_CHOWN", &[Int, Int, Int]),
    keyctl(5, "KEYCTL_SETPERM", &[Int, Hex]),
    keyctl(6, "KEYCTL_DESCRIBE", &[Int, Address, Number]),
    keyctl(8, "KEYCTL_LINK", &[Int, Int]),
    keyctl(11, "KEYCTL_READ", &[Int, Address, Number]),
    keyctl(14, "KEYCTL_SET_REQKEY_KEYRING", &[Int]),
];

const fn keyctl(number: u64, name: &'static str, rest: &'static [Form]) -> Meaning {
    Meaning { number, name, rest }
}

const PRCTL: &[Meaning] = meanings! { prctl:
    PR_SET_PDEATHSIG(Signal);
    PR_GET_PDEATHSIG(Address);
    PR_GET_DUMPABLE();
    PR_SET_DUMPABLE(Int);
    PR_SET_NAME(Text);
    PR_GET_NAME(Address);
    PR_SET_SECCOMP(Int);
    PR_CAPBSET_DROP(One(names::CAP));
    PR_GET_TSC(Address);
    PR_SET_TSC(One(names::PR_TSC));
    PR_GET_SECUREBITS();
    PR_SET_SECUREBITS(Flags(names::SECBIT));
    PR_SET_TIMERSLACK(Number);
    PR_GET_TIMERSLACK();
    PR_MCE_KILL(One(names::PR_MCE_KILL), One(names::PR_MCE_POLICY));
    PR_MCE_KILL_GET();
    PR_SET_MM(One(names::PR_SET_MM), Struct(MEMORY_MAP), Number);
    PR_SET_CHILD_SUBREAPER(Int);
    PR_GET_CHILD_SUBREAPER(Address);
    PR_SET_NO_NEW_PRIVS(Int);
    PR_GET_TID_ADDRESS(Address);
    PR_SET_THP_DISABLE(Int, Hex);
    PR_GET_THP_DISABLE();
    PR_CAP_AMBIENT(One(names::PR_CAP_AMBIENT), One(names::CAP), Int);
    PR_GET_SPECULATION_CTRL(One(names::PR_SPEC));
    PR_SET_SPECULATION_CTRL(One(names::PR_SPEC), Flags(names::PR_SPEC_STATE));
    PR_SET_IO_FLUSHER(Int);
    PR_GET_IO_FLUSHER();
    PR_SET_VMA(One(names::PR_SET_VMA), Address, Number, Text);
    PR_SET_MDWE(Flags(names::PR_MDWE));
    PR_GET_MDWE();
    PR_SET_MEMORY_MERGE(Int);
    PR_GET_MEMORY_MERGE();
    PR_TIMER_CREATE_RESTORE_IDS(One(names::PR_TIMER_IDS));
    PR_FUTEX_HASH(Int, Number);
};

/// Every call that scripts make, by name, with its arguments.
pub(super) const CALLS: &[(Sysno, &[Form])] = &[
    (Sysno::add_key, &[Text, Text, Address, Number, Int]),
    (Sysno::arch_prctl, &[Verb(ARCH_PRCTL)]),
    (Sysno::brk, &[Address]),
    (Sysno::capset, &[Struct(CAP_HEADER), Struct(CAP_DATA)]),
    (Sysno::chdir, &[Text]),
    (Sysno::chroot, &[Text]),
    (Sysno::clone3, &[Struct(CLONE_ARGS), Number]),
    (Sysno::close, &[Fd]),
    (Sysno::close_range, &[Number, Number, Int]),
    (Sysno::dup3, &[Fd, Fd, Flags(names::CLOEXEC)]),
    (
        Sysno::epoll_ctl,
        &[Fd, One(names::EPOLL_CTL), Fd, Struct(EPOLL_EVENT)],
    ),
    (Sysno::exit, &[Int]),
    (Sysno::exit_group, &[Int]),
    (Sysno::fchdir, &[Fd]),
    (Sysno::fcntl, &[Fd, Verb(FCNTL)]),
    (Sysno::flock, &[Fd, Flags(names::LOCK)]),
    (
        Sysno::futex,
        &[
            Address,
            One(names::FUTEX),
            One(names::COUNT),
            Int,
            Address,
            One(names::FUTEX_OP),
        ],
    ),
    (
        Sysno::get_mempolicy,
        &[Address, Address, Number, Address, Number],
    ),
    (Sysno::get_robust_list, &[Int, Address, Address]),
    (Sysno::getitimer, &[One(names::ITIMER), Address]),
    (Sysno::getppid, &[]),
    (Sysno::getpriority, &[One(names::PRIO), Int]),
    (Sysno::io_setup, &[Int, Address]),
    (Sysno::io_submit, &[Address, Int, Address]),
    (Sysno::io_uring_enter, &[Fd, Int, Int, Int, Address, Int]),
    (Sysno::io_uring_register, &[Fd, Int, Address, Int]),
    (Sysno::ioctl, &[Fd, Verb(IOCTL)]),
    (Sysno::ioprio_get, &[One(names::IOPRIO_WHO), Int]),
    (Sysno::ioprio_set, &[One(names::IOPRIO_WHO), Int, Hex]),
    (Sysno::kcmp, &[Int, Int, Int]),
    (Sysno::keyctl, &[Verb(KEYCTL)]),
    (Sysno::kill, &[Int, Signal]),
    (Sysno::lseek, &[Fd, Number, One(names::SEEK)]),
    (Sysno::madvise, &[Address, Number, One(names::MADV)]),
    (
        Sysno::mbind,
        &[
            Address,
            Number,
            One(names::MPOL),
            Struct(NODES),
            Number,
            Number,
        ],
    ),
    (Sysno::membarrier, &[One(names::MEMBARRIER)]),
    (Sysno::memfd_create, &[Address, Hex]),
    (Sysno::mlock2, &[Address, Number, Flags(names::MLOCK)]),
    (Sysno::mlockall, &[Flags(names::MCL)]),
    (
        Sysno::mmap,
        &[
            Address,
            Number,
            Flags(names::PROT),
            Flags(names::MAP),
            Fd,
            Hex,
        ],
    ),
    (Sysno::modify_ldt, &[Int, Address, Number]),
    (Sysno::mprotect, &[Address, Number, Flags(names::PROT)]),
    (Sysno::mq_notify, &[Fd, Struct(SIGEVENT)]),
    (
        Sysno::mremap,
        &[Address, Number, Number, Flags(names::MREMAP), Address],
    ),
    (Sysno::mseal, &[Address, Number, Hex]),
    (Sysno::munmap, &[Address, Number]),
    (Sysno::openat, &[Fd, Text, Flags(names::O), Octal]),
    (
        Sysno::perf_event_open,
        &[Struct(PERF_EVENT_ATTR), Int, Int, Int, Hex],
    ),
    (Sysno::personality, &[Flags(names::PERSONALITY)]),
    (Sysno::pidfd_getfd, &[Fd, Fd, Int]),
    (Sysno::pidfd_open, &[Int, Flags(names::PIDFD)]),
    (Sysno::prctl, &[Verb(PRCTL)]),
    (
        Sysno::preadv,
        &[Fd, List(2, &Struct(IOVEC), 16), Int, Number],
    ),
    (
        Sysno::prlimit64,
        &[Int, One(names::RLIMIT), Struct(LIMIT), Address],
    ),
    (
        Sysno::process_vm_readv,
        &[
            Int,
            List(2, &Struct(IOVEC), 16),
            Int,
            List(4, &Struct(IOVEC), 16),
            Int,
            Number,
        ],
    ),
    (Sysno::read, &[Fd, Address, Number]),
    (Sysno::rseq, &[Address, Number, Int, Hex]),
    (
        Sysno::rt_sigaction,
        &[Signal, Struct(ACTION), Address, Number],
    ),
    (
        Sysno::rt_sigprocmask,
        &[One(names::SIG_HOW), Signals, Address, Number],
    ),
    (Sysno::rt_sigqueueinfo, &[Int, Signal, Struct(SIGINFO)]),
    (
        Sysno::rt_sigtimedwait,
        &[Signals, Address, Struct(TIMESPEC), Number],
    ),
    (
        Sysno::rt_tgsigqueueinfo,
        &[Int, Int, Signal, Struct(SIGINFO)],
    ),
    (Sysno::sched_getattr, &[Int, Address, Number, Int]),
    (Sysno::sched_setaffinity, &[Int, Number, Bits(1)]),
    (Sysno::sched_setattr, &[Int, Struct(SCHED_ATTR), Int]),
    (
        Sysno::seccomp,
        &[One(names::SECCOMP_SET), Flags(names::SECCOMP), Address],
    ),
    (Sysno::semop, &[Int, List(2, &Struct(SEMBUF), 6), Number]),
    (
        Sysno::set_mempolicy,
        &[One(names::MPOL), Struct(NODES), Number],
    ),
    (Sysno::set_robust_list, &[Address, Number]),
    (Sysno::set_thread_area, &[Struct(USER_DESC)]),
    (Sysno::set_tid_address, &[Address]),
    (Sysno::setfsgid, &[Int]),
    (Sysno::setfsuid, &[Int]),
    (Sysno::setgroups, &[Number, List(0, &Struct(GROUP), 4)]),
    (
        Sysno::setitimer,
        &[One(names::ITIMER), Struct(ITIMERVAL), Address],
    ),
    (Sysno::setpgid, &[Int, Int]),
    (Sysno::setpriority, &[One(names::PRIO), Int, Int]),
    (Sysno::setresgid, &[Int, Int, Int]),
    (Sysno::setresuid, &[Int, Int, Int]),
    (Sysno::setrlimit, &[One(names::RLIMIT), Struct(LIMIT)]),
    (Sysno::setsid, &[]),
    (Sysno::shmat, &[Int, Address, Flags(names::SHM)]),
    (Sysno::sigaltstack, &[Struct(STACK), Address]),
    (
        Sysno::timer_create,
        &[One(names::CLOCK), Struct(SIGEVENT), Struct(TIMER_ID)],
    ),
    (Sysno::timer_delete, &[Int]),
    (Sysno::timer_gettime, &[Int, Address]),
    (
        Sysno::timer_settime,
        &[Int, Flags(names::TIMER), Struct(ITIMERSPEC), Address],
    ),
    (Sysno::umask, &[Octal]),
    (Sysno::unshare, &[Flags(names::CLONE)]),
    (Sysno::userfaultfd, &[Flags(names::CLOEXEC)]),
    (Sysno::wait4, &[Int, Address, Flags(names::WAIT), Address]),
    (
        Sysno::waitid,
        &[One(names::P), Int, Address, Flags(names::WAIT), Address],
    ),
    (Sysno::write, &[Fd, Address, Number]),
];

/// Calls that are made as 32-bit code makes them: their numbers there, and their arguments.
pub(super) const CALLS_32: &[(Sysno, u32, &[Form])] = &[
    (Sysno::get_robust_list, 312, &[Int, Address, Address]),
    (
        Sysno::rt_sigaction,
        174,
        &[Signal, Struct(ACTION_32), Address, Number],
    ),
    (Sysno::set_robust_list, 311, &[Address, Number]),
    (Sysno::set_thread_area, 243, &[Struct(USER_DESC)]),
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
                "process/src/refetch.rs",
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
        assert!(CALLS.iter().all(|(_, forms)| forms.len() <= 6));
    }
}
