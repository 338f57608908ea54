//! The lists against the kernel's headers and the running kernel: what they do not have fails.

use std::collections::BTreeSet;
use std::fs;

use syscalls::Sysno;

use super::*;
use crate::testing::Stage;

/// Headers of the build machine (linux-libc-dev); a name, what its value is, and where it stands.
fn defined(headers: &[&str], wanted: impl Fn(&str) -> bool) -> Vec<(String, String)> {
    let mut all = Vec::new();
    for header in headers {
        let places = ["/usr/include", "/usr/include/x86_64-linux-gnu"];
        let mut texts = places.iter().filter_map(|place| {
            let text = fs::read_to_string(format!("{place}/{header}"));
            text.ok()
        });
        let Some(text) = texts.next() else { continue };
        for line in text.lines() {
            let line = line.trim_start();
            let Some(rest) = line.strip_prefix('#') else {
                continue;
            };
            let mut words = rest.split_whitespace();
            if words.next() != Some("define") {
                continue;
            }
            let Some(name) = words.next().filter(|name| wanted(name)) else {
                continue;
            };
            let value = words.take_while(|word| !word.starts_with("/*"));
            all.push((name.to_owned(), value.collect::<Vec<_>>().join(" ")));
        }
    }
    all
}

/// A value as headers write it, where it is a plain number.
fn number(value: &str) -> Option<u64> {
    let value = value
        .trim_start_matches("(__poll_t)")
        .trim_end_matches("ULL");
    match value {
        _ if value.starts_with("(F_LINUX_SPECIFIC_BASE") => {
            let added = value.rsplit('+').next()?.trim_matches([' ', ')']);
            Some(1024 + added.parse::<u64>().ok()?)
        }
        _ if value.starts_with("0x") => u64::from_str_radix(&value[2..], 16).ok(),
        _ if value.starts_with('0') && value.len() > 1 => u64::from_str_radix(value, 8).ok(),
        _ => value.parse().ok(),
    }
}

/// All that headers define, but for `others`, which are no entries of the list.
#[track_caller]
fn walk(list: &List, headers: &[&str], prefix: &str, others: &[&str]) {
    let is_other = |name: &str| others.iter().any(|other| name.starts_with(other));
    let defined = defined(headers, |name| name.starts_with(prefix) && !is_other(name));
    if defined.is_empty() {
        testkit::skip!("no headers of the kernel here ({headers:?})");
    }
    for (name, value) in defined {
        let entry = list.find(&name);
        let entry = entry.unwrap_or_else(|| panic!("{}: {name} stands in no list", list.title));
        if let Some(value) = number(&value) {
            assert_eq!(entry.number, Some(value), "{name}");
        }
    }
}

#[test]
fn names_of_each_list_are_used_once_and_lines_are_short() {
    for list in LISTS {
        let names = list.entries.iter().map(|entry| entry.name);
        let unique = names.clone().collect::<BTreeSet<_>>();
        assert_eq!(unique.len(), list.entries.len(), "{}", list.title);
        assert!(names.clone().all(|name| !name.is_empty()), "{}", list.title);
        let told = |entry: &&Entry| entry.fate == Fate::Kept || !entry.why.is_empty();
        assert!(
            list.entries.iter().all(|entry| told(&entry)),
            "{}",
            list.title
        );
    }
}

#[test]
fn numbers_of_prctl_are_known() {
    let values = [
        "PR_CAP_AMBIENT_",
        "PR_ENDIAN_",
        "PR_FPEMU_",
        "PR_FP_EXC_",
        "PR_FP_MODE_",
        "PR_MCE_KILL_C",
        "PR_MCE_KILL_S",
        "PR_MCE_KILL_L",
        "PR_MCE_KILL_E",
        "PR_MCE_KILL_D",
        "PR_MTE_",
        "PR_PAC_AP",
        "PR_SCHED_CORE_",
        "PR_SET_MM_",
        "PR_SET_PTRACER_",
        "PR_SME_VL_",
        "PR_SME_SET_VL_ONEXEC",
        "PR_SPEC_",
        "PR_SVE_VL_",
        "PR_SVE_SET_VL_ONEXEC",
        "PR_SYS_DISPATCH_",
        "PR_TAGGED_ADDR_E",
        "PR_TIMING_",
        "PR_TSC_",
        "PR_UNALIGN_",
        "PR_SET_VMA_",
        "PR_MDWE_",
        "PR_RISCV_V_VSTATE",
        "PR_RISCV_CTX",
        "PR_RISCV_SCOPE",
        "PR_PPC_DEXCR",
        "PR_SHADOW_STACK_",
        "PR_FUTEX_HASH_",
        "PR_TIMER_CREATE_RESTORE_IDS_",
        "PR_PMLEN",
        "PR_THP_DISABLE_",
        "PR_RSEQ_SLICE_EXT_",
        "PR_RSEQ_SLICE_EXTENSION_",
    ];
    walk(&calls::PRCTL, &["linux/prctl.h"], "PR_", &values);
}

