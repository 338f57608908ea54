//! `bench uffd`: how fast a microVM has its memory from the page server, against the bare kernel
//! and against a server that brings in empty pages itself.
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufWriter, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use image::PAGE_BYTES;
use serde::Serialize;
use testkit::huge_pages::HugePages;

use crate::error::{Error, Result, file_error, kernel_error};
use crate::guest::{Ability, Contents, Size, TouchTiming};
use crate::machine::Machine;
use crate::record::median;
use crate::report::{self, put_between};
use crate::runs;
use crate::serving::{Guest, Server};

const BEGIN: &str = "<!-- uffd:begin, written by `cargo xtask bench uffd` -->";
const END: &str = "<!-- uffd:end -->";

/// Pages that are touched at random places to see how long one takes.
const RANDOM: usize = 1000;
/// Of so many pages one is written before a difference.
const WRITTEN: usize = 100;
/// How long the end of a guest may take to be noticed.
const DEADLINE: Duration = Duration::from_secs(20);

/// What is measured.
#[derive(clap::Args)]
pub struct Arguments {
    /// Fewer rounds and less memory; the results go to target/bench instead of docs.
    #[arg(long)]
    quick: bool,
    /// Memory of the guest in MiB.
    #[arg(long, value_name = "N")]
    mib: Option<usize>,
    /// Samples of each.
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// Only differences, which are printed and not kept.
    #[arg(long)]
    diffs_only: bool,
    /// Guests whose userfaultfd tells missing pages only, as stock Firecracker's does.
    #[arg(long)]
    missing_only: bool,
    /// The stillframe that is measured.
    #[arg(long, value_name = "PATH", env = "STILLFRAME_BIN")]
    stillframe: PathBuf,
    /// Where the images are made.
    #[arg(long, value_name = "FOLDER", default_value = "/dev/shm")]
    scratch: PathBuf,
    /// Where the table and the numbers are written.
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

/// Who brings pages in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
enum Fetcher {
    /// The kernel alone, without a userfaultfd.
    Bare,
    /// `serve`.
    Serve,
    /// `serve --no-unregister`.
    NoUnregister,
    /// `serve --prefetch all`.
    Prefetch,
}

impl Fetcher {
    const fn options(self) -> &'static [&'static str] {
        match self {
            Self::Bare | Self::Serve => &[],
            Self::NoUnregister => &["--no-unregister"],
            Self::Prefetch => &["--prefetch", "all"],
        }
    }
}

/// What is touched.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
struct Workload {
    title: &'static str,
    contents: Contents,
    /// It is given up before it is touched.
    removed: bool,
    by: &'static [Fetcher],
    /// The speed that is wanted, as a share of the bare kernel's, for small and for huge pages.
    goals: [Option<f64>; 2],
}

const WORKLOADS: [Workload; 5] = [
    Workload {
        title: "all empty",
        contents: Contents::Empty,
        removed: false,
        by: &[Fetcher::Bare, Fetcher::Serve, Fetcher::NoUnregister],
        goals: [Some(0.9), Some(0.95)],
    },
    Workload {
        title: "half of it data",
        contents: Contents::Half,
        removed: false,
        by: &[Fetcher::Bare, Fetcher::Serve, Fetcher::NoUnregister],
        goals: [None, None],
    },
    Workload {
        title: "all data",
        contents: Contents::Data,
        removed: false,
        by: &[Fetcher::Bare, Fetcher::Serve],
        goals: [None, Some(0.8)],
    },
    Workload {
        title: "all data, `--prefetch all`",
        contents: Contents::Data,
        removed: false,
        by: &[Fetcher::Bare, Fetcher::Prefetch],
        goals: [None, Some(1.1)],
    },
    Workload {
        title: "given up, touched again",
        contents: Contents::Data,
        removed: true,
        by: &[Fetcher::Bare, Fetcher::Serve, Fetcher::NoUnregister],
        goals: [None, Some(0.95)],
    },
];

/// The numbers of a run.
#[derive(Serialize)]
struct Numbers {
    machine: Machine,
    mib: usize,
    missing_only: bool,
    cells: Vec<Cell>,
    diffs: Vec<Diff>,
}

/// One workload with pages of one size, a value for each round.
#[derive(Serialize)]
struct Cell {
    size: Size,
    workload: Workload,
    series: Vec<Series>,
}

#[derive(Serialize)]
struct Series {
    by: Fetcher,
    touched: Vec<TouchTiming>,
    /// Touches of pages at random places, afterwards not in order.
    random: Vec<TouchTiming>,
}

