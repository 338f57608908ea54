//! A page server for microVMs: any number of monitors, each a session of its own over one image.

mod control;
mod copying;
mod handoff;
mod keep;
mod live;
mod otlp;
mod otlp_message;
mod sharing;
mod watchdog;
mod watching;
mod working_set;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd, RawFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering::{Acquire, Relaxed, SeqCst};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::Builder;
use std::time::Duration;

use image::{Cache, Compression, Reader};
use prometheus_client::registry::Registry;
use rustix::net::SocketType;
use rustix::pipe::{PipeFlags, pipe_with};
use serve::{Metrics, Share};
use store::Images;
use sys::listener::{self, Failure};

use crate::records::Records;
use crate::server::keep::{Keeping, Left};
use crate::server::live::{Arrival, LiveSession};
pub use crate::server::otlp::Otlp;
use crate::server::watchdog::{Event, Watchdog};
use crate::server::watching::{Begin, Watched};
use crate::server::working_set::ServedWorkingSet;
use crate::{Error, Result, place};

/// Chunks of the image that are kept for all sessions.
const CACHE_BYTES: usize = 64 << 20;

/// Pages that are fetched before any fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefetch {
    /// Nothing.
    #[default]
    None,
    /// Pages that machines wanted under [`ServeOptions::record`], in their order.
    Trace,
    /// Everything, in order.
    All,
}

/// What becomes of a machine whose page cannot be brought in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ErrorPolicy {
    /// Its monitor is killed.
    #[default]
    Kill,
    /// Who touches the page gets `SIGBUS`.
    Poison,
}

/// What becomes of machines when the server ends that did not drain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExitPolicy {
    /// Their monitors are killed.
    #[default]
    Kill,
    /// They wait for another server, so long.
    Keep(Duration),
}

/// How machines are served.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Place of the image.
    pub images: Images,
    /// Socket of monitors.
    pub socket: PathBuf,
    /// Path of the control socket.
    pub control: Option<PathBuf>,
    /// What is brought in early.
    pub prefetch: Prefetch,
    /// True if what machines want is added to the image, for [`Prefetch::Trace`].
    pub record: bool,
    /// True if pages that are empty or given up are left to the kernel.
    pub unregister: bool,
    /// What becomes of a machine whose page cannot be brought in.
    pub on_error: ErrorPolicy,
    /// How pages of differences are compressed.
    pub compress: Option<Compression>,
    /// What becomes of machines when the server ends.
    pub on_exit: ExitPolicy,
    /// True if monitors are offered pages that they may share.
    pub share: bool,
    /// Socket of the watchdog that keeps another server's machines, to take them over.
    pub take_over: Option<PathBuf>,
    /// Collector of metrics.
    pub otlp: Option<Otlp>,
    /// The descriptor of the log, for the process that is there when the server is gone.
    pub log: Option<RawFd>,
}

/// State that all threads of a server share.
pub(crate) struct SharedState {
    options: ServeOptions,
    image: Arc<Reader>,
    pages: u64,
    sessions: Mutex<BTreeMap<u64, Arc<LiveSession>>>,
    /// How many monitors have connected and are not done.
    attended: AtomicU64,
    /// No more monitors are taken on, and the server ends with the last session.
    draining: AtomicBool,
    /// No more is done for any monitor: another server goes on.
    leaving: AtomicBool,
    /// Can be read from when either is so, and the other end, which it is told by.
    stopping: (OwnedFd, OwnedFd),
    /// Written to where somebody has to look around.
    bell: OwnedFd,
    metrics: Arc<Metrics>,
    /// The pages that machines have in common, where they may.
    share: Option<Arc<Share>>,
    watchdog: Watchdog,
    working_set: ServedWorkingSet,
    facts: fn() -> image::Facts,
}

