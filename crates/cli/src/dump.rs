//! `stillframe dump`: saves a process tree.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use process::options::{
    Compression, DEFAULT_GHOST_LIMIT_BYTES, DEFAULT_TIMEOUT, DEFAULT_TRACK_TIME,
};
use process::{Afterwards, Allow, DumpKind, DumpOptions, DumpReport};
use rustix::process::Pid;
use serde_json::{Value, json};

use crate::allowed::AllowedArgs;
use crate::exit::{Failure, Status};
use crate::quick::{self, Fill, flag, number, text};
use crate::session::Common;
use crate::watch::Watch;
use crate::{output, statistics, values};

/// Save a process tree into an image
#[derive(Debug, Args)]
pub struct Dump {
    /// The root of the tree
    #[arg(short = 't', long, value_name = "PID", value_parser = values::pid)]
    tree: Pid,

    /// Let the tree run on instead of killing it
    #[arg(short = 'R', long)]
    leave_running: bool,

    /// Leave the tree stopped instead of killing it
    #[arg(short = 's', long)]
    leave_stopped: bool,

    /// Let the tree run on, and stop it only for moments: its memory is copied while it runs
    #[arg(long, conflicts_with = "leave_stopped")]
    live: bool,

    /// Save nothing: say what is in the way of a dump, and let the tree run on
    #[arg(long)]
    dry_run: bool,

    /// Store deleted files up to this size, in bytes or with K, M or G
    #[arg(long, value_name = "SIZE", default_value = "1M", value_parser = values::size)]
    ghost_limit: u64,

    /// Give up after this many seconds of collecting tasks, or of connections that wait to be
    /// accepted; 0 never does
    #[arg(long, value_name = "SECONDS", default_value_t = 10)]
    timeout: u64,

    /// Drop TCP connections that wait to be accepted instead of trying again until there are none
    #[arg(long)]
    skip_in_flight: bool,

    /// Do not wait until the image is on the disk before the tree is killed
    #[arg(long)]
    no_sync: bool,

    /// The directory of the last image of this tree, relative to --images-dir: of memory that was
    /// tracked since, only what was written is saved
    #[arg(long, value_name = "DIR")]
    prev_images_dir: Option<PathBuf>,

    /// Free in older images what this one replaces; they cannot be restored any more then
    #[arg(long)]
    auto_dedup: bool,

    /// Compress pages where that pays, with lz4 or zstd
    #[arg(long, value_name = "lz4|zstd[:LEVEL]", num_args = 0..=1, require_equals = true)]
    #[arg(default_missing_value = "lz4")]
    compress: Option<Compression>,

    /// Track what a tree that runs on writes from now on
    #[arg(long)]
    track_mem: bool,

    /// Stop tracking after this many seconds without another dump
    #[arg(long, value_name = "SECONDS", default_value_t = DEFAULT_TRACK_TIME.as_secs())]
    track_time: u64,

    #[command(flatten)]
    allowed: AllowedArgs,

    #[command(flatten)]
    pub common: Common,
}

impl Fill for Dump {
    fn fill(&mut self, name: &str, value: Option<&OsStr>) -> Option<()> {
        match name {
            "tree" => self.tree = values::pid(text(value)?).ok()?,
            "leave-running" => self.leave_running = flag(value)?,
            "leave-stopped" => self.leave_stopped = flag(value)?,
            "live" => self.live = flag(value)?,
            "dry-run" => self.dry_run = flag(value)?,
            "ghost-limit" => self.ghost_limit = values::size(text(value)?).ok()?,
            "timeout" => self.timeout = number(value)?,
            "skip-in-flight" => self.skip_in_flight = flag(value)?,
            "no-sync" => self.no_sync = flag(value)?,
            "prev-images-dir" => self.prev_images_dir = Some(quick::path(value)?),
            "auto-dedup" => self.auto_dedup = flag(value)?,
            "compress" => self.compress = Some(values::compression(value)?),
            "track-mem" => self.track_mem = flag(value)?,
            "track-time" => self.track_time = number(value)?,
            _ => {
                let allowed = self.allowed.fill(name, value);
                return allowed.or_else(|| self.common.fill(name, value));
            }
        }
        Some(())
    }
}

impl Dump {
    /// Understands the words of an ordinary command line; `None` leaves them to the parser.
    pub fn quick(words: &[OsString]) -> Option<Self> {
        let mut words_of = words.iter().filter_map(|word| quick::split(word));
        let tree = words_of.find(|(name, _)| *name == "tree")?;
        let mut dump = Self {
            tree: values::pid(text(tree.1)?).ok()?,
            leave_running: false,
            leave_stopped: false,
            live: false,
            dry_run: false,
            ghost_limit: DEFAULT_GHOST_LIMIT_BYTES,
            timeout: DEFAULT_TIMEOUT.as_secs(),
            skip_in_flight: false,
            no_sync: false,
            prev_images_dir: None,
            auto_dedup: false,
            compress: None,
            track_mem: false,
            track_time: DEFAULT_TRACK_TIME.as_secs(),
            allowed: AllowedArgs::default(),
            common: Common::default(),
        };
        let whole = quick::fill(&mut dump, words)?.is_empty();
        // What contradicts itself is the parser's to refuse.
        (whole && !(dump.live && dump.leave_stopped)).then_some(dump)
    }

