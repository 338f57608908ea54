//! Which pages of which task are stored, and which ones a child has of its parent.

use std::collections::HashMap;
use std::ops::Range;

use abi::Span;
use image::{Run, RunKind, SpaceId};
use memory::PageMaps;
use memory::scan::{Area, LARGE_BYTES};
use pages::Extent;
use resources::map::listing::Listed;
use resources::map::memory::Mapping;
use resources::map::registered::Registration;

use super::memory_view::MemoryView;
use crate::Result;
use crate::records::{Node, Tree};
use abi::spans::{Spans, intersect, subtract};
use sys::process::Process;

/// The private pages of all tasks.
#[derive(Default)]
pub(super) struct Spaces {
    own: Vec<Own>,
    /// Mappings in which pages may be shared by copy-on-write, with whomever.
    shared: HashMap<i32, Vec<Span>>,
    /// Pages in them that only the task has.
    alone: HashMap<i32, Spans>,
    same: Vec<Run>,
    /// Private mappings of files, by device and inode.
    files: HashMap<(u64, u64), Vec<(SpaceId, Span)>>,
    maps: PageMaps,
}

/// The private pages of one task.
struct Own {
    process: Process,
    space: SpaceId,
    pages: Vec<Span>,
}

/// Pages to be read from one task.
pub(crate) struct Memory {
    pub process: Process,
    pub space: SpaceId,
    /// Whether they must be read without making them the task's own.
    pub quiet: bool,
    pub extents: Vec<Extent>,
}

const MAP_DROPPABLE: u32 = linux_raw_sys::general::MAP_DROPPABLE;

impl Spaces {
    /// Finds the private pages of a task, and the guard regions of its mappings.
    pub fn scan(
        &mut self,
        (process, space): (&Process, SpaceId),
        mappings: &mut [Mapping],
        (listed, registered): (&[Listed], &[Registration]),
        view: &mut dyn MemoryView,
    ) -> Result<()> {
        let pid = process.pid();
        let shared = listed.iter().filter(|listed| listed.may_share());
        let shared = shared.map(|listed| listed.span).collect();
        self.shared.insert(pid, shared);
        for listed in listed.iter().filter(|one| one.ino != 0 && !one.shared) {
            let file = self.files.entry((listed.dev, listed.ino)).or_default();
            file.push((space, listed.span));
        }
        let with_pages =
            |map: &&mut Mapping| map.is_private() && map.flags & MAP_DROPPABLE != MAP_DROPPABLE;
        let (mut private, mut areas, mut between_bytes) = (Vec::new(), Vec::new(), 0);
        for map in mappings {
            if !with_pages(&map) {
                between_bytes += map.span().bytes();
                continue;
            }
            // Huge pages are looked at as a file's are: nobody protects them to copy them later.
            let is_huge = map.huge_page_bytes().is_some();
            areas.push(Area {
                span: map.span(),
                file: !map.is_anonymous() || is_huge,
                apart: std::mem::take(&mut between_bytes) >= LARGE_BYTES,
            });
            private.push(map);
        }
        let found = view.pages(process, &areas, &mut self.maps)?;
        let mut pages = Vec::new();
        for (map, found) in private.iter_mut().zip(found) {
            let guards = found.guards.iter();
            map.guards = guards
                .flat_map(|span| [span.start.0, span.bytes()])
                .collect();
            match registered.iter().find(|one| one.span() == map.span()) {
                // What is missing is left alone, as nobody would bring it in; a mark that protects
                // it is no page.
                Some(one) => pages.extend(intersect(&found.private, &one.present())),
                None => pages.extend(found.private),
            }
        }
        self.own.push(Own {
            process: process.clone(),
            space,
            pages,
        });
        Ok(())
    }

