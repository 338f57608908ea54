//! Worlds: the namespaces, root directory and mount table in which an object is looked at or made.
//!
//! A path, a name of a socket, a number of System V leads to another object in another namespace.
//! Code that looks at an object, or makes one, runs in the object's world ([`World::enter`]); what
//! it does to reach its own process and its targets goes through [`procfs`](crate::procfs), which
//! stays the same everywhere. Namespaces of processes, of users and of time are no part of a world:
//! a thread enters these with what it forks, or not at all.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use rustix::fs::{CWD, Mode, OFlags, openat};

use crate::process::Process;
use crate::procfs;

/// The namespaces that a thread enters, in the order in which it may: the directories of a mount
/// namespace are its last.
const KINDS: [(libc::c_int, &str); 5] = [
    (libc::CLONE_NEWNET, "net"),
    (libc::CLONE_NEWIPC, "ipc"),
    (libc::CLONE_NEWUTS, "uts"),
    (libc::CLONE_NEWCGROUP, "cgroup"),
    (libc::CLONE_NEWNS, "mnt"),
];

/// A world. All clones of a handle are one.
#[derive(Clone, Debug)]
pub struct World(Option<Arc<Namespaces>>);

/// The namespaces of a world that differ from this process's own, and its root directory.
#[derive(Debug)]
struct Namespaces {
    /// With the flag of clone(2) for their kind, in the order of [`KINDS`].
    entered: Vec<Namespace>,
    root: OwnedFd,
}

#[derive(Debug)]
struct Namespace {
    flag: libc::c_int,
    file: File,
}

impl World {
    /// The world of this process.
    #[must_use]
    pub const fn own() -> Self {
        Self(None)
    }

    /// The world that a process sees.
    ///
    /// # Errors
    /// As open(2) and stat(2) of its files in /proc.
    pub fn of(process: &Process) -> io::Result<Self> {
        let mut entered = Vec::new();
        for (flag, name) in KINDS {
            let theirs = process.open(&format!("ns/{name}"))?;
            if !is_own(theirs.as_fd(), name)? {
                entered.push(Namespace { flag, file: theirs });
            }
        }
        let theirs = rustix::fs::stat(process.path("root"))?;
        let own = rustix::fs::stat("/")?;
        let is_same = (theirs.st_dev, theirs.st_ino) == (own.st_dev, own.st_ino);
        if entered.is_empty() && is_same {
            return Ok(Self::own());
        }
        let root = folder(&process.path("root"))?;
        Ok(Self(Some(Arc::new(Namespaces { entered, root }))))
    }

    /// True for the world of this process.
    #[must_use]
    pub fn is_own(&self) -> bool {
        self.0.is_none()
    }

    /// Runs `f` in this world, and comes back. The thread's directories are its own from then on,
    /// as after unshare(2) with `CLONE_FS`.
    ///
    /// # Errors
    /// `EPERM` without `CAP_SYS_ADMIN` over a namespace; as setns(2) and chroot(2).
    ///
    /// # Panics
    /// When the thread is in another world than its own already; when it cannot come back, as it
    /// could do no more work for this process then.
    pub fn enter<T>(&self, f: impl FnOnce() -> T) -> io::Result<T> {
        assert!(!procfs::is_here(), "a thread enters a world from its own");
        let Some(namespaces) = &self.0 else {
            return Ok(f());
        };
        let visit = Visit::begin(namespaces)?;
        let result = f();
        drop(visit);
        Ok(result)
    }
}

/// A thread in another world; it comes back on drop.
struct Visit {
    /// Namespaces of its own to come back to, in the order of [`KINDS`].
    own: Vec<Namespace>,
    root: OwnedFd,
    directory: OwnedFd,
}

impl Visit {
    fn begin(there: &Namespaces) -> io::Result<Self> {
        // SAFETY: only this thread's directory, root and umask become its own.
        check(unsafe { libc::unshare(libc::CLONE_FS) })?;
        let own = there.entered.iter().map(|namespace| {
            let kind = KINDS.iter().find(|(flag, _)| *flag == namespace.flag);
            let (flag, name) = *kind.expect("it is one of these");
            let file = File::open(procfs::path(format_args!("thread-self/ns/{name}")))?;
            Ok(Namespace { flag, file })
        });
        let proc = folder(&procfs::path("."))?;
        let mut visit = Self {
            own: Vec::new(),
            root: folder("/")?,
            directory: folder(".")?,
        };
        let own = own.collect::<io::Result<Vec<_>>>()?;
        for (own, theirs) in own.into_iter().zip(&there.entered) {
            set(theirs)?;
            visit.own.push(own);
        }
        change_root(there.root.as_fd())?;
        rustix::process::fchdir(&proc)?;
        procfs::set_here(true);
        Ok(visit)
    }

    fn end(&self) -> io::Result<()> {
        for own in &self.own {
            set(own)?;
        }
        change_root(self.root.as_fd())?;
        rustix::process::fchdir(&self.directory)?;
        procfs::set_here(false);
        Ok(())
    }
}

