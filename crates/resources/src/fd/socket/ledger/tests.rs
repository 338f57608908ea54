//! No socket option that a kernel knows is missing in the ledger; those that are kept come back.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};

use super::super::options::Options;
use super::super::testing::World;
use super::samples::{FRESH, OF_CONNECTIONS, change, values};
use super::*;
use crate::testing::alone;

/// A socket of the walk: what it is called, and how it is made.
struct Sample {
    name: &'static str,
    own: OwnedFd,
    /// A socket that must stay open as long as the sample.
    other: Option<OwnedFd>,
}

impl Sample {
    fn kinds(&self) -> Kinds {
        Kinds::of(Nature::of_fd(self.own.as_fd()).unwrap())
    }
}

/// The others: listeners, connections, pairs.
const MADE: [&str; 5] = [
    "listening TCP, 127.0.0.1",
    "listening TCP, ::1",
    "connected TCP, 127.0.0.1",
    "connected TCP, ::1",
    "unix pair",
];

fn names() -> impl Iterator<Item = &'static str> {
    FRESH.iter().map(|fresh| fresh.name).chain(MADE)
}

fn sample(name: &'static str) -> Option<Sample> {
    // Anybody may ask for echoes here.
    std::fs::write("/proc/sys/net/ipv4/ping_group_range", "0 2147483647").unwrap();
    let sample = |own, other| Some(Sample { name, own, other });
    if let Some(fresh) = FRESH.iter().find(|fresh| fresh.name == name) {
        return sample(fresh.open().ok()?, None);
    }
    let Some((what, ip)) = name.split_once(" TCP, ") else {
        let (own, other) = sys::socket::pair(1, 1, 0).unwrap();
        return sample(own, Some(other));
    };
    let listener = std::net::TcpListener::bind((ip, 0)).unwrap();
    if what == "listening" {
        return sample(listener.into(), None);
    }
    let client = std::net::TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let server = listener.accept().unwrap().0;
    sample(client.into(), Some(server.into()))
}

fn samples() -> impl Iterator<Item = Sample> {
    names().filter_map(sample)
}

#[test]
fn no_number_has_two_entries() {
    let numbers: BTreeSet<_> = all().map(|entry| (entry.level, entry.name)).collect();
    assert_eq!(numbers.len(), all().count());
}

#[test]
fn words_of_refusals_are_those_of_the_code() {
    let mut code = String::new();
    let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/fd");
    for entry in walkdir::WalkDir::new(folder) {
        let entry = entry.unwrap();
        let is_ours = entry.path().to_string_lossy().contains("/ledger/");
        if entry.file_type().is_file() && !is_ours {
            code += &std::fs::read_to_string(entry.path()).unwrap();
        }
    }
    let pieces = code.split("\\\n").map(str::trim_start);
    let code = pieces.collect::<String>();
    for entry in all() {
        if let Fate::Refused(why) = entry.fate {
            assert!(
                code.contains(&format!("{why}\"")),
                "{}: {why:?}",
                entry.label
            );
        }
    }
}

/// Headers of the kernel, with the level of each prefix of an option's name.
const HEADERS: &[(&str, &[(&str, i32)])] = &[
    ("asm-generic/socket.h", &[("SO_", 1), ("SCM_T", 1)]),
    ("linux/in.h", &[("IP_", 0), ("MCAST_", 0)]),
    ("linux/in6.h", &[("IPV6_", 41)]),
    ("linux/tcp.h", &[("TCP_", 6)]),
    ("linux/udp.h", &[("UDP_", 17)]),
    ("linux/icmp.h", &[("ICMP_FILTER", 255)]),
    ("linux/icmpv6.h", &[("ICMPV6_FILTER", 58)]),
    ("linux/if_packet.h", &[("PACKET_", 263)]),
    ("linux/netlink.h", &[("NETLINK_", 270)]),
    ("linux/vm_sockets.h", &[("SO_VM_", 40), ("VSOCK_", 287)]),
    ("linux/mptcp.h", &[("MPTCP_", 284)]),
    ("linux/mroute.h", &[("MRT_", 0)]),
    ("linux/mroute6.h", &[("MRT6_", 41)]),
];

