//! `bench process`: which cells are measured, by which programs, and where the results go.
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::error::{Error, Result, file_error, kernel_error};
use crate::machine::{Machine, file_system};
use crate::pair::{Setting, measure};
use crate::record::{Cell, Program, Record, median};
use crate::tool::Tool;
use crate::workload::{self, Cache, Medium, Workload};
use crate::{compress, isolate, peer, report};

/// What is measured.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    choice: Choice,
    /// Fewer rounds; the results go to target/bench instead of docs.
    #[arg(long)]
    quick: bool,
    /// Samples of each program in each cell.
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// Only with the peer's cache, or only without it.
    #[arg(long)]
    cache: Option<Cache>,
    /// Where the table and the numbers are written.
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

/// What both the outer and the inner part have to know.
#[derive(clap::Args)]
pub struct Choice {
    /// Pair one program with itself: shows what differences mean nothing; or with each codec.
    #[arg(long, value_name = "PROGRAM", value_parser = ["criu", "stillframe", "codecs"])]
    pub only: Option<String>,
    /// Only these workloads.
    #[arg(long = "workload", value_name = "NAME")]
    pub workloads: Vec<String>,
    /// Only these media.
    #[arg(long = "medium", value_name = "NAME")]
    pub media: Vec<Medium>,
    /// Measure and count without the cache as much as with it.
    #[arg(long, hide = true)]
    pub cold_as_well: bool,
    /// The Debian suite that the peer is from.
    #[arg(long, default_value = "sid")]
    pub suite: String,
    /// Where peers are unpacked.
    #[arg(
        long,
        value_name = "FOLDER",
        default_value = "/var/cache/stillframe/peers"
    )]
    pub peers: PathBuf,
    /// The stillframe that is measured; without this, the one that STILLFRAME_BIN names.
    #[arg(long, value_name = "PATH")]
    pub stillframe: Option<PathBuf>,
    /// Another stillframe, an older one for example, that it is paired with instead of the peer.
    #[arg(long, value_name = "PATH", conflicts_with = "only")]
    pub against: Option<PathBuf>,
}

/// What the measuring part is told.
#[derive(clap::Args)]
pub struct InnerArguments {
    #[command(flatten)]
    choice: Choice,
    #[arg(long)]
    rounds: usize,
    #[arg(long)]
    cache: Cache,
    /// Where the numbers are written.
    #[arg(long)]
    numbers: PathBuf,
}

/// Prepares the peer, measures with and without its cache, and writes the results.
///
/// # Errors
/// When the peer cannot be prepared or anything fails that is measured.
pub fn run(arguments: &Arguments) -> Result<()> {
    let choice = &arguments.choice;
    let rounds = rounds(arguments.rounds, arguments.quick);
    let record = measure_all(choice, rounds, arguments.cache)?;
    let passing = arguments.quick || choice.only.is_some() || choice.against.is_some();
    report::write(&record, &report::folder(arguments.out.as_deref(), passing))
}

/// How many rounds are measured: as many as were asked for, or those of a full or a `quick`
/// measurement.
pub fn rounds(asked: Option<usize>, quick: bool) -> usize {
    const ROUNDS: usize = 15;
    const QUICK_ROUNDS: usize = 3;
    asked.unwrap_or(if quick { QUICK_ROUNDS } else { ROUNDS })
}

/// Prepares the peer and measures what was chosen, with its cache and without it.
///
/// # Errors
/// Those of [`run`].
pub fn measure_all(choice: &Choice, rounds: usize, only: Option<Cache>) -> Result<Record> {
    tools(choice, scratch_in("/var/tmp")?.path())?;
    let scratch = tempfile::tempdir().map_err(kernel_error("make a scratch folder"))?;
    let mut all: Option<Record> = None;
    for cache in [Cache::Warm, Cache::Cold] {
        if only.is_some_and(|only| only != cache) {
            continue;
        }
        let numbers = scratch.path().join("numbers.json");
        isolate::run_again(&words(choice, rounds, cache, &numbers))?;
        let record = Record::read(&numbers)?;
        match &mut all {
            Some(all) => all.cells.extend(record.cells),
            None => all = Some(record),
        }
    }
    let all = all.filter(|record| !record.cells.is_empty());
    all.ok_or_else(|| Error::Nothing {
        what: "nothing was chosen to be measured".into(),
    })
}

/// The measuring part, in a mount namespace of its own.
///
/// # Errors
/// When anything fails that is measured.
pub fn run_inside(arguments: &InnerArguments) -> Result<()> {
    isolate::close_inherited()?;
    // Subjects come back to this process when their starter is gone, so that it can reap them.
    rustix::process::set_child_subreaper(Some(rustix::process::getpid()))
        .map_err(kernel_error("become a subreaper"))?;
    let choice = &arguments.choice;
    let disk = scratch_in("/var/tmp")?;
    let tools = tools(choice, disk.path())?;
    let memory = scratch_in("/dev/shm")?;
    if file_system(memory.path()).as_deref() != Some("tmpfs") {
        return Err(Error::Nothing {
            what: "/dev/shm is no tmpfs".into(),
        });
    }
    isolate::prepare_run(arguments.cache, disk.path())?;
    let mut cells = Vec::new();
    for (workload, medium) in chosen(choice, arguments.cache)? {
        let folder = if medium == Medium::Tmpfs {
            memory.path()
        } else {
            disk.path()
        };
        let start = Instant::now();
        let cell = measure(&Setting {
            workload,
            medium,
            cache: arguments.cache,
            tools: &tools,
            counted: cache_is_counted(arguments),
            rounds: arguments.rounds,
            folder: folder.to_path_buf(),
            said: disk.path().join("said"),
        })?;
        print_progress(&cell, &tools, start);
        cells.push(cell);
    }
    let programs = tools.iter().map(|tool| Program {
        name: tool.name.clone(),
        version: tool.version.clone(),
    });
    let record = Record {
        machine: Machine::this(disk.path()),
        tools: programs.collect(),
        rounds: arguments.rounds,
        cells,
    };
    record.write(&arguments.numbers)
}