/// Differences of a guest that has written some pages, a value for each round.
#[derive(Serialize)]
struct Diff {
    size: Size,
    ability: Ability,
    /// The guest may go on when it is answered, and what it was at that moment is copied then.
    live: bool,
    /// From asking for it until it is answered.
    ms: Vec<f64>,
    /// The same until it is whole.
    whole_ms: Vec<f64>,
    stored_pages: u64,
}

/// How differences are asked for.
const DIFFS: [(Ability, bool); 4] = [
    (Ability::WpAsync, false),
    (Ability::WpSync, false),
    (Ability::WpAsync, true),
    (Ability::WpSync, true),
];

/// What all measurements have in common.
struct Bench<'a> {
    arguments: &'a Arguments,
    dir: &'a Path,
    mib: usize,
    rounds: usize,
}

/// Serves guests with small and with huge pages, keeps the numbers and writes the table.
///
/// # Errors
/// When anything fails that is measured, or a page is not what was stored.
pub fn run(arguments: &Arguments) -> Result<()> {
    let (mib, rounds) = if arguments.quick { (256, 3) } else { (1024, 9) };
    let scratch = tempfile::tempdir_in(&arguments.scratch);
    let scratch = scratch.map_err(kernel_error("make a scratch folder"))?;
    let bench = Bench {
        arguments,
        dir: scratch.path(),
        mib: arguments.mib.unwrap_or(mib),
        rounds: arguments.rounds.unwrap_or(rounds),
    };
    let reserved = HugePages::reserve(bench.mib as u64 / 2 + 1);
    let _reserved = reserved.map_err(kernel_error("reserve huge pages"))?;
    for contents in Contents::ALL {
        bench.import(contents)?;
    }
    let mut numbers = Numbers {
        machine: Machine::this(bench.dir),
        mib: bench.mib,
        missing_only: arguments.missing_only,
        cells: Vec::new(),
        diffs: Vec::new(),
    };
    for size in [Size::Huge, Size::Small] {
        for workload in WORKLOADS.into_iter().filter(|_| !arguments.diffs_only) {
            numbers.cells.push(bench.measure(size, workload)?);
        }
        if !arguments.missing_only {
            for (ability, live) in DIFFS {
                numbers.diffs.push(bench.diff(size, ability, live)?);
            }
        }
    }
    if arguments.diffs_only {
        let mut text = String::new();
        differences(&mut text, &numbers);
        println!("{text}");
        return Ok(());
    }
    let folder = report::folder(arguments.out.as_deref(), arguments.quick);
    let kept = runs::keep(&folder, &numbers.machine, "uffd", &numbers)?;
    let text = format!("{}\n{}", table(&numbers), runs::link(&folder, &kept));
    println!("{text}");
    put_between(&folder.join("benchmarks.md"), [BEGIN, END], &text)
}

