//! A Linux machine under QEMU that tests save and start again: it counts, keeps files in memory,
//! and answers questions on its serial line.

mod devices;
mod inside;

use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, BufWriter, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

pub use inside::inside;

use super::archive::Archive;
use super::{KERNELS, MODULES, emulator, without_symbols};
use crate::{skip, subject, wait};

/// How long a machine may take to boot, or to answer, on a busy host.
const PATIENCE: Duration = Duration::from_secs(120);

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

/// What machines are started with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Emulator {
    /// That of Debian 12, which is installed.
    Installed,
    /// That of its backports, in a folder of its own.
    Backports,
}

impl Emulator {
    /// The environment variable that says which one tests use that do not name one.
    const VARIABLE: &str = "STILLFRAME_EMULATOR";
    /// Where `cargo xtask test` puts that of the backports.
    const FOLDER: &str = "/var/cache/stillframe/emulator/backports/usr";

    /// The one that tests use that do not name one.
    ///
    /// # Panics
    /// When the environment names another one.
    #[must_use]
    pub fn of_tests() -> Self {
        match std::env::var(Self::VARIABLE).as_deref() {
            Err(_) | Ok("" | "installed") => Self::Installed,
            Ok("backports") => Self::Backports,
            Ok(other) => panic!("{}: there is no emulator {other}", Self::VARIABLE),
        }
    }

    /// The first two numbers of its version, as the names of its machine types have them.
    #[must_use]
    pub const fn version(self) -> &'static str {
        match self {
            Self::Installed => "7.2",
            Self::Backports => "10.0",
        }
    }

    /// The program, and what has to be said of where its files are.
    #[must_use]
    pub fn program(self) -> Vec<String> {
        if self == Self::Installed {
            return vec![emulator::PROGRAM.to_owned()];
        }
        let place = |path: &str| format!("{}/{path}", Self::FOLDER);
        let mut words = vec![place(&format!("bin/{}", emulator::PROGRAM))];
        for folder in ["share/qemu", "share/seabios"] {
            words.extend(["-L".to_owned(), place(folder)]);
        }
        words
    }

    /// The object with the memory of a machine that can be saved. From 8.1 on, only files are left
    /// out of what QEMU saves; it makes one in the folder, and removes its name.
    #[must_use]
    pub fn memory(self, mib: u32) -> String {
        match self {
            Self::Installed => format!("memory-backend-memfd,id=mem,size={mib}M,share=on"),
            Self::Backports => {
                format!("memory-backend-file,id=mem,size={mib}M,mem-path=/dev/shm,share=on")
            }
        }
    }

    /// Why there can be no machine of it here, if there cannot.
    #[must_use]
    pub fn missing(self) -> Option<String> {
        let program = self.program().swap_remove(0);
        // A path stands for itself there.
        if skip::find_program(&program).is_none() {
            return Some(format!("{program} is not installed"));
        }
        let kernel = kernel();
        (!kernel.exists()).then(|| format!("no kernel at {}", kernel.display()))
    }
}

/// Why there can be no machine of the tests' emulator here, if there cannot.
pub fn missing() -> Option<String> {
    Emulator::of_tests().missing()
}

fn kernel() -> PathBuf {
    Path::new(KERNELS).join("bookworm/vmlinuz")
}

/// The command line of a machine whose first file system is at `archive`, without its memory, its
/// monitor and its serial line. It has `mib` MiB.
#[must_use]
pub fn words(emulator: Emulator, archive: &Path, mib: u32) -> Vec<String> {
    let kernel = kernel();
    let mut words = emulator.program();
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
    let modules = kernel().with_file_name("virtio");
    archive.folder("lib")?;
    archive.folder(&MODULES[1..])?;
    for module in fs::read_dir(&modules).into_iter().flatten() {
        let path = module?.path();
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        archive.file(&format!("{}/{name}", &MODULES[1..]), &fs::read(&path)?)?;
    }
    archive.finish()?;
    Ok(())
}

impl Linux {
    /// Starts QEMU in `folder` by `words`, the program first, and more, and waits until the machine
    /// has booted. Its sockets are NAME.qmp and NAME.serial in that folder.
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
        command.args(["--pdeathsig", "KILL", "--"]);
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

    /// Tells whether QEMU has ended by itself.
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
