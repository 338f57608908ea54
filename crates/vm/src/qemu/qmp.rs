//! A client of QEMU's machine protocol (QMP): commands, one at a time, and the events between them.
//!
//! Not crate `qapi`: it reads lines of any length without a deadline, knows every enumeration of
//! one version of QEMU and fails on a value of another, and cannot send descriptors along. Seven
//! commands are asked here, each for a few fields.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{
    AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, connect, recv, socket_with,
};
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use sys::socket::{self, Along};

use crate::{Error, Result};

/// How long an answer may take, unless it is said. Requests to disks are finished before a guest
/// has stopped.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// How long there may be no room to wait for a monitor.
const CONNECTING: Duration = Duration::from_secs(1);

/// How often a monitor may turn a new client away: it does by chance, so seldom twice.
const ATTEMPTS: usize = 5;

/// The longest line that QEMU may say.
const LINE_MAX_BYTES: usize = 4 << 20;

/// The most lines that are passed over for an answer.
const LINES_MAX: usize = 10_000;

/// The most events that wait to be looked at; older ones are forgotten.
const EVENTS_MAX: usize = 256;

/// QEMU's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// As 7 of 7.2.22.
    pub major: u32,
    /// As 2 of 7.2.22.
    pub minor: u32,
    /// As 22 of 7.2.22.
    pub micro: u32,
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            major,
            minor,
            micro,
        } = self;
        write!(f, "{major}.{minor}.{micro}")
    }
}

/// A connection to a monitor.
#[derive(Debug)]
pub struct Qmp {
    socket: OwnedFd,
    path: PathBuf,
    /// How long an answer may take.
    pub(crate) patience: Duration,
    /// Bytes of an incomplete line.
    read: Vec<u8>,
    /// Changes of a migration's state.
    migration: VecDeque<String>,
    /// True if the guest was heard to go on.
    pub(crate) resumed: bool,
    number: u64,
    /// The number of the last question that was asked over another connection.
    asked_before: u64,
    /// Questions that were asked before their turn, with their numbers.
    foreseen: VecDeque<(Question, u64)>,
}

