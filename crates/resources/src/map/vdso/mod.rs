//! The vDSO: the kernel's code in every process, and what becomes of it on another kernel.
//!
//! A program holds addresses of functions in its vDSO, so the same code must be back at the same
//! address. On a kernel with the same vDSO that is the kernel's own, mapped there ([`lay`]). On
//! another kernel the old code comes out of the image, as ordinary memory at its old address, and
//! each of its functions begins with a jump to the same function of this kernel's vDSO, which is
//! mapped elsewhere ([`proxy`]). A later dump knows such memory by its mark ([`found`]) and saves
//! it as what it stands for: an image never tells whether a task had the vDSO itself or a proxy.
//!
//! - What: vDSO
//! - Kept: at its address, also on another kernel, and that of 32-bit programs.
//! - At a restore: "this kernel's vDSO cannot be used: …": "there is none", "it is of neither 64
//!   nor 32 bits", "its symbols make no sense", "its mappings are apart", "it has no code or too
//!   much"; "what this host's own vDSO is like is not known".
//! - CRIU 4.2: the same: on another kernel, functions of the old code jump to the new one's.

pub mod elf;
pub mod found;
pub mod host;
pub mod lay;
pub mod proxy;
pub mod unwind;

use std::ops::Range;

use prost::Message;

use super::memory::{Mapping, Memory, Special};
use crate::{Error, Result};
pub use host::{Host, Part};

/// The record's number in images.
pub const TAG: u16 = 301;

/// Spaces of vDSOs have numbers from here on, which neither tasks nor objects have.
pub const FIRST_SPACE: u32 = 0xffff_0000;

/// More bytes than the code or the data of any vDSO has.
pub const BYTES_MAX: u64 = 1 << 20;

/// A vDSO in an image, one record each build id: the code holds its own table of symbols.
#[derive(Clone, PartialEq, Message)]
pub struct Vdso {
    /// The build id in its ELF notes; empty if it has none.
    #[prost(bytes = "vec", tag = "1")]
    pub build_id: Vec<u8>,
    /// Its bytes in memory from the first on, what follows them is zero; empty where they are
    /// pages of the image.
    #[prost(bytes = "vec", tag = "2")]
    pub code: Vec<u8>,
    /// The space that the bytes are the pages of: a layer has those of its parent.
    #[prost(uint32, optional, tag = "3")]
    pub space: Option<u32>,
    /// How many bytes of that space.
    #[prost(uint32, tag = "4")]
    pub len_bytes: u32,
}

/// How a task's vDSO comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// It had none.
    Absent,
    /// The kernel maps it at its address.
    Straight,
    /// The kernel maps it elsewhere and its parts are moved to their addresses.
    Moved,
    /// It was another kernel's.
    Proxied,
}

impl Way {
    /// Whether more of the host's own vDSO must be known than its build id.
    #[must_use]
    pub fn needs_host(self) -> bool {
        matches!(self, Self::Moved | Self::Proxied)
    }
}

/// The vDSO's code among a task's mappings.
#[must_use]
pub fn code_of(memory: &Memory) -> Option<&Mapping> {
    let mut all = memory.mappings.iter();
    all.find(|map| map.special() == Special::Vdso)
}

/// The bytes of vDSO data that end where its code begins.
#[must_use]
pub fn data_before(memory: &Memory) -> u64 {
    let Some(code) = code_of(memory) else {
        return 0;
    };
    let vvar = memory.mappings.iter().rev();
    let vvar = vvar.filter(|map| map.special() == Special::Vvar);
    let first = vvar.fold(
        code.start,
        |at, map| if map.end == at { map.start } else { at },
    );
    code.start.saturating_sub(first)
}

/// How the vDSO of `memory` comes back on a host whose own has the build id `own`.
#[must_use]
pub fn way(memory: &Memory, own: Option<&[u8]>) -> Way {
    let Some(code) = code_of(memory) else {
        return Way::Absent;
    };
    let known = !memory.vdso_build_id.is_empty();
    if !known || own != Some(memory.vdso_build_id.as_slice()) {
        return Way::Proxied;
    }
    let vvar = memory.mappings.iter();
    let vvar = vvar.filter(|map| map.special() == Special::Vvar);
    // What an image claims need not be in order yet.
    let bytes = vvar.map(|map| map.end.saturating_sub(map.start));
    let vvar_bytes = bytes.fold(0, u64::saturating_add);
    let whole = vvar_bytes > 0 && vvar_bytes == data_before(memory);
    if whole && !lay::is_below_stack(memory, code.end) {
        Way::Straight
    } else {
        Way::Moved
    }
}

/// Where in the vDSO of 32-bit programs calls are made, from the instruction on that makes them
/// again: `int 0x80; pop ebp; pop edx; pop ecx; ret`. In bytes from its start.
#[must_use]
pub fn calling_32(code: &[u8]) -> Option<Range<u64>> {
    const MADE: [u8; 6] = [0xcd, 0x80, 0x5d, 0x5a, 0x59, 0xc3];
    let start = function(code, "__kernel_vsyscall")?;
    let bytes = code.get(usize::try_from(start).ok()?..)?;
    let made = bytes
        .windows(MADE.len())
        .take(16)
        .position(|six| six == MADE)?;
    let start = start + made as u64;
    Some(start..start + MADE.len() as u64)
}

