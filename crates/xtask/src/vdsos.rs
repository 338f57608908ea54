//! The vDSOs of other kernels that tests put into their subjects: out of Debian's kernel packages,
//! which are downloaded and unpacked, not installed.
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::{Error, Result};
use crate::repo;

/// Where the tests look for them, as `SUITE.so`.
const FOLDER: &str = "/var/cache/stillframe/vdso";
/// Debian's suites, whose kernels are Linux 6.1 and 6.12.
const SUITES: &[&str] = &["bookworm", "trixie"];
/// The package that depends on the suite's smallest kernel.
const KERNEL: &str = "linux-image-cloud-amd64";

/// Fetches those that are missing. What cannot be fetched is told: its tests skip themselves.
pub fn fetch() {
    for suite in SUITES {
        let file = Path::new(FOLDER).join(format!("{suite}.so"));
        if file.exists() {
            continue;
        }
        if !rustix::process::geteuid().is_root() {
            eprintln!("not root: the vDSO of Debian {suite} is not fetched");
            continue;
        }
        eprintln!("missing: the vDSO of Debian {suite}: tests put it into their subjects");
        if let Err(error) = fetch_one(suite, &file) {
            eprintln!("it cannot be fetched, and what needs it is left out: {error}");
        }
    }
}

fn fetch_one(suite: &str, file: &Path) -> Result<()> {
    let folder = Path::new(FOLDER);
    std::fs::create_dir_all(folder).map_err(repo::file_error("make", folder))?;
    let scratch = tempfile::tempdir_in(folder).map_err(repo::file_error("make in", folder))?;
    let package = download(suite, scratch.path())?;
    let kernel = unpack(&package)?;
    let program = decompress(&kernel)?;
    let vdso = vdso(&program).ok_or_else(|| Error::Vdso {
        suite: suite.to_owned(),
    })?;
    let part = scratch.path().join("vdso.so");
    std::fs::write(&part, vdso).map_err(repo::file_error("write", &part))?;
    std::fs::rename(&part, file).map_err(repo::file_error("rename to", file))
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
    let said = repo::output(apt("apt-cache").args(["depends", KERNEL]))?;
    let name = said.lines().find_map(|line| {
        let (_, name) = line.split_once("Depends: ")?;
        name.starts_with("linux-image-").then(|| name.to_owned())
    });
    let missing = || Error::Vdso {
        suite: suite.to_owned(),
    };
    repo::run(
        apt("apt-get")
            .arg("download")
            .arg(name.ok_or_else(missing)?),
    )?;
    let entries = std::fs::read_dir(scratch).map_err(repo::file_error("list", scratch))?;
    let mut files = entries.filter_map(|entry| Some(entry.ok()?.path()));
    let package = files.find(|path| path.extension().is_some_and(|end| end == "deb"));
    package.ok_or_else(missing)
}

/// The kernel's file of a package.
fn unpack(package: &Path) -> Result<Vec<u8>> {
    let mut archive = Command::new("dpkg-deb");
    archive.arg("--fsys-tarfile").arg(package);
    archive.stdout(Stdio::piped());
    let mut running = archive
        .spawn()
        .map_err(|source| repo::start_error(&archive, source))?;
    let tar = running.stdout.take().expect("stdout was made a pipe above");
    let mut extract = Command::new("tar");
    extract.args(["-xO", "--wildcards", "./boot/vmlinuz-*"]);
    let kernel = read(extract.stdin(tar));
    let ended = running.wait();
    ended.map_err(|source| repo::start_error(&archive, source))?;
    kernel
}

