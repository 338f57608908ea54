//! A page server under test, and the image that it serves.
use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::machine_memory::{self, PAGE_BYTES};
use crate::subject::Subject;
use crate::wait::{SOON, wait_until};

/// An image of a machine's memory in the folder `0`, and a server of it or of another.
pub struct PageServer {
    stillframe: PathBuf,
    pages: u64,
    child: Option<Child>,
    /// How many servers were started.
    started: u32,
    folder: tempfile::TempDir,
}

impl PageServer {
    /// Makes the image of `pages` pages; nobody serves it yet.
    ///
    /// # Panics
    /// As all here where something is not as it has to be.
    pub fn new(stillframe: &Path, pages: u64) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let memory = folder.path().join("memory");
        machine_memory::write(&memory, pages).expect("written");
        let server = Self {
            stillframe: stillframe.to_owned(),
            pages,
            child: None,
            started: 0,
            folder,
        };
        let words = [
            "import",
            "--firecracker",
            "-D",
            "0",
            "--memory",
            "memory",
            "--no-sync",
        ];
        assert!(
            server
                .command(&words)
                .status()
                .expect("it starts")
                .success()
        );
        server
    }

    /// Serves the image in the folder `image`.
    pub fn serve(&mut self, image: &str, options: &[&str]) {
        self.child = Some(self.spawn(image, options));
        self.wait_for_answer();
    }

    /// Has another server take the machines over from the one that is there, or was.
    pub fn succeed(&mut self, image: &str, options: &[&str]) {
        let options = [options, &["--take-over", "socket.keep"]].concat();
        let next = self.spawn(image, &options);
        if let Some(mut before) = self.child.replace(next) {
            let ended = before.wait().expect("a child");
            assert!(
                ended.success() || ended.code().is_none(),
                "{ended}: {}",
                self.log()
            );
        }
        self.wait_for_answer();
    }

    /// Starts a server, and leaves it to the caller.
    pub fn spawn(&mut self, image: &str, options: &[&str]) -> Child {
        self.started += 1;
        let words = [
            "serve",
            "-D",
            image,
            "--socket",
            "socket",
            "--control",
            "control",
            "-v4",
        ];
        let mut command = self.command(&words);
        command
            .arg("-o")
            .arg(self.log_of(self.started))
            .args(options)
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        command.spawn().expect("it starts")
    }

    /// Who answers also hears signals.
    fn wait_for_answer(&mut self) {
        wait_until("the server", SOON, || {
            let child = self.child.as_mut().expect("it was started");
            let ended = child.try_wait().expect("a child");
            assert!(ended.is_none(), "{ended:?}: {}", self.log());
            let Ok(mut control) = UnixStream::connect(self.path("control")) else {
                return false;
            };
            let asked = b"GET /sessions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
            let mut answer = String::new();
            control.write_all(asked).is_ok() && control.read_to_string(&mut answer).is_ok()
        });
    }

    fn log_of(&self, number: u32) -> PathBuf {
        self.path(&format!("serve-{number}.log"))
    }

    /// A file in the folder of all this.
    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// The command under test, in that folder.
    pub fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(&self.stillframe);
        command.args(words).current_dir(self.folder.path());
        command.stdout(Stdio::null());
        command
    }

    /// A monitor with small pages and one mapping.
    pub fn monitor(&self, ability: &str) -> Subject {
        self.monitor_of("small", ability, "1")
    }

    /// A monitor: its kind of memory, what its userfaultfd can do, how many mappings it has.
    pub fn monitor_of(&self, size: &str, ability: &str, mappings: &str) -> Subject {
        let socket = self.path("socket").display().to_string();
        Subject::start(
            "monitor",
            &[&socket, &self.pages.to_string(), size, ability, mappings],
        )
    }

    /// Asks over the control socket: the status, and the answer.
    #[track_caller]
    pub fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> (u16, String) {
        ask(&self.path("control"), method, path, body).expect("answered")
    }

    /// Gets what is at `path` of the control socket.
    #[track_caller]
    pub fn get(&self, path: &str) -> Value {
        let (status, body) = self.ask("GET", path, None);
        assert_eq!(status, 200, "{body}");
        serde_json::from_str(&body).expect("JSON")
    }

    /// The number of the session with a process, once there is one.
    #[track_caller]
    pub fn session(&self, pid: u32) -> u64 {
        let mut found = None;
        wait_until("the session", SOON, || {
            let sessions = self.get("/sessions");
            let mut sessions = sessions["sessions"].as_array().expect("a list").iter();
            let own = sessions.find(|one| one["pid"] == pid);
            found = own.and_then(|one| one["number"].as_u64());
            found.is_some()
        });
        found.expect("waited for")
    }

    /// Its pid.
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("it was started").id()
    }

    /// Sends it a signal.
    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.pid().cast_signed()).expect("a pid");
        kill_process(pid, signal).expect("it is there");
    }

    /// Waits for its end; the exit status.
    pub fn wait(&mut self) -> Option<i32> {
        let mut child = self.child.take().expect("it was started");
        child.wait().expect("a child").code()
    }

    /// What it has logged, and those before it, which is written late.
    pub fn log(&self) -> String {
        let logs = (1..=self.started).map(|number| std::fs::read_to_string(self.log_of(number)));
        logs.flatten().collect()
    }

    /// How many sessions there are.
    #[track_caller]
    pub fn sessions(&self) -> usize {
        let all = self.get("/sessions");
        all["sessions"].as_array().map_or(0, Vec::len)
    }

    /// Writes a difference of a session into the folder `directory`; what is told.
    #[track_caller]
    pub fn diff(&self, session: u64, directory: &str) -> Value {
        let path = format!("/sessions/{session}/diff");
        let body = json!({"directory": directory});
        let (status, told) = self.ask("PUT", &path, Some(&body));
        assert_eq!(status, 200, "{told}: {}", self.log());
        serde_json::from_str(&told).expect("JSON")
    }

    /// Begins a live difference of a session into the folder `directory`; what is told.
    #[track_caller]
    pub fn diff_live(&self, session: u64, directory: &str) -> Value {
        let path = format!("/sessions/{session}/diff");
        let body = json!({"directory": directory, "live": true});
        let (status, told) = self.ask("PUT", &path, Some(&body));
        assert_eq!(status, 202, "{told}: {}", self.log());
        serde_json::from_str(&told).expect("JSON")
    }

    /// Waits until the live difference of a session is copied; what is told then.
    #[track_caller]
    pub fn copied(&self, session: u64) -> Value {
        let mut told = Value::Null;
        wait_until("the copy", SOON, || {
            told = self.get(&format!("/sessions/{session}/diff"));
            told["state"] != "copying"
        });
        assert_eq!(told["state"], "done", "{told}: {}", self.log());
        assert_eq!(told["wanted_bytes"], told["copied_bytes"], "{told}");
        told
    }

    /// Insists that the image in the folder `directory` is the memory that `monitor` has.
    #[track_caller]
    pub fn compare(&self, directory: &str, monitor: &Subject, what: &str) {
        monitor.ask(&format!("dump {}", self.path("is").display()));
        self.compare_kept(directory, what);
    }

    /// Keeps what the memory of `monitor` has to be at this moment, without touching it.
    pub fn keep(&self, monitor: &Subject) {
        monitor.ask(&format!("expect {}", self.path("is").display()));
    }

    /// Insists that the image in the folder `directory` is the memory that was kept.
    #[track_caller]
    pub fn compare_kept(&self, directory: &str, what: &str) {
        let words = ["export", "-D", directory, "--memory", "out", "--no-sync"];
        let exported = self.command(&words).status().expect("it starts");
        assert!(exported.success(), "{what}");
        let [out, is] = ["out", "is"].map(|name| std::fs::read(self.path(name)).expect("a file"));
        let pages = out
            .chunks(PAGE_BYTES)
            .zip(is.chunks(PAGE_BYTES))
            .enumerate();
        let wrong = pages
            .filter(|(_, (out, is))| out != is)
            .map(|(page, _)| page);
        let wrong = wrong.collect::<Vec<_>>();
        assert_eq!(wrong, [0; 0], "{what}: these pages differ");
        assert_eq!(out.len(), is.len(), "{what}");
    }
}

/// Asks a server at its control socket; none where it is gone, or has nothing to say any more.
pub fn ask(
    control: &Path,
    method: &str,
    path: &str,
    body: Option<&Value>,
) -> Option<(u16, String)> {
    let mut server = UnixStream::connect(control).ok()?;
    let body = body.map_or(String::new(), Value::to_string);
    let len = body.len();
    write!(
        server,
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\
         Content-Type: application/json\r\nContent-Length: {len}\r\n\r\n{body}"
    )
    .ok()?;
    let mut answer = String::new();
    server.read_to_string(&mut answer).ok()?;
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some((status, body.to_owned()))
}

impl Drop for PageServer {
    fn drop(&mut self) {
        if let Some(child) = &mut self.child {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
