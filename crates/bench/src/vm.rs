//! `bench vm`: a Linux guest under QEMU, saved and started again by Stillframe and by QEMU itself.
mod cold;
mod theirs;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::json;
use testkit::machine::linux::{self, Emulator, Line, Linux};

use self::theirs::QemuMethod;
use crate::error::{Error, Result, file_error};
use crate::machine::Machine;
use crate::monitor::{Monitor, private_mib};
use crate::record::median;
use crate::report::{self, put_between};
use crate::tool::timed;
use crate::{isolate, peer, runs, suite};

const MARKS: [&str; 2] = [
    "<!-- vm:begin, written by `cargo xtask bench vm` -->",
    "<!-- vm:end -->",
];

/// The guest's memory, and what of it is a file of random bytes, in MiB.
const MIB: u32 = 400;
const FILE: &str = "file 7 150";

/// What the writing guest writes over and over, in MiB.
const WRITTEN: &str = "write 150";

/// The numbers of clones that are measured.
const COUNTS: [u32; 3] = [1, 10, 50];

/// How long a machine may take to end.
const DEADLINE: Duration = Duration::from_secs(60);

/// What is measured.
#[derive(clap::Args)]
pub struct Arguments {
    /// Fewer rounds; the results go to target/bench instead of docs.
    #[arg(long)]
    quick: bool,
    /// Samples of each.
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// The stillframe that is measured.
    #[arg(long, value_name = "PATH", env = "STILLFRAME_BIN")]
    stillframe: PathBuf,
    /// Where images are made.
    #[arg(long, value_name = "FOLDER", default_value = "/dev/shm")]
    scratch: PathBuf,
    /// A folder on a disk: images there are started with cold caches.
    #[arg(long, value_name = "FOLDER", default_value = "/var/tmp")]
    disk: PathBuf,
    /// Where the table and the numbers are written.
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

/// What one way of doing something took, by what was measured.
#[derive(Debug, Serialize)]
struct Row {
    what: &'static str,
    numbers: BTreeMap<&'static str, Vec<f64>>,
}

/// All that was measured.
#[derive(Debug, Serialize)]
struct Record {
    machine: Machine,
    qemu: String,
    rounds: usize,
    rows: Vec<Row>,
}

impl Record {
    fn add(&mut self, what: &'static str, number: &'static str, value: f64) {
        let at = self.rows.iter().position(|row| row.what == what);
        let at = at.unwrap_or_else(|| {
            let numbers = BTreeMap::new();
            self.rows.push(Row { what, numbers });
            self.rows.len() - 1
        });
        self.rows[at].numbers.entry(number).or_default().push(value);
    }
}

/// Measures, keeps the numbers and writes the tables.
///
/// # Errors
/// When anything fails that is measured.
pub fn run(arguments: &Arguments) -> Result<()> {
    isolate::close_inherited()?;
    if let Some(why) = linux::missing() {
        return Err(Error::Nothing { what: why });
    }
    let stillframe = peer::stillframe(&arguments.stillframe)?;
    let rounds = suite::rounds(arguments.rounds, arguments.quick);
    let folder = |within: &Path| {
        let mut made = tempfile::Builder::new();
        let made = made.prefix("stillframe-bench-").tempdir_in(within);
        made.map_err(file_error("make a folder in", within))
    };
    let (scratch, disk) = (folder(&arguments.scratch)?, folder(&arguments.disk)?);
    let mut bench = Bench {
        stillframe: arguments.stillframe.clone(),
        folder: scratch.path().to_owned(),
        disk: disk.path().to_owned(),
        ways: Vec::new(),
        turn: 0,
        record: Record {
            machine: Machine::this(&arguments.scratch),
            qemu: String::new(),
            rounds,
            rows: Vec::new(),
        },
    };
    bench.prepare()?;
    for round in 0..=rounds {
        eprintln!("round {round} of {rounds}");
        bench.saves()?;
        bench.restores()?;
        if round == 0 {
            // It warms up.
            bench.record.rows.clear();
        }
    }
    for count in COUNTS {
        eprintln!("{count} clones");
        for _ in 0..rounds.min(if count == 50 { 1 } else { 5 }) {
            bench.clones(count)?;
        }
    }
    let Bench { record, .. } = bench;
    let folder = report::folder(arguments.out.as_deref(), arguments.quick);
    let numbers = runs::keep(&folder, &record.machine, "vm", &record)?;
    let version = stillframe.version;
    let text = format!(
        "{}\n{}",
        tables(&record, &version),
        runs::link(&folder, &numbers)
    );
    println!("{text}");
    put_between(&folder.join("benchmarks.md"), MARKS, &text)
}

/// What everything is measured with.
struct Bench {
    stillframe: PathBuf,
    folder: PathBuf,
    /// What has images whose caches are cold.
    disk: PathBuf,
    /// QEMU's own.
    ways: Vec<QemuMethod>,
    /// How often machines were started: those of before may not have ended quite.
    turn: u32,
    record: Record,
}

impl Bench {
    fn path(&self, name: &str) -> PathBuf {
        self.folder.join(name)
    }

