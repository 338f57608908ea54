//! Lists about descriptors: the lines of /proc/PID/fdinfo by kind, status flags, events.
//!
//! - What: descriptors of which the kernel tells what is not known
//! - Refused: "its fdinfo has the unknown line …"; "its status flags … are not known"; what is
//!   known stands in [ledger.md](ledger.md).
//! - CRIU 4.2: passed over.

use sys::ledger::{Entry, List, kept, refused, stateless};

use crate::fd::{ErasedKind, Open, tags};
use crate::{Error, Result};

/// The lines that every kind of descriptor has.
#[rustfmt::skip]
pub static COMMON: List = List {
    title: "lines of /proc/PID/fdinfo",
    source: "proc_pid_fdinfo(5); other kinds have those below",
    entries: &[
        kept("pos", "the offset"),
        kept("flags", "access mode, status flags, close-on-exec"),
        stateless("mnt_id", "the mount, which the path leads to"),
        stateless("ino", "the inode, which a restore finds by its path or makes"),
        kept("lock", "file locks and leases"),
        kept("eventfd: eventfd-count", "the count"),
        stateless("eventfd: eventfd-id", "a number of the kernel's own"),
        kept("eventfd: eventfd-semaphore", "semaphore or counter"),
        kept("timerfd: clockid", "the clock"),
        kept("timerfd: ticks", "expirations that were not read"),
        kept("timerfd: settime flags", "absolute, cancelled when the clock is set"),
        kept("timerfd: it_value", "the time that remains"),
        kept("timerfd: it_interval", "the period"),
        kept("signalfd: sigmask", "the signals"),
        kept("epoll: tfd", "a watch: number, events, data"),
        kept("inotify: inotify wd", "a watch: number, events, file"),
        kept("fanotify: fanotify flags", "the group's flags"),
        kept("fanotify: fanotify ino", "a mark of an inode"),
        kept("fanotify: fanotify mnt_id", "a mark of a mount"),
        kept("fanotify: fanotify sdev", "a mark of a file system"),
        refused("fanotify: fanotify mnt_ns", "a mark of a mount namespace is refused by name"),
        kept("pidfd: Pid", "the process"),
        stateless("pidfd: NSpid", "numbers of a process whose namespaces are known"),
        refused("userfaultfd: pending", "faults that wait are told again, other events refused"),
        stateless("userfaultfd: total", "pending, and those that were read and not answered"),
        kept("userfaultfd: API", "version and features"),
        kept("bpf map: map_type", "the type"),
        kept("bpf map: key_size", "the size of keys"),
        kept("bpf map: value_size", "the size of values"),
        kept("bpf map: max_entries", "the most entries"),
        kept("bpf map: map_flags", "the flags"),
        kept("bpf map: map_extra", "further settings"),
        stateless("bpf map: memlock", "counts memory"),
        stateless("bpf map: map_id", "a number of the kernel's own"),
        kept("bpf map: frozen", "frozen for programs"),
        refused("bpf map: owner_prog_type", "arrays of programs are refused"),
        refused("bpf map: owner_jited", "arrays of programs are refused"),
        kept("unix socket: scm_fds", "descriptors in flight, which are looked at"),
        kept("terminal: tty-index", "the number"),
        kept("tun: iff", "the interface"),
        kept("io_uring: SqMask", "the size of the submission queue"),
        kept("io_uring: SqHead", "a counter"),
        kept("io_uring: SqTail", "a counter"),
        kept("io_uring: CachedSqHead", "a counter"),
        kept("io_uring: CqMask", "the size of the completion queue"),
        kept("io_uring: CqHead", "a counter"),
        kept("io_uring: CqTail", "a counter"),
        kept("io_uring: CachedCqTail", "a counter"),
        kept("io_uring: SQEs", "entries, which stand in the ring"),
        kept("io_uring: CQEs", "completions, which stand in the ring"),
        refused("io_uring: SqThread", "a thread that submits is refused"),
        stateless("io_uring: SqThreadCpu", "of a thread that submits, which is refused"),
        stateless("io_uring: SqTotalTime", "of a thread that submits, which is refused"),
        stateless("io_uring: SqWorkTime", "of a thread that submits, which is refused"),
        kept("io_uring: UserFiles", "registered files"),
        kept("io_uring: UserBufs", "registered buffers"),
        refused("io_uring: Personalities", "personalities are refused"),
        stateless("io_uring: PollList", "the head of a list of requests, which are looked for"),
        stateless("io_uring: CqOverflowList", "the head of a list of completions, looked for"),
        stateless("io_uring: NAPI", "how a ring waits for the network, looked at in its memory"),
        stateless("io_uring: napi_busy_poll_to", "of NAPI"),
        stateless("io_uring: napi_busy_poll_dt", "of NAPI"),
        stateless("io_uring: napi_prefer_busy_poll", "of NAPI"),
    ],
};

