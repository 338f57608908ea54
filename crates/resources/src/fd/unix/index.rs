//! Answers of the kernel about all unix sockets of a tree at once.

use std::cell::OnceCell;
use std::collections::HashMap;

use super::super::DumpContext;
use super::super::socket::diag::{self, Facts};
use super::{DGRAM, name_of, sockets};
use crate::Result;

/// From so many sockets on, one question about all of the host takes less time than one a socket:
/// the kernel looks through all of the host for each of these.
const MANY: usize = 32;

/// What was asked about unix sockets.
#[derive(Default)]
pub struct Index {
    /// By inode number; none where the tree has few, or the kernel does not list them.
    facts: OnceCell<Option<HashMap<u32, Facts>>>,
    /// How many stream sockets of the tree have a name.
    named: OnceCell<HashMap<Vec<u8>, usize>>,
}

/// What the kernel tells about the unix socket with this inode number.
///
/// # Errors
/// Those of [`diag::unix`].
pub(super) fn facts(inode: u32, cx: &dyn DumpContext) -> Result<Facts> {
    let listed = cx.all().unix.facts.get_or_init(|| {
        let are_many = sockets(cx).nth(MANY - 1).is_some();
        are_many.then(|| diag::all_unix().ok()).flatten()
    });
    match listed.as_ref().and_then(|listed| listed.get(&inode)) {
        Some(facts) => Ok(facts.clone()),
        None => diag::unix(inode),
    }
}

/// How many stream sockets of the tree have this name.
pub(super) fn named(name: &[u8], cx: &dyn DumpContext) -> usize {
    let named = cx.all().unix.named.get_or_init(|| {
        let mut named = HashMap::<_, usize>::new();
        for (open, _) in sockets(cx).filter(|(_, nature)| nature.kind != DGRAM) {
            *named.entry(name_of(open).to_vec()).or_default() += 1;
        }
        named
    });
    named.get(name).copied().unwrap_or(0)
}
