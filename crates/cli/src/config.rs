//! Configuration files: options without their dashes, one a line, as those of criu(8).

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use crate::command_line::{Origin, Words};

/// The file for everybody.
pub const GLOBAL: &str = "/etc/stillframe/default.conf";
/// The file of one user, below the home directory.
pub const USER: &str = ".stillframe/default.conf";
/// The environment variable that names one more file.
pub const VARIABLE: &str = "STILLFRAME_CONFIG_FILE";

/// A configuration file that cannot be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read the configuration file {}", .path.display())]
pub struct UnreadableFile {
    /// The file.
    pub path: PathBuf,
    /// Why.
    #[source]
    pub source: std::io::Error,
}

/// Configuration files, in the order in which a later file overrides an earlier one.
#[derive(Debug, Default)]
pub struct Places {
    /// Files that may be missing.
    pub optional: Vec<PathBuf>,
    /// Files that somebody named: they must be there.
    pub named: Vec<PathBuf>,
}

impl Places {
    /// Returns the places for a command line that wants the default files or not, and that names a
    /// file or not. `home` and `variable` are the environment's.
    pub fn new(
        defaults: bool,
        named: Option<OsString>,
        home: Option<OsString>,
        variable: Option<OsString>,
    ) -> Self {
        let mut places = Self::default();
        if defaults {
            places.optional.push(GLOBAL.into());
            places
                .optional
                .extend(home.map(|home| Path::new(&home).join(USER)));
        }
        places.named.extend(variable.map(PathBuf::from));
        places.named.extend(named.map(PathBuf::from));
        places
    }

    /// Returns the same with the places that the environment names.
    pub fn of_environment(defaults: bool, named: Option<OsString>) -> Self {
        let (home, variable) = (std::env::var_os("HOME"), std::env::var_os(VARIABLE));
        Self::new(defaults, named, home, variable)
    }

    /// Reads every file that is there.
    ///
    /// # Errors
    /// A named file that is missing, or any that cannot be read.
    pub fn read(&self) -> Result<Vec<Words>, UnreadableFile> {
        let mut lines = Vec::new();
        let optional = self.optional.iter().map(|path| (path, true));
        for (path, may_miss) in optional.chain(self.named.iter().map(|path| (path, false))) {
            match std::fs::read(path) {
                Ok(text) => lines.extend(parse(path, &text)),
                Err(error) if may_miss && is_out_of_reach(&error) => {}
                Err(source) => {
                    return Err(UnreadableFile {
                        path: path.clone(),
                        source,
                    });
                }
            }
        }
        Ok(lines)
    }
}

/// Tells that a default file is not there for this user, as for one whose `HOME` is another's.
fn is_out_of_reach(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{NotADirectory, NotFound, PermissionDenied};
    matches!(error.kind(), NotFound | PermissionDenied | NotADirectory)
}

/// Splits a file into its lines' words; the first of each line gets its dashes.
fn parse(path: &Path, text: &[u8]) -> Vec<Words> {
    let mut lines = Vec::new();
    for (index, line) in text.split(|&byte| byte == b'\n').enumerate() {
        let mut words = split(line);
        if let Some(first) = words.first_mut() {
            let mut name = OsString::from("--");
            name.push(&*first);
            *first = name;
            let origin = Origin::File(path.display().to_string(), index + 1);
            lines.push(Words { origin, words });
        }
    }
    lines
}

/// Splits a line at white space; `#` begins a comment and `"` a word with white space in it, in
/// which `\"` is a quotation mark.
fn split(line: &[u8]) -> Vec<OsString> {
    let mut words = Vec::new();
    let mut rest = line;
    loop {
        rest = rest.trim_ascii_start();
        match rest.first() {
            None | Some(b'#') => return words,
            Some(b'"') => {
                let (word, after) = quoted(&rest[1..]);
                words.push(OsString::from_vec(word));
                rest = after;
            }
            Some(_) => {
                let end = rest
                    .iter()
                    .position(u8::is_ascii_whitespace)
                    .unwrap_or(rest.len());
                words.push(OsStr::from_bytes(&rest[..end]).to_owned());
                rest = &rest[end..];
            }
        }
    }
}

fn quoted(text: &[u8]) -> (Vec<u8>, &[u8]) {
    let mut word = Vec::new();
    let mut at = 0;
    while let Some(&byte) = text.get(at) {
        match byte {
            b'"' => return (word, &text[at + 1..]),
            b'\\' if text.get(at + 1) == Some(&b'"') => {
                word.push(b'"');
                at += 2;
            }
            byte => {
                word.push(byte);
                at += 1;
            }
        }
    }
    (word, &[])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> Vec<String> {
        let lines = parse(Path::new("f"), text.as_bytes());
        lines
            .iter()
            .map(|line| format!("{:?}", line.words))
            .collect()
    }

    #[test]
    fn lines_become_options() {
        let text = "tcp-established\n\
                    \t work-dir \"/a b/my \\\"work\\\" dir\"\n\
                    # nothing\n\
                    \n\
                    no-restore-sibling # a remark\n\
                    ghost-limit=2M\n\
                    root \"\"\n\
                    log-file \"open";
        assert_eq!(
            parsed(text),
            [
                r#"["--tcp-established"]"#,
                r#"["--work-dir", "/a b/my \"work\" dir"]"#,
                r#"["--no-restore-sibling"]"#,
                r#"["--ghost-limit=2M"]"#,
                r#"["--root", ""]"#,
                r#"["--log-file", "open"]"#,
            ]
        );
    }

    #[test]
    fn lines_know_their_place() {
        let lines = parse(Path::new("f"), b"\n#\nall\n");
        assert_eq!(lines[0].origin, Origin::File("f".to_owned(), 3));
    }

    #[test]
    fn places_are_read_in_order() {
        let dir = tempfile::tempdir().unwrap();
        let write = |name: &str, text: &str| {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(&path, text).unwrap();
            path.into_os_string()
        };
        write(USER, "log-file user");
        let variable = write("variable.conf", "log-file variable");
        let named = write("named.conf", "log-file named");
        let home = || Some(dir.path().as_os_str().to_owned());
        let files = |places: Places| -> Vec<OsString> {
            let lines = places.read().unwrap();
            lines.iter().map(|line| line.words[1].clone()).collect()
        };
        let all = Places::new(true, Some(named.clone()), home(), Some(variable.clone()));
        assert_eq!(all.optional[0], Path::new(GLOBAL));
        assert_eq!(files(all), ["user", "variable", "named"]);
        let without_defaults = Places::new(false, Some(named), home(), Some(variable));
        assert_eq!(files(without_defaults), ["variable", "named"]);
    }

    #[test]
    fn only_a_named_file_must_be_there() {
        let dir = tempfile::tempdir().unwrap();
        let missing = dir.path().join("missing").into_os_string();
        assert!(
            Places::new(true, None, Some(missing.clone()), None)
                .read()
                .is_ok()
        );
        let error = Places::new(true, Some(missing.clone()), None, None)
            .read()
            .unwrap_err();
        assert_eq!(error.path, missing);
    }
}
