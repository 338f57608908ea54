//! What can be seen of a tree's files from outside, before its tasks are made to call anything.
//!
//! - What: controlling terminals
//! - Kept: of sessions of the tree, where a task has it open.
//! - Refused: "its controlling terminal …, which is not open in the tree".
//! - CRIU 4.2: kept, where a task has it or its other side open; otherwise not known.

use std::rc::Rc;

use freeze::{Frozen, Task};
use resources::fd::tty::control;
use resources::map::listing::Backing;
use resources::map::memory::Mapping;
use resources::{Allow, fd};
use rustix::fs::{AtFlags, OFlags, statat};
use sys::close::Deferred;
use sys::process::Process;

use super::files::{self, Claimed, Described, Files};
use super::found::{Found, OfTask};
use super::how::How;
use super::untold::Untold;
use crate::obstacles::Obstacles;
use crate::records::{Descriptor, Descriptors, Place};
use crate::{Error, Result};

/// The files of a tree, listed from outside, and each claimed by its kind.
pub(super) struct Listed {
    files: Files,
    claimed: Claimed,
    /// By task; none of a zombie.
    of_tasks: Vec<Option<OfTask>>,
}

/// The files of a tree, described.
pub(super) struct Outside {
    files: Files,
    pub described: Described,
    /// By task; none of a zombie.
    pub of_tasks: Vec<Option<OfTask>>,
}

impl Listed {
    /// Lists and claims all files, before any task is made to call anything and any packet is held
    /// back; those that no kind claims are noted. Takes the rows out of `found`, but for those of
    /// which tasks must be asked.
    pub fn new(
        frozen: &Frozen,
        found: &mut [Found],
        allow: &Allow,
        obstacles: &mut Obstacles,
    ) -> Result<Self> {
        let mut files = Files::default();
        frozen.tasks.iter().for_each(|task| files.know(task));
        let tasks = frozen.tasks.iter().zip(found);
        let of_tasks = tasks.map(|(task, found)| {
            let living = !task.is_zombie();
            let look = || found.outside(task, &mut files, allow, obstacles);
            living.then(look).transpose()
        });
        let of_tasks = of_tasks.collect::<Result<Vec<_>>>()?;
        let claimed = Claimed::of(&files, obstacles)?;
        Ok(Self {
            files,
            claimed,
            of_tasks,
        })
    }

    /// The descriptions of kinds that work while the tree is stopped, each with the descriptors
    /// that tasks have of it.
    pub fn working(
        &self,
    ) -> impl Iterator<Item = (&fd::Open<'_>, &'static dyn fd::ErasedKind, Vec<(i32, i32)>)> {
        let all = self.files.all().iter();
        let kinds = all.map(|open| (open, self.claimed.kind(open.id.0)));
        let working = kinds.filter_map(|(open, kind)| Some((open, kind.filter(|k| k.works())?)));
        working.map(|(open, kind)| (open, kind, self.files.numbers(open.id)))
    }

    /// The processes of the tree that have not ended.
    pub fn processes(&self) -> Vec<Process> {
        self.files.processes()
    }

    /// The descriptions of userfaultfds.
    pub fn userfaultfds(&self) -> impl Iterator<Item = &fd::Open<'_>> {
        self.files.userfaultfds()
    }

    /// A description.
    pub fn open(&self, id: fd::DescriptionId) -> &fd::Open<'_> {
        self.files.open(id.0)
    }

    /// The file of a task's mapping, both by index, and its kind.
    pub fn mapped(
        &self,
        task: usize,
        mapping: usize,
    ) -> Option<(&fd::Open<'_>, Option<&'static dyn fd::ErasedKind>)> {
        let id = self.of_tasks[task].as_ref()?.mapped[mapping]?;
        Some((self.files.open(id), self.claimed.kind(id)))
    }

    /// Takes over what tasks were asked of their descriptions.
    pub fn learn(&mut self, found: &[Found]) {
        for found in found {
            for row in &found.rows {
                self.files.learn(found.node.pid, row);
            }
        }
    }

    /// Describes all files.
    pub fn describe(
        mut self,
        found: &[Found],
        how: &mut How<'_>,
        obstacles: &mut Obstacles,
    ) -> Result<Outside> {
        let described = files::describe(&mut self.files, self.claimed, how, obstacles)?;
        check_terminals(found, &described.descriptions, obstacles)?;
        Ok(Outside {
            files: self.files,
            described,
            of_tasks: self.of_tasks,
        })
    }
}

