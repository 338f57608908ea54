//! `bench live`: dumps of a target that goes on meanwhile, beside dumps that stop it.
use crate::error::Result;
use crate::redis::{Activity, latencies};
use crate::rounds::{Arguments, Bench, Kind};

const MARKS: [&str; 2] = [
    "<!-- live:begin, written by `cargo xtask bench live` -->",
    "<!-- live:end -->",
];

const LIVE: &str = "live dump";
const FULL: &str = "full dump";
const PEER: &str = "criu's full dump";

/// Measures and writes the table.
///
/// # Errors
/// When anything fails that is measured.
pub fn run(arguments: &Arguments) -> Result<()> {
    let mut bench = Bench::new(arguments, &[LIVE, FULL, PEER])?;
    bench.take_turns(take_turn)?;
    let mut after = String::new();
    if !arguments.no_redis {
        after = latencies(&bench, &[Activity::Nothing, Activity::Live, Activity::Save])?;
    }
    bench.write(MARKS, &after)
}

/// Three dumps of one target, of which nothing is left in it.
fn take_turn(bench: &mut Bench, kind: Kind) -> Result<()> {
    let target = kind.start()?;
    for row in [LIVE, FULL, PEER] {
        target.wait_written(kind.pages())?;
        let images = bench.folder("images")?;
        let tool = if row == PEER {
            &bench.criu
        } else {
            &bench.stillframe
        };
        let mut command = tool.dump(target.pid(), &images, true, false);
        if row == LIVE {
            command.arg("--live");
        }
        if row != PEER {
            command.arg("--json");
        }
        bench.measure(kind, row, &target, &mut command, &images)?;
        bench.clear();
    }
    Ok(())
}
