//! Loaded: the root task has been made and runs its script, and with it come all the others.

use std::cell::RefCell;
use std::collections::HashSet;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use abi::{Addr, Op, offset};
use image::Reader;
use rustix::process::{Pid, getppid};
use sys::init::{Init, Start};
use sys::ptrace::{self, Event};
use sys::spawn::{Entry, spawn};
use sys::timens::ForChildren;

use super::ending::{descends, kill_tree, parents};
use super::running::Running;
use super::{fill, lazy_chunks};
use crate::build::Built;
use crate::clocks::Resumed;
use crate::error::Holder;
use crate::lazy::Client;
use crate::namespaces::Way;
use crate::plan::{Outside, Staying, word};
use crate::text::describe_status;
use crate::{Error, Result};

const EEXIST: i32 = libc::EEXIST;
/// How long a wait lasts before it is looked at whether all tasks still live.
const LOOK: Duration = Duration::from_millis(100);
/// How long a thread that ends may take for it.
const ENDING_MAX: Duration = Duration::from_secs(10);

/// The maker of the root.
#[derive(Clone, Copy, Debug)]
pub(super) enum Origin<'a> {
    /// The restorer, whose child it is.
    Child,
    /// The restorer, whose parent's child it is.
    Sibling {
        /// That parent, if it ends when the restore fails.
        parent: Option<Pid>,
    },
    /// The process outside of its pid namespace, of which it is process 1 and waits to begin.
    Init {
        /// The root.
        init: &'a Init,
        /// The kinds of namespaces that it takes over.
        namespaces: i32,
    },
}

impl<'a> Origin<'a> {
    /// That of a root that a copy of the restorer makes in that `way`, in namespaces of the kinds
    /// `namespaces`.
    pub fn of_way(way: &'a Way, namespaces: i32) -> Self {
        match way {
            Way::Child => Self::Child,
            Way::First(init) => Self::Init { init, namespaces },
            Way::Sibling => Self::Sibling { parent: getppid() },
        }
    }

    /// The number of the root's parent, by whose end the root ends until it runs; 0 for none.
    pub fn parent(self) -> i32 {
        match self {
            Self::Child => std::process::id().cast_signed(),
            Self::Sibling { parent } => parent.map_or(0, |parent| parent.as_raw_nonzero().get()),
            Self::Init { .. } => 0,
        }
    }
}

/// The root task runs its script. Dropping this kills it, and with it every task that it made.
pub(super) struct Loaded<'a> {
    built: &'a Built,
    root: i32,
    armed: bool,
    /// Threads that were found stopped on the way and are traced since.
    traced: RefCell<HashSet<i32>>,
}

impl<'a> Loaded<'a> {
    /// Makes the root as `origin` says, whose clocks and those of the whole tree go on as `clocks`
    /// says.
    pub(super) fn new(
        built: &'a Built,
        root: i32,
        origin: &Origin<'_>,
        clocks: Option<Resumed>,
    ) -> Result<Self> {
        let namespace = clocks.map(|clocks| clocks.for_children(root)).transpose()?;
        let namespace = namespace.flatten();
        begin(built, root, origin, namespace.as_ref())?;
        let loaded = Self {
            built,
            root,
            armed: true,
            traced: RefCell::default(),
        };
        if let Some(namespace) = namespace {
            let left = namespace.leave();
            left.map_err(|e| Error::kernel("cannot leave the time namespace of the tree", e))?;
        }
        Ok(loaded)
    }

    /// Fills the pages of the tasks that wait for it.
    pub(super) fn fill(&self, reader: &Reader, lazy: Option<&Client>) -> Result<u64> {
        let ready = |outside: &Outside| self.wait(outside.ready, 1);
        let pages = fill::fill(reader, self.built, lazy, ready)?;
        // What tasks read for themselves, while they do so.
        match lazy {
            Some(_) => {
                reader.verify_rest_but(1, &lazy_chunks::find(reader, &self.built.plan.outside)?)?
            }
            None => reader.verify_rest(1)?,
        }
        Ok(pages)
    }

