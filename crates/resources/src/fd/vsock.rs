//! Sockets between a machine and its host (vsock(7)): those that wait for others, as an agent in a
//! guest does, and those that have done nothing yet.
//!
//! How many connections may wait to be accepted the kernel does not tell: as many as the host
//! allows afterwards.
//!
//! - Kept: streams and sockets of messages that are bound, that listen, or that are new: address,
//!   options, filter.
//! - Refused: "it is connected, or its connection has failed or ended, and no call makes that
//!   again"; "it is just being connected: try again"; "connections wait to be accepted",
//!   for all of `--timeout` (`--skip-in-flight`).
//! - At a restore: "this host has no vsock"; "this machine is not number … for vsock any more".
//! - CRIU 4.2: refused.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::PollFlags;
use rustix::io::Errno;

use super::socket::options::{Moment, Options};
use super::socket::{self, Nature};
use super::{DumpContext, Kind, Open, RestoreContext, ready};
use crate::{Allow, Error, Result};

const AF_VSOCK: i32 = libc::AF_VSOCK;
const SOCK_STREAM: i32 = libc::SOCK_STREAM;
const SOCK_SEQPACKET: i32 = libc::SOCK_SEQPACKET;
const SOL_SOCKET: i32 = libc::SOL_SOCKET;
const SO_ACCEPTCONN: i32 = libc::SO_ACCEPTCONN;
const SOMAXCONN: i32 = libc::SOMAXCONN;
/// `VMADDR_CID_ANY` and `VMADDR_PORT_ANY`
const ANY: u32 = u32::MAX;
/// The size of `sockaddr_vm`.
const ADDRESS_BYTES: usize = 16;

/// A vsock socket in an image.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Vsock {
    /// `SOCK_STREAM` or `SOCK_SEQPACKET`.
    #[prost(int32, tag = "1")]
    pub kind: i32,
    /// Status flags and owner.
    #[prost(message, required, tag = "2")]
    pub common: socket::Common,
    /// Its port; none while it has no address.
    #[prost(uint32, optional, tag = "3")]
    pub port: Option<u32>,
    /// The machine's number in its address, `VMADDR_CID_ANY` for any.
    #[prost(uint32, tag = "4")]
    pub machine: u32,
    /// Whether it waits for connections.
    #[prost(bool, tag = "5")]
    pub listens: bool,
    /// Its options.
    #[prost(message, required, tag = "6")]
    pub options: Options,
}

/// The kind.
pub struct VsockSocket;

impl Kind for VsockSocket {
    type Record = Vsock;
    const TAG: u16 = super::tags::VSOCK;
    const NAME: &'static str = "vsock socket";

