//! `cargo xtask machines`: what is tested of machines under QEMU and takes too long for all days,
//! and all the rest of these tests with the emulator of a newer Debian.
use crate::error::{Error, Result};
use crate::{emulators, kernels, packages, repo};

/// Runs the tests, with the installed emulator those alone that take long.
///
/// # Errors
/// When the build or a test fails.
pub fn run() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Err(Error::Root {
            task: "cargo xtask machines",
        });
    }
    packages::install(packages::FOR_TESTS)?;
    kernels::fetch();
    emulators::fetch();
    for (emulator, which) in [
        ("installed", "--ignored"),
        ("backports", "--include-ignored"),
    ] {
        eprintln!("machines: with the emulator that is {emulator}");
        let mut command = repo::cargo(&["test", "--locked", "--package", "cli"]);
        // 50 clones leave no processor to other guests, whose deadlines would pass.
        let alone = "--test-threads=1";
        command.args(["--test", "end_to_end", "machines::", "--", which, alone]);
        command.env("STILLFRAME_EMULATOR", emulator);
        repo::run(&mut command)?;
    }
    Ok(())
}
