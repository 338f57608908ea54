//! Restores that share their memory, fillers of pools and keepers of templates are killed at any
//! moment: machines are whole or gone, and those of others go on.

use testkit::chance::Chance;

use super::*;

/// What the processes are called that keep a template, and that fill a pool or watch what one that
/// fills it has begun.
const KEEPER: &str = "stillframe-keep";
const FILLER: &str = "stillframe-pool";

/// An image of a guest, of which all machines have a word in their command lines, and so has
/// whatever belongs to them.
struct Herd {
    scratch: tempfile::TempDir,
    id: String,
    line: Vec<String>,
}

impl Herd {
    fn new() -> Self {
        let scratch = tempfile::tempdir().expect("a folder");
        let folder = scratch.path();
        // The image that all tests have has a template, too.
        let (seed, mut line) = restored(folder, &base().folder.join("image"), "seed");
        assert_eq!(line.ask("note of the herd"), "noted");
        let save = [
            "vm",
            "save",
            "--no-sync",
            "--qmp",
            seed.qmp(0),
            "-D",
            "image",
        ];
        let told = run(folder, &save);
        let pid = seed.pid(0).cast_unsigned();
        wait_until("QEMU's end", SOON, || !testkit::tree::is_alive(pid));
        let mut line = words(&base().folder.join("archive"));
        let serial = format!(
            "unix:{}/{{name}}.serial,server=on,wait=off",
            folder.display()
        );
        line.extend(["-serial".to_owned(), serial]);
        let id = told["vm_save"]["image"].as_str().expect("text").to_owned();
        Self { scratch, id, line }
    }

    fn folder(&self) -> &Path {
        self.scratch.path()
    }

    fn word(&self) -> &str {
        self.folder().to_str().expect("text")
    }

