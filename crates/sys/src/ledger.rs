//! Closed lists of what the kernel shows of a task: each entry with its fate, so that whoever reads
//! the kernel's text or numbers refuses by name what stands in no list.

/// The fate of a state at a dump and a restore.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It comes back.
    Kept,
    /// A dump refuses it by name where it is in use.
    Refused,
    /// It has no state of its own: a count of the past, an action, or another entry's state.
    Stateless,
    /// It is forgotten, as the kernel tells it to nobody: docs/limits.md says so.
    Lost,
}

/// One thing that the kernel shows: a line, a letter, a number, a bit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// As the kernel or its headers call it.
    pub name: &'static str,
    /// Its number, where it has one.
    pub number: Option<u64>,
    /// Its fate at a dump and a restore.
    pub fate: Fate,
    /// Why, or by what.
    pub why: &'static str,
}

impl Entry {
    const fn new(name: &'static str, fate: Fate, why: &'static str) -> Self {
        Self {
            name,
            number: None,
            fate,
            why,
        }
    }

    /// Gives it its number.
    #[must_use]
    pub const fn at(mut self, number: u64) -> Self {
        self.number = Some(number);
        self
    }
}

/// An entry that comes back.
#[must_use]
pub const fn kept(name: &'static str, why: &'static str) -> Entry {
    Entry::new(name, Fate::Kept, why)
}

/// An entry that is refused where it is in use.
#[must_use]
pub const fn refused(name: &'static str, why: &'static str) -> Entry {
    Entry::new(name, Fate::Refused, why)
}

/// An entry without a state of its own.
#[must_use]
pub const fn stateless(name: &'static str, why: &'static str) -> Entry {
    Entry::new(name, Fate::Stateless, why)
}

/// An entry that the kernel tells nobody, and that is forgotten.
#[must_use]
pub const fn lost(name: &'static str, why: &'static str) -> Entry {
    Entry::new(name, Fate::Lost, why)
}

/// A closed list.
#[derive(Clone, Copy, Debug)]
pub struct List {
    /// The subject of the list.
    pub title: &'static str,
    /// Where the kernel shows it, or which header has the names.
    pub source: &'static str,
    /// All there is.
    pub entries: &'static [Entry],
}

impl List {
    /// The entry of this name.
    #[must_use]
    pub fn find(&self, name: &str) -> Option<&'static Entry> {
        self.entries.iter().find(|entry| entry.name == name)
    }

    /// The entry with this number.
    #[must_use]
    pub fn at(&self, number: u64) -> Option<&'static Entry> {
        let mut entries = self.entries.iter();
        entries.find(|entry| entry.number == Some(number))
    }

    /// All bits that its entries have as their numbers.
    #[must_use]
    pub const fn bits(&self) -> u64 {
        let mut bits = 0;
        let mut at = 0;
        while at < self.entries.len() {
            if let Some(number) = self.entries[at].number {
                bits |= number;
            }
            at += 1;
        }
        bits
    }
}

