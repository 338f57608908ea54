//! The messages in a queue: they can only be looked at by taking them out and sending them again,
//! so nobody else may be there meanwhile.

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use rustix::fs::{MemfdFlags, OFlags};
use sys::fanotify;
use sys::mqueue::{self, Attributes, Message};
use sys::watchdog::apart;

use super::notify::Queue;
use crate::fd::{DumpContext, Open, RestoreContext, status};
use crate::{Error, Result};

/// Contents up to this size stand in the record itself.
const INLINE_BYTES: usize = 4096;
/// Before each message: its priority and its length, 32 bits each.
const HEADER_BYTES: usize = 8;
const EIO: i32 = rustix::io::Errno::IO.raw_os_error();
/// How long a message is tried to be put back that there is no memory for.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is in a queue.
#[derive(Clone, PartialEq, prost::Message)]
pub(super) struct Contents {
    /// How many messages.
    #[prost(uint64, tag = "1")]
    pub(super) messages: u64,
    /// All of them in the order in which they will be received, each behind its priority and its
    /// length; empty where they have a space.
    #[prost(bytes = "vec", tag = "2")]
    inline: Vec<u8>,
    /// The length of that in a space.
    #[prost(uint64, tag = "3")]
    stored_bytes: u64,
    /// The space.
    #[prost(uint32, optional, tag = "4")]
    space: Option<u32>,
}

impl Contents {
    /// Describes the messages in the queue behind `open`, which holds what `now` says; `tells`:
    /// whether a task is to be told of the next one, and would be if they were taken out.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where somebody would see that they are taken out.
    pub(super) fn dump(
        open: &Open<'_>,
        (now, tells): (Attributes, bool),
        cx: &mut dyn DumpContext,
    ) -> Result<Self> {
        let flags = OFlags::RDWR | OFlags::NONBLOCK;
        let both = status::reopen(open.own()?, flags)?;
        let mut contents = Self::default();
        if now.messages == 0 {
            return Ok(contents);
        }
        let in_tree = |pid| cx.task(pid).is_some();
        let messages = match tells {
            false => peek(both.as_fd(), now, &open.place(), in_tree),
            true => look_up(both.as_fd(), open, in_tree),
        };
        let messages = messages.map_err(|error| match error {
            Error::Mismatch { what } => open.unsupported(&what, None),
            error => error,
        })?;
        contents.messages = messages.len() as u64;
        let bytes = encode(&messages);
        if bytes.len() <= INLINE_BYTES {
            contents.inline = bytes;
            return Ok(contents);
        }
        contents.stored_bytes = bytes.len() as u64;
        contents.space = Some(cx.store(memory_with(&bytes)?, contents.stored_bytes)?);
        Ok(contents)
    }

    /// The messages again.
    ///
    /// # Errors
    /// [`Error::Corrupt`] for such as do not fit into a queue with this room.
    pub(super) fn load(
        &self,
        room: Attributes,
        cx: &mut dyn RestoreContext,
    ) -> Result<Vec<Message>> {
        let corrupt = || Error::corrupt("message queue", "its messages make no sense");
        let bytes = match self.space {
            None => self.inline.clone(),
            Some(space) => {
                let file = File::from(memory_with(&[])?);
                cx.load(space, file.as_fd())?;
                let failed = |error| Error::kernel("read stored messages", error);
                let there = file.metadata().map_err(failed)?.len();
                // Only what is there is worth memory.
                if there != self.stored_bytes.next_multiple_of(4096) {
                    return Err(corrupt());
                }
                let mut bytes = vec![0; usize::try_from(self.stored_bytes).expect("it is there")];
                file.read_exact_at(&mut bytes, 0).map_err(failed)?;
                bytes
            }
        };
        let messages = parse(&bytes).ok_or_else(corrupt)?;
        let fits = |message: &Message| {
            message.priority <= mqueue::PRIORITY_MAX
                && message.bytes.len() as u64 <= room.message_bytes
        };
        let count = messages.len() as u64;
        if count != self.messages || count > room.max_messages || !messages.iter().all(fits) {
            return Err(corrupt());
        }
        Ok(messages)
    }
}

/// A file in memory with these bytes.
fn memory_with(bytes: &[u8]) -> Result<OwnedFd> {
    let failed = |error: io::Error| Error::kernel("make room for messages", error);
    let made = rustix::fs::memfd_create("messages", MemfdFlags::CLOEXEC);
    let file = File::from(made.map_err(|errno| failed(errno.into()))?);
    file.write_all_at(bytes, 0).map_err(failed)?;
    Ok(file.into())
}

