//! The machine that was measured on, in the words of its kernel.
use std::path::Path;

use serde::{Deserialize, Serialize};

/// What makes numbers from different machines incomparable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// The processor's name.
    pub processor: String,
    /// How many of its cores may be used.
    pub cores: usize,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// The kernel's release.
    pub kernel: String,
    /// The distribution.
    pub system: String,
    /// When transparent huge pages are used.
    pub huge_pages: String,
    /// The file system of images on disk.
    pub disk: String,
}

impl Machine {
    /// Describes this machine; `disk` is the folder that images on disk are put in.
    pub fn this(disk: &Path) -> Self {
        let unknown = || "unknown".to_string();
        let value = |path: &str, key: &str, separator: char| {
            let text = std::fs::read_to_string(path).unwrap_or_default();
            let value = text.lines().find_map(|line| {
                let (name, value) = line.split_once(separator)?;
                (name.trim() == key).then(|| value.trim().trim_matches('"').to_string())
            });
            value.unwrap_or_else(unknown)
        };
        let memory = value("/proc/meminfo", "MemTotal", ':');
        let memory_kib = memory
            .split(' ')
            .next()
            .and_then(|number| number.parse::<u64>().ok());
        let kernel =
            std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_else(|_| unknown());
        let huge = std::fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled");
        let huge = huge.unwrap_or_default();
        let huge = huge
            .split_once('[')
            .and_then(|(_, rest)| rest.split_once(']'));
        Self {
            processor: value("/proc/cpuinfo", "model name", ':'),
            cores: std::thread::available_parallelism().map_or(0, usize::from),
            memory_mib: memory_kib.unwrap_or(0) / 1024,
            kernel: kernel.trim().to_string(),
            system: value("/etc/os-release", "PRETTY_NAME", '='),
            huge_pages: huge.map_or_else(unknown, |(now, _)| now.to_string()),
            disk: file_system(disk).unwrap_or_else(unknown),
        }
    }

    /// The processor's name and the number of cores, as the name of a folder.
    pub fn short_name(&self) -> String {
        let name = self.processor.to_lowercase();
        let name = name.split('@').next().unwrap_or_default();
        let words = name.split(|letter: char| !letter.is_ascii_alphanumeric());
        let telling = |word: &&str| !["", "r", "tm", "cpu", "processor", "core"].contains(word);
        let words = words.filter(telling).take(3);
        words.collect::<Vec<_>>().join("-") + &format!("-{}", self.cores)
    }
}

/// Returns the type of the file system that a folder lies in; see `/proc/PID/mountinfo` in proc(5).
pub fn file_system(folder: &Path) -> Option<String> {
    let folder = folder.canonicalize().ok()?;
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let covering = mounts.lines().filter_map(|line| {
        let (place, rest) = line.split_once(" - ")?;
        let place = Path::new(place.split(' ').nth(4)?);
        let kind = rest.split(' ').next()?;
        folder
            .starts_with(place)
            .then(|| (place.components().count(), kind.to_string()))
    });
    // Of two mounts on one place the later one is seen.
    covering
        .max_by_key(|(depth, _)| *depth)
        .map(|(_, kind)| kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_have_short_names() {
        let mut machine = Machine::this(Path::new("/"));
        machine.cores = 2;
        for (processor, name) in [
            ("AMD EPYC", "amd-epyc-2"),
            ("Intel(R) Xeon(R) Processor @ 2.50GHz", "intel-xeon-2"),
            ("unknown", "unknown-2"),
        ] {
            machine.processor = processor.into();
            assert_eq!(machine.short_name(), name);
        }
    }

    #[test]
    fn this_machine_is_known() {
        let machine = Machine::this(Path::new("/"));
        assert!(machine.cores > 0 && machine.memory_mib > 0, "{machine:?}");
        assert_eq!(
            file_system(Path::new("/proc/self")).as_deref(),
            Some("proc")
        );
    }
}
