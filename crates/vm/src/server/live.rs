//! One monitor that is served.

use std::ffi::OsString;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{
    AtomicBool, AtomicUsize, Ordering::Relaxed, Ordering::Release, Ordering::SeqCst,
};
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, RwLock};
use std::thread::Builder;

use image::{Seal, Writer};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Signal, pidfd_send_signal};
use serve::{CopyProgress, Difference, Ledger, Options, PageRange, Session};
use store::Images;
use sys::uffd::Uffd;

use super::copying::LiveCopy;
use super::handoff::{self, Refusal, StopCondition};
use super::sharing;
use super::watchdog::Connected;
use super::watching::Watched;
use super::{ErrorPolicy, Prefetch, SharedState, lock};
use crate::place::{self, MEMORY};
use crate::records::MonitorState;
use crate::{Error, Result};

/// Threads that bring memory in early, at the most.
const FETCHERS: usize = 2;

/// A session and who it is with.
pub(crate) struct LiveSession {
    pub number: u64,
    /// The monitor's pid.
    pub pid: i32,
    pub session: Session,
    /// The monitor itself.
    monitor: OwnedFd,
    /// The image that the next difference is over: that of the server, or the last difference.
    latest: Mutex<Images>,
    /// A difference that is written while the machine runs.
    pub copying: LiveCopy,
    /// Ends the session when it is written to.
    stop: OwnedFd,
    /// True if everything is to come in, and the session then to end.
    draining: AtomicBool,
    fetching: AtomicBool,
    /// The host had no pages for all that was to come early.
    is_short: AtomicBool,
    /// Ranges that are fetched before anything else.
    wanted: Vec<PageRange>,
    aborted: AtomicBool,
    leaving: AtomicBool,
    /// Held by those who write differences.
    writing: RwLock<()>,
}

impl LiveSession {
    /// Has the session left as it is, for another server.
    pub fn leave(&self) {
        self.leaving.store(true, Relaxed);
        self.ring();
    }

    /// Waits until no difference is being written.
    pub fn wait_for_diff(&self) {
        drop(self.writing.write());
    }

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
        shared: &Arc<SharedState>,
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
    /// As [`LiveSession::diff`].
    pub fn diff_live(
        &self,
        shared: &Arc<SharedState>,
        dir: &Path,
        state: Option<Vec<u8>>,
        copied: &Arc<CopyProgress>,
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
        shared: &Arc<SharedState>,
        dir: &Path,
        state: Option<Vec<u8>>,
        write: impl FnOnce(&Writer) -> serve::Result<Difference>,
    ) -> Result<Difference> {
        let _writing = self.writing.read();
        if shared.leaving.load(SeqCst) {
            let what = "the server leaves its sessions to another one";
            return Err(Error::Unfit(what.to_owned()));
        }
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
        // Who comes after us writes over the new one then, at the worst what that has already.
        self.session.ledger().note(dir.as_os_str().as_bytes());
        self.session.kept();
        *lock(&self.latest) = images;
        Ok(difference)
    }

    /// Returns the failure of a prefetch if it ends the session. A host without a huge page for it
    /// ends no session, unless everything has to come.
    fn bears(&self, error: serve::Error) -> Option<serve::Error> {
        if !matches!(error, serve::Error::NoRoom { .. }) || self.draining.load(Relaxed) {
            return Some(error);
        }
        let (number, error) = (self.number, sys::causes::line(&error));
        log::warn!("session {number}: nothing more is brought in early: {error}");
        self.is_short.store(true, Relaxed);
        None
    }

    /// Has the thread that serves it look around.
    pub fn ring(&self) {
        let _ = rustix::io::write(&self.stop, b"!");
    }

    /// Returns the place of the image that the next difference is over.
    pub fn latest(&self) -> Images {
        lock(&self.latest).clone()
    }
}

/// A monitor that has connected, counted until it is done.
struct MonitorGuard {
    shared: Arc<SharedState>,
    number: u64,
    /// True if it is left to another server.
    left: AtomicBool,
}

impl Drop for MonitorGuard {
    fn drop(&mut self) {
        if !self.left.load(Relaxed) {
            self.shared.watchdog.forget(self.number);
        }
        self.shared.attended.fetch_sub(1, Release);
        self.shared.ring();
    }
}

