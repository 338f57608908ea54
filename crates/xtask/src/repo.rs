//! Where the repository's things are, and how programs are run in it.
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::{Error, Result};

/// The target that `.cargo/config.toml` names.
pub const TARGET: &str = "x86_64-unknown-linux-gnu";

/// Returns the repository's top folder: two above this crate.
pub fn root() -> &'static Path {
    let crate_folder = Path::new(env!("CARGO_MANIFEST_DIR"));
    crate_folder
        .ancestors()
        .nth(2)
        .expect("this crate lies in crates/xtask")
}

/// Returns the folder that holds what cargo makes.
pub fn target_folder() -> PathBuf {
    match std::env::var_os("CARGO_TARGET_DIR") {
        Some(folder) => root().join(folder),
        None => root().join("target"),
    }
}

/// Returns the folder that holds what a release build makes.
pub fn release_folder() -> PathBuf {
    target_folder().join(TARGET).join("release")
}

/// Returns a cargo command in the repository's top folder.
pub fn cargo(arguments: &[&str]) -> Command {
    let program = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(program);
    command.args(arguments).current_dir(root());
    command
}

/// Runs a command to its end, with this program's standard streams.
///
/// # Errors
/// When it cannot be started or does not end with success.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .map_err(|source| start_error(command, source))?;
    check(command, status)
}

/// Runs a command to its end and returns what it wrote on stdout.
///
/// # Errors
/// When it cannot be started or does not end with success.
pub fn output(command: &mut Command) -> Result<String> {
    command.stderr(Stdio::inherit()).stdin(Stdio::null());
    let output = command
        .output()
        .map_err(|source| start_error(command, source))?;
    check(command, output.status)?;
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Builds the release binary and returns its path.
///
/// # Errors
/// When the build fails.
pub fn build_stillframe() -> Result<PathBuf> {
    build_release("cli")?;
    Ok(release_folder().join("stillframe"))
}

/// Builds one package of the workspace in release.
///
/// # Errors
/// When the build fails.
pub fn build_release(package: &str) -> Result<()> {
    run(&mut cargo(&[
        "build",
        "--quiet",
        "--locked",
        "--release",
        "--package",
        package,
    ]))
}

/// Returns an error about a file or folder, to be given to `map_err`.
pub fn file_error(doing: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
    let path = path.to_path_buf();
    move |source| Error::File {
        doing,
        path,
        source,
    }
}

/// Returns an error about a command that could not be started.
pub fn start_error(command: &Command, source: std::io::Error) -> Error {
    Error::Start {
        program: command.get_program().to_string_lossy().into_owned(),
        source,
    }
}

fn check(command: &Command, status: std::process::ExitStatus) -> Result<()> {
    if status.success() {
        return Ok(());
    }
    let words: Vec<_> = std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy())
        .collect();
    Err(Error::Status {
        command: words.join(" "),
        status,
    })
}
