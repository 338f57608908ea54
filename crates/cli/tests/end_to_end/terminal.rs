//! A bash pipeline under a pseudoterminal: with its master in the tree, and with the master held
//! by the test.
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;
use std::process::Stdio;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::pty::{OpenptFlags, ioctl_tiocgptpeer, openpt, unlockpt};
use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};
use testkit::program::{Program, Spawned};
use testkit::stillframe::Stillframe;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root};

use crate::{Facts, assert_restored, refusing_script, stillframe};

/// Runs bash under a pseudoterminal, types into it what comes out of a FIFO, and writes what it
/// shows to a file.
const TERMINAL: &str = r#"
import os, pty, select, signal, sys
typed = os.open(sys.argv[1], os.O_RDWR)
pid, master = pty.fork()
if pid == 0:
    # Whoever runs the tests in the background may have it ignored, which is inherited.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.execv("/bin/bash", ["bash", "--norc", "--noprofile", "-i"])
while True:
    for ready in select.select([typed, master], [], [])[0]:
        data = os.read(ready, 4096)
        if ready == typed:
            os.write(master, data)
        else:
            # Opened for each piece, so that the image does not depend on the file's length.
            with open(sys.argv[2], "ab") as shown:
                shown.write(data)
"#;

/// A terminal's number is free while it is an image, and has to be free when it comes back: only
/// one test at a time makes terminals.
pub fn alone() -> MutexGuard<'static, ()> {
    static TERMINALS: Mutex<()> = Mutex::new(());
    TERMINALS.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Terminal {
    program: Spawned,
    typed: File,
    shown: std::path::PathBuf,
    /// How much was shown when something was typed last, and how the terminal echoes that.
    last: (usize, String),
}

impl Terminal {
    fn start(folder: &Path) -> Self {
        let fifo = folder.join("typed");
        let mode = rustix::fs::Mode::RUSR | rustix::fs::Mode::WUSR;
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, &fifo, kind, mode, 0).expect("a FIFO can be made");
        let shown = folder.join("shown");
        fs::write(&shown, "").expect("the folder can be written");
        let program = Program::new("/usr/bin/python3")
            .args(["-c", TERMINAL])
            .args([&fifo, &shown])
            .env("PS1", "prompt> ")
            .env("TERM", "dumb")
            .folder(folder)
            .output(&folder.join("log"))
            .spawn();
        // Waits until the program opened it.
        let typed = File::options()
            .write(true)
            .open(&fifo)
            .expect("the FIFO is there");
        Self {
            program,
            typed,
            shown,
            last: (0, String::new()),
        }
    }

    fn type_in(&mut self, text: &str) {
        let shown = fs::read(&self.shown).map_or(0, |shown| shown.len());
        // Long lines are broken.
        let start = text.trim_end().chars().take(8);
        let echo = start.map(|one| match one {
            // The end of a file.
            '\x04' => String::new(),
            '\0'..'\x20' => format!("^{}", char::from(one as u8 + b'@')),
            one => one.to_string(),
        });
        self.last = (shown, echo.collect());
        self.typed
            .write_all(text.as_bytes())
            .expect("the terminal reads");
    }

    /// Waits until a program of this name is in the foreground: what is typed reaches it.
    #[track_caller]
    fn wait_foreground(&self, name: &str) {
        let front = |pid: &u32| {
            let stat = fs::read(format!("/proc/{pid}/stat")).unwrap_or_default();
            let stat = sys::proc::Stat::parse(&stat);
            stat.is_ok_and(|stat| stat.comm == name.as_bytes() && stat.pgrp == stat.tty_pgrp)
        };
        let ready = || self.program.tree().iter().any(front);
        self.program.wait_ready(name, ready);
    }

    /// Waits until the shell asks for the next line: what is typed while it deals with a signal
    /// may be thrown away with the line that was interrupted. The prompt before what was typed last
    /// is no answer to it; it may be written to the file late.
    #[track_caller]
    fn wait_prompt(&self) {
        let (from, echo) = &self.last;
        let asks = || {
            let shown = fs::read(&self.shown).unwrap_or_default();
            let new = String::from_utf8_lossy(shown.get(*from..).unwrap_or_default());
            let echoed = new.split_once(echo.as_str());
            echoed.is_some_and(|(_, rest)| rest.ends_with("prompt> "))
        };
        self.program.wait_ready("its prompt", asks);
    }

    #[track_caller]
    fn wait_shown(&self, text: &str) {
        self.program.wait_text(&self.shown, text);
    }
}

