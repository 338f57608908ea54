//! POSIX message queues: mq_overview(7).
//!
//! A queue with a name outlives the tasks. So a restore takes the one that is still there, if its
//! messages are those of the dump, and makes it again where there is none.
//!
//! - Kept: name, room, permissions, owner, messages with their priorities and their order; queues
//!   that were unlinked; who is to be told of the next message, by signal or thread (`mq_notify`).
//! - Refused: "its messages can only be looked at by taking them out, and pid … (…), which is not
//!   in the tree, has it open"; "somebody is told when they are taken out, and not to be looked up:
//!   …", as "… of … were found"; "pid … is to be told of its next message (mq_notify), …", which is
//!   "how cannot be looked up: …", "but executes another program since", "by a socket that it has
//!   not open" or "by a descriptor that is another's".
//! - At a restore: "the message queue … …: …", which is "has another size than at the dump" or "has
//!   other messages than at the dump"; "…: is another message queue"; "a process that has ended is
//!   still to be told of its next message (mq_notify), and pid … (…), which is not in the tree, has
//!   it open".
//! - CRIU 4.2: refused.

mod contents;
mod notify;

use std::ffi::CString;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use prost::Message;
use rustix::fs::{FileType, Gid, Mode, OFlags, SeekFrom, Stat, Uid};
use rustix::process::{Resource, Rlimit, setrlimit};
use sys::mqueue::{self, Attributes};
use sys::watchdog::apart_with_file;

use self::contents::Contents;
use self::notify::Notify;
use super::ghost::first_of_inode;
use super::{DumpContext, Kind, Open, RestoreContext, status, tags};
use crate::script::Script;
use crate::{Error, Result};

/// See the file.
pub struct MessageQueue;

/// One description of a message queue.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// The first description (by id) of this queue: those with the same number share it.
    #[prost(uint32, tag = "1")]
    first: u32,
    /// Its name, without the slash.
    #[prost(bytes = "vec", tag = "2")]
    name: Vec<u8>,
    /// Whether it has lost that name (`mq_unlink`).
    #[prost(bool, tag = "3")]
    unlinked: bool,
    /// Access mode and status flags.
    #[prost(uint32, tag = "4")]
    flags: u32,
    /// The offset in bytes, of a description that read(2) was used on.
    #[prost(uint64, tag = "5")]
    pos: u64,
    /// The path of a description that was opened where queues are mounted, not by `mq_open`.
    #[prost(bytes = "vec", tag = "6")]
    path: Vec<u8>,
    /// Permissions.
    #[prost(uint32, tag = "7")]
    mode: u32,
    /// The owner.
    #[prost(uint32, tag = "8")]
    uid: u32,
    /// The owning group.
    #[prost(uint32, tag = "9")]
    gid: u32,
    /// How many messages fit.
    #[prost(uint64, tag = "10")]
    max_messages: u64,
    /// How long a message can be, in bytes.
    #[prost(uint64, tag = "11")]
    message_bytes: u64,
    /// What is in it; on the first description only.
    #[prost(message, optional, tag = "12")]
    contents: Option<Contents>,
    /// The process that is to be told of the next message; on a description that it has.
    #[prost(message, optional, tag = "13")]
    notify: Option<Notify>,
}

/// What the kernel appends to a name that was taken away.
const DELETED: &[u8] = b" (deleted)";
const PERMISSIONS: u32 = 0o7777;
/// The longest name.
const NAME_MAX_BYTES: usize = 255;

/// Whether a file may be a queue: of others, hardly any is as long as all queues seem to be.
pub(super) fn may_be(stat: &Stat) -> bool {
    let is_file = FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile;
    is_file && stat.st_size == mqueue::FILE_BYTES && rustix::fs::major(stat.st_dev) == 0
}

impl Kind for MessageQueue {
    type Record = Record;
    const TAG: u16 = tags::MESSAGE_QUEUE;
    const NAME: &'static str = "message queue";

