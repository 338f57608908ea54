//! Tests on another kernel: an emulated machine boots it and runs the tests of the calling program
//! there, out of a first file system that holds nothing but our own static programs.
//!
//! A test says [`on_kernel!`](crate::on_kernel) at its beginning and is ordinary code from there
//! on. Outside, the first such test has all tests of the program that are for any kernel run, one
//! after the other in one machine for each kernel, and each of them is told how it went.
//!
//! ```text
//! mod linux_6_1 {
//!     #[test]
//!     fn a_dump_works() {
//!         testkit::on_kernel!("linux_6_1");
//!         // From here on, this is Linux 6.1.
//!     }
//! }
//! ```
//!
//! The emulator counts instructions, and they are the machine's clock: however busy the host is, no
//! deadline inside passes earlier than on an idle one, and waiting for nothing but time takes none.
pub mod archive;
mod emulator;
pub mod inside;
pub mod leg;
pub mod linux;
mod stay;

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, BufWriter};
use std::panic::resume_unwind;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::thread::ScopedJoinHandle;

use archive::Archive;

use crate::{skip, stillframe, subject};

/// The environment variable that tells a test that it runs inside.
const INSIDE: &str = "STILLFRAME_INSIDE";
/// What a line of the machine begins with that is for us.
const MARK: &str = "@machine ";
/// Where things are inside: the tests to run, the kernel's modules, and our programs, as far
/// apart as where cargo puts them.
const PLAN: &str = "/etc/plan";
const MODULES: &str = "/lib/modules";
const STILLFRAME: &str = "/test/stillframe";
const SUBJECT: &str = "/test/subject";
const PROGRAM: &str = "/test/deps/program";

/// Where `cargo xtask test` puts the kernels.
const KERNELS: &str = "/var/cache/stillframe/kernel";
/// Each kernel under the name of the modules with its tests, and the suite of Debian that has it.
/// (Not 6.12 of trixie: under write protection, the emulator of Debian 12 breaks it now and then.)
const SUITES: &[(&str, &str)] = &[("linux_6_1", "bookworm")];

/// How a test went inside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// It passed.
    Passed,
    /// It was not run, and why.
    Left(String),
    /// It failed, or never ran though it should have: all that was said.
    Failed(String),
}

/// Tells whether this is inside.
pub fn is_inside() -> bool {
    std::env::var_os(INSIDE).is_some()
}

/// How the tests of a program went on a kernel, by name; or why none was run.
type Verdicts = Result<BTreeMap<String, Verdict>, String>;

/// How the calling program's `test` went on `kernel`, with `stillframe` as the command under test.
///
/// The first call runs all tests that the program has in modules named as kernels, each kernel in a
/// machine of its own, side by side.
///
/// # Panics
/// When there is no kernel of that name.
pub fn verdict(kernel: &str, test: &str, stillframe: &str) -> Verdict {
    static KERNELS: OnceLock<BTreeMap<&str, Verdicts>> = OnceLock::new();
    let kernels = KERNELS.get_or_init(|| {
        let tests = tests().unwrap_or_else(|error| panic!("list this program's tests: {error}"));
        std::thread::scope(|scope| {
            let run = |(name, suite)| {
                let of_kernel = |test: &&String| test.split("::").next() == Some(name);
                let tests = tests.iter().filter(of_kernel).cloned().collect::<Vec<_>>();
                (name, scope.spawn(move || run(suite, stillframe, &tests)))
            };
            let running = SUITES.iter().copied().map(run).collect::<Vec<_>>();
            let join = |(name, thread): (_, ScopedJoinHandle<'_, _>)| {
                (
                    name,
                    thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
                )
            };
            running.into_iter().map(join).collect()
        })
    });
    let test = test.split_once("::").map_or(test, |(_, test)| test);
    match &kernels[kernel] {
        Err(why) => Verdict::Left(why.clone()),
        Ok(verdicts) => verdicts.get(test).cloned().unwrap_or_else(|| {
            Verdict::Failed(format!(
                "{test} is not in the module {kernel} of its program"
            ))
        }),
    }
}

