//! Fills the structures of dump and restore without the parser.
//!
//! Building a parser for forty options takes a tenth of a millisecond, a twentieth of a dump.
//! [`crate::reading`] has already made plain `--name=value` words of the command line, so they can
//! be put where they belong directly. Whatever is out of the ordinary, help and mistakes above
//! all, is left to the parser: `None` means "ask it". A test compares the two on every option.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt as _;

/// A structure of options that can be filled word by word.
pub trait Fill {
    /// Puts the option `name` in its place; `None` where it has none or its value is odd.
    fn fill(&mut self, name: &str, value: Option<&OsStr>) -> Option<()>;
}

/// Fills `target` from `words`; what stands behind `--` is returned.
pub fn fill(target: &mut impl Fill, words: &[OsString]) -> Option<Vec<OsString>> {
    for (index, word) in words.iter().enumerate() {
        if word == "--" {
            return Some(words[index + 1..].to_vec());
        }
        let (name, value) = split(word)?;
        target.fill(name, value)?;
    }
    Some(Vec::new())
}

/// Splits `--name=value`; a word of another form is `None`.
pub fn split(word: &OsStr) -> Option<(&str, Option<&OsStr>)> {
    let bytes = word.as_bytes().strip_prefix(b"--")?;
    let (name, value) = match bytes.iter().position(|&byte| byte == b'=') {
        Some(at) => (&bytes[..at], Some(OsStr::from_bytes(&bytes[at + 1..]))),
        None => (bytes, None),
    };
    Some((str::from_utf8(name).ok()?, value))
}

/// Returns a value that has to be there and to be text.
pub fn text(value: Option<&OsStr>) -> Option<&str> {
    value?.to_str().filter(|text| !text.is_empty())
}

/// Returns a value that has to be there and not to be empty, as a path.
pub fn path(value: Option<&OsStr>) -> Option<std::path::PathBuf> {
    value.filter(|value| !value.is_empty()).map(Into::into)
}

/// Returns a number that has to be there, written with digits alone.
pub fn number<T: std::str::FromStr>(value: Option<&OsStr>) -> Option<T> {
    text(value)?.parse().ok()
}

/// Returns true for an option without a value.
pub fn flag(value: Option<&OsStr>) -> Option<bool> {
    value.is_none().then_some(true)
}
