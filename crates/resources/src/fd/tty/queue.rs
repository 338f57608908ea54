//! What is on its way through a pseudo terminal: typed and not read, printed and not shown.
//!
//! A terminal has no way to look without taking. So everything is taken and put back, by a
//! process of its own that ends what it has begun whatever happens to us, while the tree is
//! stopped. To be put (back) in its place, a byte must go through the line discipline unchanged:
//! the attributes are neutral meanwhile.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use prost::Message as _;
use rustix::event::PollFlags;
use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer};
use rustix::termios::{Action, tcflow};
use sys::tty::{Attributes, Switch, attributes, is_on, set_attributes, switch, unread};

use crate::fd::ready;

/// Where `struct termios2` has its flags and special characters.
const INPUT_FLAGS: usize = 0;
const OUTPUT_FLAGS: usize = 4;
const LOCAL_FLAGS: usize = 12;
const CHARACTERS: std::ops::Range<usize> = 17..36;
const VEOF: usize = 17 + 4;
const VMIN: usize = 17 + 6;
const ICANON: u32 = libc::ICANON;

/// The line discipline holds 4096 bytes; what is before it is bounded as well.
const LINES_MAX: usize = 4096;
/// How many bytes the line discipline lets be read at a time: one place stays free. What goes
/// beyond it waits in front of it, uncounted.
const VISIBLE_MAX: usize = 4095;
/// How long the kernel's worker may take to pass bytes on.
const PATIENCE: Duration = Duration::from_secs(2);

/// What is on its way through a pseudo terminal.
#[derive(Clone, PartialEq, Eq, prost::Message)]
pub struct Flight {
    /// Lines to be read by the slave, each by one read(2); one without newline was ended by the
    /// end-of-file character. Only in canonical mode.
    #[prost(bytes = "vec", repeated, tag = "1")]
    pub lines: Vec<Vec<u8>>,
    /// What was typed after them: a line that is not ended, or everything in other modes.
    #[prost(bytes = "vec", tag = "2")]
    pub typed: Vec<u8>,
    /// What is to be read by the master.
    #[prost(bytes = "vec", tag = "3")]
    pub printed: Vec<u8>,
}

impl Flight {
    /// Whether nothing is on its way.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty() && self.typed.is_empty() && self.printed.is_empty()
    }

    /// How many bytes are on their way.
    #[must_use]
    pub fn bytes(&self) -> usize {
        let lines: usize = self.lines.iter().map(Vec::len).sum();
        lines + self.typed.len() + self.printed.len()
    }
}

/// Whether the slave reads whole lines.
#[must_use]
pub fn is_canonical(attributes: &Attributes) -> bool {
    flags(attributes, LOCAL_FLAGS) & ICANON != 0
}

fn flags(attributes: &Attributes, at: usize) -> u32 {
    u32::from_ne_bytes(attributes[at..at + 4].try_into().expect("4 bytes"))
}

/// The slave of `master`, opened once more; neither waits nor becomes anybody's terminal.
pub fn peer(master: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let slave = open_slave(master, OFlags::RDWR)?;
    rustix::fs::fcntl_setfl(&slave, OFlags::NONBLOCK)?;
    Ok(slave)
}

/// Opens the slave of `master`, close-on-exec.
///
/// The kernel is not asked to set that: it would keep the flag with the description, from where
/// /proc/PID/fdinfo would tell it of every descriptor.
pub fn open_slave(master: BorrowedFd<'_>, access: OFlags) -> io::Result<OwnedFd> {
    // Whoever opened it by its path has O_LARGEFILE, of which nothing depends here.
    let kept = OFlags::RWMODE.union(OFlags::LARGEFILE);
    let access = OpenptFlags::from_bits_retain(access.intersection(kept).bits());
    let slave = ioctl_tiocgptpeer(master, access | OpenptFlags::NOCTTY)?;
    rustix::io::fcntl_setfd(&slave, rustix::io::FdFlags::CLOEXEC)?;
    Ok(slave)
}

/// Tells what is on its way, which stays there. The tree must be stopped, and the slave have been
/// open.
///
/// # Errors
/// The calls' errno.
pub fn peek(master: BorrowedFd<'_>) -> io::Result<Flight> {
    let slave = peer(master)?;
    let mode = attributes(master)?;
    flush_work(master)?;
    flush_work(slave.as_fd())?;
    let silent = unread(master)? == 0 && unread(&slave)? == 0;
    if silent && !is_canonical(&mode) {
        return Ok(Flight::default());
    }
    let bytes = sys::watchdog::apart(|| {
        let flight = take(master, slave.as_fd(), &mode);
        // An empty answer is a flight without anything; a failure needs another form.
        match flight {
            Ok(flight) => [&[0], flight.encode_to_vec().as_slice()].concat(),
            Err(error) => {
                let errno = error.raw_os_error().unwrap_or(5);
                [&[1], errno.to_ne_bytes().as_slice()].concat()
            }
        }
    })?;
    match bytes.split_first() {
        Some((0, flight)) => Flight::decode(flight).map_err(|_| Errno::BADMSG.into()),
        Some((_, errno)) => {
            let errno = errno.try_into().map_or(5, i32::from_ne_bytes);
            Err(io::Error::from_raw_os_error(errno))
        }
        None => Err(Errno::BADMSG.into()),
    }
}

