//! Descriptors of a tree that nearly uses up the limit of open files.
//!
//! As a rule, what the restorer has opened stands beside the numbers that tasks give away. Where
//! the limit (`RLIMIT_NOFILE`) leaves no room for that, the numbers overlap: a task that needs the
//! restorer's no more closes all of them and fetches its own from the restorer, one after the other
//! (pidfd_getfd(2)). Where the restorer's own table is too small for all of them, it hands them in
//! portions to processes that hold them meanwhile ([`crate::portion`]), and tasks fetch them there.
//!
//! - What: limits of open files
//! - Kept: a tree that nearly uses up the limit that the restore has, or all of it where two of a
//!   task's descriptors are duplicates of each other.
//! - At a restore: "task … needs … open files, and the limit is … (RLIMIT_NOFILE)", "the restorer
//!   needs … open files, and the limit is … (RLIMIT_NOFILE)" (a dump is refused for the
//!   same reason).
//! - CRIU 4.2: raises the limit while it restores, which needs a privilege.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};

use image::Reader;
use resources::script::{Arg, PoolId, Script};
use syscalls::Sysno;

use super::late::duplicate;
use super::scripts::{Plan, Portions};
use crate::records::{Descriptor, Saved, SavedTask};
use crate::{Error, Result};

/// How many descriptors a restorer has besides those that it opens for the tree.
const OWN: u64 = 24;
const O_CLOEXEC: u32 = linux_raw_sys::general::O_CLOEXEC;
const F_SETFD: u32 = linux_raw_sys::general::F_SETFD;

/// The order in which a restorer opens descriptions: by number, but both ends of a pipe at once
/// where there are `portions`, so that few pipes have an end that waits for its own description.
pub(crate) fn order(saved: &Saved<'_>, portions: &Portions) -> Vec<u32> {
    let all = (0u32..).zip(&saved.descriptions).map(|(id, _)| id);
    if portions.count == 0 {
        return all.collect();
    }
    opening_order(saved)
}

fn opening_order(saved: &Saved<'_>) -> Vec<u32> {
    let mut groups = Vec::<Vec<u32>>::new();
    let mut known = HashMap::new();
    for (id, description) in (0u32..).zip(&saved.descriptions) {
        let new = groups.len();
        let key = description.holder();
        let at = key.map_or(new, |key| *known.entry(key).or_insert(new));
        match groups.get_mut(at) {
            Some(group) => group.push(id),
            None => groups.push(vec![id]),
        }
    }
    groups.concat()
}

fn pool(saved: &Saved<'_>, reader: &Reader) -> u64 {
    saved.descriptions.len() as u64 + OWN + 2 * reader.ancestor_files()
}

/// Refuses a tree with a task whose descriptors have no room under the limit.
///
/// # Errors
/// [`Error::Unfit`].
pub(super) fn check_tasks(saved: &Saved<'_>, limit: u64) -> Result<()> {
    for task in &saved.tasks {
        let numbers = task.descriptors.iter();
        let highest = numbers.map(|one| u64::from(one.fd.cast_unsigned()) + 1);
        let highest = highest.max().unwrap_or(0);
        let count = task.descriptors.len() as u64;
        // The pidfd by which it fetches the others.
        let pidfd = u64::from(spare(task).is_none());
        let needed = highest.max(count + pidfd);
        if needed > limit {
            let pid = task.node.pid;
            return Err(Error::Unfit(format!(
                "task {pid} needs {needed} open files, and the limit is {limit} (RLIMIT_NOFILE)"
            )));
        }
    }
    Ok(())
}

/// A descriptor of a task that is a duplicate of another one: it can come last.
fn spare<'t>(task: &'t SavedTask<'_>) -> Option<&'t Descriptor> {
    let mut known = HashSet::new();
    let mut all = task.descriptors.iter();
    all.find(|one| !known.insert(one.description))
}

/// True if tasks have to fetch their descriptors under this limit of open files: the pool does not
/// fit beside their numbers.
pub(super) fn overlaps(saved: &Saved<'_>, reader: &Reader, limit: u64) -> bool {
    let descriptors = saved.tasks.iter().flat_map(|task| &task.descriptors);
    let numbers = descriptors.map(|one| one.fd).chain([0]);
    let numbers = numbers.collect::<HashSet<_>>();
    // Some more are kept for files of pages and of control groups.
    pool(saved, reader) + numbers.len() as u64 > limit
}

