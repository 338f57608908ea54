//! A process's address space: the record in an image; see [`super::layout`] for what becomes of it.
//!
//! - What: mappings
//! - Kept: private and shared ones, of files and without, with protection, advice, locks, names,
//!   guards, huge pages, seals (mseal(2)), droppable and growing ones; pages that tasks share by
//!   copy-on-write stay shared.
//! - Refused: memory of a device, a shadow stack, a file of persistent memory (`MAP_SYNC`), a
//!   letter of `VmFlags` that is not known ([ledger.md](ledger.md)), and shared memory that may
//!   have guards; "it has huge pages of a file that nobody can open again" (a deleted one); "it has
//!   huge pages of its own over those of a file"; "a part of a ring of io_uring was unmapped or
//!   protected"; "it shows a map of BPF"; "it is a ring of a performance event"; "it is a ring, and
//!   sealed"; "it is secret memory (memfd_secret), which nobody else can read"; "it has a
//!   protection key"; mappings of the kernel's own such as `[uprobes]`, by their name alone.
//! - CRIU 4.2: kept, shadow stacks too; names of anonymous memory are not, nor `mlockall` for later
//!   mappings, nor seals. Memory of devices only with a plugin for them, `[uprobes]` with
//!   `--allow-uprobes`.

use abi::{Addr, PAGE_BYTES, Span};
use prost::Message;

use super::listing::{Backing, HUGE_PAGES, Listed};
use super::policy::Policy;
use crate::fd::perf_event;
use crate::{Error, Result, ledger};

/// The record's number in images.
pub const TAG: u16 = 300;

/// An address space in an image.
#[derive(Clone, PartialEq, Message)]
pub struct Memory {
    /// The marks that /proc/PID/stat shows and `PR_SET_MM_MAP` sets, in the order of
    /// `struct prctl_mm_map`: start_code, end_code, start_data, end_data, start_brk, brk,
    /// start_stack, arg_start, arg_end, env_start, env_end.
    #[prost(uint64, repeated, tag = "1")]
    pub marks: Vec<u64>,
    /// /proc/PID/auxv.
    #[prost(bytes = "vec", tag = "2")]
    pub auxv: Vec<u8>,
    /// The description of /proc/PID/exe.
    #[prost(uint32, tag = "3")]
    pub exe: u32,
    /// The mappings, sorted and disjoint.
    #[prost(message, repeated, tag = "4")]
    pub mappings: Vec<Mapping>,
    /// The build id of the vDSO, if it has one mapped.
    #[prost(bytes = "vec", tag = "5")]
    pub vdso_build_id: Vec<u8>,
    /// Bits of `mlockall` that apply to later mappings (`MCL_FUTURE`, `MCL_ONFAULT`).
    #[prost(uint32, tag = "6")]
    pub lock_future: u32,
    /// Whether its vDSO is the one of 32-bit programs.
    #[prost(bool, tag = "7")]
    pub vdso_is_32_bit: bool,
}

/// One mapping in an image.
#[derive(Clone, PartialEq, Message)]
pub struct Mapping {
    /// The first address.
    #[prost(uint64, tag = "1")]
    pub start: u64,
    /// The address after the last.
    #[prost(uint64, tag = "2")]
    pub end: u64,
    /// `PROT_READ`, `PROT_WRITE`, `PROT_EXEC`.
    #[prost(uint32, tag = "3")]
    pub prot: u32,
    /// `MAP_SHARED`, `MAP_PRIVATE`, `MAP_ANONYMOUS`, `MAP_GROWSDOWN`, `MAP_NORESERVE`,
    /// `MAP_DROPPABLE`, `MAP_HUGETLB` with the size of its pages.
    #[prost(uint32, tag = "4")]
    pub flags: u32,
    /// The offset in the file in bytes.
    #[prost(uint64, tag = "5")]
    pub offset: u64,
    /// The file's description.
    #[prost(uint32, optional, tag = "6")]
    pub file: Option<u32>,
    /// [`Special`] mappings are the kernel's.
    #[prost(enumeration = "Special", tag = "7")]
    pub special: i32,
    /// `madvise` values to give, in this order.
    #[prost(uint32, repeated, tag = "8")]
    pub advice: Vec<u32>,
    /// Whether its pages are locked: 1 by `mlock`, 2 by `mlock2(MLOCK_ONFAULT)`.
    #[prost(uint32, tag = "9")]
    pub locked: u32,
    /// The name given by `PR_SET_VMA_ANON_NAME`.
    #[prost(bytes = "vec", tag = "10")]
    pub name: Vec<u8>,
    /// Guard regions inside: first address and length in bytes, in turn.
    #[prost(uint64, repeated, tag = "11")]
    pub guards: Vec<u64>,
    /// The System V shared memory that it is.
    #[prost(message, optional, tag = "12")]
    pub segment: Option<Segment>,
    /// Its memory policy, if it is not the thread's.
    #[prost(message, optional, tag = "13")]
    pub policy: Option<Policy>,
    /// True if it is sealed (mseal(2)).
    #[prost(bool, tag = "14")]
    pub is_sealed: bool,
    /// True if the kernel counts it as promised memory (`VM_ACCOUNT`) although it is not writable:
    /// it was once.
    #[prost(bool, tag = "15")]
    pub promised: bool,
}

