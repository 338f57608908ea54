//! `vm save` and `vm restore`: a Linux guest under QEMU becomes an image, and one machine or many
//! again.

mod balloon;
mod behind;
mod changed;
mod disk_copies;
mod disks;
mod faults;
mod huge;
mod kinds;
mod lazy;
mod live;
mod long;
mod native;
mod pool;
mod proxy;
mod restore_faults;
mod shared_kills;
mod with_volume;

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testkit::machine::linux::{self, Emulator, Line, Linux};
use testkit::wait::{SOON, wait_for, wait_until};
use vm::qemu::Qmp;

/// MiB of the guest's memory.
const MIB: u32 = 256;

/// What the guest has in a file in its memory: a seed, and MiB.
const FILE: &str = "file 7 30";

/// A booted machine's image, which every test starts from, and where it is.
struct Base {
    folder: PathBuf,
    /// How far it had counted.
    count: u64,
    /// The image's id.
    id: String,
}

/// Boots the machine, once for all tests.
fn base() -> &'static Base {
    static BASE: OnceLock<Base> = OnceLock::new();
    BASE.get_or_init(|| {
        // It stays until the next run: nobody knows which test is the last one.
        let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("machines");
        let _ = fs::remove_dir_all(&folder);
        fs::create_dir_all(&folder).expect("a folder");
        let archive = folder.join("archive");
        linux::pack(&archive).expect("packed");
        let mut guest = Linux::boot(&folder, "base", &words(&archive), &[]);
        let mut line = Line::to(&guest.serial);
        assert_eq!(line.ask(&format!("fill {FILE}")), "filled");
        assert_eq!(line.ask("note of the base"), "noted");
        let count = line.number("count");
        drop(line);
        let told = run(&folder, &["vm", "save", "--qmp", "base.qmp", "-D", "image"]);
        assert_eq!(told["vm_save"]["pid"], u64::from(guest.pid()));
        wait_until("QEMU's end", SOON, || guest.has_ended());
        let id = told["vm_save"]["image"].as_str().expect("text").to_owned();
        Base { folder, count, id }
    })
}

/// The command line of the machine, with memory that can be saved.
fn words(archive: &Path) -> Vec<String> {
    let emulator = Emulator::of_tests();
    let mut words = linux::words(emulator, archive, MIB);
    let machine = "q35,memory-backend=mem".to_owned();
    let memory = emulator.memory(MIB);
    words.extend(["-object".to_owned(), memory, "-machine".to_owned(), machine]);
    words
}

fn stillframe(folder: &Path, words: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_stillframe"));
    command.args(words).current_dir(folder);
    command
}

/// Runs a command that succeeds; what it says as JSON.
#[track_caller]
fn run(folder: &Path, words: &[&str]) -> Value {
    let (options, line) = match words.iter().position(|word| *word == "--") {
        Some(at) => words.split_at(at),
        None => (words, &[][..]),
    };
    let words = [options, &["--json"], line].concat();
    let output = stillframe(folder, &words).output().expect("it starts");
    let told = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words:?}: {told}");
    serde_json::from_slice(&output.stdout).expect("JSON")
}

/// Runs one that fails with `status`; what it says on stderr.
#[track_caller]
fn fail(folder: &Path, words: &[&str], status: i32) -> String {
    let output = stillframe(folder, words).output().expect("it starts");
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(status), "{words:?}: {told}");
    told
}

/// Machines that were started again; dropped, they are killed.
struct Machines(Vec<Value>);

impl Machines {
    /// Starts some of an image, by words behind `vm restore`.
    #[track_caller]
    fn restored(folder: &Path, words: &[&str]) -> Self {
        let told = run(folder, &[&["vm", "restore"], words].concat());
        let machines = told["vm_restore"]["machines"].as_array();
        Self(machines.expect("a list").clone())
    }

    fn pid(&self, at: usize) -> i32 {
        self.0[at]["pid"].as_u64().expect("a number") as i32
    }

    fn qmp(&self, at: usize) -> &str {
        self.0[at]["qmp"].as_str().expect("a path")
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        for at in 0..self.0.len() {
            kill(self.pid(at));
        }
    }
}

fn kill(pid: i32) {
    let pid = rustix::process::Pid::from_raw(pid).expect("a pid");
    let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
}

