//! A running machine: what can be known of it before it is stopped, and why it cannot be saved.

use std::fs;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde_json::{Value, json};

use super::block::{self, Block};
use super::plugged::{self, Device, PLACES};
use super::qmp::{self, Qmp, Version};
use super::record::QemuMachine;
use super::user::QemuUser;
use super::watchdog::GuestState;
use super::{command, processors};
use crate::{Error, Result};

/// How long a monitor may take to say who it is.
const GREETING: Duration = Duration::from_secs(10);

/// The longest command line that is recorded.
const WORDS_MAX_BYTES: usize = 1 << 20;

/// What devices are called whose other half is a process or hardware that writes to the guest's
/// memory.
const WITH_OTHERS: [&str; 4] = ["vhost-user", "vhost-vdpa", "vfio-", "ivshmem"];

/// Capabilities of a migration that are on for a save; all others are off.
const CAPABILITIES: [&str; 2] = ["x-ignore-shared", "events"];

/// Questions about a machine's state and its migration.
const STATUS: [&str; 2] = ["query-status", "query-migrate"];
const GET_CAPABILITIES: &str = "query-migrate-capabilities";

const NETWORK: &str = "info network";

/// A machine that can be saved.
#[derive(Debug)]
pub(crate) struct Machine {
    pub qmp: Qmp,
    pub pid: i32,
    /// What it becomes again when it goes on.
    pub before: GuestState,
    /// What its migration is set to for the save.
    pub capabilities: Vec<(String, bool)>,
    pub blocks: Vec<Block>,
    /// The machine's record, without its spaces and disks.
    pub record: QemuMachine,
}

#[derive(Deserialize)]
struct Capability {
    capability: String,
    state: bool,
}

#[derive(Deserialize)]
struct Status {
    status: String,
}

impl Machine {
    /// Looks at the machine whose monitor listens at `socket`, each of whose answers may take so
    /// long. Nothing is changed.
    ///
    /// # Errors
    /// [`Error::Unfit`] where it cannot be saved; [`Error::Gone`], [`Error::Monitor`].
    pub fn look(socket: &Path, patience: Duration) -> Result<Self> {
        let (qmp, version) = Qmp::reach(socket, patience, patience.min(GREETING))?;
        let kernel = || Error::kernel("cannot tell which process QEMU is");
        let pid = qmp.peer().map_err(kernel())?;
        Self::of(qmp, version, pid).map_err(|error| unless_ended(error, pid))
    }

    /// Looks again whether the guest runs.
    ///
    /// # Errors
    /// [`Error::Unfit`] where the machine cannot be saved any more; those of [`Qmp::call`].
    pub fn look_again(&mut self) -> Result<()> {
        let ran = runs(&mut self.qmp).map_err(|error| unless_ended(error, self.pid))?;
        self.before.ran = ran;
        Ok(())
    }

    fn of(mut qmp: Qmp, version: Version, pid: i32) -> Result<Self> {
        // Each answer takes some 0.7 ms where a guest keeps QEMU busy.
        let places = PLACES.map(|place| ("qom-list", json!({ "path": place })));
        let mut questions = STATUS.map(|command| (command, json!({}))).to_vec();
        questions.push((GET_CAPABILITIES, json!({})));
        questions.extend(places);
        questions.push(qmp::human(NETWORK));
        questions.extend(block::questions());
        qmp.foresee(questions)?;
        let ran = runs(&mut qmp)?;
        let (capabilities, before) = capabilities(&mut qmp, version)?;
        let (words, withheld) = line(pid)?;
        let devices = plugged::devices(&mut qmp)?;
        refuse_others(&mut qmp, &devices)?;
        let mut blocks = block::find(&mut qmp, version, pid, &words)?;
        blocks.sort_by(|one, other| one.name.cmp(&other.name));
        let mut record = record(&mut qmp, version, pid, words, withheld)?;
        record.plugged = plugged::differences(&mut qmp, &devices, &record.words)?;
        Ok(Self {
            qmp,
            pid,
            before: GuestState {
                ran,
                capabilities: before,
            },
            capabilities,
            blocks,
            record,
        })
    }
}

