//! What a task keeps of the address space that it started with, its parent's.

use abi::{Addr, Span};
use syscalls::Sysno;

use super::layout::{AtFork, Planning, Stored, clip, overlapping};
use super::memory::{Mapping, Memory, Special};
use super::promise;
use super::vdso::Way;
use crate::Result;
use crate::script::Script;

const MADV_DONTNEED: u32 = linux_raw_sys::general::MADV_DONTNEED;
const MADV_DONTFORK: u32 = linux_raw_sys::general::MADV_DONTFORK;
const MADV_WIPEONFORK: u32 = linux_raw_sys::general::MADV_WIPEONFORK;

/// Up to this length, stretches that are read anew are not given up before: the calls would take
/// longer than the copies of inherited pages that they save.
const OVERWRITTEN_BYTES: u64 = 64 << 10;

/// A parent as its children find it.
#[derive(Clone, Copy, Debug)]
pub struct Parent<'a> {
    /// Its record.
    pub memory: &'a Memory,
    /// Which of its mappings are as they are to be, but for protection and advice, before children
    /// are spawned: those that children may keep.
    pub early: &'a [bool],
    /// Which pages of those exist then.
    pub present: &'a [Span],
    /// All that its children start with.
    pub at_fork: &'a AtFork,
}

/// The mapping of `parent`, by index, that a child can make its own mapping `map` of: one that has
/// all of it, and the same behind it.
#[must_use]
pub fn source(parent: &Memory, map: &Mapping) -> Option<usize> {
    let theirs = &parent.mappings;
    let at = theirs.partition_point(|from| from.end <= map.start);
    theirs.get(at).filter(|from| map.inherits(from)).map(|_| at)
}

/// Whether a child may keep `parent` as its own mapping `child` where neither has pages in it.
#[must_use]
pub fn may_keep_empty(parent: &Mapping, child: &Mapping) -> bool {
    let hidden = |advice: &u32| matches!(*advice, MADV_DONTFORK | MADV_WIPEONFORK);
    child.inherits(parent) && child.advice == parent.advice && !parent.advice.iter().any(hidden)
}

/// Whether the vDSO of `child` is where that of `parent` is, data and all.
#[must_use]
pub fn same_vdso(parent: &Memory, child: &Memory) -> bool {
    specials(parent).eq(specials(child)) && parent.vdso_is_32_bit == child.vdso_is_32_bit
}

fn specials(memory: &Memory) -> impl Iterator<Item = (Span, Special)> + Clone + '_ {
    let all = memory.mappings.iter();
    let all = all.filter(|map| map.is_of_vdso());
    all.map(|map| (map.span(), map.special()))
}

/// Which mappings keep what they inherited, and the protection that it has: those with at least
/// one inherited page, and those without pages on either side.
pub(super) fn inherited(planning: &Planning<'_>) -> Vec<Option<u32>> {
    let Some(parent) = planning.parent else {
        return vec![None; planning.memory.mappings.len()];
    };
    let source = |map: &Mapping| {
        let at = source(parent.memory, map)?;
        let from = &parent.memory.mappings[at];
        if !*parent.early.get(at)? {
            return None;
        }
        let shares = overlapping(&planning.pages.inherited, map.span()).next();
        let empty = overlapping(parent.present, from.span()).next().is_none()
            && planning.pages.is_empty(map.span())
            && may_keep_empty(from, map);
        (shares.is_some() || empty).then(|| parent.at_fork.protections[at])
    };
    planning.memory.mappings.iter().map(source).collect()
}

/// Whether it keeps its parent's vDSO.
pub(super) fn inherits_vdso(planning: &Planning<'_>) -> bool {
    planning.parent.is_some_and(|parent| {
        let same = same_vdso(parent.memory, planning.memory);
        parent.at_fork.vdso && planning.vdso.way == Way::Straight && same
    })
}

