//! The options of dump, pre-dump, restore and check, understood by the table in [`crate::criu`].
//!
//! Building a parser for forty options takes a tenth of a millisecond, a twentieth of a dump. So
//! one is only built of the table for help, for the manual, and to say what is wrong with a line.

use std::ffi::{OsStr, OsString};

use clap::builder::{PossibleValuesParser, ValueParser};
use clap::{Arg, ArgAction, ValueHint};

use crate::command_line::{Command, CommandLine};
use crate::criu::{Argument, FLAGS, Fate, Flag};
use crate::options::Options;

/// The commands whose options are those of the table, with what is said of them.
pub const COMMANDS: [(Command, &str, &str); 4] = [
    (Command::Dump, "dump", "Save a process tree into an image"),
    (
        Command::PreDump,
        "pre-dump",
        "Save the memory of a running process tree, so that a dump has little left to do",
    ),
    (
        Command::Restore,
        "restore",
        "Bring a process tree back from an image",
    ),
    (
        Command::Check,
        "check",
        "Tell what this kernel and these privileges allow, a line a feature",
    ),
];

/// Understands what one of these commands was given.
///
/// # Errors
/// What is wrong with it, or the help that was asked for.
pub fn options(command: Command, reading: CommandLine) -> Result<Options, clap::Error> {
    let mut options = Options::default();
    let mut set = reading.given.iter().map(|given| {
        let taken = given.flag.fate(command) == Fate::Taken;
        taken
            && given
                .flag
                .apply(&mut options, given.value.as_deref())
                .is_ok()
    });
    let understood = set.all(|is_set| is_set);
    let words = reading.words();
    let mut rest = reading.rest.into_iter().peekable();
    if command == Command::Restore && rest.next_if(|word| word == "--").is_some() {
        options.exec_cmd = rest.by_ref().collect();
    }
    let wants_tree = matches!(command, Command::Dump | Command::PreDump);
    if understood && rest.peek().is_none() && wants_tree == options.tree.is_some() {
        return Ok(options);
    }
    Err(refuse(command, words))
}

/// Says what is wrong with a line that is not understood.
fn refuse(command: Command, words: Vec<OsString>) -> clap::Error {
    let mut parser = parser(command);
    let name = OsString::from(parser.get_name());
    parser = parser.bin_name(format!("stillframe {}", name.display()));
    match parser.try_get_matches_from_mut(std::iter::once(name).chain(words)) {
        Err(error) => error,
        Ok(_) => parser.error(
            clap::error::ErrorKind::InvalidValue,
            "a value is not understood",
        ),
    }
}

/// The parser of one of these commands.
pub fn parser(command: Command) -> clap::Command {
    let mut commands = COMMANDS.iter();
    let known = commands.find(|known| known.0 == command);
    let (_, name, about) = known.expect("only these have one");
    let own = |flag: &&Flag| flag.fate(command) == Fate::Taken && !flag.help.is_empty();
    let parser = clap::Command::new(*name)
        .about(*about)
        .args(FLAGS.iter().filter(own).map(|flag| arg(flag, command)));
    match command {
        Command::Restore => parser.arg(
            Arg::new("command")
                .last(true)
                .num_args(1..)
                .value_name("COMMAND")
                .value_parser(ValueParser::os_string())
                .requires("exec-cmd")
                .help("The command of --exec-cmd and its arguments"),
        ),
        _ => parser,
    }
}

fn arg(flag: &'static Flag, command: Command) -> Arg {
    let mut arg = Arg::new(flag.name).long(flag.shown()).help(flag.help);
    if let Some(letter) = flag.short {
        arg = arg.short(letter);
    }
    arg = match flag.argument {
        Argument::None | Argument::Switch => return arg.action(ArgAction::SetTrue),
        Argument::Required => arg,
        Argument::Optional => arg
            .num_args(0..=1)
            .require_equals(true)
            .default_missing_value(flag.values.first().copied().unwrap_or("")),
    };
    if flag.repeats && flag.name != "verbosity" {
        arg = arg.action(ArgAction::Append);
    }
    if matches!(flag.value_name, "DIR" | "FILE") {
        arg = arg.value_hint(ValueHint::AnyPath);
    }
    if !flag.usual.is_empty() && command != Command::Check {
        arg = arg.default_value(flag.usual);
    }
    let arg = arg
        .value_name(flag.value_name)
        .value_parser(parser_of(flag));
    arg.required(flag.name == "tree")
}

