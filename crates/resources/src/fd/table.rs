//! The descriptors of tasks, and which of them refer to the same description.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::os::fd::{BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Stat, statat};
use rustix::io::Errno;
use sys::close::CloseQueue;
use sys::kcmp::Descriptor;
use sys::process::Process;
use syscalls::Sysno;

use super::{DescriptionId, Info, mqueue, tty};
use crate::script::{Answers, Script, StepAt};
use crate::{Error, Result};

/// One descriptor of a task.
#[derive(Clone, Debug)]
pub struct Row {
    /// Its number.
    pub fd: i32,
    /// Whether it is closed by `execve`.
    pub cloexec: bool,
    /// Whether it is inherited, and only its parent's descriptor was looked at: `cloexec` is what
    /// that one has.
    pub inherited: bool,
    /// What the link in /proc/PID/fd says.
    pub link: Vec<u8>,
    /// `fstat` of the file.
    pub stat: Stat,
    /// /proc/PID/fdinfo of the descriptor.
    pub info: Info,
    /// A descriptor of the same description, (pid, fd), where one is known.
    pub same: Option<(i32, i32)>,
}

/// The question to a task whether `execve` closes one of its descriptors, where that was not looked
/// at, or the kernel does not tell: a terminal that was opened with `O_CLOEXEC` through its master
/// (`TIOCGPTPEER`) and a message queue (`mq_open`, which always opens so) say so of every
/// descriptor, whatever fcntl(2) and dup(2) did since.
pub struct WhetherClosed(StepAt);

impl WhetherClosed {
    /// Whether that is not known of a descriptor.
    #[must_use]
    pub fn is_unknown(row: &Row) -> bool {
        row.inherited || row.cloexec && (tty::is_slave(&row.stat) || mqueue::may_be(&row.stat))
    }

    /// Asks a task about one of its descriptors; none where the kernel has told.
    pub fn ask(row: &Row, script: &mut Script) -> Option<Self> {
        const F_GETFD: u32 = linux_raw_sys::general::F_GETFD;
        let asks = || script.call(Sysno::fcntl, [row.fd.into(), F_GETFD.into()]);
        Self::is_unknown(row).then(asks).map(Self)
    }

    /// Takes the answer.
    pub fn answer(&self, answers: &Answers, row: &mut Row) {
        row.cloexec = answers.result(self.0) & 1 != 0;
    }
}

/// One descriptor of a task, of which only the link was read: that waits for no file system.
#[derive(Clone, Debug)]
pub struct Link {
    /// Its number.
    pub fd: i32,
    /// What the link in /proc/PID/fd says.
    pub target: Vec<u8>,
    /// A descriptor of the same description, (pid, fd), of the parent.
    pub same: Option<(i32, i32)>,
}

/// A task's folder /proc/PID, and who closes what is opened in it.
pub type Proc<'a> = (BorrowedFd<'a>, &'a CloseQueue);

/// A parent, from whom most descriptors are inherited.
#[derive(Clone, Copy)]
pub struct Parent<'a> {
    /// The process.
    pub process: &'a Process,
    /// The links of its descriptors.
    pub links: &'a [Link],
}

/// The links of the descriptors of a stopped process in ascending order, given those of its parent
/// where they are known.
///
/// # Errors
/// [`Error::Gone`] when the task died, [`Error::Kernel`].
pub fn links(
    process: &Process,
    (proc, close_queue): Proc<'_>,
    parent: Option<Parent<'_>>,
) -> Result<Vec<Link>> {
    let pid = process.pid();
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = rustix::fs::openat(proc, "fd", flags, Mode::empty());
    let folder = folder.map_err(|error| failed(pid, "fd", error))?;
    let mut numbers = sys::numbers::of(&folder).map_err(|error| failed(pid, "fd", error))?;
    numbers.sort_unstable();
    let mut links = Vec::with_capacity(numbers.len());
    for fd in numbers {
        let (target, same) = match inherited(Descriptor { process, fd }, parent)? {
            Some((at, link)) => (link.target.clone(), Some(at)),
            None => {
                let link = rustix::fs::readlinkat(&folder, fd.to_string(), Vec::new());
                let link = link.map_err(|error| failed(pid, &format!("fd/{fd}"), error))?;
                (link.into_bytes(), None)
            }
        };
        links.push(Link { fd, target, same });
    }
    close_queue.push(folder);
    Ok(links)
}

