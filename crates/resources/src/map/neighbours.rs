//! Neighbouring mappings that are mapped by one call: what they differ in, if anything, comes when
//! pages have been let in.

use super::layout::Planning;
use super::memory::{Mapping, Special};

/// Where each mapping ends that is mapped by a call of its own, with those that follow on it and
/// are mapped by the same; none of these.
pub(super) fn ends(
    planning: &Planning<'_>,
    kept: &[bool],
    protections: &[u32],
) -> Vec<Option<u64>> {
    let maps = &planning.memory.mappings;
    let is_early = |index| planning.early.get(index).copied().unwrap_or(false);
    let is_plain = |index: usize| {
        let map: &Mapping = &maps[index];
        let has_more = !map.name.is_empty() || map.policy.is_some() || map.segment.is_some();
        !kept[index] && map.special() == Special::No && map.may_join() && !has_more
    };
    let joins = |index: usize, other: usize| {
        let (first, second) = (&maps[index], &maps[other]);
        first.end == second.start
            && first.flags == second.flags
            && protections[index] == protections[other]
            && is_early(index) == is_early(other)
            && is_plain(index)
            && is_plain(other)
    };
    let mut ends = vec![None; maps.len()];
    let mut first = 0;
    for (index, map) in maps.iter().enumerate() {
        if index > 0 && !joins(index - 1, index) {
            first = index;
        }
        ends[first] = Some(map.end);
    }
    ends
}

#[cfg(test)]
mod tests {
    use super::super::layout::tests::{anonymous, memory, planning, stored};
    use super::super::layout::{Fill, Pages, plan};

    #[test]
    fn neighbours_are_mapped_at_once_and_filled_at_once() {
        let mut named = anonymous(0x13000, 0x14000, 3);
        named.name = b"name".to_vec();
        let mut other = anonymous(0x15000, 0x16000, 3);
        other.flags |= 0x4000;
        let memory = memory(vec![
            anonymous(0x10000, 0x11000, 1),
            anonymous(0x11000, 0x12000, 3),
            anonymous(0x12000, 0x13000, 1),
            named,
            anonymous(0x14000, 0x15000, 3),
            other,
            anonymous(0x17000, 0x18000, 3),
        ]);
        let pages = Pages {
            stored: vec![stored(0x10000, 0x18000, 0)],
            ..Pages::default()
        };
        let mut planning = planning(&memory, &pages);
        planning.fill = Fill::Outside;
        let laid = plan(&planning).expect("plans");
        let maps = laid.late.to_string();
        assert!(
            maps.starts_with("mmap(addr=0x10000, len=12288, prot=READ|WRITE,"),
            "{maps}"
        );
        assert_eq!(maps.matches("mmap(").count(), 5, "{maps}");
        let filled = laid.filled.iter().map(|span| (span.start.0, span.end.0));
        let want = [
            (0x10000, 0x13000),
            (0x13000, 0x14000),
            (0x14000, 0x15000),
            (0x15000, 0x16000),
            (0x17000, 0x18000),
        ];
        assert_eq!(filled.collect::<Vec<_>>(), want);
        let finish = laid.finish.to_string();
        let want = "mprotect(addr=0x10000, len=4096, prot=READ)\n\
                    mprotect(addr=0x12000, len=4096, prot=READ)\n";
        assert!(finish.starts_with(want), "{finish}");
    }
}
