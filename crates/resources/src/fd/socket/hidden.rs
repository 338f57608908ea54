//! Hidden state of a socket, of which no call tells: counters, programs and addresses that are
//! looked up in the kernel's memory, or that something else hints at.
//!
//! Sockets of UDP, raw ones and those of ping are always looked at; others where an option hints
//! that there is something. Where the kernel may not be looked into, what is hinted at is refused.
//!
//! - What: what no call tells of a socket
//! - Kept: by which interface multicast of IPv4 goes out; the classic program that chooses among
//!   the sockets of a port (`SO_ATTACH_REUSEPORT_CBPF`). Needs bpf(2) and the kernel's description
//!   of its types.
//! - Refused: "an eBPF program chooses among the sockets of its port"; "a program chooses among
//!   the sockets of its port, and one of them is outside of the tree"; "a program chooses among
//!   the sockets of its port, which came to it in another order than they are made again"; "a
//!   program may choose among the sockets of its port (SO_REUSEPORT), and the kernel does not
//!   tell: …"; "it numbers what it sends (SO_ZEROCOPY), and no call sets the next number"; "it
//!   numbers what it sends (SOF_TIMESTAMPING_OPT_ID), and no call sets the next number"; "it is,
//!   or may be, the multicast router of its network namespace (MRT_INIT)"; "it has an IPsec policy
//!   of its own (IP_XFRM_POLICY)"; "it has joined an anycast address (IPV6_JOIN_ANYCAST)"; "it has
//!   a lease of a flow label (IPV6_FLOWLABEL_MGR)"; "it has an interface that all of its packets
//!   leave by (IPV6_PKTINFO)"; "the kernel itself uses it: a map of BPF, a tunnel or the like";
//!   "an error, or a message in its error queue, waits to be fetched: try again".
//! - CRIU 4.2: not kept, without a word.

use std::os::fd::BorrowedFd;

use rustix::event::PollFlags;

use super::ledger::Kinds;
use super::options::Options;
use super::{Nature, find_address};
use crate::fd::{DumpContext, Open, ready};
use crate::kernel::Kernel;
use crate::{Error, Result};

const AF_INET6: i32 = super::inet::AF_INET6;
const SOCK_STREAM: i32 = libc::SOCK_STREAM;
const SOCK_RAW: i32 = libc::SOCK_RAW;
const SOL_IP: i32 = libc::SOL_IP;
const SOL_SOCKET: i32 = libc::SOL_SOCKET;
const SOL_IPV6: i32 = libc::SOL_IPV6;
const IPPROTO_IGMP: i32 = libc::IPPROTO_IGMP;
const IPPROTO_ICMPV6: i32 = libc::IPPROTO_ICMPV6;
const SO_REUSEPORT: i32 = libc::SO_REUSEPORT;
const SO_TIMESTAMPING: i32 = libc::SO_TIMESTAMPING;
const SO_ZEROCOPY: i32 = libc::SO_ZEROCOPY;
const IP_MULTICAST_IF: i32 = libc::IP_MULTICAST_IF;
const IPV6_FLOWLABEL_MGR: i32 = libc::IPV6_FLOWLABEL_MGR;
/// `SOF_TIMESTAMPING_OPT_ID`
const NUMBERS_TIMES: i32 = libc::SOF_TIMESTAMPING_OPT_ID as i32;
/// The most instructions that a classic program has.
const PROGRAM_MOST: u64 = 4096;
/// One instruction of it: `struct sock_filter`.
const INSTRUCTION_BYTES: usize = 8;
/// The most sockets that share a port and are looked at.
const SHARERS_MOST: usize = 1 << 14;

/// The hidden state that is kept.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Hidden {
    /// The interface by which multicast of IPv4 goes out; 0 for the one that routes say.
    #[prost(uint32, tag = "1")]
    pub multicast_interface: u32,
    /// The address in its name; empty for none.
    #[prost(bytes = "vec", tag = "2")]
    pub multicast_address: Vec<u8>,
    /// The classic program that chooses among the sockets of its port, 8 bytes an instruction.
    #[prost(bytes = "vec", tag = "3")]
    pub chooser: Vec<u8>,
}

/// A socket in the kernel's memory.
struct KernelSocket {
    kernel: &'static Kernel,
    /// The address of its `struct sock`.
    sock: u64,
}

