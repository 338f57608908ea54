//! The program's words on stdout and stderr.

use std::io::Write as _;

/// Writes `text` to stdout. A reader that went away is not an error of ours.
pub fn say(text: &str) {
    let mut stdout = std::io::stdout().lock();
    let _ = stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush());
}

/// Writes `text` to stderr.
pub fn complain(text: &str) {
    let _ = std::io::stderr().write_all(text.as_bytes());
}
