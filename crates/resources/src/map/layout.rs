//! The calls that lay out a process's address space again.
//!
//! Pages that a child shares with its parent by copy-on-write are restored as they came to be: the
//! parent maps and fills them *early*, before it spawns the child, which keeps what it inherited.
//! Everything else is mapped *late*, straight at its final address.

use abi::Span;
use syscalls::Sysno;

use super::attach::attach;
use super::inherit::{self, Parent};
use super::memory::{Mapping, Memory, Special};
use super::pages::has_own;
pub use super::pages::{DECODED_FILE, Pages, Place, Stored};
pub(super) use super::pages::{clip, overlapping};
use super::{neighbours, policy, promise, read, vdso};
use crate::script::{Arg, PoolId, Script, Width};
use crate::{Error, Result};

const MAP_FIXED: u32 = linux_raw_sys::general::MAP_FIXED;
const PROT_WRITE: u32 = linux_raw_sys::general::PROT_WRITE;
const MADV_GUARD_INSTALL: u32 = linux_raw_sys::general::MADV_GUARD_INSTALL;

/// How stored pages get into the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// The task reads them from the pages files.
    Itself,
    /// The restorer copies them into late anonymous private mappings; the task reads the others.
    Outside,
    /// As [`Fill::Outside`], but pages of most of those mappings come when the task touches them.
    Lazily,
}

/// What the planner knows when it lays out a process.
pub struct Planning<'a> {
    /// The process's own record.
    pub memory: &'a Memory,
    /// Its pages.
    pub pages: &'a Pages,
    /// What it starts with, if its parent is of the image.
    pub parent: Option<Parent<'a>>,
    /// Its own mappings that children keep.
    pub early: &'a [bool],
    /// Whether children keep its vDSO.
    pub vdso_early: bool,
    /// How pages come in.
    pub fill: Fill,
    /// The pool descriptor of each description of the image.
    pub pool: &'a dyn Fn(u32) -> PoolId,
    /// The pool descriptor of each pages file, by number.
    pub files: &'a dyn Fn(u32) -> PoolId,
    /// Where the restorer puts pages that a task cannot read as they are stored.
    pub decoded: &'a dyn Fn(Span) -> Place,
    /// What is known of its vDSO.
    pub vdso: vdso::lay::Old<'a>,
    /// How many bytes of private memory the kernel promises by one call.
    pub at_once_bytes: u64,
}

/// The calls that lay out a process.
#[derive(Debug, Default)]
pub struct Laid {
    /// Before children are spawned.
    pub early: Script,
    /// After that, up to where stored pages are needed.
    pub late: Script,
    /// After the restorer has filled pages, where it does: protections and advice.
    pub finish: Script,
    /// What the restorer has to fill between `late` and `finish`.
    pub outside: Vec<Stored>,
    /// The mappings that those are in.
    pub filled: Vec<Span>,
    /// The mappings whose pages come when the task touches them ([`Fill::Lazily`]).
    pub lazy: Vec<Span>,
    /// What its children start with.
    pub at_fork: AtFork,
    /// Where nothing else may be: where this host's vDSO comes to be, if that is not where the old
    /// one was, and where shared memory is attached of which the process has a part.
    pub taken: Vec<Span>,
    /// The code that another kernel's vDSO becomes.
    pub proxy: Option<vdso::proxy::Proxy>,
}

impl Laid {
    /// Has the pages of a mapping come from outside, now or when they are touched; of one that is
    /// still one with the mapping before it, where it `joins`.
    fn fill_outside(&mut self, planning: &Planning<'_>, map: &Mapping, joins: bool) {
        let mut stored = clip(planning.pages, map.span()).peekable();
        if stored.peek().is_none() {
            return;
        }
        if planning.fill == Fill::Lazily && may_wait(planning.memory, map) {
            self.lazy.push(map.span());
        } else {
            self.outside.extend(stored);
            let before = self.filled.last_mut().filter(|_| joins);
            match before.filter(|before| before.end == map.span().start) {
                Some(before) => before.end = map.span().end,
                None => self.filled.push(map.span()),
            }
        }
    }
}

