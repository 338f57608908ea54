//! Files that are not what they were when the tree is restored.
use std::fs::{self, File};
use std::io::Write;
use std::process::{Command, Stdio};

use testkit::program::Program;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root, tree};

use crate::{refusing_script, stillframe};

#[test]
fn a_log_that_grew_can_be_passed_on() {
    needs_root!();
    needs_program!("cat");
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let (fifo, log) = (folder.path().join("fifo"), folder.path().join("log"));
    let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
    let kind = rustix::fs::FileType::Fifo;
    rustix::fs::mknodat(rustix::fs::CWD, &fifo, kind, mode, 0).expect("a FIFO can be made");
    let program = Program::new("cat").arg(&fifo).output(&log).spawn();
    // Waits until the program opened it.
    let mut words = File::options()
        .write(true)
        .open(&fifo)
        .expect("the FIFO is there");
    words.write_all(b"before\n").expect("it is read");
    program.wait_text(&log, "before\n");
    wait_until("cat to wait", SOON, || tree::is_waiting(program.pid()));
    stillframe.dump(program.pid(), &[]).must();
    let mut other = File::options()
        .append(true)
        .open(&log)
        .expect("the log is there");
    other.write_all(b"meanwhile\n").expect("it can be written");
    let outcome = stillframe.restore(&[]).must_fail();
    if stillframe.is_peer() {
        return;
    }
    let path = log.to_str().expect("a plain name");
    let inherit = format!("fd[9]:{}", &path[1..]);
    let advice = format!("--inherit-fd '{inherit}' 9>>{path}");
    let outcome = outcome.names(&["size is 17 bytes, was 7", &advice]);
    assert_eq!(outcome.status.code(), Some(4), "{}", outcome.told());
    let restore = stillframe.restore_command(&["--inherit-fd", &inherit]);
    let status = Command::new("sh")
        .args(["-c", "exec \"$@\" 9>>\"$LOG\"", "sh"])
        .arg(restore.get_program())
        .args(restore.get_args())
        .env("LOG", &log)
        .stdin(Stdio::null())
        .status();
    assert!(status.is_ok_and(|status| status.success()));
    words.write_all(b"after\n").expect("it is read");
    program.wait_text(&log, "after\n");
    let text = fs::read_to_string(&log).expect("the log is there");
    assert_eq!(text, "before\nmeanwhile\nafter\n");
}

/// Opens one file to append to it and one to read and write it, and appends lines when told to.
const APPENDER: &str = r#"
import os, signal, sys
log = open(sys.argv[1], "a", buffering=1)
base = open(sys.argv[2], "r+")
log.write("before\n")
signal.signal(signal.SIGUSR1, lambda *_: log.write("after\n"))
os.mkdir(sys.argv[3])
while True:
    signal.pause()
"#;

#[test]
fn a_file_that_grew_is_accepted_where_it_is_only_appended_to() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer refuses every file that grew");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let [log, base, ready] = ["log", "base", "ready"].map(|name| folder.path().join(name));
    fs::write(&base, "data").expect("the folder can be written");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", APPENDER])
        .args([&log, &base, &ready])
        .spawn();
    program.wait_file(&ready);
    stillframe.dump(program.pid(), &[]).must();
    let grow = |path| {
        let file = File::options().append(true).open(path);
        let mut file = file.expect("it is there");
        file.write_all(b"meanwhile\n").expect("it can be written");
    };
    grow(&base);
    let outcome = stillframe.restore(&[]).must_fail();
    let advice = format!("put {} back as it was", base.display());
    let outcome = outcome.names(&["size is 14 bytes, was 4", &advice]);
    assert!(
        !outcome.output.contains("--inherit-fd"),
        "{}",
        outcome.told()
    );
    fs::write(&base, "data").expect("it can be written");
    grow(&log);
    stillframe.restore(&[]).must();
    tree::signal(program.pid(), rustix::process::Signal::USR1);
    program.wait_text(&log, "after\n");
    let text = fs::read_to_string(&log).expect("the log is there");
    assert_eq!(text, "before\nmeanwhile\nafter\n");
}