#[test]
fn a_pipeline_goes_on_under_its_terminal() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    needs_program!("bash");
    let _alone = alone();
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let mut terminal = Terminal::start(folder.path());
    terminal.wait_shown("prompt> ");
    terminal.type_in("secret=4711; stty rows 41 cols 99\n");
    // A pipeline in the foreground that answers each line.
    terminal.type_in("cat | while read word; do echo \"<$word $secret>\"; done | tr a-z A-Z\n");
    terminal.type_in("before\n");
    terminal.wait_shown("<BEFORE 4711>");
    let tasks = terminal.program.tree();
    assert!(tasks.len() >= 5, "{tasks:?}");
    let facts = Facts::moving(terminal.program.pid());
    stillframe.cycle(2, &terminal.program, &[]);
    assert_eq!(terminal.program.tree(), tasks);
    let after = Facts::moving(terminal.program.pid());
    assert_restored(&stillframe, &facts, &after, "the pipeline");
    terminal.type_in("after\n");
    terminal.wait_shown("<AFTER 4711>");
    // End of file ends the pipeline; the shell is in charge of its terminal again.
    terminal.type_in("\x04");
    terminal.wait_prompt();
    terminal.type_in("echo $((secret + 1)) $(stty size)\n");
    terminal.wait_shown("4712 41 99");
    // The terminal still makes signals.
    terminal.type_in("sleep 1000; echo code $?\n");
    terminal.wait_foreground("sleep");
    terminal.type_in("\x03");
    terminal.wait_prompt();
    terminal.type_in("echo interrupted $?\n");
    terminal.wait_shown("interrupted 130");
    // A job can be stopped, sent to the background and brought back.
    terminal.type_in("sed -u s/cold/warm/\n");
    terminal.wait_foreground("sed");
    terminal.type_in("\x1a");
    terminal.wait_shown("Stopped");
    terminal.wait_prompt();
    terminal.type_in("echo in front: $((secret + 2))\n");
    terminal.wait_shown("in front: 4713");
    terminal.type_in("fg\n");
    terminal.wait_foreground("sed");
    terminal.type_in("as cold as ever\n");
    terminal.wait_shown("as warm as ever");
}

#[test]
fn a_stopped_job_is_brought_back_to_the_foreground() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    needs_program!("bash");
    let _alone = alone();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer lets the shell see the stop again");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let mut terminal = Terminal::start(folder.path());
    terminal.wait_shown("prompt> ");
    terminal.type_in("sed -u s/cold/warm/ | sed -u s/hot/mild/\n");
    terminal.wait_foreground("sed");
    terminal.type_in("cold and hot before\n");
    terminal.wait_shown("warm and mild before");
    terminal.type_in("\x1a");
    terminal.wait_shown("Stopped");
    terminal.wait_prompt();
    // The shell shows its prompt when it has seen the stops of all of them.
    terminal.type_in("echo $((1 + 1)) in front\n");
    terminal.wait_shown("2 in front");
    let facts = Facts::moving(terminal.program.pid());
    stillframe.cycle(2, &terminal.program, &[]);
    let after = Facts::moving(terminal.program.pid());
    assert_restored(&stillframe, &facts, &after, "a stopped job");
    let shown = |text: &str| {
        let all = fs::read_to_string(&terminal.shown).expect("it is written");
        all.matches(text).count()
    };
    assert_eq!(shown("Stopped"), 1);
    terminal.type_in("fg\n");
    terminal.wait_foreground("sed");
    terminal.type_in("cold and hot after\n");
    terminal.wait_shown("warm and mild after");
}

/// A task that has given its session's terminal up, and its child that has it.
/// Has the slave of a terminal, opened through the master close-on-exec, under other numbers as
/// well, for programs that it starts: systemd does so.
const PASSED_ON: &str = r#"
import fcntl, os, signal, sys
TIOCGPTPEER = 0x5441
master = os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY)
fcntl.ioctl(master, 0x40045431, b"\0\0\0\0")
slave = fcntl.ioctl(master, TIOCGPTPEER, os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
for number in 60, 61:
    os.dup2(slave, number)
def say(*_):
    with open(sys.argv[1] + "/draft", "w") as draft:
        for number in slave, 60, 61:
            draft.write(f"{fcntl.fcntl(number, fcntl.F_GETFD)} ")
    os.rename(sys.argv[1] + "/draft", sys.argv[1] + "/said")
signal.signal(signal.SIGUSR1, say)
os.mkdir(sys.argv[1] + "/ready")
while True:
    signal.pause()
"#;

#[test]
fn a_terminal_passed_on_to_programs_stays_open_for_them() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let _alone = alone();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer closes it");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", PASSED_ON])
        .arg(folder.path())
        .spawn();
    program.wait_file(&folder.path().join("ready"));
    stillframe.cycle(2, &program, &[]);
    testkit::tree::signal(program.pid(), rustix::process::Signal::USR1);
    let said = folder.path().join("said");
    program.wait_file(&said);
    assert_eq!(
        std::fs::read_to_string(&said).expect("it says it"),
        "1 0 0 "
    );
}

