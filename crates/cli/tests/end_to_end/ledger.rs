//! Everything that the lists of `resources::ledger` call kept, set to what is not the default, in
//! cycles; and what they call refused or what is outside of a tree, by name.
use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use testkit::program::{Program, Spawned};
use testkit::{needs_kernel_memory, needs_program, needs_root, skip};

use crate::stillframe;

/// A program that sets what it can, and tells what it reads back.
struct Told {
    program: Spawned,
    folder: tempfile::TempDir,
}

impl Told {
    fn begin() -> Self {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let program = Program::new("/usr/bin/python3")
            .args(["-c", include_str!("ledger.py")])
            .arg(folder.path())
            .output(&folder.path().join("output"))
            .spawn();
        program.wait_file(&folder.path().join("ready"));
        Self { program, folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The values that the program reads back for `name`, a line each.
    fn tell(&self, name: &str) -> String {
        let commands = self.path("commands");
        let commands = fs::OpenOptions::new().write(true).open(commands);
        writeln!(commands.expect("it reads"), "{name}").expect("it is there");
        self.program.wait_file(&self.path(name));
        fs::read_to_string(self.path(name)).expect("it has told")
    }
}

/// The lines that differ.
fn differences(before: &str, after: &str) -> Vec<String> {
    let pairs = before.lines().zip(after.lines());
    let differ = pairs.filter(|(before, after)| before != after);
    let mut told = differ
        .map(|(before, after)| format!("{} is {} now", before.trim(), after.trim()))
        .collect::<Vec<_>>();
    if before.lines().count() != after.lines().count() {
        told.push("other lines".to_owned());
    }
    told
}

#[test]
fn all_that_can_be_set_survives() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        skip!("the peer forgets some of it");
    }
    let told = Told::begin();
    let before = told.tell("before");
    for cycle in 1..=2 {
        stillframe.clear();
        stillframe
            .dump(told.program.pid(), &["--file-locks"])
            .must();
        stillframe.restore(&["--file-locks"]).must();
        let after = told.tell(&format!("after-{cycle}"));
        let differ = differences(&before, &after);
        assert!(differ.is_empty(), "cycle {cycle}: {differ:#?}");
    }
}

/// A python program that says that it is ready by a file.
fn python(folder: &Path, code: &str) -> Spawned {
    let program = Program::new("/usr/bin/python3")
        .args(["-c", code])
        .arg(folder)
        .spawn();
    program.wait_file(&folder.join("ready"));
    program
}

#[test]
fn breakpoint_that_a_debugger_has_left_is_refused_by_name() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        skip!("the peer does not look for it");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    // At an address that is never run; debug registers follow 848 bytes of `struct user`.
    let code = "import ctypes, os, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
child = os.fork()
if child == 0:
    while True: time.sleep(1000)
def trace(*args):
    if libc.ptrace(*args) == -1: sys.exit(os.strerror(ctypes.get_errno()))
trace(16, child, 0, 0)
os.waitpid(child, 0)
trace(6, child, 848, 0x1000)
trace(6, child, 848 + 7 * 8, 1)
trace(17, child, 0, 0)
open(sys.argv[1] + '/new', 'w').write(str(child))
os.rename(sys.argv[1] + '/new', sys.argv[1] + '/ready')
time.sleep(1000)";
    let program = python(folder.path(), code);
    let child = fs::read_to_string(folder.path().join("ready")).expect("it was written");
    let refused = stillframe.dump(program.pid(), &[]).must_fail();
    let refused = refused.names(&[&child, "a breakpoint that a debugger has left"]);
    assert_eq!(refused.status.code(), Some(3), "{}", refused.told());
}

#[test]
fn root_with_a_parent_death_signal_is_not_killed_by_the_end_of_its_restorer() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        skip!("the peer sends it the signal");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let code = "import ctypes, sys, time
ctypes.CDLL(None).prctl(1, 9)
open(sys.argv[1] + '/ready', 'w').close()
time.sleep(1000)";
    let program = python(folder.path(), code);
    stillframe.dump(program.pid(), &[]).must();
    let refused = stillframe.restore(&[]).must_fail();
    refused.names(&["its parent-death signal 9", "--restore-sibling"]);
    stillframe.restore(&["--restore-sibling"]).must();
    assert!(program.is_alive());
}