/// Divides the descriptions, where the restorer cannot hold all of them under `limit`, into
/// portions. Those that the scripts of `plan` use otherwise than by fetching them stay with it.
///
/// # Errors
/// [`Error::Unfit`] where even that is not enough.
pub(super) fn divide(
    saved: &Saved<'_>,
    reader: &Reader,
    limit: u64,
    plan: &Plan,
) -> Result<Option<Portions>> {
    let pool = pool(saved, reader);
    // Twice as many as there are descriptions are never held.
    let has_room = pool + 2 * saved.descriptions.len() as u64 <= limit;
    if has_room || pool + held_meanwhile(saved) <= limit {
        return Ok(None);
    }
    let more = plan.groups.len() + plan.files.len();
    let used = resident(saved, plan);
    let objects = objects(saved)?;
    let own = OWN + 2 * reader.ancestor_files() + more as u64 + used.len() as u64 + objects;
    let parked = opening_order(saved);
    let parked = parked.into_iter().filter(|id| !used.contains(id));
    let parked = parked.collect::<Vec<_>>();
    let room = limit.saturating_sub(own);
    let parked_count = parked.len() as u64;
    // A quarter: what descriptions need of each other while they are made has room, too. Where that
    // is little, as many as make the fewest descriptors together with the portions' pidfds.
    let size = (room / 4).max(parked_count.isqrt()).max(1);
    let count = parked_count.div_ceil(size);
    let needed = own + size + count;
    if needed > limit || room < 8 {
        let needed = needed.max(own + 8);
        return Err(Error::Unfit(format!(
            "the restorer needs {needed} open files, and the limit is {limit} (RLIMIT_NOFILE)"
        )));
    }
    let mut portions = Portions::default();
    let size = usize::try_from(size).unwrap_or(usize::MAX);
    for ids in parked.chunks(size) {
        let portion = portions.count;
        portions.of.extend(ids.iter().map(|id| (*id, portion)));
        portions.count += 1;
    }
    Ok(Some(portions))
}

/// The most ends of pipes that wait for their descriptions while these are opened by number.
fn held_meanwhile(saved: &Saved<'_>) -> u64 {
    let all = saved.descriptions.iter().enumerate();
    let keys = all.filter_map(|(id, description)| Some((id, description.holder()?)));
    let last = keys.clone().map(|(id, key)| (key, id));
    let last = last.collect::<HashMap<_, _>>();
    let (mut open, mut most) = (HashSet::new(), 0);
    for (id, key) in keys {
        open.insert(key);
        // The others come, when these have gone.
        let later = saved.descriptions.len() - id - 1;
        most = most.max((2 * open.len()).saturating_sub(later));
        if last.get(&key) == Some(&id) {
            open.remove(&key);
        }
    }
    most as u64
}

/// The descriptions that the restorer keeps.
fn resident(saved: &Saved<'_>, plan: &Plan) -> BTreeSet<u32> {
    let used = plan.scripts.iter().flat_map(|one| one.script.inherited());
    let used = used.map(|id| id.0).filter(|id| *id < plan.descriptions);
    let all = (0u32..).zip(&saved.descriptions);
    let kept = all.filter(|(_, description)| description.stays());
    let mapped = saved.tasks.iter().flat_map(|task| &task.memory.mappings);
    let mapped = mapped.filter_map(|mapping| mapping.file);
    let used = used.chain(kept.map(|(id, _)| id)).chain(mapped);
    used.collect()
}

/// How many objects of memory the restorer has a descriptor of besides their descriptions.
fn objects(saved: &Saved<'_>) -> Result<u64> {
    let mut objects = HashSet::new();
    for description in &saved.descriptions {
        let memory = description.memory()?;
        objects.extend(memory.map(|memory| (memory.tag, memory.first)));
    }
    Ok(objects.len() as u64)
}

