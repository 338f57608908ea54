//! The page: a section for each family, a row for each kind.
use std::fmt::Write;
use std::path::Path;

use super::told::Row;

/// The page's sections, with the files and folders whose rows they have.
const SECTIONS: &[(&str, &[&str])] = &[
    ("Descriptors", &["crates/resources/src/fd"]),
    (
        "Processes and threads",
        &["crates/resources/src/task", "crates/resources/src/arch"],
    ),
    (
        "Memory",
        &[
            "crates/resources/src/map",
            "crates/process/src/collect/segments.rs",
            "crates/process/src/collect/vdso.rs",
        ],
    ),
    (
        "The tree",
        &[
            "crates/resources/src",
            "crates/freeze/src",
            "crates/process/src",
        ],
    ),
    (
        "Trees that run on while they are saved",
        &[
            "crates/freeze/src/uffd.rs",
            "crates/process/src/error.rs",
            "crates/process/src/live.rs",
            "crates/process/src/track",
        ],
    ),
];

/// Renders the page's part.
pub fn render(mut rows: Vec<Row>) -> String {
    rows.sort_by_key(|row| (row.what.to_lowercase(), row.path.clone()));
    let mut out = String::from("\n");
    for (index, (section, _)) in SECTIONS.iter().enumerate() {
        let own = |row: &&Row| section_of(&row.path) == Some(index);
        let own: Vec<&Row> = rows.iter().filter(own).collect();
        if own.is_empty() {
            continue;
        }
        let _ = writeln!(out, "## {section}\n");
        out.push_str("| | kept | refused | CRIU 4.2 |\n| --- | --- | --- | --- |\n");
        for row in own {
            let name = format!("[{}](../{})", cell(&row.what), row.path.display());
            let [kept, peer] = [cell(&row.kept), cell(&row.peer)];
            let refused = cell(&refusals(row));
            let _ = writeln!(out, "| {name} | {kept} | {refused} | {peer} |");
        }
        out.push('\n');
    }
    out
}

/// The section with the longest path that a file's begins with.
fn section_of(path: &Path) -> Option<usize> {
    let all = SECTIONS.iter().enumerate();
    let paths = all.flat_map(|(index, (_, paths))| paths.iter().map(move |path| (path, index)));
    let own = paths.filter(|(folder, _)| path.starts_with(folder));
    own.max_by_key(|(folder, _)| folder.len())
        .map(|(_, index)| index)
}

/// What a row tells of refusals, those of the restore last.
fn refusals(row: &Row) -> String {
    let [refused, at_restore] = row.refusals().map(apart);
    match (&refused[..], &at_restore[..]) {
        (_, "") => refused,
        ("", _) => format!("*at a restore:* {at_restore}"),
        _ => format!("{refused}<br>*at a restore:* {at_restore}"),
    }
}

/// Each refusal of a text in a line of its own: they end with semicolons, outside of quotations and
/// brackets.
fn apart(refused: &str) -> String {
    let mut out = String::new();
    let (mut quoted, mut depth) = (false, 0usize);
    for character in refused.chars() {
        match character {
            '"' => quoted = !quoted,
            '(' if !quoted => depth += 1,
            ')' if !quoted => depth = depth.saturating_sub(1),
            _ => {}
        }
        match character {
            ';' if !quoted && depth == 0 => out.push_str("<br>"),
            other => out.push(other),
        }
    }
    out.replace("<br> ", "<br>")
}

fn cell(text: &str) -> String {
    match text {
        "" => "–".to_owned(),
        text => text.replace('|', "\\|"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn semicolons_in_quotations_and_brackets_do_not_part() {
        assert_eq!(apart("\"a; b(\"; c (d; e)"), "\"a; b(\"<br>c (d; e)");
    }
}
