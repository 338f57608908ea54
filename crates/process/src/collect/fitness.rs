//! Trees that are refused before any of their tasks is touched.
//!
//! - What: sessions
//! - Kept: sessions and process groups that are led from inside of the tree; with `--shell-job` one
//!   from outside.
//! - Refused: "its session …, led from outside of the tree" (`--shell-job`), of a tree with
//!   namespaces as "it has namespaces of its own".
//! - CRIU 4.2: the same, with the same option.
//! - What: namespaces
//! - Kept: that tasks are in stillframe's own; a time, pid, net, ipc or uts namespace of the
//!   whole tree.
//! - Refused: "its own … namespace" (mnt, user, cgroup, or one of several of another kind);
//!   "another … namespace for its children"; "a process that has joined the tree's pid namespace
//!   from outside (nsenter)", as "it would be killed with the tree".
//! - CRIU 4.2: keeps all of these kinds, though not always one within another.
//! - What: 32-bit code
//! - Kept: programs of 32 bits, on kernels that run them, also among others.
//! - Refused: "thread …: …" (a segment of its own (modify_ldt); code segment …); "thread …: …-bit
//!   code in a program of … bits".
//! - CRIU 4.2: kept, where the kernel has it.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd};

use freeze::{Frozen, Task, stat_of};
use rustix::fs::{CWD, readlinkat};
use rustix::io::Errno;

use resources::Allow;

use super::sharing;
use super::vdso::Seen;
use crate::obstacles::Obstacles;
use crate::options::OwnNamespaces;
use crate::records::Tree;
use crate::{Error, Result, namespaces};

/// Notes what can be told of a whole tree without asking its tasks. Returns whether the tree is in
/// another time namespace than this process. `kills`: whether it is going to be killed.
pub(super) fn check(
    frozen: &Frozen,
    own: OwnNamespaces,
    kills: bool,
    obstacles: &mut Obstacles,
) -> Result<bool> {
    if kills {
        check_joined(frozen, obstacles)?;
    }
    let mut wanted = own_namespaces()?;
    // Those that this process has not entered are the root's.
    for name in namespaces::not_entered(own) {
        if let Some(inode) = inode(&frozen.tasks[0], name)? {
            wanted.insert(name, inode);
        }
    }
    let has_its_clocks = take_clocks(&frozen.tasks[0], &mut wanted)?;
    for task in frozen.tasks.iter().filter(|task| !task.is_zombie()) {
        obstacles.note(check_code(task))?;
        check_namespaces(task, &wanted, obstacles)?;
    }
    sharing::check(frozen, obstacles)?;
    Ok(has_its_clocks)
}

/// The kernel kills all that is in a pid namespace with process 1: notes what is no descendant of
/// that, as it has joined the namespace from outside.
fn check_joined(frozen: &Frozen, obstacles: &mut Obstacles) -> Result<()> {
    if frozen.tasks[0].pid() != sys::init::NUMBER {
        return Ok(());
    }
    let own = std::process::id().cast_signed();
    let others = sys::procfs::processes().filter(|pid| *pid != own && *pid != sys::init::NUMBER);
    // The parent of one that has joined is outside, and has no number here.
    let is_joined = |pid: &i32| stat_of(*pid).is_some_and(|stat| stat.ppid == 0);
    for pid in others.filter(is_joined) {
        let what = "a process that has joined the tree's pid namespace from outside (nsenter)";
        let refused = resources::Error::unsupported(pid, what);
        let refused = refused.because("it would be killed with the tree");
        obstacles.note(Err::<(), _>(refused))?;
    }
    Ok(())
}

/// Wants the time namespace of the root for the whole tree: it gets another one at the restore.
/// Returns whether that is not this process's.
fn take_clocks(root: &Task, wanted: &mut HashMap<&str, u64>) -> Result<bool> {
    let Some(ours) = wanted.get_mut("time") else {
        return Ok(false);
    };
    let theirs = inode(root, "time")?.unwrap_or(*ours);
    Ok(std::mem::replace(ours, theirs) != theirs)
}

