//! The server of lazy pages: takes tasks from restores, and brings their pages in.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread::Builder;

use guard::{Channel, List};
use image::{Blame, Reader, SpaceId, SpaceKind};
use serve::lazy::{Hooks, Process, Server, ServerEvent};
use sys::uffd::Uffd;

use super::watchdog::{self, Task, Watchdog};
use super::wire::{Message, MessageKind, mappings_of};
use crate::{Error, Result};

/// Threads that bring in what nobody has asked for yet.
const FETCHERS: usize = 2;

/// How restores find a server.
#[derive(Debug)]
pub(super) struct Listening<'a> {
    /// Where they connect.
    pub listener: &'a OwnedFd,
    /// The server ends, when all has come, once something can be read here.
    pub told: BorrowedFd<'a>,
    /// Whether it waits to be told; otherwise it ends when all has come that was asked for.
    pub stay: bool,
}

/// A restore and its tree.
struct Tree {
    owner: u64,
    /// The restore; none when it has ended.
    connection: Option<Channel>,
    /// A task of which not all packets are here.
    arriving: Option<List<Message>>,
    tasks: Vec<Task>,
    /// Whether pages are to come to some of them still.
    lacks: bool,
    /// Whether the restore has said that the tree runs.
    runs: bool,
}

/// All that the server has to do with.
struct Work {
    server: Arc<Server>,
    watchdog: Arc<Watchdog>,
    image: Arc<Reader>,
    trees: Vec<Tree>,
    /// How many there were.
    count: u64,
    /// Trees that are being killed.
    ending: Arc<AtomicUsize>,
    /// Whether somebody has told it to end.
    told: bool,
}

/// Serves the restore at the other end of `first`, or those that connect, the pages of `image`; how
/// many trees there were. Called by a process that has one thread; `log` is a descriptor that its
/// watchdog keeps.
///
/// # Errors
/// What kept the server from doing so; the trees are killed then. What goes wrong with one tree
/// ends that one alone.
pub(super) fn run(
    image: &Arc<Reader>,
    first: Option<Channel>,
    listening: Option<&Listening<'_>>,
    log: Option<RawFd>,
) -> Result<u64> {
    crate::alone::raise_open_files_to_the_hard_limit();
    let watchdog = Watchdog::start(log);
    let watchdog = watchdog.map_err(|e| Error::kernel("cannot start a watchdog", e))?;
    let watchdog = Arc::new(watchdog);
    let (held, done) = (watchdog.clone(), watchdog.clone());
    let hooks = Hooks {
        held: Box::new(move |number, owner, uffd| held.hold(number, owner, uffd)),
        done: Box::new(move |number| done.done(number)),
    };
    let server = Server::new(image.clone(), Arc::default(), hooks)?;
    let mut work = Work {
        server: Arc::new(server),
        watchdog,
        image: image.clone(),
        trees: Vec::new(),
        count: 0,
        ending: Arc::default(),
        told: false,
    };
    first.into_iter().for_each(|first| work.take_on(first));
    for number in 0..FETCHERS {
        let server = work.server.clone();
        let thread = Builder::new().name(format!("fetch-{number}"));
        // Without them pages come when they are touched.
        if let Err(error) = thread.spawn(move || server.fetch()) {
            log::warn!("no thread can be made: {error}");
        }
    }
    work.serve(listening)?;
    work.server.stop();
    work.watchdog.dismiss();
    Ok(work.count)
}

impl Work {
    fn take_on(&mut self, connection: Channel) {
        // A restore that does not read its answers keeps no other one waiting.
        if let Err(error) = connection.set_nonblocking() {
            log::warn!("a restore cannot be taken on: {error}");
            return;
        }
        self.count += 1;
        self.trees.push(Tree {
            owner: self.count,
            connection: Some(connection),
            arriving: None,
            tasks: Vec::new(),
            lacks: false,
            runs: false,
        });
    }

    /// Whether there is nothing to do any more, nor will be.
    fn is_over(&self, listening: Option<&Listening<'_>>) -> bool {
        let waits = listening.is_some_and(|one| !self.told && (one.stay || self.count == 0));
        !waits && self.trees.is_empty() && self.ending.load(Relaxed) == 0
    }

