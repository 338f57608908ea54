//! Lists about memory: what smaps tells of a mapping, and what mmap(2) and madvise(2) take.

use sys::ledger::{Fate, List, kept, refused, stateless};

use crate::map::listing::Listed;

/// The letters of `VmFlags` in /proc/PID/smaps.
#[rustfmt::skip]
pub static VM_FLAGS: List = List {
    title: "letters of VmFlags",
    source: "proc_pid_smaps(5), fs/proc/task_mmu.c",
    entries: &[
        kept("rd", "protection"),
        kept("wr", "protection"),
        kept("ex", "protection"),
        kept("sh", "shared"),
        stateless("mr", "may be made readable: follows from the file's description"),
        stateless("mw", "may be made writable: follows from the file's description"),
        stateless("me", "may be made executable: follows from the file's mount"),
        stateless("ms", "may be shared: follows from the file's description"),
        kept("gd", "MAP_GROWSDOWN"),
        refused("pf", "memory of a device"),
        stateless("dw", "MAP_DENYWRITE of kernels before 5.15, without effect since 2.2"),
        kept("lo", "mlock(2)"),
        refused("io", "memory of a device"),
        kept("sr", "MADV_SEQUENTIAL"),
        kept("rr", "MADV_RANDOM"),
        kept("dc", "MADV_DONTFORK"),
        stateless("de", "cannot grow by mremap(2): set by the kernel on its own kinds"),
        kept("lf", "MLOCK_ONFAULT"),
        stateless("ac", "is accounted for: follows from protection, sharing and MAP_NORESERVE"),
        kept("nr", "MAP_NORESERVE"),
        kept("ht", "huge pages of hugetlbfs"),
        refused("sf", "MAP_SYNC: a file of persistent memory"),
        stateless("ar", "an architecture's own mark on memory of a device"),
        kept("wf", "MADV_WIPEONFORK"),
        kept("dd", "MADV_DONTDUMP"),
        stateless("sd", "soft-dirty bits are wanted: says which pages were written"),
        stateless("mm", "has pages of the kernel's own: rings, which are looked at"),
        kept("hg", "MADV_HUGEPAGE"),
        kept("nh", "MADV_NOHUGEPAGE"),
        kept("mg", "MADV_MERGEABLE, PR_SET_MEMORY_MERGE"),
        kept("um", "registered with a userfaultfd, which is looked for"),
        kept("uw", "registered with a userfaultfd, which is looked for"),
        kept("ui", "registered with a userfaultfd, which is looked for"),
        refused("ss", "a shadow stack"),
        kept("sl", "sealed by mseal(2)"),
        kept("dp", "MAP_DROPPABLE"),
        kept("gu", "may have guards, which are looked for in private memory; refused in shared"),
    ],
};

/// Why a mapping with letters that are not known, or that no restore could set, is refused.
#[must_use]
pub fn refusal(listed: &Listed) -> Option<String> {
    if listed.shared && listed.has(b"gu") {
        let why = "it may have guards (MADV_GUARD_INSTALL), which do not show in shared memory";
        return Some(why.to_owned());
    }
    listed.flags.iter().find_map(|code| {
        let name = String::from_utf8_lossy(code);
        match VM_FLAGS.find(&name) {
            // Kernels that have no letters for it tell MLOCK_ONFAULT so.
            None if code == b"??" && listed.has(b"lo") => None,
            None => Some(format!("its flag {name} (VmFlags) is not known")),
            Some(entry) if entry.fate == Fate::Refused => Some(format!("it is {}", entry.why)),
            Some(_) => None,
        }
    })
}

/// The flags of mmap(2); sizes of huge pages stand above bit 26.
#[rustfmt::skip]
pub static MAP_FLAGS: List = List {
    title: "flags of mmap(2)",
    source: "asm-generic/mman-common.h, asm-generic/mman.h, linux/mman.h, asm/mman.h",
    entries: &[
        kept("MAP_SHARED", "sh").at(0x1),
        kept("MAP_PRIVATE", "not sh").at(0x2),
        stateless("MAP_SHARED_VALIDATE", "MAP_SHARED that refuses unknown flags").at(0x3),
        kept("MAP_DROPPABLE", "dp").at(0x8),
        stateless("MAP_TYPE", "a mask").at(0xf),
        stateless("MAP_FIXED", "where").at(0x10),
        kept("MAP_ANONYMOUS", "a mapping without a file").at(0x20),
        stateless("MAP_32BIT", "where").at(0x40),
        stateless("MAP_ABOVE4G", "where").at(0x80),
        kept("MAP_GROWSDOWN", "gd").at(0x100),
        stateless("MAP_DENYWRITE", "without effect").at(0x800),
        stateless("MAP_EXECUTABLE", "without effect").at(0x1000),
        kept("MAP_LOCKED", "lo").at(0x2000),
        kept("MAP_NORESERVE", "nr").at(0x4000),
        stateless("MAP_POPULATE", "brings pages in, which are saved").at(0x8000),
        stateless("MAP_NONBLOCK", "how pages are brought in").at(0x10000),
        stateless("MAP_STACK", "nh since 6.7, which is kept").at(0x20000),
        kept("MAP_HUGETLB", "ht, and the size of its pages").at(0x40000),
        refused("MAP_SYNC", "sf").at(0x80000),
        stateless("MAP_FIXED_NOREPLACE", "where").at(0x10_0000),
        stateless("MAP_UNINITIALIZED", "of kernels without an MMU").at(0x400_0000),
        stateless("MAP_FILE", "without effect").at(0),
    ],
};

