//! The calls that lay out a process's address space again.
//!
//! Pages that a child shares with its parent by copy-on-write are restored as they came to be: the
//! parent maps and fills them *early*, before it spawns the child, which keeps what it inherited.
//! Everything else is mapped *late*, straight at its final address.

use abi::{Addr, Span};
use syscalls::Sysno;

use super::memory::{Mapping, Memory, Segment, Special};
use super::vdso;
use crate::script::{Arg, PoolId, Script, Width};
use crate::{Error, Result};

const MAP_FIXED: u32 = 0x10;
const PROT_WRITE: u32 = 2;
const MADV_DONTNEED: u32 = 4;
const MADV_GUARD_INSTALL: u32 = 102;

/// Up to this length, stretches that are read anew are not given up before: the calls would take
/// longer than the copies of inherited pages that they save.
const OVERWRITTEN_BYTES: u64 = 64 << 10;

/// Positions in an image's pages name the file above this bit and the offset below it.
pub const PAGES_FILE: u64 = 1 << 48;

/// Consecutive pages of a process that are stored in the image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Their addresses.
    pub span: Span,
    /// The position of the first: an offset in a pages file, in bytes, plus [`PAGES_FILE`] times
    /// the file's number.
    pub offset: u64,
}

/// Where a process's pages come from.
#[derive(Clone, Debug, Default)]
pub struct Pages {
    /// Those stored, sorted by address.
    pub stored: Vec<Stored>,
    /// Those inherited from the parent, sorted.
    pub inherited: Vec<Span>,
}

/// How stored pages get into the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// The task reads them from the pages files.
    Itself,
    /// The restorer copies them into late anonymous private mappings; the task reads the others.
    Outside,
}

/// What the planner knows when it lays out a process.
pub struct Planning<'a> {
    /// The process's own record.
    pub memory: &'a Memory,
    /// Its pages.
    pub pages: &'a Pages,
    /// The parent's record, which of its mappings were mapped early, and with which protection.
    pub parent: Option<(&'a Memory, &'a [bool], &'a [u32])>,
    /// Which pages of the parent's early mappings exist when the process is spawned.
    pub parent_pages: &'a [Span],
    /// Its own mappings that children share pages with.
    pub early: &'a [bool],
    /// How pages come in.
    pub fill: Fill,
    /// The pool descriptor of each description of the image.
    pub pool: &'a dyn Fn(u32) -> PoolId,
    /// The pool descriptor of each pages file, by number.
    pub files: &'a dyn Fn(u64) -> PoolId,
    /// What is known of its vDSO.
    pub vdso: vdso::lay::Old<'a>,
}

/// The calls that lay out a process.
#[derive(Debug, Default)]
pub struct Laid {
    /// Before children are spawned.
    pub early: Script,
    /// After that, up to where stored pages are needed.
    pub late: Script,
    /// After the restorer has filled pages ([`Fill::Outside`]): protections and advice.
    pub finish: Script,
    /// What the restorer has to fill between `late` and `finish`.
    pub outside: Vec<Stored>,
    /// The mappings that those are in.
    pub filled: Vec<Span>,
    /// The protection of each mapping before `finish`: that with which children inherit it.
    pub protections: Vec<u32>,
    /// Where this host's vDSO comes to be, if that is not where the old one was: nothing else may
    /// be there.
    pub room: Option<Span>,
    /// The code that another kernel's vDSO becomes.
    pub proxy: Option<vdso::proxy::Proxy>,
}