    /// QEMU's words for a machine whose memory is a file, shared or not.
    fn words(&self, memory: &str, share: &str) -> Vec<String> {
        let mut words = linux::words(Emulator::of_tests(), &self.path("archive"), MIB);
        let path = self.path(memory);
        let object = format!(
            "memory-backend-file,id=mem,size={MIB}M,mem-path={},share={share}",
            path.display()
        );
        let machine = "q35,memory-backend=mem";
        words.extend(["-object", &object, "-machine", machine].map(str::to_owned));
        words
    }

    fn boot(&self, name: &str, load: Load) -> Result<(Linux, Line)> {
        let memory = format!("{name}.memory");
        // QEMU takes a file as it is.
        let _ = std::fs::remove_file(self.path(&memory));
        let mut words = self.words(&memory, "on");
        words.extend(theirs::drive(&self.folder, name)?);
        let guest = Linux::boot(&self.folder, name, &words, &[]);
        theirs::make_snapshots(&guest, &self.folder, name)?;
        let mut line = Line::to(&guest.serial);
        if load != Load::Empty {
            assert_eq!(line.ask(&format!("fill {FILE}")), "filled");
        }
        if load == Load::Writing {
            assert_eq!(line.ask(WRITTEN), "writing");
        }
        Ok((guest, line))
    }

    /// Packs the first file system, and saves the images that restores are measured with.
    fn prepare(&mut self) -> Result<()> {
        let archive = self.path("archive");
        linux::pack(&archive).map_err(file_error("write", &archive))?;
        let (guest, line) = self.boot("base", Load::Filled)?;
        drop(line);
        let mut monitor = Monitor::to(&guest.qmp)?;
        self.record.qemu = monitor.version.to_string();
        self.ways = QemuMethod::of(monitor.version.major);
        // QEMU's template: the file of the memory stays as it is, devices go into another.
        monitor.capability("x-ignore-shared", true)?;
        monitor.call("stop", json!({}))?;
        monitor.migrate(&format!("exec:cat > {}", self.path("devices").display()))?;
        let memory = self.path("base.memory");
        let copy = self.path("template.memory");
        std::fs::copy(&memory, &copy).map_err(file_error("copy", &memory))?;
        monitor.capability("x-ignore-shared", false)?;
        monitor.call("cont", json!({}))?;
        drop(monitor);
        for way in &self.ways {
            let file = way.file(&self.folder, "base");
            way.run(&guest, &file)?;
        }
        self.save(&guest, "image", &[])?;
        drop(guest);
        cold::copy(&self.path("image"), &self.disk.join("image"))?;
        for way in &self.ways {
            let file = way.file(&self.folder, "base");
            cold::copy(&file, &way.file(&self.disk, "base"))?;
        }
        Ok(())
    }

    /// Saves a machine; gives how long the command took, in ms.
    fn save(&self, guest: &Linux, image: &str, more: &[&str]) -> Result<f64> {
        let mut command = Command::new(&self.stillframe);
        command.args(["vm", "save", "--no-sync", "--qmp"]);
        command.arg(&guest.qmp).arg("-D").arg(self.path(image));
        command.args(more).current_dir("/").stdin(Stdio::null());
        let took = timed(&mut command, &self.path("said"))?;
        Ok(took.ns as f64 / 1e6)
    }

