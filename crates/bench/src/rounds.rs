//! What `bench predump` and `bench live` have in common: which targets there are, what one command
//! does to one, and the table of it all.
use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::error::{Error, Result, file_error, kernel_error};
use crate::machine::Machine;
use crate::record::median;
use crate::report::{self, put_between};
use crate::subject::PAGE_BYTES;
use crate::tool::{Tool, end_of, image_bytes, name};
use crate::writer::Writer;
use crate::{isolate, peer, suite};

/// How long the target is watched before, to know how fast it is when left alone.
const CALM: Duration = Duration::from_millis(200);

/// What is measured.
#[derive(clap::Args)]
pub struct Arguments {
    /// Fewer rounds, and only the smallest target; the results go to target/bench instead of docs.
    #[arg(long)]
    quick: bool,
    /// Samples of each.
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// Memory of the targets in MiB.
    #[arg(long = "mib", value_name = "N", value_delimiter = ',', default_values_t = [1024, 4096])]
    sizes_mib: Vec<u64>,
    /// How much of 100 pages targets write in a second, and between two rounds.
    #[arg(long, value_name = "N", value_delimiter = ',', default_values_t = [1, 10, 100])]
    percent: Vec<u64>,
    /// Leave redis out.
    #[arg(long)]
    pub no_redis: bool,
    /// Where images are made.
    #[arg(long, value_name = "FOLDER", default_value = "/dev/shm")]
    scratch: PathBuf,
    /// The Debian suite that the peer is from.
    #[arg(long, default_value = "sid")]
    suite: String,
    /// Where peers are unpacked.
    #[arg(
        long,
        value_name = "FOLDER",
        default_value = "/var/cache/stillframe/peers"
    )]
    peers: PathBuf,
    /// Where the table is written.
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

/// A kind of target.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Kind {
    /// Its memory in MiB.
    pub mib: u64,
    /// How much of 100 pages it writes in a second.
    pub percent: u64,
}

impl Kind {
    /// Pages that it writes in a second, and between two rounds.
    pub fn pages(self) -> u64 {
        (self.mib << 20) / PAGE_BYTES as u64 * self.percent / 100
    }

    /// Starts one.
    ///
    /// # Errors
    /// Those of [`Writer::start`].
    pub fn start(self) -> Result<Writer> {
        Writer::start(self.mib, self.pages())
    }
}

/// What one command did, in milliseconds, shares of 100, and MiB.
pub struct Sample {
    /// The longest time between two looks of the target at the clock.
    gap_ms: f64,
    /// How long the program says that the target could not run.
    frozen_ms: Option<f64>,
    took_ms: f64,
    /// How much less the target did than when left alone.
    lost_percent: f64,
    peak_mib: f64,
    image_mib: f64,
}

/// Samples by target and by what was done.
pub struct Bench {
    /// What is measured.
    kinds: Vec<Kind>,
    /// Samples of each.
    pub rounds: usize,
    /// The peer, and ours.
    pub criu: Tool,
    /// The command under test.
    pub stillframe: Tool,
    /// The order of the rows.
    rows: Vec<&'static str>,
    samples: BTreeMap<(Kind, usize), Vec<Sample>>,
    /// True if samples count for nothing.
    is_warming_up: bool,
    scratch: tempfile::TempDir,
    out: PathBuf,
}

