//! The emulator: started, listened to, and killed in the end.
use std::collections::BTreeMap;
use std::fs;
use std::io::{BufRead, BufReader, Read, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use super::{MARK, Verdict};
use crate::tree;

/// The emulator's name in `PATH`.
pub const PROGRAM: &str = "qemu-system-x86_64";

/// When a machine is given up, by the processor time that it took: 15 to 25 s are usual.
const MOST_PROCESSOR_TIME: Duration = Duration::from_secs(300);
/// The same by the host's clock, should it take none: however busy the host is, it gets some.
const MOST_TIME: Duration = Duration::from_secs(1200);
/// How often the former is looked at.
const LOOK: Duration = Duration::from_secs(2);

/// The environment variable that names a file to which all that machines say is appended, each line
/// with the seconds since the beginning.
const VARIABLE: &str = "STILLFRAME_MACHINE_LOG";

/// All that a machine said.
#[derive(Debug, Default)]
pub struct MachineLog {
    lines: Vec<String>,
    /// How it ended, in words.
    end: String,
}

/// A machine to be booted.
#[derive(Clone, Copy, Debug)]
pub struct Machine<'a> {
    /// The kernel.
    pub kernel: &'a Path,
    /// Its first file system.
    pub archive: &'a Path,
    /// The model of its processor, as the emulator calls it.
    pub processor: &'a str,
    /// Where what it writes to a second serial line goes.
    pub out: Option<&'a Path>,
}

/// Boots a machine, and returns when it is off.
pub fn run(emulator: &Path, machine: &Machine<'_>) -> MachineLog {
    let errors = tempfile::NamedTempFile::new().expect("a temporary file can be made");
    // setpriv(1), so that it dies with the thread that started it, whatever ends that.
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "--"])
        .arg(emulator)
        // Only ring 3 may be run by some hosts' processors, so none is asked to.
        .args(["-accel", "tcg", "-cpu", machine.processor])
        .args(["-smp", "1", "-m", "1024"])
        // An instruction takes 2 ns, and time that is only waited for takes none.
        .args(["-icount", "shift=1,sleep=off", "-seed", "1"])
        .args(["-rtc", "base=2026-01-01T00:00:00,clock=vm"])
        .args(["-no-user-config", "-nodefaults", "-display", "none"])
        .args(["-no-reboot", "-serial", "stdio"])
        .arg("-kernel")
        .arg(machine.kernel)
        .arg("-initrd")
        .arg(machine.archive)
        // Nothing of the kernel's may come between what the tests say, but its last words.
        .args([
            "-append",
            "console=ttyS0 quiet loglevel=1 panic=-1 oops=panic",
        ])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(errors.reopen().expect("it was just made"));
    if let Some(out) = machine.out {
        command
            .arg("-serial")
            .arg(format!("file:{}", out.display()));
    }
    let mut told = MachineLog::default();
    match command.spawn() {
        Err(error) => told.end = format!("setpriv cannot be started: {error}"),
        Ok(child) => {
            let mut running = EmulatorProcess(child);
            let stdout = running.0.stdout.take().expect("it was made a pipe above");
            told.end = listen(running.0.id(), lines(stdout), &mut told.lines);
            drop(running);
        }
    }
    let errors = fs::read_to_string(errors.path()).unwrap_or_default();
    told.end
        .push_str(&format!(". The emulator said: {errors:?}"));
    told
}

/// A machine, which is killed in the end, unless it is off.
struct EmulatorProcess(Child);

