//! How the rarer kinds of descriptors are opened, and what they tell of themselves.
use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};
use sys::bpf_map::{self, Definition, Entries, Sizes};
use sys::kernel_memory::KernelMemory;
use sys::mqueue::{self, Attributes, Message, Tell};
use sys::perf_event::{self, Watched};
use sys::ring::{self, Part, RingMemory};
use sys::{fanotify, fcntl, socket, tun};

use crate::calls::block_signals;
use crate::calls::clone::{HOST_NAME, NETWORK, unshare};
use crate::storm::step::{FileKind, PAGE_BYTES};
use crate::subjects::Failure;

const INET: i32 = 2;
const DATAGRAM: i32 = 2;
const PACKET: i32 = 17;
const UDP: i32 = 17;
const UDP_LITE: i32 = 136;
/// An experimental type of frames: nobody sends any.
const FRAME_TYPE: u16 = 0x88b5;
const LOOPBACK: i32 = 1;
const TAP_WITHOUT_HEADERS: u16 = 0x1002;
/// How many messages a queue holds, and how long they are at most.
const QUEUE: (u64, usize) = (4, 4096);

/// The name of a queue, which is that of the subject's folder and a number.
pub(super) fn queue_name(folder: &Path, slot: u16) -> Result<CString, Failure> {
    let folder = folder.file_name().unwrap_or_default().to_string_lossy();
    Ok(CString::new(format!("{folder}-{slot}"))?)
}

/// Takes the name from a queue, if it has one.
pub(super) fn remove_queue(name: &str) -> io::Result<()> {
    mqueue::unlink(&CString::new(name)?)
}

pub(super) fn queue(name: &CString) -> Result<OwnedFd, Failure> {
    let room = Attributes {
        max_messages: QUEUE.0,
        message_bytes: QUEUE.1 as u64,
        messages: 0,
    };
    Ok(mqueue::create(name, room)?)
}

/// Sends a message to a queue that has room.
pub(super) fn send_message(queue: &OwnedFd, bytes: &[u8]) -> io::Result<usize> {
    let message = Message {
        priority: 0,
        bytes: bytes.to_vec(),
    };
    mqueue::send(queue, &message).map(|()| bytes.len())
}

/// Takes a message of a queue that has one.
pub(super) fn take_message(queue: &OwnedFd, buffer: &mut [u8]) -> io::Result<usize> {
    let message = mqueue::receive(queue, &mut buffer[..QUEUE.1])?;
    let bytes = message.ok_or(io::ErrorKind::WouldBlock)?.bytes;
    buffer[..bytes.len()].copy_from_slice(&bytes);
    Ok(bytes.len())
}

/// A group that is told of changes in a directory in which there are none.
pub(super) fn group(quiet: &Path) -> Result<OwnedFd, Failure> {
    /// `FAN_MODIFY`, `FAN_CLOSE_WRITE`, `FAN_EVENT_ON_CHILD`
    const CHANGES: u64 = 0x2 | 0x8 | 0x0800_0000;
    fs::create_dir(quiet)?;
    let group = fanotify::init(fanotify::NONBLOCK, 0)?;
    let path = CString::new(quiet.to_string_lossy().into_owned())?;
    fanotify::mark(&group, fanotify::ADD, CHANGES, &path)?;
    Ok(group)
}

/// A packet socket on the loopback.
pub(super) fn frames() -> Result<OwnedFd, Failure> {
    let own = socket::open(PACKET, DATAGRAM, 0)?;
    // `struct sockaddr_ll`
    let mut address = [0; 20];
    address[..2].copy_from_slice(&(PACKET as u16).to_ne_bytes());
    address[2..4].copy_from_slice(&FRAME_TYPE.to_be_bytes());
    address[4..8].copy_from_slice(&LOOPBACK.to_ne_bytes());
    socket::bind(&own, &address)?;
    Ok(own)
}

