//! `bench vdso`: what knowing the host costs, system calls and time, with what is remembered of it
//! and without.
use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::PathBuf;

use crate::error::{Error, Result};
use crate::record::{Calls, Cell, Record, Series, median};
use crate::report::{self, put_between};
use crate::suite::{self, Choice};
use crate::workload::{Cache, Medium, Workload};

const BEGIN: &str = "<!-- vdso:begin, written by `cargo xtask bench vdso` -->";
const END: &str = "<!-- vdso:end -->";

const WORKLOADS: [&str; 2] = ["busy", "tree10"];

/// What is measured.
#[derive(clap::Args)]
pub struct Arguments {
    #[command(flatten)]
    choice: Choice,
    /// Fewer rounds; the results go to target/bench instead of docs.
    #[arg(long)]
    quick: bool,
    /// Samples of each program.
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// Where the tables are written.
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

/// Measures one busy task and a tree of ten, or what was chosen instead, with both programs'
/// caches and without, and writes the tables.
///
/// # Errors
/// When the peer cannot be prepared, system calls cannot be counted or anything fails that is
/// measured.
pub fn run(arguments: &Arguments) -> Result<()> {
    let rounds = suite::rounds(arguments.rounds, arguments.quick);
    let given = &arguments.choice;
    if given.media.iter().any(|medium| *medium != Medium::Tmpfs) {
        let what = "calls are counted with images on tmpfs alone".into();
        return Err(Error::Nothing { what });
    }
    let choice = Choice {
        workloads: if given.workloads.is_empty() {
            WORKLOADS.map(String::from).to_vec()
        } else {
            given.workloads.clone()
        },
        media: vec![Medium::Tmpfs],
        cold_as_well: true,
        only: given.only.clone(),
        suite: given.suite.clone(),
        peers: given.peers.clone(),
        stillframe: given.stillframe.clone(),
        against: None,
    };
    let record = suite::measure_all(&choice, rounds, None)?;
    let text = tables(&record)?;
    println!("{text}");
    let folder = report::folder(arguments.out.as_deref(), arguments.quick);
    put_between(&folder.join("benchmarks.md"), (BEGIN, END), &text)
}

/// The samples of one program and workload, by what it remembered.
struct Row<'a> {
    program: &'a str,
    workload: &'a str,
    warm: &'a Series,
    cold: &'a Series,
}

impl Row<'_> {
    fn name(&self) -> &'static str {
        Workload::find(self.workload).map_or("?", |workload| workload.title)
    }

    fn calls(&self, cache: Cache) -> Result<&Calls> {
        let series = self.series(cache);
        series.calls.as_ref().ok_or_else(|| Error::Nothing {
            what: "the kernel does not let system calls be counted".into(),
        })
    }

    fn series(&self, cache: Cache) -> &Series {
        match cache {
            Cache::Warm => self.warm,
            Cache::Cold => self.cold,
        }
    }
}

fn rows(record: &Record) -> Vec<Row<'_>> {
    let mut rows = Vec::new();
    for warm in record.cells.iter().filter(|cell| cell.cache == Cache::Warm) {
        let workload = warm.workload.as_str();
        let mut cells = record.cells.iter();
        let is_it = |cell: &&Cell| cell.workload == workload && cell.cache == Cache::Cold;
        let Some(cold) = cells.find(is_it) else {
            continue;
        };
        for (at, program) in record.tools.iter().enumerate() {
            rows.push(Row {
                program: &program.name,
                workload,
                warm: &warm.series[at],
                cold: &cold.series[at],
            });
        }
    }
    rows
}

fn tables(record: &Record) -> Result<String> {
    let rows = rows(record);
    let machine = &record.machine;
    let programs = record.tools.iter();
    let programs = programs.map(|tool| format!("{} {}", tool.name, tool.version));
    let mut out = String::new();
    let _ = writeln!(
        out,
        "{} · {} core(s) · kernel {} · {} · {}\n\n\
         Images on tmpfs; medians of {}; calls of one dump and one restore, with those that tasks \
         make for them.\n\n\
         | | dump, calls | restore, calls | dump, ms | restore, ms |\n\
         | --- | ---: | ---: | ---: | ---: |",
        machine.processor,
        machine.cores,
        machine.kernel,
        machine.system,
        programs.collect::<Vec<_>>().join(", "),
        record.rounds,
    );
    for row in &rows {
        for (cache, told) in [(Cache::Warm, "remembered"), (Cache::Cold, "not remembered")] {
            let (calls, series) = (row.calls(cache)?, row.series(cache));
            let _ = writeln!(
                out,
                "| {}, host {told}: {} | {} | {} | {:.2} | {:.2} |",
                row.name(),
                row.program,
                calls.dump.values().sum::<u64>(),
                calls.restore.values().sum::<u64>(),
                middle(&series.dump_ms),
                middle(&series.restore_ms),
            );
        }
    }
    out.push('\n');
    ratios(&mut out, &rows)?;
    for pair in rows.chunk_by(|one, other| one.workload == other.workload) {
        by_name(&mut out, pair)?;
    }
    Ok(out.trim_end().to_owned())
}