#[test]
fn numbers_of_fcntl_are_known() {
    let values = [
        "F_OWNER_",
        "F_RDLCK",
        "F_WRLCK",
        "F_UNLCK",
        "F_EXLCK",
        "F_SHLCK",
        "F_SEAL_",
        "F_LINUX_SPECIFIC_BASE",
    ];
    walk(
        &calls::FCNTL,
        &["asm-generic/fcntl.h", "linux/fcntl.h"],
        "F_",
        &values,
    );
}

#[test]
fn flags_of_descriptions_are_known() {
    let others = ["O_SYNC", "O_TMPFILE", "O_NDELAY"];
    walk(&fdinfo::OPEN_FLAGS, &["asm-generic/fcntl.h"], "O_", &others);
    walk(&fdinfo::OPEN_FLAGS, &["asm-generic/fcntl.h"], "__O_", &[]);
    let others = ["EPOLL_CLOEXEC", "EPOLL_CTL_", "EPOLL_PACKED", "EPOLL_IOC"];
    walk(
        &fdinfo::EPOLL_EVENTS,
        &["linux/eventpoll.h"],
        "EPOLL",
        &others,
    );
    walk(
        &fdinfo::TIMER_FLAGS,
        &["linux/timerfd.h"],
        "TFD_TIMER_",
        &[],
    );
    let others = [
        "IN_CLOSE",
        "IN_MOVE",
        "IN_ALL_EVENTS",
        "IN_CLOEXEC",
        "IN_NONBLOCK",
    ];
    walk(&fdinfo::WATCH_FLAGS, &["linux/inotify.h"], "IN_", &others);
}

#[test]
fn requests_of_terminals_are_known() {
    let headers = ["asm-generic/ioctls.h"];
    walk(&calls::IOCTL, &headers, "TC", &[]);
    walk(&calls::IOCTL, &headers, "TIO", &["TIOCPKT_", "TIOCSER_"]);
    walk(&calls::IOCTL, &headers, "FIO", &[]);
}

#[test]
fn flags_of_groups_are_known() {
    let others = [
        "FAN_CLOSE",
        "FAN_ALL_",
        "FAN_ACCESS",
        "FAN_MODIFY",
        "FAN_ATTRIB",
        "FAN_OPEN",
        "FAN_MOVE",
        "FAN_CREATE",
        "FAN_DELETE",
        "FAN_Q_OVERFLOW",
        "FAN_FS_ERROR",
        "FAN_EVENT_",
        "FAN_RENAME",
        "FAN_ONDIR",
        "FAN_MARK_",
        "FAN_REPORT_DFID_NAME",
        "FAN_ALLOW",
        "FAN_DENY",
        "FAN_AUDIT",
        "FAN_NOFD",
        "FAN_NOPIDFD",
        "FAN_EPIDFD",
        "FAN_PRE_ACCESS",
        "FAN_MNT_",
        "FAN_RESPONSE_",
        "FAN_ERRNO",
        "FAN_REPORT_MNT",
    ];
    walk(&fdinfo::GROUP_FLAGS, &["linux/fanotify.h"], "FAN_", &others);
}