/// Plans the calls that lay out a process.
///
/// # Errors
/// [`Error::Corrupt`].
pub fn plan(planning: &Planning<'_>) -> Result<Laid> {
    planning.memory.check()?;
    let mut laid = Laid::default();
    let inherited = inherited(planning);
    let kept = inherited.iter().map(Option::is_some).collect::<Vec<_>>();
    laid.protections = protections(planning, &inherited);
    unmap_rest(planning, &kept, &mut laid.early);
    for (index, map) in planning.memory.mappings.iter().enumerate() {
        let early = planning.early.get(index).copied().unwrap_or(false);
        let script = if early {
            &mut laid.early
        } else {
            &mut laid.late
        };
        if map.special() != Special::No {
            continue;
        }
        let writable = map.is_private() && has_stored(planning.pages, map.span());
        if let Some(prot) = inherited[index] {
            let wanted = laid.protections[index];
            keep(planning, map, (wanted != prot).then_some(wanted), script);
        } else {
            lay(planning, map, laid.protections[index], script);
        }
        let read = |script: &mut Script| read_in(planning, map.span(), script);
        match planning.fill {
            _ if !map.is_private() => {}
            Fill::Itself => read(script),
            Fill::Outside if !early && !kept[index] && map.is_anonymous() => {
                laid.outside.extend(clip(planning.pages, map.span()));
                if writable {
                    laid.filled.push(map.span());
                }
            }
            Fill::Outside => read(script),
        }
        settle(map, laid.protections[index] != map.prot, &mut laid.finish);
    }
    let vdso = vdso::lay::plan(planning.memory, &planning.vdso)?;
    laid.late.append(vdso.script);
    (laid.room, laid.proxy) = (vdso.room, vdso.proxy);
    marks(planning, &mut laid.finish)?;
    Ok(laid)
}

fn has_stored(pages: &Pages, span: Span) -> bool {
    clip(pages, span).next().is_some()
}

/// Those of sorted and disjoint spans that overlap `span`.
fn overlapping(spans: &[Span], span: Span) -> impl Iterator<Item = Span> + '_ {
    let from = spans.partition_point(|one| one.end <= span.start);
    let inside = spans[from..]
        .iter()
        .take_while(move |one| one.start < span.end);
    inside.copied()
}

/// The stored pages inside `span`.
fn clip(pages: &Pages, span: Span) -> impl Iterator<Item = Stored> + '_ {
    let from = pages
        .stored
        .partition_point(|stored| stored.span.end <= span.start);
    let inside = pages.stored[from..]
        .iter()
        .take_while(move |stored| stored.span.start < span.end);
    inside.map(move |stored| {
        let cut = stored.span.intersect(span);
        Stored {
            span: cut,
            offset: stored.offset + (cut.start.0 - stored.span.start.0),
        }
    })
}

/// Which mappings keep what they inherited, and the protection that it has: those with at least
/// one inherited page.
fn inherited(planning: &Planning<'_>) -> Vec<Option<u32>> {
    let Some((parent, early, prots)) = planning.parent else {
        return vec![None; planning.memory.mappings.len()];
    };
    let source = |map: &Mapping| {
        let mut shared = overlapping(&planning.pages.inherited, map.span());
        shared.next()?;
        let mut early = parent.mappings.iter().zip(early).zip(prots);
        let found = early.find(|((from, early), _)| **early && map.inherits(from));
        found.map(|(_, prot)| *prot)
    };
    planning.memory.mappings.iter().map(source).collect()
}

/// The protection of each mapping while pages are read into it.
fn protections(planning: &Planning<'_>, inherited: &[Option<u32>]) -> Vec<u32> {
    let maps = planning.memory.mappings.iter().zip(inherited);
    let prots = maps.map(|(map, inherited)| {
        let prot = inherited.unwrap_or(map.prot);
        let writable = map.is_private() && has_stored(planning.pages, map.span());
        if writable { prot | PROT_WRITE } else { prot }
    });
    prots.collect()
}

/// Unmaps what was inherited and is not kept.
fn unmap_rest(planning: &Planning<'_>, kept: &[bool], script: &mut Script) {
    let Some((parent, early, _)) = planning.parent else {
        return;
    };
    let kept = planning
        .memory
        .mappings
        .iter()
        .zip(kept)
        .filter(|(_, kept)| **kept);
    let kept = kept.map(|(map, _)| map.span()).collect::<Vec<_>>();
    for (map, _) in parent
        .mappings
        .iter()
        .zip(early)
        .filter(|(_, early)| **early)
    {
        let mut at = map.span().start;
        let inside = overlapping(&kept, map.span());
        for span in inside.chain([Span {
            start: map.span().end,
            end: map.span().end,
        }]) {
            if at < span.start {
                script.call(Sysno::munmap, [at.into(), (span.start.0 - at.0).into()]);
            }
            at = at.max(span.end);
        }
    }
}

