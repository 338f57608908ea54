//! `stillframe cpuinfo`: what this processor has, saved; and whether it has what an image needs.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Instant;

use clap::{Args, ValueEnum};
use process::{CpuCap, check_cpuinfo, dump_cpuinfo};
use serde_json::json;

use crate::exit::{Failure, Status};
use crate::kind::ExpectedKind;
use crate::session::{GeneralArgs, LogArgs};
use crate::{output, values};

/// Save what this processor has, or check it against an image
#[derive(Debug, Args)]
pub struct Cpuinfo {
    /// Make an image of what this processor has; or check that it has what the image in the
    /// directory needs: that of another processor, or of a tree
    #[arg(value_enum)]
    action: Action,

    /// The directory of the image
    #[arg(short = 'D', long, value_name = "DIR", default_value = ".")]
    images_dir: PathBuf,

    /// What counts, as on restore [default: all that the image tells of]
    #[arg(
        long,
        value_name = "CAP,…",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "all"
    )]
    cpu_cap: Option<OsString>,

    /// There is a log only where -o names one
    #[command(flatten)]
    log: LogArgs,

    #[command(flatten)]
    general: GeneralArgs,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Action {
    Dump,
    Check,
}

impl Cpuinfo {
    /// Makes the image, or checks it.
    ///
    /// # Errors
    /// There is no image, it is of something else, or this processor is not what it needs.
    pub fn run(self, started: Instant) -> Result<Status, Failure> {
        self.general.begin()?;
        self.log.open_named(&self.images_dir, started)?;
        self.general.tell();
        let images = self.images_dir.as_path().into();
        let cap = self.cpu_cap.as_deref();
        let cap: Option<CpuCap> = cap
            .map(|cap| values::cpu_cap(Some(cap)))
            .transpose()
            .map_err(|why| Failure::Usage(format!("--cpu-cap: {why}")))?;
        let done = match self.action {
            Action::Dump => dump_cpuinfo(&images).map(|image| json!({"image": image})),
            Action::Check => check_cpuinfo(&images, cap).map(|()| json!({"fits": true})),
        };
        let done = done.map_err(|source| {
            let failure = Failure::engine("cpuinfo")(source);
            ExpectedKind::Processor.explain(&self.images_dir, failure)
        })?;
        match (self.json, self.action) {
            (true, _) => output::say(&format!("{done}\n")),
            (false, Action::Check) => output::say("This processor has what the image needs.\n"),
            (false, Action::Dump) => {}
        }
        Ok(Status::Done)
    }
}
