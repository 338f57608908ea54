//! Descriptions that no kind claims and that are known all the same: why they are not saved.
//!
//! - What: programs of BPF, what attaches them, and types
//! - Refused: "a BPF program, of which the kernel tells only what it has made of its code"; "a BPF
//!   link, whose program the kernel tells only as what it has made of its code"; "objects of BPF
//!   other than maps are not there yet".
//! - CRIU 4.2: refused.
//! - What: virtual machines
//! - Refused: "it is a virtual machine: save it by its monitor (stillframe vm save)".
//! - CRIU 4.2: refused.
//! - What: supervisors of seccomp filters
//! - Refused: "it supervises a seccomp filter, which is not there yet".
//! - CRIU 4.2: refused.
//! - What: other devices
//! - Refused: "it is a device, whose state its driver knows alone".
//! - CRIU 4.2: refused, but for those that a plugin or `--external` takes.
//! - What: other sockets
//! - Refused: "sockets of this family are not there yet"; "sockets of this protocol are not there
//!   yet".
//! - CRIU 4.2: refuses cryptography, CAN, Bluetooth, XDP, SCTP and others.

use rustix::fs::FileType;

use super::Open;
use super::socket::Nature;
use super::socket::inet::{AF_INET, AF_INET6};

/// How the links of descriptions begin that have no path, and why they are not saved.
const LINKS: &[(&[&str], &str)] = &[
    (
        &["anon_inode:bpf-prog"],
        "a BPF program, of which the kernel tells only what it has made of its code",
    ),
    (
        &["anon_inode:bpf_link", "anon_inode:bpf-link"],
        "a BPF link, whose program the kernel tells only as what it has made of its code",
    ),
    (
        &["anon_inode:bpf", "anon_inode:btf"],
        "objects of BPF other than maps are not there yet",
    ),
    (
        &["anon_inode:kvm-"],
        "it is a virtual machine: save it by its monitor (stillframe vm save)",
    ),
    (
        &["anon_inode:seccomp notify"],
        "it supervises a seccomp filter, which is not there yet",
    ),
];

/// Why `open` is not saved; empty where that is not known.
pub(super) fn why(open: &Open<'_>) -> &'static str {
    let begins = |start: &&str| open.link.starts_with(start.as_bytes());
    let mut links = LINKS.iter();
    if let Some((_, why)) = links.find(|(starts, _)| starts.iter().any(begins)) {
        return why;
    }
    match FileType::from_raw_mode(open.stat.st_mode) {
        FileType::CharacterDevice => "it is a device, whose state its driver knows alone",
        FileType::Socket => match Nature::of(open) {
            Ok(Some(nature)) if [AF_INET, AF_INET6].contains(&nature.family) => {
                "sockets of this protocol are not there yet"
            }
            Ok(Some(_)) => "sockets of this family are not there yet",
            Ok(None) | Err(_) => "",
        },
        _ => "",
    }
}
