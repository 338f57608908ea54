//! `stillframe serve`: a page server for microVMs.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::{Args, ValueEnum};
use serde_json::json;
use vm::{ErrorPolicy, ExitPolicy, Otlp, Prefetch, ServeOptions};

use crate::exit::{Failure, Status};
use crate::kind::ExpectedKind;
use crate::session::{CompressArgs, LogArgs};
use crate::{logfile, output};

/// Serve a virtual machine's memory to monitors that hand over a userfaultfd
#[derive(Debug, Args)]
pub struct Serve {
    /// The directory of the image
    #[arg(short = 'D', long, value_name = "DIR")]
    images_dir: PathBuf,

    /// The socket to which monitors connect
    #[arg(long, value_name = "PATH")]
    socket: PathBuf,

    /// A socket for sessions, differences and metrics: HTTP/1.1 with JSON
    #[arg(long, value_name = "PATH")]
    control: Option<PathBuf>,

    /// What is brought in before it is asked for
    #[arg(long, value_enum, default_value = "none")]
    prefetch: PrefetchMode,

    /// Add what machines want to the image when their sessions end, for --prefetch trace
    #[arg(long)]
    record: bool,

    /// Bring in empty and removed pages ourselves, instead of leaving them to the kernel
    #[arg(long)]
    no_unregister: bool,

    /// What becomes of a machine whose page cannot be brought in: kill its monitor, or SIGBUS for
    /// who touches the page
    #[arg(long, value_enum, default_value = "kill")]
    on_error: Fate,

    /// Offer monitors a file that they can map as memory: what machines read of it is there once
    #[arg(long, conflicts_with_all = ["take_over"])]
    share: bool,

    /// What becomes of machines when the server ends, by SIGTERM or killed: kill their monitors, or
    /// have them wait for a server that takes them over at PATH.keep, where PATH is the --socket
    #[arg(long, value_enum, default_value = "kill")]
    on_exit: Exit,

    /// How long machines wait for another server, before their monitors are killed
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=86_400))]
    keep_for: u64,

    /// Take over the machines of the server that keeps them at PATH, which ends if it still runs
    #[arg(long, value_name = "PATH")]
    take_over: Option<PathBuf>,

    /// Tell the metrics to an OpenTelemetry collector, by OTLP over HTTP: http://HOST[:PORT][/PATH]
    #[arg(long, value_name = "URL")]
    otlp: Option<String>,

    /// How often
    #[arg(long, value_name = "SECONDS", default_value_t = 15)]
    #[arg(value_parser = clap::value_parser!(u64).range(1..=3_600))]
    otlp_interval: u64,

    #[command(flatten)]
    compress: CompressArgs,

    #[command(flatten)]
    log: LogArgs,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

/// What is brought in early.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum PrefetchMode {
    /// Nothing.
    None,
    /// What machines wanted that were served with --record, in their order.
    Trace,
    /// Everything, in order.
    All,
}

/// What becomes of a machine whose page cannot be brought in.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Fate {
    /// Its monitor is killed.
    Kill,
    /// Who touches the page gets `SIGBUS`.
    Poison,
}

/// What becomes of machines when the server ends.
#[derive(Clone, Copy, Debug, ValueEnum)]
enum Exit {
    /// Their monitors are killed; told to end, the server first brings everything in.
    Kill,
    /// They wait for another server.
    Keep,
}

impl Serve {
    /// Serves until it is told to end.
    ///
    /// # Errors
    /// The image cannot be used, or a socket not be made.
    pub fn run(self, started: Instant) -> Result<Status, Failure> {
        self.log.open(&self.images_dir, "serve", started)?;
        let interval = Duration::from_secs(self.otlp_interval);
        let otlp = self.otlp.map(|url| {
            let otlp = Otlp::new(&url, interval);
            otlp.map_err(|what| Failure::Usage(format!("--otlp {url}: {what}")))
        });
        let options = ServeOptions {
            images: self.images_dir.as_path().into(),
            socket: self.socket,
            control: self.control,
            prefetch: match self.prefetch {
                PrefetchMode::None => Prefetch::None,
                PrefetchMode::Trace => Prefetch::Trace,
                PrefetchMode::All => Prefetch::All,
            },
            record: self.record,
            unregister: !self.no_unregister,
            on_error: match self.on_error {
                Fate::Kill => ErrorPolicy::Kill,
                Fate::Poison => ErrorPolicy::Poison,
            },
            compress: self.compress.compress,
            on_exit: match self.on_exit {
                Exit::Kill => ExitPolicy::Kill,
                Exit::Keep => ExitPolicy::Keep(Duration::from_secs(self.keep_for)),
            },
            share: self.share,
            take_over: self.take_over,
            otlp: otlp.transpose()?,
            log: logfile::number(),
        };
        let ready = || log::info!("monitors can connect");
        let served = vm::serve(options, process::facts, ready);
        let sessions = served.map_err(Failure::machine("serve"));
        let sessions =
            sessions.map_err(|it| ExpectedKind::Machine.explain(&self.images_dir, it))?;
        output::tell(
            self.json,
            || json!({"serve": {"sessions": sessions}}),
            || format!("{sessions} sessions were served\n"),
        );
        Ok(Status::Done)
    }
}
