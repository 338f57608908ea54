//! What commands have in common: directories, the log file, scripts, inherited descriptors.

use std::fs::File;
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use process::options::Compression;
use rustix::fs::Mode;
use rustix::io::Errno;
use serde_json::Value;

use crate::exit::Failure;
use crate::options::Options;
use crate::stage_listener::StageListener;
use crate::{logfile, output};

/// Options of a command's log.
#[derive(Debug, Args)]
pub struct LogArgs {
    /// The log file, relative to the work directory; `-` is stdout [default: COMMAND.log]
    #[arg(short = 'o', long, value_name = "FILE")]
    log_file: Option<PathBuf>,

    /// The directory of the log file; that of the image unless given
    #[arg(short = 'W', long, value_name = "DIR")]
    work_dir: Option<PathBuf>,

    /// Say more in the log: -v or -v3 informs, -vv or -v4 tells details; 0 is silence, 2 is usual
    // All that are given have become one with a number: `verbosity::fold`.
    #[arg(short = 'v', long, value_name = "LEVEL", num_args = 0..=1, require_equals = true)]
    #[arg(default_value_t = logfile::DEFAULT_VERBOSITY, hide_default_value = true)]
    verbosity: u32,
}

/// Options that criu(8) has on each of its commands, obeyed before the command begins.
#[derive(Debug, Args)]
pub struct GeneralArgs {
    /// Read this configuration file instead of the default ones
    // The file is read before the command line is parsed: the session only logs its name.
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Read no default configuration file
    #[arg(long)]
    no_default_config: bool,

    /// Close this descriptor first; may be given again
    #[arg(long, value_name = "FD")]
    close: Vec<i32>,
}

impl GeneralArgs {
    /// Closes the descriptors that `--close` names: before anything else is opened.
    ///
    /// # Errors
    /// One of them is not open.
    pub fn begin(&self) -> Result<(), Failure> {
        close(&self.close)
    }

    /// Says in the log which configuration counts.
    pub fn tell(&self) {
        tell_configuration(self.config.as_deref(), self.no_default_config);
    }
}

/// How pages are stored by a command of its own.
#[derive(Clone, Copy, Debug, Args)]
pub struct CompressArgs {
    /// Compress the pages that are stored, where that pays, with lz4 or zstd
    #[arg(long, value_name = "lz4|zstd[:LEVEL]", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "lz4")]
    pub compress: Option<Compression>,
}

impl LogArgs {
    /// The directory of the log file.
    pub fn work_dir<'a>(&'a self, images_dir: &'a Path) -> &'a Path {
        self.work_dir.as_deref().unwrap_or(images_dir)
    }

    /// Returns the path written to for the log: its file, or the directory that it is made in.
    ///
    /// # Errors
    /// The current directory cannot be found.
    pub fn written(&self, images_dir: &Path) -> Result<Vec<PathBuf>, Failure> {
        let work_dir = absolute(self.work_dir(images_dir))?;
        let file = self.log_file.as_ref();
        let file = file.filter(|file| file.as_os_str() != "-");
        let file = file.map(|file| work_dir.join(file));
        Ok(vec![file.unwrap_or(work_dir)])
    }

    /// Opens the log file where one is named, of a command that has none by itself.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn open_named(&self, images_dir: &Path, started: Instant) -> Result<(), Failure> {
        let work_dir = self.work_dir(images_dir);
        open_log(
            self.log_file.as_deref(),
            self.verbosity,
            work_dir,
            None,
            started,
        )
    }

    /// Opens the log file of `command`.
    ///
    /// # Errors
    /// The file cannot be created.
    pub fn open(&self, images_dir: &Path, command: &str, started: Instant) -> Result<(), Failure> {
        let work_dir = self.work_dir(images_dir);
        open_log(
            self.log_file.as_deref(),
            self.verbosity,
            work_dir,
            Some(command),
            started,
        )
    }
}

