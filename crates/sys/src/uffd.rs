//! userfaultfd: memory whose missing pages are filled from outside.
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};

use abi::{Addr, Span};
use bitflags::bitflags;
use linux_raw_sys::general as raw;
use rustix::ioctl::opcode;

/// `UFFDIO_POISON`, which no crate defines.
const POISON: u32 = opcode::read_write::<raw::uffdio_poison>(0xaa, 8);
/// `UFFDIO_CONTINUE_MODE_WP`, likewise.
const CONTINUE_MODE_WP: u64 = 2;

bitflags! {
    /// What a userfaultfd can do; asked for and answered by [`Uffd::api`].
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Features: u64 {
        /// Write faults on protected pages are told.
        const WP = raw::UFFD_FEATURE_PAGEFAULT_FLAG_WP as u64;
        /// A fork of the task is an event, and the child's memory stays registered.
        const EVENT_FORK = raw::UFFD_FEATURE_EVENT_FORK as u64;
        /// `mremap` is an event.
        const EVENT_REMAP = raw::UFFD_FEATURE_EVENT_REMAP as u64;
        /// `MADV_DONTNEED` and `MADV_REMOVE` are events.
        const EVENT_REMOVE = raw::UFFD_FEATURE_EVENT_REMOVE as u64;
        /// Missing pages of hugetlbfs.
        const MISSING_HUGETLBFS = raw::UFFD_FEATURE_MISSING_HUGETLBFS as u64;
        /// Missing pages of shared memory.
        const MISSING_SHMEM = raw::UFFD_FEATURE_MISSING_SHMEM as u64;
        /// `munmap` is an event.
        const EVENT_UNMAP = raw::UFFD_FEATURE_EVENT_UNMAP as u64;
        /// A fault is a `SIGBUS` instead of an event.
        const SIGBUS = raw::UFFD_FEATURE_SIGBUS as u64;
        /// Fault events name the thread.
        const THREAD_ID = raw::UFFD_FEATURE_THREAD_ID as u64;
        /// Pages of hugetlbfs that are cached but not mapped.
        const MINOR_HUGETLBFS = raw::UFFD_FEATURE_MINOR_HUGETLBFS as u64;
        /// Pages of shared memory that are cached but not mapped.
        const MINOR_SHMEM = raw::UFFD_FEATURE_MINOR_SHMEM as u64;
        /// Fault events give the address to the byte.
        const EXACT_ADDRESS = raw::UFFD_FEATURE_EXACT_ADDRESS as u64;
        /// Write protection of hugetlbfs and shared memory.
        const WP_HUGETLBFS_SHMEM = raw::UFFD_FEATURE_WP_HUGETLBFS_SHMEM as u64;
        /// Write protection of pages that are not there yet.
        const WP_UNPOPULATED = raw::UFFD_FEATURE_WP_UNPOPULATED as u64;
        /// [`Uffd::poison`].
        const POISON = raw::UFFD_FEATURE_POISON as u64;
        /// Write faults resolve themselves and are found by a scan of the page map.
        const WP_ASYNC = raw::UFFD_FEATURE_WP_ASYNC as u64;
        /// `UFFDIO_MOVE`.
        const MOVE = raw::UFFD_FEATURE_MOVE as u64;
    }
}

bitflags! {
    /// Which faults of a range are handed over.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
    pub struct Modes: u64 {
        /// Faults on pages that are missing.
        const MISSING = raw::UFFDIO_REGISTER_MODE_MISSING as u64;
        /// Writes to pages that are write-protected.
        const WP = raw::UFFDIO_REGISTER_MODE_WP as u64;
        /// Faults on pages that are cached but not mapped.
        const MINOR = raw::UFFDIO_REGISTER_MODE_MINOR as u64;
    }
}

/// One event, as [`Uffd::events`] reads it.
#[derive(Debug)]
pub enum Event {
    /// A thread waits for the page that holds `addr`.
    Fault {
        /// The address, of the page unless [`Features::EXACT_ADDRESS`] was asked for.
        addr: Addr,
        /// The thread wants to write.
        write: bool,
        /// The page is there but write-protected.
        protected: bool,
        /// The page is cached but not mapped.
        minor: bool,
    },
    /// The task forked; this stands for the child's memory.
    Fork(Uffd),
    /// A mapping moved.
    Remap {
        /// Where it was.
        from: Addr,
        /// Where it is.
        to: Addr,
        /// Its length.
        bytes: u64,
    },
    /// The contents of a span were given up.
    Remove(Span),
    /// A span was unmapped.
    Unmap(Span),
    /// An event with a number that is not known here.
    Unknown(u8),
}

