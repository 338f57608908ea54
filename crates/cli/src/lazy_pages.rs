//! `stillframe lazy-pages`: brings memory in to trees that run already.

use std::os::fd::AsFd as _;
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use process::LazyPagesOptions;
use rustix::process::Signal;
use serde_json::json;

use crate::exit::{Failure, Status};
use crate::restore::LAZY_PAGES_SOCKET;
use crate::session::Everywhere;
use crate::{logfile, output};

/// Bring memory in to trees that `restore --lazy-pages` has brought back
#[derive(Debug, Args)]
pub struct LazyPages {
    /// The directory of the image
    #[arg(short = 'D', long, value_name = "DIR", default_value = ".")]
    images_dir: PathBuf,

    /// The directory of the log file and of the socket to which restores connect, which is theirs,
    /// too; --images-dir unless given
    #[arg(short = 'W', long, value_name = "DIR")]
    work_dir: Option<PathBuf>,

    /// Go on when all has come that was asked for, until SIGTERM or SIGINT
    #[arg(long)]
    stay: bool,

    /// Write a zero byte to this descriptor when restores can connect, then close it
    #[arg(long, value_name = "FD")]
    status_fd: Option<i32>,

    /// The log file, relative to the work directory; `-` is stdout [default: lazy-pages.log]
    #[arg(short = 'o', long, value_name = "FILE")]
    log_file: Option<PathBuf>,

    /// Say more in the log: -v or -v3 informs, -vv or -v4 tells details; 0 is silence
    #[arg(short = 'v', long, value_name = "LEVEL", default_value_t = logfile::DEFAULT_VERBOSITY)]
    verbosity: u32,

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
        let failed = |source| Failure::File {
            action: "find",
            path: self.images_dir.clone(),
            source,
        };
        let images_dir = std::path::absolute(&self.images_dir).map_err(failed)?;
        let work_dir = self.work_dir.as_ref().unwrap_or(&self.images_dir);
        let work_dir = std::path::absolute(work_dir).map_err(failed)?;
        let status = self.status_fd.map(|fd| {
            sys::inherited::take(fd).map_err(|source| Failure::Descriptor {
                fd,
                option: "--status-fd",
                source,
            })
        });
        let status = status.transpose()?;
        let everywhere = Everywhere {
            log_file: self.log_file,
            verbosity: self.verbosity,
            ..Everywhere::default()
        };
        everywhere.open_log(&work_dir, Some("lazy-pages"), started)?;
        let bit = |signal: Signal| 1u64 << (signal.as_raw() - 1);
        let told = sys::signalfd::instead_of_ending(bit(Signal::TERM) | bit(Signal::INT));
        let told = told.map_err(|source| {
            engine(process::Error::Kernel {
                doing: "cannot wait for signals".to_owned(),
                source,
            })
        })?;
        let options = LazyPagesOptions {
            images: images_dir.into(),
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
        let trees = served.map_err(engine)?;
        let text = match self.json {
            true => format!("{}\n", json!({"lazy_pages": {"trees": trees}})),
            false => format!("{trees} restores were served\n"),
        };
        output::say(&text);
        Ok(Status::Done)
    }
}

fn engine(source: process::Error) -> Failure {
    Failure::Engine {
        doing: "serve lazy pages",
        source: Box::new(source),
    }
}