#[test]
fn pipe_to_outside_is_refused_by_name_or_handed_in() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        skip!("the peer keeps it without its other end");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let code = "import os, signal, sys, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
reader, writer = os.pipe()
if os.fork():
    os.close(writer)
    while True:
        os.read(reader, 4096)
        time.sleep(0.01)
os.close(reader)
os.setsid()
with open(sys.argv[1] + '/new', 'w') as out:
    out.write('%d %d' % (os.getpid(), os.fstat(writer).st_ino))
os.rename(sys.argv[1] + '/new', sys.argv[1] + '/ready')
while True:
    os.write(writer, b'x')
    time.sleep(0.01)";
    let _reader = python(folder.path(), code);
    let told = fs::read_to_string(folder.path().join("ready")).expect("it was written");
    let (pid, inode) = told.split_once(' ').expect("two numbers");
    let pid = pid.parse().expect("a pid");
    let refused = stillframe.dump(pid, &[]).must_fail();
    let link = format!("(pipe:[{inode}])");
    let refused = refused.names(&[&link, "its other end is outside of the tree", "--external"]);
    assert_eq!(refused.status.code(), Some(3), "{}", refused.told());

    let external = format!("--external=pipe:[{inode}]");
    stillframe.dump(pid, &[&external]).must();
    stillframe.restore(&[]).must_fail().names(&["--inherit-fd"]);
    let (mut reader, writer) = std::io::pipe().expect("a pipe");
    let inherited = format!("--inherit-fd=fd[0]:pipe:[{inode}]");
    let mut restore = stillframe.restore_command(&[&inherited]);
    restore.stdin(writer);
    assert!(
        restore.status().expect("it runs").success(),
        "{}",
        stillframe.logs()
    );
    drop(restore);
    reader.read_exact(&mut [0; 20]).expect("it writes");
    let pid = rustix::process::Pid::from_raw(pid.cast_signed()).expect("a pid");
    rustix::process::kill_process(pid, rustix::process::Signal::KILL).expect("it lives");
}

#[test]
fn trigger_of_pressure_survives() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    needs_kernel_memory!();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        skip!("the peer forgets it");
    }
    if fs::read("/proc/pressure/memory").is_err() {
        skip!("no pressure is measured here");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let code = "import os, select, sys, time
trigger = os.open('/proc/pressure/memory', os.O_RDWR | os.O_NONBLOCK)
os.write(trigger, b'some 1900000 2000000\\0')
poll = select.poll()
poll.register(trigger, select.POLLPRI)
number = 0
while True:
    events = poll.poll(20)
    number += 1
    with open(sys.argv[1] + '/new', 'w') as out:
        out.write('%d %s' % (number, 'lost' if events and events[0][1] & select.POLLERR else 'set'))
    os.rename(sys.argv[1] + '/new', sys.argv[1] + '/ready')";
    let program = python(folder.path(), code);
    let told = || {
        let text = fs::read_to_string(folder.path().join("ready")).expect("it was written");
        let (number, state) = text.split_once(' ').expect("two words");
        (number.parse::<u64>().expect("a number"), state.to_owned())
    };
    for _ in 0..2 {
        stillframe.clear();
        stillframe.dump(program.pid(), &[]).must();
        let (number, _) = told();
        stillframe.restore(&[]).must();
        program.wait_ready("it to go on", || told().0 > number + 2);
        assert_eq!(told().1, "set");
    }
}

#[test]
fn directory_that_signals_its_changes_is_refused_by_name() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let stillframe = stillframe();
    if stillframe.is_peer() {
        skip!("the peer forgets it");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let code = "import fcntl, os, signal, sys, time
signal.signal(signal.SIGIO, signal.SIG_IGN)
watched = os.open('/proc/self/cwd', os.O_RDONLY)
fcntl.fcntl(watched, fcntl.F_NOTIFY, fcntl.DN_CREATE | fcntl.DN_MULTISHOT)
open(sys.argv[1] + '/ready', 'w').close()
time.sleep(1000)";
    let program = python(folder.path(), code);
    let refused = stillframe.dump(program.pid(), &[]).must_fail();
    refused.names(&["F_NOTIFY"]);
}