    /// Saves an empty guest, a full one and one that writes, in each way.
    fn saves(&mut self) -> Result<()> {
        for load in [Load::Empty, Load::Filled, Load::Writing] {
            let (guest, mut line) = self.boot("saved", load)?;
            let names = load.names();
            let ours = [
                ("Stillframe", &["-R"][..]),
                ("Stillframe, --live", &["-R", "--live"]),
            ];
            for (what, options) in ours {
                let image = self.path("ours");
                let _ = std::fs::remove_dir_all(&image);
                let save = || self.save(&guest, "ours", options);
                let (took, stopped) = watched(&mut line, save)?;
                self.record.add(what, names[0], took);
                self.record.add(what, names[1], stopped);
                self.record.add(what, names[2], size(&image) as f64 / 1e6);
            }
            for way in self.ways.clone() {
                let file = way.file(&self.folder, "saved");
                let (took, stopped) = watched(&mut line, || way.run(&guest, &file))?;
                self.record.add(way.save(), names[0], took);
                self.record.add(way.save(), names[1], stopped);
                self.record
                    .add(way.save(), names[2], size(&file) as f64 / 1e6);
            }
        }
        Ok(())
    }

    /// Starts one machine in each way, until it answers.
    fn restores(&mut self) -> Result<()> {
        const NUMBER: &str = "until it answers, ms";
        const COLD: &str = "cold, ms";
        for (what, options) in [
            ("Stillframe", ["--eager"].as_slice()),
            ("Stillframe, --lazy", &["--lazy"]),
            ("Stillframe, a clone of a template", &["--share"]),
            ("Stillframe, a clone out of a pool", &["--pool", "1"]),
        ] {
            let answered = self.ours(1, options, &self.path("image"))?;
            self.record.add(what, NUMBER, answered[0]);
            if options[0].ends_with("er") || options[0] == "--lazy" {
                let image = self.disk.join("image");
                cold::forget(&image)?;
                let answered = self.ours(1, options, &image)?;
                self.record.add(what, COLD, answered[0]);
            }
        }
        for way in self.ways.clone() {
            let answered = self.theirs(way, &self.folder)?;
            self.record.add(way.start(), NUMBER, answered[0]);
            cold::forget(&way.file(&self.disk, "base"))?;
            let answered = self.theirs(way, &self.disk)?;
            self.record.add(way.start(), COLD, answered[0]);
        }
        let answered = self.their_clones(1)?;
        self.record.add("QEMU, its template", NUMBER, answered[0]);
        let answered = self.alone()?;
        let what = "QEMU alone, until its monitor answers";
        self.record.add(what, NUMBER, answered[0]);
        Ok(())
    }

    /// Clones at once, ours and QEMU's.
    fn clones(&mut self, count: u32) -> Result<()> {
        let names = match count {
            1 => ["1: ms", "1: MiB each"],
            10 => ["10: ms", "10: MiB each"],
            _ => ["50: ms", "50: MiB each"],
        };
        let (pool, count) = (count.to_string(), count as usize);
        let ways = [
            ("Stillframe, clones of a template", vec!["--share"]),
            ("Stillframe, clones out of a pool", vec!["--pool", &pool]),
        ];
        for (what, options) in ways {
            let [_, took, mib] = self.ours(count, &options, &self.path("image"))?[..] else {
                unreachable!("it is three numbers");
            };
            self.record.add(what, names[0], took);
            self.record.add(what, names[1], mib);
        }
        let what = "QEMU, its template";
        let [_, took, mib] = self.their_clones(count)?[..] else {
            unreachable!("it is three numbers");
        };
        self.record.add(what, names[0], took);
        self.record.add(what, names[1], mib);
        Ok(())
    }

