//! The emulator of a newer Debian, which tests use beside the installed one: unpacked into a folder
//! of its own, not installed.
use std::path::Path;
use std::process::Command;

use crate::debian::{self, Lists};
use crate::error::Result;
use crate::repo;

/// Where the tests look for it (`testkit::machine::emulator`).
const EMULATOR: &str = "/var/cache/stillframe/emulator/backports";
/// What has newer versions for the suite, and the suite.
const SUITES: [&str; 2] = ["bookworm", "bookworm-backports"];
/// The program, and what it reads when it starts. Its libraries are those that the installed one
/// (`packages::FOR_TESTS`) has as well.
const PACKAGES: [&str; 4] = [
    "qemu-system-x86",
    "qemu-system-common",
    "qemu-system-data",
    "seabios",
];

/// Fetches it unless it is there. Where it cannot be fetched, that is told: its tests skip
/// themselves.
pub fn fetch() {
    let at = Path::new(EMULATOR);
    if at.exists() {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("not root: the emulator of {} is not fetched", SUITES[1]);
        return;
    }
    eprintln!(
        "missing: the emulator of {}: tests run machines with it, too",
        SUITES[1]
    );
    if let Err(error) = fetch_to(at) {
        eprintln!("it cannot be fetched, and what needs it is left out: {error}");
    }
}

fn fetch_to(at: &Path) -> Result<()> {
    let lists = Lists::of(&SUITES)?;
    let part = lists.scratch().join("emulator");
    std::fs::create_dir(&part).map_err(repo::file_error("make", &part))?;
    for name in PACKAGES {
        let package = lists.download(&format!("{name}/{}", SUITES[1]))?;
        debian::unpack(&package, &part, &[])?;
    }
    // Whether its libraries are there.
    repo::output(Command::new(part.join("usr/bin/qemu-system-x86_64")).arg("--version"))?;
    let parent = at.parent().unwrap_or(at);
    std::fs::create_dir_all(parent).map_err(repo::file_error("make", parent))?;
    debian::put(&part, at)
}
