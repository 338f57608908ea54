//! Steps that open descriptors of every kind, share and pass them, and get them into some state.
use resources::fd::socket::Nature;
use resources::fd::socket::ledger::samples::FRESH;

use super::Generator;
use crate::storm::step::{Action, FileKind, LockHolder, SHARES, SLOTS, Setting, TaskFile};

/// What a task knows of a descriptor.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct End {
    pub kind: FileKind,
    /// The name that it was opened under.
    pub origin: u16,
    /// The other end, for what has two.
    pub other: u16,
    /// The task that opened it.
    pub opener: u8,
    /// The kind of socket, if it is one.
    pub nature: Option<Nature>,
}

/// The kind of the sockets that a kind of descriptors leads to.
fn nature(kind: FileKind) -> Option<Nature> {
    use FileKind::*;
    let (family, kind, protocol) = match kind {
        Streams | Mailbox | Listener | Connection => (1, 1, 0),
        Datagrams | Named | Sender => (1, 2, 0),
        Packets => (1, 5, 0),
        Tcp => (2, 1, 6),
        Udp => (2, 2, 17),
        UdpLite => (2, 2, 136),
        Frames => (17, 2, 0),
        Netlink => (16, 3, 0),
        _ => return None,
    };
    Some(Nature {
        family,
        kind,
        protocol,
    })
}

/// How much is written at once: around a page, a pipe's room, a socket's.
const AMOUNTS: [u32; 12] = [
    1, 8, 100, 4095, 4096, 4097, 10_000, 65_535, 65_536, 70_000, 200_000, 9,
];
/// Signals that nothing else uses: SIGUSR1, SIGUSR2, real-time ones.
const SIGNALS: [u8; 5] = [10, 12, 35, 40, 64];
/// Options of sockets that are numbers: SO_BROADCAST, SNDBUF, RCVBUF, KEEPALIVE, OOBINLINE,
/// PRIORITY, PASSCRED, RCVLOWAT, TIMESTAMP, MARK, PEEK_OFF; and of IP and TCP.
const OPTIONS: [(u8, u8); 15] = [
    (1, 6),
    (1, 7),
    (1, 8),
    (1, 9),
    (1, 10),
    (1, 12),
    (1, 16),
    (1, 18),
    (1, 29),
    (1, 36),
    (1, 42),
    (0, 1),
    (0, 2),
    (6, 1),
    (6, 4),
];

/// SO_RCVBUF.
const RECEIVE_ROOM: (u8, u8) = (1, 8);

impl Generator {
    pub(super) fn change_descriptors(&mut self, task: u8) {
        let held: Vec<(u16, End)> = self.known(task).held.clone().into_iter().collect();
        if held.is_empty() || self.chance.below(100) < 30 {
            return self.open(task);
        }
        self.use_one(task, &held);
    }

    /// Does something with something that the task has, if anything.
    pub(super) fn use_descriptor(&mut self, task: u8) {
        let held: Vec<(u16, End)> = self.known(task).held.clone().into_iter().collect();
        if !held.is_empty() {
            self.use_one(task, &held);
        }
    }

    fn use_one(&mut self, task: u8, held: &[(u16, End)]) {
        let (slot, end) = self.chance.pick(held);
        match self.chance.below(78) {
            0..18 => {
                let bytes = self.chance.pick(&AMOUNTS);
                self.step(task, Action::Send { slot, bytes });
                self.hear(task, end, held);
            }
            18..26 => self.step(task, Action::Receive { slot }),
            26..32 => {
                if let Some(to) = self.new_slots(1) {
                    let least = self.chance.pick(&[0, 3, 50, 700]);
                    self.known(task).held.insert(to, end);
                    self.step(task, Action::Duplicate { slot, to, least });
                }
            }
            32..40 => {
                self.known(task).held.remove(&slot);
                self.step(task, Action::Close { slot });
            }
            40..47 => self.pass_or_take(task, slot, end, held),
            47..53 => self.watch(task, slot, held),
            53..56 => self.lock(task, slot),
            56..64 => self.set(task, slot, end),
            64..67 => self.connect_or_accept(task, slot, end),
            67 => self.step(task, Action::Delete { slot }),
            70..74 => self.open_task(task),
            74..78 => self.notify(task, held),
            _ => {
                let (signal, value) = (self.chance.pick(&SIGNALS), self.chance.below(1000));
                let thread = self.chance.once_in(2);
                let signal = Action::Signal {
                    signal,
                    value,
                    thread,
                };
                self.step(task, signal);
            }
        }
    }