    fn claims(open: &Open<'_>) -> bool {
        let alike = may_be(&open.stat) && open.link.starts_with(b"/");
        let is_queue = |own| rustix::fs::fstatfs(own).is_ok_and(|fs| fs.f_type == mqueue::MAGIC);
        alike && open.own().is_ok_and(is_queue)
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Record> {
        let path = open.link.strip_suffix(DELETED).unwrap_or(&open.link);
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or_default();
        let failed = |error| Error::kernel(format!("ask {}", open.place()), error);
        let room = mqueue::attributes(open.own()?).map_err(failed)?;
        let mut record = Record {
            first: first_of_inode(open, cx),
            name: name.to_vec(),
            unlinked: open.stat.st_nlink == 0,
            flags: open.info.flags,
            pos: open.info.pos,
            path: Vec::new(),
            mode: open.stat.st_mode & PERMISSIONS,
            uid: open.stat.st_uid,
            gid: open.stat.st_gid,
            max_messages: room.max_messages,
            message_bytes: room.message_bytes,
            contents: None,
            notify: None,
        };
        if !record.unlinked && path.strip_prefix(b"/") != Some(name) {
            record.path = path.to_vec();
        }
        let notify = notify::of(open)?.filter(|notify| cx.task(notify.pid).is_some());
        if record.first == open.id.0 {
            let now = (room, notify.is_some());
            record.contents = Some(Contents::dump(open, now, cx)?);
        }
        if let Some(notify) = notify {
            record.notify = notify.dump(open, cx)?;
        }
        Ok(record)
    }

    fn check(record: &Record) -> Result<()> {
        status::check(Self::NAME, record.flags)?;
        let corrupt = |what| Err(Error::corrupt(Self::NAME, what));
        let name = record.name.as_slice();
        if !(1..=NAME_MAX_BYTES).contains(&name.len())
            || name.iter().any(|byte| b"/\0".contains(byte))
        {
            return corrupt("its name is none");
        }
        if !record.path.is_empty() && (!record.path.starts_with(b"/") || record.path.contains(&0)) {
            return corrupt("its path is none");
        }
        let room = (1..=mqueue::MESSAGES_MAX).contains(&record.max_messages)
            && (1..=mqueue::MESSAGE_MAX_BYTES).contains(&record.message_bytes);
        if !room || record.mode & !PERMISSIONS != 0 {
            return corrupt("its attributes make no sense");
        }
        if record
            .notify
            .as_ref()
            .is_some_and(|notify| !notify.is_sound())
        {
            return corrupt("whom it tells makes no sense");
        }
        Ok(())
    }

    fn describe(record: &Record) -> String {
        let unlinked = if record.unlinked { " (unlinked)" } else { "" };
        let messages = match &record.contents {
            Some(contents) => format!(" messages={}", contents.messages),
            None => String::new(),
        };
        let (most, bytes) = (record.max_messages, record.message_bytes);
        let place = record.place();
        let tells = record
            .notify
            .as_ref()
            .map_or_else(String::new, Notify::describe);
        format!("{place}{unlinked}{messages} room={most}x{bytes}{tells}")
    }

    fn path(record: &Record) -> Option<String> {
        Some(record.place())
    }

    fn open(record: &Record, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let flags = status::opening(record.flags);
        let key = (tags::MESSAGE_QUEUE, u64::from(record.first));
        if !cx.shared().contains_key(&key) {
            let queue = record.bring_back(cx)?;
            cx.shared().insert(key, vec![queue]);
        }
        let holder = cx.shared()[&key][0].as_fd();
        if let Some(notify) = &record.notify {
            notify.end_left(holder, &record.place())?;
        }
        let own = match record.path.as_slice() {
            // Those of mq_open have no O_LARGEFILE.
            [] if !record.unlinked && !flags.contains(OFlags::LARGEFILE) => {
                let own = mqueue::open(&record.kernel_name(), flags);
                let own = own.map_err(|error| record.failed("open", error))?;
                record.same(own, holder)?
            }
            [] => status::reopen(holder, flags)?,
            path => {
                let own = rustix::fs::open(path, flags, Mode::empty());
                record.same(own.map_err(|errno| record.failed("open", errno))?, holder)?
            }
        };
        if record.pos != 0 {
            let to = SeekFrom::Start(record.pos);
            rustix::fs::seek(&own, to).map_err(|errno| record.failed("seek in", errno))?;
        }
        Ok(own)
    }

    fn in_task(record: &Record, fd: i32, script: &mut Script) {
        if let Some(notify) = &record.notify {
            notify.register(fd, script);
        }
    }

    fn task(record: &Record) -> Option<i32> {
        record.notify.as_ref().map(|notify| notify.pid)
    }
}

/// A queue that was made and goes again when the restore fails.
struct Made(CString);

impl Made {
    fn stay(self) {
        std::mem::forget(self);
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        if let Err(error) = mqueue::unlink(&self.0) {
            log::warn!("message queue /{:?} stays: {error}", self.0);
        }
    }
}

impl Record {
    /// What people know it by.
    fn place(&self) -> String {
        match self.path.as_slice() {
            [] => format!("/{}", String::from_utf8_lossy(&self.name)),
            path => String::from_utf8_lossy(path).into_owned(),
        }
    }

