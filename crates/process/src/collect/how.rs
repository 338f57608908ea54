//! How a tree is collected.

use resources::Allow;
use resources::fd::tcp::newcomers::Newcomers;

use crate::homework::Homework;
use crate::options::OwnNamespaces;

/// How a tree is collected.
pub(crate) struct How<'a> {
    /// The states that the tree may have.
    pub allow: &'a Allow,
    /// True if the blob stays in the tasks: the dump is going to kill them.
    pub stay: bool,
    /// The namespaces that the tree has of its own, in which this process is.
    pub namespaces: OwnNamespaces,
    /// Clients that ask the tree for connections meanwhile.
    pub newcomers: &'a mut Newcomers,
    /// Facts that the dump finds out while the tree runs.
    pub homework: &'a mut Homework,
}
