//! What dump and restore have in common: directories, the log file, scripts, inherited descriptors.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use rustix::fs::Mode;
use rustix::io::Errno;
use serde_json::Value;

use crate::exit::Failure;
use crate::quick::{Fill, flag, number, path};
use crate::{logfile, output};

/// Options of dump and restore alike.
#[derive(Debug, Args)]
pub struct Common {
    /// The directory of the image
    #[arg(short = 'D', long, value_name = "DIR", default_value = ".")]
    pub images_dir: PathBuf,

    /// The directory of the log file and the pidfile; --images-dir unless given
    #[arg(short = 'W', long, value_name = "DIR")]
    work_dir: Option<PathBuf>,

    /// A program to call at each stage, told by CRTOOLS_SCRIPT_ACTION; may be given again
    #[arg(long, value_name = "FILE")]
    action_script: Vec<PathBuf>,

    /// Write a zero byte to this descriptor when the work is done, then close it
    #[arg(long, value_name = "FD")]
    status_fd: Option<i32>,

    /// Print what was done: tasks, pages, bytes, times
    #[arg(long)]
    pub display_stats: bool,

    /// Print the result, or the error, as JSON
    #[arg(long)]
    pub json: bool,

    #[command(flatten)]
    common: Everywhere,
}

/// Options of every command that reads configuration files.
#[derive(Debug, Args)]
pub struct Everywhere {
    /// The log file, relative to the work directory; `-` is stdout [default: COMMAND.log]
    #[arg(short = 'o', long, value_name = "FILE")]
    pub log_file: Option<PathBuf>,

    /// Say more in the log: -v or -v3 informs, -vv or -v4 tells details; 0 is silence
    #[arg(short = 'v', long, value_name = "LEVEL", default_value_t = logfile::DEFAULT_VERBOSITY)]
    pub verbosity: u32,

    /// Read this configuration file instead of the default ones
    #[arg(long, value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Read no default configuration file
    #[arg(long)]
    pub no_default_config: bool,

    /// Close this descriptor first; may be given again
    #[arg(long, value_name = "FD")]
    pub close: Vec<i32>,
}

impl Default for Common {
    fn default() -> Self {
        Self {
            images_dir: ".".into(),
            work_dir: None,
            action_script: Vec::new(),
            status_fd: None,
            display_stats: false,
            json: false,
            common: Everywhere::default(),
        }
    }
}

impl Default for Everywhere {
    fn default() -> Self {
        Self {
            log_file: None,
            verbosity: logfile::DEFAULT_VERBOSITY,
            config: None,
            no_default_config: false,
            close: Vec::new(),
        }
    }
}

impl Fill for Common {
    fn fill(&mut self, name: &str, value: Option<&OsStr>) -> Option<()> {
        match name {
            "images-dir" => self.images_dir = path(value)?,
            "work-dir" => self.work_dir = Some(path(value)?),
            "action-script" => self.action_script.push(path(value)?),
            "status-fd" => self.status_fd = Some(number(value)?),
            "display-stats" => self.display_stats = flag(value)?,
            "json" => self.json = flag(value)?,
            _ => return self.common.fill(name, value),
        }
        Some(())
    }
}

impl Fill for Everywhere {
    fn fill(&mut self, name: &str, value: Option<&OsStr>) -> Option<()> {
        match name {
            "log-file" => self.log_file = Some(path(value)?),
            "verbosity" => self.verbosity = number(value)?,
            "config" => self.config = Some(path(value)?),
            "no-default-config" => self.no_default_config = flag(value)?,
            "close" => self.close.push(number(value)?),
            _ => return None,
        }
        Some(())
    }
}

/// A command at work: its directories exist, its log is open.
#[derive(Debug)]
pub struct Session {
    /// The directory of the image, absolute.
    pub images_dir: PathBuf,
    /// The directory that file names of options are relative to, absolute.
    pub work_dir: PathBuf,
    /// The programs to call at each stage.
    pub scripts: Vec<PathBuf>,
    status: Option<File>,
}

impl Common {
    /// Prints what was done, as far as it is asked for.
    pub fn tell(&self, json: impl FnOnce() -> Value, text: impl FnOnce() -> String) {
        if self.json {
            output::say(&format!("{}\n", json()));
        } else if self.display_stats {
            output::say(&text());
        }
    }

    /// Whether the log file is made in the directory of the image.
    pub fn logs_with_images(&self) -> bool {
        self.work_dir.is_none() && self.common.log_file.is_none()
    }

