//! Descriptors of a tree that nearly uses up the limit of open files.
//!
//! As a rule, what the restorer has opened stands beside the numbers that tasks give away. Where
//! the limit (`RLIMIT_NOFILE`) leaves no room for that, the numbers overlap: a task that needs the
//! restorer's no more closes all of them and fetches its own from the restorer, one after the other
//! (pidfd_getfd(2)).
//!
//! - What: limits of open files
//! - Kept: a tree that nearly uses up the limit that the restore has.
//! - At a restore: "the image needs … open files, and the limit is … (RLIMIT_NOFILE)" (a dump is
//!   refused for the same reason).
//! - CRIU 4.2: raises the limit while it restores, which needs a privilege.

use std::collections::{BTreeSet, HashMap};

use image::Reader;
use resources::script::{PoolId, Script};
use syscalls::Sysno;

use super::Plan;
use super::late::duplicate;
use crate::records::{Saved, SavedTask};
use crate::{Error, Result};

/// How many descriptors a restorer has besides those that it opens for the tree.
const OWN: u64 = 24;
/// How many free numbers a task needs to get its descriptors.
const FREE: u64 = 2;

/// Finds out whether tasks have to fetch their descriptors where `limit` is that of open files.
///
/// # Errors
/// [`Error::Unfit`] where even that is not enough.
pub(super) fn find(saved: &Saved<'_>, reader: &Reader, limit: u64, plan: &mut Plan) -> Result<()> {
    let descriptors = saved.tasks.iter().flat_map(|task| &task.descriptors);
    let numbers = descriptors.map(|one| u64::from(one.fd.cast_unsigned()));
    let numbers = numbers.chain([0]).collect::<BTreeSet<_>>();
    let own = OWN + 2 * reader.ancestor_files();
    let pool = saved.descriptions.len() as u64 + own;
    let highest = numbers.last().map_or(0, |number| number + 1);
    let tables = saved.tasks.iter().map(|task| task.descriptors.len() as u64);
    let needed = tables.map(|count| count + FREE).chain([pool, highest]);
    let needed = needed.max().unwrap_or_default();
    if needed > limit {
        return Err(Error::Unfit(format!(
            "the image needs {needed} open files, and the limit is {limit} (RLIMIT_NOFILE)"
        )));
    }
    // Some more are kept for files of pages and of control groups.
    plan.fetches = pool + numbers.len() as u64 > limit;
    Ok(())
}

/// Adds the calls by which a task fetches all descriptors from the restorer, whose pidfd is
/// `restorer`, and has no others.
pub(super) fn fetch(task: &SavedTask<'_>, restorer: PoolId, script: &mut Script) {
    const O_CLOEXEC: u32 = 0o2_000_000;
    const F_SETFD: u32 = 2;
    let mut sorted = task.descriptors.iter().collect::<Vec<_>>();
    sorted.sort_unstable_by_key(|descriptor| descriptor.fd);
    let mut taken = sorted.iter().map(|one| one.fd).collect::<BTreeSet<_>>();
    let process = lowest_free(&taken);
    // It may be the restorer's own number already.
    let args = [restorer.into(), process.into(), O_CLOEXEC.into()];
    script.attempt(Sysno::dup3, args);
    if process > 0 {
        script.call(Sysno::close_range, [0u32.into(), (process - 1).into()]);
    }
    script.call(Sysno::close_range, [(process + 1).into(), u32::MAX.into()]);
    taken.clear();
    taken.insert(process);
    let mut known = HashMap::<u32, i32>::new();
    for descriptor in sorted {
        let (fd, id) = (descriptor.fd, descriptor.description);
        if let Some(other) = known.get(&id) {
            duplicate((*other).into(), descriptor, script);
        } else {
            let got = lowest_free(&taken);
            let args = [process.into(), PoolId(id).into(), 0u32.into()];
            script.expect(Sysno::pidfd_getfd, args, got);
            if got != fd {
                duplicate(got.into(), descriptor, script);
                script.call(Sysno::close, [got.into()]);
            } else if !descriptor.close_on_exec {
                script.call(Sysno::fcntl, [fd.into(), F_SETFD.into(), 0u32.into()]);
            }
            known.insert(id, fd);
        }
        taken.insert(fd);
    }
    script.call(Sysno::close, [process.into()]);
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
        let want = format!(
            "the image needs {} open files, and the limit is {} (RLIMIT_NOFILE)",
            OWN + 4,
            OWN + 3
        );
        assert_eq!(error, want);
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
        fetch(&saved.tasks[0], PoolId(20), &mut script);
        insta::assert_snapshot!(script.to_string(), @r"
        dup3(pool[20], 2, O_CLOEXEC) = ?
        close_range(0, 1, 0)
        close_range(3, 4294967295, 0)
        pidfd_getfd(2, pool[8], 0) = 0
        fcntl(0, F_SETFD, 0)
        pidfd_getfd(2, pool[9], 0) = 1
        pidfd_getfd(2, pool[7], 0) = 3
        fcntl(3, F_SETFD, 0)
        dup3(0, 5, O_CLOEXEC) = 5
        close(2)
        ");
    }
}
