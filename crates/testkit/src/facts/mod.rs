//! What can be seen of a tree from outside: all that must be the same after a dump that leaves
//! it running, and after a restore.
//!
//! Facts are lines by name, and hashes of pages by address. What differs without meaning is
//! normalised on the way in: inode numbers of pipes, sockets and unnamed files become numbers in
//! order of appearance, so that who shares what stays comparable; neighbouring mappings that only
//! history separates count as one; pages that hold nothing but zeros count as absent; the part of
//! a thread's rseq area that the kernel writes is left out; and so are the clobbered registers of
//! a call that waits.
mod descriptor;
mod mapping;
mod task;
mod thread;

use std::collections::{BTreeMap, HashMap};

use crate::tree;

/// How many differing lines [`Facts::diff`] spells out, and how many pages.
const MOST_LINES: usize = 40;

/// The facts about a tree at one moment.
#[derive(Clone, Debug, Default)]
pub struct Facts {
    lines: BTreeMap<String, String>,
    pages: BTreeMap<(u32, u64), Page>,
    classes: HashMap<String, usize>,
    rseq_areas: Vec<(u32, u64)>,
}

/// What a page of memory holds; pages of zeros are not listed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Page {
    /// Contents with this hash.
    Data(u64),
    /// Cannot be read: a guard region, or behind the end of a file.
    Unreadable,
}

/// How much is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Depth {
    Still,
    Moving,
}

impl Facts {
    /// Looks at everything, memory and registers included, of the tree of `root`: for a tree
    /// that waits and changes nothing meanwhile. Threads are stopped by ptrace one at a time.
    pub fn still(root: u32) -> Self {
        Self::take(root, Depth::Still)
    }

    /// Looks at what a running tree does not change by running: no memory, registers, file
    /// positions or pending signals.
    pub fn moving(root: u32) -> Self {
        Self::take(root, Depth::Moving)
    }

    fn take(root: u32, depth: Depth) -> Self {
        let mut facts = Self::default();
        let pids = tree::members(root);
        facts.note("tree", "pids", format!("{pids:?}"));
        for &pid in &pids {
            let is_root = pid == root;
            task::look(&mut facts, pid, is_root, depth);
            if !tree::is_alive(pid) {
                continue;
            }
            for tid in tree::threads(pid) {
                thread::look(&mut facts, pid, tid, depth);
            }
            descriptor::look(&mut facts, pid, depth);
            mapping::look(&mut facts, pid, depth);
        }
        descriptor::look_for_sharing(&mut facts, &pids);
        facts
    }

    /// Says in what `other` differs from these facts, a line each, at most 40 of lines and of
    /// pages; nothing when they are the same.
    pub fn diff(&self, other: &Self) -> Vec<String> {
        let mut found = diff_maps(
            &self.lines,
            &other.lines,
            |name| name.clone(),
            |line| line.clone(),
        );
        found.extend(diff_maps(
            &self.pages,
            &other.pages,
            |(pid, address)| format!("{pid} page {address:#x}"),
            |page| format!("{page:x?}"),
        ));
        found
    }

    /// Forgets every line whose name contains one of `parts`, and with `"page"` the pages: for
    /// what a test knows to differ, such as in what a peer does not save.
    pub fn without(mut self, parts: &[&str]) -> Self {
        self.lines
            .retain(|name, _| !parts.iter().any(|part| name.contains(part)));
        if parts.contains(&"page") {
            self.pages.clear();
        }
        self
    }

    /// Leaves out what criu is known not to bring back, so that the rest can be compared when it
    /// stands in: it maps shared anonymous memory from a memfd, forgets O_DIRECTORY and
    /// MADV_WIPEONFORK, takes the controlling terminal from all but the session's leader, and lets
    /// the parent of a stopped child see the stop again.
    pub fn as_peer_restores(mut self) -> Self {
        self.lines.retain(|name, _| {
            let (_, fact) = name.split_once(' ').unwrap_or_default();
            !["exit_code", "tty_nr", "tpgid"].contains(&fact)
        });
        for line in self.lines.values_mut() {
            *line = line
                .replace("/memfd:/dev/zero", "/dev/zero")
                .replace(" wf]", "]")
                .replace("flags:0200000", "flags:00");
        }
        self
    }

