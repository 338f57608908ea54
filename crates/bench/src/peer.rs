//! The peer: CRIU from a newer Debian, unpacked into a folder of its own.
//!
//! It runs in the host's file systems, so that it sees what stillframe sees: its own loader starts
//! it with its own libraries. Starting it in its folder with chroot(2) takes the same time.
use std::ffi::OsString;
use std::path::Path;
use std::process::Command;

use crate::error::{Error, Result, file_error};
use crate::tool::{Tool, name};

/// Unpacks CRIU from a Debian suite below `peers`, unless it is there, and returns how to call it.
///
/// # Errors
/// When debootstrap fails.
pub fn criu(suite: &str, peers: &Path) -> Result<Tool> {
    let root = peers.join(suite);
    let program = root.join("usr/sbin/criu");
    if !program.exists() {
        unpack(suite, peers, &root)?;
    }
    let words: Vec<OsString> = vec![
        root.join("usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2")
            .into(),
        "--library-path".into(),
        root.join("usr/lib/x86_64-linux-gnu").into(),
        program.into(),
    ];
    let said = output(Command::new(&words[0]).args(&words[1..]).arg("--version"))?;
    let version = said.lines().find_map(|line| line.strip_prefix("Version: "));
    let version = format!("{} (Debian {suite})", version.unwrap_or("unknown"));
    Ok(Tool {
        name: "criu".into(),
        version,
        words,
        volatile_options: &[],
        dump_options: &[],
        durable: false,
    })
}

/// Returns how to call stillframe.
///
/// # Errors
/// When it cannot be started.
pub fn stillframe(program: &Path) -> Result<Tool> {
    let said = output(Command::new(program).arg("--version"))?;
    Ok(Tool {
        name: "stillframe".into(),
        version: said
            .split_whitespace()
            .last()
            .unwrap_or("unknown")
            .to_string(),
        words: vec![program.into()],
        volatile_options: &["--no-sync"],
        dump_options: &[],
        durable: true,
    })
}

/// Unpacks beside the final name and renames last: a folder is whole or absent.
fn unpack(suite: &str, peers: &Path, root: &Path) -> Result<()> {
    eprintln!("unpacking criu of Debian {suite} into {}", root.display());
    let partial = peers.join(format!("{suite}.partial"));
    let _ = std::fs::remove_dir_all(&partial);
    std::fs::create_dir_all(peers).map_err(file_error("make", peers))?;
    let mut debootstrap = Command::new("debootstrap");
    debootstrap
        .args(["--variant=minbase", "--include=criu", suite])
        .arg(&partial);
    output(debootstrap.arg("http://deb.debian.org/debian"))?;
    std::fs::rename(&partial, root).map_err(file_error("rename to", root))
}

fn output(command: &mut Command) -> Result<String> {
    let output = command.output().map_err(|source| Error::Start {
        program: name(command),
        source,
    })?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(said);
    }
    let said = said + &String::from_utf8_lossy(&output.stderr);
    Err(Error::Status {
        command: name(command),
        status: output.status,
        said,
    })
}