#[test]
fn another_version_of_a_program_is_noticed() {
    needs_root!();
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let path = folder.path().join("sleep");
    fs::copy("/bin/sleep", &path).expect("it can be copied");
    let mut bytes = fs::read(&path).expect("it was copied");
    let Some(id) = sys::vdso::build_id(&bytes) else {
        testkit::skip!("the programs here have no build IDs");
    };
    let program = Program::new(&path).arg("infinity").spawn();
    wait_until("sleep to sleep", SOON, || tree::is_waiting(program.pid()));
    stillframe.dump(program.pid(), &[]).must();
    let at = bytes.windows(id.len()).position(|part| part == id);
    bytes[at.expect("it is there")] ^= 1;
    fs::write(&path, &bytes).expect("nothing runs it");
    let outcome = stillframe.restore(&[]).must_fail();
    if !stillframe.is_peer() {
        outcome.names(&["sleep: build ID is "]);
    }
    let by_size = ["--file-validation", "filesize"];
    stillframe.restore(&by_size).must();
    assert!(program.is_alive());
}

/// A task and its child with two descriptors in common, on whose files each holds a lock of its
/// own; what `execve` does to the descriptors is different in the child.
const INHERITED: &str = r#"
import fcntl, os, signal, sys
one, two = [os.open(name, os.O_RDWR | os.O_CREAT) for name in sys.argv[1:3]]
os.set_inheritable(one, True)
fcntl.lockf(one, fcntl.LOCK_EX, 10, 0)
if os.fork() == 0:
    os.set_inheritable(one, False)
    os.set_inheritable(two, True)
    fcntl.lockf(two, fcntl.LOCK_EX, 20, 5)
    open(sys.argv[3], "w").close()
signal.pause()
"#;

#[test]
fn what_is_a_tasks_own_of_a_shared_descriptor_survives() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let [one, two, ready] = ["one", "two", "ready"].map(|name| folder.path().join(name));
    let program = Program::new("/usr/bin/python3")
        .args(["-c", INHERITED])
        .args([&one, &two, &ready])
        .spawn();
    program.wait_file(&ready);
    let pid = program.pid();
    wait_until("the tree", SOON, || program.tree().len() == 2);
    let child = tree::children(pid)[0];
    wait_until("both to wait", SOON, || {
        tree::is_waiting(pid) && tree::is_waiting(child)
    });
    let told = || {
        let files = [(pid, 3), (pid, 4), (child, 3), (child, 4)];
        let text = |(pid, fd)| fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}"));
        files.map(|file| text(file).expect("it is open"))
    };
    let before = told();
    let locks = before.each_ref().map(|text| text.matches("POSIX").count());
    assert_eq!(locks, [1, 0, 0, 1], "{before:?}");
    stillframe.dump(pid, &["--file-locks"]).must();
    stillframe.restore(&["--file-locks"]).must();
    assert_eq!(told(), before);
}

/// A child and its child, who have flags of their own for what they have inherited.
const INHERITED_TWICE: &str = r#"
import os, signal, sys
files = [os.open(sys.argv[1], os.O_RDONLY) for _ in range(4)]
if os.fork() == 0:
    for file in files[:2]:
        os.set_inheritable(file, True)
    if os.fork() == 0:
        os.set_inheritable(files[0], False)
        os.set_inheritable(files[3], True)
        open(sys.argv[2], "w").close()
signal.pause()
"#;

#[test]
fn what_is_inherited_has_flags_of_each_task() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let [file, ready] = ["file", "ready"].map(|name| folder.path().join(name));
    fs::write(&file, "contents").expect("write");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", INHERITED_TWICE])
        .args([&file, &ready])
        .spawn();
    program.wait_file(&ready);
    let tree = program.tree();
    program.wait_ready("them to wait", || {
        tree.iter().all(|pid| tree::is_waiting(*pid))
    });
    let closed = || {
        let is_closed = |pid: &u32, fd: u32| {
            let text = fs::read_to_string(format!("/proc/{pid}/fdinfo/{fd}"));
            let text = text.expect("it is open");
            let flags = text.lines().find_map(|line| line.strip_prefix("flags:"));
            flags.expect("each has flags").trim().starts_with("02")
        };
        let of_task = |pid| [3, 4, 5, 6].map(|fd| is_closed(pid, fd));
        tree.iter().map(of_task).collect::<Vec<_>>()
    };
    let want = [
        [true, true, true, true],
        [false, false, true, true],
        [true, false, true, false],
    ];
    assert_eq!(closed(), want);
    stillframe.dump(program.pid(), &["--leave-running"]).must();
    assert_eq!(closed(), want);
    stillframe.cycle(2, &program, &[]);
    assert_eq!(closed(), want);
}

/// A flock that a child has taken on a description of its parent's, who has it as well.
const FLOCKED: &str = r#"
import fcntl, os, signal, sys
file = open(sys.argv[1], "w")
if os.fork() == 0:
    fcntl.flock(file, fcntl.LOCK_EX)
    open(sys.argv[2], "w").close()