/// Takes the lock; each holder leaves the value whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl SharedState {
    /// Tells whether sessions are left to another server when this one ends.
    pub(crate) fn keeps(&self) -> bool {
        self.options.on_exit != ExitPolicy::Kill
    }

    /// Leaves all sessions as they are, for another server: no difference is begun any more, and
    /// those that are being written are finished first.
    pub(crate) fn leave(&self) {
        if self.leaving.swap(true, SeqCst) {
            return;
        }
        let sessions = lock(&self.sessions).values().cloned().collect::<Vec<_>>();
        log::info!("leaving: {} sessions", sessions.len());
        sessions.iter().for_each(|live| live.wait_for_diff());
        let _ = rustix::io::write(&self.stopping.1, b"!");
        lock(&self.sessions).values().for_each(|live| live.leave());
        self.ring();
    }

    /// Has no more monitors taken on, and all sessions brought to an end: everything comes in.
    pub(crate) fn drain(&self) {
        if self.leaving.load(Relaxed) || self.draining.swap(true, Relaxed) {
            return;
        }
        log::info!("draining: {} sessions", lock(&self.sessions).len());
        // Another server may have the place from here on.
        let _ = std::fs::remove_file(&self.options.socket);
        self.watchdog.drain();
        let _ = rustix::io::write(&self.stopping.1, b"!");
        lock(&self.sessions).values().for_each(|live| live.drain());
    }

    /// The metrics as OpenMetrics text.
    fn metrics_text(&self, registry: &Registry) -> std::result::Result<String, std::fmt::Error> {
        let all = lock(&self.sessions)
            .values()
            .map(|live| live.session.progress())
            .collect::<Vec<_>>();
        self.metrics.progress(&all);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, registry)?;
        Ok(text)
    }

    /// Ends it at once; monitors that are not done are killed.
    fn abort(&self) {
        log::warn!("told to end twice: monitors are killed");
        lock(&self.sessions).values().for_each(|live| live.abort());
    }

    /// Has the main thread look around.
    fn ring(&self) {
        let _ = rustix::io::write(&self.bell, b"!");
    }
}

/// Serves until it is told to end (`SIGTERM`, `SIGINT`, or over the control socket): then no more
/// monitors are taken on, all memory is brought in, and the sessions end with that; or they are
/// left to another server as they are. Called by a process that has one thread. `ready` is called
/// when monitors can connect.
///
/// # Errors
/// Those of the image, and of the sockets; [`Error::Unfit`] where sessions of another server cannot
/// be taken over, which are left as they are. What goes wrong with a session ends that one alone.
pub fn serve(
    options: ServeOptions,
    facts: fn() -> image::Facts,
    ready: impl FnOnce(),
) -> Result<u64> {
    let (image, pages) = place::open(&options.images)?;
    let image = Arc::into_inner(image.reader).expect("nobody else has it yet");
    let image = Arc::new(image.with_cache(Arc::new(Cache::new(CACHE_BYTES))));
    image.open_ancestors()?;
    let working_set = ServedWorkingSet::new(Records::of(&image, pages)?.wanted);
    if options.prefetch == Prefetch::Trace && working_set.wanted().is_empty() {
        log::warn!("the image has no working set: nothing is brought in early");
    }
    if options.share && (options.on_exit != ExitPolicy::Kill || options.take_over.is_some()) {
        let what = "machines that share pages cannot be left to another server";
        return Err(Error::Unfit(what.to_owned()));
    }
    let share = options.share.then(|| Share::new(place::MEMORY, pages));
    let share = share.transpose()?.map(Arc::new);
    raise_open_files();
    let signals = control::signals().map_err(Error::kernel("cannot hear signals"))?;
    let (begin, control) = places(&options, &image)?;
    let started = Watchdog::start(begin, options.log);
    let (watchdog, watched) = started.map_err(Error::kernel("cannot start a watchdog"))?;
    let pipe = || {
        let made = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK);
        made.map_err(Error::kernel("cannot make a pipe"))
    };
    let (heard, bell) = pipe()?;
    let shared = Arc::new(SharedState {
        options,
        image,
        pages,
        sessions: Mutex::default(),
        attended: AtomicU64::new(0),
        draining: AtomicBool::new(false),
        leaving: AtomicBool::new(false),
        stopping: pipe()?,
        bell,
        metrics: Arc::new(Metrics::new()),
        share,
        watchdog,
        working_set,
        facts,
    });
    let kept = go_on(&shared, watched);
    let started = control::start(&shared, signals, control);
    started.map_err(Error::kernel("cannot start the control thread"))?;
    let otlp = shared.options.otlp.clone();
    let exporter = otlp.map(|otlp| otlp::start(&shared, otlp)).transpose()?;
    ready();
    let served = kept + attend_all(&shared, &heard)?;
    drop(exporter);
    shared.forget_places();
    match shared.leaving.load(SeqCst) {
        true => shared.watchdog.left(),
        false => shared.watchdog.dismiss(),
    }
    Ok(served)
}

