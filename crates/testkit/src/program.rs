//! Real programs, started so that they can be dumped and survive a restore.
use std::ffi::OsStr;
use std::fs::File;
use std::net::TcpStream;
use std::os::fd::IntoRawFd;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Once;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::fs::OFlags;
use rustix::io::FdFlags;

use crate::{tree, wait};

/// A program to start: in a session of its own, with a small environment, and with nothing open
/// but /dev/null and files, so that no descriptor leads back into the test.
pub struct Program {
    name: String,
    command: Command,
    mark: String,
}

impl Program {
    /// Takes `program` by path, or by name out of `PATH`.
    pub fn new(program: impl AsRef<OsStr>) -> Self {
        let program = program.as_ref();
        let name = program.to_string_lossy().into_owned();
        let path = crate::skip::find_program(&name).unwrap_or_else(|| PathBuf::from(program));
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let mark = format!("TESTKIT_MARK={}-{number}", std::process::id());
        // setsid(1) becomes the session's leader and then executes the program, under one pid.
        let mut command = Command::new("setsid");
        command
            .arg(path)
            .env_clear()
            .env("TESTKIT_MARK", &mark["TESTKIT_MARK=".len()..])
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("LC_ALL", "C.UTF-8")
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        Self {
            name,
            command,
            mark,
        }
    }

    /// Adds one argument.
    pub fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.command.arg(argument);
        self
    }

    /// Adds arguments.
    pub fn args<A: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = A>) -> Self {
        self.command.args(arguments);
        self
    }

    /// Sets an environment variable.
    pub fn env(mut self, name: &str, value: impl AsRef<OsStr>) -> Self {
        self.command.env(name, value);
        self
    }

    /// Starts it in `folder` instead of `/`.
    pub fn folder(mut self, folder: &Path) -> Self {
        self.command.current_dir(folder);
        self
    }

    /// Sends stdout and stderr to `path`, which is created.
    ///
    /// # Panics
    /// When the file cannot be created.
    pub fn output(mut self, path: &Path) -> Self {
        let file =
            File::create(path).unwrap_or_else(|error| panic!("create {}: {error}", path.display()));
        let twin = file
            .try_clone()
            .unwrap_or_else(|error| panic!("duplicate {}: {error}", path.display()));
        self.command.stdout(file).stderr(twin);
        self
    }

    /// Starts it.
    ///
    /// # Panics
    /// When it cannot be started.
    #[track_caller]
    pub fn spawn(mut self) -> Spawned {
        tree::adopt_orphans();
        keep_strays();
        crate::skip::note_end_to_end();
        let child = match self.command.spawn() {
            Ok(child) => child,
            Err(error) => panic!("start {}: {error}", self.name),
        };
        // The handle is not kept: the process may be dumped, killed and restored, and is then
        // no longer what the handle knows. Reaping is done by pid.
        let pid = child.id();
        wait::wait_until(&format!("{} to be executed", self.name), wait::SOON, || {
            let executed = std::fs::read_to_string(format!("/proc/{pid}/comm"));
            !tree::is_alive(pid) || executed.is_ok_and(|comm| comm.trim_end() != "setsid")
        });
        Spawned {
            name: self.name,
            pids: vec![pid],
            mark: self.mark,
        }
    }
}

/// A started program; dropping it kills it and its tree, restored or not.
pub struct Spawned {
    name: String,
    pids: Vec<u32>,
    mark: String,
}

impl Spawned {
    /// The pid it was started under, the same after a restore.
    pub fn pid(&self) -> u32 {
        self.pids[0]
    }

    /// The name it was started by.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its tree, as [`tree::members`] lists it.
    pub fn tree(&self) -> Vec<u32> {
        tree::members(self.pid())
    }

    /// Takes processes along that left the tree, so that they are killed with it.
    pub fn adopt(&mut self, pids: &[u32]) {
        self.pids.extend_from_slice(pids);
    }

    /// Tells whether the root of the tree is alive.
    pub fn is_alive(&self) -> bool {
        tree::is_alive(self.pid())
    }

    /// Waits until `ready` holds.
    ///
    /// # Panics
    /// When the program ends or the deadline passes before that.
    #[track_caller]
    pub fn wait_ready(&self, what: &str, mut ready: impl FnMut() -> bool) {
        wait::wait_until(&format!("{} of {}", what, self.name), wait::SOON, || {
            assert!(self.is_alive(), "{} ended before {what}", self.name);
            ready()
        });
    }

