//! The log file: lines of the `log` facade, gathered and written in large pieces.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Instant;

use log::{Level, LevelFilter, Log, Metadata, Record};

/// Errors and warnings, as criu(8) has it.
pub const DEFAULT_VERBOSITY: u32 = 2;

/// How many bytes gather before they are written.
const GATHERED_BYTES: usize = 16 << 10;

/// The open log file; lines of one process, from any thread.
struct LogFile {
    started: Instant,
    level: LevelFilter,
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
/// `-` is the standard output. Called once, before any other thread exists.
///
/// # Errors
/// The file cannot be created.
pub fn open(path: &Path, verbosity: u32, started: Instant) -> std::io::Result<()> {
    let file = if path.as_os_str() == "-" {
        File::from(rustix::io::dup(rustix::stdio::stdout())?)
    } else {
        use std::os::unix::fs::OpenOptionsExt as _;
        File::options()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(path)?
    };
    let level = match verbosity {
        0 => LevelFilter::Off,
        1 => LevelFilter::Error,
        2 => LevelFilter::Warn,
        3 => LevelFilter::Info,
        4 => LevelFilter::Debug,
        _ => LevelFilter::Trace,
    };
    let state = Mutex::new(State {
        file,
        gathered: Vec::new(),
    });
    let log = LOG.get_or_init(|| LogFile {
        started,
        level,
        state,
    });
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

/// Writes what has gathered. Called before the process ends or becomes another program.
pub fn flush() {
    if let Some(log) = LOG.get() {
        log.flush();
    }
}

impl Log for LogFile {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= self.level
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
