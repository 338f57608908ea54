//! Monitors that fail in the middle of a save, at each command of it: by a proxy between the save
//! and QEMU.

use std::os::fd::AsRawFd as _;

use super::proxy::{Course, FAULTS, Fault, Proxy, Shared};
use super::*;

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
        let course = Shared::default();
        *course.lock() = Course {
            child: Some(child.id() as i32),
            fault,
            asked: Vec::new(),
        };
        let proxy = Proxy::new(course.clone(), self.qemu.id() as i32);
        // When it ends, QEMU listens again.
        proxy.run(client.into(), upstream.into(), SOON);
        let asked = std::mem::take(&mut course.lock().asked);
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
                        // All may have been read before. At the first question another connection
                        // is tried, in vain: this process still listens where QEMU did.
                        let as_it_may = match number {
                            0 => run.status == Some(1),
                            _ => matches!(run.status, Some(0 | 4)),
                        };
                        assert!(as_it_may, "{what}: {run:?}");
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
    testkit::needs_linux!();
    // Each fault at some commands of each way, and each command of each way with one fault.
    withstand(|number| vec![FAULTS[number % FAULTS.len()]]);
}

#[test]
#[ignore = "takes minutes: cargo xtask machines"]
fn a_monitor_that_fails_in_any_way_leaves_the_guest_running() {
    testkit::needs_root!();
    testkit::needs_linux!();
    withstand(|_| FAULTS.to_vec());
}
