//! Reads a command line the way criu(8) does.
//!
//! criu(8) takes options before and after the command, abbreviated names, letters in a row, the
//! same options from configuration files, `--no-NAME`, and the last word wins. All of that ends
//! here: what comes out is a command and what it was given, each option once.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use crate::criu::{Argument, FLAGS, Fate, Flag, REFUSED_COMMANDS};

/// A command of this program.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Save a tree.
    Dump,
    /// Save the memory of a running one.
    PreDump,
    /// Bring it back.
    Restore,
    /// Tell what is possible here.
    Check,
    /// Tell what an image holds.
    Show,
    /// Squash a chain of images.
    Merge,
    /// Free what newer images have replaced.
    Dedup,
    /// List or clear what holds connections back.
    Network,
    /// Save what the processor has, or check it.
    Cpuinfo,
    /// Make an image of a machine's snapshot.
    Import,
    /// Write one of an image.
    Export,
    /// Serve one's pages to monitors.
    Serve,
    /// Bring memory in to trees that run.
    LazyPages,
    /// Serve one client of criu(8)'s RPC protocol.
    Swrk,
    /// Serve clients of that protocol that connect.
    Service,
    /// Save machines under QEMU and start them again.
    Vm,
    /// Save volumes, bring them back, read files of them.
    Volume,
    /// Write completions or the manual.
    Generate,
}

impl Command {
    /// Returns the command of that name.
    pub fn named(name: &OsStr) -> Option<Self> {
        Some(match name.to_str()? {
            "dump" => Self::Dump,
            "pre-dump" => Self::PreDump,
            "restore" => Self::Restore,
            "check" => Self::Check,
            "show" => Self::Show,
            "merge" => Self::Merge,
            "dedup" => Self::Dedup,
            "network" => Self::Network,
            "cpuinfo" => Self::Cpuinfo,
            "import" => Self::Import,
            "export" => Self::Export,
            "serve" => Self::Serve,
            "lazy-pages" => Self::LazyPages,
            "swrk" => Self::Swrk,
            "service" => Self::Service,
            "vm" => Self::Vm,
            "volume" => Self::Volume,
            "generate" => Self::Generate,
            _ => return None,
        })
    }

    /// True for a command that reads criu(8)'s configuration files.
    pub const fn is_configured(self) -> bool {
        matches!(
            self,
            Self::Dump
                | Self::PreDump
                | Self::Restore
                | Self::Check
                | Self::Dedup
                | Self::LazyPages
                | Self::Cpuinfo
        )
    }

    /// Tells whether its options are not those of the table: they are the parser's alone, behind
    /// its name.
    const fn is_own(self) -> bool {
        matches!(
            self,
            Self::Import
                | Self::Export
                | Self::Serve
                | Self::Service
                | Self::Swrk
                | Self::Vm
                | Self::Volume
        )
    }
}

/// An error of a command line or a configuration file.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum Error {
    #[error("--{name} of criu(8) is not supported yet{origin}")]
    OptionUnsupported { name: &'static str, origin: Origin },
    #[error("the command {0} of criu(8) is not supported yet")]
    CommandUnsupported(&'static str),
    #[error("--{word} may be any of {}{origin}", .candidates.join(", "))]
    Ambiguous {
        word: String,
        candidates: Vec<String>,
        origin: Origin,
    },
    #[error("--{name} needs an argument{origin}")]
    ArgumentMissing { name: &'static str, origin: Origin },
    #[error("--{name} has no argument{origin}")]
    ArgumentUnexpected { name: &'static str, origin: Origin },
    #[error("--{name} cannot be {value:?}{origin}; it can be {}", .values.join(", "))]
    ArgumentUnknown {
        name: &'static str,
        value: OsString,
        values: &'static [&'static str],
        origin: Origin,
    },
    /// A word in a configuration file that is no option. It is not repeated: the file may be one
    /// that the reader of the message may not read.
    #[error("unknown option{origin}")]
    Unknown { origin: Origin },
    #[error("--exec-cmd needs a command behind --")]
    ExecWithoutCommand,
}

/// Origin of an option.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origin {
    /// On the command line.
    CommandLine,
    /// In a configuration file, at a line.
    File(String, usize),
}

impl std::fmt::Display for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::CommandLine => Ok(()),
            Self::File(path, line) => write!(f, " ({path}, line {line})"),
        }
    }
}

