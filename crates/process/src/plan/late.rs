//! Descriptions that can only be opened when all tasks exist. The first task that has one opens it,
//! once; others fetch it from there (pidfd_getfd(2)). One that a certain process must open
//! ([`fd::Kind::task`]), it opens; where it is not to keep it, until all others have it.
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
    /// Where the task does not keep it: posted by each of those who fetch it, and how many those
    /// are.
    fetched: Option<(WordId, u32)>,
}

impl Source {
    /// Where description `id` is opened, of which `first` is the first task that has it.
    fn of(saved: &Saved<'_>, (id, first): (u32, Self), plan: &mut Plan) -> Result<Self> {
        let mut source = first;
        if let Some(pid) = saved.descriptions[id as usize].task() {
            let is_it = |task: &SavedTask<'_>| task.node.pid == pid && !task.threads.is_empty();
            let task = saved.tasks.iter().position(is_it);
            source.task = task.ok_or_else(|| {
                let what = format!("process {pid}, which opens description {id}, is missing");
                resources::Error::corrupt("descriptors", what)
            })?;
        }
        let others = |task: &usize| *task != source.task && has(&saved.tasks[*task], id);
        let others = (0..saved.tasks.len()).filter(others).count();
        source.word = (others > 0).then(|| plan.word());
        match numbers(&saved.tasks[source.task], id) {
            Some(numbers) => source.fd = numbers[0].fd,
            None => {
                let count = u32::try_from(others).expect("fewer tasks than records");
                source.fetched = Some((plan.word(), count));
            }
        }
        Ok(source)
    }
}

impl Late {
    pub fn find(saved: &Saved<'_>, plan: &mut Plan) -> Result<Self> {
        let mut late = Self::default();
        for (task, saved_task) in saved.tasks.iter().enumerate() {
            for descriptor in &saved_task.descriptors {
                let id = descriptor.description;
                if late.0.contains_key(&id) || !saved.descriptions[id as usize].is_late() {
                    continue;
                }
                let (fd, word, fetched) = (descriptor.fd, None, None);
                let first = Source {
                    task,
                    fd,
                    word,
                    fetched,
                };
                let source = Source::of(saved, (id, first), plan)?;
                late.0.insert(id, source);
            }
        }
        late.number(saved);
        Ok(late)
    }

    /// Gives those that a task opens for others alone the numbers that they will get.
    fn number(&mut self, saved: &Saved<'_>) {
        let mut tables: BTreeMap<usize, Table> = BTreeMap::new();
        let for_others = self.0.values_mut();
        for source in for_others.filter(|source| source.fetched.is_some()) {
            let table = tables.entry(source.task);
            let table = table.or_insert_with(|| Table::of(&saved.tasks[source.task]));
            source.fd = table.free();
            table.0.insert(source.fd);
        }
    }

    /// The numbers of a task, and those of what it opens for others.
    fn table(&self, saved: &Saved<'_>, task: usize) -> Table {
        let mut table = Table::of(&saved.tasks[task]);
        let all = self.0.values().filter(|source| source.task == task);
        let for_others = all.filter(|source| source.fetched.is_some());
        table.0.extend(for_others.map(|source| source.fd));
        table
    }

    /// Those that a task opens for others, by number.
    fn for_others(&self, task: usize) -> impl Iterator<Item = (u32, &Source)> {
        let all = self.0.iter().filter(move |(_, source)| source.task == task);
        let all = all.map(|(id, source)| (*id, source));
        all.filter(|(_, source)| source.fetched.is_some())
    }

    /// The number in a task of what description `id` needs there, if it needs any.
    fn needed(&self, saved: &Saved<'_>, (id, task): (u32, usize)) -> Result<Option<i32>> {
        let Some(needed) = needed_by(saved, id) else {
            return Ok(None);
        };
        // Its own need would not be met before.
        let is_first = |source: &&Source| source.task == task && source.fetched.is_none();
        let source = self.0.get(&needed).filter(is_first);
        let is_sound = source.is_some() && needed_by(saved, needed).is_none();
        match source.filter(|_| is_sound) {
            Some(source) => Ok(Some(source.fd)),
            None => {
                let what = format!("description {id} needs {needed}, which is not there");
                Err(resources::Error::corrupt("descriptors", what).into())
            }
        }
    }