    /// Starts machines of our image with the template there, and the pool full; gives when the
    /// first has answered and when the command had ended, in ms, and the MiB of each.
    fn ours(&mut self, count: usize, options: &[&str], image: &Path) -> Result<Vec<f64>> {
        self.turn += 1;
        let is_pool = options[0] == "--pool";
        let keep = ["--keep", "600"];
        if is_pool {
            self.restore("0", image, &[options, &keep].concat())?;
        } else if options[0] == "--share" {
            // The template is made by one that ends.
            drop(self.restore("1", image, &[options, &keep].concat())?);
            self.turn += 1;
        }
        let begun = Instant::now();
        // What was taken is not put back: that would take the processors from what is measured.
        let options = if is_pool { &["--pool", "1"] } else { options };
        let machines = self.restore(&count.to_string(), image, options)?;
        let took = begun.elapsed().as_secs_f64() * 1e3;
        let mut line = Line::to(&self.path(&format!("{}.serial", machines.names[0])));
        assert_eq!(line.ask("written"), "0 0", "{options:?}");
        let answered = begun.elapsed().as_secs_f64() * 1e3;
        let mib = machines.mib()?;
        drop(machines);
        let mut command = Command::new(&self.stillframe);
        command
            .args(["vm", "templates", "--drop"])
            .arg(self.image()?);
        // Where none was needed there is none.
        let _ = command.stdout(Stdio::null()).stderr(Stdio::null()).status();
        Ok(vec![answered, took, mib])
    }

    fn image(&self) -> Result<String> {
        let mut command = Command::new(&self.stillframe);
        command.args(["show", "--json"]).arg(self.path("image"));
        let told = output(&mut command)?;
        Ok(told["image"]
            .as_str()
            .expect("an image has an id")
            .to_owned())
    }

    fn restore(&self, count: &str, image: &Path, options: &[&str]) -> Result<Machines> {
        let mut command = Command::new(&self.stillframe);
        let name = format!("ours-{}-{{n}}", self.turn);
        command.args(["vm", "restore", "-o", "/dev/null", "--json", "-n", count]);
        command.args(["--name", &name, "-D"]).arg(image);
        command.args(options).arg("--qmp-dir").arg(&self.folder);
        let words = self.words("unused.memory", "on");
        command.arg("--").args(words);
        let serial = self.path("{name}.serial");
        let serial = format!("unix:{},server=on,wait=off", serial.display());
        command.args(["-serial", &serial]).current_dir(&self.folder);
        let told = output(&mut command)?;
        let machines = told["vm_restore"]["machines"].as_array();
        let machines = machines.map(Vec::as_slice).unwrap_or_default();
        let name = |one: &serde_json::Value| one["name"].as_str().unwrap_or_default().to_owned();
        let pid = |one: &serde_json::Value| one["pid"].as_i64().unwrap_or_default() as i32;
        Ok(Machines {
            names: machines.iter().map(name).collect(),
            pids: machines.iter().map(pid).collect(),
        })
    }
}

/// What a guest that is saved has and does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Load {
    /// It has booted.
    Empty,
    /// It has a file in memory.
    Filled,
    /// It has, and writes to other memory all the time.
    Writing,
}

impl Load {
    /// What is measured: the save, how long it is stopped, and the size.
    const fn names(self) -> [&'static str; 3] {
        match self {
            Self::Empty => ["empty: save, ms", "empty: stopped, ms", "empty: MB"],
            Self::Filled => ["save, ms", "stopped, ms", "MB"],
            Self::Writing => ["writing: save, ms", "writing: stopped, ms", "writing: MB"],
        }
    }
}

/// Saves a guest that ticks meanwhile; gives how long it took, and the longest time between two
/// ticks less the one that is always between them, in ms.
fn watched(line: &mut Line, save: impl FnOnce() -> Result<f64>) -> Result<(f64, f64)> {
    std::thread::scope(|scope| {
        let ticks = scope.spawn(|| line.longest_pause(2, 600));
        std::thread::sleep(Duration::from_millis(150));
        let took = save().inspect_err(|error| eprintln!("a save has failed: {error}"))?;
        let pause = ticks.join().expect("the guest ticks");
        Ok((took, pause.as_secs_f64() * 1e3 - 2.0))
    })
}