fn middle(numbers: &[f64]) -> f64 {
    median(numbers).unwrap_or(f64::NAN)
}

#[expect(clippy::cast_precision_loss, reason = "there are thousands")]
fn sum(calls: &std::collections::BTreeMap<String, u64>) -> f64 {
    calls.values().sum::<u64>() as f64
}

/// The last program's numbers by the first one's, and each program's own without what it remembers
/// by those with it.
fn ratios(out: &mut String, rows: &[Row<'_>]) -> Result<()> {
    out.push_str(
        "| ratio | dump, calls | restore, calls | dump, time | restore, time |\n\
         | --- | ---: | ---: | ---: | ---: |\n",
    );
    let mut line = |name: String, one: (&Series, &Calls), other: (&Series, &Calls)| {
        let _ = writeln!(
            out,
            "| {name} | {:.3} | {:.3} | {:.3} | {:.3} |",
            sum(&one.1.dump) / sum(&other.1.dump),
            sum(&one.1.restore) / sum(&other.1.restore),
            middle(&one.0.dump_ms) / middle(&other.0.dump_ms),
            middle(&one.0.restore_ms) / middle(&other.0.restore_ms),
        );
    };
    for pair in rows.chunk_by(|one, other| one.workload == other.workload) {
        let [peer, own] = pair else { continue };
        for (cache, told) in [(Cache::Warm, "remembered"), (Cache::Cold, "not remembered")] {
            line(
                format!(
                    "{}, host {told}: {} / {}",
                    own.name(),
                    own.program,
                    peer.program
                ),
                (own.series(cache), own.calls(cache)?),
                (peer.series(cache), peer.calls(cache)?),
            );
        }
        for row in pair {
            line(
                format!(
                    "{}: {}, not remembered / remembered",
                    row.name(),
                    row.program
                ),
                (row.cold, row.calls(Cache::Cold)?),
                (row.warm, row.calls(Cache::Warm)?),
            );
        }
    }
    Ok(())
}

/// All calls of a workload by name.
fn by_name(out: &mut String, rows: &[Row<'_>]) -> Result<()> {
    let mut columns = Vec::new();
    for row in rows {
        for (cache, told) in [(Cache::Warm, "remembered"), (Cache::Cold, "not")] {
            let calls = row.calls(cache)?;
            columns.push((format!("{} {told}, dump", row.program), &calls.dump));
            columns.push((format!("{} {told}, restore", row.program), &calls.restore));
        }
    }
    let _ = writeln!(
        out,
        "\n<details><summary>System calls by name: {}</summary>\n",
        rows[0].name()
    );
    let heads = columns.iter().map(|column| format!(" {} |", column.0));
    let _ = writeln!(out, "| call |{}", heads.collect::<String>());
    let _ = writeln!(out, "| --- |{}", " ---: |".repeat(columns.len()));
    let names = columns.iter().flat_map(|column| column.1.keys());
    let mut names = names
        .collect::<BTreeSet<_>>()
        .into_iter()
        .collect::<Vec<_>>();
    let most = |name: &String| {
        let counts = columns.iter().map(|column| column.1.get(name).copied());
        counts.map(Option::unwrap_or_default).max()
    };
    names.sort_by_key(|name| std::cmp::Reverse(most(name)));
    for name in names {
        let counts = columns.iter().map(|column| {
            let count = column.1.get(name).copied().unwrap_or(0);
            format!(" {count} |")
        });
        let _ = writeln!(out, "| {name} |{}", counts.collect::<String>());
    }
    out.push_str("\n</details>\n");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::Machine;
    use crate::record::Program;
    use std::path::Path;

    #[test]
    fn calls_and_times_are_compared() {
        let series = |calls: u64, ms: f64| Series {
            dump_ms: vec![ms],
            restore_ms: vec![ms],
            calls: Some(Calls {
                dump: [("read".to_owned(), calls)].into(),
                restore: [("mmap".to_owned(), calls)].into(),
            }),
            ..Series::default()
        };
        let cell = |cache, peer, own| Cell {
            workload: "busy".into(),
            medium: Medium::Tmpfs,
            cache,
            series: vec![series(peer, 8.0), series(own, 2.0)],
        };
        let program = |name: &str| Program {
            name: name.into(),
            version: "1".into(),
        };
        let record = Record {
            machine: Machine::this(Path::new("/")),
            tools: vec![program("criu"), program("stillframe")],
            rounds: 1,
            cells: vec![cell(Cache::Warm, 1000, 200), cell(Cache::Cold, 2000, 200)],
        };
        let text = tables(&record).expect("they were counted");
        for line in [
            "| one busy task, host remembered: criu | 1000 | 1000 | 8.00 | 8.00 |",
            "task, host not remembered: stillframe / criu | 0.100 | 0.100 | 0.250 | 0.250 |",
            "task: stillframe, not remembered / remembered | 1.000 | 1.000 | 1.000 | 1.000 |",
            "| read | 1000 | 0 | 2000 | 0 | 200 | 0 | 200 | 0 |",
        ] {
            assert!(text.contains(line), "{line}\n{text}");
        }
    }
}