const GIVEN_UP: &str = r#"
import fcntl, os, pty, signal, sys, termios
pid, master = pty.fork()
if pid == 0:
    if os.fork() == 0:
        if os.fork() != 0:
            fcntl.ioctl(0, termios.TIOCNOTTY)
            open(sys.argv[1], "w")
        signal.pause()
    signal.pause()
while True:
    os.read(master, 4096)
"#;

#[test]
fn a_terminal_that_was_given_up_stays_so() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let _alone = alone();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer gives the terminal back to every task of its session");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let ready = folder.path().join("ready");
    let program = Program::new("/usr/bin/python3")
        .args(["-c", GIVEN_UP])
        .arg(&ready)
        .spawn();
    program.wait_file(&ready);
    wait_until("the tree", SOON, || program.tree().len() == 4);
    let facts = Facts::moving(program.pid());
    stillframe.cycle(1, &program, &[]);
    let after = Facts::moving(program.pid());
    assert_restored(&stillframe, &facts, &after, "a terminal given up");
}

#[test]
fn a_job_of_the_tests_terminal_needs_the_option() {
    needs_root!();
    needs_program!("bash");
    needs_program!("/usr/bin/python3");
    let _alone = alone();
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let mut terminal = Terminal::start(folder.path());
    terminal.wait_shown("prompt> ");
    terminal.type_in("cat | tr a-z A-Z | cat > out\n");
    let child = |pid: u32| testkit::tree::children(pid).first().copied();
    wait_until("the pipeline", SOON, || terminal.program.tree().len() == 5);
    // The job alone, not its shell and not the holder of the master.
    let shell = child(terminal.program.pid()).expect("bash runs");
    let cat = child(shell).expect("cat runs");
    stillframe.dump(cat, &[]).must_fail();
    terminal.type_in("goes on\n\x04");
    terminal
        .program
        .wait_text(&folder.path().join("out"), "GOES ON");
    let mut text = String::new();
    File::open(folder.path().join("out"))
        .and_then(|mut out| out.read_to_string(&mut text))
        .expect("the pipeline wrote");
    assert_eq!(text, "GOES ON\n");
}

#[test]
fn a_failed_restore_leaves_the_modes_of_the_terminal() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    let _alone = alone();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer sets them first");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = openpt(flags).expect("a terminal");
    unlockpt(&master).expect("the slave can be opened");
    let slave = ioctl_tiocgptpeer(&master, flags).expect("its slave");
    let modes = || tcgetattr(&slave).expect("a terminal").local_modes;
    let cooked = tcgetattr(&slave).expect("a terminal");
    let raw = "import os, sys, time, tty\n\
        own = os.open(sys.argv[1], os.O_RDWR | os.O_NOCTTY)\n\
        tty.setraw(own)\n\
        time.sleep(1000)";
    let program = Program::new("/usr/bin/python3")
        .args(["-c", raw])
        .arg(
            rustix::pty::ptsname(&master, Vec::new())
                .expect("a name")
                .to_string_lossy()
                .as_ref(),
        )
        .spawn();
    program.wait_ready("its modes", || modes() != cooked.local_modes);
    let raw = modes();
    wait_until("its sleep", SOON, || {
        testkit::tree::is_waiting(program.pid())
    });
    stillframe.dump(program.pid(), &["--shell-job"]).must();
    testkit::tree::wait_gone(&[program.pid()]);
    tcsetattr(&slave, OptionalActions::Now, &cooked).expect("a terminal");
    let refuses = refusing_script(folder.path(), "pre-resume");
    let restore = |options: &[&str]| {
        let mut command = stillframe.restore_command(&[&["-j"], options].concat());
        let stdin = slave.try_clone().expect("a descriptor");
        let restored = command.stdin(stdin).stdout(Stdio::null()).status();
        restored.expect("it runs").success()
    };
    assert!(!restore(&["--action-script", &refuses]));
    assert_eq!(modes(), cooked.local_modes);
    assert!(restore(&[]), "{}", stillframe.logs());
    assert_eq!(modes(), raw);
}