impl Outside {
    /// Notes what is another way than it was described.
    pub fn check_last(&self, obstacles: &mut Obstacles) -> Result<()> {
        let descriptions = self.described.descriptions.iter();
        let mut checked =
            descriptions.map(|(id, description)| description.check_last(self.files.open(id.0)));
        checked.try_for_each(|checked| obstacles.note(checked).map(drop))
    }

    /// Takes over what tasks were asked of their descriptors.
    pub fn learn(&mut self, found: &[Found]) {
        for (found, of_task) in found.iter().zip(&mut self.of_tasks) {
            let descriptors = of_task.iter_mut();
            let descriptors = descriptors.flat_map(|of| &mut of.descriptors.descriptors);
            // Those of a task are in the same order, and either all or none of them are here.
            for (row, descriptor) in found.rows.iter().zip(descriptors) {
                descriptor.close_on_exec = row.cloexec;
            }
        }
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
        let (pid, process, proc) = (task.pid(), &task.process, &task.proc);
        let mut mapped = Vec::with_capacity(self.listed.len());
        for listed in &self.listed {
            let refused = || !obstacles.is_empty() && Mapping::of(listed, pid, None).is_err();
            mapped.push(match listed.backing() {
                // Found by their descriptors.
                Backing::File if listed.is_ring() || listed.is_socket() => None,
                // Of its context.
                Backing::File if listed.is_aio() => None,
                Backing::File if !refused() => Some(files.mapped(process, proc, listed)?.0),
                _ => None,
            });
        }
        let exe = files.link(process, proc, "exe", OFlags::RDONLY)?.0;
        let locks = obstacles.note(fd::locks::dump_process(pid, &self.rows, allow))?;
        let rows = match Untold::is_among(&self.rows) {
            true => self.rows.clone(),
            false => std::mem::take(&mut self.rows),
        };
        let descriptors = rows.into_iter().map(|row| {
            let (fd, close_on_exec) = (row.fd, row.cloexec);
            let description = files.descriptor(process, row)?.0;
            Ok(Descriptor {
                fd,
                description,
                close_on_exec,
            })
        });
        let descriptors = descriptors.collect::<Result<_>>()?;
        for (listed, mapped) in self.listed.iter().zip(&mut mapped) {
            let ring = match listed.backing() {
                Backing::File if listed.is_ring() || listed.is_socket() => files.ring(pid, listed),
                _ => continue,
            };
            *mapped = obstacles.note(ring)?.map(|id| id.0);
        }
        Ok(OfTask {
            mapped,
            exe,
            locks: locks.flatten(),
            descriptors: Descriptors { descriptors },
            place: place(process, proc, files)?,
        })
    }
}

/// The controlling terminals of the tree's sessions must be open in it; others are noted.
fn check_terminals(
    found: &[Found],
    all: &[(fd::DescriptionId, Box<dyn fd::Description>)],
    obstacles: &mut Obstacles,
) -> Result<()> {
    let nodes = found.iter().map(|found| &found.node);
    for node in nodes.filter(|node| node.terminal != 0) {
        let number = node.terminal;
        if !all
            .iter()
            .any(|(_, one)| control::is_terminal(&**one, number))
        {
            let what =
                format!("its controlling terminal {number:#x}, which is not open in the tree,");
            let refused = resources::Error::unsupported(node.pid, what);
            obstacles.note(Err::<(), _>(refused))?;
        }
    }
    Ok(())
}

fn place(process: &Process, proc: &Rc<Deferred>, files: &mut Files) -> Result<Place> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY;
    let cwd = files.link(process, proc, "cwd", flags)?.0;
    let pid = process.pid();
    let failed = |errno| Error::kernel(format!("cannot look at /proc/{pid}/root"), errno);
    let theirs = statat(&**proc, "root", AtFlags::empty()).map_err(failed)?;
    let same = (theirs.st_dev, theirs.st_ino) == files.own_root().map_err(failed)?;
    let root = if same {
        None
    } else {
        Some(files.link(process, proc, "root", flags)?.0)
    };
    Ok(Place { cwd, root })
}

