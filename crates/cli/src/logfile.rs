//! The log file: lines of the `log` facade, gathered and written in large pieces.

use std::fs::File;
use std::io::Write as _;
use std::os::fd::{AsRawFd as _, RawFd};
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Instant;

use log::{Level, LevelFilter, Log, Metadata, Record};
use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;

/// Errors and warnings, as criu(8) has it.
pub const DEFAULT_VERBOSITY: u32 = 2;

/// How many bytes gather before they are written.
const GATHERED_BYTES: usize = 16 << 10;

/// The open log file; lines of one process, from any thread.
struct LogFile {
    started: Instant,
    state: Mutex<State>,
}

struct State {
    file: File,
    gathered: Vec<u8>,
}

static LOG: OnceLock<LogFile> = OnceLock::new();

/// Makes `path` the log file of this process, empty, readable by its owner only.
///
/// `verbosity` is criu's: 0 nothing, 1 errors, 2 and warnings, 3 and information, 4 and details.
/// `-` is the standard output. Called before any other thread exists. A process that serves several
/// requests opens one log after the other; times are counted from the first.
///
/// # Errors
/// The file cannot be created.
pub fn open(path: &Path, verbosity: u32, started: Instant) -> std::io::Result<()> {
    let file = if path.as_os_str() == "-" {
        File::from(rustix::io::dup(rustix::stdio::stdout())?)
    } else {
        create(path)?
    };
    let level = match verbosity {
        0 => LevelFilter::Off,
        1 => LevelFilter::Error,
        2 => LevelFilter::Warn,
        3 => LevelFilter::Info,
        4 => LevelFilter::Debug,
        _ => LevelFilter::Trace,
    };
    if let Some(log) = LOG.get() {
        let mut state = log.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.write();
        state.file = file;
        log::set_max_level(level);
        return Ok(());
    }
    let state = Mutex::new(State {
        file,
        gathered: Vec::new(),
    });
    let log = LOG.get_or_init(|| LogFile { started, state });
    if log::set_logger(log).is_ok() {
        log::set_max_level(level);
        let report = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            log::error!("{panic}");
            report(panic);
        }));
    }
    Ok(())
}

/// The file at `path`, empty. Somebody else may have put there what leads to another file: what is
/// no plain file is refused, and a plain file that has other names or another owner stays as it is
/// and loses this name. In /dev, which is the system's, links and devices are what is meant.
fn create(path: &Path) -> std::io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let of_system = ["/dev", "/dev/fd", "/proc/self/fd"].map(Path::new);
    let is_device = path
        .parent()
        .is_some_and(|folder| of_system.contains(&folder));
    let follow = if is_device {
        OFlags::APPEND
    } else {
        OFlags::NOFOLLOW
    };
    let refused = |what: &str| Err(std::io::Error::other(format!("it is {what}")));
    let file = match rustix::fs::open(path, flags | follow, Mode::empty()) {
        Ok(file) => file,
        Err(Errno::NOENT) => return make(path),
        Err(Errno::LOOP) => return refused("a symbolic link"),
        // Opened without waiting for a reader, or a socket.
        Err(Errno::NXIO) => return refused("a FIFO or a socket"),
        Err(error) => return Err(error.into()),
    };
    let stat = rustix::fs::fstat(&file)?;
    match FileType::from_raw_mode(stat.st_mode) {
        FileType::RegularFile if is_device => {}
        FileType::RegularFile => {
            let own = stat.st_uid == rustix::process::geteuid().as_raw();
            if !own || stat.st_nlink != 1 {
                std::fs::remove_file(path)?;
                return make(path);
            }
            rustix::fs::ftruncate(&file, 0)?;
        }
        FileType::CharacterDevice | FileType::Fifo if is_device => {}
        FileType::Fifo => return refused("a FIFO"),
        _ => return refused("no plain file"),
    }
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags.difference(OFlags::NONBLOCK))?;
    Ok(file.into())
}

/// A new file.
fn make(path: &Path) -> std::io::Result<File> {
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::CLOEXEC;
    let file = rustix::fs::open(path, flags, Mode::RUSR | Mode::WUSR)?;
    Ok(file.into())
}

/// The descriptor of the log file, for processes that write to it as well.
pub fn number() -> Option<RawFd> {
    let log = LOG.get()?;
    let state = log.state.lock().unwrap_or_else(PoisonError::into_inner);
    Some(state.file.as_raw_fd())
}

/// Writes what has gathered. Called before the process ends or becomes another program.
pub fn flush() {
    if let Some(log) = LOG.get() {
        log.flush();
    }
}

impl Log for LogFile {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= log::max_level()
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let at = self.started.elapsed();
        let (target, text) = (record.target(), record.args());
        let (seconds, micros) = (at.as_secs(), at.subsec_micros());
        // Made before the lock is taken: what is printed may itself panic, which is logged too.
        let line = match record.level() {
            Level::Error => format!("({seconds:02}.{micros:06}) Error ({target}): {text}\n"),
            Level::Warn => format!("({seconds:02}.{micros:06}) Warn  ({target}): {text}\n"),
            _ => format!("({seconds:02}.{micros:06}) {text}\n"),
        };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.gathered.extend_from_slice(line.as_bytes());
        if record.level() <= Level::Warn || state.gathered.len() >= GATHERED_BYTES {
            state.write();
        }
    }

    fn flush(&self) {
        self.state
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .write();
    }
}

impl State {
    fn write(&mut self) {
        if self.gathered.is_empty() {
            return;
        }
        // A log that cannot be written must not stop the work; the outcome is told on stderr.
        let _ = self.file.write_all(&self.gathered);
        self.gathered.clear();
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, symlink};

    use super::*;

    #[test]
    fn a_log_file_is_made_and_emptied() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        create(&path).unwrap().write_all(b"first").unwrap();
        let inode = path.metadata().unwrap().ino();
        create(&path).unwrap().write_all(b"next").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"next");
        let stat = path.metadata().unwrap();
        assert_eq!((stat.ino(), stat.mode() & 0o777), (inode, 0o600));
    }

    #[test]
    fn the_log_never_leads_to_another_file() {
        let folder = tempfile::tempdir().unwrap();
        let victim = folder.path().join("victim");
        std::fs::write(&victim, "dear").unwrap();
        let path = folder.path().join("log");
        symlink(&victim, &path).unwrap();
        let error = create(&path).unwrap_err().to_string();
        assert_eq!(error, "it is a symbolic link");
        std::fs::remove_file(&path).unwrap();
        std::fs::hard_link(&victim, &path).unwrap();
        create(&path).unwrap().write_all(b"text").unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), b"text");
        assert_eq!(std::fs::read(&victim).unwrap(), b"dear");
    }

    #[test]
    fn a_fifo_is_refused_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("log");
        let mode = Mode::RUSR | Mode::WUSR;
        rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, mode, 0).unwrap();
        let error = create(&path).unwrap_err().to_string();
        assert_eq!(error, "it is a FIFO or a socket");
        let flags = OFlags::RDONLY | OFlags::NONBLOCK;
        let _reader = rustix::fs::open(&path, flags, Mode::empty()).unwrap();
        assert_eq!(create(&path).unwrap_err().to_string(), "it is a FIFO");
    }

    #[test]
    fn devices_are_what_is_meant() {
        for path in ["/dev/null", "/dev/stderr"] {
            create(Path::new(path)).expect(path);
        }
    }
}