/// Words of one origin: a line of a configuration file or the command line.
#[derive(Debug, Clone)]
pub struct Words {
    /// Their origin.
    pub origin: Origin,
    /// The words; an option's name comes with its dashes.
    pub words: Vec<OsString>,
}

/// A command line that was understood.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct CommandLine {
    /// The command; none when there was none or it is unknown.
    pub command: Option<Command>,
    /// Options in their order; none where help was asked for.
    pub given: Vec<GivenOption>,
    /// Words that are no option, and those behind the command.
    pub rest: Vec<OsString>,
    /// Options that were accepted although they have no effect on this command.
    pub idle: Vec<&'static str>,
    /// True if the version was asked for.
    pub version: bool,
}

/// An option that was given.
#[derive(Debug, PartialEq, Eq)]
pub struct GivenOption {
    /// Which one.
    pub flag: &'static Flag,
    /// Its argument.
    pub value: Option<OsString>,
}

impl CommandLine {
    /// The words for a parser, without the program's and the command's name.
    pub fn words(&self) -> Vec<OsString> {
        let given = self.given.iter();
        let words = given.map(|given| word(given.flag.shown(), given.value.as_deref()));
        words.chain(self.rest.iter().cloned()).collect()
    }
}

/// One occurrence of an option.
#[derive(Debug)]
struct Occurrence {
    flag: &'static Flag,
    on: bool,
    value: Option<OsString>,
    origin: Origin,
}

/// Everything found in the sources, before it is folded.
#[derive(Debug, Default)]
struct RawArguments {
    occurrences: Vec<Occurrence>,
    positionals: Vec<OsString>,
    unknown: Vec<OsString>,
}

/// Reads the words of all sources, of which a later one overrides an earlier one.
///
/// # Errors
/// The first word that is no option, lacks its argument, or is not supported yet.
pub fn read(sources: &[Words]) -> Result<CommandLine, Error> {
    if let [line] = sources
        && let Some((name, words)) = line.words.split_first()
        && let Some(command) = Command::named(name).filter(|command| command.is_own())
    {
        return Ok(CommandLine {
            command: Some(command),
            rest: words.to_vec(),
            ..CommandLine::default()
        });
    }
    let mut found = RawArguments::default();
    for source in sources {
        scan(source, &mut found)?;
    }
    fold(found)
}

/// Tells whether `words` ask for no default configuration, and which file they ask for instead.
pub fn configuration(words: &[OsString]) -> (bool, Option<OsString>) {
    let (mut defaults, mut file) = (true, None);
    let mut words = words.iter();
    while let Some(word) = words.next() {
        match word.as_bytes() {
            b"--" => break,
            b"--no-default-config" => defaults = false,
            b"--config" => file = words.next().cloned(),
            bytes => {
                if let Some(path) = bytes.strip_prefix(b"--config=") {
                    file = Some(OsStr::from_bytes(path).to_owned());
                }
            }
        }
    }
    (defaults && file.is_none(), file)
}

fn scan(source: &Words, found: &mut RawArguments) -> Result<(), Error> {
    let mut words = source.words.iter();
    while let Some(word) = words.next() {
        let bytes = word.as_bytes();
        if bytes == b"--" {
            found.positionals.extend(words.by_ref().cloned());
        } else if let Some(long) = bytes.strip_prefix(b"--") {
            scan_long(long, word, &mut words, source, found)?;
        } else if bytes.len() > 1 && bytes[0] == b'-' {
            scan_letters(&bytes[1..], word, &mut words, source, found)?;
        } else {
            found.positionals.push(word.clone());
        }
    }
    match (&source.origin, found.unknown.first()) {
        (origin @ Origin::File(..), Some(_)) => Err(Error::Unknown {
            origin: origin.clone(),
        }),
        _ => Ok(()),
    }
}

fn scan_long<'a>(
    long: &[u8],
    word: &OsStr,
    rest: &mut impl Iterator<Item = &'a OsString>,
    source: &Words,
    found: &mut RawArguments,
) -> Result<(), Error> {
    let (name, value) = match long.iter().position(|&b| b == b'=') {
        Some(at) => (
            &long[..at],
            Some(OsStr::from_bytes(&long[at + 1..]).to_owned()),
        ),
        None => (long, None),
    };
    let origin = source.origin.clone();
    let Some((flag, on)) = lookup(name, &origin)? else {
        found.unknown.push(word.to_owned());
        return Ok(());
    };
    let name = flag.name;
    let value = match (flag.argument, value) {
        (Argument::None | Argument::Switch, Some(_)) => {
            return Err(Error::ArgumentUnexpected { name, origin });
        }
        (Argument::Required, None) => match rest.next() {
            Some(next) => Some(next.clone()),
            None => return Err(Error::ArgumentMissing { name, origin }),
        },
        (_, value) => value,
    };
    push(
        found,
        Occurrence {
            flag,
            on,
            value,
            origin,
        },
    )
}

