//! Monitors that fail in the middle of a save, at each command of it: by a proxy between the save
//! and QEMU.

use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use sys::socket::{self, Along};

use super::*;

/// What goes wrong when a command is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
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
}

const FAULTS: [Fault; 8] = [
    Fault::Refused,
    Fault::Nonsense,
    Fault::OtherAnswer,
    Fault::Late,
    Fault::Closed,
    Fault::QemuKilled,
    Fault::Killed,
    Fault::KilledAfter,
];

/// A machine without a guest, with a disk; its monitor is talked to through a proxy.
struct Machine {
    folder: PathBuf,
    qmp: PathBuf,
    qemu: Child,
    /// QEMU has the same, and listens as long as it talks to nobody.
    listener: UnixListener,
}

impl Machine {
    fn start(folder: &Path) -> Self {
        for entry in fs::read_dir(folder).expect("there").flatten() {
            // Overlays of the one before.
            if entry.file_name().to_string_lossy().ends_with(".qcow2") {
                fs::remove_file(entry.path()).expect("it is ours");
            }
        }
        let disk = File::create(folder.join("disk")).expect("a file");
        disk.set_len(1 << 20).expect("a length");
        let qmp = folder.join("proxied.qmp");
        let _ = fs::remove_file(&qmp);
        let listener = UnixListener::bind(&qmp).expect("it listens");
        let set = |flags| rustix::io::fcntl_setfd(&listener, flags).expect("a flag");
        set(rustix::io::FdFlags::empty());
        let emulator = Emulator::of_tests();
        let mut words = emulator.program();
        let fixed = "-accel tcg -nodefaults -display none -m 64 -machine q35,memory-backend=mem \
                     -drive file=disk,format=raw,if=none,id=disk -device \
                     virtio-blk-pci,romfile=,drive=disk";
        words.extend(fixed.split(' ').map(str::to_owned));
        words.extend(["-object".to_owned(), emulator.memory(64)]);
        let fd = listener.as_raw_fd();
        let chardev = format!("socket,id=own,fd={fd},server=on,wait=off");
        for word in ["-chardev", &chardev, "-mon", "chardev=own,mode=control"] {
            words.push(word.to_owned());
        }
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).current_dir(folder);
        let qemu = command.stdout(Stdio::null()).spawn().expect("it starts");
        set(rustix::io::FdFlags::CLOEXEC);
        let machine = Self {
            folder: folder.to_owned(),
            qmp,
            qemu,
            listener,
        };
        assert_eq!(machine.ask("query-status")["status"], "running");
        machine
    }

    /// Asks QEMU itself.
    fn ask(&self, command: &'static str) -> Value {
        qmp(self.qmp.to_str().expect("text"), command)
    }

    /// Runs a command, and lets it talk to QEMU but for the fault at the command with a number.
    fn run(&self, words: &[&str], fault: Option<(usize, Fault)>) -> Run {
        let upstream = UnixStream::connect(&self.qmp).expect("QEMU listens");
        // When it has greeted, whoever connects next does not reach it.
        let mut greeting = vec![0; 4096];
        let length = (&upstream).read(&mut greeting).expect("it greets");
        greeting.truncate(length);
        let qmp = self.qmp.to_str().expect("text");
        let words = [words, &["--qmp", qmp, "--timeout", "1"]].concat();
        let mut command = stillframe(&self.folder, &words);
        let command = command.stdout(Stdio::null()).stderr(Stdio::piped());
        let child = command.spawn().expect("it starts");
        let (client, _) = self.listener.accept().expect("it connects");
        (&client).write_all(&greeting).expect("it hears");
        let proxy = Proxy {
            machine: self,
            child: child.id() as i32,
            fault,
            asked: Vec::new(),
            spoil: None,
        };
        let asked = proxy.run(client.into(), upstream.into());
        let output = child.wait_with_output().expect("it ends");
        Run {
            status: output.status.code(),
            told: String::from_utf8_lossy(&output.stderr).into_owned(),
            asked,
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }
}

/// How a command ended.
#[derive(Debug)]
struct Run {
    status: Option<i32>,
    told: String,
    /// The commands that QEMU was asked, the one with the fault as the last.
    asked: Vec<String>,
}

struct Proxy<'a> {
    machine: &'a Machine,
    child: i32,
    fault: Option<(usize, Fault)>,
    asked: Vec<String>,
    /// What is said instead of the next answer.
    spoil: Option<Vec<u8>>,
}

/// What becomes of a line.
enum Way {
    Forwarded,
    Kept,
    Closed,
}

