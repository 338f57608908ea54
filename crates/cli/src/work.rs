//! Dumps, restores and checks, whoever asks for them: the command line or a client.

use std::time::Instant;

use crate::command_line::Command;
use crate::exit::{Failure, Status};
use crate::kind::ExpectedKind;
use crate::options::Options;
use crate::{check, dump, pre_dump, restore};

/// Does what the options of dump, pre-dump, restore or check ask for.
///
/// # Errors
/// Those of the command.
pub fn carry_out(
    command: Command,
    options: Options,
    idle: &[&str],
    started: Instant,
) -> Result<Status, Failure> {
    match command {
        Command::Dump => {
            let saved = dump::run(&options, idle, started);
            saved.map_err(|failure| about_parent(&options, failure))
        }
        Command::PreDump => {
            let saved = pre_dump::run(&options, idle, started);
            saved.map_err(|failure| about_parent(&options, failure))
        }
        Command::Restore => {
            let dir = options.images_dir.clone();
            let restored = restore::run(options, idle, started);
            restored.map_err(|failure| ExpectedKind::Tree.explain(&dir, failure))
        }
        _ => check::run(&options, started),
    }
}

/// Says of a dump that failed if its parent is an image of something else.
fn about_parent(options: &Options, failure: Failure) -> Failure {
    match &options.prev_images_dir {
        Some(dir) => ExpectedKind::TreeParent.explain(&options.images_dir.join(dir), failure),
        None => failure,
    }
}
