//! `vm save --with-volume`: a guest and the host's file system that its disk is in are saved of one
//! instant, and come back so.

use testkit::chance::Chance;
use testkit::volumes::{self, Loop, Mount, is_mounted};
use testkit::wait::try_wait_for;

use super::kinds::goes_on;
use super::*;

/// What the guest's memory has in a file.
const KEPT: &str = "kept 5 10";
/// In what time a volume is unmounted at most when its restore is killed.
const UNMOUNTED: Duration = Duration::from_secs(10);

/// A guest that writes to its disk all the time, and looks that the disk is as it left it.
struct Guest {
    scratch: tempfile::TempDir,
    mount: Option<Mount>,
    device: Option<Loop>,
    booted: Option<Linux>,
    restored: Option<Machines>,
    line: Option<Line>,
    /// How many file systems there were.
    files: usize,
    /// What the machine is called when it was started again.
    name: &'static str,
}

impl Guest {
    fn boot(name: &'static str) -> Self {
        let scratch = tempfile::tempdir().expect("a folder");
        let folder = scratch.path();
        volumes::make(&folder.join("fs0"), "64M", &["-b", "4096"], None);
        let device = Loop::attach(&folder.join("fs0"));
        let mount = Mount::new(&device.device, &folder.join("mount"), "noatime,nosuid");
        let mount = mount.expect("an ordinary file system");
        let disk = File::create(mount.point.join("disk")).expect("a file");
        disk.set_len(2 << 20).expect("a length");
        linux::pack(&folder.join("archive")).expect("packed");
        let mut words = words(Path::new("archive"));
        for word in [
            "-drive",
            "file=mount/disk,format=raw,if=none,id=disk",
            "-device",
            "virtio-blk-pci,romfile=,drive=disk",
        ] {
            words.push(word.to_owned());
        }
        let booted = Linux::boot(folder, "guest", &words, &[]);
        let mut line = Line::to(&booted.serial);
        assert_eq!(line.ask("devices"), "found");
        assert_eq!(line.ask("disk 2"), "writing");
        assert_eq!(line.ask(&format!("fill {KEPT}")), "filled");
        let mut guest = Self {
            scratch,
            mount: Some(mount),
            device: Some(device),
            booted: Some(booted),
            restored: None,
            line: Some(line),
            files: 1,
            name,
        };
        guest.goes_on();
        guest
    }

    fn folder(&self) -> &Path {
        self.scratch.path()
    }

    fn point(&self) -> PathBuf {
        self.folder().join("mount")
    }

    /// Insists that it runs, and has found nothing wrong on its disk.
    #[track_caller]
    fn goes_on(&mut self) {
        let line = self.line.as_mut().expect("it is there");
        goes_on(line, "disk", 2);
        assert_eq!(line.ask(&format!("check {KEPT}")), "right");
    }

    /// Insists that nobody waits for the volume.
    #[track_caller]
    fn is_thawed(&self) {
        let (told, heard) = std::sync::mpsc::channel();
        let file = self.point().join("thawed");
        std::thread::spawn(move || told.send(fs::write(file, "x").is_ok()));
        assert_eq!(heard.recv_timeout(SOON), Ok(true), "the volume is frozen");
    }

    fn monitor(&self) -> String {
        match &self.restored {
            Some(machines) => machines.qmp(0).to_owned(),
            None => "guest.qmp".to_owned(),
        }
    }

