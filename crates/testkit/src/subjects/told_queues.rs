//! POSIX message queues of whose next message somebody is to be told: an empty one by a signal with
//! a value, an empty one by a netlink socket, as a thread of the C library would be, and one with
//! messages, of which a child is told that has opened it by itself.
//!
//! `quiet` answers "right" if nobody was told of anything, and all are still to be; `check` if all
//! are told of the next message, as they wanted, and the messages are as they were. `remove` takes
//! the names away.
use std::ffi::CString;
use std::io::{PipeReader, PipeWriter, Read, Write};
use std::os::fd::{AsFd, OwnedFd};

use rustix::fs::OFlags;
use rustix::net::{RecvFlags, recv};
use rustix::process::getpid;
use sys::fork::{Fork, fork};
use sys::mqueue::{self, Attributes, Message, Tell};

use super::{Control, Failure, not_understood};
use crate::calls::{block_signals, take_signal, wait_for_signal};

/// Priorities, and lengths at and beside those at which the kernel begins another piece.
const MESSAGES: [(u32, usize); 8] = [
    (32_767, 3),
    (7, 4048),
    (7, 4049),
    (7, 0),
    (5, 8136),
    (5, 8137),
    (0, 8192),
    (0, 1),
];
const MESSAGE_BYTES: usize = 8192;
const SIGNAL: i32 = 41;
const CHILDS_SIGNAL: i32 = 42;
const VALUE: u64 = 0xfeed_face_cafe_beef;
const COOKIE: [u8; 32] = *b"thirty-two bytes that are told: ";
/// `SI_MESGQ`.
const CODE: i32 = -3;
/// `NOTIFY_WOKENUP`.
const TOLD: u8 = 1;
const AF_NETLINK: i32 = 16;
const SOCK_RAW: i32 = 3;

struct Queues {
    names: [CString; 3],
    by_signal: OwnedFd,
    by_socket: OwnedFd,
    socket: OwnedFd,
    filled: OwnedFd,
    child: i32,
    childs: PipeReader,
}

fn make(name: &str) -> Result<(CString, OwnedFd), Failure> {
    let name = CString::new(format!("stillframe-{name}-{}", std::process::id()))?;
    let room = Attributes {
        max_messages: 10,
        message_bytes: MESSAGE_BYTES as u64,
        messages: 0,
    };
    let queue = mqueue::create(&name, room)?;
    Ok((name, queue))
}

fn message((priority, len): (u32, usize)) -> Message {
    let bytes = (0..len).map(|at| (at % 251) as u8).collect();
    Message { priority, bytes }
}

/// Whom a queue tells, of which the kernel says so to its reader.
fn told(queue: &OwnedFd) -> Result<String, Failure> {
    let mut text = [0; 128];
    let len = rustix::io::pread(queue, &mut text[..], 0)?;
    let text = String::from_utf8_lossy(&text[..len]).into_owned();
    let (_, pid) = text.split_once("NOTIFY_PID:").ok_or("no such field")?;
    Ok(pid.trim().to_owned())
}

/// Is told of messages, and says so, until it is killed.
fn be_child(name: &CString, mut says: PipeWriter) -> Result<(), Failure> {
    let own = mqueue::open(name, OFlags::RDWR | OFlags::NONBLOCK)?;
    loop {
        mqueue::notify(&own, Tell::Signal(CHILDS_SIGNAL, 1))?;
        says.write_all(b"x")?;
        // A look at the subject from outside may interrupt it.
        while let Err(error) = wait_for_signal(CHILDS_SIGNAL) {
            if error.kind() != std::io::ErrorKind::Interrupted {
                return Err(error.into());
            }
        }
    }
}

