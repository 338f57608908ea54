//! `cargo xtask storm`: builds the release binary and the program that tries seeds, and runs that.
use std::process::Command;

use crate::error::{Error, Result};
use crate::repo;

/// What is tried.
#[derive(clap::Args)]
pub struct Arguments {
    /// Options of the program: `cargo xtask storm -- --help` lists them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    options: Vec<String>,
}

/// Tries seeds.
///
/// # Errors
/// When a build fails, or a seed.
pub fn run(arguments: &Arguments) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Err(Error::Root {
            task: "cargo xtask storm",
        });
    }
    let stillframe = repo::build_stillframe()?;
    repo::build_release("testkit")?;
    let mut storm = Command::new(repo::release_folder().join("storm"));
    storm
        .args(&arguments.options)
        .env("STILLFRAME_BIN", stillframe)
        .current_dir(repo::root());
    repo::run(&mut storm)
}
