//! `storm`: tries seeds, one after the other, and tells which fail and what of them matters.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use serde::{Deserialize, Serialize};
use testkit::huge_pages::HugePages;
use testkit::stillframe::Stillframe;
use testkit::storm::step::{Step, to_text};
use testkit::storm::trial::{TrialOutcome, Variant, class, kept, to_keep, try_steps};
use testkit::storm::workers::{self, Worker};
use testkit::storm::{generate, shrink};

/// How often a list of steps is tried while it is made shorter.
const SHRINK_TRIES: usize = 400;
/// How many failures end a worker.
const MOST_FAILURES: usize = 20;
/// How often a worker tells how far it is.
const TELL_EVERY: usize = 50;

/// How small subjects are tried.
const WAYS: [Variant; 4] = [
    Variant::Plain,
    Variant::Running,
    Variant::Live,
    Variant::Predump,
];

/// Tries seeds: each is made, dumped, restored and compared at its pauses.
#[derive(Parser)]
struct Arguments {
    /// How many seeds.
    #[arg(long, default_value_t = 100)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// Stop after this many minutes.
    #[arg(long)]
    minutes: Option<u64>,
    /// How many at a time, each in namespaces of its own.
    #[arg(long, default_value_t = 2)]
    jobs: u64,
    /// Try one after the other in the namespaces that this was started in: nothing else there may
    /// start processes or make terminals meanwhile.
    #[arg(long)]
    shared: bool,
    /// Find the steps that matter of each that fails.
    #[arg(long)]
    shrink: bool,
    /// How the trees are dumped: plain, running, live, predump, kills, stalls; all of them, each
    /// seed in one way, where nothing is said, and steps as their file says.
    #[arg(long, value_parser = variant)]
    variant: Option<Variant>,
    /// Try the steps of these files instead of seeds.
    #[arg(long, num_args = 1..)]
    steps: Vec<PathBuf>,
    /// Try the small subjects, each about one thing, instead of seeds: each in one of the ways that
    /// kill nothing, or in that which is said.
    #[arg(long, conflicts_with = "steps")]
    states: bool,
    /// Each of them in all of these ways.
    #[arg(long, requires = "states")]
    all_ways: bool,
    /// Only those whose name has this in it.
    #[arg(long, requires = "states", default_value = "")]
    named: String,
    /// Only print the steps of the seeds.
    #[arg(long)]
    print: bool,
    /// The command under test.
    #[arg(long, env = "STILLFRAME_BIN")]
    stillframe: Option<PathBuf>,
    /// Where the steps of those that fail are written.
    #[arg(long, default_value = "target/storm")]
    keep: PathBuf,
    /// Which of several workers this is.
    #[arg(long, hide = true, value_parser = Worker::parse, requires = "report")]
    worker: Option<Worker>,
    /// Where a worker writes what it found.
    #[arg(long, hide = true)]
    report: Option<PathBuf>,
}

/// What was found.
#[derive(Default, Serialize, Deserialize)]
struct StormSummary {
    /// Those that came back, and the kills and stops on their way, by variant.
    restored: BTreeMap<String, Count>,
    refused: BTreeMap<String, usize>,
    failures: Vec<String>,
}

#[derive(Clone, Copy, Default, Serialize, Deserialize)]
struct Count {
    seeds: usize,
    kills: usize,
    stalls: usize,
}

/// Something to try.
struct Item {
    name: String,
    steps: Vec<Step>,
    variant: Variant,
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    if arguments.print {
        for seed in arguments.from..arguments.from + arguments.seeds {
            print!("# seed {seed}\n{}", to_text(&generate::steps(seed)));
        }
        return ExitCode::SUCCESS;
    }
    let found = match arguments.worker {
        Some(worker) => return run_worker(&arguments, worker),
        None if arguments.shared => try_all(&arguments, Worker { number: 0, of: 1 }),
        None => run_workers(arguments.jobs),
    };
    match found {
        Ok(found) => found.tell(),
        Err(error) => {
            eprintln!("storm: {error}");
            ExitCode::FAILURE
        }
    }
}