fn encode(messages: &[Message]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for message in messages {
        let len = u32::try_from(message.bytes.len()).expect("16 MiB at most");
        bytes.extend(message.priority.to_le_bytes());
        bytes.extend(len.to_le_bytes());
        bytes.extend(&message.bytes);
    }
    bytes
}

fn parse(mut bytes: &[u8]) -> Option<Vec<Message>> {
    let mut messages = Vec::new();
    while !bytes.is_empty() {
        let (header, rest) = bytes.split_at_checked(HEADER_BYTES)?;
        let (priority, len) = header.split_at(HEADER_BYTES / 2);
        let word = |bytes: &[u8]| Some(u32::from_le_bytes(bytes.try_into().ok()?));
        let (message, rest) = rest.split_at_checked(word(len)? as usize)?;
        messages.push(Message {
            priority: word(priority)?,
            bytes: message.to_vec(),
        });
        bytes = rest;
    }
    Some(messages)
}

/// Looks at the messages in a queue; `queue` reads and writes and does not wait. Who wants to open
/// it waits until they are back. A process of its own does it, which ends what it has begun.
///
/// # Errors
/// [`Error::Mismatch`] where a process has it open for which `in_tree` does not hold.
pub(super) fn peek(
    queue: BorrowedFd<'_>,
    now: Attributes,
    place: &str,
    in_tree: impl Fn(i32) -> bool,
) -> Result<Vec<Message>> {
    let rule = Exclusion {
        in_tree,
        refused: seen_to_vanish,
    };
    rule.work(queue, place, || take_and_put_back(queue, now))
}

/// Has a message come into a queue that is empty for a moment, so that whoever was to be told of it
/// is not registered any more. Messages that are there stay.
///
/// # Errors
/// As [`peek`], with no process in the tree.
pub(super) fn pass_message(queue: BorrowedFd<'_>, place: &str) -> Result<()> {
    let failed = |error| Error::kernel(format!("ask {place}"), error);
    let now = mqueue::attributes(queue).map_err(failed)?;
    let rule = Exclusion {
        in_tree: |_| false,
        refused: left_registered,
    };
    let passed = rule.work(queue, place, || {
        let messages = take_and_put_back(queue, now)?;
        if messages.is_empty() {
            let message = Message {
                priority: 0,
                bytes: Vec::new(),
            };
            mqueue::send(queue, &message)?;
            mqueue::receive(queue, &mut room_for(now))?;
        }
        Ok(messages)
    });
    passed.map(drop)
}

/// The rule that no process has a queue open but tasks of the tree, for which `in_tree` holds, and
/// stillframe's own.
struct Exclusion<F> {
    in_tree: F,
    /// The refusal, given the pid and the name of another process that has it open.
    refused: fn(i32, &str) -> String,
}

fn seen_to_vanish(pid: i32, name: &str) -> String {
    format!(
        "its messages can only be looked at by taking them out, and pid {pid} ({name}), which is \
         not in the tree, has it open"
    )
}

fn left_registered(pid: i32, name: &str) -> String {
    format!(
        "a process that has ended is still to be told of its next message (mq_notify), and pid \
         {pid} ({name}), which is not in the tree, has it open"
    )
}

impl<F: Fn(i32) -> bool> Exclusion<F> {
    /// Has a process of its own look at a queue by `work`, which nobody can open meanwhile.
    fn work(
        self,
        queue: BorrowedFd<'_>,
        place: &str,
        work: impl FnOnce() -> io::Result<Vec<Message>>,
    ) -> Result<Vec<Message>> {
        let doing = || format!("look at the messages in {place}");
        let failed = |error: io::Error| Error::kernel(doing(), error);
        let guard = guard(queue).map_err(failed)?;
        self.check(queue).map_err(failed)??;
        let result = apart(|| match work() {
            Ok(messages) => encode(&messages),
            // Too short for a message.
            Err(error) => error.raw_os_error().unwrap_or(EIO).to_le_bytes().to_vec(),
        });
        drop(guard);
        let bytes = result.map_err(failed)?;
        if let Ok(errno) = <[u8; 4]>::try_from(bytes.as_slice()) {
            let errno = i32::from_le_bytes(errno);
            return Err(failed(io::Error::from_raw_os_error(errno)));
        }
        Ok(parse(&bytes).expect("it was encoded just now"))
    }

    fn check(self, queue: BorrowedFd<'_>) -> io::Result<Result<()>> {
        let Some(pid) = others(queue, self.in_tree)? else {
            return Ok(Ok(()));
        };
        let name = sys::procfs::read_text(format_args!("{pid}/comm")).unwrap_or_default();
        let name = name.trim_end().escape_debug().to_string();
        let what = (self.refused)(pid, &name);
        Ok(Err(Error::Mismatch { what }))
    }
}