impl Bench {
    /// Prepares the programs and a scratch folder.
    ///
    /// # Errors
    /// When one cannot be had.
    pub fn new(arguments: &Arguments, rows: &[&'static str]) -> Result<Self> {
        isolate::close_inherited()?;
        let Some(program) = std::env::var_os("STILLFRAME_BIN") else {
            let what = "name a stillframe with STILLFRAME_BIN".into();
            return Err(Error::Nothing { what });
        };
        let mut sizes_mib = arguments.sizes_mib.clone();
        sizes_mib.sort_unstable();
        if arguments.quick {
            sizes_mib.truncate(1);
        }
        let kinds = sizes_mib.iter().flat_map(|mib| {
            let percent = arguments.percent.iter();
            percent.map(|percent| Kind {
                mib: *mib,
                percent: *percent,
            })
        });
        let scratch = tempfile::Builder::new()
            .prefix("stillframe-bench-")
            .tempdir_in(&arguments.scratch)
            .map_err(file_error("make a folder in", &arguments.scratch))?;
        Ok(Self {
            kinds: kinds.collect(),
            rounds: suite::rounds(arguments.rounds, arguments.quick),
            criu: peer::criu(&arguments.suite, &arguments.peers)?,
            stillframe: peer::stillframe(Path::new(&program))?,
            rows: rows.to_vec(),
            samples: BTreeMap::new(),
            is_warming_up: false,
            scratch,
            out: report::folder(arguments.out.as_deref(), arguments.quick),
        })
    }

    /// Has `turn` taken for each kind: once to warm up (memory that was never used costs a fault in
    /// the host, too), and then as often as samples are wanted.
    ///
    /// # Errors
    /// Those of `turn`.
    pub fn take_turns(&mut self, turn: impl Fn(&mut Self, Kind) -> Result<()>) -> Result<()> {
        for kind in self.kinds.clone() {
            for number in 0..=self.rounds {
                self.is_warming_up = number == 0;
                turn(self, kind)?;
            }
        }
        Ok(())
    }

    /// A folder for images that is there and empty.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn folder(&self, name: &str) -> Result<PathBuf> {
        let folder = self.scratch.path().join(name);
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir(&folder).map_err(file_error("make", &folder))?;
        Ok(folder)
    }

    /// Removes images.
    pub fn clear(&self) {
        for entry in std::fs::read_dir(self.scratch.path()).into_iter().flatten() {
            // What is no folder is not in the way.
            let _ = entry.map(|entry| std::fs::remove_dir_all(entry.path()));
        }
    }

    /// Runs a command on a target and keeps what it did as a sample of `row`.
    ///
    /// # Errors
    /// When it fails.
    pub fn measure(
        &mut self,
        kind: Kind,
        row: &'static str,
        target: &Writer,
        command: &mut Command,
        images: &Path,
    ) -> Result<()> {
        let said = self.scratch.path().join("said");
        let sample = measure(target, command, images, &said)?;
        if self.is_warming_up {
            return Ok(());
        }
        eprintln!(
            "{} MiB, {} %, {row}: gap {:.2} ms, {:.0} ms",
            kind.mib, kind.percent, sample.gap_ms, sample.took_ms
        );
        let number = self.rows.iter().position(|one| *one == row);
        let number = number.expect("a row that was announced");
        self.samples.entry((kind, number)).or_default().push(sample);
        Ok(())
    }

    /// Writes the table, `before` and `after` it, between the marks of the page.
    ///
    /// # Errors
    /// When the page cannot be written.
    pub fn write(&self, marks: [&str; 2], after: &str) -> Result<()> {
        let machine = Machine::this(self.scratch.path());
        let mut out = String::new();
        let _ = writeln!(
            out,
            "{} · {} core(s), {} MiB · kernel {} · huge pages: {} · images on {}\n\n\
             {} {} and {} {}; medians of {} rounds in turn (the longest gap in brackets).\n",
            machine.processor,
            machine.cores,
            machine.memory_mib,
            machine.kernel,
            machine.huge_pages,
            machine.disk,
            self.criu.name,
            self.criu.version,
            self.stillframe.name,
            self.stillframe.version,
            self.rounds,
        );
        out.push_str(&self.table());
        out.push_str(after);
        println!("{out}");
        put_between(&self.out.join("benchmarks.md"), marks, &out)
    }

