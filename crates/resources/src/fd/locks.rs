//! Locks on files: flock(2), and fcntl(2)'s of processes and of descriptions; leases.
//!
//! What `F_OFD_SETLK` took is taken again by the restorer. Other locks say which process took them:
//! that one does it again.
//!
//! - What: file locks and leases
//! - Kept: with `--file-locks`: locks of flock(2), of processes and of descriptions (fcntl(2)), and
//!   leases.
//! - Refused: "it holds a file lock" (`--file-locks`); "lock …" (one that /proc tells in words that
//!   are not known, as of a lease that is just being broken).
//! - CRIU 4.2: the same, with `--file-locks`.

use std::collections::HashSet;
use std::os::fd::BorrowedFd;

use syscalls::Sysno;

use super::Info;
use super::table::Row;
use crate::script::{Arg, Script};
use crate::{Allow, Error, Result};

/// A lock that is held.
#[derive(Clone, Copy, PartialEq, Eq, prost::Message)]
pub struct Lock {
    /// The descriptor through which a process took it; 0 for a description's own.
    #[prost(int32, tag = "1")]
    pub fd: i32,
    /// Who holds it, and how much of the file it covers.
    #[prost(enumeration = "Style", tag = "2")]
    pub style: i32,
    /// Whether it keeps readers out.
    #[prost(bool, tag = "3")]
    pub write: bool,
    /// The first byte.
    #[prost(uint64, tag = "4")]
    pub start: u64,
    /// How many bytes; 0 for all up to the end, wherever that moves.
    #[prost(uint64, tag = "5")]
    pub len_bytes: u64,
    /// The process that took it; 0 where that is not known any more, -1 where it does not matter.
    #[prost(sint32, tag = "6")]
    pub pid: i32,
}

/// Who holds a lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum Style {
    /// The description, on the whole file (`flock`).
    Flock = 0,
    /// The description, on a part (`F_OFD_SETLK`).
    Description = 1,
    /// The process, on a part (`F_SETLK`).
    Process = 2,
    /// The description: it is told before others open the file (`F_SETLEASE`).
    Lease = 3,
}

/// The locks of a process.
#[derive(Clone, PartialEq, prost::Message)]
struct ProcessLocks {
    #[prost(message, repeated, tag = "1")]
    locks: Vec<Lock>,
}

const F_SETLK: i32 = libc::F_SETLK;
const F_OFD_SETLK: i32 = libc::F_OFD_SETLK;
const F_RDLCK: u16 = libc::F_RDLCK as u16;
const F_WRLCK: u16 = libc::F_WRLCK as u16;

/// Reads the value of a line "lock: 1: FLOCK  ADVISORY  WRITE 35 fe:00:11 0 EOF" of fdinfo; of a
/// lease, "LEASE  ACTIVE  READ 35 …". `None` for a delegation, and for a lease that is just broken.
fn parse(text: &str) -> Option<Lock> {
    let mut words = text.split_whitespace().skip(1);
    let style = match words.next()? {
        "FLOCK" => Style::Flock,
        "OFDLCK" => Style::Description,
        "POSIX" => Style::Process,
        "LEASE" => Style::Lease,
        _ => return None,
    };
    if words.next()? != "ACTIVE" && style == Style::Lease {
        return None;
    }
    let write = match words.next()? {
        "READ" => false,
        "WRITE" => true,
        _ => return None,
    };
    let pid = words.next()?.parse().ok()?;
    let start: u64 = words.nth(1)?.parse().ok()?;
    let len_bytes = match words.next()? {
        "EOF" => 0,
        last => last
            .parse::<u64>()
            .ok()?
            .checked_sub(start)?
            .checked_add(1)?,
    };
    Some(Lock {
        fd: 0,
        style: style.into(),
        write,
        start,
        len_bytes,
        pid,
    })
}

