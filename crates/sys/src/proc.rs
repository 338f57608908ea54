//! Readers of the text in /proc/PID: strict about what they need, indifferent to the rest, and pure
//! (but for [`read`], which reads the text).
//!
//! Fields that a newer kernel adds are told by name ([`Status::unknown`]), fields that an older one
//! (or a zombie) does not have are `None` or as in a task that never used them. See proc(5) and the
//! pages it refers to.

use std::fs::File;
use std::io::{self, Read as _};

use crate::ledger;

/// A text that does not look as the kernel writes it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("/proc file {file}: {what}")]
pub struct Malformed {
    /// The file's name: "status".
    pub file: &'static str,
    /// What is wrong: "no field CapEff".
    pub what: String,
}

/// What this module's functions return.
pub type Result<T> = std::result::Result<T, Malformed>;

fn malformed(file: &'static str, what: impl Into<String>) -> Malformed {
    Malformed {
        file,
        what: what.into(),
    }
}

/// Reads a file of /proc whole: such a file has no size that tells how much room it needs.
///
/// # Errors
/// As open(2) and read(2).
pub fn read(path: &str) -> io::Result<Vec<u8>> {
    /// Most files fit in, so two calls read them.
    const ROOM_BYTES: usize = 4096;
    let mut bytes = Vec::with_capacity(ROOM_BYTES);
    // A file of its own would ask for its size first.
    File::open(path)?.take(u64::MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The capability sets of /proc/PID/status, bit N for capability N (capabilities(7)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capabilities {
    /// `CapInh`.
    pub inheritable: u64,
    /// `CapPrm`.
    pub permitted: u64,
    /// `CapEff`.
    pub effective: u64,
    /// `CapBnd`.
    pub bounding: u64,
    /// `CapAmb`.
    pub ambient: u64,
}

/// What /proc/PID/status says (proc_pid_status(5)). Signal masks have bit 0 for signal 1.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Status {
    /// The file creation mask; `None` for zombies.
    pub umask: Option<u32>,
    /// The state's letter: `b'S'`, `b'T'`, `b'Z'`, …
    pub state: u8,
    /// The process.
    pub tgid: i32,
    /// The thread.
    pub pid: i32,
    /// The parent process.
    pub ppid: i32,
    /// Who traces it; 0 for nobody.
    pub tracer: i32,
    /// Real, effective, saved and file system user id.
    pub uids: [u32; 4],
    /// Real, effective, saved and file system group id.
    pub gids: [u32; 4],
    /// The supplementary groups, ascending.
    pub groups: Vec<u32>,
    /// The thread's id in each pid namespace from the reader's inward.
    pub ns_tids: Vec<i32>,
    /// The number of threads.
    pub threads: u32,
    /// Signals queued for the task's user, and how many may be.
    pub queued: (u64, u64),
    /// Signals pending for the thread.
    pub pending: u64,
    /// Signals pending for the process.
    pub shared_pending: u64,
    /// Signals that the thread blocks.
    pub blocked: u64,
    /// Signals that the process ignores.
    pub ignored: u64,
    /// Signals that the process catches.
    pub caught: u64,
    /// The capability sets.
    pub capabilities: Capabilities,
    /// Whether execve(2) cannot grant privileges.
    pub no_new_privs: bool,
    /// The seccomp(2) mode: 0 none, 1 strict, 2 filter.
    pub seccomp: u32,
    /// Whether transparent huge pages may be used; `None` for zombies and kernels before 5.0.
    pub thp_enabled: Option<bool>,
    /// Address bits that the processor does not ignore (linear address masking); all ones if none.
    pub untag_mask: u64,
    /// Shadow-stack features in use ("shstk wrss"); empty for none.
    pub thread_features: String,
    /// Shadow-stack features whose use is decided for good; empty for none.
    pub locked_features: String,
    /// How speculative store bypass is treated, in the kernel's words; empty if not said.
    pub store_bypass: String,
    /// How indirect branch speculation is treated, in the kernel's words; empty if not said.
    pub indirect_branch: String,
    /// The processors that the thread may run on: bit N of word N / 64, no trailing zero words.
    pub cpus: Vec<u64>,
    /// The memory nodes that the thread may use, as a list ("0-1").
    pub memory_nodes: String,
    /// The name of the first field that is not known ([`ledger::STATUS`]).
    pub unknown: Option<String>,
}

impl Status {
    /// Reads the text of /proc/PID/status.
    ///
    /// # Errors
    /// When a field that every kernel since 4.10 writes is missing or is no number.
    pub fn parse(text: &[u8]) -> Result<Self> {
        let mut status = Self {
            untag_mask: u64::MAX,
            ..Self::default()
        };
        let mut needed = 0;
        for line in text.split(|byte| *byte == b'\n') {
            let Some(colon) = line.iter().position(|byte| *byte == b':') else {
                continue;
            };
            // Only a task's name can be anything but ASCII, and that field is not read.
            let Ok(value) = std::str::from_utf8(&line[colon + 1..]) else {
                continue;
            };
            let known = status.take(&line[..colon], value.trim());
            if known == Some(0) && !ledger::is_line_of_status(&line[..colon]) {
                let name = || String::from_utf8_lossy(&line[..colon]).into_owned();
                status.unknown.get_or_insert_with(name);
            }
            needed += known.ok_or_else(|| {
                let key = String::from_utf8_lossy(&line[..colon]);
                malformed("status", format!("field {key} is {:?}", value.trim()))
            })?;
        }
        if needed == NEEDED {
            Ok(status)
        } else {
            let what = format!("{needed} of {NEEDED} fields that are needed");
            Err(malformed("status", what))
        }
    }

    /// Takes a field over: 1 when it is one that must be there, 0 when not, `None` when it does
    /// not make sense.
    fn take(&mut self, key: &[u8], value: &str) -> Option<u32> {
        match key {
            b"State" => self.state = *value.as_bytes().first()?,
            b"Tgid" => self.tgid = value.parse().ok()?,
            b"Pid" => self.pid = value.parse().ok()?,
            b"PPid" => self.ppid = value.parse().ok()?,
            b"TracerPid" => self.tracer = value.parse().ok()?,
            b"Uid" => self.uids = four(value)?,
            b"Gid" => self.gids = four(value)?,
            b"Groups" => self.groups = numbers(value)?,
            b"Threads" => self.threads = value.parse().ok()?,
            b"SigQ" => {
                let (queued, limit) = value.split_once('/')?;
                self.queued = (queued.parse().ok()?, limit.parse().ok()?);
            }
            b"SigPnd" => self.pending = hex(value)?,
            b"ShdPnd" => self.shared_pending = hex(value)?,
            b"SigBlk" => self.blocked = hex(value)?,
            b"SigIgn" => self.ignored = hex(value)?,
            b"SigCgt" => self.caught = hex(value)?,
            b"CapInh" => self.capabilities.inheritable = hex(value)?,
            b"CapPrm" => self.capabilities.permitted = hex(value)?,
            b"CapEff" => self.capabilities.effective = hex(value)?,
            b"CapBnd" => self.capabilities.bounding = hex(value)?,
            b"CapAmb" => self.capabilities.ambient = hex(value)?,
            b"NoNewPrivs" => self.no_new_privs = value != "0",
            b"Cpus_allowed" => self.cpus = words(value)?,
            _ => return self.take_optional(key, value),
        }
        Some(1)
    }

    fn take_optional(&mut self, key: &[u8], value: &str) -> Option<u32> {
        match key {
            b"Umask" => self.umask = Some(u32::from_str_radix(value, 8).ok()?),
            b"NSpid" => self.ns_tids = numbers(value)?,
            b"Seccomp" => self.seccomp = value.parse().ok()?,
            b"THP_enabled" => self.thp_enabled = Some(value != "0"),
            b"untag_mask" => self.untag_mask = hex(value.strip_prefix("0x")?)?,
            b"x86_Thread_features" => self.thread_features = value.to_owned(),
            b"x86_Thread_features_locked" => self.locked_features = value.to_owned(),
            b"Speculation_Store_Bypass" => self.store_bypass = value.to_owned(),
            b"SpeculationIndirectBranch" => self.indirect_branch = value.to_owned(),
            b"Mems_allowed_list" => self.memory_nodes = value.to_owned(),
            _ => {}
        }
        Some(0)
    }
}

/// How many fields [`Status::take`] takes itself.
const NEEDED: u32 = 22;

fn hex(text: &str) -> Option<u64> {
    u64::from_str_radix(text, 16).ok()
}

fn numbers<T: std::str::FromStr>(text: &str) -> Option<Vec<T>> {
    let all = text.split_ascii_whitespace();
    all.map(|number| number.parse().ok()).collect()
}

fn four(text: &str) -> Option<[u32; 4]> {
    numbers(text)?.try_into().ok()
}

/// A bitmap as the kernel prints it: 32-bit words in hexadecimal, the highest first.
fn words(text: &str) -> Option<Vec<u64>> {
    let halves: Option<Vec<u64>> = text.rsplit(',').map(hex).collect();
    let pairs = halves?;
    let pairs = pairs.chunks(2);
    let mut all: Vec<u64> = pairs
        .map(|pair| pair[0] | pair.get(1).map_or(0, |high| high << 32))
        .collect();
    while all.last() == Some(&0) {
        all.pop();
    }
    Some(all)
}

/// What /proc/PID/stat says (proc_pid_stat(5)).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// The thread.
    pub pid: i32,
    /// The name, at most 15 bytes of anything but NUL.
    pub comm: Vec<u8>,
    /// The state's letter.
    pub state: u8,
    /// The parent process.
    pub ppid: i32,
    /// The process group.
    pub pgrp: i32,
    /// The session.
    pub session: i32,
    /// The controlling terminal's device number; 0 for none.
    pub tty: i32,
    /// The foreground process group of that terminal; -1 for none.
    pub tty_pgrp: i32,
    /// The kernel's `PF_` flags.
    pub flags: u32,
    /// The priority in use: 20 and the nice value of a fair thread, below 0 of a real-time one.
    pub priority: i32,
    /// The nice value.
    pub nice: i32,
    /// The number of threads.
    pub threads: u32,
    /// When it started, in clock ticks after boot.
    pub start_ticks: u64,
    /// Where the code begins and ends.
    pub code: (u64, u64),
    /// Where the stack begins.
    pub stack: u64,
    /// The signal that the parent gets at its end.
    pub exit_signal: i32,
    /// The processor that it ran on last.
    pub processor: u32,
    /// The real-time priority; 0 for other policies.
    pub rt_priority: u32,
    /// The scheduling policy.
    pub policy: u32,
    /// Where initialised and uninitialised data begins and ends.
    pub data: (u64, u64),
    /// Where the heap begins.
    pub brk: u64,
    /// Where the arguments begin and end.
    pub args: (u64, u64),
    /// Where the environment begins and ends.
    pub env: (u64, u64),
    /// The wait status of a zombie.
    pub exit_code: i32,
}

impl Stat {
    /// Reads the text of /proc/PID/stat.
    ///
    /// # Errors
    /// When there are fewer than 52 fields or one of them is no number.
    pub fn parse(text: &[u8]) -> Result<Self> {
        let wrong = || malformed("stat", String::from_utf8_lossy(text));
        // The name may hold spaces and parentheses: what follows the last one holds neither.
        let open = text.iter().position(|byte| *byte == b'(');
        let close = text.iter().rposition(|byte| *byte == b')');
        let (Some(open), Some(close)) = (open, close) else {
            return Err(wrong());
        };
        let pid = std::str::from_utf8(&text[..open]).ok();
        let rest = std::str::from_utf8(text.get(close + 1..).ok_or_else(wrong)?).ok();
        let rest = rest.map(|rest| rest.split_ascii_whitespace().collect::<Vec<_>>());
        let stat = pid.zip(rest).and_then(|(pid, rest)| {
            let pid = pid.trim().parse().ok()?;
            Self::fields(pid, text.get(open + 1..close)?.to_vec(), &rest)
        });
        stat.ok_or_else(wrong)
    }

    /// `rest` begins with field 3, the state.
    fn fields(pid: i32, comm: Vec<u8>, rest: &[&str]) -> Option<Self> {
        fn at<T: std::str::FromStr>(rest: &[&str], field: usize) -> Option<T> {
            rest.get(field - 3)?.parse().ok()
        }
        Some(Self {
            pid,
            comm,
            state: *rest.first()?.as_bytes().first()?,
            ppid: at(rest, 4)?,
            pgrp: at(rest, 5)?,
            session: at(rest, 6)?,
            tty: at(rest, 7)?,
            tty_pgrp: at(rest, 8)?,
            flags: at(rest, 9)?,
            priority: at(rest, 18)?,
            nice: at(rest, 19)?,
            threads: at(rest, 20)?,
            start_ticks: at(rest, 22)?,
            code: (at(rest, 26)?, at(rest, 27)?),
            stack: at(rest, 28)?,
            exit_signal: at(rest, 38)?,
            processor: at(rest, 39)?,
            rt_priority: at(rest, 40)?,
            policy: at(rest, 41)?,
            data: (at(rest, 45)?, at(rest, 46)?),
            brk: at(rest, 47)?,
            args: (at(rest, 48)?, at(rest, 49)?),
            env: (at(rest, 50)?, at(rest, 51)?),
            exit_code: at(rest, 52)?,
        })
    }
}

/// A resource limit: soft and hard; `u64::MAX` for unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limit {
    /// What is enforced.
    pub soft: u64,
    /// Up to where the soft limit may be raised.
    pub hard: u64,
}

