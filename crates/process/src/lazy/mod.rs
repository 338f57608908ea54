//! Lazy pages: a restored tree runs before its memory has come.
//!
//! Its private anonymous memory is registered with userfaultfds, which go to a server: one that the
//! restore leaves behind, or one that stands already (`lazy-pages`). That brings in what the tree
//! touches, and everything else beside that. While it does, somebody else holds the userfaultfds
//! too ([`watchdog`]): a page that does not come kills the tree, and never reads as something else.

mod server;
mod watchdog;
mod wire;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};

use abi::{Addr, Span};
use freeze::packets;
use freeze::tracker::is_trusted;
use image::{ImageId, Reader, SpaceId};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with, socketpair,
};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use store::Images;
use sys::listener::{self, Failure};
use sys::uffd::{Features, Modes, Uffd};

use self::server::Listening;
use self::wire::{Said, What};
use crate::{Error, Result};

/// How a restore has pages brought in later.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LazyPages {
    /// Where a server may listen ([`serve_lazy_pages`]); where none does, the restore leaves one
    /// behind, for which the image has to be in files.
    pub socket: PathBuf,
    /// The descriptor that the log is written to, which such a server keeps.
    pub log: Option<RawFd>,
}

/// What [`serve_lazy_pages`] is asked to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LazyPagesOptions {
    /// Where the image is.
    pub images: Images,
    /// Where restores connect; a socket that nobody listens on is replaced.
    pub socket: PathBuf,
    /// Whether the server goes on when all has come that was asked for.
    pub stay: bool,
    /// The descriptor that the log is written to.
    pub log: Option<RawFd>,
}

/// Brings pages in to the trees of all restores that connect (`restore --lazy-pages`); how many
/// there were. It ends when all has come to at least one, or where it is to stay, once something
/// can be read from `told`. `ready` is called when restores can connect. Called by a process that
/// has one thread.
///
/// # Errors
/// Those of the image and of the socket. A page that cannot be brought in ends that tree alone.
pub fn serve_lazy_pages(
    options: &LazyPagesOptions,
    told: BorrowedFd<'_>,
    ready: impl FnOnce(),
) -> Result<u64> {
    let image = open(&options.images)?;
    let listener = listen_at(&options.socket)?;
    ready();
    let listening = Listening {
        listener: &listener,
        told,
        stay: options.stay,
    };
    let served = server::run(&image, None, Some(&listening), options.log);
    let _ = std::fs::remove_file(&options.socket);
    served
}

fn open(images: &Images) -> Result<Arc<Reader>> {
    let store = images.open().map_err(image::Error::Place)?;
    let reader = Reader::open(&*store)?;
    crate::ImageKind::check_tree(&reader)?;
    reader.open_ancestors()?;
    Ok(Arc::new(reader))
}

fn socket() -> io::Result<OwnedFd> {
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    Ok(socket_with(family, kind, SocketFlags::CLOEXEC, None)?)
}

/// Listens at `path`, for this user alone.
fn listen_at(path: &Path) -> Result<OwnedFd> {
    let shown = path.display();
    listener::listen_at(path, SocketType::SEQPACKET, 64).map_err(|failure| match failure {
        Failure::Taken => Error::Unfit(format!("somebody else listens on {shown}")),
        Failure::Call(doing, errno) => Error::kernel(format!("cannot {doing} {shown}"), errno),
    })
}

/// A restore's conversation with the server of its pages.
#[derive(Debug)]
pub(crate) struct Client {
    /// One task at a time is handed over.
    socket: Mutex<OwnedFd>,
    image: ImageId,
    /// What is to come.
    bytes: AtomicU64,
}

impl Client {
    /// Finds a server, or leaves one behind. Called by a process that has one thread.
    ///
    /// # Errors
    /// [`Error::Kernel`]; [`Error::Unfit`] for an image that another process cannot open.
    pub fn new(lazy: &LazyPages, images: &Images, reader: &Arc<Reader>) -> Result<Self> {
        let socket = match find(&lazy.socket)? {
            Some(socket) => socket,
            None => start(images, reader, lazy.log)?,
        };
        let socket = Mutex::new(socket);
        let bytes = AtomicU64::new(0);
        Ok(Self {
            socket,
            image: reader.id(),
            bytes,
        })
    }

    /// Has the pages of `mappings` of a task, whose memory is `space` of the image, come when they
    /// are touched, those around `first` before others.
    ///
    /// # Errors
    /// [`Error::Kernel`], [`Error::Memory`]; [`Error::Unfit`] where the server has another image.
    pub fn hand_over(
        &self,
        (pid, space): (i32, SpaceId),
        uffd: &Uffd,
        mappings: &[Span],
        first: &[Addr],
    ) -> Result<()> {
        register(pid, uffd, mappings)?;
        let gone = |e: io::Error| Error::kernel("the server of lazy pages is gone", e);
        let pidfd = Pid::from_raw(pid).ok_or(Errno::SRCH);
        let pidfd = pidfd.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()));
        let pidfd = pidfd.map_err(|_| Error::Gone { pid })?;
        let said = Said {
            what: What::Task as i32,
            image: self.image.0.to_vec(),
            pid,
            space: space.0,
            first: first.iter().map(|addr| addr.0).collect(),
            ..Said::default()
        };
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let rights = [uffd.as_fd(), pidfd.as_fd()];
        wire::send_task(&*socket, said, mappings, &rights).map_err(gone)?;
        match packets::receive::<Said>(&*socket).map_err(gone)? {
            Some((said, _)) if said.what() == What::Taken => {
                self.bytes.fetch_add(said.bytes, Relaxed);
                Ok(())
            }
            Some((said, _)) if said.what() == What::Failed => Err(refused(said)),
            _ => Err(gone(io::ErrorKind::UnexpectedEof.into())),
        }
    }

    /// Says that the tree runs: the server may end when all has come.
    ///
    /// # Errors
    /// [`Error::Kernel`] where it is gone.
    pub fn runs(&self) -> Result<()> {
        let said = Said {
            what: What::Runs as i32,
            ..Said::default()
        };
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = packets::send(&*socket, &said, &[]);
        sent.map_err(|e| Error::kernel("the server of lazy pages is gone", e))
    }

    /// What became of the tree's pages; called when the tree, or its root, has ended.
    ///
    /// # Errors
    /// Why it was killed, if that was because of them.
    pub fn outcome(&self) -> Result<()> {
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        let mut ready = [rustix::event::PollFd::new(
            &*socket,
            rustix::event::PollFlags::IN,
        )];
        let now = rustix::event::Timespec::default();
        let polled = rustix::io::retry_on_intr(|| rustix::event::poll(&mut ready, Some(&now)));
        if !matches!(polled, Ok(1..)) {
            return Ok(());
        }
        match packets::receive::<Said>(&*socket) {
            Ok(Some((said, _))) if said.what() == What::Failed => Err(refused(said)),
            _ => Ok(()),
        }
    }
}