impl Drop for EmulatorProcess {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The lines of a serial line, as they come.
fn lines(serial: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = channel();
    std::thread::spawn(move || {
        for line in BufReader::new(serial).split(b'\n').map_while(Result::ok) {
            let line = String::from_utf8_lossy(&line);
            if sender.send(line.trim_end_matches('\r').to_owned()).is_err() {
                return;
            }
        }
    });
    receiver
}

/// Takes all lines until there are no more, and says how it ended.
fn listen(machine: u32, from: Receiver<String>, lines: &mut Vec<String>) -> String {
    let begun = Instant::now();
    let log = std::env::var_os(VARIABLE).and_then(|path| {
        fs::File::options()
            .create(true)
            .append(true)
            .open(path)
            .ok()
    });
    let mut looked = begun;
    loop {
        match from.recv_timeout(LOOK) {
            Ok(line) => {
                if let Some(mut log) = log.as_ref() {
                    let _ = writeln!(log, "{:6.1} {line}", begun.elapsed().as_secs_f64());
                }
                lines.push(line);
            }
            Err(RecvTimeoutError::Disconnected) => {
                return format!("the machine ended after {:?}", begun.elapsed());
            }
            Err(RecvTimeoutError::Timeout) => {}
        }
        if looked.elapsed() < LOOK {
            continue;
        }
        looked = Instant::now();
        let (took, after) = (processor_time(machine), begun.elapsed());
        if took > MOST_PROCESSOR_TIME || after > MOST_TIME {
            return format!("the machine was killed after {after:?}, {took:?} of them busy");
        }
    }
}

fn processor_time(pid: u32) -> Duration {
    let per_second = rustix::param::clock_ticks_per_second().max(1);
    let ticks = tree::ticks(pid).unwrap_or(0);
    Duration::from_secs(ticks / per_second)
}

impl MachineLog {
    /// What was said by something else than a machine, and how it ended.
    pub fn new(said: &str, end: String) -> Self {
        let lines = said.lines().map(str::to_owned).collect();
        Self { lines, end }
    }

    /// How each of `tests` went.
    pub fn verdicts(&self, tests: &[String]) -> BTreeMap<String, Verdict> {
        let verdict = |test: &String| (test.clone(), self.verdict(test));
        tests.iter().map(verdict).collect()
    }

    fn verdict(&self, test: &str) -> Verdict {
        let marked = |line: &String| Some(line.strip_prefix(MARK)?.to_owned());
        let is_about = |line: &String, word: &str| {
            let mut words = line.strip_prefix(MARK).unwrap_or_default().split(' ');
            (words.next(), words.next()) == (Some(word), Some(test))
        };
        let begin = self.lines.iter().position(|line| is_about(line, "begin"));
        let Some(begin) = begin else {
            let all = self.lines.join("\n");
            return Verdict::Failed(format!("it was never begun: {}\n{all}", self.end));
        };
        let rest = &self.lines[begin + 1..];
        let length = rest.iter().position(|line| marked(line).is_some());
        let said = rest[..length.unwrap_or(rest.len())].join("\n");
        let Some(end) = length.map(|at| &rest[at]) else {
            return Verdict::Failed(format!("it did not end: {}\n{said}", self.end));
        };
        if is_about(end, "passed") {
            Verdict::Passed
        } else if is_about(end, "left") {
            let why = end[MARK.len()..].splitn(3, ' ').nth(2).unwrap_or_default();
            Verdict::Left(format!("inside: {why}"))
        } else if is_about(end, "failed") {
            Verdict::Failed(format!("it failed:\n{said}"))
        } else {
            Verdict::Failed(format!("{end}: {}\n{said}", self.end))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(text: &str) -> MachineLog {
        MachineLog {
            lines: text.lines().map(str::to_owned).collect(),
            end: "the plug was pulled".to_owned(),
        }
    }

    #[test]
    fn every_test_gets_the_verdict_that_it_was_told() {
        let told = told(
            "[    0.1] noise\n\
             @machine begin x::one\nrunning 1 test\nfine\n@machine passed x::one\n\
             @machine begin x::two\npanicked\n\n@machine failed x::two\n\
             @machine begin x::three\n@machine left x::three x::three: no such thing\n\
             @machine begin x::four\nlast words",
        );
        assert_eq!(told.verdict("x::one"), Verdict::Passed);
        let failed = Verdict::Failed("it failed:\npanicked\n".to_owned());
        assert_eq!(told.verdict("x::two"), failed);
        let left = Verdict::Left("inside: x::three: no such thing".to_owned());
        assert_eq!(told.verdict("x::three"), left);
        let ended = "it did not end: the plug was pulled\nlast words";
        assert_eq!(told.verdict("x::four"), Verdict::Failed(ended.to_owned()));
        let Verdict::Failed(all) = told.verdict("x::five") else {
            panic!("it was never run");
        };
        assert!(all.starts_with("it was never begun: the plug was pulled\n[    0.1] noise"));
    }

    #[test]
    fn a_test_whose_verdict_is_anothers_has_failed() {
        let told = told("@machine begin x::one\n@machine passed x::on");
        assert!(matches!(told.verdict("x::one"), Verdict::Failed(_)));
        let told = self::told("@machine begin x::one\n@machine broken all");
        assert!(matches!(told.verdict("x::one"), Verdict::Failed(_)));
    }
}
