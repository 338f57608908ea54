//! Monitors that fail in the middle of a restore, at each command of it: the command says what has
//! failed, and nothing is left.

use super::behind::Switch;
use super::proxy::{Course, FAULTS, Fault};
use super::*;

/// A way to restore machines of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Eager,
    Lazy,
    Share,
    /// A pool is filled.
    Fill,
    /// A machine is taken out of a pool, which is filled again.
    Take,
}

impl Way {
    const fn words(self) -> &'static [&'static str] {
        match self {
            Self::Eager => &["--eager"],
            Self::Lazy => &["--lazy"],
            Self::Share => &["--share", "-n", "2"],
            Self::Fill => &["-n", "0", "--pool", "1", "--keep", "1000"],
            Self::Take => &["-n", "1", "--pool", "1", "--keep", "1000"],
        }
    }

    /// How many machines run then.
    const fn count(self) -> usize {
        match self {
            Self::Eager | Self::Lazy | Self::Take => 1,
            Self::Share => 2,
            Self::Fill => 0,
        }
    }
}

/// An image of a machine without a guest, with a disk, and who starts others of it.
struct Bench {
    switch: Switch,
    scratch: tempfile::TempDir,
    image: String,
    /// The words behind `--`.
    line: Vec<String>,
}

/// What the process is called that keeps a template.
const KEEPER: &str = "stillframe-keep";

/// How a command ended.
#[derive(Debug)]
struct Run {
    status: Option<i32>,
    /// What it said on stderr.
    told: String,
    /// The machines that it started.
    pids: Vec<i32>,
    /// What was asked until then.
    asked: Vec<String>,
}

const FIXED: &str = "-accel tcg -nodefaults -display none -m 64 -machine q35,memory-backend=mem \
                     -device virtio-blk-pci,romfile=,drive=disk";

impl Bench {
    fn new() -> Self {
        let scratch = tempfile::tempdir().expect("a folder");
        let folder = scratch.path();
        for name in ["own", "behind"] {
            fs::create_dir(folder.join(name)).expect("a folder");
        }
        let disk = File::create(folder.join("disk")).expect("a file");
        disk.set_len(1 << 20).expect("a length");
        let emulator = Emulator::of_tests();
        let mut program = emulator.program();
        let rest = program.split_off(1);
        let mut words = rest;
        words.extend(FIXED.split(' ').map(str::to_owned));
        words.extend([
            "-object".to_owned(),
            emulator.memory(64),
            "-drive".to_owned(),
        ]);
        let drive = |file, format| format!("file={file},format={format},if=none,id=disk");
        let first = [&program[..], &words, &[drive("disk", "raw")]].concat();
        let mut guest = Linux::start(folder, "first", &first, &[]);
        wait_until("QEMU to listen", SOON, || {
            UnixStream::connect(&guest.qmp).is_ok()
        });
        let save = [
            "vm",
            "save",
            "--with-disks",
            "--qmp",
            "first.qmp",
            "-D",
            "image",
        ];
        let told = run(folder, &save);
        wait_until("QEMU's end", SOON, || guest.has_ended());
        let switch = Switch::new(&folder.join("behind"), &program[0]);
        let mut line = vec![switch.program.to_str().expect("text").to_owned()];
        line.extend(words);
        line.push(drive("{disk1}", "qcow2"));
        line.extend(["-serial", "null"].map(str::to_owned));
        Self {
            image: told["vm_save"]["image"].as_str().expect("text").to_owned(),
            switch,
            line,
            scratch,
        }
    }

    fn folder(&self) -> &Path {
        self.scratch.path()
    }

