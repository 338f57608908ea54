//! The stillframe command: reads the command line, calls the engine, tells how it went.
//!
//! One file per command ([`dump`], [`pre_dump`], [`restore`], [`check`], [`show`], [`merge`],
//! [`dedup`], [`network`], [`import`], [`export`], [`serve`],
//! [`lazy_pages`], [`generate`]). The command line is criu(8)'s:
//! [`reading`] understands it with the table in [`criu`], [`config`] adds the configuration files.
//! [`exit`] picks exit statuses; nothing else in the workspace prints.
#![forbid(unsafe_code)]
#![cfg_attr(not(test), no_main)]

mod allowed;
mod bar;
mod check;
mod config;
mod criu;
mod dedup;
mod dump;
mod exit;
mod export;
mod generate;
mod import;
mod lazy_pages;
mod logfile;
mod merge;
mod network;
mod output;
mod pre_dump;
mod quick;
mod reading;
mod restore;
mod serve;
mod session;
mod show;
mod statistics;
mod values;
mod watch;

use std::ffi::OsString;
use std::time::Instant;

use clap::{Args, Parser, Subcommand};

use crate::exit::{Failure, Status};
use crate::reading::{Command, Origin, Reading, Words};

/// Freezes running process trees into images and brings them back
#[derive(Debug, Parser)]
#[command(name = "stillframe", version, arg_required_else_help = true)]
#[command(disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    Dump(dump::Dump),
    PreDump(pre_dump::PreDump),
    Restore(restore::Restore),
    Check(check::Check),
    Show(show::Show),
    Merge(merge::Merge),
    Dedup(dedup::Dedup),
    Network(network::Network),
    Import(import::Import),
    Export(export::Export),
    Serve(serve::Serve),
    LazyPages(lazy_pages::LazyPages),
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
        output::say(concat!("stillframe ", env!("CARGO_PKG_VERSION"), "\n"));
        return Ok(Status::Done);
    }
    let idle = &reading.idle;
    match reading.command {
        Some(Command::Dump) => match parse("dump", dump::Dump::quick, reading.words) {
            Ok(dump) => dump.run(idle, started),
            Err(error) => Ok(misused(&error)),
        },
        Some(Command::PreDump) => {
            understood::<pre_dump::PreDump>("pre-dump", reading.words, |it| it.run(idle, started))
        }
        Some(Command::Restore) => match parse("restore", restore::Restore::quick, reading.words) {
            Ok(restore) => restore.run(idle, started),
            Err(error) => Ok(misused(&error)),
        },
        Some(Command::Check) => {
            understood::<check::Check>("check", reading.words, |it| it.run(started))
        }
        Some(Command::Show) => understood("show", reading.words, show::Show::run),
        Some(Command::Merge) => understood("merge", reading.words, merge::Merge::run),
        Some(Command::Dedup) => {
            understood::<dedup::Dedup>("dedup", reading.words, |it| it.run(started))
        }
        Some(Command::Network) => understood("network", reading.words, network::Network::run),
        Some(Command::Import) => understood("import", reading.words, import::Import::run),
        Some(Command::Export) => understood("export", reading.words, export::Export::run),
        Some(Command::Serve) => {
            understood::<serve::Serve>("serve", reading.words, |it| it.run(started))
        }
        Some(Command::LazyPages) => {
            understood::<lazy_pages::LazyPages>("lazy-pages", reading.words, |it| it.run(started))
        }
        Some(Command::Generate) => understood("generate", reading.words, generate::Generate::run),
        None => {
            let program = [OsString::from("stillframe")];
            match Cli::try_parse_from(program.into_iter().chain(reading.words)) {
                Ok(cli) => unreachable!("the command {:?} was read as none", cli.action),
                Err(error) => Ok(misused(&error)),
            }
        }
    }
}

/// Reads the command line and, for commands that have them, the configuration files before it.
fn read(words: Vec<OsString>) -> Result<Reading, Failure> {
    let (defaults, named) = reading::configuration(&words);
    let line = Words {
        origin: Origin::CommandLine,
        words,
    };
    let alone = reading::read(std::slice::from_ref(&line)).map_err(Failure::Reading)?;
    let configured = matches!(
        alone.command,
        Some(Command::Dump | Command::PreDump | Command::Restore | Command::Check)
    );
    if !configured || alone.version {
        return Ok(alone);
    }
    let (home, variable) = (std::env::var_os("HOME"), std::env::var_os(config::VARIABLE));
    let places = config::Places::new(defaults, named, home, variable);
    let mut sources = places.read().map_err(Failure::Configuration)?;
    if sources.is_empty() {
        return Ok(alone);
    }
    sources.push(line);
    reading::read(&sources).map_err(Failure::Reading)
}

/// Does what the words of a command say, or tells what is wrong with them.
fn understood<T: Args>(
    name: &'static str,
    words: Vec<OsString>,
    run: impl FnOnce(T) -> Result<Status, Failure>,
) -> Result<Status, Failure> {
    match parse_thoroughly(name, words) {
        Ok(command) => run(command),
        Err(error) => Ok(misused(&error)),
    }
}

/// Understands the words of one command: quickly where that goes, otherwise by its parser, without
/// building the parsers of the others.
fn parse<T: Args>(
    name: &'static str,
    quick: fn(&[OsString]) -> Option<T>,
    words: Vec<OsString>,
) -> Result<T, clap::Error> {
    match quick(&words) {
        Some(understood) => Ok(understood),
        None => parse_thoroughly(name, words),
    }
}

