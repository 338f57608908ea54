//! One monitor that is served.

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed, Ordering::Release};
use std::sync::{Arc, Mutex};
use std::thread::Builder;

use image::{Reader, Seal, Writer};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Signal, pidfd_send_signal};
use serve::{Copied, Difference, Options, Session, Target, Wanted};
use store::Images;

use super::copying::Copying;
use super::handoff::{self, Refusal};
use super::watchdog::{self, Connected};
use super::{OnError, Prefetch, Shared, lock};
use crate::place::{self, MEMORY};
use crate::records::MonitorState;
use crate::{Error, Result};

/// Threads that bring memory in early, at the most.
const FETCHERS: usize = 2;

/// A session and who it is with.
pub(crate) struct Live {
    pub number: u64,
    /// The monitor's pid.
    pub pid: i32,
    pub session: Session,
    /// The monitor itself.
    monitor: OwnedFd,
    /// The image that the next difference is over: that of the server, or the last difference.
    latest: Mutex<Images>,
    /// A difference that is written while the machine runs.
    pub copying: Copying,
    /// Ends the session when it is written to.
    stop: OwnedFd,
    /// Whether everything is to come in, and the session then to end.
    draining: AtomicBool,
    fetching: AtomicBool,
    /// What is brought in before anything else.
    wanted: Vec<Wanted>,
    aborted: AtomicBool,
}

impl Live {
    /// Has everything brought in, and the session end then.
    pub fn drain(&self) {
        self.draining.store(true, Relaxed);
        self.ring();
    }

    /// Has the monitor killed.
    pub fn abort(&self) {
        self.aborted.store(true, Relaxed);
        self.ring();
    }

    /// Writes what the machine, which must not run, has changed since the last difference, or the
    /// beginning, as an image in `dir`.
    ///
    /// # Errors
    /// Nothing is left in `dir` then, and the next difference has it all.
    pub fn diff(
        &self,
        shared: &Arc<Shared>,
        dir: &Path,
        vmstate: Option<&Path>,
    ) -> Result<Difference> {
        let _alone = self.copying.keep_out()?;
        let state = vmstate.map(crate::import::read_state).transpose()?;
        let dir = std::path::absolute(dir).map_err(Error::file("find", dir))?;
        self.write(shared, &dir, state, |writer| self.session.diff(writer))
    }

    /// Does the same for a machine that runs on once `may_run` is called; its memory at that moment
    /// is written. No other difference is.
    ///
    /// # Errors
    /// As [`Live::diff`].
    pub fn diff_live(
        &self,
        shared: &Arc<Shared>,
        dir: &Path,
        state: Option<Vec<u8>>,
        copied: &Arc<Copied>,
        may_run: impl FnOnce(),
    ) -> Result<Difference> {
        self.write(shared, dir, state, |writer| {
            let live = self.session.diff_live(writer, copied)?;
            may_run();
            live.finish()
        })
    }

    /// Writes a difference, whose pages `write` stores, with the state that goes with it.
    fn write(
        &self,
        shared: &Arc<Shared>,
        dir: &Path,
        state: Option<Vec<u8>>,
        write: impl FnOnce(&Writer) -> serve::Result<Difference>,
    ) -> Result<Difference> {
        // An image that is written over must not change meanwhile.
        let _same = shared.working_set.hold(shared);
        let compress = shared.options.compress;
        let images = Images::from(dir.to_owned());
        let writer = place::writer(&images, Some(&self.latest()), shared.pages, compress)?;
        let difference = write(&writer)?;
        // What was read may be that of another process with the same pid.
        if has_ended(&self.monitor) {
            return Err(serve::Error::Gone { pid: self.pid }.into());
        }
        if let Some(bytes) = state {
            let monitor = "firecracker".to_owned();
            writer.record(MonitorState { monitor, bytes }.record());
        }
        writer.seal(Seal {
            durable: false,
            facts: (shared.facts)(),
        })?;
        self.session.kept();
        *lock(&self.latest) = images;
        Ok(difference)
    }

    /// Has the thread that serves it look around.
    pub fn ring(&self) {
        let _ = rustix::io::write(&self.stop, b"!");
    }

    /// Where the image is that the next difference is over.
    pub fn latest(&self) -> Images {
        lock(&self.latest).clone()
    }
}

