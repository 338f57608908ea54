//! `stillframe vm`: machines under QEMU.

mod restore;
mod save;
mod templates;

use std::time::Instant;

use clap::{Args, Subcommand};

use crate::exit::{Failure, Status};

/// Save virtual machines under QEMU, and start them again
#[derive(Debug, Args)]
pub struct Vm {
    #[command(subcommand)]
    action: Action,
}

/// Actions on machines.
#[derive(Debug, Subcommand)]
enum Action {
    Save(save::Save),
    PreSave(save::PreSave),
    Restore(restore::Restore),
    Templates(templates::Templates),
}

impl Vm {
    pub fn run(self, started: Instant) -> Result<Status, Failure> {
        match self.action {
            Action::Save(save) => save.run(started),
            Action::PreSave(pre_save) => pre_save.run(started),
            Action::Restore(restore) => restore.run(started),
            Action::Templates(templates) => templates.run(),
        }
    }
}