/// How many resource limits Linux has.
pub const LIMITS: usize = 16;

/// Reads the text of /proc/PID/limits: the limits by number (`RLIMIT_CPU` is 0).
///
/// # Errors
/// When one is missing, is no number or is not known ([`ledger::LIMITS`]).
pub fn limits(text: &[u8]) -> Result<[Limit; LIMITS]> {
    let text = std::str::from_utf8(text).map_err(|_| malformed("limits", "not UTF-8"))?;
    let mut all = [None; LIMITS];
    let name = |number: usize| ledger::LIMITS.entries[number].name;
    // The first line is the table's head.
    let lines = text.lines().filter(|line| !line.is_empty());
    for line in lines.filter(|line| !line.starts_with("Limit ")) {
        let Some(number) = (0..LIMITS).find(|number| line.starts_with(name(*number))) else {
            return Err(malformed("limits", format!("the unknown line {line:?}")));
        };
        let mut values = line[name(number).len()..].split_ascii_whitespace();
        let mut value = || match values.next()? {
            "unlimited" => Some(u64::MAX),
            value => value.parse().ok(),
        };
        all[number] = value().and_then(|soft| {
            Some(Limit {
                soft,
                hard: value()?,
            })
        });
    }
    let mut limits = [Limit { soft: 0, hard: 0 }; LIMITS];
    for (number, limit) in all.into_iter().enumerate() {
        let wrong = || malformed("limits", format!("no {:?}", name(number)));
        limits[number] = limit.ok_or_else(wrong)?;
    }
    Ok(limits)
}

