//! The names of numbers in system calls: tables by what the number stands for.

/// Numbers and their names.
pub(super) type Names = &'static [(u64, &'static str)];

/// Names of constants as the kernel's headers define them.
macro_rules! names {
    ($module:ident: $($name:ident)*) => {
        &[$((linux_raw_sys::$module::$name as u64, stringify!($name))),*]
    };
}

pub(super) const PROT: Names = names!(general: PROT_NONE PROT_READ PROT_WRITE PROT_EXEC);

pub(super) const MAP: Names = names!(general:
    MAP_SHARED MAP_PRIVATE MAP_DROPPABLE MAP_FIXED MAP_ANONYMOUS MAP_GROWSDOWN MAP_LOCKED
    MAP_NORESERVE MAP_POPULATE MAP_STACK MAP_HUGETLB MAP_SYNC MAP_FIXED_NOREPLACE);

pub(super) const MADV: Names = names!(general:
    MADV_NORMAL MADV_RANDOM MADV_SEQUENTIAL MADV_WILLNEED MADV_DONTNEED MADV_FREE MADV_REMOVE
    MADV_DONTFORK MADV_DOFORK MADV_MERGEABLE MADV_UNMERGEABLE MADV_HUGEPAGE MADV_NOHUGEPAGE
    MADV_DONTDUMP MADV_DODUMP MADV_WIPEONFORK MADV_KEEPONFORK MADV_COLD MADV_PAGEOUT
    MADV_POPULATE_READ MADV_POPULATE_WRITE MADV_DONTNEED_LOCKED MADV_COLLAPSE
    MADV_GUARD_INSTALL MADV_GUARD_REMOVE);

pub(super) const MLOCK: Names = names!(general: MLOCK_ONFAULT);

pub(super) const MREMAP: Names = names!(general: MREMAP_MAYMOVE MREMAP_FIXED);

pub(super) const SHM: Names = &[
    (0o10000, "SHM_RDONLY"),
    (0o40000, "SHM_REMAP"),
    (0o100_000, "SHM_EXEC"),
];

pub(super) const SEM: Names = &[(0x800, "IPC_NOWAIT"), (0x1000, "SEM_UNDO")];

pub(super) const MCL: Names = names!(general: MCL_CURRENT MCL_FUTURE MCL_ONFAULT);

pub(super) const CLONE: Names = names!(general:
    CLONE_VM CLONE_FS CLONE_FILES CLONE_SIGHAND CLONE_PIDFD CLONE_PTRACE CLONE_VFORK
    CLONE_PARENT CLONE_THREAD CLONE_NEWNS CLONE_SYSVSEM CLONE_SETTLS CLONE_PARENT_SETTID
    CLONE_CHILD_CLEARTID CLONE_UNTRACED CLONE_CHILD_SETTID CLONE_NEWCGROUP CLONE_NEWUTS
    CLONE_NEWIPC CLONE_NEWUSER CLONE_NEWPID CLONE_NEWNET CLONE_IO);

/// Access modes and status flags of descriptions.
pub(super) const O: Names = names!(general:
    O_RDONLY O_WRONLY O_RDWR O_CREAT O_EXCL O_NOCTTY O_TRUNC O_APPEND O_NONBLOCK O_DSYNC FASYNC
    O_DIRECT O_DIRECTORY O_NOFOLLOW O_NOATIME O_CLOEXEC O_PATH);

/// What a new descriptor can be given.
pub(super) const CLOEXEC: Names = names!(general: O_CLOEXEC O_NONBLOCK);

/// Descriptors that are none.
pub(super) const AT: Names = names!(general: AT_FDCWD);

/// What flock(2) does.
pub(super) const LOCK: Names = names!(general: LOCK_SH LOCK_EX LOCK_NB LOCK_UN);

/// Commands of membarrier(2).
pub(super) const MEMBARRIER: Names = &[
    (1 << 2, "MEMBARRIER_CMD_REGISTER_GLOBAL_EXPEDITED"),
    (1 << 4, "MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED"),
    (
        1 << 6,
        "MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED_SYNC_CORE",
    ),
    (1 << 8, "MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED_RSEQ"),
    (1 << 9, "MEMBARRIER_CMD_GET_REGISTRATIONS"),
];

/// Flags of pidfd_open(2).
pub(super) const PIDFD: Names = &[(0o4000, "PIDFD_NONBLOCK"), (0o200, "PIDFD_THREAD")];