/// A userfaultfd: of this process when created here, of another when fetched from it.
#[derive(Debug)]
pub struct Uffd(OwnedFd);

impl From<OwnedFd> for Uffd {
    fn from(fd: OwnedFd) -> Self {
        Self(fd)
    }
}

impl From<Uffd> for OwnedFd {
    fn from(uffd: Uffd) -> Self {
        uffd.0
    }
}

impl AsFd for Uffd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl Uffd {
    /// Creates a userfaultfd for this process's own memory, non-blocking and close-on-exec.
    ///
    /// # Errors
    /// `EPERM` without privileges where the system reserves it; `ENOSYS`. See userfaultfd(2).
    pub fn create() -> io::Result<Self> {
        Self::create_with(0)
    }

    /// The same for faults of user code alone (`UFFD_USER_MODE_ONLY`), which takes no privilege.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub fn create_for_user_mode() -> io::Result<Self> {
        const UFFD_USER_MODE_ONLY: libc::c_int =
            linux_raw_sys::general::UFFD_USER_MODE_ONLY as libc::c_int;
        Self::create_with(UFFD_USER_MODE_ONLY)
    }

    fn create_with(flags: libc::c_int) -> io::Result<Self> {
        let flags = flags | libc::O_CLOEXEC | libc::O_NONBLOCK;
        // SAFETY: the call takes no pointers.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        match i32::try_from(fd) {
            Ok(fd) if fd >= 0 => {
                // SAFETY: the kernel has just given out this descriptor, and nothing else owns it.
                Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
            }
            _ => Err(io::Error::last_os_error()),
        }
    }

    /// Opens the conversation, once, before anything else; returns what the kernel can do.
    ///
    /// # Errors
    /// `EINVAL` for a feature that the kernel does not have, and the second time. See
    /// ioctl_userfaultfd(2), as for all that follow.
    pub fn api(&self, wanted: Features) -> io::Result<Features> {
        let mut argument = raw::uffdio_api {
            api: raw::UFFD_API.into(),
            features: wanted.bits(),
            ioctls: 0,
        };
        self.call(linux_raw_sys::ioctl::UFFDIO_API, &mut argument)?;
        Ok(Features::from_bits_retain(argument.features))
    }

    /// What its owner asked for when it opened the conversation, maybe in another process.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidInput`] for a descriptor that is no userfaultfd, or of which the
    /// conversation was not opened; those of reading /proc/self/fdinfo.
    pub fn enabled(&self) -> io::Result<Features> {
        let path = crate::procfs::path(format_args!("self/fdinfo/{}", self.0.as_raw_fd()));
        let told = std::fs::read_to_string(path)?;
        enabled(&told).ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    /// Hands over the faults of `span`, which must be page-aligned and wholly mapped.
    ///
    /// # Errors
    /// `EINVAL` for mappings of a kind that cannot be registered or when nothing is mapped, `EBUSY`
    /// when another userfaultfd has it, `ESRCH` when the process is gone.
    pub fn register(&self, span: Span, modes: Modes) -> io::Result<()> {
        let mut argument = raw::uffdio_register {
            range: range(span),
            mode: modes.bits(),
            ioctls: 0,
        };
        self.call(linux_raw_sys::ioctl::UFFDIO_REGISTER, &mut argument)
    }

    /// Takes `span` back out and wakes who waits in it.
    ///
    /// # Errors
    /// `EINVAL` when nothing is mapped there, `ESRCH` when the process is gone.
    pub fn unregister(&self, span: Span) -> io::Result<()> {
        self.call(linux_raw_sys::ioctl::UFFDIO_UNREGISTER, &mut range(span))
    }

    /// Wakes the threads that wait for pages of `span`.
    ///
    /// # Errors
    /// `EINVAL` for a span that is not page-aligned.
    pub fn wake(&self, span: Span) -> io::Result<()> {
        self.call(linux_raw_sys::ioctl::UFFDIO_WAKE, &mut range(span))
    }

    /// Fills missing pages from `to` on with `bytes`, a whole number of pages, and returns how
    /// many bytes were placed: fewer when the process's mappings changed meanwhile. With `wake`,
    /// threads that wait for them go on.
    ///
    /// # Errors
    /// Those of the first page: `EEXIST` when it is there already, `ENOENT` when nothing
    /// registered is mapped there, `EAGAIN` to try again, `ESRCH` when the process is gone,
    /// `ENOMEM`.
    pub fn copy(&self, to: Addr, bytes: &[u8], wake: bool) -> io::Result<usize> {
        let mut argument = raw::uffdio_copy {
            dst: to.0,
            src: bytes.as_ptr().expose_provenance() as u64,
            len: bytes.len() as u64,
            mode: if wake {
                0
            } else {
                raw::UFFDIO_COPY_MODE_DONTWAKE.into()
            },
            copy: 0,
        };
        let outcome = self.call(linux_raw_sys::ioctl::UFFDIO_COPY, &mut argument);
        Ok(placed(outcome, argument.copy)? as usize)
    }

    /// What [`Self::copy`] does; with `protect`, the pages are write-protected from the moment in
    /// which they are there.
    ///
    /// # Errors
    /// As [`Self::copy`].
    pub fn copy_as(&self, to: Addr, bytes: &[u8], wake: bool, protect: bool) -> io::Result<usize> {
        let flag = |set: bool, flag: u32| if set { u64::from(flag) } else { 0 };
        let mut argument = raw::uffdio_copy {
            dst: to.0,
            src: bytes.as_ptr().expose_provenance() as u64,
            len: bytes.len() as u64,
            mode: flag(!wake, raw::UFFDIO_COPY_MODE_DONTWAKE)
                | flag(protect, raw::UFFDIO_COPY_MODE_WP),
            copy: 0,
        };
        let outcome = self.call(linux_raw_sys::ioctl::UFFDIO_COPY, &mut argument);
        Ok(placed(outcome, argument.copy)? as usize)
    }

    /// Maps the pages of the mapping's own file, which are in memory, over the missing pages of
    /// `span`, and wakes who waits; a mapping of one's own gets copies when it is written to. With
    /// `protect` they are write-protected. Returns the bytes done as [`Self::copy`] does.
    ///
    /// # Errors
    /// As [`Self::copy`]; `EFAULT` where the file has no such page.
    pub fn map_cached(&self, span: Span, protect: bool) -> io::Result<u64> {
        let mut argument = raw::uffdio_continue {
            range: range(span),
            mode: if protect { CONTINUE_MODE_WP } else { 0 },
            mapped: 0,
        };
        let outcome = self.call(linux_raw_sys::ioctl::UFFDIO_CONTINUE, &mut argument);
        placed(outcome, argument.mapped)
    }

    /// Maps zero pages over the missing pages of `span`; returns the bytes done as
    /// [`Self::copy`] does.
    ///
    /// # Errors
    /// As [`Self::copy`].
    pub fn zero(&self, span: Span, wake: bool) -> io::Result<u64> {
        let mode = if wake {
            0
        } else {
            raw::UFFDIO_ZEROPAGE_MODE_DONTWAKE.into()
        };
        let mut argument = raw::uffdio_zeropage {
            range: range(span),
            mode,
            zeropage: 0,
        };
        let outcome = self.call(linux_raw_sys::ioctl::UFFDIO_ZEROPAGE, &mut argument);
        placed(outcome, argument.zeropage)
    }

    /// Sets or lifts the write protection of the pages of `span`.
    ///
    /// # Errors
    /// `ENOENT` when it is not registered for that, `EAGAIN` to try again, `ESRCH` when the
    /// process is gone.
    pub fn write_protect(&self, span: Span, protect: bool) -> io::Result<()> {
        let mut argument = raw::uffdio_writeprotect {
            range: range(span),
            mode: u64::from(protect),
        };
        self.call(linux_raw_sys::ioctl::UFFDIO_WRITEPROTECT, &mut argument)
    }

    /// Marks the missing pages of `span` as lost: who touches them gets `SIGBUS`. Returns the
    /// bytes done as [`Self::copy`] does.
    ///
    /// # Errors
    /// As [`Self::copy`]; `ENOTTY` or `EINVAL` on kernels before 6.6.
    pub fn poison(&self, span: Span, wake: bool) -> io::Result<u64> {
        let mut argument = raw::uffdio_poison {
            range: range(span),
            mode: u64::from(!wake),
            updated: 0,
        };
        placed(self.call(POISON, &mut argument), argument.updated)
    }

    /// Whether nobody has the memory any more that it was made for, where nothing is registered for
    /// write protection.
    #[must_use]
    pub fn is_orphaned(&self) -> bool {
        // It is not registered for that, so nothing changes.
        let page = Span::new(Addr(1 << 20), abi::PAGE_BYTES);
        let asked = self.write_protect(page, false);
        asked.is_err_and(|error| error.raw_os_error() == Some(libc::ESRCH))
    }

    /// Reads the events that have come, at most 16, and appends them to `events`; returns whether
    /// there were any.
    ///
    /// # Errors
    /// Those of read(2), but not `EAGAIN`.
    pub fn events(&self, events: &mut Vec<Event>) -> io::Result<bool> {
        let mut bytes = [0_u8; 16 * MESSAGE_BYTES];
        let read = match rustix::io::read(&self.0, &mut bytes) {
            Err(rustix::io::Errno::AGAIN) => return Ok(false),
            other => other?,
        };
        events.extend(bytes[..read].chunks_exact(MESSAGE_BYTES).map(event));
        Ok(read > 0)
    }

    /// The same, as many as have room in `room`, [`EVENT_WORDS`] each: faults first, then what has
    /// changed otherwise. They stay there until somebody clears it.
    /// Where these words are shared and locked in memory, whoever has them has an event from the
    /// moment in which it counts as read, also if this process is killed then; all others are left
    /// as they were.
    ///
    /// # Errors
    /// As [`Self::events`].
    pub fn events_in(&self, room: &[AtomicU64], events: &mut Vec<Event>) -> io::Result<bool> {
        let bytes = room.len() / EVENT_WORDS * MESSAGE_BYTES;
        // SAFETY: the kernel writes to these words, which are reached by atomics only.
        let read = unsafe { libc::read(self.0.as_raw_fd(), room.as_ptr() as *mut _, bytes) };
        let read = match usize::try_from(read) {
            Ok(read) => read / MESSAGE_BYTES,
            Err(_) => {
                let error = io::Error::last_os_error();
                return match error.kind() {
                    io::ErrorKind::WouldBlock => Ok(false),
                    _ => Err(error),
                };
            }
        };
        let told = room.chunks_exact(EVENT_WORDS).take(read);
        events.extend(told.map(|words| event(&message(words))));
        Ok(read > 0)
    }

    fn call<T>(&self, number: u32, argument: &mut T) -> io::Result<()> {
        // SAFETY: each caller above passes the structure that its number stands for; the kernel
        // writes nothing but the structure and, in a process whose memory was registered for it,
        // pages that were missing. Source slices are borrowed by the caller for the call.
        let answer = unsafe {
            libc::ioctl(
                self.0.as_raw_fd(),
                libc::Ioctl::from(number),
                &raw mut *argument,
            )
        };
        if answer == 0 {
            Ok(())
        } else {
            Err(io::Error::last_os_error())
        }
    }
}

