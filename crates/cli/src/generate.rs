//! `stillframe generate`: writes shell completions and the manual.

use std::io::Write as _;

use clap::{Args, Subcommand};
use clap_complete::Shell;

use crate::command_line::Command;
use crate::criu::{Argument, FLAGS, Fate};
use crate::exit::{Failure, Status};
use crate::output;

/// Write shell completions or the manual page to stdout
#[derive(Debug, Args)]
pub struct Generate {
    #[command(subcommand)]
    what: Artifact,
}

#[derive(Debug, Subcommand)]
enum Artifact {
    /// Completions for a shell
    Completions {
        /// The shell
        shell: Shell,
    },
    /// The manual page, in roff
    Man,
    /// The list of criu's options in docs/criu.md
    Options,
}

impl Generate {
    /// Prints what was asked for.
    ///
    /// # Errors
    /// None so far: what is printed is made in memory.
    pub fn run(self) -> Result<Status, Failure> {
        let mut text = Vec::new();
        let mut command = crate::parser();
        match self.what {
            Artifact::Completions { shell } => {
                clap_complete::generate(shell, &mut command, "stillframe", &mut text);
            }
            Artifact::Options => text = options().into_bytes(),
            Artifact::Man => manual(command, &mut text).expect("memory can be written"),
        }
        output::say(&String::from_utf8_lossy(&text));
        Ok(Status::Done)
    }
}

/// Writes one page: the program, then each command under a heading of its own.
fn manual(mut program: clap::Command, text: &mut Vec<u8>) -> std::io::Result<()> {
    program.build();
    let page = clap_mangen::Man::new(program.clone()).section("8");
    page.render_title(text)?;
    page.render_name_section(text)?;
    page.render_synopsis_section(text)?;
    page.render_description_section(text)?;
    page.render_options_section(text)?;
    for command in program
        .get_subcommands()
        .filter(|command| !command.is_hide_set())
    {
        let name = command.get_name().to_uppercase();
        let page = clap_mangen::Man::new(command.clone());
        writeln!(text, ".SH {name}")?;
        let mut part = Vec::new();
        page.render_synopsis_section(&mut part)?;
        page.render_description_section(&mut part)?;
        page.render_options_section(&mut part)?;
        text.extend_from_slice(
            String::from_utf8_lossy(&part)
                .replace(".SH ", ".SS ")
                .as_bytes(),
        );
    }
    text.extend_from_slice(include_str!("manual.roff").as_bytes());
    Ok(())
}

/// Lists what becomes of each option of criu(8), as a table in Markdown.
fn options() -> String {
    let mut table =
        "| option | dump | pre-dump | restore | check |\n| --- | --- | --- | --- | --- |\n"
            .to_owned();
    for flag in FLAGS.iter().filter(|flag| flag.of_criu) {
        let name = match flag.argument {
            Argument::Switch => format!("--[no-]{}", flag.name),
            Argument::None | Argument::Required | Argument::Optional => format!("--{}", flag.name),
        };
        let letter = flag
            .short
            .map(|letter| format!("`-{letter}`, "))
            .unwrap_or_default();
        let fate = |fate| match fate {
            Fate::Taken => "yes",
            Fate::Idle => "no effect",
            Fate::Refused => "**refused**",
            Fate::Misplaced => "error",
        };
        let fates = [
            Command::Dump,
            Command::PreDump,
            Command::Restore,
            Command::Check,
        ]
        .map(|command| fate(flag.fate(command)))
        .join(" | ");
        table += &format!("| {letter}`{name}` | {fates} |\n");
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_list_of_options_in_the_documentation_is_new() {
        let document = include_str!("../../../docs/criu.md");
        let advice = "put `stillframe generate options` into docs/criu.md";
        assert!(document.contains(&options()), "{advice}");
    }
}