/// An attached segment of System V shared memory, whose file only tells what is in it.
#[derive(Clone, Copy, PartialEq, Message)]
pub struct Segment {
    /// Its number (shmid).
    #[prost(int32, tag = "1")]
    pub number: i32,
    /// Whether it is attached for reading only.
    #[prost(bool, tag = "2")]
    pub read_only: bool,
    /// Its size in bytes, a multiple of its pages' size, of which the mapping may be a part; 0 in
    /// older images, in which it is all of it.
    #[prost(uint64, tag = "3")]
    pub bytes: u64,
}

/// Mappings that the kernel makes by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, prost::Enumeration)]
#[repr(i32)]
pub enum Special {
    /// None.
    No = 0,
    /// The vDSO's code.
    Vdso = 1,
    /// The vDSO's data.
    Vvar = 2,
    /// A ring of io_uring(7), which has a file all the same.
    Ring = 3,
    /// A ring of asynchronous I/O (io_setup(2)).
    Aio = 4,
}

const PROT_EXEC: u32 = linux_raw_sys::general::PROT_EXEC;
const MAP_SHARED: u32 = linux_raw_sys::general::MAP_SHARED;
pub(super) const MAP_PRIVATE: u32 = linux_raw_sys::general::MAP_PRIVATE;
const MAP_DROPPABLE: u32 = linux_raw_sys::general::MAP_DROPPABLE;
pub(super) const MAP_ANONYMOUS: u32 = linux_raw_sys::general::MAP_ANONYMOUS;
const MAP_GROWSDOWN: u32 = linux_raw_sys::general::MAP_GROWSDOWN;
const MAP_NORESERVE: u32 = linux_raw_sys::general::MAP_NORESERVE;
const MAP_HUGETLB: u32 = linux_raw_sys::general::MAP_HUGETLB;
/// Where `MAP_HUGETLB` has the base-2 logarithm of the size of a page.
const MAP_HUGE_SHIFT: u32 = linux_raw_sys::general::MAP_HUGE_SHIFT;
const MCL_FUTURE: u32 = linux_raw_sys::general::MCL_FUTURE;
const MCL_ONFAULT: u32 = linux_raw_sys::general::MCL_ONFAULT;

/// The `VmFlags` code of memory that nobody can unmap, move or protect any more.
const SEALED: &[u8; 2] = b"sl";

/// `VmFlags` codes and the advice that sets them.
const ADVICE: [(&[u8; 2], u32); 8] = [
    (b"sr", 2),  // MADV_SEQUENTIAL
    (b"rr", 1),  // MADV_RANDOM
    (b"dc", 10), // MADV_DONTFORK
    (b"dd", 16), // MADV_DONTDUMP
    (b"wf", 18), // MADV_WIPEONFORK
    (b"hg", 14), // MADV_HUGEPAGE
    (b"nh", 15), // MADV_NOHUGEPAGE
    (b"mg", 12), // MADV_MERGEABLE
];

