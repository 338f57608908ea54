//! Sockets that few programs have: two of UDP-Lite, one with a datagram that was not read, and two
//! of vsock, one that listens and one that is only bound. Those that the kernel lacks are left out.
//!
//! `check` answers "right" if all are what they were and the datagram waits, `held` how many there
//! are; `take` reads the datagram.
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use sys::socket::{number, set_number};

use super::{Control, Failure, not_understood};

const AF_INET: i32 = 2;
const AF_VSOCK: i32 = 40;
const SOCK_STREAM: i32 = 1;
const SOCK_DGRAM: i32 = 2;
const UDPLITE: i32 = 136;
const SEND_COVERAGE: i32 = 10;
const RECEIVE_COVERAGE: i32 = 11;
const COVERED_BYTES: i32 = 20;
const SOL_SOCKET: i32 = 1;
const SO_ACCEPTCONN: i32 = 30;
const MSG_PEEK_AT_ONCE: i32 = 0x42;
const WAITING: &[u8] = b"a datagram that was not read";

/// Two sockets of UDP-Lite; what the first sends, the second gets.
struct UdpLite {
    sender: UdpSocket,
    receiver: UdpSocket,
}

impl UdpLite {
    fn new() -> Result<Self, Failure> {
        let make = || -> std::io::Result<UdpSocket> {
            let own = sys::socket::open(AF_INET, SOCK_DGRAM, UDPLITE)?;
            rustix::net::bind(&own, &SocketAddr::from(([127, 0, 0, 1], 0)))?;
            Ok(own.into())
        };
        let (sender, receiver) = (make()?, make()?);
        set_number(&sender, UDPLITE, SEND_COVERAGE, COVERED_BYTES)?;
        set_number(&receiver, UDPLITE, RECEIVE_COVERAGE, COVERED_BYTES)?;
        receiver.set_read_timeout(Some(Duration::from_secs(10)))?;
        sender.connect(receiver.local_addr()?)?;
        sender.send(WAITING)?;
        Ok(Self { sender, receiver })
    }

    fn is_right(&self) -> Result<bool, Failure> {
        let mut text = [0; 100];
        let received = sys::socket::receive(&self.receiver, &mut text, MSG_PEEK_AT_ONCE)?;
        let sent = number(&self.sender, UDPLITE, SEND_COVERAGE)?;
        let wanted = number(&self.receiver, UDPLITE, RECEIVE_COVERAGE)?;
        Ok(&text[..received.len] == WAITING && (sent, wanted) == (COVERED_BYTES, COVERED_BYTES))
    }

    fn take(&self) -> Result<String, Failure> {
        let mut text = [0; 100];
        let bytes = self.receiver.recv(&mut text)?;
        Ok(String::from_utf8_lossy(&text[..bytes]).into_owned())
    }
}

/// A vsock socket at this port of the machine.
fn vsock(port: u32) -> std::io::Result<OwnedFd> {
    let own = sys::socket::open(AF_VSOCK, SOCK_STREAM, 0)?;
    let words = [AF_VSOCK.cast_unsigned(), port, u32::MAX, 0];
    let address = words.map(u32::to_ne_bytes).concat();
    sys::socket::bind(&own, &address)?;
    Ok(own)
}

pub(super) fn run(control: Control, _: &[String]) -> Result<(), Failure> {
    let lite = UdpLite::new().ok();
    let port = std::process::id() << 8;
    let machine = vsock(port).and_then(|listener| {
        sys::socket::listen(&listener, 3)?;
        Ok([listener, vsock(port + 1)?])
    });
    let machine = machine.ok();
    let name = |own: &OwnedFd| sys::socket::name(own.as_fd());
    let names = machine.iter().flatten().map(name);
    let names = names.collect::<std::io::Result<Vec<_>>>()?;
    control.serve(|question| match question.verb.as_str() {
        "check" => {
            let mut listens = Vec::new();
            for (own, before) in machine.iter().flatten().zip(&names) {
                if name(own)? != *before {
                    return Ok("another address".to_owned());
                }
                listens.push(number(own, SOL_SOCKET, SO_ACCEPTCONN)?);
            }
            if !listens.is_empty() && listens != [1, 0] {
                return Ok(format!("{listens:?} listen"));
            }
            match &lite {
                Some(lite) if !lite.is_right()? => Ok("another datagram".to_owned()),
                _ => Ok("right".to_owned()),
            }
        }
        "held" => {
            let vsocks = machine.iter().flatten().count();
            Ok((vsocks + 2 * usize::from(lite.is_some())).to_string())
        }
        "take" => lite.as_ref().ok_or("no UDP-Lite")?.take(),
        _ => not_understood(question),
    })
}