/// A device that only this subject has, and that is down.
pub(super) fn tap(folder: &Path, slot: u16) -> Result<OwnedFd, Failure> {
    let folder = folder.file_name().unwrap_or_default().to_string_lossy();
    let end = folder.len().saturating_sub(6);
    let name = format!("sf{slot}{}", folder.get(end..).unwrap_or_default());
    let own = File::options()
        .read(true)
        .write(true)
        .open("/dev/net/tun")?;
    tun::attach(&own, &name, TAP_WITHOUT_HEADERS)?;
    Ok(own.into())
}

/// A file that nobody else has open, with a lease for reading or writing.
pub(super) fn leased(slot: u16, path: &PathBuf) -> Result<OwnedFd, Failure> {
    fs::write(path, "leased")?;
    let file = File::open(path)?;
    fcntl::lease(file.as_fd(), slot % 4 == 2)?;
    Ok(file.into())
}

/// Two sockets that send to each other; of UDP where there is no UDP-Lite.
pub(super) fn datagram_pair(is_lite: bool) -> io::Result<(OwnedFd, OwnedFd)> {
    let open = || {
        let protocol = if is_lite { UDP_LITE } else { UDP };
        let socket = match socket::open(INET, DATAGRAM, protocol) {
            Err(error) if Errno::from_io_error(&error) == Some(Errno::PROTONOSUPPORT) => {
                socket::open(INET, DATAGRAM, UDP)?
            }
            made => made?,
        };
        socket::bind(&socket, &super::descriptors::loopback())?;
        Ok::<_, io::Error>(socket)
    };
    let (one, other) = (open()?, open()?);
    socket::connect(&one, &socket::name(&other)?)?;
    socket::connect(&other, &socket::name(&one)?)?;
    Ok((one, other))
}

/// What a queue is to tell through a socket, but for its last byte.
const COOKIE: [u8; 32] = *b"a storm's message queue has mail";
/// The signal by which a queue tells of a message.
const SIGNAL: i32 = 41;
const NETLINK: i32 = 16;
const RAW: i32 = 3;

/// A socket that hears from nobody yet.
pub(super) fn netlink() -> io::Result<OwnedFd> {
    socket::open(NETLINK, RAW, 0)
}

/// Has the task told of the next message that comes into an empty queue.
pub(super) fn notify(queue: &OwnedFd, through: Option<&OwnedFd>, value: u64) {
    block_signals(&[SIGNAL]);
    let tell = match through {
        Some(socket) => Tell::Socket(socket.as_fd(), &COOKIE),
        None => Tell::Signal(SIGNAL, value),
    };
    // Somebody may be told already.
    let _ = mqueue::notify(queue, tell);
}

/// Takes what queues have told.
pub(super) fn hear(socket: &OwnedFd) -> Result<(), Failure> {
    const DONT_WAIT: i32 = 0x40;
    let mut bytes = [0; 64];
    loop {
        match socket::receive(socket, &mut bytes, DONT_WAIT) {
            Ok(told) if told.len == COOKIE.len() && bytes[..31] == COOKIE[..31] => {}
            Ok(told) => return Err(format!("{:?} came", &bytes[..told.len]).into()),
            Err(_) => return Ok(()),
        }
    }
}

/// The sizes of what is in a map.
const ENTRY: Sizes = Sizes { key: 4, value: 8 };

/// A map of BPF, or an eventfd where nobody may look up who has it.
pub(super) fn map() -> Result<OwnedFd, Failure> {
    let made = KernelMemory::open().and_then(|_| {
        bpf_map::create(&Definition {
            kind: 1,
            key_bytes: 4,
            value_bytes: 8,
            max_entries: 8,
            name: b"storm".to_vec(),
            ..Definition::default()
        })
    });
    match made {
        Ok(map) => Ok(map),
        Err(_) => Ok(eventfd(0, EventfdFlags::CLOEXEC)?),
    }
}

