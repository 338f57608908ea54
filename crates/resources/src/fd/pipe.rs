//! Pipes without a name: both ends, or the one that is left, and the data in flight.
//!
//! - Kept: both ends or the one that is left, the size of the buffer, data in flight, packets
//!   (`O_DIRECT`) with their borders, owner.
//!   One whose other end is outside of the tree, if stillframe was started with it as well, as by
//!   the same shell: so must be who restores it.
//! - Refused: "its other end is outside of the tree" (`--external 'pipe:[INODE]'`, and a restore is
//!   handed the pipe by `--inherit-fd`; `--unix-close`, with which it comes back without its other
//!   end).
//! - At a restore: "pipe:[…]: its other end was outside of the tree: hand it in (--inherit-fd
//!   'fd[N]:pipe:[…]')" (dumped with `--external`).
//! - CRIU 4.2: kept, one whose other end is outside without a word; refuses pipes of packets.

use std::collections::hash_map::Entry;
use std::os::fd::{AsFd, OwnedFd};

use prost::Message;
use rustix::event::PollFlags;
use rustix::fs::{FileType, Gid, OFlags, Uid};
use rustix::pipe::PipeFlags;
use sys::boot;

use super::ghost::first_of_inode;
use super::queue::Queue;
use super::{DumpContext, Kind, Open, Opens, RestoreContext, own_pipe, ready, status, tags};
use crate::{Allow, Error, Result};

/// See the file.
pub struct Pipe;

/// One end of a pipe.
#[derive(Clone, PartialEq, Message)]
pub struct Record {
    /// The first description (by id) of this pipe: those with the same number are its ends.
    #[prost(uint32, tag = "1")]
    first: u32,
    /// Access mode and status flags.
    #[prost(uint32, tag = "2")]
    flags: u32,
    /// The inode's number when it was dumped, by which people know it.
    #[prost(uint64, tag = "3")]
    inode: u64,
    /// The owner, whom the permissions of the pipe let open it again.
    #[prost(uint32, tag = "4")]
    uid: u32,
    /// The owning group.
    #[prost(uint32, tag = "5")]
    gid: u32,
    /// What is inside; on the first description only.
    #[prost(message, optional, tag = "6")]
    queue: Option<Queue>,
    /// True if the caller hands the pipe to the restore, as its other end is outside of the tree.
    #[prost(bool, tag = "7")]
    external: bool,
    /// The boot in which the restorer may have been started with the pipe; empty for none.
    #[prost(string, tag = "8")]
    boot: String,
}

/// Where a restore has a pipe from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    /// The restore makes a new one.
    New,
    /// The caller hands it in (`--inherit-fd`).
    Caller,
    /// The restorer was started with it, as stillframe was.
    Starter,
    /// Nowhere: its other end is outside of the tree.
    Nowhere,
}

impl Origin {
    pub(super) fn of(open: &Open<'_>, all: &Opens<'_>, allow: &Allow) -> Result<Self> {
        let (pipes, inode) = (&allow.external_pipes, open.stat.st_ino);
        if pipes.inodes.contains(&inode) {
            return Ok(Self::Caller);
        }
        if !has_end_outside(open, all)? {
            return Ok(Self::New);
        }
        Ok(match (pipes.all, allow.unix_close) {
            (true, _) => Self::Caller,
            (false, true) => Self::New,
            (false, false) if own_pipe::is_given(inode)? => Self::Starter,
            (false, false) => Self::Nowhere,
        })
    }
}

/// The refusal of a pipe, or of a FIFO without a path.
pub(super) fn refuse_end(open: &Open<'_>) -> Error {
    open.unsupported("its other end is outside of the tree", Some("--external"))
}