/// Starts one machine of an image in `folder` as it was recorded.
#[track_caller]
fn restored(folder: &Path, image: &Path, name: &str) -> (Machines, Line) {
    let archive = base().folder.join("archive");
    let serial = folder.join(format!("{name}.serial"));
    let line = format!("unix:{},server=on,wait=off", serial.display());
    let words = words(&archive).into_iter();
    let words = words
        .chain(["-serial".to_owned(), line])
        .collect::<Vec<_>>();
    let words = words.iter().map(String::as_str).collect::<Vec<_>>();
    let image = image.to_str().expect("text");
    let options = [
        "-D",
        image,
        "-o",
        "/dev/null",
        "--eager",
        "--name",
        name,
        "--",
    ];
    let machines = Machines::restored(folder, &[&options[..], &words].concat());
    (machines, Line::to(&serial))
}

/// Asks a monitor one thing.
fn qmp(socket: &str, command: &'static str) -> Value {
    qmp_with(socket, command, json!({}))
}

/// The same with arguments.
fn qmp_with(socket: &str, command: &'static str, with: Value) -> Value {
    let (mut monitor, _) = Qmp::reach(Path::new(socket), SOON, SOON).expect("it is a monitor");
    monitor.call(command, with).expect("it answers")
}

#[test]
fn a_linux_guest_goes_on_from_its_image() {
    testkit::needs_linux!();
    let base = base();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    // Of the recorded command line, in the folder of the base.
    let image = ["-D", "image", "--qmp-dir", folder.to_str().expect("text")];
    let first = Machines::restored(&base.folder, &image);
    let mut line = Line::to(&base.folder.join("base.serial"));
    let count = line.number("count");
    assert!(count >= base.count, "{count}, and {} before", base.count);
    wait_until("it to count", SOON, || line.number("count") > count);
    assert_eq!(line.ask(&format!("check {FILE}")), "right");
    assert_eq!(line.ask("recall"), "of the base");
    assert_eq!(qmp(first.qmp(0), "query-status")["status"], "running");

    // A second one would take its serial line from it.
    let second = [
        "vm",
        "restore",
        "-D",
        "image",
        "-o",
        "/dev/null",
        "--name",
        "second",
    ];
    let told = fail(&base.folder, &second, 3);
    assert!(told.contains("somebody listens at"), "{told}");

    // It is saved while it goes on, twice, and has noticed nothing.
    assert_eq!(line.ask("note one"), "noted");
    let save = |to: &str, over: &str, more: &[&str]| {
        let to = folder.join(to);
        let to = to.to_str().expect("text");
        let words = [
            "vm",
            "save",
            "--qmp",
            first.qmp(0),
            "-D",
            to,
            "--prev-images-dir",
            over,
        ];
        run(&base.folder, &[&words, more].concat())["vm_save"].clone()
    };
    let over = base.folder.join("image");
    let told = save("one", over.to_str().expect("text"), &["-R"]);
    assert_eq!(told["pid"].as_u64(), Some(first.pid(0) as u64));
    let pages = |name: &str| told[name].as_u64().expect("a number");
    assert_eq!(pages("pages"), u64::from(MIB) << 8);
    assert!(pages("stored_pages") < 8000, "it is a layer: {told}");
    assert!(pages("parent_pages") > 30 << 8, "it is a layer: {told}");
    assert!(pages("state_bytes") < 4 << 20, "{told}");
    let at_save = line.number("count");
    wait_until("it to count", SOON, || line.number("count") > at_save);
    assert_eq!(line.ask(&format!("check {FILE}")), "right");
    assert_eq!(line.ask("note two"), "noted");
    assert_eq!(line.ask("remove file"), "removed");
    save("two", "../one", &[]);
    wait_until("QEMU's end", SOON, || {
        !testkit::tree::is_alive(first.pid(0) as u32)
    });

    // Each generation is what it was.
    for (name, noted, has) in [("two", "two", false), ("one", "one", true)] {
        let (machine, mut line) = restored(folder, &folder.join(name), name);
        assert_eq!(line.ask("recall"), noted);
        let checked = line.ask(&format!("check {FILE}"));
        assert_eq!(checked == "right", has, "{checked}");
        assert!(line.number("count") >= count);
        drop(machine);
    }
}