/// Which pages of a file of huge pages are there, from `offset` on; the kernel tells of such files
/// in no other way than that it maps those.
///
/// # Errors
/// Those of mmap(2), userfaultfd(2) and ioctl_userfaultfd(2).
pub fn huge_pages_of(
    file: BorrowedFd<'_>,
    (offset, bytes): (u64, u64),
    page_bytes: u64,
) -> io::Result<Vec<bool>> {
    let invalid = |_| io::Error::from(io::ErrorKind::InvalidInput);
    let len = usize::try_from(bytes).map_err(invalid)?;
    let offset = libc::off_t::try_from(offset).map_err(invalid)?;
    let (prot, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED);
    let flags = flags | libc::MAP_NORESERVE;
    // SAFETY: it is new memory, wherever the kernel has room, of a file that is held.
    let at = unsafe { libc::mmap(ptr::null_mut(), len, prot, flags, file.as_raw_fd(), offset) };
    if at == libc::MAP_FAILED {
        return Err(io::Error::last_os_error());
    }
    let there = huge_pages_at(Span::new(Addr(at.addr() as u64), bytes), page_bytes);
    // SAFETY: nothing refers to what was mapped above.
    unsafe { libc::munmap(at, len) };
    there
}

fn huge_pages_at(span: Span, page_bytes: u64) -> io::Result<Vec<bool>> {
    let uffd = Uffd::create()?;
    uffd.api(Features::MINOR_HUGETLBFS)?;
    uffd.register(span, Modes::MINOR)?;
    let starts = (span.start.0..span.end.0).step_by(page_bytes.max(1) as usize);
    let is_there = |start| match uffd.map_cached(Span::new(Addr(start), page_bytes), false) {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EFAULT) => Ok(false),
        Err(error) => Err(error),
    };
    starts.map(is_there).collect()
}

