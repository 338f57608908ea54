//! `cargo xtask bench`: builds what is measured in release and runs the crate `bench`.
use std::process::Command;

use crate::error::{Error, Result};
use crate::{emulators, kernels, packages, repo};

/// What is measured.
#[derive(clap::Args)]
pub struct Arguments {
    /// The suite, then its options: `process --help` lists them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true)]
    suite: Vec<String>,
}

/// Installs what unpacks the peer, builds stillframe and the harness, and measures.
///
/// # Errors
/// When a build or the measurement fails.
pub fn run(arguments: &Arguments) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Err(Error::Root {
            task: "cargo xtask bench",
        });
    }
    packages::install(packages::FOR_BENCH)?;
    if arguments.suite[0] == "volume" {
        packages::install(packages::FOR_VOLUMES)?;
    }
    let stillframe = repo::build_stillframe()?;
    repo::build_release("bench")?;
    if arguments.suite.first().is_some_and(|suite| suite == "vm") {
        packages::install(packages::FOR_TESTS)?;
        kernels::fetch();
        emulators::fetch();
        // What runs in the guest.
        repo::build_release("testkit")?;
    }
    let mut bench = Command::new(repo::release_folder().join("bench"));
    bench
        .args(&arguments.suite)
        .env("STILLFRAME_BIN", stillframe)
        .current_dir(repo::root());
    repo::run(&mut bench)
}
