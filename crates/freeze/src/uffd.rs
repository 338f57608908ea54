//! A userfaultfd for the memory of a stopped task: what tracks or protects its pages from outside.
//!
//! - What: tasks that are tracked
//! - Kept: tasks with seccomp filters and without privileges.
//! - Refused: "tracking a task at its limit of open files"; "tracking a task that may not use
//!   userfaultfd"; "a live dump of a task that may not use userfaultfd, without /dev/userfaultfd
//!   here"; "tracking on a kernel without write protection"; "a task with a seccomp filter", as
//!   "suspending it takes CAP_SYS_ADMIN, and no filter of stillframe's own".
//! - CRIU 4.2: needs nothing of the task; suspends filters as well.

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

use abi::{PAGE_BYTES, Span};
use resources::map::listing::{Backing, Listed};
use resources::map::vdso::elf::Elf;
use rustix::fs::{Mode, OFlags, openat};
use sys::proc::Status;
use sys::uffd::{Features, Uffd};
use tracee::Injection;

use crate::{Body, Error, Result, Task, target};

/// Creates a userfaultfd for the memory of a stopped task and brings it here; the task keeps
/// nothing of it. See [`tracee::userfaultfd`] about `user_mode_only`; a task that may not make
/// another one gets it by way of /dev/userfaultfd.
///
/// `listed` are the task's mappings.
///
/// # Errors
/// [`resources::Error::Unsupported`] naming what keeps the task from making one;
/// [`Error::Tracee`]. The task goes on then, and the tree must be let go.
pub fn userfaultfd(
    task: &mut Task,
    listed: &[Listed],
    user_mode_only: bool,
    features: Features,
) -> Result<Uffd> {
    let pid = task.pid();
    let status = task.status()?;
    suspend_filters(task.asked(), &status)?;
    let handed = !user_mode_only && !may_call(&status);
    let taken = if handed {
        task.numbers("fd")?
    } else {
        Vec::new()
    };
    let memory = open_memory(task)?;
    let Body::Stopped(threads) = std::mem::replace(&mut task.body, Body::Ended) else {
        unreachable!("a task gets its userfaultfd while it is stopped")
    };
    let injection = Injection::new(threads, memory, &executable(listed))?;
    let injection = seen_from(injection, &task.proc, &status)?;
    let made = if handed {
        tracee::userfaultfd_of_device(injection, &taken, features)
    } else {
        tracee::userfaultfd(injection, user_mode_only, features)
    };
    match made {
        Ok((threads, uffd)) => {
            task.body = Body::Stopped(threads);
            Ok(uffd)
        }
        Err(error) => Err(refusal(pid, error)),
    }
}

/// Has an injection into a process work that does not see this one, whose /proc directory and
/// status these are: where it is in a namespace of pids below.
pub fn seen_from(injection: Injection, proc: &impl AsFd, status: &Status) -> Result<Injection> {
    if status.ns_tids.len() < 2 {
        return Ok(injection);
    }
    let own = sys::procfs::read("thread-self/status");
    let own = own.ok().and_then(|own| Status::parse(&own).ok());
    if own.is_some_and(|own| own.ns_tids.len() == status.ns_tids.len()) {
        return Ok(injection);
    }
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let namespace = openat(proc, "ns/pid", flags, Mode::empty());
    let pid = status.pid;
    let namespace = namespace
        .map_err(|e| Error::kernel(format!("cannot open the namespace of pids of {pid}"), e))?;
    Ok(injection.in_namespace(namespace.as_fd())?)
}

/// Keeps seccomp(2) from judging what a stopped thread is made to call. It holds again for what the
/// thread calls when it is let go, or if we are killed.
///
/// # Errors
/// [`resources::Error::Unsupported`] where that is not allowed; [`Error::Kernel`].
pub fn suspend_filters(tid: i32, status: &Status) -> Result<()> {
    use rustix::io::Errno;
    if status.seccomp == 0 {
        return Ok(());
    }
    sys::ptrace::suspend_filters(tid).map_err(|error| match Errno::from_io_error(&error) {
        Some(Errno::PERM) => {
            let why = "suspending it takes CAP_SYS_ADMIN, and no filter of stillframe's own";
            resources::Error::unsupported(tid, "a task with a seccomp filter")
                .because(why)
                .into()
        }
        _ => Error::kernel(
            format!("cannot suspend the seccomp filters of {tid}"),
            error,
        ),
    })
}