/// What fdinfo tells of a userfaultfd: the version of the conversation, the features, the calls.
fn enabled(told: &str) -> Option<Features> {
    /// How the kernel notes for itself that the conversation was opened.
    const INITIALIZED: u64 = 1 << 31;
    let line = told.lines().find_map(|line| line.strip_prefix("API:\t"))?;
    let features = u64::from_str_radix(line.split(':').nth(1)?, 16).ok()?;
    (features & INITIALIZED != 0).then(|| Features::from_bits_retain(features & !INITIALIZED))
}

const MESSAGE_BYTES: usize = size_of::<raw::uffd_msg>();
/// What an event takes of the room for [`Uffd::events_in`].
pub const EVENT_WORDS: usize = MESSAGE_BYTES / 8;

fn message(words: &[AtomicU64]) -> [u8; MESSAGE_BYTES] {
    let mut message = [0; MESSAGE_BYTES];
    for (bytes, word) in message.chunks_exact_mut(8).zip(words) {
        bytes.copy_from_slice(&word.load(Ordering::Acquire).to_ne_bytes());
    }
    message
}

/// What somebody has read into `room` by [`Uffd::events_in`] and not cleared: what was given up or
/// unmapped.
#[must_use]
pub fn given_up_in(room: &[AtomicU64]) -> Vec<Span> {
    let told = room.chunks_exact(EVENT_WORDS).map(message);
    // What stands for descriptors is left alone: they were another process's.
    let given_up = told.filter(|message| {
        matches!(
            u32::from(message[0]),
            raw::UFFD_EVENT_REMOVE | raw::UFFD_EVENT_UNMAP
        )
    });
    given_up
        .filter_map(|message| match event(&message) {
            Event::Remove(span) | Event::Unmap(span) => Some(span),
            _ => None,
        })
        .collect()
}