    pub(super) fn wait_ready(&self) -> Result<()> {
        let threads = u32::try_from(self.built.plan.threads.len()).expect("checked when read");
        self.wait(word::READY, threads)?;
        self.wait_ended()
    }

    /// Waits until those threads are gone that were only there for a while.
    fn wait_ended(&self) -> Result<()> {
        let began = Instant::now();
        for (pid, tid) in &self.built.plan.ended {
            let path = sys::procfs::path(format_args!("{pid}/task/{tid}"));
            while std::path::Path::new(&path).exists() {
                if began.elapsed() > ENDING_MAX {
                    let doing = format!("thread {tid} of {pid} does not end");
                    return Err(Error::kernel(doing, std::io::ErrorKind::TimedOut));
                }
                std::thread::sleep(LOOK / 1000);
            }
        }
        Ok(())
    }

    /// Waits until a shared word is at least `value`.
    fn wait(&self, id: resources::script::WordId, value: u32) -> Result<()> {
        let area = &self.built.area;
        let word = area.word(self.built.word(id));
        loop {
            let seen = word.load(Ordering::Acquire);
            if seen >= value {
                return Ok(());
            }
            self.check()?;
            area.sleep_on([(word, seen), (self.failing(), 0)], LOOK);
            if word.load(Ordering::Acquire) == seen {
                self.check_alive()?;
            }
        }
    }

    /// The word that is not 0 any more when a call has failed.
    fn failing(&self) -> &AtomicU32 {
        let header = self.built.header();
        self.built.area.word(header.plus(offset::FAILING as u64))
    }

    /// Whether a call failed.
    fn check(&self) -> Result<()> {
        if self.failing().load(Ordering::Acquire) == 0 {
            return Ok(());
        }
        let built = self.built;
        let header = built.header();
        let failed = Addr(built.area.load(header.plus(offset::FAILED as u64)));
        let starts = built.scripts.iter().enumerate();
        let (script, start) = starts
            .filter(|(_, start)| **start <= failed)
            .max_by_key(|(_, start)| **start)
            .expect("the op of some script failed");
        let planned = &built.plan.scripts[script];
        let step = (failed.0 - start.0) as usize / Op::BYTES;
        let result = built
            .area
            .load(failed.plus(offset::RESULT as u64))
            .cast_signed();
        let call = planned.script.line(step).to_string();
        if result == -i64::from(EEXIST) && call.starts_with("clone3") {
            let child = &planned.script.steps[step].extra;
            if let resources::script::Arg::Script(child) = child {
                return Err(Error::Taken {
                    pid: built.plan.scripts[child.0 as usize].tid,
                    by: Holder::Unseen,
                });
            }
        }
        let source = if result < 0 {
            std::io::Error::from_raw_os_error(i32::try_from(-result).unwrap_or(0))
        } else {
            std::io::Error::other(format!("it returned {result:#x}"))
        };
        Err(Error::Call {
            pid: planned.tid,
            call,
            source,
        })
    }

    /// Whether a task ended.
    fn check_alive(&self) -> Result<()> {
        self.check()?;
        for staying in &self.built.plan.threads {
            let Staying { pid, tid, .. } = *staying;
            let stat = sys::procfs::read(format_args!("{pid}/task/{tid}/stat"));
            let stat = stat
                .ok()
                .and_then(|stat| sys::proc::Stat::parse(&stat).ok());
            match stat.map(|stat| (stat.state, stat.exit_code)) {
                Some((b'Z' | b'X', status)) => return Err(died(tid, status)),
                // Before its fork, its number may be somebody else's.
                Some((b'T' | b't', _)) if descends(pid, self.root, &parents(self.built)) => {
                    self.keep_going(staying)?;
                }
                _ => {}
            }
        }
        if !sys::procfs::has(self.root) {
            return Err(Error::Died {
                pid: self.root,
                how: "unknown".to_owned(),
            });
        }
        Ok(())
    }

