//! One monitor that is served.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::thread::Builder;

use image::{Reader, Seal};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use serve::{Difference, Options, Session, Target, Wanted};
use store::Images;

use super::handoff::{self, Refusal};
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
    /// The image that the next difference is over: that of the server, or the last difference.
    latest: Mutex<Images>,
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
        let _ = rustix::io::write(&self.stop, b"!");
    }

    /// Has the monitor killed.
    pub fn abort(&self) {
        self.aborted.store(true, Relaxed);
        let _ = rustix::io::write(&self.stop, b"!");
    }

    /// Writes what the machine, which must not run, has changed since the last difference, or the
    /// beginning, as an image in `dir`.
    ///
    /// # Errors
    /// Nothing is left in `dir` then, and the next difference has it all.
    pub fn diff(&self, shared: &Shared, dir: &Path, vmstate: Option<&Path>) -> Result<Difference> {
        let mut latest = lock(&self.latest);
        // An image that is written over must not change meanwhile.
        let _same = shared.working_set.lock();
        let state = vmstate.map(crate::import::read_state).transpose()?;
        let compress = shared.options.compress;
        let images = Images::from(std::path::absolute(dir).map_err(Error::file("find", dir))?);
        let writer = place::writer(&images, Some(&latest), shared.pages, compress)?;
        let difference = self.session.diff(&writer)?;
        if let Some(bytes) = state {
            let monitor = "firecracker".to_owned();
            writer.record(MonitorState { monitor, bytes }.record());
        }
        writer.seal(Seal {
            durable: false,
            facts: (shared.facts)(),
        })?;
        self.session.kept();
        *latest = images;
        Ok(difference)
    }

    /// Where the image is that the next difference is over.
    pub fn latest(&self) -> Images {
        lock(&self.latest).clone()
    }
}

/// Takes a monitor on, in a thread of its own.
pub(crate) fn attend(shared: &Arc<Shared>, connection: OwnedFd) {
    let number = shared.next.fetch_add(1, Relaxed);
    let name = format!("session-{number}");
    let own = shared.clone();
    let started = Builder::new().name(name).spawn(move || {
        let pidfd = match monitor(&connection) {
            Ok(pidfd) => pidfd,
            Err(error) => return log::warn!("session {number}: who is it? {error}"),
        };
        session(&own, number, &connection, pidfd.0, &pidfd.1);
    });
    if let Err(error) = started {
        log::warn!("session {number}: no thread can be made: {error}");
    }
}

/// Who is at the other end.
fn monitor(connection: &OwnedFd) -> io::Result<(i32, OwnedFd)> {
    let who = rustix::net::sockopt::socket_peercred(connection)?;
    let pidfd = pidfd_open(who.pid, PidfdFlags::empty())?;
    Ok((who.pid.as_raw_nonzero().get(), pidfd))
}

/// Serves a monitor until it ends, or the session does.
fn session(shared: &Arc<Shared>, number: u64, connection: &OwnedFd, pid: i32, monitor: &OwnedFd) {
    let pipe = match pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK) {
        Ok(pipe) => pipe,
        Err(errno) => return log::warn!("session {number}: {errno}"),
    };
    let (stopped, stop) = pipe;
    let begun = match begin(
        shared,
        number,
        connection,
        (pid, monitor),
        stopped.as_fd(),
        stop,
    ) {
        Ok(begun) => Arc::new(begun),
        Err(Begin::Refused(refusal)) => {
            shared.watchdog.forget(number);
            return log::warn!("session {number}: pid {pid} is refused: {refusal}");
        }
        Err(Begin::Failed(serve::Error::Gone { .. })) => {
            shared.watchdog.forget(number);
            return log::info!("session {number}: pid {pid} has ended");
        }
        // It may have been changed half: whoever waits in it would wait for ever.
        Err(Begin::Failed(error)) => {
            log::error!("session {number}: pid {pid} is killed: {}", told(&error));
            kill(monitor);
            return shared.watchdog.forget(number);
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
    shared.watchdog.forget(number);
    if shared.options.record {
        shared.working_set.add(shared, &begun.session.recorded());
    }
    shared.metrics.sessions.dec();
    lock(&shared.sessions).remove(&number);
    shared.ring();
}

/// Why a session did not begin.
enum Begin {
    Refused(String),
    Failed(serve::Error),
}

fn begin(
    shared: &Arc<Shared>,
    number: u64,
    connection: &OwnedFd,
    (pid, monitor): (i32, &OwnedFd),
    stopped: std::os::fd::BorrowedFd<'_>,
    stop: OwnedFd,
) -> std::result::Result<Live, Begin> {
    let refused = |refusal: Refusal| Begin::Refused(refusal.to_string());
    let handoff = handoff::receive(connection, stopped).map_err(refused)?;
    let regions = handoff::regions(&handoff.mappings, MEMORY, shared.pages);
    let regions = regions.map_err(Begin::Refused)?;
    let target = Target {
        uffd: handoff.uffd.into(),
        pid,
        regions,
    };
    // From here on the machine depends on us.
    if let Err(error) = shared.watchdog.add(number, monitor) {
        log::warn!("session {number}: the watchdog is gone: {error}");
    }
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
        latest: Mutex::new(shared.options.images.clone()),
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
            let _ = rustix::io::write(&live.stop, b"!");
        });
    }
    let outcome = loop {
        if live.fetching.load(Relaxed) || live.draining.load(Relaxed) {
            for _ in fetchers..FETCHERS {
                let (sender, ended, live) = (sender.clone(), ended.clone(), live.clone());
                scope.spawn(move || {
                    let done = live.session.fetch(&|| ended.load(Relaxed));
                    let _ = sender.send((Fetched::All, done));
                    let _ = rustix::io::write(&live.stop, b"!");
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
        if finished >= FETCHERS && live.draining.load(Relaxed) {
            break live.session.end();
        }
    };
    ended.store(true, Relaxed);
    outcome
}

fn kill(monitor: &OwnedFd) {
    if let Err(errno) = pidfd_send_signal(monitor, Signal::KILL) {
        log::error!("it cannot be killed: {errno}");
    }
}

/// An error with its causes.
pub(crate) fn told(error: &dyn std::error::Error) -> String {
    let mut line = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        line.push_str(&format!(": {error}"));
        cause = error.source();
    }
    line
}