/// The prefix of a kind's entries, for the kinds that have lines of their own.
const PREFIXES: &[(u16, &str)] = &[
    (tags::EVENTFD, "eventfd: "),
    (tags::TIMERFD, "timerfd: "),
    (tags::SIGNALFD, "signalfd: "),
    (tags::EPOLL, "epoll: "),
    (tags::INOTIFY, "inotify: "),
    (tags::FANOTIFY, "fanotify: "),
    (tags::PIDFD, "pidfd: "),
    (tags::USERFAULTFD, "userfaultfd: "),
    (tags::BPF_MAP, "bpf map: "),
    (tags::UNIX, "unix socket: "),
    (tags::TTY, "terminal: "),
    (tags::TUN, "tun: "),
    (tags::IO_URING, "io_uring: "),
];

/// The access modes and status flags of a description.
#[rustfmt::skip]
pub static OPEN_FLAGS: List = List {
    title: "status flags of descriptions",
    source: "asm-generic/fcntl.h",
    entries: &[
        kept("O_RDONLY", "the access mode").at(0),
        kept("O_WRONLY", "the access mode").at(0o1),
        kept("O_RDWR", "the access mode").at(0o2),
        kept("O_ACCMODE", "the access mode (3: for ioctl(2) alone)").at(0o3),
        stateless("O_CREAT", "acts on opening; the kernel forgets it").at(0o100),
        kept("O_EXCL", "acts on opening; of pidfds PIDFD_THREAD").at(0o200),
        stateless("O_NOCTTY", "acts on opening").at(0o400),
        stateless("O_TRUNC", "acts on opening; of pidfds PIDFD_AUTOKILL").at(0o1000),
        kept("O_APPEND", "").at(0o2000),
        kept("O_NONBLOCK", "").at(0o4000),
        kept("O_DSYNC", "").at(0o10000),
        kept("O_ASYNC", "signals its owner").at(0o20000),
        kept("O_DIRECT", "direct I/O; of pipes packets").at(0o40000),
        kept("O_LARGEFILE", "").at(0o10_0000),
        kept("O_DIRECTORY", "").at(0o20_0000),
        kept("O_NOFOLLOW", "").at(0o40_0000),
        kept("O_NOATIME", "").at(0o100_0000),
        kept("O_CLOEXEC", "of the descriptor").at(0o200_0000),
        kept("__O_SYNC", "O_SYNC with O_DSYNC").at(0o400_0000),
        kept("O_PATH", "").at(0o1000_0000),
        kept("__O_TMPFILE", "a file that was made without a name").at(0o2000_0000),
    ],
};

