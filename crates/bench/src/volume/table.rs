//! The tables of what was measured.

use std::fmt::Write as _;

use super::{Numbers, Row};
use crate::record::median;

/// What was to be reached: a share of what another way takes, at most, in the same place.
struct Goal {
    what: &'static str,
    place: &'static str,
    of: (&'static str, &'static str),
    most: f64,
}

const GOALS: [Goal; 4] = [
    Goal {
        what: "reading from disk, of the raw device",
        place: "disk, none",
        of: ("stillframe", "raw device, blocks in use"),
        most: 1.0 / 0.95,
    },
    Goal {
        what: "from tmpfs, of dump -b 1000 to /dev/null",
        place: "tmpfs, none",
        of: ("stillframe", "dump -b 1000 to /dev/null"),
        most: 0.3,
    },
    Goal {
        what: "from tmpfs, of dump -b 1000 to a file",
        place: "tmpfs, none",
        of: ("stillframe", "dump -b 1000"),
        most: 0.3,
    },
    Goal {
        what: "restore, of a raw write",
        place: "disk, none",
        of: ("stillframe", "raw write, same blocks"),
        most: 1.0 / 0.9,
    },
];

fn seconds(rows: &[Row], place: &str, way: &str) -> Option<f64> {
    let row = rows.iter().find(|row| row.place == place && row.way == way);
    row.and_then(|row| median(&row.seconds))
}

/// All tables.
pub fn of(numbers: &Numbers) -> String {
    let machine = &numbers.machine;
    let mut out = format!(
        "{} · {} core(s) · kernel {} · disk: {}\n\n{:.0} MiB in use in {} files, read from a loop \
         device with direct I/O and a cold cache; what is made goes to tmpfs. Medians of {} rounds \
         in turn, in seconds, and in brackets the fastest and the slowest; one number is of one \
         sample.\n",
        machine.processor,
        machine.cores,
        machine.kernel,
        machine.disk,
        numbers.used_mib,
        numbers.files,
        numbers.rounds,
    );
    matrix(&mut out, &numbers.saved);
    if !numbers.rotating.is_empty() {
        let _ = write!(
            out,
            "\n{:.0} MiB in use on a simulated rotating disk: a file by FUSE that takes 5.2 ms \
             for each place elsewhere and then 150 MB/s, one read at a time, as a loop device \
             with rotational=1 and 32 KiB of read-ahead:\n",
            numbers.rotating_mib
        );
        matrix(&mut out, &numbers.rotating);
    }
    let _ = write!(
        out,
        "\n{:.0} MiB changed in place, in files of all sizes:\n",
        numbers.changed_mib
    );
    list(&mut out, &numbers.increments);
    out.push_str("\nWritten to a loop device over a sparse file on the disk, and to the disk:\n");
    list(&mut out, &numbers.restored);
    goals(&mut out, numbers);
    out
}

/// Ways by places.
fn matrix(out: &mut String, rows: &[Row]) {
    let mut places: Vec<&str> = rows.iter().map(|row| &*row.place).collect();
    places.dedup();
    let mut ways: Vec<&str> = Vec::new();
    for row in rows {
        if !ways.contains(&&*row.way) {
            ways.push(&row.way);
        }
    }
    let _ = write!(out, "\n| | {} | MiB made |\n", places.join(" | "));
    let _ = writeln!(out, "| --- |{} ---: |", " ---: |".repeat(places.len()));
    for way in ways {
        let _ = write!(out, "| {way} |");
        for place in &places {
            let row = rows
                .iter()
                .find(|row| row.way == way && row.place == *place);
            let _ = write!(out, " {} |", row.map(told).unwrap_or_default());
        }
        let made = rows.iter().find(|row| row.way == way);
        let made = made.map_or(0.0, |row| row.made_mib);
        let _ = writeln!(out, " {made:.0} |");
    }
}

fn list(out: &mut String, rows: &[Row]) {
    out.push_str("\n| | seconds | MiB made |\n| --- | ---: | ---: |\n");
    for row in rows {
        let _ = writeln!(out, "| {} | {} | {:.0} |", row.way, told(row), row.made_mib);
    }
}