/// The template of an image: how many machines have it, its size in bytes, and how many machines
/// wait for it.
fn template(folder: &Path, image: &str) -> Option<(u64, u64, u64)> {
    let told = run(folder, &["vm", "templates"]);
    let all = told["vm_templates"]["templates"]
        .as_array()
        .expect("a list");
    let one = all.iter().find(|one| one["image"] == image)?;
    let number = |name: &str| one[name].as_u64().expect("a number");
    Some((number("machines"), number("bytes"), number("pooled")))
}

#[test]
fn clones_share_their_memory_and_write_apart() {
    // Their keeper listens in /run.
    testkit::needs_root!();
    testkit::needs_linux!();
    let base = base();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    let image = base.folder.join("image");
    let image = image.to_str().expect("text");
    let archive = base.folder.join("archive");
    let serial = "unix:{name}.serial,server=on,wait=off".to_owned();
    let line = words(&archive).into_iter();
    let line = line.chain(["-serial".to_owned(), serial]);
    let line = line.collect::<Vec<_>>();
    let line = line.iter().map(String::as_str).collect::<Vec<_>>();
    let options = ["-D", image, "-o", "/dev/null", "-n"];
    let start = |number: &str, name: &str, more: &[&str]| {
        let words = [
            &options[..],
            &[number, "--name", name],
            more,
            &["--"],
            &line,
        ];
        Machines::restored(folder, &words.concat())
    };
    let five = start("5", "five-{n}", &[]);
    let lines = (1..=5).map(|number| Line::to(&folder.join(format!("five-{number}.serial"))));
    let mut lines = lines.collect::<Vec<_>>();
    for (number, line) in lines.iter_mut().enumerate() {
        assert_eq!(line.ask("recall"), "of the base");
        assert_eq!(line.ask(&format!("note {number}")), "noted");
        assert_eq!(line.ask(&format!("fill own {number} 4")), "filled");
    }
    assert_eq!(lines[0].ask("remove file"), "removed");
    let (machines, bytes, _) = template(folder, &base.id).expect("it is kept");
    assert_eq!(machines, 5);
    assert!((60 << 20..u64::from(MIB) << 20).contains(&bytes), "{bytes}");

    // A later one finds it, and the saved machine in it.
    let later = start("1", "later", &["--share"]);
    let mut line = Line::to(&folder.join("later.serial"));
    assert_eq!(line.ask("recall"), "of the base");
    assert_eq!(line.ask(&format!("check {FILE}")), "right");
    assert_eq!(template(folder, &base.id).map(|it| it.0), Some(6));
    drop((later, line));
    wait_until("one machine less", SOON, || {
        template(folder, &base.id).is_some_and(|it| it.0 == 5)
    });

    // The template can go without them, and they without each other.
    run(folder, &["vm", "templates", "--drop", &base.id]);
    assert_eq!(template(folder, &base.id), None);
    kill(five.pid(4));
    for (number, line) in lines.iter_mut().enumerate().take(4) {
        assert_eq!(line.ask("recall"), number.to_string());
        assert_eq!(line.ask(&format!("check own {number} 4")), "right");
        let file = line.ask(&format!("check {FILE}"));
        assert_eq!(file == "right", number > 0, "{file}");
        let count = line.number("count");
        wait_until("it to count", SOON, || line.number("count") > count);
    }
    // What is shared cannot be saved: it would be the template.
    let told = fail(folder, &["vm", "save", "--qmp", five.qmp(1), "-D", "x"], 3);
    assert!(told.contains("QEMU's alone"), "{told}");
    let kept = start("1", "kept", &["--share", "--keep", "1000"]);
    drop(kept);
    wait_until("no machine", SOON, || {
        template(folder, &base.id).is_some_and(|it| it.0 == 0)
    });
    run(folder, &["vm", "templates", "--drop", &base.id]);
    let told = fail(folder, &["vm", "templates", "--drop", &base.id], 4);
    assert!(told.contains("no template"), "{told}");
}