/// Adds the calls by which a task fetches all descriptors, and has no others.
pub(super) fn fetch(task: &SavedTask<'_>, plan: &Plan, script: &mut Script) {
    let restorer = plan.restorer().expect("tasks fetch their descriptors");
    let all = task.descriptors.iter().map(|one| one.fd);
    let all = all.collect::<BTreeSet<_>>();
    // Where no number is free, that of a duplicate, which comes last.
    let spare = spare(task).filter(|_| is_dense(&all));
    let process = spare.map_or_else(|| lowest_free(&all), |one| one.fd);
    // It may be the restorer's own number already.
    let args = [restorer.into(), process.into(), O_CLOEXEC.into()];
    script.attempt(Sysno::dup3, args);
    if process > 0 {
        script.call(Sysno::close_range, [0u32.into(), (process - 1).into()]);
    }
    script.call(Sysno::close_range, [(process + 1).into(), u32::MAX.into()]);
    let mut groups = BTreeMap::<Option<u32>, Vec<&Descriptor>>::new();
    for one in &task.descriptors {
        if spare.is_none_or(|spare| spare.fd != one.fd) {
            let portion = plan.portions.of(one.description);
            groups.entry(portion).or_default().push(one);
        }
    }
    let mut groups = groups.into_iter().collect::<Vec<_>>();
    // The largest comes last: until then there is room for a second pidfd.
    groups.sort_by_key(|(_, group)| group.len());
    let last = groups.len().saturating_sub(1);
    let mut fetching = Fetching {
        taken: [process].into(),
        free_from: 0,
        known: HashMap::new(),
    };
    for (at, (portion, group)) in groups.into_iter().enumerate() {
        let Some(portion) = portion else {
            fetching.all(process, group, script);
            continue;
        };
        let holder = plan.portion(portion);
        if at == last {
            let got = fetching.get(process, holder, script);
            let args = [got.into(), process.into(), O_CLOEXEC.into()];
            script.expect(Sysno::dup3, args, process);
            script.call(Sysno::close, [got.into()]);
            fetching.all(process, group, script);
        } else {
            let pidfd = fetching.pidfd(process, (holder, &group), script);
            fetching.all(pidfd, group, script);
            fetching.close(pidfd, script);
        }
    }
    match spare {
        Some(spare) => {
            let other = fetching.known[&spare.description];
            duplicate(other.into(), spare, script);
        }
        None => {
            script.call(Sysno::close, [process.into()]);
        }
    }
}

/// True if all numbers up to the highest are in use.
fn is_dense(numbers: &BTreeSet<i32>) -> bool {
    let end = numbers.last().map_or(0, |last| last + 1);
    lowest_free(numbers) == end
}

/// The table of a task that fetches its descriptors.
struct Fetching {
    taken: BTreeSet<i32>,
    /// All numbers below are taken.
    free_from: i32,
    /// By description: a number that it has already.
    known: HashMap<u32, i32>,
}

impl Fetching {
    /// Fetches the pidfd `holder` from the restorer, to a number that none of `group` gets.
    fn pidfd(
        &mut self,
        restorer: i32,
        (holder, group): (PoolId, &[&Descriptor]),
        script: &mut Script,
    ) -> i32 {
        let got = self.get(restorer, holder, script);
        let mut apart = self.taken.clone();
        apart.extend(group.iter().map(|one| one.fd));
        let number = lowest_free(&apart);
        self.taken.insert(got);
        if group.iter().all(|one| one.fd != got) {
            return got;
        }
        let args = [got.into(), number.into(), O_CLOEXEC.into()];
        script.expect(Sysno::dup3, args, number);
        self.taken.insert(number);
        self.close(got, script);
        number
    }

    fn get(&mut self, process: i32, id: PoolId, script: &mut Script) -> i32 {
        while self.taken.contains(&self.free_from) {
            self.free_from += 1;
        }
        let got = self.free_from;
        let args: [Arg; 3] = [process.into(), id.into(), 0u32.into()];
        script.expect(Sysno::pidfd_getfd, args, got);
        got
    }

    fn close(&mut self, number: i32, script: &mut Script) {
        script.call(Sysno::close, [number.into()]);
        self.taken.remove(&number);
        self.free_from = self.free_from.min(number);
    }

