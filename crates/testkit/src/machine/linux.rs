//! A Linux machine under QEMU that tests save and start again: it counts, keeps files in memory,
//! and answers questions on its serial line.

use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, BufWriter, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use super::archive::Archive;
use super::{KERNELS, emulator, without_symbols};
use crate::{skip, subject, wait};

/// How long a machine may take to boot, or to answer, on a busy host.
const PATIENCE: Duration = Duration::from_secs(120);

/// How often the machine counts.
const TICK: Duration = Duration::from_millis(10);

/// How long it is waited for an answer of one that may not have booted.
const LOOK: Duration = Duration::from_millis(500);

/// A machine that was booted; dropped, it is killed.
#[derive(Debug)]
pub struct Linux {
    qemu: Child,
    /// Where its monitor listens.
    pub qmp: PathBuf,
    /// Where its serial line is.
    pub serial: PathBuf,
}

/// Why there can be no such machine here, if there cannot.
pub fn missing() -> Option<String> {
    if skip::find_program(emulator::PROGRAM).is_none() {
        return Some(format!("{} is not installed", emulator::PROGRAM));
    }
    let kernel = kernel();
    (!kernel.exists()).then(|| format!("no kernel at {}", kernel.display()))
}

fn kernel() -> PathBuf {
    Path::new(KERNELS).join("bookworm/vmlinuz")
}

/// The words of QEMU's command line for a machine whose first file system is at `archive`, without
/// its memory, its monitor and its serial line. It has `mib` MiB.
#[must_use]
pub fn words(archive: &Path, mib: u32) -> Vec<String> {
    let kernel = kernel();
    let mut words = Vec::new();
    for word in ["-accel", "tcg", "-m"] {
        words.push(word.to_owned());
    }
    words.push(mib.to_string());
    let fixed = ["-nodefaults", "-no-user-config", "-display", "none"];
    words.extend(fixed.map(str::to_owned));
    let line = "console=ttyS0 quiet loglevel=1 panic=-1 oops=panic";
    for (option, value) in [
        ("-kernel", kernel.to_string_lossy()),
        ("-initrd", archive.to_string_lossy()),
        ("-append", line.into()),
    ] {
        words.extend([option.to_owned(), value.into_owned()]);
    }
    words
}

/// Writes the first file system.
///
/// # Errors
/// Those of the file.
pub fn pack(path: &Path) -> io::Result<()> {
    let mut archive = Archive::new(BufWriter::new(File::create(path)?))?;
    let init = without_symbols(&subject::built("linux-guest"))?;
    archive.file("init", &init)?;
    archive.finish()?;
    Ok(())
}

impl Linux {
    /// Starts QEMU in `folder` with `words` and more, and waits until the machine has booted. Its
    /// sockets are NAME.qmp and NAME.serial in that folder.
    ///
    /// # Panics
    /// When it does not boot.
    #[track_caller]
    pub fn boot(folder: &Path, name: &str, words: &[String], more: &[&str]) -> Self {
        let linux = Self::start(folder, name, words, more);
        Line::to(&linux.serial).wait_for_answer();
        linux
    }

    /// The same without waiting.
    ///
    /// # Panics
    /// When QEMU does not start.
    #[track_caller]
    pub fn start(folder: &Path, name: &str, words: &[String], more: &[&str]) -> Self {
        let (qmp, serial) = (
            folder.join(format!("{name}.qmp")),
            folder.join(format!("{name}.serial")),
        );
        let errors = File::create(folder.join(format!("{name}.errors"))).expect("a file");
        // setpriv(1), so that it dies with the thread that started it, whatever ends that.
        let mut command = Command::new("setpriv");
        command.args(["--pdeathsig", "KILL", "--", emulator::PROGRAM]);
        command.args(words).args(more).current_dir(folder);
        for (option, path) in [("-qmp", &qmp), ("-serial", &serial)] {
            let socket = format!("unix:{},server=on,wait=off", path.display());
            command.arg(option).arg(socket);
        }
        command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors);
        let qemu = command.spawn().expect("QEMU starts");
        Self { qemu, qmp, serial }
    }

    /// QEMU's process.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.qemu.id()
    }

    /// Whether QEMU has ended by itself.
    ///
    /// # Panics
    /// When that cannot be told.
    pub fn has_ended(&mut self) -> bool {
        self.qemu.try_wait().expect("it is a child").is_some()
    }
}

