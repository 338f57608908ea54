//! Descriptions of this very process that are dumped, closed and opened again.

use std::collections::HashMap;
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::rc::Rc;
use std::sync::atomic::{AtomicI32, Ordering};

use prost::Message as _;
use rustix::event::epoll;
use rustix::fs::{FileType, FlockOperation, OFlags, SealFlags};
use sys::process::Process;
use syscalls::Sysno;
use testkit::wait::{SOON, wait_until};

use super::table::Link;
use super::watched::Watched;
use super::{
    Description, DescriptionId, DumpContext, ErasedKind, Info, Kind, Open, Opens, RestoreContext,
    Stage, attributes, claim, status, unread,
};
use crate::script::{Layout, Script};
use crate::{Allow, Error, Result, ledger};

/// The next number for a descriptor; above those that tests get on their own.
static NUMBER: AtomicI32 = AtomicI32::new(300);

/// Which description of a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct At(usize);

/// A set of descriptions, each with a number that stays the same when it is opened again.
#[derive(Default)]
pub(crate) struct World {
    pub(crate) allow: Allow,
    entries: Vec<Entry>,
    /// What takes the place of a description, by name.
    pub(crate) inherited: Option<(&'static [u8], OwnedFd)>,
    spaces: Vec<Vec<u8>>,
    undo: Vec<Box<dyn FnOnce()>>,
}

struct Entry {
    number: i32,
    own: Option<OwnedFd>,
    dumped: Option<Dumped>,
    fdinfo: String,
}

struct Dumped {
    description: Box<dyn Description>,
    attributes: Option<Vec<u8>>,
}

fn pid() -> i32 {
    i32::try_from(std::process::id()).expect("pids are positive")
}

fn fdinfo(fd: i32) -> String {
    std::fs::read_to_string(format!("/proc/thread-self/fdinfo/{fd}")).expect("read fdinfo")
}

/// Puts `fd` at `number`, which is free.
fn renumber(fd: OwnedFd, number: i32) -> OwnedFd {
    let moved = rustix::io::fcntl_dupfd_cloexec(&fd, number).expect("dup");
    assert_eq!(moved.as_raw_fd(), number, "the number was taken");
    moved
}

/// Opens what `record` describes, with nothing else in the image.
pub(crate) fn open_alone<K: Kind>(record: &K::Record) -> Result<OwnedFd> {
    let mut restoring = Restoring {
        allow: Allow::default(),
        opened: Vec::new(),
        shared: HashMap::new(),
        seen: HashMap::new(),
        unix: crate::fd::unix::Deferred::default(),
        inherited: &None,
        spaces: &[],
        then: Vec::new(),
    };
    K::check(record)?;
    K::open(record, &mut restoring)
}

/// What an image says of its first description, if that is all of it.
pub(crate) fn decoded<K: Kind>(kind: &K, record: &K::Record) -> Result<Box<dyn Description>> {
    ErasedKind::decode(kind, DescriptionId(0), &record.encode_to_vec())
}

/// The description as an image has it: it says the same once it is encoded and decoded.
pub(crate) fn stored(
    kind: &dyn ErasedKind,
    id: DescriptionId,
    dumped: &dyn Description,
) -> Result<Box<dyn Description>> {
    let payload = dumped.encode();
    let decoded = kind.decode(id, &payload)?;
    assert_eq!(decoded.encode(), payload, "{}", kind.name());
    assert_eq!(decoded.describe(), dumped.describe());
    Ok(decoded)
}

impl World {
    /// Takes over a description.
    pub(crate) fn add(&mut self, own: impl Into<OwnedFd>) -> At {
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        self.entries.push(Entry {
            number,
            own: Some(renumber(own.into(), number)),
            dumped: None,
            fdinfo: String::new(),
        });
        At(self.entries.len() - 1)
    }

    /// Its descriptor's number, before and after.
    pub(crate) fn number(&self, at: At) -> i32 {
        self.entries[at.0].number
    }

