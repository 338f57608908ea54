//! Which addresses of a process still lack which pages.
use std::collections::BTreeMap;

use abi::{Addr, PAGE_BYTES, Span};

/// Consecutive addresses and the pages that are to come there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub span: Span,
    /// The number of the first page in its space.
    pub first_page: u64,
}

impl Piece {
    /// Its beginning, no longer than `bytes`.
    pub fn limited(self, bytes: u64) -> Self {
        let span = Span::new(self.span.start, self.span.bytes().min(bytes));
        Self { span, ..self }
    }

    /// The part of it at `span`, which lies in it.
    pub fn at(self, span: Span) -> Self {
        let skipped = (span.start.0 - self.span.start.0) / PAGE_BYTES;
        Self {
            span,
            first_page: self.first_page + skipped,
        }
    }
}

/// Pages that are still to come, by the address of each piece. Pieces that touch stay apart: the
/// kernel copies into one mapping at a time.
#[derive(Clone, Debug, Default)]
pub(super) struct MissingPages(BTreeMap<Addr, (Addr, u64)>);

impl MissingPages {
    /// Notes pages that are to come where none are so far.
    pub fn add(&mut self, piece: Piece) {
        if !piece.span.is_empty() {
            self.0
                .insert(piece.span.start, (piece.span.end, piece.first_page));
        }
    }

    /// The piece that holds `addr`.
    pub fn find(&self, addr: Addr) -> Option<Piece> {
        let (start, (end, first_page)) = self.0.range(..=addr).next_back()?;
        let span = Span {
            start: *start,
            end: *end,
        };
        let first_page = *first_page;
        let piece = Piece { span, first_page };
        span.contains(addr).then_some(piece)
    }

    /// Returns the missing pages from `addr` on: the rest of the piece that holds it, or the next
    /// one.
    pub fn from(&self, addr: Addr) -> Option<Piece> {
        if let Some(piece) = self.find(addr) {
            let span = Span {
                start: addr,
                end: piece.span.end,
            };
            return Some(piece.at(span));
        }
        let (start, _) = self.0.range(addr..).next()?;
        self.find(*start)
    }

    /// The parts of `piece` that are still to come, as it says.
    pub fn parts(&self, piece: Piece) -> Vec<Piece> {
        let mut parts = Vec::new();
        let mut at = piece.span.start;
        while let Some(found) = self.from(at).filter(|one| one.span.start < piece.span.end) {
            let part = found.at(found.span.intersect(piece.span));
            if part == piece.at(part.span) {
                parts.push(part);
            }
            at = part.span.end;
        }
        parts
    }

    /// Forgets what is in `span`, and returns it.
    pub fn take(&mut self, span: Span) -> Vec<Piece> {
        let mut taken = Vec::new();
        let before = self.0.range(..span.start).next_back().map(|one| *one.0);
        let inside = self.0.range(span.start..span.end).map(|one| *one.0);
        let starts = before.into_iter().chain(inside).collect::<Vec<_>>();
        for start in starts {
            let piece = self.find(start).expect("it begins there");
            let part = piece.span.intersect(span);
            if part.is_empty() {
                continue;
            }
            self.0.remove(&start);
            let [left, right] = [
                Span {
                    start,
                    end: part.start,
                },
                Span {
                    start: part.end,
                    end: piece.span.end,
                },
            ];
            self.add(piece.at(left));
            self.add(piece.at(right));
            taken.push(piece.at(part));
        }
        taken
    }

    /// Moves the missing pages at `from` to `to`.
    pub fn shift(&mut self, from: Span, to: Addr) {
        let taken = self.take(from);
        self.take(Span::new(to, from.bytes()));
        for piece in taken {
            let start = to.plus(piece.span.start.0 - from.start.0);
            let span = Span::new(start, piece.span.bytes());
            self.add(Piece { span, ..piece });
        }
    }

    /// Tells whether nothing is to come.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How much is to come.
    pub fn bytes(&self) -> u64 {
        let bytes = self.0.iter().map(|(start, (end, _))| end.0 - start.0);
        bytes.sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(from: u64, to: u64) -> Span {
        Span {
            start: Addr(from << 12),
            end: Addr(to << 12),
        }
    }

    fn piece(from: u64, to: u64, first_page: u64) -> Piece {
        let span = span(from, to);
        Piece { span, first_page }
    }

    fn owed(pieces: &[Piece]) -> MissingPages {
        let mut owed = MissingPages::default();
        pieces.iter().for_each(|piece| owed.add(*piece));
        owed
    }

    fn all(owed: &MissingPages) -> Vec<Piece> {
        let mut all = Vec::new();
        let mut at = Addr(0);
        while let Some(piece) = owed.from(at) {
            at = piece.span.end;
            all.push(piece);
        }
        all
    }

    #[test]
    fn a_piece_is_found_by_any_of_its_addresses() {
        let owed = owed(&[piece(10, 20, 110), piece(20, 30, 520)]);
        assert_eq!(owed.find(Addr(9 << 12)), None);
        assert_eq!(owed.find(Addr((20 << 12) - 1)), Some(piece(10, 20, 110)));
        assert_eq!(owed.find(Addr(20 << 12)), Some(piece(20, 30, 520)));
        assert_eq!(owed.from(Addr(5 << 12)), Some(piece(10, 20, 110)));
        assert_eq!(owed.from(Addr(15 << 12)), Some(piece(15, 20, 115)));
        assert_eq!(owed.from(Addr(30 << 12)), None);
        assert_eq!(owed.parts(piece(22, 24, 522)), [piece(22, 24, 522)]);
        assert_eq!(owed.parts(piece(22, 24, 523)), []);
        assert_eq!(owed.parts(piece(5, 22, 105)), [piece(10, 20, 110)]);
        assert_eq!(owed.bytes(), 20 << 12);
    }

    #[test]
    fn what_is_taken_leaves_both_ends() {
        let mut owed = owed(&[piece(10, 20, 110), piece(20, 30, 520), piece(40, 50, 7)]);
        assert_eq!(
            owed.take(span(15, 45)),
            [piece(15, 20, 115), piece(20, 30, 520), piece(40, 45, 7)]
        );
        assert_eq!(all(&owed), [piece(10, 15, 110), piece(45, 50, 12)]);
        assert_eq!(owed.take(span(12, 13)), [piece(12, 13, 112)]);
        assert_eq!(
            all(&owed),
            [piece(10, 12, 110), piece(13, 15, 113), piece(45, 50, 12)]
        );
        assert!(owed.take(span(20, 40)).is_empty());
    }

    #[test]
    fn what_moves_keeps_its_pages_and_replaces_what_was_there() {
        let mut owed = owed(&[piece(10, 20, 110), piece(100, 120, 900)]);
        owed.shift(span(12, 22), Addr(105 << 12));
        assert_eq!(
            all(&owed),
            [
                piece(10, 12, 110),
                piece(100, 105, 900),
                piece(105, 113, 112),
                piece(115, 120, 915)
            ]
        );
    }
}