/// A monitor that is to be served.
#[derive(Debug)]
pub(crate) enum Arrival {
    /// It has just connected.
    New(Connected),
    /// Another server had it.
    Kept(Watched),
}

impl Arrival {
    const fn connected(&self) -> &Connected {
        match self {
            Self::New(connected) => connected,
            Self::Kept(watched) => &watched.connected,
        }
    }
}

/// Takes a monitor on, in a thread of its own, which drops `begun` when its session is there.
pub(crate) fn attend(shared: &Arc<SharedState>, arrived: Arrival, begun: Sender<()>) {
    let number = arrived.connected().number;
    shared.attended.fetch_add(1, Relaxed);
    let attended = MonitorGuard {
        shared: shared.clone(),
        number,
        left: AtomicBool::new(false),
    };
    let arrived = Arc::new(arrived);
    let own = arrived.clone();
    let name = format!("session-{number}");
    let started = Builder::new()
        .name(name)
        .spawn(move || session(&attended, &own, begun));
    if let Err(error) = started {
        log::error!("session {number}: its monitor is killed: no thread can be made: {error}");
        kill(&arrived.connected().monitor);
    }
}

/// Serves a monitor until it ends, or the session does.
fn session(attended: &MonitorGuard, arrived: &Arrival, is_there: Sender<()>) {
    let (shared, number) = (&attended.shared, attended.number);
    let connected = arrived.connected();
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
    let begun = match begin(shared, arrived, pid) {
        Ok(session) => live(shared, connected, session, stop),
        Err(error) => Err(error),
    };
    let begun = match begun {
        Ok(begun) => Arc::new(begun),
        Err(BeginError::Left) => return attended.left.store(true, Relaxed),
        Err(BeginError::Refused(refusal)) => {
            return log::warn!("session {number}: pid {pid} is refused: {refusal}");
        }
        Err(BeginError::Failed(serve::Error::Gone { .. })) => {
            return log::info!("session {number}: pid {pid} has ended");
        }
        // It may have been changed half: whoever waits in it would wait for ever.
        Err(BeginError::Failed(error)) => {
            log::error!(
                "session {number}: pid {pid} is killed: {}",
                sys::causes::line(&error)
            );
            return kill(monitor);
        }
    };
    lock(&shared.sessions).insert(number, begun.clone());
    drop(is_there);
    serve_to_its_end(attended, &begun, &stopped, monitor);
}

