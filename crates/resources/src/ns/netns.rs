//! Interfaces, routes, packet filters and settings: network_namespaces(7).
//!
//! - What: network namespaces
//! - Kept: one of the whole tree that has no interface but the loopback: whether that is up, its
//!   addresses and routes, and all settings in /proc/sys/net; not tracked connections (conntrack).
//!   One that is external (`--external net[…]:…`) is not saved, and a restore is handed another one
//!   (`--inherit-fd`). With `--empty-ns net`, somebody else brings back what is refused otherwise.
//! - Refused: "network interface … (…)"; "a route that leads nowhere"; "a route that has several
//!   ways"; "a routing rule (priority …)"; "a network with … routing rules of the kernel's own"; "a
//!   nexthop of routes"; "the nf_tables table …"; "the iptables table …"; "an IPsec policy or
//!   state"; "a service of IPVS"; "the queueing discipline … of …"; "a BPF program of network
//!   interface … (XDP)"; "a BPF program of the whole network (…)".
//! - CRIU 4.2: kept, with veth, macvlan and bridge interfaces, iptables and nf_tables.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::OnceLock;

use rustix::io::Errno;
use sys::bpf_map::{NETWORK_HOOKS, attached_to_network};
use sys::netlink::{Batch, DUMP, Message, Netlink, REQUEST, attributes, word};

use super::kind::{Construction, FIRST_TAG, Kind, Tree, record_name};
use super::settings::{Setting, Settings};
use crate::fd::tcp::lock;
use crate::fd::tun::{self, ForeignRoute, Interface};
use crate::{Error, Result};

/// The interface that every namespace has.
const LOOPBACK: &str = "lo";
const LOOPBACK_INDEX: u32 = 1;
/// Its settings.
static SETTINGS: Settings = Settings {
    roots: &["net"],
    flag: Net::FLAG,
    // For listen(2).
    limits: &[("net/core/somaxconn", "2147483647")],
    usual: OnceLock::new(),
};
/// The folders with a folder for each interface.
const OF_INTERFACES: [&str; 4] = ["ipv4/conf", "ipv4/neigh", "ipv6/conf", "ipv6/neigh"];
/// Interfaces that the kernel adds to a namespace by itself, down, where it has such tunnels.
const FALLBACKS: [&str; 10] = [
    "tunl0",
    "gre0",
    "gretap0",
    "erspan0",
    "ip_vti0",
    "ip6_vti0",
    "sit0",
    "ip6tnl0",
    "ip6gre0",
    "ip6erspan0",
];

const AF_INET: u8 = libc::AF_INET as u8;
const AF_INET6: u8 = linux_raw_sys::net::AF_INET6 as u8;
const RTM_GETRULE: u16 = libc::RTM_GETRULE;
const RTM_GETQDISC: u16 = libc::RTM_GETQDISC;
const RTM_GETNEXTHOP: u16 = 106;
const XFRM_MSG_GETSA: u16 = 0x12;
const XFRM_MSG_GETPOLICY: u16 = 0x15;

/// See the file.
pub struct Net;

/// The contents of a namespace.
#[derive(Clone, PartialEq, prost::Message)]
pub struct Record {
    /// The loopback.
    #[prost(message, optional, tag = "1")]
    loopback: Option<Interface>,
    #[prost(message, repeated, tag = "2")]
    settings: Vec<Setting>,
    /// The name of one that is external; it has nothing else.
    #[prost(string, optional, tag = "3")]
    external: Option<String>,
}

impl Kind for Net {
    type Record = Record;
    const TAG: u16 = FIRST_TAG + 2;
    const NAME: &'static str = "net";
    const FLAG: libc::c_int = libc::CLONE_NEWNET;

    fn prepare() -> Result<()> {
        SETTINGS.prepare().map(drop)
    }

    fn dump(tree: &Tree<'_>, refused: &mut Vec<Error>) -> Result<Record> {
        if let Some(name) = tree.external(Self::NAME)? {
            return Ok(Record {
                external: Some(name),
                ..Record::default()
            });
        }
        // Somebody else brings them back.
        if !tree.options.is_empty(Self::NAME) {
            let found = foreign().map_err(failed)?;
            refused.extend(found.into_iter().map(|what| tree.unsupported(what)));
        }
        let (mut loopback, _) = Interface::read(LOOPBACK)?;
        // They are among the others.
        loopback.settings.clear();
        let mut settings = SETTINGS.read()?;
        settings.retain(|setting| is_kept(&setting.path));
        Ok(Record {
            loopback: Some(loopback),
            settings,
            external: None,
        })
    }