impl Bench<'_> {
    /// Makes the image of a memory.
    fn import(&self, contents: Contents) -> Result<()> {
        let path = self.dir.join("memory");
        let failed = || file_error::<std::io::Error>("write", &path);
        let file = File::create(&path).map_err(failed())?;
        file.set_len((self.mib << 20) as u64).map_err(failed())?;
        let mut file = BufWriter::with_capacity(1 << 20, file);
        let pages = (self.mib << 20) / PAGE_BYTES;
        for page in (0..pages).filter(|page| contents.word(*page, 0) != 0) {
            let at = SeekFrom::Start((page * PAGE_BYTES) as u64);
            if page == 0 || contents.word(page - 1, 0) == 0 {
                file.seek(at).map_err(failed())?;
            }
            for at in (0..PAGE_BYTES).step_by(8) {
                let word = contents.word(page, at).to_ne_bytes();
                file.write_all(&word).map_err(failed())?;
            }
        }
        file.flush().map_err(failed())?;
        let mut command = Command::new(&self.arguments.stillframe);
        command.args(["import", "--firecracker", "--no-sync", "--memory", "memory"]);
        command.args(["-D", contents.name()]).current_dir(self.dir);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        let status = command
            .status()
            .map_err(file_error("start", &self.arguments.stillframe))?;
        if !status.success() {
            return Err(Error::Status {
                command: crate::tool::name(&command),
                status,
                said: String::new(),
            });
        }
        std::fs::remove_file(&path).map_err(failed())
    }

    fn serve(&self, contents: Contents, name: &str, options: &[&str]) -> Result<Server> {
        let program = &self.arguments.stillframe;
        Server::start(program, self.dir, contents.name(), name, options)
    }

    fn guest(&self, server: Option<&Server>, size: Size, contents: Contents) -> Result<Guest> {
        let ability = match self.arguments.missing_only {
            true => Ability::Missing,
            false => Ability::WpAsync,
        };
        Guest::start(server, size, contents, self.mib, ability)
    }

    /// Lets all in turn have the same touched.
    fn measure(&self, size: Size, workload: Workload) -> Result<Cell> {
        let servers = workload.by.iter().map(|by| match by {
            Fetcher::Bare => Ok(None),
            by => self
                .serve(workload.contents, &format!("{by:?}"), by.options())
                .map(Some),
        });
        let servers = servers.collect::<Result<Vec<_>>>()?;
        let series = |by: &Fetcher| Series {
            by: *by,
            touched: Vec::new(),
            random: Vec::new(),
        };
        let mut cell = Cell {
            size,
            workload,
            series: workload.by.iter().map(series).collect(),
        };
        for round in 0..=self.rounds {
            for (server, series) in servers.iter().zip(&mut cell.series) {
                let [touched, random] = self.round(server.as_ref(), size, workload)?;
                // The first one warms up.
                if round > 0 {
                    series.touched.push(touched);
                    series.random.push(random);
                }
            }
        }
        Ok(cell)
    }

    /// One guest touches all of its memory in order, another one some of it.
    fn round(
        &self,
        server: Option<&Server>,
        size: Size,
        workload: Workload,
    ) -> Result<[TouchTiming; 2]> {
        let mut guest = self.guest(server, size, workload.contents)?;
        let (mut touched, mut order) = (guest.ask("touch")?, "touch");
        if workload.removed {
            guest.ask("remove")?;
            order = "touch-removed";
            touched = guest.ask(order)?;
        } else if server.is_some() {
            guest.ask("check")?;
        }
        let read = |answer| {
            serde_json::from_value::<TouchTiming>(answer).map_err(|error| Error::Nothing {
                what: format!("a guest answered to {order}: {error}"),
            })
        };
        let touched = read(touched)?;
        drop(guest);
        let mut guest = self.guest(server, size, workload.contents)?;
        let random = read(guest.ask(&format!("random {RANDOM}"))?)?;
        drop(guest);
        server.map_or(Ok(()), quiet)?;
        Ok([touched, random])
    }

    /// Has differences written of a guest that has read everything and written one page in
    /// [`WRITTEN`].
    fn diff(&self, size: Size, ability: Ability, live: bool) -> Result<Diff> {
        let name = format!("diff-{}-{live}", ability.name());
        let server = self.serve(Contents::Data, &name, &[])?;
        let mut diff = Diff {
            size,
            ability,
            live,
            ms: Vec::new(),
            whole_ms: Vec::new(),
            stored_pages: 0,
        };
        for round in 0..=self.rounds {
            let mut guest = Guest::start(Some(&server), size, Contents::Data, self.mib, ability)?;
            guest.ask("touch")?;
            guest.ask(&format!("write {WRITTEN}"))?;
            let path = format!("/sessions/{}/diff", server.session()?);
            let body = serde_json::json!({"directory": "layer", "live": live});
            let begun = Instant::now();
            let ms = || begun.elapsed().as_secs_f64() * 1e3;
            let mut told = server.ask("PUT", &path, &body.to_string())?;
            let answered_ms = ms();
            if live {
                told = copied(&server, &path)?;
            }
            let whole_ms = ms();
            let told: serde_json::Value = serde_json::from_str(&told).unwrap_or_default();
            let difference = if live { &told["difference"] } else { &told };
            diff.stored_pages = difference["stored_pages"].as_u64().unwrap_or_default();
            if round > 0 {
                diff.ms.push(answered_ms);
                diff.whole_ms.push(whole_ms);
            }
            drop(guest);
            quiet(&server)?;
        }
        Ok(diff)
    }
}

