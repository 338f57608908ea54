//! What a stopped thread looks like from outside, read on first need and once.

use std::cell::{OnceCell, RefCell};
use std::collections::HashMap;
use std::os::fd::BorrowedFd;
use std::rc::Rc;

use resources::task::Facts;
use resources::{Allow, Error, Result};
use sys::arch::Registers;
use sys::close::CloseQueue;
use sys::proc::Status;
use sys::process::Process;
use sys::ptrace::{Filter, RseqArea};
use tracee::Saved;

/// The facts of one thread.
pub(super) struct ThreadFacts<'a> {
    pub allow: &'a Allow,
    pub process: &'a Process,
    /// The thread by which the process is asked.
    asked: i32,
    pub tid: i32,
    /// Its /proc directory.
    pub proc: BorrowedFd<'a>,
    /// What it goes on with.
    pub saved: Saved,
    leader_is_known: bool,
    close_queue: &'a CloseQueue,
    texts: RefCell<HashMap<String, Rc<[u8]>>>,
    status: OnceCell<Rc<Status>>,
}

impl<'a> ThreadFacts<'a> {
    pub fn new(
        allow: &'a Allow,
        process: &'a Process,
        (asked, tid): (i32, i32),
        (proc, close_queue): (BorrowedFd<'a>, &'a CloseQueue),
        (saved, leader_is_known): (Saved, bool),
    ) -> Self {
        Self {
            allow,
            process,
            asked,
            tid,
            proc,
            saved,
            leader_is_known,
            close_queue,
            texts: RefCell::default(),
            status: OnceCell::new(),
        }
    }
}

impl ThreadFacts<'_> {
    /// Whether it is this thread that says what its process has.
    pub fn speaks_for_all(&self) -> bool {
        self.tid == self.asked
    }

    /// A status that was read already.
    pub fn knows_status(&self, status: Rc<Status>) {
        // Of two, the one read first stays; both are of the same stop.
        let _ = self.status.set(status);
    }

    /// A text that was read already.
    pub fn knows(&self, name: &str, text: Vec<u8>) {
        self.texts.borrow_mut().insert(name.to_owned(), text.into());
    }
}

impl ThreadFacts<'_> {
    /// Reads what every process is going to be asked for; who asks hears of errors.
    pub fn read_ahead(&self) {
        for name in ["limits", "oom_score_adj", "coredump_filter"] {
            let _ = self.proc(name);
        }
    }
}

impl Facts for ThreadFacts<'_> {
    fn allow(&self) -> &Allow {
        self.allow
    }

    fn process(&self) -> &Process {
        self.process
    }

    fn tid(&self) -> i32 {
        self.tid
    }

    fn proc(&self, name: &str) -> Result<Rc<[u8]>> {
        if let Some(text) = self.texts.borrow().get(name) {
            return Ok(text.clone());
        }
        let path = if self.speaks_for_all() {
            name.to_owned()
        } else {
            format!("task/{}/{name}", self.tid)
        };
        let text = freeze::read_at(self.proc, self.pid(), &path, self.close_queue);
        let text: Rc<[u8]> = text.map_err(|error| self.failed(name, error))?.into();
        self.texts
            .borrow_mut()
            .insert(name.to_owned(), text.clone());
        Ok(text)
    }

    fn status(&self) -> Result<Rc<Status>> {
        if let Some(status) = self.status.get() {
            return Ok(status.clone());
        }
        let status = Status::parse(&self.proc("status")?);
        let unclear = |e| std::io::Error::new(std::io::ErrorKind::InvalidData, e);
        let doing = || format!("reading the status of {}", self.tid);
        let status = status.map_err(|e| Error::kernel(doing(), unclear(e)))?;
        Ok(self.status.get_or_init(|| Rc::new(status)).clone())
    }

    fn rseq(&self) -> Result<RseqArea> {
        Ok(self.saved.rseq)
    }

    fn registers(&self) -> Registers {
        self.saved.registers
    }

    fn is_there(&self, session: i32) -> bool {
        self.leader_is_known || sys::procfs::has(session)
    }

    fn has_thread(&self, tid: i32) -> bool {
        let pid = self.pid();
        let is_thread = || sys::procfs::has(format_args!("{pid}/task/{tid}"));
        tid == self.asked || tid != pid && is_thread()
    }

    fn filters(&self, tid: i32) -> Result<Vec<Filter>> {
        if tid == self.pid() && tid != self.asked && !self.leader_is_filtered() {
            return Ok(Vec::new());
        }
        // What others have in common with the leader, they have with who is asked in its place.
        let tid = if tid == self.pid() { self.asked } else { tid };
        let filters = sys::ptrace::filters(tid);
        filters.map_err(|e| Error::kernel(format!("reading the filters of thread {tid}"), e))
    }
}

impl ThreadFacts<'_> {
    /// Whether the leader, which has ended, had seccomp filters.
    fn leader_is_filtered(&self) -> bool {
        let status = sys::procfs::read(format_args!("{}/status", self.pid()));
        let status = status.ok().and_then(|text| Status::parse(&text).ok());
        status.is_some_and(|status| status.seccomp != 0)
    }

    fn failed(&self, name: &str, error: freeze::Error) -> Error {
        match error {
            freeze::Error::Gone { pid } => Error::Gone {
                pid,
                doing: format!("reading {name}"),
            },
            freeze::Error::Kernel { doing, source } => Error::Kernel { doing, source },
            other => Error::kernel(other.to_string(), std::io::Error::other("unexpected")),
        }
    }
}