/// Whom a POSIX timer tells that it expired (sigevent(3)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Notify {
    /// Nobody.
    Nobody,
    /// The process, by a signal.
    Process,
    /// A thread, by a signal.
    Thread(i32),
}

/// A POSIX timer of /proc/PID/timers (timer_create(2)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timer {
    /// Its id.
    pub id: i32,
    /// The signal that it sends.
    pub signal: i32,
    /// The value that goes with the signal.
    pub value: u64,
    /// Who is told.
    pub notify: Notify,
    /// Its clock.
    pub clock: i32,
}

/// Reads the text of /proc/PID/timers.
///
/// # Errors
/// When a timer is not described as kernels since 3.10 do.
pub fn timers(text: &[u8]) -> Result<Vec<Timer>> {
    let text = std::str::from_utf8(text).map_err(|_| malformed("timers", "not UTF-8"))?;
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let mut timers = Vec::new();
    while let Some(first) = lines.next() {
        let mut four = [first, "", "", ""];
        for line in &mut four[1..] {
            *line = lines.next().unwrap_or_default();
        }
        timers.push(timer(four).ok_or_else(|| malformed("timers", four.join(", ")))?);
    }
    Ok(timers)
}

fn timer([id, signal, notify, clock]: [&str; 4]) -> Option<Timer> {
    let (signal, value) = signal.strip_prefix("signal:")?.trim().split_once('/')?;
    let (kind, whom) = notify.strip_prefix("notify:")?.trim().split_once('/')?;
    let (whom, number) = whom.split_once('.')?;
    let notify = match (kind, whom) {
        ("none", _) => Notify::Nobody,
        ("signal", "pid") => Notify::Process,
        ("signal", "tid") => Notify::Thread(number.parse().ok()?),
        _ => return None,
    };
    Some(Timer {
        id: id.strip_prefix("ID:")?.trim().parse().ok()?,
        signal: signal.parse().ok()?,
        // An address: "(null)", or hexadecimal with or without 0x.
        value: match value {
            "(null)" => 0,
            value => hex(value.strip_prefix("0x").unwrap_or(value))?,
        },
        notify,
        clock: clock.strip_prefix("ClockID:")?.trim().parse().ok()?,
    })
}

