//! Which mappings a task makes before it makes its children, who keep them.

use abi::Span;
use resources::map::inherit::{may_keep_empty, same_vdso};
use resources::map::layout::Pages;
use resources::map::vdso::Way;

use super::setting::OwnVdso;
use crate::records::Saved;

/// What tasks map early, each by index of the task.
#[derive(Debug, Default)]
pub(super) struct Early {
    /// Which mappings: those that share pages with a child's, and those without pages that save
    /// most children a call.
    pub maps: Vec<Vec<bool>>,
    /// The pages of those.
    pub present: Vec<Vec<Span>>,
    /// Whether its vDSO.
    pub vdso: Vec<bool>,
}

impl Early {
    /// Finds them for tasks that inherit the memory of the task that `memory_parents` names.
    pub fn find(
        saved: &Saved<'_>,
        memory_parents: &[Option<usize>],
        pages: &[Pages],
        own: &OwnVdso,
    ) -> Self {
        let tasks = &saved.tasks;
        let mut votes = tasks
            .iter()
            .map(|task| vec![0i32; task.memory.mappings.len()])
            .collect::<Vec<_>>();
        let mut vdso_votes = vec![0i32; tasks.len()];
        let straight = |index: usize| {
            let memory: &resources::map::memory::Memory = &tasks[index].memory;
            own.way(memory) == Way::Straight
        };
        let pairs = || {
            let pairs = memory_parents.iter().enumerate();
            pairs.filter_map(|(child, parent)| Some((child, (*parent)?)))
        };
        for (child, parent) in pairs() {
            let [of_child, of_parent] = [child, parent].map(|index| &tasks[index].memory);
            let maps = of_parent.mappings.iter().zip(&mut votes[parent]);
            for (map, vote) in maps {
                let at = of_child
                    .mappings
                    .partition_point(|own| own.end <= map.start);
                let keeps = of_child.mappings.get(at).is_some_and(|own| {
                    own.start == map.start
                        && own.end == map.end
                        && may_keep_empty(map, own)
                        && pages[child].is_empty(own.span())
                });
                *vote += if keeps { 1 } else { -1 };
            }
            let keeps = straight(child) && same_vdso(of_parent, of_child);
            vdso_votes[parent] += if keeps { 1 } else { -1 };
        }
        let mut found = Self::default();
        for (index, task) in tasks.iter().enumerate() {
            let maps = task.memory.mappings.iter().zip(&votes[index]);
            let wanted = maps.map(|(map, vote)| *vote > 0 && pages[index].is_empty(map.span()));
            found.maps.push(wanted.collect());
            found.vdso.push(vdso_votes[index] > 0 && straight(index));
        }
        for (child, parent) in pairs() {
            let maps = tasks[parent].memory.mappings.iter();
            for (map, early) in maps.zip(&mut found.maps[parent]) {
                let span = map.span();
                let inherited = &pages[child].inherited;
                let from = inherited.partition_point(|run| run.end <= span.start);
                *early |= inherited.get(from).is_some_and(|run| run.start < span.end);
            }
        }
        for (index, task) in tasks.iter().enumerate() {
            let early = task.memory.mappings.iter().zip(&found.maps[index]);
            let early = early.filter(|(_, early)| **early);
            let early = early.map(|(map, _)| map.span());
            found.present.push(present(&pages[index], early));
        }
        found
    }
}

/// The pages inside of `spans`.
fn present(pages: &Pages, spans: impl Iterator<Item = Span>) -> Vec<Span> {
    let all = pages.all();
    let inside = |map: Span| {
        let from = all.partition_point(|run| run.end <= map.start);
        let inside = all[from..]
            .iter()
            .take_while(move |run| run.start < map.end);
        inside
            .map(move |run| run.intersect(map))
            .collect::<Vec<_>>()
    };
    spans.flat_map(inside).collect()
}