/// A monitor that has connected, counted until it is done.
struct Attended {
    shared: Arc<Shared>,
    number: u64,
}

impl Drop for Attended {
    fn drop(&mut self) {
        self.shared.watchdog.forget(self.number);
        self.shared.attended.fetch_sub(1, Release);
        self.shared.ring();
    }
}

/// Takes a monitor on, in a thread of its own.
pub(crate) fn attend(shared: &Arc<Shared>, connected: Connected) {
    let number = connected.number;
    shared.attended.fetch_add(1, Relaxed);
    let attended = Attended {
        shared: shared.clone(),
        number,
    };
    let connected = Arc::new(connected);
    let own = connected.clone();
    let name = format!("session-{number}");
    let started = Builder::new()
        .name(name)
        .spawn(move || session(&attended, &own));
    if let Err(error) = started {
        log::error!("session {number}: its monitor is killed: no thread can be made: {error}");
        kill(&connected.monitor);
    }
}

/// Serves a monitor until it ends, or the session does.
fn session(attended: &Attended, connected: &Connected) {
    let (shared, number) = (&attended.shared, attended.number);
    let pid = match rustix::net::sockopt::socket_peercred(&connected.connection) {
        Ok(who) => who.pid.as_raw_nonzero().get(),
        Err(errno) => return log::warn!("session {number}: who is it? {errno}"),
    };
    let monitor = &connected.monitor;
    let pipe = match pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK) {
        Ok(pipe) => pipe,
        Err(errno) => return log::warn!("session {number}: {errno}"),
    };
    let (stopped, stop) = pipe;
    let begun = match begin(shared, connected, pid, stop) {
        Ok(begun) => Arc::new(begun),
        Err(Begin::Refused(refusal)) => {
            return log::warn!("session {number}: pid {pid} is refused: {refusal}");
        }
        Err(Begin::Failed(serve::Error::Gone { .. })) => {
            return log::info!("session {number}: pid {pid} has ended");
        }
        // It may have been changed half: whoever waits in it would wait for ever.
        Err(Begin::Failed(error)) => {
            log::error!("session {number}: pid {pid} is killed: {}", told(&error));
            return kill(monitor);
        }
    };
    lock(&shared.sessions).insert(number, begun.clone());
    shared.metrics.sessions.inc();
    log::info!("session {number}: pid {pid}, {}", begun.session.ability());
    let ended = std::thread::scope(|scope| {
        if shared.options.prefetch == Prefetch::All {
            begun.fetching.store(true, Relaxed);
        }
        if shared.draining.load(Relaxed) {
            begun.drain();
        }
        serve_all(scope, &begun, &stopped, monitor)
    });
    match ended {
        Ok(()) => log::info!("session {number}: it is over"),
        Err(serve::Error::Gone { .. }) => log::info!("session {number}: pid {pid} has ended"),
        Err(error) => {
            log::error!("session {number}: pid {pid} is killed: {}", told(&error));
            kill(monitor);
        }
    }
    // Who reads memory that is not served any more would wait for ever.
    if has_ended(monitor) {
        begun.session.abandon();
    }
    begun.copying.wait();
    if shared.options.record {
        shared.working_set.add(shared, &begun.session.recorded());
    }
    shared.metrics.sessions.dec();
    lock(&shared.sessions).remove(&number);
}

/// Why a session did not begin.
enum Begin {
    Refused(String),
    Failed(serve::Error),
}

