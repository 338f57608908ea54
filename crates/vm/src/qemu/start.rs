//! One QEMU on its way from a command line to a guest that runs.

use std::ffi::{CString, OsString};
use std::fs::{self, File};
use std::io::{Read as _, Seek as _, SeekFrom};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use guard::UndoList;
use rustix::fs::{Mode, OFlags};
use rustix::net::SocketType;
use rustix::process::{Pid, Signal, WaitOptions, pidfd_send_signal, waitpid};
use serde::Deserialize;
use serde_json::{Value, json};
use sys::launch::{self, Launched, Program, User};
use sys::listener::{Failure, listen_at};

use super::command::{self, Change, Memory};
use super::own_disks::MachineDisks;
use super::processors;
use super::qmp::{Qmp, Version};
use super::record::QemuMachine;
use super::watchdog::set;
use crate::{Error, Result};

/// Capabilities of the migration by which it gets its state.
const CAPABILITIES: [&str; 2] = ["x-ignore-shared", "events"];

/// How much of what QEMU said is told.
const TOLD_BYTES: u64 = 1 << 10;

/// How a machine is started.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    /// The program's file.
    pub program: &'a Path,
    /// Its arguments, with the clone's number and name in them.
    pub words: Vec<String>,
    pub environment: &'a [CString],
    /// Its user, where that is not this process's.
    pub user: Option<&'a User>,
    /// Its working directory.
    pub folder: &'a Path,
    /// Name of the machine.
    pub name: &'a str,
    /// True if QEMU is told so.
    pub rename: bool,
    /// Directory of its socket and its log.
    pub sockets: &'a Path,
    /// The machine's memory: backend, length in bytes, file.
    pub memory: &'a [(String, u64, OwnedFd)],
    /// True if what it writes stays its own.
    pub private: bool,
    /// How long QEMU may take to answer.
    pub patience: Duration,
}

/// A QEMU that was started; dropped, it is killed.
#[derive(Debug)]
pub(crate) struct QemuProcess {
    launched: Option<Launched>,
    qmp: Qmp,
    /// Socket of its monitor.
    pub socket: PathBuf,
    /// Its output.
    pub log: PathBuf,
    /// The disks that were made for it.
    pub disks: MachineDisks,
    /// Descriptor from which it reads the state of its devices.
    state: i32,
    /// Questions that it has not answered yet.
    asked: Vec<(&'static str, u64)>,
}

impl QemuProcess {
    /// Starts QEMU, without waiting for it. `state`: a descriptor of its own of what it is to read.
    ///
    /// # Errors
    /// [`Error::Unfit`] for a command line that cannot be, [`Error::File`], [`Error::Kernel`].
    pub fn new(
        plan: &Plan<'_>,
        disks: MachineDisks,
        state: &OwnedFd,
        undo: &UndoList,
    ) -> Result<Self> {
        let socket = plan.sockets.join(format!("{}.qmp", plan.name));
        let listener =
            listen_at(&socket, SocketType::STREAM, 8).map_err(|failure| match failure {
                Failure::Taken => {
                    Error::Unfit(format!("somebody listens at {} already", socket.display()))
                }
                Failure::Call(doing, errno) => Error::file(doing, &socket)(errno),
            })?;
        let listens = MonitorSocket { socket, listener };
        listens.clear_with(undo)?;
        Self::at(&listens, plan, disks, state, undo).inspect_err(|_| {
            let _ = fs::remove_file(&listens.socket);
        })
    }

    fn at(
        listens: &MonitorSocket,
        plan: &Plan<'_>,
        disks: MachineDisks,
        state: &OwnedFd,
        undo: &UndoList,
    ) -> Result<Self> {
        let MonitorSocket { socket, listener } = listens;
        let log = plan.sockets.join(format!("{}.log", plan.name));
        let said = new_log(&log)?;
        let mut qmp = Qmp::connect(socket)?;
        qmp.patience = plan.patience;
        let memory = plan.memory.iter();
        let memory = memory.map(|(backend, bytes, file)| Memory {
            backend: backend.clone(),
            bytes: *bytes,
            descriptor: file.as_raw_fd(),
        });
        let how = Change {
            memory: &memory.collect::<Vec<_>>(),
            private: plan.private,
            monitor: listener.as_raw_fd(),
            name: plan.rename.then_some(plan.name),
        };
        let words = command::change(&plan.words, &how).map_err(Error::Unfit)?;
        log::debug!("{}: {words:?}", plan.name);
        let launched = launch(plan, &words, listener, &said, state, undo)?;
        Ok(Self {
            launched: Some(launched),
            qmp,
            socket: socket.clone(),
            log,
            disks,
            state: state.as_raw_fd(),
            asked: Vec::new(),
        })
    }

    pub fn pid(&self) -> i32 {
        let launched = self.launched.as_ref().expect("only drop takes it");
        launched.pid.as_raw_nonzero().get()
    }

    pub fn process(&self) -> BorrowedFd<'_> {
        let launched = self.launched.as_ref().expect("only drop takes it");
        launched.process.as_fd()
    }