    /// Finds the pages that a child and its parent share by copy-on-write.
    pub fn find_shared(&mut self, tree: &Tree) -> Result<()> {
        let position = self
            .own
            .iter()
            .enumerate()
            .map(|(at, own)| (own.process.pid(), at));
        let position = position.collect::<HashMap<_, _>>();
        let mut sharing = memory::CowSharing::default();
        let owners = owners(tree);
        for node in &tree.tasks[1..] {
            // Whose memory a parent has, its child has copies of.
            let owner = owners.get(&node.parent).copied().unwrap_or(node.parent);
            let (Some(child), Some(parent)) = (position.get(&node.pid), position.get(&owner))
            else {
                continue;
            };
            let (child, parent) = (*child, *parent);
            let (own, space) = (&self.own[child].pages, self.own[child].space);
            let [theirs, its] = [parent, child].map(|at| &self.own[at].process);
            let shared = sharing.shared_with(theirs, its, own, &mut self.maps)?;
            self.alone.insert(node.pid, shared.alone);
            let shared = shared.common;
            let kind = RunKind::Same {
                space: self.own[parent].space,
            };
            self.same
                .extend(shared.iter().flat_map(|span| runs(space, *span, kind)));
            let rest = subtract(own, &shared);
            self.own[child].pages = rest.into_iter().collect();
        }
        Ok(())
    }

    /// Pages of tasks that have mapped the same file: copies of its pages may be equal.
    pub fn copies(&self) -> Vec<(SpaceId, Range<u64>)> {
        let several =
            |mapped: &&Vec<(SpaceId, Span)>| mapped.iter().any(|one| one.0 != mapped[0].0);
        let files = self.files.values().filter(several).flatten();
        let pages = files.map(|(space, span)| (*space, span.start.page()..span.end.page()));
        pages.collect()
    }

    /// The pages to be stored by task, and the runs of those that are not.
    pub fn into_parts(self) -> (Vec<Memory>, Vec<Run>) {
        let mut parts = Vec::new();
        for Own {
            process,
            space,
            pages,
        } in self.own
        {
            let pid = process.pid();
            let shared = &self.shared[&pid];
            let alone = self.alone.get(&pid).map_or(&[][..], |alone| alone);
            // Pages found lie in one mapping.
            let may_share = |span: &Span| {
                let after = shared.partition_point(|shared| shared.end <= span.start);
                shared
                    .get(after)
                    .is_some_and(|shared| shared.overlaps(*span))
            };
            let (suspect, plain): (Vec<_>, Vec<_>) = pages.into_iter().partition(may_share);
            let quiet = subtract(&suspect, alone);
            let more = subtract(&suspect, &quiet);
            let extents = |spans: Vec<Span>| {
                let extent = |span: Span| Extent::of(space, span);
                spans.into_iter().map(extent).collect::<Vec<_>>()
            };
            let mut plain = plain;
            plain.extend(more);
            plain.sort_unstable();
            let [plain, quiet] = [plain, quiet.into_iter().collect()].map(extents);
            parts.push(Memory {
                process: process.clone(),
                space,
                quiet: false,
                extents: plain,
            });
            parts.push(Memory {
                process,
                space,
                quiet: true,
                extents: quiet,
            });
        }
        parts.retain(|memory| !memory.extents.is_empty());
        (parts, self.same)
    }
}

/// Of those who have the memory of another, whose: by pid.
fn owners(tree: &Tree) -> HashMap<i32, i32> {
    let shares = |node: &&Node| node.memory_of != 0;
    let owner = |node: &Node| {
        let first = tree
            .tasks
            .iter()
            .find(|first| first.number == node.memory_of);
        Some((node.pid, first?.pid))
    };
    tree.tasks.iter().filter(shares).filter_map(owner).collect()
}

/// A run counts its pages in 32 bits.
fn runs(space: SpaceId, span: Span, kind: RunKind) -> impl Iterator<Item = Run> {
    const MOST: u64 = 1 << 31;
    let (first, count) = (span.start.page(), span.pages());
    (0..count).step_by(MOST as usize).map(move |done| Run {
        space,
        first_page: first + done,
        pages: u32::try_from((count - done).min(MOST)).expect("capped"),
        kind,
    })
}

#[cfg(test)]
mod tests {
    use abi::Addr;

    use super::*;

    #[test]
    fn shared_parts_are_taken_out() {
        let span = |start, end| Span {
            start: Addr(start),
            end: Addr(end),
        };
        let all = [span(0, 10), span(20, 30), span(40, 50)];
        let some = [span(0, 2), span(5, 6), span(20, 30), span(45, 50)];
        assert_eq!(
            *subtract(&all, &some),
            [span(2, 5), span(6, 10), span(40, 45)]
        );
    }
}