/// True if a process outside of the tree reads what the tree writes to a pipe, or writes what it
/// reads.
fn has_end_outside(open: &Open<'_>, all: &Opens<'_>) -> Result<bool> {
    let modes = |open: &Open<'_>| match open.info.oflags() {
        flags if flags.contains(OFlags::PATH) => (false, false),
        flags => match flags & OFlags::RWMODE {
            OFlags::WRONLY => (false, true),
            OFlags::RDWR => (true, true),
            _ => (true, false),
        },
    };
    let of_tree = all
        .of_inode(open)
        .map(modes)
        .fold((false, false), |all, one| (all.0 | one.0, all.1 | one.1));
    // The kernel says so where nobody has the other end.
    let alone = match of_tree {
        (true, false) => PollFlags::HUP,
        (false, true) => PollFlags::ERR,
        _ => return Ok(false),
    };
    let told = ready::events(open.own()?, PollFlags::empty());
    let told = told.map_err(|error| Error::kernel(format!("poll {}", open.place()), error))?;
    Ok(!told.intersects(alone))
}

impl Kind for Pipe {
    type Record = Record;
    const TAG: u16 = tags::PIPE;
    const NAME: &'static str = "pipe";

    fn claims(open: &Open<'_>) -> bool {
        open.link.starts_with(b"pipe:[")
            && FileType::from_raw_mode(open.stat.st_mode) == FileType::Fifo
            && !open.info.oflags().contains(OFlags::PATH)
    }

    fn dump(open: &Open<'_>, cx: &mut dyn DumpContext) -> Result<Record> {
        let first = first_of_inode(open, cx);
        let origin = Origin::of(open, cx.all(), cx.allow())?;
        let boot = boot::id().filter(|_| origin == Origin::Starter);
        let mut record = Record {
            first,
            flags: open.info.flags,
            inode: open.stat.st_ino,
            uid: open.stat.st_uid,
            gid: open.stat.st_gid,
            queue: None,
            external: matches!(origin, Origin::Caller | Origin::Starter),
            boot: boot.unwrap_or_default().to_owned(),
        };
        if first == open.id.0 {
            record.queue = Some(Queue::dump(open, cx)?);
        }
        Ok(record)
    }

    fn check_among(open: &Open<'_>, all: &Opens<'_>, allow: &Allow) -> Result<()> {
        match Origin::of(open, all, allow)? {
            Origin::Nowhere => Err(refuse_end(open)),
            Origin::New | Origin::Caller | Origin::Starter => Ok(()),
        }
    }

    fn check(record: &Record) -> Result<()> {
        status::check(Self::NAME, record.flags)
    }

    fn describe(record: &Record) -> String {
        let end = match OFlags::from_bits_retain(record.flags) & OFlags::RWMODE {
            OFlags::WRONLY => "write",
            OFlags::RDWR => "both",
            _ => "read",
        };
        let queue = record
            .queue
            .as_ref()
            .map_or_else(String::new, |queue| format!(" {}", queue.describe()));
        format!("pipe:[{}] {end}{queue}", record.inode)
    }

    fn holder(record: &Record) -> Option<u64> {
        Some(u64::from(record.first))
    }

    fn open(record: &Record, cx: &mut dyn RestoreContext) -> Result<OwnedFd> {
        let flags = status::opening(record.flags);
        if let Some(own) = cx.inherited(format!("pipe:[{}]", record.inode).as_bytes()) {
            let again = status::reopen(own, flags.difference(OFlags::DIRECT))?;
            status::set(&again, flags)?;
            return Ok(again);
        }
        if let Some(own) = record.own()? {
            let again = status::reopen(own.as_fd(), flags.difference(OFlags::DIRECT))?;
            status::set(&again, flags)?;
            return Ok(again);
        }
        if record.external {
            let inode = record.inode;
            let what = format!(
                "pipe:[{inode}]: its other end was outside of the tree: hand it in (--inherit-fd \
                 'fd[N]:pipe:[{inode}]')"
            );
            return Err(Error::Mismatch { what });
        }
        let key = (tags::PIPE, u64::from(record.first));
        let ends = match cx.shared().entry(key) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => place.insert(record.create()?),
        };
        let writes = flags & OFlags::RWMODE == OFlags::WRONLY;
        let end = ends[usize::from(writes)].as_fd();
        // Only a description that was opened through /proc has O_LARGEFILE; the others are the
        // two that the pipe started with.
        if flags.contains(OFlags::LARGEFILE) {
            let wanted = flags.difference(OFlags::DIRECT);
            let again = status::reopen(end, wanted | OFlags::NONBLOCK)?;
            status::set(&again, flags)?;
            return Ok(again);
        }
        let end = status::dup(end)?;
        status::set(&end, flags)?;
        Ok(end)
    }
}