impl Memory {
    /// Checks what an image claims: mappings are sorted, disjoint and of whole pages, each has a
    /// file or none as its flags say, and nothing else is asked of the kernel than what a dump
    /// finds: some advice destroys files or breaks the machine's memory.
    ///
    /// # Errors
    /// [`Error::Corrupt`].
    pub fn check(&self) -> Result<()> {
        const TOP: u64 = 1 << 56;
        let bad = |what: String| Err(Error::corrupt("memory", what));
        let mut last = 0;
        for map in &self.mappings {
            let whole = map.start.is_multiple_of(PAGE_BYTES) && map.end.is_multiple_of(PAGE_BYTES);
            if !whole || map.start < last || map.end <= map.start || map.end > TOP {
                return bad(format!("mapping {} is out of order", map.span()));
            }
            let has_file = map.file.is_some();
            let wrong_file = match map.special() {
                Special::No => has_file == map.is_anonymous(),
                Special::Ring => !has_file || map.flags & MAP_SHARED == 0,
                Special::Aio => has_file || map.flags & MAP_SHARED == 0,
                Special::Vdso | Special::Vvar => false,
            };
            if wrong_file {
                let span = map.span();
                return bad(format!("mapping {span} has no file or one too many"));
            }
            if let Some(what) = map.overreach() {
                return bad(format!("mapping {} has {what}", map.span()));
            }
            last = map.end;
        }
        if self.lock_future & !(MCL_FUTURE | MCL_ONFAULT) != 0 {
            return bad(format!("{:#x} locks later mappings", self.lock_future));
        }
        if self.marks.len() != 11 {
            return bad(format!("{} marks instead of 11", self.marks.len()));
        }
        Ok(())
    }
}

/// What [`Memory::lock_future`] is, as a mapping shows that was just made.
#[must_use]
pub fn lock_future(fresh: &Listed) -> u32 {
    match (fresh.has(b"lo"), fresh.locks_on_fault()) {
        (true, true) => MCL_FUTURE | MCL_ONFAULT,
        (true, false) => MCL_FUTURE,
        _ => 0,
    }
}

impl Mapping {
    /// What no dump has written, if there is any of it.
    fn overreach(&self) -> Option<String> {
        const KINDS: [u32; 3] = [MAP_SHARED, MAP_PRIVATE, MAP_DROPPABLE];
        const FLAGS: u32 = MAP_ANONYMOUS | MAP_GROWSDOWN | MAP_NORESERVE;
        const PROT_ALL: u32 = 7;
        let huge = self.huge_page_bytes().map_or(0, huge_pages_of);
        let kind = self.flags & !(FLAGS | huge);
        if !KINDS.contains(&kind) || huge != 0 && !self.is_private_anonymous() {
            return Some(format!("flags {:#x}", self.flags));
        }
        if self.prot & !PROT_ALL != 0 || self.locked > 2 {
            let (prot, locked) = (self.prot, self.locked);
            return Some(format!("protection {prot:#x} and lock {locked}"));
        }
        if let Some(segment) = self.segment {
            let end = self.offset.checked_add(self.span().bytes());
            let is_part = match segment.bytes {
                0 => self.offset == 0,
                bytes => end.is_some_and(|end| end <= bytes) && bytes.is_multiple_of(PAGE_BYTES),
            };
            if self.file.is_none() || kind != MAP_SHARED || !is_part {
                return Some("a segment that it cannot be".to_owned());
            }
        }
        let known = |advice: &u32| ADVICE.iter().any(|(_, known)| known == advice);
        if let Some(advice) = self.advice.iter().find(|advice| !known(advice)) {
            return Some(format!("advice {advice}"));
        }
        if let Some(policy) = self.policy.as_ref().filter(|policy| !policy.is_known()) {
            return Some(format!("policy {:#x}", policy.mode));
        }
        let inside = |guard: &[u64]| {
            let [start, bytes] = *guard else { return false };
            let whole = start.is_multiple_of(PAGE_BYTES) && bytes.is_multiple_of(PAGE_BYTES);
            let end = start.checked_add(bytes);
            whole && start >= self.start && end.is_some_and(|end| end <= self.end)
        };
        let outside = !self.guards.chunks(2).all(inside);
        outside.then(|| "a guard region outside of it".to_owned())
    }

    /// Whether locking it may find pages that cannot be brought in, which the kernel reports
    /// although it has locked the mapping. mlockall(2), by which such mappings come to be locked,
    /// does not report it.
    pub(super) fn has_unreachable_pages(&self) -> bool {
        const READ_OR_WRITE: u32 = 3;
        // Memory that can only be executed has a protection key that nobody may read by.
        self.prot & READ_OR_WRITE == 0 || !self.guards.is_empty() || !self.is_anonymous()
    }

    /// The addresses.
    #[must_use]
    pub fn span(&self) -> Span {
        Span {
            start: Addr(self.start),
            end: Addr(self.end),
        }
    }