/// Operations of seccomp(2).
pub(super) const SECCOMP_SET: Names = &[(1, "SECCOMP_SET_MODE_FILTER")];

/// Its flags.
pub(super) const SECCOMP: Names = &[
    (1 << 0, "SECCOMP_FILTER_FLAG_TSYNC"),
    (1 << 1, "SECCOMP_FILTER_FLAG_LOG"),
    (1 << 2, "SECCOMP_FILTER_FLAG_SPEC_ALLOW"),
];

pub(super) const F_SEAL: Names = names!(general:
    F_SEAL_SEAL F_SEAL_SHRINK F_SEAL_GROW F_SEAL_WRITE F_SEAL_FUTURE_WRITE F_SEAL_EXEC);

pub(super) const F_OWNER: Names = names!(general: F_OWNER_TID F_OWNER_PID F_OWNER_PGRP);

pub(super) const F_LOCK: Names = names!(general: F_RDLCK F_WRLCK F_UNLCK);

pub(super) const SEEK: Names = names!(general: SEEK_SET SEEK_CUR SEEK_END);

pub(super) const EPOLL_CTL: Names = names!(general: EPOLL_CTL_ADD EPOLL_CTL_DEL EPOLL_CTL_MOD);

/// Events of poll and epoll.
pub(super) const EPOLL: Names = &[
    (0x1, "EPOLLIN"),
    (0x2, "EPOLLPRI"),
    (0x4, "EPOLLOUT"),
    (0x8, "EPOLLERR"),
    (0x10, "EPOLLHUP"),
    (0x40, "EPOLLRDNORM"),
    (0x80, "EPOLLRDBAND"),
    (0x100, "EPOLLWRNORM"),
    (0x200, "EPOLLWRBAND"),
    (0x400, "EPOLLMSG"),
    (0x2000, "EPOLLRDHUP"),
    (1 << 28, "EPOLLEXCLUSIVE"),
    (1 << 29, "EPOLLWAKEUP"),
    (1 << 30, "EPOLLONESHOT"),
    (1 << 31, "EPOLLET"),
];

pub(super) const SIGNALS: Names = names!(general:
    SIGHUP SIGINT SIGQUIT SIGILL SIGTRAP SIGABRT SIGBUS SIGFPE SIGKILL SIGUSR1 SIGSEGV SIGUSR2
    SIGPIPE SIGALRM SIGTERM SIGSTKFLT SIGCHLD SIGCONT SIGSTOP SIGTSTP SIGTTIN SIGTTOU SIGURG
    SIGXCPU SIGXFSZ SIGVTALRM SIGPROF SIGWINCH SIGIO SIGPWR SIGSYS SIGRTMIN);

pub(super) const SIG_HOW: Names = names!(general: SIG_BLOCK SIG_UNBLOCK SIG_SETMASK);

/// Handlers that are none.
pub(super) const SIG_HANDLER: Names = &[(0, "SIG_DFL"), (1, "SIG_IGN")];

pub(super) const SA: Names = names!(general:
    SA_NOCLDSTOP SA_NOCLDWAIT SA_SIGINFO SA_EXPOSE_TAGBITS SA_RESTORER SA_ONSTACK SA_RESTART
    SA_NODEFER SA_RESETHAND);

pub(super) const SS: Names = names!(general: SS_ONSTACK SS_DISABLE SS_AUTODISARM);

pub(super) const SIGEV: Names =
    names!(general: SIGEV_SIGNAL SIGEV_NONE SIGEV_THREAD SIGEV_THREAD_ID);

pub(super) const SI: Names = &[
    (0, "SI_USER"),
    (0x80, "SI_KERNEL"),
    (-1_i64 as u64, "SI_QUEUE"),
    (-2_i64 as u64, "SI_TIMER"),
    (-3_i64 as u64, "SI_MESGQ"),
    (-4_i64 as u64, "SI_ASYNCIO"),
    (-5_i64 as u64, "SI_SIGIO"),
    (-6_i64 as u64, "SI_TKILL"),
];

pub(super) const CLOCK: Names = names!(general:
    CLOCK_REALTIME CLOCK_MONOTONIC CLOCK_PROCESS_CPUTIME_ID CLOCK_THREAD_CPUTIME_ID
    CLOCK_MONOTONIC_RAW CLOCK_REALTIME_COARSE CLOCK_MONOTONIC_COARSE CLOCK_BOOTTIME
    CLOCK_REALTIME_ALARM CLOCK_BOOTTIME_ALARM CLOCK_TAI);