/// What the kernel says of a descriptor of the task `pid`; also whether it is close-on-exec.
///
/// # Errors
/// [`Error::Gone`] when the task died, [`Error::Kernel`], [`Error::Corrupt`] where it is not
/// understood.
pub fn info(
    (pid, fd): (i32, i32),
    (proc, close_queue): Proc<'_>,
    buffer: &mut Vec<u8>,
) -> Result<(Info, bool)> {
    let name = format!("fdinfo/{fd}");
    let text = contents(proc, &name, buffer, close_queue);
    let text = text.map_err(|error| failed(pid, &name, error))?;
    Info::parse(&String::from_utf8_lossy(text)).ok_or_else(|| {
        let text = String::from_utf8_lossy(text);
        Error::corrupt(
            sys::procfs::path(format_args!("{pid}/{name}")),
            format!("says {text:?}"),
        )
    })
}

/// Looks at the descriptors of the stopped task `pid` whose `links` were read, given those of its
/// parent where they are known. What it has inherited is not looked at again, unless the kernel
/// tells of locks there, of which each process has its own.
///
/// # Errors
/// Those of [`links`] and [`info`].
pub fn read(
    pid: i32,
    proc: Proc<'_>,
    links: &[Link],
    (parent, has_locks): (&[Row], bool),
) -> Result<Vec<Row>> {
    let mut buffer = vec![0; 4096];
    let mut rows = Vec::with_capacity(links.len());
    for link in links {
        let fd = link.fd;
        let theirs = link.same.and_then(|(_, fd)| find(parent, fd, |row| row.fd));
        let stat = match theirs {
            Some(row) => row.stat,
            None => {
                let name = format!("fd/{fd}");
                let stat = statat(proc.0, &name, AtFlags::empty());
                stat.map_err(|error| failed(pid, &name, error))?
            }
        };
        let known = theirs.filter(|row| !has_locks && !row.info.rest.contains("lock:"));
        let (info, cloexec) = match known {
            Some(row) => (row.info.clone(), row.cloexec),
            None => info((pid, fd), proc, &mut buffer)?,
        };
        rows.push(Row {
            fd,
            cloexec,
            inherited: known.is_some(),
            link: link.target.clone(),
            stat,
            info,
            same: link.same,
        });
    }
    Ok(rows)
}

fn failed(pid: i32, what: &str, error: Errno) -> Error {
    let doing = format!("read /proc/{pid}/{what}");
    match error {
        Errno::NOENT | Errno::SRCH => Error::Gone { pid, doing },
        error => Error::kernel(doing, error),
    }
}

/// A descriptor of this process, looked at as if it were a task's.
///
/// # Errors
/// [`Error::Kernel`].
pub fn own(fd: BorrowedFd<'_>) -> Result<Row> {
    let number = std::os::fd::AsRawFd::as_raw_fd(&fd);
    let failed = |error: Errno| Error::kernel(format!("look at our fd {number}"), error);
    let path = sys::procfs::path(format_args!("self/fd/{number}"));
    let link = rustix::fs::readlink(&path, Vec::new()).map_err(failed)?;
    let stat = rustix::fs::fstat(fd).map_err(failed)?;
    let text = sys::procfs::read_text(format_args!("self/fdinfo/{number}"));
    let text = text.map_err(|error| Error::kernel(format!("look at our fd {number}"), error))?;
    let (info, cloexec) = Info::parse(&text).ok_or_else(|| {
        Error::corrupt(
            sys::procfs::path(format_args!("self/fdinfo/{number}")),
            text,
        )
    })?;
    Ok(Row {
        fd: number,
        cloexec,
        inherited: false,
        link: link.into_bytes(),
        stat,
        info,
        same: None,
    })
}