    /// The description.
    pub(crate) fn get(&self, at: At) -> &OwnedFd {
        self.entries[at.0].own.as_ref().expect("still here")
    }

    /// Gives the description back.
    pub(crate) fn take(&mut self, at: At) -> OwnedFd {
        self.entries[at.0].own.take().expect("still here")
    }

    /// Dumps everything, as often as wanted.
    pub(crate) fn dump(&mut self) -> Result<()> {
        self.dump_changed(|_| {})
    }

    /// The same of descriptions that tell something else.
    pub(crate) fn dump_changed(&mut self, change: fn(&mut Open<'_>)) -> Result<()> {
        self.dump_with(change, &|| {})
    }

    /// Dumps everything, and calls `meanwhile` between the descriptions and the last look.
    pub(crate) fn dump_while(&mut self, meanwhile: &dyn Fn()) -> Result<()> {
        self.dump_with(|_| {}, meanwhile)
    }

    fn dump_with(&mut self, change: fn(&mut Open<'_>), meanwhile: &dyn Fn()) -> Result<()> {
        let fetches = self.entries.iter().map(|entry| {
            let own = entry.own.as_ref().expect("open").as_fd();
            move || status::dup(own)
        });
        let fetches = fetches.collect::<Vec<_>>();
        let opens = self.entries.iter().zip(&fetches).enumerate();
        let opens = opens.map(|(index, (entry, fetch))| {
            let fd = entry.number;
            let link = rustix::fs::readlink(format!("/proc/thread-self/fd/{fd}"), Vec::new());
            let link = link.expect("readlink").into_bytes();
            let stat = rustix::fs::fstat(entry.own.as_ref().expect("open")).expect("stat");
            let (info, _) = Info::parse(&fdinfo(fd)).expect("well formed");
            let id = DescriptionId(u32::try_from(index).expect("few"));
            let mut open = Open::new(id, (Process::own(), fd), (link, stat, info), fetch);
            change(&mut open);
            open
        });
        let opens = opens.collect::<Opens<'_>>();
        let mut dumping = Dumping {
            allow: &self.allow,
            opens: &opens,
            spaces: &mut self.spaces,
            undo: &mut self.undo,
            watched: Watched::default(),
        };
        let mut dumped = Vec::new();
        for open in opens.iter() {
            let link = Link {
                fd: open.fd,
                target: open.link.clone(),
                same: None,
            };
            unread::check(&open.process, &link, &self.allow, |_, _| {
                status::dup(open.own()?)
            })?;
            let kind = claim(open)?;
            ledger::fdinfo::check(kind, open)?;
            let description = kind.dump(open, &mut dumping)?;
            let description = stored(kind, open.id, &*description)?;
            let attributes = attributes::dump(open, &self.allow)?;
            dumped.push(Some(Dumped {
                description,
                attributes,
            }));
        }
        for open in opens.iter() {
            claim(open)?.check_among(open, &opens, &self.allow)?;
        }
        meanwhile();
        for (open, dumped) in opens.iter().zip(dumped.iter().flatten()) {
            dumped.description.check_last(open)?;
        }
        drop(opens);
        for (entry, dumped) in self.entries.iter_mut().zip(dumped) {
            entry.fdinfo = fdinfo(entry.number);
            entry.dumped = dumped;
        }
        Ok(())
    }

    /// What a dump that fails afterwards takes back.
    pub(crate) fn undo(&mut self) {
        self.undo.drain(..).rev().for_each(|undo| undo());
    }

    /// The kind of a dumped description and what people see of it.
    pub(crate) fn describe(&self, at: At) -> String {
        let description = self.description(at);
        format!("{} {}", description.name(), description.describe())
    }

    /// A description as it was dumped.
    pub(crate) fn description(&self, at: At) -> &dyn Description {
        let dumped = self.entries[at.0].dumped.as_ref();
        &*dumped.expect("dumped").description
    }

    /// Closes everything and opens it again.
    pub(crate) fn restore(&mut self) -> Result<()> {
        for entry in &mut self.entries {
            entry.own = None;
        }
        let mut restoring = Restoring {
            allow: self.allow.clone(),
            opened: Vec::new(),
            shared: HashMap::new(),
            seen: HashMap::new(),
            unix: crate::fd::unix::Deferred::default(),
            inherited: &self.inherited,
            spaces: &self.spaces,
            then: Vec::new(),
        };
        let dumped = self
            .entries
            .iter()
            .map(|entry| entry.dumped.as_ref().expect("dumped"));
        for dumped in dumped.clone() {
            dumped.description.prepare(&mut restoring)?;
        }
        for (entry, dumped) in self.entries.iter().zip(dumped.clone()) {
            let own = dumped.description.open(&mut restoring)?;
            restoring.opened.push(Rc::new(renumber(own, entry.number)));
        }
        for (index, dumped) in dumped.clone().enumerate() {
            let own = Rc::clone(&restoring.opened[index]);
            dumped.description.finish(own.as_fd(), &mut restoring)?;
            if let Some(payload) = &dumped.attributes {
                attributes::finish(payload, own.as_fd())?;
            }
        }
        for (index, dumped) in dumped.clone().enumerate() {
            let own = restoring.opened[index].as_fd();
            let description = &dumped.description;
            if description.acts_in(Stage::Enable, &self.allow) {
                description.act(Stage::Enable, own, &self.allow)?;
            }
        }
        let mut script = Script::default();
        for (entry, dumped) in self.entries.iter().zip(dumped) {
            dumped.description.in_task(entry.number, &mut script);
            if let Some(payload) = &dumped.attributes {
                attributes::in_pool(payload, entry.number, &mut script)?;
                attributes::in_task(payload, entry.number, false, &mut script)?;
            }
        }
        restoring.then.drain(..).for_each(|then| then());
        let opened = std::mem::take(&mut restoring.opened);
        for (entry, own) in self.entries.iter_mut().zip(opened) {
            entry.own = Some(Rc::into_inner(own).expect("the only one"));
        }
        self.try_act(&script)
    }

    /// Makes the calls of a task's script here.
    pub(crate) fn act(&self, script: &Script) {
        self.try_act(script)
            .unwrap_or_else(|error| panic!("{error}"));
    }

    fn try_act(&self, script: &Script) -> Result<()> {
        let layout = Layout {
            ops: abi::Addr(0),
            data: abi::Addr(0),
            words: abi::Addr(0),
            pool: &[],
            scripts: &[],
            area: abi::Span::default(),
            top: abi::Addr(0),
        };
        let (ops, data) = script.compile(&layout);
        for (op, step) in ops.chunks(abi::Op::BYTES).zip(&script.steps) {
            let words = op
                .chunks(8)
                .map(|word| word.try_into().expect("eight bytes"));
            let words = words.map(u64::from_le_bytes).collect::<Vec<_>>();
            let args = &words[2..8];
            let result = match step.call {
                Sysno::fcntl => self.fcntl(args, &data),
                Sysno::epoll_ctl => self.epoll_add(args, &data),
                Sysno::flock => self.flock(args),
                other => panic!("no kind needs {other}"),
            };
            result.map_err(|error| Error::kernel(step.to_string(), error))?;
        }
        Ok(())
    }

    fn by_number(&self, number: u64) -> BorrowedFd<'_> {
        let mut entries = self.entries.iter();
        let entry = entries.find(|entry| u64::try_from(entry.number) == Ok(number));
        entry
            .expect("one of ours")
            .own
            .as_ref()
            .expect("open")
            .as_fd()
    }

    fn fcntl(&self, args: &[u64], data: &[u8]) -> std::io::Result<()> {
        let own = self.by_number(args[0]);
        let number = |value: u64| i32::try_from(value).expect("small");
        match args[1] {
            4 => {
                let flags = OFlags::from_bits_retain(number(args[2]).cast_unsigned());
                Ok(rustix::fs::fcntl_setfl(own, flags)?)
            }
            6 => {
                let at = usize::try_from(args[2]).expect("small");
                let word = |at: usize| {
                    i64::from_le_bytes(data[at..at + 8].try_into().expect("eight bytes"))
                };
                // struct flock
                let (write, range) = (data[at] == 1, (word(at + 8), word(at + 16)));
                sys::fcntl::lock(own, sys::fcntl::Holder::Process, write, range)
            }
            10 => sys::fcntl::set_signal(own, number(args[2])),
            15 => {
                let at = usize::try_from(args[2]).expect("small");
                let word = |at: usize| {
                    i32::from_le_bytes(data[at..at + 4].try_into().expect("four bytes"))
                };
                let (kind, pid) = (word(at), word(at + 4));
                sys::fcntl::set_owner(own, sys::fcntl::Owner { kind, pid })
            }
            1033 => {
                let seals = SealFlags::from_bits_retain(number(args[2]).cast_unsigned());
                Ok(rustix::fs::fcntl_add_seals(own, seals)?)
            }
            other => panic!("fcntl {other}"),
        }
    }

    fn flock(&self, args: &[u64]) -> std::io::Result<()> {
        let how = match args[1] {
            5 => FlockOperation::NonBlockingLockShared,
            6 => FlockOperation::NonBlockingLockExclusive,
            other => panic!("flock {other}"),
        };
        Ok(rustix::fs::flock(self.by_number(args[0]), how)?)
    }

    fn epoll_add(&self, args: &[u64], data: &[u8]) -> std::io::Result<()> {
        assert_eq!(args[1], 1, "EPOLL_CTL_ADD");
        let at = usize::try_from(args[3]).expect("small");
        let events = u32::from_le_bytes(data[at..at + 4].try_into().expect("four bytes"));
        let value = u64::from_le_bytes(data[at + 4..at + 12].try_into().expect("eight bytes"));
        let events = epoll::EventFlags::from_bits_retain(events);
        let value = epoll::EventData::new_u64(value);
        let (own, target) = (self.by_number(args[0]), self.by_number(args[2]));
        Ok(epoll::add(own, target, value, events)?)
    }

    /// Dumps when no child of another test has the descriptors as well, as each has when it begins.
    fn dump_alone(&mut self) {
        wait_until("no other child to have them", SOON, || match self.dump() {
            Err(error) if error.to_string().contains("has its descriptor as well") => false,
            dumped => {
                dumped.expect("dump");
                true
            }
        });
    }

    /// Dumps, closes and opens everything; what fdinfo says must be the same.
    pub(crate) fn cycle(&mut self) {
        self.dump_alone();
        self.restore().expect("restore");
        for entry in &self.entries {
            let known = |text: &str| {
                let lines = text.lines().filter(|line| !line.starts_with("ino:"));
                let lines = lines.filter(|line| !line.starts_with("eventfd-id:"));
                let lines = lines.filter(|line| !line.starts_with("map_id:"));
                let lines = lines.filter(|line| !line.starts_with("it_value:"));
                let lines = lines.map(|line| match line.split_once(" ino:") {
                    Some((watch, _)) if line.starts_with("tfd:") => watch,
                    _ => line,
                });
                let mut lines = lines.map(str::to_owned).collect::<Vec<_>>();
                // The kernel lists what is watched in the order of addresses.
                lines.sort();
                lines
            };
            assert_eq!(known(&fdinfo(entry.number)), known(&entry.fdinfo));
        }
    }
}

struct Dumping<'a> {
    allow: &'a Allow,
    opens: &'a Opens<'a>,
    spaces: &'a mut Vec<Vec<u8>>,
    undo: &'a mut Vec<Box<dyn FnOnce()>>,
    watched: Watched,
}

impl DumpContext for Dumping<'_> {
    fn allow(&self) -> &Allow {
        self.allow
    }

