//! A ring of io_uring(7) with requests under way that never end by themselves. Argument: the kind
//! of the ring, as of `rings`.
//!
//! `check` has each of them end, by what it waits for, insists that there is nothing else, submits
//! it again and answers "right", or what is wrong. `set MILLISECONDS` submits timeouts, and `time`
//! waits for them and answers how long they took by the program's own clock, in milliseconds.
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, eventfd};
use sys::ring;

use super::rings::{Completion, Entry, Ring};
use super::{Control, Failure, not_understood};

const POLL_ADD: u8 = 6;
const TIMEOUT: u8 = 11;
const RECVMSG: u8 = 10;
const ACCEPT: u8 = 13;
const LINK_TIMEOUT: u8 = 15;
const CLOSE: u8 = 19;
const READ: u8 = 22;
const RECV: u8 = 27;
const NOP: u8 = 0;

const FIXED_FILE: u8 = 1 << 0;
const LINK: u8 = 1 << 2;
const ASYNC: u8 = 1 << 4;
/// A poll, and an accept, that go on.
const POLL_MULTI: u32 = 1 << 0;
const ACCEPT_MULTI: u16 = 1 << 0;
/// The completion is not the last one.
const MORE: u32 = 1 << 1;
const POLLIN: u32 = 1;
const ECANCELED: i32 = -125;
const ETIME: i32 = -62;

/// The numbers of requests.
mod number {
    pub const POLL: u64 = 0x1_0000_0101;
    pub const POLLS: u64 = 102;
    pub const READ: u64 = 103;
    pub const COUNT: u64 = 104;
    pub const RECV: u64 = 105;
    pub const RECV_TCP: u64 = 106;
    pub const ACCEPTS: u64 = 107;
    pub const ACCEPT: u64 = 108;
    pub const HOUR: u64 = 109;
    pub const LIMITED: u64 = 111;
    pub const LIMIT: u64 = 112;
    pub const ASYNC: u64 = 113;
    pub const FIXED: u64 = 114;
    pub const NOP: u64 = 115;
    pub const AFTER: u64 = 116;
    pub const MESSAGE: u64 = 117;
    pub const OTHERS: u64 = 118;
    pub const TIMES: std::ops::Range<u64> = 120..123;
}

/// A time, as entries have it.
type Time = Arc<[AtomicU64; 2]>;

fn time(duration: Duration) -> Time {
    let (seconds, nanoseconds) = (duration.as_secs(), duration.subsec_nanos());
    Arc::new([seconds.into(), u64::from(nanoseconds).into()])
}

/// Words that are read into.
type Words = Arc<[AtomicU64; 16]>;

struct Subject {
    ring: Arc<Ring>,
    /// Has another thread poll this counter, and hears when it has submitted that; none where one
    /// thread alone may.
    other: Option<(OwnedFd, Sender<()>, Receiver<()>)>,
    pipes: [(std::io::PipeReader, std::io::PipeWriter); 4],
    polled: OwnedFd,
    counted: OwnedFd,
    pairs: [(UnixStream, UnixStream); 3],
    tcp: (TcpStream, TcpStream),
    listener: TcpListener,
    unix: UnixListener,
    words: [Words; 8],
    /// The header of a message, and its two buffers.
    header: Words,
    hour: Time,
    times: Vec<Time>,
    begun: Instant,
}

pub(super) fn run(control: Control, arguments: &[String]) -> Result<(), Failure> {
    let kind = arguments.first().map_or("plain", String::as_str);
    let mut subject = Subject::new(control.folder(), kind)?;
    control.serve(|question| match question.verb.as_str() {
        "check" => Ok(subject
            .check()
            .map_or_else(|error| error.to_string(), |()| "right".into())),
        "set" => {
            let ms = question.words.first().map_or("", String::as_str).parse()?;
            subject.set(Duration::from_millis(ms))?;
            Ok("set".into())
        }
        "time" => Ok(subject.timed()?.as_millis().to_string()),
        _ => not_understood(question),
    })
}

/// A thread that polls a counter whenever it is told to.
fn polling_thread(ring: &Arc<Ring>) -> Result<(OwnedFd, Sender<()>, Receiver<()>), Failure> {
    let counter = eventfd(0, EventfdFlags::empty())?;
    let (ring, fd) = (ring.clone(), counter.as_raw_fd());
    let ((begin, begins), (does, done)) = (channel::<()>(), channel());
    std::thread::Builder::new()
        .name("polls".into())
        .spawn(move || {
            for () in begins {
                ring.prepare(Entry {
                    opcode: POLL_ADD,
                    fd,
                    operation_flags: POLLIN,
                    data: number::OTHERS,
                    ..Entry::default()
                });
                ring::submit(ring.own.as_fd(), 1).expect("it submits");
                does.send(()).expect("somebody waits for it");
            }
        })?;
    Ok((counter, begin, done))
}

