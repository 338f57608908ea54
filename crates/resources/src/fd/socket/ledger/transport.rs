//! The options of TCP, Multipath TCP, UDP and UDP-Lite, of raw sockets and of ICMP.

use super::Kinds;
use super::{
    Entry, SOL_ICMPV6, SOL_MPTCP, SOL_RAW, SOL_TCP, SOL_UDP, SOL_UDPLITE, alias, early, late,
    recorded, refused, renewed, stateless,
};

const TCP: Kinds = Kinds::TCP;
const ANY_TCP: Kinds = Kinds::TCP.or(Kinds::MPTCP);
const UDP: Kinds = Kinds::UDP;
const UDPLITE: Kinds = Kinds::UDPLITE;

/// The most bytes that two keys of TCP Fast Open have.
const KEYS_BYTES: usize = 32;

const CONNECTION: &str = "the connection";
const KEYS: &str = "keys of signed TCP";
const AO: &str = "it signs its segments (TCP_AO)";

/// Multipath TCP takes any value before its first subflow, which other options make.
pub(super) const BEFORE_SUBFLOW: &[Entry] = &[
    early(SOL_TCP, 4, "TCP_KEEPIDLE", ANY_TCP, 4),
    early(SOL_TCP, 5, "TCP_KEEPINTVL", ANY_TCP, 4),
    early(SOL_TCP, 6, "TCP_KEEPCNT", ANY_TCP, 4),
];

