//! An emulator that runs a kernel and a shell's loop, whose steps come over its serial line.
use std::fs::File;
use std::path::Path;

use testkit::machine::archive::Archive;

use crate::Work;
use crate::error::{Result, failure, file_error};
use crate::steps::Recipe;

/// A static program with all that the first process needs.
const BUSYBOX: &str = "/bin/busybox";
/// The kernel of Debian 12, where `cargo xtask test` keeps it.
const KERNEL: &str = "/var/cache/stillframe/kernel/bookworm/vmlinuz";
/// The first process.
const INIT: &str = include_str!("../scripts/init.sh");

/// Starts the emulator, with its translator in a thread of its own.
///
/// # Errors
/// When there is no kernel to run.
pub fn start(folder: &Path) -> Result<Box<dyn Work>> {
    if !Path::new(KERNEL).exists() {
        return Err(failure(format!("there is no {KERNEL}")));
    }
    for folder in [folder, &folder.with_file_name("undisturbed")] {
        std::fs::create_dir_all(folder).map_err(file_error("make", folder))?;
        let path = folder.join("initrd");
        pack(&path).map_err(file_error("write", &path))?;
        let link = folder.join("kernel");
        std::os::unix::fs::symlink(KERNEL, &link).map_err(file_error("make", &link))?;
    }
    Recipe {
        files: &[],
        command: &[
            "qemu-system-x86_64",
            "-accel",
            "tcg,thread=multi",
            "-cpu",
            "max",
            "-smp",
            "2",
            "-m",
            "256",
            "-no-user-config",
            "-nodefaults",
            "-display",
            "none",
            "-no-reboot",
            "-kernel",
            "kernel",
            "-initrd",
            "initrd",
            "-append",
            "console=ttyS0 quiet loglevel=1 panic=-1 oops=panic",
            "-serial",
            "file:steps",
        ],
        alike: false,
        endless: true,
    }
    .start(folder)
}

/// Writes the guest's first file system.
fn pack(path: &Path) -> std::io::Result<()> {
    let mut archive = Archive::new(File::create(path)?)?;
    archive.folder("bin")?;
    archive.file("bin/busybox", &std::fs::read(BUSYBOX)?)?;
    archive.file("init", INIT.as_bytes())?;
    archive.finish()?;
    Ok(())
}
