//! Steps that make what a task has without a descriptor: System V IPC, contexts of asynchronous
//! I/O, and what it shares by clone(2).
use std::collections::VecDeque;
use std::collections::btree_map::{BTreeMap, Entry};
use std::fs::{self, File};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::sync::atomic::{AtomicU8, Ordering};

use rustix::fs::Mode;
use sys::io_class::{self, Class};
use sys::kcmp::{self, Shared};
use sys::process::Process;
use sys::{sem, shm};

use super::{StepResult, Task, opened};
use crate::calls::aio::{Context, Operation, Request};
use crate::calls::clone::{DESCRIPTORS, DIRECTORIES, IO_CONTEXT, SEMAPHORE_UNDO};
use crate::storm::step::{Action, NUMBERED, PAGE_BYTES, SHARES, TASKS};
use crate::subjects::Failure;

/// How often a semaphore can be taken.
const VALUE: i32 = 1000;
/// Where tasks note what outlives them.
const MADE: &str = "made";
const IPC_PRIVATE: i32 = 0;
const HUGE_BYTES: u64 = 2 << 20;

/// What a task has by number.
#[derive(Default)]
pub(super) struct IpcObjects {
    /// Sets of semaphores, which all tasks may use.
    sets: BTreeMap<u8, i32>,
    segments: BTreeMap<u8, Segment>,
    contexts: BTreeMap<u8, Requests>,
    /// Which of the ledger's undo lists it has.
    pub undo: Option<u8>,
    /// True if it has an I/O context to share.
    has_io_context: bool,
    /// True if it was made by clone(2), of which the C library knows nothing.
    pub is_cloned: bool,
}

struct Segment {
    id: i32,
    pages: u16,
    page_bytes: u64,
    attached: shm::Attached,
    /// Which pages of it are mapped.
    mapped: Vec<bool>,
}

impl Segment {
    fn address(&self, page: u16) -> u64 {
        self.attached.start() + u64::from(page) * self.page_bytes
    }
}

/// The task's own memory.
fn own_memory() -> io::Result<File> {
    File::options()
        .read(true)
        .write(true)
        .open("/proc/thread-self/mem")
}

/// A context, and the events that it must have.
struct Requests {
    context: Context,
    posted: VecDeque<u64>,
    next: u64,
}

/// What clone(2) calls what [`SHARES`] says.
pub(super) fn flags(shares: u8) -> u64 {
    let flags = SHARES
        .iter()
        .zip([DESCRIPTORS, DIRECTORIES, SEMAPHORE_UNDO, IO_CONTEXT]);
    let wanted = flags.filter(|(bit, _)| shares & **bit != 0);
    wanted.fold(0, |all, (_, flag)| all | flag)
}

/// What the page of a segment begins with.
fn stamp(segment: u8, page: u16) -> [u8; 8] {
    (((u64::from(segment) + 1) << 32) + u64::from(page) + 1).to_le_bytes()
}

impl IpcObjects {
    /// What a child has of it, in an undo list of its own or in the same one.
    pub(super) fn forked(self, undo: Option<u8>, is_cloned: bool) -> Self {
        Self {
            undo,
            is_cloned: self.is_cloned || is_cloned,
            ..self
        }
    }

    /// Makes sure of an I/O context: a priority is kept in one.
    pub(super) fn have_io_context(&mut self) -> io::Result<()> {
        if !self.has_io_context {
            io_class::set(Class::BestEffort(5))?;
            self.has_io_context = true;
        }
        Ok(())
    }

    /// Tells whether a child would have what no child can.
    pub(super) fn forbids_forks(&self) -> bool {
        !self.contexts.is_empty()
    }
}

impl Task {
    pub(super) fn change_numbered(&mut self, action: &Action) -> StepResult {
        match *action {
            Action::Unshare { shares } => self.unshare(shares),
            Action::Settle { folder, mask } => {
                let path = self.folder.join(format!("folder-{folder}"));
                fs::create_dir_all(&path)?;
                rustix::process::chdir(&path)?;
                rustix::process::umask(Mode::from_bits_truncate(mask.into()));
                Ok(())
            }
            Action::Semaphores { set } if set < NUMBERED => self.make_set(set),
            Action::Borrow { set, count } => self.borrow(set, count),
            Action::Segment {
                segment,
                pages,
                doomed,
                huge,
            } => self.attach(segment, pages, doomed, huge),
            Action::Carve {
                segment,
                at,
                pages,
                protection,
            } => self.carve(segment, at..at + pages, protection),
            Action::Requests {
                context,
                room,
                post,
                fetch,
            } => self.use_context(context, room, (post, fetch)),
            _ => Ok(()),
        }
    }

