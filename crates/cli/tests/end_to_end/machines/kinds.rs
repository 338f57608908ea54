//! Machines of each type under each emulator, in pairs that talk to each other, with a disk that is
//! in use.

use super::*;

/// MiB of a disk that a guest writes to.
const DISK_MIB: u32 = 2;

/// A kind of machine.
#[derive(Clone, Copy, Debug)]
pub(super) struct Kind {
    pub emulator: Emulator,
    pub machine: &'static str,
    pub mib: u32,
    /// What each guest has in a file in its memory.
    pub file: &'static str,
}

impl Kind {
    /// A small one.
    pub const fn new(emulator: Emulator, machine: &'static str) -> Self {
        Self {
            emulator,
            machine,
            mib: 128,
            file: "file 3 20",
        }
    }

    /// The command line of one of two machines, in the folder of the archive.
    fn words(self, name: &str, other: &str, mac: u32) -> Vec<String> {
        let mut words = linux::words(self.emulator, Path::new("archive"), self.mib);
        for (option, value) in [
            ("-object", self.emulator.memory(self.mib)),
            ("-machine", format!("{},memory-backend=mem", self.machine)),
            (
                "-drive",
                format!("file={name}.disk,format=raw,if=none,id=disk"),
            ),
            ("-device", "virtio-blk-pci,romfile=,drive=disk".to_owned()),
            (
                "-netdev",
                format!(
                    "dgram,id=net,local.type=unix,local.path={name}.net,\
                     remote.type=unix,remote.path={other}.net"
                ),
            ),
            (
                "-device",
                format!("virtio-net-pci,romfile=,netdev=net,mac=52:54:00:00:00:{mac:02x}"),
            ),
        ] {
            words.extend([option.to_owned(), value]);
        }
        words
    }
}

/// Two machines, of which the second talks to the first.
pub(super) struct Pair {
    kind: Kind,
    pub folder: tempfile::TempDir,
    /// As they were booted; none once they were saved and started again.
    booted: Vec<Linux>,
    restored: Vec<Machines>,
    lines: Vec<Line>,
    /// How far they had counted.
    counts: Vec<u64>,
}

const NAMES: [&str; 2] = ["one", "two"];

impl Pair {
    pub fn boot(kind: Kind) -> Self {
        let scratch = tempfile::tempdir().expect("a folder");
        let folder = scratch.path();
        linux::pack(&folder.join("archive")).expect("packed");
        let start = |at: usize| {
            let (name, other) = (NAMES[at], NAMES[1 - at]);
            let disk = File::create(folder.join(format!("{name}.disk"))).expect("a file");
            disk.set_len(u64::from(DISK_MIB) << 20).expect("a length");
            let words = kind.words(name, other, at as u32 + 1);
            Linux::start(folder, name, &words, &[])
        };
        let booted = [0, 1].map(start);
        let mut lines = booted.each_ref().map(|guest| Line::to(&guest.serial));
        for (line, address) in lines.iter_mut().zip(1..) {
            line.wait_for_answer();
            assert_eq!(line.ask("devices"), "found");
            assert_eq!(line.ask(&format!("address {address}")), "there");
            assert_eq!(line.ask(&format!("disk {DISK_MIB}")), "writing");
            assert_eq!(line.ask(&format!("fill {}", kind.file)), "filled");
        }
        assert_eq!(lines[1].ask("talk 1"), "talking");
        let mut pair = Self {
            kind,
            booted: booted.into(),
            restored: Vec::new(),
            lines: lines.into(),
            counts: vec![0; 2],
            folder: scratch,
        };
        pair.check();
        pair
    }

    /// Insists that they do all that they did, and that nothing of it was ever wrong.
    #[track_caller]
    pub fn check(&mut self) {
        for (line, before) in self.lines.iter_mut().zip(&mut self.counts) {
            let count = line.number("count");
            assert!(count >= *before, "{count}, and {before} before");
            *before = count;
            wait_until("it to count", SOON, || line.number("count") > count);
            assert_eq!(line.ask(&format!("check {}", self.kind.file)), "right");
            goes_on(line, "disk", 2);
        }
        goes_on(&mut self.lines[1], "talk", 20);
    }

    /// The monitor of one of them.
    pub fn monitor(&self, at: usize) -> String {
        match self.restored.get(at) {
            Some(machines) => machines.qmp(0).to_owned(),
            None => self.booted[at].qmp.to_str().expect("text").to_owned(),
        }
    }

