//! The kernels that tests boot, and whose vDSOs they put into their subjects: out of Debian's
//! packages, which are downloaded and unpacked, not installed.
use std::path::Path;
use std::process::Command;

use crate::debian::{self, Lists};
use crate::error::{Error, Result};
use crate::{repo, vdso};

/// Where the tests look for kernels, each in the folder of its suite: `vmlinuz`, and modules.
const KERNELS: &str = "/var/cache/stillframe/kernel";
/// Where they look for vDSOs, as `SUITE.so`.
const VDSOS: &str = "/var/cache/stillframe/vdso";
/// Debian's suites, whose kernels are Linux 6.1, 6.12 and, in sid, the newest; and of which tests
/// boot the kernel or use the vDSO.
const SUITES: &[(&str, bool)] = &[("bookworm", true), ("trixie", true), ("sid", false)];
/// Of these, the one whose kernel all tests boot.
const BOOTED: &str = "bookworm";
/// The package that depends on the suite's smallest kernel.
const PACKAGE: &str = "linux-image-cloud-amd64";
/// What a dump of sockets needs and that kernel has as modules, each after what it needs itself.
const MODULES: &[&str] = &[
    "inet_diag",
    "tcp_diag",
    "udp_diag",
    "unix_diag",
    "netlink_diag",
];
/// The modules of a guest's devices, in a folder of their own: only some machines have those.
const DEVICES: &[&str] = &[
    "virtio",
    "virtio_ring",
    "virtio_pci_legacy_dev",
    "virtio_pci_modern_dev",
    "virtio_pci",
    "virtio_mmio",
    "failover",
    "net_failover",
    "virtio_net",
    "virtio_blk",
    "virtio_balloon",
];
/// That folder's name.
const DEVICES_IN: &str = "virtio";

/// Has a tree go round all kernels, in a test that takes too long for all days.
///
/// # Errors
/// When the build or the test fails.
pub fn run() -> Result<()> {
    fetch_all(true);
    let binary = repo::build_stillframe()?;
    eprintln!("built {}", binary.display());
    let mut command = repo::cargo(&["test", "--locked", "--release", "--package", "cli"]);
    command.args(["--test", "kernels", "--", "--ignored", "--nocapture"]);
    repo::run(&mut command)
}

/// Fetches those that are missing. What cannot be fetched is told: its tests skip themselves.
pub fn fetch() {
    fetch_all(false);
}

/// With `all`, also those that only [`run`] boots.
fn fetch_all(all: bool) {
    for (suite, _) in SUITES.iter().filter(|suite| all || suite.1) {
        let kernel = Path::new(KERNELS).join(suite);
        let code = Path::new(VDSOS).join(format!("{suite}.so"));
        let is_whole = kernel.exists() && (*suite != BOOTED || kernel.join(DEVICES_IN).exists());
        if (is_whole || *suite != BOOTED && !all) && code.exists() {
            continue;
        }
        if !rustix::process::geteuid().is_root() {
            eprintln!("not root: the kernel of Debian {suite} is not fetched");
            continue;
        }
        eprintln!("missing: the kernel of Debian {suite}: tests boot it or use its vDSO");
        if let Err(error) = fetch_one(suite, &kernel, &code) {
            eprintln!("it cannot be fetched, and what needs it is left out: {error}");
        }
    }
}

fn fetch_one(suite: &str, kernel: &Path, code: &Path) -> Result<()> {
    for folder in [KERNELS, VDSOS].map(Path::new) {
        std::fs::create_dir_all(folder).map_err(repo::file_error("make", folder))?;
    }
    let lists = Lists::of(&[suite])?;
    let package = package(&lists, suite)?;
    let part = lists.scratch().join("kernel");
    let image = unpack(&lists, &package, &part, suite == BOOTED)?;
    if !code.exists() {
        let program = vdso::decompress(&image)?;
        let missing = Error::Kernel {
            what: "vDSO in its kernel",
            suite: suite.to_owned(),
        };
        let found = vdso::find(&program).ok_or(missing)?;
        let part = lists.scratch().join("vdso.so");
        std::fs::write(&part, found).map_err(repo::file_error("write", &part))?;
        std::fs::rename(&part, code).map_err(repo::file_error("rename to", code))?;
    }
    debian::put(&part, kernel)
}

/// The package that has the suite's kernel.
fn package(lists: &Lists, suite: &str) -> Result<String> {
    let first = |package, start| Ok(lists.depends(package, start)?.into_iter().next());
    let name: Option<String> = first(PACKAGE, "linux-image-")?;
    let name = name.ok_or_else(|| Error::Kernel {
        what: "kernel package",
        suite: suite.to_owned(),
    })?;
    // Newer packages have the kernel's file in one of their own.
    Ok(first(&name, "linux-binary-")?.unwrap_or(name))
}

/// Unpacks the kernel's file and the modules of a package into `folder`, with `devices` also those
/// of a guest's devices, which newer kernels have built in; what is in the former.
fn unpack(lists: &Lists, package: &str, folder: &Path, devices: bool) -> Result<Vec<u8>> {
    let file = lists.download(package)?;
    std::fs::create_dir_all(folder).map_err(repo::file_error("make", folder))?;
    take(&file, folder, &["vmlinuz*"])?;
    // Where the kernel's file is apart, so are its modules; trees without sockets need none.
    if !package.starts_with("linux-binary-") {
        take_modules(&file, folder, MODULES)?;
    }
    if devices {
        let folder = folder.join(DEVICES_IN);
        std::fs::create_dir_all(&folder).map_err(repo::file_error("make", &folder))?;
        take_modules(&file, &folder, DEVICES)?;
    }
    let kernel = folder.join("vmlinuz");
    std::fs::read(&kernel).map_err(repo::file_error("read", &kernel))
}

/// Unpacks files by their names, all into one folder, and the kernel without its version.
fn take(package: &Path, folder: &Path, names: &[&str]) -> Result<()> {
    let flat = "--transform=s|.*/||;s|^vmlinuz-.*|vmlinuz|".to_owned();
    let names = names.iter().map(|name| format!("*/{name}"));
    let options = ["--wildcards".to_owned(), flat].into_iter().chain(names);
    debian::unpack(package, folder, &options.collect::<Vec<_>>())
}

fn take_modules(package: &Path, folder: &Path, modules: &[&str]) -> Result<()> {
    let names = modules.iter().map(|module| format!("{module}.ko*"));
    let names = names.collect::<Vec<_>>();
    let names = names.iter().map(String::as_str).collect::<Vec<_>>();
    take(package, folder, &names)?;
    for module in modules {
        let compressed = folder.join(format!("{module}.ko.xz"));
        if compressed.exists() {
            repo::run(Command::new("xz").arg("-d").arg(&compressed))?;
        }
    }
    Ok(())
}