impl Drop for Linux {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// The serial line of a machine, which talks to one at a time.
#[derive(Debug)]
pub struct Line(BufReader<UnixStream>);

impl Line {
    /// Connects to it.
    ///
    /// # Panics
    /// When there is none.
    #[track_caller]
    pub fn to(serial: &Path) -> Self {
        let connect = || UnixStream::connect(serial).ok();
        let line = wait::wait_for(&serial.display().to_string(), wait::SOON, connect);
        line.set_read_timeout(Some(PATIENCE))
            .expect("it is a socket");
        Self(BufReader::new(line))
    }

    /// Asks until the machine answers: what is said to one that boots may be lost.
    ///
    /// # Panics
    /// When it never does.
    #[track_caller]
    pub fn wait_for_answer(&mut self) {
        self.patience(LOOK);
        let answers = || self.try_ask("count").is_ok();
        wait::wait_until("the machine to answer", PATIENCE, answers);
        self.patience(PATIENCE);
    }

    fn patience(&self, patience: Duration) {
        let set = self.0.get_ref().set_read_timeout(Some(patience));
        set.expect("it is a socket");
    }

    /// What it answers to a question.
    ///
    /// # Panics
    /// When it does not.
    #[track_caller]
    pub fn ask(&mut self, question: &str) -> String {
        let answer = self.try_ask(question);
        answer.unwrap_or_else(|error| panic!("{question}: {error}"))
    }

    /// What it answers to a question, which has a number of its own: answers to others, that
    /// somebody else did not wait for, are passed over.
    fn try_ask(&mut self, question: &str) -> io::Result<String> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let number = format!("{}-{number}", std::process::id());
        // What stands before it of a line is ended first.
        write!(self.0.get_ref(), "\n{number} {question}\n")?;
        loop {
            let mut line = Vec::new();
            if self.0.read_until(b'\n', &mut line)? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
            let line = String::from_utf8_lossy(&line);
            if let Some(answer) = line.trim_end().strip_prefix(&format!("={number} ")) {
                return Ok(answer.to_owned());
            }
        }
    }

    /// Has it tick so often, with so many ms between; gives the longest time between two ticks.
    ///
    /// # Panics
    /// When it does not.
    pub fn longest_pause(&mut self, pause_ms: u32, times: u32) -> Duration {
        let end = format!("={}-ticked", std::process::id());
        let question = format!("tick {pause_ms} {times}");
        write!(self.0.get_ref(), "\n{} {question}\n", &end[1..]).expect("it hears");
        let (mut last, mut longest) = (None, Duration::ZERO);
        loop {
            let mut line = Vec::new();
            self.0.read_until(b'\n', &mut line).expect("it ticks");
            let now = std::time::Instant::now();
            if line.starts_with(b".") {
                let pause = last.replace(now).map_or(Duration::ZERO, |last| now - last);
                longest = longest.max(pause);
            }
            if line.starts_with(end.as_bytes()) {
                return longest;
            }
        }
    }

    /// What it answers, as a number.
    ///
    /// # Panics
    /// When it does not.
    #[track_caller]
    pub fn number(&mut self, question: &str) -> u64 {
        let answer = self.ask(question);
        let number = answer.parse();
        number.unwrap_or_else(|_| panic!("{question}: {answer}"))
    }
}

