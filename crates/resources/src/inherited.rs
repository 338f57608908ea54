//! What a restored task starts with: the attributes that it inherits from the restorer.

use linux_raw_sys::prctl::PR_MCE_KILL_DEFAULT;
use rustix::fs::{Mode, OFlags};
use sys::close::CloseQueue;
use sys::own::{self, Attribute};
use sys::proc::{self, LIMITS, Limit, Status};

use crate::task::{core_filter, credentials, keyrings, login_uid, sandbox, scheduling};
use crate::{Error, Result};

/// The state of a task before its script has made a call. Parts plan calls only for what differs.
#[derive(Clone, Debug)]
pub struct Inherited {
    pub(crate) credentials: credentials::Record,
    pub(crate) no_new_privs: bool,
    /// Whether it has seccomp filters, which nobody can take off.
    pub(crate) is_filtered: bool,
    /// Its file mode creation mask, where that is known.
    pub(crate) umask: Option<u32>,
    /// Signals that stay ignored in a new process; caught ones get their default action.
    pub(crate) ignored: u64,
    pub(crate) limits: [Limit; LIMITS],
    pub(crate) scheduling: scheduling::Record,
    pub(crate) personality: u32,
    pub(crate) oom_score_adj: i32,
    /// As whom it was logged in; `None` where the kernel does not keep that in mind.
    pub(crate) login_uid: Option<u32>,
    /// Which mappings a core dump has; `None` where the kernel makes none.
    pub(crate) core_filter: Option<u32>,
    /// Whether there is a memory policy other than the default one.
    pub(crate) memory_policy: bool,
    pub(crate) thp_disable: u64,
    pub(crate) mdwe: u64,
    pub(crate) memory_merge: u64,
    pub(crate) machine_check: u64,
    /// The kernel creates timers with wanted ids (Linux 6.15).
    pub(crate) timer_ids: OnNeed<bool>,
    /// The length of a timer tick of this kernel, in microseconds.
    pub(crate) tick_us: OnNeed<u64>,
    /// What `dumpable` becomes when a task changes its credentials.
    pub(crate) suid_dumpable: OnNeed<u32>,
    /// Whether it may be traced and leaves core dumps (`PR_GET_DUMPABLE`).
    pub(crate) dumpable: u64,
    /// The label that a security module has given it; none where it is not looked at.
    pub(crate) label: Option<Vec<u8>>,
    /// Its session keyring.
    session: OnNeed<keyrings::Session>,
    /// True if it has no session keyring at all, not even its user's.
    pub(crate) session_is_unset: OnNeed<bool>,
}

/// A fact that few tasks need: asked when it is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum OnNeed<T> {
    /// It is this.
    Known(T),
    /// This finds out.
    Ask(fn() -> T),
}

impl<T: Copy> OnNeed<T> {
    pub fn get(self) -> T {
        match self {
            Self::Known(value) => value,
            Self::Ask(ask) => ask(),
        }
    }
}

impl Inherited {
    /// Whether these are the user and group ids, as /proc/PID/status has them.
    #[must_use]
    pub fn has_ids(&self, uids: &[u32], gids: &[u32], groups: &[u32]) -> bool {
        let own = &self.credentials;
        (uids, gids, groups) == (&own.uids[..], &own.gids[..], &own.groups[..])
    }

    /// Whether it has seccomp filters of the restorer's, whatever it had at the dump.
    #[must_use]
    pub fn is_filtered(&self) -> bool {
        self.is_filtered
    }

    /// Its session keyring.
    #[must_use]
    pub fn session(&self) -> keyrings::Session {
        self.session.get()
    }

    /// Gives it this session keyring.
    pub fn set_session(&mut self, session: keyrings::Session) {
        self.session = OnNeed::Known(session);
    }

    /// Has `ask` tell whether there is no session keyring at all, where that has to be known.
    pub fn ask_for_session(&mut self, ask: fn() -> bool) {
        self.session_is_unset = OnNeed::Ask(ask);
    }

    /// How many descriptors a task may have when it is forked (`RLIMIT_NOFILE`).
    #[must_use]
    pub fn open_files(&self) -> u64 {
        const RLIMIT_NOFILE: usize = libc::RLIMIT_NOFILE as usize;
        self.limits[RLIMIT_NOFILE].soft
    }

    /// What children of a root that lacks nothing start with on this kernel.
    #[must_use]
    pub fn of_kernel() -> Self {
        Self {
            timer_ids: OnNeed::Ask(timer_ids),
            tick_us: OnNeed::Ask(tick_us),
            suid_dumpable: OnNeed::Ask(suid_dumpable),
            ..Self::default()
        }
    }

