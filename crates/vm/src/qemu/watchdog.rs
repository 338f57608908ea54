//! A process that has a stopped guest go on if we are killed.
//!
//! Whoever is killed between the stop of a guest and its end, or its going on, leaves a guest that
//! stands still. So a child process with the same connection to QEMU waits meanwhile: where the
//! pipe to it breaks, it does what we were going to do. Once an image is about to be sealed that
//! ends the guest, that depends on whether the image is there: then the guest is in it, and ends.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use image::{ImageId, Reader};
use rustix::io::Errno;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, WaitOptions, setsid, waitpid};
use serde_json::{Value, json};
use store::Images;
use sys::fork::fork_for_numbers;

use super::qmp::Qmp;
use crate::{Error, Result};

/// How often a migration that is being given up is looked at.
const LOOK: Duration = Duration::from_millis(5);

/// The same of a guest that is being stopped.
const SETTLING: Duration = Duration::from_micros(200);

/// What the watchdog is told, with the id of the image after [`SEALING`], and after [`MAKING`] a
/// file: its device, its inode, the length of its name, and that.
const STOPPING: u8 = 1;
const SEALING: u8 = 2;
const DISMISSED: u8 = 3;
const MAKING: u8 = 4;

/// The longest name of a file: `PATH_MAX` (path_resolution(7)).
const NAME_MAX_BYTES: usize = 4096;

/// What a guest is to become again when it goes on.
#[derive(Clone, Debug)]
pub(crate) struct Before {
    /// Whether it ran.
    pub ran: bool,
    /// The capabilities of migration that were changed, as they were.
    pub capabilities: Vec<(String, bool)>,
}

/// The waiting process.
#[derive(Debug)]
pub(crate) struct Watchdog {
    child: Pid,
    pipe: Option<OwnedFd>,
}

impl Watchdog {
    /// Posts it, from a process that has one thread.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn post(qmp: &Qmp, before: &Before, images: &Images) -> Result<Self> {
        let failed = |source: io::Error| Error::Kernel {
            doing: "cannot post a watchdog",
            source,
        };
        let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).map_err(|e| failed(e.into()))?;
        let mut own = qmp.duplicate().map_err(failed)?;
        log::logger().flush();
        let kept = [reader.as_raw_fd(), own.as_fd().as_raw_fd()];
        let child = fork_for_numbers(&kept, || {
            // Nothing that ends our group may end this process.
            let _ = setsid();
            let told = told(&reader);
            match told.end {
                End::Dismissed => return,
                End::Sealing(id) if is_sealed(images, id) => {
                    let _ = own.insist("quit", &json!({}));
                }
                End::Stopped | End::Sealing(_) => let_go(&mut own, before),
            }
            told.made.iter().for_each(|made| made.clear(&mut own));
        });
        Ok(Self {
            child: child.map_err(failed)?,
            pipe: Some(writer),
        })
    }

    /// Says that the guest is about to be stopped.
    ///
    /// # Errors
    /// [`Error::Kernel`] where it is gone.
    pub fn stopping(&self) -> Result<()> {
        self.say(&[STOPPING]).map_err(|errno| Error::Kernel {
            doing: "cannot tell the watchdog",
            source: errno.into(),
        })
    }

    /// Says that QEMU may be told to write to a file, which has no name yet: one that QEMU does not
    /// use is removed.
    ///
    /// # Errors
    /// [`Error::Kernel`] where it is gone; those of the file.
    pub fn making(&self, file: &File, path: &Path) -> Result<()> {
        let facts = file.metadata().map_err(Error::file("look at", path))?;
        let name = path.as_os_str().as_bytes();
        let length = name.len() as u64;
        let numbers = [facts.dev(), facts.ino(), length].map(u64::to_ne_bytes);
        let said = self.say(&[&[MAKING][..], &numbers.concat(), name].concat());
        said.map_err(|errno| Error::Kernel {
            doing: "cannot tell the watchdog",
            source: errno.into(),
        })
    }

    /// Says that the guest ends if the image is there.
    ///
    /// # Errors
    /// [`Error::Kernel`] where it is gone.
    pub fn sealing(&self, id: ImageId) -> Result<()> {
        let said = self.say(&[&[SEALING][..], &id.0].concat());
        said.map_err(|errno| Error::Kernel {
            doing: "cannot tell the watchdog",
            source: errno.into(),
        })
    }

    /// Sends it away: the guest runs, or has ended.
    pub fn dismiss(&self) {
        // Where it was killed, nothing can be told.
        let _ = self.say(&[DISMISSED]);
    }

    fn say(&self, bytes: &[u8]) -> rustix::io::Result<()> {
        let pipe = self.pipe.as_ref().expect("only drop takes it");
        // So few bytes are written at once.
        rustix::io::retry_on_intr(|| rustix::io::write(pipe, bytes)).map(drop)
    }
}