/// Asks the table what an argument may be.
fn parser_of(flag: &'static Flag) -> ValueParser {
    if !flag.values.is_empty() {
        return PossibleValuesParser::new(flag.values).into();
    }
    if matches!(flag.value_name, "DIR" | "FILE") {
        return ValueParser::path_buf();
    }
    let check = move |text: &str| match (flag.argument, text) {
        (Argument::Optional, "") => Ok(()),
        _ => flag.apply(&mut Options::default(), Some(OsStr::new(text))),
    };
    ValueParser::new(check)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command_line::{Origin, Words, read};

    fn understand(line: &[&str]) -> Result<Options, String> {
        let words = Words {
            origin: Origin::CommandLine,
            words: line.iter().map(Into::into).collect(),
        };
        let reading = read(&[words]).expect("its words are in the table");
        let command = reading.command.expect("it has one");
        options(command, reading).map_err(|error| error.to_string())
    }

    #[test]
    fn what_is_taken_is_set_and_explained() {
        let nowhere = ["help", "version", "exec-cmd", "daemon", "pre-dump-mode"];
        for flag in FLAGS.iter().filter(|flag| !nowhere.contains(&flag.name)) {
            for (command, name, _) in COMMANDS {
                if flag.fate(command) != Fate::Taken
                    || (flag.name == "image" && command != Command::Check)
                {
                    continue;
                }
                let sets = !matches!(flag.set, crate::criu::Set::Nothing);
                assert!(sets && !flag.help.is_empty(), "{name} --{}", flag.name);
                let mut options = Options::default();
                let value = match (flag.name, flag.values, flag.argument) {
                    (_, [.., last], _) => Some(*last),
                    ("inherit-fd", ..) => Some("fd[3]:x"),
                    ("external", ..) if command == Command::Restore => Some("mnt[x]:/y"),
                    ("external", ..) => Some("pipe:[3]"),
                    ("empty-ns", ..) => Some("net"),
                    ("ext-mount-map", ..) => Some("x:/y"),
                    ("cgroup-root", ..) => Some("cpu:/x"),
                    ("compress", ..) => Some("zstd:9"),
                    (_, [], Argument::Required) => Some("17"),
                    _ => None,
                };
                let value = match flag.name {
                    "verbosity" => Some("4"),
                    _ => value,
                };
                flag.apply(&mut options, value.map(OsStr::new)).unwrap();
                let [set, unset] = [options, Options::default()].map(|all| format!("{all:?}"));
                assert_ne!(set, unset, "{name} --{}", flag.name);
            }
        }
    }

    #[test]
    fn what_is_usual_is_so() {
        for flag in FLAGS.iter().filter(|flag| !flag.usual.is_empty()) {
            let mut options = Options::default();
            flag.apply(&mut options, Some(OsStr::new(flag.usual)))
                .unwrap();
            let [set, unset] = [options, Options::default()].map(|all| format!("{all:?}"));
            assert_eq!(set, unset, "--{}", flag.name);
        }
    }

    #[test]
    fn a_line_is_understood_without_a_parser() {
        let dump = understand(&["dump", "-t5", "-D", "x", "-R", "--no-sync", "--compress"]);
        let dump = dump.unwrap().to_dump(process::DumpKind::Dump, "y".as_ref());
        assert_eq!(dump.tree.as_raw_nonzero().get(), 5);
        assert_eq!(dump.images, std::path::Path::new("y").into());
        assert_eq!(dump.afterwards, process::Afterwards::Run);
        assert_eq!(dump.compress, Some(process::options::Compression::Lz4));
        assert!(!dump.sync && dump.track.is_none());
        let restore = understand(&["restore", "--exec-cmd", "--", "a", "--b"]).unwrap();
        assert_eq!(restore.exec_cmd, ["a", "--b"]);
    }

    #[test]
    fn what_is_wrong_is_told() {
        for (line, words) in [
            (&["dump"][..], "--tree <PID>"),
            (&["dump", "-t", "0"], "a pid is a number above 0"),
            (&["dump", "-t5", "--ghost-limit=1T"], "a size is like"),
            (
                &["dump", "-t5", "--compress=xz"],
                "it is lz4, zstd or zstd:LEVEL",
            ),
            (&["dump", "-t5", "x"], "unexpected argument 'x'"),
            (
                &["dump", "-t5", "--exec-cmd"],
                "unexpected argument '--exec-cmd'",
            ),
            (&["dump", "-t5", "--", "x"], "unexpected argument"),
            (&["restore", "--images-dir="], "--images-dir"),
            (&["restore", "--help"], "Usage: stillframe restore"),
        ] {
            let error = understand(line).unwrap_err();
            assert!(error.contains(words), "{line:?}: {error}");
        }
    }

    #[test]
    fn the_table_makes_sound_parsers() {
        for (command, ..) in COMMANDS {
            parser(command).debug_assert();
        }
    }
}
