//! Descriptions that can only be opened when all tasks exist. The first task that has one opens it,
//! once; others fetch it from there (pidfd_getfd(2)).
//!
//! - What: files in /proc below another root
//! - Refused: "fd …, a file in /proc", also of a namespace, as "the task's root directory is
//!   another one, where it cannot be opened".
//! - CRIU 4.2: kept.

use std::collections::{BTreeMap, BTreeSet};

use resources::fd;
use resources::script::{Arg, Script, WordId};
use syscalls::Sysno;

use super::Plan;
use crate::Result;
use crate::records::{Descriptor, Saved, SavedTask};

/// All such descriptions of a tree, by number.
#[derive(Default)]
pub(super) struct Late(BTreeMap<u32, Source>);

/// Where one is opened.
#[derive(Clone, Copy)]
struct Source {
    /// The index of the task.
    task: usize,
    /// Its number there.
    fd: i32,
    /// Posted when it is there, if others wait for it.
    word: Option<WordId>,
}

impl Late {
    pub fn find(saved: &Saved<'_>, plan: &mut Plan) -> Result<Self> {
        let mut late = Self::default();
        for (task, saved_task) in saved.tasks.iter().enumerate() {
            for descriptor in &saved_task.descriptors {
                let id = descriptor.description;
                match late.0.get_mut(&id) {
                    Some(source) if source.task != task => {
                        source.word.get_or_insert_with(|| plan.word());
                    }
                    Some(_) => {}
                    None if fd::late::is_late(saved.descriptions[id as usize])? => {
                        let (fd, word) = (descriptor.fd, None);
                        late.0.insert(id, Source { task, fd, word });
                    }
                    None => {}
                }
            }
        }
        Ok(late)
    }

    /// Adds the calls by which a task gets those that it has. Its descriptors have their numbers;
    /// where one of these is to be, there is a placeholder.
    pub fn plan(&self, saved: &Saved<'_>, index: usize, script: &mut Script) -> Result<()> {
        let task = &saved.tasks[index];
        let mut table = Table::of(task);
        let all = self.0.iter();
        let all = all.filter_map(|(id, source)| Some((id, source, numbers(task, *id)?)));
        let (own, others): (Vec<_>, Vec<_>) = all.partition(|(_, source, _)| source.task == index);
        // Nobody waits before he has opened what others may wait for.
        for (id, source, numbers) in own {
            let (tag, payload) = saved.descriptions[*id as usize];
            let in_proc = [fd::tags::PROCESS_FILE, fd::tags::NAMESPACE].contains(&tag);
            if in_proc && task.place.root.is_some() {
                let what = format!("fd {}, a file in /proc,", numbers[0].fd);
                let why = "the task's root directory is another one, where it cannot be opened";
                let pid = task.node.pid;
                return Err(resources::Error::unsupported(pid, what).because(why).into());
            }
            let number = table.close(numbers[0].fd, script);
            if let Some(kind) = fd::kind_of(tag) {
                kind.open_in_task(payload, number, script)?;
            }
            table.place(number, &numbers, script);
            if let Some(word) = source.word {
                script.post(word);
            }
        }
        for (_, source, numbers) in others {
            let word = source.word.expect("there is a second task");
            script.wait(word, 1);
            let process = table.close(numbers[0].fd, script);
            let pid = saved.tasks[source.task].node.pid;
            script.expect(Sysno::pidfd_open, [pid.into(), 0u32.into()], process);
            table.0.insert(process);
            let number = table.free();
            let args = [process.into(), source.fd.into(), 0u32.into()];
            script.expect(Sysno::pidfd_getfd, args, number);
            table.0.insert(number);
            script.call(Sysno::close, [process.into()]);
            table.0.remove(&process);
            table.place(number, &numbers, script);
        }
        Ok(())
    }
}

/// The descriptors of a description that a task has, if any.
fn numbers<'a>(task: &'a SavedTask<'_>, id: u32) -> Option<Vec<&'a Descriptor>> {
    let all = task.descriptors.iter();
    let all = all.filter(|one| one.description == id).collect::<Vec<_>>();
    (!all.is_empty()).then_some(all)
}

/// The numbers that are taken in a task at some point of its script.
struct Table(BTreeSet<i32>);

impl Table {
    fn of(task: &SavedTask<'_>) -> Self {
        Self(task.descriptors.iter().map(|one| one.fd).collect())
    }

    /// The lowest free number.
    fn free(&self) -> i32 {
        let taken = self.0.iter().copied().zip(0..);
        let gap = taken.filter(|(fd, at)| fd == at).count();
        i32::try_from(gap).expect("there are fewer descriptors")
    }

    /// Has a descriptor closed; the lowest number that is free then.
    fn close(&mut self, fd: i32, script: &mut Script) -> i32 {
        script.call(Sysno::close, [fd.into()]);
        self.0.remove(&fd);
        self.free()
    }

    /// Has what was opened as `number` get all its numbers.
    fn place(&mut self, number: i32, wanted: &[&Descriptor], script: &mut Script) {
        const F_SETFD: u32 = 2;
        self.0.insert(number);
        let mut keeps = false;
        for descriptor in wanted {
            let (fd, close_on_exec) = (descriptor.fd, descriptor.close_on_exec);
            if fd == number {
                let args = [fd.into(), F_SETFD.into(), u32::from(close_on_exec).into()];
                script.call(Sysno::fcntl, args);
                keeps = true;
            } else {
                duplicate(number.into(), descriptor, script);
            }
            self.0.insert(fd);
        }
        if !keeps {
            script.call(Sysno::close, [number.into()]);
            self.0.remove(&number);
        }
    }
}

/// Has `from` get a number that the task wants.
pub(super) fn duplicate(from: Arg, wanted: &Descriptor, script: &mut Script) {
    const O_CLOEXEC: u32 = 0o2_000_000;
    let flags = if wanted.close_on_exec { O_CLOEXEC } else { 0 };
    script.expect(
        Sysno::dup3,
        [from, wanted.fd.into(), flags.into()],
        wanted.fd,
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_free_number_is_known() {
        for (taken, free) in [
            (&[][..], 0),
            (&[0, 1, 2], 3),
            (&[0, 2, 3], 1),
            (&[1, 2], 0),
            (&[0, 1, 4, 5], 2),
        ] {
            assert_eq!(
                Table(taken.iter().copied().collect()).free(),
                free,
                "{taken:?}"
            );
        }
    }

    #[test]
    fn what_was_opened_gets_its_numbers() {
        let descriptor = |fd, close_on_exec| Descriptor {
            fd,
            description: 0,
            close_on_exec,
        };
        let (low, high) = (descriptor(3, false), descriptor(9, true));
        let mut table = Table([0, 1, 2, 3, 9].into());
        let mut script = Script::default();
        assert_eq!(table.close(3, &mut script), 3);
        table.place(3, &[&low, &high], &mut script);
        let text = script.to_string();
        assert!(text.contains("dup3(3, 9, O_CLOEXEC)"), "{text}");
        assert_eq!(text.matches("close(").count(), 1, "{text}");
        // A lower number than its own is not kept.
        let mut script = Script::default();
        table.0.remove(&1);
        let number = table.close(3, &mut script);
        table.place(number, &[&low], &mut script);
        let text = script.to_string();
        assert!(
            text.contains("dup3(1, 3, 0)") && text.contains("close(1)"),
            "{text}"
        );
        assert_eq!(table.0, [0, 2, 3, 9].into());
    }
}