    /// The words of a save of both.
    fn saving<'a>(monitor: &'a str, image: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        let words = [
            "vm",
            "save",
            "--no-sync",
            "--with-volume",
            "mount",
            "--qmp",
            monitor,
            "-D",
            image,
        ];
        [&words, more].concat()
    }

    #[track_caller]
    fn save(&self, image: &str, more: &[&str]) -> Value {
        let monitor = self.monitor();
        run(self.folder(), &Self::saving(&monitor, image, more))["vm_save"].clone()
    }

    #[track_caller]
    fn refused(&self, more: &[&str], status: i32) -> String {
        let monitor = self.monitor();
        fail(
            self.folder(),
            &Self::saving(&monitor, "refused", more),
            status,
        )
    }

    /// Ends the machine, if it has not ended, and takes its volume away.
    fn end(&mut self) {
        self.line = None;
        self.restored = None;
        self.booted = None;
        let socket = self.folder().join(self.monitor());
        wait_unheard(&socket);
        self.unmount();
        self.device = None;
    }

    /// Unmounts the volume, as soon as the machine that has ended has let it go.
    fn unmount(&mut self) {
        let Some(mount) = self.mount.take() else {
            return;
        };
        let flags = rustix::mount::UnmountFlags::empty();
        wait_until("nobody to use the volume", SOON, || {
            rustix::mount::unmount(&mount.point, flags).is_ok()
        });
        // It is unmounted.
        std::mem::forget(mount);
    }

    /// A device for another volume.
    fn new_device(&mut self) -> String {
        let file = self.folder().join(format!("fs{}", self.files));
        self.files += 1;
        let made = File::create(&file).expect("a file");
        made.set_len(70 << 20).expect("a length");
        let device = Loop::attach(&file);
        let name = device.device.to_str().expect("text").to_owned();
        self.device = Some(device);
        name
    }

    fn restoring<'a>(&self, image: &'a str, device: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        let words = ["-D", image, "--name", self.name, "--with-volume", device];
        [&words, more].concat()
    }

    /// Brings both back to a new device.
    #[track_caller]
    fn restore(&mut self, image: &str, more: &[&str]) {
        let device = self.new_device();
        let machines = Machines::restored(self.folder(), &self.restoring(image, &device, more));
        self.came_back(machines);
    }

    #[track_caller]
    fn came_back(&mut self, machines: Machines) {
        self.restored = Some(machines);
        let point = self.point();
        let options = volumes::run(
            "findmnt",
            &["-n", "-o", "OPTIONS", &point.to_string_lossy()],
        );
        assert!(options.contains("noatime") && options.contains("nosuid"));
        self.is_mounted_again();
        self.line = Some(Line::to(&self.folder().join("guest.serial")));
        self.goes_on();
        self.is_thawed();
    }

    /// What the volume of an image has.
    fn listed(&self, image: &str) -> String {
        let mut list = stillframe(self.folder(), &["volume", "ls", "-D", image, "/"]);
        let list = list.output().expect("it starts");
        String::from_utf8_lossy(&list.stdout).into_owned()
    }

    /// What a restore has mounted is unmounted with the rest.
    fn is_mounted_again(&mut self) {
        let point = self.point();
        self.mount = Some(Mount::found(point));
    }

    fn is_mounted(&self) -> bool {
        is_mounted(&self.point())
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        self.line = None;
        self.restored = None;
        self.booted = None;
        if !std::thread::panicking() {
            self.unmount();
        }
    }
}

/// The words of a restore.
fn restore<'a>(words: &[&'a str]) -> Vec<&'a str> {
    [&["vm", "restore", "-o", "/dev/null"], words].concat()
}

#[test]
fn a_guest_and_the_volume_of_its_disk_are_of_one_instant() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let mut guest = Guest::boot("one-instant");
    let ways: [(&str, &[&str], &[&str]); 4] = [
        ("live", &["-R", "--live"], &[]),
        (
            "stopped",
            &["-R", "--prev-images-dir", "../live"],
            &["--lazy"],
        ),
        ("ending", &[], &["--eager"]),
        ("shared", &["-R"], &["--share"]),
    ];
    for (image, how, back) in ways {
        let told = guest.save(image, how);
        assert!(told["volume"]["stops"].as_u64() >= Some(2), "{told}");
        if !how.is_empty() {
            // What it writes from now on is not to be seen again.
            guest.goes_on();
            guest.is_thawed();
        }
        if image == "stopped" {
            let parents = told["volume"]["parent_pages"].as_u64();
            assert!(parents > Some(0), "it is a layer: {told}");
        }
        guest.end();
        guest.restore(image, back);
    }
    // Each can be read by itself.
    assert!(guest.listed("shared").contains("disk"));
    guest.restored = None;
    guest.unmount();
    let device = guest.device.as_ref().expect("there");
    volumes::run("e2fsck", &["-fn", device.device.to_str().expect("text")]);
}

