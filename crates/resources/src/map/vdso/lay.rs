//! The calls that bring a vDSO back, whichever kernel it was of.

use abi::{Addr, PAGE_BYTES, Span};
use syscalls::Sysno;

use super::super::memory::{Mapping, Memory};
use super::super::room::{STACK_BYTES, free};
use super::proxy::{Proxy, proxy};
use super::{Host, Part, Way, code_of, data_before};
use crate::script::{Script, Width};
use crate::{Error, Result};

const MAP_GROWSDOWN: u32 = linux_raw_sys::general::MAP_GROWSDOWN;
const PROT_READ: u32 = linux_raw_sys::general::PROT_READ;
const PROT_WRITE: u32 = linux_raw_sys::general::PROT_WRITE;
const PROT_EXEC: u32 = linux_raw_sys::general::PROT_EXEC;
const MADV_RANDOM: u32 = linux_raw_sys::general::MADV_RANDOM;

/// How near a jump of five bytes must have its target, with a margin.
const NEAR_BYTES: u64 = 1 << 30;

/// A vDSO to be brought back.
#[derive(Clone, Copy, Debug)]
pub struct Old<'a> {
    /// How.
    pub way: Way,
    /// The host's own; known where the way needs it.
    pub host: Option<&'a Host>,
    /// The code that it had; known where it is another kernel's.
    pub code: Option<&'a [u8]>,
    /// The task.
    pub pid: i32,
}

/// What the calls make.
#[derive(Debug, Default)]
pub struct Laid {
    /// The calls.
    pub script: Script,
    /// Where the host's own vDSO is put, at least for a while; nothing else may be there.
    pub host_vdso: Option<Span>,
    /// The proxy.
    pub proxy: Option<Proxy>,
}

/// Plans the calls for the vDSO of `memory`.
///
/// # Errors
/// [`Error::Corrupt`].
pub fn plan(memory: &Memory, old: &Old<'_>) -> Result<Laid> {
    super::check(memory)?;
    let mut laid = Laid::default();
    let Some(code) = code_of(memory) else {
        return Ok(laid);
    };
    match old.way {
        Way::Absent => {}
        Way::Straight => {
            let start = Addr(code.start - data_before(memory));
            map(memory, start, code.span(), &mut laid.script);
        }
        Way::Moved => moved(memory, host(old)?, &mut laid)?,
        Way::Proxied => proxied(memory, code, old, &mut laid)?,
    }
    Ok(laid)
}

fn host<'a>(old: &Old<'a>) -> Result<&'a Host> {
    let missing = || Error::Mismatch {
        what: "what this host's own vDSO is like is not known".to_owned(),
    };
    old.host.ok_or_else(missing)
}

/// Whether a stack that grows begins so soon behind `end` that the kernel would not map anything
/// up to there of its own accord.
pub(super) fn is_below_stack(memory: &Memory, end: u64) -> bool {
    let mut behind = memory.mappings.iter();
    let next = behind.find(|map| map.start >= end);
    next.is_some_and(|map| map.flags & MAP_GROWSDOWN != 0 && map.start - end < STACK_BYTES)
}

/// Has the kernel map its vDSO from `start` on and checks that the code is where it has to be:
/// only all of the code, and nothing of the data, may be given the protection that it has.
fn map(memory: &Memory, start: Addr, code: Span, script: &mut Script) {
    const ARCH_MAP_VDSO_32: u32 = abi::kernel::ARCH_MAP_VDSO_32;
    const ARCH_MAP_VDSO_64: u32 = abi::kernel::ARCH_MAP_VDSO_64;
    let what = if memory.vdso_is_32_bit {
        ARCH_MAP_VDSO_32
    } else {
        ARCH_MAP_VDSO_64
    };
    script.call(Sysno::arch_prctl, [what.into(), start.into()]);
    script.note("vDSO");
    let prot = PROT_READ | PROT_EXEC;
    let args = [code.start.into(), code.bytes().into(), prot.into()];
    script.call(Sysno::mprotect, args);
    script.note("the vDSO is where it was");
}

/// Has the host's vDSO mapped at a free place near `near`: where, and where its code is.
fn map_elsewhere(
    memory: &Memory,
    near: Addr,
    host: &Host,
    script: &mut Script,
) -> Result<(Span, Span)> {
    let host_vdso = free(memory, None, host.bytes(), near).ok_or_else(|| {
        let what = format!("leaves no {} bytes for this host's vDSO", host.bytes());
        Error::corrupt("memory", what)
    })?;
    if host_vdso.start.0.abs_diff(near.0) > NEAR_BYTES {
        log::debug!("this host's vDSO goes far away, to {host_vdso}");
    }
    let (before, bytes) = host.code();
    let code = Span::new(host_vdso.start.plus(before), bytes);
    map(memory, host_vdso.start, code, script);
    Ok((host_vdso, code))
}

