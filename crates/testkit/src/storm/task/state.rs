//! Steps that change the state of descriptions, and the words that tell it.
use std::fmt::Write;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use crate::samples::made::made;
use resources::fd::socket::Nature;
use resources::fd::socket::ledger::samples::{self, OF_CONNECTIONS};
use resources::fd::socket::ledger::{self, Fate, Kinds};
use rustix::event::{PollFd, PollFlags, poll};
use rustix::fs::{FileType, FlockOperation, OFlags, SealFlags, SeekFrom};
use rustix::io::FdFlags;
use rustix::pipe::{fcntl_getpipe_size, fcntl_setpipe_size};
use rustix::thread::Timespec;
use sys::fcntl::{self, Holder, Owner};
use sys::socket;

use super::descriptors::OpenDescriptor;
use super::{StepResult, Task, opened};
use crate::storm::step::{FileKind, LockHolder, Setting};

/// `O_LARGEFILE`, which every open on a 64-bit kernel sets, while calls that make files otherwise
/// do not, and `O_CLOEXEC`, which the one that opens a terminal's other end keeps.
const BY_CHANCE: u32 = 0o2_100_000;
const SOCKET: i32 = 1;
/// Options of sockets whose values mean nothing later, or that change by being asked for: errors,
/// filters, the processor, memory in use, cookies, the id of a queue, a descriptor of the peer.
const NOT_TOLD: [i32; 9] = [4, 26, 49, 51, 55, 56, 57, 71, 77];
const LAST_OPTION: i32 = 83;
/// The window that a connection offers at most, which the kernel makes larger with its buffer.
const TCP_WINDOW_CLAMP: (i32, i32) = (6, 10);

impl Task {
    pub(super) fn lock_file(
        &self,
        slot: u16,
        holder: LockHolder,
        write: bool,
        range: (u16, u16),
    ) -> StepResult {
        let held = self.held.get(&slot);
        let Some(held) = held.filter(|held| !held.ends.kind.shares_inode()) else {
            return Ok(());
        };
        let range = (range.0.into(), range.1.into());
        // Others may have locked it.
        match holder {
            LockHolder::Whole => {
                let operation = if write {
                    FlockOperation::NonBlockingLockExclusive
                } else {
                    FlockOperation::NonBlockingLockShared
                };
                let _ = rustix::fs::flock(&held.file, operation);
            }
            LockHolder::Process => {
                let _ = fcntl::lock(held.file.as_fd(), Holder::Process, write, range);
            }
            LockHolder::Description => {
                let _ = fcntl::lock(held.file.as_fd(), Holder::Description, write, range);
            }
        }
        Ok(())
    }

    pub(super) fn set(&self, slot: u16, what: Setting) -> StepResult {
        let Some(held) = self.held.get(&slot) else {
            return Ok(());
        };
        let file = held.file.as_fd();
        let switch = |flag: OFlags, on: bool| {
            let mut flags = rustix::fs::fcntl_getfl(file)?;
            flags.set(flag, on);
            rustix::fs::fcntl_setfl(file, flags)
        };
        let is_file = matches!(held.ends.kind, FileKind::File | FileKind::Memfd);
        // What it does not have stays as it is.
        match what {
            Setting::Nonblocking(on) => {
                let _ = switch(OFlags::NONBLOCK, on);
            }
            Setting::Append(on) => {
                let _ = switch(OFlags::APPEND, on);
            }
            Setting::CloseOnExec(on) => {
                let flags = if on {
                    FdFlags::CLOEXEC
                } else {
                    FdFlags::empty()
                };
                rustix::io::fcntl_setfd(file, flags)?;
            }
            Setting::PipeBytes(bytes) => {
                let _ = fcntl_setpipe_size(file, bytes as usize);
            }
            Setting::Position(at) if is_file => {
                rustix::fs::seek(file, SeekFrom::Start(at.into()))?;
            }
            Setting::Length(bytes) if is_file => {
                let _ = rustix::fs::ftruncate(file, bytes.into());
            }
            Setting::Seals(seals) if held.ends.kind == FileKind::Memfd => {
                let seals = SealFlags::from_bits_truncate(seals.into());
                let _ = rustix::fs::fcntl_add_seals(file, seals);
            }
            Setting::Owner { kind, signal } => {
                let pid = std::process::id().cast_signed();
                let kind = kind.into();
                let _ = fcntl::set_owner(file, Owner { kind, pid });
                let _ = fcntl::set_signal(file, signal.into());
            }
            Setting::Option { level, name, value } if held.ends.kind.is_socket() => {
                let _ = socket::set_number(file, level.into(), name.into(), value);
            }
            Setting::Kept { level, name, first } if held.ends.kind.is_socket() => {
                change_kept(file, (level, name), first);
            }
            Setting::Shutdown(how) if held.ends.kind.is_socket() => {
                let _ = socket::shutdown(file, how.into());
            }
            _ => {}
        }
        Ok(())
    }