#[cfg(test)]
mod tests {
    use freeze::freeze;
    use resources::fd::tcp::newcomers::Newcomers;
    use rustix::thread::CapabilitySet;
    use testkit::program::{Program, Spawned};

    use crate::collect::memory_view::Fresh;
    use crate::collect::{How, collect};
    use crate::homework::Homework;
    use crate::{Error, Obstacle};

    /// A python program that has done `lines`, and waits.
    fn python(lines: &str) -> (Spawned, tempfile::TempDir) {
        let folder = tempfile::tempdir().expect("a folder");
        let ready = folder.path().join("ready");
        let text = format!(
            "import os, signal, socket, sys\n{lines}\nopen(sys.argv[1], 'w').close()\n\
             while True: signal.pause()\n"
        );
        let program = Program::new("python3").args(["-c", &text]).arg(&ready);
        let program = program.spawn();
        program.wait_file(&ready);
        (program, folder)
    }

    /// How often a task was taken from the processor: as often as it ran.
    fn switches(pid: u32) -> String {
        let status = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
        let lines = status.lines().filter(|line| line.contains("ctxt_switches"));
        lines.collect::<Vec<_>>().join(" ")
    }

    /// Collects a tree with TCP connections; what is in the way, and whether its root ran.
    #[track_caller]
    fn refused(program: &Spawned) -> (Vec<Obstacle>, bool) {
        let mut frozen = freeze(program.pid().cast_signed(), None).expect("it can be stopped");
        let before = switches(program.pid());
        let allow = resources::Allow {
            tcp_established: true,
            ..resources::Allow::default()
        };
        let how = How {
            allow: &allow,
            stay: false,
            namespaces: crate::options::OwnNamespaces::default(),
            newcomers: &mut Newcomers::of(0, false, false),
            homework: &mut Homework::default(),
        };
        let collected = collect(&mut frozen, how, &mut Fresh::default());
        let ran = switches(program.pid()) != before;
        match collected {
            Err(Error::Obstacles(all)) => (all, ran),
            Err(error) => panic!("{error:?}"),
            Ok(_) => panic!("it is not refused"),
        }
    }

    #[test]
    fn no_task_calls_anything_before_all_descriptions_are_claimed() {
        testkit::needs_root!();
        testkit::needs_program!("python3");
        // Whether execve closes the terminal only the task can say.
        let lines = "pty = os.openpty()\nother = open('/proc/1/status')";
        let (program, _folder) = python(lines);
        let (obstacles, ran) = refused(&program);
        assert!(
            obstacles[0].what.contains("/proc/1/status"),
            "{obstacles:?}"
        );
        assert!(!ran);
    }

    #[test]
    fn no_packet_is_held_back_before_all_descriptions_are_claimed() {
        testkit::needs_root!();
        testkit::needs_program!("python3");
        let lines = "server = socket.create_server(('127.0.0.1', 0))\n\
                     client = socket.create_connection(server.getsockname())\n\
                     accepted = server.accept()\n\
                     ends = socket.socketpair()\n\
                     other = os.open('/proc/1/status', os.O_RDONLY)\n\
                     socket.send_fds(ends[0], [b'x'], [other])\n\
                     os.close(other)";
        let (program, _folder) = python(lines);
        // Who lacks the right to make rules fails where one is made. Capabilities are a thread's
        // own, so other tests keep theirs.
        let thread = std::thread::spawn(move || {
            let mut own = rustix::thread::capabilities(None).expect("the own capabilities");
            own.effective -= CapabilitySet::NET_ADMIN;
            rustix::thread::set_capabilities(None, own).expect("fewer capabilities");
            refused(&program)
        });
        let (obstacles, ran) = thread.join().expect("no panic");
        assert!(
            obstacles[0].what.contains("/proc/1/status"),
            "{obstacles:?}"
        );
        assert!(!ran);
    }
}