    /// Waits until QEMU answers, which may take it twice as long as any other answer, and refuses
    /// one that cannot take the machine.
    ///
    /// # Errors
    /// [`Error::Unfit`], those of [`Qmp::call`].
    pub fn greet(&mut self, machine: &QemuMachine) -> Result<()> {
        let greeted = self.qmp.greet(self.qmp.patience * 2);
        let version = greeted.map_err(|error| self.explain(error, machine))?;
        check_version(version, machine)?;
        let with = json!({"path": "/machine", "property": "type"});
        let kind = self.qmp.ask("qom-get", with)?;
        let saved = machine.processors.clone().unwrap_or_default();
        let asked = processors::ask(&mut self.qmp, &saved.path)?;
        let kind: String = self.qmp.told("qom-get", kind)?;
        let own = processors::told(&mut self.qmp, &saved.path, &asked)?;
        let kind = kind.strip_suffix("-machine").unwrap_or(&kind);
        if kind != machine.machine {
            return Err(Error::Unfit(format!(
                "the image is of a machine {}, and QEMU was started with {kind}",
                machine.machine
            )));
        }
        processors::check(&saved, &own)?;
        let capabilities = CAPABILITIES.map(|name| (name.to_owned(), true));
        set(&mut self.qmp, &capabilities)
    }

    /// Has QEMU begin to read the state of its devices. The memory must be whole.
    ///
    /// # Errors
    /// Those of [`Qmp::call`].
    pub fn load(&mut self, machine: &QemuMachine) -> Result<()> {
        let with = json!({ "uri": format!("fd:{}", self.state) });
        let begun = self.qmp.call::<Value>("migrate-incoming", with);
        begun
            .map(drop)
            .map_err(|error| self.explain(error, machine))
    }

    /// Waits until it has.
    ///
    /// # Errors
    /// [`Error::Gone`] with what QEMU said of a state that it cannot take.
    pub fn loaded(&mut self, machine: &QemuMachine) -> Result<()> {
        let end = self.qmp.end_of_migration(self.qmp.patience);
        match end.map_err(|error| self.explain(error, machine))?.as_str() {
            "completed" => {
                // What is migrated later is migrated whole.
                let off = CAPABILITIES.map(|name| json!({"capability": name, "state": false}));
                self.ask("migrate-set-capabilities", json!({ "capabilities": off }))
            }
            _ => Err(self.explain(
                Error::Gone("QEMU cannot take the state of the devices".to_owned()),
                machine,
            )),
        }
    }

    /// Tells the guest to run, without waiting for it: where there are many, those that run leave
    /// little of the processors to those that wait.
    ///
    /// # Errors
    /// Those of [`Qmp::ask`].
    pub fn begin_run(&mut self) -> Result<()> {
        self.ask("cont", json!({}))
    }

    fn ask(&mut self, command: &'static str, with: Value) -> Result<()> {
        let number = self.qmp.ask(command, with)?;
        self.asked.push((command, number));
        Ok(())
    }

    /// Waits until the guest runs.
    ///
    /// # Errors
    /// Those of [`Qmp::call`].
    pub fn run(&mut self, machine: &QemuMachine) -> Result<()> {
        #[derive(Deserialize)]
        struct Status {
            running: bool,
            status: String,
        }
        for (command, number) in std::mem::take(&mut self.asked) {
            let answered = self.qmp.answered(command, number);
            answered.map_err(|error| self.explain(error, machine))?;
        }
        if self.qmp.resumed {
            return Ok(());
        }
        let status: Status = self.qmp.call("query-status", json!({}))?;
        match status.running {
            true => Ok(()),
            false => Err(self.explain(
                Error::Gone(format!("the guest does not run: {}", status.status)),
                machine,
            )),
        }
    }

    /// One that waits, as somebody else has started and greeted it.
    pub fn waiting(
        (pid, process): (Pid, OwnedFd),
        qmp: OwnedFd,
        (socket, log): (PathBuf, PathBuf),
        disks: MachineDisks,
        state: i32,
    ) -> Self {
        Self {
            launched: Some(Launched { pid, process }),
            qmp: Qmp::greeted(qmp, &socket),
            socket,
            log,
            disks,
            state,
            asked: Vec::new(),
        }
    }

    /// Returns the descriptor, of its own, from which it reads the state of its devices.
    pub const fn state(&self) -> i32 {
        self.state
    }

    /// Says how long it may take to answer.
    pub const fn set_patience(&mut self, patience: Duration) {
        self.qmp.patience = patience;
    }

    /// The connection to its monitor.
    pub fn monitor(&self) -> BorrowedFd<'_> {
        self.qmp.as_fd()
    }

    /// Leaves it to the caller.
    pub fn leave(mut self) -> i32 {
        let pid = self.pid();
        self.launched = None;
        self.disks.made.clear();
        pid
    }

    /// An error with what QEMU has said, and what the image is of.
    fn explain(&self, error: Error, machine: &QemuMachine) -> Error {
        if !matches!(error, Error::Gone(_) | Error::Monitor { .. }) {
            return error;
        }
        let said = tail(&self.log);
        let QemuMachine {
            version, machine, ..
        } = machine;
        Error::Gone(format!(
            "{error}; QEMU said {said:?}; the image is of QEMU {version}, machine {machine}"
        ))
    }
}