impl Drop for Visit {
    fn drop(&mut self) {
        let back = self.end();
        back.expect("a thread may enter the namespaces that it began in");
    }
}

/// Has this process, of one thread, enter a namespace. In a mount namespace, its root and working
/// directories are those of the namespace then.
///
/// # Errors
/// As setns(2): `EPERM` without `CAP_SYS_ADMIN` over it.
pub fn enter(namespace: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: nothing in this process's memory changes.
    check(unsafe { libc::setns(namespace.as_raw_fd(), 0) })
}

/// Has this thread enter new namespaces of the kinds `flags` (`CLONE_NEWNET` and the like).
///
/// # Errors
/// As unshare(2): `EPERM` without `CAP_SYS_ADMIN`, `ENOSPC` for more than are allowed.
pub fn unshare(flags: libc::c_int) -> io::Result<()> {
    // SAFETY: nothing in this process's memory changes.
    check(unsafe { libc::unshare(flags) })
}

/// Tells whether `theirs` is the namespace of the kind `name` that this process is in.
fn is_own(theirs: BorrowedFd<'_>, name: &str) -> io::Result<bool> {
    let theirs = rustix::fs::fstat(theirs)?;
    let own = procfs::stat(format_args!("thread-self/ns/{name}"))?;
    Ok((theirs.st_dev, theirs.st_ino) == (own.st_dev, own.st_ino))
}

fn set(namespace: &Namespace) -> io::Result<()> {
    let file = namespace.file.as_raw_fd();
    // SAFETY: the thread's own namespaces change, and nothing in its memory.
    check(unsafe { libc::setns(file, namespace.flag) })
}

fn folder(path: &str) -> io::Result<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    Ok(openat(CWD, path, flags, Mode::empty())?)
}

/// Makes the directory `root` this thread's root.
fn change_root(root: BorrowedFd<'_>) -> io::Result<()> {
    rustix::process::fchdir(root)?;
    Ok(rustix::process::chroot(".")?)
}

fn check(result: libc::c_int) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use testkit::program::{Program, Spawned};
    use testkit::wait::{SOON, wait_for};

    use super::*;

    /// A shell with namespaces of its own, in which a file system is mounted that nobody else sees,
    /// and the process of the shell.
    fn shell(script: &str) -> (Spawned, Process) {
        let kinds = ["--mount", "--net", "--ipc", "--uts", "--pid", "--fork"];
        let program = Program::new("unshare")
            .args(kinds)
            .args(["--kill-child", "sh", "-c", script])
            .spawn();
        let ready = || {
            let child = testkit::tree::children(program.pid()).into_iter().next()?;
            let process = Process::new(child.cast_signed());
            let name = std::fs::read_to_string(process.path("root/mnt/name")).ok()?;
            name.ends_with('\n').then_some(process)
        };
        let process = wait_for("the shell's file system", SOON, ready);
        (program, process)
    }

    fn nodename() -> String {
        rustix::system::uname()
            .nodename()
            .to_string_lossy()
            .into_owned()
    }

    #[test]
    fn thread_sees_what_the_process_sees_and_comes_back() {
        testkit::needs_root!();
        testkit::needs_program!("unshare");
        let (_program, process) = shell(
            "hostname elsewhere; mount -t proc proc /proc; mount -t tmpfs none /mnt; \
             mkdir /mnt/root; mount --bind / /mnt/root; mount -t tmpfs none /mnt/root/mnt; \
             hostname > /mnt/root/mnt/name; exec chroot /mnt/root sleep 1000",
        );
        let before = (nodename(), std::env::current_dir().expect("a directory"));
        let world = World::of(&process).expect("its namespaces");
        assert!(!world.is_own());
        let interfaces = || {
            let table = procfs::read_text("thread-self/net/dev").expect("a table");
            table.lines().skip(2).count()
        };
        let seen = world.enter(|| {
            let own = procfs::read_text("self/status").expect("of this process");
            let number = format!("Pid:\t{}\n", std::process::id());
            assert!(own.contains(&number), "{own}");
            // The procfs of that world has not this process.
            std::fs::read("/proc/self/status").expect_err("it is not there");
            let exists = ["/mnt/name", "/mnt/root"].map(|path| Path::new(path).exists());
            (nodename(), exists, interfaces())
        });
        assert_eq!(
            seen.expect("entered"),
            ("elsewhere".to_owned(), [true, false], 1)
        );
        assert_eq!(
            before,
            (nodename(), std::env::current_dir().expect("a directory"))
        );
        assert!(!Path::new("/mnt/name").exists());
        assert_eq!(procfs::path("x"), "/proc/x");
    }

    #[test]
    fn process_that_sees_what_this_one_sees_is_in_its_world() {
        let world = World::of(&Process::own()).expect("its namespaces");
        assert!(world.is_own());
        assert_eq!(world.enter(nodename).expect("entered"), nodename());
    }
}
