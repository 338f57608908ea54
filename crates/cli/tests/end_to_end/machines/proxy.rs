//! Monitors that fail at one command: a proxy between the command that is tested and QEMU.

use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sys::socket::{self, Along};

use super::*;

/// What goes wrong when a command is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// It is refused, and not done.
    Refused,
    /// It is done, and the answer is no JSON.
    Nonsense,
    /// It is done, and the answer is another one than was to be.
    OtherAnswer,
    /// It is heard later than anybody waits.
    Late,
    /// The connection is closed.
    Closed,
    /// QEMU is killed.
    QemuKilled,
    /// The command is killed before it is done.
    Killed,
    /// The command is killed when it is done.
    KilledAfter,
    /// QEMU is stopped, and does nothing more.
    QemuStopped,
}

/// Those after which QEMU could go on.
pub(super) const FAULTS: [Fault; 8] = [
    Fault::Refused,
    Fault::Nonsense,
    Fault::OtherAnswer,
    Fault::Late,
    Fault::Closed,
    Fault::QemuKilled,
    Fault::Killed,
    Fault::KilledAfter,
];

/// What is asked of the monitors of one command, and what is to go wrong.
#[derive(Debug, Default)]
pub(super) struct Course {
    /// The command's process, as long as it is not waited for.
    pub child: Option<i32>,
    /// What goes wrong at the question with a number, from 0 on.
    pub fault: Option<(usize, Fault)>,
    /// The commands that QEMU was asked.
    pub asked: Vec<String>,
}

impl Course {
    /// The fault, if it is the last question's.
    fn now(&self) -> Option<Fault> {
        let (number, fault) = self.fault?;
        (number + 1 == self.asked.len()).then_some(fault)
    }

    fn kill_child(&self) {
        if let Some(child) = self.child {
            kill(child);
        }
    }
}

/// The same for the proxies of several machines.
#[derive(Clone, Debug, Default)]
pub(super) struct Shared(Arc<Mutex<Course>>);

impl Shared {
    pub fn lock(&self) -> MutexGuard<'_, Course> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What passes on what is said to a QEMU, and its answers.
pub(super) struct Proxy {
    course: Shared,
    /// QEMU's process.
    qemu: i32,
    /// What is said instead of the next answer.
    spoil: Option<Vec<u8>>,
}

/// What becomes of a line.
enum Way {
    Forwarded,
    Kept,
    Closed,
}

impl Proxy {
    pub const fn new(course: Shared, qemu: i32) -> Self {
        Self {
            course,
            qemu,
            spoil: None,
        }
    }

    /// Forwards everything until nobody talks any more; then both connections are closed.
    ///
    /// # Panics
    /// Where nobody says anything for `patience`.
    pub fn run(mut self, client: OwnedFd, upstream: OwnedFd, patience: Duration) {
        let wait = Timespec::try_from(patience).expect("it is short");
        let mut buffer = vec![0; 1 << 16];
        loop {
            let mut fds = [&client, &upstream].map(|fd| PollFd::new(fd, PollFlags::IN));
            let ready = rustix::io::retry_on_intr(|| poll(&mut fds, Some(&wait)));
            assert_ne!(ready.expect("polled"), 0, "silent: {:?}", self.course);
            let [is_client, is_upstream] = fds.map(|fd| !fd.revents().is_empty());
            if is_upstream {
                match socket::receive(&upstream, &mut buffer, 0) {
                    Ok(received) if received.len > 0 => {
                        let said = self.spoiled(&buffer[..received.len]);
                        let _ = socket::send(&client, &said, Along::default(), 0);
                    }
                    _ => return,
                }
            }
            if is_client {
                let received = match socket::receive(&client, &mut buffer, 0) {
                    Ok(received) if received.len > 0 => received,
                    _ => return,
                };
                let said = &buffer[..received.len];
                if !self.pass(said, received.rights, &client, &upstream) {
                    return;
                }
            }
        }
    }

    /// Passes questions on; tells whether the connection stays.
    fn pass(
        &mut self,
        said: &[u8],
        mut rights: Vec<OwnedFd>,
        client: &OwnedFd,
        upstream: &OwnedFd,
    ) -> bool {
        for line in said.split_inclusive(|byte| *byte == b'\n') {
            // One question at a time, also of several machines.
            let fault = self.note(line);
            match self.hear(line, fault, client) {
                Way::Closed => return false,
                Way::Kept => {}
                Way::Forwarded => forward(upstream, line, std::mem::take(&mut rights)),
            }
            if fault == Some(Fault::KilledAfter) {
                self.course.lock().kill_child();
            }
        }
        true
    }

    /// Notes a question; gives what goes wrong with it.
    fn note(&self, said: &[u8]) -> Option<Fault> {
        let question = serde_json::from_slice::<Value>(said).expect("one question");
        let command = question["execute"].as_str().expect("a command").to_owned();
        let mut course = self.course.lock();
        course.asked.push(command);
        course.now()
    }

    fn hear(&mut self, said: &[u8], fault: Option<Fault>, client: &OwnedFd) -> Way {
        let question = serde_json::from_slice::<Value>(said).expect("one question");
        match fault {
            Some(Fault::Refused) => {
                let error = json!({"class": "GenericError", "desc": "it is not done"});
                let answer = json!({"error": error, "id": question["id"]}).to_string() + "\n";
                let _ = socket::send(client, answer.as_bytes(), Along::default(), 0);
                Way::Kept
            }
            Some(Fault::Nonsense) => {
                self.spoil = Some(b"\"\x01[nonsense\n".to_vec());
                Way::Forwarded
            }
            Some(Fault::OtherAnswer) => {
                let answer = json!({"return": [7], "id": question["id"]}).to_string() + "\n";
                self.spoil = Some(answer.into_bytes());
                Way::Forwarded
            }
            Some(Fault::Late) => {
                // Longer than it is waited for.
                std::thread::sleep(Duration::from_millis(1300));
                Way::Forwarded
            }
            Some(Fault::Closed) => Way::Closed,
            Some(Fault::QemuKilled) => {
                kill(self.qemu);
                Way::Kept
            }
            Some(Fault::QemuStopped) => {
                let qemu = rustix::process::Pid::from_raw(self.qemu).expect("a pid");
                let _ = rustix::process::kill_process(qemu, rustix::process::Signal::STOP);
                Way::Forwarded
            }
            Some(Fault::Killed) => {
                self.course.lock().kill_child();
                Way::Kept
            }
            Some(Fault::KilledAfter) | None => Way::Forwarded,
        }
    }

    /// What is said instead of something.
    fn spoiled(&mut self, said: &[u8]) -> Vec<u8> {
        let mut all = Vec::new();
        for line in said.split_inclusive(|byte| *byte == b'\n') {
            let is_answer = line.windows(10).any(|part| part == b"\"return\": ")
                || line.windows(9).any(|part| part == b"\"error\": ");
            match self.spoil.take() {
                Some(other) if is_answer => all.extend(other),
                kept => {
                    self.spoil = kept;
                    all.extend(line);
                }
            }
        }
        all
    }
}

/// Passes a line on, with the descriptors that came with it.
fn forward(to: &OwnedFd, line: &[u8], rights: Vec<OwnedFd>) {
    let rights = rights.iter().map(|right| right.as_fd());
    let along = Along {
        rights: &rights.collect::<Vec<_>>(),
        ..Along::default()
    };
    // Whoever was killed does not hear it.
    let _ = socket::send(to, line, along, 0);
}