#[test]
fn a_guest_and_a_volume_are_both_in_an_image_or_neither() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let mut guest = Guest::boot("or-neither");
    let told = guest.refused(&["--with-disks"], 2);
    assert!(told.contains("--with-disks"), "{told}");
    let monitor = guest.monitor();
    let inside = Guest::saving(&monitor, "mount/image", &["-R"]);
    let told = fail(guest.folder(), &inside, 3);
    assert!(told.contains("is in the volume"), "{told}");
    let inside = ["-R", "-o", "../mount/log", "-W", "mount"];
    let told = guest.refused(&inside, 3);
    assert!(told.contains("is in the volume"), "{told}");
    // Nobody has it mounted any more that could freeze it.
    let other = ["vm", "save", "--qmp", &monitor, "-D", "refused", "-R"];
    let other = [&other[..], &["--with-volume", "/proc"]].concat();
    let told = fail(guest.folder(), &other, 3);
    assert!(told.contains("proc"), "{told}");
    for how in [&["-R"][..], &["-R", "--live"], &[]] {
        let hasty = [how, &["--max-frozen", "1"]].concat();
        let told = guest.refused(&hasty, 3);
        assert!(told.contains("--max-frozen"), "{told}");
        guest.goes_on();
        guest.is_thawed();
        assert!(!guest.folder().join("refused/manifest.img").exists());
    }
    // Somebody else has it frozen: the guest is not stopped, as it might wait for that.
    let point = guest.point();
    let point = point.to_str().expect("text");
    volumes::run("fsfreeze", &["-f", point]);
    let saving = Guest::saving(&monitor, "refused", &["-R"]);
    let told = stillframe(guest.folder(), &saving).output();
    volumes::run("fsfreeze", &["-u", point]);
    let told = String::from_utf8_lossy(&told.expect("it starts").stderr).into_owned();
    assert!(told.contains("cannot freeze"), "{told}");
    guest.goes_on();

    guest.save("without", &[]);
    guest.end();
    let device = guest.new_device();
    let small = guest.folder().join("small");
    let made = File::create(&small).expect("a file");
    made.set_len(1 << 20).expect("a length");
    let too_small = Loop::attach(&small);
    let script = guest.folder().join("no");
    fs::write(&script, "#!/bin/sh\nexit 1\n").expect("written");
    volumes::run("chmod", &["755", script.to_str().expect("text")]);
    let script = script.to_str().expect("text");
    for (device, more, status, why) in [
        (
            too_small.device.to_str().expect("text"),
            &[][..],
            3,
            "has 1048576 bytes",
        ),
        ("small", &[], 3, "not a block device"),
        (&device, &["--action-script", script], 3, "action script"),
        (&device, &["--pool", "2", "--keep", "9"], 2, "--pool"),
    ] {
        let words = restore(&guest.restoring("without", device, more));
        let told = fail(guest.folder(), &words, status);
        assert!(told.contains(why), "{told}");
        assert!(!guest.is_mounted());
        assert_eq!(pids_of(guest.name), [] as [i32; 0]);
    }
    // Without its volume the machine lacks its disk.
    let told = fail(guest.folder(), &restore(&["-D", "without"]), 6);
    assert!(told.contains("disk"), "{told}");
    guest.restore("without", &[]);
    // Where something is mounted, nothing is written to.
    let other = guest.folder().join("other");
    let made = File::create(&other).expect("a file");
    made.set_len(70 << 20).expect("a length");
    let other = Loop::attach(&other);
    let name = other.device.to_str().expect("text");
    let words = restore(&guest.restoring("without", name, &[]));
    let told = fail(guest.folder(), &words, 3);
    assert!(told.contains("something is mounted"), "{told}");
    let bytes = fs::read(guest.folder().join("other")).expect("there");
    assert!(bytes.iter().all(|byte| *byte == 0));
    guest.goes_on();
}

#[test]
fn who_kills_a_save_with_a_volume_leaves_both_as_they_were() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let mut guest = Guest::boot("shot-with-volume");
    let mut chance = Chance::of("who_kills_a_save_with_a_volume");
    let monitor = guest.monitor();
    for how in [&["-R"][..], &["-R", "--live"]] {
        let words = Guest::saving(&monitor, "shot", how);
        let begun = Instant::now();
        run(guest.folder(), &words);
        let usual = begun.elapsed();
        for _ in 0..6 {
            let mut child = stillframe(guest.folder(), &words)
                .stdout(Stdio::null())
                .spawn()
                .expect("it starts");
            std::thread::sleep(chance.time(usual));
            let _ = child.kill();
            child.wait().expect("it ends");
            guest.goes_on();
            guest.is_thawed();
            // The image of before, or the new one, with both.
            assert!(guest.listed("shot").contains("disk"));
        }
    }
    guest.save("shot", &[]);
    guest.end();
    let device = guest.new_device();
    let words = restore(&guest.restoring("shot", &device, &[]));
    let socket = guest.folder().join(format!("{}.qmp", guest.name));
    let mut left = 0;
    for _ in 0..6 {
        let mut child = stillframe(guest.folder(), &words)
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it starts");
        std::thread::sleep(chance.time(Duration::from_millis(700)));
        let _ = child.kill();
        child.wait().expect("it ends");
        wait_until("the machine to be gone or whole", SOON, || {
            pids_of(guest.name).is_empty() || is_running(&socket)
        });
        let runs = !pids_of(guest.name).is_empty();
        if runs {
            assert!(guest.is_mounted(), "a guest runs without its volume");
        }
        pids_of(guest.name).into_iter().for_each(kill);
        wait_until("its end", SOON, || pids_of(guest.name).is_empty());
        if runs {
            guest.is_mounted_again();
            guest.unmount();
        }
        // Who is killed while it lets the guest go on leaves it (docs/vm.md), which one in many is.
        let gone = try_wait_for(UNMOUNTED, || (!guest.is_mounted()).then_some(()));
        if gone.is_none() {
            left += 1;
            assert!(left == 1 && !runs, "{left} are left mounted, {runs}");
            guest.is_mounted_again();
            guest.unmount();
        }
    }
    let machines = Machines::restored(guest.folder(), &words[2..]);
    guest.came_back(machines);
}