impl Subject {
    fn new(folder: &std::path::Path, kind: &str) -> Result<Self, Failure> {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let near = TcpStream::connect(listener.local_addr()?)?;
        let far = listener.accept()?.0;
        let (pipe, pair) = (std::io::pipe, UnixStream::pair);
        let ring = Arc::new(Ring::new(kind)?);
        let subject = Self {
            other: (kind != "single")
                .then(|| polling_thread(&ring))
                .transpose()?,
            ring,
            pipes: [pipe()?, pipe()?, pipe()?, pipe()?],
            polled: eventfd(0, EventfdFlags::empty())?,
            counted: eventfd(0, EventfdFlags::empty())?,
            pairs: [pair()?, pair()?, pair()?],
            tcp: (near, far),
            listener,
            unix: UnixListener::bind(folder.join("listens"))?,
            words: Default::default(),
            header: Words::default(),
            hour: time(Duration::from_secs(3600)),
            times: Vec::new(),
            begun: Instant::now(),
        };
        let at = |words: &Words, index: usize| Arc::as_ptr(words) as u64 + 8 * index as u64;
        let (header, text) = (&subject.header, &subject.words[7]);
        let buffers = [at(text, 0), 8, at(text, 1), 8];
        let header_words = [0, 0, at(header, 8), 2, 0, 0, 0, 0];
        for (place, word) in header.iter().zip(header_words.into_iter().chain(buffers)) {
            place.store(word, Release);
        }
        let file = Some(subject.pipes[3].0.as_fd());
        ring::register_files(subject.ring.own.as_fd(), &[None, file], &[0; 2])?;
        subject.have_other_poll()?;
        for data in [
            number::POLL,
            number::POLLS,
            number::READ,
            number::COUNT,
            number::RECV,
            number::RECV_TCP,
            number::ACCEPTS,
            number::ACCEPT,
            number::HOUR,
            number::LIMITED,
            number::ASYNC,
            number::FIXED,
            number::MESSAGE,
        ] {
            subject.submit(data)?;
        }
        Ok(subject)
    }

    fn have_other_poll(&self) -> Result<(), Failure> {
        let Some((_, begin, done)) = &self.other else {
            return Ok(());
        };
        begin.send(())?;
        Ok(done.recv()?)
    }

    /// Submits one of the requests, and what is linked to it.
    fn submit(&self, data: u64) -> Result<(), Failure> {
        let entry = Entry {
            data,
            ..self.entry(data)
        };
        self.ring.prepare(entry);
        let count = match data {
            number::LIMITED => {
                self.ring.prepare(self.limit());
                2
            }
            _ => 1,
        };
        match ring::submit(self.ring.own.as_fd(), count)? == count {
            true => Ok(()),
            false => Err(format!("{data} was not submitted").into()),
        }
    }

    /// A request may last no longer than an hour.
    fn limit(&self) -> Entry {
        Entry {
            opcode: LINK_TIMEOUT,
            address: Arc::as_ptr(&self.hour) as u64,
            len_bytes: 1,
            data: number::LIMIT,
            ..Entry::default()
        }
    }

