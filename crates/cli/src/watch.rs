//! What happens while the engine works: action scripts, the pidfile, the progress bar.

use std::fs::File;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::PathBuf;
use std::process::Command;

use process::{Observer, Stage, Veto};
use rustix::process::Pid;

use crate::bar::Bar;
use crate::exit::Failure;
use crate::logfile;
use crate::session::Session;

/// Watches one dump or restore.
#[derive(Debug)]
pub struct Watch<'a> {
    session: &'a Session,
    pidfile: Option<Pidfile>,
    bar: Bar,
}

/// A new pidfile, which is removed again unless the restore succeeds.
#[derive(Debug)]
struct Pidfile {
    path: PathBuf,
    file: File,
    written: bool,
    kept: bool,
}

impl Drop for Pidfile {
    fn drop(&mut self) {
        if !self.kept {
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
            bar: Bar::default(),
        }
    }

    /// Adds a pidfile, which must not exist yet. It is removed again unless [`Self::done`] is
    /// called.
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
                kept: false,
            });
        }
        Ok(self)
    }

    /// Ends the watch over work that succeeded.
    pub fn done(mut self) {
        if let Some(pidfile) = &mut self.pidfile {
            pidfile.kept = true;
        }
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
        if let (Some(root), Stage::PostRestore) = (root, stage) {
            self.write_pid(root)?;
        }
        match self.call_scripts(stage, root) {
            // The tree runs: what the script did not do is in the log, and nothing is undone.
            Err(_) if stage == Stage::PostResume => {}
            outcome => outcome?,
        }
        match &self.session.listener {
            Some(listener) => listener.stage(stage, root),
            None => Ok(()),
        }
    }

    fn fork(&mut self) {
        logfile::flush();
    }

    fn progress(&mut self, done_bytes: u64, total_bytes: u64) {
        self.bar.show(done_bytes, total_bytes);
    }
}

/// Returns the name of a stage in `CRTOOLS_SCRIPT_ACTION`.
fn action(stage: Stage) -> &'static str {
    match stage {
        Stage::PreDump => "pre-dump",
        Stage::NetworkLock => "network-lock",
        Stage::PostFreeze => "post-freeze",
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

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;

    use super::*;

    fn session(dir: &Path, scripts: &[PathBuf]) -> Session {
        Session::in_directory(dir, scripts)
    }

    fn script(dir: &Path, name: &str, text: &str) -> PathBuf {
        let path = dir.join(name);
        std::fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn scripts_are_called_in_order_and_told_the_stage() {
        let dir = tempfile::tempdir().unwrap();
        let say = |who: &str| {
            let told = "$CRTOOLS_SCRIPT_ACTION $CRTOOLS_IMAGE_DIR ${CRTOOLS_INIT_PID-none}";
            script(dir.path(), who, &format!("echo {who} {told} $PWD >> said"))
        };
        let session = session(dir.path(), &[say("first"), say("second")]);
        let mut watch = Watch::new(&session);
        watch.stage(Stage::PreRestore, None).unwrap();
        watch.stage(Stage::PostResume, Pid::from_raw(42)).unwrap();
        let said = std::fs::read_to_string(dir.path().join("said")).unwrap();
        let place = dir.path().display().to_string();
        let line =
            |who: &str, stage: &str, pid: &str| format!("{who} {stage} {place} {pid} {place}\n");
        let expected = [
            line("first", "pre-restore", "none"),
            line("second", "pre-restore", "none"),
            line("first", "post-resume", "42"),
            line("second", "post-resume", "42"),
        ];
        assert_eq!(said, expected.concat());
    }

    #[test]
    fn a_failing_script_stops_the_work_until_the_tree_runs() {
        let dir = tempfile::tempdir().unwrap();
        for path in [
            script(dir.path(), "fails", "exit 3"),
            dir.path().join("missing"),
        ] {
            let session = session(dir.path(), &[path]);
            let mut watch = Watch::new(&session);
            let veto = watch.stage(Stage::PostDump, None).unwrap_err().to_string();
            assert!(veto.contains("post-dump: exit status: 3") || veto.contains("No such file"));
            assert!(watch.stage(Stage::PostResume, None).is_ok());
        }
    }

    #[test]
    fn the_pidfile_is_new_and_holds_the_root() {
        let dir = tempfile::tempdir().unwrap();
        let session = session(dir.path(), &[]);
        let path = dir.path().join("root.pid");
        let pidfile = || Some(PathBuf::from("root.pid"));
        drop(Watch::new(&session).with_pidfile(pidfile()).unwrap());
        assert!(!path.exists(), "a restore that failed leaves no pidfile");
        let mut watch = Watch::new(&session).with_pidfile(pidfile()).unwrap();
        watch.stage(Stage::PostRestore, Pid::from_raw(42)).unwrap();
        watch.done();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "42");
        assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
        assert!(Watch::new(&session).with_pidfile(pidfile()).is_err());
        assert!(path.exists(), "another's pidfile is left alone");
    }

    #[test]
    fn a_restore_that_fails_after_the_pid_was_written_takes_the_pidfile_back() {
        let dir = tempfile::tempdir().unwrap();
        let session = session(dir.path(), &[script(dir.path(), "fails", "exit 1")]);
        let pidfile = Some(PathBuf::from("root.pid"));
        let mut watch = Watch::new(&session).with_pidfile(pidfile).unwrap();
        watch
            .stage(Stage::PostRestore, Pid::from_raw(42))
            .unwrap_err();
        drop(watch);
        assert!(!dir.path().join("root.pid").exists());
    }
}
