//! Mount namespaces of this process: mount_namespaces(7).

use std::io;

use rustix::mount::{MountFlags, MountPropagationFlags, mount, mount_change};

use crate::process::Process;
use crate::procfs;

/// Gives this process a mount namespace of its own, with a /proc of the pid namespace that it is
/// in. What others mount later arrives there as well; what is mounted there stays there.
///
/// # Errors
/// `EPERM` without `CAP_SYS_ADMIN`, or where parts of the procfs are hidden by mounts
/// (user_namespaces(7)); as unshare(2) and mount(2).
pub fn mount_own_procfs() -> io::Result<()> {
    // SAFETY: it is about this process's mounts and directories, and about nothing in its memory.
    if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
        return Err(io::Error::last_os_error());
    }
    let all = MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC;
    mount_change("/", all)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("proc", "/proc", "proc", flags, None::<&std::ffi::CStr>)?;
    Ok(())
}

/// Tells whether a process sees the same mounts as this one, but for another procfs over its /proc,
/// mounted as [`mount_own_procfs`] mounts one.
///
/// # Errors
/// As open(2) and read(2) of its mountinfo.
pub fn differ_by_procfs_alone(process: &Process) -> io::Result<bool> {
    let own = procfs::read_text("self/mountinfo")?;
    let theirs = procfs::read_text(format_args!("{}/mountinfo", process.pid()))?;
    let (own, mut theirs) = (entries(&own), entries(&theirs));
    let top = theirs.iter().rposition(|entry| entry.point == "/proc");
    let Some(top) = top.filter(|top| theirs[*top].is_plain_procfs()) else {
        return Ok(false);
    };
    theirs.remove(top);
    Ok(own == theirs)
}

/// What is mounted, by where: at one place what covers comes behind what it covers. A copy of a
/// namespace is listed in another order.
fn entries(mountinfo: &str) -> Vec<Entry<'_>> {
    let mut entries = mountinfo
        .lines()
        .filter_map(Entry::parse)
        .collect::<Vec<_>>();
    entries.sort_by_key(|entry| entry.point);
    entries
}

/// A line of mountinfo without what differs between copies of one mount: its numbers and its
/// propagation.
#[derive(PartialEq)]
struct Entry<'a> {
    device: &'a str,
    root: &'a str,
    point: &'a str,
    options: &'a str,
    kind: &'a str,
    /// Those of the file system.
    further_options: &'a str,
}

impl<'a> Entry<'a> {
    fn parse(line: &'a str) -> Option<Self> {
        let (mount, file_system) = line.split_once(" - ")?;
        let mut words = mount.split(' ').skip(2);
        Some(Self {
            device: words.next()?,
            root: words.next()?,
            point: words.next()?,
            options: words.next()?,
            kind: file_system.split(' ').next()?,
            further_options: file_system.split(' ').nth(2)?,
        })
    }

    fn is_plain_procfs(&self) -> bool {
        let options = "rw,nosuid,nodev,noexec,relatime";
        self.point == "/proc"
            && self.root == "/"
            && self.kind == "proc"
            && self.options == options
            && self.further_options == "rw"
    }
}

#[cfg(test)]
mod tests {
    use testkit::program::{Program, Spawned};
    use testkit::wait::{SOON, wait_for};

    use super::*;

    fn elsewhere(script: &str) -> (Spawned, Process) {
        let program = Program::new("unshare")
            .args([
                "--mount",
                "--pid",
                "--fork",
                "--kill-child",
                "sh",
                "-c",
                script,
            ])
            .spawn();
        let child = || {
            let child = testkit::tree::children(program.pid()).into_iter().next()?;
            let name = std::fs::read_to_string(format!("/proc/{child}/comm")).ok()?;
            (name == "sleep\n").then(|| Process::new(child.cast_signed()))
        };
        let process = wait_for("its program", SOON, child);
        (program, process)
    }

    #[test]
    fn procfs_over_proc_is_the_only_difference_that_counts_as_none() {
        testkit::needs_root!();
        testkit::needs_program!("unshare");
        for (script, expected) in [
            (
                "mount -t proc -o nosuid,nodev,noexec proc /proc; exec sleep 1000",
                true,
            ),
            ("mount -t proc proc /proc; exec sleep 1000", false),
            ("exec sleep 1000", false),
            ("mount -t tmpfs none /mnt; exec sleep 1000", false),
            (
                "mount -t proc proc /proc; mount -t tmpfs none /mnt; exec sleep 1000",
                false,
            ),
            (
                "mount -t tmpfs none /mnt; mount -t proc proc /proc; exec sleep 1000",
                false,
            ),
        ] {
            let (_program, process) = elsewhere(script);
            let differ = differ_by_procfs_alone(&process).expect("their mounts");
            assert_eq!(differ, expected, "{script}");
        }
    }
}