/// The session must be led from inside of the tree, unless that is allowed, as it is not for a tree
/// with namespaces `own`: a job of a shell is in the shell's.
pub(super) fn check_session(tree: &Tree, allow: &Allow, own: OwnNamespaces) -> Result<()> {
    let root = &tree.tasks[0];
    let led = |id| tree.tasks.iter().any(|node| node.pid == id);
    let is_outside = own != OwnNamespaces::default();
    if led(root.session) || allow.shell_job && !is_outside {
        return Ok(());
    }
    let what = format!(
        "its session {}, led from outside of the tree,",
        root.session
    );
    let refused = resources::Error::unsupported(root.pid, what);
    Err(match is_outside {
        true => refused.because("it has namespaces of its own"),
        false => refused.unless("--shell-job"),
    }
    .into())
}

/// Every thread must run code of the kernel's own segments.
fn check_code(task: &Task) -> Result<()> {
    for thread in task.threads() {
        if let Err(what) = thread.saved.registers.check_code() {
            let what = format!("thread {}: {what}", thread.tid);
            return Err(resources::Error::unsupported(task.pid(), what).into());
        }
    }
    Ok(())
}

/// All threads must run the kind of code that the program is of: what the kernel keeps by kind, as
/// how handlers are called, is taken to be of that kind.
pub(super) fn check_kind(task: &Task, vdso: &Seen) -> Result<()> {
    let threads = task.threads();
    let is_32_bit = match vdso.is_there {
        true => vdso.is_32_bit,
        false => threads[0].saved.registers.is_32_bit(),
    };
    let bits = |is_32_bit| if is_32_bit { 32 } else { 64 };
    for thread in threads {
        let runs_32_bit = thread.saved.registers.is_32_bit();
        if runs_32_bit != is_32_bit {
            let (tid, runs, of) = (thread.tid, bits(runs_32_bit), bits(is_32_bit));
            let what = format!("thread {tid}: {runs}-bit code in a program of {of} bits");
            return Err(resources::Error::unsupported(task.pid(), what).into());
        }
    }
    Ok(())
}

/// The namespaces of a task, and those that its children would be forked into.
const NAMESPACES: [&str; 10] = [
    "pid",
    "mnt",
    "net",
    "ipc",
    "uts",
    "user",
    "cgroup",
    "time",
    "pid_for_children",
    "time_for_children",
];

/// How the names of those for children end.
const FOR_CHILDREN: &str = "_for_children";

/// The inodes of this process's namespaces by name; of none that the kernel does not have.
fn own_namespaces() -> Result<HashMap<&'static str, u64>> {
    let mut inodes = HashMap::new();
    let own = NAMESPACES
        .iter()
        .filter(|name| !name.ends_with(FOR_CHILDREN));
    for name in own {
        match namespace(CWD, &sys::procfs::path(format_args!("self/ns/{name}"))) {
            Ok(inode) => {
                inodes.insert(*name, inode);
            }
            Err(Errno::NOENT) => {}
            Err(errno) => {
                let doing = format!("cannot look at /proc/self/ns/{name}");
                return Err(Error::kernel(doing, errno));
            }
        }
    }
    Ok(inodes)
}

/// Only tasks in the namespaces with the inodes `wanted` are saved. In which pid namespace a task
/// is need not be asked where its children are forked into ours: they would be forked into the
/// task's own or one below it, and a task that has a number here is in ours or in one below.
fn check_namespaces(
    task: &Task,
    wanted: &HashMap<&str, u64>,
    obstacles: &mut Obstacles,
) -> Result<()> {
    for name in NAMESPACES.iter().filter(|name| **name != "pid") {
        let kind = name.strip_suffix(FOR_CHILDREN);
        let Some(wanted) = wanted.get(kind.unwrap_or(name)) else {
            continue;
        };
        let differs = |name| -> Result<bool> { Ok(inode(task, name)? != Some(*wanted)) };
        if differs(name)? {
            // Its children are forked into its own, which was noted.
            if kind.is_some_and(|own| own != "pid") && differs(kind.unwrap_or(name))? {
                continue;
            }
            let what = match kind {
                Some(name) if name != "pid" || !differs(name)? => {
                    format!("another {name} namespace for its children")
                }
                _ => format!("its own {} namespace", kind.unwrap_or(name)),
            };
            let refused = resources::Error::unsupported(task.pid(), what);
            obstacles.note(Err::<(), _>(refused))?;
        }
    }
    Ok(())
}