    fn table(&self) -> String {
        let mut out = String::from(
            "| target, written | what | gap, ms | frozen, ms | took, ms | lost, % | peak, MiB | \
             image, MiB |\n| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n",
        );
        for ((kind, row), samples) in &self.samples {
            let of = |value: fn(&Sample) -> Option<f64>| {
                let numbers: Vec<f64> = samples.iter().filter_map(value).collect();
                median(&numbers)
            };
            let longest = samples.iter().map(|one| one.gap_ms).fold(0.0, f64::max);
            let text = |number: Option<f64>, digits: usize| {
                number.map_or(String::new(), |number| format!("{number:.digits$}"))
            };
            let _ = writeln!(
                out,
                "| {} GiB, {} % | {} | {} ({longest:.1}) | {} | {} | {} | {} | {} |",
                kind.mib as f64 / 1024.0,
                kind.percent,
                self.rows[*row],
                text(of(|one| Some(one.gap_ms)), 2),
                text(of(|one| one.frozen_ms), 2),
                text(of(|one| Some(one.took_ms)), 0),
                text(of(|one| Some(one.lost_percent)), 0),
                text(of(|one| Some(one.peak_mib)), 0),
                text(of(|one| Some(one.image_mib)), 0),
            );
        }
        out
    }
}

/// Looks at how fast the target is, runs the command, and looks again.
fn measure(target: &Writer, command: &mut Command, images: &Path, said: &Path) -> Result<Sample> {
    let speed = |from: u64, to: u64, time: Duration| (to - from) as f64 / time.as_secs_f64();
    let (calm, begun) = (target.look()?, Instant::now());
    std::thread::sleep(CALM);
    let calm = speed(calm.looks, target.look()?.looks, begun.elapsed());
    target.forget_longest()?;
    let (before, begun) = (target.look()?, Instant::now());
    let peak_bytes = run(command, said)?;
    let took = begun.elapsed();
    let after = target.look()?;
    // It has seen the end of a gap when it has looked at the clock again.
    target.wait_looks()?;
    Ok(Sample {
        gap_ms: target.look()?.longest_ns as f64 / 1e6,
        frozen_ms: reported_frozen_ms(said),
        took_ms: took.as_secs_f64() * 1e3,
        lost_percent: 100.0 * (1.0 - speed(before.looks, after.looks, took) / calm),
        peak_mib: peak_bytes as f64 / f64::from(1 << 20),
        image_mib: image_bytes(images)? as f64 / f64::from(1 << 20),
    })
}

/// Runs a command to its end; returns how much memory it had at most, in bytes.
fn run(command: &mut Command, said: &Path) -> Result<u64> {
    let output = File::create(said).map_err(file_error("create", said))?;
    let second = output.try_clone().map_err(file_error("share", said))?;
    command.stdout(output).stderr(second);
    let child = command.spawn().map_err(|source| Error::Start {
        program: name(command),
        source,
    })?;
    let ended = sys::usage::wait(&child).map_err(kernel_error("wait for a program"))?;
    match ended {
        (status, peak_bytes) if status.success() => Ok(peak_bytes),
        (status, _) => Err(Error::Status {
            command: name(command),
            status,
            said: end_of(said),
        }),
    }
}

/// What our own report says, where there is one: the first object of what was said.
fn reported_frozen_ms(said: &Path) -> Option<f64> {
    let text = std::fs::read_to_string(said).ok()?;
    let told: Value = serde_json::from_str(&text).ok()?;
    let frozen_us = told.as_object()?.values().next()?["frozen_us"].as_u64()?;
    Some(frozen_us as f64 / 1e3)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_tells_how_long_it_was_frozen() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let said = folder.path().join("said");
        std::fs::write(&said, r#"{"pre-dump": {"frozen_us": 1500}}"#).expect("written");
        assert_eq!(reported_frozen_ms(&said), Some(1.5));
        std::fs::write(&said, "Warn: nothing of that kind").expect("written");
        assert_eq!(reported_frozen_ms(&said), None);
    }

    #[test]
    fn a_hundredth_of_a_gibibyte_is_that_many_pages() {
        let kind = Kind {
            mib: 1024,
            percent: 1,
        };
        assert_eq!(kind.pages(), 2621);
    }
}
