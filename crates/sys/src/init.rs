//! The first process of a new pid namespace, made before anybody else is in there: it waits until
//! a process of that namespace tells it what to run.
//!
//! A namespace has no other processes before its first one (pid_namespaces(7)), so who is to work
//! inside of it cannot make that one. It is a copy of the process outside, and takes over from the
//! one inside what a child of that one would have: descriptors, namespaces, clocks and the
//! restore area.

use std::io::{self, Error};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use abi::{Addr, Span};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitOptions, WaitStatus, pidfd_open, pidfd_send_signal, waitpid,
};
use rustix::thread::futex;

use crate::procfs;
use crate::restore_area::RestoreArea;
use crate::spawn::{self, Entry};

/// The number of the first process of a pid namespace, in there.
pub const NUMBER: i32 = 1;

/// The first process of a pid namespace, which waits for [`Init::begin`]. The copy of this value in
/// a process of the namespace tells it to begin; the other one, outside, waits for its end.
#[derive(Debug)]
pub struct Init {
    orders: &'static Orders,
    pid: Pid,
    pidfd: OwnedFd,
}

/// The start of the first process.
#[derive(Clone, Copy, Debug)]
pub struct Start {
    /// Where it begins.
    pub entry: Entry,
    /// The restore area.
    pub area: Span,
    /// The descriptor of that area's memory.
    pub memory: RawFd,
    /// The descriptor of its time namespace, where it has another one than its maker.
    pub clocks: Option<RawFd>,
    /// The kinds of namespaces that it takes over besides (`CLONE_NEWNET` and the like).
    pub namespaces: i32,
}

/// Memory that the processes of one [`Init`] share.
#[derive(Debug, Default)]
#[repr(C)]
struct Orders {
    state: AtomicU32,
    /// The error number of what failed.
    failed: AtomicI32,
    /// The process that tells, by its number in the namespace.
    teller: AtomicI32,
    /// The number behind that process's highest descriptor.
    files: AtomicI32,
    memory: AtomicI32,
    /// -1 for none.
    clocks: AtomicI32,
    namespaces: AtomicI32,
    area: [AtomicU64; 2],
    entry: [AtomicU64; 3],
}

/// How long the one waits for the other before it looks whether that has ended.
const LOOK: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

