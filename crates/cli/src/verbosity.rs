//! `-v`, `-vv`, `-v4` and `--verbosity` add up as they do with criu(8), wherever they stand.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};

use clap::{Arg, Command};

use crate::logfile;

/// The option's name.
const NAME: &str = "verbosity";

/// The level after one more occurrence, whose argument is what stands behind `-v` or `=`.
pub fn more(level: Option<u32>, argument: Option<&[u8]>) -> u32 {
    let current = level.unwrap_or(logfile::DEFAULT_VERBOSITY);
    match argument {
        None => current + 1,
        Some(vs) if !vs.is_empty() && vs.iter().all(|&v| v == b'v') => {
            current + 1 + u32::try_from(vs.len()).unwrap_or(0)
        }
        Some(text) => leading_number(text),
    }
}

/// The number that a text begins with, as atoi(3) has it: 0 where there is none. So `-verbosity=0`,
/// which is `-v` and "erbosity=0", asks for silence, as it does with criu(8).
fn leading_number(text: &[u8]) -> u32 {
    let digits = text.iter().take_while(|byte| byte.is_ascii_digit());
    digits.fold(0, |number: u32, digit| {
        number
            .saturating_mul(10)
            .saturating_add((digit - b'0').into())
    })
}

/// Makes one `--verbosity=LEVEL` of all that stand in the words of `command`, which clap would
/// otherwise give the next word to, or refuse at the end.
pub fn fold(command: &Command, words: Vec<OsString>) -> Vec<OsString> {
    let mut place = Place {
        command,
        level: None,
        kept: Vec::new(),
    };
    let mut words = words.into_iter();
    while let Some(word) = words.next() {
        if word == "--" {
            place.put_level();
            place.kept.push(word);
            break;
        }
        if place.take(word) {
            // The argument of an option is none itself.
            place.kept.extend(words.next());
        }
    }
    place.put_level();
    place.kept.extend(words);
    place.kept
}

/// How far the words are read.
struct Place<'a> {
    /// The command or what it was followed by: the one whose options come next.
    command: &'a Command,
    level: Option<u32>,
    kept: Vec<OsString>,
}

impl<'a> Place<'a> {
    fn put_level(&mut self) {
        if let Some(level) = self.level.take() {
            self.kept.push(format!("--{NAME}={level}").into());
        }
    }

    /// Takes a word; whether the next one is its argument.
    fn take(&mut self, word: OsString) -> bool {
        let bytes = word.as_bytes();
        if let Some(long) = bytes.strip_prefix(b"--") {
            return self.take_long(long.to_vec(), word);
        }
        if let Some(letters) = bytes.strip_prefix(b"-").filter(|rest| !rest.is_empty()) {
            return self.take_letters(letters.to_vec());
        }
        if let Some(next) = self.command.find_subcommand(&word) {
            self.command = next;
        }
        self.kept.push(word);
        false
    }

    fn take_long(&mut self, long: Vec<u8>, word: OsString) -> bool {
        let mut parts = long.splitn(2, |&byte| byte == b'=');
        let name = parts.next().unwrap_or_default();
        let argument = parts.next();
        let known = self.find(|arg| arg.get_long().is_some_and(|long| long.as_bytes() == name));
        if known.is_some() && name == NAME.as_bytes() {
            self.level = Some(more(self.level, argument));
            return false;
        }
        self.kept.push(word);
        argument.is_none() && known.is_some_and(wants_next)
    }

    fn take_letters(&mut self, letters: Vec<u8>) -> bool {
        for (index, &letter) in letters.iter().enumerate() {
            let known = self.find(|arg| arg.get_short() == Some(letter.into()));
            let rest = &letters[index + 1..];
            match known {
                Some(arg) if arg.get_id() == NAME => {
                    let argument = (!rest.is_empty()).then_some(rest);
                    self.level = Some(more(self.level, argument));
                    if index > 0 {
                        self.keep_letters(&letters[..index]);
                    }
                    return false;
                }
                Some(arg) if arg.get_action().takes_values() => {
                    self.keep_letters(&letters);
                    return rest.is_empty() && wants_next(arg);
                }
                _ => {}
            }
        }
        self.keep_letters(&letters);
        false
    }

    fn keep_letters(&mut self, letters: &[u8]) {
        let word = [b"-", letters].concat();
        self.kept.push(OsString::from_vec(word));
    }

    fn find(&self, is: impl Fn(&Arg) -> bool) -> Option<&'a Arg> {
        self.command.get_arguments().find(|arg| is(arg))
    }
}

/// True if an option that stands alone takes the next word as its value.
fn wants_next(arg: &Arg) -> bool {
    arg.get_action().takes_values() && !arg.is_require_equals_set()
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Args as _;

    fn folded(line: &str) -> String {
        let command = crate::machine::Vm::augment_args(Command::new("vm"));
        let words = line.split(' ').map(OsString::from).collect();
        let words = fold(&command, words);
        let words = words.iter().map(|word| word.to_str().unwrap());
        words.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn verbosity_alone_takes_no_word() {
        for (line, expected) in [
            ("save --qmp x -D y -v", "save --qmp x -D y --verbosity=3"),
            ("save -v --qmp x -D y", "save --qmp x -D y --verbosity=3"),
            ("save -vv -D y --qmp x", "save -D y --qmp x --verbosity=4"),
            ("save -v -v3 -v -D y", "save -D y --verbosity=4"),
            ("save --verbosity -D y", "save -D y --verbosity=3"),
            ("save --verbosity=0 -D y", "save -D y --verbosity=0"),
            ("save -Rv4 -D y", "save -R -D y --verbosity=4"),
            (
                "restore -v -D y -- qemu -v",
                "restore -D y --verbosity=3 -- qemu -v",
            ),
        ] {
            assert_eq!(folded(line), expected, "{line}");
        }
    }

    #[test]
    fn arguments_of_others_and_commands_without_it_stay() {
        for line in [
            "save -D -v",
            "save --qmp -v -D x",
            "save -Dv",
            "templates -v",
            "save --unknown -x",
        ] {
            assert_eq!(folded(line), line);
        }
    }

    #[test]
    fn levels_add_up_as_with_criu() {
        assert_eq!(more(None, None), 3);
        assert_eq!(more(None, Some(b"v")), 4);
        assert_eq!(more(Some(4), Some(b"0")), 0);
        assert_eq!(more(None, Some(b"erbosity=4")), 0);
        assert_eq!(more(None, Some(b"12x")), 12);
    }
}
