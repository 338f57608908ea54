//! Free addresses between the mappings of a process.

use abi::{Addr, PAGE_BYTES, Span};

use super::memory::{Mapping, Memory};

/// A stack must be able to grow, and the kernel puts nothing close below one on its own.
pub(super) const STACK_BYTES: u64 = 256 << 20;
const MAP_GROWSDOWN: u32 = linux_raw_sys::general::MAP_GROWSDOWN;
/// The first and the last address that something may be put at.
const BOUNDS: Span = Span {
    start: Addr(0x10_0000),
    end: Addr(0x7fff_ffff_f000),
};
/// The last address in 32-bit programs.
const END_32: Addr = Addr(0xffff_d000);

/// A place for `bytes` that no mapping has, nor something else that is taken, as near to `near` as
/// there is one.
pub(super) fn free(memory: &Memory, taken: Option<Span>, bytes: u64, near: Addr) -> Option<Span> {
    let distance = |span: &Span| span.start.0.abs_diff(near.0);
    let mut best: Option<Span> = None;
    let mut low = BOUNDS.start;
    let end = match memory.vdso_is_32_bit {
        false => BOUNDS.end,
        true => END_32,
    };
    let spans = memory.mappings.iter().map(with_room);
    let mut spans = spans.chain(taken).collect::<Vec<_>>();
    spans.sort_by_key(|span| span.start);
    for next in spans.into_iter().chain([Span::new(end, 0)]) {
        let high = next.start.min(end);
        if low.0.saturating_add(bytes) <= high.0 {
            let last = Addr(high.0 - bytes);
            let start = near.clamp(low, last).page_start();
            let span = Span::new(start.max(low), bytes);
            if best.is_none_or(|best| distance(&span) < distance(&best)) {
                best = Some(span);
            }
        }
        low = Addr(next.end.0.saturating_add(PAGE_BYTES)).max(low);
    }
    best
}

/// What a mapping has, and what has to be free below it.
fn with_room(map: &Mapping) -> Span {
    let below = if map.flags & MAP_GROWSDOWN != 0 {
        STACK_BYTES
    } else {
        PAGE_BYTES
    };
    Span {
        start: Addr(map.start.saturating_sub(below)),
        end: Addr(map.end),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(spans: &[(u64, u64, u32)]) -> Memory {
        let mapping = |&(start, end, flags): &(u64, u64, u32)| Mapping {
            start,
            end,
            flags,
            ..Mapping::default()
        };
        Memory {
            mappings: spans.iter().map(mapping).collect(),
            ..Memory::default()
        }
    }

    #[test]
    fn room_is_found_between_mappings_and_away_from_stacks() {
        let memory = memory(&[
            (0x6fff_fff0_0000, 0x6fff_fff1_0000, 0),
            (0x7000_0000_0000, 0x7000_0010_0000, MAP_GROWSDOWN),
            (0x7000_0011_0000, 0x7000_0012_0000, 0),
        ]);
        let near = Addr(0x7000_0011_0000);
        let start = |taken, bytes| free(&memory, taken, bytes, near).expect("room").start;
        let between = Addr(0x7000_0010_7000);
        assert_eq!(start(None, 0x8000), between);
        let behind = Addr(0x7000_0012_1000);
        assert_eq!(start(None, 0x2_0000), behind);
        // Unless something else is there.
        assert_eq!(start(Some(Span::new(between, 0x1000)), 0x8000), behind);
        let all = self::memory(&[(0, !0xfff, 0)]);
        assert_eq!(free(&all, None, 0x1000, near), None);
    }
}