/// The kernel's program, which its file holds compressed
/// (Documentation/arch/x86/boot.rst, payload_offset).
fn decompress(kernel: &[u8]) -> Result<Vec<u8>> {
    const PROGRAMS: [(&[u8], &str); 3] = [
        (&[0x02, 0x21, 0x4c, 0x18], "lz4"),
        (&[0x28, 0xb5, 0x2f, 0xfd], "zstd"),
        (b"\xfd7zXZ", "xz"),
    ];
    let payload = payload(kernel).unwrap_or_default();
    let known = PROGRAMS
        .iter()
        .find(|(magic, _)| payload.starts_with(magic));
    let Some((_, program)) = known else {
        return Ok(Vec::new());
    };
    let mut command = Command::new(program);
    command
        .arg("-dc")
        .stdin(Stdio::piped())
        .stderr(Stdio::null());
    let mut running = command
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|source| repo::start_error(&command, source))?;
    let mut input = running.stdin.take().expect("stdin was made a pipe above");
    let payload = payload.to_vec();
    // A length follows the compressed bytes, so the end is an error.
    let writer = std::thread::spawn(move || drop(input.write_all(&payload)));
    let output = running
        .wait_with_output()
        .map_err(|source| repo::start_error(&command, source))?;
    let _ = writer.join();
    Ok(output.stdout)
}

fn payload(kernel: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| {
        let bytes = kernel.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    let sectors = usize::from(*kernel.get(0x1f1)?).max(4);
    let start = ((sectors + 1) * 512).checked_add(word(0x248)?)?;
    kernel.get(start..start.checked_add(word(0x24c)?)?)
}

/// The vDSO for 64-bit programs in a kernel's program, with its pages filled up.
fn vdso(kernel: &[u8]) -> Option<&[u8]> {
    const PAGE_BYTES: usize = 4096;
    // 64 bits, little-endian, a shared object for x86-64.
    let is_it = |page: &[u8]| {
        page.starts_with(b"\x7fELF\x02\x01\x01") && page.get(16..20) == Some(&[3, 0, 62, 0])
    };
    let starts = (0..kernel.len()).step_by(PAGE_BYTES);
    starts.filter(|at| is_it(&kernel[*at..])).find_map(|at| {
        // The first program header is that of all that is loaded.
        let size = kernel.get(at + 64 + 40..at + 64 + 48)?.try_into().ok()?;
        let bytes = usize::try_from(u64::from_le_bytes(size)).ok()?;
        let end = at.checked_add(bytes.checked_next_multiple_of(PAGE_BYTES)?)?;
        let found = kernel.get(at..end)?;
        let name = b"linux-vdso.so.1";
        found
            .windows(name.len())
            .any(|part| part == name)
            .then_some(found)
    })
}

fn read(command: &mut Command) -> Result<Vec<u8>> {
    let output = command.stderr(Stdio::inherit()).output();
    let output = output.map_err(|source| repo::start_error(command, source))?;
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vdso_is_found_in_a_kernel() {
        let mut kernel = vec![0xcc; 5 * 4096];
        let head = b"\x7fELF\x02\x01\x01";
        kernel[4096..4103].copy_from_slice(head);
        kernel[8192..8199].copy_from_slice(head);
        kernel[8208..8212].copy_from_slice(&[3, 0, 62, 0]);
        kernel[8192 + 104..8192 + 112].copy_from_slice(&0x1100_u64.to_le_bytes());
        assert_eq!(vdso(&kernel), None);
        kernel[9000..9015].copy_from_slice(b"linux-vdso.so.1");
        let found = vdso(&kernel).expect("there it is");
        assert_eq!(found.len(), 8192);
        assert_eq!(vdso(&kernel[..3 * 4096]), None, "it is cut off");
    }

    #[test]
    fn a_payload_is_where_the_header_says() {
        let mut kernel = vec![0; 4096];
        kernel[0x1f1] = 1;
        kernel[0x248..0x24c].copy_from_slice(&8_u32.to_le_bytes());
        kernel[0x24c..0x250].copy_from_slice(&4_u32.to_le_bytes());
        kernel[5 * 512 + 8..][..4].copy_from_slice(b"load");
        assert_eq!(payload(&kernel), Some(b"load".as_slice()));
        assert_eq!(payload(&kernel[..2000]), None);
    }
}
