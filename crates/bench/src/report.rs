//! The results as a person reads them: ratios first, then medians, then system calls by name.
use std::collections::BTreeSet;
use std::fmt::Write;
use std::path::{Path, PathBuf};

use crate::error::{Result, file_error};
use crate::record::{Calls, Cell, Record, Series, median};
use crate::runs;
use crate::suite::name_of;
use crate::workload::{Cache, Workload};

/// Between these lines the page is written by this program.
const BEGIN: &str = "<!-- process:begin, written by `cargo xtask bench process` -->";
const END: &str = "<!-- process:end -->";

/// Which numbers are shown where.
#[derive(clap::Args)]
pub struct Arguments {
    /// The kept numbers of a run of `bench process`.
    numbers: PathBuf,
    /// The folder with benchmarks.md.
    #[arg(long, default_value = "docs")]
    folder: PathBuf,
}

/// One measured quantity of a series, as a table's column.
pub struct Quantity {
    /// The column's head.
    pub title: &'static str,
    /// Its numbers, of which the median is shown.
    pub of: fn(&Series) -> Vec<f64>,
}

/// The columns.
pub const QUANTITIES: &[Quantity] = &[
    Quantity {
        title: "dump",
        of: |series| series.dump_ms.clone(),
    },
    Quantity {
        title: "frozen",
        of: |series| series.frozen_ms.clone(),
    },
    Quantity {
        title: "restore",
        of: |series| series.restore_ms.clone(),
    },
    Quantity {
        title: "runs again",
        of: |series| series.runs_again_ms.clone(),
    },
    Quantity {
        title: "image",
        of: |series| image_mib(series),
    },
    Quantity {
        title: "calls, dump",
        of: |series| total(series, |calls| &calls.dump),
    },
    Quantity {
        title: "calls, restore",
        of: |series| total(series, |calls| &calls.restore),
    },
];

/// Writes the page from kept numbers again.
///
/// # Errors
/// When a file cannot be read or written.
pub fn run(arguments: &Arguments) -> Result<()> {
    let record = Record::read(&arguments.numbers)?;
    show(&record, &arguments.numbers, &arguments.folder)
}

/// Keeps the numbers, and writes the page below a folder.
///
/// # Errors
/// When a file cannot be written.
pub fn write(record: &Record, folder: &Path) -> Result<()> {
    let numbers = runs::keep(folder, &record.machine, "process", record)?;
    show(record, &numbers, folder)
}

/// Writes the page below a folder, and prints the page's tables.
fn show(record: &Record, numbers: &Path, folder: &Path) -> Result<()> {
    let page = folder.join("benchmarks.md");
    let tables = format!("{}\n\n{}", tables(record), runs::link(folder, numbers));
    put_between(&page, [BEGIN, END], &tables)?;
    println!("{tables}");
    eprintln!("written: {}", page.display());
    Ok(())
}

/// Where results go: to `out`, or else among the documents unless the measurement was a `quick`
/// one.
pub fn folder(out: Option<&Path>, quick: bool) -> PathBuf {
    let usual = if quick { "target/bench" } else { "docs" };
    out.unwrap_or(Path::new(usual)).to_owned()
}

/// Writes text between two marks of a page, which is made where it is missing.
///
/// # Errors
/// [`crate::error::Error::File`].
pub fn put_between(page: &Path, marks: [&str; 2], text: &str) -> Result<()> {
    let folder = page.parent().unwrap_or(Path::new("."));
    std::fs::create_dir_all(folder).map_err(file_error("make", folder))?;
    let [begin, end] = marks;
    let before = std::fs::read_to_string(page).unwrap_or_else(|_| format!("{begin}\n{end}\n"));
    std::fs::write(page, replace(&before, marks, text)).map_err(file_error("write", page))
}

/// Puts text between the marks, or at the end with marks around it.
fn replace(page: &str, [begin, end]: [&str; 2], text: &str) -> String {
    match page
        .split_once(begin)
        .and_then(|(head, rest)| Some((head, rest.split_once(end)?.1)))
    {
        Some((head, tail)) => format!("{head}{begin}\n{text}\n{end}{tail}"),
        None => format!("{page}\n{begin}\n{text}\n{end}\n"),
    }
}

