//! Who is to be told of the next message in a queue that is empty: mq_notify(3).
//!
//! The kernel tells who that is and by which signal, but not with which value, nor where a
//! library's helper thread (`SIGEV_THREAD`) waits for what: these are looked up in its memory. As
//! whoever puts a message into an empty queue would have him told, the messages are looked up there
//! as well, instead of taking them out.

use std::io::{self, ErrorKind};
use std::os::fd::{AsFd as _, BorrowedFd};

use rustix::fs::OFlags;
use rustix::io::Errno;
use rustix::process::{Pid, test_kill_process};
use sys::mqueue::{MESSAGE_MAX_BYTES, MESSAGES_MAX, Message};
use syscalls::Sysno;

use super::contents;
use crate::fd::{DescriptionId, DumpContext, Open, status};
use crate::kernel::{Kernel, Structure};
use crate::script::{Script, Width};
use crate::{Error, Result};

const SIGEV_SIGNAL: u32 = linux_raw_sys::general::SIGEV_SIGNAL;
const SIGEV_NONE: u32 = linux_raw_sys::general::SIGEV_NONE;
const SIGEV_THREAD: u32 = linux_raw_sys::general::SIGEV_THREAD;
/// The size of `struct sigevent`.
const EVENT_BYTES: usize = 64;
/// What a helper thread is sent (`NOTIFY_COOKIE_LEN`).
const COOKIE_BYTES: usize = 32;
/// The highest signal.
const SIGNAL_MAX: u32 = 64;

/// A registration of a process of the tree.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Notify {
    /// The process.
    #[prost(int32, tag = "1")]
    pub(super) pid: i32,
    /// `SIGEV_SIGNAL`, `SIGEV_NONE` or `SIGEV_THREAD`.
    #[prost(uint32, tag = "2")]
    how: u32,
    /// The signal; of `SIGEV_THREAD` the number of the netlink socket.
    #[prost(uint32, tag = "3")]
    number: u32,
    /// The value that the signal carries.
    #[prost(uint64, tag = "4")]
    value: u64,
    /// What is sent to the netlink socket.
    #[prost(bytes = "vec", tag = "5")]
    cookie: Vec<u8>,
}

/// The registration that a queue tells of: `NOTIFY`, `SIGNO` and `NOTIFY_PID`.
///
/// # Errors
/// [`Error::Kernel`].
pub(super) fn of(open: &Open<'_>) -> Result<Option<Notify>> {
    let queue = status::reopen(open.own()?, OFlags::RDONLY | OFlags::NONBLOCK)?;
    read(queue.as_fd(), &open.place())
}

/// As [`of`], of a queue that can be read.
fn read(queue: BorrowedFd<'_>, place: &str) -> Result<Option<Notify>> {
    let mut text = [0; 128];
    let len = rustix::io::pread(queue, &mut text[..], 0)
        .map_err(|errno| Error::kernel(format!("look into {place}"), errno))?;
    Ok(parse(&String::from_utf8_lossy(&text[..len])))
}

fn parse(text: &str) -> Option<Notify> {
    let field = |name: &str| {
        let word = text.split_once(name)?.1.split_whitespace().next()?;
        word.parse::<i32>().ok()
    };
    let number = |name| field(name).map_or(0, i32::cast_unsigned);
    let pid = field(" NOTIFY_PID:").filter(|pid| *pid != 0)?;
    Some(Notify {
        pid,
        how: number(" NOTIFY:"),
        number: number(" SIGNO:"),
        ..Notify::default()
    })
}

/// The first description of the same queue that the process has, which will register it again.
fn through(open: &Open<'_>, pid: i32, cx: &dyn DumpContext) -> Option<DescriptionId> {
    let has_it = |id| cx.numbers(id).iter().any(|(holder, _)| *holder == pid);
    let mut same = cx.all().of_inode(open);
    same.find(|other| has_it(other.id)).map(|found| found.id)
}

impl Notify {
    /// What an image has of it, with what the queue does not tell; nothing where another
    /// description of the queue has it.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where that cannot be found.
    pub(super) fn dump(self, open: &Open<'_>, cx: &dyn DumpContext) -> Result<Option<Self>> {
        let pid = self.pid;
        let refuse = |why: &str| {
            let why = format!("pid {pid} is to be told of its next message (mq_notify), {why}");
            open.unsupported(&why, None)
        };
        match through(open, pid, cx) {
            Some(id) if id == open.id => self.look_up(open, cx, &refuse).map(Some),
            Some(_) => Ok(None),
            None => Err(refuse("by a descriptor that is another's")),
        }
    }

    fn look_up(
        mut self,
        open: &Open<'_>,
        cx: &dyn DumpContext,
        refuse: &dyn Fn(&str) -> Error,
    ) -> Result<Self> {
        let pid = self.pid;
        if self.how == SIGEV_NONE {
            return Ok(self);
        }
        let failed = |error: io::Error| refuse(&format!("how cannot be looked up: {error}"));
        let queue = Queue::find(open).map_err(failed)?;
        if self.how == SIGEV_SIGNAL {
            if queue.is_outlived().map_err(failed)? {
                return Err(refuse("but executes another program since"));
            }
            self.value = queue.value().map_err(failed)?;
            return Ok(self);
        }
        let (socket, cookie) = queue.thread().map_err(failed)?;
        self.cookie = cookie;
        let number = queue.number_of(socket, pid, cx).map_err(failed)?;
        let number = number.ok_or_else(|| refuse("by a socket that it has not open"))?;
        self.number = number.cast_unsigned();
        Ok(self)
    }

