//! `cargo xtask serve-storm`: builds the release binary and the program that attacks it as a page
//! server, and runs that.
use std::process::Command;

use crate::error::{Error, Result};
use crate::repo;

/// What is done.
#[derive(clap::Args)]
pub struct Arguments {
    /// Options of the program: `cargo xtask serve-storm -- --help` lists them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    options: Vec<String>,
}

/// Attacks the page server.
///
/// # Errors
/// When a build fails, or the server does not withstand.
pub fn run(arguments: &Arguments) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Err(Error::Root {
            task: "cargo xtask serve-storm",
        });
    }
    let stillframe = repo::build_stillframe()?;
    repo::build_release("testkit")?;
    let mut storm = Command::new(repo::release_folder().join("serve-storm"));
    storm
        .args(&arguments.options)
        .env("STILLFRAME_BIN", stillframe)
        .current_dir(repo::root());
    repo::run(&mut storm)
}
