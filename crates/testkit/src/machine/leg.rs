//! A stay of a tree on its way from kernel to kernel, seen from outside: where it is, and the image
//! that it comes with and leaves with.
//!
//! The same first process does the work in an emulated machine and on this host, where it is the
//! first of its own namespace of pids in a root folder of its own.
use std::fs::{self, File};
use std::io::{self, BufWriter, Read};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Stdio};

use super::archive::Archive;
use super::emulator::{self, Machine, MachineLog};
use super::{KERNELS, STILLFRAME, SUBJECT, Verdict, without_symbols};
use crate::{skip, subject};

/// Where the first process finds what it is to do: a word a line, and where the image is.
pub(super) const PLAN: &str = "/etc/leg";
/// The image.
pub(super) const IMAGE: &str = "/image";
/// What the verdict is about.
pub(super) const NAME: &str = "leg";

/// Where a tree stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stay {
    /// On the kernel of a suite of Debian, with a processor of this model.
    Machine {
        /// The suite.
        suite: &'static str,
        /// The model, as the emulator calls it.
        processor: &'static str,
    },
    /// On this host.
    Here,
}

/// Has the tree stay somewhere: it comes out of the image in `from`, or is made where there is
/// none, goes on for `seconds`, is looked at, and leaves into the folder `to`. What was said.
pub fn run(stillframe: &Path, stay: Stay, from: Option<&Path>, seconds: u32, to: &Path) -> Verdict {
    match try_run(stillframe, stay, from, seconds, to) {
        Ok(verdict) => verdict,
        Err(error) => Verdict::Failed(format!("{stay:?}: {error}")),
    }
}

fn try_run(
    stillframe: &Path,
    stay: Stay,
    from: Option<&Path>,
    seconds: u32,
    to: &Path,
) -> io::Result<Verdict> {
    let scratch = tempfile::tempdir()?;
    let out = scratch.path().join("out");
    File::create(&out)?;
    let comes = if from.is_some() { "comes" } else { "begins" };
    let files = |out: &str| -> io::Result<Vec<(String, Vec<u8>)>> {
        let mut files = vec![
            (
                "init".to_owned(),
                without_symbols(&subject::built("guest"))?,
            ),
            (inside(SUBJECT), without_symbols(subject::binary())?),
            (inside(STILLFRAME), without_symbols(stillframe)?),
            (
                inside(PLAN),
                format!("{comes} {seconds} {out}").into_bytes(),
            ),
        ];
        for file in from.into_iter().flat_map(fs::read_dir).flatten() {
            let path = file?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            files.push((format!("{}/{name}", inside(IMAGE)), fs::read(&path)?));
        }
        Ok(files)
    };
    let told = match stay {
        Stay::Here => here(scratch.path(), &files("/out")?, &out)?,
        Stay::Machine { suite, processor } => {
            let kernel = Path::new(KERNELS).join(suite).join("vmlinuz");
            if !kernel.exists() {
                return Ok(Verdict::Left(format!("no kernel of Debian {suite}")));
            }
            let Some(program) = skip::find_program(emulator::PROGRAM) else {
                return Ok(Verdict::Left("no emulator".to_owned()));
            };
            let archive = scratch.path().join("files");
            pack(&archive, &files("/dev/ttyS1")?)?;
            let machine = Machine {
                kernel: &kernel,
                archive: &archive,
                processor,
                out: Some(&out),
            };
            emulator::run(&program, &machine)
        }
    };
    let verdicts = told.verdicts(&[NAME.to_owned()]);
    let verdict = verdicts.into_values().next().expect("one was asked for");
    if verdict == Verdict::Passed {
        unpack(File::open(&out)?, to)?;
    }
    Ok(verdict)
}

fn inside(path: &str) -> String {
    path.trim_start_matches('/').to_owned()
}

const FOLDERS: [&str; 4] = ["bin", "test", "etc", "image"];

fn pack(path: &Path, files: &[(String, Vec<u8>)]) -> io::Result<()> {
    let mut archive = Archive::new(BufWriter::new(File::create(path)?))?;
    for folder in FOLDERS.iter().filter(|folder| **folder != "etc") {
        archive.folder(folder)?;
    }
    for (name, bytes) in files {
        archive.file(name, bytes)?;
    }
    archive.link("bin/setsid", "/init")?;
    archive.finish()?;
    Ok(())
}

/// Runs the first process on this host, in a root folder of its own.
fn here(scratch: &Path, files: &[(String, Vec<u8>)], out: &Path) -> io::Result<MachineLog> {
    use std::os::unix::fs::PermissionsExt;
    let root = scratch.join("root");
    for folder in FOLDERS {
        fs::create_dir_all(root.join(folder))?;
    }
    for (name, bytes) in files {
        fs::write(root.join(name), bytes)?;
        fs::set_permissions(root.join(name), fs::Permissions::from_mode(0o755))?;
    }
    symlink("/init", root.join("bin/setsid"))?;
    let mut command = Command::new("unshare");
    command.args(["--mount", "--pid", "--fork", "--kill-child", "--root"]);
    command.arg(&root).arg("--wd=/").arg("/init");
    let output = command.env_clear().stdin(Stdio::null()).output()?;
    if root.join("out").exists() {
        fs::rename(root.join("out"), out)?;
    }
    let said = [output.stdout, output.stderr].concat();
    let said = String::from_utf8_lossy(&said).into_owned();
    Ok(MachineLog::new(
        &said,
        format!("it ended with {}", output.status),
    ))
}

/// Unpacks what [`super::inside`] sent: each file's name and size on a line, and its bytes.
fn unpack(from: impl Read, to: &Path) -> io::Result<()> {
    use std::io::BufRead;
    fs::create_dir_all(to)?;
    let mut from = io::BufReader::new(from);
    loop {
        let mut line = String::new();
        from.read_line(&mut line)?;
        let cut = || io::Error::other(format!("the image was cut short at {line:?}"));
        if line == "end\n" {
            return Ok(());
        }
        let (name, size) = line.trim_end().split_once(' ').ok_or_else(cut)?;
        let size = size.parse::<u64>().map_err(|_| cut())?;
        let mut file = File::create(to.join(name.replace('/', "_")))?;
        if io::copy(&mut (&mut from).take(size), &mut file)? != size {
            return Err(cut());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_image_comes_out_as_it_was_sent() {
        let folder = tempfile::tempdir().expect("a scratch folder");
        let sent = b"one 3\na\nbtwo 0\nend\n";
        unpack(&sent[..], folder.path()).expect("it is whole");
        assert_eq!(fs::read(folder.path().join("one")).expect("there"), b"a\nb");
        assert_eq!(fs::read(folder.path().join("two")).expect("there"), b"");
        unpack(&sent[..8], folder.path()).expect_err("it is cut short");
        unpack(&sent[..13], folder.path()).expect_err("it is cut short");
    }
}