/// Whether a task may make a userfaultfd that handles faults of the kernel as well.
fn may_call(status: &Status) -> bool {
    const CAP_SYS_PTRACE: u64 = 1 << 19;
    const SYSCTL: &str = "sys/vm/unprivileged_userfaultfd";
    let anyone = || sys::procfs::read(SYSCTL).is_ok_and(|value| value.starts_with(b"1"));
    status.capabilities.effective & CAP_SYS_PTRACE != 0 || anyone()
}

fn refusal(pid: i32, error: tracee::Error) -> Error {
    use rustix::io::Errno;
    let errno = match &error {
        tracee::Error::Kernel { source, .. } => Errno::from_io_error(source),
        _ => None,
    };
    let what = match errno {
        Some(Errno::MFILE) => "tracking a task at its limit of open files",
        Some(Errno::PERM) => "tracking a task that may not use userfaultfd",
        Some(Errno::NOENT) => {
            "a live dump of a task that may not use userfaultfd, without /dev/userfaultfd here,"
        }
        Some(Errno::NOSYS | Errno::INVAL) => "tracking on a kernel without write protection",
        _ => return target::explain_mapping(pid, error),
    };
    log::debug!("{error}");
    resources::Error::unsupported(pid, what.to_owned()).into()
}

/// The executable mappings from which calls can be made, the vDSO first.
pub fn executable(listed: &[Listed]) -> Vec<Span> {
    let code = |listed: &&Listed| listed.prot & 4 != 0 && !listed.shared;
    let (mut vdso, rest): (Vec<_>, Vec<_>) = listed
        .iter()
        .filter(code)
        .partition(|map| map.backing() == Backing::Vdso);
    vdso.extend(rest);
    vdso.iter().map(|listed| listed.span).collect()
}

/// The mapping of a program's or library's code whose end is none: what its file holds behind the
/// code came along because pages are mapped whole.
pub fn with_dead_end(memory: &File, listed: &[Listed]) -> Option<Span> {
    let ends_dead = |code: &&Listed| {
        let same = |other: &&Listed| (other.dev, other.ino) == (code.dev, code.ino);
        let first = listed.iter().find(|other| other.offset == 0 && same(other));
        let mut header = [0; PAGE_BYTES as usize];
        let read = first.map(|first| memory.read_exact_at(&mut header, first.span.start.0));
        let Some(Ok(())) = read else { return false };
        let end = Elf::new(&header).and_then(|elf| elf.code_end());
        let mapped_end = code.offset + code.span.bytes();
        end.is_some_and(|end| {
            let room = tracee::STUB_BYTES as u64;
            end > code.offset && mapped_end.checked_sub(room).is_some_and(|last| end <= last)
        })
    };
    let code = |listed: &&Listed| {
        listed.prot & 4 != 0 && !listed.shared && listed.backing() == Backing::File
    };
    let mut all = listed.iter().filter(code);
    all.find(ends_dead).map(|listed| listed.span)
}

/// Opens /proc/PID/mem for reading and writing.
pub fn open_memory(task: &Task) -> Result<File> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC;
    let file = openat(&task.proc, "mem", flags, Mode::empty());
    let doing = || format!("cannot open /proc/{}/mem", task.pid());
    file.map(File::from)
        .map_err(|errno| Error::kernel(doing(), errno))
}

#[cfg(test)]
mod tests {
    use resources::map::listing;
    use sys::uffd::Modes;
    use testkit::program::Program;
    use testkit::wait::{SOON, wait_until};

    use super::*;
    use crate::freeze;

    fn descriptors(pid: i32) -> usize {
        let entries = std::fs::read_dir(format!("/proc/{pid}/fd"));
        entries.expect("its descriptors").count()
    }

