//! The calls by which a task reads its stored pages from the pages files, and its zeros.

use super::layout::{Place, Planning, Stored};
use crate::script::{Script, Width};
use abi::{PAGE_BYTES, Span};
use syscalls::Sysno;

/// How many stretches of memory one call fills (`IOV_MAX`).
const PIECES_MAX: usize = 1024;
/// How many bytes one call reads at most; the kernel's own limit is close to twice that.
const BYTES_MAX: u64 = 1 << 30;

/// Reads `stored`, with one call for each stretch that is consecutive in a file.
pub(super) fn read_in(planning: &Planning<'_>, stored: Vec<Stored>, script: &mut Script) {
    let placed = stored.into_iter().map(|stored| {
        let at = stored.at.unwrap_or_else(|| (planning.decoded)(stored.span));
        (stored.span, at)
    });
    let mut pieces = placed.flat_map(split).collect::<Vec<_>>();
    pieces.sort_by_key(|piece| piece.1);
    let follows = |one: &Piece, next: &Piece| one.1.after(one.0.bytes()) == next.1;
    for stretch in pieces.chunk_by(follows) {
        let mut rest = stretch;
        while !rest.is_empty() {
            let mut total = 0;
            let fits = rest.iter().take(PIECES_MAX).take_while(|piece| {
                total += piece.0.bytes();
                total <= BYTES_MAX
            });
            let (group, left) = rest.split_at(fits.count());
            call(planning, group, script);
            rest = left;
        }
    }
}

/// Addresses, and where in a file their pages are.
type Piece = (Span, Place);

fn call(planning: &Planning<'_>, group: &[Piece], script: &mut Script) {
    let total = group.iter().map(|piece| piece.0.bytes()).sum::<u64>();
    let iov = group
        .iter()
        .flat_map(|(span, _)| [span.start.0, span.bytes()]);
    let iov = iov.flat_map(u64::to_le_bytes).collect::<Vec<_>>();
    let iov = script.bytes(&iov);
    let Place { file, offset_bytes } = group[0].1;
    let file = (planning.files)(file);
    let args = [
        file.into(),
        iov.into(),
        group.len().into(),
        offset_bytes.into(),
    ];
    script.expect(Sysno::preadv, args, total);
}

/// Writes zeros, from one page of them that is among the script's data.
pub(super) fn zero(planning: &Planning<'_>, spans: &[Span], script: &mut Script) {
    const PAGES_MAX: usize = 256;
    if spans.is_empty() {
        return;
    }
    let pages = |span: &Span| (span.start.page()..span.end.page()).map(abi::Addr::of_page);
    let pages = spans.iter().flat_map(pages).collect::<Vec<_>>();
    let zeros = script.buffer(PAGE_BYTES as usize);
    let iovec = |at: u64| [at, PAGE_BYTES].map(u64::to_le_bytes).concat();
    let from = (0..pages.len().min(PAGES_MAX)).flat_map(|_| iovec(0));
    let from = script.bytes(&from.collect::<Vec<_>>());
    for entry in 0..pages.len().min(PAGES_MAX) {
        let at = u32::try_from(16 * entry).expect("a few entries");
        script.fix(from, at, zeros, Width::Eight);
    }
    for pages in pages.chunks(PAGES_MAX) {
        let to = pages.iter().flat_map(|page| iovec(page.0));
        let to = script.bytes(&to.collect::<Vec<_>>());
        let count = pages.len();
        let args = [
            planning.vdso.pid.into(),
            to.into(),
            count.into(),
            from.into(),
            count.into(),
            0u32.into(),
        ];
        script.expect(Sysno::process_vm_readv, args, count as u64 * PAGE_BYTES);
        script.note("zeros");
    }
}

/// Pieces that one call can read.
fn split((span, at): Piece) -> impl Iterator<Item = Piece> {
    debug_assert!(BYTES_MAX.is_multiple_of(PAGE_BYTES), "whole pages");
    let starts = (0..span.bytes()).step_by(BYTES_MAX as usize);
    starts.map(move |done| {
        let bytes = (span.bytes() - done).min(BYTES_MAX);
        (Span::new(span.start.plus(done), bytes), at.after(done))
    })
}

#[cfg(test)]
mod tests {
    use super::super::layout::tests::{anonymous, memory, planning, stored};
    use super::super::layout::{Pages, plan};
    use super::*;

    #[test]
    fn pages_that_follow_each_other_in_a_file_are_read_together() {
        let maps = [0x10000, 0x20000, 0x30000].map(|at| anonymous(at, at + 0x1000, 3));
        let memory = memory(maps.to_vec());
        let pages = Pages {
            stored: vec![
                stored(0x10000, 0x11000, 0x6000),
                stored(0x20000, 0x21000, 0x1000),
                stored(0x30000, 0x31000, 0x5000),
            ],
            ..Pages::default()
        };
        let laid = plan(&planning(&memory, &pages)).expect("plans");
        let text = laid.late.to_string();
        let reads = text.lines().skip_while(|line| line.starts_with("mmap"));
        let want = [
            "preadv(fd=pool[0], iov=[{base=0x20000, len=4096}], count=1, offset=4096) = 4096",
            "preadv(fd=pool[0], iov=[{base=0x30000, len=4096}, \
             {base=0x10000, len=4096}], count=2, offset=20480) = 8192",
        ];
        assert_eq!(reads.collect::<Vec<_>>(), want);
    }

    #[test]
    fn what_one_call_cannot_read_is_cut() {
        let end = 0x1_0000_0000 + BYTES_MAX * 2 + 0x3000;
        let memory = memory(vec![anonymous(0x1_0000_0000, end, 3)]);
        let pages = Pages {
            stored: vec![stored(0x1_0000_0000, end, 0)],
            ..Pages::default()
        };
        let laid = plan(&planning(&memory, &pages)).expect("plans");
        let text = laid.late.to_string();
        let reads = text.lines().filter_map(|line| {
            let read = line.starts_with("preadv").then(|| line.rsplit_once(" = "));
            Some(read??.1.parse::<u64>().expect("a number"))
        });
        assert_eq!(reads.collect::<Vec<_>>(), [BYTES_MAX, BYTES_MAX, 0x3000]);
    }
}
