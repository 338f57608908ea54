//! What processes share beyond what fork(2) leaves them, and threads beyond what a process has:
//! such trees are made by clone(2) and unshare(2).
//!
//! - What: what processes share
//! - Kept: descriptions, wherever they came from; memory by copy-on-write; descriptor tables
//!   (CLONE_FILES), directories and umask (CLONE_FS), undo lists of semaphores (CLONE_SYSVSEM), I/O
//!   contexts (CLONE_IO), memory (CLONE_VM) and signal handlers (CLONE_SIGHAND) of processes of the
//!   tree. What threads of one process share, but for I/O contexts.
//! - Refused: "its …, shared with pid … (…)": what the root shares with whoever made it; "thread …:
//!   a … of its own (…)", by unshare(2).
//! - CRIU 4.2: keeps shared descriptor tables; refuses shared memory, directories and signal
//!   handlers; does not look for undo lists and I/O contexts; what a thread has of its own is lost.

use std::cmp::Ordering;
use std::collections::HashMap;
use std::sync::mpsc;

use freeze::{Frozen, Task};
use rustix::io::Errno;
use rustix::thread::gettid;
use sys::kcmp::{self, Shared};
use sys::process::Process;

use crate::obstacles::Obstacles;
use crate::records::What;
use crate::{Error, Result};

/// What the root must have as its own, and the name under which a shared one is refused.
///
/// Signal actions are not among them: the kernel lets only tasks of one memory share them.
const OWN: [(Shared, &str, &str); 3] = [
    (Shared::Memory, "memory", "CLONE_VM or vfork"),
    (Shared::Descriptors, "descriptor table", "CLONE_FILES"),
    (
        Shared::Directories,
        "working directory and umask",
        "CLONE_FS",
    ),
];

/// The list that a thread may also have of its own, where there are semaphores.
const UNDO: (Shared, &str, &str) = (
    Shared::SemaphoreUndo,
    "list of semaphores to undo",
    "CLONE_SYSVSEM",
);

/// Notes, by both tasks, what processes share, and what threads do not.
pub(super) fn check(frozen: &Frozen, obstacles: &mut Obstacles) -> Result<()> {
    let mut threaded = frozen.tasks.iter().filter(|task| task.threads().len() > 1);
    let has_threads = threaded.next().is_some();
    let has_semaphores = has_threads && sys::sem::sets().is_ok_and(|count| count > 0);
    let undo = has_semaphores.then_some(UNDO);
    for task in &frozen.tasks {
        obstacles.note(check_threads(task, undo))?;
    }
    obstacles.note(check_parent(&frozen.tasks[0]))?;
    Ok(())
}

/// What processes of a tree share and keep: by pid, the first process of the tree that has it.
#[derive(Debug, Default)]
pub(super) struct Sharing(HashMap<(What, i32), i32>);

impl Sharing {
    /// Finds it out.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Kernel`].
    pub fn find(frozen: &Frozen) -> Result<Self> {
        let living = frozen.tasks.iter().filter(|task| !task.is_zombie());
        let processes = living.map(|task| &task.process).collect::<Vec<_>>();
        let mut sharing = Self::default();
        if processes.len() < 2 {
            return Ok(sharing);
        }
        let (undo, io) = (
            having_undo(&processes)?,
            having_io(&processes, &own_thread())?,
        );
        let memories = groups(&processes, |one, other| compare(one, other, Shared::Memory))?;
        // The kernel lets only those who share memory share their handlers.
        let memories = memories.concat();
        for (what, kind, processes) in [
            (What::Descriptors, Shared::Descriptors, &processes),
            (What::Directories, Shared::Directories, &processes),
            (What::SemaphoreUndo, Shared::SemaphoreUndo, &undo),
            (What::IoContext, Shared::Io, &io),
            (What::Memory, Shared::Memory, &memories),
            (What::Handlers, Shared::Actions, &memories),
        ] {
            for group in groups(processes, |one, other| compare(one, other, kind))? {
                let others = group[1..]
                    .iter()
                    .map(|one| ((what, one.pid()), group[0].pid()));
                sharing.0.extend(others);
            }
        }
        Ok(sharing)
    }

    /// The first process whose one `pid` has as well; none where that is its own, or it is the
    /// first.
    pub fn first(&self, what: What, pid: i32) -> Option<i32> {
        self.0.get(&(what, pid)).copied()
    }

    /// Those who have what `pid` has first, and itself.
    pub fn all_with(&self, what: What, pid: i32) -> impl Iterator<Item = i32> {
        let all = self.0.iter();
        let others = all.filter(move |(key, first)| key.0 == what && **first == pid);
        others.map(|(key, _)| key.1).chain([pid])
    }
}

