//! All kinds of descriptions.

use super::{ErasedKind, Open, refused};
use super::{
    block_device, bpf_map, chardev, directory, epoll, eventfd, fanotify, fifo, inotify, io_uring,
    memfd, mqueue, namespace, netlink, packet_socket, path, perf_event, pidfd, pipe, process_file,
    raw_socket, regular, segment, shmem, signalfd, tcp, timerfd, tty, tun, udp, unix, userfaultfd,
    vsock,
};
use crate::Result;

/// Every kind, in the order in which they are asked whether they claim a description.
pub static KINDS: &[&dyn ErasedKind] = &[
    // Before the kinds of files that they are.
    &process_file::ProcessFile,
    &namespace::Namespace,
    &path::Path,
    &memfd::Memfd,
    &shmem::Shmem,
    &segment::SystemV,
    &mqueue::MessageQueue,
    &regular::Regular,
    &directory::Directory,
    &chardev::Chardev,
    &block_device::BlockDevice,
    &pipe::Pipe,
    &fifo::Fifo,
    &eventfd::Eventfd,
    &timerfd::Timerfd,
    &signalfd::Signalfd,
    &pidfd::Pidfd,
    &userfaultfd::Userfaultfd,
    &inotify::Inotify,
    &fanotify::Fanotify,
    &epoll::Epoll,
    &io_uring::IoUring,
    &bpf_map::BpfMap,
    &perf_event::PerfEvent,
    &unix::UnixSocket,
    &tcp::TcpSocket,
    &udp::UdpSocket,
    &raw_socket::RawSocket,
    &netlink::NetlinkSocket,
    &packet_socket::PacketSocket,
    &vsock::VsockSocket,
    &tty::TtyKind,
    &tun::Tun,
];

/// The kind of the descriptions whose records have this tag.
#[must_use]
pub fn kind_of(tag: u16) -> Option<&'static dyn ErasedKind> {
    let mut kinds = KINDS.iter().copied();
    kinds.find(|kind| kind.tag() == tag)
}

/// The kind that claims `open`.
///
/// # Errors
/// [`crate::Error::Unsupported`] naming the description when no kind does.
pub fn claim(open: &Open<'_>) -> Result<&'static dyn ErasedKind> {
    let kind = KINDS.iter().find(|kind| kind.claims(open));
    kind.copied()
        .ok_or_else(|| open.unsupported(refused::why(open), None))
}

/// The links of descriptors of which only the kernel's memory tells enough.
pub fn links_looked_up() -> impl Iterator<Item = &'static [u8]> {
    let kinds = KINDS.iter().filter(|kind| kind.is_looked_up());
    kinds.filter_map(|kind| kind.link())
}

/// The kind of a descriptor with this link, if it [`super::Kind::WORKS`].
#[must_use]
pub fn worker(link: &[u8]) -> Option<&'static dyn ErasedKind> {
    let mut kinds = KINDS.iter().copied();
    kinds.find(|kind| kind.works() && kind.link() == Some(link))
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::super::{DescriptionId, Info};
    use super::*;
    use crate::Error;

    #[test]
    fn numbers_and_names_are_used_once() {
        let tags = KINDS.iter().map(|kind| kind.tag()).collect::<HashSet<_>>();
        let names = KINDS.iter().map(|kind| kind.name()).collect::<HashSet<_>>();
        assert_eq!((tags.len(), names.len()), (KINDS.len(), KINDS.len()));
        assert!(tags.iter().all(|tag| (100..200).contains(tag)));
    }

    #[test]
    fn no_kind_is_forgotten() {
        let list = include_str!("kinds.rs");
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/src/fd");
        let mut found = 0;
        for entry in std::fs::read_dir(folder).expect("list") {
            let path = entry.expect("entry").path();
            let name = path.file_stem().and_then(|name| name.to_str());
            let name = name.expect("a name").to_owned();
            let file = if path.is_dir() {
                path.join("mod.rs")
            } else {
                path
            };
            let text = std::fs::read_to_string(&file).unwrap_or_default();
            let Some((_, rest)) = text.split_once("\nimpl Kind for ") else {
                continue;
            };
            let kind = rest.split_whitespace().next().expect("a type");
            assert!(list.contains(&format!("    &{name}::{kind},\n")), "{name}");
            found += 1;
        }
        assert_eq!(found, KINDS.len());
    }

    #[test]
    fn every_kind_refuses_what_is_no_message() {
        for kind in KINDS {
            let name = kind.name();
            for payload in [&b"\xff"[..], b"\x0a\xff\xff\xff\xff\xff\xff", b"\x08"] {
                let error = kind.decode(DescriptionId(7), payload).expect_err(name);
                let told = error.to_string();
                assert!(matches!(error, Error::Corrupt { .. }), "{told}");
                assert!(
                    told.starts_with(&format!("image record {name} 7")),
                    "{told}"
                );
            }
        }
    }

    #[test]
    fn payloads_of_earlier_dumps_are_encoded_as_they_were() {
        let mut missing = KINDS.iter().map(|kind| kind.name()).collect::<HashSet<_>>();
        let lines = include_str!("payloads.txt").lines();
        for line in lines.filter(|line| !line.starts_with('#')) {
            let (tag, hex) = line.split_once(' ').expect("a number and bytes");
            let digits = hex.as_bytes().chunks(2);
            let bytes = digits.map(|two| std::str::from_utf8(two).expect("ASCII"));
            let bytes = bytes.map(|two| u8::from_str_radix(two, 16).expect("two digits"));
            let payload = bytes.collect::<Vec<_>>();
            let kind = kind_of(tag.parse().expect("a number")).expect("a known kind");
            let description = kind.decode(DescriptionId(0), &payload);
            let description = description.unwrap_or_else(|error| panic!("{error}"));
            assert_eq!(description.encode(), payload, "{}", kind.name());
            missing.remove(kind.name());
        }
        assert_eq!(missing, HashSet::new());
    }

    #[test]
    fn unknown_descriptions_are_refused_by_name() {
        let fetch = || Err(Error::unsupported(1, "nothing is fetched"));
        let null = rustix::fs::stat("/proc/self/stat").expect("stat");
        for (link, why) in [
            (
                "anon_inode:btf",
                ": objects of BPF other than maps are not there yet",
            ),
            ("anon_inode:[eventfd2]", ""),
        ] {
            let mut stat = null;
            stat.st_mode = 0o600;
            let facts = (link.as_bytes().to_vec(), stat, Info::default());
            let open = Open::new(
                DescriptionId(0),
                (sys::process::Process::new(7), 5),
                facts,
                fetch,
            );
            let error = claim(&open).err().expect("no kind").to_string();
            let place = format!("pid 7: fd 5 ({link})");
            assert_eq!(error, format!("{place} is not supported{why}"));
        }
    }
}