/// The system call that a thread is in, of /proc/PID/syscall (proc_pid_syscall(5)).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syscall {
    /// It runs, or would if a processor were free.
    Running,
    /// It waits for something that is no system call: a page, a stop.
    Elsewhere,
    /// It waits in a system call.
    In {
        /// The call's number.
        number: u64,
        /// Its arguments.
        args: [u64; 6],
        /// The thread's stack pointer.
        stack: u64,
    },
}

impl Syscall {
    /// Reads the text of /proc/PID/syscall.
    ///
    /// # Errors
    /// When it is neither "running" nor numbers.
    pub fn parse(text: &[u8]) -> Result<Self> {
        let text = String::from_utf8_lossy(text);
        let mut fields = text.split_ascii_whitespace();
        let wrong = || malformed("syscall", text.trim_end());
        match fields.next() {
            Some("running") => return Ok(Self::Running),
            Some("-1") => return Ok(Self::Elsewhere),
            _ => {}
        }
        let number = text.split_ascii_whitespace().next();
        let number = number.and_then(|number| number.parse().ok());
        let args: Option<Vec<u64>> = fields
            .take(7)
            .map(|arg| hex(arg.strip_prefix("0x")?))
            .collect();
        let words = args.and_then(|words| <[u64; 7]>::try_from(words).ok());
        match number.zip(words) {
            Some((number, [args @ .., stack])) => Ok(Self::In {
                number,
                args,
                stack,
            }),
            None => Err(wrong()),
        }
    }
}

