//! Old code with new entries: each function of another kernel's vDSO jumps to this kernel's.
//!
//! Only the first bytes of each function are written over. The rest stays as it was, so that a
//! thread which a signal interrupted in the middle of it can finish: the data before the code reads
//! as zeros, which to every version of that code means that it has to ask by a system call.

use std::collections::BTreeMap;
use std::ops::Range;

use abi::Addr;

use super::elf::Elf;
use super::{Host, found};
use crate::arch::stubs::{call, call_32, jump, jump_32};
use crate::{Error, Result};

/// Code that is to stand at an old vDSO's address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proxy {
    /// The bytes, with the mark.
    pub code: Vec<u8>,
    /// What was written over, in bytes from the start, in order.
    pub entries: Vec<Range<u64>>,
}

/// What 32-bit code returns to from handlers: the same on all kernels, and known by its bytes.
const RETURNS: [&str; 2] = ["__kernel_sigreturn", "__kernel_rt_sigreturn"];

/// Nothing of an ELF header is written over.
const HEADER_BYTES: u64 = 64;

/// Makes a proxy of `code`, which is to stand at `at` with `data_bytes` of data before it, for the
/// host's vDSO whose code is at `host_code`.
///
/// # Errors
/// [`Error::Corrupt`] when the code is not a vDSO's, or a function of it has no room for a jump.
pub fn proxy(
    code: &[u8],
    at: Addr,
    data_bytes: u64,
    host: &Host,
    host_code: Addr,
) -> Result<Proxy> {
    let bad = |what: String| Error::corrupt("vdso", what);
    let elf = Elf::new(code).ok_or_else(|| bad("its code is no ELF file".to_owned()))?;
    let functions = elf.functions();
    let functions = functions.ok_or_else(|| bad("its symbols make no sense".to_owned()))?;
    let mut names = BTreeMap::<u64, Vec<&str>>::new();
    for function in &functions {
        names
            .entry(function.offset)
            .or_default()
            .push(&function.name);
    }
    let mut proxy = Proxy {
        code: code.to_vec(),
        entries: Vec::new(),
    };
    let ends = names.keys().skip(1).copied().chain([code.len() as u64]);
    for ((offset, names), end) in names.iter().zip(ends) {
        if names.iter().any(|name| RETURNS.contains(name)) {
            continue;
        }
        let room_bytes = end - offset;
        let target = names.iter().find_map(|name| host.function(name));
        let (from, to) = (
            at.plus(*offset),
            target.map(|target| host_code.plus(target)),
        );
        let patch = match (to, elf.is_32_bit()) {
            (Some(to), false) => jump(from, to, room_bytes),
            (Some(to), true) => jump_32(from, to),
            (None, false) => call(names),
            (None, true) => call_32(names),
        };
        let end = offset + patch.len() as u64;
        if *offset < HEADER_BYTES || patch.len() as u64 > room_bytes {
            return Err(bad(format!("function {} has no room for a jump", names[0])));
        }
        proxy.code[*offset as usize..end as usize].copy_from_slice(&patch);
        proxy.entries.push(*offset..end);
    }
    found::mark(&mut proxy.code, data_pages(data_bytes));
    Ok(proxy)
}

/// The pages of data that a mark can tell of; more than any kernel has are none.
#[must_use]
pub fn data_pages(data_bytes: u64) -> u8 {
    u8::try_from(data_bytes / abi::PAGE_BYTES).unwrap_or(0)
}

impl Proxy {
    /// Whether a thread that goes on at `offset` bytes from the start would do so in the middle of
    /// what was written over.
    #[must_use]
    pub fn splits(&self, offset: u64) -> bool {
        let mut entries = self.entries.iter();
        entries.any(|entry| entry.start < offset && offset < entry.end)
    }
}

#[cfg(test)]
mod tests {
    use super::super::elf::Function;
    use super::*;

    const AT: Addr = Addr(0x7fff_0000_0000);

    fn near(host: &Host) -> Result<Proxy> {
        let own = sys::vdso::own().expect("a vDSO");
        proxy(own, AT, 0x4000, host, AT.plus(0x10_0000))
    }