    /// Has a thread go on that somebody has stopped. It is traced from now on: so the kernel keeps
    /// in mind that the process is stopped, and whether it was continued since.
    fn keep_going(&self, staying: &Staying) -> Result<()> {
        let tid = staying.tid;
        let failed = |e| Error::kernel(format!("cannot have {tid} go on"), e);
        let event = if self.traced.borrow_mut().insert(tid) {
            seize(staying)?;
            // It may have been told to continue meanwhile.
            ptrace::interrupt(tid).map_err(failed)?;
            Some(ptrace::wait(tid).map_err(failed)?)
        } else {
            ptrace::try_wait(tid).map_err(failed)?
        };
        let signal = match event {
            None => return Ok(()),
            Some((_, Event::Ended(status))) => return Err(died(tid, status)),
            Some((_, Event::Signal(ptrace::SIGSTOP))) => ptrace::SIGSTOP,
            Some(_) => 0,
        };
        ptrace::resume(tid, signal).map_err(failed)
    }

    /// Traces all threads, so that they are killed if this process is, and lets the scripts run to
    /// their ends.
    pub(super) fn trace(mut self) -> Result<Running<'a>> {
        for staying in &self.built.plan.threads {
            if self.traced.borrow_mut().insert(staying.tid) {
                seize(staying)?;
            }
        }
        let area = &self.built.area;
        area.post(area.word(self.built.word(word::GO)), 1);
        let threads = u32::try_from(self.built.plan.threads.len()).expect("checked when read");
        let parked = area.word(self.built.header().plus(offset::PARKED as u64));
        loop {
            let seen = parked.load(Ordering::Acquire);
            if seen >= threads {
                break;
            }
            area.sleep_on([(parked, seen), (self.failing(), 0)], LOOK);
            if parked.load(Ordering::Acquire) == seen {
                self.check_alive()?;
            }
        }
        self.check()?;
        self.armed = false;
        Ok(Running::new(self.built, self.root))
    }
}

impl Drop for Loaded<'_> {
    fn drop(&mut self) {
        if self.armed {
            kill_tree(self.built, self.root);
        }
    }
}

/// Has the root run its script.
fn begin(
    built: &Built,
    root: i32,
    origin: &Origin<'_>,
    namespace: Option<&ForChildren>,
) -> Result<()> {
    let span = built.area.span();
    let entry = Entry {
        code: span.start,
        ops: built.scripts[0],
        header: built.header(),
    };
    let failed = |error| Error::kernel(format!("cannot make a task with pid {root}"), error);
    let sibling = match origin {
        Origin::Child => false,
        Origin::Sibling { .. } => true,
        Origin::Init { init, namespaces } => {
            let clocks = namespace.map(ForChildren::namespace).transpose();
            let clocks = clocks.map_err(failed)?;
            let start = Start {
                entry,
                area: span,
                memory: built.memory,
                clocks: clocks.as_ref().map(OwnedFd::as_raw_fd),
                namespaces: *namespaces,
            };
            return init.begin(&start).map_err(failed);
        }
    };
    spawn(root, sibling, entry).map_err(|error| match error.raw_os_error() {
        Some(EEXIST) => Error::Taken {
            pid: root,
            by: Holder::Unseen,
        },
        _ => failed(error),
    })
}

/// Begins to trace a thread, which is killed from now on if this process ends.
fn seize(staying: &Staying) -> Result<()> {
    let tid = staying.tid;
    let (seized, unfiltered) = match staying.is_filtered {
        false => (ptrace::seize(tid, true), ""),
        true => (
            ptrace::seize_unfiltered(tid),
            " and suspend its seccomp filters",
        ),
    };
    seized.map_err(|e| Error::kernel(format!("cannot trace {tid}{unfiltered}"), e))
}

fn died(pid: i32, status: i32) -> Error {
    let how = describe_status(status);
    Error::Died { pid, how }
}
