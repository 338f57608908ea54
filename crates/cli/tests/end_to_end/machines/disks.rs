//! `vm save --with-disks`: what disks hold is in the image, and each machine has its own again.
//!
//! Most of it needs no guest: QEMU's own `qemu-io` writes to disks as a guest does, and looks.

use super::kinds::{Kind, Pair, needs};
use super::*;

/// A machine without a guest, whose first disk is `one`, and the second `two`.
pub(super) struct Idle {
    folder: PathBuf,
    qemu: Child,
    qmp: String,
}

impl Drop for Idle {
    fn drop(&mut self) {
        self.kill();
    }
}

const FIXED: [&str; 13] = [
    "-accel",
    "tcg",
    "-nodefaults",
    "-display",
    "none",
    "-m",
    "64",
    "-machine",
    "q35,memory-backend=mem",
    "-device",
    "virtio-blk-pci,romfile=,drive=one",
    "-device",
    "virtio-blk-pci,romfile=,drive=two",
];

/// Its command line, with two disks by their files.
pub(super) fn idle_words(one: &str, two: &str) -> Vec<String> {
    let mut words = Emulator::of_tests().program();
    words.extend(FIXED.map(str::to_owned));
    let node = format!("driver=file,filename={two},node-name=file");
    for (option, value) in [
        ("-object", Emulator::of_tests().memory(64)),
        ("-drive", format!("file={one},format=raw,if=none,id=one")),
        ("-blockdev", node),
        ("-blockdev", "driver=raw,file=file,node-name=two".to_owned()),
    ] {
        words.extend([option.to_owned(), value]);
    }
    words
}

impl Idle {
    /// Starts it; disks that are not there yet have 20 MiB.
    pub fn start(folder: &Path, more: &[&str]) -> Self {
        Self::start_with(folder, &[], more)
    }

    /// The same by another program, whose words come before its own.
    pub fn start_by(folder: &Path, by: &[String]) -> Self {
        Self::start_with(folder, by, &[])
    }

    fn start_with(folder: &Path, by: &[String], more: &[&str]) -> Self {
        for path in ["one", "two"].map(|name| folder.join(name)) {
            if !path.exists() {
                let file = File::create(path).expect("a file");
                file.set_len(20 << 20).expect("a length");
                let all = std::os::unix::fs::PermissionsExt::from_mode(0o666);
                file.set_permissions(all).expect("it is ours");
            }
        }
        let qmp = folder.join("idle.qmp").to_str().expect("text").to_owned();
        let words = [by, &idle_words("one", "two")].concat();
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).args(more).current_dir(folder);
        command.args(["-qmp", &format!("unix:{qmp},server=on,wait=off")]);
        let qemu = command.stdout(Stdio::null()).spawn().expect("it starts");
        let folder = folder.to_owned();
        let idle = Self { folder, qemu, qmp };
        wait_until("QEMU to listen", SOON, || {
            UnixStream::connect(&idle.qmp).is_ok()
        });
        idle
    }

    pub fn socket(&self) -> &str {
        &self.qmp
    }

    pub fn pid(&self) -> i32 {
        self.qemu.id().cast_signed()
    }

    /// Kills QEMU.
    pub fn kill(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
    }

    fn save(&self, image: &str, more: &[&str]) -> Value {
        let words = [
            "vm",
            "save",
            "--with-disks",
            "--qmp",
            self.socket(),
            "-D",
            image,
        ];
        run(&self.folder, &[&words, more].concat())["vm_save"].clone()
    }

    /// What a save is refused with.
    fn refused(&self) -> String {
        let words = ["vm", "save", "-R", "--with-disks", "--qmp", self.socket()];
        fail(&self.folder, &[&words[..], &["-D", "refused"]].concat(), 3)
    }
}

/// Has QEMU write a byte over and over to the disk behind the device with this number.
#[track_caller]
pub(super) fn write(socket: &str, number: usize, (byte, place): (u8, &str)) {
    let device = format!("/machine/peripheral-anon/device[{number}]/virtio-backend");
    let line = format!("qemu-io -d {device} \"write -P {byte} {place}\"");
    let told = qmp_with(
        socket,
        "human-monitor-command",
        json!({"command-line": line}),
    );
    assert_eq!(told, "", "{line}");
}

