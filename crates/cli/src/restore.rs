//! `stillframe restore`: brings a process tree back.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use clap::Args;
use process::{Afterwards, Allow, InheritFd, Inherited, Job, LazyPages, RestoreOptions, Restored};
use rustix::io::Errno;
use rustix::process::{Pid, WaitOptions, WaitStatus, waitpid};
use serde_json::{Value, json};

use crate::allowed::AllowedArgs;
use crate::exit::{Failure, Status};
use crate::quick::{self, Fill, flag, path, text};
use crate::session::{Common, Session};
use crate::values::CgroupRoot;
use crate::watch::Watch;
use crate::{logfile, output, values};

/// Where restores find a server of lazy pages, in the work directory, as with criu(8).
pub const LAZY_PAGES_SOCKET: &str = "lazy-pages.socket";

/// Bring a process tree back from an image
#[derive(Debug, Default, Args)]
pub struct Restore {
    /// End once the tree runs, instead of waiting for its root
    #[arg(short = 'd', long)]
    restore_detached: bool,

    /// Make the root a child of this program's parent; needs --restore-detached
    #[arg(short = 'S', long)]
    restore_sibling: bool,

    /// Leave the tree stopped
    #[arg(short = 's', long)]
    leave_stopped: bool,

    /// Write the root's pid into this new file, relative to the work directory
    #[arg(long, value_name = "FILE")]
    pidfile: Option<PathBuf>,

    /// Let an open descriptor take the place of a saved one; may be given again
    #[arg(long, value_name = "fd[NUMBER]:RESOURCE", value_parser = values::inherit_fd)]
    inherit_fd: Vec<(i32, Inherited)>,

    /// Put this group in the place of the root task's, in the hierarchy of that controller or in
    /// all others; may be given again
    #[arg(long, value_name = "[CONTROLLER:]/PATH", value_parser = values::cgroup_root)]
    cgroup_root: Vec<CgroupRoot>,

    /// Execute the command behind -- as the root's parent once the tree runs
    #[arg(long, requires = "command")]
    exec_cmd: bool,

    /// Leave monotonic clocks as this host has them, instead of going on from where they stood
    #[arg(long)]
    no_timens: bool,

    /// Have memory come when it is touched: the tree runs at once
    #[arg(long)]
    lazy_pages: bool,

    /// Print the scripts that would be run, as strace prints calls, and restore nothing
    #[arg(long)]
    plan: bool,

    #[command(flatten)]
    allowed: AllowedArgs,

    #[command(flatten)]
    pub common: Common,

    /// The command of --exec-cmd and its arguments
    #[arg(last = true, requires = "exec_cmd")]
    command: Vec<OsString>,
}

impl Fill for Restore {
    fn fill(&mut self, name: &str, value: Option<&OsStr>) -> Option<()> {
        match name {
            "restore-detached" => self.restore_detached = flag(value)?,
            "restore-sibling" => self.restore_sibling = flag(value)?,
            "leave-stopped" => self.leave_stopped = flag(value)?,
            "pidfile" => self.pidfile = Some(path(value)?),
            "inherit-fd" => self.inherit_fd.push(values::inherit_fd(text(value)?).ok()?),
            "cgroup-root" => self
                .cgroup_root
                .push(values::cgroup_root(text(value)?).ok()?),
            "exec-cmd" => self.exec_cmd = flag(value)?,
            "no-timens" => self.no_timens = flag(value)?,
            "lazy-pages" => self.lazy_pages = flag(value)?,
            "plan" => self.plan = flag(value)?,
            _ => {
                let allowed = self.allowed.fill(name, value);
                return allowed.or_else(|| self.common.fill(name, value));
            }
        }
        Some(())
    }
}

impl Restore {
    /// Understands the words of an ordinary command line; `None` leaves them to the parser.
    pub fn quick(words: &[OsString]) -> Option<Self> {
        let mut restore = Self::default();
        restore.command = quick::fill(&mut restore, words)?;
        (restore.exec_cmd != restore.command.is_empty()).then_some(restore)
    }

    /// Checks that there is a directory of an image.
    fn check_directory(&self) -> Result<(), Failure> {
        let path = self.common.images_dir.clone();
        if path.is_dir() {
            return Ok(());
        }
        let source = std::fs::read_dir(&path).err();
        Err(Failure::File {
            action: "open the image directory",
            path,
            source: source.unwrap_or(Errno::NOTDIR.into()),
        })
    }