    fn unshare(&mut self, shares: u8) -> StepResult {
        let mut flags = flags(shares);
        if self.has_threads() {
            // They would keep what is to be undone.
            flags &= !SEMAPHORE_UNDO;
        }
        crate::calls::clone::unshare(flags)?;
        if flags & SEMAPHORE_UNDO != 0
            && let Some(undo) = self.numbered.undo.take()
        {
            self.ledger.leave_undo(undo);
        }
        Ok(())
    }

    /// Notes what is to be removed at last.
    pub(super) fn note(&self, what: &str, id: impl std::fmt::Display) -> io::Result<()> {
        let mut options = File::options();
        let mut file = options
            .append(true)
            .create(true)
            .open(self.folder.join(MADE))?;
        writeln!(file, "{what} {id}")
    }

    fn make_set(&mut self, number: u8) -> StepResult {
        let set = sem::Set::new(1)?;
        let id = set.number();
        set.set(0, VALUE)?;
        self.note("set", id)?;
        // It is removed when all is over.
        std::mem::forget(set);
        self.ledger.set_semaphore(number, VALUE as u64);
        self.numbered.sets.insert(number, id);
        Ok(())
    }

    fn borrow(&mut self, set: u8, count: u8) -> StepResult {
        let Some(&id) = self.numbered.sets.get(&set) else {
            return Ok(());
        };
        let Some(undo) = self.numbered.undo.or_else(|| self.ledger.new_undo()) else {
            return Ok(());
        };
        self.numbered.undo = Some(undo);
        if self.ledger.semaphore(set) >= u64::from(count) {
            sem::borrow(id, 0, count.into())?;
            self.ledger.borrow(undo, set, count.into());
        }
        Ok(())
    }

    fn attach(&mut self, number: u8, pages: u16, doomed: bool, huge: bool) -> StepResult {
        let page_bytes = if huge { HUGE_BYTES } else { PAGE_BYTES as u64 };
        let made = shm::create(
            IPC_PRIVATE,
            u64::from(pages) * page_bytes,
            0o600,
            huge.then_some(page_bytes),
        );
        let id = match made {
            // There are too few huge pages.
            Err(_) if huge => return Ok(()),
            made => made?,
        };
        let attached = shm::Attached::new(id)?;
        match doomed {
            true => shm::remove(id)?,
            false => self.note("segment", id)?,
        }
        let segment = Segment {
            id,
            pages,
            page_bytes,
            attached,
            mapped: vec![true; pages.into()],
        };
        let memory = own_memory()?;
        for page in (0..pages).filter(|page| page % 3 != 1) {
            memory.write_all_at(&stamp(number, page), segment.address(page))?;
        }
        self.numbered.segments.insert(number, segment);
        Ok(())
    }

    fn carve(&mut self, number: u8, pages: Range<u16>, protection: Option<u8>) -> StepResult {
        let segment = self.numbered.segments.get_mut(&number);
        let Some(segment) = segment.filter(|segment| pages.end <= segment.pages) else {
            return Ok(());
        };
        let all = usize::from(pages.start)..usize::from(pages.end);
        if !segment.mapped[all.clone()].iter().all(|mapped| *mapped) {
            return Ok(());
        }
        let [start, end] = [pages.start, pages.end].map(|at| u64::from(at) * segment.page_bytes);
        segment
            .attached
            .change(start..end, protection.map(i32::from))?;
        segment.mapped[all].fill(protection.is_some());
        Ok(())
    }