/// What the children of a process start with that keeps these of its mappings.
pub(super) fn at_fork(planning: &Planning<'_>, kept: &[bool], protections: Vec<u32>) -> AtFork {
    let all = planning.memory.mappings.iter().enumerate();
    let mapped = all.filter(|(index, map)| {
        let early = planning.early.get(*index).copied().unwrap_or(false);
        map.special() == Special::No && (early || kept[*index])
    });
    AtFork {
        mapped: mapped.map(|(_, map)| map.span()).collect(),
        vdso: planning.vdso_early || inherits_vdso(planning),
        protections,
        cut: Vec::new(),
    }
}

/// Unmaps what was inherited and is not kept, also what the parent itself has inherited and keeps.
pub(super) fn unmap_rest(planning: &Planning<'_>, kept: &[bool], script: &mut Script) {
    let Some(parent) = planning.parent else {
        return;
    };
    let own = planning.memory.mappings.iter().zip(kept);
    let kept = own.filter(|(_, kept)| **kept);
    let mut kept = kept.map(|(map, _)| map.span()).collect::<Vec<_>>();
    let mut theirs = parent.at_fork.mapped.clone();
    if parent.at_fork.vdso {
        let specials = specials(parent.memory).map(|(span, _)| span);
        if inherits_vdso(planning) {
            kept.extend(specials.clone());
            kept.sort_unstable();
        }
        theirs.extend(specials);
        theirs.sort_unstable();
    }
    // Neighbours go together.
    for stretch in theirs.chunk_by(|one, next| one.end == next.start) {
        let all = Span {
            start: stretch[0].start,
            end: stretch[stretch.len() - 1].end,
        };
        let mut at = all.start;
        let end = Span {
            start: all.end,
            end: all.end,
        };
        for span in overlapping(&kept, all).chain([end]) {
            if at < span.start {
                script.call(Sysno::munmap, [at.into(), (span.start.0 - at.0).into()]);
            }
            at = at.max(span.end);
        }
    }
}