/// The events of a watch of epoll(7).
#[rustfmt::skip]
pub static EPOLL_EVENTS: List = List {
    title: "events of epoll",
    source: "linux/eventpoll.h",
    entries: &[
        kept("EPOLLIN", "").at(0x1),
        kept("EPOLLPRI", "").at(0x2),
        kept("EPOLLOUT", "").at(0x4),
        kept("EPOLLERR", "").at(0x8),
        kept("EPOLLHUP", "").at(0x10),
        kept("EPOLLNVAL", "").at(0x20),
        kept("EPOLLRDNORM", "").at(0x40),
        kept("EPOLLRDBAND", "").at(0x80),
        kept("EPOLLWRNORM", "").at(0x100),
        kept("EPOLLWRBAND", "").at(0x200),
        kept("EPOLLMSG", "").at(0x400),
        stateless("EPOLLREMOVE", "of kernels before epoll(7) had its present form").at(0x1000),
        kept("EPOLLRDHUP", "").at(0x2000),
        stateless("EPOLL_URING_WAKE", "the kernel's own, in wake-ups").at(1 << 27),
        kept("EPOLLEXCLUSIVE", "").at(1 << 28),
        kept("EPOLLWAKEUP", "keeps the system awake").at(1 << 29),
        kept("EPOLLONESHOT", "one that has fired watches for errors and hang-ups").at(1 << 30),
        kept("EPOLLET", "").at(1 << 31),
    ],
};

/// The flags of timerfd_settime(2).
#[rustfmt::skip]
pub static TIMER_FLAGS: List = List {
    title: "flags of timerfds",
    source: "linux/timerfd.h",
    entries: &[
        kept("TFD_TIMER_ABSTIME", "").at(1),
        kept("TFD_TIMER_CANCEL_ON_SET", "").at(2),
    ],
};

/// The bits that inotify_add_watch(2) takes and events have.
#[rustfmt::skip]
pub static WATCH_FLAGS: List = List {
    title: "bits of inotify",
    source: "linux/inotify.h",
    entries: &[
        kept("IN_ACCESS", "").at(0x1),
        kept("IN_MODIFY", "").at(0x2),
        kept("IN_ATTRIB", "").at(0x4),
        kept("IN_CLOSE_WRITE", "").at(0x8),
        kept("IN_CLOSE_NOWRITE", "").at(0x10),
        kept("IN_OPEN", "").at(0x20),
        kept("IN_MOVED_FROM", "").at(0x40),
        kept("IN_MOVED_TO", "").at(0x80),
        kept("IN_CREATE", "").at(0x100),
        kept("IN_DELETE", "").at(0x200),
        kept("IN_DELETE_SELF", "").at(0x400),
        kept("IN_MOVE_SELF", "").at(0x800),
        stateless("IN_UNMOUNT", "told alone").at(0x2000),
        stateless("IN_Q_OVERFLOW", "told alone").at(0x4000),
        stateless("IN_IGNORED", "told alone").at(0x8000),
        stateless("IN_ONLYDIR", "acts when a watch is added").at(0x100_0000),
        stateless("IN_DONT_FOLLOW", "acts when a watch is added").at(0x200_0000),
        kept("IN_EXCL_UNLINK", "").at(0x400_0000),
        stateless("IN_MASK_CREATE", "acts when a watch is added").at(0x1000_0000),
        stateless("IN_MASK_ADD", "acts when a watch is added").at(0x2000_0000),
        stateless("IN_ISDIR", "told alone").at(0x4000_0000),
        kept("IN_ONESHOT", "").at(0x8000_0000),
    ],
};

/// The flags of fanotify_init(2) that are kept.
#[rustfmt::skip]
pub static GROUP_FLAGS: List = List {
    title: "flags of groups of fanotify",
    source: "linux/fanotify.h; others are refused by name",
    entries: &[
        kept("FAN_CLASS_NOTIF", "").at(0),
        kept("FAN_CLOEXEC", "").at(0x1),
        kept("FAN_NONBLOCK", "").at(0x2),
        refused("FAN_CLASS_CONTENT", "others wait for its answers").at(0x4),
        refused("FAN_CLASS_PRE_CONTENT", "others wait for its answers").at(0x8),
        kept("FAN_UNLIMITED_QUEUE", "").at(0x10),
        kept("FAN_UNLIMITED_MARKS", "").at(0x20),
        kept("FAN_ENABLE_AUDIT", "").at(0x40),
        kept("FAN_REPORT_PIDFD", "").at(0x80),
        kept("FAN_REPORT_TID", "").at(0x100),
        kept("FAN_REPORT_FID", "").at(0x200),
        kept("FAN_REPORT_DIR_FID", "").at(0x400),
        kept("FAN_REPORT_NAME", "").at(0x800),
        kept("FAN_REPORT_TARGET_FID", "").at(0x1000),
        kept("FAN_REPORT_FD_ERROR", "").at(0x2000),
    ],
};