/// What runs in the machine as process 1. It answers lines, each with a number in front that the
/// answer has, too:
/// - `count`: how far it has counted, once every 10 ms;
/// - `fill NAME SEED MIB`: makes a file of so many MiB out of a seed;
/// - `check NAME SEED MIB`: whether it is as it was made;
/// - `remove NAME`: removes it;
/// - `note TEXT` and `recall`: keeps a text, and says it;
/// - `write MIB`: writes to that much memory from then on, over and over;
/// - `written`: how often it has written all of that, and how many pages were not as left;
/// - `tick MS TIMES`: says `.` so often, on lines of their own, with so many ms between.
///
/// # Panics
/// When the machine has no serial line.
pub fn inside() -> ! {
    static COUNT: AtomicU64 = AtomicU64::new(0);
    std::thread::spawn(|| {
        loop {
            std::thread::sleep(TICK);
            COUNT.fetch_add(1, Ordering::Relaxed);
        }
    });
    let console = io::stdin();
    let mut raw = rustix::termios::tcgetattr(&console).expect("a terminal");
    raw.make_raw();
    let now = rustix::termios::OptionalActions::Now;
    rustix::termios::tcsetattr(&console, now, &raw).expect("a terminal");
    let mut noted = String::new();
    for line in console.lock().split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        let words = line.split_whitespace().collect::<Vec<_>>();
        let Some((number, words)) = words.split_first() else {
            continue;
        };
        let answer = match words {
            ["count"] => COUNT.load(Ordering::Relaxed).to_string(),
            ["fill", name, rest @ ..] => said(fill(name, rest)),
            ["check", name, rest @ ..] => said(check(name, rest)),
            ["remove", name] => said(fs::remove_file(path(name)).map(|()| "removed".to_owned())),
            ["note", rest @ ..] => {
                noted = rest.join(" ");
                "noted".to_owned()
            }
            ["recall"] => noted.clone(),
            ["write", mib] => said(begin_writing(mib)),
            ["written"] => {
                let [passes, wrong] = [&PASSES, &WRONG].map(|it| it.load(Ordering::SeqCst));
                format!("{passes} {wrong}")
            }
            ["tick", pause, times] => said(tick(pause, times)),
            _ => "what?".to_owned(),
        };
        // What a terminal echoes before it is made raw begins otherwise.
        println!("={number} {answer}");
    }
    panic!("the serial line has ended");
}

/// How often all of the memory was written, and how many pages were not as they were left.
static PASSES: AtomicU64 = AtomicU64::new(0);
static WRONG: AtomicU64 = AtomicU64::new(0);

fn number(word: &str) -> io::Result<u64> {
    word.parse().map_err(io::Error::other)
}

/// Writes the number of the pass to each page of some memory, over and over. Each page must be as
/// the pass before has left it: at any instant, pages of two passes at most are there, in order.
fn begin_writing(mib: &str) -> io::Result<String> {
    const PAGE_WORDS: usize = 512;
    let mut words = vec![0_u64; number(mib)? as usize * (1 << 20) / 8];
    std::thread::spawn(move || {
        for pass in 1.. {
            for page in words.chunks_exact_mut(PAGE_WORDS) {
                let first = std::hint::black_box(page[0]);
                let last = std::hint::black_box(page[PAGE_WORDS - 1]);
                if (first, last) != (pass - 1, pass - 1) {
                    WRONG.fetch_add(1, Ordering::SeqCst);
                }
                page[0] = pass;
                page[PAGE_WORDS - 1] = pass;
                std::hint::black_box(&mut *page);
            }
            PASSES.fetch_add(1, Ordering::SeqCst);
        }
    });
    Ok("writing".to_owned())
}

fn tick(pause: &str, times: &str) -> io::Result<String> {
    let pause = Duration::from_millis(number(pause)?);
    for _ in 0..number(times)? {
        println!(".");
        std::thread::sleep(pause);
    }
    Ok("ticked".to_owned())
}

fn said(result: io::Result<String>) -> String {
    result.unwrap_or_else(|error| format!("failed: {error}"))
}

fn path(name: &str) -> PathBuf {
    Path::new("/tmp").join(name)
}

/// Bytes that are made, written and read at once.
const PIECE_BYTES: usize = 64 << 10;

/// All pieces of a file of so many MiB made out of a seed.
fn pieces(words: &[&str]) -> io::Result<impl Iterator<Item = Vec<u8>>> {
    let number = |at: usize| words.get(at)?.parse::<u64>().ok();
    let (Some(seed), Some(mib)) = (number(0), number(1)) else {
        return Err(io::Error::other("a seed and a number of MiB, please"));
    };
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut word = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()
    };
    let piece = move |_| (0..PIECE_BYTES / 8).flat_map(|_| word()).collect();
    Ok((0..mib * (1 << 20) / PIECE_BYTES as u64).map(piece))
}

fn fill(name: &str, words: &[&str]) -> io::Result<String> {
    let mut file = File::create(path(name))?;
    for piece in pieces(words)? {
        file.write_all(&piece)?;
    }
    Ok("filled".to_owned())
}

fn check(name: &str, words: &[&str]) -> io::Result<String> {
    let mut file = File::open(path(name))?;
    let mut read = vec![0; PIECE_BYTES];
    for piece in pieces(words)? {
        file.read_exact(&mut read)?;
        if read != piece {
            return Ok("wrong".to_owned());
        }
    }
    Ok("right".to_owned())
}