impl Drop for Watchdog {
    fn drop(&mut self) {
        drop(self.pipe.take());
        let _ = rustix::io::retry_on_intr(|| waitpid(Some(self.child), WaitOptions::empty()));
    }
}

/// How the process ended that a watchdog watches.
#[derive(Debug, PartialEq, Eq)]
enum End {
    /// It did nothing that would have to be taken back.
    Dismissed,
    /// The guest may stand still.
    Stopped,
    /// The guest stands still, and ends if this image is there.
    Sealing(ImageId),
}

/// What a watchdog was told.
struct Told {
    end: End,
    made: Vec<MadeFile>,
}

/// A file that was made for QEMU to write to.
struct MadeFile {
    path: PathBuf,
    /// Its device and inode.
    is: (u64, u64),
}

impl MadeFile {
    /// Removes it, unless QEMU uses it.
    fn clear(&self, qmp: &mut Qmp) {
        let facts = fs::symlink_metadata(&self.path);
        if !facts.is_ok_and(|facts| (facts.dev(), facts.ino()) == self.is) {
            return;
        }
        // As it is in JSON, also in that of a name that is JSON itself.
        let name = self.path.file_name().unwrap_or_default().to_string_lossy();
        match qmp.insist("query-block", &json!({})) {
            Ok(told) if !told.to_string().contains(&*name) => {
                let _ = fs::remove_file(&self.path);
            }
            Ok(_) => log::warn!("a disk goes on in {}", self.path.display()),
            Err(error) => log::warn!("{} is left: {error}", self.path.display()),
        }
    }
}

/// What is told until there is nobody who could tell more.
fn told(pipe: &OwnedFd) -> Told {
    let (mut end, mut made) = (End::Dismissed, Vec::new());
    loop {
        match next(pipe) {
            Some(STOPPING) => end = End::Stopped,
            Some(SEALING) => match bytes(pipe) {
                Some(id) => end = End::Sealing(ImageId(id)),
                None => break,
            },
            Some(MAKING) => match made_file(pipe) {
                Some(file) => made.push(file),
                None => break,
            },
            Some(_) => {
                end = End::Dismissed;
                break;
            }
            None => break,
        }
    }
    Told { end, made }
}

fn made_file(pipe: &OwnedFd) -> Option<MadeFile> {
    let device = u64::from_ne_bytes(bytes(pipe)?);
    let inode = u64::from_ne_bytes(bytes(pipe)?);
    let length = usize::try_from(u64::from_ne_bytes(bytes(pipe)?)).ok()?;
    let length = Some(length).filter(|length| *length <= NAME_MAX_BYTES)?;
    let name = (0..length)
        .map(|_| next(pipe))
        .collect::<Option<Vec<_>>>()?;
    Some(MadeFile {
        path: OsString::from_vec(name).into(),
        is: (device, inode),
    })
}

fn bytes<const COUNT: usize>(pipe: &OwnedFd) -> Option<[u8; COUNT]> {
    let mut bytes = [0; COUNT];
    for byte in &mut bytes {
        *byte = next(pipe)?;
    }
    Some(bytes)
}

fn next(pipe: &OwnedFd) -> Option<u8> {
    let mut byte = [0];
    loop {
        match rustix::io::read(pipe, &mut byte) {
            Err(Errno::INTR) => {}
            Ok(1) => return Some(byte[0]),
            _ => return None,
        }
    }
}

fn is_sealed(images: &Images, id: ImageId) -> bool {
    let reader = images
        .open()
        .ok()
        .and_then(|store| Reader::open(&*store).ok());
    reader.is_some_and(|reader| reader.id() == id)
}

fn let_go(qmp: &mut Qmp, before: &Before) {
    if let Err(error) = go_on(qmp, before) {
        log::error!("the guest could not be told to go on: {error}");
    }
    log::logger().flush();
}