#[test]
fn what_cannot_be_saved_is_refused_before_the_guest_is_stopped() {
    testkit::needs_linux!();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    let shared = "memory-backend-file,id=mem,size=64M,share=on,mem-path=shared";
    let others = "memory-backend-file,id=others,size=1M,share=on,mem-path=others";
    let cases: [(&str, &[&str], &str); 7] = [
        ("plain", &["-m", "64"], "mem,size=64M,"),
        (
            "private",
            &[
                "-object",
                "memory-backend-ram,id=mem,size=64M",
                "-machine",
                "memory-backend=mem",
            ],
            "start QEMU with share=on in the -object with id=mem",
        ),
        (
            "second",
            &[
                "-object",
                shared,
                "-machine",
                "memory-backend=mem",
                "-m",
                "64,slots=1,maxmem=1G",
                "-object",
                "memory-backend-ram,id=second,size=64M",
                "-device",
                "pc-dimm,memdev=second",
            ],
            "memory second (64 MiB) is QEMU's alone: start QEMU with share=on",
        ),
        (
            "screen",
            &[
                "-object",
                shared,
                "-machine",
                "memory-backend=mem",
                "-device",
                "VGA,vgamem_mb=64",
            ],
            "vga.vram has 64 MiB: start QEMU with less of that",
        ),
        (
            "mapped",
            &["-object", shared, "-machine", "memory-backend=mem"],
            "is mapped by process",
        ),
        (
            "device",
            &["-object", others, "-device", "ivshmem-plain,memdev=others"],
            "another process or device writes to the guest's memory: -device ivshmem-plain",
        ),
        (
            "other",
            &["-object", shared, "-machine", "memory-backend=mem", "-S"],
            "neither runs nor is paused: prelaunch",
        ),
    ];
    for (name, words, why) in cases {
        let fixed = [
            "-accel",
            "tcg",
            "-nodefaults",
            "-display",
            "none",
            "-m",
            "64",
        ];
        let words = [&fixed[..], words].concat();
        let guest = Linux::start(folder, name, &Emulator::of_tests().program(), &words);
        wait_until("QEMU to listen", SOON, || {
            UnixStream::connect(&guest.qmp).is_ok()
        });
        let mapped = (name == "mapped").then(|| Mapper::of(&folder.join("shared")));
        let socket = guest.qmp.to_str().expect("text");
        let told = fail(
            folder,
            &["vm", "save", "--qmp", socket, "-D", "image", "-R"],
            3,
        );
        assert!(told.contains(why), "{name}: {told}");
        let status = qmp(socket, "query-status")["status"].clone();
        assert_eq!(status == "running", name != "other", "{name}: {status}");
        assert!(!folder.join("image/manifest.img").exists());
        drop(mapped);
    }
    let told = fail(folder, &["vm", "save", "--qmp", "nobody", "-D", "image"], 4);
    assert!(told.contains("-qmp unix:nobody,server=on"), "{told}");
}

#[test]
fn a_machine_comes_back_with_the_disk_that_it_had_and_no_other() {
    testkit::needs_linux!();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    let disk = folder.join("disk");
    fs::write(&disk, [7; 1 << 20]).expect("written");
    let object = "memory-backend-file,id=mem,size=64M,share=on,mem-path=memory";
    let words = [
        "-accel",
        "tcg",
        "-nodefaults",
        "-display",
        "none",
        "-m",
        "64",
    ];
    let more = ["-object", object, "-machine", "pc,memory-backend=mem"];
    let drive = ["-drive", "file=disk,format=raw,if=virtio"];
    let words = [&words[..], &more, &drive].concat();
    let program = Emulator::of_tests().program();
    let mut guest = Linux::start(folder, "machine", &program, &words);
    wait_until("QEMU to listen", SOON, || {
        UnixStream::connect(&guest.qmp).is_ok()
    });
    run(
        folder,
        &["vm", "save", "--qmp", "machine.qmp", "-D", "image"],
    );
    wait_until("QEMU's end", SOON, || guest.has_ended());
    let options = ["-D", "image", "--name", "disk-{n}"];
    let machine = Machines::restored(folder, &options);
    assert_eq!(qmp(machine.qmp(0), "query-status")["status"], "running");
    let drives = qmp(machine.qmp(0), "query-block");
    assert_eq!(drives[0]["inserted"]["file"], "disk");
    drop(machine);
    wait_until("its end", SOON, || pids_of("disk-1").is_empty());
    let file = File::options().write(true).open(&disk).expect("there");
    file.write_all_at(&[8], 5).expect("written");
    let told = fail(folder, &[&["vm", "restore"][..], &options].concat(), 3);
    assert!(told.contains("was written to since"), "{told}");
    assert_eq!(pids_of("disk-1"), [] as [i32; 0]);
}