/// The kernel's own vDSO, its parts moved to where the task had them; those that it had not are
/// unmapped.
fn moved(memory: &Memory, host: &Host, laid: &mut Laid) -> Result<()> {
    const MREMAP_MAYMOVE: u32 = linux_raw_sys::general::MREMAP_MAYMOVE;
    const MREMAP_FIXED: u32 = linux_raw_sys::general::MREMAP_FIXED;
    let near = memory.mappings.iter();
    let near = near.map(|map| map.start).next_back().unwrap_or_default();
    let (host_vdso, _) = map_elsewhere(memory, Addr(near), host, &mut laid.script)?;
    laid.host_vdso = Some(host_vdso);
    let mut at = host_vdso.start;
    let mut parts = Vec::new();
    for part in &host.parts {
        parts.push((at, *part));
        at = at.plus(part.bytes);
    }
    let special = memory.mappings.iter();
    for map in special.filter(|map| map.is_of_vdso()) {
        let mut to = Addr(map.start);
        for (at, part) in take(&mut parts, map)? {
            let flags = MREMAP_MAYMOVE | MREMAP_FIXED;
            let args = [
                at.into(),
                part.bytes.into(),
                part.bytes.into(),
                flags.into(),
                to.into(),
            ];
            laid.script.expect(Sysno::mremap, args, to);
            to = to.plus(part.bytes);
        }
    }
    for (at, part) in parts {
        laid.script
            .call(Sysno::munmap, [at.into(), part.bytes.into()]);
    }
    Ok(())
}

/// Takes the host's parts that a mapping is made of out of those left.
fn take(parts: &mut Vec<(Addr, Part)>, map: &Mapping) -> Result<Vec<(Addr, Part)>> {
    let wanted = map.end - map.start;
    for first in 0..parts.len() {
        let mut bytes = 0;
        let same = parts[first..].iter().take_while(|(_, part)| {
            bytes += part.bytes;
            part.special == map.special() && bytes <= wanted
        });
        let count = same.count();
        let found = parts[first..first + count].iter();
        if found.map(|(_, part)| part.bytes).sum::<u64>() == wanted {
            return Ok(parts.drain(first..first + count).collect());
        }
    }
    let what = format!("mapping {} is not part of this kernel's vDSO", map.span());
    Err(Error::corrupt("memory", what))
}

/// The old code as memory of the task's own, and the host's vDSO elsewhere.
fn proxied(memory: &Memory, code: &Mapping, old: &Old<'_>, laid: &mut Laid) -> Result<()> {
    let bytes = old.code.ok_or_else(|| {
        let what = "its vDSO is another kernel's, and the code of that is not in the image";
        Error::corrupt(format!("memory of {}", old.pid), what)
    })?;
    let span = code.span();
    if bytes.len() as u64 > span.bytes() {
        let what = format!("{} bytes of code do not fit into its vDSO", bytes.len());
        return Err(Error::corrupt(format!("memory of {}", old.pid), what));
    }
    let host = host(old)?;
    let (host_vdso, host_code) = map_elsewhere(memory, span.start, host, &mut laid.script)?;
    laid.host_vdso = Some(host_vdso);
    let data_pages = super::proxy::data_pages(data_before(memory));
    let data_bytes = u64::from(data_pages) * PAGE_BYTES;
    let proxy = proxy(bytes, span.start, data_bytes, host, host_code.start)?;
    let script = &mut laid.script;
    if data_bytes > 0 {
        let data = Span::new(Addr(span.start.0 - data_bytes), data_bytes);
        anonymous(data, PROT_READ, script);
        script.note("data of the old vDSO: zeros");
        keep_apart(data, script);
    }
    anonymous(span, PROT_READ | PROT_WRITE, script);
    script.note("the old vDSO");
    copy(&proxy.code, span.start, old.pid, script);
    let prot = PROT_READ | PROT_EXEC;
    let args = [span.start.into(), span.bytes().into(), prot.into()];
    script.call(Sysno::mprotect, args);
    keep_apart(span, script);
    laid.proxy = Some(proxy);
    Ok(())
}

fn anonymous(span: Span, prot: u32, script: &mut Script) {
    const PRIVATE_FIXED_ANONYMOUS: u32 = 0x32;
    let args = [
        span.start.into(),
        span.bytes().into(),
        prot.into(),
        PRIVATE_FIXED_ANONYMOUS.into(),
        (-1i32).into(),
    ];
    script.expect(Sysno::mmap, args, span.start);
}

/// An advice that matters to files only keeps a mapping from becoming one with its neighbour, and
/// tells a dump where to look for a mark.
fn keep_apart(span: Span, script: &mut Script) {
    let args = [span.start.into(), span.bytes().into(), MADV_RANDOM.into()];
    script.call(Sysno::madvise, args);
}

/// Copies bytes of the script's data to an address of the task.
fn copy(bytes: &[u8], to: Addr, pid: i32, script: &mut Script) {
    let data = script.bytes(bytes);
    let len = bytes.len() as u64;
    let iovec = |at: u64| [at, len].map(u64::to_le_bytes).concat();
    let local = script.bytes(&iovec(to.0));
    let remote = script.bytes(&iovec(0));
    script.fix(remote, 0, data, Width::Eight);
    let args = [
        pid.into(),
        local.into(),
        1u32.into(),
        remote.into(),
        1u32.into(),
        0u32.into(),
    ];
    script.expect(Sysno::process_vm_readv, args, len);
}

