//! `bench lazy`: how soon a target runs, and has seen all of its memory, when that comes after it,
//! beside a restore that brings it at once, and beside the peer's.
use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process, pidfd_open};
use serde::Serialize;

use crate::error::{Error, Result, file_error, kernel_error};
use crate::looker::AWAY;
use crate::machine::Machine;
use crate::record::median;
use crate::report::{self, put_between};
use crate::tool::{Tool, timed};
use crate::{isolate, peer, runs, suite};

const MARKS: [&str; 2] = [
    "<!-- lazy:begin, written by `cargo xtask bench lazy` -->",
    "<!-- lazy:end -->",
];

/// How long a target may take to see all of its memory, and a server to listen or to end.
const DEADLINE: Duration = Duration::from_secs(60);
/// How often it is looked whether one has: seldom, as the target needs the processors.
const LOOK: Duration = Duration::from_millis(20);
/// When a target of 1 GiB is to run, and when it is to have seen all of it, in milliseconds.
const GOALS_MS: [f64; 2] = [5.0, 250.0];
/// The memory for which the goals are.
const GOALS_MIB: u64 = 1024;

/// What is measured.
#[derive(clap::Args)]
pub struct Arguments {
    /// Fewer rounds; the results go to target/bench instead of docs.
    #[arg(long)]
    quick: bool,
    /// Samples of each.
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// Memory of the target in MiB.
    #[arg(long, value_name = "N", default_value_t = GOALS_MIB)]
    mib: u64,
    /// The stillframe that is measured.
    #[arg(long, value_name = "PATH", env = "STILLFRAME_BIN")]
    stillframe: PathBuf,
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
    /// Where the table and the numbers are written.
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

/// A restore by one program, all at once or lazily.
#[derive(Debug, Serialize)]
struct Row {
    tool: String,
    lazily: bool,
    samples: Vec<Sample>,
}

/// What one restore took, from the start of its command, in milliseconds.
#[derive(Debug, Clone, Copy, Serialize)]
struct Sample {
    /// Until the command had ended.
    command_ms: f64,
    /// Until the target ran.
    runs_ms: f64,
    /// Until it had seen all of its pages.
    looked_ms: f64,
}

/// All that was measured.
#[derive(Debug, Serialize)]
struct Record {
    machine: Machine,
    mib: u64,
    versions: [String; 2],
    rows: Vec<Row>,
}

/// Measures, keeps the numbers and writes the table.
///
/// # Errors
/// When anything fails that is measured.
pub fn run(arguments: &Arguments) -> Result<()> {
    isolate::close_inherited()?;
    let criu = peer::criu(&arguments.suite, &arguments.peers)?;
    let stillframe = peer::stillframe(&arguments.stillframe)?;
    let rounds = suite::rounds(arguments.rounds, arguments.quick);
    let ways = [&stillframe, &criu].map(|tool| [true, false].map(|lazily| (tool, lazily)));
    let ways = ways.concat();
    let row = |(tool, lazily): &(&Tool, bool)| Row {
        tool: tool.name.clone(),
        lazily: *lazily,
        samples: Vec::new(),
    };
    let mut rows: Vec<Row> = ways.iter().map(row).collect();
    for number in 0..=rounds {
        for ((tool, lazily), row) in ways.iter().zip(&mut rows) {
            let sample = take(tool, *lazily, arguments)?;
            let title = title(row);
            eprintln!("{title}: runs after {:.1} ms, {sample:?}", sample.runs_ms);
            // The first of each warms up.
            if number > 0 {
                row.samples.push(sample);
            }
        }
    }
    let record = Record {
        machine: Machine::this(&arguments.scratch),
        mib: arguments.mib,
        versions: [&stillframe, &criu].map(|tool| format!("{} {}", tool.name, tool.version)),
        rows,
    };
    let folder = report::folder(arguments.out.as_deref(), arguments.quick);
    let numbers = runs::keep(&folder, &record.machine, "lazy", &record)?;
    let text = format!("{}\n{}", table(&record), runs::link(&folder, &numbers));
    println!("{text}");
    put_between(&folder.join("benchmarks.md"), MARKS, &text)
}

/// Dumps a fresh target and restores it.
fn take(tool: &Tool, lazily: bool, arguments: &Arguments) -> Result<Sample> {
    let scratch = tempfile::Builder::new()
        .prefix("stillframe-bench-")
        .tempdir_in(&arguments.scratch)
        .map_err(file_error("make a folder in", &arguments.scratch))?;
    let (images, said) = (scratch.path(), scratch.path().join("said.log"));
    let mut target = LookerProcess::start(arguments.mib)?;
    timed(&mut tool.dump(target.pid, images, false, false), &said)?;
    target.reap()?;
    std::thread::sleep(AWAY);
    // The peer has a server of its own, which is there before; ours makes one.
    let is_peer = tool.volatile_options.is_empty();
    let server = (lazily && is_peer).then(|| PeersServer::start(tool, images));
    let server = server.transpose()?;
    let mut command = tool.restore(images);
    if lazily {
        command.arg("--lazy-pages");
    }
    let took = timed(&mut command, &said)?;
    let [runs_ns, looked_ns] = target.wait_looked(&tool.name)?;
    drop(target);
    server.map_or(Ok(()), PeersServer::wait)?;
    let since = |ns: u64| ns.saturating_sub(took.start_ns) as f64 / 1e6;
    Ok(Sample {
        command_ms: took.ns as f64 / 1e6,
        runs_ms: since(runs_ns),
        looked_ms: since(looked_ns),
    })
}

/// The target, seen from outside; it is killed when this is dropped.
struct LookerProcess {
    pid: Pid,
    /// Our child, until it was dumped.
    child: Child,
    told_at: u64,
    /// What it has to see.
    sum: u64,
}

impl LookerProcess {
    fn start(mib: u64) -> Result<Self> {
        let program = PathBuf::from("/proc/self/exe");
        let program = std::fs::read_link(&program).map_err(file_error("read", &program))?;
        let mut command = Command::new(&program);
        command
            .args(["looker", &mib.to_string()])
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        let mut child = command.spawn().map_err(|source| Error::Start {
            program: program.display().to_string(),
            source,
        })?;
        let stdout = child.stdout.take().expect("stdout was made a pipe");
        let mut looker = Self {
            pid: Pid::from_child(&child),
            child,
            told_at: 0,
            sum: 0,
        };
        let mut line = String::new();
        let read = BufReader::new(stdout).read_line(&mut line);
        read.map_err(kernel_error("wait for a target"))?;
        let mut words = line.split_whitespace().map(str::parse);
        let (Some(Ok(told_at)), Some(Ok(sum))) = (words.next(), words.next()) else {
            return Err(looker.lost("start", "it ended before it was ready"));
        };
        (looker.told_at, looker.sum) = (told_at, sum);
        Ok(looker)
    }

