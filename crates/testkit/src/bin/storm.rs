//! `storm`: tries seeds, one after the other, and tells which fail and what of them matters.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::Parser;
use testkit::stillframe::Stillframe;
use testkit::storm::step::{Step, to_text};
use testkit::storm::trial::{Ended, Variant, class, kept, try_steps};
use testkit::storm::{generate, shrink};

/// How often a list of steps is tried while it is made shorter.
const SHRINK_TRIES: usize = 400;
/// How many failures end the run.
const MOST_FAILURES: usize = 20;

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
    /// How many at a time.
    #[arg(long, default_value_t = 2)]
    jobs: usize,
    /// Find the steps that matter of each that fails.
    #[arg(long)]
    shrink: bool,
    /// How the trees are dumped: plain, running, live, predump, kills; all of them, each seed in
    /// one way, where nothing is said.
    #[arg(long, value_parser = variant)]
    variant: Option<Variant>,
    /// Try the steps of this file instead of seeds.
    #[arg(long)]
    steps: Option<PathBuf>,
    /// Only print the steps of the seeds.
    #[arg(long)]
    print: bool,
    /// The command under test.
    #[arg(long, env = "STILLFRAME_BIN")]
    stillframe: Option<PathBuf>,
    /// Where the steps of those that fail are written.
    #[arg(long, default_value = "target/storm")]
    keep: PathBuf,
}

/// What was found so far.
#[derive(Default)]
struct Found {
    restored: usize,
    kills: usize,
    refused: BTreeMap<String, usize>,
    failures: Vec<String>,
}

fn main() -> ExitCode {
    let mut arguments = Arguments::parse();
    if arguments.stillframe.is_none() {
        let own = std::env::current_exe().expect("/proc is mounted");
        arguments.stillframe = Some(own.with_file_name("stillframe"));
    }
    // What a try panics with is told with its seed.
    std::panic::set_hook(Box::new(|_| {}));
    let found = Mutex::new(Found::default());
    let found = match &arguments.steps {
        Some(path) => {
            let steps = kept(path).expect("the file has a step on each line");
            let variant = arguments.variant.unwrap_or(Variant::Plain);
            let name = path.file_stem().unwrap_or_default().to_string_lossy();
            try_one(&arguments, &name, &steps, variant, &found);
            found
        }
        None => {
            run(&arguments, &found);
            found
        }
    };
    let found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
    for (reason, times) in &found.refused {
        println!("refused {times} times: {reason}");
    }
    let refused: usize = found.refused.values().sum();
    let (restored, failed) = (found.restored, found.failures.len());
    let kills = found.kills;
    println!("{restored} came back, {refused} were refused, {failed} failed, {kills} kills");
    for failure in &found.failures {
        println!("  {failure}");
    }
    ExitCode::from(u8::from(failed > 0))
}

fn variant(name: &str) -> Result<Variant, String> {
    let found = Variant::ALL
        .into_iter()
        .find(|variant| variant.name() == name);
    found.ok_or_else(|| format!("no variant is called {name}"))
}

fn run(arguments: &Arguments, found: &Mutex<Found>) {
    let next = AtomicU64::new(arguments.from);
    let ends = AtomicBool::new(false);
    let start = Instant::now();
    let limit = arguments
        .minutes
        .map(|minutes| Duration::from_secs(minutes * 60));
    std::thread::scope(|scope| {
        for _ in 0..arguments.jobs {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    let late = limit.is_some_and(|limit| start.elapsed() > limit);
                    if seed - arguments.from >= arguments.seeds
                        || late
                        || ends.load(Ordering::Relaxed)
                    {
                        break;
                    }
                    let steps = generate::steps(seed);
                    if arguments.print {
                        print!("# seed {seed}\n{}", to_text(&steps));
                        continue;
                    }
                    let variant = arguments.variant.unwrap_or_else(|| Variant::of_seed(seed));
                    let name = format!("seed-{seed}");
                    let failures = try_one(arguments, &name, &steps, variant, found);
                    ends.fetch_or(failures >= MOST_FAILURES, Ordering::Relaxed);
                    let tried = seed + 1 - arguments.from;
                    if tried.is_multiple_of(50) {
                        let seconds = start.elapsed().as_secs();
                        println!("{tried} tried in {seconds} s, {failures} failed");
                    }
                }
            });
        }
    });
}

/// Tries one list of steps; how many have failed until now.
fn try_one(
    arguments: &Arguments,
    name: &str,
    steps: &[Step],
    variant: Variant,
    found: &Mutex<Found>,
) -> usize {
    let binary = arguments
        .stillframe
        .clone()
        .expect("it was set at the start");
    let stillframe = Stillframe::new(binary);
    let outcome = try_steps(&stillframe, steps, variant);
    let failure = match &outcome {
        Err(failure) => {
            let name = format!("{name}-{}", variant.name());
            let again = |steps: &[Step]| try_steps(&stillframe, steps, variant);
            Some(tell_failure(arguments, &name, steps, failure, again))
        }
        Ok(_) => None,
    };
    let mut found = found.lock().unwrap_or_else(PoisonError::into_inner);
    match outcome {
        Ok(Ended::Restored { kills }) => {
            found.restored += 1;
            found.kills += kills;
        }
        Ok(Ended::Refused(reason)) => {
            *found.refused.entry(class(&reason)).or_default() += 1;
        }
        Err(_) => found.failures.extend(failure),
    }
    found.failures.len()
}

/// Prints a failure, keeps its steps, and shortens them where that is wanted; names it in a line.
fn tell_failure(
    arguments: &Arguments,
    name: &str,
    steps: &[Step],
    failure: &str,
    again: impl Fn(&[Step]) -> Result<Ended, String>,
) -> String {
    let about = class(failure);
    println!("{name} FAILED: {about}\n{failure}\n");
    let _ = std::fs::create_dir_all(&arguments.keep);
    let keep = |ending: &str, steps: &[Step]| {
        let path = arguments.keep.join(format!("{name}.{ending}"));
        if let Err(error) = std::fs::write(&path, to_text(steps)) {
            println!("{}: {error}", path.display());
        }
    };
    keep("steps", steps);
    if arguments.shrink {
        let fails = |steps: &[Step]| again(steps).is_err_and(|failure| class(&failure) == about);
        let short = shrink::shrink(steps, SHRINK_TRIES, fails);
        println!(
            "{name}, {about}, in {} steps:\n{}",
            short.len(),
            to_text(&short)
        );
        keep("short", &short);
    }
    format!("{name}: {about}")
}
