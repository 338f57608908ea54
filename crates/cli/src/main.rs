//! The stillframe command: reads the command line, calls the engine, tells how it went.
//!
//! One file per command ([`dump`], [`pre_dump`], [`restore`], [`check`], [`show`], [`merge`],
//! [`dedup`], [`network`], [`cpuinfo`], [`import`], [`export`], [`serve`],
//! [`lazy_pages`], [`machine`], [`volume`], [`rpc`], [`generate`]). The command line is criu(8)'s:
//! [`reading`] understands it with the table in [`criu`], [`config`] adds the configuration files.
//! [`exit`] picks exit statuses; nothing else in the workspace prints.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), no_main)]

mod bar;
mod check;
mod command_line;
mod config;
mod cpuinfo;
mod criu;
mod dedup;
mod dump;
mod exit;
mod export;
mod generate;
mod import;
mod joined;
mod kind;
mod lazy_pages;
mod logfile;
mod machine;
mod merge;
mod network;
mod options;
mod output;
mod parse;
mod pre_dump;
mod restore;
mod rpc;
mod serve;
mod session;
mod show;
mod stage_listener;
mod statistics;
mod values;
mod verbosity;
mod volume;
mod watch;
mod with_volume;
mod work;

use std::ffi::OsString;
use std::path::Path;
use std::time::Instant;

use clap::{Args, Subcommand};

use crate::command_line::{Command, CommandLine, Origin, Words};
use crate::exit::{Failure, Status};

/// The parser of the whole command line: for help, the manual and completions.
fn parser() -> clap::Command {
    let known = parse::COMMANDS.iter();
    let program = clap::Command::new("stillframe")
        .version(env!("CARGO_PKG_VERSION"))
        .about("Freezes running process trees into images and brings them back")
        .arg_required_else_help(true)
        .disable_help_subcommand(true)
        .subcommand_required(true)
        .subcommands(known.map(|known| parse::parser(known.0)));
    Action::augment_subcommands(program)
}

/// The commands with parsers of their own.
#[derive(Debug, Subcommand)]
enum Action {
    Show(show::Show),
    Merge(merge::Merge),
    Dedup(dedup::Dedup),
    Network(network::Network),
    Cpuinfo(cpuinfo::Cpuinfo),
    Import(import::Import),
    Export(export::Export),
    Serve(serve::Serve),
    LazyPages(lazy_pages::LazyPages),
    Swrk(rpc::Swrk),
    Service(rpc::Service),
    Vm(machine::Vm),
    Volume(volume::Volume),
    #[command(hide = true)]
    Generate(generate::Generate),
}

#[cfg(not(test))]
sys::program!(program);

/// Does what the command line says; gives the exit status.
#[cfg_attr(test, allow(dead_code, reason = "tests have a program of their own"))]
fn program() -> u8 {
    let started = Instant::now();
    let arguments: Vec<OsString> = std::env::args_os().skip(1).collect();
    let json = arguments
        .iter()
        .take_while(|word| *word != "--")
        .any(|word| word == "--json");
    let status = run(arguments, started).unwrap_or_else(|failure| {
        log::error!("{}", failure.line());
        output::complain(&format!("stillframe: {}\n", failure.line()));
        // A single one is in the line.
        let obstacles = failure.obstacles();
        for obstacle in obstacles.iter().filter(|_| obstacles.len() > 1) {
            log::error!("{obstacle}");
            output::complain(&format!("  {obstacle}\n"));
        }
        if let Some(advice) = failure.advice() {
            output::complain(&format!("  {advice}\n"));
        }
        if json {
            output::say(&format!("{}\n", failure.json()));
        }
        failure.status()
    });
    let status = match output::unsaid() {
        Some(error) if status == Status::Done => {
            log::error!("cannot write to the standard output: {error}");
            let text = format!("stillframe: cannot write to the standard output: {error}\n");
            output::complain(&text);
            Status::Store
        }
        _ => status,
    };
    logfile::flush();
    status as u8
}