#[test]
fn a_qemu_that_dies_leaves_the_image_of_before() {
    testkit::needs_linux!();
    let base = base();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    let mut whole = Duration::from_secs(60);
    let mut before = None;
    for at in 0..5 {
        let (machine, line) = restored(folder, &base.folder.join("image"), "dying");
        drop(line);
        if before.is_none() {
            let begun = Instant::now();
            let told = run(folder, &saving(machine.qmp(0)));
            whole = begun.elapsed();
            before = told["vm_save"]["image"].as_str().map(str::to_owned);
        }
        let mut command = stillframe(folder, &saving(machine.qmp(0)));
        let command = command.stdout(Stdio::null()).stderr(Stdio::piped());
        let child = command.spawn().expect("it starts");
        std::thread::sleep(whole * at / 5);
        kill(machine.pid(0));
        let ended = child.wait_with_output().expect("it ends");
        let complained = String::from_utf8_lossy(&ended.stderr);
        // Until then it listens where the next one is to.
        wait_unheard(Path::new(machine.qmp(0)));
        let told = run(folder, &["show", "image"]);
        let is_before = told
            .to_string()
            .contains(before.as_deref().expect("it was saved"));
        // Either all was read before QEMU died, or nothing is left of the save.
        match ended.status.code() {
            Some(0) => {
                assert!(!is_before, "{told}");
                before = None;
            }
            Some(4) => assert!(is_before, "{told}"),
            other => panic!("it ended with {other:?}: {complained}"),
        }
    }
}

/// The words of a save into `image` of a guest that goes on.
fn saving(socket: &str) -> [&str; 8] {
    [
        "vm",
        "save",
        "--qmp",
        socket,
        "-D",
        "image",
        "-R",
        "--no-sync",
    ]
}

/// A process that has a file mapped shared.
struct Mapper(Child);

impl Mapper {
    fn of(path: &Path) -> Self {
        let script = "import mmap, sys\nfile = open(sys.argv[1], 'r+b')\n\
                      held = mmap.mmap(file.fileno(), 0)\nprint('mapped', flush=True)\n\
                      sys.stdin.read()";
        let mut command = Command::new("python3");
        command.arg("-c").arg(script).arg(path);
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let mut said = [0; 7];
        let stdout = child.stdout.as_mut().expect("it is a pipe");
        stdout.read_exact(&mut said).expect("it maps the file");
        Self(child)
    }
}

impl Drop for Mapper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn what_is_no_monitor_is_told_apart() {
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    let greeting = r#"{"QMP":{"version":{"qemu":{"micro":22,"minor":2,"major":7}}}}"#;
    for (number, (lines, status)) in [
        ("HTTP/1.1 400\n".to_owned(), 1),
        (format!("{greeting}\n{{\"return\": 5}}\n"), 1),
        (format!("{greeting}\n"), 4),
        (format!("{greeting}\n[[[[\n"), 1),
    ]
    .into_iter()
    .enumerate()
    {
        let socket = folder.join(format!("{number}"));
        let listener = UnixListener::bind(&socket).expect("it listens");
        let monitor = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().expect("somebody connects");
            stream.write_all(lines.as_bytes()).expect("said");
            // Until the first command, or the end.
            let _ = stream.read(&mut [0; 1000]);
        });
        let socket = socket.to_str().expect("text");
        fail(
            folder,
            &["vm", "save", "--qmp", socket, "-D", "image"],
            status,
        );
        monitor.join().expect("it ended");
        assert!(!folder.join("image/manifest.img").exists());
    }
}

