//! Machines whose guest the processor runs itself (KVM): one without an operating system, which
//! writes to its memory all the time, in ring 3.

use super::live::{number, saved};
use super::*;

/// MiB of the machine.
const MIB: u32 = 32;

/// The file with what a guest says: how often it has written all of its memory, and how many words
/// it found wrong.
struct Counter(PathBuf);

impl Counter {
    /// How often it has, as far as it was said, of which nothing was wrong.
    #[track_caller]
    fn passes(&self) -> u64 {
        let said = fs::read_to_string(&self.0).unwrap_or_default();
        let (whole, _) = said.rsplit_once('\n').unwrap_or_default();
        let number = |digits| u64::from_str_radix(digits, 16).expect("a number");
        // The first line of a machine that was saved while it said it is a part of one.
        let lines = whole.lines().skip(1);
        let lines = lines.map(|line| line.split_once(' ').expect("two numbers"));
        let (passes, wrong): (Vec<_>, Vec<_>) = lines
            .map(|(pass, wrong)| (number(pass), number(wrong)))
            .unzip();
        assert!(wrong.iter().all(|wrong| *wrong == 0), "{said}");
        assert!(passes.windows(2).all(|two| two[0] + 1 == two[1]), "{said}");
        passes.last().copied().unwrap_or(0)
    }

    /// Waits until it has some times more; gives how often it has in all.
    #[track_caller]
    fn goes_on(&self) -> u64 {
        let mut before = 0;
        wait_until("a pass", SOON, || {
            before = self.passes();
            before > 0
        });
        wait_until("20 passes", SOON, || self.passes() >= before + 20);
        self.passes()
    }
}

/// Saves a machine in each way, and starts all of it again.
fn is_saved_and_goes_on(emulator: Emulator, machine: &str) {
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    fs::write(folder.join("rom"), testkit::calls::rom::counting()).expect("written");
    let mut words = emulator.program();
    let (memory, mib) = (emulator.memory(MIB), MIB.to_string());
    let kind = format!("{machine},memory-backend=mem");
    let line = "-accel kvm -cpu qemu64 -nodefaults -no-user-config -display none -bios rom -serial \
                file:passes -m";
    words.extend(line.split(' ').map(str::to_owned));
    words.extend([&mib, "-object", &memory, "-machine", &kind].map(str::to_owned));
    let mut guest = Linux::start(folder, "native", &words, &[]);
    let counter = Counter(folder.join("passes"));
    let mut passes = vec![counter.goes_on()];
    let socket = guest.qmp.to_str().expect("text").to_owned();
    let over = |parent| ["--prev-images-dir", parent];
    let saves: [(&str, &[&str], &[&str]); 5] = [
        ("stopped", &["save", "-R"], &[]),
        ("live", &["save", "-R", "--live"], &over("../stopped")),
        ("round", &["pre-save"], &over("../live")),
        ("after", &["save", "-R"], &over("../round")),
        ("last", &["save"], &[]),
    ];
    for (image, save, over) in saves {
        let told = saved(folder, &socket, &[save, &["-D", image], over].concat());
        assert_eq!(number(&told, "pages"), u64::from(MIB) << 8, "{told}");
        let before = *passes.last().expect("there is one");
        passes.push(match image {
            "last" => before,
            _ => counter.goes_on(),
        });
        assert!(
            *passes.last().expect("there is one") >= before,
            "{passes:?}"
        );
    }
    wait_until("QEMU's end", SOON, || guest.has_ended());
    for ((image, ..), before) in saves.iter().zip(&passes) {
        if *image == "round" {
            continue;
        }
        let machine = Machines::restored(folder, &["-D", image, "--name", image]);
        let now = counter.goes_on();
        assert!(now >= *before, "{image}: {now}, and {before} before");
        drop(machine);
        wait_unheard(&folder.join("native.serial"));
    }
}

#[test]
fn guests_of_the_processor_go_on() {
    testkit::needs_root!();
    if !Path::new("/dev/kvm").exists() {
        testkit::skip!("no /dev/kvm");
    }
    for (emulator, machine) in [
        (Emulator::Installed, "q35"),
        (Emulator::Installed, "pc"),
        (Emulator::Installed, "microvm"),
        (Emulator::Backports, "q35"),
        (Emulator::Backports, "microvm"),
    ] {
        if let Some(why) = emulator.missing() {
            testkit::skip!("{why}");
        }
        eprintln!("{emulator:?}, {machine}");
        is_saved_and_goes_on(emulator, machine);
    }
}