    /// The words of a restore.
    fn words<'a>(&'a self, image: &'a str, name: &'a str, more: &[&'a str]) -> Vec<&'a str> {
        let words = [
            "vm",
            "restore",
            "-D",
            image,
            "-o",
            "/dev/null",
            "--name",
            name,
        ];
        let line = self.line.iter().map(String::as_str).collect::<Vec<_>>();
        [&words[..], more, &["--"], &line].concat()
    }

    #[track_caller]
    fn restored(&self, name: &str, more: &[&str]) -> Machines {
        let image = self.folder().join("image");
        let words = self.words(image.to_str().expect("text"), name, more);
        Machines::restored(self.folder(), &words[2..])
    }

    /// Begins a restore, and kills it after some time.
    fn shoot(&self, name: &str, more: &[&str], after: Duration) {
        let image = self.folder().join("image");
        let words = self.words(image.to_str().expect("text"), name, more);
        let mut command = stillframe(self.folder(), &words);
        let command = command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut child = command.spawn().expect("it starts");
        std::thread::sleep(after);
        let _ = child.kill();
        child.wait().expect("it ends");
    }

    fn line(&self, name: &str) -> Line {
        Line::to(&self.folder().join(format!("{name}.serial")))
    }

    /// The processes that are called so.
    fn named(&self, is_it: impl Fn(&str) -> bool) -> Vec<i32> {
        let mut all = processes_of(self.word());
        all.retain(|it| is_it(&it.1));
        all.into_iter().map(|it| it.0).collect()
    }

    fn machines(&self) -> Vec<i32> {
        self.named(|name| name.starts_with("qemu"))
    }

    /// Waits until nobody is at work.
    #[track_caller]
    fn settle(&self) {
        wait_until("whoever ends machines to be done", SOON, || {
            self.named(|name| name != KEEPER && !name.starts_with("qemu"))
                .is_empty()
        });
    }

    fn drop_template(&self) {
        let mut command = stillframe(self.folder(), &["vm", "templates", "--drop", &self.id]);
        let command = command.stdout(Stdio::null()).stderr(Stdio::null());
        command.status().expect("it starts");
    }

    fn template(&self) -> Option<(u64, u64, u64)> {
        template(self.folder(), &self.id)
    }

    fn sockets(&self) -> Vec<String> {
        let all = fs::read_dir(self.folder()).expect("there").flatten();
        let all = all.map(|entry| entry.file_name().to_string_lossy().into_owned());
        all.filter(|name| name.ends_with(".qmp")).collect()
    }
}

impl Drop for Herd {
    fn drop(&mut self) {
        self.drop_template();
        processes_of(self.word()).iter().for_each(|it| kill(it.0));
    }
}

/// Insists that a guest is the one that was saved, and counts on.
#[track_caller]
fn counts_on(line: &mut Line) {
    assert_eq!(line.ask("recall"), "of the herd");
    let count = line.number("count");
    wait_until("it to count", SOON, || line.number("count") > count);
}

/// Kills restores of three machines that share, so many times, with a machine beside them that has
/// the template, or without.
fn shoot_restores(chance: &mut Chance, times: u32, beside: bool) {
    let herd = Herd::new();
    let mut other = beside.then(|| herd.restored("other", &["--share"]));
    let mut line = beside.then(|| herd.line("other"));
    let own = other.as_ref().map(|other| other.pid(0));
    // It has its name a little later than it is there.
    wait_until("the keeper to have its name", SOON, || {
        herd.named(|name| name == KEEPER).len() == own.iter().len()
    });
    let keepers = herd.named(|name| name == KEEPER);
    let begun = Instant::now();
    let share = ["--share", "-n", "3"];
    drop(herd.restored("shot-{n}", &share));
    let whole_ms = begun.elapsed().as_millis() as u64;
    let is_alone = || herd.machines() == own.as_slice();
    wait_until("the three to be gone", SOON, is_alone);
    for _ in 0..times {
        for number in 1..4 {
            let _ = fs::remove_file(herd.folder().join(format!("shot-{number}.qmp")));
        }
        herd.shoot(
            "shot-{n}",
            &share,
            Duration::from_millis(chance.below(whole_ms)),
        );
        herd.settle();
        let mut started = herd.machines();
        started.retain(|pid| Some(*pid) != own);
        assert!([0, 3].contains(&started.len()), "{started:?}");
        if started.is_empty() {
            wait_until("no socket to be left", SOON, || {
                herd.sockets().iter().all(|name| name == "other.qmp")
            });
        }
        for number in 1..=started.len() {
            let socket = herd.folder().join(format!("shot-{number}.qmp"));
            assert!(is_running(&socket), "{started:?}: {number} does not run");
        }
        started.iter().for_each(|pid| kill(*pid));
        wait_until("their end", SOON, is_alone);
        // With --keep 0, one that was made for them has gone with them.
        wait_until("the keeper of before, or none", SOON, || {
            herd.named(|name| name == KEEPER) == keepers
        });
        if let Some(line) = &mut line {
            counts_on(line);
            wait_until("one machine", SOON, || {
                herd.template().is_some_and(|it| it.0 == 1)
            });
        }
    }
    let last = herd.restored("last", &["--share"]);
    counts_on(&mut herd.line("last"));
    let count = 1 + own.iter().len() as u64;
    assert_eq!(herd.template().map(|it| it.0), Some(count));
    drop((last, other.take()));
    wait_until("nothing to be left", SOON, || {
        processes_of(herd.word()).is_empty()
    });
}

#[test]
fn a_killed_restore_leaves_the_template_of_others_alone() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let mut chance = Chance::of("a_killed_restore_leaves_the_template_of_others_alone");
    shoot_restores(&mut chance, 5, true);
}

#[test]
fn a_killed_restore_leaves_no_template_of_its_own() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let mut chance = Chance::of("a_killed_restore_leaves_no_template_of_its_own");
    shoot_restores(&mut chance, 5, false);
}