    /// Fetches descriptors from the process behind the pidfd `process`.
    fn all(&mut self, process: i32, mut group: Vec<&Descriptor>, script: &mut Script) {
        group.sort_unstable_by_key(|descriptor| descriptor.fd);
        for descriptor in group {
            let (fd, id) = (descriptor.fd, descriptor.description);
            if let Some(other) = self.known.get(&id) {
                duplicate((*other).into(), descriptor, script);
            } else {
                let got = self.get(process, PoolId(id), script);
                if got != fd {
                    duplicate(got.into(), descriptor, script);
                    script.call(Sysno::close, [got.into()]);
                } else if !descriptor.close_on_exec {
                    script.call(Sysno::fcntl, [fd.into(), F_SETFD.into(), 0u32.into()]);
                }
                self.known.insert(id, fd);
            }
            self.taken.insert(fd);
        }
    }
}

/// The lowest number that is free.
fn lowest_free(taken: &BTreeSet<i32>) -> i32 {
    let gap = taken.iter().copied().zip(0..);
    let gap = gap.take_while(|(fd, at)| fd == at).count();
    i32::try_from(gap).expect("there are fewer descriptors")
}

#[cfg(test)]
mod tests {
    use super::super::{Setting, plan};
    use super::*;
    use crate::records::Descriptor;
    use crate::sample;

    fn scripts(limit: u64) -> Result<String> {
        let store = sample::image(sample::records(), &[]);
        let reader = Reader::open(&*store).expect("a right image");
        let saved = Saved::read(&reader).expect("right records");
        let setting = Setting {
            open_files: limit,
            ..Setting::default()
        };
        let plan = plan(&reader, &saved, &setting)?;
        assert_eq!(plan.fetches, plan.restorer().is_some());
        Ok(plan.scripts[0].script.to_string())
    }

    #[test]
    fn tasks_fetch_what_has_no_room_beside_them() {
        let enough = scripts(1 << 20).expect("it can be planned");
        assert!(!enough.contains("pidfd_getfd"), "{enough}");
        // The sample has four descriptions.
        let text = scripts(OWN + 4).expect("it can be planned");
        assert!(text.contains("pidfd_getfd("), "{text}");
        let error = scripts(OWN + 3).expect_err("too little").to_string();
        let limit = OWN + 3;
        let want = format!(" open files, and the limit is {limit} (RLIMIT_NOFILE)");
        assert!(
            error.starts_with("the restorer needs ") && error.ends_with(&want),
            "{error}"
        );
    }

    #[test]
    fn a_task_without_room_is_named() {
        let error = scripts(1).expect_err("too little").to_string();
        assert!(
            error.starts_with("task ")
                && error.ends_with(" open files, and the limit is 1 (RLIMIT_NOFILE)"),
            "{error}"
        );
    }