fn shared((pid, other): (i32, i32), name: &str, flag: &str) -> Error {
    let what = format!("its {name}, shared with pid {other} ({flag}),");
    resources::Error::unsupported(pid, what).into()
}

fn check_threads(task: &Task, undo: Option<(Shared, &str, &str)>) -> Result<()> {
    let pid = task.pid();
    for thread in task.threads().iter().skip(1) {
        let asked = Process::new(thread.tid);
        for (what, name, flag) in OWN[1..].iter().chain(&undo) {
            if compare(&task.process, &asked, *what)? != Ordering::Equal {
                let what = format!("thread {}: a {name} of its own ({flag})", thread.tid);
                return Err(resources::Error::unsupported(pid, what).into());
            }
        }
    }
    Ok(())
}

/// The root may share with whoever made it, outside of the tree.
fn check_parent(root: &Task) -> Result<()> {
    let stat = root.stat()?.0;
    if stat.ppid == 0 {
        return Ok(());
    }
    for (what, name, flag) in OWN {
        // A parent that has ended, or that may not be looked at, shares nothing that is known.
        let found = kcmp::compare(&root.process, &Process::new(stat.ppid), what);
        if found.is_ok_and(Ordering::is_eq) {
            return Err(shared((root.pid(), stat.ppid), name, flag));
        }
    }
    Ok(())
}

// Of what not every task has, all that have none are equal: they are told by comparing them with
// a thread that has none.

/// Those who have an undo list.
fn having_undo<'a>(processes: &[&'a Process]) -> Result<Vec<&'a Process>> {
    let forgotten = kcmp::forget_semaphore_undo();
    forgotten.map_err(|e| Error::kernel("cannot unshare semaphore undo lists", e))?;
    unequal(processes, &own_thread(), Shared::SemaphoreUndo)
}

/// Those who have an I/O context, as far as any share one.
fn having_io<'a>(processes: &[&'a Process], own: &Process) -> Result<Vec<&'a Process>> {
    const WHAT: Shared = Shared::Io;
    let unlike = unequal(processes, own, WHAT)?;
    if equal_pair(&unlike, |one, other| compare(one, other, WHAT))?.is_none() {
        return Ok(Vec::new());
    }
    // A task that is equal to this thread, which shares with nobody, has none, as this thread.
    if unlike.len() < processes.len() {
        return Ok(unlike);
    }
    // New threads share nothing of the kind either: two of them are equal if they have none.
    let (one, other) = (Parked::new()?, Parked::new()?);
    if compare(&one.thread, &other.thread, WHAT)? != Ordering::Equal {
        log::debug!("every thread here has an I/O context: those of the tree are not compared");
        return Ok(Vec::new());
    }
    unequal(processes, &one.thread, WHAT)
}

/// Those who have something else than `thread`.
fn unequal<'a>(
    processes: &[&'a Process],
    thread: &Process,
    what: Shared,
) -> Result<Vec<&'a Process>> {
    let mut unequal = Vec::new();
    for process in processes {
        if compare(thread, process, what)? != Ordering::Equal {
            unequal.push(*process);
        }
    }
    Ok(unequal)
}

/// The calling thread.
fn own_thread() -> Process {
    Process::new(gettid().as_raw_nonzero().get())
}

/// A thread that does nothing until it is dropped.
struct Parked {
    thread: Process,
    _end: mpsc::Sender<()>,
}

impl Parked {
    fn new() -> Result<Self> {
        let (tell, told) = mpsc::channel();
        let (_end, wait) = mpsc::channel::<()>();
        let thread = std::thread::Builder::new().spawn(move || {
            let _ = tell.send(own_thread());
            let _ = wait.recv();
        });
        thread.map_err(|e| Error::kernel("cannot start a thread", e))?;
        let thread = told.recv().expect("the thread tells its number first");
        Ok(Self { thread, _end })
    }
}

fn compare(one: &Process, other: &Process, what: Shared) -> Result<Ordering> {
    kcmp::compare(one, other, what).map_err(|error| {
        let (one, other) = (one.pid(), other.pid());
        match Errno::from_io_error(&error) {
            Some(Errno::SRCH) => Error::Gone { pid: other },
            _ => Error::kernel(format!("cannot compare pids {one} and {other}"), error),
        }
    })
}

/// Two that are equal, if any.
fn equal_pair<T: Copy>(
    all: &[T],
    compare: impl FnMut(T, T) -> Result<Ordering>,
) -> Result<Option<(T, T)>> {
    let groups = groups(all, compare)?;
    Ok(groups.first().map(|group| (group[0], group[1])))
}

