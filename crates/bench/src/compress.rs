//! `bench compress`: what dumps and restores of text take, and how large their images are, with
//! each codec and without one, in turn.
use std::fmt::Write as _;
use std::path::PathBuf;

use crate::error::Result;
use crate::record::{Cell, Record, median};
use crate::report::{self, QUANTITIES, Quantity, put_between};
use crate::suite::{self, Choice, name_of};
use crate::tool::Tool;
use crate::workload::{Cache, Medium, TEXT};
use crate::{runs, text};

const BEGIN: &str = "<!-- compress:begin, written by `cargo xtask bench compress` -->";
const END: &str = "<!-- compress:end -->";

/// What lz4 may take of a dump without a codec, and of its image.
const GOALS: [f64; 2] = [1.3, 0.5];

/// What is measured.
#[derive(clap::Args)]
pub struct Arguments {
    /// Only these media.
    #[arg(long = "medium", value_name = "NAME")]
    media: Vec<Medium>,
    /// The stillframe that is measured; without this, the one that STILLFRAME_BIN names.
    #[arg(long, value_name = "PATH")]
    stillframe: Option<PathBuf>,
    /// Fewer rounds; the results go to target/bench instead of docs.
    #[arg(long)]
    quick: bool,
    /// Samples with each codec.
    #[arg(long, value_name = "N")]
    rounds: Option<usize>,
    /// Where the table and the numbers are written.
    #[arg(long, value_name = "FOLDER")]
    out: Option<PathBuf>,
}

/// Measures 1 GiB of text on each medium, keeps the numbers and writes the table.
///
/// # Errors
/// When anything fails that is measured.
pub fn run(arguments: &Arguments) -> Result<()> {
    let rounds = suite::rounds(arguments.rounds, arguments.quick);
    let choice = Choice {
        only: Some("codecs".into()),
        workloads: vec![TEXT.into()],
        media: arguments.media.clone(),
        cold_as_well: false,
        // There is no peer.
        suite: "none".into(),
        peers: "/".into(),
        stillframe: arguments.stillframe.clone(),
        against: None,
    };
    let record = suite::measure_all(&choice, rounds, Some(Cache::Warm))?;
    let folder = report::folder(arguments.out.as_deref(), arguments.quick);
    let numbers = runs::keep(&folder, &record.machine, "compress", &record)?;
    let text = format!("{}\n{}", table(&record), runs::link(&folder, &numbers));
    println!("{text}");
    put_between(&folder.join("benchmarks.md"), [BEGIN, END], &text)
}

/// One program without a codec and with each.
pub fn tools(plain: &Tool) -> Vec<Tool> {
    const CODECS: [(&str, &[&str]); 4] = [
        ("none", &[]),
        ("lz4", &["--compress=lz4"]),
        ("zstd:1", &["--compress=zstd:1"]),
        ("zstd", &["--compress=zstd"]),
    ];
    let with = |(name, dump_options): (&str, &'static [&'static str])| Tool {
        name: name.into(),
        dump_options,
        ..plain.clone()
    };
    CODECS.map(with).into()
}

fn table(record: &Record) -> String {
    let machine = &record.machine;
    let mut out = format!(
        "{} · {} core(s) · kernel {} · disk: {}\n\n1 GiB in one task. {} Medians of {} rounds in \
         turn, and in brackets the share of what it is without a codec; goals for lz4: {} of the \
         dump, {} of the image.\n\n| medium, codec | dump, ms | frozen, ms | restore, ms | \
         image, MiB |\n| --- | ---: | ---: | ---: | ---: |\n",
        machine.processor,
        machine.cores,
        machine.kernel,
        machine.disk,
        text::WHAT,
        record.rounds,
        GOALS[0],
        GOALS[1],
    );
    for cell in &record.cells {
        for (number, tool) in record.tools.iter().enumerate() {
            let _ = write!(out, "| {}, {} |", name_of(cell.medium), tool.name);
            for title in ["dump", "frozen", "restore", "image"] {
                let quantity = QUANTITIES.iter().find(|one| one.title == title);
                let told = quantity.and_then(|quantity| told(cell, quantity, number));
                let _ = write!(out, " {} |", told.unwrap_or_default());
            }
            out.push('\n');
        }
    }
    out
}

/// The median of one codec, and its share of that without one.
fn told(cell: &Cell, quantity: &Quantity, number: usize) -> Option<String> {
    let of = |number: usize| median(&(quantity.of)(cell.series.get(number)?));
    let (plain, own) = (of(0)?, of(number)?);
    if number == 0 {
        return Some(format!("{own:.0}"));
    }
    Some(format!("{own:.0} ({:.2})", own / plain))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_show_shares_of_what_no_codec_takes() {
        let text = table(&report::tests::halved());
        let parts = ["| tmpfs, criu | 8 |", "| tmpfs, stillframe | 4 (0.50) |"];
        for part in parts {
            assert!(text.contains(part), "{part}\n{text}");
        }
    }
}