fn tables(record: &Record) -> String {
    let machine = &record.machine;
    let mut out = String::new();
    let programs: Vec<_> = record
        .tools
        .iter()
        .map(|tool| format!("{} {}", tool.name, tool.version))
        .collect();
    let _ = writeln!(
        out,
        "{} · {} core(s), {} MiB · kernel {} · {} · huge pages: {} · disk: {}\n",
        machine.processor,
        machine.cores,
        machine.memory_mib,
        machine.kernel,
        machine.system,
        machine.huge_pages,
        machine.disk,
    );
    let _ = writeln!(
        out,
        "{}, {} rounds in turn.\n",
        programs.join(" and "),
        record.rounds
    );
    ratios(record, &mut out);
    medians(record, &mut out);
    for cell in &record.cells {
        calls(record, cell, &mut out);
    }
    out.trim_end().to_string()
}

/// The second program's medians as shares of the first one's.
fn ratios(record: &Record, out: &mut String) {
    let names: Vec<_> = record.tools.iter().map(|tool| tool.name.as_str()).collect();
    let _ = writeln!(
        out,
        "**{}: 1 is the same, less is better.**\n",
        names_of_ratio(&names)
    );
    head(out, "of");
    for cell in &record.cells {
        let _ = write!(out, "| {} |", title(cell));
        for (number, quantity) in QUANTITIES.iter().enumerate() {
            let Some(ratio) = ratio(cell, quantity) else {
                out.push_str(" |");
                continue;
            };
            // Dump and restore have goals; they stand in columns 0 and 2.
            let goal = match number {
                0 => goals(cell)[0],
                2 => goals(cell)[1],
                _ => None,
            };
            let _ = match goal {
                Some(goal) if ratio <= goal => write!(out, " **{ratio:.2}** (goal {goal}) |"),
                Some(goal) => write!(out, " {ratio:.2} (goal {goal}) |"),
                None => write!(out, " {ratio:.2} |"),
            };
        }
        out.push('\n');
    }
    out.push('\n');
}

fn names_of_ratio(names: &[&str]) -> String {
    names.iter().rev().copied().collect::<Vec<_>>().join(" / ")
}

/// Each program's medians, with the quartiles of what has them.
fn medians(record: &Record, out: &mut String) {
    let _ = writeln!(
        out,
        "**Medians** (quartiles); times in ms, images in MiB.\n"
    );
    head(out, "program");
    for cell in &record.cells {
        for (tool, series) in record.tools.iter().zip(&cell.series) {
            let _ = write!(out, "| {}: {} |", title(cell), tool.name);
            for quantity in QUANTITIES {
                let _ = write!(out, " {} |", with_quartiles((quantity.of)(series)));
            }
            out.push('\n');
        }
    }
    out.push('\n');
}

fn with_quartiles(mut numbers: Vec<f64>) -> String {
    numbers.sort_by(f64::total_cmp);
    let Some(middle) = median(&numbers) else {
        return String::new();
    };
    let (low, high) = (numbers[numbers.len() / 4], numbers[numbers.len() * 3 / 4]);
    let digits = |number: f64| match number {
        _ if number.fract() == 0.0 => 0,
        _ if number < 10.0 => 2,
        _ if number < 100.0 => 1,
        _ => 0,
    };
    let precision = digits(middle);
    if low == high {
        return format!("{middle:.precision$}");
    }
    format!("{middle:.precision$} ({low:.precision$}–{high:.precision$})")
}

/// The calls of one cell by name, the most frequent first; all of them are in the kept numbers.
fn calls(record: &Record, cell: &Cell, out: &mut String) {
    const SHOWN: usize = 15;
    let counted: Vec<_> = cell
        .series
        .iter()
        .filter_map(|series| series.calls.as_ref())
        .collect();
    if counted.is_empty() || counted.len() != record.tools.len() {
        return;
    }
    let names: BTreeSet<_> = counted
        .iter()
        .flat_map(|calls| calls.dump.keys().chain(calls.restore.keys()))
        .collect();
    let sum = |name: &String| {
        let of = |calls: &&Calls| {
            calls.dump.get(name).unwrap_or(&0) + calls.restore.get(name).unwrap_or(&0)
        };
        counted.iter().map(of).sum::<u64>()
    };
    let mut names: Vec<_> = names.into_iter().collect();
    names.sort_by_key(|name| std::cmp::Reverse(sum(name)));
    let _ = writeln!(
        out,
        "<details><summary>System calls: {}</summary>\n",
        title(cell)
    );
    out.push_str("| call |");
    for what in ["dump", "restore"] {
        for tool in &record.tools {
            let _ = write!(out, " {what}, {} |", tool.name);
        }
    }
    let _ = writeln!(out, "\n| --- |{}", " ---: |".repeat(2 * record.tools.len()));
    for name in names.iter().take(SHOWN) {
        let _ = write!(out, "| {name} |");
        for of in [
            |calls: &Calls| calls.dump.clone(),
            |calls: &Calls| calls.restore.clone(),
        ] {
            for calls in &counted {
                let _ = write!(out, " {} |", of(calls).get(*name).unwrap_or(&0));
            }
        }
        out.push('\n');
    }
    let _ = writeln!(out, "\n</details>\n");
}