/// Makes a file of this name and verbosity the log; without a name for it and without a command,
/// there is none.
fn open_log(
    file: Option<&Path>,
    verbosity: u32,
    work_dir: &Path,
    command: Option<&str>,
    started: Instant,
) -> Result<(), Failure> {
    let path = match (file, command) {
        (Some(file), _) if file.as_os_str() == "-" => file.to_owned(),
        (Some(file), _) => work_dir.join(file),
        (None, Some(command)) => work_dir.join(format!("{command}.log")),
        (None, None) => return Ok(()),
    };
    logfile::open(&path, verbosity, started).map_err(|source| Failure::File {
        action: "create the log file",
        path,
        source,
    })
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
    /// The client that is told of each stage.
    pub listener: Option<Arc<dyn StageListener>>,
    status: Option<File>,
}

impl Options {
    /// Refuses a tree whose control group is frozen: its tasks cannot be asked for anything.
    ///
    /// # Errors
    /// [`process::Error::Unfit`].
    pub fn refuse_frozen(&self, doing: &'static str) -> Result<(), Failure> {
        let Some(group) = &self.freeze_cgroup else {
            return Ok(());
        };
        let has = |file: &str, line: &str| {
            let text = std::fs::read_to_string(group.join(file)).unwrap_or_default();
            text.lines().any(|one| one == line)
        };
        if !has("cgroup.events", "frozen 1") && !has("freezer.state", "FROZEN") {
            return Ok(());
        }
        let what = format!("the control group {} is frozen", group.display());
        Err(Failure::engine(doing)(process::Error::Unfit(what)))
    }

    /// Prints what was done, as far as it is asked for.
    pub fn tell(&self, json: impl FnOnce() -> Value, text: impl FnOnce() -> String) {
        if self.json {
            output::say(&format!("{}\n", json()));
        } else if self.display_stats {
            output::say(&text());
        }
    }

    /// Tells whether the log file is made in the directory of the image.
    pub fn logs_with_images(&self) -> bool {
        self.work_dir.is_none() && self.log_file.is_none()
    }

    /// Opens the log file if one is asked for; of the directory of the image there need be none.
    ///
    /// # Errors
    /// The log file cannot be made, or a descriptor is not open.
    pub fn start_without_images(&self, started: Instant) -> Result<(), Failure> {
        self.close_descriptors()?;
        let work_dir = absolute(self.work_dir.as_deref().unwrap_or(&self.images_dir))?;
        self.open_log(&work_dir, None, started)
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
        self.close_descriptors()?;
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
        let open = || self.open_log(&work_dir, Some(command), started);
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
            listener: self.listener.clone(),
            status: status.map(File::from),
        })
    }

    /// Closes the descriptors that `--close` names.
    ///
    /// # Errors
    /// One of them is not open.
    pub fn close_descriptors(&self) -> Result<(), Failure> {
        close(&self.close)
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
        open_log(
            self.log_file.as_deref(),
            self.verbosity,
            work_dir,
            command,
            started,
        )?;
        tell_configuration(self.config.as_deref(), self.no_default_config);
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
            listener: None,
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

fn close(descriptors: &[i32]) -> Result<(), Failure> {
    for &fd in descriptors {
        drop(take(fd, "--close")?);
    }
    Ok(())
}

fn tell_configuration(file: Option<&Path>, no_default: bool) {
    match (file, no_default) {
        (Some(file), _) => log::debug!("configured by {}", file.display()),
        (None, true) => log::debug!("no default configuration file is read"),
        (None, false) => {}
    }
}

fn take(fd: i32, option: &'static str) -> Result<std::os::fd::OwnedFd, Failure> {
    sys::inherited::take(fd).map_err(|source| Failure::Descriptor { fd, option, source })
}

pub fn absolute(path: &Path) -> Result<PathBuf, Failure> {
    std::path::absolute(path).map_err(|source| Failure::File {
        action: "find",
        path: path.to_owned(),
        source,
    })
}

/// Makes a directory and those above it. An image holds secrets: only its owner may look.
pub fn make_dir(path: &Path) -> Result<(), Failure> {
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
