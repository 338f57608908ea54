//! What is kept of a control group: the files by which it is limited.

use std::path::Path;

use super::Property;
use crate::{Error, Result};

/// The files that are kept, in the order in which they are set; a `*` stands for a word.
const KNOWN: &[&str] = &[
    // Version 2.
    "cgroup.type",
    "cgroup.max.depth",
    "cgroup.max.descendants",
    "cpuset.cpus",
    "cpuset.mems",
    "cpuset.cpus.exclusive",
    "cpuset.cpus.partition",
    "cpu.idle",
    "cpu.weight",
    "cpu.max",
    "cpu.max.burst",
    "cpu.uclamp.min",
    "cpu.uclamp.max",
    "memory.max",
    "memory.high",
    "memory.low",
    "memory.min",
    "memory.oom.group",
    "memory.swap.max",
    "memory.swap.high",
    "memory.zswap.max",
    "memory.zswap.writeback",
    "io.weight",
    "io.bfq.weight",
    "io.max",
    "io.latency",
    "pids.max",
    "hugetlb.*.max",
    "hugetlb.*.rsvd.max",
    "rdma.max",
    "misc.max",
    SUBTREE_CONTROL,
    // Version 1.
    "cgroup.clone_children",
    "notify_on_release",
    "cpuset.cpu_exclusive",
    "cpuset.mem_exclusive",
    "cpuset.mem_hardwall",
    "cpuset.memory_migrate",
    "cpuset.memory_spread_page",
    "cpuset.memory_spread_slab",
    "cpuset.sched_load_balance",
    "cpuset.sched_relax_domain_level",
    "cpu.shares",
    "cpu.cfs_period_us",
    "cpu.cfs_quota_us",
    "cpu.cfs_burst_us",
    "cpu.rt_period_us",
    "cpu.rt_runtime_us",
    "memory.use_hierarchy",
    "memory.limit_in_bytes",
    "memory.memsw.limit_in_bytes",
    "memory.kmem.tcp.limit_in_bytes",
    "memory.soft_limit_in_bytes",
    "memory.swappiness",
    "memory.move_charge_at_immigrate",
    OOM_CONTROL,
    DEVICES,
    "blkio.weight",
    "blkio.bfq.weight",
    "blkio.throttle.read_bps_device",
    "blkio.throttle.write_bps_device",
    "blkio.throttle.read_iops_device",
    "blkio.throttle.write_iops_device",
    "net_cls.classid",
    "net_prio.ifpriomap",
    "hugetlb.*.limit_in_bytes",
    "hugetlb.*.rsvd.limit_in_bytes",
];

/// Which controllers the groups below have.
pub(super) const SUBTREE_CONTROL: &str = "cgroup.subtree_control";
const OOM_CONTROL: &str = "memory.oom_control";
const DEVICES: &str = "devices.list";

/// The place of a file on the list.
fn place(name: &str) -> Option<usize> {
    let fits = |known: &&str| match known.split_once('*') {
        Some((head, tail)) => {
            let middle = name
                .strip_prefix(head)
                .and_then(|rest| rest.strip_suffix(tail));
            middle.is_some_and(|word| word.bytes().all(|byte| byte.is_ascii_alphanumeric()))
        }
        None => name == *known,
    };
    KNOWN.iter().position(fits)
}

/// Whether this is a file that is kept.
pub(super) fn is_known(name: &str) -> bool {
    place(name).is_some()
}

/// The properties of the group at `path`, whose folder is given. Of the topmost one, only which
/// controllers those below have is its own.
///
/// # Errors
/// [`Error::Kernel`].
pub(super) fn read(folder: &Path, path: &[u8]) -> Result<Vec<Property>> {
    let failed = |error| Error::kernel(format!("look at {}", folder.display()), error);
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(failed)? {
        let name = entry.map_err(failed)?.file_name();
        let name = name.to_str().unwrap_or_default();
        if let Some(place) = place(name).filter(|_| path != b"/" || name == SUBTREE_CONTROL) {
            names.push((place, name.to_owned()));
        }
    }
    names.sort_unstable();
    let mut properties = Vec::with_capacity(names.len());
    for (_, name) in names {
        // Some cannot be read where the controller has something against it.
        if let Ok(value) = std::fs::read(folder.join(&name)) {
            properties.push(Property { name, value });
        }
    }
    Ok(properties)
}

/// Gives a group a property that it does not have.
///
/// # Errors
/// The errno of the write, also where the file is missing.
pub(super) fn set(folder: &Path, property: &Property) -> std::io::Result<()> {
    let Property { name, value } = property;
    let file = folder.join(name);
    let now = std::fs::read(&file)?;
    if now == *value {
        return Ok(());
    }
    let write = |name: &str, text: &[u8]| std::fs::write(folder.join(name), text);
    let mut lines = value
        .split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty());
    match name.as_str() {
        // "domain threaded" is what a group becomes by those below it.
        "cgroup.type" if value.trim_ascii() != b"threaded" => Ok(()),
        SUBTREE_CONTROL => {
            let text = String::from_utf8_lossy(value);
            let now = String::from_utf8_lossy(&now);
            let has = |name: &&str| now.split_whitespace().any(|one| one == *name);
            let missing = text.split_whitespace().filter(|name| !has(name));
            let words = missing.map(|name| format!("+{name}")).collect::<Vec<_>>();
            match words.is_empty() {
                true => Ok(()),
                false => write(name, words.join(" ").as_bytes()),
            }
        }
        // The first of its lines says it.
        OOM_CONTROL => {
            let disabled = value.starts_with(b"oom_kill_disable 1");
            match now.starts_with(b"oom_kill_disable 1") == disabled {
                true => Ok(()),
                false => write(name, if disabled { b"1" } else { b"0" }),
            }
        }
        DEVICES => {
            write("devices.deny", b"a")?;
            lines.try_for_each(|line| write("devices.allow", line))
        }
        _ => lines.try_for_each(|line| write(name, line)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_on_the_list_once() {
        for (at, name) in KNOWN.iter().enumerate() {
            let name = name.replace('*', "2MB");
            assert_eq!(place(&name), Some(at), "{name}");
        }
        for name in [
            "cgroup.procs",
            "tasks",
            "hugetlb.2MB/../x.max",
            "memory.max/x",
            "",
        ] {
            assert!(!is_known(name), "{name}");
        }
    }

    #[test]
    fn values_are_written_as_the_kernel_wants_them() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let file = |name: &str| folder.path().join(name);
        let set = |name: &str, now: &str, value: &str| {
            std::fs::write(file(name), now).expect("it can be written");
            let property = Property {
                name: name.into(),
                value: value.into(),
            };
            super::set(folder.path(), &property).expect("it can be written");
            std::fs::read_to_string(file(name)).expect("it is there")
        };
        assert_eq!(set("pids.max", "max\n", "7\n"), "7");
        assert_eq!(set("pids.max", "7\n", "7\n"), "7\n");
        assert_eq!(
            set(SUBTREE_CONTROL, "cpu\n", "cpu io memory\n"),
            "+io +memory"
        );
        assert_eq!(
            set("cgroup.type", "domain\n", "domain threaded\n"),
            "domain\n"
        );
        assert_eq!(set("cgroup.type", "domain\n", "threaded\n"), "threaded");
        let (off, on) = (
            "oom_kill_disable 0\nunder_oom 0\n",
            "oom_kill_disable 1\nunder_oom 0\n",
        );
        assert_eq!(set(OOM_CONTROL, off, on), "1");
    }
}
