//! What the running kernel and the caller's privileges allow, found out by trying it.
//!
//! A feature has a name and a probe; a family of them stands in a file of its own. Probes leave
//! nothing behind: what must change something does so in a child that ends. They are called by a
//! process of one thread (see [`crate::fork`]).

mod child;
mod files;
mod memory;
mod namespaces;
mod netlink;
mod privileges;
mod sockets;
mod tasks;

use std::io;

/// What a probe found: a remark, often empty, or the reason why the feature is missing.
pub type Outcome = Result<String, String>;

/// How much is lost without a feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Need {
    /// Nothing can be dumped and restored.
    Always,
    /// Targets that use it cannot, or it takes longer.
    Sometimes,
}

/// One thing that a kernel or a privilege may allow.
#[derive(Debug)]
pub struct Feature {
    /// Its name; criu(8)'s where criu has one.
    pub name: &'static str,
    /// What it is good for.
    pub what: &'static str,
    /// How much is lost without it.
    pub need: Need,
    probe: Probe,
}

#[derive(Debug)]
enum Probe {
    /// Called in this process, which it leaves as it was.
    Here(fn() -> Outcome),
    /// Called in a child, which ends afterwards.
    InChild(fn() -> Outcome),
    /// A capability of this process, by number.
    Capability(u32),
}

impl Feature {
    const fn here(
        name: &'static str,
        need: Need,
        what: &'static str,
        probe: fn() -> Outcome,
    ) -> Self {
        Self {
            name,
            what,
            need,
            probe: Probe::Here(probe),
        }
    }

    const fn in_child(
        name: &'static str,
        need: Need,
        what: &'static str,
        probe: fn() -> Outcome,
    ) -> Self {
        Self {
            name,
            what,
            need,
            probe: Probe::InChild(probe),
        }
    }

    const fn capability(name: &'static str, need: Need, what: &'static str, number: u32) -> Self {
        Self {
            name,
            what,
            need,
            probe: Probe::Capability(number),
        }
    }

    /// Tries the feature.
    pub fn probe(&self) -> Outcome {
        match self.probe {
            Probe::Here(probe) => probe(),
            Probe::InChild(probe) => child::run(probe),
            Probe::Capability(number) => privileges::effective(number),
        }
    }
}

/// Returns every feature, family by family.
pub fn all() -> impl Iterator<Item = &'static Feature> {
    let families = [
        memory::ALL,
        tasks::ALL,
        files::ALL,
        sockets::ALL,
        namespaces::ALL,
        privileges::ALL,
    ];
    families.into_iter().flatten()
}

/// Returns the feature of that name.
pub fn named(name: &str) -> Option<&'static Feature> {
    all().find(|feature| feature.name == name)
}

/// Returns what a call gave, or why it failed.
fn called(call: &str, result: libc::c_long) -> Result<libc::c_long, String> {
    if result < 0 {
        Err(why(call, &io::Error::last_os_error()))
    } else {
        Ok(result)
    }
}

/// Says why something failed.
fn why(call: &str, error: &io::Error) -> String {
    format!("{call}: {error}")
}

/// Says that a call succeeded, without a remark.
fn yes() -> Outcome {
    Ok(String::new())
}

/// Reads a file of /proc or /sys.
fn read(path: &str) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| why(path, &error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique() {
        let mut names: Vec<_> = all().map(|feature| feature.name).collect();
        let count = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), count);
    }

    #[test]
    fn a_missing_feature_says_why() {
        let missing = all().filter(|feature| matches!(feature.probe, Probe::Here(_)));
        for feature in missing {
            if let Err(why) = feature.probe() {
                assert!(
                    !why.is_empty(),
                    "{} is missing without a reason",
                    feature.name
                );
            }
        }
    }

    #[test]
    fn procfs_features_are_found() {
        // Kernels that Rust's standard library still supports have these.
        for name in ["mnt_id", "ns_pid", "memfd"] {
            assert_eq!(named(name).expect(name).probe(), yes(), "{name}");
        }
    }
}
