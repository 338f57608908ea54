//! How a dump looks at the memory of stopped tasks: freshly, or with what was seen while they ran.

use std::collections::HashMap;
use std::os::fd::{AsFd, OwnedFd};

use freeze::{Task, parse, read_at};
use memory::PageMaps;
use memory::scan::{Area, ScanResult};
use resources::map::listing::Listed;
use resources::map::vdso::Vdso;
use rustix::fs::{CWD, Mode, OFlags, openat};
use sys::close::CloseQueue;
use sys::proc::Stat;
use sys::process::Process;

use crate::error::invalid;
use crate::numbering::Numbering;
use crate::{Error, Result};

/// What [`super::collect`] asks about memory.
pub(crate) trait MemoryView {
    /// Lists the mappings of a stopped task.
    fn mappings(&mut self, task: &Task) -> Result<Vec<Listed>>;

    /// Finds the pages to be stored of a stopped task's `areas`, and their guard regions.
    fn pages(
        &mut self,
        process: &Process,
        areas: &[Area],
        maps: &mut PageMaps,
    ) -> Result<Vec<ScanResult>>;

    /// The vDSOs whose pages the image that the new one is over has.
    fn vdsos(&self) -> &[Vdso] {
        &[]
    }

    /// Which space is which task's memory.
    fn numbering(&mut self) -> &mut Numbering;

    /// Whether it keeps memory that is registered with userfaultfds of the tree.
    fn keeps_registered(&self) -> bool {
        true
    }
}

/// Looks at everything while the tree is stopped.
///
/// The kernel walks all pages of a task to list its mappings with their flags (smaps): 20 ms a GiB.
#[derive(Default)]
pub(crate) struct Fresh(pub Numbering);

impl MemoryView for Fresh {
    fn mappings(&mut self, task: &Task) -> Result<Vec<Listed>> {
        Ok(task.smaps()?)
    }

    fn pages(
        &mut self,
        process: &Process,
        areas: &[Area],
        maps: &mut PageMaps,
    ) -> Result<Vec<ScanResult>> {
        Ok(memory::scan(process, areas, maps)?)
    }

    fn numbering(&mut self) -> &mut Numbering {
        &mut self.0
    }
}

/// The mappings of a tree as they were while it ran.
///
/// While it is stopped, only the list without flags is read again, which takes as long as there
/// are mappings and not as large as they are. Of a task whose list is the same, the flags seen
/// before are taken for true: a change of the flags of exactly a whole mapping (madvise(2),
/// mlock(2)) in between is not seen.
#[derive(Debug, Default)]
pub(crate) struct Prepared {
    tasks: HashMap<i32, Seen>,
}

#[derive(Debug)]
struct Seen {
    start_ticks: u64,
    /// /proc/PID/maps, before and after smaps.
    maps: Vec<u8>,
    listed: Vec<Listed>,
}

impl Prepared {
    /// Looks at the running tree under `root`. Tasks that come and go meanwhile may be missing.
    ///
    /// # Errors
    /// [`Error::Gone`] when the root has ended, [`Error::Kernel`].
    pub fn of(root: i32) -> Result<Self> {
        let mut prepared = Self::default();
        let mut pids = vec![root];
        while let Some(pid) = pids.pop() {
            match prepared.add(pid, &mut pids) {
                Err(Error::Gone { .. }) if pid != root => {}
                other => other?,
            }
        }
        Ok(prepared)
    }

    /// The mappings of all tasks.
    pub fn listed(&self) -> impl Iterator<Item = (i32, &[Listed])> {
        let tasks = self.tasks.iter();
        tasks.map(|(pid, seen)| (*pid, seen.listed.as_slice()))
    }

    /// Changes all mappings of the tasks.
    pub fn edit(&mut self, edit: impl Fn(i32, &mut Listed)) {
        for (pid, seen) in &mut self.tasks {
            seen.listed.iter_mut().for_each(|listed| edit(*pid, listed));
        }
    }

    /// Whether flags of mappings were seen to be others by `later`, in tasks whose mappings are
    /// the same otherwise.
    pub fn differs(&self, later: &Self) -> bool {
        self.tasks.iter().any(|(pid, seen)| {
            let Some(now) = later.tasks.get(pid) else {
                return false;
            };
            let same = (seen.start_ticks, &seen.maps) == (now.start_ticks, &now.maps);
            let mut pairs = seen.listed.iter().zip(&now.listed);
            same && pairs.any(|(seen, now)| seen.flags != now.flags)
        })
    }

    fn add(&mut self, pid: i32, pids: &mut Vec<i32>) -> Result<()> {
        let mut proc = open(pid)?;
        let close_queue = CloseQueue::default();
        let stat = Stat::parse(&read_at(proc.as_fd(), pid, "stat", &close_queue)?);
        let stat = stat.map_err(|error| Error::kernel(error.to_string(), invalid()))?;
        let asked = match stat.state {
            b'Z' => Process::living(pid).tid(),
            _ => pid,
        };
        if asked != pid {
            proc = open(asked)?;
        }
        let read = |name: &str| read_at(proc.as_fd(), pid, name, &close_queue);
        let children = read(&format!("task/{asked}/children"))?;
        let children = String::from_utf8_lossy(&children).into_owned();
        pids.extend(
            children
                .split_ascii_whitespace()
                .flat_map(str::parse::<i32>),
        );
        // One that changes all the time is left to the time when it is stopped.
        const TRIES: usize = 5;
        for _ in 0..TRIES {
            let maps = read("maps")?;
            let listed = parse(&read("smaps")?)?;
            // A list that is the same before and after may have been another one in between.
            if read("maps")? == maps && is_list_of(&listed, &parse(&maps)?) {
                let start_ticks = stat.start_ticks;
                self.tasks.insert(
                    pid,
                    Seen {
                        start_ticks,
                        maps,
                        listed,
                    },
                );
                break;
            }
        }
        Ok(())
    }