    fn serve(&mut self, listening: Option<&Listening<'_>>) -> Result<()> {
        while !self.is_over(listening) {
            let connections = self.trees.iter();
            let connections =
                connections.filter_map(|tree| Some((tree.owner, tree.connection.as_ref()?)));
            let (owners, mut watched): (Vec<u64>, Vec<BorrowedFd<'_>>) =
                connections.map(|(owner, fd)| (owner, fd.as_fd())).unzip();
            if let Some(listening) = listening.filter(|_| !self.told) {
                watched.extend([listening.listener.as_fd(), listening.told]);
            }
            match self.server.serve(&watched)? {
                ServerEvent::Ready(number) => match (owners.get(number), listening) {
                    (Some(owner), _) => self.hear(*owner),
                    (None, Some(listening)) if number == owners.len() => {
                        self.accept(listening.listener);
                    }
                    _ => {
                        log::info!("told to end: no more restores are served");
                        self.told = true;
                    }
                },
                ServerEvent::Whole(owner) => {
                    log::info!("tree {owner}: all pages have come");
                    self.watchdog.whole(owner);
                    if let Some(tree) = self.trees.iter_mut().find(|tree| tree.owner == owner) {
                        tree.lacks = false;
                    }
                }
                ServerEvent::Failed(owner, error) => self.fail(owner, error.into()),
                ServerEvent::Woken => {}
            }
            self.trees.retain(|tree| !tree.is_over());
        }
        Ok(())
    }

    fn accept(&mut self, listener: &OwnedFd) {
        match Channel::accept(listener) {
            Ok(client) => self.take_on(client),
            Err(error) => log::warn!("a restore cannot be taken on: {error}"),
        }
    }

    /// Hears what a restore says. What makes no sense ends the conversation.
    fn hear(&mut self, owner: u64) {
        let at = self.trees.iter().position(|tree| tree.owner == owner);
        let at = at.expect("it was just there");
        let connection = self.trees[at].connection.take();
        let Some(connection) = connection else { return };
        if self.converse(at, &connection) {
            self.trees[at].connection = Some(connection);
        } else {
            // The tree runs, or is killed: which is seen when its pages come.
            self.server.begin(owner);
        }
    }

    /// Hears one message; whether the conversation goes on.
    fn converse(&mut self, at: usize, connection: &Channel) -> bool {
        let owner = self.trees[at].owner;
        let (message, rights) = match connection.receive::<Message>() {
            Ok(Some(received)) => received,
            Ok(None) => return false,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return true,
            Err(error) => {
                log::warn!("tree {owner}: its restore is not understood: {error}");
                return false;
            }
        };
        match message.kind() {
            MessageKind::Task => match self.task(at, message, rights) {
                Ok(None) => true,
                Ok(Some(bytes)) => {
                    let taken = Message {
                        bytes,
                        ..Message::of(MessageKind::Taken)
                    };
                    connection.send(&taken, &[]).is_ok()
                }
                Err(error) => {
                    log::error!("tree {owner}: {}", error.with_causes());
                    tell_failure(connection, &error);
                    false
                }
            },
            MessageKind::Runs => {
                self.trees[at].runs = true;
                self.server.begin(owner);
                true
            }
            MessageKind::Taken | MessageKind::Failed | MessageKind::Unknown => false,
        }
    }

    /// Hears of a task, and takes it on when all of it has arrived; how much is to come then.
    fn task(&mut self, at: usize, message: Message, rights: Vec<OwnedFd>) -> Result<Option<u64>> {
        let unfit = |what: &str| Error::Unfit(what.to_owned());
        let failed = |error: io::Error| Error::kernel("cannot understand a restore", error);
        let tree = &mut self.trees[at];
        let packet = (message, rights);
        let mut list = match tree.arriving.take() {
            Some(mut list) => list.add(packet).map(|()| list).map_err(failed)?,
            None => List::new(packet),
        };
        if !list.is_whole() {
            tree.arriving = Some(list);
            return Ok(None);
        }
        let (message, rights) = list.finish();
        let mappings = mappings_of(&message.mappings).map_err(failed)?;
        if message.image != self.image.id().0 {
            return Err(unfit("the server of lazy pages has another image"));
        }
        let (pid, space) = (message.pid, SpaceId(message.space));
        let is_memory = |space: &image::Space| space.kind == SpaceKind::Memory;
        if !self.image.space(space).is_some_and(is_memory) {
            return Err(unfit("the image has no memory of such a task"));
        }
        let [uffd, pidfd] = <[OwnedFd; 2]>::try_from(rights)
            .map_err(|_| unfit("a task came without its descriptors"))?;
        let task = Task { pid, pidfd };
        self.watchdog.task(tree.owner, &task);
        tree.tasks.push(task);
        let process = Process {
            uffd: Uffd::from(uffd),
            pid,
            owner: tree.owner,
            space,
            mappings,
            first: message.first.into_iter().map(abi::Addr).collect(),
        };
        let bytes = self.server.add(process)?;
        tree.lacks |= bytes > 0;
        log::debug!("{bytes} bytes of process {pid} are to come");
        Ok(Some(bytes))
    }

    /// Kills a tree whose pages cannot come.
    fn fail(&mut self, owner: u64, error: Error) {
        let Some(at) = self.trees.iter().position(|tree| tree.owner == owner) else {
            return;
        };
        let tree = self.trees.swap_remove(at);
        let pids = tree.tasks.iter().map(|task| task.pid).collect::<Vec<_>>();
        log::error!(
            "pages of {pids:?} cannot come, so they are killed: {}",
            error.with_causes()
        );
        if let Some(connection) = &tree.connection {
            tell_failure(connection, &error);
        }
        let (server, watchdog, ending) = (
            self.server.clone(),
            self.watchdog.clone(),
            self.ending.clone(),
        );
        ending.fetch_add(1, Relaxed);
        let end = move || {
            watchdog::end(&tree.tasks, &|| server.is_gone(owner));
            for number in server.give_up(owner) {
                watchdog.done(number);
            }
            watchdog.whole(owner);
            ending.fetch_sub(1, Relaxed);
            server.wake();
        };
        if Builder::new().spawn(end).is_err() {
            // Its watchdog sees to it.
            log::error!("no thread can be made to kill them");
            std::process::abort();
        }
    }
}

impl Tree {
    /// Whether nothing is to be done for it any more: all has come, and its restore has ended or
    /// wants nothing else.
    fn is_over(&self) -> bool {
        !self.lacks && (self.runs || self.connection.is_none())
    }
}

fn tell_failure(connection: &Channel, error: &Error) {
    let failed = Message {
        text: error.with_causes(),
        damaged: error.blame() == Blame::Corrupt,
        ..Message::of(MessageKind::Failed)
    };
    // Where it has ended, the log has it.
    let _ = connection.send(&failed, &[]);
}
