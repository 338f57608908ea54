//! A process's address space: the record in an image; see [`super::layout`] for what becomes of it.

use abi::{Addr, PAGE_BYTES, Span};
use prost::Message;

use super::listing::{Backing, Listed};
use crate::{Error, Result};

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
    /// `MAP_DROPPABLE`.
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
}

const MAP_SHARED: u32 = 0x01;
pub(super) const MAP_PRIVATE: u32 = 0x02;
const MAP_DROPPABLE: u32 = 0x08;
pub(super) const MAP_ANONYMOUS: u32 = 0x20;
const MAP_GROWSDOWN: u32 = 0x100;
const MAP_NORESERVE: u32 = 0x4000;

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

/// `VmFlags` codes of mappings that cannot be made again, and why.
const REFUSED: [(&[u8; 2], &str); 6] = [
    (b"io", "device memory"),
    (b"pf", "device memory"),
    (b"ht", "huge page mapping (hugetlbfs)"),
    (b"um", "registered with a userfaultfd"),
    (b"uw", "registered with a userfaultfd"),
    (b"ss", "shadow stack"),
];

impl Memory {
    /// Checks what an image claims: mappings are sorted, disjoint and of whole pages, and each has
    /// a file or none as its flags say.
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
            if map.file.is_some() == map.is_anonymous() && map.special() == Special::No {
                let span = map.span();
                return bad(format!("mapping {span} has no file or one too many"));
            }
            last = map.end;
        }
        if self.marks.len() != 11 {
            return bad(format!("{} marks instead of 11", self.marks.len()));
        }
        Ok(())
    }
}

impl Mapping {
    /// The addresses.
    #[must_use]
    pub fn span(&self) -> Span {
        Span {
            start: Addr(self.start),
            end: Addr(self.end),
        }
    }

    /// Whether writes stay in this process.
    #[must_use]
    pub fn is_private(&self) -> bool {
        self.flags & MAP_SHARED == 0 && self.special() == Special::No
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
        if let Some((_, why)) = REFUSED.iter().find(|(code, _)| refuses(listed, code)) {
            return Err(Error::unsupported(
                pid,
                format!("{}: {why}", listed.place()),
            ));
        }
        let special = match listed.backing() {
            Backing::Vdso => Special::Vdso,
            Backing::Vvar => Special::Vvar,
            Backing::Special => return Err(Error::unsupported(pid, listed.place())),
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
            locked: match (listed.has(b"lo"), listed.has(b"lf")) {
                (true, true) => 2,
                (true, false) => 1,
                _ => 0,
            },
            name: name.unwrap_or_default().to_vec(),
            guards: Vec::new(),
        })
    }

    /// Whether a child's mapping can keep what it inherited of its parent's `early` one.
    pub(super) fn inherits(&self, early: &Self) -> bool {
        let place = |map: &Self| map.offset.wrapping_sub(map.start);
        let kind = MAP_ANONYMOUS | MAP_GROWSDOWN | MAP_DROPPABLE | MAP_NORESERVE;
        self.is_private()
            && early.is_private()
            && early.start <= self.start
            && self.end <= early.end
            && self.flags & kind == early.flags & kind
            && self.file == early.file
            && (self.is_anonymous() || place(self) == place(early))
            && self.name == early.name
    }
}

/// The kernel itself sets "dd" and "wf" on droppable mappings and "dd" on its own.
fn implied(listed: &Listed, code: &[u8; 2]) -> bool {
    let kernel = matches!(listed.backing(), Backing::Vdso | Backing::Vvar);
    kernel || (listed.has(b"dp") && (code == b"dd" || code == b"wf"))
}

fn refuses(listed: &Listed, code: &[u8; 2]) -> bool {
    let kernel = matches!(listed.backing(), Backing::Vdso | Backing::Vvar);
    !kernel && listed.has(code)
}