    /// Wants to be told of a message in a queue that the task has, if it has one.
    fn notify(&mut self, task: u8, held: &[(u16, End)]) {
        let of = |kind| held.iter().filter(move |(_, end)| end.kind == kind);
        let queues: Vec<u16> = of(FileKind::Queue).map(|(slot, _)| *slot).collect();
        let sockets: Vec<u16> = of(FileKind::Netlink).map(|(slot, _)| *slot).collect();
        if queues.is_empty() {
            return self.open(task);
        }
        let through = match sockets.is_empty() || self.chance.once_in(2) {
            true => None,
            false => Some(self.chance.pick(&sockets)),
        };
        let slot = self.chance.pick(&queues);
        self.step(task, Action::Notify { slot, through });
    }

    /// Takes what a queue has told after something was sent to it: unread, it is refused.
    fn hear(&mut self, task: u8, end: End, held: &[(u16, End)]) {
        for (slot, other) in held {
            if end.kind == FileKind::Queue && other.kind == FileKind::Netlink {
                self.step(task, Action::Receive { slot: *slot });
            }
        }
    }

    /// Names that were not given yet, one after the other.
    pub(super) fn new_slots(&mut self, count: u16) -> Option<u16> {
        let first = self.next_slot;
        (first + count < SLOTS).then(|| {
            self.next_slot += count;
            first
        })
    }

    fn open(&mut self, task: u8) {
        let kind = self.chance.pick(&FileKind::ALL);
        if kind == FileKind::Tcp && !self.has_tcp {
            return;
        }
        if kind == FileKind::Socket {
            let fresh = self.chance.pick(FRESH);
            return self.open_changed(task, fresh.nature);
        }
        if kind == FileKind::Made {
            return self.make_any(task);
        }
        if matches!(
            kind,
            FileKind::Connection | FileKind::Sender | FileKind::OfTask
        ) {
            return;
        }
        // Memory that is registered is one task's: none may be forked after it.
        if kind == FileKind::FullRing && self.tasks.len() < self.tasks_wanted {
            return;
        }
        self.open_kind(task, kind);
    }

    /// Opens something of one kind.
    pub(super) fn open_kind(&mut self, task: u8, kind: FileKind) {
        let Some(slot) = self.new_slots(2) else {
            return;
        };
        let origins = if kind.has_two_ends() {
            &[0, 1][..]
        } else {
            &[0]
        };
        for &at in origins {
            let end = End {
                kind,
                origin: slot + at,
                other: slot + 1 - at,
                opener: task,
                nature: nature(kind),
            };
            self.known(task).held.insert(slot + at, end);
        }
        self.step(task, Action::Open { slot, kind });
        if self.chance.once_in(2) {
            let end = slot + self.chance.below(origins.len() as u64) as u16;
            let bytes = self.chance.pick(&AMOUNTS);
            self.step(task, Action::Send { slot: end, bytes });
        }
    }

    /// Opens something of any task, also of one that has ended.
    fn open_task(&mut self, task: u8) {
        let of = self.chance.below(self.tasks.len() as u64) as u8;
        let what = self.chance.pick(&[
            TaskFile::Process,
            TaskFile::Process,
            TaskFile::Status,
            TaskFile::Threads,
            TaskFile::Place,
        ]);
        self.open_task_file(task, of, what);
    }

    pub(super) fn open_task_file(&mut self, task: u8, of: u8, what: TaskFile) {
        let Some(slot) = self.new_slots(1) else {
            return;
        };
        let end = End {
            kind: FileKind::OfTask,
            origin: slot,
            other: slot,
            opener: task,
            nature: None,
        };
        self.known(task).held.insert(slot, end);
        self.step(task, Action::OpenTask { slot, of, what });
    }

    /// Passes `slot` through a mailbox of the task's, or takes what lies in one.
    fn pass_or_take(&mut self, task: u8, slot: u16, end: End, held: &[(u16, End)]) {
        let mailboxes: Vec<(u16, End)> = held
            .iter()
            .filter(|(_, end)| end.kind == FileKind::Mailbox)
            .copied()
            .collect();
        if mailboxes.is_empty() {
            return;
        }
        let (through, mailbox) = self.chance.pick(&mailboxes);
        if self.chance.once_in(3) {
            for end in self.mail.remove(&mailbox.origin).unwrap_or_default() {
                self.known(task).held.insert(end.origin, end);
            }
            return self.step(task, Action::Take { through });
        }
        // A connection or a map that is in flight is refused, and so is what is about a task; the
        // kernel refuses to pass rings. It throws mailboxes away that are only in each other, as
        // soon as anybody closes a unix socket.
        let stays = [
            FileKind::Tcp,
            FileKind::OfTask,
            FileKind::Ring,
            FileKind::FullRing,
            FileKind::Map,
            FileKind::Counter,
        ];
        // The tree's time namespace is a new one after a restore, which its tasks open.
        let is_time = end.kind == FileKind::Namespace && FileKind::namespace(end.origin) == "time";
        let flies = !stays.contains(&end.kind) && !is_time;
        if flies && !self.is_in(mailbox.other, end.origin) {
            self.mail.entry(mailbox.other).or_default().push(end);
            self.step(task, Action::Pass { slot, through });
        }
    }