    /// A registration of this process.
    #[cfg(test)]
    pub(super) fn of_process(pid: i32) -> Self {
        Self {
            pid,
            ..Self::default()
        }
    }

    /// Whether a dump could have written it.
    pub(super) fn is_sound(&self) -> bool {
        let cookie = self.cookie.len();
        let sound = match self.how {
            SIGEV_SIGNAL => self.number <= SIGNAL_MAX && cookie == 0,
            SIGEV_NONE => cookie == 0,
            SIGEV_THREAD => self.number <= i32::MAX.cast_unsigned() && cookie == COOKIE_BYTES,
            _ => false,
        };
        sound && self.pid > 0
    }

    /// One word for people.
    pub(super) fn describe(&self) -> String {
        let how = match self.how {
            SIGEV_SIGNAL => format!("signal {} of value {:#x}", self.number, self.value),
            SIGEV_THREAD => "a thread".to_owned(),
            _ => "nothing".to_owned(),
        };
        format!(" tells {} by {how}", self.pid)
    }

    /// Ends the registration that the process has left behind in a queue, which `queue` reads and
    /// writes, if there is one: the kernel keeps it, and registers nobody else, where another
    /// process was the last to close a descriptor table that both had.
    ///
    /// # Errors
    /// [`Error::Mismatch`] where another process has the queue open; [`Error::Kernel`].
    pub(super) fn end_left(&self, queue: BorrowedFd<'_>, place: &str) -> Result<()> {
        let left = read(queue, place)?;
        let pid = left.filter(|left| left.pid == self.pid);
        let pid = pid.and_then(|left| Pid::from_raw(left.pid));
        let has_ended = |pid: &Pid| test_kill_process(*pid) == Err(Errno::SRCH);
        match pid.filter(has_ended) {
            Some(_) => contents::pass_message(queue, place),
            None => Ok(()),
        }
    }

    /// Adds the call that registers it, for descriptor `fd` of the process.
    pub(super) fn register(&self, fd: i32, script: &mut Script) {
        let mut event = [0; EVENT_BYTES];
        event[0..8].copy_from_slice(&self.value.to_le_bytes());
        event[8..12].copy_from_slice(&self.number.to_le_bytes());
        event[12..16].copy_from_slice(&self.how.to_le_bytes());
        let event = script.bytes(&event);
        if self.how == SIGEV_THREAD {
            let cookie = script.bytes(&self.cookie);
            script.fix(event, 0, cookie, Width::Eight);
        }
        script.call(Sysno::mq_notify, [fd.into(), event.into()]);
    }
}

/// A queue as the kernel has it.
pub(super) struct Queue {
    kernel: &'static Kernel,
    info: Structure<'static>,
}

impl Queue {
    /// The queue behind `open`.
    ///
    /// # Errors
    /// `Unsupported`, with the reason, where the kernel may not be looked into or calls something
    /// by another name.
    pub(super) fn find(open: &Open<'_>) -> io::Result<Self> {
        let why = |why: &str| io::Error::new(ErrorKind::Unsupported, why.to_owned());
        let kernel = Kernel::get().map_err(why)?;
        let own = open.own().map_err(|error| why(&error.to_string()))?;
        let inode = kernel.read("file", kernel.file(own)?)?.word("f_inode")?;
        let at = kernel.around("mqueue_inode_info", "vfs_inode", inode)?;
        let info = kernel.read("mqueue_inode_info", at)?;
        Ok(Self { kernel, info })
    }

    fn value(&self) -> io::Result<u64> {
        self.kernel.word(self.info.address("notify")?)
    }

    /// Whether who is to have a signal has executed another program since, so that none comes.
    fn is_outlived(&self) -> io::Result<bool> {
        /// `PIDTYPE_TGID`.
        const KIND: u64 = 1;
        /// The sizes of a `struct hlist_head` and of a `struct hlist_node`.
        const HEAD: u64 = 8;
        const LINK: u64 = 16;
        let pid = self.kernel.read("pid", self.info.word("notify_owner")?)?;
        let first = self.kernel.word(pid.address("tasks")? + KIND * HEAD)?;
        let links = first.wrapping_sub(KIND * LINK);
        let task = self.kernel.around("task_struct", "pid_links", links)?;
        let now = self
            .kernel
            .read("task_struct", task)?
            .half("self_exec_id")?;
        Ok(now != self.info.half("notify_self_exec_id")?)
    }

    /// The `struct sock` that is told, and what it is sent.
    fn thread(&self) -> io::Result<(u64, Vec<u8>)> {
        let cookie = self
            .kernel
            .read("sk_buff", self.info.word("notify_cookie")?)?;
        let cookie = self.kernel.bytes(cookie.word("data")?, COOKIE_BYTES)?;
        Ok((self.info.word("notify_sock")?, cookie))
    }