fn begin(
    shared: &Arc<Shared>,
    connected: &Connected,
    pid: i32,
    stop: OwnedFd,
) -> std::result::Result<Live, Begin> {
    let number = connected.number;
    let refused = |refusal: Refusal| Begin::Refused(refusal.to_string());
    // From what is sent on the machine depends on us.
    let depends = |held: &[OwnedFd]| shared.watchdog.depends(number, held);
    let stopping = shared.stopping.0.as_fd();
    let handoff = handoff::receive(&connected.connection, stopping, depends).map_err(refused)?;
    let regions = handoff::regions(&handoff.mappings, MEMORY, shared.pages);
    let regions = regions.map_err(Begin::Refused)?;
    let target = Target {
        uffd: handoff.uffd.into(),
        pid,
        regions,
    };
    let system = |source| serve::Error::Descriptor(source);
    let monitor = connected.monitor.try_clone().map_err(system);
    let monitor = monitor.map_err(Begin::Failed)?;
    let options = Options {
        unregister: shared.options.unregister,
        poison: shared.options.on_error == OnError::Poison,
    };
    let image: Arc<Reader> = shared.image.clone();
    let session = Session::begin(target, image, options, shared.metrics.clone());
    let session = session.map_err(|error| match error {
        serve::Error::Descriptor(_) => Begin::Refused(told(&error)),
        error => Begin::Failed(error),
    })?;
    if shared.options.record {
        session.record();
    }
    Ok(Live {
        number,
        pid,
        session,
        monitor,
        latest: Mutex::new(shared.options.images.clone()),
        copying: Copying::default(),
        stop,
        draining: AtomicBool::new(false),
        fetching: AtomicBool::new(false),
        wanted: match shared.options.prefetch {
            Prefetch::Trace => shared.working_set.wanted(),
            Prefetch::None | Prefetch::All => Vec::new(),
        },
        aborted: AtomicBool::new(false),
    })
}

/// What a thread has brought in that is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fetched {
    /// What other machines wanted.
    Wanted,
    /// Everything.
    All,
}

/// Answers faults until the monitor ends, or all is in and the session is to end.
fn serve_all<'scope>(
    scope: &'scope std::thread::Scope<'scope, '_>,
    live: &'scope Arc<Live>,
    stopped: &OwnedFd,
    monitor: &OwnedFd,
) -> serve::Result<()> {
    // Told by the fetchers: how it ended. The sender is kept, so that it is never hung up.
    let (sender, fetched) = std::sync::mpsc::channel::<(Fetched, serve::Result<()>)>();
    let ended = Arc::new(AtomicBool::new(false));
    let (mut fetchers, mut finished) = (0, 0);
    let first = Arc::new(AtomicUsize::new(0));
    for _ in 0..FETCHERS.min(live.wanted.len()) {
        let (sender, ended, live) = (sender.clone(), ended.clone(), live.clone());
        let first = first.clone();
        scope.spawn(move || {
            let stopped = || ended.load(Relaxed);
            let done = live.session.fetch_wanted(&live.wanted, &first, &stopped);
            let _ = sender.send((Fetched::Wanted, done));
            live.ring();
        });
    }
    let outcome = loop {
        if live.fetching.load(Relaxed) || live.draining.load(Relaxed) {
            for _ in fetchers..FETCHERS {
                let (sender, ended, live) = (sender.clone(), ended.clone(), live.clone());
                scope.spawn(move || {
                    let done = live.session.fetch(&|| ended.load(Relaxed));
                    let _ = sender.send((Fetched::All, done));
                    live.ring();
                });
            }
            fetchers = FETCHERS;
        }
        match live.session.serve(&[stopped.as_fd(), monitor.as_fd()]) {
            Ok(0) => {}
            Ok(_) => break Err(serve::Error::Gone { pid: live.pid }),
            Err(error) => break Err(error),
        }
        let _ = rustix::io::read(stopped, &mut [0; 64]);
        let outcomes = fetched.try_iter().collect::<Vec<_>>();
        let all = outcomes.iter().filter(|(what, _)| *what == Fetched::All);
        finished += all.count();
        if let Some(error) = outcomes.into_iter().find_map(|(_, done)| done.err()) {
            break Err(error);
        }
        if live.aborted.load(Relaxed) {
            let what = "the server was told to end at once".to_owned();
            break Err(serve::Error::Unable(what));
        }
        let is_in = finished >= FETCHERS && live.draining.load(Relaxed);
        if is_in && !live.copying.is_going_on() {
            break live.session.end();
        }
    };
    ended.store(true, Relaxed);
    outcome
}

/// Kills a monitor and waits for its end: without us its missing pages would read as zeros.
fn kill(monitor: &OwnedFd) {
    match pidfd_send_signal(monitor, Signal::KILL) {
        Ok(()) => watchdog::wait_for_end(monitor),
        Err(Errno::SRCH) => {}
        Err(errno) => log::error!("it cannot be killed: {errno}"),
    }
}

/// Whether a process has ended.
fn has_ended(process: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|count| count > 0)
}

/// An error with its causes.
pub(crate) fn told(error: &dyn std::error::Error) -> String {
    sys::causes::line(error)
}