/// The parent's descriptor with the number of `at`, if it is of the same description.
fn inherited<'a>(
    at: Descriptor<'_>,
    parent: Option<Parent<'a>>,
) -> Result<Option<((i32, i32), &'a Link)>> {
    let Some(Parent { process, links }) = parent else {
        return Ok(None);
    };
    let Some(link) = find(links, at.fd, |link| link.fd) else {
        return Ok(None);
    };
    let theirs = Descriptor { process, fd: at.fd };
    let same = compare(at, theirs)? == Ordering::Equal;
    Ok(same.then_some(((process.pid(), at.fd), link)))
}

/// The one with the number `fd` among some in ascending order.
fn find<T>(all: &[T], fd: i32, number: impl Fn(&T) -> i32) -> Option<&T> {
    let found = all.binary_search_by_key(&fd, number);
    found.ok().map(|found| &all[found])
}

/// The file's bytes, read into `buffer`, which grows as needed; `close_queue` closes the file.
fn contents<'a>(
    proc: BorrowedFd<'_>,
    name: &str,
    buffer: &'a mut Vec<u8>,
    close_queue: &CloseQueue,
) -> rustix::io::Result<&'a [u8]> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let file: OwnedFd = rustix::fs::openat(proc, name, flags, Mode::empty())?;
    let mut filled = 0;
    loop {
        // A file of this kind comes in one piece as far as the buffer has room.
        filled += rustix::io::read(&file, &mut buffer[filled..])?;
        if filled < buffer.len() {
            close_queue.push(file);
            return Ok(&buffer[..filled]);
        }
        buffer.resize(buffer.len() * 2, 0);
    }
}

/// Finds equal descriptions among those that are shown to it.
///
/// Descriptors are compared by kcmp(2) only where what /proc says of them does not differ.
#[derive(Default)]
pub struct Grouping {
    buckets: HashMap<Key, Vec<Member>>,
    known: u32,
}

#[derive(PartialEq, Eq, Hash)]
struct Key {
    link: Vec<u8>,
    device: u64,
    inode: u64,
    pos: u64,
    flags: u32,
}

/// A description, and a descriptor of it.
struct Member {
    id: DescriptionId,
    process: Process,
    fd: i32,
}

impl Member {
    fn at(&self) -> Descriptor<'_> {
        Descriptor {
            process: &self.process,
            fd: self.fd,
        }
    }
}

impl Grouping {
    /// The number of the description behind `row` of a process, and whether it is new. All tasks
    /// must be stopped until the last one was shown.
    ///
    /// # Errors
    /// [`Error::Kernel`] when they cannot be compared.
    pub fn show(&mut self, process: &Process, row: &Row) -> Result<(DescriptionId, bool)> {
        let key = Key {
            link: row.link.clone(),
            device: row.stat.st_dev,
            inode: row.stat.st_ino,
            pos: row.info.pos,
            flags: row.info.flags,
        };
        let bucket = self.buckets.entry(key).or_default();
        // A socket's inode has one description for all its life.
        let alone = FileType::from_raw_mode(row.stat.st_mode) == FileType::Socket;
        let fd = row.fd;
        let (mut low, mut high) = (0, bucket.len());
        while low < high {
            let middle = usize::midpoint(low, high);
            let member = &bucket[middle];
            let order = if alone {
                Ordering::Equal
            } else {
                compare(Descriptor { process, fd }, member.at())?
            };
            match order {
                Ordering::Equal => return Ok((member.id, false)),
                Ordering::Less => high = middle,
                Ordering::Greater => low = middle + 1,
            }
        }
        let id = DescriptionId(self.known);
        self.known += 1;
        let process = process.clone();
        bucket.insert(low, Member { id, process, fd });
        Ok((id, true))
    }
}

