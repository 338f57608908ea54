//! Programs of 32 bits: one that knows what it has, and programs of Debian's for i386, alone and
//! among others.
use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use testkit::program::{Program, Spawned};
use testkit::stillframe::Stillframe;
use testkit::wait::{SOON, wait_until};
use testkit::{needs_program, needs_root};

use crate::{Facts, assert_restored, assert_untouched, stillframe, ways};

/// Where `cargo xtask test` puts Debian's programs for i386.
const PROGRAMS: &str = "/var/cache/stillframe/i386";

/// What has to be there for these tests, or return.
macro_rules! needs_32_bit {
    () => {
        needs_root!();
        needs_program!("gcc");
        if let Err(why) = compile("int main(void) { return 0; }", Path::new("/dev/null"), &[]) {
            testkit::skip!("gcc makes no programs of 32 bits: {why}");
        }
        if sys::vdso_32::look().is_err() {
            testkit::skip!("the kernel runs no 32-bit programs");
        }
    };
}

/// Compiles a program of 32 bits.
fn compile(code: &str, to: &Path, options: &[&str]) -> Result<(), String> {
    let mut gcc = Command::new("gcc");
    gcc.args(["-m32", "-O1", "-x", "c", "-", "-o"]).arg(to);
    gcc.args(options).arg("-pthread");
    gcc.stdin(std::process::Stdio::piped());
    gcc.stdout(std::process::Stdio::null());
    gcc.stderr(std::process::Stdio::piped());
    let mut running = gcc.spawn().map_err(|error| error.to_string())?;
    let mut input = running.stdin.take().expect("it is a pipe");
    std::io::Write::write_all(&mut input, code.as_bytes()).map_err(|error| error.to_string())?;
    drop(input);
    let done = running.wait_with_output();
    let done = done.map_err(|error| error.to_string())?;
    let said = String::from_utf8_lossy(&done.stderr);
    match done.status.success() {
        true => Ok(()),
        false => Err(said.lines().next().unwrap_or_default().to_owned()),
    }
}

/// The program that checks itself.
struct State {
    _folder: tempfile::TempDir,
    report: PathBuf,
    spawned: Spawned,
}

impl State {
    fn start(options: &[&str]) -> Self {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let program = folder.path().join("state");
        compile(include_str!("code_32/state.c"), &program, options).expect("it is sound");
        let report = folder.path().join("report");
        let log = folder.path().join("log");
        let spawned = Program::new(&program).arg(&report).output(&log).spawn();
        spawned.wait_file(&report);
        Self {
            _folder: folder,
            report,
            spawned,
        }
    }

    fn pid(&self) -> u32 {
        self.spawned.pid()
    }

    /// How often each of its threads has gone round, and each signal has come.
    fn counts(&self) -> Vec<u64> {
        let text = fs::read_to_string(&self.report).expect("a report is always there");
        let words = text.split_ascii_whitespace();
        words.map(|word| word.parse().expect("a number")).collect()
    }

    /// Insists that all of it goes on and nothing was wrong.
    #[track_caller]
    fn goes_on(&self) {
        let failed = self.report.with_extension("failed");
        let before = self.counts();
        wait_until("all counters to advance", SOON, || {
            let why = fs::read_to_string(&failed).unwrap_or_default();
            assert!(self.spawned.is_alive() && why.is_empty(), "{why}");
            let now = self.counts();
            now.iter().zip(&before).all(|(now, before)| now > before)
        });
    }
}

/// Dumps and restores in each way.
#[track_caller]
fn assert_ways(stillframe: &Stillframe, state: &State) {
    state.goes_on();
    for _ in 0..3 {
        stillframe.cycle(1, &state.spawned, &[]);
        state.goes_on();
    }
    for way in ["--leave-running", "--live"] {
        for _ in 0..3 {
            stillframe.clear();
            stillframe.dump(state.pid(), &[way]).must();
            state.goes_on();
        }
        state.spawned.kill();
        stillframe.restore(&[]).must();
        state.goes_on();
    }
    stillframe.clear();
    stillframe.pre_dump(state.pid(), &[]).must();
    state.goes_on();
    stillframe.pre_dump(state.pid(), &[]).must();
    stillframe.dump(state.pid(), &[]).must();
    stillframe.restore(&[]).must();
    state.goes_on();
    ways::over_pre_dump(stillframe, &state.spawned, |_| state.goes_on());
}

#[test]
fn all_that_a_program_of_32_bits_has_goes_on() {
    needs_32_bit!();
    assert_ways(&stillframe(), &State::start(&[]));
}

#[test]
fn a_static_one_goes_on_as_well() {
    needs_32_bit!();
    assert_ways(&stillframe(), &State::start(&["-static"]));
}