    /// Whether the task was seen and its mappings, but for their flags, are as they were.
    fn is_as_before(&self, task: &Task) -> Result<Option<&Seen>> {
        let Some(seen) = self.tasks.get(&task.pid()) else {
            return Ok(None);
        };
        let same = task.stat()?.0.start_ticks == seen.start_ticks;
        Ok((same && task.read("maps")? == seen.maps).then_some(seen))
    }

    /// Lists the mappings of a stopped task.
    ///
    /// # Errors
    /// [`Error::Gone`], [`Error::Kernel`].
    pub fn mappings(&self, task: &Task) -> Result<Vec<Listed>> {
        match self.is_as_before(task)? {
            Some(seen) => Ok(seen.listed.clone()),
            None => Ok(task.smaps()?),
        }
    }
}

/// Whether `listed` are the mappings `plain`, whatever their flags and their pages.
fn is_list_of(listed: &[Listed], plain: &[Listed]) -> bool {
    let line = |map: &Listed| Listed {
        flags: Vec::new(),
        resident_bytes: 0,
        swapped_bytes: 0,
        common_bytes: (0, 0),
        page_bytes: 0,
        protection_key: 0,
        ..map.clone()
    };
    listed.iter().map(line).eq(plain.iter().map(line))
}

fn open(pid: i32) -> Result<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let opened = openat(CWD, sys::procfs::path(pid), flags, Mode::empty());
    opened.map_err(|_| Error::Gone { pid })
}

#[cfg(test)]
mod tests {
    use freeze::freeze;
    use testkit::program::{Program, Spawned};

    use super::*;

    /// A program that has done all that it ever does.
    fn asleep() -> Spawned {
        let program = Program::new("sleep").arg("1000").spawn();
        program.wait_ready("its sleep", || sleeps(program.pid()));
        program
    }

    fn sleeps(pid: u32) -> bool {
        let call = std::fs::read_to_string(format!("/proc/{pid}/syscall"));
        let nanosleep = syscalls::Sysno::clock_nanosleep.id().to_string();
        call.is_ok_and(|call| call.split(' ').next() == Some(&nanosleep))
    }

    #[test]
    fn a_quiet_task_is_as_it_was_seen() {
        testkit::needs_root!();
        let program = asleep();
        let pid = program.pid().cast_signed();
        let mut prepared = Prepared::of(pid).expect("it runs");
        let frozen = freeze(pid, None).expect("it can be stopped");
        let task = &frozen.tasks[0];
        assert!(prepared.is_as_before(task).expect("a look").is_some());
        let before = prepared.mappings(task).expect("mappings");
        let same = |now: Vec<Listed>| {
            // How many of its pages others have, too, changes with the others.
            let flags = before
                .iter()
                .zip(&now)
                .all(|(old, now)| old.flags == now.flags);
            is_list_of(&before, &now) && flags
        };
        assert!(same(task.smaps().expect("mappings")));
        prepared.tasks.get_mut(&pid).expect("seen").start_ticks += 1;
        assert!(prepared.is_as_before(task).expect("a look").is_none());
        assert!(same(prepared.mappings(task).expect("mappings")));
    }

    #[test]
    fn a_list_that_was_another_in_between_is_told() {
        let with_flags = |prot: &str| {
            let text = format!("1000-3000 {prot} 00000000 00:00 0 \nVmFlags: rd wr mr mw\n");
            parse(text.as_bytes()).expect("a list")
        };
        let plain = parse(b"1000-3000 rw-p 00000000 00:00 0 \n").expect("a list");
        assert!(is_list_of(&with_flags("rw-p"), &plain));
        assert!(!is_list_of(&with_flags("---p"), &plain));
        assert!(!is_list_of(&[], &plain));
    }

    #[test]
    fn other_mappings_are_listed_anew() {
        testkit::needs_root!();
        let program = asleep();
        let pid = program.pid().cast_signed();
        let mut prepared = Prepared::of(pid).expect("it runs");
        prepared.tasks.get_mut(&pid).expect("seen").maps.pop();
        prepared.tasks.get_mut(&pid).expect("seen").listed.clear();
        let frozen = freeze(pid, None).expect("it can be stopped");
        assert!(
            !prepared
                .mappings(&frozen.tasks[0])
                .expect("mappings")
                .is_empty()
        );
    }

    #[test]
    fn children_are_prepared_and_the_dead_are_gone() {
        let program = Program::new("sh")
            .arg("-c")
            .arg("sleep 1000 & wait")
            .spawn();
        // A child that executes its program has other mappings at each look.
        program.wait_ready("a child asleep", || {
            let tree = program.tree();
            tree.len() == 2 && tree.iter().all(|pid| sleeps(*pid) || *pid == program.pid())
        });
        let prepared = Prepared::of(program.pid().cast_signed()).expect("it runs");
        assert_eq!(prepared.tasks.len(), 2);
        assert!(matches!(Prepared::of(i32::MAX), Err(Error::Gone { .. })));
    }
}