impl Queues {
    fn make() -> Result<Self, Failure> {
        block_signals(&[SIGNAL, CHILDS_SIGNAL]);
        let (signals_name, by_signal) = make("by-signal")?;
        let (sockets_name, by_socket) = make("by-socket")?;
        let (filled_name, filled) = make("filled")?;
        for one in MESSAGES {
            mqueue::send(&filled, &message(one))?;
        }
        let (mut childs, says) = std::io::pipe()?;
        let child = match fork()? {
            Fork::Parent(child) => child,
            Fork::Child => {
                be_child(&filled_name, says)?;
                std::process::exit(1);
            }
        };
        drop(says);
        childs.read_exact(&mut [0])?;
        let queues = Self {
            names: [signals_name, sockets_name, filled_name],
            by_signal,
            by_socket,
            socket: sys::socket::open(AF_NETLINK, SOCK_RAW, 0)?,
            filled,
            child: child.as_raw_nonzero().get(),
            childs,
        };
        queues.register()?;
        Ok(queues)
    }

    fn register(&self) -> Result<(), Failure> {
        mqueue::notify(&self.by_signal, Tell::Signal(SIGNAL, VALUE))?;
        mqueue::notify(&self.by_socket, Tell::Socket(self.socket.as_fd(), &COOKIE))?;
        Ok(())
    }

    fn receive_told(&self) -> Result<Vec<u8>, Failure> {
        let mut bytes = [0; 64];
        let (len, _) = recv(&self.socket, &mut bytes[..], RecvFlags::DONTWAIT)?;
        Ok(bytes[..len].to_vec())
    }

    fn quiet(&self) -> Result<(), Failure> {
        let (own, child) = (getpid().to_string(), self.child.to_string());
        for (queue, pid) in [
            (&self.by_signal, &own),
            (&self.by_socket, &own),
            (&self.filled, &child),
        ] {
            let told = told(queue)?;
            if told != *pid {
                return Err(format!("pid {told} is told, not {pid}").into());
            }
        }
        let pending = std::fs::read_to_string(format!("/proc/{child}/status"))?;
        let none = ["SigPnd", "ShdPnd"].map(|name| format!("{name}:\t{:016x}", 0));
        match take_signal(&[SIGNAL]) {
            Some(signal) => Err(format!("{signal:?} came").into()),
            None if self.receive_told().is_ok() => Err("the socket was told".into()),
            None if none.iter().all(|line| pending.contains(line)) => Ok(()),
            None => Err("the child was told".into()),
        }
    }

    fn check(&mut self) -> Result<(), Failure> {
        let mut room = [0; MESSAGE_BYTES];
        for one in MESSAGES {
            let got = mqueue::receive(&self.filled, &mut room)?;
            if got != Some(message(one)) {
                return Err(format!("another message than {one:?}").into());
            }
        }
        for one in MESSAGES {
            mqueue::send(&self.filled, &message(one))?;
        }
        self.childs.read_exact(&mut [0])?;
        for queue in [&self.by_signal, &self.by_socket] {
            mqueue::send(queue, &message((3, 10)))?;
            mqueue::receive(queue, &mut room)?.ok_or("no message")?;
        }
        let signal = take_signal(&[SIGNAL]);
        if signal != Some((SIGNAL, CODE, VALUE)) {
            return Err(format!("{signal:x?} came").into());
        }
        let mut wanted = COOKIE;
        wanted[31] = TOLD;
        let told = self.receive_told()?;
        if told != wanted {
            return Err(format!("{told:?} came").into());
        }
        self.register()
    }
}

pub(super) fn run(control: Control, _: &[String]) -> Result<(), Failure> {
    let mut queues = Queues::make()?;
    let told = |outcome: Result<(), Failure>| {
        Ok(outcome.map_or_else(|error| error.to_string(), |()| "right".to_owned()))
    };
    control.serve(|question| match question.verb.as_str() {
        "quiet" => told(queues.quiet()),
        "check" => told(queues.check()),
        "remove" => {
            let mut names = queues.names.iter();
            names.try_for_each(|name| mqueue::unlink(name))?;
            Ok("removed".to_owned())
        }
        _ => not_understood(question),
    })
}