/// The inode of a namespace of a task; none of a new one for children that has no first process
/// yet.
fn inode(task: &Task, name: &str) -> Result<Option<u64>> {
    match namespace(task.proc.as_fd(), &format!("ns/{name}")) {
        Ok(inode) => Ok(Some(inode)),
        Err(Errno::NOENT) if name == "pid_for_children" => Ok(None),
        Err(errno) => {
            let doing = format!("cannot look at /proc/{}/ns/{name}", task.pid());
            Err(Error::kernel(doing, errno))
        }
    }
}

/// The inode of a namespace, which its link tells (`mnt:[4026531841]`, namespaces(7)). To look at
/// what the link leads to takes ten times as long: the kernel makes an inode and gives it up again.
fn namespace(folder: BorrowedFd<'_>, path: &str) -> rustix::io::Result<u64> {
    let link = readlinkat(folder, path, Vec::new())?;
    let link = link.to_str().ok();
    let number = link.and_then(|link| link.split_once('[')?.1.strip_suffix(']'));
    number
        .and_then(|number| number.parse().ok())
        .ok_or(Errno::INVAL)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt;

    use freeze::freeze;
    use testkit::program::{Program, Spawned};

    use super::*;

    #[track_caller]
    fn verdict(program: &Spawned) -> String {
        let frozen = freeze(program.pid().cast_signed(), None).expect("it can be stopped");
        let mut obstacles = Obstacles::default();
        check(&frozen, OwnNamespaces::default(), false, &mut obstacles)
            .expect("it can be looked at");
        let Err(error) = obstacles.check() else {
            return "fine".into();
        };
        let told = error.obstacles().iter().map(ToString::to_string);
        told.collect::<Vec<_>>().join("; ")
    }

    /// A static i386 program that does nothing but pause(2), for ever.
    fn old_program() -> Vec<u8> {
        const ADDRESS: u32 = 0x0804_8000;
        // mov eax, 29; int 0x80; jmp back
        const CODE: [u8; 9] = [0xb8, 29, 0, 0, 0, 0xcd, 0x80, 0xeb, 0xf7];
        const HEADERS: u32 = 52 + 32;
        let size = HEADERS + CODE.len() as u32;
        let mut file = b"\x7fELF\x01\x01\x01".to_vec();
        file.resize(16, 0);
        let half = |file: &mut Vec<u8>, numbers: &[u16]| {
            file.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        };
        let word = |file: &mut Vec<u8>, numbers: &[u32]| {
            file.extend(numbers.iter().flat_map(|number| number.to_le_bytes()));
        };
        half(&mut file, &[2, 3]);
        word(&mut file, &[1, ADDRESS + HEADERS, 52, 0, 0]);
        half(&mut file, &[52, 32, 1, 0, 0, 0]);
        word(&mut file, &[1, 0, ADDRESS, ADDRESS, size, size, 5, 0x1000]);
        file.extend(CODE);
        file
    }

    #[test]
    fn an_ordinary_task_is_fine() {
        testkit::needs_root!();
        assert_eq!(verdict(&Program::new("sleep").arg("1000").spawn()), "fine");
    }

    #[test]
    fn code_of_the_other_kind_is_named() {
        testkit::needs_root!();
        let folder = tempfile::tempdir().expect("a scratch folder");
        let path = folder.path().join("old");
        std::fs::write(&path, old_program()).expect("it can be written");
        let all = std::fs::Permissions::from_mode(0o755);
        std::fs::set_permissions(&path, all).expect("it is this process's");
        let program = Program::new(&path).spawn();
        let pid = program.pid();
        let exe = std::fs::read_link(format!("/proc/{pid}/exe"));
        if !exe.is_ok_and(|exe| exe == path) {
            testkit::skip!("the kernel runs no 32-bit programs");
        }
        assert_eq!(verdict(&program), "fine");
        let frozen = freeze(pid.cast_signed(), None).expect("it can be stopped");
        let seen = |is_there, is_32_bit| Seen {
            is_there,
            is_32_bit,
            ..Seen::default()
        };
        for fine in [seen(true, true), seen(false, false)] {
            check_kind(&frozen.tasks[0], &fine).expect("it is of one kind");
        }
        let refused = check_kind(&frozen.tasks[0], &seen(true, false)).expect_err("of two");
        let want = format!(
            "pid {pid}: thread {pid}: 32-bit code in a program of 64 bits is not supported"
        );
        assert_eq!(refused.to_string(), want);
    }

    #[test]
    fn namespaces_of_a_task_and_of_its_children_are_named() {
        testkit::needs_root!();
        testkit::needs_program!("python3");
        for (flag, what) in [
            (0x0400_0000, "its own uts namespace"),
            (0x0200_0000, "its own cgroup namespace"),
            (0x80, "another time namespace for its children"),
            (0x2000_0000, "another pid namespace for its children"),
        ] {
            let folder = tempfile::tempdir().expect("a scratch folder");
            let code = "import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(int(sys.argv[1])): sys.exit(os.strerror(ctypes.get_errno()))
os.mkdir(sys.argv[2] + '/ready')
time.sleep(1000)";
            let program = Program::new("python3")
                .args(["-c", code, &flag.to_string()])
                .arg(folder.path())
                .spawn();
            program.wait_file(&folder.path().join("ready"));
            let want = format!("pid {} (python3): {what} is not supported", program.pid());
            assert_eq!(verdict(&program), want);
        }
    }

    #[test]
    fn a_tree_may_have_one_time_namespace_but_not_two() {
        testkit::needs_root!();
        testkit::needs_program!("python3");
        let folder = tempfile::tempdir().expect("a scratch folder");
        let ready = folder.path().join("ready");
        // With a child in the namespace, and the second time in there altogether.
        let code = "import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x80): sys.exit(os.strerror(ctypes.get_errno()))
child = os.fork()
if child:
    open(sys.argv[1], 'w').write(str(child))
time.sleep(1000)";
        let program = Program::new("python3")
            .args(["-c", code])
            .arg(&ready)
            .spawn();
        program.wait_ready("a child", || {
            std::fs::read(&ready).is_ok_and(|pid| !pid.is_empty())
        });
        let child = std::fs::read_to_string(&ready).expect("it was written");
        let child = child.parse().expect("a pid");
        let (root, what) = (program.pid(), "another time namespace for its children");
        assert_eq!(
            verdict(&program),
            format!(
                "pid {root} (python3): {what} is not supported; \
                 pid {child} (python3): its own time namespace is not supported"
            )
        );
        let frozen = freeze(child, None).expect("it can be stopped");
        let mut obstacles = Obstacles::default();
        let has_its_clocks =
            check(&frozen, OwnNamespaces::default(), false, &mut obstacles).expect("fine");
        assert!(has_its_clocks, "it has clocks of its own");
        obstacles.check().expect("nothing");
        let wanted = own_namespaces().expect("they are there");
        check_namespaces(&frozen.tasks[0], &wanted, &mut obstacles).expect("looked at");
        let refused = obstacles.check().expect_err("another one");
        assert_eq!(
            refused.to_string(),
            format!("pid {child} (python3): its own time namespace is not supported")
        );
    }
}
