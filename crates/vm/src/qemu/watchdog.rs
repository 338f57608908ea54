//! A process that has a stopped guest go on if we are killed.
//!
//! Whoever is killed between the stop of a guest and its end, or its going on, leaves a guest that
//! stands still. So a child process with the same connection to QEMU waits meanwhile: where the
//! pipe to it breaks, it does what we were going to do. Once an image is about to be sealed that
//! ends the guest, that depends on whether the image is there: then the guest is in it, and ends.

use std::ffi::OsString;
use std::fs::{self, File};
use std::os::fd::AsFd as _;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use guard::{Channel, Child, Helper};
use image::{ImageId, Reader};
use serde_json::{Value, json};
use store::Images;

use super::qmp::Qmp;
use crate::{Error, Result};

/// How often a migration that is being given up is looked at.
const LOOK: Duration = Duration::from_millis(5);

/// The same of a guest that is being stopped.
const SETTLING: Duration = Duration::from_micros(200);

/// A message to the watchdog.
#[derive(Clone, PartialEq, prost::Message)]
struct Message {
    #[prost(enumeration = "MessageKind", tag = "1")]
    kind: i32,
    /// The id of an image.
    #[prost(bytes = "vec", tag = "2")]
    image: Vec<u8>,
    /// A file: its name, its device and its inode.
    #[prost(bytes = "vec", tag = "3")]
    path: Vec<u8>,
    #[prost(uint64, tag = "4")]
    device: u64,
    #[prost(uint64, tag = "5")]
    inode: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
enum MessageKind {
    Unknown = 0,
    /// The guest is about to be stopped.
    Stopping = 1,
    /// The guest ends if this image is there.
    Sealing = 2,
    /// Nothing is to be done.
    Dismissed = 3,
    /// QEMU may be told to write to this file.
    Making = 4,
}

impl Message {
    fn of(kind: MessageKind) -> Self {
        Self {
            kind: kind as i32,
            ..Self::default()
        }
    }
}

/// The state that a guest returns to when it goes on.
#[derive(Clone, Debug)]
pub(crate) struct GuestState {
    /// True if it ran.
    pub ran: bool,
    /// The capabilities of migration that were changed, as they were.
    pub capabilities: Vec<(String, bool)>,
}

/// The waiting process.
#[derive(Debug)]
pub(crate) struct Watchdog(Child);

impl Watchdog {
    /// Posts it, from a process that has one thread.
    ///
    /// # Errors
    /// [`Error::Kernel`].
    pub fn post(qmp: &Qmp, before: &GuestState, images: &Images) -> Result<Self> {
        let failed = || Error::kernel("cannot post a watchdog");
        let mut own = qmp.duplicate().map_err(failed())?;
        let helper = Helper::new(c"stillframe-wdog").keep([own.as_fd()]);
        let helper = helper.start(|maker| {
            let (end, made) = hear(&maker);
            match end {
                End::Dismissed => return,
                End::Sealing(id) if is_sealed(images, id) => {
                    let _ = own.insist("quit", &json!({}));
                }
                End::Stopped | End::Sealing(_) => {
                    let _ = go_on(&mut own, before);
                }
            }
            made.iter().for_each(|made| made.clear(&mut own));
        });
        helper.map(Self).map_err(failed())
    }

    /// Says that the guest is about to be stopped.
    ///
    /// # Errors
    /// [`Error::Kernel`] where it is gone.
    pub fn stopping(&self) -> Result<()> {
        self.send(&Message::of(MessageKind::Stopping))
    }

    /// Says that QEMU may be told to write to a file, which has no name yet: one that QEMU does not
    /// use is removed.
    ///
    /// # Errors
    /// [`Error::Kernel`] where it is gone; those of the file.
    pub fn making(&self, file: &File, path: &Path) -> Result<()> {
        let facts = file.metadata().map_err(Error::file("look at", path))?;
        self.send(&Message {
            path: path.as_os_str().as_bytes().to_vec(),
            device: facts.dev(),
            inode: facts.ino(),
            ..Message::of(MessageKind::Making)
        })
    }