/// Looks at a socket of which `options` were read.
///
/// # Errors
/// [`Error::Unsupported`] for what is not kept, or a call's errno.
pub fn look(
    open: &Open<'_>,
    nature: Nature,
    options: &Options,
    cx: &dyn DumpContext,
) -> Result<Hidden> {
    refuse_router(open, nature)?;
    refuse_label(open, nature)?;
    let hints = Hints::of(open, nature, options)?;
    if hints.numbers_times && nature.kind == SOCK_STREAM {
        return Err(open.unsupported(NUMBERED_TIMES, None));
    }
    let kinds = Kinds::of(nature);
    let is_packets = kinds.meets(Kinds::IP_PACKETS.or(Kinds::IPV6_PACKETS));
    let mut hidden = Hidden::default();
    if hints == Hints::default() && !is_packets {
        return Ok(hidden);
    }
    let own = open.own()?;
    let failed = |error| Error::kernel(format!("look at {}", open.place()), error);
    if kinds.meets(Kinds::IP_PACKETS) {
        let address = sys::socket::option(own, SOL_IP, IP_MULTICAST_IF, 4).map_err(failed)?;
        if address.iter().any(|byte| *byte != 0) {
            hidden.multicast_address = address;
        }
    }
    let looked = match KernelSocket::at(own) {
        Ok(looked) => looked,
        Err(why) => {
            log::debug!("{}: the kernel does not tell more: {why}", open.place());
            hints.refuse(open, &why)?;
            return Ok(hidden);
        }
    };
    if hints.numbers_times && looked.half("sk_tskey").map_err(failed)? != 0 {
        return Err(open.unsupported(NUMBERED_TIMES, None));
    }
    if hints.numbers_copies && looked.half("sk_zckey").map_err(failed)? != 0 {
        return Err(open.unsupported(NUMBERED_COPIES, None));
    }
    if kinds.meets(Kinds::IP.or(Kinds::IPV6)) {
        hidden.chooser = looked.chooser(open, cx)?;
    }
    if is_packets {
        looked.refuse_uses(open, nature).map_err(failed)??;
        hidden.multicast_interface = looked.multicast_interface().map_err(failed)?;
    }
    Ok(hidden)
}

const NUMBERED_TIMES: &str =
    "it numbers what it sends (SOF_TIMESTAMPING_OPT_ID), and no call sets the next number";

const NUMBERED_COPIES: &str =
    "it numbers what it sends (SO_ZEROCOPY), and no call sets the next number";

/// Hidden state that a socket's options hint at.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Hints {
    /// It numbers the times that it is told of what it sent.
    numbers_times: bool,
    /// It numbers what it sends without a copy.
    numbers_copies: bool,
    /// It shares its port.
    shares_port: bool,
}

impl Hints {
    fn of(open: &Open<'_>, nature: Nature, options: &Options) -> Result<Self> {
        let is_on = |name| options.number(SOL_SOCKET, name).is_some_and(|on| on != 0);
        // A socket from accept(2) has the listener's options, and no part in its port.
        let is_accepted = |own| nature.kind == SOCK_STREAM && sys::socket::peer_name(own).is_ok();
        Ok(Self {
            numbers_times: times(options) & NUMBERS_TIMES != 0,
            numbers_copies: is_on(SO_ZEROCOPY),
            shares_port: is_on(SO_REUSEPORT) && !is_accepted(open.own()?),
        })
    }

    /// Refuses what is hinted at, where the kernel may not be looked into.
    fn refuse(self, open: &Open<'_>, why: &str) -> Result<()> {
        if self.numbers_times {
            return Err(open.unsupported(NUMBERED_TIMES, None));
        }
        if self.numbers_copies {
            return Err(open.unsupported(NUMBERED_COPIES, None));
        }
        if self.shares_port {
            let what = format!(
                "a program may choose among the sockets of its port (SO_REUSEPORT), and the \
                 kernel does not tell: {why}"
            );
            return Err(open.unsupported(&what, None));
        }
        Ok(())
    }
}

/// The flags of `SO_TIMESTAMPING`, whichever layout was asked for.
fn times(options: &Options) -> i32 {
    let value = options.value(SOL_SOCKET, SO_TIMESTAMPING);
    let four = value.and_then(|value| value.get(..4)?.try_into().ok());
    four.map_or(0, i32::from_ne_bytes)
}