/// Kills who fills a pool, so many times.
fn shoot_fillers(chance: &mut Chance, times: u32) {
    let herd = Herd::new();
    let pool = ["--pool", "2", "--keep", "1000"];
    let mut before = Vec::new();
    for _ in 0..times {
        // What is in the pool by now is taken, or one is started.
        let taken = herd.restored("pooled-{n}", &pool);
        let name = taken.0[0]["name"].as_str().expect("text").to_owned();
        let mut line = herd.line(&name);
        let at = Duration::from_millis(200 + chance.below(1000));
        std::thread::sleep(at);
        // Reapers that are left of it, too, are called so.
        if let Some(filler) = fillers(&herd).first() {
            kill(*filler);
        }
        // Whoever waits is whole; nobody else is there.
        wait_until("the end of who was being started", SOON, || {
            let waiting = herd.template().map_or(0, |it| it.2) as usize;
            fillers(&herd).is_empty() && herd.machines().len() == waiting + 1
        });
        wait_until("the end of its socket", SOON, || {
            let waiting = herd.template().map_or(0, |it| it.2) as usize;
            herd.sockets().len() == waiting + 1 + before.len()
        });
        counts_on(&mut line);
        before.push(name);
    }
    // And in the foreground.
    let fill = ["-n", "0", "--pool", "3", "--keep", "1000"];
    for _ in 0..times.div_ceil(2) {
        herd.shoot(
            "pooled-{n}",
            &fill,
            Duration::from_millis(chance.below(1500)),
        );
        wait_until("the end of who was being started", SOON, || {
            herd.machines().len() as u64 == herd.template().map_or(0, |it| it.2)
        });
        herd.drop_template();
        wait_until("nothing to be left", SOON, || {
            processes_of(herd.word()).is_empty()
        });
    }
    assert_eq!(herd.restored("pooled-{n}", &fill).0.len(), 0);
    assert_eq!(herd.template().map(|it| it.2), Some(3));
    herd.drop_template();
    wait_until("nothing to be left", SOON, || {
        processes_of(herd.word()).is_empty()
    });
    let left = herd.sockets();
    let of_before = |name: &String| before.iter().any(|it| *name == format!("{it}.qmp"));
    assert!(left.iter().all(of_before), "{left:?}");
}

/// Who fills pools: not those who watch what it starts, which are its children, or orphans.
fn fillers(herd: &Herd) -> Vec<i32> {
    let mut all = herd.named(|name| name == FILLER);
    // Only it is told what a keeper says.
    all.retain(|pid| {
        let files = fs::read_dir(format!("/proc/{pid}/fd"))
            .into_iter()
            .flatten();
        files.flatten().any(|file| {
            let target = fs::read_link(file.path()).unwrap_or_default();
            target.to_string_lossy().contains("stillframe-guest")
        })
    });
    all
}

#[test]
fn a_killed_filler_leaves_machines_that_wait_and_no_others() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let mut chance = Chance::of("a_killed_filler_leaves_machines_that_wait_and_no_others");
    shoot_fillers(&mut chance, 3);
}

#[test]
fn a_killed_keeper_takes_only_those_along_that_wait() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let herd = Herd::new();
    let other = herd.restored("other-{n}", &["--pool", "2", "--keep", "1000"]);
    let mut line = herd.line("other-1");
    wait_until("the pool to be full", SOON, || {
        herd.template().is_some_and(|it| it.2 == 2)
    });
    let keeper = herd.named(|name| name == KEEPER);
    assert_eq!(keeper.len(), 1);
    kill(keeper[0]);
    wait_until("the end of those that wait", SOON, || {
        herd.machines() == [other.pid(0)] && herd.sockets() == ["other-1.qmp"]
    });
    herd.settle();
    assert_eq!(herd.template(), None);
    counts_on(&mut line);
    // The next one finds its name, and nobody behind it.
    let next = herd.restored("next-{n}", &["--share", "-n", "2"]);
    assert_eq!(herd.template().map(|it| it.0), Some(2));
    counts_on(&mut herd.line("next-2"));
    counts_on(&mut line);
    drop((next, other));
    wait_until("nothing to be left", SOON, || {
        processes_of(herd.word()).is_empty()
    });
}

#[test]
#[ignore = "takes minutes: cargo xtask machines"]
fn whoever_is_killed_again_and_again_leaves_all_or_nothing() {
    testkit::needs_root!();
    testkit::needs_linux!();
    let mut chance = Chance::of("whoever_is_killed_again_and_again_leaves_all_or_nothing");
    shoot_restores(&mut chance, 60, true);
    shoot_restores(&mut chance, 60, false);
    shoot_fillers(&mut chance, 40);
}
