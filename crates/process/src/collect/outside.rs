//! What can be seen of a tree's files from outside, before its tasks are made to call anything.

use std::rc::Rc;

use image::Record;
use resources::fd::tty::control;
use resources::map::listing::Backing;
use resources::map::memory::Mapping;
use resources::{Allow, fd};
use rustix::fs::{AtFlags, OFlags, statat};
use sys::close::Lasting;

use super::files::{self, Described, Files};
use super::found::{Found, OfTask};
use crate::freeze::{Frozen, Task};
use crate::obstacles::Obstacles;
use crate::records::{Descriptor, Descriptors, Place};
use crate::{Error, Result};

/// The files of a tree, looked at from outside.
pub(super) struct Outside {
    pub described: Described,
    /// By task; none of a zombie.
    pub of_tasks: Vec<Option<OfTask>>,
}

impl Outside {
    /// Looks at all files; takes the rows out of `found`.
    pub fn look(
        frozen: &Frozen,
        found: &mut [Found],
        allow: &Allow,
        obstacles: &mut Obstacles,
    ) -> Result<Self> {
        let mut files = Files::default();
        let tasks = frozen.tasks.iter().zip(&mut *found);
        let of_tasks = tasks.map(|(task, found)| {
            let living = !task.is_zombie();
            let look = || found.outside(task, &mut files, allow, obstacles);
            living.then(look).transpose()
        });
        let of_tasks = of_tasks.collect::<Result<Vec<_>>>()?;
        let described = files::describe(&mut files, allow, obstacles)?;
        check_terminals(found, &described.records, obstacles)?;
        Ok(Self {
            described,
            of_tasks,
        })
    }
}

impl Found {
    /// Lists the files of the task that can be seen from outside.
    fn outside(
        &mut self,
        task: &Task,
        files: &mut Files,
        allow: &Allow,
        obstacles: &mut Obstacles,
    ) -> Result<OfTask> {
        let (pid, proc) = (task.pid, &task.proc);
        let mut mapped = Vec::with_capacity(self.listed.len());
        for listed in &self.listed {
            let refused = || !obstacles.is_empty() && Mapping::of(listed, pid, None).is_err();
            mapped.push(match listed.backing() {
                Backing::File if !refused() => Some(files.mapped(pid, proc, listed)?.0),
                _ => None,
            });
        }
        let exe = files.link(pid, proc, "exe", OFlags::RDONLY)?.0;
        let locks = obstacles.note(fd::locks::dump_process(pid, &self.rows, allow))?;
        let descriptors = std::mem::take(&mut self.rows).into_iter().map(|row| {
            let (fd, close_on_exec) = (row.fd, row.cloexec);
            let description = files.descriptor(pid, row)?.0;
            Ok(Descriptor {
                fd,
                description,
                close_on_exec,
            })
        });
        Ok(OfTask {
            mapped,
            exe,
            locks: locks.flatten(),
            descriptors: Descriptors {
                descriptors: descriptors.collect::<Result<_>>()?,
            },
            place: place(pid, proc, files)?,
        })
    }
}

/// The controlling terminals of the tree's sessions must be open in it; others are noted.
fn check_terminals(found: &[Found], records: &[Record], obstacles: &mut Obstacles) -> Result<()> {
    let nodes = found.iter().map(|found| &found.node);
    for node in nodes.filter(|node| node.terminal != 0) {
        let mut terminals = records.iter().filter(|one| one.tag == fd::tags::TTY);
        let is_it = |one: &Record| control::is_terminal(&one.payload, node.terminal);
        if !terminals.any(|one| is_it(one).unwrap_or(false)) {
            let number = node.terminal;
            let what =
                format!("its controlling terminal {number:#x}, which is not open in the tree,");
            let refused = resources::Error::unsupported(node.pid, what);
            obstacles.note(Err::<(), _>(refused))?;
        }
    }
    Ok(())
}

fn place(pid: i32, proc: &Rc<Lasting>, files: &mut Files) -> Result<Place> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let cwd = files.link(pid, proc, "cwd", flags)?.0;
    let failed = |errno| Error::kernel(format!("cannot look at /proc/{pid}/root"), errno);
    let theirs = statat(&**proc, "root", AtFlags::empty()).map_err(failed)?;
    let same = (theirs.st_dev, theirs.st_ino) == files.own_root().map_err(failed)?;
    let root = if same {
        None
    } else {
        Some(files.link(pid, proc, "root", flags)?.0)
    };
    Ok(Place { cwd, root })
}
