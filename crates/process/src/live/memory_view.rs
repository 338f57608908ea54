//! How the instant of a live dump looks at memory: with what was seen before, and protecting.

use std::cmp::Ordering;
use std::collections::HashMap;

use abi::Span;
use freeze::Task;
use memory::PageMaps;
use memory::live::{Areas, LiveMemory};
use memory::scan::{Area, LARGE_BYTES, ScanResult};
use resources::map::listing::{Backing, Listed};
use sys::kcmp::{self, Shared};
use sys::process::Process;

use crate::collect::memory_view::{MemoryView, Prepared};
use crate::numbering::Numbering;
use crate::{Error, Result};

/// Whether a mapping's pages can be protected and copied later: anonymous memory of its own.
fn is_live(listed: &Listed) -> bool {
    let is_own = listed.backing() == Backing::Anonymous && !listed.shared;
    // Huge pages cannot be protected in parts.
    is_own && !listed.has(b"dp") && !listed.has_huge_pages()
}

/// The addresses of those mappings.
pub(super) fn live_spans(listed: &[Listed]) -> Vec<Span> {
    let live = listed.iter().filter(|listed| is_live(listed));
    live.map(|listed| listed.span).collect()
}

/// Where pages of each task may be shared by copy-on-write.
pub(super) fn shared(prepared: &Prepared) -> HashMap<i32, Vec<Span>> {
    let may_share = |listed: &[Listed]| {
        let listed = listed.iter().filter(|listed| listed.may_share());
        listed.map(|listed| listed.span).collect()
    };
    let tasks = prepared.listed();
    tasks
        .map(|(pid, listed)| (pid, may_share(listed)))
        .collect()
}

/// [`MemoryView`] of a live dump.
pub(super) struct LiveView<'a> {
    prepared: Prepared,
    live: &'a LiveMemory,
    /// Whether to look only for what may not be protected.
    trusting: bool,
    /// Areas of each task in which pages may be shared.
    shared: HashMap<i32, Vec<Span>>,
    /// What gave the tasks their numbers at the first stop.
    numbering: Numbering,
    /// Who had the memory of another at the first stop, and of whom.
    sharers: &'a HashMap<i32, i32>,
    /// The tasks that were looked at.
    looked_at: Vec<i32>,
}

impl<'a> LiveView<'a> {
    pub fn new(
        (mut prepared, numbering): (Prepared, Numbering),
        (live, sharers): (&'a LiveMemory, &'a HashMap<i32, i32>),
        trusting: bool,
    ) -> Self {
        forget_ours(&mut prepared, live);
        Self {
            prepared,
            live,
            trusting,
            shared: HashMap::new(),
            numbering,
            sharers,
            looked_at: Vec::new(),
        }
    }

    /// Memory that several tasks have is copied of the one that was the first at the first stop.
    /// Where that has ended since, or another one is before it now, the dump begins anew.
    fn check_owner(&mut self, process: &Process) -> Result<()> {
        let pid = process.pid();
        let shares = |owner: &Process| {
            let compared = kcmp::compare(owner, process, Shared::Memory);
            compared.is_ok_and(Ordering::is_eq)
        };
        let mut owners = self.live.processes();
        let is_anothers = |owner: &Process| {
            owner != process && !self.looked_at.contains(&owner.pid()) && shares(owner)
        };
        let is_behind = !self.live.has(pid) && owners.any(is_anothers);
        let was_anothers = self.sharers.get(&pid).is_some_and(|owner| {
            let mut owners = self.live.processes();
            // It may run another program itself.
            !owners.any(|one| one.pid() == *owner && shares(one))
        });
        if is_behind || was_anothers {
            return Err(Error::Left { pid });
        }
        self.looked_at.push(pid);
        Ok(())
    }