fn parse_thoroughly<T: Args>(name: &'static str, words: Vec<OsString>) -> Result<T, clap::Error> {
    let command = clap::Command::new(name).bin_name(format!("stillframe {name}"));
    let mut command = T::augment_args(command);
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
    use clap::{ArgAction, CommandFactory as _};

    use super::{Cli, OsString, dump, parse_thoroughly, restore};
    use crate::criu::{Argument, FLAGS, Fate};
    use crate::reading::Command;

    /// Options that the reading answers itself or hands over under another name.
    const READ: [&str; 6] = ["daemon", "help", "image", "sync", "version", "verbosity"];

    #[test]
    fn the_parser_is_sound() {
        Cli::command().debug_assert();
    }

    /// Understands one option in both ways, with every value that some option takes.
    fn compare<T: clap::Args + std::fmt::Debug>(
        name: &'static str,
        quick: fn(&[OsString]) -> Option<T>,
        option: &str,
        common: &[&str],
    ) {
        let values = [
            "",
            "=",
            "=1",
            "=17",
            "=-1",
            "=+1",
            "=0x1",
            "= 1",
            "=1M",
            "=path/to",
            "=fd[3]:pipe[7]",
            "=fd[3]:x",
            "=99999999999999999999",
            "=a=b",
            "=,",
            "=1,2",
        ];
        for value in values {
            let mut words: Vec<OsString> = common.iter().map(Into::into).collect();
            words.push(format!("--{option}{value}").into());
            let Some(quick) = quick(&words) else { continue };
            let thorough = parse_thoroughly::<T>(name, words.clone());
            let thorough = thorough.unwrap_or_else(|error| panic!("{words:?}: {error}"));
            assert_eq!(format!("{quick:?}"), format!("{thorough:?}"), "{words:?}");
        }
    }

    #[test]
    fn the_quick_way_and_the_parser_agree() {
        let own = FLAGS.iter().map(|flag| flag.name);
        for option in own.chain(["no-sync", "bogus", "help"]) {
            // The reading leaves one occurrence of each option.
            if option != "tree" {
                compare("dump", dump::Dump::quick, option, &["--tree=5"]);
            }
            compare("dump", dump::Dump::quick, option, &[]);
            compare("restore", restore::Restore::quick, option, &[]);
        }
        let words = |words: &[&str]| words.iter().map(Into::into).collect::<Vec<OsString>>();
        for given in [
            &["--", "x"][..],
            &["--exec-cmd", "--"],
            &["--exec-cmd"],
            &["x"],
        ] {
            assert!(
                restore::Restore::quick(&words(given)).is_none(),
                "{given:?}"
            );
        }
        assert!(dump::Dump::quick(&words(&["--tree=5", "--", "x"])).is_none());
        let exec = words(&["--exec-cmd", "--", "a", "--b"]);
        let quick = restore::Restore::quick(&exec).unwrap();
        let thorough: restore::Restore = parse_thoroughly("restore", exec).unwrap();
        assert_eq!(format!("{quick:?}"), format!("{thorough:?}"));
    }

    #[test]
    fn every_option_can_be_understood_quickly() {
        for flag in FLAGS.iter().filter(|flag| !READ.contains(&flag.name)) {
            let value = match (flag.name, flag.argument) {
                ("inherit-fd", _) => "=fd[3]:x",
                ("file-validation", _) => "=filesize",
                ("manage-cgroups", _) => "=soft",
                ("cgroup-root", _) => "=cpu:/x",
                ("compress", _) => "=zstd:9",
                (_, Argument::None | Argument::Switch) => "",
                _ => "=1",
            };
            let words = [OsString::from(format!("--{}{value}", flag.name))];
            if flag.dump == Fate::Taken && flag.name != "tree" {
                let words = [OsString::from("--tree=5"), words[0].clone()];
                assert!(dump::Dump::quick(&words).is_some(), "{words:?}");
            }
            if flag.restore == Fate::Taken && flag.name != "exec-cmd" {
                assert!(restore::Restore::quick(&words).is_some(), "{words:?}");
            }
        }
    }

    #[test]
    fn the_table_and_the_parsers_agree() {
        let program = Cli::command();
        for (name, command) in [
            ("dump", Command::Dump),
            ("pre-dump", Command::PreDump),
            ("restore", Command::Restore),
            ("check", Command::Check),
        ] {
            let parser = program.find_subcommand(name).unwrap();
            let find = |flag: &str| {
                parser
                    .get_arguments()
                    .find(|arg| arg.get_long() == Some(flag))
            };
            for flag in FLAGS.iter().filter(|flag| !READ.contains(&flag.name)) {
                let text = format!("{name} --{}", flag.name);
                let Some(argument) = find(flag.name) else {
                    assert_ne!(flag.fate(command), Fate::Taken, "{text} is not parsed");
                    continue;
                };
                assert_eq!(flag.fate(command), Fate::Taken, "{text} is parsed");
                let bare = matches!(flag.argument, Argument::None | Argument::Switch);
                let set_true = matches!(argument.get_action(), ArgAction::SetTrue);
                assert_eq!(set_true, bare, "{text} disagrees about its argument");
                let repeats = matches!(argument.get_action(), ArgAction::Append);
                assert_eq!(repeats, flag.repeats, "{text} disagrees about repeating");
                assert_eq!(
                    argument.get_short(),
                    flag.short,
                    "{text} disagrees about its letter"
                );
            }
            for argument in parser
                .get_arguments()
                .filter_map(|argument| argument.get_long())
            {
                let known = FLAGS.iter().any(|flag| flag.name == argument);
                assert!(
                    known || argument == "no-sync",
                    "{name} --{argument} is not in the table"
                );
            }
        }
    }
}