impl Record {
    /// The very pipe, if this process was started with it.
    fn own(&self) -> Result<Option<OwnedFd>> {
        // Images of versions that did not trim it have the end of its line.
        match !self.boot.is_empty() && boot::id() == Some(self.boot.trim_end()) {
            true => own_pipe::find(self.inode),
            false => Ok(None),
        }
    }

    /// A new pipe's ends with the data in it: reading, writing.
    fn create(&self) -> Result<Vec<OwnedFd>> {
        let place = format!("pipe:[{}]", self.inode);
        let kernel = |error: rustix::io::Errno| Error::kernel(format!("make {place}"), error);
        let (reader, writer) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(kernel)?;
        let maker = (rustix::process::geteuid(), rustix::process::getegid());
        let owner = (Uid::from_raw(self.uid), Gid::from_raw(self.gid));
        if maker != owner {
            rustix::fs::fchown(&reader, Some(owner.0), Some(owner.1)).map_err(kernel)?;
        }
        if let Some(queue) = &self.queue {
            queue.restore(writer.as_fd(), &place)?;
        }
        Ok(vec![reader, writer])
    }
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;
    use rustix::pipe::{fcntl_getpipe_size, fcntl_setpipe_size};

    use super::super::testing::World;
    use super::*;

    fn pipe(flags: PipeFlags) -> (OwnedFd, OwnedFd) {
        rustix::pipe::pipe_with(flags | PipeFlags::CLOEXEC).expect("pipe")
    }

    fn read(end: &OwnedFd) -> rustix::io::Result<Vec<u8>> {
        let mut bytes = vec![0; 1 << 20];
        let len = rustix::io::read(end, &mut bytes[..])?;
        bytes.truncate(len);
        Ok(bytes)
    }

    #[test]
    fn data_in_flight_and_flags_survive() {
        let (reader, writer) = pipe(PipeFlags::NONBLOCK);
        rustix::io::write(&writer, b"in flight").expect("write");
        let mut world = World::default();
        let (writer, reader) = (world.add(writer), world.add(reader));
        world.cycle();
        let seen = world.describe(writer);
        assert!(seen.ends_with("write capacity=65536 data=9"), "{seen}");
        let (reader, writer) = (world.take(reader), world.take(writer));
        assert_eq!(read(&reader).expect("read"), b"in flight");
        assert_eq!(read(&reader), Err(Errno::AGAIN));
        rustix::io::write(&writer, b"more").expect("write");
        assert_eq!(read(&reader).expect("read"), b"more");
        drop(writer);
        assert_eq!(read(&reader).expect("the end"), b"");
    }

    #[test]
    fn dumping_leaves_the_data_where_it_is() {
        let (reader, writer) = pipe(PipeFlags::NONBLOCK);
        let bytes = (0..40_000u32).map(|n| (n % 251) as u8).collect::<Vec<_>>();
        for part in bytes.chunks(3000) {
            rustix::io::write(&writer, part).expect("write");
        }
        let mut world = World::default();
        world.add(writer);
        let reader = world.add(reader);
        world.dump().expect("dump");
        world.dump().expect("dump");
        assert_eq!(read(&world.take(reader)).expect("read"), bytes);
    }