/// Restores a job of the shell in the terminal, from the shell, as a user does.
fn restore_in(terminal: &mut Terminal, stillframe: &Stillframe) {
    let command = stillframe.command(&["restore", "-j"]);
    let program = command.get_program().to_str().expect("a plain name");
    let images = stillframe.images().to_str().expect("a plain name");
    terminal.type_in(&format!("{program} restore -j -D {images}\n"));
}

#[test]
fn a_restored_job_of_the_shell_has_the_terminal() {
    needs_root!();
    needs_program!("bash");
    needs_program!("/usr/bin/python3");
    let _alone = alone();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer leaves job control to the user");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let mut terminal = Terminal::start(folder.path());
    terminal.wait_shown("prompt> ");
    terminal.type_in("sed -u s/cold/warm/\n");
    terminal.wait_foreground("sed");
    terminal.type_in("cold before\n");
    terminal.wait_shown("warm before");
    let sed = terminal.program.tree()[2];
    wait_until("sed to read", SOON, || testkit::tree::is_waiting(sed));
    stillframe.dump(sed, &["--shell-job"]).must();
    terminal.wait_shown("Killed");
    terminal.wait_prompt();
    restore_in(&mut terminal, &stillframe);
    // It reads what is typed: it is in front.
    terminal.wait_foreground("sed");
    terminal.type_in("cold after\n");
    terminal.wait_shown("warm after");
    // It is stopped by the terminal, and the shell is told.
    terminal.type_in("\x1a");
    terminal.wait_shown("Stopped");
    terminal.wait_prompt();
    terminal.type_in("echo in front: $((4711 + 1))\n");
    terminal.wait_shown("in front: 4712");
    terminal.type_in("fg\n");
    terminal.wait_foreground("sed");
    terminal.type_in("cold again\n");
    terminal.wait_shown("warm again");
    // In the background it goes on, until it wants to read.
    terminal.type_in("\x1a");
    terminal.wait_prompt();
    terminal.type_in("bg\n");
    terminal.wait_prompt();
    terminal.type_in("echo in front: $((4712 + 1))\n");
    terminal.wait_shown("in front: 4713");
    terminal.type_in("fg\n");
    terminal.wait_foreground("sed");
    terminal.type_in("cold at last\n");
    terminal.wait_shown("warm at last");
    // It is interrupted, and the shell has the terminal again.
    terminal.type_in("\x03");
    wait_until("its end", SOON, || !testkit::tree::is_alive(sed));
    terminal.wait_prompt();
    terminal.type_in("echo in front: $((4713 + 1))\n");
    terminal.wait_shown("in front: 4714");
}

#[test]
fn an_interpreter_goes_on_where_its_shell_restores_it() {
    needs_root!();
    needs_program!("bash");
    needs_program!("/usr/bin/python3");
    let _alone = alone();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer leaves job control to the user");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let mut terminal = Terminal::start(folder.path());
    terminal.wait_shown("prompt> ");
    terminal.type_in("/usr/bin/python3 -q\n");
    terminal.wait_shown(">>> ");
    terminal.type_in("secret = 4711\n");
    for turn in 0..3 {
        let marker = format!("told {}", 5000 + turn);
        terminal.type_in(&format!("print('told', {} + {turn})\n", 5000));
        terminal.wait_shown(&marker);
        let shown = || fs::read(&terminal.shown).is_ok_and(|shown| shown.ends_with(b">>> "));
        terminal
            .program
            .wait_ready("the interpreter's prompt", shown);
        let python = terminal.program.tree().pop().expect("it runs");
        wait_until("it to read", SOON, || testkit::tree::is_waiting(python));
        stillframe.clear();
        stillframe.dump(python, &["--shell-job"]).must();
        terminal.wait_prompt();
        restore_in(&mut terminal, &stillframe);
        terminal.wait_foreground("python3");
    }
    terminal.type_in("print(secret + 1)\n");
    terminal.wait_shown("4712");
    terminal.type_in("exit()\n");
    terminal.wait_prompt();
    terminal.type_in("echo in front: $((4711 + 2))\n");
    terminal.wait_shown("in front: 4713");
}