    fn check(record: &Record) -> Result<()> {
        let corrupt = |what| Error::corrupt(record_name(Self::NAME), what);
        if record.external.is_some() {
            return match record.loopback.is_none() && record.settings.is_empty() {
                true => Ok(()),
                false => Err(corrupt("is external, and has a loopback")),
            };
        }
        let loopback = record.loopback.as_ref();
        let loopback = loopback.ok_or_else(|| corrupt("has no loopback"))?;
        loopback.check()?;
        match SETTINGS.are_sound(&record.settings) {
            true => Ok(()),
            false => Err(corrupt("has no such setting")),
        }
    }

    fn restore(record: &Record, _: &Construction<'_>) -> Result<()> {
        let Some(loopback) = &record.loopback else {
            return Ok(());
        };
        SETTINGS.restore(&record.settings)?;
        loopback.apply_link(LOOPBACK)
    }

    fn finish(record: &Record) -> Result<()> {
        match record.external {
            Some(_) => Ok(()),
            None => SETTINGS.limit(&record.settings),
        }
    }

    fn external(record: &Record) -> Option<&str> {
        record.external.as_deref()
    }

    fn describe(record: &Record) -> String {
        if let Some(name) = &record.external {
            return format!("external: {name}");
        }
        let is_up = |one: &Interface| one.flags & libc::IFF_UP as u32 != 0;
        let state = match record.loopback.as_ref().is_some_and(is_up) {
            true => "up",
            false => "down",
        };
        format!("loopback {state}, {} settings", record.settings.len())
    }
}

fn failed(error: io::Error) -> Error {
    Error::kernel("cannot look at the network namespace", error)
}

/// Tells whether a setting is the namespace's or the loopback's. That of the largest packet follows
/// from the interface.
fn is_kept(path: &str) -> bool {
    if path == "net/ipv6/conf/lo/mtu" {
        return false;
    }
    let of_interface = OF_INTERFACES.iter().find_map(|folder| {
        let rest = path.strip_prefix("net/")?.strip_prefix(folder)?;
        rest.strip_prefix('/')?.split('/').next()
    });
    of_interface.is_none_or(|name| ["all", "default", LOOPBACK].contains(&name))
}

/// What of the namespace that this process is in is not saved.
fn foreign() -> io::Result<Vec<String>> {
    let route = Netlink::route()?;
    let mut found = interfaces(&route)?;
    for route in tun::foreign_routes(LOOPBACK_INDEX)? {
        found.push(match route {
            ForeignRoute::Elsewhere => "a route that leads nowhere".to_owned(),
            ForeignRoute::Multipath => "a route that has several ways".to_owned(),
        });
    }
    found.extend(rules(&route)?);
    let nexthops = list(&route, RTM_GETNEXTHOP, 8)?;
    found.extend(nexthops.first().map(|_| "a nexthop of routes".to_owned()));
    found.extend(disciplines(&route)?);
    found.extend(filters()?);
    if has_ipsec()? {
        found.push("an IPsec policy or state".to_owned());
    }
    let services = std::fs::read_to_string(sys::procfs::path("thread-self/net/ip_vs"));
    // Three lines say what the others mean.
    if services.is_ok_and(|text| text.lines().count() > 3) {
        found.push("a service of IPVS".to_owned());
    }
    let own = File::open(sys::procfs::path("thread-self/ns/net"))?;
    for (hook, name) in NETWORK_HOOKS {
        if attached_to_network(own.as_fd(), hook)? > 0 {
            found.push(format!("a BPF program of the whole network ({name})"));
        }
    }
    Ok(found)
}

/// Asks for a list whose messages have a head of this many bytes.
fn list(route: &Netlink, kind: u16, head_bytes: usize) -> io::Result<Vec<Message>> {
    let mut batch = Batch::default();
    batch.message(kind, REQUEST | DUMP, &vec![0; head_bytes]);
    let mut all = route.list(batch)?;
    all.retain(|message| message.payload.len() >= head_bytes);
    Ok(all)
}

/// The text that an attribute has, which ends with a zero.
fn text(payload: &[u8], head_bytes: usize, wanted: u16) -> String {
    let mut all = attributes(payload, head_bytes);
    let found = all.find(|(kind, _)| *kind == wanted);
    let bytes = found.map_or(&[][..], |(_, data)| {
        data.strip_suffix(b"\0").unwrap_or(data)
    });
    String::from_utf8_lossy(bytes).into_owned()
}