    /// The line called `name`, as in "123 status SigBlk".
    pub fn line(&self, name: &str) -> Option<&str> {
        self.lines.get(name).map(String::as_str)
    }

    /// All lines whose name contains `part`.
    pub fn lines(&self, part: &str) -> impl Iterator<Item = (&str, &str)> {
        self.lines
            .iter()
            .filter(move |(name, _)| name.contains(part))
            .map(|(name, line)| (name.as_str(), line.as_str()))
    }

    /// How many pages that hold something were seen.
    pub fn page_count(&self) -> usize {
        self.pages.len()
    }

    fn note(&mut self, whose: impl std::fmt::Display, name: &str, line: impl Into<String>) {
        self.lines.insert(format!("{whose} {name}"), line.into());
    }

    /// Blanks what the kernel writes into rseq areas within the page at `address`: the
    /// processor, node and concurrency numbers.
    fn blank_kernel_words(&self, pid: u32, address: u64, page: &mut [u8]) {
        let written = [0..8, 20..28];
        for &(owner, area) in &self.rseq_areas {
            for offset in written.iter().cloned().flatten() {
                let at = (area + offset).checked_sub(address);
                let byte = at.and_then(|at| page.get_mut(usize::try_from(at).ok()?));
                if let (true, Some(byte)) = (owner == pid, byte) {
                    *byte = 0;
                }
            }
        }
    }

    /// Numbers kernel objects in order of appearance.
    fn class(&mut self, object: &str) -> usize {
        let next = self.classes.len();
        *self.classes.entry(object.to_owned()).or_insert(next)
    }
}

fn diff_maps<K: Ord, V: PartialEq>(
    before: &BTreeMap<K, V>,
    after: &BTreeMap<K, V>,
    name: impl Fn(&K) -> String,
    show: impl Fn(&V) -> String,
) -> Vec<String> {
    let mut found = Vec::new();
    for (key, was) in before {
        match after.get(key) {
            Some(is) if is == was => {}
            Some(is) => found.push(format!("{}: {} -> {}", name(key), show(was), show(is))),
            None => found.push(format!("{}: {} -> gone", name(key), show(was))),
        }
    }
    for (key, is) in after {
        if !before.contains_key(key) {
            found.push(format!("{}: new: {}", name(key), show(is)));
        }
    }
    if found.len() > MOST_LINES {
        let more = found.len() - MOST_LINES;
        found.truncate(MOST_LINES);
        found.push(format!("and {more} more"));
    }
    found
}

/// A path without the number by which a file that never had a name is called: the kernel's choice.
fn without_number(path: &str) -> String {
    let named = path
        .strip_suffix(" (deleted)")
        .and_then(|path| path.rsplit_once("/#"));
    match named {
        Some((folder, number)) if number.bytes().all(|byte| byte.is_ascii_digit()) => {
            format!("{folder}/# (deleted)")
        }
        _ => path.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::Program;

    #[test]
    fn a_waiting_program_does_not_change() {
        crate::needs_root!();
        // For ever is a pause(2), into which the kernel writes no time left.
        let spawned = Program::new("sleep").arg("infinity").spawn();
        crate::wait::wait_until("sleep to sleep", crate::wait::SOON, || {
            tree::is_waiting(spawned.pid())
        });
        let first = Facts::still(spawned.pid());
        let second = Facts::still(spawned.pid());
        assert_eq!(first.diff(&second), Vec::<String>::new());
        assert!(first.page_count() > 10, "{} pages", first.page_count());
        let comm = format!("{0} thread {0} comm", spawned.pid());
        assert_eq!(first.line(&comm), Some("sleep"));
    }

    #[test]
    fn a_difference_is_named() {
        crate::needs_root!();
        let spawned = Program::new("sleep").arg("1000").spawn();
        let first = Facts::moving(spawned.pid());
        let path = format!("/proc/{}/oom_score_adj", spawned.pid());
        std::fs::write(path, "77").unwrap();
        let differences = first.diff(&Facts::moving(spawned.pid()));
        let expected = format!("{} oom_score_adj: 0 -> 77", spawned.pid());
        assert_eq!(differences, [expected]);
    }
}