#[cfg(test)]
mod tests {
    use super::super::super::memory::Special;
    use super::super::tests::{memory, special};
    use super::*;

    const DATA: Special = Special::Vvar;
    const CODE: Special = Special::Vdso;

    fn host() -> Host {
        let part = |special, bytes| Part { special, bytes };
        Host {
            parts: vec![part(DATA, 0x4000), part(DATA, 0x2000), part(CODE, 0x2000)],
            ..Host::default()
        }
    }

    fn old<'a>(way: Way, host: &'a Host, code: Option<&'a [u8]>) -> Old<'a> {
        Old {
            way,
            host: Some(host),
            code,
            pid: 7,
        }
    }

    #[test]
    fn the_same_vdso_is_mapped_at_its_address() {
        let memory = memory(vec![
            special(0x10_0000, 0x10_4000, DATA),
            special(0x10_4000, 0x10_6000, CODE),
        ]);
        let host = host();
        let laid = plan(&memory, &old(Way::Straight, &host, None)).expect("plans");
        let want = "arch_prctl(ARCH_MAP_VDSO_64, addr=0x100000)  # vDSO\n\
                    mprotect(addr=0x104000, len=8192, prot=READ|EXEC)  \
                    # the vDSO is where it was\n";
        assert_eq!(laid.script.to_string(), want);
        let compat = Memory {
            vdso_is_32_bit: true,
            ..memory
        };
        let laid = plan(&compat, &old(Way::Straight, &host, None)).expect("plans");
        let text = laid.script.to_string();
        assert!(
            text.starts_with("arch_prctl(ARCH_MAP_VDSO_32, addr=0x100000)"),
            "{text}"
        );
    }

    #[test]
    fn parts_go_where_they_were_and_others_away() {
        let memory = memory(vec![
            special(0x50_0000, 0x50_2000, CODE),
            special(0x60_0000, 0x60_4000, DATA),
        ]);
        let host = host();
        let laid = plan(&memory, &old(Way::Moved, &host, None)).expect("plans");
        let want = "arch_prctl(ARCH_MAP_VDSO_64, addr=0x605000)  # vDSO\n\
            mprotect(addr=0x60b000, len=8192, prot=READ|EXEC)  # the vDSO is where it was\n\
            mremap(old=0x60b000, old_len=8192, new_len=8192, flags=0x3, new=0x500000) = 0x500000\n\
            mremap(old=0x605000, old_len=16384, new_len=16384, flags=0x3, new=0x600000) = 0x600000\n\
            munmap(addr=0x609000, len=8192)\n";
        assert_eq!(laid.script.to_string(), want);
    }

    #[test]
    fn data_that_was_one_mapping_may_be_two_here() {
        let memory = memory(vec![
            special(0x50_0000, 0x50_2000, CODE),
            special(0x60_0000, 0x60_6000, DATA),
        ]);
        let host = host();
        let laid = plan(&memory, &old(Way::Moved, &host, None)).expect("plans");
        let moves = laid.script.steps.iter();
        assert_eq!(moves.filter(|step| step.call == Sysno::mremap).count(), 3);
        let strange = self::memory(vec![special(0x50_0000, 0x50_3000, CODE)]);
        assert!(plan(&strange, &old(Way::Moved, &host, None)).is_err());
    }

    #[test]
    fn another_vdso_is_memory_that_jumps() {
        let code = sys::vdso::own().expect("a vDSO");
        let end = 0x7f00_0000_4000 + code.len() as u64;
        let memory = memory(vec![
            special(0x7f00_0000_0000, 0x7f00_0000_4000, DATA),
            special(0x7f00_0000_4000, end, CODE),
        ]);
        let host = Host::probe().expect("a vDSO");
        let laid = plan(&memory, &old(Way::Proxied, &host, Some(code))).expect("plans");
        let calls = laid.script.steps.iter().map(|step| step.call);
        let want = [
            Sysno::arch_prctl,
            Sysno::mprotect,
            Sysno::mmap,
            Sysno::madvise,
            Sysno::mmap,
            Sysno::process_vm_readv,
            Sysno::mprotect,
            Sysno::madvise,
        ];
        assert_eq!(calls.collect::<Vec<_>>(), want);
        let host_vdso = laid.host_vdso.expect("laid");
        assert!(
            host_vdso.start.0 > end && host_vdso.start.0 - end < NEAR_BYTES,
            "{host_vdso}"
        );
        assert!(laid.proxy.is_some());
    }

    #[test]
    fn a_proxy_without_code_is_refused() {
        let memory = memory(vec![special(0x50_0000, 0x50_2000, CODE)]);
        let host = host();
        for code in [None, Some([0u8; 0x3000].as_slice())] {
            assert!(plan(&memory, &old(Way::Proxied, &host, code)).is_err());
        }
    }
}