/// Interfaces besides the loopback.
fn interfaces(route: &Netlink) -> io::Result<Vec<String>> {
    const HEAD_BYTES: usize = 16;
    const FLAGS: usize = 8;
    const IFLA_INFO_KIND: u16 = 1;
    /// `IFLA_XDP`, and in it `IFLA_XDP_ATTACHED`.
    const IFLA_XDP: u16 = 43;
    const IFLA_XDP_ATTACHED: u16 = 2;
    let mut found = Vec::new();
    for link in list(route, libc::RTM_GETLINK, HEAD_BYTES)? {
        let payload = &link.payload;
        let name = text(payload, HEAD_BYTES, libc::IFLA_IFNAME);
        let nested = |wanted: u16| attributes(payload, HEAD_BYTES).find(|one| one.0 == wanted);
        let xdp = nested(IFLA_XDP).into_iter();
        let mut xdp = xdp.flat_map(|(_, data)| attributes(data, 0));
        if xdp.any(|(kind, data)| kind == IFLA_XDP_ATTACHED && data.first() != Some(&0)) {
            found.push(format!("a BPF program of network interface {name} (XDP)"));
        }
        let is_up = word(&payload[FLAGS..]) & libc::IFF_UP as u32 != 0;
        let is_fallback = FALLBACKS.contains(&&*name) && !is_up;
        if name != LOOPBACK && !is_fallback {
            let info = nested(libc::IFLA_LINKINFO).map_or(&[][..], |(_, data)| data);
            let kind = match text(info, 0, IFLA_INFO_KIND) {
                kind if kind.is_empty() => "device".to_owned(),
                kind => kind,
            };
            found.push(format!("network interface {name} ({kind})"));
        }
    }
    Ok(found)
}

/// Rules besides those that the kernel makes: local, main and default, each for everything.
fn rules(route: &Netlink) -> io::Result<Vec<String>> {
    const HEAD_BYTES: usize = 12;
    const FRA_PRIORITY: u16 = 6;
    const FRA_TABLE: u16 = 15;
    /// What each rule has: `FRA_PROTOCOL`, `FRA_SUPPRESS_PREFIXLEN`, `FRA_SUPPRESS_IFGROUP`.
    const NEUTRAL: [u16; 3] = [21, 14, 13];
    /// `RTNL_FAMILY_IP6MR`, whose default table is the main one.
    const MULTICAST_6: u8 = 129;
    const KERNELS: [(u32, u32); 3] = [(0, 255), (32766, 254), (32767, 253)];
    let is_kernels = |rule: &Message| {
        let payload = &rule.payload;
        let mut all = attributes(payload, HEAD_BYTES);
        let number = |wanted: u16| {
            let mut all = attributes(payload, HEAD_BYTES);
            all.find(|one| one.0 == wanted)
                .map_or(0, |(_, data)| word(data))
        };
        let known = [FRA_PRIORITY, FRA_TABLE];
        let is_plain = all.all(|(kind, _)| known.contains(&kind) || NEUTRAL.contains(&kind));
        let goes_to_table = payload[7] == 1;
        let is_for_all = payload[1..4] == [0; 3] && word(&payload[8..]) == 0;
        let place = (number(FRA_PRIORITY), number(FRA_TABLE));
        let is_default = payload[0] == MULTICAST_6 && place == (32767, 254);
        is_plain && goes_to_table && is_for_all && (is_default || KERNELS.contains(&place))
    };
    let mut found = Vec::new();
    let rules = list(route, RTM_GETRULE, HEAD_BYTES)?;
    // A kernel without IPv6 has none of that.
    let families = [AF_INET, AF_INET6].into_iter();
    let families = families.filter(|family| rules.iter().any(|rule| rule.payload[0] == *family));
    for family in families {
        let of_kernel = rules.iter().filter(|rule| rule.payload[0] == family);
        let of_kernel = of_kernel.filter(|rule| is_kernels(rule)).count();
        let usual = if family == AF_INET { 3 } else { 2 };
        if of_kernel != usual {
            found.push(format!(
                "a network with {of_kernel} routing rules of the kernel's own"
            ));
        }
    }
    for rule in rules {
        if !is_kernels(&rule) {
            let all = attributes(&rule.payload, HEAD_BYTES);
            let priority = all.filter(|(kind, _)| *kind == FRA_PRIORITY);
            let priority = priority.map(|(_, data)| word(data)).next().unwrap_or(0);
            found.push(format!("a routing rule (priority {priority})"));
        }
    }
    Ok(found)
}

/// Queueing disciplines that somebody has chosen.
fn disciplines(route: &Netlink) -> io::Result<Vec<String>> {
    const HEAD_BYTES: usize = 20;
    const TCA_KIND: u16 = 1;
    let all = list(route, RTM_GETQDISC, HEAD_BYTES)?;
    let of_loopback = all
        .iter()
        .filter(|one| word(&one.payload[4..]) == LOOPBACK_INDEX);
    let kinds = of_loopback.map(|one| text(&one.payload, HEAD_BYTES, TCA_KIND));
    let chosen = kinds.filter(|kind| kind != "noqueue");
    Ok(chosen
        .map(|kind| format!("the queueing discipline {kind} of {LOOPBACK}"))
        .collect())
}