    /// Opens the log file if one is asked for; of the directory of the image there need be none.
    ///
    /// # Errors
    /// The log file cannot be made, or a descriptor is not open.
    pub fn start_without_images(&self, started: Instant) -> Result<(), Failure> {
        self.common.close_descriptors()?;
        let work_dir = absolute(self.work_dir.as_deref().unwrap_or(&self.images_dir))?;
        self.common.open_log(&work_dir, None, started)
    }

    /// Opens the log file in the work directory, making the directories that `make` asks for.
    ///
    /// Called before anything else opens a descriptor: the caller's are taken over here.
    ///
    /// # Errors
    /// A directory or the log file cannot be made, or a descriptor is not open.
    pub fn start(
        &self,
        command: &'static str,
        make_images_dir: bool,
        idle: &[&str],
        started: Instant,
    ) -> Result<Session, Failure> {
        self.common.close_descriptors()?;
        let status = self
            .status_fd
            .map(|fd| take(fd, "--status-fd"))
            .transpose()?;
        let images_dir = absolute(&self.images_dir)?;
        // Where the log is to be in it, nothing needs to be made if that can be opened.
        let is_tried = self.logs_with_images();
        if make_images_dir && !is_tried {
            make_dir(&images_dir)?;
        }
        let work_dir = match &self.work_dir {
            Some(dir) => {
                let dir = absolute(dir)?;
                make_dir(&dir)?;
                dir
            }
            None => images_dir.clone(),
        };
        let open = || self.common.open_log(&work_dir, Some(command), started);
        match open() {
            Err(Failure::File { source, .. })
                if make_images_dir && is_tried && source.kind() == ErrorKind::NotFound =>
            {
                make_dir(&images_dir)?;
                open()?;
            }
            opened => opened?,
        }
        log::info!("stillframe {}, {command}", env!("CARGO_PKG_VERSION"));
        for option in idle {
            log::debug!("--{option} has no effect on {command}");
        }
        Ok(Session {
            images_dir,
            work_dir,
            scripts: self.action_script.clone(),
            status: status.map(File::from),
        })
    }
}

impl Everywhere {
    /// Closes the descriptors that `--close` names.
    ///
    /// # Errors
    /// One of them is not open.
    pub fn close_descriptors(&self) -> Result<(), Failure> {
        for &fd in &self.close {
            drop(take(fd, "--close")?);
        }
        Ok(())
    }

    /// Opens the log file; without a name for it and without a command, there is none.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn open_log(
        &self,
        work_dir: &Path,
        command: Option<&str>,
        started: Instant,
    ) -> Result<(), Failure> {
        let path = match (&self.log_file, command) {
            (Some(file), _) if file.as_os_str() == "-" => file.clone(),
            (Some(file), _) => work_dir.join(file),
            (None, Some(command)) => work_dir.join(format!("{command}.log")),
            (None, None) => return Ok(()),
        };
        logfile::open(&path, self.verbosity, started).map_err(|source| Failure::File {
            action: "create the log file",
            path,
            source,
        })?;
        match (&self.config, self.no_default_config) {
            (Some(file), _) => log::debug!("configured by {}", file.display()),
            (None, true) => log::debug!("no default configuration file is read"),
            (None, false) => {}
        }
        Ok(())
    }
}

impl Session {
    /// Returns a session without a log file.
    #[cfg(test)]
    pub fn in_directory(dir: &Path, scripts: &[PathBuf]) -> Self {
        Self {
            images_dir: dir.to_owned(),
            work_dir: dir.to_owned(),
            scripts: scripts.to_owned(),
            status: None,
        }
    }

    /// Tells whoever holds the other end of `--status-fd` that the work is done.
    pub fn ready(&mut self) {
        if let Some(mut status) = self.status.take()
            && let Err(error) = status.write_all(&[0])
        {
            log::warn!("nobody reads --status-fd: {error}");
        }
    }
}

fn take(fd: i32, option: &'static str) -> Result<std::os::fd::OwnedFd, Failure> {
    sys::inherited::take(fd).map_err(|source| Failure::Descriptor { fd, option, source })
}

fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(path).map_err(|source| Failure::File {
        action: "find",
        path: path.to_owned(),
        source,
    })
}

/// Makes a directory and those above it. An image holds secrets: only its owner may look.
fn make_dir(path: &Path) -> Result<(), Failure> {
    // One call where the directory is there or its parent is, which is nearly always.
    match rustix::fs::mkdir(path, Mode::RWXU) {
        Ok(()) | Err(Errno::EXIST) => return Ok(()),
        Err(_) => {}
    }
    let made = std::fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path);
    made.map_err(|source| Failure::File {
        action: "make the directory",
        path: path.to_owned(),
        source,
    })
}