    #[test]
    fn functions_jump_to_the_hosts() {
        let host = Host::probe().expect("a vDSO");
        let proxy = near(&host).expect("a proxy");
        let own = sys::vdso::own().expect("a vDSO");
        let offset = host.function("__vdso_gettimeofday").expect("there");
        let at = offset as usize;
        let rel = proxy.code[at + 1..at + 5].try_into().expect("four bytes");
        assert_eq!(proxy.code[at], 0xe9);
        assert_eq!(i32::from_le_bytes(rel), 0x10_0000 - 5);
        assert!(proxy.splits(offset + 1) && !proxy.splits(offset) && !proxy.splits(offset + 5));
        // All else is as it was, but for the mark.
        let mut same = proxy.code.clone();
        for entry in &proxy.entries {
            let entry = entry.start as usize..entry.end as usize;
            same[entry.clone()].copy_from_slice(&own[entry]);
        }
        assert_eq!(found::marked(&same), Some(4));
        found::unmark(&mut same);
        assert!(same == own);
    }

    #[test]
    fn a_far_host_is_reached_by_a_longer_jump() {
        let host = Host::probe().expect("a vDSO");
        let own = sys::vdso::own().expect("a vDSO");
        let to = Addr(0x10_0000);
        let proxy = proxy(own, AT, 0, &host, to).expect("a proxy");
        let offset = host.function("__vdso_gettimeofday").expect("there");
        let code = &proxy.code[offset as usize..][..14];
        assert_eq!(code[..6], [0xff, 0x25, 0, 0, 0, 0]);
        assert_eq!(code[6..], to.plus(offset).0.to_le_bytes());
    }

    #[test]
    fn functions_of_32_bit_code_jump_as_well() {
        let Ok(seen) = sys::vdso_32::look() else {
            return;
        };
        let host = Host::probe_32().expect("looked at").expect("there is one");
        let (at, to) = (Addr(0xf7f8_7000), Addr(0x4000_0000));
        let proxy = proxy(&seen.code, at, 0x6000, &host, to).expect("a proxy");
        let offset = host.function("__kernel_vsyscall").expect("there");
        let entry = &proxy.code[offset as usize..][..5];
        let distance = to.0.wrapping_sub(at.0 + 5) as u32;
        assert_eq!((entry[0], &entry[1..]), (0xe9, &distance.to_le_bytes()[..]));
        for name in RETURNS {
            let offset = host.function(name).expect("there") as usize;
            assert_eq!(
                proxy.code[offset..offset + 8],
                seen.code[offset..offset + 8]
            );
        }
        let lacking = Host::default();
        let proxy = super::proxy(&seen.code, at, 0x6000, &lacking, to).expect("a proxy");
        let offset = host.function("__vdso_clock_gettime64").expect("there") as usize;
        let code = &proxy.code[offset..];
        assert_eq!(code[13..20], [0xb8, 0x93, 1, 0, 0, 0xcd, 0x80]);
    }

    #[test]
    fn what_the_host_lacks_is_a_system_call() {
        let lacking = Host::default();
        let proxy = near(&lacking).expect("a proxy");
        let own = Host::probe().expect("a vDSO");
        let at = own.function("__vdso_getcpu").expect("there") as usize;
        assert_eq!(proxy.code[at..at + 8], [0xb8, 0x35, 1, 0, 0, 0x0f, 5, 0xc3]);
    }

    #[test]
    fn another_name_of_a_function_is_the_function() {
        let own = Host::probe().expect("a vDSO");
        let only = |name: &str| Host {
            functions: vec![Function {
                name: name.to_owned(),
                offset: 0x123,
            }],
            ..own.clone()
        };
        let proxy = near(&only("clock_gettime")).expect("a proxy");
        let at = own.function("__vdso_clock_gettime").expect("there") as usize;
        assert_eq!(proxy.code[at], 0xe9);
    }

    #[test]
    fn code_without_room_is_refused() {
        let host = Host::probe().expect("a vDSO");
        let own = sys::vdso::own().expect("a vDSO");
        let cut = &own[..host.function("__vdso_getcpu").expect("there") as usize + 3];
        assert!(proxy(cut, AT, 0, &host, AT.plus(0x1000)).is_err());
        for wrong in [&own[..10], &[0xff; 4096][..]] {
            let error = proxy(wrong, AT, 0, &host, AT).expect_err("refused");
            assert_eq!(
                error.to_string(),
                "image record vdso: its code is no ELF file"
            );
        }
    }
}
