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
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use abi::{Addr, Span};
use guard::{Channel, Helper};
use image::{ImageId, Reader, SpaceId};
use rustix::io::Errno;
use rustix::net::SocketType;
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use store::Images;
use sys::listener::{self, Failure};
use sys::uffd::{Features, Modes, Uffd};

use self::server::Listening;
use self::wire::{Message, MessageKind};
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
    channel: Mutex<Channel>,
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
        let channel = match find(&lazy.socket)? {
            Some(channel) => channel,
            None => start(images, reader, lazy.log)?,
        };
        Ok(Self {
            channel: Mutex::new(channel),
            image: reader.id(),
            bytes: AtomicU64::new(0),
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
        let task = Message {
            image: self.image.0.to_vec(),
            pid,
            space: space.0,
            mappings: wire::numbers_of(mappings),
            first: first.iter().map(|addr| addr.0).collect(),
            ..Message::of(MessageKind::Task)
        };
        let channel = self.channel();
        let rights = [uffd.as_fd(), pidfd.as_fd()];
        channel.send_list(&task, &rights).map_err(gone)?;
        match channel.receive::<Message>().map_err(gone)? {
            Some((answer, _)) if answer.kind() == MessageKind::Taken => {
                self.bytes.fetch_add(answer.bytes, Relaxed);
                Ok(())
            }
            Some((answer, _)) if answer.kind() == MessageKind::Failed => Err(refusal(answer)),
            _ => Err(gone(io::ErrorKind::UnexpectedEof.into())),
        }
    }

    fn channel(&self) -> MutexGuard<'_, Channel> {
        self.channel.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says that the tree runs: the server may end when all has come.
    ///
    /// # Errors
    /// [`Error::Kernel`] where it is gone.
    pub fn runs(&self) -> Result<()> {
        let sent = self.channel().send(&Message::of(MessageKind::Runs), &[]);
        sent.map_err(|e| Error::kernel("the server of lazy pages is gone", e))
    }

    /// What became of the tree's pages; called when the tree, or its root, has ended.
    ///
    /// # Errors
    /// Why it was killed, if that was because of them.
    pub fn outcome(&self) -> Result<()> {
        match self.channel().receive_now::<Message>() {
            Ok(Some((message, _))) if message.kind() == MessageKind::Failed => {
                Err(refusal(message))
            }
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

/// The error for pages that do not come, as the server tells it.
fn refusal(message: Message) -> Error {
    Error::Pages {
        text: message.text,
        damaged: message.damaged,
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
fn find(path: &Path) -> Result<Option<Channel>> {
    Channel::connect(path).map_err(|error| {
        let is_other = error.raw_os_error().is_none();
        let doing = if is_other { "trust" } else { "connect to" };
        Error::kernel(format!("cannot {doing} {}", path.display()), error)
    })
}

/// Leaves a server behind for one restore. It has what the reader of the image knows and has open,
/// where that is in files; otherwise it opens the image itself.
fn start(images: &Images, reader: &Arc<Reader>, log: Option<RawFd>) -> Result<Channel> {
    let started = |e: io::Error| Error::kernel("cannot start a server of lazy pages", e);
    let open_files = reader.descriptors();
    let directory = images.directory().map(std::path::absolute).transpose();
    let trusted = !matches!(images, Images::Own(_));
    let directory = directory.map_err(started)?;
    if open_files.is_none() && directory.is_none() {
        let what = "lazy pages of an image that is in no directory need a server of their own";
        return Err(Error::Unfit(what.to_owned()));
    }
    let files = open_files.iter().flatten().map(AsFd::as_fd);
    let helper = Helper::new(c"stillframe-lazy").keep(files).log(log);
    let left = helper.leave(|channel| {
        let image = match (&open_files, directory) {
            (None, Some(directory)) => reopen(&Images::at(&directory, trusted), reader.id()),
            _ => Ok(reader.clone()),
        };
        let served = image.and_then(|image| server::run(&image, Some(channel), None, log));
        if let Err(error) = served {
            log::error!("lazy pages: {}", error.with_causes());
        }
    });
    left.map_err(started)
}

/// Opens the image once more.
fn reopen(images: &Images, id: ImageId) -> Result<Arc<Reader>> {
    let image = open(images)?;
    match image.id() == id {
        true => Ok(image),
        false => Err(Error::Unfit("the image was replaced".to_owned())),
    }
}