/// What is wrong with a QEMU that has ended is that: what it had in /proc goes before its monitor.
pub(crate) fn unless_ended(error: Error, pid: i32) -> Error {
    match error {
        Error::Gone(_) => error,
        _ if pid > 0 && sys::ending::is_ending(pid) => {
            let told = sys::causes::line(&error);
            Error::Gone(format!("QEMU, process {pid}, has ended: {told}"))
        }
        _ => error,
    }
}

/// Tells whether the guest runs.
fn runs(qmp: &mut Qmp) -> Result<bool> {
    let status: Status = qmp.call(STATUS[0], json!({}))?;
    let migration: Value = qmp.call(STATUS[1], json!({}))?;
    let migration = migration.get("status").and_then(Value::as_str);
    match (status.status.as_str(), migration) {
        (_, Some("setup" | "active" | "device" | "pre-switchover" | "postcopy-active")) => {
            Err(Error::Unfit("the machine is being migrated".to_owned()))
        }
        ("running", _) => Ok(true),
        ("paused", _) => Ok(false),
        (other, _) => Err(Error::Unfit(format!(
            "the machine neither runs nor is paused: {other}"
        ))),
    }
}

type Capabilities = Vec<(String, bool)>;

/// Capabilities that have to be changed, and as they are.
fn capabilities(qmp: &mut Qmp, version: Version) -> Result<(Capabilities, Capabilities)> {
    let all: Vec<Capability> = qmp.call(GET_CAPABILITIES, json!({}))?;
    for needed in CAPABILITIES {
        if !all.iter().any(|it| it.capability == needed) {
            return Err(Error::Unfit(format!(
                "QEMU {version} cannot save devices alone: it has no {needed}"
            )));
        }
    }
    let is_wanted = |it: &Capability| CAPABILITIES.contains(&it.capability.as_str());
    let differing = all.iter().filter(|it| it.state != is_wanted(it));
    let differing = differing.map(|it| (it.capability.clone(), is_wanted(it)));
    let differing = differing.collect::<Capabilities>();
    let before = differing.iter().map(|(name, on)| (name.clone(), !on));
    let before = before.collect();
    Ok((differing, before))
}

/// Devices by which a machine gives memory up while it runs.
const GIVING_UP: [&str; 2] = ["virtio-balloon", "virtio-mem"];

/// Refuses a live save of a machine that gives memory up without anybody being told: QEMU discards
/// huge pages by their file alone.
pub(crate) fn refuse_unheard(machine: &mut Machine) -> Result<()> {
    let mut are_huge = false;
    for block in &machine.blocks {
        are_huge |= block.page_bytes()? > abi::PAGE_BYTES;
    }
    let kinds = if are_huge {
        plugged::devices(&mut machine.qmp)?
    } else {
        Vec::new()
    };
    let gives_up = |it: &&Device| GIVING_UP.iter().any(|start| it.kind.starts_with(start));
    match kinds.iter().find(gives_up) {
        Some(Device { kind, .. }) => Err(Error::Unfit(format!(
            "{kind} takes huge pages from the guest unheard: save it without --live"
        ))),
        None => Ok(()),
    }
}

/// Refuses devices with which somebody else writes to the guest's memory.
fn refuse_others(qmp: &mut Qmp, devices: &[Device]) -> Result<()> {
    let is_such = |it: &&Device| WITH_OTHERS.iter().any(|start| it.kind.starts_with(start));
    if let Some(Device { kind, .. }) = devices.iter().find(is_such) {
        return Err(Error::Unfit(format!(
            "another process or device writes to the guest's memory: -device {kind}; use one of \
             QEMU's own, as virtio-blk-pci or virtio-net-pci"
        )));
    }
    let network = qmp.human(NETWORK)?;
    let kinds = ["type=vhost-user", "type=vhost-vdpa"];
    if let Some(kind) = kinds.iter().find(|kind| network.contains(*kind)) {
        return Err(Error::Unfit(format!(
            "another process writes to the guest's memory: -netdev {kind}; use tap or user"
        )));
    }
    Ok(())
}