    /// Says that the guest ends if the image is there.
    ///
    /// # Errors
    /// [`Error::Kernel`] where it is gone.
    pub fn sealing(&self, id: ImageId) -> Result<()> {
        self.send(&Message {
            image: id.0.to_vec(),
            ..Message::of(MessageKind::Sealing)
        })
    }

    /// Sends it away: the guest runs, or has ended.
    pub fn dismiss(&self) {
        // Where it was killed, nothing can be told.
        let _ = self.send(&Message::of(MessageKind::Dismissed));
    }

    fn send(&self, message: &Message) -> Result<()> {
        let sent = self.0.channel().send(message, &[]);
        sent.map_err(Error::untold)
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
            // A disk goes on in it, or may.
            _ => {}
        }
    }
}

/// Receives messages until the other side is gone or dismisses this one: how it ended, and the
/// files that it made for QEMU.
fn hear(maker: &Channel) -> (End, Vec<MadeFile>) {
    let (mut end, mut made) = (End::Dismissed, Vec::new());
    while let Ok(Some((message, _))) = maker.receive::<Message>() {
        match message.kind() {
            MessageKind::Stopping => end = End::Stopped,
            MessageKind::Sealing => match message.image.try_into() {
                Ok(id) => end = End::Sealing(ImageId(id)),
                Err(_) => break,
            },
            MessageKind::Making => made.push(MadeFile {
                path: OsString::from_vec(message.path).into(),
                is: (message.device, message.inode),
            }),
            MessageKind::Dismissed | MessageKind::Unknown => return (End::Dismissed, made),
        }
    }
    (end, made)
}

fn is_sealed(images: &Images, id: ImageId) -> bool {
    let reader = images
        .open()
        .ok()
        .and_then(|store| Reader::open(&*store).ok());
    reader.is_some_and(|reader| reader.id() == id)
}

/// Has the guest be as it was before: gives a migration up, and lets the guest go on. Where the
/// connection is lost and QEMU lives, there is another one.
///
/// # Errors
/// Those of [`Qmp::call`].
pub(crate) fn go_on(qmp: &mut Qmp, before: &GuestState) -> Result<()> {
    match try_to_go_on(qmp, before) {
        Err(lost @ Error::Gone(_)) => {
            *qmp = qmp.again().map_err(|_| lost)?;
            try_to_go_on(qmp, before)
        }
        other => other,
    }
}

fn try_to_go_on(qmp: &mut Qmp, before: &GuestState) -> Result<()> {
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

    use guard::harness::{Note, Victim, kill_at_each_message};

    use super::*;

    fn save(channel: &Channel) -> std::io::Result<()> {
        channel.send(&Message::of(MessageKind::Stopping), &[])?;
        let made = Message {
            path: b"/disk".to_vec(),
            device: 5,
            inode: 6,
            ..Message::of(MessageKind::Making)
        };
        channel.send(&made, &[])?;
        let sealing = Message {
            image: vec![7; 16],
            ..Message::of(MessageKind::Sealing)
        };
        channel.send(&sealing, &[])?;
        channel.send(&Message::of(MessageKind::Dismissed), &[])
    }

    #[test]
    fn save_killed_at_each_message_is_undone_as_far_as_it_came() {
        kill_at_each_message(
            || Channel::pair().expect("a pair"),
            |(_, report)| vec![report.as_fd()],
            |(_, report), maker| {
                let (end, made) = hear(&maker);
                let text = format!("{end:?} {}", made.len());
                report.send(&Note::text(&text), &[]).expect("sent");
            },
            |_, channel| drop(save(&channel)),
            |(report, _), outcome| {
                if outcome.victim == Victim::Helper && !outcome.is_whole {
                    return;
                }
                let (note, _) = report.receive::<Note>().expect("a note").expect("a note");
                let expected = match (outcome.victim, outcome.messages) {
                    (Victim::Client, 0) => "Dismissed 0".to_owned(),
                    (Victim::Client, 1) => "Stopped 0".to_owned(),
                    (Victim::Client, 2) => "Stopped 1".to_owned(),
                    (Victim::Client, 3) => format!("Sealing({:?}) 1", ImageId([7; 16])),
                    _ => "Dismissed 1".to_owned(),
                };
                assert_eq!(note.text, expected, "{outcome:?}");
            },
        );
    }

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
        let before = GuestState {
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