/// Refuses a socket that multicast routers use while there is a router in its network namespace.
/// The kernel does not tell which socket it is.
fn refuse_router(open: &Open<'_>, nature: Nature) -> Result<()> {
    let family = match (nature.kind, nature.protocol) {
        (SOCK_RAW, IPPROTO_IGMP) if nature.family != AF_INET6 => "ipv4",
        (SOCK_RAW, IPPROTO_ICMPV6) if nature.family == AF_INET6 => "ipv6",
        _ => return Ok(()),
    };
    let path = sys::procfs::path(format_args!("sys/net/{family}/conf/all/mc_forwarding"));
    let forwards = std::fs::read_to_string(path).unwrap_or_default();
    if ["", "0"].contains(&forwards.trim()) {
        return Ok(());
    }
    let why = "it is, or may be, the multicast router of its network namespace (MRT_INIT)";
    Err(open.unsupported(why, None))
}

/// Refuses a lease of a flow label, of a TCP socket by what a call tells.
fn refuse_label(open: &Open<'_>, nature: Nature) -> Result<()> {
    const REQUEST_BYTES: usize = 32;
    if (nature.family, nature.kind) != (AF_INET6, SOCK_STREAM) {
        return Ok(());
    }
    let mut request = [0; REQUEST_BYTES];
    let told = sys::socket::ask_option(open.own()?, SOL_IPV6, IPV6_FLOWLABEL_MGR, &mut request);
    // Where labels of others are reflected, each connection tells of one.
    let reflects = || sys::procfs::read_text("sys/net/ipv6/flowlabel_reflect");
    if told.is_err() || reflects().is_ok_and(|text| text.trim() != "0") {
        return Ok(());
    }
    Err(open.unsupported(LABEL, None))
}

const LABEL: &str = "it has a lease of a flow label (IPV6_FLOWLABEL_MGR)";

/// Refuses a socket, other than of UDP, that tells of an error, or of a message in its error queue:
/// whoever fetches them takes them.
///
/// # Errors
/// [`Error::Unsupported`], or the call's errno.
pub fn refuse_errors(open: &Open<'_>) -> Result<()> {
    let told = ready::events(open.own()?, PollFlags::empty())
        .map_err(|error| Error::kernel(format!("poll {}", open.place()), error))?;
    if told.contains(PollFlags::ERR) {
        return Err(open.unsupported(ERRORS, None));
    }
    Ok(())
}

const ERRORS: &str = "an error, or a message in its error queue, waits to be fetched: try again";

impl KernelSocket {
    fn at(own: BorrowedFd<'_>) -> std::result::Result<Self, String> {
        let kernel = Kernel::get().map_err(str::to_owned)?;
        let sock = kernel.socket(own).map_err(|error| error.to_string())?;
        Ok(Self { kernel, sock })
    }

    fn half(&self, member: &str) -> std::io::Result<u32> {
        self.kernel.half_of("sock", member, self.sock)
    }

    fn word(&self, member: &str) -> std::io::Result<u64> {
        self.kernel.word_of("sock", member, self.sock)
    }

    fn multicast_interface(&self) -> std::io::Result<u32> {
        self.kernel.half_of("inet_sock", "mc_index", self.sock)
    }

    /// Refuses what a socket without connections has that no call tells.
    fn refuse_uses(&self, open: &Open<'_>, nature: Nature) -> std::io::Result<Result<()>> {
        let kernel = self.kernel;
        if kernel.has("sock", "sk_policy") {
            let at = kernel.address_of("sock", "sk_policy", self.sock)?;
            if kernel.words(at, 2)? != [0, 0] {
                let why = "it has an IPsec policy of its own (IP_XFRM_POLICY)";
                return Ok(Err(open.unsupported(why, None)));
            }
        }
        if self.word("sk_user_data")? != 0 {
            let why = "the kernel itself uses it: a map of BPF, a tunnel or the like";
            return Ok(Err(open.unsupported(why, None)));
        }
        if nature.family != AF_INET6 {
            return Ok(Ok(()));
        }
        let six = kernel.word_of("inet_sock", "pinet6", self.sock)?;
        let six_of = |member| kernel.word_of("ipv6_pinfo", member, six);
        if six_of("ipv6_ac_list")? != 0 {
            let why = "it has joined an anycast address (IPV6_JOIN_ANYCAST)";
            return Ok(Err(open.unsupported(why, None)));
        }
        // Linux 6.18 has moved it.
        let labels = match kernel.has("inet_sock", "ipv6_fl_list") {
            true => kernel.word_of("inet_sock", "ipv6_fl_list", self.sock)?,
            false => six_of("ipv6_fl_list")?,
        };
        if labels != 0 {
            return Ok(Err(open.unsupported(LABEL, None)));
        }
        let sticky = kernel.half_of("ipv6_pinfo", "sticky_pktinfo.ipi6_ifindex", six)?;
        if sticky != 0 {
            let why = "it has an interface that all of its packets leave by (IPV6_PKTINFO)";
            return Ok(Err(open.unsupported(why, None)));
        }
        Ok(Ok(()))
    }