/// Records the facts needed to start another machine.
fn record(
    qmp: &mut Qmp,
    version: Version,
    pid: i32,
    words: Vec<String>,
    withheld: Vec<u32>,
) -> Result<QemuMachine> {
    let kind = ("qom-get", json!({"path": "/machine", "property": "type"}));
    qmp.foresee(vec![kind.clone(), processors::question()])?;
    let machine: String = qmp.call(kind.0, kind.1)?;
    let machine = machine.strip_suffix("-machine").unwrap_or(&machine);
    let link = |name: &str| -> Result<String> {
        let path = PathBuf::from(format!("/proc/{pid}/{name}"));
        let target = fs::read_link(&path).map_err(Error::file("read", path))?;
        Ok(target.to_string_lossy().into_owned())
    };
    Ok(QemuMachine {
        version: version.to_string(),
        machine: machine.to_owned(),
        program: link("exe")?,
        folder: link("cwd")?,
        words,
        withheld,
        processors: Some(processors::of(qmp)?),
        user: Some(QemuUser::of(&pid.to_string())?),
        ..QemuMachine::default()
    })
}

/// The arguments of a process without secrets, and which those are; see [`words`].
fn line(pid: i32) -> Result<(Vec<String>, Vec<u32>)> {
    let path = PathBuf::from(format!("/proc/{pid}/cmdline"));
    let line = fs::read(&path).map_err(Error::file("read", path))?;
    Ok(words(line))
}

/// The arguments of a command line without secrets; none where they are no text.
fn words(line: Vec<u8>) -> (Vec<String>, Vec<u32>) {
    let words = line.split(|byte| *byte == 0).skip(1);
    let words = words.map(|word| String::from_utf8(word.to_vec()));
    let words = words.collect::<std::result::Result<Vec<_>, _>>();
    let Some(mut words) = words.ok().filter(|_| line.len() <= WORDS_MAX_BYTES) else {
        let start = line[..line.len().min(100)].to_vec();
        let start = std::ffi::OsString::from_vec(start);
        log::warn!("the command line is not recorded: {}", start.display());
        return (Vec::new(), Vec::new());
    };
    // The last byte ends the last word.
    words.pop();
    let withheld = command::withhold(&mut words);
    (words, withheld)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_qemu_that_has_ended_lacks_nothing_else() {
        let mut qemu = std::process::Command::new("sleep");
        let mut qemu = qemu.arg("1000").spawn().expect("it starts");
        let pid = qemu.id().cast_signed();
        let unfit = || Error::Unfit("its memory is not shared".to_owned());
        assert!(matches!(unless_ended(unfit(), pid), Error::Unfit(_)));
        assert!(matches!(unless_ended(unfit(), 0), Error::Unfit(_)));
        qemu.kill().expect("it lives");
        // Also before anybody has seen its end.
        assert!(matches!(unless_ended(unfit(), pid), Error::Gone(_)));
        qemu.wait().expect("it has ended");
        assert!(matches!(unless_ended(unfit(), pid), Error::Gone(_)));
    }

    #[test]
    fn a_command_line_is_its_words() {
        let (text, withheld) = words(b"qemu\0-m\x00400\0-append\0\0".to_vec());
        assert_eq!(
            (text.as_slice(), withheld.len()),
            (&["-m", "400", "-append", ""].map(str::to_owned)[..], 0)
        );
        assert_eq!(words(b"qemu\0\xff\0".to_vec()), (vec![], vec![]));
        assert_eq!(words(Vec::new()), (vec![], vec![]));
    }
}
