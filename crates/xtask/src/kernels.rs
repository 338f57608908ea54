//! The kernels that tests boot, and whose vDSOs they put into their subjects: out of Debian's
//! packages, which are downloaded and unpacked, not installed.
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::{Error, Result};
use crate::{repo, vdso};

/// Where all that is fetched is kept.
const KEPT: &str = "/var/cache/stillframe";
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
        if (kernel.exists() || *suite != BOOTED && !all) && code.exists() {
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
    let scratch =
        tempfile::tempdir_in(KEPT).map_err(repo::file_error("make in", Path::new(KEPT)))?;
    let package = download(suite, scratch.path())?;
    let part = scratch.path().join("kernel");
    let image = unpack(&package, &part)?;
    if !code.exists() {
        let program = vdso::decompress(&image)?;
        let missing = Error::Kernel {
            what: "vDSO in its kernel",
            suite: suite.to_owned(),
        };
        let found = vdso::find(&program).ok_or(missing)?;
        let part = scratch.path().join("vdso.so");
        std::fs::write(&part, found).map_err(repo::file_error("write", &part))?;
        std::fs::rename(&part, code).map_err(repo::file_error("rename to", code))?;
    }
    if !kernel.exists() {
        std::fs::rename(&part, kernel).map_err(repo::file_error("rename to", kernel))?;
    }
    Ok(())
}

/// Downloads the suite's kernel package, with lists and caches of its own.
fn download(suite: &str, scratch: &Path) -> Result<PathBuf> {
    let sources = scratch.join("sources.list");
    let key = "/usr/share/keyrings/debian-archive-keyring.gpg";
    let line = format!("deb [signed-by={key}] http://deb.debian.org/debian {suite} main\n");
    std::fs::write(&sources, line).map_err(repo::file_error("write", &sources))?;
    for name in ["lists/partial", "cache/archives/partial"] {
        let path = scratch.join(name);
        std::fs::create_dir_all(&path).map_err(repo::file_error("make", &path))?;
    }
    let options = [
        format!("Dir::Etc::SourceList={}", sources.display()),
        "Dir::Etc::SourceParts=/dev/null".to_owned(),
        format!("Dir::State::Lists={}", scratch.join("lists").display()),
        format!("Dir::Cache={}", scratch.join("cache").display()),
        "APT::Sandbox::User=root".to_owned(),
        "Acquire::Languages=none".to_owned(),
        "Acquire::IndexTargets::deb::DEP-11::DefaultEnabled=false".to_owned(),
        "Acquire::http::Timeout=30".to_owned(),
    ];
    let apt = |program: &str| {
        let mut command = Command::new(program);
        command.arg("--quiet=2").current_dir(scratch);
        for option in &options {
            command.args(["-o", option]);
        }
        command
    };
    repo::run(apt("apt-get").arg("update"))?;
    let said = repo::output(apt("apt-cache").args(["depends", PACKAGE]))?;
    let name = said.lines().find_map(|line| {
        let (_, name) = line.split_once("Depends: ")?;
        name.starts_with("linux-image-").then(|| name.to_owned())
    });
    let missing = || Error::Kernel {
        what: "kernel package",
        suite: suite.to_owned(),
    };
    let name = name.ok_or_else(missing)?;
    // Newer packages have the kernel's file in one of their own.
    let said = repo::output(apt("apt-cache").args(["depends", &name]))?;
    let part = said.lines().find_map(|line| {
        let (_, part) = line.split_once("Depends: ")?;
        part.starts_with("linux-binary-").then(|| part.to_owned())
    });
    repo::run(apt("apt-get").arg("download").arg(part.unwrap_or(name)))?;
    let entries = std::fs::read_dir(scratch).map_err(repo::file_error("list", scratch))?;
    let mut files = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let package = files.find(|path| path.extension().is_some_and(|end| end == "deb"));
    package.ok_or_else(missing)
}

/// Unpacks the kernel's file and the modules of a package into `folder`; what is in the former.
fn unpack(package: &Path, folder: &Path) -> Result<Vec<u8>> {
    std::fs::create_dir(folder).map_err(repo::file_error("make", folder))?;
    // Where the kernel's file is apart, so are its modules; trees without sockets need none.
    let name = package.file_name().unwrap_or_default().to_string_lossy();
    let is_apart = name.starts_with("linux-binary-");
    let mut archive = Command::new("dpkg-deb");
    archive.arg("--fsys-tarfile").arg(package);
    archive.stdout(Stdio::piped());
    let mut running = archive
        .spawn()
        .map_err(|source| repo::start_error(&archive, source))?;
    let tar = running.stdout.take().expect("stdout was made a pipe above");
    let mut extract = Command::new("tar");
    extract
        .args(["-x", "--wildcards", "--no-same-owner", "-C"])
        .arg(folder)
        // All into one folder, and the kernel under a name without its version.
        .args([
            "--transform",
            "s|.*/||",
            "--transform",
            "s|^vmlinuz-.*|vmlinuz|",
        ])
        .arg("*/vmlinuz*");
    if !is_apart {
        extract.args(MODULES.iter().map(|module| format!("*/{module}.ko*")));
    }
    let unpacked = repo::run(extract.stdin(tar));
    let ended = running.wait();
    ended.map_err(|source| repo::start_error(&archive, source))?;
    unpacked?;
    for module in MODULES {
        let compressed = folder.join(format!("{module}.ko.xz"));
        if compressed.exists() {
            repo::run(Command::new("xz").arg("-d").arg(&compressed))?;
        }
    }
    let kernel = folder.join("vmlinuz");
    std::fs::read(&kernel).map_err(repo::file_error("read", &kernel))
}
