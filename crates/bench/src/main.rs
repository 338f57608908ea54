//! Paired runs against peers: the same subjects, dumped and restored in turn by two programs.
//!
//! `bench process` prepares the peer ([`peer`]), enters a mount namespace of its own ([`isolate`]),
//! starts subjects ([`subject`], [`target`]), lets each program dump and restore them ([`pair`]),
//! counts their system calls ([`calls`]) and writes what it found ([`record`], [`report`],
//! [`plot`]). Start it with `cargo xtask bench process`. `bench chain` reads long chains of layers
//! ([`chain`]). `bench predump` and `bench live` watch what a target that writes ([`writer`]) and
//! the clients of a server ([`redis`]) notice of being saved ([`rounds`]).
//! `bench vdso` tells what it costs to know the host ([`vdso`]), `bench resolver` what it takes to
//! get pages out of an image ([`resolver`]), and `bench compress` what codecs cost and save
//! ([`compress`]), `bench lazy` how soon a target runs whose memory comes later ([`lazy`],
//! [`looker`]), and `bench uffd` how a microVM's memory is served ([`uffd`], [`serving`],
//! [`guest`]). `bench volume` tells how fast a file system is saved and brought back ([`volume`]),
//! `bench vm` what it takes to save and start a machine under QEMU ([`vm`], [`monitor`]). Every
//! run's numbers are kept ([`runs`]).
#![forbid(unsafe_code)]

mod calls;
mod chain;
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
mod plot;
mod predump;
mod record;
mod redis;
mod report;
mod resolver;
mod rounds;
mod runs;
mod serving;
mod subject;
mod suite;
mod target;
mod text;
mod tool;
mod uffd;
mod vdso;
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
    /// Measure what a long chain of layers costs its readers.
    Chain(chain::Arguments),
    /// Measure rounds of a pre-dump and the dump over them.
    Predump(rounds::Arguments),
    /// Measure dumps of targets that go on meanwhile.
    Live(rounds::Arguments),
    /// Measure what it costs to know the host, with what is remembered of it and without.
    Vdso(vdso::Arguments),
    /// Measure dumps and restores of text with each codec.
    Compress(compress::Arguments),
    /// Measure what it takes to get pages out of an image.
    Resolver(resolver::Arguments),
    /// Measure restores whose memory comes after the tree, beside those that bring it at once.
    Lazy(lazy::Arguments),
    /// Measure how a microVM's memory is served through a userfaultfd.
    Uffd(uffd::Arguments),
    /// Measure how fast a volume is saved and brought back.
    Volume(volume::Arguments),
    /// Measure saves and restores of a machine under QEMU, beside QEMU's own.
    Vm(vm::Arguments),
    /// Write the table and the plot from kept numbers again.
    Report(report::Arguments),
    /// Run the measuring part; `process` starts it in a mount namespace of its own.
    #[command(hide = true)]
    Inside(suite::Inside),
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
        Task::Chain(arguments) => chain::run(&arguments),
        Task::Predump(arguments) => predump::run(&arguments),
        Task::Live(arguments) => live::run(&arguments),
        Task::Vdso(arguments) => vdso::run(&arguments),
        Task::Compress(arguments) => compress::run(&arguments),
        Task::Resolver(arguments) => resolver::run(&arguments),
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