    #[test]
    fn a_task_of_several_threads_gets_one_and_keeps_none() {
        testkit::needs_root!();
        testkit::needs_program!("python3");
        let folder = tempfile::tempdir().expect("a scratch folder");
        let code = "import os, sys, threading, time
for _ in range(3): threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
os.mkdir(sys.argv[1] + '/ready')
time.sleep(1000)";
        let program = Program::new("python3")
            .args(["-c", code])
            .arg(folder.path())
            .spawn();
        program.wait_file(&folder.path().join("ready"));
        let pid = program.pid().cast_signed();
        let before = descriptors(pid);
        let mut frozen = freeze(pid, None).expect("it can be stopped");
        let task = &mut frozen.tasks[0];
        let maps = task.read("maps").expect("its mappings");
        let listed = listing::parse(&maps).expect("understood");
        let uffd = userfaultfd(task, &listed, true, Features::WP_ASYNC).expect("a userfaultfd");
        assert_eq!(task.threads().len(), 4);
        drop(frozen);
        assert_eq!(descriptors(pid), before);
        let heap = listed.iter().find(|map| map.name == b"[heap]");
        let heap = heap.expect("a heap").span;
        uffd.register(heap, Modes::WP).expect("registered");
        assert!(program.is_alive());
    }

    #[test]
    fn a_filter_does_not_judge_what_a_task_is_made_to_call() {
        testkit::needs_root!();
        testkit::needs_program!("python3");
        let folder = tempfile::tempdir().expect("a scratch folder");
        // PR_SET_NO_NEW_PRIVS; PR_SET_SECCOMP with a filter that kills for userfaultfd(2).
        let code = "import ctypes, os, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
rows = [(0x20, 0, 0, 0), (0x15, 0, 1, 323), (6, 0, 0, 0x80000000), (6, 0, 0, 0x7fff0000)]
rows = ctypes.create_string_buffer(b''.join(struct.pack('HBBI', *row) for row in rows))
program = struct.pack('HxxxxxxQ', 4, ctypes.addressof(rows))
if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, program): sys.exit('no filter')
os.mkdir(sys.argv[1] + '/ready')
while not os.path.exists(sys.argv[1] + '/end'): time.sleep(0.01)
libc.syscall(323, 1)
os.mkdir(sys.argv[1] + '/survived')";
        let program = Program::new("python3")
            .args(["-c", code])
            .arg(folder.path())
            .spawn();
        program.wait_file(&folder.path().join("ready"));
        let mut frozen = freeze(program.pid().cast_signed(), None).expect("it can be stopped");
        let task = &mut frozen.tasks[0];
        let listed = listing::parse(&task.read("maps").expect("its mappings"));
        let listed = listed.expect("understood");
        userfaultfd(task, &listed, true, Features::WP_ASYNC).expect("a userfaultfd");
        drop(frozen);
        std::fs::create_dir(folder.path().join("end")).expect("it is new");
        wait_until("its end", SOON, || !program.is_alive());
        let survived = folder.path().join("survived").exists();
        assert!(!survived, "its own call is judged");
    }

    #[test]
    fn a_task_that_does_not_see_this_process_waits_for_a_stand_in() {
        testkit::needs_root!();
        testkit::needs_program!("unshare");
        let program = Program::new("unshare")
            .args(["--pid", "--fork", "--kill-child", "sleep", "1000"])
            .spawn();
        let child = || testkit::tree::children(program.pid()).into_iter().next();
        // A program that still starts opens files.
        let sleeps = |pid: &u32| {
            let call = std::fs::read_to_string(format!("/proc/{pid}/syscall"));
            let number = syscalls::Sysno::clock_nanosleep.id();
            call.is_ok_and(|call| call.starts_with(&format!("{number} ")))
        };
        wait_until("its child to sleep", SOON, || {
            child().is_some_and(|pid| sleeps(&pid))
        });
        let pid = child().expect("it is there").cast_signed();
        let before = descriptors(pid);
        let mut frozen = freeze(pid, None).expect("it can be stopped");
        let task = &mut frozen.tasks[0];
        assert_eq!(task.status().expect("it is there").ns_tids.len(), 2);
        let listed = listing::parse(&task.read("maps").expect("its mappings"));
        let listed = listed.expect("understood");
        userfaultfd(task, &listed, true, Features::WP_ASYNC).expect("a userfaultfd");
        drop(frozen);
        assert_eq!(descriptors(pid), before);
    }
}