    /// Brings the tree back.
    ///
    /// # Errors
    /// Whatever the engine tells; no task is left then. Options that exclude each other.
    pub fn run(mut self, idle: &[&str], started: Instant) -> Result<Status, Failure> {
        self.check()?;
        let mut allowed = Allow::try_from(&self.allowed)?;
        let roots = self.cgroup_root.drain(..);
        allowed.cgroups.roots = roots.map(|root| (root.controller, root.path)).collect();
        // Its log is made in the image's directory, unless it is to be elsewhere.
        if !self.common.logs_with_images() {
            self.check_directory()?;
        }
        let session = self.common.start("restore", false, idle, started);
        let mut session = match session {
            Ok(session) => session,
            Err(failure) => {
                self.check_directory()?;
                return Err(failure);
            }
        };
        let options = self.options(allowed, &session)?;
        if self.plan {
            let plan = process::plan(&options).map_err(engine("plan"))?;
            output::say(&plan);
            return Ok(Status::Done);
        }
        let mut watch = Watch::new(&session).with_pidfile(self.pidfile.take())?;
        let mut restored = process::restore(&options, &mut watch).map_err(engine("restore"))?;
        watch.done();
        session.ready();
        log::info!(
            "restored {} tasks in {} us",
            restored.tasks,
            restored.total_us
        );
        self.common
            .tell(|| to_json(&restored), || to_text(&restored));
        if self.exec_cmd {
            return Err(self.execute(&session.work_dir));
        }
        if !self.restore_detached {
            wait_for(restored.root, restored.job.as_mut());
            if let Some(lazy) = restored.lazy {
                lazy.outcome().map_err(engine("bring memory in"))?;
            }
        }
        Ok(Status::Done)
    }

    fn check(&self) -> Result<(), Failure> {
        let usage = |text: &str| Err(Failure::Usage(text.to_owned()));
        if self.restore_sibling && !self.restore_detached {
            return usage("--restore-sibling needs --restore-detached");
        }
        if self.exec_cmd && self.restore_detached {
            return usage("--exec-cmd and --restore-detached exclude each other");
        }
        Ok(())
    }

    fn options(&mut self, allowed: Allow, session: &Session) -> Result<RestoreOptions, Failure> {
        let mut inherit_fds = Vec::with_capacity(self.inherit_fd.len());
        for (number, stands_for) in self.inherit_fd.drain(..) {
            let fd = sys::inherited::duplicate(number).map_err(|source| Failure::Descriptor {
                fd: number,
                option: "--inherit-fd",
                source,
            })?;
            let fd = std::sync::Arc::new(fd);
            inherit_fds.push(InheritFd { fd, stands_for });
        }
        Ok(RestoreOptions {
            images: session.images_dir.as_path().into(),
            afterwards: if self.leave_stopped {
                Afterwards::Stop
            } else {
                Afterwards::Run
            },
            allowed,
            detached: self.restore_detached,
            sibling: self.restore_sibling,
            foreground: self.allowed.shell_job()
                && !(self.restore_detached || self.exec_cmd || self.leave_stopped),
            inherit_fds,
            timens: !self.no_timens,
            lazy: self.lazy_pages.then(|| LazyPages {
                socket: session.work_dir.join(LAZY_PAGES_SOCKET),
                log: logfile::number(),
            }),
        })
    }

    /// Becomes the command of `--exec-cmd`; comes back only when that fails.
    fn execute(&self, work_dir: &Path) -> Failure {
        let name = &self.command[0];
        logfile::flush();
        let mut command = std::process::Command::new(name);
        let source = command
            .args(&self.command[1..])
            .current_dir(work_dir)
            .exec();
        Failure::Exec {
            command: name.clone(),
            source,
        }
    }
}

fn engine(doing: &'static str) -> impl FnOnce(process::Error) -> Failure {
    move |source| Failure::Engine {
        doing,
        source: Box::new(source),
    }
}

/// Waits until the root task, a child of this process, has ended. How it ended does not matter.
fn wait_for(root: Pid, job: Option<&mut Job>) {
    logfile::flush();
    let status = match job {
        Some(job) => job.wait(root).map_err(|error| error.to_string()),
        None => wait_for_end(root).map_err(|error| error.to_string()),
    };
    match status.map(|status| (status.exit_status(), status.terminating_signal())) {
        Ok((Some(code), _)) => log::info!("the root task {root} exited with {code}"),
        Ok((None, signal)) => {
            let signal = signal.unwrap_or_default();
            log::info!("the root task {root} was killed by signal {signal}");
        }
        Err(error) => log::warn!("cannot wait for the root task {root}: {error}"),
    }
}

fn wait_for_end(root: Pid) -> rustix::io::Result<WaitStatus> {
    loop {
        match waitpid(Some(root), WaitOptions::empty()) {
            Ok(Some((_, status))) if status.exited() || status.signaled() => return Ok(status),
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

fn to_json(restored: &Restored) -> Value {
    json!({"restore": {
        "root": restored.root.as_raw_nonzero().get(),
        "tasks": restored.tasks,
        "threads": restored.threads,
        "filled_pages": restored.filled_pages,
        "lazy_bytes": lazy_bytes(restored),
        "total_us": restored.total_us,
    }})
}

/// What is still to come.
fn lazy_bytes(restored: &Restored) -> u64 {
    restored.lazy.as_ref().map_or(0, |lazy| lazy.bytes)
}

fn to_text(restored: &Restored) -> String {
    format!(
        "root           {}\n\
         tasks          {}\n\
         threads        {}\n\
         pages filled   {}\n\
         bytes to come  {}\n\
         whole restore  {} us\n",
        restored.root.as_raw_nonzero(),
        restored.tasks,
        restored.threads,
        restored.filled_pages,
        lazy_bytes(restored),
        restored.total_us,
    )
}
