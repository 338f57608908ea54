//! What came out, in words and as the table of docs/programs.md.
use std::process::{Command, Stdio};
use std::time::Duration;

use crate::list::PROGRAMS;
use crate::trial::{Report, SaveMethod, TrialResult};
use crate::{Package, Program};

/// Prints what there is to be tried.
pub fn print_names() {
    for program in PROGRAMS {
        println!("{:12} {}", program.name, program.doing);
    }
}

/// Prints the packages of what is to be tried, a line each, with tabs between the fields.
pub fn print_packages(programs: &[&Program]) {
    for package in programs.iter().flat_map(|program| program.packages) {
        let Package {
            name,
            program,
            reason,
            services,
        } = package;
        println!("{name}\t{program}\t{reason}\t{}", services.join(" "));
    }
}

/// One line about one trial, or more where it failed.
pub fn sentence(report: &Report) -> String {
    let how = match &report.end {
        TrialResult::Went => "went on".into(),
        TrialResult::Refused(why) => format!("refused: {why}"),
        TrialResult::Failed(why) => format!("FAILED: {why}"),
    };
    let mut text = format!(
        "{} {}: {} cycles, {} tasks, {} threads, dump {}, restore {}: {how}",
        report.program.name,
        report.way.name(),
        report.cycles,
        report.tasks,
        report.threads,
        milliseconds(&report.dumps),
        milliseconds(&report.restores),
    );
    for why in &report.retried {
        text.push_str(&format!("\n  tried again: {}", why.replace('\n', "; ")));
    }
    text
}

/// The table, a row a program.
pub fn markdown(reports: &[Report]) -> String {
    let mut text = String::from(
        "| program | version | doing | tasks, threads | dump | live | pre-dump | ms |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    let mut rest = reports;
    while let Some(first) = rest.first() {
        let same = |report: &&Report| report.program.name == first.program.name;
        let (own, others) = rest.split_at(rest.iter().take_while(same).count());
        rest = others;
        let of = |way| own.iter().find(|report| report.way == way).map(cell);
        let cells: Vec<String> = SaveMethod::ALL
            .iter()
            .map(|&way| of(way).unwrap_or_else(|| "not tried".into()))
            .collect();
        text.push_str(&format!(
            "| {} | {} | {} | {}, {} | {} | {} / {} |\n",
            first.program.name,
            first
                .program
                .packages
                .first()
                .map(version)
                .unwrap_or_default(),
            first.program.doing,
            first.tasks,
            first.threads,
            cells.join(" | "),
            milliseconds(&first.dumps),
            milliseconds(&first.restores),
        ));
    }
    text
}

fn cell(report: &Report) -> String {
    match &report.end {
        TrialResult::Went => {
            let only = report
                .program
                .moves_on
                .filter(|_| report.way == SaveMethod::Live);
            let only = only.map(|why| format!(", not restored: {why}"));
            format!("{}{}", report.cycles, only.unwrap_or_default())
        }
        TrialResult::Refused(why) => {
            format!("refused: {}", why.replace('\n', "; ").replace('|', "/"))
        }
        TrialResult::Failed(_) => format!("failed after {}", report.cycles),
    }
}

/// The version of a package, or of another one that has its program; without what Debian adds.
fn version(package: &Package) -> String {
    let ask = |arguments: &[&str]| {
        let mut query = Command::new("dpkg-query");
        let told = query.args(arguments).stderr(Stdio::null()).output().ok()?;
        let text = String::from_utf8_lossy(&told.stdout).trim().to_owned();
        (told.status.success() && !text.is_empty()).then_some(text)
    };
    let named = |name: &str| ask(&["-W", "-f", "${Version}", name]);
    let told = named(package.name).or_else(|| {
        let program = testkit::skip::find_program(package.program)?;
        let owner = ask(&["-S", program.canonicalize().ok()?.to_str()?])?;
        named(owner.split(": ").next()?)
    });
    let told = told.unwrap_or_default();
    let upstream = told.split_once(':').map_or(&*told, |(_, rest)| rest);
    upstream
        .split(['-', '+', '~'])
        .next()
        .unwrap_or_default()
        .to_owned()
}

/// The median.
fn milliseconds(times: &[Duration]) -> String {
    let mut sorted = times.to_vec();
    sorted.sort_unstable();
    let median = sorted.get(sorted.len() / 2);
    median.map_or_else(|| "-".into(), |time| time.as_millis().to_string())
}