/// What is mapped in a process when it makes its children.
#[derive(Clone, Debug, Default)]
pub struct AtFork {
    /// Its mappings that are there, sorted: those that are mapped early, and those that it has kept
    /// of what it started with itself.
    pub mapped: Vec<Span>,
    /// Whether its vDSO is there.
    pub vdso: bool,
    /// The protection that each of its mappings has.
    pub protections: Vec<u32>,
    /// The parts that have another protection for as long as the process forks. They divide each
    /// mapping that is larger than the memory which the kernel promises at once: a fork asks for
    /// each mapping as a whole.
    pub cut: Vec<Span>,
}

/// Plans the calls that lay out a process.
///
/// # Errors
/// [`Error::Corrupt`].
pub fn plan(planning: &Planning<'_>) -> Result<Laid> {
    planning.memory.check()?;
    let mut laid = Laid::default();
    let vdso = vdso::lay::plan(planning.memory, &planning.vdso)?;
    let inherited = inherit::inherited(planning);
    let kept = inherited.iter().map(Option::is_some).collect::<Vec<_>>();
    let mut protections = protections(planning, &inherited);
    let ends = neighbours::ends(planning, &kept, &protections);
    inherit::unmap_rest(planning, &kept, &mut laid.early);
    let [mut read_early, mut read_late] = [Vec::new(), Vec::new()];
    let [mut zero_early, mut zero_late] = [Vec::new(), Vec::new()];
    let [mut final_early, mut final_late] = [FinalSettings::default(), FinalSettings::default()];
    for (index, map) in planning.memory.mappings.iter().enumerate() {
        if map.special() != Special::No {
            continue;
        }
        let early = planning.early.get(index).copied().unwrap_or(false);
        let (script, reads, zeros) = if early {
            (&mut laid.early, &mut read_early, &mut zero_early)
        } else {
            (&mut laid.late, &mut read_late, &mut zero_late)
        };
        let prot = protections[index];
        if let Some(inherited) = inherited[index] {
            inherit::keep(planning, map, (inherited, prot), script)?;
        } else if let Some(end) = ends[index] {
            let taken = lay(planning, map, (end, prot), vdso.host_vdso, script)?;
            laid.taken.extend(taken);
        }
        promise::prove(planning, map, prot, script);
        // Who fills from outside does so by small pages.
        let small = map.huge_page_bytes().is_none();
        let fresh = !early && !kept[index] && map.is_private() && map.is_anonymous() && small;
        if fresh && planning.fill != Fill::Itself {
            laid.fill_outside(planning, map, ends[index].is_none());
        } else if map.is_private() {
            reads.extend(clip(planning.pages, map.span()));
            let zero = overlapping(&planning.pages.zero, map.span());
            zeros.extend(zero.map(|zero| zero.intersect(map.span())));
        }
        let empty = planning.pages.is_empty(map.span());
        let settings = if early && empty {
            protections[index] = map.prot;
            &mut final_early
        } else {
            &mut final_late
        };
        settings.add(map, prot != map.prot, !(kept[index] && empty));
    }
    read::read_in(planning, read_early, &mut laid.early);
    read::read_in(planning, read_late, &mut laid.late);
    read::zero(planning, &zero_early, &mut laid.early);
    read::zero(planning, &zero_late, &mut laid.late);
    laid.at_fork = inherit::at_fork(planning, &kept, protections);
    final_early.call(planning, &mut laid.early);
    final_late.call(planning, &mut laid.finish);
    promise::cut(planning, &mut laid);
    guard(planning.memory, &mut laid.finish);
    match planning {
        _ if inherit::inherits_vdso(planning) => {}
        _ if planning.vdso_early => laid.early.append(vdso.script),
        _ => laid.late.append(vdso.script),
    }
    laid.taken.extend(vdso.host_vdso);
    laid.proxy = vdso.proxy;
    marks(planning, &mut laid.finish)?;
    seal(planning.memory, &mut laid.finish);
    Ok(laid)
}