    /// Restores in a way, with a fault at a question.
    fn run(&self, way: Way, fault: Option<(usize, Fault)>) -> Run {
        let options = "vm restore -D image -o /dev/null --json --qmp-dir own --disk-dir own \
                       --timeout 1 --name faulty-{n}";
        let mut words = options.split(' ').collect::<Vec<_>>();
        words.extend(way.words());
        words.push("--");
        words.extend(self.line.iter().map(String::as_str));
        let mut command = stillframe(self.folder(), &words);
        let command = command.stdout(Stdio::piped()).stderr(Stdio::piped());
        *self.switch.course.lock() = Course {
            child: None,
            fault,
            asked: Vec::new(),
        };
        let child = {
            // No question is heard before it is known who asks.
            let mut course = self.switch.course.lock();
            let child = command.spawn().expect("it starts");
            course.child = Some(child.id() as i32);
            child
        };
        let output = child.wait_with_output().expect("it ends");
        self.switch.course.lock().child = None;
        let told = serde_json::from_slice::<Value>(&output.stdout).unwrap_or_default();
        let machines = told["vm_restore"]["machines"].as_array();
        let pids = machines.into_iter().flatten();
        let pids = pids.map(|one| one["pid"].as_u64().expect("a number") as i32);
        let mut pids = pids.collect::<Vec<_>>();
        pids.sort_unstable();
        Run {
            status: output.status.code(),
            told: String::from_utf8_lossy(&output.stderr).into_owned(),
            pids,
            asked: Vec::new(),
        }
    }

    /// Waits until all that was to happen has, and insists that it is all or nothing; then nothing
    /// is left.
    #[track_caller]
    fn settle(&self, way: Way, run: &mut Run, what: &str) {
        let fault = self.switch.course.lock().fault;
        match (way, run.status) {
            (Way::Take, Some(0)) => wait_until("the pool, or the fault", SOON, || {
                let asked = self.switch.course.lock().asked.len();
                let waiting = template(self.folder(), &self.image).map(|it| it.2);
                waiting == Some(1) || fault.is_some_and(|it| asked > it.0)
            }),
            (Way::Fill, Some(0)) => {
                let kept = template(self.folder(), &self.image).map(|it| it.2);
                assert_eq!(kept, Some(1), "{what}: {run:?}");
            }
            (_, Some(0) | None) => {}
            (Way::Take, _) => {
                let kept = template(self.folder(), &self.image).map(|it| it.2);
                assert_eq!(kept, Some(0), "{what}: {run:?}");
            }
            _ => assert_eq!(
                template(self.folder(), &self.image),
                None,
                "{what}: {run:?}"
            ),
        }
        self.drop_template();
        let word = self.word();
        let is_done = |(_, name): &(i32, String)| name.starts_with("qemu") || name == KEEPER;
        left(&format!("{what}: {run:?}"), word, |all| {
            all.iter().all(is_done)
        });
        let mut machines = processes_of(word);
        machines.retain(|it| it.1 != KEEPER);
        let machines = machines.into_iter().map(|it| it.0).collect::<Vec<_>>();
        match run.status {
            // Whoever is killed cannot tell of those that run.
            None => assert!(
                machines.is_empty() || machines.len() == way.count(),
                "{what}"
            ),
            Some(0) => assert_eq!(machines, run.pids, "{what}: {run:?}"),
            Some(_) => assert_eq!(machines, [] as [i32; 0], "{what}: {run:?}"),
        }
        for pid in &machines {
            let socket = self.switch.socket(*pid);
            let told = qmp(socket.to_str().expect("text"), "query-status");
            assert_eq!(told["status"], "running", "{what}: {run:?}");
        }
        let own = self.folder().join("own");
        let names = fs::read_dir(&own).expect("there").flatten();
        let names = names.map(|entry| entry.file_name().to_string_lossy().into_owned());
        for name in names.filter(|name| name.starts_with("faulty-")) {
            let of_none = machines.is_empty() && !name.ends_with(".log");
            assert!(!of_none, "{what}: {name} is left: {run:?}");
            fs::remove_file(own.join(name)).expect("it is ours");
        }
        machines.iter().for_each(|pid| kill(*pid));
        left(what, word, <[_]>::is_empty);
        run.asked = std::mem::take(&mut self.switch.course.lock().asked);
    }

    fn drop_template(&self) {
        let mut command = stillframe(self.folder(), &["vm", "templates", "--drop", &self.image]);
        let command = command.stdout(Stdio::null()).stderr(Stdio::null());
        command.status().expect("it starts");
    }

    /// What is in the command line of all that is started here.
    fn word(&self) -> &str {
        self.switch.program.to_str().expect("text")
    }