/// As [`peek`], without taking any out.
///
/// # Errors
/// As [`peek`], and [`Error::Unsupported`] where the kernel's memory does not tell.
fn look_up(
    queue: BorrowedFd<'_>,
    open: &Open<'_>,
    in_tree: impl Fn(i32) -> bool,
) -> Result<Vec<Message>> {
    let failed = |error: io::Error| {
        let doing = format!("look at the messages in {}", open.place());
        Error::kernel(doing, error)
    };
    let _guard = guard(queue).map_err(failed)?;
    let rule = Exclusion {
        in_tree,
        refused: seen_to_vanish,
    };
    rule.check(queue).map_err(failed)??;
    let there = mqueue::attributes(queue).map_err(failed)?.messages;
    let found = Queue::find(open).and_then(|queue| queue.messages());
    let why = match found {
        Ok(messages) if messages.len() as u64 == there => return Ok(messages),
        Ok(messages) => format!("{} of {there} were found", messages.len()),
        Err(error) => error.to_string(),
    };
    let why = format!("somebody is told when they are taken out, and not to be looked up: {why}");
    Err(open.unsupported(&why, None))
}

/// Has whoever opens the queue wait as long as it lives.
fn guard(queue: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let path = sys::procfs::link(queue);
    let path = CString::new(path).expect("a number has no NUL");
    let group = fanotify::init(fanotify::CLASS_CONTENT | fanotify::NONBLOCK, 0)?;
    fanotify::mark(&group, fanotify::ADD, fanotify::OPEN_ASKED, &path)?;
    Ok(group)
}

/// A process that has the queue open, neither in the tree nor of ours.
fn others(queue: BorrowedFd<'_>, in_tree: impl Fn(i32) -> bool) -> io::Result<Option<i32>> {
    let wanted = rustix::fs::fstat(queue)?;
    let entries = |path: &str| std::fs::read_dir(path).into_iter().flatten().flatten();
    let me = std::process::id();
    let is_ours = |pid: i32| {
        let stat = sys::procfs::read(format_args!("{pid}/stat")).ok();
        let stat = stat.and_then(|stat| sys::proc::Stat::parse(&stat).ok());
        pid.cast_unsigned() == me || stat.is_some_and(|stat| stat.ppid.cast_unsigned() == me)
    };
    let has_it = |pid: &i32| {
        let mut files = entries(&sys::procfs::path(format_args!("{pid}/fd")));
        files.any(|file| {
            let stat = rustix::fs::stat(file.path());
            stat.is_ok_and(|stat| (stat.st_dev, stat.st_ino) == (wanted.st_dev, wanted.st_ino))
        })
    };
    let mut others = sys::procfs::processes().filter(|pid| !in_tree(*pid) && !is_ours(*pid));
    Ok(others.find(has_it))
}

/// Room for any message of a queue.
fn room_for(now: Attributes) -> Vec<u8> {
    vec![0; usize::try_from(now.message_bytes).unwrap_or_default()]
}

fn take_and_put_back(queue: BorrowedFd<'_>, now: Attributes) -> io::Result<Vec<Message>> {
    let mut room = room_for(now);
    let mut messages = Vec::new();
    let result = loop {
        match mqueue::receive(queue, &mut room) {
            Ok(Some(message)) => messages.push(message),
            Ok(None) => break Ok(()),
            Err(error) => break Err(error),
        }
    };
    let until = Instant::now() + PATIENCE;
    for message in &messages {
        while let Err(error) = mqueue::send(queue, message) {
            if Instant::now() > until {
                return Err(error);
            }
            std::thread::yield_now();
        }
    }
    result.map(|()| messages)
}

/// Contents that no queue for one message of ten bytes has had.
#[cfg(test)]
pub(super) fn nonsense() -> Vec<Contents> {
    let message = |priority, len| Message {
        priority,
        bytes: vec![1; len],
    };
    let contents = |messages: &[Message]| Contents {
        messages: messages.len() as u64,
        inline: encode(messages),
        ..Contents::default()
    };
    let (short, sound) = (encode(&[message(1, 10)]), contents(&[message(1, 10)]));
    let cut = |len| Contents {
        inline: short[..len].to_vec(),
        ..sound.clone()
    };
    vec![
        contents(&[message(1, 11)]),
        contents(&[message(mqueue::PRIORITY_MAX + 1, 1)]),
        contents(&[message(1, 1), message(1, 1)]),
        cut(7),
        cut(17),
        Contents {
            messages: 1 << 40,
            ..Contents::default()
        },
        Contents {
            space: Some(7),
            stored_bytes: u64::MAX,
            ..sound.clone()
        },
    ]
}