    fn all(&self) -> &Opens<'_> {
        self.opens
    }

    fn at(&self, wanted: i32, fd: i32) -> Option<DescriptionId> {
        let found = self.opens.iter().find(|open| open.fd == fd);
        found.filter(|_| wanted == pid()).map(|open| open.id)
    }

    fn task(&self, tid: i32) -> Option<crate::fd::Task> {
        (tid == pid()).then_some(crate::fd::Task::Alive)
    }

    fn process(&self, _tid: i32) -> Option<i32> {
        Some(pid())
    }

    fn processes(&self) -> Vec<Process> {
        vec![Process::own()]
    }

    fn numbers(&self, id: DescriptionId) -> Vec<(i32, i32)> {
        vec![(pid(), self.opens[id.0 as usize].fd)]
    }

    fn add(&mut self, _process: &Process, _own: OwnedFd) -> Result<DescriptionId> {
        Err(Error::unsupported(pid(), "a description in flight"))
    }

    fn store(&mut self, file: OwnedFd, len_bytes: u64) -> Result<u32> {
        let mut bytes = vec![0; usize::try_from(len_bytes).expect("small")];
        let read = File::from(file).read_exact_at(&mut bytes, 0);
        read.map_err(|error| Error::kernel("store", error))?;
        self.spaces.push(bytes);
        Ok(u32::try_from(self.spaces.len() - 1).expect("few"))
    }

    fn on_failure(&mut self, undo: Box<dyn FnOnce()>) {
        self.undo.push(undo);
    }

    fn watched(&mut self) -> &mut Watched {
        &mut self.watched
    }
}