fn compare(one: Descriptor<'_>, other: Descriptor<'_>) -> Result<Ordering> {
    sys::kcmp::compare_files(one, other).map_err(|error| {
        let ((fd, pid), (fd2, pid2)) =
            ((one.fd, one.process.pid()), (other.fd, other.process.pid()));
        Error::kernel(
            format!("compare fd {fd} of {pid} with fd {fd2} of {pid2}"),
            error,
        )
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::{Read, Write};
    use std::os::fd::{AsFd, AsRawFd};

    use super::*;

    #[test]
    fn table_of_a_task_is_read() {
        use std::process::{Command, Stdio};
        let mut cat = Command::new("cat");
        let mut cat = cat
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .expect("start cat");
        // Once it has answered it opens nothing any more.
        let (mut to, mut from) = (cat.stdin.take().expect("pipe"), cat.stdout.take());
        to.write_all(b"x").expect("write");
        let answer = from.as_mut().expect("pipe").read_exact(&mut [0]);
        answer.expect("read");
        let pid = cat.id().cast_signed();
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let proc = rustix::fs::open(format!("/proc/{pid}"), flags, Mode::empty()).expect("open");
        let close_queue = CloseQueue::default();
        let proc = (proc.as_fd(), &close_queue);
        let links = links(&Process::new(pid), proc, None).expect("read");
        let rows = read(pid, proc, &links, (&[], false)).expect("read");
        drop(to);
        cat.wait().expect("wait");
        let seen = rows.iter().take(3).map(|row| (row.fd, row.cloexec));
        assert_eq!(
            seen.collect::<Vec<_>>(),
            [(0, false), (1, false), (2, false)]
        );
        assert!(rows[0].link.starts_with(b"pipe:["));
        assert_eq!(rows[2].link, b"/dev/null");
        assert_eq!(rows[2].info.oflags() & OFlags::RWMODE, OFlags::WRONLY);
        let error = read(pid, proc, &links, (&[], false)).expect_err("it is gone");
        assert!(matches!(error, Error::Gone { .. }), "{error}");
    }

    #[test]
    fn numbers_links_and_flags_are_read() {
        let file = File::open("/dev/null").expect("open");
        let fd = file.as_raw_fd();
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let infos = rustix::fs::open("/proc/self/fdinfo", flags, Mode::empty()).expect("open");
        let (name, close_queue) = (fd.to_string(), CloseQueue::default());
        let mut small = vec![0; 4];
        let text = contents(infos.as_fd(), &name, &mut small, &close_queue).expect("read");
        let text = std::str::from_utf8(text).expect("text");
        let (info, cloexec) = Info::parse(text).expect("well formed");
        assert_eq!(
            text,
            std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).expect("read")
        );
        assert!(cloexec && info.oflags().contains(OFlags::LARGEFILE));
    }

    #[test]
    fn same_descriptions_are_found() {
        let file = |path: &str| File::open(path).expect("open");
        let (null, second) = (file("/dev/null"), file("/dev/null"));
        let same = null.try_clone().expect("dup");
        let zero = file("/dev/zero");
        let wanted = [&null, &second, &same, &zero].map(AsRawFd::as_raw_fd);
        let own = Process::own();
        let row = |fd: i32| Row {
            fd,
            cloexec: true,
            inherited: false,
            link: std::fs::read_link(format!("/proc/self/fd/{fd}"))
                .expect("readlink")
                .into_os_string()
                .into_encoded_bytes(),
            stat: rustix::fs::stat(format!("/proc/self/fd/{fd}")).expect("stat"),
            info: Info::default(),
            same: None,
        };
        let mut grouping = Grouping::default();
        let mut show = |fd| {
            let (id, new) = grouping.show(&own, &row(fd)).expect("kcmp");
            (id.0, new)
        };
        let seen = wanted.map(&mut show);
        assert_eq!(seen, [(0, true), (1, true), (0, false), (2, true)]);
    }
}