/// A command and its arguments.
pub(crate) type Question = (&'static str, Value);

#[derive(Deserialize)]
struct Greeting {
    #[serde(rename = "QMP")]
    qmp: GreetingBody,
}

#[derive(Deserialize)]
struct GreetingBody {
    version: GreetingVersion,
}

#[derive(Deserialize)]
struct GreetingVersion {
    qemu: GreetingNumbers,
}

#[derive(Deserialize)]
struct GreetingNumbers {
    major: u32,
    minor: u32,
    micro: u32,
}

impl Qmp {
    /// Connects to a monitor's socket. Whether anybody answers is seen in [`Qmp::greet`].
    ///
    /// # Errors
    /// [`Error::Gone`] where nobody listens, [`Error::Monitor`] where others have waited before for
    /// so long that there is no room to; [`Error::File`].
    pub fn connect(path: &Path) -> Result<Self> {
        let failed = |errno: Errno| match errno {
            Errno::AGAIN => Error::Monitor {
                place: format!("at {}", path.display()),
                what: "others wait for it; a monitor talks to one client at a time".to_owned(),
            },
            Errno::CONNREFUSED | Errno::NOENT => Error::Gone(format!(
                "no QEMU listens at {}: start it with -qmp unix:{0},server=on,wait=off",
                path.display()
            )),
            errno => Error::file("connect to", path)(errno),
        };
        let address = SocketAddrUnix::new(path).map_err(failed)?;
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None);
        let socket = socket.map_err(failed)?;
        // Who connects waits where too many do.
        set_socket_timeout(&socket, Timeout::Send, Some(CONNECTING)).map_err(failed)?;
        connect(&socket, &address).map_err(failed)?;
        set_socket_timeout(&socket, Timeout::Send, None).map_err(failed)?;
        Ok(Self::new(socket, path))
    }

    /// Connects to a monitor and begins; its greeting may take `greeting`, each answer `patience`.
    /// Where the client before it has just left in the middle of something, QEMU 10 closes a
    /// connection now and then, or takes what that client has said for the new one's; such a one
    /// is given up for another.
    ///
    /// # Errors
    /// Those of [`Qmp::connect`] and [`Qmp::greet`].
    pub fn reach(path: &Path, patience: Duration, greeting: Duration) -> Result<(Self, Version)> {
        Self::reach_after(0, path, patience, greeting)
    }

    /// The same where so many questions were asked over another connection.
    fn reach_after(
        mut asked: u64,
        path: &Path,
        patience: Duration,
        greeting: Duration,
    ) -> Result<(Self, Version)> {
        let mut turned_away = None;
        for _ in 0..ATTEMPTS {
            let mut qmp = Self::connect(path)?;
            qmp.patience = patience;
            (qmp.number, qmp.asked_before) = (asked, asked);
            match qmp.greet(greeting) {
                Ok(version) => return Ok((qmp, version)),
                Err(error @ (Error::Gone(_) | Error::Refused { .. })) => {
                    log::debug!("{}: tried again: {error}", path.display());
                    asked = qmp.number;
                    turned_away = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        Err(turned_away.expect("it was tried"))
    }

    /// A connection that was greeted by somebody else.
    pub(crate) fn greeted(socket: OwnedFd, path: &Path) -> Self {
        Self::new(socket, path)
    }

    fn new(socket: OwnedFd, path: &Path) -> Self {
        Self {
            socket,
            path: path.to_owned(),
            patience: PATIENCE,
            read: Vec::new(),
            migration: VecDeque::new(),
            resumed: false,
            number: 0,
            asked_before: 0,
            foreseen: VecDeque::new(),
        }
    }

    /// The same connection, for another process: who uses it must be alone.
    ///
    /// # Errors
    /// That of dup(2).
    pub(crate) fn duplicate(&self) -> io::Result<Self> {
        let mut again = Self::new(self.socket.try_clone()?, &self.path);
        again.patience = self.patience;
        Ok(again)
    }

    /// Another connection to the same QEMU, where this one was lost.
    pub(crate) fn again(&self) -> Result<Self> {
        let (again, _) = Self::reach_after(self.number, &self.path, self.patience, self.patience)?;
        match (self.peer(), again.peer()) {
            (Ok(one), Ok(other)) if one == other => Ok(again),
            _ => Err(self.gone("another one listens there")),
        }
    }

    /// Returns its place, for messages.
    fn place(&self) -> String {
        format!("at {}", self.path.display())
    }

    /// Waits until the monitor has said who it is, and begins.
    ///
    /// # Errors
    /// [`Error::Monitor`], [`Error::Gone`].
    pub fn greet(&mut self, patience: Duration) -> Result<Version> {
        let deadline = Instant::now() + patience;
        let line = loop {
            let line = self.line(deadline).map_err(|error| {
                let Error::Monitor { place, what } = error else {
                    return error;
                };
                let what = format!("{what}; a monitor talks to one client at a time");
                Error::Monitor { place, what }
            })?;
            // What happens right then may be told first, and what the client before has asked.
            match serde_json::from_slice::<Value>(&line) {
                Ok(said) if said.get("event").is_some() => self.note(&said),
                Ok(said) if said.get("id").is_some() => {}
                _ => break line,
            }
        };
        let greeting = serde_json::from_slice::<Greeting>(&line);
        let greeting = greeting.map_err(|_| self.nonsense("is no QMP", &line))?;
        let GreetingNumbers {
            major,
            minor,
            micro,
        } = greeting.qmp.version.qemu;
        self.call::<Value>("qmp_capabilities", json!({}))?;
        Ok(Version {
            major,
            minor,
            micro,
        })
    }

    /// The process that listened for the connection.
    ///
    /// # Errors
    /// That of getsockopt(2).
    pub(crate) fn peer(&self) -> io::Result<i32> {
        let who = rustix::net::sockopt::socket_peercred(&self.socket)?;
        Ok(who.pid.as_raw_nonzero().get())
    }

    /// Has the monitor do something; gives its answer.
    ///
    /// # Errors
    /// [`Error::Refused`] where it does not; [`Error::Monitor`], [`Error::Gone`].
    pub fn call<T: DeserializeOwned>(&mut self, command: &'static str, with: Value) -> Result<T> {
        self.call_along(command, with, &[])
    }

    /// The same with descriptors.
    pub(crate) fn call_along<T: DeserializeOwned>(
        &mut self,
        command: &'static str,
        with: Value,
        rights: &[BorrowedFd<'_>],
    ) -> Result<T> {
        let question = (command, with);
        let number = match self.foreseen.front() {
            Some((foreseen, number)) if *foreseen == question && rights.is_empty() => {
                let number = *number;
                self.foreseen.pop_front();
                number
            }
            _ => {
                self.pass_over_foreseen()?;
                self.send(command, question.1, rights)?
            }
        };
        self.told(command, number)
    }

    /// Asks what will be asked next, all at once: each [`Qmp::call`] that asks one of them, in this
    /// order, only waits for the answer. Questions alone, which change nothing.
    pub(crate) fn foresee(&mut self, questions: Vec<Question>) -> Result<()> {
        for question in questions {
            let number = self.send(question.0, question.1.clone(), &[])?;
            self.foreseen.push_back((question, number));
        }
        Ok(())
    }

    /// Waits for the answers to what nobody has asked after all.
    fn pass_over_foreseen(&mut self) -> Result<()> {
        while let Some(((command, _), number)) = self.foreseen.pop_front() {
            match self.answer(command, number, false) {
                Ok(_) | Err(Error::Refused { .. }) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Waits for the answer to a question.
    pub(crate) fn told<T: DeserializeOwned>(
        &mut self,
        command: &'static str,
        number: u64,
    ) -> Result<T> {
        let answer = self.answer(command, number, false)?;
        serde_json::from_value(answer).map_err(|error| Error::Monitor {
            place: self.place(),
            what: format!("it answered {command} with something else: {error}"),
        })
    }

    /// Has the monitor do something without waiting for it; gives the number of the question, for
    /// [`Qmp::told`] and [`Qmp::answered`], in the order of questions.
    pub(crate) fn ask(&mut self, command: &str, with: Value) -> Result<u64> {
        self.pass_over_foreseen()?;
        self.send(command, with, &[])
    }

    /// Waits for the answer to a question that is nothing but that it was done.
    pub(crate) fn answered(&mut self, command: &'static str, number: u64) -> Result<()> {
        self.answer(command, number, false).map(drop)
    }

    /// The same over a connection that somebody else may have left in the middle of a line.
    pub(crate) fn insist(&mut self, command: &'static str, with: &Value) -> Result<Value> {
        let mut last = None;
        for _ in 0..3 {
            let number = self.send(command, with.clone(), &[])?;
            match self.answer(command, number, true) {
                Ok(answer) => return Ok(answer),
                Err(error @ Error::Gone(_)) => return Err(error),
                Err(error) => last = Some(error),
            }
        }
        Err(last.expect("it was tried"))
    }

    /// Returns QEMU's answer to a command of its monitor for people.
    ///
    /// # Errors
    /// Those of [`Qmp::call`].
    pub fn human(&mut self, line: &str) -> Result<String> {
        let (command, with) = human(line);
        self.call(command, with)
    }

    /// Waits until a migration has ended; gives its state.
    ///
    /// # Errors
    /// [`Error::Monitor`], [`Error::Gone`].
    pub fn end_of_migration(&mut self, patience: Duration) -> Result<String> {
        let deadline = Instant::now() + patience;
        loop {
            while let Some(state) = self.migration.pop_front() {
                if matches!(state.as_str(), "completed" | "failed" | "cancelled") {
                    return Ok(state);
                }
            }
            let line = self.line(deadline)?;
            let said = self.parse(&line)?;
            self.note(&said);
        }
    }

    fn send(&mut self, command: &str, with: Value, rights: &[BorrowedFd<'_>]) -> Result<u64> {
        self.number += 1;
        let number = first_number() | self.number;
        let mut line = json!({"execute": command, "arguments": with, "id": number}).to_string();
        line.push('\n');
        let along = Along {
            rights,
            ..Along::default()
        };
        // One piece: who is killed has sent all of it or nothing.
        let sent = socket::send(&self.socket, line.as_bytes(), along, 0);
        match sent {
            Ok(sent) if sent == line.len() => Ok(number),
            Ok(_) => Err(self.failed("it does not listen")),
            Err(error) => Err(self.gone(&error.to_string())),
        }
    }

    /// The answer to a command; `lenient`: lines that make no sense are passed over.
    fn answer(&mut self, command: &'static str, number: u64, lenient: bool) -> Result<Value> {
        let deadline = Instant::now() + self.patience;
        for _ in 0..LINES_MAX {
            let line = self.line(deadline)?;
            let mut said = match self.parse(&line) {
                Err(_) if lenient => continue,
                other => other?,
            };
            if said.get("event").is_some() {
                self.note(&said);
                continue;
            }
            let answered = said.get("id").and_then(Value::as_u64);
            if answered != Some(number) {
                // QEMU tells the next client what one has asked that was killed.
                let is_late = |id| is_of_others(id) || id <= first_number() | self.asked_before;
                if lenient || answered.is_some_and(is_late) {
                    continue;
                }
                return Err(self.nonsense("answers what it was not asked", &line));
            }
            if let Some(error) = said.get("error") {
                let what = error.get("desc").and_then(Value::as_str);
                let what = what.unwrap_or("it does not say why").to_owned();
                return Err(Error::Refused { command, what });
            }
            match said.get_mut("return") {
                Some(answer) => return Ok(answer.take()),
                None => return Err(self.nonsense("answers nothing", &line)),
            }
        }
        Err(self.failed(&format!("it does not answer {command}")))
    }

    fn note(&mut self, said: &Value) {
        self.resumed |= said.get("event").and_then(Value::as_str) == Some("RESUME");
        if said.get("event").and_then(Value::as_str) == Some("MIGRATION")
            && let Some(state) = said["data"]["status"].as_str()
        {
            if self.migration.len() == EVENTS_MAX {
                self.migration.pop_front();
            }
            self.migration.push_back(state.to_owned());
        }
    }

    fn parse(&self, line: &[u8]) -> Result<Value> {
        let said = serde_json::from_slice::<Value>(line);
        let said = said.map_err(|_| self.nonsense("does not speak JSON", line))?;
        match said.is_object() {
            true => Ok(said),
            false => Err(self.nonsense("does not speak QMP", line)),
        }
    }

    /// The next line.
    fn line(&mut self, deadline: Instant) -> Result<Vec<u8>> {
        let mut looked = 0;
        loop {
            if let Some(at) = self.read[looked..].iter().position(|byte| *byte == b'\n') {
                let rest = self.read.split_off(looked + at + 1);
                return Ok(std::mem::replace(&mut self.read, rest));
            }
            looked = self.read.len();
            if looked > LINE_MAX_BYTES {
                return Err(self.failed("it says more than a monitor does"));
            }
            self.wait(deadline)?;
            let mut more = [0; 64 << 10];
            match recv(&self.socket, &mut more[..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(self.gone("it closed the connection")),
                Ok((count, _)) => self.read.extend_from_slice(&more[..count]),
                Err(Errno::INTR | Errno::AGAIN) => {}
                Err(errno) => return Err(self.gone(&errno.to_string())),
            }
        }
    }

    fn wait(&self, deadline: Instant) -> Result<()> {
        match guard::wait([Some(self.socket.as_fd())], Some(deadline)) {
            Ok([false]) => Err(self.failed("it does not answer")),
            Ok([true]) => Ok(()),
            Err(error) => Err(self.gone(&error.to_string())),
        }
    }

    fn failed(&self, what: &str) -> Error {
        Error::Monitor {
            place: self.place(),
            what: what.to_owned(),
        }
    }

    fn nonsense(&self, what: &str, line: &[u8]) -> Error {
        let said = String::from_utf8_lossy(&line[..line.len().min(80)]);
        self.failed(&format!("it {what}: {:?}", said.trim_end()))
    }

    fn gone(&self, what: &str) -> Error {
        Error::Gone(format!("QEMU {} is gone: {what}", self.place()))
    }
}

/// The question that [`Qmp::human`] asks.
pub(crate) fn human(line: &str) -> Question {
    ("human-monitor-command", json!({ "command-line": line }))
}

/// What the numbers of this process's questions have in common: those of two processes on one
/// connection differ.
fn first_number() -> u64 {
    u64::from(std::process::id()) << 32
}

/// Tells whether the question with a number was another process's.
fn is_of_others(number: u64) -> bool {
    number >> 32 != first_number() >> 32
}

impl AsFd for Qmp {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;

    /// A monitor that says all of `lines` whatever it is told, and a connection to it.
    fn saying(lines: &str) -> (Qmp, UnixStream) {
        let (own, mut other) = UnixStream::pair().expect("a pair");
        other.write_all(lines.as_bytes()).expect("said");
        (Qmp::new(own.into(), Path::new("in a test")), other)
    }

    const GREETING: &str = r#"{"QMP":{"version":{"qemu":{"micro":22,"minor":2,"major":7},
        "package":"Debian"},"capabilities":["oob"]}}"#;

    fn greeting() -> String {
        GREETING.replace('\n', "") + "\n"
    }

    /// The line that answers the `number`th command of this process.
    fn answer(number: u64, what: &str) -> String {
        let id = first_number() | number;
        format!("{{{what}, \"id\": {id}}}\n")
    }

    #[test]
    fn events_between_answers_are_kept() {
        let state = |state| format!(r#"{{"event":"MIGRATION","data":{{"status":"{state}"}}}}"#);
        let lines = [
            r#"{"event": "STOP"}"#.to_owned() + "\n",
            greeting(),
            r#"{"event": "RESUME"}"#.to_owned() + "\n",
            answer(1, r#""return": {}"#),
            state("active") + "\n" + &state("completed") + "\n",
            answer(2, r#""return": 5"#),
        ];
        let (mut qmp, _other) = saying(&lines.concat());
        let version = qmp.greet(PATIENCE).expect("greeted");
        assert_eq!(version.to_string(), "7.2.22");
        assert_eq!(qmp.call::<u64>("x", json!({})).expect("answered"), 5);
        let end = qmp.end_of_migration(PATIENCE).expect("it ended");
        assert_eq!(end, "completed");
    }

    #[test]
    fn where_too_many_wait_is_told() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("qmp");
        let listener = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        );
        let listener = listener.expect("a socket");
        let address = SocketAddrUnix::new(&path).expect("it is short");
        rustix::net::bind(&listener, &address).expect("bound");
        rustix::net::listen(&listener, 0).expect("it listens");
        let _first = Qmp::connect(&path).expect("there is room");
        let error = Qmp::connect(&path).expect_err("there is none");
        let text = error.to_string();
        assert!(text.contains("one client at a time"), "{text}");
    }

    #[test]
    fn who_is_turned_away_tries_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("qmp");
        let listener = UnixListener::bind(&path).expect("it listens");
        let refusal = r#""error": {"class": "CommandNotFound", "desc": "already complete"}"#;
        let done = r#""return": {}"#;
        let monitor = std::thread::spawn(move || {
            let said = [
                String::new(),
                greeting() + &answer(1, refusal),
                // The client before is answered first.
                answer(1, done) + &greeting() + &answer(1, refusal) + &answer(2, done),
            ];
            for lines in &said {
                let (mut client, _) = listener.accept().expect("it connects");
                client.write_all(lines.as_bytes()).expect("said");
                // Until it was heard, or who hears nothing would wait.
                if !lines.is_empty() {
                    let _ = client.read(&mut [0; 256]);
                }
            }
        });
        let (_, version) = Qmp::reach(&path, PATIENCE, PATIENCE).expect("the third time");
        assert_eq!(version.to_string(), "7.2.22");
        monitor.join().expect("it said all");
        // Nobody listens any more.
        let error = Qmp::reach(&path, PATIENCE, PATIENCE).expect_err("it has ended");
        assert!(matches!(error, Error::Gone(_)), "{error}");
    }

    #[test]
    fn what_is_no_monitor_is_refused() {
        for nonsense in [
            "\n",
            "null\n",
            "{}\n",
            "\u{1}\u{2}\n",
            r#"{"QMP":{"version":{"qemu":{"micro":-1,"minor":2,"major":7}}}}"#,
        ] {
            let (mut qmp, other) = saying(nonsense);
            drop(other);
            let error = qmp.greet(PATIENCE).expect_err(nonsense);
            assert!(
                matches!(error, Error::Monitor { .. } | Error::Gone(_)),
                "{error}"
            );
        }
        let (mut qmp, _other) = saying("");
        let error = qmp.greet(Duration::ZERO).expect_err("it is silent");
        let text = error.to_string();
        assert!(text.contains("one client at a time"), "{text}");
    }

    #[test]
    fn answers_to_something_else_are_refused() {
        for nonsense in [
            answer(7, r#""return": {}"#),
            answer(2, r#""other": {}"#),
            "[]\n".to_owned(),
            "{\"return\": {}}\n".to_owned(),
        ] {
            let lines = greeting() + &answer(1, r#""return": {}"#) + &nonsense;
            let (mut qmp, _other) = saying(&lines);
            qmp.greet(PATIENCE).expect("greeted");
            let error = qmp.call::<Value>("x", json!({})).expect_err(&nonsense);
            assert!(matches!(error, Error::Monitor { .. }), "{error}");
        }
    }

    #[test]
    fn what_was_foreseen_is_not_asked_again() {
        let lines = [
            greeting(),
            answer(1, r#""return": {}"#),
            answer(2, r#""return": 5"#),
            answer(3, r#""error": {"desc": "not now"}"#),
            answer(4, r#""return": "passed over""#),
            answer(5, r#""error": {"desc": "passed over"}"#),
            answer(6, r#""return": 7"#),
        ];
        let (mut qmp, other) = saying(&lines.concat());
        qmp.greet(PATIENCE).expect("greeted");
        let questions = ["one", "two", "three", "four"];
        qmp.foresee(questions.map(|one| (one, json!({}))).to_vec())
            .expect("asked");
        assert_eq!(qmp.call::<u64>("one", json!({})).expect("answered"), 5);
        let error = qmp.call::<u64>("two", json!({})).expect_err("it is not");
        assert!(error.to_string().contains("not now"), "{error}");
        // It has other arguments than the one that was foreseen.
        let with = json!({"x": 1});
        assert_eq!(qmp.call::<u64>("three", with).expect("answered"), 7);
        drop(qmp);
        let asked = std::io::read_to_string(other).expect("asked");
        assert_eq!(asked.lines().count(), 6, "{asked}");
    }

    #[test]
    fn answers_to_another_process_are_passed_over() {
        let others = format!(
            "{{\"return\": [], \"id\": {}}}\n",
            first_number() ^ (1 << 32)
        );
        let lines = greeting() + &others + &answer(1, r#""return": {}"#) + &others;
        let lines = others.clone() + &lines;
        let (mut qmp, _other) = saying(&(lines + &answer(2, r#""return": 5"#)));
        qmp.greet(PATIENCE).expect("greeted");
        assert_eq!(qmp.call::<u64>("x", json!({})).expect("answered"), 5);
    }

    #[test]
    fn answers_to_a_connection_before_are_passed_over() {
        let late = answer(4, r#""return": "late""#);
        let lines = greeting() + &late + &answer(5, r#""return": {}"#) + &late;
        let (mut qmp, _other) = saying(&(lines + &answer(6, r#""return": 5"#)));
        (qmp.number, qmp.asked_before) = (4, 4);
        qmp.greet(PATIENCE).expect("greeted");
        assert_eq!(qmp.call::<u64>("x", json!({})).expect("answered"), 5);
    }

    #[test]
    fn who_insists_passes_over_what_was_left() {
        let lines = "half a line\"}\n{\"return\": {}, \"id\": 3}\n".to_owned()
            + &answer(1, r#""error": {"desc": "torn"}"#)
            + &answer(2, r#""return": {}"#);
        let (mut qmp, _other) = saying(&lines);
        qmp.insist("cont", &json!({})).expect("done");
    }

    #[test]
    fn a_line_without_an_end_is_given_up() {
        let (own, mut other) = UnixStream::pair().expect("a pair");
        let talker = std::thread::spawn(move || while other.write_all(&[b'x'; 1 << 16]).is_ok() {});
        let mut qmp = Qmp::new(own.into(), Path::new("in a test"));
        let error = qmp.greet(PATIENCE).expect_err("too long");
        assert!(error.to_string().contains("says more"), "{error}");
        drop(qmp);
        talker.join().expect("it ended");
    }
}