    /// Adds the calls by which a task gets those that it has. Its descriptors have their numbers;
    /// where one of these is to be, there is a placeholder.
    pub fn plan(&self, saved: &Saved<'_>, index: usize, script: &mut Script) -> Result<()> {
        let task = &saved.tasks[index];
        for (id, source) in self.for_others(index) {
            saved.descriptions[id as usize].open_in_task(source.fd, None, script);
            if let Some(word) = source.word {
                script.post(word);
            }
        }
        let mut table = self.table(saved, index);
        let all = self.0.iter();
        let all = all.filter_map(|(id, source)| Some((id, source, numbers(task, *id)?)));
        let (own, others): (Vec<_>, Vec<_>) = all.partition(|(_, source, _)| source.task == index);
        // Nobody waits before he has opened what others may wait for.
        for (id, source, numbers) in own_in_order(saved, own) {
            let description = &saved.descriptions[*id as usize];
            let in_proc =
                [fd::tags::PROCESS_FILE, fd::tags::NAMESPACE].contains(&description.tag());
            if in_proc && task.place.root.is_some() {
                let what = format!("fd {}, a file in /proc,", numbers[0].fd);
                let why = "the task's root directory is another one, where it cannot be opened";
                let pid = task.node.pid;
                return Err(resources::Error::unsupported(pid, what).because(why).into());
            }
            let needed = self.needed(saved, (*id, index))?;
            let number = table.close(numbers[0].fd, script);
            description.open_in_task(number, needed, script);
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
            if let Some((fetched, _)) = source.fetched {
                script.post(fetched);
            }
        }
        for (_, source) in self.for_others(index) {
            let (fetched, count) = source.fetched.expect("it is for others");
            script.wait(fetched, count);
            script.call(Sysno::close, [source.fd.into()]);
        }
        Ok(())
    }
}

/// One that a task opens, and its numbers there.
type Own<'a> = (&'a u32, &'a Source, Vec<&'a Descriptor>);

/// Those that a task opens, each after what it needs, which needs nothing itself.
fn own_in_order<'a>(saved: &Saved<'_>, mut own: Vec<Own<'a>>) -> Vec<Own<'a>> {
    own.sort_by_key(|one| needed_by(saved, *one.0).is_some());
    own
}

/// The description that must be open where description `id` is opened, if there is such a one.
fn needed_by(saved: &Saved<'_>, id: u32) -> Option<u32> {
    let needed = saved.descriptions[id as usize].needs();
    needed.map(|needed| needed.0)
}

fn has(task: &SavedTask<'_>, id: u32) -> bool {
    task.descriptors.iter().any(|one| one.description == id)
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
        const F_SETFD: u32 = linux_raw_sys::general::F_SETFD;
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
    const O_CLOEXEC: u32 = linux_raw_sys::general::O_CLOEXEC;
    let flags = if wanted.close_on_exec { O_CLOEXEC } else { 0 };
    script.expect(
        Sysno::dup3,
        [from, wanted.fd.into(), flags.into()],
        wanted.fd,
    );
}

#[cfg(test)]
mod tests {
    use image::Reader;
    use prost::Message;