    /// Saves one by words behind `vm save`; what was told.
    #[track_caller]
    pub fn save(&self, at: usize, words: &[&str]) -> Value {
        let socket = self.monitor(at);
        let words = [&["vm", "save", "--qmp", &socket, "--no-sync"], words].concat();
        run(self.folder.path(), &words)["vm_save"].clone()
    }

    /// Saves both, which end, and starts them again, as they were recorded. `over`: what the images
    /// of before were called, if these are to be layers.
    #[track_caller]
    pub fn cycle(&mut self, image: &str, over: Option<&str>) {
        self.save_and_restore(image, over, [&[], &[]]);
    }

    /// The same with what their disks hold, of which they get copies.
    #[track_caller]
    pub fn cycle_with_disks(&mut self, image: &str, over: Option<&str>) {
        let own = self.folder.path().join(format!("disks-{image}"));
        fs::create_dir(&own).expect("a folder");
        let own = own.to_str().expect("text");
        self.save_and_restore(image, over, [&["--with-disks"], &["--disk-dir", own]]);
    }

    /// Saves both, which end, and starts them again, by more words of each command.
    #[track_caller]
    fn save_and_restore(&mut self, image: &str, over: Option<&str>, more: [&[&str]; 2]) {
        for (at, name) in NAMES.into_iter().enumerate() {
            let to = format!("{image}-{name}");
            let parent = over.map(|over| format!("../{over}-{name}"));
            let mut words = vec!["-D", &to];
            words.extend(
                parent
                    .iter()
                    .flat_map(|parent| ["--prev-images-dir", parent]),
            );
            words.extend(more[0]);
            self.save(at, &words);
        }
        self.lines.clear();
        self.booted.clear();
        self.restored.clear();
        for name in NAMES {
            let socket = self.folder.path().join(format!("{name}.qmp"));
            wait_unheard(&socket);
            let from = format!("{image}-{name}");
            let words = [&["-D", &from, "--name", name], more[1]].concat();
            let machine = Machines::restored(self.folder.path(), &words);
            self.restored.push(machine);
        }
        let line = |name| Line::to(&self.folder.path().join(format!("{name}.serial")));
        self.lines = NAMES.map(line).into();
    }
}

/// Waits until work was done so often more, of which nothing was wrong.
#[track_caller]
pub(super) fn goes_on(line: &mut Line, what: &str, times: u64) {
    let mut done = || {
        let told = line.ask(what);
        let numbers = told.split(' ').map(|number| number.parse::<u64>());
        let numbers = numbers.collect::<Result<Vec<_>, _>>().expect("numbers");
        assert_eq!(numbers[1..], [0, 0], "{what}: wrong, and ended");
        numbers[0]
    };
    let before = done();
    wait_until(what, SOON, || done() >= before + times);
}

/// Has a pair saved live, then as layers over that, and started again.
fn is_saved_and_goes_on(kind: Kind) {
    let mut pair = Pair::boot(kind);
    for (at, name) in NAMES.into_iter().enumerate() {
        let told = pair.save(at, &["--live", "-R", "-D", &format!("live-{name}")]);
        assert!(told["stored_pages"].as_u64() > Some(20 << 8), "{told}");
        assert!(told["state_bytes"].as_u64() < Some(4 << 20), "{told}");
    }
    pair.check();
    pair.cycle("whole", Some("live"));
    pair.check();
}

/// Skips the test around it where there is no such emulator, or no right to save live.
macro_rules! needs {
    ($emulator:expr) => {
        testkit::needs_root!();
        if let Some(why) = $emulator.missing() {
            testkit::skip!("{why}");
        }
    };
}
pub(super) use needs;

#[test]
fn a_pair_of_pc_machines_goes_on() {
    needs!(Emulator::Installed);
    is_saved_and_goes_on(Kind::new(Emulator::Installed, "pc"));
}

#[test]
fn a_pair_under_the_emulator_of_backports_goes_on() {
    needs!(Emulator::Backports);
    is_saved_and_goes_on(Kind::new(Emulator::Backports, "q35"));
}

#[test]
#[ignore = "takes minutes: cargo xtask machines"]
fn a_pair_of_any_kind_goes_on() {
    for emulator in [Emulator::Installed, Emulator::Backports] {
        needs!(emulator);
        for machine in ["q35", "pc"] {
            eprintln!("{emulator:?}, {machine}");
            is_saved_and_goes_on(Kind::new(emulator, machine));
        }
    }
}