    fn entry(&self, data: u64) -> Entry {
        let read = |file: i32, words: usize, len_bytes| Entry {
            opcode: READ,
            fd: file,
            address: Arc::as_ptr(&self.words[words]) as u64,
            len_bytes,
            offset: u64::MAX,
            ..Entry::default()
        };
        let receive = |file: i32, words: usize| Entry {
            opcode: RECV,
            offset: 0,
            ..read(file, words, 100)
        };
        let waits = |opcode, fd| Entry {
            opcode,
            fd,
            ..Entry::default()
        };
        let (polled, counted) = (self.polled.as_raw_fd(), self.counted.as_raw_fd());
        let pipe = |index: usize| self.pipes[index].0.as_raw_fd();
        match data {
            number::POLL => Entry {
                operation_flags: POLLIN,
                ..waits(POLL_ADD, pipe(0))
            },
            number::POLLS => Entry {
                operation_flags: POLLIN,
                len_bytes: POLL_MULTI,
                ..waits(POLL_ADD, polled)
            },
            number::READ => read(pipe(1), 0, 100),
            number::COUNT => read(counted, 1, 8),
            number::MESSAGE => Entry {
                address: Arc::as_ptr(&self.header) as u64,
                len_bytes: 1,
                ..waits(RECVMSG, self.pairs[2].0.as_raw_fd())
            },
            number::RECV => receive(self.pairs[0].0.as_raw_fd(), 2),
            number::RECV_TCP => receive(self.tcp.0.as_raw_fd(), 3),
            number::ACCEPTS => Entry {
                options: ACCEPT_MULTI,
                ..waits(ACCEPT, self.listener.as_raw_fd())
            },
            number::ACCEPT => waits(ACCEPT, self.unix.as_raw_fd()),
            number::HOUR => Entry {
                opcode: TIMEOUT,
                ..self.limit()
            },
            number::LIMITED => Entry {
                flags: LINK,
                ..receive(self.pairs[1].0.as_raw_fd(), 4)
            },
            number::ASYNC => Entry {
                flags: ASYNC,
                ..read(pipe(2), 5, 100)
            },
            number::FIXED => Entry {
                flags: FIXED_FILE,
                ..read(1, 6, 100)
            },
            // It ends when three others have.
            number::AFTER => Entry {
                offset: 3,
                ..self.entry(number::HOUR)
            },
            _ => waits(NOP, 0),
        }
    }

    /// Insists on the next completions, in this order, and on none after them.
    fn expect(&self, wanted: &[(u64, Option<i32>, u32)]) -> Result<Vec<i32>, Failure> {
        let mut results = Vec::new();
        for (data, result, flags) in wanted {
            ring::wait(self.ring.own.as_fd(), 1)?;
            let seen = self.ring.take().ok_or("there is no completion")?;
            let wanted = Completion {
                data: *data,
                result: result.unwrap_or(seen.result),
                flags: *flags,
            };
            if seen != wanted || result.is_none() && seen.result < 0 {
                return Err(format!("{seen:x?} is not {wanted:x?}").into());
            }
            results.push(seen.result);
        }
        self.expect_none()?;
        Ok(results)
    }

    fn expect_none(&self) -> Result<(), Failure> {
        ring::reap(self.ring.own.as_fd())?;
        match self.ring.take() {
            None => Ok(()),
            Some(seen) => Err(format!("nobody has asked for {seen:x?}").into()),
        }
    }

    fn check(&mut self) -> Result<(), Failure> {
        self.expect_none()?;
        self.check_polls()?;
        self.check_reads()?;
        self.check_receives()?;
        self.check_accepts()?;
        // A timeout that is over after as many others.
        self.submit(number::AFTER)?;
        for _ in 0..2 {
            self.submit(number::NOP)?;
            self.expect(&[(number::NOP, Some(0), 0)])?;
        }
        self.submit(number::NOP)?;
        self.expect(&[(number::NOP, Some(0), 0), (number::AFTER, Some(0), 0)])?;
        Ok(())
    }

    fn check_polls(&mut self) -> Result<(), Failure> {
        let mut byte = [0];
        let (pipe, writer) = &mut self.pipes[0];
        writer.write_all(b"p")?;
        pipe.read_exact(&mut byte)?;
        self.expect(&[(number::POLL, Some(1), 0)])?;
        self.submit(number::POLL)?;
        if let Some((counter, ..)) = &self.other {
            rustix::io::write(counter, &1_u64.to_ne_bytes())?;
            self.expect(&[(number::OTHERS, Some(1), 0)])?;
            rustix::io::read(counter, &mut [0; 8])?;
            self.have_other_poll()?;
        }
        // It goes on after each.
        for _ in 0..3 {
            rustix::io::write(&self.polled, &1_u64.to_ne_bytes())?;
            self.expect(&[(number::POLLS, Some(1), MORE)])?;
            rustix::io::read(&self.polled, &mut [0; 8])?;
        }
        Ok(())
    }

    fn check_reads(&mut self) -> Result<(), Failure> {
        for (pipe, data, words) in [
            (1, number::READ, 0),
            (2, number::ASYNC, 5),
            (3, number::FIXED, 6),
        ] {
            let text = (data << 8 | 7).to_ne_bytes();
            self.pipes[pipe].1.write_all(&text)?;
            self.expect(&[(data, Some(8), 0)])?;
            self.expect_word(words, data << 8 | 7)?;
            self.submit(data)?;
        }
        rustix::io::write(&self.counted, &9_u64.to_ne_bytes())?;
        self.expect(&[(number::COUNT, Some(8), 0)])?;
        self.expect_word(1, 9)?;
        self.submit(number::COUNT)
    }

