//! Steps that open, share, pass and close descriptors.
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::PathBuf;

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fs::{FileType, MemfdFlags, Mode, OFlags, inotify, memfd_create};
use rustix::io::fcntl_dupfd_cloexec;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create,
    timerfd_settime,
};
use sys::socket::{self, Along};

use super::{StepResult, Task, opened};
use crate::storm::step::{Action, FileKind, SLOTS, TASKS, TaskFile};
use crate::subjects::Failure;

const UNIX: i32 = 1;
const INET: i32 = 2;
const STREAM: i32 = 1;
const DATAGRAM: i32 = 2;
const PACKETS: i32 = 5;
const BACKLOG: i32 = 8;
const DONT_WAIT: i32 = 0x40;
/// The signals that a signalfd reads: SIGUSR1 and one of the real-time ones.
const READ_SIGNALS: u64 = 1 << 9 | 1 << 39;

/// How much is sent of a descriptor's [`DescriptorEnds`].
const ENDS_BYTES: usize = 10;

/// A descriptor, and where what is written to it and read from it comes out and goes in.
pub(super) struct OpenDescriptor {
    pub file: OwnedFd,
    pub ends: DescriptorEnds,
}

/// What a descriptor leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DescriptorEnds {
    pub kind: FileKind,
    /// The name that it was opened under.
    pub origin: u16,
    /// The end at which what is written to it is read.
    pub out: Option<u16>,
    /// The end at which it reads.
    pub into: Option<u16>,
    /// The ledger's sample that it was made by, by number.
    pub made: Option<u16>,
}