fn cache_is_counted(arguments: &InnerArguments) -> bool {
    arguments.cache == Cache::Warm || arguments.choice.cold_as_well
}

/// Returns the programs in the order of their turns: the peer, and ours.
fn tools(choice: &Choice, folder: &Path) -> Result<Vec<Tool>> {
    let stillframe = || {
        let named = std::env::var_os("STILLFRAME_BIN").map(PathBuf::from);
        let Some(program) = choice.stillframe.clone().or(named) else {
            let what = "name a stillframe with --stillframe or STILLFRAME_BIN".into();
            return Err(Error::Nothing { what });
        };
        peer::stillframe(&installed(&program, &folder.join("stillframe"))?)
    };
    if let Some(older) = &choice.against {
        let older = peer::stillframe(&installed(older, &folder.join("against"))?)?;
        let name = "against".into();
        return Ok(vec![Tool { name, ..older }, stillframe()?]);
    }
    let twice = |tool: Tool| {
        let again = Tool {
            name: format!("{} again", tool.name),
            ..tool.clone()
        };
        vec![tool, again]
    };
    match choice.only.as_deref() {
        Some("criu") => Ok(twice(peer::criu(&choice.suite, &choice.peers)?)),
        Some("codecs") => Ok(compress::tools(&stillframe()?)),
        Some(_) => Ok(twice(stillframe()?)),
        None => Ok(vec![
            peer::criu(&choice.suite, &choice.peers)?,
            stillframe()?,
        ]),
    }
}

/// A copy of a program as an installed one is: written in one piece. What a linker wrote here and
/// there lies in small pieces in the page cache too, and takes 70 microseconds longer to start.
fn installed(program: &Path, copy: &Path) -> Result<PathBuf> {
    std::fs::copy(program, copy).map_err(file_error("copy to", copy))?;
    Ok(copy.to_path_buf())
}

fn chosen(choice: &Choice, cache: Cache) -> Result<Vec<(&'static Workload, Medium)>> {
    for name in &choice.workloads {
        if Workload::find(name).is_none() {
            return Err(Error::Nothing {
                what: format!("there is no workload {name}"),
            });
        }
    }
    let mut cells = Vec::new();
    for workload in workload::ALL {
        let wanted = (choice.workloads.is_empty() && !workload.is_text)
            || choice.workloads.iter().any(|name| name == workload.name);
        for medium in workload.media {
            let wanted_there = choice.media.is_empty() || choice.media.contains(medium);
            // Without the cache everything takes the same time longer: one cell shows how much.
            let shown = cache == Cache::Warm
                || choice.cold_as_well
                || (workload.cold && *medium == Medium::Tmpfs);
            if wanted && wanted_there && shown {
                cells.push((workload, *medium));
            }
        }
    }
    Ok(cells)
}

fn words(choice: &Choice, rounds: usize, cache: Cache, numbers: &Path) -> Vec<OsString> {
    let mut words: Vec<OsString> = vec!["inside".into()];
    let mut add = |name: &str, value: OsString| words.extend([name.into(), value]);
    add("--rounds", rounds.to_string().into());
    add("--cache", name_of(cache).into());
    add("--numbers", numbers.into());
    add("--suite", choice.suite.clone().into());
    add("--peers", choice.peers.clone().into());
    if let Some(program) = &choice.stillframe {
        add("--stillframe", program.into());
    }
    if let Some(older) = &choice.against {
        add("--against", older.into());
    }
    if let Some(only) = &choice.only {
        add("--only", only.into());
    }
    for workload in &choice.workloads {
        add("--workload", workload.into());
    }
    for medium in &choice.media {
        add("--medium", name_of(*medium).into());
    }
    if choice.cold_as_well {
        words.push("--cold-as-well".into());
    }
    words
}

/// Returns a value's name on the command line.
pub fn name_of(value: impl clap::ValueEnum) -> String {
    let possible = value.to_possible_value().expect("no value is hidden");
    possible.get_name().to_string()
}

fn scratch_in(folder: &str) -> Result<tempfile::TempDir> {
    tempfile::Builder::new()
        .prefix("stillframe-bench-")
        .tempdir_in(folder)
        .map_err(file_error("make a scratch folder in", Path::new(folder)))
}

fn print_progress(cell: &Cell, tools: &[Tool], start: Instant) {
    let place = format!(
        "{} {} {}",
        cell.workload,
        name_of(cell.medium),
        name_of(cell.cache)
    );
    eprintln!("{place}: {:.0} s", start.elapsed().as_secs_f64());
    for (tool, series) in tools.iter().zip(&cell.series) {
        let ms = |numbers: &[f64]| median(numbers).unwrap_or(f64::NAN);
        eprintln!(
            "  {:12} dump {:8.2} ms  plan {:6.2} ms  frozen {:8.2} ms  restore {:8.2} ms  \
             runs again {:8.2} ms",
            tool.name,
            ms(&series.dump_ms),
            ms(&series.plan_ms),
            ms(&series.frozen_ms),
            ms(&series.restore_ms),
            ms(&series.runs_again_ms),
        );
    }
}
