//! Memory cut for threads that work on it side by side.
use abi::Span;

use super::blocks::BLOCK_BYTES;

/// Boundaries of memory between threads that work side by side.
pub const SLICE_BYTES: u64 = 32 << 20;
const _: () = assert!(SLICE_BYTES.is_multiple_of(BLOCK_BYTES));

/// Puts sorted pieces together that touch the same 32 MiB. No block is in two of the slices that
/// are given: threads that have one each do not meet.
pub fn slices(pieces: impl IntoIterator<Item = Span>) -> Vec<Vec<Span>> {
    let mut slices: Vec<(u64, Vec<Span>)> = Vec::new();
    for piece in pieces.into_iter().filter(|piece| !piece.is_empty()) {
        let first = piece.start.0 / SLICE_BYTES;
        let last = (piece.end.0 - 1) / SLICE_BYTES;
        match slices.last_mut() {
            Some((reached, pieces)) if *reached == first => {
                pieces.push(piece);
                *reached = last;
            }
            _ => slices.push((last, vec![piece])),
        }
    }
    slices.into_iter().map(|(_, pieces)| pieces).collect()
}

#[cfg(test)]
mod tests {
    use abi::Addr;

    use super::super::blocks::cut_around;
    use super::*;

    #[test]
    fn a_slice_has_all_that_is_in_it() {
        let span = |start: u64, end: u64| Span {
            start: Addr(start << 20),
            end: Addr(end << 20),
        };
        let spans = [span(1, 2), span(3, 40), span(50, 64), span(130, 200)];
        let pieces = spans.iter().flat_map(|span| {
            let pieces = cut_around(*span, SLICE_BYTES, Some);
            pieces.into_iter().map(|(piece, _)| piece)
        });
        let expected = [
            vec![span(1, 2), span(3, 32)],
            vec![span(32, 40), span(50, 64)],
            vec![span(130, 160)],
            vec![span(160, 192)],
            vec![span(192, 200)],
        ];
        assert_eq!(slices(pieces), expected);
        assert_eq!(slices([]), Vec::<Vec<Span>>::new());
        // What has no pages is one piece, and its last block may be another one's first.
        let far = [span(1, 2), span(32, 1 << 20), span(1 << 20, 1 << 21)];
        assert_eq!(slices(far), [vec![far[0]], vec![far[1]], vec![far[2]]]);
        let near = [span(1, (1 << 20) + 1), span((1 << 20) + 2, 1 << 21)];
        assert_eq!(slices(near), [near.to_vec()]);
    }
}