    fn check_receives(&mut self) -> Result<(), Failure> {
        self.pairs[0].1.write_all(&5_u64.to_ne_bytes())?;
        self.expect(&[(number::RECV, Some(8), 0)])?;
        self.expect_word(2, 5)?;
        self.submit(number::RECV)?;
        self.tcp.1.write_all(&6_u64.to_ne_bytes())?;
        self.expect(&[(number::RECV_TCP, Some(8), 0)])?;
        self.expect_word(3, 6)?;
        self.submit(number::RECV_TCP)?;
        let text = [31_u64, 32].map(u64::to_ne_bytes).concat();
        self.pairs[2].1.write_all(&text)?;
        self.expect(&[(number::MESSAGE, Some(16), 0)])?;
        self.expect_word(7, 31)?;
        self.submit(number::MESSAGE)?;
        self.pairs[1].1.write_all(&7_u64.to_ne_bytes())?;
        let canceled = (number::LIMIT, Some(ECANCELED), 0);
        self.expect(&[(number::LIMITED, Some(8), 0), canceled])?;
        self.expect_word(4, 7)?;
        self.submit(number::LIMITED)
    }

    fn check_accepts(&self) -> Result<(), Failure> {
        for _ in 0..2 {
            let near = TcpStream::connect(self.listener.local_addr()?)?;
            let accepted = self.expect(&[(number::ACCEPTS, None, MORE)])?;
            drop(near);
            self.close(accepted[0])?;
        }
        let near = UnixStream::connect_addr(&self.unix.local_addr()?)?;
        let accepted = self.expect(&[(number::ACCEPT, None, 0)])?;
        drop(near);
        self.close(accepted[0])?;
        self.submit(number::ACCEPT)
    }

    /// Closes a descriptor that the ring has made.
    fn close(&self, fd: i32) -> Result<(), Failure> {
        self.ring.prepare(Entry {
            opcode: CLOSE,
            fd,
            data: number::NOP,
            ..Entry::default()
        });
        ring::submit(self.ring.own.as_fd(), 1)?;
        self.expect(&[(number::NOP, Some(0), 0)]).map(drop)
    }

    fn expect_word(&self, words: usize, wanted: u64) -> Result<(), Failure> {
        match self.words[words][0].swap(0, Acquire) {
            word if word == wanted => Ok(()),
            word => Err(format!("{word} was read, not {wanted}").into()),
        }
    }

    /// Submits timeouts: relative, absolute, and to a time of day.
    fn set(&mut self, after: Duration) -> Result<(), Failure> {
        use rustix::time::{ClockId, clock_gettime};
        const ABSOLUTE: u32 = 1;
        const REALTIME: u32 = 1 << 3;
        self.begun = Instant::now();
        let now = |clock| {
            let now = clock_gettime(clock);
            Duration::new(now.tv_sec.cast_unsigned(), now.tv_nsec as u32)
        };
        let wanted = [
            (after, 0),
            (now(ClockId::Monotonic) + after, ABSOLUTE),
            (now(ClockId::Realtime) + after, ABSOLUTE | REALTIME),
        ];
        self.times = wanted.iter().map(|(at, _)| time(*at)).collect();
        for ((data, time), (_, flags)) in number::TIMES.zip(&self.times).zip(wanted) {
            self.ring.prepare(Entry {
                opcode: TIMEOUT,
                address: Arc::as_ptr(time) as u64,
                len_bytes: 1,
                operation_flags: flags,
                data,
                ..Entry::default()
            });
            ring::submit(self.ring.own.as_fd(), 1)?;
        }
        // The kernel has its copies.
        for word in self.times.iter().flat_map(|time| time.iter()) {
            word.store(u64::MAX, Release);
        }
        Ok(())
    }

    /// How long they took, those that go by no time of day.
    fn timed(&self) -> Result<Duration, Failure> {
        let mut ended = Vec::new();
        let mut last = Duration::ZERO;
        while ended.len() < number::TIMES.count() {
            ring::wait(self.ring.own.as_fd(), 1)?;
            let seen = self.ring.take().ok_or("there is no completion")?;
            if seen.result != ETIME || seen.flags != 0 || !number::TIMES.contains(&seen.data) {
                return Err(format!("{seen:x?} is no timeout that ends").into());
            }
            if seen.data != number::TIMES.end - 1 {
                last = self.begun.elapsed();
            }
            ended.push(seen.data);
        }
        ended.sort_unstable();
        ended.dedup();
        match ended.len() == number::TIMES.count() {
            true => Ok(last),
            false => Err("a timeout has ended twice".into()),
        }
    }
}