    /// The number that a socket has in a process.
    fn number_of(&self, socket: u64, pid: i32, cx: &dyn DumpContext) -> io::Result<Option<i32>> {
        let sockets = cx.all().iter();
        let sockets = sockets.filter(|open| open.link.starts_with(b"socket:["));
        for open in sockets {
            let numbers = cx.numbers(open.id);
            let Some((_, number)) = numbers.into_iter().find(|(holder, _)| *holder == pid) else {
                continue;
            };
            let own = open
                .own()
                .map_err(|error| io::Error::other(error.to_string()))?;
            let file = self.kernel.private(self.kernel.file(own)?)?;
            if self.kernel.read("socket", file)?.word("sk")? == socket {
                return Ok(Some(number));
            }
        }
        Ok(None)
    }

    /// All messages, in the order in which they will be received. Nobody may receive or send any
    /// meanwhile.
    ///
    /// # Errors
    /// As [`Queue::find`].
    pub(super) fn messages(&self) -> io::Result<Vec<Message>> {
        /// More than a tree of all priorities is high.
        const HIGHEST: usize = 64;
        let kernel = self.kernel;
        let (mut messages, mut above) = (Vec::new(), Vec::new());
        let mut at = kernel.word(self.info.address("msg_tree")?)?;
        loop {
            while at != 0 && above.len() < HIGHEST {
                above.push(at);
                at = kernel.read("rb_node", at)?.word("rb_right")?;
            }
            let Some(node) = above.pop() else {
                return Ok(messages);
            };
            let leaf = kernel.around("posix_msg_tree_node", "rb_node", node)?;
            self.of_priority(leaf, &mut messages)?;
            at = kernel.read("rb_node", node)?.word("rb_left")?;
        }
    }

    /// Adds the messages of one priority.
    fn of_priority(&self, leaf: u64, messages: &mut Vec<Message>) -> io::Result<()> {
        let leaf = self.kernel.read("posix_msg_tree_node", leaf)?;
        let (priority, head) = (leaf.half("priority")?, leaf.address("msg_list")?);
        let mut link = self.kernel.word(head)?;
        while link != head {
            let message = self.kernel.around("msg_msg", "m_list", link)?;
            let bytes = self.contents(message)?;
            messages.push(Message { priority, bytes });
            if messages.len() as u64 > MESSAGES_MAX {
                return Err(io::Error::new(ErrorKind::InvalidData, "too many messages"));
            }
            link = self.kernel.word(link)?;
        }
        Ok(())
    }

    /// What a message says: it stands behind its head, and where that does not fit into a page,
    /// behind those of further pieces.
    fn contents(&self, message: u64) -> io::Result<Vec<u8>> {
        const PIECE_BYTES: u64 = 4096;
        let kernel = self.kernel;
        let head = kernel.read("msg_msg", message)?;
        let (mut left, mut next) = (head.word("m_ts")?, head.word("next")?);
        if left > MESSAGE_MAX_BYTES {
            return Err(io::Error::new(ErrorKind::InvalidData, "a message too long"));
        }
        let (mut at, mut head_bytes) = (message, head.size());
        let mut bytes = Vec::new();
        loop {
            let here = left.min(PIECE_BYTES - head_bytes);
            bytes.extend(kernel.bytes(at + head_bytes, usize::try_from(here).expect("a page"))?);
            left -= here;
            if left == 0 {
                return Ok(bytes);
            }
            let piece = kernel.read("msg_msgseg", next)?;
            (at, head_bytes, next) = (next, piece.size(), piece.word("next")?);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_tells_whom_it_tells() {
        let line = |signal, pid| {
            format!("QSIZE:0          NOTIFY:0     SIGNO:{signal:<5} NOTIFY_PID:{pid:<6}\n")
        };
        let told = parse(&line(34, 4711)).expect("there is one");
        assert_eq!((told.pid, told.how, told.number), (4711, SIGEV_SIGNAL, 34));
        assert!(told.is_sound());
        assert_eq!(parse(&line(0, 0)), None);
    }

    #[test]
    fn nonsense_is_known_as_such() {
        let sound = Notify {
            pid: 7,
            how: SIGEV_THREAD,
            number: 3,
            value: 0,
            cookie: vec![1; COOKIE_BYTES],
        };
        assert!(sound.is_sound());
        let how = |how| Notify {
            how,
            ..sound.clone()
        };
        let short = Notify {
            cookie: vec![1],
            ..sound.clone()
        };
        let nobody = Notify {
            pid: 0,
            ..sound.clone()
        };
        let signal = Notify {
            how: SIGEV_SIGNAL,
            number: SIGNAL_MAX + 1,
            cookie: Vec::new(),
            ..sound.clone()
        };
        for wrong in [
            how(SIGEV_SIGNAL),
            how(SIGEV_NONE),
            how(4),
            short,
            nobody,
            signal,
        ] {
            assert!(!wrong.is_sound(), "{wrong:?}");
        }
    }
}