    /// Restores in a way with a fault, and insists that it says what has failed.
    #[track_caller]
    fn withstand(&self, way: Way, number: usize, fault: Fault, what: &str) {
        if way == Way::Take {
            let filled = self.run(Way::Fill, None);
            assert_eq!(filled.status, Some(0), "{what}: {filled:?}");
        }
        let mut run = self.run(way, Some((number, fault)));
        let is_told = |words: &[&str]| words.iter().any(|word| run.told.contains(word));
        match (run.status, fault) {
            (Some(0), _) | (None, Fault::Killed | Fault::KilledAfter) => {}
            (Some(1 | 4), _) => assert!(is_told(said_of(fault)), "{what}: {run:?}"),
            _ => panic!("{what}: {run:?}"),
        }
        self.settle(way, &mut run, what);
    }

    /// Restores in a way without a fault; the questions.
    #[track_caller]
    fn whole(&self, way: Way) -> Vec<String> {
        if way == Way::Take {
            let filled = self.run(Way::Fill, None);
            assert_eq!(filled.status, Some(0), "{filled:?}");
        }
        let mut run = self.run(way, None);
        assert_eq!(run.status, Some(0), "{way:?}: {run:?}");
        self.settle(way, &mut run, &format!("{way:?}"));
        run.asked
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        self.drop_template();
        for (pid, _) in processes_of(self.word()) {
            kill(pid);
        }
    }
}

/// What is told of a fault, one of these.
fn said_of(fault: Fault) -> &'static [&'static str] {
    match fault {
        Fault::Refused => &["it is not done"],
        Fault::Nonsense => &["nonsense"],
        Fault::OtherAnswer => &["with something else", "what it was not asked"],
        Fault::Late | Fault::QemuStopped => &["it does not answer"],
        Fault::Closed | Fault::QemuKilled => &["is gone", "has ended"],
        Fault::Killed | Fault::KilledAfter => &[],
    }
}

/// Waits until the processes with a word in their command lines are as they are to be.
#[track_caller]
fn left(what: &str, word: &str, are: impl Fn(&[(i32, String)]) -> bool) {
    let waited = testkit::wait::try_wait_for(SOON, || are(&processes_of(word)).then_some(()));
    assert_eq!(
        waited,
        Some(()),
        "{what}: left are {:?}",
        processes_of(word)
    );
}

/// Has commands of a way to restore fail, every `step`th in each of `faults`.
fn withstand(way: Way, step: usize, faults: impl Fn(usize) -> Vec<Fault>) {
    let bench = Bench::new();
    let asked = bench.whole(way);
    assert!(asked.len() > 5, "{asked:?}");
    for number in (0..asked.len()).step_by(step) {
        for fault in faults(number) {
            let what = format!("{way:?}: {fault:?} at {number}, {}", asked[number]);
            bench.withstand(way, number, fault, &what);
        }
    }
    bench.whole(way);
}

/// One fault for each command, of all that there are.
fn one(number: usize) -> Vec<Fault> {
    let all = [&FAULTS[..], &[Fault::QemuStopped]].concat();
    vec![all[number % all.len()]]
}

#[test]
fn a_monitor_that_fails_in_a_restore_leaves_nothing() {
    testkit::needs_root!();
    testkit::needs_linux!();
    withstand(Way::Eager, 1, one);
}

#[test]
fn a_monitor_that_fails_in_a_lazy_restore_leaves_nothing() {
    testkit::needs_root!();
    testkit::needs_linux!();
    withstand(Way::Lazy, 1, |number| one(number + 3));
}

#[test]
fn a_monitor_that_fails_leaves_nothing_of_two_that_share() {
    testkit::needs_root!();
    testkit::needs_linux!();
    withstand(Way::Share, 2, |number| one(number / 2 + 5));
}

#[test]
fn a_monitor_that_fails_leaves_no_pool_and_no_machine_of_one() {
    testkit::needs_root!();
    testkit::needs_linux!();
    withstand(Way::Fill, 1, |number| one(number + 1));
}

#[test]
fn a_monitor_that_fails_when_it_is_taken_out_of_a_pool_leaves_nothing() {
    testkit::needs_root!();
    testkit::needs_linux!();
    withstand(Way::Take, 2, |number| one(number / 2 + 2));
}

#[test]
#[ignore = "takes minutes: cargo xtask machines"]
fn a_monitor_that_fails_in_any_way_leaves_nothing_of_a_restore() {
    testkit::needs_root!();
    testkit::needs_linux!();
    for way in [Way::Eager, Way::Lazy, Way::Share, Way::Fill, Way::Take] {
        withstand(way, 1, |_| [&FAULTS[..], &[Fault::QemuStopped]].concat());
    }
}