#[test]
fn flags_of_mappings_and_advice_are_known() {
    let generic = [
        "asm-generic/mman-common.h",
        "asm-generic/mman.h",
        "linux/mman.h",
    ];
    walk(&memory::MAP_FLAGS, &generic, "MAP_", &["MAP_HUGE_"]);
    walk(&memory::MAP_FLAGS, &["asm/mman.h"], "MAP_", &[]);
    walk(&memory::ADVICE, &generic, "MADV_", &[]);
}

#[test]
fn flags_of_clone_and_requests_of_ptrace_are_known() {
    walk(
        &calls::CLONE,
        &["linux/sched.h"],
        "CLONE_",
        &["CLONE_ARGS_SIZE_"],
    );
    let values = [
        "PTRACE_O_",
        "PTRACE_EVENT",
        "PTRACE_SYSCALL_INFO_",
        "PTRACE_PEEKSIGINFO_",
    ];
    let headers = ["linux/ptrace.h", "asm/ptrace-abi.h"];
    walk(&calls::PTRACE, &headers, "PTRACE_", &values);
}

#[test]
fn capabilities_and_securebits_are_known() {
    let others = ["CAP_LAST_CAP", "CAP_TO_"];
    walk(
        &process::CAPABILITIES,
        &["linux/capability.h"],
        "CAP_",
        &others,
    );
    walk(
        &process::SECURE_BITS,
        &["linux/securebits.h"],
        "SECURE_",
        &["SECURE_ALL"],
    );
    let last = fs::read_to_string("/proc/sys/kernel/cap_last_cap").expect("a number");
    let last = last.trim().parse::<u64>().expect("a number");
    for number in 0..=last {
        assert!(
            process::CAPABILITIES.at(number).is_some(),
            "capability {number}"
        );
    }
}

#[test]
fn limits_are_those_of_the_header() {
    let headers = ["asm-generic/resource.h"];
    let defined = defined(&headers, |name| name.starts_with("RLIMIT_"));
    if defined.is_empty() {
        testkit::skip!("no headers of the kernel here ({headers:?})");
    }
    for (name, value) in defined {
        let Some(number) = number(&value) else {
            continue;
        };
        let entry = sys::ledger::LIMITS.at(number).map(|entry| entry.why);
        assert_eq!(entry, Some(name.as_str()));
    }
}

#[test]
fn files_of_own_process_are_known() {
    for folder in ["/proc/self", "/proc/thread-self", "/proc/1"] {
        for entry in fs::read_dir(folder).expect("a folder") {
            let name = entry.expect("an entry").file_name();
            let name = name.to_str().expect("text");
            assert!(
                process::FILES.find(name).is_some(),
                "{folder}/{name} stands in no list"
            );
        }
    }
}

/// Insists that every number to which the kernel answers by `call` is known: those that are not
/// are refused by `EINVAL`.
#[track_caller]
fn answers(list: &List, numbers: impl Iterator<Item = u64>, mut call: impl FnMut(u64) -> i64) {
    const EINVAL: i64 = -22;
    for number in numbers {
        let known = list.at(number).is_some();
        let answer = call(number);
        assert!(
            known || answer == EINVAL,
            "{}: {number}: {answer}",
            list.title
        );
    }
}

#[test]
fn numbers_to_which_the_kernel_answers_are_known() {
    let mut stage = Stage::new();
    let prctl = |number| stage.attempt(Sysno::prctl, &[number, 0, 0, 0, 0]);
    answers(&calls::PRCTL, 1..=255, prctl);
    let mut stage = Stage::new();
    let pipe = stage.data();
    stage.call(Sysno::pipe2, &[pipe, 0]);
    let reader = stage.word(0) & 0xffff_ffff;
    let fcntl = |number| stage.attempt(Sysno::fcntl, &[reader, number, 0]);
    answers(&calls::FCNTL, (0..=100).chain(1000..=1300), fcntl);
    let mut stage = Stage::new();
    let anonymous = [0, 4096, 3, 0x22, u64::MAX, 0];
    let at = stage.call(Sysno::mmap, &anonymous).cast_unsigned();
    // These break the machine's memory.
    let breaking = 100..=101;
    let numbers = (0..=255).filter(|number| !breaking.contains(number));
    let advise = |number| stage.attempt(Sysno::madvise, &[at, 4096, number]);
    answers(&memory::ADVICE, numbers, advise);
}
