//! The numbers of the kinds of open file descriptions in images: 100 to 199, never reused.

/// [`super::regular`].
pub const REGULAR: u16 = 100;
/// [`super::directory`].
pub const DIRECTORY: u16 = 101;
/// [`super::path`].
pub const PATH: u16 = 102;
/// [`super::chardev`].
pub const CHARDEV: u16 = 103;
/// [`super::pipe`].
pub const PIPE: u16 = 104;
/// [`super::fifo`].
pub const FIFO: u16 = 105;
/// [`super::eventfd`].
pub const EVENTFD: u16 = 106;
/// [`super::timerfd`].
pub const TIMERFD: u16 = 107;
/// [`super::signalfd`].
pub const SIGNALFD: u16 = 108;
/// [`super::epoll`].
pub const EPOLL: u16 = 109;
/// [`super::memfd`].
pub const MEMFD: u16 = 110;
/// [`super::shmem`].
pub const SHMEM: u16 = 111;
/// [`super::inotify`].
pub const INOTIFY: u16 = 112;
/// [`super::segment`].
pub const SYSTEM_V: u16 = 113;
/// [`super::pidfd`].
pub const PIDFD: u16 = 114;
/// [`super::process_file`].
pub const PROCESS_FILE: u16 = 115;
/// [`super::io_uring`].
pub const IO_URING: u16 = 116;
/// [`super::mqueue`].
pub const MESSAGE_QUEUE: u16 = 117;
/// [`super::fanotify`].
pub const FANOTIFY: u16 = 118;
/// [`super::tun`].
pub const TUN: u16 = 119;
/// [`super::namespace`].
pub const NAMESPACE: u16 = 120;
/// [`super::userfaultfd`].
pub const USERFAULTFD: u16 = 121;
/// [`super::bpf_map`].
pub const BPF_MAP: u16 = 122;
/// [`super::block_device`].
pub const BLOCK_DEVICE: u16 = 123;
/// [`super::perf_event`].
pub const PERF_EVENT: u16 = 124;
/// [`super::attributes`]: by description.
pub const ATTRIBUTES: u16 = 147;
/// [`super::locks`]: by task.
pub const LOCKS: u16 = 148;
/// [`super::unix`].
pub const UNIX: u16 = 150;
/// [`super::tcp`].
pub const TCP: u16 = 151;
/// [`super::tty`].
pub const TTY: u16 = 153;
/// [`super::udp`].
pub const UDP: u16 = 152;
/// [`super::netlink`].
pub const NETLINK: u16 = 154;
/// [`super::raw_socket`].
pub const RAW: u16 = 155;
/// [`super::packet_socket`].
pub const PACKET: u16 = 156;
/// [`super::vsock`].
pub const VSOCK: u16 = 157;