while True:
    signal.pause()
"#;

#[test]
fn a_flock_is_of_who_took_it() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer takes the locks itself");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let [file, ready] = ["file", "ready"].map(|name| folder.path().join(name));
    let program = Program::new("/usr/bin/python3")
        .args(["-c", FLOCKED])
        .args([&file, &ready])
        .spawn();
    program.wait_file(&ready);
    let child = tree::children(program.pid())[0];
    let told = || {
        let text = fs::read_to_string(format!("/proc/{}/fdinfo/3", program.pid()));
        let text = text.expect("it is open");
        let lock = text.lines().find(|line| line.starts_with("lock:"));
        // Without its place among all locks of the system.
        let words = lock.expect("it is locked").split_whitespace().skip(2);
        words.map(str::to_owned).collect::<Vec<_>>()
    };
    let before = told();
    assert_eq!(
        before[..4],
        ["FLOCK", "ADVISORY", "WRITE", &child.to_string()]
    );
    stillframe.cycle(2, &program, &["--file-locks"]);
    assert_eq!(told(), before);
    // Another one is told by name.
    stillframe.clear();
    stillframe.dump(program.pid(), &["--file-locks"]).must();
    let thief = File::open(&file).expect("it is there");
    rustix::fs::flock(&thief, rustix::fs::FlockOperation::NonBlockingLockExclusive)
        .expect("nobody has it");
    let outcome = stillframe.restore(&["--file-locks"]).must_fail();
    outcome.names(&["a flock for writing", &child.to_string()]);
    tree::wait_gone(&[program.pid(), child]);
    drop(thief);
    stillframe.restore(&["--file-locks"]).must();
    assert_eq!(told(), before);
}

/// Has a file open by a name that it has no more, while it has another one.
const OTHER_NAME: &str = r#"
import os, signal, sys
folder = sys.argv[1]
kept = open(folder + "/first", "w")
kept.write("contents")
kept.flush()
os.link(folder + "/first", folder + "/second")
os.unlink(folder + "/first")
os.mkdir(folder + "/ready")
signal.pause()
"#;

#[test]
fn links_made_for_an_image_are_told_and_go_with_it() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer's links stay");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", OTHER_NAME])
        .arg(folder.path())
        .spawn();
    program.wait_file(&folder.path().join("ready"));
    let links = || {
        let entries = fs::read_dir(folder.path()).expect("it is there");
        let names = entries.map(|entry| entry.expect("a name").path());
        let mut links = names
            .filter(|path| path.to_string_lossy().contains("link_remap"))
            .map(|path| path.display().to_string())
            .collect::<Vec<_>>();
        links.sort();
        links
    };
    let images = stillframe
        .images()
        .to_str()
        .expect("a plain path")
        .to_owned();
    let mut before = Vec::new();
    for options in [["-R"], ["--live"], ["-R"]] {
        let options = [&options[..], &["--link-remap", "--json"]].concat();
        let outcome = stillframe.dump(program.pid(), &options).must();
        // That of the image before, which was replaced, is gone.
        let now = links();
        assert_eq!(now.len(), 1, "{options:?}: {now:?}");
        assert_ne!(now, before, "{options:?}");
        let told = format!("the image needs the hard link {}", now[0]);
        let json = format!("\"links\":[\"{}\"]", now[0]);
        let outcome = outcome.names(&[&told, &json]);
        let shown = stillframe
            .command(&["show", &images])
            .output()
            .expect("it runs");
        let shown = String::from_utf8_lossy(&shown.stdout).into_owned();
        assert!(shown.contains(&now[0]), "{shown}{}", outcome.told());
        before = now;
    }
    program.kill();
    tree::wait_gone(&[program.pid()]);
    stillframe.restore(&["--link-remap"]).must();
    assert_eq!(links(), Vec::<String>::new(), "the restore has used it");
    // A dump that fails at the end leaves none of its own.
    let script = refusing_script(folder.path(), "post-dump");
    let failing = ["-R", "--link-remap", "--action-script", &script];
    let _ = stillframe.dump(program.pid(), &failing).must_fail();
    assert_eq!(links(), Vec::<String>::new());
}

