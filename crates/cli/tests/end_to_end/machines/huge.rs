//! Guests whose memory is in huge pages of hugetlbfs: saved in each way, and started again.

use std::os::unix::fs::MetadataExt as _;

use testkit::huge_pages::HugePages;

use super::kinds::needs;
use super::*;

/// MiB of the guest's memory, and as many pages as it has.
const GUEST_MIB: u32 = 128;
const PAGES: u64 = GUEST_MIB as u64 / 2;

/// What it has in a file in its memory.
const KEPT: &str = "kept 9 20";

/// A folder with huge pages; dropped, it is unmounted.
struct Huge(PathBuf);

impl Huge {
    fn mounted(path: &Path) -> Option<Self> {
        fs::create_dir(path).expect("a folder");
        let flags = rustix::mount::MountFlags::empty();
        let mounted = rustix::mount::mount("huge", path, "hugetlbfs", flags, c"pagesize=2M");
        mounted.ok().map(|()| Self(path.to_owned()))
    }
}

impl Drop for Huge {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

/// The words of a machine with its memory in an object.
fn words(emulator: Emulator, object: &str) -> Vec<String> {
    let mut words = linux::words(emulator, Path::new("archive"), GUEST_MIB);
    for word in ["-object", object, "-machine", "q35,memory-backend=mem"] {
        words.push(word.to_owned());
    }
    words
}

/// How much of a guest's memory there is, in blocks, where that is huge pages.
fn huge_blocks(pid: u32) -> Option<u64> {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).expect("it runs");
    let facts = files
        .flatten()
        .filter_map(|file| fs::metadata(file.path()).ok());
    let huge = facts.filter(|facts| facts.is_file() && facts.blksize() == 2 << 20);
    // A restored machine has inherited one descriptor of the file, and opened another.
    huge.map(|facts| facts.blocks()).max()
}

fn blocks(pid: u32) -> u64 {
    huge_blocks(pid).expect("it has a file of huge pages")
}

/// Insists that a guest has what was saved, and goes on.
#[track_caller]
fn goes_on(line: &mut Line, noted: &str) {
    assert_eq!(line.ask("recall"), noted);
    assert_eq!(line.ask(&format!("check {KEPT}")), "right");
    let count = line.number("count");
    wait_until("it to count", SOON, || line.number("count") > count);
}

/// Saves a guest with such memory in each way, and has each image go on in each way.
fn is_saved_and_goes_on(folder: &Path, words: &[String]) {
    linux::pack(&folder.join("archive")).expect("packed");
    let mut guest = Linux::boot(folder, "huge", words, &[]);
    let mut line = Line::to(&guest.serial);
    assert_eq!(line.ask(&format!("fill {KEPT}")), "filled");
    let save = |kind: &str, image: &str, more: &[&str]| {
        let words = ["vm", kind, "--no-sync", "--qmp", "huge.qmp", "-D", image];
        run(folder, &[&words, more].concat())
    };
    assert_eq!(line.ask("note stopped"), "noted");
    let monitor = guest.qmp.to_str().expect("text").to_owned();
    qmp(&monitor, "stop");
    let before = blocks(guest.pid());
    save("save", "stopped", &["-R"]);
    assert_eq!(blocks(guest.pid()), before, "no page is made by reading");
    qmp(&monitor, "cont");
    assert_eq!(line.ask("note live"), "noted");
    save("save", "live", &["-R", "--live"]);
    goes_on(&mut line, "live");
    save("pre-save", "r1", &[]);
    assert_eq!(line.ask("note tracked"), "noted");
    save("pre-save", "r2", &["--prev-images-dir", "../r1"]);
    save("save", "tracked", &["-R", "--prev-images-dir", "../r2"]);
    goes_on(&mut line, "tracked");
    assert_eq!(line.ask("note over"), "noted");
    let told = save("save", "over", &["--prev-images-dir", "../stopped"]);
    let stored = told["vm_save"]["stored_pages"].as_u64();
    assert!(
        stored < Some(u64::from(GUEST_MIB) << 7),
        "it is a layer: {told}"
    );
    wait_until("QEMU's end", SOON, || guest.has_ended());
    drop((line, guest));
    let serial = folder.join("huge.serial");
    for (image, way) in [
        ("stopped", "--eager"),
        ("live", "--lazy"),
        ("tracked", "--share"),
        ("over", "--eager"),
    ] {
        let machine = Machines::restored(folder, &["-D", image, way, "--name", "huge"]);
        goes_on(&mut Line::to(&serial), image);
        // What is shared has ordinary pages.
        let is_huge = huge_blocks(machine.pid(0).cast_unsigned()).is_some();
        assert_eq!(is_huge, way != "--share", "{way}");
        drop(machine);
        // The next one listens where it did. The kernel closes one socket after the other.
        wait_unheard(&serial);
        wait_unheard(&folder.join("huge.qmp"));
    }
}

#[test]
fn a_guest_in_a_memfd_of_huge_pages_goes_on() {
    needs!(Emulator::Installed);
    let Ok(_pages) = HugePages::reserve(PAGES + 2) else {
        testkit::skip!("huge pages cannot be reserved");
    };
    let scratch = tempfile::tempdir().expect("a folder");
    let memory = format!("memory-backend-memfd,id=mem,size={GUEST_MIB}M,share=on");
    let huge = format!("{memory},hugetlb=on,hugetlbsize=2M");
    is_saved_and_goes_on(scratch.path(), &words(Emulator::Installed, &huge));
}

#[test]
fn a_guest_in_a_file_of_hugetlbfs_goes_on_under_the_emulator_of_backports() {
    needs!(Emulator::Backports);
    let Ok(_pages) = HugePages::reserve(PAGES + 2) else {
        testkit::skip!("huge pages cannot be reserved");
    };
    let scratch = tempfile::tempdir().expect("a folder");
    let Some(_huge) = Huge::mounted(&scratch.path().join("pages")) else {
        testkit::skip!("hugetlbfs cannot be mounted");
    };
    let memory = format!("memory-backend-file,id=mem,size={GUEST_MIB}M,share=on,mem-path=pages");
    is_saved_and_goes_on(scratch.path(), &words(Emulator::Backports, &memory));
}
