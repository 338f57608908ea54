//! `stillframe check`: tells what this kernel and these privileges allow.

use std::time::Instant;

use clap::Args;

use crate::exit::{Failure, Status};
use crate::session::Everywhere;

/// Tell what this kernel and these privileges allow, a line a feature
#[derive(Debug, Args)]
pub struct Check {
    /// Only this feature; `list` names them all
    #[arg(long, value_name = "NAME")]
    feature: Vec<String>,

    #[command(flatten)]
    common: Everywhere,
}

impl Check {
    /// Checks.
    pub fn run(self, started: Instant) -> Result<Status, Failure> {
        let _ = (started, &self.feature, &self.common);
        Ok(Status::Failed)
    }
}