/// Serves a monitor whose session has begun.
fn serve_to_its_end(
    attended: &MonitorGuard,
    begun: &Arc<LiveSession>,
    stopped: &OwnedFd,
    monitor: &OwnedFd,
) {
    let (shared, number, pid) = (&attended.shared, attended.number, begun.pid);
    shared.metrics.sessions.inc();
    log::info!("session {number}: pid {pid}, {}", begun.session.ability());
    let ended = std::thread::scope(|scope| {
        if shared.options.prefetch == Prefetch::All {
            begun.fetching.store(true, Relaxed);
        }
        if shared.draining.load(Relaxed) || begun.session.is_ending() {
            begun.drain();
        }
        if shared.leaving.load(Relaxed) {
            begun.leave();
        }
        serve_all(scope, begun, stopped, monitor)
    });
    match ended {
        Ok(SessionEnd::Over) => log::info!("session {number}: it is over"),
        Ok(SessionEnd::Left) => {
            attended.left.store(true, Relaxed);
            log::info!("session {number}: it is left to another server");
        }
        Err(serve::Error::Gone { .. }) => log::info!("session {number}: pid {pid} has ended"),
        Err(error) => {
            log::error!(
                "session {number}: pid {pid} is killed: {}",
                sys::causes::line(&error)
            );
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
enum BeginError {
    Refused(String),
    Failed(serve::Error),
    Left,
}

impl From<serve::Error> for BeginError {
    fn from(error: serve::Error) -> Self {
        match error {
            // Nothing was changed.
            serve::Error::Descriptor(_) => Self::Refused(sys::causes::line(&error)),
            error => Self::Failed(error),
        }
    }
}

fn begin(
    shared: &Arc<SharedState>,
    arrived: &Arrival,
    pid: i32,
) -> std::result::Result<Session, BeginError> {
    let session = match arrived {
        Arrival::New(connected) => receive(shared, connected, pid)?,
        Arrival::Kept(watched) => match &watched.state {
            // It is in the middle of everything: nothing of it may just be let go.
            Some([ledger, uffd]) => {
                go_on(shared, watched, ledger, uffd).map_err(BeginError::Failed)?
            }
            None if watched.depends => {
                let what = "its server was killed when a part of its hand-off had come";
                return Err(BeginError::Failed(serve::Error::Unable(what.to_owned())));
            }
            None => receive(shared, &watched.connected, pid)?,
        },
    };
    if shared.options.record {
        session.record();
    }
    Ok(session)
}

/// Begins a session with who hands its memory over.
fn receive(
    shared: &Arc<SharedState>,
    connected: &Connected,
    pid: i32,
) -> std::result::Result<Session, BeginError> {
    let number = connected.number;
    if let Some(share) = &shared.share {
        sharing::offer(share, shared.pages, &connected.connection);
    }
    // From what is sent on the machine depends on us.
    let depends = |held: &[OwnedFd]| shared.watchdog.depends(number, held);
    let stopping = StopCondition {
        told: shared.stopping.0.as_fd(),
        leaving: &shared.leaving,
    };
    let handoff = handoff::receive(&connected.connection, stopping, depends);
    let handoff = handoff.map_err(|refusal| match refusal {
        Refusal::Left => BeginError::Left,
        refusal => BeginError::Refused(refusal.to_string()),
    })?;
    let regions = handoff::regions(&handoff.mappings, MEMORY, shared.pages);
    let regions = regions.map_err(BeginError::Refused)?;
    let share = match &shared.share {
        Some(share) if sharing::is_shared(share, pid, &regions).map_err(BeginError::Refused)? => {
            Some(share.clone())
        }
        _ => None,
    };
    let ledger = if shared.keeps() {
        let (ledger, file) = Ledger::shared(pid, &regions)?;
        let uffd = handoff.uffd.as_fd();
        shared.watchdog.state(number, file.as_fd(), uffd);
        ledger
    } else {
        depends(std::slice::from_ref(&handoff.uffd));
        Ledger::own(pid, &regions)?
    };
    handoff::discard(&connected.connection);
    let (image, metrics) = (shared.image.clone(), shared.metrics.clone());
    let uffd = handoff.uffd.into();
    let session = Session::begin_with(uffd, ledger, image, options(shared), metrics, share);
    Ok(session?)
}

/// Goes on with a session of another server.
fn go_on(
    shared: &Arc<SharedState>,
    watched: &Watched,
    ledger: &OwnedFd,
    uffd: &OwnedFd,
) -> serve::Result<Session> {
    let ledger = Ledger::of_file(ledger)?;
    if has_ended(&watched.connected.monitor) {
        return Err(serve::Error::Gone { pid: ledger.pid() });
    }
    let uffd: Uffd = uffd.try_clone().map_err(serve::Error::Descriptor)?.into();
    let (image, metrics) = (shared.image.clone(), shared.metrics.clone());
    Session::take_over(uffd, ledger, image, options(shared), metrics)
}

fn options(shared: &SharedState) -> Options {
    Options {
        unregister: shared.options.unregister,
        poison: shared.options.on_error == ErrorPolicy::Poison,
        everything: shared.options.prefetch == Prefetch::All,
    }
}

/// A session that is to be served.
fn live(
    shared: &SharedState,
    connected: &Connected,
    session: Session,
    stop: OwnedFd,
) -> std::result::Result<LiveSession, BeginError> {
    let monitor = connected.monitor.try_clone();
    let latest = session.ledger().noted();
    Ok(LiveSession {
        number: connected.number,
        pid: session.ledger().pid(),
        session,
        monitor: monitor.map_err(|error| {
            let what = format!("its monitor cannot be watched: {error}");
            BeginError::Failed(serve::Error::Unable(what))
        })?,
        latest: Mutex::new(match latest.is_empty() {
            true => shared.options.images.clone(),
            false => Images::from(PathBuf::from(OsString::from_vec(latest))),
        }),
        copying: LiveCopy::default(),
        writing: RwLock::new(()),
        stop,
        draining: AtomicBool::new(false),
        fetching: AtomicBool::new(false),
        is_short: AtomicBool::new(false),
        wanted: match shared.options.prefetch {
            Prefetch::Trace => shared.working_set.wanted(),
            Prefetch::None | Prefetch::All => Vec::new(),
        },
        aborted: AtomicBool::new(false),
        leaving: AtomicBool::new(false),
    })
}

/// How a session ends that did not fail.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SessionEnd {
    /// The machine needs nobody any more.
    Over,
    /// Another server is to go on with it.
    Left,
}

/// Pages that a thread has fetched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FetchStage {
    /// Pages that other machines wanted.
    Wanted,
    All,
}

/// Why a session ends that could go on.
const TOLD_TO_END: &str = "the server was told to end at once";

/// Answers faults until the monitor ends, or all is in and the session is to end.
fn serve_all<'scope>(
    scope: &'scope std::thread::Scope<'scope, '_>,
    live: &'scope Arc<LiveSession>,
    stopped: &OwnedFd,
    monitor: &OwnedFd,
) -> serve::Result<SessionEnd> {
    // Told by the fetchers: how it ended. The sender is kept, so that it is never hung up.
    let (sender, fetched) = std::sync::mpsc::channel::<(FetchStage, serve::Result<()>)>();
    let ended = Arc::new(AtomicBool::new(false));
    let (mut fetchers, mut finished) = (0, 0);
    let first = Arc::new(AtomicUsize::new(0));
    for _ in 0..FETCHERS.min(live.wanted.len()) {
        let (sender, ended, live) = (sender.clone(), ended.clone(), live.clone());
        let first = first.clone();
        scope.spawn(move || {
            let stopped = || ended.load(Relaxed);
            let done = live.session.fetch_wanted(&live.wanted, &first, &stopped);
            let _ = sender.send((FetchStage::Wanted, done));
            live.ring();
        });
    }
    let outcome = loop {
        if live.fetching.load(Relaxed) || live.draining.load(Relaxed) {
            for _ in fetchers..FETCHERS {
                let (sender, ended, live) = (sender.clone(), ended.clone(), live.clone());
                scope.spawn(move || {
                    let done = live.session.fetch(&|| ended.load(Relaxed));
                    let _ = sender.send((FetchStage::All, done));
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
        let all = outcomes.iter().filter(|(what, _)| *what == FetchStage::All);
        finished += all.count();
        let failed = outcomes.into_iter().filter_map(|(_, done)| done.err());
        if let Some(error) = { failed }.find_map(|error| live.bears(error)) {
            break Err(error);
        }
        if finished >= FETCHERS && live.is_short.swap(false, Relaxed) {
            // A page that could not come is tried again when all has to.
            live.fetching.store(false, Relaxed);
            live.session.fetch_again();
            (fetchers, finished) = (0, 0);
        }
        if live.aborted.load(Relaxed) {
            break Err(serve::Error::Unable(TOLD_TO_END.to_owned()));
        }
        // Until it is copied, writers wait for us.
        if live.copying.is_going_on() {
            continue;
        }
        if live.leaving.load(Relaxed) {
            break Ok(SessionEnd::Left);
        }
        let is_in = finished >= FETCHERS && live.draining.load(Relaxed);
        if is_in && !live.session.is_sharing() {
            break live.session.end().map(|()| SessionEnd::Over);
        }
    };
    ended.store(true, Relaxed);
    outcome
}

/// Kills a monitor and waits for its end: without us its missing pages would read as zeros.
fn kill(monitor: &OwnedFd) {
    match pidfd_send_signal(monitor, Signal::KILL) {
        Ok(()) => guard::wait_for_end(monitor),
        Err(Errno::SRCH) => {}
        Err(errno) => log::error!("it cannot be killed: {errno}"),
    }
}

/// Tells whether a process has ended.
fn has_ended(process: &OwnedFd) -> bool {
    guard::wait([Some(process.as_fd())], Some(std::time::Instant::now())).is_ok_and(|[ended]| ended)
}