/// Takes everything and puts it back.
fn take(master: BorrowedFd<'_>, slave: BorrowedFd<'_>, mode: &Attributes) -> io::Result<Flight> {
    let packet = is_on(master, Switch::Packet)?;
    if packet {
        switch(master, Switch::Packet, false)?;
    }
    let mut flight = Flight {
        printed: read_all(master)?,
        ..Flight::default()
    };
    if is_canonical(mode) {
        while flight.lines.len() < LINES_MAX && is_readable(slave)? {
            let mut line = vec![0; LINES_MAX];
            let read = rustix::io::read(slave, &mut line)?;
            line.truncate(read);
            flight.lines.push(line);
        }
        let mut raw = *mode;
        let local = flags(mode, LOCAL_FLAGS) & !ICANON;
        raw[LOCAL_FLAGS..LOCAL_FLAGS + 4].copy_from_slice(&local.to_ne_bytes());
        set_attributes(slave, &raw)?;
    }
    flight.typed = read_all(slave)?;
    put(&flight, master, slave, mode)?;
    if packet {
        switch(master, Switch::Packet, true)?;
    }
    Ok(flight)
}

/// Reads what is there.
fn read_all(from: BorrowedFd<'_>) -> io::Result<Vec<u8>> {
    let mut all = Vec::new();
    loop {
        flush_work(from)?;
        let there = unread(from)?;
        if there == 0 {
            return Ok(all);
        }
        let mut piece = vec![0; there];
        let read = rustix::io::read(from, &mut piece)?;
        all.extend(&piece[..read]);
    }
}

/// Has the kernel pass on what its worker has not yet: that is part of poll(2).
fn flush_work(fd: BorrowedFd<'_>) -> io::Result<()> {
    is_readable(fd).map(drop)
}

fn is_readable(fd: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(ready::events(fd, PollFlags::IN)?.contains(PollFlags::IN))
}

/// Puts everything in its place in a pseudo terminal that is empty and not in packet mode, and
/// gives it the attributes `mode`.
///
/// # Errors
/// The calls' errno; `ETIMEDOUT` when the bytes do not arrive.
pub fn put(
    flight: &Flight,
    master: BorrowedFd<'_>,
    slave: BorrowedFd<'_>,
    mode: &Attributes,
) -> io::Result<()> {
    if !flight.is_empty() {
        let canonical = is_canonical(mode);
        let end = unused_byte(flight).ok_or(Errno::ILSEQ)?;
        set_attributes(slave, &neutral(mode, canonical, end))?;
        let mut input = Vec::new();
        for line in &flight.lines {
            input.extend(line);
            if line.last() != Some(&b'\n') {
                input.push(end);
            }
        }
        input.extend(&flight.typed);
        write_all(master, slave, &input)?;
        let lines: usize = flight.lines.iter().map(Vec::len).sum();
        let visible = lines + if canonical { 0 } else { flight.typed.len() };
        arrives(slave, visible)?;
        print(&flight.printed, slave, master)?;
        arrives(master, flight.printed.len())?;
    }
    // The kernel waits for a worker that is in the middle of the bytes.
    set_attributes(slave, mode)
}

/// Attributes with which bytes pass unchanged; only newline and `end` still end a line.
fn neutral(mode: &Attributes, canonical: bool, end: u8) -> Attributes {
    let mut neutral = *mode;
    neutral[INPUT_FLAGS..INPUT_FLAGS + 4].fill(0);
    neutral[OUTPUT_FLAGS..OUTPUT_FLAGS + 4].fill(0);
    let local = if canonical { ICANON } else { 0 };
    neutral[LOCAL_FLAGS..LOCAL_FLAGS + 4].copy_from_slice(&local.to_ne_bytes());
    neutral[CHARACTERS].fill(0);
    neutral[VEOF] = end;
    neutral[VMIN] = 1;
    neutral
}

/// A byte that is not among those on their way (0 and newline have meanings).
fn unused_byte(flight: &Flight) -> Option<u8> {
    let is_used = |byte: &u8| {
        flight.typed.contains(byte) || flight.lines.iter().any(|line| line.contains(byte))
    };
    (1..=255).find(|byte| *byte != b'\n' && !is_used(byte))
}

/// Writes everything. Where there is no more room, the kernel's worker is given the time to pass
/// on what came before towards `reader`.
fn write_all(to: BorrowedFd<'_>, reader: BorrowedFd<'_>, bytes: &[u8]) -> io::Result<()> {
    let started = Instant::now();
    let mut written = 0;
    while written < bytes.len() {
        match rustix::io::write(to, &bytes[written..]) {
            Ok(more) => written += more,
            // Without room for a first byte it is not the room that is missing.
            Err(Errno::AGAIN) if written > 0 && started.elapsed() < PATIENCE => {
                flush_work(reader)?;
                std::thread::yield_now();
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

/// Prints on an empty terminal, which may be stopped (Ctrl-S): then it takes nothing.
fn print(bytes: &[u8], slave: BorrowedFd<'_>, master: BorrowedFd<'_>) -> io::Result<()> {
    let Some(first) = bytes.get(..1) else {
        return Ok(());
    };
    match write_all(slave, master, first) {
        Err(error) if Errno::from_io_error(&error) == Some(Errno::AGAIN) => {
            tcflow(slave, Action::OOn)?;
            write_all(slave, master, bytes)?;
            Ok(tcflow(slave, Action::OOff)?)
        }
        Ok(()) => write_all(slave, master, &bytes[1..]),
        other => other,
    }
}

/// Waits until this many bytes can be read, or as many as can be at a time.
fn arrives(at: BorrowedFd<'_>, bytes: usize) -> io::Result<()> {
    let bytes = bytes.min(VISIBLE_MAX);
    let started = Instant::now();
    loop {
        flush_work(at)?;
        if unread(at)? >= bytes {
            return Ok(());
        }
        if started.elapsed() > PATIENCE {
            return Err(Errno::TIMEDOUT.into());
        }
        std::thread::yield_now();
    }
}
