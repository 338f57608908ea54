//! `cargo xtask programs`: installs programs, builds stillframe and runs the crate `programs`.
use std::process::Command;

use crate::error::{Error, Result};
use crate::packages::Package;
use crate::{kernels, packages, repo};

/// What is tried.
#[derive(clap::Args)]
pub struct Arguments {
    /// Names of programs, and options: `--cycles N`, `--way dump|live|predump`, `--list`, `--keep`.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    words: Vec<String>,
}

/// Installs what is missing, builds stillframe and the harness, and tries the programs.
///
/// # Errors
/// When a build fails, or a program does not go on.
pub fn run(arguments: &Arguments) -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        return Err(Error::Root {
            task: "cargo xtask programs",
        });
    }
    repo::build_release("programs")?;
    let program = repo::release_folder().join("programs");
    let harness = || {
        let mut command = Command::new(&program);
        command.args(&arguments.words).current_dir(repo::root());
        command
    };
    let list = repo::output(harness().arg("--packages"))?;
    packages::install(&list.lines().filter_map(parse).collect::<Vec<_>>())?;
    kernels::fetch();
    let stillframe = repo::build_stillframe()?;
    repo::run(harness().env("STILLFRAME_BIN", stillframe))
}

/// A package out of a line of four fields: its name, its program, the reason, its services.
fn parse(line: &str) -> Option<Package<'_>> {
    let mut fields = line.split('\t');
    Some(Package {
        name: fields.next()?,
        program: fields.next()?,
        reason: fields.next()?,
        services: fields.next()?.split_ascii_whitespace().collect(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_is_a_line() {
        let package = parse("redis-server\tredis-server\tit serves\ta.service b.service");
        let package = package.expect("four fields");
        assert_eq!(package.name, "redis-server");
        assert_eq!(*package.services, ["a.service", "b.service"]);
        assert_eq!(parse("x\ty\tz\t").map(|none| none.services.len()), Some(0));
        assert!(parse("x\ty").is_none());
    }
}
