//! Which control groups tasks and threads join that they are not forked into.

use std::collections::HashMap;

use resources::cgroup::{Cgroups, Membership, shown};
use resources::script::{PoolId, Script};
use syscalls::Sysno;

use crate::records::Saved;

/// What is known of control groups while a restore is planned.
#[derive(Clone, Debug)]
pub struct Placing {
    /// Where the tree was.
    pub cgroups: Cgroups,
    /// Where the restorer is.
    pub own: Membership,
}

/// A group to be joined.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Join {
    /// The hierarchy.
    pub hierarchy: String,
    /// The group.
    pub path: Vec<u8>,
}

impl Join {
    /// "memory:/a", for people.
    #[must_use]
    pub fn shown(&self) -> String {
        shown(&self.hierarchy, &self.path)
    }
}

/// Who joins what.
#[derive(Debug, Default)]
pub(super) struct Joins {
    by_pid: HashMap<i32, Vec<usize>>,
    /// Groups that processes join by themselves, through a descriptor of the pool.
    pub all: Vec<Join>,
    /// Threads that are to be in others than their processes. They come to life when the pool is
    /// closed, and are moved by the restorer.
    pub threads: Vec<(i32, Join)>,
}

impl Joins {
    /// What the tasks of `saved` must join, given by index from which task each is forked.
    pub fn find(placing: &Placing, saved: &Saved<'_>, forked_from: &[Option<usize>]) -> Self {
        let mut joins = Self::default();
        let cgroups = &placing.cgroups;
        let own = cgroups.hierarchies.iter();
        let own = own.map(|name| placing.own.path(name).unwrap_or(b"/").to_vec());
        let own = own.collect::<Vec<_>>();
        let there = |pid| cgroups.of(pid).map_or(&own, |members| &members.paths);
        let living = saved.tasks.iter().enumerate();
        for (index, task) in living.filter(|(_, task)| !task.threads.is_empty()) {
            let pid = task.node.pid;
            let from = forked_from[index].map(|from| saved.tasks[from].node.pid);
            let (inherited, there) = (from.map_or(&own, there), there(pid));
            for join in differing(cgroups, inherited, there) {
                joins.add(pid, join);
            }
            for thread in task.threads.iter().skip(1) {
                if let Some(members) = cgroups.of(thread.tid) {
                    let others = differing(cgroups, there, &members.paths);
                    joins.threads.extend(others.map(|join| (thread.tid, join)));
                }
            }
        }
        joins
    }

    fn add(&mut self, pid: i32, join: Join) {
        let known = self.all.iter().position(|other| *other == join);
        let at = known.unwrap_or(self.all.len());
        if known.is_none() {
            self.all.push(join);
        }
        self.by_pid.entry(pid).or_default().push(at);
    }

    /// Adds the calls by which a process joins its groups, while it has the pool's descriptors.
    /// Those of groups begin with number `first` of the pool.
    pub fn plan(&self, pid: i32, first: u32, script: &mut Script) {
        for at in self.by_pid.get(&pid).into_iter().flatten() {
            let myself = script.bytes(b"0");
            let number = u32::try_from(*at).expect("fewer than tasks");
            let args = [PoolId(first + number).into(), myself.into(), 1u32.into()];
            script.call(Sysno::write, args);
            script.note(format!("join {}", self.all[*at].shown()));
        }
    }
}

/// The groups at `there` that are others than those at `inherited`.
fn differing<'a>(
    cgroups: &'a Cgroups,
    inherited: &'a [Vec<u8>],
    there: &'a [Vec<u8>],
) -> impl Iterator<Item = Join> + 'a {
    let all = cgroups.hierarchies.iter().zip(inherited).zip(there);
    let others = all.filter(|((_, inherited), there)| inherited != there);
    others.map(|((hierarchy, _), path)| Join {
        hierarchy: hierarchy.clone(),
        path: path.clone(),
    })
}

#[cfg(test)]
mod tests {
    use image::Reader;
    use resources::cgroup::Members;

    use super::super::{Setting, plan};
    use super::*;
    use crate::sample;

    #[test]
    fn who_is_not_forked_into_its_group_joins_it() {
        let store = sample::image(sample::records(), &[]);
        let reader = Reader::open(&*store).expect("a right image");
        let saved = Saved::read(&reader).expect("right records");
        let members = |tids: &[i32], paths: [&str; 2]| Members {
            tids: tids.to_vec(),
            paths: paths.map(|path| path.as_bytes().to_vec()).to_vec(),
        };
        let cgroups = Cgroups {
            hierarchies: vec!["memory".into(), String::new()],
            members: vec![
                members(&[100], ["/own", "/a"]),
                members(&[101], ["/b", "/a"]),
                members(&[102], ["/b", "/a"]),
            ],
            ..Cgroups::default()
        };
        let placing = Placing {
            cgroups,
            own: Membership::parse(b"3:memory:/own\n0::/\n"),
        };
        let setting = Setting {
            cgroups: Some(placing),
            ..Setting::default()
        };
        let plan = plan(&reader, &saved, &setting).expect("it can be planned");
        let shown = plan.groups.iter().map(Join::shown);
        assert_eq!(shown.collect::<Vec<_>>(), [":/a", "memory:/b"]);
        let threads = plan.thread_groups.iter();
        let threads = threads.map(|(tid, join)| (*tid, join.shown()));
        assert_eq!(threads.collect::<Vec<_>>(), [(101, "memory:/b".to_owned())]);
        let joins = |tid| {
            let planned = plan.scripts.iter().find(|planned| planned.tid == tid);
            let text = planned.expect("it is planned").script.to_string();
            let lines = text.lines().filter(|line| line.contains("# join"));
            lines.map(str::to_owned).collect::<Vec<_>>()
        };
        let first = plan.descriptions;
        let own = joins(100);
        assert!(
            own.len() == 1 && own[0].starts_with(&format!("write(fd=pool[{first}], ")),
            "{own:?}"
        );
        assert!(joins(101).is_empty(), "it is moved from outside");
        assert_eq!(joins(102).len(), 1);
        assert!(joins(103).is_empty(), "a zombie stays where it was forked");
    }
}