/// Those that are equal to others, in their order, found with as few comparisons as sorting needs.
fn groups<T: Copy>(
    all: &[T],
    mut compare: impl FnMut(T, T) -> Result<Ordering>,
) -> Result<Vec<Vec<T>>> {
    let mut sorted: Vec<Vec<T>> = Vec::with_capacity(all.len());
    for one in all {
        let (mut low, mut high) = (0, sorted.len());
        let equal = loop {
            if low == high {
                break None;
            }
            let middle = usize::midpoint(low, high);
            match compare(*one, sorted[middle][0])? {
                Ordering::Equal => break Some(middle),
                Ordering::Less => high = middle,
                Ordering::Greater => low = middle + 1,
            }
        };
        match equal {
            Some(at) => sorted[at].push(*one),
            None => sorted.insert(low, vec![*one]),
        }
    }
    sorted.retain(|group| group.len() > 1);
    Ok(sorted)
}

#[cfg(test)]
mod tests {
    use freeze::freeze;
    use testkit::program::{Program, Spawned};

    use super::*;

    #[test]
    fn an_equal_pair_is_found_among_many() {
        let by = |key: fn(i32) -> i32| move |one, other| Ok(key(one).cmp(&key(other)));
        let pids = [50, 7, 31, 2, 99, 64, 18];
        assert_eq!(equal_pair(&pids, by(|pid| -pid)).expect("no error"), None);
        let found = equal_pair(&pids, by(|pid| pid % 29)).expect("no error");
        assert_eq!(found, Some((31, 2)));
        let found = groups(&pids, by(|pid| pid % 4)).expect("no error");
        assert_eq!(found, [vec![50, 2, 18], vec![7, 31, 99]]);
        let mut count = 0;
        let many = (0..50).collect::<Vec<_>>();
        let counted = |one: i32, other: i32| {
            count += 1;
            Ok(one.cmp(&other))
        };
        assert_eq!(equal_pair(&many, counted).expect("no error"), None);
        assert!(count < 300, "{count}");
    }

    /// Runs `code` with `libc` and `clone(flags)` at hand until it calls `ready()`.
    fn python(code: &str) -> (Spawned, tempfile::TempDir) {
        const PRELUDE: &str = "
import ctypes, mmap, os, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
SIGCHLD = 17
def clone(flags):
    return libc.syscall(56, flags | SIGCHLD, 0, 0, 0, 0)
def ready():
    open(sys.argv[1] + '/draft', 'w').close()
    os.rename(sys.argv[1] + '/draft', sys.argv[1] + '/ready')
    time.sleep(1000)
";
        let folder = tempfile::tempdir().expect("a scratch folder");
        let program = Program::new("python3").arg("-c");
        let spawned = program
            .arg(format!("{PRELUDE}\n{code}"))
            .arg(folder.path())
            .output(&folder.path().join("output"))
            .spawn();
        spawned.wait_file(&folder.path().join("ready"));
        (spawned, folder)
    }

    fn verdict_of(frozen: &Frozen) -> String {
        let mut obstacles = Obstacles::default();
        check(frozen, &mut obstacles).expect("it can be looked at");
        let verdict = obstacles.check();
        verdict.map_or_else(|error| error.to_string(), |()| "fine".into())
    }

    /// What is said of the tree of the python program `code`.
    fn verdict(code: &str) -> String {
        let (spawned, _folder) = python(code);
        let pid = spawned.pid().cast_signed();
        let frozen = freeze(pid, None).expect("it can be stopped");
        let verdict = verdict_of(&frozen);
        verdict.replace(&pid.to_string(), "ROOT")
    }

    /// Runs the test only where python and the right to trace are there.
    macro_rules! needs_python {
        () => {
            testkit::needs_root!();
            testkit::needs_program!("python3");
        };
    }

    #[test]
    fn ordinary_trees_are_fine() {
        needs_python!();
        let code = "
for _ in range(3):
    if os.fork() == 0:
        threading.Thread(target=time.sleep, args=(1000,)).start()
        time.sleep(1000)
ready()";
        assert_eq!(verdict(code), "fine");
    }