    /// Waits until the dump's victim is gone, whose pid the restored one gets.
    fn reap(&mut self) -> Result<()> {
        let ended = self.child.wait();
        ended.map(drop).map_err(kernel_error("wait for a target"))
    }

    /// When it ran again, and when it had seen all of its pages.
    fn wait_looked(&self, tool: &str) -> Result<[u64; 2]> {
        let begun = Instant::now();
        loop {
            let [runs_ns, looked_ns, sum] = self.told()?;
            if looked_ns != 0 && sum != self.sum {
                return Err(self.lost(tool, "it has seen other pages than before"));
            }
            if looked_ns != 0 {
                return Ok([runs_ns, looked_ns]);
            }
            if begun.elapsed() > DEADLINE {
                return Err(self.lost(tool, "it does not come to an end of its memory"));
            }
            std::thread::sleep(LOOK);
        }
    }

    fn told(&self) -> Result<[u64; 3]> {
        let mut bytes = [0; 24];
        let path = PathBuf::from(format!("/proc/{}/mem", self.pid));
        File::open(&path)
            .and_then(|memory| memory.read_exact_at(&mut bytes, self.told_at))
            .map_err(file_error("read", &path))?;
        let word =
            |at: usize| u64::from_ne_bytes(bytes[at..at + 8].try_into().expect("eight bytes"));
        Ok([0, 8, 16].map(word))
    }