fn head(out: &mut String, first: &str) {
    let _ = write!(out, "| {first} |");
    for quantity in QUANTITIES {
        let _ = write!(out, " {} |", quantity.title);
    }
    let _ = writeln!(out, "\n| --- |{}", " ---: |".repeat(QUANTITIES.len()));
}

/// Returns a cell's name for people.
fn title(cell: &Cell) -> String {
    let workload =
        Workload::find(&cell.workload).map_or(cell.workload.as_str(), |known| known.title);
    let cold = if cell.cache == Cache::Cold {
        ", without the host cache"
    } else {
        ""
    };
    format!("{workload}, {}{cold}", name_of(cell.medium))
}

/// Returns the shares of the peer's dump and restore that were set as goals for a cell.
fn goals(cell: &Cell) -> [Option<f64>; 2] {
    match cell.cache {
        Cache::Warm => Workload::find(&cell.workload).map_or([None, None], |known| known.goals),
        Cache::Cold => [None, None],
    }
}

/// Returns the second program's median as a share of the first one's.
fn ratio(cell: &Cell, quantity: &Quantity) -> Option<f64> {
    let of = |index: usize| median(&(quantity.of)(cell.series.get(index)?));
    let (peer, ours) = (of(0)?, of(1)?);
    (peer > 0.0).then(|| ours / peer)
}

#[allow(
    clippy::cast_precision_loss,
    reason = "an image has less than 2^53 bytes"
)]
fn image_mib(series: &Series) -> Vec<f64> {
    series
        .image_bytes
        .iter()
        .map(|bytes| *bytes as f64 / f64::from(1 << 20))
        .collect()
}

#[allow(clippy::cast_precision_loss, reason = "less than 2^53 calls")]
fn total(series: &Series, of: fn(&Calls) -> &std::collections::BTreeMap<String, u64>) -> Vec<f64> {
    series
        .calls
        .iter()
        .map(|calls| of(calls).values().sum::<u64>() as f64)
        .collect()
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use crate::machine::Machine;
    use crate::record::Program;
    use crate::workload::Medium;

    /// A record with one cell, in which the second program takes half as long.
    pub fn halved() -> Record {
        let program = |name: &str| Program {
            name: name.into(),
            version: "1".into(),
        };
        let series = |ms: f64, count: u64| Series {
            dump_ms: vec![ms, ms, 100.0],
            restore_ms: vec![ms],
            image_bytes: vec![count << 20],
            calls: Some(Calls {
                dump: [("read".to_string(), count)].into(),
                restore: [("<write>".to_string(), 1)].into(),
            }),
            ..Series::default()
        };
        Record {
            machine: Machine::this(Path::new("/")),
            tools: vec![program("criu"), program("stillframe")],
            rounds: 3,
            cells: vec![Cell {
                workload: "busy".into(),
                medium: Medium::Tmpfs,
                cache: Cache::Warm,
                series: vec![series(8.0, 200), series(4.0, 20)],
            }],
        }
    }

    #[test]
    fn ratios_are_those_of_medians() {
        let cell = &halved().cells[0];
        let ratios: Vec<_> = QUANTITIES
            .iter()
            .map(|quantity| ratio(cell, quantity))
            .collect();
        let half = Some(0.5);
        assert_eq!(
            ratios,
            [half, None, half, None, Some(0.1), Some(0.1), Some(1.0)]
        );
    }

    #[test]
    fn tables_show_ratio_goal_median_and_calls() {
        let text = tables(&halved());
        for part in [
            "| one busy task, tmpfs | 0.50 (goal 0.25) | | 0.50 (goal 0.25) | | 0.10 |",
            "| one busy task, tmpfs: criu | 8 (8–100) |  | 8 |  | 200 | 200 | 1 |",
            "| read | 200 | 20 | 0 | 0 |",
        ] {
            assert!(text.contains(part), "{part}\n{text}");
        }
    }

    #[test]
    fn what_a_person_wrote_on_the_page_stays() {
        let page = format!("above\n{BEGIN}\nold\n{END}\nbelow\n");
        assert_eq!(
            replace(&page, [BEGIN, END], "new"),
            format!("above\n{BEGIN}\nnew\n{END}\nbelow\n")
        );
        assert_eq!(
            replace("above\n", [BEGIN, END], "new"),
            format!("above\n\n{BEGIN}\nnew\n{END}\n")
        );
    }
}