/// Makes the vDSO of a process that of no kernel: another build id than this one's.
fn change_build_id(pid: u32) {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("it lives");
    let vdso = maps.lines().find(|line| line.ends_with("[vdso]"));
    let (start, _) = vdso.and_then(|line| line.split_once('-')).expect("a vDSO");
    let start = u64::from_str_radix(start, 16).expect("an address");
    let path = format!("/proc/{pid}/mem");
    let memory = fs::OpenOptions::new().read(true).write(true).open(path);
    let memory = memory.expect("it is ours to write");
    let mut code = [0; 4096];
    memory
        .read_exact_at(&mut code, start)
        .expect("it is mapped");
    let id = sys::vdso::build_id(&code).expect("it has one");
    let at = code.windows(id.len()).position(|bytes| bytes == id);
    let at = start + at.expect("it stands there") as u64;
    memory
        .write_all_at(&[!id[0]], at)
        .expect("it can be changed");
}

#[test]
fn another_kernels_vdso_of_32_bits_comes_back_as_a_proxy() {
    needs_32_bit!();
    let (stillframe, state) = (stillframe(), State::start(&[]));
    change_build_id(state.pid());
    assert_ways(&stillframe, &state);
    stillframe.clear();
    stillframe.dump(state.pid(), &["--leave-running"]).must();
    let shown = stillframe
        .command(&["show", "-D"])
        .arg(stillframe.images())
        .output();
    let shown = String::from_utf8(shown.expect("it runs").stdout).expect("text");
    assert!(shown.contains("needs a proxy"), "{shown}");
}

#[test]
fn a_dump_that_is_killed_leaves_it_going_on() {
    needs_32_bit!();
    let (stillframe, state) = (stillframe(), State::start(&["-DNO_EPOLL"]));
    for number in 0..40 {
        stillframe.clear();
        let command = stillframe.dump_command(state.pid(), &["--leave-running"]);
        stillframe.kill_after(command, Duration::from_micros(1000 + 500 * number));
    }
    state.goes_on();
    wait_until("nothing of ours to be left", SOON, || {
        let maps = fs::read_to_string(format!("/proc/{}/maps", state.pid()));
        !maps.expect("it lives").contains(" rwxp ")
    });
    stillframe.cycle(1, &state.spawned, &[]);
    state.goes_on();
}

#[test]
fn a_thread_that_runs_64_bit_code_in_it_is_refused() {
    needs_32_bit!();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let (program, log) = (folder.path().join("gate"), folder.path().join("log"));
    let code = include_str!("code_32/gate.c");
    compile(code, &program, &["-no-pie"]).expect("it is sound");
    let spawned = Program::new(&program).output(&log).spawn();
    spawned.wait_text(&log, "ready");
    let beyond = || {
        let tasks = fs::read_dir(format!("/proc/{}/task", spawned.pid()));
        let mut tids = tasks
            .expect("it lives")
            .map(|task| task.expect("one").file_name());
        tids.find_map(|tid| {
            tid.to_str()?
                .parse()
                .ok()
                .filter(|tid| *tid != spawned.pid())
        })
    };
    wait_until("its thread", SOON, || beyond().is_some());
    let tid: u32 = beyond().expect("it was there");
    let what = format!("thread {tid}: 64-bit code in a program of 32 bits");
    let refused = || {
        let told = stillframe()
            .dump(spawned.pid(), &["--leave-running"])
            .told();
        told.contains(&what)
    };
    wait_until("it to be refused", SOON, refused);
    assert!(spawned.is_alive());
}

/// A program of Debian's for i386.
fn debian(name: &str) -> Option<PathBuf> {
    Some(Path::new(PROGRAMS).join(name)).filter(|path| path.exists())
}

/// A shell of 32 bits with one of its own kind that answers it, and a 64-bit child beside them.
const SHELL: &str = r#"
mkfifo asked answered
"$BUSYBOX" sh -c 'while read number; do echo $((number * 3)); done' <asked >answered &
/bin/sleep 100000 &
exec 3>asked 4<answered
number=0
while true; do
    number=$((number + 1))
    echo $number >&3
    read answer <&4
    [ $answer = $((number * 3)) ] || echo wrong >>wrong
    echo $number >report.draft
    mv report.draft report
    usleep 2000
done
"#;

#[test]
fn busybox_of_i386_goes_on_among_others() {
    needs_root!();
    let Some(busybox) = debian("bin/busybox") else {
        testkit::skip!("Debian's busybox for i386 was not fetched");
    };
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let at = |name: &str| folder.path().join(name);
    // The root is of 64 bits.
    let program = Program::new("/bin/sh")
        .args(["-c", "\"$BUSYBOX\" sh -c \"$0\"; true", SHELL])
        .env("BUSYBOX", busybox)
        .folder(folder.path())
        .output(&at("log"))
        .spawn();
    program.wait_file(&at("report"));
    let report = || -> u64 {
        let text = fs::read_to_string(at("report")).expect("it is always there");
        text.trim_end().parse().expect("a number")
    };
    let goes_on = || {
        let before = report();
        wait_until("it to go on", SOON, || report() > before + 20);
        assert!(!at("wrong").exists(), "an answer was wrong");
    };
    for options in [&[][..], &["--leave-running"], &["--live"]] {
        for _ in 0..3 {
            if options.is_empty() {
                stillframe.cycle(1, &program, &[]);
            } else {
                stillframe.clear();
                stillframe.dump(program.pid(), options).must();
            }
            goes_on();
        }
    }
}