/// What a disk holds, by a copy that QEMU makes of it.
#[track_caller]
pub(super) fn contents(folder: &Path, socket: &str, number: usize) -> Vec<u8> {
    let drives = qmp(socket, "query-block");
    let copy = folder.join("copy");
    let with = json!({
        "job-id": "copy",
        "device": drives[number]["inserted"]["node-name"],
        "target": copy.to_str().expect("text"),
        "format": "raw",
        "sync": "full",
    });
    qmp_with(socket, "drive-backup", with);
    wait_until("the copy", SOON, || {
        qmp(socket, "query-jobs")
            .as_array()
            .is_some_and(Vec::is_empty)
    });
    let bytes = fs::read(&copy).expect("it is there");
    fs::remove_file(&copy).expect("it is there");
    bytes
}

const MIB: usize = 1 << 20;

/// Insists that a disk holds parts of these bytes and ends, one after the other, and zeros.
#[track_caller]
fn holds(folder: &Path, socket: &str, number: usize, parts: &[(u8, usize)]) {
    let mut expected = Vec::new();
    for (byte, end) in parts {
        expected.resize(*end, *byte);
    }
    expected.resize(20 * MIB, 0);
    let bytes = contents(folder, socket, number);
    let differs = bytes
        .iter()
        .zip(&expected)
        .position(|(is, should)| is != should);
    assert_eq!(
        (bytes.len(), differs),
        (20 * MIB, None),
        "{socket}, disk {number}"
    );
}

/// Restores machines of an image, with their own disks; their monitors.
fn with_disks(folder: &Path, image: &str, name: &str, more: &[&str]) -> Machines {
    let words = ["-D", image, "--disk-dir", "own", "--name", name];
    Machines::restored(folder, &[&words, more].concat())
}

#[test]
fn disks_are_in_the_image_as_they_were() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    fs::create_dir(folder.join("own")).expect("a folder");
    let idle = Idle::start(folder, &[]);
    write(idle.socket(), 0, (1, "0 3M"));
    write(idle.socket(), 1, (2, "5M 64k"));
    let told = idle.save("first", &["-R"]);
    assert_eq!(told["disk_bytes"], (3 << 20) + (64 << 10), "{told}");
    // Both go on: whether in their files or in overlays, the image has what they had.
    write(idle.socket(), 0, (9, "1M 4M"));
    holds(folder, idle.socket(), 0, &[(1, MIB), (9, 5 * MIB)]);
    let over = ["-R", "--live", "--prev-images-dir", "../first"];
    let told = idle.save("second", &over);
    assert!(told["disk_bytes"].as_u64() < Some(6 << 20), "{told}");
    write(idle.socket(), 0, (8, "0 1M"));
    write(idle.socket(), 1, (7, "0 64k"));
    idle.save("third", &["--prev-images-dir", "../second"]);

    let two = with_disks(folder, "first", "c-{n}", &["-n", "2"]);
    write(two.qmp(0), 0, (5, "0 1M"));
    holds(folder, two.qmp(0), 0, &[(5, MIB), (1, 3 * MIB)]);
    holds(folder, two.qmp(1), 0, &[(1, 3 * MIB)]);
    let at = 5 * MIB;
    holds(folder, two.qmp(1), 1, &[(0, at), (2, at + (64 << 10))]);
    drop(two);
    // A machine that was restored is saved with its disks, and what they are over.
    let second = with_disks(folder, "second", "second", &[]);
    holds(folder, second.qmp(0), 0, &[(1, MIB), (9, 5 * MIB)]);
    write(second.qmp(0), 0, (6, "5M 1M"));
    let save = [
        "vm",
        "save",
        "--with-disks",
        "--qmp",
        second.qmp(0),
        "-D",
        "clone",
    ];
    run(folder, &save);
    for (image, parts) in [
        ("third", [(8, MIB), (9, 5 * MIB), (0, 6 * MIB)]),
        ("clone", [(1, MIB), (9, 5 * MIB), (6, 6 * MIB)]),
    ] {
        let machine = with_disks(folder, image, image, &[]);
        holds(folder, machine.qmp(0), 0, &parts);
    }
    // What a machine of this name has written is not written over.
    let words = [
        "vm",
        "restore",
        "-D",
        "third",
        "--disk-dir",
        "own",
        "--name",
    ];
    let told = fail(folder, &[&words[..], &["third"]].concat(), 3);
    assert!(told.contains("not written over"), "{told}");
    // By a command line of the caller's.
    let line = idle_words("{disk1}", "{disk2}").join(" ");
    let line = line.replace("=raw", "=qcow2");
    let line = line.split(' ').collect::<Vec<_>>();
    let given = with_disks(folder, "third", "given", &[&["--"], &line[..]].concat());
    holds(
        folder,
        given.qmp(0),
        1,
        &[(7, 64 << 10), (0, at), (2, at + (64 << 10))],
    );
}

