//! Debian's programs for i386, which tests run beside those of this machine: unpacked into a folder
//! of their own, not installed.
use std::path::Path;
use std::process::Command;

use crate::debian::{self, Lists};
use crate::error::Result;
use crate::repo;

/// Where the tests look for them.
const PROGRAMS: &str = "/var/cache/stillframe/i386";
/// What they are of.
const SUITE: &str = "bookworm";
/// A program that needs nothing else, and one with threads and its libraries.
const PACKAGES: [&str; 7] = [
    "busybox-static",
    "python3.11-minimal",
    "libpython3.11-minimal",
    "libc6",
    "libcrypt1",
    "libexpat1",
    "zlib1g",
];

/// Fetches them unless they are there. Where they cannot be fetched, that is told: their tests skip
/// themselves.
pub fn fetch() {
    let at = Path::new(PROGRAMS);
    if at.exists() {
        return;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("not root: Debian's programs for i386 are not fetched");
        return;
    }
    eprintln!("missing: Debian's programs for i386: tests dump and restore them");
    if let Err(error) = fetch_to(at) {
        eprintln!("they cannot be fetched, and what needs them is left out: {error}");
    }
}

fn fetch_to(at: &Path) -> Result<()> {
    let lists = Lists::for_processor(&[SUITE], "i386")?;
    let part = lists.scratch().join("i386");
    std::fs::create_dir(&part).map_err(repo::file_error("make", &part))?;
    for name in PACKAGES {
        debian::unpack(&lists.download(name)?, &part, &[])?;
    }
    // Whether this kernel runs them.
    repo::output(Command::new(part.join("bin/busybox")).arg("true"))?;
    debian::put(&part, at)
}
