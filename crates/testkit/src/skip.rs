//! Tests that cannot run here say so by name, so that the runner can count them.
//!
//! libtest knows no verdict "skipped at run time": a test that returns early counts as passed. So
//! a test that finds something missing notes it here and returns; `cargo xtask test` reads the
//! notes back, lists them and moves them from the passed to the skipped.
//!
//! ```no_run
//! fn counter_survives() {
//!     testkit::needs_root!();
//!     testkit::needs_program!("redis-server");
//!     if !std::path::Path::new("/dev/ptmx").exists() {
//!         testkit::skip!("no /dev/ptmx");
//!     }
//! }
//! ```
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

/// The environment variable that names the file to which notes are appended, one a line.
pub const VARIABLE: &str = "STILLFRAME_SKIPS";

/// Notes that `test` does not run because of `why`: a `SKIP test: why` line on stderr, and
/// `test: why` in the file named by [`VARIABLE`] where it is set.
///
/// # Panics
/// When that file cannot be written: a note that is lost would count as a pass.
pub fn note(test: &str, why: &str) {
    let why = why.replace('\n', " ");
    eprintln!("SKIP {test}: {why}");
    let Some(path) = std::env::var_os(VARIABLE) else {
        return;
    };
    append(Path::new(&path), &format!("{test}: {why}\n"));
}

/// The environment variable that names the file to which tests that start something are appended,
/// one a line: their package and their name.
pub const END_TO_END_VARIABLE: &str = "STILLFRAME_END_TO_END";

/// Notes that the test whose thread this is needs more than itself: root, or a program that it
/// starts. `cargo xtask test` may try it again where it fails. Programs that it starts have default
/// dispositions and an empty signal mask, whatever this process inherited.
///
/// # Panics
/// When the file that [`END_TO_END_VARIABLE`] names cannot be written.
pub fn note_end_to_end() {
    sys::dispositions::pass_on_defaults();
    let Some(path) = std::env::var_os(END_TO_END_VARIABLE) else {
        return;
    };
    let package = std::env::var("CARGO_PKG_NAME").unwrap_or_default();
    let thread = std::thread::current();
    // A thread that a test has started is none of libtest's, which have their tests' names.
    let Some(name) = thread.name().filter(|name| *name != "main") else {
        return;
    };
    append(Path::new(&path), &format!("{package} {name}\n"));
}

/// Adds a line to a file: one write, as test programs append side by side.
fn append(path: &Path, line: &str) {
    OpenOptions::new()
        .create(true)
        .append(true)
        .open(path)
        .and_then(|mut file| file.write_all(line.as_bytes()))
        .unwrap_or_else(|error| panic!("add a note to {}: {error}", path.display()));
}

/// Tells whether the effective user is root.
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Finds `program` in `PATH` and the administrators' folders.
pub fn find_program(program: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from))
        .map(|folder| folder.join(program))
        .find(|candidate| candidate.is_file())
}

/// Why the kernel may not be looked into, if it may not.
pub fn missing_kernel_memory() -> Option<String> {
    let opened = sys::kernel_memory::KernelMemory::open();
    let described = sys::btf::Types::of_kernel();
    let missing = opened.err().or_else(|| described.err());
    missing.map(|error| error.to_string())
}

/// Strips what the compiler appends to the path of the function around a marker item.
pub fn test_name(marker_path: &'static str) -> &'static str {
    let mut name = marker_path;
    while let Some(shorter) = name
        .strip_suffix("::marker")
        .or_else(|| name.strip_suffix("::{{closure}}"))
    {
        name = shorter;
    }
    name
}

/// Notes that the test around it is skipped, with the reason as `format!` takes it, and returns
/// from it.
#[macro_export]
macro_rules! skip {
    ($($why:tt)+) => {{
        fn marker() {}
        let test = $crate::skip::test_name(::std::any::type_name_of_val(&marker));
        $crate::skip::note(test, &::std::format!($($why)+));
        return;
    }};
}

/// Skips the test around it without root.
#[macro_export]
macro_rules! needs_root {
    () => {
        $crate::skip::note_end_to_end();
        if !$crate::skip::is_root() {
            $crate::skip!("needs root");
        }
    };
}

/// Skips the test around it where no machine can be started on which Linux runs.
#[macro_export]
macro_rules! needs_linux {
    () => {
        if let Some(why) = $crate::machine::linux::missing() {
            $crate::skip!("{why}");
        }
    };
}

/// Skips the test around it where the kernel may not be looked into.
#[macro_export]
macro_rules! needs_kernel_memory {
    () => {
        if let Some(why) = $crate::skip::missing_kernel_memory() {
            $crate::skip!("the kernel cannot be looked into: {why}");
        }
    };
}

/// Skips the test around it where a program is not installed.
#[macro_export]
macro_rules! needs_program {
    ($program:expr) => {
        if $crate::skip::find_program($program).is_none() {
            $crate::skip!("{} is not installed", $program);
        }
    };
}

#[cfg(test)]
mod tests {
    #[test]
    fn names_the_function_around_it() {
        fn marker() {}
        let name = super::test_name(std::any::type_name_of_val(&marker));
        assert!(name.ends_with("::names_the_function_around_it"), "{name}");
    }

    #[test]
    fn finds_what_is_installed_and_nothing_else() {
        assert!(super::find_program("sh").is_some());
        assert!(super::find_program("no-such-program-as-this").is_none());
    }
}
