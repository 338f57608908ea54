//! `bench predump`: rounds of a pre-dump and the dump over them, beside a full dump.
use std::path::Path;
use std::process::Command;

use crate::error::{Error, Result};
use crate::redis::{Activity, latencies};
use crate::rounds::{Arguments, Bench, Kind};
use crate::tool::{Tool, timed};
use crate::writer::Writer;

const MARKS: [&str; 2] = [
    "<!-- predump:begin, written by `cargo xtask bench predump` -->",
    "<!-- predump:end -->",
];

const FIRST: &str = "first round";
const ROUND: &str = "round";
const LAST: &str = "dump over it";
const PEER_ROUND: &str = "criu's round";
const PEER: &str = "criu's full dump";

/// Measures and writes the table.
///
/// # Errors
/// When anything fails that is measured.
pub fn run(arguments: &Arguments) -> Result<()> {
    let mut bench = Bench::new(arguments, &[FIRST, ROUND, LAST, PEER_ROUND, PEER])?;
    let peers_failure = take_peers_round(&bench)?;
    bench.take_turns(|bench, kind| {
        take_turn(bench, kind)?;
        if peers_failure.is_none() {
            take_peers_chain(bench, kind)?;
        }
        take_peers_turn(bench, kind)
    })?;
    let mut after = String::new();
    if let Some(failure) = peers_failure {
        after = format!("\ncriu's pre-dump does not run here: `{failure}`.\n");
    }
    if !arguments.no_redis {
        after += &latencies(
            &bench,
            &[Activity::Nothing, Activity::Rounds, Activity::Save],
        )?;
    }
    bench.write(MARKS, &after)
}

/// Two rounds and a dump over them of one target, which goes on.
fn take_turn(bench: &mut Bench, kind: Kind) -> Result<()> {
    let target = kind.start()?;
    let tool = bench.stillframe.clone();
    let [first, round, last] = ["first", "round", "last"].map(|name| bench.folder(name));
    let [first, round, last] = [first?, round?, last?];
    let mut command = pre_dump(&tool, &target, &first, None);
    bench.measure(kind, FIRST, &target, &mut command, &first)?;
    target.wait_written(kind.pages())?;
    let mut command = pre_dump(&tool, &target, &round, Some("../first"));
    bench.measure(kind, ROUND, &target, &mut command, &round)?;
    target.wait_written(kind.pages())?;
    let mut command = tool.dump(target.pid(), &last, true, false);
    command.args(["--prev-images-dir", "../round", "--json"]);
    bench.measure(kind, LAST, &target, &mut command, &last)?;
    bench.clear();
    Ok(())
}

fn pre_dump(tool: &Tool, target: &Writer, images: &Path, parent: Option<&str>) -> Command {
    let mut command = tool.pre_dump(target.pid(), images);
    command.arg("--json");
    if let Some(parent) = parent {
        command.args(["--prev-images-dir", parent]);
    }
    command
}

/// Tries a round of the peer's; tells why, where it cannot.
fn take_peers_round(bench: &Bench) -> Result<Option<String>> {
    let target = Writer::start(16, 1)?;
    let images = bench.folder("criu")?;
    let mut command = bench.criu.pre_dump(target.pid(), &images);
    let outcome = timed(&mut command, &images.join("said.log"));
    let outcome = match outcome {
        Ok(_) => Ok(None),
        Err(Error::Status { said, status, .. }) => {
            let line = said.lines().rev().find(|line| line.contains("BUG"));
            let line = line.or(said.lines().rev().find(|line| line.contains("Error")));
            Ok(Some(
                line.map_or(status.to_string(), |line| line.trim().to_owned()),
            ))
        }
        Err(error) => Err(error),
    };
    bench.clear();
    outcome
}

/// A round of the peer's over another, where it can.
fn take_peers_chain(bench: &mut Bench, kind: Kind) -> Result<()> {
    let target = kind.start()?;
    let [first, round] = ["criu-first", "criu-round"].map(|name| bench.folder(name));
    let [first, round] = [first?, round?];
    let mut command = bench.criu.pre_dump(target.pid(), &first);
    command.arg("--track-mem");
    timed(&mut command, &first.join("said.log"))?;
    target.wait_written(kind.pages())?;
    let mut command = bench.criu.pre_dump(target.pid(), &round);
    command.args(["--track-mem", "--prev-images-dir", "../criu-first"]);
    bench.measure(kind, PEER_ROUND, &target, &mut command, &round)?;
    bench.clear();
    Ok(())
}

fn take_peers_turn(bench: &mut Bench, kind: Kind) -> Result<()> {
    let target = kind.start()?;
    target.wait_written(kind.pages())?;
    let images = bench.folder("criu")?;
    let mut command = bench.criu.dump(target.pid(), &images, true, false);
    bench.measure(kind, PEER, &target, &mut command, &images)?;
    bench.clear();
    Ok(())
}