    /// Whether it is the vDSO's code or data.
    #[must_use]
    pub fn is_of_vdso(&self) -> bool {
        matches!(self.special(), Special::Vdso | Special::Vvar)
    }

    /// Whether writes stay in this process.
    #[must_use]
    pub fn is_private(&self) -> bool {
        self.flags & MAP_SHARED == 0 && self.special() == Special::No
    }

    /// True if nothing is set aside for it (`MAP_NORESERVE`).
    #[must_use]
    pub fn is_unreserved(&self) -> bool {
        self.flags & MAP_NORESERVE != 0
    }

    /// The size of its pages where it is anonymous and has huge ones.
    #[must_use]
    pub fn huge_page_bytes(&self) -> Option<u64> {
        let shift = self.flags >> MAP_HUGE_SHIFT;
        (self.flags & MAP_HUGETLB != 0).then(|| 1 << shift)
    }

    /// Whether it is of a kind of which two neighbours can be mapped by one call.
    pub(super) fn may_join(&self) -> bool {
        let grows = self.flags & MAP_GROWSDOWN != 0;
        self.is_private_anonymous() && self.huge_page_bytes().is_none() && !grows
    }

    fn is_private_anonymous(&self) -> bool {
        self.is_private() && self.is_anonymous()
    }

    /// True if the kernel promises memory for all of it while it has the protection `prot`
    /// (`VM_ACCOUNT`): private memory that can be written to. A host that never overcommits makes
    /// the promise for `MAP_NORESERVE`, too.
    #[must_use]
    pub fn is_promised(&self, prot: u32, never_overcommits: bool) -> bool {
        const PROT_WRITE: u32 = linux_raw_sys::general::PROT_WRITE;
        let asks_for_none = self.flags & MAP_NORESERVE != 0 && !never_overcommits;
        let excepted = asks_for_none || self.flags & (MAP_HUGETLB | MAP_DROPPABLE) != 0;
        let is_private = self.is_private() && self.special() == Special::No;
        is_private && !excepted && (prot & PROT_WRITE != 0 || self.promised)
    }

    /// Whether it has no file.
    #[must_use]
    pub fn is_anonymous(&self) -> bool {
        self.flags & MAP_ANONYMOUS != 0
    }

    /// What it becomes in an image; `file` is the description of its file.
    ///
    /// # Errors
    /// [`Error::Unsupported`] naming the mapping.
    pub fn of(listed: &Listed, pid: i32, file: Option<u32>) -> Result<Self> {
        // Some that the kernel counts as memory of a device are known better.
        if let Some(why) = hinders(listed) {
            return Err(Error::unsupported(pid, listed.place()).because(why));
        }
        if let Some(why) = refusal(listed) {
            return Err(Error::unsupported(pid, listed.place()).because(why));
        }
        let special = match listed.backing() {
            Backing::Vdso => Special::Vdso,
            Backing::Vvar => Special::Vvar,
            Backing::Special => return Err(Error::unsupported(pid, listed.place())),
            Backing::File if listed.is_ring() => Special::Ring,
            Backing::File if listed.is_aio() => Special::Aio,
            Backing::Anonymous | Backing::File => Special::No,
        };
        let mut flags = if listed.shared {
            MAP_SHARED
        } else {
            MAP_PRIVATE
        };
        let set = [
            (listed.backing() == Backing::Anonymous, MAP_ANONYMOUS),
            (listed.has(b"gd"), MAP_GROWSDOWN),
            (listed.has(b"nr"), MAP_NORESERVE),
        ];
        flags |= set
            .iter()
            .map(|(on, flag)| if *on { *flag } else { 0 })
            .sum::<u32>();
        if listed.has_huge_pages() && listed.backing() == Backing::Anonymous {
            flags |= huge_pages_of(listed.page_bytes);
        }
        if listed.has(b"dp") {
            flags = flags & !(MAP_PRIVATE | MAP_NORESERVE) | MAP_DROPPABLE;
        }
        let name = listed
            .name
            .strip_prefix(b"[anon:")
            .and_then(|name| name.strip_suffix(b"]"));
        let advice = ADVICE
            .iter()
            .filter(|(code, _)| listed.has(code) && !implied(listed, code));
        Ok(Self {
            start: listed.span.start.0,
            end: listed.span.end.0,
            prot: listed.prot,
            flags,
            offset: listed.offset,
            file,
            special: special as i32,
            advice: advice.map(|(_, advice)| *advice).collect(),
            locked: match (listed.has(b"lo"), listed.locks_on_fault()) {
                (true, true) => 2,
                (true, false) => 1,
                _ => 0,
            },
            name: name.unwrap_or_default().to_vec(),
            guards: Vec::new(),
            segment: segment_of(listed, file.is_some()),
            policy: None,
            is_sealed: listed.has(SEALED) && special == Special::No,
            promised: is_promised_unwritable(listed),
        })
    }

