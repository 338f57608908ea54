//! Real programs, dumped and restored in the middle of their work: `cargo xtask programs`.
//!
//! - [`list`] says which programs there are and what each does;
//! - [`steps`] and [`serve`] are the two shapes of work: lines that must be those of an
//!   undisturbed run, and clients that must get the right answers; [`database`] and [`emulator`]
//!   start special ones;
//! - [`trial`] takes one program through cycles in one [`trial::SaveMethod`];
//! - [`table`] prints what came out, as in docs/programs.md;
//! - [`cleaner`] removes everything, however this process ends.

#![forbid(unsafe_code)]

mod cleaner;
mod clients;
mod database;
mod emulator;
mod error;
mod list;
mod serve;
mod steps;
mod table;
mod trial;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::Parser;
use testkit::program::Spawned;

use crate::error::{Error, Result, failure};
use crate::list::{PROGRAMS, Start};
use crate::trial::{SaveMethod, Trial};

/// Real programs, dumped and restored in the middle of their work.
#[derive(Parser)]
#[command(name = "cargo xtask programs")]
struct Arguments {
    /// Only these programs.
    names: Vec<String>,
    /// How often each is dumped and restored in each way.
    #[arg(long, default_value_t = 10)]
    cycles: usize,
    /// Only in these ways.
    #[arg(long, value_enum)]
    way: Vec<SaveMethod>,
    /// Keep the folders and the images of programs that fail.
    #[arg(long)]
    keep: bool,
    /// Name the programs and end.
    #[arg(long)]
    list: bool,
    /// Name the packages that they need and end.
    #[arg(long, hide = true)]
    packages: bool,
}

/// A package of Debian's, the program of it that is used, and what for.
pub struct Package {
    /// Its name in Debian.
    pub name: &'static str,
    /// The program that is looked for: where it is there, nothing is installed.
    pub program: &'static str,
    /// Why it is tried.
    pub reason: &'static str,
    /// The services that it would start.
    pub services: &'static [&'static str],
}

/// A program that does something which must go on.
pub struct Program {
    /// What it is called on the command line and in the table.
    pub name: &'static str,
    /// What it is doing, for the table.
    pub doing: &'static str,
    /// Where it comes from.
    pub packages: &'static [Package],
    /// What dumps and restores need to be allowed.
    pub options: &'static [&'static str],
    /// Why what a live dump saved cannot be restored later, if it cannot.
    pub moves_on: Option<&'static str>,
    /// How it is started.
    pub start: Start,
}

impl Program {
    /// Starts it in an empty folder of its own.
    fn start(&self, folder: &Path) -> Result<Box<dyn Work>> {
        match &self.start {
            Start::Steps(recipe) => recipe.start(folder),
            Start::Serve(recipe) => recipe.start(folder),
            Start::Own(start) => start(folder),
        }
    }
}

/// A started program; dropping it kills it.
pub trait Work {
    /// Its tree.
    fn spawned(&self) -> &Spawned;

    /// What it has done so far: a number that grows while it runs, and stands still otherwise.
    ///
    /// # Errors
    /// When something that it did is wrong.
    fn progress(&mut self) -> Result<u64>;

    /// Is told that it was killed and an older state of it restored, from a live image.
    fn rewound(&mut self) {}

    /// Ends it, and checks all that it did.
    ///
    /// # Errors
    /// When something is wrong.
    fn finish(&mut self) -> Result<()>;
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Tries the programs, prints the table, and removes everything.
fn run(arguments: &Arguments) -> Result<()> {
    let programs = chosen(&arguments.names)?;
    if arguments.list {
        table::print_names();
        return Ok(());
    }
    if arguments.packages {
        table::print_packages(&programs);
        return Ok(());
    }
    let binary = std::env::var_os(testkit::stillframe::VARIABLE);
    let binary = binary.ok_or_else(|| failure("run it as `cargo xtask programs`"))?;
    let cleaner = cleaner::Cleaner::start(arguments.keep)?;
    let ways = match arguments.way.as_slice() {
        [] => SaveMethod::ALL,
        ways => ways,
    };
    let mut reports = Vec::new();
    for program in programs {
        for &way in ways {
            let binary = PathBuf::from(&binary);
            let trial = Trial::new(program, way, arguments.cycles, binary, cleaner.folder());
            let report = trial.run();
            eprintln!("{}", table::sentence(&report));
            reports.push(report);
        }
    }
    println!("{}", table::markdown(&reports));
    let failed = reports.iter().filter(|report| report.has_failed()).count();
    cleaner.finish(failed > 0);
    match failed {
        0 => Ok(()),
        failed => Err(Error::Programs { failed }),
    }
}

/// The programs that are named, or all.
fn chosen(names: &[String]) -> Result<Vec<&'static Program>> {
    if names.is_empty() {
        return Ok(PROGRAMS.iter().collect());
    }
    names
        .iter()
        .map(|name| {
            let found = PROGRAMS.iter().find(|program| program.name == name);
            found.ok_or_else(|| failure(format!("no program {name}: --list names them")))
        })
        .collect()
}
