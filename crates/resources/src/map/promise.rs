//! Memory that the kernel promises (`VM_ACCOUNT`, Linux' Documentation/mm/overcommit-accounting):
//! private memory that a task can write to.
//!
//! By its default heuristic (`vm.overcommit_memory` 0), the kernel refuses one call that asks for
//! more than the machine has, and adds nothing up: a heap that grew step by step is larger. So a
//! task asks for it in steps again, whose mappings the kernel joins. A fork asks for each mapping
//! as a whole: one that is too large is cut by its protection for as long as children are made.
//!
//! A promise outlasts the right to write. It comes back by way of a mapping that is writable at
//! first. Of anonymous memory, the kernel takes it back unless a page was written to: one is.
//!
//! - What: mappings larger than the kernel grants at once
//! - Kept: their flags, and pages that children share by copy-on-write.
//! - At a restore: "mapping …, shared by copy-on-write, meets … in one of a parent's that is larger
//!   than what this kernel promises at once (… bytes)" (a dump is refused for the same reason).
//! - CRIU 4.2: not restored where they are larger than memory and swap.

use abi::{Addr, Span};
use syscalls::Sysno;

use super::inherit;
use super::layout::{Laid, Planning};
use super::memory::Mapping;
use crate::script::Script;
use crate::{Error, Result};

const PROT_READ: u32 = linux_raw_sys::general::PROT_READ;
const PROT_WRITE: u32 = linux_raw_sys::general::PROT_WRITE;
const MADV_DONTNEED: u32 = linux_raw_sys::general::MADV_DONTNEED;
const MADV_POPULATE_WRITE: u32 = linux_raw_sys::general::MADV_POPULATE_WRITE;

/// The parts of `span` for which the kernel is asked one by one: all of it, where it `asks` for no
/// promise or a small one.
pub(super) fn pieces(
    planning: &Planning<'_>,
    asks: bool,
    span: Span,
) -> impl Iterator<Item = Span> + use<> {
    let step_bytes = match asks {
        true => planning.at_once_bytes,
        false => u64::MAX,
    };
    let count = span.bytes().div_ceil(step_bytes.max(1)).max(1);
    (0..count).map(move |number| {
        let done = number.saturating_mul(step_bytes).min(span.bytes());
        let start = span.start.plus(done);
        Span::new(start, step_bytes.min(span.end.0 - start.0))
    })
}

/// Gives addresses a protection; what becomes writable by that may ask for a promise.
pub(super) fn protect(planning: &Planning<'_>, span: Span, prot: u32, script: &mut Script) {
    for piece in pieces(planning, prot & PROT_WRITE != 0, span) {
        let args = [piece.start.into(), piece.bytes().into(), prot.into()];
        script.call(Sysno::mprotect, args);
    }
}

/// True if a mapping lacks its promise, as it is mapped with its own protection, or as it is
/// `inherited`.
pub(super) fn is_lacking(planning: &Planning<'_>, map: &Mapping, inherited: bool) -> bool {
    if !map.promised || !map.is_promised(map.prot, false) {
        return false;
    }
    let parent = planning.parent.filter(|_| inherited);
    let source = parent.and_then(|parent| {
        let at = inherit::source(parent.memory, map)?;
        Some(&parent.memory.mappings[at])
    });
    source.is_none_or(|source| !source.is_promised(source.prot, false))
}

/// True if a mapping, which has the protection `prot` now, would lose its promise with the right to
/// write: none of its pages was written to.
fn is_to_be_proved(planning: &Planning<'_>, map: &Mapping, prot: u32) -> bool {
    let loses_write = prot & PROT_WRITE != 0 && map.prot & PROT_WRITE == 0;
    let is_empty = || planning.pages.is_empty(map.span());
    map.promised && loses_write && map.is_anonymous() && is_empty()
}

/// Has a page of it written to, and given up, where its promise, with the protection `prot` that
/// it has now, would be lost otherwise.
pub(super) fn prove(planning: &Planning<'_>, map: &Mapping, prot: u32, script: &mut Script) {
    if !is_to_be_proved(planning, map, prot) {
        return;
    }
    let (start, bytes) = (map.start, map.span().bytes());
    let first = [
        start.into(),
        abi::PAGE_BYTES.into(),
        MADV_POPULATE_WRITE.into(),
    ];
    // A kernel that does not know this (before 5.14) keeps the promise anyway.
    script.attempt(Sysno::madvise, first);
    // It may have brought in a huge page.
    let all = [start.into(), bytes.into(), MADV_DONTNEED.into()];
    script.call(Sysno::madvise, all);
}