/// Waits until a live difference is copied; what is told of it.
fn copied(server: &Server, path: &str) -> Result<String> {
    let until = Instant::now() + DEADLINE;
    loop {
        let told = server.ask("GET", path, "")?;
        if told.contains("\"done\"") {
            return Ok(told);
        }
        if told.contains("\"failed\"") || Instant::now() > until {
            return Err(Error::Nothing { what: told });
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Waits until a server has noticed that its guests are gone.
fn quiet(server: &Server) -> Result<()> {
    let until = Instant::now() + DEADLINE;
    while server.count("stillframe_uffd_sessions ")? > 0.0 {
        if Instant::now() > until {
            let what = "a session does not end".to_owned();
            return Err(Error::Nothing { what });
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

fn middle(touched: &[TouchTiming], of: fn(&TouchTiming) -> u64) -> f64 {
    let values = touched.iter().map(|one| of(one) as f64).collect::<Vec<_>>();
    median(&values).unwrap_or_default()
}

fn table(numbers: &Numbers) -> String {
    let machine = &numbers.machine;
    let ability = match numbers.missing_only {
        true => "missing pages are told, writes are not (stock Firecracker)",
        false => "writes are tracked (`wp-async`)",
    };
    let mut out = format!(
        "{} · {} core(s) · kernel {} · images on {}\n\n{} MiB of guest memory, one thread touches \
         every page, from before the hand-off until the last; {ability}. Medians of {} rounds in \
         turn; speed is that of the bare kernel divided by what it took.\n\n| pages | memory | \
         bare kernel, ms | served, ms | speed | goal | `--no-unregister`, ms |\n| --- | --- | ---: \
         | ---: | ---: | ---: | ---: |\n",
        machine.processor,
        machine.cores,
        machine.kernel,
        machine.disk,
        numbers.mib,
        numbers.cells[0].series[0].touched.len(),
    );
    let ms = |series: &Series| middle(&series.touched, |one| one.ns) / 1e6;
    for cell in &numbers.cells {
        let (bare, served) = (ms(&cell.series[0]), ms(&cell.series[1]));
        let goal = cell.workload.goals[usize::from(cell.size == Size::Huge)];
        let missed = goal.is_some_and(|goal| bare / served < goal);
        let goal = goal.map_or(String::new(), |goal| format!("{goal:.2}"));
        let goal = if missed {
            format!("{goal}, missed")
        } else {
            goal
        };
        let other = cell.series.get(2).map(ms);
        let _ = writeln!(
            out,
            "| {} | {} | {bare:.0} | {served:.0} | {:.2} | {goal} | {} |",
            cell.size.title(),
            cell.workload.title,
            bare / served,
            other.map_or(String::new(), |other| format!("{other:.0}")),
        );
    }
    latencies(&mut out, numbers);
    differences(&mut out, numbers);
    out
}

/// How long a guest stands still for a difference.
fn differences(out: &mut String, numbers: &Numbers) {
    if numbers.diffs.is_empty() {
        return;
    }
    let _ = writeln!(
        out,
        "\nA difference, one page in {WRITTEN} written:\n\n| pages | writes | `live` | \
         answered, ms (goal 5) | whole, ms | pages of 4 KiB stored |\n| --- | --- | --- | ---: | \
         ---: | ---: |"
    );
    for diff in &numbers.diffs {
        let middle = |values: &[f64]| median(values).unwrap_or_default();
        let ms = middle(&diff.ms);
        let _ = writeln!(
            out,
            "| {} | `{}` | {} | {ms:.1}{} | {:.1} | {} |",
            diff.size.title(),
            diff.ability.name(),
            if diff.live { "yes" } else { "no" },
            if ms > 5.0 { ", missed" } else { "" },
            middle(&diff.whole_ms),
            diff.stored_pages
        );
    }
}

/// How long single touches take at random places.
fn latencies(out: &mut String, numbers: &Numbers) {
    let _ = writeln!(
        out,
        "\n{RANDOM} pages, or all huge ones, touched in random order:\n\n| \
         pages | memory | by | p50, us | p99, us | longest, us |\n| --- | --- | --- | ---: | ---: \
         | ---: |"
    );
    let cells = numbers.cells.iter();
    for cell in cells.filter(|cell| !cell.workload.removed) {
        for series in &cell.series {
            let us = |of| middle(&series.random, of) / 1e3;
            let _ = writeln!(
                out,
                "| {} | {} | {} | {:.1} | {:.1} | {:.0} |",
                cell.size.title(),
                cell.workload.title,
                match series.by {
                    Fetcher::Bare => "bare kernel",
                    Fetcher::Serve => "`serve`",
                    Fetcher::NoUnregister => "`--no-unregister`",
                    Fetcher::Prefetch => "`--prefetch all`",
                },
                us(|one| one.p50_ns),
                us(|one| one.p99_ns),
                us(|one| one.max_ns),
            );
        }
    }
}