/// Socket of a monitor.
struct MonitorSocket {
    socket: PathBuf,
    listener: OwnedFd,
}

impl MonitorSocket {
    /// Has the name of the socket removed if this process dies.
    fn clear_with(&self, undo: &UndoList) -> Result<()> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::open(&self.socket, flags, Mode::empty());
        let file = file.map_err(Error::file("look at", &self.socket))?;
        let added = undo.add_file(file.as_fd(), &self.socket);
        added.map_err(Error::untold)
    }
}

impl Drop for QemuProcess {
    fn drop(&mut self) {
        if let Some(launched) = self.launched.take() {
            let _ = pidfd_send_signal(&launched.process, Signal::KILL);
            let end = || waitpid(Some(launched.pid), WaitOptions::empty());
            let _ = rustix::io::retry_on_intr(end);
            let _ = fs::remove_file(&self.socket);
        }
    }
}

fn launch(
    plan: &Plan<'_>,
    words: &[String],
    listener: &OwnedFd,
    said: &File,
    state: &OwnedFd,
    undo: &UndoList,
) -> Result<Launched> {
    let text = |text: &[u8]| {
        let text = CString::new(text);
        text.map_err(|_| Error::Unfit("a word of the command line has a zero byte".to_owned()))
    };
    let file = text(plan.program.as_os_str().as_bytes())?;
    let folder = text(plan.folder.as_os_str().as_bytes())?;
    let arguments = words.iter().map(|word| text(word.as_bytes()));
    let arguments = std::iter::once(Ok(file.clone())).chain(arguments);
    let arguments = arguments.collect::<Result<Vec<_>>>()?;
    let null = File::open("/dev/null").map_err(Error::file("open", "/dev/null"))?;
    let own = [listener.as_fd(), state.as_fd()].into_iter();
    let memory = plan.memory.iter().map(|(.., file)| file.as_fd());
    let program = Program {
        file: &file,
        arguments: &arguments,
        environment: plan.environment,
        folder: &folder,
        standard: [null.as_fd(), said.as_fd()],
        inherited: &own.chain(memory).collect::<Vec<_>>(),
        listener: Some(listener.as_fd()),
        user: plan.user,
    };
    let held = launch::hold(&program).map_err(Error::kernel("cannot make a process"))?;
    undo.add_process(held.process()).map_err(Error::untold)?;
    held.go().map_err(Error::file("execute", plan.program))
}

/// The file that QEMU's output goes to: what it says may be secret.
fn new_log(path: &Path) -> Result<File> {
    let mut options = File::options();
    options.write(true).create(true).truncate(true).mode(0o600);
    // A link that somebody has put there is not followed.
    options.custom_flags(OFlags::NOFOLLOW.bits().cast_signed());
    options.open(path).map_err(Error::file("create", path))
}

fn tail(log: &Path) -> String {
    let read = || -> std::io::Result<String> {
        let mut file = File::open(log)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(TOLD_BYTES)))?;
        let mut text = Vec::new();
        file.take(TOLD_BYTES).read_to_end(&mut text)?;
        Ok(String::from_utf8_lossy(&text).trim().to_owned())
    };
    read().unwrap_or_default()
}

/// Refuses a QEMU that is older than the one that saved the machine: it may lack what that one has.
fn check_version(version: Version, machine: &QemuMachine) -> Result<()> {
    let mut numbers = machine.version.split('.').map(str::parse::<u32>);
    let mut next = || {
        numbers
            .next()
            .and_then(std::result::Result::ok)
            .unwrap_or(0)
    };
    let of_image = (next(), next());
    if (version.major, version.minor) < of_image {
        return Err(Error::Unfit(format!(
            "the image is of QEMU {}, whose machines QEMU {version} cannot take",
            machine.version
        )));
    }
    Ok(())
}

/// An environment as programs get it.
///
/// # Errors
/// [`Error::Unfit`] for a zero byte in it.
pub(crate) fn environment(variables: &[(OsString, OsString)]) -> Result<Vec<CString>> {
    let variable = |(name, value): &(OsString, OsString)| {
        let text = [name.as_bytes(), b"=", value.as_bytes()].concat();
        let text = CString::new(text);
        text.map_err(|_| Error::Unfit("the environment has a zero byte".to_owned()))
    };
    variables.iter().map(variable).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_qemu_is_refused_with_both_versions() {
        let machine = QemuMachine {
            version: "9.2.1".to_owned(),
            ..QemuMachine::default()
        };
        let version = |major, minor| Version {
            major,
            minor,
            micro: 0,
        };
        check_version(version(9, 2), &machine).expect("the same");
        check_version(version(10, 0), &machine).expect("a newer one");
        let error = check_version(version(9, 1), &machine).expect_err("an older one");
        let text = error.to_string();
        assert!(text.contains("9.2.1") && text.contains("9.1.0"), "{text}");
    }
}