    /// The classic program that chooses among the sockets of its port; empty for none.
    fn chooser(&self, open: &Open<'_>, cx: &dyn DumpContext) -> Result<Vec<u8>> {
        let kernel = self.kernel;
        let failed = |error| Error::kernel(format!("look at the port of {}", open.place()), error);
        let group = self.word("sk_reuseport_cb").map_err(failed)?;
        if group == 0 {
            return Ok(Vec::new());
        }
        let of_group = |member| kernel.word_of("sock_reuseport", member, group);
        let program = of_group("prog").map_err(failed)?;
        if program == 0 {
            return Ok(Vec::new());
        }
        let original = kernel
            .word_of("bpf_prog", "orig_prog", program)
            .map_err(failed)?;
        if original == 0 {
            let why = "an eBPF program chooses among the sockets of its port";
            return Err(open.unsupported(why, None));
        }
        let members = self.sharers(group).map_err(failed)?;
        let ids = members.iter().map(|sock| find_address(cx, *sock));
        let Some(ids) = ids.collect::<Option<Vec<_>>>() else {
            let why = "a program chooses among the sockets of its port, and one of them is outside \
                       of the tree";
            return Err(open.unsupported(why, None));
        };
        if !ids.is_sorted() {
            let why = "a program chooses among the sockets of its port, which came to it in \
                       another order than they are made again";
            return Err(open.unsupported(why, None));
        }
        self.program(original).map_err(failed)
    }

    /// The addresses of the sockets of a `struct sock_reuseport`, in their order.
    fn sharers(&self, group: u64) -> std::io::Result<Vec<u64>> {
        let kernel = self.kernel;
        let count = kernel.half_of("sock_reuseport", "num_socks", group)?;
        let count = usize::from(count.to_ne_bytes()[0]) | usize::from(count.to_ne_bytes()[1]) << 8;
        let at = kernel.address_of("sock_reuseport", "socks", group)?;
        kernel.words(at, count.min(SHARERS_MOST))
    }

    /// The instructions of a `struct sock_fprog_kern`.
    fn program(&self, at: u64) -> std::io::Result<Vec<u8>> {
        let kernel = self.kernel;
        let count = kernel.half_of("sock_fprog_kern", "len", at)? & 0xffff;
        let count = u64::from(count).min(PROGRAM_MOST) as usize;
        let filter = kernel.word_of("sock_fprog_kern", "filter", at)?;
        kernel.bytes(filter, count * INSTRUCTION_BYTES)
    }
}

impl Hidden {
    /// Gives a socket its interface for multicast. Once it is bound to a device, the kernel takes
    /// no other one, but keeps one that it has.
    ///
    /// # Errors
    /// The call's errno.
    pub fn apply_before_device(&self, own: BorrowedFd<'_>) -> Result<()> {
        if self.multicast_interface != 0 || !self.multicast_address.is_empty() {
            let address: [u8; 4] = self
                .multicast_address
                .as_slice()
                .try_into()
                .unwrap_or_default();
            let interface = self.multicast_interface.to_ne_bytes();
            let request = [[0; 4], address, interface].concat();
            sys::socket::set_option(own, SOL_IP, IP_MULTICAST_IF, &request)
                .map_err(|error| Error::kernel("set IP_MULTICAST_IF", error))?;
        }
        Ok(())
    }