impl DescriptorEnds {
    fn to_bytes(self) -> [u8; ENDS_BYTES] {
        let end = |end: Option<u16>| end.unwrap_or(u16::MAX);
        let [out, into, made] = [self.out, self.into, self.made].map(end);
        let words = [self.kind as u16, self.origin, out, into, made];
        let mut bytes = [0; ENDS_BYTES];
        for (two, word) in bytes.chunks_exact_mut(2).zip(words) {
            two.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn of_bytes(bytes: [u8; ENDS_BYTES]) -> Option<Self> {
        let word = |at: usize| u16::from_le_bytes([bytes[at], bytes[at + 1]]);
        let end = |at: usize| Some(word(at)).filter(|&end| end != u16::MAX);
        Some(Self {
            kind: *FileKind::ALL.get(usize::from(word(0)))?,
            origin: word(2),
            out: end(4),
            into: end(6),
            made: end(8),
        })
    }
}

impl Task {
    pub(super) fn change_descriptors(&mut self, action: &Action) -> StepResult {
        match *action {
            Action::Open { slot, kind } if slot + 1 < SLOTS => self.open(slot, kind),
            Action::Make {
                slot,
                ref what,
                number,
            } if slot + 1 < SLOTS => {
                self.make_known(slot, what, number);
                Ok(())
            }
            Action::Socket {
                slot,
                family,
                kind,
                protocol,
            } if slot < SLOTS => {
                // This kernel may not have the kind.
                if let Ok(own) = socket::open(family, kind, protocol) {
                    self.keep(slot, FileKind::Socket, own, None, None);
                }
                Ok(())
            }
            Action::OpenTask { slot, of, what } => self.open_task(slot, of, what),
            Action::Duplicate { slot, to, least } => {
                if let Some(held) = self.held.get(&slot) {
                    let file = fcntl_dupfd_cloexec(&held.file, least)?;
                    let ends = held.ends;
                    self.held.insert(to, OpenDescriptor { file, ends });
                }
                Ok(())
            }
            Action::Close { slot } => {
                self.held.remove(&slot);
                Ok(())
            }
            Action::Connect { slot, to } if slot + 1 < SLOTS => self.connect(slot, to),
            Action::Accept { slot } => self.accept(slot),
            Action::Pass { slot, through } => {
                self.pass(slot, through);
                Ok(())
            }
            Action::Take { through } => self.take(through),
            Action::Delete { slot } => {
                // It may have none, or no more.
                let _ = fs::remove_file(self.path_of(slot));
                let name = opened::queue_name(&self.folder, slot)?;
                let _ = opened::remove_queue(&name.to_string_lossy());
                Ok(())
            }
            Action::Notify { slot, through } => {
                self.notify(slot, through);
                Ok(())
            }
            Action::Watch {
                epoll,
                slot,
                edge,
                once,
            } => {
                self.watch(epoll, slot, edge, once);
                Ok(())
            }
            _ => Ok(()),
        }
    }

    pub(super) fn path_of(&self, slot: u16) -> PathBuf {
        self.folder.join(format!("open-{slot}"))
    }

    fn address_of(&self, slot: u16) -> Vec<u8> {
        let mut address = vec![1, 0];
        address.extend(self.path_of(slot).as_os_str().as_bytes());
        address.push(0);
        address
    }

    fn keep(
        &mut self,
        slot: u16,
        kind: FileKind,
        file: OwnedFd,
        out: Option<u16>,
        into: Option<u16>,
    ) {
        let origin = slot;
        let ends = DescriptorEnds {
            kind,
            origin,
            out,
            into,
            made: None,
        };
        self.held.insert(slot, OpenDescriptor { file, ends });
    }

    /// Keeps two ends that write to each other.
    fn keep_pair(&mut self, slot: u16, kind: FileKind, (one, other): (OwnedFd, OwnedFd)) {
        self.keep(slot, kind, one, Some(slot + 1), Some(slot));
        self.keep(slot + 1, kind, other, Some(slot), Some(slot + 1));
    }

    fn open(&mut self, slot: u16, kind: FileKind) -> StepResult {
        let path = self.path_of(slot);
        match kind {
            FileKind::Pipe | FileKind::PacketPipe => {
                let packets = if kind == FileKind::Pipe {
                    PipeFlags::empty()
                } else {
                    PipeFlags::DIRECT
                };
                let (reader, writer) = pipe_with(PipeFlags::CLOEXEC | packets)?;
                self.keep(slot, kind, reader, None, Some(slot));
                self.keep(slot + 1, kind, writer, Some(slot), None);
            }
            FileKind::Fifo => {
                let mode = Mode::RUSR | Mode::WUSR;
                rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, mode, 0)?;
                let file = File::options().read(true).write(true).open(&path)?;
                self.keep(slot, kind, file.into(), Some(slot), Some(slot));
            }
            FileKind::Streams | FileKind::Mailbox => {
                self.keep_pair(slot, kind, socket::pair(UNIX, STREAM, 0)?);
            }
            FileKind::Datagrams => self.keep_pair(slot, kind, socket::pair(UNIX, DATAGRAM, 0)?),
            FileKind::Packets => self.keep_pair(slot, kind, socket::pair(UNIX, PACKETS, 0)?),
            FileKind::Listener => {
                let socket = socket::open(UNIX, STREAM, 0)?;
                socket::bind(&socket, &self.address_of(slot))?;
                socket::listen(&socket, BACKLOG)?;
                self.keep(slot, kind, socket, None, None);
            }
            FileKind::Named => {
                let socket = socket::open(UNIX, DATAGRAM, 0)?;
                socket::bind(&socket, &self.address_of(slot))?;
                self.keep(slot, kind, socket, None, Some(slot));
            }
            FileKind::Tcp => self.keep_pair(slot, kind, tcp_pair()?),
            FileKind::Udp | FileKind::UdpLite => {
                let pair = opened::datagram_pair(kind == FileKind::UdpLite)?;
                self.keep_pair(slot, kind, pair);
            }
            FileKind::Queue => {
                let name = opened::queue_name(&self.folder, slot)?;
                let queue = opened::queue(&name)?;
                self.note("queue", name.to_string_lossy())?;
                self.keep(slot, kind, queue, Some(slot), Some(slot));
            }
            FileKind::Terminal => {
                let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
                let own = openpt(flags)?;
                unlockpt(&own)?;
                let other = ioctl_tiocgptpeer(&own, flags)?;
                let mut modes = tcgetattr(&other)?;
                modes.make_raw();
                tcsetattr(&other, OptionalActions::Now, &modes)?;
                self.keep(slot, kind, own, None, Some(slot));
                self.keep(slot + 1, kind, other, Some(slot), None);
            }
            // Other steps make these.
            FileKind::Connection
            | FileKind::Sender
            | FileKind::OfTask
            | FileKind::Socket
            | FileKind::Made => {}
            _ => {
                let file = self.open_one(slot, kind)?;
                self.keep(slot, kind, file, None, None);
            }
        }
        Ok(())
    }

    fn open_task(&mut self, slot: u16, of: u8, what: TaskFile) -> StepResult {
        let number = (of < TASKS).then(|| self.ledger.pid(of)).flatten();
        let Some(number) = number else {
            return Ok(());
        };
        let open =
            |path: String, flags| rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty());
        let file = match what {
            TaskFile::Process => {
                let pid = Pid::from_raw(number.cast_signed()).ok_or("a pid is not 0")?;
                pidfd_open(pid, PidfdFlags::empty())
            }
            TaskFile::Status => open(format!("/proc/{number}/status"), OFlags::RDONLY),
            TaskFile::Threads => open(format!("/proc/{number}/task"), OFlags::RDONLY),
            TaskFile::Place => open(format!("/proc/{number}"), OFlags::PATH),
        };
        self.keep(slot, FileKind::OfTask, file?, None, None);
        Ok(())
    }

