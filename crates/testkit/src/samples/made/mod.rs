//! Descriptors that are made in a state of which the lists say that it is kept.

mod descriptor;
mod events;
mod files;
mod kernel;
mod terminals;

pub use descriptor::Kind;

/// All kinds of descriptors.
pub fn made() -> impl Iterator<Item = &'static Kind> {
    let all = [
        files::FILES,
        events::EVENTS,
        terminals::TERMINALS,
        kernel::OF_KERNEL,
    ];
    all.into_iter().flatten()
}

/// The kind of that name.
#[must_use]
pub fn find(name: &str) -> Option<&'static Kind> {
    made().find(|made| made.name == name)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::io;
    use std::os::fd::AsFd;

    use super::*;

    /// What a kernel or a host may lack: leases of others' clocks, huge pages, flags of groups.
    const MAY_LACK: usize = 8;

    /// States that the kernel tells nobody: `FAN_ENABLE_AUDIT`, which means something to groups
    /// that are asked alone, and those are refused.
    const NOT_TOLD: [(&str, u64); 1] = [("fanotify", 0x40)];

    /// A state that is told as another one is could be taken for that after a restore.
    #[test]
    fn each_state_is_told_in_words_of_its_own() {
        crate::needs_root!();
        let folder = tempfile::tempdir().expect("a scratch folder");
        let (mut lacking, mut alike) = (Vec::new(), Vec::new());
        for made in made() {
            let mut told = BTreeMap::new();
            for value in made.values.all() {
                let path = folder.path().join(format!("{}-{value}", made.name));
                let Ok(ends) = (made.make)(&path, value) else {
                    lacking.push(format!("{} {value:#x}", made.name));
                    continue;
                };
                let words: Vec<_> = ends.iter().map(|end| (made.read)(end.as_fd())).collect();
                let words: io::Result<Vec<String>> = words.into_iter().collect();
                let words =
                    words.unwrap_or_else(|error| panic!("{} {value:#x}: {error}", made.name));
                if NOT_TOLD.contains(&(made.name, value)) {
                    continue;
                }
                if let Some(other) = told.insert(words.clone(), value) {
                    let name = made.name;
                    alike.push(format!("{name}: {value:#x} and {other:#x} are {words:?}"));
                }
            }
            assert!(!told.is_empty(), "{} cannot be made", made.name);
        }
        assert!(alike.is_empty(), "{alike:#?}");
        assert!(lacking.len() <= MAY_LACK, "{lacking:?}");
    }
}
