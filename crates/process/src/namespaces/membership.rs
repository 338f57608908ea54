//! The processes of a namespace.

use std::fs::File;

use rustix::io::Errno;
use sys::process::Process;
use sys::procfs;

use crate::{Error, Result};

/// Refuses a tree whose namespace has other processes, which a restored tree would not find in its
/// own. Those that the tree descends from have made it, and only wait; helpers of stillframe, as a
/// tracker, work for the tree.
pub fn check_alone(root: &Process, kind: &str) -> Result<()> {
    let link = |pid: i32| {
        let path = procfs::path(format_args!("{pid}/ns/{kind}"));
        rustix::fs::readlink(path, Vec::new()).ok()
    };
    let parent = |pid: &i32| Some(freeze::stat_of(*pid)?.ppid).filter(|parent| *parent != 0);
    let line = |pid: i32| std::iter::successors(Some(pid), parent);
    let Some(ours) = link(root.pid()) else {
        return Ok(());
    };
    let makers = line(root.pid()).collect::<Vec<_>>();
    let others = procfs::processes().filter(|pid| link(*pid).as_ref() == Some(&ours));
    let mut others = others.filter(|pid| !makers.contains(pid));
    let is_helper = |pid: i32| {
        let name = procfs::read(format_args!("{pid}/comm"));
        name.is_ok_and(|name| name.starts_with(b"stillframe-"))
    };
    let foreign = others.find(|pid| line(*pid).all(|pid| pid != root.pid()) && !is_helper(*pid));
    // One that has ended meanwhile had a parent that nobody knows any more.
    let Some(pid) = foreign.filter(|pid| link(*pid).as_ref() == Some(&ours)) else {
        return Ok(());
    };
    let what = format!("its own {kind} namespace");
    let refused = resources::Error::unsupported(root.pid(), what);
    let why = format!("process {pid}, which is not of the tree, is in it as well");
    Err(refused.because(why).into())
}

/// The namespace of a kind that a process is in, where that is another one than this process's.
pub fn theirs(process: &Process, kind: &str) -> Result<Option<File>> {
    let differ = || {
        let theirs = rustix::fs::readlink(process.path(&format!("ns/{kind}")), Vec::new())?;
        let own = procfs::path(format_args!("self/ns/{kind}"));
        Ok(theirs != rustix::fs::readlink(own, Vec::new())?)
    };
    let found = match differ() {
        // A process that has ended or may not be looked at is refused for that later.
        Ok(false) | Err(Errno::ACCESS | Errno::PERM | Errno::NOENT | Errno::SRCH) => {
            return Ok(None);
        }
        Ok(true) => process.open(&format!("ns/{kind}")).map(Some),
        Err(errno) => Err(errno.into()),
    };
    found.map_err(|error| {
        let doing = format!(
            "cannot look at the {kind} namespace of pid {}",
            process.pid()
        );
        Error::kernel(doing, error)
    })
}