/// Numbers in those headers that are none of options, by the beginnings of their names.
const OTHER_NUMBERS: &[&str] = &[
    "IP_PMTUDISC_",
    "IP_DEFAULT_",
    "MCAST_EXCLUDE",
    "MCAST_INCLUDE",
    "IPV6_FL_",
    "IPV6_FLOWINFO_FLOWLABEL",
    "IPV6_FLOWINFO_PRIORITY",
    "IPV6_PRIORITY_",
    "IPV6_TLV_",
    "IPV6_PMTUDISC_",
    "IPV6_PREFER_",
    "TCP_MSS_",
    "TCP_REPAIR_O",
    "TCP_MD5SIG_MAXKEYLEN",
    "TCP_MD5SIG_FLAG_",
    "TCP_AO_MAXKEYLEN",
    "TCP_AO_KEYF_",
    "TCP_RECEIVE_ZEROCOPY_FLAG_",
    "UDP_ENCAP_",
    "ICMPV6_FILTER_",
    "PACKET_HOST",
    "PACKET_BROADCAST",
    "PACKET_MULTICAST",
    "PACKET_OTHERHOST",
    "PACKET_OUTGOING",
    "PACKET_LOOPBACK",
    "PACKET_USER",
    "PACKET_KERNEL",
    "PACKET_FASTROUTE",
    "PACKET_FANOUT_",
    "PACKET_MR_",
    "MPTCP_PM_",
    "MPTCP_RST_",
    "MRT_BASE",
    "MRT_MAX",
    "MRT_FLUSH_",
    "MRT6_BASE",
    "MRT6_MAX",
    "MRT6_FLUSH_",
    "MRT6MSG_",
];

/// Protocols of netlink, which share its options' prefix.
const PROTOCOLS: &[&str] = &[
    "ROUTE",
    "UNUSED",
    "USERSOCK",
    "FIREWALL",
    "SOCK_DIAG",
    "NFLOG",
    "XFRM",
    "SELINUX",
    "ISCSI",
    "AUDIT",
    "FIB_LOOKUP",
    "CONNECTOR",
    "NETFILTER",
    "IP6_FW",
    "DNRTMSG",
    "KOBJECT_UEVENT",
    "GENERIC",
    "SCSITRANSPORT",
    "ECRYPTFS",
    "RDMA",
    "CRYPTO",
    "SMC",
];

/// The options that a header defines: by name, their numbers.
fn defined(text: &str, prefix: &str) -> BTreeMap<String, i32> {
    let mut found = BTreeMap::new();
    for line in text.lines() {
        let mut words = line.split_whitespace();
        if words.next() != Some("#define") {
            continue;
        }
        let (Some(name), Some(value)) = (words.next(), words.next()) else {
            continue;
        };
        let base = value.trim_matches(['(', ')']);
        let number = match base.split_once('+') {
            Some(("MRT_BASE" | "MRT6_BASE", more)) => more.parse().ok().map(|more: i32| 200 + more),
            None if ["MRT_BASE", "MRT6_BASE"].contains(&base) => Some(200),
            _ => base.parse().ok(),
        };
        let other = |start: &&str| name.starts_with(start) && **start != *"ICMPV6_FILTER";
        let protocol = |end: &&str| name.strip_prefix("NETLINK_") == Some(end);
        let is_option = !OTHER_NUMBERS.iter().any(other) && !PROTOCOLS.iter().any(protocol);
        if let Some(number) = number.filter(|_| name.starts_with(prefix) && is_option) {
            found.insert(name.to_owned(), number);
        }
    }
    found
}

#[test]
fn headers_define_no_option_that_is_missing() {
    let mut count = 0;
    for (header, prefixes) in HEADERS {
        let Ok(text) = std::fs::read_to_string(format!("/usr/include/{header}")) else {
            testkit::skip!("no kernel headers in /usr/include");
        };
        for (prefix, level) in *prefixes {
            for (name, number) in defined(&text, prefix) {
                let entry = find(*level, number);
                let label = entry.map(|entry| entry.label);
                assert_eq!(
                    label,
                    Some(name.as_str()),
                    "{header}: level {level}, {number}"
                );
                count += 1;
            }
        }
    }
    assert!(count > 250, "{count} options were read of headers");
}