/// Cuts mappings that children are to find and that are larger than what the kernel promises at
/// once; they are whole again before anything else is made.
pub(super) fn cut(planning: &Planning<'_>, laid: &mut Laid) {
    let mut whole = Script::default();
    let maps = planning.memory.mappings.iter().enumerate();
    for (index, map) in maps {
        let prot = laid.at_fork.protections[index];
        let early = planning.early.get(index).copied().unwrap_or(false);
        if !early || !map.is_promised(prot, false) {
            continue;
        }
        // Every second one, so that each differs from its neighbours.
        for piece in pieces(planning, true, map.span()).skip(1).step_by(2) {
            let other = match prot & PROT_WRITE {
                0 => prot ^ PROT_READ,
                _ => prot & !PROT_WRITE,
            };
            call(piece, other, &mut laid.early);
            call(piece, prot, &mut whole);
            laid.at_fork.cut.push(piece);
        }
    }
    whole.append(std::mem::take(&mut laid.late));
    laid.late = whole;
}

/// Has a mapping that is kept, with the protection `prot`, be one again if it was cut.
///
/// # Errors
/// [`Error::Mismatch`] where it was cut inside: its parts would stay apart.
pub(super) fn join(
    planning: &Planning<'_>,
    map: &Mapping,
    prot: u32,
    script: &mut Script,
) -> Result<()> {
    let cut = planning.parent.map_or(&[][..], |one| &one.at_fork.cut);
    let span = map.span();
    let borders = cut.iter().flat_map(|cut| [cut.start, cut.end]);
    let inside = |border: &Addr| span.start < *border && *border < span.end;
    if let Some(border) = borders.into_iter().find(inside) {
        let what = format!(
            "mapping {span}, shared by copy-on-write, meets {border} in one of a parent's that is \
             larger than what this kernel promises at once ({} bytes)",
            planning.at_once_bytes
        );
        return Err(Error::Mismatch { what });
    }
    let is_cut = |cut: &&Span| cut.start <= span.start && span.end <= cut.end;
    if cut.iter().any(|one| is_cut(&one)) {
        call(span, prot, script);
    }
    Ok(())
}

fn call(span: Span, prot: u32, script: &mut Script) {
    let args = [span.start.into(), span.bytes().into(), prot.into()];
    script.call(Sysno::mprotect, args);
}

#[cfg(test)]
mod tests {
    use super::super::inherit::Parent;
    use super::super::layout::tests::{anonymous, memory, planning, stored};
    use super::super::layout::{Fill, Pages, plan};
    use super::*;

    /// Four pages at a time.
    const STEP_BYTES: u64 = 0x4000;

    #[test]
    fn memory_beyond_what_is_promised_at_once_is_mapped_in_steps() {
        let mut unpromised = anonymous(0x30000, 0x39000, 3);
        unpromised.flags |= 0x4000;
        let mut file = anonymous(0x40000, 0x46000, 3);
        (file.flags, file.file, file.offset) = (2, Some(7), 0x1000);
        let memory = memory(vec![
            anonymous(0x10000, 0x19000, 3),
            anonymous(0x20000, 0x29000, 1),
            unpromised,
            file,
        ]);
        let pages = Pages::default();
        let mut planning = planning(&memory, &pages);
        planning.at_once_bytes = STEP_BYTES;
        let late = plan(&planning).expect("plans").late.to_string();
        let calls = late.lines().map(|line| {
            let words = line.split(['(', ',', ' ', ')']);
            words.take(4).collect::<Vec<_>>().join(" ")
        });
        let want = [
            "mmap addr=0x10000  len=16384",
            "mmap addr=0x14000  len=16384",
            "mmap addr=0x18000  len=4096",
            "mmap addr=0x20000  len=36864",
            "mmap addr=0x30000  len=36864",
            "mmap addr=0x40000  len=16384",
            "mmap addr=0x44000  len=8192",
        ];
        assert_eq!(calls.collect::<Vec<_>>(), want, "{late}");
        assert!(late.contains("pool[7], offset=0x1000)"), "{late}");
        assert!(late.contains("pool[7], offset=0x5000)"), "{late}");
    }