fn scan_letters<'a>(
    letters: &[u8],
    word: &OsStr,
    rest: &mut impl Iterator<Item = &'a OsString>,
    source: &Words,
    found: &mut RawArguments,
) -> Result<(), Error> {
    for (index, &letter) in letters.iter().enumerate() {
        let origin = source.origin.clone();
        let Some(flag) = FLAGS.iter().find(|flag| flag.short == Some(letter as char)) else {
            found.unknown.push(word.to_owned());
            return Ok(());
        };
        let attached = &letters[index + 1..];
        let attached = (!attached.is_empty()).then(|| OsStr::from_bytes(attached).to_owned());
        let value = match flag.argument {
            Argument::None | Argument::Switch => None,
            Argument::Optional => attached,
            Argument::Required => match attached.or_else(|| rest.next().cloned()) {
                Some(value) => Some(value),
                None => {
                    return Err(Error::ArgumentMissing {
                        name: flag.name,
                        origin,
                    });
                }
            },
        };
        let ends = matches!(flag.argument, Argument::Optional | Argument::Required);
        push(
            found,
            Occurrence {
                flag,
                on: true,
                value,
                origin,
            },
        )?;
        if ends {
            break;
        }
    }
    Ok(())
}

fn push(found: &mut RawArguments, occurrence: Occurrence) -> Result<(), Error> {
    let Occurrence {
        flag,
        value,
        origin,
        ..
    } = &occurrence;
    if let Some(value) = value
        && !flag.values.is_empty()
        && !flag.values.iter().any(|known| *value == **known)
    {
        return Err(Error::ArgumentUnknown {
            name: flag.name,
            value: value.clone(),
            values: flag.values,
            origin: origin.clone(),
        });
    }
    found.occurrences.push(occurrence);
    Ok(())
}

/// Finds an option by its name, by `no-` and the name of a switch, or by the beginning of either.
fn lookup(name: &[u8], origin: &Origin) -> Result<Option<(&'static Flag, bool)>, Error> {
    let Ok(name) = str::from_utf8(name) else {
        return Ok(None);
    };
    let fits = |flag: &Flag, whole: bool| {
        let fits = |candidate: &str, name: &str| {
            if whole {
                candidate == name
            } else {
                candidate.starts_with(name)
            }
        };
        let off = flag.argument == Argument::Switch
            && match name.strip_prefix("no-") {
                Some(name) => fits(flag.name, name),
                None => !whole && "no-".starts_with(name),
            };
        (fits(flag.name, name), off)
    };
    let matching = |whole: bool, of_criu: Option<bool>| {
        let mut matching = Vec::new();
        for flag in FLAGS
            .iter()
            .filter(|flag| of_criu.is_none_or(|of| flag.of_criu == of))
        {
            let (on, off) = fits(flag, whole);
            matching.extend(on.then_some((flag, true)));
            matching.extend(off.then_some((flag, false)));
        }
        matching
    };
    let exact = matching(true, None);
    if let Some(&one) = exact.first() {
        return Ok(Some(one));
    }
    for of_criu in [true, false] {
        match matching(false, Some(of_criu)).as_slice() {
            [] => {}
            [one] => return Ok(Some(*one)),
            several => {
                return Err(Error::Ambiguous {
                    word: name.to_owned(),
                    candidates: several
                        .iter()
                        .map(|(flag, on)| {
                            format!("--{}{}", if *on { "" } else { "no-" }, flag.name)
                        })
                        .collect(),
                    origin: origin.clone(),
                });
            }
        }
    }
    Ok(None)
}