#[test]
fn machines_that_wait_have_disks_of_their_own() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    fs::create_dir(folder.join("own")).expect("a folder");
    let idle = Idle::start(folder, &[]);
    write(idle.socket(), 0, (1, "0 3M"));
    let told = idle.save("image", &[]);
    let id = told["image"].as_str().expect("text");
    let line = idle_words("{disk1}", "{disk2}").join(" ");
    let line = line.replace("=raw", "=qcow2");
    let line = [&["--"], &line.split(' ').collect::<Vec<_>>()[..]].concat();
    let fill = ["-n", "0", "--pool", "2", "--keep", "1000"];
    let none = with_disks(folder, "image", "waits-{n}", &[&fill[..], &line].concat());
    assert_eq!(none.0.len(), 0);
    let overlays = || {
        let own = fs::read_dir(folder.join("own")).expect("there").flatten();
        let names = own.map(|entry| entry.file_name().to_string_lossy().into_owned());
        let mut names = names
            .filter(|name| name.contains("waits"))
            .collect::<Vec<_>>();
        names.sort_unstable();
        names
    };
    let of = |number| [1, 2].map(|disk| format!("waits-{number}-{disk}.qcow2"));
    assert_eq!(overlays(), [of(1), of(2)].concat());
    let take = [&["--pool", "1"], &line[..]].concat();
    let taken = with_disks(folder, "image", "waits-{n}", &take);
    assert_eq!(taken.0[0]["name"], "waits-1");
    write(taken.qmp(0), 0, (5, "0 1M"));
    holds(folder, taken.qmp(0), 0, &[(5, MIB), (1, 3 * MIB)]);
    // Those that nobody took end with the template, and so do their disks and sockets.
    run(folder, &["vm", "templates", "--drop", id]);
    wait_until("disks to be gone", SOON, || overlays() == of(1));
    wait_until("a socket to be gone", SOON, || {
        !folder.join("waits-2.qmp").exists()
    });
    holds(folder, taken.qmp(0), 0, &[(5, MIB), (1, 3 * MIB)]);
}

#[test]
fn who_is_killed_leaves_no_disk_of_a_machine() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    fs::create_dir(folder.join("own")).expect("a folder");
    let idle = Idle::start(folder, &[]);
    write(idle.socket(), 0, (1, "0 3M"));
    idle.save("image", &[]);
    let words = [
        "vm",
        "restore",
        "-D",
        "image",
        "--disk-dir",
        "own",
        "--name",
    ];
    let words = [&words[..], &["shot-disks"]].concat();
    let begun = Instant::now();
    drop(with_disks(folder, "image", "first", &[]));
    let whole = begun.elapsed();
    for at in 0..12 {
        let mut command = stillframe(folder, &words);
        let mut child = command.stdout(Stdio::null()).spawn().expect("it starts");
        std::thread::sleep(whole * at / 12);
        let _ = child.kill();
        child.wait().expect("it ends");
        let socket = folder.join("shot-disks.qmp");
        let own = folder.join("own/shot-disks-1.qcow2");
        // One whose guest runs was whole, and has its disk.
        wait_until("the machine to be gone or whole", SOON, || {
            let is_gone = pids_of("shot-disks").is_empty();
            (is_gone && !own.exists() && !socket.exists()) || (!is_gone && is_running(&socket))
        });
        for pid in pids_of("shot-disks") {
            kill(pid);
        }
        wait_until("its end", SOON, || pids_of("shot-disks").is_empty());
        // What a whole machine leaves that is killed itself.
        let _ = fs::remove_file(&socket);
        for disk in 1..3 {
            let _ = fs::remove_file(folder.join(format!("own/shot-disks-{disk}.qcow2")));
        }
    }
}