/// Prepares an inherited mapping: whole again, with another protection than the `inherited` one if
/// pages are to be read into it, without the pages that the parent has and this process has not.
///
/// # Errors
/// Those of [`promise::join`].
pub(super) fn keep(
    planning: &Planning<'_>,
    map: &Mapping,
    (inherited, prot): (u32, u32),
    script: &mut Script,
) -> Result<()> {
    promise::join(planning, map, inherited, script)?;
    let span = map.span();
    if prot != inherited {
        promise::protect(planning, span, prot, script);
    }
    let mut give_up = |from: Addr, to: Addr| {
        if from < to {
            let bytes = to.0 - from.0;
            script.call(
                Sysno::madvise,
                [from.into(), bytes.into(), MADV_DONTNEED.into()],
            );
        }
    };
    let mut drop = |mut at: Addr, to: Addr| {
        let gap = Span {
            start: at,
            end: to.max(at),
        };
        let short = |stored: &Stored| stored.span.bytes() <= OVERWRITTEN_BYTES;
        for stored in clip(planning.pages, gap).filter(short) {
            give_up(at, stored.span.start);
            at = stored.span.end;
        }
        give_up(at, to);
    };
    let present = planning.parent.map_or(&[][..], |parent| parent.present);
    for present in overlapping(present, span) {
        let present = present.intersect(span);
        let mut at = present.start;
        for same in overlapping(&planning.pages.inherited, present) {
            drop(at, same.start);
            at = at.max(same.end);
        }
        drop(at, present.end);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::layout::tests::{anonymous, at_fork, memory, planning};
    use super::super::layout::{Pages, plan};
    use super::super::vdso::tests::special;
    use super::*;

    const MADV_NOHUGEPAGE: u32 = linux_raw_sys::general::MADV_NOHUGEPAGE;

    fn advised(start: u64, advice: u32) -> Mapping {
        Mapping {
            advice: vec![advice],
            ..anonymous(start, start + 0x1000, 3)
        }
    }

    #[test]
    fn what_has_no_pages_is_laid_out_once() {
        let maps = vec![
            advised(0x10000, MADV_NOHUGEPAGE),
            advised(0x11000, MADV_NOHUGEPAGE),
            special(0x20000, 0x24000, Special::Vvar),
            special(0x24000, 0x26000, Special::Vdso),
        ];
        let own = memory(maps);
        let pages = Pages::default();
        let mut first = planning(&own, &pages);
        (first.early, first.vdso_early) = (&[true; 4], true);
        first.vdso.way = Way::Straight;
        let laid = plan(&first).expect("plans");
        let early = laid.early.to_string();
        let want = "madvise(addr=0x10000, len=8192, advice=15)\n\
                    arch_prctl(ARCH_MAP_VDSO_64, addr=0x20000)  # vDSO\n";
        assert_eq!(early.matches("mmap(").count(), 1, "{early}");
        assert!(early.contains(want), "{early}");
        assert_eq!(laid.late.to_string(), "");
        let mut child = planning(&own, &pages);
        child.vdso.way = Way::Straight;
        let first = laid.at_fork;
        let parent = Parent {
            memory: &own,
            early: &[true; 4],
            present: &[],
            at_fork: &first,
        };
        child.parent = Some(parent);
        let laid = plan(&child).expect("plans");
        let calls = [&laid.early, &laid.late].map(ToString::to_string);
        assert_eq!(calls, ["", ""]);
        assert!(!laid.finish.to_string().contains("madvise"));
        let kept = laid.at_fork;
        assert_eq!((kept.mapped.len(), kept.vdso), (2, true));

        // A program of its own has other mappings, and its vDSO elsewhere.
        let mut other = memory(vec![special(0x34000, 0x36000, Special::Vdso)]);
        other
            .mappings
            .insert(0, special(0x30000, 0x34000, Special::Vvar));
        let mut child = Planning {
            memory: &other,
            ..child
        };
        let laid = plan(&child).expect("plans");
        let want = "munmap(addr=0x10000, len=8192)\nmunmap(addr=0x20000, len=24576)\n";
        assert_eq!(laid.early.to_string(), want);
        assert!(
            laid.late
                .to_string()
                .starts_with("arch_prctl(ARCH_MAP_VDSO_64, addr=0x30000)")
        );
        // So has one whose parent maps nothing early, but keeps what it has of its own parent.
        child.parent = Some(Parent {
            early: &[false; 4],
            at_fork: &kept,
            ..parent
        });
        assert_eq!(plan(&child).expect("plans").early.to_string(), want);
        child.vdso.way = Way::Absent;
        assert_eq!(plan(&child).expect("plans").late.to_string(), "");
    }

    #[test]
    fn what_a_fork_hides_or_changes_is_not_kept() {
        let plain = advised(0x10000, MADV_NOHUGEPAGE);
        assert!(may_keep_empty(&plain, &plain));
        for hidden in [MADV_DONTFORK, MADV_WIPEONFORK] {
            let map = advised(0x10000, hidden);
            assert!(!may_keep_empty(&map, &map), "{hidden}");
        }
        let other = advised(0x10000, 14);
        assert!(!may_keep_empty(&plain, &other) && !may_keep_empty(&other, &plain));
    }

    #[test]
    fn a_mapping_with_pages_on_one_side_is_made_anew() {
        let own = memory(vec![anonymous(0x10000, 0x12000, 3)]);
        let pages = Pages::default();
        let mut child = planning(&own, &pages);
        let present = [Span::new(Addr(0x11000), 0x1000)];
        let at_fork = at_fork(&own, &[3]);
        child.parent = Some(Parent {
            memory: &own,
            early: &[true],
            present: &present,
            at_fork: &at_fork,
        });
        let laid = plan(&child).expect("plans");
        assert_eq!(laid.early.to_string(), "munmap(addr=0x10000, len=8192)\n");
        assert!(
            laid.late
                .to_string()
                .starts_with("mmap(addr=0x10000, len=8192,")
        );
    }
}