pub(super) const ENTRIES: &[Entry] = &[
    early(SOL_TCP, 13, "TCP_CONGESTION", ANY_TCP, 16),
    late(SOL_TCP, 1, "TCP_NODELAY", ANY_TCP, 4),
    late(SOL_TCP, 2, "TCP_MAXSEG", ANY_TCP, 4),
    late(SOL_TCP, 3, "TCP_CORK", ANY_TCP, 4),
    late(SOL_TCP, 7, "TCP_SYNCNT", TCP, 4),
    late(SOL_TCP, 8, "TCP_LINGER2", TCP, 4),
    late(SOL_TCP, 9, "TCP_DEFER_ACCEPT", ANY_TCP, 4),
    late(SOL_TCP, 10, "TCP_WINDOW_CLAMP", TCP, 4),
    late(SOL_TCP, 16, "TCP_THIN_LINEAR_TIMEOUTS", TCP, 4),
    late(SOL_TCP, 18, "TCP_USER_TIMEOUT", TCP, 4),
    late(SOL_TCP, 23, "TCP_FASTOPEN", ANY_TCP, 4),
    late(SOL_TCP, 25, "TCP_NOTSENT_LOWAT", ANY_TCP, 4),
    late(SOL_TCP, 27, "TCP_SAVE_SYN", TCP, 4),
    late(SOL_TCP, 30, "TCP_FASTOPEN_CONNECT", ANY_TCP, 4),
    late(SOL_TCP, 33, "TCP_FASTOPEN_KEY", ANY_TCP, KEYS_BYTES),
    late(SOL_TCP, 34, "TCP_FASTOPEN_NO_COOKIE", ANY_TCP, 4),
    late(SOL_TCP, 36, "TCP_INQ", ANY_TCP, 4),
    late(SOL_TCP, 37, "TCP_TX_DELAY", TCP, 4),
    late(SOL_TCP, 44, "TCP_RTO_MAX_MS", TCP, 4),
    late(SOL_TCP, 45, "TCP_RTO_MIN_US", TCP, 4),
    late(SOL_TCP, 46, "TCP_DELACK_MAX_US", TCP, 4),
    recorded(
        SOL_TCP,
        11,
        "TCP_INFO",
        "its state; the rest are the kernel's counts",
    ),
    recorded(SOL_TCP, 14, "TCP_MD5SIG", KEYS),
    recorded(SOL_TCP, 32, "TCP_MD5SIG_EXT", KEYS),
    recorded(SOL_TCP, 20, "TCP_REPAIR_QUEUE", CONNECTION),
    recorded(SOL_TCP, 21, "TCP_QUEUE_SEQ", CONNECTION),
    recorded(SOL_TCP, 22, "TCP_REPAIR_OPTIONS", CONNECTION),
    recorded(SOL_TCP, 24, "TCP_TIMESTAMP", CONNECTION),
    recorded(SOL_TCP, 29, "TCP_REPAIR_WINDOW", CONNECTION),
    recorded(SOL_TCP, 43, "TCP_IS_MPTCP", "its kind"),
    refused(
        SOL_TCP,
        19,
        "TCP_REPAIR",
        "it is in repair mode (TCP_REPAIR)",
    ),
    refused(
        SOL_TCP,
        28,
        "TCP_SAVED_SYN",
        "nobody has fetched the packet that it keeps of its client yet (TCP_SAVED_SYN)",
    ),
    refused(
        SOL_TCP,
        31,
        "TCP_ULP",
        "it has an upper layer protocol (TLS in the kernel)",
    ),
    refused(SOL_TCP, 38, "TCP_AO_ADD_KEY", AO),
    refused(SOL_TCP, 40, "TCP_AO_INFO", AO),
    refused(SOL_TCP, 41, "TCP_AO_GET_KEYS", AO),
    refused(SOL_TCP, 42, "TCP_AO_REPAIR", AO),
    stateless(
        SOL_TCP,
        12,
        "TCP_QUICKACK",
        "what the kernel changes by itself",
    ),
    stateless(SOL_TCP, 17, "TCP_THIN_DUPACK", "nothing, since Linux 4.14"),
    stateless(SOL_TCP, 35, "TCP_ZEROCOPY_RECEIVE", "an action"),
    stateless(SOL_TCP, 39, "TCP_AO_DEL_KEY", "an action"),
    renewed(
        SOL_TCP,
        26,
        "TCP_CC_INFO",
        "what congestion control has measured",
    ),
    renewed(SOL_MPTCP, 1, "MPTCP_INFO", "counts"),
    renewed(SOL_MPTCP, 2, "MPTCP_TCPINFO", "counts"),
    renewed(SOL_MPTCP, 3, "MPTCP_SUBFLOW_ADDRS", "counts"),
    renewed(SOL_MPTCP, 4, "MPTCP_FULL_INFO", "counts"),
    late(SOL_UDP, 1, "UDP_CORK", UDP, 4),
    late(SOL_UDP, 100, "UDP_ENCAP", UDP, 4),
    late(SOL_UDP, 101, "UDP_NO_CHECK6_TX", UDP, 4),
    late(SOL_UDP, 102, "UDP_NO_CHECK6_RX", UDP, 4),
    late(SOL_UDP, 103, "UDP_SEGMENT", UDP, 4),
    late(SOL_UDP, 104, "UDP_GRO", UDP, 4),
    alias(SOL_UDP, 10, "UDPLITE_SEND_CSCOV", "the one of SOL_UDPLITE"),
    alias(SOL_UDP, 11, "UDPLITE_RECV_CSCOV", "the one of SOL_UDPLITE"),
    late(SOL_UDPLITE, 10, "UDPLITE_SEND_CSCOV", UDPLITE, 4),
    late(SOL_UDPLITE, 11, "UDPLITE_RECV_CSCOV", UDPLITE, 4),
    alias(SOL_UDPLITE, 1, "UDP_CORK", "the one of SOL_UDP"),
    alias(SOL_UDPLITE, 100, "UDP_ENCAP", "the one of SOL_UDP"),
    alias(SOL_UDPLITE, 101, "UDP_NO_CHECK6_TX", "the one of SOL_UDP"),
    alias(SOL_UDPLITE, 102, "UDP_NO_CHECK6_RX", "the one of SOL_UDP"),
    alias(SOL_UDPLITE, 103, "UDP_SEGMENT", "the one of SOL_UDP"),
    alias(SOL_UDPLITE, 104, "UDP_GRO", "the one of SOL_UDP"),
    late(SOL_RAW, 1, "ICMP_FILTER", Kinds::RAW4, 4),
    alias(SOL_RAW, 7, "IPV6_CHECKSUM", "the one of SOL_IPV6"),
    alias(SOL_RAW, 36, "IPV6_HDRINCL", "the one of SOL_IPV6"),
    late(SOL_ICMPV6, 1, "ICMPV6_FILTER", Kinds::RAW6, 32),
];