    #[test]
    fn fetched_descriptors_get_their_numbers_in_order() {
        let descriptor = |fd, description, close_on_exec| Descriptor {
            fd,
            description,
            close_on_exec,
        };
        let store = sample::image(sample::records(), &[]);
        let reader = Reader::open(&*store).expect("a right image");
        let mut saved = Saved::read(&reader).expect("right records");
        saved.tasks[0].descriptors = vec![
            descriptor(0, 8, false),
            descriptor(1, 9, true),
            descriptor(5, 8, true),
            descriptor(3, 7, false),
        ];
        let mut script = Script::default();
        let plan = Plan {
            descriptions: 20,
            fetches: true,
            ..Plan::default()
        };
        fetch(&saved.tasks[0], &plan, &mut script);
        insta::assert_snapshot!(script.to_string(), @r"
        dup3(old=pool[20], new=2, flags=CLOEXEC) = ?
        close_range(first=0, last=1, flags=0)
        close_range(first=3, last=4294967295, flags=0)
        pidfd_getfd(pidfd=2, fd=pool[8], flags=0) = 0
        fcntl(fd=0, F_SETFD, flags=0)
        pidfd_getfd(pidfd=2, fd=pool[9], flags=0) = 1
        pidfd_getfd(pidfd=2, fd=pool[7], flags=0) = 3
        fcntl(fd=3, F_SETFD, flags=0)
        dup3(old=0, new=5, flags=CLOEXEC) = 5
        close(fd=2)
        ");
    }

    fn descriptor(fd: i32, description: u32) -> Descriptor {
        Descriptor {
            fd,
            description,
            close_on_exec: false,
        }
    }

    /// Makes the calls of a script that fetches `descriptors`, from the restorer or from portions,
    /// in a table of `limit` numbers, and gives the descriptions that are there in the end.
    fn replay(descriptors: Vec<Descriptor>, of: &[(u32, u32)], limit: i32) -> BTreeMap<i32, u32> {
        let store = sample::image(sample::records(), &[]);
        let reader = Reader::open(&*store).expect("a right image");
        let mut saved = Saved::read(&reader).expect("right records");
        saved.tasks[0].descriptors = descriptors;
        check_tasks(&saved, 1 << 20).expect("there is room");
        let portions = Portions {
            of: of.iter().copied().collect(),
            count: of.iter().map(|one| one.1 + 1).max().unwrap_or(0),
        };
        let plan = Plan {
            descriptions: 1000,
            fetches: true,
            portions,
            ..Plan::default()
        };
        let mut script = Script::default();
        fetch(&saved.tasks[0], &plan, &mut script);
        let mut table = BTreeMap::<i32, u32>::new();
        for step in &script.steps {
            let number = |at: usize| match step.args[at] {
                Arg::Value(value) => i32::try_from(value.min(1 << 30)).expect("capped"),
                other => panic!("{other:?} is no number"),
            };
            match (step.call, step.args[0]) {
                (Sysno::dup3, Arg::Pool(PoolId(id))) => {
                    assert!(number(1) < limit, "{script}");
                    table.insert(number(1), id);
                }
                (Sysno::dup3, _) => {
                    assert!(number(1) < limit, "{script}");
                    table.insert(number(1), table[&number(0)]);
                }
                (Sysno::close_range, _) => {
                    table.retain(|fd, _| !(number(0)..=number(1)).contains(fd))
                }
                (Sysno::close, _) => {
                    table.remove(&number(0)).expect("it is open");
                }
                (Sysno::pidfd_getfd, _) => {
                    let Arg::Pool(PoolId(id)) = step.args[1] else {
                        panic!("{script}");
                    };
                    let holder = plan.portions.of(id).map(|portion| plan.portion(portion).0);
                    let holder = holder.unwrap_or(1000);
                    assert_eq!(table[&number(0)], holder, "{script}");
                    let mut free = 0..limit;
                    let got = free.find(|fd| !table.contains_key(fd));
                    let got = got.expect("a number is free");
                    assert_eq!(step.extra, got.into(), "{script}");
                    table.insert(got, id);
                }
                (Sysno::fcntl, _) => assert!(table.contains_key(&number(0)), "{script}"),
                other => panic!("{other:?} is unexpected"),
            }
        }
        table
    }

    fn wanted(descriptors: &[Descriptor]) -> BTreeMap<i32, u32> {
        let all = descriptors.iter();
        all.map(|one| (one.fd, one.description)).collect()
    }

    #[test]
    fn descriptors_come_from_portions_with_one_number_to_spare() {
        for portions in 0..5u32 {
            for gap in 0..20 {
                let numbers = (0..20).filter(|fd| *fd != gap);
                // In an order that has the portions mixed.
                let one = |fd: i32| descriptor(fd, (fd.cast_unsigned() * 7) % 20);
                let all = numbers.map(one).collect::<Vec<_>>();
                let of = (0..20).filter(|id| id % (portions + 1) != 0);
                let of = of.map(|id| (id, id % (portions + 1) - 1));
                let want = wanted(&all);
                assert_eq!(replay(all, &of.collect::<Vec<_>>(), 20), want);
            }
        }
    }

    #[test]
    fn a_full_table_comes_back_where_two_descriptors_are_one() {
        let all = || {
            let mut all = (0..20).map(|fd| descriptor(fd, fd.cast_unsigned()));
            all.by_ref()
                .take(19)
                .chain([descriptor(19, 3)])
                .collect::<Vec<_>>()
        };
        let of = (5..15).map(|id| (id, id / 10)).collect::<Vec<_>>();
        for of in [&[][..], &of] {
            assert_eq!(replay(all(), of, 20), wanted(&all()));
        }
    }
}