fn variant(name: &str) -> Result<Variant, String> {
    Variant::of_name(name).ok_or_else(|| format!("no variant is called {name}"))
}

/// Starts all workers, and puts together what they find.
fn run_workers(jobs: u64) -> Result<StormSummary, Box<dyn Error>> {
    /// For each job as many segments as there may be, of two pages at most.
    const HUGE_PAGES: u64 = 16;
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    // Without them there are no segments of huge pages.
    let _huge_pages = HugePages::reserve(jobs.max(1) * HUGE_PAGES);
    let folder = tempfile::tempdir()?;
    let report = |number: u64| folder.path().join(number.to_string());
    let mut workers = Vec::new();
    for number in 0..jobs.max(1) {
        let worker = Worker {
            number,
            of: jobs.max(1),
        };
        workers.push(worker.start(&arguments, &report(number))?);
    }
    let mut all = StormSummary::default();
    for (mut worker, number) in workers.into_iter().zip(0..) {
        // Its other end tells the worker to end: not before it does by itself.
        let stays = worker.stdin.take();
        let status = worker.wait()?;
        drop(stays);
        let text = std::fs::read_to_string(report(number))
            .map_err(|_| format!("a worker has ended without a word ({status}); see --shared"))?;
        all.add(serde_json::from_str(&text)?);
    }
    Ok(all)
}

/// Tries what is this worker's, and writes what was found.
fn run_worker(arguments: &Arguments, worker: Worker) -> ExitCode {
    let done = workers::enter().map_err(Into::into).and_then(|()| {
        let found = try_all(arguments, worker)?;
        let report = arguments.report.as_ref().ok_or("a report is wanted")?;
        Ok::<_, Box<dyn Error>>(std::fs::write(report, serde_json::to_string(&found)?)?)
    });
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("storm: worker {}: {error}", worker.text());
            ExitCode::FAILURE
        }
    }
}

fn try_all(arguments: &Arguments, worker: Worker) -> Result<StormSummary, Box<dyn Error>> {
    // What a try panics with is told with its seed.
    std::panic::set_hook(Box::new(|_| {}));
    let start = Instant::now();
    let limit = arguments
        .minutes
        .map(|minutes| Duration::from_secs(minutes * 60));
    let all = match arguments.steps.len() as u64 {
        0 if arguments.states => {
            let ways = if arguments.all_ways { WAYS.len() } else { 1 };
            (arguments.states().len() * ways) as u64
        }
        0 => arguments.seeds,
        files => files,
    };
    let mut found = StormSummary::default();
    for (index, tried) in (0..all).filter(|&index| worker.has(index)).zip(1..) {
        if limit.is_some_and(|limit| start.elapsed() > limit)
            || found.failures.len() >= MOST_FAILURES
        {
            break;
        }
        try_one(arguments, &arguments.item(index)?, &mut found);
        if usize::is_multiple_of(tried, TELL_EVERY) {
            let (seconds, failed) = (start.elapsed().as_secs(), found.failures.len());
            println!(
                "worker {}: {tried} tried in {seconds} s, {failed} failed",
                worker.text()
            );
        }
    }
    Ok(found)
}

impl Arguments {
    /// What is tried as the `index`-th.
    fn item(&self, index: u64) -> Result<Item, Box<dyn Error>> {
        if let Some(path) = self.steps.get(index as usize) {
            let (steps, variant) =
                kept(path).map_err(|error| format!("{}: {error}", path.display()))?;
            return Ok(Item {
                name: path
                    .file_stem()
                    .unwrap_or_default()
                    .to_string_lossy()
                    .into(),
                steps,
                variant: self.variant.unwrap_or(variant),
            });
        }
        if self.states {
            let all = self.states();
            let (at, way) = (index as usize % all.len(), index as usize / all.len());
            let generate::State { name, steps } = all[at].clone();
            let way = WAYS[(at + way) % WAYS.len()];
            let variant = self.variant.unwrap_or(way);
            return Ok(Item {
                name,
                steps,
                variant,
            });
        }
        let seed = self.from + index;
        Ok(Item {
            name: format!("seed-{seed}"),
            steps: generate::steps(seed),
            variant: self.variant.unwrap_or_else(|| Variant::of_seed(seed)),
        })
    }