    fn failed(&self, what: &str, error: impl Into<std::io::Error>) -> Error {
        Error::kernel(format!("{what} message queue {}", self.place()), error)
    }

    fn room(&self) -> Attributes {
        Attributes {
            max_messages: self.max_messages,
            message_bytes: self.message_bytes,
            messages: self
                .contents
                .as_ref()
                .map_or(0, |contents| contents.messages),
        }
    }

    fn kernel_name(&self) -> CString {
        CString::new(self.name.clone()).expect("it was checked")
    }

    /// The queue, with the messages of the dump: a descriptor to read and to write.
    fn bring_back(&self, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let contents = self.contents.as_ref();
        let contents = contents.ok_or_else(|| {
            Error::corrupt("message queue", "the first description is not the first")
        })?;
        let messages = contents.load(self.room(), cx)?;
        let name = self.kernel_name();
        let flags = OFlags::RDWR | OFlags::NONBLOCK;
        if !self.unlinked {
            match mqueue::open(&name, flags) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(self.failed("open", error)),
                Ok(there) => return self.take(there, &messages),
            }
        }
        let made = apart_with_file(|| self.make(&messages));
        let made = made.map_err(|error| self.failed("make", error))?;
        if !self.unlinked {
            let undo = Made(name);
            cx.on_success(Box::new(move || undo.stay()));
        }
        Ok(made)
    }

    /// Takes the queue that is there, if it is as it was.
    fn take(&self, there: OwnedFd, messages: &[mqueue::Message]) -> Result<OwnedFd> {
        let (place, help) = (self.place(), "remove it (mq_unlink) to have it made again");
        let mismatch = |what: &str| {
            let what = format!("the message queue {place} {what}: {help}");
            Err(Error::Mismatch { what })
        };
        let now = mqueue::attributes(&there).map_err(|error| self.failed("ask", error))?;
        let room = self.room();
        if (now.max_messages, now.message_bytes) != (room.max_messages, room.message_bytes) {
            return mismatch("has another size than at the dump");
        }
        if (now.messages == 0 && messages.is_empty())
            || contents::peek(there.as_fd(), now, &place, |_| false)? == messages
        {
            return Ok(there);
        }
        mismatch("has other messages than at the dump")
    }

    /// Makes the queue in a process that ends what it has begun.
    fn make(&self, messages: &[mqueue::Message]) -> std::io::Result<OwnedFd> {
        // What it takes is the business of who made it first.
        let unlimited = Rlimit {
            current: None,
            maximum: None,
        };
        // Where that is not allowed, it may be enough all the same.
        let _ = setrlimit(Resource::Msgqueue, unlimited);
        let (name, queue) = self.create()?;
        let filled = self.fill(&queue, messages);
        if filled.is_err() || self.unlinked {
            mqueue::unlink(&name)?;
        }
        filled.map(|()| queue)
    }

    /// A new queue and its name: another one, where a queue to be unlinked has lost it to others.
    fn create(&self) -> std::io::Result<(CString, OwnedFd)> {
        let (name, room) = (self.kernel_name(), self.room());
        match mqueue::create(&name, room) {
            Err(error) if self.unlinked && error.kind() == std::io::ErrorKind::AlreadyExists => {
                let other = format!("stillframe-{}", std::process::id());
                let other = CString::new(other).expect("a number has no NUL");
                mqueue::create(&other, room).map(|queue| (other, queue))
            }
            made => made.map(|queue| (name, queue)),
        }
    }

    fn fill(&self, queue: &OwnedFd, messages: &[mqueue::Message]) -> std::io::Result<()> {
        for message in messages {
            mqueue::send(queue, message)?;
        }
        let (uid, gid) = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        rustix::fs::fchown(queue, Some(uid), Some(gid))?;
        rustix::fs::fchmod(queue, Mode::from_raw_mode(self.mode))?;
        Ok(())
    }

    /// A description of it, if it is of the same queue as `holder`.
    fn same(&self, own: OwnedFd, holder: BorrowedFd<'_>) -> Result<OwnedFd> {
        let stat = |fd: BorrowedFd<'_>| {
            let stat = rustix::fs::fstat(fd).map_err(|errno| self.failed("look at", errno))?;
            Ok((stat.st_dev, stat.st_ino))
        };
        if stat(own.as_fd())? == stat(holder)? {
            return Ok(own);
        }
        let what = format!("{}: is another message queue", self.place());
        Err(Error::Mismatch { what })
    }
}

#[cfg(test)]
mod tests;