/// Makes one statement of all occurrences of an option, and words of the statements.
fn fold(found: RawArguments) -> Result<CommandLine, Error> {
    let RawArguments {
        occurrences,
        positionals,
        unknown,
    } = found;
    let mut reading = CommandLine::default();
    if let Some(name) = positionals.first() {
        reading.command = Command::named(name);
        if let Some(refused) = REFUSED_COMMANDS.iter().find(|refused| *name == **refused) {
            return Err(Error::CommandUnsupported(refused));
        }
    }
    let given = |name: &str| occurrences.iter().any(|found| found.flag.name == name);
    reading.version = given("version");
    if given("help") {
        reading.rest = vec!["--help".into()];
        return Ok(reading);
    }
    let Some(command) = reading.command else {
        reading.rest = positionals;
        return Ok(reading);
    };
    for (index, one) in occurrences.iter().enumerate() {
        let later = &occurrences[index + 1..];
        if !one.flag.repeats && later.iter().any(|later| overrides(later.flag, one.flag)) {
            continue;
        }
        state(one, command, &mut reading)?;
    }
    fold_verbosity(&occurrences, &mut reading);
    reading.rest.extend(unknown);
    let exec = given("exec-cmd") && command == Command::Restore;
    if exec && positionals.len() < 2 {
        return Err(Error::ExecWithoutCommand);
    }
    if exec {
        reading.rest.push("--".into());
    }
    reading.rest.extend(positionals.into_iter().skip(1));
    Ok(reading)
}

/// Tells whether a later option takes back an earlier one.
fn overrides(later: &Flag, earlier: &Flag) -> bool {
    let what = |flag: &Flag| match flag.name {
        "leave-running" | "leave-stopped" => "afterwards",
        "daemon" | "restore-detached" => "restore-detached",
        name => name,
    };
    what(later) == what(earlier)
}

/// Adds what an option says to the reading.
fn state(one: &Occurrence, command: Command, reading: &mut CommandLine) -> Result<(), Error> {
    let Occurrence {
        flag,
        on,
        value,
        origin,
    } = one;
    if flag.name == "verbosity" || flag.name == "version" {
        return Ok(());
    }
    match flag.fate(command) {
        Fate::Idle => reading.idle.push(flag.name),
        Fate::Refused if !on => reading.idle.push(flag.name),
        Fate::Refused => {
            return Err(Error::OptionUnsupported {
                name: flag.name,
                origin: origin.clone(),
            });
        }
        Fate::Taken | Fate::Misplaced => {
            let flag = match flag.name {
                "daemon" => Flag::named("restore-detached"),
                "image" if command != Command::Check => Flag::named("images-dir"),
                _ => flag,
            };
            // That the image is to be on the disk is not said: what is, is that it need not.
            if *on != (flag.name == "sync") {
                let value = value.clone();
                reading.given.push(GivenOption { flag, value });
            }
        }
    }
    Ok(())
}

fn word(name: &str, value: Option<&OsStr>) -> OsString {
    let mut word = format!("--{name}").into_bytes();
    if let Some(value) = value {
        word.push(b'=');
        word.extend_from_slice(value.as_bytes());
    }
    OsString::from_vec(word)
}

