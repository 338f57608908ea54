//! The program's words on stdout and stderr.

use std::io::{ErrorKind, Write as _};
use std::sync::OnceLock;

use serde_json::Value;

/// Why something could not be said.
static UNSAID: OnceLock<std::io::Error> = OnceLock::new();

/// Writes `text` to stdout. A reader that went away is not an error of ours; any other failure is
/// kept for [`unsaid`].
pub fn say(text: &str) {
    let mut stdout = std::io::stdout().lock();
    let said = stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush());
    if let Err(error) = said
        && error.kind() != ErrorKind::BrokenPipe
    {
        // The first one tells enough.
        let _ = UNSAID.set(error);
    }
}

/// Says a result, as a line of JSON where that is asked for.
pub fn tell(is_json: bool, json: impl FnOnce() -> Value, text: impl FnOnce() -> String) {
    match is_json {
        true => say(&format!("{}\n", json())),
        false => say(&text()),
    }
}

/// Returns why something could not be written to stdout, if it could not.
pub fn unsaid() -> Option<&'static std::io::Error> {
    UNSAID.get()
}

/// Writes `text` to stderr.
pub fn complain(text: &str) {
    let _ = std::io::stderr().write_all(text.as_bytes());
}