struct Restoring<'a> {
    allow: Allow,
    opened: Vec<Rc<OwnedFd>>,
    shared: HashMap<(u16, u64), Vec<OwnedFd>>,
    seen: HashMap<Vec<u8>, FileType>,
    unix: crate::fd::unix::Deferred,
    inherited: &'a Option<(&'static [u8], OwnedFd)>,
    spaces: &'a [Vec<u8>],
    then: Vec<Box<dyn FnOnce()>>,
}

impl RestoreContext for Restoring<'_> {
    fn allow(&self) -> &Allow {
        &self.allow
    }

    fn description(&self, id: DescriptionId) -> Result<BorrowedFd<'_>> {
        let own = self.opened.get(id.0 as usize);
        let own = own.ok_or_else(|| Error::corrupt(format!("{id:?}"), "is not open"))?;
        Ok(own.as_fd())
    }

    fn opened(&self) -> Vec<BorrowedFd<'_>> {
        self.opened.iter().map(|own| own.as_fd()).collect()
    }

    fn shared(&mut self) -> &mut HashMap<(u16, u64), Vec<OwnedFd>> {
        &mut self.shared
    }

    fn seen(&mut self) -> &mut HashMap<Vec<u8>, FileType> {
        &mut self.seen
    }

    fn load(&mut self, space: u32, file: BorrowedFd<'_>) -> Result<()> {
        let bytes = self.spaces.get(space as usize);
        let bytes = bytes.ok_or_else(|| Error::corrupt("space", "is not there"))?;
        let file = File::from(status::dup(file)?);
        let mut bytes = bytes.clone();
        bytes.resize(bytes.len().next_multiple_of(4096), 0);
        let written = file.write_all_at(&bytes, 0);
        written.map_err(|error| Error::kernel("load", error))
    }

    fn inherited(&self, wanted: &[u8]) -> Option<BorrowedFd<'_>> {
        let (name, own) = self.inherited.as_ref()?;
        (*name == wanted).then(|| own.as_fd())
    }

    fn make(&mut self, path: &std::path::Path, is_folder: bool) -> Result<bool> {
        let made = match is_folder {
            true => std::fs::create_dir(path),
            false => File::create_new(path).map(drop),
        };
        made.map_err(|error| Error::kernel(format!("make {}", path.display()), error))?;
        Ok(true)
    }

    fn unix(&mut self) -> &mut crate::fd::unix::Deferred {
        &mut self.unix
    }

    fn on_success(&mut self, then: Box<dyn FnOnce()>) {
        self.then.push(then);
    }
}
