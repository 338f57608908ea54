//! Paired runs against peers: the same subjects, dumped and restored in turn by two programs.
//!
//! `bench process` prepares the peer ([`peer`]), enters a mount namespace of its own ([`isolate`]),
//! starts subjects ([`subject`], [`target`]), lets each program dump and restore them ([`pair`]),
//! counts their system calls ([`calls`]) and writes the results ([`record`], [`report`]). Start it
//! with `cargo xtask bench process`. `bench predump` and `bench live` measure how long a target
//! that writes ([`writer`]) and the clients of a server ([`redis`]) wait during saves ([`rounds`]).
//! `bench compress` measures the cost of codecs ([`compress`]), `bench lazy` how soon a target runs
//! whose memory arrives later ([`lazy`], [`looker`]), and `bench uffd` how the memory of a microVM
//! is served ([`uffd`], [`serving`], [`guest`]). `bench volume` measures saves and restores of a
//! file system ([`volume`]), `bench vm` those of a machine under QEMU ([`vm`], [`monitor`]). The
//! numbers of every run are kept ([`runs`]).
#![forbid(unsafe_code)]

mod calls;
mod compress;
mod error;
mod furnishing;
mod guest;
mod isolate;
mod lazy;
mod live;
mod looker;
mod machine;
mod monitor;
mod pair;
mod peer;
mod predump;
mod record;
mod redis;
mod report;
mod rounds;
mod runs;
mod serving;
mod subject;
mod suite;
mod target;
mod text;
mod tool;
mod uffd;
mod vm;
mod volume;
mod workload;
mod writer;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Paired runs against peers.
#[derive(Parser)]
#[command(name = "bench", version)]
struct Arguments {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Measure dump and restore of process trees.
    Process(suite::Arguments),
    /// Measure rounds of a pre-dump and the dump over them.
    Predump(rounds::Arguments),
    /// Measure dumps of targets that go on meanwhile.
    Live(rounds::Arguments),
    /// Measure dumps and restores of text with each codec.
    Compress(compress::Arguments),
    /// Measure restores whose memory comes after the tree, beside those that bring it at once.
    Lazy(lazy::Arguments),
    /// Measure how a microVM's memory is served through a userfaultfd.
    Uffd(uffd::Arguments),
    /// Measure how fast a volume is saved and brought back.
    Volume(volume::Arguments),
    /// Measure saves and restores of a machine under QEMU, beside QEMU's own.
    Vm(vm::Arguments),
    /// Write the table from kept numbers again.
    Report(report::Arguments),
    /// Run the measuring part; `process` starts it in a mount namespace of its own.
    #[command(hide = true)]
    Inside(suite::InnerArguments),
    /// Be what is measured.
    #[command(hide = true)]
    Subject(subject::Arguments),
    /// Be what writes while it is measured.
    #[command(hide = true)]
    Writer(writer::Arguments),
    /// Be what looks at its memory once it was restored.
    #[command(hide = true)]
    Looker(looker::Arguments),
    /// Be whose memory is served while it is measured.
    #[command(hide = true)]
    Guest(guest::Arguments),
}

fn main() -> ExitCode {
    let done = match Arguments::parse().task {
        Task::Process(arguments) => suite::run(&arguments),
        Task::Predump(arguments) => predump::run(&arguments),
        Task::Live(arguments) => live::run(&arguments),
        Task::Compress(arguments) => compress::run(&arguments),
        Task::Lazy(arguments) => lazy::run(&arguments),
        Task::Looker(arguments) => looker::run(&arguments),
        Task::Uffd(arguments) => uffd::run(&arguments),
        Task::Volume(arguments) => volume::run(&arguments),
        Task::Vm(arguments) => vm::run(&arguments),
        Task::Report(arguments) => report::run(&arguments),
        Task::Inside(arguments) => suite::run_inside(&arguments),
        Task::Subject(arguments) => subject::run(&arguments),
        Task::Writer(arguments) => writer::run(&arguments),
        Task::Guest(arguments) => guest::run(&arguments),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
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
