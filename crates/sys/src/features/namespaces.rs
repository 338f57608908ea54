//! Features of namespaces.
use std::os::fd::AsRawFd as _;
use std::path::Path;

use super::Need::Sometimes;
use super::{Feature, Outcome, called, netlink, why, yes};
use crate::timens::ForChildren;

pub(super) static ALL: &[Feature] = &[
    Feature::in_child("userns", Sometimes, "user namespaces", userns),
    Feature::in_child("timens", Sometimes, "time namespaces", timens),
    Feature::in_child("cgroupns", Sometimes, "control group namespaces", cgroupns),
    Feature::in_child(
        "external_net_ns",
        Sometimes,
        "join network namespaces",
        enter_net_ns,
    ),
    Feature::in_child(
        "tun_ns",
        Sometimes,
        "TUN devices of network namespaces",
        tun_ns,
    ),
    Feature::here("nsid", Sometimes, "ids of network namespaces", nsid),
    Feature::in_child(
        "link_nsid",
        Sometimes,
        "look into a network namespace by id",
        link_nsid,
    ),
    Feature::in_child(
        "newifindex",
        Sometimes,
        "numbers of moved network devices",
        newifindex,
    ),
    Feature::in_child("nftables", Sometimes, "packet filters", nftables),
    Feature::in_child(
        "network_lock_nftables",
        Sometimes,
        "hold packets back",
        nftables,
    ),
    Feature::here(
        "has_ipt_legacy",
        Sometimes,
        "packet filters of iptables",
        iptables_legacy,
    ),
];

/// Moves this process, a probe's child, into a new namespace.
pub(super) fn enter_new(kind: libc::c_int) -> Result<(), String> {
    // SAFETY: the process has one thread, and the calls that follow expect the new namespace.
    let result = unsafe { libc::unshare(kind) };
    called("unshare", result.into()).map(drop)
}

fn userns() -> Outcome {
    enter_new(libc::CLONE_NEWUSER)?;
    yes()
}

fn timens() -> Outcome {
    // With its clocks set, which takes a privilege of its own.
    let made = ForChildren::new(|own| own);
    made.map_err(|error| why("make one and set its clocks", &error))?;
    yes()
}

fn cgroupns() -> Outcome {
    enter_new(libc::CLONE_NEWCGROUP)?;
    yes()
}

fn enter_net_ns() -> Outcome {
    let own = netlink::own_namespace()?;
    enter_new(libc::CLONE_NEWNET)?;
    // SAFETY: the descriptor is open; the process has one thread.
    let result = unsafe { libc::setns(own.as_raw_fd(), libc::CLONE_NEWNET) };
    called("setns", result.into())?;
    yes()
}

fn tun_ns() -> Outcome {
    const TUNSETIFF: libc::Ioctl =
        rustix::ioctl::opcode::write::<libc::c_int>(b'T', 202) as libc::Ioctl;
    enter_new(libc::CLONE_NEWNET)?;
    let tun = std::fs::File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun");
    let tun = tun.map_err(|error| why("/dev/net/tun", &error))?;
    // SAFETY: every field of the structure is a number or an array of them.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
    // SAFETY: the request reads and writes the structure that it is given.
    let result = unsafe { libc::ioctl(tun.as_raw_fd(), TUNSETIFF, &raw mut request) };
    called("TUNSETIFF", result.into())?;
    netlink::namespace_of(&tun)?;
    yes()
}

/// Asks for the id of the own namespace: a kernel that has ids answers with one or with none.
fn nsid() -> Outcome {
    let own = netlink::own_namespace()?;
    netlink::namespace_id(&own)?;
    yes()
}

fn link_nsid() -> Outcome {
    let old = netlink::own_namespace()?;
    enter_new(libc::CLONE_NEWNET)?;
    netlink::set_namespace_id(&old, 7)?;
    netlink::count_links(7)?;
    yes()
}

/// Moves a device into another namespace under a number chosen here.
fn newifindex() -> Outcome {
    enter_new(libc::CLONE_NEWNET)?;
    let first = netlink::own_namespace()?;
    netlink::make_dummy(2000)?;
    enter_new(libc::CLONE_NEWNET)?;
    let second = netlink::own_namespace()?;
    // SAFETY: the descriptor is open; the process has one thread.
    let result = unsafe { libc::setns(first.as_raw_fd(), libc::CLONE_NEWNET) };
    called("setns", result.into())?;
    netlink::move_link(2000, &second, 3000)?;
    yes()
}

/// Makes a table of packet filters in a namespace that vanishes.
fn nftables() -> Outcome {
    enter_new(libc::CLONE_NEWNET)?;
    netlink::make_table()?;
    yes()
}

fn iptables_legacy() -> Outcome {
    let found = ["/usr/sbin", "/sbin", "/usr/local/sbin"]
        .iter()
        .any(|directory| Path::new(directory).join("iptables-legacy-save").is_file());
    if found {
        yes()
    } else {
        Err("no iptables-legacy-save among the system's programs".to_owned())
    }
}