    /// Whether flags of mappings are others now than those that were taken for true.
    pub fn has_changed(&self, root: i32) -> Result<bool> {
        let mut now = Prepared::of(root)?;
        forget_ours(&mut now, self.live);
        Ok(self.prepared.differs(&now))
    }
}

impl MemoryView for LiveView<'_> {
    fn mappings(&mut self, task: &Task) -> Result<Vec<Listed>> {
        self.check_owner(&task.process)?;
        let mut listed = self.prepared.mappings(task)?;
        if self.live.has(task.pid()) {
            listed.iter_mut().for_each(forget_protection);
        }
        let shared = listed.iter().filter(|listed| listed.may_share());
        let shared = shared.map(|listed| listed.span).collect();
        self.shared.insert(task.pid(), shared);
        Ok(listed)
    }

    fn pages(
        &mut self,
        process: &Process,
        areas: &[Area],
        maps: &mut PageMaps,
    ) -> Result<Vec<ScanResult>> {
        let pid = process.pid();
        if !self.live.has(pid) {
            return Ok(memory::scan(process, areas, maps)?);
        }
        let (own, files) = apart(areas);
        let spans = own.iter().map(|area| area.span).collect::<Vec<_>>();
        let shared = self.shared.remove(&pid).unwrap_or_default();
        let guards = self
            .live
            .begin_instant(pid, &Areas { spans, shared }, self.trusting);
        let guards = guards.map_err(|error| match error {
            // It is stopped, and so is there.
            memory::Error::Gone { pid } => Error::Left { pid },
            error => Error::from(error),
        })?;
        let mut of_files = memory::scan(process, &files, maps)?.into_iter();
        let found = areas.iter().map(|area| {
            if area.file {
                return of_files.next().unwrap_or_default();
            }
            ScanResult {
                guards: guards.within(&area.span),
                ..ScanResult::default()
            }
        });
        Ok(found.collect())
    }

    fn numbering(&mut self) -> &mut Numbering {
        &mut self.numbering
    }

    fn keeps_registered(&self) -> bool {
        false
    }
}

/// The areas that are not of files, and those that are.
fn apart(areas: &[Area]) -> (Vec<Area>, Vec<Area>) {
    let (mut own, mut files) = (Vec::new(), Vec::new());
    let mut between_bytes = 0;
    for area in areas {
        if area.apart {
            between_bytes += LARGE_BYTES;
        }
        if area.file {
            let apart = std::mem::take(&mut between_bytes) >= LARGE_BYTES;
            files.push(Area { apart, ..*area });
        } else {
            between_bytes += area.span.bytes();
            own.push(*area);
        }
    }
    (own, files)
}

fn forget_ours(prepared: &mut Prepared, live: &LiveMemory) {
    prepared.edit(|pid, listed| {
        if live.has(pid) {
            forget_protection(listed);
        }
    });
}

/// Takes the mark of our userfaultfd off a mapping. One of the task's own was refused before ours
/// were made, and where ours is, no other can be.
fn forget_protection(listed: &mut Listed) {
    if is_live(listed) {
        listed.flags.retain(|flag| flag != b"uw");
    }
}

#[cfg(test)]
mod tests {
    use abi::{Addr, Span};

    use super::*;

    #[test]
    fn files_are_apart_where_much_lies_between_them() {
        let area = |start: u64, mib: u64, file: bool, apart: bool| Area {
            span: Span::new(Addr(start << 20), mib << 20),
            file,
            apart,
        };
        let all = [
            area(0, 1, true, false),
            area(1, 3, false, false),
            area(4, 1, true, false),
            area(5, 2, false, false),
            area(8, 2, false, false),
            area(10, 1, true, false),
            area(20, 1, false, true),
            area(21, 1, true, false),
            area(22, 1, true, false),
        ];
        let (own, files) = apart(&all);
        let files = files.iter().map(|area| area.apart).collect::<Vec<_>>();
        assert_eq!(
            (own.len(), files),
            (4, vec![false, false, true, true, false])
        );
    }
}