    /// What it has open, a line each.
    pub(super) fn describe_descriptors(&self) -> Vec<String> {
        let told = self.held.iter().map(|(slot, held)| {
            let kind = held.ends.kind;
            format!("slot {slot} {kind:?}{}", describe(held))
        });
        told.collect()
    }
}

fn describe(held: &OpenDescriptor) -> String {
    let file = held.file.as_fd();
    let kind = held.ends.kind;
    let mut told = String::new();
    // Writing to a string does not fail.
    let mut tell = |name: &str, value: &dyn std::fmt::Debug| {
        let _ = write!(told, ", {name} {value:?}");
    };
    describe_file(file, &mut tell);
    // A file that signals nobody loses whom it would: the dump does not ask.
    if !is_plain(file) {
        tell("owner", &fcntl::owner(file).ok());
        tell("signal", &fcntl::signal(file).ok());
    }
    if let FileKind::OfTask = kind {
        tell("of", &whose(file));
    }
    opened::describe(kind, file, &mut tell);
    if let Some(made) = held.ends.made.and_then(|at| made().nth(at.into())) {
        tell(made.name, &made.told(file));
    }
    if let FileKind::Memfd = kind {
        tell("seals", &rustix::fs::fcntl_get_seals(file));
    }
    if matches!(kind, FileKind::Pipe | FileKind::PacketPipe | FileKind::Fifo) {
        tell("pipe bytes", &fcntl_getpipe_size(file).ok());
    }
    // How much room these have left depends on the pieces in which what they hold was written.
    let pieces = [
        FileKind::Terminal,
        FileKind::Pipe,
        FileKind::Fifo,
        FileKind::Tcp,
    ];
    let out = if pieces.contains(&kind) {
        PollFlags::empty()
    } else {
        PollFlags::OUT
    };
    // A connection may still hold back at its other end what was sent last. A signalfd is ready for
    // a task that has a signal waiting, and an epoll forgets that it was as soon as one asks that
    // has none: so it depends on who asks first.
    let arrived = match kind {
        FileKind::Tcp => PollFlags::empty(),
        FileKind::Epoll if may_watch_signals(file) => PollFlags::empty(),
        _ => PollFlags::IN,
    };
    let any = arrived | out | PollFlags::PRI | PollFlags::RDHUP;
    let mut watched = [PollFd::new(&file, any)];
    let at_once = Timespec::default();
    if poll(&mut watched, Some(&at_once)).is_ok() {
        let mut events = watched[0].revents();
        // An error that ended a connection, and that nobody was told of, is lost (docs/limits.md).
        if kind == FileKind::Tcp {
            events.remove(PollFlags::ERR);
        }
        tell("events", &events);
    }
    // Of what is on its way through TCP, either end holds some. What was written at one end of a
    // terminal the kernel passes on to the other when it comes to it.
    if !matches!(kind, FileKind::Tcp | FileKind::Terminal) {
        tell("unread", &rustix::io::ioctl_fionread(file).ok());
    }
    if kind.is_socket() {
        describe_socket(held, &mut tell);
    }
    told
}

fn is_plain(file: BorrowedFd<'_>) -> bool {
    let kind = rustix::fs::fstat(file).map(|stat| FileType::from_raw_mode(stat.st_mode));
    matches!(kind, Ok(FileType::RegularFile | FileType::Directory))
}

