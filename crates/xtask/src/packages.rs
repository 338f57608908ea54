//! What is installed from Debian, each package with its reason.
use std::borrow::Cow;
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::Result;
use crate::repo;

/// A Debian package, the program of it that is used, and what for.
pub struct Package<'a> {
    /// Its name in Debian.
    pub name: &'a str,
    /// The program that is looked for: where it is there, nothing is installed.
    pub program: &'a str,
    /// Who uses it.
    pub reason: &'a str,
    /// The services that it would start.
    pub services: Cow<'a, [&'a str]>,
}

/// What the tests use.
pub const FOR_TESTS: &[Package<'_>] = &[
    Package {
        name: "redis-server",
        program: "redis-server",
        reason: "a real program that the tests dump and restore",
        services: Cow::Borrowed(&["redis-server.service"]),
    },
    Package {
        name: "redis-tools",
        program: "redis-cli",
        reason: "the client of redis-server",
        services: Cow::Borrowed(&[]),
    },
    Package {
        name: "nginx-light",
        program: "nginx",
        reason: "a real program that the tests dump and restore, with workers",
        services: Cow::Borrowed(&["nginx.service"]),
    },
    Package {
        name: "python3",
        program: "python3",
        reason: "a real program that the tests dump and restore, with threads",
        services: Cow::Borrowed(&[]),
    },
    Package {
        name: "tmux",
        program: "tmux",
        reason: "a real program that the tests dump with a client attached",
        services: Cow::Borrowed(&[]),
    },
    Package {
        name: "tor",
        program: "tor",
        reason: "a real program that the tests dump and restore, under a seccomp filter",
        services: Cow::Borrowed(&["tor.service", "tor@default.service"]),
    },
    Package {
        name: "fio",
        program: "fio",
        reason: "a real program that the tests dump and restore with io_uring and with libaio",
        services: Cow::Borrowed(&[]),
    },
    Package {
        name: "tcpdump",
        program: "tcpdump",
        reason: "a real program that the tests dump and restore with a packet socket and its ring",
        services: Cow::Borrowed(&[]),
    },
    Package {
        name: "socat",
        program: "socat",
        reason: "a real program that the tests dump and restore with a tun device",
        services: Cow::Borrowed(&[]),
    },
    Package {
        name: "bpftool",
        program: "bpftool",
        reason: "makes and pins a map that a program which the tests dump and restore counts in",
        services: Cow::Borrowed(&[]),
    },
    Package {
        name: "bpftrace",
        program: "bpftrace",
        reason: "a real program with programs of BPF, which the tests insist is refused by name",
        services: Cow::Borrowed(&[]),
    },
    Package {
        name: "linux-perf",
        program: "perf",
        reason: "a real program with performance events that the tests dump and restore",
        services: Cow::Borrowed(&[]),
    },
    Package {
        name: "iproute2",
        program: "ip",
        reason: "sets up interfaces of subjects, and tells what they are afterwards",
        services: Cow::Borrowed(&[]),
    },
    Package {
        name: "gcc-multilib",
        // Nothing of it is in a path: what programs of 32 bits begin with.
        program: "/usr/lib32/crt1.o",
        reason: "compiles programs of 32 bits, which the tests dump and restore",
        services: Cow::Borrowed(&[]),
    },
    Package {
        name: "strace",
        program: "strace",
        reason: "shows that a target that was left running is not traced, and its calls restart",
        services: Cow::Borrowed(&[]),
    },
    Package {
        name: "lz4",
        program: "lz4",
        reason: "unpacks the kernel whose vDSO the tests put into their subjects",
        services: Cow::Borrowed(&[]),
    },
    Package {
        name: "zstd",
        program: "zstd",
        reason: "unpacks the kernel whose vDSO the tests put into their subjects",
        services: Cow::Borrowed(&[]),
    },
    Package {
        name: "xz-utils",
        program: "xz",
        reason: "unpacks the modules of a kernel that the tests boot",
        services: Cow::Borrowed(&[]),
    },
    Package {
        name: "qemu-system-x86",
        program: "qemu-system-x86_64",
        reason: "boots other kernels, on which the tests run as well",
        services: Cow::Borrowed(&[]),
    },
    Package {
        name: "e2fsprogs",
        program: "mkfs.ext4",
        reason: "makes, damages and checks the file systems that tests read",
        services: Cow::Borrowed(&[]),
    },
    Package {
        name: "bindfs",
        program: "bindfs",
        reason: "serves a file system, which dumps must not wait for",
        services: Cow::Borrowed(&[]),
    },
    Package {
        name: "dump",
        program: "restore",
        reason: "reads what is exported for it, and dump(8) writes what is imported",
        services: Cow::Borrowed(&[]),
    },
];