/// The lines of /proc/PID/status, sorted by name.
#[rustfmt::skip]
pub static STATUS: List = List {
    title: "lines of /proc/PID/status",
    source: "proc_pid_status(5)",
    entries: &[
        kept("CapAmb", "capabilities"),
        kept("CapBnd", "capabilities"),
        kept("CapEff", "capabilities"),
        kept("CapInh", "capabilities"),
        kept("CapPrm", "capabilities"),
        stateless("CoreDumping", "a task that is being dumped by the kernel cannot be stopped"),
        kept("Cpus_allowed", "affinity"),
        stateless("Cpus_allowed_list", "Cpus_allowed in other words"),
        stateless("FDSize", "room in the descriptor table, which grows by itself"),
        kept("Gid", "real, effective, saved and file system group"),
        kept("Groups", "supplementary groups"),
        stateless("HugetlbPages", "counts what is mapped"),
        refused("Kthread", "a kernel thread is refused by name"),
        stateless("Mems_allowed", "follows from the control group (cpuset) and the host's nodes"),
        stateless("Mems_allowed_list", "Mems_allowed in other words"),
        stateless("NSpgid", "numbers of a task whose namespaces are known"),
        stateless("NSpid", "numbers of a task whose namespaces are known"),
        stateless("NSsid", "numbers of a task whose namespaces are known"),
        stateless("NStgid", "numbers of a task whose namespaces are known"),
        kept("Name", "comm"),
        stateless("Ngid", "a group of NUMA balancing, which forms by itself"),
        kept("NoNewPrivs", "no_new_privs"),
        kept("PPid", "the tree"),
        kept("Pid", "the tree"),
        stateless("RssAnon", "counts what is mapped"),
        stateless("RssFile", "counts what is mapped"),
        stateless("RssShmem", "counts what is mapped"),
        kept("Seccomp", "seccomp filters"),
        kept("Seccomp_filters", "seccomp filters"),
        kept("ShdPnd", "pending signals"),
        kept("SigBlk", "the signal mask"),
        kept("SigCgt", "signal actions"),
        kept("SigIgn", "signal actions"),
        kept("SigPnd", "pending signals"),
        stateless("SigQ", "counts pending signals of the user"),
        kept("SpeculationIndirectBranch", "speculation controls"),
        kept("Speculation_Store_Bypass", "speculation controls"),
        kept("State", "stopped, ended or running"),
        kept("THP_enabled", "transparent huge pages disabled (prctl)"),
        kept("Tgid", "the tree"),
        kept("Threads", "the tree"),
        refused("TracerPid", "a traced task is refused by name"),
        kept("Uid", "real, effective, saved and file system user"),
        kept("Umask", "umask"),
        stateless("VmData", "counts what is mapped"),
        stateless("VmExe", "counts what is mapped"),
        stateless("VmHWM", "the most that was in memory: a count of the past"),
        kept("VmLck", "locks of mappings"),
        stateless("VmLib", "counts what is mapped"),
        stateless("VmPMD", "counts page tables (kernels before 4.15)"),
        stateless("VmPTE", "counts page tables"),
        stateless("VmPeak", "the most that was mapped: a count of the past"),
        stateless("VmPin", "pages that others hold: rings, which are looked at"),
        stateless("VmRSS", "counts what is mapped"),
        stateless("VmSize", "counts what is mapped"),
        stateless("VmStk", "counts what is mapped"),
        stateless("VmSwap", "counts what is swapped out"),
        stateless("nonvoluntary_ctxt_switches", "a count of the past"),
        refused("untag_mask", "linear address masking is refused by name"),
        stateless("voluntary_ctxt_switches", "a count of the past"),
        refused("x86_Thread_features", "a shadow stack is refused by name"),
        refused("x86_Thread_features_locked", "locked shadow-stack features are refused by name"),
    ],
};

/// The lines of /proc/PID/limits by number (getrlimit(2)).
#[rustfmt::skip]
pub static LIMITS: List = List {
    title: "lines of /proc/PID/limits",
    source: "asm-generic/resource.h",
    entries: &[
        kept("Max cpu time", "RLIMIT_CPU").at(0),
        kept("Max file size", "RLIMIT_FSIZE").at(1),
        kept("Max data size", "RLIMIT_DATA").at(2),
        kept("Max stack size", "RLIMIT_STACK").at(3),
        kept("Max core file size", "RLIMIT_CORE").at(4),
        kept("Max resident set", "RLIMIT_RSS").at(5),
        kept("Max processes", "RLIMIT_NPROC").at(6),
        kept("Max open files", "RLIMIT_NOFILE").at(7),
        kept("Max locked memory", "RLIMIT_MEMLOCK").at(8),
        kept("Max address space", "RLIMIT_AS").at(9),
        kept("Max file locks", "RLIMIT_LOCKS").at(10),
        kept("Max pending signals", "RLIMIT_SIGPENDING").at(11),
        kept("Max msgqueue size", "RLIMIT_MSGQUEUE").at(12),
        kept("Max nice priority", "RLIMIT_NICE").at(13),
        kept("Max realtime priority", "RLIMIT_RTPRIO").at(14),
        kept("Max realtime timeout", "RLIMIT_RTTIME").at(15),
    ],
};

/// True if /proc/PID/status may have a line of this name.
#[must_use]
pub(crate) fn is_line_of_status(name: &[u8]) -> bool {
    let by_name = |entry: &Entry| entry.name.as_bytes().cmp(name);
    STATUS.entries.binary_search_by(by_name).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_status_are_sorted_and_complete() {
        let sorted = STATUS
            .entries
            .is_sorted_by(|one, next| one.name < next.name);
        assert!(sorted, "they are looked up by halves");
        for path in [
            "/proc/self/status",
            "/proc/thread-self/status",
            "/proc/1/status",
        ] {
            let text = std::fs::read_to_string(path).expect("status");
            for line in text.lines() {
                let name = line.split(':').next().expect("a name");
                assert!(is_line_of_status(name.as_bytes()), "{path}: {name}");
            }
        }
        assert!(!is_line_of_status(b"Colour") && !is_line_of_status(b""));
    }

    #[test]
    fn bits_are_those_of_all_entries() {
        static LIST: List = List {
            title: "",
            source: "",
            entries: &[
                kept("A", "").at(1),
                refused("B", "").at(8),
                stateless("C", ""),
            ],
        };
        assert_eq!(LIST.bits(), 9);
        assert_eq!(LIST.at(8).map(|entry| entry.name), Some("B"));
        assert_eq!(
            LIST.find("C").map(|entry| entry.fate),
            Some(Fate::Stateless)
        );
    }
}
