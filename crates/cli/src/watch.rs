//! What happens while the engine works: action scripts, the pidfile, the progress bar.

use std::fs::File;
use std::io::{IsTerminal as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::process::Command;

use indicatif::{ProgressBar, ProgressStyle};
use process::{Observer, Stage, Veto};
use rustix::process::Pid;

use crate::exit::Failure;
use crate::session::Session;

/// Below this much memory a dump or a restore is over before a bar could be read.
const WORTH_A_BAR_BYTES: u64 = 128 << 20;

/// Watches one dump or restore.
#[derive(Debug)]
pub struct Watch<'a> {
    session: &'a Session,
    pidfile: Option<Pidfile>,
    bar: Bar,
}

#[derive(Debug)]
enum Bar {
    Undecided,
    Hidden,
    Shown(ProgressBar),
}

/// A pidfile that exists and is still empty, or holds the root's pid.
#[derive(Debug)]
struct Pidfile {
    path: PathBuf,
    file: File,
    written: bool,
}

impl Drop for Pidfile {
    fn drop(&mut self) {
        if !self.written {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

impl<'a> Watch<'a> {
    /// Returns a watch without a pidfile.
    pub fn new(session: &'a Session) -> Self {
        Self {
            session,
            pidfile: None,
            bar: Bar::Undecided,
        }
    }

    /// Adds a pidfile, which must not exist yet. It is removed again if no pid gets into it.
    ///
    /// # Errors
    /// The file exists or cannot be made.
    pub fn with_pidfile(mut self, pidfile: Option<PathBuf>) -> Result<Self, Failure> {
        if let Some(path) = pidfile {
            let path = self.session.work_dir.join(path);
            let file = File::options()
                .write(true)
                .create_new(true)
                .mode(0o600)
                .open(&path);
            let file = file.map_err(|source| Failure::File {
                action: "create the pidfile",
                path: path.clone(),
                source,
            })?;
            self.pidfile = Some(Pidfile {
                path,
                file,
                written: false,
            });
        }
        Ok(self)
    }

    fn write_pid(&mut self, root: Pid) -> Result<(), Veto> {
        let Some(pidfile) = self.pidfile.as_mut().filter(|pidfile| !pidfile.written) else {
            return Ok(());
        };
        let pid = root.as_raw_nonzero().to_string();
        pidfile.file.write_all(pid.as_bytes()).map_err(|error| {
            Veto(format!(
                "cannot write the pidfile {}: {error}",
                pidfile.path.display()
            ))
        })?;
        pidfile.written = true;
        Ok(())
    }

    fn call_scripts(&self, stage: Stage, root: Option<Pid>) -> Result<(), Veto> {
        for script in &self.session.scripts {
            let mut command = Command::new(script);
            command
                .current_dir(&self.session.work_dir)
                .env("CRTOOLS_SCRIPT_ACTION", action(stage))
                .env("CRTOOLS_IMAGE_DIR", &self.session.images_dir);
            if let Some(root) = root {
                command.env("CRTOOLS_INIT_PID", root.as_raw_nonzero().to_string());
            }
            log::debug!("{}: calling {}", action(stage), script.display());
            let outcome = match command.status() {
                Ok(status) if status.success() => continue,
                Ok(status) => status.to_string(),
                Err(error) => error.to_string(),
            };
            let what = format!(
                "action script {}: {}: {outcome}",
                script.display(),
                action(stage)
            );
            log::error!("{what}");
            return Err(Veto(what));
        }
        Ok(())
    }
}

impl Observer for Watch<'_> {
    fn stage(&mut self, stage: Stage, root: Option<Pid>) -> Result<(), Veto> {
        log::debug!("stage {}", action(stage));
        if let (Some(root), Stage::SetupNamespaces | Stage::PostRestore) = (root, stage) {
            self.write_pid(root)?;
        }
        match self.call_scripts(stage, root) {
            // The tree runs: what the script did not do is in the log, and nothing is undone.
            Err(_) if stage == Stage::PostResume => Ok(()),
            outcome => outcome,
        }
    }

    fn progress(&mut self, done_bytes: u64, total_bytes: u64) {
        if let Bar::Undecided = self.bar {
            let wanted = total_bytes >= WORTH_A_BAR_BYTES && std::io::stderr().is_terminal();
            self.bar = if wanted {
                Bar::Shown(bar(total_bytes))
            } else {
                Bar::Hidden
            };
        }
        if let Bar::Shown(bar) = &self.bar {
            bar.set_position(done_bytes);
            if done_bytes >= total_bytes {
                bar.finish_and_clear();
            }
        }
    }
}

impl Drop for Watch<'_> {
    fn drop(&mut self) {
        if let Bar::Shown(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

fn bar(total_bytes: u64) -> ProgressBar {
    let style = ProgressStyle::with_template(
        "{bar:40} {binary_bytes}/{binary_total_bytes} {binary_bytes_per_sec} {eta}",
    );
    ProgressBar::new(total_bytes).with_style(style.expect("the template is constant and correct"))
}

/// Returns the name of a stage in `CRTOOLS_SCRIPT_ACTION`.
fn action(stage: Stage) -> &'static str {
    match stage {
        Stage::PreDump => "pre-dump",
        Stage::NetworkLock => "network-lock",
        Stage::PostDump => "post-dump",
        Stage::PreRestore => "pre-restore",
        Stage::SetupNamespaces => "setup-namespaces",
        Stage::PostSetupNamespaces => "post-setup-namespaces",
        Stage::PostRestore => "post-restore",
        Stage::NetworkUnlock => "network-unlock",
        Stage::PreResume => "pre-resume",
        Stage::PostResume => "post-resume",
    }
}