/// Prepares an inherited mapping: with another protection if pages are to be read into it, without
/// the pages that the parent has and this process has not.
fn keep(planning: &Planning<'_>, map: &Mapping, prot: Option<u32>, script: &mut Script) {
    let span = map.span();
    if let Some(prot) = prot {
        let args = [span.start.into(), span.bytes().into(), prot.into()];
        script.call(Sysno::mprotect, args);
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
    for present in overlapping(planning.parent_pages, span) {
        let present = present.intersect(span);
        let mut at = present.start;
        for same in overlapping(&planning.pages.inherited, present) {
            drop(at, same.start);
            at = at.max(same.end);
        }
        drop(at, present.end);
    }
}

/// Maps it, with a protection that lets pages in.
fn lay(planning: &Planning<'_>, map: &Mapping, prot: u32, script: &mut Script) {
    if let Some(segment) = map.segment {
        return attach(map, segment, prot, script);
    }
    let file = map
        .file
        .map_or(Arg::from(-1i32), |file| (planning.pool)(file).into());
    let args = [
        map.start.into(),
        map.span().bytes().into(),
        prot.into(),
        (map.flags | MAP_FIXED).into(),
        file,
        map.offset.into(),
    ];
    script.expect(Sysno::mmap, args, map.start);
    if !map.name.is_empty() {
        const PR_SET_VMA: u32 = 0x5356_4d41;
        let name = script.string(&map.name);
        let span = map.span();
        let args = [
            PR_SET_VMA.into(),
            0u32.into(),
            span.start.into(),
            span.bytes().into(),
            name.into(),
        ];
        script.attempt(Sysno::prctl, args);
    }
}

/// Attaches System V shared memory: the kernel counts who has it.
fn attach(map: &Mapping, segment: Segment, prot: u32, script: &mut Script) {
    const PROT_READ: u32 = 1;
    const PROT_EXEC: u32 = 4;
    const SHM_RDONLY: u32 = 0o10000;
    const SHM_REMAP: u32 = 0o40000;
    const SHM_EXEC: u32 = 0o100_000;
    let mut flags = SHM_REMAP;
    let mut given = PROT_READ;
    if segment.read_only {
        flags |= SHM_RDONLY;
    } else {
        given |= PROT_WRITE;
    }
    if prot & PROT_EXEC != 0 {
        flags |= SHM_EXEC;
        given |= PROT_EXEC;
    }
    let args = [segment.number.into(), map.start.into(), flags.into()];
    script.expect(Sysno::shmat, args, map.start);
    if given != prot {
        let range = [map.start.into(), map.span().bytes().into()];
        script.call(Sysno::mprotect, [range[0], range[1], prot.into()]);
    }
}

/// Reads the stored pages of `span` from the pages file, with one call for each stretch that is
/// consecutive in the file.
fn read_in(planning: &Planning<'_>, span: Span, script: &mut Script) {
    const PIECES_MAX: usize = 1024;
    let stored = clip(planning.pages, span).collect::<Vec<_>>();
    let follows = |a: &Stored, b: &Stored| a.offset + a.span.bytes() == b.offset;
    for stretch in stored.chunk_by(follows) {
        for group in stretch.chunks(PIECES_MAX) {
            let total = group.iter().map(|stored| stored.span.bytes()).sum::<u64>();
            let iov = group
                .iter()
                .flat_map(|stored| [stored.span.start.0, stored.span.bytes()]);
            let iov = iov.flat_map(u64::to_le_bytes).collect::<Vec<_>>();
            let iov = script.bytes(&iov);
            let (number, offset) = (group[0].offset / PAGES_FILE, group[0].offset % PAGES_FILE);
            let file = (planning.files)(number);
            let args = [file.into(), iov.into(), group.len().into(), offset.into()];
            script.expect(Sysno::preadv, args, total);
        }
    }
}

/// Gives it its final protection, advice, guards and lock.
fn settle(map: &Mapping, changed: bool, script: &mut Script) {
    let span = map.span();
    let range = [Arg::from(span.start), span.bytes().into()];
    if changed {
        script.call(Sysno::mprotect, [range[0], range[1], map.prot.into()]);
    }
    for advice in &map.advice {
        script.call(Sysno::madvise, [range[0], range[1], (*advice).into()]);
    }
    for guard in map.guards.chunks_exact(2) {
        let args = [guard[0].into(), guard[1].into(), MADV_GUARD_INSTALL.into()];
        script.call(Sysno::madvise, args);
    }
    if map.locked != 0 {
        let on_fault = map.locked - 1;
        let args = [range[0], range[1], on_fault.into()];
        if map.has_unreachable_pages() {
            script.attempt(Sysno::mlock2, args);
        } else {
            script.call(Sysno::mlock2, args);
        }
    }
}

/// Sets the marks of the address space, the auxiliary vector and the executable.
fn marks(planning: &Planning<'_>, script: &mut Script) -> Result<()> {
    const PR_SET_MM: u32 = 35;
    const PR_SET_MM_MAP: u32 = 14;
    const STRUCT_BYTES: u32 = 13 * 8;
    let memory = planning.memory;
    if memory.auxv.len() > 52 * 8 {
        let what = format!("the auxiliary vector has {} bytes", memory.auxv.len());
        return Err(Error::corrupt("memory", what));
    }
    let auxv = script.bytes(&memory.auxv);
    let mut bytes = memory
        .marks
        .iter()
        .flat_map(|mark| mark.to_le_bytes())
        .collect::<Vec<_>>();
    bytes.resize(STRUCT_BYTES as usize, 0);
    let auxv_bytes = u32::try_from(memory.auxv.len()).expect("checked above");
    bytes[96..100].copy_from_slice(&auxv_bytes.to_le_bytes());
    let map = script.bytes(&bytes);
    script.fix(map, 88, auxv, Width::Eight);
    script.fix(map, 100, (planning.pool)(memory.exe), Width::Four);
    let args = [
        PR_SET_MM.into(),
        PR_SET_MM_MAP.into(),
        map.into(),
        STRUCT_BYTES.into(),
    ];
    script.call(Sysno::prctl, args);
    if memory.lock_future != 0 {
        script.call(Sysno::mlockall, [memory.lock_future.into()]);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::super::memory::{MAP_ANONYMOUS, MAP_PRIVATE};
    use super::*;

    fn anonymous(start: u64, end: u64, prot: u32) -> Mapping {
        let flags = MAP_PRIVATE | MAP_ANONYMOUS;
        Mapping {
            start,
            end,
            prot,
            flags,
            ..Mapping::default()
        }
    }

    fn memory(mappings: Vec<Mapping>) -> Memory {
        Memory {
            marks: vec![0; 11],
            mappings,
            ..Memory::default()
        }
    }

    fn stored(start: u64, end: u64, offset: u64) -> Stored {
        Stored {
            span: Span {
                start: Addr(start),
                end: Addr(end),
            },
            offset,
        }
    }

    fn planning<'a>(memory: &'a Memory, pages: &'a Pages) -> Planning<'a> {
        Planning {
            memory,
            pages,
            parent: None,
            parent_pages: &[],
            early: &[],
            fill: Fill::Itself,
            files: &|_| PoolId(0),
            pool: &PoolId,
            vdso: vdso::lay::Old {
                way: vdso::Way::Absent,
                host: None,
                code: None,
                pid: 1,
            },
        }
    }

    #[test]
    fn stored_pages_are_read_into_a_writable_mapping() {
        let memory = memory(vec![anonymous(0x10000, 0x14000, 1)]);
        let stored = vec![
            stored(0x10000, 0x11000, 0),
            stored(0x12000, 0x13000, 0x1000),
        ];
        let pages = Pages {
            stored,
            ..Pages::default()
        };
        let laid = plan(&planning(&memory, &pages)).expect("plans");
        let want = "mmap(0x10000, 16384, PROT_READ|PROT_WRITE, \
                    MAP_PRIVATE|MAP_FIXED|MAP_ANONYMOUS, -1, 0) = 0x10000\n\
                    preadv(pool[0], [{iov_base=0x10000, iov_len=4096}, \
                    {iov_base=0x12000, iov_len=4096}], 2, 0) = 8192\n";
        assert_eq!(laid.late.to_string(), want);
        assert!(
            laid.finish
                .to_string()
                .starts_with("mprotect(0x10000, 16384, PROT_READ)\n")
        );
    }

    #[test]
    fn a_child_keeps_inherited_pages_and_drops_others() {
        let parent = memory(vec![anonymous(0x10000, 0x18000, 3)]);
        let child = memory(vec![anonymous(0x10000, 0x14000, 3)]);
        let span = |start, end| Span {
            start: Addr(start),
            end: Addr(end),
        };
        let pages = Pages {
            stored: vec![stored(0x12000, 0x13000, 0x5000)],
            inherited: vec![span(0x10000, 0x11000)],
        };
        let mut planning = planning(&child, &pages);
        planning.parent = Some((&parent, &[true], &[3]));
        let parent_pages = [span(0x10000, 0x13000)];
        planning.parent_pages = &parent_pages;
        let laid = plan(&planning).expect("plans");
        assert_eq!(laid.early.to_string(), "munmap(0x14000, 16384)\n");
        let want = "madvise(0x11000, 4096, MADV_DONTNEED)\n\
                    preadv(pool[0], [{iov_base=0x12000, iov_len=4096}], 1, 20480) = 4096\n";
        assert_eq!(laid.late.to_string(), want);
        assert!(!laid.finish.to_string().contains("mprotect"));
    }

    #[test]
    fn a_child_sets_a_protection_that_differs_from_the_inherited_one() {
        let parent = memory(vec![anonymous(0x10000, 0x18000, 1)]);
        let child = memory(vec![
            anonymous(0x10000, 0x14000, 3),
            anonymous(0x14000, 0x18000, 1),
        ]);
        let span = |start, end| Span {
            start: Addr(start),
            end: Addr(end),
        };
        let pages = Pages {
            stored: Vec::new(),
            inherited: vec![span(0x10000, 0x18000)],
        };
        // The parent had to write into it, and protects it when its children are there.
        for (prot, want) in [
            (3, "mprotect(0x14000, 16384, PROT_READ)\n"),
            (1, "mprotect(0x10000, 16384, PROT_READ|PROT_WRITE)\n"),
        ] {
            let prots = [prot];
            let mut planning = planning(&child, &pages);
            planning.parent = Some((&parent, &[true], &prots));
            let laid = plan(&planning).expect("plans");
            let finish = laid.finish.to_string();
            assert!(finish.starts_with(want), "{finish}");
            assert_eq!(finish.matches("mprotect").count(), 1, "{finish}");
        }
    }

    #[test]
    fn mappings_out_of_order_are_refused() {
        let memory = memory(vec![
            anonymous(0x20000, 0x21000, 3),
            anonymous(0x10000, 0x11000, 3),
        ]);
        let pages = Pages::default();
        let error = plan(&planning(&memory, &pages)).expect_err("refused");
        let want = "image record memory: mapping 0x10000-0x11000 is out of order";
        assert_eq!(error.to_string(), want);
    }

    #[test]
    fn locking_what_cannot_be_filled_may_fail() {
        let [mut guard, mut plain] = [0x10000, 0x20000].map(|at| anonymous(at, at + 0x1000, 3));
        (guard.prot, guard.locked, plain.locked) = (0, 1, 1);
        let memory = memory(vec![guard, plain]);
        let laid = plan(&planning(&memory, &Pages::default())).expect("plans");
        let locks = laid.finish.steps.iter();
        let locks = locks.filter(|step| step.call == Sysno::mlock2);
        let kinds = locks.map(|step| step.kind).collect::<Vec<_>>();
        assert_eq!(kinds, [abi::Kind::Try, abi::Kind::Call]);
    }
}