/// Seals what is sealed: after that, nobody can change how it is mapped.
fn seal(memory: &Memory, script: &mut Script) {
    let sealed = memory.mappings.iter().filter(|map| map.is_sealed);
    let sealed = sealed.map(Mapping::span).collect::<Vec<_>>();
    for stretch in sealed.chunk_by(|one, next| one.end == next.start) {
        let (first, last) = (stretch[0], stretch[stretch.len() - 1]);
        let bytes = last.end.0 - first.start.0;
        script.call(
            Sysno::mseal,
            [first.start.into(), bytes.into(), 0u32.into()],
        );
    }
}

/// Whether pages of a mapping may come when they are touched. Locked ones are there before that,
/// and what a child has zeros for instead is not told to who serves it.
fn may_wait(memory: &Memory, map: &Mapping) -> bool {
    const MADV_WIPEONFORK: u32 = linux_raw_sys::general::MADV_WIPEONFORK;
    map.locked == 0 && memory.lock_future == 0 && !map.advice.contains(&MADV_WIPEONFORK)
}

/// The protection of each mapping while pages are read into it.
fn protections(planning: &Planning<'_>, inherited: &[Option<u32>]) -> Vec<u32> {
    let maps = planning.memory.mappings.iter().zip(inherited);
    let prots = maps.map(|(map, inherited)| {
        let prot = inherited.unwrap_or(map.prot);
        let writable = map.is_private() && has_own(planning.pages, map.span());
        let writable = writable || promise::is_lacking(planning, map, inherited.is_some());
        if writable { prot | PROT_WRITE } else { prot }
    });
    prots.collect()
}

/// Maps it, up to `end`, with a protection that lets pages in; `taken`: where nothing else may be.
/// Gives what is needed beside that.
fn lay(
    planning: &Planning<'_>,
    map: &Mapping,
    (end, prot): (u64, u32),
    taken: Option<Span>,
    script: &mut Script,
) -> Result<Option<Span>> {
    if let Some(segment) = map.segment {
        return attach(planning.memory, map, (segment, prot), taken, script);
    }
    let file = map
        .file
        .map_or(Arg::from(-1i32), |file| (planning.pool)(file).into());
    let span = Span::new(map.span().start, end - map.start);
    for piece in promise::pieces(planning, map.is_promised(prot, false), span) {
        let args = [
            piece.start.into(),
            piece.bytes().into(),
            prot.into(),
            (map.flags | MAP_FIXED).into(),
            file,
            (map.offset + (piece.start.0 - map.start)).into(),
        ];
        script.expect(Sysno::mmap, args, piece.start.0);
    }
    if !map.name.is_empty() {
        const PR_SET_VMA: u32 = linux_raw_sys::prctl::PR_SET_VMA;
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
    policy::bind(map, script);
    Ok(None)
}

/// Mappings that get their final protection and advice; neighbours get the same by one call.
#[derive(Default)]
struct FinalSettings<'a> {
    protected: Vec<&'a Mapping>,
    advised: Vec<&'a Mapping>,
}

impl<'a> FinalSettings<'a> {
    fn add(&mut self, map: &'a Mapping, protect: bool, advise: bool) {
        if protect {
            self.protected.push(map);
        }
        if advise && !map.advice.is_empty() {
            self.advised.push(map);
        }
    }

    fn call(self, planning: &Planning<'_>, script: &mut Script) {
        let range = |stretch: &[&Mapping]| {
            let (first, last) = (stretch[0], stretch[stretch.len() - 1]);
            [Arg::from(first.start), (last.end - first.start).into()]
        };
        let next = |one: &Mapping, next: &Mapping| one.end == next.start;
        let alike = |a: &&Mapping, b: &&Mapping| next(a, b) && a.prot == b.prot;
        for stretch in self.protected.chunk_by(alike) {
            let (first, last) = (stretch[0], stretch[stretch.len() - 1]);
            let all = Span::new(first.span().start, last.end - first.start);
            promise::protect(planning, all, first.prot, script);
        }
        let alike = |a: &&Mapping, b: &&Mapping| next(a, b) && a.advice == b.advice;
        for stretch in self.advised.chunk_by(alike) {
            for advice in &stretch[0].advice {
                let [start, bytes] = range(stretch);
                script.call(Sysno::madvise, [start, bytes, (*advice).into()]);
            }
        }
    }
}