/// Has a semaphore, a file that programs of Java have, and one more; tells what is in them.
const KEEPER: &str = r#"
import ctypes, mmap, os, sys
folder, name = sys.argv[1:]
C = ctypes.CDLL(None, use_errno=True)
C.sem_open.restype = ctypes.c_void_p
semaphore = ctypes.c_void_p(C.sem_open(name.encode(), os.O_CREAT, 0o600, 3))
assert semaphore.value
java = "/tmp/hsperfdata_" + name
os.mkdir(java, 0o750)
counters = open(f"{java}/{os.getpid()}", "w+b")
counters.write(b"java" * 5000)
counters.flush()
memory = mmap.mmap(counters.fileno(), 0)
counters.close()
os.mkdir(folder + "/session")
own = open(folder + "/session/own", "w")
own.write("own")
own.flush()
os.mkfifo(folder + "/asked")
os.mkfifo(folder + "/answer")
os.mkdir(folder + "/ready")
while True:
    with open(folder + "/asked") as asked: asked.read()
    value = ctypes.c_int()
    C.sem_getvalue(semaphore, ctypes.byref(value))
    C.sem_post(semaphore)
    with open(folder + "/answer", "w") as answer:
        answer.write(f"{value.value} {memory[:4].decode()} {os.stat(own.fileno()).st_nlink}")
"#;

/// A running [`KEEPER`], its scratch folder and the name of its files outside of that folder.
struct Kept {
    program: Option<testkit::program::Spawned>,
    folder: tempfile::TempDir,
    name: String,
}

impl Kept {
    fn start(test: &str) -> Self {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let name = format!("stillframe-{}-{test}", std::process::id());
        let program = Program::new("/usr/bin/python3")
            .args(["-c", KEEPER])
            .arg(folder.path())
            .arg(&name)
            .spawn();
        program.wait_file(&folder.path().join("ready"));
        Self {
            program: Some(program),
            folder,
            name,
        }
    }

    fn pid(&self) -> u32 {
        self.program.as_ref().expect("it was started").pid()
    }

    fn semaphore(&self) -> String {
        format!("/dev/shm/sem.{}", self.name)
    }

    fn java(&self) -> String {
        format!("/tmp/hsperfdata_{}", self.name)
    }

    /// Removes the files, as programs do that clean up after others.
    fn sweep(&self) {
        let _ = fs::remove_file(self.semaphore());
        let _ = fs::remove_dir_all(self.java());
        let _ = fs::remove_dir_all(self.folder.path().join("session"));
    }

    fn ask(&self) -> String {
        fs::write(self.folder.path().join("asked"), "x").expect("it reads");
        fs::read_to_string(self.folder.path().join("answer")).expect("it answers")
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        drop(self.program.take());
        self.sweep();
    }
}

#[test]
fn files_that_others_sweep_away_come_with_the_tree() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer saves no files that have names");
    }
    let kept = Kept::start("swept");
    assert_eq!(kept.ask(), "3 java 1");
    let pattern = format!("{}/session/*", kept.folder.path().display());
    let save: &[&str] = &["--save-files", &pattern];
    stillframe.dump(kept.pid(), save).must();
    kept.sweep();
    stillframe.restore(&[]).must();
    assert_eq!(kept.ask(), "4 java 1");
    let own = kept.folder.path().join("session/own");
    assert_eq!(fs::read_to_string(own).expect("it is there"), "own");
    assert!(std::path::Path::new(&kept.java()).is_dir());
    // A restore leaves files alone that are still there: nothing was swept away this time.
    stillframe.clear();
    stillframe.cycle(1, kept.program.as_ref().expect("it runs"), save);
    assert_eq!(kept.ask(), "5 java 1");
}

#[test]
fn failed_restore_leaves_none_of_the_files_that_it_made() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer saves no files that have names");
    }
    let kept = Kept::start("failed");
    stillframe.dump(kept.pid(), &[]).must();
    // The file that nobody saves is missing.
    kept.sweep();
    stillframe.restore(&[]).must_fail().names(&["is missing"]);
    assert!(!std::path::Path::new(&kept.semaphore()).exists());
    assert!(!std::path::Path::new(&kept.java()).exists());
    fs::create_dir(kept.folder.path().join("session")).expect("a folder");
    fs::write(kept.folder.path().join("session/own"), "own").expect("write");
    let folder = tempfile::tempdir().expect("a scratch folder");
    let script = refusing_script(folder.path(), "pre-resume");
    stillframe
        .restore(&["--action-script", &script])
        .must_fail();
    assert!(!std::path::Path::new(&kept.semaphore()).exists());
    stillframe.restore(&[]).must();
    assert_eq!(kept.ask(), "3 java 1");
}