/// True if the fdinfo of a description of the kind with this number may have `line`.
fn is_known(tag: u16, line: &str) -> bool {
    let name = line.split_once(':').map_or(line, |(name, _)| name).trim();
    if COMMON.find(name).is_some() {
        return true;
    }
    let mut prefixes = PREFIXES.iter().filter(|(of, _)| *of == tag);
    let Some((_, prefix)) = prefixes.next() else {
        return false;
    };
    let is_named = |entry: &Entry| entry.name.strip_prefix(prefix) == Some(name);
    COMMON.entries.iter().any(is_named) || tag == tags::IO_URING && is_of_ring(name)
}

/// True for a line in one of the lists of a ring; the dump looks at these where they matter.
fn is_of_ring(name: &str) -> bool {
    let begins = |start: &&str| name.starts_with(start);
    name.bytes().all(|byte| byte.is_ascii_digit())
        || ["op=", "user_data=", "napi"].iter().any(begins)
}

/// Refuses a description of which the kernel tells what is not known.
///
/// # Errors
/// [`Error::Unsupported`].
pub fn check(kind: &dyn ErasedKind, open: &Open<'_>) -> Result<()> {
    let refuse = |why: String| Err::<(), Error>(open.unsupported(&why, None));
    let mut lines = open
        .info
        .rest
        .lines()
        .filter(|line| !line.trim().is_empty());
    if let Some(line) = lines.find(|line| !is_known(kind.tag(), line)) {
        return refuse(format!("its fdinfo has the unknown line {:?}", line.trim()));
    }
    let unknown = u64::from(open.info.flags) & !OPEN_FLAGS.bits();
    if unknown != 0 {
        return refuse(format!("its status flags {unknown:#o} are not known"));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fd::testing::World;

    #[test]
    fn lines_belong_to_their_kinds() {
        assert!(is_known(tags::TIMERFD, "settime flags: 01"));
        assert!(is_known(tags::PIPE, "lock:\t1: FLOCK"));
        assert!(is_known(tags::EPOLL, "tfd:        5 events:       19"));
        assert!(is_known(tags::IO_URING, "    5: /dev/null"));
        assert!(is_known(tags::IO_URING, "  op=6, task_works=0"));
        for (tag, line) in [
            (tags::TIMERFD, "foo: 1"),
            (tags::PIPE, "settime flags: 01"),
            (tags::EVENTFD, "eventfd-colour: blue"),
            (tags::IO_URING, "Colour: blue"),
        ] {
            assert!(!is_known(tag, line), "{line}");
        }
    }

    #[test]
    fn kinds_with_lines_of_their_own_have_entries() {
        for (_, prefix) in PREFIXES {
            let mut names = COMMON.entries.iter().map(|entry| entry.name);
            assert!(names.any(|name| name.starts_with(prefix)), "{prefix}");
        }
        let named = COMMON
            .entries
            .iter()
            .filter_map(|entry| entry.name.split_once(": "));
        for (kind, _) in named {
            let mut prefixes = PREFIXES.iter();
            assert!(
                prefixes.any(|(_, prefix)| prefix.trim_end() == format!("{kind}:")),
                "{kind}"
            );
        }
    }

    #[test]
    fn unknown_lines_and_flags_are_refused_by_name() {
        let refused = |change: fn(&mut Open<'_>)| {
            let mut world = World::default();
            world.add(rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).unwrap());
            let error = world.dump_changed(change).expect_err("it is refused");
            error.to_string()
        };
        let error = refused(|open| open.info.rest.push_str("colour:\tblue\n"));
        let want = r#"its fdinfo has the unknown line "colour:\tblue""#;
        assert!(error.ends_with(want), "{error}");
        let error = refused(|open| open.info.flags |= 1 << 26);
        assert!(
            error.ends_with("its status flags 0o400000000 are not known"),
            "{error}"
        );
    }
}