/// When the thread last began to run or stopped running, of /proc/PID/sched (`se.exec_start`), in
/// nanoseconds of the scheduler's clock; `None` where the kernel does not tell.
#[must_use]
pub fn exec_start_ns(sched: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(sched).ok()?;
    let line = text.lines().find(|line| line.starts_with("se.exec_start"));
    let (ms, ns) = line?.split_once(':')?.1.trim().split_once('.')?;
    // Milliseconds, and six more digits.
    let (ms, ns): (u64, u64) = (ms.parse().ok()?, ns.parse().ok()?);
    ms.checked_mul(1_000_000)?.checked_add(ns)
}

/// How often the thread gave up the processor to wait, of /proc/PID/sched; `None` where the kernel
/// does not tell.
#[must_use]
pub fn waits_begun(sched: &[u8]) -> Option<u64> {
    let text = std::str::from_utf8(sched).ok()?;
    let mut lines = text.lines();
    let line = lines.find(|line| line.starts_with("nr_voluntary_switches"));
    line?.split_once(':')?.1.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const STATUS: &str = "Name:\ta: b (c\nUmask:\t0022\nState:\tS (sleeping)\nTgid:\t100\n\
        Ngid:\t0\nPid:\t101\nPPid:\t99\nTracerPid:\t7\nUid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\n\
        FDSize:\t256\nGroups:\t4 27 1000 \nNStgid:\t100\nNSpid:\t101\t5\nNSpgid:\t100\n\
        VmPeak:\t    3060 kB\nCoreDumping:\t0\nTHP_enabled:\t1\n\
        untag_mask:\t0xffffffffffffffff\nThreads:\t2\nSigQ:\t1/96365\n\
        SigPnd:\t0000000000000001\nShdPnd:\t0000000000000002\nSigBlk:\t0000000000000004\n\
        SigIgn:\t0000000000001000\nSigCgt:\t0000000180004002\nCapInh:\t0000000000000000\n\
        CapPrm:\t000001fffeffffff\nCapEff:\t000001fffeffffff\nCapBnd:\t000001fffeffffff\n\
        CapAmb:\t0000000000000000\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t1\n\
        Speculation_Store_Bypass:\tthread vulnerable\n\
        SpeculationIndirectBranch:\tconditional enabled\nx86_Thread_features:\tshstk wrss \n\
        Cpus_allowed:\t1,00000000,80000003\nCpus_allowed_list:\t0-1,31,64\n\
        Mems_allowed:\t00000000,00000001\nMems_allowed_list:\t0\n\
        A_field_of_tomorrow:\twhat ever\nvoluntary_ctxt_switches:\t0\n";

    #[test]
    fn status_is_read_field_by_field() {
        let status = Status::parse(STATUS.as_bytes()).expect("it is well formed");
        assert_eq!(status.umask, Some(0o022));
        assert_eq!((status.state, status.tgid, status.pid), (b'S', 100, 101));
        assert_eq!((status.ppid, status.tracer), (99, 7));
        assert_eq!(status.uids, [1, 2, 3, 4]);
        assert_eq!(status.gids, [5, 6, 7, 8]);
        assert_eq!(status.groups, [4, 27, 1000]);
        assert_eq!(status.ns_tids, [101, 5]);
        assert_eq!((status.threads, status.queued), (2, (1, 96365)));
        assert_eq!((status.pending, status.shared_pending), (1, 2));
        assert_eq!((status.blocked, status.ignored), (4, 0x1000));
        assert_eq!(status.caught, 0x1_8000_4002);
        assert_eq!(status.capabilities.effective, 0x1ff_feff_ffff);
        assert_eq!(status.capabilities.ambient, 0);
        assert!(status.no_new_privs);
        assert_eq!(status.seccomp, 2);
        assert_eq!(status.thp_enabled, Some(true));
        assert_eq!(status.untag_mask, u64::MAX);
        assert_eq!(status.thread_features, "shstk wrss");
        assert_eq!(status.store_bypass, "thread vulnerable");
        assert_eq!(status.indirect_branch, "conditional enabled");
        assert_eq!(status.cpus, [0x8000_0003, 1]);
        assert_eq!(status.memory_nodes, "0");
    }

    #[test]
    fn a_zombies_status_has_no_umask() {
        let lines = STATUS.lines().filter(|line| !line.starts_with("Umask"));
        let text = lines.map(|line| format!("{line}\n")).collect::<String>();
        assert_eq!(Status::parse(text.as_bytes()).expect("enough").umask, None);
    }

    #[test]
    fn a_status_without_a_needed_field_is_refused() {
        for key in ["CapEff", "SigCgt", "Uid", "Cpus_allowed", "NoNewPrivs"] {
            let lines = STATUS.lines();
            let lines = lines.filter(|line| line.split(':').next() != Some(key));
            let text = lines.map(|line| format!("{line}\n")).collect::<String>();
            Status::parse(text.as_bytes()).expect_err(key);
        }
        let wrong = STATUS.replace("Uid:\t1\t2", "Uid:\tx\t2");
        let error = Status::parse(wrong.as_bytes()).expect_err("x is no id");
        assert_eq!(
            error.to_string(),
            r#"/proc file status: field Uid is "x\t2\t3\t4""#
        );
    }

    #[test]
    fn our_own_status_stat_and_limits_are_read() {
        let pid = std::process::id().cast_signed();
        let read = |name: &str| std::fs::read(format!("/proc/self/{name}")).expect(name);
        let status = Status::parse(&read("status")).expect("status");
        assert_eq!(status.tgid, pid);
        let stat = Stat::parse(&read("stat")).expect("stat");
        assert_eq!((stat.pid, stat.ppid), (pid, status.ppid));
        let limits = limits(&read("limits")).expect("limits");
        let files = rustix::process::getrlimit(rustix::process::Resource::Nofile);
        assert_eq!(limits[7].soft, files.current.unwrap_or(u64::MAX));
        assert_eq!(limits[7].hard, files.maximum.unwrap_or(u64::MAX));
        assert_eq!(timers(&read("timers")).expect("timers"), []);
        assert!(Syscall::parse(&read("syscall")).is_ok());
    }

    #[test]
    fn names_with_spaces_and_parentheses_do_not_confuse_stat() {
        let text =
            b"30284 (a) b (c) S 30263 30262 29685 34816 -1 4194304 84 0 0 0 0 0 0 0 39 19 1 \
            0 253407 2400256 347 18446744073709551615 94737572622336 94737572623565 \
            140733779388720 0 0 0 65536 6 0 1 0 0 17 1 40 1 0 0 0 94737572634064 94737572634712 \
            94737816567808 140733779397326 140733779397338 140733779397339 140733779398636 9 77\n";
        let stat = Stat::parse(text).expect("it is well formed");
        assert_eq!(stat.comm, b"a) b (c");
        assert_eq!((stat.pid, stat.state, stat.ppid), (30284, b'S', 30263));
        assert_eq!((stat.pgrp, stat.session, stat.tty), (30262, 29685, 34816));
        assert_eq!((stat.tty_pgrp, stat.flags, stat.nice), (-1, 4_194_304, 19));
        assert_eq!((stat.threads, stat.start_ticks), (1, 253_407));
        assert_eq!(stat.code, (94_737_572_622_336, 94_737_572_623_565));
        assert_eq!(stat.stack, 140_733_779_388_720);
        assert_eq!((stat.exit_signal, stat.processor), (17, 1));
        assert_eq!((stat.rt_priority, stat.policy), (40, 1));
        assert_eq!(stat.data, (94_737_572_634_064, 94_737_572_634_712));
        assert_eq!(stat.brk, 94_737_816_567_808);
        assert_eq!(stat.args, (140_733_779_397_326, 140_733_779_397_338));
        assert_eq!(stat.env, (140_733_779_397_339, 140_733_779_398_636));
        assert_eq!(stat.exit_code, 9);
        Stat::parse(&text[..100]).expect_err("half a text");
        Stat::parse(b"1 )( S 1").expect_err("no name");
    }

    #[test]
    fn limits_are_read_by_name_and_unknown_ones_refused() {
        let mut text = String::from("Limit                     Soft Limit           Hard Limit\n");
        for (number, entry) in ledger::LIMITS.entries.iter().enumerate().rev() {
            let name = entry.name;
            let unlimited = if number == 3 { "unlimited" } else { "99" };
            text.push_str(&format!(
                "{name:<26}{number:<21}{unlimited:<21}bytes     \n"
            ));
        }
        let limits = limits(text.as_bytes()).expect("it is well formed");
        assert_eq!(limits[7], Limit { soft: 7, hard: 99 });
        let stack = Limit {
            soft: 3,
            hard: u64::MAX,
        };
        assert_eq!(limits[3], stack);
        let told = |text: String| {
            let error = super::limits(text.as_bytes()).expect_err("refused");
            error.to_string()
        };
        let line = text
            .lines()
            .find(|line| line.starts_with("Max locked memory"));
        let fewer = text.replace(line.expect("it is there"), "");
        assert_eq!(told(fewer), r#"/proc file limits: no "Max locked memory""#);
        let more = text + "Max something of tomorrow 1   2   bytes\n";
        let want =
            r#"/proc file limits: the unknown line "Max something of tomorrow 1   2   bytes""#;
        assert_eq!(told(more), want);
    }

    #[test]
    fn timers_of_each_kind_are_read() {
        let text = b"ID: 7\nsignal: 41/0000deadbeef1234\nnotify: signal/pid.30284\nClockID: 11\n\
            ID: 4\nsignal: 38/00007fff86e452a8\nnotify: signal/tid.30285\nClockID: -2\n\
            ID: 1\nsignal: 0/(null)\nnotify: none/pid.30284\nClockID: 1\n";
        let want = [
            (7, 41, 0xdead_beef_1234, Notify::Process, 11),
            (4, 38, 0x7fff_86e4_52a8, Notify::Thread(30285), -2),
            (1, 0, 0, Notify::Nobody, 1),
        ];
        let want = want.map(|(id, signal, value, notify, clock)| Timer {
            id,
            signal,
            value,
            notify,
            clock,
        });
        assert_eq!(timers(text).expect("it is well formed"), want);
        assert_eq!(timers(b"").expect("none"), []);
        timers(b"ID: 1\nsignal: 1/0\nnotify: owl/pid.1\nClockID: 1\n").expect_err("an owl");
        timers(b"ID: 1\nsignal: 1/0\n").expect_err("half a timer");
    }

    #[test]
    fn system_calls_are_read() {
        let text = b"230 0x0 0x1 0x7ffc9b8ba260 0x7ffc9b8ba2a0 0x4 0x5 0x7ffc9b8ba248 0x7fa15b6c\n";
        let args = [0, 1, 0x7ffc_9b8b_a260, 0x7ffc_9b8b_a2a0, 4, 5];
        let want = Syscall::In {
            number: 230,
            args,
            stack: 0x7ffc_9b8b_a248,
        };
        assert_eq!(Syscall::parse(text), Ok(want));
        assert_eq!(Syscall::parse(b"running\n"), Ok(Syscall::Running));
        assert_eq!(Syscall::parse(b"-1 0x7f 0x5\n"), Ok(Syscall::Elsewhere));
        Syscall::parse(b"230 0x0\n").expect_err("too few arguments");
        Syscall::parse(b"").expect_err("nothing");
    }

    #[test]
    fn the_schedulers_clock_is_read_in_nanoseconds() {
        let text = b"cat (30801, #threads: 1)\n-------\n\
            se.exec_start                                :       1685156.646994\n\
            se.vruntime                                  :           189.775039\n\
            nr_voluntary_switches                        :                   17\n";
        assert_eq!(waits_begun(text), Some(17));
        assert_eq!(exec_start_ns(text), Some(1_685_156_646_994));
        assert_eq!(exec_start_ns(b"cat (1, #threads: 1)\n"), None);
    }
}