/// The levels that are asked; those of families that are not saved among them.
const LEVELS: &[i32] = &[
    0, 1, 6, 17, 33, 40, 41, 58, 131, 132, 136, 255, 256, 263, 269, 270, 271, 272, 273, 276, 277,
    280, 281, 282, 283, 284, 285, 286, 287,
];
/// The number up to which each is asked.
const NUMBERS: i32 = 512;
/// Not asked: it opens a descriptor.
const OPENS: (i32, i32) = (SOL_SOCKET, 77);

/// True if the kernel knows an option: it answers, or complains of how it was asked.
fn is_answered(own: &OwnedFd, level: i32, name: i32) -> bool {
    use rustix::io::Errno;
    let unknown = [
        Errno::NOPROTOOPT,
        Errno::OPNOTSUPP,
        Errno::ACCESS,
        Errno::PERM,
    ];
    [4, 256]
        .into_iter()
        .any(|bytes| match sys::socket::option(own, level, name, bytes) {
            Ok(_) => true,
            Err(error) => {
                let errno = Errno::from_io_error(&error);
                errno.is_some_and(|errno| !unknown.contains(&errno))
            }
        })
}

#[test]
fn this_kernel_answers_no_option_that_is_missing() {
    alone!({
        let mut missing = BTreeMap::<(i32, i32), Vec<&str>>::new();
        let mut answered = BTreeSet::new();
        for sample in samples() {
            for level in LEVELS {
                for name in (0..NUMBERS).filter(|name| (*level, *name) != OPENS) {
                    let pointers = sys::socket::holds_addresses(*level, name);
                    if pointers || !is_answered(&sample.own, *level, name) {
                        continue;
                    }
                    answered.insert((*level, name));
                    if find(*level, name).is_none() {
                        let of = missing.entry((*level, name)).or_default();
                        of.push(sample.name);
                    }
                }
            }
        }
        assert!(missing.is_empty(), "no entry: {missing:#?}");
        assert!(answered.len() > 150, "{} are answered", answered.len());
    });
}

#[test]
fn kept_options_are_told_by_no_other_kind() {
    alone!({
        for sample in samples() {
            let kinds = sample.kinds();
            for entry in all() {
                let Fate::Kept(kept) = entry.fate else {
                    continue;
                };
                let bytes = kept.bytes;
                let told = sys::socket::option(&sample.own, entry.level, entry.name, bytes);
                let (Ok(told), false) = (told, kept.of.meets(kinds)) else {
                    continue;
                };
                // An option that cannot be set has no state.
                let set = values(kept.bytes).any(|value| {
                    let (level, name) = (entry.level, entry.name);
                    let done = sys::socket::set_option(&sample.own, level, name, &value).is_ok();
                    let now = sys::socket::option(&sample.own, level, name, bytes);
                    done && now.is_ok_and(|now| now != told)
                });
                assert!(!set, "{} of {}", entry.label, sample.name);
            }
        }
    });
}

fn read(sample: &Sample) -> Options {
    let mut options = Options::read(sample.own.as_fd(), sample.kinds()).unwrap();
    if sample.other.is_some() {
        for (level, name) in OF_CONNECTIONS {
            options.forget(level, name);
        }
    }
    options
}

/// Sockets of one sort, each with another option changed, as far as it can be.
fn changed(name: &'static str) -> Vec<(Sample, &'static str)> {
    let Some(kinds) = sample(name).map(|sample| sample.kinds()) else {
        return Vec::new();
    };
    let change = |(entry, how): (&'static Entry, Kept)| {
        let sample = sample(name).expect("as before");
        let changes = change(sample.own.as_fd(), entry, how, 0);
        changes.then_some((sample, entry.label))
    };
    kept(kinds).filter_map(change).collect()
}

