//! A bash pipeline under a pseudoterminal: with its master in the tree, and with the master held
//! by the test.
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;

use testkit::program::{Program, Spawned};
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root};

use crate::{Facts, assert_restored, stillframe};

/// Runs bash under a pseudoterminal, types into it what comes out of a FIFO, and writes what it
/// shows to a file.
const TERMINAL: &str = r#"
import os, pty, select, sys
typed = os.open(sys.argv[1], os.O_RDWR)
pid, master = pty.fork()
if pid == 0:
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

struct Terminal {
    program: Spawned,
    typed: File,
    shown: std::path::PathBuf,
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
        }
    }

    fn type_in(&mut self, text: &str) {
        self.typed
            .write_all(text.as_bytes())
            .expect("the terminal reads");
    }

    #[track_caller]
    fn wait_shown(&self, text: &str) {
        self.program.wait_text(&self.shown, text);
    }
}

#[test]
#[ignore = "the foreground group of the terminal is lost"]
fn a_pipeline_goes_on_under_its_terminal() {
    needs_root!();
    needs_program!("/usr/bin/python3");
    needs_program!("bash");
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
    terminal.type_in("echo $((secret + 1)) $(stty size)\n");
    terminal.wait_shown("4712 41 99");
    // The terminal still makes signals.
    terminal.type_in("sleep 1000; echo code $?\n");
    terminal.program.wait_ready("sleep", || {
        let tree = terminal.program.tree();
        tree.iter().any(|pid| {
            fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|comm| comm == "sleep\n")
        })
    });
    terminal.type_in("\x03");
    terminal.wait_shown("prompt> ");
    terminal.type_in("echo interrupted $?\n");
    terminal.wait_shown("interrupted 130");
}

#[test]
fn a_job_of_the_tests_terminal_needs_the_option() {
    needs_root!();
    needs_program!("bash");
    needs_program!("/usr/bin/python3");
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