fn run(arguments: Vec<OsString>, started: Instant) -> Result<Status, Failure> {
    // Before anything is read for somebody who may not read it.
    if sys::start::has_privileges_of_another() {
        return Err(Failure::Raised);
    }
    let reading = read(arguments)?;
    if reading.version {
        if is_called_criu() {
            output::say(rpc::VERSION_LINE);
        }
        output::say(concat!("stillframe ", env!("CARGO_PKG_VERSION"), "\n"));
        return Ok(Status::Done);
    }
    let words = reading.words();
    match reading.command {
        Some(command @ (Command::Dump | Command::PreDump | Command::Restore | Command::Check)) => {
            let idle = reading.idle.clone();
            match parse::options(command, reading) {
                Err(error) => Ok(misused(&error)),
                Ok(options) => work::carry_out(command, options, &idle, started),
            }
        }
        Some(Command::Show) => understood("show", words, show::Show::run),
        Some(Command::Merge) => understood("merge", words, merge::Merge::run),
        Some(Command::Dedup) => understood::<dedup::Dedup>("dedup", words, |it| it.run(started)),
        Some(Command::Network) => understood("network", words, network::Network::run),
        Some(Command::Cpuinfo) => {
            understood::<cpuinfo::Cpuinfo>("cpuinfo", words, |it| it.run(started))
        }
        Some(Command::Import) => understood("import", words, import::Import::run),
        Some(Command::Export) => understood("export", words, export::Export::run),
        Some(Command::Serve) => understood::<serve::Serve>("serve", words, |it| it.run(started)),
        Some(Command::LazyPages) => {
            understood::<lazy_pages::LazyPages>("lazy-pages", words, |it| it.run(started))
        }
        Some(Command::Swrk) => understood("swrk", words, rpc::Swrk::run),
        Some(Command::Service) => {
            understood::<rpc::Service>("service", words, |it| it.run(started))
        }
        Some(Command::Vm) => understood::<machine::Vm>("vm", words, |it| it.run(started)),
        Some(Command::Volume) => understood("volume", words, volume::Volume::run),
        Some(Command::Generate) => understood("generate", words, generate::Generate::run),
        None => {
            let program = [OsString::from("stillframe")];
            match parser().try_get_matches_from(program.into_iter().chain(words)) {
                Ok(_) => unreachable!("a command was read as none"),
                Err(error) => Ok(misused(&error)),
            }
        }
    }
}

/// Reads the command line and, for commands that have them, the configuration files before it.
fn read(words: Vec<OsString>) -> Result<CommandLine, Failure> {
    let (defaults, named) = command_line::configuration(&words);
    let line = Words {
        origin: Origin::CommandLine,
        words,
    };
    let alone = command_line::read(std::slice::from_ref(&line)).map_err(Failure::Reading)?;
    let configured = alone.command.is_some_and(Command::is_configured);
    if !configured || alone.version {
        return Ok(alone);
    }
    let places = config::Places::of_environment(defaults, named);
    let mut sources = places.read().map_err(Failure::Configuration)?;
    if sources.is_empty() {
        return Ok(alone);
    }
    sources.push(line);
    command_line::read(&sources).map_err(Failure::Reading)
}

/// True if the program is called by the name of criu(8), as by a symbolic link.
fn is_called_criu() -> bool {
    let name = std::env::args_os().next();
    name.is_some_and(|name| Path::new(&name).file_name() == Some("criu".as_ref()))
}

/// Does what the words of a command say, or tells what is wrong with them.
fn understood<T: Args>(
    name: &'static str,
    words: Vec<OsString>,
    run: impl FnOnce(T) -> Result<Status, Failure>,
) -> Result<Status, Failure> {
    match parse(name, words) {
        Ok(command) => run(command),
        Err(error) => Ok(misused(&error)),
    }
}

/// Understands the words of one command, without building the parsers of the others.
fn parse<T: Args>(name: &'static str, words: Vec<OsString>) -> Result<T, clap::Error> {
    let command = clap::Command::new(name).bin_name(format!("stillframe {name}"));
    let mut command = T::augment_args(command);
    let words = verbosity::fold(&command, words);
    let program = [OsString::from(name)];
    let matches = command.try_get_matches_from_mut(program.into_iter().chain(words))?;
    T::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
}

/// Prints what the parser says: help, or what is wrong.
fn misused(error: &clap::Error) -> Status {
    // A terminal that went away cannot be told anything.
    let _ = error.print();
    if error.use_stderr() {
        Status::Usage
    } else {
        Status::Done
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_parser_is_sound() {
        super::parser().debug_assert();
    }
}