/// The advice of madvise(2).
#[rustfmt::skip]
pub static ADVICE: List = List {
    title: "advice of madvise(2)",
    source: "asm-generic/mman-common.h",
    entries: &[
        kept("MADV_NORMAL", "neither sr nor rr").at(0),
        kept("MADV_RANDOM", "rr").at(1),
        kept("MADV_SEQUENTIAL", "sr").at(2),
        stateless("MADV_WILLNEED", "an action: reads ahead").at(3),
        stateless("MADV_DONTNEED", "an action: what is gone is gone").at(4),
        stateless("MADV_FREE", "the page is kept, as if it was not given up yet").at(8),
        stateless("MADV_REMOVE", "an action: a hole in the file").at(9),
        kept("MADV_DONTFORK", "dc").at(10),
        kept("MADV_DOFORK", "not dc").at(11),
        kept("MADV_MERGEABLE", "mg").at(12),
        kept("MADV_UNMERGEABLE", "not mg").at(13),
        kept("MADV_HUGEPAGE", "hg").at(14),
        kept("MADV_NOHUGEPAGE", "nh").at(15),
        kept("MADV_DONTDUMP", "dd").at(16),
        kept("MADV_DODUMP", "not dd").at(17),
        kept("MADV_WIPEONFORK", "wf").at(18),
        kept("MADV_KEEPONFORK", "not wf").at(19),
        stateless("MADV_COLD", "how soon a page is reclaimed").at(20),
        stateless("MADV_PAGEOUT", "an action: pages out").at(21),
        stateless("MADV_POPULATE_READ", "an action: pages in").at(22),
        stateless("MADV_POPULATE_WRITE", "an action: pages in, which are saved").at(23),
        stateless("MADV_DONTNEED_LOCKED", "an action").at(24),
        stateless("MADV_COLLAPSE", "an action: how pages lie in memory").at(25),
        stateless("MADV_HWPOISON", "an action: breaks the machine's memory").at(100),
        stateless("MADV_SOFT_OFFLINE", "an action: moves pages away").at(101),
        kept("MADV_GUARD_INSTALL", "guards of private memory (docs/limits.md)").at(102),
        kept("MADV_GUARD_REMOVE", "guards of private memory").at(103),
    ],
};

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::listing::parse;

    fn refused(flags: &str) -> Option<String> {
        let text = format!("1000-3000 rw-p 00000000 00:00 0 \nVmFlags: {flags} \n");
        refusal(&parse(text.as_bytes()).expect("a list")[0])
    }

    #[test]
    fn unknown_letters_are_refused_by_name() {
        for fine in ["rd wr mr mw me ac sd", "rd wr lo ??", ""] {
            assert_eq!(refused(fine), None, "{fine}");
        }
        let told = |flags| refused(flags).expect("refused");
        assert_eq!(told("rd wr xy mr"), "its flag xy (VmFlags) is not known");
        assert_eq!(told("rd wr ??"), "its flag ?? (VmFlags) is not known");
        assert_eq!(told("rd sf"), "it is MAP_SYNC: a file of persistent memory");
    }

    #[test]
    fn guards_are_refused_in_shared_memory_alone() {
        assert_eq!(refused("rd wr gu"), None);
        let text = b"1000-3000 rw-s 00000000 00:00 0 \nVmFlags: rd wr sh gu \n";
        let told = refusal(&parse(text).expect("a list")[0]).expect("refused");
        assert!(told.contains("MADV_GUARD_INSTALL"), "{told}");
    }

    #[test]
    fn letters_of_all_own_mappings_are_known() {
        let text = std::fs::read("/proc/self/smaps").expect("smaps");
        for listed in parse(&text).expect("understood") {
            // Its description of its types is mapped where that is looked into.
            let of_kernel = [&b"[v"[..], b"/sys/kernel/"];
            let of_kernel = of_kernel.iter().any(|name| listed.name.starts_with(name));
            assert!(
                of_kernel || refusal(&listed).is_none(),
                "{}",
                listed.place()
            );
        }
    }
}