#[test]
fn machines_that_cannot_be_are_refused_and_none_is_left() {
    testkit::needs_linux!();
    let base = base();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    let image = base.folder.join("image");
    let image = image.to_str().expect("text");
    let object = format!("memory-backend-memfd,id=mem,size={MIB}M");
    let m = format!("{MIB}");
    let emulator = Emulator::of_tests();
    let program = emulator.program();
    let mut qemu = program.iter().map(String::as_str).collect::<Vec<_>>();
    qemu.extend(["-accel", "tcg", "-nodefaults", "-display", "none"]);
    let [q35, i440fx] = ["q35", "i440fx"].map(|it| format!("pc-{it}-{}", emulator.version()));
    let other = format!("was started with {i440fx}");
    let with = ["-object", &object, "-m", &m];
    let cases = [
        (["/bin/false"].to_vec(), 3, "no -object with id=mem"),
        ([&["/bin/false"][..], &with].concat(), 4, q35.as_str()),
        (
            [&["/no/such"][..], &with].concat(),
            6,
            "cannot execute /no/such",
        ),
        (
            [&qemu[..], &with, &["-machine", "pc,memory-backend=mem"]].concat(),
            3,
            &other,
        ),
        (
            [&qemu[..], &with, &["-machine", "pc-q35-99.9"]].concat(),
            4,
            "unsupported machine type",
        ),
        // One device more than the image has the state of is one that it lacks.
        (
            [
                &qemu[..],
                &with,
                &["-machine", "q35,memory-backend=mem,hpet=off"],
            ]
            .concat(),
            4,
            "QEMU said",
        ),
    ];
    for (words, status, why) in cases {
        let options = ["vm", "restore", "-D", image, "-o", "/dev/null", "--eager"];
        let options = [&options[..], &["--name", "refused", "--"], &words].concat();
        let told = fail(folder, &options, status);
        assert!(told.contains(why), "{words:?}: {told}");
        assert_eq!(pids_of("refused"), [] as [i32; 0], "{words:?}");
    }
    let several = [
        "vm",
        "restore",
        "-D",
        image,
        "-o",
        "/dev/null",
        "-n",
        "2",
        "--eager",
    ];
    let told = fail(folder, &several, 3);
    assert!(
        told.contains("-serial unix:") && told.contains("{n}"),
        "{told}"
    );
    let snapshot = ["export", "-D", image, "--memory", "memory"];
    let told = fail(folder, &snapshot, 3);
    assert!(told.contains("under QEMU"), "{told}");
}

/// Waits until nobody listens at a monitor's socket, as who has just been killed may do.
fn wait_unheard(socket: &Path) {
    wait_until("the monitor's end", SOON, || {
        std::os::unix::net::UnixStream::connect(socket).is_err()
    });
}

/// The QEMUs with a name.
fn pids_of(name: &str) -> Vec<i32> {
    let sought = format!("guest={name}\0");
    let pids = fs::read_dir("/proc").expect("it is there").flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    let is_it = |pid: &i32| {
        let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        String::from_utf8_lossy(&line).contains(&sought)
    };
    pids.filter(is_it).collect()
}

/// The processes that have a word in their command lines: their pids, in order, and names. Those
/// that have ended have none.
fn processes_of(word: &str) -> Vec<(i32, String)> {
    let pids = fs::read_dir("/proc").expect("it is there").flatten();
    let pids = pids.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let read = |pid: i32, name: &str| {
        let text = fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
        String::from_utf8_lossy(&text).trim_end().to_owned()
    };
    let found = pids.filter(|pid| read(*pid, "cmdline").contains(word));
    let mut found = found
        .map(|pid| (pid, read(pid, "comm")))
        .collect::<Vec<_>>();
    found.sort_unstable();
    found
}

/// A copy of the base's image in which a bit of a page is not what it was.
fn damaged_copy(folder: &Path, at: u64) -> PathBuf {
    let copy = folder.join("image");
    fs::create_dir(&copy).expect("a folder");
    for entry in fs::read_dir(base().folder.join("image"))
        .expect("there")
        .flatten()
    {
        fs::copy(entry.path(), copy.join(entry.file_name())).expect("copied");
    }
    let pages = fs::read_dir(&copy).expect("there").flatten();
    let pages = pages.map(|entry| entry.path());
    let pages = pages.filter(|path| path.to_string_lossy().contains("/pages-"));
    let largest = pages.max_by_key(|path| fs::metadata(path).map_or(0, |facts| facts.len()));
    let file = File::options()
        .read(true)
        .write(true)
        .open(largest.expect("it has pages"))
        .expect("there");
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).expect("read");
    file.write_all_at(&[byte[0] ^ 1], at).expect("written");
    copy
}

