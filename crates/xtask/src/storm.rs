//! `cargo xtask storm` and `serve-storm`: build the release binary and the program of the test kit
//! that attacks it, and run that.
use std::process::Command;

use crate::error::{Error, Result};
use crate::repo;

/// What is tried.
#[derive(clap::Args)]
pub struct Arguments {
    /// Options of the program: `-- --help` lists them.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    options: Vec<String>,
}

/// One of the programs.
pub struct Storm {
    task: &'static str,
    program: &'static str,
}

/// Tries trees that are made from seeds.
pub const OF_TREES: Storm = Storm {
    task: "cargo xtask storm",
    program: "storm",
};

/// Attacks the page server.
pub const OF_SERVE: Storm = Storm {
    task: "cargo xtask serve-storm",
    program: "serve-storm",
};

impl Storm {
    /// Runs the program.
    ///
    /// # Errors
    /// When a build fails, or the program: what it attacks did not withstand.
    pub fn run(&self, arguments: &Arguments) -> Result<()> {
        if !rustix::process::geteuid().is_root() {
            return Err(Error::Root { task: self.task });
        }
        let stillframe = repo::build_stillframe()?;
        repo::build_release("testkit")?;
        let mut storm = Command::new(repo::release_folder().join(self.program));
        storm
            .args(&arguments.options)
            .env("STILLFRAME_BIN", stillframe)
            .current_dir(repo::root());
        repo::run(&mut storm)
    }
}