    use super::*;
    use crate::records::{Descriptors, tag};
    use crate::sample;

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
    fn who_does_not_keep_it_has_it_until_others_do() {
        let mut records = sample::records();
        for record in &mut records {
            let is_list = record.tag == tag::DESCRIPTORS && record.id == sample::id(sample::CHILD);
            if record.tag == fd::tags::EVENTFD {
                // One that is about the child's memory: field 1, a number.
                record.tag = fd::tags::USERFAULTFD;
                record.payload = vec![1 << 3, sample::CHILD as u8];
            } else if is_list {
                let only = Descriptor {
                    fd: 0,
                    description: 2,
                    close_on_exec: false,
                };
                let descriptors = vec![only];
                record.payload = Descriptors { descriptors }.encode_to_vec();
            }
        }
        let store = sample::image(records, &[]);
        let reader = Reader::open(&*store).expect("a right image");
        let saved = Saved::read(&reader).expect("right records");
        let mut plan = Plan::default();
        let late = Late::find(&saved, &mut plan).expect("it can be planned");
        let script = |index| {
            let mut script = Script::default();
            late.plan(&saved, index, &mut script)
                .expect("it can be planned");
            script.to_string()
        };
        let (root, child) = (script(0), script(1));
        let places = ["userfaultfd(flags=0", "futex(", "await(", "close(fd=1)"];
        let places = places.map(|what| child.find(what).unwrap_or_else(|| panic!("{child}")));
        assert!(places.is_sorted(), "{child}");
        let number =
            root.contains("pidfd_open(pid=102, flags=0)") && root.contains(", fd=1, flags=0)");
        assert!(number && root.contains("pidfd_getfd("), "{root}");
    }

    /// An image with two performance events, of which the one that needs the other is the first,
    /// and how its root would get them.
    fn group(needed: u32) -> Result<String> {
        let mut records = sample::records();
        let number = |field: u8, value: u8| [field << 3, value];
        let event = |needed: Option<u32>| {
            let attr = sys::perf_event::software(2);
            let mut payload = [1 << 3 | 2, attr.len() as u8].to_vec();
            payload.extend(attr);
            // The thread, any processor, the process that opens it.
            let root = sample::ROOT as u8;
            payload.extend([number(2, root), number(3, 1), number(4, root)].concat());
            payload.extend(needed.map(|id| number(5, id as u8)).into_iter().flatten());
            payload
        };
        for record in &mut records {
            let is_list = record.tag == tag::DESCRIPTORS && record.id == sample::id(sample::ROOT);
            if record.tag == fd::tags::EVENTFD {
                (record.tag, record.payload) = (fd::tags::PERF_EVENT, event(None));
            } else if record.tag == fd::tags::REGULAR && record.id == 2 {
                (record.tag, record.payload) = (fd::tags::PERF_EVENT, event(Some(needed)));
            } else if is_list {
                let descriptors = [(5, 2), (7, 3)].map(|(fd, description)| Descriptor {
                    fd,
                    description,
                    close_on_exec: false,
                });
                let descriptors = descriptors.to_vec();
                record.payload = Descriptors { descriptors }.encode_to_vec();
            }
        }
        let store = sample::image(records, &[]);
        let reader = Reader::open(&*store).expect("a right image");
        let saved = Saved::read(&reader).expect("right records");
        let mut plan = Plan::default();
        let late = Late::find(&saved, &mut plan)?;
        let mut script = Script::default();
        late.plan(&saved, 0, &mut script)?;
        Ok(script.to_string())
    }

    #[test]
    fn what_others_need_is_opened_before() {
        let text = group(3).expect("it can be planned");
        let places = [
            "cpu=-1, group=-1, flags=0) = 0",
            "dup3(old=0, new=7",
            "group=7, flags=0) = 0",
            "dup3(old=0, new=5",
        ];
        let places = places.map(|what| text.find(what).unwrap_or_else(|| panic!("{text}")));
        assert!(places.is_sorted(), "{text}");
        for id in [0, 2, 99] {
            let error = group(id).expect_err("it is not there").to_string();
            let want = format!("description 2 needs {id}, which is not there");
            assert!(error.contains(&want), "{error}");
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
        assert!(text.contains("dup3(old=3, new=9, flags=CLOEXEC)"), "{text}");
        assert_eq!(text.matches("close(").count(), 1, "{text}");
        // A lower number than its own is not kept.
        let mut script = Script::default();
        table.0.remove(&1);
        let number = table.close(3, &mut script);
        table.place(number, &[&low], &mut script);
        let text = script.to_string();
        assert!(
            text.contains("dup3(old=1, new=3, flags=0)") && text.contains("close(fd=1)"),
            "{text}"
        );
        assert_eq!(table.0, [0, 2, 3, 9].into());
    }
}