    /// Tells whether the mailbox `inner` is `outer`, or lies in it or in one that does.
    fn is_in(&self, inner: u16, outer: u16) -> bool {
        let mut lying = self.mail.get(&outer).into_iter().flatten();
        inner == outer || lying.any(|end| self.is_in(inner, end.origin))
    }

    fn watch(&mut self, task: u8, slot: u16, held: &[(u16, End)]) {
        let epolls = held.iter().filter(|(_, end)| end.kind == FileKind::Epoll);
        let epolls = epolls.map(|(name, _)| *name).collect::<Vec<_>>();
        if !epolls.is_empty() {
            let epoll = self.chance.pick(&epolls);
            let (edge, once) = (self.chance.once_in(2), self.chance.once_in(4));
            let watch = Action::Watch {
                epoll,
                slot,
                edge,
                once,
            };
            self.step(task, watch);
        }
    }

    fn lock(&mut self, task: u8, slot: u16) {
        let mut holder = self
            .chance
            .pick(&[LockHolder::Process, LockHolder::Description]);
        // Of those who share a table, the first one has it afterwards (docs/limits.md).
        if self.known(task).shares & SHARES[0] != 0 {
            holder = LockHolder::Description;
        }
        let lock = Action::LockFile {
            slot,
            holder,
            write: self.chance.once_in(2),
            start: self.chance.below(100) as u16,
            bytes: self.chance.below(50) as u16,
        };
        self.step(task, lock);
    }

    fn set(&mut self, task: u8, slot: u16, end: End) {
        if let Some(nature) = end.nature
            && self.chance.once_in(2)
        {
            let has_data = end.kind != FileKind::Socket;
            return self.change_any(task, slot, nature, has_data);
        }
        let on = self.chance.once_in(2);
        let what = match self.chance.below(12) {
            0 => Setting::Nonblocking(on),
            1 => Setting::CloseOnExec(on),
            2 => Setting::Append(on),
            3 => Setting::PipeBytes(self.chance.pick(&[4096, 8192, 65_536, 262_144, 1 << 20])),
            4 => Setting::Position(self.chance.below(70_000) as u16),
            5 => Setting::Length(self.chance.pick(&[0, 1, 4096, 4097, 60_000])),
            6 => Setting::Seals(self.chance.below(32) as u8),
            7 if self.has_owners => Setting::Owner {
                kind: 1,
                signal: self.chance.pick(&[0, 10, 40]),
            },
            8 => Setting::Shutdown(self.chance.below(3) as u8),
            _ => {
                let (level, name) = self.chance.pick(&OPTIONS);
                let value = self.chance.pick(&[0, 1, 5, 7, 100, 20_000]);
                // What has no room with its receiver is lost, and nobody is told.
                let is_udp = [FileKind::Udp, FileKind::UdpLite].contains(&end.kind);
                if is_udp && (level, name) == RECEIVE_ROOM {
                    return;
                }
                Setting::Option { level, name, value }
            }
        };
        self.step(task, Action::Set { slot, what });
    }

    fn connect_or_accept(&mut self, task: u8, slot: u16, end: End) {
        match end.kind {
            FileKind::Listener if self.chance.once_in(2) => {
                self.step(task, Action::Accept { slot })
            }
            // A socket that sends to one with a name is told of another maker of that.
            FileKind::Listener => {
                let Some(new) = self.new_slots(2) else {
                    return;
                };
                let sender = end.kind == FileKind::Named;
                let kind = if sender {
                    FileKind::Sender
                } else {
                    FileKind::Connection
                };
                let end = End {
                    kind,
                    nature: nature(kind),
                    origin: new,
                    other: new + 1,
                    opener: task,
                };
                self.known(task).held.insert(new, end);
                let to = slot;
                self.step(task, Action::Connect { slot: new, to });
            }
            _ => {}
        }
    }

    /// Has everything read that is there, by whoever can.
    pub(super) fn receive_all(&mut self) {
        for task in 0..self.tasks.len() as u8 {
            if !self.known(task).is_alive {
                continue;
            }
            let held: Vec<(u16, End)> = self.known(task).held.clone().into_iter().collect();
            for (slot, end) in held {
                match end.kind {
                    FileKind::Mailbox => self.step(task, Action::Take { through: slot }),
                    FileKind::Listener => self.step(task, Action::Accept { slot }),
                    _ => self.step(task, Action::Receive { slot }),
                }
            }
        }
    }
}
