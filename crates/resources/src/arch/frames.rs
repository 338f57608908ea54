//! Signal frames on a thread's stacks: what a handler that runs interrupted, and what the kernel
//! gives back when it returns (sigreturn(2)).
//!
//! The extended state in a frame is laid out as the processor has it, like that of the thread
//! ([`super::xstate`]). The kernel marks it: with a magic number, the size and the components in
//! the bytes that FXSAVE leaves to software, and another magic number behind it.

const MAGIC: u32 = 0x4650_5853;
const END_MAGIC: u32 = 0x4650_5845;
/// Where in an area the kernel's marks stand.
const MAGIC_AT: usize = 464;
const WHOLE_SIZE_AT: usize = 468;
const FEATURES_AT: usize = 472;
const SIZE_AT: usize = 480;
/// An area has a multiple of this as address, and at least these bytes.
const ALIGN_BYTES: usize = 64;
const LEAST_BYTES: usize = 576;
/// More than any processor has.
const MOST_BYTES: usize = 64 << 10;
/// `struct rt_sigframe`: its size; where it has the interrupted stack pointer, the code segment
/// and the address of the area, which stands above it.
const FRAME_BYTES: usize = 440;
const STACK_AT: usize = 168;
const CODE_AT: usize = 192;
const AREA_AT: usize = 232;
const CODE_64: u16 = sys::arch::CODE_64 as u16;
/// The same of 32-bit code, from the beginning of its `struct sigcontext_32`; a state as FSAVE lays
/// it out stands there, before the area.
const STACK_AT_32: usize = 28;
const CODE_AT_32: usize = 60;
const AREA_AT_32: usize = 76;
const FSAVE_BYTES: usize = 112;
/// How far before the area the context is looked for.
const REACH_BYTES_32: usize = 512;
const CODE_32: u16 = sys::arch::CODE_32 as u16;

/// What the kernel has marked an area with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Software {
    /// The components that it may have, a bit each.
    pub features: u64,
    /// Its size, without the mark behind it.
    pub size_bytes: usize,
}

impl Software {
    /// Reads the marks of the area at the beginning of `bytes`; `None` where there is no area.
    #[must_use]
    pub fn read(bytes: &[u8]) -> Option<Self> {
        if half(bytes, MAGIC_AT)? != MAGIC {
            return None;
        }
        let size_bytes = half(bytes, SIZE_AT)? as usize;
        let sound = (LEAST_BYTES..MOST_BYTES).contains(&size_bytes);
        let ends = sound && half(bytes, size_bytes)? == END_MAGIC;
        ends.then_some(Self {
            features: word(bytes, FEATURES_AT)?,
            size_bytes,
        })
    }

    /// Writes the marks. What the kernel has reserved stays.
    pub(super) fn write(self, area: &mut [u8]) {
        let size = u32::try_from(self.size_bytes).expect("below 64 KiB");
        let whole = half(area, WHOLE_SIZE_AT).unwrap_or(0).max(size + 4);
        let mut put = |at: usize, bytes: &[u8]| area[at..at + bytes.len()].copy_from_slice(bytes);
        put(MAGIC_AT, &MAGIC.to_le_bytes());
        put(WHOLE_SIZE_AT, &whole.to_le_bytes());
        put(FEATURES_AT, &self.features.to_le_bytes());
        put(SIZE_AT, &size.to_le_bytes());
        put(self.size_bytes, &END_MAGIC.to_le_bytes());
    }
}

/// A signal frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame {
    /// Where its area stands in the bytes that were searched.
    pub area_at: usize,
    /// The size of the area, with the mark behind it.
    pub area_bytes: usize,
    /// The stack pointer that it interrupted, maybe on another stack.
    pub interrupted: u64,
}

/// Finds the frames in the part of a stack from `start` on, a whole page, the innermost first.
#[must_use]
pub fn find(stack: &[u8], start: u64) -> Vec<Frame> {
    let areas = (0..stack.len()).step_by(ALIGN_BYTES);
    let frame = |at: usize| {
        let software = Software::read(&stack[at..])?;
        let interrupted =
            interrupted(stack, start, at).or_else(|| interrupted_32(stack, start, at))?;
        Some(Frame {
            area_at: at,
            area_bytes: software.size_bytes + size_of::<u32>(),
            interrupted,
        })
    };
    areas.filter_map(frame).collect()
}

