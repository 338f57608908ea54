//! A userfaultfd by way of /dev/userfaultfd, for processes that may not call userfaultfd(2): who
//! opened the device is what counts (Documentation/admin-guide/mm/userfaultfd.rst), so we open it
//! and hand it over.
//!
//! The process connects to a socket of ours, is sent the device, and makes the userfaultfd of it.
//! Numbers of descriptors are the lowest free ones, which are known as it is stopped.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use abi::{Addr, Kind, Op, offset};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{CWD, Mode, OFlags, openat};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, SocketAddrUnix, SocketFlags, SocketType, acceptfrom_with, bind, getsockname,
    listen, socket_with,
};
use sys::socket::Along;

use crate::injection::{Batch, Opening, UNMADE};
use crate::limit::Limit;

const SOCKET: u64 = 41;
const CONNECT: u64 = 42;
const RECVMSG: u64 = 47;
const IOCTL: u64 = 16;
const AF_UNIX: u64 = libc::AF_UNIX as u64;
const STREAM_CLOEXEC: u64 = 0o2_000_001;
const MSG_CMSG_CLOEXEC: u64 = libc::MSG_CMSG_CLOEXEC as u64;
const USERFAULTFD_IOC_NEW: u64 = 0xaa00;

/// Where the parts of the data are, in bytes: the socket's address, …
const ADDRESS_BYTES: u64 = 112;
/// … a `struct iovec`, …
const IOV_AT: u64 = ADDRESS_BYTES;
/// … a `struct msghdr`, …
const MESSAGE_AT: u64 = IOV_AT + 16;
/// … a `struct cmsghdr` with room for one descriptor, …
const CONTROL_AT: u64 = MESSAGE_AT + 56;
const HANDED_AT: u64 = CONTROL_AT + 16;
const CONTROL_BYTES: u64 = 24;
/// … and the byte that comes with it.
const BYTE_AT: u64 = CONTROL_AT + CONTROL_BYTES;
const DATA_BYTES: usize = BYTE_AT as usize + 8;

/// What both sides need.
pub(crate) struct Handed {
    pid: i32,
    listener: OwnedFd,
    device: OwnedFd,
    /// The listener's address, as connect(2) takes it.
    address: Vec<u8>,
    /// What the process's socket and its copy of the device will be called.
    numbers: [u64; 2],
    flags: u64,
}

impl Handed {
    /// Opens the device for process `pid`, whose descriptors have the numbers `taken`.
    ///
    /// # Errors
    /// `ENOENT` where there is no device, `EACCES`.
    pub fn new(pid: i32, taken: &[i32], flags: u64) -> io::Result<Self> {
        let mode = OFlags::RDWR | OFlags::CLOEXEC;
        let device = openat(
            CWD,
            sys::host::path("/dev/userfaultfd"),
            mode,
            Mode::empty(),
        )?;
        let listener = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        // The kernel finds an abstract name that nobody has.
        bind(&listener, &SocketAddrUnix::new_unnamed())?;
        listen(&listener, 8)?;
        let name = SocketAddrUnix::try_from(getsockname(&listener)?)?;
        let mut address = 1u16.to_ne_bytes().to_vec();
        address.push(0);
        address.extend(name.abstract_name().ok_or(Errno::ADDRNOTAVAIL)?);
        let mut free = (0u64..).filter(|number| !taken.iter().any(|one| *one as u64 == *number));
        let numbers = [(); 2].map(|()| free.next().expect("endless"));
        Ok(Self {
            pid,
            listener,
            device,
            address,
            numbers,
            flags,
        })
    }
}

impl Batch for Handed {
    fn ops_bytes(&self) -> usize {
        5 * Op::BYTES
    }

    fn data_bytes(&self) -> usize {
        DATA_BYTES
    }

    fn compile(&self, _: Addr, data: Addr) -> (Vec<u8>, Vec<u8>) {
        let [own, device] = self.numbers;
        let unmade = |op: Op| Op {
            result: UNMADE,
            ..op
        };
        let opens = Op::call(SOCKET, [AF_UNIX, STREAM_CLOEXEC, 0, 0, 0, 0]);
        let length = self.address.len() as u64;
        let message = data.plus(MESSAGE_AT).0;
        let receive = Op::call(RECVMSG, [own, message, MSG_CMSG_CLOEXEC, 0, 0, 0]);
        let make = [device, USERFAULTFD_IOC_NEW, self.flags, 0, 0, 0];
        let ops = [
            unmade(opens).with(Kind::Expect, own),
            unmade(Op::call(CONNECT, [own, data.0, length, 0, 0, 0])),
            unmade(receive).with(Kind::Expect, 1),
            unmade(Op::call(IOCTL, make)),
            Op::end(),
        ];
        let mut bytes = self.address.clone();
        bytes.resize(ADDRESS_BYTES as usize, 0);
        let iov = [data.plus(BYTE_AT).0, 1];
        let header = [
            0,
            0,
            data.plus(IOV_AT).0,
            1,
            data.plus(CONTROL_AT).0,
            CONTROL_BYTES,
            0,
        ];
        // Until the device comes, its number is none.
        let control = [0, 0, u64::MAX];
        let words = iov.into_iter().chain(header).chain(control);
        bytes.extend(words.flat_map(u64::to_le_bytes));
        bytes.resize(DATA_BYTES, 0);
        (ops.iter().flat_map(Op::to_bytes).collect(), bytes)
    }

    fn opened(&self, ops: Addr, data: Addr) -> Vec<Addr> {
        let result = |index: u64| ops.plus(index * Op::BYTES as u64 + offset::RESULT as u64);
        vec![result(0), data.plus(HANDED_AT), result(3)]
    }
}

impl Opening for Handed {
    fn assist(&self, has_ended: &dyn Fn() -> bool) -> io::Result<()> {
        const PAUSE: Timespec = Timespec {
            tv_sec: 0,
            tv_nsec: 10_000_000,
        };
        let limit = Limit::begin();
        loop {
            // Before the look at the socket: what ends without it has failed.
            let is_over = has_ended() || limit.is_over();
            let mut fds = [PollFd::new(&self.listener, PollFlags::IN)];
            match poll(&mut fds, Some(&PAUSE)) {
                Ok(0) if is_over => return Err(Errno::TIMEDOUT.into()),
                Ok(0) | Err(Errno::INTR) => continue,
                other => other?,
            };
            let own = acceptfrom_with(&self.listener, SocketFlags::CLOEXEC)?.0;
            // Anyone may connect to the name.
            let peer = rustix::net::sockopt::socket_peercred(&own)?;
            if peer.pid.as_raw_nonzero().get() != self.pid {
                continue;
            }
            let rights = [self.device.as_fd()];
            let along = Along {
                rights: &rights,
                ..Along::default()
            };
            return sys::socket::send(&own, &[0], along, 0).map(drop);
        }
    }
}