    /// Whether a child's mapping can keep what it inherited of its parent's `early` one.
    pub(super) fn inherits(&self, early: &Self) -> bool {
        let place = |map: &Self| map.offset.wrapping_sub(map.start);
        let kind = MAP_ANONYMOUS | MAP_GROWSDOWN | MAP_DROPPABLE | MAP_NORESERVE;
        // Huge pages are copied whole, and parts of them cannot be given up.
        let is_huge = self.huge_page_bytes().is_some();
        self.is_private()
            && early.is_private()
            && !is_huge
            && early.start <= self.start
            && self.end <= early.end
            && self.flags & kind == early.flags & kind
            && self.file == early.file
            && (self.is_anonymous() || place(self) == place(early))
            && self.name == early.name
            && self.policy == early.policy
    }
}

/// True if the kernel counts private memory as promised that cannot be written to.
fn is_promised_unwritable(listed: &Listed) -> bool {
    const PROT_WRITE: u32 = linux_raw_sys::general::PROT_WRITE;
    let kernels = matches!(listed.backing(), Backing::Vdso | Backing::Vvar);
    !listed.shared && !kernels && listed.prot & PROT_WRITE == 0 && listed.has(b"ac")
}

/// The System V segment that it is of. Its size is asked for where the mapping is `for_image`; who
/// looks at the whole tree refuses those that nothing can be asked of.
fn segment_of(listed: &Listed, for_image: bool) -> Option<Segment> {
    let number = listed.segment()?;
    let page_bytes = listed.page_bytes.max(PAGE_BYTES);
    let stat = for_image.then(|| sys::shm::stat(number).ok()).flatten();
    Some(Segment {
        number,
        read_only: !listed.has(b"mw"),
        bytes: stat.map_or(0, |segment| segment.bytes.next_multiple_of(page_bytes)),
    })
}

/// The flags of anonymous memory with huge pages of this size.
fn huge_pages_of(page_bytes: u64) -> u32 {
    MAP_HUGETLB | page_bytes.trailing_zeros() << MAP_HUGE_SHIFT
}

/// Why memory of memfd_secret(2) is not saved.
const SECRET: &str = "it is secret memory (memfd_secret), which nobody else can read";

/// Refuses a task that has mapped memory which nobody else can read.
///
/// # Errors
/// [`Error::Unsupported`] naming the mapping.
pub fn check_secret(listed: &[Listed], pid: i32) -> Result<()> {
    match listed.iter().find(|listed| listed.is_secret()) {
        Some(secret) => Err(Error::unsupported(pid, secret.place()).because(SECRET)),
        None => Ok(()),
    }
}

/// Why a mapping of a file cannot be made again, if so. Memory with huge pages can where it is
/// anonymous, System V shared memory, or a memfd or a file with a path that is shared.
fn hinders(listed: &Listed) -> Option<&'static str> {
    /// Where the parts of a ring of io_uring(7) begin.
    const RING_PARTS: [u64; 3] = [0, 0x800_0000, 0x1000_0000];
    if listed.is_ring() && !RING_PARTS.contains(&listed.offset) {
        return Some("a part of a ring of io_uring was unmapped or protected");
    }
    let name = &listed.name[..];
    if (listed.is_ring() || listed.is_aio()) && listed.has(SEALED) {
        return Some("it is a ring, and sealed");
    }
    if listed.is_secret() {
        return Some(SECRET);
    }
    // The kernel itself gives one to memory that can only be executed.
    if listed.protection_key != 0 && listed.prot != PROT_EXEC {
        return Some("it has a protection key");
    }
    if name == b"anon_inode:bpf-map" {
        return Some("it shows a map of BPF");
    }
    if name == perf_event::LINK {
        return Some("it is a ring of a performance event");
    }
    let is_made_again = name.starts_with(b"/memfd:") || listed.segment().is_some();
    let has_path = !name.ends_with(b" (deleted)") || is_made_again;
    match listed.has_huge_pages() && name != HUGE_PAGES {
        true if !has_path => Some("it has huge pages of a file that nobody can open again"),
        true if !listed.shared => Some("it has huge pages of its own over those of a file"),
        _ => None,
    }
}