impl Proxy<'_> {
    /// Forwards everything until nobody talks any more.
    fn run(mut self, client: OwnedFd, upstream: OwnedFd) -> Vec<String> {
        let wait = Timespec::try_from(SOON).expect("it is short");
        let mut buffer = vec![0; 1 << 16];
        loop {
            let mut fds = [&client, &upstream].map(|fd| PollFd::new(fd, PollFlags::IN));
            let ready = rustix::io::retry_on_intr(|| poll(&mut fds, Some(&wait)));
            assert_ne!(
                ready.expect("polled"),
                0,
                "{:?}: {:?}",
                self.fault,
                self.asked
            );
            let [is_client, is_upstream] = fds.map(|fd| !fd.revents().is_empty());
            if is_upstream {
                match socket::receive(&upstream, &mut buffer, 0) {
                    Ok(received) if received.len > 0 => {
                        let said = self.spoiled(&buffer[..received.len]);
                        let _ = socket::send(&client, &said, Along::default(), 0);
                    }
                    _ => return self.asked,
                }
            }
            if is_client {
                let received = match socket::receive(&client, &mut buffer, 0) {
                    Ok(received) if received.len > 0 => received,
                    _ => return self.asked,
                };
                let mut rights = received.rights;
                for line in buffer[..received.len].split_inclusive(|byte| *byte == b'\n') {
                    match self.hear(line, &client) {
                        Way::Closed => return self.asked,
                        Way::Kept => {}
                        Way::Forwarded => forward(&upstream, line, std::mem::take(&mut rights)),
                    }
                    if self.now() == Some(Fault::KilledAfter) {
                        kill(self.child);
                    }
                }
            }
        }
    }

    fn hear(&mut self, said: &[u8], client: &OwnedFd) -> Way {
        let question = serde_json::from_slice::<Value>(said).expect("one question");
        let command = question["execute"].as_str().expect("a command").to_owned();
        self.asked.push(command);
        match self.now() {
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
                kill(self.machine.qemu.id() as i32);
                Way::Kept
            }
            Some(Fault::Killed) => {
                kill(self.child);
                Way::Kept
            }
            Some(Fault::KilledAfter) | None => Way::Forwarded,
        }
    }

    /// The fault, if it is the last question's.
    fn now(&self) -> Option<Fault> {
        let (number, fault) = self.fault?;
        (number + 1 == self.asked.len()).then_some(fault)
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

/// A way to save a machine: its words, and what an image of it has.
const WAYS: [&[&str]; 4] = [
    &["vm", "save", "-R"],
    &["vm", "save", "-R", "--with-disks"],
    &["vm", "save", "-R", "--live", "--with-disks"],
    &["vm", "pre-save"],
];

/// Insists that a machine runs on after a command that failed, and that nothing of it is left.
#[track_caller]
fn runs_on(machine: &Machine, run: &Run, what: &str) {
    wait_until("the guest to run", SOON, || {
        machine.ask("query-status")["status"] == "running"
    });
    let drives = machine.ask("query-block").to_string();
    for entry in fs::read_dir(&machine.folder).expect("there").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".qcow2") {
            assert!(drives.contains(&name), "{what}: {name} is left: {run:?}");
        }
    }
}

/// Has each command of each way to save fail in each of `faults`.
fn withstand(faults: impl Fn(usize) -> Vec<Fault>) {
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    let mut machine = Machine::start(folder);
    for (way, words) in WAYS.iter().enumerate() {
        let words = [words, &["-D", "image", "--no-sync"][..]].concat();
        let whole = machine.run(&words, None);
        assert_eq!(whole.status, Some(0), "{}", whole.told);
        assert!(whole.asked.len() > 10, "{:?}", whole.asked);
        for number in 0..whole.asked.len() {
            for fault in faults(way + number) {
                let _ = fs::remove_dir_all(folder.join("image"));
                let run = machine.run(&words, Some((number, fault)));
                let what = format!("{words:?}: {fault:?} at {}", whole.asked[number]);
                let manifest = folder.join("image/manifest.img");
                assert_eq!(manifest.exists(), run.status == Some(0), "{what}: {run:?}");
                match fault {
                    Fault::QemuKilled => {
                        // All may have been read before.
                        assert!(matches!(run.status, Some(0 | 4)), "{what}: {run:?}");
                        machine = Machine::start(folder);
                        continue;
                    }
                    Fault::Killed | Fault::KilledAfter => {
                        assert!(matches!(run.status, None | Some(0)), "{what}: {run:?}");
                    }
                    _ => assert!(run.status.is_some(), "{what}: {run:?}"),
                }
                runs_on(&machine, &run, &what);
            }
        }
        let whole = machine.run(&words, None);
        assert_eq!(whole.status, Some(0), "{}", whole.told);
    }
}

#[test]
fn a_monitor_that_fails_leaves_the_guest_running() {
    testkit::needs_root!();
    if let Some(why) = linux::missing() {
        testkit::skip!("{why}");
    }
    // Each fault at some commands of each way, and each command of each way with one fault.
    withstand(|number| vec![FAULTS[number % FAULTS.len()]]);
}

#[test]
#[ignore = "takes minutes: cargo xtask machines"]
fn a_monitor_that_fails_in_any_way_leaves_the_guest_running() {
    testkit::needs_root!();
    if let Some(why) = linux::missing() {
        testkit::skip!("{why}");
    }
    withstand(|_| FAULTS.to_vec());
}