/// What the demonstration uses.
pub const FOR_DEMO: &[Package<'_>] = &[Package {
    name: "redis-server",
    program: "redis-server",
    reason: "the program that is dumped and restored",
    services: Cow::Borrowed(&["redis-server.service"]),
}];

/// What the benchmarks use.
pub const FOR_BENCH: &[Package<'_>] = &[Package {
    name: "debootstrap",
    program: "debootstrap",
    reason: "unpacks the peer into a folder outside the repository",
    services: Cow::Borrowed(&[]),
}];

/// What the benchmark of volumes measures beside us.
pub const FOR_VOLUMES: &[Package<'_>] = &[
    Package {
        name: "dump",
        program: "dump",
        reason: "what reads ext4 fastest from below until now",
        services: Cow::Borrowed(&[]),
    },
    Package {
        name: "partclone",
        program: "partclone.ext4",
        reason: "saves the blocks in use of an unmounted file system",
        services: Cow::Borrowed(&[]),
    },
    Package {
        name: "restic",
        program: "restic",
        reason: "saves files, and stores equal pieces once",
        services: Cow::Borrowed(&[]),
    },
];

/// Where a package's script asks whether it may start its service.
const POLICY: &str = "/usr/sbin/policy-rc.d";

/// Installs those packages whose program is missing, without starting their services.
///
/// Without root it says what is missing and goes on: tests that need it skip themselves.
///
/// # Errors
/// When apt-get fails.
pub fn install(packages: &[Package<'_>]) -> Result<()> {
    let missing: Vec<_> = packages
        .iter()
        .filter(|package| !is_there(package.program))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    for Package { name, reason, .. } in &missing {
        eprintln!("missing: Debian package {name}: {reason}");
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("not root: they are not installed, and what needs them is left out");
        return Ok(());
    }
    eprintln!("installing them with apt-get; their services are neither started nor enabled");
    let _policy = StartPolicy::new()?;
    repo::run(apt_get().arg("update"))?;
    let names = missing.iter().map(|package| package.name);
    repo::run(
        apt_get()
            .args(["install", "--yes", "--no-install-recommends"])
            .args(names),
    )?;
    for service in missing.iter().flat_map(|package| package.services.iter()) {
        disable(service);
    }
    Ok(())
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command
        .arg("--quiet=2")
        .env("DEBIAN_FRONTEND", "noninteractive");
    command
}

/// Keeps a service that was installed for a program's sake from starting at the next boot.
fn disable(service: &str) {
    // A machine without systemd starts nothing at boot either.
    let done = Command::new("systemctl")
        .args(["--quiet", "disable", service])
        .status();
    if !done.is_ok_and(|status| status.success()) {
        eprintln!("note: {service} could not be disabled and may start at the next boot");
    }
}

fn is_there(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .chain(["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from))
        .any(|folder| folder.join(program).is_file())
}

/// While it lives, packages that are installed may not start services.
struct StartPolicy {
    ours: bool,
}

impl StartPolicy {
    fn new() -> Result<Self> {
        let policy = Path::new(POLICY);
        if policy.exists() {
            eprintln!("note: {POLICY} is there already and decides whether services start");
            return Ok(Self { ours: false });
        }
        // 101 means: not allowed by policy.
        std::fs::OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o755)
            .open(policy)
            .and_then(|mut file| file.write_all(b"#!/bin/sh\nexit 101\n"))
            .map_err(repo::file_error("write", policy))?;
        Ok(Self { ours: true })
    }
}

impl Drop for StartPolicy {
    fn drop(&mut self) {
        if self.ours && std::fs::remove_file(POLICY).is_err() {
            eprintln!("note: remove {POLICY} by hand");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_there_is_found() {
        assert!(is_there("sh"));
        assert!(!is_there("no-such-program-as-this"));
    }

    #[test]
    fn every_package_has_a_reason() {
        let all = FOR_TESTS.iter().chain(FOR_DEMO).chain(FOR_BENCH);
        for package in all.chain(FOR_VOLUMES) {
            assert!(
                !package.reason.is_empty() && !package.program.is_empty(),
                "{}",
                package.name
            );
        }
    }
}
