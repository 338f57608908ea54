//! What a file's `//!` documentation tells of support, as items of a list: `- What:`, `- Kept:`,
//! `- Refused:`, `- At a restore:` and `- CRIU 4.2:`, each a sentence or two.
use std::path::{Path, PathBuf};

/// The items, as they begin.
const WHAT: &str = "- What: ";
const KEPT: &str = "- Kept: ";
const REFUSED: &str = "- Refused: ";
const RESTORE: &str = "- At a restore: ";
const PEER: &str = "- CRIU 4.2: ";

/// One row of the page.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Row {
    pub path: PathBuf,
    /// Where it begins.
    pub line: usize,
    /// What it is about; empty where neither the file nor its kind says it.
    pub what: String,
    pub kept: String,
    /// What a dump refuses.
    pub refused: String,
    /// What a restore refuses.
    pub at_restore: String,
    /// What the peer does.
    pub peer: String,
    /// True if an item stands there once more.
    is_double: bool,
}

impl Row {
    /// The words that it says something is refused in.
    pub fn quoted(&self) -> impl Iterator<Item = &str> {
        self.refusals()
            .into_iter()
            .flat_map(|text| text.split('"').skip(1).step_by(2))
    }

    /// What it tells of refusals.
    pub fn refusals(&self) -> [&str; 2] {
        [&self.refused, &self.at_restore]
    }

    /// What is missing, if anything.
    pub fn lacks(&self) -> Option<&'static str> {
        if self.what.is_empty() {
            Some("no `- What:` says what it is about")
        } else if self.kept.is_empty() && self.refused.is_empty() {
            Some("it has neither `- Kept:` nor `- Refused:`")
        } else if self.peer.is_empty() {
            Some("no `- CRIU 4.2:` says what that does")
        } else if self.is_double {
            Some("an item stands there twice")
        } else if self.refusals().iter().any(|text| is_open(text)) {
            Some("a quotation does not end")
        } else {
            None
        }
    }
}

fn is_open(text: &str) -> bool {
    !text.matches('"').count().is_multiple_of(2)
}

/// The rows that a file's documentation has. One begins with `- What:`; the first needs none where
/// the file is of a kind that has a name.
pub fn rows(path: &Path, text: &str) -> Vec<Row> {
    let lines = text.lines().map(|line| line.strip_prefix("//!"));
    let lines = lines.take_while(Option::is_some).flatten();
    let mut rows: Vec<Row> = Vec::new();
    let mut item: Option<&str> = None;
    for (number, line) in (1..).zip(lines) {
        let line = line.strip_prefix(' ').unwrap_or(line);
        let begun = [WHAT, KEPT, REFUSED, RESTORE, PEER]
            .into_iter()
            .find(|begin| line.starts_with(begin));
        item = match begun {
            Some(begin) => Some(begin),
            None => item.filter(|_| line.starts_with("  ")),
        };
        let Some(item) = item else { continue };
        if begun == Some(WHAT) || rows.is_empty() {
            rows.push(Row {
                path: path.into(),
                line: number,
                what: kind_name(text).unwrap_or_default(),
                ..Row::default()
            });
        }
        let Some(row) = rows.last_mut() else { continue };
        let place = match item {
            WHAT => &mut row.what,
            KEPT => &mut row.kept,
            REFUSED => &mut row.refused,
            RESTORE => &mut row.at_restore,
            _ => &mut row.peer,
        };
        match begun {
            Some(begin) => {
                // A name may be there already, that of the kind.
                row.is_double |= item != WHAT && !place.is_empty();
                *place = line[begin.len()..].trim().to_owned();
            }
            None => {
                place.push(' ');
                place.push_str(line.trim());
            }
        }
    }
    for row in &mut rows {
        for item in [
            &mut row.what,
            &mut row.kept,
            &mut row.refused,
            &mut row.at_restore,
            &mut row.peer,
        ] {
            if item.ends_with('.') {
                item.pop();
            }
        }
    }
    rows
}

/// The name of the kind, or the part, of a file.
fn kind_name(text: &str) -> Option<String> {
    let of_kind = text.split_once("const NAME: &'static str = ");
    let of_part = || text.split_once("fn name(&self) -> &'static str {");
    let (_, body) = of_kind.or_else(of_part)?;
    let name = body.trim_start().strip_prefix('"')?;
    Some(name.split('"').next()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_may_have_several_lines_and_end_with_a_paragraph() {
        let text = "//! Counters.\n//!\n//! - Kept: all\n//!   of it.\n//! - Refused: \"a\n\
                    //!   b\"; \"c\".\n//! - At a restore: \"d\".\n//! - CRIU 4.2: the same.\n\
                    //!\n//! More.\n\
                    //!   - CRIU 4.2: not read\n\
                    const NAME: &'static str = \"counter\";\n";
        let rows = rows(Path::new("a.rs"), text);
        assert_eq!(rows.len(), 1);
        assert_eq!((rows[0].what.as_str(), rows[0].line), ("counter", 3));
        assert_eq!(rows[0].kept, "all of it");
        assert_eq!(rows[0].quoted().collect::<Vec<_>>(), ["a b", "c", "d"]);
        assert_eq!(rows[0].peer, "the same");
        assert_eq!(rows[0].lacks(), None);
    }

    #[test]
    fn what_is_missing_is_named() {
        let cases = [
            ("//! - Kept: all.\n", Some("no `- What:`")),
            (
                "//! - What: a.\n//! - CRIU 4.2: b.\n",
                Some("it has neither"),
            ),
            ("//! - What: a.\n//! - Kept: b.\n", Some("no `- CRIU")),
            (
                "//! - What: a.\n//! - Refused: \"b.\n//! - CRIU 4.2: c.\n",
                Some("a quotation"),
            ),
            (
                "//! - What: a.\n//! - Kept: b.\n//! - Kept: c.\n//! - CRIU 4.2: d.\n",
                Some("an item"),
            ),
        ];
        for (text, want) in cases {
            let lacks = rows(Path::new("a.rs"), text)[0].lacks();
            assert!(
                lacks.unwrap_or_default().starts_with(want.unwrap_or("x")),
                "{text}: {lacks:?}"
            );
        }
    }

    #[test]
    fn a_file_may_have_several_rows() {
        let text =
            "//! A.\n//! - What: a.\n//! - Kept: b.\n//! - What: c.\n//! - Refused: \"d\".\n";
        let rows = rows(Path::new("a.rs"), text);
        let names: Vec<_> = rows.iter().map(|row| row.what.as_str()).collect();
        assert_eq!(names, ["a", "c"]);
        assert_eq!(rows[0].refused, "");
        assert!(super::rows(Path::new("a.rs"), "//! A.\n").is_empty());
    }
}