/// The sample after a dump and a restore; `None` of one that is refused for its option.
fn cycled(sample: Sample, label: &str) -> Option<Sample> {
    let Sample { name, own, other } = sample;
    let (live, held) = match other {
        Some(other) if name == "unix pair" => (vec![own, other], None),
        other => (vec![own], other),
    };
    let mut world = World::new(live);
    world.allow.tcp_established = true;
    if let Err(error) = world.dump() {
        assert!(
            is_refusal(label, &error.to_string()),
            "{name}, {label}: {error}"
        );
        return None;
    }
    let restored = world.restore();
    let mut restored = restored.unwrap_or_else(|error| panic!("{name}, {label}: {error:?}"));
    let own = restored.swap_remove(0);
    let other = held.or_else(|| restored.pop());
    Some(Sample { name, own, other })
}

#[test]
fn every_kept_option_survives() {
    alone!({
        let mut survived = BTreeSet::new();
        for (sample, label) in names().flat_map(changed) {
            let (name, wanted) = (sample.name, read(&sample));
            let Some(sample) = cycled(sample, label) else {
                continue;
            };
            let now = read(&sample);
            let pairs = wanted.values.iter().zip(&now.values);
            let differ = pairs
                .filter(|(one, other)| one != other)
                .collect::<Vec<_>>();
            assert!(wanted == now, "{name}, {label}: {differ:?}");
            survived.insert(label);
        }
        let all = kept(Kinds::ALL).map(|(entry, _)| entry.label);
        let never = all
            .filter(|label| !survived.contains(label))
            .collect::<Vec<_>>();
        assert!(survived.len() > 110, "{never:?}");
    });
}

/// Options of which the first is set before the second: the kernel takes them in this order alone,
/// or the second changes the first.
#[test]
fn options_that_depend_on_others_survive() {
    const UNICAST: (i32, i32) = (SOL_IP, 50);
    const DEVICE: (i32, i32) = (SOL_SOCKET, 25);
    fn lo() -> Vec<u8> {
        b"lo\0".to_vec()
    }
    fn number(value: i32) -> Vec<u8> {
        value.to_ne_bytes().to_vec()
    }
    alone!({
        for (name, settings) in [
            (
                "UDP, IPv4",
                vec![(UNICAST, 1_i32.to_be_bytes().to_vec()), (DEVICE, lo())],
            ),
            (
                "UDP, IPv6",
                vec![
                    ((SOL_IPV6, 76), 1_i32.to_be_bytes().to_vec()),
                    (DEVICE, lo()),
                ],
            ),
            (
                "UDP, IPv6",
                vec![((SOL_IPV6, 17), number(1)), (DEVICE, lo())],
            ),
            (
                "raw, IPv4",
                vec![((SOL_IP, 1), number(64)), ((SOL_SOCKET, 12), number(3))],
            ),
            ("MPTCP, IPv4", vec![((SOL_TCP, 6), number(100_000))]),
            ("MPTCP, IPv4", vec![((SOL_SOCKET, 18), number(65_537))]),
            (
                "closed TCP, IPv4",
                vec![
                    ((SOL_SOCKET, 18), number(65_537)),
                    ((SOL_SOCKET, 8), number(1)),
                ],
            ),
            (
                "closed TCP, IPv4",
                vec![
                    ((SOL_SOCKET, 33), number(1 << 26)),
                    ((SOL_SOCKET, 18), number(1 << 26)),
                ],
            ),
        ] {
            let Some(sample) = sample(name) else {
                continue;
            };
            for ((level, option), value) in &settings {
                sys::socket::set_option(&sample.own, *level, *option, value).unwrap();
            }
            let wanted = read(&sample);
            let sample = cycled(sample, name).expect("no option is refused");
            assert!(wanted == read(&sample), "{name}: {settings:?}");
        }
    });
}

/// Options of which a value has other consequences that are refused.
fn is_refusal(label: &str, error: &str) -> bool {
    let numbered = ["SO_TIMESTAMPING_OLD", "SO_TIMESTAMPING_NEW"].contains(&label);
    numbered && error.contains("numbers what it sends")
}