    /// The small subjects that are wanted.
    fn states(&self) -> Vec<generate::State> {
        let mut all = generate::states();
        all.retain(|state| state.name.contains(&self.named));
        all
    }

    fn binary(&self) -> PathBuf {
        let beside = || {
            let own = std::env::current_exe().expect("/proc is mounted");
            own.with_file_name("stillframe")
        };
        self.stillframe.clone().unwrap_or_else(beside)
    }
}

fn try_one(arguments: &Arguments, item: &Item, found: &mut StormSummary) {
    let stillframe = Stillframe::new(arguments.binary());
    let again = |steps: &[Step]| try_steps(&stillframe, steps, item.variant);
    match again(&item.steps) {
        Ok(TrialOutcome::Restored { kills, stalls }) => {
            let name = item.variant.name().to_owned();
            let count = found.restored.entry(name).or_default();
            count.seeds += 1;
            count.kills += kills;
            count.stalls += stalls;
        }
        Ok(TrialOutcome::Refused(reason)) => *found.refused.entry(class(&reason)).or_default() += 1,
        Err(failure) => {
            let told = tell_failure(arguments, item, &failure, again);
            found.failures.push(told);
        }
    }
}

/// Prints a failure, keeps its steps, and shortens them where that is wanted; names it in a line.
fn tell_failure(
    arguments: &Arguments,
    item: &Item,
    failure: &str,
    again: impl Fn(&[Step]) -> Result<TrialOutcome, String>,
) -> String {
    let about = class(failure);
    let name = format!("{}-{}", item.name, item.variant.name());
    println!("{name} FAILED: {about}\n{failure}\n");
    keep(
        &arguments.keep,
        &format!("{name}.steps"),
        &item.steps,
        item.variant,
    );
    if arguments.shrink {
        let fails = |steps: &[Step]| again(steps).is_err_and(|failure| class(&failure) == about);
        let short = shrink::shrink(&item.steps, SHRINK_TRIES, fails);
        let (steps, text) = (short.len(), to_text(&short));
        println!("{name}, {about}, in {steps} steps:\n{text}");
        keep(
            &arguments.keep,
            &format!("{name}.short"),
            &short,
            item.variant,
        );
    }
    format!("{name}: {about}")
}

fn keep(folder: &Path, name: &str, steps: &[Step], variant: Variant) {
    let path = folder.join(name);
    let kept = std::fs::create_dir_all(folder)
        .and_then(|()| std::fs::write(&path, to_keep(steps, variant)));
    if let Err(error) = kept {
        println!("{}: {error}", path.display());
    }
}

impl StormSummary {
    fn add(&mut self, other: Self) {
        for (name, count) in other.restored {
            let sum = self.restored.entry(name).or_default();
            sum.seeds += count.seeds;
            sum.kills += count.kills;
            sum.stalls += count.stalls;
        }
        for (reason, times) in other.refused {
            *self.refused.entry(reason).or_default() += times;
        }
        self.failures.extend(other.failures);
    }

    fn tell(&self) -> ExitCode {
        for (reason, times) in &self.refused {
            println!("refused {times} times: {reason}");
        }
        for (name, count) in &self.restored {
            let Count {
                seeds,
                kills,
                stalls,
            } = count;
            println!("{name}: {seeds} came back, {kills} kills, {stalls} stops");
        }
        let refused: usize = self.refused.values().sum();
        let restored: usize = self.restored.values().map(|count| count.seeds).sum();
        let kills: usize = self.restored.values().map(|count| count.kills).sum();
        let failed = self.failures.len();
        let stalls: usize = self.restored.values().map(|count| count.stalls).sum();
        println!(
            "{restored} came back, {refused} were refused, {failed} failed, {kills} kills, \
             {stalls} stops"
        );
        for failure in &self.failures {
            println!("  {failure}");
        }
        ExitCode::from(u8::from(failed > 0))
    }
}