    #[test]
    fn memory_filled_from_outside_is_registered_as_a_whole() {
        let memory = memory(vec![anonymous(0x10000, 0x19000, 1)]);
        let pages = Pages {
            stored: vec![
                stored(0x10000, 0x11000, 0),
                stored(0x18000, 0x19000, 0x1000),
            ],
            ..Pages::default()
        };
        for fill in [Fill::Outside, Fill::Lazily] {
            let mut planning = planning(&memory, &pages);
            (planning.fill, planning.at_once_bytes) = (fill, STEP_BYTES);
            let laid = plan(&planning).expect("plans");
            assert_eq!(laid.late.to_string().matches("mmap(").count(), 3);
            let spans = [laid.filled, laid.lazy].concat();
            assert_eq!(spans, [memory.mappings[0].span()], "{fill:?}");
            let finish = laid.finish.to_string();
            assert!(
                finish.starts_with("mprotect(addr=0x10000, len=36864, prot=READ)\n"),
                "{finish}"
            );
        }
    }

    #[test]
    fn promise_without_pages_comes_back_by_a_page() {
        let promised = |start, prot| Mapping {
            promised: true,
            ..anonymous(start, start + 0x2000, prot)
        };
        let mut file = promised(0x30000, 1);
        (file.flags, file.file) = (2, Some(7));
        let memory = memory(vec![promised(0x10000, 0), promised(0x20000, 1), file]);
        let pages = Pages {
            stored: vec![stored(0x20000, 0x21000, 0)],
            ..Pages::default()
        };
        let laid = plan(&planning(&memory, &pages)).expect("plans");
        let late = laid.late.to_string();
        let proof = "madvise(addr=0x10000, len=4096, advice=23) = ?\n\
                     madvise(addr=0x10000, len=8192, advice=4)\n";
        assert!(late.contains(proof), "{late}");
        assert_eq!(late.matches("madvise(").count(), 2, "{late}");
        assert!(late.contains("mmap(addr=0x30000, len=8192, prot=READ|WRITE, "));
        let finish = laid.finish.to_string();
        for want in [
            "mprotect(addr=0x10000, len=8192, prot=0)\n",
            "mprotect(addr=0x20000, len=8192, prot=READ)\n",
            "mprotect(addr=0x30000, len=8192, prot=READ)\n",
        ] {
            assert!(finish.contains(want), "{finish}");
        }
    }

    #[test]
    fn large_memory_is_cut_while_children_are_made() {
        let own = memory(vec![anonymous(0x10000, 0x19000, 3)]);
        let pages = Pages {
            stored: vec![stored(0x10000, 0x11000, 0)],
            ..Pages::default()
        };
        let mut first = planning(&own, &pages);
        (first.early, first.at_once_bytes) = (&[true], STEP_BYTES);
        let laid = plan(&first).expect("plans");
        let early = laid.early.to_string();
        assert!(
            early.ends_with("mprotect(addr=0x14000, len=16384, prot=READ)\n"),
            "{early}"
        );
        let late = laid.late.to_string();
        let want = "mprotect(addr=0x14000, len=16384, prot=READ|WRITE)\n";
        assert_eq!(late, want);
        assert_eq!(laid.at_fork.cut, [Span::new(Addr(0x14000), 0x4000)]);

        // A child has what its parent had when it was forked.
        let present = [Span::new(Addr(0x10000), 0x1000)];
        let child = |start, end| {
            let own_memory = memory(vec![anonymous(start, end, 3)]);
            let pages = Pages {
                inherited: present.to_vec(),
                ..Pages::default()
            };
            let mut child = planning(&own_memory, &pages);
            child.parent = Some(Parent {
                memory: &own,
                early: &[true],
                present: &present,
                at_fork: &laid.at_fork,
            });
            child.at_once_bytes = STEP_BYTES;
            plan(&child).map(|laid| laid.late.to_string())
        };
        assert_eq!(child(0x10000, 0x12000).expect("plans"), "");
        let error = child(0x10000, 0x16000).expect_err("cut").to_string();
        assert!(
            error.contains("larger than what this kernel promises"),
            "{error}"
        );
        let part = memory(vec![anonymous(0x15000, 0x16000, 3)]);
        let pages = Pages::default();
        let mut inside = planning(&part, &pages);
        inside.parent = Some(Parent {
            memory: &own,
            early: &[true],
            present: &[],
            at_fork: &laid.at_fork,
        });
        let laid = plan(&inside).expect("plans");
        let late = laid.late.to_string();
        assert!(
            late.starts_with("mprotect(addr=0x15000, len=4096, prot=READ|WRITE)\n"),
            "{late}"
        );
    }
}