    /// Saves the tree.
    ///
    /// # Errors
    /// Whatever the engine tells; the tree then runs as before.
    pub fn run(self, idle: &[&str], started: Instant) -> Result<Status, Failure> {
        if self.live && (self.track_mem || self.prev_images_dir.is_some()) {
            let what = "--live goes with neither --track-mem nor --prev-images-dir";
            return Err(Failure::Usage(what.to_owned()));
        }
        let allowed = Allow {
            skip_in_flight: self.skip_in_flight,
            ghost_limit_bytes: self.ghost_limit,
            ..Allow::try_from(&self.allowed)?
        };
        if self.dry_run {
            return self.try_out(allowed, started);
        }
        let mut session = self.common.start("dump", true, idle, started)?;
        let options = self.options(allowed, &session.images_dir);
        let mut watch = Watch::new(&session);
        let report = process::dump(&options, &mut watch).map_err(|source| Failure::Engine {
            doing: "dump",
            source: Box::new(source),
        })?;
        watch.done();
        session.ready();
        log::info!(
            "dumped {} tasks in {} us",
            report.statistics.tasks,
            report.total_us
        );
        if options.afterwards != Afterwards::Kill {
            for link in &report.links {
                let link = process::report::printable(&link.display().to_string());
                let what = format!("the image needs the hard link {link}: it stays as long");
                log::warn!("{what}");
                output::complain(&format!("stillframe: {what}\n"));
            }
        }
        self.common.tell(|| to_json(&report), || to_text(&report));
        Ok(Status::Done)
    }

    /// Says what is in the way of a dump; nothing is saved, and no file made but the log where one
    /// is asked for.
    fn try_out(self, allowed: Allow, started: Instant) -> Result<Status, Failure> {
        self.common.start_without_images(started)?;
        let options = self.options(allowed, &self.common.images_dir);
        let report = process::dry_run(&options).map_err(|source| Failure::Engine {
            doing: "dump",
            source: Box::new(source),
        })?;
        let json = json!({"dump": {
            "dry_run": true,
            "obstacles": [],
            "tasks": report.tasks,
            "threads": report.threads,
            "frozen_us": report.frozen_us,
            "plan_us": report.plan_us,
            "total_us": report.total_us,
        }});
        let text = format!(
            "nothing is in the way of a dump (tasks: {}, threads: {}, stopped for {} us)\n",
            report.tasks, report.threads, report.frozen_us
        );
        output::say(&if self.common.json {
            format!("{json}\n")
        } else {
            text
        });
        Ok(Status::Done)
    }

    fn options(&self, allowed: Allow, images_dir: &std::path::Path) -> DumpOptions {
        DumpOptions {
            tree: self.tree,
            images: images_dir.into(),
            afterwards: match (self.leave_running || self.live, self.leave_stopped) {
                (true, _) => Afterwards::Run,
                (false, true) => Afterwards::Stop,
                (false, false) => Afterwards::Kill,
            },
            allowed,
            timeout: (self.timeout > 0).then(|| Duration::from_secs(self.timeout)),
            sync: !self.no_sync,
            kind: match self.live {
                true => DumpKind::Live,
                false => DumpKind::Dump,
            },
            parent: self
                .prev_images_dir
                .as_ref()
                .map(|dir| images_dir.join(dir).into()),
            auto_dedup: self.auto_dedup,
            compress: self.compress,
            track: self.track_mem.then(|| Duration::from_secs(self.track_time)),
        }
    }
}

fn to_json(report: &DumpReport) -> Value {
    let known = &report.statistics;
    json!({"dump": {
        "image": report.image,
        "tasks": known.tasks,
        "threads": known.threads,
        "stored_pages": known.stored_pages,
        "zero_pages": known.zero_pages,
        "shared_pages": known.shared_pages,
        "parent_pages": known.parent_pages,
        "image_bytes": report.image_bytes,
        "frozen_us": known.frozen_us,
        "longest_frozen_us": report.longest_frozen_us,
        "longest_wait_us": report.longest_wait_us,
        "instants": report.instants,
        "freed_bytes": report.freed_bytes,
        "links": report.links.iter()
            .map(|link| link.display().to_string())
            .collect::<Vec<_>>(),
        "total_us": report.total_us,
        "statistics": statistics::to_json(known),
    }})
}

fn to_text(report: &DumpReport) -> String {
    let (longest_us, total_us) = (report.longest_frozen_us, report.total_us);
    let wait_us = report.longest_wait_us;
    format!(
        "image {}\n{}frozen at one time {longest_us:>14} us\n\
         longest wait {wait_us:>20} us\ninstants {:>24}\n\
         whole dump {total_us:>22} us\nimage bytes {:>21}\nfreed bytes {:>21}\n",
        report.image,
        statistics::to_text(&report.statistics, ""),
        report.instants,
        report.image_bytes,
        report.freed_bytes,
    )
}
