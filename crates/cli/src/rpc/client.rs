//! The client of a request, while a dump or a restore works for it: it is told of stages, and may
//! stop the work.
//!
//! The engine works in copies of this process where a tree has namespaces of its own. A copy never
//! speaks with the client. It leaves notes in a file in memory, which the process outside reads.

use std::fs::File;
use std::io::{self, Seek as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use process::{Stage, Statistics, Veto};
use prost::Message as _;
use rustix::fs::{MemfdFlags, memfd_create};
use rustix::process::Pid;

use crate::exit::Failure;
use crate::rpc::connection::{Connection, Packet};
use crate::rpc::fields;
use crate::rpc::messages::{Notification, RequestKind, Response};
use crate::rpc::notes::{DumpFacts, Note};
use crate::rpc::refusal::Refusal;
use crate::stage_listener::StageListener;

/// Client of a connection.
#[derive(Debug)]
pub struct Client {
    state: Mutex<State>,
    identity: Identity,
}

#[derive(Debug)]
struct State {
    /// None in a copy of this process that has left it.
    connection: Option<Connection>,
    /// A file in memory; none likewise.
    notes: Option<File>,
    request: Work,
}

/// What is known of the work on the current request.
#[derive(Debug, Default)]
struct Work {
    /// True if the client wants to hear of stages.
    notifies: bool,
    /// True if the tree of a dump runs afterwards.
    runs_on: bool,
    /// The root, once it is known.
    root: Option<Pid>,
    /// Scripts that were announced.
    announced: Vec<&'static str>,
    /// When the restore began, and how long it took until all tasks were there.
    began: Option<Instant>,
    forking: Duration,
}

/// Announcement of a stage under criu(8)'s name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Script {
    name: &'static str,
    has_pid: bool,
}

/// A process: its number, and the pid namespace in which that counts.
#[derive(Debug, PartialEq, Eq)]
struct Identity {
    namespace: Option<u64>,
    pid: u32,
}

impl Identity {
    fn own() -> Self {
        let namespace = sys::procfs::stat("self/ns/pid").ok();
        Self {
            namespace: namespace.map(|stat| stat.st_ino),
            pid: std::process::id(),
        }
    }
}

const fn script(name: &'static str) -> Script {
    Script {
        name,
        has_pid: false,
    }
}

const fn script_with_pid(name: &'static str) -> Script {
    Script {
        name,
        has_pid: true,
    }
}

const SETUP_NAMESPACES: Script = script_with_pid("setup-namespaces");
const POST_SETUP_NAMESPACES: Script = script("post-setup-namespaces");
const NETWORK_LOCK: Script = script("network-lock");
const NETWORK_UNLOCK: Script = script("network-unlock");

impl Work {
    /// The scripts that are due at a stage, in criu(8)'s order. The engine does not announce all of
    /// its stages: those that have passed are made up for.
    fn due(&self, stage: Stage) -> Vec<Script> {
        let scripts = match stage {
            Stage::PreDump => vec![script("pre-dump")],
            Stage::NetworkLock => vec![NETWORK_LOCK],
            Stage::PostFreeze => vec![NETWORK_LOCK, script("query-ext-files")],
            Stage::PostDump if self.runs_on && self.is_locked() => {
                vec![script("post-dump"), NETWORK_UNLOCK]
            }
            Stage::PostDump => vec![script("post-dump")],
            Stage::PreRestore => vec![script("pre-restore")],
            Stage::SetupNamespaces => vec![SETUP_NAMESPACES],
            Stage::PostSetupNamespaces => vec![POST_SETUP_NAMESPACES],
            Stage::PostRestore => vec![
                SETUP_NAMESPACES,
                POST_SETUP_NAMESPACES,
                script_with_pid("post-restore"),
                NETWORK_UNLOCK,
            ],
            Stage::NetworkUnlock => vec![NETWORK_UNLOCK],
            Stage::PreResume => vec![script("pre-resume")],
            Stage::PostResume => vec![script("post-resume")],
        };
        let is_new = |script: &Script| !self.announced.contains(&script.name);
        scripts.into_iter().filter(is_new).collect()
    }