pub(super) const TIMER: Names = names!(general: TIMER_ABSTIME);

pub(super) const ITIMER: Names = names!(general: ITIMER_REAL ITIMER_VIRTUAL ITIMER_PROF);

pub(super) const FUTEX: Names = names!(general:
    FUTEX_WAIT FUTEX_WAKE FUTEX_REQUEUE FUTEX_CMP_REQUEUE FUTEX_WAKE_OP FUTEX_WAIT_BITSET
    FUTEX_WAKE_BITSET);

/// The operations of `FUTEX_WAKE_OP` that scripts use.
pub(super) const FUTEX_OP: Names = &[(1 << 28 | 1 << 12, "FUTEX_OP_ADD<<28|1<<12")];

/// Counts that stand for all.
pub(super) const COUNT: Names = &[(0x7fff_ffff, "INT_MAX")];

pub(super) const RLIMIT: Names = names!(general:
    RLIMIT_CPU RLIMIT_FSIZE RLIMIT_DATA RLIMIT_STACK RLIMIT_CORE RLIMIT_RSS RLIMIT_NPROC
    RLIMIT_NOFILE RLIMIT_MEMLOCK RLIMIT_AS RLIMIT_LOCKS RLIMIT_SIGPENDING RLIMIT_MSGQUEUE
    RLIMIT_NICE RLIMIT_RTPRIO RLIMIT_RTTIME);

pub(super) const LIMIT: Names = &[(u64::MAX, "RLIM64_INFINITY")];

pub(super) const PRIO: Names = names!(general: PRIO_PROCESS PRIO_PGRP PRIO_USER);

pub(super) const IOPRIO_WHO: Names = &[
    (1, "IOPRIO_WHO_PROCESS"),
    (2, "IOPRIO_WHO_PGRP"),
    (3, "IOPRIO_WHO_USER"),
];

pub(super) const SCHED: Names = names!(general:
    SCHED_NORMAL SCHED_FIFO SCHED_RR SCHED_BATCH SCHED_IDLE SCHED_DEADLINE);

pub(super) const SCHED_FLAG: Names = names!(general:
    SCHED_FLAG_RESET_ON_FORK SCHED_FLAG_RECLAIM SCHED_FLAG_DL_OVERRUN SCHED_FLAG_KEEP_POLICY
    SCHED_FLAG_KEEP_PARAMS SCHED_FLAG_UTIL_CLAMP_MIN SCHED_FLAG_UTIL_CLAMP_MAX);

/// Kinds of ids of waitid(2).
/// Modes of memory policies, and their flags.
pub(super) const MPOL: Names = &[
    (0, "MPOL_DEFAULT"),
    (1, "MPOL_PREFERRED"),
    (2, "MPOL_BIND"),
    (3, "MPOL_INTERLEAVE"),
    (4, "MPOL_LOCAL"),
    (5, "MPOL_PREFERRED_MANY"),
    (6, "MPOL_WEIGHTED_INTERLEAVE"),
];

pub(super) const P: Names = names!(general: P_ALL P_PID P_PGID P_PIDFD);

pub(super) const WAIT: Names = names!(general:
    WNOHANG WSTOPPED WEXITED WCONTINUED WNOWAIT __WNOTHREAD __WALL __WCLONE);

/// Bits of personality(2); the kind itself stands in the lowest byte.
pub(super) const PERSONALITY: Names = &[
    (0, "PER_LINUX"),
    (0x0004_0000, "ADDR_NO_RANDOMIZE"),
    (0x0010_0000, "MMAP_PAGE_ZERO"),
    (0x0020_0000, "ADDR_COMPAT_LAYOUT"),
    (0x0040_0000, "READ_IMPLIES_EXEC"),
    (0x0080_0000, "ADDR_LIMIT_32BIT"),
    (0x0100_0000, "SHORT_INODE"),
    (0x0200_0000, "WHOLE_SECONDS"),
    (0x0400_0000, "STICKY_TIMEOUTS"),
    (0x0800_0000, "ADDR_LIMIT_3GB"),
];