/// An event of the first processor's page faults, which counts or does not; an eventfd where nobody
/// may look events up. (What others do in the meantime is not known of one task's.)
pub(super) fn counter(slot: u16) -> Result<OwnedFd, Failure> {
    const PAGE_FAULTS: u64 = 2;
    const READ_FORMAT_AT: usize = 32;
    const TOTAL_TIME_ENABLED: u64 = 1;
    let mut attr = perf_event::software(PAGE_FAULTS);
    attr[READ_FORMAT_AT..READ_FORMAT_AT + 8].copy_from_slice(&TOTAL_TIME_ENABLED.to_ne_bytes());
    let watched = Watched { tid: -1, cpu: 0 };
    let opened = KernelMemory::open().and_then(|_| perf_event::open(&attr, watched, None));
    let Ok(event) = opened else {
        return Ok(eventfd(0, EventfdFlags::CLOEXEC)?);
    };
    if slot.is_multiple_of(2) {
        perf_event::enable(&event)?;
    }
    Ok(event)
}

/// Tells whether an event counts: for how long it has is told besides what.
fn is_counting(event: BorrowedFd<'_>) -> Option<bool> {
    // Who reads of one that is no event may wait.
    let link = fs::read_link(format!("/proc/self/fd/{}", event.as_raw_fd())).ok()?;
    if link.as_os_str() != "anon_inode:[perf_event]" {
        return None;
    }
    let mut words = [0; 16];
    let bytes = rustix::io::read(event, &mut words).ok()?;
    (bytes == words.len()).then(|| words[8..] != [0; 8])
}

/// Writes a value to one of a few entries.
pub(super) fn write_entry(map: &OwnedFd, value: u32) {
    let (key, value) = ((value % 5).to_ne_bytes(), u64::from(value).to_ne_bytes());
    // It may be no map.
    let _ = bpf_map::update(map, (&key, &value), ENTRY);
}

/// What is in a map, in the order of the keys.
fn entries(map: BorrowedFd<'_>) -> Option<Vec<(Vec<u8>, Vec<u8>)>> {
    let read = Entries::new(map, ENTRY).read().ok()?;
    let (keys, values) = read.unwrap_or_default();
    let keys = keys.chunks(ENTRY.key).map(<[u8]>::to_vec);
    let mut all: Vec<_> = keys
        .zip(values.chunks(ENTRY.value).map(<[u8]>::to_vec))
        .collect();
    all.sort();
    Some(all)
}

/// One of the task's own namespaces.
pub(super) fn namespace(slot: u16) -> Result<OwnedFd, Failure> {
    let path = format!("/proc/thread-self/ns/{}", FileKind::namespace(slot));
    Ok(File::open(path)?.into())
}

/// A new namespace at a path, in which nobody is.
pub(super) fn mounted(slot: u16, path: &Path) -> Result<OwnedFd, Failure> {
    let (flag, kind, link) = match slot % 4 {
        0 => (NETWORK, "net", LinkNameSpaceType::Network),
        _ => (
            HOST_NAME,
            "uts",
            LinkNameSpaceType::HostNameAndNISDomainName,
        ),
    };
    let here = format!("/proc/thread-self/ns/{kind}");
    let own = File::open(&here)?;
    fs::write(path, "")?;
    unshare(flag)?;
    let mounted = rustix::mount::mount_bind(&here, path);
    move_into_link_name_space(own.as_fd(), Some(link))?;
    mounted?;
    Ok(File::open(path)?.into())
}

/// Takes a mounted namespace away.
pub(super) fn unmount(path: &str) -> io::Result<()> {
    Ok(rustix::mount::unmount(path, UnmountFlags::DETACH)?)
}

/// Whom a queue is to tell.
fn told(queue: BorrowedFd<'_>) -> Option<String> {
    let mut text = [0; 128];
    let len = rustix::io::pread(queue, &mut text[..], 0).ok()?;
    let text = String::from_utf8_lossy(&text[..len]).into_owned();
    Some(text.split_once("NOTIFY:")?.1.trim_end().to_owned())
}