#[test]
fn a_damaged_image_starts_nothing() {
    testkit::needs_linux!();
    let base = base();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    let copy = damaged_copy(folder, 100_000);
    // Not as it was recorded: its serial line would take the place of another test's.
    let line = words(&base.folder.join("archive"));
    let line = line.iter().map(String::as_str).collect::<Vec<_>>();
    let options = ["vm", "restore", "-D", "image", "-o", "/dev/null"];
    let more = ["--name", "damaged", "--"];
    let options = [&options[..], &more, &line, &["-serial", "null"]].concat();
    fail(folder, &options, 5);
    assert_eq!(pids_of("damaged"), [] as [i32; 0]);
    let manifest = copy.join("manifest.img");
    let length = fs::metadata(&manifest).expect("there").len();
    let file = File::options().write(true).open(&manifest).expect("there");
    file.set_len(length - 1).expect("cut");
    fail(folder, &options, 5);
    assert_eq!(pids_of("damaged"), [] as [i32; 0]);
}

#[test]
fn who_kills_us_at_any_moment_leaves_the_guest_running() {
    testkit::needs_linux!();
    let base = base();
    let scratch = tempfile::tempdir().expect("a folder");
    let folder = scratch.path();
    let (machine, mut line) = restored(folder, &base.folder.join("image"), "shot-at");
    let socket = machine.qmp(0).to_owned();
    let words = saving(&socket);
    let begun = Instant::now();
    run(folder, &words);
    let whole = begun.elapsed();
    for at in 0..16 {
        let mut command = stillframe(folder, &words);
        let mut child = command.stdout(Stdio::null()).spawn().expect("it starts");
        std::thread::sleep(whole * at / 15);
        let _ = child.kill();
        child.wait().expect("it ends");
        // The image of before, or the new one.
        run(folder, &["show", "image"]);
        let count = line.number("count");
        wait_until("the guest to count", SOON, || line.number("count") > count);
    }
    wait_until("the guest to be as it was", SOON, || {
        qmp(&socket, "query-status")["status"] == "running"
    });
    assert_eq!(line.ask(&format!("check {FILE}")), "right");
    // And it can still be saved.
    run(folder, &words);
}

#[test]
fn who_kills_a_restore_at_any_moment_leaves_no_machine() {
    testkit::needs_linux!();
    let base = base();
    let scratch = tempfile::tempdir().expect("a folder");
    let image = base.folder.join("image");
    let archive = base.folder.join("archive");
    let mut line = words(&archive);
    line.extend(["-serial", "null"].map(str::to_owned));
    let line = line.iter().map(String::as_str).collect::<Vec<_>>();
    let image = image.to_str().expect("text");
    let options = ["vm", "restore", "-D", image, "-o", "/dev/null", "--eager"];
    let options = [&options[..], &["--name", "shot", "--"], &line];
    let options = options.concat();
    let begun = Instant::now();
    let output = stillframe(scratch.path(), &options)
        .output()
        .expect("it starts");
    let whole = begun.elapsed();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    for pid in pids_of("shot") {
        kill(pid);
    }
    wait_until("its end", SOON, || pids_of("shot").is_empty());
    for at in 0..10 {
        let mut child = stillframe(scratch.path(), &options)
            .stdout(Stdio::null())
            .spawn()
            .expect("it starts");
        std::thread::sleep(whole * at / 10);
        let _ = child.kill();
        child.wait().expect("it ends");
        // One whose guest runs was whole, whether that could be told or not.
        let socket = scratch.path().join("shot.qmp");
        wait_until("the machine to be gone or whole", SOON, || {
            pids_of("shot").is_empty() || is_running(&socket)
        });
        for pid in pids_of("shot") {
            kill(pid);
        }
        wait_until("its end", SOON, || pids_of("shot").is_empty());
    }
}

/// Whether a monitor says, soon, that its guest runs.
fn is_running(socket: &Path) -> bool {
    let Ok(stream) = UnixStream::connect(socket) else {
        return false;
    };
    let patience = Some(Duration::from_millis(200));
    stream.set_read_timeout(patience).expect("it is a socket");
    let ask = "{\"execute\":\"qmp_capabilities\"}{\"execute\":\"query-status\"}";
    let _ = (&stream).write_all(ask.as_bytes());
    let lines = BufReader::new(&stream).lines().map_while(Result::ok);
    lines
        .take(10)
        .any(|line| line.contains("\"status\": \"running\""))
}