    fn open_one(&self, slot: u16, kind: FileKind) -> Result<OwnedFd, Failure> {
        Ok(match kind {
            FileKind::Event => eventfd(u32::from(slot), EventfdFlags::CLOEXEC)?,
            FileKind::Timer => {
                let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::CLOEXEC)?;
                let hours = |hours: i64| Timespec {
                    tv_sec: hours * 3600,
                    tv_nsec: 0,
                };
                let time = Itimerspec {
                    it_interval: hours(i64::from(slot % 2)),
                    it_value: hours(1 + i64::from(slot)),
                };
                timerfd_settime(&timer, TimerfdTimerFlags::empty(), &time)?;
                timer
            }
            FileKind::Ring | FileKind::FullRing => opened::ring(slot, kind == FileKind::FullRing)?,
            FileKind::Group => opened::group(&self.path_of(slot))?,
            FileKind::Frames => opened::frames()?,
            FileKind::Tap => opened::tap(&self.folder, slot)?,
            FileKind::Leased => opened::leased(slot, &self.path_of(slot))?,
            FileKind::Netlink => opened::netlink()?,
            FileKind::Map => opened::map()?,
            FileKind::Counter => opened::counter(slot)?,
            FileKind::Namespace => opened::namespace(slot)?,
            FileKind::Mounted => {
                let path = self.path_of(slot);
                self.note("mount", path.display())?;
                opened::mounted(slot, &path)?
            }
            FileKind::Signals => sys::signalfd::create(READ_SIGNALS, slot.is_multiple_of(2))?,
            FileKind::Epoll => epoll::create(epoll::CreateFlags::CLOEXEC)?,
            FileKind::Inotify => {
                let watcher = inotify::init(inotify::CreateFlags::CLOEXEC)?;
                let quiet = self.path_of(slot);
                fs::create_dir(&quiet)?;
                let events = inotify::WatchFlags::CREATE | inotify::WatchFlags::DELETE;
                inotify::add_watch(&watcher, &quiet, events)?;
                watcher
            }
            FileKind::Memfd => {
                let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
                memfd_create(format!("slot-{slot}"), flags)?
            }
            _ => {
                let mut options = File::options();
                options.read(true).write(true).create_new(true);
                options.open(self.path_of(slot))?.into()
            }
        })
    }

    fn connect(&mut self, slot: u16, to: u16) -> StepResult {
        let kind = match fs::symlink_metadata(self.path_of(to)) {
            Ok(_) => self.held.get(&to).map(|held| held.ends.kind),
            Err(_) => None,
        };
        match kind {
            Some(FileKind::Listener) => {
                let client = socket::open(UNIX, STREAM, 0)?;
                // By its name whoever accepts it knows it.
                socket::bind(&client, &self.address_of(slot))?;
                let file = client.as_fd();
                rustix::io::ioctl_fionbio(file, true)?;
                let connected = socket::connect(file, &self.address_of(to));
                rustix::io::ioctl_fionbio(file, false)?;
                if connected.is_ok() {
                    let kind = FileKind::Connection;
                    self.keep(slot, kind, client, Some(slot + 1), Some(slot));
                }
            }
            Some(FileKind::Named) => {
                let sender = socket::open(UNIX, DATAGRAM, 0)?;
                socket::connect(&sender, &self.address_of(to))?;
                self.keep(slot, FileKind::Sender, sender, Some(to), None);
            }
            _ => {}
        }
        Ok(())
    }

    fn accept(&mut self, slot: u16) -> StepResult {
        let listener = self.held.get(&slot);
        let Some(held) = listener.filter(|held| held.ends.kind == FileKind::Listener) else {
            return Ok(());
        };
        if !super::data::can_read(&held.file)? {
            return Ok(());
        }
        let accepted = match socket::accept(&held.file) {
            // It was shut down.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => return Ok(()),
            // So it was, and does not wait.
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            accepted => accepted?,
        };
        let peer = socket::peer_name(&accepted)?;
        let text = String::from_utf8_lossy(&peer).into_owned();
        let number = text.trim_end_matches('\0').rsplit('-').next();
        let client: u16 = number.unwrap_or_default().parse()?;
        let (out, into) = (Some(client), Some(client + 1));
        self.keep(client + 1, FileKind::Connection, accepted, out, into);
        Ok(())
    }

    fn pass(&self, slot: u16, through: u16) {
        let Some((held, mailbox)) = self.held.get(&slot).zip(self.mailbox(through)) else {
            return;
        };
        let along = Along {
            rights: &[held.file.as_fd()],
            ..Along::default()
        };
        // There may be no room, or nobody to receive it any more.
        let _ = socket::send(&mailbox.file, &held.ends.to_bytes(), along, DONT_WAIT);
    }

    fn mailbox(&self, slot: u16) -> Option<&OpenDescriptor> {
        let held = self.held.get(&slot);
        held.filter(|held| held.ends.kind == FileKind::Mailbox)
    }

    fn take(&mut self, through: u16) -> StepResult {
        while let Some(mailbox) = self.mailbox(through) {
            let mut bytes = [0; ENDS_BYTES];
            let received = match socket::receive(&mailbox.file, &mut bytes, DONT_WAIT) {
                Ok(received) => received,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                // The other end was closed with something in its queue; it is told once.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => continue,
                Err(error) => return Err(error.into()),
            };
            // Nobody is there who could send.
            if received.len == 0 {
                return Ok(());
            }
            let ends = DescriptorEnds::of_bytes(bytes).ok_or("what came is no descriptor's")?;
            let [file] = <[OwnedFd; 1]>::try_from(received.rights)
                .map_err(|rights| format!("{} descriptors came", rights.len()))?;
            self.held.insert(ends.origin, OpenDescriptor { file, ends });
        }
        Ok(())
    }

    fn notify(&self, slot: u16, through: Option<u16>) {
        let of_kind = |slot: u16, kind: FileKind| {
            let held = self.held.get(&slot)?;
            (held.ends.kind == kind).then_some(&held.file)
        };
        let Some(queue) = of_kind(slot, FileKind::Queue) else {
            return;
        };
        let through = through.and_then(|socket| of_kind(socket, FileKind::Netlink));
        // A thread that has not blocked the signal would get it.
        if through.is_none() && self.has_threads() {
            return;
        }
        opened::notify(queue, through, slot.into());
    }

    fn watch(&self, waiter: u16, slot: u16, edge: bool, once: bool) {
        let is_epoll = |held: &&OpenDescriptor| held.ends.kind == FileKind::Epoll;
        let waiter = self.held.get(&waiter).filter(is_epoll);
        let Some((waiter, held)) = waiter.zip(self.held.get(&slot)) else {
            return;
        };
        let mut flags = epoll::EventFlags::IN;
        flags.set(epoll::EventFlags::ET, edge);
        flags.set(epoll::EventFlags::ONESHOT, once);
        let data = epoll::EventData::new_u64(u64::from(slot));
        // It may be watched already, or cannot be.
        let _ = epoll::add(&waiter.file, &held.file, data, flags);
    }
}

/// 127.0.0.1 and a port: 0 for any that is free.
pub(super) fn loopback() -> [u8; 16] {
    let mut address = [0; 16];
    address[..8].copy_from_slice(&[2, 0, 0, 0, 127, 0, 0, 1]);
    address
}

fn tcp_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let listener = socket::open(INET, STREAM, 0)?;
    socket::bind(&listener, &loopback())?;
    socket::listen(&listener, BACKLOG)?;
    let client = socket::open(INET, STREAM, 0)?;
    socket::connect(&client, &socket::name(&listener)?)?;
    Ok((client, socket::accept(&listener)?))
}
