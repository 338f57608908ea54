//! Pages below docs/ with a part that is made from the sources, between two marks.
use std::path::Path;

use super::tree::read;
use super::violation::Violation;
use crate::error::Result;
use crate::repo;

/// A page that has such a part.
pub struct Page {
    /// Relative to the repository's top folder.
    pub path: &'static str,
    /// What the marks are called: `<!-- NAME:begin -->`.
    pub mark: &'static str,
    /// What stands between them, for messages: "the list of records".
    pub part: &'static str,
}

impl Page {
    /// Tells whether the tree has the page.
    pub fn exists(&self, root: &Path) -> bool {
        root.join(self.path).exists()
    }

    /// Checks that the page has the `wanted` part.
    ///
    /// # Errors
    /// When the page cannot be read.
    pub fn check(&self, root: &Path, wanted: &str) -> Result<Vec<Violation>> {
        let path = Path::new(self.path);
        let page = read(root, path)?;
        let broken = match self.replace(&page, wanted) {
            Some(wanted) if wanted == page => return Ok(Vec::new()),
            Some(wanted) => {
                let pairs = page.lines().zip(wanted.lines());
                let same = pairs.take_while(|(is, want)| is == want).count();
                let rule = format!("{} is old: run `cargo xtask tidy --fix`", self.part);
                Violation::new(path, same + 1, rule)
            }
            None => {
                let (begin, end) = self.marks();
                Violation::new(path, 1, format!("no lines `{begin}` and `{end}`"))
            }
        };
        Ok(vec![broken])
    }

    /// Writes the part again; a page without the marks stays as it is.
    ///
    /// # Errors
    /// When the page cannot be read or written.
    pub fn fix(&self, root: &Path, wanted: &str) -> Result<()> {
        let page = read(root, Path::new(self.path))?;
        let Some(wanted) = self.replace(&page, wanted) else {
            return Ok(());
        };
        let path = root.join(self.path);
        std::fs::write(&path, wanted).map_err(repo::file_error("write", &path))
    }

    fn marks(&self) -> (String, String) {
        let mark = |which| format!("<!-- {}:{which} -->", self.mark);
        (mark("begin"), mark("end"))
    }

    fn replace(&self, page: &str, part: &str) -> Option<String> {
        let (begin, end) = self.marks();
        let (head, rest) = page.split_once(&begin)?;
        let (_, tail) = rest.split_once(&end)?;
        Some(format!("{head}{begin}\n{part}{end}{tail}"))
    }
}