    /// True if the client was told to lock the network, and not yet to unlock it.
    fn is_locked(&self) -> bool {
        let was_told = |script: Script| self.announced.contains(&script.name);
        was_told(NETWORK_LOCK) && !was_told(NETWORK_UNLOCK)
    }
}

impl Client {
    /// Begins to serve the client of a connection.
    ///
    /// # Errors
    /// The file for notes cannot be made.
    pub fn new(connection: Connection) -> io::Result<Self> {
        let notes = memfd_create("stillframe-notes", MemfdFlags::CLOEXEC)?;
        Ok(Self {
            state: Mutex::new(State {
                connection: Some(connection),
                notes: Some(notes.into()),
                request: Work::default(),
            }),
            identity: Identity::own(),
        })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins with the work on a request.
    ///
    /// # Errors
    /// The notes on an earlier one cannot be removed.
    pub fn begin(&self, notifies: bool, runs_on: bool) -> io::Result<()> {
        let mut state = self.state();
        if let Some(notes) = &mut state.notes {
            notes.set_len(0)?;
            notes.rewind()?;
        }
        state.request = Work {
            notifies,
            runs_on,
            ..Work::default()
        };
        Ok(())
    }

    /// Waits for a packet.
    ///
    /// # Errors
    /// Those of recvmsg(2).
    pub fn receive(&self) -> io::Result<Packet> {
        match &self.state().connection {
            Some(connection) => connection.receive(),
            None => Ok(Packet::End),
        }
    }

    /// Sends an answer.
    ///
    /// # Errors
    /// Those of sendmsg(2).
    pub fn send(&self, response: &Response) -> io::Result<()> {
        match &self.state().connection {
            Some(connection) => connection.send(response),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Returns the path of a directory that the client has open under this number.
    ///
    /// # Errors
    /// It is not open, or is no directory.
    pub fn directory(&self, number: i32) -> io::Result<PathBuf> {
        match &self.state().connection {
            Some(connection) => connection.directory(number),
            None => Err(io::ErrorKind::NotConnected.into()),
        }
    }

    /// Tells the client to unlock the network again after a dump that failed.
    pub fn unlock(&self) {
        let mut state = self.state();
        let State {
            connection: Some(connection),
            request,
            ..
        } = &mut *state
        else {
            return;
        };
        if request.is_locked() {
            request.announced.push(NETWORK_UNLOCK.name);
            if let Err(why) = announce(connection, NETWORK_UNLOCK, None) {
                log::warn!("{why}");
            }
        }
    }

    /// The root of the tree, as far as a stage has told.
    pub fn root(&self) -> Option<Pid> {
        self.state().request.root
    }

    /// How long it took until all tasks of a restored tree were there.
    pub fn forking(&self) -> Duration {
        self.state().request.forking
    }

    /// True in a copy of the process that has the client.
    pub fn is_copy(&self) -> bool {
        Identity::own() != self.identity
    }

    /// Notes why the work has failed.
    pub fn note_failure(&self, failure: &Failure) {
        self.note(&Refusal::of(failure).to_note());
    }

    fn note(&self, note: &Note) {
        let state = self.state();
        let written = state
            .notes
            .as_ref()
            .map(|mut notes| notes.write_all(&note.encode_to_vec()));
        if let Some(Err(error)) = written {
            log::warn!("cannot note the outcome for the client: {error}");
        }
    }

    /// Returns all notes on the work, by this process and its copies.
    pub fn notes(&self) -> Note {
        let state = self.state();
        let read = |notes: &File| {
            let length = notes.metadata().ok()?.len();
            let mut bytes = vec![0; usize::try_from(length).ok()?];
            notes.read_exact_at(&mut bytes, 0).ok()?;
            // Messages that follow each other are one message.
            Note::decode(&*bytes).ok()
        };
        state.notes.as_ref().and_then(read).unwrap_or_default()
    }
}

impl StageListener for Client {
    fn stage(&self, stage: Stage, root: Option<Pid>) -> Result<(), Veto> {
        let mut state = self.state();
        let State {
            connection,
            request,
            ..
        } = &mut *state;
        let Some(connection) = connection else {
            return Ok(());
        };
        request.root = root.or(request.root);
        match stage {
            Stage::PreRestore => request.began = Some(Instant::now()),
            Stage::PostRestore => {
                request.forking = request.began.map(|at| at.elapsed()).unwrap_or_default();
            }
            _ => {}
        }
        let told = match request.notifies {
            true => request.due(stage).into_iter().try_for_each(|script| {
                request.announced.push(script.name);
                announce(connection, script, request.root)
            }),
            false if connection.is_closed() => Err("the client is gone".to_owned()),
            false => Ok(()),
        };
        match told {
            Err(why) if stage == Stage::PostResume => log::warn!("{why}"),
            Err(why) => return Err(Veto(why)),
            Ok(()) => {}
        }
        Ok(())
    }

    fn note_dump(&self, statistics: &Statistics) {
        self.note(&Note {
            dump: Some(DumpFacts::new(statistics)),
            ..Note::default()
        });
    }

    fn leave(&self) {
        let mut state = self.state();
        state.connection = None;
        state.notes = None;
    }
}

/// Tells a client of a stage, and waits until it agrees.
fn announce(connection: &Connection, script: Script, root: Option<Pid>) -> Result<(), String> {
    let name = script.name;
    log::debug!("the client is told of {name}");
    let root = root.filter(|_| script.has_pid);
    let notification = Response {
        kind: RequestKind::Notify as i32,
        success: true,
        notify: Some(Notification {
            script: Some(name.to_owned()),
            pid: root.map(|root| root.as_raw_nonzero().get()),
        }),
        ..Response::default()
    };
    let sent = connection.send(&notification);
    sent.map_err(|error| format!("{name}: the client cannot be told: {error}"))?;
    let packet = connection.receive();
    let packet = packet.map_err(|error| format!("{name}: the client does not answer: {error}"))?;
    let bytes = match packet {
        Packet::Message(bytes) => bytes,
        Packet::TooLong(length) => return Err(format!("{name}: an answer of {length} bytes")),
        Packet::End => return Err(format!("{name}: the client is gone")),
    };
    let answer = fields::decode(&bytes).map_err(|why| format!("{name}: {why}"))?;
    match (
        RequestKind::try_from(answer.kind),
        answer.notify_success.unwrap_or_default(),
    ) {
        (Ok(RequestKind::Notify), true) => Ok(()),
        (Ok(RequestKind::Notify), false) => Err(format!("{name}: the client refuses")),
        _ => Err(format!("{name}: the client answers with another request")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn announced(stages: &[Stage], runs_on: bool) -> Vec<&'static str> {
        let mut work = Work {
            runs_on,
            ..Work::default()
        };
        for stage in stages {
            let due = work.due(*stage);
            work.announced.extend(due.iter().map(|script| script.name));
        }
        work.announced
    }

    #[test]
    fn a_dump_is_announced_in_order() {
        let stages = [Stage::PreDump, Stage::PostFreeze, Stage::PostDump];
        let kills = ["pre-dump", "network-lock", "query-ext-files", "post-dump"];
        assert_eq!(announced(&stages, false), kills);
        let runs = [&kills[..], &["network-unlock"]].concat();
        assert_eq!(announced(&stages, true), runs);
        let all = [
            Stage::PreDump,
            Stage::NetworkLock,
            Stage::PostFreeze,
            Stage::PostDump,
            Stage::NetworkUnlock,
        ];
        assert_eq!(announced(&all, true), runs);
    }

    #[test]
    fn a_round_of_memory_locks_no_network() {
        let stages = [Stage::PreDump, Stage::PostDump];
        assert_eq!(announced(&stages, true), ["pre-dump", "post-dump"]);
    }

    #[test]
    fn a_restore_is_announced_in_order_whatever_the_engine_leaves_out() {
        let few = [
            Stage::PreRestore,
            Stage::PostRestore,
            Stage::PreResume,
            Stage::PostResume,
        ];
        let all = [
            Stage::PreRestore,
            Stage::SetupNamespaces,
            Stage::PostSetupNamespaces,
            Stage::PostRestore,
            Stage::NetworkUnlock,
            Stage::PreResume,
            Stage::PostResume,
        ];
        let expected = [
            "pre-restore",
            "setup-namespaces",
            "post-setup-namespaces",
            "post-restore",
            "network-unlock",
            "pre-resume",
            "post-resume",
        ];
        assert_eq!(announced(&few, false), expected);
        assert_eq!(announced(&all, false), expected);
    }
}
