//! Everything a developer runs: `cargo xtask test`, `ci`, `kernels`, `tidy`, `demo` and others.
//!
//! Each subcommand is one file; what they share is [`repo`] (where things are, how programs are
//! run) and [`packages`] (what is installed from Debian, and why).
#![forbid(unsafe_code)]

mod ci;
mod debian;
mod demo;
mod dist;
mod emulators;
mod error;
mod kernels;
mod leftover;
mod machines;
mod measure;
mod packages;
mod programs;
mod programs_32;
mod repo;
mod storm;
mod test;
mod tidy;
mod vdso;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Everything a developer runs.
#[derive(Parser)]
#[command(name = "cargo xtask", version)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Install what the tests need, build the release binary, run every test of the workspace.
    Test(test::Arguments),
    /// tidy, clippy, fmt --check and test: what has to pass before a change lands.
    Ci,
    /// Have a tree go round all kernels that the emulator boots, and back to this one.
    Kernels,
    /// What is tested of machines under QEMU and takes long, and the rest with a newer QEMU.
    Machines,
    /// Check the invariants of the source tree.
    Tidy(tidy::Arguments),
    /// Freeze and restore a real redis-server with a connected client.
    Demo(demo::Arguments),
    /// Dump and restore trees that are made from seeds; docs/testing.md.
    Storm(storm::Arguments),
    /// Attack the page server of microVMs; docs/testing.md.
    ServeStorm(storm::Arguments),
    /// Dump and restore real programs in the middle of their work.
    Programs(programs::Arguments),
    /// Measure against a peer; the results go to docs/benchmarks.md.
    Bench(measure::Arguments),
    /// Write the static release binary, its completions and its man page into one folder.
    Dist(dist::Arguments),
}

fn main() -> ExitCode {
    let done = match Arguments::parse().task {
        Task::Test(arguments) => test::run(&arguments),
        Task::Ci => ci::run(),
        Task::Kernels => kernels::run(),
        Task::Machines => machines::run(),
        Task::Tidy(arguments) => tidy::run(&arguments),
        Task::Demo(arguments) => demo::run(&arguments),
        Task::Storm(arguments) => storm::OF_TREES.run(&arguments),
        Task::ServeStorm(arguments) => storm::OF_SERVE.run(&arguments),
        Task::Programs(arguments) => programs::run(&arguments),
        Task::Bench(arguments) => measure::run(&arguments),
        Task::Dist(arguments) => dist::run(&arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        // The runner's closing line stays the last one: what failed was printed above it.
        Err(error::Error::Tests { .. }) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("error: {error}");
            let mut source = std::error::Error::source(&error);
            while let Some(cause) = source {
                eprintln!("  because: {cause}");
                source = cause.source();
            }
            ExitCode::FAILURE
        }
    }
}