pub(super) const SECBIT: Names = &[
    (1, "SECBIT_NOROOT"),
    (1 << 1, "SECBIT_NOROOT_LOCKED"),
    (1 << 2, "SECBIT_NO_SETUID_FIXUP"),
    (1 << 3, "SECBIT_NO_SETUID_FIXUP_LOCKED"),
    (1 << 4, "SECBIT_KEEP_CAPS"),
    (1 << 5, "SECBIT_KEEP_CAPS_LOCKED"),
    (1 << 6, "SECBIT_NO_CAP_AMBIENT_RAISE"),
    (1 << 7, "SECBIT_NO_CAP_AMBIENT_RAISE_LOCKED"),
];

/// Capabilities by number.
pub(super) const CAP: Names = names!(general:
    CAP_CHOWN CAP_DAC_OVERRIDE CAP_DAC_READ_SEARCH CAP_FOWNER CAP_FSETID CAP_KILL CAP_SETGID
    CAP_SETUID CAP_SETPCAP CAP_LINUX_IMMUTABLE CAP_NET_BIND_SERVICE CAP_NET_BROADCAST
    CAP_NET_ADMIN CAP_NET_RAW CAP_IPC_LOCK CAP_IPC_OWNER CAP_SYS_MODULE CAP_SYS_RAWIO
    CAP_SYS_CHROOT CAP_SYS_PTRACE CAP_SYS_PACCT CAP_SYS_ADMIN CAP_SYS_BOOT CAP_SYS_NICE
    CAP_SYS_RESOURCE CAP_SYS_TIME CAP_SYS_TTY_CONFIG CAP_MKNOD CAP_LEASE CAP_AUDIT_WRITE
    CAP_AUDIT_CONTROL CAP_SETFCAP CAP_MAC_OVERRIDE CAP_MAC_ADMIN CAP_SYSLOG CAP_WAKE_ALARM
    CAP_BLOCK_SUSPEND CAP_AUDIT_READ CAP_PERFMON CAP_BPF CAP_CHECKPOINT_RESTORE);

pub(super) const PR_CAP_AMBIENT: Names = names!(prctl:
    PR_CAP_AMBIENT_IS_SET PR_CAP_AMBIENT_RAISE PR_CAP_AMBIENT_LOWER PR_CAP_AMBIENT_CLEAR_ALL);

pub(super) const PR_SPEC: Names = names!(prctl:
    PR_SPEC_STORE_BYPASS PR_SPEC_INDIRECT_BRANCH PR_SPEC_L1D_FLUSH);

pub(super) const PR_SPEC_STATE: Names = names!(prctl:
    PR_SPEC_ENABLE PR_SPEC_DISABLE PR_SPEC_FORCE_DISABLE PR_SPEC_DISABLE_NOEXEC);

pub(super) const PR_TSC: Names = names!(prctl: PR_TSC_ENABLE PR_TSC_SIGSEGV);

pub(super) const PR_MCE_KILL: Names = names!(prctl: PR_MCE_KILL_CLEAR PR_MCE_KILL_SET);

pub(super) const PR_MCE_POLICY: Names = names!(prctl:
    PR_MCE_KILL_LATE PR_MCE_KILL_EARLY PR_MCE_KILL_DEFAULT);

pub(super) const PR_MDWE: Names = names!(prctl: PR_MDWE_REFUSE_EXEC_GAIN PR_MDWE_NO_INHERIT);

pub(super) const PR_SET_MM: Names = names!(prctl: PR_SET_MM_MAP);

pub(super) const PR_SET_VMA: Names = names!(prctl: PR_SET_VMA_ANON_NAME);

pub(super) const PR_TIMER_IDS: Names = names!(prctl:
    PR_TIMER_CREATE_RESTORE_IDS_OFF PR_TIMER_CREATE_RESTORE_IDS_ON
    PR_TIMER_CREATE_RESTORE_IDS_GET);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_one_name() {
        for names in [
            MAP,
            MADV,
            CLONE,
            EPOLL,
            SIGNALS,
            SA,
            RLIMIT,
            CAP,
            SECBIT,
            PERSONALITY,
        ] {
            let mut numbers = names.iter().map(|name| name.0).collect::<Vec<_>>();
            numbers.sort_unstable();
            numbers.dedup();
            assert_eq!(numbers.len(), names.len(), "{names:?}");
        }
    }

    #[test]
    fn lists_have_no_gaps() {
        let consecutive = |names: Names, from: u64| {
            let numbers = names.iter().map(|name| name.0);
            assert!(numbers.eq(from..from + names.len() as u64), "{names:?}");
        };
        consecutive(CAP, 0);
        consecutive(SIGNALS, 1);
        consecutive(RLIMIT, 0);
    }
}
