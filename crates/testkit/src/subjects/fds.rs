//! Descriptors of many kinds, some shared by dup and by fork, some with data in flight.
//!
//! `check` uses each and answers "right", or what is wrong with which; it may be asked again.
use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::path::Path;

use rustix::event::{EventfdFlags, epoll, eventfd};
use rustix::fs::{
    MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, memfd_create,
};
use rustix::io::{FdFlags, fcntl_getfd};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socketpair};
use rustix::pipe::{PipeFlags, fcntl_getpipe_size, fcntl_setpipe_size, pipe_with};
use rustix::time::{TimerfdClockId, TimerfdFlags, timerfd_create};
use sys::fork::{Fork, fork};

use super::{Control, Failure, not_understood};

const PIPE_BYTES: usize = 1 << 17;
const IN_FLIGHT: &[u8] = b"written before, read after";

struct DescriptorSet {
    file: File,
    file_twin: File,
    deleted: File,
    path_only: OwnedFd,
    pipe: (OwnedFd, OwnedFd),
    kept_pair: (OwnedFd, OwnedFd),
    datagrams: (OwnedFd, OwnedFd),
    event: OwnedFd,
    timer: OwnedFd,
    waiter: OwnedFd,
    memfd: File,
    folder: OwnedFd,
}

pub(super) fn run(control: Control, _: &[String]) -> Result<(), Failure> {
    let mut zoo = DescriptorSet::open(control.folder())?;
    if fork()? == Fork::Child {
        // Holds every description too.
        loop {
            rustix::event::pause();
        }
    }
    control.serve(|question| match question.verb.as_str() {
        "check" => {
            let wrong = zoo.check()?;
            Ok(if wrong.is_empty() {
                "right".into()
            } else {
                wrong.join(", ")
            })
        }
        _ => not_understood(question),
    })
}

impl DescriptorSet {
    fn open(folder: &Path) -> Result<Self, Failure> {
        let open = |name: &str| {
            File::options()
                .read(true)
                .write(true)
                .create(true)
                .truncate(false)
                .open(folder.join(name))
        };
        let mut file = open("zoo-file")?;
        file.write_all(b"0123456789")?;
        file.seek(SeekFrom::Start(4))?;
        let mut deleted = open("zoo-deleted")?;
        deleted.write_all(b"still here")?;
        std::fs::remove_file(folder.join("zoo-deleted"))?;
        let path_only = rustix::fs::open("/etc/passwd", OFlags::PATH, Mode::empty())?;
        let pipe = pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK)?;
        fcntl_setpipe_size(&pipe.1, PIPE_BYTES)?;
        rustix::io::write(&pipe.1, IN_FLIGHT)?;
        let kept_pair = pair(SocketType::STREAM)?;
        rustix::io::write(&kept_pair.0, IN_FLIGHT)?;
        let datagrams = pair(SocketType::DGRAM)?;
        rustix::io::write(&datagrams.0, b"one")?;
        rustix::io::write(&datagrams.0, b"three")?;
        let event = eventfd(41, EventfdFlags::NONBLOCK)?;
        let timer = timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK)?;
        let waiter = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let data = epoll::EventData::new_u64(0xdead_beef_f00d);
        epoll::add(&waiter, &event, data, epoll::EventFlags::IN)?;
        let data = epoll::EventData::new_u64(7);
        epoll::add(
            &waiter,
            &timer,
            data,
            epoll::EventFlags::IN | epoll::EventFlags::ET,
        )?;
        let mut memfd = File::from(memfd_create("zoo", MemfdFlags::ALLOW_SEALING)?);
        memfd.write_all(b"sealed")?;
        fcntl_add_seals(
            &memfd,
            SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK,
        )?;
        let folder = rustix::fs::open(folder, OFlags::DIRECTORY | OFlags::RDONLY, Mode::empty())?;
        Ok(Self {
            file_twin: file.try_clone()?,
            file,
            deleted,
            path_only,
            pipe,
            kept_pair,
            datagrams,
            event,
            timer,
            waiter,
            memfd,
            folder,
        })
    }

    fn check(&mut self) -> Result<Vec<String>, Failure> {
        let mut wrong = Vec::new();
        let mut expect = |what: &str, holds: bool| {
            if !holds {
                wrong.push(what.to_owned());
            }
        };
        // A twin moves with its original.
        self.file_twin.seek(SeekFrom::Start(4))?;
        let mut three = [0; 3];
        self.file.read_exact(&mut three)?;
        expect(
            "offset",
            &three == b"456" && self.file_twin.stream_position()? == 7,
        );
        self.file.seek(SeekFrom::Start(4))?;
        self.deleted.seek(SeekFrom::Start(0))?;
        let mut text = String::new();
        self.deleted.read_to_string(&mut text)?;
        expect("deleted file", text == "still here");
        let flags = rustix::fs::fcntl_getfl(&self.path_only)?;
        expect("O_PATH", flags.contains(OFlags::PATH));
        expect("pipe", echoes(&self.pipe.0, &self.pipe.1)?);
        expect("pipe size", fcntl_getpipe_size(&self.pipe.0)? == PIPE_BYTES);
        expect("pipe flags", fcntl_getfd(&self.pipe.0)? == FdFlags::CLOEXEC);
        expect("stream", echoes(&self.kept_pair.1, &self.kept_pair.0)?);
        for message in [&b"one"[..], b"three"] {
            let mut buffer = [0; 64];
            let bytes = rustix::io::read(&self.datagrams.1, &mut buffer)?;
            expect("datagram", &buffer[..bytes] == message);
            rustix::io::write(&self.datagrams.0, message)?;
        }
        let mut events = Vec::with_capacity(4);
        let at_once = rustix::event::Timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        epoll::wait(
            &self.waiter,
            rustix::buffer::spare_capacity(&mut events),
            Some(&at_once),
        )?;
        let data: Vec<u64> = events.iter().map(|event| event.data.u64()).collect();
        expect("epoll", data == [0xdead_beef_f00d]);
        let mut count = [0; 8];
        rustix::io::read(&self.event, &mut count)?;
        expect("eventfd", u64::from_ne_bytes(count) == 41);
        rustix::io::write(&self.event, &count)?;
        let mut ticks = [0; 8];
        let silent = rustix::io::read(&self.timer, &mut ticks);
        expect("timerfd", silent == Err(rustix::io::Errno::AGAIN));
        let seals = SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK;
        expect("seals", fcntl_get_seals(&self.memfd)? == seals);
        expect(
            "directory",
            rustix::fs::statat(&self.folder, "zoo-file", rustix::fs::AtFlags::empty()).is_ok(),
        );
        Ok(wrong)
    }
}

fn pair(kind: SocketType) -> rustix::io::Result<(OwnedFd, OwnedFd)> {
    socketpair(AddressFamily::UNIX, kind, SocketFlags::CLOEXEC, None)
}

/// Takes what is in flight and puts it there again.
fn echoes(from: &OwnedFd, to: &OwnedFd) -> rustix::io::Result<bool> {
    let mut buffer = [0; 256];
    let bytes = rustix::io::read(from, &mut buffer)?;
    rustix::io::write(to, &buffer[..bytes])?;
    Ok(&buffer[..bytes] == IN_FLIGHT)
}
