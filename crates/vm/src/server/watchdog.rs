//! A process that ends the monitors when the server dies: a virtual processor that waits for a page
//! would wait for ever.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::process::{Signal, pidfd_send_signal, setsid};
use sys::fork::fork_for;
use sys::socket::{self, Along};

/// What the watchdog is told in the end.
const DISMISSED: u64 = u64::MAX;

/// A waiting child process.
#[derive(Debug)]
pub(crate) struct Watchdog(OwnedFd);

impl Watchdog {
    /// Starts it, from a process that has one thread.
    ///
    /// # Errors
    /// Those of socketpair(2) and fork(2).
    pub fn start() -> io::Result<Self> {
        let (theirs, own) = socketpair(
            AddressFamily::UNIX,
            SocketType::SEQPACKET,
            SocketFlags::CLOEXEC,
            None,
        )?;
        fork_for(&[theirs.as_fd()], || {
            // Nothing that ends the server's group may end this process.
            let _ = setsid();
            watch(&theirs);
        })?;
        Ok(Self(own))
    }

    /// Has a monitor ended if the server dies before it says otherwise.
    ///
    /// # Errors
    /// `EPIPE` where the watchdog is gone.
    pub fn add(&self, number: u64, monitor: &OwnedFd) -> io::Result<()> {
        let along = Along {
            rights: &[monitor.as_fd()],
            ..Along::default()
        };
        socket::send(&self.0, &number.to_ne_bytes(), along, 0).map(drop)
    }

    /// Forgets a monitor.
    pub fn forget(&self, number: u64) {
        let told = socket::send(&self.0, &number.to_ne_bytes(), Along::default(), 0);
        if let Err(error) = told {
            log::warn!("the watchdog is gone: {error}");
        }
    }

    /// Ends it; the monitors go on.
    pub fn dismiss(&self) {
        self.forget(DISMISSED);
    }
}

/// The watchdog's life.
fn watch(server: &OwnedFd) {
    let mut monitors: Vec<(u64, OwnedFd)> = Vec::new();
    let mut word = [0; 8];
    loop {
        let received = match socket::receive(server, &mut word, 0) {
            Ok(received) if received.len == word.len() => received,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            // The server is gone.
            _ => break,
        };
        let number = u64::from_ne_bytes(word);
        let mut rights = received.rights.into_iter();
        match rights.next() {
            Some(monitor) => monitors.push((number, monitor)),
            None if number == DISMISSED => return,
            None => monitors.retain(|one| one.0 != number),
        }
    }
    for (_, monitor) in monitors {
        let _ = pidfd_send_signal(&monitor, Signal::KILL);
    }
}