/// Tells whether the process of a pidfd has ended.
fn has_ended(pidfd: BorrowedFd<'_>) -> bool {
    let mut ended = [PollFd::new(&pidfd, PollFlags::IN)];
    poll(&mut ended, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// The states of [`Orders`].
mod state {
    pub const NEW: u32 = 0;
    pub const READY: u32 = 1;
    pub const TOLD: u32 = 2;
    pub const BEGUN: u32 = 3;
    pub const FAILED: u32 = 4;
    pub const JOINING: u32 = 5;
    pub const JOINED: u32 = 6;
}

impl Init {
    /// Makes the namespace and its first process, which ends with this one as long as nothing else
    /// is said: until it begins, where it is a child of this process's parent (`is_sibling`).
    /// Numbers that the kernel chooses in the namespace begin above `last`.
    ///
    /// # Errors
    /// `EPERM` without `CAP_SYS_ADMIN`; as clone(2), mmap(2) and write(2).
    pub fn make(last: i32, is_sibling: bool) -> io::Result<Self> {
        let orders = Orders::map()?;
        let last = last.to_string();
        let maker = pidfd_open(rustix::process::getpid(), PidfdFlags::empty())?;
        let old = spawn::set_mask(u64::MAX);
        let made = spawn::clone_init(is_sibling);
        if let Ok(None) = made {
            wait_and_begin(orders, &maker, &last);
        }
        spawn::set_mask(old);
        let pid = made?.expect("the new process is elsewhere");
        let init = Self {
            orders,
            pid,
            // Nobody has reaped it, who does not know of it.
            pidfd: pidfd_open(pid, PidfdFlags::empty())?,
        };
        match init.wait_past(state::NEW) {
            state::READY => Ok(init),
            _ => {
                init.end();
                Err(init.error())
            }
        }
    }

    /// Its number in the namespace of its maker.
    #[must_use]
    pub fn pid(&self) -> Pid {
        self.pid
    }

    /// The same as a pidfd.
    #[must_use]
    pub fn pidfd(&self) -> BorrowedFd<'_> {
        self.pidfd.as_fd()
    }

    /// Has it begin, from a process in its namespace whose descriptors, namespaces and limits
    /// it takes over.
    ///
    /// # Errors
    /// `EALREADY` when it was told before; `EEXIST` where it has something else at the place of the
    /// restore area; as pidfd_getfd(2), setns(2) and mmap(2).
    pub fn begin(&self, start: &Start) -> io::Result<()> {
        use rustix::process::{Resource, getrlimit, prlimit};
        let first = Pid::from_raw(NUMBER);
        prlimit(first, Resource::Nofile, getrlimit(Resource::Nofile))?;
        let files = crate::numbers::of_own_files()?;
        let files = files.into_iter().max().unwrap_or(0) + 1;
        let orders = self.orders;
        orders.files.store(files, Ordering::Relaxed);
        orders.memory.store(start.memory, Ordering::Relaxed);
        let clocks = start.clocks.unwrap_or(-1);
        orders.clocks.store(clocks, Ordering::Relaxed);
        let (area, entry) = (start.area, start.entry);
        let words = [area.start, area.end, entry.code, entry.ops, entry.header];
        for (to, word) in orders.area.iter().chain(&orders.entry).zip(words) {
            to.store(word.0, Ordering::Relaxed);
        }
        match self.tell(state::TOLD, start.namespaces)? {
            state::BEGUN => Ok(()),
            _ => Err(self.error()),
        }
    }

    /// Has it enter the namespaces of the kinds `namespaces` and the mounts of this process, which
    /// is in its pid namespace.
    ///
    /// # Errors
    /// `EALREADY` when it has begun; as setns(2).
    pub fn join(&self, namespaces: i32) -> io::Result<()> {
        match self.tell(state::JOINING, namespaces)? {
            state::JOINED => Ok(()),
            _ => Err(self.error()),
        }
    }

    /// Brings the process, which waits, to the state `to`, and gives the one behind that.
    fn tell(&self, to: u32, namespaces: i32) -> io::Result<u32> {
        let orders = self.orders;
        let from = match orders.state.load(Ordering::Acquire) {
            state @ (state::READY | state::JOINED) => state,
            _ => return Err(Error::from_raw_os_error(libc::EALREADY)),
        };
        let teller = rustix::process::getpid().as_raw_nonzero().get();
        orders.teller.store(teller, Ordering::Relaxed);
        let namespaces = libc::CLONE_NEWNS | namespaces;
        orders.namespaces.store(namespaces, Ordering::Relaxed);
        let state = &orders.state;
        let told = state.compare_exchange(from, to, Ordering::Release, Ordering::Relaxed);
        if told.is_err() {
            return Err(Error::from_raw_os_error(libc::EALREADY));
        }
        wake(state);
        Ok(self.wait_past(to))
    }

    /// Waits for its end, in its maker.
    ///
    /// # Errors
    /// As waitpid(2).
    pub fn wait(&self) -> io::Result<WaitStatus> {
        let ended = rustix::io::retry_on_intr(|| waitpid(Some(self.pid), WaitOptions::empty()))?;
        ended.map_or_else(|| unreachable!("it waits"), |(_, status)| Ok(status))
    }

    /// Kills it, and with it all that is in its namespace, and waits for that.
    pub fn end(&self) {
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        if self.wait().is_err() {
            // It is its parent's to reap.
            let mut ended = [PollFd::new(&self.pidfd, PollFlags::IN)];
            let _ = rustix::io::retry_on_intr(|| poll(&mut ended, None));
        }
    }

    /// Waits until the state is another one than `old`, or the process has ended.
    fn wait_past(&self, old: u32) -> u32 {
        loop {
            let seen = self.orders.state.load(Ordering::Acquire);
            if seen != old || self.has_ended() {
                return seen;
            }
            wait_while(&self.orders.state, old, Some(LOOK));
        }
    }

    /// Tells whether it has ended.
    fn has_ended(&self) -> bool {
        has_ended(self.pidfd.as_fd())
    }

    fn error(&self) -> Error {
        match self.orders.failed.load(Ordering::Relaxed) {
            0 => Error::other("the first process of the namespace has ended"),
            errno => Error::from_raw_os_error(errno),
        }
    }
}

impl Orders {
    /// Maps them, for ever, where all copies of this process share them.
    fn map() -> io::Result<&'static Self> {
        use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
        let none = std::ptr::null_mut();
        let prot = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: the kernel chooses an address that is free.
        let at = unsafe { mmap_anonymous(none, size_of::<Self>(), prot, MapFlags::SHARED)? };
        let at = NonNull::new(at.cast::<Self>()).expect("no mapping is at 0");
        // SAFETY: the mapping stays, is aligned to pages and full of zeros, which are valid.
        Ok(unsafe { at.as_ref() })
    }
}