    fn lost(&self, tool: &str, what: &str) -> Error {
        Error::Lost {
            tool: tool.into(),
            pid: self.pid.as_raw_nonzero().get(),
            what: what.into(),
        }
    }
}

impl Drop for LookerProcess {
    fn drop(&mut self) {
        // Restored, it is nobody's child of ours: its end is seen by a descriptor.
        let Ok(pidfd) = pidfd_open(self.pid, PidfdFlags::empty()) else {
            return;
        };
        let _ = kill_process(self.pid, Signal::KILL);
        let patience = Timespec {
            tv_sec: DEADLINE.as_secs().cast_signed(),
            tv_nsec: 0,
        };
        let _ = poll(&mut [PollFd::new(&pidfd, PollFlags::IN)], Some(&patience));
        let _ = self.child.try_wait();
    }
}

/// The peer's server of pages.
struct PeersServer(Child);

impl PeersServer {
    /// Starts it and waits until it listens.
    fn start(tool: &Tool, images: &Path) -> Result<Self> {
        let mut command = tool.lazy_pages(images);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let child = command.spawn().map_err(|source| Error::Start {
            program: tool.name.clone(),
            source,
        })?;
        let server = Self(child);
        let begun = Instant::now();
        while !images.join("lazy-pages.socket").exists() {
            if begun.elapsed() > DEADLINE {
                return Err(server.late());
            }
            std::thread::sleep(LOOK);
        }
        Ok(server)
    }

    /// Waits until it has ended, as it does when all has come or the target is gone.
    fn wait(mut self) -> Result<()> {
        let begun = Instant::now();
        while self.0.try_wait().is_ok_and(|ended| ended.is_none()) {
            if begun.elapsed() > DEADLINE {
                return Err(self.late());
            }
            std::thread::sleep(LOOK);
        }
        Ok(())
    }

    fn late(&self) -> Error {
        Error::Late {
            command: "criu lazy-pages".into(),
            seconds: DEADLINE.as_secs(),
        }
    }
}

impl Drop for PeersServer {
    fn drop(&mut self) {
        // One that has ended already is as good.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn title(row: &Row) -> String {
    let way = if row.lazily { "lazily" } else { "at once" };
    format!("{}, {way}", row.tool)
}

fn table(record: &Record) -> String {
    let machine = &record.machine;
    let samples = record.rows.first().map_or(0, |row| row.samples.len());
    let mut out = format!(
        "{} · {} core(s) · kernel {} · images on {}\n\n{} and {}; a program with {} MiB of its own \
         that cannot be compressed. Medians of {samples} rounds in turn, from the start of the \
         command, by the program's own clock; it looks at a word of each page, in order, as soon \
         as it runs.\n\n| restore | the command, ms | the program runs, ms | it has seen all of \
         its pages, ms |\n| --- | ---: | ---: | ---: |\n",
        machine.processor,
        machine.cores,
        machine.kernel,
        machine.disk,
        record.versions[0],
        record.versions[1],
        record.mib,
    );
    for (number, row) in record.rows.iter().enumerate() {
        let of = |value: fn(&Sample) -> f64| {
            let numbers: Vec<f64> = row.samples.iter().map(value).collect();
            median(&numbers).unwrap_or_default()
        };
        let times = [of(|one| one.runs_ms), of(|one| one.looked_ms)];
        let has_goals = number == 0 && record.mib == GOALS_MIB;
        let [runs, looked] = [0, 1].map(|at| {
            let goal = GOALS_MS[at];
            let met = if times[at] <= goal { "met" } else { "missed" };
            let goal = has_goals.then(|| format!(" (goal {goal}: {met})"));
            format!("{:.1}{}", times[at], goal.unwrap_or_default())
        });
        let command = of(|one| one.command_ms);
        let _ = writeln!(out, "| {} | {command:.1} | {runs} | {looked} |", title(row));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn goals_are_told_of_our_own_lazy_restore() {
        let sample = |runs_ms| Sample {
            command_ms: 1.0,
            runs_ms,
            looked_ms: 300.0,
        };
        let row = |tool: &str, lazily, runs_ms| Row {
            tool: tool.into(),
            lazily,
            samples: vec![sample(runs_ms)],
        };
        let record = Record {
            machine: Machine::this(Path::new("/")),
            mib: GOALS_MIB,
            versions: ["a 1".into(), "b 2".into()],
            rows: vec![row("stillframe", true, 4.0), row("criu", true, 6.0)],
        };
        let text = table(&record);
        for line in [
            "| stillframe, lazily | 1.0 | 4.0 (goal 5: met) | 300.0 (goal 250: missed) |",
            "| criu, lazily | 1.0 | 6.0 | 300.0 |",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
    }
}