/// Which namespace it is: the task's own one of a kind, or any by the number of its inode.
fn which(own: BorrowedFd<'_>) -> Option<String> {
    let there = rustix::fs::fstat(own).ok()?;
    let is = |kind: &&&str| {
        let stat = rustix::fs::stat(format!("/proc/thread-self/ns/{kind}"));
        stat.is_ok_and(|stat| (stat.st_dev, stat.st_ino) == (there.st_dev, there.st_ino))
    };
    let kind = FileKind::NAMESPACES.iter().find(is);
    Some(kind.map_or_else(|| there.st_ino.to_string(), |kind| format!("own {kind}")))
}

/// A ring that has worked: entries that are all zeros do nothing. A full one has files, of which
/// one is there, and memory. An eventfd where there are no rings, or the kernel tells nobody what
/// is in them.
pub(super) fn ring(slot: u16, is_full: bool) -> Result<OwnedFd, Failure> {
    /// Without an array of indices.
    const NO_SQARRAY: u32 = 1 << 16;
    let (entries, works) = (1 << (slot % 4), u32::from(slot));
    let flags = NO_SQARRAY * u32::from(slot % 2);
    let made = KernelMemory::open().and_then(|_| ring::setup(entries, 2 * entries, flags));
    let Ok(made) = made else {
        return Ok(eventfd(0, EventfdFlags::CLOEXEC)?);
    };
    let queues = RingMemory::map(made.own.as_fd(), Part::Queues, 4096)?;
    let (tail, head) = (made.places.sq_tail(), made.places.cq_head());
    for work in 1..=works {
        // As many as there is room for stay unseen.
        let seen = work.saturating_sub(2 * entries);
        queues.word(head).store(seen, Ordering::Release);
        queues.word(tail).store(work, Ordering::Release);
        ring::submit(made.own.as_fd(), 1)?;
    }
    if is_full {
        let error = io::stderr();
        let files = [None, Some(error.as_fd()), None];
        ring::register_files(made.own.as_fd(), &files, &[0, u64::from(slot), 0])?;
        // Memory for ever, on a page of its own.
        let memory = (0..2 * PAGE_BYTES).map(|_| AtomicU8::new(0));
        let memory: &'static [AtomicU8] = Box::leak(memory.collect());
        let start = memory.as_ptr().align_offset(PAGE_BYTES);
        crate::calls::register_buffers(made.own.as_fd(), &[&memory[start..start + PAGE_BYTES]])?;
    }
    Ok(made.own)
}

/// What a descriptor of one of these kinds tells of itself.
pub(super) fn describe(
    kind: FileKind,
    own: BorrowedFd<'_>,
    tell: &mut impl FnMut(&str, &dyn std::fmt::Debug),
) {
    let info = || {
        let path = format!("/proc/thread-self/fdinfo/{}", own.as_raw_fd());
        fs::read_to_string(path).unwrap_or_default()
    };
    match kind {
        FileKind::Queue => {
            tell("queue", &mqueue::attributes(own).ok());
            tell("told", &told(own));
        }
        FileKind::Map => tell("entries", &entries(own)),
        FileKind::Counter => tell("counts", &is_counting(own)),
        FileKind::Namespace | FileKind::Mounted => tell("which", &which(own)),
        FileKind::Leased => tell("lease", &crate::calls::leased(own).ok()),
        FileKind::Tap => tell("attached", &tun::attached(own).ok()),
        FileKind::Group => {
            let marks = info();
            let marks = marks.lines().filter(|line| line.starts_with("fanotify"));
            tell("marks", &marks.collect::<Vec<_>>());
        }
        FileKind::FullRing => {
            let all = info();
            let registered = ["UserFiles", "UserBufs"];
            let lines = all.lines();
            let told = lines.filter(|line| registered.iter().any(|word| line.starts_with(word)));
            tell("registered", &told.collect::<Vec<_>>());
        }
        _ => {}
    }
}