    /// What children of the calling thread will start with.
    ///
    /// # Errors
    /// [`Error::Kernel`] when /proc cannot be read.
    pub fn read() -> Result<Self> {
        let close_queue = CloseQueue::default();
        let text = |name| text(name, &close_queue);
        let status = Status::parse(&text("thread-self/status")?).map_err(unclear)?;
        let limits = proc::limits(&text("self/limits")?).map_err(unclear)?;
        let securebits = own::attribute(Attribute::Securebits);
        let securebits = securebits.map_err(|e| Error::kernel("PR_GET_SECUREBITS", e))?;
        // An attribute that the kernel does not know is as if never set.
        let attribute = |which| own::attribute(which).unwrap_or(0);
        Ok(Self {
            credentials: credentials::Record::new(&status, securebits),
            no_new_privs: status.no_new_privs,
            is_filtered: status.seccomp != 0,
            umask: status.umask,
            ignored: status.ignored,
            limits,
            scheduling: scheduling::Record::own(&status)?,
            personality: own::personality(),
            oom_score_adj: number("self/oom_score_adj", &close_queue)?,
            login_uid: text("self/loginuid")
                .ok()
                .and_then(|text| login_uid::parse(&text)),
            core_filter: text("self/coredump_filter")
                .ok()
                .and_then(|text| core_filter::parse(&text)),
            memory_policy: own::has_memory_policy(),
            thp_disable: attribute(Attribute::ThpDisable),
            mdwe: attribute(Attribute::Mdwe),
            memory_merge: attribute(Attribute::MemoryMerge),
            machine_check: own::attribute(Attribute::MachineCheck)
                .unwrap_or(PR_MCE_KILL_DEFAULT.into()),
            timer_ids: OnNeed::Ask(timer_ids),
            tick_us: OnNeed::Ask(tick_us),
            dumpable: attribute(Attribute::Dumpable),
            suid_dumpable: OnNeed::Ask(suid_dumpable),
            label: sandbox::own_label().map(<[u8]>::to_vec),
            session: OnNeed::Ask(keyrings::own_session),
            session_is_unset: OnNeed::Ask(keyrings::own_is_unset),
        })
    }
}

impl Inherited {
    /// What the children of a restored task start with: the first thing that it does is to
    /// give ignored signals their default actions.
    #[must_use]
    pub fn of_descendants(&self) -> Self {
        Self {
            ignored: 0,
            ..self.clone()
        }
    }
}

/// An ordinary root process that ignores `SIGPIPE`, as Rust programs do: for plans that are only
/// looked at.
impl Default for Inherited {
    fn default() -> Self {
        Self {
            credentials: credentials::Record::root(),
            no_new_privs: false,
            is_filtered: false,
            umask: None,
            ignored: 1 << 12,
            limits: [Limit {
                soft: u64::MAX,
                hard: u64::MAX,
            }; LIMITS],
            scheduling: scheduling::Record {
                cpus: vec![1],
                ..Default::default()
            },
            personality: 0,
            oom_score_adj: 0,
            login_uid: Some(u32::MAX),
            // MMF_DUMP_FILTER_DEFAULT
            core_filter: Some(0x33),
            memory_policy: false,
            thp_disable: 0,
            mdwe: 0,
            memory_merge: 0,
            machine_check: PR_MCE_KILL_DEFAULT.into(),
            timer_ids: OnNeed::Known(true),
            tick_us: OnNeed::Known(4000),
            suid_dumpable: OnNeed::Known(0),
            dumpable: 1,
            label: None,
            session: OnNeed::Known(keyrings::Session::Default),
            session_is_unset: OnNeed::Known(true),
        }
    }
}

fn timer_ids() -> bool {
    own::attribute(Attribute::TimerIds).is_ok()
}

fn suid_dumpable() -> u32 {
    number("sys/fs/suid_dumpable", &CloseQueue::default()).unwrap_or(0)
}

/// The resolution of coarse clocks.
fn tick_us() -> u64 {
    let tick = rustix::time::clock_getres(rustix::time::ClockId::RealtimeCoarse);
    u64::try_from(tick.tv_nsec).expect("a tick is not negative") / 1000
}

/// A small file of the procfs, which comes in one piece; `close_queue` closes it.
fn text(name: &str, close_queue: &CloseQueue) -> Result<Vec<u8>> {
    let path = sys::procfs::path(name);
    let failed = |e: rustix::io::Errno| Error::kernel(format!("reading {path}"), e);
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file = rustix::fs::open(&path, flags, Mode::empty()).map_err(failed)?;
    let mut bytes = vec![0; 8192];
    let len = rustix::io::read(&file, &mut bytes).map_err(failed)?;
    bytes.truncate(len);
    close_queue.push(file);
    Ok(bytes)
}

fn number<T: std::str::FromStr>(name: &str, close_queue: &CloseQueue) -> Result<T> {
    let text = text(name, close_queue)?;
    let number = std::str::from_utf8(&text).ok();
    let number = number.and_then(|text| text.trim().parse().ok());
    let wrong = || std::io::Error::from(std::io::ErrorKind::InvalidData);
    number.ok_or_else(|| Error::kernel(format!("reading /proc/{name}"), wrong()))
}

fn unclear(error: proc::Malformed) -> Error {
    let source = std::io::Error::new(std::io::ErrorKind::InvalidData, error);
    Error::kernel("reading /proc/self", source)
}