    #[test]
    fn packets_keep_their_borders() {
        let (reader, writer) = pipe(PipeFlags::DIRECT | PipeFlags::NONBLOCK);
        for packet in [&b"one"[..], b"two", b"three"] {
            rustix::io::write(&writer, packet).expect("write");
        }
        let mut world = World::default();
        let (reader, _) = (world.add(reader), world.add(writer));
        world.cycle();
        let reader = world.take(reader);
        for packet in [&b"one"[..], b"two", b"three"] {
            assert_eq!(read(&reader).expect("read"), packet);
        }
    }

    #[test]
    fn packets_stay_packets_without_anybody_who_writes_them() {
        let (reader, writer) = pipe(PipeFlags::DIRECT | PipeFlags::NONBLOCK);
        for packet in [&b"one"[..], b"two", &[7; 4096]] {
            rustix::io::write(&writer, packet).expect("write");
        }
        drop(writer);
        let mut world = World::default();
        let reader = world.add(reader);
        world.cycle();
        world.cycle();
        let reader = world.take(reader);
        assert_eq!(read(&reader).expect("read"), b"one");
        // What is not read of a packet is gone.
        let mut two = [0; 2];
        assert_eq!(rustix::io::read(&reader, &mut two).expect("read"), 2);
        assert_eq!((two, read(&reader).expect("read")), (*b"tw", vec![7; 4096]));
    }

    #[test]
    fn what_is_no_packet_is_none_behind_packets() {
        let (reader, writer) = pipe(PipeFlags::DIRECT | PipeFlags::NONBLOCK);
        let set = |flags| rustix::fs::fcntl_setfl(&writer, OFlags::NONBLOCK | flags).expect("set");
        set(OFlags::empty());
        rustix::io::write(&writer, &[1; 8192]).expect("write");
        set(OFlags::DIRECT);
        rustix::io::write(&writer, &[2; 100]).expect("write");
        set(OFlags::empty());
        rustix::io::write(&writer, b"loose").expect("write");
        let mut world = World::default();
        let (reader, writer) = (world.add(reader), world.add(writer));
        world.cycle();
        assert!(
            !rustix::fs::fcntl_getfl(world.get(writer))
                .expect("flags")
                .contains(OFlags::DIRECT)
        );
        let reader = world.take(reader);
        let first = [vec![1; 8192], vec![2; 100]].concat();
        assert!(read(&reader).expect("read") == first);
        let mut three = [0; 3];
        assert_eq!(rustix::io::read(&reader, &mut three).expect("read"), 3);
        assert_eq!(
            (three, read(&reader).expect("read")),
            (*b"loo", b"se".to_vec())
        );
    }

    #[test]
    fn capacity_survives_when_full() {
        let (reader, writer) = pipe(PipeFlags::NONBLOCK);
        fcntl_setpipe_size(&writer, 1 << 20).expect("resize");
        let bytes = vec![3; 1 << 20];
        assert_eq!(rustix::io::write(&writer, &bytes).expect("write"), 1 << 20);
        let mut world = World::default();
        let (reader, writer) = (world.add(reader), world.add(writer));
        world.cycle();
        let (reader, writer) = (world.take(reader), world.take(writer));
        assert_eq!(fcntl_getpipe_size(&writer).expect("size"), 1 << 20);
        assert_eq!(rustix::io::write(&writer, b"x"), Err(Errno::AGAIN));
        assert_eq!(read(&reader).expect("read"), bytes);
    }

    #[test]
    fn lonely_ends_stay_lonely() {
        let (reader, writer) = pipe(PipeFlags::NONBLOCK);
        rustix::io::write(&writer, b"last words").expect("write");
        drop(writer);
        let mut world = World::default();
        let reader = world.add(reader);
        world.cycle();
        let reader = world.take(reader);
        assert_eq!(read(&reader).expect("read"), b"last words");
        assert_eq!(read(&reader).expect("the end"), b"");

        let (reader, writer) = pipe(PipeFlags::empty());
        rustix::io::write(&writer, b"unheard").expect("write");
        drop(reader);
        let mut world = World::default();
        let writer = world.add(writer);
        world.cycle();
        let writer = world.take(writer);
        let again = status::reopen(writer.as_fd(), OFlags::RDONLY).expect("reopen");
        assert_eq!(read(&again).expect("read"), b"unheard");
    }