/// Adds up `-v`, `-vv`, `-v4` and `--verbosity=4`, in their order.
fn fold_verbosity(occurrences: &[Occurrence], reading: &mut CommandLine) {
    let mut level = None;
    for one in occurrences
        .iter()
        .filter(|one| one.flag.name == "verbosity")
    {
        let argument = one.value.as_ref().map(|value| value.as_bytes());
        level = Some(crate::verbosity::more(level, argument));
    }
    if let Some(level) = level {
        reading.given.push(GivenOption {
            flag: Flag::named("verbosity"),
            value: Some(level.to_string().into()),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(words: &[&str]) -> Words {
        Words {
            origin: Origin::CommandLine,
            words: words.iter().map(Into::into).collect(),
        }
    }

    fn file(words: &[&str]) -> Words {
        Words {
            origin: Origin::File("default.conf".to_owned(), 3),
            words: words.iter().map(Into::into).collect(),
        }
    }

    fn words(words: &[&str]) -> Result<String, String> {
        let reading = read(&[line(words)]).map_err(|error| error.to_string())?;
        let words = reading.words();
        let words: Vec<_> = words.iter().map(|word| word.to_str().unwrap()).collect();
        Ok(words.join(" "))
    }

    fn value_of(flag: &Flag) -> Option<&'static str> {
        match flag.argument {
            Argument::None | Argument::Switch => None,
            Argument::Required | Argument::Optional => {
                Some(flag.values.first().copied().unwrap_or("1"))
            }
        }
    }

    fn words_of(flag: &Flag, command: &str) -> Words {
        let name = format!("--{}", flag.name);
        let option = match value_of(flag) {
            Some(value) => format!("{name}={value}"),
            None => name,
        };
        line(&[command, &option])
    }

    #[test]
    fn every_option_is_taken_accepted_or_refused_by_name() {
        let special = ["help", "version", "exec-cmd", "sync", "daemon", "image"];
        for (name, command) in [
            ("dump", Command::Dump),
            ("pre-dump", Command::PreDump),
            ("restore", Command::Restore),
            ("check", Command::Check),
        ] {
            for flag in FLAGS.iter().filter(|flag| !special.contains(&flag.name)) {
                let outcome = read(&[words_of(flag, name)]);
                let text = format!("{name} --{}: {outcome:?}", flag.name);
                match flag.fate(command) {
                    Fate::Refused => {
                        let error = outcome.expect_err(&text).to_string();
                        let expected = format!("--{} of criu(8) is not supported yet", flag.name);
                        assert_eq!(error, expected);
                    }
                    Fate::Idle => {
                        let reading = outcome.expect(&text);
                        assert_eq!(reading.idle, [flag.name], "{text}");
                        assert!(reading.words().is_empty(), "{text}");
                    }
                    Fate::Taken | Fate::Misplaced => {
                        let reading = outcome.expect(&text);
                        let words = reading.words();
                        let word = words[0].to_str().unwrap();
                        let word = word.split_once('=').map_or(word, |(name, _)| name);
                        assert_eq!(word, format!("--{}", flag.name), "{text}");
                        assert!(reading.idle.is_empty(), "{text}");
                    }
                }
            }
        }
    }

    #[test]
    fn a_refused_switch_may_be_taken_back() {
        for flag in FLAGS
            .iter()
            .filter(|flag| flag.argument == Argument::Switch)
        {
            let off = format!("--no-{}", flag.name);
            let reading = read(&[line(&["dump", &off])]).unwrap();
            assert!(reading.given.is_empty() || flag.name == "sync", "{off}");
        }
    }

    #[test]
    fn every_letter_is_its_long_name() {
        for flag in FLAGS
            .iter()
            .filter(|flag| flag.short.is_some() && flag.name != "help")
        {
            let letter = format!("-{}", flag.short.unwrap());
            let short = match value_of(flag) {
                Some(value) => line(&["restore", &format!("{letter}{value}")]),
                None => line(&["restore", &letter]),
            };
            assert_eq!(
                read(&[short]),
                read(&[words_of(flag, "restore")]),
                "{letter}"
            );
        }
    }

    #[test]
    fn commands_of_criu_are_refused_by_name() {
        for name in REFUSED_COMMANDS {
            let error = read(&[line(&[name, "-D", "x"])]).unwrap_err();
            assert_eq!(error, Error::CommandUnsupported(name));
        }
        assert_eq!(read(&[line(&["bogus"])]).unwrap().words(), ["bogus"]);
    }

    #[test]
    fn options_stand_anywhere() {
        let expected = Ok("--images-dir=dir --shell-job --tree=5".to_owned());
        assert_eq!(words(&["-D", "dir", "dump", "-j", "-t", "5"]), expected);
        assert_eq!(words(&["-Ddir", "-jt5", "dump"]), expected);
        assert_eq!(
            words(&["dump", "--images=dir", "--shell", "--tree", "5"]),
            expected
        );
    }

    #[test]
    fn the_last_word_wins() {
        assert_eq!(words(&["dump", "-t1", "-t2"]), Ok("--tree=2".to_owned()));
        assert_eq!(
            words(&["dump", "-s", "-R"]),
            Ok("--leave-running".to_owned())
        );
        assert_eq!(
            words(&["dump", "-R", "-s"]),
            Ok("--leave-stopped".to_owned())
        );
        assert_eq!(words(&["dump", "-j", "--no-shell-job"]), Ok(String::new()));
        assert_eq!(
            words(&["dump", "--no-shell-job", "-j"]),
            Ok("--shell-job".to_owned())
        );
        assert_eq!(words(&["restore", "-d", "--no-daemon"]), Ok(String::new()));
        assert_eq!(
            words(&["restore", "--daemon"]),
            Ok("--restore-detached".to_owned())
        );
        assert_eq!(words(&["dump", "--no-sync"]), Ok("--no-sync".to_owned()));
        assert_eq!(words(&["dump", "--no-sync", "--sync"]), Ok(String::new()));
        assert_eq!(
            words(&["restore", "-R", "-s"]),
            Ok("--leave-stopped".to_owned())
        );
        assert_eq!(words(&["restore", "-s", "-R"]), Ok(String::new()));
    }

    #[test]
    fn every_word_of_a_repeated_option_counts() {
        let both = Ok("--action-script=a --action-script=b".to_owned());
        assert_eq!(
            words(&["dump", "--action-script", "a", "--action-script=b"]),
            both
        );
    }

    #[test]
    fn verbosity_is_a_number_or_letters() {
        for (given, level) in [
            (&["-v"][..], "3"),
            (&["-vv"], "4"),
            (&["-v", "-v"], "4"),
            (&["-vvvv"], "6"),
            (&["-v4"], "4"),
            (&["-v0"], "0"),
            (&["--verbosity=1"], "1"),
            (&["--verbosity"], "3"),
            (&["-v1", "-v"], "2"),
            (&["-jv4"], "4"),
        ] {
            let mut line = vec!["dump"];
            line.extend(given);
            let expected = format!("--verbosity={level}");
            assert!(words(&line).unwrap().ends_with(&expected), "{given:?}");
        }
    }

    #[test]
    fn the_command_of_exec_cmd_is_left_alone() {
        assert_eq!(
            words(&[
                "restore",
                "-D",
                "x",
                "--exec-cmd",
                "--",
                "sh",
                "-c",
                "--tree"
            ]),
            Ok("--images-dir=x --exec-cmd -- sh -c --tree".to_owned())
        );
        assert_eq!(
            words(&["restore", "--exec-cmd", "--"]),
            Err("--exec-cmd needs a command behind --".to_owned())
        );
    }

    #[test]
    fn mistakes_are_told() {
        for (given, expected) in [
            (&["dump", "--tree"][..], "--tree needs an argument"),
            (&["dump", "-t"], "--tree needs an argument"),
            (&["dump", "--shell-job=yes"], "--shell-job has no argument"),
            (
                &["dump", "--tcp"],
                "--tcp may be any of --tcp-close, --tcp-established",
            ),
            (
                &["dump", "--pre-dump-mode=fast"],
                "--pre-dump-mode cannot be \"fast\"; it can be read, splice",
            ),
        ] {
            assert_eq!(words(given), Err(expected.to_owned()), "{given:?}");
        }
    }

    #[test]
    fn later_sources_override_earlier_ones() {
        let sources = [
            file(&["--work-dir", "a"]),
            file(&["--shell-job"]),
            file(&["--leave-running"]),
            file(&["--action-script", "first"]),
            line(&[
                "dump",
                "-W",
                "b",
                "--no-shell-job",
                "-s",
                "--action-script",
                "second",
            ]),
        ];
        let reading = read(&sources).unwrap();
        let expected = [
            "--action-script=first",
            "--work-dir=b",
            "--leave-stopped",
            "--action-script=second",
        ];
        assert_eq!(reading.words(), expected);
    }

    #[test]
    fn what_is_wrong_in_a_file_is_told_with_its_place() {
        let dump = || line(&["dump"]);
        for (words, expected) in [
            (
                &["--skip-mnt", "x"][..],
                "--skip-mnt of criu(8) is not supported yet",
            ),
            // It may be a line of a file that the caller may not read.
            (&["--bogus"], "unknown option"),
            (&["--tree"], "--tree needs an argument"),
        ] {
            let error = read(&[file(words), dump()]).unwrap_err().to_string();
            assert_eq!(error, format!("{expected} (default.conf, line 3)"));
        }
    }

    #[test]
    fn unknown_words_reach_the_parser() {
        assert_eq!(
            words(&["dump", "--bogus", "-t5"]),
            Ok("--tree=5 --bogus".to_owned())
        );
        assert_eq!(words(&["dump", "extra", "-Q"]), Ok("-Q extra".to_owned()));
    }

    #[test]
    fn the_configuration_is_found_before_anything_else() {
        let of = |words: &[&str]| configuration(&line(words).words);
        assert_eq!(of(&["dump"]), (true, None));
        assert_eq!(of(&["dump", "--no-default-config"]), (false, None));
        assert_eq!(of(&["--config", "f", "dump"]), (false, Some("f".into())));
        assert_eq!(of(&["--config=f"]), (false, Some("f".into())));
        assert_eq!(
            of(&["restore", "--exec-cmd", "--", "--config=f"]),
            (true, None)
        );
    }
}
