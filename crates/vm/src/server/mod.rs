//! A page server for microVMs: any number of monitors, each a session of its own over one image.

mod control;
mod copying;
mod handoff;
mod live;
mod watchdog;
mod working_set;

use std::collections::BTreeMap;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Acquire, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use image::{Cache, Compression, Reader};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::net::SocketType;
use rustix::pipe::{PipeFlags, pipe_with};
use serve::Metrics;
use store::Images;
use sys::listener::{self, Failure};

use crate::records::Records;
use crate::server::live::Live;
use crate::server::watchdog::{Told, Watchdog};
use crate::server::working_set::Kept;
use crate::{Error, Result, place};

/// Chunks of the image that are kept for all sessions.
const CACHE_BYTES: usize = 64 << 20;

/// What is brought in before anybody asks for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Prefetch {
    /// Nothing.
    #[default]
    None,
    /// What machines wanted that were served with [`ServeOptions::record`], in their order.
    Trace,
    /// Everything, in order.
    All,
}

/// What becomes of a machine whose page cannot be brought in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// Its monitor is killed.
    #[default]
    Kill,
    /// Who touches the page gets `SIGBUS`.
    Poison,
}

/// How machines are served.
#[derive(Clone, Debug)]
pub struct ServeOptions {
    /// Where the image is.
    pub images: Images,
    /// Where monitors connect.
    pub socket: PathBuf,
    /// Where the control socket is made.
    pub control: Option<PathBuf>,
    /// What is brought in early.
    pub prefetch: Prefetch,
    /// Whether what machines want is added to the image, for [`Prefetch::Trace`].
    pub record: bool,
    /// Whether pages that are empty or given up are left to the kernel.
    pub unregister: bool,
    /// What becomes of a machine whose page cannot be brought in.
    pub on_error: OnError,
    /// How pages of differences are compressed.
    pub compress: Option<Compression>,
}

/// What all threads of a server have in common.
pub(crate) struct Shared {
    options: ServeOptions,
    image: Arc<Reader>,
    pages: u64,
    sessions: Mutex<BTreeMap<u64, Arc<Live>>>,
    /// How many monitors have connected and are not done.
    attended: AtomicU64,
    /// No more monitors are taken on, and the server ends with the last session.
    draining: AtomicBool,
    /// Can be read from when that is so, and the other end, which it is told by.
    stopping: (OwnedFd, OwnedFd),
    /// Written to where somebody has to look around.
    bell: OwnedFd,
    metrics: Arc<Metrics>,
    watchdog: Watchdog,
    working_set: Kept,
    facts: fn() -> image::Facts,
}

/// Takes the lock; each holder leaves the value whole.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Has no more monitors taken on, and all sessions brought to an end: everything comes in.
    pub(crate) fn drain(&self) {
        if self.draining.swap(true, Relaxed) {
            return;
        }
        log::info!("draining: {} sessions", lock(&self.sessions).len());
        // Another server may have the place from here on.
        let _ = std::fs::remove_file(&self.options.socket);
        self.watchdog.drain();
        let _ = rustix::io::write(&self.stopping.1, b"!");
        lock(&self.sessions).values().for_each(|live| live.drain());
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
/// monitors are taken on, all memory is brought in, and the sessions end with that. Called by a
/// process that has one thread. `ready` is called when monitors can connect.
///
/// # Errors
/// Those of the image, and of the sockets. What goes wrong with a session ends that one alone.
pub fn serve(
    options: ServeOptions,
    facts: fn() -> image::Facts,
    ready: impl FnOnce(),
) -> Result<u64> {
    let (image, pages) = place::open(&options.images)?;
    let image = Arc::new(image.with_cache(Arc::new(Cache::new(CACHE_BYTES))));
    image.open_ancestors()?;
    let working_set = Kept::new(Records::of(&image, pages)?.wanted);
    if options.prefetch == Prefetch::Trace && working_set.wanted().is_empty() {
        log::warn!("the image has no working set: nothing is brought in early");
    }
    let kernel = |doing: &'static str| move |source: io::Error| Error::Kernel { doing, source };
    raise_open_files();
    let signals = control::signals().map_err(kernel("cannot hear signals"))?;
    let listener = listen(&options.socket)?;
    let control = options.control.as_deref();
    let control = control.map(listen).transpose()?;
    let watchdog = Watchdog::start(listener).map_err(kernel("cannot start a watchdog"))?;
    let pipe = || {
        let made = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK);
        made.map_err(|errno| kernel("cannot make a pipe")(errno.into()))
    };
    let (heard, bell) = pipe()?;
    let paths = [Some(options.socket.clone()), options.control.clone()];
    let shared = Arc::new(Shared {
        options,
        image,
        pages,
        sessions: Mutex::default(),
        attended: AtomicU64::new(0),
        draining: AtomicBool::new(false),
        stopping: pipe()?,
        bell,
        metrics: Arc::new(Metrics::new()),
        watchdog,
        working_set,
        facts,
    });
    let started = control::start(&shared, signals, control);
    started.map_err(kernel("cannot start the control thread"))?;
    ready();
    let served = attend_all(&shared, &heard);
    let [socket, control] = paths;
    // That of monitors is gone since the draining began, and may be another server's.
    let left = match shared.draining.load(Relaxed) {
        true => [None, control],
        false => [socket, control],
    };
    for path in left.into_iter().flatten() {
        let _ = std::fs::remove_file(path);
    }
    let served = served?;
    shared.watchdog.dismiss();
    Ok(served)
}

/// Each session has some descriptors.
fn raise_open_files() {
    if let Err(error) = sys::own::raise_open_files() {
        log::warn!("the limit of open files cannot be raised: {error}");
    }
}

/// Takes monitors on until the server is drained; how many there were.
fn attend_all(shared: &Arc<Shared>, heard: &OwnedFd) -> Result<u64> {
    let (mut served, mut last) = (0, false);
    loop {
        if last && shared.attended.load(Acquire) == 0 {
            return Ok(served);
        }
        let told = match last {
            true => PollFlags::empty(),
            false => PollFlags::IN,
        };
        let mut fds = [
            PollFd::from_borrowed_fd(heard.as_fd(), PollFlags::IN),
            PollFd::from_borrowed_fd(shared.watchdog.as_fd(), told),
        ];
        match poll(&mut fds, None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(errno) => {
                return Err(Error::Kernel {
                    doing: "cannot wait for monitors",
                    source: errno.into(),
                });
            }
        }
        let told = !last && !fds[1].revents().is_empty();
        let _ = rustix::io::read(heard, &mut [0; 64]);
        if !told {
            continue;
        }
        match shared.watchdog.next() {
            Told::Connected(connected) => {
                served += 1;
                live::attend(shared, connected);
            }
            Told::Last => {
                last = true;
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