/// Threads, each with something of its own, that count; and a signal's handler.
const THREADS: &str = r#"
import os, signal, struct, sys, threading, time
assert struct.calcsize("P") == 4
counts = [0] * 5
def handle(number, frame): counts[4] += 1
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
own = threading.local()
def count(number):
    own.number = number * 1000
    while True:
        time.sleep(0.01)
        assert own.number == number * 1000
        counts[number] += 1
for number in range(4): threading.Thread(target=count, args=(number,), daemon=True).start()
while True:
    time.sleep(0.02)
    with open(sys.argv[1] + ".draft", "w") as draft: draft.write(" ".join(map(str, counts)))
    os.rename(sys.argv[1] + ".draft", sys.argv[1])
"#;

#[test]
fn python_of_i386_goes_on_with_its_threads() {
    needs_root!();
    let Some(python) = debian("usr/bin/python3.11") else {
        testkit::skip!("Debian's python3 for i386 was not fetched");
    };
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let at = |name: &str| folder.path().join(name);
    let libraries = ["lib", "usr/lib"].map(|lib| format!("{PROGRAMS}/{lib}/i386-linux-gnu"));
    let program = Program::new(debian("lib/i386-linux-gnu/ld-linux.so.2").expect("of its libc"))
        .args(["--library-path", &libraries.join(":")])
        .arg(python)
        .args(["-S", "-c", THREADS])
        .arg(at("report"))
        .env("PYTHONHOME", format!("{PROGRAMS}/usr"))
        .output(&at("log"))
        .spawn();
    program.wait_file(&at("report"));
    let report = || -> Vec<u64> {
        let text = fs::read_to_string(at("report")).expect("it is always there");
        let words = text.split(' ').map(|word| word.parse().expect("a number"));
        words.collect()
    };
    let before = Facts::moving(program.pid());
    for _ in 0..3 {
        let counts = report();
        stillframe.cycle(1, &program, &[]);
        wait_until("all counters to advance", SOON, || {
            assert!(program.is_alive());
            report()
                .iter()
                .zip(&counts)
                .all(|(now, before)| now > before)
        });
    }
    assert_eq!(fs::read_to_string(at("log")).unwrap_or_default(), "");
    let changing = &["map ", "fd 3"];
    let after = Facts::moving(program.pid()).without(changing);
    assert_restored(
        &stillframe,
        &before.without(changing),
        &after,
        "python of i386",
    );
}

/// Waits in a call for ever, with two threads and a handler on a stack of its own.
const STILL: &str = r#"
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <unistd.h>
static char stack[32768];
static void handle(int signal) { (void)signal; }
static void *wait(void *argument) { for (;;) pause(); return argument; }
int main(void) {
    stack_t alternate = {.ss_sp = stack, .ss_size = sizeof stack};
    sigaltstack(&alternate, 0);
    struct sigaction action = {.sa_handler = handle, .sa_flags = SA_ONSTACK};
    sigaction(SIGUSR1, &action, 0);
    pthread_t threads[2];
    for (int at = 0; at < 2; at++) pthread_create(&threads[at], 0, wait, 0);
    puts("ready");
    fflush(stdout);
    for (;;) pause();
}
"#;

/// Whether all threads of a process are asleep.
fn all_sleep(pid: u32) -> bool {
    let tasks = fs::read_dir(format!("/proc/{pid}/task"));
    let mut tasks = tasks
        .expect("it lives")
        .map(|task| task.expect("one").path());
    tasks.all(|task| {
        let stat = fs::read_to_string(task.join("stat")).unwrap_or_default();
        stat.contains(") S ")
    })
}

#[test]
fn nothing_about_it_differs() {
    needs_32_bit!();
    let stillframe = stillframe();
    let folder = tempfile::tempdir().expect("a scratch folder");
    let (program, log) = (folder.path().join("still"), folder.path().join("log"));
    compile(STILL, &program, &[]).expect("it is sound");
    let spawned = Program::new(&program).output(&log).spawn();
    spawned.wait_text(&log, "ready");
    let waits = || wait_until("it to wait", SOON, || all_sleep(spawned.pid()));
    waits();
    let before = Facts::still(spawned.pid());
    stillframe.dump(spawned.pid(), &["--leave-running"]).must();
    waits();
    assert_untouched(
        &before,
        &Facts::still(spawned.pid()),
        "a program of 32 bits",
    );
    // The kernel's page that no 32-bit program can reach is in every restored task.
    let first = &["map ffffffffff600000"];
    stillframe.cycle(3, &spawned, &[]);
    waits();
    let after = Facts::still(spawned.pid()).without(first);
    assert_restored(&stillframe, &before, &after, "a program of 32 bits");
}