#[test]
fn disks_that_cannot_be_saved_or_had_are_refused() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    fs::create_dir(folder.join("own")).expect("a folder");
    for (drive, why) in [
        ("driver=null-co,size=1M", "only raw and qcow2 are saved"),
        (
            "driver=raw,file.driver=null-co,file.size=1M",
            "is more than a file",
        ),
        (
            "driver=raw,offset=512,file.filename=one,file.locking=off",
            "is more than a file",
        ),
    ] {
        let drive = format!("{drive},if=none,id=more,read-only=on");
        let told = Idle::start(folder, &["-drive", &drive]).refused();
        assert!(
            told.contains("the disk more:") && told.contains(why),
            "{told}"
        );
    }
    let idle = Idle::start(folder, &[]);
    write(idle.socket(), 0, (3, "0 1M"));
    // Another file of the same name.
    fs::rename(folder.join("one"), folder.join("gone")).expect("renamed");
    fs::write(folder.join("one"), "x").expect("written");
    let told = idle.refused();
    assert!(told.contains("not the file that QEMU has open"), "{told}");
    fs::rename(folder.join("gone"), folder.join("one")).expect("renamed");
    idle.save("image", &[]);
    let restore = ["vm", "restore", "-D", "image"];
    let told = fail(folder, &restore, 3);
    assert!(told.contains("--disk-dir"), "{told}");

    // A bit of the disk is not what it was: no machine, and no disk.
    let own = ["--disk-dir", "own"];
    let pages = fs::read_dir(folder.join("image")).expect("there").flatten();
    let pages = pages.map(|entry| entry.path());
    let mut pages = pages.filter(|path| path.to_string_lossy().contains("/pages-"));
    let path = pages.next().expect("it has pages");
    let bytes = fs::read(&path).expect("read");
    let at = bytes
        .windows(4096)
        .position(|page| page.iter().all(|byte| *byte == 3));
    let at = at.expect("the disk's");
    let mut damaged = bytes.clone();
    damaged[at] ^= 1;
    fs::write(&path, damaged).expect("written");
    let told = fail(folder, &[&restore[..], &own].concat(), 5);
    assert!(told.contains("checksum"), "{told}");
    assert_eq!(fs::read_dir(folder.join("own")).expect("there").count(), 0);
    fs::write(&path, bytes).expect("written");
    drop(with_disks(folder, "image", "fine", &[]));
    // What machines are over was written to.
    let base = fs::read_dir(folder.join("own")).expect("there").flatten();
    let mut base = base.filter(|entry| entry.path().extension().is_some_and(|it| it == "raw"));
    let base = base.next().expect("there").path();
    let file = File::options().write(true).open(&base).expect("there");
    file.write_all_at(b"x", 0).expect("written");
    let told = fail(folder, &[&restore[..], &own, &["--name", "x"]].concat(), 3);
    assert!(told.contains("was written to since it was made"), "{told}");
}