/// Whether code at `at` bytes in the vDSO of 32-bit programs reads no data of the kernel's: it
/// makes a call, or returns from a handler.
#[must_use]
pub fn returns_32(code: &[u8], at: u64) -> bool {
    /// None is longer.
    const BYTES: u64 = 16;
    let plain = [
        "__kernel_vsyscall",
        "__kernel_sigreturn",
        "__kernel_rt_sigreturn",
    ];
    let mut plain = plain.iter().filter_map(|name| function(code, name));
    plain.any(|start| (start..start + BYTES).contains(&at))
}

fn function(code: &[u8], name: &str) -> Option<u64> {
    let functions = elf::Elf::new(code)?.functions()?;
    let mut all = functions.iter();
    Some(all.find(|function| function.name == name)?.offset)
}

/// Checks what an image claims of a task's vDSO.
///
/// # Errors
/// [`Error::Corrupt`].
pub fn check(memory: &Memory) -> Result<()> {
    let special = memory.mappings.iter();
    let special = special.filter(|map| map.is_of_vdso());
    let bad = |what: String| Err(Error::corrupt("memory", what));
    let mut codes = 0;
    for map in special {
        if map.end.saturating_sub(map.start) > BYTES_MAX {
            return bad(format!("mapping {} is too large for a vDSO", map.span()));
        }
        codes += u32::from(map.special() == Special::Vdso);
    }
    if codes > 1 {
        return bad(format!("a task has {codes} vDSOs"));
    }
    Ok(())
}

/// Takes a record apart.
///
/// # Errors
/// [`Error::Corrupt`].
pub fn read(payload: &[u8]) -> Result<Vdso> {
    let vdso: Vdso = image::strict::decode(payload).map_err(|what| Error::corrupt("vdso", what))?;
    let len_bytes = (vdso.code.len() as u64).max(vdso.len_bytes.into());
    if len_bytes > BYTES_MAX {
        let what = format!("has {len_bytes} bytes of code");
        return Err(Error::corrupt("vdso", what));
    }
    Ok(vdso)
}

#[cfg(test)]
pub(crate) mod tests {
    use super::super::memory::{MAP_ANONYMOUS, MAP_PRIVATE};
    use super::*;

    pub(crate) fn special(start: u64, end: u64, special: Special) -> Mapping {
        Mapping {
            start,
            end,
            prot: if special == Special::Vdso { 5 } else { 1 },
            flags: MAP_PRIVATE,
            special: special as i32,
            ..Mapping::default()
        }
    }

    pub(crate) fn memory(mappings: Vec<Mapping>) -> Memory {
        Memory {
            marks: vec![0; 11],
            mappings,
            vdso_build_id: b"own".to_vec(),
            ..Memory::default()
        }
    }

    #[test]
    fn each_layout_has_its_way() {
        let (vvar, vdso) = (Special::Vvar, Special::Vdso);
        let plain = vec![
            special(0x10000, 0x14000, vvar),
            special(0x14000, 0x16000, vvar),
            special(0x16000, 0x18000, vdso),
        ];
        let own = Some(b"own".as_slice());
        assert_eq!(way(&memory(plain.clone()), own), Way::Straight);
        assert_eq!(data_before(&memory(plain.clone())), 0x6000);
        assert_eq!(way(&memory(plain.clone()), Some(b"other")), Way::Proxied);
        assert_eq!(way(&memory(plain.clone()), None), Way::Proxied);
        assert_eq!(way(&memory(Vec::new()), own), Way::Absent);
        let alone = memory(plain[2..].to_vec());
        assert_eq!(way(&alone, own), Way::Moved);
        let mut apart = memory(plain.clone());
        apart.mappings[0].start -= 0x4000;
        apart.mappings[0].end -= 0x4000;
        assert_eq!(way(&apart, own), Way::Moved);
        let mut below = plain;
        below.push(Mapping {
            start: 0x20000,
            end: 0x40000,
            prot: 3,
            flags: MAP_PRIVATE | MAP_ANONYMOUS | 0x100,
            ..Mapping::default()
        });
        assert_eq!(way(&memory(below), own), Way::Moved);
    }

    #[test]
    fn what_no_task_has_is_refused() {
        let vdso = Special::Vdso;
        let two = [special(0x1000, 0x2000, vdso), special(0x3000, 0x4000, vdso)];
        let error = check(&memory(two.to_vec())).expect_err("two of them");
        assert_eq!(error.to_string(), "image record memory: a task has 2 vDSOs");
        let huge = vec![special(0x1000, 0x1000 + BYTES_MAX + 0x1000, vdso)];
        assert!(check(&memory(huge)).is_err());
    }
}