/// Memory of a restored tree that is still to come.
#[derive(Debug)]
pub struct Lazy {
    client: Client,
    /// How many bytes were to come when the restore ended.
    pub bytes: u64,
}

impl Lazy {
    pub(crate) fn new(client: Client) -> Self {
        let bytes = client.bytes.load(Relaxed);
        Self { client, bytes }
    }

    /// Tells, when the root task has ended, whether it was killed because its memory did not come.
    ///
    /// # Errors
    /// [`Error::Pages`] if it was.
    pub fn outcome(&self) -> Result<()> {
        self.client.outcome()
    }
}

/// What the server has said of pages that do not come.
fn refused(said: Said) -> Error {
    Error::Pages {
        text: said.text,
        damaged: said.damaged,
    }
}

/// Has missing pages of `mappings` told, and what becomes of these.
fn register(pid: i32, uffd: &Uffd, mappings: &[Span]) -> Result<()> {
    let wanted = Features::EVENT_FORK
        | Features::EVENT_REMAP
        | Features::EVENT_REMOVE
        | Features::EVENT_UNMAP;
    let refused = |e| {
        let doing = format!("cannot follow the memory of {pid} (needs CAP_SYS_PTRACE)");
        Error::kernel(doing, e)
    };
    uffd.api(wanted).map_err(refused)?;
    for span in abi::spans::Spans::of(mappings.iter().copied()) {
        let registered = uffd.register(span, Modes::MISSING);
        registered.map_err(|e| Error::kernel(format!("cannot register {span} of {pid}"), e))?;
    }
    Ok(())
}

/// The server that listens at `path`; none where nobody does.
fn find(path: &Path) -> Result<Option<OwnedFd>> {
    let failed = |doing: &str| {
        let doing = format!("cannot {doing} {}", path.display());
        move |errno: Errno| Error::kernel(doing, errno)
    };
    let Ok(address) = SocketAddrUnix::new(path) else {
        // No socket has such a long name.
        return Ok(None);
    };
    let socket = socket().map_err(|e| Error::kernel("cannot make a socket", e))?;
    match connect(&socket, &address) {
        Err(Errno::CONNREFUSED | Errno::NOENT) => return Ok(None),
        other => other.map_err(failed("connect to"))?,
    }
    if !is_trusted(&socket) {
        return Err(failed("trust")(Errno::PERM));
    }
    Ok(Some(socket))
}

/// Leaves a server behind for one restore. It has what the reader of the image knows and has open,
/// where that is in files; otherwise it opens the image itself.
fn start(images: &Images, reader: &Arc<Reader>, log: Option<RawFd>) -> Result<OwnedFd> {
    let started = |e: io::Error| Error::kernel("cannot start a server of lazy pages", e);
    let (family, kind) = (AddressFamily::UNIX, SocketType::SEQPACKET);
    let (theirs, own) = socketpair(family, kind, SocketFlags::CLOEXEC, None)
        .map_err(|errno| started(errno.into()))?;
    log::logger().flush();
    let open_files = reader.descriptors();
    let directory = images.directory().map(std::path::absolute).transpose();
    let trusted = !matches!(images, Images::Own(_));
    let directory = directory.map_err(started)?;
    if open_files.is_none() && directory.is_none() {
        let what = "lazy pages of an image that is in no directory need a server of their own";
        return Err(Error::Unfit(what.to_owned()));
    }
    let kept = [Some(theirs.as_raw_fd()), log].into_iter().flatten();
    let files = open_files.iter().flatten().map(AsRawFd::as_raw_fd);
    let kept = kept.chain(files).collect::<Vec<_>>();
    // The watchdog keeps this name.
    sys::fork::daemonize(&kept, c"stillframe-lzwd", || {
        if log.is_none() {
            log::set_max_level(log::LevelFilter::Off);
        }
        let image = match (open_files, directory) {
            (None, Some(directory)) => reopen(&Images::at(&directory, trusted), reader.id()),
            _ => Ok(reader.clone()),
        };
        let served = image.and_then(|image| server::run(&image, Some(theirs), None, log));
        if let Err(error) = served {
            log::error!("lazy pages: {}", error.with_causes());
        }
        log::logger().flush();
    })
    .map_err(started)?;
    Ok(own)
}

/// Opens the image once more.
fn reopen(images: &Images, id: ImageId) -> Result<Arc<Reader>> {
    let image = open(images)?;
    match image.id() == id {
        true => Ok(image),
        false => Err(Error::Unfit("the image was replaced".to_owned())),
    }
}
