//! How a tree is collected.

use resources::Allow;
use resources::fd::tcp::newcomers::Newcomers;

use crate::homework::Homework;

/// How a tree is collected.
pub(crate) struct How<'a> {
    /// What it may have.
    pub allow: &'a Allow,
    /// Whether the blob stays in the tasks: they are going to be killed.
    pub stay: bool,
    /// Clients that ask it for connections meanwhile.
    pub newcomers: &'a mut Newcomers,
    /// What is found out while it runs.
    pub homework: &'a mut Homework,
}
