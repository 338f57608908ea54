//! The layout of the processor's extended state (x87, SSE, AVX, …): Intel's manual, volume 1,
//! chapter 13; CPUID leaf 13.

use std::arch::x86_64::{__cpuid_count, CpuidResult};
use std::sync::OnceLock;

/// The CPUID leaf that tells of extended state.
const LEAF: u32 = 13;

/// Where a component of the extended state stands in its unpacked form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// From the beginning of the area, in bytes.
    pub offset_bytes: u32,
    /// Its size in bytes.
    pub size_bytes: u32,
}

/// Tells where this processor keeps component `number`, one of [`features`] from 2 on.
#[must_use]
pub fn place(number: u32) -> Option<Place> {
    if !(2..63).contains(&number) || features() & 1 << number == 0 {
        return None;
    }
    #[allow(
        unused_unsafe,
        reason = "whether it is safe depends on the compiler's version"
    )]
    // SAFETY: every 64-bit processor has the instruction, and this leaf where `features` is not 0.
    let told = unsafe { __cpuid_count(LEAF, number) };
    Some(Place {
        offset_bytes: told.ebx,
        size_bytes: told.eax,
    })
}

/// Where the rights of protection keys stand (PKRU, component 9), if the processor has them. Looked
/// at once.
#[must_use]
pub fn keys() -> Option<Place> {
    static KEYS: OnceLock<Option<Place>> = OnceLock::new();
    *KEYS.get_or_init(|| place(9))
}

/// The components that the kernel has switched on, a bit each (XCR0); 0 without XSAVE. Looked at
/// once: a hypervisor may take its time.
#[must_use]
pub fn features() -> u64 {
    static FEATURES: OnceLock<u64> = OnceLock::new();
    *FEATURES.get_or_init(read_xcr0)
}

fn read_xcr0() -> u64 {
    /// The bit of leaf 1 that says that the kernel has enabled XSAVE.
    const OSXSAVE: u32 = 1 << 27;
    if cpuid(1, 0).ecx & OSXSAVE == 0 {
        return 0;
    }
    let (low, high): (u32, u32);
    // SAFETY: the kernel has enabled XSAVE, as was just asked; the instruction only reads.
    unsafe {
        std::arch::asm!("xgetbv", in("ecx") 0, out("eax") low, out("edx") high,
            options(nomem, nostack, preserves_flags));
    }
    u64::from(high) << 32 | u64::from(low)
}

fn cpuid(leaf: u32, part: u32) -> CpuidResult {
    #[allow(
        unused_unsafe,
        reason = "whether it is safe depends on the compiler's version"
    )]
    // SAFETY: every 64-bit processor has the instruction.
    unsafe {
        __cpuid_count(leaf, part)
    }
}

/// The bits that the SSE control register may have on this processor (`MXCSR_MASK`).
#[must_use]
pub fn control_bits() -> u32 {
    /// Where the mask stands, and what it is on processors that say 0.
    const AT: usize = 28;
    const OLDEST: u32 = 0xffbf;
    #[repr(C, align(16))]
    struct Area([u8; 512]);
    let mut area = Area([0; 512]);
    // SAFETY: every 64-bit processor has the instruction; the area has its size and alignment.
    unsafe { std::arch::x86_64::_fxsave64(area.0.as_mut_ptr()) };
    match u32::from_le_bytes(area.0[AT..AT + 4].try_into().expect("4 bytes")) {
        0 => OLDEST,
        mask => mask,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_as_the_processor_saves() {
        let has = |number: u32| features() & 1 << number != 0;
        for number in 2..20 {
            let place = place(number);
            assert_eq!(place.is_some(), has(number), "{number}");
            if let Some(Place { offset_bytes, .. }) = place {
                assert!(offset_bytes >= 576, "{number} is behind the header");
            }
        }
        if has(2) {
            let upper_halves = Place {
                offset_bytes: 576,
                size_bytes: 256,
            };
            assert_eq!(place(2), Some(upper_halves));
        }
        assert_eq!(place(1), None);
        assert_eq!(control_bits() & 0xffbf, 0xffbf);
    }
}