#[test]
fn a_disk_that_goes_on_in_an_overlay_is_not_taken_for_the_former() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    let idle = Idle::start(folder, &[]);
    write(idle.socket(), 0, (1, "0 1M"));
    let overlay = folder.join("over.qcow2");
    let with = json!({
        "device": "one",
        "snapshot-file": overlay.to_str().expect("text"),
        "format": "qcow2",
    });
    qmp_with(idle.socket(), "blockdev-snapshot-sync", with);
    write(idle.socket(), 0, (2, "0 1M"));
    run(
        folder,
        &["vm", "save", "--qmp", idle.socket(), "-D", "image"],
    );
    let told = fail(
        folder,
        &["vm", "restore", "-D", "image", "--name", "over"],
        3,
    );
    assert!(told.contains("over.qcow2, which the recorded"), "{told}");
    let line = idle_words("over.qcow2", "two").join(" ");
    let line = line.replacen("format=raw", "format=qcow2", 1);
    let words = ["-D", "image", "--name", "over", "--"].into_iter();
    let words = words.chain(line.split(' ')).collect::<Vec<_>>();
    let machine = Machines::restored(folder, &words);
    holds(folder, machine.qmp(0), 0, &[(2, MIB)]);

    // What it is over is known as well, and must be as it was.
    let socket = machine.qmp(0);
    run(folder, &["vm", "save", "--qmp", socket, "-D", "again"]);
    let base = File::options().write(true).open(folder.join("one"));
    base.expect("there").write_all_at(b"x", 0).expect("written");
    let again = ["vm", "restore", "-D", "again", "--name", "again"];
    let told = fail(folder, &again, 3);
    let what = "/one) was written to since the machine was saved";
    assert!(told.contains(what), "{told}");
}

#[test]
#[ignore = "takes minutes: cargo xtask machines"]
fn guests_go_on_with_their_disks() {
    let emulator = Emulator::of_tests();
    needs!(emulator);
    let mut pair = Pair::boot(Kind::new(emulator, "q35"));
    pair.save(0, &["--with-disks", "--live", "-R", "-D", "live-one"]);
    pair.save(1, &["--with-disks", "-R", "-D", "live-two"]);
    pair.check();
    pair.cycle_with_disks("whole", Some("live"));
    pair.check();
    pair.cycle_with_disks("again", None);
    pair.check();
    // Whoever is killed leaves disks that are right, whether their guest goes on in an overlay.
    let socket = pair.monitor(0);
    let save = [
        "vm",
        "save",
        "--with-disks",
        "-R",
        "--qmp",
        &socket,
        "-D",
        "shot",
    ];
    let begun = Instant::now();
    run(pair.folder.path(), &save);
    let whole = begun.elapsed();
    for at in 0..20 {
        let mut child = stillframe(pair.folder.path(), &save)
            .stdout(Stdio::null())
            .spawn()
            .expect("it starts");
        std::thread::sleep(whole * at / 20);
        let _ = child.kill();
        child.wait().expect("it ends");
        pair.check();
    }
    pair.cycle_with_disks("last", None);
    pair.check();
}

#[test]
fn a_full_disk_ends_neither_guest_nor_image() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    let small = Small::mounted(&folder.join("small"));
    let idle = Idle::start(folder, &[]);
    write(idle.socket(), 0, (1, "0 8M"));
    // The image has room for what there is of memory, and not for the disk.
    let save = [
        "vm",
        "save",
        "-R",
        "--with-disks",
        "--qmp",
        idle.socket(),
        "-D",
    ];
    let told = fail(folder, &[&save[..], &["small/image"]].concat(), 6);
    assert!(told.contains("No space left"), "{told}");
    assert_eq!(qmp(idle.socket(), "query-status")["status"], "running");
    holds(folder, idle.socket(), 0, &[(1, 8 * MIB)]);
    idle.save("image", &[]);
    let words = [
        "vm",
        "restore",
        "-D",
        "image",
        "--disk-dir",
        "small",
        "--name",
        "full",
    ];
    let told = fail(folder, &words, 6);
    assert!(told.contains("No space left"), "{told}");
    assert_eq!(pids_of("full"), [] as [i32; 0]);
    let left = fs::read_dir(&small.0).expect("there").flatten();
    let left = left.filter(|entry| entry.path().extension().is_some());
    assert_eq!(left.count(), 0, "a disk that is not whole has no name");
}

/// A folder of 4 MiB; dropped, it is unmounted.
pub(super) struct Small(pub PathBuf);

impl Small {
    pub fn mounted(path: &Path) -> Self {
        fs::create_dir(path).expect("a folder");
        let flags = rustix::mount::MountFlags::empty();
        let mounted = rustix::mount::mount("tmpfs", path, "tmpfs", flags, c"size=4m");
        mounted.expect("mounted");
        Self(path.to_owned())
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}
