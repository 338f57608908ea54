//! `cargo xtask dist`: one folder with the static binary, its completions and its man page.
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Error, Result};
use crate::repo;

/// Where it is written.
#[derive(clap::Args)]
pub struct Arguments {
    /// The folder; it is created.
    #[arg(long, default_value = "target/dist")]
    out: PathBuf,
}

/// What `stillframe generate` is asked for, and where its answer lies below the folder.
const GENERATED: &[(&[&str], &str)] = &[
    (&["completions", "bash"], "completions/stillframe.bash"),
    (&["completions", "zsh"], "completions/_stillframe"),
    (&["completions", "fish"], "completions/stillframe.fish"),
    (&["man"], "man/stillframe.8"),
];

/// Builds the release binary and writes it with all that is generated from it.
///
/// # Errors
/// When the build fails, the binary is not static, or a file cannot be written.
pub fn run(arguments: &Arguments) -> Result<()> {
    let built = repo::build_stillframe()?;
    let out = repo::root().join(&arguments.out);
    let binary = out.join("stillframe");
    make_folder(&out)?;
    std::fs::copy(&built, &binary).map_err(repo::file_error("copy the binary to", &binary))?;
    refuse_dynamic(&binary)?;
    for (what, name) in GENERATED {
        let path = out.join(name);
        make_folder(path.parent().expect("a path below `out`"))?;
        let text = repo::output(Command::new(&binary).arg("generate").args(*what))?;
        std::fs::write(&path, text).map_err(repo::file_error("write", &path))?;
    }
    println!("{}", out.display());
    Ok(())
}

fn make_folder(path: &Path) -> Result<()> {
    std::fs::create_dir_all(path).map_err(repo::file_error("make", path))
}

/// Refuses a binary that names an interpreter: it would need libraries of the machine it runs on.
fn refuse_dynamic(binary: &Path) -> Result<()> {
    let bytes = std::fs::read(binary).map_err(repo::file_error("read", binary))?;
    match names_interpreter(&bytes) {
        Some(false) => Ok(()),
        _ => Err(Error::Dynamic {
            path: binary.to_path_buf(),
        }),
    }
}

/// Tells whether an ELF program for x86-64 has an interpreter; nothing for what is none.
///
/// See elf(5): the header's `e_phoff` stands at 32, `e_phentsize` at 54, `e_phnum` at 56.
fn names_interpreter(elf: &[u8]) -> Option<bool> {
    const PT_INTERP: u32 = 3;
    if !elf.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let half = |at: usize| Some(u16::from_le_bytes(elf.get(at..at + 2)?.try_into().ok()?));
    let offset = u64::from_le_bytes(elf.get(32..40)?.try_into().ok()?);
    let offset = usize::try_from(offset).ok()?;
    let (entry_bytes, entries) = (usize::from(half(54)?), usize::from(half(56)?));
    for entry in 0..entries {
        let at = offset.checked_add(entry * entry_bytes)?;
        let kind = u32::from_le_bytes(elf.get(at..at.checked_add(4)?)?.try_into().ok()?);
        if kind == PT_INTERP {
            return Some(true);
        }
    }
    Some(false)
}

#[cfg(test)]
mod tests {
    use super::names_interpreter;

    #[test]
    fn static_and_dynamic_programs_are_told_apart() {
        let shell = std::fs::read("/bin/sh").unwrap();
        assert_eq!(names_interpreter(&shell), Some(true));
        let own = std::fs::read("/proc/self/exe").unwrap();
        assert_eq!(
            names_interpreter(&own),
            Some(false),
            "tests are built static, as the binary"
        );
        assert_eq!(names_interpreter(b"#!/bin/sh"), None);
        assert_eq!(names_interpreter(&own[..60]), None);
    }
}
