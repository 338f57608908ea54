//! The options of packet sockets, of netlink and of vsock.

use super::Kinds;
use super::{
    Entry, SOL_NETLINK, SOL_PACKET, SOL_VSOCK, SOL_VSOCK_ERRORS, alias, early, late, recorded,
    refused, renewed, stateless,
};

const PACKET: Kinds = Kinds::PACKET;
const NETLINK: Kinds = Kinds::NETLINK;
const VSOCK: Kinds = Kinds::VSOCK;

const MEMBERSHIPS: &str = "memberships";
const CONNECTED: &str = "it is connected, or its connection has failed or ended, and no call makes \
                         that again";

pub(super) const ENTRIES: &[Entry] = &[
    early(SOL_PACKET, 10, "PACKET_VERSION", PACKET, 4),
    early(SOL_PACKET, 12, "PACKET_RESERVE", PACKET, 4),
    early(SOL_PACKET, 14, "PACKET_LOSS", PACKET, 4),
    early(SOL_PACKET, 15, "PACKET_VNET_HDR", PACKET, 4),
    early(SOL_PACKET, 24, "PACKET_VNET_HDR_SZ", PACKET, 4),
    early(SOL_PACKET, 19, "PACKET_TX_HAS_OFF", PACKET, 4),
    late(SOL_PACKET, 8, "PACKET_AUXDATA", PACKET, 4),
    late(SOL_PACKET, 9, "PACKET_ORIGDEV", PACKET, 4),
    late(SOL_PACKET, 17, "PACKET_TIMESTAMP", PACKET, 4),
    late(SOL_PACKET, 20, "PACKET_QDISC_BYPASS", PACKET, 4),
    late(SOL_PACKET, 23, "PACKET_IGNORE_OUTGOING", PACKET, 4),
    recorded(SOL_PACKET, 1, "PACKET_ADD_MEMBERSHIP", MEMBERSHIPS),
    recorded(SOL_PACKET, 5, "PACKET_RX_RING", "the ring"),
    recorded(SOL_PACKET, 7, "PACKET_COPY_THRESH", "of its own"),
    recorded(SOL_PACKET, 18, "PACKET_FANOUT", "the group for fanout"),
    refused(
        SOL_PACKET,
        13,
        "PACKET_TX_RING",
        "it has a ring to send from",
    ),
    refused(
        SOL_PACKET,
        22,
        "PACKET_FANOUT_DATA",
        "a program spreads its packets (fanout)",
    ),
    stateless(SOL_PACKET, 2, "PACKET_DROP_MEMBERSHIP", "an action"),
    stateless(SOL_PACKET, 3, "PACKET_RECV_OUTPUT", "no kernel has it"),
    stateless(SOL_PACKET, 11, "PACKET_HDRLEN", "what the kernel can do"),
    stateless(SOL_PACKET, 16, "PACKET_TX_TIMESTAMP", "a control message"),
    renewed(SOL_PACKET, 6, "PACKET_STATISTICS", "counts"),
    renewed(SOL_PACKET, 21, "PACKET_ROLLOVER_STATS", "counts"),
    late(SOL_NETLINK, 3, "NETLINK_PKTINFO", NETLINK, 4),
    late(SOL_NETLINK, 4, "NETLINK_BROADCAST_ERROR", NETLINK, 4),
    late(SOL_NETLINK, 5, "NETLINK_NO_ENOBUFS", NETLINK, 4),
    late(SOL_NETLINK, 8, "NETLINK_LISTEN_ALL_NSID", NETLINK, 4),
    late(SOL_NETLINK, 10, "NETLINK_CAP_ACK", NETLINK, 4),
    late(SOL_NETLINK, 11, "NETLINK_EXT_ACK", NETLINK, 4),
    late(SOL_NETLINK, 12, "NETLINK_GET_STRICT_CHK", NETLINK, 4),
    recorded(SOL_NETLINK, 1, "NETLINK_ADD_MEMBERSHIP", MEMBERSHIPS),
    recorded(SOL_NETLINK, 9, "NETLINK_LIST_MEMBERSHIPS", MEMBERSHIPS),
    stateless(SOL_NETLINK, 2, "NETLINK_DROP_MEMBERSHIP", "an action"),
    stateless(
        SOL_NETLINK,
        6,
        "NETLINK_RX_RING",
        "no kernel has it, since Linux 4.6",
    ),
    stateless(
        SOL_NETLINK,
        7,
        "NETLINK_TX_RING",
        "no kernel has it, since Linux 4.6",
    ),
    late(SOL_VSOCK, 2, "SO_VM_SOCKETS_BUFFER_MAX_SIZE", VSOCK, 8),
    late(SOL_VSOCK, 1, "SO_VM_SOCKETS_BUFFER_MIN_SIZE", VSOCK, 8),
    late(SOL_VSOCK, 0, "SO_VM_SOCKETS_BUFFER_SIZE", VSOCK, 8),
    late(SOL_VSOCK, 8, "SO_VM_SOCKETS_CONNECT_TIMEOUT_NEW", VSOCK, 16),
    alias(
        SOL_VSOCK,
        6,
        "SO_VM_SOCKETS_CONNECT_TIMEOUT_OLD",
        "SO_VM_SOCKETS_CONNECT_TIMEOUT_NEW",
    ),
    refused(SOL_VSOCK, 3, "SO_VM_SOCKETS_PEER_HOST_VM_ID", CONNECTED),
    stateless(SOL_VSOCK, 5, "SO_VM_SOCKETS_TRUSTED", "no kernel has it"),
    stateless(
        SOL_VSOCK,
        7,
        "SO_VM_SOCKETS_NONBLOCK_TXRX",
        "no kernel has it",
    ),
    stateless(SOL_VSOCK_ERRORS, 1, "VSOCK_RECVERR", "a control message"),
];
