//! What a dump has to find out about a tree and its host that would take long while the tree is
//! stopped. An ordinary tree needs nothing of it. So what is needed is seen at the first stop, the
//! tree goes on while it is done, and is stopped again.

use std::time::Instant;

use resources::fd::table::Link;
use resources::fd::watched::Watched;
use resources::map::placed;
use resources::{Allow, Error, fd, kernel};

use crate::Result;

/// What is to be done, and what came of it.
#[derive(Debug, Default)]
pub(crate) struct Homework {
    /// For what the kernel's structures are looked into: links of descriptors.
    purposes: Vec<String>,
    /// Where watched files are.
    pub watched: Watched,
    has_unfound: bool,
}

impl Homework {
    /// Sees whether there are descriptors of which only the kernel's memory tells enough.
    ///
    /// # Errors
    /// [`Error::Passing`] where this has to be prepared.
    pub fn check_links(&mut self, pid: i32, links: &[Link]) -> Result<()> {
        for purpose in fd::links_looked_up() {
            if links.iter().any(|link| link.target == purpose) {
                self.check(pid, purpose)?;
            }
        }
        Ok(())
    }

    /// The same of a mapping that the kernel works on.
    ///
    /// # Errors
    /// As [`Homework::check_links`].
    pub fn check_mappings(&mut self, pid: i32) -> Result<()> {
        self.check(pid, placed::LOOKED_UP)
    }

    fn check(&mut self, pid: i32, purpose: &[u8]) -> Result<()> {
        let purpose = String::from_utf8_lossy(purpose).into_owned();
        if kernel::is_known_for(&purpose) {
            return Ok(());
        }
        self.purposes.push(purpose);
        Err(later(
            pid,
            "where the kernel has its structures is to be looked up",
        ))
    }

    /// Puts off a dump until watched files are looked for.
    pub fn look_for_watched(&mut self, pid: i32) -> Result<()> {
        self.has_unfound = true;
        Err(later(pid, "files that it watches are to be looked for"))
    }

    /// Tells whether there is something to do.
    pub fn is_there(&self) -> bool {
        self.has_unfound || !self.purposes.is_empty()
    }

    /// Does what there is to do while the tree runs, until `deadline`. Gives whether there was
    /// anything.
    ///
    /// # Errors
    /// When what is mounted cannot be listed.
    pub fn run(&mut self, allow: &Allow, deadline: Option<Instant>) -> Result<bool> {
        let purposes = std::mem::take(&mut self.purposes);
        purposes.iter().for_each(|purpose| kernel::learn(purpose));
        let has_unfound = std::mem::take(&mut self.has_unfound);
        if has_unfound {
            self.watched.walk(allow, deadline)?;
        }
        Ok(has_unfound || !purposes.is_empty())
    }
}

fn later(pid: i32, what: &str) -> crate::Error {
    let passing = Error::Passing {
        pid,
        what: what.to_owned(),
        allow: None,
        early: true,
        by_tree: false,
    };
    passing.into()
}