/// Tables of packet filters, but for those of dumps.
fn filters() -> io::Result<Vec<String>> {
    let mut found = Vec::new();
    for table in sys::nft::names()? {
        if !table.starts_with(lock::PREFIX) {
            found.push(format!("the nf_tables table {table}"));
        }
    }
    for file in ["ip_tables_names", "ip6_tables_names", "arp_tables_names"] {
        let names =
            std::fs::read_to_string(sys::procfs::path(format_args!("thread-self/net/{file}")));
        let names = names.unwrap_or_default();
        found.extend(
            names
                .lines()
                .map(|name| format!("the iptables table {name}")),
        );
    }
    Ok(found)
}

/// Tells whether packets are encrypted, or are to be.
fn has_ipsec() -> io::Result<bool> {
    let xfrm = match Netlink::xfrm() {
        Err(error) if error.raw_os_error() == Some(Errno::PROTONOSUPPORT.raw_os_error()) => {
            return Ok(false);
        }
        opened => opened?,
    };
    for kind in [XFRM_MSG_GETSA, XFRM_MSG_GETPOLICY] {
        if !list(&xfrm, kind, 0)?.is_empty() {
            return Ok(true);
        }
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `script` leaves in a namespace of its own.
    fn found_after(script: &str) -> Vec<String> {
        let ready = tempfile::NamedTempFile::new().expect("a file");
        let script = format!("{script} && echo x >\"$0\" && exec sleep 1000");
        let program = testkit::program::Program::new("unshare")
            .args(["--net", "sh", "-ec", &script])
            .arg(ready.path())
            .spawn();
        let is_ready = || ready.as_file().metadata().is_ok_and(|file| file.len() > 0);
        testkit::wait::wait_until("the script to be done", testkit::wait::SOON, is_ready);
        let process = sys::process::Process::new(program.pid().cast_signed());
        let world = sys::world::World::of(&process).expect("its world");
        let look = || {
            let record = Net::dump(
                &Tree {
                    root: 1,
                    tasks: &[],
                    options: &crate::NamespaceOptions::default(),
                },
                &mut Vec::new(),
            );
            Net::check(&record.expect("it is read")).expect("it is sound");
            foreign().expect("it is looked at")
        };
        std::thread::scope(|scope| {
            let looked = scope.spawn(|| world.enter(look).expect("it can be entered"));
            looked.join().expect("no panic")
        })
    }

    #[test]
    fn what_is_not_saved_of_a_network_is_told_by_name() {
        testkit::needs_root!();
        testkit::needs_program!("ip");
        for (script, told) in [
            ("true", &[][..]),
            ("ip link set lo up", &[]),
            ("ip link set lo up; ip addr add 10.9.8.7/24 dev lo", &[]),
            (
                "ip rule del pref 32767",
                &["a network with 2 routing rules of the kernel's own"],
            ),
            (
                "ip link set lo up; ip route add 10.5.0.0/16 dev lo; \
                 ip -6 route add fd00::/8 dev lo",
                &[],
            ),
            (
                "ip link add b0 type bridge",
                &["network interface b0 (bridge)"],
            ),
            (
                "ip link add v0 type veth peer name v1",
                &["network interface v0 (veth)", "network interface v1 (veth)"],
            ),
            (
                "ip rule add from 10.0.0.0/8 table 7",
                &["a routing rule (priority 32765)"],
            ),
            (
                "ip route add blackhole 10.1.0.0/16",
                &["a route that leads nowhere"],
            ),
            // One of IPv6 leads to the loopback.
            ("ip link set lo up; ip route add unreachable fd01::/16", &[]),
            (
                "ip xfrm policy add src 10.0.0.0/8 dst 10.0.0.0/8 dir out",
                &["an IPsec policy or state"],
            ),
            (
                "ip link set lo up; ip nexthop add id 5 blackhole",
                &["a nexthop of routes"],
            ),
        ] {
            let mut found = found_after(script);
            found.sort();
            assert_eq!(found, told, "{script}");
        }
    }

    #[test]
    fn settings_are_those_of_the_namespace_and_its_loopback() {
        for (path, kept) in [
            ("net/ipv4/ip_forward", true),
            ("net/ipv4/conf/all/forwarding", true),
            ("net/ipv6/conf/lo/mtu", false),
            ("net/ipv6/conf/all/mtu", true),
            ("net/ipv4/neigh/default/app_solicit", true),
            ("net/ipv4/conf/eth0/forwarding", false),
            ("net/ipv6/neigh/sit0/app_solicit", false),
        ] {
            assert_eq!(is_kept(path), kept, "{path}");
        }
    }
}