/// A terminal in which `job`, begun by the shell, was dumped and restored as the shell's job, and
/// runs in the background after Ctrl-Z and `bg`; its root.
fn restored_to_the_background(
    folder: &Path,
    stillframe: &Stillframe,
    job: &str,
) -> (Terminal, u32) {
    let mut terminal = Terminal::start(folder);
    terminal.wait_shown("prompt> ");
    terminal.type_in(&format!("{job}\n"));
    let name = job.split(' ').next().expect("a name");
    terminal.wait_foreground(name);
    let root = terminal.program.tree()[2];
    stillframe.dump(root, &["--shell-job"]).must();
    terminal.wait_shown("Killed");
    terminal.wait_prompt();
    restore_in(&mut terminal, stillframe);
    terminal.wait_foreground(name);
    terminal.type_in("\x1a");
    terminal.wait_shown("Stopped");
    terminal.wait_prompt();
    terminal.type_in("bg\n");
    let runs = || testkit::tree::state(root) != Some('T');
    wait_until("the job to run", SOON, runs);
    terminal.wait_prompt();
    (terminal, root)
}

/// Waits until a restored job has ended and its shell is in front again.
fn wait_ended(terminal: &mut Terminal, root: u32) {
    wait_until("its end", SOON, || !testkit::tree::is_alive(root));
    terminal.wait_prompt();
    terminal.type_in("echo in front: $((4711 + 1))\n");
    terminal.wait_shown("in front: 4712");
}

#[test]
fn restored_job_that_ran_in_the_background_is_interrupted_in_the_foreground() {
    needs_root!();
    needs_program!("bash");
    needs_program!("/usr/bin/python3");
    let _alone = alone();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer leaves job control to the user");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let (mut terminal, root) = restored_to_the_background(folder.path(), &stillframe, "sleep 1000");
    // The shell sends no signal to a job that runs: only who has the terminal has changed.
    terminal.type_in("fg\n");
    terminal.wait_foreground("stillframe");
    terminal.type_in("\x1a");
    wait_until("the job to stop", SOON, || {
        testkit::tree::state(root) == Some('T')
    });
    terminal.wait_prompt();
    terminal.type_in("fg\n");
    terminal.wait_foreground("sleep");
    terminal.type_in("\x1a");
    terminal.wait_prompt();
    terminal.type_in("bg\n");
    wait_until("the job to run", SOON, || {
        testkit::tree::state(root) != Some('T')
    });
    terminal.wait_prompt();
    terminal.type_in("fg\n");
    terminal.wait_foreground("stillframe");
    terminal.type_in("\x03");
    wait_ended(&mut terminal, root);
}

#[test]
fn restored_job_reads_in_the_foreground_after_it_ran_in_the_background() {
    needs_root!();
    needs_program!("bash");
    needs_program!("/usr/bin/python3");
    let _alone = alone();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer leaves job control to the user");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let go = folder.path().join("go");
    let script = folder.path().join("reads");
    let text = format!(
        "while [ ! -e {} ]; do sleep 0.05; done; read word; echo \"<$word>\"",
        go.display()
    );
    fs::write(&script, text).expect("the folder can be written");
    let job = format!("sh {}", script.display());
    let (mut terminal, root) = restored_to_the_background(folder.path(), &stillframe, &job);
    terminal.type_in("fg\n");
    terminal.wait_foreground("stillframe");
    fs::write(&go, "").expect("the folder can be written");
    // It wants to read, is stopped for that, and comes to the front.
    terminal.wait_foreground("sh");
    terminal.type_in("word\n");
    terminal.wait_shown("<word>");
    wait_ended(&mut terminal, root);
}

#[test]
fn signal_to_a_restore_reaches_the_restored_job() {
    needs_root!();
    needs_program!("bash");
    needs_program!("/usr/bin/python3");
    let _alone = alone();
    let stillframe = stillframe();
    if stillframe.is_peer() {
        testkit::skip!("the peer leaves job control to the user");
    }
    let folder = tempfile::tempdir().expect("a scratch folder");
    let (mut terminal, root) = restored_to_the_background(folder.path(), &stillframe, "sleep 1000");
    terminal.type_in("kill %1\n");
    wait_until("its end", SOON, || !testkit::tree::is_alive(root));
    terminal.wait_prompt();
    terminal.type_in("wait; echo none is left: $((4711 + 1))\n");
    terminal.wait_shown("none is left: 4712");
}