    #[test]
    fn what_processes_share_is_found() {
        needs_python!();
        let copied = [What::Memory, What::Handlers];
        for what in What::ALL.into_iter().filter(|what| !copied.contains(what)) {
            let flag = what.flag();
            // ioprio_set(IOPRIO_WHO_PROCESS, 0, best effort 4) makes an I/O context.
            let code = format!(
                "
libc.syscall(251, 1, 0, 2 << 13 | 4)
if clone({flag}) == 0: time.sleep(1000)
if os.fork() == 0: time.sleep(1000)
ready()"
            );
            let (spawned, _folder) = python(&code);
            let pid = spawned.pid().cast_signed();
            let frozen = freeze(pid, None).expect("it can be stopped");
            assert_eq!(verdict_of(&frozen), "fine");
            let sharing = Sharing::find(&frozen).expect("it can be looked at");
            assert_eq!(sharing.0.len(), 1, "{sharing:?}");
            let child = frozen.tasks[1..].iter().find(|task| {
                let first = sharing.first(what, task.pid());
                first == Some(pid)
            });
            let child = child.expect("one has it").pid();
            let all = sharing.all_with(what, pid).collect::<Vec<_>>();
            assert_eq!(all, [child, pid]);
        }
    }

    #[test]
    fn shared_memory_is_found() {
        needs_python!();
        for (flags, handlers) in [(0x100, false), (0x900, true)] {
            let code = format!(
                "
stack = mmap.mmap(-1, 1 << 20)
top = ctypes.addressof(ctypes.c_char.from_buffer(stack)) + (1 << 20)
pause = ctypes.cast(libc.pause, ctypes.c_void_p)
if os.fork() == 0: time.sleep(1000)
libc.clone(pause, ctypes.c_void_p(top), {flags} | SIGCHLD, None)
ready()"
            );
            let (spawned, _folder) = python(&code);
            let pid = spawned.pid().cast_signed();
            let frozen = freeze(pid, None).expect("it can be stopped");
            assert_eq!(verdict_of(&frozen), "fine");
            let sharing = Sharing::find(&frozen).expect("it can be looked at");
            let having = |what| {
                let all = sharing.all_with(what, pid).filter(|other| *other != pid);
                all.collect::<Vec<_>>()
            };
            let memory = having(What::Memory);
            assert_eq!(memory.len(), 1, "{sharing:?}");
            let want = if handlers { memory } else { Vec::new() };
            assert_eq!(having(What::Handlers), want, "{sharing:?}");
        }
    }

    #[test]
    fn a_root_that_shares_with_its_parent_is_named() {
        needs_python!();
        let code = "
if clone(0x400) == 0: time.sleep(1000)
ready()";
        let (spawned, _folder) = python(code);
        let pids = spawned.tree();
        let child = *pids
            .iter()
            .find(|pid| **pid != spawned.pid())
            .expect("a child");
        let frozen = freeze(child.cast_signed(), None).expect("it can be stopped");
        let error = verdict_of(&frozen);
        let parent = spawned.pid();
        let want = format!("its descriptor table, shared with pid {parent} (CLONE_FILES),");
        assert!(error.contains(&want), "{error}");
    }

    #[test]
    fn threads_with_something_of_their_own_are_named() {
        needs_python!();
        for (flag, name) in [
            (0x400, "a descriptor table of its own (CLONE_FILES)"),
            (0x200, "a working directory and umask of its own (CLONE_FS)"),
        ] {
            let code = format!(
                "
def work():
    libc.unshare({flag})
    ready()
threading.Thread(target=work).start()"
            );
            let verdict = verdict(&code);
            assert!(
                verdict.starts_with("pid ROOT (python3): thread ") && verdict.contains(name),
                "{verdict}"
            );
        }
    }

    #[test]
    fn thread_with_another_undo_list_than_its_leader_is_named() {
        needs_python!();
        let set = sys::sem::Set::new(1).expect("a set");
        set.set(0, 7).expect("ours");
        let number = set.number();
        // semop(2) with SEM_UNDO, and unshare(CLONE_SYSVSEM).
        let borrow = &*format!("libc.semop({number}, (ctypes.c_short * 3)(0, -1, 0x1000), 1)");
        let unshare = "libc.unshare(0x40000)";
        for [before, thread, after] in [
            ["", &format!("{unshare}; {borrow}"), ""],
            [borrow, unshare, ""],
            ["", borrow, unshare],
        ] {
            let code = format!(
                "
{before}
done = threading.Event()
def work():
    {thread}
    done.set()
    time.sleep(1000)
threading.Thread(target=work).start()
done.wait()
{after}
ready()"
            );
            let verdict = verdict(&code);
            let name = "a list of semaphores to undo of its own (CLONE_SYSVSEM)";
            assert!(verdict.contains(name), "{code}: {verdict}");
        }
        let code = format!(
            "
{borrow}
threading.Thread(target=time.sleep, args=(1000,)).start()
ready()"
        );
        assert_eq!(verdict(&code), "fine");
    }
}
