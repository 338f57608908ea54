//! Capabilities of this process.
use super::Need::{Always, Sometimes};
use super::{Feature, Outcome, read, yes};

pub(super) static ALL: &[Feature] = &[
    Feature::capability(
        "cap_sys_ptrace",
        Always,
        "stop and read tasks of others",
        19,
    ),
    Feature::capability(
        "cap_checkpoint_restore",
        Sometimes,
        "choose pids, follow map_files",
        40,
    ),
    Feature::capability(
        "cap_sys_admin",
        Sometimes,
        "namespaces, mounts, seccomp",
        21,
    ),
    Feature::capability(
        "cap_sys_resource",
        Sometimes,
        "raise limits, keep reserved settings",
        24,
    ),
    Feature::capability(
        "cap_net_admin",
        Sometimes,
        "TCP connections, socket options",
        12,
    ),
    Feature::capability("cap_setuid", Sometimes, "tasks of other users", 7),
    Feature::capability("cap_setgid", Sometimes, "tasks of other groups", 6),
    Feature::capability("cap_setpcap", Sometimes, "bounding sets and securebits", 8),
    Feature::capability("cap_dac_override", Sometimes, "files of other users", 1),
    Feature::capability("cap_kill", Sometimes, "signals to tasks of other users", 5),
    Feature::capability("cap_sys_chroot", Sometimes, "tasks with another root", 18),
    Feature::capability(
        "cap_sys_nice",
        Sometimes,
        "scheduling of real-time tasks",
        23,
    ),
    Feature::capability("cap_ipc_lock", Sometimes, "locked memory", 14),
    Feature::capability("cap_linux_immutable", Sometimes, "append-only files", 9),
];

/// Tells whether this process has capability `number` in its effective set.
pub(super) fn effective(number: u32) -> Outcome {
    let status = read("/proc/self/status")?;
    let set = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .map(str::trim);
    let set = set.and_then(|set| u64::from_str_radix(set, 16).ok());
    let set = set.ok_or("/proc/self/status has no CapEff")?;
    if set >> number & 1 == 1 {
        yes()
    } else {
        Err("not in the effective set".to_owned())
    }
}