    /// Gives a socket that has its address what else it had.
    ///
    /// # Errors
    /// The call's errno.
    pub fn apply(&self, own: BorrowedFd<'_>) -> Result<()> {
        if !self.chooser.is_empty() {
            sys::socket::attach_chooser(own, &self.chooser)
                .map_err(|error| Error::kernel("set SO_ATTACH_REUSEPORT_CBPF", error))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::UdpSocket;
    use std::os::fd::{AsFd, OwnedFd};
    use std::time::Duration;

    use super::super::testing::World;
    use super::*;
    use crate::testing::alone;

    /// `return 0`: the first socket gets it all.
    const FIRST: [u8; 8] = [6, 0, 0, 0, 0, 0, 0, 0];
    const LOOPBACK: u32 = 1;
    const SO_BINDTODEVICE: i32 = libc::SO_BINDTODEVICE;

    fn refusal(own: OwnedFd) -> String {
        let error = World::new(vec![own]).dump().unwrap_err();
        error.to_string()
    }

    /// Sockets of UDP that share a port.
    fn sharers(count: usize) -> Vec<OwnedFd> {
        let mut port = 0;
        let sharer = |_| {
            let own = sys::socket::open(2, 2, 0).unwrap();
            sys::socket::set_number(&own, SOL_SOCKET, SO_REUSEPORT, 1).unwrap();
            let mut at = vec![2, 0];
            at.extend(u16::to_be_bytes(port));
            at.extend([127, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0]);
            sys::socket::bind(&own, &at).unwrap();
            let own = UdpSocket::from(own);
            port = own.local_addr().unwrap().port();
            own.into()
        };
        (0..count).map(sharer).collect()
    }

    #[test]
    fn a_program_of_a_shared_port_survives() {
        alone!({
            testkit::needs_kernel_memory!();
            let live = sharers(4);
            sys::socket::attach_chooser(&live[2], &FIRST).unwrap();
            let mut world = World::new(live);
            world.dump().unwrap();
            let restored = world.restore().unwrap();
            let mut restored = restored.into_iter().map(UdpSocket::from);
            let first = restored.next().unwrap();
            first
                .set_read_timeout(Some(Duration::from_secs(30)))
                .unwrap();
            for _ in 0..20 {
                let client = UdpSocket::bind("127.0.0.1:0").unwrap();
                client.send_to(b"x", first.local_addr().unwrap()).unwrap();
                first.recv(&mut [0; 1]).unwrap();
            }
            drop(restored);
        });
    }

    #[test]
    fn a_program_of_a_port_that_is_shared_otherwise_is_refused() {
        alone!({
            testkit::needs_kernel_memory!();
            let mut live = sharers(3);
            sys::socket::attach_chooser(&live[0], &FIRST).unwrap();
            live.swap(0, 2);
            let error = World::new(live).dump().unwrap_err().to_string();
            assert!(error.contains("in another order"), "{error}");
            let mut live = sharers(3);
            sys::socket::attach_chooser(&live[0], &FIRST).unwrap();
            let _outside = live.pop();
            let error = World::new(live).dump().unwrap_err().to_string();
            assert!(error.contains("outside of the tree"), "{error}");
        });
    }

    #[test]
    fn the_interface_of_multicast_survives() {
        alone!({
            testkit::needs_kernel_memory!();
            let own = sys::socket::open(2, 2, 0).unwrap();
            let request = [[0; 4], [127, 0, 0, 1], LOOPBACK.to_ne_bytes()].concat();
            sys::socket::set_option(&own, SOL_IP, IP_MULTICAST_IF, &request).unwrap();
            let mut world = World::new(vec![own]);
            world.dump().unwrap();
            let [own] = world.restore().unwrap().try_into().unwrap();
            let interface = KernelSocket::at(own.as_fd()).unwrap().multicast_interface();
            assert_eq!(interface.unwrap(), LOOPBACK);
            let address = sys::socket::option(&own, SOL_IP, IP_MULTICAST_IF, 4);
            assert_eq!(address.unwrap(), [127, 0, 0, 1]);
        });
    }

    #[test]
    fn an_interface_of_multicast_survives_beside_another_device() {
        testkit::needs_program!("ip");
        alone!({
            testkit::needs_kernel_memory!();
            let mut ip = std::process::Command::new("ip");
            let made = ip.args(["link", "add", "name", "other", "type", "bridge"]);
            assert!(made.status().unwrap().success());
            let own = sys::socket::open(2, 2, 0).unwrap();
            let other = rustix::net::netdevice::name_to_index(&own, "other").unwrap();
            let request = [[0; 4], [0; 4], other.to_ne_bytes()].concat();
            sys::socket::set_option(&own, SOL_IP, IP_MULTICAST_IF, &request).unwrap();
            sys::socket::set_option(&own, SOL_SOCKET, SO_BINDTODEVICE, b"lo\0").unwrap();
            let mut world = World::new(vec![own]);
            world.dump().unwrap();
            let [own] = world.restore().unwrap().try_into().unwrap();
            let interface = KernelSocket::at(own.as_fd()).unwrap().multicast_interface();
            assert_eq!(interface.unwrap(), other);
            let device = sys::socket::option(&own, SOL_SOCKET, SO_BINDTODEVICE, 16);
            assert_eq!(device.unwrap(), b"lo\0");
        });
    }

    #[test]
    fn a_multicast_router_is_refused() {
        const MRT_INIT: i32 = 200;
        alone!({
            for (family, protocol, level) in [(2, IPPROTO_IGMP, 0), (10, IPPROTO_ICMPV6, 41)] {
                let own = sys::socket::open(family, SOCK_RAW, protocol).unwrap();
                World::new(vec![own.try_clone().unwrap()]).dump().unwrap();
                if sys::socket::set_number(&own, level, MRT_INIT, 1).is_err() {
                    testkit::skip!("this kernel routes no multicast");
                }
                let error = refusal(own);
                assert!(error.contains("multicast router"), "{error}");
            }
        });
    }

    #[test]
    fn numbers_of_what_was_sent_are_refused() {
        const SENT_AND_NUMBERED: i32 = 1 << 1 | 1 << 4 | NUMBERS_TIMES;
        const MSG_ERRQUEUE: i32 = libc::MSG_ERRQUEUE;
        alone!({
            testkit::needs_kernel_memory!();
            let other = UdpSocket::bind("127.0.0.1:0").unwrap();
            let own = UdpSocket::bind("127.0.0.1:0").unwrap();
            let flags = [SENT_AND_NUMBERED.to_ne_bytes(), [0; 4]].concat();
            sys::socket::set_option(&own, SOL_SOCKET, SO_TIMESTAMPING, &flags).unwrap();
            World::new(vec![own.try_clone().unwrap().into()])
                .dump()
                .unwrap();
            own.send_to(b"x", other.local_addr().unwrap()).unwrap();
            let fails = || {
                let told = ready::events(own.as_fd(), PollFlags::empty()).unwrap();
                told.contains(PollFlags::ERR)
            };
            testkit::wait::wait_until("a time", Duration::from_secs(30), fails);
            let error = refusal(own.try_clone().unwrap().into());
            assert!(error.contains("numbers what it sends"), "{error}");
            sys::socket::set_option(&own, SOL_SOCKET, SO_TIMESTAMPING, &[0; 8]).unwrap();
            let error = refusal(own.try_clone().unwrap().into());
            assert!(error.contains("in its error queue"), "{error}");
            sys::socket::receive(&own, &mut [0; 100], MSG_ERRQUEUE).unwrap();
            World::new(vec![own.into()]).dump().unwrap();
        });
    }

    #[test]
    fn what_no_call_tells_of_a_datagram_socket_is_refused() {
        const IP_XFRM_POLICY: i32 = libc::IP_XFRM_POLICY;
        const IPV6_PKTINFO: i32 = libc::IPV6_PKTINFO;
        // A policy that lets all go out: `struct xfrm_userpolicy_info`.
        let mut policy = vec![0; 168];
        policy[40..42].copy_from_slice(&2u16.to_ne_bytes());
        policy[56..120].fill(0xff);
        policy[160] = 1;
        // A label of its own: `struct in6_flowlabel_req` (create, of this socket alone).
        let mut label = vec![0; 32];
        label[15] = 1;
        label[21] = 1;
        label[22..24].copy_from_slice(&1u16.to_ne_bytes());
        let pktinfo = [&[0; 16][..], &LOOPBACK.to_ne_bytes()].concat();
        let cases = [
            (2, SOL_IP, IP_XFRM_POLICY, policy, "IP_XFRM_POLICY"),
            (10, SOL_IPV6, IPV6_PKTINFO, pktinfo, "IPV6_PKTINFO"),
            (
                10,
                SOL_IPV6,
                IPV6_FLOWLABEL_MGR,
                label,
                "IPV6_FLOWLABEL_MGR",
            ),
        ];
        testkit::needs_kernel_memory!();
        for (family, level, name, value, what) in cases {
            let own = sys::socket::open(family, 2, 0).unwrap();
            World::new(vec![own.try_clone().unwrap()]).dump().unwrap();
            let set = sys::socket::set_option(&own, level, name, &value);
            set.unwrap_or_else(|error| panic!("{what}: {error}"));
            let error = refusal(own);
            assert!(error.contains(what), "{error}");
        }
    }
}