    #[test]
    fn end_outside_is_refused_unless_it_is_external() {
        for writes in [false, true] {
            let (reader, writer) = pipe(PipeFlags::NONBLOCK | PipeFlags::CLOEXEC);
            let inode = rustix::fs::fstat(&reader).expect("stat").st_ino;
            let (own, outside) = match writes {
                true => (writer, reader),
                false => (reader, writer),
            };
            let mut world = World::default();
            let at = world.add(own);
            let error = world.dump().expect_err("it is refused").to_string();
            let want = "its other end is outside of the tree (use --external to allow it)";
            assert!(error.ends_with(want), "{error}");
            world.allow.unix_close = true;
            world.dump().expect("it comes back without its other end");
            world.allow.unix_close = false;
            world.allow.external_pipes.inodes = vec![inode];
            world.dump().expect("it is promised");
            let error = world
                .restore()
                .expect_err("it was not handed in")
                .to_string();
            assert!(
                error.contains(&format!("--inherit-fd 'fd[N]:pipe:[{inode}]'")),
                "{error}"
            );
            let name = format!("pipe:[{inode}]").leak().as_bytes();
            world.inherited = Some((name, outside));
            world.restore().expect("it is handed in");
            assert!(world.describe(at).contains(&format!("pipe:[{inode}]")));
        }
    }

    #[test]
    fn end_outside_that_stillframe_has_as_well_is_handed_on() {
        for writes in [false, true] {
            // As it was given: it stays open on exec.
            let ends = rustix::pipe::pipe_with(PipeFlags::NONBLOCK);
            let (reader, writer) = ends.expect("pipe");
            let (own, outside) = match writes {
                true => (writer, reader),
                false => (reader, writer),
            };
            let mut world = World::default();
            let at = world.add(own);
            world.dump().expect("a restore from here has it");
            world.restore().expect("it is handed on");
            let own = world.take(at);
            let (from, to) = if writes {
                (outside, own)
            } else {
                (own, outside)
            };
            rustix::io::write(&to, b"x").expect("write");
            assert_eq!(read(&from).expect("read"), b"x");
        }
    }

    #[test]
    fn inherited_pipe_takes_its_place() {
        let (reader, writer) = pipe(PipeFlags::empty());
        let inode = rustix::fs::fstat(&reader).expect("stat").st_ino;
        drop(reader);
        let mut world = World::default();
        let at = world.add(writer);
        world.dump().expect("dump");
        let (reader, writer) = pipe(PipeFlags::NONBLOCK);
        let name = format!("pipe:[{inode}]").leak().as_bytes();
        world.inherited = Some((name, writer));
        world.restore().expect("restore");
        rustix::io::write(world.take(at), b"x").expect("write");
        assert_eq!(read(&reader).expect("read"), b"x");
    }

    #[test]
    fn ends_opened_twice_are_two_descriptions() {
        let (reader, writer) = pipe(PipeFlags::empty());
        let second = status::reopen(reader.as_fd(), OFlags::RDONLY | OFlags::NONBLOCK);
        let mut world = World::default();
        let (reader, writer) = (world.add(reader), world.add(writer));
        let second = world.add(second.expect("reopen"));
        world.cycle();
        let (reader, second) = (world.take(reader), world.take(second));
        let nonblocking = |fd: &OwnedFd| {
            let flags = rustix::fs::fcntl_getfl(fd).expect("flags");
            flags.contains(OFlags::NONBLOCK)
        };
        assert_eq!((nonblocking(&reader), nonblocking(&second)), (false, true));
        rustix::io::write(world.take(writer), b"x").expect("write");
        assert_eq!(read(&second).expect("read"), b"x");
    }
}