/// The kernel itself sets "dd" and "wf" on droppable mappings and "dd" on its own.
fn implied(listed: &Listed, code: &[u8; 2]) -> bool {
    let kernel = matches!(listed.backing(), Backing::Vdso | Backing::Vvar);
    kernel || (listed.has(b"dp") && (code == b"dd" || code == b"wf"))
}

/// Why the flags of a mapping cannot be set again, if so; those of the vDSO are the kernel's own.
fn refusal(listed: &Listed) -> Option<String> {
    let kernel = matches!(listed.backing(), Backing::Vdso | Backing::Vvar);
    let why = (!kernel).then(|| ledger::memory::refusal(listed));
    why.flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protection_keys_that_a_program_has_set_are_refused_by_name() {
        let of = |prot: &str, key: u32| {
            let line = format!("1000-3000 {prot} 00000000 00:00 0 \nProtectionKey: {key}\n");
            let listed = crate::map::listing::parse(line.as_bytes()).expect("a list");
            Mapping::of(&listed[0], 7, None).map(drop)
        };
        of("rw-p", 0).expect("it has none");
        of("--xp", 1).expect("the kernel's own");
        let error = of("rw-p", 1).expect_err("the program's").to_string();
        let want = "pid 7: mapping 0x1000-0x3000 is not supported: it has a protection key";
        assert_eq!(error, want);
    }

    #[test]
    fn seals_are_kept_and_given_last() {
        let line = "10000-14000 r--p 00000000 00:00 0 \nVmFlags: rd mr mw me sl\n";
        let listed = crate::map::listing::parse(line.as_bytes()).expect("a list");
        let map = Mapping::of(&listed[0], 7, None).expect("it is supported");
        assert!(map.is_sealed);
        let ring = "10000-14000 rw-s 00000000 00:0f 9 anon_inode:[io_uring]\nVmFlags: rd wr sl\n";
        let listed = crate::map::listing::parse(ring.as_bytes()).expect("a list");
        let error = Mapping::of(&listed[0], 7, Some(1)).expect_err("the kernel maps it");
        assert!(
            error.to_string().ends_with("it is a ring, and sealed"),
            "{error}"
        );
    }

    #[test]
    fn what_no_dump_writes_is_refused() {
        const MADV_REMOVE: u32 = linux_raw_sys::general::MADV_REMOVE;
        const MADV_HWPOISON: u32 = linux_raw_sys::general::MADV_HWPOISON;
        const MAP_POPULATE: u32 = linux_raw_sys::general::MAP_POPULATE;
        type Change = fn(&mut Mapping);
        const PART: fn(&mut Mapping, u64, u64) = |map, offset, bytes| {
            (map.flags, map.file, map.offset) = (MAP_SHARED, Some(1), offset);
            let segment = Segment {
                bytes,
                ..Segment::default()
            };
            map.segment = Some(segment);
        };
        let changes: [(Change, &str); 9] = [
            (
                |map| PART(map, 0x1000, 0x10000),
                "a segment that it cannot be",
            ),
            (|map| PART(map, 0, 0x10001), "a segment that it cannot be"),
            (|map| PART(map, 0x1000, 0), "a segment that it cannot be"),
            (|map| map.advice = vec![14, MADV_HWPOISON], "advice 100"),
            (|map| map.advice = vec![MADV_REMOVE], "advice 9"),
            (|map| map.flags |= MAP_POPULATE, "flags 0x8022"),
            (|map| map.prot = 1 << 24, "protection 0x1000000 and lock 0"),
            (
                |map| map.guards = vec![0x1f000, 0x2000],
                "a guard region outside of it",
            ),
            (
                |map| map.guards = vec![0x1f000],
                "a guard region outside of it",
            ),
        ];
        for (change, what) in changes {
            let mut map = Mapping {
                start: 0x10000,
                end: 0x20000,
                prot: 3,
                flags: MAP_PRIVATE | MAP_ANONYMOUS,
                ..Mapping::default()
            };
            change(&mut map);
            let mappings = vec![map];
            let memory = Memory {
                mappings,
                ..Memory::default()
            };
            let error = memory.check().expect_err(what);
            let want = format!("image record memory: mapping 0x10000-0x20000 has {what}");
            assert_eq!(error.to_string(), want);
        }
    }
}
