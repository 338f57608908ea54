//! `stillframe lazy-pages`: brings memory in to trees that run already.

use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use process::LazyPagesOptions;
use rustix::process::Signal;
use serde_json::json;
use store::Images;

use crate::exit::{Failure, Status};
use crate::kind::ExpectedKind;
use crate::restore::LAZY_PAGES_SOCKET;
use crate::session::{GeneralArgs, LogArgs};
use crate::{logfile, output};

/// Bring memory in to trees that `restore --lazy-pages` has brought back
#[derive(Debug, Args)]
pub struct LazyPages {
    /// The directory of the image
    #[arg(short = 'D', long, value_name = "DIR", default_value = ".")]
    images_dir: PathBuf,

    /// Serve an image that another user owns or may write to, too
    #[arg(long)]
    trust_image: bool,

    /// Go on when all has come that was asked for, until SIGTERM or SIGINT
    #[arg(long)]
    stay: bool,

    /// Write a zero byte to this descriptor when restores can connect, then close it
    #[arg(long, value_name = "FD")]
    status_fd: Option<i32>,

    /// Its work directory has the socket to which restores connect, which is theirs, too
    #[command(flatten)]
    log: LogArgs,

    #[command(flatten)]
    general: GeneralArgs,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl LazyPages {
    /// Serves restores until all has come.
    ///
    /// # Errors
    /// The image cannot be used, or the socket not be made.
    pub fn run(self, started: Instant) -> Result<Status, Failure> {
        self.general.begin()?;
        let failed = |source| Failure::File {
            action: "find",
            path: self.images_dir.clone(),
            source,
        };
        let images_dir = std::path::absolute(&self.images_dir).map_err(failed)?;
        let work_dir = self.log.work_dir(&self.images_dir);
        let work_dir = std::path::absolute(work_dir).map_err(failed)?;
        let status = self.status_fd.map(|fd| {
            sys::inherited::take(fd).map_err(|source| Failure::Descriptor {
                fd,
                option: "--status-fd",
                source,
            })
        });
        let status = status.transpose()?;
        self.log.open(&self.images_dir, "lazy-pages", started)?;
        self.general.tell();
        let bit = |signal: Signal| 1u64 << (signal.as_raw() - 1);
        let told = sys::signalfd::instead_of_ending(bit(Signal::TERM) | bit(Signal::INT));
        let told = told.map_err(|source| {
            Failure::engine("serve lazy pages")(process::Error::Kernel {
                doing: "cannot wait for signals".to_owned(),
                source,
            })
        })?;
        let options = LazyPagesOptions {
            images: Images::at(&images_dir, self.trust_image),
            socket: work_dir.join(LAZY_PAGES_SOCKET),
            stay: self.stay,
            log: logfile::number(),
        };
        let ready = || {
            log::info!("restores can connect");
            logfile::flush();
            if let Some(status) = &status {
                let _ = rustix::io::write(status, &[0]);
            }
        };
        let served = process::serve_lazy_pages(&options, told.as_fd(), ready);
        let served = served.map_err(Failure::engine("serve lazy pages"));
        let trees = served.map_err(|it| ExpectedKind::Tree.explain(&self.images_dir, it))?;
        output::tell(
            self.json,
            || json!({"lazy_pages": {"trees": trees}}),
            || format!("{trees} restores were served\n"),
        );
        Ok(Status::Done)
    }
}