/// Runs `tests` on the kernel of `suite`.
fn run(suite: &str, stillframe: &str, tests: &[String]) -> Verdicts {
    if tests.is_empty() {
        return Ok(BTreeMap::new());
    }
    let folder = Path::new(KERNELS).join(suite);
    if !folder.join("vmlinuz").exists() {
        return Err(format!("no kernel of Debian {suite} in {KERNELS}"));
    }
    let emulator = skip::find_program(emulator::PROGRAM)
        .ok_or_else(|| format!("{} is not installed", emulator::PROGRAM))?;
    let stillframe = match std::env::var_os(stillframe::VARIABLE).map(PathBuf::from) {
        Some(other) if !other.ends_with("stillframe") => {
            return Err("a peer is not static".to_owned());
        }
        other => other.unwrap_or_else(|| PathBuf::from(stillframe)),
    };
    let scratch = tempfile::tempdir().expect("the folder for temporary files can be written");
    let archive = scratch.path().join("files");
    pack(&archive, &folder, &stillframe, tests)
        .unwrap_or_else(|error| panic!("make {}: {error}", archive.display()));
    let machine = emulator::Machine {
        kernel: &folder.join("vmlinuz"),
        archive: &archive,
        processor: "max",
        out: None,
    };
    let told = emulator::run(&emulator, &machine);
    Ok(told.verdicts(tests))
}

/// The calling program's tests.
fn tests() -> io::Result<Vec<String>> {
    let listed = Command::new(std::env::current_exe()?)
        .args(["--list", "--format", "terse"])
        .output()?;
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    let tests = listed
        .lines()
        .filter_map(|line| line.strip_suffix(": test"));
    Ok(tests.map(str::to_owned).collect())
}

/// Writes the machine's first file system.
fn pack(path: &Path, kernel: &Path, stillframe: &Path, tests: &[String]) -> io::Result<()> {
    let mut archive = Archive::new(BufWriter::new(fs::File::create(path)?))?;
    for folder in ["bin", "lib", "lib/modules", "test", "test/deps"] {
        archive.folder(folder)?;
    }
    let inside = |path: &'static str| path.strip_prefix('/').expect("they are absolute");
    for (name, program) in [
        ("init", subject::built("guest")),
        (inside(SUBJECT), subject::binary().to_owned()),
        (inside(STILLFRAME), stillframe.to_owned()),
        (inside(PROGRAM), std::env::current_exe()?),
    ] {
        archive.file(name, &without_symbols(&program)?)?;
    }
    archive.link("bin/setsid", "/init")?;
    archive.file("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\n")?;
    for module in fs::read_dir(kernel)? {
        let path = module?.path();
        if path.extension().is_some_and(|end| end == "ko") {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            archive.file(&format!("{}/{name}", inside(MODULES)), &fs::read(&path)?)?;
        }
    }
    let lines = tests.iter().map(|test| format!("{PROGRAM} {test}\n"));
    archive.file(inside(PLAN), lines.collect::<String>().as_bytes())?;
    archive.finish()?;
    Ok(())
}

/// A program, smaller where there is a strip(1): the machine has to copy it.
fn without_symbols(program: &Path) -> io::Result<Vec<u8>> {
    let smaller = tempfile::NamedTempFile::new()?;
    let mut strip = Command::new("strip");
    strip.arg("-o").arg(smaller.path()).arg(program);
    match strip.output() {
        Ok(output) if output.status.success() => fs::read(smaller.path()),
        _ => fs::read(program),
    }
}

/// Runs the rest of the test around it on another kernel, which is named as the module that it is
/// in: see [`machine`](crate::machine). The test is skipped where that is not possible.
#[macro_export]
macro_rules! on_kernel {
    ($kernel:expr) => {
        if !$crate::machine::is_inside() {
            fn marker() {}
            let test = $crate::skip::test_name(::std::any::type_name_of_val(&marker));
            let stillframe = ::std::env!("CARGO_BIN_EXE_stillframe");
            match $crate::machine::verdict($kernel, test, stillframe) {
                $crate::machine::Verdict::Passed => return,
                $crate::machine::Verdict::Left(why) => $crate::skip!("{why}"),
                $crate::machine::Verdict::Failed(told) => panic!("on {}: {told}", $kernel),
            }
        }
    };
}
