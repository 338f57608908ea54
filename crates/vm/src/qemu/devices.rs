//! The state of a machine's devices, which QEMU writes into a pipe of ours.

use std::io::Read as _;
use std::os::fd::{AsFd as _, OwnedFd};
use std::time::{Duration, Instant};

use rustix::pipe::{PipeFlags, pipe_with};
use serde_json::{Value, json};

use super::guest::Guest;
use super::qmp::Qmp;
use super::watchdog::settle;
use crate::{Error, Result};

/// The most that QEMU saves of devices, ROMs and video memory, in bytes.
const STATE_MAX_BYTES: usize = 128 << 20;

/// Capacity of the pipe with the state, in bytes.
const PIPE_BYTES: usize = 1 << 20;

/// Name, in QEMU, of the descriptor that QEMU writes the state to.
const STATE: &str = "stillframe-state";

/// A pipe whose other end QEMU has.
pub(crate) fn pipe(qmp: &mut Qmp) -> Result<OwnedFd> {
    let kernel = || Error::kernel("cannot make a pipe");
    let (reader, writer) = pipe_with(PipeFlags::CLOEXEC).map_err(kernel())?;
    // Without the privilege for so much it takes longer.
    let _ = rustix::pipe::fcntl_setpipe_size(&writer, PIPE_BYTES);
    qmp.call_along::<Value>("getfd", json!({ "fdname": STATE }), &[writer.as_fd()])?;
    Ok(reader)
}

/// Has QEMU write the state of a stopped guest's devices into the pipe.
pub(crate) fn begin(guest: &mut Guest<'_>) -> Result<()> {
    guest.migrates = true;
    let with = json!({ "uri": format!("fd:{STATE}") });
    guest.qmp.call::<Value>("migrate", with).map(drop)
}

/// Waits until QEMU has written all of it.
///
/// # Errors
/// [`Error::Refused`] with what QEMU says; those of [`Qmp::call`].
pub(crate) fn end(guest: &mut Guest<'_>) -> Result<()> {
    let patience = guest.qmp.patience;
    match guest.qmp.end_of_migration(patience)?.as_str() {
        "completed" => {
            settle(guest.qmp)?;
            guest.migrates = false;
            Ok(())
        }
        _ => Err(refused(guest.qmp)),
    }
}

/// Reads the state to its end, of which each piece may take so long to come.
///
/// # Errors
/// [`Error::Kernel`]; [`Error::Unfit`] where it is too long.
pub(crate) fn read(from: OwnedFd, patience: Duration) -> Result<Vec<u8>> {
    let failed = || Error::kernel("cannot read the state of the devices");
    let (mut state, mut from) = (Vec::new(), std::fs::File::from(from));
    let mut buffer = vec![0; 256 << 10];
    loop {
        let until = Instant::now() + patience;
        if guard::wait([Some(from.as_fd())], Some(until)).map_err(failed())? == [false] {
            return Err(failed()(std::io::ErrorKind::TimedOut.into()));
        }
        match from.read(&mut buffer).map_err(failed())? {
            0 => return Ok(state),
            count => state.extend_from_slice(&buffer[..count]),
        }
        if state.len() > STATE_MAX_BYTES {
            return Err(Error::Unfit(format!(
                "QEMU says more than {} MiB of its devices: is there memory that is not shared?",
                STATE_MAX_BYTES >> 20
            )));
        }
    }
}

/// Why a migration has failed.
fn refused(qmp: &mut Qmp) -> Error {
    let told = qmp.call::<Value>("query-migrate", json!({}));
    let why = told
        .as_ref()
        .ok()
        .and_then(|told| told.get("error-desc")?.as_str());
    Error::Refused {
        command: "migrate",
        what: why
            .unwrap_or("it does not say why, but on its own standard error")
            .to_owned(),
    }
}
