//! The scratch folder of all programs, and the process that removes it and whatever still runs in
//! it when this process has ended, however that was.
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::error::{Result, file_error, start_error};

/// The scratch folder, and who cleans it.
pub struct Cleaner {
    folder: PathBuf,
    keep: bool,
    child: Child,
}

/// Waits for the end of its standard input, then kills all processes that have the folder in their
/// command line or environment, as all programs and all commands on them do, and removes it.
const CLEAN: &str = r#"
cat > /dev/null
for round in 1 2 3 4 5 6 7 8 9 10; do
    found=
    for process in /proc/[0-9]*; do
        pid=${process#/proc/}
        [ "$pid" = $$ ] && continue
        if grep -aqsF "$1" $process/cmdline $process/environ; then
            found=yes
            kill -KILL "$pid"
        fi
    done
    [ "$found" ] || break
    sleep 0.2
done
[ -e "$1/keep" ] || rm -rf "$1"
"#;

impl Cleaner {
    /// Makes the folder and starts the process.
    ///
    /// # Errors
    /// When one of them cannot be made.
    pub fn start(keep: bool) -> Result<Self> {
        let parent = Path::new("/var/tmp");
        let folder = tempfile::Builder::new()
            .prefix("stillframe-programs-")
            .tempdir_in(parent)
            .map_err(file_error("make a scratch folder in", parent))?
            .keep();
        let mut command = Command::new("setsid");
        command
            .args(["sh", "-c", CLEAN, "cleaner"])
            .arg(&folder)
            .stdin(Stdio::piped());
        let child = command.spawn();
        let child = child.map_err(|source| start_error(&command, source))?;
        Ok(Self {
            folder,
            keep,
            child,
        })
    }

    /// The folder.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Cleans up; where something failed, the files are kept if that was wanted.
    pub fn finish(mut self, failed: bool) {
        if failed && self.keep {
            // Without it, they are removed, which does no harm.
            let _ = fs::write(self.folder.join("keep"), "");
            eprintln!("the files stay in {}", self.folder.display());
        }
        drop(self.child.stdin.take());
        let _ = self.child.wait();
    }
}