    fn claims(open: &Open<'_>) -> bool {
        Nature::claims(open, |nature| {
            nature.family == AF_VSOCK && is_kept(nature.kind)
        })
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Vsock> {
        read(open, cx)
    }

    fn check(record: &Vsock) -> Result<()> {
        record.options.check()?;
        let corrupt = |what| Err(Error::corrupt(Self::NAME, what));
        if !is_kept(record.kind) {
            return corrupt("of no known type");
        }
        if record.port == Some(ANY) {
            return corrupt("with a port that is none");
        }
        if record.listens && record.port.is_none() {
            return corrupt("listens without a port");
        }
        Ok(())
    }

    fn describe(record: &Vsock) -> String {
        let Some(port) = record.port else {
            return "no address".to_owned();
        };
        let listens = if record.listens { " listens" } else { "" };
        match record.machine {
            ANY => format!("port={port}{listens}"),
            machine => format!("machine={machine} port={port}{listens}"),
        }
    }

    fn open(record: &Vsock, _cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let own =
            sys::socket::open(AF_VSOCK, record.kind, 0).map_err(
                |error| match Errno::from_io_error(&error) {
                    Some(Errno::AFNOSUPPORT | Errno::NODEV) => Error::Mismatch {
                        what: "this host has no vsock".to_owned(),
                    },
                    _ => Error::kernel("make a vsock socket", error),
                },
            )?;
        record.options.apply(own.as_fd(), Moment::Early)?;
        record.common.apply(own.as_fd())?;
        let Some(port) = record.port else {
            return Ok(own);
        };
        sys::socket::bind(&own, &address(record.machine, port)).map_err(|error| {
            if Errno::from_io_error(&error) != Some(Errno::ADDRNOTAVAIL) {
                return Error::kernel(format!("bind a vsock socket to port {port}"), error);
            }
            let machine = record.machine;
            Error::Mismatch {
                what: format!("this machine is not number {machine} for vsock any more"),
            }
        })?;
        Ok(own)
    }

    fn finish(record: &Vsock, own: BorrowedFd<'_>, _cx: &mut dyn RestoreContext) -> Result<()> {
        record.options.apply(own, Moment::Late)?;
        if record.listens {
            sys::socket::listen(own, SOMAXCONN)
                .map_err(|error| Error::kernel("have a vsock socket listen", error))?;
        }
        Ok(())
    }
}

fn is_kept(kind: i32) -> bool {
    [SOCK_STREAM, SOCK_SEQPACKET].contains(&kind)
}

fn read(open: &Open<'_>, cx: &dyn DumpContext) -> Result<Vsock> {
    let own = open.own()?;
    let failed = |error| Error::kernel(format!("read {}", open.place()), error);
    let (machine, port) = parse(&sys::socket::name(own).map_err(failed)?);
    let listens = sys::socket::number(own, SOL_SOCKET, SO_ACCEPTCONN).map_err(failed)? != 0;
    at_rest(open, listens, cx.allow())?;
    Ok(Vsock {
        kind: Nature::of_socket(open)?.kind,
        common: socket::Common::of(open),
        port: (port != ANY).then_some(port),
        machine,
        listens,
        options: Options::of(open, cx)?,
    })
}

/// Refuses what has a connection, had one, or is about to have one.
fn at_rest(open: &Open<'_>, listens: bool, allow: &Allow) -> Result<()> {
    let own = open.own()?;
    let wanted = PollFlags::IN | PollFlags::OUT | PollFlags::RDHUP;
    let told = ready::events(own, wanted)
        .map_err(|error| Error::kernel(format!("read {}", open.place()), error))?;
    if listens {
        if told.contains(PollFlags::IN) && !allow.skip_in_flight {
            return Err(open.passing("connections wait to be accepted", Some("--skip-in-flight")));
        }
        return Ok(());
    }
    let ended = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR | PollFlags::IN;
    if sys::socket::peer_name(own).is_ok() || told.intersects(ended) {
        let why =
            "it is connected, or its connection has failed or ended, and no call makes that again";
        return Err(open.unsupported(why, None));
    }
    // The kernel has one that is at rest ready to write, as it has one of TCP.
    if !told.contains(PollFlags::OUT) {
        return Err(open.unsupported("it is just being connected: try again", None));
    }
    Ok(())
}

/// Machine and port of a `sockaddr_vm`.
fn parse(address: &[u8]) -> (u32, u32) {
    let word = |at: usize| {
        let bytes = address
            .get(at..at + 4)
            .and_then(|four| four.try_into().ok());
        bytes.map_or(ANY, u32::from_ne_bytes)
    };
    (word(8), word(4))
}

fn address(machine: u32, port: u32) -> [u8; ADDRESS_BYTES] {
    let mut bytes = [0; ADDRESS_BYTES];
    bytes[..2].copy_from_slice(&(AF_VSOCK as u16).to_ne_bytes());
    bytes[4..8].copy_from_slice(&port.to_ne_bytes());
    bytes[8..12].copy_from_slice(&machine.to_ne_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::super::socket::testing::World;
    use super::*;

    const HOST: u32 = 2;
    const BUFFER_BYTES: (i32, i32) = (AF_VSOCK, 0);

    /// A port that no other test has: the kernel has them all in one space.
    fn port(number: u32) -> u32 {
        (std::process::id() << 8) + number
    }

    fn made(kind: i32) -> Option<OwnedFd> {
        sys::socket::open(AF_VSOCK, kind, 0).ok()
    }

    #[test]
    fn listeners_and_idle_ones_survive() {
        for kind in [SOCK_STREAM, SOCK_SEQPACKET] {
            let all = [(); 3].map(|()| made(kind));
            let [Some(listener), Some(bound), Some(fresh)] = all else {
                testkit::skip!("no vsock here");
            };
            let at = port(kind.cast_unsigned());
            sys::socket::bind(&listener, &address(ANY, at)).unwrap();
            sys::socket::listen(&listener, 5).unwrap();
            sys::socket::set_option(&listener, AF_VSOCK, 0, &100_000u64.to_ne_bytes()).unwrap();
            sys::socket::bind(&bound, &address(ANY, at + 100)).unwrap();
            let told = [
                format!("port={at} listens"),
                format!("port={}", at + 100),
                "no address".to_owned(),
            ];
            let mut live = vec![listener, bound, fresh];
            for _ in 0..3 {
                let mut world = World::new(live);
                world.dump().unwrap();
                assert_eq!(world.lines(), told);
                live = world.restore().unwrap();
                let (level, name) = BUFFER_BYTES;
                let bytes = sys::socket::option(&live[0], level, name, 8).unwrap();
                assert_eq!(bytes, 100_000u64.to_ne_bytes());
                let accepts = sys::socket::number(&live[0], SOL_SOCKET, SO_ACCEPTCONN);
                assert_eq!(accepts.unwrap(), 1);
            }
        }
    }

    #[test]
    fn a_port_that_somebody_else_has_is_refused() {
        let (Some(listener), Some(other)) = (made(SOCK_STREAM), made(SOCK_STREAM)) else {
            testkit::skip!("no vsock here");
        };
        let at = address(ANY, port(50));
        sys::socket::bind(&listener, &at).unwrap();
        let mut world = World::new(vec![listener]);
        world.dump().unwrap();
        world.forget();
        sys::socket::bind(&other, &at).unwrap();
        let error = world.restore().unwrap_err();
        assert!(error.is_in_use(), "{error}");
    }

    #[test]
    fn one_that_is_just_being_connected_is_refused() {
        let Some(socket) = made(SOCK_STREAM) else {
            testkit::skip!("no vsock here");
        };
        rustix::io::ioctl_fionbio(&socket, true).unwrap();
        let begun = sys::socket::connect(&socket, &address(HOST, port(51)));
        if begun.err().as_ref().and_then(Errno::from_io_error) != Some(Errno::INPROGRESS) {
            testkit::skip!("no host that could be connected to");
        }
        // The host says no at some time, perhaps already.
        let error = World::new(vec![socket]).dump().unwrap_err().to_string();
        assert!(error.contains("connect"), "{error}");
    }

    #[test]
    fn one_whose_connection_was_refused_is_refused() {
        let Some(socket) = made(SOCK_STREAM) else {
            testkit::skip!("no vsock here");
        };
        let errno = sys::socket::connect(&socket, &address(HOST, port(52))).err();
        if errno.as_ref().and_then(Errno::from_io_error) != Some(Errno::CONNRESET) {
            testkit::skip!("no host that says no");
        }
        // The kernel has it tell of that for ever.
        let error = World::new(vec![socket]).dump().unwrap_err().to_string();
        assert!(error.contains("failed or ended"), "{error}");
    }

    #[test]
    fn damaged_payloads_are_refused() {
        let good = Vsock {
            kind: SOCK_STREAM,
            port: Some(5),
            ..Vsock::default()
        };
        VsockSocket::check(&good).unwrap();
        for bad in [
            Vsock {
                kind: 2,
                ..good.clone()
            },
            Vsock {
                port: Some(ANY),
                ..good.clone()
            },
            Vsock {
                port: None,
                listens: true,
                ..good
            },
        ] {
            VsockSocket::check(&bad).unwrap_err();
        }
    }
}