/// Understands a message that the kernel has written, once.
fn event(message: &[u8]) -> Event {
    let word = |at: usize| {
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&message[at..at + 8]);
        u64::from_ne_bytes(bytes)
    };
    let span = || Span {
        start: Addr(word(8)),
        end: Addr(word(16)),
    };
    match u32::from(message[0]) {
        raw::UFFD_EVENT_PAGEFAULT => Event::Fault {
            addr: Addr(word(16)),
            write: word(8) & u64::from(raw::UFFD_PAGEFAULT_FLAG_WRITE) != 0,
            protected: word(8) & u64::from(raw::UFFD_PAGEFAULT_FLAG_WP) != 0,
            minor: word(8) & u64::from(raw::UFFD_PAGEFAULT_FLAG_MINOR) != 0,
        },
        raw::UFFD_EVENT_FORK => {
            // SAFETY: the kernel has put this descriptor here for who reads the event, who is told
            // of it by this message alone.
            let fd = unsafe { OwnedFd::from_raw_fd(word(8) as u32 as i32) };
            Event::Fork(Uffd(fd))
        }
        raw::UFFD_EVENT_REMAP => Event::Remap {
            from: Addr(word(8)),
            to: Addr(word(16)),
            bytes: word(24),
        },
        raw::UFFD_EVENT_REMOVE => Event::Remove(span()),
        raw::UFFD_EVENT_UNMAP => Event::Unmap(span()),
        _ => Event::Unknown(message[0]),
    }
}