    fn use_context(&mut self, number: u8, room: u16, (post, fetch): (u16, u16)) -> StepResult {
        static INTO: [AtomicU8; 16] = [const { AtomicU8::new(0) }; 16];
        if number >= NUMBERED {
            return Ok(());
        }
        let own = match self.numbered.contexts.entry(number) {
            Entry::Occupied(own) => own.into_mut(),
            Entry::Vacant(place) => place.insert(Requests {
                context: Context::new(room.max(1).into())?,
                posted: VecDeque::new(),
                next: 1,
            }),
        };
        let zeros = File::open("/dev/zero")?;
        for _ in 0..post {
            let request = Request::new(Operation::Read, &zeros, &INTO, 0, own.next);
            match own.context.submit(&mut [request]) {
                Ok(_) => own.posted.push_back(own.next),
                // There is no room.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => return Err(error.into()),
            }
            own.next += 1;
        }
        let most = usize::from(fetch).min(own.posted.len());
        if most == 0 {
            return Ok(());
        }
        let fetched = own.context.fetch(most, most, None)?;
        let fetched = fetched.iter().map(|event| (event.data, event.result));
        let wanted = own.posted.drain(..most);
        let wanted = wanted.map(|data| (data, INTO.len() as i64));
        let (fetched, wanted) = (fetched.collect::<Vec<_>>(), wanted.collect::<Vec<_>>());
        match fetched == wanted {
            true => Ok(()),
            false => Err(format!("context {number} has {fetched:?} and not {wanted:?}").into()),
        }
    }

    /// What of it is not as it must be.
    pub(super) fn check_numbered(&self) -> Result<Vec<String>, Failure> {
        let mut wrong = Vec::new();
        for (set, id) in &self.numbered.sets {
            let (is, must) = (sem::value(*id, 0)?, self.ledger.semaphore(*set));
            if u64::try_from(is) != Ok(must) {
                wrong.push(format!("the semaphore of set {set} is {is} and not {must}"));
            }
        }
        for (number, segment) in &self.numbered.segments {
            let memory = own_memory()?;
            let mapped = (0..segment.pages).zip(&segment.mapped);
            for (page, _) in mapped.filter(|(_, mapped)| **mapped) {
                let mut is = [0; 8];
                memory.read_exact_at(&mut is, segment.address(page))?;
                let must = match page % 3 {
                    1 => [0; 8],
                    _ => stamp(*number, page),
                };
                if is != must {
                    wrong.push(format!("page {page} of segment {number} begins {is:?}"));
                }
            }
        }
        for (number, own) in &self.numbered.contexts {
            let [_, room, head, tail, ..] = own.context.words();
            let [room, head, tail] = [room, head, tail].map(|word| word.load(Ordering::Acquire));
            let events = (tail + room - head) % room;
            // As many as there are, or fewer where some have not come into the ring yet.
            let posted = own.posted.len() as u32;
            if events != posted {
                wrong.push(format!("context {number} has {events} of {posted} events"));
            }
        }
        Ok(wrong)
    }

    /// What it has by number, and with whom it shares.
    pub(super) fn describe_numbered(&self) -> Result<Vec<String>, Failure> {
        let mut told = Vec::new();
        for (number, segment) in &self.numbered.segments {
            // It is gone where its last part was unmapped.
            told.push(format!(
                "segment {number}: {:?}",
                shm::stat(segment.id).ok()
            ));
        }
        for (number, own) in &self.numbered.contexts {
            let words = own.context.words();
            let words = words.each_ref().map(|word| word.load(Ordering::Acquire));
            // The first is the kernel's own number.
            told.push(format!("context {number}: {:?}", &words[1..]));
        }
        told.push(format!("in {}", std::env::current_dir()?.display()));
        let own = Process::own();
        for other in (0..TASKS).filter(|other| *other != self.number) {
            let others = self.ledger.pid(other).map(u32::cast_signed);
            let others = others.map(Process::new);
            let whats = [Shared::Descriptors, Shared::Directories, Shared::Io];
            let has = |what: &Shared| *what != Shared::Io || self.numbered.has_io_context;
            for what in whats.into_iter().filter(has) {
                let is_shared = |others: &Process| {
                    kcmp::compare(&own, others, what).is_ok_and(|one| one.is_eq())
                };
                if others.as_ref().is_some_and(is_shared) {
                    told.push(format!("shares {what:?} with {other}"));
                }
            }
        }
        Ok(told)
    }

    /// Removes what would outlive all tasks.
    pub(super) fn clean(&self) -> io::Result<()> {
        let made = fs::read_to_string(self.folder.join(MADE)).unwrap_or_default();
        for (what, id) in made.lines().filter_map(|line| line.split_once(' ')) {
            // It may be gone already.
            let _ = match (what, id.parse()) {
                ("set", Ok(id)) => sem::remove(id),
                ("segment", Ok(id)) => shm::remove(id),
                ("mount", _) => opened::unmount(id),
                _ => opened::remove_queue(id),
            };
        }
        Ok(())
    }
}