/// Makes the places where the server is met, or takes those of another server over.
fn places(options: &ServeOptions, image: &Reader) -> Result<(Begin, Option<UnixListener>)> {
    let left = options.take_over.as_deref();
    let left = left
        .map(|path| keep::take(path, image.id(), &options.socket))
        .transpose()?;
    let rendezvous = keep::rendezvous_of(&options.socket);
    let (mut listener, mut place) = (None, None);
    let (mut next, mut watched, mut predecessor) = (1, Vec::new(), None);
    if let Some(left) = left {
        log::info!("{} sessions are taken over", left.watched.len());
        let Left {
            listener: theirs,
            rendezvous: met,
            ..
        } = left;
        listener = theirs;
        place = keep::is_at(&met, &rendezvous).then_some(met);
        (next, watched, predecessor) = (left.next, left.watched, Some(left.predecessor));
    }
    let listener = match listener {
        Some(listener) => listener,
        None => listen(&options.socket)?.into(),
    };
    let keeping = match options.on_exit {
        ExitPolicy::Kill => None,
        ExitPolicy::Keep(patience) => Some(Keeping {
            rendezvous: match place {
                Some(place) => place,
                None => keep::listen(&rendezvous)?,
            },
            patience,
            image: image.id(),
        }),
    };
    let control = options.control.as_deref().map(listen).transpose()?;
    let begin = Begin {
        listener,
        next,
        watched,
        keeping,
        predecessor,
    };
    Ok((begin, control))
}

/// Goes on with the sessions of another server; how many there are. Those that it had begun are
/// there then.
fn go_on(shared: &Arc<SharedState>, watched: Vec<Watched>) -> u64 {
    let count = watched.len() as u64;
    let (begun, all_begun) = channel();
    for one in watched {
        let sender = match one.depends {
            true => begun.clone(),
            // It may never hand anything over.
            false => channel().0,
        };
        live::attend(shared, Arrival::Kept(one), sender);
    }
    drop(begun);
    let _ = all_begun.recv();
    let own = keep::rendezvous_of(&shared.options.socket);
    if let Some(path) = &shared.options.take_over
        && !(shared.keeps() && is_same(path, &own))
    {
        // Nobody listens there any more.
        let _ = std::fs::remove_file(path);
    }
    count
}

fn is_same(one: &Path, other: &Path) -> bool {
    let [one, other] = [one, other].map(|path| std::fs::symlink_metadata(path).ok());
    let place = |data: std::fs::Metadata| (data.dev(), data.ino());
    one.map(place) == other.map(place)
}

impl SharedState {
    /// Removes the sockets at which nobody is met any more.
    fn forget_places(&self) {
        let options = &self.options;
        let rendezvous = self.keeps().then(|| keep::rendezvous_of(&options.socket));
        let (draining, leaving) = (self.draining.load(Relaxed), self.leaving.load(SeqCst));
        // That of monitors is gone since the draining began, and may be another server's.
        let socket = (!draining && !leaving).then(|| options.socket.clone());
        let rendezvous = rendezvous.filter(|_| !leaving);
        for path in [socket, rendezvous, options.control.clone()]
            .into_iter()
            .flatten()
        {
            let _ = std::fs::remove_file(path);
        }
    }
}

/// Each session has some descriptors.
fn raise_open_files() {
    if let Err(error) = sys::own::raise_open_files() {
        log::warn!("the limit of open files cannot be raised: {error}");
    }
}

/// Takes monitors on until the server is drained, or leaves; how many there were.
fn attend_all(shared: &Arc<SharedState>, heard: &OwnedFd) -> Result<u64> {
    let (mut served, mut last, mut deaf) = (0, false, false);
    loop {
        // Who connects then is the next server's.
        let leaving = shared.leaving.load(SeqCst);
        if (last || leaving) && shared.attended.load(Acquire) == 0 {
            return Ok(served);
        }
        let watchdog = (!deaf && !leaving).then(|| shared.watchdog.as_fd());
        let ready = guard::wait([Some(heard.as_fd()), watchdog], None);
        let [_, told] = ready.map_err(Error::kernel("cannot wait for monitors"))?;
        let _ = rustix::io::read(heard, &mut [0; 64]);
        if !told {
            continue;
        }
        match shared.watchdog.next() {
            Event::Connected(connected) => {
                served += 1;
                live::attend(shared, Arrival::New(connected), channel().0);
            }
            Event::Leave => {
                let own = shared.clone();
                let left = Builder::new().name("leave".to_owned());
                if let Err(error) = left.spawn(move || own.leave()) {
                    log::error!("no thread can be made to leave: {error}");
                }
            }
            Event::Last => {
                last = true;
                shared.drain();
            }
            Event::Gone => {
                (last, deaf) = (true, true);
                shared.drain();
            }
        }
    }
}

/// Listens on a socket of the file system, for this user alone.
fn listen(path: &Path) -> Result<UnixListener> {
    let listener = listener::listen_at(path, SocketType::STREAM, 128);
    let listener = listener.map_err(|failure| match failure {
        Failure::Taken => Error::Unfit(format!("somebody else listens on {}", path.display())),
        Failure::Call(doing, errno) => Error::file::<io::Error>(doing, path)(errno.into()),
    });
    listener.map(UnixListener::from)
}