/// The stack pointer in the frame whose area stands at `at`, if there is one.
fn interrupted(stack: &[u8], start: u64, at: usize) -> Option<u64> {
    let below = at.checked_sub(FRAME_BYTES)?;
    // It is aligned to 16 bytes, less 8.
    let frame = (below.saturating_sub(ALIGN_BYTES)..=below)
        .rev()
        .find(|frame| {
            let area = word(stack, frame + AREA_AT);
            let code = word(stack, frame + CODE_AT).map(|word| word as u16);
            frame % 16 == 8 && area == Some(start + at as u64) && code == Some(CODE_64)
        })?;
    word(stack, frame + STACK_AT)
}

/// The same of a frame of 32-bit code.
fn interrupted_32(stack: &[u8], start: u64, at: usize) -> Option<u64> {
    let state = at.checked_sub(FSAVE_BYTES)?;
    let address = u32::try_from(start + state as u64).ok()?;
    let lowest = state.saturating_sub(REACH_BYTES_32).next_multiple_of(4);
    let context = (lowest..state).step_by(4).find(|context| {
        let code = half(stack, context + CODE_AT_32).map(|half| half as u16);
        half(stack, context + AREA_AT_32) == Some(address) && code == Some(CODE_32)
    })?;
    half(stack, context + STACK_AT_32).map(u64::from)
}

fn word(bytes: &[u8], at: usize) -> Option<u64> {
    let bytes = bytes.get(at..at.checked_add(8)?)?;
    Some(u64::from_le_bytes(bytes.try_into().expect("8 bytes")))
}

fn half(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().expect("4 bytes")))
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: u64 = 0x7000_0000_0000;
    const AT: usize = 0x800;
    const AREA_BYTES: usize = 832;

    /// A page with a frame whose area is at `AT`.
    fn stack() -> Vec<u8> {
        let mut stack = vec![0; 4096];
        let software = Software {
            features: 7,
            size_bytes: AREA_BYTES,
        };
        software.write(&mut stack[AT..]);
        let frame = (AT - FRAME_BYTES) / 16 * 16 - 8;
        let mut put = |at: usize, word: u64| {
            stack[frame + at..frame + at + 8].copy_from_slice(&word.to_le_bytes());
        };
        put(AREA_AT, START + AT as u64);
        put(CODE_AT, 0x002b_0000_0000_0033);
        put(STACK_AT, 0x1234);
        stack
    }

    #[test]
    fn a_frame_is_found() {
        let frame = Frame {
            area_at: AT,
            area_bytes: AREA_BYTES + 4,
            interrupted: 0x1234,
        };
        assert_eq!(find(&stack(), START), [frame]);
        let software = Software::read(&stack()[AT..]).expect("marked");
        assert_eq!((software.features, software.size_bytes), (7, AREA_BYTES));
    }

    #[test]
    fn a_frame_of_32_bit_code_is_found() {
        const LOW: u64 = 0xffe4_7000;
        let mut stack = vec![0; 4096];
        let software = Software {
            features: 7,
            size_bytes: AREA_BYTES,
        };
        software.write(&mut stack[AT..]);
        let context = AT - FSAVE_BYTES - 0x80;
        let mut put = |at: usize, half: u32| {
            stack[context + at..context + at + 4].copy_from_slice(&half.to_le_bytes());
        };
        put(AREA_AT_32, (LOW as u32) + (AT - FSAVE_BYTES) as u32);
        put(CODE_AT_32, 0x23);
        put(STACK_AT_32, 0xffe4_8234);
        let found = find(&stack, LOW);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].area_at, found[0].interrupted), (AT, 0xffe4_8234));
        assert_eq!(find(&stack, LOW + 4096), []);
    }

    #[test]
    fn what_only_looks_like_one_is_none() {
        // Elsewhere; without its end; cut short; of another size than any.
        assert_eq!(find(&stack(), START + 4096), []);
        let mut ended = stack();
        ended[AT + AREA_BYTES] = 0;
        assert_eq!(find(&ended, START), []);
        assert_eq!(find(&stack()[..AT + AREA_BYTES], START), []);
        let mut endless = stack();
        endless[AT + SIZE_AT..AT + SIZE_AT + 4].fill(0xff);
        assert_eq!(find(&endless, START), []);
        assert_eq!(find(&stack()[AT..], START + AT as u64), []);
    }
}