/// The median, the fastest and the slowest.
fn told(row: &Row) -> String {
    let fastest = row.seconds.iter().copied().fold(f64::INFINITY, f64::min);
    let slowest = row.seconds.iter().copied().fold(0.0, f64::max);
    match (median(&row.seconds), row.seconds.len()) {
        (None, _) => String::new(),
        (Some(only), 1) => format!("{only:.2}"),
        (Some(median), _) => format!("{median:.2} ({fastest:.2}–{slowest:.2})"),
    }
}

fn goals(out: &mut String, numbers: &Numbers) {
    out.push_str("\n| share of the time | is | at most wanted | |\n| --- | ---: | ---: | --- |\n");
    let mut line = |what: &str, is: Option<f64>, most: f64, unit: &str| {
        let Some(is) = is else { return };
        let met = if is <= most { "met" } else { "missed" };
        let _ = writeln!(out, "| {what} | {is:.2}{unit} | {most:.2}{unit} | {met} |");
    };
    for goal in GOALS {
        let both = [&numbers.saved, &numbers.restored];
        let ratio = both.iter().find_map(|rows| {
            let own = seconds(rows, goal.place, goal.of.0)?;
            Some(own / seconds(rows, goal.place, goal.of.1)?)
        });
        line(goal.what, ratio, goal.most, "");
    }
    for (rows, disk, what) in [
        (&numbers.saved, "disk", "under bfq, of mq-deadline"),
        (
            &numbers.rotating,
            "rotating",
            "the same from the rotating disk",
        ),
    ] {
        let ours = |scheduler| seconds(rows, &format!("{disk}, {scheduler}"), "stillframe");
        let ratio = ours("bfq").zip(ours("mq-deadline"));
        let ratio = ratio.map(|(bfq, deadline)| bfq / deadline);
        line(what, ratio, 1.0 / 0.98, "");
    }
    let increment = numbers
        .increments
        .iter()
        .find(|row| row.way == "stillframe");
    line(
        "increment, time",
        increment.and_then(|row| median(&row.seconds)),
        1.0,
        " s",
    );
    line(
        "increment, size",
        increment.map(|row| row.made_mib),
        80.0,
        " MiB",
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(place: &str, way: &str, seconds: &[f64]) -> Row {
        Row {
            place: place.into(),
            way: way.into(),
            seconds: seconds.to_vec(),
            made_mib: 7.0,
        }
    }

    #[test]
    fn what_is_missed_stays_in_the_table() {
        let folder = tempfile::tempdir().expect("a folder");
        let numbers = Numbers {
            machine: crate::machine::Machine::this(folder.path()),
            rounds: 3,
            used_mib: 3000.0,
            files: 10,
            changed_mib: 73.0,
            saved: vec![
                row("disk, none", "raw device, blocks in use", &[1.0, 2.0, 3.0]),
                row("disk, none", "stillframe", &[2.0, 2.1, 9.0]),
                row("disk, mq-deadline", "stillframe", &[2.0]),
                row("disk, bfq", "stillframe", &[2.2]),
            ],
            rotating: vec![
                row("rotating, mq-deadline", "stillframe", &[4.0]),
                row("rotating, bfq", "stillframe", &[4.0]),
            ],
            rotating_mib: 500.0,
            increments: vec![row("disk, none", "stillframe", &[0.5])],
            restored: vec![
                row("disk, none", "raw write, same blocks", &[2.0]),
                row("disk, none", "stillframe", &[2.0]),
            ],
        };
        let text = of(&numbers);
        assert!(
            text.contains("| stillframe | 2.10 (2.00–9.00) | 2.00 |"),
            "{text}"
        );
        assert!(text.contains("| reading from disk, of the raw device | 1.05 | 1.05 | met |"));
        assert!(text.contains("| under bfq, of mq-deadline | 1.10 | 1.02 | missed |"));
        let same = "| the same from the rotating disk | 1.00 | 1.02 | met |";
        assert!(text.contains(same), "{text}");
        assert!(text.contains("| restore, of a raw write | 1.00 | 1.11 | met |"));
        assert!(text.contains("| increment, size | 7.00 MiB | 80.00 MiB | met |"));
    }
}