/// The life of the new process. It makes system calls alone: it is a copy that fork(3) of the C
/// library knows nothing of.
fn wait_and_begin(orders: &Orders, maker: &OwnedFd, last: &str) -> ! {
    let told = prepare(maker, last).and_then(|()| {
        change(orders, state::READY);
        loop {
            match orders.state.load(Ordering::Acquire) {
                state @ (state::READY | state::JOINED) => {
                    wait_while(&orders.state, state, Some(LOOK));
                }
                state::JOINING => {
                    enter_namespaces(orders)?;
                    change(orders, state::JOINED);
                }
                _ => break take_over(orders),
            }
            // Of a maker that is no parent, no signal tells.
            if has_ended(maker.as_fd()) {
                break Err(Error::from_raw_os_error(libc::ESRCH));
            }
        }
    });
    match told {
        Ok(entry) => {
            crate::own::leave_rseq();
            change(orders, state::BEGUN);
            spawn::enter(entry)
        }
        Err(error) => {
            let errno = error.raw_os_error().unwrap_or(libc::EIO);
            orders.failed.store(errno, Ordering::Relaxed);
            change(orders, state::FAILED);
            crate::fork::exit_now(1)
        }
    }
}

fn change(orders: &Orders, state: u32) {
    orders.state.store(state, Ordering::Release);
    wake(&orders.state);
}

/// Ties it to its maker, and has numbers begin above `last`.
fn prepare(maker: &OwnedFd, last: &str) -> io::Result<()> {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL))?;
    // One that has ended before sends nothing, and has no number here that could tell it.
    if has_ended(maker.as_fd()) {
        return Err(Error::from_raw_os_error(libc::ESRCH));
    }
    // The file is about the namespace of its writer.
    procfs::write("sys/kernel/ns_last_pid", last)
}

/// Enters the namespaces of the teller.
fn enter_namespaces(orders: &Orders) -> io::Result<()> {
    let teller = Pid::from_raw(orders.teller.load(Ordering::Relaxed));
    let teller = teller.ok_or_else(|| Error::from_raw_os_error(libc::ESRCH))?;
    let teller = pidfd_open(teller, PidfdFlags::empty())?;
    let namespaces = orders.namespaces.load(Ordering::Relaxed);
    // SAFETY: nothing in this process's memory changes.
    match unsafe { libc::setns(teller.as_raw_fd(), namespaces) } {
        0 => Ok(()),
        _ => Err(Error::last_os_error()),
    }
}

/// Takes over what a child of the teller would have.
fn take_over(orders: &Orders) -> io::Result<Entry> {
    let teller = orders.teller.load(Ordering::Relaxed);
    let files = orders.files.load(Ordering::Relaxed);
    crate::fork::close_all_but(&[]);
    let call = |number: libc::c_long, args: [i32; 3]| {
        // SAFETY: these calls are about descriptors alone, of which this process has none yet.
        let result = unsafe { libc::syscall(number, args[0], args[1], args[2]) };
        match result {
            ..0 => Err(Error::last_os_error()),
            result => Ok(result as RawFd),
        }
    };
    let pidfd = call(libc::SYS_pidfd_open, [teller, 0, 0])?;
    call(libc::SYS_dup3, [pidfd, files, libc::O_CLOEXEC])?;
    call(libc::SYS_close, [pidfd, 0, 0])?;
    let namespaces = orders.namespaces.load(Ordering::Relaxed);
    call(libc::SYS_setns, [files, namespaces, 0])?;
    for number in 0..files {
        match call(libc::SYS_pidfd_getfd, [files, number, 0]) {
            Ok(got) if got == number => {}
            Ok(got) => {
                call(libc::SYS_dup3, [got, number, libc::O_CLOEXEC])?;
                call(libc::SYS_close, [got, 0, 0])?;
            }
            Err(error) if error.raw_os_error() == Some(libc::EBADF) => {}
            Err(error) => return Err(error),
        }
    }
    call(libc::SYS_close, [files, 0, 0])?;
    let clocks = orders.clocks.load(Ordering::Relaxed);
    if clocks >= 0 {
        call(libc::SYS_setns, [clocks, libc::CLONE_NEWTIME, 0])?;
    }
    let word = |word: &AtomicU64| Addr(word.load(Ordering::Relaxed));
    let [start, end] = orders.area.each_ref().map(word);
    // SAFETY: the teller keeps its descriptor open until this process has begun.
    let memory = unsafe { BorrowedFd::borrow_raw(orders.memory.load(Ordering::Relaxed)) };
    std::mem::forget(RestoreArea::map(Span { start, end }, memory)?);
    let [code, ops, header] = orders.entry.each_ref().map(word);
    Ok(Entry { code, ops, header })
}

/// Waits as long as the word, which processes share, is `value`; until somebody wakes this one, or
/// no longer than `patience`.
fn wait_while(word: &AtomicU32, value: u32, patience: Option<Timespec>) {
    // Who waits looks at the word again, whatever has ended the wait.
    let _ = futex::wait(word, futex::Flags::empty(), value, patience.as_ref());
}

fn wake(word: &AtomicU32) {
    let _ = futex::wake(word, futex::Flags::empty(), 1);
}