    /// Waits until it accepts connections at 127.0.0.1:`port`.
    ///
    /// # Panics
    /// As [`Spawned::wait_ready`].
    #[track_caller]
    pub fn wait_port(&self, port: u16) {
        self.wait_ready(&format!("port {port}"), || {
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
    }

    /// Waits until `path` exists.
    ///
    /// # Panics
    /// As [`Spawned::wait_ready`].
    #[track_caller]
    pub fn wait_file(&self, path: &Path) {
        self.wait_ready(&path.display().to_string(), || path.exists());
    }

    /// Waits until the file at `path` holds `text`.
    ///
    /// # Panics
    /// As [`Spawned::wait_ready`].
    #[track_caller]
    pub fn wait_text(&self, path: &Path, text: &str) {
        let read =
            || String::from_utf8_lossy(&std::fs::read(path).unwrap_or_default()).into_owned();
        let found = wait::try_wait_for(wait::SOON, || {
            assert!(self.is_alive(), "{} ended before {text:?}", self.name);
            read().contains(text).then_some(())
        });
        assert!(
            found.is_some(),
            "{} never wrote {text:?}, but:\n{}",
            self.name,
            read()
        );
    }

    /// Kills the tree and waits until it is gone.
    ///
    /// # Panics
    /// When a task survives that.
    pub fn kill(&self) {
        assert!(self.kill_everything(), "{} survives SIGKILL", self.name);
    }

    /// Kills the tree, what was adopted, and what left it with the mark in its environment; tells
    /// whether all went.
    fn kill_everything(&self) -> bool {
        // Once more when the root is gone: by then its orphans are this process's children.
        tree::kill(&self.pids)
            && tree::kill(&tree::marked(&self.mark))
            && tree::kill(&tree::marked(&self.mark))
    }
}

impl Drop for Spawned {
    fn drop(&mut self) {
        // No panic here: this runs while a failed test unwinds.
        if !self.kill_everything() {
            eprintln!("{}: tasks of {:?} survive SIGKILL", self.name, self.pids);
        }
    }
}

/// Makes every descriptor that the test process inherited close on exec, so that no program of
/// the test's gets one: its other end would lie outside of what is dumped.
fn keep_strays() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let strays = std::fs::read_dir("/proc/self/fd")
            .expect("/proc is mounted")
            .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<i32>().ok())
            .filter(|&fd| fd > 2 && !closes_on_exec(fd));
        for fd in strays.collect::<Vec<i32>>() {
            // It was inherited: everything that Rust opens closes on exec by itself.
            if let Ok(stray) = sys::inherited::take(fd) {
                rustix::io::fcntl_setfd(&stray, FdFlags::CLOEXEC)
                    .expect("an open descriptor has flags");
                let _ = stray.into_raw_fd();
            }
        }
    });
}

fn closes_on_exec(fd: i32) -> bool {
    let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{fd}")).unwrap_or_default();
    info.lines()
        .filter_map(|line| line.strip_prefix("flags:"))
        .filter_map(|flags| i64::from_str_radix(flags.trim(), 8).ok())
        .any(|flags| flags & i64::from(OFlags::CLOEXEC.bits()) != 0)
}

/// A TCP port of 127.0.0.1 that nobody listened at a moment ago.
///
/// # Panics
/// When no port is left.
pub fn free_port() -> u16 {
    std::net::TcpListener::bind(("127.0.0.1", 0))
        .and_then(|listener| listener.local_addr())
        .expect("the loopback interface has free ports")
        .port()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn leads_its_own_session_and_holds_nothing_of_the_test() {
        let spawned = Program::new("sleep").arg("1000").spawn();
        let pid = spawned.pid();
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        let session = stat.rsplit_once(") ").unwrap().1.split(' ').nth(3);
        assert_eq!(session, Some(pid.to_string().as_str()));
        for fd in 0..3 {
            let link = std::fs::read_link(format!("/proc/{pid}/fd/{fd}")).unwrap();
            assert_eq!(link, Path::new("/dev/null"));
        }
        drop(spawned);
        assert!(!tree::exists(pid));
    }
}