/// Machines that we have started; dropped, they end.
struct Machines {
    names: Vec<String>,
    pids: Vec<i32>,
}

impl Machines {
    fn mib(&self) -> Result<f64> {
        private_mib(&self.pids)
    }
}

impl Drop for Machines {
    fn drop(&mut self) {
        for pid in &self.pids {
            if let Some(pid) = rustix::process::Pid::from_raw(*pid) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
        }
        let begun = Instant::now();
        let is_there = |pid: &i32| testkit::tree::is_alive(pid.cast_unsigned());
        while self.pids.iter().any(is_there) && begun.elapsed() < DEADLINE {
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Runs a command that says JSON.
fn output(command: &mut Command) -> Result<serde_json::Value> {
    let output = command.stdin(Stdio::null()).output();
    let output = output.map_err(|source| Error::Start {
        program: "stillframe".to_owned(),
        source,
    })?;
    if !output.status.success() {
        return Err(Error::Status {
            command: format!("{command:?}"),
            status: output.status,
            said: String::from_utf8_lossy(&output.stderr).into_owned(),
        });
    }
    serde_json::from_slice(&output.stdout).map_err(|source| Error::Numbers {
        path: PathBuf::from("stillframe"),
        source,
    })
}

/// The bytes of a file, or of all files of a folder.
fn size(path: &Path) -> u64 {
    match std::fs::read_dir(path) {
        Ok(entries) => entries.flatten().map(|entry| size(&entry.path())).sum(),
        Err(_) => path.symlink_metadata().map_or(0, |facts| facts.len()),
    }
}

fn tables(record: &Record, version: &str) -> String {
    let machine = &record.machine;
    let mut out = format!(
        "{} · {} core(s) · kernel {} · images on {} · stillframe {version}, QEMU {}, TCG\n\n\
         A machine of {MIB} MiB with 150 MiB of random bytes in a tmpfs. Medians of {} rounds in \
         turn. Stopped: the longest time between two ticks of the guest on its serial line, less \
         the 2 ms that it waits itself. A writing guest writes to 150 MiB more, over and over.\n",
        machine.processor, machine.cores, machine.kernel, machine.disk, record.qemu, record.rounds,
    );
    let [empty, filled, writing] = [Load::Empty, Load::Filled, Load::Writing].map(Load::names);
    let kinds: [&[&str]; 5] = [
        &filled,
        &writing,
        &empty,
        &["until it answers, ms", "cold, ms"],
        &[
            "1: ms",
            "1: MiB each",
            "10: ms",
            "10: MiB each",
            "50: ms",
            "50: MiB each",
        ],
    ];
    for names in kinds {
        let _ = writeln!(out, "\n| | {} |", names.join(" | "));
        let _ = writeln!(out, "| --- |{}", " ---: |".repeat(names.len()));
        let rows = record.rows.iter();
        for row in rows.filter(|row| names.iter().any(|name| row.numbers.contains_key(name))) {
            let number = |name: &&str| {
                let numbers = row.numbers.get(*name).map(Vec::as_slice);
                numbers
                    .and_then(median)
                    .map_or("".to_owned(), |it| format!("{it:.1}"))
            };
            let numbers = names.iter().map(number).collect::<Vec<_>>();
            let _ = writeln!(out, "| {} | {} |", row.what, numbers.join(" | "));
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Record {
        pub(super) fn of_tests() -> Self {
            Self {
                machine: Machine::this(Path::new("/")),
                qemu: "7.2".into(),
                rounds: 1,
                rows: Vec::new(),
            }
        }
    }

    #[test]
    fn a_table_has_the_rows_that_have_its_numbers() {
        let mut record = Record::of_tests();
        for value in [3.0, 5.0, 4.0] {
            record.add("ours", "save, ms", value);
        }
        record.add("theirs", "until it answers, ms", 7.0);
        let text = tables(&record, "1");
        assert!(text.contains("| ours | 4.0 |  |  |"), "{text}");
        assert!(text.contains("| theirs | 7.0 |"), "{text}");
        assert_eq!(text.matches("| ours |").count(), 1);
    }
}