fn range(span: Span) -> raw::uffdio_range {
    raw::uffdio_range {
        start: span.start.0,
        len: span.bytes(),
    }
}

/// The kernel tells how far it came even when it fails; only a failure of the first page is one.
fn placed(outcome: io::Result<()>, bytes: i64) -> io::Result<u64> {
    match (outcome, u64::try_from(bytes)) {
        (Ok(()) | Err(_), Ok(bytes)) if bytes > 0 => Ok(bytes),
        (Ok(()), _) => Ok(0),
        (Err(errno), _) => Err(errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_those_of_the_header() {
        assert_eq!(POISON, 0xc020_aa08);
        let Ok(header) = std::fs::read_to_string("/usr/include/linux/userfaultfd.h") else {
            return;
        };
        let number = |name: &str| {
            let line = header
                .lines()
                .find(|line| line.starts_with(&format!("#define {name}\t")));
            let digits = line?.rsplit_once("(0x")?.1.trim_end_matches(')');
            u32::from_str_radix(digits, 16).ok()
        };
        assert_eq!(number("_UFFDIO_COPY"), Some(raw::_UFFDIO_COPY));
        assert_eq!(number("_UFFDIO_POISON").unwrap_or(8), 8);
    }

    #[test]
    fn partial_progress_is_not_a_failure() {
        let failed = |errno| Err(io::Error::from_raw_os_error(errno));
        assert_eq!(placed(Ok(()), 8192).expect("whole"), 8192);
        assert_eq!(placed(failed(libc::EAGAIN), 4096).expect("a part"), 4096);
        let nothing = placed(failed(libc::EAGAIN), 0).expect_err("nothing");
        assert_eq!(nothing.raw_os_error(), Some(libc::EAGAIN));
        let there = placed(failed(libc::EEXIST), -17).expect_err("first page");
        assert_eq!(there.raw_os_error(), Some(libc::EEXIST));
    }

    #[test]
    fn the_conversation_opens_once() {
        let uffd = match Uffd::create() {
            Err(error) if error.raw_os_error() == Some(libc::EPERM) => {
                return eprintln!("skipped: userfaultfd needs privileges here");
            }
            other => other.expect("a userfaultfd"),
        };
        assert!(uffd.enabled().is_err(), "nothing was asked for yet");
        let offered = uffd.api(Features::empty()).expect("first");
        assert!(offered.contains(Features::MISSING_SHMEM));
        assert_eq!(uffd.enabled().expect("told"), Features::empty());
        let again = uffd.api(Features::empty()).expect_err("second");
        assert_eq!(again.raw_os_error(), Some(libc::EINVAL));
        assert!(!uffd.events(&mut Vec::new()).expect("no event"));
    }

    #[test]
    fn events_are_told_apart() {
        let mut message = [0_u8; MESSAGE_BYTES];
        message[0] = 0x12;
        message[8] = 1;
        message[16..24].copy_from_slice(&0x7000_u64.to_ne_bytes());
        let addr = Addr(0x7000);
        let fault = Event::Fault {
            addr,
            write: true,
            protected: false,
            minor: false,
        };
        let told = |message: &[u8]| format!("{:?}", event(message));
        assert_eq!(told(&message), format!("{fault:?}"));
        message[0] = 0x15;
        message[8..16].copy_from_slice(&0x5000_u64.to_ne_bytes());
        let span = Span {
            start: Addr(0x5000),
            end: addr,
        };
        assert_eq!(told(&message), format!("{:?}", Event::Remove(span)));
        let room = [const { AtomicU64::new(0) }; 3 * EVENT_WORDS];
        for (word, bytes) in room[EVENT_WORDS..].iter().zip(message.chunks_exact(8)) {
            word.store(
                u64::from_ne_bytes(bytes.try_into().expect("8 bytes")),
                Ordering::Release,
            );
        }
        assert_eq!(given_up_in(&room), [span]);
        message[0] = 0x77;
        assert_eq!(told(&message), "Unknown(119)");
    }
}