fn describe_file(file: BorrowedFd<'_>, tell: &mut impl FnMut(&str, &dyn std::fmt::Debug)) {
    if let Ok(flags) = rustix::fs::fcntl_getfl(file) {
        tell("flags", &format_args!("{:o}", flags.bits() & !BY_CHANCE));
    }
    tell("close on exec", &rustix::io::fcntl_getfd(file));
    if let Ok(stat) = rustix::fs::fstat(file) {
        let whose = (stat.st_uid, stat.st_gid, stat.st_nlink, stat.st_size);
        tell("mode", &format_args!("{:o}", stat.st_mode));
        tell("whose, links, bytes", &whose);
    }
}

/// Which task a file is of, by its path and by what a pidfd tells.
fn whose(file: BorrowedFd<'_>) -> String {
    let number = file.as_raw_fd();
    let info =
        std::fs::read_to_string(format!("/proc/thread-self/fdinfo/{number}")).unwrap_or_default();
    let pid = info.lines().find(|line| line.starts_with("Pid:"));
    let path = std::fs::read_link(format!("/proc/thread-self/fd/{number}")).unwrap_or_default();
    format!("{} {}", path.display(), pid.unwrap_or_default())
}

/// Tells whether the epoll may watch a signalfd, by itself or through another: whatever this task
/// does not have under the number that the epoll has could be one.
fn may_watch_signals(epoll: BorrowedFd<'_>) -> bool {
    let info = format!("/proc/thread-self/fdinfo/{}", epoll.as_raw_fd());
    let info = std::fs::read_to_string(info).unwrap_or_default();
    let watched = info.lines().filter_map(|line| line.strip_prefix("tfd:"));
    let mut numbers = watched.filter_map(|line| line.split_ascii_whitespace().next());
    numbers.any(|number| {
        let link = std::fs::read_link(format!("/proc/thread-self/fd/{number}"));
        link.map_or(true, |link| {
            ["anon_inode:[signalfd]", "anon_inode:[eventpoll]"]
                .iter()
                .any(|kind| link.as_os_str() == *kind)
        })
    })
}

fn describe_socket(held: &OpenDescriptor, tell: &mut impl FnMut(&str, &dyn std::fmt::Debug)) {
    let file = held.file.as_fd();
    let text = |name: Vec<u8>| String::from_utf8_lossy(&name).into_owned();
    tell("name", &socket::name(file).map(text).ok());
    tell("peer", &socket::peer_name(file).map(text).ok());
    let is_tcp = held.ends.kind == FileKind::Tcp;
    let names = (1..=LAST_OPTION).filter(|name| !NOT_TOLD.contains(name));
    for name in names {
        // The kernel makes TCP's buffers larger by itself.
        if is_tcp && (name == 7 || name == 8) {
            continue;
        }
        if let Ok(value) = socket::option(file, SOCKET, name, 64) {
            tell(&format!("option {SOCKET}.{name}"), &value);
        }
    }
    describe_kept(held, tell);
}

/// Describes the options that the ledger keeps, beyond those numbers; all of them of a socket that
/// has no connection.
fn describe_kept(held: &OpenDescriptor, tell: &mut impl FnMut(&str, &dyn std::fmt::Debug)) {
    let file = held.file.as_fd();
    let Ok(nature) = Nature::of_fd(file) else {
        return;
    };
    let is_alone = held.ends.kind == FileKind::Socket;
    for (entry, kept) in ledger::kept(Kinds::of(nature)) {
        let option = (entry.level, entry.name);
        let was_told = entry.level == SOCKET && entry.name <= LAST_OPTION;
        let is_tuned = OF_CONNECTIONS.contains(&option) || option == TCP_WINDOW_CLAMP;
        if was_told && !NOT_TOLD.contains(&entry.name) || is_tuned && !is_alone {
            continue;
        }
        if let Ok(value) = socket::option(file, entry.level, entry.name, kept.bytes) {
            let hex: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
            tell(entry.label, &hex);
        }
    }
}

/// Changes an option that the ledger says is kept, if the kernel takes another value.
fn change_kept(socket: BorrowedFd<'_>, (level, name): (i32, i32), first: u8) {
    if let Some(entry) = ledger::find(level, name)
        && let Fate::Kept(kept) = entry.fate
    {
        // Some values depend on others, and some options on the socket's state.
        let _ = samples::change(socket, entry, kept, first.into());
    }
}