fn all(
    info: &Info,
    allow: &Allow,
    refuse: impl Fn(&str, Option<&'static str>) -> Error,
) -> Result<Vec<Lock>> {
    let mut locks = Vec::new();
    for line in info.lines("lock") {
        let lock = parse(line).ok_or_else(|| refuse(&format!("lock {line}"), None))?;
        if !allow.file_locks {
            return Err(refuse("it holds a file lock", Some("--file-locks")));
        }
        locks.push(lock);
    }
    Ok(locks)
}

/// The processes that have locks and leases, as /proc/locks tells; none where it is not there: on a
/// kernel without locks on files, and in a /proc of processes alone (`subset=pid`). None as well
/// where the kernel needs several reads to tell: a lock that somebody gives back between two of
/// them hides one that comes later in the list.
#[must_use]
pub fn holders() -> Option<HashSet<i32>> {
    let file = std::fs::File::open(sys::procfs::path("locks")).ok()?;
    let text = one_piece(&file).ok()??;
    let text = String::from_utf8(text).ok()?;
    Some(text.lines().filter_map(holder).collect())
}

/// What a list of the kernel's says, where one read gives all of it. Its pieces are pages at most,
/// and end before the first entry for which there is no room.
fn one_piece(list: &std::fs::File) -> std::io::Result<Option<Vec<u8>>> {
    const PIECE_BYTES: usize = 4096;
    const LINE_BYTES: usize = 256;
    let mut text = vec![0; PIECE_BYTES];
    let read = rustix::io::read(list, &mut text)?;
    text.truncate(read);
    let is_whole = read + LINE_BYTES < PIECE_BYTES;
    // An entry with all who wait for its lock may be longer.
    Ok((is_whole && rustix::io::read(list, &mut [0])? == 0).then_some(text))
}

/// The process of "1: POSIX  ADVISORY  WRITE 35 fe:00:11 0 EOF"; of one that waits for it, "1: ->
/// POSIX  …", as well.
fn holder(line: &str) -> Option<i32> {
    let mut words = line.split_whitespace();
    words.find(|word| ["READ", "WRITE"].contains(word))?;
    words.next()?.parse().ok()
}

/// Whether somebody has a lease on the file behind the description of `info`.
pub(super) fn has_lease(info: &Info) -> bool {
    leases(info).next().is_some()
}

/// Whether somebody has a lease for writing on the file: the next one who opens it waits until it
/// is given back.
pub(super) fn has_write_lease(info: &Info) -> bool {
    leases(info).any(|line| line.split_whitespace().any(|word| word == "WRITE"))
}

/// What fdinfo says of leases.
fn leases(info: &Info) -> impl Iterator<Item = &str> {
    let lines = info.lines("lock");
    lines.filter(|line| line.split_whitespace().nth(1) == Some("LEASE"))
}

/// The locks that the description of `info` holds itself.
pub(super) fn of_description(
    info: &Info,
    allow: &Allow,
    refuse: impl Fn(&str, Option<&'static str>) -> Error,
) -> Result<Vec<Lock>> {
    let mut locks = all(info, allow, refuse)?;
    locks.retain(|lock| lock.style() != Style::Process);
    Ok(locks)
}

/// The payload of [`super::tags::LOCKS`] for task `pid` with the descriptors `rows`; `None` when
/// it holds none.
///
/// # Errors
/// [`Error::Unsupported`] for leases, and for any lock without `--file-locks`.
pub fn dump_process(pid: i32, rows: &[Row], allow: &Allow) -> Result<Option<Vec<u8>>> {
    let mut payload = ProcessLocks::default();
    for row in rows.iter().filter(|row| row.info.rest.contains("lock:")) {
        let place = format!("fd {} ({})", row.fd, String::from_utf8_lossy(&row.link));
        let refuse = |why: &str, allow| Error::Unsupported {
            pid,
            what: place.clone(),
            why: why.to_owned(),
            allow,
        };
        for mut lock in all(&row.info, allow, refuse)? {
            lock.fd = row.fd;
            // Every copy of the descriptor tells of the same lock.
            let same = |known: &Lock| Lock { fd: 0, ..*known } == Lock { fd: 0, ..lock };
            let copies = payload.locks.iter().filter(|known| same(known));
            let known = copies.filter_map(|known| rows.iter().find(|row| row.fd == known.fd));
            let known = known.into_iter().any(|other| same_file(other, row));
            if lock.style() == Style::Process && !known {
                payload.locks.push(lock);
            }
        }
    }
    let payload = Some(payload).filter(|payload| !payload.locks.is_empty());
    Ok(payload.map(|payload| prost::Message::encode_to_vec(&payload)))
}

fn same_file(one: &Row, other: &Row) -> bool {
    (one.stat.st_dev, one.stat.st_ino) == (other.stat.st_dev, other.stat.st_ino)
}

fn decode(payload: &[u8]) -> Result<Vec<Lock>> {
    let payload: ProcessLocks =
        image::strict::decode(payload).map_err(|what| Error::corrupt("locks", what))?;
    Ok(payload.locks)
}

/// One line for people.
///
/// # Errors
/// [`Error::Corrupt`].
pub fn describe(payload: &[u8]) -> Result<String> {
    let locks = decode(payload)?;
    let told = locks.iter().map(|lock| {
        let told = lock.describe();
        format!("{told} by fd {}", lock.fd)
    });
    Ok(told.collect::<Vec<_>>().join(", "))
}

/// Adds the calls by which the task of a [`dump_process`] takes its locks again, once its
/// descriptors have their numbers.
///
/// # Errors
/// [`Error::Corrupt`].
pub fn in_process(payload: &[u8], script: &mut Script) -> Result<()> {
    for lock in decode(payload)? {
        if lock.style() != Style::Process {
            return Err(Error::corrupt("locks", "one that is not the process's"));
        }
        lock.set(lock.fd, F_SETLK, script);
    }
    Ok(())
}

impl Lock {
    /// Takes a description's own lock, unless a task has to.
    pub(super) fn take(&self, own: BorrowedFd<'_>) -> Result<()> {
        use sys::fcntl::Holder;
        let result = match self.style() {
            Style::Flock | Style::Lease => Ok(()),
            Style::Description => {
                let range = (self.start.cast_signed(), self.len_bytes.cast_signed());
                sys::fcntl::lock(own, Holder::Description, self.write, range)
            }
            Style::Process => return Err(Error::corrupt("locks", "a process's on a description")),
        };
        result.map_err(|error| Error::kernel(format!("take {}", self.describe()), error))
    }

    /// Adds the call by which a task takes a lock on a part of the file that it has as `fd`.
    fn set(&self, fd: i32, command: i32, script: &mut Script) {
        let kind = if self.write { F_WRLCK } else { F_RDLCK };
        // struct flock: type, whence, (hole), start, length, pid, (hole)
        let mut bytes = [0; 32];
        bytes[0..2].copy_from_slice(&kind.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.start.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.len_bytes.to_le_bytes());
        let at = script.bytes(&bytes);
        script.call(Sysno::fcntl, [fd.into(), command.into(), at.into()]);
        script.note(format!("lock fd {fd}"));
    }

    /// Adds the call by which a task that has opened the description as `fd` takes its own lock
    /// again, which nobody could do before.
    pub(super) fn take_late(&self, fd: i32, script: &mut Script) {
        match self.style() {
            Style::Description => self.set(fd, F_OFD_SETLK, script),
            _ => self.take_in_task(fd, script),
        }
    }

    /// Adds the call by which the process that took a description's own lock takes it again, if it
    /// has to. The description is open as `fd`.
    pub(super) fn take_in_task(&self, fd: impl Into<Arg>, script: &mut Script) {
        const LOCK_SH: u32 = linux_raw_sys::general::LOCK_SH;
        const LOCK_EX: u32 = linux_raw_sys::general::LOCK_EX;
        const LOCK_NB: u32 = linux_raw_sys::general::LOCK_NB;
        const F_SETLEASE: u32 = linux_raw_sys::general::F_SETLEASE;
        match self.style() {
            Style::Flock => {
                let how = if self.write { LOCK_EX } else { LOCK_SH };
                script.call(Sysno::flock, [fd.into(), (how | LOCK_NB).into()]);
            }
            Style::Lease => {
                let kind = u32::from(if self.write { F_WRLCK } else { F_RDLCK });
                script.call(Sysno::fcntl, [fd.into(), F_SETLEASE.into(), kind.into()]);
            }
            _ => return,
        }
        script.note(self.describe());
    }

    /// "a flock for writing", for people.
    pub(super) fn describe(&self) -> String {
        let write = if self.write { "writing" } else { "reading" };
        let range = format!("from {} ({} bytes)", self.start, self.len_bytes);
        match self.style() {
            Style::Flock => format!("a flock for {write}"),
            Style::Description => format!("a description's lock for {write} {range}"),
            Style::Process => format!("a lock for {write} {range}"),
            Style::Lease => format!("a lease for {write}"),
        }
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn who_has_a_lock_is_told() {
        let told = [
            ("1: POSIX  ADVISORY  WRITE 35 fe:00:11 0 EOF", Some(35)),
            ("1: -> POSIX  ADVISORY  READ  7 fe:00:11 0 EOF", Some(7)),
            ("2: LEASE  ACTIVE    READ  9 fe:00:12 0 EOF", Some(9)),
            ("3: OFDLCK ADVISORY  READ  -1 fe:00:12 0 EOF", Some(-1)),
            ("", None),
        ];
        for (line, pid) in told {
            assert_eq!(super::holder(line), pid, "{line}");
        }
    }

    use super::*;

    #[test]
    fn holders_are_told_where_one_read_tells_all() {
        use rustix::fs::{FlockOperation, flock};
        let locked = || {
            let file = tempfile::tempfile().expect("a file");
            flock(&file, FlockOperation::LockExclusive).expect("it is nobody else's");
            file
        };
        let few = locked();
        let own = std::process::id().cast_signed();
        // Others may have many.
        assert!(holders().is_none_or(|pids| pids.contains(&own)));
        let many = std::iter::repeat_with(locked).take(100);
        let many = many.collect::<Vec<_>>();
        assert_eq!(holders(), None);
        drop((few, many));
    }

    #[test]
    fn lines_are_read() {
        let text = "1: POSIX  ADVISORY  WRITE 35 fe:00:9977964 100 199";
        let lock = parse(text).expect("a lock");
        assert_eq!((lock.style(), lock.write), (Style::Process, true));
        assert_eq!((lock.start, lock.len_bytes), (100, 100));
        let lock = parse("2: OFDLCK ADVISORY  READ -1 fe:00:9977964 7 EOF").expect("a lock");
        assert_eq!(
            (lock.style(), lock.start, lock.len_bytes),
            (Style::Description, 7, 0)
        );
        assert_eq!(lock.pid, -1);
        let lock = parse("1: FLOCK  ADVISORY  WRITE 35 fe:00:9977964 0 EOF").expect("a lock");
        assert_eq!((lock.style(), lock.pid), (Style::Flock, 35));
        let lease = parse("1: LEASE  ACTIVE    READ 35 fe:00:9977964 0 EOF").expect("a lease");
        assert_eq!((lease.style(), lease.write), (Style::Lease, false));
        assert!(parse("1: LEASE  BREAKING  READ 35 fe:00:9977964 0 EOF").is_none());
        assert!(parse("1: DELEG  ACTIVE    READ 35 fe:00:9977964 0 EOF").is_none());
        assert!(parse("1: POSIX  ADVISORY  WRITE 35 fe:00:1 9 3").is_none());
    }

    #[test]
    fn locks_of_the_process_survive() {
        use std::os::fd::AsFd;
        use sys::fcntl::Holder;

        use super::super::{table, testing::World};
        let folder = tempfile::tempdir().expect("make a folder");
        let path = folder.path().join("file");
        let open = || {
            let mut options = std::fs::File::options();
            let options = options.read(true).write(true).create(true).truncate(false);
            options.open(&path).expect("open")
        };
        let mut world = World::default();
        let at = world.add(open());
        let range = (10, 10);
        sys::fcntl::lock(world.get(at).as_fd(), Holder::Process, true, range).expect("lock");
        let row = table::own(world.get(at).as_fd()).expect("read");
        // Another number of the same description: the kernel tells of the lock at both.
        let twin = rustix::io::fcntl_dupfd_cloexec(world.get(at), 0).expect("dup");
        let rows = [table::own(twin.as_fd()).expect("read"), row];
        let mut allow = Allow::default();
        let error = dump_process(7, &rows, &allow)
            .expect_err("not allowed")
            .to_string();
        assert!(
            error.starts_with("pid 7: ") && error.contains("--file-locks"),
            "{error}"
        );
        allow.file_locks = true;
        let payload = dump_process(7, &rows[1..], &allow).expect("dump");
        let both = dump_process(7, &rows, &allow).expect("dump");
        let both: ProcessLocks = prost::Message::decode(&*both.expect("a lock")).expect("sound");
        assert_eq!(both.locks.len(), 1);
        assert_eq!(dump_process(7, &[], &allow).expect("dump"), None);

        // Closing any descriptor of the file gives up all locks of the process.
        drop(twin);
        let other = open();
        let taken = || sys::fcntl::lock(other.as_fd(), Holder::Description, true, (19, 1)).is_err();
        assert!(!taken());
        drop(other);
        let mut script = Script::default();
        in_process(&payload.expect("a lock"), &mut script).expect("sound");
        world.act(&script);
        let other = open();
        let lock = |range| sys::fcntl::lock(other.as_fd(), Holder::Description, true, range);
        assert!(lock((19, 1)).is_err());
        lock((20, 1)).expect("free");
    }

    #[test]
    fn process_takes_its_lock_by_fcntl() {
        let lock = Lock {
            fd: 5,
            style: Style::Process.into(),
            write: true,
            start: 1,
            len_bytes: 2,
            pid: 7,
        };
        let payload = ProcessLocks { locks: vec![lock] };
        let mut script = Script::default();
        let payload = prost::Message::encode_to_vec(&payload);
        in_process(&payload, &mut script).expect("sound");
        let lock = "{type=1, whence=0, start=1, len=2}";
        let want = format!("fcntl(fd=5, F_SETLK, lock={lock})  # lock fd 5\n");
        assert_eq!(script.to_string(), want);
    }
}