/// Has the guest be as it was before: gives a migration up, and lets the guest go on. Where the
/// connection is lost and QEMU lives, there is another one.
///
/// # Errors
/// Those of [`Qmp::call`].
pub(crate) fn go_on(qmp: &mut Qmp, before: &Before) -> Result<()> {
    match try_to_go_on(qmp, before) {
        Err(lost @ Error::Gone(_)) => {
            *qmp = qmp.again().map_err(|_| lost)?;
            try_to_go_on(qmp, before)
        }
        other => other,
    }
}

fn try_to_go_on(qmp: &mut Qmp, before: &Before) -> Result<()> {
    let deadline = Instant::now() + qmp.patience;
    // Nobody reads the state any more, so QEMU ends a migration by itself, if it is not yet
    // cancelled by this.
    let mut cancelled = qmp.insist("migrate_cancel", &json!({}));
    loop {
        let told = match cancelled {
            Err(error @ Error::Gone(_)) => return Err(error),
            _ => qmp.insist("query-migrate", &json!({}))?,
        };
        let state = told.get("status").and_then(Value::as_str);
        let is_over = matches!(
            state,
            None | Some("none" | "completed" | "failed" | "cancelled")
        );
        if is_over || Instant::now() >= deadline {
            break;
        }
        std::thread::sleep(LOOK);
        cancelled = Ok(Value::Null);
    }
    settle(qmp)?;
    if before.ran {
        qmp.insist("cont", &json!({}))?;
    }
    set(qmp, &before.capabilities)
}

/// Waits until QEMU has stopped the guest for a migration whose end it has told: it tells that
/// before, and would stop a guest again that was told to go on in between.
///
/// # Errors
/// Those of [`Qmp::call`].
pub(crate) fn settle(qmp: &mut Qmp) -> Result<()> {
    let deadline = Instant::now() + qmp.patience;
    loop {
        let told = qmp.insist("query-status", &json!({}))?;
        let state = told.get("status").and_then(Value::as_str);
        if state != Some("finish-migrate") || Instant::now() >= deadline {
            return Ok(());
        }
        std::thread::sleep(SETTLING);
    }
}

/// Sets capabilities of migration.
///
/// # Errors
/// Those of [`Qmp::call`].
pub(crate) fn set(qmp: &mut Qmp, capabilities: &[(String, bool)]) -> Result<()> {
    let all = capabilities.iter();
    let all = all.map(|(name, on)| json!({"capability": name, "state": on}));
    let all = json!({"capabilities": all.collect::<Vec<_>>()});
    qmp.insist("migrate-set-capabilities", &all).map(drop)
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::os::unix::net::UnixStream;

    use super::*;

    /// A monitor that says one status after the other; gives what it was asked.
    fn monitor(socket: UnixStream, states: &'static [&'static str]) -> Vec<String> {
        let mut states = states.iter();
        let mut asked = Vec::new();
        for line in BufReader::new(&socket).lines().map_while(Result::ok) {
            let question = serde_json::from_str::<Value>(&line).expect("JSON");
            let command = question["execute"].as_str().expect("text").to_owned();
            let told = match command.as_str() {
                "query-status" => json!({ "status": states.next().expect("one more") }),
                _ => json!({}),
            };
            asked.push(command);
            let answer = json!({ "return": told, "id": question["id"] });
            writeln!(&socket, "{answer}").expect("it listens");
        }
        asked
    }

    #[test]
    fn a_guest_is_not_told_to_go_on_while_it_is_being_stopped() {
        let (own, others) = UnixStream::pair().expect("a pair");
        let states = &["finish-migrate", "finish-migrate", "postmigrate"];
        let asked = std::thread::spawn(move || monitor(others, states));
        let mut qmp = Qmp::greeted(own.into(), Path::new("in a test"));
        let before = Before {
            ran: true,
            capabilities: Vec::new(),
        };
        go_on(&mut qmp, &before).expect("it goes on");
        drop(qmp);
        let asked = asked.join().expect("it ends");
        let status = "query-status";
        let expected = [
            "migrate_cancel",
            "query-migrate",
            status,
            status,
            status,
            "cont",
            "migrate-set-capabilities",
        ];
        assert_eq!(asked, expected);
    }
}