/// Gives mappings their guards and their locks.
fn guard(memory: &Memory, script: &mut Script) {
    let own = memory.mappings.iter();
    own.filter(|map| map.special() == Special::No)
        .for_each(|map| guard_one(map, script));
}

fn guard_one(map: &Mapping, script: &mut Script) {
    for guard in map.guards.chunks_exact(2) {
        let args = [guard[0].into(), guard[1].into(), MADV_GUARD_INSTALL.into()];
        script.call(Sysno::madvise, args);
    }
    if map.locked != 0 {
        let on_fault = map.locked - 1;
        let args = [map.start.into(), map.span().bytes().into(), on_fault.into()];
        if map.has_unreachable_pages() {
            script.attempt(Sysno::mlock2, args);
        } else {
            script.call(Sysno::mlock2, args);
        }
    }
}

/// Sets the marks of the address space, the auxiliary vector and the executable.
fn marks(planning: &Planning<'_>, script: &mut Script) -> Result<()> {
    const PR_SET_MM: u32 = linux_raw_sys::prctl::PR_SET_MM;
    const PR_SET_MM_MAP: u32 = linux_raw_sys::prctl::PR_SET_MM_MAP;
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
pub(super) mod tests {
    use abi::Addr;

    use super::super::memory::{MAP_ANONYMOUS, MAP_PRIVATE};
    use super::*;

    pub(in super::super) fn anonymous(start: u64, end: u64, prot: u32) -> Mapping {
        let flags = MAP_PRIVATE | MAP_ANONYMOUS;
        Mapping {
            start,
            end,
            prot,
            flags,
            ..Mapping::default()
        }
    }

    pub(in super::super) fn memory(mappings: Vec<Mapping>) -> Memory {
        Memory {
            marks: vec![0; 11],
            mappings,
            ..Memory::default()
        }
    }

    pub(in super::super) fn stored(start: u64, end: u64, offset: u64) -> Stored {
        Stored {
            span: Span {
                start: Addr(start),
                end: Addr(end),
            },
            at: Some(Place {
                file: 0,
                offset_bytes: offset,
            }),
        }
    }

    pub(in super::super) fn planning<'a>(memory: &'a Memory, pages: &'a Pages) -> Planning<'a> {
        Planning {
            memory,
            pages,
            parent: None,
            early: &[],
            vdso_early: false,
            fill: Fill::Itself,
            files: &|_| PoolId(0),
            decoded: &|_| unreachable!("pages are stored as they are"),
            pool: &PoolId,
            vdso: vdso::lay::Old {
                way: vdso::Way::Absent,
                host: None,
                code: None,
                pid: 1,
            },
            at_once_bytes: u64::MAX,
        }
    }

    /// All of `memory` with these protections.
    pub(in super::super) fn at_fork(memory: &Memory, protections: &[u32]) -> AtFork {
        AtFork {
            mapped: memory.mappings.iter().map(Mapping::span).collect(),
            vdso: false,
            protections: protections.to_vec(),
            cut: Vec::new(),
        }
    }

    #[test]
    fn neighbours_are_sealed_by_one_call_that_comes_last() {
        let sealed = |start, end, prot| Mapping {
            is_sealed: true,
            ..anonymous(start, end, prot)
        };
        let memory = memory(vec![
            sealed(0x10000, 0x12000, 1),
            sealed(0x12000, 0x13000, 3),
            anonymous(0x13000, 0x14000, 1),
            sealed(0x14000, 0x15000, 1),
        ]);
        let pages = Pages::default();
        let laid = plan(&planning(&memory, &pages)).expect("sound");
        let finish = laid.finish.to_string();
        let want =
            "mseal(addr=0x10000, len=12288, flags=0)\nmseal(addr=0x14000, len=4096, flags=0)\n";
        assert!(finish.ends_with(want), "{finish}");
        let before = [laid.early, laid.late]
            .map(|script| script.to_string())
            .concat();
        assert!(!before.contains("mseal"), "{before}");
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
        let want = "mmap(addr=0x10000, len=16384, prot=READ|WRITE, \
                    flags=PRIVATE|FIXED|0x20, fd=-1, offset=0) = 0x10000\n\
                    preadv(fd=pool[0], iov=[{base=0x10000, len=4096}, \
                    {base=0x12000, len=4096}], count=2, offset=0) = 8192\n";
        assert_eq!(laid.late.to_string(), want);
        let finish = laid.finish.to_string();
        assert!(finish.starts_with("mprotect(addr=0x10000, len=16384, prot=READ)\n"));
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
            ..Pages::default()
        };
        let mut planning = planning(&child, &pages);
        let present = [span(0x10000, 0x13000)];
        let at_fork = at_fork(&parent, &[3]);
        planning.parent = Some(Parent {
            memory: &parent,
            early: &[true],
            present: &present,
            at_fork: &at_fork,
        });
        let laid = plan(&planning).expect("plans");
        assert_eq!(laid.early.to_string(), "munmap(addr=0x14000, len=16384)\n");
        let want = "madvise(addr=0x11000, len=4096, advice=4)\n\
                    preadv(fd=pool[0], iov=[{base=0x12000, len=4096}], count=1, offset=20480) \
                    = 4096\n";
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
            inherited: vec![span(0x10000, 0x18000)],
            ..Pages::default()
        };
        // The parent had to write into it, and protects it when its children are there.
        for (prot, want) in [
            (3, "mprotect(addr=0x14000, len=16384, prot=READ)\n"),
            (1, "mprotect(addr=0x10000, len=16384, prot=READ|WRITE)\n"),
        ] {
            let at_fork = at_fork(&parent, &[prot]);
            let mut planning = planning(&child, &pages);
            planning.parent = Some(Parent {
                memory: &parent,
                early: &[true],
                present: &[],
                at_fork: &at_fork,
            });
            let laid = plan(&planning).expect("plans");
            let finish = laid.finish.to_string();
            assert!(finish.starts_with(want), "{finish}");
            assert_eq!(finish.matches("mprotect").count(), 1, "{finish}");
        }
    }

    #[test]
    fn zeros_cover_what_a_file_has() {
        let mut map = anonymous(0x10000, 0x14000, 1);
        (map.flags, map.file) = (MAP_PRIVATE, Some(7));
        let memory = memory(vec![map, anonymous(0x14000, 0x16000, 3)]);
        let mut pages = Pages {
            zero: vec![Span::new(Addr(0x13000), 0x2000)],
            ..Pages::default()
        };
        pages.drop_plain_zeros(&memory);
        assert_eq!(pages.zero, [Span::new(Addr(0x13000), 0x1000)]);
        let laid = plan(&planning(&memory, &pages)).expect("plans");
        let late = laid.late.to_string();
        let want = "mmap(addr=0x10000, len=16384, prot=READ|WRITE, flags=PRIVATE|FIXED, fd=";
        assert!(late.starts_with(want), "{late}");
        assert!(late.contains("process_vm_readv(pid=1, "), "{late}");
        let finish = laid.finish.to_string();
        assert!(
            finish.starts_with("mprotect(addr=0x10000, len=16384, prot=READ)\n"),
            "{finish}"
        );
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
        let mappings = [(0x10000, 0), (0x20000, 4), (0x30000, 3)].map(|(at, prot)| Mapping {
            locked: 1,
            ..anonymous(at, at + 0x1000, prot)
        });
        let memory = memory(mappings.to_vec());
        let laid = plan(&planning(&memory, &Pages::default())).expect("plans");
        let locks = laid.finish.steps.iter();
        let locks = locks.filter(|step| step.call == Sysno::mlock2);
        let kinds = locks.map(|step| step.kind).collect::<Vec<_>>();
        assert_eq!(kinds, [abi::Kind::Try, abi::Kind::Try, abi::Kind::Call]);
    }
}
