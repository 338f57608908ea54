//! What descriptors lead to.
use serde::{Deserialize, Serialize};

/// What can be opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[repr(u8)]
pub enum FileKind {
    /// A pipe; the first end reads.
    Pipe,
    /// A pipe that keeps what is written apart.
    PacketPipe,
    /// A FIFO with a path, one end that reads and writes.
    Fifo,
    /// Unix streams.
    Streams,
    /// Unix datagram sockets.
    Datagrams,
    /// Unix sockets that keep messages apart and in order.
    Packets,
    /// Unix streams to send descriptors through.
    Mailbox,
    /// A unix stream socket with a path that listens.
    Listener,
    /// One end of a connection to such a one.
    Connection,
    /// A unix datagram socket with a path.
    Named,
    /// One that sends to such a one.
    Sender,
    /// A TCP connection.
    Tcp,
    /// Two UDP sockets that send to each other.
    Udp,
    /// An eventfd.
    Event,
    /// A timerfd that runs for hours.
    Timer,
    /// A signalfd.
    Signals,
    /// An epoll.
    Epoll,
    /// An inotify that watches a directory.
    Inotify,
    /// A memfd that can be sealed.
    Memfd,
    /// A file with a name.
    File,
    /// A pseudo terminal, its own end first.
    Terminal,
    /// A process, or what /proc has of it; see [`TaskFile`].
    OfTask,
    /// A ring of io_uring(7) that nobody has mapped, with completions that nobody has seen.
    Ring,
    /// The same with files and memory that are registered.
    FullRing,
    /// Two sockets of UDP-Lite that send to each other.
    UdpLite,
    /// A POSIX message queue.
    Queue,
    /// A fanotify group with a mark on a directory.
    Group,
    /// A packet socket on the loopback.
    Frames,
    /// A tap device.
    Tap,
    /// A file with a lease for reading.
    Leased,
    /// A netlink socket, which may be told of messages in a queue.
    Netlink,
    /// One of the task's own namespaces.
    Namespace,
    /// Another namespace that is mounted at a path.
    Mounted,
    /// A map of BPF: a hash.
    Map,
    /// A performance event: page faults of the first processor.
    Counter,
    /// A socket as socket(2) makes it, of any kind that the ledger of socket options knows.
    Socket,
    /// A descriptor in a state of which the ledger's samples know.
    Made,
}

impl FileKind {
    /// All of them, in the order of their numbers.
    pub const ALL: [Self; 37] = [
        Self::Pipe,
        Self::PacketPipe,
        Self::Fifo,
        Self::Streams,
        Self::Datagrams,
        Self::Packets,
        Self::Mailbox,
        Self::Listener,
        Self::Connection,
        Self::Named,
        Self::Sender,
        Self::Tcp,
        Self::Udp,
        Self::Event,
        Self::Timer,
        Self::Signals,
        Self::Epoll,
        Self::Inotify,
        Self::Memfd,
        Self::File,
        Self::Terminal,
        Self::OfTask,
        Self::Ring,
        Self::FullRing,
        Self::UdpLite,
        Self::Queue,
        Self::Group,
        Self::Frames,
        Self::Tap,
        Self::Leased,
        Self::Netlink,
        Self::Namespace,
        Self::Mounted,
        Self::Map,
        Self::Counter,
        Self::Socket,
        Self::Made,
    ];

    /// The kinds of namespaces, of which each name of a descriptor has one.
    pub const NAMESPACES: [&str; 8] = ["cgroup", "ipc", "mnt", "net", "pid", "user", "uts", "time"];

    /// The kind of the namespace that is opened under a name.
    pub fn namespace(slot: u16) -> &'static str {
        Self::NAMESPACES[usize::from(slot) % Self::NAMESPACES.len()]
    }

    /// Tells whether it has two ends.
    pub fn has_two_ends(self) -> bool {
        use FileKind::*;
        let two = [
            Pipe, PacketPipe, Streams, Datagrams, Packets, Mailbox, Tcp, Udp, Terminal, UdpLite,
        ];
        two.contains(&self)
    }

    /// Tells whether its inode is that of all descriptors without one of their own, or of a
    /// namespace: who locks that is in the way of everybody on the machine.
    pub fn shares_inode(self) -> bool {
        use FileKind::*;
        let shared = [
            Event, Timer, Signals, Epoll, Inotify, Group, Namespace, Map, Counter, Made,
        ];
        shared.contains(&self)
    }

    /// Tells whether it is a socket.
    pub fn is_socket(self) -> bool {
        (Self::Streams..=Self::Udp).contains(&self)
            || [Self::UdpLite, Self::Frames, Self::Netlink, Self::Socket].contains(&self)
    }

    /// Tells whether what is written is read in the same pieces.
    pub fn keeps_messages(self) -> bool {
        use FileKind::*;
        let keep = [
            PacketPipe, Datagrams, Packets, Named, Sender, Udp, UdpLite, Queue,
        ];
        keep.contains(&self)
    }
}
